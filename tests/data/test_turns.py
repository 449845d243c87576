"""Every trained turn stands after exactly the tokens that inference gives when the model is asked for it.

The published templates are those that TRL ships; a test of one is skipped where TRL's package, or the shared tokenizer, is not
there. The conversations are generated from a schema: no data set at hand has reasoning or tool calls.
"""

import json
import os
import re
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tokenizers.processors import TemplateProcessing
from torch import nn
from transformers import AutoTokenizer, LlamaConfig

from finetune.config.schema import DatasetSource
from finetune.constants import IGNORE_INDEX
from finetune.data.formats import Completion, Conversation, Document, Steps, Text, parse_row
from finetune.data.messages import BadRow
from finetune.data.render import render_scored, render_turns
from finetune.data.token_store import Tokens
from finetune.data.tokenize import tokenize
from finetune.data.tokenizer import TEMPLATES, make_encoder, make_renderer
from finetune.errors import UserError
from finetune.inference.conversation import encode_prompt
from finetune.inference.inference_model import InferenceModel
from finetune.inference.inputs import make_question, read_prompts
from finetune.training.lifecycle import encode_prompt as encode_sample_prompt
from tests.conftest import make_tokenizer, slow_but
from tests.data.conftest import Prepare
from tests.data.test_chat import tokenizer_with
from tests.data.test_prepare import write_lines
from tests.models.families import build, gradients, ours, plain_loss, relative_error

PUBLISHED = (
    "cohere", "cohere2", "deepseek_r1_distill_training", "gemma", "gemma3", "gemma4", "gemma4_v5", "glm4moe", "gptoss", "lfm2",
    "lfm2_2_5", "llama3", "llama3_1", "llama3_2", "muse_glimmer", "nemotron_3_nano", "nemotron_3_ultra", "phi3", "phi3_5",
    "qwen2_5", "qwen3", "qwen3_training", "qwen3_5_think", "qwen3_6", "qwen3_8", "qwen3_instruct_2507", "qwen3_vl",
)  # fmt: skip
# Those known by name whose rendering of a turn depends on what follows it.
OURS = (
    "deepseek-v3.1", "deepseek-v3.2", "gemma4", "glm4.7", "gpt-oss", "granite4", "kimi-k2", "kimi-k2-thinking",
    "mistral-v11-tekken", "mistral-v13-tekken", "nemotron3",
)  # fmt: skip
# Templates whose prompt no answer follows: each row of theirs is a finding.
NEVER_CONTINUED = {
    "deepseek_r1_distill_training": "the prompt ends in <think>, which no answer is written after"
}
# For each template. With 3 nothing is left to compare of Nemotron's: no row among them has reasoning, so each is a finding.
ROWS = int(os.environ.get("FINETUNE_TURN_ROWS", "8"))
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
    words = lambda: " ".join(  # noqa: E731
        generator.choice(["rain", "in", "Köln", "2 + 2", "=", "4.", "\n- so", "{}"], 4)
    )
    messages: list[dict[str, Any]] = (
        [{"role": "system", "content": words()}] if generator.random() < 0.5 else []
    )
    reasons, calls = generator.random(2) < 0.5

    def answer(content: str, **more: Any) -> dict[str, Any]:
        return {
            "role": "assistant",
            "content": content,
            **({"reasoning_content": words()} if reasons else {}),
            **more,
        }

    for _ in range(generator.integers(1, 5)):
        messages.append({"role": "user", "content": words()})
        if calls and generator.random() < 0.7:
            ids = [
                f"a1b2c3d4{n}" for n in range(1 + (generator.random() < 0.3))
            ]  # sometimes two at once
            made = [{"id": each, "name": "weather", "arguments": {"city": words()}} for each in ids]
            messages.append(answer("", tool_calls=made))
            for each in ids:  # results as texts, and as objects
                result = words() if generator.random() < 0.7 else {"rain": True, "in": [words()]}
                messages.append(
                    {"role": "tool", "name": "weather", "tool_call_id": each, "content": result}
                )
        messages.append(answer(words()))
    return {"messages": messages, **({"tools": [WEATHER]} if calls else {})}


