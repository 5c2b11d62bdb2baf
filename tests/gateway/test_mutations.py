"""Commands of real drivers with fields renamed, doubled, left out or of another type: the gateway's error is the
server's, and nobody else notices anything.

If a command has two faults, the server reports the one that it checks first. On 6.0 the gateway reported the other one:
the short run had no such command, and all codes of errors inside BSON counted as equal.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator
from typing import Any

import bson
import pytest
from bson.int64 import Int64

from tailrace.core.raw_bson import elements, encode_document
from tailrace.watch.gateway.frame import BadFrame, OpMsg
from tests.differential.wire import ANY_VALUE, Wire
from tests.gateway.record import recorded
from tests.gateway.side_by_side import OLDER_ARE_SLOW, SideBySide, side_by_side

pytestmark = pytest.mark.mongod

_NAMES = (b"aggregate", b"getMore", b"killCursors")
_VALUES: tuple[Any, ...] = (
    None,
    0,
    -1,
    1.5,
    Int64(1 << 62),
    "",
    "x",
    True,
    {},
    [],
    {"a": 1},
    [1],
    b"\0",
    bson.ObjectId(),
)
#: What an error says beside its code may hold what differs between two cursors.
_COMPARED = ("ok", "code", "codeName", "errorLabels")


@pytest.fixture(scope="module", params=OLDER_ARE_SLOW)
def sides(request: pytest.FixtureRequest) -> Iterator[SideBySide]:
    with side_by_side(request.param) as made:
        yield made


#: What PyMongo, Node's driver and mongosh put on the wire if all options of a stream are used.
_WITH_ALL_OPTIONS: tuple[dict[str, Any], ...] = (
    {
        "aggregate": 1,
        "pipeline": [{"$changeStream": {"fullDocument": "updateLookup"}}, {"$match": {"operationType": "insert"}}],
        "cursor": {"batchSize": 5},
        "comment": {"from": "here"},
        "collation": {"locale": "en", "strength": 2},
        "readConcern": {"level": "majority"},
        "maxTimeMS": 1000,
        "$db": "recorded",
        "$readPreference": {"mode": "primaryPreferred"},
    },
    {
        "getMore": Int64(1),
        "collection": "c",
        "batchSize": 10,
        "maxTimeMS": 100,
        "comment": "text",
        "$db": "recorded",
        "$readPreference": {"mode": "primaryPreferred"},
    },
)


def commands_of_drivers() -> list[bytes]:
    """Documents that drivers send for change streams."""
    found = [bson.encode(each) for each in _WITH_ALL_OPTIONS]
    for message in recorded():
        try:
            document = OpMsg.parse(message).document
        except BadFrame:
            continue
        first = next(elements(document), None)
        if first is not None and first.name in _NAMES:
            found.append(document)
    return found


def mutated(document: bytes, chance: random.Random) -> bytes:
    """The document with one or two fields changed."""
    parts = [document[each.start : each.end] for each in elements(document)]
    for _ in range(chance.choice((1, 1, 2))):
        at = chance.randrange(1, len(parts)) if len(parts) > 1 else 0
        name = parts[at][1 : parts[at].index(0, 1)]
        match chance.randrange(6):
            case 0:
                parts[at] = parts[at][:1] + name[:-1] + b"X" + parts[at][1 + len(name) :]
            case 1:
                parts.insert(chance.randrange(1, len(parts) + 1), parts[at])
            case 2 if name != b"$db":
                del parts[at]
            case 3:
                parts.insert(at, bson.encode({"added": chance.choice(_VALUES)})[4:-1])
            case _ if name != b"$db":
                parts[at] = bson.encode({name.decode("utf-8", "replace"): chance.choice(_VALUES)})[4:-1]
            case _:
                pass
    return encode_document(*parts)


def asked_of(document: bytes, cursor_id: int) -> bytes:
    """The command, with this cursor wherever it names one, on a database of the test's own, and without a wait."""
    parts = []
    wait_ms = 1 if next(elements(document)).name == b"getMore" else 600_000
    for each in elements(document):
        part = document[each.start : each.end]
        if each.name == b"getMore" and part[:1] == b"\x12":
            part = part[:9] + struct.pack("<q", cursor_id)
        elif each.name == b"maxTimeMS" and part[:1] == b"\x10":
            part = part[:11] + struct.pack("<i", wait_ms)
        elif each.name == b"cursors" and part[:1] == b"\x04":
            part = bson.encode({"cursors": [Int64(cursor_id)]})[4:-1]
        elif each.name == b"collection" and part[:1] == b"\x02":
            part = bson.encode({"collection": "$cmd.aggregate"})[4:-1]
        elif each.name in (b"$clusterTime", b"lsid"):
            continue  # of another deployment, and of another session
        elif each.name == b"$db" and part[:1] == b"\x02":
            part = bson.encode({"$db": "mutations"})[4:-1]
        parts.append(part)
    return encode_document(*parts)


def answer(wire: Wire, document: bytes) -> dict[str, Any]:
    return bson.decode(wire.exchange(document), ANY_VALUE)


def stream_with_an_event(sides: SideBySide) -> bytes:
    """An aggregate whose first getMore finds an event: without one, a getMore that sets no time limit waits for a
    second."""
    insert = {"insert": "c", "documents": [{}], "writeConcern": {"w": "majority", "j": True}}
    time = sides.server.run("mutations", insert)["operationTime"]
    stages = [{"$changeStream": {"startAtOperationTime": time}}]
    return bson.encode({"aggregate": 1, "pipeline": stages, "cursor": {"batchSize": 0}, "$db": "mutations"})


def compared(sides: SideBySide, seed: int, cases: int) -> dict[str, int]:
    """How many replies were good and how many errors, all of them the server's. Raises AssertionError."""
    chance, corpus, stream = random.Random(seed), commands_of_drivers(), stream_with_an_event(sides)
    assert {next(elements(each)).name for each in corpus} >= {b"aggregate", b"getMore"}
    found = {"good": 0, "refused": 0}
    for number in range(cases):
        template = mutated(chance.choice(corpus), chance)
        replies = []
        for wire in (sides.server, sides.gateway):
            cursor_id = answer(wire, stream)["cursor"]["id"]
            reply = answer(wire, asked_of(template, cursor_id))
            replies.append({name: reply.get(name) for name in _COMPARED})
            opened = reply.get("cursor", {}).get("id", 0) if isinstance(reply.get("cursor"), dict) else 0
            kill = {"killCursors": "x", "cursors": [Int64(cursor_id), Int64(opened)], "$db": "mutations"}
            answer(wire, bson.encode(kill))
        assert replies[0] == replies[1], f"case {number} of seed {seed}: {bson.decode(template, ANY_VALUE)}: {replies}"
        found["good" if replies[0]["ok"] else "refused"] += 1
    return found


def test_changed_commands_are_answered_as_by_the_server(sides: SideBySide) -> None:
    found = compared(sides, seed=1, cases=150)
    assert min(found.values()) > 5, found


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 8))
def test_many_changed_commands_are_answered_as_by_the_server(sides: SideBySide, seed: int) -> None:
    compared(sides, seed=seed, cases=1000)
