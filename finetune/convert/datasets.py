"""Converts other tools' data sets to entries of `datasets` and `eval_datasets`.

`READERS` has a function for each tool. It takes the keys that it converts out of a `DataSetEntry`;
`read_each` reports the keys that stay.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.config.keys import keys_of
from finetune.config.schema import DatasetSource
from finetune.convert.alignment_handbook import read_mixer, read_mixture
from finetune.convert.automodel import SHUFFLED_BEFORE
from finetune.convert.chat_templates import (
    AFTER_PROMPT,
    EARLIER_ENDS,
    HEADER,
    MAYBE_THINKING,
    SAVED_TEMPLATE,
    SPACE_KEPT,
    THINKING,
    THINKING_LAST,
    forget_turns,
)
from finetune.convert.counterparts import Tool, ToolFile
from finetune.convert.entries import (
    BUILDERS,
    DataSetEntry,
    Sources,
    find_from_root,
    list_entries,
    make_sources,
    read_each,
    take_first_rows,
    trains_on_answers,
)
from finetune.convert.factory_v1 import V1_ROWS, list_v1_entries, read_v1_entry
from finetune.convert.foreign_values import shorten
from finetune.convert.image_models import runs_for_images
from finetune.convert.model_names import guess_family, guess_vision_family, name_model
from finetune.convert.runnable import OWN_WORDS, WORDS_THERE
from finetune.convert.shared import PACKED_IN_ORDER
from finetune.convert.swift import ON_HUGGING_FACE, adapt_rows, repeat_rows
from finetune.convert.value_conversion import Conversion, find_method_facts, read_section
from finetune.data.formats import LABEL_COLUMNS
from finetune.data.preferences import PROMPTS
from finetune.errors import UserError
from finetune.files.json_files import load_json

# a column of preference or rated data -> the key of our entries that names it
PAIRED_COLUMNS = {
    "prompt": "prompt_column",
    "chosen": "chosen_column",
    "rejected": "rejected_column",
}
RATED_COLUMNS = {"completion": "completion_column", "label": "label_column"}
# torchtune's data sets of preferences -> their source on the hub; None: the file names it
TORCHTUNE_PAIRS = {
    "stack_exchange_paired": "lvwerra/stack-exchange-paired",
    "hh_rlhf_helpful": "RLHFlow/HH-RLHF-Helpful-standard",
    "preference": None,
}
# the columns of stack_exchange_paired
STACK_EXCHANGE = {"prompt": "question", "chosen": "response_j", "rejected": "response_k"}
# sample_dataset of ms-swift's dataset/utils.py, _load_single_dataset of LLaMA-Factory's
# data/loader.py
REPEATED = (
    "of a data set with fewer rows some are repeated there, until there are so many; here each is "
    "read once"
)
SUBFOLDER = "read from this folder of the hub data set alone there; here from all of it"


def _name_component(entry: DataSetEntry) -> str:
    """Returns the function of torchtune that an entry names, without module and ending.

    "alpaca" for torchtune.datasets.alpaca_dataset. If no function makes the data set, this is
    the transform of its rows. Empty if there is neither.
    """
    entry.flatten("transform")
    component = entry.unread.get("_component_") or entry.unread.get("transform._component_") or ""
    name = str(component).rsplit(".", 1)[-1]
    return name.removesuffix("_dataset").removesuffix("_transform")


def _read_torchtune_preferences(entry: DataSetEntry, conversion: Conversion) -> Sources:
    """Converts a data set of preferences; an unknown component stays unread, so it is reported."""
    component = _name_component(entry)
    entry.flatten("column_map")
    keys = entry.take_name_and_split()
    if component in TORCHTUNE_PAIRS:
        entry.take("_component_")
    is_stack_exchange = component == "stack_exchange_paired"
    names_columns = any(key.startswith("column_map.") for key in entry.unread)
    default_columns = {}
    if is_stack_exchange and not names_columns:  # a map replaces all of the default columns there
        default_columns = STACK_EXCHANGE
    for name, our_key in PAIRED_COLUMNS.items():
        column = entry.take(f"column_map.{name}") or default_columns.get(name)
        if column != name:  # our reader finds a column of this name by itself
            keys[our_key] = column
    default_source = TORCHTUNE_PAIRS.get(component)
    if is_stack_exchange:
        keys["type"] = "messages"  # its columns are plain texts, of which torchtune makes turns
        conversion.add_difference(f"{entry.where}.data_dir", "data/rl", SUBFOLDER)
    return make_sources([path or default_source for path in entry.take_paths("source")], **keys)


# torchtune's other data sets -> the `type` of our entries; None: our reader recognizes the rows
TORCHTUNE_FORMATS = {
    "alpaca": "alpaca",
    "alpaca_cleaned": "alpaca",
    "chat": None,
    "text_completion": "text",
    "instruct": "messages",
    "grammar": "messages",
    "samsum": "messages",
    "slimorca": "messages",
    "the_cauldron": "cauldron",
    "gsm8k": "messages",
}
# those of pairs of texts -> their columns (prompt, answer), if the file's column_map names none
TORCHTUNE_COLUMNS = {
    "instruct": ("input", "output"),
    "grammar": ("input", "output"),
    "samsum": ("dialogue", "summary"),
    "gsm8k": ("question", "answer"),
}
# those that train the prompt too unless train_on_input is false
TRAINED_PROMPTS = ("alpaca", "alpaca_cleaned")
# those with a source on the hub, if the file names none
TORCHTUNE_SOURCES = {
    "alpaca": "tatsu-lab/alpaca",
    "alpaca_cleaned": "yahma/alpaca-cleaned",
    "grammar": "liweili/c4_200m",
    "samsum": "Samsung/samsum",
    "slimorca": "Open-Orca/SlimOrca-Dedup",
    "the_cauldron": "HuggingFaceM4/the_cauldron",
    "gsm8k": "openai/gsm8k",
}
# split_across_pack of its text_completion_dataset, which is true by default
SPLIT_BY_PACKING = "a text that does not fit is split over two packed rows there; none is here"
# validate_messages of torchtune's data/_messages.py, and _normalize_messages of Automodel's
# components/datasets/llm/chat_dataset.py
OF_CHATS = "a message's train or weight is not read there; it is here"
# OpenAIToMessages of its data/_messages.py, in 0.6.1 and 0.7
OF_OPENAI = (
    "of a row with tools, their description and the calls are left out there, an answer without "
    "words trains the text of the message before it once more, and a tool's result stops the run; "
    "here all of it is trained that the chat template writes",
    "the text parts of a content are tokenized apart there, as one text here",
)
R1_PROMPT = (
    "a question stands in a text there that asks for reasoning and an answer in tags, and opens "
    "<think>, without a chat template; here it is a user's turn"
)


def _read_torchtune(
    settings: ToolFile, source: Path, conversion: Conversion
) -> tuple[Sources, Sources]:
    """Converts the data sets of a torchtune file: (for training, held out)."""
    trains_input = read_section(settings, "dataset").get("train_on_input", True)

    def read(entry: DataSetEntry) -> Sources:
        if not trains_on_answers(conversion) and _name_component(entry) != "gsm8k":
            return _read_torchtune_preferences(entry, conversion)
        return _read_torchtune_entry(entry, trains_input, source, conversion)

    def read_key(key: str) -> Sources:
        entries = _list_torchtune(key, settings, source, conversion)
        return read_each("torchtune", entries, read, conversion)

    train = read_key("dataset")
    return train, read_key("dataset_val")


def _list_torchtune(
    key: str, settings: ToolFile, source: Path, conversion: Conversion
) -> list[DataSetEntry]:
    """Lists the data sets under `key`, which has one or a list.

    Keys that are set for the whole recipe here, such as `packed`, are taken from the entries.
    """
    value = settings.get(key)
    if isinstance(value, dict):
        entry = DataSetEntry.make(key, value)
        if key == "dataset":
            entry.take("packed")
            entry.take("train_on_input")
        return [entry]
    entries = list_entries(value or settings.get(f"{key}s"), key, source)
    _adapt_weights(entries, conversion)
    are_packed = [entry.take("packed") for entry in entries]
    if key == "dataset" and any(are_packed) and trains_on_answers(conversion):
        conversion.recipe["packing"] = True  # torchtune packs all of them or none
    return entries


# get_multi_dataset of torchtune's data/_utils.py uses torchdata's MultiNodeWeightedSampler;
# _setup_data of its recipes/dev/lora_finetune_distributed_multi_dataset.py
DRAWN_BY_WEIGHTS = (
    "each row is drawn from a data set by its share of the weights there, and one that ends is "
    "read again; here a weight is how often a data set is read, so that a larger one has more of "
    "the rows"
)


def _adapt_weights(entries: Sequence[DataSetEntry], conversion: Conversion) -> None:
    """Reports how torchtune mixes data sets by weights; drops that of a single data set."""
    weights = [entry.unread["weight"] for entry in entries if "weight" in entry.unread]
    if len(entries) > 1 and weights:
        conversion.add_difference("datasets.weight", weights, DRAWN_BY_WEIGHTS)
    elif weights:
        entries[0].take("weight")  # torchtune does not read it either


def _read_torchtune_entry(
    entry: DataSetEntry, trains_input: Any, source: Path, conversion: Conversion
) -> Sources:
    """Converts a data set of a torchtune file for supervised fine-tuning.

    `trains_input`: train_on_input of the section `dataset`, which has been taken from the entry.
    """
    component = _name_component(entry)
    if component in TRAINED_PROMPTS and entry.unread.get("train_on_input", trains_input):
        conversion.recipe["assistant_only_loss"] = False
    if component in TORCHTUNE_FORMATS:
        entry.take("_component_")
        entry.take("transform._component_")
    if component == "text_completion" and "max_length" in conversion.recipe:
        conversion.recipe["overlength"] = "truncate"  # torchtune does not train the rest of a text
    if component in ("chat", "slimorca"):
        notes = OF_OPENAI if entry.unread.get("conversation_style") == "openai" else ()
        conversion.remarks += [f"{entry.where}: {note}" for note in (OF_CHATS, *notes)]
    _report_torchtune_packing(entry, component, conversion)
    keys = _take_torchtune_columns(entry, component)
    paths = [path or TORCHTUNE_SOURCES.get(component) for path in entry.take_paths("source")]
    if not paths or paths[0] in BUILDERS:
        raise UserError(
            f"{source}: {entry.where}: {component} names no source; set it to a file or hub name"
        )
    keys = entry.take_name_and_split() | keys
    if component == "gsm8k":
        keys["name"] = keys["name"] or "main"
        keys["split"] = keys["split"] or "train"
        conversion.add_difference(f"{entry.where}._component_", component, R1_PROMPT)
    keys["name"] = entry.take("subset") or keys["name"]
    weight = entry.take("weight")
    if weight not in (None, 1.0):
        keys["weight"] = weight
    return make_sources(paths, **keys)


def _report_torchtune_packing(entry: DataSetEntry, component: str, conversion: Conversion) -> None:
    """Reports how torchtune packs rows: in their order, and texts split over two packed rows."""
    if not conversion.recipe.get("packing"):
        return
    splits = entry.unread.get("split_across_pack")
    if component == "text_completion" and splits is None:
        conversion.add_difference(f"{entry.where}.split_across_pack", splits, SPLIT_BY_PACKING)
    elif not splits and PACKED_IN_ORDER not in conversion.remarks:
        conversion.remarks.append(PACKED_IN_ORDER)


def _take_torchtune_columns(entry: DataSetEntry, component: str) -> dict[str, Any]:
    """Takes the columns of a data set, and returns our keys for them and its `type`.

    `column_map` maps torchtune's names of columns to those of the data.
    """
    entry.flatten("column_map")
    keys = {
        "type": TORCHTUNE_FORMATS.get(component),
        "text_column": entry.take("column"),
        "messages_column": entry.take("conversation_column"),
    }
    columns = {key: value for key, value in entry.unread.items() if key.startswith("column_map.")}
    renames_none = all(key == f"column_map.{value}" for key, value in columns.items())
    if keys["type"] == "alpaca":
        keys["alpaca_prompt"] = True
    if component in TORCHTUNE_COLUMNS:
        prompt_column, answer_column = TORCHTUNE_COLUMNS[component]
        keys["prompt_column"] = entry.take("column_map.input") or prompt_column
        keys["completion_column"] = entry.take("column_map.output") or answer_column
    elif keys["type"] == "alpaca" and not renames_none:
        keys["prompt_column"] = entry.take("column_map.instruction") or "instruction"
        keys["completion_column"] = entry.take("column_map.output") or "output"
    elif component in ("chat", "slimorca"):
        conversations = entry.take("column_map.conversations")
        messages = entry.take("column_map.messages")
        keys["messages_column"] = conversations or messages or keys["messages_column"]
    elif renames_none:
        for key in columns:
            entry.take(key)
    return keys


# Automodel's function or class -> the `type` of our entries
AUTOMODEL_FORMATS = {
    "make_squad_dataset": "squad",
    "HellaSwag": "hellaswag",
    "make_tulu3_dataset": "messages",
}
# len_prompt_ids in format_prompt_completion of Automodel's
# components/datasets/llm/formatting_utils.py counts the space that ends a prompt
FIRST_OF_ANSWER = (
    "which is trained there only where the tokenizer begins a text with BOS and does not say "
    "add_bos_token"
)
# our `type` -> how a text or an answer begins or ends differently there
AUTOMODEL_ENDS = {
    # convert_sharegpt_to_conversation of its components/datasets/vlm/datasets.py
    "messages": (
        "white space around a question is left out there, and <image> and <video> in it, with the "
        "white space around them"
    ),
    "squad": (
        "without a chat template the end-of-text token is trained after each answer here, and the "
        f"space before an answer is no part of its first token, {FIRST_OF_ANSWER}"
    ),
    # SFTSingleTurnPreprocessor of its components/datasets/utils.py
    "hellaswag": (
        "the end-of-text token is trained after each answer here; there an answer is tokenized as "
        "a text alone: it begins with the space that SentencePiece's tokenizers write before one, "
        "and with all but the first of the tokens that begin one"
    ),
}
# Automodel's mixture of two data sets, in its components/datasets/vlm/datasets.py
MIXTURE = "make_tulu3_magicoder_text_mix_dataset"
MIXED: Mapping[str, dict[str, Any]] = {
    "tulu": {"path": "allenai/tulu-3-sft-mixture", "type": "messages"},
    "magicoder": {
        "path": "ise-uiuc/Magicoder-OSS-Instruct-75K",
        "type": "messages",
        "prompt_column": "problem",
        "completion_column": "solution",
    },
}
MIXED_MAX_TURNS = 16  # the default of its max_turns
FIRST_SHARE = 0.8  # of the first data set in its rows
MIXED_SHARES = (
    "a row is of the first data set with a chance of 0.8 there, else of the second, until each of "
    "both was drawn, and no more than limit_total; here each is read once an epoch: an entry's "
    "weight says how often, and its split which rows"
)
MIXED_ROWS = (
    "of the first data set rows of over {} messages are left out there, and messages without "
    "words; of the second the white space around a text; here all is read"
)
# families whose tokenizer there is MistralCommonBackend of _transformers/tokenization, which has no
# chat template
BY_MISTRAL_COMMON = ("mistral", "pixtral", "mistral3", "ministral3")
WITHOUT_TEMPLATE = (
    "mistral-common's tokenizer has no chat template there: prompt and answer are plain text, and "
    "no end-of-text token follows; here the tokenizer's own template writes them where it has one"
)
# __init__ of this class in Automodel's components/datasets/llm
COLUMN_MAPPED = "ColumnMappedTextInstructionDataset"
FIRST_OF_ALL = "so many rows of the slice, or of all files together, there; here all of them"
# keys of Automodel's section `tokenizer` that need no report: _build_tokenizer of its
# recipes/llm/train_ft.py
TOKENIZER_KEYS = (
    "_target_",
    "pretrained_model_name_or_path",
    "trust_remote_code",
    "use_fast",
    "padding_side",
)
TOKENIZER_AS_IT_IS = (
    "an argument of the tokenizer there; here it is as its own files say, and a row that is cut "
    "loses its end"
)
# _is_consistent_render_prefix of its components/datasets/llm/formatting_utils.py takes an EOS token
# after the question for the header's first token
HEADER_THERE = (
    f"under a chat template {HEADER}, but for its first token where the template writes an EOS "
    "token after a question that ends the text and after no other, as Phi-3's, whose header is "
    "that token alone; so is what it writes after an answer's end, as ChatML's line break; of one "
    f"with generation blocks these alone are, and {AFTER_PROMPT}"
)
# _normalize_messages of its components/datasets/llm/chat_dataset.py
CALLS_AS_TEXTS = (
    "the arguments of a tool call are a text there, as JSON, which a template that writes them by "
    "tojson puts in quotes; an object here"
)
PARTS_APART = "the text parts of a content are joined with a space there, without one here"
# _build_multiturn_assistant_mask of its components/datasets/llm/formatting_utils.py
ONE_TEXT_OF_CHAT = (
    "one text for all answers of a row there: an earlier one that the template writes otherwise "
    "than a last one, as without its thinking, is trained as it stands there by generation blocks, "
    "and without them ends the run, unless the EOS token at its end alone is another; here it has "
    "a text of its own, as inference has it"
)
# patterns of the names of models whose templates may write an earlier answer without its thinking
THINKING_MODELS = (THINKING, THINKING_LAST, MAYBE_THINKING)
REWRITING = re.compile(r"think|reasoning|<\|return\|>")  # in the text of such a template
ENDS_LAST = "<|return|>"  # gpt-oss ends a last answer with it, and an earlier one with <|end|>
# GENERATION_REGEX of its components/datasets/llm/formatting_utils.py
MARKS = re.compile(r"\{%-?\s+generation\s+-?%\}")
MARKED_THERE = f"the generation blocks of the chat template are trained there; {AFTER_PROMPT}"
# ColumnMappedTextInstructionDataset of Automodel 0.7, by default without use_hf_chat_template
FIRST_IN_SPACE = f"the answer's first token begins with the space there, {FIRST_OF_ANSWER}"
SPACE_BETWEEN = "a space stands between prompt and answer there, and no end-of-text token after it"
SYSTEM_THERE = "each row begins with a system message without words there"
BY_CODE = (
    "this class joins several columns of a row in code; write the rows as messages and name that "
    "file as path, or yield them: `function: my_data.py:rows`"
)
# how functions of Automodel's components/datasets/vlm/datasets.py make a row from the columns
AS_FILED = "not turned upright by its EXIF data"
ROWS_BY_CODE = {
    "make_cord_v2_dataset": (
        "a row there: image, then 'Describe this image.'; the answer is the JSON of gt_parse in "
        "ground_truth, or one drawn from gt_parses, each key as <s_key>value</s_key>, keys in "
        "reverse alphabetical order, <sep/> between the values of a list"
    ),
    "make_medpix_dataset": (
        f"a row there: image_id, {AS_FILED}, then question; the answer is answer"
    ),
    "make_rdr_dataset": "a row there: image, then 'Describe this image.'; the answer is text",
    "make_shopify_product_catalogue_dataset": (
        f"a row there: product_image, {AS_FILED}, then 'What product category does this item "
        "belong to?'; the answer is ground_truth_category"
    ),
}

# Keys of a data set that Automodel's recipe for images does not read there. By
# resolve_vlm_dataloader of its recipes/_typed_config.py the tokenizer is the processor's, and
# lengths are read from the section of packing.
READ_ELSEWHERE = ("tokenizer", "truncate", "inject_fake_images", "max_length", "pretokenize")


def _read_automodel(
    settings: ToolFile, source: Path, conversion: Conversion
) -> tuple[Sources, Sources]:
    """Converts the data sets of an Automodel file: (for training, held out)."""
    ignored_keys = READ_ELSEWHERE if runs_for_images(settings) else ()
    has_common = _has_mistral_common(settings)

    def read(entry: DataSetEntry) -> Sources:
        return _read_automodel_entry(entry, source, has_common, conversion)

    def read_key(key: str) -> Sources:
        section = settings.get(key)
        if not isinstance(section, dict):
            return []
        keys = {name: value for name, value in section.items() if name not in ignored_keys}
        return read_each("Automodel", [DataSetEntry.make(key, keys)], read, conversion)

    train = read_key("dataset")
    return train, read_key("validation_dataset")


def _read_automodel_entry(
    entry: DataSetEntry, source: Path, has_common: bool, conversion: Conversion
) -> Sources:
    """Converts a data set of an Automodel file, by the function or class that reads it there."""
    kind = str(entry.take("_target_")).rsplit(".", 1)[-1]
    entry.flatten("column_mapping", "tokenizer")
    _take_tokenizer(entry, conversion)
    if kind == MIXTURE:
        return _read_mixture_of_texts(entry, conversion)
    path = _take_first(entry, "path_or_dataset_id", "path_or_dataset", "dataset_name")
    if path is None:
        raise UserError(
            f"{source}: {entry.where}: {kind} names no path_or_dataset_id; code that makes rows "
            "goes under `function: my_data.py:rows`"
        )
    keys = entry.take_name_and_split()
    if isinstance(path, list) or str(path).endswith((".json", ".jsonl", ".ndjson")):
        keys["split"] = None  # it is not read beside local files
    shuffle_seed = entry.take("shuffle_seed")
    if shuffle_seed is not None and "[" in str(keys["split"]):
        conversion.add_difference(f"{entry.where}.shuffle_seed", shuffle_seed, SHUFFLED_BEFORE)
    limits = [entry.take(key) for key in ("limit_dataset_samples", "num_samples_limit")]
    keys |= _take_automodel_format(entry, kind, path, conversion)
    template = _find_template(entry.take("chat_template"), source)
    _report_automodel_template(entry, kind, template, conversion)
    if has_common and kind == "make_squad_dataset" and not template:
        conversion.add_difference(f"{entry.where}._target_", kind, WITHOUT_TEMPLATE)
    if template:
        conversion.recipe["chat_template"] = str(template)
    paths = path if isinstance(path, list) else [path]
    limit = next(filter(None, limits), None)
    takes_of_slice = kind == COLUMN_MAPPED and "[" in str(keys["split"])
    if limit and (len(paths) > 1 or takes_of_slice):
        conversion.add_difference(f"{entry.where}.limit_dataset_samples", limit, FIRST_OF_ALL)
        limit = None
    return [take_first_rows(our_entry, limit) for our_entry in make_sources(paths, **keys)]


def _report_automodel_template(
    entry: DataSetEntry, kind: str, template: str | Path, conversion: Conversion
) -> None:
    """Reports how Automodel's data set `kind` renders and trains texts by the chat template.

    Takes mask_generation_prompt from the entry. `template` is empty if the file names none.
    """
    if kind in ("make_squad_dataset", "ChatDataset") and not entry.take("mask_generation_prompt"):
        note = MARKED_THERE if _has_marks(template) else HEADER_THERE
        conversion.remarks.append(f"{entry.where}: {note}")
    if kind == "ChatDataset":
        _report_turns(entry, template, conversion)


def _read_mixture_of_texts(entry: DataSetEntry, conversion: Conversion) -> Sources:
    """Converts Automodel's mixture of two data sets of the hub, which it draws by fixed shares.

    With limit_total the first rows of each are read, by these shares. Without it each is read
    whole, which is reported.
    """
    entry.take("seed")
    max_turns = entry.take("max_turns")
    limit = entry.take("limit_total")
    sources = [
        keys | {"split": entry.take(f"{name}_split") or "train"} for name, keys in MIXED.items()
    ]
    note = MIXED_ROWS.format(MIXED_MAX_TURNS if max_turns is None else max_turns)
    conversion.add_difference(f"{entry.where}.max_turns", max_turns, note)
    if not isinstance(limit, int) or any("[" in keys["split"] for keys in sources):
        conversion.add_difference(f"{entry.where}.limit_total", limit, MIXED_SHARES)
        return sources
    first_rows = round(FIRST_SHARE * limit)
    shares = zip(sources, (first_rows, limit - first_rows), strict=True)
    return [take_first_rows(keys, rows) for keys, rows in shares if rows]


def _find_template(template: Any, source: Path) -> str | Path:
    """Returns the path of a template's file if it is found, else its text or name.

    Empty if the file of settings names no template.
    """
    text = str(template or "")
    file = find_from_root(source, text) if text.endswith(".jinja") else None
    return Path(file) if file else text


def _has_marks(template: str | Path) -> bool:
    """Whether a template marks the text that is trained, by generation blocks."""
    return MARKS.search(_read_text(template)) is not None


def _read_text(template: str | Path) -> str:
    """Returns the text of a template, as `_find_template` returns it."""
    return template.read_text(encoding="utf-8") if isinstance(template, Path) else template


def _report_turns(entry: DataSetEntry, template: str | Path, conversion: Conversion) -> None:
    """Reports how Automodel's ChatDataset reads conversations.

    A difference is added if the template may write an earlier answer differently than a last one.
    """
    notes = (CALLS_AS_TEXTS, OF_CHATS, PARTS_APART)
    conversion.remarks += [f"{entry.where}: {note}" for note in notes]
    name = str(conversion.recipe.get("model_name_or_path"))
    text = _read_text(template)
    if "{%" in text or "{{" in text:
        rewrites_answers = REWRITING.search(text) is not None
        has_two_ends = ENDS_LAST in text
    else:  # the model's own template, or a file that is not found
        has_two_ends = guess_family(name) == "gpt_oss"
        rewrites_answers = has_two_ends or any(
            pattern.search(name.lower()) for pattern in THINKING_MODELS
        )
    if rewrites_answers:
        conversion.add_difference(f"{entry.where}._target_", "ChatDataset", ONE_TEXT_OF_CHAT)
    if has_two_ends:
        conversion.add_difference(f"{entry.where}._target_", "ChatDataset", EARLIER_ENDS)


def _take_tokenizer(entry: DataSetEntry, conversion: Conversion) -> None:
    """Takes the section `tokenizer` of Automodel's data set, and sets the recipe's tokenizer by it.

    Only that of the training data counts, and none if the run trains on images: its tokenizer is
    the model's.
    """
    keys = {key for key in entry.unread if key.startswith("tokenizer.")}
    section = {key.removeprefix("tokenizer."): entry.take(key) for key in sorted(keys)}
    if entry.where != "dataset" or conversion.image_family is not None:
        return
    name = section.get("pretrained_model_name_or_path")
    if name and name != conversion.recipe.get("model_name_or_path"):
        conversion.recipe["tokenizer_name_or_path"] = name
    # with model.trust_remote_code the line is on the model
    runs_code = section.get("trust_remote_code") and not conversion.recipe.get("trust_remote_code")
    if runs_code and OWN_WORDS.search(str(name).lower()):
        conversion.add_difference("dataset.tokenizer.trust_remote_code", True, WORDS_THERE)
    for key, value in section.items():
        if key not in TOKENIZER_KEYS and value is not None:
            conversion.add_difference(f"dataset.tokenizer.{key}", value, TOKENIZER_AS_IT_IS)


def _has_mistral_common(settings: ToolFile) -> bool:
    """Whether the tokenizer of an Automodel file is mistral-common's."""
    tokenizer = read_section(read_section(settings, "dataset"), "tokenizer")
    name = str(tokenizer.get("pretrained_model_name_or_path") or name_model(settings))
    families = {guess_family(name), guess_vision_family(name)}
    is_of_transformers = str(tokenizer.get("_target_")).startswith("transformers.")
    return bool(families & {*BY_MISTRAL_COMMON}) and not is_of_transformers


