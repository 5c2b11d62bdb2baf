"""OP_COMPRESSED: a message whose body is packed with snappy, zlib or zstd. No I/O.

The decompressed message may not be longer than the message says, and what it says may not exceed the limit: a small
message cannot make the receiver allocate a large one unless it says so first.
"""

from __future__ import annotations

import importlib
import struct
import sys
import zlib
from collections.abc import Iterable
from types import ModuleType
from typing import Any, Final

from tailrace.watch.gateway.frame import (
    HEADER_SIZE,
    MESSAGE_SIZE_MAX,
    OP_COMPRESSED,
    BadFrame,
    parse_header,
    whole_message,
)

#: The numbers of the wire protocol by the names that hello uses.
COMPRESSORS: Final[dict[str, int]] = {"snappy": 1, "zlib": 2, "zstd": 3}
_NAMES: Final = {0: "noop"} | {number: name for name, number in COMPRESSORS.items()}

_FIELDS: Final = struct.Struct("<iiB")
_HEADER: Final = struct.Struct("<iiii")
#: zstd allocates its window before anything comes out: 2^26 bytes hold the largest message.
_ZSTD_WINDOW_LOG_MAX: Final = 26


def available(names: Iterable[str] = COMPRESSORS) -> list[str]:
    """Those of the compressors ``names`` whose packages are installed, in the same order."""
    return [name for name in names if name in COMPRESSORS and _is_available(name)]


def compress(message: bytes, compressor: str) -> bytes:
    """A whole message as OP_COMPRESSED with ``compressor``, "snappy", "zlib" or "zstd"."""
    header = whole_message(message)
    body = message[HEADER_SIZE:]
    match compressor:
        case "snappy":
            packed: bytes = _snappy().compress(body)
        case "zlib":
            packed = zlib.compress(body)
        case "zstd":
            packed = zstd_package().compress(body)
        case _:
            raise BadFrame(f"there is no compressor named '{compressor}'")
    length = HEADER_SIZE + _FIELDS.size + len(packed)
    fields = _FIELDS.pack(header.op_code, len(body), COMPRESSORS[compressor])
    return _HEADER.pack(length, header.request_id, header.response_to, OP_COMPRESSED) + fields + packed


def compressor_of(message: bytes) -> str:
    """The name of the compressor of an OP_COMPRESSED message, to answer with the same."""
    number = _fields(message)[2]
    if number not in _NAMES:
        raise BadFrame(f"a message is compressed with compressor {number}, which is not known")
    return _NAMES[number]


#: How many bytes of a message of that kind say how large it is without compression.
COMPRESSED_HEAD_BYTES: Final = HEADER_SIZE + _FIELDS.size


def size_inside(head: bytes) -> int:
    """The size that an OP_COMPRESSED message says its contents have, from its first bytes. Raises BadFrame."""
    if len(head) < COMPRESSED_HEAD_BYTES:
        raise BadFrame("a compressed message ends inside its header")
    size: int = _FIELDS.unpack_from(head, HEADER_SIZE)[1]
    if not 0 <= size <= MESSAGE_SIZE_MAX - HEADER_SIZE:
        raise BadFrame(
            f"a compressed message says that it holds {size} bytes; the limit is {MESSAGE_SIZE_MAX - HEADER_SIZE}"
        )
    return size


def decompress(message: bytes, *, limit: int = MESSAGE_SIZE_MAX) -> bytes:
    """The whole message inside an OP_COMPRESSED message. ``limit``: bytes that it may have, header included."""
    header = parse_header(message)
    op_code, size, _ = _fields(message)
    if op_code == OP_COMPRESSED:
        raise BadFrame("a compressed message holds a compressed message")
    if not 0 <= size <= limit - HEADER_SIZE:
        raise BadFrame(f"a compressed message says that it holds {size} bytes; the limit is {limit - HEADER_SIZE}")
    name = compressor_of(message)
    packed = message[HEADER_SIZE + _FIELDS.size :]
    try:
        body = _unpacked(name, packed, size)
    except BadFrame:
        raise
    except Exception as error:  # noqa: BLE001 - each package has errors of its own, python-snappy those of another
        raise BadFrame(f"a message cannot be decompressed with {name}: {error}") from None
    if len(body) != size:
        more = "more" if len(body) > size else f"{len(body)}"
        raise BadFrame(f"a compressed message says that it holds {size} bytes, and holds {more}")
    return _HEADER.pack(HEADER_SIZE + size, header.request_id, header.response_to, op_code) + body


def _fields(message: bytes) -> tuple[int, int, int]:
    """The opcode inside, the size of what is inside, and the compressor's number."""
    if whole_message(message).op_code != OP_COMPRESSED:
        raise BadFrame("a message that is not compressed was taken for one that is")
    if len(message) < HEADER_SIZE + _FIELDS.size:
        raise BadFrame("a compressed message ends inside its header")
    op_code, size, number = _FIELDS.unpack_from(message, HEADER_SIZE)
    return op_code, size, number


def _unpacked(name: str, packed: bytes, size: int) -> bytes:
    """What ``packed`` holds: its first ``size`` + 1 bytes at most."""
    match name:
        case "noop":
            return packed
        case "snappy":
            declared = _snappy_size(packed)
            if declared != size:
                raise BadFrame(f"a compressed message says that it holds {size} bytes, and its contents say {declared}")
            return bytes(_snappy().decompress(packed))
        case "zlib":
            zlib_reader = zlib.decompressobj()
            return _ended(zlib_reader.decompress(packed, size + 1), zlib_reader, size)
        case _:
            zstd = zstd_package()
            options = {zstd.DecompressionParameter.window_log_max: _ZSTD_WINDOW_LOG_MAX}
            zstd_reader = zstd.ZstdDecompressor(options=options)
            return _ended(zstd_reader.decompress(packed, size + 1), zstd_reader, size)


def _ended(body: bytes, reader: Any, size: int) -> bytes:
    if len(body) <= size and not reader.eof:
        raise BadFrame("a compressed message ends too early")
    if len(body) <= size and reader.unused_data:
        raise BadFrame("a compressed message goes on after its contents")
    return body


def _snappy_size(packed: bytes) -> int:
    """The size of what a snappy block holds: a number of seven bits a byte in front of it."""
    size = 0
    for place, byte in enumerate(packed[:5]):
        size |= (byte & 0x7F) << (7 * place)
        if byte < 0x80:
            return size
    raise BadFrame("a compressed message has no size in front of its contents")


def _is_available(name: str) -> bool:
    try:
        match name:
            case "snappy":
                _snappy()
            case "zstd":
                zstd_package()
    except BadFrame:
        return False
    return True


def _snappy() -> ModuleType:
    return _package("snappy", "python-snappy")


def zstd_package() -> ModuleType:
    """The package for zstd: the standard library's from Python 3.14 on. Raises BadFrame if there is none."""
    return _package("compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd", "backports.zstd")


def _package(module: str, distribution: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise BadFrame(
            f"messages compressed this way need the package {distribution}: {error}",
            hint="Install it: pip install 'tailrace[gateway]'",
        ) from None
