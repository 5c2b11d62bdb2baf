"""The keeper of a view, which is killed as its n-th write of targets begins:
``python -m tests.consumer.first_start_process URI DATABASE N``."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from pymongo.monitoring import CommandListener, CommandStartedEvent

import tailrace
from tailrace.consumer import MongoLeaseStore
from tailrace.consumer.views import View, ViewKeeper


class Death(CommandListener):
    """Kills the process at the n-th update command to the targets."""

    def __init__(self, at: int) -> None:
        self._left = at

    def started(self, event: CommandStartedEvent) -> None:
        self._left -= event.command_name == "update" and event.command.get("update") == "orders"
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def succeeded(self, event: Any) -> None:
        pass

    def failed(self, event: Any) -> None:
        pass


def keeper_of(database: Any) -> ViewKeeper:
    view = View(database.orders, database.customers, "customer_id", {"customer.name": "name"})
    return ViewKeeper(database.client, view, store=MongoLeaseStore(database.leases), owner="the same")


def main(uri: str, name: str, at: str) -> None:
    with tailrace.connect(uri, event_listeners=[Death(int(at))]) as client:
        keeper_of(client[name]).run()


if __name__ == "__main__":
    main(*sys.argv[1:])
