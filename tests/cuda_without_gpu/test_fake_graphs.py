"""Compiled layers on CUDA: one graph of a layer and one of the loss, forwards and backwards, without a break.

Dynamo and AOTAutograd are torch's own, on fake tensors. Not covered: what inductor makes of the graphs, since its lowering to
Triton asks CUDA's driver.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import run_python

pytestmark = pytest.mark.slow
CASES = ("one process", "checkpointed", "lora", "mixtral", "gemma2", "fp8")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The graphs of each case, or its error."""
    results = tmp_path_factory.mktemp("fake-graphs") / "results.json"
    done = run_python(
        [str(Path(__file__).with_name("fake_graphs.py")), str(results), *CASES], timeout=400
    )
    assert done.returncode == 0, done.stderr
    read: dict[str, Any] = json.loads(results.read_text())
    return read


@pytest.mark.parametrize("name", CASES)
def test_a_layer_and_the_loss_are_a_graph_each_on_cuda_without_a_break(
    found: Any, name: str
) -> None:
    assert "error" not in found[name], found[name].get("error")
    assert found[name] == {"graphs": 2, "breaks": {}}
