"""What inference gives for each turn of a row beside what is trained of it, for `finetune inspect --turns` and
`--html`."""

import html
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from finetune.config.schema import Recipe
from finetune.data.formats import Conversation, Document
from finetune.data.messages import BadRow
from finetune.data.render import RenderedText
from finetune.data.sources import read_rows
from finetune.data.spans import ask_turns
from finetune.data.template import Renderer, add_variables, make_renderer_of
from finetune.data.tokenize import GroupReader, render_group
from finetune.errors import UserError
from finetune.files.durable import replace_file
from finetune.terminal import printable
from finetune.units import name_place

Pieces = tuple[tuple[str, bool], ...]  # texts, each with whether it is trained on


@dataclass(frozen=True, slots=True)
class ShownTurn:
    """An answer, after the prompt that inference gives for it. Returned by `read_turns`."""

    message: int  # its number in the row, from 1
    prompt: str
    same: int  # characters of the prompt that also stand before the answer as it is trained
    pieces: Pieces  # of the answer as it is trained

    def as_json(self) -> dict[str, Any]:
        pieces = [{"text": text, "trained": trained} for text, trained in self.pieces]
        return {"message": self.message, "prompt": self.prompt, "as_trained": self.same, "answer": pieces}


def read_turns(recipe: Recipe, tokenizer: Any, places: Collection[str]) -> dict[str, list[ShownTurn]]:
    """Place of a row -> its turns, for each of `places`. Reads the sources up to the last of them."""
    data, found, left = recipe.data, dict[str, list[ShownTurn]](), set(places)
    renderer = make_renderer_of(data, tokenizer)
    for source in data.datasets:
        reader, of_source = GroupReader(recipe.method_facts.rows), add_variables(renderer, source.chat_template_kwargs)
        for batch in read_rows(source, streaming=data.streaming):
            names = [name_place(batch.file, number) for number in batch.numbers]
            for name, row in zip(names, reader.read(batch.rows, source) if left & {*names} else (), strict=False):
                if name in left and not isinstance(row, BadRow):
                    found[name] = [turn for group in row.groups for turn in _show(group, of_source)]
            left -= set(names)
            if not left:
                return found
    return found


def _show(group: Any, renderer: Renderer) -> Iterator[ShownTurn]:
    texts = render_group(group, renderer)[0]
    for i, text in enumerate(texts):
        document = group.documents[min(i, len(group.documents) - 1)]  # one document is several texts where it is split
        yield from _show_text(document, text, renderer)


def _show_text(document: Document, text: RenderedText, renderer: Renderer) -> Iterator[ShownTurn]:
    if not isinstance(document, Conversation) or not text.turns:
        start = text.spans[0][0] if text.spans else len(text.text)
        yield ShownTurn(1, text.text[:start], start, _cut(text, start, len(text.text)))
        return
    asked = ask_turns(document, add_variables(renderer, document.variables))
    for i, (start, end) in sorted(text.turns.items()):
        if i in asked:
            prompt, before = asked[i].prompt, text.text[:start]
            same = next(
                (n for n, (a, b) in enumerate(zip(prompt, before, strict=False)) if a != b), min(len(prompt), start)
            )
            yield ShownTurn(i + 1, prompt, same, _cut(text, start, end))


def _cut(text: RenderedText, start: int, end: int) -> Pieces:
    """The text from `start` to `end`, cut where what is trained on begins and ends."""
    borders = {start, end, *(border for span in text.spans for border in span if start < border < end)}
    ordered = sorted(borders)
    return tuple(
        (text.text[a:b], any(first <= a and b <= last for first, last in text.spans)) for a, b in pairwise(ordered)
    )


def format_turns(turns: Sequence[ShownTurn], styles: Mapping[str, str]) -> Iterator[str]:
    """The lines of a row's turns. `styles`: the codes that begin prompt, other, trained, untrained and end them; empty
    without color, where >> and << stand around what is trained on."""
    end = styles.get("end", "")
    for turn in turns:
        yield f"  message {turn.message}, asked with:"
        prompt = [(turn.prompt[: turn.same], "prompt"), (turn.prompt[turn.same :], "other")]
        yield "".join(f"{styles.get(style, '')}{printable(text)}{end}" for text, style in prompt if text)
        if turn.same < len(turn.prompt):
            yield "  which is not what stands before it in training" + (", from the part in red on" if styles else "")
        yield "  and trained to answer:"
        marks = {True: "trained", False: "untrained"}
        yield "".join(
            f"{styles[marks[on]]}{printable(text)}{end}"
            if styles
            else f">>{printable(text)}<<"
            if on
            else printable(text)
            for text, on in turn.pieces
        )


PAGE = """\
<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{title}</title><style>
:root {{ color-scheme: light dark; --gray: light-dark(#667, #99a); --line: 1px solid light-dark(#dde, #334) }}
body {{ font: 15px/1.45 system-ui, sans-serif; max-width: 1400px; margin: 2em auto; padding: 0 1em }}
h1 {{ font-size: 1.3em }} h2 {{ font-size: 1em; margin: 2em 0 .3em }}
.turn {{ display: grid; grid-template-columns: 1fr 1fr; border: var(--line); border-radius: 6px; margin: .6em 0 }}
.turn > div {{ padding: .5em .8em; min-width: 0 }} .turn > div + div {{ border-left: var(--line) }}
.turn h3 {{ font-size: .8em; font-weight: 600; color: var(--gray); margin: 0 0 .4em }}
pre {{ font: 13px/1.45 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere; margin: 0 }}
.on {{ background: light-dark(#d6f5dc, #14401f) }} .off {{ color: var(--gray) }}
.other {{ background: light-dark(#ffdcdc, #5a1d1d) }} .token {{ color: light-dark(#7a3fb0, #c9a2f2) }}
@media (max-width: 700px) {{
  .turn {{ grid-template-columns: 1fr }} .turn > div + div {{ border: 0; border-top: var(--line) }}
}}
</style><h1>{title}</h1><p>Left: the prompt that inference gives for a turn. Right: the answer after it in training;
<span class="on">trained on</span>, <span class="off">not trained on</span>. <span class="other">Red</span>: not what
stands before the answer in training. <span class="token">Special tokens</span>.</p>
{rows}</html>
"""


def write_page(
    path: Path, title: str, rows: Mapping[str, Sequence[ShownTurn]], special_tokens: re.Pattern[str]
) -> None:
    """Writes one HTML file that needs nothing but a browser. Raises `UserError` where it cannot be written."""

    def mark(text: str, style: str) -> str:
        pieces, position = [], 0
        for token in special_tokens.finditer(text):
            pieces += [
                html.escape(text[position : token.start()]),
                f'<span class="token">{html.escape(token[0])}</span>',
            ]
            position = token.end()
        return f'<span class="{style}">{"".join(pieces)}{html.escape(text[position:])}</span>' if text else ""

    parts = []
    for place, turns in rows.items():
        parts.append(f"<h2>{html.escape(place)}</h2>")
        for turn in turns:
            prompt = mark(turn.prompt[: turn.same], "off") + mark(turn.prompt[turn.same :], "other")
            answer = "".join(mark(text, "on" if on else "off") for text, on in turn.pieces)
            parts.append(
                f'<div class="turn"><div><h3>message {turn.message} is asked with</h3><pre>{prompt}</pre></div>'
                f"<div><h3>and trained to answer</h3><pre>{answer}</pre></div></div>"
            )
    try:
        replace_file(path, PAGE.format(title=html.escape(title), rows="\n".join(parts)))
    except OSError as error:
        raise UserError(f"--html {path}: cannot be written: {error.strerror}") from None
