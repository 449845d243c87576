"""Reads the data sets of another tool's file one by one, and reports the keys that are not read."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.convert.counterparts import DATA_SET_KEYS, Tool, list_counterparts
from finetune.convert.foreign_values import as_json, shorten
from finetune.convert.value_conversion import Conversion, find_method_facts
from finetune.errors import UserError

# our role -> the names in other tools' files that mean it
SAME_ROLES = {"user": ("human",), "assistant": ("gpt",), "tool": ("observation",)}
# values of path that name no data set: data_files then lists the files
BUILDERS = (None, "json", "csv", "parquet", "arrow", "text")


@dataclass(slots=True)
class DataSetEntry:
    """One data set of another tool's file.

    Its reader takes each key that it converts out of `unread`. What stays there is reported.
    """

    where: str  # the entry's name in messages, such as datasets[0]
    unread: dict[str, Any]  # nested keys are dotted once they are flattened

    @classmethod
    def make(cls, where: str, keys: Mapping[Any, Any]) -> "DataSetEntry":
        """Makes an entry whose keys are all unread; YAML may have keys that are not text."""
        return cls(where, {str(key): value for key, value in keys.items()})

    def take(self, key: str) -> Any:
        """Removes a key from `unread` and returns its value; None if it is not there."""
        return self.unread.pop(key, None)

    def take_name_and_split(self) -> dict[str, Any]:
        """Takes `name` and `split`, whose keys are the same here."""
        return {"name": self.take("name"), "split": self.take("split")}

    def flatten(self, *keys: str) -> None:
        """Replaces the mappings under `keys` by dotted keys, such as type.format."""
        for key in keys:
            if isinstance(self.unread.get(key), dict):
                self.unread |= {
                    f"{key}.{inner}": value for inner, value in self.unread.pop(key).items()
                }

    def take_paths(self, key: str = "path") -> list[Any]:
        """Takes the paths to read: the files of data_files if there is no path or it only names
        their type, else the path, which is None if there is none.
        """
        path = self.take(key)
        files = self.unread.get("data_files")
        if path not in BUILDERS or not isinstance(files, str | list):
            return [path]
        self.take("data_files")
        return files if isinstance(files, list) else [files]

    def list_unread(self, tool: Tool) -> list[str]:
        """Lists a line for each unread key, except those that ask for what is done here anyway."""
        pairs = {pair.key: pair for pair in list_counterparts(tool, DATA_SET_KEYS)}
        lines = []
        for key, value in self.unread.items():
            section = key.split(".")[0]
            names = (key, key.split(".")[-1], section)
            pair = next((pairs[name] for name in names if name in pairs), None)
            usual = pairs[key].usual if key in pairs else ()
            # false asks for nothing under a known key, unless true is what is done here
            is_off = value is False and pair is not None and "true" not in usual
            trains_no_role = key == "roles_to_train" and value is not None
            is_empty = value in (None, "", [], {}) and not trains_no_role
            is_ignored = section in pairs and not pairs[section].has_effect
            is_usual = as_json(value) in usual or _names_role(key, value)
            if not (is_off or is_empty or is_ignored or is_usual):
                note = pair.note if pair is not None else ""
                lines.append(f"{self.where}.{key}: {shorten(value)}   ({note or 'not known here'})")
        return lines


def _names_role(key: str, value: Any) -> bool:
    """Whether a key `roles.ROLE` has that role's own names alone."""
    section, _, role = key.partition(".")
    names = value if isinstance(value, list) else [value]
    own_names = {role, *SAME_ROLES.get(role, ())}
    return section == "roles" and own_names.issuperset(map(str, names))


Sources = list[dict[str, Any]]  # entries of our `datasets` or `eval_datasets`


def list_entries(value: Any, name: str, source: Path) -> list[DataSetEntry]:
    """Lists the data sets in `value`, which the file has under the key `name`.

    Raises `UserError` unless it is None or a list of mappings.
    """
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
    """Converts the entries of a file by `read`, and reports the keys that it leaves unread."""
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
    """Makes one of our entries for each path; each has all `keys` that are not None."""
    entries = ({"path": path, **keys} for path in paths)
    return [{key: value for key, value in entry.items() if value is not None} for entry in entries]


def take_first_rows(entry: dict[str, Any], limit: Any) -> dict[str, Any]:
    """Limits one of our entries to the first `limit` rows of its split, by a slice of the split.

    Returns the entry unchanged if `limit` is no integer, or if its split is a slice already.
    """
    split = str(entry.get("split") or "train")
    if not isinstance(limit, int) or isinstance(limit, bool) or "[" in split:
        return entry
    return entry | {"split": f"{split}[:{limit}]"}


def trains_on_answers(conversion: Conversion) -> bool:
    """Whether the method trains on the answers of its rows, not on pairs or ratings of answers."""
    return find_method_facts(conversion.recipe).rows == "answers"


ROOT_DEPTH = 7  # the file's own folder and six above it are searched


def find_from_root(source: Path, name: str | Path) -> Path | None:
    """Finds the file `name` that `source` names, from the folder of `source` or a folder above it.

    Other tools' examples name files from the root of the tool. The working folder is searched
    last. Returns None if no such file is found.
    """
    folders = (source.parent, *source.resolve().parents[1:ROOT_DEPTH], Path())
    return next((folder / name for folder in folders if (folder / name).is_file()), None)
