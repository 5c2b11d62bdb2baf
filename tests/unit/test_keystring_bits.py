"""Type bits of a token as the server stores them, and keys whose bits do not fit their numbers."""

from __future__ import annotations

import ctypes
from itertools import pairwise

import bson
import pytest
from bson.decimal128 import Decimal128
from bson.int64 import Int64

from tailrace.core import raw_bson
from tailrace.core.event import keystring
from tailrace.core.event.resume_token import ResumeToken
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.errors import InvalidResumeToken

MEBI = 1 << 20


@pytest.mark.parametrize(
    ("stored", "bare"),
    [
        (b"", b""),
        (b"\x00", b""),
        (b"\x01", b"\x01"),
        (b"\x7f", b"\x7f"),
        (b"\x81\x80", b"\x80"),
        (b"\x82\x01\x02", b"\x01\x02"),
        (b"\xff" + bytes(range(127)), bytes(range(127))),
        (b"\x80" + (128).to_bytes(4, "little") + bytes(128), bytes(128)),
        (b"\x80" + (128).to_bytes(4, "little") + bytes(130), bytes(128)),
    ],
)
def test_stored_bits_are_unpacked(stored: bytes, bare: bytes) -> None:
    assert keystring.unpack_type_bits(stored) == bare


@pytest.mark.parametrize(
    ("stored", "code", "words"),
    [
        (b"\x82\x01", 15, r"Invalid advance \(2\) past end of buffer\[1\]"),
        (b"\x80\x01\x00\x00", 15, r"too small to read \(4\) bytes out of buffer\[3\]"),
        (b"\x80\x80\x00\x00\x00", 15, r"Invalid advance \(128\) past end of buffer\[0\]"),
        (b"\x80\x7f\x00\x00\x00" + bytes(127), 50910, "overlong"),
        (b"\x80" + (64 * MEBI - 5).to_bytes(4, "little"), 15, "Invalid advance"),
        (b"\x80" + (64 * MEBI - 4).to_bytes(4, "little"), 13548, r"grow\(\) to 67108865 bytes"),
    ],
)
def test_stored_bits_of_another_size_are_refused(stored: bytes, code: int, words: str) -> None:
    with pytest.raises(InvalidResumeToken, match=words) as refused:
        keystring.unpack_type_bits(stored)
    assert refused.value.code == code


@pytest.mark.parametrize("count", [1, 7, 8, 9, 1015, 1016, 1017, 1024, 1025])
def test_packed_bits_are_unpacked_to_the_same(count: int) -> None:
    bits = "0" * (count - 1) + "1"
    stored = keystring.pack_type_bits(bits)
    assert stored is not None
    bare = keystring.unpack_type_bits(stored)
    assert int.from_bytes(bare, "little") == 1 << (count - 1)
    assert keystring.pack_type_bits("0" * count) is None


#: Ascending. They include the borders between the key's forms: tiny numbers, 15 digits, 2^53, 2^63 and the largest
#: double, and the next decimal on each side of one.
ASCENDING = (
    "-Infinity", "-9E+6144", "-1.797693134862315708145274237317043E+308", "-1E+19", "-9223372036854775808.5",
    "-72057594037927937.25", "-9007199254740993.5", "-9007199254740992", "-1.5", "-1.000000000000000000000000000000001",
    "-1", "-0.1000000000000000000000000000000001", "-0.1", "-2.225073858507201383090232717332405E-308", "-1E-330",
    "-1E-6176", "0E-6176", "1E-6176", "1E-330", "4.940656458412465441765687928682213E-324",
    "2.225073858507201383090232717332404E-308", "2.225073858507201383090232717332405E-308",
    "0.09999999999999999999999999999999999", "0.1", "0.1000000000000000000000000000000001", "0.3", "1",
    "1.000000000000000000000000000000001", "1.00000000000001", "123456789012345.6", "999999999999999.9",
    "9007199254740991.5", "9007199254740992", "9007199254740993.5", "36028797018963967.5", "36028797018963968.5",
    "72057594037927936.5", "72057594037927937.25", "9223372036854775807", "9223372036854775807.5",
    "9223372036854775808", "9223372036854775808.5", "1E+19", "1.797693134862315708145274237317043E+308",
    "1.797693134862315708145274237317044E+308", "1E+309", "9E+6144", "Infinity",
)  # fmt: skip


def key(number: str) -> bytes:
    return keystring.encode(raw_bson.DECIMAL128, Decimal128(number).bid)[0]


