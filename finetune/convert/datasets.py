"""Other tools' data sets as entries of `datasets` and `eval_datasets`."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from finetune.config.schema import DatasetSource
from finetune.convert.component_datasets import read_automodel_data, read_torchtune_data
from finetune.convert.dataset_keys import (
    ALPACA_PROMPT,
    ALPACA_STYLE,
    Sources,
    TheirEntry,
    list_entries,
    make_sources,
    read_each,
    take_first_rows,
)
from finetune.convert.preference_datasets import read_axolotl_preferences, take_factory_columns, take_trl_columns
from finetune.convert.tool_keys import Tool
from finetune.convert.tool_rules import Conversion, shorten
from finetune.errors import UserError
from finetune.recipe.keys import keys_of

FORMATS = {
    "alpaca": "alpaca",
    "sharegpt": "sharegpt",
    "chat_template": None,
    "completion": "text",
    "openai": "messages",
}
ALPACA_COLUMNS = {"prompt": "instruction", "query": "input", "response": "output"}
PROMPT_ALONE = (
    "has no effect on this entry: of a prompt with its completion the completion alone is trained on; "
    "type: messages makes a conversation of the two"
)


def add_sources(tool: Tool, theirs: Mapping[str, Any], source: Path, found: Conversion) -> None:
    """`datasets` and `eval_datasets` of the recipe. Raises `UserError` where theirs are no data sets."""
    readers = {
        "TRL": _trl_data,
        "Axolotl": _axolotl_data,
        "LLaMA-Factory": _factory_data,
        "torchtune": read_torchtune_data,
        "Automodel": read_automodel_data,
    }
    train, held_out = readers[tool](theirs, source, found)
    if train:
        found.recipe["datasets"] = train
    if held_out:
        found.recipe["eval_datasets"] = held_out
        if found.recipe.pop("eval_split_size", None) is not None:
            found.remarks.append("eval_split_size is dropped: the file also names a held-out data set")
    if found.recipe.get("assistant_only_loss") is False:
        masked = [i for i, entry in enumerate(train) if _is_prompt_alone(entry)]
        found.remarks += [f"datasets[{i}]: assistant_only_loss: false {PROMPT_ALONE}" for i in masked]
        if masked and len(masked) == len(train):
            del found.recipe["assistant_only_loss"]


def _is_prompt_alone(entry: Mapping[str, Any]) -> bool:
    """Whether rows are read as plain prompts with completions, which no key has trained whole."""
    return "prompt_column" in entry if "type" not in entry else entry["type"] == "prompt_completion"


def _trl_data(theirs: Mapping[str, Any], source: Path, found: Conversion) -> tuple[Sources, Sources]:
    text = theirs.get("dataset_text_field")
    by_name = {
        "path": theirs.get("dataset_name"),
        "name": theirs.get("dataset_config"),
        "split": theirs.get("dataset_train_split"),
        "text_column": text if text != "text" else None,
    }
    entries = list_entries(theirs.get("datasets"), "datasets", source) or _mixture(theirs, source, found)
    if entries and by_name["path"]:
        found.remarks.append(f"dataset_name: {shorten(by_name['path'])} is dropped: datasets is given too")

    def read(entry: TheirEntry) -> Sources:
        if "method" in found.recipe:
            take_trl_columns(entry)
        keys = {key: entry.take(key) for key in keys_of(DatasetSource) if key != "path"}  # ours are welcome too
        return make_sources(entry.paths(), **keys)

    train = [s for s in read_each("TRL", entries or [TheirEntry.of("dataset", by_name)], read, found) if "path" in s]
    held_out = read_each("TRL", list_entries(theirs.get("eval_datasets"), "eval_datasets", source), read, found)
    wants_held_out = str(theirs.get("eval_strategy", theirs.get("evaluation_strategy", "no"))) != "no"
    if wants_held_out and not held_out and "eval_split_size" not in found.recipe:
        held_out = [entry | {"split": theirs.get("dataset_test_split", "test")} for entry in train[:1]]
    return train, held_out


def _mixture(theirs: Mapping[str, Any], source: Path, found: Conversion) -> list[TheirEntry]:
    """The entries of alignment-handbook's dataset_mixture, in TRL's names."""
    mixture = theirs.get("dataset_mixture")
    if not isinstance(mixture, dict):
        return []
    if mixture.get("test_split_size"):
        found.recipe["eval_split_size"] = mixture["test_split_size"]
    entries = list_entries(mixture.get("datasets"), "dataset_mixture.datasets", source)
    for entry in entries:
        entry.unread |= {"path": entry.take("id"), "name": entry.take("config")}
        columns = entry.unread.get("columns")
        if isinstance(columns, list) and len(columns) == 1:
            entry.take("columns")
            entry.unread["messages_column"] = columns[0]
    return entries


def _axolotl_data(theirs: Mapping[str, Any], source: Path, found: Conversion) -> tuple[Sources, Sources]:
    def entries(name: str) -> Sources:
        listed = list_entries(theirs.get(name), name, source)
        styles.update(str(entry.unread.get("type")) for entry in listed)
        return read_each("Axolotl", listed, lambda entry: _axolotl_sources(entry, found), found)

    styles: set[str] = set()
    train, held_out = [*entries("datasets"), *entries("pretraining_dataset")], entries("test_datasets")
    if styles - {"completion"} == {"alpaca"}:
        found.recipe["chat_template"] = "alpaca"
    elif "alpaca" in styles:
        found.add_difference("datasets.type", "alpaca", ALPACA_PROMPT)
    return train, held_out


def _axolotl_sources(entry: TheirEntry, found: Conversion) -> Sources:
    if "method" in found.recipe:
        return read_axolotl_preferences(entry, found.recipe["method"], found)
    entry.flatten("type", "message_property_mappings", "roles")
    kind = entry.unread.get("type")
    name = str(kind).split(".")[0].split(":")[0]
    has_columns = any(key.startswith("type.") for key in entry.unread)  # and a template, all in the type
    keys = {"name": entry.take("name"), "split": entry.take("split"), "type": FORMATS.get(name)}
    if name in FORMATS:
        entry.take("type")
    if name == "alpaca" and kind != name:
        found.add_difference(f"{entry.where}.type", kind, ALPACA_STYLE)
    if name == "completion":
        keys["text_column"] = entry.take("field")
    if has_columns:
        keys["prompt_column"] = entry.take("type.field_instruction") or "instruction"
        keys["completion_column"] = entry.take("type.field_output") or "output"
    elif name == "alpaca" and {"field_instruction", "field_output"} & entry.unread.keys():
        keys["prompt_column"] = entry.take("field_instruction") or "instruction"
        keys["completion_column"] = entry.take("field_output") or "output"
    return make_sources(entry.paths(), messages_column=entry.take("field_messages"), **keys)


def _factory_data(theirs: Mapping[str, Any], source: Path, found: Conversion) -> tuple[Sources, Sources]:
    info_path = source.parent / str(theirs.get("dataset_dir", "data")) / "dataset_info.json"
    info, method = _dataset_info(info_path), found.recipe.get("method", "sft")

    def sources(key: str) -> Sources:
        wanted = theirs.get(key) or []
        if not isinstance(wanted, str | list):
            raise UserError(
                f"{source}: {key}: names are expected, found {shorten(wanted)}; write them with commas between"
            )
        names = [str(name).strip() for name in (wanted.split(",") if isinstance(wanted, str) else wanted)]
        limit = theirs.get("max_samples")
        return [take_first_rows(read, limit) for name in names if name for read in of_name(name)]

    def of_name(name: str) -> Sources:
        keys = info.get(name)
        if keys is None:
            found.to_do.append(f"datasets: {name} is not in {info_path}; put its file or hub name as path")
            return [{"path": name}]
        if not isinstance(keys, dict):
            raise UserError(
                f"{info_path}: {name}: a mapping is expected, found {shorten(keys)}; name its file_name there"
            )
        entry = TheirEntry.of(f"{info_path.name}: {name}", keys)
        return read_each(
            "LLaMA-Factory", [entry], lambda entry: _factory_sources(entry, info_path.parent, method), found
        )

    return sources("dataset"), sources("eval_dataset")


def _dataset_info(path: Path) -> Mapping[str, Any]:
    """LLaMA-Factory's list of data sets; empty where there is none."""
    if not path.is_file():
        return {}
    try:
        info = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:  # not UTF-8 is a ValueError too
        raise UserError(f"{path}: cannot be read as JSON ({error}); fix it, or name another dataset_dir") from None
    if not isinstance(info, dict):
        raise UserError(f"{path}: a mapping of names to data sets is expected, found {shorten(info)}; fix it")
    return info


