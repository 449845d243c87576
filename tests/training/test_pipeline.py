"""Pipeline parallelism: layers one after another on ranks give the losses, norms, weights and exports of one process."""

import hashlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file

from finetune.config.families import FAMILIES
from finetune.config.layout import Sharding
from finetune.config.reader import read_recipe
from finetune.distributed.world import World
from finetune.training.objectives.objective import SFT
from finetune.training.step import forward_backward
from tests.conftest import make_chat, make_model
from tests.ranks import start_ranks
from tests.training import reference
from tests.training.layouts import (
    assert_bit_equal,
    assert_losses,
    steps_of,
    train_all,
    write_config,
    write_recipe,
)
from tests.training.test_expert_adapters import EXPERTS
from tests.training.test_experts import COEFFICIENT, SMALL
from tests.training.test_experts import FAMILIES as MIXTURES
from tests.training.test_preference_layouts import make_pairs

STEPS, SAVED_AT = 6, 3
PP = "pipeline_parallel_size=2"
INTERLEAVED = "pipeline_schedule=interleaved_1f1b"
PACKED = {"packing": True, "max_length": 160}
LORA = {"use_peft": True, "lora_r": 4}
SHORT = {"max_steps": 3}
ASKED = {
    "eval_split_size": 5,
    "eval_steps": 2,
    "sample_prompts": ["What is 2 plus 3?"],
    "run_name": "asked",
}
# A mode -> the model, and keys. Models have four layers.
MODES: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("llama", {}),
    "packed": ("tied", PACKED | {"export_at_end": True}),
    "lora": ("llama", LORA | PACKED | SHORT),
    "asked": ("tied", PACKED | SHORT | ASKED),
    "mixture": ("mixtral", SHORT | {"router_aux_loss_coef": COEFFICIENT}),
    "four-experts": ("mixtral-4", SHORT | LORA | {"lora_target_parameters": EXPERTS}),
    "dpo": ("llama", LORA | SHORT | {"method": "dpo", "global_batch_size": 2}),
    "orpo": ("tied", SHORT | {"method": "orpo", "global_batch_size": 2}),
    "neftune": ("gemma", SHORT | {"neftune_noise_alpha": 5}),
    "quantized": ("llama", LORA | SHORT | PACKED | {"load_in_4bit": True}),
}
# A run -> mode, layout, keys.
ON_TWO: dict[str, tuple[str, str, tuple[str, ...]]] = {
    **{mode: (mode, "full_shard", (PP,)) for mode in MODES},
    "interleaved": ("packed", "full_shard", (PP, INTERLEAVED, "export_at_end=False")),
    "interleaved-lora": ("lora", "full_shard", (PP, INTERLEAVED)),
    "interleaved-mixture": ("mixture", "full_shard", (PP, INTERLEAVED)),
    "checkpointing": ("lora", "checkpointing", (PP,)),
    "offload": ("lora", "offload", (PP,)),
}
QUICK = ("packed",)
ON_FOUR: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "shards": ("packed", "full_shard", (PP, "export_at_end=False")),
    "shards-mixture": ("mixture", "full_shard", (PP,)),
    "matrices": ("packed", "matrices", (PP, "export_at_end=False")),
    "matrices-lora": ("lora", "matrices", (PP,)),
    "tokens": ("lora", "tokens", (PP,)),
    "experts": ("four-experts", "full_shard", (PP, "expert_parallel_size=2")),
    "experts-interleaved": (
        "four-experts",
        "full_shard",
        (PP, INTERLEAVED, "expert_parallel_size=2"),
    ),
    "replicas": ("full", "replicas", (PP, INTERLEAVED, "max_steps=3")),
    "four": ("packed", "full_shard", ("pipeline_parallel_size=4", "export_at_end=False")),
}


