"""Random documents as raw BSON: every type that the format has, also those that drivers cannot write any more
(undefined, symbol, DBPointer), odd numbers, odd names, duplicate names.

Everything is drawn from the ``random.Random`` that is handed in, so a seed gives the same bytes again.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable

from tailrace.core import raw_bson as rb

#: Names that could confuse a path; the server stores all of them.
ODD_NAMES = (
    b"a.b",
    b"a.",
    b".a",
    b".",
    b"$a",
    b"$",
    b"$a.b",
    b"a$b",
    b"",
    b"0",
    b"1",
    b"10",
    b"01",
    b"007",
    b"-1",
    b"_id",
    b"i",
    b"u",
    b"d",
    b"s",
    b"l",
    b"b",
    b"sa",
    b"$v",
    b"diff",
    b"op",
    b"ns",
    "ключ".encode(),
    "名".encode(),
    b"with space",
    b"x" * 130,
)
#: Names that also occur in an oplog entry, an event, a token or our columns.
BORROWED_NAMES = (
    b"count",
    b"ts",
    b"applyOps",
    b"prepare",
    b"partialTxn",
    b"commitTransaction",
    b"token",
    b"_data",
    b"_id._data",
    b"o",
    b"o2",
    b"ui",
    b"op",
    b"ns",
    b"wall",
    b"lsid",
    b"txnNumber",
    b"prevOpTime",
    b"fromMigrate",
    b"multiOpType",
    b"drop",
    b"create",
    b"renameCollection",
    b"to",
    b"type",
    b"diff",
    b"$set",
    b"operationType",
    b"clusterTime",
    b"documentKey",
    b"fullDocument",
    b"updateDescription",
    b"splitEvent",
    b"event",
)
PLAIN_NAMES = (b"a", b"b", b"c", b"d", b"e", b"f", b"g", b"h", b"name", b"total", b"items")
#: The largest of the small integers that most documents have for an ``_id``.
SMALL_IDS = 15
TEXTS = ("", "a", "plain text", "\x00", "nul\x00inside\x00", "ключ", "名前", "🙂", "$cash", "a.b", "x" * 300)


def string(text: str | bytes) -> bytes:
    return rb.encode_string(text)


def field_name(rng: random.Random) -> bytes:
    kind = rng.random()
    if kind < 0.15:
        return rng.choice(BORROWED_NAMES)
    return rng.choice(ODD_NAMES) if kind < 0.4 else rng.choice(PLAIN_NAMES)


def _double(rng: random.Random) -> bytes:
    fixed = (0.0, -0.0, 1.0, -1.0, 0.5, 1.1, -2.75, 1e308, 5e-324, -1e-310, 2.0**53, 2.0**63, -(2.0**63), 2.0**64)
    kind = rng.random()
    if kind < 0.4:
        return struct.pack("<d", rng.choice(fixed))
    if kind < 0.5:  # infinities and NaNs, also those with a payload and a sign
        return struct.pack("<Q", rng.choice((0x7FF, 0xFFF)) << 52 | rng.choice((0, 1 << 51, 1, rng.getrandbits(52))))
    if kind < 0.75:
        return struct.pack("<d", rng.uniform(-1000, 1000))
    return struct.pack("<Q", rng.getrandbits(64))


def _decimal(rng: random.Random) -> bytes:
    """A decimal128 from coefficient, exponent and sign; also zeros with an exponent, infinities and NaNs."""
    kind = rng.random()
    if kind < 0.1:
        return struct.pack("<QQ", 0, rng.choice((0x78 << 56, 0xF8 << 56, 0x7C << 56, 0xFC << 56)))
    digits = rng.choice((0, 1, 3, 10, 15, 16, 17, 30, 34))
    coefficient = 0 if digits == 0 else rng.randrange(10 ** (digits - 1), 10**digits)
    exponent = rng.choice((0, 0, -1, -2, -15, -34, 1, 5, 20, rng.randint(-6176, 6111)))
    high = (rng.getrandbits(1) << 63) | ((exponent + 6176) << 49) | (coefficient >> 64)
    return struct.pack("<QQ", coefficient & (2**64 - 1), high)


def _int32(rng: random.Random) -> bytes:
    return struct.pack("<i", rng.choice((0, 1, -1, 127, 128, 255, 2**31 - 1, -(2**31), rng.randint(-9999, 9999))))


def _int64(rng: random.Random) -> bytes:
    fixed = (0, 1, -1, 5, 2**31, -(2**31), 2**53, 2**53 + 1, 2**63 - 1, -(2**63))
    return struct.pack("<q", rng.choice((*fixed, rng.getrandbits(64) - 2**63, rng.randint(-9999, 9999))))


def _binary(rng: random.Random) -> bytes:
    subtype = rng.choice((0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 128, 255))
    data = rng.randbytes(16 if subtype in (3, 4, 5) else rng.choice((0, 1, 7, 254, 255, 300)))
    if subtype == 2:  # the old form carries its length a second time
        data = struct.pack("<i", len(data)) + data
    return struct.pack("<iB", len(data), subtype) + data


def _regex(rng: random.Random) -> bytes:
    return rng.choice((b"", b"^a.*$", b"[", b"x|y")) + b"\x00" + rng.choice((b"", b"i", b"ims", b"x")) + b"\x00"


def _code_with_scope(rng: random.Random) -> bytes:
    body = string("function() {}") + document(rng, depth=2, fields_max=2)
    return struct.pack("<i", len(body) + 4) + body


_SCALARS: tuple[tuple[int, Callable[[random.Random], bytes]], ...] = (
    (rb.DOUBLE, _double),
    (rb.STRING, lambda rng: string(rng.choice(TEXTS))),
    (rb.BINARY, _binary),
    (rb.UNDEFINED, lambda rng: b""),
    (rb.OBJECT_ID, lambda rng: rng.randbytes(12)),
    (rb.BOOL, lambda rng: rng.choice((b"\x00", b"\x01"))),
    (rb.DATE, _int64),
    (rb.NULL, lambda rng: b""),
    (rb.REGEX, _regex),
    (rb.DB_POINTER, lambda rng: string("db.coll") + rng.randbytes(12)),
    (rb.CODE, lambda rng: string(rng.choice(TEXTS))),
    (rb.SYMBOL, lambda rng: string(rng.choice(TEXTS))),
    (rb.CODE_WITH_SCOPE, _code_with_scope),
    (rb.INT32, _int32),
    (rb.TIMESTAMP, lambda rng: rng.randbytes(8)),
    (rb.INT64, _int64),
    (rb.DECIMAL128, _decimal),
    (rb.MIN_KEY, lambda rng: b""),
    (rb.MAX_KEY, lambda rng: b""),
)
_EVERYDAY = tuple(pair for pair in _SCALARS if pair[0] in (rb.DOUBLE, rb.STRING, rb.BOOL, rb.INT32, rb.INT64, rb.NULL))


def value(rng: random.Random, *, depth: int = 0) -> tuple[int, bytes]:
    """A type byte and the value's bytes."""
    if depth < 3:
        kind = rng.random()
        if kind < 0.15:
            return rb.OBJECT, document(rng, depth=depth + 1, fields_max=4)
        if kind < 0.3:
            return rb.ARRAY, array(rng, depth=depth + 1)
    type_, encode = rng.choice(_SCALARS if rng.random() < 0.5 else _EVERYDAY)
    return type_, encode(rng)


