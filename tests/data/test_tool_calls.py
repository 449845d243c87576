"""Tool calls: published ShareGPT sets, OpenAI's form, the templates that write calls, and reports of what is dropped."""

import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from transformers import AutoTokenizer

from finetune.cli import main
from finetune.config.schema import DatasetSource
from finetune.data.formats import Conversation, Steps, parse_row
from finetune.data.messages import BadRow
from finetune.data.render import render
from finetune.data.sources import read_file
from finetune.data.tokenizer import TEMPLATES, make_renderer
from finetune.errors import EXIT_USER_ERROR
from tests.data.test_chat import conversation, tokenizer_with
from tests.ranks import ROOT, run_python

SOURCE = DatasetSource(path="calls.jsonl")
SCHEMA = {
    "name": "weather",
    "description": "The weather.",
    "parameters": {"type": "object", "properties": {}},
}
TOOL = {"type": "function", "function": SCHEMA}
ARGUMENTS = {"city": "Köln", "days": 2}
CALL = {"type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}}
ASKED = {"role": "user", "content": "Weather?"}
CALLED = {"role": "assistant", "content": "", "tool_calls": [CALL]}
ANSWERED = [{"role": "tool", "content": "rain"}, {"role": "assistant", "content": "It rains."}]
WITH_TOOLS = ("chatml", "hermes", "qwen", "llama3.1", "mistral")


def turn(role: str, value: Any) -> dict[str, Any]:
    return {"from": role, "value": value}


def document(row: dict[str, Any]) -> Conversation:
    found = parse_row(row, SOURCE).document
    assert isinstance(found, Conversation)
    return found


@pytest.mark.parametrize(
    "row",
    [
        {  # ShareGPT, calls, arguments and schemas as JSON text
            "conversations": [
                turn("human", "Weather?"),
                turn(
                    "function_call",
                    json.dumps({"name": "weather", "arguments": json.dumps(ARGUMENTS)}),
                ),
                turn("observation", "rain"),
                turn("gpt", "It rains."),
            ],
            "tools": json.dumps([SCHEMA]),
        },
        {  # the calls as a list, the roles by other names
            "conversations": [
                turn("user", "Weather?"),
                turn("tool_call", [{"name": "weather", "arguments": ARGUMENTS}]),
                turn("tool", "rain"),
                turn("assistant", "It rains."),
            ],
            "tools": [json.dumps(TOOL)],
        },
        {  # OpenAI's: arguments as text, content null
            "messages": [
                ASKED,
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [
                        {
                            "type": "function",
                            "function": {"name": "weather", "arguments": json.dumps(ARGUMENTS)},
                        }
                    ],
                },
                *ANSWERED,
            ],
            "tools": [TOOL],
        },
        {  # OpenAI's older form
            "messages": [
                ASKED,
                {
                    "role": "assistant",
                    "content": None,
                    "function_call": {"name": "weather", "arguments": json.dumps(ARGUMENTS)},
                },
                {"role": "function", "content": "rain"},
                ANSWERED[1],
            ],
            "tools": [TOOL],
        },
    ],
)
def test_calls_in_every_form_are_the_same_conversation(row: dict[str, Any]) -> None:
    read = document(row)
    assert list(read.messages) == [ASKED, CALLED, *ANSWERED]
    assert read.trained == (False, True, False, True)
    assert read.tools == (TOOL,)


@pytest.mark.parametrize("role", ["system", "developer"])
def test_tools_of_the_first_messages_are_those_of_a_column(role: str) -> None:
    """Beside a column `system` too, which is no second message if the first one has its text."""
    first = {"role": role, "content": "Be brief.", "tools": [TOOL]}
    turns = [ASKED, CALLED, *ANSWERED]
    read = document({"messages": [first, *turns], "system": "Be brief."})
    front = [] if role == "system" else [{"role": "system", "content": "Be brief."}]
    plain = [*front, {"role": role, "content": "Be brief."}, *turns]
    assert read == document({"messages": plain, "tools": [TOOL]})
    other = {**SCHEMA, "name": "time"}
    with pytest.raises(BadRow, match="describe different tools"):
        document({"messages": [first, *turns], "tools": [other]})


@pytest.mark.parametrize("nothing", ["[]", "", None, [], "null"])
def test_empty_tools_are_no_tools(nothing: Any) -> None:
    row = {"conversations": [turn("human", "Hi"), turn("gpt", "Hello")], "tools": nothing}
    assert document(row).tools == ()


