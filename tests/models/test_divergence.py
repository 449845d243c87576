"""The chunked divergence from a teacher equals the formula with whole logits, in value and gradients, and TRL's."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from finetune.constants import IGNORE_INDEX
from finetune.models.cross_entropy import linear_cross_entropy
from finetune.models.log_probabilities import DivergenceOptions, TeacherScores, linear_divergence
from finetune.models.loss_chunks import ChunkOptions, HeadProduct, LogitTransform, TokenWeights
from tests.models.families import relative_error
from tests.plan.traced import LargestTensor

TOKENS, HIDDEN, TEACHER_HIDDEN, VOCABULARY = 61, 24, 40, 67
BETAS = (0.0, 0.1, 0.5, 0.9, 1.0)
TRANSFORMS = [
    (LogitTransform(), LogitTransform()),
    (LogitTransform(2.5, 3.0), LogitTransform(softcap=2.0)),
]


def problem(rows: int = VOCABULARY, dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    """hidden, weight, bias of a student, the same of a teacher with `rows` rows, and labels, of which a third are trained."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    labels = torch.randint(0, VOCABULARY, (TOKENS,), generator=generator)
    labels[torch.rand(TOKENS, generator=generator) < 0.66] = IGNORE_INDEX
    return {
        "hidden": random(TOKENS, HIDDEN).requires_grad_(),
        "weight": random(VOCABULARY, HIDDEN).mul_(0.3).requires_grad_(),
        "bias": random(VOCABULARY).requires_grad_(),
        "teacher": (
            random(TOKENS, TEACHER_HIDDEN),
            random(rows, TEACHER_HIDDEN) * 0.3,
            random(rows),
        ),
        "labels": labels,
    }


def plain(
    of: dict[str, Any],
    options: DivergenceOptions,
    logits: LogitTransform,
    teacher_logits: LogitTransform,
    smoothing: float = 0.0,
) -> Tensor:
    """The three sums with whole logits, from the definitions: KL(p | q) = sum p log(p / q)."""
    beta, temperature, alpha = options
    mine, _ = logits.forward(F.linear(of["hidden"], of["weight"], of["bias"]))
    theirs, _ = teacher_logits.forward(F.linear(*of["teacher"]))
    rows = min(mine.shape[1], theirs.shape[1])
    s, t = ((each[:, :rows] / temperature).softmax(-1) for each in (mine, theirs))

    def kl(p: Tensor, q: Tensor) -> Tensor:
        return (p * (p / q).log()).sum(-1)

    m = beta * t + (1 - beta) * s
    divergence = (
        kl(t, s)
        if beta == 0
        else kl(s, t)
        if beta == 1
        else beta * kl(t, m) + (1 - beta) * kl(s, m)
    )
    divergence = divergence[of["labels"] != IGNORE_INDEX].sum()
    cross_entropy = F.cross_entropy(
        mine, of["labels"], ignore_index=IGNORE_INDEX, reduction="sum", label_smoothing=smoothing
    )
    return torch.stack(
        [alpha * divergence + (1 - alpha) * cross_entropy, divergence, cross_entropy]
    )


def ours(
    of: dict[str, Any],
    options: DivergenceOptions,
    logits: LogitTransform,
    teacher: LogitTransform,
    trained_positions: Tensor | None = None,
    **keys: Any,
) -> Tensor:
    hidden, weight, bias = of["teacher"]
    hidden = hidden if trained_positions is None else hidden[trained_positions]
    scores, chunks = TeacherScores(hidden, weight, bias, teacher), ChunkOptions(logits, **keys)
    product = HeadProduct(of["hidden"], of["weight"], of["bias"])
    given = product, of["labels"], scores, options, chunks
    return linear_divergence(*given, trained_positions=trained_positions)


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("transforms", TRANSFORMS, ids=["plain", "capped and scaled"])
def test_value_and_gradients_are_those_of_the_formula_with_whole_logits(
    beta: float, transforms: tuple[LogitTransform, LogitTransform]
) -> None:
    for temperature, alpha, rows, smoothing in (
        (1.0, 1.0, VOCABULARY, 0.0),
        (2.0, 0.3, VOCABULARY, 0.1),
        (0.7, 1.0, VOCABULARY + 5, 0.0),  # rows that only one of the two has
        (1.0, 0.5, VOCABULARY - 5, 0.0),
    ):
        of, options = problem(rows), DivergenceOptions(beta, temperature, alpha)
        of["labels"].clamp_(max=rows - 1)
        sources = [of["hidden"], of["weight"], of["bias"]]
        truth = plain(of, options, *transforms, smoothing)
        expected = torch.autograd.grad(truth[0] / 50, sources)
        positions = (of["labels"] != IGNORE_INDEX).nonzero().squeeze(1)
        for keys in (
            {"tokens": 7},
            {"trained_positions": positions},
            {"trained_positions": positions[:0]},
        ):
            found = ours(of, options, *transforms, label_smoothing=smoothing, **keys)  # type: ignore[arg-type]
            gradients = torch.autograd.grad(found[0] / 50, sources)
            if keys.get("trained_positions") is not None and not len(keys["trained_positions"]):
                assert not found.any() and not any(gradient.any() for gradient in gradients)
                continue
            assert relative_error(found, truth) < 1e-12
            assert (
                max(relative_error(f, e) for f, e in zip(gradients, expected, strict=True)) < 1e-12
            )


