"""Other tools' data sets as entries of `datasets` and `eval_datasets`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from finetune.config.keys import keys_of
from finetune.config.schema import DatasetSource
from finetune.convert.alignment_handbook import read_mixer, read_mixture
from finetune.convert.counterparts import Tool
from finetune.convert.entries import (
    BUILDERS,
    DataSetEntry,
    Sources,
    compares_answers,
    find_from_root,
    list_entries,
    make_sources,
    read_each,
    take_first_rows,
)
from finetune.convert.foreign_values import shorten
from finetune.convert.model_names import guess_vision_family
from finetune.convert.rules import Conversion, read_section
from finetune.data.formats import LABEL_COLUMNS
from finetune.data.preferences import PROMPTS
from finetune.errors import UserError
from finetune.files.json_files import load_json

PAIRED_COLUMNS = {"prompt": "prompt_column", "chosen": "chosen_column", "rejected": "rejected_column"}
TORCHTUNE_PAIRS = {
    "stack_exchange_paired": "lvwerra/stack-exchange-paired",
    "hh_rlhf_helpful": "RLHFlow/HH-RLHF-Helpful-standard",
    "preference": None,
}
STACK_EXCHANGE = {"prompt": "question", "chosen": "response_j", "rejected": "response_k"}
SUBFOLDER = "read from this folder of the hub data set alone there; here from all of it"


def read_torchtune_preferences(entry: DataSetEntry, conversion: Conversion) -> Sources:
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
        conversion.add_difference(f"{entry.where}.data_dir", "data/rl", SUBFOLDER)
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


def read_torchtune_data(settings: Mapping[str, Any], source: Path, conversion: Conversion) -> tuple[Sources, Sources]:
    def sources(key: str) -> Sources:
        value = settings.get(key)
        if not isinstance(value, dict):
            entries = list_entries(value, key, source)
            packed = [entry.take("packed") for entry in entries]
            if key == "dataset" and any(packed) and not compares_answers(conversion):
                conversion.recipe["packing"] = True  # all of them, says torchtune
            return read_each("torchtune", entries, read, conversion)
        entry = DataSetEntry.of(key, value)
        if key == "dataset":  # these two become keys of the whole recipe
            entry.take("packed")
            entry.take("train_on_input")
        return read_each("torchtune", [entry], read, conversion)

    def read(entry: DataSetEntry) -> Sources:
        if compares_answers(conversion):
            return read_torchtune_preferences(entry, conversion)
        component = str(entry.unread.get("_component_", "")).rsplit(".", 1)[-1].removesuffix("_dataset")
        given = entry.unread.get("train_on_input", read_section(settings, "dataset").get("train_on_input"))
        if component in TRAINED_PROMPTS and given is None:
            conversion.recipe["assistant_only_loss"] = False  # the default of these two
        if component in TORCHTUNE_FORMATS:
            entry.take("_component_")
        keys = _torchtune_columns(entry, component)
        paths = [path or TORCHTUNE_SOURCES.get(component) for path in entry.paths("source")]
        if paths[0] in BUILDERS:
            raise UserError(f"{source}: {entry.where}: {component} names no source; set it to a file or hub name")
        return make_sources(paths, name=entry.take("name"), split=entry.take("split"), **keys)

    return sources("dataset"), sources("dataset_val")


def _torchtune_columns(entry: DataSetEntry, component: str) -> dict[str, Any]:
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
BY_CODE = (
    "this class joins several columns of a row in code; write the rows as messages and name that file as path, or "
    "yield them: `function: my_data.py:rows`"
)


def read_automodel_data(settings: Mapping[str, Any], source: Path, conversion: Conversion) -> tuple[Sources, Sources]:
    def sources(key: str) -> Sources:
        value = settings.get(key)
        return (
            read_each("Automodel", [DataSetEntry.of(key, value)], read, conversion) if isinstance(value, dict) else []
        )

    def read(entry: DataSetEntry) -> Sources:
        kind = str(entry.take("_target_")).rsplit(".", 1)[-1]
        entry.flatten("column_mapping", "tokenizer")
        path = next((p for p in map(entry.take, ("path_or_dataset_id", "path_or_dataset", "dataset_name")) if p), None)
        if path is None:
            raise UserError(
                f"{source}: {entry.where}: {kind} names no path_or_dataset_id; code that makes rows goes under "
                "`function: my_data.py:rows`"
            )
        split = entry.take("split")
        keys = {"name": entry.take("name"), "split": None if str(path).endswith((".json", ".jsonl")) else split}
        limits = [entry.take(key) for key in ("limit_dataset_samples", "num_samples_limit")]
        question, answer = entry.take("column_mapping.question"), entry.take("column_mapping.answer")
        if question and answer and not entry.unread.get("column_mapping.context"):
            keys |= {"type": "messages", "prompt_column": question, "completion_column": answer}
            if entry.take("answer_only_loss_mask") is False:
                conversion.recipe["assistant_only_loss"] = False
        elif kind in AUTOMODEL_FORMATS:
            keys["type"] = AUTOMODEL_FORMATS[kind]
            conversion.remarks.append(f"{entry.where}: {AUTOMODEL_ENDS[keys['type']]}")
        elif kind != "ChatDataset":
            conversion.add_difference(f"{entry.where}._target_", kind, BY_CODE, "a data set made by code")
            conversion.to_do.append(f"{entry.where}: {path}: its rows do not fit as they are; see _target_ above")
        if kind in ("make_squad_dataset", "ChatDataset") and not entry.take("mask_generation_prompt"):
            conversion.remarks.append(
                f"{entry.where}: under a chat template the header of an answer is trained too there"
            )
        template = entry.take("chat_template")
        if template:
            is_file = str(template).endswith(".jinja") and find_from_root(source, str(template))
            conversion.recipe["chat_template"] = str(is_file or template)
        paths = path if isinstance(path, list) else [path]
        limit = next((limit for limit in limits if limit), None)
        return [take_first_rows(read, limit) for read in make_sources(paths, **keys)]

    return sources("dataset"), sources("validation_dataset")


# Axolotl's types are called template.form; here the prompt columns of the forms that join texts.
PAIR_FORMS = {"argilla": "instruction", "icr": "input", "intel": "question", "prompt_pairs": "prompt"}
RATED_FORMS = {
    "argilla": "instruction", "intel": "question", "prompt_pairs": "prompt", "ultra": "prompt",
    "argilla_chat": "chosen",  # messages, without the answer
}  # fmt: skip
ARGILLA = {"chosen_column": "chosen_response", "rejected_column": "rejected_response"}  # of pairs
MESSAGE_FORMS = ("default", "argilla_chat", "ultra")  # whole conversations, which are recognized
OWN_TEMPLATES = ("chatml", "llama3")
KNOWN_COLUMNS = ("prompt", "chosen", "rejected", "messages", "completion", "label")


def read_axolotl_preferences(entry: DataSetEntry, method: str, conversion: Conversion) -> Sources:
    """Our entries for one of Axolotl's; a type that is not known stays unread, and is listed."""
    kind = entry.unread.get("type")
    entry.flatten("type", "message_property_mappings", "roles")
    template, _, form = str(kind or "").partition(".")
    forms = RATED_FORMS if method == "kto" else PAIR_FORMS
    keys: dict[str, Any] = {"name": entry.take("name"), "split": entry.take("split")}
    if isinstance(kind, dict):
        fields = {"prompt_column": "prompt", "chosen_column": "chosen", "rejected_column": "rejected"}
        fields |= {"completion_column": "completion", "label_column": "label"} if method == "kto" else {}
        keys |= {key: entry.take(f"type.field_{field}") for key, field in fields.items()}
    elif template == "chat_template" and form in (*MESSAGE_FORMS, "argilla"):
        entry.take("type")
        keys["prompt_column"] = entry.take("field_messages")
    elif form in forms:
        entry.take("type")
        keys["prompt_column"] = forms[form]
        keys |= {"completion_column": "completion"} if method == "kto" else ARGILLA if form == "argilla" else {}
        keys["type"] = None if form == "argilla_chat" else "messages"
    elif kind is None or form in MESSAGE_FORMS or (not form and template in OWN_TEMPLATES):
        entry.take("type")
    keys |= {key: entry.take(f"field_{key[:-7]}") or keys.get(key) for key in ("chosen_column", "rejected_column")}
    if template in OWN_TEMPLATES and "type" not in entry.unread:
        conversion.recipe.setdefault("chat_template", template)
    return make_sources(entry.paths(), **keys)


