"""The servers' versions that an archive names. No test had an archive of an upgraded deployment: the version was
written once, and replay gave an upgraded server's entries as those of the former version. Later it gave all entries as
those of the newest version, and no test compared that with what the servers' streams had given at the time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import bson
import pytest
from pymongo import MongoClient

from tailrace.cli.main import main
from tailrace.core.event.resume_token import EVENT, ResumeToken
from tailrace.core.oplog.cluster_time import ZERO, ClusterTime
from tailrace.core.oplog.namespace import Scope
from tailrace.core.plan.options import StreamOptions
from tailrace.core.plan.profile import profile_for
from tailrace.errors import ChangeStreamFatal, UsageError
from tailrace.read.archive.layout import (
    DESCRIPTION,
    HEAD,
    Description,
    Membership,
    Reach,
    VersionNote,
    describe,
    oplog_folder,
)
from tailrace.read.archive.record import write_record
from tailrace.read.archive.recorder import Recorder
from tailrace.read.archive.replay import ArchiveReplay
from tailrace.read.archive.segment import ImagesWriter, SegmentWriter
from tailrace.read.archive.writer import OplogWriter, VersionMet
from tailrace.read.source.member_version import MemberVersion
from tailrace.read.source.mongod import MongodSource
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


def test_after_a_downgrade_the_newest_version_counts_still(tmp_path: Path) -> None:
    """Its entries are there, and with the events of the older version some of them would be lost."""
    found = Description("rs0", (VersionNote("7.0.28"), VersionNote("6.0.27", LATER)), {})
    assert kept(tmp_path, found).server_version == "7.0.28"


def test_a_version_that_is_none_is_not_passed_over(tmp_path: Path) -> None:
    document = Description("rs0", (VersionNote("5.0.4"),), {}).document()
    write_record(tmp_path / DESCRIPTION, {**document, "serverVersions": [{"version": "new", "since": "0"}]})
    with pytest.raises(UsageError, match="'new' is not a server version"):
        describe(tmp_path)


def told(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["replay", *words, "--explain", "--format", "pretty"]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("change stream on")
    return said.err


def test_replay_says_which_versions_it_takes_of_an_archive(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept(tmp_path, Description("rs0", (VersionNote("6.0.27"), VersionNote("7.0.28", LATER)), {}))
    assert told(capsys, str(tmp_path)) == (
        "tailrace: the events are those of MongoDB 6.0.27, after 1970-01-01 00:08:20 UTC (500,2) of 7.0.28: the "
        "archive says so\n"
    )
    assert told(capsys, str(tmp_path), "--start-at-operation-time", "500,3") == (
        "tailrace: the events are those of MongoDB 7.0.28: the archive says so\n"
    )
    assert told(capsys, str(tmp_path), "--server-version", "6.0") == ""


#: What three servers gave over one workload after the other, as over the years of one archive: the events' own bytes.
CHAIN = ("transactions_5.0.4", "transactions_6.0.27", "sessions_7.0.28")
PLAIN, EXPANDED = "cluster plain", "cluster expanded"


class Upgraded:
    """An archive of a deployment that was upgraded twice, and what its servers' own streams gave meanwhile."""

    def __init__(self, folder: Path, versions: tuple[VersionNote, ...] | None = None) -> None:
        recordings = [recording.load(name) for name in CHAIN]
        begun = [self._start(one) for one in recordings]
        self.parts = [
            [entry for entry in one.oplog if recording.entry_time(entry) >= start]
            for one, start in zip(recordings, begun, strict=True)
        ]
        self.starts = [recording.entry_time(part[0]) for part in self.parts]
        self.folder = folder
        entries = [entry for part in self.parts for entry in part]
        self._write(folder, [entries[:7], entries[7:30], entries[30:]])
        notes = [VersionNote(one.server, since) for one, since in zip(recordings, self.starts, strict=True)]
        notes[0] = notes[0]._replace(since=ClusterTime(0))
        self.versions = versions or tuple(notes)
        write_record(folder / DESCRIPTION, Description("rs0", self.versions, {}).document())
        self.given = {
            name: [
                [bytes(event) for event in stream.events]
                for one in recordings
                for stream in one.streams
                if stream.name == name
            ]
            for name in (PLAIN, EXPANDED)
        }

    @staticmethod
    def _start(one: recording.Recording) -> ClusterTime:
        (plain,) = (stream for stream in one.streams if stream.name == PLAIN)
        return ClusterTime.from_timestamp(plain.command["pipeline"][0]["$changeStream"]["startAtOperationTime"])

    @staticmethod
    def _write(root: Path, parts: list[list[bytes]]) -> None:
        folder = oplog_folder(root, "rs0")
        folder.mkdir(parents=True)
        start = after = ClusterTime(recording.entry_time(parts[0][0]) - 1)
        previous = ""
        for part in parts:
            until = recording.entry_time(part[-1])
            with SegmentWriter(folder, after) as writer, ImagesWriter(folder, after) as images:
                writer.add(b"".join(part))
                previous = writer.publish(until, images, previous).digest
            after = until
            write_record(folder / HEAD, Reach(start, until, previous).document())

    def replayed(self, profile: str | None = None, **stage: Any) -> list[bytes]:
        options = StreamOptions.parse(Scope.cluster(), {"allChangesForCluster": True, **stage})
        replay = ArchiveReplay(self.folder, options, None if profile is None else profile_for(profile))
        found = [bytes(event) for block in replay.blocks() for event in block.events()]
        self.searching = replay.searching
        return found


