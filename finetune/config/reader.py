"""Reads recipe files strictly, and reports all mistakes at once.

Each message has the line of the mistake and, if it can be guessed, what was meant.
"""

import difflib
import json
import re
import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from pydantic import ConfigDict, TypeAdapter, ValidationError

from finetune.config.compatibility import find_recipe_problems
from finetune.config.given import write_prompts
from finetune.config.judge import is_judge, write_judge
from finetune.config.keys import Key, keys_of
from finetune.config.methods import DEFAULT_METHOD, METHODS
from finetune.config.module_names import find_problem
from finetune.config.other_names import (
    ACCELERATE_KEYS,
    IN_ACCELERATE_FILE,
    IN_RECIPE,
    MEANT,
    OTHER_VALUES,
    REFUSED_VALUES,
)
from finetune.config.reward_names import SERVED_ENVIRONMENTS, SHIPPED_REWARDS
from finetune.config.schema import (
    NESTED,
    SECTIONS,
    DatasetSource,
    Recipe,
    adapter_keys,
    recipe_keys,
)
from finetune.config.user_code import locate
from finetune.config.yaml_file import (
    COMMAND_LINE,
    UNREADABLE,
    Entry,
    find_yaml,
    read_entries,
    read_value,
    write_yaml,
)
from finetune.constants import Names
from finetune.errors import UserError, name_page
from finetune.files.durable import replace_file
from finetune.files.json_files import parse_json
from finetune.units import expand_home, read_folder_path


def read_overrides(arguments: Sequence[str], options: Collection[str] = ()) -> list[str]:
    """Rewrites the overrides of a command line as `key=value` texts.

    They may be written `key=value`, `--key=value`, `--key value`, or `--key` for true.

    Raises `UserError` for an unknown `--key` that resembles one of `options`, the option names of
    the command (num_processes, ...).

    >>> read_overrides(
    ...     ["max_steps=3", "--learning_rate", "1e-5", "--seed=7", "--packing", "--use-peft"]
    ... )
    ['max_steps=3', 'learning_rate=1e-5', 'seed=7', 'packing=true', 'use_peft=true']
    >>> read_overrides(["--use_peft", "learning_rate=1e-4", "--packing", "no"])
    ['use_peft=true', 'learning_rate=1e-4', 'packing=no']
    """
    overrides: list[str] = []
    pending_key = None  # of a `--key`, whose value may be the next argument
    for argument in arguments:
        if pending_key and may_be_value(argument, pending_key):
            overrides.append(f"{pending_key}={argument}")
            pending_key = None
            continue
        if pending_key:
            overrides.append(f"{pending_key}=true")
            pending_key = None
        if not argument.startswith("--"):
            overrides.append(argument)
            continue
        name, equals, value = argument.removeprefix("--").partition("=")
        key = name.replace("-", "_")
        _refuse_misspelled_option(name, key, options)
        if equals:
            overrides.append(f"{key}={value}")
        else:
            pending_key = key
    if pending_key:
        overrides.append(f"{pending_key}=true")
    return overrides


def may_be_value(word: str, key: str) -> bool:
    """Whether the argument after `--key` may be the key's value, and not an argument of its own.

    Of a key that is true or false only the words for these are values.
    """
    if word.startswith("--"):
        return False
    known = recipe_keys().get(key)
    is_switch = known is not None and isinstance(known.default, bool)
    return not is_switch or word.lower() in YES | NO


def read_override(text: str, place: str) -> tuple[Entry | None, list[str]]:
    """Reads a `key=value` text: returns (entry, problems).

    The entry is None if the text has no `=`. `place`: where the text stands, for messages.
    """
    key, equals, value = text.removeprefix("--").partition("=")
    if not equals:
        return None, [
            f"{place}: {text}: an override is written key=value; --recipe names a recipe, "
            "--config an Accelerate config"
        ]
    return read_value(value, key, place, NESTED)


def _refuse_misspelled_option(name: str, key: str, options: Collection[str]) -> None:
    """Raises `UserError` if `key` is no recipe key and resembles an option of the command.

    Args:
        name: The key as it was written, without the dashes before it.
        key: The same with underscores.
        options: The option names of the command.
    """
    known = recipe_keys()
    if key in known:
        close = []
    else:
        close = difflib.get_close_matches(key, [*options, *known], n=1, cutoff=0.6)
    if close and close[0] in options:
        raise UserError(
            f"{COMMAND_LINE}: --{name}: no such option; did you mean "
            f"--{close[0].replace('_', '-')}?"
        )


