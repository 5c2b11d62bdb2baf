"""A file of BSON documents one after another, plain or gzipped, read in bounded memory and checked as it is read.

Damage is always reported with the byte position (of the unpacked data), after everything before it has been given.
"""

from __future__ import annotations

import contextlib
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Final, NamedTuple

from tailrace.core import raw_bson
from tailrace.errors import OplogFormatError, SourceError

#: The server's own bound for a document inside, BSONObjMaxInternalSize: 16 MiB + 16 KiB.
DOCUMENT_BYTES_MAX: Final = (16 << 20) + (16 << 10)
_CHUNK: Final = 1 << 20
_PACKED_CHUNK: Final = 1 << 16
_GZIP_MAGIC: Final = b"\x1f\x8b"
_ARCHIVE_MAGIC: Final = b"\x6d\xe2\x99\x81"  # 0x8199e26d, little-endian: mongodump --archive
_LENGTH = struct.Struct("<i")


class FileDocument(NamedTuple):
    """A document and the byte position in the (unpacked) file where it begins."""

    raw: bytes
    position: int


def documents(path: Path, *, start: int = 0) -> Iterator[FileDocument]:
    """The documents of the file from byte ``start`` on, the structure of each checked down to the last field.

    Raises SourceError where the file cannot be opened or is not a BSON file at all, OplogFormatError with the byte
    position where it is damaged or ends in the middle of a document.
    """
    try:
        if not path.is_file():
            kind = "a directory" if path.is_dir() else "not a regular file"
            path.stat()
            raise SourceError(
                f"{path} is {kind}, so it cannot be read twice", hint="Give a file, or - and the dump on standard input"
            )
        with path.open("rb") as file:
            yield from _split(path, _chunks(path, file, start), start)
    except OSError as error:
        raise unreadable(path, error) from None


def unreadable(path: Path, error: OSError) -> SourceError:
    return SourceError(f"{path} cannot be read: {error.strerror or error}")


class DamagedGzipError(Exception):
    """The unpacker cannot go on; what it could unpack has been given."""


def _chunks(path: Path, file: IO[bytes], start: int) -> Iterator[bytes]:
    magic = file.read(4)
    if starts_archive(magic):
        raise SourceError(f"{path} is a mongodump archive", hint="Unpack it first, as tailrace replay does")
    if not magic.startswith(_GZIP_MAGIC):
        file.seek(start)
        while chunk := file.read(_CHUNK):
            yield chunk
        return
    file.seek(0)
    for chunk in _unpacked(file):
        if start >= len(chunk):
            start -= len(chunk)
        else:
            yield chunk[start:]
            start = 0


def starts_archive(data: bytes) -> bool:
    """Whether these are the first bytes of an archive of ``mongodump``, unpacked."""
    return data.startswith(_ARCHIVE_MAGIC)


def unpacked_chunks(file: IO[bytes]) -> Iterator[bytes]:
    """What a file holds, unpacked if it is packed. Raises DamagedGzipError after the last byte before the damage."""
    is_packed = file.read(2) == _GZIP_MAGIC
    file.seek(0)
    if is_packed:
        yield from filter(None, _unpacked(file))
    else:
        while chunk := file.read(_CHUNK):
            yield chunk


def _unpacked(file: IO[bytes]) -> Iterator[bytes]:
    """The unpacked data of a gzip file of one or more members; damage is reported after the last byte before it."""
    unpacker = zlib.decompressobj(zlib.MAX_WBITS | 16)
    packed = b""
    while packed or (packed := file.read(_PACKED_CHUNK)):
        if unpacker.eof:
            unpacker = zlib.decompressobj(zlib.MAX_WBITS | 16)
        before = unpacker.copy()
        try:
            chunk = unpacker.decompress(packed, _CHUNK)
        except zlib.error as error:
            yield _last_bytes(before, packed)
            raise DamagedGzipError(str(error)) from None
        yield chunk
        packed = unpacker.unused_data if unpacker.eof else unpacker.unconsumed_tail
    if not unpacker.eof:
        raise DamagedGzipError("the end is missing")


def _last_bytes(unpacker: zlib._Decompress, packed: bytes) -> bytes:
    """What can be unpacked before the error in ``packed``: byte by byte, since an error discards its whole call."""
    parts: list[bytes] = []
    with contextlib.suppress(zlib.error):
        for index in range(len(packed)):
            parts.append(unpacker.decompress(packed[index : index + 1]))
    return b"".join(parts)


def _split(path: Path, chunks: Iterator[bytes], position: int) -> Iterator[FileDocument]:
    buffer = b""
    damage: str | None = None
    while damage is None:
        try:
            chunk = next(chunks, b"")
            damage = None if chunk else ""
        except DamagedGzipError as error:
            chunk, damage = b"", f"the gzip data are damaged: {error}"
        buffer += chunk
        pos = 0
        while (end := _end(buffer, pos, position, path)) is not None:
            raw = buffer[pos:end]
            try:
                raw_bson.check_structure(raw)
            except OplogFormatError as error:
                raise _damaged(path, f"{error.message} ({error.position})", position) from None
            yield FileDocument(raw, position)
            position += end - pos
            pos = end
        buffer = buffer[pos:]
    if buffer or damage:
        raise _damaged(path, damage or "it ends in the middle of a document", position)


def _end(buffer: bytes, pos: int, position: int, path: Path) -> int | None:
    """Where the document at ``pos`` ends, or ``None`` when it is not wholly in the buffer."""
    if len(buffer) - pos < 4:
        return None
    length = _LENGTH.unpack_from(buffer, pos)[0]
    if not 5 <= length <= DOCUMENT_BYTES_MAX:
        if position == 0:
            raise SourceError(
                f"{path} is not a BSON file", hint="Give the oplog.bson that mongodump --oplog writes, or its directory"
            )
        raise _damaged(path, f"a document cannot have {length} bytes", position)
    end: int = pos + length
    return end if end <= len(buffer) else None


def _damaged(path: Path, what: str, position: int) -> OplogFormatError:
    return OplogFormatError(f"{path} is damaged: {what}", position=f"byte {position}")
