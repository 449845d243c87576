"""Finds the models and reads the prompts that chat, evaluate and serve-check get as arguments.

Imports no torch.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from finetune.checkpoint.manifest import MANIFEST, NAME, find_checkpoint_of
from finetune.config.export_formats import find_format_of
from finetune.config.methods import facts_of
from finetune.config.quantization import read_recipe_quantization
from finetune.config.schema import DatasetSource, Quantization
from finetune.config.yaml_file import find_yaml
from finetune.constants import ADAPTER, ADAPTER_CONFIG, CONFIG_FILE, EXPORT
from finetune.data.formats import (
    CONVERSATION_COLUMNS,
    QUESTION_COLUMNS,
    Columns,
    Conversation,
    Row,
    make_conversation,
    take_question,
)
from finetune.data.hosted_rows import rewrite_row
from finetune.data.images import open_image, read_image
from finetune.data.messages import IMAGE, BadRow, Message, list_columns, parse_turns
from finetune.data.sources import read_file
from finetune.errors import UserError
from finetune.export.sentence_transformer import MODULES
from finetune.files.durable import restore_exports, restore_folder
from finetune.files.json_files import read_json_object
from finetune.files.network import DESCRIPTIONS, download_file, download_folder
from finetune.files.run_files import refuse_several_runs

Kind = Literal["model", "adapter", "checkpoint"]
KINDS: dict[str, Kind] = {ADAPTER_CONFIG: "adapter", CONFIG_FILE: "model"}  # by a folder's file
RUN_FILES = ("recipe.yaml", "metrics.jsonl", "checkpoints")  # any of them makes a folder a run's


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLocation:
    """The place of a model, of the run that made it, and of its base. Returned by `find_model`."""

    name: str  # a folder or a hub name
    kind: Kind  # "model": a Hugging Face folder or hub name; "adapter": a PEFT folder
    revision: str | None = None  # on the hub
    run: Path | None = None  # the run's folder; None: the model is in no run's folder
    base: str | None = None  # the folder or hub name of the model from which it was trained
    base_revision: str | None = None
    notices: tuple[str, ...] = ()  # remarks for the user about which model was chosen


def find_model(name: str, revision: str | None = None) -> ModelLocation:
    """Finds the model that `name` stands for.

    A run's folder stands for the exported adapter, or the exported model, or the newest checkpoint:
    the first of them that exists.

    Args:
        name: A folder or a hub name.
        revision: The revision on the hub.

    Raises:
        UserError: There is no model at `name`.
    """
    path = Path(name)
    # `path` may be a run, or an export
    restore_exports(path)
    restore_folder(path)
    if path.is_file():
        if file_format := find_format_of(path):
            is_adapter = False
            programs = " or ".join(file_format.use(path, is_adapter))
            raise UserError(
                f"{name}: a {file_format.title} file; chat with it in {programs}, or name the "
                "folder it was made from"
            )
        raise UserError(f"{name}: a file; give the folder that holds it")
    if not path.exists():
        if name.count("/") == 1 and not name.startswith((".", "/", "~", "runs/")):
            return _find_on_hub(name, revision)
        raise UserError(
            f"{name}: no such folder; give a run's folder, a checkpoint, a model's folder, or a "
            "hub name"
        )
    if find_checkpoint_of(path) is not None:
        return _describe(path, "checkpoint", _find_run(path))
    kind = next((kind for file, kind in KINDS.items() if (path / file).is_file()), None)
    if kind is not None:
        return _describe(path, kind, _find_run(path))
    if any((path / file).exists() for file in RUN_FILES):
        return _find_model_of_run(path)
    refuse_several_runs(path)
    # It may be the checkpoint of another tool: loading opens it, or says what it is.
    return _describe(path, "checkpoint", None)


def _find_on_hub(name: str, revision: str | None) -> ModelLocation:
    """Finds the adapter or the model of this name on the hub, or in the cache.

    An adapter is downloaded. Raises `UserError` if there is neither.
    """
    try:
        download_file(name, ADAPTER_CONFIG, revision)
    except UserError:
        download_file(name, CONFIG_FILE, revision)
        return ModelLocation(name=name, kind="model", revision=revision)
    folder = download_folder(name, [*DESCRIPTIONS, "adapter_*"], "its adapter", revision)
    return _describe(folder, "adapter", None)


def locate_base(model: ModelLocation) -> ModelLocation:
    """Locates the model that `model` was trained from.

    Raises `UserError` if it was trained from random weights, or if the base is not known.
    """
    if model.base is not None:
        return replace(find_model(model.base, model.base_revision), revision=model.base_revision)
    if model.run is not None and _read_recipe(model.run).get("model_config"):
        raise UserError(
            f"{model.name}: was trained from random weights, so there is no base model; name "
            "another with --compare-with"
        )
    raise UserError(
        f"{model.name}: does not say which model it was trained from; name it with --compare-with"
    )


def refuse_other_use(model: ModelLocation) -> None:
    """Raises `UserError` for a model that writes no text: it embeds texts, or fills in masks."""
    method = facts_of(_read_recipe(model.run))
    if method.masks:
        raise UserError(
            f"{model.name}: fills in masked tokens, and writes none "
            "after another; sample from its export by a library for such models"
        )
    if (Path(model.name) / MODULES).is_file() or method.embeds:
        raise UserError(
            f"{model.name}: embeds texts and writes none; finetune chat --rank FILE ranks the "
            "lines of a file, and sentence-transformers opens its export"
        )


def trained_formats(run: Path | None) -> set[str]:
    """Returns the formats of the rows on which a run trained, from data_report.json.

    Empty if there is no run, or if the file does not say.
    """
    report = read_json_object(run / "data_report.json") if run is not None else {}
    return {name for source in report.get("sources", ()) for name in source.get("formats", ())}


def trained_quantization(run: Path | None) -> Quantization:
    """Returns how a run quantized the base in training, by the run's recipe."""
    return read_recipe_quantization(_read_recipe(run))


