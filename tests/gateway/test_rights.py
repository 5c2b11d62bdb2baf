"""A client watches through the gateway what it may watch at the server, and nothing else: users, roles, sessions."""

from __future__ import annotations

import itertools
import socket
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import bson
import pymongo
import pytest
from bson.binary import Binary
from bson.int64 import Int64
from pymongo.errors import OperationFailure

from tailrace.embedded import Mongod
from tailrace.watch.gateway.frame import op_msg
from tests.differential.auth import PASSWORD, ROOT, add_user, mongod_with_users, uri_of
from tests.gateway.gateways import RunningGateway, running_gateway
from tests.gateway.side_by_side import OLDER_ARE_SLOW
from tests.server_in_use import LANGUAGE

pytestmark = pytest.mark.mongod

#: How the server says it, which checks the login.
COMMAND = "Command" if LANGUAGE >= (7, 0) else "command"

_LIMIT_S = 300.0
_ONE = {"resource": {"db": "shop", "collection": "orders"}, "actions": ["changeStream", "find"]}
#: What each user may do. Two privileges together may allow what one alone does not; half of the rights allow nothing.
ROLES: dict[str, list[Any]] = {
    "reader": [{"role": "read", "db": "shop"}],
    "second": [{"role": "read", "db": "shop"}],
    "elsewhere": [{"role": "read", "db": "blog"}],
    "everywhere": [{"role": "readAnyDatabase", "db": "admin"}],
    "writer": [{"role": "readWrite", "db": "shop"}],
    "one": [],
    "halved": [],
    "joined": [],
    "named": [],
    "nobody": [],
    "killsCluster": [],
    "killsDatabase": [],
    "killsCollection": [],
    "killsAnother": [],
}
PRIVILEGES: dict[str, list[Any]] = {
    "one": [_ONE],
    "halved": [{"resource": {"db": "shop", "collection": ""}, "actions": ["find"]}],
    "joined": [
        {"resource": {"db": "shop", "collection": "orders"}, "actions": ["find"]},
        {"resource": {"db": "", "collection": ""}, "actions": ["changeStream"]},
    ],
    "named": [{"resource": {"db": "", "collection": "orders"}, "actions": ["changeStream", "find"]}],
    "killsCluster": [{"resource": {"cluster": True}, "actions": ["killAnyCursor"]}],
    "killsDatabase": [{"resource": {"db": "shop", "collection": ""}, "actions": ["killAnyCursor"]}],
    "killsCollection": [{"resource": {"db": "shop", "collection": "orders"}, "actions": ["killAnyCursor"]}],
    "killsAnother": [{"resource": {"db": "blog", "collection": ""}, "actions": ["killAnyCursor"]}],
}
KILLERS = [name for name in PRIVILEGES if name.startswith("kills")]
SCOPES: tuple[tuple[str, Any, dict[str, Any]], ...] = (
    ("shop", "orders", {}),
    ("shop", "items", {}),
    ("shop", 1, {}),
    ("blog", "orders", {}),
    ("blog", 1, {}),
    ("admin", 1, {"allChangesForCluster": True}),
    ("local", "oplog.rs", {}),
    ("config", "shards", {}),
    ("shop", "system.js", {}),
    ("shop", "system.views", {}),
)


class Guarded(NamedTuple):
    mongod: Mongod
    running: RunningGateway

    def at_server(self, user: str) -> pymongo.MongoClient[dict[str, Any]]:
        password = PASSWORD if user == ROOT else "pw"
        return pymongo.MongoClient(uri_of(self.mongod, user, password, directConnection="true"))

    def at_gateway(self, user: str) -> pymongo.MongoClient[dict[str, Any]]:
        password = PASSWORD if user == ROOT else "pw"
        return pymongo.MongoClient(self.running.uri("authSource=admin&directConnection=true", f"{user}:{password}"))


