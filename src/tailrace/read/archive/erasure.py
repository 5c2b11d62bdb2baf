"""Take documents out of an archive: the segments that hold something of them are written anew.

A segment is replaced in steps, each of which leaves an archive that is whole: the new files appear beside the old ones;
if it was the newest segment, the head then names the new file; and then the old ones are deleted. If there are two
segments of one span, the one that the segment after it, or the head, names counts; so until the last step readers see
what they saw before. The new footer says whose place it took (``replaces``), which is what the segment after it names,
and keeps what that one was written after. So no other segment is written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from tailrace.base import durable
from tailrace.base.durable import publish_file, writing
from tailrace.base.object_place import ObjectPlace
from tailrace.core.event.named_document import NamedDocuments, StoreErasure
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.plan.request import PreImageKey
from tailrace.errors import SinkError, UsageError, invariant
from tailrace.read.archive.claim import FolderClaim, StoreClaim, claim_of
from tailrace.read.archive.keeping import FolderKeeping, StoreKeeping, keeping
from tailrace.read.archive.layout import (
    IMAGES,
    ArchiveSegment,
    existing,
    head,
    oplog_folder,
    original_digest,
    segments,
)
from tailrace.read.archive.named import DocumentEntries, SegmentFindings, erased_images, search_entries
from tailrace.read.archive.place import ArchivePlace, files_in, has_files
from tailrace.read.archive.segment import ImagesWriter, SegmentReader, SegmentWriter
from tailrace.read.source.batch import entry_time

#: How many characters of a file's name say its range.
_SPAN: Final = 33
_DELETES: Final = (
    "{count:,} deletes of the documents, with their document keys: whoever reads on from an earlier position and still "
    "holds a document learns from them that it is gone"
)
_WHOLE: Final = "Stop 'tailrace archive', repeat this command, and start it again: it goes on where it was"


@dataclass(slots=True)
class _Erased:
    """What was erased from a segment, by collection."""

    entries: int = 0
    by_collection: dict[str, dict[str, Any]] = field(default_factory=dict)

    def add(self, collections: set[str], time: ClusterTime) -> None:
        """Note an entry."""
        self.entries += 1
        for name in collections:
            found = self.by_collection.setdefault(name, {"entries": 0, "first": f"{time:016x}", "last": f"{time:016x}"})
            found["entries"] += 1
            found["first"] = min(found["first"], f"{time:016x}")
            found["last"] = max(found["last"], f"{time:016x}")


def erase_documents(
    root: ArchivePlace,
    documents: NamedDocuments,
    *,
    dry_run: bool = False,
    on_segment: Callable[[ArchivePlace], None] = lambda path: None,
) -> StoreErasure:
    """Erase the inserts and updates of ``documents``, the copies of them that no-ops hold, and their stored pre-images
    from the archive at ``root``. Deletes stay. ``dry_run`` counts, and changes nothing. ``on_segment`` is notified of
    each segment that is read.

    Of an archive in an object store, the place knows the folder of its writer's state (``archive_place``).

    Raises UsageError where there is no archive, or a document was still there when the archive ended; SinkError where a
    writer runs; SourceError where the archive is damaged or has a hole. What was erased until then stays erased."""
    report = StoreErasure("archive", str(root))
    wanted = DocumentEntries(documents)
    folders = [one for one in (oplog_folder(root, name) for name in existing(root).oplogs) if has_files(one)]
    with ExitStack() as stack:
        kept = {} if dry_run else stack.enter_context(_claimed(root, folders))
        found = {one: segments(one) for one in folders}
        findings = [(folder, one) for folder in folders for one in _searched(found[folder], wanted, on_segment)]
        _count(findings, wanted, report)
        if report.total and (there := wanted.still_there()):
            raise UsageError(
                f"{there:,} of the documents were still there when the archive {root} ended: nothing was erased",
                hint="Delete them at the source, let the archive go on, and repeat this command",
            )
        if not dry_run:
            report.found.clear()  # it is counted again as it goes
            for folder, one in findings:
                for what, count in _replace(kept[folder], found[folder], one, wanted).items():
                    report.count(what, count)
                    report.erased += count
            _remove_leftovers(kept, found)
    for folder in folders:
        _name_unread(folder, report)
    return report


def _searched(
    found: list[ArchiveSegment],
    wanted: DocumentEntries,
    on_segment: Callable[[ArchivePlace], None],
) -> Iterator[SegmentFindings]:
    for segment in found:
        on_segment(segment.path)
        yield search_entries(found, segment, wanted)


def _count(findings: list[tuple[ArchivePlace, SegmentFindings]], wanted: DocumentEntries, report: StoreErasure) -> None:
    """What is to be erased, once every UUID that the archive knows is known."""
    deletes, unclear = 0, 0
    for _, one in findings:
        for (uuid, key), count in one.copies.items():
            if wanted.is_of_copy(uuid, key):
                one.erasable += count
            elif not wanted.knows(uuid):
                unclear += count
        if wanted.uuids:
            one.images = sum(erased for rows in erased_images(SegmentReader(one.segment), wanted) for _, erased in rows)
        deletes += one.deletes
        report.count("entries", one.erasable)
        report.count("stored pre-images", one.images)
    if deletes:
        report.kept.append(_DELETES.format(count=deletes))
    if unclear:
        report.left.append(
            f"{unclear:,} entries with such an _id are of collections that resharding filled, and the archive does not "
            "show from which collection: they go with their segments (`tailrace archive --keep`)"
        )


@contextmanager
def _claimed(
    root: ArchivePlace, folders: list[ArchivePlace]
) -> Iterator[dict[ArchivePlace, FolderKeeping | StoreKeeping]]:
    """Keep the archive's writer out. What an earlier run has left is removed."""
    if isinstance(root, ObjectPlace) and not root.bucket.beside.parts:
        raise UsageError(
            f"erasing from {root} needs the state of its writer",
            hint="--state FOLDER: the local folder that 'tailrace archive' has as --state",
        )
    claim = claim_of(root)
    with ExitStack() as stack:
        stack.enter_context(claim.alone())
        if isinstance(claim, StoreClaim):
            claim.begin()
            claim.renew(existing(root).document())
        kept = {}
        for folder in folders:
            kept[folder] = stack.enter_context(_alone(folder, claim))
        yield kept