def test_in_fp32_it_stays_within_rounding_and_in_evaluation_it_keeps_no_graph() -> None:
    of = problem(dtype=torch.float32)
    exact = of | {
        name: of[name].detach().double().requires_grad_() for name in ("hidden", "weight", "bias")
    }
    exact["teacher"] = tuple(each.double() for each in of["teacher"])
    for beta in BETAS:
        options = DivergenceOptions(beta, 1.5, 0.7)
        truth = plain(exact, options, LogitTransform(), LogitTransform())
        expected = torch.autograd.grad(truth[0], [exact["hidden"], exact["weight"], exact["bias"]])
        found = ours(of, options, LogitTransform(), LogitTransform(), tokens=7)
        gradients = torch.autograd.grad(found[0], [of["hidden"], of["weight"], of["bias"]])
        assert found.dtype == torch.float32
        assert relative_error(found.double(), truth) < 1e-6
        assert (
            max(relative_error(f.double(), e) for f, e in zip(gradients, expected, strict=True))
            < 1e-6
        )
        with torch.no_grad():
            assert torch.equal(
                ours(of, options, LogitTransform(), LogitTransform(), tokens=7), found
            )


@pytest.mark.parametrize("kind", ["dft", "eaft"])
def test_the_cross_entropy_beside_a_divergence_is_weighted_as_that_of_sft(kind: Any) -> None:
    of, options, transform = (
        problem(),
        DivergenceOptions(0.0, 1.0, 0.25),
        LogitTransform(scale=0.7, softcap=4.0),
    )
    sources, weigh = [of["hidden"], of["weight"], of["bias"]], TokenWeights(kind)
    alone = linear_cross_entropy(
        HeadProduct(*sources[:2], of["bias"]), of["labels"], ChunkOptions(transform, weigh=weigh)
    )
    divergence = plain(of, options, transform, transform)[1]
    expected = torch.autograd.grad((0.25 * divergence + 0.75 * alone) / 50, sources)
    found = ours(of, options, transform, transform, tokens=7, weigh=weigh)
    assert found[2].item() == pytest.approx(alone.item(), rel=1e-12)
    gradients = torch.autograd.grad(found[0] / 50, sources)
    assert max(relative_error(f, e) for f, e in zip(gradients, expected, strict=True)) < 1e-12


def test_a_teacher_that_is_the_student_has_no_divergence_and_alpha_weighs_the_cross_entropy_of_sft() -> (
    None
):
    of = problem()
    of["teacher"] = tuple(of[name].detach() for name in ("hidden", "weight", "bias"))
    expected = linear_cross_entropy(
        HeadProduct(of["hidden"], of["weight"], of["bias"]), of["labels"]
    )
    for beta in BETAS:
        loss, divergence, cross_entropy = ours(
            of, DivergenceOptions(beta, 1.0, 0.25), LogitTransform(), LogitTransform()
        )
        assert abs(divergence.item()) < 1e-12
        assert cross_entropy.item() == pytest.approx(expected.item(), rel=1e-12)
        assert loss.item() == pytest.approx(0.75 * expected.item(), rel=1e-12)


def test_neither_models_logits_are_ever_whole() -> None:
    of = problem(dtype=torch.float32)
    of["labels"] = torch.arange(TOKENS) % VOCABULARY
    with LargestTensor() as made:
        ours(of, DivergenceOptions(0.5, 2.0, 0.5), LogitTransform(), LogitTransform(), tokens=8)[
            0
        ].backward()
    assert (
        made.numbers == VOCABULARY * TEACHER_HIDDEN
    )  # the teacher's head; logits would be TOKENS * VOCABULARY
    assert made.numbers < TOKENS * VOCABULARY


@pytest.mark.slow
@pytest.mark.parametrize("beta", BETAS)
def test_it_is_the_divergence_of_trls_trainer(beta: float) -> None:
    gkd = pytest.importorskip("trl.experimental.gkd")
    of = problem()
    sources = [of["hidden"], of["weight"], of["bias"]]
    student, teacher = F.linear(of["hidden"], of["weight"], of["bias"]), F.linear(*of["teacher"])
    theirs = gkd.GKDTrainer.generalized_jsd_loss(
        student[None],
        teacher[None],
        of["labels"][None],
        beta=beta,
        temperature=1.7,
        reduction="sum",
    )
    expected = torch.autograd.grad(theirs, sources)
    found = ours(of, DivergenceOptions(beta, 1.7, 1.0), LogitTransform(), LogitTransform())
    gradients = torch.autograd.grad(found[0], sources)
    assert relative_error(found[0], theirs) < 1e-12
    assert max(relative_error(f, e) for f, e in zip(gradients, expected, strict=True)) < 1e-12
