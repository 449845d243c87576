"""Tools: which templates can write and whose calls are read, what follows a result, and what a tool's process does."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from finetune.config.methods import RolloutKeys
from finetune.config.reader import read_recipe
from finetune.data.messages import describe_tool
from finetune.data.tokenizer import load_tokenizer
from finetune.data.tool_calls import ToolTurns, make_tool_turns
from finetune.distributed.world import RankGroup
from finetune.errors import UserError
from finetune.rollout.engine import Ended, Request, Sampled
from finetune.rollout.rewards import Rewards
from finetune.rollout.shipped_rewards import thinks_first
from finetune.rollout.turns import Conversations, take_turns
from tests.conftest import make_tokenizer

FILE = '''
import os
import sys
import time


def double(number: int) -> int:
    """Doubles a number.

    Args:
        number: What to double.
    """
    print("no answer")
    return 2 * number


async def later(number: int) -> str:
    """Doubles a number.

    Args:
        number: What to double.
    """
    return f"{2 * number} \\ud83d"


def fails(number: int) -> int:
    """Fails.

    Args:
        number: Whatever.
    """
    return 1 // (number - number)


def leaves() -> int:
    """Leaves."""
    sys.exit("gone")


def hangs() -> int:
    """Hangs."""
    time.sleep(9)


def dies() -> int:
    """Dies."""
    os._exit(3)


def without_hints(number):
    return number
'''
ENDS = ("<|im_end|>", "<|eot_id|>", "<|eot|>", "<|observation|>", "<|end_of_text|>", "</s>")
WRITTEN = {
    "qwen": '<tool_call>\n{"name": "double", "arguments": {"number": 4}}\n</tool_call><|im_end|>',
    "qwen3": '<think>\nHm.\n</think>\n\nI ask.\n<tool_call>\n{"name": "double", "arguments": {"number": 4}}\n</tool_call><|im_end|>',
    "qwen3.5": "Hm.\n</think>\n\n<tool_call>\n<function=double>\n<parameter=number>\n4\n</parameter>\n</function>\n</tool_call><|im_end|>",
    "hermes": '<tool_call>\n{"name": "double", "arguments": {"number": 4}}\n</tool_call>\n<tool_call>\n{"name": "later", "arguments": {"number": 5}}\n</tool_call><|im_end|>',
    "llama3.1": '{"name": "double", "parameters": {"number": 4}}<|eot_id|>',
    "glm4.5": "\n<think>Hm.</think>\n<tool_call>double\n<arg_key>number</arg_key>\n<arg_value>4</arg_value>\n</tool_call><|observation|>",
}  # fmt: skip
AFTER = {
    "qwen": "\n<|im_start|>user\n<tool_response>\n8\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
    "qwen3": "\n<|im_start|>user\n<tool_response>\n8\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
    "qwen3.5": "\n<|im_start|>user\n<tool_response>\n8\n</tool_response><|im_end|>\n<|im_start|>assistant\n<think>\n",
    "hermes": "\n<|im_start|>tool\n<tool_response>\n8\n</tool_response>\n<|im_end|>\n<|im_start|>assistant\n",
    "llama3.1": '<|start_header_id|>ipython<|end_header_id|>\n\n"8"<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n',
    "glm4.5": "\n<tool_response>\n8\n</tool_response><|assistant|>",
}


def make_turns(tmp_path: Path, template: str, *names: str, **changes: Any) -> tuple[Any, ToolTurns]:
    """The tokenizer with these tools, and their turns under a chat template."""
    (tmp_path / "my_tools.py").write_text(FILE)
    make_tokenizer().save_pretrained(tmp_path)
    tools = [f"{tmp_path / 'my_tools.py'}:{name}" for name in names or ("double", "later")]
    keys = {
        "model_name_or_path": str(tmp_path),
        "method": "grpo",
        "rewards": ["length"],
        "tools": tools,
    }
    keys |= {
        "chat_template": template,
        "added_tokens": ENDS,
        "eot_tokens": ENDS,
        "datasets": [{"path": "a/b"}],
    } | changes
    recipe = read_recipe(None, [f"{key}={json.dumps(value)}" for key, value in keys.items()])
    tokenizer = load_tokenizer(recipe.model, recipe.data, recipe.rollout.tools)
    return tokenizer, make_tool_turns(recipe, tokenizer)


@pytest.mark.parametrize("template", WRITTEN)
def test_calls_are_read_as_each_template_writes_them(template: str, tmp_path: Path) -> None:
    tokenizer, turns = make_turns(tmp_path, template)

    def read(text: str) -> Any:
        return turns.read(tokenizer.encode(text, add_special_tokens=False), {})

    message = read(WRITTEN[template])
    calls = [
        (call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]
    ]
    assert calls == [("double", {"number": 4})] + [("later", {"number": 5})] * (
        template == "hermes"
    )
    assert message["content"] == ("I ask." if template == "qwen3" else "")
    assert message.get("reasoning_content") == ("Hm." if "Hm." in WRITTEN[template] else None)
    end = WRITTEN[template].rpartition("<|")[1] + WRITTEN[template].rpartition("<|")[2]
    assert (
        read(f"It is 8.{end}")["content"] == "It is 8." or template == "qwen3.5"
    )  # whose prompt opens the thoughts
    assert "tool_calls" not in read(f'<tool_call>\n{{"name": "double", "arguments": {{"num{end}')
    given = turns.encode_results([{"role": "tool", "name": "double", "content": "8"}], {})
    assert tokenizer.decode(given) == AFTER[template]


def test_a_thought_that_does_not_end_is_no_reasoning(tmp_path: Path) -> None:
    tokenizer, turns = make_turns(tmp_path, "qwen3")
    for text, reward in (
        ("<think>\nHm.\n</think>\n\n8<|im_end|>", 1.0),
        ("<think>\nHm.<|im_end|>", 0.0),
        ("<think>Hm.", 0.0),
    ):
        message = turns.read(tokenizer.encode(text, add_special_tokens=False), {})
        assert thinks_first([[message]]) == [reward] and ("reasoning_content" in message) == bool(
            reward
        )


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_has_one_name_whatever_a_response_template_calls_it(
    key: str, tmp_path: Path
) -> None:
    """The field is transformers' own, which templates of models write in three ways."""
    tokenizer, turns = make_turns(tmp_path, "qwen3")
    fields = dict(turns.response_template["fields"])
    fields[key] = fields.pop("reasoning_content")
    renamed = replace(turns, response_template={**turns.response_template, "fields": fields})
    text = "<think>\nHm.\n</think>\n\n8<|im_end|>"
    message = renamed.read(tokenizer.encode(text, add_special_tokens=False), {})
    assert message == {"role": "assistant", "reasoning_content": "Hm.", "content": "8"}
    assert thinks_first([[message]]) == [1.0]


