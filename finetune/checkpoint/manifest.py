"""The folder of a checkpoint: what it holds, how it is published, verified and pruned. No torch here.

    runs/<run_name>/checkpoints/
      step-00000100/        manifest.json (written last), model/, optimizer/, state.json
      .staging-00000200/    being written; never read
      .replaced-00000100/   a published step that is about to be replaced by a newer one of the same number
      .pruned-00000050/     on its way out
      damaged-00000150/     did not verify when the run resumed below it; kept for a person to look at

A folder is a checkpoint when it is called step-N, its manifest says that it holds step N and names every file in it with
its size and checksum, and state.json says how far the run was. It gets that name by one rename, after all its bytes are
on disk.
"""

import hashlib
import json
import re
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from finetune import durable
from finetune.checkpoint.json_files import read_object, read_state, refuse_malformed_manifest
from finetune.errors import UserError

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
STATE = "state.json"
PARTS = MODEL, OPTIMIZER = "model", "optimizer"
_NAME = re.compile(r"step-([0-9]{8,})")
_REPLACED = re.compile(r"\.replaced-([0-9]{8,})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What manifest.json says. `files`: path inside the checkpoint -> its size in bytes and checksum."""

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


def checkpoints_of(run_folder: Path) -> Path:
    """The folder in which a run keeps its checkpoints."""
    return run_folder / "checkpoints"


def step_folder(run_folder: Path, step: int) -> Path:
    """Where the checkpoint of `step` stands once it is published.

    >>> step_folder(Path("runs/math"), 100).as_posix()
    'runs/math/checkpoints/step-00000100'
    """
    return checkpoints_of(run_folder) / f"step-{step:08d}"


def published(run_folder: Path) -> list[tuple[int, Path]]:
    """(step, folder) of everything that has a checkpoint's name, in order of step. Not verified."""
    folder = checkpoints_of(run_folder)
    found = [(_NAME.fullmatch(path.name), path) for path in folder.iterdir()] if folder.is_dir() else []
    return sorted((int(match[1]), path) for match, path in found if match and path.is_dir())


def write_manifest(staging: Path, manifest: Manifest) -> None:
    """Completes a staged checkpoint: the manifest, then every folder's names, on disk."""
    durable.write_file(staging / MANIFEST, [_encoded(asdict(manifest))])
    for folder in sorted({(staging / name).parent for name in manifest.files} | {staging}):
        durable.sync_folder(folder)


def read_manifest(checkpoint: Path) -> Manifest:
    """The manifest of `checkpoint`. Raises `ValueError` (a sentence) where it is not one, `OSError` where it cannot be read."""
    content, raw = read_object(checkpoint / MANIFEST)
    version, content = content.get("format_version"), {k: v for k, v in content.items() if k != "checksum"}
    if version != FORMAT_VERSION:
        raise ValueError(f"{MANIFEST} is of format {version!a}; this program reads format {FORMAT_VERSION}")
    try:
        if _encoded(content) == raw:
            refuse_malformed_manifest(MANIFEST, content)
            return Manifest(**content)
    except (TypeError, RecursionError):  # keys that no manifest has; nested too deep to be one
        pass
    raise ValueError(f"{MANIFEST} is damaged")


def checkpoint_at(path: Path) -> Path | None:
    """The checkpoint that `path` is, or whose model/ it is; None where it is neither.

    >>> checkpoint_at(Path("runs/nosuch/checkpoints/step-00000100/model")) is None
    True
    """
    for folder in (path, path.parent) if path.name == MODEL else (path,):
        if (folder / MANIFEST).exists():
            return folder
    return None


def problems_of(
    checkpoint: Path,
    *,
    checksums: bool = True,
    mine: Callable[[int], bool] = lambda _: True,
    parts: Collection[str] = PARTS,
    advance: Callable[[int], object] = lambda _: None,
) -> list[str]:
    """What is wrong with a published checkpoint, one sentence each; nothing, where it can be relied on.

    `checksums=False` looks at names and sizes only. `mine(index)` picks the files whose bytes are read, so that ranks
    can share the work; `parts` are those that must be right, beside state.json. `advance` is told the bytes as they are
    read, by several threads.
    """
    try:
        manifest = read_manifest(checkpoint)
    except FileNotFoundError:
        return [f"{MANIFEST} is missing: it was never finished"]
    except OSError as error:
        return [f"{MANIFEST} cannot be read: {error.strerror}"]
    except ValueError as error:
        return [str(error)]
    match = _NAME.fullmatch(checkpoint.name)
    if match and int(match[1]) != manifest.step:
        return [f"{MANIFEST} is of step {manifest.step}"]
    return list(_file_problems(checkpoint, manifest, checksums, mine, parts, advance)) or _state_problems(checkpoint)


def _state_problems(checkpoint: Path) -> list[str]:
    try:
        read_state(checkpoint, STATE)
    except ValueError as error:
        return [str(error)]
    return []


def _file_problems(
    checkpoint: Path,
    manifest: Manifest,
    checksums: bool,
    mine: Callable[[int], bool],
    parts: Collection[str],
    advance: Callable[[int], object],
) -> Iterator[str]:
    others = set(PARTS) - set(parts)
    expected = {checkpoint / n: entry for n, entry in manifest.files.items() if PurePosixPath(n).parts[0] not in others}
    present = {path for part in parts for path in (checkpoint / part).rglob("*") if not path.is_dir()}
    for path in sorted(present - expected.keys()):
        yield f"{path.relative_to(checkpoint)} does not belong to it"
    to_read = []
    for index, (path, entry) in enumerate(sorted(expected.items())):
        name = path.relative_to(checkpoint)
        if path.is_symlink() or not path.is_file():
            yield f"{name} is missing"
        elif path.stat().st_size != entry["size"]:
            yield f"{name} has {path.stat().st_size:,} bytes, not {entry['size']:,}"
        elif checksums and mine(index):
            to_read.append((path, entry))
    with ThreadPoolExecutor(max_workers=4) as pool:
        for (path, _), problem in zip(to_read, pool.map(lambda item: _damage(advance, *item), to_read), strict=True):
            if problem:
                yield f"{path.relative_to(checkpoint)} {problem}"


def _damage(advance: Callable[[int], object], path: Path, entry: dict[str, Any]) -> str | None:
    try:
        return None if durable.checksum(path, advance) == entry else "does not match its checksum"
    except OSError as error:
        return f"cannot be read: {error.strerror}"


def newest_valid(
    run_folder: Path,
    tell: Callable[[str], object] = lambda _: None,
    *,
    verify: Callable[[Path], list[str]] = problems_of,
) -> Path | None:
    """The checkpoint with the highest step that verifies, or None. Each damaged one above it is named through `tell`.

    `verify(checkpoint)` says what is wrong with one, as `problems_of` does.
    """
    for _, checkpoint in reversed(published(run_folder)):
        problems = verify(checkpoint)
        if not problems:
            return checkpoint
        tell(f"{checkpoint}: passed over: {'; '.join(problems)}")
    return None


def staging_folder(run_folder: Path, step: int) -> Path:
    """Where the checkpoint of `step` is written, on the filesystem where it will be published."""
    return checkpoints_of(run_folder) / f".staging-{step:08d}"


def make_staging(staging: Path) -> None:
    """Makes an empty staging folder."""
    durable.empty_folder(staging)
    for part in (MODEL, OPTIMIZER):
        durable.make_folder(staging / part)


def complete(staging: Path, manifest: Manifest) -> None:
    """Makes a staged folder, whose files are all on disk, a checkpoint that only lacks its name.

    Raises `UserError` where it does not hold what the manifest says: a rank's files may lie on another machine's disk.
    Every rank has read its own files back, so names and sizes are looked at here.
    """
    write_manifest(staging, manifest)
    if problems := problems_of(staging, checksums=False):
        raise UserError(
            f"{staging}: {'; '.join(problems)}; every rank must write to one shared folder, set output_dir to one"
        )


def publish(run_folder: Path, staging: Path, step: int) -> Path:
    """Gives a completed staging folder its name, in one rename. Only one process of a run may do this.

    A checkpoint of the same step is replaced; `tidy` restores it where the process is killed in between.
    """
    target = step_folder(run_folder, step)
    durable.publish_folder(target, staging, checkpoints_of(run_folder) / f".replaced-{step:08d}")
    return target


def prune(
    run_folder: Path,
    newest: int,
    keep: int | None,
    keep_every_steps: int | None = None,
    best_step: int | None = None,
) -> list[str]:
    """Removes all but the newest `keep` checkpoints up to step `newest`, by step and never by time. None keeps all.

    `newest` has just been published, so it is known to be sound and is always one of those that are kept. Later ones and
    folders that do not look whole are neither counted nor removed; checkpoints whose step divides by `keep_every_steps`,
    and that of `best_step`, are kept beside the others. Returns a sentence for each that could not be removed.
    """
    if keep is None:
        return []
    older = [(s, path) for s, path in published(run_folder) if s < newest and not problems_of(path, checksums=False)]
    problems = []
    for step, path in older[: max(0, len(older) - (keep - 1))]:
        if step == best_step or (keep_every_steps and step % keep_every_steps == 0):
            continue
        leaving = checkpoints_of(run_folder) / f".pruned-{step:08d}"
        try:
            durable.remove_tree(leaving)
            durable.rename(path, leaving)
            durable.remove_tree(leaving)
        except OSError as error:
            problems.append(f"{path}: an old checkpoint that could not be removed: {error.strerror or error}")
    return problems


def set_aside_after(run_folder: Path, step: int) -> list[Path]:
    """Renames every checkpoint after `step` to damaged-N, and returns the new names. For the process that holds the folder.

    To be called when the run resumes at `step`, since none of them verified: under a checkpoint's name they would count
    in `save_total_limit` and be looked at by every start.
    """
    renamed = []
    for number, path in published(run_folder):
        if number <= step:
            continue
        target, copies = path.with_name(f"damaged-{number:08d}"), 1
        while target.exists() or target.is_symlink():
            copies += 1
            target = path.with_name(f"damaged-{number:08d}-{copies}")
        durable.rename(path, target)
        renamed.append(target)
    return renamed


def tidy(run_folder: Path) -> None:
    """Clears away what a process that was killed left behind. Only for the process that holds the run's folder.

    What cannot be removed stays: it is no checkpoint, and no reason not to start.
    """
    folder = checkpoints_of(run_folder)
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        replaced = _REPLACED.fullmatch(path.name)
        if replaced is not None:
            durable.recover_replaced(step_folder(run_folder, int(replaced[1])), path)
        elif path.name.startswith((".staging-", ".pruned-")):
            durable.remove_tree(path, ignore_errors=True)


def recipe_sha256(recipe: dict[str, Any]) -> str:
    """A hash of a recipe with every key filled in."""
    return hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()


def _encoded(content: dict[str, Any]) -> bytes:
    """JSON with a checksum of the rest in it: the one spelling of `content`, so that any changed byte shows."""
    plain = json.dumps(content, sort_keys=True, indent=1)
    return json.dumps(
        {"checksum": hashlib.sha256(plain.encode()).hexdigest()} | content, sort_keys=True, indent=1
    ).encode()
