"""QLoRA on mixtures whose experts are in few bits too: the losses are those of transformers, peft and bitsandbytes alone under
every layout, each expert has bitsandbytes' own bytes, and the export is the base that was trained with its adapters merged."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from finetune.config.layout import Sharding
from finetune.config.schema import Lora, Model
from finetune.distributed.join import join, leave
from finetune.export.export import export
from finetune.models import quantized_weights
from finetune.models.load import load_model
from finetune.models.quantized_layers import quantized_layers
from finetune.models.quantized_weights import dequantize_tensor, quantize_tensor
from tests.conftest import make_chat, make_model, slow_but
from tests.models import experts_on_ranks
from tests.models.experts_on_ranks import KINDS
from tests.ranks import launch_ranks
from tests.training import reference
from tests.training.layouts import assert_losses, train_families, write_recipe
from tests.training.test_expert_parallel import COUNTS
from tests.training.test_experts import FAMILIES, SMALL

functional = pytest.importorskip("bitsandbytes.functional")

STEPS = 3
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
# On a CPU bitsandbytes dequantizes a matrix rightly where its rows are a multiple of 64.
SIZES = SMALL | {"moe_intermediate_size": 64}
LATENT = {"q_lora_rank": 64, "kv_lora_rank": 64}
RECIPES: dict[str, dict[str, Any]] = {
    "mixtral": {"lora_target_modules": ["q_proj", "o_proj"], "bnb_4bit_use_double_quant": True},
    "qwen3_moe": {"lora_target_modules": ["q_proj", "v_proj"], "lora_target_parameters": []},
    "gpt_oss": {
        "lora_target_modules": [],
        "lora_target_parameters": ["layers.1.mlp.experts.gate_up_proj"],
    },
    "deepseek_v3": {"lora_target_modules": ["o_proj"]},
}
VERIFIED = [
    ("mixtral", "full_shard", 2),
    ("deepseek_v3", "divided", 2),
]  # exported by the run itself
# (family, layout, ranks); full_shard with activation checkpointing, the others without; divided: expert parallelism
WANTED = [
    ("mixtral", "full_shard", 2),
    ("mixtral", "ddp", 2),
    ("qwen3_moe", "shard_grad_op", 2),
    ("gpt_oss", "full_shard", 2),
    ("deepseek_v3", "full_shard", 2),
    *((family, "divided", 2) for family in RECIPES),
    ("mixtral", "single", 1),
    ("deepseek_v3", "single", 1),
]
QUICK = [("mixtral", "full_shard", 2), ("deepseek_v3", "single", 1)]
EXPORTED = [("mixtral", "full_shard"), ("mixtral", "divided"), ("gpt_oss", "divided")]


def make_mixture(folder: Path, family: str) -> Path:
    own = FAMILIES[family] | {
        key: 6 for key in COUNTS if key in FAMILIES[family]
    }  # experts, for two ranks to divide
    return make_model(
        folder, model_type=family, **SIZES | own | (LATENT if "deepseek" in family else {})
    )


@pytest.fixture(scope="module")
def recipes(folder: Path) -> dict[str, Path]:
    data = make_chat(folder / "chat.jsonl", rows=26)
    common: dict[str, Any] = {
        "global_batch_size": 5,
        "max_steps": STEPS,
        "learning_rate": 1e-2,
        "save_steps": STEPS,
        "use_peft": True,
        "load_in_4bit": True,
        "lora_r": 4,
        "lora_target_parameters": EXPERTS,
    }
    return {
        family: write_recipe(
            folder / f"{family}.yaml",
            make_mixture(folder / family / "model", family),
            data,
            **common | keys,
        )
        for family, keys in RECIPES.items()
    }


@pytest.fixture(scope="module")
def runs(folder: Path, recipes: dict[str, Path], slow_too: bool) -> Callable[[str, str, int], Path]:
    return train_families(folder, recipes, WANTED if slow_too else QUICK, VERIFIED)


@pytest.mark.parametrize(("family", "layout", "ranks"), slow_but(QUICK, WANTED))
def test_losses_and_gradients_are_those_of_transformers_peft_and_bitsandbytes(
    family: str, layout: str, ranks: int, runs: Callable[..., Path], recipes: dict[str, Path]
) -> None:
    assert_losses(runs(family, layout, ranks), reference.losses(recipes[family]))


@pytest.mark.parametrize(("family", "layout"), slow_but(EXPORTED[:1], EXPORTED))
def test_the_export_has_the_logits_of_peft_on_the_base_that_was_trained(
    family: str, layout: str, runs: Callable[..., Path], tmp_path: Path
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    run = runs(family, layout, 2)
    if (family, layout, 2) not in VERIFIED:
        export(run, run / "export", log=lambda _: None)
        export(run, run / "adapter", adapter_only=True, log=lambda _: None)
    ids = torch.arange(3, 40)[None]
    kind = KINDS["double" if family == "mixtral" else "nf4"]
    base: Any = AutoModelForCausalLM.from_pretrained(
        run.parent / "model",
        dtype=torch.float32,
        quantization_config=reference.by_bitsandbytes(kind),
    )
    reference.quantize_experts(base, kind)
    merged = AutoModelForCausalLM.from_pretrained(run / "export", dtype=torch.float32).eval()
    adapted = PeftModel.from_pretrained(base, run / "adapter").train()
    with torch.no_grad():
        found, expected = adapted(ids).logits, merged(ids).logits
        with adapted.disable_adapter():
            before = adapted(ids).logits
    assert (found - before).norm() > 1e-2 * before.norm()
    assert (found - expected).norm() < 1e-5 * expected.norm()


def load_quantized(folder: Path, kind: str, lora: Lora | None = None) -> Any:
    world = join(Sharding(layout="single", use_cpu=True))
    try:
        lora = lora or Lora(use_peft=True, lora_r=2, lora_target_modules=("o_proj",))
        return load_model(Model(model_name_or_path=str(folder)), lora, 0, world, KINDS[kind])[0]
    finally:
        leave(world)


@pytest.fixture(scope="module")
def expert_bytes(
    folder: Path, recipes: dict[str, Path]
) -> Callable[[str], dict[str, dict[str, str]]]:
    """By family and kind, the digests of the experts' bytes under a layout. Each number of ranks is started once."""
    for family in RECIPES:
        (folder / "bytes" / family).mkdir(parents=True)
        for file in (folder / family / "model").iterdir():
            (folder / "bytes" / family / file.name).symlink_to(file)
    for ranks in experts_on_ranks.WORLDS:
        launch_ranks(
            Path(experts_on_ranks.__file__), [str(folder / "bytes")], ranks=ranks, timeout=200
        ).check()
    return lambda layout: json.loads((folder / "bytes" / f"{layout}.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout", [layout for layouts in experts_on_ranks.WORLDS.values() for layout in layouts]
)
@pytest.mark.parametrize("family", RECIPES)
def test_each_expert_has_the_bytes_of_bitsandbytes(
    family: str, layout: str, expert_bytes: Callable[..., Any], folder: Path
) -> None:
    """Codes and scales of the expert's own matrix, quantized by the library alone; nested scales are those of all experts of the
    layer together, and compared dequantized."""
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(folder / family / "model", dtype=torch.float32)
    weights = {
        name: p.detach()
        for name, p in plain.named_parameters()
        if ".experts." in name and p.dim() == 3
    }
    assert len(weights) == (2 if family == "deepseek_v3" else 4)
    for kind in experts_on_ranks.KINDS:
        expected = {}
        for name, matrices in weights.items():
            nested = None
            if kind == "double":
                _, state = functional.quantize_4bit(
                    matrices, quant_type="nf4", compress_statistics=True
                )
                nested = functional.dequantize_blockwise(state.absmax, state.state2) + state.offset
            for expert, matrix in enumerate(matrices):
                if kind == "int8":
                    packed, magnitudes, _ = functional.int8_vectorwise_quant(
                        matrix.to(torch.float16)
                    )
                else:
                    packed, state = functional.quantize_4bit(matrix, blocksize=64, quant_type="nf4")
                    magnitudes = (
                        state.absmax if nested is None else nested.view(len(matrices), -1)[expert]
                    )
                expected[f"{name}.{expert}"] = experts_on_ranks.digest(packed, magnitudes)
        assert expert_bytes(layout)[f"{family} {kind}"] == expected


def test_no_expert_is_kept_dequantized_for_the_backward(
    recipes: dict[str, Path], folder: Path
) -> None:
    """Without activation checkpointing: what the forward leaves is smaller than the experts of one layer in fp32."""
    model = load_quantized(
        folder / "mixtral" / "model",
        "nf4",
        Lora(use_peft=True, lora_r=4, lora_target_parameters=tuple(EXPERTS)),
    )
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(input_ids=torch.arange(3, 11)[None], use_cache=False).logits.square().sum()
    weights = [layer for _, layer in quantized_layers(model) if not layer.leaf]
    largest = max(4 * layer.dequantize(torch.float32).numel() for layer in weights)
    assert max(kept.values()) < largest / 2
    loss.backward()
    trained = [
        p for name, p in model.named_parameters() if ".experts." in name and ".lora_B." in name
    ]
    assert len(trained) == 4 and all(p.grad is not None and p.grad.any() for p in trained)


def test_a_weight_beyond_what_bitsandbytes_counts_is_dequantized_in_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    values = torch.randn(3, 8, 96, generator=torch.Generator().manual_seed(0))
    for kind in ("nf4", "double"):
        quantized = quantize_tensor(values, KINDS[kind])
        whole = dequantize_tensor(quantized, torch.float32)
        monkeypatch.setattr(quantized_weights, "LARGEST_KERNEL", 256)
        assert torch.equal(dequantize_tensor(quantized, torch.float32), whole)
        monkeypatch.undo()
        assert whole.shape == values.shape
