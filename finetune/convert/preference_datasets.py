"""Other tools' data sets of preferences as entries of `datasets`: pairs of answers, or answers that are rated."""

from typing import Any

from finetune.convert.dataset_keys import Sources, TheirEntry, make_sources
from finetune.convert.tool_rules import Conversion

# Axolotl's types are called template.form; the columns of a form that joins texts, of which the prompt is a user's turn.
PAIR_FORMS = {
    "argilla": {
        "prompt_column": "instruction",
        "chosen_column": "chosen_response",
        "rejected_column": "rejected_response",
    },
    "icr": {"prompt_column": "input"},
    "intel": {"prompt_column": "question"},
    "prompt_pairs": {"prompt_column": "prompt"},
}
RATED_FORMS = {
    "argilla": {"prompt_column": "instruction"},
    "intel": {"prompt_column": "question"},
    "prompt_pairs": {"prompt_column": "prompt"},
    "ultra": {"prompt_column": "prompt"},
    "argilla_chat": {"prompt_column": "chosen"},  # messages, without the answer
}
MESSAGE_FORMS = ("default", "argilla_chat", "ultra")  # whole conversations, which are recognized
OWN_TEMPLATES = {"chatml": "chatml", "llama3": "llama3"}
LABELS = ("label", "kto_tag")
KNOWN_COLUMNS = ("prompt", "chosen", "rejected", "messages", "completion", "label")
KNOWN_PROMPTS = ("prompt", "conversations", "conversation", "question", "messages", "instruction")
PAIRED_COLUMNS = {"prompt": "prompt_column", "chosen": "chosen_column", "rejected": "rejected_column"}
TORCHTUNE_PAIRS = {
    "stack_exchange_paired": "lvwerra/stack-exchange-paired",
    "hh_rlhf_helpful": "RLHFlow/HH-RLHF-Helpful-standard",
    "preference": None,
}
STACK_EXCHANGE = {"prompt": "question", "chosen": "response_j", "rejected": "response_k"}
SUBFOLDER = "read from this folder of the hub data set alone there; here from all of it"


def read_axolotl_preferences(entry: TheirEntry, method: str, found: Conversion) -> Sources:
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
        keys |= forms[form] | ({"completion_column": "completion"} if method == "kto" else {})
        keys["type"] = None if form == "argilla_chat" else "messages"
    elif kind is None or form in MESSAGE_FORMS or (not form and template in OWN_TEMPLATES):
        entry.take("type")
    keys |= {key: entry.take(f"field_{key[:-7]}") or keys.get(key) for key in ("chosen_column", "rejected_column")}
    if template in OWN_TEMPLATES and "type" not in entry.unread:
        found.recipe.setdefault("chat_template", OWN_TEMPLATES[template])
    return make_sources(entry.paths(), **keys)


def take_factory_columns(entry: TheirEntry, is_chat: bool, method: str) -> dict[str, Any]:
    """The columns of an entry of dataset_info.json. Those that are called as usual need no key."""
    taken = {name: entry.take(f"columns.{name}") for name in ("messages", "prompt", "chosen", "rejected")}
    entry.take("ranking")
    if entry.unread.get("columns.query") == "input":
        entry.take("columns.query")
    prompt = taken["messages"] or "conversations" if is_chat else taken["prompt"] or "instruction"
    if method == "kto":
        label, answer = entry.take("columns.kto_tag"), entry.take("columns.response") or "output"
        keys = {"label_column": None if label in LABELS else label}
        if is_chat:
            return keys | {"messages_column": None if prompt in KNOWN_PROMPTS else prompt}
        is_usual = (prompt, answer) == ("instruction", "output")
        return keys if is_usual else keys | {"type": "messages", "prompt_column": prompt, "completion_column": answer}
    keys = {"prompt_column": None if prompt in KNOWN_PROMPTS else prompt}
    if not is_chat and prompt != "instruction":
        keys |= {"prompt_column": prompt, "type": "messages"}
    keys |= {f"{name}_column": taken[name] if taken[name] != name else None for name in ("chosen", "rejected")}
    return keys


def take_trl_columns(entry: TheirEntry) -> None:
    """The columns that alignment-handbook selects of a data set, where all of them are recognized."""
    columns = entry.unread.get("columns")
    if isinstance(columns, list) and set(columns) <= set(KNOWN_COLUMNS):
        entry.take("columns")


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
