"""The events of a snapshot: existing documents in the shape of change events."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from tailrace.core import raw_bson
from tailrace.core.event.resume_token import encode_event_token
from tailrace.core.oplog.cluster_time import ClusterTime

OPERATION_TYPE: Final = "snapshot"
_OPERATION: Final = raw_bson.encode_element(raw_bson.STRING, b"operationType", raw_bson.encode_string(OPERATION_TYPE))
#: After the collection's UUID a token of a copy has an identifier that begins with this operation type.
_COPIED: Final = re.compile(
    "6E5A1004[0-9A-F]{32}463C" + (b"operationType\0" + b"<" + OPERATION_TYPE.encode() + b"\0").hex().upper()
)


def document_key(document: bytes, pattern: Mapping[str, Any] | None) -> bytes:
    """The document key, as events of the collection have it: the shard key's fields, then ``_id``."""
    names = [name.encode() for name in pattern or {}]
    parts = []
    for name in [*names, *([] if b"_id" in names else [b"_id"])]:
        found = _at(document, name)
        if found is not None:
            parts.append(raw_bson.encode_element(found[0], name, found[1]))
    return raw_bson.encode_document(*parts)


def _at(document: bytes, path: bytes) -> tuple[int, bytes] | None:
    first, dot, rest = path.partition(b".")
    element = raw_bson.find(document, first)
    if element is None:
        return None
    value = raw_bson.value(document, element)
    if not dot:
        return element.type, value
    return _at(value, rest) if element.type == raw_bson.OBJECT else None


def is_of_copy(token: str) -> bool:
    """Whether a token, by its hexadecimal digits, names a document of a copy and not an event of the stream."""
    return _COPIED.search(token) is not None


def snapshot_event(
    document: bytes,
    namespace: str,
    uuid: bytes,
    start: ClusterTime,
    pattern: Mapping[str, Any] | None,
    *,
    position: int = 0,
) -> bytes:
    """The event of a document: ``operationType`` "snapshot", ``fullDocument``, ``ns``, ``documentKey``.

    ``clusterTime`` is the time that the stream starts at; the document may be newer. ``_id`` is made like a resume
    token: it names this document in this snapshot and sorts before every event of the stream, but no stream can be
    resumed from it. ``position`` orders chunks: every ``_id`` of a later chunk is larger.
    """
    database, _, name = namespace.encode().partition(b".")
    key = document_key(document, pattern)
    key_element = raw_bson.encode_element(raw_bson.OBJECT, b"documentKey", key)
    token = encode_event_token(
        start,
        version=2,
        txn_op_index=position,
        from_invalidate=False,
        uuid=uuid,
        identifier=raw_bson.encode_document(_OPERATION, key_element),
    )
    names = (
        raw_bson.encode_element(raw_bson.STRING, b"db", raw_bson.encode_string(database)),
        raw_bson.encode_element(raw_bson.STRING, b"coll", raw_bson.encode_string(name)),
    )
    return raw_bson.encode_document(
        raw_bson.encode_element(raw_bson.OBJECT, b"_id", token),
        _OPERATION,
        raw_bson.encode_element(raw_bson.TIMESTAMP, b"clusterTime", int(start).to_bytes(8, "little")),
        raw_bson.encode_element(raw_bson.OBJECT, b"fullDocument", document),
        raw_bson.encode_element(raw_bson.OBJECT, b"ns", raw_bson.encode_document(*names)),
        key_element,
    )
