"""Who owns a sync: copies what is left, then follows, and looks once a second for what is asked of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import closing
from typing import Final

from tailrace.act.sync import standing
from tailrace.act.sync.copying import Copy, SyncCopyProgress
from tailrace.act.sync.ends import Ends
from tailrace.act.sync.follower import Follower
from tailrace.act.sync.ownership import SyncOwnership, own
from tailrace.act.sync.progress import Counted, SyncProgress
from tailrace.act.sync.recognition import recognise
from tailrace.act.sync.settings import SyncSettings
from tailrace.core.oplog.cluster_time import ZERO, ClusterTime
from tailrace.core.oplog.witness import Witness
from tailrace.read.window.oplogs import Oplogs

#: How often the owner checks for requests, and reports how far it is.
LOOK_S: Final = 1.0
#: How often the owner checks that its collections are still there: a transaction would make a new one.
_RECOGNISED_S: Final = 5.0
#: Where nothing happens, a step waits for so long.
_STEP_S: Final = 0.2
#: Lanes that the copy uses, whatever the settings say.
_COPY_LANES: Final = 4
Told = Callable[[SyncProgress], None]


class SyncOwner:
    """``look`` says how far the sync is, and ``told`` is notified of it."""

    def __init__(
        self,
        ends: Ends,
        settings: SyncSettings,
        counted: Counted,
        stopped: threading.Event,
        *,
        look: Callable[[], SyncProgress],
        told: Told | None,
    ) -> None:
        self._ends, self._settings = ends, settings
        self._counted, self._stopped = counted, stopped
        self._look, self._told = look, told

    def work(self, goal: ClusterTime | None) -> bool:
        """Work until all is done; false where the lease was given away. Raises SinkError where the target is not the
        one that the state speaks of."""
        self._recognise()
        if standing.document_of(self._ends.state).phase == standing.COPY:
            with own(self._ends.state, lanes=max(_COPY_LANES, self._settings.lanes) + 1) as ownership:
                if not self._copy(ownership):
                    return self._stopped.is_set()
        with own(self._ends.state, lanes=self._settings.lanes + 1) as ownership:
            return self._follow(ownership, goal)

    def _copy(self, ownership: SyncOwnership) -> bool:
        """Copy what is left. Whether all is copied. Raises OtherHistoryError where a part of it was read from another
        history."""
        asked = threading.Event()

        def noted(progress: SyncCopyProgress) -> None:
            self._counted.copied(progress.documents, progress.estimate_documents, progress.bytes)
            history.note()
            if self._tell() is not None:
                asked.set()
                copy_stop.set()

        copy_stop = _Either(self._stopped)
        copy = Copy(self._ends.deployment, self._ends.state, ownership, self._settings, stopped=copy_stop)
        with closing(self._ends.new_oplogs()) as oplogs:
            history = _CopiedHistory(oplogs, ownership)
            history.note()
            is_done = copy.run(_at_most_every(LOOK_S, noted))
            history.note()
        return is_done and not asked.is_set()

    def _follow(self, ownership: SyncOwnership, goal: ClusterTime | None) -> bool:
        """Follow until ``stop`` or up to ``goal``; false where another process asks for the lease."""
        before, looked, recognised = 0, 0.0, time.monotonic()
        opened = (self._ends.oplogs, self._ends.state, ownership, self._settings)
        with Follower(*opened, stopped=self._stopped) as follower:
            while not self._stopped.is_set():
                if time.monotonic() - looked >= LOOK_S:
                    looked = time.monotonic()
                    request = self._tell()
                    if request == "paused":
                        self._stopped.wait(LOOK_S)
                        looked = 0.0
                        continue
                    if request is not None:
                        return False
                if time.monotonic() - recognised >= _RECOGNISED_S:
                    self._recognise()
                    recognised = time.monotonic()
                follower.step(at_once=goal is not None, at_least=goal or ZERO, max_wait_s=_STEP_S)
                self._counted.changed(follower.changes - before)
                before = follower.changes
                if goal is not None and follower.time >= goal and follower.is_consistent:
                    break
        if before:
            self._recognise()
        self._tell(last=True)
        return True

    def _recognise(self) -> None:
        recognise(self._ends.state, standing.document_of(self._ends.state))

    def _tell(self, *, last: bool = False) -> str | None:
        """Note and report how far this process is. Returns what is asked of the owner: "paused", or another process's
        request."""
        document = standing.document_of(self._ends.state)
        standing.note(self._ends.state, {"progress": {**self._counted.fields(), "at": time.time()}})
        found = self._look()
        if self._told is not None:
            self._told(found)
        request = document.extra.get("request")
        if request is not None and not last:
            return str(request["kind"])
        return "paused" if document.extra.get("paused") and document.phase != standing.COPY else None


class _CopiedHistory:
    """Which history a copy is read from, noted in the sync's document: a source that is put back to an older state has
    no entries that take back what it has lost, and the position stays where it was at the beginning.

    ``oplogs``: opened with what was noted before, which they have compared then.
    """

    def __init__(self, oplogs: Oplogs, ownership: SyncOwnership) -> None:
        self._oplogs, self._ownership = oplogs, ownership
        self._last: Witness | None = None

    def note(self) -> None:
        """Note the newest entries. Raises OtherHistoryError if those that were noted last are no longer there."""
        if self._last is not None:
            self._oplogs.check(self._last)
        self._last = self._oplogs.witness()
        members = [{"name": name, "host": host} for name, host in self._oplogs.members.items()]
        sets = {"witness": self._last.to_document(), "members": members}
        self._ownership.run(lambda _: None, sets=sets, what="note how far the source is")


class _Either(threading.Event):
    """Set where another event is, or where it is set itself."""

    def __init__(self, other: threading.Event) -> None:
        super().__init__()
        self._other = other

    def is_set(self) -> bool:
        return super().is_set() or self._other.is_set()


def _at_most_every(seconds: float, call: Callable[[SyncCopyProgress], None]) -> Callable[[SyncCopyProgress], None]:
    last = 0.0
    lock = threading.Lock()

    def called(progress: SyncCopyProgress) -> None:
        nonlocal last
        with lock:
            now = time.monotonic()
            if now - last < seconds:
                return
            last = now
        call(progress)

    return called
