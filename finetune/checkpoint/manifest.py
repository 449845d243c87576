"""Reads, writes and verifies a checkpoint's manifest.json and state.json.

A checkpoint is a folder step-N. Its manifest has the step N, and lists every other file with size
and checksum. Its state.json has the run's progress.
"""

import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, Field, ValidationError

from finetune.errors import UserError
from finetune.files import durable
from finetune.files.json_files import parse_json, read_bounded

if TYPE_CHECKING:  # imports torch
    from finetune.data.batches import StepBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The progress of a run.

    A resumed run needs no more of the loop's state, because data order, learning rate and dropout
    are pure functions of `step`.
    """

    step: int = 0  # optimizer steps done
    epoch: float = 0.0
    tokens: int = 0  # read over all ranks, without padding
    trained_tokens: int = 0  # tokens with a label
    # steps without an update, because the loss or gradient was not finite; those that fp16's loss
    # scaler skips do not count
    skipped_steps: int = 0
    best_eval_loss: float | None = None  # the lowest held-out loss so far
    best_step: int | None = None  # the step of that loss
    evaluations_since_best: int = 0  # evaluations after that step
    # whether a signal has stopped the evaluation of this step, which the resumed run begins with
    owes_evaluation: bool = False
    scaler: dict[str, Any] | None = None  # the fp16 gradient scaler's state, in a checkpoint
    callbacks: dict[str, Any] | None = None  # callback's name -> its state, in a checkpoint

    def after_step(self, batch: "StepBatch", *, is_skipped: bool) -> "Progress":
        """Returns the progress after the step of `batch`. A script's own rows are of no epoch.

        `is_skipped`: whether the step made no update.
        """
        return replace(
            self,
            step=self.step + 1,
            epoch=self.epoch if batch.has_own_rows else batch.epoch,
            tokens=self.tokens + batch.tokens,
            trained_tokens=self.trained_tokens + batch.trained_tokens,
            skipped_steps=self.skipped_steps + is_skipped,
            owes_evaluation=False,
        )

    def after_evaluation(self, loss: float) -> "Progress":
        """Returns the progress after an evaluation with this held-out `loss`.

        A nan is never the lowest loss. The loss before the first step does not count, since no
        checkpoint has the model of step 0.

        >>> progress = Progress(step=5).after_evaluation(2.0).after_evaluation(3.0)
        >>> progress.best_eval_loss, progress.best_step, progress.evaluations_since_best
        (2.0, 5, 1)
        """
        if self.step == 0:
            return self
        best = math.inf if self.best_eval_loss is None else self.best_eval_loss
        if loss < best:
            return replace(self, best_eval_loss=loss, best_step=self.step, evaluations_since_best=0)
        return replace(self, evaluations_since_best=self.evaluations_since_best + 1)


def read_object(path: Path) -> tuple[dict[str, Any], bytes]:
    """Returns (the JSON object in the file `path`, the file's bytes).

    Raises `ValueError` with a sentence if the content is no JSON object, and `OSError` if the file
    cannot be read.
    """
    encoded = read_bounded(path)
    try:
        content = parse_json(encoded)
    except ValueError:
        raise ValueError(f"{path.name} is damaged") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path.name} is damaged: it holds no JSON object")
    return content, encoded


def read_state(checkpoint: Path, name: str = "state.json") -> dict[str, Any]:
    """Reads state.json, or the file `name`, of a checkpoint.

    Raises `ValueError` with a sentence if the file is unreadable, or lacks a key, or has a value of
    the wrong kind.
    """
    try:
        content, _ = read_object(checkpoint / name)
    except OSError as error:
        raise ValueError(f"{name} cannot be read: {error.strerror}") from None
    _refuse_wrong_kinds(name, content, _StateFile)
    return content


def _refuse_malformed_manifest(content: Mapping[str, Any]) -> None:
    """Raises `ValueError` with a sentence if `content` is not the content of a manifest.

    It must not name a file outside the checkpoint, either.
    """
    _refuse_wrong_kinds(MANIFEST, content, _ManifestFile)
    for file in content["files"]:
        path = PurePosixPath(file)
        is_inside = path.parts and ".." not in path.parts and not path.is_absolute()
        if not (is_inside and file.isprintable()):
            raise ValueError(f"{MANIFEST} names a file outside the checkpoint: {file[:60]!a}")


def _refuse_wrong_kinds(name: str, content: Mapping[str, Any], kinds: type[BaseModel]) -> None:
    """Raises `ValueError` with a sentence if `content`, of the file `name`, lacks a key of `kinds`,
    or has a value of another type. Further keys are not checked.
    """
    try:
        kinds.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise ValueError(f"{name} is damaged: {key[:60]}: {first['msg']}") from None


Count = Annotated[int, Field(ge=0)]


class _FileEntry(BaseModel, strict=True):
    """The manifest's entry of a file; the checksum is beside it."""

    size: Count  # bytes


class _ManifestFile(BaseModel, strict=True):
    """The keys of manifest.json."""

    step: Count
    ranks: Count
    layout: str
    recipe_sha256: str
    packages: dict[str, str]
    files: dict[str, _FileEntry]


class _StateFile(BaseModel, strict=True):
    """The keys of state.json. Those with a default are newer than the format."""

    step: Count
    epoch: float
    tokens: Count
    trained_tokens: Count
    skipped_steps: Count
    best_eval_loss: float | None
    best_step: Count | None
    evaluations_since_best: Count
    owes_evaluation: bool = False
    scaler: dict[str, Any] | None
    callbacks: dict[str, Any] | None = None
    recipe: dict[str, Any]
    global_batch_size: Count
    data_fingerprint: str | None = None
    base_model: str | None = None
    compute_dtype: str = ""
    inputs: dict[str, str] = {}


FORMAT_VERSION = 1
MANIFEST = "manifest.json"
STATE = "state.json"
PARTS = MODEL, OPTIMIZER = "model", "optimizer"  # a checkpoint's folders
NAME = re.compile(r"step-([0-9]{8,})")  # a checkpoint's name; the group is the step


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The content of manifest.json, without the manifest's own checksum."""

    step: int
    layout: str  # the layout that wrote the checkpoint, such as fsdp2
    ranks: int  # the number of ranks that wrote it
    recipe_sha256: str  # `hash_recipe` of the recipe
    packages: dict[str, str]  # name -> version
    files: dict[str, dict[str, Any]]  # path inside the checkpoint -> size in bytes, and checksum
    format_version: int = FORMAT_VERSION

    @property
    def bytes(self) -> int:
        """The size of all files together, without the manifest."""
        return sum(entry["size"] for entry in self.files.values())


def read_manifest(checkpoint: Path) -> Manifest:
    """Reads the manifest of `checkpoint`.

    Raises `ValueError` with a sentence if it is damaged or of another format, and `OSError` if it
    cannot be read.
    """
    stored, encoded = read_object(checkpoint / MANIFEST)
    version = stored.get("format_version")
    content = {key: value for key, value in stored.items() if key != "checksum"}
    if version != FORMAT_VERSION:
        raise ValueError(
            f"{MANIFEST} has format {version!a}; this program reads format {FORMAT_VERSION}"
        )
    try:
        # Encoded again, an undamaged content gives the same bytes, checksum included.
        if _encode(content) == encoded:
            _refuse_malformed_manifest(content)
            return Manifest(**content)
    except (TypeError, RecursionError):  # unknown keys; nested too deep
        pass
    raise ValueError(f"{MANIFEST} is damaged")


def find_checkpoint_of(path: Path) -> Path | None:
    """Returns the full path of the checkpoint at `path`; for a checkpoint's model/, the checkpoint.

    None for any other path. `path` may be ".", which has no name of its own.

    >>> find_checkpoint_of(Path("runs/nosuch/checkpoints/step-00000100/model")) is None
    True
    """
    path = Path(os.path.abspath(path))  # noqa: PTH100 - resolve() would follow links
    candidates = (path, path.parent) if path.name == MODEL else (path,)
    for folder in candidates:
        if (folder / MANIFEST).exists():
            return folder
    return None


def find_damage(
    checkpoint: Path,
    *,
    checksums: bool = True,
    parts: Collection[str] = PARTS,
    share: tuple[int, int] = (0, 1),
    advance: Callable[[int], object] = lambda _: None,
) -> list[str]:
    """Lists the problems of a checkpoint, as sentences; empty if it has none.

    Args:
        checkpoint: The checkpoint's folder, or a complete staging folder.
        checksums: Whether to read every byte; else only names and sizes are compared.
        parts: Which of the folders model and optimizer to check, beside state.json.
        share: (index, count): the files are divided into `count` shares, and only those of one
            share are read.
        advance: Called with the number of bytes read since the last call, for a progress bar.
    """
    try:
        manifest = read_manifest(checkpoint)
        match = NAME.fullmatch(checkpoint.name)
        if match and int(match[1]) != manifest.step:
            return [f"{MANIFEST} is of step {manifest.step}"]
        problems = list(_file_problems(checkpoint, manifest, checksums, parts, share, advance))
        if not problems:
            read_state(checkpoint)
        return problems
    except FileNotFoundError:
        return [f"{MANIFEST} is missing: it was never finished"]
    except OSError as error:
        return [f"{Path(error.filename or MANIFEST).name[:60]} cannot be read: {error.strerror}"]
    except ValueError as error:
        return [str(error)]


def _file_problems(
    checkpoint: Path,
    manifest: Manifest,
    checksums: bool,
    parts: Collection[str],
    share: tuple[int, int],
    advance: Callable[[int], object],
) -> Iterator[str]:
    """Yields the problems of the files in a checkpoint's `parts`, and of those in neither part.

    Arguments are as for `find_damage`.
    """
    unchecked = set(PARTS) - set(parts)
    expected = {}
    for file, entry in manifest.files.items():
        top_name, *_ = PurePosixPath(file).parts
        if top_name not in unchecked:
            expected[checkpoint / file] = entry
    present: set[Path] = set()
    for part in parts:
        present.update(path for path in (checkpoint / part).rglob("*") if not path.is_dir())
    for path in sorted(present - expected.keys()):
        yield f"{path.relative_to(checkpoint)} does not belong to it"
    to_read = []
    for path, entry in sorted(expected.items()):
        name = path.relative_to(checkpoint)
        if path.is_symlink() or not path.is_file():
            yield f"{name} is missing"
        elif path.stat().st_size != entry["size"]:
            yield f"{name} has {path.stat().st_size:,} bytes, not {entry['size']:,}"
        elif checksums:
            to_read.append((path, entry))
    index, count = share
    to_read = to_read[index::count]
    with ThreadPoolExecutor(max_workers=4) as pool:
        problems = pool.map(lambda item: _compare_checksum(advance, *item), to_read)
        for (path, _), problem in zip(to_read, problems, strict=True):
            if problem:
                yield f"{path.relative_to(checkpoint)} {problem}"


def _compare_checksum(
    advance: Callable[[int], object], path: Path, entry: dict[str, Any]
) -> str | None:
    """Returns what is wrong with a file's content, as "does not ..." or "cannot ..."; else None.

    `entry`: the file's size and checksum in the manifest.
    """
    try:
        if durable.checksum(path, advance) == entry:
            return None
        return "does not match its checksum"
    except OSError as error:
        return f"cannot be read: {error.strerror}"


def complete(staging: Path, manifest: Manifest) -> None:
    """Completes a staging folder: writes the manifest, syncs the folders, and checks the files.

    Afterwards only the rename is missing. All other files must be on disk already. Their sizes are
    checked but not their checksums, since every rank has read its own files back.

    Raises `UserError` if a file of the manifest is missing: a rank may have written to the disk of
    another machine.
    """
    durable.write_file(staging / MANIFEST, [_encode(asdict(manifest))])
    for folder in sorted({(staging / name).parent for name in manifest.files} | {staging}):
        durable.sync_folder(folder)
    if problems := find_damage(staging, checksums=False):
        raise UserError(
            f"{staging}: {'; '.join(problems)}; every rank must write to one shared folder, set "
            "output_dir to one"
        )


def hash_recipe(recipe: dict[str, Any]) -> str:
    """Returns the SHA-256 of a recipe whose every key is filled in, as hexadecimal digits."""
    return hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()


def _encode(content: dict[str, Any]) -> bytes:
    """Encodes a manifest as JSON, with a checksum of the content as one more key.

    Equal contents give equal bytes, so a reader that encodes again finds any changed byte.
    """
    plain = json.dumps(content, sort_keys=True, indent=1)
    with_checksum = {"checksum": hashlib.sha256(plain.encode()).hexdigest()} | content
    return json.dumps(with_checksum, sort_keys=True, indent=1).encode()
