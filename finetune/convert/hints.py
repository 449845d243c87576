"""Recognizes other tools' files and keys: the `Hints` of finetune/config/reader.py."""

from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

from finetune.config.other_names import IN_ACCELERATE_FILE, SOURCES_FORM
from finetune.config.schema import NESTED, DatasetSource, recipe_keys
from finetune.convert.counterparts import NOTES, TOOL_NAMES, Counterpart, Tool, list_counterparts

ENOUGH_KEYS = 3  # keys that only the tool has, by which a file is taken for the tool's
SWIFT_KEYS = {
    "tuner_type",
    "train_type",
    "rlhf_type",
    "split_dataset_ratio",
    "loss_scale",
    "truncation_strategy",
}
# the tools whose keys are explained: Automodel's keys are all in sections
FLAT_TOOLS = [tool for tool in TOOL_NAMES if tool != "Automodel"]


def recognize_tool(file: Mapping[str, Any]) -> Tool | None:
    """Returns the tool that a file is for, by keys that few other tools have; None if unknown."""
    if (
        any("nemo_automodel" in text for text in find_texts(file, "_target_"))
        or "step_scheduler" in file
    ):
        return "Automodel"
    if next(find_texts(file, "_component_"), None) is not None:
        return "torchtune"
    if "model" in file and SWIFT_KEYS & file.keys():
        return "ms-swift"
    if "base_model" in file or {"sequence_len", "micro_batch_size"} & file.keys():
        return "LLaMA-Factory" if is_factory_v1(file) else "Axolotl"
    if {
        "finetuning_type",
        "stage",
        "cutoff_len",
        "template",
        "export_dir",
    } & file.keys() or is_factory_v1(file):
        return "LLaMA-Factory"
    return "TRL" if "model_name_or_path" in file else None


def is_factory_v1(file: Mapping[str, Any]) -> bool:
    """Whether a file is in LLaMA-Factory's v1 schema."""
    return "model" in file and bool(
        {"train_dataset", "dist_config", "sample_backend", "kernel_config"} & file.keys()
    )


def find_texts(value: Any, key: str) -> Iterator[str]:
    """Yields every text under `key`, at any depth of mappings and lists.

    A mapping or list under `key` is searched in turn.
    """
    if isinstance(value, dict):
        for name, inner in value.items():
            if name == key and isinstance(inner, str):
                yield inner
            else:
                yield from find_texts(inner, key)
    elif isinstance(value, list):
        for inner in value:
            yield from find_texts(inner, key)


def list_types(settings: Mapping[str, Any]) -> list[str]:
    """Lists the `type` of each data set in an Axolotl file: "custom" for a mapping of columns."""
    types = []
    for key in ("datasets", "test_datasets", "pretraining_dataset"):
        entries = settings.get(key)
        for entry in entries if isinstance(entries, list) else [entries]:
            kind = entry.get("type") if isinstance(entry, dict) else None
            if kind is not None:
                types.append("custom" if isinstance(kind, dict) else str(kind))
    return types


def find_writer(file: Mapping[str, Any]) -> Tool | None:
    """Returns the tool that a file was written for; None if it may be a recipe with wrong keys.

    A few keys of another tool may be mistakes in a recipe, `ENOUGH_KEYS` of them are not.

    >>> find_writer(
    ...     {"base_model": "a/b", "datasets": [], "sequence_len": 2048, "micro_batch_size": 1}
    ... )
    'Axolotl'
    >>> find_writer({"model_name_or_path": "a/b", "datasets": [], "sequence_len": 2048})
    """
    tool = recognize_tool(file)
    if tool is None or is_factory_v1(file):
        return tool
    tool_keys = {pair.key.partition(".")[0] for pair in list_counterparts(tool)}
    foreign_keys = file.keys() - recipe_keys().keys()
    return tool if len(tool_keys & foreign_keys) >= ENOUGH_KEYS else None


def explain_key(key: str) -> tuple[str, str] | None:
    """Explains another tool's key: (our key, or `key` if there is none; a sentence).

    Returns None for a key that no tool has, and for a dotted one.

    >>> explain_key("sequence_len")
    ('max_length', "Axolotl's name; here it is max_length")
    >>> explain_key("lora_rank")[1].partition(";")[0]
    "LLaMA-Factory's and torchtune's name"
    """
    if "." in key or key in IN_ACCELERATE_FILE:  # the reader explains the latter better
        return None
    pairs = {
        tool: pair for tool in FLAT_TOOLS for pair in list_counterparts(tool) if pair.key == key
    }
    # a tool whose key has a counterpart here says more than one whose key has none
    pairs = {tool: pair for tool, pair in pairs.items() if pair.ours} or pairs
    if not pairs:
        return None
    two_tools = list(pairs)[:2]  # enough for a message
    whose = " and ".join(f"{tool}'s" for tool in two_tools)
    pair = pairs[two_tools[0]]
    if pair.ours is None:
        return key, f"{whose} name; no such key: {pair.note}"
    return pair.ours, f"{whose} name; here it is {_describe(pair)}"


def _describe(pair: Counterpart) -> str:
    """Returns our key, with the note if the key alone does not say what to write."""
    if pair.note in ("", NOTES["OWN_DATA"]):
        note = ""
    else:
        note = f" ({pair.note})"
    if pair.ours in NESTED:
        return f"{pair.ours}: {SOURCES_FORM}{note}"
    is_entry_key = pair.key in {field.name for field in fields(DatasetSource)}
    if pair.ours == "accelerate_config" or is_entry_key:
        return f"{pair.ours}{note}"
    return str(pair.ours)
