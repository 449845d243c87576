"""Loads and calls functions and classes of a user's file: a recipe names them FILE.py:NAME."""

import contextlib
import difflib
import importlib.util
import inspect
import itertools
import os
import sys
import traceback
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

from finetune.errors import Preempted, UserError
from finetune.units import expand_home

# The folder of this package's own files. Without the separator it would match finetune_mine.py.
PACKAGE = str(Path(__file__).resolve().parents[1]) + os.sep
MANY_ROWS = 100_000  # progress is printed at this row, and at ten times as many, and so on


def locate(text: str, folder: Path, known: Collection[str] = ()) -> str:
    """Replaces the file in FILE.py:NAME by the path of a file that exists.

    Args:
        text: FILE.py:NAME, or one of `known`, which is returned as it is.
        folder: The recipe's folder, in which the file is looked for after the working directory.
        known: Names of functions that need no file.

    Raises:
        ValueError: The text has another form, or there is no such file; with a sentence on it.

    >>> locate("my_data.py", Path())
    Traceback (most recent call last):
    ValueError: my_data.py: name a Python file and what is in it, such as my_data.py:rows
    """
    if text in known:
        return text
    file, _, name = text.rpartition(":")
    if not file.endswith(".py") or not name.isidentifier():
        if close := difflib.get_close_matches(text, known, n=1):
            raise ValueError(f"{text}: did you mean {close[0]}?")
        if known:
            names = ", ".join(known)
            raise ValueError(
                f"{text}: name one of {names}, a Python file and what is in it, as "
                "my_rewards.py:right, or the folder of a reward model"
            )
        raise ValueError(f"{text}: name a Python file and what is in it, such as my_data.py:rows")
    path = next((path for path in (Path(expand_home(file)), folder / file) if path.is_file()), None)
    if path is None:
        raise ValueError(f"{file}: no such file, here or in the recipe's folder")
    return f"{path}:{name}"


def file_of(name: str) -> Path:
    """Returns the file of FILE.py:NAME."""
    file, _, _ = name.rpartition(":")
    return Path(file)


def load(name: str) -> Any:
    """Loads the function or class that FILE.py:NAME names.

    The file is run once for all its names, and again after it was edited.

    Raises:
        UserError: The file cannot be run (with the line that failed), or has no such function.
    """
    path = file_of(name)
    _, _, wanted = name.rpartition(":")
    with explained(str(path)):
        module = _run_file(str(path.resolve()), path.stat().st_mtime_ns)
    if not callable(getattr(module, wanted, None)):
        known = [
            key
            for key, value in vars(module).items()
            if callable(value) and not key.startswith("_")
        ]
        close = difflib.get_close_matches(wanted, known, n=1)
        if close:
            hint = f"did you mean {close[0]}?"
        else:
            hint = f"it has {', '.join(known) or 'none'}"
        raise UserError(f"{path}: no function or class {wanted}; {hint}")
    return getattr(module, wanted)


def read_rows(name: str) -> Iterator[dict[str, Any]]:
    """Calls the function that FILE.py:NAME names and yields its rows, each as `plain_row`.

    Raises `UserError` if the function fails, or yields something else than mappings.
    """
    function = load(name)
    with explained(name, function):
        rows = function()
    place = f"{place_of(function)}{name}"
    if not hasattr(rows, "__iter__") or isinstance(rows, str | Mapping):
        raise UserError(
            f"{place}: returned {type(rows).__name__}; yield rows, each a mapping as {{'text': "
            f"...}}"
        )
    rows = iter(rows)
    end = object()
    for number in itertools.count(1):
        with explained(f"{name}, row {number}", function):
            row = next(rows, end)
        if row is end:
            return
        if not isinstance(row, Mapping):
            raise UserError(
                f"{place}, row {number}: {type(row).__name__}; a mapping is expected, as {{'text': "
                f"...}}"
            )
        is_power_of_ten = str(number).strip("0") == "1"
        if number >= MANY_ROWS and is_power_of_ten:
            print(
                f"{name}: {number:,} rows so far; one without an end requires streaming: true",
                file=sys.stderr,
            )
        yield plain_row(row)


