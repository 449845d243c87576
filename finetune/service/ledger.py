"""The requests, results and records of a service in one SQLite file, which survives a kill.

A request is on disk before its client gets an answer. A result is on disk before a client can read
it, and is written in one transaction with the records that the request changes. Gradients are only
in memory: the requests that made them are kept until the next update, and are done again after a
restart.

A record is a JSON object with a kind and an id: a session, a model, a sampler or a checkpoint.
"""

import json
import sqlite3
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from finetune.errors import UserError

RESULTS_KEPT_SECONDS = 24 * 3600.0
# raised where the disk takes no change, mostly because it is full
REFUSED = sqlite3.OperationalError

# An operation that can do several requests at once -> the arguments that must be equal in them.
EQUAL_ARGUMENTS = {
    "sample": ("sampler", "temperature", "stop_ids"),
    "forward_backward": ("loss", "options"),
}
USES_GRADIENTS = ("forward_backward", "optim_step", "load")  # add gradients, use or drop them
SAMPLED_TOGETHER = 256  # the most requests of a sampler that are done at once

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
AGAIN = "again"  # done, but the gradients are only in memory: done again after a restart


class QueuedRequest(NamedTuple):
    """A request that is to be done."""

    number: int  # the order of arrival
    id: str
    queue: str  # a model, whose requests are done in the order of `seq`; a sample's own id
    seq: int  # the place in the queue, from 0
    operation: str  # "save", "refuse", or a name in `OPERATIONS`
    arguments: Mapping[str, Any]
    is_again: bool = False  # it has a result: it is done only for the gradients

    @property
    def tokens(self) -> int:
        """The number of tokens in all datums of the request; 0 for a request without datums."""
        return sum(len(datum["tokens"]) for datum in self.arguments.get("data", ()))

    def can_join(self, other: "QueuedRequest") -> bool:
        """Returns whether one operation can do both requests."""
        if self.operation != other.operation or self.operation not in EQUAL_ARGUMENTS:
            return False
        names = EQUAL_ARGUMENTS[self.operation]
        return all(self.arguments.get(name) == other.arguments.get(name) for name in names)


class Result(NamedTuple):
    """The answer to a request."""

    media: str  # the HTTP content type
    content: bytes


