"""Documents as text with the spans that are trained on, and checks of what the chat template made
of them.

A conversation is rendered in one of three ways. All have the same text where the template writes a
turn alike whatever follows it:

- by layout: once, where what the template writes around messages of these roles is known;
- as asked: up to a trained turn, which follows the prompt that inference gives;
- whole: as the template writes all of it, even where inference would see a turn otherwise.

`render_turns` may make several texts of it, `render` always one.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any

import numpy as np
import xxhash
from transformers.utils.chat_parsing import parse_response

from finetune.config.schema import Pooling, Turns
from finetune.data.environments import choose_environment
from finetune.data.formats import (
    Candidate,
    Completion,
    Conversation,
    Document,
    Question,
    Steps,
    Text,
    TokenRow,
    make_message,
)
from finetune.data.images import EncodedImage, hash_images, open_image, place_images
from finetune.data.marks import Marks, trace
from finetune.data.messages import (
    IMAGE,
    REASONING_KEYS,
    THINKING_END,
    THINKING_START,
    THOUGHT,
    BadRow,
    Message,
    parse_if_json,
    read_reasoning,
)
from finetune.data.preferences import check_prompt
from finetune.data.spans import (
    AskedTurn,
    ask_turns,
    find_turns,
    match_layout,
    read_messages,
    refuse_faults,
)
from finetune.data.tokenizer import (
    CONTEXT_CHARACTERS,
    Renderer,
    Span,
    Tools,
    add_variables,
    apply_template,
    choose_tools,
    keeps_border,
    read_parts,
)

COMPARED = (
    "unlike_inference",
    "prompt_not_continued",
    "not_read_back",
    "no_reasoning",
)  # the findings with a detail


@dataclass(frozen=True, slots=True)
class RenderedText:
    """A document as the tokenizer reads it. Returned by `render`."""

    text: str
    spans: tuple[Span, ...]  # what is trained on
    is_plain: bool  # the tokenizer's BOS is put before it; a chat template writes its own
    findings: tuple[str, ...] = ()  # names in the table of data/findings.py
    group_hash: int | None = None  # xxh3 of what it is a duplicate by, where its text is not all
    # where the last token is scored and nothing else is trained on: what the score should be
    label: int | None = None
    step_labels: tuple[int, ...] = ()  # where each of `spans` is scored at its end
    # whose hidden states are its embedding; None: tokens are trained on
    pooling: Pooling | None = None
    rating: int = 0  # of its group: 1 for a good answer, -1 for a bad one, 0 where it is not rated
    tokens: TokenRow | None = None  # in place of a text, where the row has ids
    # message index -> where it stands, of trained answers
    turns: Mapping[int, Span] = field(default_factory=dict)
    # for a finding of COMPARED: the first token that is not what inference sees, say
    difference: str = ""
    images: tuple[EncodedImage, ...] = ()
    row: str = ""  # of a prompt: what rewards read, as JSON
    # where a text begins that is encoded as if nothing stood before it
    fresh_starts: tuple[int, ...] = ()


def render_turns(document: Document, renderer: Renderer) -> tuple[RenderedText, ...]:
    """Renders a document as one or several texts, as `renderer.turns` says.

    Under `auto` and `split` every trained turn follows exactly the prompt that inference gives: the
    template applied to the conversation so far, with the generation prompt. `auto` writes the
    fewest such texts: one, where the template writes a turn alike whatever follows it.

    Raises `BadRow`.
    """
    if renderer.answers_apart and isinstance(document, Completion | Conversation):
        return _render_answers_apart(document, renderer)
    if isinstance(document, Completion) and document.are_turns and renderer.has_template:
        document = _converse(document)
    if isinstance(document, Conversation) and document.images:
        renderer = read_parts(renderer)
    if not isinstance(document, Conversation) or not renderer.assistant_only:
        return (render(document, renderer),)
    return _render_trained_turns(document, renderer)


def _converse(document: Completion) -> Conversation:
    """The conversation of a prompt and its trained answer."""
    messages = (
        make_message("user", document.prompt),
        make_message("assistant", document.completion),
    )
    return Conversation(messages, (False, True))


def _render_trained_turns(document: Conversation, renderer: Renderer) -> tuple[RenderedText, ...]:
    """Renders a conversation of which the assistant's turns are trained, as `renderer.turns` says:
    by layout where that does; else whole, or as asked, in the fewest texts.

    Raises `BadRow`.
    """
    renderer = add_variables(renderer, document.variables)
    document = replace(document, variables={})
    if renderer.turns == "last":
        trained = [i for i, is_trained in enumerate(document.trained) if is_trained]
        document = _keep_turns(document, trained[-1:])
    if renderer.turns != "split":
        whole = _render_by_layout(document, renderer)
        is_whole = renderer.turns == "whole"
        if whole is not None and (is_whole or not _cuts_earlier(whole, renderer)):
            return (whole,)
    asked = ask_turns(document, renderer)
    # the template's {% generation %} markers may enclose nothing of a turn
    is_any_missing = len(asked) < sum(document.trained)
    if renderer.turns == "whole" or is_any_missing or not asked:
        return (_render_whole(document, asked, renderer),)
    return _render_apart(document, asked, renderer)


def _render_answers_apart(document: Document, renderer: Renderer) -> tuple[RenderedText, ...]:
    """Renders a document for `answers_apart`: the tokenizer encodes the prompt and each answer
    separately.
    """
    if getattr(document, "images", ()):
        raise BadRow(
            "answers_apart: a text with images is encoded as one; remove the key from this entry "
            "of datasets"
        )
    turns: Turns = renderer.turns if renderer.assistant_only else "whole"
    # Rendering finds where answers start only if they alone are trained on.
    of_answers = replace(renderer, answers_apart=False, assistant_only=True, turns=turns)
    texts: list[RenderedText] = []
    for rendered in render_turns(document, of_answers):
        answers = rendered.turns.values() or rendered.spans  # a completion has no turns
        starts = [start for start, _ in answers]
        if renderer.bos and rendered.text.startswith(renderer.bos):
            starts = [len(renderer.bos), *starts]
        spans = rendered.spans  # of a completion, what follows its prompt in any case
        if not renderer.assistant_only and not rendered.is_plain:
            spans = ((0, len(rendered.text)),)
        texts.append(replace(rendered, spans=spans, fresh_starts=tuple(starts)))
    return tuple(texts)


def _render_apart(
    conversation: Conversation, asked: Mapping[int, AskedTurn], renderer: Renderer
) -> tuple[RenderedText, ...]:
    """Renders the fewest texts that write each trained turn as inference does; under `turns: split`
    one for each turn.

    The last turn comes first. Each text ends with a turn, and also trains every earlier turn that
    it writes as inference does. They are returned in the order of the conversation.

    Args:
        conversation: The conversation.
        asked: Message index -> trained turn.
        renderer: The renderer.
    """
    texts: list[RenderedText] = []
    remaining = dict(asked)
    while remaining:
        last = max(remaining)
        text = remaining[last].text
        turns = {last: remaining.pop(last)}
        if renderer.turns != "split":
            turns |= {i: turn for i, turn in remaining.items() if _has_turn(text, turn, renderer)}
        texts.append(_render_asked(_keep_turns(conversation, turns), turns, renderer))
        remaining = {i: turn for i, turn in remaining.items() if i not in turns}
    if len(texts) > 1:
        texts = [replace(text, findings=(*text.findings, "turns_split")) for text in texts]
    return tuple(reversed(texts))


def _has_turn(text: str, turn: AskedTurn, renderer: Renderer) -> bool:
    """Whether `text`, of a longer conversation, has the tokens of a turn as inference has them."""
    return turn.is_in(text) and not _cuts_token(text, (turn.start, turn.end), renderer)


def _cuts_earlier(rendered: RenderedText, renderer: Renderer) -> bool:
    """Whether a border of a trained span before the last one would cut a token of the text.

    At the last span inference itself encodes prompt and answer as two pieces.
    """
    return any(_cuts_token(rendered.text, span, renderer) for span in rendered.spans[:-1])


def _cuts_token(text: str, span: Span, renderer: Renderer) -> bool:
    """Whether a border of a trained span would cut a token of `text` encoded as one piece, which is
    how inference encodes it in later turns.
    """
    special = renderer.special_tokens
    for border in span:
        # The text around the border, up to the special tokens next to it, which no token crosses.
        begin = max(border - CONTEXT_CHARACTERS, 0)
        begin = max((match.end() for match in special.finditer(text, begin, border)), default=begin)
        end = min(border + CONTEXT_CHARACTERS, len(text))
        following = special.search(text, border, end)
        end = following.start() if following else end
        is_inside = begin < border < end
        if is_inside and not keeps_border(renderer.backend, text[begin:border], text[border:end]):
            return True
    return False


def _keep_turns(conversation: Conversation, turns: Iterable[int]) -> Conversation:
    """The conversation up to the last of `turns`, with these alone trained on."""
    kept = set(turns)
    if not kept:
        return conversation
    trained = tuple(i in kept for i in range(max(kept) + 1))
    return replace(conversation, messages=conversation.messages[: len(trained)], trained=trained)


def _render_by_layout(conversation: Conversation, renderer: Renderer) -> RenderedText | None:
    """Renders the whole conversation once; None unless the template's known layout proves that each
    turn is as inference has it.

    `ask_turns` finds the same turns by a rendering for each of them.
    """
    text = apply_template(renderer, read_messages(conversation, renderer), conversation.tools)
    turns = match_layout(text, conversation, renderer)
    if turns is None:
        return None
    # The layout gave exactly this text, so nothing is left to be traced.
    return _check(conversation, text, {i: (span,) for i, span in turns.items()}, (), renderer)


def _render_whole(
    conversation: Conversation, asked: Mapping[int, AskedTurn], renderer: Renderer
) -> RenderedText:
    """Renders the whole conversation as the template writes it, even where inference would see
    turns differently.
    """
    text, turns = find_turns(conversation, asked, renderer)
    return _check_traced(conversation, text, turns, asked, renderer)


def _render_asked(
    conversation: Conversation, asked: Mapping[int, AskedTurn], renderer: Renderer
) -> RenderedText:
    """Renders a conversation that ends with the last turn of `asked` as inference has that; the
    text must have all of them so.
    """
    spans = {i: turn.spans for i, turn in asked.items()}
    return _check_traced(conversation, asked[max(asked)].text, spans, asked, renderer)


def _check_traced(
    conversation: Conversation,
    text: str,
    turns: Mapping[int, tuple[Span, ...]],
    asked: Mapping[int, AskedTurn],
    renderer: Renderer,
) -> RenderedText:
    """Checks a text and its trained turns, and adds the findings.

    Args:
        conversation: What the text was rendered from.
        text: The text.
        turns: Message index -> trained spans in `text`.
        asked: Message index -> the turn as inference has it, to compare with.
        renderer: The renderer.

    Raises:
        BadRow: Trained spans overlap, hold words of another message, or miss an answer.
    """
    marks: Marks = ()
    if renderer.assistant_only:
        marks = trace(text, read_messages(conversation, renderer), conversation.tools, renderer)
        refuse_faults(turns, marks, conversation, renderer)
    return _compare_with_asked(
        _check(conversation, text, turns, marks, renderer), conversation, asked, renderer
    )


def _check(
    conversation: Conversation,
    text: str,
    turns: Mapping[int, tuple[Span, ...]],
    marks: Marks,
    renderer: Renderer,
) -> RenderedText:
    """Adds the findings to a text, and takes reasoning out of its trained spans where the recipe
    does not train on it.

    Args:
        conversation: What the text was rendered from.
        text: The text.
        turns: Message index -> spans of an assistant's turn, at least of each trained one; none
            where the template leaves the turn out.
        marks: Which characters came from which message; empty where nothing was traced.
        renderer: The renderer.
    """
    messages = conversation.messages
    trained = {i: spans for i, spans in sorted(turns.items()) if conversation.trained[i]}
    rendered = RenderedText(text, ((0, len(text)),), False)
    if renderer.assistant_only:
        rendered = replace(
            rendered, spans=tuple(sorted(span for spans in trained.values() for span in spans))
        )
    extents = {i: (spans[0][0], spans[-1][1]) for i, spans in sorted(turns.items()) if spans}
    turn_ends = []
    if renderer.assistant_only:
        turn_ends = [extents[i][1] for i in trained if i in extents]
    findings = [
        *_check_turns(conversation, text, rendered.spans, turn_ends, renderer),
        *_find_dropped(conversation, text, extents),
    ]
    difference = ""
    if _lacks_reasoning(conversation, renderer):
        findings.append("no_reasoning")
        prompt = renderer.generation_prompt
        after = renderer.unthinking
        difference = f"inference opens with {prompt!r}, and the answers continue with {after!r}"
    if not renderer.train_on_reasoning:
        for i, turn in extents.items():
            rendered = _leave_out(rendered, _find_reasoning(text, messages[i], i, turn, marks))
    trained_extents = {i: span for i, span in extents.items() if i in trained}
    return replace(rendered, findings=tuple(findings), turns=trained_extents, difference=difference)


def _lacks_reasoning(conversation: Conversation, renderer: Renderer) -> bool:
    """Whether no trained answer has reasoning, where the template writes it for the model."""
    if renderer.unthinking is None:
        return False
    turns = zip(conversation.messages, conversation.trained, strict=True)
    return not any(read_reasoning(message) for message, is_trained in turns if is_trained)


def _find_reasoning(text: str, message: Message, i: int, turn: Span, marks: Marks) -> Span | None:
    """Locates the reasoning of message `i` in its turn, with the white space behind it; None where
    the text has none.
    """
    of_message = [mark for mark in marks if mark.message == i]
    # a mark stands before the reasoning, and one behind it
    positions = [mark.position for mark in of_message if mark.part in REASONING_KEYS]
    words = read_reasoning(message)
    closed = THINKING_END.search(text, *turn)
    if positions:
        start = positions[0]
        end = positions[-1]
    elif of_message and any(key in message for key in REASONING_KEYS):
        return None  # the template leaves it out
    elif words and closed:  # the content has it, behind a tag that the prompt may have opened
        opened = THINKING_START.search(text, turn[0], closed.start())
        start = text.find(words, opened.end() if opened else turn[0], turn[1])
        end = start + len(words)
    else:
        return None
    if start < 0:
        return None
    after = text[end : turn[1]]
    white_space = len(after) - len(after.lstrip())
    return (start, end + white_space)


def _leave_out(rendered: RenderedText, removed: Span | None) -> RenderedText:
    """Takes `removed` out of the trained spans."""
    if removed is None:
        return rendered
    start, end = removed
    spans: list[Span] = []
    for first, last in rendered.spans:
        around = ((first, min(last, start)), (max(first, end), last))
        spans += [span for span in around if span[0] < span[1]]
    return replace(rendered, spans=tuple(spans))


def _compare_with_asked(
    rendered: RenderedText,
    conversation: Conversation,
    asked: Mapping[int, AskedTurn],
    renderer: Renderer,
) -> RenderedText:
    """Adds a finding, with the first token that differs, where inference would see or write a turn
    differently.
    """
    for i, turn in sorted(asked.items()):
        if turn.continues_prompt:
            expected = turn.text[: turn.end]
            finding = "unlike_inference"
            if turn.is_in(rendered.text):
                continue
        else:
            expected = turn.prompt
            finding = "prompt_not_continued"
        trained, seen = _show_difference(rendered.text, expected, renderer)
        difference = f"message {i + 1} is trained with {trained!r} where inference has {seen!r}"
        # the new finding says more than no_reasoning
        others = [name for name in rendered.findings if name != "no_reasoning"]
        return replace(rendered, findings=(*others, finding), difference=difference)
    if not renderer.response_template:
        return rendered
    for i, turn in sorted(asked.items()):
        difference = _read_back(turn, conversation.messages[i], conversation.tools, renderer)
        if difference:
            difference = f"message {i + 1}: {difference}"
            return replace(
                rendered, findings=(*rendered.findings, "not_read_back"), difference=difference
            )
    return rendered


def _read_back(turn: AskedTurn, message: Message, tools: Tools, renderer: Renderer) -> str:
    """Reads a turn back by the tokenizer's response_template, and says how it differs from its
    message; "" if it does not.
    """
    reply = turn.text[len(turn.prompt) : turn.end]
    try:
        read = parse_response(
            reply, renderer.response_template, prefix=turn.prompt, tools=list(tools)
        )
    except Exception as error:  # a template of the model's own, with patterns of its own
        return f"response_template cannot read {reply!r}: {error}"
    if any(key in message for key in REASONING_KEYS):
        content = message["content"]
    else:
        content = THINKING_END.split(message["content"])[-1]
    expected = {
        "reasoning": read_reasoning(message),
        "content": content.strip(),
        "calls": _list_calls(message),
    }
    read_back = {
        "reasoning": read_reasoning({**read, "content": ""}),
        "content": str(read.get("content") or "").strip(),
        "calls": _list_calls(read),
    }
    name = next((name for name in expected if read_back[name] != expected[name]), None)
    if name:
        return f"{name} {expected[name]!r} is read back as {read_back[name]!r}"
    return ""


def _list_calls(message: Message) -> list[tuple[str, dict[str, str]]]:
    """The name and arguments of each call.

    A format without types, such as XML, gives each value as text.
    """
    listed = []
    for call in message.get("tool_calls") or ():
        function = call.get("function", call)
        arguments = dict(parse_if_json(function.get("arguments")) or {})
        listed.append(
            (function.get("name", ""), {name: _as_text(value) for name, value in arguments.items()})
        )
    return listed


def _as_text(value: Any) -> str:
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False)


def _show_difference(text: str, expected: str, renderer: Renderer) -> tuple[str, str]:
    """Returns (the first token of `text` that differs, the token that `expected` has there)."""
    trained = renderer.backend.encode(text, add_special_tokens=False)
    seen = renderer.backend.encode(expected, add_special_tokens=False)
    id_pairs = enumerate(zip_longest(trained.ids, seen.ids))
    first = next((i for i, (one, other) in id_pairs if one != other), 0)
    return _cut_token(text, trained, first), _cut_token(expected, seen, first)


def _cut_token(text: str, encoded: Any, number: int) -> str:
    """Returns the part of `text` that a token of its encoding stands for; "" behind its end."""
    if number >= len(encoded.ids):
        return ""
    return text[slice(*encoded.offsets[number])]


def render(document: Document, renderer: Renderer) -> RenderedText:
    """Renders a document as one text, with the spans that are trained on.

    Raises `BadRow` if the chat template rejects it.
    """
    match document:
        case Text(text):
            # A BOS in the text would be a second one beside the tokenizer's own.
            text = text.removeprefix(renderer.bos)
            findings = _find_typed([text], renderer)
            text += renderer.eos
            return RenderedText(text, ((0, len(text)),), True, findings)
        case Candidate(text):
            # A typed BOS stays, as where a reranker scores the text, and is a finding.
            findings = _find_typed([text], renderer)
            return RenderedText(renderer.bos + text + renderer.eos, (), False, findings)
        case Steps():
            return _render_steps(document, renderer)
        case TokenRow(ids, trained):
            vocabulary = renderer.backend.get_vocab_size()
            unknown = next((token for token in ids if not 0 <= token < vocabulary), None)
            if unknown is not None:
                raise BadRow(
                    f"input_ids: {unknown} is no token: the tokenizer has {vocabulary}; name the "
                    "one that made them"
                )
            identity = xxhash.xxh3_64_intdigest(np.array([ids, trained], np.int64).tobytes())
            return RenderedText("", (), False, group_hash=identity, tokens=document)
        case Question():
            return _render_question(document, renderer)
        case Completion(prompt, completion, _):
            prompt = prompt.removeprefix(renderer.bos)
            text = prompt + completion + renderer.eos
            findings = tuple(_check_completion(document, renderer))
            return RenderedText(text, ((len(prompt), len(text)),), True, findings)
        case Conversation():
            return _render_as_one(document, _for_conversation(renderer, document))


def _render_as_one(document: Conversation, renderer: Renderer) -> RenderedText:
    """Renders a conversation as one text: by layout where that does; else as asked, where the last
    message is trained and its prompt has all trained turns before it; else whole.
    """
    rendered = _render_by_layout(document, renderer)
    if rendered is not None:
        return rendered
    asked = ask_turns(document, renderer) if renderer.assistant_only else {}
    last = len(document.messages) - 1
    if (
        renderer.turns != "whole"
        and last in asked
        and all(turn.is_in(asked[last].text) for turn in asked.values())
    ):
        return _render_asked(document, asked, renderer)
    return _render_whole(document, asked, renderer)


def _find_typed(texts: Iterable[str], renderer: Renderer) -> tuple[str, ...]:
    """Returns the finding for texts in which a special token is typed."""
    is_typed = any(map(renderer.special_tokens.search, texts))
    return ("typed_special_token",) if is_typed else ()


def _render_question(document: Question, renderer: Renderer) -> RenderedText:
    """Renders a prompt, which ends where the assistant's answer begins. Nothing of it is trained
    on.

    Raises `BadRow` as `render` does.
    """
    question = document.asked
    if isinstance(question, str):
        if renderer.tools or renderer.environments:
            raise BadRow(
                "a prompt as text has no chat template, which describes the tools; make it messages"
            )
        text = question.removeprefix(renderer.bos)
        return RenderedText(text, spans=(), is_plain=True, row=document.row)
    renderer = _for_conversation(renderer, question)
    messages = read_messages(question, renderer)
    group_hash = None
    if renderer.environments:
        row = json.loads(document.row)
        choose_environment(renderer.environments, row["columns"])  # raises where there is none
        tools = choose_tools(renderer, row)  # its own, or the environment's with the recipe's
    else:
        tools = question.tools or renderer.tools
    text = apply_template(renderer, messages, tools, add_generation_prompt=True)
    if renderer.environments:  # rows with the same prompt may begin different episodes
        group_hash = xxhash.xxh3_64_intdigest(f"{text}{document.row}".encode())
    findings = tuple(check_prompt(document, text, renderer.has_template))
    return RenderedText(
        text, spans=(), is_plain=False, findings=findings, group_hash=group_hash, row=document.row
    )


def _for_conversation(renderer: Renderer, conversation: Conversation) -> Renderer:
    """The renderer with the conversation's template variables, in the mode that images need."""
    if conversation.images:
        renderer = read_parts(renderer)
    return add_variables(renderer, conversation.variables)


