"""TRL trains a command of its own, we train the recipe that convert makes of it, and the numbers of every step are the same.

Held against each other: loss, learning rate and gradient norm of each step, and how far the weights have moved at the end.
Replaced in both: the model (a tiny random one of the family that the command names, in fp32) and the data set (four rows, all of
which each step trains, so that their order does not matter). An adapter and a score head are drawn by TRL; ours begins with these.

Slow; skipped where trl is missing.
"""

import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch import Tensor

from finetune.convert.conversion import convert_file
from tests.convert.published import make_tiny, write_layout
from tests.ranks import ROOT, launch_ranks, run_command

pytestmark = pytest.mark.slow
trl = pytest.importorskip("trl")

STEPS = 4
OF_ALL = (
    f"--logging_steps 1 --max_steps {STEPS} --learning_rate 1e-3 --bf16 False"
    " --save_strategy no --report_to none --output_dir out"
)
HALVES = "--per_device_train_batch_size 2 --gradient_accumulation_steps 2"
AT_ONCE = "--per_device_train_batch_size 4 --gradient_accumulation_steps 1"
# With the same seed: its checkpoint holds what the command begins with.
STAND_STILL = "--max_steps 1 --learning_rate 0"
QWEN, LLAMA = "Qwen/Qwen2-0.5B-Instruct", "meta-llama/Llama-2-7b-hf"
STEP, MOVE = 1e-5, 1e-4  # measured: at most 2.8e-6 of a loss or norm, and 1.7e-5 of the move

QUESTIONS = (
    "What is two and one?",
    "Name a color of the sky at noon, and say why it is so.",
    "Count to five.",
    " Which river is the longest one of Europe?\n",
)
ANSWERS = (
    "It is 3.",
    "Blue: short waves are scattered more by air. " * 4,
    "1 2 3 4 5 and no more than that, since five was asked.",
    "The Volga.\n",
)
WORSE = (
    "No idea.",
    "Green. " * 3,
    "5 4 3 2 1, which is what you wanted, is it not? I think so at least.",
    "The Thames?",
)


@dataclass(frozen=True)
class Case:
    """A command: `trl METHOD --model_name_or_path MODEL KEYS`, and the kind of its rows."""

    method: str
    model: str
    rows: str
    keys: str


CASES = {
    "messages": Case("sft", QWEN, "messages", HALVES),
    "text": Case("sft", LLAMA, "text", HALVES),
    "prompt and completion": Case("sft", QWEN, "completions", HALVES),
    "padding-free": Case(
        "sft",
        LLAMA,
        "messages",
        f"{HALVES} --padding_free True --max_length None --attn_implementation sdpa",
    ),
    # The four rows fill two packed ones.
    "packed": Case(
        "sft",
        QWEN,
        "messages",
        "--packing True --packing_strategy bfd --max_length 320 --attn_implementation sdpa"
        " --per_device_train_batch_size 2 --gradient_accumulation_steps 1",
    ),
    "LoRA": Case(
        "sft",
        LLAMA,
        "messages",
        f"{HALVES} --use_peft True --lora_r 4 --lora_alpha 16 --lora_dropout 0"
        " --lora_target_modules q_proj v_proj",
    ),
    "dpo": Case("dpo", QWEN, "pairs", HALVES),
    "kto": Case("kto", LLAMA, "ratings", AT_ONCE),
    "reward": Case("reward", QWEN, "pairs of messages", HALVES),
}


