"""Makes the quickstart for tools: products that a small model guesses, or asks a tool for, and a
tokenizer of its own.

The files are shipped; this script makes them again, byte for byte: python
recipes/quickstart/make_products.py [FOLDER]
"""

import json
import random
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from make import BEGIN, END, PAD, ROLES
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

PAIRS = [(a, b) for a in range(11, 100) for b in range(11, 100)]
CALLED, GUESSED, ASKED, HELD_OUT = 1_500, 2_500, 500, 100
VOCABULARY = 420
SEED = 33
# What the chat template reads of the schema that transformers makes of multiply.py.
TOOL = {
    "type": "function",
    "function": {"name": "multiply", "description": "Multiplies two whole numbers."},
}
CHAT_TEMPLATE = """\
{{- bos_token }}
{%- for tool in tools or [] %}
    {{- '<|system|>' + tool['function']['name'] + ': ' + tool['function']['description'] + eos_token }}
{%- endfor %}
{%- for message in messages %}
    {{- '<|' + message['role'] + '|>' }}
    {%- if message['role'] == 'assistant' %}
        {%- generation %}
            {{- message['content'] }}
            {%- for call in message['tool_calls'] or [] %}
                {%- set function = {'name': call['function']['name'], 'arguments': call['function']['arguments']} %}
                {{- '<tool_call>' + function | tojson + '</tool_call>' }}
            {%- endfor %}
            {{- eos_token }}
        {%- endgeneration %}
    {%- else %}
        {{- message['content'] + eos_token }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>' }}
{%- endif %}
"""  # noqa: E501


def question(a: int, b: int) -> dict[str, str]:
    """What the user asks."""
    return {"role": "user", "content": f"What is {a} times {b}?"}


def called(a: int, b: int) -> list[dict[str, Any]]:
    """A conversation in which the tool is asked."""
    function = {"name": "multiply", "arguments": {"a": a, "b": b}}
    return [
        question(a, b),
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": function}],
        },
        {"role": "tool", "name": "multiply", "content": str(a * b)},
        {"role": "assistant", "content": str(a * b)},
    ]


def guessed(a: int, b: int, chance: random.Random) -> list[dict[str, Any]]:
    """A conversation in which the answer is a guess."""
    return [
        question(a, b),
        {"role": "assistant", "content": f"Perhaps {chance.randint(121, 9_801)}"},
    ]


def make(folder: Path) -> None:
    """Writes products_{sft,train,heldout}.jsonl, and a tokenizer's files into products/: no product
    is in two files.
    """
    chance = random.Random(SEED)
    pairs = chance.sample(PAIRS, CALLED + GUESSED + ASKED + HELD_OUT)
    known, rest = pairs[: CALLED + GUESSED], pairs[CALLED + GUESSED :]
    talks = [
        called(a, b) if i < CALLED else guessed(a, b, chance) for i, (a, b) in enumerate(known)
    ]
    sft = [{"messages": talk, "tools": [TOOL]} for talk in talks]
    asked = [{"prompt": [question(a, b)], "answer": str(a * b)} for a, b in rest]
    chance.shuffle(sft)
    for name, rows in (("sft", sft), ("train", asked[HELD_OUT:]), ("heldout", asked[:HELD_OUT])):
        (folder / f"products_{name}.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in rows)
        )
    of_calls = (
        f"<tool_call>{json.dumps(talk[1]['tool_calls'][0]['function'])}</tool_call>"
        for talk in talks[:CALLED]
    )
    described = (
        TOOL["function"]["name"] + ": " + TOOL["function"]["description"] for _ in range(CALLED)
    )
    said = (message["content"] for talk in talks for message in talk)
    write_tokenizer(folder / "products", (*of_calls, *described, *said))


def write_tokenizer(folder: Path, texts: Iterable[str]) -> None:
    """The files of a byte-level BPE tokenizer, for which a digit is a token, and a chat template
    with tools.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d|[^\d]+"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = (BEGIN, END, PAD, *(f"<|{role}|>" for role in (*ROLES, "tool")))
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[AddedToken(text, special=True, normalized=False) for text in special],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer=trainer)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=True) + "\n")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BEGIN,
        "eos_token": END,
        "pad_token": PAD,
    }
    settings |= {"clean_up_tokenization_spaces": False, "model_max_length": 128}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)


if __name__ == "__main__":
    make(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent)
