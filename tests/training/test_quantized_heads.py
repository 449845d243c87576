"""An adapter on a base in 4 bits, for every kind of head: trained, merged and exported."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import make_model, slow_but
from tests.training.layouts import train_all, write_config, write_recipe

pytest.importorskip("bitsandbytes")
NUMBERS = range(12)
# name -> the rows, the recipe's keys, and whether a label is one of the head's outputs
HEADS: dict[str, tuple[list[dict[str, Any]], dict[str, Any], bool]] = {
    "reward": (
        [{"prompt": f"{n}?", "chosen": "yes", "rejected": "no", "margin": n / 4} for n in NUMBERS],
        {"method": "reward"},
        False,
    ),
    "steps": (
        [{"prompt": f"{n}?", "completions": ["a", "b"], "labels": [1, n % 2]} for n in NUMBERS],
        {"method": "process_reward"},
        True,
    ),
    "classes": (
        [{"text": f"It is {n}.", "label": n % 2} for n in NUMBERS],
        {"method": "classify", "labels": ["even", "odd"]},
        True,
    ),
    "several classes": (
        [{"text": f"It is {n}.", "label": [n % 2, 2]} for n in NUMBERS],
        {
            "method": "classify",
            "labels": ["even", "odd", "number"],
            "problem_type": "multi_label_classification",
        },
        False,
    ),
    "ranks": (
        [{"query": f"{n}?", "documents": ["yes", "no"], "labels": [2.5, 0]} for n in NUMBERS],
        {"method": "rerank", "num_negatives": 1},
        False,
    ),
    "embeddings": (
        [{"query": f"{n}?", "positive": f"It is {n}."} for n in NUMBERS],
        {"method": "embed"},
        False,
    ),
}


QUICK = ("classes", "embeddings")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, slow_too: bool) -> Path:
    """A run of two steps and its export for each of HEADS."""
    folder = tmp_path_factory.mktemp("quantized-heads")
    model = make_model(folder / "model")
    listed = []
    for name in HEADS if slow_too else QUICK:
        rows, keys, _ = HEADS[name]
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        recipe = write_recipe(
            folder / f"{name}.yaml",
            model,
            data,
            **keys,
            use_peft=True,
            lora_r=4,
            load_in_4bit=True,
            max_steps=2,
            global_batch_size=4,
            eval_split_size=4,
            export_at_end=True,
            output_dir=str(folder / name),
        )
        listed.append((recipe, write_config(folder, "single"), []))
    train_all(folder, listed, ranks=1)
    return folder


@pytest.mark.parametrize("name", slow_but(QUICK, HEADS))
def test_it_is_merged_onto_a_base_chosen_by_what_its_labels_say(name: str, runs: Path) -> None:
    """By cross entropy only where a label is one of the head's outputs: others are numbers, or name several."""
    assert (runs / name / "export" / "model.safetensors").is_file()
    assert (runs / name / "adapter" / "adapter_model.safetensors").is_file()
    assert (runs / name / "comparison_rows.json").is_file() == HEADS[name][2]
