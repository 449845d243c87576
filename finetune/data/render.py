"""Renders documents as text with the spans that are trained on, and checks the result.

A conversation is rendered in one of three ways. The text is the same in all of them if the template
writes each turn alike, whatever follows the turn:

- by layout: rendered once, if it is known what the template writes around messages of these roles;
- as asked: rendered up to a trained turn, behind exactly the prompt that inference gives;
- whole: as the template writes the complete conversation, even if inference would see a turn in
  another form.

`render_turns` may make several texts of a conversation, `render` always makes one.
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
from finetune.data.images import EncodedImage, cut_out, hash_images, open_image, place_images
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

# the findings whose detail is `RenderedText.difference`
COMPARED = ("unlike_inference", "prompt_not_continued", "not_read_back", "no_reasoning")


@dataclass(frozen=True, slots=True)
class RenderedText:
    """A document as the tokenizer reads it. Returned by `render`."""

    text: str
    spans: tuple[Span, ...]  # what is trained on
    # True: the tokenizer's BOS is put before the text; False: it is not, as after a chat template,
    # which writes its own
    is_plain: bool
    findings: tuple[str, ...] = ()  # names in the table of data/findings.py
    # xxh3 of what makes the document a duplicate; None: its text alone does
    group_hash: int | None = None
    # what the score of the last token should be; None: that token is not scored
    label: int | None = None
    step_labels: tuple[int, ...] = ()  # the label of each of `spans`, if these are scored steps
    # which hidden states make the embedding; None: the document is not embedded
    pooling: Pooling | None = None
    rating: int = 0  # of its group: 1 for a good answer, -1 for a bad one, 0 if it is not rated
    tokens: TokenRow | None = None  # in place of a text, if the row has ids
    # message index -> span of the turn, for each trained answer
    turns: Mapping[int, Span] = field(default_factory=dict)
    # the detail of a finding of COMPARED, such as the first token that inference sees differently
    difference: str = ""
    images: tuple[EncodedImage, ...] = ()
    row: str = ""  # for a prompt: what rewards read of its row, as JSON
    # positions from which the text is encoded as if nothing stood before them: of steps and their
    # separators, or (answers_apart) of answers
    fresh_starts: tuple[int, ...] = ()


def render_turns(document: Document, renderer: Renderer) -> tuple[RenderedText, ...]:
    """Renders a document as one or several texts, as `renderer.turns` says.

    Under `auto` and `split` every trained turn follows exactly the prompt that inference gives: the
    template applied to the conversation so far, with the generation prompt. `split` makes one text
    for each trained turn. `auto` makes as few texts as possible: a single one if the template
    writes each turn alike, whatever follows it.

    Raises `BadRow` if the document cannot be rendered.
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
    """Makes a conversation of a prompt and its completion, which is trained on."""
    messages = (
        make_message("user", document.prompt),
        make_message("assistant", document.completion),
    )
    return Conversation(messages, (False, True))


def _render_trained_turns(document: Conversation, renderer: Renderer) -> tuple[RenderedText, ...]:
    """Renders a conversation whose assistant turns are trained on, as `renderer.turns` says.

    It is rendered by layout if that gives the same result. Otherwise it is rendered whole, or as
    asked in as few texts as possible. A layout does not know what markers enclose of a prompt,
    which `turns: whole` trains on.

    Raises `BadRow` if the conversation cannot be rendered.
    """
    renderer = add_variables(renderer, document.variables)
    if renderer.turns == "last":
        trained = [i for i, is_trained in enumerate(document.trained) if is_trained]
        document = _keep_turns(document, trained[-1:])
    wants_whole = renderer.turns == "whole"
    if renderer.turns != "split" and not (wants_whole and renderer.has_markers):
        by_layout = _render_by_layout(document, renderer)
        if by_layout is not None and (wants_whole or not _cuts_earlier(by_layout, renderer)):
            return (by_layout,)
    asked = ask_turns(document, renderer)
    # A turn is missing if the template's {% generation %} markers enclose nothing of it.
    is_any_missing = len(asked) < sum(document.trained)
    if wants_whole or is_any_missing or not asked:
        return (_render_whole(document, asked, renderer),)
    return _render_apart(document, asked, renderer)


