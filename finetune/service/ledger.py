"""The requests, results and records of a service in one SQLite file, which survives a kill.

A request is on disk before its client gets an answer. A result is written with the records that the
request changes, in one transaction, before a client can read it. Gradients are only in memory:
requests that made them are kept until the next update, and are done again after a restart.
"""

import json
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from finetune.constants import Fields, Record
from finetune.errors import UserError

RESULTS_KEPT_SECONDS = 24 * 3600.0

# An operation that can do several requests at once -> the arguments that these have in common.
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
AGAIN = "again"  # done, but its gradients are only in memory: done again after a restart


class QueuedRequest(NamedTuple):
    """A request that is to be done."""

    number: int  # the order of arrival
    id: str
    queue: str  # the model, whose requests are done in the order of `seq`; a sample has its own
    seq: int  # place in the queue, from 0
    operation: str  # "save", "refuse", or a name in `OPERATIONS`
    arguments: Fields
    is_again: bool = False  # it has a result; only its gradients are needed

    @property
    def tokens(self) -> int:
        """The number of tokens in its datums."""
        return sum(len(datum["tokens"]) for datum in self.arguments.get("data", ()))

    def goes_beside(self, other: "QueuedRequest") -> bool:
        """Returns whether one operation can do both requests."""
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
        """Opens the database, and reads the requests that an earlier process left.

        Args:
            path: The database's file.
            most_waiting: The limit of waiting requests.
            most_stacked: The limit of requests for `forward_backward` that are done at once.
            most_tokens: The limit of the tokens of all their datums.
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
        self._next: dict[str, int] = {}  # queue -> the `seq` to be done next
        self.on_change: Callable[[], None] = lambda: None  # called when a result can be read
        self._forget_old()
        self._read_queues()

    def _read_queues(self) -> None:
        """Reads the next `seq` of each queue, and the requests that are to be done."""
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
            self._waiting[number] = QueuedRequest(
                number, name, queue, seq, operation, json.loads(arguments), status == AGAIN
            )

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """Yields the database. The block's changes are written together, or not if it raises."""
        with self._lock:
            self._database.execute("BEGIN IMMEDIATE")
            try:
                yield self._database
            except BaseException:
                self._database.execute("ROLLBACK")
                raise
            self._database.execute("COMMIT")

    def _forget_old(self) -> None:
        """Removes results older than RESULTS_KEPT_SECONDS.

        The last result of each queue stays: its `seq` shows which request comes next.
        """
        self._database.execute(
            "DELETE FROM request WHERE status = ? AND at < ? AND (operation = 'sample' OR "
            "number NOT IN (SELECT MAX(number) FROM request GROUP BY queue))",
            [DONE, time.time() - RESULTS_KEPT_SECONDS],
        )

    def put(self, kind: str, name: str, body: Fields) -> None:
        """Writes a record."""
        with self._transaction() as database:
            _put(database, kind, name, body)

    def find(self, kind: str, name: object) -> Record:
        """Reads a record. Raises `UserError` where there is none."""
        with self._lock:
            row = self._database.execute(
                "SELECT body FROM record WHERE kind = ? AND id = ?", [kind, str(name)]
            ).fetchone()
        if row is None:
            raise UserError(f"{kind} {name!r}: is not known here")
        body: Record = json.loads(row[0])
        return body

    @contextmanager
    def held(self) -> Iterator[None]:
        """Lets other threads wait while this block reads and writes."""
        with self._lock:
            yield

    @contextmanager
    def change(self, kind: str, name: str) -> Iterator[Record]:
        """Yields a record, and writes it after the block. Other threads wait meanwhile.

        Raises `UserError` where there is none.
        """
        with self._lock:
            body = self.find(kind, name)
            yield body
            self.put(kind, name, body)

    def records(self, kind: str) -> dict[str, Record]:
        """Reads all records of a kind: id -> body."""
        with self._lock:
            rows = self._database.execute(
                "SELECT id, body FROM record WHERE kind = ?", [kind]
            ).fetchall()
        return {name: json.loads(body) for name, body in rows}

    def remove(self, kind: str, name: str) -> None:
        """Removes a record, if there is one."""
        with self._transaction() as database:
            database.execute("DELETE FROM record WHERE kind = ? AND id = ?", [kind, name])

    def accept(
        self,
        name: str,
        queue: str,
        seq: int,
        operation: str,
        arguments: Fields,
        records: Mapping[tuple[str, str], Fields] | None = None,
    ) -> None:
        """Writes a request to disk, in one transaction with the records that it makes.

        Does nothing for a `name` that was accepted before: a client without an answer sends its
        request again.

        Args:
            name: The request's id.
            queue: Its queue; see `QueuedRequest`.
            seq: Its place in the queue, from 0.
            operation: The operation; see `QueuedRequest`.
            arguments: The operation's arguments; JSON.
            records: The new records: (kind, id) -> body; JSON.

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
        """Waits up to `seconds` for requests that can be done, and done together.

        Returns:
            These requests, which are to be given to `finish`; empty after that time.
        """
        with self._lock:
            self._lock.wait_for(self._find_ready, seconds)
            return self._find_ready()

    def _find_ready(self) -> list[QueuedRequest]:
        """Returns the first request whose turn it is, with later ones that can be done with it."""
        waiting = sorted(self._waiting.values())  # in the order of arrival
        for request in waiting:
            if request.is_again:
                return [request]
        together: list[QueuedRequest] = []
        tokens = 0
        for request in waiting:
            if request.seq != self._next.get(request.queue, 0):
                continue
            if together and not request.goes_beside(together[0]):
                continue
            tokens += request.tokens
            most = self._most_together.get(request.operation, 1)
            if together and (tokens > self._most_tokens or len(together) == most):
                break
            together.append(request)
        return together

    def finish(
        self,
        request: QueuedRequest,
        result: Result,
        records: Mapping[tuple[str, str], Fields],
        *,
        keeps_gradients: bool = False,
        drops_gradients: bool = False,
    ) -> None:
        """Writes a request's result, in one transaction with the records that it changes.

        Does nothing for a request that was finished before.

        Args:
            request: A request that `take` returned.
            result: The answer to the client.
            records: The changed records: (kind, id) -> body; JSON.
            keeps_gradients: The request added gradients, and is done again after a restart.
            drops_gradients: The gradients of its queue were used or lost.
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
        """Closes the database."""
        with self._lock:
            self._database.close()


def _put(database: sqlite3.Connection, kind: str, name: str, body: Fields) -> None:
    database.execute(
        "INSERT OR REPLACE INTO record VALUES (?, ?, ?)", [kind, name, json.dumps(body)]
    )
