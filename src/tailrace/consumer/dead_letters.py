"""Dead letters: changes that a handler cannot handle, kept with their position and the reason, to be replayed."""

from tailrace.act.consumer.dead_letters import (
    DeadLetter,
    DeadLetters,
)

__all__ = [
    "DeadLetter",
    "DeadLetters",
]
