"""The same commands to the server's cursors and to ours: every reply must be the same bytes, errors included."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import bson
import pytest
from bson.datetime_ms import DatetimeMS
from bson.int64 import Int64
from bson.raw_bson import RawBSONDocument

from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.embedded import ReplicaSet
from tailrace.read.source.mongod import MongodSource
from tests.amounts import amount
from tests.differential.cases import options_of
from tests.differential.cursors import DifferentError, Pair, Sides
from tests.differential.execute import Executed, clear, note, run_operation
from tests.differential.native import aggregate
from tests.differential.wire import ANY_VALUE, Wire
from tests.differential.workload import Workload
from tests.golden.cursors import batch_of
from tests.quiet import QUIET

pytestmark = pytest.mark.mongod

_AWAIT_MS = 5
#: A match on a computed field: the server cannot move it into its read of the oplog, where it would also hide the
#: entries that end a stream (a replacement with a field "$v" of the user's).
_KIND = {"$addFields": {"kind": {"$toUpper": "$operationType"}}}
_PIPELINES: tuple[list[Any], ...] = (
    [],
    [],
    [],
    [_KIND, {"$match": {"kind": {"$in": ["INSERT", "DELETE"]}}}],
    [_KIND, {"$match": {"kind": {"$ne": "INVALIDATE"}}}],
    [{"$match": {"operationType": {"$ne": "invalidate"}}}],
    [_KIND, {"$match": {"kind": "NOTHING"}}],
    [{"$project": {"fullDocument": 0}}],
    [{"$addFields": {"_id": {"$cond": [{"$eq": ["$operationType", "delete"]}, "changed", "$_id"]}}}],
    [{"$changeStreamSplitLargeEvent": {}}],
)


@pytest.fixture(scope="module")
def sides() -> Iterator[Sides]:
    with (
        ReplicaSet(1, parameters=QUIET, enable_test_commands=True, oplog_size_mb=2000) as deployment,
        Wire.to(deployment.uri) as wire,
    ):
        source = MongodSource(deployment.uri)
        try:
            yield Sides(deployment.uri, wire, source)
        finally:
            source.close()


class Clients:
    """Random clients of one workload's streams: they open, read on, resume, and kill."""

    def __init__(self, sides: Sides, workload: Workload, start: Any, seed: int) -> None:
        self.sides = sides
        self.done: Counter[str] = Counter()
        self.events = 0
        self._rng = random.Random(f"tailrace cursors {seed}")
        self._start = start
        first, second = workload.databases
        self._scopes = (("admin", None), (first, None), (first, "c0"), (first, "c1"), (second, None), (second, "c0"))
        self._open: list[Pair] = []
        self._tokens: list[Any] = []

    def step(self) -> None:
        """One command of one client."""
        self.sides.source.batch_bytes_max = self._rng.choice((1, 2_000, 1 << 24))
        if not self._open or (len(self._open) < 6 and self._rng.random() < 0.2):
            self._open_one()
            return
        pair = self._rng.choice(self._open)
        if self._rng.random() < 0.04:
            pair.kill()
            assert pair.get_more()["code"] == 43
            self.done["killed"] += 1
            self._open.remove(pair)
            return
        size = self._rng.choice((None, None, 0, 1, 1, 2, 3, 7, 40))
        sized: dict[str, Any] = {} if size is None else {"batchSize": size}
        reply = pair.get_more(maxTimeMS=_AWAIT_MS, **sized)
        self._look_at(pair, reply)

    def _open_one(self) -> None:
        stage = options_of(self._rng)
        if stage.get("fullDocument") == "updateLookup":  # each side looks up when it reads, so at different moments
            del stage["fullDocument"]
        kind = self._rng.random()
        if kind < 0.5 and self._tokens:
            stage[self._rng.choice(("resumeAfter", "startAfter"))] = self._rng.choice(self._tokens)
        elif kind < 0.8:
            stage["startAtOperationTime"] = self._start
        pipeline = self._rng.choice(_PIPELINES)
        database, command = aggregate(self._rng.choice(self._scopes), stage, pipeline=tuple(pipeline))
        size = self._rng.choice((None, None, 0, 0, 1, 2, 5, 200))
        command["cursor"] = {} if size is None else {"batchSize": size}
        # A shard leaves the look-up of images to the router: such streams are tested on a sharded cluster.
        if stage.keys().isdisjoint({"fullDocument", "fullDocumentBeforeChange"}) and self._rng.random() < 0.2:
            command |= {"fromMongos": True, "needsMerge": True}
        opened = self.sides.open(database, command)
        self.done["opened"] += 1
        if isinstance(opened, Pair):
            self._open.append(opened)
            self._look_at(opened, opened.reply)
        else:
            self.done[f"refused {opened['code']}"] += 1

    def _look_at(self, pair: Pair, reply: RawBSONDocument) -> None:
        if reply["ok"] == 1:
            self.done["replies"] += 1
            self.events += len(batch_of(reply))
            self._tokens.append(bson.decode(reply["cursor"]["postBatchResumeToken"].raw))
            for event in batch_of(reply)[-2:]:
                self._tokens.append(bson.decode(event, ANY_VALUE)["_id"])
            del self._tokens[:-60]
        else:
            self.done[f"failed {reply['code']}"] += 1
        if pair.closed:
            self.done["closed"] += 1
            self._open.remove(pair)

    def finish(self) -> None:
        """Read every stream to the end of the workload."""
        for pair in list(self._open):
            while not pair.closed:
                reply = pair.get_more(maxTimeMS=_AWAIT_MS)
                if pair.closed or not batch_of(reply):
                    break
            if not pair.closed:
                pair.kill()


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3, 12, 13, 20))])
def test_random_clients_of_a_random_workload_get_the_servers_replies(sides: Sides, seed: int) -> None:
    workload = Workload(7000 + seed)
    clear(sides.wire, workload)
    start = note(sides.wire, "clients begin")
    clients = Clients(sides, workload, start.to_timestamp(), seed)
    done = Executed(start, start)
    for operation in workload.operations(amount(120, 220)):
        done.ends.append(run_operation(sides.wire, operation, done))
        if operation.number % 3 == 0:
            note(sides.wire, "committed up to here")
            for _ in range(5):
                clients.step()
    clients.finish()
    assert clients.done["replies"] > amount(50, 100), clients.done
    assert clients.events > amount(50, 100), clients.done
    assert clients.done["killed"] > 0, clients.done
    clear(sides.wire, workload)


