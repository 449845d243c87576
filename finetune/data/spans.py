"""The spans of a rendered conversation that are trained on: what the assistant says, with the end of its turn.

    <|user|>2 + 2?<|end|><|assistant|>4<|end|><|user|>Sure?<|end|><|assistant|>Yes.<|end|>
                                      ^^^^^^^^                                 ^^^^^^^^^^^

A template with {% generation %} markers gives them. For any other template they are found by rendering parts of the
conversation and comparing the texts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby, pairwise
from typing import Any

from finetune.data.formats import Conversation
from finetune.data.marks import Marks, find_marks
from finetune.data.messages import BadRow, Message, count_common
from finetune.data.tokenizer import CONTEXT, Renderer, Span, Tools, apply_marked_template, apply_template

ADVICE = "use a template with {% generation %} markers"


def read_messages(conversation: Conversation, renderer: Renderer) -> list[Message]:
    """The messages as the template reads them."""
    if renderer.reads_input:
        return list(conversation.messages)
    # Messages of role and content alone are rendered faster.
    return [{key: value for key, value in message.items() if key != "input"} for message in conversation.messages]


def _find_end_of_turn(text: str, start: int, end: int, renderer: Renderer) -> int:
    """Where a trained span ends: after the token at which generation stops, or else the end-of-turn token.

    The white space that follows it is left out: a model never has to write the newline that templates put there.
    """
    end = _find_end_token(text, start, end, renderer)
    last = max((match.start() for match in renderer.special_tokens.finditer(text, start, end)), default=end)
    stop = renderer.up_to_stop.match(text, last)  # Cohere2 ends a turn with two tokens, and stops at the second
    return max(end, stop.end()) if stop else end


def _find_end_token(text: str, start: int, end: int, renderer: Renderer) -> int:
    inside = [match.end() for match in renderer.special_tokens.finditer(text, start, end)]
    if inside and not text[inside[-1] : end].strip():
        return inside[-1]
    if renderer.end_of_turn and text.startswith(renderer.end_of_turn, end):
        return end + len(renderer.end_of_turn)
    content = text[start:end].rstrip()
    if renderer.end_of_turn and content.endswith(renderer.end_of_turn):  # no special token of this tokenizer
        return start + len(content)
    # Another end than the last turn's (<|end|> for <|return|>), or the next turn's first token, which then is the end.
    following = renderer.special_tokens.match(text, end)
    return following.end() if following else end


@dataclass(frozen=True, slots=True)
class _Layout:
    """What a template writes around the messages of a conversation with given roles. Returned by `_probe_layout`."""

    between: tuple[str, ...]  # [messages + 1]: text before, between and after the contents
    trims: tuple[bool, ...]  # [messages]: whether the template removes white space around the content
    around: tuple[Span, ...]  # [messages]: characters of an assistant's turn before its content, and after it


def match_layout(text: str, conversation: Conversation, renderer: Renderer) -> dict[int, Span] | None:
    """Message index -> span of an assistant's turn in `text`, if the template writes the same around any content and
    inference sees each turn so; else None, and the turns have to be asked for one by one.

    The layout is found once for each sequence of roles, and used only if it gives exactly this rendered text when
    filled with this conversation's contents.
    """
    messages = read_messages(conversation, renderer)
    if conversation.tools or any(len(message) > 2 for message in messages):
        return None
    layout = _probe_layout(tuple(message["role"] for message in messages), renderer)
    if layout is None:
        return None
    contents = [m["content"].strip() if trim else m["content"] for m, trim in zip(messages, layout.trims, strict=True)]
    pieces = [layout.between[0]]
    for content, after in zip(contents, layout.between[1:], strict=True):
        pieces += (content, after)
    if "".join(pieces) != text:
        return None
    turns, position = {}, 0
    for i, (message, content) in enumerate(zip(messages, contents, strict=True)):
        start = position + len(layout.between[i])
        position = start + len(content)
        if message["role"] == "assistant":
            lead, tail = layout.around[i]
            turns[i] = (start - lead, position + tail)
    return turns


@lru_cache(maxsize=1024)
def _probe_layout(roles: tuple[str, ...], renderer: Renderer) -> _Layout | None:
    """The layout, from contents that cannot be mistaken; None if the template changes them or a turn's text."""
    marks = [f"MESSAGE{i}CONTENT" for i in range(len(roles))]
    messages = [{"role": role, "content": f" {mark}\n"} for role, mark in zip(roles, marks, strict=True)]
    between, trims, contents = [], [], []
    try:
        text = apply_template(renderer, messages)
        position = 0
        for mark in marks:
            at = text.find(mark, position)
            if at < 0:
                return None
            trims.append(text[at - 1] != " " or text[at + len(mark)] != "\n")
            contents.append((at, at + len(mark)) if trims[-1] else (at - 1, at + len(mark) + 1))
            between.append(text[position : contents[-1][0]])
            position = contents[-1][1]
        between.append(text[position:])
        around = _probe_turns(text, messages, between, contents, renderer)
    except (BadRow, IndexError):
        return None
    return None if around is None else _Layout(tuple(between), tuple(trims), around)


