"""Saving: every rank stages its pieces, one rank publishes the whole. In the loop, or behind it in a thread."""

import json
import math
import shutil
import tempfile
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from datetime import timedelta
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from finetune import durable
from finetune.checkpoint import manifest as folder
from finetune.checkpoint import shards as state
from finetune.checkpoint.replicas import refuse_different_replicas
from finetune.constants import ITEMSIZE, global_batch_size
from finetune.distributed.collective import Ranks
from finetune.distributed.world import World
from finetune.errors import UserError
from finetune.export.publish import SPARE_BYTES
from finetune.hub import find_local_folder
from finetune.progress import Progress
from finetune.recipe.reader import as_written
from finetune.recipe.schema import Recipe
from finetune.units import counted, disk_size

PACKAGES = ("torch", "transformers", "accelerate", "peft", "safetensors")
GENERATION_FILE = "generation_config.json"


class Saver:
    """Writes the checkpoints of one run. Every rank has one, and calls it alike.

    With `async_save` a thread copies the state to host memory, then writes and publishes it while the loop goes on. The
    copy has time until the next update, so the loop calls `before_update`; the next save waits for the whole. What
    fails there is raised by the next `save` or `finish`; `has_failed` tells before.
    """

    def __init__(
        self,
        run_folder: Path,
        model: torch.nn.Module,
        optimizer: Any,
        world: World,
        recipe: Recipe,
        tokenizer: PreTrainedTokenizerBase,
        inputs: Mapping[str, str] | None = None,
    ) -> None:
        self.run_folder, self.model, self.optimizer = run_folder, model, plain_optimizer(optimizer)
        self.world, self.recipe, self.inputs = world, recipe, inputs or {}
        wanted = recipe.checkpoint.async_save
        self.is_async = world.device.type == "cuda" if wanted is None else wanted
        timeout = timedelta(seconds=recipe.run.timeout_seconds)
        group = dist.new_group(backend="gloo", timeout=timeout) if dist.is_initialized() else None
        self._ranks = Ranks(world, group)
        self._descriptions = descriptions(model, recipe, tokenizer) if world.is_main else {}
        self._host_copies: dict[str, torch.Tensor] = {}  # filled anew by every async save
        self._thread: threading.Thread | None = None
        self._is_copied = threading.Event()
        self._failure: BaseException | None = None

    def __enter__(self) -> "Saver":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.finish()
        elif self._thread is not None:
            self._thread.join()  # what was begun is published; what ended the loop is what is told

    def save(self, progress: Progress) -> None:
        """Publishes the checkpoint of `progress.step` and prunes older ones; an async save only begins to.

        Raises `UserError` on every rank where any of them cannot write, or where replicas of the model are not equal;
        then nothing has been published or pruned.
        """
        self.finish()
        scaler = self.world.accelerator.scaler
        progress = replace(progress, scaler=scaler.state_dict() if scaler is not None else None)
        pieces = self._pieces()
        refuse_different_replicas(pieces, progress.step, self._ranks)
        pieces = [piece for piece in pieces if piece.is_first_copy]
        if not self.is_async:
            self._write(progress, pieces)
            return
        self._is_copied.clear()
        now = state.moment(self.world.device)
        self._thread = threading.Thread(
            target=self._write_behind, args=(progress, pieces, now), daemon=True, name="save"
        )
        self._thread.start()

    def before_update(self) -> None:
        """To be called before the parameters change: waits until an async save has copied them."""
        if self._thread is not None:
            self._is_copied.wait()

    @property
    def has_failed(self) -> bool:
        """Whether an async save of this rank has failed; `finish` raises what happened."""
        return self._failure is not None

    def finish(self) -> None:
        """Waits for an async save to be published. Raises what made it fail."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def rehearse(self, steps: int) -> int:
        """Writes the real state into a staging folder and takes it away, so that a run that cannot save does not start.

        `steps`: the run's last step. Returns the checkpoint's size in bytes. Raises `UserError` where it cannot be
        written, or the disk is too small for the checkpoints and the export that the run will make.
        """
        is_fresh = not self.optimizer.state
        pieces = [piece for piece in self._pieces() if piece.is_first_copy]
        size = self._staged(Progress(), pieces, publish=False)
        if is_fresh:  # torch has made the moments in order to name them, at its step 1
            self.optimizer.state.clear()
        parameters = state.count_parameters(self.model)
        self._ranks.main(lambda: refuse_small_disk(self.run_folder, self.recipe, steps, size, parameters))
        return size

    def _pieces(self) -> list[state.Piece]:
        parts = {
            folder.MODEL: state.model_state(self.model),
            folder.OPTIMIZER: state.tensors_of(state.optimizer_state(self.model, self.optimizer)),
        }
        return [piece for part, tensors in parts.items() for piece in state.pieces_of(tensors, part)]

    def _write_behind(self, progress: Progress, pieces: list[state.Piece], now: Any) -> None:
        try:
            try:
                copies = state.copied_to_host(pieces, self._host_copies, now, self.world.device)
            finally:
                self._is_copied.set()
            self._write(progress, copies)
        except BaseException as failure:  # raised again by `finish`
            self._failure = failure

    def _write(self, progress: Progress, pieces: list[state.Piece]) -> None:
        try:
            self._staged(progress, pieces, publish=True)
        except UserError as error:
            raise UserError(
                f"the checkpoint of step {progress.step} was not written, and nothing published: {error}"
            ) from error

    def _staged(self, progress: Progress, pieces: list[state.Piece], publish: bool) -> int:
        """Stages, verifies and publishes (or takes away) a checkpoint; returns its size in bytes."""
        ranks, staging = self._ranks, folder.staging_folder(self.run_folder, progress.step)
        ranks.main(lambda: folder.make_staging(staging))
        receipts = ranks.all(lambda: write_pieces(staging, pieces, self.world))

        def end() -> int:
            content = json.dumps(describe(progress, self.recipe, self.world, self.inputs), indent=1).encode()
            written = {name: entry for receipt in receipts for name, entry in receipt.items()}
            for name, text in (self._descriptions | {folder.STATE: content}).items():
                written[name] = durable.write_file(staging / name, [text])
            manifest = folder.Manifest(
                step=progress.step,
                layout=self.world.sharding.layout,
                ranks=self.world.size,
                recipe_sha256=folder.recipe_sha256(plain_recipe(self.recipe)),
                packages={name: metadata.version(name) for name in PACKAGES},
                files=written,
            )
            folder.complete(staging, manifest)
            if publish:
                folder.publish(self.run_folder, staging, progress.step)
                self._prune(progress)
            else:
                durable.remove_tree(staging)
            return manifest.bytes

        size: int = ranks.main(end)
        return size

    def _prune(self, progress: Progress) -> None:
        """Removes the checkpoints that `progress.step` replaces. One that cannot be removed is reported and stays."""
        kept = self.recipe.checkpoint
        best = progress.best_step if kept.keep_best_checkpoint else None
        for problem in folder.prune(self.run_folder, progress.step, kept.save_total_limit, kept.keep_every_steps, best):
            print(problem, flush=True)


def write_pieces(staging: Path, pieces: list[state.Piece], world: World) -> dict[str, dict[str, Any]]:
    """Writes this rank's files and reads them back. Returns the manifest's entries for them."""

    def write(part: str) -> tuple[str, dict[str, Any]]:
        name = f"{part}/pieces-{world.rank:05d}-of-{world.size:05d}.safetensors"
        entry = durable.write_file(staging / name, state.file_chunks([piece for piece in pieces if piece.part == part]))
        if durable.checksum(staging / name) != entry:
            raise UserError(f"{staging / name}: did not read back as it was written; the disk or its memory is faulty")
        return name, entry

    with ThreadPoolExecutor(max_workers=2) as pool:  # one file's bytes are copied while the disk works on the other's
        return dict(pool.map(write, sorted({piece.part for piece in pieces})))


def descriptions(model: torch.nn.Module, recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> dict[str, bytes]:
    """What makes a checkpoint complete in itself, so that it can be exported: the model's config, the tokenizer, LoRA's config."""
    plain = state.plain_model(model)
    with tempfile.TemporaryDirectory() as name:
        made = Path(name)
        plain.config.save_pretrained(made)
        if getattr(plain, "generation_config", None) is not None:
            plain.generation_config.save_pretrained(made)
        if recipe.lora.use_peft:
            plain.peft_config["default"].save_pretrained(made)
        tokenizer.save_pretrained(made)
        base = recipe.model.model_name_or_path
        base_folder = find_local_folder(base, recipe.model.model_revision) if base else None
        if base_folder is not None and (base_folder / GENERATION_FILE).is_file():
            shutil.copyfile(base_folder / GENERATION_FILE, made / GENERATION_FILE)  # it knows what ends an answer
        return {f"{folder.MODEL}/{path.name}": path.read_bytes() for path in sorted(made.iterdir())}


def describe(progress: Progress, recipe: Recipe, world: World, inputs: Mapping[str, str]) -> dict[str, Any]:
    """What state.json says."""
    base = recipe.model.model_name_or_path
    return asdict(progress) | {
        "recipe": plain_recipe(recipe),
        "global_batch_size": global_batch_size(recipe.batch, world.size),
        "data_fingerprint": inputs.get("datasets"),
        "inputs": {name: value for name, value in inputs.items() if name != "datasets"},
        "base_model": str(Path(base).resolve()) if base is not None and Path(base).is_dir() else base,
    }


def refuse_small_disk(run_folder: Path, recipe: Recipe, steps: int, checkpoint_bytes: int, parameters: int) -> None:
    """Raises `UserError` where the disk under `run_folder` cannot hold what the run will write there.

    One checkpoint more than are kept, since an old one goes only when the new one is there; and the export, with what it
    wants to be free beside it.
    """
    wanted = recipe.checkpoint
    saves = math.ceil(steps / wanted.save_steps) if wanted.save_steps else 1
    kept = saves if wanted.save_total_limit is None else min(saves, wanted.save_total_limit + 1)
    new = max(1, kept - len(folder.published(run_folder)))
    export = parameters * ITEMSIZE[wanted.export_dtype or recipe.model.dtype] if wanted.export_at_end else 0
    spare = SPARE_BYTES if export else 0
    needed, free = new * checkpoint_bytes + export + spare, shutil.disk_usage(run_folder).free
    if needed > free:
        fewer = "lower save_total_limit, " if wanted.save_total_limit != 1 and kept > 1 else ""
        raise UserError(
            f"{run_folder}: the run will write {counted(new, 'checkpoint')} of {disk_size(checkpoint_bytes)} and an export of "
            f"{disk_size(export)}{f' (with {disk_size(spare)} to spare)' if spare else ''}, but {disk_size(free)} are free here; {fewer}make room, or set another output_dir"
        )


def plain_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """The torch optimizer inside Accelerate's wrapper."""
    inner: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)
    return inner


def plain_recipe(recipe: Recipe) -> dict[str, Any]:
    """The recipe as JSON says it, every key filled in."""
    plain: dict[str, Any] = json.loads(json.dumps(as_written(recipe), default=list))
    return plain
