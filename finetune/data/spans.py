"""The spans of a rendered conversation that are trained on: what the model itself would write in
each turn.

    <|user|>2 + 2?<|end|><|assistant|>4<|end|><|user|>Sure?<|end|><|assistant|>Yes.<|end|>
                                      ^^^^^^^^                                 ^^^^^^^^^^^

The prompt of a turn is what the template writes for the messages before it, with the generation
prompt. The turn begins where the text departs from its prompt, and ends with the token at which
generation stops. Where an answer makes the template rewrite what stands before it, the two are
compared from the last words that both have (`marks.py`).

A template with {% generation %} markers says by itself what a turn is.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby, pairwise
from typing import Any

from finetune.data.formats import Conversation
from finetune.data.marks import Mark, Marks, Rendering
from finetune.data.messages import BadRow, Message, count_common
from finetune.data.tokenizer import (
    CONTEXT_CHARACTERS,
    Renderer,
    Span,
    Tools,
    apply_marked_template,
    apply_template,
)

ADVICE = "use another chat_template, or one with {% generation %} markers"


def read_messages(conversation: Conversation, renderer: Renderer) -> list[Message]:
    """The messages as the template reads them: without an Alpaca row's `input`, which their content
    holds too, unless the template writes it apart.
    """
    if renderer.reads_input:
        return list(conversation.messages)
    # Only messages of role and content alone are rendered by their layout.
    return [
        {key: value for key, value in message.items() if key != "input"}
        for message in conversation.messages
    ]


def _find_end_of_turn(text: str, start: int, end: int, renderer: Renderer) -> int:
    """Finds where a trained span ends: after the token at which generation stops, or else after
    the end-of-turn token.

    The white space that follows it is left out: a model never has to write the newline that
    templates put there.

    Args:
        text: The rendered conversation.
        start: Where the span begins.
        end: Where its turn ends by the template or its markers; the token may stand before or
            behind.
        renderer: It knows the tokens.
    """
    end = _find_end_token(text, start, end, renderer)
    last_special = max(
        (match.start() for match in renderer.special_tokens.finditer(text, start, end)), default=end
    )
    # Cohere2 ends a turn with two tokens, and stops at the second
    stop = renderer.up_to_stop.match(text, last_special)
    return max(end, stop.end()) if stop else end


def _find_end_token(text: str, start: int, end: int, renderer: Renderer) -> int:
    """Finds where the token ends that ends a turn: the last of the span, or the one behind it.

    Returns `end` where there is neither.
    """
    inside = [match.end() for match in renderer.special_tokens.finditer(text, start, end)]
    if inside and not text[inside[-1] : end].strip():
        return inside[-1]
    if renderer.end_of_turn and text.startswith(renderer.end_of_turn, end):
        return end + len(renderer.end_of_turn)
    content = text[start:end].rstrip()
    # no special token of this tokenizer
    if renderer.end_of_turn and content.endswith(renderer.end_of_turn):
        return start + len(content)
    # Another end than the last turn's (<|end|> for <|return|>); or, where the template writes no
    # end, the next turn's first token, which is trained as the end.
    following = renderer.special_tokens.match(text, end)
    return following.end() if following else end


@dataclass(frozen=True, slots=True)
class _Layout:
    """The text that a template writes around the messages of a conversation with given roles.

    Returned by `_probe_layout`.
    """

    between: tuple[str, ...]  # [messages + 1]: text before, between and after the contents
    # [messages]: whether the template removes white space around the content
    trims: tuple[bool, ...]
    # assistant's message index -> characters of its turn (before its content, after it)
    margins: Mapping[int, tuple[int, int]]


def match_layout(
    text: str, conversation: Conversation, renderer: Renderer
) -> dict[int, Span] | None:
    """Finds the assistant's turns in `text` by the layout that its template has for these roles.

    The layout is found once for each sequence of roles. It counts only where it gives exactly this
    text when filled with this conversation's contents.

    Returns:
        Message index -> span of the turn. None where the template writes something else around
        some contents, or inference sees a turn otherwise: then turns have to be asked for one by
        one.
    """
    messages = read_messages(conversation, renderer)
    if conversation.tools or any(len(message) > 2 for message in messages):
        return None
    layout = _probe_layout(tuple(message["role"] for message in messages), renderer)
    if layout is None:
        return None
    contents = []
    for message, trims in zip(messages, layout.trims, strict=True):
        contents.append(message["content"].strip() if trims else message["content"])
    pieces = [layout.between[0]]
    for content, following in zip(contents, layout.between[1:], strict=True):
        pieces += (content, following)
    if "".join(pieces) != text:
        return None
    turns = {}
    position = 0
    for i, (message, content) in enumerate(zip(messages, contents, strict=True)):
        start = position + len(layout.between[i])
        position = start + len(content)
        if message["role"] == "assistant":
            before, after = layout.margins[i]
            turns[i] = (start - before, position + after)
    return turns


@lru_cache(maxsize=1024)
def _probe_layout(roles: tuple[str, ...], renderer: Renderer) -> _Layout | None:
    """Finds a layout by rendering contents that cannot be mistaken for the template's words.

    Returns None if the template changes them, or inference sees a turn otherwise.
    """
    words = [f"MESSAGE{i}CONTENT" for i in range(len(roles))]
    messages = [
        {"role": role, "content": f" {word}\n"} for role, word in zip(roles, words, strict=True)
    ]
    between = []
    trims = []
    contents = []
    try:
        text = apply_template(renderer, messages)
        position = 0
        for word in words:
            start = text.find(word, position)
            if start < 0:
                return None
            end = start + len(word)
            is_trimmed = text[start - 1] != " " or text[end] != "\n"
            if not is_trimmed:
                start -= 1
                end += 1
            trims.append(is_trimmed)
            contents.append((start, end))
            between.append(text[position:start])
            position = end
        between.append(text[position:])
        margins = _probe_turns(text, messages, between, contents, renderer)
    except (BadRow, IndexError):  # IndexError: the text ends with a word
        return None
    if margins is None:
        return None
    return _Layout(tuple(between), tuple(trims), margins)


def _probe_turns(
    text: str, messages: list[Message], between: list[str], contents: list[Span], renderer: Renderer
) -> dict[int, tuple[int, int]] | None:
    """Measures what the turns have around their contents: `_Layout.margins`.

    Turns between the same roles and the same words are of one kind; the first and the last of each
    kind are asked for, and stand for the others.

    Returns None if inference sees one of them otherwise than `text` has it.
    """
    kinds: dict[tuple[Any, ...], list[int]] = {}
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            neighbors = [each["role"] for each in messages[max(i - 1, 0) : i + 2]]
            kinds.setdefault((i == 0, *neighbors, between[i], between[i + 1]), []).append(i)
    margins: dict[int, tuple[int, int]] = {}
    for of_kind in kinds.values():
        measured = set()
        for i in {of_kind[0], of_kind[-1]}:
            turn = _ask_turn(messages, i, (), renderer)
            if turn is None or len(turn.spans) > 1:
                return None
            if not turn.continues_prompt or not turn.is_in(text):
                return None
            start, end = contents[i]
            before = start - turn.start
            after = turn.end - end
            if not 0 <= before <= len(between[i]) or not 0 <= after <= len(between[i + 1]):
                return None  # another message's words would be within the turn
            measured.add((before, after))
        if len(measured) > 1:
            return None
        margins.update(dict.fromkeys(of_kind, measured.pop()))
    return margins


@dataclass(frozen=True, slots=True)
class AskedTurn:
    """An assistant's turn as inference asks for it: after the conversation so far.

    Returned by `ask_turns`.
    """

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
    def continues_prompt(self) -> bool:
        """Whether the text begins with the prompt, and what is trained on follows it with nothing
        but white space between. True without a prompt.
        """
        return not self.prompt or (
            self.text.startswith(self.prompt)
            and not self.text[len(self.prompt) : self.start].strip()
        )

    def is_in(self, text: str) -> bool:
        """Whether `text`, of a longer conversation, has the turn, and all before it, as inference
        has them.
        """
        return text.startswith(self.text[: self.end])


def ask_turns(conversation: Conversation, renderer: Renderer) -> dict[int, AskedTurn]:
    """Asks for each trained turn as inference does: message index -> turn.

    A turn of which the template's markers enclose nothing is left out. Raises `BadRow` as rendering
    does, and where the beginning of a turn is unknown.
    """
    messages = read_messages(conversation, renderer)
    asked = {
        i: _ask_turn(messages, i, conversation.tools, renderer)
        for i, is_trained in enumerate(conversation.trained)
        if is_trained
    }
    return {i: turn for i, turn in asked.items() if turn is not None}


def find_turns(
    conversation: Conversation, asked: Mapping[int, AskedTurn], renderer: Renderer
) -> tuple[str, dict[int, tuple[Span, ...]]]:
    """Renders the whole conversation, and finds the trained turns in it.

    Args:
        conversation: The conversation.
        asked: Message index -> each trained turn as inference has it.
        renderer: The renderer.

    Returns:
        The text, and message index -> the spans of each trained turn.

    Raises:
        BadRow: The template rejects the conversation, or the place of a turn is unknown.
    """
    messages = read_messages(conversation, renderer)
    tools = conversation.tools
    wanted = []
    if renderer.assistant_only:
        wanted = [i for i, is_trained in enumerate(conversation.trained) if is_trained]
    if renderer.has_markers:
        return _find_marked_turns(messages, wanted, tools, renderer)
    rendering = Rendering(messages, tools, renderer)
    turns: dict[int, tuple[Span, ...]] = {}
    for i in wanted:
        if asked[i].is_in(rendering.text):
            turns[i] = asked[i].spans
        else:
            turns[i] = _find_rewritten(rendering, messages, i, tools, renderer)
    return rendering.text, turns


def _find_marked_turns(
    messages: list[Message], wanted: list[int], tools: Tools, renderer: Renderer
) -> tuple[str, dict[int, tuple[Span, ...]]]:
    """Renders a conversation, and finds the turns of `wanted` messages by the template's markers.

    Returns (text, message index -> spans). With another number of spans than of assistant's turns,
    it is unknown which span is whose: the first turn has all spans if all turns are wanted.

    Raises `BadRow` if only some of them are.
    """
    text, marked = apply_marked_template(renderer, messages, tools)
    next_starts = [*(start for start, _ in marked[1:]), len(text)]
    spans = []
    for (start, end), next_start in zip(marked, next_starts, strict=True):
        end_of_turn = min(_find_end_of_turn(text, start, end, renderer), next_start)
        # White space that the markers include is trained on, as by transformers.
        spans.append((start, max(end, end_of_turn)))
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if len(spans) > len(answers):
        spans = _keep_words(text, spans, renderer)
    if len(spans) == len(answers):
        return text, {i: (span,) for i, span in zip(answers, spans, strict=True) if i in wanted}
    if not wanted:
        return text, {}
    if wanted != answers:
        raise BadRow(
            f"the chat template marks {len(spans)} spans for {len(answers)} assistant turns, "
            "so `train: false` cannot be applied to one of them"
        )
    return text, {wanted[0]: tuple(spans)}


def _find_rewritten(
    rendering: Rendering, messages: list[Message], i: int, tools: Tools, renderer: Renderer
) -> tuple[Span, ...]:
    """Finds the spans of turn `i` in a conversation that continues, whose template rewrites it.

    Returns none where the template leaves the turn out. Raises `BadRow` where its place is unknown.
    """
    positions = [mark.position for mark in rendering.marks if mark.message == i]
    is_marked = i not in rendering.unmarked
    has_words = bool(messages[i]["content"].strip() or messages[i].get("tool_calls"))
    if is_marked and has_words and not positions:
        return ()  # Mistral's second version leaves out the calls of earlier questions
    prompt = _render_prompt(messages[:i], tools, renderer)
    start = _find_start(rendering, i, prompt, renderer)
    if start is None or not is_marked:
        raise _unknown(i)
    begin = start.position
    limit = _find_next_message(rendering, i, begin)
    words_end = max((place for place in positions if begin <= place <= limit), default=begin)
    end = words_end + _measure_end(rendering.text[words_end:limit], renderer)
    return ((begin, end), *_find_words_behind(rendering, i, limit, renderer))


def _find_next_message(rendering: Rendering, i: int, turn_begin: int) -> int:
    """Where another message's words first begin behind `turn_begin`; else the text's end."""
    others = [
        mark.words_begin
        for mark in rendering.marks
        if mark.message != i and mark.position > turn_begin
    ]
    return max(turn_begin, min(others, default=len(rendering.text)))


def _find_words_behind(rendering: Rendering, i: int, limit: int, renderer: Renderer) -> list[Span]:
    """The spans of message `i` behind `limit`, where the next message's words begin: one for each
    run of its marks that no mark of another message parts.

    Gemma 4 writes the words behind a call after the call's result.
    """
    marks = rendering.marks
    spans = []
    for message, run in groupby(marks, lambda mark: mark.message):
        own = list(run)
        if message != i or own[0].position <= limit:
            continue
        begin = own[0].position
        following = marks[marks.index(own[-1]) + 1 :]
        others = [mark.words_begin for mark in following if mark.message != i]
        end = min([_end_words(rendering.text, own[-1], renderer), *others])
        if end > begin:  # Gemma 4 may have left out all of the content
            spans.append((begin, end))
    return spans


def _end_words(text: str, mark: Mark, renderer: Renderer) -> int:
    """Finds where the words end whose last mark is `mark`.

    Where the template leaves out how they end, as Gemma 4 does with what a content has behind
    <|channel>, they end at the next special token.
    """
    if mark.ends:
        return mark.position
    special = renderer.special_tokens.search(text, mark.position)
    return special.start() if special else mark.position


def _measure_end(after: str, renderer: Renderer) -> int:
    """Counts the characters that end a turn, of those `after` its last words."""
    ends = []
    stop = renderer.up_to_stop.search(after)
    if stop:
        ends.append(stop.end())
    if renderer.end_of_turn and renderer.end_of_turn in after:
        ends.append(after.index(renderer.end_of_turn) + len(renderer.end_of_turn))
    special = renderer.special_tokens.search(after)
    return min(ends, default=special.end() if special else 0)


def _ask_turn(
    messages: list[Message], i: int, tools: Tools, renderer: Renderer
) -> AskedTurn | None:
    """Asks for turn `i` as inference does: after the messages before it.

    Returns None where the template's markers enclose nothing of it. Raises as `ask_turns`.
    """
    prompt = _render_prompt(messages[:i], tools, renderer)
    answered = Rendering(messages[: i + 1], tools, renderer)
    start = _find_start(answered, i, prompt, renderer)
    if start is None and not renderer.has_markers:
        raise _unknown(i)
    asked_text = prompt.text if prompt else ""
    text = answered.text
    begin = start.position if start else 0
    if start and start.ends_prompt:
        # gpt-oss writes the reasoning before a call until an answer follows: the answer has seen it
        # in its prompt.
        text = asked_text + text[begin:]
        begin = len(asked_text)
    if not renderer.has_markers:
        return AskedTurn(asked_text, text, ((begin, _end_asked(text, begin, renderer)),))
    shift = len(text) - len(answered.text)
    marked = apply_marked_template(renderer, messages[: i + 1], tools)[1]
    spans = [
        (max(first + shift, begin), last + shift) for first, last in marked if last + shift > begin
    ]
    spans = _keep_words(text, spans, renderer)
    if not spans:
        return None
    end = max(spans[-1][1], _find_end_of_turn(text, *spans[-1], renderer))
    # With an unknown start, earlier spans may be those of other turns.
    earlier = spans[:-1] if start else []
    return AskedTurn(asked_text, text, (*earlier, (spans[-1][0], end)))


def _keep_words(text: str, spans: list[Span], renderer: Renderer) -> list[Span]:
    """Drops marked spans without words; keeps all where none has words.

    Phi-3's template ends a conversation with a mark of its own, around its end of text.
    """
    with_words = []
    for start, end in spans:
        words = renderer.special_tokens.sub("", text[start:end])
        if words.strip():
            with_words.append((start, end))
    return with_words or spans


def _end_asked(text: str, begin: int, renderer: Renderer) -> int:
    """Finds where the last turn of a text ends; `begin`: where it begins."""
    end = _find_end_of_turn(text, begin, len(text), renderer)
    if not renderer.end_of_turn or renderer.end_of_turn not in text[begin:end]:
        return end
    # What follows belongs to the end of the whole conversation: Phi-3 writes its end of text there.
    answer, _, after = text[begin:end].rpartition(renderer.end_of_turn)
    if renderer.special_tokens.sub("", after).strip():
        return end
    # Of two ends of turn in a row the first counts.
    if answer.rstrip().endswith(renderer.end_of_turn):
        answer = answer.rstrip().removesuffix(renderer.end_of_turn)
    return begin + len(answer + renderer.end_of_turn)


def _render_prompt(before: list[Message], tools: Tools, renderer: Renderer) -> Rendering | None:
    """Renders the prompt that inference gives after the messages `before`; None without any."""
    if before:
        return Rendering(before, tools, renderer, add_generation_prompt=True)
    return None


@dataclass(frozen=True, slots=True)
class _Start:
    """Where a turn begins in a text. Returned by `_find_start`."""

    position: int
    # the text right before it is how its prompt ends; what is before that may be rewritten
    ends_prompt: bool


@dataclass(frozen=True, slots=True)
class _TemplateWords:
    """The template's own words before a turn, which its conversation and its prompt may share."""

    begin: int  # in the conversation's text
    in_prompt: str  # from there to the prompt's end
    behind_message: int  # the message whose words stand before them


