"""Both parsers of YAML read the same: libyaml's, which is used where it is there, and PyYAML's own."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from finetune.config import yaml_file
from tests.ranks import ROOT

fast = pytest.mark.skipif(not yaml.__with_libyaml__, reason="PyYAML without libyaml")
PARTS = [
    "a: ",
    "b:",
    "- ",
    "\n",
    "\n  ",
    "{",
    "}",
    "[",
    "]",
    ", ",
    "1",
    "2e-5",
    "010",
    "1:30",
    "~",
    "true",
    "'",
    '"',
    "#",
    " ",
    "&x ",
    "*x",
]
PARTS += [
    "|",
    ">",
    "!!int ",
    "? ",
    "é",
    "\\n",
    "---\n",
    "0x1f",
    ".5",
    "null",
    "yes",
    "2024-01-02",
    "<<: ",
    "%",
    "@",
    "\t",
]


def compose(text: str, loader: Any) -> Any:
    """What a parser reads, with its lines; None where it refuses it."""
    try:
        return describe(yaml.compose(text, Loader=loader))
    except (yaml.YAMLError, RecursionError):
        return None


def describe(node: yaml.Node | None) -> Any:
    if node is None:
        return "nothing"
    line = node.start_mark.line
    if isinstance(node, yaml.ScalarNode):  # what is not written has no line of its own
        return node.tag, node.value, line if node.value else None
    if isinstance(node, yaml.SequenceNode):
        return node.tag, [describe(each) for each in node.value], line
    return node.tag, [(describe(key), describe(value)) for key, value in node.value], line


@fast
@given(st.lists(st.sampled_from(PARTS), max_size=12).map("".join))
def test_what_both_parsers_take_they_read_alike(text: str) -> None:
    for of_c, of_python in (
        (yaml_file._FastLoader, yaml_file._Loader),
        (yaml_file._FastForeignLoader, yaml_file._ForeignLoader),
    ):
        by_c = compose(text, of_c)
        by_python = compose(text, of_python)
        assert by_c == by_python or None in (by_c, by_python)


@fast
@pytest.mark.parametrize("folder", ["recipes", "accelerate_configs", "peer_configs"])
def test_files_are_read_alike(folder: str, shared: Path) -> None:
    paths = [*(shared if folder == "peer_configs" else ROOT).glob(f"{folder}/**/*.y*ml")]
    assert paths
    for path in paths:
        text = path.read_text()
        by_c = compose(text, yaml_file._FastForeignLoader)
        assert by_c == compose(text, yaml_file._ForeignLoader), path


@given(st.text(alphabet="0123456789+-.eExX_:infaN~y ", max_size=8))
@example("1e5")
@example("123e456")
@example("010")
def test_text_that_looks_like_a_number_reads_back_as_text(text: str) -> None:
    """By YAML 1.2, as this package reads it, and by YAML 1.1, as PyYAML does."""
    written = yaml_file.write_yaml({"a": text, "b": [text, {text: 1}]}, default_flow_style=True)
    expected = {"a": text, "b": [text, {text: 1}]}
    assert yaml.safe_load(written) == expected
    entry, problems = yaml_file.read_value(written, "key", "here")
    assert (entry.value, problems) == (expected, [])
