"""BSON in the words of the server's messages, so that an error reads the same on both sides."""

from __future__ import annotations

import datetime
import re
import uuid
from typing import Any, Final

import bson
from bson.code import Code
from bson.codec_options import CodecOptions, DatetimeConversion
from bson.datetime_ms import DatetimeMS
from bson.errors import BSONError
from bson.max_key import MaxKey
from bson.min_key import MinKey
from bson.objectid import ObjectId
from bson.regex import Regex

_ANY_DATE: Final[CodecOptions[dict[str, Any]]] = CodecOptions(
    datetime_conversion=DatetimeConversion.DATETIME_MS, unicode_decode_error_handler="replace"
)


#: From how many bytes on texts and binary values are cut, and to how many.
_TEXT_BYTES_MAX: Final = 160
_TEXT_BYTES_SHOWN: Final = 150
_BYTES_MAX: Final = 80
_BYTES_SHOWN: Final = 70
#: The subtype of a UUID, and its size.
_UUID: Final = 4
_UUID_BYTES: Final = 16
#: The dates that have a text, and how far apart two days of the same name are in the calendar's cycle.
_YEAR_0_MS: Final = -62_167_219_200_000
_YEAR_9999_MS: Final = 253_402_300_799_999
_YEARS_400_MS: Final = 146_097 * 86_400_000
_FLAGS: Final = {
    "i": re.IGNORECASE,
    "l": re.LOCALE,
    "m": re.MULTILINE,
    "s": re.DOTALL,
    "u": re.UNICODE,
    "x": re.VERBOSE,
}


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
        return _binary_text(value, spaced=spaced)
    if isinstance(value, Code):
        return _code_text(value, spaced=spaced)
    if isinstance(value, str):
        if spaced and len(value.encode("utf-8", "surrogatepass")) >= _TEXT_BYTES_MAX:
            return f'"{value.encode("utf-8", "surrogatepass")[:_TEXT_BYTES_SHOWN].decode("utf-8", "replace")}..."'
        return f'"{value}"'
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return _double_text(value, spaced=spaced)
    if isinstance(value, DatetimeMS):
        return f"new Date({int(value)})" if spaced else _date_text(int(value))
    if isinstance(value, ObjectId):
        return f"ObjectId('{value}')" if spaced else str(value)
    if isinstance(value, Regex):
        flags = "".join(letter for letter, flag in _FLAGS.items() if value.flags & flag)
        return f"/{value.pattern}/{flags}"
    if isinstance(value, MinKey | MaxKey):
        return type(value).__name__
    return "null" if value is None else str(value)


def _binary_text(value: bytes, *, spaced: bool) -> str:
    subtype = getattr(value, "subtype", 0)
    if not spaced:
        return f'BinData({subtype}, "{value.hex().upper()}")'
    if subtype == _UUID and len(value) == _UUID_BYTES:
        return f'UUID("{uuid.UUID(bytes=bytes(value))}")'
    if len(value) > _BYTES_MAX:
        return f"BinData({subtype}, {value[:_BYTES_SHOWN].hex().upper()}...)"
    return f"BinData({subtype}, {value.hex().upper()})"


def _code_text(value: Code, *, spaced: bool) -> str:
    if value.scope is None:
        return str(value) if spaced else f'Code("{value}")'
    scope = _text(value.scope, spaced=True)
    return f"CodeWScope( {value}, {scope})" if spaced else f'CodeWScope("{value}", {scope})'


def _double_text(value: float, *, spaced: bool) -> str:
    if not spaced:
        return f"{value:.6g}"
    text = f"{value:.16g}"
    return text if "." in text else f"{text}.0"


def _date_text(ms: int) -> str:
    if not _YEAR_0_MS <= ms <= _YEAR_9999_MS:
        return "illegal date"
    # Python's calendar has no year 0: the one that is 400 years later has the same days.
    years = 400 if ms < 0 else 0
    when = datetime.datetime(1970, 1, 1) + datetime.timedelta(milliseconds=ms + (_YEARS_400_MS if years else 0))
    return f"{when.year - years:04}-{when:%m-%dT%H:%M:%S}.{when.microsecond // 1000:03}Z"
