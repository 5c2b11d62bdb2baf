"""The cursor with a clock that the test moves: waits, kills, idle cursors, the results of a failing driver."""

from __future__ import annotations

from typing import Any

import bson
import pytest
from bson.int64 import Int64
from bson.raw_bson import RawBSONDocument
from bson.timestamp import Timestamp

from tailrace.core.cursor import (
    CursorRegistry,
    NeedOldest,
    OldestEntry,
    OplogRead,
    Position,
    ReadOplog,
    is_change_stream,
)
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.plan.request import OplogBatch
from tailrace.core.stream.stream import ONE_OPLOG
from tailrace.errors import ChangeStreamHistoryLost, InternalError, SourceError
from tests.golden.cursors import Cursors, MemorySource, batch_of, counting_ids
from tests.golden.replay import MemoryOplog

pytestmark = pytest.mark.usefixtures("kernel_on_and_off")

_UUID = bson.Binary(bytes(range(16)), 4)


def entry(seconds: int, collection: str = "c", increment: int = 1) -> bytes:
    """An insert of ``{_id: seconds}`` at that time."""
    document = {"_id": seconds}
    return bson.encode(
        {
            "op": "i",
            "ns": f"d.{collection}",
            "ui": _UUID,
            "o": document,
            "o2": document,
            "ts": Timestamp(seconds, increment),
            "t": Int64(1),
            "v": Int64(2),
            "wall": bson.datetime_ms.DatetimeMS(seconds * 1000),
        }
    )


def cursors(*entries: bytes, written: int) -> Cursors:
    """Cursors over entries of which only those up to the second ``written`` exist so far."""
    source = MemorySource(MemoryOplog(entries, (), lambda lookups: [None for _ in lookups]))
    source.written = source.operation_time = ClusterTime.of(written, 1)
    return Cursors(source)


def opened(at: Cursors, stage: dict[str, Any] | None = None, **cursor: Any) -> RawBSONDocument:
    pipeline = [{"$changeStream": stage or {}}]
    return at.aggregate("d", {"aggregate": "c", "pipeline": pipeline, "cursor": cursor})


def test_an_empty_get_more_waits_a_second_from_when_it_came() -> None:
    at = cursors(entry(1), written=1)
    reply = opened(at)
    at.source.now_ms = 5_000
    assert batch_of(at.get_more(reply)) == []
    assert at.source.waits == [6_000]


def test_an_empty_get_more_waits_as_long_as_it_says() -> None:
    at = cursors(entry(1), written=1)
    reply = opened(at)
    at.source.now_ms = 70
    at.get_more(reply, maxTimeMS=300)
    at.get_more(reply, maxTimeMS=0)
    assert at.source.waits == [370]


def test_a_matching_event_ends_the_wait() -> None:
    at = cursors(entry(1), entry(2), written=1)
    reply = opened(at)

    def write() -> None:
        at.source.now_ms = 40
        at.source.written = ClusterTime.of(2, 1)

    at.source.while_waiting = write
    more = at.get_more(reply, maxTimeMS=1000)
    assert len(batch_of(more)) == 1
    assert at.source.now_ms == 40
    assert at.source.waits == [1000]


def test_unrelated_writes_move_the_token_and_do_not_end_the_wait() -> None:
    at = cursors(entry(1), entry(2, "other"), written=1)
    reply = opened(at)

    def write() -> None:
        at.source.now_ms = 40
        at.source.written = ClusterTime.of(2, 1)

    at.source.while_waiting = write
    more = at.get_more(reply, maxTimeMS=1000)
    assert batch_of(more) == []
    assert at.source.now_ms == 1000
    assert at.source.waits == [1000, 1000]
    assert reply["cursor"]["postBatchResumeToken"]["_data"][2:18] == f"{1:08X}{2:08X}"
    assert more["cursor"]["postBatchResumeToken"]["_data"][2:18] == f"{2:08X}{1:08X}"


def test_an_aggregate_does_not_wait_and_its_time_limit_bounds_no_get_more() -> None:
    at = cursors(entry(1), written=1)
    command = {"aggregate": "c", "pipeline": [{"$changeStream": {}}], "cursor": {}, "maxTimeMS": 10}
    reply = at.aggregate("d", command)
    assert at.source.waits == []
    at.get_more(reply, maxTimeMS=500)
    assert at.source.waits == [500]


def test_batch_size_0_of_an_aggregate_reads_nothing() -> None:
    at = cursors(entry(1), written=1)
    reply = opened(at, {"startAtOperationTime": Timestamp(1, 1)}, batchSize=0)
    assert at.source.reads == 0
    assert batch_of(reply) == []
    assert len(batch_of(at.get_more(reply, batchSize=0))) == 1


