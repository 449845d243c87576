"""Text files that are there whole or as they were before: what reads them may be running, and the disk may be full."""

import os
from pathlib import Path


def replace_text(path: Path, text: str) -> None:
    """Writes `text` beside `path` and gives it that name. A link stays one, and a device (/dev/stdout) is written to.

    Raises `OSError` where that fails; then `path` is what it was.
    """
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
        return
    target = path.resolve()
    aside = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        aside.write_text(text, encoding="utf-8")
        aside.replace(target)
    except OSError as error:
        error.filename = str(path)  # of a write the system names no file, and nobody knows the one aside
        raise
    finally:
        aside.unlink(missing_ok=True)
