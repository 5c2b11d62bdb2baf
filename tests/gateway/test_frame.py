"""Frames of the wire protocol: what real peers send is taken apart and put together again, anything that is no message
is refused with a sentence, and no memory is allocated for what a message only announces."""

from __future__ import annotations

import struct
import tracemalloc
import zlib
from collections.abc import Callable

import bson
import pytest
from pymongo.message import _op_msg  # what PyMongo itself puts on the wire

from tailrace.watch.gateway import compression, frame
from tailrace.watch.gateway.compression import compress, compressor_of, decompress
from tailrace.watch.gateway.frame import BadFrame, OpMsg, OpQuery, OpReply

zstd = compression.zstd_package()
HELLO = bson.encode({"hello": 1, "$db": "admin"})


def test_a_message_of_pymongo_is_taken_apart_and_put_together_again() -> None:
    documents = [{"_id": number, "x": "y" * number} for number in range(20)]
    _, message, _, _ = _op_msg(0, {"insert": "c", "documents": documents}, "shop", None, bson.DEFAULT_CODEC_OPTIONS)
    parsed = OpMsg.parse(message)
    assert frame.command_name(parsed.document) == b"insert"
    assert bson.decode(parsed.document) == {"insert": "c", "$db": "shop"}
    assert parsed.sequences[0][0] == b"documents"
    assert [bson.decode(document) for document in parsed.documents()] == documents
    assert frame.with_document(parsed, parsed.document) == message


def test_a_query_is_taken_apart_and_put_together_again() -> None:
    message = frame.op_query(b"admin.$cmd", bson.encode({"isMaster": 1}), request_id=9, flags=4)
    parsed = OpQuery.parse(message)
    assert (parsed.database, parsed.is_command, parsed.count) == (b"admin", True, -1)
    assert frame.command_name(parsed.document) == b"isMaster"
    assert frame.with_document(parsed, parsed.document) == message


def test_a_reply_is_taken_apart_and_put_together_again() -> None:
    message = frame.op_reply(HELLO, request_id=7, response_to=3)
    parsed = OpReply.parse(message)
    assert (parsed.header.request_id, parsed.header.response_to, parsed.documents) == (7, 3, (HELLO,))
    assert frame.with_document(parsed, parsed.documents[0]) == message


def test_flags_that_must_be_known_are_refused_and_others_are_not() -> None:
    allowed = frame.op_msg(HELLO, request_id=1, flags=frame.EXHAUST_ALLOWED | frame.MORE_TO_COME | 1 << 20)
    parsed = OpMsg.parse(allowed)
    assert parsed.exhaust_allowed
    assert parsed.more_to_come
    with pytest.raises(BadFrame, match="flags that are not known: 0x8"):
        OpMsg.parse(frame.op_msg(HELLO, request_id=1, flags=8))


def test_a_checksum_is_compared_where_it_is_asked_for() -> None:
    assert crc32c(b"123456789") == 0xE3069283  # the check value that the definition of CRC-32C gives
    body = struct.pack("<I", frame.CHECKSUM_PRESENT) + b"\x00" + HELLO
    message = struct.pack("<iiii", 16 + len(body) + 4, 1, 0, frame.OP_MSG) + body
    message += struct.pack("<I", crc32c(message))
    assert OpMsg.parse(message).document == HELLO
    frame.check_checksum(message)
    with pytest.raises(BadFrame, match="does not have the checksum"):
        frame.check_checksum(message[:-1] + bytes([message[-1] ^ 1]))


def crc32c(data: bytes) -> int:
    """Bit by bit, as the definition says."""
    value = 0xFFFFFFFF
    for byte in data:
        value ^= byte
        for _ in range(8):
            value = (value >> 1) ^ (0x82F63B78 if value & 1 else 0)
    return value ^ 0xFFFFFFFF


@pytest.mark.parametrize("name", list(compression.COMPRESSORS))
def test_each_compression_packs_and_unpacks(name: str) -> None:
    message = frame.op_msg(bson.encode({"insert": "c", "x": "y" * 5000}), request_id=5, response_to=4)
    packed = compress(message, name)
    assert len(packed) < len(message)
    assert frame.parse_header(packed).op_code == frame.OP_COMPRESSED
    assert compressor_of(packed) == name
    assert decompress(packed) == message
    assert compression.available([name, "lzma"]) == [name]


def test_a_message_that_is_packed_with_nothing_is_unpacked() -> None:
    body = struct.pack("<I", 0) + b"\x00" + HELLO
    assert OpMsg.parse(decompress(_compressed(frame.OP_MSG, len(body), 0, body))).document == HELLO


def _compressed(op_code: int, size: int, compressor: int, packed: bytes) -> bytes:
    fields = struct.pack("<iiB", op_code, size, compressor)
    return struct.pack("<iiii", 16 + len(fields) + len(packed), 1, 0, frame.OP_COMPRESSED) + fields + packed


