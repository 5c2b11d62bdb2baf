"""What happened to every lease of the chaos, read in order from the server's own change stream, and judged."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

import pymongo
from pymongo.errors import PyMongoError

from tailrace.core.oplog.cluster_time import ClusterTime

#: The ``_id`` of the document that is inserted when all processes have ended.
END: Final = "the end"
Record = dict[str, Any]


class LeaseHistory:
    """The current records, how often positions moved and leases changed hands, and a sentence for each violation.

    A position never goes back; a version never goes down, belongs to one owner, and grows with each owner; a lease that
    is held goes to nobody else before it has expired by the server's clock.
    """

    def __init__(self) -> None:
        self.records: dict[str, Record] = {}
        self.violations: list[str] = []
        self.positions = 0
        self.acquisitions = 0
        #: How often a lease was taken from an owner who had not given it back.
        self.takeovers: Counter[str] = Counter()

    def put(self, name: str, record: Record, at: Any = None) -> None:
        """``at``: when, by the server's wall clock, if the server says so."""
        before = self.records.get(name, {})
        self.records[name] = record
        version, newer = before.get("version", 0), record.get("version", 0)
        owner, new_owner = before.get("owner"), record.get("owner")
        if newer < version:
            self._wrong(name, f"version {newer} after version {version}")
        if new_owner is not None and new_owner != owner and newer <= version:
            self._wrong(name, f"version {newer} belongs to two owners, or to one twice: {owner}, {new_owner}")
        if newer > version:
            self.acquisitions += 1
        if owner is not None and new_owner is not None and new_owner != owner:
            self.takeovers[owner] += 1
            if at is not None and at < before["expiresAt"]:
                self._wrong(name, f"{new_owner} took it at {at} from {owner}, who holds it until {before['expiresAt']}")
        self._compare(name, place(before.get("position")), place(record.get("position")))

    def _compare(self, name: str, before: str | None, after: str | None) -> None:
        if after is None or after == before:
            return
        self.positions += 1
        if before is not None and after < before:
            self._wrong(name, f"the position went back from {before} to {after}")

    def _wrong(self, name: str, what: str) -> None:
        self.violations.append(f"lease {name}: {what}")

    def held_by(self, pid: int) -> list[str]:
        """The leases of a process, whose number is in its owner id."""
        return [name for name, record in self.records.copy().items() if is_of(record.get("owner"), pid)]

    def taken_from(self, pid: int) -> int:
        """How often others took a lease that this process had not given back."""
        return sum(count for owner, count in self.takeovers.copy().items() if is_of(owner, pid))


def is_of(owner: str | None, pid: int) -> bool:
    return owner is not None and f"-{pid}-" in owner


def place(position: Mapping[str, Any] | None) -> str | None:
    """A position's place in the stream as text that sorts as the stream does; ``None`` where it is a plan of lanes."""
    if position is None:
        return None
    if position.get("token") is not None:
        return str(position["token"]["_data"]).upper()
    return f"82{int(ClusterTime.from_timestamp(position['at'])):016X}" if position.get("at") is not None else None


def applied(record: Record, description: Mapping[str, Any]) -> Record:
    """The record after an update."""
    changed = dict(record)
    for path, value in description.get("updatedFields", {}).items():
        _set(changed, path.split("."), value)
    for path in description.get("removedFields", []):
        _unset(changed, path.split("."))
    return changed


def _set(into: Record, path: list[str], value: Any) -> None:
    first, *rest = path
    if not rest:
        into[first] = value
        return
    inner = into.get(first)
    into[first] = inner = dict(inner) if isinstance(inner, Mapping) else inner
    if isinstance(inner, dict):  # values in arrays are not judged
        _set(inner, rest, value)


def _unset(into: Record, path: list[str]) -> None:
    first, *rest = path
    if not rest:
        into.pop(first, None)
    elif isinstance(into.get(first), Mapping):
        into[first] = dict(into[first])
        _unset(into[first], rest)


class LeaseReader:
    """Reads the history in a thread up to the end, whatever the members do."""

    def __init__(self, uri: str, database: str) -> None:
        self.history = LeaseHistory()
        self._uri, self._database = uri, database
        self._error: BaseException | None = None
        self._opened = threading.Event()
        self._thread = threading.Thread(target=self._read_guarded, daemon=True)

    def start(self) -> None:
        """Read from now on."""
        self._thread.start()
        assert self._opened.wait(120), "the stream of the leases was not opened"

    def finish(self) -> None:
        """Write the end, and wait until it was read. All processes have ended."""
        with pymongo.MongoClient[Any](self._uri) as client:
            client[self._database]["leases"].insert_one({"_id": END})
        self._thread.join(300)
        if self._error is not None:
            raise self._error
        assert not self._thread.is_alive(), "the stream of the leases did not come to its end"

    def _read_guarded(self) -> None:
        try:
            self._read()
        except BaseException as error:  # noqa: BLE001  raised by finish()
            self._error = error

    def _read(self) -> None:
        token = None
        with pymongo.MongoClient[Any](self._uri) as client:
            leases = client[self._database]["leases"]
            while True:
                try:
                    with leases.watch(resume_after=token, max_await_time_ms=500) as stream:
                        self._opened.set()
                        while True:
                            event = stream.try_next()
                            token = stream.resume_token
                            if event is not None and self._is_end(event):
                                return
                except PyMongoError:
                    time.sleep(0.2)  # no primary just now

    def _is_end(self, event: Mapping[str, Any]) -> bool:
        name = event["documentKey"]["_id"]
        match event["operationType"]:
            case "insert" | "replace":
                if name == END:
                    return True
                self.history.put(name, event["fullDocument"], event.get("wallTime"))
            case "update":
                record = applied(self.history.records[name], event["updateDescription"])
                self.history.put(name, record, event.get("wallTime"))
        return False
