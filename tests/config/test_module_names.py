"""Patterns for the parts of a model: peft's rule, and one sentence for each that names nothing."""

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from finetune.cli import main
from finetune.config.layout import Sharding
from finetune.config.module_names import find_trained, is_named, is_within, refuse_unmatched
from finetune.config.pretrained import load_config
from finetune.config.reader import read_recipe
from finetune.config.schema import Lora, Model
from finetune.errors import UserError
from finetune.models.load import build_on_meta
from finetune.models.lora import add_adapters
from finetune.plan.plan import make_plan

LAYERS = [
    f"model.layers.{i}.{part}.weight"
    for i in range(12)
    for part in ("self_attn.q_proj", "mlp.up_proj")
]
TIED = [
    ["model.embed_tokens.weight", "lm_head.weight"],
    *([name] for name in LAYERS),
    ["model.norm.weight"],
]


def test_a_pattern_names_what_it_names_to_peft() -> None:
    from peft.utils.other import get_pattern_key

    for pattern in (
        "q_proj",
        "layers.1.mlp.up_proj",
        "layers\\.[0-3]\\..*",
        "up_proj|q_proj",
        "proj",
        "model",
    ):
        for name in LAYERS:
            module = name.removesuffix(".weight")
            assert is_named(module, pattern) == (get_pattern_key([pattern], module) == pattern), (
                pattern,
                module,
            )


def test_a_module_is_all_that_is_in_it() -> None:
    assert [name for name in LAYERS if is_within(name, ["layers.1"])] == LAYERS[2:4]
    trained = find_trained(
        TIED, Model(trainable_modules=("mlp", "lm_head"), frozen_modules=("layers.[0-9]",))
    )
    assert trained == {
        "model.embed_tokens.weight",
        LAYERS[21],
        LAYERS[23],
    }  # tied: the head is the embedding
    assert find_trained(TIED, Model()) == {names[0] for names in TIED}


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"frozen_modules": ("mpl",)}, "frozen_modules: mpl: names no module of the model; it has model.embed_tokens, lm_head, "),
        ({"frozen_modules": ("model", "lm_head")}, "no parameter is left to train"),
        ({"trainable_modules": ("lm_head",), "frozen_modules": ("embed_tokens",)}, "lm_head.weight is tied to model.embed"),
    ],
)  # fmt: skip
def test_what_cannot_be_meant_is_refused(keys: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        find_trained(TIED, Model(**keys))


def test_lists_of_modules_are_short() -> None:
    with pytest.raises(
        UserError,
        match=r"it has model\.embed_tokens, lm_head, model\.layers\.N\.self_attn\.q_proj, ",
    ):
        refuse_unmatched("modules_to_save", ["head"], TIED)


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("frozen_modules=['*.mlp']", r"\*.mlp: not a regular expression .* any text is \.\*"),
        ("rank_pattern={'(q_proj': 4}", r"\(q_proj: not a regular expression"),
        ("rank_pattern={q_proj: 0}", "a number above 0 is expected"),
        ("modules_to_save=[lm_head]", "modules_to_save has no effect without use_peft: true"),
    ],
)
def test_the_reader_refuses_it_at_once(
    override: str, sentence: str, tiny_recipe: Callable[..., Path]
) -> None:
    with pytest.raises(UserError, match=sentence):
        read_recipe(str(tiny_recipe()), [override])


