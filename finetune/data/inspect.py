"""`finetune inspect`: shows the data as the model will see it, and what is wrong with it."""

import argparse
import html
import json
import os
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress, groupby, pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from finetune.config.compatibility import find_problems, refuse_problems
from finetune.config.pretrained import load_config, read_facts, read_positions
from finetune.config.reader import RECIPES, read_recipe, split_adapters
from finetune.config.schema import Recipe
from finetune.constants import IGNORE_INDEX
from finetune.data.classes import read_classes
from finetune.data.data_report import DataReport, SourceReport, count_examples
from finetune.data.examples import Example, Examples, expand_groups
from finetune.data.findings import check_longest_example
from finetune.data.formats import Conversation, Document, ParsedRow, number_of_label
from finetune.data.groups import GroupReader, render_group
from finetune.data.images import find_image_folder
from finetune.data.messages import BadRow, count_common, list_columns
from finetune.data.paid_text import read_reward_texts, show_rewarded
from finetune.data.prepare import find_image_family, preview_data
from finetune.data.render import RenderedText
from finetune.data.source_tokens import SourceStats
from finetune.data.sources import read_rows
from finetune.data.spans import ask_turns
from finetune.data.tokenizer import (
    Renderer,
    add_variables,
    load_tokenizer,
    make_renderer,
    make_renderer_of,
    plan_vocabulary,
    refuse_unnamed_tokens,
    renderer_of_source,
)
from finetune.distributed.world import alone
from finetune.errors import EXIT_USER_ERROR, UserError, printable, unfiltered
from finetune.files.durable import replace_file
from finetune.units import counted, name_place

QUICKSTART = RECIPES / "quickstart"  # the tokenizer and chat template of the quickstart recipe
TRAINED = ("\033[1;32m", "\033[1;92m")  # two shades of green, so that one sees where a token ends
UNTRAINED = ("\033[2m", "\033[2;37m")  # two grays
COLORS = {"fatal": "\033[1;31m", "warning": "\033[33m", "notice": "\033[36m"}  # of findings
OTHER = "\033[31m"  # the part of a prompt that training does not have
RESET = "\033[0m"


def inspect_command(options: argparse.Namespace) -> int:
    """Prints some examples and the report of a recipe's data.

    Returns the exit code: EXIT_USER_ERROR if a finding would stop training, else 0.
    """
    if options.html is not None and Path(options.html).suffix.lower() not in (".html", ".htm"):
        raise UserError(
            f"--html: {options.html}: a page's name ends in .html; write for example --html "
            "page.html"
        )
    recipes = split_adapters(_build_recipe(options))
    if len(recipes) > 1 and (options.json or options.html or options.examples):
        raise UserError(
            f"{recipes[0].place_of('adapters')}: adapters: --json, --html and --examples are of "
            "one recipe's rows; name the rows in datasets, and leave adapters out"
        )
    codes = []
    for recipe in recipes:
        if len(recipes) > 1:
            print(f"adapter {recipe.folder.name}\n")
        codes.append(_inspect(recipe.alone, options))
    return max(codes)


def _inspect(recipe: Recipe, options: argparse.Namespace) -> int:
    """Prints examples and the report of one recipe; returns the exit code of `inspect_command`."""
    tokenizer = load_tokenizer(
        recipe.model, recipe.data, recipe.rollout.tools, recipe.rollout.environments
    )
    train, evaluation, report = preview_data(recipe, tokenizer, alone())
    examples = train.examples
    warnings: list[str] = []
    names_model = options.recipe or options.model or not options.file
    if names_model:
        # of a stream only the first rows are read here
        streams = recipe.data.streaming
        longest = recipe.data.max_length if streams else int(examples.lengths.max())
        images = find_image_family(train, evaluation)
        warnings = check_model(recipe, tokenizer, longest, images)
    chosen = _choose_examples(recipe, options, examples, tokenizer)
    if options.json:
        content = {
            "report": report.as_json(),
            "warnings": warnings,
            "rows": _examples_as_json(chosen, tokenizer),
        }
        print(json.dumps(content, indent=1, ensure_ascii=False))
    else:
        color = sys.stdout.isatty() and "NO_COLOR" not in os.environ
        stream = unfiltered(sys.stdout)  # the lines are printable except for their colors
        for lines in _format_examples(chosen, tokenizer, color):
            print("\n".join(lines), end="\n\n", file=stream)
        print("\n".join(format_report(report, warnings, color)), file=stream)
    if options.html:
        special_tokens = make_renderer(tokenizer, True).special_tokens
        write_page(Path(options.html), chosen.turns, special_tokens)
        print(options.html, file=sys.stderr)
    is_fatal = any(finding.is_fatal for finding in report.findings)
    is_refused = any(line.startswith("fatal:") for line in warnings)
    return EXIT_USER_ERROR if is_fatal or is_refused else 0


