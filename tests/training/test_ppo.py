"""PPO with a critic through the whole command: a plain loop's losses and gradients over several updates, the same losses in
every layout, exact resume between updates, and an export without the value head."""

import json
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from finetune.config.accelerate_file import read_sharding
from finetune.config.reader import read_recipe
from finetune.constants import VALUE_WEIGHT
from finetune.data.prepare import prepare_data
from finetune.data.tokenizer import load_tokenizer
from finetune.errors import UserError
from finetune.export.export import export
from finetune.files.tensors import read_folder, read_slice
from finetune.flops import forward_flop_per_token_of
from finetune.plan.plan import make_plan
from finetune.plan.speed import estimate_speed
from finetune.rollout.critic import compute_gae, find_targets
from finetune.session import Session
from finetune.training.callbacks import Hooks
from finetune.training.screens import count_longest
from tests.conftest import make_chat, make_model, slow_but
from tests.training.layouts import assert_bit_equal, steps_of, train_all, write_config
from tests.training.reference import Alone

STEPS, PROMPTS, GENERATIONS, MOST = 6, 4, 2, 12
BETA, GAMMA, LAM, WEIGHT, RANGE, RATE = 0.2, 0.97, 0.9, 0.5, 0.1, 3e-3
REWARDS = """
def even(completion_ids, **columns):
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]
"""
MODES: dict[str, dict[str, Any]] = {
    "full": {"beta": 0.0},
    "reference": {"beta": BETA, "loss_type": "grpo"},
    "adapters": {"beta": BETA, "use_peft": True, "lora_r": 4},
    "tied": {"beta": 0.0, "model": {"tie_word_embeddings": True}},
}
EVERY = [
    (1, "single", "full"),
    (2, "ddp", "full"),
    (2, "full_shard", "full"),
    (1, "single", "reference"),
    (1, "single", "adapters"),
    (2, "full_shard", "adapters"),
    (2, "ddp", "adapters"),
    (2, "full_shard", "reference"),
    (1, "single", "tied"),
    (2, "full_shard", "tied"),
]
QUICK = [(1, "single", "reference"), (1, "single", "adapters"), (2, "full_shard", "adapters")]


@pytest.fixture(scope="module")
def recipes(folder: Path) -> dict[str, Path]:
    data = make_chat(folder / "chat.jsonl", rows=26)
    (folder / "my_rewards.py").write_text(REWARDS)
    paths = {}
    for mode, keys in MODES.items():
        model = make_model(folder / f"model-{mode}", initializer_range=0.3, **keys.get("model", {}))
        common = {
            "method": "ppo",
            "model_name_or_path": str(model),
            "datasets": [{"path": str(data)}],
            "dataset_cache_dir": str(folder / "cache"),
            "rewards": ["my_rewards.py:even"],
            "num_generations": GENERATIONS,
            "num_iterations": 3,
            "max_completion_length": MOST,
            "log_completions": PROMPTS,
            "gamma": GAMMA,
            "lam": LAM,
            "vf_coef": WEIGHT,
            "cliprange_value": RANGE,
            "max_length": 100,
            "eot_tokens": ["<|user|>", "<|system|>", "<|assistant|>", "<|begin|>"],
            "global_batch_size": PROMPTS,
            "per_device_train_batch_size": 2,
            "max_steps": STEPS,
            "learning_rate": RATE,
            "lr_scheduler_type": "constant",
            "warmup_ratio": 0,
            "max_grad_norm": None,
            "logging_steps": 1,
            "save_steps": 1,
            "save_total_limit": 9,
            "export_at_end": False,
        }
        paths[mode] = folder / f"{mode}.yaml"
        paths[mode].write_text(
            yaml.safe_dump(common | {key: value for key, value in keys.items() if key != "model"})
        )
    return paths


