"""Documents as text with the spans that are trained on, and checks of what the chat template made
of them.
"""

import json
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
    BadRow,
    Message,
    parse_json,
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
    CONTEXT,
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
    "wrong_mask",
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
    """The texts in which the turns of a document are trained on, as `renderer.turns` asks.

    Raises `BadRow`.

    Every trained turn stands after exactly what inference gives when it is asked for: the template,
    applied to the conversation so far, with the generation prompt. `auto` writes as few texts as
    have this property: one for a template that writes a turn alike whatever follows it.
    """
    if renderer.answers_apart and isinstance(document, Completion | Conversation):
        return _render_answers_apart(document, renderer)
    if isinstance(document, Completion) and document.are_turns and renderer.has_template:
        turns = (
            make_message("user", document.prompt),
            make_message("assistant", document.completion),
        )
        document = Conversation(turns, (False, True))
    if isinstance(document, Conversation) and document.images:
        renderer = read_parts(renderer)
    if not isinstance(document, Conversation) or not renderer.assistant_only:
        return (render(document, renderer),)
    renderer = add_variables(renderer, document.variables)
    document = replace(document, variables={})
    if renderer.turns == "last":
        trained = [i for i, is_trained in enumerate(document.trained) if is_trained]
        document = _keep_turns(document, trained[-1:])
    if renderer.turns != "split":
        laid_out = _render_laid_out(document, renderer)
    else:
        laid_out = None
    if laid_out is not None:
        earlier = laid_out.spans[:-1]
        if renderer.turns == "whole" or not any(
            _cuts_token(laid_out.text, span, renderer) for span in earlier
        ):
            return (laid_out,)
    asked = ask_turns(document, renderer)
    is_known = asked and len(asked) == sum(document.trained)  # markers may enclose no turn
    if renderer.turns == "whole" or not is_known:
        return (_render_whole(document, asked, renderer),)
    return _render_apart(document, asked, renderer)


def _render_answers_apart(document: Document, renderer: Renderer) -> tuple[RenderedText, ...]:
    """The texts of a document, whose prompt and answers are texts of their own, whether or not all
    is trained on.
    """
    if getattr(document, "images", ()):
        raise BadRow(
            "answers_apart: a text with images is encoded as one; remove the key from this entry "
            "of datasets"
        )
    if renderer.assistant_only:
        turns: Turns = renderer.turns
    else:
        turns = "whole"
    texts: list[RenderedText] = []
    for text in render_turns(
        document, replace(renderer, answers_apart=False, assistant_only=True, turns=turns)
    ):
        answers = [start for start, _ in text.turns.values() or text.spans]
        if renderer.bos and text.text.startswith(renderer.bos):
            after_bos = [len(renderer.bos)]
        else:
            after_bos = []
        text = replace(text, fresh_starts=(*after_bos, *answers))
        if not renderer.assistant_only and not text.is_plain:
            text = replace(text, spans=((0, len(text.text)),))
        texts.append(text)
    return tuple(texts)


def _render_apart(
    conversation: Conversation, asked: Mapping[int, AskedTurn], renderer: Renderer
) -> tuple[RenderedText, ...]:
    """The fewest texts in which each turn stands as inference has it; under `turns: split` one for
    each.

    From the last turn to the first: a text ends with a turn, and holds every earlier one that it
    writes so.
    """
    texts: list[RenderedText] = []
    left = dict(asked)
    while left:
        last = max(left)
        text = left[last].text
        held = {last}
        if renderer.turns != "split":
            held |= {i for i, turn in left.items() if i != last and _has_turn(text, turn, renderer)}
        turns = {i: turn for i, turn in left.items() if i in held}
        texts.append(_render_asked(_keep_turns(conversation, held), turns, renderer))
        left = {i: turn for i, turn in left.items() if i not in held}
    if len(texts) > 1:
        texts = [replace(text, findings=(*text.findings, "turns_split")) for text in texts]
    return tuple(reversed(texts))


