"""Keeping totals: an aggregation in place of a view's source document, and changes of the source by the ledger."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from decimal import Decimal
from typing import Any, Final

import bson
from bson.timestamp import Timestamp
from pymongo import UpdateMany
from pymongo.client_session import ClientSession
from pymongo.errors import BulkWriteError
from pymongo.read_concern import ReadConcern

from tailrace.act.consumer.change import Change
from tailrace.act.consumer.views.documents import BATCH, id_of
from tailrace.act.consumer.views.ledger import Ledger, Naming
from tailrace.act.consumer.views.raw_value import SHOWN, RawValue, one_of, value_at
from tailrace.act.consumer.views.totals import Totals
from tailrace.act.consumer.views.upkeep import ViewUpkeep
from tailrace.core import raw_bson
from tailrace.core.oplog.namespace import Scope
from tailrace.errors import SinkError, UsageError
from tailrace.read.snapshot import SnapshotReader
from tailrace.watch.client.client import Client, readers_of

_SAME_BYTES: Final = frozenset({raw_bson.OBJECT_ID, raw_bson.BOOL, raw_bson.DATE, raw_bson.BINARY})
_WHOLE: Final = 1 << 53

_log = logging.getLogger("tailrace.consumer")


class TotalsUpkeep(ViewUpkeep):
    """Writes totals. As a ``ViewUpkeep``, every method may run at the same time as any other, in any number of
    processes, but changes of one source document come to ``sources_changed`` in their order. It may be handed earlier
    ones again.
    """

    def __init__(self, client: Client[Any], totals: Totals, *, batch: int = BATCH) -> None:
        super().__init__(client, totals.view, batch=batch)
        self.totals = totals
        self._ledger = Ledger(self._collection(totals.ledger), totals.name, self._retried)
        self._collates = False

    def check_deployment(self) -> None:
        """As a view's. Raises UsageError too if the collections compare by different collations."""
        super().check_deployment()
        target, source = (self._collation(namespace) for namespace in (self.view.target, self.view.source))
        if target != source:
            raise UsageError(
                f"{self.view.target} and {self.view.source} have different collations: what is equal in one "
                "may differ in the other",
                hint="Totals need the same collation in both",
            )
        self._collates = bool(target)

    def _collation(self, namespace: str) -> dict[str, Any]:
        database, _, name = namespace.partition(".")
        found = self._retried(lambda: list(self._client[database].list_collections(filter={"name": name})))
        return dict(found[0].get("options", {}).get("collation", {})) if found else {}

    def check_targets(self) -> None:
        """Raises UsageError if a source document has an array in the field that names its target."""
        document = self._retried(lambda: self._source.find_one(self.totals.with_array, {"_id": 1}))
        if document is not None:
            raise UsageError(
                f"the document with _id {id_of(raw_bson.bytes_of(document)).shown!r} of {self.view.source} has an "
                f"array in {self.totals.on!r}, and a total counts a document once",
                hint="Let each document name one, or keep such documents in another collection",
            )

    def has_index(self) -> bool:
        """Whether the source documents of a target are found by an index."""
        indexes = self._retried(self._source.index_information)
        return any(index["key"][0][0] == self.totals.on for index in indexes.values() if index.get("key"))

    @property
    def without_index(self) -> tuple[str, ...]:
        """What the log says where there is no such index."""
        said = "%s has no index on %r: each change of it reads the whole collection"
        return said, self.view.source, self.totals.on

    # The totals of targets

    def _sources(self, keys: Sequence[RawValue], version: Timestamp) -> list[bytes]:
        """The totals of each of these targets, at ``version`` or later, majority-committed."""
        plain = {} if self._collates else {key: same for key in keys if (same := _equality(key)) is not None}
        found: dict[Any, bytes] = {}

        def read() -> dict[Any, bytes]:
            with self._session(version) as session:
                for document in self._groups(one_of(plain), session) if plain else ():
                    found[_equality(id_of(document))] = document
                for key in keys:
                    if key not in plain:
                        found[key] = self._total(key, session)
            return found

        self._retried(read)
        return [self.totals.computed(key, found.get(plain.get(key, key)) or None) for key in keys]

    def _groups(self, names: Any, session: ClientSession, by: Any = None) -> list[bytes]:
        stages = [
            {"$match": {"$and": [{self.totals.on: names}, {"$nor": [self.totals.with_array]}]}},
            {"$group": {"_id": by or f"${self.totals.on}", **self.totals.accumulators()}},
        ]
        return [raw_bson.bytes_of(one) for one in self._source.aggregate(stages, session=session)]

    def _total(self, key: RawValue, session: ClientSession) -> bytes:
        """By the server's own equality: of one key, whatever it is. Empty where nothing names it."""
        for group in self._groups(key.condition(), session, {"$literal": 0}):
            return group
        return b""

    def _look_up(self, key: RawValue, version: Timestamp) -> bytes | None:
        (found,) = self._sources([key], version)
        return found

    # Changes of the source

    def source_changed(self, change: Change) -> None:
        """The handler for one change of the source."""
        self.sources_changed([change])

    def sources_changed(self, changes: Sequence[Change]) -> int:
        """The handler for changes of the source: the totals of everything that the documents named before, or name now,
        are computed again. Returns how many are done, from the first on; raises what is wrong with the first."""
        try:
            return self._sources_changed(changes)
        except SinkError:
            if len(changes) == 1:
                raise
        for place, change in enumerate(changes):
            try:
                self._sources_changed([change])
            except SinkError:
                if place == 0:
                    raise
                return place  # then it comes first, and is judged
        return len(changes)

    def _sources_changed(self, changes: Sequence[Change]) -> int:
        namings: dict[RawValue, Naming] = {}
        version = Timestamp(0, 0)
        for place, change in enumerate(changes):
            event = bson.decode(change.raw, SHOWN)
            is_rebuilt = event["operationType"] == "invalidate" or self.totals.changes_a_part(event)
            if is_rebuilt and place:
                changes = changes[:place]
                break
            if self._is_replaced(change, event, self.view.source):
                return 1
            if is_rebuilt:
                self._rebuild_for(change)
                return 1
            if self.totals.concerns(event):
                self._take(event, change.raw, namings)
                version = max(version, event["clusterTime"])
        if namings:
            changes[0].check()
            self._write_changed(namings, version, changes[0].check)
        return len(changes)

    def _rebuild_for(self, change: Change) -> None:
        _log.warning(
            "a part of %r was changed in a document of %s: the totals %s of %s are rewritten",
            self.totals.on,
            self.view.source,
            self.view.name,
            self.view.target,
        )
        self.rebuild(check=change.check, every=True)

    def _take(self, event: Any, raw: bytes, namings: dict[RawValue, Naming]) -> None:
        key = value_at(raw, "documentKey._id")
        if key is None:
            return
        naming = namings.setdefault(key, Naming())
        named = self.totals.named(event, raw)
        if named is not None:
            naming.says(named, event["clusterTime"])
            whole = value_at(raw, "fullDocument")
            self._tell_array_of(key, None if whole is None else value_at(whole.data, self.totals.on))

    def _tell_array_of(self, key: RawValue, value: RawValue | None) -> None:
        if value is None or value.type != raw_bson.ARRAY or self._told_array:
            return
        self._told_array = True
        _log.warning(
            "the document with _id %r of %s has an array in %r: the totals %s do not count it",
            key.shown,
            self.view.source,
            self.totals.on,
            self.view.name,
        )

    def _write_changed(self, namings: dict[RawValue, Naming], version: Timestamp, check: Callable[[], None]) -> None:
        """First the ledger learns of what is named, then the totals of all that it knows are written, and only then
        does it forget what nothing names any more: a crash between loses nothing."""
        with self._session(version) as session:
            self._ledger.write(namings, session)
            entries = self._ledger.entries(namings, session)
        keys = [key for naming in namings.values() for key in naming.ever]
        keys += [key for entry in entries for key in (*entry.named, *entry.left)]
        self._compute(keys, version, check)
        check()
        self._ledger.settle(entries)

    def _compute(self, keys: Iterable[RawValue], version: Timestamp, check: Callable[[], None]) -> None:
        """Give these targets their totals as of ``version`` or later, where what they have is older."""
        left = list({key.identity: key for key in keys}.values())
        while left:
            check()
            part = left[: self._batch]
            found = self._outdated(part, version)
            if found:
                self._write_totals(found, version)
            if not found or not self._is_sharded:  # there an update can pass by a document whose chunk is moving
                left = left[self._batch :]

    def _outdated(self, keys: Sequence[RawValue], version: Timestamp) -> list[RawValue]:
        committed = self._target.with_options(read_concern=ReadConcern("majority"))
        query = {"$and": [{"_id": one_of(keys)}, self.view.older(version)]}

        def read() -> list[RawValue]:
            with self._session(version) as session:
                return [id_of(raw_bson.bytes_of(one)) for one in committed.find(query, {"_id": 1}, session=session)]

        return list(dict.fromkeys(self._retried(read)))

    def _write_totals(self, keys: Sequence[RawValue], version: Timestamp) -> None:
        older = self.view.older(version)
        writes = [
            UpdateMany({"$and": [{"_id": key.condition()}, older]}, self.view.update(totals, version))
            for key, totals in zip(keys, self._sources(keys, version), strict=True)
        ]
        try:
            self._retried(lambda: self._target.bulk_write(writes, ordered=False))
        except BulkWriteError as error:
            refused = [
                (keys[one["index"]].shown, str(one.get("errmsg")))
                for one in (error.details or {}).get("writeErrors", ())
            ]
            if not refused:
                raise
            raise self._refused(refused) from None

    # All of it

    def begin(self) -> None:
        """Make the ledger, before the first change is handled."""
        self._ledger.begin()

    def fill(self, *, check: Callable[[], None] = lambda: None) -> Timestamp:
        """Write down what each source document names. Returns the time from which the ledger knows everything. The
        totals are to be computed after it: whatever they count is in the ledger then, or in a change that follows."""
        readers = readers_of(self._client)
        reader = SnapshotReader(readers.cluster or readers.client, Scope.parse(self.view.source))
        start = reader.state.start.to_timestamp()
        for chunk in reader:
            check()
            namings = {}
            for document in chunk.documents:
                key = self.totals.key_of(bytes(document))
                if key is not None:
                    namings[id_of(bytes(document))] = Naming(start, [key])
            self._ledger.write(namings)
            reader.done(chunk)
        return start

    def rebuild(self, *, check: Callable[[], None] = lambda: None, every: bool = False) -> int:
        """As a view's; the ledger first."""
        self.check_deployment()
        self.begin()
        start = self.fill(check=check)
        count = super().rebuild(check=check, every=every)
        if every:  # nothing counts what has not been seen, and nobody can write that it does
            self._ledger.forget(start)
        return count


def _equality(value: RawValue) -> Any:
    """The same for two values exactly if the server takes them for equal without a collation; ``None`` where only it
    knows."""
    if value.type in _SAME_BYTES:
        return value
    if value.type in (raw_bson.STRING, raw_bson.SYMBOL):
        return ("text", value.data)
    if value.type in (raw_bson.INT32, raw_bson.INT64):
        number = int.from_bytes(value.data, "little", signed=True)
        return ("number", number) if abs(number) < _WHOLE else None
    if value.type in (raw_bson.DOUBLE, raw_bson.DECIMAL128):
        exact = Decimal(str(value.shown))
        if exact.is_finite() and abs(exact) < _WHOLE and exact == int(exact):
            return ("number", int(exact))
    return None
