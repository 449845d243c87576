"""Other tools' data sets as entries of `datasets` and `eval_datasets`."""

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
    EARLIER_ENDS,
    HEADER,
    MAYBE_THINKING,
    SAVED_TEMPLATE,
    SPACE_KEPT,
    THINKING,
    THINKING_LAST,
)
from finetune.convert.counterparts import Tool, ToolFile
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
from finetune.convert.factory_v1 import V1_ROWS, list_v1_entries, read_v1_entry
from finetune.convert.foreign_values import shorten
from finetune.convert.image_models import runs_for_images
from finetune.convert.model_names import guess_family, guess_vision_family
from finetune.convert.shared import PACKED_IN_ORDER
from finetune.convert.swift import ON_HUGGING_FACE, adapt_rows, repeat_rows
from finetune.convert.value_conversion import Conversion, read_section
from finetune.data.formats import LABEL_COLUMNS
from finetune.data.preferences import PROMPTS
from finetune.errors import UserError
from finetune.files.json_files import load_json

PAIRED_COLUMNS = {
    "prompt": "prompt_column",
    "chosen": "chosen_column",
    "rejected": "rejected_column",
}
RATED_COLUMNS = {"completion": "completion_column", "label": "label_column"}
TORCHTUNE_PAIRS = {
    "stack_exchange_paired": "lvwerra/stack-exchange-paired",
    "hh_rlhf_helpful": "RLHFlow/HH-RLHF-Helpful-standard",
    "preference": None,
}
STACK_EXCHANGE = {"prompt": "question", "chosen": "response_j", "rejected": "response_k"}
# sample_dataset of ms-swift's dataset/utils.py, _load_single_dataset of LLaMA-Factory's
# data/loader.py
REPEATED = (
    "of a data set with fewer rows some are repeated there, until there are so many; here each is "
    "read once"
)
SUBFOLDER = "read from this folder of the hub data set alone there; here from all of it"


def _name_component(entry: DataSetEntry) -> str:
    """Returns the data set builder of torchtune that an entry names, or the transform of its rows,
    without its ending.
    """
    entry.flatten("transform")
    names = (entry.unread.get(key) for key in ("_component_", "transform._component_"))
    component = str(next(filter(None, names), "")).rsplit(".", 1)[-1]
    return component.removesuffix("_dataset").removesuffix("_transform")


def _read_torchtune_preferences(entry: DataSetEntry, conversion: Conversion) -> Sources:
    """Reads an entry of torchtune's; a component that is not known stays unread, and is listed."""
    component = _name_component(entry)
    entry.flatten("column_map")
    keys = entry.take_name_and_split()
    if component in TORCHTUNE_PAIRS:
        entry.take("_component_")
    if component == "stack_exchange_paired":
        usual = STACK_EXCHANGE
    else:
        usual = {}
    for name, ours in PAIRED_COLUMNS.items():
        column = entry.take(f"column_map.{name}") or usual.get(name)
        if column != name:
            keys[ours] = column
    source = TORCHTUNE_PAIRS.get(component)
    if component == "stack_exchange_paired" and entry.unread.get("source") in (None, source):
        keys["type"] = "messages"
        conversion.add_difference(f"{entry.where}.data_dir", "data/rl", SUBFOLDER)
    return make_sources([path or source for path in entry.take_paths("source")], **keys)


TORCHTUNE_FORMATS = {
    "alpaca": "alpaca",
    "alpaca_cleaned": "alpaca",
    "chat": None,
    "text_completion": "text",
    "instruct": "messages",
    "the_cauldron": "cauldron",
    "gsm8k": "messages",
}
TRAINED_PROMPTS = ("alpaca", "alpaca_cleaned")
TORCHTUNE_SOURCES = {
    "alpaca": "tatsu-lab/alpaca",
    "alpaca_cleaned": "yahma/alpaca-cleaned",
    "the_cauldron": "HuggingFaceM4/the_cauldron",
    "gsm8k": "openai/gsm8k",
}
# split_across_pack of its text_completion_dataset, which is true by default
SPLIT_BY_PACKING = "a text that does not fit is split over two packed rows there; none is here"
# OpenAIToMessages and validate_messages of its data/_messages.py, in 0.6.1 and 0.7
OF_CHATS = "a message's train or weight is not read there; it is here"
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
    default = read_section(settings, "dataset").get("train_on_input")

    def read(entry: DataSetEntry) -> Sources:
        if compares_answers(conversion) and _name_component(entry) != "gsm8k":
            return _read_torchtune_preferences(entry, conversion)
        return _read_torchtune_entry(entry, default, source, conversion)

    train = read_each(
        "torchtune", _list_torchtune("dataset", settings, source, conversion), read, conversion
    )
    held_out = read_each(
        "torchtune", _list_torchtune("dataset_val", settings, source, conversion), read, conversion
    )
    return train, held_out