class Hints(Protocol):
    """The functions of a module that knows the files and keys of other tools.

    The module belongs to a package that imports this one, so it is passed to `add_hints`.
    """

    def find_writer(self, file: Mapping[str, Any], /) -> str | None:
        """Returns the name of the tool that `file` was written for; None if it may be a recipe."""

    def explain_key(self, key: str, /) -> tuple[str, str] | None:
        """Explains a key of another tool: (the recipe key that replaces it, a sentence).

        The sentence does not name `key`. Returns None if no tool has such a key.
        """


_hints: list[Hints] = []


def add_hints(hints: Hints) -> None:
    """Makes the reader use `hints` in all later errors.

    Entry points call it when they are imported; a second call has no effect.
    """
    if hints not in _hints:
        _hints.append(hints)


# Type of a pydantic error -> what the key expects; {gt} and such come from the error's context.
EXPECTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "text",
    "tuple_type": "a list",
    "dict_type": "a mapping of keys to values",
    "none_required": "null",
    "greater_than": "a number above {gt:g}",
    "greater_than_equal": "a number of at least {ge:g}",
    "less_than": "a number below {lt:g}",
    "less_than_equal": "a number of at most {le:g}",
    "too_short": "a list of at least {min_length}",
    "too_long": "a list of at most {max_length}",
    "missing": "a list with one more entry",
}
NOT_FINITE = ("nan", "inf", "infinity")  # YAML reads these as text; the numbers are .nan and .inf
# YAML reads these words as true and false, unless they are in quotes.
YES = {"true", "yes", "on"}
NO = {"false", "no", "off"}
FOLDER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")  # the name of an adapter


def explain_misfit(error: ValidationError, value: Any, extra_value: Any = None) -> str:
    """Returns a sentence on why a key does not accept a value.

    Args:
        error: pydantic's error for the value.
        value: The value as it was written.
        extra_value: A value that the key accepts outside its bounds; None: there is none.

    >>> from pydantic import TypeAdapter
    >>> try: TypeAdapter(int | None).validate_python("8", strict=True)
    ... except ValidationError as error: explain_misfit(error, "8")
    '"8" does not fit; a whole number is expected; in quotes it is text: write 8'
    """
    details: list[Any] = error.errors(include_url=False)
    takes_number = any(detail["type"] in ("int_type", "float_type") for detail in details)
    if takes_number and isinstance(value, str) and value.lower().lstrip("+-") in NOT_FINITE:
        return f"{value} does not fit; a finite number is expected"
    expected = " or ".join(
        # a union of types has an error for each type, and two may expect the same
        dict.fromkeys(
            _describe_expected(detail["type"], detail.get("ctx", {})) for detail in details
        )
    )
    if extra_value is not None and any(
        detail["type"].startswith(("greater_than", "less_than")) for detail in details
    ):
        expected += f", or {_format_value(extra_value)},"
    fix = _suggest_fix(details, value)
    return f"{_format_value(value)} does not fit; {expected} is expected{fix}"


def _describe_expected(kind: str, context: Mapping[str, Any]) -> str:
    """Describes the values that a key accepts, by the type and context of a pydantic error."""
    if kind == "literal_error":
        # pydantic writes 'a', 'b' or 'c' with the quotes
        return f"one of {str(context['expected']).replace(chr(39), '').replace(' or ', ', ')}"
    if kind == "string_pattern_mismatch":
        return "a slice such as ::4" if ":" in context["pattern"] else "a file's name"
    if kind in EXPECTED:
        return EXPECTED[kind].format(**context)
    return kind.replace("_", " ")


def _suggest_fix(details: Any, value: Any) -> str:
    """Returns "; " and what to write in place of a value that does not fit; "" if unknown.

    Args:
        details: `errors()` of pydantic's error.
        value: The value as it was written.
    """
    kinds = {detail["type"] for detail in details}
    if isinstance(value, float) and "int_type" in kinds and value.is_integer():
        return f"; write {int(value)}"
    if not isinstance(value, str):
        return ""
    if "bool_type" in kinds and value.lower() in YES | NO:
        return f"; in quotes it is text: write {str(value.lower() in YES).lower()}"
    if kinds & {"int_type", "float_type"}:
        return f"; in quotes it is text: write {value}" if _is_quoted_number(value) else ""
    if "literal_error" in kinds:
        expected = " ".join(detail.get("ctx", {}).get("expected", "") for detail in details)
        choices = re.findall("'([^']*)'", expected)
        parts = [part.strip() for part in value.split(",")]
        close = difflib.get_close_matches(value.lower(), choices, n=1)
        if "tuple_type" in kinds and len(parts) > 1:
            return f"; write [{', '.join(parts)}]"
        if close:
            return f"; did you mean {close[0]}?"
        if len(choices) > 1:  # one of these, alone or in a list: not any text in a list
            return ""
    if "tuple_type" in kinds:
        return f"; write [{', '.join(part.strip() for part in value.split(','))}]"
    return ""


