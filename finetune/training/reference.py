"""The reference of preference training: the log-probability of each document under the model before
training.

There is never a second copy of the weights. If only new adapters are trained, the reference is a
forward of each micro-batch without them. Otherwise the log-probabilities are computed once, before
training, in the run's own layout, and stored beside the token cache.
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
"""(the model in training, a micro-batch on the device) -> fp64[documents]: the sum of the
log-probabilities of each document's trained tokens.
"""

VERSION = 1  # to be raised when a change of code gives other numbers for the same model and data
SAVE_SECONDS = 60.0  # a long computation is written, and its progress printed, this often


def sum_by_document(
    values: Tensor, micro_batch: MicroBatch, sequence_group: ProcessGroup | None
) -> Tensor:
    """Sums values over each document's labeled positions, fp64[documents, ...].

    In fp64 a sum over thousands of tokens depends neither on their order nor on the batch around
    them.

    Args:
        values: What a forward returned at the micro-batch's `trained_positions`, [positions, ...].
        micro_batch: A micro-batch with `trained_documents`, or a filler.
        sequence_group: The ranks that share the documents' tokens; each of them returns the sums
            over all tokens. None: this rank has all tokens.
    """
    other_dims = values.shape[1:]
    zeros = values.new_zeros(len(micro_batch.example_ids), *other_dims, dtype=torch.float64)
    if not micro_batch.example_ids:
        # A filler has no documents. The empty result keeps the graph, for the ranks' collectives.
        return zeros + values.sum()
    document_of = micro_batch.trained_documents
    assert document_of is not None, "`with_documents` makes them"
    labels = micro_batch.labels.flatten()[micro_batch.trained_positions]
    has_label = (labels != IGNORE_INDEX).view(-1, *(1 for _ in other_dims))  # [positions, 1, ...]
    labeled = torch.where(has_label, values.double(), 0.0)
    return sum_over_group(zeros.index_add(0, document_of, labeled), sequence_group)


def sum_log_probabilities(
    model: nn.Module,
    micro_batch: MicroBatch,
    inputs: Mapping[str, Any],
    sequence_group: ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """Runs the model, and sums the log-probabilities of each document's trained tokens.

    `inputs`: the model's arguments for the micro-batch. `sequence_group`: as in `sum_by_document`.

    Returns:
        The sums, and the number of tokens in each; both fp64[documents].
    """
    log_probabilities = model(**inputs, head_function=head_log_probabilities)
    # A second column of ones is summed too: it counts the tokens.
    columns = torch.stack((log_probabilities, torch.ones_like(log_probabilities)), 1)
    sums, tokens = sum_by_document(columns, micro_batch, sequence_group).unbind(1)
    return sums, tokens


def without_adapters(
    model: nn.Module, micro_batch: MicroBatch, sequence_group: ProcessGroup | None = None
) -> Tensor:
    """Computes the reference of a run that trains only new adapters: a forward without adapters,
    dropout and gradients. Returns fp64[documents].
    """
    with evaluating(model), adapters_off(model):
        sums, _ = sum_log_probabilities(model, micro_batch, micro_batch.inputs, sequence_group)
    return sums


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Turns off the model's dropout, and gradients, in this block; restores its mode afterwards."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Turns off the model's adapters in this block: only the base weights compute."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    for layer in layers:
        # peft's own switch would also change `requires_grad`, which FSDP has read when it sharded
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


class StoredReference:
    """The reference of any other run: log-probabilities that were computed before training."""

    def __init__(self, by_example: Tensor) -> None:
        """Takes the summed log-probability of each example.

        `by_example`: fp64[examples]; nan for an example that the run never reaches.
        """
        self._by_example = by_example

    def __call__(self, model: nn.Module, micro_batch: MicroBatch) -> Tensor:
        """Looks up the micro-batch's documents; returns fp64[documents]."""
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
    """Returns the references of the training data and of the held-out data.

    All ranks call it before training, since `model` is the reference.

    `inputs`: the fingerprints that `fingerprint_inputs` returned.

    Raises `UserError` if log-probabilities must be stored but the data is streamed, and `Preempted`
    if a signal stops their computation.
    """
    trained_names = (name for name, weight in model.named_parameters() if weight.requires_grad)
    trains_adapters = all(map(is_adapter, trained_names))
    # An adapter that is trained further is part of the reference: it must not be turned off.
    has_old_adapter = recipe.lora.adapter_name_or_path is not None
    has_stages = world.stages > 1  # no rank of a pipeline can compute a whole forward
    if trains_adapters and not has_old_adapter and not has_stages:
        reference = partial(without_adapters, sequence_group=world.sequence_group)
        return reference, reference
    weights_hash = " ".join(inputs[name] for name in ("base", "adapter") if name in inputs)
    sums = _load_or_compute(model, recipe, data, weights_hash or None, signals, world)
    return StoredReference(sums["training"]), StoredReference(sums.get("held_out", torch.zeros(0)))


