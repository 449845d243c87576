"""Distillation as an `Objective`: the divergence from a teacher beside the cross entropy of the
labels.

The teacher is asked in each step; or once before training, and its k likeliest tokens are kept in
files beside the token cache (`distill_top_k`). The files that one rank has written are a piece.
"""

import io
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from finetune.config.facts import ModelFacts
from finetune.config.pretrained import load_config, read_facts
from finetune.config.schema import Recipe
from finetune.constants import IGNORE_INDEX
from finetune.data.batches import MicroBatch, StepBatch
from finetune.data.packing import StoredBatches
from finetune.data.prepare import PreparedData
from finetune.data.token_store import Int32s, Int64s, cache_folder
from finetune.data.tokenizer import refuse_other_tokenizer
from finetune.distributed.model_parts import unwrap
from finetune.distributed.parallelize import reshard
from finetune.distributed.world import RankGroup, World
from finetune.errors import UserError
from finetune.files.durable import checksum, empty_folder, write_file
from finetune.files.json_files import read_json_object
from finetune.files.tensors import read_folder
from finetune.models.cross_entropy import HeadFunction
from finetune.models.load import Teacher
from finetune.models.log_probabilities import DivergenceOptions, TopScores, head_divergence
from finetune.training.objectives.objective import Measured, Objective
from finetune.training.reference import (
    documents_of,
    find_stored,
    hash_model_and_data,
    steps_of_examples,
)
from finetune.units import counted


class Distillation(Objective):
    """alpha x divergence + (1 - alpha) x cross entropy, averaged over a step's trained tokens."""

    def __init__(self, teacher: "Teacher | StoredTeacher") -> None:
        self.teacher = teacher

    def measure(
        self, model: nn.Module, micro_batch: MicroBatch, inputs: Mapping[str, Any], batch: StepBatch
    ) -> Measured:
        """The loss, and as metrics the divergence and the cross entropy of a token.

        The teacher reads the embeddings without the noise of `inputs`.
        """
        if isinstance(self.teacher, StoredTeacher):
            head_function = self.teacher.recall(micro_batch)
        else:
            head_function = self.teacher.compare(micro_batch.inputs)
        loss, divergence, cross_entropy = model(**inputs, head_function=head_function).unbind()
        trained = (micro_batch.labels != IGNORE_INDEX).sum().to(loss.dtype)
        metrics = {
            "kl": torch.stack([divergence.detach(), trained]),
            "cross_entropy": torch.stack([cross_entropy.detach(), trained]),
        }
        return Measured(loss, metrics)


# The arrays of a piece: int64[examples, 2], an example and how many trained tokens it has; of these
# tokens, one example after another, int32[tokens, k] and fp32[tokens, k + 1] as in `TopScores`.
PARTS = ("examples", "ids", "scores")


@dataclass(frozen=True, slots=True)
class StoredTeacher:
    """The teacher's likeliest tokens at each trained token, in memory-mapped files."""

    pieces: Sequence[tuple[Int32s, NDArray[np.float32]]]  # ids and scores
    # [examples, 3]: piece, first token, tokens; -1 for those that the run does not come to
    places: Int64s
    rows: int  # of the vocabulary
    options: DivergenceOptions

    def recall(self, micro_batch: MicroBatch) -> HeadFunction:
        """As `Teacher.compare`, for a micro-batch on the device."""
        k = self.pieces[0][0].shape[1]
        # row 0 stands for positions without a label
        ids = [np.zeros((1, k), np.int32)]
        scores = [np.zeros((1, k + 1), np.float32)]
        for piece, first, tokens in self.places[list(micro_batch.example_ids)].tolist():
            piece_ids, piece_scores = self.pieces[piece]
            ids.append(piece_ids[first : first + tokens])
            scores.append(piece_scores[first : first + tokens])
        has_label = micro_batch.labels.flatten()[micro_batch.trained_positions] >= 0
        row = torch.where(has_label, has_label.cumsum(0), 0)

        def take_rows(parts: list[NDArray[Any]]) -> Tensor:
            on_host = torch.from_numpy(np.concatenate(parts))
            return on_host.to(row.device, non_blocking=True)[row]

        top = TopScores(take_rows(ids).long(), take_rows(scores), self.rows)
        return head_divergence(top, self.options)


