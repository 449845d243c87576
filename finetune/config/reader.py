"""Recipe files, read strictly: every mistake is reported at once, with its line and what was
probably meant.
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

import yaml
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
)
from finetune.constants import Names
from finetune.errors import UserError, name_page
from finetune.files.durable import replace_file
from finetune.files.json_files import parse_json


def read_overrides(arguments: Sequence[str], options: Collection[str] = ()) -> list[str]:
    """Returns overrides as `key=value` texts, in whichever way they were written.

    Raises `UserError` for a key that is none, but close to one of the command's own `options`
    (num_processes, ...).

    >>> read_overrides(
    ...     ["max_steps=3", "--learning_rate", "1e-5", "--seed=7", "--packing", "--use-peft"]
    ... )
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


def read_override(text: str, place: str) -> tuple[Entry | None, list[str]]:
    """Returns the entry that a `key=value` text stands for, and what is wrong with it."""
    key, equals, value = text.removeprefix("--").partition("=")
    if not equals:
        return None, [
            f"{place}: {text}: an override is written key=value; --recipe names a recipe, "
            "--config an Accelerate config"
        ]
    return read_value(value, key, place, NESTED)


def _refuse_misspelled_option(name: str, key: str, options: Collection[str]) -> None:
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
    """Hints about other tools' keys: a module, of a room above this one, with these functions."""

    def find_writer(self, file: Mapping[str, Any], /) -> str | None:
        """Returns the tool that a file was written for; None where it may be a recipe."""

    def explain_key(self, key: str, /) -> tuple[str, str] | None:
        """Explains another tool's key: (our key, a sentence without the key); None where it is
        nobody's.
        """


_hints: list[Hints] = []


def add_hints(hints: Hints) -> None:
    """Adds to every later error of the reader what `hints` knows.

    Call it where a process begins.
    """
    if hints not in _hints:
        _hints.append(hints)


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
NOT_FINITE = ("nan", "inf", "infinity")  # text in YAML, which writes .nan and .inf
YES = {"true", "yes", "on"}
NO = {"false", "no", "off"}  # without quotes, and not text, in YAML
FOLDER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")  # of an adapter


def what_is_wrong(error: ValidationError, value: Any, also: Any = None) -> str:
    """Says in a sentence why a key does not take a value.

    `also`: a value outside its bounds that it takes.

    >>> from pydantic import TypeAdapter
    >>> try: TypeAdapter(int | None).validate_python("8", strict=True)
    ... except ValidationError as error: what_is_wrong(error, "8")
    '"8" does not fit; a whole number is expected; in quotes it is text: write 8'
    """
    details: list[Any] = error.errors(include_url=False)
    takes_number = any(detail["type"] in ("int_type", "float_type") for detail in details)
    if takes_number and isinstance(value, str) and value.lower().lstrip("+-") in NOT_FINITE:
        return f"{value} does not fit; a finite number is expected"
    expected = " or ".join(
        dict.fromkeys(_expected(detail["type"], detail.get("ctx", {})) for detail in details)
    )
    if also is not None and any(
        detail["type"].startswith(("greater_than", "less_than")) for detail in details
    ):
        expected += f", or {_shown(also)},"
    return f"{_shown(value)} does not fit; {expected} is expected{_hint(details, value)}"


def _expected(kind: str, context: Mapping[str, Any]) -> str:
    if kind == "literal_error":
        return f"one of {str(context['expected']).replace(chr(39), '').replace(' or ', ', ')}"
    if kind == "string_pattern_mismatch":
        return "a slice such as ::4" if ":" in context["pattern"] else "a file's name"
    if kind in EXPECTED:
        return EXPECTED[kind].format(**context)
    return kind.replace("_", " ")


