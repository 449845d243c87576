"""Other tools' data sets as entries of `datasets` and `eval_datasets`."""

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from finetune.convert.converted import Converted, shown
from finetune.convert.datasets import BUILDERS, TheirEntry
from finetune.errors import UserError
from finetune.recipe.hints import Tool
from finetune.recipe.keys import keys_of
from finetune.recipe.schema import DatasetSource

FORMATS = {
    "alpaca": "alpaca",
    "sharegpt": "sharegpt",
    "chat_template": None,
    "completion": "text",
    "openai": "messages",
}
TORCHTUNE_FORMATS = {
    "alpaca": "alpaca",
    "alpaca_cleaned": "alpaca",
    "chat": None,
    "text_completion": "text",
    "instruct": "messages",
}
TORCHTUNE_SOURCES = {"alpaca": "tatsu-lab/alpaca", "alpaca_cleaned": "yahma/alpaca-cleaned"}
ALPACA_COLUMNS = {"prompt": "instruction", "query": "input", "response": "output"}
PROMPT_ALONE = (
    "has no effect on this entry: of a prompt with its completion the completion alone is trained on; "
    "type: messages makes a conversation of the two"
)

Sources = list[dict[str, Any]]


def add_sources(tool: Tool, theirs: Mapping[str, Any], source: Path, found: Converted) -> None:
    """`datasets` and `eval_datasets` of the recipe. Raises `UserError` where theirs are no data sets."""
    readers = {"TRL": _trl_data, "Axolotl": _axolotl_data, "LLaMA-Factory": _factory_data, "torchtune": _torchtune_data}
    train, held_out = readers[tool](theirs, source, found)
    if train:
        found.recipe["datasets"] = train
    if held_out:
        found.recipe["eval_datasets"] = held_out
        if found.recipe.pop("eval_split_size", None) is not None:
            found.remarks.append("eval_split_size was left out: the file names a held-out data set as well")
    if found.recipe.get("assistant_only_loss") is False:
        masked = [i for i, entry in enumerate(train) if _is_prompt_alone(entry)]
        found.remarks += [f"datasets[{i}]: assistant_only_loss: false {PROMPT_ALONE}" for i in masked]
        if masked and len(masked) == len(train):
            del found.recipe["assistant_only_loss"]


def _is_prompt_alone(entry: Mapping[str, Any]) -> bool:
    """Whether rows are read as plain prompts with completions, which no key has trained whole."""
    return "prompt_column" in entry if "type" not in entry else entry["type"] == "prompt_completion"


def _entries(value: Any, name: str, source: Path) -> list[TheirEntry]:
    """The data sets listed under the key `name` of their file."""
    if value is None:
        return []
    if not isinstance(value, list):
        raise UserError(f"{source}: {name}: a list of data sets is expected, found {shown(value)}; write `- path: ...`")
    for i, item in enumerate(value):
        if not isinstance(item, dict):
            raise UserError(
                f"{source}: {name}[{i}]: a mapping with a path is expected, found {shown(item)}; write `- path: ...`"
            )
    return [TheirEntry.of(f"{name}[{i}]", item) for i, item in enumerate(value)]


def _read(
    tool: Tool, entries: Iterable[TheirEntry], read: Callable[[TheirEntry], Sources], found: Converted
) -> Sources:
    """Our entries from theirs; what `read` leaves of one is listed."""
    sources: Sources = []
    for entry in entries:
        sources += read(entry)
        found.without += entry.unread(tool)
    return sources


def _sources(paths: Iterable[Any], **keys: Any) -> Sources:
    return [{key: value for key, value in {"path": path, **keys}.items() if value is not None} for path in paths]


