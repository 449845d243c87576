"""Recipes of the Tinker cookbook, unchanged but for model, data and sizes, against `finetune serve-training`; what they train is
that of a plain loop of torch and PEFT over what they have asked for. Slow, and skipped where the cookbook is not installed.
"""

import json
import math
import sqlite3
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.ranks import free_port
from tests.service.sdk import NAME, make_home, run_script, server

pytestmark = pytest.mark.slow
MAIN = "---\nconfigs:\n- config_name: main\n  data_files: train.jsonl\n---\n"
PLAIN_CHAT = "renderer_name=role_colon"  # of whose words the tiny tokenizer needs no special tokens
START = """
import tinker
client = tinker.ServiceClient().create_lora_training_client(base_model="{name}", rank=32).result()
print(client.save_state("start").result().path)
"""


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def home(shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the model, and small data under the names of those that recipes load."""
    for name in ("tinker_cookbook", "pylatexenc", "sympy", "math_verify"):
        pytest.importorskip(name)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    chat = [
        {
            "messages": [
                {"role": "user", "content": f"What is {n % 90} + 1?"},
                {"role": "assistant", "content": str(n % 90 + 1)},
            ]
        }
        for n in range(256)
    ]
    pairs = [
        {
            "chosen": f"\n\nHuman: What is {n}?\n\nAssistant: It is {n}.",
            "rejected": f"\n\nHuman: What is {n}?\n\nAssistant: No.",
        }
        for n in range(16)
    ]
    choices = {"label": ["A", "B"], "text": ["one", "two"]}
    chemistry = {"domain": "Chemistry", "details": {"level": "L3"}, "type": "mcq-4"}
    science = [
        {"question": f"Which is {n}?", "choices": choices, "answerKey": "A", **chemistry}
        for n in range(20)
    ]
    sayings = [
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": str(n)}]}
        for n in range(32)
    ]
    files = {
        "chat.jsonl": chat,
        "HuggingFaceH4/no_robots/train.jsonl": chat,
        "HuggingFaceH4/no_robots/test.jsonl": chat[:4],
        "Anthropic/hh-rlhf/train.jsonl": pairs,
        "Anthropic/hh-rlhf/test.jsonl": pairs[:4],
        "zwhe99/DeepMath-103K/train.jsonl": [{"question": f"What is {n}?"} for n in range(16)],
        "openai/gsm8k/train.jsonl": [
            {"question": f"Say {n}.", "answer": "#### 3"} for n in range(128)
        ],
        "hicai-zju/SciKnowEval/test.jsonl": science,
        "open-thoughts/OpenThoughts3-1.2M/train.jsonl": sayings,
    }
    for name, rows in files.items():
        write_rows(tmp_path / name, rows)
    (tmp_path / "openai/gsm8k/README.md").write_text(MAIN)
    return make_home(tmp_path, shared, length=2048)


def run_recipe(home: Path, log: str, recipe: str, *keys: str) -> list[dict[str, Any]]:
    """The metrics of a recipe's steps; what it asks for is in `LOG.asked`."""
    script = str(Path(__file__).with_name("recorded_recipe.py"))
    own = (f"model_name={NAME}", f"log_path={home / log}", *keys)
    run_script(home, script, f"{log}.asked", f"tinker_cookbook.recipes.{recipe}", *own)
    return [json.loads(line) for line in (home / log / "metrics.jsonl").read_text().splitlines()]


def last_checkpoint(home: Path, log: str, kind: str) -> str:
    lines = (home / log / "checkpoints.jsonl").read_text().splitlines()
    path: str = json.loads(lines[-1])[kind]
    return path


def state_of(home: Path, run: str, path: str) -> Path:
    """The PEFT folder of a checkpoint."""
    with sqlite3.connect(home / run / "service" / "ledger.sqlite") as ledger:
        query = "SELECT body FROM record WHERE kind = 'checkpoint' AND id = ?"
        (body,) = ledger.execute(query, [path]).fetchone()
    return home / run / "service" / "states" / json.loads(body)["state"]


def train_plainly(
    home: Path, start: Path, asked: Path
) -> tuple[dict[str, torch.Tensor], list[float]]:
    """The adapter after what a recipe has asked for, by transformers, PEFT and torch alone; the norms of its gradients."""
    from peft import PeftModel, get_peft_model_state_dict
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(home / NAME, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, start, is_trainable=True)
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained, weight_decay=0.0)
    norms = []
    for line in map(json.loads, asked.read_text().splitlines()):
        for datum in line.get("data", ()):
            inputs = {name: torch.tensor(each) for name, each in datum["inputs"].items()}
            logits = model(torch.tensor([datum["tokens"]])).logits[0]
            targets = inputs["target_tokens"][:, None]
            scores = logits.log_softmax(-1).gather(1, targets)[:, 0]
            if line["loss"] == "cross_entropy":
                loss = -(scores * inputs["weights"]).sum()
            else:
                assert line["loss"] == "importance_sampling"
                loss = -((scores - inputs["logprobs"]).exp() * inputs["advantages"]).sum()
            loss.backward()
        if "adam" in line:
            adam = line["adam"]
            for group in optimizer.param_groups:
                group |= {"lr": adam["learning_rate"], "eps": adam["eps"]}
                group["betas"] = (adam["beta1"], adam["beta2"])
            norms.append(float(torch.nn.utils.get_total_norm([each.grad for each in trained])))
            optimizer.step()
            optimizer.zero_grad()
    return dict(get_peft_model_state_dict(model)), norms


