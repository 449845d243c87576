"""Distillation as an `Objective`: the divergence from a teacher beside the cross entropy of the
labels.

The teacher is asked in each step; or once before training, and its likeliest tokens are kept in
files beside the token cache (`distill_top_k`).
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
from torch import nn

from finetune.config.facts import ModelFacts
from finetune.config.pretrained import load_config, read_facts
from finetune.config.schema import Recipe
from finetune.constants import IGNORE_INDEX
from finetune.data.batches import MicroBatch, StepBatch
from finetune.data.packing import StoredBatches
from finetune.data.prepare import PreparedData
from finetune.data.token_store import cache_folder
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
from finetune.training.reference import documents_of, hash_inputs, steps_of
from finetune.units import counted


class Distillation(Objective):
    """alpha x divergence + (1 - alpha) x cross entropy, averaged over the trained tokens of the
    step.
    """

    def __init__(self, teacher: "Teacher | StoredTeacher") -> None:
        self.teacher = teacher

    def measure(
        self, model: nn.Module, micro_batch: MicroBatch, inputs: Mapping[str, Any], batch: StepBatch
    ) -> Measured:
        """The loss, and as metrics the divergence and the cross entropy of a token.

        The teacher reads no noise.
        """
        if isinstance(self.teacher, StoredTeacher):
            head_function = self.teacher.recall(micro_batch)
        else:
            head_function = self.teacher.compare(micro_batch.inputs)
        loss, divergence, cross_entropy = model(**inputs, head_function=head_function).unbind()
        trained = (micro_batch.labels != IGNORE_INDEX).sum().to(loss.dtype)
        means = {"kl": divergence, "cross_entropy": cross_entropy}
        return Measured(
            loss, {name: torch.stack([total.detach(), trained]) for name, total in means.items()}
        )


# Of a piece: int64[n, 2], examples and how many trained tokens each has; int32[tokens, k];
# fp32[tokens, k + 1].
PARTS = ("examples", "ids", "scores")


@dataclass(frozen=True, slots=True)
class StoredTeacher:
    """The teacher's answers about the trained tokens of all examples, in memory-mapped files."""

    # ids and scores, of each rank that has computed
    pieces: Sequence[tuple[NDArray[np.int32], NDArray[np.float32]]]
    # [examples, 3]: piece, first token, tokens; -1 for those that the run does not come to
    places: NDArray[np.int64]
    rows: int  # of the vocabulary
    options: DivergenceOptions

    def recall(self, micro_batch: MicroBatch) -> HeadFunction:
        """As `Teacher.compare`, for a micro-batch on the device."""
        device = micro_batch.labels.device
        k = self.pieces[0][0].shape[1]
        read = [
            (self.pieces[p], slice(f, f + n))
            for p, f, n in self.places[list(micro_batch.example_ids)].tolist()
        ]
        ids = np.concatenate(
            [np.zeros((1, k), np.int32), *(ids[tokens] for (ids, _), tokens in read)]
        )
        scores = np.concatenate(
            [np.zeros((1, k + 1), np.float32), *(each[tokens] for (_, each), tokens in read)]
        )
        has_label = micro_batch.labels.flatten()[micro_batch.trained_positions] >= 0
        # the first stands for positions without a label
        row = torch.where(has_label, has_label.cumsum(0), 0)
        on_device = (torch.from_numpy(each).to(device, non_blocking=True) for each in (ids, scores))
        tops, values = (each[row] for each in on_device)
        return head_divergence(TopScores(tops.long(), values, self.rows), self.options)


