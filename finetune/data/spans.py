"""The spans of a rendered conversation that are trained on: the text that the model itself writes.

    <|user|>2 + 2?<|end|><|assistant|>4<|end|><|user|>Sure?<|end|><|assistant|>Yes.<|end|>
                                      ^^^^^^^^                                 ^^^^^^^^^^^

A turn's prompt is the template's text for the messages before the turn, with the generation prompt.
The turn begins where the conversation's text departs from that prompt, and ends with the token at
which generation stops. An answer can make the template rewrite earlier text. Text and prompt are
then compared from the last message's words that both hold (`marks.py`).

A template with {% generation %} markers marks the turns itself.
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
    """Returns the messages as the template reads them.

    An Alpaca row's `input` is removed unless the template reads it; the content holds it too.
    """
    if renderer.reads_input:
        return list(conversation.messages)
    # `match_layout` takes only messages that have nothing but a role and a content.
    return [
        {key: value for key, value in message.items() if key != "input"}
        for message in conversation.messages
    ]


def _find_end_of_turn(text: str, start: int, turn_end: int, renderer: Renderer) -> int:
    """Finds where a trained span ends: after the token at which generation stops.

    Without such a token, it ends after the end-of-turn token. White space after the token is not
    part of the span, since a model never has to write the newline that templates put there.

    Args:
        text: The rendered conversation.
        start: Where the span begins.
        turn_end: Where the turn ends by the template's text or markers. The token may stand right
            before or right behind this position.
        renderer: The renderer, which knows the special tokens.
    """
    end = _find_end_of_token(text, start, turn_end, renderer)
    last_special = max(
        (match.start() for match in renderer.special_tokens.finditer(text, start, end)), default=end
    )
    # Cohere2 ends a turn with two tokens, and stops at the second.
    stop = renderer.up_to_stop.match(text, last_special)
    return max(end, stop.end()) if stop else end


def _find_end_of_token(text: str, start: int, end: int, renderer: Renderer) -> int:
    """Returns the position behind the token that ends the turn text[start:end].

    The token is the last thing in the turn, or comes right behind it. Returns `end` if there is no
    such token.
    """
    inside = [match.end() for match in renderer.special_tokens.finditer(text, start, end)]
    if inside and not text[inside[-1] : end].strip():
        return inside[-1]
    if renderer.end_of_turn and text.startswith(renderer.end_of_turn, end):
        return end + len(renderer.end_of_turn)
    content = text[start:end].rstrip()
    # The end of turn may be no special token of this tokenizer.
    if renderer.end_of_turn and content.endswith(renderer.end_of_turn):
        return start + len(content)
    # The next special token is another end of turn, as <|end|> where the last turn has <|return|>.
    # Or the template writes no end: then the next turn's first token is trained as the end.
    following = renderer.special_tokens.match(text, end)
    return following.end() if following else end


@dataclass(frozen=True, slots=True)
class _Layout:
    """The text that a template writes around the contents of messages, for a sequence of roles.

    Returned by `_probe_layout`.
    """

    between: tuple[str, ...]  # [messages + 1]: the text before, between and after the contents
    # [messages]: whether the template removes white space around the content
    trims: tuple[bool, ...]
    # index of an assistant's message -> characters of its turn (before the content, after it)
    margins: Mapping[int, tuple[int, int]]


def match_layout(
    text: str, conversation: Conversation, renderer: Renderer
) -> dict[int, Span] | None:
    """Finds the assistant's turns in `text` by the template's layout for these roles.

    The layout is probed once for each sequence of roles. It is used only if the layout, filled with
    this conversation's contents, is exactly `text`.

    Returns:
        Message index -> span of the turn. None if the layout does not give `text`, inference would
        see a turn differently, or a message has more than a role and a content. The turns must then
        be found one by one, by `ask_turns`.
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
    """Finds the template's layout for a sequence of roles by rendering placeholder contents.

    Returns None if the template does not write all placeholders in order, or inference would see a
    turn differently.
    """
    words = [f"MESSAGE{i}CONTENT" for i in range(len(roles))]
    # The white space around the word shows whether the template trims contents.
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
        margins = _measure_margins(text, messages, between, contents, renderer)
    except (BadRow, IndexError):  # IndexError: the text ends with a word
        return None
    if margins is None:
        return None
    return _Layout(tuple(between), tuple(trims), margins)