def _find_model_of_run(run: Path) -> ModelLocation:
    """Finds a run's exported adapter, or the exported model, or the newest checkpoint.

    Raises `UserError` if the run has none of them.
    """
    newest = _find_newest_checkpoint(run)
    for folder, (file, kind) in zip((run / ADAPTER, run / EXPORT), KINDS.items(), strict=True):
        if not (folder / file).is_file():
            continue
        export_time = (folder / file).stat().st_mtime
        notices: tuple[str, ...] = ()
        if newest is not None and (newest / MANIFEST).stat().st_mtime > export_time:
            notices = (f"{newest} is newer than {folder}; name it to use it",)
        return _describe(folder, kind, run, notices)
    if newest is None:
        raise UserError(
            f"{run}: has no export and no checkpoint yet; train on, or name another run"
        )
    notice = f"{run} has no export yet; this is its checkpoint {newest.name}"
    return _describe(newest, "checkpoint", run, (notice,))


def _find_newest_checkpoint(run: Path) -> Path | None:
    """Returns the folder of a run's checkpoint with the highest step; None if there is none."""
    checkpoints = {}  # step -> folder
    for manifest in run.glob(f"checkpoints/*/{MANIFEST}"):
        match = NAME.fullmatch(manifest.parent.name)
        if match is not None:
            checkpoints[int(match[1])] = manifest.parent
    return checkpoints[max(checkpoints)] if checkpoints else None


def _describe(
    path: Path, kind: Kind, run: Path | None, notices: tuple[str, ...] = ()
) -> ModelLocation:
    """Makes the location of a folder. The base is the one that the adapter or the recipe names.

    Args:
        path: The folder.
        kind: The kind of the model in it.
        run: The folder of the run that made it; None: none did.
        notices: Remarks for the user.
    """
    recipe = _read_recipe(run)
    adapter = read_json_object(path / ADAPTER_CONFIG)
    base = adapter.get("base_model_name_or_path") or recipe.get("model_name_or_path")
    revision = adapter.get("revision") or recipe.get("model_revision")
    return ModelLocation(
        name=str(path),
        kind=kind,
        run=run,
        base=base if isinstance(base, str) else None,
        base_revision=revision if isinstance(revision, str) else None,
        notices=notices,
    )


def _find_run(path: Path) -> Path | None:
    """Returns the folder of the run in which an export, adapter or checkpoint is; None: in none."""
    for parent in list(path.absolute().parents)[:3]:
        if (parent / "recipe.yaml").is_file():
            return parent
    return None


def _read_recipe(run: Path | None) -> dict[str, Any]:
    """Reads a run's recipe.yaml; returns {} if it is missing or unreadable, or without a run."""
    return find_yaml(run / "recipe.yaml") if run is not None else {}


PROMPT_COLUMNS = (*QUESTION_COLUMNS, "text")  # may hold a prompt as text


def make_prompt(prompt: str, system: str | None, images: Sequence[str] = ()) -> Conversation:
    """Makes a conversation of one question.

    Args:
        prompt: The user's message.
        system: The system message; None: there is none.
        images: The paths of images that the prompt is about.

    Raises:
        UserError: An image cannot be read.
    """
    return make_question([*system_message(system), user_message(prompt, images)])


def user_message(prompt: str, images: Sequence[str] = ()) -> Message:
    """Makes a user's message: the images, given by their paths, and then the text."""
    if not images:
        return {"role": "user", "content": prompt}
    parts = [{"type": "image", "path": path} for path in images]
    return {"role": "user", "content": [*parts, {"type": "text", "text": prompt}]}