def _render_steps(document: Steps, renderer: Renderer) -> RenderedText:
    """Renders a prompt and its steps, each followed by the separator, at whose end it is scored.

    The tokenizer encodes prompt, steps and separators separately, as in TRL's PRMTrainer.
    """
    text = document.prompt.removeprefix(renderer.bos)
    findings = _find_typed([text, *document.steps], renderer)
    fresh_starts = []
    separators = []
    for step in document.steps:
        step_start = len(text)
        step_end = step_start + len(step)
        text += step + document.separator
        fresh_starts += [step_start, step_end]
        separators.append((step_end, len(text)))
    return RenderedText(
        text,
        spans=tuple(separators),
        is_plain=True,
        findings=findings,
        step_labels=document.labels,
        fresh_starts=tuple(fresh_starts),
    )


def render_scored(document: Document, renderer: Renderer) -> RenderedText:
    """Renders a document whose last token is scored: a conversation as the template writes it,
    whoever speaks last.

    The tokenizer encodes it as one piece, as it does when the trained model scores a text.
    """
    if not isinstance(document, Conversation):
        return replace(render(document, renderer), spans=())
    renderer = _for_conversation(renderer, document)
    messages = read_messages(document, renderer)
    text = apply_template(renderer, messages, document.tools or renderer.tools)
    findings = check_prompt(Question(document, row=""), text, renderer.has_template)
    return RenderedText(text, (), False, tuple(findings))


