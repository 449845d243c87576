"""manifest.json and state.json as values. Both may be damaged or forged, so every value's kind is checked before it is used."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

LIMIT_BYTES = 64 * 1024 * 1024
NAME_LIMIT_BYTES = 255  # of one name in a path, on every file system in use
PATH_LIMIT_BYTES = 4096

Check = Callable[[Any], bool]


def read_object(path: Path) -> tuple[dict[str, Any], bytes]:
    """The JSON object in `path`, and its bytes. Raises `ValueError` (a sentence) where it holds none, `OSError` as it comes."""
    with path.open("rb") as file:
        raw = file.read(LIMIT_BYTES + 1)
    try:
        content = json.loads(raw)
    except (ValueError, RecursionError):
        raise ValueError(f"{path.name} is damaged") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path.name} is damaged: it holds no JSON object")
    return content, raw


def read_state(checkpoint: Path, name: str = "state.json") -> dict[str, Any]:
    """state.json of a checkpoint. Raises `ValueError` (a sentence) where it does not say how far the run was."""
    try:
        content, _ = read_object(checkpoint / name)
    except OSError as error:
        raise ValueError(f"{name} cannot be read: {error.strerror}") from None
    _refuse_wrong_kinds(name, content, _STATE)
    return content


def refuse_malformed_manifest(name: str, content: Mapping[str, Any]) -> None:
    """Raises `ValueError` (a sentence) where `content` is not what a manifest says, or names a file outside the checkpoint."""
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
    return max(sizes) <= NAME_LIMIT_BYTES and sum(sizes) <= PATH_LIMIT_BYTES and "\0" not in str(path)


def _refuse_wrong_kinds(name: str, content: Mapping[str, Any], kinds: Mapping[str, tuple[Check, bool]]) -> None:
    for key, (is_right, is_required) in kinds.items():
        if key not in content and is_required:
            raise ValueError(f"{name} is damaged: {key} is missing")
        if key in content and not is_right(content[key]):
            raise ValueError(f"{name} is damaged: {key} has a value of the wrong kind")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


def _is_object_of_texts(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(text, str) for text in value.values())


def _is_file_entries(value: Any) -> bool:
    return isinstance(value, dict) and all(
        isinstance(entry, dict) and _is_count(entry.get("size")) for entry in value.values()
    )


def _or_none(check: Check) -> Check:
    return lambda value: value is None or check(value)


_MANIFEST: dict[str, tuple[Check, bool]] = {
    "step": (_is_count, True),
    "layout": (_is_text, True),
    "ranks": (_is_count, True),
    "recipe_sha256": (_is_text, True),
    "packages": (_is_object_of_texts, True),
    "files": (_is_file_entries, True),
}
_STATE: dict[str, tuple[Check, bool]] = {
    "step": (_is_count, True),
    "epoch": (_is_number, True),
    "tokens": (_is_count, True),
    "trained_tokens": (_is_count, True),
    "skipped_steps": (_is_count, True),
    "best_eval_loss": (_or_none(_is_number), True),
    "best_step": (_or_none(_is_count), True),
    "evaluations_since_best": (_is_count, True),
    "scaler": (_or_none(_is_object), True),
    "recipe": (_is_object, True),
    "global_batch_size": (_is_count, True),
    "data_fingerprint": (_or_none(_is_text), False),
    "base_model": (_or_none(_is_text), False),
    "compute_dtype": (_is_text, False),
    "inputs": (_is_object_of_texts, False),
}
