"""Recipes, Accelerate files for every layout, and what a run under them left, for tests."""

import json
import shutil
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from itertools import cycle, product
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from finetune.checkpoint.folders import step_folder
from finetune.files.tensors import read, read_folder
from tests.ranks import launch_ranks

FSDP2: dict[str, dict[str, Any]] = {
    "full_shard": {"fsdp_reshard_after_forward": True},
    "shard_grad_op": {"fsdp_reshard_after_forward": False},
    "offload": {"fsdp_offload_params": True},
    "by_size": {"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP", "fsdp_min_num_params": 20000},
    "no_wrap": {"fsdp_auto_wrap_policy": "NO_WRAP"},
}
FSDP1 = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")
LAYOUTS = (*FSDP2, *FSDP1, "ddp")
RESUMED_FROM = 2  # the step that runs of `train_kinds` resume from


def write_recipe(path: Path, model: Path, data: Path, **keys: Any) -> Path:
    """A recipe of short rows, one for each example, whose every step is logged; `keys` add to it, or change it."""
    common = {
        "model_name_or_path": str(model),
        "datasets": [{"path": str(data)}],
        "dataset_cache_dir": str(path.parent / "cache"),
        "max_length": 64,
        "packing": False,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "export_at_end": False,
    }
    path.write_text(yaml.safe_dump(common | keys))
    return path


# Answers in capitals once a question follows: what is trained of a turn depends on what stands after it.
CAPITALS = (
    "{%- for m in messages -%}{{- '<|' + m['role'] + '|>' + (m['content'] | upper if m['role'] == 'assistant' and not loop.last "
    "else m['content']) + eos_token -}}{%- endfor -%}{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)


def write_split_recipes(folder: Path, model: Path, **more: Any) -> tuple[Path, Path]:
    """(the recipe of rows of two packed turns, which are split; that of the same with a row for each trained turn)."""
    turns = [
        [
            {"role": "user", "content": f"What is {i} plus {j}?"},
            {"role": "assistant", "content": f"It is {i + j}."},
        ]
        for i in range(12)
        for j in (1, 2)
    ]
    whole = [[*turns[i], *turns[i + 1]] for i in range(0, len(turns), 2)]
    apart = [
        turns
        for row in whole
        for turns in (row[:2], [row[0], {**row[1], "train": False}, *row[2:]])
    ]
    keys = {
        "chat_template": CAPITALS,
        "packing": True,
        "max_length": 128,
        "global_batch_size": 2,
        "max_steps": 3,
    } | more
    recipes = []
    for asked, rows in (("split", whole), ("whole", apart)):
        data = folder / f"turns-{asked}.jsonl"
        data.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
        recipes.append(
            write_recipe(folder / f"turns-{asked}.yaml", model, data, turns=asked, **keys)
        )
    return recipes[0], recipes[1]


def write_config(
    folder: Path,
    layout: str,
    precision: str = "no",
    *,
    checkpointing: bool = False,
    mesh: tuple[int, int] | None = None,
    sizes: Mapping[str, int] | None = None,
) -> Path:
    """The Accelerate file of `layout` (a name in LAYOUTS, or single), as a user would write it; `sizes`: of its mesh's dimensions,
    such as tp_size."""
    fsdp: dict[str, Any] = {"fsdp_activation_checkpointing": checkpointing}
    if layout in FSDP2:
        fsdp |= {"fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"} | FSDP2[
            layout
        ]
    elif layout in FSDP1:
        fsdp |= {
            "fsdp_version": 1,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_sharding_strategy": layout,
        }
    content: dict[str, Any] = {
        "distributed_type": {"ddp": "MULTI_GPU", "single": "NO"}.get(layout, "FSDP"),
        "mixed_precision": precision,
        "fsdp_config": fsdp,
    }
    if mesh is not None:
        content["parallelism_config"] = {
            "parallelism_config_dp_replicate_size": mesh[0],
            "parallelism_config_dp_shard_size": mesh[1],
        }
    if sizes is not None:
        content["parallelism_config"] = {
            f"parallelism_config_{key}": size for key, size in sizes.items()
        }
    named = "".join(f"-{key}-{size}" for key, size in (sizes or {}).items())
    path = folder / f"{layout}-{precision}{'-checkpointing' if checkpointing else ''}{named}.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def train_all(
    folder: Path, runs: list[tuple[Path, Path, list[str]]], *, ranks: int, timeout: float = 300.0
) -> str:
    """Runs every (recipe, config, overrides) in one set of `ranks` ranks; returns what the first of them printed."""
    listing = folder / f"runs-{ranks}.json"
    listing.write_text(
        json.dumps([[str(recipe), str(config), overrides] for recipe, config, overrides in runs])
    )
    script = Path(__file__).with_name("runs_on_ranks.py")
    return launch_ranks(script, [str(listing)], ranks=ranks, timeout=timeout).check().outputs[0]


