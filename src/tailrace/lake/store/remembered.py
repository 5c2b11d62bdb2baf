"""What a lake's log adds up to, remembered by the process that commits, so that an idle stream need not read it again.

It only spares reading. It is of one commit, known by its number and its SHA-256, and is of no use for another one: the
log that is there now has to have that commit still, and what came after it has to follow it. Nothing is written on the
word of what is remembered here; whoever writes reads the log under the lake's lock.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from tailrace.lake.store.commit_log import CommitLog, Head
from tailrace.lake.store.compaction_policy import CompactionPolicy
from tailrace.lake.store.delta_log import decode
from tailrace.lake.store.lake_root import LakeRoot
from tailrace.lake.store.log_state import LogState
from tailrace.lake.store.manifest import Commit

#: A state with more files, replaced ones too, is not kept: it would be tens of megabytes.
_FILES_MAX: Final = 20_000
_LAKES_MAX: Final = 4


@dataclass(frozen=True, slots=True)
class NumberedCommit:
    """A commit, and the SHA-256 of its file, which the one after it names."""

    commit: Commit
    digest: str


@dataclass(slots=True)
class Remembered:
    """Of the commit ``number``, whose file has the SHA-256 ``digest``. ``state`` is ``None`` where it is too large.
    ``idle``: with this policy there is nothing to merge or to remove before that time, or ever (``None``)."""

    number: int
    digest: str
    state: LogState | None
    idle: tuple[CompactionPolicy, datetime | None] | None = None

    def is_idle(self, policy: CompactionPolicy, now: datetime) -> bool:
        """Whether a look at the same commit would find nothing to do."""
        return self.idle is not None and self.idle[0] == policy and (self.idle[1] is None or now < self.idle[1])


_lakes: dict[LakeRoot, Remembered] = {}


def remembered(log: CommitLog) -> tuple[Remembered, LogState]:
    """The state of the newest commit. Of a log that has grown since, only what is new is read."""
    root, head = log.layout.root, log.head()
    known = _lakes.pop(root, None)
    if known is None or known.number > head.number or not _brought_up(log, known, head):
        known = Remembered(head.number, head.digest, log.state(head.number))
    state = known.state if known.state is not None else log.state(head.number)
    if len(state.files) + len(state.removed) > _FILES_MAX:
        known.state = None
    while len(_lakes) >= _LAKES_MAX:
        _lakes.pop(next(iter(_lakes)))
    _lakes[root] = known
    return known, state


def _brought_up(log: CommitLog, known: Remembered, head: Head) -> bool:
    """Apply the commits that came after ``known``; whether they follow it and end with ``head``."""
    if known.number == head.number:
        return known.digest == head.digest
    if known.state is None:
        return False
    digest = known.digest
    for number in range(known.number + 1, head.number + 1):
        came = next_commit(log, number)
        if came is None or came.commit.previous != digest:
            return False
        known.state.apply(came.commit)
        digest = came.digest
    known.number, known.digest, known.idle = head.number, digest, None
    return digest == head.digest


def next_commit(log: CommitLog, number: int) -> NumberedCommit | None:
    """The commit with this number, read once; ``None`` if there is none, or the log does not keep it any more."""
    path = log.layout.commit(number)
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    return NumberedCommit(decode(content, number, path), hashlib.sha256(content).hexdigest())
