"""Other tools' data sets as entries of `datasets` and `eval_datasets`."""

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from finetune.convert.dataset_keys import BUILDERS, TheirEntry
from finetune.convert.tool_keys import Tool
from finetune.convert.tool_rules import Conversion, shorten
from finetune.convert.value_rules import read_section
from finetune.errors import UserError
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
TRAINED_PROMPTS = ("alpaca", "alpaca_cleaned")
TORCHTUNE_SOURCES = {"alpaca": "tatsu-lab/alpaca", "alpaca_cleaned": "yahma/alpaca-cleaned"}
ALPACA_COLUMNS = {"prompt": "instruction", "query": "input", "response": "output"}
PROMPT_ALONE = (
    "has no effect on this entry: of a prompt with its completion the completion alone is trained on; "
    "type: messages makes a conversation of the two"
)

Sources = list[dict[str, Any]]


def add_sources(tool: Tool, theirs: Mapping[str, Any], source: Path, found: Conversion) -> None:
    """`datasets` and `eval_datasets` of the recipe. Raises `UserError` where theirs are no data sets."""
    readers = {
        "TRL": _trl_data,
        "Axolotl": _axolotl_data,
        "LLaMA-Factory": _factory_data,
        "torchtune": _torchtune_data,
        "Automodel": _automodel_data,
    }
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
        raise UserError(
            f"{source}: {name}: a list of data sets is expected, found {shorten(value)}; write `- path: ...`"
        )
    for i, item in enumerate(value):
        if not isinstance(item, dict):
            raise UserError(
                f"{source}: {name}[{i}]: a mapping with a path is expected, found {shorten(item)}; write `- path: ...`"
            )
    return [TheirEntry.of(f"{name}[{i}]", item) for i, item in enumerate(value)]


def _read(
    tool: Tool, entries: Iterable[TheirEntry], read: Callable[[TheirEntry], Sources], found: Conversion
) -> Sources:
    """Our entries from theirs; what `read` leaves of one is listed."""
    sources: Sources = []
    for entry in entries:
        sources += read(entry)
        found.differences += entry.unread(tool)
    return sources


def _sources(paths: Iterable[Any], **keys: Any) -> Sources:
    return [{key: value for key, value in {"path": path, **keys}.items() if value is not None} for path in paths]


def _trl_data(theirs: Mapping[str, Any], source: Path, found: Conversion) -> tuple[Sources, Sources]:
    text = theirs.get("dataset_text_field")
    by_name = {
        "path": theirs.get("dataset_name"),
        "name": theirs.get("dataset_config"),
        "split": theirs.get("dataset_train_split"),
        "text_column": text if text != "text" else None,
    }
    entries = _entries(theirs.get("datasets"), "datasets", source) or _mixture(theirs, source, found)
    if entries and by_name["path"]:
        found.remarks.append(f"dataset_name: {shorten(by_name['path'])} was left out: datasets is given too")

    def read(entry: TheirEntry) -> Sources:
        keys = {key: entry.take(key) for key in keys_of(DatasetSource) if key != "path"}  # ours are welcome too
        return _sources(entry.paths(), **keys)

    train = [s for s in _read("TRL", entries or [TheirEntry.of("dataset", by_name)], read, found) if "path" in s]
    held_out = _read("TRL", _entries(theirs.get("eval_datasets"), "eval_datasets", source), read, found)
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
    entries = _entries(mixture.get("datasets"), "dataset_mixture.datasets", source)
    for entry in entries:
        entry.left |= {"path": entry.take("id"), "name": entry.take("config")}
        columns = entry.left.get("columns")
        if isinstance(columns, list) and len(columns) == 1:
            entry.take("columns")
            entry.left["messages_column"] = columns[0]
    return entries


def _axolotl_data(theirs: Mapping[str, Any], source: Path, found: Conversion) -> tuple[Sources, Sources]:
    def entries(name: str) -> Sources:
        return _read("Axolotl", _entries(theirs.get(name), name, source), _axolotl_sources, found)

    return [*entries("datasets"), *entries("pretraining_dataset")], entries("test_datasets")


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


