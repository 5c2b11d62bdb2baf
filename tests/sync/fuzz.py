"""Random workloads on a source while it is copied and followed, and both ends compared byte for byte at every pause.

    python -m tests.sync.fuzz --seed 7                              one seed; the same again writes the same
    python -m tests.sync.fuzz --seeds 1-20 --version 5.0.4 --to-version 6.0.27
    python -m tests.sync.fuzz --seed 7 --sharded                    from a cluster whose chunks and shards move
    python -m tests.sync.fuzz --seed 7 --steps 300 --rounds 4
    python -m tests.sync.fuzz --seed 7 --planted "a window torn"    a fault is put back that must be found

Of every five seeds, one gives databases other names, one leaves collections out, one has four lanes; every second one
is cut over and reversed at its end. In each round the sync ends in the middle and another goes on; the product's
verification runs while the writers write. The workload of a seed is always the same; how it and the sync interleave
depends on the machine. Exit code 1 if anything differs, or if nothing was compared; the last line gives the totals.
"""

from __future__ import annotations

import argparse
import random
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Final

from pymongo import MongoClient

from tailrace.embedded import ReplicaSet, ShardedCluster
from tailrace.errors import TailraceError
from tailrace.sync import Sync
from tests.seeds import end_in_order, parser_of_seeds
from tests.sync.both import Both, ClusterSource, ReplicaSetSource, replica_set
from tests.sync.planted import PLANTED, planted_here

VERSION: Final = "6.0.27"
_PATIENCE_S: Final = 600
#: A newer server no longer accepts some binary values.
_INVALID_COLUMN: Final = 378


@dataclass
class Report:
    """What was played, and what was found."""

    seeds: int = 0
    commands: int = 0
    comparisons: int = 0
    documents: int = 0
    verified: int = 0
    cut_overs: int = 0
    refused: int = 0
    differences: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return (
            f"{self.seeds} seeds, {self.commands:,} commands, {self.comparisons} comparisons of {self.documents:,} "
            f"documents, {self.verified:,} verified while writes went on, {self.cut_overs} cut-overs, "
            f"{self.refused} refused, "
            f"{len(self.differences)} differences"
        )


@dataclass(frozen=True)
class Chosen:
    """What is played with a seed."""

    seed: int
    steps: int = 300
    rounds: int = 3
    capped: bool = True
    series: bool = False
    columns: bool = True
    #: Whether there are documents of 16 MB, and larger transactions.
    large: bool = True
    #: Whether to stop as soon as a comparison has found something: for faults that must be found.
    to_first: bool = False

    def options(self, databases: tuple[str, ...]) -> dict[str, Any]:
        """Settings of the sync."""
        name = f"seed{self.seed}"
        match self.seed % 5:
            case 1:
                return {"name": name, "rename": {one: f"{one}_there" for one in databases}}
            case 2:
                return {"name": name, "lanes": 4}
            case 3:
                return {"name": name, "excluded": ("*.c2", f"{databases[-1]}.*", "names*.b")}
        return {"name": name}


class Background:
    """A sync in a thread of the harness: an error that ends it is kept, and raised at the end."""

    def __init__(self, sync: Sync, **run: Any) -> None:
        self._sync = sync
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, kwargs=run, daemon=True)
        self._thread.start()

    def _run(self, **run: Any) -> None:
        try:
            self._sync.run(**run)
        except BaseException as error:  # noqa: BLE001  raised by ``end``
            self._error = error

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def end(self) -> None:
        """Stop it, and raise what ended it."""
        self._sync.stop()
        self._thread.join(_PATIENCE_S)
        assert not self._thread.is_alive(), "the sync does not stop"
        if self._error is not None:
            raise self._error