def _trl_data(theirs: Mapping[str, Any], source: Path, found: Converted) -> tuple[Sources, Sources]:
    text = theirs.get("dataset_text_field")
    by_name = {
        "path": theirs.get("dataset_name"),
        "name": theirs.get("dataset_config"),
        "split": theirs.get("dataset_train_split"),
        "text_column": text if text != "text" else None,
    }
    entries = _entries(theirs.get("datasets"), "datasets", source)
    if entries and by_name["path"]:
        found.remarks.append(f"dataset_name: {shown(by_name['path'])} was left out: datasets is given too")

    def read(entry: TheirEntry) -> Sources:
        keys = {key: entry.take(key) for key in keys_of(DatasetSource) if key != "path"}  # ours are welcome too
        return _sources(entry.paths(), **keys)

    train = [s for s in _read("TRL", entries or [TheirEntry.of("dataset", by_name)], read, found) if "path" in s]
    held_out = _read("TRL", _entries(theirs.get("eval_datasets"), "eval_datasets", source), read, found)
    wants_held_out = str(theirs.get("eval_strategy", theirs.get("evaluation_strategy", "no"))) != "no"
    if wants_held_out and not held_out and "eval_split_size" not in found.recipe:
        held_out = [entry | {"split": theirs.get("dataset_test_split", "test")} for entry in train[:1]]
    return train, held_out


def _axolotl_data(theirs: Mapping[str, Any], source: Path, found: Converted) -> tuple[Sources, Sources]:
    def entries(name: str) -> Sources:
        return _read("Axolotl", _entries(theirs.get(name), name, source), _axolotl_sources, found)

    return entries("datasets"), entries("test_datasets")


def _axolotl_sources(entry: TheirEntry) -> Sources:
    entry.flatten("type", "message_property_mappings", "roles")
    kind = entry.left.get("type")
    name = str(kind).split(".")[0].split(":")[0]
    has_columns = any(key.startswith("type.") for key in entry.left)  # and a template, all in the type
    keys = {"name": entry.take("name"), "split": entry.take("split"), "type": FORMATS.get(name)}
    if name in FORMATS:
        entry.take("type")
    if name == "completion":
        keys["text_column"] = entry.take("field")
    if has_columns:
        keys["prompt_column"] = entry.take("type.field_instruction") or "instruction"
        keys["completion_column"] = entry.take("type.field_output") or "output"
    elif name == "alpaca" and {"field_instruction", "field_output"} & entry.left.keys():
        keys["type"] = "messages"  # as alpaca is: a question and an answer, by the chat template
        keys["prompt_column"] = entry.take("field_instruction") or "instruction"
        keys["completion_column"] = entry.take("field_output") or "output"
    return _sources(entry.paths(), messages_column=entry.take("field_messages"), **keys)


def _factory_data(theirs: Mapping[str, Any], source: Path, found: Converted) -> tuple[Sources, Sources]:
    info_path = source.parent / str(theirs.get("dataset_dir", "data")) / "dataset_info.json"
    info = _dataset_info(info_path)

    def sources(key: str) -> Sources:
        wanted = theirs.get(key) or []
        if not isinstance(wanted, str | list):
            raise UserError(
                f"{source}: {key}: names are expected, found {shown(wanted)}; write them with commas between"
            )
        names = [str(name).strip() for name in (wanted.split(",") if isinstance(wanted, str) else wanted)]
        return [read for name in names for read in of_name(name)]

    def of_name(name: str) -> Sources:
        keys = info.get(name)
        if keys is None:
            found.remarks.append(f"datasets: {name} is not in {info_path}; put its file or hub name there as path")
            return [{"path": name}]
        if not isinstance(keys, dict):
            raise UserError(
                f"{info_path}: {name}: a mapping is expected, found {shown(keys)}; name its file_name there"
            )
        entry = TheirEntry.of(f"{info_path.name}: {name}", keys)
        return _read("LLaMA-Factory", [entry], lambda entry: _factory_sources(entry, info_path.parent), found)

    return sources("dataset"), sources("eval_dataset")


def _dataset_info(path: Path) -> Mapping[str, Any]:
    """LLaMA-Factory's list of data sets; empty where there is none."""
    if not path.is_file():
        return {}
    try:
        info = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:  # not UTF-8 is a ValueError too
        raise UserError(f"{path}: cannot be read as JSON ({error}); mend it, or name another dataset_dir") from None
    if not isinstance(info, dict):
        raise UserError(f"{path}: a mapping of names to data sets is expected, found {shown(info)}; mend it")
    return info