def _is_quoted_number(value: str) -> bool:
    """Whether a text is a number as JSON writes it, true and false included."""
    try:
        return isinstance(parse_json(value.lower()), int | float)
    except ValueError:
        return False


def _format_value(value: Any) -> str:
    """Writes a value as JSON for a message, cut off at 80 characters."""
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) < 80 else f"{text[:77]}..."


def shipped_folder(name: str) -> Path:
    """Returns the folder `name` (`recipes` or `accelerate_configs`) that ships with the package.

    It is inside an installed package, and beside the package in a checkout.
    """
    package = Path(__file__).resolve().parents[1]
    installed = package / name
    return installed if installed.is_dir() else package.parent / name


RECIPES = shipped_folder("recipes")
# Keys marked FileOrName that name a file or what ships under a name; a folder may have that name.
NAMES_OF_FILES = ("chat_template", "accelerate_config")
# A text with one of these is a local path, not a hub name. The reader reports it if the file is
# missing.
LOCAL_STARTS = ("/", "./", "../", "~")
LOCAL_ENDS = (".json", ".jsonl", ".csv", ".parquet", ".arrow", ".txt", ".gz", ".jinja")


@dataclass(frozen=True, slots=True)
class _Checked:
    """The result of checking entries against the keys of the schema."""

    values: dict[str, Any] = field(default_factory=dict)  # key -> a value that fits
    # keys without a usable value, and keys that an unknown name probably stands for
    unusable: set[str] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)  # sentences with their places


def find_file(name: str, folder: Path, what: str) -> Path:
    """Finds a file by its path, or by its name in `folder`; either may lack .yaml.

    `what`: what the file is, for messages, such as "recipe".

    Raises `UserError` if `name` is empty, a folder, or no such file.
    """
    article = "an" if what[0] in "AEIOU" else "a"
    if not name:
        raise UserError(
            f"the name of {article} {what} is empty; give a path, or a name of those in {folder}"
        )
    # the path that is returned stands in messages: relative to the working directory if possible
    is_within = folder.is_relative_to(Path.cwd())
    short_folder = folder.relative_to(Path.cwd()) if is_within else folder
    for parent in (Path(), short_folder):
        for candidate in (parent / name, parent / f"{name}.yaml"):
            if candidate.is_file():
                return candidate
    if Path(name).is_dir():
        recipe_of_run = Path(name) / "recipe.yaml"
        if recipe_of_run.is_file() and folder == RECIPES:
            hint = f"did you mean {recipe_of_run}?"
        else:
            hint = f"name the {what}'s file"
        raise UserError(f"{name}: a folder, not {article} {what}; {hint}")
    known = sorted(path.stem for path in folder.glob("*.yaml"))
    close = difflib.get_close_matches(Path(name).stem, known, n=1)
    is_recipe = any((RECIPES / file).is_file() for file in (name, f"{name}.yaml"))
    hint = ""
    if close:
        hint = f"did you mean {close[0]}? "
    elif folder != RECIPES and is_recipe:
        hint = "it is a recipe, which --recipe takes; "
    raise UserError(f"{name}: no such {what}; {hint}give a path, or one of: {', '.join(known)}")


def expect_recipe(recipe: Any, *, may_have_adapters: bool = False) -> Recipe:
    """Returns `recipe`, or reads it if it is a file or a name in recipes/.

    A file need not name `datasets`.

    Raises:
        UserError: `recipe` is neither, the file has mistakes, or the recipe has `adapters` and
            `may_have_adapters` is false.
    """
    if isinstance(recipe, str | Path):
        recipe = read_recipe(str(recipe), [], needs_data=False)
    if not isinstance(recipe, Recipe):
        raise UserError(
            f"recipe: {recipe!r} is no recipe; give load_recipe(...), a file or a name in recipes/"
        )
    if recipe.lora.adapters and not may_have_adapters:
        raise UserError(
            f"{recipe.place_of('adapters')}: adapters: here one adapter is expected; use train, "
            "or the commands launch, plan and inspect"
        )
    return recipe


