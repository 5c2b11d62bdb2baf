"""Keeping a view: the handlers of both directions, the rebuild, and the verification."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import bson
from bson.timestamp import Timestamp
from pymongo import UpdateOne
from pymongo.client_session import ClientSession
from pymongo.errors import BulkWriteError, WriteError
from pymongo.read_concern import ReadConcern

from tailrace.act.consumer.change import Change, copied_document
from tailrace.act.consumer.views.documents import BATCH, ViewDocuments, id_of
from tailrace.act.consumer.views.raw_value import SHOWN, RawValue, fields_of, one_of, value_at
from tailrace.act.consumer.views.view import View
from tailrace.core import raw_bson
from tailrace.errors import SinkError, UsageError
from tailrace.read.source.failure import source_error
from tailrace.watch.client.client import Client

#: What ``operationType`` of a document that was there before the first change is.
_OF_COPY: Final = RawValue.of("snapshot")
_log = logging.getLogger("tailrace.consumer")


@dataclass(frozen=True, slots=True)
class ViewDifference:
    """A field of a target that differs from its source. A missing value is ``view.MISSING``. If ``path`` is the view's
    version, ``found`` is ahead of the deployment's time, which is ``wanted``: no keeper has written this version, and
    none can overwrite it."""

    document_key: Any
    path: str
    found: Any
    wanted: Any


class ViewUpkeep(ViewDocuments):
    """Writes a view. Every method may run at the same time as any other, in any number of processes: the versions
    decide.

    Args:
        client: from ``tailrace.connect()``: one deployment holds target and source; a cluster is written to through a
            mongos
        batch: how many targets of one source are updated by one command
    """

    def __init__(self, client: Client[Any], view: View, *, batch: int = BATCH) -> None:
        super().__init__(client, view, batch=batch)
        self._told_array = False

    def check_targets(self) -> None:
        """Raises UsageError if a target has an array in the field that names its source: nothing says from which of
        several sources it should get the fields. Reads the targets until it has found one."""
        document = self._retried(lambda: self._target.find_one(self.view.with_array, {"_id": 1}))
        if document is not None:
            identity = id_of(raw_bson.bytes_of(document)).shown
            raise UsageError(
                f"the document with _id {identity!r} of {self.view.target} has an array in {self.view.on!r}, and a "
                "view carries the fields of one source",
                hint="Let each document name one, or keep such documents in another collection",
            )

    def _tell_array(self, document: bytes) -> None:
        """Once: a document that has come later is no reason to stop for the others."""
        if self._told_array or not self.view.has_array(document):
            return
        self._told_array = True
        _log.warning(
            "the document with _id %r of %s has an array in %r: it names no source of the view %s, and gets no fields",
            id_of(document).shown,
            self.view.target,
            self.view.on,
            self.view.name,
        )

    # The two directions

    def source_changed(self, change: Change) -> None:
        """The handler for changes of the source: all targets that name it get its fields, in batches. Where the source
        was dropped, renamed or replaced, all targets do."""
        event = bson.decode(change.raw, SHOWN)
        if self._is_replaced(change, event, self.view.source) or not self.view.concerns_source(event):
            return
        key = value_at(change.raw, "documentKey._id")
        if key is None or key.is_null:
            return  # nobody can name it: null stands for none
        version = event["clusterTime"]
        self.refresh(key, version, check=change.check)

    def _is_replaced(self, change: Change, event: Mapping[str, Any], namespace: str) -> bool:
        """Whether the change ends a collection, as a drop, a rename and $out do; then the view is rebuilt. What takes
        its place has no events of its own, and what is gone has none either."""
        if event.get("operationType") != "invalidate":
            return False
        _log.warning(
            "%s was dropped, renamed or replaced: the view %s of %s is rewritten from what is there now",
            namespace,
            self.view.name,
            self.view.target,
        )
        self.rebuild(check=change.check, every=True)
        return True

    def refresh(self, key: Any, version: Timestamp, *, check: Callable[[], None] = lambda: None) -> int:
        """Give all targets that name the source ``key`` (a value of Python, or a RawValue) its fields as of ``version``
        or later. Returns how many were older."""
        key = key if isinstance(key, RawValue) else RawValue.of(key)
        update = self.view.update(self._look_up(key, version), version)
        outdated = self.view.outdated(key, version)
        count = 0
        with self._session(version) as session:
            while True:
                check()
                # Majority-committed: a target that another process has written on a primary that is about to be
                # rolled back still counts as older.
                committed = self._target.with_options(read_concern=ReadConcern("majority"))
                found = self._retried(
                    lambda: [
                        id_of(raw_bson.bytes_of(one))
                        for one in committed.find(outdated, {"_id": 1}, limit=self._batch, session=session)  # noqa: B023
                    ]
                )
                if not found:
                    return count
                matched = self._update(outdated, found, update, session)
                count += matched
                # On a cluster an update of many can pass by a document whose chunk is moving.
                if matched == len(found) < self._batch and not self._is_sharded:
                    return count

    def _update(self, outdated: dict[str, Any], keys: list[RawValue], update: Any, session: ClientSession) -> int:
        """Update the targets with these ``_id``s; how many matched. One that the server refuses does not hold up the
        others; then SinkError is raised."""

        def update_many(some: list[RawValue]) -> int:
            query = {"$and": [outdated, {"_id": one_of(some)}]}
            return self._retried(lambda: self._target.update_many(query, update, session=session).matched_count)

        try:
            return update_many(keys)
        except WriteError:
            matched, refused = 0, []
        for key in keys:
            try:
                matched += update_many([key])
            except WriteError as error:
                refused.append((key.shown, str((error.details or {}).get("errmsg", error))))
        if refused:
            raise self._refused(refused)
        return matched

    def _refused(self, refused: Sequence[tuple[Any, str]]) -> SinkError:
        key, said = refused[0]
        more = f" and {len(refused) - 1} more" if len(refused) > 1 else ""
        return SinkError(
            f"{self.view.target} does not accept the fields of the view for the document with _id {key!r}{more}: "
            f"{said}",
            hint="The other documents of this update were written",
        )

    def target_changed(self, change: Change) -> None:
        """The handler for changes of the target: the document gets the fields of the source that it names. Where the
        target was dropped, renamed or replaced, all documents that are there now do."""
        target = self._target_of(change)
        if target is None:
            return
        identity, document, version = target
        key = self.view.key_of(document)
        if key is None and not self._names_none(document):
            return
        source = None if key is None else self._look_up(key, version)
        query = self._one(identity, key, version)
        change.check()
        try:
            self._retried(lambda: self._target.update_one(query, self.view.update(source, version)))
        except WriteError as error:
            said = str((error.details or {}).get("errmsg", error))
            raise self._refused([(id_of(identity).shown, said)]) from None

    def targets_changed(self, changes: Sequence[Change]) -> int:
        """As ``target_changed``, for several changes: their sources are read together, and their targets written
        together. Returns how many are done, from the first on; raises what is wrong with the first."""
        wanted = [found for change in changes if (found := self._target_of(change)) is not None]
        if not wanted:
            return len(changes)
        newest = max(version for _, _, version in wanted)
        writes = []
        # The targets of a copy have one version, and many of them one source.
        updates: dict[tuple[bytes | None, Timestamp], list[dict[str, Any]]] = {}
        found_sources = self._with_sources([document for _, document, _ in wanted], newest)
        for (identity, _, version), (document, key, source) in zip(wanted, found_sources, strict=True):
            if key is not None or self._names_none(document):
                update = updates.get((source, version))
                if update is None:
                    update = updates[source, version] = self.view.update(source, version)
                writes.append(UpdateOne(self._one(identity, key, version), update))
        changes[0].check()
        try:
            if writes:
                self._retried(lambda: self._target.bulk_write(writes, ordered=False))
        except BulkWriteError:
            return self._one_by_one(changes)
        return len(changes)

    def _one_by_one(self, changes: Sequence[Change]) -> int:
        for place, change in enumerate(changes):
            try:
                self.target_changed(change)
            except SinkError:
                if place == 0:
                    raise
                return place  # then it comes first, and is judged
        return len(changes)

    def _target_of(self, change: Change) -> tuple[bytes, bytes, Timestamp] | None:
        """The document key, the document and the version for a change of a target that asks for its fields."""
        copied = copied_document(change)
        if copied is not None:
            return copied.key, copied.document, copied.time.to_timestamp()
        raw, version = change.raw, value_at(change.raw, "clusterTime")
        if value_at(raw, "operationType") != _OF_COPY:  # else all of it, and it need not be decoded
            event = bson.decode(raw, SHOWN)
            if self._is_replaced(change, event, self.view.target) or not self.view.concerns_target(event):
                return None
        whole, identity = value_at(raw, "fullDocument"), value_at(raw, "documentKey")
        if whole is None or whole.is_null or identity is None or version is None:
            return None  # it is gone, and its deletion needs nothing
        return identity.data, whole.data, version.shown

    def _names_none(self, document: bytes) -> bool:
        """Whether a target that names no source has fields that it ought not to have."""
        self._tell_array(document)
        return any(self.view.differences(document, None))

    def _one(
        self, document_key: bytes, key: RawValue | None, version: Timestamp, ahead: Timestamp | None = None
    ) -> dict[str, Any]:
        """The filter of one target that names ``key`` and has an older version, or the version ``ahead``.
        ``document_key`` holds the shard key too, and the field ``on`` may be part of it."""
        exactly = {path: value.condition() for path, value in fields_of(document_key).items()}
        return {"$and": [exactly, self.view.outdated(key, version, ahead=ahead)]}

    # All of it

    def rebuild(self, *, check: Callable[[], None] = lambda: None, every: bool = False) -> int:
        """Write the fields of its source to every target. Returns how many targets had other fields, or a version ahead
        of the deployment's time. May run at the same time as keepers. Raises SinkError at the end if the server refused
        some.

        Args:
            every: targets with the right fields get the version too, and are counted: from then on, nothing that a
                process computed earlier can be written
        """
        self.check_deployment()
        changed = 0
        refused: list[tuple[Any, str]] = []
        for targets in self._chunks():
            check()
            version = self._now()
            writes, keys = [], []
            for target, named, source in self._with_sources(targets, version):
                ahead = self._ahead(target, version)
                if every or ahead is not None or any(self.view.differences(target, source)):
                    key = id_of(target)
                    query = self._one(key.under("_id"), named, version, ahead)
                    writes.append(UpdateOne(query, self.view.update(source, version)))
                    keys.append(key.shown)
            if writes:
                try:
                    changed += self._retried(lambda: self._target.bulk_write(writes, ordered=False).matched_count)  # noqa: B023
                except BulkWriteError as error:
                    details = error.details or {}
                    changed += details.get("nMatched", 0)
                    refused += [(keys[one["index"]], str(one.get("errmsg"))) for one in details.get("writeErrors", ())]
                    if not refused:
                        raise source_error(error, self._client) from None
        if refused:
            raise self._refused(refused)
        return changed

    def verify(self, *, grace_s: float = 5.0) -> Iterator[ViewDifference]:
        """Recompute the view and yield what differs. A target that differs is checked again after ``grace_s``, because
        the listeners may not have reached it yet."""
        self.check_deployment()
        waiting: list[tuple[float, RawValue]] = []
        for targets in self._chunks():
            version = self._now()
            for target, _, source in self._with_sources(targets, version):
                if self._ahead(target, version) is not None or any(self.view.differences(target, source)):
                    waiting.append((time.monotonic() + grace_s, id_of(target)))
        for until, key in waiting:
            time.sleep(max(0.0, until - time.monotonic()))
            yield from self._differences(key)

    def _differences(self, key: RawValue) -> list[ViewDifference]:
        def read() -> bytes | None:
            document = self._target.find_one({"_id": key.condition()})
            return None if document is None else raw_bson.bytes_of(document)

        for _ in range(3):
            found = self._retried(read)
            if found is None:
                return []
            now = self._now()
            ((target, _, source),) = self._with_sources([found], now)
            differences = [ViewDifference(key.shown, *one) for one in self.view.differences(target, source)]
            ahead = self._ahead(target, now)
            if ahead is not None:
                differences.append(ViewDifference(key.shown, self.view.version_path, ahead, now))
            if self._retried(read) == found:
                return differences
        return []  # it changes all the time: whoever writes it is followed by the listeners