def plain_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a row with arrays and tensors as lists, like a row that is read from a file.

    >>> import numpy
    >>> plain_row({"input_ids": numpy.arange(3), "source": "web"})
    {'input_ids': [0, 1, 2], 'source': 'web'}
    """
    return {
        key: value.tolist() if hasattr(value, "tolist") else value for key, value in row.items()
    }


def place_of(code: Any) -> str:
    """Returns "FILE:LINE: " of the definition of a function or class; "" if it is not known."""
    with suppress(TypeError, OSError):
        code = inspect.unwrap(code)
        _, line = inspect.getsourcelines(code)
        return f"{inspect.getsourcefile(code)}:{line}: "
    return ""


@contextmanager
def explained(what: str, code: Any = None, *, is_isolated: bool = False) -> Iterator[None]:
    """Turns exceptions of a user's code inside the block into a `UserError` with file and line.

    Args:
        what: What the block calls, for the message.
        code: The function or class that the block calls. The message names its definition if the
            call itself fails, so that no line of a user's file failed.
        is_isolated: Whether the code runs in a process of its own. Otherwise Ctrl-C and torch's
            OutOfMemoryError pass unchanged. `UserError` and `Preempted` do in any case.
    """
    try:
        yield
    except (UserError, Preempted):
        raise
    except BaseException as error:
        # SystemExit is an error too: sys.exit(0) would end the run as if it were finished
        if not is_isolated and not isinstance(error, Exception | SystemExit):
            raise
        # the caller explains torch's error with the plan of the memory
        if not is_isolated and type(error).__name__ == "OutOfMemoryError":
            raise
        place = _find_own_place(error) or place_of(code)
        message = error.msg if isinstance(error, SyntaxError) else str(error)
        one_line = " ".join(str(message).split())
        reason = f": {one_line}" if one_line else ""
        raise UserError(f"{place}{what}: {type(error).__name__}{reason}") from error


def _find_own_place(error: BaseException) -> str:
    """Returns "FILE:LINE: " of the innermost line of the user's file in an error's traceback.

    The user's file is the first in the traceback that is not part of this package. Libraries that
    it calls do not count. Returns "" if the traceback has no such file.
    """
    other_files = (PACKAGE, "<frozen", contextlib.__file__)
    places = [
        (frame.filename, frame.lineno)
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(other_files)
    ]
    user_file = places[0][0] if places else ""
    own_places = [(file, line) for file, line in places if file == user_file]
    if isinstance(error, SyntaxError) and error.filename:
        own_places.append((error.filename, error.lineno))
    if not own_places:
        return ""
    file, line = own_places[-1]
    return f"{file}:{line}: "


_folders: list[str] = []  # the folders of the files that were run, the latest first


@lru_cache
def _run_file(path: str, modified_ns: int) -> ModuleType:
    """Runs a user's file and returns its module. The file may import files of its folder.

    `modified_ns`: when the file was last changed. The result is cached, and a new time makes the
    file run again.
    """
    name = f"{path} of a recipe"  # no import has this name: a file json.py replaces no module
    folder = str(Path(path).parent)
    # A module from the folder of an earlier file is forgotten if this folder has a file of the same
    # name: an import in `path` means the file beside it.
    for module_name, module in list(sys.modules.items()):
        file = Path(getattr(module, "__file__", None) or "")
        if (
            module_name == file.stem
            and str(file.parent) in {*_folders} - {folder}
            and Path(folder, file.name).is_file()
        ):
            del sys.modules[module_name]
    other_paths = [entry for entry in sys.path if entry not in _folders]
    _folders[:] = [folder, *(entry for entry in _folders if entry != folder)]
    sys.path[:] = [*other_paths, *_folders]  # last, so that no user's file hides a library
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up here while the file runs
    spec.loader.exec_module(module)
    return module
