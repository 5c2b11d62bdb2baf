"""Type bits of a token as the server stores them, and keys whose bits do not fit their numbers."""

from __future__ import annotations

import bson
import pytest
from bson.decimal128 import Decimal128

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


@pytest.mark.parametrize(
    "number",
    ["0E-6176", "-0E-6176", "0E+6111", "-0E+6111", "0", "-0", "1E-6176", "-1E-6176", "9E+6144", "1E+6111", "NaN",
     "Infinity", "-Infinity", "9007199254740993", "1.0", "0.1", "1E+19", "-1E+19", "1.5E+20"],
)  # fmt: skip
def test_a_token_keeps_a_decimal_to_its_last_zero(number: str) -> None:
    identifier = bson.encode({"_id": Decimal128(number)})
    token = ResumeToken(ClusterTime.of(5, 1), uuid=bytes(16), event_identifier=identifier, version=1)
    parts = ResumeToken.parse(bson.decode(token.to_bson())).parts
    assert parts.event_identifier == identifier
