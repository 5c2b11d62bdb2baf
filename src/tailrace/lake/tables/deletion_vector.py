"""Delta's deletion vectors: which rows of a data file are gone, as a commit says it without another file.

A vector is a set of row numbers, in the portable form of Roaring bitmaps for numbers of 64 bits, after a magic number
(the protocol is public, https://github.com/delta-io/delta/blob/master/PROTOCOL.md, "Deletion Vector Format"). It
stands in the log itself, as Z85 text (``storageType`` ``i``): so no other file has to be on the device before a commit,
none can be lost, and the commit's seal covers it. A vector in any other form is another program's and is refused.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

#: Row numbers, ascending, none twice.
RowNumbers = npt.NDArray[np.int64]

_MAGIC: Final = 1681511377
_COOKIE: Final = 12346
#: A container of more numbers than this is a bitmap.
_ARRAY_MAX: Final = 4096
_BITS: Final = 1 << 16
_INLINE: Final = "i"
_DIGITS: Final = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
_CHARACTERS: Final = np.frombuffer(_DIGITS.encode(), np.uint8)
_POWERS: Final = 85 ** np.arange(4, -1, -1, dtype=np.uint64)
NONE: Final[RowNumbers] = np.zeros(0, np.int64)


def vector_of(rows: RowNumbers) -> dict[str, Any]:
    """The ``deletionVector`` of an ``add`` or ``remove`` for these rows of its file."""
    data = struct.pack("<IQI", _MAGIC, 1, 0) + _bitmap(rows)
    return {
        "storageType": _INLINE,
        "pathOrInlineDv": _z85(data),
        "sizeInBytes": len(data),
        "cardinality": len(rows),
    }


def rows_of(vector: Mapping[str, Any] | None) -> RowNumbers:
    """The rows that a ``deletionVector`` names. Raises ValueError where it is not one of ours."""
    if vector is None:
        return NONE
    if vector.get("storageType") != _INLINE:
        raise ValueError("a deletion vector that is not in the log")
    data = _from_z85(str(vector["pathOrInlineDv"]))[: int(vector["sizeInBytes"])]
    try:
        magic, count, key = struct.unpack_from("<IQI", data)
        if (magic, count, key) != (_MAGIC, 1, 0):
            raise ValueError("a deletion vector in another form")
        rows = _numbers(data[16:])
    except struct.error as error:
        raise ValueError("a deletion vector that is cut short") from error
    if len(rows) != vector["cardinality"]:
        raise ValueError("a deletion vector with another number of rows than it says")
    return rows


def _bitmap(rows: RowNumbers) -> bytes:
    """A bitmap of 32-bit numbers without runs: the keys of its containers with their sizes, where each begins, and the
    containers."""
    high = rows >> 16
    keys, starts = np.unique(high, return_index=True)
    containers: list[bytes] = []
    heads, sizes = bytearray(), []
    for key, low in zip(keys.tolist(), np.split(rows & 0xFFFF, starts[1:]), strict=True):
        heads += struct.pack("<HH", key, len(low) - 1)
        if len(low) <= _ARRAY_MAX:
            containers.append(low.astype("<u2").tobytes())
        else:
            bits = np.zeros(_BITS, np.uint8)
            bits[low] = 1
            containers.append(np.packbits(bits, bitorder="little").tobytes())
        sizes.append(len(containers[-1]))
    first = 8 + 8 * len(keys)
    offsets = first + np.cumsum([0, *sizes[:-1]])
    return b"".join([struct.pack("<II", _COOKIE, len(keys)), heads, offsets.astype("<u4").tobytes(), *containers])


def _numbers(data: bytes) -> RowNumbers:
    cookie, count = struct.unpack_from("<II", data)
    if cookie != _COOKIE or not 0 < count <= _BITS:
        raise ValueError("a deletion vector in another form")
    place, found = 8 + 8 * count, []
    for number in range(count):
        key, less = struct.unpack_from("<HH", data, 8 + 4 * number)
        size = 2 * (less + 1) if less < _ARRAY_MAX else _BITS // 8
        part = data[place : place + size]
        if len(part) != size:
            raise ValueError("a deletion vector that is cut short")
        low = (
            np.frombuffer(part, "<u2").astype(np.int64)
            if less < _ARRAY_MAX
            else np.flatnonzero(np.unpackbits(np.frombuffer(part, np.uint8), bitorder="little"))
        )
        found.append((key << 16) + low)
        place += size
    rows: RowNumbers = np.concatenate(found)
    return rows


def _z85(data: bytes) -> str:
    """Each four bytes as five digits of base 85, the first one highest; zeros fill up the last four."""
    words = np.frombuffer(data + bytes(-len(data) % 4), ">u4").astype(np.uint64)
    return _CHARACTERS[(words[:, None] // _POWERS % np.uint64(85)).astype(np.intp)].tobytes().decode()


def _from_z85(text: str) -> bytes:
    places = np.full(256, 255, np.uint8)
    places[_CHARACTERS] = np.arange(85)
    digits = places[np.frombuffer(text.encode("latin-1", "replace"), np.uint8)]
    if len(digits) % 5 or (digits == 255).any():
        raise ValueError("a deletion vector that is not Z85")
    words = (digits.reshape(-1, 5).astype(np.uint64) * _POWERS).sum(axis=1)
    if (words >> np.uint64(32)).any():
        raise ValueError("a deletion vector that is not Z85")
    return bytes(words.astype(">u4").tobytes())
