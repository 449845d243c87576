"""A step of a reward model by TRL's RewardTrainer itself, over the pairs of the run and the weights that it began with."""

from pathlib import Path

import pytest
import torch

from tests.training.layouts import steps_of, train_all, write_config
from tests.training.test_scores import KEYS, ROWS, folder, make_rows, models, recipes

pytestmark = pytest.mark.slow
__all__ = ["folder", "models", "recipes"]  # the fixtures


@pytest.mark.parametrize("layout", ["single", "full_shard"])
def test_trl_computes_the_same_loss_and_gradient(
    layout: str, folder: Path, recipes: dict[str, Path]
) -> None:
    trl = pytest.importorskip("trl")
    from datasets import Dataset
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    run = folder / f"as-trl-{layout}"
    # One step over all pairs, which moves no weight: the export has those of its forward.
    keys = [f"global_batch_size={ROWS}", "max_steps=1", "learning_rate=1e-12", "save_steps=1"]
    train_all(
        folder,
        [(recipes["reward"], write_config(folder, layout), [*keys, f"output_dir={run}"])],
        ranks=1 if layout == "single" else 2,
    )
    (step,) = steps_of(run)
    rows = [{"margin": 0.0, **row} for row in make_rows("reward")]
    arguments = trl.RewardConfig(
        output_dir=str(run / "trl"),
        use_cpu=True,
        bf16=False,
        report_to="none",
        per_device_train_batch_size=ROWS,
        center_rewards_coefficient=KEYS["reward"]["center_rewards_coefficient"],
        max_length=None,
    )
    trainer = trl.RewardTrainer(
        AutoModelForSequenceClassification.from_pretrained(run / "export", dtype=torch.float32),
        arguments,
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(run / "export"),
    )
    (batch,) = list(trainer.get_train_dataloader())
    assert len(batch["input_ids"]) == 2 * ROWS
    loss = trainer.compute_loss(trainer.model, dict(batch))
    loss.backward()
    gradients = [p.grad.double() for p in trainer.model.parameters() if p.grad is not None]
    norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in gradients]))
    assert step["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert step["grad_norm"] == pytest.approx(norm.item(), rel=1e-5)