def _probe_turns(
    text: str, messages: list[Message], between: list[str], contents: list[Span], renderer: Renderer
) -> tuple[Span, ...] | None:
    """`_Layout.around`; None if inference sees a turn otherwise than `text`. First and last of each kind count."""
    kinds: dict[tuple[Any, ...], list[int]] = {}
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            neighbors = [each["role"] for each in messages[max(i - 1, 0) : i + 2]]
            kinds.setdefault((i == 0, *neighbors, between[i], between[i + 1]), []).append(i)
    around = [(0, 0)] * len(messages)
    for of_kind in kinds.values():
        for i in dict.fromkeys((of_kind[0], of_kind[-1])):
            turn, (start, end) = _ask_turn(messages, i, (), renderer), contents[i]
            if turn is None or len(turn.spans) > 1 or not turn.is_continued or not turn.is_in(text):
                return None
            if not turn.start <= start <= end <= turn.end:
                return None
            for other in of_kind:
                around[other] = (start - turn.start, turn.end - end)
    return tuple(around)


@dataclass(frozen=True, slots=True)
class AskedTurn:
    """An assistant's turn as inference asks for it: after the conversation so far. Returned by `ask_turns`."""

    prompt: str  # the conversation before it, with the generation prompt
    text: str  # the conversation that ends with it
    spans: tuple[Span, ...]  # what is trained on: one, or all that the template's markers enclose

    @property
    def start(self) -> int:
        return self.spans[0][0]

    @property
    def end(self) -> int:
        return self.spans[-1][1]

    @property
    def is_continued(self) -> bool:
        """Whether what is trained on follows the prompt, with nothing between that the model would have to write."""
        return not self.prompt or (
            self.text.startswith(self.prompt) and not self.text[len(self.prompt) : self.start].strip()
        )

    def is_in(self, text: str) -> bool:
        """Whether `text`, of a longer conversation, has the turn, and all before it, as inference has them."""
        return text.startswith(self.text[: self.end])


def ask_turns(conversation: Conversation, renderer: Renderer) -> dict[int, AskedTurn]:
    """Message index -> turn, of each turn that is trained on; without those in which nothing is marked to be.

    Raises `BadRow` as rendering does, and where it is unknown where a turn begins.
    """
    messages = read_messages(conversation, renderer)
    asked = {i: _ask_turn(messages, i, conversation.tools, renderer) for i, on in enumerate(conversation.trained) if on}
    return {i: turn for i, turn in asked.items() if turn is not None}


