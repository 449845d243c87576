"""Early exits and layer dropout (LayerSkip, arXiv:2404.16710): the losses of transformers' own models that are cut short, on every layout."""

import ast
import math
import os
import re
import subprocess
import sys
from dataclasses import replace
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoModelForCausalLM

import finetune
from finetune.config.layout import Sharding
from finetune.config.methods import EXIT_WEIGHTS, Method, choose_layers
from finetune.config.reader import read_recipe
from finetune.data.examples import make_generator
from finetune.data.packing import make_filler
from finetune.data.prepare import prepare_data
from finetune.data.tokenizer import load_tokenizer
from finetune.errors import UserError
from finetune.models.cross_entropy import CrossEntropyHead
from finetune.models.decoder_layers import checkpoint_activations
from finetune.models.loss_chunks import UNCHANGED
from finetune.models.watched_layers import watch_layers
from finetune.plan.loss_memory import loss_bytes
from finetune.training.objectives.early_exit import (
    SCHEDULES,
    EarlyExit,
    choose_exits,
    find_skip_probabilities,
    weigh_exits,
)
from tests.conftest import make_chat, make_model, slow_but
from tests.models.families import build, gradients, ours, relative_error
from tests.plan.run_specs import make_spec
from tests.plan.traced import allocated_peak
from tests.session_on_ranks import ROWS
from tests.training import reference
from tests.training.documents import collate, examples_of, held_out, train_kinds, train_plainly
from tests.training.layouts import (
    assert_last_step_again_is_bit_equal,
    steps_of,
    write_config,
    write_recipe,
)

LAYERS, SEED, STEP, STEPS = 4, 11, 3, 4
LENGTHS = (13, 5, 22, 7)
KEYS = Method(method="early_exit", exit_layers="::2", exit_scale=0.5, layer_dropout=0.6)


def passed_by(example_id: int, step: int, keys: Method = KEYS, layers: int = LAYERS) -> set[int]:
    """The layers that a document passes by."""
    random = make_generator(SEED, f"layer_dropout {step}", example_id).random(layers)
    return {
        layer
        for layer, chance in find_skip_probabilities(keys, layers).items()
        if random[layer] < chance
    }


def cut_losses(model: Any, example: Any, number: int, step: int, keys: Method = KEYS) -> torch.Tensor:  # fmt: skip
    """fp32[exits + 1]: a document's summed loss after each exit and at the end, by transformers' forward of a model without the layers after it, nor those that are passed by."""
    whole, count = model.model.layers, len(model.model.layers)
    gone = passed_by(number, step, keys, count)
    ids, labels = (torch.tensor(e).long() for e in (example.input_ids, example.labels))
    losses = []
    for last in (*choose_exits(keys, count, step, STEPS), count - 1):
        model.model.layers = nn.ModuleList(
            layer for index, layer in enumerate(whole) if index <= last and index not in gone
        )
        model.config.num_hidden_layers = len(model.model.layers)
        logits = model(input_ids=ids[None], use_cache=False).logits[0]
        losses.append(F.cross_entropy(logits.float(), labels, reduction="sum", ignore_index=-100))
    model.model.layers = whole
    model.config.num_hidden_layers = count
    return torch.stack(losses)


def plain_loss(model: Any, examples: list[Any], step: int = STEP, keys: Method = KEYS) -> torch.Tensor:  # fmt: skip
    count = len(model.model.layers)
    weights = torch.tensor(weigh_exits(keys, choose_exits(keys, count, step, STEPS), count))
    losses = [cut_losses(model, each, number, step, keys) for number, each in enumerate(examples)]
    return (torch.stack(losses) * weights).sum()


def measure(model: Any, batch: Any, keys: Method = KEYS, step: int = STEP) -> Any:
    objective = EarlyExit(keys, SEED, STEPS)
    return objective.measure(
        model, batch, batch.inputs, SimpleNamespace(step=step, draws=str(step))
    )  # type: ignore[arg-type]


@pytest.mark.parametrize("family", ["llama", "gemma2", "granite", "phi3"])
@pytest.mark.parametrize("is_packed", [True, False])
def test_loss_and_gradients_are_those_of_models_that_are_cut_short(
    family: str, is_packed: bool
) -> None:
    model, examples = build(family, num_hidden_layers=LAYERS), examples_of(LENGTHS)
    assert any(passed_by(number, STEP) for number in range(len(examples)))
    model.set_attn_implementation("eager")
    true_loss = plain_loss(model, examples)
    true_gradients = gradients(model, true_loss)
    of_exits = sum(cut_losses(model, each, number, STEP) for number, each in enumerate(examples))
    ours(model)
    measured = measure(model, collate(examples, is_packed=is_packed))
    assert measured.loss_sum.item() == pytest.approx(true_loss.item(), rel=1e-6)
    tokens = sum(sum(label >= 0 for label in each.labels) for each in examples)
    for name, loss in zip(("exit_loss/1", "output_loss"), of_exits, strict=True):
        assert measured.metrics[name].tolist() == pytest.approx([loss.item(), tokens], rel=1e-5)
    found = gradients(model, measured.loss_sum)
    assert found.keys() == true_gradients.keys()
    worst = max((relative_error(found[name], true_gradients[name]), name) for name in found)
    assert worst[0] <= 2e-5, worst