@pytest.fixture(scope="module", params=OLDER_ARE_SLOW)
def guarded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    with mongod_with_users(Path(tmp_path_factory.mktemp("guarded")), version=request.param) as mongod:
        with pymongo.MongoClient[dict[str, Any]](uri_of(mongod, ROOT, PASSWORD)) as root:
            for name, privileges in PRIVILEGES.items():
                root.admin.command("createRole", f"{name}Role", privileges=privileges, roles=[])
        for user, roles in ROLES.items():
            add_user(mongod, user, "pw", [*roles, *([f"{user}Role"] if user in PRIVILEGES else [])])
        with running_gateway(uri_of(mongod, ROOT, PASSWORD), rights_seconds=0.0) as running:
            yield Guarded(mongod, running)


def outcome(client: pymongo.MongoClient[dict[str, Any]], database: str, collection: Any, **options: Any) -> Any:
    """The outcome of opening a stream: opened, or the error without what differs from connection to connection."""
    command = {"aggregate": collection, "pipeline": [{"$changeStream": options}], "cursor": {"batchSize": 0}}
    try:
        client[database].command(command)
    except OperationFailure as error:
        text = str((error.details or {})["errmsg"])
        return error.code, text.partition(", lsid: {")[0]
    return "opened"


@pytest.mark.parametrize("user", [*ROLES, ROOT])
def test_each_user_may_watch_what_the_server_lets_him(guarded: Guarded, user: str) -> None:
    with guarded.at_server(user) as server, guarded.at_gateway(user) as gateway:
        opened = guarded.running.call(lambda: guarded.running.gateway.metrics.streams_opened)
        found = {
            (database, collection): (
                outcome(server, database, collection, **options),
                outcome(gateway, database, collection, **options),
            )
            for database, collection, options in SCOPES
        }
        ours = guarded.running.call(lambda: guarded.running.gateway.metrics.streams_opened) - opened
    assert {scope: through for scope, (_, through) in found.items()} == {
        scope: native for scope, (native, _) in found.items()
    }
    # What was opened was opened by the engine.
    assert ours == sum(native == "opened" for native, _ in found.values())


def test_who_has_not_logged_in_watches_nothing(guarded: Guarded) -> None:
    with pymongo.MongoClient[dict[str, Any]](guarded.running.uri("directConnection=true")) as client:
        for database, collection, options in SCOPES:
            code, text = outcome(client, database, collection, **options)
            assert (code, text) == (13, f"{COMMAND} aggregate requires authentication")
        for command in ({"getMore": Int64(5), "collection": "c"}, {"killCursors": "c", "cursors": [Int64(5)]}):
            with pytest.raises(OperationFailure, match="requires authentication"):
                client.shop.command(command)


class Cursor:
    """A cursor that ``reader`` has opened, at the server or at the gateway."""

    def __init__(self, client: pymongo.MongoClient[dict[str, Any]], session: Binary | None) -> None:
        self.session = session
        command: dict[str, Any] = {"aggregate": "orders", "pipeline": [{"$changeStream": {}}], "cursor": {}}
        self.id = Int64(raw(client, {**command, **lsid(session)})["cursor"]["id"])


def lsid(session: Binary | None) -> dict[str, Any]:
    return {} if session is None else {"lsid": {"id": session}}


def raw(client: pymongo.MongoClient[dict[str, Any]], command: dict[str, Any]) -> dict[str, Any]:
    """The reply or the error. PyMongo adds a session of its own unless the command has one."""
    try:
        with client._conn_for_writes(None, operation="raw") as connection:
            return dict(connection.command("shop", command))
    except OperationFailure as error:
        return dict(error.details or {})


def replies_of(guarded: Guarded, user: str, opened_in: Binary | None, command: dict[str, Any]) -> list[dict[str, Any]]:
    """What ``user`` gets for a command about a cursor of ``reader``'s, at the server and at the gateway."""
    found = []
    for connect in (guarded.at_server, guarded.at_gateway):
        with connect("reader") as owner, connect(user) as other:
            cursor = Cursor(owner, opened_in)
            filled = {name: (cursor.id if value == "ID" else value) for name, value in command.items()}
            filled = {name: ([cursor.id] if value == "IDS" else value) for name, value in filled.items()}
            reply = raw(other, filled)
            again = raw(owner, {"getMore": cursor.id, "collection": "orders", "maxTimeMS": 1, **lsid(opened_in)})
            kept = {
                name: value for name, value in reply.items() if name not in ("$clusterTime", "operationTime", "cursor")
            }
            text = str(kept).replace(str(int(cursor.id)), "<id>").partition(", $clusterTime")[0]
            found.append({"reply": text, "goes on": again["ok"]})
    return found


