"""Entries from a dump: the ``oplog.bson`` of ``mongodump --oplog``, or ``oplog.rs.bson`` of a dumped database local.

A dump has no current documents (``updateLookup`` gives null), and pre-images only where ``config.system.preimages``
was dumped with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Final

from tailrace.core import raw_bson
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.oplog.history import history_lost, reaches_back
from tailrace.core.plan.request import DocumentLookup, OplogBatch, PreImageKey
from tailrace.errors import OplogFormatError, SourceError
from tailrace.read.source.batch import is_initiating_set
from tailrace.read.source.bson_file import FileDocument, documents, unreadable
from tailrace.read.source.lookup import pre_image

#: Where a dump directory keeps its oplog, in the order in which they are tried.
_OPLOGS: Final = ("oplog.bson", "local/oplog.rs.bson", "oplog.rs.bson")
_PRE_IMAGES: Final = "config/system.preimages.bson"
_BATCH_BYTES_MAX: Final = 4 << 20
#: One position is kept for this many bytes, to find earlier entries again without reading from the start.
_MARK_BYTES: Final = 1 << 20


class DumpSource:
    """The oplog in a dump.

    ``path``  an ``oplog.bson``, plain or gzipped, or a dump directory that holds one
    ``name``  what messages call it, where it was unpacked out of something else

    Entries are read in bounded memory; ``tail`` ends at the end of the file. A damaged file gives everything before the
    damage and then an OplogFormatError that names the byte; entries out of order are damage too.
    """

    def __init__(self, path: str | Path, *, name: str | None = None) -> None:
        self._path = _find_oplog(Path(path))
        self._name = str(path) if name is None else name
        self._called = self._path if name is None else name
        self._marks: list[tuple[ClusterTime, int]] = []

    @property
    def name(self) -> str:
        """The path that was given, or what it is called."""
        return self._name

    @property
    def oplog_path(self) -> Path:
        """The file with the entries."""
        return self._path

    def oldest(self) -> tuple[ClusterTime, bool]:
        time, raw = self._first
        return time, is_initiating_set(raw)

    @cached_property
    def _first(self) -> tuple[ClusterTime, bytes]:
        for time, document in self._entries_from(0, ClusterTime(0)):
            return time, document.raw
        raise SourceError(f"{self._name} holds no oplog entries")

    def newest(self) -> ClusterTime:
        """The time of the last entry, or of the last one before the damage. Reads the whole file once."""
        return self._newest

    @cached_property
    def _newest(self) -> ClusterTime:
        newest, _ = self._first
        try:
            for newest, _ in self._entries_from(0, ClusterTime(0)):  # noqa: B007 - the last one counts
                pass
        except OplogFormatError:
            pass  # read() tells, when it comes there
        return newest

    def operation_time(self) -> ClusterTime:
        """As ``newest``: a dump holds nothing else."""
        return self.newest()

    def read(
        self,
        after: ClusterTime,
        until: ClusterTime,
        *,
        batch_bytes_max: int = _BATCH_BYTES_MAX,
        oplog_filter: bytes | None = None,
    ) -> Iterator[OplogBatch]:
        """See OplogSource. Nothing is left out by a filter. 286 where the dump begins later than ``after``."""
        if until <= after:
            return
        self._check_history(after)
        position = after
        for batch in self._batches(after, until, batch_bytes_max):
            position = batch.high_water
            yield batch
        if position < until:
            yield OplogBatch(b"", until)

    def tail(
        self,
        after: ClusterTime,
        *,
        await_ms: int = 0,
        batch_bytes_max: int = _BATCH_BYTES_MAX,
        oplog_filter: bytes | None = None,
    ) -> Iterator[OplogBatch]:
        """All entries with ts > ``after``, to the end of the file; a dump has nothing to wait for."""
        self._check_history(after)
        yield from self._batches(after, None, batch_bytes_max)

    def entries(self, times: Sequence[ClusterTime]) -> list[bytes | None]:
        """The entries at exactly these times, read again from the nearest position known."""
        found: dict[ClusterTime, bytes] = {}
        for wanted in sorted(set(times)):
            mark_time, position = max((mark for mark in self._marks if mark[0] <= wanted), default=(ClusterTime(0), 0))
            for time, document in self._entries_from(position, mark_time):
                if time >= wanted:
                    if time == wanted:
                        found[wanted] = document.raw
                    break
        return [found.get(time) for time in times]

    def pre_images(self, keys: Sequence[PreImageKey]) -> list[bytes | None]:
        """The pre-images of a dumped ``config.system.preimages`` next to the oplog; else ``None`` each."""
        index = self._pre_image_positions if keys else {}
        images: dict[PreImageKey, bytes] = {}
        for key in sorted(set(keys) & index.keys(), key=index.__getitem__):
            document = next(documents(self._pre_images_path, start=index[key]))
            images[key] = pre_image(document.raw)[1]
        return [images.get(key) for key in keys]

    @cached_property
    def _pre_image_positions(self) -> dict[PreImageKey, int]:
        """Where each pre-image lies: one pass at first use; memory for the keys, not for the images."""
        path = self._pre_images_path
        return {} if not path.is_file() else {pre_image(raw)[0]: position for raw, position in documents(path)}

    def documents(self, lookups: Sequence[DocumentLookup]) -> list[bytes | None]:
        """``None`` each: a dump of the oplog knows no current documents."""
        return [None] * len(lookups)

    def refuse_view(self, database: str, collection: str) -> None:
        """Nothing: a dump of the oplog does not say what is a view."""

    def close(self) -> None:
        """Nothing is held open between reads."""

    @property
    def _pre_images_path(self) -> Path:
        folder = self._path.parent.parent if self._path.name.startswith("oplog.rs") else self._path.parent
        return _existing(folder / _PRE_IMAGES) or folder / _PRE_IMAGES

    def _check_history(self, after: ClusterTime) -> None:
        oldest, complete = self.oldest()
        if not reaches_back(after, oldest, complete):
            raise history_lost(f"The dump begins at {oldest}: start there or later")

    def _batches(self, after: ClusterTime, until: ClusterTime | None, bytes_max: int) -> Iterator[OplogBatch]:
        parts: list[bytes] = []
        size, last = 0, after
        mark_time, position = max((mark for mark in self._marks if mark[0] <= after), default=(ClusterTime(0), 0))
        entries = self._entries_from(position, mark_time)
        try:
            for time, document in entries:
                if until is not None and time > until:
                    break
                if time <= after:
                    continue
                if parts and size + len(document.raw) > bytes_max:
                    yield OplogBatch(b"".join(parts), last)
                    parts, size = [], 0
                parts.append(document.raw)
                size += len(document.raw)
                last = time
        except OplogFormatError:
            if parts:
                yield OplogBatch(b"".join(parts), last)
            raise
        if parts:
            yield OplogBatch(b"".join(parts), last)

    def _entries_from(self, position: int, previous: ClusterTime) -> Iterator[tuple[ClusterTime, FileDocument]]:
        """The entries from a byte position on, which is that of the entry at ``previous`` unless it is 0."""
        start = position
        for document in documents(self._path, start=position):
            time = self._time_of(document)
            if time <= previous and document.position != start:
                raise OplogFormatError(
                    f"{self._called} is out of order: {time} comes after {previous}",
                    position=f"byte {document.position}",
                )
            previous = time
            if not self._marks or document.position - self._marks[-1][1] >= _MARK_BYTES:
                self._marks.append((time, document.position))
            yield time, document

    def _time_of(self, document: FileDocument) -> ClusterTime:
        time: ClusterTime | None = None
        named = set()
        for element in raw_bson.elements(document.raw):
            if element.name == b"ts" and element.type == raw_bson.TIMESTAMP:
                time = ClusterTime.from_bytes_le(raw_bson.value(document.raw, element))
            named.add(element.name)
            if time is not None and b"op" in named and b"ns" in named:
                return time
        if document.position == 0:
            raise SourceError(
                f"{self._called} holds BSON documents, but no oplog entries (fields ts, op and ns)",
                hint="Give the oplog.bson that mongodump --oplog writes, not a collection's file",
            )
        raise OplogFormatError(
            f"{self._called} is damaged: an entry without ts, op and ns", position=f"byte {document.position}"
        )


def _find_oplog(path: Path) -> Path:
    try:
        if path.is_dir():
            for name in _OPLOGS:
                found = _existing(path / name)
                if found is not None:
                    return found
            raise SourceError(
                f"{path} holds no oplog dump ({' or '.join(_OPLOGS)})", hint="Dump with mongodump --oplog"
            )
        path.stat()
    except OSError as error:
        raise unreadable(path, error) from None
    return path


def _existing(path: Path) -> Path | None:
    for candidate in (path, path.with_name(path.name + ".gz")):
        if candidate.is_file():
            return candidate
    return None
