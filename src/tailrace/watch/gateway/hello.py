"""What the server says about itself in a reply to hello, rewritten as if the gateway were the only member, or a mongos.
No I/O.

Drivers believe these replies and connect to the names in them. Left as they are they would lead every client past the
gateway, and nobody would notice. As the only member of a replica set, each gateway is a set of its own, and a driver
that is given two of them drops one. Of several mongos it uses whichever answers.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from tailrace.core import raw_bson
from tailrace.core.raw_bson import ARRAY, STRING, Element, encode_document, encode_element, encode_string

#: All names that the command has had.
HELLO_NAMES: Final = frozenset((b"hello", b"isMaster", b"ismaster"))
_OTHER_MEMBERS: Final = frozenset((b"passives", b"arbiters"))
#: What only members of a replica set say.
_OF_MEMBERS: Final = _OTHER_MEMBERS | {
    b"hosts",
    b"me",
    b"primary",
    b"setName",
    b"setVersion",
    b"electionId",
    b"secondary",
    b"arbiterOnly",
    b"passive",
    b"hidden",
    b"tags",
    b"isreplicaset",
    b"isImplicitDefaultMajorityWC",
    b"lastWrite",
}
_MONGOS: Final = encode_element(STRING, b"msg", encode_string("isdbgrid"))


def rewritten(reply: bytes, address: str, compressors: Collection[str], *, as_mongos: bool = False) -> bytes:
    """The reply with ``address``, ``host:port``, as the only member. A mongos names no members, and is given none.

    ``compressors``  those that the gateway can read; others are not offered
    ``as_mongos``    a member of a replica set is presented as a mongos

    Everything else stays as it came.
    """
    if as_mongos and raw_bson.find(reply, b"setName") is not None:
        reply = _mongos(reply)
    parts: list[bytes] = []
    is_primary = _is_primary(reply)
    for element in raw_bson.elements(reply):
        part: bytes | None = reply[element.start : element.end]
        if element.name == b"hosts" and element.type == ARRAY:
            part = _array(b"hosts", [address])
        elif element.name == b"me":
            part = _text(b"me", address)
        elif element.name == b"primary":
            # Behind a secondary the primary is another one: there is no name for it here.
            part = _text(b"primary", address) if is_primary else None
        elif element.name in _OTHER_MEMBERS:
            part = None
        elif element.name == b"compression" and element.type == ARRAY:
            part = _compression(reply, element, compressors)
        if part is not None:
            parts.append(part)
    return encode_document(*parts)


def _mongos(reply: bytes) -> bytes:
    kept = (reply[each.start : each.end] for each in raw_bson.elements(reply) if each.name not in _OF_MEMBERS)
    return encode_document(*kept, _MONGOS)


def _is_primary(reply: bytes) -> bool:
    for name in (b"isWritablePrimary", b"ismaster"):
        element = raw_bson.find(reply, name)
        if element is not None:
            return raw_bson.value(reply, element) == b"\x01"
    return False


def _compression(reply: bytes, element: Element, compressors: Collection[str]) -> bytes | None:
    array = raw_bson.value(reply, element)
    offered = [
        raw_bson.read_string(array, each.value_start).decode("utf-8", "replace")
        for each in raw_bson.elements(array)
        if each.type == STRING
    ]
    usable = [name for name in offered if name in compressors]
    return _array(b"compression", usable) if usable else None


def _text(name: bytes, text: str) -> bytes:
    return encode_element(STRING, name, encode_string(text))


def _array(name: bytes, texts: list[str]) -> bytes:
    return encode_element(ARRAY, name, encode_document(*(_text(b"%d" % i, text) for i, text in enumerate(texts))))
