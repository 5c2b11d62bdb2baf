"""A listener's stream: opened, read and marked, in spite of sources that do not answer and history that is lost. Part
of ``rules.listener``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from bson.timestamp import Timestamp

from tailrace.act.consumer.rules.errors import LeaseStoreUnavailable
from tailrace.act.consumer.rules.lease_logic import LeaseLogic, Steps, backoff
from tailrace.act.consumer.rules.need import (
    FindStart,
    MarkEntries,
    OpenStream,
    PullChange,
    Pulled,
    TakeSnapshot,
    TellGap,
)
from tailrace.act.consumer.rules.ownership import Ownership
from tailrace.act.consumer.rules.position import StreamPosition
from tailrace.act.consumer.rules.settings import ListenerSettings
from tailrace.core.oplog.cluster_time import ZERO, ClusterTime
from tailrace.core.oplog.witness import EntryMark
from tailrace.errors import ChangeStreamHistoryLost, InternalError, OtherHistoryError, SourceError

#: How long a source that cannot be read is tried again; then the listener ends with its error.
_SOURCE_RETRY_S: Final = 300.0


class StreamLogic(LeaseLogic):
    """Gives what the stream gives, from the position on."""

    def __init__(self, settings: ListenerSettings) -> None:
        super().__init__(settings)
        #: When entries were marked, and the position's time then.
        self._marked_at = 0.0
        self._marked_to = ZERO
        #: Pulled, and kept for the next time.
        self._held: Pulled | None = None
        #: How often history was lost, and how often and since when the stream could not be read, since it has given
        #: something.
        self._losses = self._failed_pulls = 0
        self._away_since: float | None = None

    def _open(self, owned: Ownership) -> Steps:
        """Open the stream at the position, in spite of a source or a store that is away, and by the policy on lost
        history. A listener that is stopped meanwhile has none."""
        failures, since = 0, self._now
        self._held = None
        while not self.leaves:
            owned.check(self._now)
            try:
                if (yield from self._is_opened(owned)):
                    return
            except SourceError as error:
                failures += 1
                yield from self._wait_for_source(error, failures, since)
            except LeaseStoreUnavailable as error:  # a lane's stream asks where other lanes are
                yield from self._pause(backoff(failures := failures + 1), error.message)

    def _is_opened(self, owned: Ownership) -> Steps:
        if self._position is None:
            raise InternalError("a stream is opened without a position")
        try:
            deployment: str | None = yield from self._ask(OpenStream(self._position))
        except ChangeStreamHistoryLost as error:
            yield from self._history_lost(owned, error)
            return False
        if deployment is not None and self._position.deployment is None:
            self._position = replace(self._position, deployment=deployment)
        return True

    def _history_lost(self, owned: Ownership, error: ChangeStreamHistoryLost) -> Steps:
        """Move the position by the policy; the stream is to be opened there. Raises ``error`` with "fail"."""
        policy = self.settings.on_history_lost
        position = self._position
        if policy == "fail" or position is None:
            hint = (
                'on_history_lost="snapshot" (--on-history-lost snapshot) copies the documents again; "gap" goes on '
                "after the gap and notes it"
            )
            raise ChangeStreamHistoryLost(error.message, hint=f"{error.hint}. {hint}" if error.hint else hint)
        self._losses += 1
        if self._losses > 1:  # the oplog is being truncated, or another lane's place is lost too
            yield from self._pause(backoff(self._losses - 1), error.message)
            if self.leaves:
                return
        if policy == "snapshot" or position.snapshot is not None:
            yield from self._take_snapshot(owned, position)
            return
        time: Timestamp = yield from self._ask(FindStart("oldest"))
        if ClusterTime.from_timestamp(time) <= position.cluster_time:
            return  # what is lost is another lane's
        self.statistics.gaps += 1
        self._moved(position.jump_to(time))
        yield from self._ask(TellGap(position.cluster_time.to_timestamp(), time, error.message))
        yield from self._commit(owned)

    def _take_snapshot(self, owned: Ownership, position: StreamPosition | None) -> Steps:
        self._moved((yield from self._ask(TakeSnapshot(owned.lease, position))))
        yield from self._commit(owned)

    def _wait_for_source(self, error: SourceError, failures: int, since: float) -> Steps:
        """Wait before the next try. Raises ``error`` where there is none."""
        if isinstance(error, OtherHistoryError) or self._now - since > _SOURCE_RETRY_S:
            raise error  # the first does not go away by waiting
        yield from self._pause(backoff(failures), error.message)

    def _pull(self, owned: Ownership, *, wait: bool = True) -> Steps:
        """What the stream gives; ``None`` when it had to be opened again, at the position."""
        if self._held is not None:
            held, self._held = self._held, None
            return held
        try:
            pulled: Pulled = yield from self._ask(PullChange(wait))
        except (ChangeStreamHistoryLost, SourceError) as error:
            yield from self._pull_failed(owned, error)
            yield from self._open(owned)
            return None
        if pulled.event is not None or pulled.token is not None:
            self._losses, self._failed_pulls, self._away_since = 0, 0, None
        if pulled.event is None and not pulled.alive:
            yield from self._open(owned)
            return None
        return pulled

    def _pull_failed(self, owned: Ownership, error: ChangeStreamHistoryLost | SourceError) -> Steps:
        """Wait, or move by the policy on lost history. A stream that can be opened and not read, as a lane's whose
        reader fails, is not waited for any longer than one that cannot be opened."""
        try:
            if isinstance(error, SourceError):
                raise error
            yield from self._history_lost(owned, error)
        except SourceError as away:
            self._failed_pulls += 1
            self._away_since = self._now if self._away_since is None else self._away_since
            yield from self._wait_for_source(away, self._failed_pulls, self._away_since)

    @property
    def _may_mark(self) -> bool:
        """Entries are marked as seldom as a quiet stream's position is committed: it costs a read of each oplog."""
        return self._now - self._marked_at >= self.settings.commits.idle_seconds

    def _mark(self, further: StreamPosition | None = None) -> Steps:
        """Let the position, or the one ``further`` on to which it moves then, know the entries that stand there: on a
        deployment that was restored from an older backup they are missing, and the stream is not continued there.

        The token of a change names an entry itself, so that its stream finds it or fails; a high-water mark does not.
        So the position moves to one only with its entries, and stays where it is when they cannot be read now.
        """
        position = further or self._position
        if position is None or position.token is None or position.snapshot is not None or not self._may_mark:
            return
        self._marked_at = self._now
        try:
            found: Mapping[str, EntryMark] | None = yield from self._ask(MarkEntries(position, self._marked_to))
        except SourceError:
            return  # the stream will say what is wrong
        self._marked_to = position.cluster_time
        if found:
            position = replace(position, entries={**position.entries, **found})
        self._moved(position)
