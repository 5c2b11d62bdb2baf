"""From the archive over to the live oplog, without a seam: a start that the oplog no longer reaches back to.

What the oplog still holds is read from there. What is older comes from the archive, up to its end; then the live oplog
must hold the archive's last entries, the same bytes, and goes on after them. Where it does not reach back to the
archive's end, the hole between the two is an error that names it.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterator, Sequence
from typing import Any, Final

from tailrace.core import raw_bson
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.oplog.erased import is_same_entry
from tailrace.core.oplog.history import history_lost, reaches_back
from tailrace.core.plan.request import OplogBatch, PreImageKey
from tailrace.errors import ChangeStreamHistoryLost, SourceError
from tailrace.read.archive.owner import set_identity
from tailrace.read.archive.source import ArchiveSource
from tailrace.read.source.batch import entry_time
from tailrace.read.source.live import LiveSource, RelayedSource

_AWAIT_MS: Final = 1000
_ITS_OWN: Final = "Give the archive that was made of this deployment"

_log = logging.getLogger("tailrace.archive")


class HybridSource(RelayedSource):
    """A live oplog with a longer history. ``live`` answers everything that the archive does not hold. An archive
    ``of_shard`` bears the shard's name, which need not be its replica set's.

    Raises SourceError if the archive is another deployment's.
    """

    def __init__(self, live: LiveSource, archive: ArchiveSource, *, of_shard: bool = False) -> None:
        super().__init__(live)
        self._archive = archive
        self._is_checked = False
        if not of_shard and live.name != archive.name:
            raise SourceError(
                f"the archive is of {archive.name}, but the deployment is {live.name}",
                hint=_ITS_OWN,
            )

    @property
    def hole(self) -> tuple[ClusterTime, ClusterTime] | None:
        """The range that neither the archive nor the oplog holds: after the one's end, before the other's beginning."""
        oldest, complete = self._live.oldest()
        end = self._archive.newest()
        if reaches_back(end, oldest, complete):
            return None
        self._archive.refresh()
        end = self._archive.newest()
        return None if reaches_back(end, oldest, complete) else (end, oldest)

    def oldest(self) -> tuple[ClusterTime, bool]:
        """The archive's beginning, where the two meet; otherwise the oplog's. Raises SourceError where they are not of
        one deployment."""
        live = self._live.oldest()
        self._check_identity()
        if self.hole is not None:
            return live
        return min(live, self._archive.oldest(), key=lambda found: found[0])

    def _check_identity(self) -> None:
        """The archive must be this deployment's, as far as ids are known and its last entry is in the oplog still."""
        if not self._is_checked:
            identity = set_identity(self._archive.name, self._live.client)
            self._archive.confirm_owner(self._live, identity, _ITS_OWN)
            self._is_checked = True

    def read(self, after: ClusterTime, until: ClusterTime, **options: Any) -> Iterator[OplogBatch]:
        """See OplogSource. A reader that the oplog overtakes goes on in the archive."""
        options.pop("await_ms", None)
        position = after
        while position < until:
            for source, start in self._parts(position):
                position = start
                end = until if source is self._live else min(until, self._archive.newest())
                try:
                    for batch in source.read(start, end, **options):
                        position = max(position, batch.high_water)
                        yield batch
                except ChangeStreamHistoryLost:
                    if source is self._archive or not self._archive_goes_past(position):
                        raise
                    _log.warning("the oplog no longer reaches back to %s: reading on from the archive", position)
                    break
                if position >= until or source is self._live:
                    return

    def tail(self, after: ClusterTime, **options: Any) -> Generator[OplogBatch, None, None]:
        """See OplogSource. A reader that the oplog overtakes goes on in the archive."""
        position = after
        while True:
            for source, start in self._parts(position):
                position = start
                try:
                    for batch in source.tail(start, **options):
                        position = max(position, batch.high_water)
                        yield batch
                except ChangeStreamHistoryLost:
                    if source is self._archive or not self._archive_goes_past(position):
                        raise
                    _log.warning("the oplog no longer reaches back to %s: reading on from the archive", position)
                    break
                if source is self._live:
                    return

    def _archive_goes_past(self, position: ClusterTime) -> bool:
        self._archive.refresh()
        return self._archive.newest() > position

    def is_archived(self, after: ClusterTime) -> bool:
        """Whether a reader of what comes after ``after`` has to begin in the archive."""
        return not reaches_back(after, *self._live.oldest())

    def archive(self) -> ArchiveSource:
        """The archive, with what was added to it since."""
        self._archive.refresh()
        return self._archive

    def refuse_hole(self) -> None:
        """Raises 286 if archive and oplog do not meet; the message names both ends."""
        hole = self.hole
        if hole is not None:
            raise history_lost(
                f"The archive ends at {hole[0]} and the oplog of {self._live.name} begins at {hole[1]}: what lies "
                "between is lost. Start after that, and let 'tailrace archive' run without such pauses"
            )

    def _parts(self, after: ClusterTime) -> Iterator[tuple[Any, ClusterTime]]:
        """Where to read from, in turn, and after which time each."""
        if not reaches_back(after, *self._live.oldest()):
            self._check_identity()
            while True:
                self._archive.refresh()
                yield self._archive, after
                end = self._archive.newest()
                after = max(after, end)
                self._archive.refresh()
                if self._archive.newest() == end or reaches_back(end, *self._live.oldest()):
                    break
            self._check_seam(after)
        yield self._live, after

    def _check_seam(self, end: ClusterTime) -> None:
        """The live oplog must hold what the archive ends with, as far as it reaches back."""
        oldest, complete = self._live.oldest()
        if not reaches_back(end, oldest, complete):
            raise history_lost(
                f"The archive ends at {end} and the oplog of {self._live.name} begins at {oldest}: what lies between "
                "is lost. Start after that, and let 'tailrace archive' run without such pauses"
            )
        # An oplog that is complete from its first entry on must hold all of them.
        archived = [entry for entry in self._archive.last_entries() if complete or oldest <= entry_time(entry)]
        if not archived:
            return
        # The archive may have grown since it was left: its last entries are those of now, after ``end`` perhaps.
        begin, last = ClusterTime(entry_time(archived[0]) - 1), entry_time(archived[-1])
        place = 0
        for batch in self._live.read(begin, last):
            for entry in raw_bson.split(batch.raw):
                if place >= len(archived) or not is_same_entry(archived[place], entry):
                    self._refuse_seam(entry_time(entry))
                place += 1
        if place < len(archived):
            self._refuse_seam(entry_time(archived[place]))

    def _refuse_seam(self, time: ClusterTime) -> None:
        raise SourceError(
            f"the archive and the oplog of {self._live.name} differ at {time}",
            hint="The archive is of another deployment, or part of this one's history was rolled back",
        )

    def entries(self, times: Sequence[ClusterTime]) -> list[bytes | None]:
        """The live oplog's entries, and the archive's where that has none."""
        found = self._live.entries(times)
        missing = [place for place, entry in enumerate(found) if entry is None]
        for place, entry in zip(missing, self._archive.entries([times[place] for place in missing]), strict=True):
            found[place] = entry
        return found

    def pre_images(self, keys: Sequence[PreImageKey]) -> list[bytes | None]:
        """The stored pre-images, and the archived ones where the server has let them expire."""
        found = list(self._live.pre_images(keys))
        missing = [place for place, image in enumerate(found) if image is None]
        for place, image in zip(missing, self._archive.pre_images([keys[place] for place in missing]), strict=True):
            found[place] = image
        return found
