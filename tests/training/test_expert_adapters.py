"""LoRA on the experts of a mixture, from a folder with a tensor for each expert: the losses are those of transformers and peft
alone under every layout, `adapter/` opens with plain peft, and the export has the adapters merged into each expert's tensor."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from finetune.config.reader import read_recipe
from finetune.errors import UserError
from finetune.export.export import export
from finetune.run import fine_tune
from tests.conftest import make_chat, make_model, slow_but
from tests.training import reference
from tests.training.layouts import assert_losses, steps_of, train_families, write_recipe
from tests.training.test_experts import FAMILIES, SMALL

STEPS = 3
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
RECIPES: dict[str, dict[str, Any]] = {
    "mixtral": {
        "modules_to_save": ["layers.1.mlp.gate"],
        "rank_pattern": {"experts.down_proj": 3},
        "alpha_pattern": {"layers.0.mlp.experts.gate_up_proj": 16},
    },
    "qwen3_moe": {"lora_target_modules": [], "use_rslora": True},
    "gpt_oss": {"lora_target_parameters": ["layers.1.mlp.experts.gate_up_proj"]},
    # Shared experts and a dense layer, whose names peft would take for a routed expert's.
    "deepseek_v3": {
        "lora_target_modules": "all-linear",
        "rank_pattern": {"shared_experts.down_proj": 2},
    },
    "glm4_moe": {
        "lora_target_modules": "all-linear",
        "lora_target_parameters": [],
        "lora_dropout": 0.25,
    },
}
# Exported by the run itself.
VERIFIED = [("mixtral", "full_shard", 2), ("mixtral", "ddp", 2), ("deepseek_v3", "full_shard", 2)]
# (family, layout, ranks)
WANTED = [
    *((family, "full_shard", 2) for family in RECIPES),
    ("mixtral", "ddp", 2),
    ("gpt_oss", "ddp", 2),
    ("mixtral", "single", 1),
    ("deepseek_v3", "full_shard", 1),
]
QUICK = WANTED[:1]


@pytest.fixture(scope="module")
def recipes(folder: Path) -> dict[str, Path]:
    data = make_chat(folder / "chat.jsonl", rows=26)
    paths = {}
    for family, keys in RECIPES.items():
        model = make_model(folder / family / "model", model_type=family, **SMALL | FAMILIES[family])
        common: dict[str, Any] = {
            "global_batch_size": 5,
            "max_steps": STEPS,
            "learning_rate": 1e-2,
            "save_steps": STEPS,
            "use_peft": True,
            "lora_r": 4,
            "lora_target_modules": ATTENTION,
            "lora_target_parameters": EXPERTS,
        }
        paths[family] = write_recipe(folder / f"{family}.yaml", model, data, **common | keys)
    return paths


@pytest.fixture(scope="module")
def runs(folder: Path, recipes: dict[str, Path], slow_too: bool) -> Callable[[str, str, int], Path]:
    """(family, layout, ranks) -> the run's folder."""
    return train_families(folder, recipes, WANTED if slow_too else QUICK, VERIFIED)


@pytest.mark.parametrize(
    ("family", "layout", "ranks"),
    [
        pytest.param(*each, marks=[] if each in QUICK else pytest.mark.slow)
        for each in WANTED
        if each[0] not in ("deepseek_v3", "glm4_moe")
    ],
)
def test_losses_and_gradients_are_those_of_transformers_and_peft(
    family: str, layout: str, ranks: int, runs: Callable[..., Path], recipes: dict[str, Path]
) -> None:
    assert_losses(runs(family, layout, ranks), reference.losses(recipes[family]), norms=1e-4)


@pytest.mark.slow
def test_one_rank_and_two_agree(runs: Callable[..., Path]) -> None:
    one, two = (steps_of(runs("deepseek_v3", "full_shard", ranks)) for ranks in (1, 2))
    assert [line["loss"] for line in one] == pytest.approx([line["loss"] for line in two], rel=1e-5)


