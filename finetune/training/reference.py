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
SAVE_SECONDS = 60.0  # after which a long computation keeps what it has, and says how far it is


def sum_by_document(
    values: Tensor, micro_batch: MicroBatch, sequence_group: ProcessGroup | None = None
) -> Tensor:
    """The sum over each document's labeled positions, fp64[documents, ...].

    In fp64, so that a sum over thousands of tokens depends neither on their order nor on the batch
    around them.

    Args:
        values: [positions, ...], of a forward at the micro-batch's `trained_positions`.
        micro_batch: Whose documents are groups, or know their tokens by `with_documents`.
        sequence_group: The ranks that divide the documents' tokens between them; each returns the
            sums of all.
    """
    shape = (len(micro_batch.example_ids), *values.shape[1:])
    zeros = torch.zeros(shape, dtype=torch.float64, device=values.device)
    # a filler: in the graph all the same, since its backward takes part in collectives
    if not micro_batch.example_ids:
        return zeros + values.sum()
    document_of = micro_batch.trained_documents
    assert document_of is not None, "documents in groups say where each trained position belongs"
    labels = micro_batch.labels.flatten()[micro_batch.trained_positions]
    has_label = (labels != IGNORE_INDEX).view(-1, *(1,) * (values.dim() - 1))
    labeled = torch.where(has_label, values.double(), 0.0)
    return sum_over_group(zeros.index_add(0, document_of, labeled), sequence_group)


