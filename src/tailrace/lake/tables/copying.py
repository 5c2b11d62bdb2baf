"""Copies collections into the state, chunk by chunk. What was copied is noted in the same transaction, so that a copy
that was interrupted at any moment goes on where it stopped."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

from tailrace.base import durable
from tailrace.core import raw_bson
from tailrace.core.oplog.cluster_time import ZERO, ClusterTime
from tailrace.core.oplog.history import reaches_back
from tailrace.core.oplog.selection import Selection
from tailrace.errors import SinkError
from tailrace.lake.tables.settings import TableSettings
from tailrace.lake.tables.state import CopyBegun, CopyingCollection, TabledCollection, TableState
from tailrace.read.snapshot.reader import SnapshotChunk, places_of, range_reader
from tailrace.read.snapshot.state import LOWEST, KeyRange
from tailrace.read.source.connection import RETRY_SECONDS
from tailrace.read.source.listing import UnreadableNameError
from tailrace.read.window.oplogs import Oplogs
from tailrace.read.window.sortable_key import sortable_key

#: After how many bytes or seconds progress is noted: the user's own limit may make a copy slow.
_NOTED_BYTES: Final = 32 << 20
_NOTED_S: Final = 5.0
#: The copy's witness is taken again this often at most.
_MARK_S: Final = 1.0

_log = logging.getLogger("tailrace.tables")


class TablesCopy:
    """Copies from ``oplogs``' deployment into ``state``. ``copied`` counts the documents.

    ``settings``  how many documents a second it copies at most, and what is masked in them
    ``stopped``   when it is set, the copy ends with an error
    """

    def __init__(self, oplogs: Oplogs, state: TableState, settings: TableSettings, *, stopped: threading.Event) -> None:
        self._oplogs = oplogs
        self._state = state
        self._per_second = settings.documents_per_second
        self._stopped = stopped
        self._masks = settings.masks
        self.copied = 0
        self._marked = -math.inf

    def now(self) -> ClusterTime:
        """A cluster time that is no earlier than any write made before this call."""
        return places_of(self._oplogs.deployment, RETRY_SECONDS).now()

    def begin(self) -> ClusterTime:
        """Begin the first copy, or go on with the one that was interrupted. Returns the time after which the oplogs
        are to be read."""
        begun = self._state.copy_begun()
        if begun is not None and self._can_go_on(begun):
            _log.info("the copy that began at %s goes on", begun.start)
            return begun.start
        if begun is not None:
            _log.warning(
                "the copy begins again: the oplogs do not reach back to %s, or the shards changed", begun.start
            )
        with self._state.writing() as state:
            state.clear_all()
            witness = self._oplogs.witness()
            begun = CopyBegun(self.now(), self._oplogs.members, witness)
            state.set_copy_begun(begun)
        return begun.start

    def _can_go_on(self, begun: CopyBegun) -> bool:
        oldest = [member.source.oldest() for member in self._oplogs.live]
        return begun.members == self._oplogs.members and all(reaches_back(begun.start, *one) for one in oldest)

    def listed(self, selection: Selection) -> dict[str, str]:
        """The selected collections that are there now: their namespaces by UUID (hex)."""
        places = places_of(self._oplogs.deployment, RETRY_SECONDS)
        found = [one for scope in selection.scopes for one in places.collections(scope, selection)]
        return {one.uuid.hex(): one.namespace for one in found if selection.has(one.namespace)}

    def selected(self, selection: Selection) -> list[TabledCollection]:
        """Copy the selected collections that the state does not have. The caller notes that it has them."""
        known = {one.uuid for one in self._state.collections()}
        wanted = self.listed(selection)
        begun = self._state.copying()
        for uuid in begun.keys() - wanted.keys():
            self._forget(begun[uuid])
        copied: list[TabledCollection] = []
        for uuid, namespace in wanted.items():
            if uuid in known:
                continue
            collection = begun.get(uuid) or self._new(uuid)
            if self._copy(collection, namespace):
                copied.append(TabledCollection(uuid, collection.number, namespace))
            else:
                self._forget(collection)
        return copied

    def give_up(self) -> None:
        """Forget copies that were interrupted and are no longer wanted. They must be gone before reading the oplogs
        goes on: otherwise they would lack the changes that are read meanwhile."""
        for collection in self._state.copying().values():
            self._forget(collection)

    def _new(self, uuid: str) -> CopyingCollection:
        with self._state.writing() as state:
            collection = CopyingCollection(uuid, state.next_number(), LOWEST.hex())
            state.set_copying(collection)
        return collection

    def _forget(self, collection: CopyingCollection) -> None:
        """Forget the copy of a collection that is gone or no longer selected."""
        with self._state.writing() as state:
            state.clear(collection.number)
            state.end_copying(collection.uuid)

    def _copy(self, collection: CopyingCollection, namespace: str) -> bool:
        """Copy what is left of a collection. Returns whether it existed to the end, under a name that can be read: if
        it gets another one later, the oplog tells so, and all of it is copied then."""
        uuid = bytes.fromhex(collection.uuid)
        waiting: list[tuple[bytes, bytes]] = []
        size, noted = 0, time.monotonic()
        try:
            for chunk in () if collection.done else self._chunks(namespace, uuid, bytes.fromhex(collection.at)):
                waiting += [(key_of(document), document) for document in self._masked(namespace, chunk)]
                size += sum(map(len, chunk.documents))
                collection = replace(collection, at=chunk.to.hex())
                if size >= _NOTED_BYTES or time.monotonic() - noted >= _NOTED_S or self._stopped.is_set():
                    self._keep(collection, waiting)
                    waiting, size, noted = [], 0, time.monotonic()
                if self._stopped.is_set():
                    raise SinkError("the copy was stopped before its end", hint="The next run continues it")
        except UnreadableNameError:
            return False
        self._keep(replace(collection, done=True), waiting)
        return self.exists(namespace, uuid)

    def exists(self, namespace: str, uuid: bytes) -> bool:
        """Whether a collection is there now, under whatever name that can be read."""
        database = namespace.partition(".")[0]
        try:
            return places_of(self._oplogs.deployment, RETRY_SECONDS).placement(uuid, database) is not None
        except UnreadableNameError:
            return False

    def _keep(self, collection: CopyingCollection, documents: list[tuple[bytes, bytes]]) -> None:
        begun = self._state.copy_begun()
        if begun is not None and time.monotonic() - self._marked >= _MARK_S:
            # The entry of the copy's beginning says nothing of what is read later.
            begun, self._marked = replace(begun, witness=self._oplogs.witness()), time.monotonic()
        with self._state.writing() as state:
            if begun is not None:
                state.set_copy_begun(begun)
            for key, document in documents:
                state.put(collection.number, key, ZERO, document)
            state.set_copying(collection)
        self.copied += len(documents)
        durable.step("tables.copied")

    def documents(self, namespace: str, uuid: bytes) -> Iterator[Sequence[bytes]]:
        """All documents of a collection, masked, a chunk at a time. Raises UnreadableNameError where it gets a name
        that nobody can read."""
        return (self._masked(namespace, chunk) for chunk in self._chunks(namespace, uuid, LOWEST))

    def _masked(self, namespace: str, chunk: SnapshotChunk) -> Sequence[bytes]:
        mask = None if self._masks is None else self._masks.of_collection(namespace)
        return chunk.documents if mask is None else [mask.document(document) for document in chunk.documents]

    def _chunks(self, namespace: str, uuid: bytes, at: bytes) -> Iterator[SnapshotChunk]:
        read = range_reader(self._oplogs.deployment, self.now())
        begun, count = time.monotonic(), 0
        for chunk in read(namespace, uuid, KeyRange(at)):
            yield chunk
            count += len(chunk.documents)
            if self._per_second is not None:
                self._stopped.wait(max(0.0, begun + count / self._per_second - time.monotonic()))


def key_of(document: bytes) -> bytes:
    """The sortable key of a document. Raises SinkError if it has no ``_id``."""
    element = raw_bson.find(document, b"_id")
    if element is None:
        raise SinkError("a document without _id cannot be in a table")
    return sortable_key(element.type, raw_bson.value(document, element))
