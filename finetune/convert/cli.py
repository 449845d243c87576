"""`finetune convert THEIR.yaml`: reads another tool's file, writes ours."""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from finetune.config.reader import read_recipe
from finetune.config.schema import NESTED, DatasetSource, keys_of, recipe_keys
from finetune.config.yaml_file import COMMAND_LINE, find_yaml
from finetune.convert.conversion import convert_file
from finetune.convert.rules import Conversion
from finetune.errors import UserError
from finetune.files.durable import replace_file

EXIT_TO_DO = 1
MISSING_FILE = (
    "no such file or folder, here or in the recipe's folder",
    "no such file, here or in the recipe's folder",
)


def convert_command(arguments: argparse.Namespace) -> int:
    """Writes or prints the recipe; what differs is listed in it and on stderr. Raises `UserError` where none is made.

    Returns 0, or 1 where something is left to do before the recipe can train.
    """
    source = Path(arguments.source)
    refuse_own(source)
    found = convert_file(source)
    problems = read_back(found.recipe)
    if found.accelerate_file is not None:
        path = accelerate_path(Path(arguments.output or source.name))
        found.recipe["accelerate_config"] = path.name
        if not arguments.output:
            found.to_do.append(f"accelerate_config: {path.name} is written beside the recipe with --output")
    text = as_text(source, found)
    wrong = [problem for problem in problems if not problem.endswith(MISSING_FILE)]
    if wrong:
        raise UserError.of(f"{source}: not converted; the recipe would be wrong: {problem}" for problem in wrong)
    if arguments.output:
        output = Path(arguments.output)
        if found.accelerate_file is not None:
            _write(accelerate_path(output), found.accelerate_file, arguments.overwrite)
        _write(output, text, arguments.overwrite)
    else:
        print(text, end="")
    is_seen = not arguments.output and sys.stdout.isatty()  # as comments at the recipe's end
    notes = [] if is_seen else [*found.differences, *found.remarks]
    for line in [*notes, *(f"to do: {problem}" for problem in [*problems, *found.to_do])]:
        print(line, file=sys.stderr)
    return EXIT_TO_DO if found.to_do else 0


def accelerate_path(recipe: Path) -> Path:
    """The Accelerate file beside a recipe.

    >>> accelerate_path(Path("runs/ours.yaml")).as_posix()
    'runs/ours.accelerate.yaml'
    """
    return recipe.with_suffix(".accelerate.yaml")


def refuse_own(source: Path) -> None:
    """Raises `UserError` where `source` is a recipe of ours already."""
    theirs = find_yaml(source, is_foreign=True)  # what is wrong with it is said where it is read as another tool's
    if theirs and is_ours(theirs, source):
        raise UserError(
            f"{source}: a recipe of this toolkit already: there is nothing to convert, train with it as it is"
        )


def _write(path: Path, text: str, overwrite: bool) -> None:
    if path.is_file() and not overwrite:
        raise UserError(f"{path}: exists; name another file, or replace it with --overwrite")
    try:
        replace_file(path, text)
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror}); name another file") from None


def is_ours(theirs: Mapping[str, Any], source: Path) -> bool:
    """Whether all keys are ours, and one of them is ours alone or the whole file reads as a recipe."""
    mixtures = [theirs.get(key) for key in NESTED if key in theirs]
    entries = [entry for mixture in mixtures if isinstance(mixture, list) for entry in mixture]
    named = {key for entry in entries if isinstance(entry, dict) for key in entry}
    own = keys_of(DatasetSource).keys()
    if "datasets" not in theirs or not (theirs.keys() <= recipe_keys().keys() and named <= own):
        return False
    return bool(named & (own - {"path", "name", "split"})) or not _problems(str(source))


def as_text(source: Path, found: Conversion) -> str:
    """The recipe file, with what differs as comments at its end."""
    text = f"# From {source.name} ({found.tool}) by finetune convert.\n"
    text += yaml.safe_dump(found.recipe, sort_keys=False, allow_unicode=True)
    for title, lines in (
        ("To do", found.to_do),
        ("Different here", found.differences),
        ("Worth a look", found.remarks),
    ):
        if lines:
            text += f"\n# {title}:\n" + "".join(f"#   {' '.join(line.splitlines())}\n" for line in lines)
    if found.ignored:
        text += f"\n# Without effect here: {', '.join(dict.fromkeys(found.ignored))}\n"
    return text


def read_back(recipe: Mapping[str, Any]) -> list[str]:
    """What our reader says of a converted recipe. A local path that is missing here may exist where it is trained."""
    values = [f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in recipe.items()]
    return [line.replace(COMMAND_LINE, "the recipe") for line in _problems(None, values)]


def _problems(recipe: str | None, overrides: Sequence[str] = ()) -> list[str]:
    try:
        read_recipe(recipe, overrides)
    except UserError as error:
        return str(error).splitlines()
    return []
