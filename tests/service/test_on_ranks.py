"""A service's operations on two ranks, of DDP and of FSDP2, against those of one process."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.ranks import launch_ranks
from tests.training.layouts import write_config


def operate(folder: Path, shared: Path, layout: str, ranks: int) -> list[Any]:
    folder.mkdir()
    arguments = [
        str(folder),
        str(write_config(folder, layout)),
        str(shared / "models" / "stories260k"),
    ]
    script = Path(__file__).with_name("operations_on_ranks.py")
    launch_ranks(script, arguments, ranks=ranks, timeout=300).check()
    found: list[Any] = json.loads((folder / "found.json").read_text())
    return found


def flatten(value: Any) -> list[float]:
    if isinstance(value, dict):
        value = [value[name] for name in sorted(value) if name != "bytes"]
    if isinstance(value, list):
        return [number for each in value for number in flatten(each)]
    return [] if isinstance(value, str) else [float(value)]


@pytest.mark.slow
def test_two_ranks_give_the_numbers_of_one(shared: Path, tmp_path: Path) -> None:
    alone = operate(tmp_path / "alone", shared, "single", 1)
    for layout in ("ddp", "full_shard"):
        found = operate(tmp_path / layout, shared, layout, 2)
        assert flatten(found) == pytest.approx(flatten(alone), rel=2e-5, abs=2e-5)
        assert found[-1] == alone[-1] == "optim_step: no gradients; call forward_backward first"
        for state in ("0/3", "1/3"):
            ours, theirs = (
                load_file(tmp_path / place / "states" / state / "adapter_model.safetensors")
                for place in (layout, "alone")
            )
            for name, values in theirs.items():
                torch.testing.assert_close(ours[name], values, rtol=0, atol=2e-5)