def _render_answers_apart(document: Document, renderer: Renderer) -> tuple[RenderedText, ...]:
    """Renders a document for `answers_apart`: the tokenizer encodes prompt and answers separately.

    It adds `fresh_starts`: the start of each trained answer, and the end of a BOS at the beginning.

    Raises `BadRow` for a document with images, and if the document cannot be rendered.
    """
    if getattr(document, "images", ()):
        raise BadRow(
            "answers_apart: a text with images is encoded as one; remove the key from this entry "
            "of datasets"
        )
    # A conversation that is trained on as a whole is rendered as one text.
    turns: Turns = renderer.turns if renderer.assistant_only else "whole"
    # Rendering finds the starts of answers only with `assistant_only`. If that is off in the
    # recipe, the spans that this gives are replaced below.
    answer_renderer = replace(renderer, answers_apart=False, assistant_only=True, turns=turns)
    texts: list[RenderedText] = []
    for rendered in render_turns(document, answer_renderer):
        answer_spans = rendered.turns.values() or rendered.spans  # a completion has no turns
        starts = [start for start, _ in answer_spans]
        if renderer.bos and rendered.text.startswith(renderer.bos):
            starts = [len(renderer.bos), *starts]
        spans = rendered.spans
        # Plain here is a completion: it has no template. Its prompt is never trained on, so its
        # spans are right.
        if not renderer.assistant_only and not rendered.is_plain:
            spans = ((0, len(rendered.text)),)
        texts.append(replace(rendered, spans=spans, fresh_starts=tuple(starts)))
    return tuple(texts)