def insert(sides: Sides, database: str, collection: str, *documents: Any) -> None:
    command = {"insert": collection, "documents": list(documents), "writeConcern": {"w": "majority"}}
    assert "writeErrors" not in sides.wire.run(database, command)


def opened(sides: Sides, database: str, collection: str, stage: Any, **cursor: Any) -> Pair:
    _, command = aggregate((database, collection), stage)
    pair = sides.open(database, {**command, "cursor": cursor})
    assert isinstance(pair, Pair), pair
    return pair


def test_a_first_batch_without_a_size_holds_101_events(sides: Sides) -> None:
    start = note(sides.wire, "begin").to_timestamp()
    insert(sides, "cur101", "c", *({"_id": number} for number in range(250)))
    pair = opened(sides, "cur101", "c", {"startAtOperationTime": start})
    assert len(pair.events) == 101
    pair.get_more()
    assert len(pair.events) == 250
    pair.kill()


@pytest.mark.parametrize("size", [None, 1, 2, 3, 4, 5, 6])
@pytest.mark.parametrize("pipeline", [(), ({"$match": {"operationType": "insert"}},)], ids=["all", "inserts only"])
def test_an_invalidation_closes_the_cursor_where_the_server_does(
    sides: Sides, size: int | None, pipeline: tuple[Any, ...]
) -> None:
    database = f"curinv{size}{len(pipeline)}"
    start = note(sides.wire, "begin").to_timestamp()
    insert(sides, database, "c", {"_id": 1}, {"_id": 2}, {"_id": 3})
    sides.wire.run(database, {"drop": "c", "writeConcern": {"w": "majority"}})
    insert(sides, database, "c", {"_id": 4})
    _, command = aggregate((database, "c"), {"startAtOperationTime": start}, pipeline=pipeline)
    sized: dict[str, Any] = {} if size is None else {"batchSize": size}
    pair = sides.open(database, {**command, "cursor": sized})
    assert isinstance(pair, Pair)
    for _ in range(8):
        if pair.closed:
            break
        pair.get_more(maxTimeMS=_AWAIT_MS, **sized)
    assert pair.closed
    assert len(pair.events) == (3 if pipeline else 5)