def _list_torchtune(
    key: str, settings: ToolFile, source: Path, conversion: Conversion
) -> list[DataSetEntry]:
    """Lists the data sets under `key`, which is one or a list, without what becomes keys of the
    whole recipe.
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
    packed = [entry.take("packed") for entry in entries]
    if key == "dataset" and any(packed) and not compares_answers(conversion):
        conversion.recipe["packing"] = True  # all of them, says torchtune
    return entries


# get_multi_dataset of torchtune's data/_utils.py, by torchdata's MultiNodeWeightedSampler, and
# _setup_data of its recipes/dev/lora_finetune_distributed_multi_dataset.py
DRAWN_BY_WEIGHTS = (
    "each row is drawn from a data set by its share of the weights there, and one that ends is "
    "read again; here a weight is how often a data set is read, so that a larger one has more of "
    "the rows"
)


def _adapt_weights(entries: Sequence[DataSetEntry], conversion: Conversion) -> None:
    """Reports how torchtune mixes data sets that have weights; of one alone it reads none."""
    weights = [entry.unread["weight"] for entry in entries if "weight" in entry.unread]
    if len(entries) > 1 and weights:
        conversion.add_difference("datasets.weight", weights, DRAWN_BY_WEIGHTS)
    elif weights:
        entries[0].take("weight")


def _read_torchtune_entry(
    entry: DataSetEntry, default: Any, source: Path, conversion: Conversion
) -> Sources:
    """Reads an entry of torchtune's. `default`: the first one's train_on_input."""
    component = _name_component(entry)
    if component in TRAINED_PROMPTS and entry.unread.get("train_on_input", default) is None:
        conversion.recipe["assistant_only_loss"] = False  # the default of these two
    if component in TORCHTUNE_FORMATS:
        entry.take("_component_")
        entry.take("transform._component_")
    if component == "text_completion" and "max_length" in conversion.recipe:
        conversion.recipe["overlength"] = "truncate"  # what is behind the cut is left out
    if component == "chat":
        notes = OF_OPENAI if entry.unread.get("conversation_style") == "openai" else ()
        conversion.remarks += [f"{entry.where}: {note}" for note in (OF_CHATS, *notes)]
    _report_torchtune_packing(entry, component, conversion)
    keys = _take_torchtune_columns(entry, component)
    paths = [path or TORCHTUNE_SOURCES.get(component) for path in entry.take_paths("source")]
    if not paths or paths[0] in BUILDERS:
        raise UserError(
            f"{source}: {entry.where}: {component} names no source; set it to a file or hub name"
        )
    named = entry.take_name_and_split()
    if component == "gsm8k":
        named = {"name": named["name"] or "main", "split": named["split"] or "train"}
        conversion.add_difference(f"{entry.where}._component_", component, R1_PROMPT)
    subset = entry.take("subset")
    weight = entry.take("weight")
    if weight not in (None, 1.0):
        keys["weight"] = weight
    return make_sources(paths, **named | {"name": subset or named["name"]}, **keys)


def _report_torchtune_packing(entry: DataSetEntry, component: str, conversion: Conversion) -> None:
    """Reports how torchtune packs rows: in their order, or split where they do not fit."""
    if not conversion.recipe.get("packing"):
        return
    split = entry.unread.get("split_across_pack")
    if component == "text_completion" and split is None:
        conversion.add_difference(f"{entry.where}.split_across_pack", split, SPLIT_BY_PACKING)
    elif not split and PACKED_IN_ORDER not in conversion.remarks:
        conversion.remarks.append(PACKED_IN_ORDER)


def _take_torchtune_columns(entry: DataSetEntry, component: str) -> dict[str, Any]:
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
    if component == "gsm8k":
        keys["prompt_column"] = "question"
        keys["completion_column"] = "answer"
    elif component == "instruct" or (keys["type"] == "alpaca" and not is_usual):
        prompt = "input" if component == "instruct" else "instruction"
        keys["prompt_column"] = entry.take(f"column_map.{prompt}") or prompt
        keys["completion_column"] = entry.take("column_map.output") or "output"
    elif component == "chat":
        conversations = entry.take("column_map.conversations")
        messages = entry.take("column_map.messages")
        keys["messages_column"] = conversations or messages or keys["messages_column"]
    elif is_usual:
        for key in columns:
            entry.take(key)
    return keys


AUTOMODEL_FORMATS = {
    "make_squad_dataset": "squad",
    "HellaSwag": "hellaswag",
    "make_tulu3_dataset": "messages",
}
# len_prompt_ids in format_prompt_completion of its components/datasets/llm/formatting_utils.py,
# which counts the space that ends a prompt
FIRST_OF_ANSWER = (
    "which is trained there only where the tokenizer begins a text with BOS and does not say "
    "add_bos_token"
)
AUTOMODEL_ENDS = {
    # convert_sharegpt_to_conversation of its components/datasets/vlm/datasets.py
    "messages": "white space around a question is left out there",
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
# of its components/datasets/vlm/datasets.py
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
MIXED_SHARES = (
    "a row is of the first data set with a chance of 0.8 there, else of the second, until each of "
    "both was drawn, and no more than limit_total; here each is read once an epoch: an entry's "
    "weight says how often, and its split which rows"
)
MIXED_ROWS = (
    "of the first data set rows of over {} messages are left out there, and messages without "
    "words; of the second the white space around a text; here all is read"
)
# MistralCommonBackend of its _transformers/tokenization, which has no chat template
BY_MISTRAL_COMMON = ("mistral", "pixtral", "mistral3", "ministral3")
WITHOUT_TEMPLATE = (
    "mistral-common's tokenizer has no chat template there: prompt and answer are plain text, and "
    "no end-of-text token follows; here the tokenizer's own template writes them where it has one"
)
# _build_tokenizer of Automodel's recipes/llm/train_ft.py
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
# _is_consistent_render_prefix of its components/datasets/llm/formatting_utils.py, by which an EOS
# token after the question stands for the header's first token
HEADER_THERE = (
    f"under a chat template {HEADER}, but for its first token where the template ends each text "
    "with the EOS token, as Phi-3's, whose header is that token alone; so is what it writes after "
    "an answer's end, as ChatML's line break; of one with generation blocks these alone are"
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
THINKING_MODELS = (THINKING, THINKING_LAST, MAYBE_THINKING)
REWRITING = re.compile(r"think|reasoning|<\|return\|>")
ENDS_LAST = "<|return|>"  # of gpt-oss: an earlier answer ends with <|end|>
# GENERATION_REGEX of its components/datasets/llm/formatting_utils.py
MARKS = re.compile(r"\{%-?\s+generation\s+-?%\}")
MARKED_THERE = (
    "the generation blocks of the chat template are trained there; here what of them follows the "
    "prompt of inference"
)
# ColumnMappedTextInstructionDataset of Automodel 0.7, whose use_hf_chat_template is off by default
FIRST_IN_SPACE = f"the answer's first token begins with the space there, {FIRST_OF_ANSWER}"
SPACE_BETWEEN = "a space stands between prompt and answer there, and no end-of-text token after it"
SYSTEM_THERE = "each row begins with a system message without words there"
BY_CODE = (
    "this class joins several columns of a row in code; write the rows as messages and name that "
    "file as path, or yield them: `function: my_data.py:rows`"
)
# what its components/datasets/vlm/datasets.py makes of a row
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


# resolve_vlm_dataloader of its recipes/_typed_config.py: the tokenizer is the processor's, and
# lengths are read with those of packing
READ_ELSEWHERE = ("tokenizer", "truncate", "inject_fake_images", "max_length", "pretokenize")


def _read_automodel(
    settings: ToolFile, source: Path, conversion: Conversion
) -> tuple[Sources, Sources]:
    def read(entry: DataSetEntry) -> Sources:
        return _read_automodel_entry(entry, source, conversion)

    def list_one(key: str) -> list[DataSetEntry]:
        section = settings.get(key)
        if not isinstance(section, dict):
            return []
        unread = READ_ELSEWHERE if runs_for_images(settings) else ()
        kept = {name: value for name, value in section.items() if name not in unread}
        return [DataSetEntry.make(key, kept)]

    train = read_each("Automodel", list_one("dataset"), read, conversion)
    return train, read_each("Automodel", list_one("validation_dataset"), read, conversion)


def _read_automodel_entry(entry: DataSetEntry, source: Path, conversion: Conversion) -> Sources:
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
    if str(path).endswith((".json", ".jsonl")):
        keys["split"] = None
    shuffle_seed = entry.take("shuffle_seed")
    if shuffle_seed is not None and "[" in str(keys["split"]):
        conversion.add_difference(f"{entry.where}.shuffle_seed", shuffle_seed, SHUFFLED_BEFORE)
    limits = [entry.take(key) for key in ("limit_dataset_samples", "num_samples_limit")]
    keys |= _take_automodel_format(entry, kind, path, conversion)
    template = _read_template(entry.take("chat_template"), source)
    if kind in ("make_squad_dataset", "ChatDataset") and not entry.take("mask_generation_prompt"):
        note = MARKED_THERE if _has_marks(template) else HEADER_THERE
        conversion.remarks.append(f"{entry.where}: {note}")
    if kind == "ChatDataset":
        _report_turns(entry, template, conversion)
    name = str(conversion.recipe.get("model_name_or_path"))
    families = {guess_family(name), guess_vision_family(name)}
    if kind == "make_squad_dataset" and not template and families & {*BY_MISTRAL_COMMON}:
        conversion.add_difference(f"{entry.where}._target_", kind, WITHOUT_TEMPLATE)
    if template:
        conversion.recipe["chat_template"] = str(template)
    paths = path if isinstance(path, list) else [path]
    limit = next(filter(None, limits), None)
    return [take_first_rows(made, limit) for made in make_sources(paths, **keys)]


def _read_mixture_of_texts(entry: DataSetEntry, conversion: Conversion) -> Sources:
    """Reads Automodel's mixture of two data sets of the hub, whose rows it draws by fixed shares.

    A limit takes the first rows of each, by these shares.
    """
    entry.take("seed")
    most = entry.take("max_turns")
    limit = entry.take("limit_total")
    sources = [
        made | {"split": entry.take(f"{name}_split") or "train"} for name, made in MIXED.items()
    ]
    note = MIXED_ROWS.format(16 if most is None else most)
    conversion.add_difference(f"{entry.where}.max_turns", most, note)
    if not isinstance(limit, int) or any("[" in made["split"] for made in sources):
        conversion.add_difference(f"{entry.where}.limit_total", limit, MIXED_SHARES)
        return sources
    ours = round(0.8 * limit)
    shares = zip(sources, (ours, limit - ours), strict=True)
    return [take_first_rows(made, rows) for made, rows in shares if rows]


def _read_template(template: Any, source: Path) -> str | Path:
    """The file of a template, where it is at hand; else as it is written, empty for none."""
    written = str(template or "")
    file = find_from_root(source, written) if written.endswith(".jinja") else None
    return Path(file) if file else written


def _has_marks(template: str | Path) -> bool:
    """Whether a template marks what is trained of it."""
    return MARKS.search(_read_text(template)) is not None


def _read_text(template: str | Path) -> str:
    return template.read_text(encoding="utf-8") if isinstance(template, Path) else template


def _report_turns(entry: DataSetEntry, template: str | Path, conversion: Conversion) -> None:
    """Reports what of conversations is read otherwise, and under a template that may write an
    earlier answer otherwise than the last one what becomes of it.
    """
    conversion.remarks += [f"{entry.where}: {each}" for each in (CALLS_AS_TEXTS, PARTS_APART)]
    name = str(conversion.recipe.get("model_name_or_path"))
    text = _read_text(template)
    if "{%" in text or "{{" in text:
        rewrites = REWRITING.search(text) is not None
        ends_otherwise = ENDS_LAST in text
    else:  # the model's own, or a file that is not at hand
        ends_otherwise = guess_family(name) == "gpt_oss"
        rewrites = ends_otherwise or any(each.search(name.lower()) for each in THINKING_MODELS)
    if rewrites:
        conversion.add_difference(f"{entry.where}._target_", "ChatDataset", ONE_TEXT_OF_CHAT)
    if ends_otherwise:
        conversion.add_difference(f"{entry.where}._target_", "ChatDataset", EARLIER_ENDS)


def _take_tokenizer(entry: DataSetEntry, conversion: Conversion) -> None:
    """Takes the tokenizer of Automodel's data set, which is that of the run; one that reads images
    is the model's.
    """
    keys = {key for key in entry.unread if key.startswith("tokenizer.")}
    section = {key.partition(".")[2]: entry.take(key) for key in sorted(keys)}
    if entry.where != "dataset" or conversion.images is not None:
        return
    name = section.get("pretrained_model_name_or_path")
    if name and name != conversion.recipe.get("model_name_or_path"):
        conversion.recipe["tokenizer_name_or_path"] = name
    for key, value in section.items():
        if key not in TOKENIZER_KEYS and value is not None:
            conversion.add_difference(f"dataset.tokenizer.{key}", value, TOKENIZER_AS_IT_IS)


def _take_first(entry: DataSetEntry, *keys: str) -> Any:
    """Takes the first key that has a value; the later ones stay unread."""
    return next(filter(None, map(entry.take, keys)), None)


def _take_automodel_format(
    entry: DataSetEntry, kind: str, path: Any, conversion: Conversion
) -> dict[str, Any]:
    question = entry.take("column_mapping.question")
    answer = entry.take("column_mapping.answer")
    if question and answer and not entry.unread.get("column_mapping.context"):
        masks_prompt = entry.take("answer_only_loss_mask") is not False
        columns = {"prompt_column": question, "completion_column": answer}
        if not entry.take("use_hf_chat_template"):
            trained = FIRST_IN_SPACE if masks_prompt else "the prompt is trained there"
            note = f"{SPACE_BETWEEN}; {trained}"
            conversion.add_difference(f"{entry.where}.column_mapping", columns, note)
            return {"type": "prompt_completion", **columns}
        if not masks_prompt:
            conversion.recipe["assistant_only_loss"] = False
        conversion.remarks.append(f"{entry.where}: {HEADER_THERE}")
        conversion.add_difference(f"{entry.where}.use_hf_chat_template", True, SYSTEM_THERE)
        return {"type": "messages", **columns}
    if kind in AUTOMODEL_FORMATS:
        row_format = AUTOMODEL_FORMATS[kind]
        if not entry.unread.get("chat_template") or row_format == "messages":
            conversion.remarks.append(f"{entry.where}: {AUTOMODEL_ENDS[row_format]}")
        return {"type": row_format}
    if kind != "ChatDataset":
        row = f"{ROWS_BY_CODE[kind]}; " if kind in ROWS_BY_CODE else ""
        conversion.add_difference(
            f"{entry.where}._target_", kind, f"{row}{BY_CODE}", "a data set made by code"
        )
        conversion.to_do.append(
            f"{entry.where}: {path}: its rows do not fit as they are; see _target_ above"
        )
    return {}


# Axolotl's types are called template.form; here the prompt columns of the forms that join texts.
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
    "argilla_chat": "chosen",  # messages, without the answer
}
ARGILLA = {"chosen_column": "chosen_response", "rejected_column": "rejected_response"}  # of pairs
MESSAGE_FORMS = ("default", "argilla_chat", "ultra")  # whole conversations, which are recognized
OWN_TEMPLATES = ("chatml", "llama3")
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
    """Reads an entry of Axolotl's; a type that is not known stays unread, and is listed."""
    kind = entry.unread.get("type")
    entry.flatten("type", "message_property_mappings", "roles")
    template, _, form = str(kind or "").partition(".")
    keys = entry.take_name_and_split()
    if isinstance(kind, dict):
        columns = PAIRED_COLUMNS | (RATED_COLUMNS if method == "kto" else {})
        keys |= {ours: entry.take(f"type.field_{name}") for name, ours in columns.items()}
    elif kind == "bradley_terry.chat_template":
        entry.take("type")
        keys |= {"type": "messages", "prompt_column": "input"}
    elif template == "chat_template" and form in (*MESSAGE_FORMS, "argilla"):
        entry.take("type")
        keys["prompt_column"] = entry.take("field_messages")
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