def render_embedded(document: Text, renderer: Renderer) -> RenderedText:
    """Renders a text that is embedded: unchanged, between the tokens that the tokenizer itself
    adds.
    """
    return RenderedText(document.text + renderer.end, (), True)


def find_image_token(renderer: Renderer) -> str:
    """Returns the text that a chat template writes for an image.

    Raises `BadRow` or `UserError` where the model takes none.
    """
    if renderer.images is None:
        raise BadRow("image: this tokenizer is of no model that takes images")
    return renderer.images.token


def write_images(
    text: RenderedText, document: Document, images: Sequence[EncodedImage], renderer: Renderer
) -> RenderedText:
    """Replaces each image token of a text by what the model's processor writes for that image;
    neither is trained on.

    Args:
        text: Rendered from `document`, with one image token for each image.
        document: The conversation, or a prompt.
        images: Its images, in order.
        renderer: With the model's image processor.

    Raises:
        BadRow: An image cannot be opened, or the template writes another number of image tokens.
    """
    if not images:
        return text
    conversation = document.asked if isinstance(document, Question) else document
    assert isinstance(conversation, Conversation) and renderer.images is not None
    token = find_image_token(renderer)
    messages = conversation.messages
    last = max(text.turns, default=len(messages))
    # A text as asked ends with its last turn; another one has all messages.
    counts = []  # of images, in the one case and in the other
    for end in (last + 1, None):
        counts.append(sum(message["content"].count(IMAGE) for message in messages[:end]))
    written_places = text.text.count(token)
    typed = [word for word in renderer.images.reserved if word != token and word in text.text]
    if typed:
        raise BadRow(f"image: the text holds {typed[0]}, which stands for an image")
    if written_places not in counts:
        raise BadRow(
            f"image: the chat template writes {token} {written_places} times for {counts[0]} images"
        )
    images = images[:written_places]
    written = [renderer.images.expand(open_image(image).size) for image in images]
    expanded, spans = place_images(text.text, text.spans, written, token)
    identity = f"{text.group_hash}{hash_images(images)}{text.text}"
    # Its turns stand elsewhere now, and only `inspect --turns` shows them.
    return replace(
        text,
        text=expanded,
        spans=spans,
        turns={},
        images=tuple(images),
        group_hash=xxhash.xxh3_64_intdigest(identity.encode()),
    )