def read_recipe(
    name: str | None,
    overrides: Sequence[str] = (),
    *,
    needs_data: bool = True,
    place: str = COMMAND_LINE,
) -> Recipe:
    """Reads a recipe from a file and overrides, which replace keys of the file.

    Args:
        name: The file: a path, or a name in recipes/; None: the overrides are the recipe.
        overrides: `key=value` texts.
        needs_data: Whether a recipe without `datasets` is a mistake.
        place: Where the overrides stand, for messages.

    Raises:
        UserError: Lists all mistakes of the file and the overrides, one a line.
    """
    path = Path(place) if name is None else find_file(name, RECIPES, "recipe")
    try:
        entries, problems = ([], []) if name is None else read_entries(path, NESTED)
    except UserError:
        _refuse_another_tools_file(path)
        raise
    by_key = {entry.key: entry for entry in entries}
    if by_key.keys() & ACCELERATE_KEYS and not by_key.keys() & recipe_keys().keys():
        raise UserError(
            f"{path}: this is an Accelerate config; pass it as --config, and a recipe as --recipe"
        )
    for text in overrides:
        entry, override_problems = read_override(text, place)
        problems += override_problems
        if entry is not None:
            by_key[entry.key] = entry
    checked = _check_entries(by_key.values(), recipe_keys(), path.resolve().parent)
    method = checked.values.get("method", DEFAULT_METHOD)
    checked.values.update(
        {key: value for key, value in METHODS[method].defaults.items() if key not in by_key}
    )
    _add_empty_prompts(checked, by_key)
    sections = {}
    for section, schema in SECTIONS.items():
        section_values = {
            key: checked.values[key] for key in keys_of(schema, section) if key in checked.values
        }
        sections[section] = schema(**section_values)
    recipe = Recipe(
        path=str(path), places={key: entry.where for key, entry in by_key.items()}, **sections
    )
    if not needs_data and not checked.values.get("datasets"):
        checked.unusable.add("datasets")  # the rule that requires data is then skipped
    problems += [*checked.problems, *_find_problems(recipe, checked.unusable)]
    if problems:
        if name is not None:
            _refuse_another_tools_file(path)
        raise UserError.of(problems)
    return recipe


def _find_problems(recipe: Recipe, unusable: Collection[str]) -> list[str]:
    """Lists the problems of a recipe, or of the recipes of its `adapters`, each problem once.

    `unusable`: keys with a problem of their own; rules that read such a key are skipped.
    """
    problems = []
    for adapter_recipe, entry_problems in _make_adapter_recipes(recipe):
        problems += entry_problems
        problems += map(str, find_recipe_problems(adapter_recipe, unusable))
    return list(dict.fromkeys(problems))


def split_adapters(recipe: Recipe) -> tuple[Recipe, ...]:
    """Returns a recipe for each of `adapters`; the recipe itself if it has none.

    The recipes still have the key `adapters`, because rules read it; `Recipe.alone` is without it.

    Raises:
        UserError: Lists what is wrong with the entries of `adapters`.
    """
    pairs = _make_adapter_recipes(recipe)
    problems = [problem for _, entry_problems in pairs for problem in entry_problems]
    if problems:
        raise UserError.of(problems)
    return tuple(adapter_recipe for adapter_recipe, _ in pairs)


def _make_adapter_recipes(recipe: Recipe) -> list[tuple[Recipe, list[str]]]:
    """Makes (recipe, problems of the entry) for each entry of `adapters`.

    The recipe itself is the only one if it has no `adapters`, or if an adapter has an unusable
    name, which is then the problem.
    """
    adapters = recipe.lora.adapters
    if not adapters:
        return [(recipe, [])]
    place = f"{recipe.place_of('adapters')}: adapters"
    names = [adapter.get("name", "") for adapter in adapters]
    for name in names:
        is_text = isinstance(name, str)
        if not is_text or not FOLDER_NAME.fullmatch(name) or names.count(name) > 1:
            problem = (
                f"{place}: name: {_format_value(name)} does not fit; each adapter needs a name of "
                "its own, a text of letters, digits, - and _, which is that of its folder"
            )
            return [(recipe, [problem])]
    return [
        _make_adapter_recipe(recipe, adapter, f"{place}: {adapter['name']}") for adapter in adapters
    ]