def _take_first(entry: DataSetEntry, *keys: str) -> Any:
    """Takes keys up to the first that has a value, and returns it; later ones stay unread."""
    return next(filter(None, map(entry.take, keys)), None)


def _take_automodel_format(
    entry: DataSetEntry, kind: str, path: Any, conversion: Conversion
) -> dict[str, Any]:
    """Takes what says how Automodel reads a row, and returns our `type` and column keys.

    `kind` is the function or class that reads the rows. Code that cannot be replaced by keys is
    reported, and left to do.
    """
    question = entry.take("column_mapping.question")
    answer = entry.take("column_mapping.answer")
    if question and answer and not entry.unread.get("column_mapping.context"):
        columns = {"prompt_column": question, "completion_column": answer}
        return _take_mapped_columns(entry, columns, conversion)
    if kind in AUTOMODEL_FORMATS:
        row_format = AUTOMODEL_FORMATS[kind]
        if not entry.unread.get("chat_template") or row_format == "messages":
            conversion.remarks.append(f"{entry.where}: {AUTOMODEL_ENDS[row_format]}")
        return {"type": row_format}
    if kind != "ChatDataset":
        known_row = f"{ROWS_BY_CODE[kind]}; " if kind in ROWS_BY_CODE else ""
        conversion.add_difference(
            f"{entry.where}._target_", kind, f"{known_row}{BY_CODE}", "a data set made by code"
        )
        conversion.to_do.append(
            f"{entry.where}: {path}: its rows do not fit as they are; see _target_ above"
        )
    return {}