def find_stored_teacher(
    model: nn.Module,
    recipe: Recipe,
    data: PreparedData,
    inputs: Mapping[str, str],
    world: World,
    load: Callable[[], Teacher],
) -> dict[str, StoredTeacher]:
    """Finds or computes the teacher's answers about the training and held-out data. All ranks call
    it.

    It is loaded, asked and freed where the files are missing or damaged. `inputs`: of
    `fingerprint_inputs`.
    """
    batches = {"training": data.train, "held_out": data.evaluation}
    stored = {name: each for name, each in batches.items() if isinstance(each, StoredBatches)}
    ranks = RankGroup(world)
    keys = recipe.method
    asked = [inputs.get("teacher"), keys.teacher_load_in_4bit, keys.temperature, keys.distill_top_k]
    key: str = ranks.on_main(lambda: hash_inputs(recipe, stored, json.dumps(asked), world))
    folders = {name: cache_folder(recipe.data) / f"teacher-{key}" / name for name in stored}

    def recall() -> dict[str, StoredTeacher]:
        """The batches whose answers are complete on every rank."""
        here = {}
        for name, each in stored.items():
            teacher = _recall(folders[name], each, recipe)
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
    """Opens what `_store` wrote about all examples into `folder`; None where it is missing or
    damaged.
    """
    arrays: list[tuple[NDArray[Any], ...]] = []
    rows = 0
    for path in sorted(folder.glob("*.json")):
        files = {part: path.with_name(f"{path.stem}-{part}.npy") for part in PARTS}
        described = read_json_object(path)
        if any(
            not file.is_file() or checksum(file) != described.get(file.name)
            for file in files.values()
        ):
            return None
        rows = described["rows"]
        arrays.append(
            tuple(np.load(file, mmap_mode="r", allow_pickle=False) for file in files.values())
        )
    places = np.full((len(batches.examples), 3), -1, np.int64)
    for number, (examples, _, _) in enumerate(arrays):
        ids, counts = examples.T
        places[ids] = np.stack([np.full(len(ids), number), counts.cumsum() - counts, counts], 1)
    wanted = np.unique(np.concatenate([documents_of(batches, step) for step in steps_of(batches)]))
    if not arrays or (places[wanted, 2] != batches.examples.trained[wanted]).any():
        return None
    keys = recipe.method
    options = DivergenceOptions(keys.distill_beta, keys.temperature, keys.distill_alpha)
    return StoredTeacher([(ids, scores) for _, ids, scores in arrays], places, rows, options)


def _store(
    teacher: Teacher,
    folder: Path,
    batches: StoredBatches,
    model: nn.Module,
    recipe: Recipe,
    world: World,
) -> None:
    """Keeps in `folder` what the teacher says of the trained tokens.

    All ranks call it; each writes its own.
    """
    began = time.monotonic()
    k = recipe.method.distill_top_k or 1
    heads: list[Any] = [unwrap(each).get_output_embeddings() for each in (model, teacher.model)]
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
    """The arrays of `PARTS`: what the teacher says of this rank's trained tokens.

    Args:
        rows: Of the vocabulary.
        k: How many of the likeliest tokens are kept, at most `rows`.
    """
    said: list[tuple[NDArray[Any], ...]] = [
        (
            np.zeros((0, 2), np.int64),
            np.zeros((0, min(k, rows)), np.int32),
            np.zeros((0, min(k, rows) + 1), np.float32),
        )
    ]
    for step in steps_of(batches):
        for each in batches.step_batch(step).micro_batches:
            on_device = each.to(world.device)
            ids, scores = teacher.find_top(on_device.inputs, rows, k)
            has_label = (on_device.labels.flatten()[on_device.trained_positions] >= 0).cpu()
            examples = np.array(each.example_ids, np.int64)
            listed = np.stack([examples, batches.examples.trained[examples]], 1)
            said.append(
                (listed, ids.cpu()[has_label].int().numpy(), scores.cpu()[has_label].numpy())
            )
    reshard(teacher.model)
    return [np.concatenate(part) for part in zip(*said, strict=True)]


def _write_piece(folder: Path, stem: str, rows: int, arrays: Sequence[NDArray[Any]]) -> None:
    """Writes the arrays of `PARTS`, then the file that says what they are."""
    files = dict[str, object](rows=rows)
    for part, array in zip(PARTS, arrays, strict=True):
        content = io.BytesIO()
        np.save(content, array, allow_pickle=False)
        name = f"{stem}-{part}.npy"
        files[name] = write_file(folder / name, [content.getbuffer()])
    write_file(folder / f"{stem}.json", [json.dumps(files).encode()])


def teacher_flop_per_token(objective: Objective, length: float) -> float:
    """FLOP of the teacher's forward of one token in a document of `length` tokens; 0 where there is
    no teacher.
    """
    teacher: Any = getattr(objective, "teacher", None)
    return (
        0.0
        if teacher is None or isinstance(teacher, StoredTeacher)
        else teacher.flop_per_token(length)
    )


def read_teacher_facts(recipe: Recipe, tokenizer: Any) -> ModelFacts | None:
    """The facts of the recipe's teacher, for the rules; None where it has none.

    Raises:
        UserError: For a config, a tokenizer or headers of weights with which it cannot teach.
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
