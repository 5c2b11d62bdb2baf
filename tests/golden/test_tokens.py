"""Every resume token that a recorded server gave, taken apart and made again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise

import pytest

from tailrace.core import raw_bson
from tailrace.core.event.resume_token import ResumeToken, encode_event_token
from tailrace.core.oplog.cluster_time import ClusterTime
from tests.golden import recording


def recorded_tokens(name: str) -> Iterator[bytes]:
    for stream in recording.load(name).streams:
        for event in stream.events:
            yield value(event, b"_id")
        for reply in stream.replies:
            if reply.post_batch_resume_token:
                yield reply.post_batch_resume_token


def test_the_list_of_streams_is_that_of_the_recordings() -> None:
    listed = json.loads(recording.STREAMS.read_text())
    assert listed == {name: recording.streams_of(name) for name in recording.names()}


def value(document: bytes, name: bytes) -> bytes:
    document = bytes(document)  # the largest events are memoryviews
    element = raw_bson.find(document, name)
    assert element is not None
    return raw_bson.value(document, element)


@pytest.mark.parametrize("name", recording.names())
def test_every_recorded_token_is_made_again_from_its_parts(name: str) -> None:
    tokens = set(recorded_tokens(name))
    assert tokens
    for document in tokens:
        parts = ResumeToken.parse(document).parts
        again = ResumeToken(
            parts.cluster_time,
            version=parts.version,
            token_type=parts.token_type,
            txn_op_index=parts.txn_op_index,
            from_invalidate=parts.from_invalidate,
            uuid=parts.uuid,
            event_identifier=parts.event_identifier,
            fragment_num=parts.fragment_num,
        )
        assert again.to_bson() == document


@pytest.mark.parametrize("name", [name for name in recording.names() if name.startswith("id_types")])
def test_tokens_of_every_id_type_follow_from_the_document_key(name: str) -> None:
    compared = 0
    for stream in recording.load(name).streams:
        for event in stream.events:
            theirs = value(event, b"_id")
            key = raw_bson.find(event, b"documentKey")
            if key is None:
                continue
            document_key = raw_bson.value(event, key)
            parsed = ResumeToken.parse(theirs)
            kind = raw_bson.find(event, b"operationType")
            assert kind is not None
            operation = raw_bson.encode_element(raw_bson.STRING, b"operationType", raw_bson.value(event, kind))
            version_2 = raw_bson.encode_document(
                operation, raw_bson.encode_element(raw_bson.OBJECT, b"documentKey", document_key)
            )
            ours = encode_event_token(
                ClusterTime.from_bytes_le(value(event, b"clusterTime")),
                version=parsed.version,
                txn_op_index=0,
                from_invalidate=False,
                uuid=parsed.uuid,
                identifier=document_key if parsed.version == 1 else version_2,
            )
            assert ours == theirs
            compared += 1
    assert compared > 100


@pytest.mark.parametrize("name", recording.names())
def test_the_order_of_recorded_events_is_the_order_of_their_tokens(name: str) -> None:
    for stream in recording.load(name).streams:
        tokens = [ResumeToken.from_trusted(value(event, b"_id")) for event in stream.events]
        assert all(earlier < later for earlier, later in pairwise(tokens))
