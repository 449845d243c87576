"""Products in bf16 and fp16 on a CPU without instructions for them: the fp32 product, rounded once."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from finetune.models.cpu_products import find_slow_dtypes
from tests.ranks import launch_ranks, run_python
from tests.training.layouts import write_config

SCRIPT = Path(__file__).with_name("products_on_ranks.py")


@pytest.mark.slow
def test_products_are_those_in_fp32_rounded_once() -> None:
    launch_ranks(SCRIPT, timeout=300).check()


@pytest.mark.parametrize(
    ("precision", "dtype"), [("no", "float32"), ("no", "bfloat16"), ("bf16", "float32")]
)
def test_a_run_on_a_cpu_says_that_it_multiplies_in_fp32(
    precision: str, dtype: str, tiny_recipe: Callable[..., Path], tmp_path: Path
) -> None:
    """And a run that computes in fp32 is left as it is."""
    config = write_config(tmp_path, "single", precision)
    recipe = tiny_recipe(max_steps=1, dtype=dtype, export_at_end=False)
    finished = run_python(["finetune/run.py", "--config", str(config), "--recipe", str(recipe)])
    printed = finished.stdout + finished.stderr
    assert "step 1/1" in printed, printed
    said = (
        "cpu     no instructions for bfloat16 and float16: matrices are multiplied in float32"
        in printed
    )
    assert said == (
        torch.bfloat16 in find_slow_dtypes() and (precision, dtype) != ("no", "float32")
    )