def _take_mapped_columns(
    entry: DataSetEntry, columns: dict[str, str], conversion: Conversion
) -> dict[str, Any]:
    """Takes the keys of a `column_mapping`, and returns our `type` with the two `columns`.

    Without use_hf_chat_template prompt and answer are plain text there; else they are turns.
    """
    masks_prompt = entry.take("answer_only_loss_mask") is not False
    if not entry.take("use_hf_chat_template"):
        what_is_trained = FIRST_IN_SPACE if masks_prompt else "the prompt is trained there"
        note = f"{SPACE_BETWEEN}; {what_is_trained}"
        conversion.add_difference(f"{entry.where}.column_mapping", columns, note)
        return {"type": "prompt_completion", **columns}
    if not masks_prompt:
        conversion.recipe["assistant_only_loss"] = False
    conversion.remarks.append(f"{entry.where}: {HEADER_THERE}")
    conversion.add_difference(f"{entry.where}.use_hf_chat_template", True, SYSTEM_THERE)
    return {"type": "messages", **columns}


# Axolotl names the types of preference data template.form. PAIR_FORMS and RATED_FORMS: the form ->
# the column of the prompt. The rows of these forms have texts, which the form joins to a prompt.
PAIR_FORMS = {
    "argilla": "instruction",
    "icr": "input",
    "intel": "question",
    "prompt_pairs": "prompt",
}
RATED_FORMS = {
    "argilla": "instruction",
    "intel": "question",
    "prompt_pairs": "prompt",
    "ultra": "prompt",
}
ARGILLA = {"chosen_column": "chosen_response", "rejected_column": "rejected_response"}  # of pairs
RATED_CHAT = "argilla_chat"  # a form under KTO: the column completion has all messages
FIRST_OF_RATED_CHAT = (
    "in 0.18 the first message is the question and the second the answer; in 0.21 and here the "
    "last one is the answer, after all before it"
)
MESSAGE_FORMS = ("default", "argilla_chat", "ultra")  # conversations, which our reader recognizes
OWN_TEMPLATES = ("chatml", "llama3")  # templates by which a type itself writes the turns
# columns of which alignment-handbook's `columns` may select some with no effect here
KNOWN_COLUMNS = (
    "chat_template_kwargs",
    "prompt",
    "chosen",
    "rejected",
    "messages",
    "completion",
    "label",
)


