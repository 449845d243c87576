"""Requests that a server answers while the model trains, held by threads of the main rank.

A change of weights interrupts the requests. Afterwards each continues from its last token, or
starts over. No request is at the server while the weights change, so that each token's weights are
known. Where tools or environments answer, one thread for each step asks turn by turn.
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

from finetune.constants import Fields, Record
from finetune.errors import UserError
from finetune.rollout.engine import Ended, Request, Sampled, Sampling

CUT_SECONDS = 0.2  # a request may reach the paused server late; it is interrupted after this time
SILENT_SECONDS = 10.0  # a server that is silent for this time is asked whether it still runs

Ask = Callable[[Request, Sampling], Sampled]
"""Returns a server's answer to a request: `Ended.ABORTED` where a change of weights cut it."""


def start(action: Callable[[], Any]) -> "Future[Any]":
    """Runs `action` in a daemon thread; returns the future of its result."""
    future: Future[Any] = Future()
    threading.Thread(target=_settle, args=(future, action), daemon=True).start()
    return future


def start_all(actions: Iterable[Callable[[], Any]], threads: int) -> "list[Future[Any]]":
    """Runs actions in at most `threads` daemon threads; returns their futures, in order."""
    tasks: list[tuple[Future[Any], Callable[[], Any]]] = [(Future(), action) for action in actions]
    waiting: SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = SimpleQueue()
    for task in tasks:
        waiting.put(task)

    def work() -> None:
        with suppress(Empty):
            while True:
                _settle(*waiting.get_nowait())

    for _ in range(min(threads, len(tasks))):
        threading.Thread(target=work, daemon=True).start()
    return [future for future, _ in tasks]


def _settle(future: "Future[Any]", action: Callable[[], Any]) -> None:
    try:
        future.set_result(action())
    except BaseException as error:  # raised where the result is asked for
        future.set_exception(error)


def wait_for(future: "Future[Any]", is_there: Callable[[], object]) -> Any:
    """Waits for the result of `future`.

    is_there: Called every SILENT_SECONDS; raises if the server is gone.
    """
    while True:
        try:
            return future.result(SILENT_SECONDS)
        except TimeoutError:
            if future.done():  # now, or the action itself raised a TimeoutError
                return future.result()
            is_there()


class Submitted(NamedTuple):
    """A request that was submitted."""

    name: str
    weights: str  # the name of the server's weights at that time
    answer: "Future[Sampled]"


@dataclass(slots=True)
class Flight:
    """The requests for the completions of one step."""

    submitted: list[Submitted] = field(default_factory=list)
    # The completions that `converse` samples; None: each request's answer is a completion.
    conversation: "Future[list[Sampled]] | None" = None


