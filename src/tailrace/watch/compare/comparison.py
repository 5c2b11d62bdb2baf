"""A comparison: both streams from one place on, paired event by event, and resumed together at random tokens.

It is made of legs. In each both streams are opened at the same place and read until it is time to resume, until both
have ended, or until the comparison ends. What begins with a resume repeats some events, which are compared again.
"""

from __future__ import annotations

import logging
import random
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from threading import Condition
from typing import Any, Final

import bson
from pymongo.errors import ConnectionFailure

from tailrace.core import raw_bson
from tailrace.core.cursor.reply import RESUMABLE_CODES
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.errors import ChangeStreamHistoryLost, ServerError, SourceError, TailraceError
from tailrace.watch.compare.pairing import OURS, SERVER, Event, EventDifference, Pair, Pairing
from tailrace.watch.compare.reading import Opener, ReadingPace, SideReader, time_of
from tailrace.watch.compare.seen import SeenEvents

#: Of a side's events that wait for the other side.
BYTES_MAX: Final = 32 << 20
#: Resumes are so far apart, on average.
RESUME_EVERY_S: Final = 20.0
#: How long the other side is waited for at the end, and where one side has ended. An idle deployment moves every 10 s.
PATIENCE_S: Final = 30.0
#: Among how many last events a resume chooses one to go back to.
_BACK_MAX: Final = 300
#: Kinds of differences that are kept; of the others only the number.
_KINDS_MAX: Final = 100
#: Of the events, entries and images of all kinds together: later kinds are kept without theirs.
EVIDENCE_BYTES_MAX: Final = 64 << 20
#: What each side reads a second at most, so that nobody has to think of it on a production system.
EVENTS_PER_SECOND: Final = 2000.0
BYTES_PER_SECOND: Final = 8 << 20
#: A side whose reader was held back for this much of the time at the end does not hang.
_HELD_BACK: Final = 0.25
_PROGRESS_S: Final = 10.0
_LOOK_S: Final = 0.25
#: How often both sides start again without an event in between, and how long apart.
_FRUITLESS_MAX: Final = 10
_FRUITLESS_S: Final = 1.0
#: Of a look-up, by what the collection is at that moment: its name is a view's (166), it is dropped or renamed while
#: the look-up runs (175, seen on 7.0.28), or its collation takes no key of this ``_id`` (201, such as of a symbol).
_LOOK_UP_FAILED: Final = frozenset((166, 175, 201))
_log = logging.getLogger("tailrace.compare")


@dataclass
class FoundDifference:
    """One kind of difference: its first occurrence, how often it occurred, and what the oplog has at that time.

    Attributes:
        is_whole: the entries and images are all that a stream needs to make the event
        left_out: there was no room left for its events and entries
    """

    difference: EventDifference
    count: int = 1
    entries: list[tuple[str, bytes]] = field(default_factory=list)
    pre_images: list[bytes] = field(default_factory=list)
    is_whole: bool = False
    left_out: bool = False

    @property
    def size(self) -> int:
        """The bytes of what is kept."""
        events = (self.difference.server, self.difference.ours)
        return (
            sum(len(event) for event in events if event is not None)
            + sum(len(entry) for _, entry in self.entries)
            + sum(map(len, self.pre_images))
        )


@dataclass
class Compared:
    """What a comparison has come to.

    Attributes:
        events: how many events both sides gave, each counted once
        again: events that were compared once more after a resume
        resumes: how often both streams were resumed at one token
        gaps: moments when both had to start again, with the reason
        looked_up_apart: updates whose documents were looked up at two moments and so were not compared
        left: events that one side had given by the end and the other had not reached
        behind_s: how far, in cluster time, the comparison was behind the writes when it ended, held back by its own
            limit of events per second
        unknown_operations: oplog entries of unknown kinds, which give no event, by kind
    """

    seen: SeenEvents
    events: int = 0
    again: int = 0
    resumes: int = 0
    seconds: float = 0.0
    looked_up_apart: int = 0
    left: int = 0
    behind_s: int = 0
    gaps: Counter[str] = field(default_factory=Counter)
    differences: list[FoundDifference] = field(default_factory=list)
    unnamed: int = 0
    unknown_operations: Counter[str] = field(default_factory=Counter)

    @property
    def total(self) -> int:
        """How many differences there are, those of one kind included."""
        return sum(found.count for found in self.differences) + self.unnamed


