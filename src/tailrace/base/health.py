"""What a process says about its own health, for whatever keeps it running: an orchestrator over HTTP, or systemd."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

#: A handler that has been at work on one change for this long is considered stuck. A relay waits for a broker for ten
#: minutes.
HUNG_AFTER_S: Final = 900.0


class Health(NamedTuple):
    """``said``     what the process is doing, in a sentence
    ``dead``     why it should be killed and started again; ``None`` while it lives
    ``unready``  why it does not do its work at the moment, though a new start would not help; ``None`` while it does
    ``begun``    whether it has come so far that it has begun its work, or waits for its turn
    """

    said: str
    dead: str | None = None
    unready: str | None = None
    begun: bool = True

    @property
    def trouble(self) -> str | None:
        """Why it is not ready."""
        if self.dead is not None or self.unready is not None:
            return self.dead or self.unready
        return None if self.begun else self.said


def whole(parts: Iterable[Health]) -> Health:
    """The health of a process that has several jobs: as good as the worst of them."""
    known = list(parts)
    return Health(
        "; ".join(one.said for one in known),
        next((one.dead for one in known if one.dead is not None), None),
        next((one.unready for one in known if one.unready is not None), None),
        all(one.begun for one in known),
    )
