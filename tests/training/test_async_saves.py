"""The loop waits, before an update, for an async save that is still copying: a checkpoint holds its own step's state."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from finetune.checkpoint import save as saving
from finetune.checkpoint.manifest import Progress
from finetune.checkpoint.shards import TensorShard, allocate_on_host
from finetune.config.accelerate_file import read_sharding
from finetune.config.layout import Sharding
from finetune.config.reader import read_recipe
from finetune.data.batches import StepBatch
from finetune.data.packing import StoredBatches
from finetune.distributed.world import World
from finetune.files.tensors import read, read_folder
from finetune.run import fine_tune
from finetune.training.watch import Watchdog


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


def test_the_threads_of_a_save_pin_memory_on_the_ranks_own_gpu(
    tiny_recipe: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each thread has a current device, as of CUDA at first GPU 0; a registration records which one it uses."""
    current = threading.local()
    used: list[tuple[str, torch.device]] = []

    class Runtime:
        def cudaHostRegister(self, *_: int) -> None:  # noqa: N802
            device = getattr(current, "device", torch.device("cuda", 0))
            used.append((threading.current_thread().name, device))

    def copied(shards: list[TensorShard], *_: Any) -> list[TensorShard]:
        allocate_on_host(on_gpu)
        return shards

    own = torch.device("cuda", 1)
    with FakeTensorMode():
        on_gpu = torch.empty(8, device=own)
    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: setattr(current, "device", device))
    monkeypatch.setattr(saving, "record_event", lambda _: None)
    monkeypatch.setattr(saving, "copy_to_host", copied)
    model = torch.nn.Linear(2, 2)
    world = World(1, 2, 1, 2, own, Sharding(layout="ddp"), cast(Any, SimpleNamespace(scaler=None)))
    recipe = read_recipe(str(tiny_recipe()))
    optimizer = torch.optim.SGD(model.parameters())
    saver = saving.Saver(tmp_path, model, optimizer, world, recipe, cast(Any, None))
    monkeypatch.setattr(saver, "_write", lambda *_: None)
    saver._reserve([TensorShard("model", "weight", (8,), (0,), on_gpu, is_first_copy=True)])
    saver.save(Progress(step=1))
    saver.finish()
    assert used == [("reserve", own), ("save", own)]


def test_a_message_about_a_hang_names_what_the_loop_waits_for(
    tiny_recipe: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each wait has time of its own: sampling a batch and publishing a save may take as long as a step."""
    doing: list[str] = []
    waits: dict[str, list[str]] = {"batch": [], "save": []}
    read, finish = StoredBatches.batches, saving.Saver.finish

    def batches(self: StoredBatches, *arguments: Any) -> Iterator[StepBatch]:
        for batch in read(self, *arguments):
            waits["batch"].append(doing[-1])
            yield batch

    def finished(self: saving.Saver) -> None:
        if self._thread is not None and self._thread.name == "save":
            waits["save"].append(doing[-1])
        finish(self)

    monkeypatch.setattr(Watchdog, "beat", lambda _, what: doing.append(what))
    monkeypatch.setattr(StoredBatches, "batches", batches)
    monkeypatch.setattr(saving.Saver, "finish", finished)
    keys = {"async_save": True, "save_steps": 1, "max_steps": 2, "export_at_end": False}
    recipe = tiny_recipe(output_dir=str(tmp_path / "run"), **keys)
    fine_tune(read_recipe(str(recipe)), read_sharding("single", None, os.environ))
    assert waits == {
        "batch": ["making the next batch"] * 2,
        "save": ["saving step 2", "finishing an async save"],
    }
