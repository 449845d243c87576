"""Every word of a trained answer is trained once, and no other word: random conversations over all named templates.

Nothing of the project decides what is right. Each text of a message has two words of its own, which are counted in the
tokens that are trained, as the tokenizer decodes them; what a template writes is asked of `apply_chat_template`.

    FINETUNE_WORD_ROWS   conversations for each template in the slow test, 10,000 without it
"""

import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from finetune.config.schema import DatasetSource, Turns
from finetune.constants import IGNORE_INDEX
from finetune.data.formats import Conversation, parse_row
from finetune.data.groups import render_group
from finetune.data.marks import trace
from finetune.data.messages import BadRow
from finetune.data.preferences import parse_pair, parse_prompt
from finetune.data.render import RenderedText, render_turns
from finetune.data.spans import refuse_faults
from finetune.data.tokenize import tokenize
from finetune.data.tokenizer import TEMPLATES, Encoder, Renderer, make_encoder, make_renderer
from finetune.errors import UserError
from tests.conftest import make_tokenizer
from tests.data.conftest import Prepare
from tests.data.test_chat import tokenizer_with
from tests.data.test_prepare import write_lines
from tests.data.test_turns import PUBLISHED, read_published, use_template

ROWS = int(os.environ.get("FINETUNE_WORD_ROWS", "10000"))
SOURCE = DatasetSource(path="rows.jsonl")
# What stands around and between the words: markers of these templates, and what they look for in a content.
LOOKALIKES = (
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
    *(
        "<|channel>thought\n",
        "<channel|>",
        "<turn|>\n",
        "<|im_end|>",
        "<|im_start|>assistant\n",
        "<|im_start|>user\n",
    ),
    *(
        "<|end|>",
        "<|eot_id|>",
        "[/INST]",
        "[TOOL_CALLS]",
        "<|start|>assistant",
        "<|return|>",
        "<|assistant|>",
    ),
    *(
        "<start_of_turn>model\n",
        "assistant",
        "analysis",
        "user",
        "final",
        "/no_think",
        '{"a": 1}',
        "{}",
        "42",
        "{{ x }}",
    ),
    *("Köln", "日本", "🙂", "\u200b", "\n", "\n\n", "  ", "\t", "\\", '"', "'"),
)
THOUGHT = re.compile("</think>|<channel[|]>")
WORD = re.compile(r"z\d{4}y")
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "description": "Its name."}},
    "required": [],
}
TOOLS = [
    {
        "type": "function",
        "function": {"name": name, "description": f"The {name}.", "parameters": PARAMETERS},
    }
    for name in ("weather", "traffic")
]
VARIABLES: Sequence[dict[str, Any]] = (
    *({}, {}, {}, {"enable_thinking": True, "thinking": True}, {"enable_thinking": False}),
    {"preserve_thinking": True, "clear_thinking": False, "truncate_history_thinking": False},
)
COMPARED = {"prompt_not_continued", "unlike_inference"}
Message = dict[str, Any]