def _check_completion(document: Completion, renderer: Renderer) -> Iterator[str]:
    """Yields the findings about a prompt and its completion."""
    prompt = document.prompt
    completion = document.completion
    if renderer.special_tokens.search(prompt) or renderer.special_tokens.search(completion):
        yield "typed_special_token"
    if not renderer.eos:
        yield "no_end_of_turn"
    if prompt and completion and not prompt[-1].isspace() and not completion[0].isspace():
        yield "no_space_between"
    if renderer.has_template:
        yield "template_unused"


def _check_turns(
    conversation: Conversation,
    text: str,
    spans: tuple[Span, ...],
    turn_ends: Sequence[int],
    renderer: Renderer,
) -> Iterator[str]:
    """Yields the findings about a conversation's roles and calls, and at most one about how its
    turns end.

    Args:
        conversation: What the text was rendered from.
        text: The text.
        spans: What is trained on.
        turn_ends: Where the trained turns end; empty where that is not known.
        renderer: The renderer.
    """
    messages = conversation.messages
    if any(renderer.special_tokens.search(message["content"]) for message in messages):
        yield "typed_special_token"
    if messages[0]["role"] == "assistant":
        yield "begins_with_assistant"
    if not _describes_calls(conversation):
        yield "calls_without_tools"
    if not renderer.has_template:
        yield "plain_template"
    # of a turn with several spans the last
    trained = [
        text[start:end]
        for start, end in spans
        if not turn_ends or end in turn_ends or end == spans[-1][1]
    ]
    if not all(_ends_turn(turn, renderer) for turn in trained):
        yield "no_end_of_turn"
    elif spans and not renderer.special_tokens.search(renderer.end_of_turn):
        yield "end_of_turn_is_text"
    elif trained and not _stops(trained[-1], renderer):
        yield "stop_not_trained"


