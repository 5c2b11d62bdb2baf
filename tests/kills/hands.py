"""What does the harm in the chaos: a hand for the listeners' processes and one for the members, each with random draws
of its own from the seed."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import pymongo
from pymongo import WriteConcern
from pymongo.errors import PyMongoError

from tailrace.embedded import ReplicaSet
from tests.kills.leases import LeaseHistory
from tests.kills.processes import Listening, Processes
from tests.pace import BETWEEN_LOOKS_S

LISTENER_FAULTS: Final = ("kill", "stop", "restart", "clock")
MEMBER_FAULTS: Final = ("member killed", "member stopped", "step-down", "majority lost")


class FaultLog:
    """Every fault, reported on standard error and kept in a file: when, what, and whether it really hit."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tried: Counter[str] = Counter()
        self.hits: Counter[str] = Counter()
        self._begun = time.monotonic()
        self._lock = threading.Lock()

    def put(self, kind: str, told: str, *, hit: bool) -> None:
        line = f"{time.monotonic() - self._begun:7.1f} s  {kind}: {told}{'' if hit else ' (no hit)'}"
        with self._lock, self.path.open("a") as log:
            self.tried[kind] += 1
            self.hits[kind] += hit
            log.write(line + "\n")
            print(line, file=sys.stderr, flush=True)


class Hand:
    """Causes its faults one after the other in a thread: first each of its kinds once, then as drawn."""

    def __init__(self, name: str, kinds: tuple[str, ...], seed: int, log: FaultLog, pause_s: float) -> None:
        self._kinds, self._log, self._pause_s = kinds, log, pause_s
        self._draw = random.Random(f"{seed} {name}")
        self._ended = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def do(self, kind: str) -> None:
        raise NotImplementedError

    def start(self) -> None:
        if self._kinds:
            self._thread.start()

    def check(self) -> None:
        """Raises what ended the thread."""
        if self._error is not None:
            raise self._error

    def finish(self) -> None:
        """Let the current fault come to its end, after which all is as it was."""
        self._ended.set()
        if self._kinds:
            self._thread.join(600)
            assert not self._thread.is_alive(), "a fault did not come to its end"
        self.check()

    def _run(self) -> None:
        first = self._draw.sample(self._kinds, len(self._kinds))
        try:
            while not self._ended.wait(self._draw.uniform(0.2, 2 * self._pause_s)):
                self.do(first.pop() if first else self._draw.choice(self._kinds))
        except BaseException as error:  # noqa: BLE001  raised by check()
            self._error = error

    def _wait(self, holds: Callable[[], Any], within_s: float) -> bool:
        end = time.monotonic() + within_s
        while not holds():
            if time.monotonic() > end:
                return False
            time.sleep(BETWEEN_LOOKS_S)
        return True


class ListenerHand(Hand):
    """Kills, stops, restarts processes, and moves their clocks."""

    def __init__(  # noqa: PLR0917
        self,
        processes: Processes,
        leases: LeaseHistory,
        kinds: tuple[str, ...],
        seed: int,
        log: FaultLog,
        pause_s: float,
    ) -> None:
        super().__init__("listeners", kinds, seed, log, pause_s)
        self._processes, self._leases = processes, leases

    def do(self, kind: str) -> None:
        if kind == "stop":
            self._stop()
        elif kind == "clock":
            process = self._one()
            moved = self._processes.jump(process)
            self._log.put(kind, f"process {process.pid} is {moved:+.0f} s off", hit=bool(moved))
        else:
            self._end(kind)

    def _one(self) -> Listening:
        """A process that has leases, if there is one: the others have only begun."""
        running = self._processes.running()
        return self._draw.choice([one for one in running if self._leases.held_by(one.pid)] or running)

    def _end(self, kind: str) -> None:
        """SIGKILL, often in a handler, or SIGTERM; and another process in its place."""
        process, pause = None, None
        if kind == "kill" and self._draw.random() < 0.7:
            process, pause = self._in_a_handler(5.0)
        process = process or self._one()
        held = len(self._leases.held_by(process.pid))
        if kind == "kill":
            process.kill()
        else:
            process.terminate()
        code = self._processes.replace(process)
        well = kind == "kill" or code == 0
        self._log.put(kind, f"process {process.pid}{where(pause)}, {held} leases", hit=held > 0 and well)

    def _stop(self) -> None:
        """Stop a process for longer than its lease; most often in a handler that is about to write, until others have
        done its work."""
        process, pause = None, None
        if self._draw.random() < 0.8:
            process, pause = self._in_a_handler(5.0)
        process = process or self._one()
        taken = self._leases.taken_from(process.pid)
        longer_s = self._draw.uniform(1.2, 3.0) * self._processes.lease_seconds
        process.send_signal(signal.SIGSTOP)
        try:
            begun = time.monotonic()
            if pause not in process.pauses():
                pause = None  # it had gone on before it was stopped
            time.sleep(longer_s)
            self._wait(lambda: self._leases.taken_from(process.pid) > taken, 20.0)
            if pause is not None and pause["where"] == "before":
                self._wait(lambda: self._processes.is_done_by_another(pause, process.pid), 20.0)
            lost = self._leases.taken_from(process.pid) - taken
            lasted = time.monotonic() - begun
        finally:
            process.send_signal(signal.SIGCONT)
        self._log.put(
            "stop", f"process {process.pid}{where(pause)} for {lasted:.1f} s, {lost} leases taken", hit=lost > 0
        )

    def _in_a_handler(self, within_s: float) -> tuple[Listening | None, dict[str, Any] | None]:
        """A process whose handler is pausing just now, and what that handler says."""
        end = time.monotonic() + within_s
        while time.monotonic() < end:
            found = [(process, said) for process in self._processes.running() for said in process.pauses()]
            if found:
                return self._draw.choice(found)
            time.sleep(0.01)
        return None, None


