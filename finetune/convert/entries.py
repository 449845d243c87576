"""The data sets of another tool's file, one by one: which of their keys are read, and which are
reported.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.convert.counterparts import DATA_SET_KEYS, Tool, list_counterparts
from finetune.convert.foreign_values import shorten
from finetune.convert.value_conversion import Conversion, find_method_facts
from finetune.errors import UserError

# Values that ask for the behavior here.
SAME_ROLES = {"user": ("human",), "assistant": ("gpt",), "tool": ("observation",)}
USUAL: Mapping[str, tuple[Any, ...]] = {
    "roles_to_train": ("assistant", ["assistant"], ["gpt"]),
    "train_on_eos": ("turn",),
    "train_on_eot": ("turn",),
    "message_field_training": ("train", "weight"),
    "message_field_role": ("role", "from"),
    "message_field_content": ("content", "value"),
    "message_property_mappings.role": ("role", "from"),
    "message_property_mappings.content": ("content", "value"),
    "tags.role_tag": ("role", "from"),
    "tags.content_tag": ("content", "value"),
    "tags.user_tag": ("user", "human"),
    "tags.assistant_tag": ("assistant", "gpt"),
    "tags.observation_tag": ("tool", "observation"),
    "tags.function_tag": ("function_call",),
    "tags.system_tag": ("system",),
    "columns.tools": ("tools",),
    "columns.images": ("images", "image"),
    "conversation_style": ("sharegpt", "openai"),
    "answer_only_loss_mask": (True,),
    "add_eos": (True,),
    "template_thinking_key": ("thinking",),
    "field_thinking": ("thinking",),
    "data_files": ([],),
}
# Padding, the length (read with the recipe's) and the tokenizer, which is the model's own.
NO_EFFECT = (
    "padding",
    "truncation",
    "pad_to_max_length",
    "seq_length",
    "tokenizer",
    "start_of_turn_token",
    "packed",
    "ds_type",
)
# their path where data_files lists the files
BUILDERS = (None, "json", "csv", "parquet", "arrow", "text")


@dataclass(slots=True)
class DataSetEntry:
    """One data set of a file.

    A key that is converted is removed from `unread`; the rest have no counterpart.
    """

    where: str  # as in datasets[0]
    unread: dict[str, Any]  # dotted where it is nested

    @classmethod
    def make(cls, where: str, keys: Mapping[Any, Any]) -> "DataSetEntry":
        return cls(where, {str(key): value for key, value in keys.items()})

    def take(self, key: str) -> Any:
        return self.unread.pop(key, None)

    def take_name_and_split(self) -> dict[str, Any]:
        return {"name": self.take("name"), "split": self.take("split")}

    def flatten(self, *keys: str) -> None:
        """Gives what is nested under `keys` dotted names."""
        for key in keys:
            if isinstance(self.unread.get(key), dict):
                self.unread |= {
                    f"{key}.{inner}": value for inner, value in self.unread.pop(key).items()
                }

    def take_paths(self, key: str = "path") -> list[Any]:
        """Takes what is read: the path, or the files where the path only says of which kind they
        are.
        """
        path = self.take(key)
        files = self.unread.get("data_files")
        if path not in BUILDERS or not isinstance(files, str | list):
            return [path]
        self.take("data_files")
        return files if isinstance(files, list) else [files]

    def list_unread(self, tool: Tool) -> list[str]:
        """Lists the unread keys that have an effect, a line for each."""
        notes = {pair.key: pair.note for pair in list_counterparts(tool, DATA_SET_KEYS)}
        lines = []
        for key, value in self.unread.items():
            section = key.split(".")[0]
            names = (key, key.split(".")[-1], section)
            note = next((notes[name] for name in names if name in notes), None)
            is_off = value is False and note is not None and True not in USUAL.get(key, ())
            asks_for_nothing = value in (None, "", [], {}) or is_off
            if section not in NO_EFFECT and not asks_for_nothing and not _is_usual(key, value):
                lines.append(f"{self.where}.{key}: {shorten(value)}   ({note or 'not known here'})")
        return lines


def _is_usual(key: str, value: Any) -> bool:
    """Whether a value asks for the behavior here."""
    if key.startswith("roles."):
        role = key.removeprefix("roles.")
        names = value if isinstance(value, list) else [value]
        return {str(name) for name in names} <= {role, *SAME_ROLES.get(role, ())}
    return value in USUAL.get(key, ())


Sources = list[dict[str, Any]]


def list_entries(value: Any, name: str, source: Path) -> list[DataSetEntry]:
    """Lists the data sets under the key `name` of a file."""
    if value is None:
        return []
    if not isinstance(value, list):
        raise UserError(
            f"{source}: {name}: a list of data sets is expected, found {shorten(value)}; write `- "
            "path: ...`"
        )
    for i, item in enumerate(value):
        if not isinstance(item, dict):
            raise UserError(
                f"{source}: {name}[{i}]: a mapping with a path is expected, found {shorten(item)}; "
                "write `- path: ...`"
            )
    return [DataSetEntry.make(f"{name}[{i}]", item) for i, item in enumerate(value)]


def read_each(
    tool: Tool,
    entries: Iterable[DataSetEntry],
    read: Callable[[DataSetEntry], Sources],
    conversion: Conversion,
) -> Sources:
    """Reads our entries from a file's; the keys that `read` does not take are listed as
    differences.
    """
    sources: Sources = []
    for entry in entries:
        sources += read(entry)
        conversion.differences += entry.list_unread(tool)
        unread = [
            pair for pair in list_counterparts(tool, DATA_SET_KEYS) if pair.key in entry.unread
        ]
        conversion.missing_capabilities += sorted(
            {pair.missing_capability for pair in unread} - {""}
        )
    return sources


def make_sources(paths: Iterable[Any], **keys: Any) -> Sources:
    """Makes an entry of ours for each path, with the keys that have a value."""
    entries = ({"path": path, **keys} for path in paths)
    return [{key: value for key, value in entry.items() if value is not None} for entry in entries]


def take_first_rows(entry: dict[str, Any], limit: Any) -> dict[str, Any]:
    """Returns an entry of the first `limit` rows of its split; of all if that is None or the split
    is a slice.
    """
    split = str(entry.get("split") or "train")
    if not isinstance(limit, int) or isinstance(limit, bool) or "[" in split:
        return entry
    return entry | {"split": f"{split}[:{limit}]"}


def compares_answers(conversion: Conversion) -> bool:
    """Whether the rows hold pairs of answers or rated ones."""
    return find_method_facts(conversion.recipe).rows != "answers"


ROOT_DEPTH = 7  # folders


def find_from_root(source: Path, name: str | Path) -> Path | None:
    """Finds a file that `source` names, from its own folder or from the root of the tool, some
    folders above.
    """
    folders = (source.parent, *source.resolve().parents[1:ROOT_DEPTH], Path())
    return next((folder / name for folder in folders if (folder / name).is_file()), None)
