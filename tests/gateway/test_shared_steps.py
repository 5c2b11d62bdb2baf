"""Streams that ask the same get the same bytes, with events that one of them has made. Each still gets what the server
would give it, whatever the others do meanwhile."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, cast

import bson
import pymongo
import pytest
from bson.int64 import Int64
from bson.raw_bson import RawBSONDocument

from tailrace.embedded import Mongod
from tailrace.watch.gateway import engine, quick
from tests.differential.auth import PASSWORD, ROOT, add_user, mongod_with_users, uri_of
from tests.differential.wire import Wire
from tests.gateway.connected import Connected
from tests.gateway.gateways import RunningGateway, running_gateway
from tests.gateway.running import eventually
from tests.gateway.side_by_side import OLDER_ARE_SLOW, SideBySide, comparable, side_by_side

pytestmark = pytest.mark.mongod

_LONG_MS = 200_000
_SHORT_MS = 40
_MATCH = [{"$match": {"operationType": {"$ne": "update"}}}]


@pytest.fixture(scope="module", params=OLDER_ARE_SLOW)
def sides(request: pytest.FixtureRequest) -> Iterator[SideBySide]:
    with side_by_side(request.param) as both:
        yield both


class _AsyncWire(Wire):
    """The command and its reply separately: the reply comes when there is something."""

    def ask(self, command: bytes) -> None:
        self._request_id += 1
        head = struct.pack("<iiii", len(command) + 21, self._request_id, 0, 2013)
        self._socket.sendall(head + b"\x00\x00\x00\x00\x00" + command)

    def answer(self) -> bytes:
        size, _, answered, _ = struct.unpack("<iiii", self._read(16))
        assert answered == self._request_id
        return self._read(size - 16)[5:]


class Stream:
    """One stream, on a connection of its own, at the server or at the gateway."""

    def __init__(self, uri: str, database: str, stages: Sequence[Any] = (), **fields: Any) -> None:
        self.database = database
        self.wire = _AsyncWire.to(uri)
        self.wire.run("admin", {"ping": 1})
        options = fields.pop("options", {})
        pipeline = [{"$changeStream": options}, *stages]
        reply = self.wire.run(database, {"aggregate": "c", "pipeline": pipeline, "cursor": {}, **fields})
        self.id = Int64(reply["cursor"]["id"])

    def ask(self, await_ms: int = _LONG_MS, **fields: Any) -> None:
        command = {"getMore": self.id, "collection": "c", "maxTimeMS": await_ms, **fields, "$db": self.database}
        self.wire.ask(bson.encode(command))

    def answer(self) -> RawBSONDocument:
        return RawBSONDocument(self.wire.answer())

    def more(self, await_ms: int = _LONG_MS, **fields: Any) -> RawBSONDocument:
        self.ask(await_ms, **fields)
        return self.answer()


class Pair:
    """The same stream at the server, and some of it at the gateway."""

    def __init__(self, room: Room, count: int, stages: Sequence[Any] = (), **fields: Any) -> None:
        uris = [room.sides.deployment.uri, *[room.sides.running.uri()] * count]
        self.streams = [Stream(uri, room.database, stages, **dict(fields)) for uri in uris]

    def ask(self, await_ms: int = _LONG_MS, **fields: Any) -> None:
        """At the gateway."""
        self._asked = await_ms, fields
        for stream in self.streams[1:]:
            stream.ask(await_ms, **fields)

    def compared(self) -> dict[str, Any]:
        """The reply that all of them get."""
        ours = [stream.answer() for stream in self.streams[1:]]
        await_ms, fields = self._asked
        # A server may wake a waiting getMore before the event is there, and then not again until the next write: so it
        # is asked afterwards.
        native = self.streams[0].more(_SHORT_MS, **fields)
        while await_ms == _LONG_MS and "cursor" in native and not list(native["cursor"]["nextBatch"]):
            native = self.streams[0].more(_SHORT_MS, **fields)
        for stream, reply in zip(self.streams[1:], ours, strict=True):
            assert list(reply) == list(native), (dict(native), dict(reply))
            assert comparable(reply) == comparable(native), (dict(native), dict(reply))
            assert "cursor" not in reply or reply["cursor"]["id"] in (0, stream.id)
        return bson.decode(native.raw)


class Room:
    """A database for one test."""

    def __init__(self, sides: SideBySide, database: str, closing: ExitStack) -> None:
        self.sides, self.database, self._closing = sides, database, closing
        sides.server.run(database, {"drop": "c"}) if self._exists() else None
        sides.server.run(database, {"create": "c"})
        self._number = 0

    def _exists(self) -> bool:
        listed = self.sides.server.run(self.database, {"listCollections": 1, "filter": {"name": "c"}})
        return bool(list(listed["cursor"]["firstBatch"]))

    def pair(self, count: int, stages: Sequence[Any] = (), **fields: Any) -> Pair:
        pair = Pair(self, count, stages, **fields)
        for stream in pair.streams:
            self._closing.callback(stream.wire.close)
        return pair

    def insert(self, count: int = 1) -> None:
        numbers = range(self._number, self._number + count)
        self._number += count
        self.run({"insert": "c", "documents": [{"_id": number, "text": "x" * number} for number in numbers]})

    def run(self, command: Mapping[str, Any]) -> None:
        self.sides.server.run(self.database, command)

    @property
    def shared(self) -> int:
        """How many replies another stream had made."""
        return self.sides.running.call(lambda: self.sides.running.gateway.metrics.batches_shared)

    def waits(self, count: int) -> None:
        """Wait until so many getMores wait at the gateway."""
        streams = self.sides.running.gateway.engine.streams
        eventually(
            lambda: self.sides.running.call(lambda: sum(one.is_busy for one in streams.values())) >= count,
            f"{count} getMores wait at the gateway",
        )


@pytest.fixture
def room(sides: SideBySide, request: pytest.FixtureRequest) -> Iterator[Room]:
    with ExitStack() as closing:
        yield Room(sides, f"shared{abs(hash(request.node.name))}", closing)


def round_of(room: Room, pairs: Sequence[Pair], write: Callable[[], None], **fields: Any) -> list[dict[str, Any]]:
    """All ask and wait; then something is written; then all have the same reply as the server's stream."""
    for pair in pairs:
        pair.ask(**fields)
    room.waits(sum(len(pair.streams) - 1 for pair in pairs))
    write()
    return [pair.compared() for pair in pairs]