@pytest.mark.filterwarnings("error")  # peft's own would stand above the sentence
def test_plan_and_training_refuse_a_pattern_without_a_layer_alike(
    tiny_recipe: Callable[..., Path],
    tiny_llama: Callable[..., Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(tiny_llama())
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    path = str(tiny_recipe(use_peft=True))
    capsys.readouterr()
    for key, pattern in (("rank_pattern", "nope"), ("alpha_pattern", "lm_head")):
        override = f"{key}={{{pattern}: 8}}"
        sentence = f"{key}: {pattern}: names no adapted layer of the model; see lora_target_modules"
        assert main(["plan", "--recipe", path, "--num-processes", "1", override]) == 2
        assert capsys.readouterr().err == f"{sentence}\n"
        with pytest.raises(UserError, match=sentence):
            add_adapters(copy.deepcopy(model), read_recipe(path, [override]).lora, torch.float32)
    # A target is whole parts of a name: the plan once took `roj` for every projection, and the loading for none.
    for override, sentence in (
        ("lora_target_modules=[q_proj, roj]", "lora_target_modules: roj: no such linear layer in "),
        (
            "lora_target_parameters=[experts.down_proj]",
            "lora_target_parameters: experts.down_proj: the model has no parameters",
        ),
    ):
        assert main(["plan", "--recipe", path, "--num-processes", "1", override]) == 2
        assert sentence in capsys.readouterr().err
        with pytest.raises(UserError, match=sentence):
            add_adapters(copy.deepcopy(model), read_recipe(path, [override]).lora, torch.float32)
    named = ["lora_target_modules=[q_proj, down_proj]", "alpha_pattern={down_proj: 8}"]
    assert main(["plan", "--recipe", path, "--num-processes", "1", *named]) == 0
    add_adapters(model, read_recipe(path, named).lora, torch.float32)


def test_freezing_is_for_full_fine_tuning(tiny_recipe: Callable[..., Path]) -> None:
    with pytest.raises(
        UserError,
        match="frozen_modules cannot be combined with use_peft: LoRA freezes the base but for modules_to",
    ):
        read_recipe(str(tiny_recipe(use_peft=True)), ["frozen_modules=[embed_tokens]"])


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["use_dora=true"], "use_dora cannot be combined with an adapter on the output head: DoRA"),
        (["oft_block_size=8"], "oft_block_size cannot be combined with an adapter on the output"),
        (["method=embed"], "an adapter on the output head cannot be combined with method: embed: "),
    ],
)
def test_what_a_loss_in_chunks_cannot_compute_is_refused_with_the_head(
    overrides: list[str], sentence: str, tiny_recipe: Callable[..., Path]
) -> None:
    path = str(tiny_recipe(use_peft=True))
    with pytest.raises(UserError, match=sentence):
        read_recipe(path, ["lora_target_modules=[all-linear, lm_head]", *overrides])
    if "method=embed" not in overrides:
        read_recipe(path, ["lora_target_modules=[all-linear, q_proj]", *overrides])


NAMED_HEAD = {"lora_target_modules": ["q_proj", "lm_head"]}
HEADS: dict[str, tuple[dict[str, Any], int]] = {
    "named": (NAMED_HEAD, 2),
    "all-linear": ({}, 7),
    "all-linear and named": ({"lora_target_modules": ["all-linear", "lm_head"]}, 8),
    "trained whole": ({"modules_to_save": ["lm_head"]}, 7),
    "named and trained whole": (NAMED_HEAD | {"modules_to_save": ["lm_head"]}, 1),
}


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("case", HEADS)
def test_the_head_gets_an_adapter_where_it_is_named(
    case: str, tied: bool, tiny_recipe: Callable[..., Path], tmp_path: Path
) -> None:
    """`all-linear` is all layers but the head. The plan counts what the loading makes."""
    keys, layers = HEADS[case]
    recipe = read_recipe(str(tiny_recipe(use_peft=True, **keys)), [])
    sizes = {
        "vocab_size": 32,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    model = Model(model_config={"model_type": "llama", "tie_word_embeddings": tied, **sizes})
    built = build_on_meta(load_config(model), torch.float32)
    add_adapters(built, recipe.lora, torch.float32)
    adapted = {
        name.partition(".lora_")[0] for name, _ in built.named_parameters() if ".lora_" in name
    }
    assert ("lm_head" in adapted) == ("named" in case and "whole" not in case)
    assert len(adapted) == layers
    assert built.get_submodule("lm_head").weight.requires_grad == bool(recipe.lora.modules_to_save)
    spec = make_plan(replace(recipe, model=model), Sharding(layout="fsdp2"), 1).spec
    trained = {p: p.numel() for p in built.parameters() if p.requires_grad}
    assert spec.trained_numel == sum(trained.values())


def test_a_head_of_another_name_is_no_part_of_all_linear() -> None:
    sizes = {
        "vocab_size": 32,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    model = Model(model_config={"model_type": "biogpt", "max_position_embeddings": 32, **sizes})
    built = build_on_meta(load_config(model), torch.float32)
    add_adapters(built, Lora(use_peft=True), torch.float32)
    assert not [
        name for name, _ in built.named_parameters() if name.startswith("output_projection.lora_")
    ]
    assert [name for name, _ in built.named_parameters() if ".q_proj.lora_" in name]
