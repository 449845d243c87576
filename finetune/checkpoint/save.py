"""Saving a checkpoint: every rank writes its shards, rank 0 publishes the folder; blocking, or in a
thread.
"""

import copy
import json
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from finetune.checkpoint.folders import (
    make_staging,
    prune,
    publish,
    refuse_small_disk,
    staging_folder,
    step_folder,
)
from finetune.checkpoint.manifest import (
    MODEL,
    OPTIMIZER,
    STATE,
    Manifest,
    Progress,
    complete,
    hash_recipe,
)
from finetune.checkpoint.shards import (
    TensorShard,
    copy_to_host,
    count_parameters,
    encode_file,
    get_model_state,
    get_optimizer_state,
    list_shards,
    record_event,
    refuse_different_replicas,
    reserve_on_host,
    select_tensors,
)
from finetune.config.reader import to_dict
from finetune.config.schema import Model, Recipe, compute_global_batch_size
from finetune.constants import COMPUTE_DTYPE, GENERATION_FILE, PROCESSOR_FILES, read_versions
from finetune.distributed.model_parts import has_other_parts, unwrap
from finetune.distributed.pipeline import find_pipeline
from finetune.distributed.world import RankGroup, World
from finetune.errors import UserError
from finetune.files import durable
from finetune.files.json_files import load_json
from finetune.files.network import find_local_folder
from finetune.files.phases import Phases

GENERATION_TOKENS = ("bos_token", "eos_token", "pad_token")  # whose ids generation_config.json has


