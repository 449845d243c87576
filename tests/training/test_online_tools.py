"""Completions of several turns through the whole command: a model that calls a tool in some of them, and guesses in others."""

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from finetune.config.reader import RECIPES
from tests.conftest import slow_but
from tests.ranks import launch_ranks
from tests.rollout.stand_in_vllm import serving
from tests.training import online_papers
from tests.training.calling import (
    EVERY,
    GENERATIONS,
    MOST,
    PROMPTS,
    STEPS,
    train_layouts,
    write_short_run,
)
from tests.training.layouts import assert_bit_equal, steps_of, train_all, write_config
from tests.training.test_online import KILLED, lines_of

TOOLS = '''
def multiply(a: int, b: int) -> int:
    """Multiplies two whole numbers.

    Args:
        a: A factor.
        b: A factor.
    """
    print("called")
    if a % 2:
        raise ValueError("an odd number")
    return a * b


def even(completions, completion_ids, **columns):
    """Tokens with an even id; completions as TRL gives them."""
    for each in completions:
        assert [message["role"] for message in each] == ["assistant", "tool"] * (len(each) // 2) + ["assistant"]
        assert all("tool_calls" in message for message in each[:-1:2]), each
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]
'''
AGAIN = ["num_iterations=2", "importance_sampling_correction=token_truncate", "max_steps=4"]


@pytest.fixture(scope="module")
def recipe(folder: Path, caller: Path) -> Path:
    (folder / "my_tools.py").write_text(TOOLS)
    products = RECIPES / "quickstart"
    return write_short_run(
        folder / "tools.yaml",
        caller,
        datasets=[{"path": str(products / "products_train.jsonl")}],
        eval_datasets=[{"path": str(products / "products_heldout.jsonl"), "max_samples": 7}],
        rewards=["my_tools.py:even"],
        tools=["my_tools.py:multiply"],
        max_length=100,
    )


LAYOUTS = [*EVERY, (3, "full_shard")]
# test_online_environments.py has tools on two ranks, in a run that is killed, and sampled by a server.
ALONE = EVERY[:1]


@pytest.fixture(scope="module")
def runs(folder: Path, recipe: Path, slow_too: bool) -> Callable[..., Path]:
    """(ranks, layout) -> the run's folder."""
    return train_layouts(folder, recipe, LAYOUTS if slow_too else ALONE)


@pytest.mark.parametrize(("ranks", "layout"), slow_but(ALONE, LAYOUTS))
def test_every_layout_has_the_same_turns_and_losses(
    ranks: int, layout: str, runs: Callable[..., Path]
) -> None:
    one, run = runs(1, "single"), runs(ranks, layout)
    mine, theirs = lines_of(run), lines_of(one)
    assert len(mine) == STEPS * PROMPTS * GENERATIONS
    for name in ("token_ids", "tool_mask", "parts", "rewards", "ended"):
        assert [line.get(name) for line in mine] == [line.get(name) for line in theirs], name
    for line, truth in zip(steps_of(run), steps_of(one), strict=True):
        for name in (
            "grad_norm",
            "reward",
            "entropy",
            "completions/mean_length",
            "tools/call_frequency",
        ):
            assert line[name] == pytest.approx(truth[name], rel=1e-5), (line["step"], name)
        assert line["loss"] == pytest.approx(truth["loss"], rel=1e-5, abs=1e-6)
        assert 0 < line["log_ratio/mean"] < 5e-6 and line["log_ratio/max"] < 5e-5


