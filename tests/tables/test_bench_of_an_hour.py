"""The clock of ``bench/tables_hour.py``: an hour that takes minutes has the files of an hour.

Files had the machine's times, so those of a run that was faster than its clock stayed, and nothing looked at that.
"""

from __future__ import annotations

from pathlib import Path

from bench.tables_hour import Folder, SteppingClock

from tailrace.lake.tables import versions
from tailrace.lake.tables.schema import TableSchema
from tailrace.lake.tables.versions import Keeping
from tests.tables.features import Made


def test_files_are_as_old_as_the_clock_says(tmp_path: Path) -> None:
    clock = SteppingClock(3600)
    folder = Folder(tmp_path / "t", clock)
    with clock.installed():
        made = Made(tmp_path / "t", TableSchema())
        made.whole([{"_id": 1, "n": 0}])
        for number in range(1, 13):
            made.change([{"_id": 1, "n": number}])
            clock.move_on(60)
            assert folder.look()
        found = [file.name for file in made.table.files()]
        versions.expire(tmp_path / "t", Keeping(10 / 60), found, clock.time_ns() // 1_000_000)
    before = folder.bytes
    assert not folder.look()
    left = len(list((tmp_path / "t").glob("*.parquet")))
    assert left == 11, "the newest version's, and what was replaced in ten minutes"
    assert folder.bytes < before == folder.most_bytes
    assert 0 < folder.log < folder.bytes