def take_factory_columns(entry: DataSetEntry, is_chat: bool, method: str) -> dict[str, Any]:
    """The columns of an entry of dataset_info.json. Those that are called as usual need no key."""
    taken = {name: entry.take(f"columns.{name}") for name in ("messages", "prompt", "chosen", "rejected")}
    entry.take("ranking")
    if entry.unread.get("columns.query") == "input":
        entry.take("columns.query")
    prompt = taken["messages"] or "conversations" if is_chat else taken["prompt"] or "instruction"
    if method == "kto":
        label, answer = entry.take("columns.kto_tag"), entry.take("columns.response") or "output"
        keys = {"label_column": None if label in LABEL_COLUMNS else label}
        if is_chat:
            return keys | {"messages_column": None if prompt in PROMPTS else prompt}
        is_usual = (prompt, answer) == ("instruction", "output")
        return keys if is_usual else keys | {"type": "messages", "prompt_column": prompt, "completion_column": answer}
    keys = {"prompt_column": None if prompt in PROMPTS else prompt}
    if not is_chat and prompt != "instruction":
        keys |= {"prompt_column": prompt, "type": "messages"}
    keys |= {f"{name}_column": taken[name] if taken[name] != name else None for name in ("chosen", "rejected")}
    return keys


FORMATS = {
    "alpaca": "alpaca", "sharegpt": "sharegpt", "chat_template": None, "completion": "text", "pretrain": "text",
    "openai": "messages",
}  # fmt: skip
ALPACA_COLUMNS = {"prompt": "instruction", "query": "input", "response": "output"}
ALPACA_PROMPT = (
    "chat_template: alpaca writes their prompt, but is one for all datasets, and another one is read by a chat template"
)
ALPACA_STYLE = "chat_template: alpaca writes the '### Instruction:' style alone"
PROMPT_ALONE = (
    "has no effect on this entry: of a prompt with its completion the completion alone is trained on; "
    "type: messages makes a conversation of the two"
)


