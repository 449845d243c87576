"""Sampling, rewards and the step through the whole command: the same completions and losses in every layout, the ratio of one,
and a plain loop's loss and gradient."""

import html
import json
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from finetune.cli import main
from finetune.config.accelerate_file import read_sharding
from finetune.config.reader import read_recipe
from finetune.constants import RATIO_BORDERS, RATIO_SHARES
from finetune.errors import UserError
from finetune.models.load import load_teacher
from finetune.plan.plan import make_plan
from finetune.report.page import render_page
from finetune.report.run_data import read_run
from finetune.run import fine_tune
from finetune.session import Session
from finetune.training.screens import last_screen
from tests.conftest import make_chat, make_model
from tests.ranks import launch_ranks
from tests.rollout.stand_in_vllm import serving
from tests.training import online_papers
from tests.training.layouts import assert_bit_equal, steps_of, train_all, write_config

STEPS, PROMPTS, GENERATIONS, MOST = 3, 4, 3, 12
TEMPERATURE = 1.3
STOPS = {256, 257, 259, 260, 261}  # <|begin|>, <|end|>, <|system|>, <|user|>, <|assistant|>
REWARDS = '''
def even(completion_ids, prompts, completions, answer, trainer_state, **columns):
    """Tokens with an even id, and columns as TRL hands them over."""
    assert len(prompts) == len(completions) == len(answer) and prompts[0][-1]["role"] == "user"
    assert completions[0][0]["role"] == "assistant" and answer[0].startswith("It is") and trainer_state.max_steps > trainer_state.global_step
    print("seen")
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]


def rare(completion_ids, **columns):
    """The same for all three completions of nearly half of the prompts."""
    return [float(ids[0] % 4 == 0) for ids in completion_ids]
'''
MODES: dict[str, dict[str, Any]] = {
    "packed": {"loss_type": "dapo"},
    "padded": {
        "loss_type": "grpo",
        "importance_sampling_level": "sequence",
        "packing": False,
        "mask_truncated_completions": True,
    },
    "reference": {"beta": 0.3},  # a frozen copy beside the model
    "adapters": {
        "beta": 0.3,
        "use_peft": True,
        "lora_r": 4,
        "loss_type": "dr_grpo",
        "scale_rewards": "none",
        "learning_rate": 3e-3,  # so that the model leaves its reference: fp32 resolves a divergence of 0.003 to 1e-5
    },
    # With the default seed one random number lies 3e-8 from a border between two tokens, less than fp32 resolves.
    "dynamic": {
        "seed": 7,
        "rewards": ["my_rewards.py:rare"],
        "reward_weights": [1.0],
        "max_num_gen_batches": 9,
    },
    "taught": {
        "method": "on_policy_distill",
        "teacher_model_name_or_path": "teacher",
        "num_generations": GENERATIONS,
    },
}
SHARING = [
    "packed",
    "reference",
    "adapters",
    "taught",
]  # the prompt between the completions of a group
MODES |= {f"{mode}-apart": MODES[mode] | {"packing": False} for mode in SHARING}
EVERY = [
    (1, "single", "packed"),
    (2, "ddp", "packed"),
    (2, "full_shard", "packed"),
    (2, "tp", "packed"),
    (1, "single", "padded"),
    (1, "single", "packed-apart"),
    (1, "single", "dynamic"),
    (2, "full_shard", "padded"),
    (2, "full_shard", "dynamic"),
    (3, "full_shard", "packed"),
    (4, "hybrid", "packed"),
    (2, "pipeline", "packed"),
    (2, "pipeline", "adapters"),
    (4, "pipeline", "packed"),  # two ranks in a stage, which have other prompts
    *(
        (ranks, layout, mode)
        for mode in ("reference", "adapters", "taught")
        for ranks, layout in ((1, "single"), (2, "full_shard"))
    ),
    *((1, "single", f"{mode}-apart") for mode in SHARING[1:]),
]
QUICK = [
    (1, "single", "packed"),
    (1, "single", "padded"),
    (1, "single", "dynamic"),
    (2, "full_shard", "packed"),
]