def _factory_sources(entry: TheirEntry, folder: Path, method: str) -> Sources:
    entry.flatten("columns", "tags")
    columns = {key.removeprefix("columns."): value for key, value in entry.unread.items() if key.startswith("columns.")}
    is_chat = entry.unread.get("formatting") == "sharegpt"
    if entry.unread.get("formatting") in ("alpaca", "sharegpt"):
        entry.take("formatting")
    local, hub = entry.take("file_name"), entry.take("hf_hub_url")
    keys = {"name": entry.take("subset"), "split": entry.take("split")}
    if method != "sft":
        keys |= take_factory_columns(entry, is_chat, method)
    elif is_chat:
        keys["messages_column"] = entry.take("columns.messages")
        for extra in ("system", "chosen"):
            if columns.get(extra) == extra:
                entry.take(f"columns.{extra}")
                keys["type"] = "sharegpt"  # reads both columns as well as the turns
    elif ALPACA_COLUMNS.items() <= columns.items() and columns.get("system") in (None, "system"):
        keys["type"] = "alpaca"
        for column in (*ALPACA_COLUMNS, "system"):
            entry.take(f"columns.{column}")
    elif columns.get("prompt"):
        answer = next((column for column in ("response", "chosen") if columns.get(column)), None)
        keys["type"] = "messages" if answer else "text"  # text is what they pretrain on
        keys["prompt_column" if answer else "text_column"] = entry.take("columns.prompt")
        keys["completion_column"] = entry.take(f"columns.{answer}")
    keys["max_samples"] = entry.take("num_samples")
    return make_sources([str(folder / local) if local else hub], **keys)
