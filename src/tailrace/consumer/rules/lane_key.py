"""Which lane an event belongs to, read from its bytes.

The lane is a hash of the ``_id`` in the document key. Other fields of the key are left out: they are the shard key,
which may be refined, or changed by an update, while the document stays the same one. What is hashed is the KeyString of
the value, so that keys which compare equal (1, 1.0, NumberLong(1), Decimal128("1")) have one hash in every process.

An event without a document key, or whose operation is not one on a document, is a *barrier*: every lane must be done
with what came before it, and one lane handles it.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple
from zlib import crc32

from tailrace import raw_bson
from tailrace.errors import UsageError
from tailrace.event import keystring
from tailrace.event.resume_token import ResumeToken, token_order

#: The operations on one document: those that have a lane.
DOCUMENT_OPERATIONS: Final = frozenset((b"insert", b"update", b"replace", b"delete"))

#: An event of a server before 7.0 on a document whose whole key is an ObjectId: the token holds it at a fixed place.
_COMMON: Final = re.compile(
    rb"....\x03_id\x00....\x02_data\x00....(82[0-9A-F]{16}2B022C0100296E5A1004[0-9A-F]{32}46645F69640064([0-9A-F]{24})0004)\x00"
    rb"(?:\x05_typeBits\x00.{5}\x82?\x00)?\x00\x02operationType\x00....(?:insert|update|replace|delete)\x00",
    re.DOTALL,
)
_ROOT_HINT: Final = "Leave _id, operationType and documentKey in the events: lanes are chosen by them"


class PlacedEvent(NamedTuple):
    """What lanes need to know of an event. ``order`` is the place of its token (upper-case hex, in stream order);
    ``hash`` is ``None`` for a barrier."""

    order: bytes
    hash: int | None


def outline(event: bytes) -> PlacedEvent:
    """Read one event. Raises UsageError where a user's pipeline took away what the lane is chosen by, OplogFormatError
    where the bytes are no document."""
    common = _COMMON.match(event)
    if common is not None:
        return PlacedEvent(common[1], crc32(common[2]))
    fields = {element.name: element for element in raw_bson.elements(event)}
    token, operation = fields.get(b"_id"), fields.get(b"operationType")
    if token is None or token.type != raw_bson.OBJECT or operation is None or operation.type != raw_bson.STRING:
        raise UsageError("an event has no token or no operationType", hint=_ROOT_HINT)
    order = token_order(raw_bson.value(event, token))
    if raw_bson.value(event, operation)[4:-1] not in DOCUMENT_OPERATIONS:
        return PlacedEvent(order, None)
    key = fields.get(b"documentKey")
    if key is not None and key.type == raw_bson.OBJECT:
        document: bytes | None = raw_bson.value(event, key)
    elif b"splitEvent" in fields:
        # A later fragment of an event that was split has no key of its own: the token still has it.
        document = _key_in_token(raw_bson.value(event, token))
    else:
        document = None
    found = None if document is None else raw_bson.find(document, b"_id")
    if document is None or found is None:
        raise UsageError("a change of a document has no documentKey with an _id", hint=_ROOT_HINT)
    return PlacedEvent(order, key_hash(found.type, raw_bson.value(document, found)))


def key_hash(type_: int, value: bytes) -> int:
    """The 32-bit hash of an ``_id``, given as BSON type and value. Equal for values that compare equal."""
    if type_ == raw_bson.OBJECT_ID:
        return crc32(value.hex().upper().encode())
    return crc32(keystring.encode(type_, value)[0])


def _key_in_token(token: bytes) -> bytes | None:
    identifier = ResumeToken.parse(token).parts.event_identifier
    if identifier is None:
        return None
    inner = raw_bson.find(identifier, b"documentKey")
    if inner is not None and inner.type == raw_bson.OBJECT:
        return raw_bson.value(identifier, inner)
    return identifier