# llama3.py of Axolotl's prompt_strategies/dpo and kto, and _drop_long_sequences of its
# utils/data/rl.py
OF_LLAMA3 = f"{SPACE_KEPT}, and sequence_len counts a row without its BOS token there, with it here"


def _take_own_template(template: str, kind: str, conversion: Conversion) -> None:
    """Takes the template that a type writes turns by, whatever chat_template says: that is saved
    with the tokenizer there.
    """
    asked = conversion.recipe.get("chat_template")
    if asked != template:
        saved = "the tokenizer's own, where it has one" if asked is None else asked
        conversion.remarks.append(SAVED_TEMPLATE.format(template, saved))
    conversion.recipe["chat_template"] = template
    if template == "llama3":
        conversion.add_remark("datasets.type", kind, OF_LLAMA3)


def _name_form_columns(form: str, method: str) -> dict[str, Any]:
    """Returns the columns of a form that joins texts, for our reader of messages."""
    if method == "kto":
        row_format = None if form == "argilla_chat" else "messages"
        return {
            "prompt_column": RATED_FORMS[form],
            "completion_column": "completion",
            "type": row_format,
        }
    columns = ARGILLA if form == "argilla" else {}
    return {"prompt_column": PAIR_FORMS[form], "type": "messages", **columns}


