"""Bases that are published in FP8 or MXFP4: read as transformers dequantizes them, trained with LoRA as they are or in 4 bits, and
exported as plain weights."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from finetune.config.facts import read_model_facts
from finetune.config.layout import Sharding
from finetune.config.schema import Lora, Model
from finetune.distributed.join import join, leave
from finetune.errors import UserError
from finetune.export.export import export
from finetune.files.tensors import read, read_folder, read_slice
from finetune.inference.inference_model import LoadOptions, load_inference_model
from finetune.inference.inputs import find_model
from finetune.models.load import load_model
from finetune.models.quantized_weights import dequantize_published
from tests.conftest import make_chat, make_model, slow_but
from tests.training import reference
from tests.training.layouts import assert_losses, train_families, write_recipe
from tests.training.test_experts import FAMILIES, SMALL

BLOCK = 32  # rows and columns of an FP8 block here
STEPS = 2
# On a CPU bitsandbytes dequantizes a matrix rightly where its rows are a multiple of 64. gpt-oss is stored in blocks of 32.
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 16},
    "deepseek_v3": SMALL
    | FAMILIES["deepseek_v3"]
    | {"moe_intermediate_size": 64, "q_lora_rank": 64, "kv_lora_rank": 64},
    "gpt_oss": SMALL | FAMILIES["gpt_oss"] | {"num_local_experts": 4, "intermediate_size": 64},
}
RECIPES: dict[str, dict[str, Any]] = {
    "qwen3": {"load_in_4bit": True, "lora_target_modules": "all-linear"},
    "deepseek_v3": {
        "lora_target_modules": ["o_proj"],
        "lora_target_parameters": ["experts.down_proj"],
    },
    "gpt_oss": {"load_in_4bit": True, "lora_target_parameters": ["experts.gate_up_proj"]},
}
WANTED = [
    ("qwen3", "full_shard", 2),
    ("deepseek_v3", "shard_grad_op", 2),
    ("gpt_oss", "divided", 2),
]
QUICK = WANTED[1:]
VERIFIED = [("deepseek_v3", "shard_grad_op", 2)]  # exported by the run itself


def store_in_fp8(folder: Path) -> None:
    """As DeepSeek publishes: float8 and a scale for each block of the linear layers; the last block of a row may be short."""
    tensors = load_file(folder / "model.safetensors")
    for name, weight in list(tensors.items()):
        if weight.dim() != 2 or not name.endswith("_proj.weight"):
            continue
        rows, columns = (-(-size // BLOCK) for size in weight.shape)
        padded = torch.zeros(rows * BLOCK, columns * BLOCK)
        padded[: weight.shape[0], : weight.shape[1]] = weight
        blocks = padded.view(rows, BLOCK, columns, BLOCK)
        scales = blocks.abs().amax((1, 3)) / 448
        whole = (blocks / scales[:, None, :, None]).reshape(padded.shape)[
            : weight.shape[0], : weight.shape[1]
        ]
        tensors |= {name: whole.to(torch.float8_e4m3fn).contiguous(), f"{name}_scale_inv": scales}
    assert any(name.endswith("_scale_inv") for name in tensors)
    _write(
        folder,
        tensors,
        {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
        },
    )


def store_in_mxfp4(folder: Path) -> None:
    """As gpt-oss is published: any codes, with scales that give numbers of the model's size."""
    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        shape = (experts, outputs, inputs // 32)
        tensors[f"{name}_blocks"] = torch.randint(
            0, 256, (*shape, 16), dtype=torch.uint8, generator=generator
        )
        tensors[f"{name}_scales"] = torch.randint(
            121, 125, shape, dtype=torch.uint8, generator=generator
        )
    assert any(name.endswith("_blocks") for name in tensors)
    _write(
        folder,
        tensors,
        {"quant_method": "mxfp4", "modules_to_not_convert": ["self_attn", "router", "lm_head"]},
    )


def _write(folder: Path, tensors: dict[str, torch.Tensor], settings: dict[str, Any]) -> None:
    plain = {
        name: each.bfloat16()
        for name, each in tensors.items()
        if each.dtype == torch.float32 and "_scale" not in name
    }
    save_file(tensors | plain, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps(config | {"dtype": "bfloat16", "quantization_config": settings})
    )


@pytest.fixture(scope="module")
def published(folder: Path) -> Callable[[str], Path]:
    """The folder of a model as it is published."""
    for family, keys in MODELS.items():
        made = make_model(folder / family / "model", model_type=family, **keys)
        (store_in_mxfp4 if family == "gpt_oss" else store_in_fp8)(made)
    return lambda family: folder / family / "model"


def dequantized(folder: Path, dtype: torch.dtype) -> Any:
    """The model as transformers dequantizes it."""
    from transformers import AutoModelForCausalLM, FineGrainedFP8Config, Mxfp4Config

    kind = json.loads((folder / "config.json").read_text())["quantization_config"]["quant_method"]
    config = Mxfp4Config if kind == "mxfp4" else FineGrainedFP8Config
    keys: Any = {} if kind == "mxfp4" else {"weight_block_size": (BLOCK, BLOCK)}
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, quantization_config=config(dequantize=True, **keys)
    )


