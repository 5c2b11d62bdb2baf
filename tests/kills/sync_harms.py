"""What happens to both ends while a sync is killed: primaries step down, and chunks move."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

STEP_DOWN_SOURCE = "step-down of the source"
STEP_DOWN_TARGET = "step-down of the target"
MOVE = "chunk move"
Harm = Callable[[random.Random], str]


class Harms:
    """Causes each kind of harm as often as it is told, in a random order, in a thread. It holds ``alone`` meanwhile,
    and so does whoever reads both ends."""

    def __init__(self, kinds: dict[str, Harm], seed: str, told: Callable[[str], None], pause_s: float) -> None:
        self._kinds, self._told, self._pause_s = kinds, told, pause_s
        self._rng = random.Random(seed)
        self.alone = threading.Lock()
        self.done: Counter[str] = Counter()
        self._failure: BaseException | None = None
        self._ended = threading.Event()
        self._is_done = threading.Event()

    @contextmanager
    def under_way(self, counts: dict[str, int]) -> Iterator[None]:
        """Causes so many of each kind while the body runs. The block ends when all are done, unless the body fails."""
        left = [kind for kind, count in counts.items() for _ in range(count)]
        self._rng.shuffle(left)
        thread = threading.Thread(target=self._run, args=(left,), daemon=True)
        thread.start()
        try:
            yield
        except BaseException:
            self._ended.set()
            raise
        finally:
            thread.join()
        if self._failure is not None:
            raise self._failure

    @property
    def are_done(self) -> bool:
        return self._is_done.is_set()

    def _run(self, left: list[str]) -> None:
        try:
            for kind in left:
                if self._ended.wait(self._rng.uniform(0.2, 2 * self._pause_s)):
                    return
                with self.alone:
                    what = self._kinds[kind](self._rng)
                self.done[kind] += 1
                self._told(f"{kind} {self.done[kind]}: {what}")
        except BaseException as error:  # noqa: BLE001  raised by ``under_way``
            self._failure = error
        finally:
            self._is_done.set()