@pytest.fixture(scope="module")
def recipes(folder: Path) -> dict[str, Path]:
    data = make_chat(folder / "chat.jsonl", rows=26)
    model = make_model(folder / "model", initializer_range=0.3)
    make_model(folder / "teacher", seed=1, initializer_range=0.3, hidden_size=48)
    (folder / "my_rewards.py").write_text(REWARDS)
    common = {
        "method": "grpo",
        "model_name_or_path": str(model),
        "datasets": [{"path": str(data)}],
        "eval_datasets": [{"path": str(data), "max_samples": 7}],
        "dataset_cache_dir": str(folder / "cache"),
        "rewards": ["my_rewards.py:even", "length"],
        "reward_weights": [1.0, 0.5],
        "num_generations": GENERATIONS,
        "max_completion_length": MOST,
        "temperature": TEMPERATURE,
        "log_completions": PROMPTS,
        "per_device_generation_batch_size": 5,
        "max_length": 100,
        "eot_tokens": ["<|user|>", "<|system|>", "<|assistant|>", "<|begin|>"],
        "global_batch_size": PROMPTS,
        "per_device_train_batch_size": 2,
        "max_steps": STEPS,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "export_at_end": False,
    }
    paths = {mode: folder / f"{mode}.yaml" for mode in MODES}
    for mode, path in paths.items():
        own = {
            key: str(folder / value) if value == "teacher" else value
            for key, value in MODES[mode].items()
        }
        path.write_text(yaml.safe_dump(common | own))
    return paths


@pytest.fixture(scope="module")
def runs(folder: Path, recipes: dict[str, Path], slow_too: bool) -> Callable[..., Path]:
    """(ranks, layout, mode) -> the run's folder."""
    configs = {layout: write_config(folder, layout) for layout in ("single", "ddp", "full_shard")}
    configs["pipeline"], pipeline = configs["full_shard"], ["pipeline_parallel_size=2"]
    configs["tp"] = write_config(folder, "full_shard", sizes={"tp_size": 2})
    configs["hybrid"] = write_config(folder / "model", "full_shard", mesh=(2, 2))
    wanted = EVERY if slow_too else QUICK
    for ranks in sorted({each[0] for each in wanted}):
        listed = [
            (
                recipes[mode],
                configs[layout],
                [
                    f"output_dir={folder}/{count}-{layout}-{mode}",
                    *(pipeline if layout == "pipeline" else []),
                ],
            )
            for count, layout, mode in wanted
            if count == ranks
        ]
        (folder / f"said-{ranks}").write_text(train_all(folder, listed, ranks=ranks, timeout=300))
    return lambda *which: folder / "-".join(map(str, which))


def lines_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "completions.jsonl").read_text().splitlines()]


def slow_ranks(cases: list[tuple[int, str, str]]) -> list[Any]:
    return [
        each if each in QUICK else pytest.param(*each, marks=pytest.mark.slow) for each in cases
    ]


@pytest.mark.parametrize(("ranks", "layout", "mode"), slow_ranks(EVERY))
def test_every_layout_samples_the_same_tokens_and_has_the_same_losses(
    ranks: int, layout: str, mode: str, runs: Callable[..., Path]
) -> None:
    """Also where each completion is read with a prompt of its own."""
    one, run = runs(1, "single", mode.removesuffix("-apart")), runs(ranks, layout, mode)
    if mode.endswith("-apart"):
        tokens = [steps_of(each)[-1]["tokens"] for each in (one, run)]
        assert tokens[0] < 0.75 * tokens[1]
    mine, theirs = lines_of(run), lines_of(one)
    assert len(mine) == STEPS * PROMPTS * GENERATIONS
    assert [line["token_ids"] for line in mine] == [line["token_ids"] for line in theirs]
    assert [line["rewards"] for line in mine] == [line["rewards"] for line in theirs]
    assert len({tuple(line["token_ids"]) for line in mine}) > 0.9 * len(mine)
    assert {line["ended"] for line in mine} == {"stopped", "cut"}
    for line, truth in zip(steps_of(run), steps_of(one), strict=True):
        names = (
            ["kl"] if "kl" in truth and line["step"] > 1 else []
        )  # before the first step the reference is the model
        for name in (
            *names,
            "grad_norm",
            "reward",
            "reward_std",
            "entropy",
            "completions/mean_length",
        ):
            assert line[name] == pytest.approx(truth[name], rel=1e-5), (line["step"], name)
        # Advantages of about 1 cancel in the loss, so that its own size says nothing.
        assert line["loss"] == pytest.approx(truth["loss"], rel=1e-5, abs=1e-6)
    held_out = [[line for line in read(each) if "eval_reward" in line] for each in (run, one)]
    assert [line["eval_reward"] for line in held_out[0]] == pytest.approx(
        [line["eval_reward"] for line in held_out[1]]
    )
    assert held_out[0][0]["eval_loss"] == pytest.approx(-held_out[0][0]["eval_reward"])