def read(row: dict[str, Any]) -> Conversation:
    document = parse_row(row, DatasetSource(path="rows.jsonl")).document
    assert isinstance(document, Conversation)
    return document


def read_published(name: str) -> str:
    """A template of TRL's package, or of the folders that FINETUNE_CHAT_TEMPLATES names (llama.cpp's models/templates, vLLM's
    examples)."""
    trl = find_spec("trl")
    folders = os.environ.get("FINETUNE_CHAT_TEMPLATES", "").split(os.pathsep)
    folders += [str(Path(str(trl.origin)).parent / "chat_templates")] if trl else []
    found = next(
        (
            path
            for folder in folders
            if folder and (path := Path(folder, f"{name}.jinja")).is_file()
        ),
        None,
    )
    if found is None:
        pytest.skip(
            f"no {name}.jinja: TRL is not installed, and FINETUNE_CHAT_TEMPLATES names no folder that has it"
        )
    return found.read_text(encoding="utf-8")


def use_template(tokenizer: Any, template: str) -> Any:
    """`tokenizer` with a template, and with the tokens that the template writes around turns."""
    tokens = [
        word for word in re.findall(r"<[^<>\s'\"{}]+>", template) if re.search(r"[|｜]|turn", word)
    ]
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
            text = tokenizer.apply_chat_template(
                messages[:i], add_generation_prompt=True, **options
            )
            prompts.append(tokenizer.encode(text, add_special_tokens=False))
    return prompts


def find_trained_prompts(tokens: Tokens) -> list[list[int]]:
    """The tokens before each trained turn, of all documents."""
    found, start = [], 0
    for length in tokens.lengths:
        ids, labels = (each[start : start + length] for each in (tokens.input_ids, tokens.labels))
        trained = np.append(False, labels[:-1] != IGNORE_INDEX)
        found += [ids[:at].tolist() for at in np.flatnonzero(trained[1:] & ~trained[:-1]) + 1]
        start += length
    return found


def compare_prompts(name: str, rows: int, tokenizer: Any) -> int:
    """Compares the tokens before each trained turn of `rows` generated rows with those that inference gives. Returns how many rows
    were compared: the others a template rejects, or they are reported to have an answer that no prompt continues with."""
    tokenizer = use_template(tokenizer, TEMPLATES[name] if name in OURS else read_published(name))
    renderer, encoder = make_renderer(tokenizer, True), make_encoder(tokenizer)
    generator, compared = np.random.default_rng(28), 0
    for _ in range(rows):
        conversation = read(make_row(generator))
        try:
            texts = render_turns(conversation, renderer)
        except BadRow as refused:
            assert "the chat template rejects it" in str(refused)  # no system message, or no tools
            continue
        if any("prompt_not_continued" in text.findings for text in texts):
            continue  # said to the user: no document of this row can have what inference gives
        tokens = tokenize(texts, [(0, 1)] * len(texts), encoder)
        assert sorted(find_trained_prompts(tokens)) == sorted(find_turns(conversation, tokenizer))
        compared += 1
    return compared


@pytest.mark.parametrize("name", (*PUBLISHED, *OURS))
def test_before_each_trained_turn_stand_the_tokens_that_inference_gives(
    name: str, shared_tokenizer: Any, record_property: Callable[[str, object], None]
) -> None:
    compared = compare_prompts(name, ROWS, shared_tokenizer)
    record_property("rows_compared", compared)
    assert (compared == 0) == (name in NEVER_CONTINUED)


