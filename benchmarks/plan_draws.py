"""Trains recipes drawn at random, and compares their peaks of memory with those that are planned.

    python benchmarks/plan_draws.py SEED COUNT [KEY=VALUE ...]    # the keys hold in every draw
    python benchmarks/plan_draws.py 7 200 method=kto
    python benchmarks/plan_draws.py 7:31 1                        # draw 31 of seed 7 alone
    python benchmarks/plan_draws.py 7 20 num_processes=2 distributed_type=FSDP
    python benchmarks/plan_draws.py 7 20 num_processes=2 distributed_type=FSDP tp_size=2

A draw is a tiny random model, a recipe, a layout, and full rows. It trains three steps on the CPU
in a process of its own, or in one for each rank, and resumes after the second. A ratio is the
planned bytes over what torch's allocator had on the rank with the most, both without what stays
between steps: below 1 the plan is too low.
"""

import argparse
import json
import multiprocessing
import os
import random
import shutil
import statistics
import sys
import tempfile
import traceback
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import yaml

sys.path[0] = str(Path(__file__).resolve().parents[1])

SECONDS = 150  # that a draw may take
PHASES = {  # phase of the plan -> what a run does in it
    "rollout": ("finetune.rollout.embedded", "EmbeddedEngine.sample"),
    "steady step": ("finetune.training.loop", "train_step"),
    "evaluation": ("finetune.training.evaluate", "measure_held_out"),
    "save": ("finetune.checkpoint.save", "Saver.check_save"),
    "resume": ("finetune.session", "load_checkpoint"),
}
MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
DEEPSEEK = MIXTURE | {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16}
DEEPSEEK |= {"qk_rope_head_dim": 16, "v_head_dim": 32, "n_routed_experts": 4}
FAMILIES: dict[str, dict[str, Any]] = {  # model_type -> keys of its config
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "phi3": {},
    "cohere": {},
    "apertus": {},
    "granite": {},
    "olmo2": {},
    "gpt2": {},
    "mistral": {"sliding_window": 64},
    "gemma2": {"sliding_window": 64},
    "gemma3_text": {"sliding_window": 64},
    "mixtral": MIXTURE,
    "qwen3_moe": MIXTURE,
    "gpt_oss": MIXTURE,
    "deepseek_v3": DEEPSEEK | {"n_group": 1, "topk_group": 1},
}
OPTIMIZERS = (
    "adamw_torch_fused",
    "adamw_torch",
    "adamw_bf16_moments",
    "adamw_8bit",
    "adafactor",
    "muon",
    "sgd",
)
LORA = {"use_peft": True, "lora_r": 8}
WHOLE = {"modules_to_save": ["lm_head", "embed_tokens"]}
REWARDED = {"rewards": ["think_format"], "num_generations": 4}
METHODS: dict[str, list[dict[str, Any]]] = {  # method -> keys of which one mapping is drawn
    "sft": [{}, LORA, LORA | {"load_in_4bit": True}, {"token_loss": "dft"}],
    "dpo": [{}, LORA, LORA | WHOLE],
    "kto": [{}, LORA, LORA | WHOLE],
    "orpo": [{}, LORA],
    "simpo": [{}, LORA],
    "reward": [{}, LORA],
    "classify": [{"labels": ["good", "bad"]}],
    "embed": [{"num_negatives": 1}, {"num_negatives": 2} | LORA],
    "rerank": [{"num_negatives": 1}, {"num_negatives": 2, "loss_type": "listwise"} | LORA],
    "masked_diffusion": [{"mask_token": 250}, {"mask_token": 250} | LORA],
    "early_exit": [{"exit_layers": "::1"}],
    "distill": [{}, {"teacher_load_in_4bit": True}, {"distill_top_k": 8}, LORA],
    "grpo": [REWARDED, REWARDED | {"beta": 0.1} | LORA],
    "ppo": [REWARDED],
    "on_policy_distill": [{"rewards": ["think_format"]}],
}


