"""Which machine may change a lake in an object store.

A store has no lock that is released when a process dies. The locks of such a lake are in its state directory, so they
hold on one machine. Between machines these hold: a commit's number is created once, and ``lake.json`` names the
*session* of the machine whose stream has opened the lake last. A state directory remembers its sessions. Whoever wants
to change the lake, and finds a session that its directory does not know, is refused.

A program elsewhere may have looked at ``lake.json`` just before. So a stream that opens the lake also makes a commit
that adds nothing (``start``): what the other one is about to commit has that number, and fails; and it looks again
before it takes the next one. It looks at ``lake.json`` after the head: what it had seen before could be older than the
commit that it follows. From then on no commit can name a file that none has named, and those are removed.
"""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Final

from tailrace.base import durable
from tailrace.base.object_place import ObjectPlace
from tailrace.errors import SinkError
from tailrace.lake.store.lake_root import read_sealed, require_state
from tailrace.lake.store.layout import LakeLayout

#: In ``lake.json`` of a lake in a store.
SESSION: Final = "session"
_SESSIONS: Final = "sessions.json"
_SESSIONS_MAX: Final = 1000


def begin_session(layout: LakeLayout) -> str:
    """A new session, which the state directory knows before the store does. The caller holds the lock."""
    session = secrets.token_hex(16)
    durable.write_sealed(layout.local / _SESSIONS, {"sessions": [*_known(layout.local), session][-_SESSIONS_MAX:]})
    return session


def require_session(layout: LakeLayout) -> dict[str, object] | None:
    """Raise SinkError where a stream with another state directory has opened the lake last, UsageError where there is
    no such directory. In a directory of its own a lake's locks decide. (Where there is no lake, the caller says so.)

    Returns the ``lake.json`` that was read in a store for it."""
    if not isinstance(layout.root, ObjectPlace):
        return None
    require_state(layout.root)
    found = read_sealed(layout.identity)
    if found is not None:
        refuse_other_session(layout, found.get(SESSION))
    return found


def refuse_other_session(layout: LakeLayout, session: object) -> None:
    """Raise SinkError for the ``session`` of a stream that the state directory does not know."""
    if session not in _known(layout.local):
        raise SinkError(
            f"the lake {layout.root} is written by a stream with another state directory, or with a newer copy of this "
            f"one ({layout.local})",
            hint="Work on it where that stream runs, with its state directory. If that is lost, start the stream with "
            "a fresh state directory and a fresh checkpoint: it goes on after the lake's last event",
        )


def _known(local: Path) -> list[str]:
    value = durable.read_sealed(local / _SESSIONS)
    found = [] if value is None else value.get("sessions")
    return [str(one) for one in found] if isinstance(found, list) else []
