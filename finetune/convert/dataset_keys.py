"""The keys of another tool's data set: those with a counterpart, and why the others have none."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.config.methods import METHODS
from finetune.config.other_tools import Counterpart, Tool, unsupported, without_counterpart
from finetune.convert.rules import Conversion, shorten
from finetune.errors import UserError

BUILDERS = (None, "json", "csv", "parquet", "arrow", "text")  # their path where data_files lists the files
FILES = "an entry for each file; the files of a hub data set cannot be picked"
COLUMNS = "columns are recognized, or named with prompt_column, messages_column, ..."
TURNS = "turns are read from role or from, and content or value"
ROLES = "user, assistant, system and tool are known, human, gpt, function_call and observation too"
TRAINED = "the assistant's turns are trained, each with its end token; assistant_only_loss: false trains every turn"
PAIR = "only a prompt and a completion column can be named; type alpaca reads instruction, input and output"
PREFERENCE = (
    "chosen_column, rejected_column and label_column under stage: dpo and kto; under sft completion_column: "
    "chosen trains on "
    "the chosen answers alone, and on_bad_row: skip drops rows that are labeled false"
)
ALPACA_PROMPT = (
    "chat_template: alpaca writes their prompt, but is one for all datasets, and another one is read by a chat template"
)
ALPACA_STYLE = "chat_template: alpaca writes the '### Instruction:' style alone"
SLICE = "a split slice, such as split: train[:1000]"
FOLDER = "path takes a file, glob, folder or hub name"
SYSTEM = "system turns are read from the rows"

ENTRY_KEYS: Mapping[Tool, tuple[Counterpart, ...]] = {
    "TRL": (
        Counterpart("data_files", "path", FILES),
        *without_counterpart(FOLDER, "data_dir"),
        *without_counterpart(COLUMNS, "columns"),
    ),
    "Axolotl": (
        Counterpart("data_files", "path", FILES),
        Counterpart("type", "type", "else the rows' format is recognized from the columns"),
        Counterpart("field_messages", "messages_column"),
        Counterpart("field_instruction", "prompt_column", "of type alpaca, and in a type that names columns"),
        Counterpart("field_output", "completion_column", "of type alpaca, and in a type that names columns"),
        Counterpart("field", "text_column", "of type completion"),
        Counterpart("field_chosen", "chosen_column"),
        Counterpart("field_rejected", "rejected_column"),
        *without_counterpart(TRAINED, "roles_to_train", "train_on_eos", "train_on_eot", "message_field_training",
               "message_field_training_detail"),
        *without_counterpart(TURNS, "message_field_role", "message_field_content", "message_property_mappings"),
        *without_counterpart(ROLES, "roles"),
        *without_counterpart(PAIR, "field_input", "field_system", "system_prompt", "system_format", "format",
            "no_input_format"),
        *without_counterpart(SYSTEM, "drop_system_message"),
        *without_counterpart("chat_template is one for all datasets", "chat_template", "chat_template_jinja"),
        *without_counterpart("the kind of file follows from its name", "ds_type"),
        *without_counterpart(FOLDER, "data_dir"),
        *without_counterpart(SLICE, "shards", "shards_idx", "preprocess_shards"),
        *without_counterpart("not supported", "revision", "trust_remote_code", "split_thinking", "field_tools"),
    ),
    "LLaMA-Factory": (
        Counterpart("file_name", "path"),
        Counterpart("hf_hub_url", "path"),
        Counterpart("subset", "name"),
        Counterpart("formatting", "type"),
        Counterpart("columns.messages", "messages_column"),
        Counterpart("columns.prompt", "prompt_column"),
        Counterpart("columns.response", "completion_column"),
        *without_counterpart(TURNS, "tags.role_tag", "tags.content_tag"),
        *without_counterpart(ROLES, "tags.user_tag", "tags.assistant_tag", "tags.observation_tag", "tags.function_tag",
               "tags.system_tag"),
        *without_counterpart(PREFERENCE, "ranking", "columns.chosen", "columns.rejected", "columns.kto_tag"),
        *without_counterpart(PAIR, "columns.query"),
        *without_counterpart("type alpaca reads the column of that name", "columns.history"),
        *without_counterpart("types sharegpt and alpaca read the column of that name", "columns.system",
            "columns.tools"),
        Counterpart("columns.images", None, "images are read from the column images or image; rename it"),
        *unsupported("video", "columns.videos"),
        *unsupported("audio", "columns.audios"),
        Counterpart("num_samples", "max_samples", "drawn by the seed"),
        *without_counterpart(FOLDER, "folder", "ms_hub_url", "om_hub_url", "script_url", "cloud_file_name"),
    ),
    "torchtune": (
        Counterpart("source", "path"),
        Counterpart("data_files", "path", FILES),
        Counterpart("column", "text_column", "of text_completion_dataset"),
        Counterpart("conversation_column", "messages_column"),
        Counterpart("column_map.input", "prompt_column",
            "of instruct_dataset; alpaca_dataset has instruction for it, and its input column is not read"),
        Counterpart("column_map.output", "completion_column", "of instruct_dataset and alpaca_dataset"),
        Counterpart("column_map.chosen", "chosen_column", "of preference_dataset"),
        Counterpart("column_map.rejected", "rejected_column", "of preference_dataset"),
        *without_counterpart("the rows' format is recognized from the columns", "_component_", "conversation_style"),
        *without_counterpart(PAIR, "column_map"),
        *without_counterpart("packing and assistant_only_loss are for all datasets", "packed", "train_on_input"),
        *without_counterpart(
               "documents are never split by packing; overlength: split is for those longer than max_length",
               "split_across_pack"),
        *without_counterpart(SYSTEM, "new_system_prompt"),
        *without_counterpart(FOLDER, "data_dir"),
        *without_counterpart("not supported", "filter_fn", "filter_kwargs", "image_dir", "image_tag", "add_eos"),
    ),
    "Automodel": (
        Counterpart("path_or_dataset_id", "path"),
        Counterpart("path_or_dataset", "path"),
        Counterpart("dataset_name", "path"),
        Counterpart("column_mapping.question", "prompt_column", "of ColumnMappedTextInstructionDataset"),
        Counterpart("column_mapping.answer", "completion_column", "of ColumnMappedTextInstructionDataset"),
        Counterpart("limit_dataset_samples", "split", "a slice, such as split: train[:1000]"),
        Counterpart("num_samples_limit", "split", "a slice, such as split: train[:1000]"),
        Counterpart("chat_template", "chat_template", "one for all datasets"),
        *without_counterpart("rows are drawn in an order of seed", "shuffle_seed"),
        *without_counterpart("the answer is what is trained on", "mask_reasoning_content"),
        *without_counterpart(PAIR, "column_mapping.context"),
    ),
}  # fmt: skip

# Values that ask for the behavior here.
SAME_ROLES = {"user": ("human",), "assistant": ("gpt",), "tool": ("observation",)}
USUAL: Mapping[str, tuple[Any, ...]] = {
    "roles_to_train": ("assistant", ["assistant"], ["gpt"]), "train_on_eos": ("turn",), "train_on_eot": ("turn",),
    "message_field_training": ("train", "weight"), "message_field_role": ("role", "from"),
    "message_field_content": ("content", "value"), "message_property_mappings.role": ("role", "from"),
    "message_property_mappings.content": ("content", "value"), "tags.role_tag": ("role", "from"),
    "tags.content_tag": ("content", "value"), "tags.user_tag": ("user", "human"),
    "tags.assistant_tag": ("assistant", "gpt"), "tags.observation_tag": ("tool", "observation"),
    "tags.function_tag": ("function_call",), "tags.system_tag": ("system",), "columns.tools": ("tools",),
    "columns.history": ("history",), "columns.images": ("images", "image"),
    "conversation_style": ("sharegpt", "openai"), "answer_only_loss_mask": (True,),
    "template_thinking_key": ("thinking",), "field_thinking": ("thinking",), "data_files": ([],),
}  # fmt: skip
# Padding, the length (read with the recipe's) and the tokenizer, which is the model's own.
NO_EFFECT = ("padding", "truncation", "pad_to_max_length", "seq_length", "tokenizer", "shuffle_seed",
"start_of_turn_token",
             "packed")  # fmt: skip


@dataclass(slots=True)
class TheirEntry:
    """One data set of theirs. Keys that are converted are removed from `unread`; the rest have no counterpart."""

    where: str  # as in datasets[0]
    unread: dict[str, Any]  # dotted where it is nested

    @classmethod
    def of(cls, where: str, keys: Mapping[Any, Any]) -> "TheirEntry":
        return cls(where, {str(key): value for key, value in keys.items()})

    def take(self, key: str) -> Any:
        return self.unread.pop(key, None)

    def flatten(self, *keys: str) -> None:
        """Gives what is nested under `keys` dotted names."""
        for key in keys:
            if isinstance(self.unread.get(key), dict):
                self.unread |= {f"{key}.{inner}": value for inner, value in self.unread.pop(key).items()}

    def paths(self, key: str = "path") -> list[Any]:
        """What is read: the path, or the files where the path only says of which kind they are."""
        path, files = self.take(key), self.unread.get("data_files")
        if path not in BUILDERS or not isinstance(files, str | list):
            return [path]
        self.take("data_files")
        return files if isinstance(files, list) else [files]

    def list_unread(self, tool: Tool) -> list[str]:
        """A line for each unread key that has an effect."""
        notes = {pair.theirs: pair.note for pair in ENTRY_KEYS[tool]}
        lines = []
        for key, value in self.unread.items():
            note = next((notes[name] for name in (key, key.split(".")[-1], key.split(".")[0]) if name in notes), None)
            if key.split(".")[0] in NO_EFFECT:
                continue
            names = map(str, value if isinstance(value, list) else [value])
            if key.startswith("roles.") and set(names) <= {key[6:], *SAME_ROLES.get(key[6:], ())}:
                continue  # as they are read anyway
            if value in (None, "", [], {}) or value in USUAL.get(key, ()) or (value is False and note is not None):
                continue
            lines.append(f"{self.where}.{key}: {shorten(value)}   ({note or 'not known here'})")
        return lines


Sources = list[dict[str, Any]]


def list_entries(value: Any, name: str, source: Path) -> list[TheirEntry]:
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


def read_each(
    tool: Tool, entries: Iterable[TheirEntry], read: Callable[[TheirEntry], Sources], found: Conversion
) -> Sources:
    """Our entries from theirs; the keys that `read` does not take are listed as differences."""
    sources: Sources = []
    for entry in entries:
        sources += read(entry)
        found.differences += entry.list_unread(tool)
        lacking = {pair.theirs: pair.missing_capability for pair in ENTRY_KEYS[tool]}
        found.missing_capabilities += sorted({lacking[key] for key in entry.unread if lacking.get(key)})
    return sources


def make_sources(paths: Iterable[Any], **keys: Any) -> Sources:
    return [{key: value for key, value in {"path": path, **keys}.items() if value is not None} for path in paths]


def take_first_rows(entry: dict[str, Any], limit: Any) -> dict[str, Any]:
    """An entry with the first `limit` rows of its split; all if that is None or the split is a slice already."""
    split = str(entry.get("split") or "train")
    if not isinstance(limit, int) or isinstance(limit, bool) or "[" in split:
        return entry
    return entry | {"split": f"{split}[:{limit}]"}


def compares_answers(found: Conversion) -> bool:
    """Whether the rows hold pairs of answers or rated ones."""
    return METHODS[found.recipe.get("method", "sft")].rows != "answers"


ROOT_DEPTH = 7  # folders


def find_from_root(source: Path, name: str | Path) -> Path | None:
    """A file that the tool's file `source` names: its own files name theirs from its root, some folders above them."""
    folders = (source.parent, *source.resolve().parents[1:ROOT_DEPTH], Path())
    return next((folder / name for folder in folders if (folder / name).is_file()), None)
