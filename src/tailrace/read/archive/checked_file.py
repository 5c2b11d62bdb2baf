"""A file of the archive from which a reader gets nothing that differs from what was written.

    data     Parquet's own; a CRC-32 of every 64 kB of it stands in the footer
    footer   Parquet's own, to the file's end; its SHA-256 begins with the file's digest

The digest is in the file's name, or in another file that is checked like this one. So a reader hashes the footer, a few
kilobytes, and then what it reads, as it reads it: reading a slice of a segment does not mean reading all of it. Arrow
gets only bytes that were checked, because some kinds of damage make it end the process.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from tailrace.base.object_place import ObjectPlace
from tailrace.errors import SourceError, invariant
from tailrace.read.archive.place import ArchivePlace, asking

#: What is said about a file, as JSON, in its footer.
METADATA: Final = b"tailrace.archive"
#: The sums of the data, eight hexadecimal digits each.
SUMS: Final = "sums"
#: What pyarrow raises for a file that is cut short or not Parquet, and ``read`` for one that was altered.
DAMAGE: Final = (pa.ArrowException, OSError, ValueError, KeyError, TypeError)

_BLOCK: Final = 64 << 10
_DIGEST_DIGITS: Final = 16
_MAGIC: Final = b"PAR1"
#: The footer's length and the magic number.
_TAIL: Final = 8
#: What is read first of an object: its footer, and all of a small one. A request costs more than that many bytes.
_LAST_BYTES: Final = 256 << 10


class CheckedFile:
    """A Parquet file whose digest is known.

    ``about``    what was said about it when it was written
    ``parquet``  the file to Arrow; a read of it raises ValueError where the data are not what was written

    Raises SourceError where the file cannot be read or is not the one that was written.
    """

    def __init__(self, path: ArchivePlace, digest: str) -> None:
        try:
            data = _Data(path)
            footer = data.footer()
            if hashlib.sha256(footer).hexdigest()[:_DIGEST_DIGITS] != digest:
                raise ValueError("it is not what was written: its digest differs")
            metadata = pq.read_metadata(pa.BufferReader(_MAGIC + footer))
            self.about: dict[str, Any] = json.loads((metadata.metadata or {}).get(METADATA, b"{}"))
            data.sums = bytes.fromhex(self.about[SUMS])
            self.parquet = pq.ParquetFile(pa.PythonFile(data, mode="r"), metadata=metadata)
        except DAMAGE as error:
            raise damaged(path, error) from None


class _ByteReader(Protocol):
    """Where the bytes of a file come from. ``read`` gives no more than there are."""

    size: int

    def read(self, start: int, size: int, /) -> bytes: ...
    def close(self) -> None: ...


class _FileBytes:
    """Of a file."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self.size = os.fstat(self._descriptor).st_size

    def read(self, start: int, size: int) -> bytes:
        return os.pread(self._descriptor, size, start)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class _ObjectBytes:
    """Of an object: its end at once, and then what is asked for."""

    def __init__(self, place: ObjectPlace) -> None:
        self._place = place
        with asking():
            self._end, self.size = place.end(_LAST_BYTES)
        self._end_start = self.size - len(self._end)

    def read(self, start: int, size: int) -> bytes:
        if start >= self._end_start:
            begin = start - self._end_start
            return self._end[begin : begin + size]
        with asking():
            return self._place.part(start, min(start + size, self.size))

    def close(self) -> None:
        """Nothing is held."""


class _Data(io.RawIOBase):
    """The data of a file, which are compared with ``sums`` while they are read."""

    _bytes: _ByteReader | None = None

    def __init__(self, path: ArchivePlace) -> None:
        super().__init__()
        self._bytes = _ObjectBytes(path) if isinstance(path, ObjectPlace) else _FileBytes(path)
        self._size = self.end = self._bytes.size
        self._position = 0
        self._last: tuple[int, bytes] = (-1, b"")
        self.sums = b""

    def footer(self) -> bytes:
        """The footer to the file's end; what lies before it are the data."""
        tail = self._read(self._size - _TAIL, _TAIL) if self._size >= len(_MAGIC) + _TAIL else b""
        length = int.from_bytes(tail[:4], "little") + _TAIL
        if tail[4:] != _MAGIC or length > self._size - len(_MAGIC):
            raise ValueError("it is cut short or is not a Parquet file")
        self.end = self._size - length
        return self._read(self.end, length)

    def _read(self, start: int, size: int) -> bytes:
        assert self._bytes is not None
        parts = []
        while size > 0:
            part = self._bytes.read(start, size)
            if not part:
                raise ValueError("it is cut short")
            parts.append(part)
            start, size = start + len(part), size - len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def read(self, size: int = -1) -> Any:
        """``size`` bytes from the position on, and fewer only at the data's end."""
        start = self._position
        end = self.end if size < 0 else min(self.end, start + size)
        if start >= end:
            return b""
        self._position = end
        begin = start // _BLOCK * _BLOCK
        taken = self._checked(begin, min(self.end, -(-end // _BLOCK) * _BLOCK))
        return memoryview(taken)[start - begin : end - begin]

    def _checked(self, start: int, end: int) -> bytes:
        """Whole blocks. The columns of a row group lie one after another, so the last block is kept."""
        place, block = self._last
        data = block if place == start else b""
        if start + len(data) < end:
            more = self._read(start + len(data), end - start - len(data))
            self._check(start + len(data), more)
            data = data + more if data else more
        last = (end - 1) // _BLOCK * _BLOCK
        self._last = (last, data[last - start :])
        return data

    def _check(self, start: int, data: bytes) -> None:
        sums, view = self.sums, memoryview(data)
        for offset in range(0, len(data), _BLOCK):
            number = (start + offset) // _BLOCK
            if zlib.crc32(view[offset : offset + _BLOCK]).to_bytes(4, "big") != sums[4 * number : 4 * number + 4]:
                raise ValueError(f"the 64 kB at byte {start + offset} are not what was written")

    def check_all(self) -> None:
        """Read everything. Raises ValueError, OSError."""
        self.seek(0)
        while self.read(_BLOCK * 64):
            pass

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self.end}[whence]
        self._position = base + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def close(self) -> None:
        if self._bytes is not None:
            self._bytes.close()
        super().close()


def close_checked(writer: pq.ParquetWriter, file: io.BufferedWriter, path: Path, about: Mapping[str, object]) -> str:
    """Finish the Parquet file that ``writer`` writes to ``file`` at ``path``: give it sums, and return its digest."""
    file.flush()
    size, sums = path.stat().st_size, _sums(path)
    writer.add_key_value_metadata({METADATA.decode(): json.dumps({**about, SUMS: sums})})
    writer.close()
    file.close()
    data = _Data(path)
    try:
        footer = data.footer()
        invariant(data.end == size, "a Parquet file's data were written with its footer")
        return hashlib.sha256(footer).hexdigest()[:_DIGEST_DIGITS]
    finally:
        data.close()


def _sums(path: Path) -> str:
    with path.open("rb") as file:
        return "".join(f"{zlib.crc32(block):08x}" for block in iter(lambda: file.read(_BLOCK), b""))


def damaged(path: ArchivePlace, error: Exception) -> SourceError:
    """What a reader learns about a file that is not what was written."""
    words = str(error).splitlines()[0] if str(error) else type(error).__name__
    return SourceError(
        f"the archive's file {path} is damaged or cannot be read: {words}",
        hint="'tailrace archive verify' lists everything that is wrong; restore the file from a copy",
    )
