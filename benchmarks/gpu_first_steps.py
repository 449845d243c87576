"""Whether the contestants of `gpu.py` have computed the same: their first step has the same weights
and tokens.
"""

from collections.abc import Sequence

from benchmarks.gpu_cases import CASES, Result

BOUND_OF_LOSS = 0.005  # relative: bf16 rounds in another order in each
BOUND_OF_NORM = 0.05


def find_differences(results: Sequence[Result], ours: str, others: Sequence[str]) -> list[str]:
    """A sentence for each row of `others`, who keep documents apart as we do, whose first step is
    not that of our row of the same case.
    """
    own = {result.case: result for result in results if result.who == ours}
    adapted = {case.name for case in CASES if case.use_peft}
    found = []
    for result in results:
        reference = own.get(result.case)
        if result.who not in others or reference is None:
            continue
        compared = [("loss", result.loss, reference.loss, BOUND_OF_LOSS)]
        # each draws adapters of its own; as they start, they change no loss
        if result.case not in adapted:
            compared.append(("gradient norm", result.grad_norm, reference.grad_norm, BOUND_OF_NORM))
        for what, value, expected, bound in compared:
            if (
                value is not None
                and expected is not None
                and not abs(value / expected - 1) <= bound
            ):
                found.append(
                    f"{result.case}, {result.who}: the {what} of its first step is {value:.4f}, "
                    f"ours {expected:.4f}; not the same computation, so do not compare the rows"
                )
    return found
