"""The same model and batches under TRL's trainers: the same losses, gradients and updates. Slow; skipped where trl is missing."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from finetune.config.layout import Sharding
from finetune.config.methods import METHODS, Method
from finetune.constants import IGNORE_INDEX
from finetune.data.batches import MicroBatch, StepBatch
from finetune.distributed.world import World
from finetune.models.cross_entropy import install_loss
from finetune.models.documents import install_attention
from finetune.training.objectives.preference import PreferenceObjective, RatingObjective
from finetune.training.reference import StoredReference, sum_log_probabilities
from tests.conftest import make_model

pytestmark = pytest.mark.slow
pytest.importorskip("trl")

STEPS, PAIRS, LEARNING_RATE, TOLERANCE = 4, 3, 0.05, 1e-4
DPO = Method(method="dpo", beta=0.4)
CASES: dict[str, tuple[Method, float, dict[str, Any]]] = {  # ours, label smoothing, and TRL's
    "sigmoid": (DPO, 0.0, {"loss_type": "sigmoid", "beta": 0.4}),
    "hinge": (replace(DPO, loss_type="hinge"), 0.0, {"loss_type": "hinge", "beta": 0.4}),
    "ipo": (replace(DPO, loss_type="ipo"), 0.0, {"loss_type": "ipo", "beta": 0.4}),
    "apo_zero": (replace(DPO, loss_type="apo_zero"), 0.0, {"loss_type": "apo_zero", "beta": 0.4}),
    # TRL's sigmoid takes no label smoothing any more; that of aot_unpaired is the same for a single pair.
    "smoothed": (DPO, 0.2, {"loss_type": "aot_unpaired", "beta": 0.4, "label_smoothing": 0.2}),
    "rpo": (
        replace(DPO, rpo_alpha=0.7),
        0.0,
        {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.7], "beta": 0.4},
    ),
    "orpo": (Method(method="orpo", beta=0.3), 0.0, {"beta": 0.3}),
    "simpo": (
        Method(method="simpo", beta=2.0, simpo_gamma=0.6),
        0.0,
        {"loss_type": "simpo", "cpo_alpha": 0.0, "beta": 2.0, "simpo_gamma": 0.6},
    ),
    "kto": (
        Method(method="kto", beta=0.3, desirable_weight=1.4),
        0.0,
        {"beta": 0.3, "desirable_weight": 1.4},
    ),
}
Pair = tuple[
    list[int], list[int], list[int]
]  # the ids of prompt, chosen and rejected; for kto of an answer and a mismatched one
GOOD = [True, False, True]  # how kto's answers are rated


@pytest.mark.parametrize("case", CASES)
def test_losses_gradients_and_updates_are_those_of_trl(case: str, tmp_path: Path) -> None:
    keys, smoothing, theirs = CASES[case]
    model = make_model(tmp_path / "model")
    generator = torch.Generator().manual_seed(0)

    def draw(least: int, most: int) -> list[int]:
        length = int(torch.randint(least, most, (), generator=generator))
        return torch.randint(0, 256, (length,), generator=generator).tolist()  # type: ignore[no-any-return]

    # TRL's ORPO, unlike the paper's, takes the cross entropy of the prompt as well; there it is one token, predicted by none.
    prompt = (1, 2) if case == "orpo" else (1, 9)
    pairs = 1 if case == "smoothed" else PAIRS
    steps = [
        [(draw(*prompt), draw(2, 12), draw(2, 12)) for _ in range(pairs)] for _ in range(STEPS)
    ]
    found, moved = _train_ours(model, keys, smoothing, steps)
    expected, moved_by_them = _train_theirs(model, keys.method, theirs, steps, tmp_path)
    for step, ((loss, norm), (their_loss, their_norm)) in enumerate(
        zip(found, expected, strict=True)
    ):
        assert loss == pytest.approx(their_loss, rel=TOLERANCE), step
        assert norm == pytest.approx(their_norm, rel=TOLERANCE), step
    for name, change in moved_by_them.items():
        assert (moved[name] - change).norm() <= TOLERANCE * change.norm(), name


def _load(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )


Trained = tuple[list[tuple[float, float]], dict[str, Tensor]]


def _train(model: nn.Module, compute_loss: Callable[[int], Tensor]) -> Trained:
    """Plain gradient descent; returns (loss, gradient norm) of every step, and the sum of every parameter's updates, which the
    parameters themselves show less exactly: a norm's weights are near 1."""
    moved = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in model.named_parameters()}
    results = []
    for step in range(STEPS):
        model.zero_grad()
        loss = compute_loss(step)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                assert parameter.grad is not None
                moved[name] -= LEARNING_RATE * parameter.grad.double()
                parameter -= LEARNING_RATE * parameter.grad
        results.append((loss.item(), norm.item()))
    return results, moved


