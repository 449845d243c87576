"""The embedded engine's cache: prompts of all lengths, read in parts, give what each gives alone under transformers."""

from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from finetune.constants import PROMPTS_AT_ONCE
from finetune.rollout.embedded import EmbeddedEngine
from finetune.rollout.engine import Ended, Request, Sampling

MOST, STOP = 10, 7


class Alone:
    """A world of one process."""

    device = torch.device("cpu")


@pytest.mark.parametrize("key_value_heads", [1, 2, 4])
def test_rows_of_all_lengths_have_the_log_probabilities_of_a_plain_forward(key_value_heads: int) -> None:
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 40,
    }
    config = AutoConfig.for_model("llama", **sizes, num_key_value_heads=key_value_heads, initializer_range=0.5)
    model: Any = AutoModelForCausalLM.from_config(config).eval()
    random = np.random.default_rng(0)
    lengths = [3, 30, *random.integers(1, 25, PROMPTS_AT_ONCE + 5).tolist()]
    prompts = [tuple(random.integers(8, 40, length).tolist()) for length in lengths]
    requests = [Request(prompt, (place, again)) for place, prompt in enumerate(prompts) for again in range(2)]
    world: Any = Alone()
    found = EmbeddedEngine(model, world, [STOP], 100).sample(requests, Sampling(max_tokens=MOST, temperature=0.9))
    assert {each.ended for each in found} == {*Ended}
    for request, each in zip(requests, found, strict=True):
        assert each.token_ids.count(STOP) == (each.ended is Ended.STOPPED) and len(each.token_ids) <= MOST
        ids = torch.tensor([[*request.prompt_ids, *each.token_ids]])
        with torch.no_grad():
            scores = (model(ids).logits[0, len(request.prompt_ids) - 1 : -1] / 0.9).log_softmax(-1)
        expected = scores.gather(1, torch.tensor(each.token_ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(each.log_probabilities), expected, rtol=0, atol=5e-5)
        assert each.entropy == pytest.approx(-(scores.exp() * scores).sum().item(), rel=1e-4)
