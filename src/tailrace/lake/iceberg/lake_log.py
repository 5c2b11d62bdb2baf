"""What a lake's log adds up to, kept by the process that shows the lake in a catalogue: whatever the log's length, it
reads each new commit once.

What was kept is of use only for a log that still has that commit, by its SHA-256, and whose later commits follow it.
For any other one, as when the lake was set back, everything is read again. ``lake.json`` changes together with a
commit. So it is read when all commits are known, and counts if there is no further one after that: no lock between
machines is needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tailrace.errors import UsageError
from tailrace.lake.store.commit_log import CommitLog, Head
from tailrace.lake.store.identity import read_identity, require_changed_in
from tailrace.lake.store.log_state import LogState
from tailrace.lake.store.manifest import BatchMark, FileEntry
from tailrace.lake.store.remembered import NumberedCommit, next_commit


@dataclass(frozen=True, slots=True)
class SeenLake:
    """A lake at commit ``number``, whose file has the SHA-256 ``digest``: the newest micro-batch with events until
    then, the files by name, and ``lake.json``. ``is_another``: it need not follow what was seen before. Valid until the
    log is looked at again."""

    number: int
    digest: str
    newest: BatchMark | None
    files: Mapping[str, FileEntry]
    known: Mapping[str, Any]
    is_another: bool

    @property
    def in_order(self) -> list[FileEntry]:
        """The files in the order of the stream."""
        return sorted(self.files.values(), key=lambda file: file.first_token)


class FollowedLog:
    """The log of one lake, looked at again and again."""

    def __init__(self, log: CommitLog) -> None:
        self._log = log
        self._state: LogState | None = None
        self._digest = ""
        self._newest: BatchMark | None = None
        self._is_another = False

    def seen(self, head: Head) -> SeenLake:
        """The lake at its newest commit. ``head`` was read a moment ago. Raises UsageError where there is no lake,
        SinkError where it is damaged."""
        self._is_another = False
        state = self._taken(head)
        while True:
            known = read_identity(self._log.layout.root)
            if known is None:
                raise UsageError(f"{self._log.layout.root} is not a lake of Tailrace")
            came = next_commit(self._log, state.number + 1)
            if came is None:
                break
            if not self._apply(state, came):  # the lake was set back just now
                state = self._read()
        require_changed_in(self._log, known, state)  # else the columns would be of before, and the files of after it
        self._state = state
        return SeenLake(state.number, self._digest, self._newest, state.files, known, self._is_another)

    def _taken(self, head: Head) -> LogState:
        """What is kept, brought up to ``head``, or else read anew. Until that has come to an end nothing is kept."""
        state, self._state = self._state, None
        if state is None:
            return self._read()
        while state.number < head.number:
            came = next_commit(self._log, state.number + 1)
            if came is None or not self._apply(state, came):
                return self._read()
        return state if self._digest == head.digest else self._read()

    def _apply(self, state: LogState, came: NumberedCommit) -> bool:
        """Whether a commit follows what is known, and is part of it now."""
        if came.commit.previous != self._digest:
            return False
        state.apply(came.commit)
        state.removed.clear()  # of no use here, and as many as the stream has ever replaced
        self._digest, self._newest = came.digest, came.commit.newest
        return True

    def _read(self) -> LogState:
        """The state of the whole log."""
        with self._log.reading() as head:
            state = self._log.state(head.number)
        state.removed.clear()
        self._digest, self._newest, self._is_another = head.digest, head.newest, True
        return state