def _train_ours(folder: Path, keys: Method, smoothing: float, steps: list[list[Pair]]) -> Trained:
    model = _load(folder)
    install_attention(model, "auto")
    install_loss(model)
    model.train()
    if keys.method == "kto":
        return _train_ratings(model, keys, steps)
    batches = [_pack(pairs, step) for step, pairs in enumerate(steps)]
    with torch.no_grad():
        table = torch.cat([sum_log_probabilities(model, each, each.inputs)[0] for each in batches])
    reference = StoredReference(table) if METHODS[keys.method].needs_reference else None
    objective = PreferenceObjective(keys, reference, smoothing)

    def compute_loss(step: int) -> Tensor:
        chosen = sum(len(chosen) for _, chosen, _ in steps[step])
        batch = StepBatch(
            step, 0.0, (batches[step],), 0, 0, chosen_tokens=chosen, groups=len(steps[step])
        )
        return objective.measure(
            model, batches[step], batches[step].inputs, batch
        ).loss_sum / objective.count(batch)

    return _train(model, compute_loss)


def _train_ratings(model: Any, keys: Method, steps: list[list[Pair]]) -> Trained:
    batches = []
    for step, pairs in enumerate(steps):
        answers = _pack_documents([(prompt, answer) for prompt, answer, _ in pairs], 2 * step)
        mismatched = _pack_documents(
            [(prompt, answer) for prompt, _, answer in pairs], 2 * step + 1
        )
        batches.append(replace(answers, desirable=torch.tensor(GOOD), mismatched=mismatched))
    with torch.no_grad():
        parts = [part for each in batches for part in (each, each.mismatched) if part is not None]
        table = torch.cat([sum_log_probabilities(model, part, part.inputs)[0] for part in parts])
    world = World(0, 1, 0, 1, torch.device("cpu"), Sharding(layout="single"), None)  # type: ignore[arg-type]
    objective = RatingObjective(keys, StoredReference(table))

    def compute_loss(step: int) -> Tensor:
        each, batch = (
            batches[step],
            StepBatch(step, 0.0, (batches[step],), 0, 0, groups=len(steps[step])),
        )
        prepared = objective.prepare(model, lambda: [each], world)
        return prepared.measure(model, each, each.inputs, batch).loss_sum / prepared.count(batch)

    return _train(model, compute_loss)


def _pack(pairs: list[Pair], step: int) -> MicroBatch:
    """The pairs in one packed row."""
    return _pack_documents(
        [(prompt, answer) for prompt, *answers in pairs for answer in answers], step
    )


def _pack_documents(documents: list[tuple[list[int], list[int]]], number: int) -> MicroBatch:
    """The documents in one packed row, numbered over all such rows, of which this is the `number`th."""
    labels = [[IGNORE_INDEX] * (len(p) - 1) + answer + [IGNORE_INDEX] for p, answer in documents]
    lengths = [len(each) for each in labels]
    flat = torch.tensor([label for each in labels for label in each])
    trained = (flat >= 0).nonzero().squeeze(1)
    of = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return MicroBatch(
        input_ids=torch.tensor([token for p, answer in documents for token in p + answer])[None],
        labels=flat[None],
        position_ids=torch.cat([torch.arange(length) for length in lengths])[None],
        trained_positions=trained,
        cu_seq_lens=F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).int(),
        max_document_length=max(lengths),
        example_ids=tuple(range(number * len(lengths), (number + 1) * len(lengths))),
        document_lengths=tuple(lengths),
        trained_documents=of[trained],
    )