def _describes_calls(conversation: Conversation) -> bool:
    """Whether the name of every called tool stands in a schema or in a system message."""
    schemas = [json.dumps(tool, default=str) for tool in conversation.tools]
    described = schemas + [
        m["content"] for m in conversation.messages if m["role"] in ("system", "developer")
    ]
    calls = [
        call["function"]["name"]
        for message in conversation.messages
        for call in message.get("tool_calls", ())
    ]
    return all(any(name in text for text in described) for name in calls)


def _ends_turn(trained: str, renderer: Renderer) -> bool:
    """Whether a trained span ends with the template's end of turn, or with a special token."""
    if renderer.end_of_turn and trained.endswith(renderer.end_of_turn):
        return True
    ends = [match.end() for match in renderer.special_tokens.finditer(trained)]
    return bool(ends) and ends[-1] == len(trained.rstrip())


def _stops(trained: str, renderer: Renderer) -> bool:
    """Whether the last special token of a trained span, which has one, is one at which generation
    stops.
    """
    *_, last = renderer.special_tokens.finditer(trained)
    return renderer.up_to_stop.fullmatch(last[0]) is not None


def _find_dropped(
    conversation: Conversation, text: str, turns: Mapping[int, Span]
) -> Iterator[str]:
    """Yields a finding for each kind of content that the conversation has and its `text` lacks.

    Args:
        conversation: The conversation.
        text: What the chat template made of it.
        turns: Message index -> span of an assistant's turn in `text`; empty where the spans are not
            known.
    """
    messages = conversation.messages
    instructions = [m["content"].strip() for m in messages if m["role"] in ("system", "developer")]
    if not all(words in text for words in instructions):
        yield "system_dropped"
    questions = [_take_last_line(m["content"]) for m in messages if m["role"] == "user"]
    if not all(words in text for words in questions):
        yield "user_dropped"
    # Message index -> text of an assistant's turn; the whole text where its span is not known.
    answers = {
        i: text[slice(*turns[i])] if i in turns else text
        for i, message in enumerate(messages)
        if message["role"] == "assistant"
    }
    yield from _find_dropped_answers(conversation, text, answers)
    yield from _find_dropped_calls(conversation, text, turns, answers)
    trained = [i for i in answers if conversation.trained[i]]
    if not all(_holds_reasoning(answers[i], messages[i]) for i in trained):
        yield "reasoning_dropped"


