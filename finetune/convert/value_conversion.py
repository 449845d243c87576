"""What a conversion collects, and how single values of another tool become ours, kind by kind."""

import fnmatch
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

from finetune.config.methods import DEFAULT_METHOD, METHODS, MethodFacts
from finetune.config.optimization import convert_optimizer
from finetune.config.schema import recipe_keys
from finetune.constants import ALL_LINEAR
from finetune.convert.counterparts import Counterpart, Tool, ToolFile
from finetune.convert.foreign_values import convert_number, read_number, shorten


@dataclass(slots=True)
class Conversion:
    """The recipe made from a file of `tool`, and what to report about it."""

    tool: Tool
    is_factory_v1: bool = False  # of LLaMA-Factory's v1 schema
    recipe: dict[str, Any] = field(default_factory=dict)
    # what this recipe does otherwise, or not at all
    differences: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)  # converted, but worth a look
    ignored: list[str] = field(default_factory=list)  # keys without effect here
    # what must be set or written before the recipe can train
    to_do: list[str] = field(default_factory=list)
    # the text of one to write beside the recipe, where no shipped one does it
    accelerate_file: str | None = None
    images: str | None = None  # the model_type of the whole model, where the file trains on images
    # layers that the file itself leaves without adapters
    excluded_layers: frozenset[str] = frozenset()
    # those behind some of the differences
    missing_capabilities: list[str] = field(default_factory=list)

    def add_difference(self, key: str, value: Any, note: str, missing_capability: str = "") -> None:
        """Reports that their `key: value` works differently here, or needs a capability that is
        missing.
        """
        if missing_capability and missing_capability not in self.missing_capabilities:
            self.missing_capabilities.append(missing_capability)
        line = f"{key}: {shorten(value)}"
        end = f"   ({note})"
        same = next((i for i, other in enumerate(self.differences) if other.endswith(end)), None)
        if same is None:
            self.differences.append(line + end)
        else:  # one reason, one line
            self.differences[same] = f"{self.differences[same].removesuffix(end)}, {line}{end}"

    def add_remark(self, key: str, value: Any, note: str) -> None:
        """Reports that their `key: value` is converted, but worth a look."""
        self.remarks.append(f"{key}: {shorten(value)}   ({note})")


SCHEDULES = {
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
    "linear": "linear",
    "constant": "constant",
    "wsd": "warmup_stable_decay",
    "constant_with_warmup": "constant",
    "get_cosine_schedule_with_warmup": "cosine",
    "polynomial": "polynomial",
    "inverse_sqrt": "inverse_sqrt",
    "warmup_stable_decay": "warmup_stable_decay",
}
NO_TRACKER = ("none", "", "all", "no", "false", "disklogger", "stdoutlogger")
TRACKERS = ("tensorboard", "wandb", "mlflow", "trackio")
ATTENTION = {
    **dict.fromkeys(("fa2", "flash_attn"), "flash_attention_2"),
    "sdpa": "sdpa",
    "disabled": "eager",
    "auto": "auto",
}
OVERLENGTH = {
    "drop": "drop",
    "delete": "drop",
    "truncate": "truncate",
    "right": "truncate",
    "split": "split",
    "raise": "error",
}
DTYPES = {"bfloat16": "bfloat16", "bf16": "bfloat16", "float32": "float32", "fp32": "float32"}
TORCHTUNE_LAYERS = {"output_proj": "o_proj"}
LINEAR_LAYERS = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj"), "self_attn"),
    **dict.fromkeys(("gate_proj", "up_proj", "down_proj"), "mlp"),
}

ALL_LAYERS = ("all", ALL_LINEAR, "*", "*_proj", "linear")  # names of all of them
# of the names of a model's layers
STARTS = ("", "model.", "model.language_model.", "model.text_model.")
SOME_LAYERS = (0, 1, 17)  # of any number of digits
STRATEGIES = {"eval_strategy": ("no", "epoch"), "save_strategy": ("no", "epoch", "best")}

LEAVE: Any = object()  # the default here does what they ask for


def find_method_facts(recipe: Mapping[str, Any]) -> MethodFacts:
    """Returns what is known of a recipe's method; sft's for a name that our reader will refuse."""
    return METHODS.get(str(recipe.get("method")), METHODS[DEFAULT_METHOD])


def read_section(settings: ToolFile, key: str) -> dict[str, Any]:
    """Returns the mapping under `key`; an empty one where there is none."""
    section = settings.get(key)
    return section if isinstance(section, dict) else {}


