"""What a machine without GPUs cannot do is refused by name, before ranks are joined or anything is loaded."""

import pytest
import torch

from finetune.errors import UserError
from finetune.sharding.config import Sharding
from finetune.sharding.world import join


@pytest.mark.parametrize("layout", ["fsdp2", "fsdp1", "ddp", "single"])
def test_fp16_on_a_cpu(layout: str) -> None:
    asked = Sharding(layout=layout, mixed_precision="fp16", use_cpu=True, source="mine.yaml")  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"^mine.yaml: mixed_precision: fp16 does not train on a CPU; use bf16 or no$"):
        join(asked)
    assert not torch.distributed.is_initialized()
