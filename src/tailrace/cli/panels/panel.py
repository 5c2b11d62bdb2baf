"""A panel: one small reader that gives JSON, and what it gave or failed with at its last look."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pymongo import MongoClient
from pymongo.errors import PyMongoError

from tailrace.base.threads import CheckedThread
from tailrace.errors import TailraceError
from tailrace.read.source.failure import source_error
from tailrace.read.source.uri import redact_uri


@dataclass(frozen=True, slots=True)
class Panel:
    """``read`` gives what the panel shows as JSON values, ``every_s`` seconds after the last look; it may raise.
    ``client`` is whom it reads with, for the sentence about a failure of the driver; ``close`` gives back what it has
    opened itself."""

    name: str
    every_s: float
    read: Callable[[], Any]
    client: MongoClient[Any] | None = None
    close: Callable[[], None] | None = None

    def look(self) -> dict[str, Any]:
        """What is shown: ``data``, or ``error`` with a sentence and, where there is one, a ``hint``. Never raises."""
        at = {"name": self.name, "at": round(time.time(), 1)}
        try:
            return {**at, "data": self.read()}
        except Exception as error:  # noqa: BLE001  a panel that fails harms no other, whatever its failure is
            return {**at, **_complaint(error, self.client)}


def _complaint(error: Exception, client: MongoClient[Any] | None) -> dict[str, Any]:
    """The sentence about an error, without secrets."""
    known = source_error(error, client) if isinstance(error, PyMongoError) and client is not None else error
    if isinstance(known, TailraceError):
        hint = None if known.hint is None else redact_uri(known.hint)
        return {"error": redact_uri(str(known.message)), "hint": hint, "code": known.code}
    if isinstance(error, ModuleNotFoundError):
        return {"error": f"this panel needs the package {error.name}", "hint": None, "code": None}
    return {"error": redact_uri(f"{type(error).__name__}: {error}"), "hint": None, "code": None}


class Panels:
    """Looks at each panel in a thread of its own, so that none waits for another, while somebody watches.

    ``changed``  notified of what each look has given: the panel's name, and the panel as JSON text
    """

    def __init__(self, panels: Sequence[Panel], changed: Callable[[str, str], None] = lambda name, text: None) -> None:
        self.panels = tuple(panels)
        self._changed = changed
        self._shown: dict[str, str] = {}
        self._stopped = threading.Event()
        self._watched = threading.Event()
        self._threads = [
            CheckedThread(lambda panel=panel: self._keep(panel), f"tailrace-panel-{panel.name}")  # type: ignore[misc]
            for panel in self.panels
        ]

    def start(self) -> None:
        """Begin; nothing is read before ``watch``."""
        for thread in self._threads:
            thread.start()

    def watch(self, *, watched: bool) -> None:
        """Look while somebody watches, and rest otherwise."""
        if watched:
            self._watched.set()
        else:
            self._watched.clear()

    def stop(self) -> None:
        """End every look; a thread that waits for a server ends with it."""
        self._stopped.set()
        self._watched.set()
        for panel in self.panels:
            if panel.close is not None:
                panel.close()

    @property
    def shown(self) -> dict[str, str]:
        """The panels that were read, as JSON text."""
        return dict(self._shown)

    def _keep(self, panel: Panel) -> None:
        while not self._stopped.is_set():
            self._watched.wait()
            if self._stopped.is_set():
                return
            self._shown[panel.name] = text = json.dumps(panel.look(), default=str)
            self._changed(panel.name, text)
            self._stopped.wait(panel.every_s)
