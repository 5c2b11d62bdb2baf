"""One stream read twice, by the server and by us, and the first thing that differs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import bson

from tailrace.core.oplog.cluster_time import ClusterTime
from tests.differential.first_difference import first_difference
from tests.differential.native import NativeStream, aggregate, open_only, read
from tests.differential.wire import ANY_VALUE, Wire
from tests.golden.recording import StreamError, same_error, token_is_high_water_mark, token_time
from tests.golden.replay import EVERYTHING, Oplog, OurStream

#: After an error that both give, the streams go on after the entry that caused it, this many times.
_ERRORS_PASSED_MAX = 6
_EVENT_TOO_LARGE = 10334
_IS_A_VIEW = 166
#: An event that is too large, and a field of an event that is too large for a fragment.
_SIZE_IS_NAMED = (_EVENT_TOO_LARGE, 7182500)
#: The code with which a server's stream ends at an oplog entry that violates one of its assertions.
_UNREADABLE = 8
#: Codes for tokens that no server writes: an unknown version, a UUID that is null, an identifier that is no document,
#: a high-water mark with an event's fields, an event's without. Codes for options: a wrong type or value, an unknown
#: one, a scope not allowed.
_TOKEN_REFUSED = frozenset((50795, 207, 6189501, 6189503, 6189504, 6189505))
_OPTION_REFUSED = frozenset((2, 14, 72, 73, 40415, 40575))
#: A pre-image is required, and the server (before 6.0) has logged none.
_NOT_LOGGED = 51770


@dataclass(frozen=True)
class Case:
    """A stream to read: scope as in ``native.aggregate``, the stage's options, version 2 tokens, our batches' size."""

    scope: tuple[str, str | None]
    stage: Mapping[str, Any]
    v2: bool = False
    pipeline: tuple[Any, ...] = ()
    entries_max: int = EVERYTHING
    live: bool = False

    def __str__(self) -> str:
        target = ".".join(part for part in self.scope if part is not None)
        extra = f" pipeline {list(self.pipeline)}" if self.pipeline else ""
        return f"{target} {dict(self.stage)}{' v2' if self.v2 else ''}{extra} {self.entries_max} entries a batch"


@dataclass
class Difference:
    """What differs: the case, how many events were equal before, both sides in words, the cluster time to look at."""

    case: str
    what: str
    equal_events: int
    server: str
    ours: str
    time: ClusterTime | None = None


@dataclass
class Compared:
    """The outcome of one case: the server's stream, ours, and the first difference."""

    native: NativeStream
    ours: OurStream | None
    difference: Difference | None
    equal_events: int = 0
    equal_bytes: int = 0
    errors_met: list[StreamError] = field(default_factory=list)


