"""Fail points for the commands that the gateway answers. They work as the server's do (6.0, 5.0 and 4.4). No I/O.

The server never sees a change stream's commands; its fail points would hit the gateway's own reads instead. So fail
points for ``aggregate``, ``getMore`` and ``killCursors`` are kept here, for every such command that comes through the
gateway, whether the gateway or the server answers it. Fail points that name other commands go on to the server.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from tailrace.core.cursor.reply import error_reply, is_resumable
from tailrace.errors import RESUMABLE_LABEL, ServerError

FAIL_COMMAND: Final = "failCommand"
AFTER_CHECKOUT: Final = "failGetMoreAfterCursorCheckout"
_KEPT: Final = frozenset(("aggregate", "getMore", "killCursors"))


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens instead of a command. ``reply``: ``None`` if the command goes on after the delay."""

    reply: bytes | None = None
    closes: bool = False
    delay_ms: int = 0


@dataclass(slots=True)
class _FailPoint:
    """``left``: how often it still strikes, ``None`` for always. The first ``skip`` commands are let through."""

    data: Mapping[str, Any]
    left: int | None = None
    skip: int = 0
    chance: float = 1.0

    def strikes(self) -> bool:
        """Whether it strikes this command, which is counted."""
        if self.skip > 0:
            self.skip -= 1
            return False
        if self.left == 0 or (self.chance < 1 and random.random() >= self.chance):
            return False
        if self.left is not None:
            self.left -= 1
        return True


class FailPoints:
    """The fail points that are set.

    ``version``  of the server, major and minor: 6.0 words one error differently
    """

    def __init__(self, version: tuple[int, int] = (6, 0)) -> None:
        self.version = version
        self._set: dict[str, _FailPoint] = {}

    @property
    def is_set(self) -> bool:
        """Whether any is set."""
        return bool(self._set)

    @staticmethod
    def for_server(command: Mapping[str, Any]) -> dict[str, Any]:
        """The part of a ``configureFailPoint`` command that the server is to set: what is not kept here."""
        name, data = command.get("configureFailPoint"), command.get("data")
        listed = data.get("failCommands") if isinstance(data, Mapping) else None
        if name == AFTER_CHECKOUT:
            return {**command, "mode": "off"}
        if name != FAIL_COMMAND or not isinstance(listed, list):
            return dict(command)
        left = [one for one in listed if one not in _KEPT]
        if not left:
            return {field: value for field, value in command.items() if field != "data"} | {"mode": "off"}
        return {**command, "data": {**command["data"], "failCommands": left}}

    def configure(self, command: Mapping[str, Any]) -> None:
        """Set, or take away, a fail point that the server has accepted."""
        name = command.get("configureFailPoint")
        if name not in (FAIL_COMMAND, AFTER_CHECKOUT):
            return
        mode, data = command.get("mode"), command.get("data") or {}
        self._set.pop(name, None)
        if mode == "off" or not isinstance(data, Mapping):
            return
        point = _FailPoint(data)
        if isinstance(mode, Mapping):
            point.left = int(mode["times"]) if "times" in mode else None
            point.skip = int(mode.get("skip", 0))
            point.chance = float(mode.get("activationProbability", 1))
        self._set[name] = point

    def on_command(self, name: str, app_name: str | None, *, opens_stream: bool) -> Fault | None:
        """What strikes a command before any of it is done."""
        point = self._set.get(FAIL_COMMAND)
        if point is None or name not in (point.data.get("failCommands") or ()):
            return None
        if "appName" in point.data and point.data["appName"] != app_name:
            return None
        if not point.strikes():
            return None
        data = point.data
        delay_ms = int(data.get("blockTimeMS", 0)) if data.get("blockConnection") else 0
        if data.get("closeConnection"):
            return Fault(closes=True, delay_ms=delay_ms)
        if "errorCode" not in data:
            return Fault(delay_ms=delay_ms)
        cause = "via" if self.version >= (6, 0) else "due to"
        error = ServerError(f"Failing command {cause} 'failCommand' failpoint", code=int(data["errorCode"]))
        return Fault(self._reply(error, data, in_stream=opens_stream), delay_ms=delay_ms)

    def on_get_more(self) -> Fault | None:
        """What strikes a stream's getMore, and ends its cursor."""
        point = self._set.get(AFTER_CHECKOUT)
        if point is None or not point.strikes():
            return None
        error = ServerError(f"Hit the '{AFTER_CHECKOUT}' failpoint", code=int(point.data.get("errorCode", 8)))
        return Fault(self._reply(error, {}, in_stream=True))

    def _reply(self, error: ServerError, data: Mapping[str, Any], *, in_stream: bool) -> bytes:
        labels: Iterable[str] = (RESUMABLE_LABEL,) if in_stream and is_resumable(error.code, self.version) else ()
        if data.get("errorLabels") is not None:
            labels = map(str, data["errorLabels"])  # these and no others, whatever labels the code has elsewhere
        labelled = ServerError(error.message, code=error.code, labels=labels)
        return error_reply(labelled, in_stream=False, version=self.version)