@pytest.fixture(scope="module")
def runs(folder: Path, recipes: dict[str, Path], slow_too: bool) -> Callable[..., Path]:
    """(ranks, layout, mode) -> the run's folder."""
    configs = {layout: write_config(folder, layout) for layout in ("single", "ddp", "full_shard")}
    wanted = EVERY if slow_too else QUICK
    for ranks in (1, 2):
        listed = [
            (recipes[mode], configs[layout], [f"output_dir={folder}/{count}-{layout}-{mode}"])
            for count, layout, mode in wanted
            if count == ranks
        ]
        train_all(folder, listed, ranks=ranks, timeout=300)
    return lambda *which: folder / "-".join(map(str, which))


def slow_ranks(cases: list[tuple[int, str, str]]) -> list[Any]:
    return [
        each if each in QUICK else pytest.param(*each, marks=pytest.mark.slow) for each in cases
    ]


def lines_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "completions.jsonl").read_text().splitlines()]


def plain_gae(rewards: list[float], values: list[float]) -> list[float]:
    """Schulman et al. 2016, eq. 16, as the sum that it is."""
    following = [*values[1:], 0.0]
    deltas = [r + GAMMA * n - v for r, n, v in zip(rewards, following, values, strict=True)]
    return [
        sum((GAMMA * LAM) ** (later - t) * deltas[later] for later in range(t, len(deltas)))
        for t in range(len(deltas))
    ]


Pairs = Sequence[tuple[Tensor, Tensor]]  # of each completion, its log-probabilities and values


def plain_targets(
    lines: list[dict[str, Any]], old: Pairs, reference: list[list[float]], beta: float
) -> tuple[list[Tensor], list[Tensor]]:
    """The whitened advantages, and the returns, of each completion."""
    estimates = []
    for line, (log, values), other in zip(lines, old, reference, strict=True):
        rewards = [-beta * (own - each) for own, each in zip(log.tolist(), other, strict=True)]
        rewards[-1] += line["rewards"]["even"]
        estimates.append(torch.tensor(plain_gae(rewards, values.tolist())))
    every = torch.cat(estimates)
    returns = [a + values for a, (_, values) in zip(estimates, old, strict=True)]
    return [(a - every.mean()) / (every.var() + 1e-8).sqrt() for a in estimates], returns