@dataclass
class Writer:
    """Writes random conversations. Some contents are another message's, word by word."""

    generator: np.random.Generator
    words: int = 0
    copies: dict[str, str] = field(
        default_factory=dict
    )  # a word of a copy -> the word that stands there
    contents: list[str] = field(default_factory=list)
    reasons: float = 0  # the share of answers that have reasoning
    speaks: float = 0  # the share of calls that have words beside them
    parallel: float = 0  # the share of calls that are two

    def chance(self, share: float) -> bool:
        return bool(self.generator.random() < share)

    def pick(self, values: Sequence[Any]) -> Any:
        return values[int(self.generator.integers(len(values)))]

    def make_word(self) -> str:
        self.words += 1
        return f"z{self.words:04}y"

    def say(self) -> str:
        if self.contents and self.chance(0.04):
            copied = self.pick(self.contents)
            content = WORD.sub(lambda _: self.make_word(), copied)
            originals = [self.copies.get(word, word) for word in WORD.findall(copied)]
            self.copies |= dict(zip(WORD.findall(content), originals, strict=True))
            return content
        before, between, after = (
            self.pick(LOOKALIKES) if self.chance(share) else "" for share in (0.15, 0.3, 0.15)
        )
        self.contents.append(f"{before}{self.make_word()}{between or ' '}{self.make_word()}{after}")
        return self.contents[-1]

    def call(self, number: int) -> Message:
        values = (self.say(), 7, True, [self.say(), 1.5], {"in": self.say()})
        arguments = {
            name: self.pick(values) for name in ("city", "day")[: int(self.generator.integers(3))]
        }
        function = {"name": self.pick(("weather", "traffic")), "arguments": arguments}
        return {"id": f"a1b2c3d{number:02}", "type": "function", "function": function}

    def answer(self, content: str, **more: Any) -> Message:
        message = {"role": "assistant", "content": content, **more}
        if self.chance(self.reasons):
            message["reasoning_content"] = self.say()
        if self.chance(0.08):
            message["train"] = False
        return message

    def respond(self, calls: int) -> Iterator[Message]:
        """The assistant's turns after a question: rounds of calls with their results, then mostly an answer."""
        for _ in range(calls):
            made = [self.call(number) for number in range(1 + self.chance(self.parallel))]
            yield self.answer(self.say() if self.chance(self.speaks) else "", tool_calls=made)
            for call in made:
                content = (
                    self.say() if self.chance(0.8) else self.pick(("42", "", '{"rain": true}'))
                )
                yield {
                    "role": "tool",
                    "name": call["function"]["name"],
                    "tool_call_id": call["id"],
                    "content": content,
                }
        if not calls or self.chance(0.9):
            yield self.answer(self.say())

    def converse(self) -> tuple[list[Message], bool]:
        """(the messages, whether tools are described)."""
        self.words, self.copies, self.contents = 0, {}, []
        self.reasons = self.pick((0, 0.5, 1))
        self.speaks = self.pick((0, 0.5, 1))
        self.parallel = self.pick((0, 0.5))
        has_calls = self.chance(0.6)
        rounds = (0, 1, 2) if has_calls else (0,)
        messages: list[Message] = (
            [{"role": "system", "content": self.say()}] if self.chance(0.4) else []
        )
        if self.chance(0.04):
            messages += self.respond(0)
        for _ in range(self.pick((1, 1, 2, 3))):
            messages += [{"role": "user", "content": self.say()}, *self.respond(self.pick(rounds))]
        if self.chance(0.1):
            messages = messages[: int(self.generator.integers(2, len(messages) + 1))]
        return messages, has_calls and self.chance(0.9)

    def take_copies(self, messages: Sequence[Message]) -> list[Message]:
        """The messages, with the words that a copy repeats in place of its own."""
        text = WORD.sub(lambda match: self.copies.get(match[0], match[0]), json.dumps(messages))
        copied: list[Message] = json.loads(text)
        return copied


class Oracle:
    """What transformers' `apply_chat_template` writes for the beginnings of a conversation."""

    def __init__(
        self,
        tokenizer: Any,
        messages: Sequence[Message],
        tools: Sequence[Any] | None,
        **variables: Any,
    ) -> None:
        plain = [
            {key: value for key, value in message.items() if key != "train"} for message in messages
        ]

        @cache
        def write(end: int, asks: bool = False) -> str:
            options = {
                "tools": tools,
                "tokenize": False,
                "add_generation_prompt": asks,
                **variables,
            }
            return str(tokenizer.apply_chat_template(plain[:end], **options))

        self.write = write

    def rejects(self, trained: Sequence[int], end: int) -> bool:
        try:
            for i in trained:
                self.write(i + 1)
                if i:
                    self.write(i, asks=True)
            self.write(end, asks=not trained)
        except Exception:  # whatever a template's own code raises
            return True
        return False

    def wrote(self, text: str, ends: Sequence[int]) -> bool:
        """Whether a text is the template's of a beginning; or of one with its prompt, and what such a text ends with."""
        for end in ends:
            if text == self.write(end):
                return True
            prompt = self.write(end - 1, asks=True) if end > 1 else None
            if prompt and text.startswith(prompt) and self.write(end).endswith(text[len(prompt) :]):
                return True
        return False


def list_words(message: Message) -> list[str]:
    said = {
        key: value
        for key, value in message.items()
        if key in ("content", "reasoning_content", "tool_calls")
    }
    return WORD.findall(json.dumps(said))


