"""Cursors, sessions and operations that somebody kills: what becomes of streams of every flavour, side by side."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from pymongo import MongoClient

from tailrace.embedded import ReplicaSet
from tests.differential.beside import FLAVOURS, Streams, insert, kind, streams_at, wait_until
from tests.quiet import QUIET
from tests.server_in_use import SERVER_VERSION, major

pytestmark = pytest.mark.mongod
StartReplicaSet = Callable[..., ReplicaSet]
_OTHERS = [pytest.param(version, marks=pytest.mark.slow) for version in ("5.0.4", "4.4.2")]
all_versions = pytest.mark.parametrize("version", [SERVER_VERSION, *_OTHERS])


def _cursors(admin: MongoClient[Any], *, waiting: bool) -> list[tuple[str, int]]:
    """The cursors of streams: those with a getMore under way, or those without."""
    operations = admin.admin.aggregate([{"$currentOp": {"idleCursors": True, "allUsers": True}}])
    return [
        (operation["ns"], operation["cursor"]["cursorId"])
        for operation in operations
        if "cursor" in operation and (operation["type"] == "op") == waiting and operation["cursor"].get("tailable")
    ]


def _kill(admin: MongoClient[Any], cursors: list[tuple[str, int]]) -> None:
    for namespace, number in cursors:
        database, _, collection = namespace.partition(".")
        admin[database].command("killCursors", collection, cursors=[number])


def _kill_sessions(admin: MongoClient[Any], cursors: list[tuple[str, int]]) -> None:
    """Those of ``cursors``, with all that is done in them."""
    numbers = {number for _, number in cursors}
    operations = admin.admin.aggregate([{"$currentOp": {"idleCursors": True, "allUsers": True}}])
    lsids = [one["lsid"] for one in operations if one.get("cursor", {}).get("cursorId") in numbers]
    admin.admin.command("killSessions", [{"id": lsid["id"]} for lsid in lsids])


def _kill_all_sessions(admin: MongoClient[Any], cursors: list[tuple[str, int]]) -> None:
    admin.admin.command("killAllSessions", [])


def _kill_operations(admin: MongoClient[Any], cursors: list[tuple[str, int]]) -> None:
    """Each cursor's getMore; on a busy machine one may end, and another begin, before the kill comes."""
    numbers = {number for _, number in cursors}

    def all_are_struck() -> bool:
        missed = False
        for operation in admin.admin.aggregate([{"$currentOp": {"allUsers": True, "idleCursors": True}}]):
            if operation.get("cursor", {}).get("cursorId") not in numbers or operation.get("killPending"):
                continue
            missed = True  # until a later check finds it killed, or gone
            if operation["type"] == "op":
                admin.admin.command("killOp", op=operation["opid"])
        return not missed

    wait_until(all_are_struck, "every read is killed")


#: One cursor for each flavour: streams that share a read have a single one.
_CURSORS = len(FLAVOURS)
_WAYS_TO_KILL = {
    "killCursors": (_kill, 237),
    "killSessions": (_kill_sessions, 11601),
    "killAllSessions": (_kill_all_sessions, 11601),
    "killOp": (_kill_operations, 11601),
}


@all_versions
def test_what_somebody_kills_between_two_calls_is_resumed(start_replica_set: StartReplicaSet, version: str) -> None:
    """Streams that share a read have no idle cursor. ``killAllSessions`` kills the getMore that waits for all of them,
    while none of them is in a call: PyMongo's streams are resumed (43)."""
    deployment = start_replica_set(1, version=version, parameters=QUIET)
    insert(deployment.uri, 0)
    with streams_at(deployment.uri) as streams, MongoClient[Any](deployment.uri) as admin:
        for number, kill in enumerate((_kill, _kill_sessions, _kill_all_sessions), 1):
            insert(deployment.uri, number)
            assert streams.events(1) == [number]
            idle = _cursors(admin, waiting=False)
            assert len(idle) >= _CURSORS - 1  # the shared read waits always
            kill(admin, idle)
            streams.read_on(deployment.uri)
            insert(deployment.uri, number * 10)
            assert streams.events(1) == [number * 10]
        assert streams.alive


def _all_wait(admin: MongoClient[Any], streams: Streams) -> bool:
    """One cursor waits for all streams that share a read, even those that are not in a call: these are tested
    separately."""
    sharing = [stream for name, stream in streams.streams.items() if name.startswith("shared")]
    return len(_cursors(admin, waiting=True)) >= _CURSORS and all(
        stream._source._place.waiter is not None for stream in sharing
    )


def _struck(admin: MongoClient[Any]) -> int:
    """How many getMores were killed, and are still under way."""
    operations = admin.admin.aggregate([{"$currentOp": {"allUsers": True}}])
    return sum(operation["cursor"].get("tailable", False) for operation in operations if _is_killed(operation))


def _one_waits_unhurt(admin: MongoClient[Any]) -> bool:
    """Whether a getMore waits that was not killed. The test once waited ten minutes for a stream to end: the killed
    getMore was still listed, but had already been answered."""
    operations = admin.admin.aggregate([{"$currentOp": {"allUsers": True}}])
    return any(one.get("cursor", {}).get("tailable") and not _is_killed(one) for one in operations)


def _is_killed(operation: dict[str, Any]) -> bool:
    return "cursor" in operation and bool(operation.get("killPending"))


#: How long getMores wait. On a busy machine one may end between the check and the kill, which then hits an idle cursor:
#: then everything is repeated with a longer wait.
_WAITS_MS = (1_500, 6_000, 20_000)


@pytest.mark.parametrize("wakes", [False, True], ids=["quiet", "an event wakes it"])
@all_versions
def test_what_somebody_kills_while_it_waits_ends_the_stream(
    start_replica_set: StartReplicaSet, version: str, wakes: bool
) -> None:
    """The server's getMore answers 237 or 11601 when its wait is over, and so does that of a plain read. PyMongo's
    tailable cursors take 237 for the end of the data and hide it, so ours was opened again. An earlier test had taken
    this for the server's behaviour, and had not tried the other ways."""
    deployment = start_replica_set(1, version=version)
    insert(deployment.uri, 0)

    def ends(kill: Callable[..., None], code: int, wait_ms: int) -> bool:
        """Whether the kill came while all waited; then each stream has ended."""
        with (
            ThreadPoolExecutor(1) as pool,
            streams_at(deployment.uri, max_await_time_ms=wait_ms) as streams,
        ):
            insert(deployment.uri, 1)
            assert streams.events(1) == [1]
            waited = pool.submit(streams.each, lambda stream: stream.next())
            wait_until(lambda: _all_wait(admin, streams), "all wait")
            kill(admin, _cursors(admin, waiting=True))
            # 7.0 ends a wait at once, so that nothing that was killed is still under way.
            struck = major(version) >= 7 or _struck(admin) >= _CURSORS
            if struck and not wakes:
                wait_until(lambda: waited.done() or _one_waits_unhurt(admin), "each stream ends, or waits again")
            if not waited.done():
                insert(deployment.uri, 2)  # which ends the other calls
            outcomes = waited.result()
            if not struck or not all(isinstance(each, Exception) for each in outcomes.values()):
                return False
            assert {name: kind(each) for name, each in outcomes.items()} == dict.fromkeys(
                outcomes, ("OperationFailure", code)
            )
            assert not streams.alive
            return True

    with MongoClient[Any](deployment.uri) as admin:
        for name, (kill, code) in _WAYS_TO_KILL.items():
            assert any(ends(kill, code, wait_ms) for wait_ms in _WAITS_MS), f"{name} never came in time"