SESSIONS = (None, Binary(uuid.UUID(int=1).bytes, 4), Binary(uuid.UUID(int=2).bytes, 4))


@pytest.mark.parametrize("user", ["reader", "second", "everywhere", "nobody", ROOT])
@pytest.mark.parametrize(
    ("opened_in", "asked_in"), list(itertools.product(SESSIONS[:2], SESSIONS)), ids=lambda one: one and one.hex()[-1]
)
def test_a_cursor_belongs_to_its_user_and_session(
    guarded: Guarded, user: str, opened_in: Binary | None, asked_in: Binary | None
) -> None:
    for command in (
        {"getMore": "ID", "collection": "orders", "maxTimeMS": 1, **lsid(asked_in)},
        {"killCursors": "orders", "cursors": "IDS", **lsid(asked_in)},
    ):
        native, through = replies_of(guarded, user, opened_in, command)
        assert through == native


def test_one_answer_about_rights_serves_all_connections_of_a_user(guarded: Guarded) -> None:
    """Each connection asked for itself, so a thousand of them asked five hundred times a second."""
    with (
        running_gateway(uri_of(guarded.mongod, ROOT, PASSWORD), rights_seconds=3600.0) as running,
        guarded.at_server(ROOT) as root,
        Guarded(guarded.mongod, running).at_gateway("reader") as one,
        Guarded(guarded.mongod, running).at_gateway("reader") as other,
    ):
        cursors = [(client, Cursor(client, None)) for client in (one, other)]

        def asked() -> int:
            return int(root.admin.command("serverStatus")["metrics"]["commands"]["connectionStatus"]["total"])

        def forget() -> None:
            for connection in running.gateway._connections:
                known = connection.identification
                known._told = None if known._told is None else replace(known._told, asked=float("-inf"))

        while not running.call(running.gateway.engine.rights_heard).until:
            time.sleep(0.01)  # until then rights are asked for anew with each event
        running.call(forget)
        Cursor(one, None)
        before = asked()
        for client, cursor in cursors:
            assert raw(client, {"getMore": cursor.id, "collection": "orders", "maxTimeMS": 1})["ok"] == 1
        assert asked() == before


def test_who_loses_a_right_loses_the_stream(guarded: Guarded) -> None:
    found = []
    with guarded.at_server(ROOT) as root:
        for connect in (guarded.at_server, guarded.at_gateway):
            with connect("one") as client:
                cursor = Cursor(client, None)
                read = {"getMore": cursor.id, "collection": "orders", "maxTimeMS": 1}
                root.admin.command("revokePrivilegesFromRole", "oneRole", privileges=[_ONE])
                lost = raw(client, read)
                assert outcome(client, "shop", "orders")[0] == 13
                root.admin.command("grantPrivilegesToRole", "oneRole", privileges=[_ONE])
                back = raw(client, read)
                found.append((lost["code"], lost["errmsg"].replace(str(int(cursor.id)), "<id>"), back["ok"]))
    assert found[1] == found[0] == (13, "not authorized for getMore with cursor id <id>", 1.0)


@pytest.mark.parametrize("collection", ["orders", 1])
def test_whose_cursors_may_be_killed_is_as_on_the_server(guarded: Guarded, collection: Any) -> None:
    """A right on only a database or a collection was not recognised: only rights on the cluster had been tried."""
    found = []
    for connect in (guarded.at_server, guarded.at_gateway):
        outcomes = {}
        for killer in KILLERS:
            with connect("reader") as owner, connect(killer) as client:
                opened = raw(owner, {"aggregate": collection, "pipeline": [{"$changeStream": {}}], "cursor": {}})
                namespace = opened["cursor"]["ns"].partition(".")[2]
                reply = raw(client, {"killCursors": namespace, "cursors": [opened["cursor"]["id"]]})
                outcomes[killer] = reply.get("code", reply.get("cursorsKilled") == [opened["cursor"]["id"]])
        found.append(outcomes)
    assert found[1] == found[0]
    assert set(found[0].values()) == {True, 13}