def test_tools_without_names_are_no_schemas() -> None:
    row = {"messages": [ASKED, ANSWERED[1]], "tools": {"weather": {"parameters": {}}}}
    with pytest.raises(
        BadRow, match="tools: a list of JSON schemas, each with its name, is expected"
    ):
        document(row)


def test_calls_that_nothing_describes_are_a_finding() -> None:
    chatml = make_renderer(tokenizer_with(TEMPLATES["chatml"]), True)
    turns = [ASKED, CALLED, *ANSWERED]
    for tools, found in (("", True), ([TOOL], False)):
        assert (
            "calls_without_tools"
            in render(document({"messages": turns, "tools": tools}), chatml).findings
        ) == found
    system = {"role": "system", "content": "You may call weather(city, days)."}
    assert (
        "calls_without_tools"
        not in render(document({"messages": [system, *turns]}), chatml).findings
    )


def test_text_and_the_calls_that_follow_it_are_one_message() -> None:
    call = json.dumps({"name": "weather", "arguments": {"city": "Köln"}})
    turns = [turn("human", "Weather?"), turn("gpt", "Let me see."), turn("function_call", call), turn("function_call", call)]  # fmt: skip
    read = document(
        {"conversations": [*turns, turn("observation", "rain"), turn("gpt", "It rains.")]}
    )
    assert [(m["role"], m["content"], len(m.get("tool_calls", ()))) for m in read.messages] == [
        ("user", "Weather?", 0),
        ("assistant", "Let me see.", 2),
        ("tool", "rain", 0),
        ("assistant", "It rains.", 0),
    ]
    assert read.trained == (False, True, False, True)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (
            "weather(Köln)",
            "message 2: a tool call {name, arguments} is expected, found 'weather(Köln)' (str)",
        ),
        ("", "message 2: function_call: JSON of {name, arguments} is expected, found nothing"),
        ('{"arguments": {}}', "message 2: a tool call {name, arguments} is expected"),
        (
            '{"name": "weather", "arguments": "Köln"}',
            "message 2: tool call weather: arguments: a JSON object is expected, found 'Köln' (str)",
        ),
        (
            '{"name": "weather", "arguments": [1]}',
            "message 2: tool call weather: arguments: a JSON object is expected",
        ),
        ("[" * 100_000, "message 2: a tool call {name, arguments} is expected"),
    ],
)
def test_an_unreadable_call_is_rejected_with_the_reason(value: str, words: str) -> None:
    with pytest.raises(BadRow) as problem:
        document({"conversations": [turn("human", "Weather?"), turn("function_call", value)]})
    assert words in str(problem.value)


@pytest.mark.parametrize(
    "call",
    [
        {"name": "weather", "id": None, "type": None},
        {"function": {"name": "weather"}, "id": None, "type": None},
        {"function": {"name": "weather", "arguments": None}},
    ],
)
def test_a_call_without_arguments_is_the_same_in_every_form(call: dict[str, Any]) -> None:
    """A template that writes a whole call would write its nulls too."""
    asking = {"role": "assistant", "content": "", "tool_calls": [call]}
    (message,) = document({"messages": [ASKED, asking]}).messages[1:]
    wanted = {"type": "function", "function": {"name": "weather", "arguments": {}}}
    assert message["tool_calls"] == [wanted]