# a row: the number of its source in `datasets` (0 for all rows of a stream), and file and line
Place = tuple[int, str]


@dataclass(frozen=True, slots=True)
class ChosenExamples:
    """The examples that are shown, and what is shown beside them."""

    examples: Examples  # all examples
    ids: Sequence[int]  # the chosen ones
    # place of a row -> its turns; empty unless the options ask for turns
    turns: Mapping[Place, Sequence["ShownTurn"]]
    # [ids]: for each reward model and judge (its name, the text that it would read)
    rewarded: Sequence[Sequence[tuple[str, str]]]


def _choose_examples(
    recipe: Recipe, options: argparse.Namespace, examples: Examples, tokenizer: Any
) -> ChosenExamples:
    """Chooses the examples that the options name, and reads what is shown beside them."""
    ids = _select_examples(options, examples)
    turns = {}
    if options.turns or options.html:
        turns = read_turns(recipe, tokenizer, [_find_place(examples, each) for each in ids])
    rewarded: list[list[tuple[str, str]]] = [[] for _ in ids]
    if recipe.method_facts.samples:
        texts = read_reward_texts(recipe)
        rewarded = [
            list(show_rewarded(examples.read_row(example_id), texts, recipe)) for example_id in ids
        ]
    return ChosenExamples(examples, ids, turns, rewarded)


def _find_place(examples: Examples, example_id: int) -> Place:
    """Finds the row of an example."""
    return int(examples.store[example_id]), examples.where(example_id)


def _examples_as_json(chosen: ChosenExamples, tokenizer: Any) -> list[dict[str, Any]]:
    """Makes JSON values of the examples, the turns of their rows and what rewards would read."""
    rows = []
    for example_id, texts in zip(chosen.ids, chosen.rewarded, strict=True):
        row = example_as_json(chosen.examples, tokenizer, example_id)
        turns = chosen.turns.get(_find_place(chosen.examples, example_id))
        if turns is not None:
            row["turns"] = [turn.as_json() for turn in turns]
        if texts:
            row["rewards_read"] = dict(texts)
        rows.append(row)
    return rows


def _format_examples(chosen: ChosenExamples, tokenizer: Any, color: bool) -> Iterator[list[str]]:
    """Yields the lines of each example; a row that became several examples shows its turns once."""
    turns_to_show = dict(chosen.turns)
    for example_id, texts in zip(chosen.ids, chosen.rewarded, strict=True):
        lines = list(format_example(chosen.examples, tokenizer, example_id, color))
        turns = turns_to_show.pop(_find_place(chosen.examples, example_id), ())
        if turns and not chosen.examples.ends_document(example_id):
            lines.append("  the turns of the whole row, which max_length cuts:")
        lines += format_turns(turns, color)
        for name, text in texts:
            lines += [f"  {name} would read of a completion like the answer:", printable(text)]
        yield lines


