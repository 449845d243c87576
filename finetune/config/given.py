"""Rows and functions of Python, where a recipe names files: each is written to a file, which the
recipe then names.

So a recipe stays text: a run's folder holds it, other ranks and the process of rewards load what it
names, and a resumed run learns of a change by the name, which is made of the content. Imports no
torch.
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
from finetune.constants import Fields, Record
from finetune.errors import UserError
from finetune.files.durable import replace_file
from finetune.files.network import find_cache

NO_FILE = f"<{LOAD_RECIPE}>"
# Of a function that no other process can import: dill has its code, and what it reads.
PICKLED = '''"""{name}, as {place} was given it, under Python {version}."""

import base64

import dill

{name} = dill.loads(base64.b64decode("{pickled}"))
'''
# Of one of a package: by the hash a resumed run learns that its file has changed.
IMPORTED = '''"""{name}, as {place} was given it; its file's hash was {hash}."""

import sys

sys.path.append({folder!r})
from {module} import {name}  # noqa: E402, F401
'''


def name_given(keys: Fields) -> Record:
    """Returns keys of a recipe with the files' names in place of rows and functions of Python.

    Raises:
        UserError: For rows that no file can hold, and for a function that cannot be written.
    """
    known = recipe_keys()
    named = dict(keys)
    for key, value in keys.items():
        is_code = key in known and known[key].is_python_name
        if is_code and isinstance(value, Mapping):
            named[key] = {name: _name_code(key, each) for name, each in value.items()}
        elif key == "environment":
            named[key] = _name_code(key, value)
        if key == "environment" or isinstance(value, str | Mapping | None):
            continue  # no list: the reader says what is wrong with it
        if key in NESTED:
            named[key] = [_name_source(key, each) for each in _listed(value)]
        elif is_code:
            codes = value if isinstance(value, list | tuple) else [value]
            named[key] = [_name_code(key, each) for each in codes]
    return named


def _listed(value: Any) -> Sequence[Any]:
    """The value as a list of sources: one alone is such a list, and so is a list of rows."""
    if not isinstance(value, list | tuple):
        return [value]
    return [value] if value and all(map(_is_row, value)) else value


def _is_row(value: Any) -> bool:
    """Whether a value is a row of data, not an entry of `datasets` or a data set's splits."""
    if not isinstance(value, Mapping) or {"path", "function"} & {*value}:
        return False
    return not any(hasattr(each, "to_parquet") for each in value.values())  # a dict of splits


def _name_source(key: str, source: Any) -> Any:
    """Returns a source with files' names in place of rows and functions of Python."""
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
    return {"path": _write_rows(key, source)} if _is_table(source) else source


def _is_table(value: Any) -> bool:
    """Whether a value is rows: a `datasets.Dataset`, a data frame or a list."""
    return hasattr(value, "to_parquet") or isinstance(value, list | tuple)


def _write_rows(key: str, rows: Any) -> str:
    """Writes a `datasets.Dataset`, a data frame or a list of mappings; returns the file's path."""
    if hasattr(rows, "to_parquet"):
        content = io.BytesIO()
        rows.to_parquet(content)
        return _keep("rows", ".parquet", content.getvalue())
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
    return _keep("rows", ".jsonl", "".join(f"{line}\n" for line in lines).encode())


def _name_code(key: str, code: Any) -> Any:
    """Returns the name, FILE.py:NAME, of a function or class.

    One that no other process can import is written to a file first. Anything else stays as it is.
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
    package, _, _ = module.__name__.partition(".")
    folder = Path(sys.modules[package].__path__[0]).parent
    text = IMPORTED.format(
        name=name,
        place=LOAD_RECIPE,
        hash=hashlib.sha256(Path(file).read_bytes()).hexdigest(),
        folder=str(folder),
        module=module.__name__,
    )
    return f"{_keep(name, '.py', text.encode())}:{name}"


def _write_pickled(key: str, code: Any, name: str) -> str:
    try:
        pickled = _pickle(code)
    except Exception as error:  # whatever an object says of itself
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
    return f"{_keep(name, '.py', text.encode())}:{name}"


def _pickle(code: Any) -> bytes:
    """Pickles code by value, with the globals that it reads.

    The bytes are the same in every process, and wherever the code was defined.
    """
    import dill
    from dill import detect

    class Pickler(dill.Pickler):  # type: ignore[misc]
        dispatch = dill.Pickler.dispatch.copy()

    save = Pickler.dispatch[CodeType]

    def save_code(pickler: Any, given: CodeType) -> None:
        save(pickler, _move(given, given.co_firstlineno))

    find_globals = detect.globalvars

    def find_in_order(*arguments: Any, **keys: Any) -> Record:
        return dict(sorted(find_globals(*arguments, **keys).items()))

    Pickler.dispatch[CodeType] = save_code
    content = io.BytesIO()
    detect.globalvars = find_in_order  # dill's order is a set's, another in each process
    try:
        Pickler(content, recurse=True).dump(code)
    finally:
        detect.globalvars = find_globals
    return content.getvalue()


def _move(code: CodeType, first_line: int) -> CodeType:
    """Returns the code as if its first line were line 1 of no file.

    A notebook's cell has another file and other lines in each session.
    """
    if code.co_filename == NO_FILE:
        return code  # within code that was moved
    return code.replace(
        co_filename=NO_FILE,
        co_firstlineno=code.co_firstlineno - first_line + 1,
        co_consts=tuple(
            _move(each, first_line) if isinstance(each, CodeType) else each
            for each in code.co_consts
        ),
    )


def write_prompts(count: int) -> str:
    """Writes as many empty prompts, for an environment that asks itself; returns the file's path.

    Each has its number, so that none is another's duplicate.
    """
    empty = [{"role": "user", "content": ""}]
    lines = [json.dumps({"prompt": empty, "row": number}) for number in range(count)]
    return _keep("prompts", ".jsonl", "".join(f"{line}\n" for line in lines).encode())


def _keep(name: str, ending: str, content: bytes) -> str:
    """Writes a file of this content, unless it is there; returns its path."""
    folder = find_cache("given")
    path = folder / f"{name}-{hashlib.sha256(content).hexdigest()[:16]}{ending}"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(path, content)
    return str(path)
