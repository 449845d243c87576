"""Distillation as an `Objective`: a mix of the divergence from a teacher and the cross entropy of
the labels.

Either the teacher runs in each step, or it runs once before training (`distill_top_k`). Its k
likeliest tokens at each trained token are then kept in files beside the token cache. The files that
one rank writes there at once are called a piece.
"""

import io
import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from finetune.config.facts import ModelFacts
from finetune.config.pretrained import load_config, read_facts
from finetune.config.schema import Recipe
from finetune.constants import IGNORE_INDEX, STORED_PIECE_BYTES, stored_token_bytes
from finetune.data.batches import MicroBatch, StepBatch
from finetune.data.packing import StoredBatches
from finetune.data.prepare import PreparedData
from finetune.data.token_store import Int32s, Int64s, cache_folder
from finetune.data.tokenizer import refuse_other_tokenizer
from finetune.distributed.model_parts import unwrap
from finetune.distributed.parallelize import reshard
from finetune.distributed.world import RankGroup, World
from finetune.errors import Preempted, UserError
from finetune.files.durable import checksum, make_folder, write_file
from finetune.files.json_files import read_json_object
from finetune.files.tensors import read_folder
from finetune.models.cross_entropy import HeadFunction
from finetune.models.load import Teacher
from finetune.models.log_probabilities import DivergenceOptions, TopScores, head_divergence
from finetune.training.objectives.objective import Measured, Objective
from finetune.training.reference import (
    SAVE_SECONDS,
    documents_of,
    find_stored,
    hash_model_and_data,
    steps_of_examples,
)
from finetune.training.watch import SignalListener
from finetune.units import counted, disk_size


class Distillation(Objective):
    """alpha x divergence + (1 - alpha) x cross entropy, averaged over a step's trained tokens."""

    def __init__(self, teacher: "Teacher | StoredTeacher") -> None:
        self.teacher = teacher

    def measure(
        self, model: nn.Module, micro_batch: MicroBatch, inputs: Mapping[str, Any], batch: StepBatch
    ) -> Measured:
        """Sums the loss over the micro-batch's trained tokens; the metrics are the mean divergence
        and the mean cross entropy.
        """
        if isinstance(self.teacher, StoredTeacher):
            head_function = self.teacher.recall(micro_batch)
        else:
            # not `inputs`, which may add noise to the embeddings
            head_function = self.teacher.compare(micro_batch.inputs)
        loss, divergence, cross_entropy = model(**inputs, head_function=head_function).unbind()
        trained_tokens = (micro_batch.labels != IGNORE_INDEX).sum().to(loss.dtype)
        metrics = {
            "kl": torch.stack([divergence.detach(), trained_tokens]),
            "cross_entropy": torch.stack([cross_entropy.detach(), trained_tokens]),
        }
        return Measured(loss, metrics)


# The arrays of a piece. "examples", int64[examples, 2]: an example's id and the number of its
# trained tokens. "ids", int32[tokens, k], and "scores", fp32[tokens, k + 1]: those of `TopScores`
# for the trained tokens of all these examples, in their order.
PARTS = ("examples", "ids", "scores")


@dataclass(frozen=True, slots=True)
class StoredTeacher:
    """The teacher's likeliest tokens at each trained token, in memory-mapped files."""

    pieces: Sequence[tuple[Int32s, NDArray[np.float32]]]  # (ids, scores) of each piece
    # [examples, 3]: the piece that has an example, the index of its first trained token there, and
    # the number of its trained tokens; -1 for an example that no step of the run reads
    places: Int64s
    rows: int  # of the vocabulary that the scores were computed over
    options: DivergenceOptions

    def recall(self, micro_batch: MicroBatch) -> HeadFunction:
        """Makes the head function that computes the divergence from the stored scores.

        `micro_batch`: on the device. The function's result is that of `Teacher.compare`'s.
        """
        first_ids, _ = self.pieces[0]
        k = first_ids.shape[1]
        # entry 0 stands for positions without a label
        ids = [np.zeros((1, k), np.int32)]
        scores = [np.zeros((1, k + 1), np.float32)]
        for piece, first, token_count in self.places[list(micro_batch.example_ids)].tolist():
            piece_ids, piece_scores = self.pieces[piece]
            ids.append(piece_ids[first : first + token_count])
            scores.append(piece_scores[first : first + token_count])
        has_label = micro_batch.labels.flatten()[micro_batch.trained_positions] >= 0
        # labeled positions have the same order as the trained tokens of the examples
        entry_of_position = torch.where(has_label, has_label.cumsum(0), 0)

        def join_and_look_up(parts: list[NDArray[Any]]) -> Tensor:
            on_host = torch.from_numpy(np.concatenate(parts))
            return on_host.to(entry_of_position.device, non_blocking=True)[entry_of_position]

        top = TopScores(join_and_look_up(ids).long(), join_and_look_up(scores), self.rows)
        return head_divergence(top, self.options)