def _find_dropped_calls(
    conversation: Conversation, text: str, turns: Mapping[int, Span], answers: Mapping[int, str]
) -> Iterator[str]:
    """Yields a finding for tool calls that trained turns lack, and one for calls of other turns,
    schemas of tools and their results.
    """
    incomplete = [
        i for i, answer in answers.items() if not _holds_calls(answer, conversation.messages[i])
    ]
    trained = [i for i in incomplete if conversation.trained[i]]
    if trained:
        yield "tool_calls_dropped"
    if len(trained) < len(incomplete) or not _holds_tools(conversation, text, turns):
        yield "tools_dropped"


def _find_dropped_answers(
    conversation: Conversation, text: str, answers: Mapping[int, str]
) -> Iterator[str]:
    """Yields findings for trained answers whose words stand nowhere in the text, or that are empty.

    `answers`: message index -> text of an assistant's turn, of at least one.
    """
    messages = [conversation.messages[i] for i in answers if conversation.trained[i]]
    # Templates may rewrite the content of earlier turns, so only the last one is compared, and
    # those with tool calls.
    last = conversation.messages[max(answers)]
    compared = (message for message in messages if message is last or message.get("tool_calls"))
    if any(words not in text for message in compared for words in _list_words(message["content"])):
        yield "assistant_dropped"
    if any(_says_nothing(message) for message in messages):
        yield "empty_answer"


