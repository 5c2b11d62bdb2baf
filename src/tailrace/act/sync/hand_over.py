"""The cut-over, step by step, and the way back."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from pymongo import MongoClient
from pymongo.client_session import ClientSession

from tailrace.act.sync import standing
from tailrace.act.sync.catalog import TTL_MAX, OnTarget, name_of, read_catalog
from tailrace.act.sync.cutover import (
    CutOver,
    blocked_writes,
    check_primaries,
    confirm_primaries,
    refuse_blocked,
    refuse_written,
    written,
)
from tailrace.act.sync.ends import Ends
from tailrace.act.sync.follower import Follower
from tailrace.act.sync.indexes import expires, noted, restore_held, set_expiry, waiting
from tailrace.act.sync.ownership import SyncOwnership, own
from tailrace.act.sync.recognition import DEPLOYMENT, deployment_of
from tailrace.act.sync.settings import SyncSettings
from tailrace.act.sync.state import SyncDocument, SyncedCollection, SyncState
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.oplog.selection import Selection
from tailrace.errors import SinkError, TailraceError, UsageError

if TYPE_CHECKING:
    from tailrace.act.sync.verification import Verification

#: How long the owner has to finish its current work.
_HAND_OVER_LEASES: Final = 2
_NAMED_MAX: Final = 5
_BACK: Final = "-back"


class HandOver:
    """A cut-over. ``take`` asks the owner for the lease; ``compare`` is a sync's ``verify``."""

    def __init__(
        self,
        ends: Ends,
        settings: SyncSettings,
        take: Callable[[str, float], SyncOwnership],
        compare: Callable[..., Verification],
        told: Callable[[str], None],
    ) -> None:
        self._ends, self._settings = ends, settings
        self._take, self._compare, self._told = take, compare, told
        #: Whether the target may already say that the sync has ended.
        self._is_ending = False

    def __call__(self, *, block: bool, sample: int | None) -> CutOver:
        """Carry it out. Raises TailraceError: the source takes writes again then, unless the error says that the sync
        is cut over."""
        ends = self._ends
        version = str(ends.source.server_info()["version"])
        primaries = ends.members
        check_primaries(primaries)
        refuse_blocked(ends.target)
        with self._taken() as ownership:
            self._step(ownership, ends.now())  # nearly all, while writers still write
            with blocked_writes(ends.source, version, wanted=block, stays=self._stays_blocked) as blocked:
                begun = time.monotonic()
                self._told("the source refuses writes" if blocked else "the source's writers should have stopped")
                self._confirm(primaries)
                last = ends.now()
                self._step(ownership, last)
                proof = ends.now()
                self._prove(last, proof)
                self._step(ownership, proof)
                self._told(f"the target equals the source at {proof.seconds},{proof.increment}")
                compared = self._equal(sample)
                self._prove(proof, ends.now())
                at = ownership.now()  # before anything can expire on the target
                self._end(ownership, CutOver(proof, at, blocked, time.monotonic() - begun, compared, 0))
            restored = self._restore(ownership)
            return CutOver(proof, at, blocked, time.monotonic() - begun, compared, restored)

    def finish(self) -> CutOver:
        """Restore what a cut-over that has ended the sync has left held. Raises TailraceError."""
        document = standing.document_of(self._ends.state)
        last, at = cut_over_of(document)
        cut = document.extra["cutOver"]
        with self._taken() as ownership:
            restored = self._restore(ownership)
        return CutOver(last, at, cut["blocked"], cut.get("seconds", 0.0), cut.get("documents", 0), restored)

    @contextmanager
    def _taken(self) -> Iterator[SyncOwnership]:
        try:
            with self._take("cutover", _HAND_OVER_LEASES * self._settings.lease_s) as ownership:
                yield ownership
        finally:
            with suppress(TailraceError):  # it is forgotten after a while anyway
                standing.note(self._ends.state, {"request": None})

    def _step(self, ownership: SyncOwnership, until: ClusterTime) -> None:
        with Follower(self._ends.oplogs, self._ends.state, ownership, self._settings) as follower:
            follower.run_until(until)

    def _confirm(self, primaries: Sequence[MongoClient[Any]]) -> None:
        names = [one.namespace for one in self._ends.state.collections().values()]
        if names:  # without a collection there is nothing to lose; the role read allows none of the server's own
            confirm_primaries(primaries, min(names, key=lambda name: ".system." in name))

    def _prove(self, after: ClusterTime, until: ClusterTime) -> None:
        oplogs = self._ends.new_oplogs()
        try:
            refuse_written(written(oplogs, after, until, self._settings.has), "the cut-over is given up")
        finally:
            oplogs.close()

    def _equal(self, sample: int | None) -> int:
        verification = self._compare(sample=sample)
        if not verification.good:
            if not verification.differences:
                raise SinkError("the cut-over is given up: its verification was stopped")
            raise SinkError(
                f"the cut-over is given up: the target differs from the source, first in {verification.differences[0]}",
                hint="`tailrace sync verify` names all differences",
            )
        return int(verification.documents)

    def _end(self, ownership: SyncOwnership, done: CutOver) -> None:
        """End the sync: from now on, documents may expire on the target, and the source is to take no more writes."""
        noted = {
            "time": done.time.to_timestamp(),
            "at": done.at.to_timestamp(),
            "blocked": done.blocked,
            "seconds": done.seconds,
            "documents": done.verified,
        }
        self._is_ending = True
        try:
            ownership.run(_nothing, sets={"phase": standing.CUT_OVER, "cutOver": noted}, what="end the sync")
        except TailraceError as error:
            if self._phase() is not None:
                raise
            raise SinkError(
                f"it is not known whether the sync is cut over: {error.message}",
                code=error.code,
                hint="Once the target answers, run `tailrace sync cutover` again: it completes the cut-over or does it "
                "anew. Until then nobody may write to the source; one that was told to refuse writes still does",
            ) from error

    def _phase(self) -> str | None:
        """The sync's; ``None`` where the target cannot say."""
        try:
            return standing.document_of(self._ends.state).phase
        except TailraceError:
            return None

    def _stays_blocked(self) -> bool:
        """Whether the source must take no writes after an error: the sync has ended, or may have."""
        phase = self._phase()
        return self._is_ending if phase is None else phase == standing.CUT_OVER

    def _restore(self, ownership: SyncOwnership) -> int:
        """Restore the limits of age: how many. Never before the sync has ended: what had expired on the target by then
        would be missing if it went on."""
        try:
            return len(restore_held(self._ends.state, ownership))
        except TailraceError as error:
            raise SinkError(
                f"the sync is cut over, but not every expireAfterSeconds of the target is restored: {error.message}",
                code=error.code,
                hint="The target may take the source's place, but nothing expires there by these indexes yet. Remove "
                "the cause, then run `tailrace sync cutover` again: it restores the rest",
            ) from error