def decode_trained(texts: Sequence[RenderedText], tokenizer: Any, encoder: Encoder) -> list[str]:
    """The trained stretches of documents; their tokens are compared with their texts."""
    tokens = tokenize(texts, [(0, 1)] * len(texts), encoder)
    stretches: list[str] = []
    start = 0
    for text, length in zip(texts, tokens.lengths.tolist(), strict=True):
        ids, labels = (each[start : start + length] for each in (tokens.input_ids, tokens.labels))
        assert tokenizer.decode(ids) == text.text
        trained = np.concatenate(([False], labels[:-1] != IGNORE_INDEX, [False]))
        borders = np.flatnonzero(trained[1:] != trained[:-1]) + 1
        stretches += [
            tokenizer.decode(ids[first:last]) for first, last in borders.reshape(-1, 2).tolist()
        ]
        start += length
    return stretches


@dataclass
class Checked:
    """A template, with what its conversations are rendered by."""

    tokenizer: Any
    encoder: Encoder
    renderers: Mapping[str, Renderer]  # by `turns`


def open_template(template: str) -> Checked:
    tokenizer = use_template(make_tokenizer(), template)
    tokenizer.add_tokens(["<think>", "</think>"])
    modes: Sequence[Turns] = ("auto", "split", "whole", "last")
    renderers: dict[str, Renderer] = {
        turns: make_renderer(tokenizer, True, turns=turns) for turns in modes
    }
    renderers["silent"] = make_renderer(tokenizer, True, train_on_reasoning=False)
    return Checked(tokenizer, make_encoder(tokenizer), renderers)


def check_row(checked: Checked, writer: Writer) -> bool:
    """Checks one conversation; returns whether the template takes it."""
    unique, has_tools = writer.converse()
    tools = TOOLS if has_tools else None
    messages = writer.take_copies(unique)
    turns = str(writer.pick(("auto", "auto", "auto", "silent", "split", "whole", "last")))
    variables = writer.pick(VARIABLES)
    row = {"messages": messages, "tools": tools, "chat_template_kwargs": variables}
    try:
        document = parse_row(row, SOURCE).document
    except BadRow:
        return False  # no answer in it
    assert isinstance(document, Conversation)
    trained = [i for i, on in enumerate(document.trained) if on]
    if not trained:
        return False
    trained = trained[-1:] if turns == "last" else trained
    if turns == "silent" and any(THOUGHT.search(messages[i]["content"]) for i in trained):
        return False  # part of the content is reasoning
    ours = Oracle(checked.tokenizer, messages, tools, **variables)
    apart = Oracle(checked.tokenizer, unique, tools, **variables) if writer.copies else ours
    try:
        texts = render_turns(document, checked.renderers[turns])
    except BadRow as refused:
        is_rejected = ours.rejects(trained, len(messages))
        assert is_rejected or _is_system_in_answer(messages, refused), refused
        return False
    expected: Counter[str] = Counter()
    for i in trained:
        written = apart.write(len(unique) if turns == "whole" else i + 1)
        spoken = unique[i] if turns != "silent" else unique[i] | {"reasoning_content": ""}
        expected.update(
            writer.copies.get(word, word) for word in list_words(spoken) if word in written
        )
    said = decode_trained(texts, checked.tokenizer, checked.encoder)
    assert Counter(WORD.findall("|".join(said))) == expected
    ends = [len(messages)] if turns == "whole" else [i + 1 for i in trained] + [len(messages)]
    for text in texts:
        assert ours.wrote(text.text, ends)
        if turns != "whole" and max(text.turns) and not COMPARED & {*text.findings}:
            start = text.turns[max(text.turns)][0]
            assert text.text[:start] == ours.write(max(text.turns), asks=True)
    return True


def _is_system_in_answer(messages: list[dict[str, Any]], refused: BadRow) -> bool:
    """Whether a template, as Gemma's, writes a system message into the answer that follows it."""
    roles = [message["role"] for message in messages[:2]]
    return roles == ["system", "assistant"] and "message 1 (system)" in str(refused)


