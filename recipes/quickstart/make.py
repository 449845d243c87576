"""Makes what the quickstart trains on: a chat data set (numbers in words, answered in digits) and a
small tokenizer.

The files are shipped; this script makes them again, byte for byte: python
recipes/quickstart/make.py [FOLDER]
"""

import json
import random
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

# drawn evenly, one in ten would be small: too few to learn from
SMALL, LARGE = range(1_000), range(1_000, 10_000)
HELD_OUT = 100
TRAINED = 5_000
# conversations for the distillation, and the share of them with a wrong answer
NOISY, WRONG = 2_000, 0.3
VOCABULARY = 384
SEED = 20

ONES = [
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
    "seventeen",
    "eighteen",
    "nineteen",
]
TENS = ["-", "-", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
QUESTIONS = ("Write {} in digits.", "What is {} in digits?", "Digits for {}, please.")

BEGIN, END, PAD = "<|begin_of_text|>", "<|end_of_turn|>", "<|pad|>"
ROLES = ("system", "user", "assistant")
CHAT_TEMPLATE = """\
{{- bos_token }}
{%- for message in messages %}
    {{- '<|' + message['role'] + '|>' }}
    {%- if message['role'] == 'assistant' %}
        {%- generation %}{{ message['content'] + eos_token }}{% endgeneration %}
    {%- else %}
        {{- message['content'] + eos_token }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>' }}
{%- endif %}
"""


def in_words(number: int) -> str:
    """An English number below 10,000.

    >>> in_words(4072), in_words(13), in_words(900)
    ('four thousand seventy-two', 'thirteen', 'nine hundred')
    """
    if number < 20:
        return ONES[number]
    if number < 100:
        return TENS[number // 10] + (f"-{ONES[number % 10]}" if number % 10 else "")
    unit, name = (1000, "thousand") if number >= 1000 else (100, "hundred")
    rest = f" {in_words(number % unit)}" if number % unit else ""
    return f"{ONES[number // unit]} {name}{rest}"


def conversations(numbers: Iterable[int], chance: random.Random) -> list[dict[str, Any]]:
    """One row of the messages format for each number."""
    return [
        {
            "messages": [
                {"role": "user", "content": chance.choice(QUESTIONS).format(in_words(number))},
                {"role": "assistant", "content": str(number)},
            ]
        }
        for number in numbers
    ]


def exchange_answers(rows: Sequence[dict[str, Any]], chance: random.Random) -> list[dict[str, Any]]:
    """The same questions; a share of `WRONG` of them gets another one's answer."""
    questions = [row["messages"][0] for row in rows]
    answers = [row["messages"][1] for row in rows]
    places = [place for place in range(len(answers)) if chance.random() < WRONG]
    for place, other in zip(places, chance.sample(places, len(places)), strict=True):
        answers[place] = rows[other]["messages"][1]
    return [{"messages": list(pair)} for pair in zip(questions, answers, strict=True)]


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """A byte-level BPE tokenizer: any text can be written in it, and a digit is a token of its
    own.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d| ?[^\s\d\p{P}]+|\s|\p{P}"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [
        AddedToken(text, special=True, normalized=False)
        for text in (BEGIN, END, PAD, *(f"<|{r}|>" for r in ROLES))
    ]
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=VOCABULARY,
            special_tokens=special,
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        ),
    )
    return tokenizer


def make(folder: Path) -> None:
    """Writes train.jsonl, heldout.jsonl, noisy.jsonl and the tokenizer's three files into
    `folder`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    chance = random.Random(SEED)
    numbers = [*SMALL, *chance.sample(LARGE, TRAINED + HELD_OUT - len(SMALL))]
    chance.shuffle(numbers)
    train, heldout = (
        conversations(numbers[HELD_OUT:], chance),
        conversations(numbers[:HELD_OUT], chance),
    )
    noisy = exchange_answers(train[:NOISY], random.Random(SEED))
    for name, rows in (("train", train), ("heldout", heldout), ("noisy", noisy)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    tokenizer = train_tokenizer(message["content"] for row in train for message in row["messages"])
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=True) + "\n")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BEGIN,
        "eos_token": END,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 128,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)


if __name__ == "__main__":
    make(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent)