def _nothing(_: ClientSession) -> None:
    return None


def check_can_be_cut_over(document: SyncDocument) -> None:
    """Raise UsageError unless a sync follows."""
    if document.phase == standing.CUT_OVER:
        raise UsageError("the sync has already been cut over", hint="`tailrace sync reverse` is the way back")
    if document.phase != standing.FOLLOW:
        raise UsageError(
            f"a sync in the phase {document.phase!r} cannot be cut over",
            hint="Its copy must be done; `tailrace sync status` shows how far it is",
        )
    if document.extra.get("paused"):
        raise UsageError(
            "a paused sync writes nothing, so it cannot be cut over", hint="Run `tailrace sync resume` first"
        )


def is_unfinished(state: SyncState) -> bool:
    """Whether a cut-over has ended the sync and has not restored everything."""
    return standing.document_of(state).phase == standing.CUT_OVER and bool(standing.held(state))


def cut_over_of(document: SyncDocument) -> tuple[ClusterTime, ClusterTime]:
    """The source's time at which a sync was cut over, and the target's. Raises UsageError where it was not."""
    cut = document.extra.get("cutOver")
    if document.phase != standing.CUT_OVER or cut is None:
        raise UsageError(
            "only a sync that was cut over can be reversed", hint="`tailrace sync cutover SOURCE TARGET` does that"
        )
    return ClusterTime.from_timestamp(cut["time"]), ClusterTime.from_timestamp(cut["at"])