@contextmanager
def _alone(folder: ArchivePlace, claim: FolderClaim | StoreClaim) -> Iterator[FolderKeeping | StoreKeeping]:
    one = keeping(folder, claim)
    with one.alone() as alone:
        if not alone:
            raise SinkError(f"'tailrace archive' writes {folder}: nothing was erased from it", hint=_WHOLE)
        reach, found = head(folder), segments(folder)
        if reach is not None:
            if found and found[-1].until > reach.until:  # a killed writer has not named it
                reach = replace(reach, until=found[-1].until, newest=found[-1].digest)
            one.write_head(reach)
            one.remove_before()
        yield one


def _replace(
    kept: FolderKeeping | StoreKeeping, found: list[ArchiveSegment], findings: SegmentFindings, wanted: DocumentEntries
) -> dict[str, int]:
    """Write a segment anew, if it holds something of the documents. Returns how much was erased of what."""
    if not findings.erasable and not findings.images:
        return {}
    old = findings.segment
    new, gone = _written(kept, old, wanted)
    invariant(any(gone.values()), "something was found in a segment, and nothing was erased from it")
    durable.step("archive.erasure.published")
    reach = kept.head()
    assert reach is not None
    if reach.until == new.until:
        kept.write_head(replace(reach, newest=new.digest))
    with writing(kept.scratch):
        old.path.unlink()
        durable.step("archive.erasure.removed")
    found[found.index(old)] = new
    left = search_entries(found, new, wanted)
    invariant(not left.erasable, "a segment that was written anew still holds something of the documents")
    return gone


def _written(
    kept: FolderKeeping | StoreKeeping, old: ArchiveSegment, wanted: DocumentEntries
) -> tuple[ArchiveSegment, dict[str, int]]:
    """Write a segment anew. Returns it, and how much was erased of what."""
    scratch, reader = kept.scratch, SegmentReader(old)
    put = kept.put or (lambda temporary, name: publish_file(temporary, scratch / name))
    erased = _Erased(by_collection={name: dict(one) for name, one in reader.erased.items()})
    with SegmentWriter(scratch, old.after) as writer, ImagesWriter(scratch, old.after) as images:
        gone = 0
        for rows in erased_images(reader, wanted):
            stays = [(_key(row), row["document"]) for row, erases in rows if not erases]
            gone += len(rows) - len(stays)
            images.add(stays)
        for group in range(reader.row_groups):
            writer.add(b"".join(_rewritten(reader, group, wanted, erased)))
        images.publish(scratch / f"{old.span}.images.parquet", put)
        further = {"replaces": original_digest(old), "erased": erased.by_collection}
        new = writer.publish(old.until, images, reader.previous, put, further)
    return replace(new, path=old.path.parent / new.path.name), {"entries": erased.entries, "stored pre-images": gone}


def _rewritten(reader: SegmentReader, group: int, wanted: DocumentEntries, erased: _Erased) -> Iterator[bytes]:
    for entry in reader.column(group, "entry").to_pylist():
        new = wanted.rewritten(entry)
        if new is not entry:
            erased.add(wanted.collections_of(entry), entry_time(entry))
        yield new


def _key(row: Mapping[str, Any]) -> PreImageKey:
    return PreImageKey(row["collection_uuid"], ClusterTime(row["cluster_time"]), row["operation_index"])


def _remove_leftovers(
    kept: Mapping[ArchivePlace, FolderKeeping | StoreKeeping], found: Mapping[ArchivePlace, list[ArchiveSegment]]
) -> None:
    """Delete the pre-images that no segment refers to any more, and what an earlier run has left of old segments."""
    for folder, there in found.items():
        spans = {one.span: one for one in there}
        for name in [one.name for one in files_in(folder)]:
            segment = spans.get(name[:_SPAN])
            if segment is None or name == segment.path.name:
                continue
            if IMAGES.fullmatch(name) and SegmentReader(segment).names_images(name):
                continue
            with writing(folder if isinstance(folder, Path) else kept[folder].scratch):
                (folder / name).unlink()
                durable.step("archive.erasure.cleaned")
        if isinstance(folder, Path):
            durable.sync_directory(folder)


def _name_unread(folder: ArchivePlace, report: StoreErasure) -> None:
    """Files that were not searched."""
    found = segments(folder)
    read, spans = {one.path.name for one in found}, {one.span for one in found}
    names = {one.name for one in files_in(folder) if one.name.endswith((".parquet", ".unfinished"))}
    unread = {name for name in names - read if not (IMAGES.fullmatch(name) and name[:_SPAN] in spans)}
    if unread:
        report.left.append(
            f"files in {folder} that are not yet segments, or no longer are, were not searched: {len(unread):,}. "
            "Repeat this command when the archive has gone on, or has been stopped and started"
        )