def join(tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensors[name].flatten() for name in sorted(tensors)])


def check_against_plain_loop(
    home: Path, start: Path, log: str, metrics: Sequence[Mapping[str, Any]]
) -> None:
    expected, norms = train_plainly(home, start, home / f"{log}.asked")
    trained = state_of(home, "run", last_checkpoint(home, log, "state_path"))
    ours = load_file(trained / "adapter_model.safetensors")
    before = join(load_file(start / "adapter_model.safetensors"))
    assert ours.keys() == expected.keys()
    moved = join(expected) - before
    difference = join(ours) - join(expected)
    assert moved.abs().max() > 2e-5
    # not element by element: Adam moves one whose gradient is rounding by the whole learning rate
    assert difference.norm() < 1e-2 * moved.norm()
    reported = [line["grad_norm:mean"] for line in metrics if "grad_norm:mean" in line]
    assert reported == pytest.approx(norms, rel=1e-5)


@pytest.mark.parametrize("ranks", [1, 2])
def test_recipes_train_what_a_plain_loop_trains(
    home: Path, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = free_port()
    monkeypatch.setenv("TINKER_BASE_URL", f"http://127.0.0.1:{port}")
    (home / "start.py").write_text(START.format(name=NAME))
    more = ["--config", "two.yaml", "--num-processes", "2"] if ranks == 2 else []
    rows = ("batch_size=8", "max_length=512", "max_steps=2")
    sampled = ("max_tokens=8", "max_steps=2", "eval_every=0")
    with server(home, port, *more):
        start = state_of(home, "run", run_script(home, "start.py").strip())

        def run(log: str, recipe: str, *keys: str) -> list[dict[str, Any]]:
            """The metrics of a recipe that has trained what a plain loop trains."""
            metrics = run_recipe(home, log, recipe, *keys)
            check_against_plain_loop(home, start, log, metrics)
            return metrics

        run("chat", "chat_sl.train", "dataset=chat.jsonl", *rows)
        run(
            "prompt",
            "prompt_distillation.train",
            "file_path=chat.jsonl",
            "batch_size=16",
            *rows[1:],
        )
        streamed = ("max_prompts=16", "buffer_size=16", "lora_rank=32", "learning_rate=1e-4")
        run("thoughts", "distillation.off_policy_reasoning", PLAIN_CHAT, *streamed, *rows)
        groups = (PLAIN_CHAT, "batch_size=4", "group_size=4", *sampled)
        shorter = run("shorter", "preference.shorter.train", *groups)
        taught = last_checkpoint(home, "chat", "sampler_path")
        teacher = (f"teacher_model={NAME}", f"teacher_checkpoint={taught}")
        pairs = ("groups_per_batch=4", "group_size=2", "lora_rank=32", *sampled)
        distilled = run("kl", "distillation.on_policy_distillation", *teacher, *pairs)
        games = (PLAIN_CHAT, "batch_size=2", "group_size=2", *sampled)
        guesses = run_recipe(home, "guess", "multiplayer_rl.guess_number.train", *games)
        faster = ("batch_size=4", "max_length=512", "max_steps=4", "learning_rate=1e-3")
        preferred = run_recipe(home, "dpo", "preference.dpo.train", *faster)
        basic = run_recipe(home, "basic", "sl_basic", "max_steps=2")
    # every group has better and worse answers, so that there is something to learn
    assert all(line["env/all/by_group/frac_mixed"] == 1.0 for line in shorter[:2])
    assert distilled[0]["teacher_kl"] > distilled[1]["teacher_kl"] > 0
    assert guesses[0]["env/all/turns_per_episode"] == 10.0
    losses = [line["dpo_loss"] for line in preferred if "dpo_loss" in line]
    assert losses[0] == pytest.approx(math.log(2), abs=1e-6) and losses[-1] < losses[0] / 2
    assert basic[1]["train_mean_nll"] < basic[0]["train_mean_nll"]