def settings_back(settings: SyncSettings, there: Iterable[SyncedCollection]) -> SyncSettings:
    """The settings of the way back. ``there``: the collections on the target. With patterns left out, these alone can
    be chosen by name, and what is made after them by the same patterns."""
    patterns = [settings.target_of(one) for one in settings.selection.patterns]
    excluded = None
    if settings.excluded is not None:
        excluded = Selection(tuple(settings.target_of(one) for one in settings.excluded.patterns))
    return replace(
        settings,
        selection=Selection(tuple(dict.fromkeys([*patterns, *(one.target for one in there)]))),
        excluded=excluded,
        renames={after: before for before, after in settings.renames.items()},
        name=f"{settings.name}{_BACK}",
        shard_keys={},
    )


def refuse_foreign_writes(ends: Ends, settings: SyncSettings, after: ClusterTime, *, commands: bool = True) -> None:
    """Raise UsageError where the former source has changes of its own. ``commands``: whether any command is one."""
    oplogs = ends.new_oplogs()
    try:
        found = written(oplogs, after, ends.now(), settings.has, own=settings.state_db)
    finally:
        oplogs.close()
    found = {one for one in found if commands or "." in one}
    if found:
        raise UsageError(
            f"the former source was written to after the cut-over ({', '.join(sorted(found)[:_NAMED_MAX])}): both ends "
            "have changes of their own now",
            hint="Begin a sync with a copy instead, into another deployment or after dropping what is there",
        )


def has_begun(back: Ends) -> bool:
    """Whether the state of a way back is whole: it has written to the former source, or is about to."""
    document = back.state.read()
    return document is not None and document.phase != standing.BEGUN


def has_noted(back: Ends) -> bool:
    """Whether a way back has noted which collections there are. Then it may have altered indexes already."""
    return bool(back.state.collections())


def begin_back(back: Ends, settings: SyncSettings, there: Sequence[SyncedCollection], at: ClusterTime) -> None:
    """Make the state of a sync that has copied all, at a time of its source: the former target; or go on where a
    process that died has left it. ``there``: the collections as the sync before knew them."""
    state = back.state
    if state.read() is None:
        extra = {"settings": standing.said_of(settings), DEPLOYMENT: deployment_of(state)}
        members, witness = back.oplogs.members, back.oplogs.witness()
        state.begin(at, members=members, witness=witness, phase=standing.BEGUN, hold=at, extra=extra)
    with own(state, wait_s=_HAND_OVER_LEASES * settings.lease_s) as ownership:
        if not has_noted(back):
            ownership.run(partial(_note_back, back, settings, there), what="note the collections")
        for one in waiting(state):
            set_expiry(back.target, one.namespace, name_of(one.spec), TTL_MAX, check=ownership.check)
        ownership.run(_nothing, sets={"phase": standing.FOLLOW}, what="begin the way back")


def _note_back(back: Ends, settings: SyncSettings, there: Sequence[SyncedCollection], session: ClientSession) -> None:
    """The collections with their roles exchanged, and the limits of age that are held before anything is written."""
    state = back.state
    for one in there:
        turned = SyncedCollection(one.target_uuid, one.target, one.namespace, one.uuid, capped=one.capped)
        state.set_collection(turned, session)
    by_target = {one.namespace: one.target_uuid for one in there}
    for namespace, spec in _expiring(back, settings):
        if namespace in by_target:
            state.note_index(by_target[namespace], name_of(spec), noted(spec, there=True), session)


def _expiring(back: Ends, settings: SyncSettings) -> list[tuple[str, bytes]]:
    """The indexes of the former source by which documents expire: they are held while it follows."""
    found = read_catalog(back.state.deployment, OnTarget(settings)).collections.values()
    return [(one.namespace, spec) for one in found for spec in one.indexes if expires(spec)]
