"""The recipe keys that a command line overrides: its arguments other than options, and what they say."""

import difflib
from collections.abc import Collection, Sequence

from finetune.config.schema import NESTED, recipe_keys
from finetune.config.yaml_file import Entry, read_value
from finetune.errors import UserError

COMMAND_LINE = "command line"


def read_overrides(arguments: Sequence[str], options: Collection[str] = ()) -> list[str]:
    """Overrides as `key=value` texts, whichever way they were written.

    Raises `UserError` for a key that is none, but close to one of the command's own `options` (num_processes, ...).

    >>> read_overrides(["max_steps=3", "--learning_rate", "1e-5", "--seed=7", "--packing", "--use-peft"])
    ['max_steps=3', 'learning_rate=1e-5', 'seed=7', 'packing=true', 'use_peft=true']
    """
    overrides: list[str] = []
    waiting = None  # a `--key` that has not met its value yet
    for argument in arguments:
        if argument.startswith("--"):
            overrides += [f"{waiting}=true"] if waiting else []
            name, equals, value = argument[2:].partition("=")
            key = name.replace("-", "_")
            _refuse_misspelled_option(name, key, options)
            waiting = None if equals else key
            overrides += [f"{key}={value}"] if equals else []
        elif waiting:
            overrides.append(f"{waiting}={argument}")
            waiting = None
        else:
            overrides.append(argument)
    return overrides + ([f"{waiting}=true"] if waiting else [])


def read_override(text: str) -> tuple[Entry | None, list[str]]:
    """The entry that a `key=value` text stands for, and what is wrong with it."""
    key, equals, value = text.removeprefix("--").partition("=")
    if not equals:
        return None, [
            f"{COMMAND_LINE}: {text}: an override is written key=value; --recipe names a recipe, --config an "
            "Accelerate config"
        ]
    return read_value(value, key, COMMAND_LINE, NESTED)


def _refuse_misspelled_option(name: str, key: str, options: Collection[str]) -> None:
    known = recipe_keys()
    close = [] if key in known else difflib.get_close_matches(key, [*options, *known], n=1, cutoff=0.6)
    if close and close[0] in options:
        raise UserError(f"{COMMAND_LINE}: --{name}: no such option; did you mean --{close[0].replace('_', '-')}?")
