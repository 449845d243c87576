"""The keys that make a run faster, through the script that the launcher starts."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors import safe_open

from tests.ranks import ROOT, launch_ranks


def losses(run: Path) -> dict[int, float]:
    """The training loss by step."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


@pytest.mark.slow
def test_bf16_moments_updated_in_backward_resume_exactly_and_profiled_steps_leave_a_trace(
    tmp_path: Path, tiny_recipe: Callable[..., Path]
) -> None:
    """On two ranks, of four steps."""
    updated = {"optim": "adamw_bf16_moments", "optim_in_backward": True, "max_grad_norm": None}
    rows = {"per_device_train_batch_size": 2, "attention_dropout": 0.1}
    recipe = tiny_recipe(save_steps=2, profile_steps=[3, 9], export_at_end=False, **updated, **rows)
    text = recipe.read_text() + "max_grad_norm: null\n"  # tiny_recipe leaves out what is None
    recipe.write_text(text)
    arguments = ["--config", "fsdp_full_shard.yaml", "--recipe", str(recipe)]
    first = launch_ranks(ROOT / "finetune" / "run.py", arguments, timeout=180).check()
    assert (
        "\nupdate  each parameter in the backward, its gradient freed at once\n" in first.outputs[0]
    )
    run = tmp_path / "run"
    whole = losses(run)
    assert len(whole) == 4

    with safe_open(next((tmp_path / "tiny-llama").glob("*.safetensors")), "pt") as file:
        parameters = len(list(file.keys()))
    for rank in (0, 1):
        trace = json.loads((run / "profile" / f"trace-rank{rank}.json").read_text())
        steps = sum(
            "AdamWBf16Moments.step" in event.get("name", "") for event in trace["traceEvents"]
        )
        assert steps == 2 * parameters

    pieces = list((run / "checkpoints" / "step-00000002" / "optimizer").glob("*.safetensors"))
    dtypes = set()
    for piece in pieces:
        with safe_open(piece, "pt") as file:
            names = [name for name in file.keys() if ".exp_avg" in name]  # noqa: SIM118
            dtypes |= {str(file.get_slice(name).get_dtype()) for name in names}
    assert dtypes == {"BF16"}

    shutil.rmtree(run / "checkpoints" / "step-00000004")
    launch_ranks(ROOT / "finetune" / "run.py", arguments, timeout=180).check()
    assert losses(run) == whole
