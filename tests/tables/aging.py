"""Tables that look as if they had been written over hours."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from tailrace.lake.store import delta
from tailrace.lake.tables import delta_commit, log_chain
from tailrace.lake.tables.names import folder_of
from tailrace.lake.tables.state import TableState

_MINUTE_MS = 60_000


def age(root: Path) -> int:
    """Give the versions of a table times that lie a minute apart. Returns that of the last one, in milliseconds."""
    numbers = delta.commits_in(root)
    last = int(delta.info_of(delta_commit.actions_of(root, numbers[-1]))["timestamp"])
    for number in numbers:
        actions = delta_commit.actions_of(root, number)
        at = last - (numbers[-1] - number) * _MINUTE_MS
        actions[0]["commitInfo"]["timestamp"] = at
        for action in actions:
            if "add" in action:
                os.utime(root / action["add"]["path"], (at / 1000, at / 1000))
        content = delta_commit.content_of(number, actions, log_chain.previous(root, number))
        delta.commit_path(root, number).write_bytes(content)
    _let_the_state_know(root, numbers[-1])
    return last


def _let_the_state_know(root: Path, version: int) -> None:
    if not (root.parent / "_tailrace").is_dir():
        return
    state = TableState(root.parent / "_tailrace" / "state")
    [mark] = [one for name, one in state.marks().items() if folder_of(name) == root.name]
    assert mark.version == version
    digest = delta_commit.digest(delta.commit_path(root, version).read_bytes())
    with state.writing() as writing:
        writing.set_mark(replace(mark, digest=digest))
    state.close()