def test_keys_of_decimals_sort_as_the_numbers_do() -> None:
    keys = [key(number) for number in ASCENDING]
    assert [pair for pair, (low, high) in zip(pairwise(ASCENDING), pairwise(keys), strict=True) if low >= high] == []


@pytest.mark.parametrize(
    "number",
    [*ASCENDING, "-0E-6176", "0E+6111", "-0E+6111", "0", "-0", "1E+6111", "NaN", "1.0", "1.50", "0.10", "1.5E+20"],
)
def test_a_token_keeps_a_decimal_to_its_last_zero(number: str) -> None:
    identifier = bson.encode({"_id": Decimal128(number)})
    token = ResumeToken(ClusterTime.of(5, 1), uuid=bytes(16), event_identifier=identifier, version=1)
    parts = ResumeToken.parse(bson.decode(token.to_bson())).parts
    assert parts.event_identifier == identifier


def test_a_large_decimal_with_the_type_bits_of_another_type_is_refused() -> None:
    identifier = bson.encode({"_id": Decimal128("1E+309")})
    document = bson.decode(ResumeToken(ClusterTime.of(5, 1), uuid=bytes(16), event_identifier=identifier).to_bson())
    with pytest.raises(InvalidResumeToken, match="Invalid type bits for decimal number") as refused:
        _ = ResumeToken.parse({**document, "_typeBits": b"\x00"}).parts
    assert refused.value.code == 50818


@pytest.mark.parametrize("number", [5_000_000_000, 7_000_000_000, -5_000_000_000, 1 << 31, -(1 << 31) - 1])
def test_a_large_integer_without_the_type_bits_of_a_long_loses_its_upper_bits(number: int) -> None:
    """Like a cast in C. No test had a key whose integer is larger than its type."""
    identifier = bson.encode({"_id": Int64(number)})
    document = bson.decode(ResumeToken(ClusterTime.of(5, 1), uuid=bytes(16), event_identifier=identifier).to_bson())
    found = ResumeToken.parse({"_data": document["_data"]}).parts.event_identifier
    assert found == bson.encode({"_id": ctypes.c_int32(number).value})


@pytest.mark.parametrize("fragment", [None, 1])
@pytest.mark.parametrize("key", [5, "x", Decimal128("1.50"), {"a": Decimal128("0E+3")}, None], ids=str)
def test_the_key_of_a_token_s_identifier_is_known_where_it_is_parsed(key: object, fragment: int | None) -> None:
    for version, identifier in ((1, {"_id": key}), (2, {"operationType": "insert", "documentKey": {"_id": key}})):
        encoded = bson.encode(identifier)
        number = fragment if version == 2 else None
        token = ResumeToken(
            ClusterTime.of(5, 1), uuid=bytes(16), event_identifier=encoded, version=version, fragment_num=number
        )
        parts = ResumeToken.parse(bson.decode(token.to_bson())).parts
        assert parts.identifier_key == keystring.encode(raw_bson.OBJECT, encoded)[0]


@pytest.mark.parametrize(("word", "number"), [(0x7FE0 << 48, "Infinity"), (0x7FF0 << 48, "NaN")])
def test_an_infinite_key_of_a_decimal_has_no_continuation(word: int, number: str) -> None:
    """A key that no server writes, in the form of a double. No test had one that does not end with a bit of a decimal's
    continuation."""
    written, bits = keystring.encode(raw_bson.DECIMAL128, Decimal128("Infinity").bid)
    assert written.endswith(b"\xff" * 8)

    def read(word: int) -> tuple[int, bytes]:
        crafted = written[:-8] + word.to_bytes(8, "big")
        reader = keystring.KeyReader(crafted, keystring.pack_type_bits(bits) or b"")
        return reader.value(reader.take_byte())

    assert read(word) == (raw_bson.DECIMAL128, Decimal128(number).bid)
    with pytest.raises(InvalidResumeToken, match="Invalid decimal continuation") as refused:
        read(word | 1)
    assert refused.value.code == 50850


@pytest.mark.parametrize(
    ("kind", "level"),
    [
        (keystring.ARRAY, bytes([keystring.ARRAY])),
        (keystring.OBJECT, bytes([keystring.OBJECT]) + b"a\0" + bytes([keystring.OBJECT])),
    ],
)
def test_a_key_that_is_nested_too_deeply_is_refused(kind: int, level: bytes) -> None:
    """Tests had objects nested so deeply, but not arrays."""
    reader = keystring.KeyReader(level * 250)
    with pytest.raises(InvalidResumeToken, match="maximum allowable BSON nesting depth") as refused:
        reader.value(kind)
    assert refused.value.code == 15
