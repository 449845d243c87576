"""Keys and values that people write and published files rarely have: null, other defaults beside a key, several keys together."""

from typing import Any

import pytest

from tests.convert.conftest import Convert, said

AXOLOTL = {
    "base_model": "org/model",
    "datasets": [{"path": "a/rows", "type": "completion"}],
    "micro_batch_size": 2,
    "learning_rate": 1e-5,
    "num_epochs": 3,
}


@pytest.mark.parametrize(
    ("keys", "steps", "epochs"),
    [
        ({"batch_size": 8}, 1, 0.75),
        ({"batch_size": 2}, 1, 3),
        ({"batch_size": 8, "max_steps": 9}, 1, 3),
        ({"batch_size": 8, "gradient_accumulation_steps": None}, 4, 3),
        ({"gradient_accumulation_steps": None}, None, 3),
    ],
)
def test_batch_size_of_axolotl_counts_steps_unless_the_accumulation_is_null(
    keys: dict[str, Any], steps: int | None, epochs: float, convert: Convert
) -> None:
    """Source: validate_config and normalize_config of Axolotl 0.19 and 0.21, as run on these keys; and
    calculate_total_num_steps, whose steps Trainer gets as max_steps.
    """
    found = convert(AXOLOTL, **keys)
    assert found.recipe.get("gradient_accumulation_steps") == steps
    assert found.recipe["num_train_epochs"] == epochs
    assert ("batch_size: 8" in said(found)) is (epochs == 0.75)
