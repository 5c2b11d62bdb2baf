"""The archive that ``tailrace run`` keeps beside its lake: the section ``archive`` of the pipeline file."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tailrace.archive.layout import describe, head, oplog_folder
from tailrace.archive.recorder import ArchivePolicy, Recorder
from tailrace.archive.retention import Retention
from tailrace.errors import TailraceError
from tailrace.source.connection import open_client
from tailrace.source.topology import Cluster

if TYPE_CHECKING:
    from tailrace.spark.lake.pipeline_file import ArchiveSettings


def has_history(folder: Path) -> bool:
    """Whether there is a replica set's archive that holds something: then the lake's source may begin in it. (A
    cluster's is not joined with the live oplogs.)"""
    found = describe(folder)
    return found is not None and found.name is not None and head(oplog_folder(folder, found.name)) is not None


class Archiving:
    """An archive that is written in a thread. ``failure`` is what ended it; ``stop`` is set then."""

    def __init__(self, uri: Any, settings: ArchiveSettings, stop: threading.Event, *, once: bool) -> None:
        self._client = open_client(uri)
        self._cluster = Cluster.discover(self._client, uri, {})
        policy = ArchivePolicy(
            once=once, images=settings.images, retention=Retention(settings.keep_seconds, settings.keep_bytes)
        )
        self._recorder = Recorder(self._client, self._cluster, settings.path, policy)
        self._stop = stop
        self._once = once
        self._thread = threading.Thread(target=self._run, name="tailrace-archive", daemon=True)
        self.failure: TailraceError | None = None
        self._thread.start()

    def _run(self) -> None:
        try:
            self._recorder.run()
        except TailraceError as error:
            self.failure = error
            self._stop.set()

    def close(self) -> None:
        """Publish what was read; with ``once``, what was there at the beginning. Close the connections."""
        if not self._once or self._stop.is_set():
            self._recorder.stop()
        self._thread.join()
        if self._cluster is not None:
            self._cluster.close()
        self._client.close()


@contextmanager
def archiving(uri: Any, settings: ArchiveSettings | None, stop: threading.Event, *, once: bool) -> Iterator[None]:
    """Keep the archive while the body runs. Its failure sets ``stop``, and is raised at the end."""
    if settings is None:
        yield
        return
    writer = Archiving(uri, settings, stop, once=once)
    try:
        yield
    finally:
        writer.close()
    if writer.failure is not None:
        raise writer.failure
