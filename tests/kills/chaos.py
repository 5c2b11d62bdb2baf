"""Listeners in four processes on three members, while both are killed and stopped and their clocks are wrong.

    python -m tests.kills.chaos --seed 7 --seconds 600
    python -m tests.kills.chaos --seed 7 --seconds 60 --planted 'no fence'      must find something

Processes are killed, stopped for longer than their leases, most often in a handler that is about to write, and
restarted; their wall clocks are up to 100 s off, and are moved by an hour; their monotonic clocks run up to 5 % too
fast or too slow. Members are killed and stopped, the primary steps down, and two of three are away for a while. The
seed decides what is written and what the hands do; when it happens depends on the machine.

At the end each change has had its effect exactly once (in transactions) or at least once, in order for each document,
with no effect of an older owner after a newer one's; no committed position went back, and no lease was taken from an
owner who held it. Exit code 1 if any of that is violated, or if too little happened: too few changes, or a kind of
fault that never hit.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pymongo
from pymongo.errors import PyMongoError

from tailrace.embedded import ReplicaSet
from tests.consumer.ordeal import check_history
from tests.kills.hands import LISTENER_FAULTS, MEMBER_FAULTS, FaultLog, ListenerHand, MemberHand
from tests.kills.leases import LeaseReader
from tests.kills.orders import Orders
from tests.kills.planted import PLANTED
from tests.kills.processes import LISTENERS, Processes
from tests.seeds import end_in_order

_DATABASE: Final = "chaos"
#: A member that does not answer is noticed soon: the drivers' own limits are half a minute.
_OPTIONS: Final = (
    "&heartbeatFrequencyMS=1000&connectTimeoutMS=3000&socketTimeoutMS=15000&serverSelectionTimeoutMS=15000"
)
#: How much longer than asked for it goes on if too little has happened.
_LONGER_S: Final = 600.0
_PROGRESS_S: Final = 30.0


@dataclass
class Result:
    """``violations``: a sentence for each; ``missing``: what did not happen often enough."""

    changes: int = 0
    effects: dict[str, int] = field(default_factory=dict)
    twice: dict[str, int] = field(default_factory=dict)
    tried: dict[str, int] = field(default_factory=dict)
    hits: dict[str, int] = field(default_factory=dict)
    positions: int = 0
    acquisitions: int = 0
    takeovers: int = 0
    #: Writes of stopped owners that were refused.
    refused: int = 0
    #: Effects by processes whose wall clock was wrong.
    by_skewed: int = 0
    violations: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        return not self.violations and not self.missing

    def told(self) -> str:
        lines = [f"{self.changes} changes; faults that hit, of those tried: "]
        lines[0] += ", ".join(f"{kind} {self.hits.get(kind, 0)}/{count}" for kind, count in sorted(self.tried.items()))
        for name, count in self.effects.items():
            lines.append(f"{name}: {count} effects, {self.twice[name]} of them again")
        lines.append(
            f"leases: {self.positions} positions, {self.acquisitions} acquisitions, {self.takeovers} taken over; "
            f"{self.refused} stale writes refused; {self.by_skewed} effects under a wrong wall clock"
        )
        lines += [f"NOT ENOUGH: {one}" for one in self.missing]
        lines += [f"VIOLATED: {one}" for one in self.violations[:20]]
        lines.append(f"violations: {len(self.violations)}")
        return "\n".join(lines)


@dataclass
class Chaos:
    """Call ``run()``. It goes on for ``seconds``, and longer, but not for ever, until so many changes were written and
    each kind of fault has hit so often. What is missing in the end is reported.

    ``listeners``, ``faults``  all, or some of them
    ``planted``                a fault of the processes, of ``planted.py``
    """

    deployment: ReplicaSet
    folder: Path
    seed: int
    seconds: float
    listeners: Sequence[str] = LISTENERS
    faults: Sequence[str] = (*LISTENER_FAULTS, *MEMBER_FAULTS)
    planted: str | None = None
    changes_min: int = 200
    hits_min: int = 1
    processes: int = 4
    lease_seconds: float = 2.0
    #: A handler pauses once in so many changes.
    pauses_one_in: int = 40
    #: How long the users wait between two changes, about.
    between_changes_s: float = 0.02
    #: How long a hand waits between two faults, about.
    rest_s: float = 2.0
    #: How long a member is away, from and to.
    harms_s: tuple[float, float] = (3.0, 9.0)
    #: After so long without any progress at the end, what is not handled never will be.
    patience_s: float = 180.0

    def run(self) -> Result:
        uri = self.deployment.uri + _OPTIONS
        self._client = pymongo.MongoClient[Any](uri)
        self._effects = self._client[_DATABASE + "_effects"]
        for name in (*self.listeners, "leases", "newest", "violations", "refused"):
            self._effects.create_collection(name)
        self._orders = Orders(uri, _DATABASE, self.seed, pause_s=self.between_changes_s)
        self._leases = LeaseReader(uri, self._effects.name)
        self._leases.start()
        self._processes = Processes(
            uri,
            _DATABASE,
            self.folder,
            self.seed,
            count=self.processes,
            lease_seconds=self.lease_seconds,
            listeners=self.listeners,
            pauses_one_in=self.pauses_one_in,
            planted=self.planted,
        )
        self._log = FaultLog(self.folder / "faults")
        chosen = [tuple(one for one in kinds if one in self.faults) for kinds in (LISTENER_FAULTS, MEMBER_FAULTS)]
        common: tuple[Any, ...] = (self.seed, self._log, self.rest_s)
        self._hands = (
            ListenerHand(self._processes, self._leases.history, chosen[0], *common),
            MemberHand(self.deployment, uri, chosen[1], *common, harms_s=self.harms_s),
        )
        result = Result()
        try:
            self._harm(result)
            self._processes.finish()
            self._leases.finish()
        finally:
            self._processes.kill()
        self._judge(result)
        self._client.close()
        return result

    # -- what happens -----------------------------------------------------------------------------------------------

    def _harm(self, result: Result) -> None:
        """Write and harm, then let everything come to rest and be handled."""
        self._processes.start()
        begun = told = time.monotonic()
        for part in (self._orders, *self._hands):
            part.start()
        while (lasted := time.monotonic() - begun) < self.seconds or self._missing():
            if lasted > 3 * self.seconds + _LONGER_S:
                break
            time.sleep(0.2)
            self._check_parts()
            if time.monotonic() - told > _PROGRESS_S:
                told = time.monotonic()
                done, faults = self._orders.changes, self._log.hits.total()
                seen = f"{len(self._leases.history.violations) + len(self._processes.violations)} violations so far"
                print(f"{lasted:7.1f} s  {done} changes, {faults} faults hit, {seen}", file=sys.stderr, flush=True)
        for hand in self._hands:
            hand.finish()
        self.deployment.wait_until_ready()
        self._orders.finish()
        result.missing = self._missing()
        left = self._rest()
        result.violations += [f"{name}: not handled to the end" for name in left]

    def _rest(self) -> list[str]:
        """Wait until everything is handled, as long as there is progress. Returns the listeners that are not done."""
        moved, before = time.monotonic(), -1
        while left := self._unhandled():
            self._check_parts()
            if self._leases.history.positions != before:
                moved, before = time.monotonic(), self._leases.history.positions
            elif time.monotonic() - moved > self.patience_s:
                break
            time.sleep(0.3)
        return left

    def _check_parts(self) -> None:
        self._processes.running()
        for part in (self._orders, *self._hands):
            part.check()

    def _missing(self) -> list[str]:
        """What has not happened often enough yet."""
        missing = [
            f"{kind} hit {self._log.hits[kind]} times" for kind in self.faults if self._log.hits[kind] < self.hits_min
        ]
        if self._orders.changes < self.changes_min:
            missing.append(f"{self._orders.changes} changes")
        return missing

    def _seen(self, name: str) -> dict[int, list[dict[str, Any]]]:
        return {one["_id"]: one["seen"] for one in self._effects[name].find()}

    def _unhandled(self) -> list[str]:
        """The listeners that have not come to the last change of every document."""
        with suppress(PyMongoError):
            found = {name: self._seen(name) for name in self.listeners}
            last = {
                name: {key: max(one["n"] for one in seen) for key, seen in documents.items()}
                for name, documents in found.items()
            }
            wanted = {key: n for key, n in self._orders.written.items() if n}
            return [name for name in self.listeners if last[name] != wanted]
        return list(self.listeners)

    # -- what is judged ---------------------------------------------------------------------------------------------

    def _judge(self, result: Result) -> None:
        history = self._leases.history
        result.changes = self._orders.changes
        result.tried, result.hits = dict(self._log.tried), dict(self._log.hits)
        result.positions, result.acquisitions = history.positions, history.acquisitions
        result.takeovers = history.takeovers.total()
        result.refused = self._effects["refused"].count_documents({})
        for name in self.listeners:
            self._judge_listener(name, result)
        if "clock" in self.faults and not result.by_skewed:
            result.missing.append("no effect by a process whose clock is wrong")
        result.violations += [str(one) for one in self._effects["violations"].find({}, {"_id": 0})]
        result.violations += history.violations + self._processes.violations

    def _judge_listener(self, name: str, result: Result) -> None:
        seen = self._seen(name)
        result.effects[name] = sum(map(len, seen.values()))
        result.twice[name] = sum(len(one) - len({effect["n"] for effect in one}) for one in seen.values())
        result.by_skewed += sum(effect["process"] in self._processes.skewed for one in seen.values() for effect in one)
        for key, written in self._orders.written.items():
            try:
                check_history(seen.get(key, []), written, exactly_once=name == "lanes")
            except AssertionError as error:
                result.violations.append(f"{name}, document {key} with {written} changes: {error}")


#: Transactions of killed processes are ended sooner than after the server's 60 s.
PARAMETERS: Final = {"transactionLifetimeLimitSeconds": 20}


def run(seed: int, seconds: float, version: str, folder: Path, **options: Any) -> bool:
    """Run a chaos on a deployment of its own, and report on standard output. Returns whether all checks passed."""
    begun = time.monotonic()
    with ReplicaSet(3, version=version, oplog_size_mb=1000, parameters=PARAMETERS) as deployment:
        result = Chaos(deployment, folder, seed, seconds, **options).run()
    print(result.told())
    verdict = "all held" if result.holds else "NOT all held"
    print(f"chaos, seed {seed}, {version}: {verdict}, {time.monotonic() - begun:.0f} s", flush=True)
    return result.holds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=600.0, help="default: 600")
    parser.add_argument("--version", default="6.0.27", help="of the server")
    parser.add_argument("--changes", type=int, default=1000, metavar="N", help="at least (default: 1000)")
    parser.add_argument("--hits", type=int, default=3, metavar="N", help="of each kind of fault at least (default: 3)")
    parser.add_argument("--planted", choices=sorted(PLANTED), help="a fault that must be found")
    parser.add_argument("--folder", type=Path, help="where the log of faults is kept (default: nowhere)")
    args = parser.parse_args()
    end_in_order()
    with tempfile.TemporaryDirectory(prefix="tailrace-chaos-") as temporary:
        folder = args.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        options = {"planted": args.planted, "changes_min": args.changes, "hits_min": args.hits}
        return 0 if run(args.seed, args.seconds, args.version, folder, **options) else 1


if __name__ == "__main__":
    sys.exit(main())