def warmed(room: Room, pairs: Sequence[Pair], **fields: Any) -> None:
    """Each stream has given an event of its own, and its getMore repeats one."""
    for _ in range(3):
        round_of(room, pairs, room.insert, **fields)


def everything(room: Room) -> None:
    """Equal streams and others, through writes of every kind, up to the end of their collection."""
    equal, other = room.pair(6), room.pair(3, _MATCH)
    alone = room.pair(1, comment="mine")
    pairs = [equal, other, alone]
    warmed(room, pairs)
    before = room.shared
    for _ in range(3):
        round_of(room, pairs, room.insert)
    assert room.shared - before == 3 * (5 + 2)
    updated = {"q": {"_id": 1}, "u": {"$set": {"text": "y"}}}
    replaced = {"q": {"_id": 2}, "u": {"text": "z"}}
    round_of(room, [equal, alone], lambda: room.run({"update": "c", "updates": [updated]}))
    other.ask()
    round_of(room, [equal, alone], lambda: room.run({"update": "c", "updates": [replaced]}))
    assert other.compared()["cursor"]["nextBatch"][0]["operationType"] == "replace"
    round_of(room, pairs, lambda: room.run({"delete": "c", "deletes": [{"q": {"_id": 3}, "limit": 1}]}))
    for pair in pairs:  # nothing comes: each gives a token of its own
        pair.ask(_SHORT_MS)
        pair.compared()
    warmed(room, pairs)
    replies = round_of(room, pairs, lambda: room.run({"drop": "c"}))
    for pair, last in zip(pairs, replies, strict=True):
        reply = last
        while reply["cursor"]["id"]:
            pair.ask()
            reply = pair.compared()
        assert reply["cursor"]["nextBatch"][-1]["operationType"] == "invalidate"
        assert [stream.more()["code"] for stream in pair.streams] == [43] * len(pair.streams)


