"""The way from a recipe to batches, walked once."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from math import ceil
from typing import Any

import numpy as np
import xxhash

from finetune.constants import IGNORE_INDEX, global_batch_size
from finetune.data.batches import Batches, MicroBatch, Ranks, StepBatch, batches_of
from finetune.data.chat_templates import PLAIN
from finetune.data.checks import Finding, Tally, fatal, findings
from finetune.data.examples import Examples
from finetune.data.mixture import SourceReport, examples_of, held_out_in_training, hold_out, mixed
from finetune.data.renderer import renderer
from finetune.data.sampler import Arrangement
from finetune.data.streaming import StreamedBatches, stream_fingerprint, streamed
from finetune.data.token_cache import cached_store
from finetune.errors import UserError
from finetune.recipe.schema import DatasetSource, Recipe
from finetune.units import counted

__all__ = ["DataReport", "MicroBatch", "PreparedData", "Prompt", "StepBatch", "look_at", "prepare_data"]

QUANTILES = (0.0, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A held-out question and its true answer."""

    prompt_ids: list[int]  # up to where the assistant (or the completion) begins
    answer: str  # without special tokens and the white space around it


@dataclass(frozen=True, slots=True)
class DataReport:
    """What was read, and what became of it; every count is of one epoch over all ranks."""

    sources: tuple[SourceReport, ...]
    eval_sources: tuple[SourceReport, ...]
    examples: int
    tokens: int
    trained_tokens: int
    held_out_examples: int
    length_quantiles: dict[str, int]  # tokens of an example, by share of the examples
    rows: int  # packed rows, or padded ones
    fill: float  # the share of the rows that is not padding: of max_length where packed, of the longest row where not
    steps_per_epoch: int
    findings: tuple[Finding, ...]

    def as_json(self) -> dict[str, Any]:
        """The report as plain values."""
        return asdict(self)

    def lines(self) -> list[str]:
        """What `launch` shows: the totals, what is lost to max_length, then every finding that is more than a notice."""
        totals = (
            f"{counted(self.examples, 'example')}, {counted(self.tokens, 'token')}, {self.trained_tokens:,} trained; "
            f"rows {self.fill:.1%} full"
        )
        lost = [line for source in (*self.sources, *self.eval_sources) for line in source.loss()]
        return [totals, *lost, *(str(finding) for finding in self.findings if finding.severity != "notice")]


@dataclass(frozen=True, slots=True)
class PreparedData:
    """What a run trains on and is measured on."""

    train: Batches | StreamedBatches
    evaluation: Batches | None
    report: DataReport | None  # None where the data is streamed: it has not been read
    tokenizer: Any
    eval_sources: tuple[SourceReport, ...] = ()  # beside a stream; else the report has them

    @property
    def fingerprint(self) -> str | None:
        """A hash of the content of all files that are trained on (of a stream, of pieces of it); None for a stream of the hub.

        Not of the rendered text: a chat template may put today's date into it.
        """
        if isinstance(self.train, StreamedBatches):
            return stream_fingerprint(self.train.sources)
        content = [store.facts["content"] for store in self.train.examples.stores]
        return xxhash.xxh3_128_hexdigest(json.dumps(content).encode())

    def completed(self, recipe: Recipe) -> Recipe:
        """The recipe with what the data decides: without plain text, an `overlength` that is left out is `truncate`.

        So a run over conversations resumes that began when this was every format's default.
        """
        sources = () if self.report is None else (*self.report.sources, *self.report.eval_sources)
        if recipe.data.overlength or not sources or any("text" in source.formats for source in sources):
            return recipe
        return replace(recipe, data=replace(recipe.data, overlength="truncate"))

    def held_out_prompts(self, count: int) -> list[Prompt]:
        """At most `count` held-out examples, each cut where its last trained stretch begins."""
        prompts: list[Prompt] = []
        held_out = self.evaluation.examples if self.evaluation else ()
        for example_id in range(len(held_out)):
            if len(prompts) == count:
                break
            prompt = _prompt(held_out[example_id].input_ids, held_out[example_id].labels, self.tokenizer)
            prompts += [prompt] if prompt else []
        return prompts