def _render_apart(
    conversation: Conversation, asked: Mapping[int, AskedTurn], renderer: Renderer
) -> tuple[RenderedText, ...]:
    """Renders the fewest texts in which each trained turn is written as inference has it.

    The texts are made from the last turn backwards. Each ends with a trained turn, and also trains
    on every earlier turn that it writes as inference has it. Under `turns: split` there is one text
    for each turn.

    Args:
        conversation: The conversation.
        asked: Message index -> trained turn as inference has it.
        renderer: The renderer.

    Returns:
        The texts in the order of the conversation.
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
    """Whether the text of a longer conversation has a turn in the same tokens as inference."""
    return turn.is_in(text) and not _cuts_token(text, (turn.start, turn.end), renderer)


def _cuts_earlier(rendered: RenderedText, renderer: Renderer) -> bool:
    """Whether a border of a trained span, except the last span, would cut a token of the text.

    The last span may cut one, because inference also encodes its prompt and its answer as two
    pieces.
    """
    return any(_cuts_token(rendered.text, span, renderer) for span in rendered.spans[:-1])


def _cuts_token(text: str, span: Span, renderer: Renderer) -> bool:
    """Whether a border of a trained span would cut a token of `text`, encoded as one piece.

    In later turns inference encodes the span's turn as a part of one piece.
    """
    special = renderer.special_tokens
    for border in span:
        # Only the text around the border is encoded, up to the nearest special tokens: no other
        # token crosses these.
        context_begin = max(border - CONTEXT_CHARACTERS, 0)
        special_ends = (match.end() for match in special.finditer(text, context_begin, border))
        begin = max(special_ends, default=context_begin)
        context_end = min(border + CONTEXT_CHARACTERS, len(text))
        following = special.search(text, border, context_end)
        end = following.start() if following else context_end
        is_inside = begin < border < end
        if is_inside and not keeps_border(renderer.backend, text[begin:border], text[border:end]):
            return True
    return False


def _keep_turns(conversation: Conversation, turns: Iterable[int]) -> Conversation:
    """Returns a copy of the conversation up to the last of `turns`, trained on these alone.

    `turns`: indexes of messages. Without any the conversation is returned unchanged.
    """
    trained_indexes = set(turns)
    if not trained_indexes:
        return conversation
    trained = tuple(i in trained_indexes for i in range(max(trained_indexes) + 1))
    return replace(conversation, messages=conversation.messages[: len(trained)], trained=trained)


def _render_by_layout(conversation: Conversation, renderer: Renderer) -> RenderedText | None:
    """Renders the whole conversation once, and finds its turns by the template's layout.

    Returns None unless the layout proves that each turn is written as inference has it. `ask_turns`
    would find the same turns, but needs a rendering for each of them.
    """
    text = apply_template(renderer, read_messages(conversation, renderer), conversation.tools)
    turns = match_layout(text, conversation, renderer)
    if turns is None:
        return None
    # The layout gives exactly this text, so the place of every message is known without marks.
    return _check(conversation, text, {i: (span,) for i, span in turns.items()}, (), renderer)


def _render_whole(
    conversation: Conversation, asked: Mapping[int, AskedTurn], renderer: Renderer
) -> RenderedText:
    """Renders the whole conversation as the template writes it.

    Inference may see turns in another form; this becomes a finding.
    """
    text, turns = find_turns(conversation, asked, renderer)
    return _check_traced(conversation, text, turns, asked, renderer)


def _render_asked(
    conversation: Conversation, asked: Mapping[int, AskedTurn], renderer: Renderer
) -> RenderedText:
    """Renders a conversation as inference has its last turn.

    The conversation ends with the last turn of `asked`, and the text of that turn has all other
    turns of `asked` as inference has them.
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
    """Makes a `RenderedText` of a text and its turns, with all findings about them.

    With `assistant_only`, marks trace which message each part of the text comes from, and the spans
    are checked against that.

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
    """Makes a `RenderedText` of a text and its turns, with findings about the text alone.

    Reasoning is taken out of the trained spans if the recipe does not train on it.

    Args:
        conversation: What the text was rendered from.
        text: The text.
        turns: Message index -> spans of an assistant's turn. It has each trained turn and may have
            others. The spans are empty if the template leaves the turn out.
        marks: Which characters came from which message; empty if this was not traced.
        renderer: The renderer.
    """
    messages = conversation.messages
    # message index -> from the start of the turn's first span to the end of its last one
    extents = {i: (spans[0][0], spans[-1][1]) for i, spans in sorted(turns.items()) if spans}
    trained = {i: extent for i, extent in extents.items() if conversation.trained[i]}
    if renderer.assistant_only:
        trained_spans = tuple(sorted(span for i in trained for span in turns[i]))
        turn_ends = [end for _, end in trained.values()]
    else:
        trained_spans = ((0, len(text)),)
        turn_ends = []
    findings = [
        *_check_turns(conversation, text, trained_spans, turn_ends, renderer),
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
            reasoning = _find_reasoning(text, messages[i], i, turn, marks)
            if reasoning is not None:
                trained_spans = cut_out(trained_spans, reasoning)
    return RenderedText(
        text,
        trained_spans,
        is_plain=False,
        findings=tuple(findings),
        turns=trained,
        difference=difference,
    )


def _lacks_reasoning(conversation: Conversation, renderer: Renderer) -> bool:
    """Whether no trained answer has reasoning, although the template writes reasoning.

    Returns False for a template that writes none, or whose generation prompt closes it.
    """
    if renderer.unthinking is None:
        return False
    return not any(map(read_reasoning, conversation.answers))


def _find_reasoning(text: str, message: Message, i: int, turn: Span, marks: Marks) -> Span | None:
    """Finds the span of a message's reasoning in `text`, with the white space behind it.

    Args:
        text: The text.
        message: The assistant's message.
        i: The index of the message.
        turn: The span of the message's turn in `text`.
        marks: Which characters came from which message; empty if this was not traced.

    Returns:
        None if the turn has no reasoning.
    """
    turn_start, turn_end = turn
    own_marks = [mark for mark in marks if mark.message == i]
    # a mark stands before the reasoning, and one behind it
    positions = [mark.position for mark in own_marks if mark.part in REASONING_KEYS]
    words = read_reasoning(message)
    end_tag = THINKING_END.search(text, turn_start, turn_end)
    if positions:
        start = positions[0]
        end = positions[-1]
    elif own_marks and any(key in message for key in REASONING_KEYS):
        return None  # the template leaves the reasoning out
    elif words and end_tag:  # the reasoning is in the content, between tags
        # The prompt, not the turn, may have the opening tag.
        start_tag = THINKING_START.search(text, turn_start, end_tag.start())
        start = text.find(words, start_tag.end() if start_tag else turn_start, turn_end)
        end = start + len(words)
    else:
        return None
    if start < 0:
        return None
    after = text[end:turn_end]
    white_space = len(after) - len(after.lstrip())
    return (start, end + white_space)


def _compare_with_asked(
    rendered: RenderedText,
    conversation: Conversation,
    asked: Mapping[int, AskedTurn],
    renderer: Renderer,
) -> RenderedText:
    """Adds a finding, with its detail, if inference would see or read a turn differently.

    It is about the first such turn. Only if there is none, turns are read back by the tokenizer's
    response template, if it has one.
    """
    for i, turn in sorted(asked.items()):
        if not turn.continues_prompt:
            expected = turn.prompt
            finding = "prompt_not_continued"
        elif not turn.is_in(rendered.text):
            expected = turn.text[: turn.end]
            finding = "unlike_inference"
        else:
            continue
        trained, inferred = _show_difference(rendered.text, expected, renderer)
        difference = f"message {i + 1} is trained with {trained!r} where inference has {inferred!r}"
        # the new finding says more than no_reasoning
        other_findings = [name for name in rendered.findings if name != "no_reasoning"]
        return replace(rendered, findings=(*other_findings, finding), difference=difference)
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
    """Reads a turn back by the tokenizer's response_template, and compares it with its message.

    Returns how the two differ; "" if they do not.
    """
    reply = turn.text[len(turn.prompt) : turn.end]
    try:
        read = parse_response(
            reply, renderer.response_template, prefix=turn.prompt, tools=list(tools)
        )
    except Exception as error:  # the template comes with the model, and may raise anything
        return f"response_template cannot read {reply!r}: {error}"
    if any(key in message for key in REASONING_KEYS):
        content = message["content"]
    else:  # the content may begin with the reasoning
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
    """Returns (name, arguments) of each call in a message, with every argument as text.

    Text can be compared with what is read from a format without types, such as XML.
    """
    calls = []
    for call in message.get("tool_calls") or ():
        function = call.get("function", call)
        arguments = dict(parse_if_json(function.get("arguments")) or {})
        calls.append(
            (function.get("name", ""), {name: _as_text(value) for name, value in arguments.items()})
        )
    return calls


def _as_text(value: Any) -> str:
    """Returns a text unchanged, any other value as JSON."""
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False)


def _show_difference(text: str, expected: str, renderer: Renderer) -> tuple[str, str]:
    """Returns (first token of `text` that differs from `expected`, token of `expected` there)."""
    encoded_text = renderer.backend.encode(text, add_special_tokens=False)
    encoded_expected = renderer.backend.encode(expected, add_special_tokens=False)
    id_pairs = enumerate(zip_longest(encoded_text.ids, encoded_expected.ids))
    first = next((i for i, (text_id, expected_id) in id_pairs if text_id != expected_id), 0)
    return _cut_token(text, encoded_text, first), _cut_token(expected, encoded_expected, first)


def _cut_token(text: str, encoded: Any, number: int) -> str:
    """Returns the characters of token `number` of an encoded text; "" if it has fewer tokens."""
    if number >= len(encoded.ids):
        return ""
    start, end = encoded.offsets[number]
    return text[start:end]


def render(document: Document, renderer: Renderer) -> RenderedText:
    """Renders a document as one text, with the spans that are trained on.

    Raises `BadRow` if the document cannot be rendered.
    """
    match document:
        case Text(text):
            # The tokenizer adds its own BOS, and EOS is added here: typed ones would be a second.
            text = text.removeprefix(renderer.bos).removesuffix(renderer.eos)
            findings = _find_typed([text], renderer)
            text += renderer.eos
            return RenderedText(text, spans=((0, len(text)),), is_plain=True, findings=findings)
        case Candidate(text):
            # A typed BOS stays, as when a reranker scores the text, and becomes a finding.
            findings = _find_typed([text], renderer)
            text = renderer.bos + text + renderer.eos
            return RenderedText(text, spans=(), is_plain=False, findings=findings)
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
            return RenderedText("", spans=(), is_plain=False, group_hash=identity, tokens=document)
        case Question():
            return _render_question(document, renderer)
        case Completion(prompt, completion, _):
            prompt = prompt.removeprefix(renderer.bos)
            completion = completion.removesuffix(renderer.eos)
            text = prompt + completion + renderer.eos
            findings = tuple(_check_completion(prompt, completion, renderer))
            spans = ((len(prompt), len(text)),)
            return RenderedText(text, spans=spans, is_plain=True, findings=findings)
        case Conversation():
            return _render_as_one(document, _for_conversation(renderer, document))


def _render_as_one(document: Conversation, renderer: Renderer) -> RenderedText:
    """Renders a conversation as one text.

    It is rendered by layout if possible. Otherwise it is rendered as asked if the last message is
    trained on and its text has all other trained turns as inference has them; else whole.
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
    """Returns the finding about texts with a typed special token; empty if no text has one."""
    is_typed = any(map(renderer.special_tokens.search, texts))
    return ("typed_special_token",) if is_typed else ()