def _make_adapter_recipe(
    recipe: Recipe, adapter: Mapping[str, Any], place: str
) -> tuple[Recipe, list[str]]:
    """Replaces keys of a recipe by those of one entry of `adapters`: returns (recipe, problems).

    The adapter's run gets a folder and a name made of those of the whole run and the adapter's
    name. `place`: where the entry stands, for messages.
    """
    problems = []
    entries = []
    for key, value in adapter.items():
        if key in recipe_keys().keys() - adapter_keys().keys():
            problems.append(
                f"{place}: {key}: is the same for all adapters, which share a base and its "
                "batches; write it once in the recipe"
            )
        elif key != "name":
            # JSON is YAML: as text, the value becomes an entry like those of a command line
            entry, value_problems = read_value(json.dumps(value, default=str), key, place, NESTED)
            problems += value_problems
            entries.append(entry)
    checked = _check_entries(entries, recipe_keys(), Path(recipe.path).resolve().parent)
    values = {
        **checked.values,
        "output_dir": str(recipe.folder / adapter["name"]),
        "run_name": f"{recipe.name}-{adapter['name']}",
    }
    sections = {}
    for section, schema in SECTIONS.items():
        changes = {key: values[key] for key in keys_of(schema, section) if key in values}
        sections[section] = replace(getattr(recipe, section), **changes)
    places = {**recipe.places, **{entry.key: entry.where for entry in entries}}
    return replace(recipe, places=places, **sections), problems + checked.problems


def _add_empty_prompts(checked: _Checked, by_key: Mapping[str, Entry]) -> None:
    """Adds a data set of empty prompts to a recipe with an environment and without `datasets`.

    The environment then writes the prompts. Adds a problem to `checked` if max_steps is not set.
    `by_key`: the entries of the file and the overrides.
    """
    if not checked.values.get("environment") or "datasets" in by_key:
        return
    count = checked.values.get("global_batch_size") or EMPTY_PROMPTS
    checked.values["datasets"] = (DatasetSource(path=write_prompts(count)),)
    if not checked.values.get("max_steps"):
        where = by_key["environment"].where
        checked.problems.append(
            f"{where}: environment: without datasets nothing says how long to train; set max_steps"
        )


def _refuse_another_tools_file(path: Path) -> None:
    """Raises `UserError` if the file was written for another tool.

    This one sentence replaces a problem for each key of the file.
    """
    file = find_yaml(path, is_foreign=True)
    tool = next(filter(None, (hints.find_writer(file) for hints in _hints)), None)
    if tool is not None:
        article = "an" if tool[0] in "AEIOU" else "a"
        raise UserError(
            f"{path}: is {article} {tool} file, not a recipe; write one from it with `finetune "
            f"convert {shlex.quote(str(path))} --output my_recipe.yaml`"
        )


def _resolve_checkpoint(name: str) -> str:
    """Returns the folder model/ if `name` is a checkpoint of a run (step-00000100), else `name`."""
    model = Path(name) / "model"
    is_checkpoint = (Path(name) / "manifest.json").is_file() and (model / "config.json").is_file()
    return str(model) if is_checkpoint else name


def to_dict(recipe: Recipe) -> dict[str, Any]:
    """Returns all keys of the recipe, defaults included, as one flat mapping of plain values.

    It is the content of recipe.yaml in a run's folder.
    """
    flat: dict[str, Any] = {}
    for section in SECTIONS:
        flat |= asdict(getattr(recipe, section))
    plain: dict[str, Any] = json.loads(json.dumps(flat))  # tuples become lists
    return plain


def write_recipe(recipe: Recipe, path: Path) -> None:
    """Writes a recipe file that reads back as the same recipe."""
    replace_file(path, write_yaml(to_dict(recipe)))


def _check_entries(entries: Iterable[Entry], known: Mapping[str, Key], folder: Path) -> _Checked:
    """Converts the entries to the types of the schema, and collects their problems.

    Args:
        entries: Of a recipe, or of an entry of `datasets`.
        known: The keys that may stand there.
        folder: The recipe's folder, in which files are looked for too.
    """
    checked = _Checked()
    for entry in entries:
        key = known.get(entry.key)
        if key is None:
            meant, sentence = explain_unknown(entry.key, known)
            checked.unusable.add(meant)
            checked.problems.append(f"{entry.where}: {sentence}")
            continue
        readable = entry.value is not UNREADABLE
        problems = []
        if readable:
            problems = _add_value(entry, key, folder, checked.values)
        if problems or not readable:
            checked.unusable.add(entry.key)
            checked.problems.extend(problems)
    return checked