def convert_names(value: Any) -> list[str] | None:
    """Returns a list of names, which may be written with commas between them.

    >>> convert_names("<a>, <b>"), convert_names(["<a>"]), convert_names(3)
    (['<a>', '<b>'], ['<a>'], None)
    """
    names = value.split(",") if isinstance(value, str) else value
    if isinstance(names, list):
        return [str(name).strip() for name in names]
    return None


def convert_targets(value: Any) -> Any:
    """Returns our names of the layers that get adapters; patterns are matched with the layers of a
    Llama.

    >>> convert_targets(["*.q_proj", "output_proj"])
    ['q_proj', 'o_proj']
    >>> convert_targets(r"model.layers.[\\d]+.mlp.(up|down)_proj")
    ['up_proj', 'down_proj']
    >>> convert_targets(["all-linear", "q_proj", "lm_head"])
    ['all-linear', 'lm_head']
    """
    if not isinstance(value, str | list):
        return None
    names = convert_names(value) or []
    names = [TORCHTUNE_LAYERS.get(name, name) for name in names]
    is_all = any(name in ALL_LAYERS for name in names)
    plain: list[str] = []
    for name in names:
        plain += [name] if re.fullmatch(r"[\w.]+", name) else _matching_layers(name)
    if is_all:
        others = [name for name in plain if name not in (*ALL_LAYERS, *LINEAR_LAYERS)]
        return [ALL_LINEAR, *dict.fromkeys(others)] if others else ALL_LINEAR
    return list(dict.fromkeys(plain)) or None


def _matching_layers(pattern: str) -> list[str]:
    """Lists the linear layers of a Llama whose dotted names match a shell pattern or a regular
    expression.
    """
    try:
        matcher = re.compile(
            fnmatch.translate(pattern) if re.fullmatch(r"[\w.*]+", pattern) else pattern
        )
    except re.error:
        return []
    layers = []
    for layer, block in LINEAR_LAYERS.items():
        names = [[f"{start}layers.{i}.{block}.{layer}" for i in SOME_LAYERS] for start in STARTS]
        # a pattern of some decoder layers alone has no name of a layer here
        if any(all(map(matcher.fullmatch, of_one)) for of_one in names):
            layers.append(layer)
    return layers


def _convert_patterns(value: Any) -> list[str] | None:
    """Converts Axolotl's patterns of the start of a parameter's name; None where one names rows of
    a tensor.

    >>> _convert_patterns(["^lm_head.weight$", "model.layers.1", "model.embed_tokens.weight[:9]"])
    >>> _convert_patterns(["^lm_head.weight$", "model.layers.4[4-7]+.mlp"])
    ['lm_head.weight', 'model.layers.4[4-7]+.mlp']
    """
    if not isinstance(value, list) or any(
        re.search(r"\[\d*(:\d*)?\]$", str(pattern)) for pattern in value
    ):
        return None
    return [_complete_pattern(str(pattern)) for pattern in value]


def _complete_pattern(pattern: str) -> str:
    """Returns a pattern of whole names for one of their start, in which a dot is a dot.

    A dot or a dollar at its end says that the last name is complete; where it is not, layer 1 is
    the layers 10 to 19 too, and `gate` is `gate_proj`.

    >>> _complete_pattern("blocks.[0-7]."), _complete_pattern("layers.1"), _complete_pattern("gate")
    ('blocks.[0-7]', 'layers.1\\\\w*', 'gate\\\\w*')
    """
    whole = re.sub(r"^\^|\\?\.?\$?$", "", pattern)
    last = re.split(r"\.", whole)[-1]
    begins_another = any(name != last and name.startswith(last) for name in LINEAR_LAYERS)
    is_open = begins_another or re.search(r"[\d\])+]$", whole) is not None
    return rf"{whole}\w*" if is_open and not pattern.endswith((".", "$")) else whole


def _convert_attention(value: Any) -> Any:
    if isinstance(value, bool):
        return "sdpa" if value else LEAVE
    if value == "xformers" or "/" in str(value):  # a kernel of the hub
        return LEAVE  # `OTHER_ATTENTION` has those that are not exact, as every one here is
    name = ATTENTION.get(str(value), str(value))
    if name in get_args(get_args(recipe_keys()["attn_implementation"].annotation)[0]):
        return name
    return None


