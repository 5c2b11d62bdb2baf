"""Strangers: random commands of clients that follow no rules, to a server and to a gateway in front of it.

    python -m tests.gateway.strangers --version 6.0.27 --seed 1 --steps 2000

Each side has connections, sessions and cursors of its own; what is done to one is done to the other. Streams are opened
with odd sizes and places, read on other connections and in other sessions, within transactions that other commands have
begun, killed beside cursors of the server, asked for after their end. Every reply is compared field by field, in the
order of its fields, with its tokens and its events. Documents are written once, since both sides read one deployment.
"""

from __future__ import annotations

import argparse
import random
import sys
import uuid
from collections.abc import Mapping
from typing import Any

import bson
from bson.binary import Binary
from bson.decimal128 import Decimal128
from bson.int64 import Int64
from bson.timestamp import Timestamp

from tests.differential.wire import ANY_VALUE, Wire
from tests.gateway.side_by_side import VERSIONS, SideBySide, side_by_side

_CONNECTIONS = 3
_SESSIONS = 3
#: How many cursors are remembered after they have gone.
_REMEMBERED = 12
_NOBODY_S = Int64(0x1234567890ABCDE)
#: The end of tokens that stand for a time.
_NO_EVENT = "0229296E04"
#: Sizes and times of every type. A getMore without a time waits a second, so few have none.
NUMBERS: tuple[Any, ...] = (
    0,
    1,
    2,
    3,
    -1,
    Int64(2),
    2.0,
    1.9,
    -0.5,
    float("nan"),
    float("inf"),
    Decimal128("2"),
    Decimal128("1.5"),
    Decimal128("NaN"),
    Decimal128("-1"),
    Int64(1 << 40),
    1e30,
    True,
    None,
    "2",
    {},
    [2],
    Timestamp(1, 1),
)
NAMES: tuple[Any, ...] = (
    "orders",
    "items",
    "$cmd.aggregate",
    "",
    ".x",
    "a$b",
    "system.js",
    5,
    None,
    "or\0ders",
    "ordérs",
    "x" * 300,
)
STAGES: tuple[dict[str, Any], ...] = (
    {"$match": {"operationType": "insert"}},
    {"$project": {"fullDocument": 1}},
    {"$project": {"_id": 0}},
    {"$match": 5},
    {"$limit": 2},
    {"$addFields": {"a": {"$add": [1, "x"]}}},
    {"$nothing": 1},
)


class Pair:
    """A cursor on both sides: ``ids[0]`` the server's."""

    def __init__(self, ids: list[Int64], collection: str, session: int | None) -> None:
        self.ids = ids
        self.collection = collection
        self.session = session

    def __repr__(self) -> str:
        return f"<cursor of {self.session}, server's {self.ids[0]}>"