class Ledger:
    """The records and requests of a service. Any thread may call any method."""

    def __init__(
        self, path: Path, most_waiting: int, *, most_stacked: int = 1, most_tokens: int = 0
    ) -> None:
        """Opens the database, and reads the requests that an earlier process left.

        Args:
            path: The database's file, which is made if it does not exist.
            most_waiting: The most requests that may wait.
            most_stacked: The most `forward_backward` requests that are done at once.
            most_tokens: The most tokens that requests done at once may have together. A request
                alone may have more.
        """
        self.lock = threading.Condition()  # other threads wait while one has it
        self._path = path
        self._database = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
        self._database.execute("PRAGMA journal_mode=WAL")
        self._database.execute("PRAGMA synchronous=FULL")
        self._database.executescript(SCHEMA)
        self._most_waiting = most_waiting
        self._most_tokens = most_tokens
        self._most_together = {"sample": SAMPLED_TOGETHER, "forward_backward": most_stacked}
        self._waiting: dict[int, QueuedRequest] = {}  # number -> request that is to be done
        self._next: dict[str, int] = {}  # queue -> the `seq` to be done next
        self._unwritten: list[Callable[[], None]] = []  # each writes a result, in this order
        self._is_refused = False  # whether the disk refused the last result
        self.on_change: Callable[[], None] = lambda: None  # called when a result can be read
        self.forget_old()
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
        """Yields the database. The block's changes are all written, or none if it raises.

        Raises `REFUSED` if the disk takes no change.
        """
        with self.lock:
            self._database.execute("BEGIN IMMEDIATE")
            try:
                yield self._database
                self._database.execute("COMMIT")
            except BaseException:
                self._database.rollback()  # does nothing where SQLite has done so by itself
                raise

    def forget_old(self) -> None:
        """Removes results older than RESULTS_KEPT_SECONDS.

        The result with the highest `seq` of each queue stays: it shows which request comes next.
        """
        with self._transaction() as database:
            database.execute(
                "DELETE FROM request WHERE status = ? AND at < ? AND (operation = 'sample' OR "
                "(queue, seq) NOT IN "
                "(SELECT queue, MAX(seq) FROM request WHERE status != ? GROUP BY queue))",
                [DONE, time.time() - RESULTS_KEPT_SECONDS, WAITING],
            )

    def put(self, kind: str, name: str, body: Mapping[str, Any]) -> None:
        """Writes a record."""
        with self._transaction() as database:
            _put(database, kind, name, body)

    def find(self, kind: str, name: object) -> dict[str, Any]:
        """Reads a record. Raises `UserError` if there is none."""
        with self.lock:
            row = self._database.execute(
                "SELECT body FROM record WHERE kind = ? AND id = ?", [kind, str(name)]
            ).fetchone()
        if row is None:
            raise UserError(f"{kind} {name!r}: is not known here")
        body: dict[str, Any] = json.loads(row[0])
        return body

    @contextmanager
    def change(self, kind: str, name: str) -> Iterator[dict[str, Any]]:
        """Yields a record for the block to change, and writes it afterwards.

        Other threads wait meanwhile. Raises `UserError` if there is no such record.
        """
        with self.lock:
            body = self.find(kind, name)
            yield body
            self.put(kind, name, body)

    def records(self, kind: str) -> dict[str, dict[str, Any]]:
        """Reads all records of a kind: id -> body."""
        with self.lock:
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
        arguments: Mapping[str, Any],
        records: Mapping[tuple[str, str], Mapping[str, Any]] | None = None,
    ) -> None:
        """Writes a request to disk, in one transaction with the records that it makes.

        Does nothing for a `name` that was accepted before, because a client that got no answer
        sends the request again.

        Args:
            name: The request's id.
            queue: The request's queue, as in `QueuedRequest`.
            seq: The place in the queue, from 0.
            operation: The operation, as in `QueuedRequest`.
            arguments: The operation's arguments, which JSON can hold.
            records: The new records: (kind, id) -> body. None: there are none.

        Raises:
            UserError: Too many requests wait.
        """
        with self.lock:
            accepted = self._database.execute("SELECT 1 FROM request WHERE id = ?", [name])
            if accepted.fetchone():
                return
            if len(self._waiting) >= self._most_waiting:
                raise UserError(f"{len(self._waiting)} requests wait already; send fewer at once")
            with self._transaction() as database:
                cursor = database.execute(
                    "INSERT INTO request (id, queue, seq, operation, arguments, status, at) "
                    "VALUES (?, ?, ?, ?, ?, ?, ?)",
                    [name, queue, seq, operation, json.dumps(arguments), WAITING, time.time()],
                )
                for (kind, record), body in (records or {}).items():
                    _put(database, kind, record, body)
            number = int(cursor.lastrowid or 0)
            self._waiting[number] = QueuedRequest(number, name, queue, seq, operation, arguments)
            self.lock.notify_all()

    def take(self, seconds: float) -> list[QueuedRequest]:
        """Waits up to `seconds` for requests that can be done.

        Returns:
            One request, or several that one operation can do; empty if none came. They still count
            as waiting: the caller gives each of them to `finish`, and calls this again only once
            `write_results` has returned True.
        """
        with self.lock:
            self.lock.wait_for(self._find_ready, seconds)
            return self._find_ready()

    def _find_ready(self) -> list[QueuedRequest]:
        """Finds the first request whose turn it is, and later ones that can be done with it.

        After a restart, requests whose gradients were lost come first, one at a time.
        """
        waiting = sorted(self._waiting.values())  # in the order of arrival
        for request in waiting:
            if request.is_again:
                return [request]
        together: list[QueuedRequest] = []
        tokens = 0
        for request in waiting:
            if not self._is_next(request):
                continue
            if together and not request.can_join(together[0]):
                continue
            tokens += request.tokens
            most_requests = self._most_together.get(request.operation, 1)
            if together and (tokens > self._most_tokens or len(together) == most_requests):
                break
            together.append(request)
        return together

    def _is_next(self, request: QueuedRequest) -> bool:
        """Returns whether the earlier requests of a request's queue are done."""
        return request.seq == self._next.get(request.queue, 0)

    def find_ready_queues(self) -> set[str]:
        """Finds the queues that have a request whose turn it is."""
        with self.lock:
            return {each.queue for each in self._waiting.values() if self._is_next(each)}

    def find_waiting_arguments(self, operation: str, name: str) -> set[Any]:
        """Finds the values of an argument in the requests of an operation that are to be done."""
        with self.lock:
            waiting = [each for each in self._waiting.values() if each.operation == operation]
            return {each.arguments[name] for each in waiting}

    def finish(
        self,
        request: QueuedRequest,
        result: Result,
        records: Mapping[tuple[str, str], Mapping[str, Any]],
        *,
        adds_gradients: bool = False,
    ) -> bool:
        """Writes a request's result, in one transaction with the records that it changes.

        Does nothing for a request that was finished before.

        Args:
            request: A request that `take` returned.
            result: The answer to the client.
            records: The changed records: (kind, id) -> body.
            adds_gradients: The request added gradients, and is done again after a restart. Any
                other result of an operation of USES_GRADIENTS means that the model's gradients were
                used or lost: the requests that made them are not done again.

        Returns:
            Whether they are written, as `write_results`.
        """
        write = partial(self._write_result, request, result, records, adds_gradients)
        with self.lock:
            self._unwritten.append(write)
        return self.write_results()

    def write_results(self) -> bool:
        """Writes the results that `finish` was given; returns False if the disk takes none.

        What cannot be written is kept in memory for the next call. The first failure is printed,
        not the next ones.
        """
        with self.lock:
            try:
                while self._unwritten:
                    self._unwritten[0]()
                    del self._unwritten[0]
                self._is_refused = False
            except REFUSED as error:
                if not self._is_refused:
                    print(
                        f"{self._path}: cannot be written ({error}); the server waits, and "
                        "continues once there is room",
                        file=sys.stderr,
                        flush=True,
                    )
                self._is_refused = True
        self.on_change()
        return not self._is_refused

    def _write_result(
        self,
        request: QueuedRequest,
        result: Result,
        records: Mapping[tuple[str, str], Mapping[str, Any]],
        adds_gradients: bool,
    ) -> None:
        """Writes a result as `finish` does, whose arguments these are. The caller has the lock.

        Raises `REFUSED` if the disk takes no change.
        """
        if request.number not in self._waiting:
            return
        with self._transaction() as database:
            if request.operation in USES_GRADIENTS and not adds_gradients:
                database.execute(
                    "UPDATE request SET status = ?, arguments = NULL "
                    "WHERE queue = ? AND status = ?",
                    [DONE, request.queue, AGAIN],
                )
            if not request.is_again:
                arguments = json.dumps(request.arguments) if adds_gradients else None
                status = AGAIN if adds_gradients else DONE
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

    def result(self, name: object) -> Result | None:
        """Returns the answer to a request; None while the request waits.

        Raises `UserError` for a request that was never accepted, or was forgotten.
        """
        with self.lock:
            row = self._database.execute(
                "SELECT status, media, result FROM request WHERE id = ?", [str(name)]
            ).fetchone()
        if row is None:
            raise UserError(f"request {name!r}: is not known here")
        status, media, content = row
        return None if status == WAITING else Result(media, content)

    def close(self) -> None:
        """Closes the database."""
        with self.lock:
            self._database.close()


def _put(database: sqlite3.Connection, kind: str, name: str, body: Mapping[str, Any]) -> None:
    """Writes a record in the transaction that is open."""
    database.execute(
        "INSERT OR REPLACE INTO record VALUES (?, ?, ?)", [kind, name, json.dumps(body)]
    )
