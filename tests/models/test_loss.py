"""The chunked loss equals the plain one in fp32, in value and in every gradient; under FSDP2 the head is gathered once."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from finetune.constants import IGNORE_INDEX
from finetune.errors import UserError
from finetune.models.cross_entropy import install_loss, linear_cross_entropy
from finetune.models.documents import install_attention
from finetune.models.loss_chunks import (
    ChunkOptions,
    HeadProduct,
    LogitTransform,
    TokenWeights,
    compute_fused_chunk,
)
from tests.models.families import build, documents, ours, packed, relative_error
from tests.plan.traced import LargestTensor
from tests.ranks import launch_ranks

EXACT = 1e-6  # of the largest value, in fp32
TOKENS, HIDDEN, VOCABULARY = 101, 24, 67


def problem(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """hidden, weight, bias, labels, of which about a third are trained."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator).to(dtype)
    weight = torch.randn(VOCABULARY, HIDDEN, generator=generator).to(dtype)
    bias = torch.randn(VOCABULARY, generator=generator).to(dtype)
    labels = torch.randint(0, VOCABULARY, (TOKENS,), generator=generator)
    labels[torch.rand(TOKENS, generator=generator) < 0.66] = IGNORE_INDEX
    return hidden.requires_grad_(), weight.requires_grad_(), bias.requires_grad_(), labels


def plain(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    logits: LogitTransform,
    label_smoothing: float = 0.0,
) -> Tensor:
    scores = F.linear(hidden, weight, bias).float() * logits.scale
    if logits.softcap is not None:
        scores = torch.tanh(scores / logits.softcap) * logits.softcap
    return F.cross_entropy(
        scores, labels, ignore_index=IGNORE_INDEX, reduction="sum", label_smoothing=label_smoothing
    )


@pytest.mark.parametrize("chunk_tokens", [1, 7, 64, 1000, None])
@pytest.mark.parametrize(
    "logits",
    [
        LogitTransform(),
        LogitTransform(scale=0.3),
        LogitTransform(softcap=2.0),
        LogitTransform(scale=2.5, softcap=3.0),
    ],
)
@pytest.mark.parametrize("given", [True, False], ids=["positions given", "positions sought"])
def test_value_and_gradients_are_those_of_whole_logits(
    chunk_tokens: int | None, logits: LogitTransform, given: bool
) -> None:
    hidden, weight, bias, labels = problem()
    for offset in (None, bias):
        sources = [hidden, weight] + ([] if offset is None else [offset])
        truth = plain(hidden, weight, offset, labels, logits)
        expected = torch.autograd.grad(truth / 50, sources)
        loss = linear_cross_entropy(
            HeadProduct(hidden, weight, offset),
            labels,
            ChunkOptions(logits, chunk_tokens),
            trained_positions=(labels != IGNORE_INDEX).nonzero().squeeze(1) if given else None,
        )
        found = torch.autograd.grad(loss / 50, sources)
        assert relative_error(loss, truth) <= EXACT
        assert max(relative_error(f, e) for f, e in zip(found, expected, strict=True)) <= EXACT


@pytest.mark.parametrize("logits", [LogitTransform(), LogitTransform(scale=2.5, softcap=3.0)])
def test_label_smoothing_is_that_of_torch_in_every_chunk(logits: LogitTransform) -> None:
    hidden, weight, bias, labels = problem()
    sources = [hidden, weight, bias]
    truth = plain(hidden, weight, bias, labels, logits, label_smoothing=0.1)
    assert relative_error(truth, plain(hidden, weight, bias, labels, logits)) > 1e-3
    expected = torch.autograd.grad(truth / 50, sources)
    loss = linear_cross_entropy(
        HeadProduct(hidden, weight, bias), labels, ChunkOptions(logits, 7, label_smoothing=0.1)
    )
    found = torch.autograd.grad(loss / 50, sources)
    assert relative_error(loss, truth) <= EXACT
    assert max(relative_error(f, e) for f, e in zip(found, expected, strict=True)) <= EXACT


