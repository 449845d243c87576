"""Other tools' data sets as entries of `datasets` and `eval_datasets`."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from finetune.convert.converted import Converted, shown
from finetune.recipe.foreign import Tool

FORMATS = {
    "alpaca": "alpaca",
    "sharegpt": "sharegpt",
    "chat_template": None,
    "completion": "text",
    "openai": "messages",
}
TORCHTUNE_FORMATS = {"alpaca": "alpaca", "chat": None, "text_completion": "text", "instruct": "prompt_completion"}
TORCHTUNE_SOURCES = {"alpaca": "tatsu-lab/alpaca", "alpaca_cleaned": "yahma/alpaca-cleaned"}


def add_sources(tool: Tool, theirs: Mapping[str, Any], folder: Path, found: Converted) -> None:
    """`datasets` and `eval_datasets` of the recipe."""
    readers = {"TRL": _trl_data, "Axolotl": _axolotl_data, "LLaMA-Factory": _factory_data, "torchtune": _torchtune_data}
    train, held_out = readers[tool](theirs, folder, found)
    if train:
        found.recipe["datasets"] = train
    if held_out:
        found.recipe["eval_datasets"] = held_out
        if found.recipe.pop("eval_split_size", None) is not None:
            found.remarks.append("eval_split_size was left out: the file names a held-out data set as well")


Sources = list[dict[str, Any]]


def _entry(**keys: Any) -> dict[str, Any]:
    return {key: value for key, value in keys.items() if value is not None}


def _trl_data(theirs: Mapping[str, Any], _: Path, found: Converted) -> tuple[Sources, Sources]:
    mixture = theirs.get("datasets") or [
        {
            "path": theirs.get("dataset_name"),
            "name": theirs.get("dataset_config"),
            "split": theirs.get("dataset_train_split"),
            "text_column": theirs.get("dataset_text_field") if theirs.get("dataset_text_field") != "text" else None,
        }
    ]
    train = [
        _entry(path=s.get("path"), name=s.get("name"), split=s.get("split"), text_column=s.get("text_column"))
        for s in mixture
    ]
    train = [source for source in train if "path" in source]
    wants_held_out = str(theirs.get("eval_strategy", theirs.get("evaluation_strategy", "no"))) != "no"
    held_out = (
        [source | {"split": theirs.get("dataset_test_split", "test")} for source in train[:1]] if wants_held_out else []
    )
    return train, held_out


def _axolotl_data(theirs: Mapping[str, Any], _: Path, found: Converted) -> tuple[Sources, Sources]:
    def source(item: Mapping[str, Any]) -> dict[str, Any]:
        kind = item.get("type")
        name = str(kind).split(".")[0].split(":")[0] if isinstance(kind, str) else None
        columns = kind if isinstance(kind, dict) else None  # their columns and their template
        if columns is not None:
            left = {key: value for key, value in columns.items() if key not in ("field_instruction", "field_output")}
            found.remarks.extend(
                f"datasets: type.{key}: {shown(value)} is left out; rows of prompt and completion have no counterpart"
                for key, value in left.items()
                if value not in (None, "")
            )
        elif kind is not None and name not in FORMATS:
            found.remarks.append(
                f"datasets: type {shown(kind)} is left out; the rows' format is recognised from the columns"
            )
        files = item.get("data_files")
        path = (files[0] if isinstance(files, list) else files) or item.get("path")
        return _entry(
            path=path,
            name=item.get("name"),
            split=item.get("split"),
            type=FORMATS.get(str(name)),
            messages_column=item.get("field_messages"),
            prompt_column=None if columns is None else columns.get("field_instruction", "instruction"),
            completion_column=None if columns is None else columns.get("field_output", "output"),
            text_column=item.get("field") if name == "completion" else None,
        )

    return [source(s) for s in theirs.get("datasets") or []], [source(s) for s in theirs.get("test_datasets") or []]


def _factory_data(theirs: Mapping[str, Any], folder: Path, found: Converted) -> tuple[Sources, Sources]:
    info_path = folder / str(theirs.get("dataset_dir", "data")) / "dataset_info.json"
    info = json.loads(info_path.read_text(encoding="utf-8")) if info_path.is_file() else {}

    def sources(names: Any) -> Sources:
        wanted = names.split(",") if isinstance(names, str) else list(names or [])
        return [source(str(name).strip()) for name in wanted]

    def source(name: str) -> dict[str, Any]:
        entry = info.get(name)
        if entry is None:
            found.remarks.append(f"datasets: {name} is not in {info_path}; put its file or hub name there as path")
            return {"path": name}
        columns, local = entry.get("columns") or {}, entry.get("file_name")
        is_chat = entry.get("formatting") == "sharegpt"
        return _entry(
            path=str(info_path.parent / local) if local else entry.get("hf_hub_url"),
            name=entry.get("subset"),
            split=entry.get("split"),
            type="prompt_completion" if columns.get("prompt") and not columns.get("query") and not is_chat else None,
            messages_column=columns.get("messages") if is_chat else None,
            prompt_column=columns.get("prompt") if not columns.get("query") and not is_chat else None,
            completion_column=columns.get("response") if not columns.get("query") and not is_chat else None,
        )

    return sources(theirs.get("dataset")), sources(theirs.get("eval_dataset"))


def _torchtune_data(theirs: Mapping[str, Any], _: Path, found: Converted) -> tuple[Sources, Sources]:
    def sources(item: Any) -> Sources:
        if not isinstance(item, dict):
            return []
        component = str(item.get("_component_", "")).rsplit(".", 1)[-1].removesuffix("_dataset")
        path = item.get("data_files") or item.get("source") or TORCHTUNE_SOURCES.get(component)
        if path in ("json", "csv", "text"):
            path = item.get("data_files")
        if path is None:
            found.remarks.append(
                f"dataset: {component} has no source here; put its file or hub name into datasets as path"
            )
            return []
        return [
            _entry(
                path=path,
                split=item.get("split"),
                type=TORCHTUNE_FORMATS.get(component),
                text_column=item.get("column"),
            )
        ]

    return sources(theirs.get("dataset")), sources(theirs.get("dataset_val"))
