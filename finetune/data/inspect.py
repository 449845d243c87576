"""`finetune inspect`: the data as the model will see it, and what is wrong with it."""

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch

from finetune.constants import IGNORE_INDEX
from finetune.data.checks import fatal
from finetune.data.data_report import DataReport, SourceReport
from finetune.data.examples import Example, Examples
from finetune.data.fit import misfits
from finetune.data.formats import list_columns
from finetune.data.prepare import preview_data
from finetune.data.tokenizer import load_tokenizer
from finetune.errors import EXIT_USER_ERROR, UserError
from finetune.recipe.reader import RECIPES, read_recipe
from finetune.recipe.schema import Recipe
from finetune.terminal import printable, unfiltered
from finetune.units import counted

QUICKSTART = RECIPES / "quickstart"  # the tokenizer and chat template of the quickstart recipe
TRAINED = ("\033[1;32m", "\033[1;92m")  # two shades of green, so that one sees where a token ends
GIVEN = ("\033[2m", "\033[2;37m")  # two grays
COLORS = {"fatal": "\033[1;31m", "warning": "\033[33m", "notice": "\033[36m"}
RESET = "\033[0m"


@dataclass(frozen=True, slots=True)
class Alone:
    """A world of one, without a process group."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")


def inspect_command(options: argparse.Namespace) -> int:
    """Prints some rows and the report of a recipe's data; 2 where a finding would stop the training, else 0."""
    recipe = _recipe_of(options)
    tokenizer = load_tokenizer(recipe.model, recipe.data)
    train, report = preview_data(recipe, tokenizer, Alone())
    longest = recipe.data.max_length if recipe.data.streaming else int(train.examples.lengths.max())
    warnings = misfits(recipe, tokenizer, longest) if options.recipe or options.model or not options.file else []
    shown = _shown(options, len(train.examples))
    if options.json:
        rows = [as_json(train.examples, tokenizer, example_id) for example_id in shown]
        told = {"report": report.as_json(), "warnings": warnings, "rows": rows}
        print(json.dumps(told, indent=1, ensure_ascii=False))
    else:
        color = sys.stdout.isatty() and "NO_COLOR" not in os.environ
        stream = unfiltered(sys.stdout)  # the lines are printable but for their colors
        for example_id in shown:
            print("\n".join(row_lines(train.examples, tokenizer, example_id, color)), end="\n\n", file=stream)
        print("\n".join(report_lines(report, warnings, color)), file=stream)
    stops = fatal(report.findings) or any(line.startswith("fatal:") for line in warnings)
    return EXIT_USER_ERROR if stops else 0


def _recipe_of(options: argparse.Namespace) -> Recipe:
    """The recipe that is asked for; around FILE, where that is given, one of defaults. What `key=value` says comes last."""
    if options.file is None and options.model is None:
        return read_recipe(options.recipe or "quickstart", options.overrides)
    if options.file is not None and options.file.endswith((".yaml", ".yml")):
        raise UserError(f"{options.file}: is not data; a recipe is given as --recipe {options.file}")
    given = [f"datasets={json.dumps([{'path': options.file}])}"] if options.file is not None else []
    if options.model is not None:
        given += [f"model_name_or_path={json.dumps(options.model)}", "model_config=null", "tokenizer_name_or_path=null"]
    elif options.recipe is None:  # no model is asked for; the tokenizer that comes with the project shows the format
        given += ['model_config={"model_type": "llama"}', f"tokenizer_name_or_path={json.dumps(str(QUICKSTART))}"]
    recipe = options.recipe if options.file is not None else options.recipe or "quickstart"
    return read_recipe(recipe, [*given, *options.overrides])


def _shown(options: argparse.Namespace, count: int) -> Sequence[int]:
    """The ids of the examples that are shown. Raises `UserError` where one is not there."""
    if options.examples is None:
        if options.rows < 0:
            raise UserError(f"--rows {options.rows}: not a count of examples; 0 shows the report alone")
        return range(min(options.rows, count))
    try:
        ids = [int(number) for number in options.examples.split(",")]
    except ValueError:
        raise UserError(f"--examples {options.examples}: not numbers with commas between, such as 169,120") from None
    beyond = [example_id for example_id in ids if not 0 <= example_id < count]
    if beyond:
        raise UserError(f"--examples {beyond[0]}: there are {count:,} examples, numbered from 0")
    return ids


