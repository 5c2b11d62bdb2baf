"""Honest writes, in which a comparison must find nothing: the random workload of the fuzz, for as long as asked.

python -m tests.compare.honest --seconds 3600 --version 7.0.28     (make compare-honest ARGS="...")
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from bson.json_util import dumps

from tailrace.embedded import ReplicaSet
from tailrace.watch.compare.comparison import Compared, ComparisonLimits
from tests.compare import live
from tests.differential.execute import Executed, clear, note, run_operation
from tests.differential.fuzz import PARAMETERS
from tests.differential.wire import Wire
from tests.differential.workload import Workload

IMAGES = {"full_document_before_change": "whenAvailable"}


class _Writes(threading.Thread):
    """The random workload, until it is told to end."""

    def __init__(self, uri: str, version: str, seed: int, most: int) -> None:
        super().__init__(daemon=True)
        self._uri, self._workload, self._most = uri, Workload(seed, version), most
        self.ends = threading.Event()
        self.operations = 0
        self.failure: BaseException | None = None

    def run(self) -> None:
        try:
            with Wire.to(self._uri) as wire:
                clear(wire, self._workload)
                start = note(wire, "workload begins")
                done = Executed(start, start)
                for operation in self._workload.operations(self._most):
                    if self.ends.is_set():
                        break
                    done.ends.append(run_operation(wire, operation, done))
                    self.operations += 1
        except BaseException as error:  # noqa: BLE001  raised by who waits for it
            self.failure = error
        finally:
            self.ends.set()


def compare_workload(
    uri: str, version: str, *, seed: int, most: int, seconds: float, resume_every_s: float = 0.7, **said: Any
) -> Any:
    """Compare the whole deployment while the random workload runs. Returns what was compared."""
    writes = _Writes(uri, version, seed, most)
    if not version.startswith(("4.", "5.")):
        said = {"show_expanded_events": True, "show_system_events": True, **IMAGES, **said}
    with live.deployment(uri, None, **said) as (found, run):
        timer = threading.Timer(seconds, writes.ends.set)
        timer.start()
        writes.start()
        stop = threading.Thread(target=lambda: (writes.join(), found.stop()), daemon=True)
        stop.start()
        compared = run(ComparisonLimits(resume_every_s=resume_every_s))
        stop.join()
        timer.cancel()
        assert writes.failure is None, writes.failure
        assert compared.total == 0, dumps(found.report(show_names=True)["differences"])
    return compared


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the comparisons, one seed after the other. Returns 1 if something differs."""
    parser = argparse.ArgumentParser(prog="make compare-honest")
    parser.add_argument("--seconds", type=float, default=60.0, help="in all (default: 60)")
    parser.add_argument("--version", default="6.0.27", help="of the server (default: 6.0.27)")
    parser.add_argument("--seed", type=int, default=1, help="of the first workload (default: 1)")
    parser.add_argument("--workload-seconds", type=float, default=300.0, help="of one workload (default: 300)")
    args = parser.parse_args(arguments)
    seed, events, resumes = args.seed, 0, 0
    with ReplicaSet(
        version=args.version, enable_test_commands=True, parameters=PARAMETERS, oplog_size_mb=2000
    ) as running:
        end = time.monotonic() + args.seconds
        while (left := end - time.monotonic()) > 0 or seed == args.seed:
            seconds = min(max(left, 1.0), args.workload_seconds)
            said = {"full_document": "updateLookup"} if seed % 2 == 0 else {}
            try:
                found: Compared = compare_workload(
                    running.uri, args.version, seed=seed, most=1 << 30, seconds=seconds, **said
                )
            except AssertionError as error:
                print(f"seed {seed}: {error}")
                return 1
            events, resumes = events + found.events, resumes + found.resumes
            print(f"seed {seed}: {found.events:,} events, {found.resumes} resumes, {dict(found.gaps)}", flush=True)
            seed += 1
    print(f"differences: 0 in {events:,} events of MongoDB {args.version}, {resumes} resumes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