def _has_turn(text: str, turn: AskedTurn, renderer: Renderer) -> bool:
    """Whether `text`, of a longer conversation, has a turn as inference has it, token by token."""
    return turn.is_in(text) and not _cuts_token(text, (turn.start, turn.end), renderer)


def _cuts_token(text: str, span: Span, renderer: Renderer) -> bool:
    """Whether a token of the whole text, as inference has it later, crosses a border of a trained
    span.
    """
    special = renderer.special_tokens
    for border in span:
        begin = max(border - CONTEXT, 0)
        begin = max((match.end() for match in special.finditer(text, begin, border)), default=begin)
        end = min(border + CONTEXT, len(text))
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


def _render_laid_out(conversation: Conversation, renderer: Renderer) -> RenderedText | None:
    """The whole conversation, if it is known without asking for them that all turns stand as
    inference has them.
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
    """The whole conversation as the template writes it, also where inference sees turns
    otherwise.
    """
    text, turns = find_turns(conversation, asked, renderer)
    return _check_traced(conversation, text, turns, asked, renderer)


def _render_asked(
    conversation: Conversation, turns: Mapping[int, AskedTurn], renderer: Renderer
) -> RenderedText:
    """The text of a conversation that ends with the last of `turns`, all of which stand as
    inference has them.
    """
    spans = {i: turn.spans for i, turn in turns.items()}
    return _check_traced(conversation, turns[max(turns)].text, spans, turns, renderer)


def _check_traced(
    conversation: Conversation,
    text: str,
    turns: Mapping[int, tuple[Span, ...]],
    asked: Mapping[int, AskedTurn],
    renderer: Renderer,
) -> RenderedText:
    """A text of which `turns` are trained on, with what is found in it.

    Raises `BadRow` where they are not sound.
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
    """A text, with what is found in it, and without the reasoning that is not to be trained on.

    `turns`: message index -> the spans of an assistant's turn; of all of them, or of those that are
    trained on.
    """
    messages = conversation.messages
    trained = {i: spans for i, spans in sorted(turns.items()) if conversation.trained[i]}
    rendered = RenderedText(text, ((0, len(text)),), False)
    if renderer.assistant_only:
        rendered = replace(
            rendered, spans=tuple(sorted(span for spans in trained.values() for span in spans))
        )
    extents = {i: (spans[0][0], spans[-1][1]) for i, spans in sorted(turns.items()) if spans}
    if renderer.assistant_only:
        ends = [extents[i][1] for i in trained if i in extents]
    else:
        ends = []
    findings = [
        *_check_turns(conversation, text, rendered.spans, ends, renderer),
        *_find_dropped(conversation, text, extents),
    ]
    opens = ""
    if renderer.unthinking is not None and not any(
        read_reasoning(message)
        for message, is_trained in zip(messages, conversation.trained, strict=True)
        if is_trained
    ):
        findings.append("no_reasoning")
        prompt = renderer.generation_prompt
        after = renderer.unthinking
        opens = f"inference opens with {prompt!r}, and the answers continue with {after!r}"
    if not renderer.train_on_reasoning:
        for i, turn in extents.items():
            rendered = _leave_out(rendered, _find_reasoning(text, messages[i], i, turn, marks))
    where = {i: span for i, span in extents.items() if i in trained}
    return replace(rendered, findings=tuple(findings), turns=where, difference=opens)


def _find_reasoning(text: str, message: Message, i: int, turn: Span, marks: Marks) -> Span | None:
    """Where the words of its reasoning stand in a turn, with the white space behind them; None
    where they do not.
    """
    own = [mark for mark in marks if mark.message == i]
    places = [mark.position for mark in own if mark.part in REASONING_KEYS]
    words = read_reasoning(message)
    closed = THINKING_END.search(text, *turn)
    if places:
        start = places[0]
        end = places[-1]
    elif own and any(key in message for key in REASONING_KEYS):
        return None  # the template leaves it out
    elif words and closed:  # the content has it, behind a tag that the prompt may have opened
        opened = THINKING_START.search(text, turn[0], closed.start())
        start = text.find(words, opened.end() if opened else turn[0], turn[1])
        end = start + len(words)
    else:
        return None
    if start < 0:
        return None
    return (start, end + len(text[end : turn[1]]) - len(text[end : turn[1]].lstrip()))


