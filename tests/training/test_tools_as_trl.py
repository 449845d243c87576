"""The turns of TRL's GRPOTrainer with the same tool, where its model samples what a run has sampled: tokens, mask, messages, loss."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from finetune.config.reader import read_recipe
from finetune.data.tokenizer import load_tokenizer
from finetune.data.tool_calls import make_tool_turns
from tests.rollout.test_tools import make_turns
from tests.training.calling import (
    GENERATIONS,
    PROMPTS,
    check_first_step,
    pad,
    sample_again,
    trl_arguments,
)
from tests.training.layouts import steps_of
from tests.training.test_online import lines_of
from tests.training.test_online_tools import TOOLS, recipe, runs

pytestmark = pytest.mark.slow
pytest.importorskip("trl")
__all__ = ["recipe", "runs"]  # the fixtures


def test_trl_makes_the_same_turns_of_what_was_sampled_and_the_same_loss(
    recipe: Path, runs: Callable[..., Path], tmp_path: Path
) -> None:
    from datasets import Dataset
    from trl import GRPOTrainer

    run, read = runs(1, "single"), read_recipe(str(recipe), [])
    tokenizer = load_tokenizer(read.model, read.data, read.rollout.tools)
    tokenizer.response_template = make_tool_turns(
        read, tokenizer
    ).response_template  # TRL knows no such chat template
    tools: dict[str, Any] = {}
    exec(TOOLS, tools)
    lines = [line for line in lines_of(run) if line["step"] == 1]
    masks = [line.get("tool_mask", [1] * len(line["token_ids"])) for line in lines]
    args = trl_arguments(tmp_path / "trl", len(lines))
    trainer = GRPOTrainer(
        str(read.model.model_name_or_path),
        lambda completions, **_: [float(len(each)) for each in completions],
        args=args,
        train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": "a"}]}] * 4),
        processing_class=tokenizer,
        tools=[tools["multiply"]],
    )
    turns, given = sample_again(trainer, lines, masks)
    trainer._sync_tool_dicts = [{"multiply": tools["multiply"]}] * len(lines)
    trainer._async_tool_dicts = [{}] * len(lines)
    questions = [
        line["prompt"].partition("<|user|>")[2].partition("<|end_of_turn|>")[0] for line in lines
    ]
    prompts = [[{"role": "user", "content": question}] for question in questions]
    prompt_ids, completion_ids, tool_mask, completions, *_ = trainer._generate(prompts)

    assert [tokenizer.decode(ids) for ids in prompt_ids] == [line["prompt"] for line in lines]
    assert completion_ids == [line["token_ids"] for line in lines] and tool_mask == masks
    assert len(given) == 2 and 0 < len(given[1]) < len(lines)
    roles = [[message["role"] for message in each] for each in completions]
    assert roles == [["assistant", "tool"] * (len(each) - 1) + ["assistant"] for each in turns]
    metrics = trainer._metrics["train"]
    first = steps_of(run)[0]
    for name in ("tools/call_frequency", "tools/failure_frequency", "completions/mean_length"):
        assert metrics[name] == [pytest.approx(first[name])], name

    whole = pad([[1] * len(ids) for ids in completion_ids])
    inputs = {
        "prompt_ids": pad(prompt_ids, left=True),
        "prompt_mask": pad([[1] * len(ids) for ids in prompt_ids], left=True),
        "completion_ids": pad(completion_ids),
        "completion_mask": whole,
        "tool_mask": pad(tool_mask, 1),
        "advantages": torch.tensor([line["advantage"] for line in lines]),
        "num_items_in_batch": (whole * pad(tool_mask, 1)).sum(),
    }
    assert len(lines) == PROMPTS * GENERATIONS
    check_first_step(first, trainer, inputs)


@pytest.mark.parametrize(
    ("template", "end"),
    [
        ("qwen", "<|im_end|>"),
        ("chatml", "<|im_end|>"),
        ("hermes", "<|im_end|>"),
        ("llama3.1", "<|eot_id|>"),
    ],
)
def test_trl_writes_the_same_tokens_after_a_result(template: str, end: str, tmp_path: Path) -> None:
    """TRL takes the difference of two conversations, which it renders without tools."""
    from trl import GRPOTrainer

    tokenizer, turns = make_turns(tmp_path, template, "double", special_tokens={"eos_token": end})
    theirs: Any = SimpleNamespace(
        processing_class=tokenizer,
        _tokenizer=tokenizer,
        _is_vlm=False,
        chat_template=None,
        chat_template_kwargs={},
    )
    said = [
        {"role": "tool", "name": "double", "content": content} for content in ("8", "so many:\n 10")
    ]
    for messages in (said[:1], said[1:], said):
        assert turns.encode_results(messages, {}) == GRPOTrainer._get_tool_suffix_ids(
            theirs, messages
        )