def _load_or_compute(
    model: nn.Module,
    recipe: Recipe,
    data: PreparedData,
    weights_hash: str | None,
    signals: SignalListener,
    world: World,
) -> dict[str, Tensor]:
    """Reads the log-probabilities of all examples from rank 0's file, and computes the missing ones
    with `model`. All ranks call it.

    Each node stores them in a file beside its token cache, named by a hash of the model and the
    data. The file is written while they are computed.

    Args:
        model: The model before training.
        recipe: The recipe.
        data: The run's data.
        weights_hash: The hash of the model's weights; None if they have none.
        signals: A signal may stop the computation.
        world: The ranks of the run.

    Returns:
        "training" and, with held-out data, "held_out" -> fp64[examples]; nan for an example that
        the run never reaches.

    Raises:
        UserError: If the data is streamed.
        Preempted: If a signal asks to stop. The file has all that was computed.
    """
    if not isinstance(data.train, StoredBatches):
        raise UserError(
            f"{recipe.place_of('streaming')}: streaming: {recipe.method.method} compares with the "
            "model before training, whose log-probabilities of all the data are computed first "
            "where more than adapters is trained; remove streaming, or train adapters alone"
        )
    stored = find_stored(data)
    key: str = RankGroup(world).on_main(
        lambda: hash_model_and_data(recipe, stored, weights_hash, world)
    )
    path = cache_folder(recipe.data) / f"reference-{key}.json"
    sums = _read_on_main(path, stored, world)
    missing = {name: _find_missing_steps(batches, sums[name]) for name, batches in stored.items()}
    for name, batches in stored.items():
        for computed in _compute(model, batches, missing[name], name, signals, world):
            sums[name] = torch.where(computed.isnan(), sums[name], computed)
            RankGroup(world).on_all(lambda: _write(path, sums) if world.local_rank == 0 else None)
            if signals.agree(world).stop:
                raise _make_preempted(path, stored, sums)
    return sums


def _read_on_main(
    path: Path, stored: Mapping[str, StoredBatches], world: World
) -> dict[str, Tensor]:
    """Reads the log-probabilities in rank 0's file, and returns them on every rank.

    All ranks call it. Returns nan for all examples if there is no usable file.
    """
    sums = {name: _make_unknown(batches) for name, batches in stored.items()}
    from_file = _read(path, sums) if world.is_main else None
    if from_file is not None:
        print(f"reference  {path}", file=sys.stderr, flush=True)
        sums = from_file
    return {name: _gather(values, world) for name, values in sums.items()}


def _make_unknown(batches: StoredBatches) -> Tensor:
    """Makes a tensor of nan, fp64[examples]: no log-probability is known."""
    return torch.full((len(batches.examples),), torch.nan, dtype=torch.float64)


