"""Which of an archive's entries and stored pre-images are of some documents, and which of them may be erased."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import pyarrow as pa

from tailrace.core import raw_bson
from tailrace.core.event.named_document import NamedDocuments, id_key
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.oplog.erased import erased_entry, without_operations
from tailrace.core.raw_bson import ARRAY, BINARY, OBJECT, STRING
from tailrace.errors import OplogFormatError
from tailrace.read.archive.checked_file import DAMAGE, damaged
from tailrace.read.archive.layout import ArchiveSegment, followed
from tailrace.read.archive.segment import SegmentReader
from tailrace.read.source.batch import entry_time

#: Where resharding copies a collection's documents to, in its database, and how the collection's UUID ends that name.
_RESHARDING: Final = ".system.resharding."
_NO_OP: Final = b"n"


@dataclass(slots=True)
class SegmentFindings:
    """What a segment holds of the documents.

    ``erasable``  entries that can be erased, ``deletes`` those that stay: they only say that a document is gone
    ``copies``    entries in collections that resharding fills, by the UUID in the collection's name and the document's
                  key: whether they are of the documents is known when the collections' UUIDs are
    ``images``    stored pre-images
    """

    segment: ArchiveSegment
    erasable: int = 0
    deletes: int = 0
    copies: Counter[tuple[str, bytes]] = field(default_factory=Counter)
    images: int = 0


class DocumentEntries:
    """Says of operations whether they are of ``documents``. It learns the collections' UUIDs from what it is shown."""

    def __init__(self, documents: NamedDocuments) -> None:
        self._documents = documents
        self._databases = {one.partition(".")[0] for one in documents.namespaces}
        self.uuids: dict[bytes, set[str]] = {}
        #: The last that was seen of each document, by collection and key: its cluster time, and whether it was there.
        self._last: dict[tuple[str, bytes], tuple[ClusterTime, bool]] = {}

    def looks_at(self, operation: str, namespace: str) -> bool:
        """Whether entries of this kind may be of the documents. Commands hold transactions and say what was dropped,
        and a no-op may hold a whole entry that came with a session from another shard."""
        return operation == "c" or (operation == "n" and not namespace) or self._may_be(namespace)

    def _may_be(self, namespace: str) -> bool:
        return namespace in self._documents.namespaces or self._resharded(namespace) is not None

    def _resharded(self, namespace: str) -> str | None:
        """The UUID that ends the name of a collection which resharding fills, in a database of the documents."""
        database, found, uuid = namespace.partition(_RESHARDING)
        return uuid if found and database in self._databases else None

    def find(self, entry: bytes, findings: SegmentFindings) -> None:
        """Count what an entry holds of the documents."""
        copies: set[tuple[str, bytes]] = set()
        is_of = is_delete = False
        time = entry_time(entry)
        is_open = _is_open(entry)
        for operation in operations_in(entry):
            namespace, kind = _namespace(operation), _kind(operation)
            self._follow_command(operation, time)
            copied = self._resharded(namespace)
            key = self._key(operation, self._meant(namespace))
            if key is None:
                continue
            if copied is not None:
                copies.add((copied, key))
                continue
            is_of |= kind != b"d"
            is_delete |= kind == b"d"
            if kind in (b"i", b"u", b"d") and not is_open:
                self._note_last(namespace, key, time, there=kind != b"d", moved=_is_moved(operation))
        findings.erasable += is_of
        findings.deletes += is_delete and not is_of
        if not is_of:
            findings.copies.update(copies)

    def rewritten(self, entry: bytes) -> bytes:
        """The entry without what it holds of the documents, by what is known of UUIDs now; itself if that is nothing.
        Deletes stay."""
        operations = list(operations_in(entry))
        if not any(self._erases(one) for one in operations):
            return entry
        collections = self.collections_of(entry)
        if operations[0] is entry or _kind(entry) == _NO_OP:
            return erased_entry(entry, collections)
        return without_operations(entry, collections, self._erases)

    def _erases(self, operation: bytes) -> bool:
        if _kind(operation) == b"d":
            return False
        namespace = _namespace(operation)
        copied = self._resharded(namespace)
        meant = self._meant(namespace) if copied is None else self.copied_from(copied)
        return self._key(operation, meant) is not None

    def is_of_copy(self, uuid: str, key: bytes) -> bool:
        """Whether what resharding copied from the collection with this UUID is of the documents."""
        return any(key in self._documents.keys(one) for one in self.copied_from(uuid))

    def knows(self, uuid: str) -> bool:
        """Whether this is the UUID of one of the documents' collections."""
        return bool(self.copied_from(uuid))

    def copied_from(self, uuid: str) -> list[str]:
        """The documents' collections that have this UUID, as far as it is known; none if it is not."""
        return [one for known, names in self.uuids.items() if _text(known) == uuid for one in names]

    def collections_of(self, entry: bytes) -> set[str]:
        """The documents' collections that something is erased of with this entry."""
        found: set[str] = set()
        for operation in operations_in(entry):
            if self._erases(operation):
                namespace = _namespace(operation)
                copied = self._resharded(namespace)
                found |= {namespace} if copied is None else set(self.copied_from(copied))
        return found

    def erases_image(self, uuid: bytes, document: bytes) -> bool:
        """Whether a stored pre-image of a collection is of the documents."""
        key = id_key(document)
        return key is not None and any(key in self._documents.keys(one) for one in self.uuids.get(uuid, ()))

    def still_there(self) -> int:
        """How many documents were there, by the last that was seen of them."""
        return sum(there for _, there in self._last.values())

    def _meant(self, namespace: str) -> list[str]:
        """The documents' collections that an operation on ``namespace`` may be of."""
        if namespace in self._documents.namespaces:
            return [namespace]
        if self._resharded(namespace) is None:
            return []
        database = namespace.partition(".")[0]
        return [one for one in self._documents.namespaces if one.partition(".")[0] == database]

    def _key(self, operation: bytes, meant: list[str]) -> bytes | None:
        """The document's key if the operation is of one of the documents in the collections ``meant``."""
        if not meant:
            return None
        uuid, namespace = raw_bson.find(operation, b"ui"), _namespace(operation)
        if uuid is not None and uuid.type == BINARY and namespace in self._documents.namespaces:
            self.uuids.setdefault(raw_bson.value(operation, uuid)[5:], set()).add(namespace)
        for name in (b"o2", b"o"):
            part = raw_bson.find(operation, name)
            key = id_key(raw_bson.value(operation, part)) if part is not None and part.type == OBJECT else None
            if key is not None and any(key in self._documents.keys(one) for one in meant):
                return key
        return None

    def _note_last(self, namespace: str, key: bytes, time: ClusterTime, *, there: bool, moved: bool) -> None:
        if moved and not there:
            return  # its chunk has gone to another shard
        known = self._last.get((namespace, key))
        if known is None or known[0] <= time:
            self._last[namespace, key] = time, there

    def _follow_command(self, operation: bytes, time: ClusterTime) -> None:
        """A collection that was dropped or renamed has no documents any more, as far as is known here."""
        if _kind(operation) != b"c":
            return
        body = raw_bson.find(operation, b"o")
        if body is None or body.type != OBJECT:
            return
        database = _namespace(operation).partition(".")[0]
        gone: set[str] = set()
        for element in raw_bson.elements(operation, body.value_start):
            text = raw_bson.value(operation, element)[4:-1].decode("utf-8", "replace") if element.type == STRING else ""
            if element.name == b"drop":
                gone.add(f"{database}.{text}")
            elif element.name in (b"renameCollection", b"to"):
                gone.add(text)
            elif element.name == b"dropDatabase":
                gone |= {one for one in self._documents.namespaces if one.partition(".")[0] == database}
        for place, (at, _) in list(self._last.items()):
            if place[0] in gone and at <= time:
                self._last[place] = time, False


