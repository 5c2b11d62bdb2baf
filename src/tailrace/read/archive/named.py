"""What an archive holds about some documents. It is not rewritten: its segments are the oplog, chained by their
digests, and are removed when they are old."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Final

import pyarrow as pa

from tailrace.core import raw_bson
from tailrace.core.event.named_document import NamedDocuments, StoreErasure, id_key
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.raw_bson import ARRAY, BINARY, OBJECT, STRING
from tailrace.errors import OplogFormatError
from tailrace.read.archive.checked_file import DAMAGE, damaged
from tailrace.read.archive.layout import IMAGES, ArchiveSegment, existing, followed, oplog_folder, segments
from tailrace.read.archive.place import ArchivePlace, files_in, has_files
from tailrace.read.archive.segment import SegmentReader

#: Where resharding copies a collection's documents to, in its database.
#: How many characters of a file's name say its range.
_SPAN: Final = 33
_RESHARDING: Final = ".system.resharding."


def find_documents(root: ArchivePlace, documents: NamedDocuments) -> StoreErasure:
    """Count the entries and the stored pre-images of ``documents`` in the archive at ``root``, and say how long they
    stay. Nothing is changed.

    Raises UsageError where there is no archive, SourceError where it is damaged or has a hole."""
    report = StoreErasure("archive", str(root))
    ends: list[ClusterTime] = []
    for name in existing(root).oplogs:
        folder = oplog_folder(root, name)
        if not has_files(folder):
            continue
        found = segments(folder)
        for segment in found:
            entries, images = _found_in(segment, found, documents)
            report.count("entries", entries)
            report.count("stored pre-images", images)
            ends += [segment.until] if entries or images else []
        names = {one.name for one in files_in(folder) if one.name.endswith((".parquet", ".unfinished"))}
        searched = {one.span for one in found}
        read = {one.path.name for one in found}
        unread = {name for name in names - read if not (IMAGES.fullmatch(name) and name[:_SPAN] in searched)}
        if unread:
            report.left.append(
                f"files in {folder} that are not yet segments, or no longer are, were not searched: {len(unread):,}. "
                "Repeat this command when the archive has gone on, or has been stopped and started"
            )
    if ends:
        last = datetime.fromtimestamp(max(ends).seconds, UTC).isoformat(timespec="seconds")
        report.left.append(
            f"an archive is not rewritten: it is the oplog. The last segment with something of the documents ends at "
            f"{last}. `tailrace archive --keep 30d` removes a segment 30 days after its end, if there is a newer one. "
            "Let the archive run with a --keep that fits, and repeat this command then"
        )
    return report


def _found_in(segment: ArchiveSegment, found: list[ArchiveSegment], documents: NamedDocuments) -> tuple[int, int]:
    """How many entries and stored pre-images of a segment are of the documents."""
    reader = SegmentReader(segment)
    if not followed(segment, reader.previous, found):
        raise damaged(segment.path, ValueError("it was not written after the segment before it"))
    count, uuids = 0, set[bytes]()
    try:
        for group in range(reader.row_groups):
            codes, named = reader.pairs(group)
            wanted = [operation == "c" or bool(_collections(where, documents)) for operation, where in named]
            if any(wanted):
                chosen = pa.array([wanted[code] for code in codes.to_pylist()], pa.bool_())
                for entry in reader.column(group, "entry").filter(chosen).to_pylist():
                    # All of them, since each may give a UUID.
                    found_here = [_is_of(one, documents, uuids) for one in _operations(entry)]
                    count += any(found_here)
        return count, _images_in(reader, documents, uuids)
    except OplogFormatError as error:
        raise damaged(segment.path, error) from None


def _images_in(reader: SegmentReader, documents: NamedDocuments, uuids: set[bytes]) -> int:
    file = reader.images()
    if file is None or not uuids:
        return 0
    keys, count = {one.key for one in documents.documents}, 0
    try:
        for group in range(file.num_row_groups):
            table = file.read_row_group(group, columns=["collection_uuid", "document"], use_threads=False)
            pairs = zip(*(column.to_pylist() for column in table.columns), strict=True)
            count += sum(uuid in uuids and id_key(document) in keys for uuid, document in pairs)
    except DAMAGE as error:
        raise damaged(reader.images_path, error) from None
    return count


def _operations(entry: bytes) -> Iterator[bytes]:
    """The entry, or the operations of its ``applyOps`` at any depth."""
    waiting = [entry]
    while waiting:
        one = waiting.pop()
        body = raw_bson.find(one, b"o")
        inner = None
        if body is not None and body.type == OBJECT:
            inner = raw_bson.find(one, b"applyOps", body.value_start)
        if inner is None or inner.type != ARRAY:
            yield one
            continue
        for element in raw_bson.elements(one, inner.value_start):
            if element.type == OBJECT:
                waiting.append(raw_bson.value(one, element))


def _is_of(operation: bytes, documents: NamedDocuments, uuids: set[bytes]) -> bool:
    """Whether an operation is of one of the documents. ``uuids`` gets that of a collection of theirs."""
    where = raw_bson.find(operation, b"ns")
    if where is None or where.type != STRING:
        return False
    meant = _collections(raw_bson.value(operation, where)[4:-1].decode("utf-8", "replace"), documents)
    if not meant:
        return False
    uuid = raw_bson.find(operation, b"ui")
    if uuid is not None and uuid.type == BINARY:
        uuids.add(raw_bson.value(operation, uuid)[5:])
    for name in (b"o2", b"o"):
        part = raw_bson.find(operation, name)
        if part is not None and part.type == OBJECT:
            key = id_key(raw_bson.value(operation, part))
            if key is not None and any(key in documents.keys(one) for one in meant):
                return True
    return False


def _collections(where: str, documents: NamedDocuments) -> list[str]:
    """The documents' collections that a namespace of the oplog may be: itself, or what resharding copies them to."""
    return [
        one for one in documents.namespaces if where == one or where.startswith(f"{one.partition('.')[0]}{_RESHARDING}")
    ]
