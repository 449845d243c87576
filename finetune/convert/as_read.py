"""A file as its tool reads it: without the keys that it does not read beside the others."""

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from finetune.config.optimization import OPTIMIZERS
from finetune.convert.counterparts import Tool, ToolFile
from finetune.convert.factory import is_of_bridge, is_of_mcore
from finetune.convert.value_conversion import read_section

TRAINERS: tuple[Tool, ...] = ("TRL", "LLaMA-Factory", "ms-swift")  # with transformers' arguments
# _configure_custom_optimizer of Axolotl's core/builders/base.py passes optim_args on; of the others
# transformers' Trainer reads them, and no AdamW of torch or bitsandbytes has any
PASSED_ON = ("optimi_adamw", "ao_adamw_fp8", "adopt_adamw", "flash_adamw", "q_galore_adamw8bit")
# logging_steps of transformers' and of TRL's arguments, which are eval_steps where a file has none
LOGGING_STEPS = {"TRL": 10, "LLaMA-Factory": 500}
STRATEGIES = ("eval_strategy", "evaluation_strategy")
COSINES = ("cosine", "rex")  # rex is a cosine to the trainer until it makes the schedule


def _takes_arguments(optimizer: str) -> bool:
    """Whether Axolotl makes an optimizer with optim_args."""
    facts = OPTIMIZERS.get(optimizer)
    is_by_matrix = facts is not None and facts.count_matrix is not None
    return optimizer in PASSED_ON or is_by_matrix


@dataclass(frozen=True, slots=True)
class Unread:
    """Keys, dotted where they are nested, that `tools` do not read in a file of which `holds` is
    true.
    """

    tools: tuple[Tool, ...]
    keys: tuple[str, ...]
    holds: Callable[[ToolFile], bool]


UNREAD = (
    # create_scheduler of its core/trainers/mixins/scheduler.py
    Unread(
        ("Axolotl",),
        ("cosine_min_lr_ratio",),
        lambda file: bool(file.get("lr_quadratic_warmup")) or _find_schedule(file) not in COSINES,
    ),
    # which its core/builders/causal.py alone passes on
    Unread(
        ("Axolotl",),
        (
            "neftune_noise_alpha",
            "noisy_embedding_alpha",
            "early_stopping_patience",
            "load_best_model_at_end",
        ),
        lambda file: bool(file.get("rl")),
    ),
    Unread(
        ("Axolotl",),
        ("optim_args.betas", "optim_args.eps", "optim_args.weight_decay"),
        lambda file: not _takes_arguments(str(file.get("optimizer"))),
    ),
    # the same function, which passes both on or none
    Unread(
        ("Axolotl",),
        ("adam_beta1", "adam_beta2"),
        lambda file: (
            _takes_arguments(str(file.get("optimizer")))
            and not (file.get("adam_beta1") and file.get("adam_beta2"))
        ),
    ),
    # get_warmup_steps of transformers 4; transformers 5 has the ratio decide wherever it is given
    Unread(
        TRAINERS,
        ("warmup_steps",),
        lambda file: file.get("warmup_steps") == 0 and bool(file.get("warmup_ratio")),
    ),
    Unread(TRAINERS, ("neftune_noise_alpha",), lambda file: file.get("neftune_noise_alpha") == 0),
    Unread(
        (*TRAINERS, "Axolotl"),
        ("save_total_limit",),
        lambda file: file.get("save_total_limit") in (0, -1),
    ),
    Unread(
        ("ms-swift",), ("early_stop_interval",), lambda file: file.get("early_stop_interval") == 0
    ),
    # null is 1.0 to its recipes/llm/train_ft.py, as no key is
    Unread(
        ("Automodel",),
        ("clip_grad_norm.max_norm",),
        lambda file: read_section(file, "clip_grad_norm").get("max_norm") is None,
    ),
    # null is stage: pt to its hparams/parser.py, as no key is
    Unread(("LLaMA-Factory",), ("packing",), lambda file: file.get("packing") is None),
    # of its train/dpo/trainer.py and train/kto/trainer.py alone
    Unread(
        ("LLaMA-Factory",),
        ("pref_ftx",),
        lambda file: file.get("stage", "sft") not in ("dpo", "kto"),
    ),
    # of its train/sft/trainer.py alone
    Unread(
        ("LLaMA-Factory",),
        ("use_dft_loss", "use_eaft_loss", "use_asft_loss"),
        lambda file: file.get("stage", "sft") != "sft",
    ),
    # compute_loss of transformers' Trainer, beside a compute_loss_func
    Unread(
        ("LLaMA-Factory",),
        ("label_smoothing_factor",),
        lambda file: any(map(file.get, ("use_dft_loss", "use_eaft_loss", "use_asft_loss"))),
    ),
    # create_optimizer and the losses of mcore_adapter's trainer, and config_builder.py of
    # LLaMA-Factory's train/megatron_bridge
    Unread(
        ("LLaMA-Factory",),
        (
            *("optim", "use_muon", "use_adam_mini", "use_apollo", "use_badam", "use_galore"),
            *("label_smoothing_factor", "use_dft_loss", "use_eaft_loss", "use_asft_loss"),
            *("additional_target", "loraplus_lr_ratio", "pissa_init", "use_dora", "use_rslora"),
            *("lora_dropout", "lora_target"),
        ),
        lambda file: is_of_mcore(file) or is_of_bridge(file),
    ),
    # run_sft of its train/mca/workflow.py, which trains all weights
    Unread(
        ("LLaMA-Factory",),
        ("finetuning_type", "lora_alpha", "lora_rank"),
        lambda file: is_of_mcore(file) and file.get("finetuning_type") != "full",
    ),
    # config_builder.py and dataset_export.py of its train/megatron_bridge
    Unread(
        ("LLaMA-Factory",),
        (
            *("lr_scheduler_kwargs", "neftune_noise_alpha", "rope_scaling"),
            *("mask_history", "neat_packing", "packing", "train_on_prompt"),
        ),
        is_of_bridge,
    ),
)


