"""The spans of a rendered conversation that are trained on: what the assistant says, with the end of its turn.

    <|user|>2 + 2?<|end|><|assistant|>4<|end|><|user|>Sure?<|end|><|assistant|>Yes.<|end|>
                                      ^^^^^^^^                                 ^^^^^^^^^^^

A template with {% generation %} markers gives them. For any other template they are found by rendering parts of the
conversation and comparing the texts.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from finetune.data.formats import Conversation
from finetune.data.messages import BadRow, Message, count_common
from finetune.data.tokenizer import Renderer, Span, Tools, apply_marked_template, apply_template


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
    """Message index -> turn, of each turn that is trained on; without those that are unknown to begin somewhere.

    Raises `BadRow` as rendering does.
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
    text, turns = apply_template(renderer, messages, tools), {}
    for i in wanted:
        begins = len(asked[i].prompt) if i in asked and text.startswith(asked[i].prompt) else None
        if i in asked and asked[i].is_in(text):
            turns[i] = asked[i].spans
        elif (found := _find_by_substitution(text, messages, i, tools, renderer)) is not None:
            turns[i] = (found if begins is None else (min(begins, found[0]), found[1]),)
        elif begins is not None and (stop := renderer.up_to_stop.search(text, begins)):
            turns[i] = ((begins, stop.end()),)  # a call, which cannot be replaced before its result
        else:
            raise BadRow(
                f"message {i + 1}: the chat template rewrites earlier turns, so it is unknown where the assistant's "
                "turn begins and ends; use a template with {% generation %} markers"
            )
    return text, turns


def _ask_turn(messages: list[Message], i: int, tools: Tools, renderer: Renderer) -> AskedTurn | None:
    """Turn `i`, asked for by itself; None if it is unknown where it begins. Raises `BadRow` as rendering does."""
    prompt = apply_template(renderer, messages[:i], tools, add_generation_prompt=True) if i else ""
    start: int | None
    if renderer.has_markers:
        text, marked = apply_marked_template(renderer, messages[: i + 1], tools)
        begin = len(prompt) if text.startswith(prompt) else 0
        marked = [(max(start, begin), end) for start, end in marked if end > begin]
        # Phi-3's ends the whole conversation with a mark of its own, around its end of text.
        words = [span for span in marked if renderer.special_tokens.sub("", text[slice(*span)]).strip()] or marked
        if not words:
            return None
        words = words if begin else words[-1:]
        end = max(words[-1][1], _find_end_of_turn(text, *words[-1], renderer))
        return AskedTurn(prompt, text, (*words[:-1], (words[-1][0], end)))
    text = _continue_prompt(prompt, apply_template(renderer, messages[: i + 1], tools), messages[:i], tools, renderer)
    start = _find_start_of_turn(text, prompt, messages[:i], tools, renderer)
    if start is None:
        return None
    end = _find_end_of_turn(text, start, len(text), renderer)
    if renderer.end_of_turn and renderer.end_of_turn in text[start:end]:
        # What follows belongs to the end of the whole conversation: Phi-3 writes its end of text there.
        answer, _, after = text[start:end].rpartition(renderer.end_of_turn)
        if answer.rstrip().endswith(renderer.end_of_turn):
            answer = answer.rstrip().removesuffix(renderer.end_of_turn)
        end = end if renderer.special_tokens.sub("", after).strip() else start + len(answer + renderer.end_of_turn)
    return AskedTurn(prompt, text, ((start, end),))


def _continue_prompt(prompt: str, text: str, before: list[Message], tools: Tools, renderer: Renderer) -> str:
    """`text`, of a conversation that ends with an answer to `prompt`, beginning as `prompt` does where it can.

    gpt-oss writes the reasoning before a tool call until the conversation ends: the last answer has seen it.
    """
    if text.startswith(prompt):
        return text
    asks = prompt.removeprefix(apply_template(renderer, before, tools))
    other = apply_template(renderer, [*before, {"role": "assistant", "content": "ANSWER"}], tools)
    shared = count_common(text, other)
    at = text.rfind(asks, 0, shared) if asks and asks != prompt else -1
    return text if at < 0 else prompt + text[at + len(asks) :]


def _find_by_substitution(text: str, messages: list[Message], i: int, tools: Tools, renderer: Renderer) -> Span | None:
    """The span of turn `i`, from what changes in the text when its content is replaced; None if more than that changes.

    Mistral's templates describe the tools before the last question, so no text of fewer turns is a prefix of the whole.
    """
    mark = f"MESSAGE{i}CONTENT"
    replaced = [*messages[:i], {"role": "assistant", "content": mark}, *messages[i + 1 :]]
    try:
        before, found, after = apply_template(renderer, replaced, tools).partition(mark)
    except BadRow:
        return None
    # White space before the answer belongs to it, unless it is part of the prompt, which may open <think> after it.
    prompt = renderer.generation_prompt
    prompted = any(prompt[:n].strip() and before.endswith(prompt[:n]) for n in range(1, len(prompt) + 1))
    before = before if prompted else before.rstrip()
    if not found or not text.startswith(before) or not text.endswith(after) or len(before + after) > len(text):
        return None
    return len(before), _find_end_of_turn(text, len(before), len(text) - len(after), renderer)


def _find_start_of_turn(text: str, prompt: str, before: list[Message], tools: Tools, renderer: Renderer) -> int | None:
    """Where the turn that follows `before` starts, after `prompt`, its prompt; None if that cannot be found."""
    if not before:
        at = text.find(renderer.generation_prompt) if renderer.generation_prompt else -1
        return at + len(renderer.generation_prompt) if at >= 0 else 0
    if text.startswith(prompt):
        return len(prompt)
    # The prompt may differ from the turn as it is in the text (with <think>, say): the turn starts where they differ.
    bare = apply_template(renderer, before, tools)
    shared = count_common(text, prompt)
    if not text.startswith(bare) or shared <= len(bare):
        return None
    starts = [start for start, _ in renderer.backend.encode(text[len(bare) :], add_special_tokens=False).offsets]
    # At a token's border: <think> and </think> begin alike.
    return len(bare) + max(int(start) for start in starts if len(bare) + start <= shared)
