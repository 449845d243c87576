"""One key of another tool and ours, and short ways to write several of them. Imports no torch."""

from dataclasses import dataclass
from typing import Literal

# How a value becomes ours; finetune/convert/rules.py says what each does. "by-code" is read by convert's own code.
Carry = Literal[
    "same", "not", "adapter", "lora-only", "all-linear", "targets", "schedule", "optimizer", "attention", "tracker",
    "dtype", "template", "resume", "overlength", "on-if-true", "steps", "warmup", "min-rate", "clip", "betas", "strategy",
    "names", "parameters", "module-patterns", "bits", "quantizer", "schedule-argument",
    "by-code",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Counterpart:
    """One key of another tool. `ours` is None where there is none; `note` then says why, or what to do instead."""

    theirs: str  # dotted where it is nested
    ours: str | None
    note: str = ""
    carry: Carry = "same"
    inexact: bool = False  # nearly the same: converted, and the note is reported
    missing_capability: str = ""  # what it asks for that is not supported here
    has_effect: bool = True  # whether dropping it changes what is trained, saved or measured


def ignored(note: str, *theirs: str) -> tuple[Counterpart, ...]:
    """Keys without effect here."""
    return tuple(Counterpart(key, None, note, has_effect=False) for key in theirs)


def without_counterpart(note: str, *theirs: str) -> tuple[Counterpart, ...]:
    """Keys with an effect that nothing here has; `note` says what to do instead."""
    return tuple(Counterpart(key, None, note) for key in theirs)


def unsupported(capability: str, *theirs: str, note: str = "") -> tuple[Counterpart, ...]:
    """Keys that ask for what is not supported here."""
    return tuple(
        Counterpart(key, None, note or f"{capability}: not supported", missing_capability=capability) for key in theirs
    )


def in_accelerate_file(note: str, *theirs: str) -> tuple[Counterpart, ...]:
    """Keys for what the Accelerate file says."""
    return tuple(Counterpart(key, "accelerate_config", note, "by-code") for key in theirs)
