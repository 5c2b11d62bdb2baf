"""A copy in a process of its own, for tests that kill or stop it: SOURCE TARGET DOCUMENTS_PER_SECOND LEASE_S."""

from __future__ import annotations

import sys
from typing import Any

from tailrace.act.consumer.rules.errors import LeaseLost
from tailrace.act.sync.copying import Copy
from tailrace.act.sync.ownership import own
from tailrace.act.sync.settings import SyncSettings
from tailrace.act.sync.state import SyncState
from tailrace.core.oplog.selection import Selection
from tailrace.read.source.connection import open_client
from tailrace.read.source.topology import Cluster

#: The exit status of a process whose sync has another owner.
LOST = 3


def main(arguments: list[str]) -> int:
    """Go on with the copy."""
    source, target, per_second, lease = arguments
    lease_s = float(lease)
    client = open_client(source)
    deployment: Any = Cluster.discover(client, source, {}) or client
    settings = SyncSettings(selection=Selection.of(["shop.*"]), documents_per_second=float(per_second), lease_s=lease_s)
    state = SyncState(open_client(target), settings)
    try:
        with own(state, lanes=5, wait_s=60) as ownership:
            print("owner", flush=True)
            Copy(deployment, state, ownership, settings).run()
            print("done", flush=True)
    except LeaseLost:
        return LOST
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
