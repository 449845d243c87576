"""Reports what LLaMA-Factory's v1 does differently: its rows, its turns, and its batches.

Paths in comments are in src/llamafactory/v1, and "there" in messages is v1.
"""

from pathlib import Path
from typing import Any

import yaml

from finetune.convert.chat_templates import HEADER_TRAINED, report_own_thoughts
from finetune.convert.counterparts import ToolFile
from finetune.convert.entries import DataSetEntry, Sources, find_from_root, make_sources
from finetune.convert.model_names import name_model
from finetune.convert.shared import PACKED_IN_ORDER, ROTATION_ROUNDED, WHOLE_STEPS
from finetune.convert.value_conversion import Conversion

V1_COMMAND = (
    "stage: sft   (the command names the method of such a file, as in llamafactory-cli sft; it "
    "does not)"
)
V1_ALPACA = (
    "datasets: instruction and input of a row of alpaca follow one another there, with nothing "
    "between; on lines of their own here"
)
# alpaca_converter and sharegpt_converter of its plugins/data_plugins/converter.py
V1_COLUMNS = (
    "datasets: the history of a row of alpaca, and the system column of one of sharegpt, are not "
    "read there, and an empty system column of alpaca is a system message without words; here both "
    "are read, and an empty one is none"
)
# _render_messages of its core/rendering/rendering.py
V1_BREAK = (
    "chat_template: what the tokenizer's template writes after the end of an answer, as ChatML's "
    "line break, is trained too there"
)
# _escape_special of its core/rendering/escape.py
V1_SPECIAL = (
    "rows: a special token that stands in a message is broken by a space without width there; "
    "tokenized as that token here, with a warning"
)
# _next_samples, which starts the data again when the rest of it fills no step
FILLED_UP = (
    "epochs: a step is filled up with rows of the next epoch there; here a last, short step ends "
    "each"
)
# _get_dynamic_micro_batch_sizes of its plugins/trainer_plugins/batching.py
AS_MANY_AS_FIT = (
    "a micro-batch has as many rows there as fit into micro_batch_size x cutoff_len tokens, each "
    "as long as its longest; here micro_batch_size rows: raise per_device_train_batch_size"
)
# _get_dynamic_padding_free_micro_batch_sizes of its plugins/trainer_plugins/batching.py
ONE_LONG_ROW = (
    "packing: a micro-batch is one packed row of micro_batch_size x cutoff_len tokens there, "
    "filled as rows come; here it is micro_batch_size packed rows of cutoff_len tokens, which hold "
    "fewer rows where these are long"
)
# compute_length of its DynamicPaddingFreeBatcher
COUNTED_BY_ROWS = (
    "num_train_epochs: the steps are counted there as if each micro-batch had micro_batch_size "
    "rows, and it has as many as fill it: the data is trained on more often"
)
# transformers' masks look for documents in a packed row only without a cache, as under activation
# checkpointing; flash attention always looks for them
SEEN_THROUGH_CACHE = (
    "without activation checkpointing documents in a packed row attend to those before under this "
    "attention there; each is apart here"
)
# fit of its core/base_trainer.py, and backward of DeepSpeed's engine under Accelerate
DIVIDED_AGAIN = (
    "under DeepSpeed a step's gradients are divided by its number of micro-batches once more "
    "there, before clipping; here they are those of the mean over its labels"
)
SKIPPED_WITHOUT_END = (
    "on_nonfinite: any number of steps whose gradient is not finite is left out there; here the "
    "run ends after max_skipped_steps of them"
)
# values of its BatchingStrategy: packed rows without padding; padded rows up to a number of tokens
PACKING = "dynamic_padding_free"
FILLING = "dynamic_batching"


