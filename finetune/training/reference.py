"""The reference of preference training: the log-probabilities that the model before training gives
to every document.

There is never a second copy of the weights. Where new adapters alone are trained, the model without
them is the reference: a forward of each micro-batch. Otherwise its log-probabilities are computed
once, in the run's own layout, from the weights that training starts with, and kept beside the token
cache.
"""

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from finetune.config.module_names import is_adapter
from finetune.config.schema import Recipe
from finetune.constants import IGNORE_INDEX
from finetune.data.batches import MicroBatch
from finetune.data.packing import StoredBatches
from finetune.data.prepare import PreparedData
from finetune.data.token_store import cache_folder
from finetune.distributed.parallelize import reshard
from finetune.distributed.sequence_parallel import sum_over_group
from finetune.distributed.world import RankGroup, World
from finetune.errors import Preempted, UserError
from finetune.files.durable import make_folder, replace_file
from finetune.models.log_probabilities import head_log_probabilities
from finetune.training.watch import SignalListener
from finetune.units import counted

Reference = Callable[[nn.Module, MicroBatch], Tensor]
"""(the model in training, a micro-batch on the device) -> fp64[documents], each document's summed
log-probability.
"""

VERSION = 1  # raised when the same model and data would give other numbers
SAVE_SECONDS = 60.0  # between two writes of a long computation, each of which says how far it is


def sum_by_document(
    values: Tensor, micro_batch: MicroBatch, sequence_group: ProcessGroup | None
) -> Tensor:
    """Sums values over each document's labeled positions, fp64[documents, ...].

    In fp64, so that a sum over thousands of tokens depends neither on their order nor on the batch
    around them.

    Args:
        values: [positions, ...], of a forward at the micro-batch's `trained_positions`.
        micro_batch: With `trained_documents`.
        sequence_group: The ranks that divide the documents' tokens between them; each returns the
            sums of all.
    """
    other_dims = values.shape[1:]
    zeros = values.new_zeros(len(micro_batch.example_ids), *other_dims, dtype=torch.float64)
    if not micro_batch.example_ids:  # a filler has no document, but a backward
        return zeros + values.sum()
    document_of = micro_batch.trained_documents
    assert document_of is not None, "`with_documents` makes them"
    labels = micro_batch.labels.flatten()[micro_batch.trained_positions]
    has_label = (labels != IGNORE_INDEX).view(-1, *(1 for _ in other_dims))
    labeled = torch.where(has_label, values.double(), 0.0)
    return sum_over_group(zeros.index_add(0, document_of, labeled), sequence_group)


