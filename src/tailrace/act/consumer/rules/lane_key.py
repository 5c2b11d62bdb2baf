"""Which lane an event belongs to, read from its bytes.

By default the lane is a hash of the ``_id`` in the document key. Other fields of the key are left out: they are the
shard key, which may be refined, or changed by an update, while the document stays the same one. The hash is that of the
value's KeyString, so that keys that compare equal (1, 1.0, NumberLong(1), Decimal128("1")) have one hash in every
process.

A ``LaneKey`` chooses by something else. Its name is kept in the plan of the lanes, since processes that choose by
different keys would handle changes twice or never.

An event without a document key, or whose operation is not one on a document, is a *barrier*: every lane must be done
with what came before it, and one lane handles it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple
from zlib import crc32

import bson
from bson.codec_options import CodecOptions, DatetimeConversion

from tailrace.act.consumer.rules.unrun import refuse_unrun
from tailrace.core import raw_bson
from tailrace.core.event import keystring
from tailrace.core.event.resume_token import ResumeToken, token_order
from tailrace.errors import UsageError

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
    where the bytes are not a document."""
    common = _COMMON.match(event)
    if common is not None:
        return PlacedEvent(common[1], crc32(common[2]))
    fields, order, on_document = _head(event)
    if not on_document:
        return PlacedEvent(order, None)
    key = fields.get(b"documentKey")
    if key is not None and key.type == raw_bson.OBJECT:
        document: bytes | None = raw_bson.value(event, key)
    elif b"splitEvent" in fields:
        # A later fragment of an event that was split has no key of its own: the token still has it.
        document = _key_in_token(raw_bson.value(event, fields[b"_id"]))
    else:
        document = None
    element = None if document is None else raw_bson.find(document, b"_id")
    if document is None or element is None:
        raise UsageError("a change of a document has no documentKey with an _id", hint=_ROOT_HINT)
    return PlacedEvent(order, key_hash(element.type, raw_bson.value(document, element)))


def _head(event: bytes) -> tuple[dict[bytes, raw_bson.Element], bytes, bool]:
    """The fields of an event, its place, and whether its operation is one on a document."""
    fields = {element.name: element for element in raw_bson.elements(event)}
    token, operation = fields.get(b"_id"), fields.get(b"operationType")
    if token is None or token.type != raw_bson.OBJECT or operation is None or operation.type != raw_bson.STRING:
        raise UsageError("an event has no token or no operationType", hint=_ROOT_HINT)
    order = token_order(raw_bson.value(event, token))
    return fields, order, raw_bson.value(event, operation)[4:-1] in DOCUMENT_OPERATIONS


@dataclass(frozen=True)
class LaneKey:
    """What lanes are chosen by. ``name`` is the same in every process that chooses alike.

    ``hash_of``  from the bytes of a change of a document, its 32-bit hash; ``None``: it has no key, and every lane
                 waits for it, as at a drop
    """

    name: str
    hash_of: Callable[[bytes], int | None] = field(compare=False)

    def place(self, event: bytes) -> PlacedEvent:
        """What lanes need to know of an event. Raises as ``outline``."""
        _, order, on_document = _head(event)
        return PlacedEvent(order, self.hash_of(event) if on_document else None)


class ById(LaneKey):
    """The ``_id`` of the changed document."""

    def __init__(self) -> None:
        super().__init__("", lambda event: outline(event).hash)

    def place(self, event: bytes) -> PlacedEvent:
        """See LaneKey."""
        return outline(event)


BY_ID: Final = ById()
LaneKeyChoice = str | Callable[[Mapping[str, Any]], Any] | LaneKey | None
LaneKeys = tuple[LaneKey, ...]
_PATH: Final = "path:"
_ANY_VALUE: Final[CodecOptions[Mapping[str, Any]]] = CodecOptions(
    tz_aware=True,
    datetime_conversion=DatetimeConversion.DATETIME_AUTO,
    unicode_decode_error_handler="surrogateescape",
)


def lane_keys(choice: LaneKeyChoice | Sequence[LaneKeyChoice]) -> LaneKeys:
    """The keys that a process knows: the first is what it chooses by. Raises UsageError."""
    if isinstance(choice, (list, tuple)):
        return tuple(map(lane_key, choice)) or (BY_ID,)
    return (lane_key(choice),)  # type: ignore[arg-type]


def lane_key(choice: LaneKeyChoice) -> LaneKey:
    """The key that ``Listener(lane_key=...)`` names: a path in the event, or a function of the event (a dict) that
    gives any value of BSON. Raises UsageError."""
    if choice is None:
        return BY_ID
    if isinstance(choice, LaneKey):
        return choice
    if isinstance(choice, str):
        return _by_path(choice)
    name = getattr(choice, "__qualname__", "<>")
    if not callable(choice) or name.endswith(">"):
        raise UsageError(
            f"lane_key must be a path in the event or a function with a name, not {choice!r}",
            hint='For example lane_key="fullDocument.customer". Processes compare the name to see that they agree',
        )
    return LaneKey(f"function:{choice.__module__}.{name}", lambda event: _hash_by(choice, event))


def known_lane_key(name: str, own: LaneKeys) -> LaneKey:
    """The key called ``name`` in a plan. ``own`` are this process's. Raises UsageError where it is a function that this
    process has not been given."""
    for key in (BY_ID, *own):
        if key.name == name:
            return key
    if name.startswith(_PATH):
        return _by_path(name.removeprefix(_PATH))
    raise UsageError(
        f"the lanes are chosen by {name!r}, or were until now, and this process does not know it",
        hint="Start all processes of a resource with one lane_key; to change it, give the new one and the old one: "
        "lane_key=(new, old)",
    )


def _by_path(path: str) -> LaneKey:
    names = path.encode().split(b".")
    if not all(names) or b"\0" in path.encode():
        raise UsageError(f"{path!r} is not a path of field names in an event", hint='lane_key="fullDocument.customer"')
    if names == [b"documentKey", b"_id"]:
        return BY_ID
    return LaneKey(f"{_PATH}{path}", lambda event: _hash_at(names, event))


def _hash_at(names: list[bytes], event: bytes) -> int | None:
    value = value_in(event, names)
    return None if value is None else key_hash(*value)


def value_in(event: bytes, names: list[bytes]) -> tuple[int, bytes] | None:
    """Type and bytes of the value at a path of names; ``None`` where there is none. No array is entered."""
    start, found = 0, None
    for name in names:
        if found is not None and found.type != raw_bson.OBJECT:
            return None
        found = raw_bson.find(event, name, start)
        if found is None:
            return None
        start = found.value_start
    return None if found is None else (found.type, raw_bson.value(event, found))


def _hash_by(function: Callable[[Mapping[str, Any]], Any], event: bytes) -> int | None:
    try:
        key = function(bson.decode(event, _ANY_VALUE))
        refuse_unrun(key, "lane_key")
        if isinstance(key, str):
            return crc32(key.encode("utf-8", "surrogateescape"))
        if key is None:
            return None
        document = bson.encode({"": key})
    except UsageError:
        raise
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
        raise UsageError(f"the function lane_key failed at the change {outline_id(event)}: {said}") from error
    (element,) = raw_bson.elements(document)
    return key_hash(element.type, raw_bson.value(document, element))


def outline_id(event: bytes) -> str:
    """The resume token's text of an event, for messages."""
    return _head(event)[1].decode()


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