def _render_question(document: Question, renderer: Renderer) -> RenderedText:
    """Renders a prompt, which ends where the assistant's answer begins. Nothing is trained on.

    Raises `BadRow` if the prompt is text and there are tools to describe, if the row names no known
    environment, or if the chat template rejects the prompt.
    """
    prompt = document.asked
    if isinstance(prompt, str):
        if renderer.tools or renderer.environments:
            raise BadRow(
                "a prompt as text has no chat template, which describes the tools; make it messages"
            )
        text = prompt.removeprefix(renderer.bos)
        return RenderedText(
            text,
            spans=(),
            is_plain=True,
            findings=("template_unused",) if renderer.has_template else (),
            row=document.row,
        )
    renderer = _for_conversation(renderer, prompt)
    messages = read_messages(prompt, renderer)
    group_hash = None
    if renderer.environments:
        row = json.loads(document.row)
        choose_environment(renderer.environments, row["columns"])  # only for its error
        tools = choose_tools(renderer, row)  # the row's, or the environment's and the recipe's
    else:
        tools = prompt.tools or renderer.tools
    text = apply_template(renderer, messages, tools, add_generation_prompt=True)
    if renderer.environments:  # rows with the same prompt may begin different episodes
        group_hash = xxhash.xxh3_64_intdigest(f"{text}{document.row}".encode())
    findings = _check_prompt(messages, text, renderer)
    return RenderedText(
        text, spans=(), is_plain=False, findings=findings, group_hash=group_hash, row=document.row
    )