def _hint(details: Any, value: Any) -> str:
    """What to write instead of a value that does not fit, after a semicolon; empty if unknown.

    Args:
        details: Of pydantic's error.
        value: As it was written.
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
        stated = " ".join(detail.get("ctx", {}).get("expected", "") for detail in details)
        close = difflib.get_close_matches(value.lower(), re.findall("'([^']*)'", stated), n=1)
        if close:
            return f"; did you mean {close[0]}?"
    if "tuple_type" in kinds:
        return f"; write [{', '.join(part.strip() for part in value.split(','))}]"
    return ""


def _is_quoted_number(value: str) -> bool:
    try:
        return isinstance(parse_json(value.lower()), int | float)
    except ValueError:
        return False


def _shown(value: Any) -> str:
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) < 80 else f"{text[:77]}..."


def shipped_folder(name: str) -> Path:
    """Returns the folder `name` (`recipes` or `accelerate_configs`): the checkout's own, or the
    installed package's.
    """
    package = Path(__file__).resolve().parents[1]
    installed = package / name
    return installed if installed.is_dir() else package.parent / name


RECIPES = shipped_folder("recipes")
# What makes a text a local path rather than a hub name, so that a missing file is reported before
# anything is loaded.
LOCAL_STARTS = ("/", "./", "../", "~")
LOCAL_ENDS = (".json", ".jsonl", ".csv", ".parquet", ".arrow", ".txt", ".gz", ".jinja")


@dataclass(frozen=True, slots=True)
class _Checked:
    """Values that fit the schema; the keys that were meant but did not; and what is wrong, one
    sentence each.
    """

    values: dict[str, Any] = field(default_factory=dict)
    unusable: set[str] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)


def find_file(name: str, folder: Path, what: str) -> Path:
    """Returns the file that `name` means: a path, or a name (with or without .yaml) in `folder`."""
    article = "an" if what[0] in "AEIOU" else "a"
    if not name:
        raise UserError(
            f"the name of {article} {what} is empty; give a path, or a name of those in {folder}"
        )
    is_within = folder.is_relative_to(Path.cwd())
    shown = folder.relative_to(Path.cwd()) if is_within else folder
    for candidate in (Path(name), Path(f"{name}.yaml"), shown / name, shown / f"{name}.yaml"):
        if candidate.is_file():
            return candidate
    if Path(name).is_dir():
        of_run = Path(name) / "recipe.yaml"
        if of_run.is_file() and folder == RECIPES:
            hint = f"did you mean {of_run}?"
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
    """Returns the recipe; of a file or a name in recipes/, the recipe that it holds.

    Raises:
        UserError: For anything else, for what is wrong with the file, and for one of several
            adapters where there may be one alone.
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
    """Reads the recipe file `name` (a path, or a name in recipes/) with `key=value` overrides laid
    over it.

    Without a name it reads the overrides alone. `needs_data`: whether they must name `datasets`.
    `place`: where the overrides stand, for errors.

    Raises `UserError` naming every mistake in the file and the overrides, one a line.
    """
    path = Path(place) if name is None else find_file(name, RECIPES, "recipe")
    try:
        entries, problems = ([], []) if name is None else read_entries(path, NESTED)
    except UserError:
        _refuse_another_tools_file(path)
        raise
    in_file = {entry.key: entry for entry in entries}
    if in_file.keys() & ACCELERATE_KEYS and not in_file.keys() & recipe_keys().keys():
        raise UserError(
            f"{path}: this is an Accelerate config; pass it as --config, and a recipe as --recipe"
        )
    for text in overrides:
        entry, unreadable = read_override(text, place)
        problems += unreadable
        if entry is not None:
            in_file[entry.key] = entry
    checked = _check(in_file.values(), recipe_keys(), path.resolve().parent)
    method = checked.values.get("method", DEFAULT_METHOD)
    checked.values.update(
        {key: value for key, value in METHODS[method].defaults.items() if key not in in_file}
    )
    _add_prompts(checked, in_file)
    sections = {}
    for section, schema in SECTIONS.items():
        given = {
            key: checked.values[key] for key in keys_of(schema, section) if key in checked.values
        }
        sections[section] = schema(**given)
    recipe = Recipe(
        path=str(path), places={key: entry.where for key, entry in in_file.items()}, **sections
    )
    if not needs_data and not checked.values.get("datasets"):
        checked.unusable.add("datasets")
    if problems := [*problems, *checked.problems, *_judge(recipe, checked.unusable)]:
        if name is not None:
            _refuse_another_tools_file(path)
        raise UserError.of(problems)
    return recipe


def _judge(recipe: Recipe, unusable: Collection[str]) -> list[str]:
    """Lists what is wrong with a recipe, or with what each of `adapters` makes of it."""
    problems = []
    for each, own in _with_adapters(recipe):
        problems += own
        problems += map(str, find_recipe_problems(each, unusable))
    return list(dict.fromkeys(problems))


