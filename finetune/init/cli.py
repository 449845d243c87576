"""`finetune init`: a first recipe from a model, data and GPUs, which the plan says fits."""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from finetune.durable import replace_file
from finetune.errors import UserError
from finetune.hub import download_file
from finetune.init.data_columns import DataSummary, list_unread_files, summarize_data
from finetune.init.new_recipe import (
    choose_max_length,
    compose_recipe,
    inspect_command,
    launch_command,
    plan_command,
)
from finetune.init.questions import ask, find_gpus, is_interactive, require
from finetune.init.sizing import Fit, Hardware, Keys, fit_recipe
from finetune.plan.architecture import find_config
from finetune.recipe.reader import read_recipe
from finetune.recipe.schema import DatasetSource, Model
from finetune.units import MIB, counted, gib, read_size

MANY_ROWS = 50_000  # one epoch of these is enough
SHOWN_FILES = 5
TEMPLATE_FILES = ("chat_template.jinja", "tokenizer_config.json")


def init_command(options: argparse.Namespace) -> int:
    """Asks for what the flags leave open, writes the recipe and prints the next commands. Returns 0."""
    if options.output is not None:
        _check_output(options.output, options.overwrite)
    model, config = require(options.model, "--model", "Model, a folder or a hub name", read=_read_model)
    data = require(
        options.data,
        "--data",
        "Data, a file, a folder or a hub name",
        read=lambda path: _read_data(path, options, model),
    )
    hardware = _find_hardware(options)
    output = require(
        options.output,
        "--output",
        "Recipe to write",
        "my_recipe.yaml",
        read=lambda output: _check_output(output, options.overwrite),
    )
    fit = fit_recipe(*_given_keys(model, config, data), hardware, options.method)
    text = compose_recipe(data, fit, hardware, output)
    _write(Path(output), text)
    for line in _summary(output, data, fit, hardware):
        print(line)
    return 0


def _read_model(name: str) -> tuple[str, dict[str, Any]]:
    """`name` with its config.json."""
    return name, find_config(Model(model_name_or_path=name))[0]


def _check_output(output: str, overwrite: bool) -> str:
    """`output`. Raises `UserError` where it is no recipe's name, or exists."""
    path = Path(output)
    if path.suffix not in (".yaml", ".yml"):
        raise UserError(f"{output}: a recipe's name ends in .yaml; write --output {path.with_suffix('.yaml')}")
    if path.exists() and not overwrite:
        raise UserError(f"{output}: exists; choose another --output, or replace it with --overwrite")
    return output


def _read_data(path: str, options: argparse.Namespace, model: str) -> DataSummary:
    source = DatasetSource(
        path=path,
        name=options.data_name,
        split=options.split,
        messages_column=options.messages_column,
        prompt_column=options.prompt_column,
        completion_column=options.completion_column,
        text_column=options.text_column,
    )
    found = summarize_data(source, model, has_template=has_chat_template(model), ask=ask if is_interactive() else None)
    rows = counted(found.rows, "row") if found.is_counted else f"more than {counted(found.rows, 'row')}"
    by = "" if found.is_tokenized else " (a guess from their characters)"
    print(f"data    {path}: {rows}, read as {found.format}, about {found.mean_tokens:,.0f} tokens each{by}")
    if unread := list_unread_files(source):
        more = f" and {len(unread) - SHOWN_FILES} more" if len(unread) > SHOWN_FILES else ""
        print(f"        not read: {', '.join(unread[:SHOWN_FILES])}{more}; name a file or a glob as --data to choose")
    return found


def has_chat_template(model: str) -> bool:
    """Whether the tokenizer of a folder or hub name has a chat template."""
    for name in TEMPLATE_FILES:
        try:
            path = Path(model) / name if Path(model).is_dir() else download_file(model, name)
            if path.is_file() and (path.suffix == ".jinja" or '"chat_template"' in path.read_text(encoding="utf-8")):
                return True
        except (UserError, OSError, UnicodeDecodeError):  # it has no such file, or none that can be read
            continue
    return False


def _find_hardware(options: argparse.Namespace) -> Hardware:
    found = find_gpus() if options.gpus is None or options.gpu_memory is None else None
    count = str(found.count if found else 0)
    gpus = require(options.gpus, "--gpus", "GPUs for the run (0: the CPU)", count, read=_read_count)
    if gpus == 0:
        return Hardware(0, f"{psutil.virtual_memory().total // MIB}MiB")
    default = found.memory if found else "80GiB"
    return Hardware(gpus, require(options.gpu_memory, "--gpu-memory", "Memory of each GPU", default, read=_read_memory))


def _read_memory(text: str) -> str:
    """`text` without spaces. Raises `UserError` where it is no size of a GPU."""
    try:
        if read_size(text) < 1 << 30:
            raise UserError(f"{text}: less than 1 GiB")
    except UserError as error:
        raise UserError(f"--gpu-memory: {error}") from None
    return text.replace(" ", "")


def _read_count(text: str) -> int:
    if not text.isdecimal() or int(text) > 100_000:
        raise UserError(f"--gpus: {text}: a number of GPUs is expected")
    return int(text)


def _given_keys(model: str, config: dict[str, Any], data: DataSummary) -> tuple[Keys, float]:
    """The keys that do not depend on the hardware, and the full rows that they make of the data."""
    positions = config.get("max_position_embeddings")
    max_length = choose_max_length(data, positions if isinstance(positions, int) else None)
    source = replace(data.source)
    entry = {key: getattr(source, key) for key in source.__slots__ if getattr(source, key) is not None}
    keys: Keys = {
        "model_name_or_path": model,
        "datasets": [entry],
        "max_length": max_length,
        "num_train_epochs": 1 if data.rows >= MANY_ROWS else 3,
    }
    if data.is_counted and data.rows >= 40:
        keys["eval_split_size"] = min(200, data.rows // 20)
    return keys, data.rows * data.mean_tokens / max_length


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, text)
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror}; choose another --output") from None
    read_recipe(str(path))  # what was written is a recipe


def _summary(output: str, data: DataSummary, fit: Fit, hardware: Hardware) -> list[str]:
    what = "adapters (LoRA)" if fit.method == "lora" else "all parameters"
    fits = f"fits {hardware.words}: {gib(fit.plan.peak_bytes)} of {gib(hardware.memory_bytes)} GiB by the plan"
    return [
        f"wrote   {output}: trains {what}; {fits}",
        *(f"        {text}   ({cost})" for text, cost in fit.changes),
        f"look    {inspect_command(output)}",
        f"plan    {plan_command(output, hardware)}",
        f"train   {launch_command(output, hardware)}",
    ]