def _says_nothing(message: Message) -> bool:
    """Whether an assistant's message has neither words, nor calls, nor reasoning."""
    return not (message["content"].strip() or message.get("tool_calls") or read_reasoning(message))


def _holds_reasoning(answer: str, message: Message) -> bool:
    """Whether the last line of each of a message's thoughts stands in the assistant's turn."""
    thoughts = {read_reasoning(message), *THOUGHT.split(message["content"])[1::2]}
    return all(_holds(answer, thought.strip().rpartition("\n")[2].strip()) for thought in thoughts)


def _list_words(content: str) -> Iterator[str]:
    """Returns what every template writes as it is, of the words around thoughts: how their last
    lines end.

    A template may trim a content, move its reasoning elsewhere, and write its images in its own
    way.
    """
    return map(_take_last_line, THOUGHT.split(content)[::2])


def _take_last_line(content: str) -> str:
    """Returns how the last line of a content ends, without its reasoning and images."""
    answer = THINKING_END.split(content)[-1].strip()
    last_line = answer.rpartition("\n")[2]
    return last_line.rpartition(IMAGE)[2].strip()


def _holds_calls(answer: str, message: Message) -> bool:
    """Whether the names of a message's calls and of their arguments stand in the assistant's
    turn.
    """
    for call in message.get("tool_calls", ()):
        function = call["function"]
        if not all(
            _has_name(answer, str(name))
            for name in (function["name"], *function.get("arguments", ()))
        ):
            return False
    return True


