"""The turns of a completion: sampled tokens are read as a message, tools answer its calls, and the
model samples the next turn.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any, NamedTuple

from finetune.constants import Fields, Record
from finetune.data.messages import Message
from finetune.data.tool_calls import ToolTurns
from finetune.rollout.engine import Ended, Request, Sampled
from finetune.rollout.rewards import Rewards


class ToolAnswer(NamedTuple):
    """The results of the tools that one turn has called."""

    place: int  # of the completion
    ids: list[int]  # the results as the model reads them; empty: there is no room for them
    calls: int
    failed_calls: int


@dataclass(frozen=True, slots=True)
class Conversations:
    """The messages of a step's completions. Only the main rank has the rows and messages."""

    tools: ToolTurns
    process: Rewards
    max_tokens: int  # of a completion, results of tools included
    rows: Sequence[Fields]  # [completions]: the rows of their prompts
    messages: list[list[Message]]  # [completions]: after the prompt, so far
    first_place: int = 0  # of their environments, as `Rewards.reserve_places` returned it

    def answer(
        self, pending: Sequence[int], sampled: Sequence[Sampled], *, may_call: bool
    ) -> list[ToolAnswer]:
        """Reads the last turns as messages, and calls their tools.

        Args:
            pending: The places of the completions with a new turn.
            sampled: All completions.
            may_call: Whether these turns may call tools.

        Returns:
            An answer for each completion that has called tools.

        Raises:
            UserError: As `Rewards.call_tools`.
        """
        calls: list[Record] = []
        callers: list[int] = []
        for place in pending:
            message = self.tools.read(sampled[place].last_turn(), self.rows[place])
            self.messages[place].append(message)
            if not (may_call and sampled[place].ended is Ended.STOPPED):
                continue
            for call in message.get("tool_calls", ()):
                calls.append({**call["function"], "place": self.first_place + place})
                callers.append(place)
        if not calls:
            return []
        results: dict[int, list[Message]] = {}
        failed_calls: Counter[int] = Counter()
        called = self.process.call_tools(calls)
        for place, call, (text, failed) in zip(callers, calls, called, strict=True):
            result = {"role": "tool", "name": call["name"], "content": text}
            results.setdefault(place, []).append(result)
            failed_calls[place] += failed
        answers = []
        for place, messages in results.items():
            ids = self.tools.encode_results(messages, self.rows[place])
            if len(sampled[place].token_ids) + len(ids) < self.max_tokens:
                self.messages[place] += messages
            else:
                ids = []
            answers.append(ToolAnswer(place, ids, len(messages), failed_calls[place]))
        return answers


def take_turns(
    requests: Sequence[Request],
    sample: Callable[[Sequence[Request]], list[Sampled]],
    conversations: Conversations,
    iterations: int | None,
    on_main: Callable[[Callable[[], list[ToolAnswer]]], list[Any]],
) -> list[Sampled]:
    """Samples a completion of each request, with all of its turns. All ranks of `on_main` call it.

    Args:
        requests: Those of all ranks.
        sample: Samples one turn for each request, on all ranks together.
        conversations: The messages, to which each turn and its results are added.
        iterations: How many turns of a completion may call tools; None: all.
        on_main: That of `RankGroup`: runs a function on the main rank, and returns its result,
            which has become lists, on every rank.
    """
    sampled = sample(requests)
    pending: Sequence[int] = range(len(sampled))
    for turn in count(1):
        may_call = iterations is None or turn <= iterations
        listed = on_main(partial(conversations.answer, pending, sampled, may_call=may_call))
        answers = [ToolAnswer(*each) for each in listed]
        for place, ids, calls, failed_calls in answers:
            so_far = sampled[place]
            ended = so_far.ended if ids else Ended.CUT
            sampled[place] = replace(
                so_far,
                calls=so_far.calls + calls,
                failed_calls=so_far.failed_calls + failed_calls,
                ended=ended,
            )
        answered = [answer for answer in answers if answer.ids]
        if not answered:
            break
        next_requests = []
        for place, ids, *_ in answered:
            before = (*sampled[place].token_ids, *ids)
            prompt_ids = (*requests[place].prompt_ids, *before)
            seed = (*requests[place].seed, turn)
            next_requests.append(Request(prompt_ids, seed, conversations.max_tokens - len(before)))
        for answer, more in zip(answered, sample(next_requests), strict=True):
            sampled[answer.place] = sampled[answer.place].extend(answer.ids, more)
        pending = [answer.place for answer in answered]
    return sampled