def test_each_stage_draws_dropout_masks_of_its_own(
    tiny_recipe: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The layers of two stages dropped the same activations. A run without stages, and the first of them, draw as before."""
    recipe = read_recipe(str(tiny_recipe(seed=7)))

    def drop(*_: Any, **__: Any) -> torch.Tensor:
        return torch.nn.functional.dropout(torch.ones(64))

    def draw(rank: int, stages: int) -> torch.Tensor:
        layout = Sharding(layout="fsdp2", pipeline_parallel_size=stages)
        world = World(rank, stages, rank, stages, torch.device("cpu"), layout, cast(Any, None))
        batch = cast(Any, SimpleNamespace(step=3, draws="3"))
        return cast(Any, forward_backward(torch.nn.Linear(1, 1), batch, SFT, recipe, world))

    monkeypatch.setattr("finetune.training.step.accumulate_gradients", drop)
    first, second = draw(0, stages=2), draw(1, stages=2)
    assert not torch.equal(first, second)
    seed = hashlib.sha256(b"7/3/0").digest()[:8]  # of the step and the tensor-parallel group
    torch.manual_seed(int.from_bytes(seed, "little") >> 1)
    assert torch.equal(drop(), draw(0, stages=1)) and torch.equal(first, draw(0, stages=1))


@pytest.fixture(scope="module")
def recipes(folder: Path) -> dict[str, Path]:
    """A recipe for each mode, whose steps are four micro-batches of rows of different lengths."""
    data, pairs = make_chat(folder / "chat.jsonl", rows=26), make_pairs(folder / "pairs.jsonl", 12)
    models = {
        "llama": make_model(folder / "llama", num_hidden_layers=4),
        "tied": make_model(folder / "tied", num_hidden_layers=4, tie_word_embeddings=True),
        "gemma": make_model(folder / "gemma", model_type="gemma", num_hidden_layers=4),
        "mixtral": make_model(
            folder / "mixtral",
            model_type="mixtral",
            **SMALL | MIXTURES["mixtral"] | {"num_hidden_layers": 4},
        ),
    }
    mixture = SMALL | MIXTURES["mixtral"] | {"num_local_experts": 4, "num_hidden_layers": 4}
    models["mixtral-4"] = make_model(folder / "mixtral-4", model_type="mixtral", **mixture)
    common = {
        "global_batch_size": 4,
        "max_steps": STEPS,
        "save_steps": SAVED_AT,
        "save_total_limit": None,
    }
    return {
        mode: write_recipe(
            folder / f"{mode}.yaml",
            models[model],
            pairs if "method" in keys else data,
            **common | keys,
        )
        for mode, (model, keys) in MODES.items()
    }


@pytest.fixture(scope="module")
def run(folder: Path, recipes: dict[str, Path]) -> Callable[..., Any]:
    """A run for `train_all`: its name, its recipe's and its layout's name, and keys."""
    configs = {
        "full_shard": write_config(folder, "full_shard"),
        "checkpointing": write_config(folder, "full_shard", checkpointing=True),
        "offload": write_config(folder, "offload"),
        "single": write_config(folder, "single"),
        "tokens": write_config(folder, "full_shard", sizes={"cp_size": 2}),
        "matrices": write_config(folder, "full_shard", sizes={"tp_size": 2}),
        "replicas": write_config(
            folder, "full_shard", sizes={"dp_replicate_size": 2, "dp_shard_size": 1}
        ),
    }

    def make(name: str, mode: str, layout: str, *keys: str) -> tuple[Path, Path, list[str]]:
        return recipes[mode], configs[layout], [f"output_dir={folder / 'runs' / name}", *keys]

    return make


def checkpoint(folder: Path, name: str, step: int = SAVED_AT) -> Path:
    return folder / "runs" / name / "checkpoints" / f"step-{step:08d}"


@pytest.fixture(scope="module")
def alone(folder: Path, run: Callable[..., Any]) -> Callable[[str], Path]:
    """The folder of a mode's run of one process; those of the quick tests are started together, and so are all others."""

    def folder_of(mode: str) -> Path:
        found = folder / "runs" / f"alone-{mode}"
        if not found.exists():
            quick = {ON_TWO[name][0] for name in QUICK}
            modes = [each for each in MODES if (each in quick) == (mode in quick)]
            train_all(folder, [run(f"alone-{each}", each, "single") for each in modes], ranks=1)
        return found

    return folder_of


@pytest.fixture(scope="module")
def more(
    folder: Path, run: Callable[..., Any], alone: Callable[[str], Path]
) -> Callable[[str], Path]:
    """The folder of a run of two ranks that no quick test reads."""
    runs = [
        run(name, mode, layout, *keys)
        for name, (mode, layout, keys) in ON_TWO.items()
        if name not in QUICK
    ]
    alone("packed")
    saved = f"resume_from_checkpoint={checkpoint(folder, 'alone-packed')}"
    runs.append(run("from-alone", "packed", "full_shard", PP, saved))
    train_all(folder, runs, ranks=2, timeout=500)
    return lambda name: folder / "runs" / name


@pytest.fixture(scope="module")
def two(folder: Path, run: Callable[..., Any], slow_too: bool) -> Callable[[str], Path]:
    """The folder of a run of two ranks."""
    runs = [run(name, *ON_TWO[name][:2], *ON_TWO[name][2]) for name in QUICK]
    saved = f"resume_from_checkpoint={checkpoint(folder, 'packed')}"
    runs.append(run("again", "packed", "full_shard", PP, saved, "export_at_end=False"))
    if slow_too:
        runs.append(run("to-shards", "packed", "full_shard", saved, "export_at_end=False"))
    train_all(folder, runs, ranks=2, timeout=500)
    return lambda name: folder / "runs" / name


def compare(ours: Path, theirs: Path, *, after: int = 0) -> None:
    lines, expected = steps_of(ours), [line for line in steps_of(theirs) if line["step"] > after]
    assert [line["step"] for line in lines] == [line["step"] for line in expected]
    for line, other in zip(lines, expected, strict=True):
        assert line["loss"] == pytest.approx(other["loss"], rel=1e-5), (
            f"{ours}, step {line['step']}"
        )
        assert line["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-5), (
            f"{ours}, step {line['step']}"
        )
        if "router_aux_loss" in other:
            assert line["router_aux_loss"] == pytest.approx(other["router_aux_loss"], rel=1e-5)


@pytest.mark.parametrize("name", QUICK)
def test_two_ranks_train_as_one_process(
    name: str, two: Callable[[str], Path], alone: Callable[[str], Path]
) -> None:
    compare(two(name), alone(ON_TWO[name][0]))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in ON_TWO if name not in QUICK])