def choose_quick(
    names: Sequence[str], kinds: Sequence[str], always: Container[str]
) -> set[tuple[str, str]]:
    """The pairs (name of a run, kind) that the quick tests train: each kind under the names in `always`, and under each of the
    others one kind, in turn."""
    turns = cycle(kinds)
    return {(name, kind) for name in names for kind in (kinds if name in always else [next(turns)])}


def cross(
    names: Iterable[str], kinds: Iterable[str], quick: Container[tuple[str, str]]
) -> pytest.MarkDecorator:
    """Parametrizes a test by `name` and `kind`; pairs that are not `quick` are slow."""
    return pytest.mark.parametrize(
        ("name", "kind"),
        [
            pytest.param(*pair, marks=[] if pair in quick else [pytest.mark.slow])
            for pair in product(names, kinds)
        ],
    )


def cross_resumed(
    resumed: Mapping[str, Sequence[str]], kinds: Iterable[str], quick: Container[tuple[str, str]]
) -> pytest.MarkDecorator:
    """Parametrizes a test by `name`, `kind` and the `layout` that `train_kinds` resumes the run in. As in `cross`, pairs that are not
    `quick` are slow."""
    return pytest.mark.parametrize(
        ("name", "kind", "layout"),
        [
            pytest.param(*pair, layout, marks=[] if pair in quick else [pytest.mark.slow])
            for pair in product(resumed, kinds)
            for layout in resumed[pair[0]]
        ],
    )


def train_families(
    folder: Path,
    recipes: Mapping[str, Path],
    wanted: Sequence[tuple[str, str, int]],
    verified: Container[tuple[str, str, int]],
) -> Callable[[str, str, int], Path]:
    """Trains each of `wanted` (family, layout, ranks), those in `verified` to an export; each set of ranks is started once. Under
    `divided`, the ranks divide the experts of a mixture.

    Returns where the run of a (family, layout, ranks) is.
    """

    def run_folder(family: str, layout: str, ranks: int) -> Path:
        return folder / family / f"{layout}-{ranks}"

    for ranks in sorted({each[2] for each in wanted}):
        runs = []
        for each in wanted:
            if each[2] == ranks:
                is_divided = each[1] == "divided"
                layout = "shard_grad_op" if is_divided else each[1]
                config = write_config(folder, layout, checkpointing=layout == "full_shard")
                overrides = [f"output_dir={run_folder(*each)}", f"export_at_end={each in verified}"]
                overrides += [f"expert_parallel_size={ranks}"] if is_divided else []
                runs.append((recipes[each[0]], config, overrides))
        train_all(folder, runs, ranks=ranks, timeout=400)
    return run_folder