def test_equal_streams_and_others_give_what_the_server_gives(room: Room) -> None:
    everything(room)


def pauses(room: Room) -> None:
    """Streams that do not ask for a while, and begin at other tokens, fall out of step and come back."""
    steady, paused = room.pair(3), room.pair(2)
    warmed(room, [steady, paused])
    tokens = [round_of(room, [steady], room.insert)[0]["cursor"]["postBatchResumeToken"] for _ in range(4)]
    for pair in (steady, paused):
        pair.ask(_SHORT_MS)
    steady.compared()
    assert len(paused.compared()["cursor"]["nextBatch"]) == 4
    resumed, after = room.pair(2, options={"resumeAfter": tokens[0]}), room.pair(1, options={"startAfter": tokens[1]})
    pairs = [steady, paused, resumed, after]
    warmed(room, pairs)
    before = room.shared
    for _ in range(2):
        round_of(room, pairs, room.insert)
    assert room.shared - before == 2 * 7
    for pair in pairs:
        pair.ask(_SHORT_MS)
        pair.compared()


def test_streams_that_pause_or_resume_elsewhere_lose_and_repeat_nothing(room: Room) -> None:
    pauses(room)


def test_batches_that_are_cut_are_each_stream_s_own(room: Room) -> None:
    small, large = room.pair(2), room.pair(2)
    for _ in range(3):
        for pair, size in ((small, 1), (large, 100)):
            pair.ask(batchSize=size)
        room.waits(4)
        room.insert(3)
        for pair, count in ((small, 1), (large, 3)):
            assert len(pair.compared()["cursor"]["nextBatch"]) == count
        for _ in range(2):
            small.ask(batchSize=1)
            assert len(small.compared()["cursor"]["nextBatch"]) == 1
    for pair in (small, large):
        pair.ask(_SHORT_MS, batchSize=1)
        assert not pair.compared()["cursor"]["nextBatch"]


def cut(room: Room) -> None:
    """One of two streams that ask the same still has some of the last reply left when the other goes on."""
    quick_one, slow = room.pair(1), room.pair(1)
    pairs = [quick_one, slow]
    warmed(room, pairs, batchSize=2)
    replies = round_of(room, pairs, lambda: room.insert(3), batchSize=2)
    assert [len(reply["cursor"]["nextBatch"]) for reply in replies] == [2, 2]
    quick_one.ask(batchSize=2)
    assert len(quick_one.compared()["cursor"]["nextBatch"]) == 1
    round_of(room, [quick_one], room.insert, batchSize=2)
    slow.ask(batchSize=2)
    assert len(slow.compared()["cursor"]["nextBatch"]) == 2
    round_of(room, pairs, room.insert, batchSize=2)


def left_over(room: Room) -> None:
    """More is left of a reply than the next one holds, and more has come meanwhile."""
    pair = room.pair(2)
    for _ in range(3):
        pair.ask(batchSize=1)
        room.waits(2)
        room.insert(4)
        assert len(pair.compared()["cursor"]["nextBatch"]) == 1
        room.insert()
        for _ in range(4):
            pair.ask(batchSize=1)
            assert len(pair.compared()["cursor"]["nextBatch"]) == 1
    pair.ask(_SHORT_MS, batchSize=1)
    assert not pair.compared()["cursor"]["nextBatch"]