def test_a_cursor_in_use_is_refused_and_one_killed_meanwhile_is_interrupted() -> None:
    at = cursors(entry(1), written=1)
    reply = opened(at)
    cursor_id = reply["cursor"]["id"]
    command = bson.encode({"getMore": Int64(cursor_id), "collection": "c"})
    waiting = at.registry.run("d", command, 0)
    action = next(waiting)
    assert isinstance(action, ReadOplog)
    assert action.positions == (Position(ONE_OPLOG, ClusterTime.of(1, 1)),)
    assert action.deadline_ms == 1000
    assert at.get_more(reply)["errmsg"] == f"cursor id {cursor_id} is already in use"
    kill = bson.encode({"killCursors": "c", "cursors": [Int64(cursor_id)]})
    assert list(RawBSONDocument(_finish(at.registry.run("d", kill, 0)))["cursorsKilled"]) == [cursor_id]
    with pytest.raises(StopIteration) as end:
        waiting.send(OplogRead(OplogBatch(b"", ClusterTime.of(1, 1)), True, 1))
    interrupted = bson.decode(end.value.value)
    assert (interrupted["code"], interrupted["codeName"]) == (237, "CursorKilled")
    assert interrupted["errmsg"] == "Executor error during getMore :: caused by :: operation was interrupted"
    assert at.get_more(reply)["code"] == 43


def _finish(acting: Any) -> bytes:
    with pytest.raises(StopIteration) as end:
        next(acting)
    reply: bytes = end.value.value
    return reply


def test_a_cursor_nobody_asks_for_is_closed_after_its_time() -> None:
    at = cursors(entry(1), written=1)
    opened(at)
    at.source.now_ms = 500_000
    kept = opened(at)
    assert at.registry.expire(599_999) == 0
    assert at.registry.expire(600_000) == 1
    assert len(at.registry) == 1
    assert at.get_more(kept, maxTimeMS=0)["ok"] == 1


def test_an_id_in_use_is_not_given_twice() -> None:
    source = cursors(entry(1), written=1).source
    at = Cursors(source)
    at.registry = CursorRegistry(iter([7, 7, 8]))
    assert [opened(at)["cursor"]["id"] for _ in range(2)] == [7, 8]


def test_a_start_before_the_oplog_is_lost_history_when_it_is_first_read() -> None:
    at = cursors(entry(5), written=5)
    at.source.oldest = OldestEntry(ClusterTime.of(5, 1), history_complete=False)
    stage = {"startAtOperationTime": Timestamp(3, 1)}
    reply = bson.decode(opened(at, stage).raw)
    assert (reply["code"], reply["errorLabels"]) == (286, ["NonResumableChangeStreamError"])
    assert reply["errmsg"].startswith("PlanExecutor error during aggregation :: caused by :: Resume of change stream")
    unread = opened(at, stage, batchSize=0)
    assert unread["ok"] == 1
    failed = at.get_more(unread)
    assert failed["code"] == 286
    assert failed["errmsg"].startswith("Executor error during getMore :: caused by :: Resume of change stream")
    assert len(at.registry) == 0
    assert opened(at, {"startAtOperationTime": Timestamp(5, 1)})["ok"] == 1


class _Failing(MemorySource):
    """Answers so many reads and then raises."""

    def __init__(self, source: MemorySource, reads: int, error: Exception) -> None:
        super().__init__(source.oplog)
        self.written = source.written
        self.left, self.error = reads, error

    def fails(self, action: object) -> bool:
        self.left -= isinstance(action, ReadOplog)
        return self.left < 0


def _answered_until_failure(at: Cursors, source: _Failing, command: Any) -> RawBSONDocument:
    acting = at.registry.run("d", bson.encode(command), 0)
    action = next(acting)
    try:
        while True:
            action = acting.throw(source.error) if source.fails(action) else acting.send(source(action))
    except StopIteration as end:
        return RawBSONDocument(end.value)


