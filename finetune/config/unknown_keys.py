"""What was meant by an unknown key or value: another tool's name for ours, Accelerate's, or a misspelling."""

import difflib
from collections.abc import Callable, Mapping
from dataclasses import fields

from finetune.config.layout import GROUP_KEYS
from finetune.config.optimization import OPTIMIZERS, REFUSED_OPTIMIZERS
from finetune.config.other_tools import TOOLS, Counterpart
from finetune.config.schema import DatasetSource, Key, recipe_keys

# Top-level keys of an Accelerate file; after the first eight, those that are for its launcher alone.
ACCELERATE_KEYS = frozenset(
    """
    distributed_type mixed_precision use_cpu num_machines fsdp_config parallelism_config deepspeed_config fp8_config
    compute_environment machine_rank main_process_ip main_process_port main_training_function num_processes rdzv_backend
    rdzv_conf same_network debug downcast_bf16 enable_cpu_affinity gpu_ids tpu_env tpu_use_cluster tpu_use_sudo tpu_name
    tpu_zone commands command_file num_cpu_threads_per_process max_restarts monitor_interval
    """.split()  # noqa: SIM905 - a name a line would be a page
)
# What many call what a key of an Accelerate file says: name -> that key.
IN_ACCELERATE_FILE: Mapping[str, str] = {
    **{key: f"parallelism_config_{key}" for key in GROUP_KEYS},
    "tp_config": f"parallelism_config_{GROUP_KEYS[0]}",
    "sequence_parallel_size": "parallelism_config_sp_size",
    "cpu_offload": "fsdp_offload_params",
    "offload_params": "fsdp_offload_params",
}
# What many call a key of the recipe, in a recipe or an Accelerate file: name -> that key.
IN_RECIPE: Mapping[str, str] = {
    **dict.fromkeys(("ep_size", "expert_parallel_degree"), "expert_parallel_size"),
    **dict.fromkeys(
        ("pp_size", "parallelism_config_pp_size", "pipeline_parallel_degree", "pipeline_model_parallel_size"),
        "pipeline_parallel_size",
    ),
    "pp_schedule": "pipeline_schedule",
}
LAUNCHED = "no such key; --num-processes N says how many ranks run on this machine"
TRUNCATED = (
    "no such key: completions are sampled from all of the vocabulary, since a token's probability under a truncated "
    "distribution is not the one that is trained"
)
# Names whose nearest spelling is something else, or that are no key: name -> (the key that is meant, what to write).
MEANT: Mapping[str, tuple[str, str]] = {
    "peft_type": ("use_peft", "peft's name; use_peft: true trains LoRA adapters, the only kind here"),
    "max_tokens": ("max_length", "no such key; max_length is the number of tokens in a row"),
    "batch_size": (
        "per_device_train_batch_size",
        "torchtune's and Axolotl's name; per_device_train_batch_size is the rows of a micro-batch, "
        "global_batch_size those of a step",
    ),
    "load_best_model_at_end": (
        "keep_best_checkpoint",
        "Transformers' name; here it is keep_best_checkpoint, with eval_steps",
    ),
    "train_on_responses_only": (
        "assistant_only_loss",
        "Unsloth's name; here it is assistant_only_loss, true by default",
    ),
    **dict.fromkeys(("top_p", "top_k", "min_p"), ("", TRUNCATED)),
    "reward_funcs": ("rewards", "TRL's name; here it is rewards, such as [my_rewards.py:right]"),
    **dict.fromkeys(("num_gpus", "n_gpus", "gpus", "nproc", "nproc_per_node"), ("", LAUNCHED)),
}

# Other tools' values of keys that are the same here: key -> their name -> ours.
OTHER_VALUES: Mapping[str, Mapping[str, str]] = {
    "optim": {other: ours for ours, facts in OPTIMIZERS.items() for other in facts.other_names},
    "lr_scheduler_type": {"constant_lr": "constant", "1-sqrt": "warmup_stable_decay"},
    "method": {"ipo": "method: dpo with loss_type: ipo", "rpo": "method: dpo with rpo_alpha"},
    "attn_implementation": {
        "fa2": "flash_attention_2",
        "fa3": "flash_attention_3",
        "fa4": "flash_attention_4",
        "flash_attention": "auto",
    },
}
# Key -> their name -> why there is none.
REFUSED_VALUES: Mapping[str, Mapping[str, str]] = {
    "optim": REFUSED_OPTIMIZERS,
    "lr_scheduler_type": {
        "cosine_with_restarts": "a rate that jumps back is not supported; cosine, or warmup_stable_decay",
        "reduce_lr_on_plateau": "the rate is a function of the step here; cosine, or warmup_stable_decay",
    },
    "save_strategy": {"best": "every new best is saved with keep_best_checkpoint: true"},
    "eval_strategy": {"best": "it is for save_strategy in Transformers; here see keep_best_checkpoint"},
}


