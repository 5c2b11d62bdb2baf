"""What a comparison does where streams end, fail, hang or are far apart: with streams that are scripts."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import bson
import pytest
from bson.raw_bson import RawBSONDocument
from pymongo.errors import AutoReconnect

from tailrace.core.event.resume_token import encode_high_water_mark
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.oplog.namespace import Scope
from tailrace.errors import ChangeStreamHistoryLost, ServerError, SourceError, TailraceError
from tailrace.read.source.driver_error import as_driver_error
from tailrace.watch.client.statistics import StreamStatistics
from tailrace.watch.compare import comparison as comparison_module
from tailrace.watch.compare.comparison import Compared, ComparisonLimits, FoundDifference, StreamComparison
from tailrace.watch.compare.mask import Mask
from tailrace.watch.compare.reading import ReadingPace, SideReader
from tailrace.watch.compare.report import report_of
from tests.compare.test_pairing import EVENTS, event
from tests.patience import PATIENCE_S

END = ClusterTime.of(1500, 1)
_AFTER = bson.decode(encode_high_water_mark(ClusterTime.of(1500, 2)))
_BEFORE = bson.decode(encode_high_water_mark(ClusterTime.of(1000, 0)))


class ScriptedStream:
    """Gives its items one after the other: events, or errors that end it; then nothing, or its end."""

    def __init__(self, items: Sequence[bytes | TailraceError], *, closes: bool = False, hangs: bool = False) -> None:
        self._items = list(items)
        self._closes, self._hangs = closes, hangs
        self.alive, self.has_next = True, False
        self.statistics = StreamStatistics(unknown_operations={"z": 1})
        self.closed = threading.Event()

    def try_next(self) -> Any:
        if self._items:
            item = self._items.pop(0)
            if isinstance(item, TailraceError):
                self.alive = False
                raise item
            return RawBSONDocument(item)
        if self._closes:
            self.alive = False
        self.closed.wait(0.01)
        return None

    @property
    def resume_token(self) -> Any:
        return _BEFORE if self._items or self._hangs else _AFTER

    def close(self) -> None:
        self.alive = False
        self.closed.set()


class Scripts:
    """Opens one script after the other, and then the last one again and again. Notes where each began."""

    def __init__(self, *streams: Mapping[str, Any] | TailraceError) -> None:
        self._streams = list(streams)
        self.starts: list[Mapping[str, Any]] = []

    def __call__(self, start: Mapping[str, Any]) -> ScriptedStream:
        self.starts.append(start)
        script = self._streams.pop(0) if len(self._streams) > 1 else self._streams[0]
        if isinstance(script, TailraceError):
            raise script
        return ScriptedStream(**script)


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison_module, "_LOOK_S", 0.01)
    monkeypatch.setattr(comparison_module, "_FRUITLESS_S", 0.0)


def compared(server: Scripts, ours: Scripts, *, resume_every_s: float | None = None, **limits: Any) -> Compared:
    limits = {"duration_s": 0.1, "patience_s": 0.1, **limits}
    return StreamComparison(
        server, ours, lambda: END, ComparisonLimits(resume_every_s=resume_every_s, **limits), seed=1
    ).run()


def kinds(found: Compared) -> list[tuple[str, str]]:
    return [(one.difference.kind, one.difference.place) for one in found.differences]


QUIET: dict[str, Any] = {"items": ()}


def test_streams_that_are_equal_and_quiet_are_compared_to_the_end() -> None:
    found = compared(Scripts({"items": EVENTS}), Scripts({"items": EVENTS}))
    assert (found.events, found.total, found.left, found.gaps) == (6, 0, 0, {})
    assert found.unknown_operations == {"z": 1}


def test_an_error_of_one_side_alone_is_a_difference_and_both_begin_anew() -> None:
    error = ServerError("the text may hold a value of a document", code=10334)
    server, ours = Scripts({"items": EVENTS}, QUIET), Scripts({"items": [*EVENTS[:3], error]}, QUIET)
    found = compared(server, ours, duration_s=0.5)
    assert ("error", "-/10334") in kinds(found)
    assert all("value" not in one.difference.text for one in found.differences)
    assert found.gaps == {"only one stream ended": 1}
    assert len(server.starts) == len(ours.starts) == 2


@pytest.mark.parametrize(
    "error",
    [
        ServerError("not primary", code=10107),
        as_driver_error(SourceError("cannot reach 127.0.0.1:1"), AutoReconnect),
    ],
)
def test_an_outage_that_one_side_alone_has_met_is_no_difference(error: TailraceError) -> None:
    """The other one was opened a moment later, when there was a primary again."""
    found = compared(Scripts({"items": EVENTS}, QUIET), Scripts({"items": [*EVENTS[:3], error]}, QUIET), duration_s=0.5)
    assert kinds(found) == []
    assert found.gaps == {"a member could not be reached, or there was an election": 1}


def test_an_outage_that_one_side_has_met_earlier_than_the_other_leaves_no_event_missing() -> None:
    error = ServerError("not primary", code=10107)
    server, ours = Scripts({"items": [*EVENTS[:4], error]}, QUIET), Scripts({"items": [*EVENTS[:2], error]}, QUIET)
    found = compared(server, ours, duration_s=0.5)
    assert (found.events, found.total, found.left) == (2, 0, 2)
    assert found.gaps == {"a member could not be reached, or there was an election": 1}


def test_after_a_restore_events_count_again_although_their_times_are_earlier() -> None:
    times = iter([END, END, ClusterTime.of(900, 1), END])
    earlier = [event(number, time=number - 50) for number in range(10, 16)]
    script = Scripts({"items": EVENTS}, {"items": earlier})
    running = StreamComparison(
        script, Scripts({"items": EVENTS}, {"items": earlier}), lambda: next(times),
        ComparisonLimits(duration_s=0.1, resume_every_s=None, patience_s=1),
    )  # fmt: skip
    assert running.run().events == 6
    assert running.run().events == 12


def test_an_end_of_one_side_alone_is_a_difference() -> None:
    invalidate = event(9, operation="invalidate")
    closing = {"items": [*EVENTS, invalidate], "closes": True}
    found = compared(Scripts(closing, QUIET), Scripts({"items": [*EVENTS, invalidate]}, QUIET), duration_s=0.5)
    assert kinds(found) == [("end", "server")]


def test_where_both_are_invalidated_both_go_on_after_it() -> None:
    invalidate = event(9, operation="invalidate")
    closing = {"items": [*EVENTS, invalidate], "closes": True}
    server, ours = Scripts(closing, QUIET), Scripts(closing, QUIET)
    found = compared(server, ours, duration_s=0.3)
    assert (found.events, found.total, found.gaps) == (7, 0, {})
    assert server.starts[1] == ours.starts[1] == {"start_after": bson.decode(invalidate)["_id"]}


def test_where_both_end_in_one_error_both_begin_anew_and_it_is_told() -> None:
    error = ServerError("too large", code=10334)
    failing = {"items": [*EVENTS, error]}
    found = compared(Scripts(failing, QUIET), Scripts(failing, QUIET), duration_s=0.3)
    assert (found.events, found.total) == (6, 0)
    assert found.gaps == {"both streams ended with error 10334": 1}


def test_what_a_failing_reply_of_the_server_hides_is_asked_for_again() -> None:
    """Found by the random workload: the server gave nothing of the batch that its error was in, and ours was blamed."""
    error = ServerError("too large", code=10334)
    server = Scripts({"items": [*EVENTS[:2], error]}, {"items": [*EVENTS[2:], error]}, QUIET)
    ours = Scripts({"items": [*EVENTS, error]}, {"items": [*EVENTS[2:], error]}, QUIET)
    found = compared(server, ours, duration_s=0.3)
    assert (found.events, found.total) == (6, 0)
    assert server.starts[1]["batch_size"] == 1
    assert server.starts[1]["resume_after"] == bson.decode(EVENTS[1])["_id"]


def test_the_last_event_before_a_failure_is_asked_for_until_a_reply_holds_it_alone() -> None:
    """A driver that is asked for one event at a time asks the server for two, except in the first reply. Only five
    comparisons side by side showed it: a leg must begin an odd number of events before the failure."""
    error = ServerError("too large", code=10334)
    server = Scripts({"items": [error]}, {"items": [*EVENTS[:5], error]}, {"items": [EVENTS[5], error]}, QUIET)
    ours = Scripts(*({"items": [*EVENTS[first:], error]} for first in (0, 0, 5)), QUIET)
    found = compared(server, ours, duration_s=0.5)
    assert (found.events, found.total) == (6, 0)
    assert [start.get("batch_size") for start in server.starts] == [None, 1, 1, None]
    assert server.starts[2]["resume_after"] == bson.decode(EVENTS[4])["_id"]


def test_an_event_before_a_failure_that_only_ours_gives_is_a_difference() -> None:
    error = ServerError("too large", code=10334)
    server = Scripts({"items": [error]}, {"items": [*EVENTS[:5], error]}, {"items": [error]}, QUIET)
    ours = Scripts(*({"items": [*EVENTS[first:], error]} for first in (0, 0, 5)), QUIET)
    found = compared(server, ours, duration_s=0.5)
    assert (found.events, kinds(found)) == (5, [("extra", "")])


def test_what_a_stream_had_at_hand_before_it_failed_is_compared() -> None:
    """What was read together with a failure was dropped. No script had held more than one event at a time."""
    error = ServerError("too large", code=10334)

    class AtHand(Scripts):
        def __call__(self, start: Mapping[str, Any]) -> ScriptedStream:
            stream = super().__call__(start)
            stream.has_next = True
            return stream

    failing = {"items": [*EVENTS, error]}
    found = compared(Scripts(failing, QUIET), AtHand(failing, QUIET), duration_s=0.3)
    assert (found.events, found.total) == (6, 0)


def test_a_first_reply_that_fails_at_an_event_is_no_refusal() -> None:
    """A comparison that began at a time in the past ended in the server's error, since its first reply holds events."""
    error = ServerError("too large", code=10334)
    server = Scripts(error, {"items": [*EVENTS, error]}, QUIET)
    ours = Scripts({"items": [*EVENTS, error]}, {"items": [*EVENTS, error]}, QUIET)
    found = compared(server, ours, duration_s=0.5)
    assert (found.events, found.total) == (6, 0)
    with pytest.raises(ServerError, match="unknown option"):
        compared(Scripts(ServerError("unknown option", code=40415)), Scripts(QUIET))


