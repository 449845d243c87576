"""Requests that a server answers while the model trains, sent by threads of the main rank.

A change of weights interrupts the requests. Afterwards each continues from its last token, or
starts over. No request is at the server while the weights change, so that each token's weights are
known. If there are tools or environments, one thread for each step samples turn by turn.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from queue import SimpleQueue
from typing import Any, NamedTuple

from finetune.errors import UserError
from finetune.rollout.engine import Ended, Request, Sampled, Sampling

# A request may reach the paused server late, so requests are interrupted again after this time.
CUT_SECONDS = 0.2
SILENT_SECONDS = 10.0  # a server that is silent for this time is asked whether it still runs

Ask = Callable[[Request, Sampling], Sampled]
"""Sends a request to a server and returns the answer: it is `Ended.ABORTED` if a change of weights
interrupted it.
"""


def start(action: Callable[[], Any]) -> "Future[Any]":
    """Starts `action` in a daemon thread; returns the future of its result."""
    future: Future[Any] = Future()
    threading.Thread(target=_settle, args=(future, action), daemon=True).start()
    return future


class DaemonPool:
    """Daemon threads that run actions: a run that ends does not wait for a server that is gone.

    The threads start at the first action.
    """

    def __init__(self, threads: int) -> None:
        self._missing = threads  # the number of threads that have not been started
        self._starting = threading.Lock()
        # actions that no thread has taken yet, with the futures of their results
        self._waiting: SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = SimpleQueue()

    def submit(self, action: Callable[[], Any]) -> "Future[Any]":
        """Has a thread run `action`; returns the future of its result."""
        with self._starting:
            missing = self._missing
            self._missing = 0
        for _ in range(missing):
            threading.Thread(target=self._work, daemon=True).start()
        future: Future[Any] = Future()
        self._waiting.put((future, action))
        return future

    def _work(self) -> None:
        """Runs one waiting action after another, forever."""
        while True:
            _settle(*self._waiting.get())


def _settle(future: "Future[Any]", action: Callable[[], Any]) -> None:
    """Runs `action`, and gives `future` its result or exception."""
    try:
        future.set_result(action())
    except BaseException as error:  # raised by `future.result()`
        future.set_exception(error)


def wait_for(future: "Future[Any]", require_server: Callable[[], object]) -> Any:
    """Waits for the result of `future`, or raises the exception of its action.

    require_server: Called every SILENT_SECONDS; raises if the server is gone.
    """
    while True:
        try:
            return future.result(SILENT_SECONDS)
        except TimeoutError:
            # The action may have ended in the meantime, or have raised a TimeoutError itself.
            if future.done():
                return future.result()
            require_server()


class Submitted(NamedTuple):
    """A request that was submitted."""

    name: str
    weights: str  # the name of the server's weights when it was submitted
    answer: "Future[Sampled]"  # the completion


@dataclass(slots=True)
class Flight:
    """The requests for the completions of one step's prompts."""

    submitted: list[Submitted] = field(default_factory=list)
    # The completions of several turns that `converse` samples. None: a request's answer is a whole
    # completion.
    conversation: "Future[list[Sampled]] | None" = None


