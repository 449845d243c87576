"""Saves checkpoints: every rank writes its shards, and rank 0 publishes the folder.

A save blocks training, or runs in a thread beside it.
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
from finetune.constants import COMPUTE_DTYPE, GENERATION_FILE, PROCESSOR_FILES, Names, read_versions
from finetune.distributed.model_parts import has_other_parts, unwrap
from finetune.distributed.pipeline import find_pipeline
from finetune.distributed.world import RankGroup, World
from finetune.errors import UserError
from finetune.files import durable
from finetune.files.json_files import load_json
from finetune.files.network import find_local_folder
from finetune.files.phases import Phases
from finetune.models.load import ModelSize

# names of special tokens whose ids generation_config.json has, as bos_token_id and so on
GENERATION_TOKENS = ("bos_token", "eos_token", "pad_token")


class Saver:
    """Writes the checkpoints of one run. Every rank has a saver and makes the same calls.

    With `async_save`, a thread copies the state to host memory, then writes and publishes it while
    training continues. The loop calls `before_update`, which waits until the copy is complete. The
    next save waits until this one is published. If the thread fails, `has_failed` becomes true, and
    the next `save` or `finish` raises the error.

    Args:
        run_folder: The run's folder.
        model: The model in training.
        optimizer: The model's optimizer, which Accelerate may have wrapped.
        world: The ranks.
        recipe: The recipe.
        tokenizer: The tokenizer, which is written into checkpoints.
        inputs: What `fingerprint_inputs` returned.
        describe_files: Number of a step -> the method's own files for a checkpoint after that step,
            as name -> content. Called on rank 0.
        size: The numbers of the model's parameters; None: room for an export is not asked for.
        phases: Measures the time of saves.
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
        describe_files: Callable[[int], Mapping[str, bytes]] = lambda step: {},
        size: ModelSize | None = None,
        phases: Phases | None = None,
    ) -> None:
        self.run_folder = run_folder
        self.model = model
        self.optimizer = unwrap_optimizer(optimizer)
        self.world = world
        self.recipe = recipe
        self.inputs = inputs or {}
        self.is_async = recipe.saves_async(world.device.type)
        group = None  # the save's thread needs a group of its own
        if dist.is_initialized():
            group = dist.new_group(backend="gloo", timeout=world.collective_timeout)
        self._ranks = RankGroup(world, group)
        self._descriptions: Mapping[str, bytes] = {}

        def describe() -> None:
            self._descriptions = describe_model(model, recipe, tokenizer)

        self._ranks.on_main(describe)
        self._describe_files = describe_files
        self._size = size
        self._phases = phases or Phases()
        self._files: Mapping[str, bytes] = {}  # from `describe_files`, for the running save
        self._host_copies: dict[str, torch.Tensor] = {}  # memory that every async save uses again
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
            # Lets a running save end, without `finish`: its error would replace the loop's error.
            self._thread.join()

    def save(self, progress: Progress) -> None:
        """Publishes the checkpoint of `progress.step` and prunes older ones.

        An async save only starts this, and the next `save` or `finish` raises its error.

        Raises `UserError` if replicas of the model are not equal, if an async save before this one
        failed or, unless this one is async, if a rank cannot write. Then nothing of this step is
        published or pruned.
        """
        with self._phases.timed("save"):
            self.finish()

            def describe() -> None:
                self._files = self._describe_files(progress.step)

            self._ranks.on_main(describe)
            scaler = self.world.accelerator.scaler
            scaler_state = scaler.state_dict() if scaler is not None else None
            progress = replace(progress, scaler=scaler_state)
            all_shards = self._list_own_shards()
            refuse_different_replicas(all_shards, progress.step, self._ranks)
            shards = [shard for shard in all_shards if shard.is_first_copy]
            if not self.is_async:
                self._write(progress, shards)
                return
            self._is_copied.clear()
            event = record_event(self.world.device)
            self._start_thread("save", lambda: self._write_in_thread(progress, shards, event))

    def before_update(self) -> None:
        """Waits until an async save has copied the state. Call it before parameters change."""
        if self._thread is not None and not self._is_copied.is_set():
            with self._phases.timed("save"):
                self._is_copied.wait()

    @property
    def has_failed(self) -> bool:
        """Whether an async save of this rank has failed; `finish` raises its error."""
        return self._failure is not None

    def finish(self) -> None:
        """Waits until an async save is published. Raises its error if it failed."""
        if self._thread is not None:
            with self._phases.timed("save"):
                self._thread.join()
            self._thread = None
        if self._failure is not None:
            failure = self._failure
            self._failure = None
            raise failure

    def check_save(self, steps: int, steps_per_epoch: int | None = None) -> int:
        """Writes and removes a checkpoint on trial, so that a run that cannot save never starts.

        All ranks call it. An async saver also starts to allocate its memory on the host.

        Args:
            steps: The run's last step.
            steps_per_epoch: The number of steps in an epoch; None if it is not known.

        Returns:
            The size of a checkpoint in bytes.

        Raises:
            UserError: If it cannot be written, or the disk is too small for the run's checkpoints
                and its export.
        """
        with self._phases.timed("trial save"):
            had_state = bool(self.optimizer.state)
            shards = [shard for shard in self._list_own_shards() if shard.is_first_copy]
            checkpoint_bytes = self._stage(Progress(), shards, is_published=False)
            if self.is_async:
                self._reserve(list(shards))
            if not had_state:
                # Listing the shards has made the state, whose memory is not needed before the first
                # update.
                self.optimizer.state.clear()
            self._ranks.on_main(
                lambda: refuse_small_disk(
                    self.run_folder,
                    self.recipe,
                    steps,
                    checkpoint_bytes,
                    steps_per_epoch,
                    self._size,
                )
            )
            return checkpoint_bytes

    def _reserve(self, shards: list[TensorShard]) -> None:
        """Starts a thread that allocates host memory for async saves.

        Otherwise training would stop for it at the first save. The thread empties `shards`.
        """
        self._is_copied.set()  # no update has to wait for this thread
        self._start_thread("reserve", lambda: reserve_on_host(shards, self._host_copies))

    def _start_thread(self, name: str, action: Callable[[], None]) -> None:
        """Starts a thread that runs `action` with this rank's device as the current one.

        In a new thread the current device is the first GPU. To pin memory there, every rank would
        make a CUDA context on that GPU, which takes hundreds of MiB.
        """
        device = self.world.device

        def run() -> None:
            if device.type == "cuda":
                torch.cuda.set_device(device)
            action()

        self._thread = threading.Thread(target=run, daemon=True, name=name)
        self._thread.start()

    def _list_own_shards(self) -> list[TensorShard]:
        """Lists this rank's shards of model and optimizer.

        The rank writes those with `is_first_copy`; another rank writes the same values of the rest.
        """
        parts = {
            MODEL: get_model_state(self.model, self.optimizer),
            OPTIMIZER: select_tensors(get_optimizer_state(self.model, self.optimizer)),
        }
        pipeline = find_pipeline(unwrap(self.model))
        copied: Names = ()  # name prefixes of parameters that the first stage writes
        if pipeline:
            copied = tuple(f"{name}." for name in pipeline.copied)
        shards = []
        for part, tensors in parts.items():
            for shard in list_shards(tensors, part, self.world.stages):
                # <parameter>. of the model, or state.<parameter>.exp_avg. of the optimizer
                if f"{shard.name}.".removeprefix("state.").startswith(copied):
                    shard = replace(shard, is_first_copy=False)
                shards.append(shard)
        return shards

    def _write_in_thread(self, progress: Progress, shards: list[TensorShard], event: Any) -> None:
        """Copies, writes and publishes the shards: an async save, in its thread.

        `event`: what `record_event` returned when the save began.
        """
        try:
            try:
                copies = copy_to_host(shards, self._host_copies, event, self.world.device)
            finally:
                self._is_copied.set()  # after a failure too, or `before_update` would wait forever
            self._write(progress, copies)
        except BaseException as failure:  # raised again by `finish`
            self._failure = failure

    def _write(self, progress: Progress, shards: list[TensorShard]) -> None:
        """Stages and publishes a checkpoint.

        If that fails, the `UserError` says whether a checkpoint of this step exists nevertheless.
        """
        started = time.perf_counter()
        try:
            self._stage(progress, shards, is_published=True)
            self._phases.add("publication", time.perf_counter() - started, progress.step)
        except UserError as error:
            published = step_folder(self.run_folder, progress.step)
            outcome = f"{published} exists" if published.exists() else "nothing was published"
            raise UserError(
                f"the save of step {progress.step} failed, and {outcome}: {error}"
            ) from error

    def _stage(self, progress: Progress, shards: list[TensorShard], is_published: bool) -> int:
        """Writes a checkpoint into its staging folder, and publishes or removes it.

        Returns the checkpoint's size in bytes. All ranks call it. After a failure, rank 0 removes
        the folder.
        """
        staging = staging_folder(self.run_folder, progress.step)
        try:
            return self._fill_and_publish(staging, progress, shards, is_published)
        except Exception:
            if self.world.is_main:  # the rest would keep a full disk full
                durable.remove_tree(staging, ignore_errors=True)
            raise

    def _fill_and_publish(
        self, staging: Path, progress: Progress, shards: list[TensorShard], is_published: bool
    ) -> int:
        """Does the work of `_stage`: shards on all ranks, then all else on rank 0."""
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

        checkpoint_bytes: int = ranks.on_main(finish)
        return checkpoint_bytes

    def _complete(
        self, staging: Path, progress: Progress, entries_by_rank: list[dict[str, dict[str, Any]]]
    ) -> Manifest:
        """Writes the files beside the shards, and the manifest last. Only rank 0 calls it.

        `entries_by_rank`: what `write_shards` returned on each rank.
        """
        state = describe_state(progress, self.recipe, self.world, self.inputs)
        state_json = json.dumps(state, indent=1).encode()
        contents = {**self._descriptions, **self._files, STATE: state_json}
        entries: dict[str, dict[str, Any]] = {}
        for rank_entries in entries_by_rank:
            entries |= rank_entries
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
        """Publishes the staging folder, and removes the checkpoints that the recipe does not keep.

        Prints the problems of removing; they fail no save.
        """
        publish(self.run_folder, staging, progress.step)
        keys = self.recipe.checkpoint
        best_step = progress.best_step if keys.keep_best_checkpoint else None
        problems = prune(
            self.run_folder, progress.step, keys.save_total_limit, keys.keep_every_steps, best_step
        )
        for problem in problems:
            print(problem, flush=True)