def _measure_margins(
    text: str, messages: list[Message], between: list[str], contents: list[Span], renderer: Renderer
) -> dict[int, tuple[int, int]] | None:
    """Measures how far each assistant's turn extends around its content: `_Layout.margins`.

    Turns between the same roles and the same template text are of one kind. Only the first and the
    last turn of a kind are measured, and all turns of the kind get the result.

    Args:
        text: The rendered conversation.
        messages: The messages of `text`.
        between: [messages + 1]: the template's text before, between and after the contents.
        contents: [messages]: where each content stands in `text`.
        renderer: The renderer.

    Returns:
        None if a measured turn is not one span, differs from what inference sees, extends into
        another message's words, or has other margins than the other measured turn of its kind.
    """
    kinds: dict[tuple[Any, ...], list[int]] = {}
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            neighbors = [each["role"] for each in messages[max(i - 1, 0) : i + 2]]
            kinds.setdefault((i == 0, *neighbors, between[i], between[i + 1]), []).append(i)
    margins: dict[int, tuple[int, int]] = {}
    for indexes in kinds.values():
        measured = set()
        for i in {indexes[0], indexes[-1]}:
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
        margins.update(dict.fromkeys(indexes, measured.pop()))
    return margins


@dataclass(frozen=True, slots=True)
class AskedTurn:
    """An assistant's turn as inference has it: at the end of the conversation so far.

    Returned by `ask_turns`.
    """

    prompt: str  # the conversation before the turn, with the generation prompt; may be empty
    text: str  # the conversation up to and including the turn
    # what is trained on, in `text`: one span, or each span that the template's markers enclose
    spans: tuple[Span, ...]

    @property
    def start(self) -> int:
        return self.spans[0][0]

    @property
    def end(self) -> int:
        return self.spans[-1][1]

    @property
    def continues_prompt(self) -> bool:
        """Whether the text begins with the prompt, and the first span follows directly or after
        white space. True without a prompt.
        """
        return not self.prompt or (
            self.text.startswith(self.prompt)
            and not self.text[len(self.prompt) : self.start].strip()
        )

    def is_in(self, text: str) -> bool:
        """Whether the `text` of a longer conversation is the same up to the turn's end."""
        return text.startswith(self.text[: self.end])


