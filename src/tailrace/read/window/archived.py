"""A live oplog, and an archive that goes on where it no longer reaches back.

As long as the oplog reaches back, the archive is not read. Its recorder publishes what was read at intervals, so if the
archive ends before the oplog begins, this waits for it as long as it grows. If the archive begins too late, because its
oldest files were removed, waiting would not help.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from pymongo import MongoClient

from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.oplog.history import history_lost, reaches_back
from tailrace.core.plan.request import OplogBatch
from tailrace.errors import ChangeStreamHistoryLost, OtherHistoryError, UsageError
from tailrace.read.archive.hybrid import HybridSource
from tailrace.read.archive.source import ArchiveSource
from tailrace.read.source.batch import BATCH_BYTES_MAX
from tailrace.read.source.mongod import MongodSource

#: How long to wait for an archive that does not grow: longer than its recorder takes to publish.
PATIENCE_S: Final = 90.0
_LOOK_S: Final = 0.5
_log = logging.getLogger("tailrace.archive")


class ArchivedOplog(MongodSource):
    """The oplog that ``client`` leads to, and what the archive in ``folder`` kept of it.

    ``oplog``    its name in a cluster's archive; ``None`` for a replica set's
    ``stopped``  once it is set, nothing is waited for
    """

    def __init__(
        self, client: MongoClient[Any], folder: Path, oplog: str | None, stopped: threading.Event | None
    ) -> None:
        super().__init__(client)
        self._folder, self._kept_as = folder, oplog
        self._stopped = stopped or threading.Event()
        self._longer: HybridSource | None = None

    def _archived(self) -> HybridSource | None:
        """Oplog and archive together; ``None`` where the archive has nothing of this oplog yet."""
        if self._longer is None:
            try:
                archive = ArchiveSource(self._folder, self._kept_as)
            except UsageError:
                return None
            self._longer = HybridSource(MongodSource(self.client), archive, of_shard=self._kept_as is not None)
        self._longer.archive()
        return self._longer

    def oldest(self) -> tuple[ClusterTime, bool]:
        """That of the archive, where the two meet."""
        found = super().oldest()
        archived = None if found[1] else self._archived()
        return found if archived is None or archived.hole is not None else archived.oldest()

    def read(
        self,
        after: ClusterTime,
        until: ClusterTime,
        *,
        batch_bytes_max: int = BATCH_BYTES_MAX,
        oplog_filter: bytes | None = None,
        entry: bytes | None = None,
    ) -> Iterator[OplogBatch]:
        """See OplogSource, and ``MongodSource`` for ``entry``."""
        options: dict[str, Any] = {"batch_bytes_max": batch_bytes_max, "oplog_filter": oplog_filter}
        position = after
        try:
            for batch in super().read(after, until, entry=entry, **options):
                position = max(position, batch.high_water)
                yield batch
        except ChangeStreamHistoryLost as lost:
            if position == after and entry is not None:
                self._check(after, entry)
            yield from self._longer_read(position, until, lost, options)

    def _longer_read(
        self, after: ClusterTime, until: ClusterTime, lost: ChangeStreamHistoryLost, options: dict[str, Any]
    ) -> Iterator[OplogBatch]:
        position, end = after, time.monotonic() + PATIENCE_S
        reached = ClusterTime(0)
        while position < until:
            archived = self._archived()
            if archived is not None:
                try:
                    for batch in archived.read(position, until, **options):
                        position = max(position, batch.high_water)
                        yield batch
                    return
                except ChangeStreamHistoryLost as error:
                    lost = error
                self._refuse_trimmed(archived.archive(), position)
                newest = max(position, archived.archive().newest())
                if newest > reached:
                    reached, end = newest, time.monotonic() + PATIENCE_S
            if time.monotonic() >= end:
                raise lost
            _log.debug("the archive %s does not reach the oplog yet: %s", self._folder, lost)
            if self._stopped.wait(_LOOK_S):
                return

    def _refuse_trimmed(self, archive: ArchiveSource, position: ClusterTime) -> None:
        begins, complete = archive.oldest()
        if not reaches_back(position, begins, complete):
            raise history_lost(
                f"The oplog of {self.name} begins at {super().oldest()[0]} and the archive {self._folder} at {begins}: "
                f"neither has what comes after {position}. Begin again, and let the archive keep more"
            )

    def _check(self, after: ClusterTime, entry: bytes) -> None:
        """The archive must have the entry that was read before, if it has any of that time."""
        [found] = self.entries([after])
        if found is not None and found != entry:
            raise OtherHistoryError(f"at {after} the archive {self._folder} has another entry than was read before")

    def entries(self, times: Sequence[ClusterTime]) -> list[bytes | None]:
        """The oplog's, and the archive's where that has none."""
        found = list(super().entries(times))
        missing = [place for place, one in enumerate(found) if one is None]
        archived = self._archived() if missing else None
        if archived is not None:
            kept = archived.archive().entries([times[place] for place in missing])
            for place, one in zip(missing, kept, strict=True):
                found[place] = one
        return found

    def interrupt(self) -> None:
        """As of ``MongodSource``."""
        super().interrupt()
        if self._longer is not None:
            self._longer.interrupt()