def prepare_data(recipe: Recipe, tokenizer: Any, world: Ranks) -> PreparedData:
    """Reads, tokenizes (or finds tokenized), splits and arranges the data of a recipe, for one rank.

    Where the tokenizer has no chat template and conversations need one, it leaves with the one they were rendered by.
    Raises `UserError` for data that cannot be read, and for fatal findings.
    """
    if not recipe.data.streaming:
        train, evaluation, report = _read_all(recipe, tokenizer, world)
        _stop_at_fatal(report.findings)
        return PreparedData(train, evaluation, report, tokenizer)
    held_out, eval_sources = _mix(recipe.data.eval_datasets, recipe, tokenizer, world)
    _stop_at_fatal(finding for source in eval_sources for finding in source.findings)
    stream, evaluation = _stream(recipe, tokenizer, world), _evaluation(recipe, held_out, tokenizer, world)
    return PreparedData(stream, evaluation, None, tokenizer, eval_sources)


def _stop_at_fatal(found: Iterable[Finding]) -> None:
    stop = fatal(found)
    if stop:
        raise UserError.of(map(str, stop))


def look_at(recipe: Recipe, tokenizer: Any, world: Ranks) -> tuple[Batches, DataReport]:
    """The training data and its report, whatever was found in it; of a stream, its first block.

    Raises `UserError` for data that cannot be read, or that leaves nothing to train on.
    """
    if not recipe.data.streaming:
        train, _, report = _read_all(recipe, tokenizer, world)
        return train, report
    stream = _stream(recipe, tokenizer, world)
    examples, source = examples_of(stream.store(0), recipe.data.datasets[0], recipe.data)
    stream.clear()  # what has been opened stays readable
    train = _training(recipe, examples, tokenizer, world)
    return train, _report(train, (source,), (), None, source.findings)


def _read_all(recipe: Recipe, tokenizer: Any, world: Ranks) -> tuple[Batches, Batches | None, DataReport]:
    """(training, held-out, report) of data that is read before training."""
    examples, sources = _mix(recipe.data.datasets, recipe, tokenizer, world)
    held_out, eval_sources = _mix(recipe.data.eval_datasets, recipe, tokenizer, world)
    found = [finding for source in (*sources, *eval_sources) for finding in source.findings]
    if examples is None or not len(examples):
        raise UserError.of([*map(str, fatal(found)), f"{recipe.path}: datasets: nothing is left to train on"])
    if recipe.data.eval_split_size is not None:
        examples, held_out = hold_out(examples, recipe.data.eval_split_size, recipe.run.seed)
    if held_out is not None:
        tally = Tally()
        tally.note("held_out_in_training", [held_out.where(i) for i in held_out_in_training(examples, held_out)])
        found += findings(tally, of=len(held_out))
    if any(finding.name == "plain_template" for finding in found):
        tokenizer.chat_template = PLAIN
    train = _training(recipe, examples, tokenizer, world)
    evaluation = _evaluation(recipe, held_out, tokenizer, world)
    return train, evaluation, _report(train, sources, eval_sources, held_out, found)


def _report(
    train: Batches,
    sources: tuple[SourceReport, ...],
    eval_sources: tuple[SourceReport, ...],
    held_out: Examples | None,
    found: Sequence[Finding],
) -> DataReport:
    examples = train.examples
    quantiles = np.quantile(examples.lengths, QUANTILES)
    return DataReport(
        sources=sources,
        eval_sources=eval_sources,
        examples=len(examples),
        tokens=int(examples.lengths.sum(dtype=np.int64)),
        trained_tokens=int(examples.trained.sum(dtype=np.int64)),
        held_out_examples=0 if held_out is None else len(held_out),
        length_quantiles={f"{q:.0%}": int(v) for q, v in zip(QUANTILES, quantiles, strict=True)},
        rows=train.rows_per_epoch,
        fill=train.fill(),
        steps_per_epoch=train.steps_per_epoch,
        findings=tuple(found),
    )