def train_kinds(
    folder: Path,
    runs: Mapping[str, tuple[int, str, dict[str, int], list[str]]],
    recipes: Mapping[str, Path],
    wanted: Iterable[tuple[str, str]],
    resumed: Mapping[str, tuple[str, ...]],
) -> Callable[[str, str], Path]:
    """Trains each of `wanted` (name of a run, kind of recipe); each number of ranks is started once.

    Args:
        runs: By name: ranks, layout, its sizes, keys of the recipe. Activations are checkpointed in one named checkpointed.
        resumed: By name: the layouts that the run resumes in from RESUMED_FROM, in `folder / layout / name / kind`.

    Returns:
        Where the run of a (name, kind) is.
    """
    runs_of: dict[int, list[tuple[Path, Path, list[str]]]] = {}  # by number of ranks
    for name, kind in sorted(wanted):
        ranks, layout, sizes, keys = runs[name]
        run = folder / name / kind
        config = write_config(
            folder, layout, sizes=sizes or None, checkpointing=name == "checkpointed"
        )
        started = runs_of.setdefault(ranks, [])
        started.append((recipes[kind], config, [*keys, f"output_dir={run}"]))
        start = f"resume_from_checkpoint={step_folder(run, RESUMED_FROM)}"
        for other in resumed.get(name, ()):
            again = [start, f"output_dir={folder / other / name / kind}", "export_at_end=false"]
            started.append((recipes[kind], write_config(folder, other), [*keys, *again]))
    for ranks, started in runs_of.items():
        train_all(folder, started, ranks=ranks)
    return lambda name, kind: folder / name / kind


def assert_bit_equal(run: Path, other: Path, step: int, from_step: int = 0) -> None:
    """That both left the same checkpoint of `step`, and the same losses and gradient norms after `from_step`."""
    for part in ("model", "optimizer"):
        ours, theirs = (read_folder(step_folder(each, step) / part) for each in (run, other))
        assert ours.keys() == theirs.keys()
        unequal = [name for name in ours if not torch.equal(read(ours[name]), read(theirs[name]))]
        assert not unequal, f"{part}: {len(unequal)} of {len(ours)} tensors, {unequal[0]}"
        assert [tensor.dtype for tensor in ours.values()] == [
            tensor.dtype for tensor in theirs.values()
        ]
    lines = [
        {line["step"]: (line["loss"], line["grad_norm"]) for line in steps_of(each)}
        for each in (run, other)
    ]
    for after in range(from_step + 1, step + 1):
        assert lines[0][after] == lines[1][after], after


def assert_resumed(run: Path, resumed: Path, layout: str, steps: int) -> None:
    """That a run which `train_kinds` resumed in `layout` ends as `run` did: under full_shard, as it was saved, bit for bit."""
    if layout == "full_shard":
        assert_bit_equal(run, resumed, steps, RESUMED_FROM)
    expected = [line for line in steps_of(run) if line["step"] > RESUMED_FROM]
    for line, other in zip(steps_of(resumed), expected, strict=True):
        for name in ("loss", "grad_norm"):
            assert line[name] == pytest.approx(other[name], rel=1e-5, abs=0.0), line["step"]


def assert_losses(
    run: Path,
    expected: Sequence[tuple[float, float]],
    rel: float = 1e-5,
    norms: float | None = None,
) -> list[dict[str, Any]]:
    """That `run` logged the (loss, gradient norm) of every step of a plain loop, up to `rel`, `norms` for the norms. Returns its
    lines."""
    lines = steps_of(run)
    assert [line["step"] for line in lines] == list(range(1, len(expected) + 1)), run
    for line, (loss, norm) in zip(lines, expected, strict=True):
        assert line["loss"] == pytest.approx(loss, rel=rel), f"{run}, step {line['step']}"
        assert line["grad_norm"] == pytest.approx(norm, rel=norms or rel), (
            f"{run}, step {line['step']}"
        )
    return lines


def assert_last_step_again_is_bit_equal(
    whole: Path, recipe: Path, folder: Path, steps: int
) -> None:
    """That a copy of the run `whole` of one process, which lost its last checkpoint, resumes to the same bits."""
    again = folder / "again"
    shutil.copytree(whole, again)
    shutil.rmtree(again / "checkpoints" / f"step-{steps:08d}")
    (again / "finished.json").unlink()
    keys = [f"output_dir={again}", "export_at_end=False"]
    printed = train_all(folder, [(recipe, write_config(folder, "single"), keys)], ranks=1)
    assert f"resumed at step {steps - 1}" in printed
    assert_bit_equal(whole, again, steps)


def steps_of(run: Path) -> list[dict[str, Any]]:
    """The training lines of a run's metrics.jsonl."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "loss" in line]
