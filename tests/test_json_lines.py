"""Files of JSON lines: a killed run's cut line costs that line alone, and a line ends at a newline and nowhere else."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from finetune.checkpoint.manifest import find_damage
from finetune.checkpoint.save import add_token_ids
from finetune.config.accelerate_file import read_sharding
from finetune.config.schema import Model
from finetune.convert.conversion import convert_file
from finetune.errors import UserError
from finetune.export.card import read_metrics
from finetune.export.merge_choice import ROWS_FILE, read_comparison_rows
from finetune.files.json_files import append_json_lines, read_json_lines
from finetune.files.tensors import read_weight_map
from finetune.plan.architecture import find_config
from finetune.report.run_data import read_run
from finetune.training.metrics import MetricsLog
from finetune.training.screens import answers_before_and_after
from tests.report.runs import make_run

SEPARATED = {"step": 4, "prompt": "one\u2028two\x85three", "answer": "4\u2029", "expected": "4"}
CUT = '{"step": 4, "prompt": "näh'.encode()[:-2]  # in the middle of a letter


@pytest.mark.parametrize("tail", [b"", CUT, b"[" * 100_000, b"[1]", b"{"])
def test_a_cut_line_is_dropped_and_the_next_one_does_not_join_it(
    tail: bytes, tmp_path: Path
) -> None:
    path = tmp_path / "samples.jsonl"
    append_json_lines(path, [SEPARATED])
    with path.open("ab") as file:
        file.write(tail)
    assert read_json_lines(path) == [SEPARATED]
    assert json.loads(path.read_bytes().decode(errors="replace").splitlines()[0]) == SEPARATED
    assert answers_before_and_after(path, 4) == ["  one two three  before: '4'  after: '4'  right"]
    append_json_lines(path, [SEPARATED | {"step": 6}, {"step": 7, "prompt": "\ud800"}])
    assert read_json_lines(path) == [
        SEPARATED,
        SEPARATED | {"step": 6},
        {"step": 7, "prompt": "\ud800"},
    ]
    assert answers_before_and_after(path, 7) == []


def test_a_killed_run_is_reported_resumed_and_described(
    tiny_recipe: Callable[..., Path], tmp_path: Path
) -> None:
    run = make_run(tmp_path / "run", tiny_recipe())
    count = len(read_run(run).lines)
    for name in ("metrics.jsonl", "samples.jsonl"):
        with (run / name).open("ab") as file:
            file.write(CUT)
    assert len(read_run(run).lines) == count
    assert len(read_metrics(run)) == count
    with MetricsLog(run / "metrics.jsonl", steps=70, start_step=60) as log:
        log.write({"step": 61})
    assert [line["step"] for line in map(json.loads, (run / "metrics.jsonl").read_text().split("\n")[-4:-1])] == [60, 60, 61]  # fmt: skip


READERS: dict[str, Callable[[Path], object]] = {
    "config.json": lambda path: find_config(Model(model_name_or_path=str(path.parent))),
    "accelerate.json": lambda path: read_sharding(str(path), None, {"WORLD_SIZE": "1"}),
    "dataset_info.json": lambda path: convert_file(path.parent.parent / "train.yaml"),
    "model.safetensors.index.json": read_weight_map,
    "generation_config.json": lambda path: add_token_ids(path, Model(eot_tokens=("a",)), None),
    ROWS_FILE: lambda path: read_comparison_rows(path.parent, 1, 1),
    "manifest.json": lambda path: print(*find_damage(path.parent)),
}


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("content", ["deep", "huge"])
def test_a_file_from_outside_is_read_within_bounds(
    name: str, content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "data" / name
    path.parent.mkdir()
    (tmp_path / "train.yaml").write_text(
        "stage: sft\nfinetuning_type: lora\nmodel_name_or_path: M\ndataset: a\n"
    )
    path.write_text('{"a":' * 100_000 if content == "deep" else "{")
    if content == "huge":
        os.truncate(path, 2**34)  # of which the disk has nothing
    try:
        READERS[name](path)
    except UserError as error:
        print(error)
    (said,) = capsys.readouterr().out.splitlines()
    assert name in said