@pytest.mark.slow  # recorded replies of large events: tests/golden/test_cursor_replies.py
@pytest.mark.parametrize(
    "ids",
    [
        pytest.param((1, 2), id="short"),
        pytest.param(("x" * 60, 2), id="long first", marks=pytest.mark.slow),
        pytest.param((1, "x" * 60), id="long second", marks=pytest.mark.slow),
    ],
)
def test_the_16_mb_rule_is_the_servers_to_the_byte(sides: Sides, ids: tuple[Any, Any]) -> None:
    limit, first = 16 * 1024 * 1024, 8_000_000
    database = f"cursize{len(str(ids[0]))}x{len(str(ids[1]))}"
    # What two events and a reply add to the two payloads, by a look at a pair that certainly fits.
    around = _two_that_fit(sides, database, ids, first, 1_000_000)
    fitting = {"aggregate": 0, "getMore": 0}
    token = len(bson.encode(bson.decode(around.events[1])["_id"]))
    rest = sum(map(len, around.events)) - first - 1_000_000
    for number, room in enumerate((-1, 0, 55, 56, 57, 54 + token, 55 + token, 56 + token)):
        second = limit - first - rest - room
        start = note(sides.wire, "begin").to_timestamp()
        collection = f"c{number:03}"
        insert(sides, database, collection, {"_id": ids[0], "p": "x" * first})
        insert(sides, database, collection, {"_id": ids[1], "p": "x" * second})
        at_once = opened(sides, database, collection, {"startAtOperationTime": start})
        fitting["aggregate"] += len(at_once.events) == 2
        later = opened(sides, database, collection, {"startAtOperationTime": start}, batchSize=0)
        fitting["getMore"] += len(batch_of(later.get_more(maxTimeMS=_AWAIT_MS))) == 2
        for pair in (at_once, later):
            pair.get_more(maxTimeMS=_AWAIT_MS)
            assert len(pair.events) == 2
            pair.kill()
        sides.wire.run(database, {"drop": collection})
    assert fitting == {"aggregate": 5, "getMore": 2}


def _two_that_fit(sides: Sides, database: str, ids: tuple[Any, Any], first: int, second: int) -> Pair:
    start = note(sides.wire, "begin").to_timestamp()
    insert(sides, database, "room", {"_id": ids[0], "p": "x" * first})
    insert(sides, database, "room", {"_id": ids[1], "p": "x" * second})
    pair = opened(sides, database, "room", {"startAtOperationTime": start})
    pair.kill()
    return pair


def test_batches_of_large_events_are_cut_where_the_server_cuts_them(sides: Sides) -> None:
    rng = random.Random(16)
    start = note(sides.wire, "begin").to_timestamp()
    for number in range(24):
        insert(sides, "curlarge", "c", {"_id": number, "p": "x" * rng.choice((10, 900_000, 4_000_000, 9_000_000))})
    pair = opened(sides, "curlarge", "c", {"startAtOperationTime": start})
    replies = 1
    while len(pair.events) < 24:
        pair.get_more(maxTimeMS=_AWAIT_MS)
        replies += 1
    assert replies > 3
    pair.kill()


def test_a_wait_ends_with_the_first_event_and_moves_over_other_writes(sides: Sides) -> None:
    insert(sides, "curwait", "c", {"_id": 0})
    pair = opened(sides, "curwait", "c", {})
    started = bson.decode(pair.reply["cursor"]["postBatchResumeToken"].raw)
    insert(sides, "curwait", "other", {"_id": 0})
    moved = pair.get_more(maxTimeMS=_AWAIT_MS)
    assert bson.decode(moved["cursor"]["postBatchResumeToken"].raw) != started

    def write(seconds: float, collection: str, number: int) -> threading.Timer:
        timer = threading.Timer(seconds, lambda: _insert_apart(sides, collection, number))
        timer.start()
        return timer

    # The side that is asked first waits for the write; the other one then finds it there.
    for number, ours_first in enumerate((False, True), start=1):
        timer = write(0.2, "c", number)
        pair.get_more(maxTimeMS=60_000, ours_first=ours_first)
        timer.join()
        assert len(pair.events) == number
        timer = write(0.1, "other", number)
        assert batch_of(pair.get_more(maxTimeMS=400, ours_first=ours_first)) == []
        timer.join()
    pair.kill()


def _insert_apart(sides: Sides, collection: str, number: int) -> None:
    with Wire.to(sides.uri) as wire:
        wire.run("curwait", {"insert": collection, "documents": [{"_id": number}], "writeConcern": {"w": "majority"}})


