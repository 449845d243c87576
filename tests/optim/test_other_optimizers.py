"""Adafactor, SGD, Muon, label smoothing and NEFTune: the same losses in every layout, held against transformers and torch."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.optimization import Adafactor as TransformersAdafactor

from finetune.models.embedding import NoisyDocuments, make_noise
from finetune.optim.optimizers import Adafactor
from tests.conftest import make_chat, make_model, slow_but
from tests.training import reference
from tests.training.layouts import assert_losses, steps_of, train_all, write_config, write_recipe

STEPS = 6
KEYS: dict[str, dict[str, Any]] = {
    "adafactor": {"optim": "adafactor", "save_steps": 3, "weight_decay": 0.1},
    "sgd": {"optim": "sgd", "learning_rate": 0.3, "save_steps": 3, "weight_decay": 0.01},
    "muon": {"optim": "muon", "save_steps": 3, "weight_decay": 0.1, "adam_beta2": 0.95},
    "smoothing": {"label_smoothing": 0.1, "eval_datasets": True},
    "dft": {"token_loss": "dft", "eval_datasets": True},
    "noise": {"neftune_noise_alpha": 5.0},
    "plain": {"eval_datasets": True},
}
TWO_RANKS = [
    ("full_shard", "adafactor"), ("ddp", "adafactor"), ("full_shard", "sgd"), ("FULL_SHARD", "sgd"),
    ("full_shard", "muon"), ("ddp", "muon"),
    ("full_shard", "smoothing"), ("full_shard", "dft"), ("full_shard", "noise"), ("FULL_SHARD", "noise"),
]  # fmt: skip
QUICK = [("full_shard", name) for name in ("muon", "dft", "noise")]
ONE_RANK = [("single", "muon"), ("single", "noise"), ("single", "plain"), ("single", "smoothing")]
RESUMED = {
    "adafactor": ("full_shard", "ddp"),
    "sgd": ("FULL_SHARD", "full_shard"),
    "muon": ("full_shard", "ddp"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, slow_too: bool) -> Path:
    """A recipe for each of KEYS, and every run: `folder / f"{layout}-{name}"`, and `resumed-{name}`."""
    folder = tmp_path_factory.mktemp("optimizers")
    data = make_chat(folder / "chat.jsonl", rows=20)
    model = make_model(folder / "model", hidden_size=72, vocab_size=509, tie_word_embeddings=True)
    for name, given in KEYS.items():
        keys = {"global_batch_size": 6, "max_steps": STEPS} | given
        keys |= {"eval_datasets": [{"path": str(data)}]} if "eval_datasets" in given else {}
        write_recipe(folder / f"{name}.yaml", model, data, **keys)

    def run(layout: str, name: str, *more: str, output: str = "") -> tuple[Path, Path, list[str]]:
        output_dir = f"output_dir={folder / (output or f'{layout}-{name}')}"
        return folder / f"{name}.yaml", write_config(folder, layout), [output_dir, *more]

    trained = TWO_RANKS if slow_too else QUICK
    two = [run(*which) for which in trained]
    for name in RESUMED if slow_too else ():
        before, after = RESUMED[name]
        start = folder / f"{before}-{name}" / "checkpoints" / "step-00000003"
        two.append(run(after, name, f"resume_from_checkpoint={start}", output=f"resumed-{name}"))
    train_all(folder, two, ranks=2, timeout=400)
    alone = [which for which in ONE_RANK if slow_too or which[1] != "muon"]
    train_all(folder, [run(*which, "per_device_train_batch_size=3") for which in alone], ranks=1)
    return folder


def losses(run: Path) -> list[float]:
    return [line["loss"] for line in steps_of(run)]


@pytest.mark.parametrize(
    ("layout", "name"),
    slow_but(QUICK, [which for which in [*TWO_RANKS, ("single", "muon")] if which[1] != "noise"]),
)
def test_losses_are_those_of_a_plain_loop(layout: str, name: str, folder: Path) -> None:
    optimizers: dict[str, Callable[[list[torch.nn.Parameter]], Any]] = {
        "adafactor": lambda trained: TransformersAdafactor(
            groups_of(trained, 0.1),
            lr=1.0,
            scale_parameter=False,
            relative_step=False,
            warmup_init=False,
        ),
        "sgd": lambda trained: torch.optim.SGD(groups_of(trained, 0.01), lr=0.0),
        "muon": MuonAndAdamW,
    }
    others = {"smoothing": {"label_smoothing": 0.1}, "dft": {"loss_of": dft}}
    given = others.get(name) or {"make_optimizer": optimizers[name]}
    expected = reference.train(folder / f"{name}.yaml", **given)
    norms = 2 * muons_own_spread(folder / f"{name}.yaml") if name == "muon" else 2e-5
    lines = assert_losses(folder / f"{layout}-{name}", expected, norms=norms)
    # -p log p of unlikely tokens rises with p.
    assert (
        lines[-1]["loss"] > 1.5 * lines[0]["loss"]
        if name == "dft"
        else lines[-1]["loss"] < 0.99 * lines[0]["loss"]
    )


def dft(documents: reference.Documents) -> torch.Tensor:
    """-p log p of each trained token, p a constant, over their number."""
    logits = torch.cat([logits[labels != -100] for logits, labels, _ in documents])
    labels = torch.cat([labels[labels != -100] for _, labels, _ in documents])
    losses = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    return (losses * (-losses).exp().detach()).mean()


@functools.cache
@functools.cache
def muons_own_spread(recipe: Path) -> float:
    """By how much the plain loop's norms change where its gradients are rounded otherwise: Muon's bf16 makes more of it."""
    norms = [
        [
            norm
            for _, norm in reference.train(
                recipe, make_optimizer=functools.partial(MuonAndAdamW, noise_seed=seed)
            )
        ]
        for seed in (None, 0, 1, 2)
    ]
    return max(
        abs(other / plain - 1)
        for others in norms[1:]
        for plain, other in zip(norms[0], others, strict=True)
    )


class MuonAndAdamW:
    """torch.optim.Muon for the matrices of layers, torch.optim.AdamW for the (tied) embedding and the norms.

    With a seed, gradients are off by what summing them in another order makes of fp32.
    """

    def __init__(self, trained: list[torch.nn.Parameter], noise_seed: int | None = None) -> None:
        self.trained, self.noise_seed = trained, noise_seed
        matrices = [p for p in trained if p.dim() == 2 and p.shape[0] != 509]
        decaying, others = groups_of([p for p in trained if p.dim() == 1 or p.shape[0] == 509], 0.1)
        muon = torch.optim.Muon(matrices, lr=0.0, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
        self.both = [muon, torch.optim.AdamW([decaying, others], lr=0.0, betas=(0.9, 0.95))]
        self.param_groups = [group for optimizer in self.both for group in optimizer.param_groups]

    def step(self) -> None:
        if self.noise_seed is not None:
            generator = torch.Generator().manual_seed(self.noise_seed)
            for parameter in self.trained:
                assert parameter.grad is not None
                parameter.grad.mul_(1 + 3e-7 * torch.randn(parameter.shape, generator=generator))
        for optimizer in self.both:
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self.both:
            optimizer.zero_grad()


def groups_of(trained: list[torch.nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Matrices decay, vectors do not."""
    return [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.dim() == 1], "weight_decay": 0.0},
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", RESUMED)
def test_another_layout_resumes_it_exactly(name: str, folder: Path) -> None:
    before = losses(folder / f"{RESUMED[name][0]}-{name}")
    assert losses(folder / f"resumed-{name}") == pytest.approx(before[3:], rel=1e-5)


