"""Commands with unusual fields, compared with the server: both give the same answer.

Why nothing had caught the differences: fields were only tried on 6.0, and only those that a driver sends.
"""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

import bson
import pytest
from bson.binary import Binary
from bson.decimal128 import Decimal128
from bson.int64 import Int64
from bson.min_key import MinKey
from bson.timestamp import Timestamp

from tailrace.core.event.resume_token import ResumeToken
from tailrace.watch.gateway import engine as gateway_engine
from tests.differential.wire import ANY_VALUE, Wire
from tests.gateway.running import eventually
from tests.gateway.side_by_side import BETWEEN_IS_SLOW, SideBySide, side_by_side

pytestmark = pytest.mark.mongod

PIPELINE = [{"$changeStream": {}}]
STREAM: dict[str, Any] = {"aggregate": "quiet", "pipeline": PIPELINE, "cursor": {}}
API = {"apiVersion": "1"}
STRICT = {**API, "apiStrict": True}
_NOW = int(time.time())


def session(number: int) -> dict[str, Any]:
    return {"lsid": {"id": Binary(bytes([number]) * 16, 4)}}


def cluster_time(seconds: int) -> dict[str, Any]:
    signature = {"hash": bytes(20), "keyId": Int64(0)}
    return {"$clusterTime": {"clusterTime": Timestamp(seconds, 1), "signature": signature}}


def stage(**options: Any) -> dict[str, Any]:
    return {"pipeline": [{"$changeStream": options}]}


