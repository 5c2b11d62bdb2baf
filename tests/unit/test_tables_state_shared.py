"""The tables' state is read in the process that writes it, as by a console beside the writer.

LMDB lets a process open a file only once. No test had a reader in that process: the console showed an error instead of
tables, and a writer that began during a read would have ended with one.
"""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.errors import SinkError
from tailrace.lake.tables.state import TablesPosition, TableState


def position(batch: int) -> TablesPosition:
    return TablesPosition(batch, ClusterTime(batch << 32), {})


def moved(state: TableState, batch: int) -> None:
    with state.writing() as transaction:
        transaction.set_position(position(batch))


def test_readers_see_what_the_writer_has_written(tmp_path: Path) -> None:
    writer = TableState(tmp_path / "state")
    moved(writer, 1)
    readers = [TableState(tmp_path / "state", readonly=True) for _ in range(2)]
    moved(writer, 2)
    assert [reader.position() for reader in readers] == [position(2)] * 2
    readers[0].close()
    readers[0].close()  # closing twice is harmless
    moved(writer, 3)
    writer.close()
    assert readers[1].position() == position(3)
    readers[1].close()
    again = TableState(tmp_path / "state")
    assert again.position() == position(3)
    again.close()


def test_a_writer_waits_for_a_look(tmp_path: Path) -> None:
    state = TableState(tmp_path / "state")
    moved(state, 1)
    state.close()
    reader = TableState(tmp_path / "state", readonly=True)
    begun = threading.Event()

    def write() -> None:
        begun.set()
        later = TableState(tmp_path / "state")
        moved(later, 2)
        later.close()

    thread = threading.Thread(target=write)
    thread.start()
    assert begun.wait(60)
    thread.join(0.3)
    assert thread.is_alive()
    assert reader.position() == position(1)
    reader.close()
    thread.join(60)
    assert not thread.is_alive()
    with_it = TableState(tmp_path / "state", readonly=True)
    assert with_it.position() == position(2)
    with_it.close()


def test_a_reader_that_was_forgotten_is_not_waited_for(tmp_path: Path) -> None:
    TableState(tmp_path / "state").close()
    TableState(tmp_path / "state", readonly=True)
    TableState(tmp_path / "state").close()


def test_a_second_writer_is_refused(tmp_path: Path) -> None:
    writer = TableState(tmp_path / "state")
    with pytest.raises(SinkError, match="already open in this process"):
        TableState(tmp_path / "state")
    writer.close()
