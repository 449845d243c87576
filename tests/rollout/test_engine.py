"""The embedded engine's cache: prompts of all lengths, read in parts, give what each gives alone under transformers."""

import copy
from typing import Any, cast

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from finetune.config.families import FAMILIES as RULED
from finetune.constants import PROMPTS_AT_ONCE
from finetune.models.documents import install_attention
from finetune.rollout.embedded import EmbeddedEngine
from finetune.rollout.engine import Ended, Request, Sampled, Sampling
from tests.models.families import FAMILIES, VOCABULARY, build, ours
from tests.models.test_recurrent import RECURRENT
from tests.models.test_recurrent import build as tiny

MOST, STOP = 10, 7


class Alone:
    """A world of one process."""

    device = torch.device("cpu")


@pytest.mark.parametrize("key_value_heads", [1, 2, 4])
@pytest.mark.parametrize("packed", [True, False])
def test_rows_of_all_lengths_have_the_log_probabilities_of_a_plain_forward(
    packed: bool, key_value_heads: int
) -> None:
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 40,
    }
    config = AutoConfig.for_model(
        "llama", **sizes, num_key_value_heads=key_value_heads, initializer_range=0.5
    )
    model: Any = AutoModelForCausalLM.from_config(config).eval()
    random = np.random.default_rng(0)
    lengths = [3, 30, *random.integers(1, 25, PROMPTS_AT_ONCE + 5).tolist()]
    prompts = [tuple(random.integers(8, 40, length).tolist()) for length in lengths]
    requests = [
        Request(prompt, (place, again))
        for place, prompt in enumerate(prompts)
        for again in range(2)
    ]
    world: Any = Alone()
    sampler = copy.deepcopy(model)
    if packed:
        install_attention(sampler)
    found = EmbeddedEngine(sampler, world, [STOP], 100).sample(
        requests, Sampling(max_tokens=MOST, temperature=0.9)
    )
    assert {each.ended for each in found} == {*Ended} - {Ended.ABORTED}
    assert_as_plain(model, requests, found, 0.9)


@pytest.mark.parametrize("family", [*FAMILIES, "nemotron", "qwen3_5_text"])
def test_every_family_is_sampled_as_it_computes(family: str) -> None:
    """Windows, capped scores, sinks, experts and recurrent layers among them, with prompts longer than a window."""
    model = build(family).eval()
    sampler = ours(copy.deepcopy(model)).eval()
    random, world = np.random.default_rng(0), cast(Any, Alone())
    prompts = [tuple(random.integers(8, VOCABULARY, length).tolist()) for length in (3, 9, 14, 22)]
    requests = [
        Request(prompt, (place, again))
        for place, prompt in enumerate(prompts)
        for again in range(2)
    ]
    assert_as_plain(
        model,
        requests,
        EmbeddedEngine(sampler, world, [STOP], 5).sample(requests, Sampling(max_tokens=MOST)),
    )


@pytest.mark.slow
@pytest.mark.parametrize("family", RECURRENT)
def test_recurrent_families_are_sampled_as_they_compute_or_refused(family: str) -> None:
    """By the log-probabilities alone: qwen3_next's of a token at a time are 1e-4 from those of a chunk.

    A family that is refused may be computed right by a newer transformers (mamba2 by 5.24).
    """
    model = tiny(family).eval()
    requests = [Request(tuple(range(8, 8 + length)), (length,)) for length in (3, 9, 14, 22)]
    recurrence, world = RULED[family].recurrence, cast(Any, Alone())
    assert recurrence is not None
    try:
        found = EmbeddedEngine(ours(copy.deepcopy(model)).eval(), world, [STOP], 5).sample(
            requests, Sampling(max_tokens=MOST)
        )
        errors = [
            log_probabilities(model, request, each.token_ids)[0]
            - torch.tensor(each.log_probabilities)
            for request, each in zip(requests, found, strict=True)
        ]
        is_close = bool(torch.cat(errors).abs().max() < 5e-4)
    except (AttributeError, ValueError):  # a cache of another kind
        is_close = False
    assert is_close or not recurrence.can_be_sampled


def log_probabilities(
    model: Any, request: Request, token_ids: list[int], temperature: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """By a forward of transformers without a cache: of each token, and of all tokens in its place."""
    ids = torch.tensor([[*request.prompt_ids, *token_ids]])
    with torch.no_grad():
        logits = model(ids, use_cache=False).logits[0, len(request.prompt_ids) - 1 : -1]
    every = (logits / temperature).log_softmax(-1)
    return every.gather(1, torch.tensor(token_ids)[:, None])[:, 0], every


def assert_as_plain(
    model: Any, requests: list[Request], found: list[Sampled], temperature: float = 1.0
) -> None:
    """What was sampled has the log-probabilities and the entropy of a forward of transformers without a cache."""
    for request, each in zip(requests, found, strict=True):
        assert (
            each.token_ids.count(STOP) == (each.ended is Ended.STOPPED)
            and len(each.token_ids) <= MOST
        )
        expected, scores = log_probabilities(model, request, each.token_ids, temperature)
        torch.testing.assert_close(
            torch.tensor(each.log_probabilities), expected, rtol=0, atol=5e-5
        )
        assert each.entropy == pytest.approx(-(scores.exp() * scores).sum().item(), rel=1e-4)
