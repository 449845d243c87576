"""Writes rows and functions that a Python caller gives to files, so that the recipe can name files.

This keeps the recipe text: a run's folder can hold it, and other ranks and the process of rewards
can load what it names. The name of a file is made of its content, so a resumed run notices a
change. Imports no torch.
"""

import base64
import hashlib
import io
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import CodeType
from typing import Any

from finetune.config.schema import NESTED, recipe_keys
from finetune.config.user_code import plain_row
from finetune.config.yaml_file import LOAD_RECIPE
from finetune.errors import UserError
from finetune.files.durable import replace_file
from finetune.files.network import find_cache

NO_FILE = f"<{LOAD_RECIPE}>"  # stands for the file in pickled code
# The file of a function that no other process can import: it holds the function, pickled by dill.
PICKLED = '''"""{name}, as {place} was given it, under Python {version}."""

import base64

import dill

{name} = dill.loads(base64.b64decode("{pickled}"))
'''
# The file of a function in a package: it imports the function. It also holds the hash of the
# function's own file, so that its name changes whenever that file does.
IMPORTED = '''"""{name}, as {place} was given it; its file's hash was {hash}."""

import sys

sys.path.append({folder!r})
from {module} import {name}  # noqa: E402, F401
'''


def name_given(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the recipe's keys with rows and Python functions replaced by the names of files.

    The files are written first.

    Raises:
        UserError: No file can hold the rows, or a function cannot be pickled.
    """
    known = recipe_keys()
    named = dict(keys)
    for key, value in keys.items():
        is_code = key in known and known[key].is_python_name
        if is_code and isinstance(value, Mapping):
            named[key] = {name: _name_code(key, code) for name, code in value.items()}
        elif key == "environment":
            named[key] = _name_code(key, value)
        elif isinstance(value, str | Mapping | None):
            continue  # no rows and no code: the recipe's reader checks the value
        elif key in NESTED:
            named[key] = [_name_source(key, source) for source in _as_sources(value)]
        elif is_code:
            codes = value if isinstance(value, list | tuple) else [value]
            named[key] = [_name_code(key, code) for code in codes]
    return named


def _as_sources(value: Any) -> Sequence[Any]:
    """Returns the value of `datasets` or `eval_datasets` as a list of sources.

    A single source becomes a list, and a list of rows is a single source.
    """
    if not isinstance(value, list | tuple):
        return [value]
    is_rows = bool(value) and all(map(_is_row, value))
    return [value] if is_rows else value


def _is_row(value: Any) -> bool:
    """Whether a value is a row of data, not an entry of `datasets` or a mapping of splits."""
    if not isinstance(value, Mapping) or {"path", "function"} & {*value}:
        return False
    is_splits = any(hasattr(cell, "to_parquet") for cell in value.values())
    return not is_splits


def _name_source(key: str, source: Any) -> Any:
    """Returns a source with its rows and its function replaced by the names of files.

    Raises `UserError` for a mapping of splits, such as a `datasets.DatasetDict`.
    """
    if isinstance(source, Mapping):
        if source and all(hasattr(each, "to_parquet") for each in source.values()):
            raise UserError(
                f"{LOAD_RECIPE}: {key}: has the splits {', '.join(map(str, source))}; give one of "
                "them"
            )
        entry = dict(source)
        if "path" in entry and _is_table(entry["path"]):
            entry["path"] = _write_rows(key, entry["path"])
        if "function" in entry:
            entry["function"] = _name_code(f"{key}: function", entry["function"])
        return entry
    if _is_table(source):
        return {"path": _write_rows(key, source)}
    return source


def _is_table(value: Any) -> bool:
    """Whether a value holds rows: a `datasets.Dataset`, a data frame or a list."""
    return hasattr(value, "to_parquet") or isinstance(value, list | tuple)


def _write_rows(key: str, rows: Any) -> str:
    """Writes rows to a file of the cache, and returns the file's path.

    A `datasets.Dataset` and a data frame become Parquet, a list of mappings JSON lines. `key`: the
    recipe's key, for messages.
    """
    if hasattr(rows, "to_parquet"):
        content = io.BytesIO()
        rows.to_parquet(content)
        return _write_to_cache("rows", ".parquet", content.getvalue())
    lines = []
    for number, row in enumerate(rows, 1):
        if not isinstance(row, Mapping):
            raise UserError(
                f"{LOAD_RECIPE}: {key}: row {number}: {type(row).__name__}; a mapping is expected, "
                "as {'text': ...}"
            )
        try:
            lines.append(json.dumps(plain_row(row), ensure_ascii=False))
        except (TypeError, ValueError) as error:
            raise UserError(
                f"{LOAD_RECIPE}: {key}: row {number}: {error}; give a datasets.Dataset, or plain "
                "values"
            ) from None
    if not lines:
        raise UserError(f"{LOAD_RECIPE}: {key}: the list has no rows")
    return _write_to_cache("rows", ".jsonl", "".join(f"{line}\n" for line in lines).encode())


def _name_code(key: str, code: Any) -> Any:
    """Returns FILE.py:NAME, from which another process can load a function or class.

    Code in a module that is a file by itself is named there. Any other code gets a file that
    imports it from its package, or that holds it pickled if no process can import it. Text and
    values that cannot be called are returned as they are.
    """
    if isinstance(code, str) or not callable(code):
        return code
    name = getattr(code, "__name__", type(code).__name__)
    module = sys.modules.get(getattr(code, "__module__", None) or "")
    file = getattr(module, "__file__", None) or ""
    if (
        module is None
        or module.__name__ == "__main__"
        or not file.endswith(".py")
        or getattr(module, name, None) is not code
    ):
        return _write_pickled(key, code, name if name.isidentifier() else "function")
    if "." not in module.__name__:
        return f"{file}:{name}"
    top_package, _, _ = module.__name__.partition(".")
    folder = Path(sys.modules[top_package].__path__[0]).parent
    text = IMPORTED.format(
        name=name,
        place=LOAD_RECIPE,
        hash=hashlib.sha256(Path(file).read_bytes()).hexdigest(),
        folder=str(folder),
        module=module.__name__,
    )
    return f"{_write_to_cache(name, '.py', text.encode())}:{name}"


def _write_pickled(key: str, code: Any, name: str) -> str:
    """Writes a function or class to a file that unpickles it as `name`; returns FILE.py:NAME."""
    try:
        pickled = _pickle(code)
    except Exception as error:  # an object's own code may raise anything while it is pickled
        raise UserError(
            f"{LOAD_RECIPE}: {key}: {name} cannot be written to a file ({error}); put it into a "
            "Python file of its own, and import it from there"
        ) from None
    text = PICKLED.format(
        name=name,
        place=LOAD_RECIPE,
        version=".".join(map(str, sys.version_info[:3])),
        pickled=base64.b64encode(pickled).decode(),
    )
    return f"{_write_to_cache(name, '.py', text.encode())}:{name}"


def _pickle(code: Any) -> bytes:
    """Pickles a function or class by value, with the globals that it reads.

    The bytes are the same in every process, and do not depend on the file and line of the code.
    """
    import dill
    from dill import detect

    class Pickler(dill.Pickler):  # type: ignore[misc]
        dispatch = dill.Pickler.dispatch.copy()

    save = Pickler.dispatch[CodeType]

    def save_code(pickler: Any, code_object: CodeType) -> None:
        save(pickler, _strip_place(code_object, code_object.co_firstlineno))

    find_globals = detect.globalvars

    def find_in_order(*arguments: Any, **keys: Any) -> dict[str, Any]:
        return dict(sorted(find_globals(*arguments, **keys).items()))

    Pickler.dispatch[CodeType] = save_code
    content = io.BytesIO()
    detect.globalvars = find_in_order  # dill takes a set's order, which differs between processes
    try:
        Pickler(content, recurse=True).dump(code)
    finally:
        detect.globalvars = find_globals
    return content.getvalue()


def _strip_place(code: CodeType, first_line: int) -> CodeType:
    """Returns the code, and the code nested in it, as if `first_line` were line 1 of no file.

    The file and lines of a notebook's cell differ from session to session.
    """
    if code.co_filename == NO_FILE:
        return code  # nested in code that was stripped before
    return code.replace(
        co_filename=NO_FILE,
        co_firstlineno=code.co_firstlineno - first_line + 1,
        co_consts=tuple(
            _strip_place(constant, first_line) if isinstance(constant, CodeType) else constant
            for constant in code.co_consts
        ),
    )


def write_prompts(count: int) -> str:
    """Writes `count` empty prompts to a file, and returns its path.

    They are the data of an environment that writes its own prompts. Each row has its number, so
    that no row is a duplicate of another.
    """
    messages = [{"role": "user", "content": ""}]
    lines = [json.dumps({"prompt": messages, "row": number}) for number in range(count)]
    return _write_to_cache("prompts", ".jsonl", "".join(f"{line}\n" for line in lines).encode())


def _write_to_cache(name: str, ending: str, content: bytes) -> str:
    """Writes `content` to a file that is named by its hash, unless it exists; returns the path.

    The file is in the cache folder; its name is `name`, the hash and `ending`.
    """
    folder = find_cache("given")
    path = folder / f"{name}-{hashlib.sha256(content).hexdigest()[:16]}{ending}"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(path, content)
    return str(path)
