"""A sync made of the product's parts, which copies, and follows in a thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pymongo import MongoClient

from tailrace.act.sync.copying import Copy
from tailrace.act.sync.follower import Follower, open_oplogs
from tailrace.act.sync.ownership import own
from tailrace.act.sync.settings import SyncSettings
from tailrace.act.sync.state import SyncState
from tailrace.base.threads import CheckedThread
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.read.snapshot.reader import places_of
from tailrace.read.source.connection import open_client
from tailrace.read.source.topology import Cluster
from tests.patience import PATIENCE_S


class Following:
    """A sync that goes on until the block ends."""

    def __init__(self, source: Any, state: SyncState, follower: Follower) -> None:
        self.source = source
        self.state = state
        self.follower = follower

    def now(self) -> ClusterTime:
        return places_of(self.source, 10).now()

    def settle(self) -> None:
        """Wait until the target is where the source is now, and the state gives the target's time of that."""
        now, deadline = self.now(), time.monotonic() + PATIENCE_S
        while True:
            found = self.state.read()
            if found is not None and found.commits and found.commits[-1].time >= now:
                return
            assert time.monotonic() < deadline, found
            time.sleep(0.1)


@contextmanager
def following(source_uri: str, target_uri: str, settings: SyncSettings) -> Iterator[Following]:
    """Copy, then follow."""
    client = open_client(source_uri)
    cluster = Cluster.discover(client, source_uri, {})
    deployment: MongoClient[Any] | Cluster = cluster or client
    state = SyncState(open_client(target_uri), settings)
    state.begin(places_of(deployment, 10).now(), members={}, witness=None)
    stopped = threading.Event()
    with own(state, lanes=5) as ownership:
        assert Copy(deployment, state, ownership, settings).run()
        oplogs = open_oplogs(client, cluster, state.read(), stopped)
        follower = Follower(oplogs, state, ownership, settings, stopped=stopped)
        thread = CheckedThread(follower.run, "follower")
        thread.start()
        try:
            yield Following(deployment, state, follower)
        finally:
            stopped.set()
            thread.join()
            oplogs.close()
            thread.check()
