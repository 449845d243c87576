"""Preference training in other tools' files: the method that they mean, refused losses, keys that only together mean something."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from finetune.config.methods import METHODS, Method
from finetune.convert.rules import convert_number, read_section
from finetune.convert.tool_keys import Tool
from finetune.convert.tool_rules import Conversion, shorten
from finetune.recipe.keys import keys_of
from finetune.recipe.other_preferences import MEAN_OF_MEANS, NO_DROPOUT

AXOLOTL_METHODS = {"dpo": "dpo", "ipo": "dpo", "orpo": "orpo", "kto": "kto", "simpo": "simpo"}
PAIR_LOSSES = ("sigmoid", "hinge", "ipo")
TRL_SIGNS = (
    "beta", "loss_type", "max_prompt_length", "precompute_ref_log_probs", "ref_model", "desirable_weight",
    "undesirable_weight", "rpo_alpha", "simpo_gamma", "cpo_alpha", "loss_weights",
)  # fmt: skip
SFT_LOSSES = (None, "nll", "chunked_nll", "dft")
TRL_NAMES = ("kto", "orpo", "dpo", "simpo")  # of trainers, in the names of files and folders
# Where our default differs, by what the tool's own preference trainer takes.
PREFERENCE_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "TRL": {"learning_rate": 1e-6},
    "Axolotl": {"overlength": "drop"},
    "LLaMA-Factory": {},
    "torchtune": {},
    "Automodel": {},
}
WITHOUT_DROPOUT = ("TRL", "Axolotl", "LLaMA-Factory")  # disable_dropout is the default of TRL's trainers
WHOLE_ROW = "the cross entropy is over prompt and answer there, over the answer here"
CPO_SIMPO = "the cross entropy of the chosen answers is added there (CPO-SimPO); not here"
KTO_ROWS = "the KL term is estimated on the answers of a batch there, here on each row's successor in the data"
NOT_SAID = "the file does not say which trainer reads it; for ORPO set method: orpo, for KTO kto"

Found = tuple[str, str, bool]  # as in finetune/convert/recognize.py


def find_method(tool: Tool, theirs: Mapping[str, Any], source: Path) -> str:
    """Our `method` for a file; `sft` where it is no preference training."""
    match tool:
        case "Axolotl":
            return AXOLOTL_METHODS.get(str(theirs.get("rl")), "sft")
        case "LLaMA-Factory":
            loss, stage = theirs.get("pref_loss"), theirs.get("stage")
            return (
                "kto" if stage == "kto" else "sft" if stage != "dpo" else loss if loss in ("orpo", "simpo") else "dpo"
            )
        case "torchtune":
            return "dpo" if str(read_section(theirs, "loss").get("_component_")).endswith("DPOLoss") else "sft"
        case "TRL":
            return _find_trl_method(theirs, source)
        case _:
            return "sft"


def _find_trl_method(theirs: Mapping[str, Any], source: Path) -> str:
    """TRL's files name no trainer: their keys do, else the name of the file or its folder (recipes/x/orpo/config.yaml)."""
    if "desirable_weight" in theirs or "undesirable_weight" in theirs:
        return "kto"
    if "simpo" in _losses("TRL", theirs) or "simpo_gamma" in theirs:
        return "simpo"
    if not any(key in theirs for key in TRL_SIGNS) or (
        "beta" not in theirs and theirs.get("loss_type") in SFT_LOSSES[1:]
    ):
        return "sft"
    return _find_name(source) or "dpo"


def _find_name(source: Path) -> str | None:
    words = {source.resolve().parent.name.lower(), *re.split(r"[^a-z]+", source.stem.lower())}
    return next((name for name in TRL_NAMES if name in words), None)


def find_unsupported_losses(tool: Tool, theirs: Mapping[str, Any], source: Path) -> Iterator[Found]:
    """The losses of a preference file that nothing here computes."""
    if find_method(tool, theirs, source) == "sft":
        return
    losses = _losses(tool, theirs)
    key = {"Axolotl": "dpo_loss_type", "LLaMA-Factory": "pref_loss"}.get(tool, "loss_type")
    known = (*PAIR_LOSSES, "sft", "kto", "orpo", "simpo")
    for name in losses:
        if name not in known:
            yield f"{key}: {name}", f"another loss ({name.upper()})", True
    pairs = [name for name in losses if name != "sft"]
    if len(pairs) > 1 or any(losses[name] != 1 for name in pairs):
        yield f"{key}: {shorten(list(losses))}", "several losses at once", True
    if "cpo_alpha" in theirs and tool == "TRL" and "simpo" not in losses:
        yield f"cpo_alpha: {theirs['cpo_alpha']}", "another loss (CPO)", True
    divergence = str(theirs.get("f_divergence_type", "reverse_kl"))
    if divergence.lower() != "reverse_kl":
        yield f"f_divergence_type: {divergence}", f"another loss ({divergence.upper()})", True


