"""Log-probabilities in chunks equal those of whole logits, in value and in every gradient, and take the memory of a chunk."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from finetune.constants import IGNORE_INDEX
from finetune.models.cross_entropy import CrossEntropyHead
from finetune.models.log_probabilities import (
    head_top,
    linear_log_probabilities,
    target_log_probabilities,
)
from finetune.models.loss_chunks import ChunkOptions, HeadProduct, LogitTransform
from tests.models.families import relative_error

EXACT = 1e-6  # of the largest value
TOKENS, HIDDEN, VOCABULARY = 101, 24, 67
TRANSFORMS = [
    LogitTransform(),
    LogitTransform(scale=0.3),
    LogitTransform(2.5, 3.0, temperature=0.7),
]


def problem(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """hidden, weight, bias, labels, trained positions (the last few without a label), and a gradient for each of these."""
    generator = torch.Generator().manual_seed(0)
    hidden = (
        torch.randn(TOKENS, HIDDEN, generator=generator, dtype=torch.float64)
        .to(dtype)
        .requires_grad_()
    )
    weight = (
        torch.randn(VOCABULARY, HIDDEN, generator=generator, dtype=torch.float64)
        .to(dtype)
        .requires_grad_()
    )
    bias = (
        torch.randn(VOCABULARY, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    )
    labels = torch.randint(0, VOCABULARY, (TOKENS,), generator=generator)
    labels[torch.rand(TOKENS, generator=generator) < 0.66] = IGNORE_INDEX
    trained = (labels != IGNORE_INDEX).nonzero().squeeze(1)
    positions = torch.cat([trained, (labels == IGNORE_INDEX).nonzero().squeeze(1)[:5]])
    return hidden, weight, bias, labels, positions, torch.randn(len(positions), generator=generator)


def plain(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    positions: Tensor,
    logits: LogitTransform,
) -> Tensor:
    """From whole logits in fp64."""
    scores = (
        F.linear(hidden.double(), weight.double(), None if bias is None else bias.double())
        * logits.scale
    )
    if logits.softcap is not None:
        scores = torch.tanh(scores / logits.softcap) * logits.softcap
    found = (scores / logits.temperature).log_softmax(-1)
    found = found.gather(1, labels.clamp(min=0)[:, None]).squeeze(1)
    return torch.where(labels >= 0, found, 0.0)[positions]


@pytest.mark.parametrize("chunk_tokens", [1, 7, None])
@pytest.mark.parametrize("logits", TRANSFORMS)
@pytest.mark.parametrize("frozen", ["nothing", "head", "hidden"])
def test_values_and_gradients_are_those_of_whole_logits(
    chunk_tokens: int | None, logits: LogitTransform, frozen: str
) -> None:
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, EXACT)):
        hidden, weight, bias, labels, positions, upstream = problem(dtype)
        for offset in (None, bias):
            hidden.requires_grad_(frozen != "hidden")
            for tensor in (weight, bias):
                tensor.requires_grad_(frozen != "head")
            sources = [t for t in (hidden, weight, offset) if t is not None and t.requires_grad]
            truth = plain(hidden, weight, offset, labels, positions, logits)
            expected = torch.autograd.grad((truth * upstream).sum(), sources)
            found = linear_log_probabilities(
                HeadProduct(hidden, weight, offset),
                labels,
                positions,
                ChunkOptions(logits, chunk_tokens),
            )
            gradients = torch.autograd.grad((found * upstream).sum(), sources)
            assert relative_error(found, truth) <= tolerance
            assert (
                max(relative_error(g, e) for g, e in zip(gradients, expected, strict=True))
                <= tolerance
            )


@pytest.mark.parametrize("chunk_tokens", [1, 7, None])
@pytest.mark.parametrize("logits", TRANSFORMS)
def test_several_targets_of_a_position_are_scored_as_each_alone(
    chunk_tokens: int | None, logits: LogitTransform
) -> None:
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, EXACT)):
        hidden, weight, bias, *_ = problem(dtype)
        generator = torch.Generator().manual_seed(1)
        targets = torch.randint(0, VOCABULARY, (TOKENS, 4), generator=generator)
        targets[torch.rand(TOKENS, 4, generator=generator) < 0.2] = IGNORE_INDEX
        targets[:, 1] = targets[:, 0]  # one target may come twice
        upstream = torch.randn(TOKENS, 4, generator=generator)
        every = torch.arange(TOKENS)
        truth = torch.stack(
            [plain(hidden, weight, bias, ids, every, logits) for ids in targets.unbind(1)], 1
        )
        expected = torch.autograd.grad((truth * upstream).sum(), [hidden, weight, bias])
        chunks = ChunkOptions(logits, chunk_tokens)
        found = target_log_probabilities(HeadProduct(hidden, weight, bias), targets, chunks)
        gradients = torch.autograd.grad((found * upstream).sum(), [hidden, weight, bias])
        assert relative_error(found, truth) <= tolerance
        for gradient, of_truth in zip(gradients, expected, strict=True):
            assert relative_error(gradient, of_truth) <= tolerance


def test_the_likeliest_tokens_are_those_of_whole_logits() -> None:
    hidden, weight, _, labels, positions, _ = problem(torch.float64)  # whose scores have no ties
    head = CrossEntropyHead(HIDDEN, VOCABULARY, bias=False)
    head.weight = torch.nn.Parameter(weight.detach())
    head.logits = LogitTransform(scale=2.5, softcap=3.0)
    with torch.no_grad():
        found = head_top(5)(head, hidden, labels, positions)
        scores = torch.tanh(F.linear(hidden, weight) * 2.5 / 3.0) * 3.0
        values, ids = scores.log_softmax(-1)[positions].topk(5)
    assert found[..., 0].long().equal(ids)
    assert relative_error(found[..., 1], values) <= EXACT


def test_under_autocast_only_the_products_are_rounded() -> None:
    hidden, weight, bias, labels, positions, upstream = problem(torch.float32)
    truth = plain(hidden, weight, bias, labels, positions, LogitTransform())
    expected = torch.autograd.grad((truth * upstream).sum(), [hidden, weight, bias])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = linear_log_probabilities(HeadProduct(hidden, weight, bias), labels, positions)
    assert found.dtype == torch.float32
    gradients = torch.autograd.grad((found * upstream).sum(), [hidden, weight, bias])
    assert [g.dtype for g in gradients] == [torch.float32] * 3
    assert relative_error(found, truth) < 2e-2
    assert max(relative_error(g, e) for g, e in zip(gradients, expected, strict=True)) < 2e-2


@pytest.mark.parametrize("targets", [1, 3])
@pytest.mark.parametrize("frozen_head", [True, False])
def test_logits_are_never_whole(frozen_head: bool, targets: int) -> None:
    """The largest tensor of forward and backward is a chunk of logits, or the weight."""
    tokens, hidden_size, vocabulary, chunk = 2048, 16, 4000, 64
    hidden = torch.randn(tokens, hidden_size, requires_grad=True)
    weight = torch.randn(vocabulary, hidden_size, requires_grad=not frozen_head)
    labels = torch.randint(0, vocabulary, (tokens, targets))
    chunks = ChunkOptions(tokens=chunk)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        if targets == 1:
            every = torch.arange(tokens)
            found = linear_log_probabilities(
                HeadProduct(hidden, weight), labels[:, 0], every, chunks
            )
        else:
            found = target_log_probabilities(HeadProduct(hidden, weight), labels, chunks)
        found.sum().backward()
    largest = max(event.cpu_memory_usage for event in watched.events())
    assert 0 < largest <= 1.1 * 4 * chunk * vocabulary