def check_pair(checked: Checked, writer: Writer) -> bool:
    """Checks a pair whose sides begin alike; returns whether the template takes it."""
    messages, has_tools = writer.converse()
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant" and i]
    if not answers:
        return False
    first = int(writer.pick(answers))
    tools = TOOLS if has_tools else None
    asked = [
        message | {"train": False} if message["role"] == "assistant" else message
        for message in messages[:first]
    ]
    rejected = list(writer.respond(int(has_tools and writer.chance(0.5))))
    for message in (*messages[first:], *rejected):
        message.pop("train", None)
    row: dict[str, Any] = {
        "prompt": asked,
        "chosen": messages[first:],
        "rejected": rejected,
        "tools": tools,
    }
    sides = [[*asked, *row["chosen"]], [*asked, *rejected]]
    trained = [
        [i for i, m in enumerate(side) if i >= first and m["role"] == "assistant"] for side in sides
    ]
    oracles = [Oracle(checked.tokenizer, side, tools) for side in sides]
    try:
        (group,) = parse_pair(row, SOURCE).groups
        texts, findings = render_group(group, checked.renderers["auto"])
    except BadRow as refused:
        is_rejected = any(map(Oracle.rejects, oracles, trained, map(len, sides)))
        is_rejected |= "roles out of order" in str(refused)
        assert is_rejected or _is_system_in_answer(messages, refused), refused
        return False
    if {"sides_equal", "side_empty"} & {*findings}:
        return False
    for side, turns, oracle, text in zip(sides, trained, oracles, texts, strict=True):
        written = (
            oracle.write(len(side)) + text.text
        )  # which may have the reasoning before a call that the other drops
        expected = [word for i in turns for word in list_words(side[i]) if word in written]
        said = decode_trained([text], checked.tokenizer, checked.encoder)
        assert Counter(WORD.findall("|".join(said))) == Counter(expected)
        assert oracle.wrote(text.text, [len(side)])
    is_rewritten = any(COMPARED & {*text.findings} for text in texts)
    assert is_rewritten or "prompts_differ" not in findings
    return True


def check_prompt(checked: Checked, writer: Writer) -> bool:
    """Checks the prompt that sampling begins with; returns whether the template takes it."""
    messages, has_tools = writer.converse()
    ends = [i for i, message in enumerate(messages) if i and message["role"] == "assistant"]
    if not ends:
        return False
    end = int(writer.pick(ends))
    tools = TOOLS if has_tools else None
    oracle = Oracle(checked.tokenizer, messages, tools)
    (group,) = parse_prompt({"messages": messages[: end + 1], "tools": tools}, SOURCE).groups
    try:
        ((text,), _) = render_group(group, checked.renderers["auto"])
    except BadRow:
        assert oracle.rejects([], end)
        return False
    assert text.text == oracle.write(end, asks=True) and not text.spans
    return True


def check_rows(template: str, rows: int) -> None:
    checked, writer, taken = open_template(template), Writer(np.random.default_rng(43)), 0
    for number in range(rows):
        taken += check_row(checked, writer)
        if number % 4 == 0:
            check_pair(checked, writer)
        if number % 8 == 0:
            check_prompt(checked, writer)
    assert taken > rows / 4


@pytest.mark.parametrize("name", TEMPLATES)
def test_every_word_of_an_answer_is_trained_once_and_no_other(name: str) -> None:
    check_rows(TEMPLATES[name], 16)


@pytest.mark.slow
@pytest.mark.parametrize("name", TEMPLATES)
def test_every_word_of_an_answer_is_trained_once_in_ten_thousand_rows(name: str) -> None:
    check_rows(TEMPLATES[name], ROWS)


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_every_word_of_an_answer_is_trained_once_under_published_templates(name: str) -> None:
    check_rows(read_published(name), ROWS // 10)


@pytest.mark.parametrize("name", ["glm4.5", "qwen3", "qwen3.5"])
def test_a_call_is_trained_behind_a_thought_that_the_template_leaves_out(name: str) -> None:
    checked = open_template(TEMPLATES[name])
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "OSLO"}}}
    messages = [
        {"role": "user", "content": "FIRST"},
        {"role": "assistant", "content": "<think>\nTHOUGHT\n</think>\n\n", "tool_calls": [call]},
        {"role": "tool", "content": "RESULT"},
        {"role": "assistant", "content": "ANSWER"},
        {"role": "user", "content": "SECOND"},
        {"role": "assistant", "content": "LAST"},
    ]
    document = parse_row({"messages": messages, "tools": TOOLS}, SOURCE).document
    texts = render_turns(document, checked.renderers["whole"])
    said = "|".join(decode_trained(texts, checked.tokenizer, checked.encoder))
    assert [word for word in ("THOUGHT", "OSLO", "ANSWER", "LAST") if word in said] == [
        "OSLO",
        "ANSWER",
        "LAST",
    ]
    assert not {"FIRST", "RESULT", "SECOND"} & {*re.findall("[A-Z]+", said)}