def test_other_modes_train_as_one_process(
    name: str, more: Callable[[str], Path], alone: Callable[[str], Path]
) -> None:
    compare(more(name), alone(ON_TWO[name][0]))


def test_a_plain_loop_gives_the_same(recipes: dict[str, Path], two: Callable[[str], Path]) -> None:
    assert_losses(two("packed"), reference.train(recipes["packed"]))


@pytest.mark.slow
def test_held_out_losses_and_answers_are_those_of_one_process(
    more: Callable[[str], Path], alone: Callable[[str], Path]
) -> None:
    for file in ("metrics.jsonl", "samples.jsonl"):
        ours, theirs = (
            [json.loads(line) for line in (run / file).read_text().splitlines()]
            for run in (more("asked"), alone("asked"))
        )
        held_out, expected = (
            [line["eval_loss"] for line in of if "eval_loss" in line] for of in (ours, theirs)
        )
        assert held_out == pytest.approx(expected, rel=1e-5)
        assert [line["answer"] for line in ours if "answer" in line] == [
            line["answer"] for line in theirs if "answer" in line
        ]


def test_a_resumed_run_is_bit_equal(two: Callable[[str], Path]) -> None:
    assert_bit_equal(two("packed"), two("again"), STEPS, SAVED_AT)


@pytest.mark.slow
def test_checkpoints_know_no_pipeline(
    two: Callable[[str], Path], alone: Callable[[str], Path]
) -> None:
    compare(two("to-shards"), alone("packed"), after=SAVED_AT)


