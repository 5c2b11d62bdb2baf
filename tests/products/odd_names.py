"""Collections with names that drivers refuse and the server accepts: some for which PyMongo makes no object, and some
that are not UTF-8. Nobody can copy the latter: every copy leaves them out."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, Final

from tests.differential.wire import raw_command, raw_insert

DOTTED: Final = ("a..b", "a.", "a...")
#: Both are the same text after invalid bytes are replaced.
_UNREADABLE: Final = (b"odd\xfe", b"odd\xff")
_IDS: Final = 6


class OddNames:
    """The odd names of a database. ``present``: whether it has collections that nobody can copy."""

    def __init__(self, database: str, seed: str) -> None:
        self._database = database
        self._rng = random.Random(f"tailrace odd names {seed}")
        self.present = False

    def write(self) -> dict[str, Any]:
        """The next write to a collection that can be copied."""
        rng = self._rng
        name, key = rng.choice(DOTTED), rng.randrange(_IDS)
        chosen = rng.random()
        if chosen < 0.1:
            return {"drop": name}
        if chosen < 0.3:
            return {"delete": name, "deletes": [{"q": {"_id": key}, "limit": 1}]}
        change = {"$inc": {"n": 1}, "$set": {"text": "x" * rng.randrange(50)}}
        return {"update": name, "updates": [{"q": {"_id": key}, "u": change, "upsert": True}]}

    def begin_round(self, send: Callable[[bytes], object], chance: float) -> None:
        """Drop them if they exist; otherwise make them by chance."""
        was, self.present = self.present, not self.present and self._rng.random() < chance
        for name in _UNREADABLE:
            if was:
                send(raw_command("drop", self._database.encode(), name))
            elif self.present:
                send(raw_insert(self._database.encode(), name, *({"_id": one} for one in range(3))))
