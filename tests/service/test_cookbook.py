"""Recipes of the Tinker cookbook, unchanged but for model, data and sizes, against `finetune serve-training`; what they train is
that of a plain loop of torch and PEFT over what they have asked for. Slow, and skipped where the cookbook is not installed.
"""

import asyncio
import json
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.ranks import free_port
from tests.service.sdk import NAME, make_home, run_script, server, state_of

pytestmark = pytest.mark.slow
MAIN = "---\nconfigs:\n- config_name: main\n  data_files: train.jsonl\n---\n"
WIKI = "Salesforce/wikitext/train.jsonl"
PLAIN_CHAT = "renderer_name=role_colon"  # of whose words the tiny tokenizer needs no special tokens
START = """
import tinker
client = tinker.ServiceClient().create_lora_training_client(base_model="{name}", rank=32).result()
print(client.save_state("start").result().path)
"""


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def say(asked: str, answer: str) -> dict[str, Any]:
    messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
    return {"messages": messages}


@pytest.fixture
def home(shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the model, and small data under the names of those that recipes load."""
    for name in ("tinker_cookbook", "pylatexenc", "sympy", "math_verify"):
        pytest.importorskip(name)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    chat = [say(f"What is {n % 90} + 1?", str(n % 90 + 1)) for n in range(256)]
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
        WIKI: [{"text": f"Tom ran {WORDS[n % 2]} the dog, and Lily sat."} for n in range(200)],
    }
    for name, rows in files.items():
        write_rows(tmp_path / name, rows)
    (tmp_path / "openai/gsm8k/README.md").write_text(MAIN)
    named = MAIN.replace("main", "wikitext-103-raw-v1")
    (tmp_path / WIKI).with_name("README.md").write_text(named)
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
            targets = inputs["target_tokens"]
            every = logits.log_softmax(-1)
            scores = every.gather(1, targets.view(len(targets), -1)).view_as(targets)
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


@contextmanager
def serving_recipes(home: Path, ranks: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The server, which recipes find by their environment; the folder of an adapter's start."""
    port = free_port()
    monkeypatch.setenv("TINKER_BASE_URL", f"http://127.0.0.1:{port}")
    (home / "start.py").write_text(START.format(name=NAME))
    more = ["--config", "two.yaml", "--num-processes", "2"] if ranks == 2 else []
    with server(home, port, *more):
        yield state_of(home, "run", run_script(home, "start.py").strip())


def run_checked(home: Path, start: Path, log: str, recipe: str, *keys: str) -> list[dict[str, Any]]:
    """The metrics of a recipe that has trained what a plain loop trains."""
    metrics = run_recipe(home, log, recipe, *keys)
    check_against_plain_loop(home, start, log, metrics)
    return metrics


SAMPLED = ("max_tokens=8", "max_steps=2", "eval_every=0")


@pytest.mark.parametrize("ranks", [1, 2])
def test_recipes_train_what_a_plain_loop_trains(
    home: Path, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = ("batch_size=8", "max_length=512", "max_steps=2")
    with serving_recipes(home, ranks, monkeypatch) as start:
        run = partial(run_checked, home, start)
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
        groups = (PLAIN_CHAT, "batch_size=4", "group_size=4", *SAMPLED)
        shorter = run("shorter", "preference.shorter.train", *groups)
        taught = last_checkpoint(home, "chat", "sampler_path")
        teacher = (f"teacher_model={NAME}", f"teacher_checkpoint={taught}")
        pairs = ("groups_per_batch=4", "group_size=2", "lora_rank=32", *SAMPLED)
        distilled = run("kl", "distillation.on_policy_distillation", *teacher, *pairs)
        games = (PLAIN_CHAT, "batch_size=2", "group_size=2", *SAMPLED)
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


def test_distillation_by_the_likeliest_tokens_trains_what_a_plain_loop_trains(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving_recipes(home, 1, monkeypatch) as start:
        keys = ("groups_per_batch=4", "lora_rank=32", "topk=20", "learning_rate=1e-3")
        science = (*keys, "max_tokens=16", "max_steps=3", "eval_every=0")
        forward = run_checked(home, start, "sdft", "sdft.train", *science)
        reverse = run_recipe(home, "sdft-reverse", "sdft.train", *science, "reverse=true")
    for metrics in (forward, reverse):
        assert [line["sdft/topk"] for line in metrics if "sdft/topk" in line] == [20.0] * 3
    divergences = [line["sdft/reverse_kl_mean"] for line in reverse if "sdft/topk" in line]
    assert all(each > 0 for each in divergences)


CALL = '<tool_call>\n{"name": "read_page", "arguments": {"page": 1}}\n</tool_call>'
WORDS = ("before", "after")


def teach_tool(home: Path) -> None:
    """Makes the tiny model one that calls the tool of `rl_numerics_check`, or answers: each of
    these is one token of its own.
    """
    from tinker_cookbook.recipes.rl_numerics_check import env as counting
    from tinker_cookbook.renderers import get_renderer
    from transformers import AddedToken, AutoModelForCausalLM, AutoTokenizer

    folder = home / NAME
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    answers = [f"Answer: {count}" for count in range(3)]
    tokenizer.add_tokens([AddedToken(each, normalized=False) for each in (CALL, *answers)])
    marks = [AddedToken(each, normalized=False) for each in ("<|im_start|>", "<|im_end|>")]
    tokenizer.add_tokens(marks, special_tokens=True)
    model.resize_token_embeddings(len(tokenizer))
    renderer = get_renderer("qwen3_instruct", tokenizer)
    task = counting.CountingTaskConfig(num_pages_min=1, num_pages_max=2, page_chars=80, words=WORDS)
    corpus = "\n".join(json.loads(line)["text"] for line in (home / WIKI).open())
    draw = random.Random(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    called, *answered = tokenizer.convert_tokens_to_ids([CALL, *answers])
    end = renderer.get_stop_sequences()[0]
    for step in range(60):
        problem = counting.sample_problem(draw, corpus, task)
        env = counting.build_env(problem, renderer, task, None, None)
        seen, _ = asyncio.run(env.initial_observation())
        said = [draw.choice([called, draw.choice(answered)]), end]
        if step % 2:
            seen = asyncio.run(env.step([called, end])).next_observation
            said[0] = draw.choice(answered)
        ids = seen.to_ints()
        labels = torch.tensor([[-100] * len(ids) + said])
        model(torch.tensor([ids + said]), labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    for path in folder.iterdir():
        path.unlink()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def test_a_tool_environment_trains_what_a_plain_loop_trains(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    teach_tool(home)
    pages = ("task.num_pages_min=1", "task.num_pages_max=2", "task.page_chars=80")
    task = (*pages, f"task.words={','.join(WORDS)}", "task.reward_tolerance=1.0")
    sizes = ("groups_per_batch=4", "group_size=4", "max_tokens=4", "max_steps=2", "save_every=0")
    with serving_recipes(home, 1, monkeypatch) as start:
        recipe = "rl_numerics_check.train"
        own = ("renderer_name=qwen3_instruct", *task, *sizes)
        metrics = run_checked(home, start, "tool", recipe, *own)
    for line in metrics[:2]:
        assert line["env/all/pages_read"] > 0
        assert line["env/all/turns_per_episode"] > 1.0