def _read_axolotl_preferences(entry: DataSetEntry, method: str, conversion: Conversion) -> Sources:
    """Converts an Axolotl data set of pairs or ratings; an unknown type is reported."""
    kind = entry.unread.get("type")
    entry.flatten("type", "message_property_mappings", "roles")
    template, _, form = str(kind or "").partition(".")
    keys = entry.take_name_and_split()
    if isinstance(kind, dict):
        our_keys = PAIRED_COLUMNS | (RATED_COLUMNS if method == "kto" else {})
        keys |= {ours: entry.take(f"type.field_{name}") for name, ours in our_keys.items()}
    elif kind == "bradley_terry.chat_template":
        entry.take("type")
        keys |= {"type": "messages", "prompt_column": "input"}
    elif template == "chat_template" and form in (*MESSAGE_FORMS, "argilla"):
        entry.take("type")
        keys["prompt_column"] = entry.take("field_messages")
        if method == "orpo":
            conversion.add_remark("datasets.type", kind, PROMPT_REPEATED)
    elif form == RATED_CHAT and method == "kto":
        entry.take("type")
        keys["messages_column"] = "completion"
        conversion.add_remark("datasets.type", kind, FIRST_OF_RATED_CHAT)
    elif form in (RATED_FORMS if method == "kto" else PAIR_FORMS):
        entry.take("type")
        keys |= _name_form_columns(form, method)
    elif kind is None or form in MESSAGE_FORMS or (not form and template in OWN_TEMPLATES):
        entry.take("type")
    for side in ("chosen", "rejected"):
        keys[f"{side}_column"] = entry.take(f"field_{side}") or keys.get(f"{side}_column")
    if template in OWN_TEMPLATES and "type" not in entry.unread:
        _take_own_template(template, str(kind), conversion)
    return make_sources(entry.take_paths(), **keys)