def _factory_data(theirs: Mapping[str, Any], source: Path, found: Conversion) -> tuple[Sources, Sources]:
    info_path = source.parent / str(theirs.get("dataset_dir", "data")) / "dataset_info.json"
    info = _dataset_info(info_path)

    def sources(key: str) -> Sources:
        wanted = theirs.get(key) or []
        if not isinstance(wanted, str | list):
            raise UserError(
                f"{source}: {key}: names are expected, found {shorten(wanted)}; write them with commas between"
            )
        names = [str(name).strip() for name in (wanted.split(",") if isinstance(wanted, str) else wanted)]
        limit = theirs.get("max_samples")
        return [_first_rows(read, limit) for name in names if name for read in of_name(name)]

    def of_name(name: str) -> Sources:
        keys = info.get(name)
        if keys is None:
            found.remarks.append(f"datasets: {name} is not in {info_path}; put its file or hub name as path")
            return [{"path": name}]
        if not isinstance(keys, dict):
            raise UserError(
                f"{info_path}: {name}: a mapping is expected, found {shorten(keys)}; name its file_name there"
            )
        entry = TheirEntry.of(f"{info_path.name}: {name}", keys)
        return _read("LLaMA-Factory", [entry], lambda entry: _factory_sources(entry, info_path.parent), found)

    return sources("dataset"), sources("eval_dataset")


def _first_rows(entry: dict[str, Any], limit: Any) -> dict[str, Any]:
    """An entry of ours with the first `limit` rows of its split; all where that is None, or the split is a slice already."""
    split = str(entry.get("split") or "train")
    if not isinstance(limit, int) or isinstance(limit, bool) or "[" in split:
        return entry
    return entry | {"split": f"{split}[:{limit}]"}


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
    limit = entry.take("num_samples")
    return [_first_rows(read, limit) for read in _sources([str(folder / local) if local else hub], **keys)]


def _torchtune_data(theirs: Mapping[str, Any], source: Path, found: Conversion) -> tuple[Sources, Sources]:
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
        given = entry.left.get("train_on_input", read_section(theirs, "dataset").get("train_on_input"))
        if component in TRAINED_PROMPTS and given is None:
            found.recipe["assistant_only_loss"] = False  # the default of these two
        if component in TORCHTUNE_FORMATS:
            entry.take("_component_")
        keys = _torchtune_columns(entry, component)
        paths = [path or TORCHTUNE_SOURCES.get(component) for path in entry.paths("source")]
        if paths[0] in BUILDERS:
            raise UserError(f"{source}: {entry.where}: {component} names no source; set it to a file or hub name")
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


BY_CODE = "this class joins several columns of a row in code; write the rows as messages and name that file as path"


def _automodel_data(theirs: Mapping[str, Any], source: Path, found: Conversion) -> tuple[Sources, Sources]:
    def sources(key: str) -> Sources:
        value = theirs.get(key)
        return _read("Automodel", [TheirEntry.of(key, value)], read, found) if isinstance(value, dict) else []

    def read(entry: TheirEntry) -> Sources:
        kind = str(entry.take("_target_")).rsplit(".", 1)[-1]
        entry.flatten("column_mapping", "tokenizer")
        path = next((p for p in map(entry.take, ("path_or_dataset_id", "path_or_dataset", "dataset_name")) if p), None)
        if path is None:
            raise UserError(
                f"{source}: {entry.where}: {kind} names no path_or_dataset_id; a data set of code is not read"
            )
        split = entry.take("split")
        keys = {"name": entry.take("name"), "split": None if str(path).endswith((".json", ".jsonl")) else split}
        limits = [entry.take(key) for key in ("limit_dataset_samples", "num_samples_limit")]
        question, answer = entry.take("column_mapping.question"), entry.take("column_mapping.answer")
        if question and answer and not entry.left.get("column_mapping.context"):
            keys |= {"type": "messages", "prompt_column": question, "completion_column": answer}
            if entry.take("answer_only_loss_mask") is False:
                found.recipe["assistant_only_loss"] = False
        elif kind != "ChatDataset":
            found.differ(f"{entry.where}._target_", kind, BY_CODE, "a data set made by code")
        template = entry.take("chat_template")
        if template:
            found.recipe["chat_template"] = template
        paths = path if isinstance(path, list) else [path]
        limit = next((limit for limit in limits if limit), None)
        return [_first_rows(read, limit) for read in _sources(paths, **keys)]

    return sources("dataset"), sources("validation_dataset")
