"""The note in ``lake.json`` of what the lake is to become: a change's commit decides whether that is in force.

``lake.json`` and the log cannot be written in one step. So a change first writes the note, which names the number that
its commit will have; then it makes the commit; and then the noted contents take the place of the old ones. Whoever
reads a note asks the log.

In a directory one lock holds the three steps together. In a store another machine may come in between, and a commit
whose answer was lost may still be made later. So a note whose commit has not come may only be taken away when its
number is another commit's: until then whoever writes ``lake.json`` keeps it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, Final

from tailrace.errors import SinkError
from tailrace.lake.store.commit_log import CommitLog
from tailrace.lake.store.log_state import LogState

#: What is to become of the lake, while it is changed.
CHANGING: Final = "changing"
#: In a note: the number of the commit that decides. (A note of an earlier release has none.)
COMMIT: Final = "commit"
_BECOMES: Final = ("claim", "stream", "columns")


def divided(log: CommitLog, value: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What of a ``lake.json`` is in force, and the note of a change that has not happened, so far or for good, under
    its key."""
    left = {name: one for name, one in value.items() if name != CHANGING}
    noted = value.get(CHANGING)
    if noted is None:
        return left, {}
    if not isinstance(noted, dict):
        raise SinkError(f"{log.layout.identity} is damaged: {CHANGING} is not an object")
    if _has_happened(log, noted):
        return {**left, **{name: noted[name] for name in _BECOMES if name in noted}}, {}
    return left, {CHANGING: noted}


def may_happen(note: Mapping[str, Any], number: int) -> bool:
    """Whether the commit of a change that has not happened may still come, to a log that ends with commit ``number``:
    nobody has its number yet."""
    decides = note[CHANGING].get(COMMIT) if note else None
    return isinstance(decides, int) and decides > number


def digest_of(known: Mapping[str, Any]) -> str:
    """Of the stream and the columns in a ``lake.json``."""
    value = {"stream": known["stream"], "columns": known["columns"]}
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def set_back(known: Mapping[str, Any], state: LogState) -> bool:
    """Whether a ``lake.json`` in force has another stream, or other columns, than the newest change has given the lake:
    somebody has put an older copy in its place."""
    return is_older(known, state.changes[-1].digest if state.changes else "")


def is_older(known: Mapping[str, Any], changed: str | None) -> bool:
    """Whether a ``lake.json`` is of before the lake's newest change, which has the digest ``changed``: ``""`` where the
    lake was never changed, ``None`` where that is not known, and both are never older."""
    return changed not in (None, "", digest_of(known))


def _has_happened(log: CommitLog, noted: Mapping[str, Any]) -> bool:
    number, claim = noted.get(COMMIT), noted.get("claim")
    commit = log.commit(number) if isinstance(number, int) else None
    if commit is not None:
        return commit.change is not None and commit.change.claim == claim
    return any(change.claim == claim for change in log.state().changes)
