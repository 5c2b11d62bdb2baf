"""One seed: writes, products beside them, the hand between, and the comparisons."""

from __future__ import annotations

import random
import re
import shutil
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tailrace.core.oplog.cluster_time import ClusterTime
from tests.products.children import Child
from tests.products.hand import Elsewhere, Hand, Step, is_a_limit
from tests.products.keeper import Keeper, Killed, Running
from tests.products.product import Job, Product
from tests.products.restored import RESTORED, RESTORED_CHANCE, Restoring
from tests.products.truth import Truth

ROUNDS: Final = 6
#: The share of the products that have begun that run while there are writes.
_BESIDE: Final = 0.6
#: The share of these that are killed.
_KILLED_BESIDE: Final = 0.25


@dataclass
class Report:
    """What was done, and the outcomes. ``differences``: each once, with how often it occurred."""

    seeds: int = 0
    given_up: list[str] = field(default_factory=list)
    compared: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    differences: dict[str, str] = field(default_factory=dict)
    met: Counter[str] = field(default_factory=Counter)

    def refused(self, product: str, text: str) -> None:
        self.refusals[f"{product}: {_general(text)}"] += 1

    def differ(self, where: str, kind: str, text: str) -> None:
        """Report a difference, once for each product, fault and sentence."""
        key = f"{kind}: {_general(text)[:240]}"
        self.met[key] += 1
        self.differences.setdefault(key, f"{where}: {kind}: {text}")

    @property
    def total(self) -> str:
        """One line, for readers who only look at the end."""
        return (
            f"differences: {len(self.differences)} in {sum(self.compared.values())} comparisons, "
            f"{sum(self.faults.values())} faults, {sum(self.refusals.values())} refusals"
        )

    def __str__(self) -> str:
        return (
            f"{self.seeds} seeds, {sum(self.compared.values())} comparisons {dict(self.compared)}, "
            f"{sum(self.faults.values())} faults {dict(self.faults)}, {sum(self.refusals.values())} refusals, "
            f"{len(self.differences)} differences"
        )


def _general(text: str) -> str:
    """A sentence without what differs from run to run: numbers, times, hexadecimal ids, places in folders."""
    text = re.sub(r"/[\w./+%~-]{8,}", "PATH", text)
    text = re.sub(r"\b[0-9a-fA-F]{12,}\b", "HEX", text)
    return re.sub(r"\d+", "N", text)[:400]


