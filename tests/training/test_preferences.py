"""The losses of preference training are those of their papers, written here plainly over whole logits in fp64."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from finetune.config.layout import Sharding
from finetune.config.methods import Method
from finetune.constants import IGNORE_INDEX
from finetune.data.batches import MicroBatch, StepBatch
from finetune.data.packing import make_filler
from finetune.distributed.world import World
from finetune.models.cross_entropy import CrossEntropyHead
from finetune.models.loss_chunks import LogitTransform
from finetune.training.objectives.objective import Measured
from finetune.training.objectives.preference import PreferenceObjective, RatingObjective
from finetune.training.reference import _compute, _read, _write
from finetune.training.watch import SignalListener
from tests.models.families import relative_error
from tests.training.papers import kto, paper

EXACT = 1e-6
ALONE = World(0, 1, 0, 1, torch.device("cpu"), Sharding(layout="single"), SimpleNamespace())  # type: ignore[arg-type]
VOCABULARY, HIDDEN = 61, 12
# Tokens of the prompt, of the chosen answer and of the rejected one, for each pair.
PAIRS = [(3, 5, 2), (1, 1, 4), (6, 7, 7), (2, 30, 9)]


class OneLayer(nn.Module):
    """The smallest model with a chunked head: every token's logits depend on that token alone."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.embedding = nn.Parameter(
            torch.randn(VOCABULARY, HIDDEN, generator=generator, dtype=torch.float64)
        )
        self.head = CrossEntropyHead(HIDDEN, VOCABULARY, bias=False, dtype=torch.float64)
        self.head.weight.data = (
            torch.randn(VOCABULARY, HIDDEN, generator=generator, dtype=torch.float64) / 2
        )
        self.head.logits = LogitTransform(scale=0.7)

    def forward(
        self, input_ids: Tensor, labels: Tensor, trained_positions: Tensor, **given: Any
    ) -> Tensor:
        hidden = torch.tanh(self.embedding[input_ids])
        return self.head(hidden, labels, trained_positions, given["head_function"])


def micro_batch(pairs: list[tuple[int, int, int]]) -> MicroBatch:
    """`pairs` in one packed row, with random tokens."""
    generator = torch.Generator().manual_seed(1)
    ids, labels, documents, lengths = [], [], [], []
    for prompt, *answers in pairs:
        for answer in answers:
            document = torch.randint(0, VOCABULARY, (prompt + answer,), generator=generator)
            ids.append(document)
            masked = torch.full((prompt - 1,), IGNORE_INDEX)
            labels.append(torch.cat([masked, document[prompt:], torch.tensor([IGNORE_INDEX])]))
            documents.append(torch.full((len(document),), len(lengths)))
            lengths.append(len(document))
    flat, of = torch.cat(labels), torch.cat(documents)
    trained = (flat >= 0).nonzero().squeeze(1)
    other = (flat < 0).nonzero().squeeze(1)[:3]
    return replace(
        make_filler(packing=True),
        input_ids=torch.cat(ids)[None],
        labels=flat[None],
        trained_positions=torch.cat([trained, other]),
        trained_documents=torch.cat([of[trained], torch.zeros(3, dtype=torch.int64)]),
        example_ids=tuple(range(len(lengths))),
        document_lengths=tuple(lengths),
    )


def step_of(*batches: MicroBatch) -> StepBatch:
    chosen = sum(answer for _, answer, _ in PAIRS)
    return StepBatch(
        0, 0.0, batches, tokens=0, trained_tokens=0, chosen_tokens=chosen, groups=len(PAIRS)
    )


def plain_log_probabilities(model: OneLayer, batch: MicroBatch) -> tuple[list[Tensor], list[int]]:
    """(each document's log-probability given its prompt, its tokens), from whole logits."""
    logits = torch.tanh(model.embedding[batch.input_ids[0]]) @ model.head.weight.T * 0.7
    log_probabilities = F.log_softmax(logits, -1)
    found, tokens, start = [], [], 0
    for length in batch.document_lengths:
        places = [i for i in range(start, start + length) if batch.labels[0, i] >= 0]
        found.append(torch.stack([log_probabilities[i, batch.labels[0, i]] for i in places]).sum())
        tokens.append(len(places))
        start += length
    return found, tokens


CASES = [
    (Method(method="dpo"), 0.0),
    (Method(method="dpo", beta=0.4), 0.2),
    (Method(method="dpo", beta=0.3, rpo_alpha=0.7), 0.0),
    (Method(method="dpo", loss_type="hinge", beta=0.2), 0.0),
    (Method(method="dpo", loss_type="ipo"), 0.0),
    (Method(method="dpo", loss_type="apo_zero", beta=0.3), 0.0),
    (Method(method="dpo", loss_type="ipo", rpo_alpha=1.5), 0.0),
    (Method(method="orpo", beta=0.6), 0.0),
    (Method(method="simpo", beta=2.0, simpo_gamma=0.9), 0.0),
]