def find_turns(
    conversation: Conversation, asked: Mapping[int, AskedTurn], renderer: Renderer
) -> tuple[str, dict[int, tuple[Span, ...]]]:
    """(the text of the whole conversation, message index -> what is trained on of each turn). Raises `BadRow`."""
    messages, tools = read_messages(conversation, renderer), conversation.tools
    wanted = [i for i, on in enumerate(conversation.trained) if on] if renderer.assistant_only else []
    if renderer.has_markers:
        text, marked = apply_marked_template(renderer, messages, tools)
        # White space that the markers include is trained on, as by transformers.
        spans = [(start, max(end, _find_end_of_turn(text, start, end, renderer))) for start, end in marked]
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if len(spans) == len(answers):
            return text, {i: (span,) for i, span in zip(answers, spans, strict=True) if i in wanted}
        if wanted != answers:
            raise BadRow(
                f"the chat template marks {len(spans)} spans for {len(answers)} assistant turns, so `train: false` "
                "cannot be applied to one of them"
            )
        return text, {wanted[0]: tuple(spans)}
    text = apply_template(renderer, messages, tools)
    marks: Marks | None = None
    turns: dict[int, tuple[Span, ...]] = {}
    for i in wanted:
        if i in asked and asked[i].is_in(text):
            turns[i] = asked[i].spans
            continue
        marks = find_marks(text, messages, tools, renderer) if marks is None else marks
        start = _find_start(text, messages, i, asked[i].prompt, tools, renderer).position
        turns[i] = _find_rewritten(text, start, i, marks, renderer)
    return text, turns


def _find_rewritten(text: str, start: int, i: int, marks: Marks, renderer: Renderer) -> tuple[Span, ...]:
    """The spans of turn `i`, which begins at `start` in the text of a longer conversation.

    It ends before the next message's words. Gemma 4 writes its words behind a call after the call's result: those are a
    span of their own.
    """
    limit = min((mark.position for mark in marks if mark.message != i and mark.position > start), default=len(text))
    last = max(
        (mark.position for mark in marks if mark.message == i and start <= mark.position <= limit), default=start
    )
    spans = [(start, last + _measure_end(text[last:limit], renderer))]
    for message, run in groupby(marks, lambda mark: mark.message):
        places = [mark.position for mark in run]
        if message == i and places[0] > limit:
            spans.append((places[0], places[-1]))
    return tuple(spans)


def _measure_end(after: str, renderer: Renderer) -> int:
    """How many characters end a turn, of those between its last words and the next message's."""
    ends = [match.end() for match in (renderer.up_to_stop.search(after),) if match]
    if renderer.end_of_turn and renderer.end_of_turn in after:
        ends.append(after.index(renderer.end_of_turn) + len(renderer.end_of_turn))
    special = renderer.special_tokens.search(after)
    return min(ends, default=special.end() if special else 0)


def _ask_turn(messages: list[Message], i: int, tools: Tools, renderer: Renderer) -> AskedTurn | None:
    """Turn `i`, asked for by itself; None where the template's markers enclose nothing of it. Raises as `ask_turns`."""
    before, answered = messages[:i], messages[: i + 1]
    prompt = apply_template(renderer, before, tools, add_generation_prompt=True) if i else ""
    own = apply_template(renderer, answered, tools)
    start = _find_start(own, answered, i, prompt, tools, renderer)
    # gpt-oss writes the reasoning before a call until an answer follows: the answer has seen it in its prompt.
    text = prompt + own[start.position :] if start.is_continued else own
    begin = len(prompt) if start.is_continued else start.position
    if renderer.has_markers:
        shift = len(text) - len(own)
        marked = apply_marked_template(renderer, answered, tools)[1]
        spans = [(max(first + shift, begin), last + shift) for first, last in marked if last + shift > begin]
        # Phi-3's ends the whole conversation with a mark of its own, around its end of text.
        spans = [span for span in spans if renderer.special_tokens.sub("", text[slice(*span)]).strip()] or spans
        if not spans:
            return None
        end = max(spans[-1][1], _find_end_of_turn(text, *spans[-1], renderer))
        return AskedTurn(prompt, text, (*spans[:-1], (spans[-1][0], end)))
    end = _find_end_of_turn(text, begin, len(text), renderer)
    if renderer.end_of_turn and renderer.end_of_turn in text[begin:end]:
        # What follows belongs to the end of the whole conversation: Phi-3 writes its end of text there.
        answer, _, after = text[begin:end].rpartition(renderer.end_of_turn)
        if answer.rstrip().endswith(renderer.end_of_turn):
            answer = answer.rstrip().removesuffix(renderer.end_of_turn)
        end = end if renderer.special_tokens.sub("", after).strip() else begin + len(answer + renderer.end_of_turn)
    return AskedTurn(prompt, text, ((begin, end),))


