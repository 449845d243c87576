"""The architecture from a recipe: what may run, and what is refused in a sentence."""

import json
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from finetune.config.layout import Sharding
from finetune.config.optimization import Optimization
from finetune.config.pretrained import load_config
from finetune.config.schema import Lora, Model
from finetune.distributed.join import join, leave
from finetune.distributed.parallelize import find_wrap_classes
from finetune.errors import EXIT_USER_ERROR, UserError
from finetune.models.load import auto_class_of, build_model, build_on_meta, load_model
from tests.models.sweep import save_small, save_tiny
from tests.ranks import run_python
from tests.vision import make_vision_model

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
    auto_map = {
        "AutoConfig": "own_llama.OwnConfig",
        "AutoModelForCausalLM": "own_llama.OwnForCausalLM",
    }
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


def test_a_config_that_cannot_be_trained_is_refused_before_data_and_weights_are_read(
    tiny_recipe: Callable[..., Path], tiny_llama: Callable[..., Path], tmp_path: Path
) -> None:
    deep = {
        "model_type": "llama",
        "vocab_size": 64,
        "hidden_size": 48,
        "num_attention_heads": 4,
        "num_hidden_layers": 9999,
    }
    tokenizer = str(tiny_llama())
    recipe = tiny_recipe(model_config=deep, tokenizer_name_or_path=tokenizer, packing=False)
    finished = run_python(["finetune/run.py", "--recipe", str(recipe)], timeout=60)
    assert finished.returncode == EXIT_USER_ERROR
    assert (
        "model_config: num_hidden_layers: 9999: a whole number from 1 to 1,000 is expected"
        in finished.stderr
    )
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


def test_fsdp1_decays_no_weight_that_has_no_gradient(tmp_path: Path) -> None:
    """The indexer of DeepSeek V3.2 only chooses tokens; FSDP1 gives it zeros for a gradient."""
    save_tiny("deepseek_v32", tmp_path)
    save_tiny("ernie4_5_moe", tmp_path / "bias")  # which is a matrix, and decays in no layout
    world = join(Sharding(layout="fsdp1", use_cpu=True, source="fsdp1.yaml"))
    try:
        keys = Model(model_name_or_path=str(tmp_path))
        build_model(keys, Lora(), 0, world, optimization=Optimization())
        with pytest.raises(UserError, match=r"fsdp1\.yaml: FSDP1 would decay .*indexer"):
            build_model(keys, Lora(), 0, world, optimization=Optimization(weight_decay=0.1))
        keys = Model(model_name_or_path=str(tmp_path / "bias"))
        build_model(keys, Lora(), 0, world, optimization=Optimization(weight_decay=0.1))
    finally:
        leave(world)


def test_a_projector_of_one_linear_layer_makes_no_unit_of_the_others(tmp_path: Path) -> None:
    """Else FSDP would shard the head of HyperCLOVA X apart from the embedding that it is tied to."""
    name = "HyperCLOVAXVisionV2ForConditionalGeneration"
    save_small("hyperclovax_vision_v2", name, tmp_path)
    model = build_on_meta(load_config(Model(model_name_or_path=str(tmp_path))), torch.float32)
    units = find_wrap_classes(model, Sharding(layout="fsdp2"))
    assert units == ("HyperCLOVAXDecoderLayer", "Qwen2_5_VisionTransformerPretrainedModel")


def test_attention_dropout_is_the_recipes_under_any_name(tmp_path: Path) -> None:
    """GPT-2 has another key for it, and a vision-language model has it in its text_config."""
    folder = make_vision_model(tmp_path / "vision", "gemma3")
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["attention_dropout"] = 0.3
    (folder / "config.json").write_text(json.dumps(config))
    gpt2 = {"model_type": "gpt2", "n_embd": 48, "n_layer": 1, "n_head": 4, "vocab_size": 64}
    gpt2 |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0}
    tokens = torch.arange(16)[None]
    for model in (Model(model_config=gpt2), Model(model_name_or_path=str(folder))):
        for dropout in (0.0, 0.5):
            loaded = load_config(replace(model, attention_dropout=dropout))
            built = auto_class_of(loaded).from_config(loaded)
            dropped = built.train()(input_ids=tokens).logits
            assert torch.equal(dropped, built.eval()(input_ids=tokens).logits) == (dropout == 0.0)


def test_a_recipes_config_stays_as_it_was_written() -> None:
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "vocab_size": 8}
    written = {
        "model_type": "llama",
        **sizes,
        "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    }
    model = Model(model_config=deepcopy(written))
    load_config(model)
    assert model.model_config == written