def test_what_tools_say_is_counted_and_not_trained_on(runs: Callable[..., Path]) -> None:
    """From what completions.jsonl says: the mask, the metrics, and the first loss by transformers and the paper."""
    run = runs(1, "single")
    lines = [line for line in lines_of(run) if line["step"] == 1]
    called = [line for line in lines if "parts" in line]
    assert called and len(called) < len(lines), "some call the tool and some guess"
    for line in called:
        asked, said = line["parts"][:2]
        assert asked.startswith('<tool_call>{"name": "multiply"') and asked.endswith(
            "</tool_call><|end_of_turn|>"
        )
        a, b = json.loads(asked[len("<tool_call>") : asked.index("</tool_call>")])[
            "arguments"
        ].values()
        result = str({"error": "an odd number"}) if a % 2 else str(a * b)
        assert said == f"<|tool|>{result}<|end_of_turn|><|assistant|>"
        assert (
            "".join(line["parts"]) == line["completion"]
            and len(line["tool_mask"]) == len(line["token_ids"]) <= MOST
        )
    masks = [line.get("tool_mask", [1] * len(line["token_ids"])) for line in lines]
    results = [part for line in called for part in line["parts"][1::2]]
    first = steps_of(run)[0]
    assert first["completions/mean_length"] == pytest.approx(sum(map(sum, masks)) / len(lines))
    assert first["tools/call_frequency"] == pytest.approx(len(results) / len(lines))
    assert first["tools/failure_frequency"] == pytest.approx(
        sum("error" in each for each in results) / len(results)
    )
    assert 0 < first["tools/failure_frequency"] < 1

    rewards = [
        sum(token % 2 == 0 for token in line["token_ids"]) / len(line["token_ids"])
        for line in lines
    ]
    assert [line["rewards"]["even"] for line in lines] == pytest.approx(rewards)
    advantages = online_papers.advantages(rewards, GENERATIONS, "dapo", "group")
    folder = Path(yaml.safe_load((run / "recipe.yaml").read_text())["model_name_or_path"])
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(folder),
        AutoTokenizer.from_pretrained(folder),
    )
    new = []
    for line, mask in zip(lines, masks, strict=True):
        prompt = tokenizer(line["prompt"], add_special_tokens=False).input_ids
        ids = torch.tensor([prompt + line["token_ids"]])
        logs = (
            model(ids)
            .logits[0, len(prompt) - 1 : -1]
            .log_softmax(-1)
            .gather(1, ids[0, len(prompt) :, None])[:, 0]
        )
        new.append(logs[torch.tensor(mask) == 1])
    loss = online_papers.paper(
        "dapo", new, [each.detach() for each in new], advantages, low=0.2, high=0.2, budget=MOST
    )
    loss.backward()  # type: ignore[no-untyped-call]
    norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    assert first["loss"] == pytest.approx(loss.item(), rel=1e-4, abs=1e-6)
    assert first["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)


DEATHS = {("once", "tools"): 2, ("again", "tools"): 2, ("again", "step"): 2}


@pytest.mark.slow
@pytest.mark.parametrize(("case", "place"), DEATHS)
def test_a_run_that_is_killed_while_a_tool_runs_ends_as_if_nobody_had(
    case: str, place: str, recipe: Path, folder: Path
) -> None:
    """Also between two updates on the same completions, whose mask is in the checkpoint."""
    keys = [
        "save_steps=1",
        "save_total_limit=9",
        "eval_datasets=[]",
        *(AGAIN if case == "again" else []),
    ]
    whole, run, config = (
        folder / f"unkilled-{case}",
        folder / f"killed-{case}-{place}",
        write_config(folder, "single"),
    )

    def live(where: str, output: Path) -> int:
        arguments = [
            f"{where},{DEATHS.get((case, where))}",
            str(recipe),
            str(config),
            *keys,
            f"output_dir={output}",
        ]
        finished = launch_ranks(KILLED, arguments, ranks=1)
        assert finished.returncodes[0] in (0, -signal.SIGKILL), finished.outputs[0][-3000:]
        return finished.returncodes[0]

    if not whole.exists():
        assert live("nowhere", whole) == 0
    assert live(place, run) == -signal.SIGKILL
    newest = sorted((run / "checkpoints").glob("step-*"))[-1]
    kept = newest / "rollouts.jsonl"
    assert kept.exists() == (place == "step")
    assert not kept.exists() or any(
        json.loads(line)["sampled"]["tool_mask"] for line in kept.read_text().splitlines()
    )
    assert live("nowhere", run) == 0
    assert_bit_equal(run, whole, STEPS if case == "once" else 4)
    assert lines_of(run) == lines_of(whole)


@pytest.mark.slow
def test_a_server_samples_turns_as_the_model_itself_does(
    recipe: Path, folder: Path, caller: Path, runs: Callable[..., Path]
) -> None:
    """Greedy answers to held-out prompts are the same; of what is drawn the server sees each turn as a longer prompt."""
    model = caller / "sft" / "export"
    with serving(model) as server:
        keys = [
            f"vllm_server_base_url={server.url}",
            f"output_dir={folder / 'server'}",
            "max_steps=1",
        ]
        train_all(folder, [(recipe, write_config(folder, "single"), keys)], ranks=1)
        asked = [body["prompt"] for body, _ in server.asked]
    line, own = steps_of(folder / "server")[0], steps_of(runs(1, "single"))[0]
    assert (
        line["log_ratio/mean"] < 5e-6
        and line["log_ratio/max"] < 5e-5
        and line["tools/call_frequency"] > 0
    )
    assert own["step"] == line["step"] == 1
    called = [each for each in lines_of(folder / "server") if "parts" in each]
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    for each in called:
        prompt = tokenizer(each["prompt"], add_special_tokens=False).input_ids
        before = max(i for i, by in enumerate(each["tool_mask"]) if not by) + 1
        assert prompt + each["token_ids"][:before] in asked
