"""Makes the prompts of the quickstart for rewards: numbers as they are spoken, without hyphens, and
their digits.

The files are shipped; this script makes them again, byte for byte: python
recipes/quickstart/make_spoken.py [FOLDER]
"""

import json
import random
import sys
from collections.abc import Iterable
from pathlib import Path

from make import HELD_OUT, LARGE, QUESTIONS, in_words

HERE = Path(__file__).resolve().parent
TRAINED = 1_000
SEED = 32


def read_numbers(*files: str) -> set[int]:
    """The numbers that the quickstart's files have."""
    rows = (json.loads(line) for file in files for line in (HERE / file).read_text().splitlines())
    return {int(row["messages"][1]["content"]) for row in rows}


def prompts(numbers: Iterable[int], chance: random.Random) -> list[dict[str, object]]:
    """A row for each number: what is asked, and what is right."""
    rows = []
    for number in numbers:
        asked = chance.choice(QUESTIONS).format(in_words(number).replace("-", " "))
        rows.append({"prompt": [{"role": "user", "content": asked}], "answer": str(number)})
    return rows


def make(folder: Path) -> None:
    """Writes spoken_train.jsonl and spoken_heldout.jsonl into `folder`: no number is in two
    files.
    """
    chance = random.Random(SEED)
    unused = sorted(set(LARGE) - read_numbers("train.jsonl", "heldout.jsonl"))
    numbers = chance.sample(unused, TRAINED + HELD_OUT)
    for name, part in (("train", numbers[HELD_OUT:]), ("heldout", numbers[:HELD_OUT])):
        text = "".join(json.dumps(row) + "\n" for row in prompts(part, chance))
        (folder / f"spoken_{name}.jsonl").write_text(text)


if __name__ == "__main__":
    make(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE)
