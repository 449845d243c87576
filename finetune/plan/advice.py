"""Whether a run fits the device, and if not, the cheapest changes that make it fit."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from finetune.plan.changes import Change, apply_changes, list_changes
from finetune.plan.memory import find_peak
from finetune.plan.run_spec import RunSpec

RANKS_TO_TRY = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)  # where no change is enough


@dataclass(frozen=True, slots=True)
class Advice:
    """`changes` make the run fit, with `peak` bytes; None: not even all that were `tried` together do, but on `ranks` ranks they
    would (None: on no number)."""

    fits: bool
    changes: tuple[Change, ...] | None
    peak: int
    ranks: int | None = None
    tried: tuple[Change, ...] = ()


def advise(spec: RunSpec, device_bytes: int, *, in_recipe: bool = False) -> Advice:
    """The cheapest changes that make `spec` fit: the first that fits alone, or together with those before it.

    Some changes do not go together: those that the ones before them keep out are tried first as well. `in_recipe`: only changes of
    keys of the recipe.
    """
    needed = find_peak(spec).total
    if needed <= device_bytes:
        return Advice(True, (), needed)
    changes = [change for change in list_changes(spec) if change.is_in_recipe or not in_recipe]
    left_out = apply_changes(spec, changes)[1]
    orders = [changes, *([first, *(other for other in changes if other is not first)] for first in left_out)]
    best, dearest = None, len(changes)  # of the changes that are enough, those whose dearest is the cheapest
    for order in orders:
        found = _find_enough(spec, order, device_bytes) if changes.index(order[0]) < dearest else None
        if found is not None and (last := max(map(changes.index, found))) < dearest:
            best, dearest = found, last
    if best is not None:
        return Advice(False, best, _peak_after(spec, best))
    changed = min((apply_changes(spec, order)[0] for order in orders), key=lambda each: find_peak(each).total)
    wider = (ranks for ranks in RANKS_TO_TRY if ranks > spec.ranks and ranks % changed.sharding.smallest_world == 0)
    more_ranks = (replace(changed, ranks=ranks) for ranks in wider)
    ranks = next((each.ranks for each in more_ranks if find_peak(each).total <= device_bytes), None)
    return Advice(False, None, find_peak(changed).total, ranks, tuple(changes))


def _find_enough(spec: RunSpec, changes: Sequence[Change], device_bytes: int) -> tuple[Change, ...] | None:
    """The first of `changes` that fits alone, or together with those before it; of these the ones that turn out to be unnecessary
    are dropped, the last first."""
    taken: list[Change] = []
    for change in changes:
        if _peak_after(spec, [change]) <= device_bytes:
            return (change,)
        taken.append(change)
        if _peak_after(spec, taken) <= device_bytes:
            break
    else:
        return None
    for change in reversed(list(taken)):
        fewer = [other for other in taken if other is not change]
        if _peak_after(spec, fewer) <= device_bytes:
            taken = fewer
    return tuple(taken)


def _peak_after(spec: RunSpec, changes: Sequence[Change]) -> int:
    return find_peak(apply_changes(spec, changes)[0]).total
