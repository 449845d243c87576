"""Reads another tool's command line into the settings that a file of that tool would have.

The command line is in a script, or is the argument of `finetune convert`.
"""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from finetune.convert.counterparts import Tool
from finetune.convert.entries import find_from_root
from finetune.errors import UserError

SCRIPT_ENDINGS = (".sh", ".bash", ".cmd", ".txt")
# the program that a command starts -> its tool
PROGRAMS: Mapping[str, Tool] = {
    "trl": "TRL",
    "swift": "ms-swift",
    "megatron": "ms-swift",
    "llamafactory-cli": "LLaMA-Factory",
    "lmf": "LLaMA-Factory",
    "axolotl": "Axolotl",
}
# Scripts that are run instead of these programs: of TRL's examples, LLaMA-Factory and ms-swift.
TRL_SCRIPT = re.compile(r"(?:^|/)(sft|dpo|kto|orpo|grpo|cpo|gkd|reward_modeling)\.py$")
FACTORY_SCRIPT = re.compile(r"(?:^|/)src/train\.py$")
SWIFT_SCRIPT = re.compile(r"(?:^|/)swift/cli/(\w+)\.py$")
# $(expr 16 / 4) or $((16 / 4)): the groups are a number or variable, the sign, the other number
ARITHMETIC = re.compile(r"\$\(\(?\s*(?:expr )?(\S+) ([-+*/]) ([^\s)]+)\s*\)?\)")
VARIABLE = re.compile(r"\$\{?(\w+)\}?")
ASSIGNMENT = re.compile(r"(?:export )?(\w+)=(.*)")
# Three kinds of text in a line of a shell script: quoted text (group 1, kept), a comment or a
# redirection of output (no group, removed), and what separates two commands (group 2).
# A # within a word, as in rows.jsonl#500, begins no comment.
SHELL_SYNTAX = re.compile(
    r"""("(?:\\.|[^"\\])*"|'[^']*'|\\.)|(?<!\S)#.*|(?<!\S)[12&]?>>?(?:&\d|\s*\S+)|"""
    r"""((?<!\S)(?:&&?|\|\|?)(?!\S)|;(?!\S))"""
)
LAUNCH_FILE = re.compile(r"accelerate launch .*--config_file[ =](\S+)")
CONFIG_ENDINGS = (".yaml", ".yml", ".json")
COMMAND = "command"  # the settings' key for the subcommand, such as dpo in `trl dpo`
OTHERS = "other_commands"  # the settings' key for a script's commands that train after the first
# subcommands that train
TRAINING = ("sft", "pt", "rlhf", "train", "dpo", "kto", "orpo", "grpo", "cpo", "reward", "rloo")


def is_command(source: Path) -> bool:
    """Whether `source` is a script, or is itself a command line instead of a path."""
    if source.is_file():
        return source.suffix in SCRIPT_ENDINGS
    words = str(source).split()
    return len(words) > 1 and _find_program(words) is not None


def read_command(source: Path) -> tuple[Tool, dict[str, Any], str]:
    """Reads the first command of a known tool in `source`: (the tool, the settings, all text).

    The settings are those of the files that the command names. The command's options override
    them.

    Raises:
        UserError: No command is a known tool's, a file that it names cannot be read, quotes are
            open, or an argument needs a shell (a variable that is not set, a command's output).
    """
    if source.is_file():
        text = source.read_text(encoding="utf-8-sig")
    else:
        text = str(source)
    variables: dict[str, str] = {}
    commands = _list_commands(text, variables, source)
    for words in commands:
        program = _find_program(words)
        if program is None:
            variables |= _read_assignments(words, variables)
            continue
        tool, command, arguments = program
        if tool == "Axolotl" and command != "train":
            continue  # such as preprocess, before the command that trains
        options = dict(_read_options([_fill_in(word, variables, source) for word in arguments]))
        config_files = [
            options.pop("config", None),
            *(name for name in options.pop("", []) if str(name).endswith(CONFIG_ENDINGS)),
        ]
        settings: dict[str, Any] = {}
        for name in filter(None, config_files):
            settings |= _read_config_file(str(name), source)
        settings |= options
        if tool in ("TRL", "ms-swift"):
            settings[COMMAND] = command
        launch_file = LAUNCH_FILE.search(" ".join(words))
        if tool == "TRL" and launch_file:
            settings.setdefault("accelerate_config", _replace_variables(launch_file[1], variables))
        others = _list_other_runs(commands)
        if others:
            settings[OTHERS] = others
        return tool, settings, text
    raise UserError(
        f"{source}: no command of {', '.join(PROGRAMS)} is in it; name a script with one, or write "
        "it as one argument"
    )