@dataclass
class Bench:
    """The two sides: a connection to the server, and our oplogs over the same span of time."""

    wire: Wire
    memory: Oplog
    live: Oplog
    server: str
    end: ClusterTime

    def compare(self, case: Case) -> Compared:
        """Read the case's stream on both sides. If both end in the same error, go on after it and compare again."""
        errors: list[StreamError] = []
        events = size = 0
        while True:
            result = self._compare_once(case)
            events, size = events + result.equal_events, size + result.equal_bytes
            result.equal_events, result.equal_bytes, result.errors_met = events, size, errors
            error = result.native.error
            if result.difference is not None or error is None or len(errors) == _ERRORS_PASSED_MAX:
                return result
            errors.append(error)
            following = self._after_the_error(case)
            if following is None or following >= self.end:
                return result
            kept = {name: value for name, value in case.stage.items() if name not in ("resumeAfter", "startAfter")}
            stage = {**kept, "startAtOperationTime": following.to_timestamp()}
            case = Case(case.scope, stage, case.v2, case.pipeline, case.entries_max, case.live)

    def compare_opening(self, case: Case) -> Difference | None:
        """Compare only whether the stream opens: the same error, or no error on both sides and the same first token."""
        database, command = aggregate(case.scope, case.stage, server=self.server, v2=case.v2, pipeline=case.pipeline)
        native = open_only(self.wire, database, command)
        now = None if native.error is not None else token_time(native.resume_token)
        ours = OurStream(self.memory, database, command, server=self.server, now=now)
        if difference := _different_error(case, native, ours, 0):
            return None if _is_old(self.server) and _refused_otherwise(native, ours) else difference
        if _is_old(self.server) and _echoes(case, native):
            return None
        if native.error is None and ours.resume_token != native.resume_token:
            return Difference(str(case), "first token", 0, words(native.resume_token), words(ours.resume_token))
        return None

    def _compare_once(self, case: Case) -> Compared:
        database, command = aggregate(case.scope, case.stage, server=self.server, v2=case.v2, pipeline=case.pipeline)
        native = read(self.wire, database, command, self.end)
        ours = OurStream(self.live if case.live else self.memory, database, command, server=self.server)
        if not ours.closed:
            until = self.end
            if native.error is None and native.replies and token_is_high_water_mark(native.resume_token):
                until = token_time(native.resume_token) if not case.live else self.end
            ours.advance(until, entries_max=case.entries_max)
        result = Compared(native, ours, _first_difference(case, native, ours))
        if case.pipeline and _hides_an_unreadable_entry(native, ours):
            result.difference = None
        elif result.difference is None and case.pipeline and not ours.never_opened and not _requires_images(case):
            result.difference = self._without_pushdown(case, native, ours)
        result.equal_events = len(native.events) if result.difference is None else result.difference.equal_events
        result.equal_bytes = sum(map(len, native.events[: result.equal_events]))
        return result

    def _without_pushdown(self, case: Case, native: NativeStream, ours: OurStream) -> Difference | None:
        """The stream again with every entry read, transformed and only then matched: it must be the same stream."""
        database, command = aggregate(case.scope, case.stage, server=self.server, v2=case.v2, pipeline=case.pipeline)
        plain = OurStream(self.memory, database, command, server=self.server, pushes_down=False)
        plain.advance(ours.position, entries_max=case.entries_max)
        if _hides_an_unreadable_entry(native, plain):
            return None
        if native.error is None and plain.error is not None and plain.error.code == _IS_A_VIEW:
            return None  # what the oplog query leaves out is not looked up, which is visible
        difference = _first_difference(case, native, plain)
        if difference is None and plain.resume_token != ours.resume_token and ours.error is None and not case.live:
            difference = Difference(str(case), "token", 0, words(ours.resume_token), words(plain.resume_token))
        return difference and replace(difference, what=f"without pushdown: {difference.what}")

    def _after_the_error(self, case: Case) -> ClusterTime | None:
        """One tick after the entry that ends our stream; None when it does not open at all."""
        database, command = aggregate(case.scope, case.stage, server=self.server, v2=case.v2, pipeline=case.pipeline)
        again = OurStream(self.memory, database, command, server=self.server)
        if again.closed:
            return None
        again.advance(self.end, entries_max=1)
        return again.position.tick()


def _is_old(server: str) -> bool:
    return server.startswith(("4.", "5."))


def _echoes(case: Case, native: NativeStream) -> bool:
    """Whether the first token is the document that the stream was given, as it came: before 6.0 a token whose spelling
    is odd is given back, we write it anew (docs/reference/differences.md)."""
    return native.error is None and native.resume_token in _given(case)


def _given(case: Case) -> list[bytes]:
    """The token that the stream is resumed from, if it is."""
    given = case.stage.get("resumeAfter", case.stage.get("startAfter"))
    return [bson.encode(given)] if isinstance(given, Mapping) else []


def _refused_otherwise(native: NativeStream, ours: OurStream) -> bool:
    """Whether an opening is refused in another way (docs/reference/differences.md): a token that no server writes,
    which one side may take, or the value of an option, where the order in which things are looked at differs too."""
    theirs, mine = native.error, ours.error
    if {error.code for error in (theirs, mine) if error is not None} & _TOKEN_REFUSED:
        return True
    return theirs is not None and mine is not None and {theirs.code, mine.code} <= _OPTION_REFUSED


def _first_difference(case: Case, native: NativeStream, ours: OurStream) -> Difference | None:
    for index, (expected, got) in enumerate(zip(native.events, ours.events, strict=False)):
        if expected != got:
            path, theirs, mine = first_difference(expected, got)
            what = f"event {index} ({bson.decode(expected, ANY_VALUE)['operationType']}) at {path}"
            return Difference(str(case), what, index, theirs, mine, event_time(expected))
    equal = min(len(native.events), len(ours.events))
    if len(native.events) > equal:
        missing = native.events[equal]
        text = f"nothing (error {ours.error})"
        return Difference(str(case), f"event {equal} is missing", equal, words(missing), text, event_time(missing))
    if len(ours.events) > equal:
        extra = ours.events[equal]
        text = f"nothing (error {native.error}, closed {native.invalidated})"
        return Difference(str(case), f"event {equal} is too many", equal, text, words(extra), event_time(extra))
    if difference := _different_error(case, native, ours, equal):
        return difference
    if native.error is None and native.invalidated != ours.closed:
        return Difference(str(case), "closed", equal, str(native.invalidated), str(ours.closed))
    return _different_token(case, native, ours)


