"""MLX on its CPU reads our folders as they are: mlx-lm computes the logits that transformers computes.

Slow, and needs `pip install -e ".[mlx]"`, which on Linux brings MLX for CPUs.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from finetune.cli import main
from tests.export.gguf_models import FAMILIES, make_gguf_model

mlx_lm = pytest.importorskip("mlx_lm", reason='pip install -e ".[mlx]"')
core = pytest.importorskip("mlx.core")


# mlx-lm 0.32 leaves out YaRN's attention_factor and fails on LongRoPE and on transformers 5's Qwen3 MoE; Gemma 2 is off by 0.4%.
OTHERWISE = ("qwen2_yarn_attention", "phi3_longrope", "gemma2", "qwen3_moe")


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in OTHERWISE])
def test_mlx_computes_what_transformers_computes(
    name: str, shared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, out = make_gguf_model(tmp_path / "model", name, shared), tmp_path / "out"
    assert (
        main(["export", str(model), "--output", str(out), "--no-verify", "--dtype", "float32"]) == 0
    )
    assert f"mlx_lm.generate --model {out} --prompt" in capsys.readouterr().out
    ids = np.arange(40).reshape(2, 20) * 7 % 250
    plain = AutoModelForCausalLM.from_pretrained(out)
    with torch.no_grad():
        expected = plain(torch.from_numpy(ids)).logits.numpy()
    opened, _ = mlx_lm.load(str(out))
    found = np.array(opened(core.array(ids)).astype(core.float32))
    difference = float(np.linalg.norm(found - expected) / np.linalg.norm(expected))
    print(name, difference)
    assert difference < 1e-4