AGGREGATES: dict[str, dict[str, Any]] = {
    "a first stage that is no document": {"pipeline": [{"$changeStream": 5}]},
    "an option that nobody knows": stage(foo=1),
    "an option of a wrong type": stage(fullDocument=5),
    "a value that nobody knows": stage(fullDocument="bad"),
    "pre-images": stage(fullDocumentBeforeChange="required"),
    "expanded events": stage(showExpandedEvents=True),
    "system events": stage(showSystemEvents=True),
    "the cluster from a database": stage(allChangesForCluster=True),
    "a token that is none": stage(resumeAfter=5),
    "a token without data": stage(resumeAfter={"_data": "zz"}),
    "a time that is none": stage(startAtOperationTime=5),
    "a time before the oplog": stage(startAtOperationTime=Timestamp(1, 1)),
    "a time and a token": stage(startAtOperationTime=Timestamp(1, 1), resumeAfter={"_data": "82"}),
    "a time to come": stage(startAtOperationTime=Timestamp(_NOW + 100_000, 1)),
    "a stage that nobody knows": {"pipeline": [*PIPELINE, {"$nothing": 1}]},
    "a stage that writes": {"pipeline": [*PIPELINE, {"$out": "x"}]},
    "a stage that is no document": {"pipeline": [*PIPELINE, 5]},
    "a stage without a name": {"pipeline": [*PIPELINE, {}]},
    "two streams": {"pipeline": PIPELINE * 2},
    "a stream that comes second": {"pipeline": [{"$match": {}}, *PIPELINE]},
    "no pipeline": {"pipeline": 5},
    "no cursor": {"cursor": 5},
    "an unknown field of the cursor": {"cursor": {"x": 1}},
    "a batch size below zero": {"cursor": {"batchSize": -1}},
    "a batch size that is no number": {"cursor": {"batchSize": "a"}},
    "a collation that is none": {"collation": 5},
    "a collation that nobody knows": {"collation": {"locale": "xx"}},
    "variables": {"let": {"a": 1}},
    "variables that are none": {"let": 5},
    "a comment": {"comment": {"a": 1}},
    "a limit below zero": {"maxTimeMS": -1},
    "a limit that is null": {"maxTimeMS": None},
    "an unknown field": {"unknown": 1},
    "a flag that is a number": {"allowDiskUse": 1},
    "a flag that is text": {"bypassDocumentValidation": "x"},
    "needsMerge alone": {"needsMerge": True},
    "tokens of version 2": {"$_generateV2ResumeTokens": True},
    "tokens of version 1": {"$_generateV2ResumeTokens": False},
    "tokens of no version": {"$_generateV2ResumeTokens": 1},
    "a number in place of the collection": {"aggregate": 2},
    "no collection": {"aggregate": None},
    "an empty collection": {"aggregate": ""},
    "a view": {"aggregate": "aView"},
    "a system collection": {"aggregate": "system.js"},
    "an API version": API,
    "strict": STRICT,
    "strict, with an option outside the API": {**STRICT, **stage(showExpandedEvents=True)},
    "strict, with another": {**STRICT, **stage(showSystemEvents=True)},
    "no deprecated things": {**API, "apiDeprecationErrors": True},
    "a secondary": {"$readPreference": {"mode": "secondary"}},
    "a primary with tags": {"$readPreference": {"mode": "primary", "tags": [{"a": "b"}]}},
    "tags that are none": {"$readPreference": {"mode": "secondary", "tags": 5}},
    "a secondary that is hardly behind": {"$readPreference": {"mode": "secondary", "maxStalenessSeconds": 5}},
    "a secondary that is not far behind": {"$readPreference": {"mode": "secondary", "maxStalenessSeconds": 120}},
    "hedged": {"$readPreference": {"mode": "nearest", "hedge": {"enabled": True}}},
    "a primary, hedged": {"$readPreference": {"mode": "primary", "hedge": {"enabled": True}}},
    "an empty read concern": {"readConcern": {}},
    "a level that is none": {"readConcern": {"level": 5}},
    "a level that nobody knows": {"readConcern": {"level": "nonsense"}},
    "local": {"readConcern": {"level": "local"}},
    "majority": {"readConcern": {"level": "majority"}},
    "after a time that is past": {"readConcern": {"afterClusterTime": Timestamp(5, 5)}},
    "after no time": {"readConcern": {"level": "majority", "afterClusterTime": Timestamp(0, 0)}},
    "after a time to come": {"readConcern": {"level": "majority", "afterClusterTime": Timestamp(_NOW + 100_000, 1)}},
    "after a time that the clock has but the oplog has not": {
        **cluster_time(_NOW + 500),
        "readConcern": {"level": "majority", "afterClusterTime": Timestamp(_NOW + 499, 1)},
        "maxTimeMS": 300,
    },
    "a clock that is far ahead": cluster_time(0x7FFFFFFF),
    "a clock that is ahead": cluster_time(_NOW + 600),
    "a write concern": {"writeConcern": {"w": 1}},
    "an empty write concern": {"writeConcern": {}},
    "an unknown field of a write concern": {"writeConcern": {"x": 1}},
    "a transaction": {**session(7), "txnNumber": Int64(1), "autocommit": False, "startTransaction": True},
    "a retryable command": {**session(8), "txnNumber": Int64(1)},
}
#: What a cursor is opened with, and what its getMore says.
GET_MORES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "as usual": ({}, {}),
    "in a session": ({}, session(1)),
    "in no session": (session(1), {}),
    "in another session": (session(1), session(2)),
    "of another collection": ({}, {"collection": "other"}),
    "of another collection in a session": ({}, {**session(1), "collection": "other"}),
    "of another collection with an API version": ({}, {**API, "collection": "other"}),
    "of a collection without a name": ({}, {"collection": ""}),
    "of no collection": ({}, {"collection": None}),
    "of a number": ({}, {"collection": 5}),
    "a limit below zero": ({}, {"maxTimeMS": -1}),
    "a limit that is text": ({}, {"maxTimeMS": "a"}),
    "a limit that is too large": ({}, {"maxTimeMS": 1 << 40}),
    "half a millisecond": ({}, {"maxTimeMS": 1.5}),
    "no limit": ({}, {"maxTimeMS": None}),
    "a size that is text": ({}, {"batchSize": "many"}),
    "a size below zero": ({}, {"batchSize": -1}),
    "a size of null": ({}, {"batchSize": None}),
    "a size of 0": ({}, {"batchSize": 0}),
    "an unknown field": ({}, {"unknown": 1}),
    "a term": ({}, {"term": Int64(1)}),
    "a term that is none": ({}, {"term": "x"}),
    "a commit point that is none": ({}, {"lastKnownCommittedOpTime": 5}),
    "a comment": ({}, {"comment": {"a": 1}}),
    "with an API version": ({}, API),
    "without its API version": (API, {}),
    "with its API version": (API, API),
    "stricter": (API, STRICT),
    "less strict": (STRICT, {**API, "apiStrict": False}),
    "with an API version that is none": ({}, {"apiVersion": "2"}),
    "in a transaction of another session": (
        {},
        {**session(9), "txnNumber": Int64(1), "autocommit": False, "startTransaction": True},
    ),
    "in a transaction of its session": (
        session(1),
        {**session(1), "txnNumber": Int64(1), "autocommit": False, "startTransaction": True},
    ),
    "in a transaction that is not there": (session(1), {**session(1), "txnNumber": Int64(1), "autocommit": False}),
    "a retryable command": (session(1), {**session(1), "txnNumber": Int64(1)}),
    "no end of a transaction": ({}, {"autocommit": False}),
    "a session that is none": ({}, {"lsid": 5}),
    "majority": ({}, {"readConcern": {"level": "majority"}}),
    "local": ({}, {"readConcern": {"level": "local"}}),
    "a write concern": ({}, {"writeConcern": {"w": 1}}),
    "a secondary": ({}, {"$readPreference": {"mode": "secondary"}}),
    "a mode that nobody knows": ({}, {"$readPreference": {"mode": "x"}}),
    "a clock that is far ahead": ({}, cluster_time(0x7FFFFFFF)),
    "a clock that is none": ({}, {"$clusterTime": 5}),
    "a hint": ({}, {"hint": 5}),
    "help": ({}, {"help": True}),
}
KILLS: dict[str, dict[str, Any]] = {
    "as usual": {},
    "twice": {"cursors": "twice"},
    "with an API version": API,
    "in a session": session(1),
    "an unknown field": {"unknown": 1},
    "of a number": {"killCursors": 5},
    "of a collection without a name": {"killCursors": ""},
    "of another collection": {"killCursors": "other"},
    "ids that are none": {"cursors": 5},
    "an id that is short": {"cursors": [5]},
    "no id": {"cursors": []},
    "in a transaction": {**session(1), "txnNumber": Int64(1), "autocommit": False},
    "majority": {"readConcern": {"level": "majority"}},
    "a write concern": {"writeConcern": {"w": 1}},
    "a mode that nobody knows": {"$readPreference": {"mode": "x"}},
    "a limit that is text": {"maxTimeMS": "a"},
    "a limit below zero": {"maxTimeMS": -1},
}


