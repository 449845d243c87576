"""The architecture from a recipe: what may run, and what is refused in a sentence."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from finetune.errors import UserError
from finetune.models.build import build_on_meta, load_config
from finetune.models.compile import use_liger_kernels
from finetune.recipe.reader import read_recipe
from finetune.recipe.schema import Model

CODE = """
from transformers import LlamaConfig, LlamaForCausalLM

class OwnConfig(LlamaConfig):
    model_type = "own_llama"

class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""


@pytest.fixture
def own_code(tiny_llama: Callable[..., Path]) -> Path:
    """A Llama whose folder brings its own classes, as repositories of the hub do."""
    folder = tiny_llama("own")
    (folder / "own_llama.py").write_text(CODE)
    config = json.loads((folder / "config.json").read_text())
    auto_map = {"AutoConfig": "own_llama.OwnConfig", "AutoModelForCausalLM": "own_llama.OwnForCausalLM"}
    config |= {"model_type": "own_llama", "auto_map": auto_map, "architectures": ["OwnForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_trust_remote_code_decides_whether_a_models_own_code_runs(own_code: Path) -> None:
    with pytest.raises(UserError, match="trust_remote_code"):
        load_config(Model(model_name_or_path=str(own_code)))
    config = load_config(Model(model_name_or_path=str(own_code), trust_remote_code=True))
    built = build_on_meta(config, torch.float32, trust_remote_code=True)
    assert type(built).__name__ == "OwnForCausalLM"
    assert all(parameter.is_meta for parameter in built.parameters())


def test_use_liger_kernel_is_refused_in_a_sentence_on_a_cpu(tiny_recipe: Callable[..., Path]) -> None:
    recipe = read_recipe(str(tiny_recipe(use_liger_kernel=True)))
    assert recipe.model.use_liger_kernel
    built = build_on_meta(load_config(recipe.model), torch.float32)
    with pytest.raises(UserError, match="use_liger_kernel: Liger's kernels run on CUDA only"):
        use_liger_kernels(built, torch.device("cpu"))