def _requires_images(case: Case) -> bool:
    """Whether images are required. No image is required for an event that the pushed match leaves out, on the server
    too, and that is visible."""
    return "required" in (case.stage.get("fullDocument"), case.stage.get("fullDocumentBeforeChange"))


def _hides_an_unreadable_entry(native: NativeStream, ours: OurStream) -> bool:
    """Whether one side ended at an update entry that the server cannot read, and the other's filter hid that entry.

    A replacement with a field ``$v`` of its own makes such an entry: a server's stream over it ends in a failed
    assertion (8), and so does ours. After a ``$match`` it depends on what each side asks about raw entries
    (docs/reference/differences.md). What both gave until then must still be the same.
    """
    codes = {error.code if error is not None else None for error in (native.error, ours.error)}
    # Before 6.0 a $match may make the whole event before it tests it: one that is too large then ends the server's
    # stream, and ours goes on. Never the other way round.
    ended = native.error is not None and native.error.code == _EVENT_TOO_LARGE
    made_to_test = ended and ours.error is None and _is_old(ours.server)
    if len(codes) == 1 or not (_UNREADABLE in codes or made_to_test):
        return False
    return all(theirs == mine for theirs, mine in zip(native.events, ours.events, strict=False))


def _different_error(case: Case, native: NativeStream, ours: OurStream, equal: int) -> Difference | None:
    expected, got = native.error, ours.error
    if same_error(expected, got) or (case.pipeline and _too_large(expected, got)) or _not_logged(expected, got):
        return None
    return Difference(str(case), "error", equal, str(expected), str(got))


def _too_large(expected: StreamError | None, got: StreamError | None) -> bool:
    """Whether both say that an event is too large: after stages of the user's the message names the size of the
    server's own form of the event (docs/reference/differences.md)."""
    return expected is not None and got is not None and expected.code == got.code and got.code in _SIZE_IS_NAMED


def _not_logged(expected: StreamError | None, got: StreamError | None) -> bool:
    """Whether both say that no pre-image was logged: the server's message holds the whole event, ours only which one
    (docs/reference/differences.md)."""
    if expected is None or got is None or {expected.code, got.code} != {_NOT_LOGGED}:
        return False
    return expected.labels == got.labels and all("no pre-image optime was recorded" in str(e) for e in (expected, got))


def _different_token(case: Case, native: NativeStream, ours: OurStream) -> Difference | None:
    """A reply whose token is an event's must have that of its last event; the last reply's must be ours at its time."""
    if native.error is not None:
        return None
    for events, token in native.replies:
        # The reply that closes the stream has the invalidate's token, also where a $match leaves that event out.
        if native.invalidated and token == ours.resume_token:
            continue
        if events and not token_is_high_water_mark(token) and ours.tokens[events - 1] != token:
            return Difference(str(case), "token", events, words(token), words(ours.tokens[events - 1]))
    if _is_old(ours.server) and native.invalidated and not native.ends_with_invalidate:
        # Where the pipeline hides the invalidate, the token is what the last reply before had: in batches of another
        # size another one, and none where there was no such reply.
        between = token_is_high_water_mark(ours.resume_token) or ours.resume_token in ours.tokens[-1:] + _given(case)
        if not between or (native.replies and token_time(ours.resume_token) < token_time(native.resume_token)):
            shown = words(ours.resume_token)
            return Difference(str(case), "token of a closed stream", len(native.events), str(native.replies), shown)
        return None
    if not case.live and ours.resume_token != native.resume_token:
        shown = words(native.resume_token), words(ours.resume_token)
        return Difference(str(case), "post-batch resume token", len(native.events), *shown)
    return None


def words(raw: bytes) -> str:
    """A document in Python's notation, and its bytes too if types that Python does not distinguish may differ."""
    return f"{bson.decode(raw, ANY_VALUE)!r} {raw.hex() if len(raw) < 2000 else ''}"


def event_time(event: bytes) -> ClusterTime | None:
    identifier = bson.decode(event, ANY_VALUE).get("_id")
    return ClusterTime(int(identifier["_data"][2:18], 16)) if isinstance(identifier, dict) else None