EMPTY_PROMPTS = 1024  # of `_add_empty_prompts`, if the recipe sets no global_batch_size
WHY_NO_VERIFIERS = (
    "the package verifiers plays its episodes by agent programs that ask a server for text, so "
    "that what was sampled would be encoded again; write a class with reset, tools and "
    "get_reward, around its task"
)


class _Unfit(ValueError):
    """Its key does not accept a value; the text follows the key's name in the message."""


def _add_value(entry: Entry, key: Key, folder: Path, values: dict[str, Any]) -> list[str]:
    """Adds the entry's value to `values` in the type of the key, or returns its problems."""
    # the schema's lists are tuples
    value = tuple(entry.value) if isinstance(entry.value, list) else entry.value
    if entry.key in NESTED and isinstance(value, tuple):
        value, problems = _check_sources(value, NESTED[entry.key], entry, folder)
        if problems:
            return problems
    try:
        values[entry.key] = _convert_value(value, entry, key, folder)
    except _Unfit as error:
        return [f"{entry.where}: {entry.key}: {error}"]
    return []


def _convert_value(value: Any, entry: Entry, key: Key, folder: Path) -> Any:
    """Returns `value` in the type of the key, with the files that it names found.

    Raises `_Unfit` if the value does not fit, or names a file that does not exist.
    """
    if _holds_nul(value):
        raise _Unfit("holds a NUL character, which no text and no name has; remove it")
    extra_value = None  # accepted beside the values of the key's type
    if key.read_as is not None:
        extra_value = key.read_as.written
        # the types too, since True == 1 and False == 0
        if value == extra_value and type(value) is type(extra_value):
            value = key.read_as.meant
    if key.is_rewards and isinstance(value, tuple):
        value = tuple(map(_write_reward, value))
    try:
        value = _make_validator(entry.key, key.section).validate_python(value, strict=True)
    except ValidationError as error:
        explained = explain_value(entry.key, value)
        raise _Unfit(explained or explain_misfit(error, entry.value, extra_value)) from None
    if key.is_patterns:
        for pattern in value or ():
            problem = find_problem(pattern)
            if problem:
                raise _Unfit(problem)
    return _locate_value(value, key, folder)


def _holds_nul(value: Any) -> bool:
    """Whether a NUL character is anywhere in a value, keys of mappings included."""
    if isinstance(value, Mapping):
        return any(_holds_nul(text) for pair in value.items() for text in pair)
    if isinstance(value, list | tuple):
        return any(map(_holds_nul, value))
    return isinstance(value, str) and "\0" in value


def _locate_value(value: Any, key: Key, folder: Path) -> Any:
    """Replaces names of files in a key's value by the paths of files that exist, and a folder's
    "~" by the user's home.

    Files are looked for from the working directory, then from `folder`, the recipe's. A value
    that names no files is returned as it is.

    Raises `_Unfit` if a file does not exist, or a folder is a URL.
    """
    if value is None:
        return None
    if key.is_rewards:
        return tuple(_locate_reward(name, folder) for name in value)
    if key.is_python_name:
        served_prefixes = SERVED_ENVIRONMENTS if key.name == "environment" else ()
        return _locate_functions(value, folder, served_prefixes)
    if key.is_file_or_name and isinstance(value, str):
        return _locate_file(value, folder, finds_folders=key.name not in NAMES_OF_FILES)
    if key.is_local_folder:
        try:
            return read_folder_path(value)
        except UserError as error:
            raise _Unfit(str(error)) from None
    return value


def _locate_functions(
    value: str | Sequence[str] | Mapping[str, str], folder: Path, served_prefixes: Names
) -> str | Names | dict[str, str]:
    """Replaces the file in each FILE.py:NAME of a key's value by a path that exists.

    `served_prefixes`: how the name of an environment on a server begins; such a name stays as it
    is. Empty for any key but `environment`.
    """

    def find(name: str) -> str:
        if served_prefixes and name.startswith("verifiers:"):
            raise _Unfit(f"{name}: {WHY_NO_VERIFIERS}")
        return name if name.startswith(served_prefixes) else locate(name, folder)

    try:
        if isinstance(value, str):
            return find(value)
        if isinstance(value, Mapping):
            return {key: find(name) for key, name in value.items()}
        return tuple(map(find, value))
    except ValueError as error:
        raise _Unfit(str(error)) from None


def _write_reward(value: Any) -> Any:
    """Returns an entry of `rewards` with a judge as JSON text, as a `Recipe` holds it.

    A judge may be a mapping or such a text. Anything else is returned as it is.
    """
    try:
        if isinstance(value, str) and is_judge(value):
            value = parse_json(value)
        return write_judge(value) if isinstance(value, dict) else value
    except ValueError as error:
        raise _Unfit(str(error)) from None