def _check_prompt(messages: Sequence[Message], text: str, renderer: Renderer) -> tuple[str, ...]:
    """Returns the findings about `text`, which the template wrote for messages without spans."""
    findings = tuple(_find_dropped_questions(messages, text))
    return findings if renderer.has_template else ("plain_template", *findings)


def _for_conversation(renderer: Renderer, conversation: Conversation) -> Renderer:
    """Returns the renderer with a conversation's template variables.

    If the conversation has images, the renderer gives the template each content as a list of parts.
    """
    if conversation.images:
        renderer = read_parts(renderer)
    return add_variables(renderer, conversation.variables)


def _render_steps(document: Steps, renderer: Renderer) -> RenderedText:
    """Renders a prompt and its steps, with a separator behind each step.

    The spans are the separators, because a step is scored at the end of its separator. The
    tokenizer encodes prompt, steps and separators separately, as in TRL's PRMTrainer.
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
    """Renders a document whose last token is scored.

    A conversation may end with a message of any role. There are no spans, so the tokenizer encodes
    the text as one piece, as it does when the trained model scores a text.
    """
    if not isinstance(document, Conversation):
        return replace(render(document, renderer), spans=())
    renderer = _for_conversation(renderer, document)
    messages = read_messages(document, renderer)
    text = apply_template(renderer, messages, document.tools or renderer.tools)
    findings = _check_prompt(messages, text, renderer)
    return RenderedText(text, spans=(), is_plain=False, findings=findings)


def render_embedded(document: Text, renderer: Renderer) -> RenderedText:
    """Renders a text that is embedded: unchanged, with what the tokenizer itself writes behind it.

    What the tokenizer writes before a text is added when the text is encoded.
    """
    return RenderedText(document.text + renderer.end, spans=(), is_plain=True)


def find_image_token(renderer: Renderer) -> str:
    """Returns the text that a chat template writes for an image.

    Raises `BadRow` or `UserError` if the model takes no images.
    """
    if renderer.images is None:
        raise BadRow("image: this tokenizer is of no model that takes images")
    return renderer.images.token


def _count_images_of_text(text: RenderedText, messages: Sequence[Message]) -> tuple[int, int]:
    """Counts the images that a text may have: those up to its last turn, and those of all messages.

    A text that was rendered as it is asked ends with its last turn. Any other has all messages.
    """
    counts = [message["content"].count(IMAGE) for message in messages]
    if not text.turns:
        return sum(counts), sum(counts)
    last_turn = max(text.turns)  # `turns` has the spans of a text's turns by their indexes
    return sum(counts[: last_turn + 1]), sum(counts)


def write_images(
    text: RenderedText, document: Document, images: Sequence[EncodedImage], renderer: Renderer
) -> RenderedText:
    """Replaces each image token of a text by what the model's processor writes for the image.

    What it writes is not trained on. A document without images is returned unchanged.

    Args:
        text: Rendered from `document`, with one image token for each image.
        document: A conversation, or a prompt that is one.
        images: The document's images, in order.
        renderer: The renderer, which has the model's image processor.

    Raises:
        BadRow: An image cannot be opened, or the template writes another number of image tokens.
    """
    if not images:
        return text
    conversation = document.asked if isinstance(document, Question) else document
    assert isinstance(conversation, Conversation) and renderer.images is not None
    token = find_image_token(renderer)
    processor = renderer.images
    counts = _count_images_of_text(text, conversation.messages)
    written_places = text.text.count(token)
    typed = [word for word in processor.reserved if word != token and word in text.text]
    if typed:
        raise BadRow(f"image: the text holds {min(typed)}, which stands for an image")
    if written_places not in counts:
        raise BadRow(
            f"image: the chat template writes {token} {written_places} times for {counts[0]} images"
        )
    images = images[:written_places]
    written = [processor.expand(open_image(image).size) for image in images]
    expanded, spans = place_images(text.text, text.spans, written, token)
    identity = f"{text.group_hash}{hash_images(images)}{text.text}"
    # The turns have other positions now. They are dropped, because only `inspect --turns` reads
    # them.
    return replace(
        text,
        text=expanded,
        spans=spans,
        turns={},
        images=tuple(images),
        group_hash=xxhash.xxh3_64_intdigest(identity.encode()),
    )


def _check_completion(prompt: str, completion: str, renderer: Renderer) -> Iterator[str]:
    """Yields the findings about a prompt and its completion, without typed BOS and EOS tokens."""
    yield from _find_typed([prompt, completion], renderer)
    if not renderer.eos:
        yield "no_end_of_turn"
    if not completion.strip():
        yield "empty_answer"
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
    """Yields the findings about a conversation's roles and calls, and about how its turns end.

    There is at most one about how turns end.

    Args:
        conversation: What the text was rendered from.
        text: The text.
        spans: The spans that are trained on.
        turn_ends: The ends of the trained turns; empty if they are not known.
        renderer: The renderer.
    """
    messages = conversation.messages
    yield from _find_typed((message["content"] for message in messages), renderer)
    if messages[0]["role"] == "assistant":
        yield "begins_with_assistant"
    if not _describes_calls(conversation):
        yield "calls_without_tools"
    if not renderer.has_template:
        yield "plain_template"
    # A turn may have several spans, of which only the last one has to end the turn.
    last_spans = [
        text[start:end]
        for start, end in spans
        if not turn_ends or end in turn_ends or end == spans[-1][1]
    ]
    if not all(_ends_with_turn_or_special_token(span_text, renderer) for span_text in last_spans):
        yield "no_end_of_turn"
    elif spans and not renderer.special_tokens.search(renderer.end_of_turn):
        yield "end_of_turn_is_text"
    elif last_spans and not _stops_at_last_token(last_spans[-1], renderer):
        yield "stop_not_trained"


def _describes_calls(conversation: Conversation) -> bool:
    """Whether the name of every called tool occurs in a tool's schema or in a system message."""
    descriptions = [json.dumps(tool, default=str) for tool in conversation.tools]
    descriptions += [
        message["content"]
        for message in conversation.messages
        if message["role"] in ("system", "developer")
    ]
    called_names = [
        call["function"]["name"]
        for message in conversation.messages
        for call in message.get("tool_calls", ())
    ]
    return all(any(name in text for text in descriptions) for name in called_names)