@pytest.fixture(scope="module", params=BETWEEN_IS_SLOW)
def sides(request: pytest.FixtureRequest) -> Iterator[SideBySide]:
    with side_by_side(request.param) as made:
        made.server.run("shop", {"create": "aView", "viewOn": "orders"})
        insert = {"insert": "quiet", "documents": [{"_id": 0}], "writeConcern": {"w": "majority"}}
        made.server.run("shop", insert)
        yield made


def answer(wire: Wire, command: Mapping[str, Any]) -> dict[str, Any]:
    return bson.decode(wire.exchange(bson.encode({**command, "$db": "shop"})), ANY_VALUE)


def in_order(reply: Mapping[str, Any], *ids: int) -> str:
    """A reply's fields in their order, without what differs from one moment and cursor to the next."""
    shown = {name: "T" if name in ("$clusterTime", "operationTime") else value for name, value in reply.items()}
    if "cursor" in shown:
        cursor = dict(shown["cursor"])
        shown["cursor"] = {**cursor, "id": bool(cursor["id"]), "postBatchResumeToken": "P"}
    text = str(shown)
    for number, one in enumerate(ids):
        text = text.replace(str(one), f"<id {number}>")
    text = re.sub(r"'optimizationTimeMillis': \d+", "'optimizationTimeMillis': T", text)
    return re.sub(r"Timestamp\(\d+, \d+\)|\b1[78]\d{8,11}\b", "T", text)