def write_shards(
    staging: Path, shards: list[TensorShard], world: World
) -> dict[str, dict[str, Any]]:
    """Writes this rank's shards, a file for the model and one for the optimizer, and verifies them.

    Returns the files' entries in the manifest: name -> size and checksum. Raises `UserError` if a
    file is read back differently.
    """

    def write(part: str) -> tuple[str, dict[str, Any]]:
        name = f"{part}/pieces-{world.rank:05d}-of-{world.size:05d}.safetensors"
        part_shards = [shard for shard in shards if shard.part == part]
        entry = durable.write_file(staging / name, encode_file(part_shards))
        if durable.checksum(staging / name) != entry:
            raise UserError(
                f"{staging / name}: read back differently than written; the disk or its memory is "
                "faulty"
            )
        return name, entry

    # Two threads: one copies bytes for its file while the disk writes the other file.
    with ThreadPoolExecutor(max_workers=2) as pool:
        return dict(pool.map(write, sorted({shard.part for shard in shards})))


def describe_model(
    model: torch.nn.Module, recipe: Recipe, tokenizer: PreTrainedTokenizerBase
) -> dict[str, bytes]:
    """Returns the files that an export needs beside the weights: path in the checkpoint -> content.

    They are the configs of model, generation and LoRA, the tokenizer, and the processors of a
    vision-language model.
    """
    transformers_model = unwrap(model)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        transformers_model.config.save_pretrained(folder)
        if getattr(transformers_model, "generation_config", None) is not None:
            transformers_model.generation_config.save_pretrained(folder)
        if recipe.lora.use_peft:
            _sort_sets(transformers_model.peft_config["default"]).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        base = recipe.model.model_name_or_path
        base_folder = find_local_folder(base, recipe.model.model_revision) if base else None
        if base_folder is not None and (base_folder / GENERATION_FILE).is_file():
            # unlike transformers' default, the base's file lists all tokens that end an answer
            shutil.copyfile(base_folder / GENERATION_FILE, folder / GENERATION_FILE)
        processor_folder = base_folder
        tokenizer_name = recipe.model.tokenizer_name_or_path
        if not base and tokenizer_name:
            # A model from random weights trains with the processors beside its tokenizer.
            processor_folder = find_local_folder(tokenizer_name)
        if processor_folder is not None and has_other_parts(transformers_model):
            for name in PROCESSOR_FILES:
                if (processor_folder / name).is_file():
                    shutil.copyfile(processor_folder / name, folder / name)
        add_token_ids(folder / GENERATION_FILE, recipe.model, tokenizer)
        return {f"{MODEL}/{path.name}": path.read_bytes() for path in sorted(folder.iterdir())}