@dataclass(slots=True)
class InFlight:
    """All requests, and a gate that keeps them from the server while its weights change."""

    ask: Ask
    pool: DaemonPool  # has a thread for each request that is at the server
    keeps_tokens: bool  # whether an interrupted request keeps its tokens; else it starts over
    flights: dict[int, Flight] = field(default_factory=dict)  # by `prompts_step`
    # Guards the two fields below, and wakes threads that wait for a change of them.
    _gate: threading.Condition = field(default_factory=threading.Condition)
    # the number of optimizer steps that the server's weights have had; None: the gate is closed
    _weights_version: int | None = None
    _sent: int = 0  # the number of requests that are at the server

    def open(self, version: int) -> None:
        """Opens the gate. The server's weights have had `version` optimizer steps."""
        with self._gate:
            self._weights_version = version
            self._gate.notify_all()

    def close(self, cut: Callable[[], object], seconds: float) -> bool:
        """Closes the gate, and waits until no request is at the server.

        Args:
            cut: Interrupts the requests at the server; called repeatedly until none is left, and
                never if none is there.
            seconds: The longest wait.

        Returns:
            Whether it had to call `cut`.

        Raises:
            UserError: Requests are still at the server after that time.
        """
        deadline = time.monotonic() + seconds
        with self._gate:
            self._weights_version = None
        has_cut = False
        while self._sent:
            cut()
            has_cut = True
            with self._gate:
                self._gate.wait_for(lambda: not self._sent, CUT_SECONDS)
            if self._sent and time.monotonic() > deadline:
                raise UserError(
                    f"vllm_server_base_url: {self._sent} completions were not cut within "
                    f"{seconds:g} s of a change of weights; is the server still there?"
                )
        return has_cut

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
            prompts_step: The step whose prompts they have.
            weights: The name of the server's weights.
            requests: Name -> request.
            sampling: How tokens are drawn.
            known: Request's name -> completion that is not sampled again. A completion without
                tokens, such as LOST, is sampled; its counts of interruptions are kept.
            note: Called with the request's name and its completion as soon as it is sampled.
        """
        flight = self.flights.setdefault(prompts_step, Flight())
        futures = []
        for name, request in requests.items():
            so_far = known.get(name, NOTHING)
            if so_far.token_ids:
                future: Future[Sampled] = Future()
                future.set_result(so_far)
            else:
                future = self.pool.submit(
                    partial(self._complete_and_note, name, request, sampling, so_far, note)
                )
            futures.append(future)
            flight.submitted.append(Submitted(name, weights, future))
        return futures

    def converse(self, prompts_step: int, conversation: Callable[[], list[Sampled]]) -> None:
        """Starts `conversation` in a thread.

        It returns the completions of the prompts of `prompts_step`, and calls `submit` for each
        turn.
        """
        flight = Flight()
        self.flights[prompts_step] = flight  # before the thread starts, which adds requests to it
        flight.conversation = start(conversation)

    def take(self, prompts_step: int, require_server: Callable[[], object]) -> list[Sampled]:
        """Waits for the completions of the prompts of `prompts_step`, and removes their flight.

        Raises the exception of a completion that failed.

        require_server: Raises if the server is gone; see `wait_for`.
        """
        flight = self.flights[prompts_step]
        completions: list[Sampled]
        if flight.conversation is not None:
            completions = wait_for(flight.conversation, require_server)
        else:
            completions = [wait_for(request.answer, require_server) for request in flight.submitted]
        del self.flights[prompts_step]
        return completions

    def describe_lines(self) -> Iterator[dict[str, Any]]:
        """Yields a line of a checkpoint for each request; `read_lines` reads them.

        `sampled` is the completion; None if it has not ended yet or has failed.
        """
        for prompts_step, flight in self.flights.items():
            # a copy: a conversation may add requests
            for name, weights, answer in tuple(flight.submitted):
                is_answered = answer.done() and answer.exception() is None
                yield {
                    "prompts_step": prompts_step,
                    "request": name,
                    "weights": weights,
                    "sampled": answer.result().as_json() if is_answered else None,
                }

    def _complete_and_note(
        self,
        name: str,
        request: Request,
        sampling: Sampling,
        so_far: Sampled,
        note: Callable[[str, Sampled], None],
    ) -> Sampled:
        """Samples a completion and notes it."""
        sampled = self._complete(request, sampling, so_far)
        note(name, sampled)
        return sampled

    def _complete(self, request: Request, sampling: Sampling, so_far: Sampled) -> Sampled:
        """Samples the rest of a completion; asks the server again after each interruption.

        so_far: The tokens and the counts of interruptions up to now.
        """
        most_tokens = sampling.limit(request)
        while True:
            with self._count_request() as version:
                answer = self.ask(_continue(request, so_far, most_tokens), sampling)
            answer = replace(answer, versions=[version] * len(answer.token_ids))
            if answer.ended is not Ended.ABORTED:
                return so_far.join(answer)
            if self.keeps_tokens:
                so_far = so_far.join(answer)
            else:
                so_far = replace(so_far, dropped=so_far.dropped + len(answer.token_ids))
            so_far = replace(so_far, cuts=so_far.cuts + 1)
            if len(so_far.token_ids) == most_tokens:  # interrupted after the last possible token
                return replace(so_far, ended=Ended.CUT)

    @contextmanager
    def _count_request(self) -> Iterator[int]:
        """Waits until the gate is open, and counts a request as being at the server for the block.

        Yields the version of the server's weights, which stay until `close` has waited for the end
        of the block.
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


NOTHING = Sampled([], [], 0.0, Ended.CUT)  # a completion before its first token
LOST = replace(NOTHING, cuts=1)  # the same, once interrupted by the end of a run


def _continue(request: Request, so_far: Sampled, most_tokens: int) -> Request:
    """Makes the request for the tokens after `so_far`.

    Its seed differs from the original one, with which the server would draw the random numbers of
    the first tokens again.

    most_tokens: The most tokens of the completion, including those of `so_far`.
    """
    sampled_ids = so_far.token_ids
    if not sampled_ids:
        return request
    prompt_ids = (*request.prompt_ids, *sampled_ids)
    seed = (*request.seed, len(sampled_ids))
    return Request(prompt_ids, seed, most_tokens - len(sampled_ids))


def read_lines(lines: Sequence[Mapping[str, Any]]) -> dict[str, Sampled]:
    """Reads the lines of `describe_lines`.

    Returns a request's name -> its completion, or LOST if the line has none.
    """
    return {
        line["request"]: Sampled.of_json(line["sampled"]) if line["sampled"] else LOST
        for line in lines
    }
