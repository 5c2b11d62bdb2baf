"""What Spark's workers skipped, taken from the log that they write."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

#: What a worker says, once for each kind (``tailrace.lake.spark.reading.slice_plan``).
_LINE: Final = re.compile(rb"oplog entries of the kind '([^\n]{1,400}?)' are skipped[^\n]*\n")
#: Read at once; of a line that does not fit, no more is asked for.
_PIECE: Final = 1 << 20


class SkippedOperations:
    """Follows Spark's log, whose path is ``None`` where it goes to the user as it is. There are several workers, and
    each says it."""

    def __init__(self, log: Path | None) -> None:
        self._log = log
        self._at = 0
        self._rest = b""
        self._told: set[str] = set()

    def look(self) -> list[str]:
        """The kinds that were not told yet."""
        if self._log is None:
            return []
        found: list[str] = []
        with self._log.open("rb") as log:
            log.seek(self._at)
            while piece := log.read(_PIECE):
                self._at += len(piece)
                text = self._rest + piece
                for match in _LINE.finditer(text):
                    kind = match[1].decode("utf-8", "replace")
                    if kind not in self._told:
                        self._told.add(kind)
                        found.append(kind)
                self._rest = text[text.rfind(b"\n") + 1 :][-_PIECE:]
        return found