# What each family documents: (how it describes the tools, a call and its end, what a tool answered).
JSON_TOOL, JSON_CALL = (
    json.dumps(TOOL),
    '{"name": "weather", "arguments": {"city": "Köln", "days": 2}}',
)
IN_TAGS = f"<tool_call>\n{JSON_CALL}\n</tool_call><|im_end|>"
DOCUMENTED = {
    "chatml": (
        f"<tools>\n{JSON_TOOL}\n</tools>",
        IN_TAGS,
        "<|im_start|>user\n<tool_response>\nrain\n</tool_response>",
    ),
    "qwen": (
        "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.\n\n# Tools\n\nYou may"
        " call one or more functions to assist with the user query.\n\nYou are provided with function signatures within"
        f" <tools></tools> XML tags:\n<tools>\n{JSON_TOOL}\n</tools>",
        IN_TAGS,
        "<|im_start|>user\n<tool_response>\nrain\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
    ),
    "hermes": (
        "You are a function calling AI model. You are provided with function signatures within <tools></tools> XML tags."
        " You may call one or more functions to assist with the user query. Don't make assumptions about what values to"
        f" plug into functions. Here are the available tools: <tools> {JSON_TOOL} </tools>",
        IN_TAGS,
        "<|im_start|>tool\n<tool_response>\nrain\n</tool_response>\n<|im_end|>\n",
    ),
    "llama3.1": (
        "Environment: ipython\nCutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nGiven the following functions, please respond with a JSON for a"
        " function call with its proper arguments that best answers the given prompt.\n\nRespond in the format"
        ' {"name": function name, "parameters": dictionary of argument name and its value}.Do not use variables.\n\n'
        f"{json.dumps(TOOL, indent=4)}\n\nWeather?<|eot_id|>",
        '{"name": "weather", "parameters": {"city": "Köln", "days": 2}}<|eot_id|>',
        '<|start_header_id|>ipython<|end_header_id|>\n\n"rain"<|eot_id|>',
    ),
    "mistral": (
        f"[AVAILABLE_TOOLS] [{JSON_TOOL}][/AVAILABLE_TOOLS][INST] Weather?[/INST][TOOL_CALLS]",
        f"[TOOL_CALLS] [{JSON_CALL}]<|end|>",
        '[TOOL_RESULTS] {"content": "rain"}[/TOOL_RESULTS] It rains.',
    ),
}


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_a_named_template_writes_tools_as_its_family_documents_them(name: str) -> None:
    read = document({"messages": [ASKED, CALLED, *ANSWERED], "tools": [TOOL]})
    rendered = render(read, make_renderer(tokenizer_with(TEMPLATES[name]), True))
    tools, call, answer = DOCUMENTED[name]
    assert tools in rendered.text and answer in rendered.text
    said = [rendered.text[start:end] for start, end in rendered.spans]
    assert said[0] == call
    assert len(said) == 2 and "It rains." in said[1]
    assert not {r for r in rendered.findings if "dropped" in r}


def test_mistral_writes_the_datas_ids_and_puts_tools_before_the_last_question() -> None:
    called = {**CALLED, "tool_calls": [{**CALL, "id": "a1b2c3d4e"}]}
    answered = [
        {**ANSWERED[0], "content": '{"sky": "rain"}', "tool_call_id": "a1b2c3d4e"},
        ANSWERED[1],
    ]
    read = document({"messages": [ASKED, called, *answered, {"role": "user", "content": "And now?"}, called, *answered], "tools": [TOOL]})  # fmt: skip
    rendered = render(read, make_renderer(tokenizer_with(TEMPLATES["mistral"]), True))
    assert rendered.text.count("[AVAILABLE_TOOLS]") == 1
    assert "[/AVAILABLE_TOOLS][INST] And now?[/INST]" in rendered.text
    assert (
        '[TOOL_RESULTS] {"content": {"sky": "rain"}, "call_id": "a1b2c3d4e"}[/TOOL_RESULTS]'
        in rendered.text
    )
    said = [rendered.text[start:end] for start, end in rendered.spans]
    with_id = JSON_CALL.removesuffix("}") + ', "id": "a1b2c3d4e"}'
    assert said == [f"[TOOL_CALLS] [{with_id}]<|end|>", " It rains.<|end|>"] * 2


@pytest.mark.parametrize("name", ["plain", "llama3", "gemma"])
def test_tools_that_a_template_drops_are_reported(name: str) -> None:
    renderer = make_renderer(tokenizer_with(TEMPLATES[name]), True)
    both = render(
        document({"messages": [ASKED, CALLED, *ANSWERED], "tools": [TOOL]}), renderer
    ).findings
    assert {"tool_calls_dropped", "tools_dropped"} <= set(both)
    given = render(
        document({"messages": [ASKED, {**CALLED, "train": False}, *ANSWERED]}), renderer
    ).findings
    assert "tools_dropped" in given and "tool_calls_dropped" not in given
    schemas = render(
        document({"messages": [ASKED, ANSWERED[1]], "tools": [TOOL]}), renderer
    ).findings
    assert "tools_dropped" in schemas


