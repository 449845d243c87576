"""The keys of other tools and their counterparts here, from the tables beside this file.

A table has a row for each key. Sources: the configuration classes and documentation of TRL 1.9
with transformers 5 (SFTConfig, ModelConfig, ScriptArguments, TrainingArguments), Axolotl 0.18,
LLaMA-Factory (arguments of its `hparams`), torchtune (its recipes and builders), NeMo Automodel
(`recipes/llm/train_ft.py`, `components/optim/config.py`, `components/_peft/lora.py`).
"""

import csv
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from finetune.config.other_names import PRECISION, TRUNCATED

Tool = Literal["TRL", "Axolotl", "LLaMA-Factory", "torchtune", "Automodel", "ms-swift"]
TOOL_NAMES: tuple[Tool, ...] = get_args(Tool)
ToolFile: TypeAlias = Mapping[str, Any]  # what a file of one of these tools says

FOLDER = Path(__file__).parent
KEYS = "keys.csv"
DATA_SET_KEYS = "data_set_keys.csv"
# Words of the column `status`: "lacks CAPABILITY", which is missing here; "ignored for VALUES", in
# JSON, by which the other tool does what is done here.
LACKS = "lacks "
USUAL = "ignored for "
GRPO = "GRPO"  # in the column `tools`: keys of TRL's GRPO trainer, beside those of tool "TRL"


@dataclass(frozen=True, slots=True)
class Counterpart:
    """A key of another tool, and what becomes of it.

    `ours` is None if no key here does the same; `note` then says why, or what to do instead.
    """

    key: str  # dotted if it is nested
    ours: str | None
    note: str = ""
    # how a value is converted: a name that `convert_value` knows, or "by-code" for keys that are
    # left to the code of the other modules here
    carry: str = "same"
    inexact: bool = False  # our key does nearly the same: the note is reported
    missing_capability: str = ""  # what the key asks for that is not supported here; else empty
    has_effect: bool = True  # whether dropping the key changes what is trained, saved or measured
    usual: tuple[str, ...] = ()  # in JSON: values that ask for what is done here anyway


def read_table(name: str) -> Iterator[dict[str, str]]:
    """Yields the rows of a CSV file beside this one, by column name."""
    with (FOLDER / name).open(encoding="utf-8", newline="") as file:
        yield from csv.DictReader(file)


# Notes that several keys share; a table has `$NAME` in place of such a note.
NOTES: Mapping[str, str] = {
    "PRECISION": PRECISION,
    "TRUNCATED": TRUNCATED,
    **{row["name"]: row["note"] for row in read_table("notes.csv")},
}


@cache
def list_counterparts(tool: str, table: str = KEYS) -> tuple[Counterpart, ...]:
    """Lists the keys of a tool (or of `GRPO`) in the order of the table's rows.

    >>> next(pair for pair in list_counterparts("Axolotl") if pair.key == "micro_batch_size").ours
    'per_device_train_batch_size'
    """
    return tuple(
        _make_counterpart(row) for row in read_table(table) if tool in row["tools"].split()
    )


def _make_counterpart(row: Mapping[str, str]) -> Counterpart:
    """Makes a counterpart from a row of a table."""
    status = row["status"]
    if status.startswith(LACKS):
        capability = status.removeprefix(LACKS)
    else:
        capability = ""
    note = row["note"]
    if note.startswith("$"):
        note = NOTES[note.removeprefix("$")]
    elif capability and not note:
        note = f"{capability}: not supported"
    if status.startswith(USUAL):
        usual = tuple(status.removeprefix(USUAL).split())
    else:
        usual = ()
    return Counterpart(
        key=row["key"],
        ours=row["ours"] or None,
        note=note,
        carry=row["carry"] or "same",
        inexact=status == "nearly",
        missing_capability=capability,
        has_effect=status != "ignored",
        usual=usual,
    )
