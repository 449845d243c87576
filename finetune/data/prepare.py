"""From a recipe to batches: sources, their documents as tokens, examples cut from these, and batches of examples."""

from dataclasses import dataclass, replace
from typing import Any

from finetune.config.schema import DatasetSource, Recipe
from finetune.data.batches import Batches, RankInfo, StoredBatches, make_eval_batches, make_train_batches
from finetune.data.chat_templates import PLAIN
from finetune.data.data_report import DataReport, Report, SourceReport, make_report
from finetune.data.examples import Examples, Prompt, cut_prompts
from finetune.data.mixture import find_held_out_in_training, find_same_ratings, hold_out, mix_sources, select_examples
from finetune.data.streaming import StreamedBatches, open_stream
from finetune.data.token_cache import open_cached_store
from finetune.errors import UserError


@dataclass(frozen=True, slots=True)
class PreparedData:
    """What a run trains on and is measured on."""

    train: Batches
    evaluation: StoredBatches | None
    report: Report
    tokenizer: Any

    def complete_recipe(self, recipe: Recipe) -> Recipe:
        """The recipe with what the data decides: without plain text, an `overlength` of null is `truncate`.

        A run over conversations from when this was every format's default resumes with it.
        """
        if recipe.data.overlength or not self.report.is_complete or "text" in self.report.formats:
            return recipe
        return replace(recipe, data=replace(recipe.data, overlength="truncate"))

    def held_out_prompts(self, count: int) -> list[Prompt]:
        """At most `count` held-out examples as prompts."""
        return cut_prompts(self.evaluation.examples, count, self.tokenizer) if self.evaluation else []


def prepare_data(recipe: Recipe, tokenizer: Any, world: RankInfo) -> PreparedData:
    """Reads, tokenizes (or finds tokenized), splits and arranges the data of a recipe, for one rank.

    A tokenizer without a chat template gets the plain one where conversations need it. Raises `UserError` for data that
    cannot be read, and for fatal findings.
    """
    if recipe.data.streaming:
        data = _prepare_stream(recipe, tokenizer, world)
    else:
        data = PreparedData(*_read_stored(recipe, tokenizer, world), tokenizer)
    if stop := [finding for finding in data.report.findings if finding.is_fatal]:
        raise UserError.of(map(str, stop))
    return data


def preview_data(recipe: Recipe, tokenizer: Any, world: RankInfo) -> tuple[StoredBatches, DataReport]:
    """The training data and its report, whatever was found in it; of a stream, its first block.

    Raises `UserError` for data that cannot be read, or that leaves nothing to train on.
    """
    if not recipe.data.streaming:
        train, _, report = _read_stored(recipe, tokenizer, world)
        return train, report
    stream = open_stream(recipe, tokenizer, world)
    examples, source = select_examples(stream.open_block_store(0), recipe.data.datasets[0], recipe.data)
    stream.remove_blocks()  # an open store is memory-mapped, and needs no name
    train = make_train_batches(recipe, examples, tokenizer, world)
    return train, make_report(train, (source,))


def _prepare_stream(recipe: Recipe, tokenizer: Any, world: RankInfo) -> PreparedData:
    held_out, eval_sources = _read_sources(recipe.data.eval_datasets, recipe, tokenizer, world)
    train: StreamedBatches = open_stream(recipe, tokenizer, world, eval_sources)
    return PreparedData(train, make_eval_batches(recipe, held_out, tokenizer, world), train.report, tokenizer)


def _read_stored(
    recipe: Recipe, tokenizer: Any, world: RankInfo
) -> tuple[StoredBatches, StoredBatches | None, DataReport]:
    """(training, held-out, report) of data that is read before training."""
    examples, sources = _read_sources(recipe.data.datasets, recipe, tokenizer, world)
    held_out, eval_sources = _read_sources(recipe.data.eval_datasets, recipe, tokenizer, world)
    found = [finding for source in (*sources, *eval_sources) for finding in source.findings]
    if examples is None or not len(examples):
        stop = [str(finding) for finding in found if finding.is_fatal]
        raise UserError.of([*stop, f"{recipe.place_of('datasets')}: datasets: nothing is left to train on"])
    if recipe.data.eval_split_size is not None:
        examples, held_out = hold_out(examples, recipe.data.eval_split_size, recipe.run.seed)
    leaked = [] if held_out is None else find_held_out_in_training(examples, held_out)
    if any(finding.name == "plain_template" for finding in found):
        tokenizer.chat_template = PLAIN
    train = make_train_batches(recipe, examples, tokenizer, world)
    evaluation = make_eval_batches(recipe, held_out, tokenizer, world)
    return (
        train,
        evaluation,
        make_report(train, sources, eval_sources, held_out, [*find_same_ratings(examples), *leaked]),
    )


def _read_sources(
    sources: tuple[DatasetSource, ...], recipe: Recipe, tokenizer: Any, world: RankInfo
) -> tuple[Examples | None, tuple[SourceReport, ...]]:
    """(the examples of all sources, a report of each); None where there is no source."""
    seed, kind = recipe.run.seed, recipe.method_facts.rows
    stores = (open_cached_store(source, recipe.data, tokenizer, world.local_rank, seed, kind) for source in sources)
    selected = [select_examples(store, source, recipe.data) for store, source in zip(stores, sources, strict=True)]
    parts = [examples for examples, _ in selected]
    return mix_sources(parts, sources, seed) if parts else None, tuple(report for _, report in selected)
