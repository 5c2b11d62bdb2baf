"""Several processes share the lanes of a collection while they are killed, stopped past their leases and continued."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pymongo
from pymongo.errors import PyMongoError

from tests.forked import Forked

ROOT = Path(__file__).parents[2]
PATIENCE_S = 240.0

#: Writes ``{n: n, ...}`` to the document with this key; raises a PyMongoError when it is to be tried again.
Write = Callable[[int, dict[str, Any]], Any]


@dataclass
class Ordeal:
    """Call ``run()`` and inspect what happened. Writes are numbered from 1 in each document.

    ``source``  what is watched; ``target``  where leases and effects are
    """

    source: str
    target: str
    database: str
    write: Write
    changes: int
    documents: int = 100
    processes: int = 4
    partitions: int = 6
    lease_seconds: float = 2.0
    commit_every: int = 5
    in_transaction: bool = False
    #: A handler pauses once in so many changes.
    pauses_one_in: int = 60
    #: How many kills there are at least, and how many stops.
    torments: int = 1
    #: What else happens, once each, spread over the time of the writes.
    events: list[Callable[[], Any]] = field(default_factory=list)
    #: The processes keep a view too (``ordeal_view``): what else is written with each change, and whether the view is
    #: right in the end.
    beside: Callable[[random.Random], Any] | None = None
    has_settled: Callable[[], bool] = lambda: True
    seed: int = 1
    killed: int = 0
    stopped: int = 0
    #: Stale writes of stopped processes that were refused.
    refused: int = 0

    def __post_init__(self) -> None:
        self._client = pymongo.MongoClient[Any](self.target)
        self.effects = self._client[self.database + "_effects"]
        self._client.drop_database(self.effects.name)
        self.effects.create_collection("effects")
        self._running: list[Forked] = []
        self._written: dict[int, int] = dict.fromkeys(range(self.documents), 0)
        self._writer_error: BaseException | None = None
        self._rng = random.Random(self.seed)

    def run(self) -> None:
        """Run the whole ordeal, until all changes are handled and all processes have ended."""
        writer = threading.Thread(target=self._write_all, daemon=True)
        for _ in range(self.processes):
            self._start()
        try:
            writer.start()
            events, step = list(self.events), self.changes // (len(self.events) + 1)
            due = step
            while writer.is_alive() or events or min(self.killed, self.stopped) < self.torments:
                if events and sum(self._written.values()) >= due:
                    events.pop(0)()
                    due += step
                self._torment()
                assert self._writer_error is None, self._writer_error
            self._wait_for(self._all_handled, "all changes to be handled")
            self._wait_for(self.has_settled, "the view to be what it should be")
        finally:
            for process in self._running:
                process.send_signal(signal.SIGCONT)
                process.terminate()
            codes = [process.wait(300) for process in self._running]
            self._client.close()
        assert codes == [0] * self.processes, codes

    def _write_all(self) -> None:
        rng = random.Random(self.seed)
        ours = {"token": {"_data": "82"}, "version": 7, "lane": 1, "_fence": {"orders": 1 << 60}, "operationType": "x"}
        try:
            for _ in range(self.changes):
                key = rng.randrange(self.documents)
                fields = {**ours, "n": self._written[key] + 1}
                self._patiently(lambda: self.write(key, fields))  # noqa: B023
                self._written[key] += 1
                if self.beside is not None:
                    state = rng.getstate()
                    self._patiently(lambda: (rng.setstate(state), self.beside(rng)))  # type: ignore[misc]  # noqa: B023
        except BaseException as error:  # noqa: BLE001
            self._writer_error = error

    def _start(self) -> None:
        names = ("source", "target", "database", "in_transaction", "commit_every", "lease_seconds", "partitions")
        config = {name: getattr(self, name) for name in (*names, "pauses_one_in")}
        config["view"] = self.beside is not None
        config["parent"] = os.getpid()
        self._running.append(Forked("tests.consumer.ordeal_process", [json.dumps(config)], cwd=ROOT))

    def _torment(self) -> None:
        """Kill one process and start another, or stop one in its handler until others have gone on in its place."""
        for process in self._running:
            assert process.poll() is None, f"a process ended by itself with {process.returncode}"
        pause = self._next_pause(2.0)
        if pause is None:
            return
        process = next(process for process in self._running if process.pid == pause["process"])
        if self.killed <= self.stopped:
            process.kill()
            process.wait()
            self._running.remove(process)
            self._start()
            self.killed += 1
            return
        os.kill(process.pid, signal.SIGSTOP)
        try:
            self._wait_for(
                lambda: self._is_done_by_another(pause) or self._is_done_by_itself(pause),
                "others to take over from the stopped process",
            )
            # On a slow machine its handler had ended before it was stopped. Then others have nothing to take over until
            # the document is written again, which after the last write never happens.
            was_late = self._is_done_by_itself(pause)
        finally:
            os.kill(process.pid, signal.SIGCONT)
        if was_late:
            return
        self.stopped += 1
        mine = {name: pause[name] for name in ("key", "n", "process")}
        self._wait_for(lambda: self.effects["refused"].find_one(mine), "the stale write to be refused")
        self.refused += 1

    def _next_pause(self, timeout_s: float) -> dict[str, Any] | None:
        """A handler that has just begun a pause."""
        pids = [process.pid for process in self._running]
        end = time.monotonic() + timeout_s
        known = {found["_id"] for found in self._patiently(lambda: list(self.effects["pauses"].find({}, {"_id": 1})))}
        while time.monotonic() < end:
            query = {"process": {"$in": pids}}
            for found in self._patiently(lambda: list(self.effects["pauses"].find(query))):  # noqa: B023
                if found["_id"] not in known and not self._is_done(found):
                    return dict(found)
            time.sleep(0.02)
        return None

    def _seen(self, key: int) -> list[dict[str, Any]]:
        found = self._patiently(lambda: self.effects["effects"].find_one({"_id": key}))
        return list(found["seen"]) if found else []

    def _is_done(self, pause: dict[str, Any]) -> bool:
        return any(seen["n"] == pause["n"] for seen in self._seen(pause["key"]))

    def _is_done_by_another(self, pause: dict[str, Any]) -> bool:
        others = [seen for seen in self._seen(pause["key"]) if seen["process"] != pause["process"]]
        return any(seen["n"] >= pause["n"] for seen in others)

    def _is_done_by_itself(self, pause: dict[str, Any]) -> bool:
        return any((seen["n"], seen["process"]) == (pause["n"], pause["process"]) for seen in self._seen(pause["key"]))

    def _patiently(self, action: Callable[[], Any]) -> Any:
        for _ in range(300):
            try:
                return action()
            except PyMongoError:
                time.sleep(0.1)
        return action()

    def _all_handled(self) -> bool:
        for process in self._running:
            assert process.poll() is None, f"a process ended by itself with {process.returncode}"
        found = self._patiently(lambda: list(self.effects["effects"].find()))
        last = {one["_id"]: max(seen["n"] for seen in one["seen"]) for one in found}
        return last == {key: n for key, n in self._written.items() if n}

    def _wait_for(self, holds: Callable[[], Any], what: str) -> None:
        end = time.monotonic() + PATIENCE_S
        while not holds():
            assert time.monotonic() < end, f"still waiting for {what}"
            time.sleep(0.2)  # each look takes some work


def check_history(seen: list[dict[str, Any]], written: int, *, exactly_once: bool) -> None:
    """Check what was done for one document: nothing lost, nothing out of order, no older owner after a newer one."""
    numbers = [one["n"] for one in seen]
    assert set(numbers) == set(range(1, written + 1)), "nothing is lost"
    if exactly_once:
        assert numbers == list(range(1, written + 1)), "once each, in order"
    furthest, before = 0, {"n": 0, "version": 0}
    for one in seen:
        assert one["version"] >= before["version"], f"an older owner's effect after a newer one's: {before}, {one}"
        assert one["n"] <= furthest + 1, f"out of order: {before}, {one}"
        if one["n"] < before["n"]:
            assert one["version"] > before["version"], f"the same owner went back: {before}, {one}"
        furthest, before = max(furthest, one["n"]), one


def check(ordeal: Ordeal) -> None:
    """Check all invariants over all documents."""
    with pymongo.MongoClient[Any](ordeal.target) as client:
        found = {one["_id"]: one["seen"] for one in client[ordeal.database + "_effects"]["effects"].find()}
    for key, written in ordeal._written.items():
        check_history(found.get(key, []), written, exactly_once=ordeal.in_transaction)
    assert ordeal.refused == ordeal.stopped >= ordeal.torments
    assert ordeal.killed >= ordeal.torments