class Saver:
    """Writes the checkpoints of one run. Every rank has one and makes the same calls.

    With `async_save` a thread copies the state to host memory, then writes and publishes it while
    training continues. The copy must end before the next update, so the loop calls `before_update`;
    the next save waits for this one to be published. A failure in the thread is raised by the next
    `save` or `finish`; until then `has_failed` is true.
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
        # of the method, after so many steps
        describe_files: Callable[[int], Mapping[str, bytes]] = lambda step: {},
        carried_bytes: int = 0,  # of the base, which the export will hold beside the model
        phases: Phases | None = None,
    ) -> None:
        self.run_folder = run_folder
        self.model = model
        self.optimizer = unwrap_optimizer(optimizer)
        self.world = world
        self.recipe = recipe
        self.inputs = inputs or {}
        wanted = recipe.checkpoint.async_save
        # else the copy on the host would hold it whole
        is_in_memory = recipe.optimization.optim_offload == "none"
        if wanted is None:
            self.is_async = world.device.type == "cuda" and is_in_memory
        else:
            self.is_async = wanted
        if dist.is_initialized():
            group = dist.new_group(backend="gloo", timeout=world.collective_timeout)
        else:
            group = None
        self._ranks = RankGroup(world, group)
        if world.is_main:
            self._descriptions = describe_model(model, recipe, tokenizer)
        else:
            self._descriptions = {}
        self._describe_files = describe_files
        self._carried_bytes = carried_bytes
        self._phases = phases or Phases()
        self._files: Mapping[str, bytes] = {}  # of the running save
        self._host_copies: dict[str, torch.Tensor] = {}  # overwritten by every async save
        self._thread: threading.Thread | None = None
        self._is_copied = threading.Event()
        self._failure: BaseException | None = None

    def __enter__(self) -> "Saver":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.finish()
        elif self._thread is not None:
            # a save that has started is published; the error that ended the loop is raised
            self._thread.join()

    def save(self, progress: Progress) -> None:
        """Publishes the checkpoint of `progress.step` and prunes older ones; an async save returns
        before that.

        Raises `UserError` on every rank where any of them cannot write, or where replicas of the
        model are not equal; then nothing has been published or pruned.
        """
        with self._phases.timed("save"):
            self._save(progress)

    def _save(self, progress: Progress) -> None:
        self.finish()
        if self.world.is_main:
            self._files = self._describe_files(progress.step)
        else:
            self._files = {}
        scaler = self.world.accelerator.scaler
        progress = replace(progress, scaler=scaler.state_dict() if scaler is not None else None)
        shards = self._shards()
        refuse_different_replicas(shards, progress.step, self._ranks)
        shards = [shard for shard in shards if shard.is_first_copy]
        if not self.is_async:
            self._write(progress, shards)
            return
        self._is_copied.clear()
        event = record_event(self.world.device)
        self._thread = threading.Thread(
            target=self._write_in_thread, args=(progress, shards, event), daemon=True, name="save"
        )
        self._thread.start()

    def before_update(self) -> None:
        """Waits until an async save has copied the parameters. Call it before they change."""
        if self._thread is not None and not self._is_copied.is_set():
            with self._phases.timed("save"):
                self._is_copied.wait()

    @property
    def has_failed(self) -> bool:
        """Whether an async save of this rank has failed; `finish` raises what happened."""
        return self._failure is not None

    def finish(self) -> None:
        """Waits for an async save to be published. Raises what made it fail."""
        if self._thread is not None:
            with self._phases.timed("save"):
                self._thread.join()
            self._thread = None
        if self._failure is not None:
            failure = self._failure
            self._failure = None
            raise failure

    def check_save(self, steps: int, steps_per_epoch: int | None = None) -> int:
        """Writes the real state into a staging folder and removes it, so that a run that cannot
        save does not start.

        `steps`: the run's last step; `steps_per_epoch` where it is known. Returns the checkpoint's
        size in bytes. Raises `UserError` where it cannot be written, or the disk is too small for
        the checkpoints and the export that the run will make.
        """
        with self._phases.timed("trial save"):
            return self._check_save(steps, steps_per_epoch)

    def _check_save(self, steps: int, steps_per_epoch: int | None) -> int:
        had_state = bool(self.optimizer.state)
        shards = [shard for shard in self._shards() if shard.is_first_copy]
        size = self._stage(Progress(), shards, is_published=False)
        if self.is_async:
            self._reserve(list(shards))
        # made in order to be named; its memory is free again until the first update
        if not had_state:
            self.optimizer.state.clear()
        keys = steps, size, self._count_parameters(), steps_per_epoch, self._carried_bytes
        self._ranks.on_main(lambda: refuse_small_disk(self.run_folder, self.recipe, *keys))
        return size

    def _reserve(self, shards: list[TensorShard]) -> None:
        """Starts to allocate the host's copies: the first save would stop training for it."""
        self._is_copied.set()
        self._thread = threading.Thread(
            target=reserve_on_host, args=(shards, self._host_copies), daemon=True, name="reserve"
        )
        self._thread.start()

    def _count_parameters(self) -> int:
        """Counts the parameters of the whole model, all stages. All ranks call it."""
        by_rank: list[int] = self._ranks.on_all(lambda: count_parameters(self.model))
        return sum(by_rank[:: self.world.stage_size])

    def _shards(self) -> list[TensorShard]:
        """Lists this rank's shards; it writes those with `is_first_copy`."""
        parts = {
            MODEL: get_model_state(self.model, self.optimizer),
            OPTIMIZER: select_tensors(get_optimizer_state(self.model, self.optimizer)),
        }
        stages = self.world.stages
        pipeline = find_pipeline(unwrap(self.model))
        if pipeline:
            copied = tuple(f"{name}." for name in pipeline.copied)
        else:
            copied = ()
        shards = []
        for part, tensors in parts.items():
            for shard in list_shards(tensors, part, stages):
                is_copied = f"{shard.name}.".removeprefix("state.").startswith(copied)
                shards.append(replace(shard, is_first_copy=False) if is_copied else shard)
        return shards

    def _write_in_thread(self, progress: Progress, shards: list[TensorShard], event: Any) -> None:
        try:
            try:
                copies = copy_to_host(shards, self._host_copies, event, self.world.device)
            finally:
                self._is_copied.set()
            self._write(progress, copies)
        except BaseException as failure:  # raised again by `finish`
            self._failure = failure

    def _write(self, progress: Progress, shards: list[TensorShard]) -> None:
        started = time.perf_counter()
        try:
            self._stage(progress, shards, is_published=True)
            self._phases.add("publication", time.perf_counter() - started, progress.step)
        except UserError as error:
            published = step_folder(self.run_folder, progress.step)
            if published.exists():
                outcome = f"{published} exists"
            else:
                outcome = "nothing was published"
            raise UserError(
                f"the save of step {progress.step} failed, and {outcome}: {error}"
            ) from error

    def _stage(self, progress: Progress, shards: list[TensorShard], is_published: bool) -> int:
        """Stages, verifies and publishes (or removes) a checkpoint; returns its size in bytes."""
        staging = staging_folder(self.run_folder, progress.step)
        try:
            return self._fill_and_publish(staging, progress, shards, is_published)
        except Exception:
            if self.world.is_main:  # it is not published any more, and would keep a full disk full
                durable.remove_tree(staging, ignore_errors=True)
            raise

    def _fill_and_publish(
        self, staging: Path, progress: Progress, shards: list[TensorShard], is_published: bool
    ) -> int:
        """Writes the files of all ranks, then the manifest, and last gives the folder its name.

        All ranks call it. Returns the checkpoint's size in bytes.
        """
        ranks = self._ranks
        ranks.on_main(lambda: make_staging(staging))
        entries_by_rank = ranks.on_all(lambda: write_shards(staging, shards, self.world))

        def finish() -> int:
            manifest = self._complete(staging, progress, entries_by_rank)
            if is_published:
                self._publish_and_prune(staging, progress)
            else:
                durable.remove_tree(staging)
            return manifest.bytes

        size: int = ranks.on_main(finish)
        return size

    def _complete(
        self, staging: Path, progress: Progress, entries_by_rank: list[dict[str, dict[str, Any]]]
    ) -> Manifest:
        """Writes the files beside the shards, and last the manifest of all. Rank 0 calls it.

        `entries_by_rank`: what `write_shards` has returned on each rank.
        """
        state = describe_state(progress, self.recipe, self.world, self.inputs)
        state_json = json.dumps(state, indent=1).encode()
        contents = {**self._descriptions, **self._files, STATE: state_json}
        entries = {name: entry for of_rank in entries_by_rank for name, entry in of_rank.items()}
        for name, content in contents.items():
            entries[name] = durable.write_file(staging / name, [content])
        manifest = Manifest(
            step=progress.step,
            layout=self.world.sharding.layout,
            ranks=self.world.size,
            recipe_sha256=hash_recipe(to_dict(self.recipe)),
            packages=dict(read_versions()),
            files=entries,
        )
        complete(staging, manifest)
        return manifest

    def _publish_and_prune(self, staging: Path, progress: Progress) -> None:
        """Gives the folder its name, and removes the checkpoints that the recipe does not keep."""
        publish(self.run_folder, staging, progress.step)
        keys = self.recipe.checkpoint
        problems = prune(
            self.run_folder,
            progress.step,
            keys.save_total_limit,
            keys.keep_every_steps,
            best_step=progress.best_step if keys.keep_best_checkpoint else None,
        )
        for problem in problems:
            print(problem, flush=True)


