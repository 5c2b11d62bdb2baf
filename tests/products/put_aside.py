"""Events that a lake cannot write, because its pipeline fails on them: these are put aside, and all others are
written."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Final

from tailrace.lake import quarantine_files
from tailrace.lake.store import quarantine
from tailrace.lake.store.commit_log import CommitLog
from tailrace.lake.store.lake_root import LakeRoot
from tests.products.own_writes import CORPUS, SIZES
from tests.products.product import Job
from tests.snapshot.copies import opened

#: Of all lakes.
_CHANCE: Final = 0.5

#: The collection and the operation of the events that are put aside.
Kind = tuple[str, str]


def kind_put_aside(job: Job) -> Kind | None:
    """The kind of a seed's lake; ``None`` if its pipeline fails on nothing. Never updates: their documents would not
    have been looked up yet."""
    rng = random.Random(f"tailrace put aside {job.options['played']}")
    if rng.random() > _CHANCE:
        return None
    return rng.choice((SIZES, CORPUS)), rng.choice(("insert", "insert", "delete"))


def pipeline_of(kind: Kind) -> str:
    """A pipeline that gives every event, but divides by zero at those of a kind."""
    collection, operation = kind
    of_kind = {"$and": [{"$eq": ["$ns.coll", collection]}, {"$eq": ["$operationType", operation]}]}
    quotient = {"$divide": [1, {"$cond": [of_kind, 0, 1]}]}
    return json.dumps([{"$match": {"$expr": {"$gte": [quotient, 0]}}}])


def is_of(kind: Kind, event: bytes) -> bool:
    """Whether the pipeline fails on an event."""
    found = opened(event)
    return (found["ns"].get("coll"), found["operationType"]) == kind


def put_aside(lake: LakeRoot) -> list[bytes]:
    """The events in a lake's quarantine, in order of its files. Raises SinkError where one is damaged or missing."""
    log = CommitLog(lake)
    if isinstance(lake, Path):
        quarantine_files(lake)  # in a store the next start refuses that
    paths = quarantine.files_of(log.layout, log.newest_batch(log.head()))
    return [event for path in paths for event in quarantine.read_checked(path).column("event").to_pylist()]
