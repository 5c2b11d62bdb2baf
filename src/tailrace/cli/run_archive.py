"""The archive that ``tailrace run`` keeps in addition to its lake: the section ``archive`` of the pipeline file."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tailrace.base.threads import CheckedThread
from tailrace.errors import TailraceError
from tailrace.read.archive.layout import describe, head, oplog_folder
from tailrace.read.archive.recorder import ArchivePolicy, Recorder
from tailrace.read.archive.retention import Retention
from tailrace.read.source.connection import open_client
from tailrace.read.source.topology import Cluster

if TYPE_CHECKING:
    from tailrace.lake.spark.store.pipeline_file import ArchiveSettings


def has_history(folder: Path) -> bool:
    """Whether there is a replica set's archive that holds something: then the lake's source may begin in it. (A
    cluster's is not joined with the live oplogs.)"""
    description = describe(folder)
    if description is None or description.name is None:
        return False
    reach = head(oplog_folder(folder, description.name))
    return reach is not None and not reach.is_empty


class Archiving:
    """An archive that is written in a thread, by ``recorder``. ``failure`` is what ended it; ``stop`` is set then."""

    def __init__(self, uri: Any, settings: ArchiveSettings, stop: threading.Event, *, once: bool) -> None:
        self._client = open_client(uri)
        self._cluster = Cluster.discover(self._client, uri, {})
        policy = ArchivePolicy(
            once=once, images=settings.images, retention=Retention(settings.keep_seconds, settings.keep_bytes)
        )
        self.recorder = Recorder(self._client, self._cluster, settings.path, policy)
        self._stop = stop
        self._once = once
        self._thread = CheckedThread(self.recorder.run, "tailrace-archive", failed=lambda _: stop.set())
        self._thread.start()

    @property
    def failure(self) -> TailraceError | None:
        """What has ended the thread, whatever it was."""
        return self._thread.failure

    def close(self) -> None:
        """Publish what was read; with ``once``, what was there at the beginning. Close the connections."""
        if not self._once or self._stop.is_set():
            self.recorder.stop()
        self._thread.join()
        if self._cluster is not None:
            self._cluster.close()
        self._client.close()


@contextmanager
def archiving(
    uri: Any, settings: ArchiveSettings | None, stop: threading.Event, *, once: bool
) -> Iterator[Recorder | None]:
    """Keep the archive while the body runs; yields its writer. A failure sets ``stop``, and is raised at the end."""
    if settings is None:
        yield None
        return
    writer = Archiving(uri, settings, stop, once=once)
    try:
        yield writer.recorder
    finally:
        writer.close()
    if writer.failure is not None:
        raise writer.failure