# llama3.py in prompt_strategies/dpo and kto of Axolotl, and _drop_long_sequences of its
# utils/data/rl.py
OF_LLAMA3 = f"{SPACE_KEPT}, and sequence_len counts a row without its BOS token there, with it here"


# transform_fn of these forms in prompt_strategies/dpo/chatml.py and llama3.py of Axolotl: the form
# -> its question
SECOND_ANSWERS = {"ultra": "the column prompt", "argilla_chat": "the first one alone"}
SECOND_IS_ANSWER = (
    "of a conversation the second message is the answer there, to {}, and what follows is left "
    "out; here the last one, after all before it"
)
# get_prompt of ORPODatasetParsingStrategy in its prompt_strategies/orpo/chat_template.py
PROMPT_REPEATED = (
    "of a row with several questions each is the column prompt there, where there is one; here as "
    "the conversation has it"
)


def _take_own_template(template: str, kind: str, conversion: Conversion) -> None:
    """Sets the chat template that a data set's type `kind` writes turns by in Axolotl.

    chat_template of the file names only the template that Axolotl saves with the tokenizer.
    """
    file_template = conversion.recipe.get("chat_template")
    if file_template != template:
        saved = file_template or "the tokenizer's own, where it has one"
        conversion.remarks.append(SAVED_TEMPLATE.format(template, saved))
    conversion.recipe["chat_template"] = template
    if template == "llama3":
        conversion.add_remark("datasets.type", kind, OF_LLAMA3)
    form = kind.partition(".")[2]
    if form in SECOND_ANSWERS and conversion.recipe["method"] != "kto":
        note = SECOND_IS_ANSWER.format(SECOND_ANSWERS[form])
        conversion.add_remark("datasets.type", kind, note)


def _name_form_columns(form: str, method: str) -> dict[str, Any]:
    """Returns our column keys for a form of PAIR_FORMS, or of RATED_FORMS under KTO."""
    if method == "kto":
        return {
            "prompt_column": RATED_FORMS[form],
            "completion_column": "completion",
            "type": "messages",
        }
    columns = ARGILLA if form == "argilla" else {}
    return {"prompt_column": PAIR_FORMS[form], "type": "messages", **columns}


def _take_factory_columns(entry: DataSetEntry, is_chat: bool, method: str) -> dict[str, Any]:
    """Takes the columns of preference or rated data from an entry of dataset_info.json.

    Returns our keys for them. A column with a name that our reader finds by itself needs no key.
    """
    messages_column = entry.take("columns.messages")
    text_column = entry.take("columns.prompt")
    answer_columns = {name: entry.take(f"columns.{name}") for name in ("chosen", "rejected")}
    entry.take("ranking")  # the method of the recipe says that the data are preferences
    if is_chat:
        prompt = messages_column or "conversations"
    else:
        prompt = text_column or "instruction"
    # Our reader joins the column `input` to `instruction`, and to no other. A chat has no query.
    if (is_chat or prompt == "instruction") and entry.unread.get("columns.query") == "input":
        entry.take("columns.query")
    if method == "kto":
        return _take_rated_columns(entry, prompt, is_chat)
    keys: dict[str, Any] = {}
    if not is_chat and prompt != "instruction":
        keys = {"prompt_column": prompt, "type": "messages"}
    elif prompt not in PROMPTS:
        keys = {"prompt_column": prompt}
    for name, column in answer_columns.items():
        if column not in (None, name):
            keys[f"{name}_column"] = column
    return keys


def _take_rated_columns(entry: DataSetEntry, prompt: Any, is_chat: bool) -> dict[str, Any]:
    """Takes the columns of rated answers (KTO) from an entry of dataset_info.json.

    `prompt` is the column of the prompt, or of the whole conversation if `is_chat`.
    """
    label = entry.take("columns.kto_tag")
    answer = entry.take("columns.response") or "output"
    keys = {"label_column": None if label in LABEL_COLUMNS else label}
    if is_chat:
        keys["messages_column"] = None if prompt in PROMPTS else prompt
    elif prompt != "instruction" or answer != "output":
        keys |= {"type": "messages", "prompt_column": prompt, "completion_column": answer}
    return keys


# the first part of Axolotl's `type` -> ours; None: our reader recognizes the rows
FORMATS = {
    "alpaca": "alpaca",
    "sharegpt": "sharegpt",
    "chat_template": None,
    "completion": "text",
    "pretrain": "text",
    "openai": "messages",
}
# LLaMA-Factory's names of columns -> the columns of type alpaca
ALPACA_COLUMNS = {"prompt": "instruction", "query": "input", "response": "output"}
ALPACA_PROMPT = (
    "chat_template: alpaca writes their prompt, but is one for all datasets, and another one is "
    "read by a chat template"
)
# Starts of Axolotl's types whose rows the file's chat template does not write. { begins a mapping
# with formats; those types of its prompt_strategies/dpo and kto write turns of their own.
TYPES_WITHOUT_TEMPLATE = (
    *("alpaca", "completion", "pretrain", "{"),
    *("chatml", "llama3", "zephyr", "user_defined"),
)
# load_tokenizer of Axolotl's loaders/tokenizer.py: type alpaca changes no chat template
ALPACA_SAVED = (
    "chat_template: alpaca's, which writes the prompts, is saved with the tokenizer here; there {}"
)
# _build_result of Axolotl's prompters.py, and _tokenize of its prompt_tokenizers.py
ALPACA_STYLE = (
    "each prompt is in this style there, with Alpaca's own words as the system message, and the "
    "EOS token alone ends an answer; here {} writes the conversation"
)
# strip_bos_token of Axolotl's _tokenize, for a tokenizer without a BOS token
STARTS_TWICE = (
    "where the tokenizer begins every text with [gMASK]<sop>, the answer begins with it too there, "
    "and it is trained"
)
SPACE_AFTER = "without a format a prompt ends with a space there"
PROMPT_ALONE = (
    "has no effect on this entry: of a prompt with its completion the completion alone is trained "
    "on; type: messages makes a conversation of the two"
)