def read_as_tool(tool: Tool, settings: ToolFile) -> tuple[dict[str, Any], list[str]]:
    """Returns a file without the keys that its tool does not read, and these keys.

    >>> read_as_tool("TRL", {"warmup_steps": 0, "warmup_ratio": 0.1})
    ({'warmup_ratio': 0.1}, ['warmup_steps'])
    """
    file = deepcopy(dict(settings))
    if tool == "Automodel":
        file = _read_none(file)
        _rename_dtype(file)
    dropped = [
        key
        for row in UNREAD
        if tool in row.tools and row.holds(settings)
        for key in row.keys
        if _take(file, key)
    ]
    if tool == "LLaMA-Factory" and is_of_mcore(settings):
        file["finetuning_type"] = "full"
    if tool == "Axolotl":
        _fill_axolotl(file)
    elif not file.get("eval_steps"):
        _fill_evaluation(tool, file)
    return file, dropped


# translate_value of Automodel's components/config/loader.py
WORDS_OF_NULL = ("none", "None")


def _read_none(value: Any) -> Any:
    """Takes the words of Automodel's for null as such."""
    if isinstance(value, dict):
        return {key: _read_none(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_read_none(inner) for inner in value]
    return None if isinstance(value, str) and value in WORDS_OF_NULL else value


def _rename_dtype(file: Mapping[str, Any]) -> None:
    """Gives the weights' dtype the older of its two names, as from_pretrained of Automodel 0.7
    reads them.
    """
    model = file.get("model")
    if isinstance(model, dict) and model.get("dtype") is not None:
        model["torch_dtype"] = model.pop("dtype")


def _fill_evaluation(tool: Tool, file: dict[str, Any]) -> None:
    """Sets when Trainer measures the held-out loss where a file says no number of steps."""
    if any(file.get(key) == "steps" for key in STRATEGIES) and tool in LOGGING_STEPS:
        file["eval_steps"] = file.get("logging_steps") or LOGGING_STEPS[tool]


def _fill_axolotl(file: dict[str, Any]) -> None:
    """Takes null as Axolotl does, where it is no absent key here."""
    if file.get("max_grad_norm", 1.0) is None:
        del file["max_grad_norm"]  # model_dump(exclude_none=True): the default of Trainer's
    for key in ("kto_desirable_weight", "kto_undesirable_weight"):
        if file.get(key) == 0:
            file[key] = 1.0  # `or 1.0` of its core/builders/rl.py


def _find_schedule(file: ToolFile) -> str:
    return str(file.get("lr_scheduler") or "cosine")


def _take(file: dict[str, Any], dotted: str) -> bool:
    """Removes a key; returns whether it had a value."""
    section, _, name = dotted.rpartition(".")
    inner: Any = file.get(section) if section else file
    return isinstance(inner, dict) and inner.pop(name, None) is not None