def add_sources(tool: Tool, settings: Mapping[str, Any], source: Path, conversion: Conversion) -> None:
    """`datasets` and `eval_datasets` of the recipe. Raises `UserError` where a file names none."""
    readers = {
        "TRL": _trl_data,
        "Axolotl": _axolotl_data,
        "LLaMA-Factory": _factory_data,
        "torchtune": read_torchtune_data,
        "Automodel": read_automodel_data,
    }
    train, held_out = readers[tool](settings, source, conversion)
    if train:
        conversion.recipe["datasets"] = train
    if held_out:
        conversion.recipe["eval_datasets"] = held_out
        if conversion.recipe.pop("eval_split_size", None) is not None:
            conversion.remarks.append("eval_split_size is dropped: the file also names a held-out data set")
    if conversion.recipe.get("assistant_only_loss") is False:
        masked = [i for i, entry in enumerate(train) if _is_prompt_alone(entry)]
        conversion.remarks += [f"datasets[{i}]: assistant_only_loss: false {PROMPT_ALONE}" for i in masked]
        if masked and len(masked) == len(train):
            del conversion.recipe["assistant_only_loss"]


def _is_prompt_alone(entry: Mapping[str, Any]) -> bool:
    """Whether rows are read as plain prompts with completions, which no key has trained whole."""
    return "prompt_column" in entry if "type" not in entry else entry["type"] == "prompt_completion"


def _trl_data(settings: Mapping[str, Any], source: Path, conversion: Conversion) -> tuple[Sources, Sources]:
    text = settings.get("dataset_text_field")
    by_name = {
        "path": settings.get("dataset_name"),
        "name": settings.get("dataset_config"),
        "split": settings.get("dataset_train_split"),
        "text_column": text if text != "text" else None,
    }
    entries = list_entries(settings.get("datasets"), "datasets", source) or read_mixture(settings, source, conversion)
    mixed, held_out_of_it = read_mixer(settings, conversion)
    if mixed:
        return mixed, held_out_of_it
    if entries and by_name["path"]:
        conversion.remarks.append(f"dataset_name: {shorten(by_name['path'])} is dropped: datasets is given too")

    def read(entry: DataSetEntry) -> Sources:
        columns = entry.unread.get("columns")  # that alignment-handbook selects
        if compares_answers(conversion) and isinstance(columns, list) and set(columns) <= set(KNOWN_COLUMNS):
            entry.take("columns")
        keys = {key: entry.take(key) for key in keys_of(DatasetSource) if key != "path"}  # ours are welcome too
        return make_sources(entry.paths(), **keys)

    train = [
        s for s in read_each("TRL", entries or [DataSetEntry.of("dataset", by_name)], read, conversion) if "path" in s
    ]
    held_out = read_each("TRL", list_entries(settings.get("eval_datasets"), "eval_datasets", source), read, conversion)
    wants_held_out = str(settings.get("eval_strategy", settings.get("evaluation_strategy", "no"))) != "no"
    if wants_held_out and not held_out and "eval_split_size" not in conversion.recipe:
        held_out = [entry | {"split": settings.get("dataset_test_split", "test")} for entry in train[:1]]
    return train, held_out


