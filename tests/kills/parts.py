"""What is killed, and how we know that nothing was lost and nothing is there twice."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import bson
import duckdb
import pyarrow.parquet as pq
from bson.raw_bson import RawBSONDocument
from pymongo import MongoClient

from tailrace.core.event.resume_token import ResumeToken
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.lake import files
from tailrace.lake import verify as verify_lake
from tailrace.lake.spark.query.offset import Offset
from tailrace.lake.store.commit_log import CommitLog
from tailrace.lake.tables.delta_commit import stated
from tailrace.lake.tables.names import folder_of
from tailrace.read.archive.layout import head, oplog_folder
from tailrace.read.archive.source import ArchiveSource
from tailrace.read.archive.verification import verify
from tailrace.read.source.mongod import MongodSource
from tests.differential.test_archive_live import entries_of
from tests.following_images import Last, images_that_do_not_follow, without_images
from tests.kills.children import EVENTS, pairs
from tests.kills.work import COLLECTIONS, DATABASE, LAST, keeps_images
from tests.snapshot.copies import Target, id_of, truth
from tests.spark.streams import server_events
from tests.tables.equality import in_collection, in_table

ROOT = Path(__file__).parents[2]
#: How long one step may take on a loaded machine.
PATIENCE_S = 900
REPLICA_SET = "rs0"
_SPARK_COLUMNS = "token,operation_type,cluster_time,collection,document_key,full_document,event"


@dataclass
class Verdict:
    """``items`` were expected; ``wrong`` has a sentence for everything else that is not as it should be."""

    items: int = 0
    lost: int = 0
    twice: int = 0
    wrong: list[str] = field(default_factory=list)

    def compare(self, what: str, expected: Iterable[bytes], found: Iterable[bytes]) -> None:
        """Both in order. Counts what is there twice, what is missing and what is too much; otherwise the order must be
        the same."""
        wanted, had = list(expected), list(found)
        left, right = Counter(wanted), Counter(had)
        self.items += len(wanted)
        self.lost += (left - right).total()
        self.twice += sum(count - 1 for count in right.values() if count > 1)
        strange = sum(1 for one in right if one not in left)
        if strange:
            self.wrong.append(f"{what}: {strange} that nobody wrote")
        if wanted != had and left == right:
            self.wrong.append(f"{what}: out of order")

    @property
    def holds(self) -> bool:
        return not (self.lost or self.twice or self.wrong)


class Part:
    """One consumer of the deployment, in a process that is killed again and again."""

    name = ""
    #: How many of 50 kills are its own, and the longest time after its first progress until it is killed.
    weight = 10
    pause_s = 2.0
    on_spark = False

    def __init__(self, uri: str, folder: Path, start: ClusterTime) -> None:
        self.uri, self.start = uri, start
        self.folder = folder / self.name
        self.folder.mkdir(parents=True)
        self.kills: Counter[str] = Counter()
        self._process: subprocess.Popen[bytes] | None = None

    def command(self) -> list[str]:
        raise NotImplementedError

    def progress(self) -> int:
        """A number that grows while the process works."""
        raise NotImplementedError

    def reached(self, until: ClusterTime) -> bool:
        """Whether everything up to a time is there."""
        raise NotImplementedError

    def verdict(self, until: ClusterTime) -> Verdict:
        raise NotImplementedError

    # -- its lives --------------------------------------------------------------------------------------------------

    def live(self, seed: int, kills: int) -> None:
        """Be killed so often, sometimes before the process has done anything."""
        chosen = random.Random(f"{self.name} {seed}")
        for number in range(1, kills + 1):
            self._begin()
            if chosen.random() < 0.8:
                before = self.progress()
                self._wait(lambda before=before: self.progress() > before)  # type: ignore[misc]
            time.sleep(chosen.uniform(0, self.pause_s))
            if self.on_spark and chosen.random() < 0.4:
                self._kill_a_worker(chosen)
            self._kill()
            self._say(f"killed {number} of {kills} times")

    def get_on(self) -> None:
        """Run until there is some progress."""
        self._begin()
        before = self.progress()
        self._wait(lambda: self.progress() > before)

    def finish(self, until: ClusterTime) -> None:
        """A last life, up to ``until``."""
        self._begin()
        self._wait(lambda: self.reached(until))
        self.stop()
        self._say("has come to the end")

    def _say(self, what: str) -> None:
        print(f"{time.strftime('%H:%M:%S')} {self.name}: {what}", file=sys.stderr, flush=True)

    def stop(self) -> None:
        """End the process, if it runs, without counting it."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def _begin(self) -> None:
        if self._process is not None and self._process.poll() is None:
            return
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(self.command(), cwd=ROOT, stdout=log, stderr=log, start_new_session=True)

    def _kill(self) -> None:
        assert self._process is not None
        if self._process.poll() is None:  # a driver whose worker has died may have ended
            self.kills["driver" if self.on_spark else "process"] += 1
        self.stop()

    def _kill_a_worker(self, chosen: random.Random) -> None:
        """Kill a Python process of Spark's, and leave the driver some time to end or to go on."""
        assert self._process is not None
        workers = [pid for pid in descendants(self._process.pid) if b"pyspark" in command_line(pid)]
        if not workers:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(chosen.choice(workers), signal.SIGKILL)
            self.kills["worker"] += 1
        time.sleep(chosen.uniform(0, 2 * self.pause_s))

    def _wait(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert self._process is not None
            assert self._process.poll() is None, f"{self.name} has ended: {self._log()}"
            assert time.monotonic() < deadline, f"{self.name} does not get on: {self._log()}"
            time.sleep(0.1)

    def _log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")[-3000:]


def descendants(pid: int) -> list[int]:
    """The processes below one, also those that lead groups of their own."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    found = [pid]
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return found[1:]


def command_line(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def child(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "tests.kills.children", *arguments]


def token_of(event: bytes) -> bytes:
    return str(RawBSONDocument(event)["_id"]["_data"]).encode()


class Archive(Part):
    name = "archive"

    def command(self) -> list[str]:
        limits = ["--segment-bytes", "100k", "--segment-seconds", "0.3"]
        return [sys.executable, "-m", "tailrace", "archive", self.uri, str(self.folder / "kept"), *limits]

    def progress(self) -> int:
        reach = head(oplog_folder(self.folder / "kept", REPLICA_SET))
        return 0 if reach is None else int(reach.until)

    def reached(self, until: ClusterTime) -> bool:
        return self.progress() >= until

    def verdict(self, until: ClusterTime) -> Verdict:
        result = Verdict()
        (report,) = verify(self.folder / "kept")
        result.wrong += report.faults
        archived = ArchiveSource(self.folder / "kept")
        with closing(MongodSource(self.uri)) as live:
            first = ClusterTime(live.oldest()[0] - 1)
            result.compare("entries", entries_of(live, first, until), entries_of(archived, first, until))
        return result


class Tables(Part):
    name = "tables"

    def command(self) -> list[str]:
        return child("tables", self.uri, DATABASE, str(self.folder / "root"))

    def progress(self) -> int:
        return sum(1 for _ in (self.folder / "root").glob("*/_delta_log/*.json"))

    def reached(self, until: ClusterTime) -> bool:
        """Each collection was changed last by the workload's end, so each table has a commit after that."""
        newest = [next(iter(stated(self._table(name))), None) for name in COLLECTIONS]
        return all(one is not None and one.time >= until for one in newest)

    def _table(self, name: str) -> Path:
        return self.folder / "root" / folder_of(f"{DATABASE}.{name}")

    def verdict(self, until: ClusterTime) -> Verdict:
        result = Verdict()
        with MongoClient[Any](self.uri) as client:
            for name in COLLECTIONS:
                here = in_collection(client[DATABASE][name])
                table = in_table(self.folder / "root", f"{DATABASE}.{name}") or {}
                result.compare(name, (here[key] for key in sorted(here)), (table[key] for key in sorted(table)))
                batches = [one.batch for one in stated(self._table(name))]
                result.twice += len(batches) - len(set(batches))
        return result


class Images(Part):
    name = "images"

    def command(self) -> list[str]:
        return child(self.name, self.uri, DATABASE, str(self.folder))

    def progress(self) -> int:
        path = self.folder / EVENTS
        return path.stat().st_size if path.exists() else 0

    def reached(self, until: ClusterTime) -> bool:
        """The last events of all are those of the last transaction."""
        last = [bson.decode(event) for event, _ in pairs(self.folder / EVENTS)[1:][-len(COLLECTIONS) :]]
        return {(one["ns"]["coll"], one["documentKey"]["_id"]) for one in last} == {(one, LAST) for one in COLLECTIONS}

    def verdict(self, until: ClusterTime) -> Verdict:
        result = Verdict()
        (_, token), *found = pairs(self.folder / EVENTS)
        events = [event for event, _ in found]
        begun = ResumeToken.parse(token).cluster_time  # its mark comes before what happened at that time
        with MongoClient[Any](self.uri) as client:
            kept = keeps_images(client)
            if not kept:
                result.wrong += wrong_images(client, events)
        stage = {"fullDocument": "required", "fullDocumentBeforeChange": "required"} if kept else None
        expected = server_events(self.uri, (DATABASE, None), ClusterTime(begun - 1), until, stage=stage)
        result.compare("events", expected, events if kept else map(without_images, events))
        return result


def wrong_images(client: MongoClient[Any], events: Iterable[bytes]) -> list[str]:
    """What is wrong with the images, on servers that keep none to compare with. The last ones must be what the
    collection holds."""
    last: Last = {}
    wrong = images_that_do_not_follow(events, last)
    for name in COLLECTIONS:
        held = truth(client[DATABASE][name])
        mine = {key: image for (coll, key), image in last.items() if coll == name}
        if any(held.get(key) != image for key, image in mine.items()):
            wrong.append(f"{name}: the last images are not what the collection holds")
    return wrong


class Snapshot(Images):
    name = "snapshot"

    def verdict(self, until: ClusterTime) -> Verdict:
        return with_what_was_there(self.uri, [event for event, _ in pairs(self.folder / EVENTS)[1:]], until)


def with_what_was_there(uri: str, events: list[bytes], until: ClusterTime) -> Verdict:
    """A copy gives each document once at most, and then comes every change since it began: the same tokens as the
    server's. Carried out one after the other, the events give what the collections hold."""
    result = Verdict()
    target = Target()
    copied: Counter[tuple[str, bytes]] = Counter()
    changes: list[bytes] = []
    for event in events:
        target.apply(event)
        found = RawBSONDocument(event)
        if found["operationType"] == "snapshot":
            copied[str(found["ns"]["coll"]), id_of(bytes(found["documentKey"].raw))] += 1
        else:
            changes.append(event)
    result.twice += sum(count - 1 for count in copied.values())
    result.items += len(copied)
    # When the copy began is in tokens alone: from the first change that came, every one has to be there. One that was
    # lost before shows in what the events give. There is none where the copy began after the last write.
    if changes:
        first = ResumeToken.parse(RawBSONDocument(changes[0])["_id"]).cluster_time
        expected = server_events(uri, (DATABASE, None), ClusterTime(first - 1), until)
        result.compare("changes", map(token_of, expected), map(token_of, changes))
    with MongoClient[Any](uri) as client:
        for name in COLLECTIONS:
            if target.collections[f"{DATABASE}.{name}"] != truth(client[DATABASE][name]):
                result.wrong.append(f"{name}: the events do not give the collection")
    return result


def has_committed(checkpoint: Path, until: ClusterTime) -> bool:
    """Whether Spark has committed a micro-batch of changes that reaches up to a time."""
    numbers = sorted(int(path.name) for path in (checkpoint / "commits").glob("[0-9]*") if path.name.isdecimal())
    if not numbers:
        return False
    written = (checkpoint / "offsets" / str(numbers[-1])).read_text()
    offset = Offset.from_json(json.loads(written.splitlines()[-1]))
    return offset.snapshot is None and offset.cluster_time >= until


class Lake(Part):
    name = "lake"
    weight = 6
    pause_s = 3.0
    on_spark = True

    def command(self) -> list[str]:
        options = {"uri": self.uri, "database": DATABASE, "startingFrom": "snapshot", "columns": "event,token"}
        options["fullDocument"] = "updateLookup"
        return child("lake", json.dumps({**options, "maxEventsPerTrigger": "4000"}), str(self.folder))

    def progress(self) -> int:
        lake = self.folder / "lake"
        return max(0, CommitLog(lake).head().number) if (lake / "_tailrace" / "lake.json").exists() else 0

    def reached(self, until: ClusterTime) -> bool:
        # The lake does not tell: if the copy began after the last write, no commit follows it.
        return has_committed(self.folder / "lake.checkpoint", until)

    def verdict(self, until: ClusterTime) -> Verdict:
        lake = self.folder / "lake"
        events = [event for file in files(lake) for event in pq.read_table(file).column("event").to_pylist()]
        result = with_what_was_there(self.uri, events, until)
        result.wrong += map(str, verify_lake(lake, full=True).problems)
        return result


class Sink(Part):
    name = "sink"
    weight = 4
    pause_s = 3.0
    on_spark = True

    def command(self) -> list[str]:
        start = self.start.tick()
        options = {
            "uri": self.uri,
            "database": DATABASE,
            "startAtOperationTime": f"{start.seconds},{start.increment}",
            "columns": _SPARK_COLUMNS,
            "documents": "json",
            "maxEventsPerTrigger": "2000",
        }
        return child("sink", json.dumps(options), str(self.folder))

    def progress(self) -> int:
        return sum(1 for path in (self.folder / "checkpoint" / "commits").glob("[0-9]*"))

    def reached(self, until: ClusterTime) -> bool:
        return has_committed(self.folder / "checkpoint", until)

    def verdict(self, until: ClusterTime) -> Verdict:
        result = Verdict()
        with duckdb.connect(str(self.folder / "file.duckdb")) as connection:
            found = connection.execute("SELECT token FROM changes ORDER BY rowid").fetchall()
        expected = server_events(self.uri, (DATABASE, None), self.start, until)
        result.compare("tokens", map(token_of, expected), (token.encode() for (token,) in found))
        return result


PARTS: tuple[type[Part], ...] = (Archive, Tables, Images, Snapshot, Lake, Sink)
