"""Keeping a view: the handlers of both directions, the rebuild, and the verification."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final, TypeVar

import bson
from bson.codec_options import CodecOptions, DatetimeConversion
from bson.timestamp import Timestamp
from pymongo import MongoClient, UpdateOne
from pymongo.collection import Collection
from pymongo.errors import PyMongoError
from pymongo.read_concern import ReadConcern
from pymongo.read_preferences import ReadPreference
from pymongo.write_concern import WriteConcern

from tailrace.client.client import Client, operation_time, readers_of
from tailrace.consumer.change import Change
from tailrace.consumer.views.view import View
from tailrace.errors import UsageError
from tailrace.oplog.namespace import Scope
from tailrace.snapshot import SnapshotReader
from tailrace.source.failure import Backoff, is_transient, source_error

#: So many targets of one source are updated at a time.
BATCH: Final = 1_000
_RETRY_S: Final = 120.0
_CODEC: Final[CodecOptions[dict[str, Any]]] = CodecOptions(
    tz_aware=True, datetime_conversion=DatetimeConversion.DATETIME_AUTO
)

_log = logging.getLogger("tailrace.consumer")
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class ViewDifference:
    """A field of a target that is not what its source says. A value that is missing is ``view.MISSING``."""

    document_key: Any
    path: str
    found: Any
    wanted: Any


class ViewUpkeep:
    """Writes a view. Every method may run beside every other, in as many processes as there are: the versions decide.

    ``client``  of ``tailrace.connect()``: one deployment holds target and source, a cluster is written by a mongos
    ``batch``   so many targets of one source are updated by one command
    """

    def __init__(self, client: Client[Any], view: View, *, batch: int = BATCH) -> None:
        if batch < 1:
            raise UsageError("a batch holds one target or more")
        self.view = view
        self._client = client
        self._batch = batch
        self._target = self._collection(view.target)
        self._source = self._collection(view.source).with_options(read_concern=ReadConcern("majority"))

    def _collection(self, namespace: str) -> Collection[dict[str, Any]]:
        database, _, name = namespace.partition(".")
        client: MongoClient[Any] = self._client
        return client.get_database(
            database,
            codec_options=_CODEC,
            read_preference=ReadPreference.PRIMARY,
            write_concern=WriteConcern("majority"),
        ).get_collection(name)

    # The two directions

    def source_changed(self, change: Change) -> None:
        """The handler for changes of the source: all targets that name it get its fields, in batches."""
        if not self.view.concerns_source(change.event):
            return
        key = change.event["documentKey"]["_id"]
        if key is None:
            return  # nobody can name it: null stands for none
        version = change.event["clusterTime"]
        self.refresh(key, version, check=change.check)

    def refresh(self, key: Any, version: Timestamp, *, check: Callable[[], None] = lambda: None) -> int:
        """Give all targets that name the source ``key`` its fields as of ``version`` or later; how many were older."""
        update = self.view.update(self._look_up(key, version), version)
        outdated = self.view.outdated(key, version)
        count = 0
        while True:
            check()
            found = self._retried(
                lambda: [one["_id"] for one in self._target.find(outdated, {"_id": 1}, limit=self._batch)]
            )
            if not found:
                return count
            chosen = {**outdated, "_id": {"$in": found}}
            count += self._retried(lambda: self._target.update_many(chosen, update).matched_count)  # noqa: B023
            if len(found) < self._batch:
                return count

    def target_changed(self, change: Change) -> None:
        """The handler for changes of the target: the document gets the fields of the source that it names."""
        event = change.event
        if not self.view.concerns_target(event):
            return
        document = event.get("fullDocument")
        if document is None:
            return  # it is gone, and its deletion needs nothing
        key = self.view.key_of(document)
        if key is None and not any(self.view.differences(document, None)):
            return
        version = event["clusterTime"]
        found = None if key is None or isinstance(key, list) else self._look_up(key, version)
        query = {**self.view.outdated(key, version), **event["documentKey"]}
        change.check()
        self._retried(lambda: self._target.update_one(query, self.view.update(found, version)))

    def _look_up(self, key: Any, version: Timestamp) -> dict[str, Any] | None:
        """The source as it was at ``version`` or later, majority-committed."""
        return next(iter(self._sources([key], version)), None)

    def _sources(self, keys: Sequence[Any], version: Timestamp) -> list[dict[str, Any]]:
        projection = dict.fromkeys(self.view.fields.values(), 1)
        query = {"_id": {"$eq": keys[0]} if len(keys) == 1 else {"$in": list(keys)}}

        def read() -> list[dict[str, Any]]:
            with self._client.start_session(causal_consistency=True) as session:
                session.advance_operation_time(version)
                return list(self._source.find(query, projection, session=session))

        return self._retried(read)

    def _retried(self, work: Callable[[], _T]) -> _T:
        """What ``work`` comes to, tried again while a primary is away. Each of ours may be done twice."""
        backoff = Backoff(give_up_s=_RETRY_S)
        while True:
            try:
                return work()
            except PyMongoError as error:
                if not is_transient(error) or backoff.exhausted:
                    raise source_error(error, self._client) from None
                backoff.wait()

    # All of it

    def _chunks(self) -> Iterator[list[dict[str, Any]]]:
        """All targets, decoded."""
        readers = readers_of(self._client)
        reader = SnapshotReader(readers.cluster or readers.client, Scope.parse(self.view.target))
        for chunk in reader:
            yield [bson.decode(document, _CODEC) for document in chunk.documents]
            reader.done(chunk)

    def _with_sources(
        self, targets: Sequence[dict[str, Any]], version: Timestamp
    ) -> Iterator[tuple[dict[str, Any], dict[str, Any] | None]]:
        """Targets beside their sources, read at ``version`` or later."""
        keys = {
            repr(key): key for key in map(self.view.key_of, targets) if key is not None and not isinstance(key, list)
        }
        found: dict[str, dict[str, Any] | None] = {}
        waiting = iter(keys.items())
        while part := dict(islice(waiting, self._batch)):
            for source in self._sources(list(part.values()), version):
                found[repr(source["_id"])] = source
        for text, key in keys.items():
            if text not in found:  # there is none, or it is equal in another type or under a collation
                found[text] = self._look_up(key, version)
        for target in targets:
            yield target, found.get(repr(self.view.key_of(target)))

    def _now(self) -> Timestamp:
        return operation_time(self._client).to_timestamp()

    def rebuild(self, *, check: Callable[[], None] = lambda: None) -> int:
        """Give every target the fields of its source anew; how many had others. May run while the view is kept."""
        changed = 0
        for targets in self._chunks():
            check()
            version = self._now()
            writes = []
            for target, source in self._with_sources(targets, version):
                if any(self.view.differences(target, source)):
                    query = {**self.view.outdated(self.view.key_of(target), version), "_id": target["_id"]}
                    writes.append(UpdateOne(query, self.view.update(source, version)))
            if writes:
                changed += self._retried(lambda: self._target.bulk_write(writes, ordered=False).matched_count)  # noqa: B023
        return changed

    def verify(self, *, grace_s: float = 5.0) -> Iterator[ViewDifference]:
        """Recompute the view and give what differs. A target that differs is looked at again after ``grace_s``, for the
        listeners may not have come to it yet."""
        waiting: list[tuple[float, Any]] = []
        for targets in self._chunks():
            version = self._now()
            for target, source in self._with_sources(targets, version):
                if any(self.view.differences(target, source)):
                    waiting.append((time.monotonic() + grace_s, target["_id"]))
        for until, key in waiting:
            time.sleep(max(0.0, until - time.monotonic()))
            yield from self._differences(key)

    def _differences(self, key: Any) -> list[ViewDifference]:
        for _ in range(3):
            found = self._retried(lambda: self._target.find_one({"_id": {"$eq": key}}))
            if found is None:
                return []
            ((target, source),) = self._with_sources([found], self._now())
            differences = [ViewDifference(key, *one) for one in self.view.differences(target, source)]
            again = self._retried(lambda: self._target.find_one({"_id": {"$eq": key}}))
            if again == found:
                return differences
        return []  # it changes all the time: whoever writes it is followed by the listeners

    def has_index(self) -> bool:
        """Whether the targets of a source are found by an index."""
        indexes = self._retried(self._target.index_information)
        return any(index["key"][0][0] == self.view.on for index in indexes.values() if index.get("key"))