def _ends_with_turn_or_special_token(trained: str, renderer: Renderer) -> bool:
    """Whether a trained span ends with the template's end of turn, or with a special token."""
    if renderer.end_of_turn and trained.endswith(renderer.end_of_turn):
        return True
    ends = [match.end() for match in renderer.special_tokens.finditer(trained)]
    return bool(ends) and ends[-1] == len(trained.rstrip())


def _stops_at_last_token(trained: str, renderer: Renderer) -> bool:
    """Whether generation stops at the last special token of a trained span, which must have one."""
    *_, last_match = renderer.special_tokens.finditer(trained)
    return renderer.up_to_stop.fullmatch(last_match.group()) is not None


def _find_dropped(
    conversation: Conversation, text: str, turns: Mapping[int, Span]
) -> Iterator[str]:
    """Yields a finding for each kind of content that a conversation has and its `text` lacks.

    Args:
        conversation: The conversation.
        text: What the chat template made of the conversation.
        turns: Message index -> span of an assistant's turn in `text`, as far as it is known.
    """
    messages = conversation.messages
    yield from _find_dropped_questions(messages, text)
    # Message index -> text of an assistant's turn; the whole text if its span is not known.
    answers = {}
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            start, end = turns.get(i, (0, len(text)))
            answers[i] = text[start:end]
    yield from _find_dropped_answers(conversation, text, answers)
    yield from _find_dropped_calls(conversation, text, turns, answers)
    trained = [i for i in answers if conversation.trained[i]]
    if not all(_holds_reasoning(answers[i], messages[i]) for i in trained):
        yield "reasoning_dropped"
    if any(_thinks_twice(answers[i], messages[i]) for i in trained):
        yield "reasoning_twice"


