"""Random documents for the expression fuzz: few names and few values, so that predicates hit, and every BSON type."""

from __future__ import annotations

import random
from decimal import Decimal

from tailrace.core.expression.values import value as v
from tailrace.core.expression.values.value import Value

NAMES = (b"a", b"b", b"c", b"d", b"e", b"0", b"1", b"x")
TEXTS = (
    "", "a", "b", "A", "abc", "ABC", "aBc1", "hello world", " pad ", "x,y,,z", "naïve", "日本語", "a.b", "$a", "12",
    "-7", "3.5", "1e3", "0x1A", "NaN", "true", "false", "5f0000000000000000000001", "2021-03-04T05:06:07.089Z",
    "2020-02-29",
    "émoji 😀 end", "tab\tnew\nline", "aaa", "abab", "Infinity", "null", "2016-12-31 23:59:59+0130", "ab\x00c",
)  # fmt: skip
#: Texts that are equal under some collations and not under others: case, accents, digits, signs, letters of languages.
COLLATED_TEXTS = (
    "", "a", "A", "á", "Á", "a\u0301", "ä", "Ä", "ae", "æ", "AE", "b", "B", "ab", "a b", "a-b", "AB", "aB", "abc",
    "ABC", "co-op", "coop", "CO-OP", "co op", "e", "é", "E", "È", "cote", "coté", "côte", "côté", "ß", "ss", "SS", "z",
    "Z", "å", "aa", "ö", "o", "ø", "10", "9", "010", "1", "a10", "a9", "ch", "cz", "h", "ll", "lz", "ñ", "n", "i", "I",
    "\u0131", "\u0130", "日本", "\u3042", "\u30a2", "\uff71", "!", " ", "\t", "x\x00y", "xy", "€", "$", "insert",
    "INSERT", "\u01c4", "dž", "\ufb00", "ff", "\u03a3", "\u03c2", "\u03c3",
)  # fmt: skip
NUMBERS = (0, 1, 2, 3, -1, -2, 5, 7, 10, 12, 100, 255, -128, 1000, v.INT32_MAX, v.INT32_MIN)
LONGS = (0, 1, 2, 3, -1, 5, 1 << 31, -(1 << 31) - 1, 1 << 53, (1 << 53) + 1, v.INT64_MAX, v.INT64_MIN, 1500000000000)
DOUBLES = (
    0.0, -0.0, 1.0, 2.0, 1.5, -1.5, 2.5, 0.1, -0.5, 3.0, 1e10, 1e300, -1e300, 1e-10, 123.456, float("nan"),
    float("inf"), float("-inf"), 2.0**31, 2.0**53, 2.0**63, -(2.0**63), 9.5, 0.3, 1e16, 1e-7, 12345678.9, 5e-324,
)  # fmt: skip
DECIMALS = (
    "0", "-0", "1", "1.0", "2.00", "1.5", "-1.5", "0.1", "0.10", "NaN", "Infinity", "-Infinity", "1E+10", "1E-10",
    "9999999999999999999999999999999999", "1E+6144", "1E-6176", "123.456", "-2", "5", "9223372036854775807", "0E+3",
)  # fmt: skip
DATES = (
    0,
    1,
    -1,
    951782400000,
    1583020799999,
    1609459200000,
    1614834367089,
    1388534400000,
    -62135596800000,
    253402300799999,
    4102444800000,
    -2208988800001,
)
IDS = (b"\x5f" + bytes(10) + b"\x01", bytes(12), b"\xff" * 12, b"\x50\x01\x02\x03" + bytes(8))
#: Moments at which clocks changed somewhere (seconds), for dates around them.
CHANGES = (
    1616893200,
    1635642000,
    1615705200,
    1636264800,
    1617462000,
    1633188000,
    323827200,
    828234000,
    -1693706400,
    1301191200,
)
PATTERNS = (b"a", b"^a", b"b$", b"[a-c]+", b"(a)(b)?", b"h.*o", b"\\d+", b"A", b"(?:x|y),", b"")


class Collated(random.Random):
    """A generator with texts whose equality depends on the collation."""

    texts = COLLATED_TEXTS


def scalar(rng: random.Random) -> Value:
    """A value that is no document and no array; common types more often."""
    kind = rng.choices(range(len(_SCALARS)), _WEIGHTS)[0]
    return _SCALARS[kind](rng)


def _decimal(rng: random.Random) -> Value:
    if rng.random() < 0.3:
        return v.decimal(Decimal(rng.randint(-(10**20), 10**20)).scaleb(rng.randint(-20, 5)))
    return v.decimal(Decimal(rng.choice(DECIMALS)))


def number(rng: random.Random) -> Value:
    return rng.choice(_SCALARS[:4])(rng)


def text(rng: random.Random) -> Value:
    return v.string(rng.choice(getattr(rng, "texts", TEXTS)))