@pytest.mark.parametrize("name", CASES)
def test_each_step_has_the_numbers_of_trl(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    model = make_tiny(case.model, tmp_path)
    rows = tmp_path / "rows"
    rows.mkdir()
    lines = [json.dumps(_make_row(case.rows, number)) for number in range(len(QUESTIONS))]
    (rows / "train.jsonl").write_text("\n".join(lines) + "\n")

    start = model
    if _draws_weights(case):
        start = _train_theirs(case, model, rows, tmp_path / "start", STAND_STILL)
    last = _train_theirs(case, model, rows, tmp_path / "theirs")
    ours = _train_ours(case, model, start, rows, tmp_path)

    for step, expected in zip(_our_steps(ours), _their_steps(last), strict=True):
        at = f"step {expected['step']}"
        assert step["learning_rate"] == pytest.approx(expected["learning_rate"], rel=1e-9), at
        assert step["loss"] == pytest.approx(expected["loss"], rel=STEP), at
        assert step["grad_norm"] == pytest.approx(expected["grad_norm"], rel=STEP), at
    before, after = _read_weights(start), _read_weights(last)
    reached = _read_weights(ours / ("adapter" if "use_peft" in case.keys else "export"))
    assert set(reached) == set(after)
    moved = torch.cat([(after[key] - before[key]).flatten() for key in after])
    apart = torch.cat([(reached[key] - after[key]).flatten() for key in after])
    assert moved.norm() > 0
    assert apart.norm() <= MOVE * moved.norm()


def _make_row(kind: str, number: int) -> dict[str, Any]:
    """The third row has a system turn and several others."""
    question, answer, worse = QUESTIONS[number], ANSWERS[number], WORSE[number]
    prompt = [{"role": "user", "content": question}]
    if number == 2:
        earlier = (("system", "Be brief."), ("user", "Hello"), ("assistant", "Hi."))
        prompt = [{"role": role, "content": content} for role, content in earlier] + prompt
    chosen = [{"role": "assistant", "content": answer}]
    rejected = [{"role": "assistant", "content": worse}]
    rows: dict[str, dict[str, Any]] = {
        "messages": {"messages": prompt + chosen},
        "text": {"text": f"{question} {answer}"},
        "completions": {"prompt": question, "completion": f" {answer}"},
        "pairs": {"prompt": question, "chosen": f" {answer}", "rejected": f" {worse}"},
        "pairs of messages": {"chosen": prompt + chosen, "rejected": prompt + rejected},
        "ratings": {"prompt": prompt, "completion": chosen, "label": number % 2 == 0},
    }
    return rows[kind]


def _draws_weights(case: Case) -> bool:
    return case.method == "reward" or "use_peft" in case.keys


def _train_theirs(case: Case, model: Path, rows: Path, output: Path, more: str = "") -> Path:
    """The last checkpoint of TRL's run."""
    replaced = f"--model_name_or_path {model} --dataset_name {rows} --output_dir {output}"
    here = "--use_cpu True --save_strategy steps"
    words = shlex.split(f"{case.keys} {OF_ALL} {replaced} {here} {more}")
    finished = run_command(
        ["python", "-m", f"trl.scripts.{case.method}", *words],
        env={
            "PYTHONPATH": f"{ROOT}:{Path(trl.__file__).parents[1]}",
            "HF_DATASETS_CACHE": str(output / "cache"),
        },
        timeout=300,
    )
    assert finished.returncode == 0, finished.stderr[-4000:]
    (checkpoint,) = output.glob("checkpoint-*")
    return checkpoint


def _train_ours(case: Case, model: Path, start: Path, rows: Path, place: Path) -> Path:
    """The folder of our run of the converted command, from the model or adapter in `start`."""
    command = place / "theirs.sh"
    command.write_text(
        f"trl {case.method} --model_name_or_path {case.model} --dataset_name a/b {case.keys} {OF_ALL}\n"
    )
    recipe = convert_file(command).recipe
    recipe |= {
        "model_name_or_path": str(start),
        "datasets": [dict(recipe["datasets"][0], path=str(rows / "train.jsonl"))],
        "accelerate_config": str(write_layout("single", place)),
        "output_dir": str(place / "ours"),
        "export_dtype": "float32",
    }
    if "use_peft" in case.keys:
        recipe |= {"model_name_or_path": str(model), "adapter_name_or_path": str(start)}
    path = place / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe, allow_unicode=True))
    run = ROOT / "finetune" / "run.py"
    launch_ranks(run, ["--recipe", str(path)], ranks=1, timeout=300).check()
    return place / "ours"


def _their_steps(checkpoint: Path) -> list[dict[str, float]]:
    state = json.loads((checkpoint / "trainer_state.json").read_text())
    return [line for line in state["log_history"] if "loss" in line]


def _our_steps(run: Path) -> list[dict[str, float]]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if "loss" in line]


def _read_weights(folder: Path) -> dict[str, Tensor]:
    weights: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        weights |= load_file(file)
    return weights