def test_an_oplog_that_has_moved_on_is_no_difference() -> None:
    lost = {"items": [*EVENTS[:2], ChangeStreamHistoryLost("gone")]}
    found = compared(Scripts({"items": EVENTS}, QUIET), Scripts(lost, QUIET), duration_s=0.5)
    assert kinds(found) == []
    assert found.gaps == {"the oplog no longer reached back to where a stream was": 1}


def test_streams_that_end_as_soon_as_they_begin_are_an_error_in_the_end() -> None:
    failing = {"items": [ServerError("not master", code=10107)]}
    with pytest.raises(SourceError, match=r"as soon as they begin: both streams ended with error 10107"):
        compared(Scripts(failing), Scripts(failing), duration_s=60)


def test_a_stream_that_cannot_be_opened_to_begin_with_is_an_error() -> None:
    with pytest.raises(SourceError, match="may not read the oplog"):
        compared(Scripts(QUIET), Scripts(SourceError("this user may not read the oplog", code=13)))


def test_a_side_that_does_not_come_to_the_end_is_an_error_and_no_success() -> None:
    with pytest.raises(SourceError, match=r"could not be completed: ours did not reach"):
        compared(Scripts({"items": EVENTS}), Scripts({"items": EVENTS[:2], "hangs": True}))


