"""Documents as text, with the stretches of it that are trained on. A mask is born here, together with its text."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from finetune.data.formats import Completion, Conversation, Document, Text
from finetune.data.messages import BadRow, Message
from finetune.data.renderer import Renderer, Span, Tools, apply_template, rendered
from finetune.data.unrendered import find_unrendered


@dataclass(frozen=True, slots=True)
class Rendered:
    """A document as the tokenizer will read it. Source: `render`."""

    text: str
    spans: tuple[Span, ...]  # what is trained on
    is_plain: bool  # BOS is put before it, as before any plain text; a chat template writes its own
    remarks: tuple[str, ...] = ()  # what was noticed, by the names in `findings`


def render(document: Document, way: Renderer) -> Rendered:
    """The text of a document, and which of it is trained on. Raises `BadRow` where the template refuses it."""
    match document:
        case Text(text):
            # A BOS that the text brings along would stand beside the tokenizer's own.
            text = text.removeprefix(way.bos) if way.bos else text
            whole = text + way.eos
            typed = ("typed_special_token",) if way.special_tokens.search(text) else ()
            return Rendered(whole, ((0, len(whole)),), True, typed)
        case Completion(prompt, completion):
            prompt = prompt.removeprefix(way.bos) if way.bos else prompt
            whole = prompt + completion + way.eos
            return Rendered(whole, ((len(prompt), len(whole)),), True, tuple(_completion_remarks(document, way)))
        case Conversation():
            text, spans, turns = _conversation(document, way)
            remarks = (*_chat_remarks(document, text, spans, way), *find_unrendered(document, text, turns))
            return Rendered(text, spans, False, remarks)


def _completion_remarks(document: Completion, way: Renderer) -> Iterable[str]:
    prompt, completion = document.prompt, document.completion
    if way.special_tokens.search(prompt) or way.special_tokens.search(completion):
        yield "typed_special_token"
    if not way.eos:
        yield "no_end_of_turn"
    if prompt and completion and not prompt[-1].isspace() and not completion[0].isspace():
        yield "no_space_between"
    if way.has_template:
        yield "template_unused"


def _chat_remarks(conversation: Conversation, text: str, spans: tuple[Span, ...], way: Renderer) -> Iterable[str]:
    messages = conversation.messages
    if any(way.special_tokens.search(message["content"]) for message in messages):
        yield "typed_special_token"
    if messages[0]["role"] == "assistant":
        yield "begins_with_assistant"
    if not way.has_template:
        yield "plain_template"
    if spans and not _ends_turn(text[slice(*spans[-1])], way):
        yield "no_end_of_turn"
    elif spans and not way.special_tokens.search(way.end_of_turn):
        yield "end_of_turn_is_text"


def _ends_turn(words: str, way: Renderer) -> bool:
    """Whether a trained stretch holds, at its end, what tells a reader that the assistant has finished."""
    if way.end_of_turn and words.endswith(way.end_of_turn):
        return True
    specials = [match.end() for match in way.special_tokens.finditer(words)]
    return bool(specials) and specials[-1] == len(words.rstrip())


def _conversation(conversation: Conversation, way: Renderer) -> tuple[str, tuple[Span, ...], dict[int, Span]]:
    """(text, trained stretches, where each assistant message stands).

    Trained is every assistant turn with its end, less those that carry `train: false`. Where the template's own marks
    are not one for each turn, it is not known where each stands.
    """
    messages = list(conversation.messages)
    if way.has_markers:
        text, marked = rendered(way, messages, conversation.tools, return_assistant_tokens_mask=True)
        spans = [(start, _end_of_turn(text, start, end, way)) for start, end in marked]
    else:
        text = apply_template(way, messages, conversation.tools)
        found = None if conversation.tools else _by_shape(text, messages, way)
        spans = _by_prefix(text, messages, conversation, way) if found is None else found
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    turns = dict(zip(answers, spans, strict=True)) if len(spans) == len(answers) else {}
    if not way.assistant_only:
        return text, ((0, len(text)),), turns
    if all(conversation.trained[i] for i in answers):
        return text, tuple(spans), turns
    if not turns:
        raise BadRow(
            f"the chat template marks {len(spans)} stretches for {len(answers)} assistant turns, so that `train: false`"
            " has no place"
        )
    return text, tuple(span for i, span in turns.items() if conversation.trained[i]), turns


def _end_of_turn(text: str, start: int, end: int, way: Renderer) -> int:
    """Where a trained stretch ends: behind the end-of-turn token, before the white space that follows it.

    A model stops at its end-of-turn token; the newline that templates write behind it is never the model's to write.
    """
    inside = [match.end() for match in way.special_tokens.finditer(text, start, end)]
    if inside and not text[inside[-1] : end].strip():
        return inside[-1]
    if way.end_of_turn and text.startswith(way.end_of_turn, end):
        return end + len(way.end_of_turn)
    words = text[start:end].rstrip()
    if way.end_of_turn and words.endswith(way.end_of_turn):  # which is text to this tokenizer, no special token
        return start + len(words)
    # Another end than the last turn's (<|end|> for <|return|>), or the next turn's first token, which then is the end.
    behind = way.special_tokens.match(text, end)
    return behind.end() if behind else end


@dataclass(frozen=True, slots=True)
class Shape:
    """What a template writes around the messages of a conversation with given roles. Source: `_shape`."""

    between: tuple[str, ...]  # [messages + 1]
    trims: tuple[bool, ...]  # [messages]: whether white space around the content is taken away
    begins: tuple[int, ...]  # [messages]: where in `between` an assistant's turn begins, behind the generation prompt


def _by_shape(text: str, messages: list[Message], way: Renderer) -> list[Span] | None:
    """The assistant's stretches where the template writes the same around any content; None where it does not.

    What stands around the messages is learned once for each sequence of roles, and trusted only where this
    conversation's own contents between it give the rendered text, letter for letter.
    """
    roles = tuple(message["role"] for message in messages)
    shape = _shape(roles, way)
    if shape is None or any(len(message) > 2 for message in messages):
        return None
    contents = [m["content"].strip() if trim else m["content"] for m, trim in zip(messages, shape.trims, strict=True)]
    pieces = [shape.between[0]]
    for content, after in zip(contents, shape.between[1:], strict=True):
        pieces += (content, after)
    if "".join(pieces) != text:
        return None
    spans, position = [], 0
    for role, content, before, begins in zip(roles, contents, shape.between, shape.begins, strict=False):
        end = position + len(before) + len(content)
        if role == "assistant":
            spans.append((position + begins, _end_of_turn(text, position + begins, end, way)))
        position = end
    return spans


@lru_cache(maxsize=1024)
def _shape(roles: tuple[str, ...], way: Renderer) -> Shape | None:
    """Learned from contents that cannot be mistaken; None where the template does not show all of them as they are."""
    marks = [f"MESSAGE{i}CONTENT" for i in range(len(roles))]
    messages = [{"role": role, "content": f" {mark}\n"} for role, mark in zip(roles, marks, strict=True)]
    between, trims, begins = [], [], []
    try:
        text = apply_template(way, messages)
        position = 0
        for i, (role, mark) in enumerate(zip(roles, marks, strict=True)):
            at = text.find(mark, position)
            if at < 0:
                return None
            trimmed = text[at - 1] != " " or text[at + len(mark)] != "\n"
            content = at if trimmed else at - 1
            start = _start_of_turn(text, messages[:i], (), way) if role == "assistant" else content
            if start is None or not position <= start <= content:
                return None
            between.append(text[position:content])
            trims.append(trimmed)
            begins.append(start - position)
            position = at + len(mark) + (not trimmed)
    except (BadRow, IndexError):
        return None
    return Shape((*between, text[position:]), tuple(trims), tuple(begins))


def _by_prefix(text: str, messages: list[Message], conversation: Conversation, way: Renderer) -> list[Span]:
    """The assistant's stretches as what each of its turns adds to the text of the turns before it."""
    spans = []
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        start = _start_of_turn(text, messages[:i], conversation.tools, way)
        whole = apply_template(way, messages[: i + 1], conversation.tools)
        if start is not None and text.startswith(whole) and start <= len(whole):
            spans.append((start, _end_of_turn(text, start, len(whole), way)))
            continue
        # The turn stands otherwise in the history than at the end (its reasoning left out, say): up to its end token.
        end = -1 if start is None or not way.end_of_turn else text.find(way.end_of_turn, start)
        if start is not None and end >= 0 and way.end_of_turn not in message["content"]:
            spans.append((start, end + len(way.end_of_turn)))
            continue
        found = _by_substitution(text, messages, i, conversation.tools, way)
        if found is None:
            raise BadRow(
                f"message {i + 1}: the chat template rewrites earlier turns, so that what the assistant said cannot be "
                "told from the rest; use a template with {% generation %} markers"
            )
        spans.append(found)
    return spans


