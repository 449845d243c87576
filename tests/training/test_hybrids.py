"""Hybrids of attention with linear attention, state spaces or convolutions: they train on one document a row, and the run ends
with an export that is verified; on packed rows they are refused before the first step."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import make_chat, make_model
from tests.ranks import run_python
from tests.training import reference
from tests.training.layouts import assert_losses, train_all, write_config

MIXER = {"mamba_d_state": 8, "mamba_n_groups": 1, "mamba_d_head": 16}
HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    },
    "falcon_h1": MIXER | {"mamba_d_ssm": 64, "mamba_n_heads": 4},
    "granitemoehybrid": MIXER
    | {
        "layer_types": ["mamba", "attention"],
        "mamba_n_heads": 8,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 32,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_ff_dim": 128},
}


@pytest.fixture(scope="module")
def recipes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("hybrids")
    data, paths = make_chat(folder / "chat.jsonl", rows=12), {}
    for family, keys in HYBRIDS.items():
        model = make_model(folder / family / "model", model_type=family, **keys)
        recipe = {
            "model_name_or_path": str(model),
            "datasets": [{"path": str(data)}],
            "max_length": 64,
            "packing": False,
            "attn_implementation": "eager",
            "global_batch_size": 4,
            "max_steps": 2,
            "learning_rate": 1e-3,
            "logging_steps": 1,
            "output_dir": str(folder / family / "run"),
        }
        paths[family] = folder / f"{family}.yaml"
        paths[family].write_text(yaml.safe_dump(recipe))
    return paths


@pytest.mark.slow
def test_they_train_unpacked_to_a_verified_export(recipes: dict[str, Path], tmp_path: Path) -> None:
    config = write_config(tmp_path, "full_shard")
    printed = train_all(tmp_path, [(recipe, config, []) for recipe in recipes.values()], ranks=2, timeout=500)
    for family, recipe in recipes.items():
        run = recipe.parent / family / "run"
        assert f"{run / 'export'}: " in printed
        assert_losses(run, reference.train(recipe), norms=1e-4)
    assert printed.count("verified: every value, and identical logits in a separate process") == len(recipes)


@pytest.mark.slow
@pytest.mark.parametrize("family", HYBRIDS)
def test_packed_rows_are_refused_before_anything_is_lost(family: str, recipes: dict[str, Path], tmp_path: Path) -> None:
    keys = ["packing=true", f"output_dir={tmp_path / 'run'}", "attn_implementation=auto"]
    refused = run_python(["finetune/run.py", "--recipe", str(recipes[family]), *keys])
    assert refused.returncode == 2
    assert "in which packed documents cannot be kept apart; set packing: false" in refused.stderr
