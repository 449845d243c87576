"""Functions and classes of a user's own file, which a recipe names as `my_data.py:rows`."""

import contextlib
import difflib
import importlib.util
import inspect
import itertools
import sys
import traceback
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

from finetune.constants import Fields, Record
from finetune.errors import Preempted, UserError

OURS = str(Path(__file__).resolve().parents[1])
MANY_ROWS = 100_000  # progress is printed from here on, at every tenfold


def locate(text: str, folder: Path, known: Collection[str] = ()) -> str:
    """Finds the file of `FILE.py:NAME` from here or from the recipe's `folder`; returns a `known`
    name as it is.

    Raises `ValueError` with a sentence where the text names no function, or there is no such file.

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
    path = next((path for path in (Path(file).expanduser(), folder / file) if path.is_file()), None)
    if path is None:
        raise ValueError(f"{file}: no such file, here or in the recipe's folder")
    return f"{path}:{name}"


def file_of(name: str) -> Path:
    """Returns the file of `FILE.py:NAME`."""
    return Path(name.rpartition(":")[0])


def load(name: str) -> Any:
    """Loads what `FILE.py:NAME` names.

    Runs the file once for all that it holds, and again once it was edited.

    Raises:
        UserError: Where the file cannot be run, or lacks the name; with the line.
    """
    path = file_of(name)
    wanted = name.rpartition(":")[2]
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


def read_rows(name: str) -> Iterator[Record]:
    """Yields the rows that the function `FILE.py:NAME` yields.

    Raises `UserError` for what it raises.
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
        if number >= MANY_ROWS and str(number).strip("0") == "1":
            print(
                f"{name}: {number:,} rows so far; one without an end requires streaming: true",
                file=sys.stderr,
            )
        yield plain_row(row)


def plain_row(row: Fields) -> Record:
    """Returns a row of a user's code as a file has it: arrays and tensors as lists.

    >>> import numpy
    >>> plain_row({"input_ids": numpy.arange(3), "source": "web"})
    {'input_ids': [0, 1, 2], 'source': 'web'}
    """
    return {
        key: value.tolist() if hasattr(value, "tolist") else value for key, value in row.items()
    }


def place_of(code: Any) -> str:
    """Returns `FILE:LINE: ` of the definition of a user's function or class; empty where that is
    not known.
    """
    with suppress(TypeError, OSError):
        code = inspect.unwrap(code)
        return f"{inspect.getsourcefile(code)}:{inspect.getsourcelines(code)[1]}: "
    return ""


@contextmanager
def explained(what: str, code: Any = None, *, is_isolated: bool = False) -> Iterator[None]:
    """Turns what a user's code raises within it into a `UserError` that names the file and the
    line.

    Args:
        what: What is called, for the sentence.
        code: The function or class that is called. Its definition is named where the call itself
            fails.
        is_isolated: Whether it runs in a process of its own. Then whatever it raises is its error:
            the process has no Ctrl-C of a user's, and no plan that explains its memory.
    """
    try:
        yield
    except (UserError, Preempted):
        raise
    except BaseException as error:
        # sys.exit(0) would end the run as done
        if not is_isolated and not isinstance(error, Exception | SystemExit):
            raise
        # torch's, which is explained with the plan
        if not is_isolated and type(error).__name__ == "OutOfMemoryError":
            raise
        place = _find_own_place(error) or place_of(code)
        message = error.msg if isinstance(error, SyntaxError) else str(error)
        one_line = " ".join(str(message).split())
        reason = f": {one_line}" if one_line else ""
        raise UserError(f"{place}{what}: {type(error).__name__}{reason}") from error


def _find_own_place(error: BaseException) -> str:
    """Returns `FILE:LINE: ` of the last line of a user's own file that an error came through.

    The user's file is the first that is not ours. Libraries that it calls do not count. Returns ""
    where the error came through no such file.
    """
    not_own = (OURS, "<frozen", contextlib.__file__)
    places = []
    for frame in traceback.extract_tb(error.__traceback__):
        if not frame.filename.startswith(not_own):
            places.append((frame.filename, frame.lineno))
    own = [place for place in places if place[0] == places[0][0]]
    if isinstance(error, SyntaxError) and error.filename:
        own.append((error.filename, error.lineno))
    if not own:
        return ""
    file, line = own[-1]
    return f"{file}:{line}: "


_folders: list[str] = []  # of the files that were run, the latest first


@lru_cache
def _run_file(path: str, modified_ns: int) -> ModuleType:
    """Runs a user's file and returns its module; again once its time `modified_ns` has changed.

    The file may import what stands beside it.
    """
    name = f"{path} of a recipe"  # no import finds it: a file named json.py replaces nothing
    folder = str(Path(path).parent)
    # a module of that name beside another file is another module
    for key, module in list(sys.modules.items()):
        file = Path(getattr(module, "__file__", None) or "")
        if (
            key == file.stem
            and str(file.parent) in {*_folders} - {folder}
            and Path(folder, file.name).is_file()
        ):
            del sys.modules[key]
    rest = [each for each in sys.path if each not in _folders]
    _folders[:] = [folder, *(each for each in _folders if each != folder)]
    sys.path[:] = [*rest, *_folders]  # what stands beside it can be imported, after all else
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, path
    sys.modules[name] = module = importlib.util.module_from_spec(spec)  # where dataclasses look
    spec.loader.exec_module(module)
    return module
