"""Resuming at any token of a recorded stream gives exactly the rest, whichever option carries the token."""

from __future__ import annotations

from typing import Any

import bson
import pytest

from tailrace.core.event.resume_token import ResumeToken
from tests.amounts import amount
from tests.golden import recording
from tests.golden.recording import RecordedStream, Recording, entry_time
from tests.golden.replay import OurStream, memory_of

pytestmark = pytest.mark.usefixtures("kernel_on_and_off")

RECORDINGS = ("ddl_6.0.27", "transactions_6.0.27", "invalidate_6.0.27", "id_types_6.0.27")


def _stream(source: Recording, stream: RecordedStream, options: dict[str, Any]) -> OurStream:
    command = dict(stream.command)
    stage = {name: value for name, value in command["pipeline"][0]["$changeStream"].items() if name[:5] not in _STARTS}
    command["pipeline"] = [{"$changeStream": {**stage, **options}}]
    ours = OurStream(memory_of(source), stream.database, command, server=source.server)
    ours.advance(entry_time(source.oplog[-1]), entries_max=7)
    return ours


_STARTS = ("resum", "start")


def _plain_streams(source: Recording) -> list[RecordedStream]:
    """The recorded streams without a user's stages that gave some events."""
    return [s for s in source.streams if len(s.command["pipeline"]) == 1 and s.error is None and len(s.events) > 2]


@pytest.mark.parametrize("name", RECORDINGS)
def test_a_resume_at_any_token_gives_exactly_the_rest(name: str) -> None:
    source = recording.load(name)
    streams = _plain_streams(source)
    assert streams
    for stream in streams[:4]:
        start = {"startAtOperationTime": bson.Timestamp(entry_time(source.oplog[0]).seconds, 1)}
        whole = _stream(source, stream, start)
        assert whole.error is None
        for index in range(0, len(whole.tokens), max(1, len(whole.tokens) // amount(4, 12))):
            token = bson.decode(whole.tokens[index])
            ended = ResumeToken.parse(whole.tokens[index]).from_invalidate
            for option in ("startAfter",) if ended else ("resumeAfter", "startAfter"):
                rest = _stream(source, stream, {option: token})
                assert rest.error is None
                if not ended:
                    assert rest.events == whole.events[index + 1 :], (stream.name, index, option)


def test_a_token_that_the_stream_never_gave_ends_it_with_280_at_the_first_later_event() -> None:
    source = recording.load("transactions_6.0.27")
    stream = _plain_streams(source)[0]
    whole = _stream(source, stream, {"startAtOperationTime": bson.Timestamp(entry_time(source.oplog[0]).seconds, 1)})
    known = ResumeToken.parse(whole.tokens[1])
    foreign = ResumeToken(
        cluster_time=known.cluster_time,
        version=known.version,
        token_type=known.token_type,
        txn_op_index=known.txn_op_index,
        from_invalidate=False,
        uuid=known.uuid,
        event_identifier=bson.encode({"_id": "never inserted"}),
        fragment_num=None,
    )
    ours = _stream(source, stream, {"resumeAfter": bson.decode(foreign.to_bson())})
    assert ours.events == []
    assert ours.error is not None
    assert ours.error.code == 280
    assert "NonResumableChangeStreamError" in ours.error.labels
