"""The time at which a copy begins, and what the collections are called then.

A copy names a document's collection as it was called at its beginning, and the stream after it shows every rename
since. Names are looked up a moment later. If a collection got its name in between, the stream would rename what was
copied under the new name already, and a program that carries out the rename would find nothing under the old one. In
that case another time is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import bson
from pymongo import MongoClient

from tailrace.core import raw_bson
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.oplog.entry import parse_entry
from tailrace.errors import SourceError
from tailrace.read.snapshot.places import Found, Places
from tailrace.read.source.topology import Cluster
from tailrace.read.source.witness import oplogs_of

_TRIES: Final = 20
_COMMANDS: Final = bson.encode({"op": "c"})
_UNAUTHORIZED: Final = 13


def beginning(
    client: MongoClient[Any] | Cluster, places: Places, look: Callable[[], list[Found]]
) -> tuple[ClusterTime, list[Found]]:
    """A time, and what ``look`` finds, each collection by the name that it has at that time. Raises SourceError where
    collections are renamed again and again."""
    before: list[Found] | None = None
    for _ in range(_TRIES):
        start = places.now()
        found = look()
        if _were_called_so(client, start, places.now(), found, before):
            return start, found
        before = found
    raise SourceError(
        f"collections were renamed during each of {_TRIES} attempts to find a time to begin the copy at",
        hint="Begin it later, or copy collections that are not being renamed",
    )


def _were_called_so(
    client: MongoClient[Any] | Cluster,
    start: ClusterTime,
    until: ClusterTime,
    found: Sequence[Found],
    before: Sequence[Found] | None,
) -> bool:
    """Whether none of ``found`` was renamed between two times. ``before``: what was found before ``start``, for users
    who may not read the oplog."""
    try:
        renamed = _renamed(client, start, until)
    except SourceError as error:
        if error.code != _UNAUTHORIZED:
            raise
        return before is not None and set(found) <= set(before)
    return renamed.isdisjoint(one.uuid for one in found)


def _renamed(client: MongoClient[Any] | Cluster, after: ClusterTime, until: ClusterTime) -> set[bytes]:
    """The UUIDs of the collections that were renamed after a time."""
    renamed = set()
    for source in oplogs_of(client).values():
        for batch in source.read(after, until, oplog_filter=_COMMANDS):
            for document in raw_bson.split(batch.raw):
                entry = parse_entry(document)
                if b"renameCollection" in entry.command_fields() and entry.collection_uuid is not None:
                    renamed.add(entry.collection_uuid)
    return renamed
