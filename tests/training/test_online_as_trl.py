"""The loss and the gradient of real rollouts by TRL's GRPOTrainer itself, fed with what a run has sampled."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.layouts import steps_of, train_all, write_config
from tests.training.test_online import GENERATIONS, MOST, PROMPTS, TEMPERATURE, lines_of, recipes

pytestmark = pytest.mark.slow
__all__ = ["recipes"]  # the fixture
CASES: dict[str, list[str]] = {
    "dapo": ["loss_type=dapo"],
    "grpo": ["loss_type=grpo"],
    "gspo": ["loss_type=grpo", "importance_sampling_level=sequence"],
    "dr_grpo": ["loss_type=dr_grpo", "scale_rewards=none"],
    "cispo": ["loss_type=cispo", "epsilon_high=5.0"],
    "batch": ["loss_type=dapo", "scale_rewards=batch"],
    "kl": ["loss_type=dapo", "beta=0.2"],
}


@pytest.fixture(scope="module")
def runs(folder: Path, recipes: dict[str, Path]) -> Path:
    """A run of two steps for each case."""
    keys = ["max_steps=2", "eval_datasets=[]", "lr_scheduler_type=constant", "warmup_ratio=0"]
    listed = [
        (recipes["packed"], write_config(folder, "single"), [*keys, *own, f"output_dir={folder}/{name}"])
        for name, own in CASES.items()
    ]
    text = (folder / "my_rewards.py").read_text().replace("max_steps == 3", "max_steps == 2")
    (folder / "my_rewards.py").write_text(text)
    train_all(folder, listed, ranks=1)
    return folder


@pytest.mark.parametrize("case", CASES)
def test_trl_computes_the_same_loss_and_gradient_from_the_same_rollouts(case: str, runs: Path) -> None:
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    given = dict(text.split("=") for text in CASES[case])
    lines = [line for line in lines_of(runs / case) if line["step"] == 1]
    tokenizer = AutoTokenizer.from_pretrained(runs / "model")
    args = GRPOConfig(
        output_dir=str(runs / f"trl-{case}"),
        use_cpu=True,
        bf16=False,
        report_to="none",
        per_device_train_batch_size=len(lines),
        num_generations=GENERATIONS,
        max_completion_length=MOST,
        temperature=TEMPERATURE,
        loss_type=given["loss_type"],
        importance_sampling_level=given.get("importance_sampling_level", "token"),
        epsilon_high=float(given["epsilon_high"]) if "epsilon_high" in given else None,
        beta=float(given.get("beta", 0)),
    )
    data = Dataset.from_list([{"prompt": "a"}] * 4)
    trainer = GRPOTrainer(
        str(runs / "model"), lambda **_: [0.0], args=args, train_dataset=data, processing_class=tokenizer
    )
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1

    prompts = [tokenizer(line["prompt"], add_special_tokens=False).input_ids for line in lines]
    completions = [line["token_ids"] for line in lines]
    assert len(lines) == PROMPTS * GENERATIONS

    def pad(rows: list[list[int]], *, left: bool) -> tuple[torch.Tensor, torch.Tensor]:
        longest = max(map(len, rows))
        fill = [[0] * (longest - len(row)) for row in rows]
        ids = [f + row if left else row + f for f, row in zip(fill, rows, strict=True)]
        mask = [
            [0] * len(f) + [1] * len(r) if left else [1] * len(r) + [0] * len(f)
            for f, r in zip(fill, rows, strict=True)
        ]
        return torch.tensor(ids), torch.tensor(mask)

    prompt_ids, prompt_mask = pad(prompts, left=True)
    completion_ids, completion_mask = pad(completions, left=False)
    inputs: dict[str, Any] = {
        "prompt_ids": prompt_ids,
        "prompt_mask": prompt_mask,
        "completion_ids": completion_ids,
        "completion_mask": completion_mask,
        "advantages": torch.tensor([line["advantage"] for line in lines]),
        "num_items_in_batch": completion_mask.sum(),
    }
    if "beta" in given:  # the model itself, before its first step
        with torch.no_grad():
            inputs["ref_per_token_logps"] = trainer._get_per_token_logps_and_entropies(
                trainer.model,
                torch.cat([prompt_ids, completion_ids], 1),
                torch.cat([prompt_mask, completion_mask], 1),
                completion_ids.shape[1],
            )[0]
    loss = trainer._compute_loss(trainer.model, inputs)
    loss.backward()
    norm = torch.stack([p.grad.norm() for p in trainer.model.parameters() if p.grad is not None]).norm()
    first = steps_of(runs / case)[0]
    assert first["loss"] == pytest.approx(loss.item(), rel=1e-5, abs=1e-6)
    assert first["grad_norm"] == pytest.approx(norm.item(), rel=1e-5)
