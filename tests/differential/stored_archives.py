"""Archives in an object store that tests write, read and put back, and a program that is killed while it writes one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from tailrace.base.object_place import ObjectPlace
from tailrace.core import raw_bson
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.oplog.namespace import Scope
from tailrace.core.plan.options import StreamOptions
from tailrace.read.archive.recorder import ArchivePolicy, Recorder
from tailrace.read.archive.replay import ArchiveReplay
from tailrace.read.archive.source import ArchiveSource
from tailrace.read.archive.verification import verify
from tailrace.read.archive.writer import SegmentLimits
from tailrace.read.source.mongod import MongodSource
from tests.server_in_use import SERVER_VERSION, major
from tests.tables.object_server import held_in

#: Whether pre-images are in a collection of their own. Before 6.0 they are in the oplog.
HAS_IMAGES = major(SERVER_VERSION) >= 6
SMALL = SegmentLimits(bytes=6_000)


def steps(*names: str) -> list[str]:
    """The steps of an archive's writer that this server's archives have."""
    return [name for name in names if HAS_IMAGES or not name.startswith("archive.images")]


#: Ends itself right after a step of an archive's writer.
CHILD = """
import json, os, signal, sys
from pathlib import Path
from pymongo import MongoClient
from tailrace.base import durable
from tailrace.base.object_place import object_place
from tailrace.read.archive.recorder import ArchivePolicy, Recorder
from tailrace.read.archive.retention import Retention
from tailrace.read.archive.writer import SegmentLimits
uri, place, state, step, options = sys.argv[1:]
step, _, left = step.partition(":")
left = int(left or 1)
def met(name):
    global left
    left -= name == step
    if name == step and not left:
        os.kill(os.getpid(), signal.SIGKILL)
durable.observe_steps(met)
root = object_place(place, beside=Path(state), options=json.loads(options))
policy = ArchivePolicy(once=True, limits=SegmentLimits(bytes=6_000), retention=Retention(bytes=20_000))
with MongoClient(uri) as client:
    Recorder(client, None, root, policy).run()
"""


def change(collection: Any, turn: int) -> None:
    collection.insert_many([{"_id": turn * 100 + number, "text": os.urandom(200)} for number in range(60)])
    collection.update_many({}, {"$set": {"turn": turn}})
    collection.delete_many({"_id": {"$gte": turn * 100 + 30}})


def archive(collection: Any, root: Path | ObjectPlace, **more: Any) -> None:
    """Archive everything up to now; a new archive begins now."""
    policy = ArchivePolicy(**{"once": True, "from_oldest": False, "limits": SMALL} | more)
    Recorder(collection.database.client, None, root, policy).run()


def entries_of(source: Any, after: ClusterTime, until: ClusterTime) -> list[bytes]:
    return [entry for batch in source.read(after, until) for entry in raw_bson.split(batch.raw)]


def assert_equal(root: Any, collection: Any, at_least: int = 1) -> ArchiveSource:
    """Every entry of the oplog from the archive's start to its end, and nothing is wrong with any file."""
    held = ArchiveSource(root)
    live = MongodSource(collection.database.client)
    got = entries_of(held, held.start, held.newest())
    assert got == entries_of(live, held.start, held.newest())
    (report,) = verify(root)
    assert report.faults == []
    assert report.entries == len(got) >= at_least
    return held


def events_of(root: Any, collection: Any, start: Any) -> list[bytes]:
    given = {"startAtOperationTime": start, "fullDocumentBeforeChange": "whenAvailable"}
    options = StreamOptions.parse(Scope.parse(collection.full_name), given, [])
    return [bytes(event) for block in ArchiveReplay(root, options).blocks() for event in block.events()]


def drained(stream: Any) -> list[bytes]:
    found: list[bytes] = []
    while (event := stream.try_next()) is not None:
        found.append(bytes(event.raw))
    return found


def written_to(copy: Path, root: ObjectPlace) -> None:
    for name, content in held_in(root).items():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_bytes(content)
