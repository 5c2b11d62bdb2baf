"""A sync that is killed at random moments of its copy, its catch-up, its definitions and its following, while writers
of every kind write, the primaries of both ends step down, and the chunks of a source that is a cluster move.

    python -m tests.kills.syncing --seed 7 --kills 100 --step-downs 30
    python -m tests.kills.syncing --seed 7 --kills 20 --version 5.0.4 --to-version 6.0.27
    python -m tests.kills.syncing --seed 7 --kills 20 --moves 30 --step-downs 10 --sharded
    python -m tests.kills.syncing --seed 7 --kills 100 --sync 3     the fourth sync of such a run alone

A sync is killed some times and then brought to its end, and another begins. Each has a seed of its own, which decides
what is written, when it is killed and what is harmed; how these coincide depends on the machine. ``--step-downs``
counts those of each end. Each kill and harm is reported on standard error. After each kill, if the position on the
target says that the target equals the source at it, then that is compared: each collection, by its UUID, with what the
source held at that time. At the end of each sync everything is compared byte for byte: documents, catalogue and
indexes. Exit code 1 where anything differs.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

from bson.binary import Binary
from pymongo import MongoClient
from pymongo.errors import AutoReconnect, OperationFailure
from pymongo.read_concern import ReadConcern

from tailrace.embedded import ReplicaSet, ShardedCluster
from tests.kills.sync_harms import MOVE, STEP_DOWN_SOURCE, STEP_DOWN_TARGET, Harm, Harms
from tests.kills.sync_sources import WrittenCluster, WrittenSet, clear
from tests.products.deployments import cluster_of
from tests.seeds import end_in_order
from tests.sync.both import STATE_DB, is_users, normal, replica_set
from tests.sync.equality import differences, documents, held, of_documents

ROOT: Final = Path(__file__).parents[2]
_PATIENCE_S: Final = 900
#: Errors of a snapshot whose collection did not exist, was not yet in the catalogue, or that is too old.
_UNAVAILABLE: Final = frozenset({26, 239, 246, 73})
_KILLS_A_SYNC: Final = 10
_LEASE_S: Final = 5
#: Between two harms, on average.
_PAUSE_S: Final = 5.0
_PHASES: Final = ("copy", "catchUp", "follow")
#: Documents a second, at most: in lives that are to end in the copy, and in the others.
_SLOW, _QUICK = "30", "300"


@dataclass
class Result:
    """``kills`` by the phase in which they hit."""

    kills: Counter[str] = field(default_factory=Counter)
    harms: Counter[str] = field(default_factory=Counter)
    syncs: int = 0
    commands: int = 0
    positions: int = 0
    documents: int = 0
    wrong: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        kills = ", ".join(f"{count} in {phase}" for phase, count in sorted(self.kills.items()))
        harms = "".join(f", {kind} {count} times" for kind, count in sorted(self.harms.items()))
        return (
            f"{self.syncs} syncs, {self.kills.total()} kills ({kills}){harms}, {self.commands:,} commands, "
            f"{self.positions} positions and all ends compared, {self.documents:,} documents, "
            f"{len(self.wrong)} differences"
        )


@dataclass(frozen=True)
class Wanted:
    """How much harm a run does in all. ``step_downs``: of each end."""

    kills: int
    step_downs: int = 0
    moves: int = 0

    def divided(self, kills_each: int) -> list[Wanted]:
        """Shares of syncs, each killed so often at most, and harmed as often."""
        count = max(1, *(-(-one // kills_each) for one in (self.kills, self.step_downs, self.moves)))
        shares = [(one // count, one % count) for one in (self.kills, self.step_downs, self.moves)]
        return [Wanted(*(each + (place < rest) for each, rest in shares)) for place in range(count)]


class Killed:
    """One sync after the other between two deployments. If the source is a cluster, each sync has a new one.

    ``source``: the replica set, or a function that makes a cluster.
    """

    def __init__(
        self,
        source: ReplicaSet | Callable[[], AbstractContextManager[ShardedCluster]],
        target: ReplicaSet,
        folder: Path,
        seed: int,
        *,
        capped: bool = True,
    ) -> None:
        self._source, self._target, self._folder = source, target, folder
        self._seed, self._capped = seed, capped
        self._begun = time.monotonic()
        self._process: subprocess.Popen[bytes] | None = None
        self.result = Result()

    def run(self, wanted: Wanted, *, only: int | None = None) -> Result:
        """Do all of it, divided among syncs. ``only``: only the sync of this number."""
        for number, share in enumerate(wanted.divided(_KILLS_A_SYNC)):
            if only is None or number == only:
                self._one(number, share)
        return self.result

    @contextmanager
    def _written(self, number: int) -> Iterator[WrittenSet | WrittenCluster]:
        seed = self._seed * 1000 + number
        if not isinstance(self._source, ReplicaSet):
            with self._source() as cluster:
                yield WrittenCluster(cluster, seed)
            return
        versions = (self._source.version, self._target.version)
        columns = versions[0] >= "6" or versions[1] < "6"  # newer targets refuse invalid ones (378)
        with closing(WrittenSet(self._source, seed, capped=self._capped, columns=columns)) as written:
            yield written

    def _one(self, number: int, share: Wanted) -> None:
        """One sync, from its beginning to its end."""
        self._rng = random.Random(f"tailrace killed syncs {self._seed} {number}")
        with self._written(number) as written:
            self._written_by = written
            kinds: dict[str, Harm] = {
                STEP_DOWN_SOURCE: written.step_down,
                STEP_DOWN_TARGET: lambda _: f"member {self._target.step_down()} is the target's primary",
                MOVE: written.move_chunk,
            }
            self._harms = harms = Harms(kinds, f"harms {self._seed} {number}", self._tell, _PAUSE_S)
            counts = {STEP_DOWN_SOURCE: share.step_downs, STEP_DOWN_TARGET: share.step_downs, MOVE: share.moves}
            try:
                written.begin()
                with written.running():
                    with harms.under_way(counts):
                        for phase in self._phases(share.kills):
                            self._live(number, phase)
                        self._begin()
                        self._wait(lambda: harms.are_done)
                    if harms.done:
                        self._goes_on()
                self._end(f"sync {number}")
                self.result.syncs += 1
                self.result.commands += written.sent
            finally:
                self._kill()
                self.result.harms += harms.done
                clear(self._target.uri)
        self._tell(f"sync {number} compared; so far {self.result}")

    def _tell(self, text: str) -> None:
        print(f"{time.monotonic() - self._begun:7.1f} s  {text}", file=sys.stderr, flush=True)

    # -- its lives --------------------------------------------------------------------------------------------------

    def _command(self, *more: str) -> list[str]:
        lanes = "4" if self._seed % 3 == 2 else "1"
        options = ["--lease-seconds", str(_LEASE_S), "--documents-per-second", _QUICK, "--lanes", lanes]
        return [sys.executable, "-m", "tailrace", "sync", self._written_by.uri, self._target.uri, *options, *more]

    def _begin(self, *more: str) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            with (self._folder / "log").open("ab") as log:
                self._process = subprocess.Popen(
                    self._command(*more), cwd=ROOT, stdout=log, stderr=log, start_new_session=True
                )
        return self._process

    def _phases(self, kills: int) -> list[str]:
        """The phases in which the lives of one sync are to end. A copy is not repeated once it is done, so its lives
        come first."""
        lives = ("copy", "copy", "catchUp", "catchUp", "follow", "follow", "follow")
        return sorted((self._rng.choice(lives) for _ in range(kills)), key=_PHASES.index)

    def _live(self, number: int, wanted: str) -> None:
        """Begin, and be killed in the wanted phase or a later one, either as soon as it is reached or some time after
        that."""
        rng = self._rng
        process = self._begin("--documents-per-second", _SLOW if wanted == "copy" else _QUICK)
        epoch = self._epoch()
        self._wait(lambda: self._epoch() > epoch)
        self._wait(lambda: _PHASES.index(self._document()["phase"]) >= _PHASES.index(wanted))
        time.sleep(rng.choice((rng.uniform(0, 0.3), rng.uniform(0, 4.0))))
        if wanted == "follow":  # mostly at a position, and not in the middle of a definition
            self._wait(lambda: self._is_equal(self._document()))
        assert process.poll() is None, self._log()
        self._kill()
        document = self._document()
        phase = str(document["phase"])
        if document.get("barrier"):
            phase = f"{phase}, a definition"
        self.result.kills[phase] += 1
        self._tell(f"sync {number}, kill {self.result.kills.total()}: in {phase}")
        with self._harms.alone:
            self._compare_position()

    def _goes_on(self) -> None:
        """After the last harm the position still moves."""
        before = self._document().get("time")
        self._wait(lambda: self._document().get("time") != before)

    def _kill(self) -> None:
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def _end(self, what: str) -> None:
        """Nobody writes any more: let the sync come to the end, and compare everything."""
        self._kill()
        process = self._begin("--once")
        try:
            status = process.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.result.wrong.append(f"{what} does not come to its end: {self._log()}")
            return
        if status:
            self.result.wrong.append(f"{what} ended with {status}: {self._log()}")
            return
        left = self._written_by.holds()
        right = held(self._target.uri, but=[STATE_DB], selected=is_users)
        self.result.documents += sum(len(one.documents) for one in left.values())
        known = normal(self._written_by.version, self._target.version, ages=False)
        self.result.wrong += [f"{what}: {one}" for one in differences(left, right, known=known)]

    def _wait(self, condition: Any) -> None:
        deadline = time.monotonic() + _PATIENCE_S
        while not condition():
            process = self._process
            if process is not None and process.poll() is not None:
                raise AssertionError(f"the sync has ended: {self._log()}")
            assert time.monotonic() < deadline, f"the sync does not get on: {self._log()}"
            time.sleep(0.1)

    def _log(self) -> str:
        return (self._folder / "log").read_text(errors="replace")[-2000:]

    # -- what the target says of itself -----------------------------------------------------------------------------

    def _document(self) -> dict[str, Any]:
        """The sync's. While the target has no primary, this waits."""
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            try:
                with MongoClient[Any](self._target.uri) as client:
                    syncs = client[STATE_DB].get_collection("syncs", read_concern=ReadConcern("majority"))
                    return syncs.find_one({"_id": "sync"}) or {}
            except AutoReconnect:
                assert time.monotonic() < deadline, "the target has no primary"

    def _epoch(self) -> int:
        return int(self._document().get("epoch", 0))

    def _compare_position(self) -> None:
        """While writers go on: the target as it is now against the source as it was at the position. A commit that was
        running at the kill may still complete meanwhile: then there is nothing to compare."""
        document = self._document()
        if not self._is_equal(document) or not self._written_by.can_be_read_at:
            return
        compared, wrong = 0, list[str]()
        with MongoClient[Any](self._written_by.uri) as source, MongoClient[Any](self._target.uri) as target:
            for one in target[STATE_DB]["collections"].find({"_id.sync": "sync"}):
                database, _, name = str(one["target"]).partition(".")
                uuid = Binary(bytes(one["_id"]["uuid"]), 4)
                try:
                    before = list(documents(source, database, uuid, at=document["time"]))
                except OperationFailure as error:
                    if error.code not in _UNAVAILABLE:
                        raise
                    continue
                found = of_documents(before, documents(target, database, name), bool(one["capped"]))
                compared += len(before)
                wrong += [f"{one['target']} at {document['time']}: {text}" for text in found]
        if self._document()["batch"] == document["batch"]:
            self.result.positions += 1
            self.result.documents += compared
            self.result.wrong += wrong

    @staticmethod
    def _is_equal(document: dict[str, Any]) -> bool:
        is_at_rest = document.get("phase") == "follow" and not document.get("barrier")
        return is_at_rest and bool(document["time"] >= document["hold"])


