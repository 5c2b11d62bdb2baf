"""Further ways in which handlers, streams and policies fail, each in some runs.

These have random numbers of their own: up to the first of them, a seed plays the same run as before."""

from __future__ import annotations

from random import Random

from tailrace.act.consumer.rules.errors import HandlerCancelled, HandlerInterrupted, HandlerNotRun
from tailrace.act.consumer.rules.unrun import refuse_unrun
from tailrace.errors import ServerError

_TOO_LARGE = 10334


class Failing:
    """Probabilities at each handling or reading; 0 where nothing of the kind happens.

    ``unrun``        the handler hands its work back as a coroutine
    ``cancelled``    it ends with CancelledError, or leaves off because the listener is stopping
    ``refused``      the stream cannot give the change
    ``stop``         the error policy says stop, and a supervisor starts the listener again
    ``truncates_every``      the oplog loses its oldest entries about so often, in seconds
    ``ends_at_invalidates``  a listener ends at an invalidate, unless it is one from before it began
    """

    def __init__(self, seed: int) -> None:
        self.random = Random(f"failing {seed}")
        self.unrun = self.cancelled = self.refused = self.stop = self.truncates_every = 0.0
        self.ends_at_invalidates = False
        self.counts = {"unrun": 0, "cancelled": 0, "refused": 0, "stop": 0}

    @classmethod
    def drawn(cls, seed: int) -> Failing:
        """Some of them."""
        failing = cls(seed)
        random = failing.random
        for name in failing.counts:
            setattr(failing, name, (0.4 if name == "stop" else 0.15) if random.random() < 0.25 else 0.0)
        failing.truncates_every = random.choice((0.0, 0.0, 0.0, 60.0))
        failing.ends_at_invalidates = random.random() < 0.5
        return failing

    def _happens(self, name: str) -> bool:
        chance: float = getattr(self, name)
        happens = bool(chance) and self.random.random() < chance
        self.counts[name] += happens
        return happens

    def stops(self) -> bool:
        """Whether the policy says stop."""
        return self._happens("stop")

    def handler_error(self, *, stopping: bool) -> Exception | None:
        """What ends a handler that has done nothing."""
        if self._happens("unrun"):
            try:
                refuse_unrun(_work(), "the handler")
            except HandlerNotRun as error:
                return error
            raise AssertionError("work that was handed back was taken for done")
        if self._happens("cancelled"):
            return HandlerInterrupted("the broker is away") if stopping else HandlerCancelled("cancelled")
        return None

    def refuses(self) -> ServerError | None:
        """Why the stream cannot give a change."""
        return ServerError("the event is too large", code=_TOO_LARGE) if self._happens("refused") else None


async def _work() -> None:
    """Never awaited."""