def find_stored_teacher(
    model: nn.Module,
    recipe: Recipe,
    data: PreparedData,
    inputs: Mapping[str, str],
    signals: SignalListener,
    world: World,
    load: Callable[[], Teacher],
) -> dict[str, StoredTeacher]:
    """Finds the files of the teacher's likeliest tokens, writes those that are missing or damaged,
    and returns them opened.

    All ranks call it. The teacher is loaded only if it has to compute something.

    Args:
        model: The student. Only tokens that are in its vocabulary too are kept.
        recipe: With its teacher.
        data: The training and held-out data.
        inputs: The fingerprints that `fingerprint_inputs` makes.
        signals: A signal may stop the teacher.
        world: The ranks of the run.
        load: Loads the teacher.

    Returns:
        The stored teacher of the training data, and that of the held-out data if there are any,
        under the names of `find_stored`.

    Raises:
        UserError: If the disk is too small, or a rank does not find what the ranks of other nodes
            have written.
        Preempted: If a signal asks to stop. The files have all that was computed.
    """
    stored = find_stored(data)
    ranks = RankGroup(world)
    keys = recipe.method
    hashed = [
        inputs.get("teacher"),
        keys.teacher_load_in_4bit,
        keys.temperature,
        keys.distill_top_k,
    ]
    key: str = ranks.on_main(lambda: hash_model_and_data(recipe, stored, json.dumps(hashed), world))
    folders = {name: cache_folder(recipe.data) / f"teacher-{key}" / name for name in stored}

    def open_all() -> tuple[dict[str, StoredTeacher], dict[str, list[int]]]:
        """Opens the files, and finds the steps that they lack on this rank."""
        opened = {name: _open_stored(folders[name], stored[name], recipe) for name in stored}
        missing = {name: _find_missing_steps(opened[name], stored[name]) for name in stored}
        return opened, missing

    teachers, missing = open_all()
    missing_on_main: dict[str, list[int]] = ranks.on_main(lambda: missing)
    if any(missing_on_main.values()):
        ranks.on_main(lambda: _refuse_small_disk(recipe, stored, missing_on_main))
        teacher = load()
        for name, steps in missing_on_main.items():
            _store(teacher, folders[name], stored[name], steps, model, recipe, signals, world)
        teachers, missing = open_all()
    ranks.on_all(lambda: _refuse_missing(folders, missing))
    return teachers


def _refuse_small_disk(
    recipe: Recipe, stored: Mapping[str, StoredBatches], missing: Mapping[str, Sequence[int]]
) -> None:
    """Raises `UserError` if the disk is too small for the teacher's likeliest tokens.

    `missing`: the steps of each of the `stored` data whose tokens will be written.
    """
    folder = cache_folder(recipe.data)
    top_k = recipe.method.distill_top_k
    assert top_k is not None, "without it no tokens of the teacher are stored"
    tokens = 0
    for name, steps in missing.items():
        trained = stored[name].examples.trained
        tokens += sum(int(trained[documents_of(stored[name], step)].sum()) for step in steps)
    needed = tokens * stored_token_bytes(top_k)
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise UserError(
            f"{folder}: the teacher's {top_k} likeliest of each of "
            f"{counted(tokens, 'trained token')} take {disk_size(needed)}, but {disk_size(free)} "
            "are free here; lower distill_top_k, free space, or set another dataset_cache_dir"
        )


def _refuse_missing(folders: Mapping[str, Path], missing: Mapping[str, Sequence[int]]) -> None:
    """Raises `UserError` if this rank does not find what the ranks of other nodes have written.

    `missing`: the steps that each folder lacks.
    """
    for name, steps in missing.items():
        if steps:
            raise UserError(
                f"{folders[name]}: lacks what other nodes have computed; set dataset_cache_dir to "
                "a folder that all share"
            )


