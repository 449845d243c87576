"""What goes wrong while two ranks save, one scenario after another; no rank may send a pickle. Started by test_save.py.

saving_on_ranks.py ROOT SLOW_SECONDS        ROOT holds model/ and recipe.yaml
"""

import errno
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.distributed import distributed_c10d
from transformers import AutoTokenizer

from finetune.checkpoint import folders, manifest, shards
from finetune.checkpoint import save as saving
from finetune.checkpoint.manifest import Progress
from finetune.checkpoint.resume import load_checkpoint
from finetune.checkpoint.save import Saver
from finetune.config.layout import Sharding
from finetune.config.reader import read_recipe
from finetune.config.schema import Recipe
from finetune.distributed.join import join, leave
from finetune.distributed.world import World
from finetune.errors import UserError
from finetune.files import durable
from tests.checkpoint.tiny_run import build, digest, train_step
from tests.ranks import free_port

SCENARIOS: list[Callable[["Run"], None]] = []


class Run:
    """A model that is being trained, and a folder for its checkpoints."""

    def __init__(self, root: Path, name: str, world: World) -> None:
        self.root, self.folder, self.world = root, root / name, world
        self.model, self.optimizer = build(str(root / "model"), False, world)
        self.tokenizer = AutoTokenizer.from_pretrained(root / "model")

    def train(self, step: int, saver: Saver | None = None) -> None:
        train_step(step, self.model, self.optimizer, self.world, saver)

    def saver(self, **overrides: Any) -> Saver:
        texts = [f"{key}={value}" for key, value in overrides.items()]
        recipe: Recipe = read_recipe(str(self.root / "recipe.yaml"), texts)
        return Saver(self.folder, self.model, self.optimizer, self.world, recipe, self.tokenizer)

    def digest(self) -> str:
        moments = shards.get_optimizer_state(self.model, self.optimizer.optimizer)
        return digest(shards.get_model_state(self.model) | shards.select_tensors(moments))

    def steps(self) -> list[int]:
        self.world.barrier()
        found = [step for step, _ in folders.list_checkpoints(self.folder)]
        self.world.barrier()
        return found


def scenario(function: Callable[[Run], None]) -> Callable[[Run], None]:
    SCENARIOS.append(function)
    return function


@scenario
def an_async_save_has_copied_the_state_before_the_update(run: Run) -> None:
    """Also where the copy is slow: the update waits for it."""
    real = saving.copy_to_host

    def slow(*arguments: Any) -> list[shards.TensorShard]:
        time.sleep(0.5)
        return real(*arguments)

    saving.copy_to_host = slow
    try:
        an_async_save_holds_the_state_of_its_own_step(run)
    finally:
        saving.copy_to_host = real


@scenario
def an_async_save_holds_the_state_of_its_own_step(run: Run) -> None:
    with run.saver(async_save="true") as saver:
        for step in range(3):
            run.train(step)
            then = run.digest()
            saver.save(Progress(step=step + 1))
            run.train(step + 100, saver)  # changes every tensor while the save is being written
            assert run.digest() != then
            saver.finish()
            assert (
                load_checkpoint(
                    folders.step_folder(run.folder, step + 1), run.model, run.optimizer, run.world
                ).step
                == step + 1
            )
            assert run.digest() == then


@scenario
def a_rehearsal_leaves_nothing_behind(run: Run) -> None:
    other = Run(run.root, "other", run.world)
    run.saver().check_save(steps=10)
    run.world.barrier()
    assert not run.optimizer.optimizer.state
    assert list(folders.checkpoints_folder(run.folder).iterdir()) == []
    run.train(0)
    other.train(0)
    assert run.digest() == other.digest()


@scenario
def a_disk_that_fails_at_any_file_publishes_nothing_on_any_rank(run: Run) -> None:
    run.train(0)
    run.saver().save(Progress(step=1))
    sound = folders.step_folder(run.folder, 1)
    written = [path.relative_to(sound) for path in sorted(sound.rglob("*")) if path.is_file()]
    assert len([name for name in written if name.suffix == ".safetensors"]) == 2 * run.world.size
    for call, number in (("write", errno.ENOSPC), ("fsync", errno.EIO)):
        for name in written:
            for asynchronous in ("false", "true"):
                saver = run.saver(async_save=asynchronous)
                with failing(call, number, name):
                    try:
                        saver.save(Progress(step=2))
                        if saver.is_async:
                            while run.world.sum(count(saver.has_failed)).item() < run.world.size:
                                time.sleep(0.001)
                        saver.finish()
                    except UserError as error:
                        assert os.strerror(number) in str(error) and name.name in str(error), error
                        assert "the save of step 2 failed, and nothing was published" in str(
                            error
                        ), error
                    else:
                        raise AssertionError(f"{call} of {name} failed, and nobody said so")
                assert run.steps() == [1]
                assert not folders.staging_folder(run.folder, 2).exists()
                assert manifest.find_damage(sound) == []
    run.saver().save(Progress(step=2))  # the disk is well again
    assert run.steps() == [1, 2]
    assert folders.find_newest_valid(run.folder) == folders.step_folder(run.folder, 2)


