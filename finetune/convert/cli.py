"""`finetune convert THEIR.yaml`: reads another tool's file, writes ours."""

import argparse
import difflib
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from finetune.convert.converted import Converted, shown
from finetune.convert.tool_keys import add_sources
from finetune.convert.values import DEFAULT_SHARDING, LEAVE, carried
from finetune.durable import replace_file
from finetune.errors import UserError
from finetune.recipe.hints import QUANTIZED, TOOLS, Counterpart, Tool
from finetune.recipe.keys import NESTED, keys_of, recipe_keys
from finetune.recipe.reader import read_recipe
from finetune.recipe.schema import DatasetSource
from finetune.recipe.yaml_file import read_entries


def convert_command(arguments: argparse.Namespace) -> int:
    """Writes or prints the recipe; what has no counterpart is listed in it and on stderr."""
    source = Path(arguments.source)
    tool, found = convert(source)
    text = as_text(source, tool, found)
    if arguments.output:
        _write(Path(arguments.output), text, arguments.overwrite)
    else:
        print(text, end="")
    for line in [*found.remarks, *found.without, *(f"to mend: {problem}" for problem in problems_of(text, source))]:
        print(line, file=sys.stderr)
    return 0


def convert(source: Path) -> tuple[Tool, Converted]:
    """The tool that `source` was written for, and our recipe from it. Raises `UserError` where it is no such file."""
    _, problems = read_entries(source)  # what is wrong with it as YAML, and where
    if problems:
        raise UserError.of(problems)
    theirs = yaml.safe_load(source.read_text(encoding="utf-8"))
    if isinstance(theirs, dict) and is_ours(theirs, source):
        raise UserError(
            f"{source}: a recipe of this toolkit already: there is nothing to convert, train with it as it is"
        )
    tool = tool_of(theirs) if isinstance(theirs, dict) else None
    if tool is None:
        raise UserError(
            f"{source}: not recognized as a file of {', '.join(TOOLS)}; it names no model and no data of theirs"
        )
    found = Converted()
    known = {pair.theirs: pair for pair in TOOLS[tool]}
    for key, value in _keys(theirs, known):
        _carry(key, value, known, found)
    add_sources(tool, theirs, source, found)
    return tool, found


def _write(path: Path, text: str, overwrite: bool) -> None:
    if path.is_file() and not overwrite:
        raise UserError(f"{path}: exists; name another file, or replace it with --overwrite")
    try:
        replace_file(path, text)
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror}); name another file") from None


def is_ours(theirs: Mapping[str, Any], source: Path) -> bool:
    """Whether the file is a recipe of ours: all its keys are, and one that no other tool has is among them, or it reads as such."""
    mixtures = [theirs.get(key) for key in NESTED if key in theirs]
    entries = [entry for mixture in mixtures if isinstance(mixture, list) for entry in mixture]
    named = {key for entry in entries if isinstance(entry, dict) for key in entry}
    own = keys_of(DatasetSource).keys()
    if "datasets" not in theirs or not (theirs.keys() <= recipe_keys().keys() and named <= own):
        return False
    return bool(named & (own - {"path", "name", "split"})) or not _complaints(source)


def _complaints(recipe: Path) -> list[str]:
    try:
        read_recipe(str(recipe))
    except UserError as error:
        return str(error).splitlines()
    return []


def tool_of(theirs: Mapping[str, Any]) -> Tool | None:
    """Whose file it is, by the keys that only one of them has."""
    if "base_model" in theirs or {"sequence_len", "micro_batch_size"} & theirs.keys():
        return "Axolotl"
    if {"finetuning_type", "stage", "cutoff_len", "template"} & theirs.keys():
        return "LLaMA-Factory"
    if any(isinstance(value, dict) and "_component_" in value for value in theirs.values()):
        return "torchtune"
    return "TRL" if "model_name_or_path" in theirs else None


def as_text(source: Path, tool: Tool, found: Converted) -> str:
    """The recipe file, with what was not carried over as comments at its end."""
    text = f"# From {source.name} ({tool}) by finetune convert.\n"
    text += yaml.safe_dump(found.recipe, sort_keys=False, allow_unicode=True)
    for title, lines in (("Worth a look", found.remarks), ("No counterpart here", found.without)):
        if lines:
            text += f"\n# {title}:\n" + "".join(f"#   {line}\n" for line in lines)
    return text


def problems_of(text: str, source: Path) -> list[str]:
    """What our reader says of the converted recipe, such as a model or data that it does not name yet."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{source.stem}.yaml"
        path.write_text(text, encoding="utf-8")
        return [line.replace(str(path), "the recipe") for line in _complaints(path)]


def _keys(theirs: Mapping[str, Any], known: Mapping[str, Counterpart], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Their keys with values; a nested mapping is walked where the table names keys inside it."""
    for key, value in theirs.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and any(other.startswith(f"{name}.") for other in known):
            if name in known and known[name].carry == "data":
                yield name, value
            yield from _keys(value, known, f"{name}.")
        else:
            yield name, value


def _meant(key: str, known: Mapping[str, Counterpart]) -> str:
    """A question where `key` is close to one of theirs, or of ours."""
    close = difflib.get_close_matches(key, [*known, *recipe_keys()], n=1, cutoff=0.75)
    return f"; did you mean {close[0]}?" if close else ""


def _carry(key: str, value: Any, known: Mapping[str, Counterpart], found: Converted) -> None:
    """One of their keys into `found`; `known` are those that there is something to say about."""
    ours, pair = recipe_keys(), known.get(key)
    if pair is None and key in ours and key not in NESTED:
        pair = Counterpart(key, key)
    if pair is None:
        if not key.startswith("dataset."):  # torchtune's, an entry's key
            found.without.append(f"{key}: {shown(value)}   (not known here{_meant(key, known)})")
    elif pair.ours is None:
        if key == "quantization_bit" and value:  # LLaMA-Factory's LoRA, which is its default, is the only one with it
            found.recipe.setdefault("use_peft", True)
        if value not in (None, False, ""):  # what is switched off there needs no counterpart
            note = QUANTIZED if "qlora_" in str(value) else pair.note  # torchtune's builders have it in their name
            found.without.append(f"{key}: {shown(value)}   ({note})")
    elif pair.carry != "data" and value is not None:
        ours_value = carried(pair, value)
        if ours_value is None:
            found.without.append(f"{key}: {shown(value)}   ({pair.note or 'no such value here'})")
        elif ours_value is not LEAVE and (ours_value != DEFAULT_SHARDING or pair.ours not in found.recipe):
            found.recipe[pair.ours] = ours_value
            found.recipe |= {"use_peft": True} if pair.carry == "lora-only" else {}
            if pair.inexact or value == "qlora":
                found.remarks.append(f"{key}: {shown(value)}   ({pair.note})")