#: Values of each type, whose text messages contain. No test had others than an int, null and a string.
SHOWN: dict[str, Any] = {
    "NaN": float("nan"),
    "infinite": float("-inf"),
    "third": 1 / 3,
    "whole double": 1.0,
    "large double": 1e16,
    "small double": 1e-5,
    "long double": 123456789.125,
    "long": Int64(2**40),
    "decimal": bson.Decimal128("1.50"),
    "bool": True,
    "id": bson.ObjectId("0" * 24),
    "date": DatetimeMS(1577934245678),
    "date of year 0": DatetimeMS(-62135596800001),
    "date of year 9999": DatetimeMS(253402300799999),
    "date beyond": DatetimeMS(2**60),
    "timestamp": bson.Timestamp(5, 6),
    "pattern": bson.Regex("a/b", "im"),
    "code": bson.Code("x"),
    "code with scope": bson.Code("x", {"a": 1}),
    "least": bson.MinKey(),
    "greatest": bson.MaxKey(),
    "binary": bson.Binary(b"abc", 0),
    "long binary": bson.Binary(bytes(100), 0),
    "UUID": bson.Binary(bytes(16), 4),
    "array": [1, "x", [], {}, {"a": [None]}],
    "long string": "x" * 170,
}
BAD_AGGREGATES: dict[str, dict[str, Any]] = {
    "no cursor": {"cursor": ...},
    "cursor int": {"cursor": 5},
    "cursor null": {"cursor": None},
    "singleBatch": {"cursor": {"singleBatch": True}},
    "batchSize negative": {"cursor": {"batchSize": -1}},
    "batchSize string": {"cursor": {"batchSize": "x"}},
    "unknown field": {"foo": 1},
    "explain int": {"explain": 1},
    "pipeline int": {"pipeline": 5},
    "pipeline missing": {"pipeline": ...},
    "stage int": {"pipeline": [5]},
    "stage empty": {"pipeline": [{"$changeStream": {}}, {}]},
    "stage of two": {"pipeline": [{"$changeStream": {}, "$match": {}}]},
    "stream int": {"pipeline": [{"$changeStream": 1}]},
    "stream null": {"pipeline": [{"$changeStream": None}]},
    "stream string": {"pipeline": [{"$changeStream": "abc"}]},
    "stream twice": {"pipeline": [{"$changeStream": {}}, {"$changeStream": {}}]},
    "stream second": {"pipeline": [{"$match": {}}, {"$changeStream": {}}]},
    # Places are looked at after every stage has been parsed. No test had two mistakes in one command.
    "stream second, no object": {"pipeline": [{"$match": {}}, {"$changeStream": 1}]},
    "stream second, unknown option": {"pipeline": [{"$match": {}}, {"$changeStream": {"foo": 1}}]},
    "stream twice, unknown option": {"pipeline": [{"$changeStream": {}}, {"$changeStream": {"foo": 1}}]},
    "stream twice, both wrong": {"pipeline": [{"$changeStream": {"fullDocument": 1}}, {"$changeStream": {"foo": 1}}]},
    "stream twice, type": {"pipeline": [{"$changeStream": {}}, {"$changeStream": {"resumeAfter": 1}}]},
    "stream twice, token": {"pipeline": [{"$changeStream": {}}, {"$changeStream": {"resumeAfter": {"_data": "zz"}}}]},
    "stream twice, scope": {"pipeline": [{"$changeStream": {}}, {"$changeStream": {"allChangesForCluster": True}}]},
    "unknown option": {"pipeline": [{"$changeStream": {"foo": 1}}]},
    "unknown stage": {"pipeline": [{"$changeStream": {}}, {"$foo": 1}]},
    "collection 2": {"aggregate": 2},
    "collection empty": {"aggregate": ""},
    "collection bool": {"aggregate": True},
    "collection null": {"aggregate": None},
    "collection NUL": {"aggregate": "c\0d"},
    "read concern local": {"readConcern": {"level": "local"}},
    "read concern snapshot": {"readConcern": {"level": "snapshot"}},
    "read concern unknown": {"readConcern": {"level": "zz"}},
    "read concern int": {"readConcern": 5},
    "collation int": {"collation": 4},
    "collation of no language": {"collation": {"locale": "xx"}},
    "collation and an unknown option": {"collation": {"locale": "xx"}, "pipeline": [{"$changeStream": {"foo": 1}}]},
    "collation and an unknown operator": {
        "collation": {"locale": "en", "strength": 7},
        "pipeline": [{"$changeStream": {}}, {"$match": {"a": {"$foo": 1}}}],
    },
    "let int": {"let": 1},
    "maxTimeMS negative": {"maxTimeMS": -1},
    "maxTimeMS string": {"maxTimeMS": "x"},
    "maxTimeMS null": {"maxTimeMS": None},
    "v2 int": {"$_generateV2ResumeTokens": 1},
    "needsMerge int": {"needsMerge": 1, "fromMongos": True},
    "needsMerge alone": {"needsMerge": True},
    "allowDiskUse string": {"allowDiskUse": "x"},
    **{f"stream {name}": {"pipeline": [{"$changeStream": value}]} for name, value in SHOWN.items()},
    **{
        f"token {name}": {"pipeline": [{"$changeStream": {"resumeAfter": {"_data": value}}}]}
        for name, value in SHOWN.items()
        if not isinstance(value, str) or isinstance(value, bson.Code)
    },
    "two fields": {"maxTimeMS": -1, "foo": 1},
    "two fields, the other way round": {"foo": 1, "maxTimeMS": -1},
    "hint int": {"hint": 5},
    "batchSize bool": {"cursor": {"batchSize": True}},
    "a view": {"aggregate": "view"},
    "a time series": {"aggregate": "series"},
    "a view and an unknown option": {"aggregate": "view", "pipeline": [{"$changeStream": {"foo": 1}}]},
}
GOOD_AGGREGATES: dict[str, dict[str, Any]] = {
    "batchSize double": {"cursor": {"batchSize": 1.9}},
    "batchSize decimal": {"cursor": {"batchSize": bson.Decimal128("2.5")}},
    "batchSize NaN": {"cursor": {"batchSize": float("nan")}},
    "batchSize null": {"cursor": {"batchSize": None}},
    "batchSize huge": {"cursor": {"batchSize": Int64(2**62)}},
    "database as double": {"aggregate": 1.0},
    "read concern empty": {"readConcern": {}},
    "simple collation": {"collation": {"locale": "simple"}},
    "empty collation": {"collation": {}},
    "let": {"let": {"x": 1}},
    "comment": {"comment": {"a": 1}},
    "hint": {"hint": {"_id": 1}},
    "API version": {"apiVersion": "1", "apiStrict": True},
    "let in a match": {
        "let": {"x": "insert"},
        "pipeline": [{"$changeStream": {}}, {"$match": {"$expr": {"$eq": ["$operationType", "$$x"]}}}],
    },
}