@pytest.mark.slow
def test_a_run_of_one_process_resumes_in_a_pipeline(
    more: Callable[[str], Path], alone: Callable[[str], Path]
) -> None:
    compare(more("from-alone"), alone("packed"), after=SAVED_AT)


def test_the_export_is_that_of_one_process(
    two: Callable[[str], Path], alone: Callable[[str], Path]
) -> None:
    ours, theirs = (
        load_file(run / "export" / "model.safetensors") for run in (two("packed"), alone("packed"))
    )
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name].float(), tensor.float(), rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_a_stage_that_is_killed_in_a_schedule_ends_the_run_which_resumes_elsewhere(
    folder: Path, run: Callable[..., Any], alone: Callable[[str], Path]
) -> None:
    recipe, config, keys = run(
        "killed", "packed", "full_shard", PP, "timeout_seconds=5", "export_at_end=False"
    )
    script = Path(__file__).with_name("killed_in_pipeline.py")
    calls = (
        4 * (SAVED_AT + 1) + 2
    )  # the second of four micro-batches, in the second step after a save
    began = time.monotonic()
    started = start_ranks(script, [str(calls), str(recipe), str(config), *keys])
    try:
        while started.processes[0].poll() is None and time.monotonic() < began + 120:
            time.sleep(0.1)
        ended = started.processes[0].poll()
    finally:
        started.kill()
    assert ended == 1, started.output(0)
    assert "rank 0: another rank ended; " in started.output(
        0
    ) and "Traceback" not in started.output(0)
    train_all(folder, [run("killed", "packed", "single", "export_at_end=False")], ranks=1)
    assert json.loads((folder / "runs" / "killed" / "finished.json").read_text())
    compare(folder / "runs" / "killed", alone("packed"))


@pytest.fixture(scope="module")
def four(folder: Path, run: Callable[..., Any]) -> Callable[[str], Path]:
    """The folder of a run of four ranks."""
    runs = [run(name, mode, layout, *keys) for name, (mode, layout, keys) in ON_FOUR.items()]
    train_all(folder, runs, ranks=4, timeout=590)
    return lambda name: folder / "runs" / name


@pytest.mark.slow
@pytest.mark.parametrize("name", ON_FOUR)
def test_four_ranks_train_as_one_process(
    name: str, four: Callable[[str], Path], alone: Callable[[str], Path]
) -> None:
    lines = steps_of(four(name))
    for line, other in zip(lines, steps_of(alone(ON_FOUR[name][0])), strict=False):
        assert line["loss"] == pytest.approx(other["loss"], rel=1e-5), (
            f"{name}, step {line['step']}"
        )
        assert line["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-5), (
            f"{name}, step {line['step']}"
        )


@pytest.fixture(scope="module")
def families(folder: Path) -> Callable[[str, int], Path]:
    """The folder of a family's run of one rank, and of two."""
    data, runs = make_chat(folder / "families.jsonl", rows=12), []
    for family, known in FAMILIES.items():
        if known.has_pipeline:
            sizes = SMALL | MIXTURES[family] if family in MIXTURES else {}
            sizes |= {"num_hidden_layers": 3, "vocab_size": 264}
            model = make_model(folder / f"model-{family}", model_type=family, **sizes)
            keys = {"global_batch_size": 3, "max_steps": 2, "learning_rate": 3e-4}
            runs.append((family, write_recipe(folder / f"{family}.yaml", model, data, **keys)))
    for ranks, layout, keys in ((1, "single", []), (2, "full_shard", [PP])):
        config = write_config(folder, layout)
        each = [
            (recipe, config, [f"output_dir={folder / family}-{ranks}", *keys])
            for family, recipe in runs
        ]
        train_all(folder, each, ranks=ranks, timeout=590)
    return lambda family, ranks: folder / f"{family}-{ranks}"


@pytest.mark.slow
@pytest.mark.parametrize(
    "family", [family for family, known in FAMILIES.items() if known.has_pipeline]
)
def test_each_family_trains_as_on_one_process(
    family: str, families: Callable[[str, int], Path]
) -> None:
    compare(families(family, 2), families(family, 1))