def as_json(examples: Examples, tokenizer: Any, example_id: int) -> dict[str, Any]:
    """One example: where it comes from and its tokens, each with whether it is trained on."""
    example = examples[example_id]
    texts = token_texts(example, tokenizer)
    trained = is_trained(example)
    return {
        "example": example_id,
        "where": examples.where(example_id),
        "tokens": [
            {"id": int(token), "text": text, "trained": on}
            for token, text, on in zip(example.input_ids, texts, trained, strict=True)
        ],
    }


def row_lines(examples: Examples, tokenizer: Any, example_id: int, color: bool) -> Iterator[str]:
    """One example as text: what is trained on in green, or between >> and << where there is no color."""
    example = examples[example_id]
    trained = is_trained(example)
    head = printable(
        f"example {example_id}, {examples.where(example_id)}: {counted(len(trained), 'token')}, {sum(trained)} trained"
    )
    yield f"\033[1m{head}{RESET}" if color else head
    texts = [printable(text) for text in token_texts(example, tokenizer)]
    pieces = list(zip(texts, trained, strict=True))
    if color:
        yield "".join(f"{(TRAINED if on else GIVEN)[i % 2]}{text}{RESET}" for i, (text, on) in enumerate(pieces))
        return
    yield "".join(
        f">>{text}<<" if on else text
        for on, text in (
            (on, "".join(text for text, _ in run)) for on, run in groupby(pieces, key=lambda piece: piece[1])
        )
    )


def token_texts(example: Example, tokenizer: Any) -> list[str]:
    """The text that each token adds; one that ends inside a character adds nothing, the last of them all of it.

    A token is decoded after the piece before it: alone, one of SentencePiece would lose the space that it begins with.
    """

    def decoded(begin: int, end: int) -> str:
        text = tokenizer.decode(ids[begin:end], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return str(text)

    ids = example.input_ids.tolist()
    texts: list[str] = []
    before, begin = 0, 0  # where the last whole piece begins and ends
    for end in range(1, len(ids) + 1):
        context = decoded(before, begin) if begin else ""
        text = decoded(before, end)
        text = text.removeprefix(context) if text.startswith(context) else decoded(begin, end)
        if text.endswith("\ufffd") and end < len(ids) and end - begin < 4:
            texts.append("")
            continue
        texts.append(text)
        before, begin = begin, end
    return texts


def is_trained(example: Example) -> list[bool]:
    """Whether each token is a target: the label of the position before it."""
    return [False, *(bool(label != IGNORE_INDEX) for label in example.labels[:-1])]


def report_lines(report: DataReport, warnings: Sequence[str], color: bool) -> Iterator[str]:
    """The report, a line for each thing; `warnings` come last."""
    for source in report.sources:
        yield from map(printable, _source_lines(source, ""))
    for source in report.eval_sources:
        yield from map(printable, _source_lines(source, "held out: "))
    share = report.trained_tokens / max(report.tokens, 1)
    yield (
        f"an epoch: {counted(report.examples, 'example')}, {counted(report.tokens, 'token')}, {report.trained_tokens:,} of "
        f"them trained ({share:.1%}), in {counted(report.rows, 'row')}, {report.fill:.2%} full, "
        f"{counted(report.steps_per_epoch, 'step')} on one rank"
    )
    if report.held_out_examples:
        yield f"held out: {counted(report.held_out_examples, 'example')}"
    quantiles = ", ".join(f"{share} {tokens:,}" for share, tokens in report.length_quantiles.items())
    yield f"tokens of an example, by share of the examples: {quantiles}"
    for line in map(printable, (*map(str, report.findings), *warnings)):
        yield f"{COLORS[line.partition(':')[0]]}{line}{RESET}" if color else line
    if not report.findings and not warnings:
        yield "nothing found that is wrong"


def _source_lines(source: SourceReport, prefix: str) -> Iterator[str]:
    yield (
        f"{prefix}{source.path}: {counted(source.rows_read, 'row')} read, {source.rows_skipped:,} skipped, "
        f"{source.overlong:,} over max_length, {counted(source.examples, 'example')}, {counted(source.tokens, 'token')}, "
        f"{source.trained_tokens:,} trained"
    )
    yield from (f"  {line}" for line in source.loss())
    if source.unused_columns:
        columns = ", ".join(
            f"{list_columns([name])} ({counted(rows, 'row')})" for name, rows in source.unused_columns.items()
        )
        yield f"  columns that are not used: {columns}"
    for problem in source.skipped:
        yield f"  skipped {problem}"