def _find_start(
    answered: Rendering, i: int, prompt: Rendering | None, renderer: Renderer
) -> _Start | None:
    """Finds where turn `i` begins in a conversation.

    It begins where the template's own words before it differ from those of its prompt.

    Args:
        answered: The conversation with the turn.
        i: The turn's place among the messages.
        prompt: What asks for the turn; None where the turn is the first message.
        renderer: What writes both.

    Returns:
        None where the template rewrites so much that the beginning is unknown.
    """
    text = answered.text
    if prompt and text.startswith(prompt.text):
        return _Start(len(prompt.text), ends_prompt=True)
    own = (mark.position for mark in answered.marks if mark.message == i)
    own_begin = next(own, len(text))  # where the turn's own words begin
    words: _TemplateWords | None
    if prompt is None:
        words = _find_generation_prompt(text, own_begin, i, renderer)
    else:
        words = _find_last_words(answered, prompt, i, own_begin)
    if words is None:
        return None
    shared = count_common(words.in_prompt, text[words.begin : own_begin])  # characters
    if shared == len(words.in_prompt):
        return _Start(words.begin + shared, ends_prompt=prompt is not None)
    if any(words.behind_message < other < i for other in answered.unmarked):
        return None  # what differs may be that message's words
    border = _find_token_border(text[words.begin :], shared, renderer)
    return _Start(words.begin + border, ends_prompt=False)