def test_each_entry_is_replayed_as_the_servers_own_stream_gave_it_then(tmp_path: Path) -> None:
    """All of them were given as the events of the newest version, which an old client never had, and their tokens were
    others than the ones that were kept."""
    archive = Upgraded(tmp_path)
    given = archive.given[PLAIN]
    assert [len(part) for part in given] == [19, 19, 36]
    assert archive.replayed() == [event for part in given for event in part]


def test_one_version_for_all_entries_is_that_of_an_upgraded_server(tmp_path: Path) -> None:
    archive = Upgraded(tmp_path)
    given, newest = archive.given[PLAIN], archive.replayed("7.0.28")
    # The older servers ignore an applyOps of two operations, which 7.0 unwinds.
    assert len(newest) == sum(map(len, given)) + 2 * 2
    assert newest[-36:] == given[2]
    assert all("wallTime" in bson.decode(event) for event in newest)
    assert {ResumeToken.parse(bson.decode(event)["_id"]).version for event in newest} == {2}


def test_a_replay_that_begins_after_an_upgrade_has_the_later_versions_alone(tmp_path: Path) -> None:
    archive = Upgraded(tmp_path)
    given = archive.given[PLAIN]
    for number in (1, 2):
        start = archive.starts[number].to_timestamp()
        expected = [event for part in given[number:] for event in part]
        assert archive.replayed(startAtOperationTime=start) == expected
        expanded = archive.replayed(startAtOperationTime=start, showExpandedEvents=True)
        assert expanded == [event for part in archive.given[EXPANDED][number - 1 :] for event in part]


def test_a_replay_resumes_at_a_token_of_any_version(tmp_path: Path) -> None:
    archive = Upgraded(tmp_path)
    events = [event for part in archive.given[PLAIN] for event in part]
    for number, event in enumerate(events):
        assert archive.replayed(resumeAfter=bson.decode(event)["_id"]) == events[number + 1 :], number
        assert not archive.searching


def test_an_option_that_the_version_of_the_time_refuses_is_refused_with_the_way_out(tmp_path: Path) -> None:
    archive = Upgraded(tmp_path)
    until = ClusterTime(archive.starts[1] - 1)
    with pytest.raises(UsageError, match="showExpandedEvents") as refused:
        archive.replayed(showExpandedEvents=True)
    assert refused.value.code == 40415
    assert refused.value.hint == (
        f"It came with 6.0. The entries up to {until} are of MongoDB 5.0.4: leave them out, or name one version for "
        "all entries (--server-version)"
    )


def test_a_token_that_is_not_there_is_searched_for_over_an_upgrade(tmp_path: Path) -> None:
    """As for a client that resumes again on the upgraded server: nothing is given, and nothing is skipped."""
    archive = Upgraded(tmp_path)
    key = bson.encode({"_id": 1})
    none = ResumeToken(ClusterTime(archive.starts[1] - 1), token_type=EVENT, uuid=bytes(16), event_identifier=key)
    with pytest.raises(ChangeStreamFatal) as refused:
        archive.replayed(resumeAfter=bson.decode(none.to_bson()))
    assert refused.value.code == 280


def test_the_explanation_of_a_dump_is_of_its_own_version(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """For every dump it was that of 6.0."""
    oplog = recording.load("crafted_entries_7.0.28").oplog
    (tmp_path / "oplog.bson").write_bytes(b"".join(as_written_by(7, entry) for entry in oplog))
    assert told(capsys, str(tmp_path)).startswith("tailrace: the events are those of MongoDB 7.0: the entry at ")
    (tmp_path / "prelude.json").write_text('{"ServerVersion": "7.0.28"}')
    assert told(capsys, str(tmp_path)).startswith("tailrace: the events are those of MongoDB 7.0.28: ")
    missing = told(capsys, str(tmp_path / "none"))
    assert missing == "tailrace: the events are assumed to be those of MongoDB 6.0: no dump was examined\n"


def test_a_shard_that_was_removed_does_not_hold_an_upgrade_back(tmp_path: Path) -> None:
    """Its writer ended with the former version, and so a running recorder noted no later one until it was restarted. No
    test had removed a shard from a cluster that was upgraded afterwards."""
    with MongoClient[Any]("localhost:1", connect=False) as client:
        recorder = Recorder(client, None, tmp_path)
        for name, version, seconds in (("kept", "6.0.27", 20), ("gone", "5.0.4", 5)):
            writer = OplogWriter(MongodSource(client), tmp_path / name, images=False)
            writer.met = VersionMet(MemberVersion.whole(version), ClusterTime.of(seconds, 0))
            recorder._writers[name] = writer
        both = {"kept": Membership(ZERO), "gone": Membership(ZERO)}
        removed = both | {"gone": Membership(ZERO, ClusterTime.of(10, 0))}
        found = [
            recorder._since(Description(None, (VersionNote("5.0.4"),), shards), "6.0.27", ClusterTime.of(30, 0), {})
            for shards in (both, removed)
        ]
    assert found == [None, ClusterTime.of(20, 0).tick()]
