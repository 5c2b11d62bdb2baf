"""Telling a person what a command waits for before any server of a deployment has answered.

PyMongo looks for a server for 30 s and says nothing meanwhile. What it learns about the servers is printed after three
seconds, once for each.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from pymongo import monitoring
from pymongo.topology_description import TopologyDescription

from tailrace.cli.output import tell
from tailrace.core.printable import in_a_line
from tailrace.read.source.failure import reason_of, server_name

_AFTER_S: Final = 3.0


class FirstAnswer(monitoring.ServerHeartbeatListener, monitoring.TopologyListener):
    """What PyMongo reports about all clients of this process; a person sees it while ``is_told``."""

    def __init__(self) -> None:
        self.is_told = False
        self._begun: dict[Any, float] = {}
        self._seen: dict[Any, TopologyDescription] = {}
        self._told: set[Any] = set()

    def opened(self, event: Any) -> None:
        """A client begins to look for its servers."""
        self._begun[event.topology_id] = time.monotonic()

    def description_changed(self, event: Any) -> None:
        """What a client knows of its servers now."""
        if event.topology_id in self._begun:
            self._seen[event.topology_id] = event.new_description
            if event.new_description.has_readable_server():
                self.closed(event)
            elif self._has_lost_its_last_server(event):
                self._tell_of_none_left(event)

    @staticmethod
    def _has_lost_its_last_server(event: Any) -> bool:
        """A client that is closed loses its servers too, but then its topology is no replica set's any more."""
        before, now = event.previous_description, event.new_description
        is_looking = now.topology_type_name == "ReplicaSetNoPrimary"
        return is_looking and bool(before.server_descriptions()) and not now.server_descriptions()

    def _tell_of_none_left(self, event: Any) -> None:
        """PyMongo forgets a server of another replica set, and waits for one of the set that was named."""
        wanted = event.new_description.replica_set_name
        if self.is_told and wanted not in self._told:
            self._told.add(wanted)
            tell(f"tailrace: no server that answered belongs to a replica set named {in_a_line(str(wanted))}.")

    def closed(self, event: Any) -> None:
        """Nothing more is reported about a deployment that has answered, or that nobody looks for."""
        self._begun.pop(event.topology_id, None)
        self._seen.pop(event.topology_id, None)

    def started(self, event: Any) -> None:
        """A server is asked."""

    def succeeded(self, event: Any) -> None:
        """A server has answered: its client says whether it can be used."""

    def failed(self, event: Any) -> None:
        """A server has not answered: the moment to say so, since it is asked twice a second."""
        who, now = event.connection_id, time.monotonic()
        waiting = [topology for topology, seen in list(self._seen.items()) if who in seen.server_descriptions()]
        is_late = any(now - self._begun.get(topology, now) >= _AFTER_S for topology in waiting)
        if is_late and self.is_told and who not in self._told:
            self._told.add(who)
            where = in_a_line(server_name(who))
            tell(f"tailrace: {where} has not answered so far: {reason_of(event.reply)}. Trying again.")


_listener: FirstAnswer | None = None


@contextmanager
def told_of_waiting() -> Iterator[None]:
    """Tell of servers that do not answer while the body runs."""
    global _listener  # noqa: PLW0603  PyMongo registers for the process, and for good
    if _listener is None:
        _listener = FirstAnswer()
        monitoring.register(_listener)
    _listener.is_told = True
    try:
        yield
    finally:
        _listener.is_told = False