def test_a_tool_is_called_by_the_name_that_the_recipe_gives_it(tmp_path: Path) -> None:
    (tmp_path / "my_tools.py").write_text(FILE + "\n\ntwice = double\n")
    name = f"{tmp_path / 'my_tools.py'}:twice"
    assert describe_tool(name)["function"]["name"] == "twice"
    tools = Rewards(RolloutKeys(tools=(name,)))
    try:
        assert tools.call_tools([{"name": "twice", "arguments": {"number": 4}}]) == [("8", False)]
    finally:
        tools.close()


def test_a_row_decides_what_else_the_template_reads(tmp_path: Path) -> None:
    tokenizer, turns = make_turns(tmp_path, "qwen3")
    said = [{"role": "tool", "name": "double", "content": "8"}]
    plain, unthinking = (
        turns.encode_results(said, row) for row in ({}, {"variables": {"enable_thinking": False}})
    )
    assert tokenizer.decode(unthinking) == tokenizer.decode(plain) + "<think>\n\n</think>\n\n"


def test_results_that_a_template_rejects_are_one_sentence(tmp_path: Path) -> None:
    _, turns = make_turns(tmp_path, "qwen")
    rejects = (
        "{% if variant == 'b' %}{{ raise_exception('no results in b') }}{% endif %}"
        + turns.renderer.template
    )
    strict = replace(turns, renderer=replace(turns.renderer, template=rejects))
    said = [{"role": "tool", "name": "double", "content": "8"}]
    assert strict.encode_results(said, {}) == turns.encode_results(said, {})
    with pytest.raises(
        UserError,
        match=r"^tools: the results of the prompt 'What is 2\?': .*no results in b; change",
    ):
        strict.encode_results(said, {"prompt": "What is 2?", "variables": {"variant": "b"}})


