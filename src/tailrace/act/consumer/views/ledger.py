"""The ledger of a view of totals: for each source document, whose totals it may count in.

A deletion does not show what was deleted, nor a move where from. So the ledger keeps, by the ``_id`` of the source
document:

``at``     the cluster time of the last change that said what it names
``named``  what the changes of that time said: one value, or none; several after a transaction that changed it twice
``left``   what was named before, and has not been computed again since

It never knows too little: what is named is added before the totals are computed, and what is left is removed only after
they were written with a version of that time or later. A process that stood still finds a later ``at``, and changes
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from bson.raw_bson import RawBSONDocument
from bson.timestamp import Timestamp
from pymongo import DeleteOne, UpdateOne
from pymongo.client_session import ClientSession
from pymongo.collection import Collection
from pymongo.errors import BulkWriteError
from pymongo.read_concern import ReadConcern

from tailrace.act.consumer.views.raw_value import RawValue, one_of, value_at
from tailrace.core import raw_bson
from tailrace.errors import SinkError

_DUPLICATE_KEY: Final = 11000
_T = TypeVar("_T")


@dataclass(slots=True)
class Naming:
    """What changes of one source document said that it names: ``now`` at the time ``at`` of the last one, ``ever`` in
    any of them. Without ``at`` none of them said anything."""

    at: Timestamp | None = None
    now: list[RawValue] = field(default_factory=list)
    ever: list[RawValue] = field(default_factory=list)

    def says(self, named: Sequence[RawValue], at: Timestamp) -> None:
        """One more change, in their order. What is written at one time counts together: shards have no order."""
        self.now = [*self.now, *named] if self.at == at else list(named)
        self.ever += named
        self.at = at


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """What the ledger has on one source document."""

    key: RawValue
    at: Timestamp
    named: tuple[RawValue, ...]
    left: tuple[RawValue, ...]


class Ledger:
    """``retried`` does work again while a primary is away; ``witness`` is an ``_id`` that no document of a user has."""

    def __init__(
        self,
        collection: Collection[RawBSONDocument],
        name: str,
        retried: Callable[[Callable[[], Any]], Any],
    ) -> None:
        self._collection = collection
        self._committed = collection.with_options(read_concern=ReadConcern("majority"))
        self._retried = retried
        self._witness = RawValue.of({"tailrace": "ledger", "view": name})

    def begin(self) -> None:
        """Make it, or go on with it."""
        self._write([UpdateOne(_only(self._witness), {"$setOnInsert": {"is": "ledger"}}, upsert=True)])

    def write(self, namings: Mapping[RawValue, Naming], session: ClientSession | None = None) -> None:
        """Add what is named to what is known."""
        writes: list[Any] = []
        for key, naming in namings.items():
            if naming.at is not None:
                writes.append(UpdateOne(_only(key), _said(naming.now, naming.at), upsert=True))
        self._write(writes, session)

    def entries(self, keys: Iterable[RawValue], session: ClientSession) -> list[LedgerEntry]:
        """What is known about these source documents. Raises SinkError where the ledger is gone."""
        query = {"_id": one_of([*keys, self._witness])}
        found: list[bytes] = self._retried(
            lambda: [raw_bson.bytes_of(one) for one in self._committed.find(query, session=session)]
        )
        entries, is_whole = [], False
        for document in found:
            key = value_at(document, "_id")
            at = value_at(document, "at")
            if key == self._witness:
                is_whole = True
            elif key is not None and at is not None and at.type == raw_bson.TIMESTAMP:
                named, left = (_values(document, name) for name in ("named", "left"))
                entries.append(LedgerEntry(key, at.shown, named, left))
        if not is_whole:
            raise SinkError(
                f"the ledger {self._collection.full_name} is gone, or was emptied: it is no longer known "
                "which totals a deletion changes",
                hint="Start the keeper under another resource: the ledger and the totals of all targets are then "
                "written again",
            )
        return entries

    def settle(self, entries: Iterable[LedgerEntry]) -> None:
        """The totals of everything that these records know were written."""
        writes: list[Any] = []
        for entry in entries:
            same = {"$and": [_only(entry.key), {"at": entry.at}]}
            if not entry.named:
                writes.append(DeleteOne({"$and": [same, {"named": {"$size": 0}}]}))
            elif entry.left:
                writes.append(UpdateOne(same, {"$set": {"left": []}}))
        self._write(writes)

    def forget(self, before: Timestamp) -> None:
        """What nobody has said since."""
        self._retried(lambda: self._collection.delete_many({"at": {"$lt": before}}))

    def _write(self, writes: Sequence[Any], session: ClientSession | None = None) -> None:
        def write() -> None:
            for again in (True, True, False):
                try:
                    if writes:
                        self._collection.bulk_write(list(writes), ordered=False, session=session)
                    return
                except BulkWriteError as error:  # two have made one entry in the same moment
                    errors = (error.details or {}).get("writeErrors", [])
                    if not again or any(one.get("code") != _DUPLICATE_KEY for one in errors):
                        raise

        self._retried(write)


def _only(key: RawValue) -> dict[str, Any]:
    return {"_id": key.condition()}


def _said(named: Sequence[RawValue], at: Timestamp) -> list[dict[str, Any]]:
    """The update of an entry by one more change. One from before, which is handled again, changes nothing."""
    said = RawValue(raw_bson.ARRAY, _array(named)).condition("$literal")
    is_older, is_same = {"$lt": ["$at", at]}, {"$eq": ["$at", at]}
    before, left = ({"$ifNull": [f"${name}", []]} for name in ("named", "left"))
    now = {"$cond": [is_same, {"$setUnion": [before, said]}, before]}
    return [
        {
            "$set": {
                "at": {"$cond": [is_older, at, "$at"]},
                "named": {"$cond": [is_older, said, now]},
                "left": {"$cond": [is_older, {"$setUnion": [left, before]}, left]},
            }
        }
    ]


def _array(values: Sequence[RawValue]) -> bytes:
    parts = [raw_bson.encode_element(value.type, str(n).encode(), value.data) for n, value in enumerate(values)]
    return raw_bson.encode_document(*parts)


def _values(document: bytes, name: str) -> tuple[RawValue, ...]:
    value = value_at(document, name)
    if value is None or value.type != raw_bson.ARRAY:
        return ()
    return tuple(RawValue(one.type, raw_bson.value(value.data, one)) for one in raw_bson.elements(value.data))
