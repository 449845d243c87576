"""A recipe written for the names of published files trains the modules that hold them in transformers 5, and says so."""

from pathlib import Path
from typing import Any

import pytest

from finetune.config.accelerate_file import read_sharding
from finetune.config.module_names import adopt_published_names, find_renames, rename_pattern
from finetune.config.reader import read_recipe
from finetune.plan.plan import make_plan
from tests.conftest import make_chat, make_model
from tests.training.layouts import steps_of, train_all, write_config, write_recipe
from tests.training.test_experts import FAMILIES, SMALL

LORA: dict[str, Any] = {"use_peft": True, "lora_r": 4}
# Keys for the published files of Mixtral -> the same for its modules.
PAIRS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "lora": (
        LORA
        | {
            "lora_target_modules": ["q_proj", "w1", "w2", "w3"],
            "modules_to_save": [r"layers\.1\.block_sparse_moe\.gate"],
        },
        LORA
        | {"lora_target_modules": ["q_proj"], "modules_to_save": [r"layers\.1\.mlp\.gate"]}
        | {"lora_target_parameters": ["experts.gate_up_proj", "experts.down_proj"]},
    ),
    "frozen": ({"frozen_modules": ["block_sparse_moe"]}, {"frozen_modules": ["mlp"]}),
}
SAID = {
    "lora": (
        r"modules_to_save: layers\.1\.block_sparse_moe\.gate is layers\.1\.mlp\.gate in transformers 5",
        "lora_target_modules: w1, w2, w3: the experts of a layer are one parameter in transformers 5; experts.gate_up_proj and "
        "experts.down_proj get adapters, as by lora_target_parameters",
    ),
    "frozen": ("frozen_modules: block_sparse_moe is mlp in transformers 5",),
}


@pytest.fixture(scope="module")
def printed(folder: Path) -> str:
    data = make_chat(folder / "chat.jsonl", rows=8)
    model = make_model(folder / "model", model_type="mixtral", **SMALL | FAMILIES["mixtral"])
    config, runs = write_config(folder, "single"), []
    for name, pair in PAIRS.items():
        for kind, keys in zip(("published", "own"), pair, strict=True):
            recipe = write_recipe(
                folder / f"{name}-{kind}.yaml",
                model,
                data,
                max_steps=2,
                global_batch_size=2,
                **keys,
            )
            runs.append((recipe, config, [f"output_dir={folder / f'{name}-{kind}'}"]))
    return train_all(folder, runs, ranks=1)


@pytest.mark.parametrize("name", PAIRS)
def test_both_names_train_the_same(name: str, printed: str, folder: Path) -> None:
    published, own = (steps_of(folder / f"{name}-{kind}") for kind in ("published", "own"))
    for key in ("loss", "grad_norm"):
        assert [line[key] for line in published] == [line[key] for line in own]
    for line in SAID[name]:
        assert any(shown.startswith("note ") and line in shown for shown in printed.splitlines())


@pytest.mark.parametrize("name", PAIRS)
def test_both_names_are_planned_the_same(name: str, printed: str, folder: Path) -> None:
    sharding = read_sharding(str(write_config(folder, "single")), None, {})
    plans = [
        make_plan(read_recipe(str(folder / f"{name}-{kind}.yaml")), sharding, 1)
        for kind in ("published", "own")
    ]
    assert (
        plans[0].spec.tensors == plans[1].spec.tensors
        and plans[0].peak_bytes == plans[1].peak_bytes
    )
    assert any("in transformers 5" in remark for remark in plans[0].remarks)


def test_names_of_the_modules_stay(folder: Path, printed: str) -> None:
    for family in ("mixtral", "llama", "qwen3_moe", "unheard_of"):
        recipe = read_recipe(str(folder / "lora-own.yaml"))
        assert adopt_published_names(recipe, family) is recipe


def test_a_name_that_ends_as_the_published_one_stays() -> None:
    """The names of a tower's modules end as those of Gemma 3's files do."""
    renames = find_renames("gemma3")
    assert renames["language_model"] == "model.language_model"
    for pattern in (r"model\.language_model.layers.1", "model.language_model.layers.1.mlp"):
        assert rename_pattern(pattern, renames) == pattern
    assert rename_pattern("language_model.norm", renames) == "model.language_model.norm"
