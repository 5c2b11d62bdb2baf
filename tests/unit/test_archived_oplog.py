"""An oplog that no longer reaches back, and an archive beside it: what is waited for, and what is refused at once."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pymongo import MongoClient

from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.oplog.history import history_lost
from tailrace.errors import ChangeStreamHistoryLost
from tailrace.read.archive.hybrid import HybridSource
from tailrace.read.archive.retention import Retention, retain
from tailrace.read.source.mongod import MongodSource
from tailrace.read.window.archived import ArchivedOplog
from tests.unit.test_archive import archive, entry, time_of


class Waits(threading.Event):
    """Says that somebody waits, and ends it."""

    def wait(self, timeout: float | None = None) -> bool:
        self.set()
        return True


@pytest.fixture
def stopped() -> Waits:
    return Waits()


@pytest.fixture
def oplog(tmp_path: Path, stopped: Waits, monkeypatch: pytest.MonkeyPatch) -> Iterator[ArchivedOplog]:
    """A server's oplog that begins at the entry 50, and an archive of the entries 1 to 40."""

    def read(_: Any, after: ClusterTime, until: ClusterTime, **options: Any) -> Iterator[Any]:
        raise history_lost("the oplog begins later")
        yield

    archive(tmp_path, [[entry(number) for number in range(first, first + 10)] for first in (1, 11, 21, 31)])
    monkeypatch.setattr(MongodSource, "name", "rs0")
    monkeypatch.setattr(MongodSource, "oldest", lambda _: (time_of(50), False))
    monkeypatch.setattr(MongodSource, "read", read)
    monkeypatch.setattr(HybridSource, "_check_identity", lambda _: None)
    with MongoClient[Any](connect=False) as client:
        yield ArchivedOplog(client, tmp_path, None, stopped)


def test_an_archive_that_ends_too_early_is_waited_for(oplog: ArchivedOplog, stopped: Waits) -> None:
    given = list(oplog.read(time_of(5), time_of(60)))
    assert given[-1].high_water == time_of(40)
    assert stopped.is_set()


def test_one_whose_oldest_files_are_gone_is_not(oplog: ArchivedOplog, stopped: Waits, tmp_path: Path) -> None:
    """The archive was waited for as long as it grew, and it grows while a recorder follows: a sync hung without a
    message."""
    assert retain(tmp_path / "rs0", Retention(bytes=1)) == 3
    with pytest.raises(ChangeStreamHistoryLost) as lost:
        list(oplog.read(time_of(5), time_of(60)))
    assert str(lost.value.hint).startswith(f"The oplog of rs0 begins at {time_of(50)} and the archive {tmp_path} at")
    assert not stopped.is_set()