def array(rng: random.Random, *, depth: int = 0) -> bytes:
    parts = []
    for index in range(rng.randint(0, 5)):
        type_, data = value(rng, depth=depth)
        parts.append(rb.encode_element(type_, str(index).encode(), data))
    return rb.encode_document(*parts)


class UniqueNames(random.Random):
    """Draws documents in which no two fields share a name."""


def document(
    rng: random.Random, *, depth: int = 0, fields_max: int = 6, taken: frozenset[bytes] = frozenset()
) -> bytes:
    """A document. In one of twenty, two fields may have the same name (the format allows it, and the server stores it).
    Names that are ``taken`` do not occur."""
    parts, seen = [], set(taken)
    duplicates = rng.random() < 0.05 and not isinstance(rng, UniqueNames)
    for _ in range(rng.randint(0, fields_max)):
        name = field_name(rng)
        if name in seen and not duplicates:
            continue
        if depth == 0 and name == b"_id":
            continue
        # A replacement with such a field ends the streams, and the server writes a backtrace into its log each time.
        if depth == 0 and name == b"$v" and rng.random() < 0.997:
            continue
        seen.add(name)
        type_, data = value(rng, depth=depth)
        parts.append(rb.encode_element(type_, name, data))
    return rb.encode_document(*parts)