@pytest.fixture(scope="module")
def plain(folder: Path, published: Callable[[str], Path]) -> Callable[[str], Path]:
    """The same model, dequantized and saved by transformers."""
    from transformers import AutoConfig, AutoModelForCausalLM

    for family in MODELS:
        config: Any = AutoConfig.from_pretrained(published(family))
        del config.quantization_config
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model.load_state_dict(dequantized(published(family), torch.float32).state_dict())
        model.save_pretrained(folder / f"plain-{family}")
        for file in published(family).iterdir():
            if not (folder / f"plain-{family}" / file.name).exists():
                (folder / f"plain-{family}" / file.name).write_bytes(file.read_bytes())
    return lambda family: folder / f"plain-{family}"


@pytest.fixture(scope="module")
def runs(
    folder: Path, published: Callable[[str], Path], plain: Callable[[str], Path], slow_too: bool
) -> tuple[Callable[[str, str, int], Path], dict[str, Path]]:
    """(where a run is, the recipes of the same on the plain models)."""
    data = make_chat(folder / "chat.jsonl", rows=26)
    common = {
        "global_batch_size": 5, "max_steps": STEPS, "learning_rate": 1e-2, "save_steps": STEPS, "use_peft": True, "lora_r": 4,
    }  # fmt: skip
    ours, theirs = (
        {
            family: write_recipe(
                folder / f"{kind}-{family}.yaml", source(family), data, **common | RECIPES[family]
            )
            for family in MODELS
        }
        for kind, source in (("published", published), ("plain", plain))
    )
    return train_families(folder, ours, WANTED if slow_too else QUICK, VERIFIED), theirs


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", MODELS)
def test_weights_are_those_that_transformers_dequantizes(
    family: str, dtype: str, published: Callable[[str], Path]
) -> None:
    world = join(Sharding(layout="single", use_cpu=True))
    try:
        model = load_model(
            Model(model_name_or_path=str(published(family)), dtype=dtype), Lora(), 0, world
        )[0]  # type: ignore[arg-type]
    finally:
        leave(world)
    theirs = dict(dequantized(published(family), getattr(torch, dtype)).named_parameters())
    ours = dict(model.named_parameters())
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


@pytest.mark.parametrize(("family", "layout", "ranks"), slow_but(QUICK, WANTED))
def test_losses_are_those_of_transformers_on_the_dequantized_base(
    family: str, layout: str, ranks: int, runs: tuple[Callable[..., Path], dict[str, Path]]
) -> None:
    assert_losses(runs[0](family, layout, ranks), reference.losses(runs[1][family]))