def explain_unknown(key: str, known: Mapping[str, Key]) -> tuple[str, str]:
    """The key that was probably meant by `key`, else `key` itself, and a sentence for the user.

    `known` are the keys at that place of the file: the recipe's, or those of an entry of `datasets`.
    """
    top_level = "path" not in known
    if top_level and key in {field.name for field in fields(DatasetSource)}:
        return (
            key,
            f"{key}: a key of each entry of datasets; write it there, as in datasets=[{{path: ..., {key}: ...}}]",
        )
    if top_level and key in MEANT:
        ours, sentence = MEANT[key]
        return ours or key, f"{key}: {sentence}"
    foreign = foreign_names()
    if top_level and key in foreign:
        whose, ours = foreign[key]
        return ours, f"{key}: {whose} name; here it is {ours}"
    if top_level and key in (unneeded := keys_without_counterpart()):
        whose, note = unneeded[key]
        return key, f"{key}: {whose} name; no such key: {note}"
    if top_level and (plain := key.removeprefix("parallelism_config_")) in IN_RECIPE:
        return IN_RECIPE[plain], f"{key}: no such key; here it is {IN_RECIPE[plain]}"
    if top_level and key in IN_ACCELERATE_FILE:
        return key, f"{key}: no such key; write {IN_ACCELERATE_FILE[key]} in a copy of the Accelerate file"
    if top_level and (key in ACCELERATE_KEYS or key.startswith(("fsdp_", "parallelism_config_"))):
        return (
            key,
            f"{key}: Accelerate's key; it belongs in the Accelerate file that accelerate_config or --config names",
        )
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    if close:
        return close[0], f"{key}: no such key; did you mean {close[0]}?"
    listed = "docs/recipes.md lists them" if top_level else f"one of {', '.join(known)}"
    return key, f"{key}: no such key; {listed}"


def explain_value(key: str, value: object) -> str | None:
    """A sentence on another tool's value of a key that is the same here; None where it is not known.

    >>> explain_value("optim", "paged_adamw_8bit")
    "paged_adamw_8bit: another tool's name; here it is adamw_8bit"
    """
    if key == "warmup_steps" and isinstance(value, float) and 0 < value < 1:
        return f"{value:g}: a number of steps is expected; a share of them is warmup_ratio: {value:g}"
    if key == "resume_from_checkpoint" and value is False:
        return "false: write none to start over, or auto to resume where there is a checkpoint"
    if not isinstance(value, str):
        return None
    ours, refused = OTHER_VALUES.get(key, {}).get(value), REFUSED_VALUES.get(key, {}).get(value)
    if ours is not None:
        return f"{value}: another tool's name; here it is {ours}"
    return None if refused is None else f"{value}: {refused}"


def foreign_names() -> dict[str, tuple[str, str]]:
    """Other tools' names for keys that have a different name here: name -> (whose it is, ours).

    >>> foreign_names()["sequence_len"], foreign_names()["lora_rank"][0]
    (("Axolotl's", 'max_length'), "LLaMA-Factory's and torchtune's")
    """
    entry = {key.name for key in fields(DatasetSource)}  # keys of an entry that others have at the top

    def describe(pair: Counterpart) -> str | None:
        noted = pair.ours == "accelerate_config" or pair.theirs in entry
        return f"{pair.ours} ({pair.note})" if noted and pair.ours else pair.ours

    return _list_keys(describe)


def keys_without_counterpart() -> dict[str, tuple[str, str]]:
    """Other tools' keys that have no counterpart here: name -> (whose it is, why, or what to do instead).

    >>> keys_without_counterpart()["max_prompt_length"][0]
    "TRL's"
    """
    return _list_keys(lambda pair: None if pair.ours else pair.note)


def _list_keys(describe: Callable[[Counterpart], str | None]) -> dict[str, tuple[str, str]]:
    """Keys that are not ours and that `describe` says something of -> (whose they are, what it says of the first)."""
    found: dict[str, tuple[list[str], str]] = {}
    for tool, pairs in TOOLS.items():
        for pair in pairs if tool != "Automodel" else ():  # whose files are nested throughout
            if "." not in pair.theirs and pair.theirs not in recipe_keys() and (said := describe(pair)):
                found.setdefault(pair.theirs, ([], said))[0].append(f"{tool}'s")
    return {key: (" and ".join(whose[:2]), said) for key, (whose, said) in found.items()}