def _locate_reward(value: str, folder: Path) -> str:
    """Replaces the file or folder in an entry of `rewards` by a path that exists.

    The entry is a judge, a reward that ships, FILE.py:NAME, or the folder or hub name of a reward
    model. Judges, rewards that ship and hub names stay as they are.
    """
    if is_judge(value):
        return value
    is_folder = any(path.is_dir() for path in (Path(expand_home(value)), folder / value))
    is_function = value in SHIPPED_REWARDS or ".py" in value
    if not is_function and ("/" in value or is_folder):
        return _locate_file(value, folder)
    # a name that fits nothing comes here too, for the error that lists what would fit
    try:
        return locate(value, folder, SHIPPED_REWARDS)
    except ValueError as error:
        raise _Unfit(str(error)) from None


def _locate_file(value: str, folder: Path, finds_folders: bool = True) -> str:
    """Returns the path that `value` names; a hub name, a URL or Jinja text as it is.

    `finds_folders`: whether it may be a folder.

    Raises `_Unfit` if it is empty, or a local path that does not exist or cannot be read.
    """
    if not value:
        raise _Unfit("empty text names no file and no folder; name one, or remove the key")
    if any(mark in value for mark in ("\n", "://", "{{", "{%")):
        return value
    try:
        path = _find_path(value, folder, finds_folders)
    except OSError as error:  # for example a parent folder without permission
        raise _Unfit(f"{value}: cannot be read: {error.strerror or error}") from None
    if path is None:
        raise _Unfit(f"{value}: no such file or folder, here or in the recipe's folder")
    return path


def _check_sources(
    items: tuple[Any, ...], schema: type, entry: Entry, folder: Path
) -> tuple[tuple[Any, ...], list[str]]:
    """Makes a `schema` (`DatasetSource`) of each item of `datasets` or `eval_datasets`.

    Args:
        items: Each a list of entries, as `read_entries` reads a mapping; other items are problems.
        schema: The class to make.
        entry: The recipe's entry that holds the items.
        folder: The recipe's folder.

    Returns:
        (sources, problems). Items with a problem have no source.
    """
    sources = []
    problems = []
    for item in items:
        if not (isinstance(item, list) and all(isinstance(part, Entry) for part in item)):
            problems.append(
                f"{entry.where}: {entry.key}: each entry is a mapping with at least a path, such "
                "as `- path: data.jsonl`"
            )
            continue
        checked = _check_entries(item, keys_of(schema), folder)
        problems += checked.problems
        if not {"path", "function"} & (checked.values.keys() | checked.unusable):
            where = item[0].where if item else entry.where
            problems.append(
                f"{where}: {entry.key}: an entry without a path; name its file, folder or hub name"
            )
        elif not checked.problems:
            sources.append(schema(**checked.values))
    return tuple(sources), problems


@cache
def _make_validator(key: str, section: str) -> TypeAdapter[Any]:
    """Makes pydantic's validator of a key.

    `section`: the key's section of the recipe; empty for a key of an entry of `datasets`.
    """
    if section:
        known = keys_of(SECTIONS[section], section)
    else:
        known = keys_of(DatasetSource)
    return TypeAdapter(known[key].annotation, config=ConfigDict(allow_inf_nan=False))


def _find_path(value: str, folder: Path, finds_folders: bool = True) -> str | None:
    """Finds a file, a folder or the matches of a glob, from the working directory, then `folder`.

    Returns the path. If nothing exists, returns `value` if it may be a hub name, else None.
    `finds_folders`: whether it may be a folder.
    """
    is_glob = any(letter in value for letter in "*?[")
    for candidate in (Path(expand_home(value)), folder / value):
        if candidate.is_dir() and not finds_folders:
            continue
        if candidate.exists() or (is_glob and _has_match(candidate)):
            return _resolve_checkpoint(str(candidate))
    if value.startswith(LOCAL_STARTS) or value.endswith(LOCAL_ENDS):
        return None
    return value


def _has_match(pattern: Path) -> bool:
    """Whether a glob, relative or absolute, matches any file or folder."""
    anchor = Path(pattern.anchor) if pattern.is_absolute() else Path()
    return any(anchor.glob(str(pattern.relative_to(anchor))))