def _find_dropped_questions(messages: Sequence[Message], text: str) -> Iterator[str]:
    """Yields a finding for instructions, and one for users' messages, that the text lacks."""
    instructions = [m["content"].strip() for m in messages if m["role"] in ("system", "developer")]
    if not all(words in text for words in instructions):
        yield "system_dropped"
    questions = [_take_last_line(m["content"]) for m in messages if m["role"] == "user"]
    if not all(words in text for words in questions):
        yield "user_dropped"


def _find_dropped_calls(
    conversation: Conversation, text: str, turns: Mapping[int, Span], answers: Mapping[int, str]
) -> Iterator[str]:
    """Yields findings about tool calls, schemas of tools and results that the text lacks.

    One is for calls that trained turns lack, the other for everything else.

    Args:
        conversation: The conversation.
        text: What the chat template made of the conversation.
        turns: Message index -> span of an assistant's turn in `text`, as far as it is known.
        answers: Message index -> text of an assistant's turn.
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
    """Yields findings for trained answers whose words are not in the text, or that are empty.

    `answers`: message index -> text of an assistant's turn; there must be at least one.
    """
    trained = conversation.answers
    # Templates may rewrite the content of earlier turns. So only the last turn is compared, and
    # turns with tool calls.
    last = conversation.messages[max(answers)]
    compared = (message for message in trained if message is last or message.get("tool_calls"))
    if any(words not in text for message in compared for words in _list_words(message["content"])):
        yield "assistant_dropped"
    if any(_says_nothing(message) for message in trained):
        yield "empty_answer"


def _says_nothing(message: Message) -> bool:
    """Whether an assistant's message has neither words, nor calls, nor reasoning."""
    return not (message["content"].strip() or message.get("tool_calls") or read_reasoning(message))