def _make_preempted(
    path: Path, stored: Mapping[str, StoredBatches], sums: Mapping[str, Tensor]
) -> Preempted:
    """Makes the exception of a computation that a signal stops; it says how much is in the file."""
    documents = 0
    for batches in stored.values():
        documents += sum(len(documents_of(batches, step)) for step in steps_of_examples(batches))
    known = sum(int((~values.isnan()).sum()) for values in sums.values())
    return Preempted(
        f"{path}: stopped by a signal; the reference of {known:,} of {documents:,} "
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
    """Computes the log-probabilities of the documents in `steps`, and yields them in parts, for the
    caller to save.

    A part is fp64[examples]: nan for all documents but those computed since the part before. A part
    is yielded every SAVE_SECONDS, when a signal asks to save or stop, and after the last step. All
    ranks call it and get the same parts.

    `name`: "training" or "held_out", for what is printed.
    """
    title = name.replace("_", "-")
    began = time.monotonic()
    saved_at = began
    own = _make_unknown(batches)  # what this rank has computed since the part before
    documents = 0
    for done, step in enumerate(steps, start=1):
        for micro_batch in _with_mismatched(batches.step_batch(step).micro_batches):
            on_device = micro_batch.to(world.device)
            with evaluating(model):
                log_probabilities, _ = sum_log_probabilities(
                    model, on_device, on_device.inputs, world.sequence_group
                )
            if world.is_first_of_batch:  # the other ranks with the same rows have the same values
                own[list(micro_batch.example_ids)] = log_probabilities.cpu()
        if world.is_main and time.monotonic() - saved_at > SAVE_SECONDS:
            # asks for a save as a signal would: all ranks agree on it below
            signals.save = True
            saved_at = time.monotonic()
            _say(f"{title}: {done:,} of {len(steps):,} batches")
        is_last = done == len(steps)
        requests = signals.agree(world)
        if not (requests.save or requests.stop or is_last):
            continue
        reshard(model)
        computed = _gather(own, world)
        own = _make_unknown(batches)
        signals.save = False
        documents += int((~computed.isnan()).sum())
        if world.is_main and is_last:
            seconds = time.monotonic() - began
            _say(f"{counted(documents, 'document')} ({title}) in {seconds:.1f} s")
        yield computed


def _say(text: str) -> None:
    """Prints a line of the computation's progress on stderr."""
    print(f"reference  {text}", file=sys.stderr, flush=True)


def _gather(own: Tensor, world: World) -> Tensor:
    """Joins the numbers of all ranks, and returns them on every rank. All ranks call it.

    `own`: this rank's numbers, fp64[examples]; nan if it does not know one. No number is known to
    two ranks.
    """
    is_known = ~own.isnan()
    total = world.sum(torch.where(is_known, own, 0.0))
    ranks_that_know = world.sum(is_known.double())
    return torch.where(ranks_that_know > 0, total, torch.nan)


def _with_mismatched(micro_batches: Iterable[MicroBatch]) -> Iterator[MicroBatch]:
    """Yields each micro-batch, followed by its `mismatched` micro-batch if it has one."""
    for micro_batch in micro_batches:
        yield micro_batch
        if micro_batch.mismatched is not None:
            yield micro_batch.mismatched


def _find_missing_steps(batches: StoredBatches, sums: Tensor) -> list[int]:
    """Finds the steps with a document whose log-probability is not known (nan)."""
    if not sums.isnan().any():
        return []
    missing = []
    for step in steps_of_examples(batches):
        if sums[documents_of(batches, step)].isnan().any():
            missing.append(step)
    return missing


def find_stored(data: PreparedData) -> dict[str, StoredBatches]:
    """Returns the batches of a run's data: "training" and "held_out" -> the batches.

    Data that is streamed, or that a run does not have, is left out.
    """
    stored = {"training": data.train, "held_out": data.evaluation}
    return {name: each for name, each in stored.items() if isinstance(each, StoredBatches)}


def documents_of(batches: StoredBatches, step: int) -> NDArray[np.int64]:
    """Returns the example ids of a step, over all ranks."""
    return np.concatenate(batches.rows_of(step))


def steps_of_examples(batches: StoredBatches) -> range:
    """Returns the steps that together read each example of the run once: those of the first
    epoch, or all of a shorter run.
    """
    return range(min(batches.steps, batches.steps_per_epoch))


def hash_model_and_data(
    recipe: Recipe, stored: Mapping[str, StoredBatches], weights: str | None, world: World
) -> str:
    """Hashes everything that the log-probabilities depend on: the weights, the model's keys and
    precision, and the tokens.

    `weights`: what identifies the weights, such as their hash.
    """
    keys = {
        "model": asdict(recipe.model),
        "lora": asdict(recipe.lora),
        "quantization": asdict(recipe.quantization),
    }
    sharding = world.sharding
    # FSDP casts the weights to the compute dtype, other layouts the inputs of each product: the
    # numbers differ.
    precision: list[Any] = [sharding.mixed_precision, sharding.is_fsdp]
    if sharding.fp8 is not None:
        precision.append(asdict(sharding.fp8))
    if recipe.quantization_aware.quantization_aware_training:
        precision.append(asdict(recipe.quantization_aware))
    described = [VERSION, weights, keys, recipe.run.seed, precision]
    for batches in stored.values():  # which examples the run reaches
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


def _read(path: Path, expected: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
    """Reads a file that `_write` wrote.

    Returns None if the file is missing or damaged, or if its names and lengths are not those of
    `expected`.
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
    if lengths != {name: len(values) for name, values in expected.items()}:
        return None
    return sums


def _write(path: Path, sums: Mapping[str, Tensor]) -> None:
    """Writes a line with the checksum of the rest, then JSON, which keeps each number bit for
    bit.
    """
    text = json.dumps({name: values.tolist() for name, values in sums.items()})
    make_folder(path.parent)
    replace_file(path, f"{xxhash.xxh3_128_hexdigest(text.encode())}\n{text}")
