"""Rules on a recipe alone: what its keys require of each other.

A few rules on QAT and exports also need the model. Imports no torch.
"""

from collections.abc import Callable, Mapping
from dataclasses import fields
from datetime import date
from functools import partial
from math import gcd
from pathlib import PurePosixPath
from typing import Any

from finetune.config.export_formats import COMPRESSED, EXPORT_FORMATS, ExportFormat
from finetune.config.keys import keys_of
from finetune.config.optimization import OPTIMIZERS
from finetune.config.quantization import EXPORTED, SCHEMES, TRAINED
from finetune.config.rule import Case, Rule, all_of, is_set, make_rule, no_effect
from finetune.config.schedules import DEFAULT_SCHEDULE, SCHEDULES, find_schedule_problems
from finetune.config.schema import DatasetSource, Lora, Quantization, QuantizationAware

# Below this rate most updates of bf16 weights round to nothing: bf16 numbers near 0.02 are
# 1.2e-4 apart, and an update of less than half of that is lost.
SMALLEST_BF16_RATE = 1e-5
# From here on a learning rate is probably a mistake, since Adam moves every parameter by about it.
LARGEST_RATE = 1.0


def _exclude_function(entry: str, key: str) -> Rule:
    """Makes the rule that a source with `function` does not set `key`, such as path.

    `entry`: `datasets` or `eval_datasets`.
    """

    def has_both(case: Case) -> bool:
        default = keys_of(DatasetSource)[key].default
        return any(source.function and getattr(source, key) != default for source in case[entry])

    return make_rule(
        f"function beside {key} of {entry}",
        entry,
        when=has_both,
        message=f"an entry of {entry} cannot combine function with {key}",
        advice=f"keep one of the two; what {key} would choose, the function can",
    )


def _find_schedule_problems(case: Case) -> list[str]:
    """Lists what is wrong with lr_scheduler_kwargs for the recipe's schedule."""
    return find_schedule_problems(case["lr_scheduler_type"], case["lr_scheduler_kwargs"] or {})


def _has_wrong_date(case: Case) -> bool:
    """Whether chat_template_date is set and not a date in ISO form."""
    text = case["chat_template_date"]
    if text is None:
        return False
    try:
        date.fromisoformat(text)
    except ValueError:
        return True
    return False


def _evaluates(case: Case) -> bool:
    """Whether the run measures held-out losses between its start and its end."""
    run = case.recipe.run
    return run.eval_strategy == "epoch" or run.eval_steps is not None


def _saves_before_end(case: Case) -> bool:
    """Whether the run saves checkpoints between its start and its end."""
    checkpoint = case.recipe.checkpoint
    is_periodic = checkpoint.save_strategy == "epoch" or checkpoint.save_steps is not None
    return is_periodic or checkpoint.keep_best_checkpoint


def _leaves_runs(case: Case) -> bool:
    """Whether the run's folder, which is that of its name, would not lie in runs/."""
    if case["run_name"] is None or case["output_dir"] is not None:
        return False
    name = PurePosixPath(case["run_name"])
    return name.is_absolute() or ".." in name.parts or not name.parts


def _has_held_out_rows(case: Case) -> bool:
    return bool(case["eval_datasets"]) or case["eval_split_size"] is not None


def _require_steps_strategy(strategy: str, steps: str) -> Rule:
    """Makes the rule that an interval has no effect unless its strategy is `steps`.

    `strategy` and `steps` are the two keys, such as save_strategy and save_steps.
    """
    return no_effect(
        steps,
        f"with {strategy}: {{{strategy}}}",
        lambda case: case[strategy] in ("no", "epoch"),
        strategy,
    )


QAT = "quantization_aware_training"
NO_QAT: Mapping[str, Any] = {QAT: None}


def has_qat(case: Case) -> bool:
    """Whether the recipe trains with QAT."""
    return case[QAT] is not None


def _exports_refused_model(name: str, export_format: ExportFormat, case: Case) -> bool:
    """Whether the recipe asks for the format `name`, and the format cannot hold the model."""
    return name in case["export_formats"] and bool(export_format.refuses(case))


