"""The compiled chunk of the loss computes what the eager one does, in three passes over the scores, by one graph for all sizes."""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from finetune.config.facts import has_compiler
from finetune.constants import IGNORE_INDEX
from finetune.models.cross_entropy import linear_cross_entropy
from finetune.models.decoder_layers import _keep_compiled
from finetune.models.log_probabilities import linear_log_probabilities
from finetune.models.loss_chunks import (
    ChunkFunction,
    ChunkOptions,
    HeadProduct,
    LogitTransform,
    compute_chunk,
    compute_fused_chunk,
)
from finetune.plan.activations import Computation
from finetune.plan.loss_memory import loss_chunk_bytes
from finetune.training.metrics import Compilation
from tests.models.families import relative_error
from tests.plan.traced import allocated_peak

TRANSFORMS = [
    LogitTransform(),
    LogitTransform(scale=0.3),
    LogitTransform(softcap=2.0),
    LogitTransform(2.5, 3.0, temperature=0.7),
]


def problem(tokens: int, vocabulary: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """scores, labels, of which some are not trained, and weights of the tokens."""
    generator = torch.Generator().manual_seed(tokens)
    scores = (3 * torch.randn(tokens, vocabulary, generator=generator)).to(dtype)
    labels = torch.randint(0, vocabulary, (tokens,), generator=generator)
    labels[::3] = IGNORE_INDEX
    return (
        scores,
        labels,
        torch.randn(tokens, generator=generator).to(torch.promote_types(dtype, torch.float32)),
    )


@pytest.mark.parametrize("weighed", [False, True])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("logits", TRANSFORMS)
def test_the_equations_are_those_of_the_eager_chunk(
    logits: LogitTransform, label_smoothing: float, weighed: bool
) -> None:
    scores, labels, weights = problem(37, 101, torch.float64)
    arguments = (scores, labels, weights if weighed else None, logits, label_smoothing)
    truth, fused = (
        compute_chunk(*arguments, torch.float64),
        compute_fused_chunk(*arguments, torch.float64),
    )
    assert all(
        relative_error(found, expected) < 1e-14
        for found, expected in zip(fused, truth, strict=True)
    )
    without = compute_fused_chunk(*arguments, None)
    assert torch.equal(without[0], fused[0]) and without[1] is None


@pytest.mark.parametrize("function", [linear_cross_entropy, linear_log_probabilities])
def test_both_losses_take_it(function: Callable[..., Tensor]) -> None:
    """Also where the bias is trained, whose gradient is not to be summed of rounded numbers."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight, bias = (
        torch.randn(*shape, generator=generator).requires_grad_()
        for shape in ((48, 8), (67, 8), (67,))
    )
    labels = torch.randint(0, 67, (48,), generator=generator)
    calls = 0

    def counted(*arguments: Any) -> tuple[Tensor, Tensor | None]:
        nonlocal calls
        calls += 1
        return compute_fused_chunk(*arguments)

    found = []
    for chunk_function in (None, counted):
        keys: dict[str, Any] = {"trained_positions": torch.arange(48)}
        chunks = ChunkOptions(tokens=7, function=chunk_function)
        loss = function(HeadProduct(hidden, weight, bias), labels, chunks=chunks, **keys).sum()
        found.append([loss, *torch.autograd.grad(loss, (hidden, weight, bias))])
    assert calls == 7 * (1 if function is linear_cross_entropy else 2)
    assert all(relative_error(fused, plain) < 1e-6 for plain, fused in zip(*found, strict=True))


@pytest.mark.skipif(not has_compiler(), reason="inductor needs a C compiler")
@pytest.mark.slow
def test_inductor_reads_the_scores_three_times_by_one_graph_for_all_sizes_and_keeps_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._dynamo.utils import counters
    from torch._inductor.utils import run_and_get_code

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    counters.clear()
    compilation, vocabulary = Compilation(True), 1000
    arguments = (None, LogitTransform(), 0.0, torch.bfloat16)
    scores, labels, _ = problem(96, vocabulary, torch.bfloat16)
    with torch.fx.experimental._config.patch(use_duck_shape=False):
        compiled: ChunkFunction = torch.compile(compute_fused_chunk, dynamic=True)
        _, (code,) = run_and_get_code(compiled, scores, labels, *arguments)
        for tokens, size in ((96, vocabulary), (64, vocabulary), (131, vocabulary), (50, 777)):
            scores, labels, _ = problem(tokens, size, torch.bfloat16)
            found, expected = (
                compiled(scores, labels, *arguments),
                compute_chunk(scores, labels, *arguments),
            )
            assert relative_error(found[0], expected[0]) < 1e-6
            assert found[1] is not None and expected[1] is not None
            assert (
                found[1] == expected[1]
            ).float().mean() > 0.999  # the rest are a rounding of bf16 apart
            assert relative_error(found[1].float(), expected[1].float()) < 2**-7
        assert counters["stats"]["unique_graphs"] == 1 and not counters["recompiles"]
        # Its loops over the vocabulary: for the largest score, for the sum, and for the gradient.
        assert len(re.findall(r"for\(int64_t x1=", code)) == 3
        scores, labels, _ = problem(256, vocabulary, torch.bfloat16)
        peak = allocated_peak(lambda: compiled(scores, labels, *arguments))
        planned = loss_chunk_bytes(
            vocabulary, 256, Computation(itemsize=2, cpu=True, compiled=True), trains_head=True
        )
        assert peak + scores.nbytes == pytest.approx(planned, rel=0.02)

        said = compilation.describe_new_graphs()
        assert (
            said is not None
            and "1 graph, of whose parts 1 were compiled and 0 were in the cache" in said
        )
        assert compilation.describe_new_graphs() is None
        seconds = compilation.seconds()
        assert seconds is not None and seconds > 0
        torch._dynamo.reset()  # as the next start begins
        torch.compile(compute_fused_chunk, dynamic=True)(scores, labels, *arguments)
        said = compilation.describe_new_graphs()
        assert (
            said is not None and f"1 were compiled and 1 were in the cache, in {tmp_path}" in said
        )


@pytest.mark.skipif(not has_compiler(), reason="inductor needs a C compiler")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("logits", "logit_copies"),
    [(LogitTransform(temperature=0.7), 1), (LogitTransform(softcap=30.0), 2)],
)
def test_inductor_keeps_the_tanh_of_a_cap(logits: LogitTransform, logit_copies: int) -> None:
    torch._dynamo.reset()
    compiled: ChunkFunction = torch.compile(compute_fused_chunk, dynamic=True)
    scores, labels, _ = problem(256, 1000, torch.bfloat16)
    arguments = (scores, labels, None, logits, 0.0, torch.bfloat16)
    compiled(*arguments)
    run = Computation(itemsize=2, cpu=True, compiled=True)
    planned = loss_chunk_bytes(1000, 256, run, trains_head=True, logit_copies=logit_copies)
    peak = scores.nbytes + allocated_peak(lambda: compiled(*arguments))
    assert peak == pytest.approx(planned, rel=0.02)


def test_what_is_compiled_is_kept_in_the_cache_of_hugging_face(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._inductor.runtime import cache_dir_utils

    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "mine")
    _keep_compiled()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "mine"
    own = (
        cache_dir_utils.default_cache_dir()
    )  # torch's, as its compiler sets it when it is imported
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", own)
    _keep_compiled()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "home" / "finetune" / "compiled")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "file"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", own)
    _keep_compiled()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == own


def test_nothing_is_counted_where_nothing_is_compiled() -> None:
    assert Compilation(False).seconds() is None and Compilation(False).describe_new_graphs() is None