@pytest.mark.parametrize("family", ["deepseek_v3", "gpt_oss"])
def test_the_export_is_plain_and_merged_onto_the_dequantized_base(
    family: str,
    runs: tuple[Callable[..., Path], dict[str, Path]],
    plain: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    from transformers import AutoModelForCausalLM

    layout = next(layout for name, layout, _ in WANTED if name == family)
    run = runs[0](family, layout, 2)
    if (family, layout, 2) not in VERIFIED:
        export(run, run / "export", log=lambda _: None)
    config = json.loads((run / "export" / "config.json").read_text())
    assert "quantization_config" not in config and config["dtype"] == "bfloat16"
    after = AutoModelForCausalLM.from_pretrained(run / "export").state_dict()
    before = AutoModelForCausalLM.from_pretrained(plain(family), dtype=torch.float32).state_dict()
    adapted = {
        name for name, value in after.items() if not torch.equal(value, before[name].bfloat16())
    }
    weight = "o_proj.weight" if family == "deepseek_v3" else "experts.gate_up_proj"
    assert adapted and all(
        name.endswith((weight, "experts.down_proj", "_proj.weight")) for name in adapted
    )
    assert any(name.endswith(weight) for name in adapted)


def test_a_published_folder_is_exported_as_plain_weights(
    published: Callable[[str], Path], plain: Callable[[str], Path], tmp_path: Path
) -> None:
    exported = export(published("qwen3"), tmp_path / "plain", log=lambda _: None)
    ours, theirs = (
        load_file(folder / "model.safetensors") for folder in (exported, plain("qwen3"))
    )
    assert ours.keys() == theirs.keys() and all(
        torch.equal(ours[name], theirs[name].bfloat16()) for name in ours
    )
    assert "quantization_config" not in json.loads((exported / "config.json").read_text())


def test_a_chat_answers_from_the_dequantized_base(
    runs: tuple[Callable[..., Path], dict[str, Path]],
) -> None:
    """Under the adapter, with which it is the merged export."""
    run = runs[0]("deepseek_v3", "shard_grad_op", 2)
    models = [
        load_inference_model(find_model(str(run / part)), LoadOptions(), print).model
        for part in ("adapter", "export")
    ]
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        adapted, merged = (model(ids).logits.float() for model in models)
    assert (adapted - merged).norm() < 3e-2 * merged.norm()  # both in bf16


def test_any_slices_are_those_of_the_whole(published: Callable[[str], Path]) -> None:
    """Across blocks, within them, and of a short last one, whose size transformers cannot know: DeepSeek's own formula."""
    generator = torch.Generator().manual_seed(0)
    for family in ("qwen3", "gpt_oss"):
        stored = dequantize_published(read_folder(published(family)), published(family))
        found = [
            tensor
            for tensor in stored.values()
            if tensor.dtype == torch.float32 and "proj" in tensor.name
        ]
        for tensor in found:
            whole = read(tensor)
            for _ in range(4):
                starts = [
                    int(torch.randint(0, size, (), generator=generator)) for size in tensor.shape
                ]
                cut = tuple(
                    slice(at, min(size, at + 37))
                    for at, size in zip(starts, tensor.shape, strict=True)
                )
                assert torch.equal(read_slice(tensor, cut), whole[cut])


def test_a_short_last_block_is_read_as_deepseek_reads_it(tmp_path: Path) -> None:
    """Each block but the last has the rows and columns that config.json says; transformers divides 72 rows by 3."""
    weight = torch.randn(72, 40, generator=torch.Generator().manual_seed(0)).to(torch.float8_e4m3fn)
    scales = torch.rand(3, 2, generator=torch.Generator().manual_seed(1)) + 0.5
    save_file({"w.weight": weight, "w.weight_scale_inv": scales}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(
        json.dumps({"quantization_config": {"weight_block_size": [BLOCK, BLOCK]}})
    )
    expected = (
        weight.float() * scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[:72, :40]
    )
    assert torch.equal(
        read(dequantize_published(read_folder(tmp_path), tmp_path)["w.weight"]), expected
    )
    save_file(
        {"w.weight": weight, "w.weight_scale_inv": torch.ones(3, 3)}, tmp_path / "model.safetensors"
    )
    with pytest.raises(
        UserError, match=r"w.weight_scale_inv has the shape \[3, 3\], which does not fit \[72, 40\]"
    ):
        dequantize_published(read_folder(tmp_path), tmp_path)


def test_other_formats_are_refused_with_what_they_were_made_from(tmp_path: Path) -> None:
    sizes = {
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "vocab_size": 8,
        "model_type": "qwen3",
    }
    settings = {"quant_method": "gptq", "bits": 3}
    with pytest.raises(UserError, match=r"quantized \(gptq, 3\), in a way that is not read"):
        read_model_facts(sizes | {"quantization_config": settings}, str(tmp_path))
    (tmp_path / "README.md").write_text(
        "---\nlicense: mit\nbase_model:\n- Qwen/Qwen3-8B\n---\n# A model\n"
    )
    with pytest.raises(
        UserError, match=r"name the unquantized model \(Qwen/Qwen3-8B, by its model card\)"
    ):
        read_model_facts(sizes | {"quantization_config": {"quant_method": "eetq"}}, str(tmp_path))
