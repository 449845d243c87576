"""The plan of answering held-out prompts, beside what their generation allocates."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from finetune.config.layout import Sharding
from finetune.config.reader import read_recipe
from finetune.data.examples import Prompt
from finetune.models.documents import install_attention
from finetune.plan.architecture import read_architecture
from finetune.plan.forward_memory import answer_points
from finetune.plan.run_spec import RunSpec
from finetune.plan.temporary_memory import Snapshot
from finetune.training.evaluate import answer
from tests.conftest import make_tokenizer
from tests.plan.traced import allocated_peak

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}


@pytest.mark.parametrize(
    ("count", "length", "vocabulary"), [(8, 200, 512), (200, 80, 512), (200, 16, 24_000)]
)
def test_answers_take_no_more_than_is_planned(count: int, length: int, vocabulary: int) -> None:
    """Where examples are as long as they may be; not more for more prompts than go at once."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = CONFIG | {"vocab_size": vocabulary}
    keys = [f"exact_match_samples={count}", "eval_split_size=0.5", f"max_length={length}"]
    recipe = read_recipe(None, ["model_name_or_path=a/b", "datasets=[{path: a/b}]", *keys])
    spec = RunSpec(
        architecture=read_architecture(config, "config.json"),
        recipe=recipe,
        sharding=Sharding(layout="single", mixed_precision="no"),
        ranks=1,
        device="cpu",
    )
    (point,) = answer_points(spec, Snapshot("between steps"))
    planned = point.activations + point.loss + point.temporaries
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).eval()
    install_attention(model)
    world: Any = SimpleNamespace(
        tensor_group_count=1, tensor_group_index=0, stage_size=1, size=1,
        sharding=spec.sharding, device=torch.device("cpu"), gather=lambda value: [value],
    )  # fmt: skip
    answered = length // 4
    prompt = Prompt([*range(3, 3 + length - answered)], "x" * answered)
    taken = allocated_peak(lambda: answer(model, [prompt] * count, make_tokenizer(), world))
    assert 0.3 * planned < taken < planned
