"""Data sets of torchtune and NeMo Automodel, whose files name the component that reads them, as entries of `datasets`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from finetune.convert.dataset_keys import (
    BUILDERS,
    Sources,
    TheirEntry,
    compares_answers,
    find_from_root,
    list_entries,
    make_sources,
    read_each,
    take_first_rows,
)
from finetune.convert.rules import Conversion, read_section
from finetune.errors import UserError

PAIRED_COLUMNS = {"prompt": "prompt_column", "chosen": "chosen_column", "rejected": "rejected_column"}
TORCHTUNE_PAIRS = {
    "stack_exchange_paired": "lvwerra/stack-exchange-paired",
    "hh_rlhf_helpful": "RLHFlow/HH-RLHF-Helpful-standard",
    "preference": None,
}
STACK_EXCHANGE = {"prompt": "question", "chosen": "response_j", "rejected": "response_k"}
SUBFOLDER = "read from this folder of the hub data set alone there; here from all of it"


def read_torchtune_preferences(entry: TheirEntry, found: Conversion) -> Sources:
    """Our entries for one of torchtune's; a component that is not known stays unread, and is listed."""
    component = str(entry.unread.get("_component_", "")).rsplit(".", 1)[-1].removesuffix("_dataset")
    entry.flatten("column_map")
    keys: dict[str, Any] = {"name": entry.take("name"), "split": entry.take("split")}
    if component in TORCHTUNE_PAIRS:
        entry.take("_component_")
    usual = STACK_EXCHANGE if component == "stack_exchange_paired" else {}
    columns = {name: entry.take(f"column_map.{name}") or usual.get(name) for name in PAIRED_COLUMNS}
    keys |= {PAIRED_COLUMNS[name]: column for name, column in columns.items() if column != name}
    source = TORCHTUNE_PAIRS.get(component)
    if component == "stack_exchange_paired" and entry.unread.get("source") in (None, source):
        keys["type"] = "messages"
        found.add_difference(f"{entry.where}.data_dir", "data/rl", SUBFOLDER)
    return make_sources([path or source for path in entry.paths("source")], **keys)


TORCHTUNE_FORMATS = {
    "alpaca": "alpaca",
    "alpaca_cleaned": "alpaca",
    "chat": None,
    "text_completion": "text",
    "instruct": "messages",
}
TRAINED_PROMPTS = ("alpaca", "alpaca_cleaned")
TORCHTUNE_SOURCES = {"alpaca": "tatsu-lab/alpaca", "alpaca_cleaned": "yahma/alpaca-cleaned"}


def read_torchtune_data(theirs: Mapping[str, Any], source: Path, found: Conversion) -> tuple[Sources, Sources]:
    def sources(key: str) -> Sources:
        value = theirs.get(key)
        if not isinstance(value, dict):
            return read_each("torchtune", list_entries(value, key, source), read, found)
        entry = TheirEntry.of(key, value)
        if key == "dataset":  # these two become keys of the whole recipe
            entry.take("packed")
            entry.take("train_on_input")
        return read_each("torchtune", [entry], read, found)

    def read(entry: TheirEntry) -> Sources:
        if compares_answers(found):
            return read_torchtune_preferences(entry, found)
        component = str(entry.unread.get("_component_", "")).rsplit(".", 1)[-1].removesuffix("_dataset")
        given = entry.unread.get("train_on_input", read_section(theirs, "dataset").get("train_on_input"))
        if component in TRAINED_PROMPTS and given is None:
            found.recipe["assistant_only_loss"] = False  # the default of these two
        if component in TORCHTUNE_FORMATS:
            entry.take("_component_")
        keys = _torchtune_columns(entry, component)
        paths = [path or TORCHTUNE_SOURCES.get(component) for path in entry.paths("source")]
        if paths[0] in BUILDERS:
            raise UserError(f"{source}: {entry.where}: {component} names no source; set it to a file or hub name")
        return make_sources(paths, name=entry.take("name"), split=entry.take("split"), **keys)

    return sources("dataset"), sources("dataset_val")