@dataclass(frozen=True, kw_only=True)
class ComparisonLimits:
    """When a comparison ends, how fast each side is read, what is kept in memory, and how often both are resumed.
    ``None``: never, or not limited. ``events`` are those of one ``run``."""

    duration_s: float | None = None
    events: int | None = None
    events_per_second: float | None = EVENTS_PER_SECOND
    bytes_per_second: float | None = BYTES_PER_SECOND
    bytes_max: int = BYTES_MAX
    evidence_bytes_max: int = EVIDENCE_BYTES_MAX
    resume_every_s: float | None = RESUME_EVERY_S
    patience_s: float = PATIENCE_S


class StreamComparison:
    """The server's stream and ours. ``run`` may be called again: what was compared adds up.

    ``server``, ``ours``  open the two sides
    ``now``        a cluster time that everything written before the call is at or before
    ``evidence``   what the oplog holds about a kind of difference, when it is first met, in at most that many
        bytes
    ``looks_up``   whether the streams look current documents up
    ``has_stages`` whether stages of the user's make the events
    ``has_one_oplog``  whether all events are of one oplog
    """

    def __init__(
        self,
        server: Opener,
        ours: Opener,
        now: Callable[[], ClusterTime],
        limits: ComparisonLimits,
        *,
        evidence: Callable[[FoundDifference, int], None] = lambda found, room: None,
        progress: Callable[[Compared], None] = lambda compared: None,
        looks_up: bool = False,
        has_stages: bool = False,
        has_one_oplog: bool = False,
        seed: int | None = None,
    ) -> None:
        self.compared = Compared(SeenEvents(keeps_names=not has_stages))
        self.openers = (server, ours)
        self.now, self.limits, self._evidence, self._progress = now, limits, evidence, progress
        self.looks_up = looks_up
        self.has_one_oplog = has_one_oplog and not has_stages
        self._rng = random.Random(seed)
        self.changed = Condition()
        self._stopped = False
        #: Whether not even what was read is compared any more.
        self.abandoned = False
        self._known: dict[tuple[str, str, str], FoundDifference] = {}
        self._furthest = b""
        #: Tokens of the last pairs.
        self._tokens: deque[bytes] = deque(maxlen=_BACK_MAX)
        self.paces = tuple(ReadingPace(limits.events_per_second, limits.bytes_per_second) for _ in range(2))
        self._evidence_room = limits.evidence_bytes_max
        self._events_before = 0
        self._next_progress = 0.0
        self._deadline: float | None = None
        #: What the last leg has seen of an invalidation.
        self.invalidated: bytes | None = None

    def stop(self) -> None:
        """End it soon, with what was compared until then. From any thread, or a signal handler."""
        self._stopped = True

    def abandon(self) -> None:
        """End it now: what one side has read and the other has not is left. From any thread."""
        self._stopped = self.abandoned = True

    def run(self) -> Compared:
        """Compare until the limits say so. Raises TailraceError where a stream cannot be opened to begin with, or
        where one does not come to the end of the comparison."""
        begun = time.monotonic()
        self._events_before = self.compared.events
        self.forget()
        self._next_progress = begun + _PROGRESS_S
        if self.limits.duration_s is not None:
            self._deadline = begun + self.limits.duration_s
        now = self.now()
        start: Mapping[str, Any] | None = {"start_at_operation_time": now.to_timestamp()}
        if self._furthest and now < Event.time_in(self._furthest):
            self._furthest = b""  # the deployment was restored: its events are new, although their times are not
        try:
            is_first, fruitless = True, 0
            while start is not None and not self.abandoned:
                before, gaps = self.compared.events + self.compared.again, self.compared.gaps.total()
                start = _Leg(self, start, is_first=is_first).run()
                is_first = False
                is_fruitless = (
                    gaps < self.compared.gaps.total() and before == self.compared.events + self.compared.again
                )
                fruitless = fruitless + 1 if is_fruitless else 0
                self._refuse_to_go_round(fruitless)
        finally:
            self.compared.seconds += time.monotonic() - begun
        return self.compared

    def _refuse_to_go_round(self, fruitless: int) -> None:
        """After legs that compared nothing: a pause, and in the end an error."""
        if fruitless >= _FRUITLESS_MAX:
            reasons = ", ".join(f"{reason} ({count} times)" for reason, count in self.compared.gaps.items())
            raise SourceError(f"the streams end as soon as they begin: {reasons}")
        if fruitless:
            time.sleep(_FRUITLESS_S)

    # -- what a leg asks

    @property
    def ends(self) -> bool:
        """Whether it is time to end."""
        over = self._deadline is not None and time.monotonic() >= self._deadline
        return self._stopped or over or self.counted

    @property
    def counted(self) -> bool:
        """Whether as many events as were asked for have been compared."""
        return self.limits.events is not None and self.compared.events - self._events_before >= self.limits.events

    def next_resume(self) -> float | None:
        """When to resume both streams, by the monotonic clock."""
        every = self.limits.resume_every_s
        return None if every is None else time.monotonic() + every * self._rng.uniform(0.5, 1.5)

    def resume_from(self, idle_tokens: list[Mapping[str, Any]]) -> Mapping[str, Any] | None:
        """Where to resume: after one of the last events that were equal, or at a place where a stream has found
        nothing; ``None`` where there is neither."""
        choices: list[Any] = [*idle_tokens]
        if self._tokens:
            choices.append(bson.decode(self._rng.choice(self._tokens)))
        if not choices:
            return None
        return {self._rng.choice(("resume_after", "start_after")): self._rng.choice(choices)}

    def last_place(self, start: Mapping[str, Any]) -> Mapping[str, Any]:
        """Where to go on after what was equal so far in a leg that began at ``start``."""
        return {"resume_after": bson.decode(self._tokens[-1])} if self._tokens else start

    def forget(self) -> None:
        """Both streams begin somewhere else: no earlier token is resumed from."""
        self._tokens.clear()

    def note(self, result: Pair | EventDifference) -> None:
        """What was found."""
        if isinstance(result, EventDifference):
            self._note_difference(result)
            return
        event, compared = result.event, self.compared
        element = raw_bson.find(event.raw, b"_id")
        assert element is not None
        token = event.raw[element.value_start : element.end]
        self._tokens.append(token)
        operation = event.operation
        self.invalidated = token if operation == "invalidate" else None
        compared.looked_up_apart += result.looked_up_apart
        if event.token <= self._furthest:
            compared.again += 1
            return
        self._furthest = event.token
        compared.events += 1
        compared.seen.add(operation, event.raw)

    def _note_difference(self, difference: EventDifference) -> None:
        known = self._known.get(difference.key)
        if known is not None:
            known.count += 1
        elif len(self._known) >= _KINDS_MAX:
            self.compared.unnamed += 1
        else:
            found = self._known[difference.key] = FoundDifference(difference)
            self._keep_evidence(found)
            self.compared.differences.append(found)

    def _keep_evidence(self, found: FoundDifference) -> None:
        """Give it its entries, or, where there is no room for more, take its events away."""
        if found.size > self._evidence_room:
            found.difference = replace(found.difference, server=None, ours=None)
            found.left_out = True
            return
        try:
            self._evidence(found, self._evidence_room - found.size)
        except TailraceError as error:
            _log.warning("the oplog entries of a difference cannot be read: %s", error)
        self._evidence_room -= found.size

    def show_progress(self) -> None:
        if time.monotonic() >= self._next_progress:
            self._next_progress = time.monotonic() + _PROGRESS_S
            self._progress(self.compared)