def write_shards(
    staging: Path, shards: list[TensorShard], world: World
) -> dict[str, dict[str, Any]]:
    """Writes this rank's files and reads them back. Returns the manifest's entries for them."""

    def write(part: str) -> tuple[str, dict[str, Any]]:
        name = f"{part}/pieces-{world.rank:05d}-of-{world.size:05d}.safetensors"
        entry = durable.write_file(
            staging / name, encode_file([shard for shard in shards if shard.part == part])
        )
        if durable.checksum(staging / name) != entry:
            raise UserError(
                f"{staging / name}: read back differently than written; the disk or its memory is "
                "faulty"
            )
        return name, entry

    # one file's bytes are copied while the disk writes the other
    with ThreadPoolExecutor(max_workers=2) as pool:
        return dict(pool.map(write, sorted({shard.part for shard in shards})))


def describe_model(
    model: torch.nn.Module, recipe: Recipe, tokenizer: PreTrainedTokenizerBase
) -> dict[str, bytes]:
    """The files beside the weights that an export needs: the configs of model, generation and LoRA,
    the tokenizer, and of a vision-language model the processors.
    """
    plain = unwrap(model)
    with tempfile.TemporaryDirectory() as name:
        made = Path(name)
        plain.config.save_pretrained(made)
        if getattr(plain, "generation_config", None) is not None:
            plain.generation_config.save_pretrained(made)
        if recipe.lora.use_peft:
            _in_order(plain.peft_config["default"]).save_pretrained(made)
        tokenizer.save_pretrained(made)
        base = recipe.model.model_name_or_path
        if base:
            base_folder = find_local_folder(base, recipe.model.model_revision)
        else:
            base_folder = None
        if base_folder is not None and (base_folder / GENERATION_FILE).is_file():
            # The base's own lists the tokens that end an answer.
            shutil.copyfile(base_folder / GENERATION_FILE, made / GENERATION_FILE)
        # As in training, a model from random weights has the processor beside its tokenizer.
        source = base or recipe.model.tokenizer_name_or_path
        folder = base_folder
        if not base:
            folder = find_local_folder(source) if source else None
        if folder is not None and has_other_parts(plain):
            for path in (folder / name for name in PROCESSOR_FILES):
                if path.is_file():
                    shutil.copyfile(path, made / path.name)
        add_token_ids(made / GENERATION_FILE, recipe.model, tokenizer)
        return {f"{MODEL}/{path.name}": path.read_bytes() for path in sorted(made.iterdir())}


