"""Tables that look as if they had been written over hours."""

from __future__ import annotations

import json
import os
from pathlib import Path

from tailrace.tables import delta_commit

_MINUTE_MS = 60_000


def age(root: Path) -> int:
    """Give the versions of a table times that lie a minute apart. Returns that of the last one, in milliseconds: its
    commit stays as it is, since the state knows it."""
    numbers = delta_commit.versions(root)
    last = next(
        one["commitInfo"]["timestamp"] for one in delta_commit.actions_of(root, numbers[-1]) if "commitInfo" in one
    )
    for number in numbers:
        actions = delta_commit.actions_of(root, number)
        at = last - (numbers[-1] - number) * _MINUTE_MS
        for action in actions:
            if "commitInfo" in action:
                action["commitInfo"]["timestamp"] = at
            if "add" in action:
                os.utime(root / action["add"]["path"], (at / 1000, at / 1000))
        if number != numbers[-1]:
            delta_commit.path_of(root, number).write_text("".join(json.dumps(one) + "\n" for one in actions))
    return int(last)