def add_sources(tool: Tool, settings: ToolFile, source: Path, conversion: Conversion) -> None:
    """Adds `datasets` and `eval_datasets` to the recipe.

    Raises `UserError` if the file has something else than data sets where it should list them.
    """
    recipe = conversion.recipe
    train, held_out = READERS[tool](settings, source, conversion)
    if train:
        recipe["datasets"] = train
    if held_out:
        recipe["eval_datasets"] = held_out
        if recipe.pop("eval_split_size", None) is not None:
            conversion.remarks.append(
                "eval_split_size is dropped: the file also names a held-out data set"
            )
    if recipe.get("assistant_only_loss") is False:
        plain = [i for i, entry in enumerate(train) if _has_plain_prompts(entry)]
        conversion.remarks += [
            f"datasets[{i}]: assistant_only_loss: false {PROMPT_ALONE}" for i in plain
        ]
        if plain and len(plain) == len(train):  # the key has no effect at all
            del recipe["assistant_only_loss"]


def _has_plain_prompts(entry: Mapping[str, Any]) -> bool:
    """Whether rows are plain prompts with completions, of which only the completion is trained."""
    if "type" in entry:
        return bool(entry["type"] == "prompt_completion")
    return "prompt_column" in entry


def _read_trl(settings: ToolFile, source: Path, conversion: Conversion) -> tuple[Sources, Sources]:
    """Converts the data sets of a TRL file, or alignment-handbook's mixtures: (training, held out).

    Without an evaluation data set, but with evaluation, the test split of the first is held out.
    """

    def read(entry: DataSetEntry) -> Sources:
        return _read_trl_entry(entry, conversion)

    entries = list_entries(settings.get("datasets"), "datasets", source) or read_mixture(
        settings, source, conversion
    )
    mixed, mixed_held_out = read_mixer(settings, conversion)
    if mixed:
        return mixed, mixed_held_out
    name = settings.get("dataset_name")
    if entries and name:
        conversion.remarks.append(
            f"dataset_name: {shorten(name)} is dropped: datasets is given too"
        )
    entries = entries or [_make_trl_entry(settings)]
    train = read_each("TRL", entries, read, conversion)
    train = [keys for keys in train if "path" in keys]
    evaluation_entries = list_entries(settings.get("eval_datasets"), "eval_datasets", source)
    held_out = read_each("TRL", evaluation_entries, read, conversion)
    strategy = settings.get("eval_strategy", settings.get("evaluation_strategy", "no"))
    if str(strategy) != "no" and not held_out and "eval_split_size" not in conversion.recipe:
        test_split = {"split": settings.get("dataset_test_split", "test")}
        held_out = [keys | test_split for keys in train[:1]]  # none if nothing is trained on
    _add_template_variables(settings, train + held_out, conversion)
    return train, held_out


def _add_template_variables(settings: ToolFile, sources: Sources, conversion: Conversion) -> None:
    """Adds what TRL's GRPO gives to the chat template; its other trainers do not read the key."""
    variables = read_section(settings, "chat_template_kwargs")
    if variables and conversion.recipe.get("method") == "grpo":
        for keys in sources:
            keys["chat_template_kwargs"] = variables


def _make_trl_entry(settings: ToolFile) -> DataSetEntry:
    """Makes an entry of the single data set that TRL's keys dataset_... describe."""
    text_column = settings.get("dataset_text_field")
    keys = {
        "path": settings.get("dataset_name"),
        "name": settings.get("dataset_config"),
        "split": settings.get("dataset_train_split"),
        "text_column": text_column if text_column != "text" else None,
    }
    return DataSetEntry.make("dataset", keys)


def _read_trl_entry(entry: DataSetEntry, conversion: Conversion) -> Sources:
    """Converts a data set of a TRL file, which may also have the keys of our entries."""
    columns = entry.unread.get("columns")  # alignment-handbook drops all other columns
    if (
        not trains_on_answers(conversion)
        and isinstance(columns, list)
        and set(columns) <= set(KNOWN_COLUMNS)
    ):
        entry.take("columns")
    keys = {key: entry.take(key) for key in keys_of(DatasetSource) if key != "path"}
    return make_sources(entry.take_paths(), **keys)


def _read_axolotl(
    settings: ToolFile, source: Path, conversion: Conversion
) -> tuple[Sources, Sources]:
    """Converts the data sets of an Axolotl file: (for training, held out).

    Sets the template alpaca if all prompts are in its style, by the types of the data sets.
    """
    styles: set[str] = set()
    variables = read_section(settings, "chat_template_kwargs")

    def read_entry(entry: DataSetEntry) -> Sources:
        return _read_axolotl_entry(entry, variables, conversion)

    def read(key: str) -> Sources:
        entries = list_entries(settings.get(key), key, source)
        styles.update(_name_type(entry) for entry in entries)
        return read_each("Axolotl", entries, read_entry, conversion)

    train = read("datasets") + read("pretraining_dataset")
    held_out = read("test_datasets")
    if styles - {"completion"} == {"alpaca"}:
        conversion.recipe["chat_template"] = "alpaca"
        _report_saved_template(str(settings.get("chat_template") or ""), conversion)
    elif "alpaca" in styles:
        conversion.add_difference("datasets.type", "alpaca", ALPACA_PROMPT)
    if styles and all(style.startswith(TYPES_WITHOUT_TEMPLATE) for style in styles):
        forget_turns(str(settings.get("chat_template")), conversion)
    return train, held_out


def _name_type(entry: DataSetEntry) -> str:
    """Returns an entry's type; alpaca:instruct, which is the default style, is "alpaca"."""
    return str(entry.unread.get("type")).removesuffix(":instruct")


def _report_saved_template(template: str, conversion: Conversion) -> None:
    """Remarks on the template that Axolotl saves, unless it is alpaca; "" is the tokenizer's."""
    if template == "alpaca":
        return
    is_tokenizers = not template or template.startswith("tokenizer_default")
    saved = "the tokenizer's own" if is_tokenizers else f"{template}'s"
    conversion.remarks.append(ALPACA_SAVED.format(saved))


def _read_axolotl_entry(
    entry: DataSetEntry, variables: dict[str, Any], conversion: Conversion
) -> Sources:
    """Converts a data set of an Axolotl file.

    `variables`: what the chat template reads besides the messages.
    """
    if not trains_on_answers(conversion):
        return _read_axolotl_preferences(entry, conversion.recipe["method"], conversion)
    entry.flatten("type", "message_property_mappings", "roles")
    kind = entry.unread.get("type")
    name = str(kind).split(".")[0].split(":")[0]
    # a type that is a mapping names columns and a format of the prompt
    has_columns = any(key.startswith("type.") for key in entry.unread)
    keys = entry.take_name_and_split() | {"type": FORMATS.get(name)}
    if name in FORMATS:
        entry.take("type")
    if keys["type"] == "text":
        keys["text_column"] = entry.take("field") or entry.take("text_column")
    if name == "chat_template" and variables:
        keys["chat_template_kwargs"] = variables
    if has_columns or name == "alpaca":
        keys |= _take_instruction(entry, kind, has_columns, conversion)
    return make_sources(entry.take_paths(), messages_column=entry.take("field_messages"), **keys)