def has_series(sides: Sides) -> bool:
    return sides.registry.profile.series >= (5, 0)


@pytest.mark.parametrize("case", [*BAD_AGGREGATES, *GOOD_AGGREGATES])
def test_an_aggregate_is_taken_or_refused_as_the_server_does(sides: Sides, case: str) -> None:
    kinds: dict[str, dict[str, Any]] = {"view": {"viewOn": "c", "pipeline": []}}
    if has_series(sides):
        kinds["series"] = {"timeseries": {"timeField": "t"}}
    for name, options in kinds.items():
        if not sides.wire.run("curagg", {"listCollections": 1, "filter": {"name": name}})["cursor"]["firstBatch"]:
            sides.wire.run("curagg", {"create": name, **options})
    note(sides.wire, "committed up to here")
    if case in ("token date beyond", "collation and an unknown operator") and not has_series(sides):
        pytest.skip("4.4 has words of its own for it (docs/reference/differences.md)")
    changes = BAD_AGGREGATES.get(case) or GOOD_AGGREGATES[case]
    whole = {"aggregate": "c", "pipeline": [{"$changeStream": {}}], "cursor": {}, **changes}
    command = {name: value for name, value in whole.items() if value is not ...}
    result = sides.open("curagg", command)
    if has_series(sides):  # 4.4 knows fewer fields
        assert isinstance(result, Pair) == (case in GOOD_AGGREGATES), result
    if isinstance(result, Pair):
        result.kill()