def find_stored_teacher(
    model: nn.Module,
    recipe: Recipe,
    data: PreparedData,
    inputs: Mapping[str, str],
    world: World,
    load: Callable[[], Teacher],
) -> dict[str, StoredTeacher]:
    """Finds or computes the teacher's likeliest tokens for the training and held-out data. All
    ranks call it.

    The teacher is loaded, asked and freed only if files are missing or damaged. `inputs`: as
    `fingerprint_inputs` makes them.

    Returns:
        By the names of `find_stored`.
    """
    stored = find_stored(data)
    ranks = RankGroup(world)
    keys = recipe.method
    asked = [inputs.get("teacher"), keys.teacher_load_in_4bit, keys.temperature, keys.distill_top_k]
    key: str = ranks.on_main(lambda: hash_model_and_data(recipe, stored, json.dumps(asked), world))
    folders = {name: cache_folder(recipe.data) / f"teacher-{key}" / name for name in stored}

    def recall() -> dict[str, StoredTeacher]:
        """Opens what is complete on every rank."""
        here = {}
        for name, batches in stored.items():
            teacher = _recall(folders[name], batches, recipe)
            if teacher is not None:
                here[name] = teacher
        names_by_rank = ranks.on_all(lambda: sorted(here))
        everywhere = set(here).intersection(*names_by_rank)
        return {name: teacher for name, teacher in here.items() if name in everywhere}

    known = recall()
    missing = [name for name in stored if name not in known]
    if missing:
        teacher = load()
        for name in missing:
            _store(teacher, folders[name], stored[name], model, recipe, world)
        known = recall()
    for name in stored:
        if name not in known:
            raise UserError(
                f"{folders[name]}: lacks what other nodes have computed; set dataset_cache_dir to "
                "a folder that all share"
            )
    return known


def _recall(folder: Path, batches: StoredBatches, recipe: Recipe) -> StoredTeacher | None:
    """Opens what `_store` wrote into `folder`; None if it is damaged or lacks an example."""
    pieces: list[tuple[Int32s, NDArray[np.float32]]] = []
    places = np.full((len(batches.examples), 3), -1, np.int64)
    rows = 0
    for path in sorted(folder.glob("*.json")):
        described = read_json_object(path)
        arrays = _open_piece(path, described)
        if arrays is None:
            return None
        examples, ids, scores = arrays
        numbers, counts = examples.T
        piece = np.full(len(numbers), len(pieces))
        places[numbers] = np.stack([piece, counts.cumsum() - counts, counts], 1)
        pieces.append((ids, scores))
        rows = described["rows"]
    steps = steps_of_examples(batches)
    wanted = np.unique(np.concatenate([documents_of(batches, step) for step in steps]))
    if not pieces or (places[wanted, 2] != batches.examples.trained[wanted]).any():
        return None
    keys = recipe.method
    options = DivergenceOptions(keys.distill_beta, keys.temperature, keys.distill_alpha)
    return StoredTeacher(pieces, places, rows, options)


def _open_piece(path: Path, described: Mapping[str, Any]) -> list[NDArray[Any]] | None:
    """Opens the arrays of `PARTS` beside `path`; None if one has another checksum than
    `described`.
    """
    arrays = []
    for part in PARTS:
        file = path.with_name(f"{path.stem}-{part}.npy")
        if not file.is_file() or checksum(file) != described.get(file.name):
            return None
        arrays.append(np.load(file, mmap_mode="r", allow_pickle=False))
    return arrays