def renewed(fields: Mapping[str, Any]) -> dict[str, Any]:
    """A transaction's number may not be used twice."""
    return {**fields, "txnNumber": Int64(time.time_ns() // 1_000_000)} if "txnNumber" in fields else dict(fields)


def in_a_session_of_its_own(fields: Mapping[str, Any]) -> dict[str, Any]:
    """One transaction ends another of the same session."""
    own = {"lsid": {"id": Binary(uuid.uuid4().bytes, 4)}} if "lsid" in fields else {}
    return {**renewed(fields), **own}


def opened(wire: Wire, fields: Mapping[str, Any]) -> tuple[Int64 | None, dict[str, Any]]:
    reply = answer(wire, {**STREAM, **fields})
    return (Int64(reply["cursor"]["id"]) if "cursor" in reply else None), reply


def close(wire: Wire, cursor_id: Int64 | None) -> None:
    if cursor_id:
        answer(wire, {"killCursors": "quiet", "cursors": [cursor_id]})


def test_an_aggregate_is_answered_as_by_the_server(sides: SideBySide) -> None:
    found = {}
    for name, fields in AGGREGATES.items():
        replies = []
        for wire in (sides.server, sides.gateway):
            cursor_id, reply = opened(wire, in_a_session_of_its_own(fields))
            close(wire, cursor_id)
            replies.append(in_order(reply))
        if replies[0] != replies[1]:
            found[name] = replies
    assert found == {}


#: Every field that a command of a stream may have; ``exchange`` has a test of its own.
_OF_AN_AGGREGATE = (
    *("aggregate", "pipeline", "cursor", "collation", "let", "hint", "comment", "readConcern", "explain"),
    *("writeConcern", "bypassDocumentValidation", "allowDiskUse", "fromMongos", "needsMerge", "isMapReduceCommand"),
    *("runtimeConstants", "use44SortKeys", "requestReshardingResumeToken", "collectionUUID", "encryptionInformation"),
    *("lsid", "$readPreference", "$clusterTime", "apiVersion", "apiStrict", "apiDeprecationErrors", "txnNumber"),
    *("autocommit", "startTransaction", "exchange", "maxTimeMSOpOnly", "$audit", "$client", "help"),
)
_OF_A_GET_MORE = (
    *("getMore", "collection", "batchSize", "comment", "term", "lastKnownCommittedOpTime", "readConcern"),
    *("writeConcern", "lsid", "$readPreference", "$clusterTime", "apiVersion", "txnNumber", "autocommit"),
)
_OF_EACH_TYPE: tuple[Any, ...] = (
    *(None, True, 0, -1, Int64(1 << 40), 1.5, Decimal128("1.5"), "", "x", {}, {"a": 1}, [1], Timestamp(1, 1), MinKey()),
)


@pytest.mark.parametrize("asked", [{}, {"$_generateV2ResumeTokens": False}])
def test_tokens_are_of_the_version_that_the_server_would_give(sides: SideBySide, asked: dict[str, Any]) -> None:
    """7.0 gives tokens of version 1 if it is told not to use version 2. Ours had version 2, but comparisons left out
    tokens, which differ from one moment to the next."""
    versions = []
    for wire in (sides.server, sides.gateway):
        cursor_id, reply = opened(wire, asked)
        close(wire, cursor_id)
        token = reply.get("cursor", {}).get("postBatchResumeToken", {})
        versions.append((reply.get("code"), ResumeToken.from_hex(token["_data"]).version if token else None))
    assert versions[0] == versions[1]
    assert versions[0] != (None, None)


def test_each_field_of_each_type_is_answered_as_by_the_server(sides: SideBySide) -> None:
    """4.4 refuses a null collation, which had not been tried there; 6.0 knows fields of routers that the engine does
    not. Fields had only been tried with values that somebody had thought of. Time limits have a test of their own."""
    found = {}
    for name in _OF_AN_AGGREGATE:
        for value in _OF_EACH_TYPE if name != "exchange" else (None,):
            replies = []
            for wire in (sides.server, sides.gateway):
                cursor_id, reply = opened(wire, {name: value})
                close(wire, cursor_id)
                replies.append(in_order(reply))
            if replies[0] != replies[1]:
                found[name, repr(value)] = replies
    for name in _OF_A_GET_MORE:
        for value in _OF_EACH_TYPE:
            replies = []
            for wire in (sides.server, sides.gateway):
                cursor_id, _ = opened(wire, {})
                read = {"getMore": cursor_id, "collection": "quiet", "maxTimeMS": 1, name: value}
                replies.append(in_order(answer(wire, read), cursor_id or 0))
                close(wire, cursor_id)
            if replies[0] != replies[1]:
                found[f"getMore {name}", repr(value)] = replies
    assert found == {}


#: Beside a stream, an exchange that the server accepts ends its process.
EXCHANGE: dict[str, Any] = {"policy": "broadcast", "consumers": 2}
#: Fields beside which the server carries out an exchange, in at least one version.
_BESIDE_AN_EXCHANGE: tuple[dict[str, Any], ...] = (
    *({}, {"hint": {"a": 1}}, {"hint": 5}, {"explain": False}, {"explain": True}, {"explain": None}, {"unknown": 1}),
    *({"aggregate": 1}, {"aggregate": "nothing"}, {"cursor": {"batchSize": 0}}, {"cursor": {"batchSize": None}}),
    *(STRICT, {"apiVersion": "2"}, API, {"let": {}}, {"collation": {"locale": "xx"}}, {"isMapReduceCommand": True}),
    *({"writeConcern": {"w": 1}}, {"readConcern": {"level": "local"}}, {"maxTimeMSOpOnly": 100}, {"stmtId": 1}),
    *({"needsMerge": True, "fromMongos": True}, {"runtimeConstants": {}}, {"collectionUUID": Binary(bytes(16), 4)}),
    *({"$queryOptions": {}}, {"$audit": {}}, {"$client": {}}, {"help": True}, {"$readPreference": {"mode": "x"}}),
    *(AGGREGATES["a transaction"], AGGREGATES["a retryable command"], stage(foo=1), stage(showExpandedEvents=True)),
    *(stage(startAtOperationTime=Timestamp(1, 1)), {"pipeline": [*PIPELINE, {"$nothing": 1}]}, {"comment": "exchange"}),
)
_CONSUMERS: tuple[Any, ...] = (0, -1, 101, 1.5, 1.0, Int64(1), None, True, "x", {})
_BUFFER_SIZES: tuple[Any, ...] = (-5, 1 << 30, Int64(5), "x")
_REFUSED_EXCHANGES: tuple[Any, ...] = (
    *(5, "x", True, [1], {}, {"a": 1}, {"policy": "x", "consumers": 1}, {"policy": "broadcast"}),
    *({**EXCHANGE, "consumers": number} for number in _CONSUMERS),
    *({**EXCHANGE, "bufferSize": number} for number in _BUFFER_SIZES),
)
_FATAL = "'exchange' next to $changeStream would end the server's process; the gateway does not pass it on"


def test_an_exchange_is_refused_where_it_would_end_the_server(sides: SideBySide) -> None:
    """Beside a field that only the server handles, it was passed on. Exchanges had only been tried by themselves, and
    only as null."""
    version = sides.running.gateway.engine.version
    found = {}
    fatal = 0
    for fields in _BESIDE_AN_EXCHANGE:
        # The server refuses an exchange without consumers last of all, where it would carry out another one.
        harmless = {**EXCHANGE, "consumers": 0}
        theirs = in_order(opened(sides.server, {**in_a_session_of_its_own(fields), "exchange": harmless})[1])
        ours = in_order(opened(sides.gateway, {**in_a_session_of_its_own(fields), "exchange": EXCHANGE})[1])
        if "Exchange must have at least one consumer" in theirs:
            fatal += 1
            if f"'errmsg': \"{_FATAL}\", 'code': 115" not in ours:
                found[str(fields)] = [theirs, ours]
        elif "explain" in fields and version >= (5, 0) and "'ok': 1.0" in theirs:
            assert "'ok': 1.0" in ours  # and the numbers of the two plans differ
        elif theirs != ours:
            found[str(fields)] = [theirs, ours]
    for exchange in _REFUSED_EXCHANGES:
        replies = [in_order(opened(wire, {"exchange": exchange})[1]) for wire in (sides.server, sides.gateway)]
        if replies[0] != replies[1]:
            found[str(exchange)] = replies
    assert found == {}
    assert fatal > 10


def test_a_get_more_is_answered_as_by_the_server(sides: SideBySide) -> None:
    found = {}
    for name, (opening, reading) in GET_MORES.items():
        replies = []
        for wire in (sides.server, sides.gateway):
            cursor_id, reply = opened(wire, opening)
            if cursor_id is None:  # 4.4 has no API versions
                replies.append(in_order(reply))
                continue
            read = {"getMore": cursor_id, "collection": "quiet", "maxTimeMS": 5, **renewed(reading)}
            first = answer(wire, read)
            after = answer(wire, {"getMore": cursor_id, "collection": "quiet", "maxTimeMS": 1, **opening})
            replies.append(in_order(first, cursor_id) + f" and then {after['ok']}")
            close(wire, cursor_id)
        if replies[0] != replies[1]:
            found[name] = replies
    assert found == {}


def test_a_kill_is_answered_as_by_the_server(sides: SideBySide) -> None:
    found = {}
    for name, fields in KILLS.items():
        replies = []
        for wire in (sides.server, sides.gateway):
            cursor_id, _ = opened(wire, {})
            assert cursor_id is not None
            ids = [cursor_id, cursor_id] if fields.get("cursors") == "twice" else [cursor_id]
            kill = {"killCursors": "quiet", **renewed(fields), "cursors": fields.get("cursors", ids)}
            reply = answer(wire, {**kill, "cursors": ids} if kill["cursors"] == "twice" else kill)
            after = answer(wire, {"getMore": cursor_id, "collection": "quiet", "maxTimeMS": 1})
            replies.append(in_order(reply, cursor_id) + f" and then {after.get('code')}")
            close(wire, cursor_id)
        if replies[0] != replies[1]:
            found[name] = replies
    assert found == {}


def test_what_is_not_done_here_is_left_to_the_server(sides: SideBySide) -> None:
    """With 115, or with 40415 on old servers, the gateway had refused what works without it."""
    image = stage(fullDocumentBeforeChange="whenAvailable")
    cursor_id, reply = opened(sides.gateway, image)
    assert reply["ok"] == 1
    ours = sides.running.gateway.engine
    assert sides.running.call(lambda: cursor_id in ours.streams) == (ours.version >= (6, 0))
    assert answer(sides.gateway, {"getMore": cursor_id, "collection": "quiet", "maxTimeMS": 1})["ok"] == 1
    close(sides.gateway, cursor_id)


def test_commands_that_end_sessions_end_the_same_streams_as_on_the_server(sides: SideBySide) -> None:
    """``killSessions: []`` means every session, and ended none here; ``killAllSessions`` also ended streams without a
    session. Only a named session had been tried."""
    commands: list[dict[str, Any]] = [
        {"killSessions": []},
        {"killSessions": [session(7)["lsid"]]},
        {"killAllSessions": []},
        {"killAllSessionsByPattern": []},
    ]
    for command in commands:
        found = []
        for wire in (sides.server, sides.gateway):
            streams = [(opened(wire, fields)[0], fields) for fields in (session(7), session(8), {})]
            assert wire.run("admin", command)["ok"] == 1
            read = {"collection": "quiet", "maxTimeMS": 1}
            replies = [answer(wire, {"getMore": number, **read, **fields}) for number, fields in streams]
            found.append([(reply["ok"], reply.get("code")) for reply in replies])
            for number, _ in streams:
                close(wire, number)
        assert found[0] == found[1], command


def test_a_session_that_ends_takes_its_streams_with_it(sides: SideBySide, monkeypatch: pytest.MonkeyPatch) -> None:
    """They stayed for ten minutes. The server checks every five minutes, or when it is told to; we check more often."""
    monkeypatch.setattr(gateway_engine, "_EXPIRE_S", 0.1)
    read = {"collection": "quiet", "maxTimeMS": 1, **session(5)}
    found = []
    for wire in (sides.server, sides.gateway):
        cursor_id, _ = opened(wire, session(5))
        other, _ = opened(wire, session(6))
        assert answer(wire, {"getMore": cursor_id, **read})["ok"] == 1
        wire.run("admin", {"endSessions": [session(5)["lsid"]]})
        if wire is sides.server:
            wire.run("admin", {"refreshLogicalSessionCacheNow": 1})
        else:
            ours, streams = cursor_id, sides.running.gateway.engine.streams
            eventually(lambda ours=ours, streams=streams: ours not in streams, "it stays")  # type: ignore[misc]
        kept = answer(wire, {"getMore": other, "collection": "quiet", "maxTimeMS": 1, **session(6)})
        found.append((answer(wire, {"getMore": cursor_id, **read})["code"], kept["ok"]))
        close(wire, other)
    assert found == [(43, 1.0)] * 2


@pytest.mark.parametrize("fault", [{"errorCode": 6}, {"closeConnection": True}])
def test_a_session_that_the_server_did_not_end_keeps_its_streams(sides: SideBySide, fault: dict[str, Any]) -> None:
    """Streams were marked before the server had answered. In every earlier test it had ended the session."""
    streams = sides.running.gateway.engine.streams
    cursor_id, _ = opened(sides.gateway, session(5))
    sides.server.run(
        "admin",
        {"configureFailPoint": "failCommand", "mode": {"times": 1}, "data": {"failCommands": ["endSessions"], **fault}},
    )
    with Wire.to(sides.running.uri()) as ending:
        end = bson.encode({"endSessions": [session(5)["lsid"]], "$db": "admin"})
        if "errorCode" in fault:
            assert bson.decode(ending.exchange(end))["code"] == 6
        else:
            with pytest.raises(OSError):  # noqa: PT011  a closed connection has many names
                ending.exchange(end)
    assert not sides.running.call(lambda: streams[cursor_id].is_ended)
    with Wire.to(sides.running.uri()) as ending:
        assert bson.decode(ending.exchange(end))["ok"] == 1
    # Marked, or already closed: ended streams are closed every few seconds.
    assert sides.running.call(lambda: cursor_id not in streams or streams[cursor_id].is_ended)
    close(sides.gateway, cursor_id)
