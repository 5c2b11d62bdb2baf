"""A follower without a copy, for tests: it begins before the first write, so that everything comes through the
oplog."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import bson
from bson.codec_options import CodecOptions
from bson.raw_bson import RawBSONDocument
from pymongo import MongoClient

from tailrace.act.sync.follower import Follower, open_oplogs
from tailrace.act.sync.ownership import own
from tailrace.act.sync.settings import SyncSettings
from tailrace.act.sync.state import SyncState
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.read.snapshot.reader import places_of
from tailrace.read.source.topology import Cluster
from tests.sync.equality import differences, held

_FIELDS: CodecOptions[dict[str, Any]] = CodecOptions()


def begun(source: str, target: str, settings: SyncSettings, *, hold: ClusterTime | None = None) -> ClusterTime:
    """A sync that begins now, with nothing to copy. ``hold``: as in ``SyncState.begin``."""
    with MongoClient[Any](source) as client, MongoClient[Any](target) as there:
        cluster = Cluster.discover(client, source, {})
        start = places_of(cluster or client, 30).now()
        oplogs = open_oplogs(client, cluster, None, threading.Event())
        state = SyncState(there, settings)
        state.begin(start, members=oplogs.members, witness=oplogs.witness(), phase="catchUp", hold=hold)
        oplogs.close()
        if cluster is not None:
            cluster.close()
    return start


@contextmanager
def following(source: str, target: str, settings: SyncSettings, *, wait_s: float = 120.0) -> Iterator[Follower]:
    """A follower that owns the sync."""
    stopped = threading.Event()
    with MongoClient[Any](source) as client, MongoClient[Any](target) as there:
        cluster = Cluster.discover(client, source, {})
        state = SyncState(there, settings)
        with own(state, wait_s=wait_s) as ownership:
            oplogs = open_oplogs(client, cluster, state.read(), stopped)
            try:
                with Follower(oplogs, state, ownership, settings, stopped=stopped) as follower:
                    yield follower
            finally:
                oplogs.close()
                if cluster is not None:
                    cluster.close()


def now(uri: str) -> ClusterTime:
    """A time after everything that was written to ``uri`` so far."""
    with MongoClient[Any](uri) as client:
        cluster = Cluster.discover(client, uri, {})
        found = places_of(cluster or client, 30).now()
        if cluster is not None:
            cluster.close()
        return found


def without_limits(_: str, one: bytes) -> bytes:
    """Options or an index without the limit of age, which the target holds at its maximum until the cut-over."""
    if not one:
        return one
    document: Mapping[str, Any] = RawBSONDocument(one)
    return bson.encode({name: value for name, value in document.items() if name != "expireAfterSeconds"})


def in_any_order(what: str, one: bytes) -> bytes:
    """The same for two versions of which one, 4.4, lists an index's fields in the order in which they were given."""
    document = RawBSONDocument(without_limits(what, one)) if one else {}
    return bson.encode({name: document[name] for name in sorted(document)} if what == "index" else document)


def unequal(
    source: str,
    target: str,
    settings: SyncSettings,
    known: Callable[[str, bytes], bytes] = without_limits,
    **options: Any,
) -> list[str]:
    """The differences of two deployments, without limits of age."""
    return differences(
        held(source, but=("tailrace_sync",), selected=lambda name: settings.has(name.replace(".system.buckets.", "."))),
        held(target, but=(settings.state_db,)),
        known=known,
        renames=settings.renames,
        **options,
    )
