"""One segment: written as batches come, and published whole; read by row groups, and checked as it is read."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tailrace.base.durable import publish_file, sync_file, writing
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.plan.request import OplogBatch, PreImageKey
from tailrace.read.archive.checked_file import DAMAGE, CheckedFile, close_checked, damaged
from tailrace.read.archive.columns import SCHEMA, raw_entries, record_batch
from tailrace.read.archive.layout import ArchiveSegment, oplog_of
from tailrace.read.archive.place import ArchivePlace, is_there

#: How many bytes of entries make a row group: what a reader takes at a time.
ROW_GROUP_BYTES: Final = 8 << 20
#: Page checksums are for other readers: ours checks more (``checked_file``).
_COMPRESSION: Final = {"compression": "zstd", "compression_level": 1, "write_page_checksum": True}
_ENTRY_OPTIONS: Final[dict[str, Any]] = {
    **_COMPRESSION,
    "use_dictionary": ["operation", "namespace"],
    "write_statistics": ["cluster_time", "operation", "namespace"],
}
_IMAGES: Final = ".images.parquet"
#: Takes a finished file to its place under a name.
Put = Callable[[Path, str], None]
IMAGES_SCHEMA: Final = pa.schema(
    [
        pa.field("cluster_time", pa.uint64(), nullable=False),
        pa.field("collection_uuid", pa.binary(16), nullable=False),
        pa.field("operation_index", pa.int64(), nullable=False),
        pa.field("document", pa.binary(), nullable=False),
    ]
)


class SegmentWriter:
    """The segment of ``folder`` that begins after ``after``. Used as a context: what was not published is taken away.

    One thread at a time. ``saw`` is called with the rows that are written.
    """

    def __init__(self, folder: Path, after: ClusterTime, saw: Callable[[pa.RecordBatch], None] | None = None) -> None:
        self._saw = saw
        self._folder = folder
        self._after = after
        self._temporary = folder / f".{after:016x}.{os.getpid()}.unfinished"
        self._parts: list[bytes] = []
        self._pending = 0
        self.bytes = 0
        self.entries = 0
        with writing(self._temporary):
            self._file = self._temporary.open("wb")
        self._writer = pq.ParquetWriter(self._file, SCHEMA, **_ENTRY_OPTIONS)

    def add(self, raw: bytes) -> None:
        """Append a run of entries. Raises SinkError where it cannot be written, OplogFormatError for what is no
        entry."""
        self._parts.append(raw)
        self._pending += len(raw)
        self.bytes += len(raw)
        if self._pending >= ROW_GROUP_BYTES:
            self._write()

    def _write(self) -> None:
        raw, self._parts, self._pending = b"".join(self._parts), [], 0
        if raw:
            batch = record_batch(raw)
            self.entries += batch.num_rows
            if self._saw is not None:
                self._saw(batch)
            with writing(self._temporary):
                # Not ``write_batch``: that keeps a part until the file is closed, and what is summed must be there.
                self._writer.write_table(pa.Table.from_batches([batch]), row_group_size=max(1, batch.num_rows))

    def publish(
        self,
        until: ClusterTime,
        images: ImagesWriter | None = None,
        previous: str = "",
        put: Put | None = None,
        further: Mapping[str, object] | None = None,
    ) -> ArchiveSegment:
        """Put the segment in its place, on the device: it holds every entry up to ``until``. ``images``
        are the pre-images that lie next to it, ``previous`` is the digest of the segment before it. ``put``: how the
        finished file gets to its place where that is not in the folder. ``further``: what else its footer says."""
        self._write()
        about = {
            "oplog": oplog_of(self._folder),
            "after": f"{self._after:016x}",
            "until": f"{until:016x}",
            "entries": self.entries,
            "bytes": self.bytes,
            "images": 0 if images is None else images.count,
            "imagesDigest": "" if images is None else images.digest,
            "previous": previous,
            **(further or {}),
        }
        with writing(self._temporary):
            digest = close_checked(self._writer, self._file, self._temporary, about)
            sync_file(self._temporary)
            path = self._folder / f"{self._after:016x}-{until:016x}-{digest}.parquet"
            if put is None:
                publish_file(self._temporary, path)
            else:
                put(self._temporary, path.name)
        return ArchiveSegment(self._after, until, digest, path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if not self._file.closed:
            # The footer goes to a file that is deleted: a full disk must not hide the error that is under way.
            with suppress(OSError, pa.ArrowException):
                self._writer.close()
            with suppress(OSError):
                self._file.close()
        self._temporary.unlink(missing_ok=True)


class ImagesWriter:
    """The pre-images of a segment, next to it. Used as a context, like the segment's own writer."""

    def __init__(self, folder: Path, after: ClusterTime) -> None:
        self._temporary = folder / f".{after:016x}.{os.getpid()}.images.unfinished"
        self._writer: pq.ParquetWriter | None = None
        self._file: io.BufferedWriter | None = None
        self.count = 0
        self.digest = ""

    def add(self, images: Sequence[tuple[PreImageKey, bytes]]) -> None:
        """Append pre-images, which are later than those before."""
        if not images:
            return
        ordered = sorted(images, key=lambda image: (image[0].cluster_time, image[0].apply_ops_index))
        columns = [
            pa.array([int(key.cluster_time) for key, _ in ordered], pa.uint64()),
            pa.array([key.collection_uuid for key, _ in ordered], pa.binary(16)),
            pa.array([key.apply_ops_index for key, _ in ordered], pa.int64()),
            pa.array([document for _, document in ordered], pa.binary()),
        ]
        with writing(self._temporary):
            if self._writer is None:
                self._file = self._temporary.open("wb")
                self._writer = pq.ParquetWriter(self._file, IMAGES_SCHEMA, use_dictionary=False, **_COMPRESSION)
            self._writer.write_table(pa.table(columns, schema=IMAGES_SCHEMA))
        self.count += len(ordered)

    def publish(self, path: Path, put: Put | None = None) -> None:
        """Put them in their place, before the segment appears: of several tries the last one counts. With ``put`` the
        name has their digest too."""
        if self._writer is None or self._file is None:
            return
        with writing(self._temporary):
            self.digest = close_checked(self._writer, self._file, self._temporary, {"images": self.count})
            sync_file(self._temporary)
            if put is None:
                publish_file(self._temporary, path)
            else:
                put(self._temporary, f"{path.name.removesuffix(_IMAGES)}-{self.digest}{_IMAGES}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._writer is not None and self._file is not None and not self._file.closed:
            with suppress(OSError, pa.ArrowException):
                self._writer.close()
            with suppress(OSError):
                self._file.close()
        self._temporary.unlink(missing_ok=True)


class SegmentReader:
    """A segment's entries by row groups. Raises SourceError where the file cannot be read, is damaged, or is another
    one than its name says."""

    def __init__(self, segment: ArchiveSegment) -> None:
        self.segment = segment
        checked = CheckedFile(segment.path, segment.digest)
        self._file = checked.parquet
        self.about: dict[str, Any] = checked.about
        found = self._file.schema_arrow
        if found.names != SCHEMA.names:
            raise damaged(segment.path, ValueError(f"its columns are {', '.join(found.names)}"))
        self._bounds = [self._bounds_of(group) for group in range(self._file.num_row_groups)]
        self._check_statements()

    def _check_statements(self) -> None:
        """What the file says about itself must agree with its name and its place, and each row group with those around
        it."""
        segment, about = self.segment, self.about
        said = tuple(about.get(name) for name in ("after", "until"))
        if said != (f"{segment.after:016x}", f"{segment.until:016x}"):
            raise damaged(segment.path, ValueError(f"it was written as the segment after {said[0]} up to {said[1]}"))
        folder = oplog_of(segment.path.parent)
        if about.get("oplog") != folder:
            raise damaged(segment.path, ValueError(f"it is a segment of the oplog {about.get('oplog')}"))
        edge: int = segment.after
        for low, high in self._bounds:
            if not edge < low <= high <= segment.until:
                raise damaged(segment.path, ValueError("its row groups are out of order"))
            edge = high

    def _bounds_of(self, group: int) -> tuple[int, int]:
        statistics = self._file.metadata.row_group(group).column(0).statistics
        if statistics is None or not statistics.has_min_max:
            raise damaged(self.segment.path, ValueError("a row group without its range of cluster times"))
        return int(statistics.min), int(statistics.max)

    @property
    def previous(self) -> str:
        """The digest of the segment that this one was written after; ``""`` where there was none."""
        return str(self.about.get("previous", ""))

    @property
    def erased(self) -> dict[str, dict[str, Any]]:
        """What was erased from the segment, by collection: how many ``entries``, and the cluster times of the ``first``
        and the ``last``."""
        found: dict[str, dict[str, Any]] = self.about.get("erased", {})
        return found

    @property
    def row_groups(self) -> int:
        return len(self._bounds)

    def bounds(self, group: int) -> tuple[int, int]:
        """The cluster times of a row group's first and last entry."""
        return self._bounds[group]

    def row_group_of(self, time: ClusterTime) -> int | None:
        """The row group in which an entry of that time would lie."""
        for group, (low, high) in enumerate(self._bounds):
            if low <= time <= high:
                return group
        return None

    def column(self, group: int, name: str) -> pa.ChunkedArray:
        """One column of one row group."""
        try:
            return self._file.read_row_group(group, columns=[name], use_threads=False).column(0)
        except DAMAGE as error:
            raise damaged(self.segment.path, error) from None

    def times(self, group: int) -> npt.NDArray[np.uint64]:
        """The cluster times of a row group, ascending."""
        found: npt.NDArray[np.uint64] = self.column(group, "cluster_time").to_numpy()
        low, high = self._bounds[group]
        if not len(found) or found[0] != low or found[-1] != high or not bool(np.all(found[1:] > found[:-1])):
            raise damaged(self.segment.path, ValueError(f"the entries of row group {group} are out of order"))
        return found

    def rows(self, group: int) -> pa.Table:
        """All columns of one row group."""
        try:
            return self._file.read_row_group(group, use_threads=False)
        except DAMAGE as error:
            raise damaged(self.segment.path, error) from None

    @property
    def images_path(self) -> ArchivePlace:
        """Where the pre-images of the segment's entries are."""
        return self.segment.images_place(str(self.about.get("imagesDigest", "")))

    def names_images(self, name: str) -> bool:
        """Whether the file with this name holds the pre-images of the segment's entries."""
        return bool(self.about.get("images")) and self.images_path.name == name

    def images(self) -> pq.ParquetFile | None:
        """The pre-images of the segment's entries; ``None`` where there are none."""
        count, digest = int(self.about.get("images", 0)), str(self.about.get("imagesDigest", ""))
        if not count:
            return None
        path = self.images_path
        if not is_there(path):
            raise damaged(path, ValueError(f"it is missing: {count} pre-images"))
        found = CheckedFile(path, digest).parquet
        if found.metadata.num_rows != count or found.schema_arrow.names != IMAGES_SCHEMA.names:
            raise damaged(path, ValueError(f"it does not hold the {count} pre-images of its segment"))
        return found

    def pairs(self, group: int) -> tuple[pa.Array, list[tuple[str, str]]]:
        """What an entry of the row group does, and where: a number for each row, and the pairs (operation, namespace)
        that the numbers mean."""
        operations = self.column(group, "operation").combine_chunks().dictionary_encode()
        namespaces = self.column(group, "namespace").combine_chunks().dictionary_encode()
        width = max(1, len(namespaces.dictionary))
        codes = pc.add(pc.multiply(operations.indices, width), namespaces.indices)
        found = codes.dictionary_encode()
        named = [
            (str(operations.dictionary[code // width]), str(namespaces.dictionary[code % width]))
            for code in found.dictionary.to_pylist()
        ]
        return found.indices, named

    def batches(self, after: ClusterTime, until: ClusterTime, passes: Any = None) -> Iterator[OplogBatch]:
        """The entries with ``after`` < ts <= ``until``, a batch for each row group, and one with the end's high water.

        ``passes``  says of a pair (operation, namespace) whether such an entry is wanted; the rest is left out
        """
        edge = after
        for group, (low, high) in enumerate(self._bounds):
            if high <= after or low > until:
                continue
            raw = self._entries(group, after, until, whole=after < low and high <= until, passes=passes)
            edge = ClusterTime(min(high, until))
            yield OplogBatch(raw, edge)
        end = min(until, self.segment.until)
        if edge < end:
            yield OplogBatch(b"", end)

    def _entries(self, group: int, after: ClusterTime, until: ClusterTime, *, whole: bool, passes: Any) -> bytes:
        keep: npt.NDArray[np.bool_] | None = None
        if passes is not None:
            codes, named = self.pairs(group)
            wanted = np.array([passes(*pair) for pair in named], np.bool_)
            if not wanted.all():
                keep = wanted[codes.to_numpy()]
                if not keep.any():
                    return b""
        if not whole:
            times = self.times(group)
            inside = (times > np.uint64(after)) & (times <= np.uint64(until))
            keep = inside if keep is None else keep & inside
        column = self.column(group, "entry")
        return raw_entries(column if keep is None else column.filter(pa.array(keep)))

    def entry(self, time: ClusterTime) -> bytes | None:
        """The entry at exactly that time."""
        group = self.row_group_of(time)
        if group is None:
            return None
        times = self.times(group)
        place = int(np.searchsorted(times, np.uint64(time)))
        if place == len(times) or int(times[place]) != time:
            return None
        found: bytes = self.column(group, "entry")[place].as_py()
        return found


def images_of(reader: SegmentReader, keys: Sequence[PreImageKey]) -> dict[PreImageKey, bytes]:
    """Those of the pre-images that lie next to a segment."""
    file = reader.images()
    if file is None:
        return {}
    wanted = set(keys)
    found = {}
    times = pa.array(sorted({int(key.cluster_time) for key in wanted}), pa.uint64())
    try:
        for group in range(file.num_row_groups):
            table = file.read_row_group(group, use_threads=False)
            table = table.filter(pc.is_in(table.column("cluster_time"), times))
            for time, uuid, index, document in zip(*(column.to_pylist() for column in table.columns), strict=True):
                key = PreImageKey(uuid, ClusterTime(time), index)
                if key in wanted:
                    found[key] = document
    except DAMAGE as error:
        raise damaged(reader.images_path, error) from None
    return found