OPENS = (
    "{%- for m in messages -%}<|im_start|>{{ m['role'] + '\n' }}"
    "{%- if m['role'] == 'assistant' and m['reasoning_content'] -%}{{ '<think>\n' + m['reasoning_content'] + '\n</think>\n' }}{%- endif -%}"
    "{{- m['content'] + '<|im_end|>\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n<think>\n' }}{%- endif -%}"
)
ASKED = {"role": "user", "content": "FIRST QUESTION"}
THOUGHT_OF = {"role": "assistant", "reasoning_content": "THOUGHT", "content": "FIRST ANSWER"}
AGAIN = [
    {"role": "user", "content": "SECOND QUESTION"},
    {"role": "assistant", "content": "SECOND ANSWER"},
]


def test_an_answer_that_leaves_out_what_the_prompt_opens_is_the_templates_own_text() -> None:
    checked = open_template(OPENS)
    row = {"messages": [ASKED, THOUGHT_OF, *AGAIN]}
    (text,) = render_turns(parse_row(row, SOURCE).document, checked.renderers["auto"])
    assert text.text == checked.tokenizer.apply_chat_template(row["messages"], tokenize=False)
    said = decode_trained([text], checked.tokenizer, checked.encoder)
    assert said == ["THOUGHT\n</think>\nFIRST ANSWER<|im_end|>", "SECOND ANSWER<|im_end|>"]
    assert "prompt_not_continued" in text.findings


CALLED = {"name": "weather", "arguments": {"city": "SF"}}
CALLS = [
    {"role": "assistant", "content": "", "reasoning_content": "REASON", "tool_calls": [CALLED]},
    {"role": "tool", "name": "weather", "content": "RESULT"},
]
GOOD, BAD = ({"role": "assistant", "content": content} for content in ("GOOD", "BAD"))


@pytest.mark.parametrize("name", ["nemotron3", "glm4.7", "qwen3.5", "qwen3"])
@pytest.mark.parametrize("before", [0, len(CALLS)], ids=["a call is chosen", "a call is asked"])
def test_both_sides_of_a_pair_are_trained_from_the_same_place_on(name: str, before: int) -> None:
    checked = open_template(TEMPLATES[name])
    asked, chosen = [ASKED, *CALLS[:before]], [*CALLS[before:], GOOD]
    row = {"prompt": asked, "chosen": chosen, "rejected": [BAD], "tools": TOOLS}
    texts, findings = render_group(parse_pair(row, SOURCE).groups[0], checked.renderers["auto"])
    prompts = [text.text[: text.spans[0][0]] for text in texts]
    answers = [decode_trained([text], checked.tokenizer, checked.encoder) for text in texts]
    assert prompts[0] == prompts[1] and "prompts_differ" not in findings
    assert answers[0][-1].replace("GOOD", "BAD") == answers[1][-1]
    assert "".join(answers[0]).count("</think>") == len(answers[0]) * ("</think>" in answers[1][0])


@pytest.mark.parametrize(
    ("name", "content", "result"),
    [
        ("glm4.7", "", "RESULT<|end|>AND MUCH MORE"),
        ("gemma4", "WORDS<|channel>thought\n", "RESULT"),
        ("gemma4", "<|channel>thought\nWORDS", "RESULT"),
    ],
)
def test_a_turn_that_a_later_one_rewrites_ends_before_the_words_of_others(
    name: str, content: str, result: str
) -> None:
    """Found by the ten thousand: a result that holds a token at which generation stops, and words that are cut off."""
    checked = open_template(TEMPLATES[name])
    call = {**CALLS[0], "content": content}
    row = {"messages": [ASKED, call, {**CALLS[1], "content": result}, GOOD, *AGAIN], "tools": TOOLS}
    texts = render_turns(parse_row(row, SOURCE).document, checked.renderers["whole"])
    said = "|".join(decode_trained(texts, checked.tokenizer, checked.encoder))
    assert "RESULT" not in said and said.count("GOOD") == said.count("SECOND ANSWER") == 1


# Templates that write the words of one message into the turn of another.
QUOTES = (
    "{%- for m in messages -%}<|im_start|>{{ m['role'] + '\n' }}"
    "{%- if m['role'] == 'assistant' -%}{{ '> ' + loop.previtem['content'] + '\n' }}{%- endif -%}"
    "{{- m['content'] + '<|im_end|>\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
)
ENCLOSES = (
    "{%- for m in messages -%}{% generation %}<|im_start|>{{ m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endgeneration %}{%- endfor -%}"
)


