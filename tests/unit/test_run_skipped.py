"""Operations that Spark's workers skipped, read from the log that they share with Spark."""

from __future__ import annotations

from pathlib import Path

from tailrace.cli.run_skipped import SkippedOperations

SAID = "oplog entries of the kind 'xi' are skipped: this version of Tailrace does not know it\n"


def test_an_operation_is_told_once_however_its_line_comes(tmp_path: Path) -> None:
    log = tmp_path / "spark.log"
    log.write_text("26/11/22 WARN something of Spark's\n")
    skipped = SkippedOperations(log)
    assert skipped.look() == []
    with log.open("a") as file:
        file.write(SAID[:40])
        file.flush()
        assert skipped.look() == []
        file.write(SAID[40:] + "noise\n" + SAID + SAID.replace("xi", "km"))
        file.flush()
        assert skipped.look() == ["xi", "km"]
        file.write(SAID)
        file.flush()
    assert skipped.look() == []


def test_a_log_that_goes_to_the_user_is_not_read() -> None:
    assert SkippedOperations(None).look() == []
