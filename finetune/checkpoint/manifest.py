"""The manifest of a checkpoint: which files belong to it, with their sizes and checksums, and whether they are sound. No torch.

A folder is a checkpoint when it is called step-N, its manifest says that it holds step N and names every file in it with
its size and checksum, and state.json says how far the run was.
"""

import hashlib
import json
import re
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from finetune.checkpoint.json_files import read_object, read_state, refuse_malformed_manifest
from finetune.errors import UserError
from finetune.files import durable

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
STATE = "state.json"
PARTS = MODEL, OPTIMIZER = "model", "optimizer"
NAME = re.compile(r"step-([0-9]{8,})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The content of manifest.json. `files`: path inside the checkpoint -> its size in bytes and checksum."""

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
    """The manifest of `checkpoint`. Raises `ValueError` (a sentence) where it is not one, `OSError` where it cannot be read."""
    content, raw = read_object(checkpoint / MANIFEST)
    version, content = content.get("format_version"), {k: v for k, v in content.items() if k != "checksum"}
    if version != FORMAT_VERSION:
        raise ValueError(f"{MANIFEST} has format {version!a}; this program reads format {FORMAT_VERSION}")
    try:
        if _encode(content) == raw:
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


def find_problems(
    checkpoint: Path,
    *,
    checksums: bool = True,
    parts: Collection[str] = PARTS,
    advance: Callable[[int], object] = lambda _: None,
) -> list[str]:
    """What is wrong with a published checkpoint, one sentence each; nothing, where it can be relied on.

    `checksums=False` compares names and sizes only. `parts` are those that must be right, beside state.json. `advance` is
    called with each count of bytes read, by several threads.
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
    return list(_file_problems(checkpoint, manifest, checksums, parts, advance)) or _state_problems(checkpoint)


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
    parts: Collection[str],
    advance: Callable[[int], object],
) -> Iterator[str]:
    others = set(PARTS) - set(parts)
    expected = {checkpoint / n: entry for n, entry in manifest.files.items() if PurePosixPath(n).parts[0] not in others}
    present = {path for part in parts for path in (checkpoint / part).rglob("*") if not path.is_dir()}
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
        for (path, _), problem in zip(to_read, pool.map(lambda item: _damage(advance, *item), to_read), strict=True):
            if problem:
                yield f"{path.relative_to(checkpoint)} {problem}"


def _damage(advance: Callable[[int], object], path: Path, entry: dict[str, Any]) -> str | None:
    try:
        return None if durable.checksum(path, advance) == entry else "does not match its checksum"
    except OSError as error:
        return f"cannot be read: {error.strerror}"


def complete(staging: Path, manifest: Manifest) -> None:
    """Writes the manifest into a staging folder, whose other files are all on disk, and syncs its folders.

    Then it is a checkpoint that only lacks its name. Raises `UserError` where it does not hold what the manifest lists: a
    rank's files may be on another machine's disk. Every rank has read its own files back, so names and sizes are compared here.
    """
    durable.write_file(staging / MANIFEST, [_encode(asdict(manifest))])
    for folder in sorted({(staging / name).parent for name in manifest.files} | {staging}):
        durable.sync_folder(folder)
    if problems := find_problems(staging, checksums=False):
        raise UserError(
            f"{staging}: {'; '.join(problems)}; every rank must write to one shared folder, set output_dir to one"
        )


def hash_recipe(recipe: dict[str, Any]) -> str:
    """A hash of a recipe with every key filled in."""
    return hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()


def _encode(content: dict[str, Any]) -> bytes:
    """JSON with a checksum of the rest in it: the one spelling of `content`, so that any changed byte shows."""
    plain = json.dumps(content, sort_keys=True, indent=1)
    return json.dumps(
        {"checksum": hashlib.sha256(plain.encode()).hexdigest()} | content, sort_keys=True, indent=1
    ).encode()
