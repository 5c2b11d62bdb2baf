"""A gateway of several processes in front of a deployment with users: what each user may do, and how much, is the same
as at the server and at a gateway of one process."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pymongo
import pytest
from bson.binary import Binary
from bson.int64 import Int64
from bson.raw_bson import RawBSONDocument

from tailrace.embedded import Mongod
from tests.differential.auth import PASSWORD, ROOT, add_user, mongod_with_users, uri_of
from tests.gateway.connected import Connected, at_two_processes
from tests.gateway.running import GatewayProcess, eventually
from tests.gateway.side_by_side import OLDER_ARE_SLOW

pytestmark = pytest.mark.mongod

COMPUTES = {"$match": {"$expr": {"$eq": ["$operationType", "insert"]}}}
_ONE = {"resource": {"db": "shop", "collection": "orders"}, "actions": ["changeStream", "find"]}
_OWN: dict[str, list[Any]] = {
    "one": [_ONE],
    "killer": [{"resource": {"db": "shop", "collection": ""}, "actions": ["killAnyCursor"]}],
    "operator": [{"resource": {"cluster": True}, "actions": ["inprog", "killop", "killAnySession"]}],
}
ROLES: dict[str, list[Any]] = {
    "reader": [{"role": "read", "db": "shop"}],
    "second": [{"role": "read", "db": "shop"}],
    "elsewhere": [{"role": "read", "db": "blog"}],
    "everywhere": [{"role": "readAnyDatabase", "db": "admin"}],
    "nobody": [],
    **{name: [f"{name}Role"] for name in _OWN},
}
SCOPES: tuple[tuple[str, Any, dict[str, Any]], ...] = (
    ("shop", "orders", {}),
    ("shop", "items", {}),
    ("shop", 1, {}),
    ("blog", "orders", {}),
    ("admin", 1, {"allChangesForCluster": True}),
)
SESSIONS = (None, Binary(uuid.UUID(int=1).bytes, 4), Binary(uuid.UUID(int=2).bytes, 4))


class Places:
    """The server, a gateway of one process, and one of two."""

    def __init__(self, mongod: Mongod, one: GatewayProcess, two: GatewayProcess) -> None:
        self.mongod = mongod
        self.gateways = {"one": one, "two": two}
        self.names = ("server", *self.gateways)

    def pair(self, place: str, *users: str) -> list[Connected]:
        """Two connections, of one user or of two; at different processes if there are two."""
        if place == "two":
            both = at_two_processes(self.gateways[place])
        else:
            address = self.mongod.host if place == "server" else self.gateways[place].address
            both = [Connected(address) for _ in range(2)]
        for each, user in zip(both, (users[0], users[-1]), strict=True):
            each.login(user, PASSWORD if user == ROOT else "pw")
        return both


@pytest.fixture(scope="module", params=OLDER_ARE_SLOW)
def guarded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mongod]:
    with mongod_with_users(Path(tmp_path_factory.mktemp("guarded")), version=request.param) as mongod:
        with pymongo.MongoClient[dict[str, Any]](uri_of(mongod, ROOT, PASSWORD)) as root:
            for name, privileges in _OWN.items():
                root.admin.command("createRole", f"{name}Role", privileges=privileges, roles=[])
        for user, roles in ROLES.items():
            add_user(mongod, user, "pw", roles)
        yield mongod


@pytest.fixture(scope="module")
def places(guarded: Mongod, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Places]:
    folder, uri = tmp_path_factory.mktemp("gateways"), uri_of(guarded, ROOT, PASSWORD)
    with (
        GatewayProcess(uri, folder / "one.log") as one,
        GatewayProcess(uri, folder / "two.log", "--processes", "2") as two,
    ):
        yield Places(guarded, one, two)


@pytest.fixture
def root(guarded: Mongod) -> Iterator[pymongo.MongoClient[dict[str, Any]]]:
    with pymongo.MongoClient[dict[str, Any]](uri_of(guarded, ROOT, PASSWORD)) as client:
        yield client


@pytest.mark.by_turns
@pytest.mark.parametrize("stages", [[], [COMPUTES]], ids=["plain", "computing"])
@pytest.mark.parametrize("user", [*ROLES, ROOT])
def test_each_user_may_watch_what_the_server_lets_him(places: Places, user: str, stages: list[Any]) -> None:
    found: dict[str, list[Any]] = {}
    for place in places.names:
        for connection in places.pair(place, user):
            outcomes = []
            for database, collection, options in SCOPES:
                pipeline = [{"$changeStream": options}, *stages]
                reply = connection.said({"aggregate": collection, "pipeline": pipeline, "cursor": {}}, database)
                outcomes.append((reply["ok"], reply.get("code"), str(reply.get("errmsg")).partition(", lsid")[0]))
                if reply["ok"]:
                    name = reply["cursor"]["ns"].partition(".")[2]
                    kill = {"killCursors": name, "cursors": [Int64(reply["cursor"]["id"])]}
                    assert connection.command(kill, database)["cursorsKilled"]
            found.setdefault(place, []).append(outcomes)
            connection.close()
    assert found["two"] == found["one"] == found["server"]


@pytest.mark.by_turns
@pytest.mark.parametrize("user", ["reader", "second", "everywhere", "nobody", "killer", ROOT])
@pytest.mark.parametrize("opened_in", SESSIONS[:2], ids=["no session", "a session"])
def test_a_cursor_belongs_to_its_user_and_session(places: Places, user: str, opened_in: Binary | None) -> None:
    """Each command is sent on a connection of the process without the cursor, and on one of the process that has it."""
    found: dict[str, list[Any]] = {}
    for place in places.names:
        owners, others = places.pair(place, "reader"), places.pair(place, user)
        for owner in owners:
            outcomes = []
            for asked_in in SESSIONS:
                for name in ("getMore", "killCursors"):
                    for other in others:
                        cursor = owner.opened(collection="orders", database="shop", fields=lsid(opened_in))
                        more = {"getMore": cursor, "collection": "orders", "maxTimeMS": 1}
                        kill = {"killCursors": "orders", "cursors": [cursor]}
                        reply = other.said({**(more if name == "getMore" else kill), **lsid(asked_in)}, "shop")
                        if "cursor" in reply:
                            reply["cursor"] = reply["cursor"]["nextBatch"]
                        if "cursorsKilled" in reply:
                            reply["cursorsKilled"] = [one == cursor for one in reply["cursorsKilled"]]
                        after = owner.command({**more, **lsid(opened_in)}, "shop")
                        outcomes.append((name, reply, after["ok"], after.get("code")))
                        owner.command({**kill, **lsid(opened_in)}, "shop")
            found.setdefault(place, []).append(outcomes)
        for each in (*owners, *others):
            each.close()
    assert found["two"] == found["one"] == found["server"]


def lsid(session: Binary | None) -> dict[str, Any]:
    return {} if session is None else {"lsid": {"id": session}}


def test_events_of_different_users_are_the_server_s(places: Places, root: pymongo.MongoClient[dict[str, Any]]) -> None:
    wanted: dict[tuple[str, Any, int], list[bytes]] = {}
    with ExitStack() as stack:
        opened = []
        for place in places.names:
            for user, scopes in (("reader", SCOPES[:3]), ("one", SCOPES[:1]), ("everywhere", SCOPES)):
                pair = places.pair(place, user)
                for each in pair:
                    stack.callback(each.close)
                for number, (database, collection, options) in enumerate(scopes):
                    for stages in ([], [COMPUTES]):
                        cursor = pair[number % 2].opened(
                            *stages, collection=collection, database=database, fullDocument="updateLookup", **options
                        )
                        opened.append((place, (user, number, len(stages)), pair, cursor, database, collection))
        for number in range(4):
            for name in ("orders", "items"):
                root.shop[name].insert_one({"_id": number, "text": "y" * number})
            root.blog.orders.insert_one({"_id": number})
            root.shop.orders.update_one({"_id": number}, {"$set": {"paid": True}})
        mark = root.admin.command("ping")["operationTime"]
        for place, what, pair, cursor, database, collection in opened:
            name = collection if isinstance(collection, str) else "$cmd.aggregate"
            got: list[bytes] = []
            for turn in range(1000):
                more = {"getMore": cursor, "collection": name, "maxTimeMS": 100, "batchSize": 3}
                reply = RawBSONDocument(pair[turn % 2].raw(more, database))
                assert reply["ok"], (what, place, reply)
                got += [bytes(event.raw) for event in reply["cursor"]["nextBatch"]]
                if not reply["cursor"]["nextBatch"] and reply["operationTime"] > mark:
                    break
            assert got, what
            assert got == wanted.setdefault(what, got), (what, place)
        for database in ("shop", "blog"):
            root.drop_database(database)


def test_who_loses_a_right_loses_the_stream(places: Places, root: pymongo.MongoClient[dict[str, Any]]) -> None:
    found: dict[str, list[Any]] = {}
    for place in places.names:
        for owner, other in (places.pair(place, "one"), places.pair(place, "one")[::-1]):
            cursor = owner.opened(collection="orders", database="shop")
            read = {"getMore": cursor, "collection": "orders", "maxTimeMS": 1}
            assert other.said(read, "shop")["ok"]
            root.admin.command("revokePrivilegesFromRole", "oneRole", privileges=[_ONE])
            # An answer of the server about rights may be two seconds old, but no event comes because of it.
            root.shop.orders.insert_one({})
            lost = other.said({**read, "maxTimeMS": 60_000}, "shop")
            root.admin.command("grantPrivilegesToRole", "oneRole", privileges=[_ONE])
            found.setdefault(place, []).append((lost["ok"], lost.get("code"), lost.get("errmsg")))
            owner.close()
            other.close()
    assert found["two"] == found["one"] == found["server"]
    assert found["two"][0][:2] == (0.0, 13)


def test_who_loses_a_right_while_another_process_waits_for_him_gets_no_event(
    places: Places, root: pymongo.MongoClient[dict[str, Any]]
) -> None:
    for turn in (1, -1):
        owner, other = places.pair("two", "one")[::turn]
        cursor = owner.opened(collection="orders", database="shop")
        operator = places.pair("two", "operator")[0]
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(other.more, cursor, "orders", "shop", maxTimeMS=600_000)

            def waits(cursor: Int64 = cursor, operator: Connected = operator) -> bool:
                listed = operator.command({"tailraceStreams": 1}, "admin")["streams"]
                return [one["waiting"] for one in listed if one["cursor"] == cursor] == [True]

            eventually(waits, "nobody waits")
            root.admin.command("revokePrivilegesFromRole", "oneRole", privileges=[_ONE])
            try:
                root.shop.orders.insert_one({})
                assert waiting.result(300)["code"] == 13
            finally:
                root.admin.command("grantPrivilegesToRole", "oneRole", privileges=[_ONE])
        assert owner.more(cursor, "orders", "shop", maxTimeMS=1)["code"] == 43
        for each in (owner, other, operator):
            each.close()


def test_who_logs_out_or_is_dropped_has_lost_everything(
    places: Places, root: pymongo.MongoClient[dict[str, Any]]
) -> None:
    found: dict[str, list[Any]] = {}
    for place in places.names:
        for how in ("logout", "dropUser"):
            root.admin.command("createUser", "leaving", pwd="pw", roles=[{"role": "read", "db": "shop"}])
            owner, other = places.pair(place, "leaving")
            cursor = owner.opened(collection="orders", database="shop")
            if how == "logout":
                other.command({"logout": 1}, "admin")
                root.admin.command("dropUser", "leaving")
            else:
                root.admin.command("dropUser", "leaving")
            root.shop.orders.insert_one({})
            read = {"getMore": cursor, "collection": "orders", "maxTimeMS": 60_000}
            found.setdefault(place, []).append([each.said(read, "shop") for each in (other, owner)])
            owner.close()
            other.close()
    assert found["two"] == found["one"] == found["server"]


def test_who_may_see_and_end_the_streams_of_others(places: Places) -> None:
    found: dict[str, list[Any]] = {}
    for place in places.gateways:
        outcomes: list[Any] = []
        for user in ("second", "killer", "operator", ROOT):
            owners, others = places.pair(place, "reader"), places.pair(place, user)
            cursors = [each.opened(collection="orders", database="shop") for each in owners]
            listed = others[0].command({"tailraceStreams": 1}, "admin")
            shown = {one["cursor"] for one in listed.get("streams", ())}
            outcomes.append((user, listed.get("code"), shown >= set(cursors)))
            outcomes += [others[1].said({"killOp": 1, "op": cursor}, "admin") for cursor in cursors]
            for cursor in cursors:
                after = owners[0].more(cursor, "orders", "shop", maxTimeMS=1)
                outcomes.append(after.get("code"))
                owners[1].command({"killCursors": "orders", "cursors": [cursor]}, "shop")
            for each in (*owners, *others):
                each.close()
        found[place] = outcomes
    assert found["two"] == found["one"]
    assert [one for one in found["two"] if isinstance(one, tuple)] == [
        ("second", 13, False),
        ("killer", 13, False),
        ("operator", None, True),
        (ROOT, None, True),
    ]


def test_sessions_that_an_operator_ends_take_their_streams_with_them(places: Places) -> None:
    found: dict[str, list[Any]] = {}
    for place in places.names:
        outcomes = []
        for kill in ({"killAllSessions": [{"user": "reader", "db": "admin"}]}, {"killAllSessions": []}):
            owners, others, operators = (places.pair(place, user) for user in ("reader", "second", "operator"))
            cursors = [(each, each.opened(collection="orders", database="shop", fields=lsid(SESSIONS[1])))
                       for each in (*owners, *others)]  # fmt: skip
            assert operators[1].command(kill, "admin")["ok"]
            outcomes.append(
                [
                    each.more(cursor, "orders", "shop", maxTimeMS=1, **lsid(SESSIONS[1])).get("code")
                    for each, cursor in cursors
                ]
            )
            for each, cursor in cursors:
                each.command({"killCursors": "orders", "cursors": [cursor], **lsid(SESSIONS[1])}, "shop")
            for each in (*owners, *others, *operators):
                each.close()
        found[place] = outcomes
    assert found["two"] == found["one"] == found["server"]
    assert found["two"] == [[43, 43, None, None], [43] * 4]


def opened_or_code(connection: Connected) -> Any:
    aggregate = {"aggregate": "orders", "pipeline": [{"$changeStream": {}}], "cursor": {}}
    reply = connection.command(aggregate, "shop")
    return Int64(reply["cursor"]["id"]) if reply["ok"] else (reply["code"], reply["errmsg"])


def test_one_user_s_share_holds_for_all_processes_together(
    guarded: Mongod, start_gateway: Callable[..., GatewayProcess]
) -> None:
    found = []
    for count in ("1", "2"):
        limits = ("--processes", count, "--cursors-per-user", "3", "--cursors-max", "5")
        gateway = start_gateway(uri_of(guarded, ROOT, PASSWORD), *limits)
        places = Places(guarded, gateway, gateway)
        greedy, other = (places.pair("two" if count == "2" else "one", user) for user in ("reader", "second"))
        outcomes = [opened_or_code(each) for each in (*greedy, *greedy)]
        outcomes += [opened_or_code(each) for each in (*other, *other)]
        opened = [one for one in outcomes if isinstance(one, Int64)]
        assert greedy[1].command({"killCursors": "orders", "cursors": opened[:1]}, "shop")["cursorsKilled"]
        outcomes += [opened_or_code(each) for each in (greedy[0], greedy[1])]
        found.append(["opened" if isinstance(one, Int64) else one for one in outcomes])
        for each in (*greedy, *other):
            each.close()
    assert found[1] == found[0]
    of_user = (146, "this gateway has 3 change streams of this user open, which is the limit for one user")
    in_all = (146, "this gateway has 5 change streams open, which is its limit")
    assert found[1] == [*["opened"] * 3, of_user, *["opened"] * 2, in_all, in_all, "opened", in_all]


def test_a_limit_holds_for_streams_that_are_opened_at_the_same_moment(
    guarded: Mongod, start_gateway: Callable[..., GatewayProcess]
) -> None:
    """Each process asked the others before it opened a cursor, but none knew what the others were about to open."""
    limits = ("--processes", "2", "--cursors-per-user", "3")
    gateway = start_gateway(uri_of(guarded, ROOT, PASSWORD), *limits)
    places = Places(guarded, gateway, gateway)
    connections = [each for _ in range(4) for each in places.pair("two", "reader")]
    with ThreadPoolExecutor(len(connections)) as pool:
        for _ in range(40):
            outcomes = list(pool.map(opened_or_code, connections))
            opened = [one for one in outcomes if isinstance(one, Int64)]
            assert len(opened) == 3, outcomes
            assert {one[0] for one in outcomes if isinstance(one, tuple)} == {146}
            assert connections[0].command({"killCursors": "orders", "cursors": opened}, "shop")["ok"]
    for each in connections:
        each.close()
