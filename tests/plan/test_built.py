"""Models whose layers no table gives are planned by transformers' own class: tensors, activations, every path of the plan."""

import json
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from finetune.cli import main
from finetune.config.families import FAMILIES, IMAGE_FAMILIES, PLANNED
from finetune.config.layout import Sharding
from finetune.config.reader import read_recipe
from finetune.config.schema import Lora, Model
from finetune.distributed.model_parts import trunk_of
from finetune.models.documents import install_attention
from finetune.models.experts import GROUPED, register_grouped, set_experts_implementation
from finetune.models.fused_lora import fuse_adapters
from finetune.models.gating import install_gating
from finetune.models.lora import add_adapters
from finetune.plan.activations import Computation, kept_bytes
from finetune.plan.architecture import Architecture, read_architecture, split_config
from finetune.plan.built import BuiltArchitecture, read_built_architecture
from finetune.plan.plan import format_plan, make_plan
from finetune.plan.state import list_state_tensors
from tests.conftest import slow_but
from tests.models import sweep
from tests.plan.test_activations import CONFIG, EXPERTS, HEAD, LATENT, TOLERANCE
from tests.plan.traced import saved_for_backward
from tests.vision import whole_config

RECURRENT = [name for name, family in FAMILIES.items() if family.recurrence is not None]
QUICK = ["qwen3_5_text", "falcon_h1", "lfm2", "jamba"]
QUICK_TO_RUN = ["lfm2"]  # the forward of the others in Python takes from five seconds to a minute
# Without a row, one of each kind: other names for sizes, a head of another name, positions that are learned, one more
# embedding, norms elsewhere, experts of another kind.
WITHOUT_ROW = [
    "gpt2",
    "gpt_neox",
    "cohere",
    "stablelm",
    "gemma4_text",
    "llama4_text",
    "granitemoe",
    "deepseek_v2",
]
LORA = Lora(use_peft=True, lora_r=8)
TOKENS = 512  # of one document: whole chunks


def keys_of(folder: Path, config: Mapping[str, Any]) -> list[str]:
    """Those of a recipe whose model is this config.json in `folder`."""
    (folder / "config.json").write_text(json.dumps(config))
    model = ["model_config=null", "tokenizer_name_or_path=null", f"model_name_or_path={folder}"]
    return [*model, "max_length=64", "accelerate_config=fsdp_full_shard_auto"]


