"""FSDP2 in a world of one: what is frozen is not copied, and the rest as often as the Accelerate file says."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from finetune.config.layout import Sharding, Strategy
from finetune.config.schema import Lora, Model, Quantization
from finetune.distributed import parallelize
from finetune.distributed.join import join, leave
from finetune.models.load import load_model
from tests.conftest import make_model
from tests.models.families import documents, packed

LORA = Lora(
    use_peft=True,
    lora_r=4,
    lora_target_modules=("q_proj", "down_proj"),
    modules_to_save=("layers.1.mlp.up_proj",),
)


class Copies(TorchDispatchMode):
    """Counts the numbers that `copy_` writes, as FSDP2 does to gather."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if operator is torch.ops.aten.copy_.default:
            self.numbers += args[0].numel()
        return operator(*args, **kwargs or {})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("one") / "model")


def step(
    folder: Path, lora: Lora, bits: int | None = None, strategy: Strategy = "FULL_SHARD"
) -> tuple[int, int, Any]:
    """Trained parameters, numbers copied in the second micro-batch, and its loss and gradients."""
    world = join(Sharding(layout="fsdp2", use_cpu=True, mixed_precision="bf16", strategy=strategy))
    try:
        quantization = Quantization(load_in_4bit=bits == 4)
        model, size = load_model(
            Model(model_name_or_path=str(folder)), lora, 0, world, quantization
        )
        inputs = packed(documents((40, 24)))
        model(**inputs, use_cache=False).backward()
        model.zero_grad()
        with Copies() as copies, torch.autograd.set_multithreading_enabled(False):
            loss = model(**inputs, use_cache=False)
            loss.backward()
        found = [
            loss.detach(),
            *(parallelize.local_part(p.grad) for p in model.parameters() if p.grad is not None),
        ]
        return size.trained, copies.numbers, found
    finally:
        leave(world)


@pytest.mark.parametrize("bits", [None, 4])
def test_a_frozen_base_is_not_copied(
    bits: int | None, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if bits is not None:
        pytest.importorskip("bitsandbytes")
    trained, copied, found = step(folder, LORA, bits)
    monkeypatch.setattr(parallelize, "find_unmanaged", lambda *_: [])
    _, before, expected = step(folder, LORA, bits)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert before > 3 * copied and copied < 4 * trained, (before, copied, trained)


def test_what_is_trained_is_copied_once_where_it_stays_gathered(folder: Path) -> None:
    (trained, twice, found), (_, once, expected) = (
        step(folder, Lora(), strategy=strategy) for strategy in ("FULL_SHARD", "SHARD_GRAD_OP")
    )
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert 0.8 * trained < twice - once <= trained, "all but the head, which stays gathered in both"