def test_what_has_come_waits_for_what_is_left_of_a_reply(room: Room) -> None:
    left_over(room)


def test_what_is_left_of_a_reply_comes_before_what_others_have_made(room: Room) -> None:
    cut(room)


def test_transactions_and_large_batches_are_each_stream_s_own(room: Room) -> None:
    pair = room.pair(3)
    warmed(room, [pair])
    session, before = {"id": bson.Binary(b"t" * 16, 4)}, room.shared
    for number in (1, 2):
        fields = {"lsid": session, "txnNumber": Int64(number), "autocommit": False}

        def write(fields: dict[str, Any] = fields, number: int = number) -> None:
            documents = [{"_id": f"{number}-{each}"} for each in range(5)]
            room.run({"insert": "c", "documents": documents, **fields, "startTransaction": True})
            room.sides.server.run("admin", {"commitTransaction": 1, **fields})

        assert len(round_of(room, [pair], write)[0]["cursor"]["nextBatch"]) == 5
    text = "x" * 40_000
    round_of(room, [pair], lambda: room.run({"insert": "c", "documents": [{"_id": "large", "text": text}]}))
    assert room.shared == before
    pair.ask(_SHORT_MS)
    pair.compared()
    warmed(room, [pair])


def looked_up(room: Room) -> None:
    """What is looked up may change from one look-up to the next."""
    pair = room.pair(3, options={"fullDocument": "updateLookup"})
    warmed(room, [pair])
    for number in range(3):
        update = {"q": {"_id": 1}, "u": {"$set": {"n": number}}}
        round_of(room, [pair], lambda update=update: room.run({"update": "c", "updates": [update]}))  # type: ignore[misc]
    round_of(room, [pair], room.insert)


def test_looked_up_documents_are_each_stream_s_own(room: Room) -> None:
    looked_up(room)


def killed(room: Room) -> None:
    """One of several is killed while it waits, and one sends two requests at the same time; the others go on."""
    pair, doomed = room.pair(3), room.pair(1)
    warmed(room, [pair, doomed])
    round_of(room, [pair, doomed], room.insert)
    for each in (doomed, pair):
        each.ask()
    room.waits(4)
    victims, wires = doomed.streams, (room.sides.server, room.sides.gateway)
    victims[0].ask()
    at_work = {"currentOp": 1, "command.getMore": victims[0].id}
    eventually(lambda: list(room.sides.server.run("admin", at_work)["inprog"]), "a getMore waits at the server")
    for wire, victim in zip(wires, victims, strict=True):
        again = {"getMore": victim.id, "collection": "c", "$db": room.database}
        assert bson.decode(wire.exchange(bson.encode(again))).get("code") == 143
        wire.run(room.database, {"killCursors": "c", "cursors": [victim.id]})
    ours = victims[1].answer()
    room.insert()  # the server notices the kill when there is something to give
    native = victims[0].answer()
    assert native["code"] == ours["code"] == 237
    assert comparable(native) == comparable(ours)
    pair.compared()
    round_of(room, [pair], room.insert)


def test_a_stream_that_is_killed_while_it_waits_takes_no_other_with_it(room: Room) -> None:
    killed(room)


def test_a_client_that_leaves_or_takes_nothing_holds_up_no_other(room: Room) -> None:
    pair, gone = room.pair(3), room.pair(2)
    warmed(room, [pair, gone])
    gone.ask()
    pair.ask()
    room.waits(5)
    gone.streams[1].wire.close()
    left = gone.streams[1].id
    streams = room.sides.running.gateway.engine.streams
    eventually(lambda: room.sides.running.call(lambda: left not in streams), "the cursor of who left is closed")
    room.insert()
    pair.compared()
    assert gone.streams[2].answer()["ok"] == 1
    round_of(room, [pair], room.insert)


# -- faults put back -------------------------------------------------------------------------------------------------


def _anybody(namespace: str, command: bytes, users: Any, version: str) -> Any:
    return namespace


