"""The caller's session of a stream that is made from the oplog. The oplog is read without it, but a program that uses
the session sees what it would see with the server's stream (rule 15)."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from bson.binary import UUID_SUBTYPE, Binary
from pymongo.errors import ConfigurationError, InvalidOperation

from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.errors import ServerError
from tailrace.watch.client.arguments import refused

_IN_TRANSACTION: Final = 263
_INVALID_OPTIONS: Final = 72


class StreamSession:
    """``session``: PyMongo's, synchronous or asynchronous; ``None``: the stream has one of its own, as with PyMongo."""

    def __init__(self, session: Any) -> None:
        self._session = session
        self._identity: Mapping[str, Any] | None = None

    @property
    def identity(self) -> Mapping[str, Any]:
        """The ``lsid`` of the stream's commands."""
        found = self._identity
        if found is None:
            own = {"id": Binary(uuid.uuid4().bytes, UUID_SUBTYPE)}
            found = self._identity = own if self._session is None else self._session.session_id
        return found

    @property
    def time(self) -> ClusterTime | None:
        """The server would not begin a stream of the session before this time; ``None``: there is no such limit."""
        session = self._session
        if session is None or not session.options.causal_consistency or session.operation_time is None:
            return None
        return ClusterTime.from_timestamp(session.operation_time)

    def check_open(self) -> None:
        """Raises as PyMongo does once the session has ended."""
        if self._session is not None and self._session.has_ended:
            raise refused("Cannot use ended session", InvalidOperation, "End it after the stream")

    def check_aggregate(self) -> None:
        """Raises what the server's ``aggregate`` answers inside a transaction."""
        if self._session is not None and self._session.in_transaction:
            raise ServerError(
                "Operation not permitted in transaction :: caused by :: Aggregation stage $changeStream cannot run "
                "within a multi-document transaction",
                code=_IN_TRANSACTION,
                hint="Watch before the transaction begins, or in another session",
            )

    def check_snapshot(self, server_version: Callable[[], str]) -> None:
        """Raises the error for a session for snapshot reads, which change streams do not support. On 4.4 it is
        PyMongo's own."""
        if self._session is not None and self._session.options.snapshot:
            if server_version().startswith("4."):
                raise refused("Snapshot reads require MongoDB 5.0 or later", ConfigurationError)
            raise ServerError(
                "a change stream does not support the read concern snapshot, which this session asks for",
                code=_INVALID_OPTIONS,
                hint="Watch in another session",
            )

    def check_get_more(self) -> None:
        """Raises what the server's getMore answers if a transaction was begun in the session meanwhile."""
        if self._session is not None and self._session.in_transaction:
            raise ServerError(
                "a transaction was begun in the stream's session, and the stream cannot be read inside it",
                code=_INVALID_OPTIONS,
                hint="Use another session for the transaction",
            )

    def advance(self, time: ClusterTime, clocks: Iterable[Mapping[str, Any] | None]) -> None:
        """Everything up to ``time`` was read, so later reads in the session must not be older. ``clocks``: the
        ``$clusterTime`` of the replies, as the servers sent them; a read that asks for a time has to send one."""
        if self._session is None:
            return
        known = [clock for clock in clocks if clock is not None]
        if time and known:
            for clock in known:
                self._session.advance_cluster_time(clock)
            self._session.advance_operation_time(time.to_timestamp())


def known_clock(client: Any) -> Mapping[str, Any] | None:
    """The newest ``$clusterTime`` that a PyMongo client was sent. PyMongo has no public attribute for it."""
    found: Mapping[str, Any] | None = client._topology.max_cluster_time()
    return found