def _build_recipe(options: argparse.Namespace) -> Recipe:
    """Reads the recipe that the options name, or makes one of the defaults and FILE.

    FILE and the model of the options replace the recipe's; `key=value` overrides everything.
    """
    if options.file is None and options.model is None:
        return read_recipe(options.recipe or "quickstart", options.overrides)
    if options.file is not None and options.file.endswith((".yaml", ".yml")):
        raise UserError(
            f"{options.file}: not a data file; for a recipe write --recipe {options.file}"
        )
    overrides = []
    if options.file is not None:
        key = "function" if ".py:" in options.file else "path"
        overrides.append(f"datasets={json.dumps([{key: options.file}])}")
    if options.model is not None:
        overrides += [
            f"model_name_or_path={json.dumps(options.model)}",
            "model_config=null",
            "tokenizer_name_or_path=null",
        ]
    elif options.recipe is None:
        # no model is named; the tokenizer that comes with the project shows the format
        overrides += [
            'model_config={"model_type": "llama"}',
            f"tokenizer_name_or_path={json.dumps(str(QUICKSTART))}",
        ]
    recipe = options.recipe
    if options.file is None:
        recipe = recipe or "quickstart"
    return read_recipe(recipe, [*overrides, *options.overrides])


def check_model(recipe: Recipe, tokenizer: Any, longest: int, images: str | None) -> list[str]:
    """Lists what `launch` would report about the recipe's model, each as a line.

    A line that begins with `fatal:` would stop a launch.

    Args:
        recipe: The recipe.
        tokenizer: Its tokenizer.
        longest: Tokens of the longest example.
        images: The `model_type` of the model that takes the rows' images; None without images.
    """
    try:
        config = load_config(recipe.model, plan_vocabulary(tokenizer, recipe.model))
    except UserError as error:
        return [f"notice: the data was not compared with the model: {error}"]
    lines = check_longest_example(longest, read_positions(config))
    try:
        facts = read_facts(config, recipe.model.model_name_or_path, len(tokenizer))
        refuse_unnamed_tokens(recipe)
        refuse_problems(find_problems(recipe, facts=facts, images=images))
    except UserError as error:
        lines += [f"fatal: {problem}" for problem in str(error).splitlines()]
    return lines


