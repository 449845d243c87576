"""The planned memory of adapters that peft computes, against what torch allocates."""

from itertools import product

import pytest

from finetune.config.schema import Lora
from tests.conftest import slow_but
from tests.plan.small_steps import SMALL, planned_share


@pytest.mark.parametrize(
    ("autocast", "recomputes"),
    slow_but([(True, False), (True, True)], product([False, True], [False, True])),
)
def test_dropout_of_adapters_is_planned(autocast: bool, recomputes: bool) -> None:
    """Under autocast it is computed in fp32, as a whole step shows."""
    lora = Lora(use_peft=True, lora_r=8, lora_dropout=0.1)
    share = planned_share(SMALL, lora=lora, autocast=autocast, recomputes=recomputes)
    assert 1 <= share < 1.15, share