def _sort_sets(config: Any) -> Any:
    """Returns a copy of an adapter's config with sorted lists in place of sets.

    The order of a set differs between processes, and so would the file that peft writes.
    """
    sorted_config = copy.copy(config)
    for name, value in list(vars(sorted_config).items()):
        if isinstance(value, set):
            setattr(sorted_config, name, sorted(value))
    return sorted_config


def add_token_ids(path: Path, model: Model, tokenizer: PreTrainedTokenizerBase) -> None:
    """Writes the ids of the recipe's `special_tokens` and `eot_tokens` into generation_config.json.

    Generation then also stops at the recipe's EOS and `eot_tokens`, besides the tokens at which it
    stopped before. If the recipe sets neither key, the file stays as it is.

    Args:
        path: The generation_config.json, which is made if it does not exist.
        model: The recipe's section that has the two keys.
        tokenizer: The tokenizer, which has these tokens.
    """
    special = model.special_tokens or {}
    end_of_turn = list(model.eot_tokens)
    if not (special or end_of_turn):
        return
    content = load_json(path) if path.is_file() else {}
    ids = {}
    for name in GENERATION_TOKENS:
        if name in special:
            ids[f"{name}_id"] = tokenizer.convert_tokens_to_ids(special[name])
    earlier_stops = content.get("eos_token_id", tokenizer.eos_token_id)
    if not isinstance(earlier_stops, list):
        earlier_stops = [earlier_stops]
    end_of_turn_ids = [tokenizer.convert_tokens_to_ids(token) for token in end_of_turn]
    stops = [ids.get("eos_token_id"), *end_of_turn_ids, *earlier_stops]
    # each once, in this order
    ids["eos_token_id"] = list(dict.fromkeys(stop for stop in stops if stop is not None))
    content |= ids
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


def describe_state(
    progress: Progress, recipe: Recipe, world: World, inputs: Mapping[str, str]
) -> dict[str, Any]:
    """Returns the content of state.json: progress, recipe, and what a resume or export compares.

    `inputs`: what `fingerprint_inputs` returned.
    """
    base = recipe.model.model_name_or_path
    if base is not None and Path(base).is_dir():
        base = str(Path(base).resolve())
    return asdict(progress) | {
        "recipe": to_dict(recipe),
        "global_batch_size": compute_global_batch_size(recipe.batch, world.data_parallel.size),
        "data_fingerprint": inputs.get("datasets"),
        "inputs": {name: value for name, value in inputs.items() if name != "datasets"},
        "base_model": base,
        "compute_dtype": COMPUTE_DTYPE[world.sharding.mixed_precision],
    }


def unwrap_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """Returns the torch optimizer inside Accelerate's wrapper, or `optimizer` if it has none."""
    inner: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)
    return inner
