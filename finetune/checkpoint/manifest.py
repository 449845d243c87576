"""A checkpoint's manifest and state: its files with their checksums, whether they are sound, and
how far a run is.

A folder is a checkpoint when it is called step-N, its manifest says that it holds step N and names
every file in it with its size and checksum, and state.json says how far the run was.
"""

import hashlib
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from finetune.errors import UserError
from finetune.files import durable
from finetune.files.json_files import parse_json, read_bounded

if TYPE_CHECKING:  # imports torch
    from finetune.data.batches import StepBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a run is.

    Data order, learning rate and dropout are pure functions of `step`, so this is all there is.
    """

    step: int = 0  # optimizer steps done
    epoch: float = 0.0
    tokens: int = 0  # read so far over all ranks, padding not counted
    trained_tokens: int = 0  # those with a label
    skipped_steps: int = 0  # steps without an update, since the loss or gradient was not finite
    best_eval_loss: float | None = None  # the lowest held-out loss so far
    best_step: int | None = None  # the step that had it
    evaluations_since_best: int = 0
    scaler: dict[str, Any] | None = None  # the fp16 gradient scaler's state
    # of a checkpoint: the states of a user's callbacks, by their names
    callbacks: dict[str, Any] | None = None

    def after_step(self, batch: "StepBatch", *, is_skipped: bool = False) -> "Progress":
        """The progress one step later, `batch`'s. `is_skipped`: its update was skipped."""
        return replace(
            self,
            step=self.step + 1,
            epoch=batch.epoch,
            tokens=self.tokens + batch.tokens,
            trained_tokens=self.trained_tokens + batch.trained_tokens,
            skipped_steps=self.skipped_steps + is_skipped,
        )

    def after_evaluation(self, loss: float) -> "Progress":
        """The progress after an evaluation that found the held-out `loss`.

        A nan is never the lowest, nor is the loss before the first step: no checkpoint holds that
        model.

        >>> progress = Progress(step=5).after_evaluation(2.0).after_evaluation(3.0)
        >>> progress.best_eval_loss, progress.best_step, progress.evaluations_since_best
        (2.0, 5, 1)
        """
        if self.step == 0:
            return self
        if loss < (float("inf") if self.best_eval_loss is None else self.best_eval_loss):
            return replace(self, best_eval_loss=loss, best_step=self.step, evaluations_since_best=0)
        return replace(self, evaluations_since_best=self.evaluations_since_best + 1)


NAME_LIMIT_BYTES = 255  # of one name in a path, on every file system in use
PATH_LIMIT_BYTES = 4096