@dataclass(slots=True)
class InFlight:
    """All requests, and a gate that keeps them from the server while its weights change."""

    ask: Ask
    threads: int
    keeps: bool  # whether an interrupted request keeps its tokens; else it starts over
    flights: dict[int, Flight] = field(default_factory=dict)  # by the step of their prompts
    _gate: threading.Condition = field(default_factory=threading.Condition)
    # the optimizer steps that the server's weights have had; None: the gate is closed
    _weights_version: int | None = None
    _sent: int = 0  # requests that the server has not answered yet
    _waiting: "SimpleQueue[tuple[Future[Sampled], Callable[[], Sampled]]]" = field(
        default_factory=SimpleQueue
    )
    _has_threads: bool = False

    def open(self, version: int) -> None:
        """Opens the gate: the server has the weights of `version` optimizer steps."""
        with self._gate:
            self._weights_version = version
            self._gate.notify_all()

    def close(self, cut: Callable[[], object], seconds: float) -> None:
        """Closes the gate, and waits until the server has answered all requests that it has.

        Args:
            cut: Makes the server end its answers; called repeatedly until all have ended.
            seconds: The longest wait.

        Raises:
            UserError: The server has not answered all in that time.
        """
        deadline = time.monotonic() + seconds
        with self._gate:
            self._weights_version = None
        while self._sent:
            cut()
            with self._gate:
                self._gate.wait_for(lambda: not self._sent, CUT_SECONDS)
            if self._sent and time.monotonic() > deadline:
                raise UserError(
                    f"vllm_server_base_url: {self._sent} completions were not cut within "
                    f"{seconds:g} s of a change of weights; is the server still there?"
                )

    def submit(
        self,
        prompts_step: int,
        weights: str,
        requests: Mapping[str, Request],
        sampling: Sampling,
        known: Mapping[str, Sampled],
        note: Callable[[str, Sampled], None],
    ) -> "list[Future[Sampled]]":
        """Submits `requests`; returns the futures of their completions, in order.

        Args:
            prompts_step: The step of their prompts.
            weights: The name of the server's weights.
            requests: By name.
            sampling: For all of them.
            known: Completions by the names of their requests, which are not sampled again. One
                without tokens, such as LOST, is sampled, and its interruptions are counted.
            note: Called with the name and the completion as soon as it is sampled.
        """
        self._start_threads()
        flight = self.flights.setdefault(prompts_step, Flight())
        answers = []
        for name, request in requests.items():
            future: Future[Sampled] = Future()
            so_far = known.get(name, NOTHING)
            if so_far.token_ids:
                future.set_result(so_far)
            else:
                task = partial(self._complete_and_note, name, request, sampling, so_far, note)
                self._waiting.put((future, task))
            answers.append(future)
            flight.submitted.append(Submitted(name, weights, future))
        return answers

    def converse(self, prompts_step: int, conversation: Callable[[], list[Sampled]]) -> None:
        """Runs `conversation` in a thread.

        It samples the completions of the prompts of `prompts_step`, and submits requests for them.
        """
        flight = Flight()
        self.flights[prompts_step] = flight  # before the thread calls `submit`, which looks for it
        flight.conversation = start(conversation)

    def take(self, prompts_step: int, is_there: Callable[[], object]) -> list[Sampled]:
        """Waits for the completions of the prompts of `prompts_step`, and removes their flight.

        Raises the error of a completion that failed.

        is_there: As in `wait_for`.
        """
        flight = self.flights[prompts_step]
        taken: list[Sampled]
        if flight.conversation is not None:
            taken = wait_for(flight.conversation, is_there)
        else:
            taken = [wait_for(request.answer, is_there) for request in flight.submitted]
        del self.flights[prompts_step]
        return taken

    def list_weights(self) -> Iterator[str]:
        """Yields for each request the name of the weights with which it was submitted."""
        for flight in self.flights.values():
            for request in tuple(flight.submitted):
                yield request.weights

    def describe_lines(self) -> Iterator[Record]:
        """Yields a line of a checkpoint for each request, for `read_lines`.

        `sampled` is the completion, None until the server has answered.
        """
        for prompts_step, flight in self.flights.items():
            for name, weights, answer in tuple(flight.submitted):
                is_answered = answer.done() and answer.exception() is None
                yield {
                    "prompts_step": prompts_step,
                    "request": name,
                    "weights": weights,
                    "sampled": answer.result().as_json() if is_answered else None,
                }

    def _start_threads(self) -> None:
        with self._gate:
            missing = 0 if self._has_threads else self.threads
            self._has_threads = True
        for _ in range(missing):
            threading.Thread(target=self._work, daemon=True).start()

    def _work(self) -> None:
        while True:
            future, task = self._waiting.get()
            _settle(future, task)

    def _complete_and_note(
        self,
        name: str,
        request: Request,
        sampling: Sampling,
        so_far: Sampled,
        note: Callable[[str, Sampled], None],
    ) -> Sampled:
        sampled = self._complete(request, sampling, so_far)
        note(name, sampled)
        return sampled

    def _complete(self, request: Request, sampling: Sampling, so_far: Sampled) -> Sampled:
        """Asks the server again after each change of weights, until the completion has ended."""
        most = sampling.limit(request)
        while True:
            with self._count_request() as version:
                answer = self.ask(_continue(request, so_far, most), sampling)
            answer = replace(answer, versions=[version] * len(answer.token_ids))
            if answer.ended is not Ended.ABORTED:
                return so_far.join(answer)
            if self.keeps:
                so_far = so_far.join(answer)
            else:
                so_far = replace(so_far, dropped=so_far.dropped + len(answer.token_ids))
            so_far = replace(so_far, cuts=so_far.cuts + 1)
            if len(so_far.token_ids) == most:  # cut after its last token
                return replace(so_far, ended=Ended.CUT)

    @contextmanager
    def _count_request(self) -> Iterator[int]:
        """Waits for the gate; yields the version of the server's weights.

        Within the block a request is at the server, and `close` waits for it.
        """
        with self._gate:
            self._gate.wait_for(lambda: self._weights_version is not None)
            version = self._weights_version
            self._sent += 1
        assert version is not None
        try:
            yield version
        finally:
            with self._gate:
                self._sent -= 1
                self._gate.notify_all()


NOTHING = Sampled([], [], 0.0, Ended.CUT)
LOST = replace(NOTHING, cuts=1)  # the end of a run interrupted the request


def _continue(request: Request, so_far: Sampled, most: int) -> Request:
    """Makes the request for the tokens after `so_far`.

    Its seed differs, because the server would draw the first tokens' random numbers again.

    most: The largest number of tokens of the completion, with those `so_far`.
    """
    sampled_ids = so_far.token_ids
    if not sampled_ids:
        return request
    seed = (*request.seed, len(sampled_ids))
    return Request((*request.prompt_ids, *sampled_ids), seed, most - len(sampled_ids))


def read_lines(lines: Sequence[Fields]) -> dict[str, Sampled]:
    """Reads the lines of `describe_lines`: request's name -> completion, or LOST without one."""
    return {
        line["request"]: Sampled.of_json(line["sampled"]) if line["sampled"] else LOST
        for line in lines
    }
