"""Given the packages of the kernels, when documents are packed, then one call of each kernel receives all boundaries, as its
published signature wants them; families whose modules would ignore the boundaries run one document at a time."""

import json
from typing import Any

import pytest

from tests.conftest import slow_but
from tests.models.families import LENGTHS
from tests.ranks import run_python

DELTA = {"causal_conv1d_fn", "chunk_gated_delta_rule"}
CONVOLUTION = {"causal_conv1d_fn"}
MAMBA = {"causal_conv1d_fn", "mamba_split_conv1d_scan_combined", "mamba_chunk_scan_combined"}
KERNELS = {
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "olmo_hybrid"), DELTA),
    **dict.fromkeys(
        ("falcon_h1", "bamba", "granitemoehybrid", "nemotron_h", "zamba2", "mamba2"), MAMBA
    ),
    **dict.fromkeys(("lfm2", "lfm2_moe"), CONVOLUTION),
}
AT_A_TIME = ("jamba", "kimi_linear")
QUICK = ("lfm2",)
CLOSE = 1e-5


@pytest.fixture(scope="module")
def found(slow_too: bool) -> dict[str, Any]:
    families = [*KERNELS, *AT_A_TIME] if slow_too else QUICK
    finished = run_python(["-m", "tests.cuda_without_gpu.hybrid_kernels", *families])
    assert finished.returncode == 0, finished.stderr
    return json.loads(finished.stdout.splitlines()[-1])  # type: ignore[no-any-return]


@pytest.mark.parametrize("family", slow_but(QUICK, [*KERNELS, *AT_A_TIME]))
def test_losses_and_gradients_are_those_of_one_document_at_a_time(
    family: str, found: dict[str, Any]
) -> None:
    assert (
        found[family]["loss"] < CLOSE
        and found[family]["gradients"] < CLOSE
        and found[family]["evaluated"] < CLOSE
    )
    assert found[family]["without"] > 100 * CLOSE


@pytest.mark.parametrize("family", slow_but(QUICK, [*KERNELS, *AT_A_TIME]))
def test_a_kernel_that_reads_a_weight_gets_the_dequantized_one(
    family: str, found: dict[str, Any]
) -> None:
    """Mamba's read that of the output projection, whose layer is not called."""
    pytest.importorskip("bitsandbytes")
    assert found[family]["quantized"] < CLOSE


@pytest.mark.parametrize("family", slow_but(QUICK, KERNELS))
def test_every_call_receives_the_boundaries(family: str, found: dict[str, Any]) -> None:
    assert found[family]["calls"].keys() == KERNELS[family]
    assert found[family]["packed"] == found[family]["calls"]
    assert all(calls < len(LENGTHS) for calls in found[family]["calls"].values())


@pytest.mark.parametrize("family", slow_but(QUICK, AT_A_TIME))
def test_modules_that_would_ignore_boundaries_see_one_document(
    family: str, found: dict[str, Any]
) -> None:
    assert found[family]["calls"] == {"causal_conv1d_fn": len(LENGTHS)}
    assert found[family]["packed"] == {"causal_conv1d_fn": 0}
