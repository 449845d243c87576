"""A run saved under each dimension resumes under each other with the same next loss, and exports the same tensors."""

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from finetune.export.export import export
from tests.conftest import make_chat, make_model
from tests.training.layouts import steps_of, train_all, write_config, write_recipe

pytestmark = pytest.mark.slow
SAVED_AT, STEPS = 2, 4
LEARNING_RATE = 1e-3
# Adam divides a gradient by its own size: where it is rounding alone, so is the sign of the update. A percent of one update.
TOLERANCE = LEARNING_RATE / 100
# Name -> (ranks, Accelerate's sizes of the mesh, the recipe's keys).
DENSE: dict[str, tuple[int, dict[str, int], list[str]]] = {
    "single": (1, {}, []),
    "full_shard": (2, {}, []),
    "hybrid": (4, {"dp_replicate_size": 2, "dp_shard_size": 2}, []),
    "tp": (2, {"tp_size": 2}, []),
    "tp-shard": (4, {"tp_size": 2, "dp_shard_size": 2}, []),
    "sp": (2, {"cp_size": 2}, []),
    "sp-shard": (4, {"cp_size": 2, "dp_shard_size": 2}, []),
    "sp-tp": (4, {"cp_size": 2, "tp_size": 2}, []),
    "tp in files": (2, {"tp_size": 2}, ["optim_offload=nvme"]),
    "tp offload": (2, {"tp_size": 2}, []),
    "sp in files": (2, {"cp_size": 2}, ["optim_offload=nvme"]),
}
MIXTURE: dict[str, tuple[int, dict[str, int], list[str]]] = {
    "single": (1, {}, []),
    "full_shard": (2, {}, []),
    "sp": (2, {"cp_size": 2}, []),
    "ep": (2, {}, ["expert_parallel_size=2"]),
    "ep-shard": (4, {}, ["expert_parallel_size=2"]),
    "ep in files": (2, {}, ["expert_parallel_size=2", "optim_offload=nvme"]),
}
MODELS: dict[str, tuple[dict[str, Any], dict[str, tuple[int, dict[str, int], list[str]]]]] = {
    "dense": ({"hidden_size": 72, "vocab_size": 509}, DENSE),
    "mixture": (
        {
            "model_type": "mixtral",
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "vocab_size": 264,
        },
        MIXTURE,
    ),
}
PAIRS = [
    (model, before, after)
    for model, (_, layouts) in MODELS.items()
    for before, after in product(layouts, layouts)
    if "single" in (before, after) or not {"files", "offload"} & {*before.split(), *after.split()}
]

Runs = Callable[[str, str, str], Path]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """(model, layout of the first two steps, layout of the others) -> the run's folder."""
    folder = tmp_path_factory.mktemp("every-resume")
    data = make_chat(folder / "chat.jsonl", rows=16)
    recipes = {
        name: write_recipe(
            folder / f"{name}.yaml",
            make_model(folder / name, **config),
            data,
            global_batch_size=4,
            learning_rate=LEARNING_RATE,
            max_steps=STEPS,
            save_steps=SAVED_AT,
            save_total_limit=None,
            packing=True,
            max_length=128,
        )
        for name, (config, _) in MODELS.items()
    }

    def run(
        model: str, layout: str, name: str, *overrides: str
    ) -> tuple[int, tuple[Path, Path, list[str]]]:
        ranks, sizes, keys = MODELS[model][1][layout]
        base = (
            "single" if layout == "single" else "offload" if "offload" in layout else "full_shard"
        )
        config = write_config(folder, base, sizes=sizes or None)
        where = [f"offload_dir={folder}/scratch"] if "optim_offload=nvme" in keys else []
        return ranks, (
            recipes[model],
            config,
            [f"output_dir={folder}/{model}/{name}", *keys, *where, *overrides],
        )

    first = [
        run(model, layout, layout) for model, (_, layouts) in MODELS.items() for layout in layouts
    ]
    second = [
        run(
            model,
            after,
            f"{before} to {after}",
            f"resume_from_checkpoint={folder}/{model}/{before}/checkpoints/step-{SAVED_AT:08d}",
        )
        for model, before, after in PAIRS
    ]
    for phase in (first, second):
        for ranks in (1, 2, 4):
            train_all(
                folder, [wanted for of, wanted in phase if of == ranks], ranks=ranks, timeout=1500
            )
    return lambda model, before, after: folder / model / f"{before} to {after}"


@pytest.mark.parametrize(("model", "before", "after"), PAIRS)
def test_the_resumed_run_is_the_run_that_was_never_stopped(
    model: str, before: str, after: str, runs: Runs
) -> None:
    resumed = runs(model, before, after)
    whole = steps_of(resumed.parent / "single")
    lines = steps_of(resumed)
    assert [line["step"] for line in lines] == list(range(SAVED_AT + 1, STEPS + 1))
    for line, expected in zip(lines, whole[SAVED_AT:], strict=True):
        assert line["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert line["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)


@pytest.mark.parametrize(("model", "before", "after"), PAIRS)
def test_the_resumed_run_exports_the_same_tensors(
    model: str, before: str, after: str, runs: Runs, tmp_path: Path
) -> None:
    resumed = runs(model, before, after)
    tensors = []
    for run in (resumed.parent / "single", resumed):
        export(run, tmp_path / run.name, verify=False, log=lambda _: None)
        tensors.append(
            {
                k: v
                for f in sorted((tmp_path / run.name).glob("*.safetensors"))
                for k, v in load_file(f).items()
            }
        )
    whole, found = tensors
    assert found.keys() == whole.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(
            tensor,
            whole[name],
            rtol=0,
            atol=TOLERANCE,
            msg=lambda text, name=name: f"{name}: {text}",
        )