def exports(name: str) -> Callable[[Case], bool]:
    """Makes the condition that a run ends with an export in the format `name`."""
    return lambda case: case["export_at_end"] and name in case["export_formats"]


def _find_group_size(case: Case) -> int | None:
    """Returns how many numbers share a scale under the scheme of QAT; see `Scheme.group_of`."""
    return SCHEMES[case[QAT]].group_of(case["qat_group_size"])


def _list_input_sizes(case: Case) -> tuple[int, int, int]:
    """Returns the numbers of inputs of the model's linear layers, as its config gives them.

    They are the sizes of hidden states, of all heads together and of an MLP's inner states. The
    last is 0 if the config gives no such size.
    """
    model = case.model
    return model.hidden, model.heads * model.head_size, model.intermediate


def _find_undivided_sizes(case: Case) -> list[int]:
    """Returns the numbers of inputs that qat_group_size does not divide, sorted; each once."""
    group_size = case["qat_group_size"]
    if group_size is None:
        return []
    return sorted({size for size in _list_input_sizes(case) if size % group_size})


def _advise_group_size(case: Case) -> str:
    return f"set it to a divisor of {gcd(*_list_input_sizes(case))}, or to null"


# What every recipe must have. These rules apply only when a recipe file is read.
REQUIRED: tuple[Rule, ...] = (
    make_rule(
        "two models",
        "model_config",
        "model_name_or_path",
        when=lambda c: c["model_name_or_path"] is not None and c["model_config"] is not None,
        message="model_name_or_path and model_config both name a model",
        advice="keep one",
    ),
    make_rule(
        "no model",
        "model_name_or_path",
        "model_config",
        when=lambda c: c["model_name_or_path"] is None and c["model_config"] is None,
        message="no model",
        advice="set model_name_or_path (a hub name or folder) or model_config (an architecture)",
    ),
    make_rule(
        "no tokenizer",
        "model_config",
        "tokenizer_name_or_path",
        when=lambda c: c["model_config"] is not None and c["tokenizer_name_or_path"] is None,
        message="model_config brings no tokenizer",
        advice="set tokenizer_name_or_path",
    ),
    make_rule(
        "no model_type",
        "model_config",
        when=lambda c: c["model_config"] is not None and "model_type" not in c["model_config"],
        message="model_config: model_type is missing",
        advice="for example model_type: llama",
    ),
    make_rule(
        "no data",
        "datasets",
        when=lambda c: not c["datasets"],
        message="no data",
        advice="set datasets, a list with at least `- path: FILE`",
    ),
    make_rule(
        "adapters on random weights",
        "use_peft",
        "model_config",
        when=lambda c: c["use_peft"] and c["model_config"] is not None,
        message="use_peft adapts a trained model, but model_config starts from random weights",
        advice="set model_name_or_path",
    ),
)