@pytest.mark.parametrize(
    ("error", "code", "label"),
    [
        (SourceError("the deployment cannot be reached"), 6, "ResumableChangeStreamError"),
        (SourceError("no right to read", code=13), 13, None),
        (ChangeStreamHistoryLost("gone"), 136, None),
    ],
    ids=["unreachable", "not permitted", "overtaken by truncation"],
)
def test_what_a_source_fails_with_ends_the_cursor_as_the_server_would(
    error: Exception, code: int, label: str | None
) -> None:
    at = cursors(entry(1), written=1)
    reply = opened(at)
    source = _Failing(at.source, 0, error)
    command = {"getMore": Int64(reply["cursor"]["id"]), "collection": "c"}
    failed = _answered_until_failure(at, source, command)
    assert failed["code"] == code
    assert list(failed.get("errorLabels", ())) == ([label] if label else [])
    assert failed["errmsg"].startswith("Executor error during getMore :: caused by :: ")
    if code == 136:
        assert failed["errmsg"].endswith(f"Last seen record id: RecordId({int(ClusterTime.of(1, 1))})")
    assert at.get_more(reply)["code"] == 43


def test_history_gone_at_the_first_read_is_lost_history() -> None:
    at = cursors(entry(1), written=1)
    source = _Failing(at.source, 0, ChangeStreamHistoryLost("gone"))
    command = {"aggregate": "c", "pipeline": [{"$changeStream": {}}], "cursor": {}}
    assert _answered_until_failure(at, source, command)["code"] == 286


def test_an_abandoned_get_more_closes_its_cursor_since_its_events_are_lost() -> None:
    at = cursors(entry(1), written=1)
    reply = opened(at)
    acting = at.registry.run("d", bson.encode({"getMore": Int64(reply["cursor"]["id"]), "collection": "c"}), 0)
    next(acting)
    acting.close()
    assert len(at.registry) == 0


def test_an_internal_error_comes_out_and_ends_the_cursor() -> None:
    at = cursors(entry(1), written=1)
    reply = opened(at)
    acting = at.registry.run("d", bson.encode({"getMore": Int64(reply["cursor"]["id"]), "collection": "c"}), 0)
    next(acting)
    with pytest.raises(InternalError):
        acting.throw(InternalError("a state that cannot be"))
    assert len(at.registry) == 0


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"collation": {"locale": "zh@collation=big5han"}}, 115),
        ({"explain": True}, 115),
        ({"exchange": {"policy": "broadcast"}}, 115),
        ({"pipeline": [{"$match": {}}]}, 115),
        ({"autocommit": False, "txnNumber": Int64(1)}, 263),
    ],
)
def test_what_is_not_carried_out_here_is_refused_by_code(change: dict[str, Any], code: int) -> None:
    at = cursors(entry(1), written=1)
    command = {"aggregate": "c", "pipeline": [{"$changeStream": {}}], "cursor": {}, **change}
    assert at.aggregate("d", command)["code"] == code
    assert RawBSONDocument(at.run("d", {"ping": 1}))["codeName"] == "CommandNotFound"


def test_a_change_stream_is_known_by_its_stage() -> None:
    def asks(*pipeline: Any) -> bool:
        return is_change_stream(bson.encode({"aggregate": "c", "pipeline": list(pipeline)}))

    assert asks({"$changeStream": {}})
    assert asks({"$match": {}}, {"$changeStream": {}})
    assert not asks({"$match": {"$changeStream": 1}})
    assert not asks(5)
    assert not is_change_stream(bson.encode({"aggregate": "c"}))


def test_a_long_token_is_cut_in_the_message_about_a_changed_identifier_as_the_server_cuts_it() -> None:
    at = cursors(entry(1), written=1)
    stages = [{"$changeStream": {"startAtOperationTime": Timestamp(1, 1)}}, {"$set": {"_id": "x" * 200}}]
    command = {"aggregate": "c", "pipeline": stages, "cursor": {}, "$_generateV2ResumeTokens": True}
    message = at.aggregate("d", command)["errmsg"]
    expected, found = message.split("Expected: ")[1].split(" but found: ")
    assert found == '{ _id: "' + "x" * 150 + '..." }'
    assert expected.endswith('..." } }')
    assert len(expected) == len('{ _id: { _data: "..." } }') + 150


def test_the_history_is_asked_for_once_and_only_for_a_start_of_the_callers() -> None:
    asked: list[object] = []

    class Listening(MemorySource):
        def __call__(self, action: Any) -> Any:
            asked.append(action)
            return super().__call__(action)

    plain = cursors(entry(1), entry(2), written=2).source
    at = Cursors(Listening(plain.oplog))
    at.source.operation_time = ClusterTime.of(2, 1)
    at.get_more(opened(at), maxTimeMS=0)
    assert NeedOldest() not in asked
    reply = opened(at, {"startAtOperationTime": Timestamp(1, 1)}, batchSize=1)
    at.get_more(reply)
    assert asked.count(NeedOldest()) == 1
    assert next(counting_ids()) == 1
