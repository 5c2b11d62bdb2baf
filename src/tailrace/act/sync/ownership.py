"""Who may write: a lease on the sync's document, and transactions that do nothing once it has gone to another owner.

Each acquisition raises the epoch in the sync's document and in every lane's, in one transaction. A transaction of an
owner begins with an update of such a document that asks for its own epoch. So there are two cases only: it commits
before the new owner's acquisition, or it finds nothing to update. Sessions of the owner before are killed first, since
a transaction of a process that has died would hold its documents for a minute.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Final, TypeVar

from bson.int64 import Int64
from pymongo import ReadPreference
from pymongo.client_session import ClientSession
from pymongo.errors import OperationFailure, PyMongoError
from pymongo.read_concern import ReadConcern

from tailrace.act.consumer.rules.errors import LeaseLost
from tailrace.act.sync.state import SyncState
from tailrace.act.sync.target import MAJORITY, UNKNOWN_COMMIT, answered, is_worth_again, sink_error
from tailrace.base.threads import CheckedThread
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.errors import TailraceError, UsageError
from tailrace.read.source.failure import Backoff

#: The target may be away for so long.
RETRY_SECONDS: Final = 120.0
_COMMIT_TRIES: Final = 5
_DUPLICATE_KEY: Final = 11000
_POLL_S: Final = 0.2
#: A lease is refreshed when this much of it is over.
_REFRESHED: Final = 1 / 3
#: By how much clocks may be wrong: an owner stops writing this much of the lease before its end.
_MARGIN: Final = 0.1

T = TypeVar("T")
_log = logging.getLogger("tailrace.sync")


class SyncOwnership:
    """The right to write, held until ``close``. Transactions of different lanes may run in different threads.

    ``committed_at``  the target's time right after the last transaction of lane 0
    """

    def __init__(self, state: SyncState, owner: str, lanes: int) -> None:
        self.state = state
        self.owner = owner
        self.epoch = 0
        self.committed_at = ClusterTime(0)
        self._sessions = [state.client.start_session(causal_consistency=False) for _ in range(lanes)]
        self._stamps = [""] * lanes
        self._deadline = 0.0
        self._lost: str | None = None
        self._taking_up = threading.Lock()
        self._closed = threading.Event()
        self._thread: CheckedThread | None = None

    # -- the lease --------------------------------------------------------------------------------------------------

    @property
    def lanes(self) -> int:
        return len(self._sessions)

    def check(self) -> None:
        """Raise LeaseLost unless the lease is certainly held now."""
        if self._lost is not None:
            raise LeaseLost(self._lost)
        if time.monotonic() >= self._deadline and not self._taken_up_again():
            raise LeaseLost(
                f"the lease of the sync {self.state.name!r} ran out: the target did not answer in time, or this "
                "process was stopped",
                hint="Start it again: it goes on at its position",
            )

    def _acquire(self) -> bool:
        """Take the lease if it is free. Whether it was."""
        state = self.state
        asked = time.monotonic()
        before = state.read()
        if before is None:
            raise UsageError(f"there is no sync {state.name!r} on the target")
        if not self._is_free():
            return False
        self._kill_sessions_before()
        session = self._sessions[0]
        with session.start_transaction(
            read_concern=ReadConcern("snapshot"), write_concern=MAJORITY, read_preference=ReadPreference.PRIMARY
        ):
            document = state.syncs.find_one_and_update(
                {"_id": state.name, "epoch": Int64(before.epoch), "$expr": _FREE},
                [{"$set": {**self._held(), "owner": {"$literal": self.owner}, "sessions": self._session_ids(),
                           "epoch": Int64(before.epoch + 1), "stamp": ""}}],
                session=session,
            )  # fmt: skip
            if document is None:
                return False
            self.epoch = before.epoch + 1
            self._raise_epochs(session)
        self._deadline = asked + state.settings.lease_s * (1 - _MARGIN)
        return True

    def _begin(self) -> None:
        self._thread = CheckedThread(self._refresh, "tailrace-sync-lease", failed=self._failed)
        self._thread.start()

    def _failed(self, error: TailraceError) -> None:
        self._lost = f"the lease is no longer refreshed: {error.message}"

    def _is_free(self) -> bool:
        document = self.state.syncs.find_one({"_id": self.state.name, "$expr": _FREE}, {"_id": 1})
        return document is not None

    def _raise_epochs(self, session: ClientSession) -> None:
        """Close the fences of the owners before."""
        state, name = self.state, self.state.name
        now = {"sync": name, "now": True}
        for lane in range(1, self.lanes):
            state.lanes.update_one(
                {"_id": {"sync": name, "lane": lane}},
                {"$set": {"epoch": Int64(self.epoch), "stamp": ""}},
                upsert=True,
                session=session,
            )
        state.lanes.update_many(
            {"_id.sync": name}, {"$set": {"epoch": Int64(self.epoch), "stamp": ""}}, session=session
        )
        state.fences.replace_one(
            {"_id": now},
            {"_id": now, "closes": {"sync": name, "epoch": Int64(self.epoch)}},
            upsert=True,
            session=session,
        )
        if self.epoch > 1:
            closes = {"sync": name, "epoch": Int64(self.epoch - 1)}
            state.fences.replace_one({"_id": closes}, {"_id": closes, "closes": closes}, upsert=True, session=session)

    def fence_operation(self) -> dict[str, Any]:
        """The first operation of an ``applyOps`` command that is to do nothing for an old owner. The server holds its
        global lock for all of such a command; for an epoch that was closed, the unique index on ``closes`` lets the
        operation fail, and no other is carried out after it."""
        name = self.state.name
        now = {"sync": name, "now": True}
        document = {"_id": now, "closes": {"sync": name, "epoch": Int64(self.epoch)}}
        return {"op": "u", "ns": f"{self.state.database}.fences", "o2": {"_id": now}, "o": document}

    def judge(self, error: PyMongoError) -> None:
        """Raise LeaseLost if ``error`` is that of the closed fence."""
        details = error.details if isinstance(error, OperationFailure) else None
        if isinstance(error, OperationFailure) and error.code == _DUPLICATE_KEY and ".fences " in str(details):
            self._lost = self._lost or _taken(self.state.name)
            raise LeaseLost(self._lost)

    def _kill_sessions_before(self) -> None:
        document = self.state.syncs.find_one({"_id": self.state.name}, {"sessions": 1}) or {}
        ids = [{"id": one} for one in document.get("sessions") or ()]
        if ids:
            with suppress(OperationFailure):  # another user's sessions: their transactions end on their own
                self.state.client.admin.command("killSessions", ids)

    def _session_ids(self) -> list[Any]:
        return [session.session_id["id"] for session in self._sessions]

    def _held(self) -> dict[str, Any]:
        return {"expiresAt": {"$add": ["$$NOW", Int64(round(self.state.settings.lease_s * 1000))]}}

    def _refresh(self) -> None:
        while not self._closed.wait(self.state.settings.lease_s * _REFRESHED):
            asked = time.monotonic()
            try:
                found = self.state.syncs.update_one({"_id": self.state.name, **self._mine()}, [{"$set": self._held()}])
            except PyMongoError as error:
                if not is_worth_again(error):
                    self._lost = f"the lease cannot be refreshed: {error}"
                    return
                _log.warning("the lease of the sync %s is not refreshed yet: %s", self.state.name, error)
                continue
            if not found.matched_count:
                self._lost = _taken(self.state.name)
                return
            self._deadline = asked + self.state.settings.lease_s * (1 - _MARGIN)

    def _taken_up_again(self) -> bool:
        """Whether a lease that has run out is held again: nobody else took it meanwhile. A transaction of lane 0 keeps
        the sync's document, so that nothing refreshes the lease during it. If it was longer than the lease, and did not
        fit the target's cache, the next owner would be at the same place, and so on for ever."""
        with self._taking_up:
            asked = time.monotonic()
            if asked < self._deadline:
                return True  # by another thread
            try:
                found = self.state.syncs.update_one({"_id": self.state.name, **self._mine()}, [{"$set": self._held()}])
            except PyMongoError as error:
                _log.debug("the lease of the sync %s is not renewed: %s", self.state.name, error)
                return False
            if not found.matched_count:
                self._lost = _taken(self.state.name)
                raise LeaseLost(self._lost)
            self._deadline = max(self._deadline, asked + self.state.settings.lease_s * (1 - _MARGIN))
            return time.monotonic() < self._deadline

    def _mine(self) -> dict[str, Any]:
        return {"epoch": Int64(self.epoch), "owner": self.owner}

    def close(self) -> None:
        """Give the lease back if it is still held."""
        if self._closed.is_set():
            return
        self._closed.set()
        if self._thread is not None:
            self._thread.join()
        with suppress(PyMongoError):
            # The driver uses its sessions again, for whatever this process does: the next owner is not to kill them.
            self.state.syncs.update_one(
                {"_id": self.state.name, **self._mine()}, {"$set": {"owner": None, "expiresAt": None, "sessions": []}}
            )
        for session in self._sessions:
            session.end_session()

    def __enter__(self) -> SyncOwnership:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- transactions -----------------------------------------------------------------------------------------------

    def run(
        self,
        body: Callable[[ClientSession], T],
        *,
        lane: int = 0,
        sets: Mapping[str, Any] | None = None,
        what: str = "write",
    ) -> T:
        """What ``body`` writes with the session, and the fields ``sets`` in the sync's document (lane 0) or the lane's,
        both or neither, once, at majority. What begins with ``$`` in ``sets`` is an operator next to ``$set``. ``body``
        is called again where the transaction is tried again. Raises LeaseLost, with nothing written, where the sync has
        another owner now, and SinkError."""
        backoff = Backoff(give_up_s=RETRY_SECONDS)
        tried: dict[str, T] = {}
        while True:
            self.check()
            stamp = secrets.token_hex(8)
            try:
                return self._try(body, lane, dict(sets or {}), stamp, tried)
            except PyMongoError as error:
                if not is_worth_again(error) or backoff.exhausted:
                    raise sink_error(what, error) from error
                _log.debug("%s is tried again: %s", what, error)
                backoff.wait()

    def _try(
        self, body: Callable[[ClientSession], T], lane: int, sets: dict[str, Any], stamp: str, tried: dict[str, T]
    ) -> T:
        """One transaction. ``tried``: the results of those whose outcome is not known, by their stamps."""
        session = self._sessions[lane]
        if session.in_transaction:
            _abort(session)
        session.start_transaction(
            read_concern=ReadConcern("snapshot"), write_concern=MAJORITY, read_preference=ReadPreference.PRIMARY
        )
        try:
            fence, key = self._fence(lane)
            found = fence.update_one(
                {**key, "epoch": Int64(self.epoch), "stamp": self._stamps[lane]},
                _update(stamp, sets),
                session=session,
            )
            if not found.matched_count:
                _abort(session)
                return self._outcome(lane, tried)
            result = body(session)
        except BaseException:
            _abort(session)
            raise
        tried[stamp] = result
        _commit(session)
        self._stamps[lane] = stamp
        if lane == 0 and session.operation_time is not None:
            self.committed_at = ClusterTime.from_timestamp(session.operation_time)
        return result

    def _fence(self, lane: int) -> tuple[Any, dict[str, Any]]:
        if lane == 0:
            return self.state.syncs, {"_id": self.state.name}
        return self.state.lanes, {"_id": {"sync": self.state.name, "lane": lane}}

    def _outcome(self, lane: int, tried: dict[str, T]) -> T:
        """What an earlier try came to, if it was committed though its answer was lost. Raises LeaseLost otherwise."""
        fence, key = self._fence(lane)
        document = fence.find_one(key)
        if document is not None and document["epoch"] == self.epoch and document["stamp"] in tried:
            self._stamps[lane] = document["stamp"]
            if lane == 0:
                self.committed_at = self.now()
            return tried[document["stamp"]]
        self._lost = self._lost or _taken(self.state.name)
        raise LeaseLost(self._lost)

    def now(self) -> ClusterTime:
        """The target's time."""
        reply = answered("tell its time", lambda: self.state.client.admin.command("ping"))
        return ClusterTime.from_timestamp(reply["operationTime"])