def split_adapters(recipe: Recipe) -> tuple[Recipe, ...]:
    """Returns a recipe for each of `adapters`, which rules judge and whose `alone` is trained; the
    recipe itself without any.

    Raises:
        UserError: For what is wrong with an entry.
    """
    each = _with_adapters(recipe)
    if problems := [problem for _, own in each for problem in own]:
        raise UserError.of(problems)
    return tuple(own for own, _ in each)


def _with_adapters(recipe: Recipe) -> list[tuple[Recipe, list[str]]]:
    """Returns the recipe with the keys of each of `adapters` laid over it, and what is wrong with
    them.
    """
    adapters = recipe.lora.adapters
    if not adapters:
        return [(recipe, [])]
    place = f"{recipe.place_of('adapters')}: adapters"
    names = [str(own.get("name", "")) for own in adapters]
    unfit = [name for name in names if not FOLDER_NAME.fullmatch(name) or names.count(name) > 1]
    if unfit:
        return [
            (
                recipe,
                [
                    f"{place}: name: {json.dumps(unfit[0])} does not fit; each adapter needs a "
                    "name of its own of letters, digits, - and _, which is that of its folder"
                ],
            )
        ]
    return [_with_adapter(recipe, own, f"{place}: {own['name']}") for own in adapters]


def _with_adapter(recipe: Recipe, own: Mapping[str, Any], place: str) -> tuple[Recipe, list[str]]:
    """Returns the recipe with the keys of one of `adapters` laid over it, and what is wrong with
    them.
    """
    problems = []
    entries = []
    for key, value in own.items():
        if key in recipe_keys().keys() - adapter_keys().keys():
            problems.append(
                f"{place}: {key}: is the same for all adapters, which share a base and its "
                "batches; write it once in the recipe"
            )
        elif key != "name":
            entry, unreadable = read_value(json.dumps(value, default=str), key, place, NESTED)
            problems += unreadable
            entries.append(entry)
    checked = _check(entries, recipe_keys(), Path(recipe.path).resolve().parent)
    values = {
        **checked.values,
        "output_dir": str(recipe.folder / own["name"]),
        "run_name": f"{recipe.name}-{own['name']}",
    }
    sections = {}
    for section, schema in SECTIONS.items():
        given = {key: values[key] for key in keys_of(schema, section) if key in values}
        sections[section] = replace(getattr(recipe, section), **given)
    places = {**recipe.places, **{entry.key: entry.where for entry in entries}}
    return replace(recipe, places=places, **sections), problems + checked.problems


def _add_prompts(checked: _Checked, given: Mapping[str, Entry]) -> None:
    """Adds the data of a recipe that names none, where an environment asks itself: empty
    prompts.
    """
    if not checked.values.get("environment") or "datasets" in given:
        return
    count = checked.values.get("global_batch_size") or EMPTY_PROMPTS
    checked.values["datasets"] = (DatasetSource(path=write_prompts(count)),)
    if not checked.values.get("max_steps"):
        where = given["environment"].where
        checked.problems.append(
            f"{where}: environment: without datasets nothing says how long to train; set max_steps"
        )


def _refuse_another_tools_file(path: Path) -> None:
    """Raises `UserError` if the file was written for another tool: a sentence instead of one for
    each of its keys.
    """
    file = find_yaml(path, is_foreign=True)
    tool = next(filter(None, (hints.find_writer(file) for hints in _hints)), None)
    if tool is not None:
        article = "an" if tool[0] in "AEIOU" else "a"
        raise UserError(
            f"{path}: is {article} {tool} file, not a recipe; write one from it with `finetune "
            f"convert {shlex.quote(str(path))} --output my_recipe.yaml`"
        )


def _model_folder(name: str) -> str:
    """Returns `name`, or the model/ in it where `name` is a checkpoint of a run (step-00000100)."""
    model = Path(name) / "model"
    is_checkpoint = (Path(name) / "manifest.json").is_file() and (model / "config.json").is_file()
    return str(model) if is_checkpoint else name


def to_dict(recipe: Recipe) -> dict[str, Any]:
    """Returns the recipe as a flat mapping with every key filled in: what recipe.yaml of a run
    holds.
    """
    flat: dict[str, Any] = {}
    for section in SECTIONS:
        flat |= asdict(getattr(recipe, section))
    plain: dict[str, Any] = json.loads(json.dumps(flat))  # tuples become lists
    return plain


def write_recipe(recipe: Recipe, path: Path) -> None:
    """Writes a recipe file that reads back as the same recipe."""
    replace_file(path, yaml.safe_dump(to_dict(recipe), sort_keys=False, allow_unicode=True))


