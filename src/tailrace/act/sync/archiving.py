"""The source's oplogs recorded into an archive for as long as this process owns a sync."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Final

from tailrace.base.threads import CheckedThread
from tailrace.errors import SourceError, TailraceError
from tailrace.read.archive.layout import CONFIG_OPLOG, describe
from tailrace.read.archive.recorder import ArchivePolicy, Recorder
from tailrace.read.archive.writer import SegmentLimits
from tailrace.read.source.connection import RETRY_SECONDS, open_client
from tailrace.read.source.topology import Cluster

#: A reader that the oplog has overtaken waits for what was recorded last.
_PUBLISHED_S: Final = 20.0
_LOOK_S: Final = 0.05


class SyncArchive:
    """Records the deployment of ``uri`` into ``folder`` in threads, from now on until ``close``.

    ``failed``  called in a thread when recording ends with an error, which ``close`` raises
    """

    def __init__(self, uri: Any, folder: Path, failed: Any) -> None:
        self._client = open_client(uri)
        try:
            self._cluster = Cluster.discover(self._client, uri, {})
        except BaseException:
            self._client.close()
            raise
        self._folder = folder
        policy = ArchivePolicy(from_oldest=False, images=False, limits=SegmentLimits(seconds=_PUBLISHED_S))
        self._recorder = Recorder(self._client, self._cluster, folder, policy)
        self._thread = CheckedThread(self._recorder.run, "tailrace-sync-archive", failed=failed)
        self._thread.start()

    def wait_until_begun(self) -> None:
        """Wait until every oplog is recorded, so that nothing written from now on is missing. Raises TailraceError."""
        end = time.monotonic() + RETRY_SECONDS
        while not self._has_begun():
            if self._thread.failure is not None:
                raise self._thread.failure
            if time.monotonic() >= end:
                raise SourceError(f"the archive {self._folder} cannot begin: the source gives no entry")
            time.sleep(_LOOK_S)

    def _has_begun(self) -> bool:
        recorded = self._recorder.statistics().keys()
        if self._cluster is None:
            return bool(recorded)
        known = describe(self._folder)
        shards = () if known is None else [name for name, one in known.shards.items() if one.until is None]
        return bool(shards) and {CONFIG_OPLOG, *shards} <= recorded

    @property
    def failure(self) -> TailraceError | None:
        """What has ended the recording, if anything has."""
        return self._thread.failure

    def close(self) -> None:
        """End, with everything published that was read."""
        self._recorder.stop()
        self._thread.join()
        if self._cluster is not None:
            self._cluster.close()
        self._client.close()