@scenario
def a_checkpoint_whose_name_the_disk_has_not_confirmed_is_reported_as_there(run: Run) -> None:
    published = folders.step_folder(run.folder, 1)
    real = durable.sync_folder

    def fail(path: Path) -> None:
        if path == published.parent and published.exists():
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(path)

    run.train(0)
    saver = run.saver(async_save="false")
    durable.sync_folder = fail
    try:
        saver.save(Progress(step=1))
    except UserError as error:
        assert (
            f"the save of step 1 failed, and {published} exists: {published}: renamed, but"
            in str(error)
        ), error
    else:
        raise AssertionError("the disk has not confirmed the name, and nobody said so")
    finally:
        durable.sync_folder = real
    assert manifest.find_damage(published) == []


@scenario
def all_wait_for_a_slow_rank(run: Run) -> None:
    real, publish, seconds = saving.write_shards, saving.publish, float(sys.argv[2])
    written = run.folder / "the slow rank has written"

    def slow(
        staging: Path, pieces: list[shards.TensorShard], world: World
    ) -> dict[str, dict[str, Any]]:
        time.sleep(seconds * world.rank)
        entries = real(staging, pieces, world)
        if world.rank == world.size - 1:
            written.touch()
        return entries

    def publish_after(*arguments: Any) -> None:
        assert written.exists(), "published before all ranks have written"
        publish(*arguments)

    saving.write_shards, saving.publish = slow, publish_after
    try:
        run.train(0)
        run.saver().save(Progress(step=1))
        assert written.exists() and folders.find_newest_valid(run.folder) == folders.step_folder(
            run.folder, 1
        )
    finally:
        saving.write_shards, saving.publish = real, publish


@scenario
def old_checkpoints_go_by_step_and_some_stay(run: Run) -> None:
    saver = run.saver(save_total_limit=2, save_steps=1, keep_every_steps=4)
    for step in (1, 2, 3, 4, 5, 6, 7):
        saver.save(Progress(step=step))
    assert run.steps() == [4, 6, 7]


@contextmanager
def failing(call: str, number: int, name: Path) -> Iterator[None]:
    """`os.write` or `os.fsync` fails on the file `name` of a staging folder, on the rank that writes it."""
    real = getattr(os, call)

    def fail(descriptor: int, *rest: Any) -> Any:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        if path.parts[-len(name.parts) :] == name.parts and ".staging" in str(path):
            raise OSError(number, os.strerror(number), str(path))
        return real(descriptor, *rest)

    setattr(durable.os, call, fail)
    try:
        yield
    finally:
        setattr(durable.os, call, real)


def count(flag: bool) -> Any:
    import torch

    return torch.tensor(int(flag))


def refuse_pickle(value: Any, *_: Any) -> Any:
    raise AssertionError(f"a pickle is sent to other ranks: {value!r:.300}")


def a_save_resumes_in_a_model_that_has_not_trained(run: Run) -> None:
    """As a run does: FSDP1 loads its optimizer state before the first step only."""
    with run.saver(async_save="true") as saver:
        run.train(0)
        then = run.digest()
        saver.save(Progress(step=1))
        run.train(100, saver)
        saver.finish()
    other = Run(run.root, "other-fsdp1", run.world)
    assert (
        load_checkpoint(
            folders.step_folder(run.folder, 1), other.model, other.optimizer, run.world
        ).step
        == 1
    )
    assert other.digest() == then != run.digest()


def main() -> None:
    distributed_c10d._object_to_tensor = (
        refuse_pickle  # of all_gather_object, broadcast_object_list and so on
    )
    layouts = {"fsdp2": SCENARIOS, "fsdp1": [a_save_resumes_in_a_model_that_has_not_trained]}
    for layout, scenarios in layouts.items():
        world = join(Sharding(layout=layout, use_cpu=True), timeout_seconds=60)
        for number, function in enumerate(scenarios):
            begun = time.monotonic()
            function(Run(Path(sys.argv[1]), f"{layout}-run{number}", world))
            world.barrier()
            print(f"{layout}: {function.__name__}: {time.monotonic() - begun:.1f} s", flush=True)
        # A store of its own for the next world: in the old one are the addresses of this world's groups.
        port = world.gather(free_port())[0]
        leave(world)
        os.environ["MASTER_PORT"] = str(port)


if __name__ == "__main__":
    main()
