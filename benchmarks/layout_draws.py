"""Trains recipes drawn at random on one process and on two ranks, and resumes the latter.

    python benchmarks/layout_draws.py SEED COUNT [KEY=VALUE ...]    # the keys hold in every draw
    python benchmarks/layout_draws.py 2 60 method=dpo
    python benchmarks/layout_draws.py 2:31 1                        # draw 31 of seed 2 alone

A draw is a tiny random model, a recipe in float32 without dropout, rows of many lengths, and a
layout of two ranks: DDP, FSDP1 or FSDP2, some with tensor, context, expert or pipeline
parallelism. What both runs log must agree up to rounding. The run on two ranks is then resumed
from its step 2, and must log the same numbers to the last digit. Ends with 1 if any do not.
"""

import json
import math
import multiprocessing
import os
import random
import re
import shutil
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import yaml

sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks.plan_draws import FAMILIES, draw, make_row, read_arguments  # noqa: E402
from finetune.errors import EXIT_USER_ERROR, UserError  # noqa: E402

SECONDS = 170  # that a run may take
STEPS = 4
RESUMED_FROM = 2
ROUNDING = 2e-4  # relative; sums over ranks have another order
# Metrics of speed; attempts; tokens, since each rank that has a group's completions counts their
# prompt; and ranks of scores, which rounding exchanges where scores are alike.
NOT_COMPARED = re.compile("second|memory|mfu|^start$|^tokens$|mrr@|ndcg@|recall@")
WITHOUT_DROPOUT = dict.fromkeys(("attention_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop"), 0)
# What several ranks share -> where it is set: keys of the recipe, or dimensions of the mesh.
SHARED: tuple[tuple[str, str], ...] = (
    ("recipe", "expert_parallel_size"),
    ("recipe", "pipeline_parallel_size"),
    ("mesh", "tp_size"),
    ("mesh", "cp_size"),
    ("mesh", "dp_replicate_size"),
)
# keys of which a draw has some, if its method has them
CHOICES: dict[str, list[Any]] = {
    "max_grad_norm": [0.1, None],
    "weight_decay": [0.1],
    "warmup_steps": [1],
    "lr_scheduler_type": ["linear", "constant"],
    "adam_beta2": [0.9],
    "learning_rate": [1e-3],
    "seed": [3],
}
CHOICES_OF_METHOD: dict[str, dict[str, list[Any]]] = {
    "sft": {"label_smoothing": [0.1], "overlength": ["truncate", "drop"]},
    "dpo": {"loss_type": ["sigmoid", "hinge", "ipo", "apo_zero"], "rpo_alpha": [0.5]},
    "kto": {"beta": [0.3], "desirable_weight": [1.5]},
    "orpo": {"beta": [0.3]},
    "simpo": {"simpo_gamma": [1.0]},
    "distill": {"distill_alpha": [0.5], "distill_beta": [0.0, 0.5, 1.0]},
    "grpo": {"scale_rewards": ["none", "batch", "group"], "loss_type": ["dapo", "grpo", "bnpo"]},
}
Metrics = dict[int, dict[str, float]]  # step -> name -> value


def draw_layout(rng: random.Random, layout: dict[str, Any], recipe: dict[str, Any]) -> None:
    """Adds to `layout`, the content of an Accelerate file, and to `recipe` what two ranks share."""
    fsdp = layout["fsdp_config"]
    if rng.random() < 0.5:
        place, key = rng.choice(SHARED)
        layout["distributed_type"] = "FSDP"
        if place == "mesh":
            layout["parallelism_config"] = {f"parallelism_config_{key}": 2}
            fsdp["fsdp_version"] = 2
        else:
            recipe[key] = 2
    if fsdp["fsdp_version"] == 1:
        strategies = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")
        fsdp["fsdp_sharding_strategy"] = rng.choice(strategies)
    else:
        fsdp["fsdp_reshard_after_forward"] = rng.random() < 0.5