class Strangers:
    """``steps`` random commands, both sides compared. Raises AssertionError at the first difference."""

    def __init__(self, sides: SideBySide, seed: int) -> None:
        self.chance = random.Random(seed)
        self.database = f"strangers{seed}"
        self.wires = [
            [Wire.to(uri) for _ in range(_CONNECTIONS)] for uri in (sides.deployment.uri, sides.running.uri())
        ]
        # Each side has a session of its own; otherwise one side's transaction would be the other's.
        self.sessions = [[Binary(uuid.uuid4().bytes, 4) for _ in range(_SESSIONS)] for _ in range(2)]
        self.numbers = [0] * _SESSIONS
        self.pairs: list[Pair] = []
        self.found: dict[str, int] = {}
        self.history: list[str] = []
        self.places: list[Any] = []
        self.begun = self.wires[0][0].run("admin", {"ping": 1})["operationTime"]
        self._write(4)

    def close(self) -> None:
        for wire in (*self.wires[0], *self.wires[1]):
            wire.close()

    # -- steps ------------------------------------------------------------------------------------------------------

    def step(self) -> None:
        kinds = (self._open, self._read, self._read, self._read, self._kill, self._find, self._begin, self._end)
        kind = self.chance.choice((*kinds, self._write_some, self._end_sessions, self._ordinary))
        kind()

    def _open(self) -> None:
        stage: dict[str, Any] = {}
        if self.places and self.chance.random() < 0.6:
            stage[self.chance.choice(("resumeAfter", "startAfter"))] = self.chance.choice(self.places)
        if self.chance.random() < 0.2:
            stage["fullDocument"] = self.chance.choice(("updateLookup", "default", "x", 5))
        cursor: dict[str, Any] = {} if self.chance.random() < 0.3 else {"batchSize": self._number()}
        more = [self.chance.choice(STAGES)] if self.chance.random() < 0.3 else []
        fields = {
            "aggregate": self.chance.choice(("orders", "orders", "orders", 1, "items")),
            "pipeline": [{"$changeStream": stage}, *more],
            "cursor": cursor,
        }
        self._opened(fields, self._session())

    def _find(self) -> None:
        """A cursor of the server that is not a stream."""
        self._opened({"find": "orders", "batchSize": self.chance.choice((0, 1, 2, 0, 1))}, self._session())

    def _opened(self, fields: dict[str, Any], session: int | None) -> None:
        replies = self._both(fields, session)
        if replies[0]["ok"] and replies[0]["cursor"]["id"]:
            ids = [Int64(reply["cursor"]["id"]) for reply in replies]
            self.pairs.append(Pair(ids, replies[0]["cursor"]["ns"].partition(".")[2], session))
            if len(self.pairs) > _REMEMBERED:
                self._both({"killCursors": "orders", "cursors": self.pairs[:1]}, None, inside=False)
                del self.pairs[0]

    def _read(self) -> None:
        if not self.pairs:
            return
        pair = self.chance.choice(self.pairs)
        session = pair.session if self.chance.random() < 0.85 else self._session()
        name = pair.collection if self.chance.random() < 0.9 else self.chance.choice(NAMES)
        fields: dict[str, Any] = {"getMore": pair, "collection": name}
        if self.chance.random() < 0.5:
            fields["batchSize"] = self._number()
        fields["maxTimeMS"] = 1 if self.chance.random() < 0.7 else self._number(waits=False)
        if self.chance.random() < 0.05:
            fields["getMore"] = self.chance.choice((_NOBODY_S, 5, 5.0, None, "x", Decimal128("5"), Int64(0), Int64(-5)))
        for reply in self._both(fields, session)[:1]:
            for event in reply["cursor"]["nextBatch"] if reply["ok"] else ():
                if isinstance(event.get("_id"), dict):
                    self.places = [*self.places[-8:], event["_id"]]

    def _kill(self) -> None:
        count = self.chance.choice((1, 1, 2, 3))
        cursors: list[Any] = [self.chance.choice(self.pairs) for _ in range(count)] if self.pairs else []
        if self.chance.random() < 0.4:
            cursors.insert(0, _NOBODY_S)
        if self.chance.random() < 0.1:
            cursors.append(self.chance.choice((5, "x", None, 5.0)))
        name = "orders" if self.chance.random() < 0.9 else self.chance.choice(NAMES)
        self._both({"killCursors": name, "cursors": cursors}, self._session())

    def _begin(self) -> None:
        session = self.chance.randrange(_SESSIONS)
        self.numbers[session] += self.chance.choice((1, 1, 1, 0))
        first = self.chance.choice(
            (
                {"find": "orders", "limit": 1},
                {"find": "orders", "limit": 1},
                {"find": "orders", "batchSize": 1},
                {"aggregate": "orders", "pipeline": [{"$changeStream": {}}], "cursor": {}},
            )
        )
        number = {"txnNumber": Int64(self.numbers[session]), "autocommit": False, "startTransaction": True}
        self._opened({**first, **number}, session)

    def _end(self) -> None:
        session = self.chance.randrange(_SESSIONS)
        name = self.chance.choice(("commitTransaction", "abortTransaction"))
        number = {"txnNumber": Int64(self.numbers[session]), "autocommit": False}
        self._both({name: 1, **number}, session, database="admin", inside=False)

    def _write_some(self) -> None:
        self._write(self.chance.choice((1, 3)))

    def _write(self, count: int) -> None:
        """Write through either side, majority-committed, so that both see it at once."""
        wire = self.chance.choice(self.wires)[0]
        documents = [{"_id": self.chance.getrandbits(60), "n": number} for number in range(count)]
        for name in ("orders", "items"):
            concern = {"writeConcern": {"w": "majority", "j": True}}
            wire.run(self.database, {"insert": name, "documents": documents, **concern})
        self._await_seen(documents[-1]["_id"])
        self.history.append(f"{count} documents written")

    def _await_seen(self, last: int) -> None:
        """Wait until the gateway has read it: the server's streams see at once what a majority has, ours a moment
        later."""
        stage = {"$changeStream": {"startAtOperationTime": self.begun}}
        wire = self.wires[1][0]
        match = {"$match": {"documentKey._id": last, "ns.coll": "items"}}
        cursor = wire.run(self.database, {"aggregate": 1, "pipeline": [stage, match], "cursor": {}})["cursor"]
        batch = list(cursor["firstBatch"])
        read = {"getMore": Int64(cursor["id"]), "collection": "$cmd.aggregate", "maxTimeMS": 60_000}
        while not batch:
            batch = list(wire.run(self.database, read)["cursor"]["nextBatch"])
        self.begun = batch[0]["clusterTime"]
        wire.run(self.database, {"killCursors": "$cmd.aggregate", "cursors": [Int64(cursor["id"])]})

    def _end_sessions(self) -> None:
        """``killSessions`` ends streams at once. (``endSessions`` does so later, and the gateway sooner than the
        server.)"""
        if self.chance.random() < 0.2:
            session = self.chance.randrange(_SESSIONS)
            ids = [{"killSessions": [{"id": mine[session]}]} for mine in self.sessions]
            self._compare([self._send(side, fields, None, "admin", 0) for side, fields in enumerate(ids)], "kill")

    def _ordinary(self) -> None:
        fields: dict[str, Any] = self.chance.choice(
            (
                {"ping": 1},
                {"getMore": Int64(7), "collection": "orders"},
                {"aggregate": "orders", "pipeline": [], "cursor": {}},
                {"aggregate": "orders", "pipeline": [{"$match": {}}, {"$changeStream": {}}], "cursor": {}},
                {"aggregate": "orders", "pipeline": [{"$changeStream": {}}], "explain": True},
                {"aggregate": "orders", "pipeline": [{"$changeStream": {}}, {"$out": "items"}], "cursor": {}},
                {"noSuchCommand": 1},
            )
        )
        if "explain" in fields:
            return  # has the server's plan in it, with addresses and times
        self._both(fields, self._session())

    # -- both sides -------------------------------------------------------------------------------------------------

    def _number(self, *, waits: bool = True) -> Any:
        number = self.chance.choice(NUMBERS)
        # Values that mean a long wait, or the default of a second.
        is_long = number in (0, None) or (isinstance(number, int | float) and number > 1000)
        return 1 if is_long and not waits else number

    def _session(self) -> int | None:
        return self.chance.choice((None, None, *range(_SESSIONS)))

    def _both(
        self, fields: Mapping[str, Any], session: int | None, *, database: str | None = None, inside: bool = True
    ) -> list[dict[str, Any]]:
        fields = dict(fields)
        if inside and session is not None and "txnNumber" not in fields and self.chance.random() < 0.3:
            fields |= {"txnNumber": Int64(self.numbers[session]), "autocommit": False}
        place = self.chance.randrange(_CONNECTIONS)
        replies = [self._send(side, fields, session, database or self.database, place) for side in range(2)]
        self._compare(replies, f"connection {place}, session {session}: {fields}")
        return replies

    def _send(
        self, side: int, fields: Mapping[str, Any], session: int | None, database: str, place: int
    ) -> dict[str, Any]:
        filled = {name: self._filled(value, side) for name, value in fields.items()}
        if session is not None:
            filled["lsid"] = {"id": self.sessions[side][session]}
        raw = bson.encode({**filled, "$db": database})
        return bson.decode(self.wires[side][place].exchange(raw), ANY_VALUE)

    def _filled(self, value: Any, side: int) -> Any:
        if isinstance(value, Pair):
            return value.ids[side]
        return [self._filled(each, side) for each in value] if isinstance(value, list) else value

    def _compare(self, replies: list[dict[str, Any]], what: str) -> None:
        self.history.append(what)
        shown = [self._shown(side, reply) for side, reply in enumerate(replies)]
        history = "\n".join(self.history[-40:])
        assert shown[0] == shown[1], f"step {len(self.history)}:\n{history}\n{shown[0]}\n{shown[1]}"
        outcome = "good" if replies[0]["ok"] else str(replies[0].get("code"))
        self.found[outcome] = self.found.get(outcome, 0) + 1

    def _shown(self, side: int, reply: dict[str, Any]) -> str:
        """A reply's fields in their order, with marks for what differs between the sides."""
        shown = {name: "T" if name in ("$clusterTime", "operationTime") else value for name, value in reply.items()}
        cursor = shown.get("cursor")
        if isinstance(cursor, dict):
            shown["cursor"] = {**cursor, "id": bool(cursor["id"])}
            token = cursor.get("postBatchResumeToken")
            if token is not None and str(token["_data"]).endswith(_NO_EVENT):
                # How far a side has read varies by moments, since the end of a transaction is an entry too.
                shown["cursor"]["postBatchResumeToken"] = "P"
        text = str(shown)
        for number, pair in enumerate(self.pairs):
            text = text.replace(str(int(pair.ids[side])), f"<cursor {number}>")
        for number, session in enumerate(self.sessions[side]):
            text = text.replace(str(uuid.UUID(bytes=bytes(session))), f"<session {number}>")
            text = text.replace(repr(session), f"<session {number}>")
        return text


def meet(sides: SideBySide, seed: int, steps: int) -> dict[str, int]:
    """How many replies were good, and how many errors of each code. Raises AssertionError at the first difference."""
    strangers = Strangers(sides, seed)
    try:
        for _ in range(steps):
            strangers.step()
    finally:
        strangers.close()
    return strangers.found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--version", choices=VERSIONS, default=VERSIONS[0])
    parser.add_argument("--seed", type=int, nargs="+", default=[1])
    parser.add_argument("--steps", type=int, default=1000)
    args = parser.parse_args()
    failed = 0
    with side_by_side(args.version) as sides:
        for seed in args.seed:
            try:
                print(f"{args.version}, seed {seed}: {meet(sides, seed, args.steps)}", flush=True)
            except AssertionError as error:
                failed += 1
                print(f"{args.version}, seed {seed}: {error}", flush=True)
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
