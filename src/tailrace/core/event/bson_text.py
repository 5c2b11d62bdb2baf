"""BSON in the words of the server's messages, so that an error reads the same on both sides."""

from __future__ import annotations

import uuid
from typing import Any, Final

import bson
from bson.codec_options import CodecOptions, DatetimeConversion
from bson.errors import BSONError

_ANY_DATE: Final[CodecOptions[dict[str, Any]]] = CodecOptions(
    datetime_conversion=DatetimeConversion.DATETIME_AUTO, unicode_decode_error_handler="replace"
)


#: From how many bytes on texts and binary values are cut, and to how many.
_TEXT_BYTES_MAX: Final = 160
_TEXT_BYTES_SHOWN: Final = 150
_BYTES_MAX: Final = 80
_BYTES_SHOWN: Final = 70
#: The subtype of a UUID, and its size.
_UUID: Final = 4
_UUID_BYTES: Final = 16


def document_text(document: bytes) -> str:
    """A document the way messages about tokens and events write it: ``{_data: "82"}``."""
    try:
        return _text(bson.decode(document, codec_options=_ANY_DATE), spaced=False)
    except (BSONError, ValueError, OverflowError, RecursionError):
        return "a damaged document"


def spaced_document_text(document: bytes) -> str:
    """A document the way messages that print BSON write it: ``{ _id: { _data: "82" } }``, and ``{}`` when empty.

    Long strings and binary values are cut, as the server cuts them (strings measured on 6.0.27).
    """
    try:
        return _text(bson.decode(document, codec_options=_ANY_DATE), spaced=True)
    except (BSONError, ValueError, OverflowError, RecursionError):
        return "a damaged document"


def token_text(token_bson: bytes) -> str:
    """A resume token's document, ``{_data: "82..."[, _typeBits: BinData(0, "40")]}``."""
    return document_text(token_bson)


def _text(value: Any, *, spaced: bool) -> str:
    if isinstance(value, dict):
        inner = ", ".join(f"{name}: {_text(item, spaced=spaced)}" for name, item in value.items())
        return f"{{ {inner} }}" if spaced and inner else f"{{{inner}}}"
    if isinstance(value, list):
        inner = ", ".join(_text(item, spaced=spaced) for item in value)
        return f"[ {inner} ]" if spaced and inner else f"[{inner}]"
    if isinstance(value, bytes):
        if spaced and getattr(value, "subtype", 0) == _UUID and len(value) == _UUID_BYTES:
            return f'UUID("{uuid.UUID(bytes=bytes(value))}")'
        if spaced and len(value) > _BYTES_MAX:
            return f"BinData({getattr(value, 'subtype', 0)}, {value[:_BYTES_SHOWN].hex().upper()}...)"
        digits = value.hex().upper()
        return (
            f"BinData({getattr(value, 'subtype', 0)}, {digits})"
            if spaced
            else (f'BinData({getattr(value, "subtype", 0)}, "{digits}")')
        )
    if isinstance(value, str):
        if spaced and len(value.encode("utf-8", "surrogatepass")) >= _TEXT_BYTES_MAX:
            return f'"{value.encode("utf-8", "surrogatepass")[:_TEXT_BYTES_SHOWN].decode("utf-8", "replace")}..."'
        return f'"{value}"'
    if isinstance(value, bool):
        return "true" if value else "false"
    return "null" if value is None else str(value)