@dataclass(frozen=True, slots=True)
class _Start:
    """Where a turn begins in a text. Returned by `_find_start`."""

    position: int
    is_continued: bool  # behind the prompt, of which the answer may rewrite all but how it ends


def _find_start(text: str, messages: list[Message], i: int, prompt: str, tools: Tools, renderer: Renderer) -> _Start:
    """The start of turn `i` in the `text` of `messages`. Raises `BadRow` where it is unknown.

    `prompt`: what inference gives for the turn. Behind the last words before the turn, the text and the prompt have the
    template's own words alone, and the turn begins where these differ.
    """
    if i and text.startswith(prompt):
        return _Start(len(prompt), True)
    marks = find_marks(text, messages, tools, renderer)
    own = next((mark.position for mark in marks if mark.message == i), len(text))
    if i == 0:  # nothing asks for it: it begins behind as much of the generation prompt as stands before its words
        asks = renderer.generation_prompt
        begin = next((at for end in range(len(asks), 0, -1) if (at := text.rfind(asks[:end], 0, own)) >= 0), 0)
    else:
        earlier = [mark for mark in marks if mark.message < i and mark.position <= own]
        asked = find_marks(prompt, messages[:i], tools, renderer, add_generation_prompt=True)
        if [mark.name for mark in earlier[-1:]] != [mark.name for mark in asked[-1:]]:
            raise BadRow(
                f"message {i + 1}: the chat template rewrites earlier turns, so it is unknown where the assistant's "
                f"turn begins and ends; {ADVICE}"
            )
        begin = earlier[-1].position if earlier else 0
        asks = prompt[asked[-1].position if asked else 0 :]
    shared = count_common(asks, text[begin:])
    if shared == len(asks):
        return _Start(begin + shared, i > 0)
    # At a token's border: <think> and </think> begin alike.
    encoded = renderer.backend.encode(text[begin : begin + shared + CONTEXT], add_special_tokens=False)
    borders = [start for start, _ in encoded.offsets if start <= shared]
    return _Start(begin + max(borders, default=0), False)


def refuse_faults(
    turns: Mapping[int, Sequence[Span]], marks: Marks, conversation: Conversation, renderer: Renderer
) -> None:
    """Raises `BadRow` where what is trained on, the spans of `turns`, is not what the assistant says, each answer once.

    `marks`: in the document's text, by `trace`.
    """
    spans = sorted(span for of_turn in turns.values() for span in of_turn)
    fault = "two of its trained spans overlap" if any(end > start for (_, end), (start, _) in pairwise(spans)) else ""
    for mark in marks:
        if not conversation.trained[mark.message]:
            is_wrong = any(start < mark.position < end for start, end in spans)
        else:  # its beginning may be the prompt's; what a template's own markers leave out is left out on purpose
            is_traced = mark.ends and not renderer.has_markers
            is_wrong = is_traced and not any(start <= mark.position <= end for start, end in spans)
        if is_wrong:
            role = conversation.messages[mark.message]["role"]
            fault = f"message {mark.message + 1} ({role}) stands where another is trained, or not where it would be"
    if fault:
        raise BadRow(f"{fault}: the chat template writes its turns in an unknown way; {ADVICE}")
