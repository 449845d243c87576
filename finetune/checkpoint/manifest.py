"""A checkpoint's manifest and state: its files with their checksums, and the run's progress.

A checkpoint is a folder step-N. Its manifest has step N and lists every file with size and
checksum. Its state.json has the run's progress.
"""

import hashlib
import json
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from finetune.errors import UserError
from finetune.files import durable
from finetune.files.json_files import parse_json, read_bounded

if TYPE_CHECKING:  # imports torch
    from finetune.data.batches import StepBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The progress of a run.

    It is complete: data order, learning rate and dropout are pure functions of `step`.
    """

    step: int = 0  # optimizer steps done
    epoch: float = 0.0
    tokens: int = 0  # read over all ranks, without padding
    trained_tokens: int = 0  # tokens with a label
    skipped_steps: int = 0  # steps without an update, because the loss or gradient was not finite
    best_eval_loss: float | None = None  # the lowest held-out loss so far
    best_step: int | None = None  # the step of that loss
    evaluations_since_best: int = 0
    scaler: dict[str, Any] | None = None  # the fp16 gradient scaler's state
    # in a checkpoint: the states of the user's callbacks, by name
    callbacks: dict[str, Any] | None = None

    def after_step(self, batch: "StepBatch", *, is_skipped: bool) -> "Progress":
        """Returns the progress after the step of `batch`.

        is_skipped: The step had no update.
        """
        return replace(
            self,
            step=self.step + 1,
            epoch=batch.epoch,
            tokens=self.tokens + batch.tokens,
            trained_tokens=self.trained_tokens + batch.trained_tokens,
            skipped_steps=self.skipped_steps + is_skipped,
        )

    def after_evaluation(self, loss: float) -> "Progress":
        """Returns the progress after an evaluation with this held-out `loss`.

        A nan is never the lowest loss. Neither is the loss before the first step, whose model no
        checkpoint has.

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


NAME_LIMIT_BYTES = 255  # of one name in a path, on common file systems
PATH_LIMIT_BYTES = 4096


def read_object(path: Path) -> tuple[dict[str, Any], bytes]:
    """Returns (the JSON object in `path`, the file's bytes).

    Raises `ValueError` with a sentence for any other content, and `OSError`.
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
    """Reads state.json of a checkpoint.

    Raises `ValueError` with a sentence where it is unreadable, or a key is missing or wrong.
    """
    try:
        content, _ = read_object(checkpoint / name)
    except OSError as error:
        raise ValueError(f"{name} cannot be read: {error.strerror}") from None
    _refuse_wrong_kinds(name, content, _STATE)
    return content


def refuse_malformed_manifest(content: Mapping[str, Any]) -> None:
    """Raises `ValueError` with a sentence if `content` is no manifest.

    It is none either if it names a file outside the checkpoint.
    """
    _refuse_wrong_kinds(MANIFEST, content, _MANIFEST)
    for file in content["files"]:
        path = PurePosixPath(file)
        if path.is_absolute() or ".." in path.parts:
            raise ValueError(f"{MANIFEST} names a file outside the checkpoint: {file!a}")
        if str(path) != file or not path.parts or not _is_file_name(path):
            raise ValueError(f"{MANIFEST} names a file that cannot exist: {file[:60]!a}")


def _is_file_name(path: PurePosixPath) -> bool:
    try:
        sizes = [len(part.encode()) for part in path.parts]
    except UnicodeEncodeError:  # half of a surrogate pair
        return False
    is_short = max(sizes) <= NAME_LIMIT_BYTES and sum(sizes) <= PATH_LIMIT_BYTES
    return is_short and "\0" not in str(path)


def _refuse_wrong_kinds(name: str, content: Mapping[str, Any], kinds: Mapping[str, str]) -> None:
    """Raises `ValueError` with a sentence where a value is of none of the kinds of its key.

    Args:
        name: The name of the file.
        content: Its object.
        kinds: Key -> names in KINDS, with spaces between.
    """
    for key, allowed in kinds.items():
        if key not in content:
            if "missing" not in allowed:
                raise ValueError(f"{name} is damaged: {key} is missing")
        elif not any(KINDS[kind](content[key]) for kind in allowed.split()):
            raise ValueError(f"{name} is damaged: {key} has a value of the wrong kind")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _is_object_of(is_value: Callable[[Any], bool], value: Any) -> bool:
    return isinstance(value, dict) and all(map(is_value, value.values()))


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_file(value: Any) -> bool:
    return isinstance(value, dict) and _is_count(value.get("size"))


KINDS: Mapping[str, Callable[[Any], bool]] = {
    "count": _is_count,
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    "text": _is_text,
    "object": lambda value: isinstance(value, dict),
    "texts": partial(_is_object_of, _is_text),
    "files": partial(_is_object_of, _is_file),
    "none": lambda value: value is None,
    "missing": lambda _: False,
}
_MANIFEST = {
    **dict.fromkeys(("step", "ranks"), "count"),
    **dict.fromkeys(("layout", "recipe_sha256"), "text"),
    "packages": "texts",
    "files": "files",
}
_STATE = {
    **dict.fromkeys(
        ("step", "tokens", "trained_tokens", "skipped_steps", "evaluations_since_best"), "count"
    ),
    "epoch": "number",
    "best_eval_loss": "number none",
    "best_step": "count none",
    "scaler": "object none",
    "callbacks": "object none missing",
    "recipe": "object",
    "global_batch_size": "count",
    **dict.fromkeys(("data_fingerprint", "base_model"), "text none missing"),
    "compute_dtype": "text missing",
    "inputs": "texts missing",
}


FORMAT_VERSION = 1
MANIFEST = "manifest.json"
STATE = "state.json"
PARTS = MODEL, OPTIMIZER = "model", "optimizer"
NAME = re.compile(r"step-([0-9]{8,})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The content of manifest.json."""

    step: int
    layout: str
    ranks: int
    recipe_sha256: str
    packages: dict[str, str]  # name -> version
    files: dict[str, dict[str, Any]]  # path inside the checkpoint -> size in bytes, and checksum
    format_version: int = FORMAT_VERSION

    @property
    def bytes(self) -> int:
        return sum(entry["size"] for entry in self.files.values())