def test_both_are_resumed_at_the_same_token_now_and_then() -> None:
    again = {"items": EVENTS[3:]}
    server, ours = Scripts({"items": EVENTS}, again), Scripts({"items": EVENTS}, again)
    found = compared(server, ours, resume_every_s=0.05, duration_s=0.6)
    assert found.resumes >= 2
    assert (found.events, found.total) == (6, 0)
    assert found.again >= 3
    assert server.starts == ours.starts
    places = {next(iter(start)) for start in server.starts}
    assert places >= {"resume_after", "start_at_operation_time"} or places >= {"start_after"}


def test_a_number_of_events_is_counted_once_each() -> None:
    found = compared(Scripts({"items": EVENTS}), Scripts({"items": EVENTS}), events=4, duration_s=None)
    assert (found.events, found.total) == (4, 0)


def test_what_one_side_has_of_the_future_waits_in_bounded_memory() -> None:
    """The quick side is held while the slow one is behind."""
    many = [event(number, text="x" * 500) for number in range(400)]
    most = 0

    class Watched(ScriptedStream):
        def try_next(self) -> Any:
            nonlocal most
            most = max(most, 400 - len(self._items) - found_so_far.events)
            return super().try_next()

    found_so_far = Compared.__new__(Compared)

    class Slow(ScriptedStream):
        def try_next(self) -> Any:
            self.closed.wait(0.001)
            return super().try_next()

    comparison = StreamComparison(
        lambda start: Watched(many),
        lambda start: Slow(many),
        lambda: END,
        ComparisonLimits(duration_s=0.5, resume_every_s=None, bytes_max=20_000, patience_s=20),
    )
    found_so_far = comparison.compared
    found = comparison.run()
    assert (found.events, found.total) == (400, 0)
    assert most < 200


