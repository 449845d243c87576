"""8-bit moments: as torch's AdamW up to the quantization, saved as plain fp32, and resumed exactly or in another layout."""

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from finetune.checkpoint.shards import allocate_on_host, dequantize, is_quantized
from finetune.config.schema import Optimization
from finetune.files.tensors import read, read_folder
from finetune.optim.optimizers import build_optimizer
from tests.training.layouts import steps_of, train_all, write_config

# Betas that fp32 holds exactly: torchao corrects for the start in fp32, where 1 - 0.999 is right to 3e-5 only.
BETAS = (0.75, 0.875)
EIGHT_BIT = Optimization(
    optim="adamw_8bit",
    learning_rate=0.1,
    weight_decay=0.3,
    adam_beta1=BETAS[0],
    adam_beta2=BETAS[1],
    adam_epsilon=1e-3,
)
STEPS, SAVED_AT = 6, 3


def moment(signed: bool, blocks: int) -> torch.Tensor:
    """Numbers such as gradients have, block after block over the magnitudes that a moment goes through, and a zero block."""
    numbers = torch.randn(blocks, 256, generator=torch.Generator().manual_seed(blocks))
    numbers = (numbers if signed else numbers.square()) * torch.logspace(-14, 4, blocks)[:, None]
    numbers[0] = 0
    return numbers.view(blocks // 4, 1024)


@pytest.mark.parametrize("signed", [True, False])
def test_what_is_saved_is_quantized_to_the_same_codes_and_scales(signed: bool) -> None:
    torchao = pytest.importorskip("torchao.optim.subclass_8bit", reason="needs torchao")
    given = moment(signed, blocks=2000)
    first, second = (torchao.OptimState8bit.zeros(given.shape, signed) for _ in range(2))
    first.copy_(given)
    assert len(first.codes.unique()) == 256  # every code is tried
    saved = dequantize(first)
    second.copy_(saved)
    assert torch.equal(second.codes, first.codes) and torch.equal(second.scale, first.scale)
    largest = given.view(-1, 256).abs().amax(-1, keepdim=True)
    between_codes = 1.001 * first.qmap.diff().max()
    assert ((saved - given).view(-1, 256).abs() <= between_codes * largest.clip(1e-12)).all()

    behind = allocate_on_host(first)
    behind.copy_(first)
    first.codes.zero_()
    assert torch.equal(behind.codes, second.codes) and torch.equal(behind.scale, second.scale)


def test_first_step_is_torchs_own_and_the_moments_are_kept_in_8_bits() -> None:
    """Before anything is quantized the two are the same up to fp32."""
    pytest.importorskip("torchao", reason="needs torchao")
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 96)
    twin = copy.deepcopy(model)
    optimizer = build_optimizer(torch.nn.Sequential(model), EIGHT_BIT)
    groups = [{"params": [twin.weight]}, {"params": [twin.bias], "weight_decay": 0.0}]
    torchs = torch.optim.AdamW(groups, lr=0.1, weight_decay=0.3, betas=BETAS, eps=1e-3)
    for mine, its in zip(model.parameters(), twin.parameters(), strict=True):
        mine.grad = torch.randn_like(mine)
        its.grad = mine.grad.clone()
    optimizer.step()
    torchs.step()
    assert torch.allclose(model.weight, twin.weight, rtol=1e-6, atol=1e-7)
    assert torch.allclose(model.bias, twin.bias, rtol=1e-6, atol=1e-7)
    assert is_quantized(optimizer.state[model.weight]["exp_avg"])
    assert not is_quantized(optimizer.state[model.bias]["exp_avg"])  # too small
    assert optimizer.param_groups[0]["lr"] == 0.1


def checkpoint(run: Path, step: int) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, whole."""
    folders = (run / "checkpoints" / f"step-{step:08d}" / part for part in ("model", "optimizer"))
    return {
        name: read(tensor) for folder in folders for name, tensor in read_folder(folder).items()
    }


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "other"), [(2, "ddp"), (1, "single")])
def test_a_run_resumes_exactly_and_another_layout_goes_on_from_it(
    ranks: int, other: str, tmp_path: Path, tiny_recipe: Callable[..., Path]
) -> None:
    pytest.importorskip("torchao", reason="needs torchao")
    recipe = tiny_recipe(
        optim="adamw_8bit", save_steps=SAVED_AT, max_steps=STEPS, export_at_end=False
    )
    begun = f"resume_from_checkpoint={tmp_path}/whole/checkpoints/step-{SAVED_AT:08d}"
    sharded, plain = write_config(tmp_path, "full_shard"), write_config(tmp_path, other)
    runs = {
        "whole": (sharded, ["async_save=true"]),
        "resumed": (sharded, [begun]),
        "other": (plain, [begun]),
    }
    listed = [
        (recipe, config, [f"output_dir={tmp_path}/{name}", *given])
        for name, (config, given) in runs.items()
    ]
    train_all(tmp_path, listed, ranks=ranks)

    losses = {line["step"]: line["loss"] for line in steps_of(tmp_path / "whole")}
    assert len(losses) == STEPS and losses[STEPS] < losses[1]
    assert all(
        tensor.dtype == torch.float32
        for tensor in checkpoint(tmp_path / "whole", SAVED_AT).values()
    )
    end, again = checkpoint(tmp_path / "whole", STEPS), checkpoint(tmp_path / "resumed", STEPS)
    assert end.keys() == again.keys()
    assert [name for name in end if not torch.equal(end[name], again[name])] == []
    resumed, elsewhere = (
        {line["step"]: line["loss"] for line in steps_of(tmp_path / n)}
        for n in ("resumed", "other")
    )
    assert resumed == {step: loss for step, loss in losses.items() if step > SAVED_AT}
    assert elsewhere == pytest.approx(resumed, rel=1e-3)