def draw(
    rng: random.Random, given: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Draws keys of a model's config, of a recipe, and of an Accelerate file; some are `given`."""
    heads = rng.choice((2, 4, 8))
    head_size = rng.choice((16, 32))
    model = {
        "model_type": given.get("model_type") or rng.choice(list(FAMILIES)),
        "hidden_size": rng.choice((64, 128, 256)),
        "intermediate_size": rng.choice((128, 352, 704)),
        "num_hidden_layers": rng.choice((1, 2, 4)),
        "num_attention_heads": heads,
        "num_key_value_heads": rng.choice((1, 2, heads)),
        "head_dim": head_size,
        "vocab_size": rng.choice((320, 2048, 16384)),
        "tie_word_embeddings": rng.random() < 0.3,
    }
    if model["model_type"] in ("phi3", "gpt2"):  # they have no head_dim
        model["hidden_size"] = heads * head_size
    method = given.get("method") or rng.choice(list(METHODS))
    length, rows = rng.choice((32, 128, 256, 512)), rng.choice((1, 1, 2, 4))
    recipe = {
        "method": method,
        "max_length": length,
        "packing": rng.random() < 0.7,
        "per_device_train_batch_size": rows,
        "global_batch_size": rows * rng.choice((1, 2)),
        "optim": rng.choice(OPTIMIZERS),
        "dtype": rng.choice(("float32", "float32", "bfloat16")),
        "attn_implementation": rng.choice(("auto", "auto", "sdpa", "eager")),
    } | rng.choice(METHODS[method])
    if "rewards" in recipe:
        recipe["max_completion_length"] = length // 2
    if "use_peft" in recipe:
        recipe |= rng.choice(({}, {}, {"lora_dropout": 0.1}, {"use_dora": True}))
        recipe["dtype"] = "float32"
    elif rng.random() < 0.15:
        recipe |= {"optim_in_backward": True, "max_grad_norm": None, "global_batch_size": rows}
    layout = {
        "distributed_type": rng.choice(("NO", "NO", "MULTI_CPU", "FSDP")),
        "mixed_precision": rng.choice(("no", "bf16")),
        "fsdp_version": rng.choice((1, 2)),
        "fsdp_activation_checkpointing": rng.random() < 0.4,
        "fsdp_auto_wrap_policy": rng.choice(("TRANSFORMER_BASED_WRAP",) * 4 + ("NO_WRAP",)),
        "num_processes": given.get("num_processes", 1),
        "tp_size": 1,
    }
    if layout["num_processes"] > 1:
        layout["distributed_type"] = rng.choice(("MULTI_CPU", "FSDP"))
        recipe["global_batch_size"] *= layout["num_processes"]
    for key, value in given.items():
        next((part for part in (model, layout) if key in part), recipe)[key] = value
    return model, recipe, layout


def make_row(recipe: dict[str, Any], number: int, share: float) -> dict[str, Any]:
    """A row that fills max_length, of which a `share` is trained on; `number` makes it another."""
    method, length = recipe["method"], recipe["max_length"]
    prompt = f"{number} " + "p" * int((1 - share) * length)
    answer = "a" * 2 * length
    whole = "w" * (length - 20)  # for methods that drop what is longer
    if method in ("dpo", "orpo", "simpo"):
        return {"prompt": prompt, "chosen": answer, "rejected": "r" * 2 * length}
    if method == "reward":
        return {"prompt": f"{number}", "chosen": whole, "rejected": f"{whole[1:]}!"}
    if method == "kto":
        return {"prompt": prompt, "completion": answer, "label": number % 2 == 0}
    if method == "classify":
        return {"text": f"{number} {whole}", "label": ("good", "bad")[number % 2]}
    if method in ("embed", "rerank"):
        text = whole[: (length - 24) // 2] if method == "rerank" else whole
        others = [f"{number} {other} {text[6:]}" for other in range(recipe["num_negatives"])]
        return {"query": f"{number} {text[6:]}", "positive": f"{number}{text}", "negatives": others}
    if "rewards" in recipe:
        return {"prompt": f"{number} " + "p" * (length // 2 - 20)}
    return {"prompt": prompt, "completion": answer}


def write(rng: random.Random, given: dict[str, Any], folder: Path) -> tuple[list[str], str]:
    """Draws a run and writes its files. Returns its overrides, and all that was drawn in a line."""
    from tests.conftest import make_model

    parts = model, recipe, layout = draw(rng, given)
    config = FAMILIES[model["model_type"]] | model
    make_model(folder / "model", **config)
    if "distill" in recipe["method"]:
        teacher = config | {"num_hidden_layers": 2 * config["num_hidden_layers"]}
        recipe["teacher_model_name_or_path"] = str(make_model(folder / "teacher", **teacher))
    share = rng.choice((1.0, 1.0, 0.5, 0.1))
    rows = [json.dumps(make_row(recipe, number, share)) for number in range(48)]
    (folder / "rows.jsonl").write_text("\n".join(rows))
    fsdp = {key: value for key, value in layout.items() if key.startswith("fsdp_")}
    accelerate = layout | {"use_cpu": True, "fsdp_config": fsdp}
    if (tp_size := accelerate.pop("tp_size")) > 1:
        accelerate["parallelism_config"] = {"parallelism_config_tp_size": tp_size}
    accelerate = {key: value for key, value in accelerate.items() if key not in fsdp}
    (folder / "layout.yaml").write_text(yaml.safe_dump(accelerate))
    paths = {
        "model_name_or_path": f"{folder}/model",
        "datasets": [{"path": f"{folder}/rows.jsonl"}],
        "dataset_cache_dir": f"{folder}/cache",
        "output_dir": f"{folder}/run",
        "accelerate_config": f"{folder}/layout.yaml",
    }
    run = {"eval_split_size": 8, "max_steps": 3, "save_steps": 1, "export_at_end": False}
    overrides = [f"{key}={json.dumps(value)}" for key, value in (recipe | paths | run).items()]
    drawn = (f"{key}={value}".replace(" ", "") for part in parts for key, value in part.items())
    return overrides, " ".join(drawn)


def measured(function: Callable[..., Any], phase: str, seen: dict[str, Any]) -> Callable[..., Any]:
    """`function`, whose peak is noted: that of the last call, after all that is made once."""
    from tests.plan.traced import allocated_peak

    def run(*arguments: Any, **keys: Any) -> Any:
        if seen.get("inside"):  # an evaluation that samples
            return function(*arguments, **keys)
        returned = []
        seen["inside"] = True
        seen[phase] = allocated_peak(lambda: returned.append(function(*arguments, **keys)))
        seen["inside"] = False
        return returned[0]

    return run


def train(overrides: list[str], seen: dict[str, Any]) -> None:
    """Plans a run, trains it and resumes it; notes the measured and planned peaks of its phases."""
    from finetune.checkpoint.folders import step_folder
    from finetune.config.accelerate_file import read_sharding
    from finetune.config.reader import read_recipe
    from finetune.plan.plan import make_plan
    from finetune.run import fine_tune

    recipe = read_recipe(None, overrides)
    sharding = read_sharding(None, recipe.run.accelerate_config, os.environ)
    planned = make_plan(recipe, sharding, int(os.environ.get("WORLD_SIZE", "1")), on_cpu=True)
    rest = planned.phases[-1].peak  # of the export
    seen["plan"] = {}
    for phase in planned.phases:
        # the trial save and the resume make the optimizer's state, which is at rest afterwards
        new = rest.optimizer if phase.name in ("save", "resume") else 0
        seen["plan"][phase.name] = (phase.peak.allocated - rest.allocated + new, phase.peak.name)
    for name, (module, path) in PHASES.items():
        *owners, function = path.split(".")
        owner: Any = import_module(module)
        for each in owners:
            owner = getattr(owner, each)
        setattr(owner, function, measured(getattr(owner, function), name, seen))
    launched = dict(os.environ)
    fine_tune(recipe, sharding)
    os.environ.clear()
    os.environ |= launched
    if os.environ.get("RANK", "0") == "0":  # the other ranks wait for it
        (recipe.folder / "finished.json").unlink()
        shutil.rmtree(step_folder(recipe.folder, 3))
    if "MASTER_PORT" in os.environ:  # the store of the first run may still be there
        os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)
    before = dict(seen)
    fine_tune(recipe, sharding)
    seen |= before  # `resume` is new; the step that follows it is a first one


def train_on_ranks(overrides: list[str], seen: dict[str, Any], ranks: int, folder: Path) -> None:
    """Trains on several ranks as `train` does on one; notes the largest of their peaks."""
    from finetune.errors import EXIT_USER_ERROR, UserError
    from tests.forked_ranks import fork_ranks, wait

    def train_rank(rank: int) -> None:
        of_rank: dict[str, Any] = {}
        train(overrides, of_rank)
        (folder / f"rank{rank}.json").write_text(json.dumps(of_rank))

    codes = wait(fork_ranks(train_rank, ranks, folder / "log"), SECONDS)
    if any(codes):
        log = (folder / "log").read_text()
        raise UserError(log) if EXIT_USER_ERROR in codes else RuntimeError(f"{codes}: {log}")
    for rank in range(ranks):
        for phase, value in json.loads((folder / f"rank{rank}.json").read_text()).items():
            seen[phase] = max(seen[phase], value) if phase in PHASES and phase in seen else value


def run_draw(seed: str, given: dict[str, Any], out: Connection) -> None:
    """Draws until no rule refuses the run, and sends (what was drawn, what was seen, an error)."""
    from finetune.errors import UserError

    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    rng = random.Random(seed)
    for _ in range(50):
        seen: dict[str, Any] = {}
        drawn = error = ""
        # no TemporaryDirectory: each forked rank would remove it when it ends
        folder = Path(tempfile.mkdtemp())
        try:
            overrides, drawn = write(rng, given, folder)
            ranks = given.get("num_processes", 1)
            if ranks == 1:
                train(overrides, seen)
            else:
                train_on_ranks(overrides, seen, ranks, folder)
            break
        except UserError as refused:
            error = f"refused: {refused}"
        except BaseException:
            error = traceback.format_exc()
            break
        finally:
            shutil.rmtree(folder)
    out.send((drawn, seen, error))


def read_arguments(description: str) -> tuple[str, range, dict[str, Any]]:
    """Reads SEED[:DRAW] COUNT [KEY=VALUE ...] from the command line.

    Returns the seed, the numbers of its draws, and the keys that hold in every draw.
    """
    parser = argparse.ArgumentParser(description=description.partition("\n\n")[0])
    parser.add_argument("seed", help="SEED, or SEED:DRAW for one of its draws")
    parser.add_argument("count", type=int)
    parser.add_argument("given", nargs="*", metavar="KEY=VALUE")
    options = parser.parse_args()
    pairs = (each.split("=", 1) for each in options.given)
    seed, _, first = options.seed.partition(":")
    numbers = range(int(first or 0), int(first or 0) + options.count)
    return seed, numbers, {key: yaml.safe_load(value) for key, value in pairs}


def main() -> None:
    seed, numbers, given = read_arguments(__doc__)
    for module, _ in PHASES.values():  # once for all draws
        import_module(module)
    forks = multiprocessing.get_context("fork")
    rows: list[tuple[float, str]] = []
    ratios: dict[str, list[float]] = {}
    for number in numbers:
        receiver, sender = forks.Pipe(duplex=False)
        child = forks.Process(target=run_draw, args=(f"{seed}:{number}", given, sender))
        child.start()
        sender.close()
        drawn, seen, error = "", {}, f"no answer within {SECONDS} seconds"
        if receiver.poll(SECONDS * given.get("num_processes", 1)):
            with suppress(EOFError):
                drawn, seen, error = receiver.recv()
        child.kill()
        child.join()
        if error:
            print(f"{seed}:{number} {drawn}\n    {error[-400:]}", flush=True)
            continue
        for phase in PHASES:
            planned, point = seen["plan"].get(phase, (0, ""))
            measured_bytes = seen.get(phase, 0)
            if planned and measured_bytes > 0:
                ratio = planned / measured_bytes
                ratios.setdefault(phase, []).append(ratio)
                row = f"{ratio:6.2f} {phase:11} {measured_bytes:>11,} {seed}:{number} {point}"
                rows.append((ratio, f"{row}: {drawn}"))
    print("\n".join(row for _, row in sorted(rows)))
    for phase, found in ratios.items():
        low = sum(ratio < 1 for ratio in found) / len(found)
        print(
            f"{phase}: {len(found)} runs, {low:.0%} below 1, lowest {min(found):.2f}, median "
            f"{statistics.median(found):.2f}, p90 {sorted(found)[len(found) * 9 // 10]:.2f}"
        )


if __name__ == "__main__":
    main()