def _holds_tools(conversation: Conversation, text: str, turns: Mapping[int, Span]) -> bool:
    """Whether the names of the tools, and their results, stand outside the assistant's turns."""
    outside = ""
    position = 0
    for start, end in turns.values():
        outside = outside + text[position:start]
        position = end
    outside += text[position:]
    schemas = [tool.get("function", tool) for tool in conversation.tools]
    wanted = [
        str(schema["name"]) for schema in schemas if isinstance(schema, dict) and "name" in schema
    ]
    wanted += [_take_last_line(m["content"]) for m in conversation.messages if m["role"] == "tool"]
    return all(_holds(outside, words) for words in wanted)


def _holds(text: str, words: str) -> bool:
    """Whether the text holds the words, as they are or as JSON writes them."""
    return any(form in text for form in _list_forms(words))


def _has_name(text: str, name: str) -> bool:
    """Whether the text holds the name, and not as a part of another one."""
    forms = map(re.escape, _list_forms(name))
    return any(re.search(rf"(?<!\w){form}(?!\w)", text) for form in forms)


def _list_forms(words: str) -> Iterator[str]:
    """Yields the words as they are, and as JSON writes them."""
    yield words
    for escape in (False, True):
        yield json.dumps(words, ensure_ascii=escape)[1:-1]
