"""The losses of sampled completions and their gradients, in fp64, against the formulas of their papers."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from finetune.config.methods import CORRECTIONS, POLICY_LOSSES
from finetune.config.reader import read_recipe
from finetune.data.batches import MicroBatch, StepBatch
from finetune.data.packing import make_filler
from finetune.rollout.engine import compute_advantages
from finetune.training.objectives.policy import PolicyObjective
from tests.training import online_papers

GENERATIONS, BUDGET = 3, 9
LENGTHS = [4, 1, 7, 3, 9, 2]
REWARDS = [1.0, 0.0, 0.5, 0.0, 2.0, 0.0]
CASES = [
    *((loss, "token", "group") for loss in POLICY_LOSSES),
    ("grpo", "sequence", "group"),  # GSPO
    ("dapo", "sequence", "batch"),
    ("dr_grpo", "token", "none"),  # as in its paper
]


class Given(nn.Module):
    """A model that answers with given log-probabilities."""

    def __init__(self, found: Tensor) -> None:
        super().__init__()
        self.found = nn.Parameter(found)

    def forward(self, **_: Any) -> Tensor:
        return self.found


def make_objective(
    loss: str, level: str, scale: str, method: str = "grpo", *more: str
) -> tuple[PolicyObjective, Any]:
    keys = [
        f"method={method}",
        *more,
        "rewards=[exact_answer]",
        f"loss_type={loss}",
        f"max_completion_length={BUDGET}",
    ]
    keys += ["epsilon=0.2", f"epsilon_high={1.5 if POLICY_LOSSES[loss].bound == 'weight' else 0.3}"]
    keys += [f"importance_sampling_level={level}"] if level != "token" else []
    keys += [f"scale_rewards={scale}"] if scale != "group" else []
    recipe = read_recipe(None, ["model_name_or_path=a/b", "datasets=[{path: a/b}]", *keys])
    rollouts: Any = SimpleNamespace(sampler=SimpleNamespace(reward_names=["exact_answer"]))
    return PolicyObjective(recipe, rollouts), recipe


def make_micro_batch(lengths: list[int], old: Tensor, advantages: Tensor) -> MicroBatch:
    """Completions one after another, with a position without a label between them."""
    labels = torch.cat([torch.tensor([-100] + [0] * n) for n in lengths])
    of = torch.cat([torch.tensor([0] + [i] * n) for i, n in enumerate(lengths)])
    padded = torch.zeros(len(labels), dtype=torch.float64)
    padded[labels >= 0] = old
    count = len(lengths)
    ones = torch.ones(count)
    names = ("rewards", "deviations", "flat", "groups", "tokens", "entropies", "is_cut", "failed")
    return MicroBatch(
        input_ids=labels[None],
        labels=labels[None],
        position_ids=labels[None],
        trained_positions=torch.arange(len(labels)),
        cu_seq_lens=None,
        max_document_length=len(labels),
        example_ids=tuple(range(count)),
        trained_documents=of,
        columns={
            "sampled": padded,
            "advantages": advantages,
            "scores": ones[:, None],
            **dict.fromkeys(names, ones),
        },
    )


@pytest.mark.parametrize(("loss", "level", "scale"), CASES)
def test_each_loss_and_its_gradient_are_those_of_its_paper(
    loss: str, level: str, scale: str
) -> None:
    random = torch.Generator().manual_seed(1)
    old = [-torch.rand(n, generator=random, dtype=torch.float64) * 3 for n in LENGTHS]
    new = [
        each + 0.4 * torch.randn(len(each), generator=random, dtype=torch.float64) for each in old
    ]
    objective, recipe = make_objective(loss, level, scale)
    keys = recipe.rollout
    found = compute_advantages(np.array(REWARDS), GENERATIONS, POLICY_LOSSES[loss].baseline, scale)
    expected = online_papers.advantages(REWARDS, GENERATIONS, loss, scale)
    np.testing.assert_allclose(found, expected, rtol=1e-12)

    leaves = [each.clone().requires_grad_() for each in new]
    bounds = {"low": keys.epsilon, "high": keys.epsilon_high, "budget": BUDGET, "level": level}
    truth = online_papers.paper(loss, leaves, old, expected, **bounds)
    truth.backward()  # type: ignore[no-untyped-call]

    total, gradients = 0.0, []
    batch = StepBatch(0, 0.0, (), tokens=99, trained_tokens=sum(LENGTHS), groups=len(LENGTHS))
    for part in (slice(0, 2), slice(2, 6)):  # micro-batches, which take a group apart
        positions = torch.cat([torch.cat([torch.zeros(1), each]) for each in new[part]]).double()
        model = Given(positions)
        micro_batch = make_micro_batch(
            LENGTHS[part], torch.cat(old[part]), torch.from_numpy(found[part])
        )
        measured = objective.measure(model, micro_batch, {}, batch)
        value = measured.loss_sum / objective.count(batch)
        value.backward()
        total += value.item()
        gradients.append(model.found.grad[micro_batch.labels[0] >= 0])  # type: ignore[index]
        assert not model.found.grad[micro_batch.labels[0] < 0].any()  # type: ignore[index]
    assert total == pytest.approx(truth.item(), rel=1e-6)  # a step's loss is kept in fp32
    torch.testing.assert_close(
        torch.cat(gradients), torch.cat([each.grad for each in leaves]), rtol=1e-6, atol=1e-9
    )


WEIGHED = [
    *(
        (loss, kind)
        for loss in ("dapo", "cispo")
        for kind in ("token_truncate", "token_mask", "sequence_truncate")
    ),
    ("grpo", "sequence_mask"),
    ("rloo", "sequence_truncate"),
    ("dapo", "geometric_mask"),
    ("rloo", "geometric_mask"),
    ("grpo", "decoupled"),
    ("dppo", "decoupled"),
]


@pytest.mark.parametrize(("loss", "kind"), WEIGHED)
def test_a_correction_weighs_each_loss_by_the_ratio_of_training_to_sampling(
    loss: str, kind: str
) -> None:
    """After the first update, too: the bounded ratio is then that of the update, and the weight stays what it was."""
    random = torch.Generator().manual_seed(3)
    sampled = [-torch.rand(n, generator=random, dtype=torch.float64) * 3 for n in LENGTHS]
    old, new = (
        [
            each + scale * torch.randn(len(each), generator=random, dtype=torch.float64)
            for each in sampled
        ]
        for scale in (0.6, 0.7)
    )
    bounds = {"low": 0.8, "high": 1.2} if kind == "geometric_mask" else {"low": 0.5, "high": 1.5}
    if loss == "cispo":
        bounds["low"] = 0.0  # without clip_min
    own = [f"importance_sampling_correction={kind}"]
    own += [
        f"importance_sampling_clip_{name}={bounds[key]}"
        for key, name in (("low", "min"), ("high", "max"))
        if kind != "decoupled" and bounds[key]
    ]
    objective, recipe = make_objective(loss, "token", "group", "grpo", *own)
    expected = online_papers.advantages(REWARDS, GENERATIONS, loss, "group")
    weights = online_papers.corrections(kind, old, sampled, **bounds)
    assert {0.5, 1.5} & {
        each for row in weights for each in row.tolist()
    } or "truncate" not in kind  # it bites
    assert "mask" not in kind or 0 in torch.cat(weights)

    leaves = [each.clone().requires_grad_() for each in new]
    keys = {
        "low": recipe.rollout.epsilon,
        "high": recipe.rollout.epsilon_high,
        "budget": BUDGET,
        "weights": weights,
    }
    truth = online_papers.paper(loss, leaves, old, expected, **keys)
    truth.backward()  # type: ignore[no-untyped-call]

    batch = StepBatch(0, 0.0, (), tokens=99, trained_tokens=sum(LENGTHS), groups=len(LENGTHS))
    micro_batch = make_micro_batch(
        LENGTHS, torch.cat(sampled), torch.tensor(expected, dtype=torch.float64)
    )
    has_label = micro_batch.labels[0] >= 0
    in_training = torch.zeros(len(has_label), dtype=torch.float64)
    in_training[has_label] = torch.cat(old)
    micro_batch = replace(micro_batch, columns={**(micro_batch.columns or {}), "old": in_training})
    model = Given(torch.cat([torch.cat([torch.zeros(1), each]) for each in new]).double())
    measured = objective.measure(model, micro_batch, {}, batch)
    value = measured.loss_sum / objective.count(batch)
    value.backward()
    assert value.item() == pytest.approx(truth.item(), rel=1e-6)
    gradient = model.found.grad[has_label]  # type: ignore[index]
    torch.testing.assert_close(
        gradient, torch.cat([each.grad for each in leaves]), rtol=1e-6, atol=1e-9
    )
    share = measured.metrics["importance_sampling/corrected"]
    assert share[0] == 0 if kind == "decoupled" else 0 < share[0] < share[1]


@pytest.mark.parametrize("method", ["grpo", "on_policy_distill"])
def test_another_models_log_probabilities_pull_at_each_token(method: str) -> None:
    """The reference by k3 with its gradient, and a teacher by the difference of log-probabilities as the advantage."""
    random = torch.Generator().manual_seed(2)
    old = [-torch.rand(n, generator=random, dtype=torch.float64) * 3 for n in LENGTHS]
    theirs = [each + torch.randn(len(each), generator=random, dtype=torch.float64) for each in old]
    rewards = REWARDS if method == "grpo" else [0.0] * len(REWARDS)
    own = ["beta=0.3"] if method == "grpo" else ["teacher_model_name_or_path=a/b"]
    objective, _ = make_objective("dapo", "token", "group", method, *own)
    positions = torch.cat([torch.cat([torch.zeros(1), each]) for each in theirs]).double()
    objective = replace(objective, other_model=lambda model, micro_batch: positions)
    advantages = online_papers.advantages(rewards, GENERATIONS, "dapo", "group")

    leaves = [each.clone().requires_grad_() for each in old]
    total = torch.zeros(())
    for n, o, t, a in zip(leaves, old, theirs, advantages, strict=True):
        ratio = (n - o).exp()
        if method == "grpo":
            total = total - (ratio * a - 0.3 * ((t - n).exp() - (t - n) - 1)).sum()
        else:  # the reverse divergence's gradient: log s - log t, times that of log s
            total = total + (ratio * (o - t)).sum()
    truth = total / sum(LENGTHS)
    truth.backward()  # type: ignore[no-untyped-call]

    batch = StepBatch(0, 0.0, (), tokens=99, trained_tokens=sum(LENGTHS), groups=len(LENGTHS))
    model = Given(torch.cat([torch.cat([torch.zeros(1), each]) for each in old]).double())
    micro_batch = make_micro_batch(
        LENGTHS, torch.cat(old), torch.tensor(advantages, dtype=torch.float64)
    )
    measured = objective.measure(model, micro_batch, {}, batch)
    value = measured.loss_sum / objective.count(batch)
    value.backward()
    assert value.item() == pytest.approx(truth.item(), rel=1e-6)
    gradient = model.found.grad[micro_batch.labels[0] >= 0]  # type: ignore[index]
    torch.testing.assert_close(
        gradient, torch.cat([each.grad for each in leaves]), rtol=1e-6, atol=1e-9
    )
    kl = measured.metrics["kl"][0] / measured.metrics["kl"][1]
    per_token = [
        (t - o).exp() - (t - o) - 1 if method == "grpo" else o - t
        for o, t in zip(old, theirs, strict=True)
    ]
    assert kl.item() == pytest.approx(torch.cat(per_token).mean().item(), rel=1e-6)


def test_the_bounds_bite_in_these_cases() -> None:
    """Else a loss without bounds would pass the test above."""
    objective, _ = make_objective("grpo", "token", "group")
    old = torch.zeros(sum(LENGTHS), dtype=torch.float64)
    micro_batch = make_micro_batch(LENGTHS, old, torch.tensor([1.0, -1.0] * 3, dtype=torch.float64))
    positions = torch.full((sum(LENGTHS) + len(LENGTHS),), 0.5, dtype=torch.float64)
    measured = objective.measure(
        Given(positions), micro_batch, {}, StepBatch(0, 0.0, (), 9, 26, groups=6)
    )
    clipped, of = measured.metrics["clip_ratio"].tolist()
    assert (clipped, of) == (sum(LENGTHS[::2]), sum(LENGTHS))
    assert measured.maxima["log_ratio/max"] == 0.5


# the tokens below that a loss clips, by the sign of their advantage
CLIPPED = {
    "cispo": {1.0: [True, False, False, True], -1.0: [True, False, False, True]},  # above 1.5
    "dppo": {1.0: [False, False, False, True], -1.0: [False, True, False, False]},
    "rloo": {1.0: [True], -1.0: [False]},  # the product of the ratios is above 1.3
}
CLIPPED_BY_PPO = {1.0: [True, False, False, True], -1.0: [False, True, False, False]}


@pytest.mark.parametrize("loss", POLICY_LOSSES)
def test_tokens_outside_are_those_beyond_the_bounds_of_the_loss(loss: str) -> None:
    """DPPO bounds differences of probabilities: a token of probability 0.01 may have any ratio."""
    objective, _ = make_objective(loss, "token", "group")
    sampled = torch.tensor([0.01, 0.6, 0.5, 0.2], dtype=torch.float64)
    trained = torch.tensor([0.05, 0.35, 0.55, 0.55], dtype=torch.float64)
    by_loss = {
        "dppo": [False, True, False, True],  # by more than 0.2 less, or 0.3 more
        "cispo": [True, False, False, True],  # above 1.5
    }
    expected = by_loss.get(loss, [True, True, False, True])  # below 0.8 or above 1.3
    positions = torch.cat([torch.zeros(1, dtype=torch.float64), trained.log()])
    batch = StepBatch(0, 0.0, (), 9, 4, groups=1)
    for advantage, clipped in CLIPPED.get(loss, CLIPPED_BY_PPO).items():
        advantages = torch.full((1,), advantage, dtype=torch.float64)
        micro_batch = make_micro_batch([4], sampled.log(), advantages)
        metrics = objective.measure(Given(positions), micro_batch, {}, batch).metrics
        assert metrics["ratio/outside"].tolist() == [sum(expected), 4]
        assert metrics["clip_ratio"].tolist() == [sum(clipped), len(clipped)]
        means = {name: float(total / number) for name, (total, number) in metrics.items()}
        ratios = trained / sampled  # Kish's effective sample size, as a share of the tokens
        share = objective.complete(means)["ratio/effective_sample_size"]
        assert share == pytest.approx(float(ratios.sum() ** 2 / ratios.square().sum() / 4))


@pytest.mark.parametrize(
    "keys",
    [
        ["method=grpo", "importance_sampling_correction=token_truncate"],
        ["method=grpo", "beta=0.3", "use_peft=true"],
        ["method=on_policy_distill", "teacher_model_name_or_path=a/b"],
        ["method=ppo", "beta=0.3"],
    ],
    ids=lambda keys: keys[0],
)
def test_a_filler_has_the_metrics_of_all_ranks_and_no_loss(keys: list[str]) -> None:
    """In the same order, since the ranks add up their numbers without names."""
    objective, _ = make_objective("dapo", "token", "group")
    common = ["model_name_or_path=a/b", "datasets=[{path: a/b}]", "rewards=[exact_answer]"]
    recipe = read_recipe(None, [*common, *keys])
    other = None if "ppo" in keys[0] else lambda _model, of: torch.zeros(len(of.trained_positions))
    objective = replace(objective, recipe=recipe, other_model=other)
    old = torch.zeros(sum(LENGTHS), dtype=torch.float64)
    whole = make_micro_batch(LENGTHS, old, torch.ones(len(LENGTHS)))
    names = ("token_advantages", "values", "returns", "old", "reference")
    columns = {**(whole.columns or {}), **dict.fromkeys(names, (whole.columns or {})["sampled"])}
    columns["explained_variance"] = torch.ones(len(LENGTHS))
    whole = replace(whole, columns=columns)
    empty = {name: values[:0] for name, values in columns.items()}
    filler = replace(make_filler(packing=True).with_documents(), columns=empty)
    batch = StepBatch(0, 0.0, (), 9, 26, groups=6)
    measured = []
    for micro_batch in (whole, filler):
        shape = (2,) if recipe.method_facts.has_critic else ()
        model = Given(torch.zeros(*shape, len(micro_batch.trained_positions)))
        measured.append(objective.measure(model, micro_batch, {}, batch))
    assert [*measured[1].metrics] == [*measured[0].metrics]
    assert measured[1].maxima.keys() == measured[0].maxima.keys()
    assert measured[1].loss_sum.item() == 0 and measured[1].loss_sum.requires_grad
    assert not torch.stack([*measured[1].metrics.values()]).any()


def test_as_many_positions_as_completions_are_still_positions() -> None:
    """RLOO has a ratio for each completion. Two of three, cut off, are not trained on; the third has three positions."""
    objective, _ = make_objective("rloo", "token", "group")
    micro_batch = make_micro_batch(
        [2], torch.zeros(2, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
    )
    columns = {
        name: values[:1].expand(3, *values.shape[1:])
        for name, values in (micro_batch.columns or {}).items()
    }
    micro_batch = replace(
        micro_batch, example_ids=(0, 1, 2), columns=columns | {"sampled": torch.zeros(3)}
    )
    model = Given(torch.full((3,), 0.5, dtype=torch.float64))
    metrics = objective.measure(
        model, micro_batch, {}, StepBatch(0, 0.0, (), 9, 2, groups=3)
    ).metrics
    assert metrics["clip_ratio"].tolist() == [1, 3]


def test_a_completion_without_a_reward_moves_nothing() -> None:
    rewards = np.array([1.0, np.nan, 0.0, np.nan, np.nan, np.nan])
    for baseline in ("group", "others", "step"):
        found = compute_advantages(rewards, GENERATIONS, baseline, "group")
        assert found[1] == 0 and not found[3:].any() and found[0] > 0 > found[2], baseline


def test_a_group_without_a_difference_has_no_advantage() -> None:
    for baseline in ("group", "others"):
        assert not compute_advantages(np.ones(6), GENERATIONS, baseline, "group").any()
    alone = np.array([1.0, np.nan, np.nan])
    assert not compute_advantages(alone, 3, "others", "group").any(), "compared with nothing"


def test_the_papers_are_named() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "online.md").read_text()
    for name, loss in POLICY_LOSSES.items():
        assert f"`{name}`" in page and loss.paper.split("arXiv:")[1][:10] in page, name
    for name, row in CORRECTIONS.items():
        assert f"| `{name}`" in page, name
        assert all(part.partition(", eq")[0] in page for part in row.paper.split("; ")), name