def _by_substitution(text: str, messages: list[Message], i: int, tools: Tools, way: Renderer) -> Span | None:
    """The stretch of turn `i`, from what changes when other words stand in its place; None where more than it does.

    Mistral's templates describe the tools before the last question, so that no text of fewer turns begins the whole.
    """
    mark = f"MESSAGE{i}CONTENT"
    try:
        marked = apply_template(way, [*messages[:i], {"role": "assistant", "content": mark}, *messages[i + 1 :]], tools)
    except BadRow:
        return None
    before, found, behind = marked.partition(mark)
    # White space behind the prompt belongs to the words, unless the prompt itself ends with it.
    begins = before if way.generation_prompt and before.endswith(way.generation_prompt) else before.rstrip()
    if not found or not text.startswith(begins) or not text.endswith(behind) or len(begins + behind) > len(text):
        return None
    return len(begins), _end_of_turn(text, len(begins), len(text) - len(behind), way)


def _start_of_turn(text: str, before: list[Message], tools: Tools, way: Renderer) -> int | None:
    """Where the turn that follows `before` begins, behind the generation prompt; None where that cannot be told."""
    if not before:
        at = text.find(way.generation_prompt) if way.generation_prompt else -1
        return at + len(way.generation_prompt) if at >= 0 else 0
    prompted = apply_template(way, before, tools, add_generation_prompt=True)
    if text.startswith(prompted):
        return len(prompted)
    # Prompted, the turn may begin otherwise than it stands in the text (with <think>, say): what both share is given.
    bare = apply_template(way, before, tools)
    shared = next((i for i, (a, b) in enumerate(zip(text, prompted, strict=False)) if a != b), len(text))
    return shared if text.startswith(bare) and shared > len(bare) else None
