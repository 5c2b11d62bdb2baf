"""The tables that ``tailrace run`` keeps beside its lake: the section ``tables`` of the pipeline file."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from tailrace.errors import TailraceError

if TYPE_CHECKING:
    from tailrace.tables.settings import TableSettings


@contextmanager
def tabling(uri: Any, settings: TableSettings | None, stop: threading.Event, *, once: bool) -> Iterator[None]:
    """Keep the tables up to date in a thread while the body runs. A failure of the thread sets ``stop`` and is raised
    at the end. With ``once`` the tables reach the time at which the body began."""
    if settings is None:
        yield
        return
    from tailrace.tables.writer import TablesWriter  # noqa: PLC0415  Arrow and deltalake

    failures: list[TailraceError] = []
    with TablesWriter(uri, settings) as writer:

        def work() -> None:
            try:
                if once:
                    writer.run_to_present()
                else:
                    writer.run()
            except TailraceError as error:
                failures.append(error)
                stop.set()

        thread = threading.Thread(target=work, name="tailrace-tables", daemon=True)
        thread.start()
        try:
            yield
        finally:
            if not once or stop.is_set():
                writer.stop()
            thread.join()
    if failures:
        raise failures[0]
