"""The shipped quickstart data: made again byte for byte, with nothing held out that was trained on."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from finetune.config.reader import RECIPES
from finetune.data.images import open_image, read_image

FOLDER = RECIPES / "quickstart"


def answers(file: str) -> list[str]:
    """What the assistant says in each row of `file`."""
    rows = [json.loads(line) for line in (FOLDER / file).read_text().splitlines()]
    return [row["messages"][-1]["content"] for row in rows]


def test_the_script_makes_the_shipped_files(tmp_path: Path) -> None:
    for script in ("make.py", "make_pairs.py", "make_spoken.py", "make_products.py"):
        subprocess.run([sys.executable, str(FOLDER / script), str(tmp_path)], check=True)
    for folder in (Path(), Path("products")):
        made = {
            file.name: file.read_bytes() for file in (tmp_path / folder).iterdir() if file.is_file()
        }
        shipped = {
            file.name: file.read_bytes() for file in (FOLDER / folder).iterdir() if file.is_file()
        }
        assert made == {
            name: content for name, content in shipped.items() if not name.endswith(".py")
        }


@pytest.mark.slow
def test_the_pictures_are_drawn_again(tmp_path: Path) -> None:
    """Their pixels are the same; how PNG packs them depends on the version of Pillow."""
    subprocess.run([sys.executable, str(FOLDER / "make_pictures.py"), str(tmp_path)], check=True)
    shipped, seen = FOLDER / "vision", dict[str, set[bytes]]()
    assert {file.name for file in tmp_path.iterdir()} == {file.name for file in shipped.iterdir()}
    for file in shipped.iterdir():
        if file.suffix != ".jsonl":
            assert (tmp_path / file.name).read_bytes() == file.read_bytes()
            continue
        drawn, again = (
            [json.loads(line) for line in path.open()] for path in (file, tmp_path / file.name)
        )
        texts = [[(row["question"], row["answer"]) for row in rows] for rows in (drawn, again)]
        pixels = [
            [open_image(read_image(row["image"], tmp_path)).tobytes() for row in rows]
            for rows in (drawn, again)
        ]
        assert texts[0] == texts[1] and pixels[0] == pixels[1]
        seen[file.stem] = set(pixels[0])
    assert len(seen["heldout"]) == 100 and not seen["heldout"] & seen["train"]


def test_no_number_is_held_out_and_trained_on() -> None:
    trained, held_out = set(answers("train.jsonl")), set(answers("heldout.jsonl"))
    assert len(trained) == 5000
    assert len(held_out) == 100
    assert not trained & held_out


def test_pairs_prefer_the_separator_and_hold_out_what_no_recipe_trains_on() -> None:
    trained, held_out = (
        [json.loads(line) for line in (FOLDER / f"pairs_{of}.jsonl").open()]
        for of in ("train", "heldout")
    )
    assert all(
        pair["chosen"] == f"{int(pair['chosen'].replace(',', '')):,}" != pair["rejected"]
        for pair in trained
    )
    asked = {pair["question"] for pair in held_out}
    assert len(asked) == len(held_out) > 80 and all("," in pair["chosen"] for pair in held_out)
    assert not {pair["chosen"].replace(",", "") for pair in held_out} & set(answers("train.jsonl"))
    assert {pair["chosen"] for pair in trained}.isdisjoint(pair["chosen"] for pair in held_out)


def test_spoken_numbers_have_no_hyphen_and_are_in_no_other_file() -> None:
    trained, held_out = (
        [json.loads(line) for line in (FOLDER / f"spoken_{of}.jsonl").open()]
        for of in ("train", "heldout")
    )
    assert len(trained) == 1000 and len(held_out) == 100
    assert not any("-" in row["prompt"][0]["content"] for row in (*trained, *held_out))
    numbers = [{row["answer"] for row in rows} for rows in (trained, held_out)]
    assert not numbers[0] & numbers[1] and not (numbers[0] | numbers[1]) & {
        *answers("train.jsonl"),
        *answers("heldout.jsonl"),
    }


def test_every_row_fits_and_any_text_can_be_written() -> None:
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    rows = [
        json.loads(line)["messages"]
        for file in ("train", "heldout")
        for line in (FOLDER / f"{file}.jsonl").open()
    ]
    encoded = tokenizer.apply_chat_template(
        rows, return_dict=True, return_assistant_tokens_mask=True
    )
    assert max(map(len, encoded["input_ids"])) <= 32, "many to a row"
    for ids, mask, row in zip(encoded["input_ids"], encoded["assistant_masks"], rows, strict=True):
        trained = [token for token, is_trained in zip(ids, mask, strict=True) if is_trained]
        assert tokenizer.decode(trained) == row[-1]["content"] + tokenizer.eos_token
        assert len(trained) == len(row[-1]["content"]) + 1, "a digit is a token of its own"
    assert tokenizer.decode(tokenizer("Grüße, 世界! 12\n").input_ids) == "Grüße, 世界! 12\n"