def plain_losses(
    now: Pairs, old: Pairs, advantages: list[Tensor], returns: list[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """The policy's losses and the critic's of each completion."""
    policy = []
    value = []
    for (log, values), (old_log, old_values), own, wanted in zip(
        now, old, advantages, returns, strict=True
    ):
        ratio = (log - old_log).exp()
        policy.append(-torch.min(ratio * own, ratio.clamp(0.8, 1.2) * own))
        bounded = old_values + (values - old_values).clamp(-RANGE, RANGE)
        value.append(0.5 * torch.max((values - wanted) ** 2, (bounded - wanted) ** 2))
    return policy, value


def test_targets_are_those_of_a_plain_loop() -> None:
    """Completions of several lengths, one of which no reward says anything of."""
    random = np.random.default_rng(3)
    lengths = [5, 1, 8, 3]
    old, reference, values = (
        [random.normal(size=length).tolist() for length in lengths] for _ in range(3)
    )
    rewards = np.array([1.0, -0.5, np.nan, 2.0])
    rollout: Any = SimpleNamespace(old=old, reference=reference, values=values, rewards=rewards)
    given = ["model_name_or_path=a/b", "datasets=[{path: a/b}]", "method=ppo", "rewards=[length]"]
    recipe = read_recipe(None, [*given, f"beta={BETA}", f"gamma={GAMMA}", f"lam={LAM}"])
    targets = find_targets(rollout, recipe)
    estimates = {}
    for i in (0, 1, 3):
        of_tokens = [-BETA * (o - r) for o, r in zip(old[i], reference[i], strict=True)]
        of_tokens[-1] += rewards[i]
        estimates[i] = plain_gae(of_tokens, values[i])
        returns = [a + v for a, v in zip(estimates[i], values[i], strict=True)]
        assert targets.returns[i] == pytest.approx(returns, rel=1e-12)
    every = torch.tensor([a for own in estimates.values() for a in own], dtype=torch.float64)
    whitened = ((every - every.mean()) / (every.var() + 1e-8).sqrt()).split([5, 1, 3])
    for i, truth in zip((0, 1, 3), whitened, strict=True):
        assert targets.advantages[i] == pytest.approx(truth.tolist(), rel=1e-12)
    assert targets.advantages[2] == [0.0] * 8 and targets.returns[2] == values[2]
    assert -9 < targets.explained_variance < 0


def test_a_value_that_foresees_the_reward_leaves_no_advantage() -> None:
    rewards = np.array([[0.0, 0.0, 3.0]])
    assert compute_gae(rewards, np.full((1, 3), 3.0), 1.0, 0.95).tolist() == [[0.0, 0.0, 0.0]]
    assert compute_gae(rewards, np.zeros((1, 3)), 0.5, 1.0).tolist() == [[0.75, 1.5, 3.0]]


@pytest.mark.parametrize(("ranks", "layout", "mode"), slow_ranks(EVERY))
def test_every_layout_has_the_same_losses(
    ranks: int, layout: str, mode: str, runs: Callable[..., Path]
) -> None:
    one, run = runs(1, "single", mode), runs(ranks, layout, mode)
    same = [[line["token_ids"] for line in lines_of(each)] for each in (run, one)]
    assert same[0] == same[1] and len(same[0]) == STEPS // 3 * PROMPTS * GENERATIONS
    names = ["reward", "entropy", "value/loss", "value/mean", "value/return", "grad_norm"]
    names += ["value/explained_variance"] + (["kl"] if MODES[mode]["beta"] else [])
    for line, truth in zip(steps_of(run), steps_of(one), strict=True):
        assert line["loss"] == pytest.approx(truth["loss"], rel=1e-4, abs=1e-5)
        for name in names:
            assert line[name] == pytest.approx(truth[name], rel=1e-3, abs=1e-5), name
        is_first = line["step"] % 3 == 1
        assert (line["log_ratio/max"] < 5e-5) == is_first
        assert is_first == (line["clip_ratio"] == line["value/clip_ratio"] == 0)


@pytest.mark.parametrize("mode", slow_but({"reference"}, ["full", "reference"]))
def test_all_updates_on_the_same_completions_are_those_of_a_plain_loop(
    mode: str, recipes: dict[str, Path], runs: Callable[..., Path]
) -> None:
    """From what completions.jsonl says was sampled: values, GAE, both losses and AdamW by transformers and torch."""
    run = runs(1, "single", mode)
    folder = recipes[mode].parent / f"model-{mode}"
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    critic = torch.zeros(model.config.hidden_size, requires_grad=True)
    trained = [*model.parameters(), critic]
    optimizer = torch.optim.AdamW(trained, lr=RATE, weight_decay=0.0)
    reference: dict[int, list[list[float]]] = {}
    beta = MODES[mode]["beta"]

    def forward(line: dict[str, Any]) -> tuple[Tensor, Tensor]:
        prompt = tokenizer(line["prompt"], add_special_tokens=False).input_ids
        ids = torch.tensor([prompt + line["token_ids"]])
        states = model.model(ids).last_hidden_state[0, len(prompt) - 1 : -1]
        log_probabilities = model.lm_head(states).log_softmax(-1)
        return log_probabilities.gather(1, ids[0, len(prompt) :, None])[:, 0], states @ critic

    by_step = {step: [each for each in lines_of(run) if each["step"] == step] for step in (1, 4)}
    with torch.no_grad():
        for step, lines in by_step.items():
            reference[step] = [forward(line)[0].tolist() for line in lines]
    for step in steps_of(run):
        first = step["step"] - (step["step"] - 1) % 3
        lines = by_step[first]
        now = [forward(line) for line in lines]
        if step["step"] == first:
            old = [(log.detach(), values.detach()) for log, values in now]
            advantages, returns = plain_targets(lines, old, reference[first], beta)
        policy, value = plain_losses(now, old, advantages, returns)
        both = [p + WEIGHT * v for p, v in zip(policy, value, strict=True)]
        if mode == "full":
            loss = torch.cat(both).mean()
        else:
            loss = torch.stack([each.mean() for each in both]).mean()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        norm = torch.stack([p.grad.norm() for p in trained if p.grad is not None]).norm()
        optimizer.step()
        assert step["loss"] == pytest.approx(loss.item(), rel=1e-4, abs=1e-5), step["step"]
        assert step["grad_norm"] == pytest.approx(norm.item(), rel=1e-3), step["step"]
        assert step["value/loss"] == pytest.approx(torch.cat(value).mean().item(), rel=1e-3)
        error = (torch.cat(returns) - torch.cat([v for _, v in old])).var(unbiased=False)
        explained = 1 - error / torch.cat(returns).var(unbiased=False)
        assert step["value/explained_variance"] == pytest.approx(explained.item(), abs=1e-3)
    assert step["clip_ratio"] > 0.01 and step["value/clip_ratio"] > 0.01
    assert read_critic(run, STEPS) == pytest.approx(critic.tolist(), rel=1e-3, abs=1e-5)


def read_critic(run: Path, step: int) -> list[float]:
    stored = read_folder(run / "checkpoints" / f"step-{step:08}" / "model")
    (tensor,) = (each for name, each in stored.items() if name.endswith(VALUE_WEIGHT))
    values: list[float] = read_slice(tensor, (slice(None),)).tolist()
    return values


@pytest.mark.parametrize(
    ("ranks", "layout", "mode"),
    [(1, "single", "reference"), pytest.param(2, "full_shard", "adapters", marks=pytest.mark.slow)],
)
def test_a_run_that_resumes_between_updates_is_bit_equal(
    ranks: int,
    layout: str,
    mode: str,
    recipes: dict[str, Path],
    runs: Callable[..., Path],
    folder: Path,
) -> None:
    whole = runs(ranks, layout, mode)
    again = folder / f"again-{mode}"
    shutil.copytree(whole, again)
    for step in (5, 6):
        shutil.rmtree(again / "checkpoints" / f"step-{step:08d}")
    (again / "finished.json").unlink()
    printed = train_all(
        folder,
        [(recipes[mode], write_config(folder, layout), [f"output_dir={again}"])],
        ranks=ranks,
    )
    assert "resumed at step 4" in printed
    assert_bit_equal(whole, again, STEPS)
    assert steps_of(again)[-1]["value/loss"] == steps_of(whole)[-1]["value/loss"]
    assert any(read_critic(again, STEPS))


@pytest.mark.parametrize("mode", slow_but({"adapters"}, ["full", "adapters"]))
def test_an_export_is_the_model_without_the_critic(
    mode: str, recipes: dict[str, Path], runs: Callable[..., Path], tmp_path: Path
) -> None:
    run = runs(1, "single", mode)
    said: list[str] = []
    out = export(run, tmp_path / "export", log=said.append)
    kept = (
        f"critic  left out; {run}/checkpoints/step-{STEPS:08} keeps it, and only training reads it"
    )
    assert kept in said
    assert not any(VALUE_WEIGHT in name for name in read_folder(out))
    assert "lm_head.weight" in read_folder(out)
    AutoModelForCausalLM.from_pretrained(out)
    if mode == "adapters":
        adapter = export(run, tmp_path / "adapter", adapter_only=True, log=said.append)
        assert all(".lora_" in name for name in read_folder(adapter))
        assert json.loads((adapter / "adapter_config.json").read_text())["modules_to_save"] is None


@pytest.mark.parametrize("mode", ["reference", "adapters"])
def test_the_plan_counts_the_critic(
    mode: str, recipes: dict[str, Path], runs: Callable[..., Path]
) -> None:
    """As many bytes of trained parameters and of the optimizer's state as the checkpoint holds."""
    recipe = read_recipe(str(recipes[mode]))
    plan = make_plan(recipe, read_sharding(None, None, {}), 1, on_cpu=True)
    stored = read_folder(runs(1, "single", mode) / "checkpoints" / f"step-{STEPS:08}" / "model")
    trained = sum(tensor.byte_count for tensor in stored.values())
    assert plan.spec.state().trained == trained
    assert any(each.name == f"lm_head.{VALUE_WEIGHT}" for each in plan.spec.tensors)


@pytest.mark.parametrize(
    ("mode", "method", "measured"),
    [
        # forwards without a backward, for each time that a token is trained on
        ("full", "ppo", 1 / 3),
        ("reference", "ppo", 2 / 3),
        ("adapters", "ppo", 2 / 3),
        ("full", "grpo", 1 / 3),
        ("reference", "grpo", 1 + 1 / 3),
    ],
)
def test_mfu_and_plan_count_what_is_measured_once_a_generation(
    mode: str, method: str, measured: float, recipes: dict[str, Path], tmp_path: Path
) -> None:
    """The old log-probabilities with the critic's values, and under PPO the reference's."""
    keys = yaml.safe_load(recipes[mode].read_text()) | {"output_dir": str(tmp_path / "run")}
    if "lora_r" in keys:
        keys["lora_r"] = 1  # the plan leaves out the products of adapters, which are small
    keys["rewards"] = [str(recipes[mode].parent / "my_rewards.py:even")]
    if method == "grpo":
        for key in ("gamma", "lam", "vf_coef", "cliprange_value"):
            del keys[key]
        keys |= {"method": "grpo", "importance_sampling_correction": "token_truncate"}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(keys))
    recipe = read_recipe(str(tmp_path / "recipe.yaml"))
    sharding = read_sharding("single", None, {})
    length = recipe.data.max_length
    with Session(recipe, sharding) as session:
        counted = session.start(Hooks()).count_flop(length)
        sizes = [
            (weight.numel(), weight.requires_grad)
            for name, weight in session.model.named_parameters()
            if "embed" not in name
        ]
        forward = forward_flop_per_token_of(
            session.model.config, parameters=sum(size for size, _ in sizes), length=length
        )
    frozen = sum(size for size, is_trained in sizes if not is_trained)
    expected = (3 + measured) * forward - 2 * frozen
    planned = estimate_speed(make_plan(recipe, sharding, 1).spec, 0.4).flop_per_token
    assert counted == pytest.approx(expected, rel=0.03)
    assert planned == pytest.approx(expected, rel=0.03)


TOOL = '''
def guess(number: int) -> str:
    """Guesses.

    Args:
        number: The number.
    """
    return "no"
'''


def test_prompts_without_room_are_counted_with_the_descriptions_of_their_tools(
    folder: Path, recipes: dict[str, Path], tmp_path: Path
) -> None:
    (tmp_path / "my_tools.py").write_text(TOOL)
    keys = [f"tools=[{tmp_path}/my_tools.py:guess]", "chat_template=hermes", "eot_tokens=[]"]
    keys += ["added_tokens=[<|im_start|>, <|im_end|>]", "beta=0"]
    recipe = read_recipe(str(recipes["full"]), keys)
    tokenizer = load_tokenizer(recipe.model, recipe.data, recipe.rollout.tools)
    with pytest.raises(UserError) as problem:
        prepare_data(recipe, tokenizer, Alone())
    said = re.search(
        r"a prompt has ([\d,]+) tokens on average, ([\d,]+) of them the descriptions of tools, and "
        r"max_length less max_completion_length leaves 88; raise max_length",
        str(problem.value),
    )
    assert said is not None, problem.value
    whole, described = (int(each.replace(",", "")) for each in said.groups())
    plain = load_tokenizer(recipe.model, recipe.data)
    lengths = []
    for line in (folder / "chat.jsonl").read_text().splitlines():
        prompt = json.loads(line)["messages"][:-1]
        text = plain.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
        lengths.append(len(plain.encode(text, add_special_tokens=False)))
    assert whole - described == int(np.mean(lengths))


def test_the_longest_of_a_run_that_samples_is_a_prompt_with_its_completion(
    recipes: dict[str, Path],
) -> None:
    recipe = read_recipe(str(recipes["full"]))
    run: Any = SimpleNamespace(
        recipe=recipe, data=SimpleNamespace(report=SimpleNamespace(longest=40))
    )
    assert count_longest(run) == 40 + MOST
