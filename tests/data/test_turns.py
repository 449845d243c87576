"""Every trained turn stands after exactly the tokens that inference gives when the model is asked for it.

The published templates are those that TRL ships; a test of one is skipped where TRL's package, or the shared tokenizer, is not
there. The conversations are generated from a schema: no data set at hand has reasoning or tool calls.
"""

import os
import re
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from finetune.config.schema import DatasetSource
from finetune.constants import IGNORE_INDEX
from finetune.data.formats import Conversation, parse_row
from finetune.data.messages import BadRow
from finetune.data.render import render_turns
from finetune.data.template import make_renderer
from finetune.data.tokenize import tokenize
from finetune.data.tokenizer import TEMPLATES, make_encoder
from tests.data.conftest import Prepare
from tests.data.test_chat import tokenizer_with
from tests.data.test_prepare import write_lines

PUBLISHED = (
    "cohere", "cohere2", "deepseek_r1_distill_training", "gemma", "gemma3", "gemma4", "gemma4_v5", "glm4moe", "gptoss", "lfm2",
    "lfm2_2_5", "llama3", "llama3_1", "llama3_2", "muse_glimmer", "nemotron_3_nano", "nemotron_3_ultra", "phi3", "phi3_5",
    "qwen2_5", "qwen3", "qwen3_training", "qwen3_5_think", "qwen3_6", "qwen3_8", "qwen3_instruct_2507", "qwen3_vl",
)  # fmt: skip
# Templates whose prompt no answer follows: each row of theirs is a finding.
NEVER_CONTINUED = {"deepseek_r1_distill_training": "the prompt ends in <think>, which no answer is written after"}
ROWS = int(os.environ.get("FINETUNE_TURN_ROWS", "8"))  # for each template
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "Its name."}},
            "required": ["city"],
        },
    },
}


def make_row(generator: np.random.Generator) -> dict[str, Any]:
    """A conversation of one to four questions: with a system message, reasoning, and tool calls, or without."""
    words = lambda: " ".join(generator.choice(["rain", "in", "Köln", "2 + 2", "=", "4.", "\n- so", "{}"], 4))  # noqa: E731
    messages: list[dict[str, Any]] = [{"role": "system", "content": words()}] if generator.random() < 0.5 else []
    reasons, calls = generator.random(2) < 0.5

    def answer(content: str, **more: Any) -> dict[str, Any]:
        return {"role": "assistant", "content": content, **({"reasoning_content": words()} if reasons else {}), **more}

    for _ in range(generator.integers(1, 5)):
        messages.append({"role": "user", "content": words()})
        if calls and generator.random() < 0.7:
            call = {"id": "a1b2c3d4e", "name": "weather", "arguments": {"city": words()}}
            messages.append(answer("", tool_calls=[call]))
            messages.append({"role": "tool", "name": "weather", "tool_call_id": "a1b2c3d4e", "content": words()})
        messages.append(answer(words()))
    return {"messages": messages, **({"tools": [WEATHER]} if calls else {})}


def read(row: dict[str, Any]) -> Conversation:
    document = parse_row(row, DatasetSource(path="rows.jsonl")).document
    assert isinstance(document, Conversation)
    return document


@pytest.fixture(scope="module")
def shared_tokenizer(shared: Path) -> Any:
    folder = shared / "tokenizers" / "llama3"
    if not folder.is_dir():
        pytest.skip(f"no tokenizer in {folder}")
    return AutoTokenizer.from_pretrained(folder)


def read_published(name: str) -> str:
    found = find_spec("trl")
    folder = os.environ.get("FINETUNE_CHAT_TEMPLATES") or (
        Path(str(found.origin)).parent / "chat_templates" if found else ""
    )
    path = Path(folder) / f"{name}.jinja"
    if not folder or not path.is_file():
        pytest.skip(f"no {name}.jinja: TRL is not installed, and FINETUNE_CHAT_TEMPLATES names no folder that has it")
    return path.read_text()


def use_template(tokenizer: Any, template: str) -> Any:
    """`tokenizer` with a template, and with the tokens that the template writes around turns."""
    tokens = [word for word in re.findall(r"<[^<>\s'\"{}]+>", template) if re.search(r"[|｜]|turn", word)]
    tokenizer.add_special_tokens({"additional_special_tokens": sorted(set(tokens))})
    tokenizer.chat_template = template
    return tokenizer