class Play:
    """One seed between two deployments."""

    def __init__(self, source: Any, target: ReplicaSet, chosen: Chosen, report: Report) -> None:
        self.source, self.target = source, target
        self.chosen, self.report = chosen, report
        self.rng = random.Random(f"tailrace sync play {chosen.seed}")
        self.options = chosen.options(source.databases)
        self.both = Both(source, target, self.options)

    def __call__(self) -> None:
        """Play it. Differences are reported; an error of the sync counts as one."""
        try:
            self._play()
        except TailraceError as error:
            outside = (
                "selection" in str(error) and "excluded" in self.options
            )  # a collection came from one that is left out
            if outside or (error.code == _INVALID_COLUMN and self.source.version < self.target.version):
                self.report.refused += 1
            else:
                self._differs(f"the sync ended: {error}")
        except Exception:  # noqa: BLE001  whatever our side raises besides its own errors is a difference
            self._differs(traceback.format_exc())
        finally:
            self.report.seeds += 1
            self.report.commands += self.source.sent

    def _play(self) -> None:
        chosen = self.chosen
        self.source.write(chosen.steps)  # the documents that the copy finds
        for number in range(chosen.rounds):
            self._round(number)
            if chosen.to_first and self.report.differences:
                return
        if chosen.seed % 2 == 0 and not isinstance(self.source, ClusterSource):
            self._cut_over()

    def _round(self, number: int) -> None:
        chosen = self.chosen
        with self._sync() as sync:
            background = Background(sync)
            with self.source.writing(chosen.steps):
                time.sleep(self.rng.uniform(0.0, 2.0))
                if number and self.rng.random() < 0.7:
                    self._verify(background)
            if self.rng.random() < 0.5:
                background.end()
            else:
                time.sleep(self.rng.uniform(0.0, 1.0))
                background.end()
        with self._sync() as sync:
            sync.run(to_present=True)
        self._compare(f"round {number}")

    @contextmanager
    def _sync(self) -> Iterator[Sync]:
        with Sync(self.source.uri, self.target.uri, lease_s=10.0, **self.options) as sync:
            yield sync

    def _verify(self, background: Background) -> None:
        """The product's own verification, while writes go on. It must find nothing."""
        with self._sync() as sync:
            deadline = time.monotonic() + _PATIENCE_S
            while not sync.status().is_consistent and background.is_running:
                assert time.monotonic() < deadline, "the target does not become equal"
                time.sleep(0.1)
            if not background.is_running:
                return
            try:
                found = sync.verify()
            except TailraceError:
                if background.is_running:
                    raise
                return  # ``end`` reports what has ended the sync
            self.report.verified += found.documents
            for one in found.differences:
                self._differs(f"the verification while writes went on: {one}")

    def _compare(self, when: str, *, held: bool = True) -> None:
        found, documents = self.both.differences(held=held)
        self.report.comparisons += 1
        self.report.documents += documents
        for one in found:
            self._differs(f"{when}: {one}")

    def _cut_over(self) -> None:
        """The target takes the source's place and is written to, and the source follows it."""
        with self._sync() as sync:
            background = Background(sync)
            try:
                with self._sync() as other:
                    other.cutover(block=False, sample=None)
            finally:
                background.end()
            self._compare("after the cut-over", held=False)
            with MongoClient[Any](self.target.uri) as client:
                for database in self.both.on_target():
                    client[database]["c0"].update_many({}, {"$set": {"after": "the cut-over"}})
                    client[database]["new"].insert_one({"_id": self.chosen.seed})
            with self._sync() as forth, forth.reverse() as back:
                back.run(to_present=True)
                self.both.turned = True
                self._compare("after the way back")
        self.report.cut_overs += 1

    def _differs(self, text: str) -> None:
        self.report.differences.append(f"seed {self.chosen.seed}: {text}")


def run_seed(source: ReplicaSet | ShardedCluster, target: ReplicaSet, chosen: Chosen, report: Report) -> None:
    """Play one seed, and leave nothing behind if source and target keep running."""
    kind: Callable[..., Any] = ClusterSource if isinstance(source, ShardedCluster) else ReplicaSetSource
    played = kind(source, chosen)
    try:
        Play(played, target, chosen, report)()
    finally:
        played.close()
        with MongoClient[Any](target.uri) as client:
            for name in client.list_database_names():
                if name not in ("admin", "config", "local"):
                    client.drop_database(name)


def main(arguments: list[str] | None = None) -> int:
    options = _arguments(arguments)
    end_in_order()
    report = Report()
    told = 0
    with ExitStack() as stack, planted_here(options.planted) if options.planted else nullcontext():
        target = stack.enter_context(replica_set(options.to_version or options.version))
        source: Any = None
        for seed in options.seeds:
            begun = time.monotonic()
            if options.sharded:
                from tests.products.deployments import cluster_of

                with cluster_of(options.version) as cluster:
                    run_seed(cluster, target, _chosen(options, seed), report)
            else:
                source = source or stack.enter_context(replica_set(options.version))
                run_seed(source, target, _chosen(options, seed), report)
            print(f"seed {seed}: {time.monotonic() - begun:.0f} s; so far {report}", flush=True)
            for text in report.differences[told : told + options.show]:
                print(f"DIFFERENCE {text}", flush=True)
            told = len(report.differences)
    print(f"{options.version} to {options.to_version or options.version}: {report}", flush=True)
    if not report.comparisons:
        print("NOTHING was compared: every seed was refused", flush=True)
    return 1 if report.differences or not report.comparisons else 0


def _chosen(options: argparse.Namespace, seed: int) -> Chosen:
    old = options.version.startswith("4.")
    # A newer target refuses values that the older source holds, and then nothing is compared: one seed in ten shows
    # that.
    columns = not (options.version < "6" <= (options.to_version or options.version)) or seed % 10 == 0
    capped = options.capped and not old
    return Chosen(seed, options.steps, options.rounds, capped=capped, series=options.series, columns=columns)


def _arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = parser_of_seeds("tests.sync.fuzz", __doc__)
    parser.add_argument("--version", default=VERSION, help=f"of the source ({VERSION})")
    parser.add_argument("--to-version", default="", help="of the target (the source's)")
    parser.add_argument("--sharded", action="store_true", help="from a cluster")
    parser.add_argument("--steps", type=int, default=300, help="of the writers in a round (300)")
    parser.add_argument("--rounds", type=int, default=3, help="pauses at which both are compared (3)")
    parser.add_argument("--series", action="store_true", help="with time series")
    parser.add_argument("--no-capped", dest="capped", action="store_false", help="without capped collections")
    parser.add_argument("--planted", default="", choices=["", *PLANTED], help="a fault to be put back")
    parser.add_argument("--show", type=int, default=10, help="differences to print of a seed (10)")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