def test_a_side_that_still_stands_where_it_was_resumed_has_promised_nothing() -> None:
    """Found by minutes of random writes: a resumed server that had not begun to read was believed to have no more of
    the transaction that it was resumed in the middle of."""
    whole = [event(number, time=5) for number in range(4)]

    class Sleepy(ScriptedStream):
        looks = 0

        def try_next(self) -> Any:
            self.looks += 1
            if self.looks >= 6:
                return super().try_next()
            self.closed.wait(0.03)
            return None

        @property
        def resume_token(self) -> Any:
            return bson.decode(whole[1])["_id"] if self.looks < 6 else super().resume_token

    running = StreamComparison(
        lambda start: Sleepy(whole[2:]),
        lambda start: ScriptedStream(whole[2:]),
        lambda: END,
        ComparisonLimits(duration_s=0.3, resume_every_s=None, patience_s=5),
        has_one_oplog=True,
    )
    found = running.run()
    assert (found.events, found.total) == (2, 0)


@pytest.mark.parametrize("code", [166, 175, 201])
def test_a_look_up_that_fails_at_one_moment_alone_is_no_difference(code: int) -> None:
    """Found by minutes of random writes. A name was a collection first and a view when one of the two looked; or it was
    a collection with another collation, under which a symbol has no key; or it was renamed while the server looked
    (175, from a 7.0.28 on a busy machine: runs on quiet ones had never seen it)."""
    view = ServerError("the document cannot be looked up", code=code)
    for server, ours in (([*EVENTS[:2], view], EVENTS), ([*EVENTS[:2], view], [*EVENTS[:4], view])):
        found = StreamComparison(
            Scripts({"items": server}, QUIET),
            Scripts({"items": ours}, QUIET),
            lambda: END,
            ComparisonLimits(duration_s=0.4, resume_every_s=None, patience_s=0.1),
            looks_up=True,
        ).run()
        assert found.total == 0
        assert [reason for reason in found.gaps if "looked up" in reason] or ours is not EVENTS


def test_a_look_up_that_fails_while_the_end_is_waited_for_is_a_gap_and_no_error() -> None:
    """An hour of honest writes ended in an error: our last look-up met a view, and the end was never reached."""
    view = ServerError("Namespace is a view, not a collection", code=166)

    class Late(ScriptedStream):
        def try_next(self) -> Any:
            if len(self._items) == 1:
                self.closed.wait(0.3)
            return super().try_next()

    running = StreamComparison(
        lambda start: ScriptedStream(EVENTS[:2], hangs=True),
        lambda start: Late([*EVENTS[:2], view]),
        lambda: END,
        ComparisonLimits(duration_s=0.05, resume_every_s=None, patience_s=0.6),
        looks_up=True,
    )
    found = running.run()
    assert (found.events, found.total) == (2, 0)
    assert [reason for reason in found.gaps if "looked up" in reason]


def test_what_the_pace_alone_has_kept_from_its_end_is_told_and_is_no_error() -> None:
    """With a limit below the rate of the writes every comparison ended in an error, and its result was lost."""
    many = {"items": [event(number) for number in range(300)], "hangs": True}
    found = compared(Scripts(many), Scripts(many), events_per_second=50, patience_s=0.4)
    assert found.total == 0
    assert 0 < found.events < 300
    assert found.behind_s > 0


def test_a_comparison_that_runs_again_adds_up() -> None:
    script = {"items": EVENTS}
    later = {"items": [event(number) for number in range(10, 14)]}
    running = StreamComparison(
        Scripts(script, later),
        Scripts(script, later),
        lambda: END,
        ComparisonLimits(events=3, resume_every_s=None, patience_s=0.1),
        seed=1,
    )
    assert running.run().events == 3
    assert running.run().events == 6, "a number of events is that of one run"
    assert running.compared.total == 0
    running.abandon()
    assert running.run().events == 6