def _never(stream: Any, cursors: Any, steps: Any) -> None:
    return None


FAULTS: dict[str, tuple[Callable[[Room], None], list[tuple[Any, str, Any]]]] = {
    "streams with other stages share": (everything, [(engine, "asked_by", _anybody)]),
    "a stream does not do what it was given": (
        everything,
        [(engine, "settle", _never), (quick, "settle", _never)],
    ),
    "a stream is not told that it was killed": (killed, [(quick.QuickGetMore, "begin", lambda self: None)]),
}


class _Guarded:
    """A deployment with users, and a gateway that asks for rights again when the oplog shows that they have changed."""

    def __init__(self, mongod: Mongod, running: RunningGateway) -> None:
        self.mongod, self.running = mongod, running

    def logged_in(self, user: str) -> Connected:
        connected = Connected(self.running.hosts)
        connected._wire.close()
        connected._wire = _AsyncWire.to(self.running.uri())
        connected.login(user, "pw")
        return connected


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[_Guarded]:
    with mongod_with_users(tmp_path_factory.mktemp("guarded")) as mongod:
        for user in ("ann", "ben"):
            add_user(mongod, user, "pw", [{"role": "read", "db": "shop"}])
        with running_gateway(uri_of(mongod, ROOT, PASSWORD), rights_seconds=3600.0) as running:
            yield _Guarded(mongod, running)


def revoked(guarded: _Guarded) -> None:
    """Two users have two streams each, and one of them loses the right while all wait: she gets no more events, he
    does."""
    with ExitStack() as closing, pymongo.MongoClient[Any](uri_of(guarded.mongod, ROOT, PASSWORD)) as root:
        root.admin.command("grantRolesToUser", "ann", roles=[{"role": "read", "db": "shop"}])
        clients = [guarded.logged_in(user) for user in ("ann", "ann", "ben", "ben")]
        for each in clients:
            closing.callback(each.close)
        cursors = [each.opened(collection="orders", database="shop") for each in clients]
        streams, metrics = guarded.running.gateway.engine.streams, guarded.running.gateway.metrics
        written = itertools.count()
        wires = [cast(_AsyncWire, each._wire) for each in clients]

        def answers(revoke: bool = False) -> list[dict[str, Any]]:
            for wire, cursor in zip(wires, cursors, strict=True):
                fields = {"getMore": cursor, "collection": "orders", "maxTimeMS": _LONG_MS, "$db": "shop"}
                wire.ask(bson.encode(fields))
            eventually(
                lambda: guarded.running.call(lambda: sum(one.is_busy for one in streams.values())) == 4,
                "four getMores wait",
            )
            if revoke:
                root.admin.command("revokeRolesFromUser", "ann", roles=[{"role": "read", "db": "shop"}])
            root.shop.orders.insert_one({"number": next(written)})
            return [bson.decode(wire.answer()) for wire in wires]

        for _ in range(3):
            assert all(len(reply["cursor"]["nextBatch"]) == 1 for reply in answers())
        before = metrics.batches_shared
        answers()
        assert metrics.batches_shared - before == 2  # one of each user's two
        replies = answers(revoke=True)
        assert [reply.get("code") for reply in replies] == [13, 13, None, None]
        assert all(len(reply["cursor"]["nextBatch"]) == 1 for reply in replies[2:])


def test_who_loses_a_right_gets_nothing_of_what_another_has_made(guarded: _Guarded) -> None:
    revoked(guarded)


def test_events_that_are_given_without_looking_at_rights_are_found(
    guarded: _Guarded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quick.QuickGetMore, "_may_have", lambda *_: True)
    with pytest.raises(AssertionError):
        revoked(guarded)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_put_back_is_found(room: Room, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    scenario, places = FAULTS[fault]
    for owner, name, planted in places:
        monkeypatch.setattr(owner, name, planted)
    with pytest.raises(AssertionError):
        scenario(room)
