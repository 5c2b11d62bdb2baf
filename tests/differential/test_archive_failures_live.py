"""An archive whose disk is full, whose primary steps down, and that is left for the oplog at any entry."""

from __future__ import annotations

import random
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from pymongo import MongoClient

from tailrace.core import raw_bson
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.oplog.history import history_lost, reaches_back
from tailrace.embedded import ReplicaSet
from tailrace.read.archive.hybrid import HybridSource
from tailrace.read.archive.source import ArchiveSource
from tailrace.read.archive.verification import verify
from tailrace.read.source.mongod import MongodSource
from tests import commands
from tests.differential.test_archive_live import archive_now, archiving, entries_of, wait_for

pytestmark = pytest.mark.mongod


@pytest.fixture(scope="module")
def replica_set() -> Iterator[ReplicaSet]:
    """One of this file's own: what archives an oplog from its beginning would archive all that others wrote before."""
    with ReplicaSet(1, enable_test_commands=True, parameters={"disableLogicalSessionCacheRefresh": True}) as running:
        yield running


def run_archive(uri: str, folder: Path, *, room: int | None) -> subprocess.CompletedProcess[str]:
    """``tailrace archive --once`` with files of at most ``room`` bytes, which is how a full disk looks to a writer."""

    code = "import resource, sys\nfrom tailrace.cli.main import main\n"
    if room is not None:
        code += f"resource.setrlimit(resource.RLIMIT_FSIZE, ({room}, {room}))\n"
    code += "sys.exit(main(sys.argv[1:]))"
    return commands.run_text("archive", uri, str(folder), "--once", "--segment-bytes", "300k", code=code)


