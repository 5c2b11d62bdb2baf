"""The events of a chunk as a block, made in compiled code if it is there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tailrace.core import kernel, raw_bson
from tailrace.core.event.event_block import EventBlock
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.read.snapshot.documents import RunOfDocuments
from tailrace.read.snapshot.event import snapshot_event

_CLOSING = 3  # of the document key, of the identifier, of the token


def snapshot_block(
    documents: Sequence[bytes],
    namespace: str,
    uuid: bytes,
    start: ClusterTime,
    pattern: Mapping[str, Any] | None,
    *,
    position: int = 0,
) -> EventBlock:
    """The block of the documents' events, in their order; see ``snapshot_event``. Besides the events' bytes the block
    holds only their time."""
    compiles = not set(pattern or {}) - {"_id"} and kernel.available()
    parts = [_block(np.empty(0, np.uint8), np.zeros(1, np.int64), start)]
    left = documents
    while left:
        if compiles:
            made, is_all = _compiled(left, namespace, uuid, start, position)
            parts.append(made)
            if is_all:
                break
            left = left[len(made) :]
        plain, left = (left[:1], left[1:]) if compiles else (left, [])
        events = [snapshot_event(one, namespace, uuid, start, pattern, position=position) for one in plain]
        parts.append(_block(np.frombuffer(b"".join(events), np.uint8), _offsets(events), start))
    return EventBlock.join(parts[1:] or parts)


def _offsets(events: Sequence[bytes]) -> np.ndarray[Any, np.dtype[np.int64]]:
    offsets = np.zeros(len(events) + 1, np.int64)
    np.cumsum([len(event) for event in events], out=offsets[1:])
    return offsets


def _block(buffer: Any, offsets: Any, start: ClusterTime) -> EventBlock:
    count = len(offsets) - 1
    nowhere = np.zeros(count, np.int64)
    times, kinds = np.full(count, int(start), np.uint64), np.zeros(count, np.uint8)
    return EventBlock(buffer, offsets, times, kinds, nowhere, nowhere, nowhere, nowhere)


def _compiled(
    documents: Sequence[bytes], namespace: str, uuid: bytes, start: ClusterTime, position: int
) -> tuple[EventBlock, bool]:
    """The events of the documents up to one that is left to the plain way, and whether these are all."""
    from tailrace.core.kernel.snapshot_events import ChunkConstants, snapshot_events  # noqa: PLC0415  not without numba

    # The plain code makes the event of an empty document; its parts are what all others have in common.
    empty = raw_bson.encode_document()
    event = snapshot_event(empty, namespace, uuid, start, None, position=position)
    token, document = raw_bson.find(event, b"_id"), raw_bson.find(event, b"fullDocument")
    key = raw_bson.find(event, b"documentKey")
    assert token is not None
    assert document is not None
    assert key is not None
    constants = ChunkConstants(
        key_string(raw_bson.value(event, token)),
        event[token.end : document.value_start],
        event[document.end : key.start],
    )
    raw = documents.buffer if isinstance(documents, RunOfDocuments) else b"".join(documents)
    buffer, offsets, is_all = snapshot_events(raw, constants)
    return _block(buffer, offsets, start), is_all


def key_string(token: bytes) -> bytes:
    """The key string of a token whose document key is empty, up to where the key's fields would stand."""
    data = raw_bson.find(token, b"_data")
    assert data is not None
    digits = raw_bson.value(token, data)[4:-1].decode()
    return bytes.fromhex(digits)[:-_CLOSING]
