"""What LLaMA-Factory counts otherwise: the rows of an epoch, the labels of a step, the steps of a decay.

Each was found by training with both, in float32 on a CPU, on as many rows as a step takes.
"""

import pytest
import torch
from transformers import get_scheduler

from finetune.config.schedules import Schedule, compute_learning_rate
from finetune.convert.chat_templates import TEMPLATES
from finetune.convert.factory import (
    DECAYS_AFTER,
    DECAYS_EARLY,
    FIRST_COUNTED,
    ROW_FOR_EACH_ANSWER,
    SPLIT_TEMPLATES,
)
from finetune.convert.objectives import ALWAYS_SIGMOID, SIGMOID_OF_MEANS
from finetune.data.formats import DatasetSource, parse_row
from finetune.data.render import render_turns
from finetune.data.tokenizer import make_renderer, read_template
from tests.conftest import make_tokenizer
from tests.convert.conftest import Convert, said

ROWS = {"model_name_or_path": "org/model", "dataset": "a"}
WARMUP_STABLE_DECAY = ROWS | {
    "stage": "sft",
    "template": "llama3",
    "lr_scheduler_type": "warmup_stable_decay",
}


def test_llama_factorys_warmup_stable_decay_decays_over_two_thirds(convert: Convert) -> None:
    """create_custom_scheduler of its train/trainer_utils.py; the decay is at most a step longer or shorter here."""
    steps, warmup = 300, 30
    file = WARMUP_STABLE_DECAY | {"warmup_ratio": 0.1}
    recipe = convert(file).recipe
    stable = (steps - warmup) // 3
    theirs = get_scheduler(
        "warmup_stable_decay",
        torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0),
        num_warmup_steps=warmup,
        num_training_steps=steps,
        scheduler_specific_kwargs={
            "num_stable_steps": stable,
            "num_decay_steps": steps - warmup - stable,
        },
    )
    ours = Schedule(
        peak=1.0,
        steps=steps,
        warmup_steps=warmup,
        kind=recipe["lr_scheduler_type"],
        arguments=recipe["lr_scheduler_kwargs"],
    )
    for step in range(warmup, steps):
        share_left = theirs.lr_lambdas[0](step)
        assert compute_learning_rate(step, ours) == pytest.approx(share_left, abs=1e-6)
    assert DECAYS_AFTER in said(convert(WARMUP_STABLE_DECAY | {"warmup_steps": 20}))
    named = {"lr_scheduler_kwargs": {"num_decay_steps": 50}}
    found = convert(WARMUP_STABLE_DECAY | named)
    assert found.recipe["lr_scheduler_kwargs"] == {"num_decay_steps": 50}
    assert DECAYS_EARLY in said(found)


@pytest.mark.parametrize("name", sorted(set(TEMPLATES.values())))
def test_templates_that_make_a_row_of_each_answer_are_known(name: str) -> None:
    """LLaMA-Factory trains all answers of a conversation in one row."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = read_template(name)
    turns = [("user", "Hello"), ("assistant", "Hi."), ("user", "And?"), ("assistant", "No.")]
    row = {"messages": [{"role": role, "content": text} for role, text in turns]}
    document = parse_row(row, DatasetSource(path="rows.jsonl")).document
    assert document is not None
    is_split = len(render_turns(document, make_renderer(tokenizer, True))) > 1
    assert is_split == (name in SPLIT_TEMPLATES)


def test_a_row_for_each_answer_is_said_of_llama_factorys_thinking_templates(
    convert: Convert,
) -> None:
    file = ROWS | {"stage": "sft"}
    assert ROW_FOR_EACH_ANSWER in said(convert(file | {"template": "qwen3"}))
    assert ROW_FOR_EACH_ANSWER not in said(convert(file | {"template": "qwen3_nothink"}))
    assert ROW_FOR_EACH_ANSWER not in said(convert(file | {"template": "qwen3", "stage": "dpo"}))


def test_llama_factory_counts_the_first_label_of_a_row(convert: Convert) -> None:
    assert FIRST_COUNTED in said(convert(ROWS | {"stage": "pt"}))
    chat = ROWS | {"stage": "sft", "template": "llama3"}
    assert FIRST_COUNTED in said(convert(chat | {"train_on_prompt": True}))
    assert FIRST_COUNTED not in said(convert(chat))


def test_ipo_of_llama_factory_is_sigmoids_loss_of_means(convert: Convert) -> None:
    file = ROWS | {"stage": "dpo", "template": "llama3"}
    assert SIGMOID_OF_MEANS in said(convert(file | {"pref_loss": "ipo"}))
    assert ALWAYS_SIGMOID in said(convert(file | {"pref_loss": "hinge"}))