@pytest.mark.slow
def test_ten_thousand_conversations_stand_after_the_prompts_of_inference(
    shared_tokenizer: Any, shared: Path
) -> None:
    names = [name for name in (*PUBLISHED, *OURS) if name not in NEVER_CONTINUED]
    rows = int(os.environ.get("FINETUNE_TURN_ROWS", "10000")) // len(names) + 1
    folder = shared / "tokenizers" / "llama3"
    compared = {
        name: compare_prompts(name, rows, AutoTokenizer.from_pretrained(folder)) for name in names
    }
    assert min(compared.values()) > rows / 10, compared


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
    keys = {
        "added_tokens": ["<|im_start|>", "<|im_end|>"],
        "eot_tokens": ["<|im_end|>"],
        "chat_template": CAPITALS,
    }
    data = prepare([{"path": str(path)}], turns=turns, packing=packing, max_length=128, **keys)
    examples: Any = data.train.examples  # type: ignore[attr-defined]
    labels = [examples[i].labels for i in range(len(examples))]
    assert [data.tokenizer.decode(each[each != IGNORE_INDEX]) for each in labels] == trained
    first = len(
        data.tokenizer.apply_chat_template(ASKED["messages"][:2], return_dict=False)
    )  # trained once more
    more = [re.findall(r"; (\d+) more tokens", str(finding)) for finding in data.report.findings]
    assert [count for found in more for count in found] == (
        [str(first)] if len(trained) == 2 else []
    )


REASONED = {
    "messages": [
        {"role": "user", "content": "Q"},
        {"role": "assistant", "content": "A.", "reasoning_content": "so.\n\nyes."},
    ]
}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("qwen3", ["<think>\n", "</think>\n\nA.<|im_end|>"]),
        ("qwen3_5_think", ["</think>\n\nA.<|im_end|>"]),  # whose prompt opens <think>
        ("qwen3_training", ["<think>\n", "</think>\n\nA.<|im_end|>"]),  # with markers
        (
            "gptoss",
            [
                "<|channel|>analysis<|message|>",
                "<|end|><|start|>assistant<|channel|>final<|message|>A.<|return|>",
            ],
        ),
    ],
)
def test_the_words_of_reasoning_are_trained_or_not(
    name: str, expected: list[str], shared_tokenizer: Any
) -> None:
    tokenizer = use_template(shared_tokenizer, read_published(name))
    row = read(REASONED)
    for on, wanted in (
        (True, ["so.\n\nyes.\n" if "think" in expected[-1] else "so.\n\nyes."]),
        (False, []),
    ):
        (text,) = render_turns(row, make_renderer(tokenizer, True, train_on_reasoning=on))
        found = [text.text[slice(*span)] for span in text.spans]
        found[-1] = found[-1].removesuffix("\n")  # which markers enclose
        pieces = [*expected[:-1], *wanted, expected[-1]]
        assert found == (["".join(pieces)] if on else pieces)


@pytest.mark.parametrize(
    ("name", "kwargs", "opens"),
    [
        (
            "qwen3",
            {},
            "'<|im_start|>assistant\\n', and the answers continue with '<think>\\n\\n</think>\\n\\n'",
        ),
        ("qwen3", {"enable_thinking": False}, None),
        (
            "qwen3_5_think",
            {},
            "'<|im_start|>assistant\\n<think>\\n', and the answers continue with",
        ),
        (
            "gptoss",
            {},
            "'<|start|>assistant', and the answers continue with '<|channel|>final<|message|>'",
        ),
        ("qwen2_5", {}, None),  # knows no reasoning
    ],
)
def test_rows_without_reasoning_for_a_model_that_thinks_are_a_finding(
    name: str, kwargs: dict[str, Any], opens: str | None, shared_tokenizer: Any
) -> None:
    tokenizer = use_template(shared_tokenizer, read_published(name))
    rows = [
        {"messages": ASKED["messages"][:2], "chat_template_kwargs": kwargs},
        {**REASONED, "chat_template_kwargs": {}},
    ]
    texts = [
        text for row in rows for text in render_turns(read(row), make_renderer(tokenizer, True))
    ]
    assert ["no_reasoning" in text.findings for text in texts] == [opens is not None, False]
    assert opens is None or opens in texts[0].difference


