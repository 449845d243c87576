"""optim_in_backward: bit for bit the plain step without clipping, its memory as planned, and nothing that is not finite."""

import json
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from finetune.config.layout import Sharding
from finetune.config.reader import read_recipe
from finetune.config.schema import Optimization, Recipe
from finetune.data.batches import StepBatch
from finetune.data.packing import make_filler
from finetune.distributed.world import World
from finetune.errors import UserError
from finetune.optim.optimizers import build_optimizer
from finetune.training.objectives.objective import Measured, Objective
from finetune.training.step import StepCheck, accumulate_gradients, handle_nonfinite
from finetune.training.update_in_backward import UpdateInBackward
from tests.conftest import make_chat, make_model, slow_but
from tests.ranks import run_python
from tests.training.layouts import write_config, write_recipe

IN_BACKWARD = "optim_in_backward=true"
SIZES = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 10, "vocab_size": 512}
# name -> ranks, layout, precision (in bf16 with checkpointing), overrides
CASES: dict[str, tuple[int, str, str, list[str]]] = {
    "single": (1, "single", "bf16", ["optim=sgd", "weight_decay=0.1"]),
    "one rank": (1, "full_shard", "bf16", ["optim=adamw_torch_fused", "weight_decay=0.1"]),
    "two ranks": (2, "full_shard", "no", ["optim=adamw_torch", "attention_dropout=0.1"]),
}
QUICK = ("two ranks",)
PRETENDED = "first of two"  # in one process, which allocates nothing for the exchange itself
# What stays until its own backward, while other layers have theirs. Name -> layout, overrides, the model's sizes.
STAYING: dict[str, tuple[str, list[str], dict[str, Any]]] = {
    "gathered layers": ("shard_grad_op", [], SIZES),
    "a gathered embedding": ("shard_grad_op", [], SIZES | {"vocab_size": 4096}),
    "a tied head's gradient": (
        "single",
        ["optim=sgd", IN_BACKWARD],
        {
            "hidden_size": 32,
            "intermediate_size": 4096,
            "vocab_size": 3072,
            "tie_word_embeddings": True,
        },
    ),
    "a tied head's gradient beside the embedding's": (
        "full_shard",
        ["optim=sgd"],
        {
            "hidden_size": 256,
            "intermediate_size": 768,
            "num_hidden_layers": 8,
            "vocab_size": 8192,
            "tie_word_embeddings": True,
        },
    ),
    "an embedding's gradient beside its shard": (
        "full_shard",
        ["optim=sgd"],
        {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 8, "vocab_size": 8192},
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, slow_too: bool) -> Path:
    """What every rank of every case leaves, plain and in backward; all are forked from one process."""
    folder = tmp_path_factory.mktemp("in-backward")
    model = make_model(folder / "model", **SIZES, tie_word_embeddings=False)
    recipe = write_recipe(
        folder / "recipe.yaml", model, make_chat(folder / "chat.jsonl", rows=4), max_grad_norm=None
    )
    for case in (*CASES, PRETENDED, "hybrid"):
        (folder / case).mkdir()

    def job(name: str, case: str, *overrides: str) -> dict[str, Any]:
        ranks, layout, precision, its = CASES.get(
            case, (1 if case == PRETENDED else 4, "full_shard", "no", [])
        )
        checkpointing, mesh = (
            precision == "bf16" or case == PRETENDED,
            (2, 2) if ranks == 4 else None,
        )
        config = write_config(
            folder / case, layout, precision, checkpointing=checkpointing, mesh=mesh
        )
        given = {"recipe": str(recipe), "config": str(config), "overrides": [*its, *overrides]}
        pretended = {"pretended": 2} if case == PRETENDED else {}
        return {"name": name, "ranks": ranks, "folder": str(folder), **given, **pretended}

    wanted = (*CASES, PRETENDED) if slow_too else QUICK
    jobs = [job(name, name) for name in wanted]
    jobs += [job(f"{name} in backward", name, IN_BACKWARD) for name in wanted]
    if slow_too:
        jobs.append(job("rounded", "hybrid", IN_BACKWARD, "optim=adamw_bf16_moments"))
    jobs += [staying_job(folder / name, name) for name in STAYING]
    (folder / "jobs.json").write_text(json.dumps(jobs))
    script = Path(__file__).with_name("in_backward_on_ranks.py")
    done = run_python([str(script), str(folder / "jobs.json")], timeout=240)
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


def staying_job(folder: Path, name: str) -> dict[str, Any]:
    layout, overrides, sizes = STAYING[name]
    folder.mkdir()
    data = make_chat(folder / "chat.jsonl", rows=4)
    model = make_model(folder / "model", **sizes)
    job = {
        "name": name,
        "ranks": 1,
        "folder": str(folder),
        "recipe": str(write_recipe(folder / "recipe.yaml", model, data, max_grad_norm=None)),
        "config": str(write_config(folder, layout, checkpointing=True)),
        "overrides": overrides,
    }
    return job if layout == "single" else job | {"pretended": 2}


@pytest.mark.parametrize("name", slow_but(QUICK, CASES))
def test_parameters_and_state_are_those_of_the_plain_step_bit_for_bit(
    name: str, folder: Path
) -> None:
    for rank in range(CASES[name][0]):
        plain, ours = (
            torch.load(folder / f"{each}-{rank}.pt") for each in (name, f"{name} in backward")
        )
        assert (ours["losses"], ours["norms"]) == (plain["losses"], plain["norms"])
        assert len(set(plain["losses"])) > 1 and min(plain["norms"]) > 0
        assert ours["state"].keys() == plain["state"].keys()
        assert [
            key
            for key, value in plain["state"].items()
            if not torch.equal(value, ours["state"][key])
        ] == []


@pytest.mark.slow
def test_replicas_round_alike(folder: Path) -> None:
    """Under hybrid sharding ranks 0 and 2 hold the same shards, and 1 and 3."""
    states = [torch.load(folder / f"rounded-{rank}.pt")["state"] for rank in range(4)]
    assert any(value.dtype == torch.bfloat16 for value in states[0].values())
    for first, second in ((0, 2), (1, 3)):
        assert all(torch.equal(value, states[second][key]) for key, value in states[first].items())
    assert not torch.equal(states[0]["0 "], states[1]["0 "])


@pytest.mark.parametrize("name", slow_but(QUICK, ["single", "one rank", PRETENDED]))
def test_a_step_allocates_what_is_planned(
    name: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Within 2%, of which in bf16 most is a CPU's own: what its products allocate, and the state of its generator for each layer."""
    plain, ours = (torch.load(folder / f"{each}-0.pt") for each in (name, f"{name} in backward"))
    saved, planned = (plain[key] - ours[key] for key in ("measured", "planned"))
    with capsys.disabled():
        print(
            f"\n{name}: {plain['measured']:,} bytes, in backward {saved:,} less; planned {planned:,} less"
        )
    for each in (plain, ours):
        assert each["planned"] == pytest.approx(each["measured"], rel=0.02)
    assert saved > 0.35 * plain["measured"]
    assert planned == pytest.approx(saved, rel=0.03)


@pytest.mark.parametrize("name", STAYING)
def test_what_stays_until_its_backward_is_planned(name: str, folder: Path) -> None:
    found = torch.load(folder / name / f"{name}-0.pt")
    assert found["planned"] == pytest.approx(found["measured"], rel=0.01)


@pytest.mark.parametrize("name", [*slow_but(QUICK, CASES), "a tied head's gradient"])
def test_the_state_for_a_save_is_made_without_the_gradients_of_all(name: str, folder: Path) -> None:
    """At a trial save and a resume, where no step has made it; the plan adds a CPU's norm of one gradient, in fp64."""
    subfolder = folder / name if name in STAYING else folder
    found = torch.load(subfolder / f"{name}-0.pt")
    assert found["state made"] <= found["state planned"] + torch.zeros(1).nbytes
    assert found["state planned"] <= 1.1 * found["state made"]


def alone() -> World:
    accelerator: Any = SimpleNamespace(scaler=None, backward=torch.Tensor.backward)
    return World(0, 1, 0, 1, torch.device("cpu"), Sharding(layout="single"), accelerator)


def make_recipe(**keys: Any) -> Recipe:
    optimization = Optimization(optim_in_backward=True, max_grad_norm=None, **keys)
    return Recipe(path="recipe.yaml", optimization=optimization)


@pytest.mark.parametrize("optim", ["adamw_torch_fused", "adamw_bf16_moments", "adamw_torch", "sgd"])
def test_a_gradient_that_is_not_finite_stops_every_update_after_it(optim: str) -> None:
    """In the backward the last layer comes first: only that was updated, with the finite gradient that it had."""
    torch.manual_seed(0)
    recipe, layers = (
        make_recipe(optim=optim),
        torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3))),
    )
    optimizer = build_optimizer(layers, recipe.optimization)
    layers[1].weight.register_hook(lambda gradient: gradient * float("inf"))
    states = [{name: value.clone() for name, value in layers.state_dict().items()}]
    with UpdateInBackward(optimizer, recipe, alone()) as in_backward:
        for step in range(2):
            in_backward.start_step(step)
            in_backward.check_loss(torch.tensor(1.0))
            layers(torch.randn(2, 4)).sum().backward()
            assert all(parameter.grad is None for parameter in layers.parameters())
            assert not torch.isfinite(in_backward.norm(layers))
            states.append({name: value.clone() for name, value in layers.state_dict().items()})
    moved, later = (
        {name for name, value in after.items() if not torch.equal(value, before[name])}
        for before, after in pairwise(states)
    )
    assert moved - {"1.bias"} == {"2.weight", "2.bias"} and not later
    assert all(torch.isfinite(value).all() for value in states[-1].values())
    layers(torch.randn(2, 4)).sum().backward()
    assert layers[0].weight.grad is not None, "the hooks are gone"