def own(state: SyncState, owner: str | None = None, *, lanes: int | None = None, wait_s: float = 0.0) -> SyncOwnership:
    """The right to write, once it is free; waits for it for ``wait_s`` at most. ``lanes``: how many transactions there
    may be in parallel, if not as many as the settings say. Raises LeaseLost while another owner has it."""
    name = owner or f"{socket.gethostname()}/{os.getpid()}/{secrets.token_hex(4)}"
    ownership = SyncOwnership(state, name, lanes or state.settings.lanes + 1)
    end = time.monotonic() + wait_s
    backoff = Backoff(give_up_s=RETRY_SECONDS)
    while True:
        try:
            if ownership._acquire():
                ownership._begin()
                return ownership
        except PyMongoError as error:
            if not is_worth_again(error) or backoff.exhausted:
                raise sink_error("give the lease of the sync", error) from error
            backoff.wait()
            continue
        if time.monotonic() >= end:
            raise LeaseLost(
                _taken(state.name),
                hint="That process keeps the sync running; or stop it, and wait until its lease has run out",
            )
        time.sleep(_POLL_S)


_FREE: Final = {"$lte": [{"$ifNull": ["$expiresAt", None]}, "$$NOW"]}


def _taken(name: str) -> str:
    return f"the sync {name!r} has another owner"


def _update(stamp: str, sets: Mapping[str, Any]) -> dict[str, Any]:
    operators = {name: value for name, value in sets.items() if name.startswith("$")}
    return {"$set": {"stamp": stamp, **{name: sets[name] for name in sets.keys() - operators.keys()}}, **operators}


def _abort(session: ClientSession) -> None:
    with suppress(PyMongoError):
        if session.in_transaction:
            session.abort_transaction()


def _commit(session: ClientSession) -> None:
    """Commit. An outcome that is not known is asked for again, some times."""
    for left in reversed(range(_COMMIT_TRIES)):
        try:
            session.commit_transaction()
            return
        except PyMongoError as error:
            if not error.has_error_label(UNKNOWN_COMMIT) or not left:
                raise
            time.sleep(_POLL_S)
