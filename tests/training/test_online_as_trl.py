"""The loss and the gradient of real rollouts by TRL's GRPOTrainer itself, fed with what a run has sampled."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.layouts import steps_of, train_all, write_config
from tests.training.test_online import GENERATIONS, MOST, PROMPTS, TEMPERATURE, lines_of, recipes

pytestmark = pytest.mark.slow
pytest.importorskip("trl")
__all__ = ["recipes"]  # the fixture
AGAIN = ["loss_type=dapo", "num_iterations=2", "learning_rate=3e-3", "max_grad_norm=null"]
CASES: dict[str, list[str]] = {
    "dapo": ["loss_type=dapo"],
    "grpo": ["loss_type=grpo"],
    "gspo": ["loss_type=grpo", "importance_sampling_level=sequence"],
    "dr_grpo": ["loss_type=dr_grpo", "scale_rewards=none"],
    "cispo": ["loss_type=cispo", "epsilon_high=5.0"],
    "batch": ["loss_type=dapo", "scale_rewards=batch"],
    "kl": ["loss_type=dapo", "beta=0.2"],
    "again": AGAIN,
}


@pytest.fixture(scope="module")
def runs(folder: Path, recipes: dict[str, Path]) -> Path:
    """A run of two steps for each case."""
    keys = ["max_steps=2", "eval_datasets=[]", "lr_scheduler_type=constant", "warmup_ratio=0"]
    listed = [
        (
            recipes["packed"],
            write_config(folder, "single"),
            [*keys, *own, f"output_dir={folder}/{name}"],
        )
        for name, own in CASES.items()
    ]
    train_all(folder, listed, ranks=1)
    return folder


@pytest.mark.parametrize("case", CASES)
def test_trl_computes_the_same_loss_and_gradient_from_the_same_rollouts(
    case: str, runs: Path
) -> None:
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    given = dict(text.split("=") for text in CASES[case] if case != "again")
    given |= {"loss_type": "dapo"} if case == "again" else {}
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
        str(runs / "model"),
        lambda **_: [0.0],
        args=args,
        train_dataset=data,
        processing_class=tokenizer,
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
    optimizer = torch.optim.AdamW(trainer.model.parameters(), lr=3e-3, weight_decay=0.0)
    if case == "again":  # the second step is on the same completions
        with torch.no_grad():
            inputs["old_per_token_logps"] = trainer._get_per_token_logps_and_entropies(
                trainer.model,
                torch.cat([prompt_ids, completion_ids], 1),
                torch.cat([prompt_mask, completion_mask], 1),
                completion_ids.shape[1],
            )[0]
    for step in steps_of(runs / case)[: 2 if case == "again" else 1]:
        optimizer.zero_grad()
        loss = trainer._compute_loss(trainer.model, inputs)
        loss.backward()
        norm = torch.stack(
            [p.grad.norm() for p in trainer.model.parameters() if p.grad is not None]
        ).norm()
        close = (
            1e-5 if step["step"] == 1 else 1e-4
        )  # AdamW's first update is the gradient's sign, also where that rounds
        assert step["loss"] == pytest.approx(loss.item(), rel=close, abs=1e-6)
        assert step["grad_norm"] == pytest.approx(norm.item(), rel=close)
        optimizer.step()
    assert case != "again" or step["clip_ratio"] > 0.02


@pytest.mark.parametrize(
    "mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
)
def test_trl_corrects_other_log_probabilities_of_a_sampler_by_the_same_ratio(
    mode: str, runs: Path
) -> None:
    """TRL's own correction, as it is for vLLM, where its sampler's log-probabilities are off by up to a third of a nat."""
    from types import SimpleNamespace

    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    from finetune.config.reader import read_recipe
    from finetune.training.objectives.policy_losses import (
        Completions,
        compute_sampling_ratios,
        compute_weights,
    )

    lines = [line for line in lines_of(runs / "dapo") if line["step"] == 1]
    tokenizer = AutoTokenizer.from_pretrained(runs / "model")
    args = GRPOConfig(
        output_dir=str(runs / f"trl-{mode}"),
        use_cpu=True,
        bf16=False,
        report_to="none",
        per_device_train_batch_size=len(lines),
        num_generations=GENERATIONS,
        max_completion_length=MOST,
        temperature=TEMPERATURE,
        vllm_importance_sampling_mode=mode,
        vllm_importance_sampling_clip_max=1.2,
        vllm_importance_sampling_clip_min=0.8,
    )
    trainer = GRPOTrainer(
        str(runs / "model"),
        lambda completions, **_: [float(len(each)) for each in completions],
        args=args,
        train_dataset=Dataset.from_list([{"prompt": "a"}] * 4),
        processing_class=tokenizer,
    )
    random = torch.Generator().manual_seed(4)
    prompts = [tokenizer(line["prompt"], add_special_tokens=False).input_ids for line in lines]
    completions = [line["token_ids"] for line in lines]
    off = [(torch.rand(len(ids), generator=random) - 0.5) * 2 / 3 for ids in completions]
    sampled = [(-2 + each).tolist() for each in off]
    trainer.use_vllm = True
    texts = tokenizer.batch_decode(completions)
    made = (prompts, completions, None, texts, sampled, {}, None, None)
    trainer._generate = lambda _: made
    trainer.vllm_generation = SimpleNamespace()
    found = trainer._generate_and_score_completions([{"prompt": line["prompt"]} for line in lines])

    keys = ["method=grpo", "rewards=[length]", f"importance_sampling_correction={mode}"]
    keys += ["importance_sampling_clip_max=1.2", "importance_sampling_clip_min=0.8"]
    recipe = read_recipe(None, ["model_name_or_path=a/b", "datasets=[{path: a/b}]", *keys])
    lengths = [len(ids) for ids in completions]
    of = torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)])
    trained = torch.cat(
        [row[:n] for row, n in zip(found["old_per_token_logps"], lengths, strict=True)]
    )
    log_ratios = (trained - torch.cat([torch.tensor(each) for each in sampled])).double()
    ratios = compute_sampling_ratios(
        log_ratios, Completions(of, torch.ones_like(of, dtype=torch.bool), len(lines)), recipe
    )
    ours = compute_weights(ratios, recipe)
    theirs = found["importance_sampling_ratio"]
    theirs = theirs.expand(-1, max(lengths)) if theirs.shape[1] == 1 else theirs
    theirs = torch.cat([row[:n] for row, n in zip(theirs, lengths, strict=True)])
    torch.testing.assert_close(ours.float(), theirs, rtol=1e-5, atol=1e-6)
    assert (ours != ratios).any() and (ours == ratios).any() == ("token" in mode)