GET_MORES: dict[str, dict[str, Any]] = {
    "other collection": {"collection": "o"},
    "no collection": {"collection": None},
    "collection int": {"collection": 1},
    "collection empty": {"collection": ""},
    "batchSize negative": {"batchSize": -1},
    "batchSize string": {"batchSize": "x"},
    "maxTimeMS negative": {"maxTimeMS": -1},
    "maxTimeMS string": {"maxTimeMS": "x"},
    "maxTimeMS fraction": {"maxTimeMS": 1.5},
    "maxTimeMS huge": {"maxTimeMS": Int64(2**40)},
    "maxTimeMS null": {"maxTimeMS": None},
    "batchSize double": {"maxTimeMS": 1.0, "batchSize": 1.7},
    "unknown field": {"foo": 1},
    "comment and term": {"comment": 1, "term": Int64(1), "maxTimeMS": 0},
}


@pytest.mark.parametrize("whole_database", [False, True], ids=["collection", "database"])
def test_a_get_more_is_taken_or_refused_as_the_server_does(sides: Sides, whole_database: bool) -> None:
    _, command = aggregate(("curget", None if whole_database else "c"), {})
    pair = sides.open("curget", command)
    assert isinstance(pair, Pair)
    for case, fields in GET_MORES.items():
        reply = pair.get_more(**fields)
        assert (reply["ok"] == 1) == (case in ("batchSize double", "comment and term")), case
    for odd in (None, "x", -1, 1.5, float("nan"), float("inf"), Int64(2**62), bson.Decimal128("-1"), True, {}, []):
        for name in ("batchSize", "maxTimeMS", "term", "batchsize"):
            pair.get_more(**{"maxTimeMS": 0, name: odd})
    assert pair.get_more(maxTimeMS=0)["ok"] == 1  # a refused getMore does no harm to the cursor
    pair.kill()
    pair.kill()
    assert pair.get_more()["code"] == 43
    for cursor_id in (5, 5.0, "x", None, Int64(0), Int64(-7)):
        sides.both("curget", *[{"getMore": cursor_id, "collection": "c"}] * 2)


def test_kill_cursors_is_answered_as_the_server_does(sides: Sides) -> None:
    for cursors in ([], [Int64(77)], ["x"], [5], 5, None, [None], [Int64(77), 1.5], {}):
        sides.both("curkill", *[{"killCursors": "c", "cursors": cursors}] * 2)
    for command in ({"killCursors": "c"}, {"killCursors": 1, "cursors": []}, {"killCursors": "c", "x": 1}):
        sides.both("curkill", *[command] * 2)
    pair = opened(sides, "curkill", "c", {})
    pair.collection = "other"
    assert list(pair.kill()["cursorsKilled"]) == [pair.ids[0]]


def _opened_at_the_newest_entry(both: Sides, source: MongodSource) -> tuple[ClusterTime, Pair, Pair]:
    """A cursor that has read nothing and one that has read a no-op of ours, which was the newest entry all the while.

    A server that has just started may write something of its own between: the two sides then see different ends of the
    oplog, or the second cursor stands at an entry that is gone later than ours. Such cursors are opened again.
    """
    for _ in range(50):
        start = note(both.wire, "soon gone")
        stage = {"startAtOperationTime": start.to_timestamp()}
        try:
            pairs = opened(both, "curgone", "c", stage, batchSize=0), opened(both, "curgone", "c", stage)
        except DifferentError:
            if source.newest() == start:
                raise
            continue
        if source.newest() == start:
            return start, *pairs
    raise AssertionError("the server never ceased to write entries of its own")


def test_history_that_is_gone_ends_cursors_as_on_the_server(start_replica_set: Any) -> None:
    deployment = start_replica_set(1, parameters=QUIET, oplog_size_mb=8, arguments=("--syncdelay", "1"))
    source = MongodSource(deployment.uri)
    with Wire.to(deployment.uri) as wire:
        both = Sides(deployment.uri, wire, source)
        start, unread, read = _opened_at_the_newest_entry(both, source)
        stage = {"startAtOperationTime": start.to_timestamp()}
        for _ in range(600):
            insert(both, "curother", "c", {"p": "x" * 1_000_000})
            if source.oldest()[0] > start:
                break
            time.sleep(0.1)
        assert source.oldest()[0] > start
        assert unread.get_more(maxTimeMS=_AWAIT_MS)["code"] == 286
        assert read.get_more(maxTimeMS=_AWAIT_MS)["code"] == 136
        _, command = aggregate(("curgone", "c"), stage)
        refused = both.open("curgone", command)
        assert isinstance(refused, RawBSONDocument)
        assert refused["code"] == 286
        late = opened(both, "curgone", "c", stage, batchSize=0)
        assert late.get_more(maxTimeMS=_AWAIT_MS)["code"] == 286
    source.close()
