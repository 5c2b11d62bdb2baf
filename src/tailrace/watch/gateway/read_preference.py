"""Whether a deployment has a member that a command's read preference asks for, as a mongos would find one. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import bson
from bson.errors import BSONError
from pymongo.errors import PyMongoError
from pymongo.read_preferences import make_read_preference
from pymongo.topology_description import TopologyDescription

from tailrace.core import raw_bson

#: By PyMongo's number. A primary fulfils the others, and is waited for as for any command.
_MODES: Final = {"secondary": 2, "nearest": 4}


def unmatched(description: TopologyDescription | None, command: bytes) -> str | None:
    """The read preference of a command, as text, if no member that is known can fulfil it; ``None``: one can, or the
    command has none that a primary would not fulfil."""
    preference = _preference(command)
    mode = _MODES.get(str(preference.get("mode")))
    if description is None or mode is None:
        return None
    tags: Any = preference.get("tags")
    try:
        wanted = make_read_preference(mode, tags or None, preference.get("maxStalenessSeconds", -1))
        if description.apply_selector(wanted):
            return None
    except (PyMongoError, TypeError, ValueError):
        return None  # the server says what is wrong with it
    return _text(str(preference["mode"]), tags)


def _preference(command: bytes) -> dict[str, Any]:
    element = raw_bson.find(command, b"$readPreference")
    if element is None or element.type != raw_bson.OBJECT:
        return {}
    try:
        return bson.decode(raw_bson.value(command, element))
    except BSONError:
        return {}


def _text(mode: str, tags: Sequence[Any] | None) -> str:
    return f'{{ mode: "{mode}"' + (f", tags: {list(tags)}" if tags else "") + " }"