def search_entries(found: list[ArchiveSegment], segment: ArchiveSegment, wanted: DocumentEntries) -> SegmentFindings:
    """Look through a segment's entries. Raises SourceError where it is damaged."""
    reader = SegmentReader(segment)
    if not followed(segment, reader.previous, found):
        raise damaged(segment.path, ValueError("it was not written after the segment before it"))
    findings = SegmentFindings(segment)
    try:
        for group in range(reader.row_groups):
            codes, named = reader.pairs(group)
            looks = [wanted.looks_at(*pair) for pair in named]
            if any(looks):
                chosen = pa.array([looks[code] for code in codes.to_pylist()], pa.bool_())
                for entry in reader.column(group, "entry").filter(chosen).to_pylist():
                    wanted.find(entry, findings)
    except OplogFormatError as error:
        raise damaged(segment.path, error) from None
    return findings


def erased_images(reader: SegmentReader, wanted: DocumentEntries) -> Iterator[list[tuple[dict[str, Any], bool]]]:
    """The stored pre-images beside a segment, some at a time, each with whether it is to be erased."""
    file = reader.images()
    if file is None:
        return
    try:
        for group in range(file.num_row_groups):
            rows = file.read_row_group(group, use_threads=False).to_pylist()
            yield [(row, _erases(row, reader, wanted)) for row in rows]
    except DAMAGE as error:
        raise damaged(reader.images_path, error) from None


