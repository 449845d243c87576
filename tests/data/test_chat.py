"""Chat templates: the text is what transformers renders, and exactly the assistant's turns in it are trained on."""

import cProfile
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from finetune.config.schema import DatasetSource
from finetune.data import template_sandbox
from finetune.data.formats import Conversation, Question, parse_row
from finetune.data.messages import BadRow
from finetune.data.render import render
from finetune.data.tokenizer import TEMPLATES, Renderer, apply_template, make_renderer
from finetune.errors import UserError
from tests.conftest import make_tokenizer

SOURCE = DatasetSource(path="chat.jsonl")
FAMILY_TOKENS = (
    "<|im_start|>",
    "<|im_end|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
)
FAMILY_TOKENS += (
    "<start_of_turn>",
    "<end_of_turn>",
    "<|im_sep|>",
    "<|eot|>",
    "<|END_OF_TURN_TOKEN|>",
    "<|end_of_text|>",
    "<turn|>",
    "<｜end▁of▁sentence｜>",
    "<|return|>",
    "</think>",
)

# Thinking as in Qwen3: an empty block in the last turn only, no reasoning in the history.
THINKING = """\
{%- for m in messages -%}
  {%- set words = m['content'].split('</think>')[-1].lstrip('\\n') if m['role'] == 'assistant' else m['content'] -%}
  {%- set block = '<think>' + m['content'].split('</think>')[0].split('<think>')[-1] + '</think>\\n' if '</think>' in m['content'] else '<think></think>\\n' -%}
  {{- '<|im_start|>' + m['role'] + '\\n' + (block if m['role'] == 'assistant' and loop.last else '') + words + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
# Phi3 ends the whole conversation with its own token, which does not belong to earlier turns.
FINAL_END = (
    TEMPLATES["chatml"] + "{%- if not add_generation_prompt -%}{{- eos_token -}}{%- endif -%}"
)
TESTED_TEMPLATES = TEMPLATES | {"thinking": THINKING, "final end": FINAL_END}
OPENED = {
    "nemotron3": "</think>",
    "glm4.7": "</think>",
}  # their prompt opens <think>, and an answer without reasoning is none after it
# What each template's assistant turn ends with, beside make_tokenizer's <|end|>.
ENDS = dict.fromkeys(
    ("chatml", "hermes", "qwen", "qwen3", "smollm3", "phi4", "thinking", "final end"), "<|im_end|>"
)
ENDS |= dict.fromkeys(("qwen3.5", "qwen3.6", "qwen3.8"), "<|im_end|>") | {"glm4.5": "<|user|>"}
ENDS |= {
    "llama3": "<|eot_id|>",
    "llama3.1": "<|eot_id|>",
    "llama4": "<|eot|>",
    "gemma": "<end_of_turn>",
}
ENDS |= dict.fromkeys(("kimi-k2", "kimi-k2-thinking", "nemotron3"), "<|im_end|>") | {
    "gemma4": "<turn|>",
    "glm4.7": "<|user|>",
}
ENDS |= (
    {"gpt-oss": "<|return|>"}
    | dict.fromkeys(("deepseek-v3.1", "deepseek-v3.2"), "<｜end▁of▁sentence｜>")
    | {"granite4": "<|end_of_text|>"}
)
ENDS |= {
    "command-r": "<|END_OF_TURN_TOKEN|>",
    "granite": "<|end_of_text|>",
    "glm4": "<|user|>",
    "llama2": " <|end|>",
}
# Templates with a space before the assistant's words, which the model writes.
SPACED = (
    "inst",
    "inst-torchtune",
    "mistral",
    "mistral-v1",
    "mistral-v2",
    "mistral-v3",
    "mistral-v7",
    "llama2",
    "vicuna",
    "deepseek-v2",
)
THOUGHTS = {
    "thinking": "<think></think>\n",
    "qwen3": "<think>\n\n</think>\n\n",
    "qwen3.5": "\n</think>\n\n",  # after a prompt that opens it
    "qwen3.6": "\n</think>\n\n",
}  # before the last answer, unless asked otherwise


def tokenizer_with(template: str) -> Any:
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(list(FAMILY_TOKENS), special_tokens=True)
    tokenizer.chat_template = template
    return tokenizer


@cache
def renderer_of(name: str) -> Renderer:
    """The renderer of a tested template."""
    return make_renderer(tokenizer_with(TESTED_TEMPLATES[name]), True)


def conversation(*contents: str, system: str | None = None) -> Conversation:
    messages = [
        {"role": ("user", "assistant")[i % 2], "content": content}
        for i, content in enumerate(contents)
    ]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    document = parse_row({"messages": messages}, SOURCE).document
    assert isinstance(document, Conversation)
    return document


def trained(document: Conversation, renderer: Renderer) -> list[str]:
    rendered = render(document, renderer)
    return [rendered.text[start:end] for start, end in rendered.spans]


@pytest.mark.parametrize("name", TESTED_TEMPLATES)
def test_only_the_assistants_turns_with_their_end_are_trained_on(name: str) -> None:
    end = ENDS.get(name, "<|end|>")
    found = trained(
        conversation("Hi assistant", "Hello user", "user again", "Goodbye", system="Be kind."),
        renderer_of(name),
    )
    before = {
        "glm4": "\n",
        "glm4.5": "\n<think></think>\n",
        "qwen3.8": "\n</think>\n\n",
    } | dict.fromkeys(SPACED, " ")
    before |= {
        "kimi-k2-thinking": "<think></think>",
        "gpt-oss": "<|channel|>final<|message|>",
    } | OPENED
    space = before.get(name, "")
    first = "<|end|>" if name == "gpt-oss" else end
    assert found == [f"{space}Hello user{first}", f"{space}{THOUGHTS.get(name, '')}Goodbye{end}"]


# Rendered up to an earlier answer, these write the system's text elsewhere than in the whole conversation, or open <think>.
ELSE_BEFORE_EARLIER_ANSWERS = (
    "mistral-v2",
    "mistral-v3",
    "mistral-v3-tekken",
    "qwen3.5",
    "qwen3.6",
)

WORDS = st.text(
    st.characters(codec="utf-8", exclude_characters="<>[]"), min_size=1, max_size=20
).filter(str.strip)


@given(
    st.sampled_from(sorted(TESTED_TEMPLATES)),
    st.lists(WORDS, min_size=2, max_size=6).filter(lambda contents: len(contents) % 2 == 0),
    st.none() | WORDS,
)
def test_text_equals_apply_chat_template_and_spans_contain_the_answers(
    name: str, contents: list[str], system: str | None
) -> None:
    document, renderer = conversation(*contents, system=system), renderer_of(name)
    text = tokenizer_with(TESTED_TEMPLATES[name]).apply_chat_template(
        list(document.messages), tokenize=False
    )
    rendered = render(document, renderer)
    assert rendered.text == text
    assert len(rendered.spans) == len(contents) // 2
    last = 0
    for (start, end), answer in zip(rendered.spans, contents[1::2], strict=True):
        assert last <= start < end <= len(text)
        assert answer.strip() in text[start:end]
        last = end
    if name in OPENED:
        return
    # A span begins where generation would: after the prompt.
    turn = -1 if name in ELSE_BEFORE_EARLIER_ANSWERS else 0
    asked = [i for i, message in enumerate(document.messages) if message["role"] == "assistant"][
        turn
    ]
    assert text[: rendered.spans[turn][0]] == apply_template(
        renderer, list(document.messages[:asked]), add_generation_prompt=True
    )


def test_reasoning_dropped_from_the_history_is_handled() -> None:
    found = trained(
        conversation("Q", "<think>hm</think>\nA", "Q2", "<think>so</think>\nB"),
        renderer_of("thinking"),
    )
    assert found == ["A<|im_end|>", "<think>so</think>\nB<|im_end|>"]


def test_generation_markers_are_used_and_the_end_of_turn_is_added() -> None:
    marked = TEMPLATES["chatml"].replace(
        "message['content'] + '<|im_end|>\\n' -}}",
        "'' -}}{%- if message['role'] == 'assistant' -%}{%- generation -%}{{- message['content'] -}}{%- endgeneration -%}"
        "{%- else -%}{{- message['content'] -}}{%- endif -%}{{- '<|im_end|>\\n' -}}",
    )
    document = conversation("Hi", "Hello", "And?", "Bye", system="S")
    renderer = make_renderer(tokenizer_with(marked), True)
    assert renderer.has_markers
    assert (
        trained(document, renderer)
        == trained(document, renderer_of("chatml"))
        == ["Hello<|im_end|>", "Bye<|im_end|>"]
    )


def test_train_false_excludes_a_message() -> None:
    messages = [
        {"role": "user", "content": "Q"},
        {"role": "assistant", "content": "wrong", "train": False},
        {"role": "user", "content": "Q2"},
        {"role": "assistant", "content": "right"},
    ]
    document = parse_row({"messages": messages}, SOURCE).document
    assert isinstance(document, Conversation)
    assert trained(document, renderer_of("llama3")) == ["right<|eot_id|>"]
    weighted = parse_row(
        {"messages": [messages[0], {**messages[1], "train": None, "weight": 0}, *messages[2:]]},
        SOURCE,
    ).document
    assert isinstance(weighted, Conversation)
    assert trained(weighted, renderer_of("llama3")) == ["right<|eot_id|>"]


def test_everything_is_trained_on_without_assistant_only_loss() -> None:
    renderer = make_renderer(tokenizer_with(TEMPLATES["llama3"]), assistant_only=False)
    rendered = render(conversation("Q", "A"), renderer)
    assert rendered.spans == ((0, len(rendered.text)),)


def test_tool_calls_are_trained_on_and_tool_results_are_not() -> None:
    template = (
        "{%- for m in messages -%}{{- '<|im_start|>' + m['role'] + '\\n' + m['content'] -}}"
        "{%- for call in m.tool_calls or [] -%}{{- call.function | tojson -}}{%- endfor -%}{{- '<|im_end|>\\n' -}}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
    )
    row = {
        "messages": [
            {"role": "user", "content": "Weather?"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"function": {"name": "weather"}}],
            },
            {"role": "tool", "content": "rain"},
            {"role": "assistant", "content": "It rains."},
        ],
        "tools": [{"type": "function", "function": {"name": "weather"}}],
    }
    document = parse_row(row, SOURCE).document
    assert isinstance(document, Conversation)
    renderer = make_renderer(tokenizer_with(template), True)
    call = '{"name": "weather", "arguments": {}}<|im_end|>'  # servers read no call without them
    assert trained(document, renderer) == [call, "It rains.<|im_end|>"]


def test_findings_of_a_conversation() -> None:
    typed = render(conversation("Q <|end|>", "A"), renderer_of("llama3"))
    assert typed.findings == ("typed_special_token",)
    dropping = TEMPLATES["chatml"].replace(
        "in messages -%}", "in messages if message['role'] != 'system' -%}"
    )
    assert render(
        conversation("Q", "A", system="Be kind."), make_renderer(tokenizer_with(dropping), True)
    ).findings == ("system_dropped",)
    endless = "{%- for m in messages -%}{{- m['role'] + ': ' + m['content'] + ' ' -}}{%- endfor -%}"
    assert (
        "no_end_of_turn"
        in render(conversation("Q", "A"), make_renderer(tokenizer_with(endless), True)).findings
    )
    plain = make_tokenizer()  # has no <|im_end|>
    plain.chat_template = TEMPLATES["chatml"]
    assert (
        "end_of_turn_is_text" in render(conversation("Q", "A"), make_renderer(plain, True)).findings
    )


@pytest.mark.parametrize("name", TESTED_TEMPLATES)
def test_content_that_a_template_trims_or_moves_is_not_reported_as_dropped(name: str) -> None:
    said = (
        "  Why\n\n so? \n",
        "<think>\nhm\n</think>\n\nWell.\n",
        "And then?",
        "<think>so</think>\n\n Because,\n you see. \n",
    )
    assert not {"user_dropped", "assistant_dropped"} & set(
        render(conversation(*said), renderer_of(name)).findings
    )


def test_content_that_a_template_drops_is_reported() -> None:
    role_only = make_renderer(
        tokenizer_with("{% for m in messages %}{{ m['role'] }}{{ eos_token }}{% endfor %}"), True
    )
    assert render(conversation("hi", "hello"), role_only).findings == (
        "user_dropped",
        "assistant_dropped",
    )
    shown = "{{- message['content'] if message['role'] != '%s' else '' -}}{{- eos_token -}}"
    for role in ("user", "assistant"):
        template = "{%- for message in messages -%}" + shown.replace("%s", role) + "{%- endfor -%}"
        remarks = render(
            conversation("hi", "hello", "and?", "bye"),
            make_renderer(tokenizer_with(template), True),
        ).findings
        assert remarks == (f"{role}_dropped",)


@pytest.mark.parametrize("role", ["system", "developer"])
def test_instructions_that_a_template_drops_from_a_prompt_are_reported(role: str) -> None:
    users = "{% for m in messages if m['role'] == 'user' %}{{ m['content'] }}{% endfor %}"
    messages = ({"role": role, "content": "Be\nbrief."}, {"role": "user", "content": "Q? brief."})
    asked = Question(Conversation(messages, (False, False)), row="")
    renderer = make_renderer(tokenizer_with(users), True)
    assert render(asked, renderer).findings == ("system_dropped",)


def test_a_template_that_rejects_a_row_gives_a_bad_row_with_its_message() -> None:
    refusing = "{{- raise_exception('only haiku are allowed') -}}"
    with pytest.raises(BadRow, match="the chat template rejects it: only haiku are allowed"):
        render(conversation("Q", "A"), make_renderer(tokenizer_with(refusing), True))


@pytest.mark.parametrize(
    "attack",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
    ],
)
def test_templates_run_in_a_sandbox(attack: str) -> None:
    with pytest.raises(BadRow, match="the chat template rejects it: "):
        render(conversation("Q", "A"), make_renderer(tokenizer_with(attack), True))


DOUBLED = "{%% set all = namespace(s='ab') %%}{%% for i in range(60) %%}{%% set all.s = %s %%}{%% endfor %%}{{ all.s }}"
FILTERED = "{%% for i in range(99999) %%}{%% set all = %s %%}{%% endfor %%}"
REFUSED = r"takes more time or memory than any conversation needs|nested too deeply"
LOOPS = "{% for a in range(9999) %}" * 3 + "{% endfor %}" * 3
LONG = "{%% set a = 'a' * 2 ** 24 %%}{%% set b = 'a' * 2 ** 24 %%}{%% for i in range(99999) %%}{%% set c = %s %%}{%% endfor %%}"


def test_a_filter_takes_its_arguments_by_name() -> None:
    template = "{{ 'a bcdef'|wordwrap(3, break_long_words=False) }}"
    renderer = make_renderer(tokenizer_with(template), True)
    assert apply_template(renderer, [{"role": "user", "content": "Q"}]) == "a\nbcdef"


def test_an_argument_is_charged_whatever_its_name() -> None:
    work = []
    for name in ("a", "_"):
        asked = "{{ ('{NAME}' * 64).format(NAME='x' * 2**20)|length }}".replace("NAME", name)
        template = template_sandbox.compile_template(asked)
        template.render()
        work.append(template.environment.work)
    assert work[0] == work[1]


@pytest.mark.parametrize(
    "endless",
    [
        "{{ 'a' * 10**10 }}",
        "{% set b = 'a' * -(10**15) %}{{ 'a' * 10**10 }}",
        "{% set b = 'a'|indent(-10**12) %}{{ 'a' * 10**10 }}",
        "{{ '%10000000000d' % 1 }}",
        "{{ '{:>{w}}'.format(1, w=10**10) }}",
        "{{ 'a'|center(10000000000) }}",
        "{{ 5.5|round(10**9, 'floor') }}",
        *(
            DOUBLED % each
            for each in ("all.s + all.s", "all.s ~ all.s", "all.s.replace('a', all.s)")
        ),
        *(DOUBLED % each for each in ("all.s|join(all.s)", "[all.s, all.s]")),
        "{% for a in range(99999) %}{% generation %}{{ 'a' * 10**6 }}{% endgeneration %}{% endfor %}",
        LOOPS,
        FILTERED % "range(99999)|list",
        FILTERED % "range(99999)|map('string')|map('length')|list",
        *(
            LONG % each
            for each in (
                "a[1:]",
                "a[::-1]",
                "'b' in a",
                "a == b",
                "a < b",
                "a ~ b",
                "a + b",
                "a is in b",
            )
        ),
        *(
            LONG % each
            for each in (
                "a.find('b')",
                "a|upper",
                "{a: 1}[b]",
                "[a] == [b]",
                "[b].index(a)",
                "['b']|select('in', a)|list",
            )
        ),
        "{% set all = namespace(s=[]) %}{% for i in range(9999) %}{% set all.s = all.s + ['a' * 10**6 ~ i] %}{% endfor %}",
        "{% set all = namespace(s=()) %}{% for i in range(60) %}{% set all.s = (all.s, all.s) %}{% endfor %}{{ {all.s: 1} }}",
        "{% set a = ['a' * 10**6] * 10**3 %}{% for i in range(99999) %}{% set b %}{{ a }}{% endset %}{% endfor %}",
        "{{ ('a.com ' * 10**5)|urlize(rel='a' * 10**5) }}",
        "{{ ('a' * 10**5).translate({97: 'a' * 10**5}) }}",
        "{{ (1).to_bytes(10**10, 'big') }}",
        "{{ ([[1]] * 10**6)|sum(start=[]) }}",
        "{{ strftime_now('%2000000000Y' ~ 'a' * 10**7) }}",
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    ],
)
@pytest.mark.parametrize("share", [4, pytest.param(1, marks=pytest.mark.slow)])
def test_a_template_that_would_take_all_time_or_memory_is_refused(
    endless: str, share: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a quarter of the work in a commit, and nightly with all of it."""
    monkeypatch.setattr(template_sandbox, "MAX_WORK", template_sandbox.MAX_WORK // share)
    with pytest.raises((BadRow, UserError), match=REFUSED):
        apply_template(
            make_renderer(tokenizer_with(endless), True), [{"role": "user", "content": "Q"}]
        )


def test_the_work_for_a_conversation_grows_with_its_length_alone() -> None:
    renderer = make_renderer(tokenizer_with(TEMPLATES["qwen"]), True)

    def count_calls(turns: int) -> int:
        document = conversation(*("ab" * turns))
        profile = cProfile.Profile()
        profile.runcall(render, document, renderer)
        return sum(entry.callcount for entry in profile.getstats())

    assert count_calls(400) < 2.2 * count_calls(200)


def test_a_template_that_is_not_jinja_is_reported_with_its_line() -> None:
    with pytest.raises(UserError, match="chat_template: line 2: not valid Jinja"):
        make_renderer(tokenizer_with("hello\n{% for %}"), True)


def test_markers_of_the_last_answer_alone_do_where_all_is_trained_on() -> None:
    template = (
        "{% for m in messages %}{{ m.role }}: {% if m.role == 'assistant' and loop.last %}"
        "{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}"
        "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    document = replace(conversation("Q", "A", "R", "B"), tools=({"type": "function"},))
    rendered = render(document, make_renderer(tokenizer_with(template), assistant_only=False))
    assert rendered.text == "user: Qassistant: Auser: Rassistant: B<|end|>"
    assert rendered.spans == ((0, len(rendered.text)),)