def ask_turns(conversation: Conversation, renderer: Renderer) -> dict[int, AskedTurn]:
    """Renders each trained turn as inference has it, and maps message index -> turn.

    A turn is left out if the template's markers enclose nothing of it. Raises `BadRow` if the
    template rejects the messages, or if it is unknown where a turn begins.
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
    """Renders the whole conversation, and finds the trained turns in the text.

    Args:
        conversation: The conversation.
        asked: Message index -> trained turn as inference has it, from `ask_turns`.
        renderer: The renderer.

    Returns:
        The text, and message index -> the spans of a trained turn.

    Raises:
        BadRow: The template rejects the conversation, or it is unknown where a turn stands.
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
    """Renders a conversation, and finds the `wanted` turns by the template's markers.

    Returns the text, and message index -> spans. If the numbers of spans and of assistant's turns
    differ, it is unknown which span belongs to which turn. Then the first turn gets all spans if
    every assistant's turn is wanted.

    Raises `BadRow` if the numbers differ and only some turns are wanted.
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
        spans = _drop_wordless_spans(text, spans, renderer)
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
    """Finds the spans of turn `i` in a whole conversation whose text up to the turn's end is not
    what inference sees.

    Returns an empty tuple if the template leaves the turn out. Raises `BadRow` if it is unknown
    where the turn stands.
    """
    positions = [mark.position for mark in rendering.marks if mark.message == i]
    is_marked = i not in rendering.unmarked
    has_words = bool(messages[i]["content"].strip() or messages[i].get("tool_calls"))
    if is_marked and has_words and not positions:
        return ()  # Mistral's second version leaves out the calls of earlier questions
    prompt = _render_prompt(messages[:i], tools, renderer)
    start = _find_start(rendering, i, prompt, renderer)
    if start is None or not is_marked:
        raise _make_unknown_turn_error(i)
    begin = start.position
    limit = _find_next_message_begin(rendering, i, begin)
    words_end = max((place for place in positions if begin <= place <= limit), default=begin)
    end = words_end + _measure_end_of_turn(rendering.text[words_end:limit], renderer)
    return ((begin, end), *_find_later_spans(rendering, i, limit, renderer))


def _find_next_message_begin(rendering: Rendering, i: int, turn_begin: int) -> int:
    """Finds where the first words of another message begin after `turn_begin`, the start of turn
    `i`. Returns the text's length if there are none.
    """
    begins = [
        mark.words_begin
        for mark in rendering.marks
        if mark.message != i and mark.position > turn_begin
    ]
    return max(turn_begin, min(begins, default=len(rendering.text)))


def _find_later_spans(rendering: Rendering, i: int, limit: int, renderer: Renderer) -> list[Span]:
    """Finds the words of message `i` that the template writes after another message's words.

    Gemma 4 writes the words that follow a call after the call's result. Each run of the message's
    marks, without another message's mark between them, is one span.

    `limit`: where the next message's words begin.
    """
    marks = rendering.marks
    spans = []
    for message, group in groupby(marks, lambda mark: mark.message):
        run = list(group)
        if message != i or run[0].position <= limit:
            continue
        begin = run[0].position  # the run's first mark stands where its words begin
        last = run[-1]
        following = marks[marks.index(last) + 1 :]
        next_begins = [mark.words_begin for mark in following if mark.message != i]
        end = min([_find_end_of_words(rendering.text, last, renderer), *next_begins])
        # Gemma 4 may have left out all of the content, so that only the mark before it is there.
        if end > begin:
            spans.append((begin, end))
    return spans


def _find_end_of_words(text: str, mark: Mark, renderer: Renderer) -> int:
    """Finds where words end, given the last of their marks.

    Usually that mark stands at their end. The template may leave out the end of a content, as Gemma
    4 does with text behind <|channel>. The words then end at the next special token, or at the mark
    if there is none.
    """
    if mark.ends:
        return mark.position
    special = renderer.special_tokens.search(text, mark.position)
    return special.start() if special else mark.position


def _measure_end_of_turn(after: str, renderer: Renderer) -> int:
    """Counts the characters with which a turn ends, at the beginning of `after`.

    They reach to the first stop token or end of turn, whichever comes first; else to the end of the
    first special token. Returns 0 if there is none.

    `after`: the text from the turn's last words on.
    """
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
    """Renders turn `i` as inference has it: at the end of the messages up to it.

    Returns None if the template's markers enclose nothing of the turn. Raises `BadRow` as
    `ask_turns` does.
    """
    prompt = _render_prompt(messages[:i], tools, renderer)
    answered = Rendering(messages[: i + 1], tools, renderer)
    start = _find_start(answered, i, prompt, renderer)
    if start is None and not renderer.has_markers:
        raise _make_unknown_turn_error(i)
    prompt_text = prompt.text if prompt else ""
    text = answered.text
    begin = start.position if start else 0
    if start and start.follows_prompt:
        # The template may write the prompt otherwise once the answer follows: gpt-oss then drops
        # the reasoning before an earlier call, which the model has seen in its prompt.
        text = prompt_text + text[begin:]
        begin = len(prompt_text)
    if not renderer.has_markers:
        end = _find_end_of_last_turn(text, begin, renderer)
        return AskedTurn(prompt_text, text, ((begin, end),))
    shift = len(text) - len(answered.text)
    _, marked = apply_marked_template(renderer, messages[: i + 1], tools)
    spans = [
        (max(first + shift, begin), last + shift) for first, last in marked if last + shift > begin
    ]
    spans = _drop_wordless_spans(text, spans, renderer)
    if not spans:
        return None
    last_start, last_end = spans[-1]
    end = max(last_end, _find_end_of_turn(text, last_start, last_end, renderer))
    # If the start is unknown, the earlier spans may belong to other turns.
    earlier = spans[:-1] if start else []
    return AskedTurn(prompt_text, text, (*earlier, (last_start, end)))


def _drop_wordless_spans(text: str, spans: list[Span], renderer: Renderer) -> list[Span]:
    """Drops the spans that hold only special tokens and white space, unless all spans do.

    Phi-3's template ends a conversation with a marked span that holds only its end of text.
    """
    with_words = []
    for start, end in spans:
        words = renderer.special_tokens.sub("", text[start:end])
        if words.strip():
            with_words.append((start, end))
    return with_words or spans


def _find_end_of_last_turn(text: str, begin: int, renderer: Renderer) -> int:
    """Finds where the turn that begins at `begin` ends, in a text that ends with this turn."""
    end = _find_end_of_turn(text, begin, len(text), renderer)
    if not renderer.end_of_turn or renderer.end_of_turn not in text[begin:end]:
        return end
    # Special tokens after the end of turn end the whole conversation, as Phi-3's end of text does.
    answer, _, after = text[begin:end].rpartition(renderer.end_of_turn)
    if renderer.special_tokens.sub("", after).strip():
        return end
    # The first of two ends of turn in a row counts.
    if answer.rstrip().endswith(renderer.end_of_turn):
        answer = answer.rstrip().removesuffix(renderer.end_of_turn)
    return begin + len(answer + renderer.end_of_turn)


def _render_prompt(before: list[Message], tools: Tools, renderer: Renderer) -> Rendering | None:
    """Renders the prompt that inference makes of the messages `before` a turn; None without any."""
    if before:
        return Rendering(before, tools, renderer, add_generation_prompt=True)
    return None


@dataclass(frozen=True, slots=True)
class _Start:
    """Where a turn begins in a text. Returned by `_find_start`."""

    position: int
    # the end of the turn's prompt stands right before it; earlier text may differ from the prompt
    follows_prompt: bool


@dataclass(frozen=True, slots=True)
class _TemplateWords:
    """The template's own words before a turn, in the conversation and in the turn's prompt."""

    begin: int  # where they begin in the conversation's text
    in_prompt: str  # as the prompt has them, to its end
    # index of the message whose words stand before them; the turn itself if it is the first message
    behind_message: int


def _find_start(
    answered: Rendering, i: int, prompt: Rendering | None, renderer: Renderer
) -> _Start | None:
    """Finds where turn `i` begins in a conversation.

    If the conversation's text begins with the turn's prompt, the turn begins at the prompt's end.
    Otherwise the template's own words before the turn are compared with those at the prompt's end,
    and the turn begins where the two differ.

    Args:
        answered: The conversation with the turn, and maybe later messages.
        i: The index of the turn's message.
        prompt: The turn's prompt; None if the turn is the first message.
        renderer: The renderer of both.

    Returns:
        None if the template rewrites so much that the beginning is unknown.
    """
    text = answered.text
    if prompt and text.startswith(prompt.text):
        return _Start(len(prompt.text), follows_prompt=True)
    own_positions = (mark.position for mark in answered.marks if mark.message == i)
    own_begin = next(own_positions, len(text))  # where the turn's own words begin
    words: _TemplateWords | None
    if prompt is None:
        words = _find_generation_prompt(text, own_begin, i, renderer)
    else:
        words = _find_words_after_last_mark(answered, prompt, i, own_begin)
    if words is None:
        return None
    shared = count_common(words.in_prompt, text[words.begin : own_begin])  # characters
    if shared == len(words.in_prompt):
        return _Start(words.begin + shared, follows_prompt=prompt is not None)
    if any(words.behind_message < other < i for other in answered.unmarked):
        return None  # what differs may be the words of that message, whose place is unknown
    border = _find_token_border(text[words.begin :], shared, renderer)
    return _Start(words.begin + border, follows_prompt=False)


def _find_words_after_last_mark(
    answered: Rendering, prompt: Rendering, i: int, own_begin: int
) -> _TemplateWords | None:
    """Finds the template's words between the last earlier message and turn `i`.

    They follow the last mark before the turn that the turn's prompt has too. Returns None if there
    is no such mark.

    `own_begin`: where the turn's own words begin in the conversation.
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
    """Finds the template's words before turn `i`, which is the first message and has no prompt.

    They begin where the longest possible beginning of the generation prompt stands before the
    message's own words; at 0 if none does.
    """
    prompt = renderer.generation_prompt
    for length in range(len(prompt), 0, -1):
        begin = text.rfind(prompt[:length], 0, own_begin)
        if begin >= 0:
            return _TemplateWords(begin, prompt, behind_message=i)
    return _TemplateWords(0, prompt, behind_message=i)


def _find_token_border(text: str, shared: int, renderer: Renderer) -> int:
    """Finds the last position up to `shared` at which a token of `text` begins.

    Texts that differ from `shared` on may share a part of a token: <think> and </think> both begin
    with <.
    """
    encoded = renderer.backend.encode(text[: shared + CONTEXT_CHARACTERS], add_special_tokens=False)
    borders = [start for start, _ in encoded.offsets if start <= shared]
    return max(borders, default=0)


def _make_unknown_turn_error(i: int) -> BadRow:
    """Makes the error for an assistant's turn whose place in the text is unknown."""
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
    """Raises `BadRow` unless the trained spans hold each trained answer once, and nothing else.

    Args:
        turns: Message index -> trained spans in the document's text.
        marks: The marks in that text, from `trace`.
        conversation: The document's conversation.
        renderer: The renderer.
    """
    spans = sorted(span for turn_spans in turns.values() for span in turn_spans)
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
        # Only the end of its words must be in a span: they may begin in the prompt. A template with
        # markers may leave words out on purpose.
        elif mark.ends and not renderer.has_markers:
            if any(start <= mark.position <= end for start, end in spans):
                continue
            raise BadRow(f"the chat template writes {name} apart from its turn; {ADVICE}")
