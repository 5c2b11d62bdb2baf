"""The servers' versions that an archive names. No test had an archive of a deployment that was upgraded: the version
was written once, and replay gave an upgraded server's entries as those of the version before."""

from __future__ import annotations

from pathlib import Path

import pytest

from tailrace.archive.layout import DESCRIPTION, Description, VersionNote, describe
from tailrace.archive.record import write_record
from tailrace.cli.main import main
from tailrace.durable import write_json
from tailrace.errors import UsageError
from tailrace.oplog.cluster_time import ClusterTime
from tests.golden import recording
from tests.golden.replay import as_written_by

LATER = ClusterTime.of(500, 3)


def kept(folder: Path, description: Description) -> Description:
    write_record(folder / DESCRIPTION, description.document())
    found = describe(folder)
    assert found is not None
    return found


def test_the_versions_are_kept_with_the_times_from_which_they_hold(tmp_path: Path) -> None:
    first = kept(tmp_path, Description("rs0", (VersionNote("6.0.27"),), {}))
    assert first.with_version("6.0.27", LATER) is first
    second = kept(tmp_path, first.with_version("7.0.28", LATER))
    assert second.versions == (("6.0.27", 0), ("7.0.28", LATER))
    assert second.server_version == "7.0.28"
    assert second.document()["serverVersion"] == "7.0.28", "what an earlier Tailrace reads"


def test_after_a_downgrade_the_newest_version_counts_still(tmp_path: Path) -> None:
    """Its entries are there, and the older one's events would lose some of them."""
    found = Description("rs0", (VersionNote("7.0.28"), VersionNote("6.0.27", LATER)), {})
    assert kept(tmp_path, found).server_version == "7.0.28"


def test_an_archive_of_an_earlier_tailrace_names_one_version(tmp_path: Path) -> None:
    document = Description("rs0", (VersionNote("5.0.4"),), {}).document()
    del document["serverVersions"]
    write_json(tmp_path / DESCRIPTION, document)
    found = describe(tmp_path)
    assert found is not None
    assert found.versions == (("5.0.4", 0),)


def test_a_version_that_is_none_is_not_passed_over(tmp_path: Path) -> None:
    document = Description("rs0", (VersionNote("5.0.4"),), {}).document()
    write_json(tmp_path / DESCRIPTION, {**document, "serverVersions": [{"version": "new", "since": "0"}]})
    with pytest.raises(UsageError, match="'new' is not a server version"):
        describe(tmp_path)


def told(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["replay", *words, "--explain", "--format", "pretty"]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("change stream on")
    return said.err


def test_replay_takes_the_newest_version_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept(tmp_path, Description("rs0", (VersionNote("6.0.27"), VersionNote("7.0.28", LATER)), {}))
    assert told(capsys, str(tmp_path)) == (
        "tailrace: the events are those of MongoDB 7.0.28: the archive says so, the newest of its servers' versions "
        "(the others: 6.0.27)\n"
    )
    assert told(capsys, str(tmp_path), "--server-version", "6.0") == ""


def test_the_explanation_of_a_dump_is_of_its_own_version(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It was that of 6.0 for every dump."""
    oplog = recording.load("crafted_entries_7.0.28").oplog
    (tmp_path / "oplog.bson").write_bytes(b"".join(as_written_by(7, entry) for entry in oplog))
    assert told(capsys, str(tmp_path)).startswith("tailrace: the events are those of MongoDB 7.0: the entry at ")
    (tmp_path / "prelude.json").write_text('{"ServerVersion": "7.0.28"}')
    assert told(capsys, str(tmp_path)).startswith("tailrace: the events are those of MongoDB 7.0.28: ")
    missing = told(capsys, str(tmp_path / "none"))
    assert missing == "tailrace: the events are taken for those of MongoDB 6.0: no dump was looked into\n"
