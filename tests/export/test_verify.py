"""What goes wrong between the checkpoint and the files is found before the export is published, and reported."""

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from finetune.cli import main
from finetune.errors import UserError
from finetune.export import export as exporting
from finetune.export import reload_process, target, values, verify
from finetune.export import verify as read_back
from finetune.export import write as shard_files
from finetune.export.logits import CheckpointLogits, stream_logits
from finetune.export.target import describe_target
from finetune.export.write import Digests, Weights
from finetune.files.tensors import StoredTensor, read_files, read_folder
from finetune.models.weights import convert_to_parameters
from tests.conftest import make_model
from tests.ranks import run_python

MIXTURE = {"num_hidden_layers": 4, "num_local_experts": 8, "num_experts_per_tok": 2}

MakeModel = Callable[..., Path]


def export(model: Path, tmp_path: Path, *options: str) -> int:
    return main(["export", str(model), "--output", str(tmp_path / "results" / "out"), *options])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("name", "position"),
    [
        ("model.embed_tokens.weight", -1),
        ("model.layers.1.mlp.down_proj.weight", 0),
        ("model.norm.weight", 0),
    ],
)
def test_a_byte_that_changed_in_a_file_is_found(
    name: str,
    position: int,
    dtype: str,
    tiny_llama: MakeModel,
    tmp_path: Path,
    capsys: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The last row of the embedding is of no prompt's token, so that no logit shows it."""
    monkeypatch.setattr(
        target, "BLOCK_BYTES", 4 * 64 * 7
    )  # blocks of seven rows, which divide nothing here
    monkeypatch.setattr(shard_files, "SYNC_BYTES", 20_000)  # several parts a file
    write, is_damaged = exporting.write_weights, threading.Event()

    def write_and_damage(
        folder: Path, weights: Weights, on_disk: Callable[[str, int], object]
    ) -> Digests:
        tensor = read_files(folder / shard.name for shard in weights.shards)[name]
        (part,) = tensor.parts
        place = part.position + position % tensor.byte_count

        def damage(file: str, end: int) -> None:
            if folder / file == part.path and end > place and not is_damaged.is_set():
                is_damaged.set()
                with part.path.open("r+b") as opened:
                    opened.seek(place)
                    (byte,) = opened.read(1)
                    opened.seek(place)
                    opened.write(bytes([byte ^ 1]))
            on_disk(file, end)

        return write(folder, weights, damage)

    monkeypatch.setattr(exporting, "write_weights", write_and_damage)
    assert export(tiny_llama(), tmp_path, "--dtype", dtype, "--max-shard-size", "100KB") == 2
    message = capsys.readouterr().err
    assert "not exported: values read back differ from the checkpoint's" in message
    assert f"{name}: differs from the checkpoint" in message
    assert message.count(": differs from the checkpoint") == 1 and is_damaged.is_set()
    assert not (tmp_path / "results").exists()


def test_values_are_read_back_only_from_what_is_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts are announced in order, each once the disk has it and the kernel has been asked to forget it; the last is the file's end."""
    monkeypatch.setattr(shard_files, "SYNC_BYTES", 20_000)
    happened: list[tuple[str, int]] = []
    fdatasync, fsync, forget = os.fdatasync, os.fsync, shard_files._forget
    monkeypatch.setattr(
        os, "fdatasync", lambda file: (happened.append(("sync", 0)), fdatasync(file))
    )
    monkeypatch.setattr(os, "fsync", lambda file: (happened.append(("sync", 0)), fsync(file)))
    monkeypatch.setattr(
        shard_files,
        "_forget",
        lambda file, start, end: (happened.append(("forget", end)), forget(file, start, end)),
    )
    shard_files.make_file(tmp_path / "file", b"head", 50_004)
    assert (tmp_path / "file").read_bytes() == b"head" + bytes(50_000)
    chunks = [bytes([number]) * 10_000 for number in range(5)]
    shard_files.fill_file(
        tmp_path / "file", 4, chunks, lambda end: happened.append(("announced", end))
    )
    ends = [20_004, 40_004, 50_004]
    assert happened == [
        event for end in ends for event in (("sync", 0), ("forget", end), ("announced", end))
    ]
    assert (tmp_path / "file").read_bytes() == b"head" + b"".join(chunks)


UNREADABLE = """
import sys
from pathlib import Path
from finetune.export.verify import DiskProgress
folder = Path(sys.argv[1])
progress = DiskProgress(folder, ["weights"])
(folder / "weights").unlink()
progress.follow(iter(['{"file": "weights", "end": 4}']))
progress.wait_for("weights", 4)
"""


def test_a_file_that_cannot_be_read_back_ends_the_check(tmp_path: Path) -> None:
    (tmp_path / "check.py").write_text(UNREADABLE)
    (tmp_path / "weights").write_bytes(b"1234")
    ended = run_python([str(tmp_path / "check.py"), str(tmp_path)], timeout=60)
    assert (
        ended.returncode == 1
        and f"{tmp_path / 'weights'}: cannot be read back: No such file" in ended.stderr
    )


def test_a_reading_waits_for_the_rows_that_it_needs(tiny_llama: MakeModel) -> None:
    model, name = tiny_llama(), "model.layers.0.mlp.up_proj.weight"
    (part,) = read_files([model / "model.safetensors"])[name].parts
    asked: list[tuple[str, int]] = []
    files = read_back.WrittenFiles(
        model, ("model.safetensors",), lambda file, end: asked.append((file, end))
    )
    rows = files.read(name, 3, 5, torch.clone)
    files.close()
    row_bytes = rows.nbytes // 2
    assert asked == [("model.safetensors", part.position + 5 * row_bytes)]
    assert torch.equal(rows, load_file(model / "model.safetensors")[name][3:5])


def test_a_tensor_that_was_read_wrongly_is_found_by_the_logits(
    tiny_llama: MakeModel, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files then hold what was read, so that no digest differs."""
    stored_value = values.stored_value

    def misread(stored: StoredTensor, name: str, dtype: torch.dtype) -> target.Value:
        value = stored_value(stored, name, dtype)
        if name != "model.layers.0.mlp.up_proj.weight":
            return value
        return replace(value, rows=lambda start, stop: value.rows(start, stop) + 0.001)

    monkeypatch.setattr(values, "stored_value", misread)
    assert export(tiny_llama(), tmp_path) == 2
    assert "in a separate process the logits differ by" in capsys.readouterr().err
    assert not (tmp_path / "results").exists()


def test_a_checkpoint_that_cannot_be_read_for_its_logits_is_reported(
    tiny_llama: MakeModel, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreadable(stored: StoredTensor, start: int, stop: int) -> torch.Tensor:
        raise UserError(f"{stored.name}: the file has become shorter than its header says")

    monkeypatch.setattr(verify, "read_rows", unreadable)
    assert export(tiny_llama(), tmp_path) == 2
    assert "the file has become shorter than its header says" in capsys.readouterr().err
    assert not (tmp_path / "results").exists()


@pytest.mark.timeout(120)
def test_a_failed_write_does_not_wait_for_the_logits(
    tiny_llama: MakeModel, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = threading.Event()

    def endless(
        model: torch.nn.Module, rows: Callable[[str, int, int], torch.Tensor], _choices: Any
    ) -> torch.Tensor:
        while True:
            rows("model.norm.weight", 0, 1)
            started.set()

    def failing(*_: Any) -> Digests:
        assert started.wait(60)
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(verify, "stream_logits", endless)
    monkeypatch.setattr(exporting, "write_weights", failing)
    assert export(tiny_llama(), tmp_path) == 2
    assert (
        "cannot be written: Input/output error; nothing is left of the export"
        in capsys.readouterr().err
    )
    assert not (tmp_path / "results").exists()


def test_both_logits_are_computed_without_torchs_own_threads(
    tiny_llama: MakeModel, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order of sums, and with it the last bits of the logits, depends on their number."""
    read_rows, make_environment = verify.read_rows, reload_process._environment
    seen: set[str] = set()

    def rows(stored: StoredTensor, start: int, stop: int) -> torch.Tensor:
        seen.add(f"{torch.get_num_threads()} here")
        return read_rows(stored, start, stop)

    def its_environment() -> dict[str, str]:
        found = make_environment()
        seen.add(f"{found['OMP_NUM_THREADS']} in the separate process")
        return found

    monkeypatch.setattr(verify, "read_rows", rows)
    monkeypatch.setattr(reload_process, "_environment", its_environment)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert export(tiny_llama(), tmp_path) == 0
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert seen == {"1 here", "1 in the separate process"}
    assert "identical logits" in capsys.readouterr().out


@pytest.mark.parametrize("seed", [2, 8, 9])
def test_tokens_that_rounding_sends_to_other_experts_do_not_refuse_a_mixture(
    seed: int, tmp_path: Path
) -> None:
    """Weights rounded to bf16 are the same model; one layer of other weights is not, whatever its experts."""
    make_model(tmp_path, model_type="mixtral", seed=seed, initializer_range=0.15, **MIXTURE)
    mixture = describe_target(tmp_path)
    stored = convert_to_parameters(mixture.model, read_folder(tmp_path), str(tmp_path))

    def rows(name: str, start: int, stop: int) -> torch.Tensor:
        return verify.read_rows(stored[mixture.tied.get(name, name)], start, stop)

    def rounded(name: str, start: int, stop: int) -> torch.Tensor:
        return rows(name, start, stop).bfloat16().float()

    def other(name: str, start: int, stop: int) -> torch.Tensor:
        scale = 1.5 if name == "model.layers.1.self_attn.o_proj.weight" else 1
        return scale * rounded(name, start, stop)

    bound = verify.BOUNDS[torch.bfloat16]
    with ThreadPoolExecutor(1) as pool:
        checkpoint = CheckpointLogits(pool, partial(stream_logits, mixture.model, rows))
        expected = checkpoint.result()
        exported = stream_logits(mixture.model, rounded)
        assert exported.relative_difference(expected) > 2 * bound
        assert verify.compare_logits(checkpoint, exported, bound).endswith("with the same experts")
        wrong = stream_logits(mixture.model, other)
        with pytest.raises(
            UserError, match=r"differ by 0\.\d+ from .* with the same experts; round"
        ):
            verify.compare_logits(checkpoint, wrong, bound)