def sum_log_probabilities(
    model: nn.Module,
    micro_batch: MicroBatch,
    inputs: Mapping[str, Any],
    sequence_group: ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """Runs the model; returns (the log-probabilities of each document's trained tokens, summed;
    their number), fp64[documents] each.

    `sequence_group`: as in `sum_by_document`.
    """
    of_tokens = model(**inputs, head_function=head_log_probabilities)
    with_count = torch.stack((of_tokens, torch.ones_like(of_tokens)), 1)
    sums, tokens = sum_by_document(with_count, micro_batch, sequence_group).unbind(1)
    return sums, tokens


def without_adapters(
    model: nn.Module, micro_batch: MicroBatch, sequence_group: ProcessGroup | None = None
) -> Tensor:
    """The reference of a run that trains adapters alone: a forward without them, without dropout
    and without gradients.
    """
    with evaluating(model), adapters_off(model):
        sums, _ = sum_log_probabilities(model, micro_batch, micro_batch.inputs, sequence_group)
    return sums


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """In this block the model has no dropout and no gradients. Afterwards its mode is as before."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """In this block the model computes with the base weights alone."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    # peft's own switch also changes `requires_grad`, which FSDP has read when it sharded

    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


class StoredReference:
    """The reference of any other run: log-probabilities that were computed before training."""

    def __init__(self, by_example: Tensor) -> None:
        """`by_example`: fp64[examples]; nan for an example that the run does not come to."""
        self._by_example = by_example

    def __call__(self, model: nn.Module, micro_batch: MicroBatch) -> Tensor:
        """Returns the log-probabilities of the micro-batch's documents, fp64[documents]."""
        values = self._by_example[list(micro_batch.example_ids)]
        return values.to(micro_batch.labels.device, non_blocking=True)


def find_references(
    model: nn.Module,
    recipe: Recipe,
    data: PreparedData,
    inputs: Mapping[str, str],
    signals: SignalListener,
    world: World,
) -> tuple[Reference, Reference]:
    """Returns the references of training and of held-out data, from `model` as it starts.

    All ranks call it. `inputs`: the fingerprints of what the recipe names.
    """
    trained = (name for name, parameter in model.named_parameters() if parameter.requires_grad)
    # An adapter that is trained further is a part of the reference.
    trains_new_adapters = recipe.lora.adapter_name_or_path is None and all(map(is_adapter, trained))
    has_stages = world.stages > 1  # a rank of a pipeline cannot compute a whole forward
    if trains_new_adapters and not has_stages:
        reference = partial(without_adapters, sequence_group=world.sequence_group)
        return reference, reference
    weights = " ".join(inputs[name] for name in ("base", "adapter") if name in inputs)
    sums = _load_or_compute(model, recipe, data, weights or None, signals, world)
    return StoredReference(sums["training"]), StoredReference(sums.get("held_out", torch.zeros(0)))


def _load_or_compute(
    model: nn.Module,
    recipe: Recipe,
    data: PreparedData,
    weights: str | None,
    signals: SignalListener,
    world: World,
) -> dict[str, Tensor]:
    """Returns the log-probabilities of the training examples that the run comes to, and of the
    held-out ones, fp64[examples] each, nan for others.

    Each node keeps them beside its token cache, under a hash of the model and the data. What is
    missing or damaged in rank 0's file is computed from `model`, and written as it comes.

    `weights`: the hash of the model's weights, if they have one.

    Raises `Preempted` if a signal asks to stop; what has been computed is in the file then.
    """
    if not isinstance(data.train, StoredBatches):
        raise UserError(
            f"{recipe.place_of('streaming')}: streaming: {recipe.method.method} compares with the "
            "model before training, whose log-probabilities of all the data are computed first "
            "where more than adapters is trained; remove streaming, or train adapters alone"
        )
    stored = find_stored(data)
    key: str = RankGroup(world).on_main(lambda: hash_model_and_data(recipe, stored, weights, world))
    path = cache_folder(recipe.data) / f"reference-{key}.json"
    sums = _read_on_main(path, stored, world)
    missing = {name: _missing_steps(batches, sums[name]) for name, batches in stored.items()}
    for name, batches in stored.items():
        for part in _compute(model, batches, missing[name], name, signals, world):
            sums[name] = torch.where(part.isnan(), sums[name], part)
            RankGroup(world).on_all(lambda: _write(path, sums) if world.local_rank == 0 else None)
            if signals.agree(world).stop:
                raise _preempted(path, stored, sums)
    return sums


def _read_on_main(
    path: Path, stored: Mapping[str, StoredBatches], world: World
) -> dict[str, Tensor]:
    """Reads the main rank's file; returns its log-probabilities on every rank, nan where it has
    none.
    """
    nothing = {name: _make_unknown(batches) for name, batches in stored.items()}
    kept = _read(path, nothing) if world.is_main else None
    if kept is not None:
        print(f"reference  {path}", file=sys.stderr, flush=True)
    return {name: _gather(values, world) for name, values in (kept or nothing).items()}


def _make_unknown(batches: StoredBatches) -> Tensor:
    """nan for each example, fp64[examples]."""
    return torch.full((len(batches.examples),), torch.nan, dtype=torch.float64)


def _preempted(
    path: Path, stored: Mapping[str, StoredBatches], sums: Mapping[str, Tensor]
) -> Preempted:
    """The exception of a computation that a signal stops: how much of it is kept."""
    wanted = 0
    for batches in stored.values():
        wanted += sum(len(documents_of(batches, step)) for step in steps_of_examples(batches))
    known = sum(int((~values.isnan()).sum()) for values in sums.values())
    return Preempted(
        f"{path}: stopped by a signal; the reference of {known:,} of {wanted:,} "
        "documents is kept there, and the same command computes the rest"
    )


def _compute(
    model: nn.Module,
    batches: StoredBatches,
    steps: Sequence[int],
    name: str,
    signals: SignalListener,
    world: World,
) -> Iterator[Tensor]:
    """Yields the log-probabilities of the documents of `steps` in parts to be saved: every
    SAVE_SECONDS, where a signal asks for it, and at the end.

    A part is fp64[examples], nan for documents that are in none of its steps. `name`: of the data.
    """
    title = name.replace("_", "-")
    began = time.monotonic()
    saved_at = began
    own = _make_unknown(batches)
    documents = 0
    for done, step in enumerate(steps, start=1):
        for micro_batch in _with_mismatched(batches.step_batch(step).micro_batches):
            on_device = micro_batch.to(world.device)
            with evaluating(model):
                log_probabilities, _ = sum_log_probabilities(
                    model, on_device, on_device.inputs, world.sequence_group
                )
            if world.is_first_of_batch:  # the other ranks of its batch have the same
                own[list(micro_batch.example_ids)] = log_probabilities.cpu()
        if world.is_main and time.monotonic() - saved_at > SAVE_SECONDS:
            signals.save = True
            saved_at = time.monotonic()
            _say(f"{title}: {done:,} of {len(steps):,} batches")
        is_last = done == len(steps)
        requests = signals.agree(world)
        if not (requests.save or requests.stop or is_last):
            continue
        reshard(model)
        part = _gather(own, world)
        own = _make_unknown(batches)
        signals.save = False
        documents += int((~part.isnan()).sum())
        if world.is_main and is_last:
            seconds = time.monotonic() - began
            _say(f"{counted(documents, 'document')} ({title}) in {seconds:.1f} s")
        yield part


def _say(text: str) -> None:
    print(f"reference  {text}", file=sys.stderr, flush=True)


def _gather(own: Tensor, world: World) -> Tensor:
    """Joins the numbers of all ranks, on every rank.

    `own`: nan where this rank knows nothing. Of each number, at most one rank knows it.
    """
    is_known = ~own.isnan()
    total = world.sum(torch.where(is_known, own, 0.0))
    ranks_that_know = world.sum(is_known.double())
    return torch.where(ranks_that_know > 0, total, torch.nan)


def _with_mismatched(micro_batches: Iterable[MicroBatch]) -> Iterator[MicroBatch]:
    """Yields each micro-batch, and after it the one of its mismatched answers, if it has any."""
    for micro_batch in micro_batches:
        yield micro_batch
        if micro_batch.mismatched is not None:
            yield micro_batch.mismatched


def _missing_steps(batches: StoredBatches, sums: Tensor) -> list[int]:
    """Finds the steps with a document whose log-probability is not known."""
    if not sums.isnan().any():
        return []
    missing = []
    for step in steps_of_examples(batches):
        if sums[documents_of(batches, step)].isnan().any():
            missing.append(step)
    return missing


def find_stored(data: PreparedData) -> dict[str, StoredBatches]:
    """The stored data of a run, under "training" and, if some are held out, "held_out"."""
    stored = {"training": data.train, "held_out": data.evaluation}
    return {name: each for name, each in stored.items() if isinstance(each, StoredBatches)}


def documents_of(batches: StoredBatches, step: int) -> NDArray[np.int64]:
    """Returns the documents of a step on all ranks."""
    return np.concatenate(batches.rows_of(step))


def steps_of_examples(batches: StoredBatches) -> range:
    """The steps that see each example of the run for the first time: those of the first epoch."""
    return range(min(batches.steps, batches.steps_per_epoch))


def hash_model_and_data(
    recipe: Recipe, stored: Mapping[str, StoredBatches], weights: str | None, world: World
) -> str:
    """Hashes everything that decides log-probabilities: the weights, how they compute, and the
    tokens.
    """
    keys = {
        "model": asdict(recipe.model),
        "lora": asdict(recipe.lora),
        "quantization": asdict(recipe.quantization),
    }
    sharding = world.sharding
    # FSDP casts the weights, the others each product: not the same numbers.
    precision: list[Any] = [sharding.mixed_precision, sharding.is_fsdp]
    if sharding.fp8 is not None:
        precision.append(asdict(sharding.fp8))
    if recipe.quantization_aware.quantization_aware_training:
        precision.append(asdict(recipe.quantization_aware))
    described = [VERSION, weights, keys, recipe.run.seed, precision]
    for batches in stored.values():  # which examples the run comes to
        is_whole = batches.steps >= batches.steps_per_epoch
        described.append("all" if is_whole else [batches.steps, asdict(batches.config)])
    digest = xxhash.xxh3_128(json.dumps(described, sort_keys=True, default=str).encode())
    for batches in stored.values():
        examples = batches.examples
        for store in examples.stores:
            digest.update(np.ascontiguousarray(store.input_ids).data)
            digest.update(np.ascontiguousarray(store.labels).data)
            digest.update(np.ascontiguousarray(store.image_hashes).data)
        for column in (examples.store, examples.start, examples.lengths):
            digest.update(np.ascontiguousarray(column).data)
    return digest.hexdigest()


def _read(path: Path, like: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
    """Reads what `_write` wrote; None if it is missing, damaged, or not of these names and
    lengths.
    """
    try:
        checksum, _, text = path.read_text(encoding="utf-8").partition("\n")
    except (OSError, UnicodeDecodeError):
        return None
    if checksum != xxhash.xxh3_128_hexdigest(text.encode()):
        print(f"{path}: damaged; the reference is computed again", file=sys.stderr, flush=True)
        return None
    sums = {
        name: torch.tensor(values, dtype=torch.float64) for name, values in json.loads(text).items()
    }
    lengths = {name: len(values) for name, values in sums.items()}
    if lengths != {name: len(values) for name, values in like.items()}:
        return None
    return sums


def _write(path: Path, sums: Mapping[str, Tensor]) -> None:
    """Writes a line with a checksum, then JSON, from which numbers come back bit for bit."""
    text = json.dumps({name: values.tolist() for name, values in sums.items()})
    make_folder(path.parent)
    replace_file(path, f"{xxhash.xxh3_128_hexdigest(text.encode())}\n{text}")