def adapt_v1(settings: ToolFile, conversion: Conversion) -> None:
    """Reports what v1 does differently, and splits turns as it does."""
    conversion.remarks += [V1_COMMAND, V1_ALPACA, V1_COLUMNS]
    _adapt_turns(settings, conversion)
    if settings.get("deepspeed") and settings.get("global_batch_size"):
        rows = settings["global_batch_size"]
        conversion.add_difference("global_batch_size", rows, DIVIDED_AGAIN)
    if settings.get("pure_bf16"):  # shard_model of fsdpturbo.py casts buffers too
        conversion.add_difference("dist_config.name", "fsdpturbo", ROTATION_ROUNDED)
    if not settings.get("deepspeed"):  # fit of its core/base_trainer.py
        conversion.recipe["on_nonfinite"] = "skip"
        conversion.remarks.append(SKIPPED_WITHOUT_END)
    strategy = settings.get("batching_strategy")
    conversion.remarks.append(FILLED_UP if strategy in (PACKING, FILLING) else WHOLE_STEPS)
    if strategy == FILLING:
        conversion.add_difference("batching_strategy", strategy, AS_MANY_AS_FIT)
    if strategy != PACKING:
        return
    has_one_row = conversion.recipe.get("per_device_train_batch_size", 1) == 1
    conversion.remarks.append(PACKED_IN_ORDER if has_one_row else ONE_LONG_ROW)
    if settings.get("max_steps") is None:
        conversion.remarks.append(COUNTED_BY_ROWS)
    attention = settings.get("flash_attn")
    if attention != "flash_attention_2" and settings.get("disable_gradient_checkpointing"):
        conversion.add_difference("flash_attn", attention, SEEN_THROUGH_CACHE)


def _adapt_turns(settings: ToolFile, conversion: Conversion) -> None:
    """Splits conversations as v1 does, and reports which other tokens of a turn v1 trains.

    Files of older versions name a `template`, by which turns are not split.
    """
    if settings.get("template"):
        conversion.remarks.append(HEADER_TRAINED)
        return
    conversion.recipe["turns"] = "split"  # _prefix_cuts of its core/data_engine.py
    conversion.remarks += [V1_BREAK, V1_SPECIAL]
    if settings.get("chat_template"):
        return  # v1's custom_chat_template, in place of the tokenizer's own
    name = name_model(settings)
    report_own_thoughts(name, "model", name, conversion)


# SFTSample of its utils/types.py
V1_ROWS = (
    "datasets: without a converter a row has messages there, each with a list of parts with a type "
    "and a value, and a loss_weight; here a part has text or image in place of value, and a "
    "message weight"
)
# adjust_data_index of its plugins/data_plugins/loader.py
DRAWN_AGAIN = (
    "so many are drawn there, some of them more than once and others never; here each is read once"
)


def list_v1_entries(name: str, source: Path) -> list[DataSetEntry] | None:
    """Lists the data sets in a YAML file that describes several; None if the file is not found.

    Its keys are names of data sets, and its values are mappings with a path.
    """
    path = find_from_root(source, name)
    if path is None:
        return None
    content = yaml.safe_load(path.read_text(encoding="utf-8-sig"))
    entries = content if isinstance(content, dict) else {}
    return [
        DataSetEntry.make(f"{path.name}: {key}", entry)
        for key, entry in entries.items()
        if isinstance(entry, dict)
    ]


def read_v1_entry(entry: DataSetEntry, source: Path, conversion: Conversion) -> Sources:
    """Converts one data set of a v1 file, as _load_dataset of its core/data_engine.py reads it."""
    path = str(entry.take("path"))
    if entry.take("source") == "local":
        path = str(find_from_root(source, path) or path)
    keys: dict[str, Any] = {"split": entry.take("split"), "max_samples": entry.take("size")}
    converter = entry.unread.get("converter")
    if converter in ("alpaca", "sharegpt"):
        keys["type"] = entry.take("converter")
    elif converter is None and V1_ROWS not in conversion.remarks:
        conversion.remarks.append(V1_ROWS)
    if keys["max_samples"]:
        conversion.add_remark(f"{entry.where}.size", keys["max_samples"], DRAWN_AGAIN)
    return make_sources([path], **keys)
