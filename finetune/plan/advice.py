"""Whether a run fits the device, and if not, the cheapest changes that make it fit."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from finetune.plan.changes import Change, apply_changes, list_changes
from finetune.plan.disk import plan_host
from finetune.plan.run_spec import RunSpec
from finetune.plan.step_memory import find_peak

RANKS_TO_TRY = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)  # where no change is enough


@dataclass(frozen=True, slots=True)
class Advice:
    """`changes` make the run fit, with `peak` bytes, and `host` bytes of a node's memory; None: not even all that were `tried`
    and go together do, but on `ranks` ranks they would (None: on no number)."""

    fits: bool
    changes: tuple[Change, ...] | None
    peak: int
    host: int = 0
    ranks: int | None = None
    tried: tuple[Change, ...] = ()


def advise(spec: RunSpec, device_bytes: int, *, in_recipe: bool = False) -> Advice:
    """The cheapest changes that make `spec` fit: the first that fits alone, or together with those before it.

    `in_recipe`: only changes of keys of the recipe.
    """
    needed = find_peak(spec).total
    if needed <= device_bytes:
        return Advice(True, (), needed)
    changes = [change for change in list_changes(spec) if change.is_in_recipe or not in_recipe]
    orders, peaks = _list_orders(spec, changes), _Peaks(spec)
    best, dearest = None, len(changes)  # of the changes that are enough, those whose dearest is the cheapest
    for order in orders:
        found = _find_enough(peaks, [change for change in order if changes.index(change) < dearest], device_bytes)
        if found is not None:
            best, dearest = found, max(map(changes.index, found))
    if best is not None:
        return Advice(False, best, peaks.after(best), plan_host(apply_changes(spec, best)[0]).total)
    changed = min((apply_changes(spec, order)[0] for order in orders), key=lambda each: find_peak(each).total)
    wider = (ranks for ranks in RANKS_TO_TRY if ranks > spec.ranks and ranks % changed.sharding.smallest_world == 0)
    more_ranks = (replace(changed, ranks=ranks) for ranks in wider)
    ranks = next((each.ranks for each in more_ranks if find_peak(each).total <= device_bytes), None)
    return Advice(False, None, find_peak(changed).total, ranks=ranks, tried=tuple(changes))


class _Peaks:
    """The peak of a run after changes, calculated once for each run that they make of it."""

    def __init__(self, spec: RunSpec) -> None:
        self._spec = spec
        self._known: dict[str, int] = {}

    def after(self, changes: Sequence[Change]) -> int:
        changed = apply_changes(self._spec, changes)[0]
        key = repr((changed.recipe, changed.sharding))
        if key not in self._known:
            self._known[key] = find_peak(changed).total
        return self._known[key]


def _list_orders(spec: RunSpec, changes: list[Change]) -> list[list[Change]]:
    """The `changes` as they are listed; and, since some do not go together, with those first that the ones before them keep out,
    each and every two that go together."""
    left_out = apply_changes(spec, changes)[1]
    pairs = [pair for pair in combinations(left_out, 2) if not apply_changes(spec, pair)[1]]
    return [
        [*first, *(change for change in changes if change not in first)]
        for first in ((), *((change,) for change in left_out), *pairs)
    ]


def _find_enough(peaks: _Peaks, changes: Sequence[Change], device_bytes: int) -> tuple[Change, ...] | None:
    """The first of `changes` that fits alone, or together with those before it; of these the ones that turn out to be unnecessary
    are dropped, the last first."""
    taken: list[Change] = []
    for change in changes:
        if peaks.after([change]) <= device_bytes:
            return (change,)
        taken.append(change)
        if peaks.after(taken) <= device_bytes:
            break
    else:
        return None
    for change in reversed(list(taken)):
        fewer = [other for other in taken if other is not change]
        if peaks.after(fewer) <= device_bytes:
            taken = fewer
    return tuple(taken)