def _find_last_words(
    answered: Rendering, prompt: Rendering, i: int, own_begin: int
) -> _TemplateWords | None:
    """What stands behind the last mark before turn `i` that its prompt has too; None where it has
    none of them.
    """
    in_prompt = {mark.name: mark.position for mark in prompt.marks}
    before = [
        mark
        for mark in answered.marks
        if mark.message < i and mark.position <= own_begin and mark.name in in_prompt
    ]
    if not before:
        return None
    last = before[-1]
    return _TemplateWords(last.position, prompt.text[in_prompt[last.name] :], last.message)


def _find_generation_prompt(
    text: str, own_begin: int, i: int, renderer: Renderer
) -> _TemplateWords:
    """Where the longest beginning of the generation prompt stands before a message's own words."""
    prompt = renderer.generation_prompt
    for length in range(len(prompt), 0, -1):
        begin = text.rfind(prompt[:length], 0, own_begin)
        if begin >= 0:
            return _TemplateWords(begin, prompt, behind_message=i)
    return _TemplateWords(0, prompt, behind_message=i)


def _find_token_border(text: str, shared: int, renderer: Renderer) -> int:
    """Finds the last border of tokens within the first `shared` characters of `text`.

    Two texts may share a part of a token: <think> and </think> begin alike.
    """
    encoded = renderer.backend.encode(text[: shared + CONTEXT_CHARACTERS], add_special_tokens=False)
    borders = [start for start, _ in encoded.offsets if start <= shared]
    return max(borders, default=0)