def _take_factory_columns(entry: DataSetEntry, is_chat: bool, method: str) -> dict[str, Any]:
    """Takes the columns of an entry of dataset_info.json.

    Those that are called as usual need no key.
    """
    taken = {
        name: entry.take(f"columns.{name}") for name in ("messages", "prompt", "chosen", "rejected")
    }
    entry.take("ranking")
    if entry.unread.get("columns.query") == "input":
        entry.take("columns.query")
    if is_chat:
        prompt = taken["messages"] or "conversations"
    else:
        prompt = taken["prompt"] or "instruction"
    if method == "kto":
        return _take_rated_columns(entry, prompt, is_chat)
    keys = {"prompt_column": None if prompt in PROMPTS else prompt}
    if not is_chat and prompt != "instruction":
        keys = {"prompt_column": prompt, "type": "messages"}
    for side in ("chosen", "rejected"):
        if taken[side] != side:
            keys[f"{side}_column"] = taken[side]
        else:
            keys[f"{side}_column"] = None
    return keys


def _take_rated_columns(entry: DataSetEntry, prompt: Any, is_chat: bool) -> dict[str, Any]:
    label = entry.take("columns.kto_tag")
    answer = entry.take("columns.response") or "output"
    keys = {"label_column": None if label in LABEL_COLUMNS else label}
    if is_chat:
        keys["messages_column"] = None if prompt in PROMPTS else prompt
    elif prompt != "instruction" or answer != "output":
        keys |= {"type": "messages", "prompt_column": prompt, "completion_column": answer}
    return keys