@pytest.mark.parametrize(("keys", "smoothing"), CASES)
def test_loss_and_gradients_are_those_of_the_paper(keys: Method, smoothing: float) -> None:
    """Over two micro-batches and a rank without rows, whose losses add up to the step's mean."""
    model = OneLayer()
    batch, parameters = micro_batch(PAIRS), [model.embedding, model.head.weight]
    policy, tokens = plain_log_probabilities(model, batch)
    table = (
        torch.randn(len(policy), generator=torch.Generator().manual_seed(2), dtype=torch.float64)
        - 20
    )
    truth = paper(keys, policy, table.tolist(), tokens, smoothing)
    expected = torch.autograd.grad(truth, parameters)

    def stored(_model: nn.Module, of: MicroBatch) -> Tensor:
        return table[list(of.example_ids)]

    reference = stored if keys.method == "dpo" else None
    objective = PreferenceObjective(keys, reference, smoothing)
    parts = [_documents(batch, 0, 2), _documents(batch, 2, 8), _documents(batch, 0, 0)]
    step = step_of(*parts)
    measured = [objective.measure(model, part, part.inputs, step) for part in parts]
    total = measured[0] + measured[1] + measured[2]
    loss = total.loss_sum / objective.count(step)
    found = torch.autograd.grad(loss, parameters)
    assert relative_error(loss, truth) <= EXACT
    assert max(relative_error(f, e) for f, e in zip(found, expected, strict=True)) <= EXACT
    _check_metrics(total, keys, policy, table.tolist(), tokens)


def _documents(batch: MicroBatch, first: int, last: int) -> MicroBatch:
    """The documents `first` to `last` (exclusive) of `batch` as a micro-batch of their own."""
    assert batch.trained_documents is not None
    starts = [sum(batch.document_lengths[:i]) for i in range(len(batch.document_lengths) + 1)]
    if first == last:
        filler = make_filler(packing=True)
        return replace(filler, trained_documents=torch.zeros(0, dtype=torch.int64))
    inside = (batch.trained_positions >= starts[first]) & (batch.trained_positions < starts[last])
    has_label = batch.labels[0][batch.trained_positions] >= 0
    return replace(
        batch,
        input_ids=batch.input_ids[:, starts[first] : starts[last]],
        labels=batch.labels[:, starts[first] : starts[last]],
        trained_positions=batch.trained_positions[inside & has_label] - starts[first],
        trained_documents=batch.trained_documents[inside & has_label] - first,
        example_ids=batch.example_ids[first:last],
        document_lengths=batch.document_lengths[first:last],
    )


def _check_metrics(
    total: Measured, keys: Method, policy: list[Tensor], reference: list[float], tokens: list[int]
) -> None:
    """The metrics are TRL's means over all pairs."""
    found = {name: float(pair[0] / pair[1]) for name, pair in total.metrics.items()}
    if keys.method == "dpo":
        shown = [p.item() for p in policy]
        rewards = [keys.beta * (p.item() - r) for p, r in zip(policy, reference, strict=True)]
    else:
        shown = [p.item() / n for p, n in zip(policy, tokens, strict=True)]
        rewards = [keys.beta * s for s in shown]
    pairs = len(policy) // 2
    expected = {
        "rewards/chosen": sum(rewards[::2]) / pairs,
        "rewards/rejected": sum(rewards[1::2]) / pairs,
        "rewards/margins": (sum(rewards[::2]) - sum(rewards[1::2])) / pairs,
        "rewards/accuracies": sum(w > r for w, r in zip(rewards[::2], rewards[1::2], strict=True))
        / pairs,
        "logps/chosen": sum(shown[::2]) / pairs,
        "logps/rejected": sum(shown[1::2]) / pairs,
    }
    if keys.method == "orpo" or keys.rpo_alpha:
        expected["nll_loss"] = -sum(p.item() for p in policy[::2]) / sum(tokens[::2])
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=EXACT)


def test_pairs_whose_answers_have_the_same_reward_are_not_in_order() -> None:
    """As all are before the first update, where the model is its own reference."""
    model, batch = OneLayer(), micro_batch(PAIRS)
    policy = torch.stack(plain_log_probabilities(model, batch)[0]).detach()
    objective = PreferenceObjective(Method(method="dpo"), lambda _model, _batch: policy)
    metrics = objective.measure(model, batch, batch.inputs, step_of(batch)).metrics
    assert metrics["rewards/accuracies"].tolist() == [0, len(PAIRS)]


def test_an_answer_that_is_certain_has_finite_odds() -> None:
    """Where every token's probability rounds to 1, ORPO's odds would be infinite, and its gradient not a number."""
    from finetune.training.objectives.preference import Pairs, orpo_losses

    averages = Pairs(
        torch.zeros(2, requires_grad=True), torch.tensor([-1.0, 0.0], requires_grad=True)
    )
    losses, metrics = orpo_losses(averages, Method(method="orpo"))
    losses.sum().backward()
    assert torch.isfinite(losses).all() and torch.isfinite(metrics["log_odds_chosen"]).all()
    assert averages.chosen.grad is not None and torch.isfinite(averages.chosen.grad).all()


