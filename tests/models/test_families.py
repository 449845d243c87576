"""Given a folder of a Llama-style family, when it is trained under FSDP2 on two ranks with nothing said about its class,
then its decoder layers are what was sharded, and losses and gradient norms are those of transformers alone."""

from typing import Any

import pytest

from tests.conftest import slow_but
from tests.models.families import FAMILIES, QUICK_FAMILIES

LAYERS = 2


@pytest.mark.parametrize("family", slow_but(QUICK_FAMILIES, FAMILIES))
def test_it_trains_as_transformers_alone_would(family: str, loaded: dict[str, Any]) -> None:
    ours, plain = loaded[family]["ours"], loaded[family]["plain"]
    assert ours["losses"] == pytest.approx(plain["losses"], rel=1e-5)
    assert ours["norms"] == pytest.approx(plain["norms"], rel=1e-4)
    assert ours["losses"][1] < ours["losses"][0]


@pytest.mark.parametrize("family", slow_but(QUICK_FAMILIES, FAMILIES))
def test_each_decoder_layer_is_a_unit(family: str, loaded: dict[str, Any]) -> None:
    units = loaded[family]["ours"]["units"]
    layers = {name: count for name, count in units.items() if name.endswith("DecoderLayer")}
    assert list(layers.values()) == [LAYERS], units


def test_gathers_and_reductions_overlap(loaded: dict[str, Any]) -> None:
    ours = loaded["llama"]["ours"]
    assert all(ours["own_group"]) and len(ours["own_group"]) == LAYERS
    assert ours["gathered_ahead"] == [1] * (LAYERS - 1) + [0]
