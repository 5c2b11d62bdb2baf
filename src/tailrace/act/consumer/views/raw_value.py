"""Values as the bytes in which they are stored: what a view carries is not decoded on the way.

A string need not be UTF-8, and several types of BSON have no value of their own in Python (a symbol, undefined, a NaN
with a payload).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

import bson
from bson.codec_options import CodecOptions, DatetimeConversion
from bson.raw_bson import RawBSONDocument

from tailrace.core import raw_bson

MISSING: Final = object()
#: For what is read or shown, and never written: bytes that are not UTF-8 are shown as ``\\xff``.
SHOWN: Final[CodecOptions[dict[str, Any]]] = CodecOptions(
    tz_aware=True,
    datetime_conversion=DatetimeConversion.DATETIME_AUTO,
    unicode_decode_error_handler="backslashreplace",
)
_NOTHING: Final = frozenset({raw_bson.NULL, raw_bson.UNDEFINED})


class RawValue(NamedTuple):
    """A type of BSON and the bytes of a value."""

    type: int
    data: bytes

    @classmethod
    def of(cls, value: Any) -> RawValue:
        """A value of Python."""
        encoded = bson.encode({"v": value})
        element = raw_bson.find(encoded, b"v")
        assert element is not None
        return cls(element.type, raw_bson.value(encoded, element))

    @property
    def is_null(self) -> bool:
        return self.type in _NOTHING

    @property
    def identity(self) -> RawValue | int:
        """The same for whole numbers that are equal, and for nothing else."""
        if self.type in (raw_bson.INT32, raw_bson.INT64):
            return int.from_bytes(self.data, "little", signed=True)
        return self

    @property
    def shown(self) -> Any:
        """The value in Python, to be read and never written."""
        return bson.decode(self.under("v"), SHOWN)["v"]

    def under(self, name: str) -> bytes:
        """The document ``{name: value}``."""
        return raw_bson.encode_document(raw_bson.encode_element(self.type, name.encode(), self.data))

    def condition(self, operator: str = "$eq") -> RawBSONDocument:
        """``{"$eq": value}``, or with another operator, as a part of a command."""
        return RawBSONDocument(self.under(operator))


def one_of(values: Iterable[RawValue]) -> RawBSONDocument:
    """The condition ``{"$in": values}``."""
    items = [raw_bson.encode_element(value.type, str(n).encode(), value.data) for n, value in enumerate(values)]
    return RawValue(raw_bson.ARRAY, raw_bson.encode_document(*items)).condition("$in")


def value_at(document: bytes | None, path: str) -> RawValue | None:
    """The value at a path of names, ``None`` where there is none. No array is entered."""
    start = 0
    if document is None:
        return None
    names = path.encode().split(b".")
    for name in names[:-1]:
        element = raw_bson.find(document, name, start)
        if element is None or element.type != raw_bson.OBJECT:
            return None
        start = element.value_start
    element = raw_bson.find(document, names[-1], start)
    return None if element is None else RawValue(element.type, raw_bson.value(document, element))


def fields_of(document: bytes) -> Mapping[str, RawValue]:
    """The fields of a document."""
    return {
        element.name.decode(): RawValue(element.type, raw_bson.value(document, element))
        for element in raw_bson.elements(document)
    }


def shown(value: RawValue | None) -> Any:
    """As ``RawValue.shown``, ``MISSING`` where there is none."""
    return MISSING if value is None else value.shown