def test_answers_are_read_back_by_the_tokenizers_own_response_template(
    shared_tokenizer: Any,
) -> None:
    """The response templates are transformers' own, by the type of the model."""
    known = pytest.importorskip("transformers.cli.serving.utils")._RESPONSE_TEMPLATE_FALLBACKS
    for name, model_type in (
        ("qwen3", "qwen3"),
        ("qwen3_5_think", "qwen3_5"),
        ("gemma4_v5", "gemma4"),
    ):
        tokenizer = use_template(shared_tokenizer, read_published(name))
        tokenizer.response_template = next(
            spec for types, spec in known.items() if model_type in types
        )
        renderer, generator, read_back = (
            make_renderer(tokenizer, True),
            np.random.default_rng(28),
            0,
        )
        for _ in range(ROWS):
            row = make_row(generator)
            texts = render_turns(read(row), renderer)
            differences = [text.difference for text in texts if "not_read_back" in text.findings]
            # A value in XML loses the white space around it.
            assert not differences or (
                model_type == "qwen3_5" and all("{'city': '\\n" in each for each in differences)
            )
            read_back += "tools" in row
        assert read_back
    tokenizer.response_template = next(
        spec for types, spec in known.items() if "qwen3" in types
    )  # of another family
    (text,) = render_turns(read(REASONED), make_renderer(tokenizer, True))
    assert "not_read_back" in text.findings
    assert text.difference.startswith("message 2: reasoning 'so.\\n\\nyes.' is read back as ''")


@pytest.mark.parametrize("kwargs", [{}, {"enable_thinking": False}, {"enable_thinking": True}])
@pytest.mark.parametrize(
    "name", ["qwen3", "smollm3", "glm4moe", "qwen3_5_think", "qwen3_8", "nemotron_3_nano"]
)
def test_chat_asks_with_the_tokens_that_were_trained(
    name: str, kwargs: dict[str, Any], shared: Path, shared_tokenizer: Any, tmp_path: Path
) -> None:
    """GSM8K's worked solutions are the reasoning, as no data set at hand has its own; two of its rows are two turns."""
    template = TEMPLATES.get(name) or read_published(name)
    tokenizer = use_template(shared_tokenizer, template)
    if "enable_thinking" in template and kwargs != {
        "enable_thinking": True
    }:  # where thinking is the default
        asked = [[{"role": "user", "content": "?"}]] * 2
        one, other = (
            tokenizer.apply_chat_template(each, add_generation_prompt=True, tokenize=False, **given)
            for each, given in zip(
                asked, ({"enable_thinking": False}, {"enable_thinking": True}), strict=True
            )
        )
        assert one != other
    lines = (shared / "data" / "gsm8k_test.jsonl").read_text().splitlines()[:8]
    solved = [json.loads(line) for line in lines]
    without = kwargs == {"enable_thinking": False}  # such answers have no reasoning
    turns = []
    for row in solved:
        reasoning, _, content = row["answer"].partition("\n#### ")
        more = {} if without else {"reasoning_content": reasoning}
        turns.append(
            [
                {"role": "user", "content": row["question"]},
                {"role": "assistant", "content": content, **more},
            ]
        )
    rows = [[*turns[i], *turns[i + 1]] for i in range(0, len(turns), 2)]
    renderer, encoder = make_renderer(tokenizer, True), make_encoder(tokenizer)
    texts = [
        text
        for row in rows
        for text in render_turns(read({"messages": row, "chat_template_kwargs": kwargs}), renderer)
    ]
    assert not any("prompt_not_continued" in text.findings for text in texts)
    trained = find_trained_prompts(tokenize(texts, [(0, 1)] * len(texts), encoder))
    asked_rows = [{"messages": row[:end]} for row in rows for end in (1, 3)]
    prompts = list(read_prompts(str(write_lines(tmp_path / "asked.jsonl", asked_rows)), None))
    model = InferenceModel(name, None, tokenizer, template, kwargs)
    assert sorted(trained) == sorted(encode_prompt(model, prompt) for prompt in prompts)
    expected = (
        tokenizer.apply_chat_template(
            row["messages"], add_generation_prompt=True, return_dict=False, **kwargs
        )
        for row in asked_rows
    )
    assert sorted(trained) == sorted(expected)