class NotANumber(Objective):
    """A loss that is not finite, with finite gradients."""

    def measure(self, model: Any, *_: Any) -> Measured:
        return Measured(model(torch.ones(4)).sum() + float("nan"))


def test_a_loss_that_is_not_finite_moves_nothing_and_the_message_is_true() -> None:
    recipe, layer = make_recipe(), torch.nn.Linear(4, 4)
    before = layer.weight.clone()
    optimizer = build_optimizer(layer, recipe.optimization)
    with UpdateInBackward(optimizer, recipe, alone()) as in_backward:
        in_backward.start_step(0)
        batch = StepBatch(0, 0.0, (make_filler(packing=True),), tokens=1, trained_tokens=1)
        accumulate_gradients(layer, batch, alone(), NotANumber(), in_backward=in_backward)
    assert torch.equal(layer.weight, before) and layer.weight.grad is None
    check = StepCheck(0, (7,), torch.tensor(float("nan")), in_backward.norm(layer))
    with pytest.raises(
        UserError,
        match=r"examples 7.*updated with their finite gradients before; nothing of this step is saved",
    ):
        handle_nonfinite(recipe.optimization, check, 0, alone())


def test_keys_that_need_all_gradients_at_once_are_named_where_they_stand(tiny_recipe: Any) -> None:
    path = str(tiny_recipe(optim_in_backward=True, on_nonfinite="skip", optim="adafactor"))
    with pytest.raises(UserError) as error:
        read_recipe(path)
    said = str(error.value)
    assert (
        "set max_grad_norm: null" in said
        and "set on_nonfinite: stop" in said
        and "set optim to one of " in said
    )
