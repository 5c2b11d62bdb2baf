"""What ``mongodump --archive`` writes: a dump in one file, of which the parts that a replay needs are unpacked.

The format is published with the Database Tools. After a magic number comes a block about the whole, and then blocks of
the collections, in any order and mixed, since several are dumped at a time. A block is a document that says what the
block belongs to, further documents, and four bytes FF. A block that says ``EOF`` ends its collection, with the CRC-64
of all of its documents.
"""

from __future__ import annotations

import lzma
import struct
import zlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO, Any, Final

import bson
from bson.codec_options import CodecOptions, DatetimeConversion

from tailrace.core import raw_bson
from tailrace.errors import OplogFormatError, SourceError
from tailrace.read.source.bson_file import (
    DOCUMENT_BYTES_MAX,
    DamagedGzipError,
    starts_archive,
    unpacked_chunks,
    unreadable,
)

FORMAT: Final = "0.1"
_MAGIC_BYTES: Final = 4
_LENGTH: Final = struct.Struct("<i")
_END_OF_BLOCK: Final = -1
_ANY_VALUE: Final[CodecOptions[dict[str, Any]]] = CodecOptions(
    datetime_conversion=DatetimeConversion.DATETIME_AUTO, unicode_decode_error_handler="replace"
)
#: What is unpacked, by database and collection, and where a dump's directory has it.
_WANTED: Final[dict[tuple[Any, Any], str]] = {
    ("", "oplog"): "oplog.bson",
    ("local", "oplog.rs"): "local/oplog.rs.bson",
    ("config", "system.preimages"): "config/system.preimages.bson",
}
_OPLOGS: Final = ("oplog.bson", "local/oplog.rs.bson")


def is_archive(path: Path) -> bool:
    """Whether the file, which may be packed, is an archive. Raises SourceError where it cannot be read."""
    try:
        with path.open("rb") as file:
            return starts_archive(next(unpacked_chunks(file), b""))
    except DamagedGzipError:
        return False
    except OSError as error:
        raise unreadable(path, error) from None


def unpack(path: Path, folder: Path, *, name: str | None = None) -> str:
    """Write the oplog of an archive, and what lies next to it for a replay, into ``folder`` as a dump's directory has
    them. Returns the server version that the archive's header names. ``name``: what messages call the archive.

    The archive is read once, to its end, in bounded memory. Raises OplogFormatError with the byte position where it is
    damaged or cut off: nothing of it is to be replayed then; SourceError where it holds no oplog, or cannot be read or
    written.
    """
    called = str(path) if name is None else name
    try:
        with path.open("rb") as file, ExitStack() as opened:
            unpacking = _Unpacking(_Reader(called, unpacked_chunks(file)), folder, opened)
            version = unpacking.prelude()
            while unpacking.block():
                pass
            unpacking.end()
    except OSError as error:
        hint = "The oplog of an archive is unpacked into a temporary directory: TMPDIR says where"
        raise SourceError(f"{called} cannot be unpacked: {error.strerror or error}", hint=hint) from None
    return version


class _Reader:
    """The documents and ends of blocks of an archive, one after another."""

    def __init__(self, name: str, chunks: Iterator[bytes]) -> None:
        self._name = name
        self._chunks = chunks
        self._buffer = b""
        self._at = 0
        #: Of the unpacked data.
        self.position = 0

    def take(self, size: int) -> bytes:
        """This many bytes, or all that are left."""
        while len(self._buffer) - self._at < size:
            try:
                chunk = next(self._chunks, b"")
            except DamagedGzipError as error:
                raise self.damaged(f"the gzip data are damaged: {error}") from None
            if not chunk:
                break
            self._buffer = self._buffer[self._at :] + chunk
            self._at = 0
        taken = self._buffer[self._at : self._at + size]
        self._at += len(taken)
        self.position += len(taken)
        return taken

    def document(self) -> bytes | None:
        """The next document; ``None`` for the end of a block."""
        head = self.take(_LENGTH.size)
        if len(head) < _LENGTH.size:
            raise self.damaged("it is cut off")
        size: int = _LENGTH.unpack(head)[0]
        if size == _END_OF_BLOCK:
            return None
        if not len(raw_bson.EMPTY_DOCUMENT) <= size <= DOCUMENT_BYTES_MAX:
            raise self.damaged(f"a document cannot have {size} bytes")
        raw = head + self.take(size - len(head))
        if len(raw) < size:
            raise self.damaged("it is cut off")
        return raw

    def fields(self, what: str) -> dict[str, Any] | None:
        """The next document decoded; ``None`` at the end of the file."""
        if not self._buffer[self._at :] and not self._refill():
            return None
        raw = self.document()
        if raw is None:
            raise self.damaged(f"{what} is missing")
        try:
            raw_bson.check_structure(raw)
            return bson.decode(raw, _ANY_VALUE)
        except (OplogFormatError, bson.errors.BSONError) as error:
            raise self.damaged(f"{what} is not a document: {error}") from None

    def _refill(self) -> bool:
        try:
            self._buffer, self._at = next(self._chunks, b""), 0
        except DamagedGzipError as error:
            raise self.damaged(f"the gzip data are damaged: {error}") from None
        return bool(self._buffer)

    def damaged(self, what: str) -> OplogFormatError:
        return OplogFormatError(f"{self._name} is damaged: {what}", position=f"byte {self.position}")

    def refused(self, what: str, hint: str) -> SourceError:
        return SourceError(f"{self._name} {what}", hint=hint)