def write(rng: random.Random, given: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Draws a run, and writes its model, its rows, and an Accelerate file for each number of ranks.

    Returns the keys of the recipe.
    """
    from tests.conftest import make_model

    model, recipe, drawn_layout = draw(rng, given | {"num_processes": 2})
    recipe |= {"dtype": "float32", "global_batch_size": rng.choice((2, 4, 4, 8))}
    recipe.pop("lora_dropout", None)
    choices = CHOICES | CHOICES_OF_METHOD.get(recipe["method"], {})
    for key in rng.sample(sorted(choices), 4):
        recipe[key] = rng.choice(choices[key])
    config = FAMILIES[model["model_type"]] | model | WITHOUT_DROPOUT
    make_model(folder / "model", **config)
    if "distill" in recipe["method"]:
        teacher = config | {"num_hidden_layers": 2 * config["num_hidden_layers"]}
        recipe["teacher_model_name_or_path"] = str(make_model(folder / "teacher", **teacher))
    rows = []
    for number in range(48):
        length = max(28, round(recipe["max_length"] * rng.uniform(0.2, 1)))
        row = make_row(recipe | {"max_length": length}, number, rng.choice((1.0, 0.5, 0.1)))
        rows.append(json.dumps(row))
    (folder / "rows.jsonl").write_text("\n".join(rows))
    layout = {
        "distributed_type": drawn_layout["distributed_type"],
        "fsdp_config": {k: v for k, v in drawn_layout.items() if k.startswith("fsdp_")},
    }
    draw_layout(rng, layout, recipe)
    both = {"mixed_precision": "no", "use_cpu": True}
    (folder / "layout-2.yaml").write_text(yaml.safe_dump(layout | both))
    (folder / "layout-1.yaml").write_text(yaml.safe_dump({"distributed_type": "NO"} | both))
    return recipe | {
        "model_name_or_path": f"{folder}/model",
        "datasets": [{"path": f"{folder}/rows.jsonl"}],
        "dataset_cache_dir": f"{folder}/cache",
        "eval_split_size": 8,
        "eval_steps": 2,
        "max_steps": STEPS,
        "save_steps": RESUMED_FROM,
        "logging_steps": 1,
        "export_at_end": False,
    }


def train(keys: dict[str, Any], folder: Path, name: str, ranks: int) -> Metrics:
    """Trains, or resumes, the run of this name, and reads what it has logged.

    Raises `UserError` if a rule refuses the recipe, and `RuntimeError` if the run fails.
    """
    from finetune.config.accelerate_file import read_sharding
    from finetune.config.reader import read_recipe
    from finetune.run import fine_tune
    from tests.forked_ranks import fork_ranks, wait

    layout = f"{folder}/layout-{ranks}.yaml"
    keys = keys | {"output_dir": f"{folder}/{name}", "accelerate_config": layout}
    overrides = [f"{key}={json.dumps(value)}" for key, value in keys.items()]

    def train_rank(rank: int) -> None:
        recipe = read_recipe(None, overrides)
        fine_tune(recipe, read_sharding(None, layout, os.environ))

    log = folder / f"{name}.log"
    codes = wait(fork_ranks(train_rank, ranks, log), SECONDS)
    if EXIT_USER_ERROR in codes:
        raise UserError(log.read_text())
    if any(codes):
        raise RuntimeError(f"{name}: {codes}: {log.read_text()}")
    return read_metrics(folder / name / "metrics.jsonl")


def read_metrics(path: Path) -> Metrics:
    """Reads the numbers that are compared."""
    metrics: Metrics = {}
    for line in path.read_text().splitlines():
        logged = json.loads(line)
        metrics.setdefault(logged["step"], {}).update(
            (name, value)
            for name, value in logged.items()
            if isinstance(value, int | float) and not NOT_COMPARED.search(name)
        )
    return metrics


def list_differences(first: Metrics, second: Metrics, tolerance: float) -> list[str]:
    """Lists the values that one run alone has, or that differ by more than a share of them."""
    differences = []
    for step in sorted(first.keys() | second.keys()):
        ones, others = first.get(step, {}), second.get(step, {})
        for name in sorted(ones.keys() | others.keys()):
            one, other = ones.get(name, math.nan), others.get(name, math.nan)
            if not abs(one - other) <= tolerance * (max(abs(one), abs(other)) + 0.1):
                differences.append(f"step {step} {name}: {one} and {other}")
    return differences


def compare(keys: dict[str, Any], folder: Path) -> list[str]:
    """Trains on two ranks, on one process, and again on two ranks from a checkpoint.

    Returns what differs.
    """
    from finetune.checkpoint.folders import step_folder

    on_two = train(keys, folder, "two", 2)
    on_one = train(keys, folder, "one", 1)
    resumed = folder / "resumed"
    shutil.copytree(folder / "two", resumed)
    shutil.rmtree(step_folder(resumed, STEPS))
    (resumed / "finished.json").unlink()
    after_resume = train(keys, folder, "resumed", 2)
    return [
        *(f"1 and 2 ranks: {line}" for line in list_differences(on_one, on_two, ROUNDING)),
        *(f"resumed: {line}" for line in list_differences(on_two, after_resume, 0.0)),
    ]


def run_draw(seed: str, given: dict[str, Any]) -> None:
    """Draws until no rule refuses the run, compares its layouts, and exits with 1 if they differ.

    A run that fails or differs keeps its folder.
    """
    rng = random.Random(seed)
    for _ in range(50):
        # no TemporaryDirectory: each forked rank would remove it when it ends
        folder = Path(tempfile.mkdtemp())
        try:
            keys = write(rng, given, folder)
            differences = compare(keys, folder)
        except UserError:
            shutil.rmtree(folder)
            continue
        except Exception:
            print(f"{seed} {folder} failed: {traceback.format_exc()[-1500:]}", flush=True)
            sys.exit(1)
        if differences:
            print(f"{seed} {folder} {keys}", *differences[:6], sep="\n    ", flush=True)
            sys.exit(1)
        shutil.rmtree(folder)
        print(f"{seed} equal: {keys['method']} {keys['optim']}", flush=True)
        return
    print(f"{seed} refused by the rules in every draw", flush=True)


def main() -> int:
    from tests.forked_ranks import import_all

    seed, numbers, given = read_arguments(__doc__)
    import_all()
    different = 0
    for number in numbers:
        child = multiprocessing.get_context("fork").Process(
            target=run_draw, args=(f"{seed}:{number}", given)
        )
        child.start()
        child.join()
        different += child.exitcode != 0
    print(f"{len(numbers)} draws, {different} different")
    return int(different > 0)


if __name__ == "__main__":
    sys.exit(main())
