"""What the streams of this process have skipped because this version does not know it, in the log: each kind once."""

from __future__ import annotations

import logging
import threading
from typing import Final

from tailrace.core.oplog.entry_kinds import PASSED_OVER

_log = logging.getLogger("tailrace")
_told: Final[set[str]] = set()
_lock = threading.Lock()


def tell_of_unknown_kinds() -> None:
    """Warn of the kinds that were not told yet. Costs nothing where there are none, as on servers that are known."""
    if len(PASSED_OVER) == len(_told):
        return
    with _lock:
        new = sorted(PASSED_OVER.copy().keys() - _told)
        _told.update(new)
    for kind in new:
        _log.warning(
            "oplog entries of the kind '%s' give no correct event: this version of Tailrace does not know it", kind
        )
