"""Another tool's command line, from a script or the argument of `finetune convert`, as the settings
of its file.
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

SCRIPTS = (".sh", ".bash", ".cmd", ".txt")
PROGRAMS: Mapping[str, Tool] = {
    "trl": "TRL",
    "swift": "ms-swift",
    "megatron": "ms-swift",
    "llamafactory-cli": "LLaMA-Factory",
    "lmf": "LLaMA-Factory",
    "axolotl": "Axolotl",
}
# of its examples
TRL_SCRIPT = re.compile(r"(?:^|/)(sft|dpo|kto|orpo|grpo|cpo|gkd|reward_modeling)\.py$")
FACTORY_SCRIPT = re.compile(r"(?:^|/)src/train\.py$")
SWIFT_SCRIPT = re.compile(r"(?:^|/)swift/cli/(\w+)\.py$")
ARITHMETIC = re.compile(r"\$\(\(?\s*(?:expr )?(\S+) ([-+*/]) ([^\s)]+)\s*\)?\)")  # $(expr 16 / 4)
VARIABLE = re.compile(r"\$\{?(\w+)\}?")
ASSIGNMENT = re.compile(r"(?:export )?(\w+)=(.*)")
# What is quoted; what is no part of a command: a comment (a # within a word, as in rows.jsonl#500,
# begins none) and where output goes; and what stands between two commands.
OF_SHELL = re.compile(
    r"""("(?:\\.|[^"\\])*"|'[^']*'|\\.)|(?<!\S)#.*|(?<!\S)[12&]?>>?(?:&\d|\s*\S+)|"""
    r"""((?<!\S)(?:&&?|\|\|?)(?!\S)|;(?!\S))"""
)
CONFIGS = (".yaml", ".yml", ".json")
COMMAND = "command"  # the key of what the program was asked for, as in `trl dpo`


def is_command(source: Path) -> bool:
    """Whether `source` is a script, or a command line itself."""
    if source.is_file():
        return source.suffix in SCRIPTS
    words = str(source).split()
    return len(words) > 1 and _find_program(words) is not None


def read_command(source: Path) -> tuple[Tool, dict[str, Any], str]:
    """Returns (the tool, its settings, the text) of the first command in `source` that trains.

    A file that the command names is read first; what stands on the command line prevails.

    Raises `UserError` where there is no such command, or an option has a value that only a shell
    knows.
    """
    if source.is_file():
        text = source.read_text(encoding="utf-8-sig")
    else:
        text = str(source)
    variables: dict[str, str] = {}
    for words in _list_commands(text, variables, source):
        program = _find_program(words)
        if program is None:
            variables |= _read_assignments(words, variables)
            continue
        tool, command, arguments = program
        options = dict(_read_options([_fill_in(word, variables, source) for word in arguments]))
        files = [
            options.pop("config", None),
            *(name for name in options.pop("", []) if str(name).endswith(CONFIGS)),
        ]
        settings: dict[str, Any] = {}
        for name in filter(None, files):
            settings |= _read_file(str(name), source)
        settings |= options
        if tool in ("TRL", "ms-swift"):
            settings[COMMAND] = command
        return tool, settings, text
    raise UserError(
        f"{source}: no command of {', '.join(PROGRAMS)} is in it; name a script with one, or write "
        "it as one argument"
    )


