"""The deployment itself is restored from an older copy and then gets other writes, and each product goes on with it:
equal to what is there then, or refused. Afterwards the newer deployment returns, and the products go on as if nothing
had happened."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from tailrace.core.oplog.cluster_time import ClusterTime
from tests.products.children import Outcome
from tests.products.hand import Step
from tests.products.keeper import Keeper
from tests.products.truth import Truth

RESTORED: Final = "restored deployment"
#: The probability that a seed does this, for which the servers start four times.
RESTORED_CHANCE: Final = 0.3
_WRITES: Final = 40


class Restoring:
    """The restoration of a seed, by ``chance``: after which round a copy is made, and after which it is restored."""

    def __init__(self, seed: int, rounds: int, keepers: Sequence[Keeper], folder: Path, chance: float) -> None:
        rng = random.Random(f"tailrace restored {seed}")
        self._keepers = keepers
        self._folder = folder
        self._copied_after = -1
        if rng.random() < chance:
            self._copied_after = rng.randrange(max(1, rounds - 2))
        self._back_after = self._copied_after + rng.randint(1, 2)
        self._pause = ClusterTime(0)

    def after(self, number: int, writes: Any, truth: Truth, pause: ClusterTime) -> Iterator[tuple[Keeper, Step]]:
        """Do what is planned after a round. Returns the outcomes."""
        if number == self._copied_after:
            self._copy(writes, pause)
        elif number == self._back_after and self._copied_after >= 0:
            other = truth.until(self._pause, self._folder / "truth")
            with writes.restored(self._folder / "data", self._pause):
                writes.write_otherwise(_WRITES)
                now = writes.pause(other)
                for keeper in self._keepers:
                    if keeper.has_begun:
                        yield keeper, self._step(keeper, other, now)

    def _copy(self, writes: Any, pause: ClusterTime) -> None:
        self._pause = pause
        writes.back_up(self._folder / "data")
        for keeper in self._of_the_deployment():
            self._root(keeper).mkdir(parents=True)
            if keeper.root.exists():
                shutil.copytree(keeper.root, self._root(keeper), dirs_exist_ok=True)

    def _of_the_deployment(self) -> list[Keeper]:
        """The products whose positions are in the deployment: their effects are restored with them."""
        return [keeper for keeper in self._keepers if keeper.product.has_leases]

    def _root(self, keeper: Keeper) -> Path:
        return self._folder / keeper.name

    def _step(self, keeper: Keeper, truth: Truth, now: ClusterTime) -> Step:
        kept = keeper.keep()
        if keeper.product.has_leases:
            keeper.restore(self._root(keeper))
        job = keeper.job(now, truth=str(truth.folder), more={"restored": True})
        outcome: Outcome = keeper.run(job)
        if outcome.kind != "refused" or keeper.product.has_leases or keeper.product.own_files == "none":
            keeper.restore(kept)
        # After a refusal the store must be as it was: the next round goes on with it.
        return Step(RESTORED, outcome, outcome.text if outcome.kind == "wrong" else "")