def read_object(path: Path) -> tuple[dict[str, Any], bytes]:
    """The JSON object in `path`, and its bytes.

    Raises `ValueError` (a sentence) if it holds none, or `OSError`.
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
    """state.json of a checkpoint.

    Raises `ValueError` (a sentence) where it does not say how far the run was.
    """
    try:
        content, _ = read_object(checkpoint / name)
    except OSError as error:
        raise ValueError(f"{name} cannot be read: {error.strerror}") from None
    _refuse_wrong_kinds(name, content, _STATE)
    return content


def refuse_malformed_manifest(name: str, content: Mapping[str, Any]) -> None:
    """Raises `ValueError` (a sentence) if `content` is no manifest, or names a file outside the
    checkpoint.
    """
    _refuse_wrong_kinds(name, content, _MANIFEST)
    for file in content["files"]:
        path = PurePosixPath(file)
        if path.is_absolute() or ".." in path.parts:
            raise ValueError(f"{name} names a file outside the checkpoint: {file!a}")
        if str(path) != file or not path.parts or not _is_file_name(path):
            raise ValueError(f"{name} names a file that cannot exist: {file[:60]!a}")


def _is_file_name(path: PurePosixPath) -> bool:
    try:
        sizes = [len(part.encode()) for part in path.parts]
    except UnicodeEncodeError:  # half of a surrogate pair
        return False
    return (
        max(sizes) <= NAME_LIMIT_BYTES and sum(sizes) <= PATH_LIMIT_BYTES and "\0" not in str(path)
    )


def _refuse_wrong_kinds(name: str, content: Mapping[str, Any], kinds: Mapping[str, str]) -> None:
    for key, allowed in kinds.items():
        if key not in content and "missing" not in allowed:
            raise ValueError(f"{name} is damaged: {key} is missing")
        if key in content and not any(KINDS[kind](content[key]) for kind in allowed.split()):
            raise ValueError(f"{name} is damaged: {key} has a value of the wrong kind")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


KINDS: Mapping[str, Callable[[Any], bool]] = {
    "count": _is_count,
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    "text": lambda value: isinstance(value, str),
    "object": lambda value: isinstance(value, dict),
    "texts": lambda value: (
        isinstance(value, dict) and all(isinstance(text, str) for text in value.values())
    ),
    "files": lambda value: (
        isinstance(value, dict)
        and all(
            isinstance(entry, dict) and _is_count(entry.get("size")) for entry in value.values()
        )
    ),
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
    """The content of manifest.json.

    `files`: path inside the checkpoint -> its size in bytes and checksum.
    """

    step: int
    layout: str
    ranks: int
    recipe_sha256: str
    packages: dict[str, str]
    files: dict[str, dict[str, Any]]
    format_version: int = FORMAT_VERSION

    @property
    def bytes(self) -> int:
        return sum(entry["size"] for entry in self.files.values())


def read_manifest(checkpoint: Path) -> Manifest:
    """The manifest of `checkpoint`.

    Raises `ValueError` (a sentence) if it is not one, `OSError` if unreadable.
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
            refuse_malformed_manifest(MANIFEST, content)
            return Manifest(**content)
    except (TypeError, RecursionError):  # keys that no manifest has; nested too deep to be one
        pass
    raise ValueError(f"{MANIFEST} is damaged")


def find_checkpoint_of(path: Path) -> Path | None:
    """The checkpoint that `path` is, or whose model/ it is; None where it is neither.

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
    """Finds what is wrong with a published checkpoint, one sentence each; nothing, where it can be
    relied on.

    `checksums=False` compares names and sizes only. `parts` must be right, beside state.json.
    `advance` counts bytes.
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
    others = set(PARTS) - set(parts)
    expected = {
        checkpoint / n: entry
        for n, entry in manifest.files.items()
        if PurePosixPath(n).parts[0] not in others
    }
    present = {
        path for part in parts for path in (checkpoint / part).rglob("*") if not path.is_dir()
    }
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
        for (path, _), problem in zip(
            to_read, pool.map(lambda item: _damage(advance, *item), to_read), strict=True
        ):
            if problem:
                yield f"{path.relative_to(checkpoint)} {problem}"


def _damage(advance: Callable[[int], object], path: Path, entry: dict[str, Any]) -> str | None:
    try:
        if durable.checksum(path, advance) == entry:
            return None
        return "does not match its checksum"
    except OSError as error:
        return f"cannot be read: {error.strerror}"


def complete(staging: Path, manifest: Manifest) -> None:
    """Writes the manifest into a staging folder, whose other files are all on disk, and syncs its
    folders.

    Then it is a checkpoint that only lacks its name. Raises `UserError` where it does not hold what
    the manifest lists: a rank's files may be on another machine's disk. Every rank has read its own
    files back, so names and sizes are compared here.
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
    """A hash of a recipe with every key filled in."""
    return hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()


def _encode(content: dict[str, Any]) -> bytes:
    """JSON with a checksum of the rest in it: the one spelling of `content`, so that any changed
    byte shows.
    """
    plain = json.dumps(content, sort_keys=True, indent=1)
    return json.dumps(
        {"checksum": hashlib.sha256(plain.encode()).hexdigest()} | content, sort_keys=True, indent=1
    ).encode()