def _store(
    teacher: Teacher,
    folder: Path,
    batches: StoredBatches,
    model: nn.Module,
    recipe: Recipe,
    world: World,
) -> None:
    """Writes the teacher's likeliest tokens at the trained tokens into `folder`.

    All ranks call it; each writes a piece.
    """
    began = time.monotonic()
    k = recipe.method.distill_top_k or 1
    heads: list[Any] = [unwrap(model).get_output_embeddings()]
    heads.append(unwrap(teacher.model).get_output_embeddings())
    rows = min(head.weight.shape[0] for head in heads)
    arrays = _ask(teacher, batches, rows, k, world)
    ranks = RankGroup(world)
    ranks.on_all(lambda: empty_folder(folder) if world.local_rank == 0 else None)
    stem = f"piece-{world.rank:05d}-of-{world.size:05d}"
    ranks.on_all(lambda: _write_piece(folder, stem, rows, arrays))
    if world.is_main:
        tokens = int(batches.examples.trained.sum(dtype=np.int64))
        took = f"{counted(tokens, 'trained token')} in {time.monotonic() - began:.1f} s"
        print(f"teacher {folder}: the likeliest {k} of each of {took}", file=sys.stderr, flush=True)


def _ask(
    teacher: Teacher, batches: StoredBatches, rows: int, k: int, world: World
) -> list[NDArray[Any]]:
    """Runs the teacher over this rank's rows; returns the arrays of `PARTS`.

    Args:
        teacher: Is asked about its likeliest tokens.
        batches: Of the data.
        rows: Of the vocabulary, which both models have.
        k: How many of the likeliest tokens are kept, at most `rows`.
        world: The ranks of the run.
    """
    k = min(k, rows)
    # empty ones first: a rank may have no row
    examples = [np.zeros((0, 2), np.int64)]
    ids = [np.zeros((0, k), np.int32)]
    scores = [np.zeros((0, k + 1), np.float32)]
    for step in steps_of_examples(batches):
        for micro_batch in batches.step_batch(step).micro_batches:
            on_device = micro_batch.to(world.device)
            top_ids, top_scores = teacher.find_top(on_device.inputs, rows, k)
            has_label = (on_device.labels.flatten()[on_device.trained_positions] >= 0).cpu()
            numbers = np.array(micro_batch.example_ids, np.int64)
            examples.append(np.stack([numbers, batches.examples.trained[numbers]], 1))
            ids.append(top_ids.cpu()[has_label].int().numpy())
            scores.append(top_scores.cpu()[has_label].numpy())
    reshard(teacher.model)
    return [np.concatenate(parts) for parts in (examples, ids, scores)]


def _write_piece(folder: Path, stem: str, rows: int, arrays: Sequence[NDArray[Any]]) -> None:
    """Writes the arrays of `PARTS`, then a file with the rows of the vocabulary and the arrays'
    checksums.
    """
    files = dict[str, object](rows=rows)
    for part, array in zip(PARTS, arrays, strict=True):
        content = io.BytesIO()
        np.save(content, array, allow_pickle=False)
        name = f"{stem}-{part}.npy"
        files[name] = write_file(folder / name, [content.getbuffer()])
    write_file(folder / f"{stem}.json", [json.dumps(files).encode()])


def teacher_flop_per_token(objective: Objective, length: float) -> float:
    """Counts the FLOP of the teacher's forward of one token in a document of `length` tokens; 0 if
    no teacher runs in a step.
    """
    teacher = getattr(objective, "teacher", None)
    if isinstance(teacher, Teacher):
        return teacher.flop_per_token(length)
    return 0.0


def read_teacher_facts(recipe: Recipe, tokenizer: Any) -> ModelFacts | None:
    """Reads the facts of the recipe's teacher, for the rules; None if it has none.

    Raises:
        UserError: For a config or headers of weights that cannot be read, or another tokenizer.
    """
    teacher = recipe.teacher
    if teacher is None:
        return None
    name = str(teacher.model_name_or_path)
    try:
        facts = read_facts(load_config(teacher), name, len(tokenizer))
        if recipe.method_facts.needs_teacher:
            refuse_other_tokenizer(tokenizer, teacher)
        if Path(name).is_dir():
            read_folder(name)  # headers only, before the data is read
    except UserError as error:
        raise UserError(f"teacher_model_name_or_path: {error}") from None
    return facts