def _axolotl_data(settings: Mapping[str, Any], source: Path, conversion: Conversion) -> tuple[Sources, Sources]:
    def entries(name: str) -> Sources:
        listed = list_entries(settings.get(name), name, source)
        styles.update(str(entry.unread.get("type")) for entry in listed)
        return read_each("Axolotl", listed, lambda entry: _axolotl_sources(entry, conversion), conversion)

    styles: set[str] = set()
    train, held_out = [*entries("datasets"), *entries("pretraining_dataset")], entries("test_datasets")
    if styles - {"completion"} == {"alpaca"}:
        conversion.recipe["chat_template"] = "alpaca"
    elif "alpaca" in styles:
        conversion.add_difference("datasets.type", "alpaca", ALPACA_PROMPT)
    return train, held_out


def _axolotl_sources(entry: DataSetEntry, conversion: Conversion) -> Sources:
    if compares_answers(conversion):
        return read_axolotl_preferences(entry, conversion.recipe["method"], conversion)
    entry.flatten("type", "message_property_mappings", "roles")
    kind = entry.unread.get("type")
    name = str(kind).split(".")[0].split(":")[0]
    has_columns = any(key.startswith("type.") for key in entry.unread)  # and a template, all in the type
    keys = {"name": entry.take("name"), "split": entry.take("split"), "type": FORMATS.get(name)}
    if name in FORMATS:
        entry.take("type")
    if name == "alpaca" and kind != name:
        conversion.add_difference(f"{entry.where}.type", kind, ALPACA_STYLE)
    if keys["type"] == "text":
        keys["text_column"] = entry.take("field") or entry.take("text_column")
    if has_columns:
        keys["prompt_column"] = entry.take("type.field_instruction") or "instruction"
        keys["completion_column"] = entry.take("type.field_output") or "output"
    elif name == "alpaca" and {"field_instruction", "field_output"} & entry.unread.keys():
        keys["prompt_column"] = entry.take("field_instruction") or "instruction"
        keys["completion_column"] = entry.take("field_output") or "output"
    return make_sources(entry.paths(), messages_column=entry.take("field_messages"), **keys)


def _factory_data(settings: Mapping[str, Any], source: Path, conversion: Conversion) -> tuple[Sources, Sources]:
    listed = Path(str(settings.get("dataset_dir", "data"))) / "dataset_info.json"
    info_path = find_from_root(source, listed) or source.parent / listed
    info = load_json(info_path, "fix it, or name another dataset_dir") if info_path.is_file() else {}
    method = conversion.recipe.get("method", "sft")

    def sources(key: str) -> Sources:
        wanted = settings.get(key) or []
        if not isinstance(wanted, str | list):
            raise UserError(
                f"{source}: {key}: names are expected, found {shorten(wanted)}; write them with commas between"
            )
        names = [str(name).strip() for name in (wanted.split(",") if isinstance(wanted, str) else wanted)]
        limit = settings.get("max_samples")
        return [take_first_rows(read, limit) for name in names if name for read in of_name(name)]

    def of_name(name: str) -> Sources:
        keys = info.get(name)
        if keys is None:
            conversion.to_do.append(f"datasets: {name} is not in {info_path}; put its file or hub name as path")
            return [{"path": name}]
        if not isinstance(keys, dict):
            raise UserError(
                f"{info_path}: {name}: a mapping is expected, found {shorten(keys)}; name its file_name there"
            )
        entry = DataSetEntry.of(f"{info_path.name}: {name}", keys)
        return read_each(
            "LLaMA-Factory",
            [entry],
            lambda entry: add_images(_factory_sources(entry, info_path.parent, method), entry),
            conversion,
        )

    def add_images(read: Sources, entry: DataSetEntry) -> Sources:
        folder = settings.get("media_dir")
        if "columns.images" not in entry.unread:
            return read
        if conversion.images is None and conversion.recipe.pop("chat_template", None):
            conversion.remarks.append(f"{entry.where}: the tokenizer's own template, which writes the images")
        conversion.images = conversion.images or guess_vision_family(str(settings.get("model_name_or_path")))
        return [source | {"image_folder": str(folder)} for source in read] if folder else read

    return sources("dataset"), sources("eval_dataset")


def _factory_sources(entry: DataSetEntry, folder: Path, method: str) -> Sources:
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
        for column in (*ALPACA_COLUMNS, "system", *(("history",) if columns.get("history") == "history" else ())):
            entry.take(f"columns.{column}")
    elif columns.get("prompt"):
        answer = next((column for column in ("response", "chosen") if columns.get(column)), None)
        keys["type"] = "messages" if answer else "text"  # text is what they pretrain on
        keys["prompt_column" if answer else "text_column"] = entry.take("columns.prompt")
        keys["completion_column"] = entry.take(f"columns.{answer}")
    keys["max_samples"] = entry.take("num_samples")
    return make_sources([str(folder / local) if local else hub], **keys)