def test_checkpointed_layers_give_the_same_gradients() -> None:
    model, batch = ours(build("llama", num_hidden_layers=LAYERS)), collate(examples_of(LENGTHS), is_packed=True)  # fmt: skip
    kept = gradients(model, measure(model, batch).loss_sum)
    checkpoint_activations(model, 1)
    again = gradients(model, measure(model, batch).loss_sum)
    assert max(relative_error(again[name], kept[name]) for name in kept) <= 1e-6


def test_a_forward_that_nobody_watches_passes_no_layer_by() -> None:
    model, batch = ours(build("llama", num_hidden_layers=LAYERS)), collate(examples_of(LENGTHS), is_packed=True)  # fmt: skip
    plain = model(**batch.inputs)
    assert measure(model, batch).metrics["output_loss"][0] != plain
    assert torch.equal(model(**batch.inputs), plain)


def test_a_filler_takes_part_and_adds_nothing() -> None:
    model = ours(build("llama"))
    for is_packed in (True, False):
        measured = measure(model, make_filler(is_packed))
        measured.loss_sum.backward()
        assert measured.loss_sum.item() == 0.0
        assert all(p.grad is not None and not p.grad.any() for p in model.parameters())
        model.zero_grad()


def test_a_model_whose_last_norm_is_not_known_is_refused() -> None:
    model = build("llama")
    del model.model.norm
    with pytest.raises(UserError, match="has 0 norms after its last layer"):
        watch_layers(model)


def test_layers_are_named_by_numbers_and_slices() -> None:
    for text in ("::4", ":", "2:", ":3", "1:9:3"):
        parts = [int(part) if part else None for part in text.split(":")]
        assert choose_layers(text, 12) == tuple(range(12)[slice(*parts)])
    assert choose_layers((), 12) == choose_layers("5:2", 12) == ()