@pytest.mark.parametrize(
    "name", slow_but(["gptoss"], ["qwen3.5", "gptoss", "gemma4_v5", "qwen3", "glm4.5"])
)
def test_chat_asks_rows_with_tools_as_they_were_trained(
    name: str, shared_tokenizer: Any, tmp_path: Path
) -> None:
    """The rows are generated from a schema, since no data set at hand has tool calls."""
    template = TEMPLATES.get(name) or read_published(name)
    tokenizer, generator = use_template(shared_tokenizer, template), np.random.default_rng(3)
    rows = [row for row in (make_row(generator) for _ in range(3 * ROWS)) if "tools" in row]
    texts = [
        text for row in rows for text in render_turns(read(row), make_renderer(tokenizer, True))
    ]
    trained = find_trained_prompts(tokenize(texts, [(0, 1)] * len(texts), make_encoder(tokenizer)))
    asked = [
        {**row, "messages": row["messages"][:end]}
        for row in rows
        for end, message in enumerate(row["messages"])
        if message["role"] == "assistant"
    ]
    model = InferenceModel(name, None, tokenizer, template)
    prompts = read_prompts(str(write_lines(tmp_path / "asked.jsonl", asked)), None)
    assert sorted(trained) == sorted(encode_prompt(model, prompt) for prompt in prompts)
    assert len(asked) > ROWS


def test_what_a_template_reads_is_set_for_a_data_set_and_for_a_row(
    prepare: Prepare, tmp_path: Path
) -> None:
    template = TEMPLATES["qwen3"]
    asked = [{"role": "user", "content": "One?"}, {"role": "assistant", "content": "one"}]
    rows = [
        {"messages": asked},
        {"messages": asked, "chat_template_kwargs": {"enable_thinking": True, "unset": None}},
    ]
    path = write_lines(tmp_path / "rows.jsonl", rows)
    keys = {
        "added_tokens": ["<|im_start|>", "<|im_end|>"],
        "eot_tokens": ["<|im_end|>"],
        "chat_template": template,
    }
    for kwargs in (
        {"enable_thinking": False},
        None,
    ):  # the tokens of one are not taken for those of the other
        data = prepare(
            [{"path": str(path), "chat_template_kwargs": kwargs}], max_length=128, **keys
        )
        examples: Any = data.train.examples  # type: ignore[attr-defined]
        expected = [
            data.tokenizer.apply_chat_template(
                asked[:1], add_generation_prompt=True, tokenize=False, **{**(kwargs or {}), **own}
            )
            for own in ({}, {"enable_thinking": True})
        ]
        texts = [data.tokenizer.decode(examples[i].input_ids) for i in range(2)]
        assert [text.startswith(prompt) for text, prompt in zip(texts, expected, strict=True)] == [
            True,
            True,
        ]
        assert (expected[0] != expected[1]) == (kwargs is not None)
    bad = {"messages": asked, "chat_template_kwargs": {"messages": []}}
    with pytest.raises(
        UserError, match="chat_template_kwargs: messages is set by rendering itself"
    ):
        prepare([{"path": str(write_lines(tmp_path / "bad.jsonl", [bad]))}], max_length=128, **keys)