REFUSED = {
    "llama3": "does not describe them to the model",
    "deepseek-v3.1": "no way is known to read a call of this chat template",
    "{{ messages[0]['content'] }}{{ tools }}{% if messages | length > 1 %}{% for call in messages[1]['tool_calls'] or [] %}"
    "<tool_call>{{ call['function'] | tojson }}</tool_call>{% endfor %}{% endif %}": "no token at which generation stops",
}


@pytest.mark.parametrize("template", REFUSED)
def test_a_template_that_has_no_tools_is_refused(template: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=REFUSED[template]) as caught:
        make_turns(tmp_path, template)
    assert str(caught.value).startswith("tools: ") and "set chat_template to one with tools" in str(
        caught.value
    )


def test_a_tool_without_hints_is_refused_with_its_line(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"my_tools.py:\d+: without_hints, a tool: .*has no docstring"
    ):
        make_turns(tmp_path, "qwen", "without_hints")


def call(tmp_path: Path, *calls: tuple[str, dict[str, Any]], **keys: Any) -> list[tuple[str, bool]]:
    (tmp_path / "my_tools.py").write_text(FILE)
    names = ("double", "later", "fails", "leaves", "hangs", "dies")
    tools = Rewards(
        RolloutKeys(tools=tuple(f"{tmp_path / 'my_tools.py'}:{name}" for name in names), **keys)
    )
    try:
        return tools.call_tools(
            [{"name": name, "arguments": arguments} for name, arguments in calls]
        )
    finally:
        tools.close()


def test_a_tool_that_fails_tells_the_model_why(tmp_path: Path) -> None:
    asked: list[tuple[str, Any]] = [
        ("double", {"number": 4}),
        ("later", {"number": 5}),
        ("fails", {"number": 1}),
    ]
    asked += [("double", {"digit": 1}), ("double", [4]), ("triple", {}), ("leaves", {})]
    found = call(tmp_path, *asked)
    assert found[:3] == [
        ("8", False),
        ("10 ?", False),
        (str({"error": "integer division or modulo by zero"}), True),
    ]
    assert "unexpected keyword argument 'digit'" in found[3][0] and all(
        failed for _, failed in found[3:]
    )
    assert found[5][0] == str({"error": "Tool triple not found."}) and found[6][0] == str(
        {"error": "gone"}
    )


def test_a_tool_that_hangs_ends_the_run_or_is_counted(tmp_path: Path) -> None:
    line = next(number for number, text in enumerate(FILE.splitlines(), 1) if "time.sleep" in text)
    with pytest.raises(
        UserError,
        match=rf"my_tools.py:{line}: hangs, a tool: TimeLimit: .*on_bad_reward: zero counts such calls",
    ):
        call(tmp_path, ("hangs", {}), reward_timeout_seconds=0.5)
    found = call(
        tmp_path,
        ("hangs", {}),
        ("double", {"number": 4}),
        reward_timeout_seconds=0.5,
        on_bad_reward="zero",
    )
    assert found == [
        (str({"error": "took more than reward_timeout_seconds allows: 1 s"}), True),
        ("8", False),
    ]
    with pytest.raises(UserError, match=r"tools: .*my_tools.py: their process ended with 3"):
        call(tmp_path, ("dies", {}))


