"""Whether the loss of a run has left where it started and stayed away: by the lines of metrics.jsonl, without torch."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MARGIN = 1.0  # nats per token above the first loss, or a quarter of that loss where it is more: far above
LONG = 10  # lines of metrics in a row


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first and the newest loss (nats per trained token) of a run that has diverged, and their steps."""

    first_step: int
    first_loss: float
    step: int
    loss: float

    def __str__(self) -> str:
        return f"the loss is {self.loss:.4g} at step {self.step:,}, far above the {self.first_loss:.4g} of step {self.first_step:,}"


def losses_of(lines: Iterable[Mapping[str, Any] | None], last_step: int | None = None) -> list[tuple[int, float]]:
    """(step, loss) of the training lines among `lines` of metrics.jsonl, up to `last_step`."""
    found = [(line.get("step"), line.get("loss")) for line in lines if line is not None]
    return [
        (step, float(loss))
        for step, loss in found
        if isinstance(step, int) and isinstance(loss, int | float) and (last_step is None or step <= last_step)
    ]


def find_divergence(losses: Sequence[tuple[int, float]], *, at_end: bool = True) -> Divergence | None:
    """The divergence of a run with these (step, loss); None where the newest losses are not all far above the first.

    They are LONG of them; where a run is over (`at_end`) half of a shorter one, at least two. A loss that is not finite
    is far above.

    >>> print(find_divergence([(1, 7.6), (2, 1263.0), (3, 315.0)]))
    the loss is 315 at step 3, far above the 7.6 of step 1
    >>> find_divergence([(1, 2.0), (2, 9.0), (3, 2.5)])
    """
    start = next((index for index, (_, loss) in enumerate(losses) if math.isfinite(loss)), None)
    if start is None:
        return None
    (first_step, first_loss), later = losses[start], losses[start + 1 :]
    limit = first_loss + max(MARGIN, first_loss / 4)
    wanted = max(2, min(LONG, len(later) // 2)) if at_end else LONG
    if len(later) < wanted or any(loss <= limit for _, loss in later[-wanted:]):
        return None
    step, loss = losses[-1]
    return Divergence(first_step, first_loss, step, loss)
