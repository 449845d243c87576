"""Samples completions of several turns: reads sampled tokens as a message, has tools answer its
calls, and samples the next turn.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any, NamedTuple

from finetune.data.messages import Message
from finetune.data.tool_calls import ToolTurns
from finetune.rollout.engine import Ended, Request, Sampled
from finetune.rollout.rewards import Rewards


class ToolAnswer(NamedTuple):
    """The results of the tools that one turn of a completion has called."""

    place: int  # of the completion
    ids: list[int]  # the tokens of the results; []: the completion has no room for them
    calls: int  # how many tools were called
    failed_calls: int


@dataclass(frozen=True, slots=True)
class Conversations:
    """The messages of completions, to which turns and tools' results are added.

    `rows` and `messages` are empty except on the main rank.
    """

    tools: ToolTurns
    rewards: Rewards  # its process calls the tools
    max_tokens: int  # of a completion, results of tools included
    rows: Sequence[Mapping[str, Any]]  # [completions]: the data rows of their prompts
    messages: list[list[Message]]  # [completions]: the messages after the prompt so far
    first_place: int = 0  # of the completions' environments, from `Rewards.take_places`

    def answer(
        self, pending: Sequence[int], sampled: Sequence[Sampled], *, may_call: bool
    ) -> list[ToolAnswer]:
        """Reads the latest turns as messages, and calls their tools. The main rank calls it.

        Args:
            pending: The places of the completions with a new turn.
            sampled: All completions.
            may_call: Whether these turns may call tools.

        Returns:
            An answer for each completion whose turn has called tools.

        Raises:
            UserError: As `Rewards.call_tools`.
        """
        calls: list[dict[str, Any]] = []
        callers: list[int] = []  # for each call the completion's place
        for place in pending:
            message = self.tools.read(sampled[place].last_turn(), self.rows[place])
            self.messages[place].append(message)
            # The calls of a turn that was cut are not answered.
            if not (may_call and sampled[place].ended is Ended.STOPPED):
                continue
            for call in message.get("tool_calls", ()):
                calls.append({**call["function"], "place": self.first_place + place})
                callers.append(place)
        if not calls:
            return []
        results: dict[int, list[Message]] = {}  # by the completion's place
        failed_calls: Counter[int] = Counter()  # by the completion's place
        texts = self.rewards.call_tools(calls)
        for place, call, (text, failed) in zip(callers, calls, texts, strict=True):
            result = {"role": "tool", "name": call["name"], "content": text}
            results.setdefault(place, []).append(result)
            failed_calls[place] += failed
        answers = []
        for place, messages in results.items():
            ids = self.tools.encode_results(messages, self.rows[place])
            # At least one token of the next turn must fit behind the results.
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
    most_calling_turns: int | None,
    on_main: Callable[[Callable[[], list[ToolAnswer]]], list[Any]],
) -> list[Sampled]:
    """Samples a completion of each request, with all of its turns.

    All ranks call it together, unless `on_main` and `sample` are those of a single rank.

    Args:
        requests: The requests of all ranks.
        sample: Samples one turn for each request.
        conversations: The messages, to which turns and tools' results are added.
        most_calling_turns: How many turns of a completion may call tools; None: all.
        on_main: `RankGroup.on_main`: runs a function on the main rank, and returns the result on
            every rank. A tuple may arrive as a list.
    """
    sampled = sample(requests)
    pending: Sequence[int] = range(len(sampled))
    for turn in count(1):
        may_call = most_calling_turns is None or turn <= most_calling_turns
        listed = on_main(partial(conversations.answer, pending, sampled, may_call=may_call))
        answers = [ToolAnswer(*each) for each in listed]
        for place, ids, calls, failed_calls in answers:
            so_far = sampled[place]
            ended = so_far.ended if ids else Ended.CUT  # CUT: no room for the results
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
            ids_so_far = (*sampled[place].token_ids, *ids)
            prompt_ids = (*requests[place].prompt_ids, *ids_so_far)
            seed = (*requests[place].seed, turn)
            tokens_left = conversations.max_tokens - len(ids_so_far)
            next_requests.append(Request(prompt_ids, seed, tokens_left))
        for answer, next_turn in zip(answered, sample(next_requests), strict=True):
            sampled[answer.place] = sampled[answer.place].extend(answer.ids, next_turn)
        pending = [answer.place for answer in answered]
    return sampled