def _in_order(config: Any) -> Any:
    """An adapter's config with lists in place of sets, which peft writes in another order in each
    process.
    """
    config = copy.copy(config)
    for name, value in list(vars(config).items()):
        if isinstance(value, set):
            setattr(config, name, sorted(value))
    return config


def add_token_ids(path: Path, model: Model, tokenizer: PreTrainedTokenizerBase) -> None:
    """Writes the ids of the recipe's `special_tokens` and `eot_tokens` into generation_config.json.

    Generation then stops at the recipe's EOS and `eot_tokens`, and where it stopped before. Without
    these two keys, the file stays as it is.

    Args:
        path: The generation_config.json; made where there is none.
        model: The recipe's section with both keys.
        tokenizer: The tokenizer, which has these tokens.
    """
    special = model.special_tokens or {}
    end_of_turn = list(model.eot_tokens)
    if not (special or end_of_turn):
        return
    content = load_json(path) if path.is_file() else {}
    ids = {
        f"{name}_id": tokenizer.convert_tokens_to_ids(special[name])
        for name in GENERATION_TOKENS
        if name in special
    }
    earlier_stops = content.get("eos_token_id", tokenizer.eos_token_id)
    if not isinstance(earlier_stops, list):
        earlier_stops = [earlier_stops]
    end_of_turn_ids = [tokenizer.convert_tokens_to_ids(token) for token in end_of_turn]
    stops = [ids.get("eos_token_id"), *end_of_turn_ids, *earlier_stops]
    ids["eos_token_id"] = list(dict.fromkeys(stop for stop in stops if stop is not None))
    content |= ids
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


def describe_state(
    progress: Progress, recipe: Recipe, world: World, inputs: Mapping[str, str]
) -> dict[str, Any]:
    """The content of state.json."""
    base = recipe.model.model_name_or_path
    return asdict(progress) | {
        "recipe": to_dict(recipe),
        "global_batch_size": compute_global_batch_size(recipe.batch, world.data_parallel.size),
        "data_fingerprint": inputs.get("datasets"),
        "inputs": {name: value for name, value in inputs.items() if name != "datasets"},
        "base_model": str(Path(base).resolve())
        if base is not None and Path(base).is_dir()
        else base,
        "compute_dtype": COMPUTE_DTYPE[world.sharding.mixed_precision],
    }


def unwrap_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """The torch optimizer inside Accelerate's wrapper."""
    inner: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)
    return inner
