"""Prints the lowest versions that pyproject.toml admits, as constraints for pip: `python tests/lowest_versions.py [NAME==VERSION]`.

A NAME==VERSION given replaces that package's: of torch only some versions have a CPU build.
"""

import re
import sys
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

PYPROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"


def lowest_versions(dependencies: Sequence[str], replaced: Sequence[str] = ()) -> Iterator[str]:
    """`NAME==VERSION` for each dependency with a lower bound.

    >>> list(lowest_versions(["torch>=2.11", "peft>=0.19,<1", "pytest"], ["torch==2.13.0"]))
    ['torch==2.13.0', 'peft==0.19']
    """
    given = {text.split("==")[0]: text for text in replaced}
    for dependency in dependencies:
        bound = re.match(r"([A-Za-z0-9_.-]+)>=([0-9.]+)", dependency)
        if bound:
            yield given.get(bound[1], f"{bound[1]}=={bound[2]}")


if __name__ == "__main__":
    print(
        "\n".join(
            lowest_versions(
                tomllib.loads(PYPROJECT.read_text())["project"]["dependencies"], sys.argv[1:]
            )
        )
    )