@dataclass(frozen=True)
class Between:
    """The versions of the two ends, and their numbers of members. ``sharded``: the source is a cluster."""

    version: str
    to_version: str = ""
    members: int = 1
    sharded: bool = False

    def __str__(self) -> str:
        kind = "a cluster of " if self.sharded else ""
        return f"{kind}{self.version} to {self.to_version or self.version}, {self.members} members each"

    @contextmanager
    def ends(self) -> Iterator[tuple[Any, ReplicaSet]]:
        """The source, or a function that makes one, and the target."""
        with ExitStack() as stack:
            target = stack.enter_context(replica_set(self.to_version or self.version, self.members))
            if self.sharded:
                yield partial(cluster_of, self.version), target
            else:
                yield stack.enter_context(replica_set(self.version, self.members)), target


def run(
    seed: int, wanted: Wanted, between: Between, folder: Path, *, capped: bool = True, only: int | None = None
) -> bool:
    """Run syncs on deployments of their own, and report on standard output. Returns whether all checks passed."""
    begun = time.monotonic()
    with between.ends() as (source, target):
        result = Killed(source, target, folder, seed, capped=capped).run(wanted, only=only)
    for text in result.wrong[:20]:
        print(f"DIFFERENCE {text}")
    verdict = "NOT all held" if result.wrong else "all held"
    print(f"sync, seed {seed}, {between}: {result}: {verdict}, {time.monotonic() - begun:.0f} s", flush=True)
    return not result.wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--sync", type=int, metavar="N", help="the sync of this number alone, from 0")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--step-downs", type=int, default=0, help="of each end")
    parser.add_argument("--moves", type=int, default=0, help="of chunks, with --sharded")
    parser.add_argument("--members", type=int, help="of each end (with step-downs 3, otherwise 1; a shard has one)")
    parser.add_argument("--version", default="6.0.27", help="of the source")
    parser.add_argument("--to-version", default="", help="of the target (the source's)")
    parser.add_argument("--sharded", action="store_true", help="from a cluster")
    parser.add_argument("--no-capped", dest="capped", action="store_false", help="without capped collections")
    args = parser.parse_args()
    if args.moves and not args.sharded:
        parser.error("a replica set has no chunks to move: --sharded")
    end_in_order()
    members = args.members or (3 if args.step_downs else 1)
    between = Between(args.version, args.to_version, members, args.sharded)
    wanted = Wanted(args.kills, args.step_downs, args.moves)
    with tempfile.TemporaryDirectory(prefix="tailrace-killed-syncs-") as folder:
        return 0 if run(args.seed, wanted, between, Path(folder), capped=args.capped, only=args.sync) else 1


if __name__ == "__main__":
    sys.exit(main())
