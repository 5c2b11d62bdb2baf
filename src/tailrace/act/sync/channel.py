"""One sync as a whole: who owns it copies, follows, pauses and hands over; anybody may look at it.

What is asked of the owner from outside (pause, a cut-over) is noted in the sync's document on the target, which the
owner reads about once a second. Such notes are plain updates: they concern nobody's epoch.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

from tailrace.act.consumer.rules.errors import LeaseLost
from tailrace.act.sync import standing
from tailrace.act.sync.cutover import CutOver, allow_writes, refused_writes_told
from tailrace.act.sync.ends import Ends
from tailrace.act.sync.hand_over import (
    HandOver,
    begin_back,
    check_can_be_cut_over,
    cut_over_of,
    has_begun,
    has_noted,
    is_unfinished,
    refuse_foreign_writes,
    settings_back,
)
from tailrace.act.sync.owner import LOOK_S, SyncOwner, Told
from tailrace.act.sync.ownership import SyncOwnership, own
from tailrace.act.sync.plan import SyncPlan, make_plan
from tailrace.act.sync.progress import Counted, SyncProgress
from tailrace.act.sync.recognition import DEPLOYMENT, deployment_of
from tailrace.act.sync.settings import LEASE_S, STATE_DB, SyncSettings
from tailrace.act.sync.state import SyncDocument
from tailrace.act.sync.verification import Verification, verify
from tailrace.base.object_place import is_object_uri
from tailrace.base.threads import CheckedThread
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.oplog.selection import Selection
from tailrace.errors import UsageError
from tailrace.read.archive.place import archive_place

if TYPE_CHECKING:
    from tailrace.act.sync.archiving import SyncArchive

#: What another process asks, by which the owner gives the lease away, is forgotten if nobody takes it in that many
#: leases.
_HANDED_LEASES: Final = 3
#: How many documents of each collection are compared at a cut-over, by default.
CUT_OVER_SAMPLE: Final = 1_000
_log = logging.getLogger("tailrace.sync")


class Sync:
    """Keeps ``target`` equal to ``source``: both are connection strings.

    Args:
        only: patterns of the collections that are kept equal, such as ``shop.*``; by default all
        excluded: patterns of collections that are left out
        rename: new names: ``{"shop": "store", "shop.a": "store.b"}``
        name: tells syncs to one target apart
        state_db: the database on the target that keeps the state
        lanes: how many transactions are applied in parallel. With one lane, the source's transactions stay whole
        documents_per_second: how many documents are copied per second at most
        archive: a directory in which the source's oplogs are recorded, for the time when they no longer reach back far
            enough
        lease_s: after this many seconds of silence another process may take over
        shard_keys: for a target that is a cluster, by which key a collection of the source is sharded there:
            ``{"shop.orders": {"region": 1, "_id": 1}}``; by default as on the source
    """

    def __init__(
        self,
        source: Any,
        target: Any,
        *,
        only: Iterable[str] = (),
        excluded: Iterable[str] = (),
        rename: Mapping[str, str] | None = None,
        name: str = "sync",
        state_db: str = STATE_DB,
        lanes: int = 1,
        documents_per_second: float | None = None,
        archive: str | Path | None = None,
        lease_s: float = LEASE_S,
        shard_keys: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        chosen, left_out = tuple(only), tuple(excluded)
        self.settings = SyncSettings(
            selection=Selection.of(chosen, "only") if chosen else Selection(("*.*",)),
            excluded=Selection.of(left_out, "excluded") if left_out else None,
            renames=dict(rename or {}),
            name=name,
            state_db=state_db,
            lanes=lanes,
            documents_per_second=documents_per_second,
            archive=None if archive is None else _directory(archive),
            lease_s=lease_s,
            shard_keys=dict(shard_keys or {}),
        )
        self._source, self._target = source, target
        self._stopped = threading.Event()
        self._counted = Counted()
        self._seen = SyncProgress(name)
        self._opened = ExitStack()
        self._ends: Ends | None = None
        self._archive: SyncArchive | None = None

    # -- its life ---------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections."""
        self._record_no_more()
        self._opened.close()
        self._ends = None

    def stop(self) -> None:
        """End what is under way soon, from any thread: the position stays, and another run continues there."""
        self._stopped.set()

    @property
    def ends(self) -> Ends:
        """Source and target, opened when they are first needed."""
        if self._ends is None:
            self._ends = self._opened.enter_context(Ends(self._source, self._target, self.settings, self._stopped))
        return self._ends

    # -- what may be asked of it ------------------------------------------------------------------------------------

    def plan(self) -> SyncPlan:
        """What would be done and what would be refused. Nothing is written."""
        return make_plan(self.ends.deployment, self.ends.target, self.settings, self.ends.state.cluster)

    def run(
        self, told: Told | None = None, *, until: ClusterTime | None = None, to_present: bool = False
    ) -> SyncProgress:
        """Copy, then follow, until ``stop`` or a cut-over; or up to a given time of the source, or up to its present.
        If another process owns the sync, this one waits until it may take over. Raises TailraceError."""
        try:
            self._run(told, until, to_present)
        finally:
            self._record_no_more()
        return self.status()

    def _run(self, told: Told | None, until: ClusterTime | None, to_present: bool) -> None:
        self._begin_if_new()
        goal = self.ends.now() if to_present else until
        owner = SyncOwner(self.ends, self.settings, self._counted, self._stopped, look=self.status, told=told)
        while not self._stopped.is_set():
            if self._document().phase == standing.CUT_OVER:
                break
            if self._waits_for_another():
                self._record_no_more()
                self._stopped.wait(LOOK_S)
                continue
            self._record()
            try:
                done = owner.work(goal)
            except LeaseLost as error:
                _log.warning("%s", error)
                self._stopped.wait(LOOK_S)
                continue
            if done:
                break
        if self._archive is not None and self._archive.failure is not None:
            raise self._archive.failure

    def _record(self) -> None:
        """Let the archive, if there is one, have everything that is written from now on."""
        if self.settings.archive is None or self._archive is not None:
            return
        from tailrace.act.sync.archiving import SyncArchive  # noqa: PLC0415  it needs pyarrow

        self._archive = SyncArchive(self._source, self.settings.archive, lambda _: self.stop())
        self._archive.wait_until_begun()

    def _record_no_more(self) -> None:
        archive, self._archive = self._archive, None
        if archive is not None:
            archive.close()

    def status(self) -> SyncProgress:
        """How far the sync is, whichever process owns it."""
        self._seen = standing.look(self.ends, self.settings)
        counted = {key: value for key, value in self._counted.fields().items() if value}
        return standing.with_fields(self._seen, counted)

    def verify(
        self,
        *,
        sample: int | None = None,
        names: Sequence[str] = (),
        resume: bool = False,
        on_progress: Callable[[Any], None] | None = None,
    ) -> Verification:
        """Compare both ends byte for byte at one position, while writes go on. ``sample``: compare this many documents
        of each collection. ``names``: compare only these collections, by their names on the source. ``resume``:
        continue where a verification was stopped."""
        with self._followed():
            verification = verify(
                self.ends.deployment,
                self.ends.state,
                self.settings,
                sample=sample,
                names=names,
                resume=resume,
                on_progress=on_progress,
                stop=self._stopped,
            )
        if verification.complete:
            differences = len(verification.differences) + verification.more
            noted = {
                "time": f"{verification.time.seconds},{verification.time.increment}",
                "documents": verification.documents,
            }
            self._note({"verified": {**noted, "differences": differences, "whole": sample is None and not names}})
        return verification

    @contextmanager
    def _followed(self) -> Iterator[None]:
        """Somebody follows while the body compares: if nobody else does, another sync in a thread."""
        document = self._document()
        if document.phase == standing.CUT_OVER or standing.is_owned(document, self.ends.state):
            yield
            return
        with Sync.of(self._source, self._target, self.settings) as beside:
            thread = CheckedThread(beside.run, "tailrace-sync-beside", failed=lambda _: self.stop())
            thread.start()
            try:
                yield
            finally:
                beside.stop()
                thread.join()
            thread.check()

    def pause(self) -> None:
        """Let the owner write nothing until ``resume``, even if processes are restarted meanwhile."""
        self._document()
        self._note({"paused": True})

    def resume(self) -> None:
        """Let the owner go on."""
        self._document()
        self._note({"paused": False})

    def cutover(
        self,
        *,
        block: bool = True,
        sample: int | None = CUT_OVER_SAMPLE,
        told: Callable[[str], None] = lambda _: None,
    ) -> CutOver:
        """Let the target take the source's place: wait for the last write, prove that it is the last, compare, restore
        what was held, and end the sync. ``block``: let a source from 6.0 on refuse its users' writes; otherwise the
        caller must have stopped all writers. ``sample``: how many documents of each collection are compared; ``None``:
        all. Raises TailraceError, and then the sync continues as before, unless the error says that it is cut over:
        then only what was held is not restored yet, and another call does that."""
        hand_over = HandOver(self.ends, self.settings, self._handed_over, self.verify, told)
        if is_unfinished(self.ends.state):
            return hand_over.finish()
        check_can_be_cut_over(self._document())
        return hand_over(block=block, sample=sample)

    def reverse(self, *, unblock: bool = False) -> Sync:
        """After a cut-over: a sync from what was the target to what was the source, which begins where the cut-over was
        and copies nothing. Raises UsageError if somebody has written to the former source since. ``unblock``: let it
        accept its users' writes again; this is needed if the sync's user has no right to bypass the block."""
        time_, at = cut_over_of(self._document())
        if is_unfinished(self.ends.state):
            raise UsageError(
                "the cut-over has not restored every expireAfterSeconds of the target yet",
                hint="Run `tailrace sync cutover` again to do that; then reverse",
            )
        there = list(self.ends.state.collections().values())
        back = Sync.of(self._target, self._source, settings_back(self.settings, there))
        try:
            if has_begun(back.ends):
                return back  # what it has written itself is not foreign
            refuse_foreign_writes(self.ends, self.settings, time_, commands=not has_noted(back.ends))
            with refused_writes_told():
                if unblock:
                    allow_writes(self.ends.source, str(self.ends.source.server_info()["version"]))
                begin_back(back.ends, back.settings, there, at)
        except BaseException:
            back.close()
            raise
        return back

    @classmethod
    def of(cls, source: Any, target: Any, settings: SyncSettings) -> Sync:
        """The same with settings as they are."""
        made = cls(source, target)
        made.settings = settings
        return made

    # -- owning -----------------------------------------------------------------------------------------------------

    def _document(self) -> SyncDocument:
        return standing.document_of(self.ends.state)

    def _note(self, fields: Mapping[str, Any]) -> None:
        standing.note(self.ends.state, fields)

    def _begin_if_new(self) -> None:
        state = self.ends.state
        if state.read() is None:
            plan = self.plan()
            if plan.refusals:
                raise UsageError(
                    "; ".join(str(one) for one in plan.refusals), hint="`tailrace sync plan` shows all that it needs"
                )
            self._record()
            now = self.ends.now()
            extra = {"settings": standing.said_of(self.settings), DEPLOYMENT: deployment_of(state)}
            members, witness = self.ends.oplogs.members, self.ends.oplogs.witness()
            try:
                state.begin(now, members=members, witness=witness, extra=extra)
            except UsageError:
                if state.read() is None:
                    raise  # otherwise another process has begun it just now
        else:
            standing.check_settings(self._document(), self.settings)

    def _waits_for_another(self) -> bool:
        """Whether another process owns the sync, or has asked for it."""
        document = self._document()
        request = document.extra.get("request")
        if request is not None:
            if time.time() - float(request["at"]) < _HANDED_LEASES * self.settings.lease_s:
                return True
            self._note({"request": None})  # the process that asked has died
        return standing.is_owned(document, self.ends.state)

    def counted(self) -> SyncProgress:
        """What was known at the last look, without a request to any server."""
        return standing.with_fields(self._seen, self._counted.fields())

    def _handed_over(self, kind: str, ownership_wait_s: float) -> SyncOwnership:
        """Ask the owner for the lease, and take it."""
        self._note({"request": {"kind": kind, "at": time.time()}})
        try:
            return own(self.ends.state, lanes=self.settings.lanes + 1, wait_s=ownership_wait_s)
        except BaseException:
            self._note({"request": None})
            raise


def _directory(archive: str | Path) -> Path:
    place = None if is_object_uri(str(archive)) else archive_place(archive)
    if not isinstance(place, Path):
        raise UsageError("a sync records into a directory, not into an object store")
    return place
