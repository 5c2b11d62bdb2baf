"""BSON types that PyMongo's codec decodes to something else, as the documents by which Extended JSON (v2) represents
them.

``bson.decode`` makes a string of a symbol, ``None`` of undefined and a DBRef of a DBPointer, so ``json_util`` cannot
write them with their own types. VARIANT columns keep them (``variant.py``), and with this module JSON columns do too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from tailrace.core import raw_bson

_TRUE: Final = b"\x01"


def with_lost_types(kind: int, value: bytes) -> tuple[int, bytes]:
    """A BSON value with each symbol, undefined value and DBPointer in it, at any depth, put as its Extended JSON:
    ``{"$symbol": text}``, ``{"$undefined": true}``, ``{"$dbPointer": {"$ref": namespace, "$id": ObjectId}}``."""
    if kind in (raw_bson.OBJECT, raw_bson.ARRAY):
        return kind, _document(value)
    if kind == raw_bson.CODE_WITH_SCOPE:
        scope = 4 + raw_bson.value_end(value[4:], raw_bson.STRING, 0, len(value) - 4)
        changed = value[4:scope] + _document(value[scope:])
        return kind, raw_bson.encode_int32(4 + len(changed)) + changed
    maker = _MAKERS.get(kind)
    return (kind, value) if maker is None else (raw_bson.OBJECT, maker(value))


def _document(document: bytes) -> bytes:
    parts = []
    for element in raw_bson.elements(document):
        kind, value = with_lost_types(element.type, raw_bson.value(document, element))
        parts.append(raw_bson.encode_element(kind, element.name, value))
    return raw_bson.encode_document(*parts)


def _db_pointer(value: bytes) -> bytes:
    fields = raw_bson.encode_document(
        raw_bson.encode_element(raw_bson.STRING, b"$ref", value[:-12]),
        raw_bson.encode_element(raw_bson.OBJECT_ID, b"$id", value[-12:]),
    )
    return raw_bson.encode_document(raw_bson.encode_element(raw_bson.OBJECT, b"$dbPointer", fields))


_MAKERS: Final[dict[int, Callable[[bytes], bytes]]] = {
    raw_bson.SYMBOL: lambda value: raw_bson.encode_document(
        raw_bson.encode_element(raw_bson.STRING, b"$symbol", value)
    ),
    raw_bson.UNDEFINED: lambda value: raw_bson.encode_document(
        raw_bson.encode_element(raw_bson.BOOL, b"$undefined", _TRUE)
    ),
    raw_bson.DB_POINTER: _db_pointer,
}