def _check(entries: Iterable[Entry], known: Mapping[str, Key], folder: Path) -> _Checked:
    """Returns the entries' values in the types of the schema, and what is wrong with them."""
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
            problems = _check_value(entry, key, folder, checked.values)
        if problems or not readable:
            checked.unusable.add(entry.key)
            checked.problems.extend(problems)
    return checked


EMPTY_PROMPTS = 1024  # where the batch size is not known yet
OF_VERIFIERS = (
    "the package verifiers plays its episodes by agent programs that ask a server for text, so "
    "that what was sampled would be encoded again; write a class with reset, tools and "
    "get_reward, around its task"
)


class _Unfit(ValueError):
    """A value that its key cannot take; the message is the sentence after the key's name."""


def _check_value(entry: Entry, key: Key, folder: Path, values: dict[str, Any]) -> list[str]:
    """Puts the entry's value into `values`, or returns what is wrong with it."""
    value = tuple(entry.value) if isinstance(entry.value, list) else entry.value
    if entry.key in NESTED and isinstance(value, tuple):
        value, problems = _check_sources(value, NESTED[entry.key], entry, folder)
        if problems:
            return problems
    try:
        values[entry.key] = _read_as(value, entry, key, folder)
    except _Unfit as error:
        return [f"{entry.where}: {entry.key}: {error}"]
    return []


def _read_as(value: Any, entry: Entry, key: Key, folder: Path) -> Any:
    """Returns the value in the type of the key.

    Raises `_Unfit` where it does not fit, or names what is not there.
    """
    if _holds_nul(value):
        raise _Unfit("holds a NUL character, which no text and no name has; remove it")
    also = key.read_as.written if key.read_as is not None else None
    if key.read_as is not None and value == also and type(value) is type(also):
        value = key.read_as.meant
    if key.is_rewards and isinstance(value, tuple):
        value = tuple(map(_write_reward, value))
    try:
        value = _type_of(entry.key, key.section).validate_python(value, strict=True)
    except ValidationError as error:
        explained = explain_value(entry.key, value)
        raise _Unfit(explained or what_is_wrong(error, entry.value, also)) from None
    if key.is_patterns:
        for problem in filter(None, map(find_problem, value or ())):
            raise _Unfit(problem)
    return _locate(value, key, folder)


def _holds_nul(value: Any) -> bool:
    """Whether a NUL character stands anywhere in a value."""
    if isinstance(value, Mapping):
        return any(_holds_nul(part) for pair in value.items() for part in pair)
    if isinstance(value, list | tuple):
        return any(map(_holds_nul, value))
    return isinstance(value, str) and "\0" in value


def _locate(value: Any, key: Key, folder: Path) -> Any:
    """Finds the files that a key's value names, from here or the recipe's folder.

    Raises `_Unfit` where one is not there.
    """
    if value is None:
        return None
    if key.is_rewards:
        return tuple(_locate_reward(name, folder) for name in value)
    if key.is_python_name:
        served = SERVED_ENVIRONMENTS if key.name == "environment" else ()
        return _locate_functions(value, folder, served)
    if key.is_file_or_name and isinstance(value, str):
        return _locate_file(value, folder)
    return value


def _locate_functions(
    value: str | Sequence[str] | Mapping[str, str], folder: Path, served: Names
) -> str | Names | dict[str, str]:
    """Returns the names of functions with their files found, from here or the recipe's folder.

    Names that begin with one of `served` stay as they are.
    """

    def find(name: str) -> str:
        if served and name.startswith("verifiers:"):
            raise _Unfit(f"{name}: {OF_VERIFIERS}")
        return name if name.startswith(served) else locate(name, folder)

    try:
        if isinstance(value, str):
            return find(value)
        if isinstance(value, Mapping):
            return {key: find(name) for key, name in value.items()}
        return tuple(map(find, value))
    except ValueError as error:
        raise _Unfit(str(error)) from None


def _write_reward(value: Any) -> Any:
    """Returns an entry of `rewards` as a recipe holds it: a judge's mapping becomes text."""
    try:
        if isinstance(value, str) and is_judge(value):
            value = parse_json(value)
        return write_judge(value) if isinstance(value, dict) else value
    except ValueError as error:
        raise _Unfit(str(error)) from None


