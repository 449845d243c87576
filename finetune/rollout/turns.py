"""The turns of a completion: what was sampled is read as a message, tools answer its calls, and
more is sampled.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any

from finetune.data.messages import Message
from finetune.data.tool_calls import ToolTurns
from finetune.rollout.engine import Ended, Request, Sampled
from finetune.rollout.rewards import Rewards

# a completion's place, the ids of results, calls, failed calls
Answer = tuple[int, list[int], int, int]


@dataclass(frozen=True, slots=True)
class Conversations:
    """The completions of a step while tools answer them.

    The main rank has the rows and messages.
    """

    tools: ToolTurns
    process: Rewards
    max_tokens: int  # of a completion, results included
    rows: Sequence[Mapping[str, Any]]  # [completions]: of their prompts
    messages: list[list[Message]]  # [completions]: so far
    first_place: int = 0  # of their environments, of `Rewards.reserve_places`

    def answer(
        self, pending: Sequence[int], made: Sequence[Sampled], *, may_call: bool
    ) -> list[Answer]:
        """The results for each completion of `pending` that calls tools; no ids where they have no
        room.

        Raises `UserError` for a tool that takes too long.
        """
        called: list[tuple[int, Mapping[str, Any]]] = []
        for i in pending:
            message = self.tools.read(made[i].last_turn(), self.rows[i])
            self.messages[i].append(message)
            if may_call and made[i].ended is Ended.STOPPED:
                called += [(i, call["function"]) for call in message.get("tool_calls", ())]
        if called:
            results = self.process.call_tools(
                [{**function, "place": self.first_place + i} for i, function in called]
            )
        else:
            results = []
        of_completion: dict[int, list[tuple[Message, bool]]] = {}
        for (i, function), (text, failed) in zip(called, results, strict=True):
            said = {"role": "tool", "name": function["name"], "content": text}
            of_completion.setdefault(i, []).append((said, failed))
        return [self._add(i, made[i], turns) for i, turns in of_completion.items()]

    def _add(self, i: int, made: Sampled, turns: Sequence[tuple[Message, bool]]) -> Answer:
        said = [message for message, _ in turns]
        ids = self.tools.encode_results(said, self.rows[i])
        has_room = len(made.token_ids) + len(ids) < self.max_tokens
        self.messages[i] += said if has_room else []
        return i, ids if has_room else [], len(turns), sum(failed for _, failed in turns)


def take_turns(
    requests: Sequence[Request],
    sample: Callable[[Sequence[Request]], list[Sampled]],
    conversations: Conversations,
    iterations: int | None,
    on_main: Callable[[Callable[[], list[Answer]]], list[Answer]],
) -> list[Sampled]:
    """A completion of each request, with all of its turns. All ranks that `on_main` knows call it.

    Args:
        requests: Of all ranks.
        sample: Samples a completion of each of such requests, on all ranks together.
        conversations: With the messages, on the main rank, which grow.
        iterations: How many turns of a completion may call tools; None: all.
        on_main: Of `RankGroup`.
    """
    made = sample(requests)
    pending: Sequence[int] = range(len(made))
    for turn in count(1):
        may_call = iterations is None or turn <= iterations
        answers: list[Answer] = on_main(
            partial(conversations.answer, pending, made, may_call=may_call)
        )
        further: list[tuple[int, list[int], Request]] = []
        for i, given, calls, failed in answers:
            so_far = replace(
                made[i], calls=made[i].calls + calls, failed_calls=made[i].failed_calls + failed
            )
            ids = (*requests[i].prompt_ids, *so_far.token_ids, *given)
            left = conversations.max_tokens - len(so_far.token_ids) - len(given)
            further += [(i, given, Request(ids, (*requests[i].seed, turn), left))] if given else []
            made[i] = so_far if given else replace(so_far, ended=Ended.CUT)
        if not further:
            break
        for (i, given, _), more in zip(
            further, sample([request for *_, request in further]), strict=True
        ):
            made[i] = made[i].extend(given, more)
        pending = [i for i, *_ in further]
    return made
