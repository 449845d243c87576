"""The recipe's optimizer and learning rate, held against transformers' schedulers and torch's AdamW."""

import json
import re
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import torch
from torch import nn
from transformers import Trainer, get_scheduler

from finetune.config.optimization import OPTIMIZERS
from finetune.config.reader import read_recipe
from finetune.config.schedules import compute_learning_rate
from finetune.config.schema import Optimization, Recipe
from finetune.constants import FP32
from finetune.errors import UserError
from finetune.optim.optimizers import (
    CONSTRUCTORS,
    build_optimizer,
    complete_state,
    make_parameter_groups,
)
from tests.models.families import build
from tests.plan.traced import allocated_peak
from tests.ranks import launch_ranks

STEPS = 50
RecipeOf = Callable[..., Recipe]


@pytest.fixture
def recipe_of(tmp_path: Path) -> RecipeOf:
    """`recipe_of(learning_rate=1e-3)`: a recipe with these keys, read by the reader."""

    def read(**keys: Any) -> Recipe:
        file = tmp_path / "recipe.yaml"
        file.write_text("model_name_or_path: some/model\ndatasets:\n  - path: some/data\n")
        return read_recipe(str(file), [f"{key}={value}" for key, value in keys.items()])

    return read


def test_every_optimizer_of_the_table_can_be_made() -> None:
    assert (
        get_args(get_type_hints(Optimization)["optim"]) == tuple(OPTIMIZERS) == tuple(CONSTRUCTORS)
    )


def test_optimizers_of_one_saved_state_keep_tensors_of_the_same_names() -> None:
    kinds = {}
    for optim, facts in OPTIMIZERS.items():
        model = nn.ModuleDict({"layer": nn.Linear(128, 64)})
        optimizer = build_optimizer(model, Optimization(optim=optim))  # type: ignore[arg-type]
        model["layer"](torch.randn(3, 128)).sum().backward()
        optimizer.step()
        names = {tuple(sorted(optimizer.state[parameter])) for parameter in model.parameters()}
        kinds.setdefault(facts.saved_state, set()).add(frozenset(names))
    assert [len(each) for each in kinds.values()] == [1] * len(kinds)
    assert len(set.union(*kinds.values())) == len(kinds), "kinds that differ in nothing"


def rates_of(recipe: Recipe) -> list[float]:
    """The learning rate of every step."""
    schedule = recipe.optimization.schedule(STEPS)
    return [compute_learning_rate(step, schedule) for step in range(STEPS)]