def test_a_call_is_missed_whose_name_is_a_part_of_a_template_word() -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    called = {"role": "assistant", "content": "Of a kind.", "tool_calls": [call]}
    dropping = make_renderer(tokenizer_with(TEMPLATES["llama3"]), True)
    assert (
        "tool_calls_dropped" in render(document({"messages": [ASKED, called]}), dropping).findings
    )
    writing = make_renderer(tokenizer_with(TEMPLATES["qwen"]), True)
    assert (
        "tool_calls_dropped"
        not in render(document({"messages": [ASKED, called]}), writing).findings
    )


def test_llama_3_drops_calls_and_the_named_template_writes_them_with_its_tokens(
    shared: Path,
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(shared / "tokenizers" / "llama3")
    read = document({"messages": [ASKED, CALLED, *ANSWERED], "tools": [TOOL]})
    assert {"tool_calls_dropped", "tools_dropped"} <= set(
        render(read, make_renderer(tokenizer, True)).findings
    )
    tokenizer.chat_template = TEMPLATES["llama3.1"]
    rendered = render(read, make_renderer(tokenizer, True))
    assert rendered.findings == ()
    assert rendered.text == tokenizer.apply_chat_template(
        [ASKED, CALLED, *ANSWERED], tools=[TOOL], tokenize=False
    )
    assert [rendered.text[start:end] for start, end in rendered.spans] == [
        '{"name": "weather", "parameters": {"city": "Köln", "days": 2}}<|eot_id|>',
        "It rains.<|eot_id|>",
    ]


def test_dropped_text_beside_a_call_dropped_reasoning_and_empty_answers_are_reported() -> None:
    silent = TEMPLATES["chatml"].replace(
        "+ message['content'] -}}\n        {%- for call", "-}}\n        {%- for call"
    )
    beside = document(
        {"messages": [ASKED, {**CALLED, "content": "Let me see."}, *ANSWERED], "tools": [TOOL]}
    )
    assert (
        "assistant_dropped" in render(beside, make_renderer(tokenizer_with(silent), True)).findings
    )
    chatml = make_renderer(tokenizer_with(TEMPLATES["chatml"]), True)
    assert "assistant_dropped" not in render(beside, chatml).findings
    reasoned = document({"messages": [ASKED, {**ANSWERED[1], "reasoning_content": "Clouds."}]})
    assert "reasoning_dropped" in render(reasoned, chatml).findings
    shown = TEMPLATES["chatml"].replace("message['content'] + '<|im_end|>", "message['reasoning_content'] | default('') + message['content'] + '<|im_end|>")  # fmt: skip
    assert (
        "reasoning_dropped"
        not in render(reasoned, make_renderer(tokenizer_with(shown), True)).findings
    )
    both = document(
        {
            "messages": [
                ASKED,
                {**ANSWERED[1], "content": "<think>Clouds.</think>Yes", "thinking": "Clouds."},
            ]
        }
    )
    assert not {"reasoning_dropped", "reasoning_twice"} & {*render(both, chatml).findings}
    for name in (
        "qwen3",
        "qwen3.5",
        "glm4.5",
        "nemotron3",
        "kimi-k2-thinking",
        "gemma4",
        "gpt-oss",
    ):
        renderer = make_renderer(tokenizer_with(TEMPLATES[name]), True)
        twice = render(both, renderer)
        assert "reasoning_twice" in twice.findings and twice.text.count("Clouds.") == 2
        for once in ({"content": "<think>Clouds.</think>Yes"}, {"thinking": "Clouds."}):
            reasoned = document({"messages": [ASKED, {**ANSWERED[1], **once}]})
            assert "reasoning_twice" not in render(reasoned, renderer).findings
    assert "empty_answer" in render(conversation("Q", " "), chatml).findings
    assert "empty_answer" not in render(conversation("Q", "A"), chatml).findings


def sharegpt_rows(count: int) -> list[dict[str, Any]]:
    """A set as it is published: calls, arguments and schemas as JSON text, some rows without tools."""
    rows = []
    for i in range(count):
        asked = [turn("human", f"Weather in city {i}?")]
        if i % 4 == 3:
            rows.append(
                {"conversations": [*asked, turn("gpt", f"I cannot know {i}.")], "tools": "[]"}
            )
            continue
        call = {"name": "weather", "arguments": {"city": f"city {i}", "days": i}}
        turns = [
            *asked,
            turn("function_call", json.dumps(call)),
            turn("observation", json.dumps({"sky": "rain"})),
            turn("gpt", f"It rains in city {i}."),
        ]
        rows.append(
            {"conversations": turns, "tools": json.dumps([SCHEMA]), "system": "Be brief.", "id": i}
        )
    return rows


def openai_form(i: int) -> tuple[list[dict[str, Any]], list[Any] | None]:
    """(messages, tools) of row `i` of `sharegpt_rows`, written down a second time as transformers takes them."""
    asked = {"role": "user", "content": f"Weather in city {i}?"}
    if i % 4 == 3:
        return [asked, {"role": "assistant", "content": f"I cannot know {i}."}], None
    function = {"name": "weather", "arguments": {"city": f"city {i}", "days": i}}
    return [
        {"role": "system", "content": "Be brief."},
        asked,
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": function}],
        },
        {"role": "tool", "content": '{"sky": "rain"}'},
        {"role": "assistant", "content": f"It rains in city {i}."},
    ], [TOOL]