@pytest.mark.parametrize(
    ("template", "turns"), [(QUOTES, "auto"), (QUOTES, "whole"), (ENCLOSES, "whole")]
)
def test_a_template_that_writes_a_question_into_an_answer_is_refused_with_the_row(
    template: str, turns: str, prepare: Prepare, tmp_path: Path
) -> None:
    rows = [{"messages": [ASKED, THOUGHT_OF]}, {"messages": [ASKED, THOUGHT_OF, *AGAIN]}]
    data = write_lines(tmp_path / "rows.jsonl", rows)
    special = {
        "added_tokens": ["<|im_start|>", "<|im_end|>"],
        "eot_tokens": ["<|im_end|>"],
        "max_length": 512,
    }
    with pytest.raises(
        UserError,
        match=r"rows\.jsonl:1: the chat template writes message 1 \(user\) into an answer",
    ):
        prepare([{"path": str(data)}], chat_template=template, turns=turns, **special)


# A template without a generation prompt, which marks an answer's thought and the rest of it apart.
MARKED_TWICE = (
    "{%- for m in messages -%}{%- if m['role'] == 'assistant' -%}"
    "{% generation %}{{ '[' + m['content'][0] }}{% endgeneration %}, "
    "{% generation %}{{ m['content'][1:] + ']<|end|>' }}{% endgeneration %}"
    "{%- else -%}{{ m['content'] }}{%- endif -%}{%- endfor -%}"
)


@pytest.mark.parametrize("turns", ["auto", "split", "whole"])
def test_all_that_markers_enclose_is_trained_where_an_answer_begins_the_text(turns: Turns) -> None:
    renderer = replace(make_renderer(tokenizer_with(MARKED_TWICE), True), turns=turns)
    first = {"role": "assistant", "content": "ab"}
    row = {"messages": [first, ASKED, {**first, "content": "cd"}]}
    texts = render_turns(parse_row(row, SOURCE).document, renderer)
    trained = [text.text[slice(*span)] for text in texts for span in text.spans]
    assert trained == ["[a", "b]<|end|>", "[c", "d]<|end|>"]


# SmolLM3's template marks the header of an answer too, which is also its generation prompt.
MARKED_HEADER = (
    "{%- for m in messages -%}{%- if m['role'] == 'assistant' -%}"
    "{% generation %}{{ '<|im_start|>assistant\n' + m['content'] + '<|im_end|>\n' }}{% endgeneration %}"
    "{%- else -%}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{%- endif -%}"
    "{%- endfor -%}{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
)


@pytest.mark.parametrize(
    ("turns", "header"), [("whole", "<|im_start|>assistant\n"), ("auto", ""), ("split", "")]
)
def test_a_header_inside_markers_is_trained_in_whole_conversations_of_any_length(
    turns: Turns, header: str
) -> None:
    renderer = replace(make_renderer(tokenizer_with(MARKED_HEADER), True), turns=turns)
    answer = {"role": "assistant", "content": "ab"}
    for messages in ([ASKED, answer], [ASKED, answer, ASKED, answer]):
        texts = render_turns(parse_row({"messages": messages}, SOURCE).document, renderer)
        trained = [text.text[slice(*span)] for text in texts for span in text.spans]
        assert trained == [f"{header}ab<|im_end|>\n"] * (len(messages) // 2)


def test_spans_that_overlap_or_miss_an_answer_and_a_text_of_ones_own_are_refused() -> None:
    renderer = open_template(TEMPLATES["chatml"]).renderers["auto"]
    document = parse_row({"messages": [ASKED, THOUGHT_OF, *AGAIN]}, SOURCE).document
    assert isinstance(document, Conversation)
    (text,) = render_turns(document, renderer)
    marks = trace(text.text, document.messages, (), renderer)
    first, second = text.spans
    refuse_faults({1: (first,), 3: (second,)}, marks, document, renderer)
    with pytest.raises(BadRow, match="two answers into each other"):
        refuse_faults({1: (first,), 3: ((first[1] - 1, second[1]),)}, marks, document, renderer)
    with pytest.raises(BadRow, match=r"message 4 \(assistant\) apart from its turn"):
        refuse_faults({1: (first,)}, marks, document, renderer)
    with pytest.raises(BadRow, match=r"message 3 \(user\) into an answer"):
        refuse_faults({1: (first,), 3: ((first[1], second[1]),)}, marks, document, renderer)
    with pytest.raises(BadRow, match="not what the chat template writes"):
        trace(text.text + " ", document.messages, (), renderer)