@pytest.mark.slow
def test_the_first_screen_names_the_other_model(runs: Callable[..., Path], folder: Path) -> None:
    """The teacher, or the reference where the base is trained; each is counted in mfu by the same objective."""
    runs(1, "single", "taught")
    others = [
        mode
        for _, _, mode in (each for each in EVERY if each[0] == 1)
        if mode[:6] in ("taught", "refere")
    ]
    said = (folder / "said-1").read_text()
    assert (
        len(others) == 4
        and len(re.findall(r"\nteacher LlamaForCausalLM, [\d,]+ parameters, frozen in fp32", said))
        == 4
    )


@pytest.mark.parametrize(("ranks", "layout", "mode"), slow_ranks(EVERY))
def test_the_ratio_between_sampler_and_trainer_is_one(
    ranks: int, layout: str, mode: str, runs: Callable[..., Path]
) -> None:
    for line in steps_of(runs(ranks, layout, mode)):
        assert 0 < line["log_ratio/mean"] < 5e-6 and line["log_ratio/max"] < 5e-5
        assert line["log_ratio/max"] >= line["log_ratio/mean"]
        assert (
            line["ratio/effective_sample_size"] == pytest.approx(1, abs=1e-6)
            and line["clip_ratio"] == 0
        )
        assert line["ratio/share/0.999-1.001"] == 1 and line["ratio/outside"] == 0


def test_the_reference_of_a_quantized_base_is_quantized_as_the_base_is(
    recipes: dict[str, Path],
) -> None:
    """All but what is trained whole: before the first step the two compute the same. The plan counts its bytes."""
    keys = ["load_in_4bit=true", "modules_to_save=[norm, layers.0.mlp.down_proj]"]
    recipe = read_recipe(str(recipes["adapters"]), keys)
    sharding = read_sharding("single", None, {})
    with Session(recipe, sharding, saves=False) as session, torch.no_grad():
        reference = load_teacher(session.recipe, session.world).model
        tokens = torch.arange(60)[None]
        mine, theirs = session.model.eval()(input_ids=tokens), reference(input_ids=tokens)
    assert torch.equal(mine.logits, theirs.logits)
    planned = make_plan(recipe, sharding, 1, on_cpu=True).spec.teacher_bytes
    assert planned == sum(parameter.nbytes for parameter in reference.parameters())