def test_one_user_does_not_take_all_streams(guarded: Guarded) -> None:
    """All users shared one limit. No test had two users who reach it."""
    with running_gateway(uri_of(guarded.mongod, ROOT, PASSWORD), cursors_max=5) as running:
        limited = guarded._replace(running=running)
        with limited.at_gateway("reader") as greedy, limited.at_gateway("second") as other:
            cursors = [Cursor(greedy, None) for _ in range(4)]
            assert outcome(greedy, "shop", "orders") == (
                146,
                "this gateway has 4 change streams of this user open, which is the limit for one user",
            )
            assert outcome(other, "shop", "orders") == "opened"
            raw(greedy, {"killCursors": "orders", "cursors": [cursors[0].id]})
            assert outcome(greedy, "shop", "orders") == "opened"


def test_who_has_not_logged_in_takes_no_memory_from_those_who_have(guarded: Guarded) -> None:
    """All large messages shared the same memory. Only clients that are allowed to send them had been tried."""
    with running_gateway(uri_of(guarded.mongod, ROOT, PASSWORD), memory_bytes=2, stall_seconds=3600.0) as running:
        limited = guarded._replace(running=running)
        large: dict[str, Any] = {"aggregate": "c", "pipeline": [{"$match": {"x": "x" * 300_000}}], "cursor": {}}
        with socket.create_connection((running.host, running.port)) as stranger:
            stranger.sendall(op_msg(bson.encode({**large, "$db": "shop"}), request_id=1)[:100_000])
            deadline = time.monotonic() + _LIMIT_S
            while not running.call(lambda: running.gateway._surroundings.strangers._held):
                assert time.monotonic() < deadline
                time.sleep(0.01)
            with limited.at_gateway("writer") as client:
                assert raw(client, large)["ok"] == 1
            assert running.call(lambda: running.gateway._surroundings.strangers._held)


def test_who_loses_a_right_while_he_waits_gets_no_further_event(guarded: Guarded) -> None:
    """Rights were checked when a getMore came, and its event could come much later. The tests had no wait in
    between."""
    with guarded.at_server(ROOT) as root, guarded.at_gateway("one") as client:
        cursor = Cursor(client, None)
        read = {"getMore": cursor.id, "collection": "orders", "maxTimeMS": 600_000}
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(raw, client, read)
            while not guarded.running.call(lambda: guarded.running.gateway.engine.streams[cursor.id].is_busy):
                time.sleep(0.01)
            root.admin.command("revokePrivilegesFromRole", "oneRole", privileges=[_ONE])
            try:
                root.shop.orders.insert_one({})
                assert waiting.result(_LIMIT_S)["code"] == 13
            finally:
                root.admin.command("grantPrivilegesToRole", "oneRole", privileges=[_ONE])
        assert raw(client, {**read, "maxTimeMS": 1})["code"] == 43


REVOCATIONS: dict[str, dict[str, Any]] = {
    "privilege": {"revokePrivilegesFromRole": "changingRole", "privileges": [_ONE]},
    "role": {"revokeRolesFromUser": "changing", "roles": ["changingRole"]},
    "update": {"updateUser": "changing", "roles": []},
    "no role": {"dropRole": "changingRole"},
    "no user": {"dropUser": "changing"},
}


@pytest.fixture
def changing(guarded: Guarded) -> Iterator[None]:
    """A user with a single role, both created for the test."""
    with guarded.at_server(ROOT) as root:
        root.admin.command("createRole", "changingRole", privileges=[_ONE], roles=[])
        root.admin.command("createUser", "changing", pwd="pw", roles=["changingRole"])
        yield
        for gone in ({"dropUser": "changing"}, {"dropRole": "changingRole"}):
            with suppress(OperationFailure):
                root.admin.command(gone)