FORMATS = {
    "alpaca": "alpaca",
    "sharegpt": "sharegpt",
    "chat_template": None,
    "completion": "text",
    "pretrain": "text",
    "openai": "messages",
}
ALPACA_COLUMNS = {"prompt": "instruction", "query": "input", "response": "output"}
ALPACA_PROMPT = (
    "chat_template: alpaca writes their prompt, but is one for all datasets, and another one is "
    "read by a chat template"
)
# load_tokenizer of its loaders/tokenizer.py, where type alpaca leaves the template alone
ALPACA_SAVED = (
    "chat_template: alpaca's, which writes the prompts, is saved with the tokenizer here; there {}"
)
# _build_result of its prompters.py, and _tokenize of its prompt_tokenizers.py
ALPACA_STYLE = (
    "each prompt is in this style there, with Alpaca's own words as the system message, and the "
    "EOS token alone ends an answer; here {} writes the conversation"
)
# strip_bos_token of its _tokenize, where there is no BOS token
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

    Raises `UserError` where a file lists something else.
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
        masked = [i for i, entry in enumerate(train) if _is_prompt_alone(entry)]
        conversion.remarks += [
            f"datasets[{i}]: assistant_only_loss: false {PROMPT_ALONE}" for i in masked
        ]
        if masked and len(masked) == len(train):
            del recipe["assistant_only_loss"]


