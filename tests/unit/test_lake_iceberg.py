"""A lake as an Iceberg table: equal to its commits, or refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.lake_events import make, put, stage, token
from tests.unit.lake_iceberg import mirror_of, newest_rows, table_of, versions_shown

pytestmark = pytest.mark.filterwarnings("ignore:Iceberg scan planning")  # Polars would like a package of its own


class Grown:
    """A lake of made-up events that a catalogue follows."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "lake"
        self.claim = make(self.root, folder / "checkpoint").claim
        self.mirror = mirror_of(self.root)
        self.number = 0
        self.count = 0

    def add(self, events: int = 3, *, shown: bool = True) -> None:
        numbers = range(self.count, self.count + events)
        put(self.root, self.claim, self.number, stage(self.root, numbers, stem=str(self.number)))
        self.number += 1
        self.count += events
        if shown:
            self.mirror.follow()


@pytest.fixture
def lake(tmp_path: Path) -> Iterator[Grown]:
    grown = Grown(tmp_path)
    yield grown
    grown.mirror.close()


def test_every_commit_is_a_snapshot_that_every_reader_reads(lake: Grown) -> None:
    for _ in range(3):
        lake.add()
    assert versions_shown(lake.root) == [1, 2, 3]
    assert [row["number"] for row in newest_rows(lake.root)] == list(range(9))
    assert table_of(lake.root).current_snapshot().summary["tailrace.token"] == token(8)
    assert lake.mirror.fault() is None