def sum_log_probabilities(
    model: nn.Module,
    micro_batch: MicroBatch,
    inputs: Mapping[str, Any],
    sequence_group: ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """The log-probability of each document's trained tokens, summed, and their number;
    fp64[documents].

    `sequence_group`: as in `sum_by_document`.
    """
    of_tokens = model(**inputs, head_function=head_log_probabilities)
    with_count = torch.stack((of_tokens, torch.ones_like(of_tokens)), 1)
    log_probabilities, tokens = sum_by_document(with_count, micro_batch, sequence_group).unbind(1)
    return log_probabilities, tokens


def without_adapters(
    model: nn.Module, micro_batch: MicroBatch, sequence_group: ProcessGroup | None = None
) -> Tensor:
    """The reference of a run that trains adapters alone: a forward without them, and without
    dropout and gradients.
    """
    with evaluating(model), adapters_off(model):
        return sum_log_probabilities(model, micro_batch, micro_batch.inputs, sequence_group)[0]


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """In this block the model has no dropout and no gradients; afterwards it is in the mode that it
    was in.
    """
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Computes with the base weights alone. peft's own switch also changes `requires_grad`, which
    FSDP has built on.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

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

    def __init__(self, log_probabilities: Tensor) -> None:
        self._found = log_probabilities  # fp64[examples]; nan where the run does not come to one

    def __call__(self, model: nn.Module, micro_batch: MicroBatch) -> Tensor:
        """Returns the numbers of the micro-batch's documents."""
        values = self._found[list(micro_batch.example_ids)]
        return values.to(micro_batch.labels.device, non_blocking=True)


def find_references(
    model: nn.Module,
    recipe: Recipe,
    data: PreparedData,
    inputs: Mapping[str, str],
    signals: SignalListener,
    world: World,
) -> tuple[Reference, Reference]:
    """The references of training and of held-out data, from `model` as it starts.

    All ranks call it.
    """
    trained = (name for name, parameter in model.named_parameters() if parameter.requires_grad)
    is_here = world.stages == 1  # a stage of a pipeline cannot compute a whole forward
    if is_here and recipe.lora.adapter_name_or_path is None and all(map(is_adapter, trained)):
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
    """The base model's log-probabilities of the training examples that the run comes to, and of the
    held-out ones.

    `weights`: the hash of the model's. Each node keeps the numbers beside its token cache, under a
    hash of the model and the data. What is missing or damaged in rank 0's file is computed again,
    and written as it comes.

    Raises `Preempted` where a signal asks to stop; then what has been computed is in the file.
    """
    batches = {"training": data.train, "held_out": data.evaluation}
    if not isinstance(data.train, StoredBatches):
        raise UserError(
            f"{recipe.place_of('streaming')}: streaming: {recipe.method.method} compares with the "
            "model before training, whose log-probabilities of all the data are computed first "
            "where more than adapters is trained; remove streaming, or train adapters alone"
        )
    stored = {name: each for name, each in batches.items() if isinstance(each, StoredBatches)}
    key: str = RankGroup(world).on_main(lambda: hash_inputs(recipe, stored, weights, world))
    path = cache_folder(recipe.data) / f"reference-{key}.json"
    nothing = {
        name: torch.full((len(each.examples),), torch.nan, dtype=torch.float64)
        for name, each in stored.items()
    }
    kept = (_read(path, nothing) if world.is_main else None) or nothing
    sums = {name: _gather(values, world) for name, values in kept.items()}
    missing = {name: _missing_steps(each, sums[name]) for name, each in stored.items()}
    if world.is_main and kept is not nothing:
        print(f"reference  {path}", file=sys.stderr, flush=True)
    for name, each in stored.items():
        for part in _compute(model, each, missing[name], name, signals, world):
            sums[name] = torch.where(part.isnan(), sums[name], part)
            RankGroup(world).on_all(lambda: _write(path, sums) if world.local_rank == 0 else None)
            if signals.agree(world).stop:
                wanted = sum(_count_documents(batches) for batches in stored.values())
                known = sum(int((~values.isnan()).sum()) for values in sums.values())
                raise Preempted(
                    f"{path}: stopped by a signal; the reference of {known:,} of {wanted:,} "
                    "documents is kept there, and the same command computes the rest"
                )
    return sums


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

    A part is fp64[examples], nan for documents that are in none of its steps.
    """
    title = name.replace("_", "-")
    began = saved = time.monotonic()
    nothing = torch.full((len(batches.examples),), torch.nan, dtype=torch.float64)
    mine = nothing.clone()
    documents = 0
    for done, step in enumerate(steps, start=1):
        for micro_batch in _with_mismatched(batches.step_batch(step).micro_batches):
            on_device = micro_batch.to(world.device)
            with evaluating(model):
                log_probabilities = sum_log_probabilities(
                    model, on_device, on_device.inputs, world.sequence_group
                )[0]
            if world.is_first_of_batch:  # the others know the same
                mine[list(micro_batch.example_ids)] = log_probabilities.cpu()
        if world.is_main and time.monotonic() - saved > SAVE_SECONDS:
            signals.save = True
            saved = time.monotonic()
            _say(f"{title}: {done:,} of {len(steps):,} batches")
        is_last = done == len(steps)
        requests = signals.agree(world)
        if not (requests.save or requests.stop or is_last):
            continue
        reshard(model)
        part = _gather(mine, world)
        mine = nothing.clone()
        signals.save = False
        documents += int((~part.isnan()).sum())
        if world.is_main and is_last:
            seconds = time.monotonic() - began
            _say(f"{counted(documents, 'document')} ({title}) in {seconds:.1f} s")
        yield part


def _say(what: str) -> None:
    print(f"reference  {what}", file=sys.stderr, flush=True)


def _gather(mine: Tensor, world: World) -> Tensor:
    """Joins the numbers of all ranks, on every rank.

    `mine`: nan where this one knows nothing; no two know the same.
    """
    known = ~mine.isnan()
    total = world.sum(torch.where(known, mine, 0.0))
    ranks = world.sum(known.double())
    return torch.where(ranks > 0, total, torch.nan)


def _count_documents(batches: StoredBatches) -> int:
    return sum(len(documents_of(batches, step)) for step in steps_of(batches))


def _with_mismatched(micro_batches: Iterable[MicroBatch]) -> Iterator[MicroBatch]:
    """Yields each micro-batch, and after it the one of its mismatched answers, if it has any."""
    for micro_batch in micro_batches:
        yield micro_batch
        if micro_batch.mismatched is not None:
            yield micro_batch.mismatched


def _missing_steps(batches: StoredBatches, sums: Tensor) -> list[int]:
    """The steps with a document whose log-probability is not among the `sums`."""
    if not sums.isnan().any():
        return []
    return [step for step in steps_of(batches) if sums[documents_of(batches, step)].isnan().any()]


def documents_of(batches: StoredBatches, step: int) -> NDArray[np.int64]:
    """Returns the documents of a step on all ranks."""
    return np.concatenate(batches.rows_of(step))


def steps_of(batches: StoredBatches) -> range:
    """The steps in which every example that the run comes to is seen."""
    return range(min(batches.steps, batches.steps_per_epoch))


def hash_inputs(
    recipe: Recipe, stored: Mapping[str, StoredBatches], weights: str | None, world: World
) -> str:
    """A hash of everything that decides the log-probabilities: the weights, how they compute, and
    the tokens.
    """
    keys = {
        "model": asdict(recipe.model),
        "lora": asdict(recipe.lora),
        "quantization": asdict(recipe.quantization),
    }
    # FSDP casts the weights, the others each product: not the same numbers.
    computed: list[Any] = [world.sharding.mixed_precision, world.sharding.is_fsdp]
    computed += [asdict(world.sharding.fp8)] if world.sharding.fp8 is not None else []
    computed += (
        [asdict(aware)] if (aware := recipe.quantization_aware).quantization_aware_training else []
    )
    described = [VERSION, weights, keys, recipe.run.seed, computed]
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
    """Reads tensors `like` these that `_write` wrote; None where they are missing or damaged."""
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
    same = {name: len(values) for name, values in sums.items()} == {
        name: len(each) for name, each in like.items()
    }
    return sums if same else None


def _write(path: Path, sums: Mapping[str, Tensor]) -> None:
    """JSON, whose numbers come back bit for bit, after a line with its checksum."""
    text = json.dumps({name: values.tolist() for name, values in sums.items()})
    make_folder(path.parent)
    replace_file(path, f"{xxhash.xxh3_128_hexdigest(text.encode())}\n{text}")
