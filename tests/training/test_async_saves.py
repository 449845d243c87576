"""The loop waits, before an update, for an async save that is still copying: a checkpoint holds its own step's state."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from finetune.checkpoint import save as saving
from finetune.config.accelerate_file import read_sharding
from finetune.config.reader import read_recipe
from finetune.files.tensors import read, read_folder
from finetune.run import fine_tune


def tensors_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    folders = [checkpoint / "model", checkpoint / "optimizer"]
    return {
        f"{folder.name}/{name}": read(tensor)
        for folder in folders
        for name, tensor in read_folder(folder).items()
    }


def test_a_slow_copy_is_not_overtaken_by_the_next_update(
    tiny_recipe: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = {}
    copied = saving.copy_to_host

    def slowly_copied(*arguments: Any) -> Any:
        time.sleep(0.5)
        return copied(*arguments)

    monkeypatch.setattr(saving, "copy_to_host", slowly_copied)
    for name, asynchronous in (("in-the-loop", False), ("behind-it", True)):
        keys = {
            "async_save": asynchronous,
            "save_steps": 1,
            "save_total_limit": 9,
            "export_at_end": False,
        }
        recipe = tiny_recipe(name, max_steps=3, output_dir=str(tmp_path / name), **keys)
        fine_tune(read_recipe(str(recipe)), read_sharding("single", None, os.environ))
        saved[name] = tensors_of(tmp_path / name / "checkpoints" / "step-00000001")
    expected, got = saved.values()
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], expected[name]) for name in expected)