def _take_instruction(
    entry: DataSetEntry, kind: Any, has_columns: bool, conversion: Conversion
) -> dict[str, Any]:
    """Takes the columns of instructions and answers, and returns our keys for them.

    Reports how Axolotl writes the prompts; it encodes an answer apart from its prompt.

    Args:
        entry: The data set.
        kind: Its `type` as the file has it.
        has_columns: Whether the type is a mapping that names the columns.
        conversion: Gets the reports.
    """
    where = f"{entry.where}.type"
    keys: dict[str, Any] = {"answers_apart": True}
    prefix = "type." if has_columns else ""
    if has_columns or {"field_instruction", "field_output"} & entry.unread.keys():
        keys["prompt_column"] = entry.take(f"{prefix}field_instruction") or "instruction"
        keys["completion_column"] = entry.take(f"{prefix}field_output") or "output"
    if has_columns and "type.format" not in entry.unread:
        conversion.add_difference(where, None, SPACE_AFTER)
    if not has_columns and kind not in ("alpaca", "alpaca:instruct"):
        template = conversion.recipe.get("chat_template")
        writer = f"chat_template: {template}" if template else "the tokenizer's chat template"
        conversion.add_difference(where, kind, ALPACA_STYLE.format(writer))
    family = guess_family(str(conversion.recipe.get("model_name_or_path")))
    if str(family).startswith("glm"):
        conversion.add_remark(where, kind, STARTS_TWICE)
    return keys


@dataclass(frozen=True, slots=True)
class _FactoryData:
    """Reads LLaMA-Factory's data sets, which are names that dataset_info.json explains."""

    settings: ToolFile
    source: Path
    conversion: Conversion
    info_path: Path  # of dataset_info.json, which may not exist
    info: Mapping[str, Any]  # its content, by name; empty without the file

    def read(self, key: str) -> Sources:
        """Converts the data sets named under `key` of the file, in a list or between commas."""
        names = self.settings.get(key) or []
        if not isinstance(names, str | list):
            raise UserError(
                f"{self.source}: {key}: names are expected, found {shorten(names)}; write them "
                "with commas between"
            )
        sources: Sources = []
        for name in names.split(",") if isinstance(names, str) else names:
            if str(name).strip():
                sources += self._read_name(str(name).strip())
        return [take_first_rows(keys, self.settings.get("max_samples")) for keys in sources]

    def _read_name(self, name: str) -> Sources:
        """Converts the data set `name`."""
        keys = self.info.get(name)
        if keys is None:
            return self._read_unlisted(name)
        if not isinstance(keys, dict):
            raise UserError(
                f"{self.info_path}: {name}: a mapping is expected, found {shorten(keys)}; name its "
                "file_name there"
            )
        entry = DataSetEntry.make(f"{self.info_path.name}: {name}", keys)
        return read_each("LLaMA-Factory", [entry], self._read_entry, self.conversion)

    def _read_unlisted(self, name: str) -> Sources:
        """Converts a data set that dataset_info.json does not have.

        A name that nothing here explains becomes the path, and is left to do.
        """
        folder = str(self.settings.get("dataset_dir"))
        if not self.conversion.is_factory_v1 and self.settings.get("stage") != "pt":
            _remark_once(COLUMN_UNREAD.format("system or tools or history"), self.conversion)
        if folder == "ONLINE":  # get_dataset_list of its data/parser.py
            return [{"path": name}]
        where = f"is not in {self.info_path}"
        what_to_put = "its file or hub name"
        if self.conversion.is_factory_v1:
            # _get_dataset_info of v1's core/data_engine.py
            if not name.endswith(".yaml"):
                return self._read_v1(DataSetEntry.make("train_dataset", {"path": name}))
            entries = list_v1_entries(name, self.source)
            if entries is not None:
                return read_each("LLaMA-Factory", entries, self._read_v1, self.conversion)
            self.conversion.remarks.append(V1_ROWS)
            where = "lists the data sets there"
            what_to_put = "the path of each"
        elif folder.startswith("REMOTE:"):
            hub = folder.removeprefix("REMOTE:")
            where = f"is described in dataset_info.json of the hub data set {hub}"
        if not self.conversion.is_factory_v1 and self.settings.get("stage") != "pt":
            _report_alternation(self.conversion)
        self.conversion.to_do.append(f"datasets: {name} {where}; put {what_to_put} as path")
        return [{"path": name}]

    def _read_v1(self, entry: DataSetEntry) -> Sources:
        """Converts a data set of a v1 file."""
        return read_v1_entry(entry, self.source, self.conversion)

    def _read_entry(self, entry: DataSetEntry) -> Sources:
        """Converts an entry of dataset_info.json; one with images makes a run with images."""
        conversion = self.conversion
        method = conversion.recipe.get("method", "sft")
        form = str(entry.unread.get("formatting", "alpaca"))
        if form == "openai":
            conversion.add_difference(f"{entry.where}.formatting", form, THOUGHTS_SWITCHED)
        stage = self.settings.get("stage")
        if stage == "pt" and form != "alpaca":
            conversion.add_difference(f"{entry.where}.formatting", form, FIRST_MESSAGE)
        elif stage == "pt" and (query := _find_query(entry)):
            conversion.add_difference(f"{entry.where}.columns.query", query, QUERY_JOINED)
        if stage != "pt":
            _report_factory_rows(entry, form, conversion)
        trains_texts = stage == "pt" and form == "alpaca"
        sources = _read_factory_entry(entry, self.info_path.parent, method, trains_texts)
        count = sources[0].get("max_samples") if sources else None
        if count:
            conversion.add_remark(f"{entry.where}.num_samples", count, REPEATED)
        if "columns.images" not in entry.unread:
            return sources
        if conversion.image_family is None and conversion.recipe.pop("chat_template", None):
            conversion.remarks.append(
                f"{entry.where}: the tokenizer's own template, which writes the images"
            )
        model = str(self.settings.get("model_name_or_path"))
        conversion.image_family = conversion.image_family or guess_vision_family(model)
        folder = self.settings.get("media_dir")
        if folder:
            return [keys | {"image_folder": str(folder)} for keys in sources]
        return sources


def _read_factory(
    settings: ToolFile, source: Path, conversion: Conversion
) -> tuple[Sources, Sources]:
    """Converts the data sets of a LLaMA-Factory file: (for training, held out)."""
    name = Path(str(settings.get("dataset_dir", "data"))) / "dataset_info.json"
    info_path = find_from_root(source, name) or source.parent / name
    if info_path.is_file():
        info = load_json(info_path, "fix it, or name another dataset_dir")
    else:
        info = {}
    data = _FactoryData(settings, source, conversion, info_path, info)
    return data.read("dataset"), data.read("eval_dataset")


# PretrainDatasetProcessor of LLaMA-Factory trains the first message of a row's prompt
FIRST_MESSAGE = "stage pt trains the first message of a conversation alone there, all of it here"
QUERY_JOINED = (
    "stage pt trains the prompt, and this column on a line of its own, there; not it here"
)
# OpenAIDatasetConverter of LLaMA-Factory's data/converter.py
THOUGHTS_SWITCHED = (
    "a system message that speaks of no detailed thinking gets the words detailed thinking off "
    "there, and a row without one these alone; here as it is"
)
# the converters of LLaMA-Factory's data/converter.py. {}: how a row ends.
LEFT_OUT_UNLESS_ALTERNATING = (
    "rows: a conversation is left out there unless questions, or tools' results, alternate in it "
    "with answers, or calls, and it begins with a question and ends with {}; here it is read, or "
    "stops the run"
)
# DatasetAttr of LLaMA-Factory's data/parser.py. {}: columns.
COLUMN_UNREAD = (
    "rows: a column {} that dataset_info.json does not name is not read there; it is here"
)
# `join` of DatasetAttr sets these tags to none where others are named
UNTAGGED = (
    "without a tag of its own a role is none there, and rows with a turn of it are left out; here "
    "they are read"
)
ROLE_TAGS = ("system_tag", "function_tag", "observation_tag")


