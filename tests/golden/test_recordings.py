"""Every recorded stream, run by our engine over the recorded oplog, against the server's bytes."""

from __future__ import annotations

import tomllib
from pathlib import Path

import bson
import pytest

from tailrace.core.oplog.cluster_time import ClusterTime
from tests.amounts import WHOLE, half_in_quick
from tests.differential.first_difference import first_difference
from tests.golden import recording
from tests.golden.recording import (
    RecordedStream,
    Recording,
    entry_time,
    same_error,
    token_is_high_water_mark,
    token_time,
)
from tests.golden.replay import OurStream, memory_of

pytestmark = [pytest.mark.usefixtures("kernel_on_and_off"), pytest.mark.by_turns]

GAPS: dict[str, str] = tomllib.loads((Path(__file__).parent / "known_gaps.toml").read_text())["gaps"]
STREAMS = recording.streams()
#: Entries in a batch, beside all at once.
CUTS = (3, 1) if WHOLE else (1,)


@pytest.mark.parametrize("name", half_in_quick(STREAMS))
def test_a_recorded_stream_is_given_byte_for_byte(name: str) -> None:
    recording_name, index = STREAMS[name]
    source = recording.load(recording_name)
    problem = _first_difference(source, source.streams[index])
    if name in GAPS:
        assert problem is not None, f"{name} is met now: take it from known_gaps.toml"
        pytest.xfail(f"{GAPS[name]}: {problem}")
    assert problem is None, problem


def test_the_list_of_gaps_names_only_recorded_streams() -> None:
    assert set(GAPS) <= set(STREAMS)


def test_the_recordings_are_all_there() -> None:
    assert len(recording.names()) >= 14
    assert len(STREAMS) >= 200


def _first_difference(source: Recording, stream: RecordedStream) -> str | None:
    """What differs first, or None: the events, the error, and each reply's post-batch resume token."""
    try:
        everything = _run(source, stream, 1 << 30)
        if problem := _difference_of_run(stream, everything):
            return f"all entries at once: {problem}"
        for entries_max in CUTS:
            if problem := _difference_of_run(stream, _run(source, stream, entries_max)):
                return f"{entries_max} entries a batch: {problem}"
        return _difference_of_tokens(source, stream, everything)
    except (AssertionError, KeyError, NotImplementedError) as error:
        return f"{type(error).__name__}: {error}"


def _open(source: Recording, stream: RecordedStream) -> OurStream:
    # A stream without a start is started where the server started it.
    now = token_time(stream.replies[0].post_batch_resume_token) if stream.replies else None
    return OurStream(memory_of(source), stream.database, stream.command, server=source.server, now=now)


def _end(source: Recording, stream: RecordedStream) -> ClusterTime:
    """How far the server had read: later entries of the recording may be broken, and concern other streams."""
    if stream.error is not None:
        return entry_time(source.oplog[-1])
    return max(entry_time(source.oplog[0]), token_time(stream.replies[-1].post_batch_resume_token))


def _reads_to_the_end(stream: RecordedStream) -> bool:
    """Whether the recording holds all that the server had for the stream up to ``_end``. A reply that ends in an error
    holds no events, so some that led to it may be missing; after an event's token there may be more of its time."""
    if stream.error is not None:
        return False
    return stream.replies[-1].closed or token_is_high_water_mark(stream.replies[-1].post_batch_resume_token)


def _run(source: Recording, stream: RecordedStream, entries_max: int) -> OurStream:
    ours = _open(source, stream)
    ours.advance(_end(source, stream), entries_max=entries_max)
    return ours


def _difference_of_run(stream: RecordedStream, ours: OurStream) -> str | None:
    compared = ours.events if _reads_to_the_end(stream) else ours.events[: len(stream.events)]
    for index, (expected, got) in enumerate(zip(stream.events, compared, strict=False)):
        if expected != got:
            path, theirs, mine = first_difference(expected, got)
            return f"event {index} at {path}:\n  server {theirs}\n  ours   {mine}"
    if len(stream.events) != len(compared):
        return f"{len(compared)} events instead of {len(stream.events)} (error: {ours.error})"
    if (stream.error is not None or _reads_to_the_end(stream)) and not same_error(stream.error, ours.error):
        return f"error {ours.error} instead of {stream.error}"
    return None


def _difference_of_tokens(source: Recording, stream: RecordedStream, everything: OurStream) -> str | None:
    """A high-water mark must be ours after the same time; an event's token must be that of the last event given."""
    if stream.error is not None:
        return None
    ours = _open(source, stream)
    start = ours.resume_token
    given = 0
    for index, reply in enumerate(stream.replies):
        token = reply.post_batch_resume_token
        given += reply.events
        if reply.closed:
            expected, events = everything.resume_token, len(everything.events)
        elif token_is_high_water_mark(token) and token != start:
            ours.advance(token_time(token))
            expected, events = ours.resume_token, len(ours.events)
        else:
            expected, events = everything.tokens[given - 1] if given else start, given
        if expected != token:
            return f"reply {index}: post-batch resume token {bson.decode(expected)} instead of {bson.decode(token)}"
        if events != given:
            return f"reply {index}: {events} events up to its token instead of {given}"
        if reply.closed != (everything.closed and everything.error is None and given == len(everything.events)):
            return f"reply {index}: closed {reply.closed}"
    return None