def _leave_out(rendered: RenderedText, words: Span | None) -> RenderedText:
    """`rendered`, with some of its words not trained on."""
    if words is None:
        return rendered
    start, end = words
    spans: list[Span] = []
    for first, last in rendered.spans:
        around = ((first, min(last, start)), (max(first, end), last))
        spans += [span for span in around if span[0] < span[1]]
    return replace(rendered, spans=tuple(spans))


def _compare_with_asked(
    rendered: RenderedText,
    conversation: Conversation,
    turns: Mapping[int, AskedTurn],
    renderer: Renderer,
) -> RenderedText:
    """`rendered`, with the findings of what inference would see or write otherwise, and the first
    token of that.
    """
    for i, turn in sorted(turns.items()):
        if turn.is_continued:
            expected = turn.text[: turn.end]
            name = "unlike_inference"
            if rendered.text.startswith(expected):
                continue
        else:
            expected = turn.prompt
            name = "prompt_not_continued"
        trained, seen = _show_difference(rendered.text, expected, renderer)
        difference = f"message {i + 1} is trained with {trained!r} where inference has {seen!r}"
        # what it would say is part of this
        known = [each for each in rendered.findings if each != "no_reasoning"]
        return replace(rendered, findings=(*known, name), difference=difference)
    if not renderer.response_template:
        return rendered
    for i, turn in sorted(turns.items()):
        difference = _read_back(turn, conversation.messages[i], conversation.tools, renderer)
        if difference:
            difference = f"message {i + 1}: {difference}"
            return replace(
                rendered, findings=(*rendered.findings, "not_read_back"), difference=difference
            )
    return rendered


