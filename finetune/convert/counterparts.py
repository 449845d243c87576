"""The keys of other tools, with what each is here, read from the tables beside this file: one row a
key.

Sources: the configuration classes and documentation of TRL 1.9 with transformers 5 (SFTConfig,
ModelConfig, ScriptArguments, TrainingArguments), Axolotl 0.18, LLaMA-Factory (arguments of its
`hparams`), torchtune (its recipes and builders), NeMo Automodel (`recipes/llm/train_ft.py`,
`components/optim/config.py`, `components/_peft/lora.py`).
"""

import csv
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast, get_args

from finetune.config.other_names import PRECISION, TRUNCATED

Tool = Literal["TRL", "Axolotl", "LLaMA-Factory", "torchtune", "Automodel", "ms-swift"]
TOOL_NAMES: tuple[Tool, ...] = get_args(Tool)
ToolFile: TypeAlias = Mapping[str, Any]  # what a file of one of these tools says

# How a value becomes ours; convert/value_conversion.py says what each does. "by-code" is read by
# convert's own code.
Carry = Literal[
    "same",
    "not",
    "adapter",
    "lora-only",
    "all-linear",
    "targets",
    "schedule",
    "optimizer",
    "attention",
    "tracker",
    "dtype",
    "template",
    "resume",
    "overlength",
    "on-if-true",
    "steps",
    "warmup",
    "min-rate",
    "clip",
    "betas",
    "strategy",
    "names",
    "parameters",
    "module-patterns",
    "compile",
    "bits",
    "quantizer",
    "schedule-argument",
    "flag",
    "optimizer-flag",
    "by-code",
]

FOLDER = Path(__file__).parent
KEYS = "keys.csv"
DATA_SET_KEYS = "data_set_keys.csv"
LACKS = "lacks "  # before the capability in the column `status`
USUAL = "ignored for "  # before the values, in JSON, that do what is done here
GRPO = "GRPO"  # in the column `tools`: TRL's trainer, beside the keys of its others


@dataclass(frozen=True, slots=True)
class Counterpart:
    """One key of another tool.

    `ours` is None where there is none; `note` then says why, or what to do instead.
    """

    key: str  # dotted where it is nested
    ours: str | None
    note: str = ""
    carry: Carry = "same"
    inexact: bool = False  # nearly the same: converted, and the note is reported
    missing_capability: str = ""  # what it asks for that is not supported here
    has_effect: bool = True  # whether dropping it changes what is trained, saved or measured
    usual: tuple[str, ...] = ()  # the values for which it does not, where others do


def _read_table(name: str) -> Iterator[dict[str, str]]:
    with (FOLDER / name).open(encoding="utf-8", newline="") as file:
        yield from csv.DictReader(file)


# Notes that several keys share: `$NAME` in the tables.
NOTES: Mapping[str, str] = {
    "PRECISION": PRECISION,
    "TRUNCATED": TRUNCATED,
    **{row["name"]: row["note"] for row in _read_table("notes.csv")},
}


@cache
def list_counterparts(tool: str, table: str = KEYS) -> tuple[Counterpart, ...]:
    """Lists the keys of a tool (or of `GRPO`) in the order of a table.

    >>> next(pair for pair in list_counterparts("Axolotl") if pair.key == "micro_batch_size").ours
    'per_device_train_batch_size'
    """
    return tuple(
        _make_counterpart(row) for row in _read_table(table) if tool in row["tools"].split()
    )


def _make_counterpart(row: Mapping[str, str]) -> Counterpart:
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
    return Counterpart(
        key=row["key"],
        ours=row["ours"] or None,
        note=note,
        carry=cast(Carry, row["carry"] or "same"),
        inexact=status == "nearly",
        missing_capability=capability,
        has_effect=status != "ignored",
        usual=tuple(status.removeprefix(USUAL).split()) if status.startswith(USUAL) else (),
    )
