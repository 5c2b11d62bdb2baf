"""What a console shows: the panels and the activity of a deployment, read while somebody watches."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from tailrace.base.threads import CheckedThread
from tailrace.cli.panels.activity import Activity
from tailrace.cli.panels.panel import Panel, Panels
from tailrace.cli.panels.sources import Targets, panels_of
from tailrace.read.source.uri import ConnectionString

if TYPE_CHECKING:
    from tailrace.watch.client.client import Client

#: Between two looks at the counts.
_COUNTS_S: Final = 2.0
#: A server's wait for events takes a second.
_STOP_S: Final = 5.0


class Showing:
    """Begin it with ``start``, end it with ``stop``. ``send`` is notified of what is new: its kind, and JSON text."""

    def __init__(
        self,
        client: Client[Any],
        uri: ConnectionString,
        targets: Targets,
        send: Callable[[str, str], None] = lambda kind, text: None,
        *,
        images: bool = True,
    ) -> None:
        self._activity = Activity(client, lambda event: send("event", json.dumps(event, default=str)), images=images)
        counts = Panel("activity", _COUNTS_S, self._activity.read)
        self.panels = Panels([counts, *panels_of(client, uri, targets)], lambda _, text: send("panel", text))
        self._follower = CheckedThread(self._activity.run, "tailrace-console-activity")

    def start(self) -> None:
        """Begin to follow the deployment; panels are read once somebody watches."""
        self._follower.start()
        self.panels.start()

    def stop(self) -> None:
        """End; a look that waits for a server ends on its own."""
        self._activity.stop()
        self.panels.stop()
        if self._follower.is_alive():
            self._follower.join(_STOP_S)

    def shown(self) -> dict[str, str]:
        """Each panel as JSON text. One that was not read yet is left out."""
        return self.panels.shown

    @property
    def total(self) -> int:
        """How many events have come."""
        return self._activity.total

    def first(self) -> list[tuple[str, str]]:
        """What a page is sent when it is opened: kinds of messages, and JSON text."""
        names = json.dumps([panel.name for panel in self.panels.panels])
        recent = json.dumps(self._activity.recent, default=str)
        return [("panels", names), *(("panel", text) for text in self.shown().values()), ("events", recent)]