def _read_back(turn: AskedTurn, message: Message, tools: Tools, renderer: Renderer) -> str:
    """How a turn differs from its message, as the tokenizer's response_template reads it; "" if it
    does not.
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
        arguments = dict(parse_json(function.get("arguments")) or {})
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
    tokens = [renderer.backend.encode(each, add_special_tokens=False) for each in (text, expected)]
    ids = zip_longest(*(each.ids for each in tokens))
    first = next((i for i, (one, other) in enumerate(ids) if one != other), 0)
    differing = []
    for each, encoded in zip((text, expected), tokens, strict=True):
        differing.append(each[slice(*encoded.offsets[first])] if first < len(encoded.ids) else "")
    return differing[0], differing[1]


def render(document: Document, renderer: Renderer) -> RenderedText:
    """A document as one text and what of it is trained on.

    Raises `BadRow` if the chat template rejects it.
    """
    match document:
        case Text(text):
            # A BOS in the text would be a second one beside the tokenizer's own.
            text = text.removeprefix(renderer.bos)
            typed = ("typed_special_token",) if renderer.special_tokens.search(text) else ()
            text += renderer.eos
            return RenderedText(text, ((0, len(text)),), True, typed)
        case Candidate(text):
            typed = ("typed_special_token",) if renderer.special_tokens.search(text) else ()
            return RenderedText(renderer.bos + text + renderer.eos, (), False, typed)
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
            renderer = add_variables(
                read_parts(renderer) if document.images else renderer, document.variables
            )
            laid_out = _render_laid_out(document, renderer)
            if laid_out is not None:
                return laid_out
            if renderer.assistant_only:
                asked = ask_turns(document, renderer)
            else:
                asked = {}
            last = len(document.messages) - 1
            if (
                renderer.turns != "whole"
                and last in asked
                and all(turn.is_in(asked[last].text) for turn in asked.values())
            ):
                return _render_asked(document, asked, renderer)
            return _render_whole(document, asked, renderer)


def _render_question(document: Question, renderer: Renderer) -> RenderedText:
    """A prompt up to where the assistant answers. Raises `BadRow` as `render` does."""
    question = document.asked
    if isinstance(question, str):
        if renderer.tools or renderer.environments:
            raise BadRow(
                "a prompt as text has no chat template, which describes the tools; make it messages"
            )
        return RenderedText(question.removeprefix(renderer.bos), (), True, row=document.row)
    own = add_variables(read_parts(renderer) if question.images else renderer, question.variables)
    messages = read_messages(question, own)
    if own.environments:
        row = json.loads(document.row)
        choose_environment(own.environments, row["columns"])  # or it says that there is none
        tools = choose_tools(own, row)
    else:
        tools = question.tools or own.tools
    text = apply_template(own, messages, tools, add_generation_prompt=True)
    findings = tuple(check_prompt(document, text, renderer.has_template))
    identity = None
    if own.environments:  # rows of one prompt may begin different worlds
        identity = xxhash.xxh3_64_intdigest(f"{text}{document.row}".encode())
    return RenderedText(text, (), False, findings, row=document.row, group_hash=identity)


def _render_steps(document: Steps, renderer: Renderer) -> RenderedText:
    """The prompt and each step with what separates it from the next, each a text of its own to the
    tokenizer, as TRL's PRMTrainer encodes them.
    """
    text = document.prompt.removeprefix(renderer.bos)
    starts = []
    spans = []
    for step in document.steps:
        begin = len(text)
        end = begin + len(step)
        text += step + document.separator
        starts += [begin, end]
        spans.append((end, len(text)))
    return RenderedText(
        text, tuple(spans), True, step_labels=document.labels, fresh_starts=tuple(starts)
    )


def render_scored(document: Document, renderer: Renderer) -> RenderedText:
    """A document whose last token is scored: a conversation as the template writes it, whoever
    speaks last.

    It is one piece to the tokenizer, as it is to whoever asks for the score of the same text.
    """
    if not isinstance(document, Conversation):
        return replace(render(document, renderer), spans=())
    own = add_variables(read_parts(renderer) if document.images else renderer, document.variables)
    text = apply_template(own, read_messages(document, own), document.tools or own.tools)
    findings = check_prompt(Question(document, ""), text, renderer.has_template)
    return RenderedText(text, (), False, tuple(findings))


def render_embedded(document: Text, renderer: Renderer) -> RenderedText:
    """A text that is embedded: as it is, with the tokens that the tokenizer itself puts around
    it.
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
    """A text of `document`, with what the model's processor writes for each of its `images`, which
    is not trained on.

    Raises `BadRow` where an image cannot be opened, or the template does not write a place for
    each.
    """
    if not images:
        return text
    conversation = document.asked if isinstance(document, Question) else document
    assert isinstance(conversation, Conversation) and renderer.images is not None
    token = find_image_token(renderer)
    messages = conversation.messages
    last = max(text.turns, default=len(messages))
    counts = [sum(m["content"].count(IMAGE) for m in messages[:end]) for end in (last + 1, None)]
    written_places = text.text.count(token)
    typed = [word for word in renderer.images.reserved if word != token and word in text.text]
    if written_places not in counts or typed:
        raise BadRow(
            f"image: the chat template writes {token} {written_places} times for {counts[0]} images"
            if not typed
            else f"image: the text holds {typed[0]}, which stands for an image"
        )
    images = images[:written_places]
    written = [renderer.images.expand(open_image(image).size) for image in images]
    expanded, spans = place_images(text.text, text.spans, written, token)
    identity = xxhash.xxh3_64_intdigest(
        f"{text.group_hash}{hash_images(images)}{text.text}".encode()
    )
    # Its turns stand elsewhere now, and only `inspect --turns` shows them.
    return replace(
        text, text=expanded, spans=spans, turns={}, images=tuple(images), group_hash=identity
    )