def after_revocation(
    guarded: Guarded, connect: Callable[[str], Any], command: dict[str, Any], *, waits: bool
) -> list[Any]:
    """How many events a getMore gives before ``command``, and what the next two give after it: events or a code. The
    first of these either waits while the command is carried out, or comes later."""
    with guarded.at_server(ROOT) as root, connect("changing") as client:
        cursor = Cursor(client, None)
        read = {"getMore": cursor.id, "collection": "orders", "maxTimeMS": 600_000}
        root.shop.orders.insert_one({})
        outcomes = [raw(client, read)]
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(raw, client, read) if waits else None
            while waits and not busy(guarded):
                time.sleep(0.01)
            root.admin.command(command)
            root.shop.orders.insert_one({})
            outcomes.append(raw(client, read) if waiting is None else waiting.result(_LIMIT_S))
        root.shop.orders.insert_one({})
        outcomes.append(raw(client, {**read, "maxTimeMS": 1}))
    return [one.get("code") or len(one["cursor"]["nextBatch"]) for one in outcomes]


def busy(guarded: Guarded) -> bool:
    return guarded.running.call(lambda: any(one.is_busy for one in guarded.running.gateway.engine.streams.values()))


@pytest.mark.parametrize("how", REVOCATIONS)
@pytest.mark.usefixtures("changing")
def test_no_event_comes_after_a_revocation(guarded: Guarded, how: str) -> None:
    """An answer about rights was used for two seconds, in which one more event came than from the server. Tests of
    rights had a gateway that asks each time, unlike any user's."""
    native = after_revocation(guarded, guarded.at_server, REVOCATIONS[how], waits=False)
    assert native == [1, 13, 13]


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("how", REVOCATIONS)
@pytest.mark.usefixtures("changing")
def test_no_event_comes_through_the_gateway_either(guarded: Guarded, how: str, waits: bool) -> None:
    with running_gateway(uri_of(guarded.mongod, ROOT, PASSWORD), rights_seconds=3600.0) as running:
        patient = guarded._replace(running=running)
        first, *later = after_revocation(patient, patient.at_gateway, REVOCATIONS[how], waits=waits)
    assert first == 1
    # If its event was refused, the cursor is gone.
    assert later == ([13, 43] if waits and how != "no user" else [13, 13])


def test_who_logs_out_or_is_dropped_has_lost_everything(guarded: Guarded) -> None:
    add_user(guarded.mongod, "leaving", "pw", [{"role": "read", "db": "shop"}])
    with guarded.at_gateway("leaving") as client, guarded.at_server(ROOT) as root:
        cursor = Cursor(client, None)
        root.admin.command("dropUser", "leaving")
        reply = raw(client, {"getMore": cursor.id, "collection": "orders", "maxTimeMS": 1})
        assert (reply["code"], reply["errmsg"]) == (13, f"{COMMAND} getMore requires authentication")


def test_signed_times_are_passed_on_and_taken_back(guarded: Guarded) -> None:
    with guarded.at_gateway("writer") as client, client.start_session(causal_consistency=True) as session:
        with client.shop.orders.watch(session=session, max_await_time_ms=1000) as stream:
            client.shop.orders.insert_one({"at": time.time()}, session=session)
            deadline = time.monotonic() + _LIMIT_S
            while stream.try_next() is None:
                assert time.monotonic() < deadline
        seen = session.cluster_time
        assert seen is not None
        assert seen["signature"]["keyId"] != 0
        # The server takes back what it has signed.
        client.shop.orders.find_one({}, session=session)


def test_a_client_that_has_logged_in_keeps_its_connection_to_the_server(guarded: Guarded) -> None:
    """Only the client could log in again, so it keeps its connection. Without users a client whose stream waits has
    none."""
    with guarded.at_gateway("reader") as client, client.shop.orders.watch(max_await_time_ms=1) as stream:
        for _ in range(4):
            stream.try_next()
        gateway = guarded.running.gateway
        assert not guarded.running.call(lambda: any(one.is_parked for one in gateway._connections))