def _factory_sources(entry: TheirEntry, folder: Path) -> Sources:
    entry.flatten("columns", "tags")
    columns = {key.removeprefix("columns."): value for key, value in entry.left.items() if key.startswith("columns.")}
    is_chat = entry.left.get("formatting") == "sharegpt"
    if entry.left.get("formatting") in ("alpaca", "sharegpt"):
        entry.take("formatting")
    local, hub = entry.take("file_name"), entry.take("hf_hub_url")
    keys = {"name": entry.take("subset"), "split": entry.take("split")}
    if is_chat:
        keys["messages_column"] = entry.take("columns.messages")
        for beside in ("system", "chosen"):
            if columns.get(beside) == beside:
                entry.take(f"columns.{beside}")
                keys["type"] = "sharegpt"  # reads both beside the turns
    elif ALPACA_COLUMNS.items() <= columns.items() and columns.get("system") in (None, "system"):
        keys["type"] = "alpaca"
        for column in (*ALPACA_COLUMNS, "system"):
            entry.take(f"columns.{column}")
    elif columns.get("prompt"):
        answer = next((column for column in ("response", "chosen") if columns.get(column)), None)
        keys["type"] = "messages" if answer else "text"  # text is what they pretrain on
        keys["prompt_column" if answer else "text_column"] = entry.take("columns.prompt")
        keys["completion_column"] = entry.take(f"columns.{answer}")
    return _sources([str(folder / local) if local else hub], **keys)


def _torchtune_data(theirs: Mapping[str, Any], source: Path, found: Converted) -> tuple[Sources, Sources]:
    def sources(key: str) -> Sources:
        value = theirs.get(key)
        if not isinstance(value, dict):
            return _read("torchtune", _entries(value, key, source), read, found)
        entry = TheirEntry.of(key, value)
        if key == "dataset":  # these two are of the whole recipe, and carried over as such
            entry.take("packed")
            entry.take("train_on_input")
        return _read("torchtune", [entry], read, found)

    def read(entry: TheirEntry) -> Sources:
        component = str(entry.left.get("_component_", "")).rsplit(".", 1)[-1].removesuffix("_dataset")
        if component in TORCHTUNE_FORMATS:
            entry.take("_component_")
        keys = _torchtune_columns(entry, component)
        paths = [path or TORCHTUNE_SOURCES.get(component) for path in entry.paths("source")]
        if paths[0] in BUILDERS:
            found.remarks.append(
                f"{entry.where}: {component} has no source here; put its file or hub name into datasets as path"
            )
            return []
        return _sources(paths, name=entry.take("name"), split=entry.take("split"), **keys)

    return sources("dataset"), sources("dataset_val")


def _torchtune_columns(entry: TheirEntry, component: str) -> dict[str, Any]:
    entry.flatten("column_map")
    keys = {
        "type": TORCHTUNE_FORMATS.get(component),
        "text_column": entry.take("column"),
        "messages_column": entry.take("conversation_column"),
    }
    columns = {key: value for key, value in entry.left.items() if key.startswith("column_map.")}
    is_usual = all(key == f"column_map.{value}" for key, value in columns.items())
    if component == "instruct" or (keys["type"] == "alpaca" and not is_usual):
        prompt = "input" if component == "instruct" else "instruction"
        keys["type"] = "messages"  # theirs are a question and an answer, which the chat template renders
        keys["prompt_column"] = entry.take(f"column_map.{prompt}") or prompt
        keys["completion_column"] = entry.take("column_map.output") or "output"
    elif component == "chat":
        named = [entry.take(f"column_map.{column}") for column in ("conversations", "messages")]
        keys["messages_column"] = next(filter(None, named), keys["messages_column"])
    elif is_usual:
        for key in columns:
            entry.take(key)
    return keys