def _train_theirs(
    folder: Path, method: str, options: dict[str, Any], steps: list[list[Pair]], output: Path
) -> Trained:
    import trl
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl.experimental.cpo import CPOConfig, CPOTrainer
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer

    classes: dict[str, tuple[Any, Any]] = {
        "dpo": (trl.DPOConfig, trl.DPOTrainer),
        "orpo": (ORPOConfig, ORPOTrainer),
        "kto": (trl.KTOConfig, trl.KTOTrainer),
    }
    config, make = classes.get(method, (CPOConfig, CPOTrainer))
    common = {"report_to": "none", "use_cpu": True, "bf16": False, "gradient_checkpointing": False}
    row: dict[str, Any] = {"prompt": "a", "chosen": "b", "rejected": "c"}
    row = {"prompt": "a", "completion": "b", "label": True} if method == "kto" else row
    rows = Dataset.from_list([row, row])
    model, tokenizer = _load(folder), AutoTokenizer.from_pretrained(folder)
    arguments = config(output_dir=str(output / "trl"), **common, **options)
    trainer = make(model, args=arguments, train_dataset=rows, processing_class=tokenizer)
    model.train()

    def compute_loss(step: int) -> Tensor:
        if method == "dpo":
            names = ("prompt_ids", "chosen_ids", "rejected_ids")
            batch = trainer.data_collator(
                [dict(zip(names, pair, strict=True)) for pair in steps[step]]
            )
            return trainer.compute_loss(model, batch)  # type: ignore[no-any-return]
        if method == "kto":
            return trainer.compute_loss(model, _pad_ratings(steps[step]))  # type: ignore[no-any-return]
        sides = {
            "chosen": [(p, c) for p, c, _ in steps[step]],
            "rejected": [(p, r) for p, _, r in steps[step]],
        }
        return trainer.get_batch_loss_metrics(model, _pad(sides))[0]  # type: ignore[no-any-return]

    return _train(model, compute_loss)


def _pad_ratings(answers: list[Pair]) -> dict[str, Tensor]:
    """The batch that TRL's collator of rated answers makes."""
    sides = {
        "": [(p, answer) for p, answer, _ in answers],
        "KL_": [(p, answer) for p, _, answer in answers],
    }
    batch = {"label": torch.tensor(GOOD)}
    for name, found in ((name, _pad({"side": documents})) for name, documents in sides.items()):
        batch |= {
            f"{name}input_ids": found["side_input_ids"],
            f"{name}attention_mask": found["side_attention_mask"],
        }
        batch[f"{name}completion_mask"] = (found["side_labels"] != -100).long()
    return batch


def _pad(sides: dict[str, list[tuple[list[int], list[int]]]]) -> dict[str, Tensor]:
    """The batch that TRL's collator of preferences makes for ORPO and CPO."""
    batch = {}
    for name, documents in sides.items():
        longest = max(len(prompt + answer) for prompt, answer in documents)

        def stack(rows: list[list[int]], fill: int, longest: int = longest) -> Tensor:
            return torch.tensor([row + [fill] * (longest - len(row)) for row in rows])

        batch[f"{name}_input_ids"] = stack([prompt + answer for prompt, answer in documents], 0)
        batch[f"{name}_attention_mask"] = stack(
            [[1] * len(prompt + answer) for prompt, answer in documents], 0
        )
        batch[f"{name}_labels"] = stack(
            [[-100] * len(prompt) + answer for prompt, answer in documents], -100
        )
    return batch