def _is_prompt_alone(entry: Mapping[str, Any]) -> bool:
    """Whether rows are read as plain prompts with completions, which no key has trained whole."""
    return "prompt_column" in entry if "type" not in entry else entry["type"] == "prompt_completion"


def _read_trl(settings: ToolFile, source: Path, conversion: Conversion) -> tuple[Sources, Sources]:
    entries = list_entries(settings.get("datasets"), "datasets", source) or read_mixture(
        settings, source, conversion
    )
    mixed, held_out_of_mixed = read_mixer(settings, conversion)
    if mixed:
        return mixed, held_out_of_mixed
    name = settings.get("dataset_name")
    if entries and name:
        conversion.remarks.append(
            f"dataset_name: {shorten(name)} is dropped: datasets is given too"
        )
    entries = entries or [_make_trl_entry(settings)]
    train = read_each("TRL", entries, lambda entry: _read_trl_entry(entry, conversion), conversion)
    train = [made for made in train if "path" in made]
    others = list_entries(settings.get("eval_datasets"), "eval_datasets", source)
    held_out = read_each(
        "TRL", others, lambda entry: _read_trl_entry(entry, conversion), conversion
    )
    strategy = settings.get("eval_strategy", settings.get("evaluation_strategy", "no"))
    if str(strategy) != "no" and not held_out and "eval_split_size" not in conversion.recipe:
        held_out = [
            made | {"split": settings.get("dataset_test_split", "test")} for made in train[:1]
        ]
    return train, held_out


def _make_trl_entry(settings: ToolFile) -> DataSetEntry:
    text_column = settings.get("dataset_text_field")
    keys = {
        "path": settings.get("dataset_name"),
        "name": settings.get("dataset_config"),
        "split": settings.get("dataset_train_split"),
        "text_column": text_column if text_column != "text" else None,
    }
    return DataSetEntry.make("dataset", keys)


