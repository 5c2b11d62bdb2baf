"""The server's change-stream cursors as a pure state machine: commands in, actions asked for, replies out.

No I/O and no clock here. ``CursorRegistry.run`` takes a command and the time, and gives a generator: it yields what it
needs done (``tailrace.core.cursor.action``: a piece of the oplog, perhaps after a wait; images; the state of the
source), is sent the answer, and returns the reply's BSON. So a server with many cursors on one tail and a test that
steps by hand drive the same code.
"""

from tailrace.core.cursor.action import (
    Acting,
    Action,
    Members,
    NeedMembers,
    NeedOldest,
    NeedStart,
    OldestEntry,
    OplogRead,
    Position,
    ReadOplog,
    StreamStart,
)
from tailrace.core.cursor.aggregate import is_change_stream
from tailrace.core.cursor.registry import CursorRegistry

__all__ = [
    "Acting",
    "Action",
    "CursorRegistry",
    "Members",
    "NeedMembers",
    "NeedOldest",
    "NeedStart",
    "OldestEntry",
    "OplogRead",
    "Position",
    "ReadOplog",
    "StreamStart",
    "is_change_stream",
]
