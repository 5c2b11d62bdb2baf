"""A session that is passed to a stream: what a program that uses it sees, compared with PyMongo's.

No test had looked at the session after ``watch()``. Our stream silently went on when its session had ended, could be
opened inside a transaction, and the session's later reads could be older than the events.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
from pymongo import MongoClient
from pymongo.errors import ConfigurationError, InvalidOperation, PyMongoError

import tailrace
from tailrace.embedded import ReplicaSet, ShardedCluster
from tests.differential.beside import AsyncStream, event_loop, insert, kind, on, outcome
from tests.server_in_use import IN_BETWEEN, SERVER_VERSION

pytestmark = pytest.mark.mongod
_WAYS = ("pymongo", "server", "oplog", "async oplog")


def _kind(result: Any) -> Any:
    theirs = [each.__name__ for each in (InvalidOperation, ConfigurationError) if isinstance(result, each)]
    return theirs[0] if theirs else kind(result)


class _Watched:
    """A client of one kind, its collection, and streams over it that are called from here."""

    def __init__(self, client: Any, loop: Any) -> None:
        self.client = client
        self._loop = loop

    def session(self, **options: Any) -> Any:
        return self.client.start_session(**options)

    def run(self, call: Callable[[], Any]) -> Any:
        found = call()
        return on(self._loop, found) if hasattr(found, "__await__") else found

    def watch(self, session: Any) -> Any:
        stream = self.run(lambda: self.client.failing.c.watch(session=session, max_await_time_ms=200))
        return stream if self._loop is None else AsyncStream(self._loop, stream)


@contextmanager
def watched(way: str, uri: str) -> Iterator[_Watched]:
    if way.startswith("async"):
        with event_loop() as loop:

            async def opened() -> Any:
                return tailrace.AsyncClient(uri)

            client: Any = on(loop, opened())
            try:
                yield _Watched(client, loop)
            finally:
                on(loop, client.close())
        return
    made = MongoClient[Any](uri) if way == "pymongo" else tailrace.connect(uri, engine=way)  # type: ignore[arg-type]
    with made:
        yield _Watched(made, None)


def _what_is_seen(way: str, deployment: Any) -> dict[str, Any]:
    """Everything that a program sees with one kind of client."""
    seen: dict[str, Any] = {}
    with watched(way, deployment.uri) as at:
        with suppress(PyMongoError):
            at.run(lambda: at.client.admin.command("ping"))
        session = at.session(causal_consistency=True)
        stream = at.watch(session)
        insert(deployment.uri, 1)
        event = stream.next()
        seen["the session is not behind the event"] = session.operation_time >= event["clusterTime"]
        seen["nor its clock"] = session.cluster_time["clusterTime"] >= event["clusterTime"]
        found = at.run(lambda: at.client.failing.c.find_one({"n": 1}, session=session))
        seen["it reads what the event told"] = found is not None
        at.run(session.end_session)
        seen["it has ended"] = _kind(outcome(stream.next)), stream.alive
        stream.close()

        session = at.session()
        at.run(session.start_transaction)
        seen["in a transaction"] = _kind(outcome(lambda: at.watch(session)))
        with suppress(PyMongoError):
            at.run(session.abort_transaction)
        at.run(session.end_session)

        session = at.session()
        stream = at.watch(session)
        at.run(session.start_transaction)
        seen["a transaction was begun"] = _kind(outcome(stream.try_next)), stream.alive
        with suppress(PyMongoError):
            at.run(session.abort_transaction)
        at.run(session.end_session)
        stream.close()

        session = at.session(snapshot=True)
        seen["of a snapshot"] = _kind(outcome(lambda: at.watch(session)))
        at.run(session.end_session)
    return seen


@pytest.mark.parametrize("version", [SERVER_VERSION, IN_BETWEEN, "4.4.2"])
def test_a_session_sees_what_it_sees_with_pymongo(
    start_replica_set: Callable[..., ReplicaSet], version: str, replica_set: ReplicaSet
) -> None:
    deployment = replica_set if version == SERVER_VERSION else start_replica_set(1, version=version)
    insert(deployment.uri, 0)
    seen = {way: _what_is_seen(way, deployment) for way in _WAYS}
    assert seen == dict.fromkeys(_WAYS, seen["pymongo"])
    assert seen["pymongo"]["it has ended"] == ("InvalidOperation", False)
    assert seen["pymongo"]["in a transaction"] == ("OperationFailure", 263)
    assert seen["pymongo"]["the session is not behind the event"]


def test_a_session_follows_a_cluster_s_stream(sharded_cluster: ShardedCluster) -> None:
    with (
        tailrace.connect(sharded_cluster.uri) as client,
        client.start_session() as session,
        client["sessions"].watch(session=session, max_await_time_ms=200) as stream,
    ):
        assert stream.try_next() is None
        assert session.operation_time is not None
        session.end_session()
        assert _kind(outcome(stream.next)) == "InvalidOperation"
        assert not stream.alive
