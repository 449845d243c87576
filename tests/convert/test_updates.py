"""How often an update of bfloat16 weights rounds, which steps are left out, and how long ranks wait, in other tools' files."""

from typing import Any

import pytest
import torch

from finetune.config.optimization import Optimization
from finetune.convert.automodel import PADDED_TO_SPLIT
from finetune.convert.by_tool import ROUNDED_EACH_TIME
from finetune.convert.factory_v1 import SKIPPED_WITHOUT_END
from finetune.optim.optimizers import CONSTRUCTORS
from tests.convert.conftest import Convert, said
from tests.convert.test_loops import AUTOMODEL, TUNE, V1

ADAMW = {"_target_": "torch.optim.AdamW", "lr": 1e-5, "weight_decay": 0.1}
ADAM = {"_target_": "torch.optim.Adam", "lr": 1e-5, "weight_decay": 0}
BF16 = {"model": AUTOMODEL["model"] | {"torch_dtype": "bfloat16"}}  # type: ignore[operator]
FP32 = {"model": AUTOMODEL["model"] | {"torch_dtype": "float32"}}  # type: ignore[operator]
PEFT = {"peft": {"_target_": "nemo_automodel.components._peft.lora.PeftConfig"}}


@pytest.mark.parametrize(
    ("keys", "optimizer"),
    [
        (BF16 | {"optimizer": ADAMW}, "adamw_torch"),
        (BF16 | {"optimizer": ADAM}, "adamw_torch"),
        (BF16 | {"optimizer": ADAMW | {"_target_": "torch.optim.adamw.AdamW"}}, "adamw_torch"),
        (BF16 | {"optimizer": ADAM | {"weight_decay": 0.1}}, "adam"),
        (BF16 | {"optimizer": ADAMW | {"fused": True}}, "adamw_torch_fused"),
        (BF16 | {"optimizer": ADAMW} | PEFT, "adamw_torch_fused"),
        (FP32 | {"optimizer": ADAMW}, "adamw_torch_fused"),
    ],
)
def test_an_update_of_bfloat16_weights_rounds_as_often_as_in_automodel(
    keys: dict[str, Any], optimizer: str, convert: Convert
) -> None:
    """build of its OptimizerFromFactoryConfig leaves foreach and fused to torch's default."""
    made = convert(AUTOMODEL, **keys)
    assert made.recipe["optim"] == optimizer
    assert (ROUNDED_EACH_TIME in said(made)) == (optimizer == "adam")


def test_an_update_of_bfloat16_weights_rounds_as_often_as_in_torchtune(convert: Convert) -> None:
    optimizer = {"_component_": "torch.optim.AdamW", "lr": 1e-5}
    made = convert(TUNE, optimizer=optimizer, dtype="bf16")
    assert made.recipe["optim"] == "adamw_torch"
    made = convert(TUNE, optimizer=optimizer | {"fused": True}, dtype="bf16")
    assert made.recipe["optim"] == "adamw_torch_fused"


def test_adam_without_decay_is_adamw_to_the_last_bit_and_the_fused_kernel_rounds_less() -> None:
    torch.manual_seed(0)
    start = torch.randn(64, 64, dtype=torch.bfloat16) * 0.02
    gradients = [torch.randn_like(start) for _ in range(20)]

    def train(make: Any) -> torch.Tensor:
        weight = torch.nn.Parameter(start.clone())
        optimizer = make([weight])
        for gradient in gradients:
            weight.grad = gradient.clone()
            optimizer.step()
        return weight.detach()

    keys = Optimization(learning_rate=1e-3)

    def make_ours(name: str) -> Any:
        return lambda weights: CONSTRUCTORS[name]([{"params": weights, "weight_decay": 0}], keys)

    adam = train(lambda weights: torch.optim.Adam(weights, lr=1e-3))
    assert torch.equal(train(make_ours("adamw_torch")), adam)
    assert not torch.equal(train(make_ours("adamw_torch_fused")), adam)


@pytest.mark.parametrize(("minutes", "seconds"), [(90, 5400), (30, None), (1, None), ("x", None)])
def test_ranks_wait_as_long_as_in_automodel_if_that_is_longer(
    minutes: Any, seconds: int | None, convert: Convert
) -> None:
    made = convert(AUTOMODEL, dist_env={"backend": "nccl", "timeout_minutes": minutes})
    assert made.recipe.get("timeout_seconds") == seconds
    assert not any("dist_env" in line for line in made.differences)


def test_v1_of_llama_factory_leaves_out_a_step_without_a_finite_gradient(convert: Convert) -> None:
    """fit of its core/base_trainer.py, outside DeepSpeed."""
    made = convert(V1)
    assert made.recipe["on_nonfinite"] == "skip" and SKIPPED_WITHOUT_END in said(made)
    assert "on_nonfinite" not in convert(V1, dist_config={"name": "deepspeed"}).recipe


@pytest.mark.parametrize(("ranks", "is_said"), [(2, True), (1, False)])
def test_documents_are_padded_before_packing_where_ranks_share_a_row(
    ranks: int, is_said: bool, convert: Convert
) -> None:
    """pack_dataset of Automodel's components/datasets/llm/packed_sequence.py."""
    layout = {"strategy": "fsdp2", "cp_size": ranks}
    made = convert(AUTOMODEL, packed_sequence={"packed_sequence_size": 1024}, distributed=layout)
    assert (PADDED_TO_SPLIT in said(made)) == is_said