def shapes_of(model: Any) -> dict[str, tuple[int, ...]]:
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(
    "family", slow_but([*QUICK, "gpt2", "gemma4_text"], [*RECURRENT, *WITHOUT_ROW])
)
def test_every_parameter_is_counted_once_and_trained_as_it_is(family: str) -> None:
    """In its unit: what is adapted or trained by name too, as the model itself has it on meta."""
    config = sweep.tiny_config(family)
    built = read_architecture(config.to_dict(), "config.json")
    assert isinstance(built, BuiltArchitecture) == (family not in PLANNED)
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model.tie_weights()
    tensors = [*built.tensors()]
    assert {tensor.name: tensor.shape for tensor in tensors} == shapes_of(model)
    assert len(tensors) == len({tensor.name for tensor in tensors})
    assert len(built.outline.layers) == built.layers >= 2
    sharding, quantization = Sharding(layout="fsdp2"), read_recipe("quickstart").quantization
    state = list_state_tensors(
        built, Model(model_name_or_path="a/b"), Lora(), sharding, quantization
    )
    assert {tensor.name: tensor.shape for tensor in state} == shapes_of(model) and all(
        t.trainable for t in state
    )
    if family == "gpt2":
        return  # whose layers are no linear ones, and get no adapters
    adapted = list_state_tensors(
        built, Model(model_name_or_path="a/b"), LORA, sharding, quantization
    )
    add_adapters(model, LORA, torch.bfloat16)
    real = {
        name: tuple(parameter.shape)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    assert {tensor.name: tensor.shape for tensor in adapted if tensor.trainable} == real


@pytest.mark.parametrize("family", slow_but(["gemma2"], PLANNED))
def test_the_built_class_and_the_trace_agree_with_the_tables_of_families_that_have_one(
    family: str,
) -> None:
    """Two ways to the same numbers: tensors to the last one, activations within a tenth."""
    keys = (
        CONFIG
        | HEAD.get(family, {})
        | (EXPERTS if FAMILIES[family].mixture else {})
        | {"model_type": family}
    )
    if FAMILIES[family].latent_attention:
        keys |= LATENT | {"num_key_value_heads": 4, "n_group": 1, "topk_group": 1}
    table, built = (
        read_architecture(keys, "config.json"),
        read_built_architecture(keys, "config.json"),
    )
    assert {t.name: t.shape for t in table.tensors()} == {t.name: t.shape for t in built.tensors()}
    assert table.idle_parameters == built.idle_parameters and table.layer_names in built.layer_names
    for layer in range(table.layers):
        for part in (Architecture.linears, Architecture.experts, Architecture.routed):
            name = part.__name__
            assert {*getattr(table, name)(layer)} == {*getattr(built, name)(layer)}, (layer, name)
    for itemsize, autocast, lora, cpu in (
        (2, False, None, False),
        (4, False, None, True),
        (2, True, None, False),
        (2, False, LORA, False),
    ):
        run = Computation(
            itemsize=itemsize, autocast=autocast, lora=lora, cpu=cpu, document_length=TOKENS
        )
        expected, found = (sum(kept_bytes(a, run).values()) for a in (table, built))
        assert found == pytest.approx(expected, rel=TOLERANCE), (itemsize, autocast, lora, cpu)


# gpt2 embeds 256 positions and has no linear layers; transformers' own code of xlstm mixes fp32 with bf16 on a CPU.
NOT_RUN = {"gpt2", "xlstm"}


@pytest.mark.parametrize(
    "family",
    slow_but(QUICK_TO_RUN, [name for name in [*RECURRENT, *WITHOUT_ROW] if name not in NOT_RUN]),
)
@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
def test_activations_are_planned_within_a_tenth_of_what_autograd_saves(
    family: str, lora: Lora | None
) -> None:
    """Of a real model on a CPU, whose row is one document of another length than those that are traced."""
    torch.manual_seed(0)
    config = sweep.tiny_config(family)
    model: Any = AutoModelForCausalLM.from_config(
        config, dtype=torch.bfloat16, attn_implementation="eager"
    )
    register_grouped()
    set_experts_implementation(model, GROUPED)
    install_attention(model)
    install_gating(model)
    if lora is not None:
        add_adapters(model, lora, torch.bfloat16)
        fuse_adapters(model)
        model.to(torch.bfloat16)
        model.get_input_embeddings().register_forward_hook(
            lambda _module, _inputs, out: out.requires_grad_()
        )
    inputs = {
        "input_ids": torch.full((1, TOKENS), 5),
        "position_ids": torch.arange(TOKENS)[None],
        "cu_seq_lens": torch.tensor([0, TOKENS], dtype=torch.int32),
        "max_document_length": TOKENS,
        "packed_lengths": (TOKENS,),
    }
    with saved_for_backward(iter([*model.parameters(), *model.buffers()])) as kept:
        out = trunk_of(model.train())(**inputs, use_cache=False)
    run = Computation(itemsize=2, cpu=True, lora=lora, document_length=TOKENS)
    architecture = read_architecture(config.to_dict(), "config.json")
    trace = architecture.trace(run)
    assert trace is not None and trace.failure is None
    planned = TOKENS * sum(kept_bytes(architecture, run).values())
    assert planned == pytest.approx(sum(kept.values()), rel=TOLERANCE)
    print(f"{family}: {planned / sum(kept.values()) - 1:+.2%}, {out[0].shape}")


@pytest.mark.parametrize("family", slow_but(["llava"], IMAGE_FAMILIES))
def test_a_vision_language_model_has_the_parts_that_transformers_builds(
    family: str, tmp_path: Path
) -> None:
    from transformers import AutoConfig, AutoModelForImageTextToText

    if family == "gemma3n":
        pytest.importorskip("timm", reason="timm is not installed, which has its tower")
    config = whole_config(family)
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(AutoConfig.for_model(**config))
    model.tie_weights()
    whole = config | {"architectures": [type(model).__name__]}
    architecture = read_architecture(split_config(whole), "config.json")
    assert {tensor.name: tensor.shape for tensor in architecture.tensors()} == shapes_of(model)
    assert architecture.facts.vision and len(architecture.beside) >= 1
    recipe = read_recipe("quickstart", [*keys_of(tmp_path, whole), "use_peft=true"])
    plan = make_plan(recipe, Sharding(layout="fsdp2", mixed_precision="bf16"), 2)
    assert all(t.name.startswith(architecture.text_names) for t in plan.spec.tensors if t.trainable)
    assert "activations" in format_plan(plan)


CLIP_LARGE = {
    "model_type": "clip_vision_model", "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24,
    "num_attention_heads": 16, "image_size": 336, "patch_size": 14, "projection_dim": 768,
}  # fmt: skip
FALCON_H1 = {  # tiiuae/Falcon-H1-0.5B-Base
    "model_type": "falcon_h1", "hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 36, "vocab_size": 32784,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "mamba_d_ssm": 1536, "mamba_n_heads": 24,
    "mamba_d_head": 64, "mamba_n_groups": 1, "mamba_d_state": 128, "mamba_d_conv": 4, "mamba_expand": 2,
    "tie_word_embeddings": False, "mamba_rms_norm": False,
}  # fmt: skip
LFM2 = {  # LiquidAI/LFM2-1.2B
    "model_type": "lfm2", "hidden_size": 2048, "block_ff_dim": 12288, "intermediate_size": 12288, "num_hidden_layers": 16,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 65536, "block_auto_adjust_ff_dim": True,
    "block_multiple_of": 256, "block_ffn_dim_multiplier": 1.0, "conv_L_cache": 3, "conv_bias": False,
    "full_attn_idxs": [2, 5, 8, 10, 12, 14], "tie_word_embeddings": True,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "total"),
    [  # the parameters that the hub counts in the files of llava-1.5-7b-hf, Falcon-H1-0.5B and LFM2-1.2B
        (
            {
                "model_type": "llava",
                "architectures": ["LlavaForConditionalGeneration"],
                "text_config": {
                    "model_type": "llama",
                    "vocab_size": 32064,
                    "hidden_size": 4096,
                    "intermediate_size": 11008,
                }
                | {"num_hidden_layers": 32, "num_attention_heads": 32},
                "vision_config": CLIP_LARGE,
                "tie_word_embeddings": False,
            },
            7_063_427_072,
        ),
        (FALCON_H1, 521_411_104),
        (LFM2, 1_170_340_608),
    ],
)
def test_a_published_model_has_its_published_number_of_parameters(
    config: dict[str, Any], total: int
) -> None:
    assert read_architecture(split_config(config), "config.json").parameters == total