def _unknown(i: int) -> BadRow:
    return BadRow(
        f"message {i + 1}: the chat template rewrites earlier turns, so it is unknown where the "
        f"assistant's turn begins and ends; {ADVICE}"
    )


def refuse_faults(
    turns: Mapping[int, Sequence[Span]],
    marks: Marks,
    conversation: Conversation,
    renderer: Renderer,
) -> None:
    """Raises `BadRow` where what is trained on, the spans of `turns`, is not each answer once, and
    nothing else.

    `marks`: in the document's text, by `trace`.
    """
    spans = sorted(span for of_turn in turns.values() for span in of_turn)
    if any(end > start for (_, end), (start, _) in pairwise(spans)):
        raise BadRow(f"the chat template writes two answers into each other; {ADVICE}")
    for mark in marks:
        role = conversation.messages[mark.message]["role"]
        name = f"message {mark.message + 1} ({role})"
        if not conversation.trained[mark.message]:
            if any(start < mark.position and mark.words_begin < end for start, end in spans):
                raise BadRow(
                    f"the chat template writes {name} into an answer that is trained; {ADVICE}"
                )
        # Only where its words end: they may begin in the prompt. And what markers leave out is left
        # out on purpose.
        elif mark.ends and not renderer.has_markers:
            if any(start <= mark.position <= end for start, end in spans):
                continue
            raise BadRow(f"the chat template writes {name} apart from its turn; {ADVICE}")