#: Parts of regular expressions; most of them are accepted, some are refused.
_ATOMS = (
    b"a", b"b", b"c", b".", b"\\d", b"\\w", b"\\s", b"[a-c]", b"[^a]", b"[[:alpha:]]",
    b"[A-Z]", b"(a)", b"(?:b|c)", b"\\b",
    b"(a|b)", b"[\\w.]", b"\\x61", b"(?=a)", b"(?!b)", b"x|y", b"\\.", b" ", b"(?<n>a)",
    b"\\W", b"\\D", b"\\S", b"[\\d-]",
    "é".encode(), "日".encode(), b"\\Qa.b\\E", b"\\n", b"(?>a)", b"(?i:a)", b"\\p{L}", b"[]a]",
    b"[a\\]]", b"\\h", b"(", b"[b-a]",
)  # fmt: skip
_TIMES = (b"", b"", b"", b"*", b"+", b"?", b"*?", b"{2}", b"{1,2}", b"{,3}", b"++")


def pattern(rng: random.Random) -> bytes:
    """A regular expression in the server's notation."""
    if rng.random() < 0.4:
        return rng.choice(PATTERNS)
    body = b"".join(rng.choice(_ATOMS) + rng.choice(_TIMES) for _ in range(rng.randint(1, 4)))
    return rng.choice((b"", b"", b"^")) + body + rng.choice((b"", b"", b"$", b"\\z", b"\\Z"))


def date(rng: random.Random) -> Value:
    if rng.random() < 0.25:
        return v.date(rng.choice(CHANGES) * 1000 + rng.randint(-8, 8) * 1800000 + rng.choice((0, 0, 1, -1, 999)))
    if rng.random() < 0.2:
        return v.date(rng.randint(-2100000000000, 2100000000000))
    return v.date(rng.choice(DATES) if rng.random() < 0.6 else rng.randint(-(10**13), 10**13))


def _odd(rng: random.Random) -> Value:
    return rng.choice(
        (
            (v.MIN_KEY, b""),
            (v.MAX_KEY, b""),
            (v.UNDEFINED, b""),
            (v.SYMBOL, text(rng)[1]),
            (v.CODE, v.string("function() {}")[1]),
            (v.CODE_WITH_SCOPE, _scoped()),
            (v.DB_POINTER, v.string("db.c")[1] + rng.choice(IDS)),
            (v.REGEX, pattern(rng) + b"\x00" + rng.choice((b"", b"i", b"ms")) + b"\x00"),
        )
    )


def _scoped() -> bytes:
    body = v.string("f()")[1] + v.object_of([(b"s", v.int32(1))])[1]
    return (len(body) + 4).to_bytes(4, "little") + body


def binary(rng: random.Random) -> Value:
    data, subtype = rng.choice(
        ((b"", 0), (b"\x01", 0), (b"\xff\x80", 0), (b"\x05\x00\x10", 0), (bytes(16), 4), (b"ab", 128))
    )
    return (v.BINARY, len(data).to_bytes(4, "little") + bytes([subtype]) + data)


_SCALARS = (
    lambda rng: v.int32(rng.choice(NUMBERS)),
    lambda rng: v.double(rng.choice(DOUBLES)),
    lambda rng: v.int64(rng.choice(LONGS)),
    _decimal,
    text,
    lambda rng: v.boolean(rng.random() < 0.5),
    lambda rng: v.NULL,
    date,
    lambda rng: (v.OBJECT_ID, rng.choice(IDS)),
    lambda rng: v.timestamp(rng.choice((0, 1, 1600000000, (1 << 32) - 1)), rng.choice((1, 2, 7))),
    binary,
    _odd,
)
_WEIGHTS = (22, 12, 8, 8, 22, 6, 8, 10, 4, 3, 4, 6)


def any_value(rng: random.Random, depth: int = 2) -> Value:
    roll = rng.random()
    if depth > 0 and roll < 0.2:
        return document(rng, depth - 1)
    if depth > 0 and roll < 0.42:
        return array(rng, depth - 1)
    return scalar(rng)


def array(rng: random.Random, depth: int = 1) -> Value:
    size = rng.choice((0, 1, 2, 2, 3, 4))
    roll = rng.random()
    if roll < 0.3:
        return v.array_of([number(rng) for _ in range(size)])
    if roll < 0.45:
        return v.array_of([text(rng) for _ in range(size)])
    if roll < 0.65:
        return v.array_of([document(rng, depth - 1) for _ in range(size)])
    return v.array_of([any_value(rng, depth) for _ in range(size)])


def document(rng: random.Random, depth: int = 2) -> Value:
    if rng.random() < 0.05:
        reference = [(b"$ref", text(rng)), (b"$id", scalar(rng)), (b"$db", text(rng))]
        return v.object_of(reference[rng.choice((0, 0, 1)) : rng.choice((2, 3))])
    names = rng.sample(NAMES, rng.choice((0, 1, 2, 2, 3)))
    return v.object_of([(name, any_value(rng, depth)) for name in names])


def whole_document(rng: random.Random, number_: int) -> bytes:
    """A document of a collection: ``_id`` is its number."""
    names = rng.sample(NAMES[:5], rng.randint(2, 5)) + rng.sample(NAMES[5:], rng.randint(0, 1))
    fields = [(name, any_value(rng, 3)) for name in names]
    if rng.random() < 0.05:
        fields.append((rng.choice((b"$odd", b"dot.ted", b"")), scalar(rng)))
    return v.object_of([(b"_id", v.int32(number_)), *fields])[1]