def _open_stored(folder: Path, batches: StoredBatches, recipe: Recipe) -> StoredTeacher:
    """Opens the pieces that `_store` wrote into `folder`, but not those that are damaged."""
    pieces: list[tuple[Int32s, NDArray[np.float32]]] = []
    places = np.full((len(batches.examples), 3), -1, np.int64)
    rows = 0
    for path in sorted(folder.glob("*.json")):
        description = read_json_object(path)
        arrays = _open_piece(path, description)
        if arrays is None:
            continue
        examples, ids, scores = arrays
        example_ids, token_counts = examples.T
        piece = np.full(len(example_ids), len(pieces))
        first_tokens = token_counts.cumsum() - token_counts
        places[example_ids] = np.stack([piece, first_tokens, token_counts], 1)
        pieces.append((ids, scores))
        rows = description["rows"]  # the same in every piece
    keys = recipe.method
    options = DivergenceOptions(keys.distill_beta, keys.temperature, keys.distill_alpha)
    return StoredTeacher(pieces, places, rows, options)


def _find_missing_steps(stored: StoredTeacher, batches: StoredBatches) -> list[int]:
    """Finds the steps with an example whose trained tokens are not all in the files."""
    stored_counts = stored.places[:, 2]
    is_missing = stored_counts != batches.examples.trained
    steps = steps_of_examples(batches)
    return [step for step in steps if is_missing[documents_of(batches, step)].any()]


def _open_piece(path: Path, description: Mapping[str, Any]) -> list[NDArray[Any]] | None:
    """Opens the arrays of a piece, in the order of `PARTS`.

    Returns None if a file is missing or has another checksum than the `description`, which is the
    content of the piece's JSON file at `path`.
    """
    arrays = []
    for part in PARTS:
        file = path.with_name(f"{path.stem}-{part}.npy")
        if not file.is_file() or checksum(file) != description.get(file.name):
            return None
        arrays.append(np.load(file, mmap_mode="r", allow_pickle=False))
    return arrays


def _store(
    teacher: Teacher,
    folder: Path,
    batches: StoredBatches,
    steps: Sequence[int],
    model: nn.Module,
    recipe: Recipe,
    signals: SignalListener,
    world: World,
) -> None:
    """Runs the teacher over the batches of `steps`, and writes its likeliest tokens into `folder`.

    All ranks call it, and each writes its pieces beside those that are there.

    Raises `Preempted` if a signal asks to stop. The files have all that was computed.
    """
    if not steps:
        return
    began = time.monotonic()
    top_k = recipe.method.distill_top_k
    assert top_k is not None, "without it no tokens of the teacher are stored"
    student_head: Any = unwrap(model).get_output_embeddings()
    teacher_head: Any = unwrap(teacher.model).get_output_embeddings()
    # the part of the vocabulary that both models have
    rows = min(head.weight.shape[0] for head in (student_head, teacher_head))
    k = min(top_k, rows)
    ranks = RankGroup(world)
    ranks.on_all(lambda: make_folder(folder) if world.local_rank == 0 else None)
    # A piece has several files: their count is a number that no piece has, not even half of one.
    first_number: int = ranks.on_main(lambda: len(list(folder.iterdir())))
    pieces = _find_top_tokens(teacher, batches, steps, rows, k, signals, world)
    for number, piece in enumerate(pieces, start=first_number):
        stem = f"piece-{world.rank:05d}-of-{world.size:05d}-{number:05d}"
        ranks.on_all(partial(_write_piece, folder, stem, rows, piece))
        if signals.agree(world).stop:
            raise Preempted(
                f"{folder}: stopped by a signal; what the teacher has computed is kept there, and "
                "the same command computes the rest"
            )
    if world.is_main:
        asked_examples = np.unique(np.concatenate([documents_of(batches, step) for step in steps]))
        tokens = int(batches.examples.trained[asked_examples].sum(dtype=np.int64))
        seconds = time.monotonic() - began
        print(
            f"teacher {folder}: the likeliest {k} of each of {counted(tokens, 'trained token')} in "
            f"{seconds:.1f} s",
            file=sys.stderr,
            flush=True,
        )