def _list_other_runs(commands: Iterator[list[str]]) -> list[str]:
    """Lists the programs and subcommands of the commands that train, such as `ms-swift sft`.

    A line that cannot be read ends the list: nothing is converted after it.
    """
    programs: list[str] = []
    try:
        for words in commands:
            program = _find_program(words)
            if program is not None and program[1] in TRAINING:
                programs.append(f"{program[0]} {program[1]}")
    except UserError:
        pass
    return programs


def _calculate(match: re.Match[str], variables: Mapping[str, str]) -> str:
    """Computes a match of `ARITHMETIC` as a shell does, in whole numbers.

    Returns the text unchanged if an operand is no whole number, or on a division by zero.

    >>> ARITHMETIC.sub(
    ...     lambda match: _calculate(match, {"n": "4"}),
    ...     "--steps $(expr 16 / $n) --save $((2 * 50))",
    ... )
    '--steps 4 --save 100'
    """
    left, sign, right = match.groups()
    operands = [variables.get(text.strip("${}"), text) for text in (left, right)]
    if not all(operand.isdecimal() for operand in operands):
        return match[0]
    first, second = map(int, operands)
    if sign == "/":
        return str(first // second) if second else match[0]
    return str({"+": first + second, "-": first - second, "*": first * second}[sign])


def _list_commands(text: str, variables: Mapping[str, str], source: Path) -> Iterator[list[str]]:
    """Yields the words of each command in a script.

    `variables` may grow between two commands: the lines after an assignment are computed with it.
    """
    # a backslash at the end of a line continues the command on the next line
    for line in re.sub(r"\\\r?\n", " ", text).splitlines():
        line = ARITHMETIC.sub(lambda match: _calculate(match, variables), line)
        try:
            yield from map(shlex.split, _split_line(line))
        except ValueError as error:
            raise UserError(
                f"{source}: {line.strip()[:60]}: not a command line ({error}); close the quotes"
            ) from None


def _split_line(line: str) -> list[str]:
    """Splits a line into its commands, and removes comments and redirections of output.

    >>> _split_line("cd a && swift sft --dataset 'b;' c#5 2>&1 | tee log  # > d")
    ['cd a ', " swift sft --dataset 'b;' c#5  ", ' tee log  ']
    """

    def replace(match: re.Match[str]) -> str:
        quoted, separator = match.groups()
        return quoted or ("\n" if separator else "")

    return SHELL_SYNTAX.sub(replace, line).split("\n")


def _find_program(words: Sequence[str]) -> tuple[Tool, str, Sequence[str]] | None:
    """Finds a tool's program in a command: (the tool, the subcommand, the arguments after it).

    Launchers (`torchrun`) and variables may come before the program. Returns None for a command
    of no tool.
    """
    for i, word in enumerate(words):
        tool = PROGRAMS.get(word.rsplit("/", 1)[-1])
        is_option_value = i > 0 and words[i - 1].startswith("--")
        if (
            tool is not None
            and not is_option_value
            and i + 1 < len(words)
            and not words[i + 1].startswith("-")
        ):
            subcommand = words[i + 1]
            if word == "megatron":
                subcommand = f"megatron {subcommand}"
            return tool, subcommand, words[i + 2 :]
        arguments = words[i + 1 :]
        script = SWIFT_SCRIPT.search(word)
        if script is not None:
            return "ms-swift", script[1], arguments
        # a file of settings or --stage shows that a src/train.py is LLaMA-Factory's
        has_factory_arguments = "--stage" in arguments or any(
            argument.endswith(CONFIG_ENDINGS) for argument in arguments
        )
        if FACTORY_SCRIPT.search(word) and has_factory_arguments:
            return "LLaMA-Factory", "train", arguments
        script = TRL_SCRIPT.search(word)
        if script is not None:
            return "TRL", script[1], arguments
    return None


def _read_assignments(words: Sequence[str], variables: Mapping[str, str]) -> dict[str, str]:
    """Reads the variables that a command sets (`NAME=value`); `variables` are those set before."""
    assigned: dict[str, str] = {}
    for word in words:
        assignment = ASSIGNMENT.fullmatch(word)
        if assignment is not None:
            name, value = assignment.groups()
            assigned[name] = _replace_variables(value, variables)
    return assigned


def _replace_variables(text: str, variables: Mapping[str, str]) -> str:
    """Replaces $NAME and ${NAME} by their values; names that are not in `variables` stay."""
    return VARIABLE.sub(lambda match: variables.get(match[1], match[0]), text)


def _fill_in(word: str, variables: Mapping[str, str], source: Path) -> str:
    """Replaces the variables in a word; raises `UserError` if the word needs a shell after that."""
    filled = _replace_variables(word, variables)
    if "$" in filled or "`" in filled:
        raise UserError(f"{source}: {word}: a value that only the shell knows; write it out")
    return filled


def _read_options(words: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Yields each option with its value, and last, under "", the words that belong to no option.

    An option without a value is True; `--no-packing` is `packing` with False. A word `seed=3` sets
    a key of the file before it. After an option it is the option's value, as in `--optim_args`.

    >>> list(_read_options(["a.yaml", "seed=3", "--lr=1e-4", "--dataset", "a", "b", "--packing"]))
    [('seed', 3), ('lr', '1e-4'), ('dataset', ['a', 'b']), ('packing', True), ('', ['a.yaml'])]
    """
    without_option: list[str] = []
    i = 0
    while i < len(words):
        word = words[i]
        i += 1
        if re.fullmatch(r"-?-?[A-Za-z][\w.-]*=.*", word, re.DOTALL):
            name, _, value = word.lstrip("-").partition("=")
            yield name.replace("-", "_"), _read_value(value)
            continue
        if not word.startswith("--"):
            without_option.append(word)
            continue
        values: list[str] = []
        while i < len(words) and not words[i].startswith("--"):
            values.append(words[i])
            i += 1
        name = word.lstrip("-").replace("-", "_")
        if not values:
            yield name.removeprefix("no_"), not name.startswith("no_")
        else:
            parsed = [_read_value(value) for value in values]
            yield name, parsed[0] if len(parsed) == 1 else parsed
    yield "", without_option


def _read_value(text: str) -> Any:
    """Reads an option's value as YAML; text that is no YAML stays text.

    A mapping may be without spaces, as OmegaConf reads it.

    >>> _read_value("{min_lr:1e-6,power:2}")
    {'min_lr': '1e-6', 'power': 2}
    """
    try:
        value = yaml.safe_load(text)
        if isinstance(value, dict) and any(":" in str(key) for key in value):
            value = yaml.safe_load(re.sub(r"(\w):", r"\1: ", text))
    except yaml.YAMLError:
        return text
    return value


def _read_config_file(name: str, source: Path) -> dict[str, Any]:
    """Reads the settings of a file that the command names.

    A script's file may lie in a folder above the script; a typed command's path is taken as it is.
    """
    if source.is_file():
        path = find_from_root(source, name)
    else:
        path = Path(name)
    if path is None or not path.is_file():
        raise UserError(
            f"{source}: {name}: no such file, here or in the script's folder; give its path"
        )
    settings = yaml.safe_load(path.read_text(encoding="utf-8-sig"))
    if not isinstance(settings, dict):
        raise UserError(f"{path}: a file of `key: value` lines is expected")
    return settings