@pytest.mark.parametrize("family", slow_but({"mixtral"}, RECIPES))
def test_plain_peft_opens_the_adapter_with_the_logits_of_the_merged_export(
    family: str, runs: Callable[..., Path], tmp_path: Path
) -> None:
    """The adapter is on what was asked for, and not merged; the export has the names and shapes of the folder it came from."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    run = runs(family, "full_shard", 2)
    if (family, "full_shard", 2) not in VERIFIED:
        export(run, run / "export", verify=family == "gpt_oss", log=lambda _: None)
        export(run, run / "adapter", adapter_only=True, log=lambda _: None)
    ids = torch.arange(3, 40)[None]
    base = AutoModelForCausalLM.from_pretrained(run.parent / "model", dtype=torch.float32).eval()
    before = base(ids).logits
    adapted = PeftModel.from_pretrained(base, run / "adapter").eval()
    merged = AutoModelForCausalLM.from_pretrained(run / "export", dtype=torch.float32).eval()
    found, expected = adapted(ids).logits, merged(ids).logits
    assert (found - before).norm() > 1e-2 * before.norm()
    assert (found - expected).norm() < 1e-5 * expected.norm()
    stored, written = (
        load_file(path / "model.safetensors") for path in (run.parent / "model", run / "export")
    )
    assert {n: t.shape for n, t in stored.items()} == {n: t.shape for n, t in written.items()}
    moved = {name for name in stored if not torch.equal(stored[name], written[name])}
    expected_parts = {
        "mixtral": ("q_proj", "experts"),
        "qwen3_moe": ("experts",),
        "gpt_oss": ("q_proj", "layers.1.mlp.experts.gate_up_proj"),
        "deepseek_v3": (
            "kv_a_proj",
            "layers.1.mlp.experts",
            "shared_experts.up_proj",
            "layers.0.mlp.gate_proj",
        ),
        "glm4_moe": ("q_proj", "shared_experts.down_proj", "layers.0.mlp.gate_proj"),
    }[family]
    for part in expected_parts:
        assert any(part in name for name in moved), part
    assert family != "glm4_moe" or not any(".experts." in name for name in moved)


REFUSED = {
    "experts.w1": "lora_target_parameters: experts.w1: names no parameter of the model; those of its experts are "
    "experts.down_proj, experts.gate_up_proj",
    "gate_up_proj, gate.weight": r"lora_target_parameters: gate.weight: model.layers.0.mlp.gate.weight does not hold a layer's experts",
}


@pytest.mark.parametrize("target", REFUSED)
def test_what_is_no_parameter_of_experts_is_refused(
    target: str, recipes: dict[str, Path], folder: Path, tmp_path: Path
) -> None:
    _refuse(
        recipes["mixtral"],
        [f"lora_target_parameters=[{target}]", f"output_dir={tmp_path}"],
        REFUSED[target],
    )


def test_fsdp1_and_contradicting_keys_are_refused(recipes: dict[str, Path], tmp_path: Path) -> None:
    from finetune.config.layout import Sharding

    with pytest.raises(
        UserError,
        match=r"lora_target_parameters cannot be combined with fsdp_version: 1.*set fsdp_version: 2",
    ):
        fine_tune(read_recipe(str(recipes["mixtral"])), Sharding(layout="fsdp1"))
    for key, sentence in (
        (
            "use_dora=true",
            "use_dora cannot be combined with lora_target_parameters: peft has no DoRA",
        ),
        ("lora_dropout=0.1", "remove lora_dropout, or remove lora_target_parameters"),
        (
            "target_parameters=[a]",
            "target_parameters: no such key; here it is lora_target_parameters",
        ),
    ):
        with pytest.raises(UserError, match=sentence):
            read_recipe(str(recipes["mixtral"]), [key])


def _refuse(recipe: Path, keys: list[str], sentence: str) -> None:
    from finetune.config.pretrained import load_config
    from finetune.models.load import build_on_meta
    from finetune.models.lora import add_adapters

    read = read_recipe(str(recipe), keys)
    with pytest.raises(UserError, match=sentence):
        add_adapters(
            build_on_meta(load_config(read.model), torch.float32), read.lora, torch.float32
        )