def _locate_reward(value: str, folder: Path) -> str:
    """Returns an entry of `rewards` with its file found.

    The entry is a judge, a function that ships or is in a file, or the folder or name of a model.
    """
    if is_judge(value):
        return value
    is_folder = any(path.is_dir() for path in (Path(value).expanduser(), folder / value))
    if value not in SHIPPED_REWARDS and ".py" not in value and ("/" in value or is_folder):
        return _locate_file(value, folder)
    try:
        return locate(value, folder, SHIPPED_REWARDS)
    except ValueError as error:
        raise _Unfit(str(error)) from None


def _locate_file(value: str, folder: Path) -> str:
    """Returns a path that exists, or a hub name; Jinja text and an address stay as they are."""
    if any(mark in value for mark in ("\n", "://", "{{", "{%")):
        return value
    try:
        path = _located(value, folder)
    except OSError as error:  # a folder on the way is closed to us, say
        raise _Unfit(f"{value}: cannot be read: {error.strerror or error}") from None
    if path is None:
        raise _Unfit(f"{value}: no such file or folder, here or in the recipe's folder")
    return path


def _check_sources(
    items: tuple[Any, ...], schema: type, entry: Entry, folder: Path
) -> tuple[tuple[Any, ...], list[str]]:
    """Returns (the items of a list of sources as `schema`, what is wrong with the others)."""
    sources = []
    problems = []
    for item in items:
        if not (isinstance(item, list) and all(isinstance(e, Entry) for e in item)):
            problems.append(
                f"{entry.where}: {entry.key}: each entry is a mapping with at least a path, such "
                "as `- path: data.jsonl`"
            )
            continue
        checked = _check(item, keys_of(schema), folder)
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
def _type_of(key: str, section: str) -> TypeAdapter[Any]:
    """Returns the type of a key of a section of the recipe, or without one of `datasets`."""
    if section:
        known = keys_of(SECTIONS[section], section)
    else:
        known = keys_of(DatasetSource)
    return TypeAdapter(known[key].annotation, config=ConfigDict(allow_inf_nan=False))


def _located(value: str, folder: Path) -> str | None:
    """Returns a local path that exists, from here or the recipe's folder; a possible hub name as it
    is; else None.
    """
    here = Path(value).expanduser()
    for candidate in (here, folder / value):
        if candidate.exists() or (any(letter in value for letter in "*?[") and _matches(candidate)):
            return _model_folder(str(candidate))
    if value.startswith(LOCAL_STARTS) or value.endswith(LOCAL_ENDS):
        return None
    return value


def _matches(pattern: Path) -> bool:
    """Whether a glob matches a file or folder."""
    anchor = Path(pattern.anchor) if pattern.is_absolute() else Path()
    return any(anchor.glob(str(pattern.relative_to(anchor))))


def explain_unknown(key: str, known: Mapping[str, Key]) -> tuple[str, str]:
    """Explains a key that is unknown where it stands.

    Args:
        key: As it was written.
        known: The keys at that place: the recipe's, or those of an entry of `datasets`.

    Returns:
        The key that was probably meant, else `key`; and a sentence for the user.
    """
    is_at_top = "path" not in known
    explained = _explain_at_top(key) if is_at_top else None
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


def _explain_at_top(key: str) -> tuple[str, str] | None:
    """Explains a name that is known, though it is no key of a recipe."""
    if key in {field.name for field in fields(DatasetSource)}:
        example = f"datasets=[{{path: ..., {key}: ...}}]"
        return key, f"a key of each entry of datasets; write it there, as in {example}"
    if key in MEANT:
        ours, sentence = MEANT[key]
        return ours or key, sentence
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


def explain_value(key: str, value: object) -> str | None:
    """Returns a sentence on another tool's value of a key that is the same here; None where it is
    not known.

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
        if isinstance(value, str):
            source = f"{{path: {value}}}"
        else:
            source = json.dumps(value, default=str)
        return f"a list of sources is expected; write [{source}]"
    if not isinstance(value, str):
        return None
    if key == "loss_type":
        known = (
            f"{', '.join(facts.losses)} for method: {name}"
            for name, facts in METHODS.items()
            if facts.losses
        )
        return f"{value}: no such loss; there are {'; '.join(known)}"
    ours = OTHER_VALUES.get(key, {}).get(value)
    refused = REFUSED_VALUES.get(key, {}).get(value)
    if ours is not None:
        return f"{value}: another tool's name; here it is {ours}"
    return None if refused is None else f"{value}: {refused}"