def _holds_reasoning(answer: str, message: Message) -> bool:
    """Whether the assistant's turn `answer` has the last line of each of a message's thoughts."""
    _, thoughts_in_content = _split_thoughts(message["content"])
    thoughts = {read_reasoning(message), *thoughts_in_content}
    last_lines = (thought.strip().rsplit("\n", 1)[-1].strip() for thought in thoughts)
    return all(_holds(answer, line) for line in last_lines)


def _thinks_twice(answer: str, message: Message) -> bool:
    """Whether the assistant's turn `answer` has the reasoning of a message's key, and of its
    content too.

    The key's reasoning may stand between other signs than the content's, as in gpt-oss.
    """
    content = message["content"]
    _, thoughts_in_content = _split_thoughts(content)
    reasoning = str(next(filter(None, map(message.get, REASONING_KEYS)), "")).strip()
    if not reasoning or not thoughts_in_content:
        return False
    if len(THINKING_END.findall(answer)) > len(thoughts_in_content):
        return True
    keeps_content = all(thought.strip() in answer for thought in thoughts_in_content)
    return keeps_content and answer.count(reasoning) > content.count(reasoning)


def _split_thoughts(content: str) -> tuple[list[str], list[str]]:
    """Splits a content into (the words around its thoughts, the thoughts between their tags)."""
    # THOUGHT has one group, so that words and thoughts alternate.
    pieces = THOUGHT.split(content)
    return pieces[::2], pieces[1::2]


def _list_words(content: str) -> Iterator[str]:
    """Returns the words of a content that every template writes unchanged.

    They are the ends of the last lines before, between and behind its thoughts. A template may trim
    a content, move its reasoning elsewhere, and write its images in its own way.
    """
    words_around, _ = _split_thoughts(content)
    return map(_take_last_line, words_around)


def _take_last_line(content: str) -> str:
    """Returns the end of a content's last line, behind its reasoning and its last image."""
    answer = THINKING_END.split(content)[-1].strip()
    _, _, last_line = answer.rpartition("\n")
    _, _, behind_images = last_line.rpartition(IMAGE)
    return behind_images.strip()


def _holds_calls(answer: str, message: Message) -> bool:
    """Whether the assistant's turn `answer` has the names of a message's calls and arguments."""
    for call in message.get("tool_calls", ()):
        function = call["function"]
        if not all(
            _has_name(answer, str(name))
            for name in (function["name"], *function.get("arguments", ()))
        ):
            return False
    return True


def _holds_tools(conversation: Conversation, text: str, turns: Mapping[int, Span]) -> bool:
    """Whether the text outside the assistant's `turns` has the tools' names and their results."""
    outside = ""
    position = 0
    for start, end in turns.values():
        outside += text[position:start]
        position = end
    outside += text[position:]
    schemas = [tool.get("function", tool) for tool in conversation.tools]
    expected = [
        str(schema["name"]) for schema in schemas if isinstance(schema, dict) and "name" in schema
    ]
    expected += [
        _take_last_line(message["content"])
        for message in conversation.messages
        if message["role"] == "tool"
    ]
    return all(_holds(outside, words) for words in expected)


def _holds(text: str, words: str) -> bool:
    """Whether a text contains words, either unchanged or as JSON writes them."""
    return any(form in text for form in _list_forms(words))


def _has_name(text: str, name: str) -> bool:
    """Whether a text contains a name that is not a part of a longer word."""
    forms = map(re.escape, _list_forms(name))
    return any(re.search(rf"(?<!\w){form}(?!\w)", text) for form in forms)


def _list_forms(words: str) -> Iterator[str]:
    """Yields words unchanged, as JSON writes them, and as JSON writes them in ASCII."""
    yield words
    for ascii_only in (False, True):
        quoted = json.dumps(words, ensure_ascii=ascii_only)
        yield quoted[1:-1]  # without its quotation marks