def find_turns(conversation: Conversation, tokenizer: Any) -> list[list[int]]:
    """The prompt's tokens of each assistant turn, as `apply_chat_template` gives them."""
    messages = list(conversation.messages)
    options = {"tools": list(conversation.tools) or None, "tokenize": False}
    prompts = []
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            text = tokenizer.apply_chat_template(messages[:i], add_generation_prompt=True, **options)
            prompts.append(tokenizer.encode(text, add_special_tokens=False))
    return prompts


@pytest.mark.parametrize("name", PUBLISHED)
def test_before_each_trained_turn_stand_the_tokens_that_inference_gives(
    name: str, shared_tokenizer: Any, record_property: Callable[[str, object], None]
) -> None:
    tokenizer = use_template(shared_tokenizer, read_published(name))
    renderer, encoder = make_renderer(tokenizer, True), make_encoder(tokenizer)
    generator, compared = np.random.default_rng(28), 0
    for _ in range(ROWS):
        conversation = read(make_row(generator))
        try:
            texts = render_turns(conversation, renderer)
        except BadRow as refused:
            assert "the chat template rejects it" in str(refused)  # no system message, or no tools
            continue
        if any("prompt_not_continued" in text.findings for text in texts):
            continue  # said to the user: no document of this row can have what inference gives
        prompts = find_turns(conversation, tokenizer)
        tokens = tokenize(texts, [(0, 1)] * len(texts), encoder)
        found, start = [], 0
        for length in tokens.lengths:
            ids, labels = (each[start : start + length] for each in (tokens.input_ids, tokens.labels))
            trained = np.append(False, labels[:-1] != IGNORE_INDEX)
            found += [ids[:at].tolist() for at in np.flatnonzero(trained[1:] & ~trained[:-1]) + 1]
            start += length
        assert sorted(found) == sorted(prompts)
        compared += 1
    record_property("rows_compared", compared)
    assert (compared == 0) == (name in NEVER_CONTINUED)


# Writes the answers in capitals once a question follows them, as no published template does.
CAPITALS = """\
{%- for m in messages -%}
  {{- '<|im_start|>' + m['role'] + '\\n' + (m['content'] | upper if m['role'] == 'assistant' and not loop.last else m['content']) + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
ASKED = {
    "messages": [
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "one"},
        {"role": "user", "content": "Two?"},
        {"role": "assistant", "content": "two"},
    ]
}


def test_a_template_that_rewrites_answers_is_found_and_split() -> None:
    tokenizer = tokenizer_with(CAPITALS)
    (whole,) = render_turns(read(ASKED), make_renderer(tokenizer, True, turns="whole"))
    assert "unlike_inference" in whole.findings
    assert whole.difference == "message 2 is trained with 'O' where inference has 'o'"
    texts = render_turns(read(ASKED), make_renderer(tokenizer, True))
    assert [[text.text[slice(*span)] for span in text.spans] for text in texts] == [
        ["one<|im_end|>"],
        ["two<|im_end|>"],
    ]
    assert all("turns_split" in text.findings for text in texts)
    opens = TEMPLATES["chatml"] + "{%- if add_generation_prompt -%}{{- '<think>\n' -}}{%- endif -%}"
    (opened,) = render_turns(read(ASKED), make_renderer(tokenizer_with(opens), True))
    assert "prompt_not_continued" in opened.findings
    assert opened.difference == "message 2 is trained with 'o' where inference has '<'"


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize(
    ("turns", "trained"),
    [
        ("auto", ["one<|im_end|>", "two<|im_end|>"]),
        ("split", ["one<|im_end|>", "two<|im_end|>"]),
        ("last", ["two<|im_end|>"]),
        ("whole", ["ONE<|im_end|>two<|im_end|>"]),
    ],
)
def test_turns_become_documents(
    prepare: Prepare, tmp_path: Path, turns: str, trained: list[str], packing: bool
) -> None:
    path = write_lines(tmp_path / "rows.jsonl", [ASKED])
    keys = {"added_tokens": ["<|im_start|>", "<|im_end|>"], "eot_tokens": ["<|im_end|>"], "chat_template": CAPITALS}
    data = prepare([{"path": str(path)}], turns=turns, packing=packing, max_length=128, **keys)
    examples: Any = data.train.examples  # type: ignore[attr-defined]
    labels = [examples[i].labels for i in range(len(examples))]
    assert [data.tokenizer.decode(each[each != IGNORE_INDEX]) for each in labels] == trained
    first = len(data.tokenizer.apply_chat_template(ASKED["messages"][:2], return_dict=False))  # trained once more
    more = [re.findall(r"; (\d+) more tokens", str(finding)) for finding in data.report.findings]
    assert [count for found in more for count in found] == ([str(first)] if len(trained) == 2 else [])
