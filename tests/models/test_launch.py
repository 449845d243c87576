"""Given a model that is built otherwise than Llama, when it is trained, then its export is verified."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.models.families import HYBRIDS, OTHERS
from tests.ranks import run_python

SLIDING = {"sliding_window": 64}
RUNS: dict[
    str, tuple[str, dict[str, Any], dict[str, Any]]
] = {  # the model_type, its config, the recipe
    "falcon_h1": ("falcon_h1", HYBRIDS["falcon_h1"], {}),
    "qwen3_5": ("qwen3_5_text", HYBRIDS["qwen3_5_text"], {"packing": False}),
    "gemma3n": (
        "gemma3n_text",
        OTHERS["gemma3n_text"] | SLIDING | {"vocab_size_per_layer_input": 262},
        {},
    ),
    "gemma4, LoRA": (
        "gemma4_text",
        OTHERS["gemma4_text"] | SLIDING | {"vocab_size_per_layer_input": 262},
        {"use_peft": True, "lora_target_modules": ["q_proj", "up_proj"]},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_it_trains_to_a_verified_export(
    name: str, tiny_recipe: Callable[..., Path], tiny_llama: Callable[..., Path], tmp_path: Path
) -> None:
    model_type, config, keys = RUNS[name]
    config = (
        config | {"hidden_size": 48, "intermediate_size": 64} if "falcon" in model_type else config
    )
    model = tiny_llama("model", model_type=model_type, **config)
    recipe = tiny_recipe(
        model_name_or_path=str(model), max_steps=2, accelerate_config="single", **keys
    )
    finished = run_python(["finetune/run.py", "--recipe", str(recipe)])
    assert finished.returncode == 0, finished.stdout + finished.stderr
    exported = load_file(tmp_path / "run" / "export" / "model.safetensors")
    assert exported.keys() == load_file(model / "model.safetensors").keys()
    if "use_peft" in keys:
        adapter = load_file(tmp_path / "run" / "adapter" / "adapter_model.safetensors")
        assert adapter and all(".lora_" in tensor for tensor in adapter)