RULES: tuple[Rule, ...] = (
    make_rule(
        "layers for multi-token prediction",
        "train_mtp",
        when=lambda c: c["train_mtp"],
        message=(
            "train_mtp: no model class of transformers has layers for multi-token prediction, and "
            "its MtpModel, which drafts with them, computes no loss"
        ),
        advice="remove it; an export carries over those of the base",
        fix={"train_mtp": False},
    ),
    # LoRA and a quantized base
    *(
        no_effect(key.name, "without use_peft: true", lambda c: not c["use_peft"], "use_peft")
        for key in fields(Lora)[1:]
    ),
    make_rule(
        "no targets",
        "lora_target_modules",
        "lora_target_parameters",
        when=lambda c: c["lora_target_modules"] == () and not c["lora_target_parameters"],
        message="lora_target_modules: names no layer",
        advice="name some, or all-linear",
    ),
    *(
        make_rule(
            f"{key} in full",
            key,
            "use_peft",
            when=all_of(is_set(key, True), is_set("use_peft", False)),
            message=f"{key}: a quantized base is frozen, so it cannot be fine-tuned in full",
            advice=f"set use_peft: true, or remove {key}",
            fix={"use_peft": True},
        )
        for key in ("load_in_4bit", "load_in_8bit")
    ),
    *(
        no_effect(
            key.name, "without load_in_4bit: true", lambda c: not c["load_in_4bit"], "load_in_4bit"
        )
        for key in fields(Quantization)
        if key.name.startswith("bnb_4bit")
    ),
    # What is computed and kept
    make_rule(
        "kept activations offloaded from compiled layers",
        "activation_offload",
        "activation_checkpointing_keeps",
        "torch_compile",
        when=lambda c: (
            c["torch_compile"]
            and c["activation_offload"]
            and c["activation_checkpointing_keeps"] != "nothing"
        ),
        message="activation_offload: of compiled layers only the inputs are offloaded, not what "
        "activation_checkpointing_keeps names",
        advice="remove one of them, or torch_compile",
        fix={"activation_checkpointing_keeps": "nothing"},
    ),
    no_effect(
        "offload_dir",
        "without optim_offload: nvme",
        is_set("optim_offload", "none"),
        "optim_offload",
    ),
    make_rule(
        "no offload_dir",
        "optim_offload",
        "offload_dir",
        when=lambda c: c["optim_offload"] == "nvme" and not (c["offload_dir"] or "").strip(),
        message="optim_offload: nvme needs offload_dir, a folder on the NVMe disk of each node",
    ),
    # The schedule
    make_rule(
        "arguments of the schedule",
        "lr_scheduler_kwargs",
        "lr_scheduler_type",
        when=_find_schedule_problems,  # any message is a problem
        message=_find_schedule_problems,
    ),
    make_rule(
        "a schedule without its minimum",
        "lr_scheduler_type",
        "min_lr_ratio",
        when=lambda c: SCHEDULES[c["lr_scheduler_type"]].needs_floor and not c["min_lr_ratio"],
        message="lr_scheduler_type: {lr_scheduler_type} ends at learning_rate times min_lr_ratio",
        advice=f"set min_lr_ratio, or lr_scheduler_type: {DEFAULT_SCHEDULE}",
    ),
    no_effect(
        "min_lr_ratio",
        "with lr_scheduler_type: {lr_scheduler_type}, which has no end",
        lambda c: not SCHEDULES[c["lr_scheduler_type"]].has_end,
        "lr_scheduler_type",
    ),
    make_rule(
        "a warm-up longer than the run",
        "warmup_steps",
        "max_steps",
        # 1e99: the run's length is not known
        when=lambda c: (c["warmup_steps"] or 0) > (c.steps or c["max_steps"] or 1e99),
        message=lambda c: (
            f"warmup_steps: {c['warmup_steps']}: the run ends after {c.steps or c['max_steps']} "
            "steps, before learning_rate is reached"
        ),
        is_note=True,
    ),
    make_rule(
        "a learning rate too small for bf16",
        "dtype",
        "learning_rate",
        "optim",
        when=lambda c: (
            c["dtype"] == "bfloat16"
            and not c["use_peft"]
            and OPTIMIZERS[c["optim"]].reads_betas
            and c["learning_rate"] < SMALLEST_BF16_RATE
        ),
        message=(
            "learning_rate: {learning_rate:g} with dtype: bfloat16: neighboring bf16 numbers at "
            "0.02 are 1.2e-4 apart, so most updates round to nothing"
        ),
        advice="remove dtype (float32), or raise the rate",
        is_note=True,
    ),
    make_rule(
        "a learning rate of 1",
        "learning_rate",
        "optim",
        when=lambda c: c["learning_rate"] >= LARGEST_RATE and OPTIMIZERS[c["optim"]].reads_betas,
        message=(
            "learning_rate: {learning_rate:g}: optim: {optim} moves every parameter by about "
            "this much in each step; 1e-5 to 1e-3 are usual"
        ),
        is_note=True,
    ),
    *(
        no_effect(
            key,
            "with this optim, which has no such number",
            lambda c: not OPTIMIZERS[c["optim"]].reads_betas,
            "optim",
            is_note=True,
        )
        for key in ("adam_beta1", "adam_beta2", "adam_epsilon")
    ),
    # Data and evaluation
    *(
        _exclude_function(entry, key)
        for entry in ("datasets", "eval_datasets")
        for key in ("path", "name", "split")
    ),
    make_rule(
        "no date",
        "chat_template_date",
        when=_has_wrong_date,
        message="chat_template_date: {chat_template_date}: not a date; use the form 2026-01-31",
    ),
    make_rule(
        "streaming without an end",
        "streaming",
        "max_steps",
        when=lambda c: c["streaming"] and c["max_steps"] is None,
        message="streaming has no known end",
        advice="set max_steps",
    ),
    make_rule(
        "a part of a row held out",
        "eval_split_size",
        when=lambda c: (c["eval_split_size"] or 0) > 1 and c["eval_split_size"] % 1,
        message="eval_split_size: {eval_split_size:g}: from 1 on it is a number of rows",
        advice="write a whole number, or a share below 1",
    ),
    make_rule(
        "evaluation without held-out rows",
        "eval_steps",
        "eval_strategy",
        "eval_datasets",
        "eval_split_size",
        when=lambda c: _evaluates(c) and not _has_held_out_rows(c),
        message=lambda c: (
            f"{'eval_strategy' if c['eval_strategy'] == 'epoch' else 'eval_steps'}, but no "
            "held-out rows"
        ),
        advice="set eval_datasets or eval_split_size",
    ),
    make_rule(
        "run_name with a folder elsewhere",
        "run_name",
        "output_dir",
        when=_leaves_runs,
        message="run_name: {run_name} does not name a folder in runs/",
        advice="give a name without .. or a / in front, or set output_dir",
    ),
    no_effect(
        "exact_match_samples",
        "without eval_datasets or eval_split_size",
        lambda c: not _has_held_out_rows(c),
        "eval_datasets",
        "eval_split_size",
    ),
    no_effect(
        "metrics",
        "without exact_match_samples",
        is_set("exact_match_samples", to=0),
        "exact_match_samples",
    ),
    *(
        no_effect(
            key,
            "without eval_steps or eval_strategy: epoch",
            lambda c: not _evaluates(c),
            "eval_strategy",
            "eval_steps",
        )
        for key in ("early_stopping_patience", "keep_best_checkpoint")
    ),
    _require_steps_strategy("eval_strategy", "eval_steps"),
    _require_steps_strategy("save_strategy", "save_steps"),
    no_effect(
        "keep_every_steps",
        "without save_steps",
        lambda c: not _saves_before_end(c),
        "save_steps",
        "save_strategy",
        "keep_best_checkpoint",
    ),
    no_effect(
        "max_skipped_steps",
        "without on_nonfinite: skip",
        is_set("on_nonfinite", "stop"),
        "on_nonfinite",
    ),
    make_rule(
        "a profile after the end",
        "profile_steps",
        "max_steps",
        # 1e99: the run's length is not known
        when=lambda c: (c["profile_steps"] or (0,))[0] > (c.steps or c["max_steps"] or 1e99),
        message=lambda c: (
            f"profile_steps: {list(c['profile_steps'])}: the run ends after "
            f"{c.steps or c['max_steps']} steps, before the profile begins"
        ),
        is_note=True,
    ),
    make_rule(
        "profile_steps backwards",
        "profile_steps",
        when=lambda c: (
            c["profile_steps"] is not None and c["profile_steps"][0] > c["profile_steps"][1]
        ),
        message=lambda c: (
            f"profile_steps: {list(c['profile_steps'] or ())}: the first step comes after the last"
        ),
        advice="give the first step first",
    ),
    # Quantization-aware training and quantized exports
    make_rule(
        "a scheme that torchao does not finish here",
        QAT,
        when=lambda c: has_qat(c) and SCHEMES[c[QAT]].refused,
        message=lambda c: (
            f"{QAT}: {c[QAT]}: {SCHEMES[c[QAT]].refused}, so that the quantized model could not be "
            "compared with the one that was trained"
        ),
        advice=f"use one of {', '.join(TRAINED)}",
        fix=NO_QAT,
    ),
    *(
        no_effect(key.name, f"without {QAT}", lambda c: not has_qat(c), QAT)
        for key in fields(QuantizationAware)[1:]
    ),
    make_rule(
        "an export without a folder",
        "export_formats",
        when=lambda c: "safetensors" not in c["export_formats"],
        message="export_formats: without safetensors a run's folder has no model to chat with",
        advice="add it",
        fix={"export_formats": ("safetensors",)},
    ),
    no_effect(
        "export_formats",
        "with export_at_end: false",
        is_set("export_at_end", False),
        "export_at_end",
    ),
    no_effect(
        "export_quantization",
        "without export_formats: [safetensors, compressed-tensors]",
        lambda c: COMPRESSED not in c["export_formats"],
        "export_formats",
    ),
    make_rule(
        "a quantized export without a scheme",
        "export_formats",
        "export_quantization",
        QAT,
        when=lambda c: (
            COMPRESSED in c["export_formats"] and not (has_qat(c) or c["export_quantization"])
        ),
        message="export_formats: compressed-tensors: no scheme",
        advice="set export_quantization, such as int8-int8",
    ),
    make_rule(
        "a scheme that is not exported",
        "export_quantization",
        when=lambda c: c["export_quantization"] not in (None, *EXPORTED),
        message="export_quantization: {export_quantization}: not written",
        advice=f"use one of {', '.join(EXPORTED)}",
    ),
    *(
        make_rule(
            f"a model that is not exported as {export_format.title}",
            "export_formats",
            when=partial(_exports_refused_model, name, export_format),
            message=f"export_formats: {name}: {export_format.refused}",
            advice="remove it",
        )
        for name, export_format in EXPORT_FORMATS.items()
        if export_format.refused
    ),
    make_rule(
        "rounding after the end",
        "fake_quant_after_n_steps",
        "max_steps",
        # 1e99: the run's length is not known
        when=lambda c: c["fake_quant_after_n_steps"] >= (c.steps or c["max_steps"] or 1e99),
        message=lambda c: (
            f"fake_quant_after_n_steps: {c['fake_quant_after_n_steps']}: the run ends after "
            f"{c.steps or c['max_steps']} steps, and nothing would be rounded"
        ),
        advice="set a smaller number",
        fix={"fake_quant_after_n_steps": 0},
    ),
    make_rule(
        "a scheme with blocks of its own",
        "qat_group_size",
        QAT,
        when=lambda c: has_qat(c) and _find_group_size(c) != c["qat_group_size"],
        message=lambda c: (
            f"qat_group_size: {c['qat_group_size']}: {c[QAT]} has a scale for "
            f"{_find_group_size(c) or 'all'} numbers"
        ),
        advice=lambda c: f"set qat_group_size: {_find_group_size(c) or 'null'}",
    ),
    make_rule(
        "a trained scheme that is not exported",
        "export_formats",
        QAT,
        when=lambda c: (
            COMPRESSED in c["export_formats"]
            and not c["export_quantization"]
            and has_qat(c)
            and SCHEMES[c[QAT]].not_exported
        ),
        message=lambda c: (
            f"export_formats: compressed-tensors: {c[QAT]} is not written: "
            f"{SCHEMES[c[QAT]].not_exported}"
        ),
        advice="remove it, and quantize the plain export with a tool that knows the scheme",
    ),
    make_rule(
        "an export that is not rounded",
        QAT,
        when=lambda c: has_qat(c) and SCHEMES[c[QAT]].is_ternary and c["export_at_end"],
        message=lambda c: (
            f"{QAT}: {c[QAT]}: the export holds the weights before rounding, which answer as they "
            "were trained only once they are rounded"
        ),
        advice="round it with onebitllms' convert_in_bf16 before you chat with it",
        is_note=True,
    ),
    make_rule(
        "groups that do not divide",
        "qat_group_size",
        QAT,
        "model_name_or_path",
        when=lambda c: has_qat(c) and _find_undivided_sizes(c),
        message=lambda c: (
            f"qat_group_size: {c['qat_group_size']} does not divide "
            f"{' and '.join(map(str, _find_undivided_sizes(c)))}, the inputs of linear layers of "
            f"{c.name}"
        ),
        advice=_advise_group_size,
        fix={"qat_group_size": None},
    ),
)