def read_manifest(checkpoint: Path) -> Manifest:
    """Reads the manifest of `checkpoint`.

    Raises `ValueError` with a sentence if it is damaged, `OSError` if it is unreadable.
    """
    content, encoded = read_object(checkpoint / MANIFEST)
    version = content.get("format_version")
    content = {k: v for k, v in content.items() if k != "checksum"}
    if version != FORMAT_VERSION:
        raise ValueError(
            f"{MANIFEST} has format {version!a}; this program reads format {FORMAT_VERSION}"
        )
    try:
        if _encode(content) == encoded:
            refuse_malformed_manifest(content)
            return Manifest(**content)
    except (TypeError, RecursionError):  # unknown keys; nested too deep
        pass
    raise ValueError(f"{MANIFEST} is damaged")


def find_checkpoint_of(path: Path) -> Path | None:
    """Returns the checkpoint that `path` is, or whose model/ it is; None for any other path.

    >>> find_checkpoint_of(Path("runs/nosuch/checkpoints/step-00000100/model")) is None
    True
    """
    for folder in (path, path.parent) if path.name == MODEL else (path,):
        if (folder / MANIFEST).exists():
            return folder
    return None


def find_damage(
    checkpoint: Path,
    *,
    checksums: bool = True,
    parts: Collection[str] = PARTS,
    advance: Callable[[int], object] = lambda _: None,
) -> list[str]:
    """Lists the problems of a published checkpoint, as sentences.

    Args:
        checkpoint: Its folder.
        checksums: Whether every byte is read; else names and sizes are compared.
        parts: The folders that are checked, beside state.json.
        advance: Called with the number of bytes that were read.
    """
    try:
        manifest = read_manifest(checkpoint)
    except FileNotFoundError:
        return [f"{MANIFEST} is missing: it was never finished"]
    except OSError as error:
        return [f"{MANIFEST} cannot be read: {error.strerror}"]
    except ValueError as error:
        return [str(error)]
    match = NAME.fullmatch(checkpoint.name)
    if match and int(match[1]) != manifest.step:
        return [f"{MANIFEST} is of step {manifest.step}"]
    if problems := list(_file_problems(checkpoint, manifest, checksums, parts, advance)):
        return problems
    try:
        read_state(checkpoint)
    except ValueError as error:
        return [str(error)]
    return []


def _file_problems(
    checkpoint: Path,
    manifest: Manifest,
    checksums: bool,
    parts: Collection[str],
    advance: Callable[[int], object],
) -> Iterator[str]:
    """Yields the problems of the files in a checkpoint's `parts` and beside its parts.

    The arguments are those of `find_damage`.
    """
    unchecked = set(PARTS) - set(parts)
    expected = {}
    for file, entry in manifest.files.items():
        if PurePosixPath(file).parts[0] not in unchecked:
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
    with ThreadPoolExecutor(max_workers=4) as pool:
        problems = pool.map(lambda item: _compare_checksum(advance, *item), to_read)
        for (path, _), problem in zip(to_read, problems, strict=True):
            if problem:
                yield f"{path.relative_to(checkpoint)} {problem}"


def _compare_checksum(
    advance: Callable[[int], object], path: Path, entry: dict[str, Any]
) -> str | None:
    """Returns the problem of a file's content, a predicate; None without one."""
    try:
        if durable.checksum(path, advance) == entry:
            return None
        return "does not match its checksum"
    except OSError as error:
        return f"cannot be read: {error.strerror}"


def complete(staging: Path, manifest: Manifest) -> None:
    """Writes the manifest into a staging folder, and syncs its folders: only the name is missing.

    Its other files are on disk. Every rank has read its own files back, so only names and sizes are
    compared here.

    Raises `UserError` where files of the manifest are missing: a rank may have written to another
    machine's disk.
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
    """Returns the hash of a recipe with every key filled in."""
    return hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()


def _encode(content: dict[str, Any]) -> bytes:
    """Encodes `content` as JSON with its own checksum.

    There is one encoding of a content, so that any changed byte is found.
    """
    plain = json.dumps(content, sort_keys=True, indent=1)
    checked = {"checksum": hashlib.sha256(plain.encode()).hexdigest()} | content
    return json.dumps(checked, sort_keys=True, indent=1).encode()