def _torchtune_columns(entry: TheirEntry, component: str) -> dict[str, Any]:
    entry.flatten("column_map")
    keys = {
        "type": TORCHTUNE_FORMATS.get(component),
        "text_column": entry.take("column"),
        "messages_column": entry.take("conversation_column"),
    }
    columns = {key: value for key, value in entry.unread.items() if key.startswith("column_map.")}
    is_usual = all(key == f"column_map.{value}" for key, value in columns.items())
    if keys["type"] == "alpaca":
        keys["alpaca_prompt"] = True
    if component == "instruct" or (keys["type"] == "alpaca" and not is_usual):
        prompt = "input" if component == "instruct" else "instruction"
        keys["prompt_column"] = entry.take(f"column_map.{prompt}") or prompt
        keys["completion_column"] = entry.take("column_map.output") or "output"
    elif component == "chat":
        named = [entry.take(f"column_map.{column}") for column in ("conversations", "messages")]
        keys["messages_column"] = next(filter(None, named), keys["messages_column"])
    elif is_usual:
        for key in columns:
            entry.take(key)
    return keys


AUTOMODEL_FORMATS = {"make_squad_dataset": "squad", "HellaSwag": "hellaswag"}
AUTOMODEL_ENDS = {
    "squad": "without a chat template the end-of-text token is trained after each answer here, and the space before an "
    "answer is no part of its first token",
    "hellaswag": "the end-of-text token is trained after each answer here",
}
BY_CODE = "this class joins several columns of a row in code; write the rows as messages and name that file as path, or yield them: `function: my_data.py:rows`"


def read_automodel_data(theirs: Mapping[str, Any], source: Path, found: Conversion) -> tuple[Sources, Sources]:
    def sources(key: str) -> Sources:
        value = theirs.get(key)
        return read_each("Automodel", [TheirEntry.of(key, value)], read, found) if isinstance(value, dict) else []

    def read(entry: TheirEntry) -> Sources:
        kind = str(entry.take("_target_")).rsplit(".", 1)[-1]
        entry.flatten("column_mapping", "tokenizer")
        path = next((p for p in map(entry.take, ("path_or_dataset_id", "path_or_dataset", "dataset_name")) if p), None)
        if path is None:
            raise UserError(
                f"{source}: {entry.where}: {kind} names no path_or_dataset_id; code that makes rows goes under `function: my_data.py:rows`"
            )
        split = entry.take("split")
        keys = {"name": entry.take("name"), "split": None if str(path).endswith((".json", ".jsonl")) else split}
        limits = [entry.take(key) for key in ("limit_dataset_samples", "num_samples_limit")]
        question, answer = entry.take("column_mapping.question"), entry.take("column_mapping.answer")
        if question and answer and not entry.unread.get("column_mapping.context"):
            keys |= {"type": "messages", "prompt_column": question, "completion_column": answer}
            if entry.take("answer_only_loss_mask") is False:
                found.recipe["assistant_only_loss"] = False
        elif kind in AUTOMODEL_FORMATS:
            keys["type"] = AUTOMODEL_FORMATS[kind]
            found.remarks.append(f"{entry.where}: {AUTOMODEL_ENDS[keys['type']]}")
        elif kind != "ChatDataset":
            found.add_difference(f"{entry.where}._target_", kind, BY_CODE, "a data set made by code")
            found.to_do.append(f"{entry.where}: {path}: its rows do not fit as they are; see _target_ above")
        if kind in ("make_squad_dataset", "ChatDataset") and not entry.take("mask_generation_prompt"):
            found.remarks.append(f"{entry.where}: under a chat template the header of an answer is trained too there")
        template = entry.take("chat_template")
        if template:
            is_file = str(template).endswith(".jinja") and find_from_root(source, str(template))
            found.recipe["chat_template"] = str(is_file or template)
        paths = path if isinstance(path, list) else [path]
        limit = next((limit for limit in limits if limit), None)
        return [take_first_rows(read, limit) for read in make_sources(paths, **keys)]

    return sources("dataset"), sources("validation_dataset")