def _check_completion(document: Completion, renderer: Renderer) -> Iterator[str]:
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
    ends: Sequence[int],
    renderer: Renderer,
) -> Iterator[str]:
    messages = conversation.messages
    if any(renderer.special_tokens.search(message["content"]) for message in messages):
        yield "typed_special_token"
    if messages[0]["role"] == "assistant":
        yield "begins_with_assistant"
    if not _describes_calls(conversation):
        yield "calls_without_tools"
    if not renderer.has_template:
        yield "plain_template"
    trained = [
        text[start:end] for start, end in spans if not ends or end in ends or end == spans[-1][1]
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
    """Whether the last special token of a trained span is one at which generation stops."""
    *_, last = renderer.special_tokens.finditer(trained)
    return renderer.up_to_stop.fullmatch(last[0]) is not None


def _find_dropped(
    conversation: Conversation, text: str, turns: Mapping[int, Span]
) -> Iterator[str]:
    """Names of the checks for what the conversation holds and its rendered `text` does not.

    `turns`: message index -> span of an assistant's turn in the text; empty if the turns cannot be
    found in it.
    """
    messages = conversation.messages
    if any(
        m["role"] in ("system", "developer") and m["content"].strip() not in text for m in messages
    ):
        yield "system_dropped"
    if any(m["role"] == "user" and _take_last_line(m["content"]) not in text for m in messages):
        yield "user_dropped"
    answers = {}  # message index -> text of an assistant's turn, as far as it is known
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            answers[i] = text[slice(*turns[i])] if i in turns else text
    yield from _find_dropped_answers(conversation, text, answers)
    without_call = {i for i, answer in answers.items() if not _holds_calls(answer, messages[i])}
    if any(conversation.trained[i] for i in without_call):
        yield "tool_calls_dropped"
    if not all(conversation.trained[i] for i in without_call) or not _holds_tools(
        conversation, text, turns
    ):
        yield "tools_dropped"
    if any(
        conversation.trained[i] and not _holds_reasoning(answers[i], messages[i]) for i in answers
    ):
        yield "reasoning_dropped"


def _find_dropped_answers(
    conversation: Conversation, text: str, answers: Mapping[int, str]
) -> Iterator[str]:
    """Finds the parts of trained answers that the text lacks, as `_find_dropped` does."""
    messages = [conversation.messages[i] for i in answers if conversation.trained[i]]
    # Templates may rewrite the content of earlier turns, so only the last one is compared, and
    # those with tool calls.
    last = conversation.messages[max(answers)]
    compared = (message for message in messages if message is last or message.get("tool_calls"))
    if any(_take_last_line(message["content"]) not in text for message in compared):
        yield "assistant_dropped"
    if any(_says_nothing(message) for message in messages):
        yield "empty_answer"


def _says_nothing(message: Message) -> bool:
    """Whether an assistant's message has neither words, nor calls, nor reasoning."""
    return not (message["content"].strip() or message.get("tool_calls") or read_reasoning(message))


def _holds_reasoning(answer: str, message: Message) -> bool:
    """Whether the last line of a message's reasoning stands in the assistant's turn."""
    return _holds(answer, read_reasoning(message).rpartition("\n")[2].strip())


def _take_last_line(content: str) -> str:
    """The part of a content that every template writes as it is: it may trim it, or move its
    reasoning elsewhere.
    """
    return str(
        THINKING_END.split(content)[-1].strip().rpartition("\n")[2].rpartition(IMAGE)[2].strip()
    )


def _holds_calls(answer: str, message: Message) -> bool:
    """Whether the names of a message's calls and of their arguments stand in the assistant's
    turn.
    """
    for call in message.get("tool_calls", ()):
        function = call["function"]
        if not all(
            _holds(answer, str(name)) for name in (function["name"], *function.get("arguments", ()))
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
    return words in text or any(
        json.dumps(words, ensure_ascii=escape)[1:-1] in text for escape in (False, True)
    )
