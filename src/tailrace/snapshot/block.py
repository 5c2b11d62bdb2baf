"""The events of a chunk as a block, made in compiled code if it is there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tailrace import kernel, raw_bson
from tailrace.event.event_block import EventBlock
from tailrace.oplog.cluster_time import ClusterTime
from tailrace.snapshot.event import snapshot_event

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
    parts: list[EventBlock] = []
    place = 0
    is_id_alone = not set(pattern or {}) - {"_id"}
    while place < len(documents):
        if is_id_alone and kernel.available():
            made = _compiled(documents[place:], namespace, uuid, start, position)
            place += len(made)
            parts.append(made)
        rest = documents[place : place + 1] if is_id_alone else documents[place:]
        events = [snapshot_event(one, namespace, uuid, start, pattern, position=position) for one in rest]
        parts.append(_block(np.frombuffer(b"".join(events), np.uint8), _offsets(events), start))
        place += len(rest)
    return EventBlock.join(parts) if parts else _block(np.empty(0, np.uint8), np.zeros(1, np.int64), start)


def _offsets(events: Sequence[bytes]) -> np.ndarray[Any, np.dtype[np.int64]]:
    offsets = np.zeros(len(events) + 1, np.int64)
    np.cumsum([len(event) for event in events], out=offsets[1:])
    return offsets


def _block(buffer: Any, offsets: Any, start: ClusterTime) -> EventBlock:
    count = len(offsets) - 1
    nowhere = np.zeros(count, np.int64)
    times, kinds = np.full(count, int(start), np.uint64), np.zeros(count, np.uint8)
    return EventBlock(buffer, offsets, times, kinds, nowhere, nowhere, nowhere, nowhere)


def _compiled(documents: Sequence[bytes], namespace: str, uuid: bytes, start: ClusterTime, position: int) -> EventBlock:
    from tailrace.kernel.snapshot_events import ChunkConstants, snapshot_events  # noqa: PLC0415  not without numba

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
    buffer, offsets = snapshot_events(b"".join(documents), len(documents), constants)
    return _block(buffer, offsets, start)


def key_string(token: bytes) -> bytes:
    """The key string of a token whose document key is empty, up to where the key's fields would stand."""
    data = raw_bson.find(token, b"_data")
    assert data is not None
    digits = raw_bson.value(token, data)[4:-1].decode()
    return bytes.fromhex(digits)[:-_CLOSING]
