"""The spans of a rendered conversation that are trained on: what the assistant says, with the end of its turn.

    <|user|>2 + 2?<|end|><|assistant|>4<|end|><|user|>Sure?<|end|><|assistant|>Yes.<|end|>
                                      ^^^^^^^^                                 ^^^^^^^^^^^

A template with {% generation %} markers gives them. For any other template they are found by rendering parts of the
conversation and comparing the texts.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from finetune.data.formats import Conversation
from finetune.data.messages import BadRow, Message
from finetune.data.template import Renderer, Span, Tools, apply_marked_template, apply_template


def render_conversation(
    conversation: Conversation, renderer: Renderer
) -> tuple[str, tuple[Span, ...], dict[int, Span]]:
    """(text, trained spans, message index -> span of an assistant's turn).

    Every assistant turn is trained on, except those with `train: false`. The last value is empty if the template's own
    markers are not one pair for each turn. Raises `BadRow` if the template rejects the conversation, or hides its
    turns.
    """
    messages = read_messages(conversation, renderer)
    if renderer.has_markers:
        text, marked = apply_marked_template(renderer, messages, conversation.tools)
        # White space that the markers include is trained on, as by transformers.
        spans = [(start, max(end, _find_end_of_turn(text, start, end, renderer))) for start, end in marked]
    else:
        text = apply_template(renderer, messages, conversation.tools)
        found = None if conversation.tools else _find_by_layout(text, messages, renderer)
        spans = _find_by_prefix(text, messages, conversation.tools, renderer) if found is None else found
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    turns = dict(zip(answers, spans, strict=True)) if len(spans) == len(answers) else {}
    if not renderer.assistant_only:
        return text, ((0, len(text)),), turns
    if all(conversation.trained[i] for i in answers):
        return text, tuple(spans), turns
    if not turns:
        raise BadRow(
            f"the chat template marks {len(spans)} spans for {len(answers)} assistant turns, so `train: false` cannot "
            "be applied to one of them"
        )
    return text, tuple(span for i, span in turns.items() if conversation.trained[i]), turns


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
    starts: tuple[int, ...]  # [messages]: where in `between` an assistant's turn starts, after the generation prompt
    is_asked: tuple[bool, ...]  # [messages]: whether inference sees the same before the turn, and writes the same


def _find_by_layout(text: str, messages: list[Message], renderer: Renderer) -> list[Span] | None:
    """The assistant's spans if the template writes the same around any content, else None.

    The layout is found once for each sequence of roles, and used only if it gives exactly this rendered text when
    filled with this conversation's contents.
    """
    if any(len(message) > 2 for message in messages):
        return None
    roles = tuple(message["role"] for message in messages)
    layout = _probe_layout(roles, renderer)
    if layout is None:
        return None
    contents = [m["content"].strip() if trim else m["content"] for m, trim in zip(messages, layout.trims, strict=True)]
    pieces = [layout.between[0]]
    for content, after in zip(contents, layout.between[1:], strict=True):
        pieces += (content, after)
    if "".join(pieces) != text:
        return None
    spans, position = [], 0
    for role, content, before, start in zip(roles, contents, layout.between, layout.starts, strict=False):
        end = position + len(before) + len(content)
        if role == "assistant":
            spans.append((position + start, _find_end_of_turn(text, position + start, end, renderer)))
        position = end
    return spans


def _match_layout(text: str, messages: list[Message], renderer: Renderer) -> tuple[_Layout, list[str]] | None:
    """The layout that gives this text and the contents that fill it; None if there is none."""
    if any(len(message) > 2 for message in messages):
        return None
    layout = _probe_layout(tuple(message["role"] for message in messages), renderer)
    if layout is None:
        return None
    contents = [m["content"].strip() if trim else m["content"] for m, trim in zip(messages, layout.trims, strict=True)]
    pieces = [layout.between[0]]
    for content, after in zip(contents, layout.between[1:], strict=True):
        pieces += (content, after)
    return (layout, contents) if "".join(pieces) == text else None


@lru_cache(maxsize=1024)
def _probe_layout(roles: tuple[str, ...], renderer: Renderer) -> _Layout | None:
    """The layout, from contents that cannot be mistaken; None if the template does not write all of them unchanged."""
    marks = [f"MESSAGE{i}CONTENT" for i in range(len(roles))]
    messages = [{"role": role, "content": f" {mark}\n"} for role, mark in zip(roles, marks, strict=True)]
    between, trims, starts = [], [], []
    start_after: dict[
        tuple[str, str], int | None
    ] = {}  # one prefix is rendered for each kind of turn, not for each turn
    try:
        text = apply_template(renderer, messages)
        position = 0
        for i, (role, mark) in enumerate(zip(roles, marks, strict=True)):
            at = text.find(mark, position)
            if at < 0:
                return None
            trimmed = text[at - 1] != " " or text[at + len(mark)] != "\n"
            content = at if trimmed else at - 1
            before = text[position:content]
            start: int | None = len(before)
            if role == "assistant":
                kind = (roles[i - 1] if i else "", before)
                if kind not in start_after:
                    found = _find_start_of_turn(text, messages[:i], (), renderer)
                    start_after[kind] = None if found is None else found - position
                start = start_after[kind]
            if start is None or not 0 <= start <= len(before):
                return None
            between.append(before)
            trims.append(trimmed)
            starts.append(start)
            position = at + len(mark) + (not trimmed)
        between.append(text[position:])
        is_asked = _probe_turns(text, messages, between, renderer)
    except (BadRow, IndexError):
        return None
    return _Layout(tuple(between), tuple(trims), tuple(starts), is_asked)


def _probe_turns(text: str, messages: list[Message], between: list[str], renderer: Renderer) -> tuple[bool, ...]:
    """Whether inference sees and writes each turn as it is in `text`; the first and the last of each kind are
    rendered."""
    kinds: dict[tuple[Any, ...], list[int]] = {}
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            around = [each["role"] for each in messages[max(i - 1, 0) : i + 2]]
            kinds.setdefault((i == 0, *around, between[i], between[i + 1]), []).append(i)
    is_asked = [True] * len(messages)
    for of_kind in kinds.values():
        asked = [ask_turn(messages, i, (), renderer) for i in dict.fromkeys((of_kind[0], of_kind[-1]))]
        if not all(turn is not None and turn.is_continued and turn.is_in(text) for turn in asked):
            for i in of_kind:
                is_asked[i] = False
    return tuple(is_asked)


@dataclass(frozen=True, slots=True)
class AskedTurn:
    """An assistant's turn as inference asks for it: after the conversation so far. Returned by `ask_turn`."""

    prompt: str  # the conversation before it, with the generation prompt
    text: str  # the conversation that ends with it
    start: int  # of what is trained on
    end: int

    @property
    def is_continued(self) -> bool:
        """Whether what is trained on follows the prompt, with nothing between that the model would have to write."""
        return not self.prompt or (
            self.text.startswith(self.prompt) and not self.text[len(self.prompt) : self.start].strip()
        )

    def is_in(self, text: str) -> bool:
        """Whether `text`, of a longer conversation, has the turn, and all before it, as inference has them."""
        return text.startswith(self.text[: self.end])


def ask_turn(messages: list[Message], i: int, tools: Tools, renderer: Renderer) -> AskedTurn | None:
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
        start = words[0][0] if begin else words[-1][0]
        return AskedTurn(prompt, text, start, max(words[-1][1], _find_end_of_turn(text, start, words[-1][1], renderer)))
    text = _continue_prompt(prompt, apply_template(renderer, messages[: i + 1], tools), messages[:i], tools, renderer)
    start = _find_start_of_turn(text, messages[:i], tools, renderer)
    if start is None:
        return None
    end = _find_end_of_turn(text, start, len(text), renderer)
    stop = text.rfind(renderer.end_of_turn, start, end) if renderer.end_of_turn else -1
    if stop >= 0:  # what follows belongs to the end of the whole conversation: Phi-3 writes its end of text there
        stop += len(renderer.end_of_turn)
        end = end if renderer.special_tokens.sub("", text[stop:end]).strip() else stop
    return AskedTurn(prompt, text, start, end)


def _continue_prompt(prompt: str, text: str, before: list[Message], tools: Tools, renderer: Renderer) -> str:
    """`text`, of a conversation that ends with an answer to `prompt`, with what it writes otherwise before it as in
    `prompt`.

    gpt-oss writes the reasoning before a tool call until the conversation ends: the last answer has seen it.
    """
    if text.startswith(prompt):
        return text
    asks = prompt.removeprefix(apply_template(renderer, before, tools))
    other = apply_template(renderer, [*before, {"role": "assistant", "content": "ANSWER"}], tools)
    shared = next((i for i, (a, b) in enumerate(zip(text, other, strict=False)) if a != b), len(text))
    at = text.rfind(asks, 0, shared) if asks and asks != prompt else -1
    return text if at < 0 else prompt + text[at + len(asks) :]


def is_as_asked(text: str, conversation: Conversation, renderer: Renderer) -> bool:
    """Whether it is known without rendering parts of the conversation that inference sees each trained turn as in
    `text`."""
    found = _match_layout(text, read_messages(conversation, renderer), renderer)
    return (
        found is not None
        and not conversation.tools
        and all(asked for asked, trained in zip(found[0].is_asked, conversation.trained, strict=True) if trained)
    )


def _find_by_prefix(text: str, messages: list[Message], tools: Tools, renderer: Renderer) -> list[Span]:
    """The assistant's spans as what each of its turns adds to the text of the turns before it."""
    spans = []
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        start = _find_start_of_turn(text, messages[:i], tools, renderer)
        up_to_turn = apply_template(renderer, messages[: i + 1], tools)
        if start is not None and text.startswith(up_to_turn) and start <= len(up_to_turn):
            spans.append((start, _find_end_of_turn(text, start, len(up_to_turn), renderer)))
            continue
        # The turn is written differently in the history than at the end (without its reasoning, say): up to its end
        # token.
        end = -1 if start is None or not renderer.end_of_turn else text.find(renderer.end_of_turn, start)
        if start is not None and end >= 0 and renderer.end_of_turn not in message["content"]:
            spans.append((start, end + len(renderer.end_of_turn)))
            continue
        found = _find_by_substitution(text, messages, i, tools, renderer)
        if found is None:
            raise BadRow(
                f"message {i + 1}: the chat template rewrites earlier turns, so it is unknown where the assistant's "
                f"turn begins and ends; use a template with {{% generation %}} markers"
            )
        spans.append(found)
    return spans


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
    # White space after the prompt belongs to the answer, unless the prompt itself ends with it.
    prompted = renderer.generation_prompt and before.endswith(renderer.generation_prompt)
    before = before if prompted else before.rstrip()
    if not found or not text.startswith(before) or not text.endswith(after) or len(before + after) > len(text):
        return None
    return len(before), _find_end_of_turn(text, len(before), len(text) - len(after), renderer)


def _find_start_of_turn(text: str, before: list[Message], tools: Tools, renderer: Renderer) -> int | None:
    """Where the turn that follows `before` starts, after the generation prompt; None if that cannot be found."""
    if not before:
        at = text.find(renderer.generation_prompt) if renderer.generation_prompt else -1
        return at + len(renderer.generation_prompt) if at >= 0 else 0
    prompted = apply_template(renderer, before, tools, add_generation_prompt=True)
    if text.startswith(prompted):
        return len(prompted)
    # The prompt may differ from the turn as it is in the text (with <think>, say): the turn starts where they differ.
    bare = apply_template(renderer, before, tools)
    shared = next((i for i, (a, b) in enumerate(zip(text, prompted, strict=False)) if a != b), len(text))
    return shared if text.startswith(bare) and shared > len(bare) else None