def weighted(kind: str, logits: Tensor, labels: Tensor, alpha: float) -> Tensor:
    """DFT: -p log p with a constant p (Wu et al. 2025); EAFT: the entropy of the 20 likeliest tokens over 3 as the weight."""
    losses = F.cross_entropy(logits, labels, ignore_index=IGNORE_INDEX, reduction="none")
    twenty = torch.distributions.Categorical(logits=logits.detach().topk(20).values)
    weights = (-losses).exp().detach() if kind == "dft" else (twenty.entropy() / 3) ** alpha
    return (losses * weights).sum()


@pytest.mark.parametrize(("kind", "alpha"), [("dft", 1.0), ("eaft", 1.0), ("eaft", 0.5)])
@pytest.mark.parametrize("logits", [LogitTransform(), LogitTransform(scale=2.5, softcap=3.0)])
def test_weights_of_tokens_are_constants_of_the_gradient(
    kind: Any, alpha: float, logits: LogitTransform
) -> None:
    hidden, weight, bias, labels = problem(torch.float64)
    sources = [hidden, weight, bias]
    truth = weighted(kind, logits.forward(F.linear(hidden, weight, bias))[0], labels, alpha)
    expected = torch.autograd.grad(truth / 50, sources)
    for function in (None, compute_fused_chunk):
        chunks = ChunkOptions(logits, 7, weigh=TokenWeights(kind, alpha), function=function)
        loss = linear_cross_entropy(HeadProduct(hidden, weight, bias), labels, chunks)
        found = torch.autograd.grad(loss / 50, sources)
        assert relative_error(loss, truth) <= 1e-12
        assert max(relative_error(f, e) for f, e in zip(found, expected, strict=True)) <= 1e-12


def test_in_double_the_difference_is_rounding_only() -> None:
    hidden, weight, bias, labels = problem(torch.float64)
    logits = LogitTransform(scale=0.7, softcap=4.0)
    scores = torch.tanh(F.linear(hidden, weight, bias) * logits.scale / 4.0) * 4.0
    truth = F.cross_entropy(scores, labels, ignore_index=IGNORE_INDEX, reduction="sum")
    loss = linear_cross_entropy(HeadProduct(hidden, weight, bias), labels, ChunkOptions(logits, 4))
    for found, expected in zip(
        (loss, *torch.autograd.grad(loss, (hidden, weight, bias))),
        (truth, *torch.autograd.grad(truth, (hidden, weight, bias))),
        strict=True,
    ):
        assert relative_error(found, expected) < 1e-14


def test_nothing_trained_is_a_loss_of_zero_with_gradients_of_zero() -> None:
    hidden, weight, _, labels = problem()
    loss = linear_cross_entropy(HeadProduct(hidden, weight), torch.full_like(labels, IGNORE_INDEX))
    loss.backward()
    assert loss.item() == 0.0
    assert hidden.grad is not None and not hidden.grad.any()
    assert weight.grad is not None and not weight.grad.any()


def test_frozen_head_gets_no_gradient_and_evaluation_keeps_none() -> None:
    hidden, weight, _, labels = problem()
    loss = linear_cross_entropy(HeadProduct(hidden, weight.detach()), labels)
    assert [g is None for g in loss.grad_fn.gradients] == [False, True, True, True]  # type: ignore[union-attr]
    loss.backward()
    assert (
        relative_error(
            hidden.grad,
            torch.autograd.grad(plain(hidden, weight, None, labels, LogitTransform()), hidden)[0],
        )
        <= EXACT
    )  # type: ignore[arg-type]
    with torch.no_grad():
        assert not linear_cross_entropy(HeadProduct(hidden, weight), labels).requires_grad


