"""Tables that follow their collections: copy, then micro-batch after micro-batch.

Each micro-batch has two parts. First the state: windows of the oplogs are folded into the documents, and position,
documents and the list of changed rows become durable in one step. Then the tables: each takes over its rows in one
Delta commit, with the micro-batch as its application transaction. After a crash between two tables, or between a table
and the note that it is done, the next start finishes the rest: each table's log says whether it has the micro-batch.

While there is more to read at once, the second part is left out for some time: the rows stay in the list, and the
tables take them over together with those of the next micro-batches.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any, Final

from pymongo import MongoClient

from tailrace.base import durable
from tailrace.core.oplog.cluster_time import ZERO, ClusterTime
from tailrace.core.oplog.selection import Selection
from tailrace.core.oplog.witness import EntryMark
from tailrace.lake.tables.collector import without_collecting
from tailrace.lake.tables.copying import TablesCopy, key_of
from tailrace.lake.tables.fed import refuse_fed
from tailrace.lake.tables.fold import Fold, Folded
from tailrace.lake.tables.holding import lock, state_folder
from tailrace.lake.tables.iceberg_mirror import mirror_of
from tailrace.lake.tables.masking import begin_masked
from tailrace.lake.tables.names import BEGIN_ANEW
from tailrace.lake.tables.open_tables import OpenTables, position_of
from tailrace.lake.tables.ownership import TablesOwnership
from tailrace.lake.tables.progress import TablesProgress
from tailrace.lake.tables.publishing import Publication
from tailrace.lake.tables.resync import Resyncs
from tailrace.lake.tables.schema import DocumentMisfitError
from tailrace.lake.tables.selected import SelectedCollections
from tailrace.lake.tables.settings import TableSettings
from tailrace.lake.tables.standing import note_disturbed
from tailrace.lake.tables.state import (
    StateTransaction,
    TabledCollection,
    TablesPosition,
    TableState,
)
from tailrace.read.source.connection import open_client
from tailrace.read.source.listing import UnreadableNameError, shown_name
from tailrace.read.source.topology import Cluster
from tailrace.read.window.oplogs import Oplogs, OplogWindow

_POLL_S: Final = 0.1
#: After about how many bytes of entries a micro-batch ends.
_BATCH_BYTES: Final = 192 << 20
#: While there is more to read, the tables take over their rows after this many seconds.
_BEHIND_S: Final = 30.0

_log = logging.getLogger("tailrace.tables")


class TablesWriter:
    """Writes the tables of ``settings`` from the deployment at ``uri``. One process at a time; ``stop`` from any
    thread."""

    def __init__(self, uri: Any, settings: TableSettings, *, client: MongoClient[Any] | None = None) -> None:
        self._settings = settings
        self._selection = settings.selection
        self._unreadable: set[str] = set()
        self._stopped = threading.Event()
        self._client = client or open_client(uri)
        self._owned = client is None
        self._cluster = Cluster.discover(self._client, uri, {})
        with ExitStack() as opened:
            opened.callback(self._close_clients)
            self._lock = lock(settings.root)
            opened.callback(os.close, self._lock)
            self._state = TableState(state_folder(settings.root) / "state")
            opened.callback(self._state.close)
            refuse_fed(settings.root, self._state)
            begin_masked(settings.root, self._state, settings.masks)
            position = self._state.position()
            begun = position or self._state.copy_begun()
            self._oplogs = Oplogs(
                self._client,
                self._cluster,
                {} if position is None else position.members,
                self._stopped,
                witness=None if begun is None else begun.witness,
                what=f"the tables in {settings.root}",
                anew=BEGIN_ANEW,
            )
            deployment = self._oplogs.deployment_id
            self._ownership = TablesOwnership(settings.root, self._state, deployment, take_over=settings.take_over)
            self._iceberg = mirror_of(settings.root, settings.iceberg, self._stopped)
            opened.pop_all()
        self._copy = TablesCopy(self._oplogs, self._state, settings, stopped=self._stopped)
        self._resyncs = Resyncs(self._client, self._cluster, self._oplogs, self._state, settings)
        self._tables = OpenTables(settings, self._state, self._oplogs)
        self._selected = SelectedCollections(settings, self._state, self._oplogs, self._copy, self._tables)
        self._publication = Publication(settings, self._state, self._tables, self._iceberg, check=self._ownership.check)
        self._batches = self._changes = 0
        #: Whether there is more to read at once.
        self._behind = False

    # -- its life ---------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """End after the micro-batch that is being written."""
        self._stopped.set()

    def close(self) -> None:
        """Close everything."""
        self._resyncs.close()
        self._iceberg.close()
        self._oplogs.close()
        self._state.close()
        os.close(self._lock)
        self._close_clients()

    def _close_clients(self) -> None:
        if self._cluster is not None:
            self._cluster.close()
        if self._owned:
            self._client.close()

    def __enter__(self) -> TablesWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def progress(self) -> TablesProgress:
        """What the writer has done so far."""
        position = self._state.position()
        stated = None if position is None else position.stated or None
        tables = len(self._state.marks())
        anew = self._tables.written_anew
        return TablesProgress(self._batches, self._changes, self._copy.copied, stated, tables, anew)

    def run(self, on_progress: Callable[[TablesProgress], None] | None = None) -> None:
        """Follow the collections until ``stop``. Raises TailraceError."""
        self.begin()
        while not self._stopped.is_set():
            begun = time.monotonic()
            did = self.step()
            if did and on_progress is not None:
                on_progress(self.progress)
            pause = self._settings.every_s - (time.monotonic() - begun) if did else _POLL_S
            if not self._behind:
                self._stopped.wait(max(0.0, pause))
        if self._publication.waiting:
            self._publish()

    def run_to_present(self, until: ClusterTime | None = None) -> ClusterTime:
        """Bring the tables up to now, or at least to ``until``. Returns the cluster time at which they equal their
        collections."""
        goal = until or self._copy.now()
        self.begin()
        while not self._stopped.is_set():
            position = position_of(self._state)
            if position.stated >= max(goal, position.hold) and not self._resyncs.running:
                break
            self.step(at_once=True, at_least=max(goal, position.hold))
            if self._resyncs.running:
                self._stopped.wait(_POLL_S)
        return position_of(self._state).stated

    def begin(self) -> None:
        """Copy the collections, if that was not done yet, and finish what a crash has interrupted."""
        if self._state.position() is None:
            self._selected.copy_all()
        self._selected.forget_unselected()
        self._tables.compare_all()
        self._selected.copy_new()
        self._tables.note_redeclared()
        self._resyncs.begin(self._copy)
        before = position_of(self._state).batch
        try:
            self._publish()
        except DocumentMisfitError:
            self.step(at_once=True)  # what comes next may be the change that mends the document
            if position_of(self._state).batch == before:
                raise

    def step(self, *, at_once: bool = False, at_least: ClusterTime = ZERO) -> bool:
        """Run one micro-batch if there is anything for it. ``at_once``: even if nothing happened."""
        self._resyncs.begin(self._copy)
        if self._resyncs.end(position_of(self._state)):
            self._publish()
        position = position_of(self._state)
        hold = position.hold if position.time < position.hold else ZERO
        window = self._oplogs.window(position.time, at_once=at_once, at_least=max(at_least, hold))
        if window is None:
            self._behind = self._behind and self._stopped.is_set()
            if self._publication.waiting and self._may_publish(position, at_once=at_once):
                self._publish()
            else:
                self._publication.expire()
            return False
        with without_collecting():
            folded, changed, is_last = self._fold(position, window)
            del window  # before anything looks for garbage in it
        durable.step("tables.state")
        self._batches += 1
        self._changes += folded.changes
        self._behind, self._publication.waiting = not is_last, True
        if self._may_publish(position, at_once=at_once):
            self._publish(position.time)
        return changed

    def _may_publish(self, position: TablesPosition, *, at_once: bool) -> bool:
        """Whether the tables take over their rows now: ``at_once`` does not mind what that costs."""
        if not position.stated or self._stopped.is_set():
            return True
        if self._behind and time.monotonic() - self._publication.at < _BEHIND_S:
            return False
        return at_once or self._publication.wait() <= 0

    def _fold(self, position: TablesPosition, window: OplogWindow) -> tuple[Folded, bool, bool]:
        """Bring the state to the end of ``window``, and of those after it that can be read at once, up to the size of
        a micro-batch. Returns also whether anything changed, and whether there is nothing more to read at once."""
        known = {bytes.fromhex(one.uuid): one for one in self._state.collections()}
        fold = Fold(self._selection, known, ignored=self._resyncs.uuids, masks=self._settings.masks)
        with self._state.writing() as state:
            marks: dict[str, EntryMark] = {}
            window = self._read(fold, window, state, marks)
            for name in fold.unreadable - self._unreadable:
                _log.warning("the collection %s has no table: its name is not UTF-8", shown_name(name))
            self._unreadable |= fold.unreadable
            hold = self._copy_unknown(fold, state) or position.hold
            folded = fold.apply(state)
            for number, keys in folded.touched.items():
                state.wait(number, keys)
            note_disturbed(self._state.marks(), fold.disturbed | set(fold.unknown.values()), state)
            known = {bytes.fromhex(one.uuid): one for one in self._state.collections()}
            for uuid, collection in fold.collections.items():
                if known.get(uuid) != collection:
                    state.set_collection(collection)
            until, members = window.until, self._oplogs.members
            # What was copied is newer than what was read of the oplogs.
            copied = hold != position.hold
            witness = self._oplogs.witness() if copied else self._oplogs.witness(position.witness, marks)
            state.set_position(TablesPosition(position.batch + 1, until, members, hold, position.stated, witness))
        changed = bool(folded.touched or fold.dropped or fold.collections.keys() ^ known.keys())
        return folded, changed, window.is_last

    def _read(
        self, fold: Fold, window: OplogWindow, state: StateTransaction, marks: dict[str, EntryMark]
    ) -> OplogWindow:
        """Group the changes of ``window`` and of those after it by document, and note the last entries in ``marks``.
        Returns the last one."""
        size = 0
        while True:
            fold.read(window, state.next_number)
            marks.update(window.marks)
            size += window.size
            if window.is_last or size >= _BATCH_BYTES or self._stopped.is_set():
                return window
            following = self._oplogs.window(window.until)
            if following is None:
                return window
            window = following

    # -- copying ----------------------------------------------------------------------------------------------------

    def _copy_unknown(self, fold: Fold, state: StateTransaction) -> ClusterTime | None:
        """Copy collections that got a selected name with documents that the oplog did not show. Returns the time from
        which on the state equals the collections again: changes up to it may already be in the copies, and what one
        that has gone meanwhile held before is not known."""
        if self._oplogs.joined:
            # What a shard held before it was added is in no oplog that is read.
            self._oplogs.joined.clear()
            for found, namespace in self._copy.listed(self._selection).items():
                fold.missing(bytes.fromhex(found), namespace)
        if not fold.unknown:
            return None
        made: list[TabledCollection] = []
        for uuid, namespace in fold.unknown.items():
            collection = TabledCollection(uuid.hex(), state.next_number(), namespace)
            with suppress(UnreadableNameError):  # as one that is gone
                for documents in self._copy.documents(namespace, uuid):
                    for document in documents:
                        state.put(collection.number, key_of(document), ZERO, document)
                    self._copy.copied += len(documents)
                if self._copy.exists(namespace, uuid):
                    made.append(collection)
                    continue
            # It is gone, as the oplog will tell, or its database has not moved to its shard yet: an entry that is still
            # to come asks for it again.
            state.clear(collection.number)
        hold = self._copy.now()
        for collection in made:
            uuid = bytes.fromhex(collection.uuid)
            fold.collections[uuid] = replace(collection, copied=int(hold))
            fold.supersede(uuid, collection.namespace)
        return hold

    @property
    def resyncing(self) -> list[str]:
        """The collections that are being copied again: their tables do not equal them now."""
        return sorted(self._resyncs.running)

    @property
    def unmatched(self) -> list[str]:
        """The patterns of the selection that none of the tables' names matches."""
        names = self._state.marks()
        return [one for one in self._selection.patterns if not any(map(Selection((one,)).covers, names))]

    # -- tables -----------------------------------------------------------------------------------------------------

    def _publish(self, after: ClusterTime | None = None) -> None:
        """Let each table take over its pending rows, but those of collections that are copied again."""
        self._publication.publish(after, without=self._resyncs.running.keys())