def read_trackers(key: str, value: Any) -> list[str]:
    """Lists the trackers that a key names (`use_wandb: true`), else those that its value does.

    >>> read_trackers("use_wandb", True), read_trackers("report_to", ["tensorboard", "comet_ml"])
    (['wandb'], ['tensorboard', 'comet_ml'])
    >>> read_trackers("use_swanlab", True), read_trackers("report_to", "none")
    (['swanlab'], [])
    """
    is_switch = key.startswith("use_") or any(tracker in key for tracker in TRACKERS)
    if is_switch:
        values = [key.removeprefix("use_")] if value else []
    else:
        values = value if isinstance(value, list) else [value]
    names = [str(name).lower().rpartition(".")[2] for name in values]
    known = {name: next((ours for ours in TRACKERS if ours in name), name) for name in names}
    return [known[name] for name in names if name not in NO_TRACKER]


def _convert_tracker(key: str, value: Any) -> Any:
    """Returns the first of our trackers that a key or its value names."""
    named = read_trackers(key, value)
    return next((tracker for tracker in TRACKERS if tracker in named), LEAVE)


def _convert_steps(key: str, value: Any) -> Any:
    """Returns a number of steps, or a share of the run below 1."""
    number = read_number(key, value, "100") if value else 0
    if not number or number < 0:
        return LEAVE
    is_share = isinstance(number, float) and number < 1
    return number if is_share else int(number)


def _convert_resume(value: Any) -> Any:
    if value in (False, "false", "LATEST"):  # Automodel's word for auto
        return LEAVE
    is_newest = value is True or str(value).lower() == "latest"
    return "auto" if is_newest else str(value)


def _convert_strategy(key: str, value: Any) -> Any:
    name = "no" if value is False else str(value)
    if name == "steps":
        return LEAVE
    return name if name in STRATEGIES[key] else None


def _convert_rate(key: str, value: Any, learning_rate: Any) -> float | None:
    """Returns a rate as a share of the learning rate, which must be known."""
    lowest = read_number(key, value, "1e-6")
    rate = convert_number(learning_rate)
    return round(lowest / rate, 9) if isinstance(rate, int | float) and rate else None


def _convert_parameters(value: Any) -> list[str] | None:
    """Returns parameters' names without the wrapper that a tool puts around their modules."""
    names = convert_names(value)
    return names and [name.replace("_checkpoint_wrapped_module.", "") for name in names]


# Converts a value, by the `carry` of its key; None where there is no such value here.
CONVERTERS: Mapping[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("same", "lora-only", "warmup"), convert_number),
    "by-code": lambda value: LEAVE,
    "not": lambda value: not value if isinstance(value, bool) else None,
    "adapter": lambda value: {
        "lora": True,
        "qlora": True,
        "oft": True,
        "full": False,
        "freeze": False,
    }.get(str(value)),
    "all-linear": lambda value: "all-linear" if value else LEAVE,
    "on-if-true": lambda value: convert_number(value) if value else LEAVE,
    "flag": lambda value: True if value else LEAVE,
    "targets": convert_targets,
    "schedule": lambda value: SCHEDULES.get(str(value).lower().rsplit(".", 1)[-1]),
    "optimizer": lambda value: convert_optimizer(str(value)),
    "attention": _convert_attention,
    "dtype": lambda value: {"auto": LEAVE, **DTYPES}.get(str(value).rsplit(".", 1)[-1]),
    "resume": _convert_resume,
    "overlength": lambda value: OVERLENGTH.get(str(value)),
    "names": convert_names,
    "parameters": _convert_parameters,
    "module-patterns": _convert_patterns,
    "clip": lambda value: convert_number(value) or "null",
    "compile": lambda value: value.get("model", True) if isinstance(value, dict) else value,
    "bits": lambda value: True if value in (4, 8) else None,
    "quantizer": lambda value: LEAVE if str(value) in ("bnb", "bitsandbytes") else None,
    "betas": lambda value: value if isinstance(value, list) and len(value) == 2 else None,
}


def convert_value(pair: Counterpart, value: Any, recipe: Mapping[str, Any]) -> Any:
    """Converts a value into ours; None where there is none, `LEAVE` where the default here is the
    same.

    `recipe` has what is converted already; the learning rate is needed for a rate that is given as
    such.
    """
    match pair.carry:
        case "tracker":
            return _convert_tracker(pair.key, value)
        case "strategy":
            return _convert_strategy(str(pair.ours), value)
        case "schedule-argument":
            return recipe.get("lr_scheduler_kwargs", {}) | {
                pair.key.rsplit(".", 1)[-1]: convert_number(value)
            }
        case "optimizer-flag":
            if value:
                return convert_optimizer(pair.key.removeprefix("use_"))
            return LEAVE
        case "steps":
            return _convert_steps(pair.key, value)
        case "min-rate":
            return _convert_rate(pair.key, value, recipe.get("learning_rate"))
    return CONVERTERS[pair.carry](value)