class _Unpacking:
    """What was found so far of the wanted collections."""

    def __init__(self, reader: _Reader, folder: Path, opened: ExitStack) -> None:
        self._reader = reader
        self._folder = folder
        self._opened = opened
        self._files: dict[str, tuple[IO[bytes], _Crc64]] = {}
        self._ended: set[str] = set()

    def prelude(self) -> str:
        """The block about the whole."""
        reader = self._reader
        reader.take(_MAGIC_BYTES)
        header = reader.fields("the header")
        if header is None:
            raise reader.damaged("it is cut off")
        found = header.get("version")
        if found != FORMAT:
            raise reader.refused(
                f"is an archive of the format {found!r}, but only {FORMAT!r} is known",
                "Dump without --archive, into a directory",
            )
        while reader.document() is not None:
            pass  # of each collection what it is called and its indexes
        return str(header.get("server_version", ""))

    def block(self) -> bool:
        """A block of a collection; False where the file ends."""
        reader = self._reader
        header = reader.fields("the beginning of a block")
        if header is None:
            return False
        name = _WANTED.get((header.get("db"), header.get("collection")))
        if header.get("EOF") is True:
            self._end(name, header)
        while (raw := reader.document()) is not None:
            if header.get("EOF") is True or name in self._ended:
                raise reader.damaged("a collection goes on after its end")
            if name is not None:
                self._add(name, raw)
        return True

    def _add(self, name: str, raw: bytes) -> None:
        try:
            raw_bson.check_structure(raw)
        except OplogFormatError as error:
            raise self._reader.damaged(f"{error.message} ({error.position})") from None
        file, checksum = self._file(name)
        file.write(raw)
        checksum.add(raw)

    def _file(self, name: str) -> tuple[IO[bytes], _Crc64]:
        if name not in self._files:
            path = self._folder / name
            path.parent.mkdir(exist_ok=True)
            self._files[name] = self._opened.enter_context(path.open("wb")), _Crc64()
        return self._files[name]

    def _end(self, name: str | None, header: Mapping[str, Any]) -> None:
        if name is None:
            return
        crc = header.get("CRC")
        if not isinstance(crc, int) or not self._file(name)[1].equals(crc):
            raise self._reader.damaged(f"the documents of {name.removesuffix('.bson')} do not match their checksum")
        self._ended.add(name)

    def end(self) -> None:
        """The archive has ended."""
        for name in self._files.keys() - self._ended:
            raise self._reader.damaged(f"it ends before its {name.removesuffix('.bson')} does")
        if not any(name in self._ended for name in _OPLOGS):
            raise self._reader.refused("holds no oplog", "Dump with mongodump --oplog --archive=...")


class _Crc64:
    """The CRC-64 of ECMA-182 of what is added to it.

    Python computes it only where it reads an xz file. So the data are put into one, as they are, with the checksum that
    they are to have, and lzma compares: a hundred times as fast as Python could.
    """

    _STREAM: Final = b"\xfd7zXZ\x00\x00\x04"  # checked by a CRC-64
    _BLOCK: Final = b"\x02\x00\x21\x01\x08\x00\x00\x00"  # one filter, LZMA2
    _PIECE: Final = 1 << 16

    def __init__(self) -> None:
        self._file = lzma.LZMADecompressor(lzma.FORMAT_XZ)
        for head, summed in ((self._STREAM, self._STREAM[6:]), (self._BLOCK, self._BLOCK)):
            self._file.decompress(head + zlib.crc32(summed).to_bytes(4, "little"))
        self._pending = bytearray()
        self._size = 0
        self._control = 1

    def add(self, data: bytes) -> None:
        self._pending += data
        while len(self._pending) >= self._PIECE:
            self._put(bytes(self._pending[: self._PIECE]))
            del self._pending[: self._PIECE]

    def _put(self, piece: bytes) -> None:
        """A piece of LZMA2 that is not compressed."""
        self._file.decompress(bytes((self._control,)) + (len(piece) - 1).to_bytes(2, "big") + piece)
        self._control = 2  # the first one resets the dictionary
        self._size += 3 + len(piece)

    def equals(self, crc: int) -> bool:
        """Whether ``crc`` is the checksum of all that was added. To be asked once, at the end."""
        if self._pending:
            self._put(bytes(self._pending))
        padding = bytes(-(self._size + 1) % 4)
        with suppress(lzma.LZMAError):
            self._file.decompress(b"\x00" + padding + (crc & (1 << 64) - 1).to_bytes(8, "little"))
            return True
        return False
