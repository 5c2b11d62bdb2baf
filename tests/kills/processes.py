"""The processes of listeners that the chaos starts, harms and replaces."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import pymongo
from pymongo.errors import PyMongoError

from tests.forked import Forked

ROOT: Final = Path(__file__).parents[2]
#: What each process runs; ``listening.py`` has what they are.
LISTENERS: Final = ("lanes", "fenced", "alone")
#: How far a wall clock is off at most, as in the simulation.
_SKEW_S: Final = 100.0


class Listening(Forked):
    """A process, and how far its wall clock was off when it was started."""

    skew_s: float = 0.0
    folder: Path

    def pauses(self) -> list[dict[str, Any]]:
        """What its handlers that pause just now say of themselves."""
        found = []
        for path in sorted(self.folder.glob(f"{self.pid}.*.pause")):
            with suppress(FileNotFoundError):  # it has gone on
                found.append(json.loads(path.read_text()))
        return found


class Processes:
    """A fixed number of processes; ``replace`` starts another one for one that ends."""

    def __init__(
        self,
        uri: str,
        database: str,
        folder: Path,
        seed: int,
        *,
        count: int,
        lease_seconds: float,
        listeners: Sequence[str],
        pauses_one_in: int,
        planted: str | None,
    ) -> None:
        self.lease_seconds = lease_seconds
        self.folder = folder
        #: A sentence for each process that ended by itself.
        self.violations: list[str] = []
        self.skewed: set[int] = set()
        self._count = count
        self._config = {"uri": uri, "database": database, "folder": str(folder), "lease_seconds": lease_seconds}
        self._config |= {"listeners": list(listeners), "pauses_one_in": pauses_one_in, "planted": planted}
        self._config["parent"] = os.getpid()
        self._draw = random.Random(f"{seed} clocks")
        self._lock = threading.Lock()
        self._running: list[Listening] = []
        self._effects = pymongo.MongoClient[Any](uri)[database + "_effects"]

    def start(self) -> None:
        for _ in range(self._count):
            self._start()

    def _start(self) -> None:
        skew_s = self._draw.choice([0.0, self._draw.uniform(-_SKEW_S, _SKEW_S), self._draw.uniform(-_SKEW_S, _SKEW_S)])
        config = {**self._config, "skew_s": skew_s, "rate": self._draw.choice([1.0, self._draw.uniform(0.95, 1.05)])}
        errors = self.folder / f"errors-{len(list(self.folder.glob('errors-*')))}"
        process = Listening("tests.kills.listening", [json.dumps(config)], cwd=ROOT, errors=errors)
        process.skew_s, process.folder = skew_s, self.folder
        if skew_s:
            self.skewed.add(process.pid)
        self._running.append(process)

    def running(self) -> list[Listening]:
        """The running processes. One that has ended by itself is a violation, and is replaced."""
        with self._lock:
            for process in list(self._running):
                if process.poll() is not None:
                    self.violations.append(
                        f"a process ended by itself with {process.returncode}: {last_words(process)}"
                    )
                    self._running.remove(process)
                    self._start()
            return list(self._running)

    def replace(self, process: Listening) -> int:
        """Wait for the end of one that was killed or told to end, and start another. Returns its exit code."""
        with self._lock:
            code = process.wait(120)
            for said in self.folder.glob(f"{process.pid}.*.pause"):
                said.unlink()
            if code not in (0, -signal.SIGKILL):
                self.violations.append(f"a process that was told to end ended with {code}: {last_words(process)}")
            self._running.remove(process)
            self._start()
            return code

    def jump(self, process: Listening) -> float:
        """Move a process's wall clock while it runs. Returns how far it is off then, or 0 where it has not done so."""
        told = self.folder / f"{process.pid}.clock"
        if not told.exists():
            return 0.0  # it has just been started
        before = told.read_text()
        process.send_signal(signal.SIGUSR1)
        end = time.monotonic() + 5.0
        while time.monotonic() < end:
            now = told.read_text()
            if now and now != before:
                self.skewed.add(process.pid)
                return float(now)
            time.sleep(0.02)
        return 0.0

    def finish(self) -> None:
        """End all in order."""
        running = self.running()
        for process in running:
            process.send_signal(signal.SIGCONT)
            process.terminate()
        for process in running:
            code = process.wait(300)
            if code != 0:
                self.violations.append(f"a process ended with {code}: {last_words(process)}")
        self._running.clear()

    def kill(self) -> None:
        """End all at once, whatever they do."""
        for process in self._running:
            process.kill()

    def is_done_by_another(self, pause: dict[str, Any], pid: int) -> bool:
        """Whether the change that a stopped handler has in hand was handled by another process."""
        with suppress(PyMongoError):
            found = self._effects[pause["listener"]].find_one({"_id": pause["key"]})
            seen = found["seen"] if found else []
            return any(one["n"] == pause["n"] and one["process"] != pid for one in seen)
        return False


def last_words(process: Listening) -> str:
    """The last line on its standard error."""
    lines = process.errors.read_text().strip().splitlines() if process.errors and process.errors.exists() else []
    return lines[-1] if lines else "it said nothing"