def _read_trl_entry(entry: DataSetEntry, conversion: Conversion) -> Sources:
    columns = entry.unread.get("columns")  # that alignment-handbook selects
    if (
        compares_answers(conversion)
        and isinstance(columns, list)
        and set(columns) <= set(KNOWN_COLUMNS)
    ):
        entry.take("columns")
    # ours are welcome too
    keys = {key: entry.take(key) for key in keys_of(DatasetSource) if key != "path"}
    return make_sources(entry.take_paths(), **keys)


def _read_axolotl(
    settings: ToolFile, source: Path, conversion: Conversion
) -> tuple[Sources, Sources]:
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
    return train, held_out


def _name_type(entry: DataSetEntry) -> str:
    """Returns an entry's type, without the style that type alpaca has by itself."""
    return str(entry.unread.get("type")).removesuffix(":instruct")


def _report_saved_template(asked: str, conversion: Conversion) -> None:
    if asked == "alpaca":
        return
    is_own = not asked or asked.startswith("tokenizer_default")
    saved = "the tokenizer's own" if is_own else f"{asked}'s"
    conversion.remarks.append(ALPACA_SAVED.format(saved))


def _read_axolotl_entry(
    entry: DataSetEntry, variables: dict[str, Any], conversion: Conversion
) -> Sources:
    """Reads an entry of Axolotl's.

    `variables`: what its chat templates read beside the messages.
    """
    if compares_answers(conversion):
        return _read_axolotl_preferences(entry, conversion.recipe["method"], conversion)
    entry.flatten("type", "message_property_mappings", "roles")
    kind = entry.unread.get("type")
    name = str(kind).split(".")[0].split(":")[0]
    # of a type that is a mapping, with a template
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
    """Takes the columns of an entry whose answers Axolotl encodes apart, and reports its type.

    Args:
        entry: The entry.
        kind: Its type.
        has_columns: Whether the type is a mapping that names them.
        conversion: Grows.
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
    """LLaMA-Factory's data sets: names that its dataset_info.json explains."""

    settings: ToolFile
    source: Path
    conversion: Conversion
    info_path: Path
    info: Mapping[str, Any]

    def read(self, key: str) -> Sources:
        """Reads the data sets named under `key`."""
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
        return [take_first_rows(made, self.settings.get("max_samples")) for made in sources]

    def _read_name(self, name: str) -> Sources:
        keys = self.info.get(name)
        if keys is None:
            folder = str(self.settings.get("dataset_dir"))
            # get_dataset_list of its data/parser.py
            if folder == "ONLINE":
                return [{"path": name}]
            # _get_dataset_info of v1's core/data_engine.py
            is_v1 = self.conversion.is_factory_v1
            if is_v1 and not name.endswith(".yaml"):
                return read_v1_entry(
                    DataSetEntry.make("train_dataset", {"path": name}), self.source, self.conversion
                )
            listed = list_v1_entries(name, self.source) if is_v1 else None
            if listed is not None:
                return read_each("LLaMA-Factory", listed, self._read_v1, self.conversion)
            where = f"is not in {self.info_path}"
            its = "its file or hub name"
            if is_v1:
                self.conversion.remarks.append(V1_ROWS)
                where = "lists the data sets there"
                its = "the path of each"
            elif folder.startswith("REMOTE:"):
                hub = folder.removeprefix("REMOTE:")
                where = f"is described in dataset_info.json of the hub data set {hub}"
            self.conversion.to_do.append(f"datasets: {name} {where}; put {its} as path")
            return [{"path": name}]
        if not isinstance(keys, dict):
            raise UserError(
                f"{self.info_path}: {name}: a mapping is expected, found {shorten(keys)}; name its "
                "file_name there"
            )
        entry = DataSetEntry.make(f"{self.info_path.name}: {name}", keys)
        return read_each("LLaMA-Factory", [entry], self._read_entry, self.conversion)

    def _read_v1(self, entry: DataSetEntry) -> Sources:
        return read_v1_entry(entry, self.source, self.conversion)

    def _read_entry(self, entry: DataSetEntry) -> Sources:
        conversion = self.conversion
        method = conversion.recipe.get("method", "sft")
        sources = _read_factory_entry(entry, self.info_path.parent, method)
        count = sources[0].get("max_samples") if sources else None
        if count:
            conversion.add_remark(f"{entry.where}.num_samples", count, REPEATED)
        if "columns.images" not in entry.unread:
            return sources
        if conversion.images is None and conversion.recipe.pop("chat_template", None):
            conversion.remarks.append(
                f"{entry.where}: the tokenizer's own template, which writes the images"
            )
        model = str(self.settings.get("model_name_or_path"))
        conversion.images = conversion.images or guess_vision_family(model)
        folder = self.settings.get("media_dir")
        if folder:
            return [made | {"image_folder": str(folder)} for made in sources]
        return sources