def rates_of_transformers(name: str, warmup_steps: int, peak: float, **options: Any) -> list[float]:
    """The same by transformers, whose warm-up begins at 0 and ours at the first share: its step i + 1 is our step i there."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=peak)
    scheduler = get_scheduler(
        name, optimizer, warmup_steps, STEPS, scheduler_specific_kwargs=options
    )
    rates = []
    for _ in range(STEPS + 1):
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return rates[1 : warmup_steps + 1] + rates[warmup_steps:STEPS]


@pytest.mark.parametrize(
    ("kind", "theirs"),
    [
        ("cosine", "cosine"),
        ("linear", "linear"),
        ("constant", "constant_with_warmup"),
        ("constant_with_warmup", "constant_with_warmup"),
        ("inverse_sqrt", "inverse_sqrt"),
    ],
)
@pytest.mark.parametrize("warmup_steps", [0, 5])
def test_lr_scheduler_type_is_the_schedule_of_that_name(
    recipe_of: RecipeOf, kind: str, theirs: str, warmup_steps: int
) -> None:
    recipe = recipe_of(lr_scheduler_type=kind, learning_rate=1e-3, warmup_steps=warmup_steps)
    assert rates_of(recipe) == pytest.approx(rates_of_transformers(theirs, warmup_steps, 1e-3))


@pytest.mark.parametrize(
    ("kind", "arguments", "min_lr_ratio", "theirs"),
    [
        ("polynomial", {}, 0.1, {"lr_end": 1e-4}),
        ("polynomial", {"power": 2.5}, 0.01, {"lr_end": 1e-5, "power": 2.5}),
        ("inverse_sqrt", {"timescale": 30}, 0.0, {"timescale": 30}),
        ("warmup_stable_decay", {}, 0.2, {"num_decay_steps": 5, "min_lr_ratio": 0.2}),
        ("warmup_stable_decay", {"num_decay_steps": 12, "decay_type": "1-sqrt"}, 0.1,
         {"num_decay_steps": 12, "decay_type": "1-sqrt", "min_lr_ratio": 0.1}),
        ("wsd", {"num_decay_steps": 0.4, "decay_type": "linear"}, 0.0, {"num_decay_steps": 20, "decay_type": "linear"}),
        ("cosine_with_min_lr", {}, 0.1, {"min_lr_rate": 0.1}),
    ],
)  # fmt: skip
def test_lr_scheduler_kwargs_are_those_of_transformers(
    recipe_of: RecipeOf,
    kind: str,
    arguments: dict[str, Any],
    min_lr_ratio: float,
    theirs: dict[str, Any],
) -> None:
    recipe = recipe_of(
        lr_scheduler_type=kind,
        lr_scheduler_kwargs=json.dumps(arguments),
        min_lr_ratio=min_lr_ratio,
        learning_rate=1e-3,
        warmup_steps=5,
    )
    name = recipe.optimization.lr_scheduler_type
    assert rates_of(recipe) == pytest.approx(rates_of_transformers(name, 5, 1e-3, **theirs))


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"lr_scheduler_kwargs": "{power: 2}"}, "power: cosine takes no arguments"),
        (
            {"lr_scheduler_type": "wsd", "lr_scheduler_kwargs": "{decay_type: step}"},
            "one of cosine, linear, 1-sqrt is",
        ),
        (
            {"lr_scheduler_type": "wsd", "lr_scheduler_kwargs": "{num_decay_steps: 0}"},
            "a number above 0 is expected",
        ),
        (
            {"lr_scheduler_type": "cosine", "lr_scheduler_kwargs": "{min_lr: 1e-6}"},
            "min_lr: here it is min_lr_ratio",
        ),
        (
            {"lr_scheduler_type": "cosine_with_min_lr"},
            "ends at learning_rate times min_lr_ratio; set min_lr_ratio, or",
        ),
        (
            {"lr_scheduler_type": "inverse_sqrt", "min_lr_ratio": 0.1},
            "min_lr_ratio has no effect with lr_scheduler_type",
        ),
        ({"lr_scheduler_type": "cosine_with_restarts"}, "a rate that jumps back is not supported"),
        ({"optim": "paged_adamw_8bit"}, "another tool's name; here it is adamw_8bit"),
        (
            {"optim": "lion_32bit"},
            "lion_32bit: not supported: no kept library has Lion for sharded parameters",
        ),
    ],
)
def test_a_schedule_or_optimizer_that_cannot_be_is_one_sentence(
    recipe_of: RecipeOf, keys: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(UserError, match=re.escape(sentence)):
        recipe_of(**keys)


def test_min_lr_ratio_is_where_the_cosine_ends(recipe_of: RecipeOf) -> None:
    recipe = recipe_of(
        lr_scheduler_type="cosine", learning_rate=1e-3, warmup_steps=5, min_lr_ratio=0.1
    )
    assert rates_of(recipe) == pytest.approx(
        rates_of_transformers("cosine_with_min_lr", 5, 1e-3, min_lr_rate=0.1)
    )


def test_warmup_ratio_is_a_share_of_the_steps_unless_warmup_steps_is_given(
    recipe_of: RecipeOf,
) -> None:
    assert recipe_of(warmup_ratio=0.1).optimization.schedule(STEPS).warmup_steps == 5
    assert (
        recipe_of(warmup_ratio=0.1, warmup_steps=7).optimization.schedule(STEPS).warmup_steps == 7
    )


@pytest.mark.parametrize("kind", ["cosine", "warmup_stable_decay", "inverse_sqrt"])
def test_a_run_that_ends_in_its_warmup_does_not_reach_the_rate_as_in_transformers(
    recipe_of: RecipeOf, kind: str
) -> None:
    recipe = recipe_of(lr_scheduler_type=kind, learning_rate=1e-3, warmup_steps=2 * STEPS)
    arguments = {"num_decay_steps": 5} if kind == "warmup_stable_decay" else {}
    rates = rates_of(recipe)
    assert rates == pytest.approx(rates_of_transformers(kind, 2 * STEPS, 1e-3, **arguments))
    assert max(rates) <= 0.5e-3


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused", "adamw_bf16_moments"])
def test_adam_betas_epsilon_and_weight_decay_reach_the_optimizer(
    recipe_of: RecipeOf, optim: str
) -> None:
    keys = {
        "adam_beta1": 0.8,
        "adam_beta2": 0.9,
        "adam_epsilon": 1e-3,
        "weight_decay": 0.3,
        "learning_rate": 0.01,
    }
    recipe = recipe_of(optim=optim, **keys)
    torch.manual_seed(0)
    ours, theirs = (
        nn.Sequential(OrderedDict(linear=nn.Linear(64, 64), norm=nn.LayerNorm(64)))
        for _ in range(2)
    )
    theirs.load_state_dict(ours.state_dict())
    optimizer = build_optimizer(ours, recipe.optimization)
    matrices = [parameter for parameter in theirs.parameters() if parameter.dim() == 2]
    others = [parameter for parameter in theirs.parameters() if parameter.dim() == 1]
    reference = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.3}, {"params": others, "weight_decay": 0.0}],
        lr=0.01,
        betas=(0.8, 0.9),
        eps=1e-3,
    )
    for step in range(3):
        inputs = torch.randn(8, 64, generator=torch.Generator().manual_seed(step))
        for model, its in ((ours, optimizer), (theirs, reference)):
            its.zero_grad()
            model(inputs).square().mean().backward()
            its.param_groups[0]["lr"] = 0.01
            its.step()
    tolerance = 1e-3 if optim == "adamw_bf16_moments" else 1e-6
    for parameter, expected in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(parameter, expected, atol=tolerance, rtol=0)


@pytest.mark.parametrize(
    "family", ["gpt_oss", "qwen3", "gpt2", "gpt_neox", "mamba", "rwkv", "gemma3n_text"]
)
def test_what_decays_is_what_transformers_trainer_decays_but_for_vectors(family: str) -> None:
    """Its rule goes by names and layer norms: biases do not decay, and gpt-oss has a row of them for each expert."""
    model = build(family)
    theirs = set(Trainer.get_decay_parameter_names(None, model))
    vectors = {"sinks", "A_log", "D", "time_mix_key", "time_mix_value", "time_mix_receptance"}
    expected = {
        name for name, p in model.named_parameters()
        if name in theirs and p.dim() > 1 and name.rpartition(".")[2] not in vectors
    }  # fmt: skip
    names = {parameter: name for name, parameter in model.named_parameters()}
    decaying, others = make_parameter_groups(model, 0.1)
    assert (decaying["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    assert {names[parameter] for parameter in decaying["params"]} == expected
    assert {names[parameter] for parameter in others["params"]} == set(names.values()) - expected


def test_matrices_decay_whatever_the_layout_and_the_names_of_norms(tmp_path: Path) -> None:
    """GPT-2 calls its norms ln_1, ln_2 and ln_f; FSDP1 shows every parameter flattened."""
    script = Path(__file__).with_name("groups_on_ranks.py")
    launch_ranks(script, [str(tmp_path / "decaying.json")], ranks=2, timeout=240).check()
    decaying = json.loads((tmp_path / "decaying.json").read_text())
    gpt2 = [
        f"{part}.{name}.weight" for part in ("attn", "mlp") for name in ("c_attn", "c_fc", "c_proj")
    ]
    gpt2 = [name for name in gpt2 if name not in ("attn.c_fc.weight", "mlp.c_attn.weight")]
    llama = [f"self_attn.{name}_proj.weight" for name in "qkvo"]
    llama += [f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")]
    expected = {
        "gpt2": ["lm_head.weight", "transformer.wte.weight", "transformer.wpe.weight"]
        + [f"transformer.h.{layer}.{name}" for layer in range(2) for name in gpt2],
        "llama": ["lm_head.weight", "model.embed_tokens.weight"]
        + [f"model.layers.{layer}.{name}" for layer in range(2) for name in llama],
    }
    for case, names in decaying.items():
        assert names == sorted(expected[case.split()[0]]), case


@pytest.mark.parametrize("optim", sorted(OPTIMIZERS))
def test_a_state_that_is_made_for_a_checkpoint_changes_no_later_update(optim: str) -> None:
    """Of parameters that had no gradient yet: whoever saves before their first one continues as whoever does not save."""
    updated = []
    for saves in (True, False):
        torch.manual_seed(0)
        model = nn.ModuleDict({name: nn.Linear(128, 64) for name in ("early", "late")})
        keys = Optimization(optim=optim, learning_rate=1e-2, weight_decay=0.1)  # type: ignore[arg-type]
        optimizer = build_optimizer(model, keys)
        for step in range(4):
            trained = [model["early"]] if step < 2 else [model["early"], model["late"]]
            torch.manual_seed(step)
            sum(layer(torch.randn(3, 128)).square().mean() for layer in trained).backward()
            torch.manual_seed(step)
            optimizer.step()
            optimizer.zero_grad()
            if saves and step in (0, 1):
                complete_state(optimizer)
                state = [optimizer.state[parameter] for parameter in model.parameters()]
                assert len({frozenset(each) for each in state}) <= 2, "Muon's vectors are AdamW's"
                assert all(float(each["step"]) == 0 for each in state[2:] if "step" in each)
        updated.append([parameter.detach() for parameter in model.parameters()])
    for one, other in zip(*updated, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "optim",
    [name for name, facts in OPTIMIZERS.items() if facts.update_copies or facts.cpu_update_bytes],
)
def test_an_update_allocates_no_more_than_the_plan_counts(optim: str, dtype: torch.dtype) -> None:
    """A matrix and a convolution, by torch's own allocator; the second update, which makes no state."""
    facts = OPTIMIZERS[optim]
    for layer in (nn.Linear(512, 512, bias=False), nn.Conv2d(128, 128, 4, bias=False)):
        weight = layer.to(dtype).weight
        optimizer = build_optimizer(layer, Optimization(optim=optim, weight_decay=0.1))  # type: ignore[arg-type]
        peaks = []
        for _ in range(2):
            weight.grad = torch.randn_like(weight)
            peaks.append(allocated_peak(optimizer.step))
        copies = facts.update_copies * FP32 + facts.cpu_update_bytes
        counted = (copies + facts.update_bytes) * weight.numel()
        assert peaks[1] <= counted + 64 * 512
