"""What tests of conversions share: a file of some keys, converted, and all that is said of it."""

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from finetune.convert.conversion import Conversion, convert_file

Convert = Callable[..., Conversion]


@pytest.fixture
def convert(tmp_path: Path) -> Convert:
    """Converts a file of some keys; `text` stands before them."""

    def made(file: dict[str, object], text: str = "", **keys: object) -> Conversion:
        path = tmp_path / "theirs.yaml"
        path.write_text(text + yaml.safe_dump(file | keys))
        return convert_file(path)

    return made


def said(conversion: Conversion) -> str:
    return "\n".join([*conversion.differences, *conversion.remarks])