def explain_unknown(key: str, known: Mapping[str, Key]) -> tuple[str, str]:
    """Explains a key that is not among `known`: returns (key that was meant, sentence).

    Args:
        key: The unknown key as it was written. It is also returned if no better key is found.
        known: The keys that may stand there: the recipe's, or those of an entry of `datasets`.
    """
    is_at_top = "path" not in known  # a recipe has no key `path`, an entry of `datasets` has
    explained = _explain_recipe_key(key) if is_at_top else None
    if explained is not None:
        meant, sentence = explained
        return meant, f"{key}: {sentence}"
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    if close:
        return close[0], f"{key}: no such key; did you mean {close[0]}?"
    if is_at_top:
        listed = f"they are listed in {name_page('recipes')}"
    else:
        listed = f"one of {', '.join(known)}"
    return key, f"{key}: no such key; {listed}"


def _explain_recipe_key(key: str) -> tuple[str, str] | None:
    """Explains a name that means something, though a recipe has no such key.

    Returns (key that was meant, a sentence without `key`); None for a name that means nothing.
    """
    if key in {field.name for field in fields(DatasetSource)}:
        example = f"datasets=[{{path: ..., {key}: ...}}]"
        return key, f"a key of each entry of datasets; write it there, as in {example}"
    if key in MEANT:
        meant, sentence = MEANT[key]
        return meant or key, sentence
    hints_on_key = (hints.explain_key(key) for hints in _hints)
    hint = next((hint for hint in hints_on_key if hint is not None), None)
    if hint is not None and key not in ACCELERATE_KEYS:
        return hint
    plain = key.removeprefix("parallelism_config_")
    if plain in IN_RECIPE:
        return IN_RECIPE[plain], f"no such key; here it is {IN_RECIPE[plain]}"
    if key in IN_ACCELERATE_FILE:
        return key, f"no such key; write {IN_ACCELERATE_FILE[key]} in a copy of the Accelerate file"
    if key in ACCELERATE_KEYS or key.startswith(("fsdp_", "parallelism_config_")):
        return (
            key,
            (
                "Accelerate's key; it belongs in the Accelerate file that accelerate_config or "
                "--config names"
            ),
        )
    return None


def _list_sources(value: str | dict[str, Any], known: Collection[str]) -> list[str]:
    """Writes the sources that a value in place of a list seems to hold: one, or one for each name.

    `known`: the keys of a source.

    >>> _list_sources("some/data", ["path"]), _list_sources({"path": "a"}, ["path"])
    (['{path: some/data}'], ['{"path": "a"}'])
    >>> _list_sources({"math": "a", "code": {"path": "b"}}, ["path"])
    ['{path: a}', '{"path": "b"}']
    """
    if isinstance(value, str):
        return [f"{{path: {value}}}"]
    if value.keys() & set(known):
        return [json.dumps(value, default=str)]
    return [
        f"{{path: {source}}}" if isinstance(source, str) else json.dumps(source, default=str)
        for source in value.values()
    ]


def explain_value(key: str, value: object) -> str | None:
    """Returns a sentence on a value that `key` does not accept, but that users often write.

    It says what to write, or why the value is refused. Returns None for any other value.

    >>> explain_value("optim", "paged_adamw_8bit")
    "paged_adamw_8bit: another tool's name; here it is adamw_8bit"
    """
    if key == "warmup_steps" and isinstance(value, float) and 0 < value < 1:
        return (
            f"{value:g}: a number of steps is expected; a share of them is warmup_ratio: {value:g}"
        )
    if key == "resume_from_checkpoint" and value is False:
        return "false: write none to start over, or auto to resume where there is a checkpoint"
    if key == "temperature" and value == 0:
        return "0: the likeliest token alone gives nothing to compare; set 1, or less, such as 0.5"
    if key in NESTED and isinstance(value, str | dict):
        sources = _list_sources(value, [each.name for each in fields(NESTED[key])])
        return f"a list of sources is expected; write [{', '.join(sources)}]"
    if key == "max_grad_norm" and isinstance(value, int | float) and value <= 0:
        return f"{value:g}: write null, and gradients are not clipped"
    if not isinstance(value, str):
        return None
    if key == "loss_type":
        known = (
            f"{', '.join(facts.losses)} for method: {name}"
            for name, facts in METHODS.items()
            if facts.losses
        )
        return f"{value}: no such loss; there are {'; '.join(known)}"
    replacement = OTHER_VALUES.get(key, {}).get(value)
    if replacement is not None:
        return f"{value}: another tool's name; here it is {replacement}"
    reason = REFUSED_VALUES.get(key, {}).get(value)
    return None if reason is None else f"{value}: {reason}"