def _mix(
    sources: tuple[DatasetSource, ...], recipe: Recipe, tokenizer: Any, world: Ranks
) -> tuple[Examples | None, tuple[SourceReport, ...]]:
    """(the examples of all sources, what became of each); None where there is no source."""
    parts, reports = [], []
    for source in sources:
        store = cached_store(source, recipe.data, tokenizer, world.local_rank)
        examples, report = examples_of(store, source, recipe.data)
        parts.append(examples)
        reports.append(report)
    return mixed(parts, sources, recipe.run.seed) if parts else None, tuple(reports)


def _arrangement(recipe: Recipe, rows: int) -> Arrangement:
    return Arrangement(
        seed=recipe.run.seed,
        packing=recipe.data.packing,
        max_length=recipe.data.max_length,
        global_batch_size=rows,
    )


def _stream(recipe: Recipe, tokenizer: Any, world: Ranks) -> StreamedBatches:
    steps = recipe.optimization.max_steps
    if steps is None or recipe.data.eval_split_size is not None:
        raise UserError(
            f"{recipe.path}: streaming has no known end: set max_steps, and eval_datasets for eval_split_size"
        )
    if renderer(tokenizer, recipe.data.assistant_only_loss).template == PLAIN:
        tokenizer.chat_template = PLAIN  # whether a stream will need it is not known before it is read
    return streamed(
        recipe.data.datasets,
        recipe.data,
        tokenizer,
        _arrangement(recipe, global_batch_size(recipe.batch, world.size)),
        world,
        per_device_batch_size=recipe.batch.per_device_train_batch_size,
        steps=steps,
    )


def _training(recipe: Recipe, examples: Examples, tokenizer: Any, world: Ranks) -> Batches:
    train = batches_of(
        examples,
        _arrangement(recipe, global_batch_size(recipe.batch, world.size)),
        world,
        per_device_batch_size=recipe.batch.per_device_train_batch_size,
        threads=recipe.data.dataloader_num_workers,
        pad_token_id=tokenizer.pad_token_id or 0,
    )
    if train.rows_per_epoch < world.size:
        packed = (
            f" ({counted(len(examples), 'example')} packed by max_length {recipe.data.max_length})"
            if recipe.data.packing
            else ""
        )
        raise UserError(
            f"{recipe.path}: datasets: {counted(train.rows_per_epoch, 'row')}{packed} cannot be dealt out to {world.size} ranks; "
            "give more data or fewer ranks"
            + (", a smaller max_length, or packing: false" if recipe.data.packing else "")
        )
    epochs = recipe.optimization.num_train_epochs
    return replace(train, steps=recipe.optimization.max_steps or ceil(epochs * train.steps_per_epoch))


def _evaluation(recipe: Recipe, held_out: Examples | None, tokenizer: Any, world: Ranks) -> Batches | None:
    """One pass over the held-out examples. Their order does not matter to a loss that every token has one vote in."""
    if held_out is None or not len(held_out):
        return None
    size = recipe.batch.per_device_eval_batch_size or recipe.batch.per_device_train_batch_size
    return batches_of(
        held_out,
        _arrangement(recipe, size * world.size),
        world,
        per_device_batch_size=size,
        threads=recipe.data.dataloader_num_workers,
        pad_token_id=tokenizer.pad_token_id or 0,
    )


def _prompt(input_ids: Any, labels: Any, tokenizer: Any) -> Prompt | None:
    """None for an example that asks nothing, such as plain text."""
    trained = np.flatnonzero(labels != IGNORE_INDEX)
    if len(trained) == 0:
        return None
    breaks = np.flatnonzero(np.diff(trained) > 1)
    first = int(trained[breaks[-1] + 1] if len(breaks) else trained[0])
    prompt_ids = input_ids[: first + 1].tolist()
    if first == 0 or set(prompt_ids) <= set(tokenizer.all_special_ids):
        return None
    answer: str = tokenizer.decode(labels[first : trained[-1] + 1].tolist(), skip_special_tokens=True)
    return Prompt(prompt_ids, answer.strip())