def _report_factory_rows(entry: DataSetEntry, form: str, conversion: Conversion) -> None:
    """Reports which rows and columns of an entry LLaMA-Factory leaves out; `form`: its formatting.

    Flattens the entry's columns and tags.
    """
    entry.flatten("columns", "tags")
    columns = ["system", "tools"] if form != "alpaca" else ["system", "tools", "history"]
    unnamed = [name for name in columns if not entry.unread.get(f"columns.{name}")]
    if unnamed:
        _remark_once(COLUMN_UNREAD.format(" or ".join(unnamed)), conversion)
    if form != "alpaca":
        _report_alternation(conversion)
    has_tags = any(key.startswith("tags.") for key in entry.unread)
    missing = [tag for tag in ROLE_TAGS if not entry.unread.get(f"tags.{tag}")]
    if form == "sharegpt" and has_tags and missing:
        conversion.remarks.append(f"{entry.where}.tags: no {', '.join(missing)}   ({UNTAGGED})")


def _report_alternation(conversion: Conversion) -> None:
    """Reports which conversations LLaMA-Factory leaves out."""
    is_asked = find_method_facts(conversion.recipe).rows == "pairs"
    end = "one" if is_asked else "an answer"
    _remark_once(LEFT_OUT_UNLESS_ALTERNATING.format(end), conversion)


def _remark_once(line: str, conversion: Conversion) -> None:
    """Adds a remark that several data sets may share."""
    if line not in conversion.remarks:
        conversion.remarks.append(line)


def _find_query(entry: DataSetEntry) -> Any:
    """Returns the column that LLaMA-Factory joins to the prompt; None if there is none.

    If an entry names columns, those that it does not name are not read.
    """
    columns = entry.unread.get("columns", {"query": "input"})
    return columns.get("query") if isinstance(columns, dict) else None


def _read_factory_entry(
    entry: DataSetEntry, folder: Path, method: str, trains_texts: bool
) -> Sources:
    """Converts an entry of the dataset_info.json in `folder`, for rows of the recipe's `method`.

    `trains_texts`: the prompts of the rows are trained as plain texts.
    """
    entry.flatten("columns", "tags")
    is_chat = entry.unread.get("formatting") in ("sharegpt", "openai")
    if entry.unread.get("formatting") in ("alpaca", "sharegpt", "openai"):
        entry.take("formatting")
    file = entry.take("file_name")
    hub_name = entry.take("hf_hub_url")
    keys = {"name": entry.take("subset"), "split": entry.take("split")}
    if method != "sft":
        keys |= _take_factory_columns(entry, is_chat, method)
    elif is_chat:
        keys |= _take_chat_columns(entry)
    elif trains_texts:
        for unread in ("response", "query", "history", "system"):
            entry.take(f"columns.{unread}")
        keys |= {"type": "text", "text_column": entry.take("columns.prompt") or "instruction"}
    else:
        keys |= _take_alpaca_columns(entry)
    keys["max_samples"] = entry.take("num_samples")
    return make_sources([str(folder / file) if file else hub_name], **keys)


def _take_chat_columns(entry: DataSetEntry) -> dict[str, Any]:
    """Takes the columns of conversations.

    Columns named system and chosen need type sharegpt, which reads them besides the turns.
    """
    keys = {"messages_column": entry.take("columns.messages")}
    for column in ("system", "chosen"):
        if entry.unread.get(f"columns.{column}") == column:
            entry.take(f"columns.{column}")
            keys["type"] = "sharegpt"
    return keys


def _take_alpaca_columns(entry: DataSetEntry) -> dict[str, Any]:
    """Takes the columns of texts: those of type alpaca, else a prompt and an answer, else one text.

    Without `prompt` our reader is left to recognize the columns.
    """
    columns = {
        name: entry.unread.get(f"columns.{name}")
        for name in (*ALPACA_COLUMNS, "system", "history", "chosen")
    }
    if ALPACA_COLUMNS.items() <= columns.items() and columns["system"] in (None, "system"):
        for name in (*ALPACA_COLUMNS, "system"):
            entry.take(f"columns.{name}")
        if columns["history"] == "history":
            entry.take("columns.history")
        return {"type": "alpaca"}
    if not columns["prompt"]:
        return {}
    prompt = entry.take("columns.prompt")
    answer = next((name for name in ("response", "chosen") if columns[name]), None)
    if answer is None:
        return {"type": "text", "text_column": prompt}  # LLaMA-Factory pretrains on it
    return {
        "type": "messages",
        "prompt_column": prompt,
        "completion_column": entry.take(f"columns.{answer}"),
    }


SWIFT_HUB = (
    "names of ModelScope's hub there, and code of its own rewrites the rows of some: name a file, "
    "or the data set on Hugging Face's, where it differs"
)
# hub::path:subset/subset#count, of which the path alone must be there: `parse` of ms-swift's
# dataset_syntax.py
SWIFT_NAME = re.compile(
    r"((?P<hub>hf|ms)::)?(?P<path>[^#]*?)(:(?P<subsets>[\w./-]+))?(#(?P<count>\d+))?", re.IGNORECASE
)
# _select_subsets and load of its dataset/loader.py
ALL_SUBSETS = "all subsets that ms-swift lists for it, else its default one; here the default alone"
COUNT_OF_SUBSETS = "so many rows of all its subsets together there; here all rows"


def _read_swift(
    settings: ToolFile, source: Path, conversion: Conversion
) -> tuple[Sources, Sources]:
    """Converts the data sets of an ms-swift file: (for training, held out)."""
    train = _list_swift("dataset", settings, conversion)
    held_out = _list_swift("val_dataset", settings, conversion)
    for entry in train:
        if not entry.get("max_samples") or settings.get("streaming"):
            continue
        # the count is that of the rows that are left after some are held out
        if settings.get("split_dataset_ratio") or not repeat_rows(entry, conversion):
            conversion.add_remark("dataset", f"{entry['path']}#{entry['max_samples']}", REPEATED)
    adapt_rows(train + held_out, conversion)
    paths = [entry["path"] for entry in train + held_out if entry.pop("hub") == "ms"]
    known = ON_HUGGING_FACE.values()
    # a path without an ending is the name of a data set on a hub
    names = [path for path in paths if not Path(path).suffix and path not in known]
    if names:
        conversion.to_do.append(f"datasets: {', '.join(names)}: {SWIFT_HUB}")
    return train, held_out


def _list_swift(key: str, settings: ToolFile, conversion: Conversion) -> Sources:
    """Makes our entries of the names under `key`, one for each subset, which also have a `hub`: hf
    or ms.

    A name that does not match is left out.
    """
    value = settings.get(key)
    default_hub = "hf" if settings.get("use_hf") else "ms"
    sources: Sources = []
    for text in value if isinstance(value, list) else [value]:
        match = SWIFT_NAME.fullmatch(str(text or ""))
        if match is None or not match["path"]:
            continue
        count = int(match["count"]) if match["count"] else None
        subsets = (match["subsets"] or "").split("/")
        if subsets == ["all"]:
            conversion.add_difference(key, text, ALL_SUBSETS)
            subsets = [""]
        if count and len(subsets) > 1:
            conversion.add_difference(key, text, COUNT_OF_SUBSETS)
            count = None
        hub = (match["hub"] or default_hub).lower()
        for subset in subsets:
            sources += make_sources(
                [match["path"]], name=subset or None, max_samples=count, hub=hub
            )
    return sources


# tool -> the function that converts its data sets: (for training, held out)
READERS: Mapping[Tool, Callable[[ToolFile, Path, Conversion], tuple[Sources, Sources]]] = {
    "TRL": _read_trl,
    "Axolotl": _read_axolotl,
    "LLaMA-Factory": _read_factory,
    "torchtune": _read_torchtune,
    "Automodel": _read_automodel,
    "ms-swift": _read_swift,
}