def _read_factory(
    settings: ToolFile, source: Path, conversion: Conversion
) -> tuple[Sources, Sources]:
    listed = Path(str(settings.get("dataset_dir", "data"))) / "dataset_info.json"
    path = find_from_root(source, listed) or source.parent / listed
    if path.is_file():
        info = load_json(path, "fix it, or name another dataset_dir")
    else:
        info = {}
    data = _FactoryData(settings, source, conversion, path, info)
    return data.read("dataset"), data.read("eval_dataset")


def _read_factory_entry(entry: DataSetEntry, folder: Path, method: str) -> Sources:
    entry.flatten("columns", "tags")
    is_chat = entry.unread.get("formatting") == "sharegpt"
    if entry.unread.get("formatting") in ("alpaca", "sharegpt"):
        entry.take("formatting")
    file = entry.take("file_name")
    hub_name = entry.take("hf_hub_url")
    keys = {"name": entry.take("subset"), "split": entry.take("split")}
    if method != "sft":
        keys |= _take_factory_columns(entry, is_chat, method)
    elif is_chat:
        keys |= _take_chat_columns(entry)
    else:
        keys |= _take_alpaca_columns(entry)
    keys["max_samples"] = entry.take("num_samples")
    return make_sources([str(folder / file) if file else hub_name], **keys)


def _take_chat_columns(entry: DataSetEntry) -> dict[str, Any]:
    keys = {"messages_column": entry.take("columns.messages")}
    for column in ("system", "chosen"):
        if entry.unread.get(f"columns.{column}") == column:
            entry.take(f"columns.{column}")
            keys["type"] = "sharegpt"  # reads both columns as well as the turns
    return keys


def _take_alpaca_columns(entry: DataSetEntry) -> dict[str, Any]:
    """Takes the columns of texts: those that type alpaca reads, else a prompt and an answer, else a
    text.
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
        return {"type": "text", "text_column": prompt}  # what they pretrain on
    return {
        "type": "messages",
        "prompt_column": prompt,
        "completion_column": entry.take(f"columns.{answer}"),
    }


SWIFT_HUB = (
    "names of ModelScope's hub there, and code of its own rewrites the rows of some: name a file, "
    "or the data set on Hugging Face's, where it differs"
)
SWIFT_NAME = re.compile(r"(?P<path>[^#]*?)(?::(?P<name>[\w/-]+))?(?:#(?P<count>\d+))?")


def _read_swift(
    settings: ToolFile, source: Path, conversion: Conversion
) -> tuple[Sources, Sources]:
    """Reads names as path:subset#count."""
    train = _list_swift(settings.get("dataset"))
    held_out = _list_swift(settings.get("val_dataset"))
    for entry in train:
        if not entry.get("max_samples") or settings.get("streaming"):
            continue
        # of the rows that are trained, once others are held out
        if settings.get("split_dataset_ratio") or not repeat_rows(entry, conversion):
            conversion.add_remark("dataset", f"{entry['path']}#{entry['max_samples']}", REPEATED)
    adapt_rows(train + held_out, conversion)
    paths = [entry["path"] for entry in train + held_out]
    known = ON_HUGGING_FACE.values()
    names = [path for path in paths if not Path(path).suffix and path not in known]
    if names and not settings.get("use_hf"):
        conversion.to_do.append(f"datasets: {', '.join(names)}: {SWIFT_HUB}")
    return train, held_out


def _list_swift(value: Any) -> Sources:
    sources: Sources = []
    for text in value if isinstance(value, list) else [value]:
        match = SWIFT_NAME.fullmatch(str(text or "").removeprefix("HF::").removeprefix("MS::"))
        if match is not None and match["path"]:
            count = int(match["count"]) if match["count"] else None
            sources += make_sources([match["path"]], name=match["name"], max_samples=count)
    return sources


READERS: Mapping[Tool, Callable[[ToolFile, Path, Conversion], tuple[Sources, Sources]]] = {
    "TRL": _read_trl,
    "Axolotl": _read_axolotl,
    "LLaMA-Factory": _read_factory,
    "torchtune": _read_torchtune,
    "Automodel": _read_automodel,
    "ms-swift": _read_swift,
}