def _losses(tool: Tool, theirs: Mapping[str, Any]) -> dict[str, Any]:
    """The losses that a file names, with their weights.

    >>> _losses("TRL", {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.2]})
    {'sigmoid': 1.0, 'sft': 0.2}
    """
    keys = {"Axolotl": ("dpo_loss_type", "dpo_loss_weights"), "LLaMA-Factory": ("pref_loss", "")}
    names_key, weights_key = keys.get(tool, ("loss_type", "loss_weights"))
    names = theirs.get(names_key) or []
    names = names if isinstance(names, list) else [names]
    weights = theirs.get(weights_key) or [1.0] * len(names)
    if not isinstance(weights, list) or len(weights) != len(names):
        weights = [None] * len(names)  # which no loss here has
    return dict(zip(map(str, names), map(convert_number, weights), strict=False))


def adapt_preferences(method: str, theirs: Mapping[str, Any], source: Path, found: Conversion) -> None:
    """Adds the method of a file to the recipe, with what several of its keys together mean."""
    tool, recipe = found.tool, found.recipe
    if method == "sft":
        _drop_unused("sft", found)
        losses = _losses("TRL", theirs) if tool == "TRL" else {}
        if losses.keys() - {str(name) for name in SFT_LOSSES}:
            found.add_difference("loss_type", theirs["loss_type"], "of supervised fine-tuning nll is the only one")
        return
    recipe["method"] = method
    losses = _losses(tool, theirs)
    named = next((name for name in losses if name in PAIR_LOSSES), None)
    if method == "dpo" and (named or theirs.get("rl") == "ipo"):
        recipe["loss_type"] = named or "ipo"
    if "sft" in losses:
        recipe["rpo_alpha"] = losses["sft"]
    if tool == "Axolotl" and method == "orpo" and theirs.get("orpo_alpha") is not None:
        recipe.setdefault("beta", convert_number(theirs["orpo_alpha"]))
    if tool == "TRL" and method == "dpo" and not losses and _find_name(source) is None:
        found.remarks.append(f"method: dpo   ({NOT_SAID})")
    _list_differences(method, theirs, found)
    if tool in WITHOUT_DROPOUT and theirs.get("disable_dropout", True) and recipe.get("lora_dropout", 0) != 0:
        found.remarks.append(f"lora_dropout: {recipe['lora_dropout']}   ({NO_DROPOUT})")
    if tool in WITHOUT_DROPOUT and theirs.get("disable_dropout", True):
        recipe["lora_dropout"] = 0.0
    if theirs.get("label_smoothing_factor") is not None and "label_smoothing" not in theirs:
        recipe.pop("label_smoothing", None)  # read by the Trainer's own loss only
        found.ignored.append("label_smoothing_factor")
    for key, value in PREFERENCE_DEFAULTS[tool].items():
        recipe.setdefault(key, value)
    for key in ("assistant_only_loss", "packing"):
        if key in recipe and not (key == "packing" and recipe[key] is False):
            del recipe[key]  # only answers are compared; no tool packs pairs
    _drop_unused(method, found)


def _list_differences(method: str, theirs: Mapping[str, Any], found: Conversion) -> None:
    """What the tool's trainer for `method` does otherwise."""
    tool, on_trl = found.tool, found.tool in ("TRL", "Axolotl")
    if method == "simpo" and on_trl and theirs.get("cpo_alpha", 1.0) != 0:
        found.add_difference("cpo_alpha", theirs.get("cpo_alpha", 1.0), CPO_SIMPO)
    if method == "orpo" and on_trl:
        found.add_difference("rl" if tool == "Axolotl" else "method", "orpo", WHOLE_ROW)
    if method == "orpo" and tool == "LLaMA-Factory":
        found.remarks.append(f"pref_loss: orpo   ({MEAN_OF_MEANS})")
    if method == "kto":
        found.remarks.append(f"kto   ({KTO_ROWS})")
    if theirs.get("pref_ftx") and method != "dpo":
        found.add_difference("pref_ftx", theirs["pref_ftx"], f"no cross entropy is added under method: {method}")
    if theirs.get("truncation_mode") == "keep_end":
        found.add_difference("truncation_mode", "keep_end", "a side of over max_length tokens loses its end here")
    reference = read_section(theirs, "ref_checkpointer").get("checkpoint_dir")
    if reference and reference != read_section(theirs, "checkpointer").get("checkpoint_dir"):
        note = "the reference is the model before training"
        found.add_difference("ref_checkpointer.checkpoint_dir", reference, note, "another reference model")


def _drop_unused(method: str, found: Conversion) -> None:
    """Removes keys of other methods, which have no effect there either."""
    for key in keys_of(Method).keys() & found.recipe.keys() - {"method", *METHODS[method].keys}:
        del found.recipe[key]
        found.ignored.append(key)
    if "label_smoothing" not in METHODS[method].keys and found.recipe.pop("label_smoothing", None):
        found.ignored.append("label_smoothing")