def identifier(rng: random.Random) -> bytes:
    """An ``_id`` element: mostly a small integer, so that later operations find it, otherwise any type allowed."""
    if rng.random() < 0.7:
        return rb.encode_element(rb.INT32, b"_id", struct.pack("<i", rng.randint(0, SMALL_IDS)))
    while True:
        type_, data = value(rng, depth=1)
        if type_ not in (rb.ARRAY, rb.REGEX, rb.UNDEFINED):
            return rb.encode_element(type_, b"_id", data)


_EVERYDAY_NAMES = frozenset((b"n", b"scores", b"lines", b"o", b"5", b"pad"))


def everyday_document(rng: random.Random, id_element: bytes) -> bytes:
    """A document for updates to work on: nested objects, arrays of numbers and of objects, and padding, without which a
    pipeline update would be logged as a replacement instead of a diff."""
    number = rng.randint
    scores = [rb.encode_element(rb.INT32, str(i).encode(), rb.encode_int32(number(0, 9))) for i in range(number(0, 6))]
    lines = []
    for index in range(number(0, 4)):
        line = rb.encode_document(
            rb.encode_element(rb.INT32, b"q", rb.encode_int32(number(0, 9))),
            rb.encode_element(rb.STRING, b"sku", string(rng.choice(TEXTS))),
        )
        lines.append(rb.encode_element(rb.OBJECT, str(index).encode(), line))
    inner = rb.encode_document(
        rb.encode_element(rb.INT32, b"x", rb.encode_int32(number(0, 9))),
        rb.encode_element(rb.OBJECT, b"y", document(rng, depth=2, fields_max=4)),
        rb.encode_element(rb.INT32, rng.choice((b"0", b"01", b"7")), rb.encode_int32(number(0, 9))),
    )
    return rb.encode_document(
        id_element,
        rb.encode_element(rb.INT32, b"n", rb.encode_int32(number(0, 99))),
        rb.encode_element(rb.ARRAY, b"scores", rb.encode_document(*scores)),
        rb.encode_element(rb.ARRAY, b"lines", rb.encode_document(*lines)),
        rb.encode_element(rb.OBJECT, b"o", inner),
        rb.encode_element(rb.OBJECT, b"5", document(rng, depth=2, fields_max=4)),
        rb.encode_element(rb.STRING, b"pad", string("p" * rng.choice((0, 50, 400)))),
        document_body(document(rng, fields_max=4, taken=_EVERYDAY_NAMES)),
    )


def document_body(raw: bytes) -> bytes:
    """The elements of a document without its length and its end."""
    return raw[4:-1]


def new_document(rng: random.Random) -> bytes:
    """What an insert writes: an everyday document or anything at all, sometimes without ``_id`` or with it last."""
    element = identifier(rng)
    kind = rng.random()
    if kind < 0.6:
        return everyday_document(rng, element)
    body = document_body(document(rng))
    if kind < 0.9:
        return rb.encode_document(element, body)
    if kind < 0.95:
        return rb.encode_document(body, element)
    return rb.encode_document(body)