@pytest.mark.slow
def test_the_quickstart_with_pictures_and_a_hybrid_are_planned_by_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Which refused them, and `init` and the dry run with it."""
    assert main(["plan", "--recipe", "quickstart_vision", "--num-processes", "2"]) == 0
    shown = capsys.readouterr().out
    assert "llama, 224,512 parameters" in shown and "steady step" in shown
    keys = [*keys_of(tmp_path, sweep.tiny_config("qwen3_next").to_dict()), "use_peft=true"]
    assert main(["plan", "--recipe", "quickstart", "--num-processes", "1", *keys]) == 0
    shown = capsys.readouterr().out
    assert "2 x Qwen3NextDecoderLayer (1 linear_attention, 1 full_attention)" in shown
    assert (
        "remark     recurrent layers are counted as transformers' own code computes them" in shown
    )
    assert main(["plan", "--recipe", "quickstart", *keys, "--gpu-memory", "1GiB"]) in (0, 1), (
        "with the table of layouts"
    )
    assert "GiB on one rank, by ranks" in capsys.readouterr().out


def test_what_cannot_be_counted_is_named_and_all_else_is_printed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """LongCat's routing chooses its experts by a loop over their numbers, which no tensor without values has."""
    keys = [
        *keys_of(tmp_path, sweep.tiny_config("longcat_flash").to_dict()),
        "--gpu-memory",
        "80GiB",
    ]
    assert main(["plan", "--recipe", "quickstart", "--num-processes", "1", *keys]) == 0
    shown = capsys.readouterr().out
    (remark,) = [line for line in shown.splitlines() if line.startswith("remark ")]
    assert remark.startswith(
        "remark     activations are not counted, so that memory is what is needed without them: "
    )
    assert "steady step" in shown and "\ndisk " in shown and "\ntime " in shown
    assert "fits " not in shown and "without activations" in shown