# torchtune's own functions, from its package.
@pytest.fixture(scope="module")
def torchtune(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Its functions of early exits by name; TEMPLATE_TOOLS names a folder with it installed, else pip installs it."""
    folder = Path(os.environ.get("TEMPLATE_TOOLS") or tmp_path_factory.mktemp("torchtune"))
    modules = folder / "torchtune" / "modules"
    if not modules.is_dir():
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder), "torchtune==0.6.1"]  # fmt: skip
        installed = subprocess.run(command, capture_output=True, text=True)
        if installed.returncode:
            pytest.skip(f"pip cannot install torchtune: {installed.stderr[-300:]}")
    known: dict[str, Any] = {"torch": torch, "np": np, "math": math, "Enum": Enum}
    for name in ("early_exit_loss.py", "layer_dropout.py", "common_utils.py"):
        tree = ast.parse((modules / name).read_text())
        parts = [
            node
            for node in tree.body
            if isinstance(node, ast.FunctionDef | ast.ClassDef)
            and re.search("scale|Scale|Curriculum|slice", node.name)
        ]
        code = "from __future__ import annotations\n" + "\n\n".join(map(ast.unparse, parts))
        exec(compile(code, name, "exec"), known)
    return known


@pytest.mark.slow
def test_weights_schedules_and_slices_are_torchtunes(torchtune: dict[str, Any]) -> None:
    named = {"uniform": "uniform", "linear": "linear_l", "sum": "sum_l", "root": "sqrt_l", "inverse": "inv_l", "inverse_root": "inv_sqrt_l"}  # fmt: skip
    assert named.keys() == EXIT_WEIGHTS.keys()
    for ours_, theirs in named.items():
        for exits in ((), (0,), (1, 4, 9), tuple(range(11))):
            keys = replace(KEYS, exit_weights=ours_, exit_scale=0.3)
            ids = torch.tensor([*exits, 11]).float()
            expected = torchtune[f"{theirs}_loss_scale"](ids, 12, 0.3)
            assert weigh_exits(keys, exits, 12) == pytest.approx(expected.tolist(), rel=1e-6)
    for name in SCHEDULES:
        keys = replace(KEYS, layer_dropout_schedule=name, layer_dropout=0.4)
        chances = find_skip_probabilities(keys, 12)
        for layer in range(12):
            theirs = 0.4 * torchtune["get_scale"](torchtune["ScaleType"](name), 11, layer)
            if 0 < layer < 11:  # which are 0 and 1 there, whatever the formula gives
                assert chances.get(layer, 0.0) == pytest.approx(theirs)
    for text in ("::4", ":", "2:", ":3", "1:9:3"):
        expected = torchtune["slice_str_to_array"](text, 12)
        assert [layer in choose_layers(text, 12) for layer in range(12)] == expected


@pytest.mark.slow
def test_curricula_are_torchtunes(torchtune: dict[str, Any]) -> None:
    for name, theirs in (
        ("rotational", "RotationalEarlyExitCurriculum"),
        ("gradual", "GradualEarlyExitCurriculum"),
        ("none", "EarlyExitCurriculum"),
    ):
        asked = torchtune["slice_str_to_array"]("1::3", 12)
        curriculum = torchtune[theirs](np.array(asked), 40)
        keys = replace(KEYS, exit_layers="1::3", exit_curriculum=name)
        for step in range(40):
            exits = [*choose_exits(keys, 12, step, 40), 11]
            if name == "gradual":  # which counts its own steps, and those from the second
                curriculum._step = step
                curriculum.step()
            assert [layer in exits for layer in range(12)] == curriculum.get().tolist(), step
            if name == "rotational":
                curriculum.step()


# A run.
RECIPE: dict[str, Any] = {"method": "early_exit", "exit_layers": "::2", "exit_scale": 0.5, "layer_dropout": 0.6, "seed": SEED, "max_length": 128, "global_batch_size": 6, "max_steps": STEPS}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "padded": {},
    "packed": {"packing": True, "global_batch_size": 3},
    "lora": {"use_peft": True, "lora_r": 4},
    "gradual": {"exit_curriculum": "gradual"},
}
RUNS = {  # name -> kind, layout, ranks
    "padded": ("padded", "single", 1),
    "packed": ("packed", "single", 1),
    "gradual": ("gradual", "single", 1),
    "packed-ddp": ("packed", "ddp", 2),
    "padded-ddp": ("padded", "ddp", 2),
    "packed-fsdp2": ("packed", "full_shard", 2),
    "gradual-fsdp2": ("gradual", "full_shard", 2),
    "packed-fsdp1": ("packed", "FULL_SHARD", 2),
    "lora": ("lora", "single", 1),
    "lora-fsdp2": ("lora", "full_shard", 2),
    "packed-tp": ("packed", "tp_size", 2),
    "packed-cp": ("packed", "sp_size", 2),
}
QUICK = ("padded", "packed", "gradual", "packed-fsdp2")
MEASURED = ("padded", "packed", "packed-fsdp2")  # on held-out data too


@pytest.fixture(scope="module")
def recipes(folder: Path) -> dict[str, Path]:
    model = make_model(folder / "model", num_hidden_layers=LAYERS, hidden_size=72, tie_word_embeddings=True)  # fmt: skip
    data = make_chat(folder / "chat.jsonl", rows=26)
    return {
        kind: write_recipe(folder / f"{kind}.yaml", model, data, **RECIPE | keys)
        for kind, keys in KINDS.items()
    }


@pytest.fixture(scope="module")
def runs(folder: Path, recipes: dict[str, Path], slow_too: bool) -> Path:
    wanted = {name: RUNS[name] for name in (RUNS if slow_too else QUICK)}
    train_kinds(folder, recipes, wanted, measured=MEASURED, checkpointed=("gradual",))
    return folder


def weighted_losses(recipe: Any, _tokenizer: Any, model: Any, example: Any, number: int, step: int) -> torch.Tensor:  # fmt: skip
    """The weighted loss of a document, and that of the output."""
    exits = choose_exits(recipe.method, LAYERS, step, STEPS)
    weights = torch.tensor(weigh_exits(recipe.method, exits, LAYERS))
    losses = cut_losses(model, example, number, step, recipe.method)
    return torch.stack([losses @ weights, losses[-1]])


Steps = list[tuple[float, list[float], float]]


@pytest.fixture(scope="module")
def expected(recipes: dict[str, Path], slow_too: bool) -> dict[str, Steps]:
    kinds = {RUNS[name][0] for name in (RUNS if slow_too else QUICK)}
    return {kind: train_plainly(recipes[kind], STEPS, weighted_losses) for kind in kinds}


@pytest.mark.parametrize("name", slow_but(QUICK, RUNS))
def test_every_layout_gives_the_losses_of_a_plain_loop(name: str, runs: Path, expected: dict[str, Steps]) -> None:  # fmt: skip
    lines = steps_of(runs / f"run-{name}")
    for line, (loss, (output,), norm) in zip(lines, expected[RUNS[name][0]], strict=True):
        assert line["loss"] == pytest.approx(loss, rel=1e-5)
        assert line["grad_norm"] == pytest.approx(norm, rel=1e-5)
        assert line["output_loss"] == pytest.approx(output, rel=1e-5)


def test_held_out_data_are_scored_at_the_output_with_all_layers(runs: Path) -> None:
    two, alone = held_out(runs / "run-packed-fsdp2"), held_out(runs / "run-packed")
    assert len(alone) == 3 and two == pytest.approx(alone, rel=1e-5)
    model: Any = AutoModelForCausalLM.from_pretrained(runs / "model")
    assert held_out(runs / "run-padded")[0] == pytest.approx(alone[0], rel=1e-6)
    recipe = read_recipe(str(runs / "run-padded" / "recipe.yaml"))
    data = prepare_data(recipe, load_tokenizer(recipe.model, recipe.data), reference.Alone())  # type: ignore[arg-type]
    examples = data.evaluation.examples  # type: ignore[union-attr]
    held = [examples[index] for index in range(len(examples))]
    plain = replace(KEYS, exit_layers=(), layer_dropout=0.0)
    total = sum(cut_losses(model, each, 0, 0, plain)[-1].item() for each in held)
    assert alone[0] == pytest.approx(total / sum((e.labels != -100).sum() for e in held), rel=1e-5)


def test_a_resumed_run_is_bit_equal(runs: Path) -> None:
    recipe = runs / "again.yaml"
    recipe.write_text((runs / "run-packed" / "recipe.yaml").read_text())
    assert_last_step_again_is_bit_equal(runs / "run-packed", recipe, runs, STEPS)


def test_a_session_trains_on_rows_and_its_own_losses_pass_no_layer_by(
    tmp_path: Path, tiny_recipe: Any
) -> None:
    path = tiny_recipe(method="early_exit", exit_layers=":", layer_dropout=0.9, layer_dropout_schedule="uniform")  # fmt: skip
    with finetune.Session(str(path), str(write_config(tmp_path, "single"))) as session:
        before = session.forward_backward(ROWS, "cross_entropy").loss
        assert session.forward_backward(ROWS).loss != before
        assert session.forward_backward(ROWS, "cross_entropy").loss == before


@pytest.mark.parametrize(
    "dtype", slow_but([torch.float32], [torch.float32, torch.bfloat16]), ids=str
)
def test_the_loss_takes_what_is_planned(dtype: torch.dtype) -> None:
    tokens, vocabulary, exits = 512, 12_000, 3
    config = {"model_type": "llama", "vocab_size": vocabulary, "hidden_size": 256, "intermediate_size": 176, "num_hidden_layers": 8, "num_attention_heads": 4}  # fmt: skip
    sharding = Sharding(layout="fsdp2", mixed_precision="no" if dtype == torch.float32 else "bf16")
    spec = make_spec(config, ranks=1, sharding=sharding, max_length=tokens)
    recipe = replace(spec.recipe, method=replace(KEYS, exit_layers=(0, 1, 2)))
    spec = replace(spec, device="cpu", recipe=recipe)
    assert spec.scored_outputs == exits + 1
    head = nn.Linear(256, vocabulary, bias=False, dtype=dtype)
    head.__class__ = CrossEntropyHead
    head.input_scale, head.logits, head.label_smoothing = 1.0, UNCHANGED, 0.0  # type: ignore[assignment]
    watched = watch_layers(build("llama", num_hidden_layers=4))
    watched.norm = nn.Identity()
    states = [torch.randn(1, tokens, 256, dtype=dtype).requires_grad_() for _ in range(4)]
    watched._states = dict(enumerate(states))
    hidden, labels = states[-1], torch.randint(0, vocabulary, (1, tokens))
    score = watched.score(range(exits), torch.full((exits + 1,), 0.25))
    score(
        head, *(each.flatten(0, 1) for each in (hidden, labels)), torch.arange(tokens)
    )  # the proof
    seen = allocated_peak(lambda: head(hidden, labels, torch.arange(tokens), score))
    assert loss_bytes(spec) / seen == pytest.approx(1, rel=0.02)


def test_a_head_that_reads_something_else_than_the_norm_is_refused() -> None:
    model, batch = ours(build("llama")), collate(examples_of(LENGTHS), is_packed=True)
    model.model.norm.register_forward_hook(lambda _norm, _inputs, output: output * 1.5)
    watch_layers(model).norm = nn.Identity()
    with pytest.raises(UserError, match="reads something else than the norm"):
        measure(model, batch)
