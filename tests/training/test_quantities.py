"""Quantities as people write them: shares of a run, strategies by epoch, a sample of the rows, max_steps: -1."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from finetune.config.schema import DatasetSource
from finetune.data.sources import draw_rows, read_rows
from tests.conftest import make_chat
from tests.training.layouts import train_all, write_config


def test_a_run_in_shares_and_epochs(tiny_recipe: Callable[..., Path], tmp_path: Path) -> None:
    """13 of 24 rows, 4 a step: 4 steps an epoch, 8 in all."""
    rows = str(make_chat(tmp_path / "chat.jsonl", rows=24))
    keys: dict[str, Any] = {
        "datasets": [{"path": rows, "max_samples": 13}],
        "eval_datasets": [{"path": rows, "max_samples": 2}],
        "packing": False,
        "num_train_epochs": 2,
        "max_steps": -1,
        "logging_steps": 0.25,
        "save_total_limit": 9,
        "export_at_end": False,
    }
    by_epoch = tiny_recipe(
        "epochs", save_strategy="epoch", eval_strategy="epoch", keep_best_checkpoint=True, **keys
    )
    in_shares = tiny_recipe("shares", save_steps=0.3, eval_steps=0.4, eval_strategy="steps", **keys)
    config = write_config(tmp_path, "single")
    folders = {recipe: tmp_path / recipe.stem for recipe in (by_epoch, in_shares)}
    printed = train_all(
        tmp_path, [(r, config, [f"output_dir={folder}"]) for r, folder in folders.items()], ranks=1
    )

    assert printed.count(f"{rows}: 13 of its 24 rows (max_samples), drawn by the seed") == 2
    assert saved_at(folders[by_epoch]) == [4, 8]
    assert saved_at(folders[in_shares]) == [3, 6, 8]  # 0.3 of 8 steps, rounded up
    for folder in folders.values():
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        assert [line["step"] for line in lines if "loss" in line] == [2, 4, 6, 8]
        assert [line["step"] for line in lines if "eval_loss" in line] == [0, 4, 8]
        assert json.loads((folder / "data_report.json").read_text())["examples"] == 13


def saved_at(run: Path) -> list[int]:
    return sorted(
        int(path.name.removeprefix("step-")) for path in (run / "checkpoints").glob("step-*")
    )


def test_rows_are_drawn_by_the_seed_and_a_stream_gives_its_first(tmp_path: Path) -> None:
    for name in ("a", "b"):
        make_chat(tmp_path / f"{name}.jsonl", rows=40)
    source = DatasetSource(path=str(tmp_path / "*.jsonl"), max_samples=50)

    def drawn(seed: int) -> list[tuple[str, int]]:
        batches, total = draw_rows(source, seed)
        assert total == 80
        return [(Path(batch.file).stem, number) for batch in batches for number in batch.numbers]

    first = drawn(1)
    assert first == drawn(1)
    assert first == sorted(set(first)), "each row once, in the order of the files"
    assert len(first) == 50
    assert {name for name, _ in first} == {"a", "b"}
    assert set(first) != set(drawn(2))
    streamed = [
        number
        for batch in read_rows(source, streaming=True, batch_rows=16)
        for number in batch.numbers
    ]
    assert streamed == [*range(1, 41), *range(1, 11)]