@pytest.mark.parametrize(
    ("ranks", "layout"),
    slow_but([(4, "fsdp2")], [(1, "single"), (2, "ddp"), (4, "fsdp2"), (2, "fsdp1")]),
)
def test_every_layout_of_a_hybrid_is_planned(ranks: int, layout: Any, tmp_path: Path) -> None:
    keys = keys_of(tmp_path, sweep.tiny_config("qwen3_next").to_dict())
    for more in (
        (),
        ("use_peft=true",),
        ("use_peft=true", "load_in_4bit=true"),
        ("optim=adamw_8bit",),
    ):
        if layout == "fsdp1" and more:
            continue  # what rules refuse, or is planned as under FSDP2
        recipe, sharding = (
            read_recipe("quickstart", [*keys, *more]),
            Sharding(layout=layout, mixed_precision="bf16"),
        )
        plan = make_plan(recipe, sharding, ranks, on_cpu=layout == "single")
        assert plan.peak_bytes > 0 and plan.disk.total > 0 and plan.spec.uncounted is None
        trained = sum(tensor.numel for tensor in plan.spec.tensors if tensor.trainable)
        assert (trained < plan.spec.architecture.parameters) == ("use_peft=true" in more)


def test_a_config_whose_text_config_is_null_is_read_as_one_without() -> None:
    """The published Qwen2.5-VL has its language model's keys at the top."""
    whole = whole_config("qwen2_5_vl") | {"architectures": ["Qwen2_5_VLForConditionalGeneration"]}
    flat = whole | whole["text_config"] | {"model_type": "qwen2_5_vl"}
    for missing in ({}, {"text_config": None}):
        config = {key: value for key, value in flat.items() if key != "text_config"} | missing
        architecture = read_architecture(split_config(config), "M")
        assert architecture.layers == whole["text_config"]["num_hidden_layers"]


def test_a_damaged_config_of_a_built_model_is_planned_or_refused_in_sentences() -> None:
    from finetune.errors import UserError

    whole = whole_config("qwen3_5") | {"architectures": ["Qwen3_5ForConditionalGeneration"]}
    places = [("text_config", key) for key in whole["text_config"]] + [
        ("vision_config", key) for key in whole["vision_config"]
    ]
    values = (10**9, [], "x", -1, None)
    generator = torch.Generator().manual_seed(0)
    changes = [*product(places, values)]
    for number in torch.randperm(len(changes), generator=generator)[:60].tolist():
        (part, key), value = changes[number]
        changed = whole | {part: whole[part] | {key: value}}
        try:
            architecture = read_architecture(split_config(changed), "M")
        except UserError as error:
            assert str(error).startswith(("M: ", "qwen3_5")), (part, key, value)
        else:
            assert architecture.parameters > 0, (part, key, value)


def test_the_recipes_attention_dropout_is_counted_as_the_configs(tmp_path: Path) -> None:
    """On a CPU, where the class keeps all weights of attention for it."""
    sizes = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 8, "vocab_size": 64}
    peaks = []
    for of_config, of_recipe in ((0.1, "null"), (0.0, "0.1"), (0.1, "0")):
        keys = keys_of(tmp_path, sizes | {"attn_pdrop": of_config})
        recipe = read_recipe("quickstart", [*keys, f"attention_dropout={of_recipe}"])
        peaks.append(make_plan(recipe, Sharding(layout="single"), 1, on_cpu=True).peak_bytes)
    assert peaks[0] == peaks[1] > peaks[2]