def answers_by_prefix(tokenizer: Any, messages: list[dict[str, Any]], tools: Any) -> list[str]:
    """What the template adds for each assistant turn, by transformers' own rendering alone."""

    def text(count: int, prompt: bool) -> str:
        return str(
            tokenizer.apply_chat_template(
                messages[:count], tools=tools, tokenize=False, add_generation_prompt=prompt
            )
        )  # fmt: skip

    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    return [text(i + 1, False).removeprefix(text(i, True)).rstrip("\n") for i in turns]


def test_a_published_set_of_tool_calls_is_inspected_masked_and_trained_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    tokenizer = tokenizer_with(TEMPLATES["chatml"])
    Path("calls.json").write_text(json.dumps(sharegpt_rows(12)))
    tokenizer.save_pretrained("tokenizer")
    recipe = {
        "model_config": {
            "model_type": "llama",
            "vocab_size": len(tokenizer),
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
        },
        "tokenizer_name_or_path": "tokenizer",
        "chat_template": "llama3",
        "datasets": [{"path": "calls.json"}],
        "dataset_cache_dir": "cache",
        "max_length": 2048,
    }
    Path("recipe.yaml").write_text(yaml.safe_dump(recipe))
    assert main(["inspect", "--recipe", "recipe.yaml", "--rows", "0"]) == EXIT_USER_ERROR
    said = capsys.readouterr().out
    assert "fatal: tool_calls_dropped: in 9 of 12 rows the chat template drops tool calls" in said
    assert "warning: tools_dropped: in 9 of 12 rows" in said
    assert "unused columns: id (9 rows)" in said

    Path("recipe.yaml").write_text(yaml.safe_dump({**recipe, "chat_template": "chatml"}))
    assert main(["inspect", "--recipe", "recipe.yaml", "--rows", "12", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["report"]["sources"][0]["unused_columns"] == {"id": 9}
    for i, row in enumerate(found["rows"]):
        messages, tools = openai_form(i)
        text = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
        assert "".join(token["text"] for token in row["tokens"]) == text
        masked = "".join(token["text"] if token["trained"] else "\0" for token in row["tokens"])
        assert [part for part in masked.split("\0") if part] == answers_by_prefix(
            tokenizer, messages, tools
        )

    extra = [
        "max_steps=2",
        "logging_steps=1",
        "export_at_end=false",
        "output_dir=run",
        "chat_template=chatml",
    ]
    finished = run_python(
        [str(ROOT / "finetune/run.py"), "--config", "single", "--recipe", "recipe.yaml", *extra],
        timeout=300,
        cwd=tmp_path,
    )
    assert finished.returncode == 0, finished.stderr[-3000:]
    lines = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == [1, 2]
    report = json.loads(Path("run/data_report.json").read_text())
    assert report["sources"][0]["unused_columns"] == {"id": 9}


def test_forms_of_calls_results_and_schemas_are_read_alike() -> None:
    """gpt-oss's channels, several calls in a turn, results as objects, schemas in the system message."""
    schema = {"type": "function", "function": {"name": "weather", "parameters": {}}}
    calls = [{"name": "weather", "arguments": {"city": city}} for city in ("Oslo", "Bergen")]
    system, result = {"role": "system", "content": "Be brief."}, {"rain": True, "mm": [1, "ø"]}
    wanted = document(
        {
            "tools": [schema],
            "messages": [
                system,
                ASKED,
                {
                    "role": "assistant",
                    "content": "",
                    "reasoning_content": "Both.",
                    "tool_calls": calls,
                },
                {"role": "tool", "content": '{"rain": true, "mm": [1, "ø"]}'},
                {"role": "tool", "content": "[]"},
                {"role": "assistant", "content": "Rain.", "reasoning_content": "So."},
            ],
        }
    )
    channels = [
        {**system, "tools": [schema]},
        ASKED,
        {"role": "assistant", "channel": "analysis", "content": "Both."},
        {"role": "assistant", "channel": "commentary", "content": "", "tool_calls": calls},
        {"role": "tool", "content": result},
        {"role": "tool", "content": []},
        {"role": "assistant", "channel": "analysis", "content": "So."},
        {"role": "assistant", "channel": "final", "content": "Rain."},
    ]
    read = document({"messages": channels})
    assert (read.messages, read.tools, read.trained) == (
        wanted.messages,
        wanted.tools,
        wanted.trained,
    )
    called = {
        "role": "assistant",
        "channel": "commentary",
        "recipient": "functions.weather",
        "content": '{"city": "Oslo"}',
    }
    (message,) = document({"messages": [ASKED, called]}).messages[1:]
    assert message == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": calls[0]}],
    }


@pytest.mark.parametrize("recipient", ["browser.search", "python"])
def test_no_call_of_a_built_in_tool_is_trained_as_an_answer(recipient: str) -> None:
    """OpenAI's own renderer writes it to its recipient, which no chat template does."""
    called = {"role": "assistant", "channel": "commentary", "content": "1 + 1"}
    with pytest.raises(BadRow, match=rf"message 2: recipient: '{recipient}': functions\.NAME is"):
        document({"messages": [ASKED, {**called, "recipient": recipient}]})
    (answer,) = document({"messages": [ASKED, {**called, "recipient": "all"}]}).messages[1:]
    assert answer == {"role": "assistant", "content": "1 + 1"}


@pytest.mark.parametrize(
    "following",
    [
        {"role": "assistant", "channel": "analysis", "content": "So."},
        {"role": "assistant", "content": "Rain.", "reasoning_content": "So."},
    ],
)
def test_no_thought_before_another_is_lost(following: dict[str, Any]) -> None:
    thought = {"role": "assistant", "channel": "analysis", "content": "Both."}
    answer = {"role": "assistant", "channel": "final", "content": "Rain."}
    with pytest.raises(BadRow, match="message 3: roles out of order: two assistant turns in a row"):
        document({"messages": [ASKED, thought, following, answer]})


@pytest.mark.parametrize("following", [[], [ASKED, {"role": "assistant", "content": "Rain."}]])
def test_no_thought_is_trained_as_an_answer(following: list[dict[str, Any]]) -> None:
    thought = {"role": "assistant", "channel": "analysis", "content": "Both."}
    with pytest.raises(BadRow, match=r"an analysis turn is followed by no answer or call: 'Both.'"):
        document({"messages": [ASKED, thought, *following]})


def assistant(content: Any = "5", **keys: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **keys}


SHORT_CALL = {"name": "f", "arguments": {"a": 1}}
# what one message cannot hold -> what the row's error says
TWO_IN_ONE: dict[str, tuple[list[dict[str, Any]], str]] = {
    "two thoughts": (
        [assistant([{"type": "thinking", "thinking": "one"}], reasoning_content="other")],
        "message 2: its reasoning stands in reasoning_content and parts of type thinking",
    ),
    "two keys of thoughts": (
        [assistant(reasoning_content="a", thinking="b")],
        "message 2: its reasoning stands in reasoning_content and thinking",
    ),
    "a thought that is no text": (
        [assistant(reasoning_content=7)],
        "message 2: reasoning_content: a text is expected, found 7",
    ),
    "two keys of calls": (
        [assistant("", tool_calls=[SHORT_CALL], function_call=SHORT_CALL | {"name": "g"})],
        "message 2: has tool_calls and function_call; keep one",
    ),
    "a key twice in arguments": (
        [assistant("", tool_calls=[SHORT_CALL | {"arguments": '{"a": 1, "a": 2}'}])],
        "two keys are named 'a'; keep one",
    ),
    "an infinite argument": (
        [assistant("", tool_calls=[SHORT_CALL | {"arguments": '{"a": 1e400}'}])],
        "tool call f: arguments: a number that is not finite",
    ),
    "a call that is not trained": (
        [assistant("", tool_calls=[SHORT_CALL | {"train": False}])],
        "message 2: a tool call with train or weight",
    ),
    "train and weight": (
        [assistant(train=True, weight=0)],
        "message 2: train and weight say the opposite; keep one",
    ),
    "a masked thought": (
        [assistant("So.", channel="analysis", weight=0), assistant(channel="final", weight=1)],
        "message 3: it and the turn before are one message, which is trained as a whole",
    ),
    "a masked call": (
        [assistant(), {"role": "function_call", "content": json.dumps(SHORT_CALL), "train": False}],
        "message 3: it and the turn before are one message, which is trained as a whole",
    ),
    "a thought with a thought": (
        [assistant("So.", channel="analysis", reasoning_content="other"), assistant()],
        "message 3: roles out of order: two assistant turns in a row",
    ),
}


@pytest.mark.parametrize("name", TWO_IN_ONE)
def test_what_one_message_cannot_hold_is_a_damaged_row(name: str) -> None:
    turns, problem = TWO_IN_ONE[name]
    with pytest.raises(BadRow, match=re.escape(problem)):
        document({"messages": [ASKED, *turns]})


def test_the_same_thought_under_two_names_is_one() -> None:
    row = {"messages": [ASKED, assistant(reasoning_content="a", reasoning="a")]}
    assert document(row).messages[1]["reasoning_content"] == "a"


@pytest.mark.parametrize(
    ("content", "lost"),
    [
        ("<think>\none\n</think>\n\n5", None),
        ("one\n</think>\n\n5", None),
        ("abc<think>\ntwo\n</think>\n\n5", "assistant_dropped"),
        ("<think>one</think><think>two</think>5", "reasoning_dropped"),
    ],
)
def test_words_before_a_thought_and_a_second_thought_are_missed(
    content: str, lost: str | None
) -> None:
    """Qwen3's template writes the first thought, and what follows the last one."""
    renderer = make_renderer(tokenizer_with(TEMPLATES["qwen3"]), True)
    row = document({"messages": [ASKED, assistant(content)]})
    dropped = {"assistant_dropped", "reasoning_dropped"} & set(render(row, renderer).findings)
    assert dropped == ({lost} if lost else set())


@pytest.mark.parametrize(("step", "is_typed"), [("a", False), ("a<|end|>", True)])
def test_a_special_token_in_a_step_is_found(step: str, is_typed: bool) -> None:
    steps = Steps("2+2?", (step, "4"), (1, 1), "\n")
    renderer = make_renderer(tokenizer_with(TEMPLATES["chatml"]), True)
    assert render(steps, renderer).findings == (("typed_special_token",) if is_typed else ())


def test_a_users_channel_is_no_thought() -> None:
    row = {"messages": [{**ASKED, "channel": "analysis"}, assistant()]}
    assert [message["role"] for message in document(row).messages] == ["user", "assistant"]


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_keys_that_arrow_added_are_not_trained_on(kind: str, tmp_path: Path) -> None:
    def schema(name: str, **properties: Any) -> dict[str, Any]:
        return {
            "type": "function",
            "function": {"name": name, "parameters": {"properties": properties}},
        }

    def call(name: str, **arguments: Any) -> dict[str, Any]:
        return {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"function": {"name": name, "arguments": arguments}}],
        }

    rows = [
        {
            "messages": [ASKED, call("weather", city="Oslo")],
            "tools": [schema("weather", city={"type": "string", "enum": ["Oslo"]})],
            "system": "Be brief.",
        },
        {
            "messages": [ASKED, call("train", start="Oslo", end="Bergen")],
            "tools": [schema("train", start={"type": "string"}, end={"type": "string"})],
            "system": None,
        },
    ]
    table = pa.Table.from_pylist(rows)
    assert set(table.to_pylist()[0]["messages"][1]["tool_calls"][0]["function"]["arguments"]) == {
        "city",
        "start",
        "end",
    }
    file = tmp_path / f"calls.{kind}"
    if kind == "parquet":
        pq.write_table(table, file)
    else:
        with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
    for (_, found), row in zip(read_file(str(file)), rows, strict=True):
        read, wanted = document(found), document(row)
        assert (read.messages, read.tools) == (wanted.messages, wanted.tools)
        rendered = render(read, make_renderer(tokenizer_with(TEMPLATES["chatml"]), True))
        assert "null" not in rendered.text.lower() and "none" not in rendered.text.lower()
