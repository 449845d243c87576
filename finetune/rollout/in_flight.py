"""Requests that a server answers while the model trains, and what a change of weights does to them.

Where tools or environments answer, a thread for the completions of each step asks turn by turn.

Threads of the main rank hold them. A change of weights cuts them; then they are continued from
where they were cut, or begin again. Each token knows the weights that sampled it: no request is on
its way while the weights change.
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

from finetune.errors import UserError
from finetune.rollout.engine import Ended, Request, Sampled, Sampling

CUT_SECONDS = 0.2  # after which requests that reached a paused server late are cut again
SILENT_SECONDS = 10.0  # after which a server that is waited for is asked whether it is there

Ask = Callable[[Request, Sampling], Sampled]
"""What a server answers to a request; `Ended.ABORTED` where a change of weights has cut it."""


def start(action: Callable[[], Any]) -> "Future[Any]":
    """Runs an action in a daemon thread; returns its future result."""
    future: Future[Any] = Future()
    threading.Thread(target=_settle, args=(future, action), daemon=True).start()
    return future


def start_all(actions: Iterable[Callable[[], Any]], threads: int) -> "list[Future[Any]]":
    """Runs actions in `threads` daemon threads; returns their future results, in order."""
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
    """Waits for the result of `future`, and calls `is_there` every SILENT_SECONDS, which raises
    where the server is gone.
    """
    while True:
        try:
            return future.result(SILENT_SECONDS)
        except TimeoutError:
            if future.done():
                return future.result()
            is_there()


class Submitted(NamedTuple):
    """A request that a server answers."""

    name: str
    weights: str  # the name of those that it was submitted with
    answer: "Future[Sampled]"


@dataclass(slots=True)
class Flight:
    """The requests for completions of one step of prompts, as far as they are submitted."""

    submitted: list[Submitted] = field(default_factory=list)
    # the completions, where they are more than an answer each
    conversation: "Future[list[Sampled]] | None" = None


@dataclass(slots=True)
class InFlight:
    """Requests by the step of their prompts, and the gate through which each goes to the server."""

    ask: Ask
    threads: int
    keeps: bool  # whether a request that was cut continues from there; else it begins again
    flights: dict[int, Flight] = field(default_factory=dict)
    _gate: threading.Condition = field(default_factory=threading.Condition)
    # steps after which the server's weights were made; None: the gate is closed
    _weights_version: int | None = None
    _sent: int = 0  # requests that the server has not answered yet
    _waiting: "SimpleQueue[tuple[Future[Sampled], Callable[[], Sampled]]]" = field(
        default_factory=SimpleQueue
    )
    _has_threads: bool = False

    def open(self, version: int) -> None:
        """Lets requests go to the server, whose weights are those after `version` steps."""
        with self._gate:
            self._weights_version = version
            self._gate.notify_all()

    def close(self, cut: Callable[[], object], seconds: float) -> None:
        """Holds new requests back, and waits until the server has answered those that were sent.

        Args:
            cut: Makes the server end its answers; called while any is awaited.
            seconds: The longest wait.

        Raises:
            UserError: Some were not answered in that time.
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
        """Asks for completions of `requests`, by their names, except those that are `known`.
        Returns them, in order.

        Args:
            prompts_step: The step of their prompts.
            weights: The name of the weights that the server has.
            requests: In order.
            sampling: Of all of them.
            known: Completions by the names of their requests; one without tokens was lost, and is
                counted as cut.
            note: Keeps a completion as soon as it is there.
        """
        self._start_threads()
        flight = self.flights.setdefault(prompts_step, Flight())
        answers = []
        for name, request in requests.items():
            future: Future[Sampled] = Future()
            before = known.get(name, NOTHING)
            if before.token_ids:
                future.set_result(before)
            else:
                self._waiting.put((future, self._make_task(name, request, sampling, before, note)))
            answers.append(future)
            flight.submitted.append(Submitted(name, weights, future))
        return answers

    def converse(self, prompts_step: int, conversation: Callable[[], list[Sampled]]) -> None:
        """Has a thread sample the completions of the prompts of `prompts_step` by
        `conversation`, which submits requests for them.
        """
        flight = Flight()
        self.flights[prompts_step] = flight  # before the thread submits a request to it
        flight.conversation = start(conversation)

    def take(self, prompts_step: int, is_there: Callable[[], object]) -> list[Sampled]:
        """Waits for the completions of the prompts of `prompts_step`, and removes their flight.

        `is_there`: see `wait_for`. Raises the error of a completion that failed.
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
        """The names of the weights that requests were submitted with."""
        for flight in self.flights.values():
            for request in tuple(flight.submitted):
                yield request.weights

    def describe_lines(self) -> Iterator[dict[str, Any]]:
        """Yields what a checkpoint keeps of each request: its step, name, weights, and the
        completion as JSON, which is None until the server has answered. `read_lines` reads it.
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

    def _make_task(
        self,
        name: str,
        request: Request,
        sampling: Sampling,
        before: Sampled,
        note: Callable[[str, Sampled], None],
    ) -> Callable[[], Sampled]:
        def task() -> Sampled:
            sampled = self._complete(request, sampling, before)
            note(name, sampled)
            return sampled

        return task

    def _complete(self, request: Request, sampling: Sampling, so_far: Sampled) -> Sampled:
        """Asks the server until the completion is whole: each change of weights cuts an answer."""
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
        """Waits until the gate is open, then counts a request as sent for the length of the block,
        which `close` waits for. Yields the version of the server's weights.
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
LOST = replace(NOTHING, cuts=1)  # a request whose completion was not there when the run was stopped


def _continue(request: Request, so_far: Sampled, most: int) -> Request:
    """Makes the request for the tokens after `so_far`, up to `most` in all.

    Its seed is another one, or the server would draw the random numbers of the first tokens again.
    """
    sampled_ids = so_far.token_ids
    if not sampled_ids:
        return request
    seed = (*request.seed, len(sampled_ids))
    return Request((*request.prompt_ids, *sampled_ids), seed, most - len(sampled_ids))


def read_lines(lines: Sequence[Mapping[str, Any]]) -> dict[str, Sampled]:
    """Reads the lines of `describe_lines`: request's name -> completion; `LOST` if not answered."""
    return {
        line["request"]: Sampled.of_json(line["sampled"]) if line["sampled"] else LOST
        for line in lines
    }
