"""A sync that is killed at random moments of its copy, its catch-up, its definitions and its following, while writers
of every kind write, and while the primaries of both ends step down.

    python -m tests.kills.syncing --seed 7 --kills 100
    python -m tests.kills.syncing --seed 7 --kills 20 --version 5.0.4 --to-version 6.0.27
    python -m tests.kills.syncing --seed 7 --kills 0 --step-downs 30

A sync is killed some times and then brought to its end, and another begins. After each kill, if the position on the
target says that the target equals the source at it, then that is compared: each collection, by its UUID, with what the
source held at that time. At the end of each sync all is compared byte for byte: documents, catalogue and indexes. Exit
code 1 where anything differs.
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
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from bson.binary import Binary
from pymongo import MongoClient
from pymongo.errors import OperationFailure

from tailrace.embedded import ReplicaSet
from tests.seeds import end_in_order
from tests.sync.both import STATE_DB, is_users, normal, replica_set
from tests.sync.equality import differences, documents, held, of_documents
from tests.sync.workload import Kinds, Writes

ROOT: Final = Path(__file__).parents[2]
_PATIENCE_S: Final = 900
#: Of a snapshot whose collection was not there, was not in the catalogue then, or is too old.
_UNAVAILABLE: Final = frozenset({26, 239, 246, 73})
_KILLS_A_SYNC: Final = 10
_LEASE_S: Final = 5
_PHASES: Final = ("copy", "catchUp", "follow")


@dataclass
class Result:
    """``kills`` by the phase in which they hit."""

    kills: Counter[str] = field(default_factory=Counter)
    step_downs: Counter[str] = field(default_factory=Counter)
    syncs: int = 0
    commands: int = 0
    positions: int = 0
    documents: int = 0
    wrong: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        kills = ", ".join(f"{count} in {phase}" for phase, count in sorted(self.kills.items()))
        downs = ", ".join(f"{count} of the {end}" for end, count in sorted(self.step_downs.items()))
        return (
            f"{self.syncs} syncs, {self.kills.total()} kills ({kills}), {self.step_downs.total()} step-downs "
            f"({downs}), {self.commands:,} commands, {self.positions} positions and all ends compared, "
            f"{self.documents:,} documents, {len(self.wrong)} differences"
        )


class Killed:
    """One sync after the other between two deployments."""

    def __init__(self, source: ReplicaSet, target: ReplicaSet, folder: Path, seed: int, *, capped: bool = True) -> None:
        self._source, self._target, self._folder = source, target, folder
        self._seed, self._capped = seed, capped
        self._rng = random.Random(f"tailrace killed syncs {seed}")
        self._process: subprocess.Popen[bytes] | None = None
        self.result = Result()

    def run(self, kills: int, step_downs: int) -> Result:
        """So many kills and step-downs, divided among syncs."""
        number = 0
        while kills > 0 or step_downs > 0:
            mine, downs = min(kills, _KILLS_A_SYNC), min(step_downs, _KILLS_A_SYNC)
            self._one(number, mine, downs)
            kills, step_downs, number = kills - mine, step_downs - downs, number + 1
        return self.result

    def _one(self, number: int, kills: int, step_downs: int) -> None:
        """One sync, from its beginning to its end."""
        version = self._source.version
        kinds = Kinds(capped=self._capped and not version.startswith("4."), large=False)
        writes = Writes(self._source.uri, self._seed * 1000 + number, version, kinds=kinds)
        try:
            writes.run(300)
            with writes.running(pause_s=0.2):
                for _ in range(kills):
                    self._live()
                for _ in range(step_downs):
                    self._step_down()
            self._end(f"sync {number}")
            self.result.syncs += 1
            self.result.commands += writes.sent
        finally:
            self._kill()
            with suppress(Exception):
                writes.clear()
            writes.close()
            self._clear_target()

    # -- its lives --------------------------------------------------------------------------------------------------

    def _command(self, *more: str) -> list[str]:
        lanes = "4" if self._seed % 3 == 2 else "1"
        options = ["--lease-seconds", str(_LEASE_S), "--documents-per-second", "300", "--lanes", lanes]
        return [sys.executable, "-m", "tailrace", "sync", self._source.uri, self._target.uri, *options, *more]

    def _begin(self, *more: str) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            with (self._folder / "log").open("ab") as log:
                self._process = subprocess.Popen(
                    self._command(*more), cwd=ROOT, stdout=log, stderr=log, start_new_session=True
                )
        return self._process

    def _live(self) -> None:
        """Begin, and be killed in a phase that is chosen, or a later one: as soon as it is reached, or some time
        later."""
        rng, process = self._rng, self._begin()
        epoch = self._epoch()
        self._wait(lambda: self._epoch() > epoch)
        wanted = rng.choice(("copy", "copy", "catchUp", "catchUp", "follow", "follow", "follow"))
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
        self._compare_position(document)

    def _step_down(self) -> None:
        self._begin()
        which, end = self._rng.choice((("source", self._source), ("target", self._target)))
        before = self._document().get("time")
        if len(end.members) > 1:
            end.step_down()
            self.result.step_downs[which] += 1
        self._wait(lambda: self._document().get("time") != before)

    def _kill(self) -> None:
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def _end(self, what: str) -> None:
        """Nobody writes any more: up to the end, and compare all."""
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
        left = held(self._source.uri, selected=is_users)
        right = held(self._target.uri, but=[STATE_DB], selected=is_users)
        self.result.documents += sum(len(one.documents) for one in left.values())
        known = normal(self._source.version, self._target.version, ages=False)
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
        with MongoClient[Any](self._target.uri) as client:
            return client[STATE_DB]["syncs"].find_one({"_id": "sync"}) or {}

    def _epoch(self) -> int:
        return int(self._document().get("epoch", 0))

    def _compare_position(self, document: dict[str, Any]) -> None:
        """While writers go on: the target as it is now against the source as it was at the position."""
        if not self._is_equal(document) or self._source.version.startswith("4."):
            return
        self.result.positions += 1
        with MongoClient[Any](self._source.uri) as source, MongoClient[Any](self._target.uri) as target:
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
                self.result.documents += len(before)
                self.result.wrong += [f"{one['target']} at {document['time']}: {text}" for text in found]

    @staticmethod
    def _is_equal(document: dict[str, Any]) -> bool:
        is_at_rest = document.get("phase") == "follow" and not document.get("barrier")
        return is_at_rest and bool(document["time"] >= document["hold"])

    def _clear_target(self) -> None:
        with MongoClient[Any](self._target.uri) as client:
            for name in client.list_database_names():
                if name not in ("admin", "config", "local"):
                    client.drop_database(name)


def run(
    seed: int, kills: int, step_downs: int, version: str, folder: Path, *, to_version: str = "", capped: bool = True
) -> bool:
    """On deployments of their own, told on standard output; whether all held."""
    begun = time.monotonic()
    members = 3 if step_downs else 1
    with ExitStack() as stack:
        source = stack.enter_context(replica_set(version, members))
        target = stack.enter_context(replica_set(to_version or version, members))
        result = Killed(source, target, folder, seed, capped=capped).run(kills, step_downs)
    for text in result.wrong[:20]:
        print(f"DIFFERENCE {text}")
    verdict = "NOT all held" if result.wrong else "all held"
    print(f"sync, seed {seed}, {version} to {to_version or version}: {result}: {verdict}, ", end="")
    print(f"{time.monotonic() - begun:.0f} s", flush=True)
    return not result.wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--step-downs", type=int, default=0)
    parser.add_argument("--version", default="6.0.27", help="of the source")
    parser.add_argument("--to-version", default="", help="of the target (the source's)")
    parser.add_argument("--no-capped", dest="capped", action="store_false", help="without capped collections")
    args = parser.parse_args()
    end_in_order()
    with tempfile.TemporaryDirectory(prefix="tailrace-killed-syncs-") as folder:
        chosen = (args.seed, args.kills, args.step_downs, args.version, Path(folder))
        return 0 if run(*chosen, to_version=args.to_version, capped=args.capped) else 1


if __name__ == "__main__":
    sys.exit(main())
