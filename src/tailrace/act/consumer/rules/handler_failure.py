"""The words for a handler that has raised."""

from __future__ import annotations

from typing import Final

from tailrace.act.consumer.rules.errors import HandlerFailed
from tailrace.act.consumer.rules.need import Pulled

#: Where this package lies. A user's own project may have "tailrace" in its path too, and its lines are theirs.
_OUR_FOLDER: Final = __file__.rpartition("act")[0]


def handler_failed(resource: str, pulled: Pulled, error: Exception) -> HandlerFailed:
    token = "" if pulled.token is None else str(pulled.token.get("_data", ""))
    return HandlerFailed(
        f"the handler of {resource!r} raised {type(error).__name__}{_where(error)} at the change with token {token}: "
        f"{error}".rstrip(": "),
        hint="The position stands before this change: the next run begins with it",
    )


def _where(error: Exception) -> str:
    """The handler's own line that raised, or called what did."""
    frame, place = error.__traceback__, ""
    while frame is not None:
        name = frame.tb_frame.f_code.co_filename
        if "site-packages" not in name and not name.startswith(_OUR_FOLDER):
            place = f" in {name.rpartition('/')[2]}, line {frame.tb_lineno},"
        frame = frame.tb_next
    return place