def test_in_bf16_the_softmax_and_the_sums_stay_fp32() -> None:
    """Against fp32 arithmetic on the same bf16 factors: only the rounding of logits and gradients to bf16 is left."""
    hidden, weight, _, labels = problem(torch.bfloat16)
    exact_hidden, exact_weight = (t.detach().float().requires_grad_() for t in (hidden, weight))
    truth = plain(exact_hidden, exact_weight, None, labels, LogitTransform())
    (truth / 50).backward()
    loss = linear_cross_entropy(
        HeadProduct(hidden, weight), labels, ChunkOptions(tokens=1)
    )  # one chunk a token: a bf16 sum would drift
    (loss / 50).backward()
    assert loss.dtype == torch.float32
    assert relative_error(loss, truth) < 2e-3
    assert hidden.grad is not None and weight.grad is not None
    assert hidden.grad.dtype == weight.grad.dtype == torch.bfloat16
    assert relative_error(weight.grad, exact_weight.grad) < 1.5e-2  # type: ignore[arg-type]


def test_logits_are_never_whole() -> None:
    """The largest tensor that is made stays far below tokens x vocabulary."""
    hidden, weight, _, _ = problem()
    labels = torch.arange(TOKENS) % VOCABULARY
    with LargestTensor() as made:
        linear_cross_entropy(HeadProduct(hidden, weight), labels, ChunkOptions(tokens=8)).backward()
    assert (
        made.numbers == TOKENS * HIDDEN
    )  # the gradient to the hidden states; logits would be TOKENS * VOCABULARY


def test_without_labels_the_model_answers_as_before_and_a_wrapped_head_is_refused() -> None:
    model = build("llama")
    install_attention(model)
    ids = torch.arange(3, 20)[None]
    expected = model(ids).logits
    install_loss(model)
    assert torch.equal(model(ids).logits, expected)
    with pytest.raises(
        UserError, match="output head is a CrossEntropyHead, not a plain linear layer"
    ):
        install_loss(model)


def test_a_deep_copy_computes_with_its_own_weights() -> None:
    import copy

    model, batch = ours(build("llama")), packed(documents())
    before = model(**batch).item()
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.get_output_embeddings().weight.zero_()
    assert model(**batch).item() == before != other(**batch).item()


def test_under_fsdp2_every_split_gives_the_same_loss_and_gradients_with_one_gather_of_the_head(
    tmp_path: Path,
) -> None:
    """Two ranks against one process: tied and untied, fp32 and bf16, full and with a frozen head."""
    script = Path(__file__).with_name("loss_on_ranks.py")
    outputs = launch_ranks(script, timeout=120).check().outputs
    assert outputs[0].count("as one process") == outputs[1].count("as one process") == 6


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("given", [True, False], ids=["positions given", "all positions"])
def test_on_cuda_the_value_and_gradients_are_the_same_and_nothing_waits(given: bool) -> None:
    hidden, weight, _, labels = (t.cuda().detach() for t in problem(torch.bfloat16))
    hidden.requires_grad_(), weight.requires_grad_()
    exact = [t.detach().float().requires_grad_() for t in (hidden, weight)]
    positions = (labels != IGNORE_INDEX).nonzero().squeeze(1) if given else None
    linear_cross_entropy(
        HeadProduct(hidden, weight), labels, ChunkOptions(tokens=20)
    )  # the first call may load kernels
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss = linear_cross_entropy(
            HeadProduct(hidden, weight),
            labels,
            ChunkOptions(tokens=20),
            trained_positions=positions,
        )
        (loss / 50).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    truth = plain(*exact, None, labels, LogitTransform())
    (truth / 50).backward()
    assert relative_error(loss, truth) < 2e-3
    assert relative_error(hidden.grad, exact[0].grad) < 1.5e-2  # type: ignore[arg-type]
    assert relative_error(weight.grad, exact[1].grad) < 1.5e-2  # type: ignore[arg-type]


def test_a_frozen_head_asks_for_no_gradient_where_fsdp1_has_its_weight_ask_for_one() -> None:
    """As in a unit of one dtype in which others, such as the final norm, are trained."""
    model = ours(build("llama"))
    head = model.lm_head
    hidden = torch.randn(3, head.in_features)
    assert head.weight.requires_grad and head.is_trained
    assert head.prepare(hidden).needs_grad() == (False, True, False, False)
    head.is_frozen = True  # as `build_model` sets it, before FSDP1 makes views of the weight
    product = head.prepare(hidden)
    assert not any(product.needs_grad()) and not head.chunk_options().trains_head
