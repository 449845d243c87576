"""Makes the preference pairs of recipes/quickstart_dpo.yaml: 4,071 is preferred to 4071, and 604 to
6,04.

The files are shipped; this script makes them again, byte for byte: python
recipes/quickstart/make_pairs.py [FOLDER] The numbers are those of the quickstart; held out are its
held-out ones that have a thousands separator.
"""

import json
import random
import sys
from collections.abc import Iterable
from pathlib import Path

HERE = Path(__file__).resolve().parent
TRAINED = 1_500
SEED = 21


def reject(number: int) -> str:
    """What a number should not look like: a separator that is missing, or that stands in the wrong
    place.

    >>> reject(4071), reject(604), reject(13), reject(7)
    ('4071', '6,04', '1,3', '7,')
    """
    digits = str(number)
    return digits if number >= 1000 else f"{digits[:1]},{digits[1:]}"


def make_pairs(rows: Iterable[str]) -> list[dict[str, str]]:
    """A pair of answers for each of the quickstart's rows."""
    pairs = []
    for row in rows:
        question, answer = (message["content"] for message in json.loads(row)["messages"])
        number = int(answer)
        pairs.append({"question": question, "chosen": f"{number:,}", "rejected": reject(number)})
    return pairs


def make(folder: Path) -> None:
    """Writes pairs_train.jsonl and pairs_heldout.jsonl into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    train = (HERE / "train.jsonl").read_text().splitlines()
    held_out = make_pairs((HERE / "heldout.jsonl").read_text().splitlines())
    pairs = {
        "pairs_train": make_pairs(random.Random(SEED).sample(train, TRAINED)),
        "pairs_heldout": [pair for pair in held_out if "," in pair["chosen"]],
    }
    for name, rows in pairs.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    make(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE)
