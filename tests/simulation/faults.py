"""What goes wrong in a run: how likely each fault is, drawn from the seed."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random


@dataclass(frozen=True)
class Faults:
    """Probabilities per step, and spans in seconds."""

    lost_request: float = 0.0
    lost_reply: float = 0.0
    slow: float = 0.0
    pause: float = 0.0
    crash: float = 0.0
    source_away: float = 0.0
    handler_error: float = 0.0
    theft_every: float = 0.0
    stop_every: float = 0.0

    @classmethod
    def drawn(cls, random: Random) -> Faults:
        """Some of the faults, with random strength: a run with all of them at once gets nowhere and shows little."""

        def maybe(likely: float, strongest: float) -> float:
            return random.uniform(0, strongest) if random.random() < likely else 0.0

        return cls(
            lost_request=maybe(0.4, 0.1),
            lost_reply=maybe(0.5, 0.15),
            slow=maybe(0.5, 0.1),
            pause=maybe(0.7, 0.06),
            crash=maybe(0.5, 0.02),
            source_away=maybe(0.3, 0.05),
            handler_error=maybe(0.3, 0.1),
            theft_every=maybe(0.3, 100.0),
            stop_every=maybe(0.3, 100.0),
        )


NONE = Faults()