class _Leg:
    """One pair of streams from one place on. ``run`` gives where the next pair begins, ``None`` at the end."""

    def __init__(self, whole: StreamComparison, start: Mapping[str, Any], *, is_first: bool) -> None:
        self._whole, self._start, self._is_first = whole, start, is_first
        limits = whole.limits
        self._limits = limits
        self._pairing = Pairing(bytes_max=limits.bytes_max, looks_up=whole.looks_up)
        whole.invalidated = None
        names = ("server", "ours")
        self._readers = tuple(
            SideReader(
                name,
                opener,
                start,
                changed=whole.changed,
                room=limits.bytes_max // 4,
                pace=pace,
                has_one_oplog=whole.has_one_oplog,
            )
            for name, opener, pace in zip(names, whole.openers, whole.paces, strict=True)
        )
        self._resume_at = whole.next_resume()
        #: At the end: up to where both are read, and for how long at most.
        self._until: ClusterTime | None = None
        self._patience_ends: float | None = None
        self._looks_before: list[int] = [0, 0]
        self._waited_before: list[float] = [0.0, 0.0]
        self._paired = 0

    def run(self) -> Mapping[str, Any] | None:
        for reader in self._readers:
            reader.start()
        try:
            while True:
                self._look()
                if self._whole.counted or self._whole.abandoned:
                    return None
                if all(reader.ended for reader in self._readers):
                    return self._after_both_ended()
                if self._until is not None and self._has_failed_to_look_up():
                    return self._after_one_ended()  # the end is not reached by a side that has ended before
                if any(reader.ended for reader in self._readers) and not self._until:
                    if not self._is_opened() and not self._may_have_met_an_event():
                        self._raise_opening()
                    if self._is_out_of_patience():
                        if not self._is_opened():
                            self._raise_opening()
                        return self._after_one_ended()
                elif self._whole.ends or self._until is not None:
                    if self._has_come_to_the_end():
                        return None
                elif self._resume_at is not None and time.monotonic() >= self._resume_at:
                    start = self._whole.resume_from(self._idle_tokens())
                    if start is not None:
                        self._whole.compared.resumes += 1
                        return start
                    self._resume_at = self._whole.next_resume()
        finally:
            for reader in self._readers:
                reader.stop()
            for reader in self._readers:
                reader.join()
                if reader.name == "ours":
                    self._whole.compared.unknown_operations.update(reader.unknown_operations)

    def _look(self) -> None:
        """Take what both have read, and pair it."""
        with self._whole.changed:
            self._whole.changed.wait(_LOOK_S)
            taken = [reader.take() for reader in self._readers]
            promises = [reader.promise for reader in self._readers]
        for side, events in enumerate(taken):
            for raw in events:
                self._pairing.put(side, raw)
            self._pairing.promise(side, promises[side])
        for result in self._pairing.results():
            self._whole.note(result)
            self._paired += isinstance(result, Pair)
            if self._whole.counted:
                break
        with self._whole.changed:
            for side, reader in enumerate(self._readers):
                reader.hold(not self._pairing.has_room(side))
        self._whole.show_progress()

    def _idle_tokens(self) -> list[Mapping[str, Any]]:
        """Places at which a stream has found nothing and up to which everything is paired."""
        if self._pairing.waiting(SERVER) or self._pairing.waiting(OURS):
            return []
        upto = min(self._pairing.promised(side) for side in (SERVER, OURS))
        tokens = [reader.idle_token for reader in self._readers]
        return [token for token in tokens if token is not None and time_of(token) <= upto]

    def _is_out_of_patience(self) -> bool:
        if self._patience_ends is None:
            self._patience_ends = time.monotonic() + self._limits.patience_s
        return time.monotonic() >= self._patience_ends

    def _is_opened(self) -> bool:
        """Whether both sides have begun, now or in an earlier leg."""
        return not self._is_first or all(reader.opened for reader in self._readers)

    def _may_have_met_an_event(self) -> bool:
        """Whether it is an event that the server's stream fails at, and not the stream that it refuses: its first reply
        holds events too. Then ours, which is open, ends there as well."""
        server, ours = self._readers
        error = server.error
        return isinstance(error, ServerError) and not _is_outage(error) and not server.opened and ours.error is None

    def _raise_opening(self) -> None:
        """To begin with a stream that cannot be opened is no difference: nothing can be compared."""
        for reader in self._readers:
            if reader.error is not None and not reader.opened:
                raise reader.error

    def _has_come_to_the_end(self) -> bool:
        """Whether both sides were read up to the moment when the end was asked for."""
        compared = self._whole.compared
        if self._until is None:
            self._until = self._whole.now()
            self._patience_ends = time.monotonic() + self._limits.patience_s
            self._looks_before = [reader.idle_looks for reader in self._readers]
            self._waited_before = [pace.waited_s for pace in self._whole.paces]
        waiting = self._pairing.waiting(SERVER) + self._pairing.waiting(OURS)
        reached = [
            self._pairing.promised(side) > self._until
            or (reader.promise == self._until and reader.idle_looks > self._looks_before[side] + 1)
            for side, reader in enumerate(self._readers)
        ]
        if all(reached) and not self._is_behind(self._until):
            compared.left += waiting
            return True
        if not self._is_late():
            return False
        compared.left += waiting
        if not all(reached) and self._is_held_back():
            compared.behind_s = max(1, self._until.seconds - min(map(self._pairing.promised, (SERVER, OURS))).seconds)
        elif not all(reached):
            late = " and ".join(
                reader.name for reader, is_there in zip(self._readers, reached, strict=True) if not is_there
            )
            trouble = next((str(reader.error) for reader in self._readers if reader.error is not None), None)
            raise SourceError(
                f"the comparison could not be completed: {late} did not reach {self._until} within "
                f"{self._limits.patience_s:.0f} s" + (f" ({trouble})" if trouble else ""),
                hint="Compare again when the deployment is healthy, or with a larger --events-per-second",
            )
        return True

    def _is_held_back(self) -> bool:
        """Whether it is the pace alone that kept a side from coming to the end."""
        waited = [pace.waited_s - before for pace, before in zip(self._whole.paces, self._waited_before, strict=True)]
        return all(reader.error is None for reader in self._readers) and (
            max(waited) >= _HELD_BACK * self._limits.patience_s
        )

    def _is_behind(self, until: ClusterTime) -> bool:
        """Whether an event up to ``until`` still waits for the other side's."""
        times = [self._pairing.next_time(side) for side in (SERVER, OURS)]
        return any(time is not None and time <= until for time in times)

    def _is_late(self) -> bool:
        return self._patience_ends is not None and time.monotonic() >= self._patience_ends

    def _anew(self, reason: str) -> Mapping[str, Any] | None:
        """Both start again, at this moment."""
        self._whole.compared.gaps[reason] += 1
        self._whole.forget()
        return None if self._whole.ends else {"start_at_operation_time": self._whole.now().to_timestamp()}

    def _after_both_ended(self) -> Mapping[str, Any] | None:
        self._look()
        if self._readers[SERVER].error is not None and self._pairing.waiting(OURS) and self._may_get_further():
            # A reply of the server's that fails holds no events, although the stream had some to give before the one
            # that it fails at: they come where each is asked for separately.
            return {**self._whole.last_place(self._start), "batch_size": 1}
        waiting = self._pairing.waiting(SERVER) or self._pairing.waiting(OURS)
        if self._has_failed_to_look_up() or (waiting and self._has_met_an_outage()):
            return self._after_one_ended()
        for side in (SERVER, OURS):
            self._pairing.end(side)
        for result in self._pairing.results():
            self._whole.note(result)
        errors = [reader.error for reader in self._readers]
        if self._is_first and not any(reader.opened for reader in self._readers):
            self._raise_opening()
        if all(error is None for error in errors):
            if self._whole.invalidated is None:
                return self._anew("both streams ended without an invalidate")
            self._whole.forget()
            return None if self._whole.ends else {"start_after": bson.decode(self._whole.invalidated)}
        if None not in errors and errors[0].code == errors[1].code:  # type: ignore[union-attr]
            return self._anew(f"both streams ended with error {errors[0].code}")  # type: ignore[union-attr]
        return self._after_one_ended()

    def _may_get_further(self) -> bool:
        """Whether the server has more to give before it fails. Drivers ask for two events at a time where one is asked
        for, but for the first reply: a leg of single events ends up to one event early, and the next begins with it."""
        return "batch_size" not in self._start or self._paired > 0

    def _has_failed_to_look_up(self) -> bool:
        """Whether a look-up has ended a stream, which the other one may have done at a better moment."""
        codes = {reader.error.code for reader in self._readers if reader.error is not None}
        return self._whole.looks_up and not codes.isdisjoint(_LOOK_UP_FAILED)

    def _has_met_an_outage(self) -> bool:
        return any(reader.error is not None and _is_outage(reader.error) for reader in self._readers)

    def _after_one_ended(self) -> Mapping[str, Any] | None:
        ended = next(reader for reader in self._readers if reader.error is not None or reader.ended)
        if self._has_failed_to_look_up():
            self._whole.compared.left += self._pairing.waiting(SERVER) + self._pairing.waiting(OURS)
            return self._anew("a document could not be looked up in the collection as it was at that moment")
        if any(isinstance(reader.error, ChangeStreamHistoryLost) for reader in self._readers):
            return self._anew("the oplog no longer reached back to where a stream was")
        errors = [reader.error for reader in self._readers]
        if self._has_met_an_outage():
            self._whole.compared.left += self._pairing.waiting(SERVER) + self._pairing.waiting(OURS)
            return self._anew("a member could not be reached, or there was an election")
        if all(error is None for error in errors):
            text = f"{ended.name} ended"
            self._whole.note(EventDifference("end", "", ended.name, None, None, self._pairing.promised(SERVER), text))
        else:
            words = ", ".join(f"{reader.name}: {_words(reader)}" for reader in self._readers)
            codes = "/".join("-" if error is None else str(error.code) for error in errors)
            self._whole.note(EventDifference("error", "", codes, None, None, None, words))
        return self._anew("only one stream ended")


def _is_outage(error: TailraceError) -> bool:
    """Whether it says that the deployment is not well, which one side may meet and the other just miss."""
    return isinstance(error, ConnectionFailure) or error.code in RESUMABLE_CODES


def _words(reader: SideReader) -> str:
    """How a side has ended. The server's words may hold values of documents, so only an error's code is reported."""
    if reader.error is None:
        return "ended" if reader.ended else "went on"
    return f"error {reader.error.code} {reader.error.code_name or type(reader.error).__name__}"
