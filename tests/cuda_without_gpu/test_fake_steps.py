"""A step on CUDA: operands on one device, a kernel for every operator, and no wait for the device but those that are listed."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from finetune.config.optimization import OPTIMIZERS
from finetune.config.schema import Optimization
from tests.cuda_without_gpu.fake_cases import CASES, Case
from tests.cuda_without_gpu.waiting_operators import NOT_WAITING, WAITING
from tests.ranks import run_python

# Where a step may wait for the device, and why.
ALLOWED = {
    "step.py:must_skip": "skipped steps are counted on the host; some optimizers, and the host's, read no flag there",
    "gradients.py:backward": "CPU offload: FSDP has the gradients on the host before the optimizer reads them",
    "tensor_parallel.py:sum_partial_gradients": "CPU offload: what the ranks of a tensor group sum goes to the device and back",
    "update_in_backward.py:_update": "as the host's guard, for each parameter",
    "update_in_backward.py:_mark_unless": "as the host's guard, for the loss",
    "gradients.py:update": "fp16: the run ends where the scale has sunk to its floor",
    "experts.py:forward": "the host must know how many tokens come from each rank before it can receive them",
}


QUICK = (
    "full",
    "updated in backward",
    "fp16",
    "nf4, checkpointed",
    "tensor, offload",
    "experts, lora, checkpointed",
    "dpo",
)  # each place of ALLOWED; the other layouts, methods and kernels are slow


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, slow_too: bool) -> dict[str, Any]:
    """What the steps of each case wait for, or its error."""
    results = tmp_path_factory.mktemp("fake-steps") / "results.json"
    chosen = [] if slow_too else QUICK
    done = run_python(
        [str(Path(__file__).with_name("fake_steps.py")), str(results), *chosen], timeout=400
    )
    assert done.returncode == 0, done.stderr
    read: dict[str, Any] = json.loads(results.read_text())
    return read


def test_every_way_to_wait_for_the_device_is_found_and_operands_on_two_devices_are_refused(
    found: Any,
) -> None:
    waits = found["waits"]
    assert all(len(waits[name]) == 1 for name in WAITING), waits
    assert not any(waits[name] for name in NOT_WAITING), waits
    assert all(word in waits["two devices"][0] for word in ("found", "two", "devices"))


def expected_places(case: Case, optimization: Optimization) -> set[str]:
    """Those of ALLOWED at which this step waits."""
    offloads, is_scaled = (
        "cpu_offload" in case.sharding,
        case.sharding.get("mixed_precision") == "fp16",
    )
    reads_flag = OPTIMIZERS[optimization.optim].reads_found_inf and not (offloads or is_scaled)
    waits = {
        "step.py:must_skip": optimization.on_nonfinite == "skip" or not reads_flag,
        "gradients.py:backward": offloads,
        "gradients.py:update": is_scaled,
        "tensor_parallel.py:sum_partial_gradients": offloads
        and "tensor_parallel_size" in case.sharding,
        "update_in_backward.py:_update": optimization.optim_in_backward
        and not (reads_flag or offloads),
        "update_in_backward.py:_mark_unless": optimization.optim_in_backward and offloads,
        "experts.py:forward": "expert_parallel_size" in case.sharding,
    }
    return {place for place, is_expected in waits.items() if is_expected}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.name, marks=[] if case.name in QUICK else pytest.mark.slow)
        for case in CASES
    ],
)
def test_a_step_on_cuda_waits_for_the_device_where_it_must_and_nowhere_else(
    found: Any, case: Case
) -> None:
    assert "error" not in found[case.name], found[case.name].get("error")
    assert len(found[case.name]) == len(case.optimizations)
    for name, optimization in case.optimizations.items():
        waits = found[case.name][name]
        places = Counter(wait["place"] for wait in waits)
        expected = expected_places(case, optimization)
        assert expected <= ALLOWED.keys()
        assert set(places) == expected, f"{case.name}, {name}: {waits}"
        assert places["step.py:must_skip"] <= 1
        forwards = 2 if case.sharding.get("activation_checkpointing") else 1
        assert places["experts.py:forward"] <= case.layers * forwards, (
            "one wait for each layer's tokens"
        )
