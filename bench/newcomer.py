"""How long it takes from nothing to the first event on one's own MongoDB: a fresh environment, the wheel from the index
that pip uses, ``tailrace doctor``, ``tailrace watch``, and a write. The steps of docs/how-to/quick-start.md, as typed.

    make dist && python bench/newcomer.py dist/tailrace-*.whl

mongod already runs when the clock is started: it is the newcomer's. Nothing that pip has cached is used. Bar: 60
seconds in all; the exit status is 1 where it is missed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from pymongo import MongoClient
from rich.console import Console
from rich.table import Table

from tailrace.embedded import ReplicaSet

BAR_S = 60.0


class Clock:
    """The seconds of each step."""

    def __init__(self) -> None:
        self.steps: list[tuple[str, float]] = []
        self._last = time.monotonic()

    def step(self, name: str) -> None:
        now = time.monotonic()
        self.steps.append((name, now - self._last))
        self._last = now


def first_event(tailrace: Path, uri: str, environment: dict[str, str]) -> None:
    """Watch as a newcomer does, and write from elsewhere until the first event is printed."""
    watch = subprocess.Popen(
        [tailrace, "watch", "shop.orders", "--format", "json"], env=environment, stdout=subprocess.PIPE, text=True
    )
    ended = threading.Event()

    def write() -> None:
        with MongoClient[dict[str, object]](uri) as client:
            while not ended.wait(0.05):
                client["shop"]["orders"].insert_one({"n": 1})

    writer = threading.Thread(target=write)
    writer.start()
    try:
        assert watch.stdout is not None
        line = watch.stdout.readline()
        assert '"operationType"' in line, line
    finally:
        ended.set()
        writer.join()
        watch.terminate()
        watch.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--version", default="6.0.27", help="of the newcomer's MongoDB")
    wanted = parser.parse_args()
    with ReplicaSet(version=wanted.version) as server, tempfile.TemporaryDirectory() as home:
        environment = {"PATH": os.environ["PATH"], "HOME": home, "TAILRACE_URI": server.uri, "PIP_NO_CACHE_DIR": "1"}
        inside, clock = Path(home) / "env", Clock()
        subprocess.run([sys.executable, "-m", "venv", inside], check=True, env=environment)
        clock.step("python -m venv")
        pip = [inside / "bin" / "pip", "install", "--quiet", "--disable-pip-version-check", wanted.wheel.absolute()]
        subprocess.run(pip, check=True, env=environment)
        clock.step("pip install")
        doctor = [inside / "bin" / "tailrace", "doctor"]
        subprocess.run(doctor, check=True, env=environment, stdout=subprocess.DEVNULL)
        clock.step("tailrace doctor")
        first_event(inside / "bin" / "tailrace", server.uri, environment)
        clock.step("tailrace watch, to the first event")
    table = Table("step", "seconds", title="From nothing to the first event")
    for name, seconds in [*clock.steps, ("all", sum(seconds for _, seconds in clock.steps))]:
        table.add_row(name, f"{seconds:.1f}")
    Console().print(table)
    if sum(seconds for _, seconds in clock.steps) > BAR_S:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