def make_question(messages: Sequence[Message]) -> Conversation:
    """Makes a conversation of messages, the last of which is to be answered.

    messages: The content of each is a text, or a list of parts with images.

    Raises:
        UserError: An image cannot be read.
    """
    if all(isinstance(message["content"], str) for message in messages):
        return Conversation(tuple(messages), (False,) * len(messages))
    try:
        return _cut_before_answer({}, list(messages), None, Path())
    except BadRow as error:
        raise UserError(str(error)) from None


def system_message(system: str | None) -> list[Message]:
    """Makes a list with the system message; an empty one without it."""
    return [{"role": "system", "content": system}] if system else []


def check_utf8(text: str, where: str) -> str:
    """Returns `text` unchanged. Raises `UserError` if it came from bytes that are not UTF-8.

    Python stores such bytes of an argument, a line or a file as lone surrogates. `where` names the
    text in messages.

    >>> check_utf8("café", "--prompt")
    'café'
    """
    try:
        text.encode("utf-8", "surrogateescape").decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{where}: not UTF-8: {error.reason} at byte {error.start + 1}") from None
    return text


def read_piped_prompt() -> str:
    """Reads all of stdin as one prompt. Raises `UserError` if it is empty or not UTF-8."""
    text = ""
    try:
        if sys.stdin is not None:  # None: the process has no stdin
            text = check_utf8(sys.stdin.read().strip(), "stdin")
    except UnicodeDecodeError as error:
        raise UserError(f"stdin: not UTF-8: {error.reason} at byte {error.start + 1}") from None
    if not text:
        raise UserError(
            "stdin: empty, and no terminal to ask at; give a prompt with --prompt, --prompts or a "
            "pipe"
        )
    return text


def read_prompts(path: str, system: str | None) -> Iterator[Conversation]:
    """Reads the prompts of a file, one from each row, or from each line of a text file.

    Rows are those of JSON, CSV, Parquet or Arrow. The prompt of a row is its messages without the
    last answer, or a column for prompts.

    Args:
        path: The file.
        system: The system message of prompts without one; None: there is none.

    Raises:
        UserError: A row has no prompt.
    """
    for number, row in read_file(path):
        try:
            if isinstance(row, BadRow):
                raise row
            yield _read_row(row, system, Path(path).parent)
        except BadRow as error:
            raise UserError(f"{path}:{number}: {error}") from None


def _read_row(row: Row, system: str | None, folder: Path) -> Conversation:
    """Makes the prompt of a row. Raises `BadRow` if no column has one.

    The arguments are those of `_cut_before_answer`.
    """
    source = DatasetSource(path=str(folder))
    row = rewrite_row(row, source)
    for column in (*CONVERSATION_COLUMNS, "prompt"):
        turns = parse_turns(row.get(column))
        if isinstance(turns, list):
            return _cut_before_answer(row, turns, system, folder)
    if isinstance(row.get("instruction"), str):  # Alpaca
        return _cut_before_answer(row, take_question(Columns(row), source), system, folder)
    for column in PROMPT_COLUMNS:
        if isinstance(row.get(column), str) and row[column].strip():
            return _cut_before_answer(row, [user_message(row[column])], system, folder)
    raise BadRow(
        f"no prompt; its columns are {list_columns(row) or 'none'}, and one of messages, "
        f"{', '.join(PROMPT_COLUMNS)} is expected"
    )


def _cut_before_answer(
    row: Row, turns: list[Any], system: str | None, folder: Path
) -> Conversation:
    """Makes a conversation of the turns before the assistant's last answer, if there is one.

    Args:
        row: The row of the turns, which may have images and tools.
        turns: The turns, in any form that training reads.
        system: The system message of turns without one; None: there is none.
        folder: The folder to which paths of images are relative.

    Raises:
        BadRow: The turns or images cannot be read, or nothing is asked.
    """
    conversation = make_conversation(Columns(row), turns, needs_answer=False)
    messages = list(conversation.messages)
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if not messages:
        raise BadRow("messages: nothing is asked before the assistant's turn")
    if messages[0]["role"] != "system":
        messages = [*system_message(system), *messages]
    images: tuple[Any, ...] = ()
    if conversation.images:
        # the images of the answers that were cut off come last
        count = sum(message["content"].count(IMAGE) for message in messages)
        images = tuple(read_image(image, folder) for image in conversation.images[:count])
    for image in images:
        open_image(image)  # raises for a file that is no image, before the model is loaded
    return replace(
        conversation, messages=tuple(messages), trained=(False,) * len(messages), images=images
    )
