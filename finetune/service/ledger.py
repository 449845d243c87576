"""What a service was asked, has answered and has: in one SQLite file, so that a kill loses nothing
that was answered.

A request is on disk before its promise is given, and its result before it can be read; what it
changes is written with its result, in one transaction. Gradients are in memory alone: the requests
that made them stay until the next update, and are done again after a restart.
"""

import json
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from finetune.errors import UserError

RESULTS_KEPT_SECONDS = 24 * 3600.0

# Of an operation that several requests may share: what is the same in all of them.
ALIKE = {"sample": ("sampler", "temperature", "stop_ids"), "forward_backward": ("loss", "options")}
SAMPLED_TOGETHER = 256  # requests

SCHEMA = """
CREATE TABLE IF NOT EXISTS record (
    kind TEXT, id TEXT, body TEXT NOT NULL, PRIMARY KEY (kind, id)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS request (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE, queue TEXT, seq INTEGER,
    operation TEXT, arguments TEXT, status TEXT, media TEXT, result BLOB, at REAL
);
"""
WAITING = "waiting"
DONE = "done"
AGAIN = "again"  # done, and to be done again after a restart: its gradients are in memory alone


class QueuedRequest(NamedTuple):
    """A request that was accepted, and has no result yet."""

    number: int  # counts requests in the order of their arrival
    id: str
    queue: str  # its requests are done in the order of `seq`: a model's, or a sample's own
    seq: int  # place in the queue, from 0
    operation: str  # "save", "refuse", or a name in `OPERATIONS`
    arguments: Mapping[str, Any]
    is_again: bool = False  # it has a result, and only its gradients are made again

    @property
    def tokens(self) -> int:
        """The tokens of its datums; 0 where it has none."""
        return sum(len(datum["tokens"]) for datum in self.arguments.get("data", ()))

    def goes_beside(self, other: "QueuedRequest") -> bool:
        """Whether one forward can serve both."""
        if self.operation != other.operation or self.operation not in ALIKE:
            return False
        names = ALIKE[self.operation]
        return all(self.arguments.get(name) == other.arguments.get(name) for name in names)


class Result(NamedTuple):
    """The answer to a request."""

    media: str  # its content type
    content: bytes