@pytest.mark.parametrize("layout", slow_but(["full_shard"], ["full_shard", "FULL_SHARD"]))
def test_noise_is_the_same_in_every_layout(layout: str, folder: Path) -> None:
    alone = losses(folder / "single-noise")
    assert losses(folder / f"{layout}-noise") == pytest.approx(alone, rel=1e-5)
    assert alone != pytest.approx(losses(folder / "single-plain"), rel=1e-3), (
        "the noise does nothing"
    )


def test_held_out_losses_are_not_smoothed(folder: Path) -> None:
    first = [
        next(
            line
            for line in (folder / f"single-{name}" / "metrics.jsonl").read_text().splitlines()
            if "eval_loss" in line
        )
        for name in ("plain", "smoothing")
    ]
    assert first[0] == first[1]
    assert losses(folder / "single-smoothing")[0] != pytest.approx(
        losses(folder / "single-plain")[0], rel=1e-4
    )


def test_noise_is_bounded_by_each_documents_own_length_wherever_it_lies() -> None:
    packed, padded = torch.zeros(1, 64, 48), torch.zeros(2, 40, 48)
    documents = NoisyDocuments(seed=1, draws="7", example_ids=(5, 9), lengths=(30, 20))
    one, two = make_noise(packed, documents, 5.0)[0], make_noise(padded, documents, 5.0)
    assert torch.equal(one[:30], two[0, :30])
    assert torch.equal(one[30:50], two[1, :20])
    assert not one[50:].any() and not two[0, 30:].any()  # none on padding
    bound = 5.0 / (20 * 48) ** 0.5
    assert 0.99 * bound < one[30:50].abs().max() <= bound
    assert one[30:50].mean().abs() < 0.1 * bound
    later = make_noise(packed, documents._replace(draws="8"), 5.0)[0]
    assert not torch.equal(later, one)


def test_adafactor_keeps_a_number_for_each_weight_of_a_convolution() -> None:
    """Whose average by rows and columns it does not have: as transformers does for a vector."""
    torch.manual_seed(0)
    ours, theirs = (torch.nn.Parameter(torch.ones(*shape)) for shape in ((6, 1, 4), (24,)))
    ours.grad = torch.randn(6, 1, 4)
    theirs.grad = ours.grad.flatten().clone()
    Adafactor([ours], lr=0.1).step()
    TransformersAdafactor(
        [theirs], lr=0.1, relative_step=False, scale_parameter=False, weight_decay=0.0
    ).step()
    torch.testing.assert_close(ours.detach().flatten(), theirs.detach())