class Fake:
    """Samples what is given, and remembers what it was asked."""

    def __init__(self, tokenizer: Any, *turns: list[str]) -> None:
        self.tokenizer, self.turns, self.asked = tokenizer, list(turns), list[list[Request]]()

    def __call__(self, requests: Any) -> list[Sampled]:
        self.asked.append(list(requests))
        made = []
        for text in self.turns.pop(0):
            ids = self.tokenizer.encode(text, add_special_tokens=False)
            ended = Ended.STOPPED if text.endswith("|>") else Ended.CUT
            made.append(Sampled(ids, [-1.0] * len(ids), float(len(ids)), ended))
        return made


def test_a_completion_goes_on_after_its_results(tmp_path: Path) -> None:
    """One answers at once, one asks twice, one asks for nothing known, one has no room for a result, one is cut in a call."""
    tokenizer, tools = make_turns(tmp_path, "qwen", "double")
    ask = '<tool_call>\n{"name": "double", "arguments": {"number": 4}}\n</tool_call>'
    unknown = ask.replace("double", "triple") + "<|im_end|>"
    long = "x" * 380 + ask + "<|im_end|>"
    fake = Fake(
        tokenizer,
        ["It is 8.<|im_end|>", f"{ask}<|im_end|>", unknown, long, ask],
        [f"{ask}<|im_end|>", "I give up.<|im_end|>"],
        ["8"],
    )
    requests = [Request((1, 2, i), (7, i)) for i in range(5)]
    one: Any = SimpleNamespace(
        is_main=True, gather=lambda value, _: [value], broadcast=lambda value, _: value
    )
    process = Rewards(RolloutKeys(tools=(f"{tmp_path / 'my_tools.py'}:double",)))
    talks = Conversations(tools, process, 480, [{}] * 5, [[] for _ in requests])
    try:
        made = take_turns(requests, fake, talks, 2, RankGroup(one).on_main)
    finally:
        process.close()
    assert [(each.calls, each.failed_calls, each.ended.value) for each in made] == [
        (0, 0, "stopped"), (2, 0, "cut"), (1, 1, "stopped"), (1, 0, "cut"), (0, 0, "cut"),
    ]  # fmt: skip
    roles = [[message["role"] for message in said] for said in talks.messages]
    assert roles == [["assistant"], ["assistant", "tool"] * 2 + ["assistant"], ["assistant", "tool", "assistant"], ["assistant"], ["assistant"]]  # fmt: skip
    assert talks.messages[1][1] == {"role": "tool", "name": "double", "content": "8"}
    assert talks.messages[2][1]["content"] == str({"error": "Tool triple not found."})
    whole = f"{ask}<|im_end|>{AFTER['qwen']}{ask}<|im_end|>{AFTER['qwen']}8"
    assert tokenizer.decode(made[1].token_ids) == whole and made[1].entropy == len(
        made[1].log_probabilities
    )
    sampled = tokenizer.decode([token for token in made[1].labels(is_learned=True) if token >= 0])
    assert sampled == f"{ask}<|im_end|>{ask}<|im_end|>8" and sum(made[1].tool_mask) == len(
        made[1].log_probabilities
    )
    assert (
        made[3].token_ids == tokenizer.encode(long, add_special_tokens=False)
        and not made[3].tool_mask
    )
    # What a turn is sampled from is what was sampled before it, token for token, with a seed and a room of its own.
    second, third = fake.asked[1][0], fake.asked[2][0]
    assert third.prompt_ids == (1, 2, 1, *made[1].token_ids[:-1]) and third.seed == (7, 1, 2)
    assert second.seed == (7, 1, 1) and third.max_tokens == 480 - len(made[1].token_ids) + 1
