"""A follower as a process of its own: it goes on until it is killed, stopped, or no longer the owner.

``python -m tests.sync.follow SOURCE TARGET NAME LANES LEASE_S [PLACE]``: at ``PLACE`` it stops itself once (SIGSTOP),
as on a machine that sleeps, and goes on there when it is woken.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Mapping
from typing import Any

from tailrace.act.consumer.rules.errors import LeaseLost
from tailrace.act.sync import commands, ownership
from tailrace.act.sync.settings import SyncSettings
from tests.sync.following import following

#: The exit status of one that is no longer the owner.
LOST = 3


def sleep_once() -> None:
    if not os.environ.get("SLEPT"):
        os.environ["SLEPT"] = "1"
        os.kill(os.getpid(), signal.SIGSTOP)


def before_commit() -> None:
    """The next transaction that has written documents sleeps before its commit."""
    commit = ownership._commit

    def late(session: Any) -> None:
        sleep_once()
        commit(session)

    ownership._commit = late


def before_transaction() -> None:
    """The next transaction sleeps between the check of the lease and its first statement."""
    attempt: Callable[..., Any] = ownership.SyncOwnership._try

    def late(self: Any, *arguments: Any) -> Any:
        sleep_once()
        return attempt(self, *arguments)

    ownership.SyncOwnership._try = late  # type: ignore[method-assign]


def before_definition() -> None:
    """The next definition sleeps between the check of the lease and its command."""
    check = ownership.SyncOwnership.check
    command: Callable[..., Any] = commands.TargetCommands.command

    def late(self: Any, database: str, document: Mapping[str, Any], what: str) -> Any:
        def checked(owner: Any) -> None:
            check(owner)
            sleep_once()

        ownership.SyncOwnership.check = checked  # type: ignore[method-assign]
        try:
            return command(self, database, document, what)
        finally:
            ownership.SyncOwnership.check = check  # type: ignore[method-assign]

    commands.TargetCommands.command = late  # type: ignore[method-assign]


PLACES = {"commit": before_commit, "transaction": before_transaction, "definition": before_definition}


def main(arguments: list[str]) -> int:
    source, target, name, lanes, lease_s, *place = arguments
    for one in place:
        PLACES[one]()
    settings = SyncSettings(name=name, lanes=int(lanes), lease_s=float(lease_s))
    try:
        with following(source, target, settings) as follower:
            follower.run()
    except LeaseLost:
        return LOST
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