def where(pause: dict[str, Any] | None) -> str:
    return "" if pause is None else f" in a handler of {pause['listener']} ({pause['where']})"


class MemberHand(Hand):
    """Kills and stops members of the replica set, one of three or two of three, and lets the primary step down."""

    def __init__(  # noqa: PLR0917
        self,
        deployment: ReplicaSet,
        uri: str,
        kinds: tuple[str, ...],
        seed: int,
        log: FaultLog,
        pause_s: float,
        *,
        harms_s: tuple[float, float],
    ) -> None:
        super().__init__("members", kinds, seed, log, pause_s)
        self._deployment, self._harms_s = deployment, harms_s
        self._client = pymongo.MongoClient[Any](uri, serverSelectionTimeoutMS=2000)

    def do(self, kind: str) -> None:
        primary = self._deployment.primary
        if kind == "step-down":
            now = self._deployment.step_down()
            self._log.put(kind, f"member {primary}, now {now}", hit=now != primary)
            return
        others = [number for number in range(len(self._deployment.members)) if number != primary]
        count = 2 if kind == "majority lost" else 1
        first = primary if self._draw.random() < 0.6 else self._draw.choice(others)
        chosen = [first, *self._draw.sample([other for other in others if other != first], count - 1)]
        stops = kind == "member stopped" or (count == 2 and self._draw.random() < 0.5)
        lasts_s = self._draw.uniform(*self._harms_s)
        with self._harmed(chosen, stops=stops):
            begun = time.monotonic()
            hit = not self._takes_writes() if count == 2 else True
            time.sleep(max(0.0, lasts_s - (time.monotonic() - begun)))
        self._deployment.wait_until_ready()
        which = " and ".join(f"{number}{' (primary)' if number == primary else ''}" for number in chosen)
        how = "stopped" if stops else "killed"
        self._log.put(
            kind, f"members {which} {how} for {lasts_s:.1f} s, primary now {self._deployment.primary}", hit=hit
        )

    @contextmanager
    def _harmed(self, chosen: list[int], *, stops: bool) -> Iterator[None]:
        members = self._deployment.members
        if not stops:
            for number in chosen:
                self._deployment.kill(number)
            try:
                yield
            finally:
                for number in chosen:
                    self._deployment.restart(number)
            return
        pids = [pid for number in chosen if (pid := members[number].pid) is not None]
        try:
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
            yield
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)

    def _takes_writes(self) -> bool:
        """Whether a majority acknowledges a write within 2 s."""
        probes = self._client["chaos_probe"].get_collection("c", write_concern=WriteConcern("majority", wtimeout=2000))
        with suppress(PyMongoError), pymongo.timeout(3):
            probes.update_one({"_id": 0}, {"$inc": {"n": 1}}, upsert=True)
            return True
        return False
