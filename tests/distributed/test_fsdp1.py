"""What torch cannot train in a layout is refused in a sentence, before weights are read."""

from collections.abc import Callable
from pathlib import Path

from tests.ranks import ROOT, launch_ranks
from tests.training.layouts import write_config


def test_lora_under_fsdp1_on_one_rank_is_refused_by_name(
    tiny_recipe: Callable[..., Path], tmp_path: Path
) -> None:
    config = write_config(tmp_path, "FULL_SHARD")
    recipe = tiny_recipe(use_peft=True)
    ended = launch_ranks(
        ROOT / "finetune" / "run.py", ["--recipe", str(recipe), "--config", str(config)], ranks=1
    )
    assert ended.returncodes == (2,), ended.outputs[0]
    place, said = ended.outputs[0].splitlines()[-1].split(": ", 1)
    assert place.startswith(f"{config}:") and said == (
        "FSDP1 without shards (NO_SHARD, or one rank) cannot hold frozen parameters (LoRA's base, frozen_modules); use "
        "accelerate_config: single, which is the same layout, or set fsdp_version: 2"
    )
    assert "Traceback" not in ended.outputs[0]