@pytest.mark.parametrize("mode", ["packed", "padded"])
def test_the_first_step_has_the_loss_and_the_gradient_of_a_plain_loop(
    mode: str, recipes: dict[str, Path], runs: Callable[..., Path]
) -> None:
    """From what completions.jsonl says was sampled: rewards, advantages and the loss once more, by transformers and the papers."""
    run = runs(1, "single", mode)
    lines = [line for line in lines_of(run) if line["step"] == 1]
    rewards = [line["rewards"]["even"] + 0.5 * line["rewards"]["length"] for line in lines]
    for line in lines:
        ids = line["token_ids"]
        assert line["rewards"]["even"] == pytest.approx(
            sum(token % 2 == 0 for token in ids) / len(ids)
        )
        assert line["rewards"]["length"] == pytest.approx(1 - len(ids) / MOST)
        assert line["ended"] == ("stopped" if ids[-1] in STOPS else "cut") and len(ids) <= MOST
    loss_type = MODES[mode]["loss_type"]
    advantages = online_papers.advantages(rewards, GENERATIONS, loss_type, "group")
    assert [line["advantage"] for line in lines] == pytest.approx(advantages, rel=1e-5)

    model = AutoModelForCausalLM.from_pretrained(recipes[mode].parent / "model")
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(recipes[mode].parent / "model")
    new = []
    learned = [
        i for i, line in enumerate(lines) if loss_type == "dapo" or line["ended"] == "stopped"
    ]
    for line in (lines[i] for i in learned):
        prompt = tokenizer(line["prompt"], add_special_tokens=False).input_ids
        ids = torch.tensor([prompt + line["token_ids"]])
        logits = model(ids).logits[0, len(prompt) - 1 : -1] / TEMPERATURE
        new.append(logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0])
    old = [each.detach() for each in new]
    level = MODES[mode].get("importance_sampling_level", "token")
    of_learned = [advantages[i] for i in learned]
    loss = online_papers.paper(
        loss_type, new, old, of_learned, low=0.2, high=0.2, budget=MOST, level=level
    )
    loss = loss * (
        len(learned) / len(lines) if loss_type == "grpo" else 1
    )  # those that are cut count, with nothing
    loss.backward()  # type: ignore[no-untyped-call]
    norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    first = steps_of(run)[0]
    assert first["loss"] == pytest.approx(loss.item(), rel=1e-4, abs=1e-6)
    assert first["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)


def test_groups_without_signal_are_replaced_by_other_prompts(runs: Callable[..., Path]) -> None:
    run = runs(1, "single", "dynamic")
    lines, steps = lines_of(run), steps_of(run)
    groups = [lines[i : i + GENERATIONS] for i in range(0, len(lines), GENERATIONS)]
    assert len(groups) == STEPS * PROMPTS
    for group in groups:
        assert len({line["prompt"] for line in group}) == 1
        assert {line["rewards"]["rare"] for line in group} == {0.0, 1.0} and any(
            line["advantage"] for line in group
        )
    for step in range(STEPS):
        assert (
            len({group[0]["prompt"] for group in groups[step * PROMPTS : (step + 1) * PROMPTS]}) > 1
        )
    assert max(step["sampled_groups"] for step in steps) > PROMPTS
    for step in steps:  # dropped are those without signal, and what a last draw had too many of
        assert step["frac_reward_zero_std"] * step["sampled_groups"] == pytest.approx(
            step["sampled_groups"] - PROMPTS
        )


def read(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


KILLED_QUICKLY = {("again-fsdp2", "step")}
KILLED = Path(__file__).with_name("killed_while_sampling.py")
DEATHS = {
    "sampling": 16,
    "rewards": 7,
    "step": 2,
    "save": 2,
}  # calls, of which the last is in the second step
# Four steps on the completions of the first two, then two on those of the next: the first rank dies in the third step, between
# two updates on the same completions, and where the second lot is sampled and rewarded.
AGAIN = [
    "num_iterations=2",
    "steps_per_generation=2",
    "importance_sampling_correction=token_truncate",
    "max_steps=6",
]
LATER_DEATHS = {"sampling": 27, "rewards": 8, "step": 3, "save": 3}
LAYOUTS = {
    "once": (1, "single"),
    "again": (1, "single"),
    "again-ddp": (2, "ddp"),
    "again-fsdp2": (2, "full_shard"),
}


@pytest.mark.parametrize(
    ("case", "place"),
    [
        pytest.param(
            case, place, marks=[] if (case, place) in KILLED_QUICKLY else [pytest.mark.slow]
        )
        for case in LAYOUTS
        for place in DEATHS
    ],
)
def test_a_run_that_is_killed_anywhere_ends_as_if_nobody_had(
    case: str, place: str, recipes: dict[str, Path], folder: Path
) -> None:
    """SIGKILL between two tokens, while rewards are computed, before the update, before the checkpoint is published. The same
    command then ends with the weights, losses and completions of the run that nobody killed."""
    ranks, layout = LAYOUTS[case]
    keys = [
        "save_steps=1",
        "save_total_limit=9",
        "eval_datasets=[]",
        "per_device_generation_batch_size=64",
    ]
    keys += [] if case == "once" else AGAIN
    calls, steps = (DEATHS, STEPS) if case == "once" else (LATER_DEATHS, 6)
    whole, run = folder / f"unkilled-{case}", folder / f"killed-{case}-{place}"
    config = write_config(folder, layout)

    def live(where: str, output: Path) -> int:
        arguments = [
            f"{where},{calls.get(where)}",
            str(recipes["packed"]),
            str(config),
            *keys,
            f"output_dir={output}",
        ]
        finished = launch_ranks(KILLED, arguments, ranks=ranks)
        assert finished.returncodes[0] in (0, -signal.SIGKILL), finished.outputs[0][-3000:]
        return finished.returncodes[0]

    if not whole.exists():
        assert live("nowhere", whole) == 0
    assert live(place, run) == -signal.SIGKILL
    last = {"once": 1}.get(case, 2 if place in ("step", "save") else 4)
    newest = sorted((run / "checkpoints").glob("step-*"))[-1]
    assert newest.name == f"step-{last:08}"
    assert (newest / "rollouts.jsonl").exists() == (last == 2)
    assert live("nowhere", run) == 0
    assert_bit_equal(run, whole, steps)
    assert lines_of(run) == lines_of(whole)
    assert [line["step"] for line in lines_of(run)[:: PROMPTS * GENERATIONS]] == (
        [1, 2, 3] if case == "once" else [1, 2, 5]
    )


@pytest.fixture(scope="module")
def again(folder: Path, recipes: dict[str, Path]) -> Path:
    """A run of three steps on the same completions, without clipping and warm-up."""
    keys = [
        "num_iterations=3",
        "save_steps=1",
        "save_total_limit=9",
        "eval_datasets=[]",
        "max_grad_norm=null",
    ]
    keys += [
        "lr_scheduler_type=constant",
        "warmup_ratio=0",
        f"output_dir={folder}/again",
        "learning_rate=3e-3",
    ]
    train_all(folder, [(recipes["packed"], write_config(folder, "single"), keys)], ranks=1)
    return folder / "again"


def test_later_updates_on_the_same_completions_are_those_of_a_plain_loop(
    again: Path, recipes: dict[str, Path]
) -> None:
    """The ratio leaves 1 as the model moves, and its bound bites: losses and gradients by transformers, AdamW and the paper."""
    from transformers import AutoTokenizer

    lines = lines_of(again)
    assert {line["step"] for line in lines} == {1}
    model = AutoModelForCausalLM.from_pretrained(recipes["packed"].parent / "model")
    tokenizer = AutoTokenizer.from_pretrained(recipes["packed"].parent / "model")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    old: list[torch.Tensor] = []
    for step in steps_of(again):
        new = []
        for line in lines:
            prompt = tokenizer(line["prompt"], add_special_tokens=False).input_ids
            ids = torch.tensor([prompt + line["token_ids"]])
            logits = model(ids).logits[0, len(prompt) - 1 : -1] / TEMPERATURE
            new.append(logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0])
        old = old or [each.detach() for each in new]
        advantages = [line["advantage"] for line in lines]
        loss = online_papers.paper("dapo", new, old, advantages, low=0.2, high=0.2, budget=MOST)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
        optimizer.step()
        assert step["loss"] == pytest.approx(loss.item(), rel=1e-4, abs=1e-5), step["step"]
        assert step["grad_norm"] == pytest.approx(norm.item(), rel=1e-3), step["step"]
        ratios = torch.cat([(n - o).exp() for n, o in zip(new, old, strict=True)])
        assert step["ratio/mean"] == pytest.approx(ratios.mean().item(), rel=1e-4)
        assert step["ratio/outside"] == pytest.approx(
            ((ratios < 0.8) | (ratios > 1.2)).double().mean().item(), abs=1e-6
        )
        borders = torch.tensor([0, *RATIO_BORDERS, torch.inf])
        shares = torch.histogram(ratios.detach().float(), borders.float()).hist / len(ratios)
        assert [step[name] for name in RATIO_SHARES] == pytest.approx(shares.tolist(), abs=1e-6)
    assert step["step"] == 3 and step["clip_ratio"] > 0.05 and step["log_ratio/mean"] > 0.05
    assert step["ratio/outside"] > step["clip_ratio"]
    said, memory, seconds, made = last_screen(again, 3)
    assert made.endswith(str(again / "completions.jsonl")) and memory.endswith("GiB planned")
    assert seconds.startswith("time    ")
    outside = sum(line["ratio/outside"] for line in steps_of(again)) / 3
    assert said.startswith(
        f"ratios  of training to sampling: {outside:.2%} of the tokens outside the bounds, mean squared"
    )


@pytest.mark.parametrize("of_method", [{"frac_reward_zero_std": 1.0}, {"value/loss": 0.0}])
def test_a_run_whose_rewards_never_differ_says_that_it_learned_nothing(
    of_method: dict[str, float], again: Path, tmp_path: Path
) -> None:
    """Of the same completions of a prompt, and with a critic."""
    (tmp_path / "metrics.jsonl").write_text(
        "".join(
            f"{json.dumps(line | {'frac_reward_zero_std': 0.5, 'grad_norm': 0.0} | of_method)}\n"
            for line in steps_of(again)
        )
    )
    assert "nothing was learned" in last_screen(tmp_path, 3)[0]


def test_a_run_whose_completions_were_all_masked_says_that_it_learned_nothing(
    again: Path, tmp_path: Path
) -> None:
    """There are no ratios then, and nothing else would say so."""
    lines = [
        {key: value for key, value in line.items() if not key.startswith("ratio/")}
        | {"trained_tokens": 0, "grad_norm": 0.0}
        for line in steps_of(again)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    said = last_screen(tmp_path, 3)[0]
    assert "nothing was learned; raise max_completion_length" in said


def test_inspect_reads_the_completions_of_a_checkpoint(
    again: Path, recipes: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    stored = again / "checkpoints" / "step-00000002" / "rollouts.jsonl"
    model = str(recipes["packed"].parent / "model")
    assert main(["inspect", str(stored), "--model", model, "--json", "--rows", "99"]) == 0
    shown = json.loads(capsys.readouterr().out)["rows"]
    lines = [json.loads(line) for line in stored.read_text().splitlines()]
    assert len(shown) == len(lines) == PROMPTS * GENERATIONS
    for row, line in zip(shown, lines, strict=True):
        text = "".join(token["text"] for token in row["tokens"] if token["trained"])
        plain = re.match("[ -~]*", line["completion"])  # what follows may be half of a character
        assert plain is not None and text.startswith(plain[0])
        assert len(line["sampled"]["token_ids"]) == len(line["sampled"]["log_probabilities"])
    assert "rollouts.jsonl" in json.loads((stored.parent / "manifest.json").read_text())["files"]
    assert not (again / "checkpoints" / "step-00000003" / "rollouts.jsonl").exists()


def test_another_num_iterations_cannot_train_on_half_of_the_completions(
    again: Path, recipes: dict[str, Path], folder: Path
) -> None:
    keys = [
        "num_iterations=2",
        "steps_per_generation=2",
        "max_steps=4",
        "eval_datasets=[]",
        "allow_changed_recipe=true",
        f"resume_from_checkpoint={again}/checkpoints/step-00000003",
        f"output_dir={folder}/changed",
    ]
    said = (
        "holds no completions for step 4, which trains on what step 1 sampled; set num_iterations"
    )
    with pytest.raises(UserError, match=said):
        fine_tune(read_recipe(str(recipes["packed"]), keys), read_sharding("single", None, {}))


def test_the_report_shows_what_was_sampled_and_its_rewards(runs: Callable[..., Path]) -> None:
    run = runs(1, "single", "packed")
    page = render_page([read_run(run)], [None])
    of_size = page[page.index("Effective sample size") :]
    labels = re.findall(r">([\d.]+)</span>", of_size[: of_size.index("</figure>")])
    assert labels[:6] == ["0", "20", "40", "60", "80", "100"]
    of_ratios = page[page.index("Probability ratios <small>") :]
    shares = re.findall(
        r'<i style="width:([\d.]+)%"></i>', of_ratios[: of_ratios.index("</table>")]
    )
    assert len(shares) == 3 * len(RATIO_SHARES) and shares.count("100.0") == 3, shares
    for title in (
        "Reward",
        "Groups without signal",
        "Length of completions",
        "Entropy",
        "Largest raw log-ratio",
        "Ratios outside the bounds",
    ):
        assert f">{title}<" in page or f"{title} <" in page, title
    assert (
        page.count("<summary>step ") == STEPS
        and "even 0." in page
        and html.escape(lines_of(run)[0]["completion"]) in page
    )


FAMILIES: dict[
    str, tuple[dict[str, Any], float, float]
] = {  # with the bounds of the mean and of the largest log-ratio
    "gemma3_text": (
        {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]},
        5e-6,
        5e-5,
    ),
    "mixtral": ({"num_local_experts": 4, "num_experts_per_tok": 2}, 5e-6, 5e-5),
    # One token at a time is another computation of a recurrence than a chunk of them.
    "qwen3_5_text": (
        {
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
        },
        5e-6,
        5e-5,
    ),
}


@pytest.mark.slow
def test_windows_experts_and_recurrent_layers_are_sampled_as_they_are_trained(
    folder: Path, recipes: dict[str, Path]
) -> None:
    listed = []
    for family, (config, _, _) in FAMILIES.items():
        model = make_model(
            folder / f"model-{family}", model_type=family, initializer_range=0.3, **config
        )
        keys = [
            f"model_name_or_path={model}",
            f"output_dir={folder}/of-{family}",
            "packing=false",
            "eval_datasets=[]",
        ]
        listed.append((recipes["packed"], write_config(folder, "single"), keys))
    train_all(folder, listed, ranks=1)
    for family, (_, mean, largest) in FAMILIES.items():
        for line in steps_of(folder / f"of-{family}"):
            assert line["log_ratio/mean"] < mean and line["log_ratio/max"] < largest, family


@pytest.mark.slow
def test_a_real_model_learns_a_format_on_gsm8k(shared: Path, tmp_path: Path) -> None:
    """A mechanical test: stories260k, which cannot calculate, learns to end what it writes after a question as a sentence ends."""
    for split, rows in (("train", 256), ("test", 64)):
        lines = (
            (shared / "data" / f"gsm8k_{split}.jsonl").read_text().splitlines(keepends=True)[:rows]
        )
        (tmp_path / f"{split}.jsonl").write_text("".join(lines))
    (tmp_path / "my_rewards.py").write_text(
        "def sentence(completions, **_):\n    return [float(text.rstrip().endswith(('.', '!', '\"'))) for text in completions]\n"
    )
    source = {"type": "prompt_completion", "prompt_column": "question"}
    keys = {
        "method": "grpo",
        "model_name_or_path": str(shared / "models" / "stories260k"),
        "rewards": ["my_rewards.py:sentence"],
        "max_completion_length": 24,
        "datasets": [{"path": str(tmp_path / "train.jsonl"), **source}],
        "eval_datasets": [{"path": str(tmp_path / "test.jsonl"), **source}],
        "dataset_cache_dir": str(tmp_path / "cache"),
        "max_length": 480,
        "global_batch_size": 8,
        "per_device_train_batch_size": 8,
        "max_steps": 20,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "export_at_end": False,
    }
    (tmp_path / "gsm8k.yaml").write_text(yaml.safe_dump(keys))
    overrides = [f"output_dir={tmp_path / 'run'}"]
    train_all(
        tmp_path, [(tmp_path / "gsm8k.yaml", write_config(tmp_path, "single"), overrides)], ranks=1
    )
    before, after = (
        line["eval_reward"] for line in read(tmp_path / "run") if "eval_reward" in line
    )
    assert before < 0.4 and after > 0.9
    assert all(
        line["log_ratio/mean"] < 5e-6 and line["log_ratio/max"] < 5e-5
        for line in steps_of(tmp_path / "run")
    )


BAD = """
def raises(completions, **_):
    return [1.0 / len(each[0]["content"]) for each in completions]


def says_nan(completions, **_):
    return [float("nan") for _ in completions]
"""


@pytest.mark.parametrize("dry_run", [False, True])
@pytest.mark.parametrize("kind", ["argument", "name", "tool", "answer"])
def test_rewards_are_compared_with_the_data_before_the_model_is_loaded(
    kind: str, dry_run: bool, recipes: dict[str, Path], tmp_path: Path
) -> None:
    """TRL's users write `solution`. The model has no weights, which nobody comes to see."""
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "What?", "level": 1}\n' * 26)
    mine = tmp_path / "mine.py"
    shutil.copytree(recipes["packed"].parent / "model", tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    of_prompts = f"datasets=[{{path: {tmp_path}/rows.jsonl}}]"
    keys, sentence = {
        "argument": ([f"rewards=[{mine}:right]"], r"mine.py:2: right: takes solution, and the data have no such column \(they have answer, messages\); rename"),
        "name": ([f"rewards=[{mine}:wright]"], "mine.py: no function or class wright; did you mean right"),
        "tool": ([f"rewards=[{mine}:fine]", f"tools=[{mine}:multiplied]"], "mine.py: no function or class multiplied"),
        "answer": (["rewards=[number]", of_prompts, "eval_datasets=[]"], r"number: takes answer, and the data have no such column \(they have level\)"),
    }[kind]  # fmt: skip
    keys += [
        "reward_weights=[1]",
        f"model_name_or_path={tmp_path}/model",
        f"output_dir={tmp_path}/run",
    ]
    with pytest.raises(UserError, match=sentence) as error:
        fine_tune(
            read_recipe(str(recipes["packed"]), keys),
            read_sharding("single", None, {}),
            dry_run=dry_run,
        )
    assert "\n" not in str(error.value)


MINE = """
def right(completions, solution, scale=1.0, **columns):
    return [1.0 for _ in completions]


def fine(prompts, completions, completion_ids, trainer_state, log_metric, log_extra, *more, answer, level=None, **columns):
    return [1.0 for _ in completions]
"""


def dry_run(recipe: Path, *keys: str) -> None:
    sharding = read_sharding("single", None, {})
    fine_tune(read_recipe(str(recipe), list(keys)), sharding, dry_run=True)


@pytest.mark.parametrize("names", [("few", "many"), ("many", "few")])
def test_rewards_are_compared_with_the_columns_of_every_source(
    names: tuple[str, ...], recipes: dict[str, Path], tmp_path: Path
) -> None:
    """Only `few` has the column that the reward takes, and its rows may stand behind 120 others."""
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "many.jsonl").write_text('{"prompt": "What?", "level": 1}\n' * 120)
    (tmp_path / "few.jsonl").write_text('{"prompt": "What?", "solution": "4"}\n' * 2)
    sources = ", ".join(f"{{path: {tmp_path}/{name}.jsonl}}" for name in names)
    keys = [f"datasets=[{sources}]", "eval_datasets=[]", "reward_weights=[1]"]
    dry_run(recipes["packed"], *keys, f"rewards=[{tmp_path}/mine.py:right]")


def test_a_dry_run_asks_the_rewards(
    recipes: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One fails at an empty completion, another's answer is no number."""
    (tmp_path / "bad.py").write_text(BAD)
    dry_run(recipes["packed"])
    assert re.search(r"data +\d+ examples, [\d,]+ tokens of prompts\n", capsys.readouterr().out)
    with pytest.raises(UserError, match=r"bad.py:3: raises, a reward: ZeroDivisionError"):
        dry_run(recipes["packed"], f"rewards=[{tmp_path / 'bad.py'}:raises, length]")
    with pytest.raises(UserError, match=r"says_nan: returned nan for the completion"):
        dry_run(recipes["packed"], f"rewards=[{tmp_path / 'bad.py'}:says_nan, length]")


@pytest.mark.slow
def test_a_dry_run_asks_the_server(recipes: dict[str, Path]) -> None:
    """It serves another model, or is not there."""
    with serving(recipes["packed"].parent / "teacher") as server:
        with pytest.raises(
            UserError, match=r"vllm_server_base_url: .*: serves .*teacher, but .*model is trained"
        ):
            dry_run(recipes["packed"], f"vllm_server_base_url={server.url}")
        url = server.url
    with pytest.raises(UserError, match=r"start vLLM 0\.32 with"):
        dry_run(recipes["packed"], f"vllm_server_base_url={url}")