def said(text: str) -> None:
    """A line of progress."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


class Play:
    """One run of one seed over one deployment."""

    def __init__(
        self,
        writes: Any,
        products: Sequence[Product],
        folder: Path,
        report: Report,
        *,
        seed: int,
        operations: int,
        faults: int,
        elsewhere: Elsewhere | None = None,
        planted: str = "",
        rounds: int = ROUNDS,
        kinds: frozenset[str] = frozenset(),
    ) -> None:
        self._writes = writes
        self._report = report
        self._folder = folder
        self._seed = seed
        self._rng = random.Random(f"tailrace play {seed}")
        self._hand = Hand(seed, elsewhere, writes.partial_uri(), kinds)
        self._truth = Truth(folder / "truth")
        self._rounds, self._operations = rounds, operations
        options = {
            "databases": list(writes.databases),
            "followed": writes.followed,
            "moved": list(writes.moved),
            "leases": writes.leases,
            "resharded": list(writes.resharded),
            "played": seed,
            "hidden": writes.hidden_uri,
            "eventless": list(writes.eventless),
            "unlogged": list(writes.unlogged),
        }
        job = Job(
            product="",
            uri=writes.deployment.uri,
            folder="",
            start=int(writes.start),
            until=0,
            truth=str(folder / "truth"),
            version=writes.version,
            seed=seed,
            planted=planted,
            options=options,
        )
        self._keepers = [Keeper(product, folder, job) for product in products]
        self._begins = {keeper.name: self._rng.choice((0, 0, 1, 2)) for keeper in self._keepers}
        self._kills_beside = not kinds or "kill" in kinds
        chance = 1.0 if RESTORED in kinds else 0.0 if kinds else RESTORED_CHANCE
        self._restoring = Restoring(seed, rounds, self._keepers, folder / "restored", chance)
        places = [(number, keeper.name) for number in range(1, rounds) for keeper in self._keepers]
        self._planned = Counter(self._rng.choices(places, k=faults) if places else [])

    def __call__(self) -> None:
        for number in range(self._rounds):
            beside = self._beside()
            self._writes.run(self._operations // self._rounds)
            if self._rng.random() < 0.3:
                self._writes.expire()
            disturbed = self._writes.disturb(self._rng)
            if disturbed is not None:
                said(f"seed {self._seed} round {number}: {disturbed}")
                self._report.faults[disturbed] += 1
            self._meanwhile(number, beside)
            pause = self._writes.pause(self._truth)
            for keeper in self._in_turn(number):
                self._visit(number, keeper, pause)
            if self._writes.can_be_restored:
                for keeper, step in self._restoring.after(number, self._writes, self._truth, pause):
                    self._tell(number, keeper, step, RESTORED)
        self._report.seeds += 1

    def _in_turn(self, number: int) -> list[Keeper]:
        """The products whose turn it is in this round; in the end all of them."""
        chosen = list(self._keepers)
        self._rng.shuffle(chosen)
        is_last = number == self._rounds - 1
        return [
            keeper
            for keeper in chosen
            if is_last
            or self._planned[number, keeper.name]
            or (number >= self._begins[keeper.name] and self._rng.random() < (0.35 if keeper.name == "as-of" else 0.6))
        ]

    def _beside(self) -> list[tuple[Keeper, Running]]:
        """Some run while there are writes, up to the last pause, and so get a little further."""
        pauses = self._truth.pauses()
        if not pauses:
            return []
        chosen = [one for one in self._keepers if one.has_begun and self._rng.random() < _BESIDE]
        begun = [(one, one.begin(one.job(pauses[-1], {"only": "advance"}))) for one in chosen]
        return [(one, self._perhaps_killed(child)) for one, child in begun]

    def _perhaps_killed(self, child: Running) -> Running:
        """Some are killed while there are writes. (That of Spark runs in this process.)"""
        if not self._kills_beside or not isinstance(child, Child) or self._rng.random() > _KILLED_BESIDE:
            return child
        return Killed(child, self._rng.random() ** 2 * 2.0)

    def _meanwhile(self, number: int, beside: list[tuple[Keeper, Running]]) -> None:
        for keeper, child in beside:
            outcome = child.outcome()
            if isinstance(child, Killed):
                self._report.faults["kill beside the writes"] += child.was_running
            elif not outcome.is_equal and not is_a_limit(keeper, outcome):
                self._differ(number, keeper, "beside the writes", f"{outcome.kind}: {outcome.text}")

    def _visit(self, number: int, keeper: Keeper, pause: ClusterTime) -> None:
        for _ in range(self._planned[number, keeper.name]):
            able = self._hand.faults(keeper)
            if not able:
                break
            fault = self._rng.choice(able)
            self._tell(number, keeper, self._hand.do(fault, keeper, pause), fault)
        outcome = keeper.run(keeper.job(pause))
        self._report.compared[keeper.name] += 1
        if is_a_limit(keeper, outcome):
            self._report.refused(keeper.name, outcome.text)
            self._begin_again(keeper)
        elif not outcome.is_equal:
            self._differ(number, keeper, "nothing was done to it", f"{outcome.kind}: {outcome.text}")
            self._begin_again(keeper)
        elif self._rng.random() < 0.8:
            keeper.keep()

    def _tell(self, number: int, keeper: Keeper, step: Step, fault: str) -> None:
        self._report.faults[fault] += 1
        said(f"seed {self._seed} round {number}: {keeper.name}: {step.what}: {step.outcome.kind}")
        if step.outcome.kind == "refused":
            self._report.refused(keeper.name, step.outcome.text)
        if step.wrong:
            self._differ(number, keeper, step.what, step.wrong)

    def _begin_again(self, keeper: Keeper) -> None:
        """A store that is wrong would stay so to the end, and hide later faults. If positions are in MongoDB, it is
        kept, since the effects up to them belong to them."""
        if keeper.product.has_leases:
            return
        shutil.rmtree(keeper.root, ignore_errors=True)
        keeper.forget()

    def _differ(self, number: int, keeper: Keeper, what: str, text: str) -> None:
        where = f"seed {self._seed} round {number}"
        said(f"{where}: {keeper.name}: {what}: {text[:1500]}")
        kind = re.sub(r"\d+", "N", what.partition(" ")[0] if " of " in what else what)
        self._report.differ(where, f"{keeper.name}: {kind}", f"({what}) {text}")