def _select_examples(options: argparse.Namespace, examples: Examples) -> Sequence[int]:
    """Returns the ids of the examples that the options ask for, always whole groups.

    Raises `UserError` for an example that does not exist, and options that are not numbers.
    """
    count = len(examples)
    size = examples.group_size
    if options.examples is None:
        if options.rows < 0:
            raise UserError(
                f"--rows {options.rows}: not a count of examples; 0 shows the report alone"
            )
        return range(min(options.rows * size, count))
    try:
        ids = [int(number) for number in options.examples.split(",")]
    except ValueError:
        raise UserError(
            f"--examples {options.examples}: not numbers with commas between, such as 169,120"
        ) from None
    missing = [example_id for example_id in ids if not 0 <= example_id < count]
    if missing:
        raise UserError(f"--examples {missing[0]}: there are {count:,} examples, numbered from 0")
    groups = dict.fromkeys(example_id // size for example_id in ids)  # each once, in their order
    group_ids: list[int] = expand_groups(np.array([*groups], np.int64), size).tolist()
    return group_ids


def name_role_in_group(examples: Examples, example_id: int) -> str:
    """Says what an example is in its group, such as "chosen"; "" if it is a group by itself."""
    if examples.group_size == 1:
        return ""
    stats = _read_stats(examples, example_id)
    if stats.is_pooled:
        # a group is a query, the document that answers it, and documents that do not
        index_in_group = example_id % examples.group_size
        return ("query", "document", "negative")[min(index_in_group, 2)]
    if stats.label == "number":
        # each example is the query with one of its documents
        return "document"
    # what is left are pairs, or rated answers with their mismatched ones
    group, index_in_pair = divmod(example_id, 2)
    if not examples.is_rated:
        return ("chosen", "rejected")[index_in_pair]
    if index_in_pair == 1:
        return "mismatched"
    (rating,) = examples.take_groups(np.array([group])).find_group_ratings()
    return "good" if rating > 0 else "bad"


def example_as_json(examples: Examples, tokenizer: Any, example_id: int) -> dict[str, Any]:
    """Makes JSON values of an example: its row, and its tokens with whether each is trained on.

    A cut example may also be trained on the token that came next.
    """
    example = examples[example_id]
    texts = decode_tokens(example, tokenizer)
    trained = find_trained_tokens(examples, example_id)
    is_image = find_image_tokens(examples, example_id)
    tokens = []
    for i, token_id in enumerate(example.input_ids.tolist()):
        token = {"id": token_id, "text": texts[i], "trained": trained[i]}
        tokens.append(token | {"image": True} if is_image[i] else token)
    role = name_role_in_group(examples, example_id)
    content: dict[str, Any] = {"example": example_id, "where": examples.where(example_id)}
    if role:
        content["side"] = role
    if examples.trains_next_token(example_id):
        content["next_token_id"] = int(example.labels[-1])  # trained on too
    return content | {"tokens": tokens}


def format_example(
    examples: Examples, tokenizer: Any, example_id: int, color: bool
) -> Iterator[str]:
    """Yields two lines: what the example is, and its text.

    The text that is trained on is green, or without color between >> and <<.
    """
    example = examples[example_id]
    trained = find_trained_tokens(examples, example_id)
    role = name_role_in_group(examples, example_id)
    head = printable(
        f"example {example_id}{f' ({role})' if role else ''}, {examples.where(example_id)}: "
        f"{counted(len(trained), 'token')}, {_describe_trained(examples, example_id)}"
    )
    yield f"\033[1m{head}{RESET}" if color else head
    texts = [printable(text) for text in decode_tokens(example, tokenizer)]
    _name_images(texts, find_image_tokens(examples, example_id))
    yield _show_trained(list(zip(texts, trained, strict=True)), color)


def _name_images(texts: list[str], is_image: Iterable[bool]) -> None:
    """Replaces the texts of each run of image tokens, in place: "[image: 3 tokens]", "", "".

    Args:
        texts: The text of each token.
        is_image: Whether each token stands for a part of an image.
    """
    end = 0
    for run_is_image, run in groupby(is_image):
        start = end
        length = len(list(run))
        end = start + length
        if run_is_image:
            texts[start:end] = [f"[image: {counted(length, 'token')}]"] + [""] * (length - 1)


def _show_trained(pieces: Iterable[tuple[str, bool]], color: bool) -> str:
    """Joins texts, those that are trained on in green and the others in gray.

    Neighbors have different shades. Without `color`, what is trained on stands between >> and <<.
    `pieces`: (text, whether it is trained on).
    """
    shown = ""
    if color:
        for index, (text, is_trained) in enumerate(pieces):
            shades = TRAINED if is_trained else UNTRAINED
            shown += f"{shades[index % 2]}{text}{RESET}"
        return shown
    for is_trained, run in groupby(pieces, key=itemgetter(1)):
        text = "".join(text for text, _ in run)
        shown += f">>{text}<<" if is_trained else text
    return shown


def decode_tokens(example: Example, tokenizer: Any) -> list[str]:
    """Returns the text that each token adds to the text before it: [tokens].

    If several tokens make up one character, the last of them adds it and the others add "". A token
    is decoded together with the one before it: alone, a token of SentencePiece would lose its
    leading space.
    """

    def decode(begin: int, end: int) -> str:
        text = tokenizer.decode(
            ids[begin:end], skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return str(text)

    ids = example.input_ids.tolist()
    texts: list[str] = []
    # ids[before:begin] are decoded and give the context of ids[begin:end], which may still be a
    # part of a character
    before = 0
    begin = 0
    for end in range(1, len(ids) + 1):
        context = decode(before, begin) if begin else ""
        text = decode(before, end)
        if text.startswith(context):
            text = text.removeprefix(context)
        else:
            text = decode(begin, end)
        # a character is at most four bytes, thus at most four tokens
        if text.endswith("\ufffd") and end < len(ids) and end - begin < 4:
            texts.append("")
            continue
        texts.append(text)
        before = begin
        begin = end
    return texts


def find_image_tokens(examples: Examples, example_id: int) -> list[bool]:
    """Says for each token of an example whether it stands for a part of an image: [tokens]."""
    ids = _read_stats(examples, example_id).image_token_ids
    is_image: list[bool] = np.isin(examples[example_id].input_ids, ids).tolist()
    return is_image


def find_trained_tokens(examples: Examples, example_id: int) -> list[bool]:
    """Says for each token of an example whether it is trained on: [tokens].

    Where tokens are scored or embedded, these are the tokens with a label. Where tokens are
    predicted, a token is trained on if it is the label of the position before it. The label of the
    last position is no token of the example: `Examples.trains_next_token`.
    """
    has_label = [bool(label != IGNORE_INDEX) for label in examples[example_id].labels]
    stats = _read_stats(examples, example_id)
    if stats.scores or stats.is_pooled:
        return has_label
    return [False, *has_label[:-1]]


def _read_stats(examples: Examples, example_id: int) -> SourceStats:
    """Reads what is known of the source of an example."""
    return SourceStats.from_json(examples.store_of(example_id).facts)


def _describe_trained(examples: Examples, example_id: int) -> str:
    """Says how many tokens of an example are trained, or what its scores are trained to be."""
    stats = _read_stats(examples, example_id)
    score_names = stats.scores
    labels = examples[example_id].labels
    if stats.is_pooled:
        return "embedded by the states of the marked ones"
    if not score_names:
        has_next = examples.trains_next_token(example_id)
        note = ", the last of them after the end shown" if has_next else ""
        return f"{np.count_nonzero(labels != IGNORE_INDEX)} trained{note}"
    set_labels = labels[labels != IGNORE_INDEX].tolist()
    kind = stats.label
    if kind == "steps":
        marked = ", ".join(score_names[label] for label in set_labels)
        return f"scored at the marked ones as {marked}"
    label = max(set_labels, default=0)  # only the last token of a document has one
    if kind == "number":
        target = f"{number_of_label(label):g}"
    elif kind == "margin":
        target = f"larger by {number_of_label(label):g}" if label else ""
    elif kind == "classes":
        row_classes = compress(score_names, read_classes(label, len(score_names)))
        target = ", ".join(row_classes) or "none"
    else:
        target = score_names[label]
    return f"scored at the marked one{f' as {target}' if target else ''}"


def format_report(report: DataReport, warnings: Sequence[str], color: bool) -> Iterator[str]:
    """Yields the lines of the report: sources, an epoch, held-out data, lengths, findings.

    `warnings`: lines that come after the findings.
    """
    for source in report.sources:
        yield from map(printable, _format_source(source, ""))
    for source in report.eval_sources:
        yield from map(printable, _format_source(source, "held out: "))
    trained_share = report.trained_tokens / max(report.tokens, 1)
    yield (
        "an epoch: "
        f"{count_examples(report.examples, report.pairs, report.desirable, report.undesirable)}, "
        f"{counted(report.tokens, 'token')}, {report.trained_tokens:,} of them trained "
        f"({trained_share:.1%}), in {counted(report.rows, 'row')}, {report.fill:.2%} full, "
        f"{counted(report.steps_per_epoch, 'step')} on one rank"
    )
    if report.held_out_examples:
        yield f"held out: {count_examples(report.held_out_examples, **report.held_out_groups)}"
    quantiles = ", ".join(
        f"{share} {tokens:,}" for share, tokens in report.length_quantiles.items()
    )
    yield f"tokens in an example, by quantile: {quantiles}"
    for line in map(printable, (*map(str, report.findings), *warnings)):
        severity, _, _ = line.partition(":")
        yield f"{COLORS[severity]}{line}{RESET}" if color else line
    if not report.findings and not warnings:
        yield "no problems found"


def _format_source(source: SourceReport, prefix: str) -> Iterator[str]:
    """Yields the lines of one source's report. `prefix` stands before its path."""
    yield (
        f"{prefix}{source.path}: {counted(source.rows_read, 'row')} read, {source.rows_skipped:,} "
        f"skipped, {source.overlong:,} over max_length, "
        f"{count_examples(source.examples, source.pairs, source.desirable, source.undesirable)}, "
        f"{counted(source.tokens, 'token')}, {source.trained_tokens:,} trained"
    )
    yield from (f"  {line}" for line in source.lines())
    if source.unused_columns:
        columns = ", ".join(
            f"{list_columns([name])} ({counted(rows, 'row')})"
            for name, rows in source.unused_columns.items()
        )
        yield f"  unused columns: {columns}"
    for problem in source.skipped:
        yield f"  skipped {problem}"


Pieces = tuple[tuple[str, bool], ...]  # (text, whether it is trained on)


@dataclass(frozen=True, slots=True)
class ShownTurn:
    """An answer as it is trained, and the prompt that inference gives for it."""

    message: int  # the number of the answer's message in the row, from 1
    prompt: str
    # the number of characters at the start of the prompt that training also has before the answer
    same_length: int
    pieces: Pieces  # the answer

    def as_json(self) -> dict[str, Any]:
        pieces = [{"text": text, "trained": trained} for text, trained in self.pieces]
        return {
            "message": self.message,
            "prompt": self.prompt,
            "as_trained": self.same_length,
            "answer": pieces,
        }


def read_turns(
    recipe: Recipe, tokenizer: Any, places: Collection[Place]
) -> dict[Place, list[ShownTurn]]:
    """Reads the turns of the rows at `places`: place -> turns.

    Reads the sources up to the last of these rows. A row that cannot be used has no entry.
    """
    turns: dict[Place, list[ShownTurn]] = {}
    unread = set(places)
    plain_renderer = make_renderer_of(recipe.data, tokenizer)
    for number, source in enumerate(recipe.data.datasets):
        source_number = 0 if recipe.data.streaming else number
        reader = GroupReader(recipe.method_facts.rows, recipe.data)
        renderer = renderer_of_source(plain_renderer, source)
        batches = ((source, rows) for rows in read_rows(source, streaming=recipe.data.streaming))
        for _, batch, parsed_rows in reader.read_batches(batches):
            folder = find_image_folder(source, batch.file)
            batch_places = [(source_number, name_place(batch.file, n)) for n in batch.numbers]
            for place, row in zip(batch_places, parsed_rows, strict=True):
                if place in unread and not isinstance(row, BadRow):
                    turns[place] = list(_show_row(row, renderer, folder))
            unread.difference_update(batch_places)
            if not unread:
                return turns
    return turns


def _show_row(row: ParsedRow, renderer: Renderer, image_folder: Path) -> Iterator[ShownTurn]:
    """Yields the turns of a row, group by group."""
    for group in row.groups:
        texts, _ = render_group(group, renderer, image_folder)
        # Nothing is learned from a mismatched document. Which answer it has depends on the rows
        # around, and these are others here than in training where it draws rows.
        shown = texts[:1] if group.rating else texts
        for i, text in enumerate(shown):
            # Texts and documents correspond, or a single document was split into several texts.
            document = group.documents[min(i, len(group.documents) - 1)]
            yield from _show_text(document, text, renderer)


def _show_text(document: Document, text: RenderedText, renderer: Renderer) -> Iterator[ShownTurn]:
    """Yields the trained turns of a text.

    A text without turns is one turn: it begins where training begins, and its prompt is the text
    before.
    """
    if not isinstance(document, Conversation) or not text.turns:
        start = text.spans[0][0] if text.spans else len(text.text)
        pieces = _cut_pieces(text, start, len(text.text))
        yield ShownTurn(message=1, prompt=text.text[:start], same_length=start, pieces=pieces)
        return
    asked = ask_turns(document, add_variables(renderer, document.variables))
    for i, (start, end) in sorted(text.turns.items()):
        if i in asked:
            prompt = asked[i].prompt
            same_length = count_common(prompt, text.text[:start])
            yield ShownTurn(i + 1, prompt, same_length, _cut_pieces(text, start, end))


def _cut_pieces(text: RenderedText, start: int, end: int) -> Pieces:
    """Cuts the text from `start` to `end` into pieces, each trained on or not."""
    borders = {start, end}
    for span in text.spans:
        borders.update(border for border in span if start < border < end)
    pieces = []
    for piece_start, piece_end in pairwise(sorted(borders)):
        is_trained = any(
            span_start <= piece_start and piece_end <= span_end
            for span_start, span_end in text.spans
        )
        pieces.append((text.text[piece_start:piece_end], is_trained))
    return tuple(pieces)


def format_turns(turns: Sequence[ShownTurn], color: bool) -> Iterator[str]:
    """Yields the lines of a row's turns: for each its prompt, then its answer.

    Without `color`, trained text stands between >> and <<.
    """
    for turn in turns:
        yield f"  message {turn.message}, asked with:"
        same = printable(turn.prompt[: turn.same_length])
        other = printable(turn.prompt[turn.same_length :])
        if color:
            same = f"{UNTRAINED[0]}{same}{RESET}" if same else ""
            other = f"{OTHER}{other}{RESET}" if other else ""
        yield same + other
        if other:
            where = ", from the part in red on" if color else ""
            yield f"  which is not what stands before it in training{where}"
        yield "  and trained to answer:"
        pieces = [(printable(text), is_trained) for text, is_trained in turn.pieces]
        yield _show_trained(pieces, color)


PAGE = """\
<!doctype html><html lang="en"><meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>What inference asks, and what is trained</title><style>
:root {{ color-scheme: light dark; --gray: light-dark(#667, #99a);
  --line: 1px solid light-dark(#dde, #334) }}
body {{ font: 15px/1.45 system-ui, sans-serif;
  max-width: 1400px; margin: 2em auto; padding: 0 1em }}
h1 {{ font-size: 1.3em }} h2 {{ font-size: 1em; margin: 2em 0 .3em }}
.turn {{ display: grid; grid-template-columns: 1fr 1fr;
  border: var(--line); border-radius: 6px; margin: .6em 0 }}
.turn > div {{ padding: .5em .8em; min-width: 0 }} .turn > div + div {{ border-left: var(--line) }}
.turn h3 {{ font-size: .8em; font-weight: 600; color: var(--gray); margin: 0 0 .4em }}
pre {{ font: 13px/1.45 ui-monospace, monospace;
  white-space: pre-wrap; overflow-wrap: anywhere; margin: 0 }}
.on {{ background: light-dark(#d6f5dc, #14401f) }} .off {{ color: var(--gray) }}
.other {{ background: light-dark(#ffdcdc, #5a1d1d) }}
.token {{ color: light-dark(#7a3fb0, #c9a2f2) }}
@media (max-width: 700px) {{
  .turn {{ grid-template-columns: 1fr }} .turn > div + div {{ border: 0; border-top: var(--line) }}
}}
</style><h1>What inference asks, and what is trained</h1>
<p>Left: the prompt that inference gives for a turn. Right: the answer after it in training;
<span class="on">trained on</span>, <span class="off">not trained on</span>.
<span class="other">Red</span>: not what stands before the answer in training. 
<span class="token">Special tokens</span>.</p>
{rows}</html>
"""


def write_page(
    path: Path, rows: Mapping[Place, Sequence[ShownTurn]], special_tokens: re.Pattern[str]
) -> None:
    """Writes the turns of rows as an HTML page that loads no other file.

    Args:
        path: The file to write.
        rows: Place of a row -> its turns.
        special_tokens: Matches a special token, which the page colors.

    Raises:
        UserError: The file cannot be written.
    """

    def mark(text: str, style: str) -> str:
        """The text as HTML of this class, with the special tokens in it colored."""
        if not text:
            return ""
        pieces = []
        position = 0
        for token in special_tokens.finditer(text):
            pieces += [
                html.escape(text[position : token.start()]),
                f'<span class="token">{html.escape(token[0])}</span>',
            ]
            position = token.end()
        return f'<span class="{style}">{"".join(pieces)}{html.escape(text[position:])}</span>'

    parts = []
    for (_, place), turns in rows.items():
        parts.append(f"<h2>{html.escape(place)}</h2>")
        for turn in turns:
            same_part = turn.prompt[: turn.same_length]
            other_part = turn.prompt[turn.same_length :]
            prompt = mark(same_part, "off") + mark(other_part, "other")
            answer = "".join(
                mark(text, "on" if is_trained else "off") for text, is_trained in turn.pieces
            )
            parts.append(
                f'<div class="turn"><div><h3>message {turn.message} is asked '
                f"with</h3><pre>{prompt}</pre></div>"
                f"<div><h3>and trained to answer</h3><pre>{answer}</pre></div></div>"
            )
    try:
        replace_file(path, PAGE.format(rows="\n".join(parts)))
    except OSError as error:
        raise UserError(f"--html {path}: cannot be written: {error.strerror}") from None