def _find_top_tokens(
    teacher: Teacher,
    batches: StoredBatches,
    steps: Sequence[int],
    rows: int,
    k: int,
    signals: SignalListener,
    world: World,
) -> Iterator[list[list[NDArray[Any]]]]:
    """Runs the teacher over this rank's batches, and yields its likeliest tokens.

    Yields the content of a piece: the arrays of each micro-batch, in the order of `PARTS`. Every
    rank yields as many pieces: after a step at which a rank holds STORED_PIECE_BYTES, every
    SAVE_SECONDS, when a signal asks to save or stop, and after the last step.

    Args:
        teacher: On every rank.
        batches: Of the training or the held-out data.
        steps: The steps whose batches are read; at least one.
        rows: The rows of the vocabulary that both models have.
        k: How many of the likeliest tokens are kept; at most `rows`.
        signals: The signals that this rank receives.
        world: The ranks of the run.
    """
    # a piece has arrays even if this rank has no batch
    empty: list[NDArray[Any]] = [
        np.zeros((0, 2), np.int64),
        np.zeros((0, k), np.int32),
        np.zeros((0, k + 1), np.float32),
    ]
    piece = [empty]  # the arrays of each micro-batch
    yielded_at = time.monotonic()
    for step in steps:
        for micro_batch in batches.step_batch(step).micro_batches:
            on_device = micro_batch.to(world.device)
            top_ids, top_scores = teacher.find_top(on_device.inputs, rows, k)
            has_label = (on_device.labels.flatten()[on_device.trained_positions] >= 0).cpu()
            example_ids = np.array(micro_batch.example_ids, np.int64)
            examples = np.stack([example_ids, batches.examples.trained[example_ids]], 1)
            ids = top_ids.cpu()[has_label].int().numpy()
            piece.append([examples, ids, top_scores.cpu()[has_label].numpy()])
        held_bytes = sum(array.nbytes for arrays in piece for array in arrays)
        if held_bytes >= STORED_PIECE_BYTES or time.monotonic() - yielded_at > SAVE_SECONDS:
            # asks for a save as a signal would: all ranks agree on it below
            signals.save = True
        requests = signals.agree(world)
        if requests.save or requests.stop or step == steps[-1]:
            reshard(teacher.model)
            yield piece
            piece[:] = [empty]  # whoever has the list keeps no array
            signals.save = False
            yielded_at = time.monotonic()


def _write_piece(
    folder: Path, stem: str, rows: int, piece: Sequence[Sequence[NDArray[Any]]]
) -> None:
    """Writes a piece: a file for each array, and then a JSON file that describes them.

    The JSON file has `rows`, and the size and checksum of each array's file.

    Args:
        folder: Of all pieces.
        stem: What the names of the piece's files begin with.
        rows: The rows of the vocabulary that the scores were computed over.
        piece: The arrays of each micro-batch, in the order of `PARTS`. Each file holds those of
            one part, joined.
    """
    description = dict[str, object](rows=rows)
    for part, arrays in zip(PARTS, zip(*piece, strict=True), strict=True):
        header = np.lib.format.header_data_from_array_1_0(arrays[0])
        header["shape"] = (sum(map(len, arrays)), *arrays[0].shape[1:])
        content = io.BytesIO()
        np.lib.format.write_array_header_1_0(content, header)
        # not joined in memory; an empty array has no bytes to view
        values = (np.ascontiguousarray(array).data for array in arrays if array.size)
        name = f"{stem}-{part}.npy"
        description[name] = write_file(folder / name, [content.getbuffer(), *values])
    write_file(folder / f"{stem}.json", [json.dumps(description).encode()])


def teacher_flop_per_token(objective: Objective, length: float) -> float:
    """Counts the FLOP that the teacher's forward adds to each token of a step, in a document of
    `length` tokens.

    Returns 0 if no teacher runs in a step: the method has none, or its tokens are stored.
    """
    # a field of `Distillation` and of `PolicyObjective`
    teacher = getattr(objective, "teacher", None)
    if isinstance(teacher, Teacher):
        return teacher.flop_per_token(length)
    return 0.0


def read_teacher_facts(recipe: Recipe, tokenizer: Any) -> ModelFacts | None:
    """Reads the facts of the recipe's teacher, to which the rules apply; None if it has none.

    Raises:
        UserError: If the teacher's config or the headers of its weights cannot be read, or if the
            method learns from its probabilities and it has another tokenizer.
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
        raise UserError(f"{recipe.teacher_key}: {error}") from None
    return facts