@pytest.mark.parametrize(
    ("name", "bomb"),
    [
        ("zlib", lambda: zlib.compress(bytes(200_000_000), 9)),
        ("zstd", lambda: zstd.compress(bytes(200_000_000))),
        ("snappy", lambda: b"\xff\xff\xff\xff\x07" + bytes(20)),  # says that 2 GB follow
    ],
)
def test_a_decompression_bomb_is_refused_before_it_is_unpacked(name: str, bomb: Callable[[], bytes]) -> None:
    packed = bomb()
    number = compression.COMPRESSORS[name]
    tracemalloc.start()
    try:
        for size, sentence in [(1000, "holds"), (200_000_000, "the limit is"), (-5, "the limit is")]:
            with pytest.raises(BadFrame, match=sentence):
                decompress(_compressed(frame.OP_MSG, size, number, packed))
        with pytest.raises(BadFrame, match="the limit is"):
            decompress(_compressed(frame.OP_MSG, 100_000, number, packed), limit=50_000)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 3_000_000


def test_a_zstd_frame_that_wants_a_window_beyond_the_limit_is_refused() -> None:
    options = {zstd.CompressionParameter.window_log: 30, zstd.CompressionParameter.content_size_flag: 0}
    packer = zstd.ZstdCompressor(options=options)
    packed = packer.compress(bytes(1000)) + packer.flush()
    with pytest.raises(BadFrame, match="cannot be decompressed with zstd"):
        decompress(_compressed(frame.OP_MSG, 1000, 3, packed))


@pytest.mark.parametrize(
    ("message", "sentence"),
    [
        (b"", "16 bytes, and 0 came"),
        (struct.pack("<iiii", 15, 0, 0, 2013), "its header alone has 16"),
        (struct.pack("<iiii", -1, 0, 0, 2013), "its header alone has 16"),
        (struct.pack("<iiii", 48_000_001, 0, 0, 2013), "the limit is 48000000"),
        (struct.pack("<iiii", 99, 0, 0, 2013), "16 bytes are there"),
        (struct.pack("<iiii", 16, 0, 0, 2013), "ends before an OP_MSG's flags"),
        (struct.pack("<iiiiI", 20, 0, 0, 2013, 1), "too short for one"),
        (struct.pack("<iiiiI", 20, 0, 0, 2013, 0), "no section of kind 0"),
        (struct.pack("<iiiiIB", 21, 0, 0, 2013, 0, 7), "kind 7"),
        (struct.pack("<iiiiIB", 21, 0, 0, 2013, 0, 1), "inside the length of a document sequence"),
        (struct.pack("<iiiiIBi", 25, 0, 0, 2013, 0, 1, 4), "4 bytes long"),
        (struct.pack("<iiiiIBi5s", 30, 0, 0, 2013, 0, 1, 9, b"abcde"), "name of a document sequence has no end"),
        (struct.pack("<iiiiIBi", 25, 0, 0, 2013, 0, 0, 5), "4 bytes into a document"),
        (struct.pack("<iiiiIBib", 26, 0, 0, 2013, 0, 0, 6, 0), "6 bytes long, and 5 are there"),
        (struct.pack("<iiiiIBib", 26, 0, 0, 2013, 0, 0, -6, 0), "-6 bytes long"),
        (struct.pack("<iiiiIBib", 26, 0, 0, 2013, 0, 0, 0x7FFFFFFF, 0), "2147483647 bytes long; the limit is 16793600"),
        (struct.pack("<iiiiIBib", 26, 0, 0, 2013, 0, 0, 5, 1), "does not end with a zero byte"),
        (frame.op_query(b"a.$cmd", HELLO, request_id=1), "opcode 2004 came where 2013 was expected"),
    ],
)
def test_what_is_no_message_is_refused_with_a_sentence(message: bytes, sentence: str) -> None:
    with pytest.raises(BadFrame, match=sentence):
        OpMsg.parse(message)


def test_two_commands_and_two_sequences_of_one_name_are_refused() -> None:
    section = b"\x00" + HELLO
    for sections, sentence in [
        (section + section, "two sections of kind 0"),
        (section + 2 * b"\x01\x0b\x00\x00\x00docs\x00\x00\x00", "two document sequences named 'docs'"),
    ]:
        message = struct.pack("<iiiiI", 20 + len(sections), 0, 0, 2013, 0) + sections
        with pytest.raises(BadFrame, match=sentence):
            OpMsg.parse(message)


def test_a_document_that_lies_about_its_inside_or_is_nested_too_deeply_is_refused() -> None:
    frame.check_document(HELLO)
    for damaged in [bson.encode({"a": "b"})[:-4] + b"xxx\x00", _nested(201), _nested(10_000)]:
        with pytest.raises(BadFrame, match="not sound"):
            frame.check_document(damaged)
    frame.check_document(_nested(199))


def _nested(depth: int) -> bytes:
    opening = b"".join(struct.pack("<i", 5 + 8 * left) + b"\x03a\x00" for left in range(depth, 0, -1))
    return opening + b"\x05\x00\x00\x00\x00" + bytes(depth)


def test_the_name_of_a_command_needs_no_more_than_its_first_field() -> None:
    assert frame.command_name(b"\x05\x00\x00\x00\x00") == b""
    for damaged in (b"", b"\x05\x00\x00\x00", b"\x08\x00\x00\x00\x10xx"):
        with pytest.raises(BadFrame):
            frame.command_name(damaged)