@pytest.mark.parametrize("images", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_full_disk_is_told_in_a_sentence_and_the_archive_goes_on_when_there_is_room(
    start_replica_set: Callable[..., ReplicaSet], tmp_path: Path, images: bool
) -> None:
    """No test had written an archive on a full disk: an error that pyarrow raises while it closes a file could have
    hidden the cause."""
    replica_set = start_replica_set(1)
    with MongoClient[dict[str, Any]](replica_set.uri) as client:
        rng = random.Random(1)
        client.shop.create_collection("c", changeStreamPreAndPostImages={"enabled": images})
        for _ in range(20):
            client.shop.c.insert_many([{"pad": rng.randbytes(1000)} for _ in range(40)])
        if images:
            client.shop.c.update_many({}, {"$set": {"seen": 1}})
    folder = tmp_path / "archive"
    # The segments of the inserts do not fit or, with the larger limit, the images of the updates.
    full = run_archive(replica_set.uri, folder, room=400_000 if images else 150_000)
    assert full.returncode == 1
    assert "no room left to write" in full.stderr, full.stderr
    assert "Traceback" not in full.stderr
    assert not list(folder.rglob("*.unfinished"))
    if (folder / "rs0" / "head.json").exists():
        assert verify(folder)[0].faults == []
    good = run_archive(replica_set.uri, folder, room=None)
    assert good.returncode == 0, good.stderr
    (report,) = verify(folder)
    assert report.faults == []
    assert report.images == (800 if images else 0)
    archived = ArchiveSource(folder)
    with closing(MongodSource(replica_set.uri)) as live:
        oldest = live.oldest()[0]
        got = entries_of(archived, ClusterTime(oldest - 1), archived.newest())
        assert got == entries_of(live, ClusterTime(oldest - 1), archived.newest())


@pytest.mark.slow  # elections under its source: test_source_live.py
def test_a_step_down_while_it_archives_costs_no_entry(
    start_replica_set: Callable[..., ReplicaSet], tmp_path: Path
) -> None:
    replica_set = start_replica_set(3)
    folder = tmp_path / "archive"
    with (
        MongoClient[dict[str, Any]](replica_set.uri, w="majority") as client,
        archiving(replica_set.uri, folder) as recorder,
    ):
        for round_ in range(3):
            client.shop.c.insert_many([{"round": round_, "n": number} for number in range(200)])
            replica_set.step_down()
            client.shop.c.insert_one({"round": round_, "after": True})
            with closing(MongodSource(replica_set.uri)) as live:
                until = live.newest()
            wait_for(lambda until=until: all(one.read >= until for one in recorder.statistics().values()))  # type: ignore[misc]
    assert verify(folder)[0].faults == []
    archived = ArchiveSource(folder)
    with closing(MongodSource(replica_set.uri)) as live:
        got = entries_of(archived, archived.start, archived.newest())
        assert archived.newest() >= until
        assert got == entries_of(live, archived.start, archived.newest())
    assert len(got) > 600


class ForgetfulSource(MongodSource):
    """A live oplog that claims to begin at ``begins`` and have nothing older."""

    begins = ClusterTime(0)

    def oldest(self) -> tuple[ClusterTime, bool]:
        return self.begins, False

    def read(self, after: ClusterTime, until: ClusterTime, **options: Any) -> Iterator[Any]:
        if not reaches_back(after, self.begins, complete=False):
            raise history_lost("forgotten")
        return super().read(after, until, **options)


@contextmanager
def under_load(uri: str) -> Iterator[None]:
    stop = threading.Event()

    def write() -> None:
        with MongoClient[dict[str, Any]](uri) as client:
            number = 0
            while not stop.wait(0.002):
                number += 1
                client.seams.c.insert_many(
                    [{"number": number, "pad": "x" * (number % 700)} for _ in range(number % 9 + 1)]
                )
                with client.start_session() as session, session.start_transaction():
                    client.seams.c.update_one({"number": number}, {"$set": {"seen": True}}, session=session)
                    client.seams.c.delete_one({"number": number - 5}, session=session)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


@pytest.mark.parametrize("seams", [20, pytest.param(200, marks=pytest.mark.slow)])
def test_the_hand_over_is_without_a_seam_wherever_it_falls(replica_set: ReplicaSet, tmp_path: Path, seams: int) -> None:
    """Lets the oplog begin at random entries of the archive, while both grow. A stream was refused at the seam if the
    archive had grown since its end was read; no test had left an archive for the oplog under load."""
    folder = tmp_path / "archive"
    rng = random.Random(seams)
    archive_now(replica_set.uri, folder)
    with closing(MongodSource(replica_set.uri)) as live, closing(ForgetfulSource(replica_set.uri)) as forgetful:
        first = live.newest()
        with under_load(replica_set.uri), archiving(replica_set.uri, folder):
            wait_for(lambda: ArchiveSource(folder).newest() > first)
            hybrid = HybridSource(forgetful, ArchiveSource(folder))
            for number in range(seams):
                wait_for(lambda first=first: hybrid.archive().newest() > first)  # type: ignore[misc]
                end = hybrid.archive().newest()
                known = [raw_time(entry) for entry in entries_of(live, first, end)]
                forgetful.begins = rng.choice(known)
                start = rng.choice([first, *(time for time in known if time < forgetful.begins)])
                until = live.newest()
                read = hybrid.read if number % 2 else partial_tail(hybrid)
                got = [entry for batch in read(start, until) for entry in raw_bson.split(batch.raw)]
                assert got == entries_of(live, start, until)
                if len(known) > 2000:
                    first = known[-1]


def raw_time(entry: bytes) -> ClusterTime:
    element = raw_bson.find(entry, b"ts")
    assert element is not None
    return ClusterTime.from_bytes_le(raw_bson.value(entry, element))


def partial_tail(hybrid: HybridSource) -> Callable[[ClusterTime, ClusterTime], Iterator[Any]]:
    """``tail`` up to a time, as a stream reads that goes on."""

    def read(after: ClusterTime, until: ClusterTime) -> Iterator[Any]:
        tail = hybrid.tail(after, await_ms=50)
        try:
            for batch in tail:
                if batch.high_water > until:
                    kept = [entry for entry in raw_bson.split(batch.raw) if raw_time(entry) <= until]
                    yield batch._replace(raw=b"".join(kept))
                    return
                yield batch
                if batch.high_water >= until:
                    return
        finally:
            tail.close()

    return read