def test_split_turns_packed_train_as_separate_rows(prepare: Prepare, tmp_path: Path) -> None:
    path = write_lines(
        tmp_path / "rows.jsonl", [ASKED, {"messages": ASKED["messages"][2:] + ASKED["messages"]}]
    )
    keys = {
        "added_tokens": ["<|im_start|>", "<|im_end|>"],
        "eot_tokens": ["<|im_end|>"],
        "chat_template": CAPITALS,
    }
    data = prepare(
        [{"path": str(path)}],
        turns="split",
        max_length=1024,
        global_batch_size=1,
        max_steps=1,
        **keys,
    )
    (micro_batch,) = next(data.train.batches()).micro_batches
    assert len(micro_batch.document_lengths) == 5  # in one row
    tokenizer, separate = (
        data.tokenizer,
        [],
    )  # rows as transformers' own template writes them, a row for each turn
    for messages in (json.loads(line)["messages"] for line in path.read_text().splitlines()):
        for end in range(2, len(messages) + 1, 2):
            prompt = tokenizer.apply_chat_template(
                messages[: end - 1], add_generation_prompt=True, return_dict=False
            )
            ids = tokenizer.apply_chat_template(messages[:end], return_dict=False)
            labels = [*[IGNORE_INDEX] * (len(prompt) - 1), *ids[len(prompt) :], IGNORE_INDEX]
            last = len(ids) - 1 - ids[::-1].index(tokenizer.convert_tokens_to_ids("<|im_end|>"))
            labels[last:] = [IGNORE_INDEX] * (
                len(ids) - last
            )  # the line break after the end of turn
            separate.append((torch.tensor(ids), torch.tensor(labels)))
    plain = build("llama", vocab_size=len(tokenizer))
    packed = ours(build("llama", vocab_size=len(tokenizer)))
    expected, found = plain_loss(plain, separate), packed(**micro_batch.inputs)
    assert relative_error(found, expected) < 1e-5
    truth, gradient = gradients(plain, expected), gradients(packed, found)
    assert truth.keys() == gradient.keys()
    assert max(relative_error(gradient[name], truth[name]) for name in truth) < 1e-5


def test_chat_asks_without_a_template_as_was_trained_also_where_the_tokenizer_writes_eos() -> None:
    """The prompt of a tokenizer that writes EOS after each text ended with it, before the answer."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = None
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in ("<|begin|>", "<|end|>")}
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|begin|> $A <|end|>", special_tokens=list(ids.items())
    )
    texts = render_turns(Completion("2+2=", " 4"), make_renderer(tokenizer, True))
    trained = tokenize(texts, [(0, 1)], make_encoder(tokenizer)).input_ids.tolist()
    model = InferenceModel("m", None, tokenizer, None)
    asked = encode_prompt(model, make_question([{"role": "user", "content": "2+2="}]))
    assert asked == encode_sample_prompt("2+2=", tokenizer) == trained[: len(asked)]
    assert asked == tokenizer.encode("2+2=")[:-1]
    scoring = nn.Module()
    scoring.score = nn.Linear(1, 1)
    scoring.get_output_embeddings = lambda: None  # type: ignore[assignment]
    scoring.config = LlamaConfig()  # type: ignore[assignment]
    for typed in ("2+2= 4", "2+2= 4<|end|>"):
        question = make_question([{"role": "user", "content": typed}])
        scored = encode_prompt(replace(model, model=scoring), question)
        assert scored == tokenizer.encode("2+2= 4")


@pytest.mark.parametrize("head", ["TokenClassification", "SequenceClassification"])
def test_a_scored_text_ends_as_in_training(head: str) -> None:
    """A process reward model scores a step's separator, behind which its rows have no EOS."""
    config = LlamaConfig(vocab_size=264, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, architectures=[f"LlamaFor{head}"])  # fmt: skip
    scorer = getattr(transformers, f"LlamaFor{head}")(config)
    tokenizer = make_tokenizer()
    tokenizer.chat_template = None
    asked = Conversation(({"role": "user", "content": "2+2?2+2=4\n"},), (False,))
    ids = encode_prompt(InferenceModel("scorer", scorer, tokenizer, None, {}), asked)
    if head == "SequenceClassification":
        document: Document = Text("2+2?2+2=4\n")
        (text,) = (render_scored(document, make_renderer(tokenizer, True)),)
        trained = tokenizer(text.text, add_special_tokens=False).input_ids
    else:
        document = Steps("2+2?", ("2+2=4",), (1,), "\n")
        texts = render_turns(document, make_renderer(tokenizer, True))
        trained = tokenize(texts, [(0, 1)], make_encoder(tokenizer)).input_ids.tolist()
    assert [i for i in ids if i != tokenizer.bos_token_id] == [
        i for i in trained if i != tokenizer.bos_token_id
    ]
