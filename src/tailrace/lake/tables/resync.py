"""One table copied again from MongoDB, while the others go on.

The command that asks for it leaves a file next to the state, and the writer acts on it. From then on the collection is
not in the state: what happens to it is not applied, and its table stays as it is. A thread copies the documents, and
then applies what the oplogs say since the copy began, until it has come as far as the writer. In one transaction the
collection is back, and its table is rewritten. A crash in between begins the copy again.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from pymongo import MongoClient

from tailrace.base import durable
from tailrace.base.threads import CheckedThread
from tailrace.core.oplog.cluster_time import ZERO, ClusterTime
from tailrace.errors import SinkError, TailraceError, UsageError
from tailrace.lake.store.place import TablePlace
from tailrace.lake.tables.copying import TablesCopy, key_of
from tailrace.lake.tables.fed import refuse_fed
from tailrace.lake.tables.fold import FoldOfOne
from tailrace.lake.tables.holding import state_folder
from tailrace.lake.tables.names import BEGIN_ANEW, folder_of
from tailrace.lake.tables.settings import TableSettings
from tailrace.lake.tables.state import CopyingCollection, TabledCollection, TablesPosition, TableState, unknown
from tailrace.read.snapshot.state import LOWEST
from tailrace.read.source.topology import Cluster
from tailrace.read.window.oplogs import Oplogs

_REQUESTS: Final = "resync"
_KEPT_BYTES: Final = 32 << 20

_log = logging.getLogger("tailrace.tables")


def request_resync(root: TablePlace, namespace: str) -> None:
    """Let the writer that runs, or the next one, copy a collection again. Raises UsageError if it has no table."""
    state = TableState(state_folder(root) / "state", readonly=True)
    try:
        refuse_fed(root, state)
        known = namespace in state.marks()
    finally:
        state.close()
    if not known:
        raise UsageError(f"{namespace} has no table in {root}")
    leave_request(root, namespace)


def leave_request(root: TablePlace, namespace: str) -> None:
    """Leave the file that asks the writer to copy a collection again."""
    folder = state_folder(root) / _REQUESTS
    with durable.writing(folder):
        durable.make_directory(folder)
    durable.write_sealed(folder / f"{folder_of(namespace)}.json", {"namespace": namespace})


def take_requests(root: TablePlace) -> dict[str, Path]:
    """The collections that are to be copied again, and the file of each request."""
    folder = state_folder(root) / _REQUESTS
    found = {}
    for path in sorted(folder.glob("*.json")) if folder.is_dir() else ():
        try:
            document = durable.read_sealed(path)
        except SinkError as error:
            raise SinkError(error.message, hint="Remove the file, and run tailrace tables resync again") from None
        if document is not None:
            found[str(document.get("namespace", ""))] = path
    return found


class Resync:
    """The copy of one collection, in a thread of its own. The state holds what it has copied under ``number``."""

    def __init__(
        self,
        client: MongoClient[Any],
        cluster: Cluster | None,
        members: Mapping[str, str],
        *,
        state: TableState,
        collection: TabledCollection,
        settings: TableSettings,
    ) -> None:
        self.collection = collection
        self.stopped = threading.Event()
        self.failure: TailraceError | None = None
        #: The state has everything up to this time, once the copy has come so far.
        self.reached = ZERO
        self._state = state
        self._oplogs = Oplogs(client, cluster, members, self.stopped, what="the tables", anew=BEGIN_ANEW)
        self._masks = settings.masks
        self._copy = TablesCopy(self._oplogs, state, settings, stopped=self.stopped)
        self._uuid = bytes.fromhex(collection.uuid)
        self._thread = CheckedThread(self._run, "tailrace-resync", failed=self._failed)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        """Whether the thread has ended."""
        return not self._thread.is_alive()

    def close(self) -> None:
        """Give up."""
        self.stopped.set()
        self._thread.join()
        self._oplogs.close()

    def follow(self, until: ClusterTime) -> bool:
        """Apply what the oplogs tell up to ``until``. Returns whether the collection is still there under its name."""
        while self.reached < until:
            window = self._oplogs.window(self.reached, at_once=True, at_least=until)
            if window is None:
                return not self.stopped.is_set()
            fold = FoldOfOne(self._uuid, {self._uuid: self.collection}, masks=self._masks)
            fold.read(window, lambda: 0)
            with self._state.writing() as state:
                fold.apply(state)
            self.reached = window.until
            if fold.collections.get(self._uuid) != self.collection:
                return False
        return True

    def _run(self) -> None:
        start = self._copy.now()
        self._copy_documents()
        until = self._copy.now()
        self.collection = replace(self.collection, copied=int(until))
        self.reached = start
        self.follow(until)

    def _failed(self, error: TailraceError) -> None:
        """What ended the thread; the writer raises it."""
        self.failure = error

    def _copy_documents(self) -> None:
        waiting: list[tuple[bytes, bytes]] = []
        size = 0

        def keep() -> None:
            with self._state.writing() as state:
                for key, document in waiting:
                    state.put(self.collection.number, key, ZERO, document)

        for documents in self._copy.documents(self.collection.namespace, self._uuid):
            waiting += [(key_of(document), document) for document in documents]
            size += sum(map(len, documents))
            if self.stopped.is_set():
                raise SinkError("the copy was stopped before its end", hint="The next run begins it again")
            if size >= _KEPT_BYTES:
                keep()
                waiting, size = [], 0
        keep()


class Resyncs:
    """The collections of a writer that are being copied again, in ``running``: by namespace."""

    def __init__(
        self,
        client: MongoClient[Any],
        cluster: Cluster | None,
        oplogs: Oplogs,
        state: TableState,
        settings: TableSettings,
    ) -> None:
        self._client = client
        self._cluster = cluster
        self._oplogs = oplogs
        self._state = state
        self._settings = settings
        self.running: dict[str, Resync] = {}

    @property
    def uuids(self) -> list[bytes]:
        """The collections, whose changes only their copies apply."""
        return [bytes.fromhex(one.collection.uuid) for one in self.running.values()]

    def close(self) -> None:
        """Give all of them up. The next run begins them again."""
        for one in self.running.values():
            one.close()
        self.running.clear()

    def begin(self, copy: TablesCopy) -> None:
        """Begin to copy what somebody has asked for, or what an earlier process had begun to copy again."""
        asked = take_requests(self._settings.root)
        wanted = [one for one in {*asked, *self._state.resyncing()} if one not in self.running]
        selection = self._settings.selection
        uuids = {name: uuid for uuid, name in copy.listed(selection).items()} if wanted else {}
        for namespace in filter(selection.has, wanted):
            known = [one for one in self._state.collections() if one.namespace == namespace]
            collection = None
            with self._state.writing() as state:
                for one in known:
                    state.forget(one)
                state.set_mark(unknown(namespace))
                if namespace in uuids:
                    collection = TabledCollection(uuids[namespace], state.next_number(), namespace)
                    state.set_resyncing(namespace)
                    state.set_copying(CopyingCollection(collection.uuid, collection.number, LOWEST.hex()))
                else:
                    state.end_resyncing(namespace)
            if namespace in asked:
                asked[namespace].unlink(missing_ok=True)
            if collection is not None:
                _log.info("%s is copied again", namespace)
                self.running[namespace] = Resync(
                    self._client,
                    self._cluster,
                    self._oplogs.members,
                    state=self._state,
                    collection=collection,
                    settings=self._settings,
                )

    def end(self, position: TablesPosition) -> bool:
        """Take over the collections that are copied. Returns whether there were any. Raises what a copy failed with."""
        done = {namespace: one for namespace, one in self.running.items() if one.is_done}
        for namespace, one in done.items():
            if one.failure is not None:
                raise one.failure
            is_there = one.follow(position.time)
            taken = {each.uuid for each in self._state.collections()}
            with self._state.writing() as state:
                if is_there and one.collection.uuid not in taken:
                    # It may be later than the position: changes up to then are applied once more.
                    state.set_collection(replace(one.collection, copied=int(one.reached)))
                    position = replace(position, hold=max(position.hold, one.reached))
                else:
                    state.clear(one.collection.number)
                state.end_copying(one.collection.uuid)
                state.end_resyncing(namespace)
                position = position.next_batch()
                state.set_position(position)
            one.close()
            del self.running[namespace]
        return bool(done)