def test_ratings_are_weighed_against_how_far_the_model_has_moved() -> None:
    """KTO, over two micro-batches: its KL term is that of all of the step's mismatched answers, and has no gradient."""
    model, whole = OneLayer(), micro_batch(PAIRS)
    policy, _ = plain_log_probabilities(model, whole)
    keys = Method(method="kto", beta=0.2, desirable_weight=1.3, undesirable_weight=0.6)
    is_good = [True, False, True, True]
    for shift in (
        1.0,
        -1.0,
    ):  # of the mismatched answers' log-ratios: a divergence above 0, and one below, which counts as 0
        table = torch.tensor(
            [p.item() - (shift if i % 2 else 3.0 * (i - 3)) for i, p in enumerate(policy)]
        )
        truth = kto(keys, policy, table.tolist(), is_good)
        expected = torch.autograd.grad(
            truth, [model.embedding, model.head.weight], retain_graph=True
        )

        def stored(_model: nn.Module, of: MicroBatch, table: Tensor = table) -> Tensor:
            return table[list(of.example_ids)].double()

        parts = [_rated(whole, places, is_good) for places in ((0, 1), (2, 3))]
        step = step_of(*parts)
        objective = RatingObjective(keys, stored).prepare(model, lambda parts=parts: parts, ALONE)  # type: ignore[misc]
        total = objective.measure(model, parts[0], parts[0].inputs, step)
        total += objective.measure(model, parts[1], parts[1].inputs, step)
        loss = total.loss_sum / objective.count(step)
        found = torch.autograd.grad(loss, [model.embedding, model.head.weight])
        assert relative_error(loss, truth) <= EXACT
        assert max(relative_error(f, e) for f, e in zip(found, expected, strict=True)) <= EXACT
        _, means = total.average(4, ALONE)
        shown = objective.complete(means)
        assert shown["kl"] == pytest.approx(max(shift, 0.0), abs=EXACT)
        # the answers' log-ratios are -9, -3, 3 and 9
        assert shown["rewards/chosen"] == pytest.approx(keys.beta * (-9 + 3 + 9) / 3, abs=1e-5)
        assert shown["rewards/rejected"] == pytest.approx(keys.beta * -3, abs=1e-5)
        assert shown["rewards/margins"] == shown["rewards/chosen"] - shown["rewards/rejected"]
        # of answers that are all good there is no margin
        _, means = objective.measure(model, parts[1], parts[1].inputs, step).average(2, ALONE)
        assert objective.complete(means).keys() == {"rewards/chosen", "logps/chosen", "kl"}


def test_the_reference_leaves_nothing_gathered() -> None:
    """Under FSDP2 the root is whole in the compute dtype after a forward without a backward: twice the memory."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        model = fully_shard(OneLayer(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.float32))
        batches = SimpleNamespace(
            examples=range(2 * len(PAIRS)), step_batch=lambda step: step_of(micro_batch(PAIRS))
        )
        (found,) = _compute(model, batches, [0], "training", SignalListener(), ALONE)  # type: ignore[arg-type]
        expected, _ = plain_log_probabilities(OneLayer(), micro_batch(PAIRS))
        assert found == pytest.approx([each.item() for each in expected], rel=1e-5)
        assert all(isinstance(p, DTensor) and p.dtype == torch.float64 for p in model.parameters())
    finally:
        dist.destroy_process_group()


def test_kept_references_come_back_bit_for_bit_and_damaged_ones_not_at_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "cache" / "reference.json"
    found = {
        "training": torch.tensor([-1 / 3, torch.nan, -1e-300], dtype=torch.float64)
    }  # the second is to be computed
    assert _read(path, found) is None
    _write(path, found)
    kept = _read(path, found)
    assert kept is not None
    torch.testing.assert_close(kept, found, rtol=0, atol=0, equal_nan=True)
    assert _read(path, {"training": torch.zeros(2)}) is None, "of other data"
    whole = path.read_bytes()
    for damaged in (whole[:-9], whole.replace(b"333", b"334"), b"", b"\xff" * 40):
        path.write_bytes(damaged)
        assert _read(path, found) is None
    assert "damaged; the reference is computed again" in capsys.readouterr().err


def _rated(whole: MicroBatch, groups: tuple[int, int], is_good: list[bool]) -> MicroBatch:
    """The answers of `groups` (documents 0, 2, 4...) as a micro-batch, with the mismatched ones beside them."""
    answers, mismatched = (
        _join([_documents(whole, 2 * group + side, 2 * group + side + 1) for group in groups])
        for side in (0, 1)
    )
    return replace(
        answers, desirable=torch.tensor([is_good[group] for group in groups]), mismatched=mismatched
    )


def _join(parts: list[MicroBatch]) -> MicroBatch:
    first, second = parts
    assert first.trained_documents is not None and second.trained_documents is not None
    return replace(
        first,
        input_ids=torch.cat([first.input_ids, second.input_ids], 1),
        labels=torch.cat([first.labels, second.labels], 1),
        trained_positions=torch.cat(
            [first.trained_positions, second.trained_positions + first.labels.numel()]
        ),
        trained_documents=torch.cat([first.trained_documents, second.trained_documents + 1]),
        example_ids=first.example_ids + second.example_ids,
        document_lengths=first.document_lengths + second.document_lengths,
    )