def _calculate(match: re.Match[str], variables: Mapping[str, str]) -> str:
    """Returns what a shell calculates of two whole numbers or variables; the text as it stands for
    others.

    >>> ARITHMETIC.sub(
    ...     lambda match: _calculate(match, {"n": "4"}),
    ...     "--steps $(expr 16 / $n) --save $((2 * 50))",
    ... )
    '--steps 4 --save 100'
    """
    left, sign, right = match.groups()
    numbers = [variables.get(part.strip("${}"), part) for part in (left, right)]
    if not all(number.isdecimal() for number in numbers):
        return match[0]
    first, second = map(int, numbers)
    if sign == "/":
        return str(first // second) if second else match[0]
    return str({"+": first + second, "-": first - second, "*": first * second}[sign])


def _list_commands(text: str, variables: Mapping[str, str], source: Path) -> Iterator[list[str]]:
    for line in re.sub(r"\\\r?\n", " ", text).splitlines():
        line = ARITHMETIC.sub(lambda match: _calculate(match, variables), line)
        try:
            yield from map(shlex.split, _split_line(line))
        except ValueError as error:
            raise UserError(
                f"{source}: {line.strip()[:60]}: not a command line ({error}); close the quotes"
            ) from None


def _split_line(line: str) -> list[str]:
    """Returns the commands of a line, without comments and without where their output goes.

    >>> _split_line("cd a && swift sft --dataset 'b;' c#5 2>&1 | tee log  # > d")
    ['cd a ', " swift sft --dataset 'b;' c#5  ", ' tee log  ']
    """
    return OF_SHELL.sub(lambda found: found[1] or ("\n" if found[2] else ""), line).split("\n")


def _find_program(words: Sequence[str]) -> tuple[Tool, str, Sequence[str]] | None:
    """Returns (the tool, what it is asked for, the arguments), behind launchers and variables; None
    for another one.
    """
    for i, word in enumerate(words):
        tool = PROGRAMS.get(word.rsplit("/", 1)[-1])
        is_value = i > 0 and words[i - 1].startswith("--")
        if (
            tool is not None
            and not is_value
            and i + 1 < len(words)
            and not words[i + 1].startswith("-")
        ):
            asked = words[i + 1]
            return tool, f"megatron {asked}" if word == "megatron" else asked, words[i + 2 :]
        script = SWIFT_SCRIPT.search(word)
        if script is not None:
            return "ms-swift", script[1], words[i + 1 :]
        rest = words[i + 1 :]
        is_factorys = "--stage" in rest or any(other.endswith(CONFIGS) for other in rest)
        if FACTORY_SCRIPT.search(word) and is_factorys:
            return "LLaMA-Factory", "train", rest
        script = TRL_SCRIPT.search(word)
        if script is not None:
            return "TRL", script[1], words[i + 1 :]
    return None


def _read_assignments(words: Sequence[str], variables: Mapping[str, str]) -> dict[str, str]:
    read: dict[str, str] = {}
    for word in words:
        assignment = ASSIGNMENT.fullmatch(word)
        if assignment is not None:
            read[assignment[1]] = VARIABLE.sub(
                lambda name: variables.get(name[1], name[0]), assignment[2]
            )
    return read


def _fill_in(word: str, variables: Mapping[str, str], source: Path) -> str:
    filled = VARIABLE.sub(lambda name: variables.get(name[1], name[0]), word)
    if "$" in filled or "`" in filled:
        raise UserError(f"{source}: {word}: a value that only the shell knows; write it out")
    return filled


def _read_options(words: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Yields the options with their values, and under "" what stands without one; an option alone
    is true.

    >>> list(_read_options(["a.yaml", "--lr=1e-4", "--dataset", "a", "b", "--packing", "seed=3"]))
    [('lr', '1e-4'), ('dataset', ['a', 'b']), ('packing', True), ('seed', 3), ('', ['a.yaml'])]
    """
    alone: list[str] = []
    i = 0
    while i < len(words):
        word = words[i]
        i += 1
        if re.fullmatch(r"-?-?[A-Za-z][\w.-]*=.*", word, re.DOTALL):
            name, _, value = word.lstrip("-").partition("=")
            yield name.replace("-", "_"), _read_value(value)
            continue
        if not word.startswith("--"):
            alone.append(word)
            continue
        values: list[str] = []
        while (
            i < len(words)
            and not words[i].startswith("--")
            and not re.match(r"[a-z]\w*=", words[i])
        ):
            values.append(words[i])
            i += 1
        name = word.lstrip("-").replace("-", "_")
        if not values:
            yield name.removeprefix("no_"), not name.startswith("no_")
        else:
            read = [_read_value(value) for value in values]
            yield name, read[0] if len(read) == 1 else read
    yield "", alone


def _read_value(text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def _read_file(name: str, source: Path) -> dict[str, Any]:
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
