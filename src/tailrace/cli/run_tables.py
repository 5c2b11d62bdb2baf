"""The tables that ``tailrace run`` keeps in addition to its lake: the section ``tables`` of the pipeline file."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from tailrace.base.threads import CheckedThread
from tailrace.errors import TailraceError

if TYPE_CHECKING:
    from tailrace.lake.tables.settings import TableSettings
    from tailrace.lake.tables.writer import TablesWriter


@contextmanager
def tabling(
    uri: Any, settings: TableSettings | None, stop: threading.Event, *, once: bool
) -> Iterator[TablesWriter | None]:
    """Keep the tables up to date in a thread while the body runs; yields their writer. What ends the thread, whatever
    it is, sets ``stop`` and is raised at the end. With ``once`` the tables reach the time at which the body began."""
    if settings is None:
        yield None
        return
    from tailrace.lake.tables.writer import TablesWriter  # noqa: PLC0415  Arrow and deltalake

    with TablesWriter(uri, settings) as writer:

        def failed(_: TailraceError) -> None:
            stop.set()

        thread = CheckedThread(writer.run_to_present if once else writer.run, "tailrace-tables", failed=failed)
        thread.start()
        try:
            yield writer
        finally:
            if not once or stop.is_set():
                writer.stop()
            thread.join()
    thread.check()