class Ledger:
    """Records and requests. Every method may be called by any thread."""

    def __init__(
        self, path: Path, most_waiting: int, *, most_stacked: int = 1, most_tokens: int = 0
    ) -> None:
        """Reads what an earlier process has left in `path`.

        Args:
            path: Of the database.
            most_waiting: Requests.
            most_stacked, most_tokens: Models whose `forward_backward` may share a pass, and the
                tokens of all their datums.
        """
        self._lock = threading.Condition()
        self._database = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
        self._database.execute("PRAGMA journal_mode=WAL")
        self._database.execute("PRAGMA synchronous=FULL")
        self._database.executescript(SCHEMA)
        self._most_waiting = most_waiting
        self._most_tokens = most_tokens
        self._most_together = {"sample": SAMPLED_TOGETHER, "forward_backward": most_stacked}
        self._waiting: dict[int, QueuedRequest] = {}
        self._next: dict[str, int] = {}  # by queue, the `seq` to be done next
        self.on_change: Callable[[], None] = lambda: None  # a result can be read
        self._forget_old()
        for queue, seq in self._database.execute(
            "SELECT queue, MAX(seq) FROM request WHERE status != ? AND operation != 'sample' "
            "GROUP BY queue",
            [WAITING],
        ):
            self._next[queue] = seq + 1
        for row in self._database.execute(
            "SELECT number, id, queue, seq, operation, arguments, status FROM request "
            "WHERE status IN (?, ?)",
            [WAITING, AGAIN],
        ):
            number, name, queue, seq, operation, arguments, status = row
            is_again = status == AGAIN
            given = json.loads(arguments)
            self._waiting[number] = QueuedRequest(
                number, name, queue, seq, operation, given, is_again
            )

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            self._database.execute("BEGIN IMMEDIATE")
            try:
                yield self._database
            except BaseException:
                self._database.execute("ROLLBACK")
                raise
            self._database.execute("COMMIT")

    def _forget_old(self) -> None:
        """Removes results older than RESULTS_KEPT_SECONDS, except the last of each queue, which
        says which request comes next.
        """
        self._database.execute(
            "DELETE FROM request WHERE status = ? AND at < ? AND (operation = 'sample' OR "
            "number NOT IN (SELECT MAX(number) FROM request GROUP BY queue))",
            [DONE, time.time() - RESULTS_KEPT_SECONDS],
        )

    def put(self, kind: str, name: str, body: Mapping[str, Any]) -> None:
        """Writes a record."""
        with self._transaction() as database:
            _put(database, kind, name, body)

    def find(self, kind: str, name: object) -> dict[str, Any]:
        """Reads a record. Raises `UserError` where there is none."""
        with self._lock:
            row = self._database.execute(
                "SELECT body FROM record WHERE kind = ? AND id = ?", [kind, str(name)]
            ).fetchone()
        if row is None:
            raise UserError(f"{kind} {name!r}: is not known here")
        body: dict[str, Any] = json.loads(row[0])
        return body

    def records(self, kind: str) -> dict[str, dict[str, Any]]:
        """All records of a kind, by their id."""
        with self._lock:
            rows = self._database.execute(
                "SELECT id, body FROM record WHERE kind = ?", [kind]
            ).fetchall()
        return {name: json.loads(body) for name, body in rows}

    def remove(self, kind: str, name: str) -> None:
        """Removes a record, where there is one."""
        with self._transaction() as database:
            database.execute("DELETE FROM record WHERE kind = ? AND id = ?", [kind, name])

    def accept(
        self,
        name: str,
        queue: str,
        seq: int,
        operation: str,
        arguments: Mapping[str, Any],
        records: Mapping[tuple[str, str], Mapping[str, Any]] | None = None,
    ) -> None:
        """Writes a request to disk, in one transaction with the records that it makes.

        Does nothing for a `name` that was accepted before: clients send a request again where they
        got no answer.

        Args:
            name: The request's id.
            queue: The queue that orders it; see `QueuedRequest`.
            seq: Its place in the queue, from 0.
            operation: What it asks for; see `QueuedRequest`.
            arguments: Of the operation; JSON.
            records: (kind, id) -> body, of the records to write; JSON.

        Raises:
            UserError: Too many requests wait.
        """
        with self._lock:
            accepted = self._database.execute("SELECT 1 FROM request WHERE id = ?", [name])
            if accepted.fetchone():
                return
            if len(self._waiting) >= self._most_waiting:
                raise UserError(f"{len(self._waiting)} requests wait already; send fewer at once")
            with self._transaction() as database:
                row = database.execute(
                    "INSERT INTO request (id, queue, seq, operation, arguments, status, at) "
                    "VALUES (?, ?, ?, ?, ?, ?, ?)",
                    [name, queue, seq, operation, json.dumps(arguments), WAITING, time.time()],
                )
                for (kind, record), body in (records or {}).items():
                    _put(database, kind, record, body)
            number = int(row.lastrowid or 0)
            self._waiting[number] = QueuedRequest(number, name, queue, seq, operation, arguments)
            self._lock.notify_all()

    def take(self, seconds: float) -> list[QueuedRequest]:
        """Waits up to `seconds` for a request whose turn it is.

        Returns:
            It, with others that can be done together with it; empty after that time. They stay
            waiting until `finish`.
        """
        with self._lock:
            self._lock.wait_for(self._find_ready, seconds)
            return self._find_ready()

    def _find_ready(self) -> list[QueuedRequest]:
        waiting = self._waiting.values()
        again = [request for request in waiting if request.is_again]
        if again:
            return [min(again)]
        ready = sorted(
            request for request in waiting if request.seq == self._next.get(request.queue, 0)
        )
        if not ready:
            return []
        first = ready[0]
        alike = [first, *(request for request in ready[1:] if request.goes_beside(first))]
        sums = accumulate(request.tokens for request in alike)
        fitting = max(1, sum(tokens <= self._most_tokens for tokens in sums))
        return alike[: min(fitting, self._most_together.get(first.operation, 1))]

    def finish(
        self,
        request: QueuedRequest,
        result: Result,
        records: Mapping[tuple[str, str], Mapping[str, Any]],
        *,
        keeps_gradients: bool = False,
        drops_gradients: bool = False,
    ) -> None:
        """Writes a request's result, in one transaction with the records that it changes.

        Does nothing for a request that has a result already.

        Args:
            request: Of `take`.
            result: The answer to the client.
            records: (kind, id) -> body, of the changed records; JSON.
            keeps_gradients: The request added gradients, and is done again after a restart.
            drops_gradients: The gradients of its queue were used, or are lost.
        """
        with self._lock:
            if request.number not in self._waiting:
                return
            with self._transaction() as database:
                if drops_gradients:
                    database.execute(
                        "UPDATE request SET status = ?, arguments = NULL "
                        "WHERE queue = ? AND status = ?",
                        [DONE, request.queue, AGAIN],
                    )
                if not request.is_again:
                    arguments = json.dumps(request.arguments) if keeps_gradients else None
                    status = AGAIN if keeps_gradients else DONE
                    database.execute(
                        "UPDATE request SET status = ?, arguments = ?, media = ?, result = ?, "
                        "at = ? WHERE number = ?",
                        [status, arguments, *result, time.time(), request.number],
                    )
                for (kind, name), body in records.items():
                    _put(database, kind, name, body)
            del self._waiting[request.number]
            if not request.is_again and request.operation != "sample":
                self._next[request.queue] = request.seq + 1
        self.on_change()

    def result(self, name: object) -> Result | None:
        """Returns the answer to a request; None while it waits.

        Raises `UserError` for a request that was never accepted.
        """
        with self._lock:
            row = self._database.execute(
                "SELECT status, media, result FROM request WHERE id = ?", [str(name)]
            ).fetchone()
        if row is None:
            raise UserError(f"request {name!r}: is not known here")
        return None if row[0] == WAITING else Result(row[1], row[2])

    def close(self) -> None:
        """Closes the file."""
        with self._lock:
            self._database.close()


def _put(database: sqlite3.Connection, kind: str, name: str, body: Mapping[str, Any]) -> None:
    database.execute(
        "INSERT OR REPLACE INTO record VALUES (?, ?, ?)", [kind, name, json.dumps(body)]
    )
