"""The architecture from a recipe: what may run, and what is refused in a sentence."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from finetune.distributed.sharding import Sharding
from finetune.distributed.world import join, leave
from finetune.errors import EXIT_USER_ERROR, UserError
from finetune.models.layers import use_liger_kernels
from finetune.models.load import build_on_meta, load_model
from finetune.pretrained_config import check_config, load_config
from finetune.recipe.reader import read_recipe
from finetune.recipe.schema import Data, Lora, Model
from tests.ranks import run_python

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


SIZES: dict[str, Any] = {"vocab_size": 64, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
HALF = 6  # of the head size: a factor for each frequency
LENGTH_DEPENDENT: dict[str, dict[str, Any]] = {
    "longrope": SIZES
    | {
        "model_type": "phi3",
        "intermediate_size": 64,
        "pad_token_id": 0,
        "original_max_position_embeddings": 48,
        "rope_parameters": {
            "rope_type": "longrope",
            "short_factor": [1.0] * HALF,
            "long_factor": [2.0] * HALF,
            "rope_theta": 10000.0,
            "original_max_position_embeddings": 48,
        },
    },
    "dynamic": SIZES
    | {
        "model_type": "llama",
        "intermediate_size": 64,
        "max_position_embeddings": 48,
        "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
    },
}


@pytest.mark.parametrize("rope", LENGTH_DEPENDENT)
def test_rope_that_depends_on_the_longest_document_is_refused_where_a_packed_row_may_hold_one(rope: str) -> None:
    model = Model(model_config=LENGTH_DEPENDENT[rope])
    config = load_config(model)
    with pytest.raises(UserError, match=f"{rope} RoPE changes its frequencies beyond 48 tokens.*set packing: false"):
        check_config(config, model, Data(max_length=64), 64)
    check_config(config, model, Data(max_length=64, packing=False), 64)
    check_config(config, model, Data(max_length=48), 64)


def test_a_config_that_cannot_be_trained_is_refused_before_data_and_weights_are_read(
    tiny_recipe: Callable[..., Path], tiny_llama: Callable[..., Path], tmp_path: Path
) -> None:
    deep = LENGTH_DEPENDENT["dynamic"] | {"num_hidden_layers": 9999}
    tokenizer = str(tiny_llama())
    recipe = tiny_recipe(model_config=deep, tokenizer_name_or_path=tokenizer, packing=False)
    finished = run_python(["finetune/run.py", "--recipe", str(recipe)], timeout=60)
    assert finished.returncode == EXIT_USER_ERROR
    assert "model_config: num_hidden_layers: 9999: from 1 to 1,000 decoder layers can be trained" in finished.stderr
    assert "Traceback" not in finished.stderr
    assert not list((tmp_path / "run").glob("*.json")), "the run began"


def test_tf32_is_the_recipes(tiny_llama: Callable[..., Path]) -> None:
    """Of float32 products on a GPU; the flag alone can be seen on a CPU."""
    before = torch.backends.cuda.matmul.allow_tf32
    world = join(Sharding(layout="single", use_cpu=True))
    try:
        for tf32 in (True, False):
            load_model(Model(model_name_or_path=str(tiny_llama()), tf32=tf32), Lora(), 0, world)
            assert torch.backends.cuda.matmul.allow_tf32 == torch.backends.cudnn.allow_tf32 == tf32
    finally:
        leave(world)
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = before
