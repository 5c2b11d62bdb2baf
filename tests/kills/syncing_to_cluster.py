"""A sync to a sharded cluster that is killed at random moments, while chunks of the target move between its shards and
the shards' primaries step down.

    python -m tests.kills.syncing_to_cluster --seed 7 --kills 30 --moves 30 --step-downs 30

The source is a replica set with two writers: every kind of change to a sharded collection (the values of the shard key
among them), transactions over documents of both shards, indexes, and renames. Each kill and harm is reported on
standard error. At the end both ends are compared: documents byte for byte, catalogue and indexes. Exit code 1 where
anything differs.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

from pymongo import MongoClient
from pymongo.errors import OperationFailure, PyMongoError

from tailrace.embedded import EmbeddedError, ReplicaSet, ShardedCluster
from tests.kills.sync_harms import MOVE, STEP_DOWN_TARGET, Harm, Harms
from tests.seeds import end_in_order
from tests.sync.both import STATE_DB, beside
from tests.sync.mongos import WritingMongos
from tests.sync.test_sharded_target import REGIONS, change, made, order, unlike

ROOT: Final = Path(__file__).parents[2]
_ORDERS: Final = "shop.orders"
_PATIENCE_S: Final = 600
_LEASE_S: Final = 5
_PAUSE_S: Final = 4.0
#: Documents a second: a copy that lasts long enough to be killed.
_SLOW, _QUICK = "60", "2000"


class KilledToCluster:
    """``kills`` by the phase in which they hit; ``wrong`` names each difference."""

    def __init__(self, source: ReplicaSet, cluster: ShardedCluster, mongos: WritingMongos, folder: Path, seed: int):
        self._source, self._cluster, self._mongos, self._log_file = source, cluster, mongos, folder / "log"
        self._rng = random.Random(f"tailrace killed syncs to a cluster {seed}")
        self._seed = seed
        self._begun = time.monotonic()
        self._process: subprocess.Popen[bytes] | None = None
        self._step = 0
        self.kills: Counter[str] = Counter()
        self.harms: Counter[str] = Counter()
        self.wrong: list[str] = []
        kinds: dict[str, Harm] = {MOVE: self._move, STEP_DOWN_TARGET: self._step_down}
        self._harms = Harms(kinds, f"harms {seed}", self._tell, _PAUSE_S)

    def run(self, kills: int, *, moves: int, step_downs: int) -> None:
        stop = threading.Event()
        try:
            with MongoClient[Any](self._source.uri) as client:
                self._begin_source(client)
                with ExitStack() as stack:
                    for work in (self._write, self._define):
                        stack.enter_context(beside(partial(work, client, stop)))
                    stack.callback(stop.set)
                    for number in range(2):
                        self._live(slow=number < 2)
                    self._begin(_QUICK)
                    self._wait(lambda: self._document().get("phase") == "follow")
                    self._spread()
                    with self._harms.under_way({MOVE: moves, STEP_DOWN_TARGET: step_downs}):
                        for _ in range(max(0, kills - 2)):
                            self._live(slow=False)
                        self._begin(_QUICK)
                        self._wait(lambda: self._harms.are_done)
            self._compare()
        finally:
            self._kill()
            self.harms += self._harms.done

    def _tell(self, text: str) -> None:
        print(f"{time.monotonic() - self._begun:7.1f} s  {text}", file=sys.stderr, flush=True)

    # -- the source's writers ---------------------------------------------------------------------------------------

    @staticmethod
    def _begin_source(client: MongoClient[Any]) -> None:
        client.shop.orders.insert_many([order(number) for number in range(600)])
        client.shop.orders.create_index([("region", 1), ("_id", 1)])
        client.shop.plain.insert_many([{"_id": number} for number in range(20)])
        client.shop.moved.insert_many([{"_id": number} for number in range(20)])

    def _write(self, client: MongoClient[Any], stop: threading.Event) -> None:
        while not stop.wait(0.5):
            self._step += 1
            try:
                change(client, self._seed * 1_000_000 + self._step)
            except OperationFailure as error:  # its transaction has met the other writer's index
                if not error.has_error_label("TransientTransactionError"):
                    raise

    def _define(self, client: MongoClient[Any], stop: threading.Event) -> None:
        number = 0
        while not stop.wait(3.0):
            number += 1
            client.shop.moved.rename("renamed")
            client.shop.renamed.update_one({"_id": number % 20}, {"$set": {"number": number}})
            client.shop.renamed.rename("moved")
            client.shop.orders.create_index([(f"n{number % 3}", 1)])
            if number % 2:
                client.shop.orders.drop_index(f"n{number % 3}_1")
            if number % 5 == 0:
                client.shop.gone.drop()
                client.shop.gone.insert_one({"_id": number})

    # -- the target's harms -----------------------------------------------------------------------------------------

    def _spread(self) -> None:
        """Two of four regions on each shard."""
        for number, region in enumerate(REGIONS):
            self._again(partial(self._cluster.router.split, _ORDERS, {"region": region}), "the chunks are not divided")
            self._place({"region": region, "_id": 1}, f"shard{number % 2}")

    def _move(self, rng: random.Random) -> str:
        key = {"region": rng.choice(REGIONS), "_id": 1}
        owner = self._cluster.router.owner(_ORDERS, key)
        to = next(one for one in self._cluster.shards if one != owner)
        self._place(key, to)
        return f"region {key['region']} from {owner} to {to}"

    def _place(self, key: dict[str, Any], shard: str) -> None:
        """Meanwhile a commit of the sync may hold the chunk, or a move that lost its primary may still be running."""
        router = self._cluster.router

        def move() -> None:
            if router.owner(_ORDERS, key) != shard:
                router.move_chunk(_ORDERS, key, to=shard)

        self._again(move, f"the chunk of {key} does not move")
        assert router.owner(_ORDERS, key) == shard

    @staticmethod
    def _again(do: Callable[[], object], failure: str) -> None:
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            try:
                do()
                return
            except (PyMongoError, EmbeddedError) as error:
                if time.monotonic() > deadline:
                    raise AssertionError(failure) from error
                time.sleep(0.5)

    def _step_down(self, rng: random.Random) -> str:
        name = rng.choice(list(self._cluster.shards))
        self._cluster.step_down(name)
        return f"the primary of {name}"

    # -- the sync's lives -------------------------------------------------------------------------------------------

    def _begin(self, speed: str) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            options = ["--lease-seconds", str(_LEASE_S), "--documents-per-second", speed]
            options += ["--shard-key", f'{_ORDERS}={{"region": 1, "_id": 1}}']
            command = [sys.executable, "-m", "tailrace", "sync", self._source.uri, self._mongos.uri, *options]
            with self._log_file.open("ab") as log:
                self._process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, start_new_session=True)
        return self._process

    def _live(self, *, slow: bool) -> None:
        self._kill()
        epoch = self._document().get("epoch", 0)
        process = self._begin(_SLOW if slow else _QUICK)
        self._wait(lambda: self._document().get("epoch", 0) > epoch)
        time.sleep(self._rng.uniform(0, 4.0))
        assert process.poll() is None, self._log()
        self._kill()
        phase = str(self._document().get("phase", "before its state"))
        self.kills[phase] += 1
        self._tell(f"kill {self.kills.total()}: in {phase}")

    def _kill(self) -> None:
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def _compare(self) -> None:
        """Nobody writes any more."""
        self._kill()
        time.sleep(_LEASE_S)
        with made(self._source, self._mongos, lease_s=float(_LEASE_S)) as sync:
            sync.run(to_present=True)
            self.wrong += unlike(self._source, self._mongos)
            found = sync.verify()
        self.wrong += [str(one) for one in found.differences]

    def _document(self) -> dict[str, Any]:
        """The sync's, as the target shows it. While the shard that holds it has no primary, this waits."""
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            try:
                with MongoClient[Any](self._mongos.uri) as client:
                    return client[STATE_DB].syncs.find_one({"_id": "sync"}) or {}
            except PyMongoError:
                assert time.monotonic() < deadline, "the target does not answer"
                time.sleep(0.1)

    def _wait(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _PATIENCE_S
        while not condition():
            process = self._process
            assert process is None or process.poll() is None, f"the sync has ended: {self._log()}"
            assert time.monotonic() < deadline, f"the sync does not get on: {self._log()}"
            time.sleep(0.1)

    def _log(self) -> str:
        return self._log_file.read_text(errors="replace")[-3000:]


def run(seed: int, kills: int, *, moves: int, step_downs: int, version: str, folder: Path) -> bool:
    """Run on deployments of its own, and report on standard output. Returns whether all checks passed."""
    begun = time.monotonic()
    with (
        ReplicaSet(version=version) as source,
        ShardedCluster(2, version=version) as cluster,
        WritingMongos(cluster) as mongos,
    ):
        killed = KilledToCluster(source, cluster, mongos, folder, seed)
        killed.run(kills, moves=moves, step_downs=step_downs)
    for text in killed.wrong[:20]:
        print(f"DIFFERENCE {text}")
    counts = ", ".join(f"{count} in {phase}" for phase, count in sorted(killed.kills.items()))
    harms = "".join(f", {kind} {count} times" for kind, count in sorted(killed.harms.items()))
    verdict = f"{len(killed.wrong)} differences"
    print(
        f"sync to a cluster, seed {seed}, {version}: {killed.kills.total()} kills ({counts}){harms}: {verdict}, ",
        end="",
    )
    print(f"{time.monotonic() - begun:.0f} s", flush=True)
    return not killed.wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--moves", type=int, default=10, help="of chunks of the target")
    parser.add_argument("--step-downs", type=int, default=10, help="of the target's shards")
    parser.add_argument("--version", default="6.0.27", help="of both ends")
    args = parser.parse_args()
    end_in_order()
    counts = {"moves": args.moves, "step_downs": args.step_downs}
    with tempfile.TemporaryDirectory(prefix="tailrace-killed-syncs-") as folder:
        return 0 if run(args.seed, args.kills, **counts, version=args.version, folder=Path(folder)) else 1


if __name__ == "__main__":
    sys.exit(main())
