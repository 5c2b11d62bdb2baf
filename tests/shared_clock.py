"""The clock of a deployment that tests share: no test may set it forward.

A server takes over a cluster time that a client sends, up to a year ahead, unless there are users who sign it, and its
clock never goes back. A test of damaged messages once set it forward by hours, and other tests, which compare it with
the machine's clock, failed or passed depending on which file ran first.
"""

from __future__ import annotations

import time
from typing import Final

from tests.differential.wire import Wire

#: Seconds. The clock of a server is that of its machine, as long as nobody sets it.
_AHEAD_MAX: Final = 120.0

_ahead: dict[str, float] = {}


def seconds_ahead(uri: str) -> float:
    """How far the deployment's cluster time is ahead of this machine's clock."""
    with Wire.to(uri) as wire:
        reply = wire.run("admin", {"ping": 1})
    return float(reply["$clusterTime"]["clusterTime"].time - time.time())


def check(uri: str) -> None:
    """Fail if the clock was set forward since the last check."""
    before, now = _ahead.get(uri, 0.0), seconds_ahead(uri)
    _ahead[uri] = max(0.0, now)
    moved = now - max(0.0, before)
    assert moved < _AHEAD_MAX, (
        f"the test has set the clock of the shared deployment forward by {moved:.0f} s: take one of its own"
    )