def _erases(row: dict[str, Any], reader: SegmentReader, wanted: DocumentEntries) -> bool:
    """A collection that was renamed keeps its UUID, and is another one to whoever names documents: the entry decides.
    (A transaction's operations are not looked up: there the UUID does.)"""
    if not wanted.erases_image(row["collection_uuid"], row["document"]):
        return False
    entry = reader.entry(ClusterTime(row["cluster_time"]))
    return entry is None or _kind(entry) not in (b"u", b"d") or wanted.looks_at("u", _namespace(entry))


def operations_in(entry: bytes) -> Iterator[bytes]:
    """The entry, or the operations of its ``applyOps`` at any depth, or the whole entry that a no-op holds."""
    waiting = [entry]
    while waiting:
        one = waiting.pop()
        body = raw_bson.find(one, b"o")
        inner = None
        if body is not None and body.type == OBJECT:
            inner = raw_bson.find(one, b"applyOps", body.value_start)
        if inner is not None and inner.type == ARRAY:
            for element in raw_bson.elements(one, inner.value_start):
                if element.type == OBJECT:
                    waiting.append(raw_bson.value(one, element))
            continue
        held = raw_bson.find(one, b"o2") if _kind(one) == _NO_OP else None
        if held is not None and held.type == OBJECT:
            whole = raw_bson.value(one, held)
            if raw_bson.find(whole, b"op") is not None and raw_bson.find(whole, b"ns") is not None:
                waiting.append(whole)
                continue
        yield one


def _kind(operation: bytes) -> bytes:
    found = raw_bson.find(operation, b"op")
    return b"" if found is None or found.type != STRING else raw_bson.value(operation, found)[4:-1]


def _namespace(operation: bytes) -> str:
    found = raw_bson.find(operation, b"ns")
    return "" if found is None or found.type != STRING else _decoded(raw_bson.value(operation, found))


def _decoded(value: bytes) -> str:
    return value[4:-1].decode("utf-8", "replace")


def _is_moved(operation: bytes) -> bool:
    found = raw_bson.find(operation, b"fromMigrate")
    return found is not None and found.type == raw_bson.BOOL and raw_bson.value(operation, found) == b"\1"


def _is_open(entry: bytes) -> bool:
    """Whether this is a part of a transaction that may yet be aborted."""
    body = raw_bson.find(entry, b"o")
    return (
        body is not None
        and body.type == OBJECT
        and any(raw_bson.find(entry, name, body.value_start) is not None for name in (b"prepare", b"partialTxn"))
    )


def _text(uuid: bytes) -> str:
    text = uuid.hex()
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"
