"""Change events of a stream, folded by document: what each collection holds after them.

As ``fold.py`` for oplog entries, and with the same parts: an update is the oplog's own delta
(``rawUpdateDescription``), which is applied to the document that the state has, and collections are known by their
UUID. What a stream does not show is noticed: each change has to fit what the state has, and each collection has to get
and lose its name in view.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

from tailrace.core import raw_bson
from tailrace.core.oplog.cluster_time import ZERO, ClusterTime
from tailrace.core.oplog.selection import Selection
from tailrace.errors import SinkError, TailraceError
from tailrace.lake.tables.copying import key_of
from tailrace.lake.tables.event_rows import EventRow, lacks_options, namespace_of
from tailrace.lake.tables.fold import Documents, Folded, write_in_turn
from tailrace.lake.tables.state import TabledCollection
from tailrace.read.window.apply import (
    DELETE_OF,
    INSERT,
    UPDATE,
    DocumentWork,
    StateMismatchError,
    TimedChange,
    has_document_key,
)

#: Changes as events give them: of an insert the document key and then the document, of a replacement the document.
_INSERT_NEW: Final = ord("I")
_REPLACE: Final = ord("R")
#: Where the server makes a collection that gets its name when it is whole.
_TEMPORARY: Final = re.compile(r"[^.]+\.(tmp\.(agg_out|mr)\.|tmp[0-9A-Za-z]{5}\.(convertToCapped|renameCollection))")
#: A collection that is made capped is filled without an event.
_SILENT: Final = ".convertToCapped."
_WITHOUT_DOCUMENTS: Final = frozenset(
    (
        "createIndexes",
        "dropIndexes",
        "invalidate",
        "modify",
        "refineCollectionShardKey",
        "shardCollection",
    )
)
_WHOLE: Final = "Let the stream have all events of these collections: of the whole database, and without a filter"
_COPY_AGAIN: Final = "Begin again, with a copy: another directory and a new checkpoint"


class EventWork(DocumentWork[TabledCollection]):
    """A document and its changes, each of which has to fit: one that does not shows that others are missing."""

    __slots__ = ()

    @property
    def changed(self) -> int | None:
        """See ``DocumentWork``."""
        if self.document is None:
            return self.changes[-1][2]
        return next((time for op, _, time in reversed(self.changes) if op != DELETE_OF), None)

    def apply(self, change: TimedChange) -> None:
        """Apply one change. Raises StateMismatchError."""
        op, body, time = change
        again = time <= self.collection.copied
        if op == _INSERT_NEW:
            size = raw_bson.document_end(body)
            key, body = body[:size], body[size:]
            if not again and self.document is not None and has_document_key(self.document, key):
                raise self._missing("inserted", "is there already", time)
        elif not again and self.document is None and op != UPDATE:
            raise self._missing("replaced" if op == _REPLACE else "deleted", "is not there", time)
        # A replacement is an update whose body is the document, which need not have its _id in front.
        super().apply(({_INSERT_NEW: INSERT, _REPLACE: UPDATE}.get(op, op), body, time))

    def _mismatch(self, error: TailraceError, time: int) -> StateMismatchError:
        return StateMismatchError(super()._mismatch(error, time).message, hint=_WHOLE)

    def _missing(self, what: str, but: str, time: int) -> StateMismatchError:
        return StateMismatchError(
            f"{self.collection.namespace}: at {ClusterTime(time)} a document is {what} that {but} (its key is "
            f"{self.key.hex()[:80]}): the stream lacks events",
            hint=_WHOLE,
        )


class EventFold:
    """Applies events to the state.

    ``collections``  those that are kept, by UUID (16 bytes)
    ``hold``         copies of this micro-batch may hold changes up to this time
    """

    def __init__(
        self,
        selection: Selection,
        collections: Mapping[bytes, TabledCollection],
        *,
        hold: ClusterTime = ZERO,
    ) -> None:
        self._selection = selection
        self._hold = int(hold)
        self.collections = dict(collections)
        self.dropped: list[TabledCollection] = []
        self.disturbed: set[str] = set()
        self._copies: list[tuple[int, bytes, bytes]] = []
        self._changes: dict[bytes, dict[bytes, list[TimedChange]]] = {}
        self._count = 0

    # -- reading ----------------------------------------------------------------------------------------------------

    def read(self, rows: Sequence[EventRow], number: Callable[[], int]) -> None:
        """Group the rows, which are in the order of the stream, by document. ``number`` returns the number for a new
        collection. Raises UsageError and SinkError where they cannot keep tables."""
        for row in rows:
            change = _CHANGES.get(row.operation)
            if row.is_copy:
                self._copied(row, number)
            elif change is not None:
                self._change(row, change, number)
            elif row.operation in ("create", "drop", "rename", "dropDatabase"):
                self._command(row, number)
            elif row.operation not in _WITHOUT_DOCUMENTS:
                raise SinkError(
                    f"the stream cannot keep tables: nobody knows what {row.shown} does to documents",
                    hint=_COPY_AGAIN,
                )

    def _follows(self, namespace: str) -> bool:
        """Whether a collection of that name has a table, or may become one that has."""
        if self._selection.has(namespace):
            return True
        return _TEMPORARY.match(namespace) is not None and self._selection.may_cover(namespace.partition(".")[0])

    def _copied(self, row: EventRow, number: Callable[[], int]) -> None:
        if not self._follows(row.namespace):
            return
        assert row.uuid is not None
        document = row.require(b"fullDocument", "Keep the events as they are")
        collection = self.collections.get(row.uuid)
        if collection is None:
            collection = TabledCollection(row.uuid.hex(), number(), row.namespace)
        self.collections[row.uuid] = collection = replace(collection, copied=max(collection.copied, self._hold))
        self._copies.append((collection.number, key_of(document), document))
        self._count += 1

    def _change(
        self, row: EventRow, change: Callable[[EventRow], tuple[int, bytes]], number: Callable[[], int]
    ) -> None:
        if not self._follows(row.namespace):
            return
        if row.uuid is None:
            raise lacks_options(row, "collectionUUID")
        collection = self._collection(row, row.uuid, number)
        key = key_of(row.require(b"documentKey", "Keep the events as they are"))
        op, body = change(row)
        group = self._changes.setdefault(bytes.fromhex(collection.uuid), {})
        group.setdefault(key, []).append((op, body, int(row.time)))
        self._count += 1

    def _collection(self, row: EventRow, uuid: bytes, number: Callable[[], int]) -> TabledCollection:
        """The collection of an event, which may be the first one of it."""
        found = self.collections.get(uuid)
        if found is None:
            other = next((one for one in self.collections.values() if one.namespace == row.namespace), None)
            if other is not None:
                raise SinkError(
                    f"the stream lacks events: {row.shown} is of another collection than the one that has this name, "
                    "and no drop or rename came between. Resharding and moving a database to another shard do that too",
                    hint=_COPY_AGAIN,
                )
            found = self.collections[uuid] = TabledCollection(uuid.hex(), number(), row.namespace)
        elif found.namespace != row.namespace:
            raise SinkError(
                f"the stream lacks events: {row.shown} is of the collection that was {found.namespace}, and no rename "
                "came between",
                hint=_WHOLE,
            )
        return found

    # -- commands ---------------------------------------------------------------------------------------------------

    def _command(self, row: EventRow, number: Callable[[], int]) -> None:
        if row.operation == "dropDatabase":
            left = [one for one in self.collections.values() if one.namespace.startswith(f"{row.namespace}.")]
            if left:
                raise SinkError(
                    f"the stream lacks events: {row.shown} came, and no drop of {left[0].namespace}", hint=_WHOLE
                )
            return
        if row.uuid is None:
            # Of a view there is no UUID.
            if self._named(row.namespace) or (row.operation == "rename" and self._follows(_target(row))):
                raise lacks_options(row, "collectionUUID")
        elif row.operation == "create":
            if self._follows(row.namespace):
                self._collection(row, row.uuid, number)
        elif row.operation == "drop":
            self._drop(row.uuid)
        else:
            self._rename(row, row.uuid, _target(row))

    def _named(self, namespace: str) -> list[bytes]:
        return [uuid for uuid, one in self.collections.items() if one.namespace == namespace]

    def _drop(self, uuid: bytes) -> None:
        self._changes.pop(uuid, None)
        collection = self.collections.pop(uuid, None)
        if collection is not None:
            self._copies = [one for one in self._copies if one[0] != collection.number]
            self.disturbed.add(collection.namespace)
            self.dropped.append(collection)

    def _rename(self, row: EventRow, uuid: bytes, namespace: str) -> None:
        collection = self.collections.get(uuid)
        if collection is not None and collection.namespace == namespace:
            return  # as another shard has said
        if (collection is None or _SILENT in row.namespace) and self._selection.has(namespace):
            raise SinkError(
                f"{row.namespace} was renamed to {namespace} at {row.time}, and the stream has not shown its documents",
                hint=f"{_WHOLE}. Then {_COPY_AGAIN[0].lower()}{_COPY_AGAIN[1:]}",
            )
        for other in self._named(namespace):
            self._drop(other)
        if collection is None:
            return
        if not self._follows(namespace):
            self._drop(uuid)
            return
        self.disturbed |= {collection.namespace, namespace}
        self.collections[uuid] = replace(collection, namespace=namespace)

    # -- applying ---------------------------------------------------------------------------------------------------

    def apply(self, state: Documents) -> Folded:
        """Bring the state up to the end of what was read. Raises StateMismatchError."""
        touched: dict[int, list[bytes]] = {}
        for number, key, document in self._copies:
            state.put(number, key, ZERO, document)
            touched.setdefault(number, []).append(key)
        write_in_turn(self._works(state), state, touched)
        for gone in self.dropped:
            state.forget(gone)
        return Folded(self._count, touched)

    def _works(self, state: Documents) -> Iterator[DocumentWork[TabledCollection]]:
        for uuid, group in self._changes.items():
            collection = self.collections[uuid]
            for key, changes in group.items():
                yield EventWork(collection, key, state.get(collection.number, key), changes)


def _target(row: EventRow) -> str:
    return namespace_of(row.require(b"to", "Keep the events as they are"))


def _inserted(row: EventRow) -> tuple[int, bytes]:
    key = row.require(b"documentKey", "Keep the events as they are")
    return _INSERT_NEW, key + row.require(b"fullDocument", "Keep the events as they are")


def _updated(row: EventRow) -> tuple[int, bytes]:
    body = row.document(b"rawUpdateDescription")
    if body is None:
        raise lacks_options(row, "rawUpdateDescription")
    return UPDATE, body


def _replaced(row: EventRow) -> tuple[int, bytes]:
    return _REPLACE, row.require(b"fullDocument", "Keep the events as they are")


def _deleted(row: EventRow) -> tuple[int, bytes]:
    return DELETE_OF, row.require(b"documentKey", "Keep the events as they are")


_CHANGES: Final[dict[str, Callable[[EventRow], tuple[int, bytes]]]] = {
    "insert": _inserted,
    "update": _updated,
    "replace": _replaced,
    "delete": _deleted,
}