def test_one_that_is_abandoned_ends_although_a_side_hangs() -> None:
    hanging = {"items": EVENTS[:2], "hangs": True}
    running = StreamComparison(
        Scripts({"items": EVENTS}), Scripts(hanging), lambda: END, ComparisonLimits(patience_s=300)
    )
    thread = threading.Thread(target=running.run, daemon=True)
    thread.start()
    running.abandon()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


def test_the_evidence_of_all_kinds_together_is_bounded() -> None:
    """Each of a hundred kinds was allowed megabytes of its own."""
    kinds_of = [f"kind{number}" for number in range(12)]
    server = [event(number, operation=name, text="x" * 1000) for number, name in enumerate(kinds_of)]
    ours = [event(number, operation=name, text="y" * 1000) for number, name in enumerate(kinds_of)]
    rooms = []

    def evidence(found: FoundDifference, room: int) -> None:
        rooms.append(room)
        if room > 600:
            found.entries.append(("", bson.encode({"op": "n", "o": {"msg": "z" * 500}})))
        found.is_whole = True

    found = StreamComparison(
        Scripts({"items": server}),
        Scripts({"items": ours}),
        lambda: END,
        ComparisonLimits(duration_s=0.1, patience_s=0.1, resume_every_s=None, evidence_bytes_max=10_000),
        evidence=evidence,
    ).run()
    assert len(found.differences) == found.total == 12
    assert sum(one.size for one in found.differences) <= 10_000
    assert rooms == sorted(rooms, reverse=True)
    assert {one.left_out for one in found.differences[:3]} == {False}
    assert {(one.left_out, one.size) for one in found.differences[6:]} == {(True, 0)}
    report = report_of(
        found, server="6.0.27", is_cluster=False, scope=Scope.cluster(), stage={}, stages=[], mask=Mask(seed=1)
    )
    assert [one["leftOut"] for one in report["differences"][::11]] == [False, True]
    assert report["differences"][11]["server"] is None
    assert report["differences"][11]["replayable"] is False
    assert report["differences"][11]["count"] == 1


@pytest.mark.parametrize(
    ("events_s", "bytes_s", "chunk"), [(2000, None, (200, 1 << 20)), (5, 50, (1, 5)), (None, None, (500, 1 << 20))]
)
def test_what_is_read_between_two_waits_is_a_tenth_of_a_seconds_part(
    events_s: float | None, bytes_s: float | None, chunk: tuple[int, int]
) -> None:
    pace = ReadingPace(events_s, bytes_s, clock=lambda: 0.0)
    assert (pace.chunk_events, pace.chunk_bytes) == chunk
    if events_s is not None:
        assert pace.wait_s(10, 1) == pytest.approx(
            10 / events_s if bytes_s is None else max(10 / events_s, 1 / bytes_s)
        )


def test_bytes_are_paced_as_events_are() -> None:
    now = 0.0
    pace = ReadingPace(1000, 10_000, clock=lambda: now)
    assert pace.wait_s(1, 20_000) == pytest.approx(2.0)
    now = 2.0
    assert pace.wait_s(10, 10) == pytest.approx(0.01)
    now = 10.0
    assert pace.wait_s(1, 10) == 0.0, "a quiet time is not made up for"
    assert pace.wait_s(500, 10) == pytest.approx(0.5)
    assert pace.waited_s == pytest.approx(2.51)


@pytest.mark.parametrize(("rate", "bytes_s", "at_a_time"), [(70.0, None, 7), (None, 5000.0, 3)])
def test_the_pace_holds_inside_a_batch_too(rate: float | None, bytes_s: float | None, at_a_time: int) -> None:
    """A limit of ten events a second let five hundred through at a time."""
    raws = [event(number) for number in range(100)]
    assert bytes_s is None or 2 * len(raws[0]) < 500 <= 3 * len(raws[0])

    class Pausing(ReadingPace):
        def wait_s(self, events: int, size: int = 0) -> float:
            return 1000.0

    changed = threading.Condition()
    stream = ScriptedStream(raws)
    stream.has_next = True
    reader = SideReader("ours", lambda start: stream, {}, changed=changed, room=1 << 20, pace=Pausing(rate, bytes_s))
    reader.start()
    try:
        with changed:
            assert changed.wait_for(lambda: reader._events, PATIENCE_S)
            assert len(reader.take()) == at_a_time
    finally:
        reader.stop()
        reader.join()


def test_a_production_system_is_safe_without_any_option() -> None:
    limits = ComparisonLimits()
    assert (limits.events_per_second, limits.bytes_per_second) == (2000, 8 << 20)
