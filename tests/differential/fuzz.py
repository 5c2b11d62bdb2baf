"""Random workloads against a live server, every stream compared byte for byte with ours.

    python -m tests.differential.fuzz --seed 7 --ops 2000            one seed; the same again replays a difference
    python -m tests.differential.fuzz --seeds 1-50 --ops 2000        many, in one server
    python -m tests.differential.fuzz --seeds 1-9999 --ops 500 --until-minutes 60
    python -m tests.differential.fuzz --seed 7 --version 4.4.2       a server of another version
    python -m tests.differential.fuzz --seed 7 --archive             ours from an archive of the oplog
    python -m tests.differential.fuzz --seed 7 --kernel off          as where numba cannot be imported

Exit code 1 when anything differs. The last line gives operations, streams, events and bytes compared.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import bson

from tailrace.embedded import ReplicaSet
from tailrace.read.source.mongod import MongodSource
from tests.differential import cases
from tests.differential.compare import Bench, Case, Compared, Difference
from tests.differential.execute import Executed, clear, execute
from tests.differential.kernel_choice import CHOICES, kernel_use
from tests.differential.ours import (
    ArchiveOplog,
    SourceOplog,
    archive_of,
    read_archive_into_memory,
    read_into_memory,
)
from tests.differential.wire import ANY_VALUE, Wire
from tests.differential.workload import Workload
from tests.golden.replay import MemoryOplog
from tests.seeds import parser_of_seeds
from tests.server_in_use import SERVER_VERSION, major

#: Prepared transactions need the test commands on a replica set that is no shard; three operations an entry make
#: chains of small transactions; documents that expire by themselves would change what an updateLookup finds.
PARAMETERS = {
    "maxNumberOfTransactionOperationsInSingleOplogEntry": 3,
    "ttlMonitorEnabled": False,
    "diagnosticDataCollectionEnabled": False,
}


@dataclass
class Totals:
    """What was compared. ``differences`` holds the first ones in words."""

    operations: int = 0
    seeds: int = 0
    streams: int = 0
    openings: int = 0
    events: int = 0
    bytes: int = 0
    errors: Counter[int] = field(default_factory=Counter)
    differences: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return (
            f"{self.operations} operations, {self.seeds} seeds, {self.streams} streams, {self.events} events, "
            f"{self.bytes} bytes equal, {self.openings} openings, errors met {dict(self.errors)}, "
            f"{len(self.differences)} differences"
        )


@contextmanager
def server(version: str = SERVER_VERSION) -> Iterator[tuple[Wire, MongodSource]]:
    """A fresh replica set for the workloads: a raw connection and a source."""
    with (
        ReplicaSet(version=version, parameters=PARAMETERS, enable_test_commands=True, oplog_size_mb=2000) as deployment,
        Wire.to(deployment.uri) as wire,
    ):
        source = MongodSource(deployment.uri)
        try:
            yield wire, source
        finally:
            source.close()


class Run:
    """One seed: workload, then every case of it."""

    def __init__(
        self,
        wire: Wire,
        source: MongodSource,
        totals: Totals,
        *,
        seed: int,
        ops: int,
        matches: int = 2,
        version: str = SERVER_VERSION,
        archive: Path | None = None,
    ) -> None:
        self.matches = matches
        self._version = version
        self._seen: set[tuple[str, str]] = set()
        self.workload = Workload(seed, version)
        self.ops = ops
        self.totals = totals
        self._wire = wire
        self._rng = random.Random(f"tailrace cases {seed}")
        self.executed: Executed = execute(wire, self.workload, ops)
        start, end = self.executed.start, self.executed.end
        if archive is None:
            self.memory: MemoryOplog = read_into_memory(wire, source, start, end)
            live = SourceOplog(source)
        else:
            archived = archive_of(source, archive)
            self.memory = read_archive_into_memory(archived, source, start, end)
            live = ArchiveOplog(archived, source)
        self.bench = Bench(wire, self.memory, live, version, end)
        totals.operations += ops
        totals.seeds += 1

    def __call__(self) -> None:
        rng = self._rng
        start = self.executed.start.to_timestamp()
        for wanted in cases.base_cases(rng, self.workload, start):
            case = cases.for_version(wanted, self._version)
            if case is None or self._was_seen(case):
                continue
            read = self._compare(case)
            if read is None or read.difference is not None:
                continue
            self._chain(case, read)
            if case.scope[0] != "config":
                for resumed in cases.resume_cases(rng, case, read, 2):
                    self._compare(resumed)
                if not case.stage.keys() & cases.REWRITTEN_WRONGLY:
                    for matched in cases.match_cases(rng, case, read, self.matches, self._version):
                        self._match(matched, read)
        self._openings()

    def _was_seen(self, case: Case) -> bool:
        """Whether this version knows so few options that the case is the same as an earlier one."""
        key = (str(case.scope), str(dict(case.stage)))
        known = key in self._seen and major(self._version) < 6
        self._seen.add(key)
        return known

    def _match(self, case: Case, whole: Compared) -> None:
        """A stream with a ``$match``, and resumes of it at its own tokens and at those of the stream without it."""
        read = self._compare(case)
        if read is None or read.difference is not None:
            return
        self._chain(case, read)
        for tokens in (read, whole):
            for resumed in cases.resume_cases(self._rng, case, tokens, 1):
                # A resumed stream may have other options, among them those that match_cases leaves out.
                odd = resumed.stage.keys() & cases.REWRITTEN_WRONGLY or "required" in resumed.stage.values()
                if resumed.scope == case.scope and not odd:
                    self._compare(resumed)

    def finish(self) -> None:
        """Leave nothing behind."""
        clear(self._wire, self.workload)

    def _compare(self, wanted: Case) -> Compared | None:
        case = cases.for_version(wanted, self._version)
        if case is None:
            return None
        self.totals.streams += 1
        try:
            result = self.bench.compare(case)
        except Exception:  # noqa: BLE001  (whatever our side raises besides its own errors is a difference)
            self._report(Difference(str(case), "crash", 0, "", traceback.format_exc()))
            return None
        self.totals.events += result.equal_events
        self.totals.bytes += result.equal_bytes
        self.totals.errors.update(error.code for error in result.errors_met)
        if result.difference is not None:
            self._report(result.difference)
        return result

    def _chain(self, case: Case, read: Compared) -> None:
        """Go on after each invalidation until the end of the workload."""
        for _ in range(cases.INVALIDATE_CHAIN_MAX):
            if read.difference is not None or not read.native.ends_with_invalidate:
                return
            following = self._compare(cases.after_invalidate(case, read.native.resume_token))
            if following is None:
                return
            read = following

    def _openings(self) -> None:
        rng = self._rng
        first = self.workload.databases[0]
        tokens = self._some_tokens()
        for whole in tokens:
            for token in cases.broken_tokens(rng, whole, 6):
                name = rng.choice(("resumeAfter", "startAfter"))
                scope = rng.choice((("admin", None), (first, None), (first, "c0")))
                self._open(Case(scope, {name: token}))
        for _ in range(30):
            scope = rng.choice((("admin", None), (first, None), (first, "c0"), ("local", None), ("config", None)))
            stage = cases.odd_stages(rng) | (cases.odd_stages(rng) if rng.random() < 0.3 else {})
            if tokens and rng.random() < 0.3:
                stage[rng.choice(("resumeAfter", "startAfter"))] = rng.choice(tokens)
            self._open(Case(scope, stage))

    def _some_tokens(self) -> list[dict[str, object]]:
        stage = {"startAtOperationTime": self.executed.start.to_timestamp(), "showExpandedEvents": True}
        result: list[dict[str, object]] = []
        for v2 in (False, True):
            read = self._compare(Case(("admin", None), stage, v2))
            if read is not None and read.native.events:
                chosen = self._rng.sample(read.native.events, min(5, len(read.native.events)))
                result.extend(bson.decode(event, ANY_VALUE)["_id"] for event in chosen)
                result.append(bson.decode(read.native.resume_token))
        return result

    def _open(self, wanted: Case) -> None:
        case = cases.for_version(wanted, self._version)
        if case is None:
            return
        self.totals.openings += 1
        try:
            difference = self.bench.compare_opening(case)
        except Exception:  # noqa: BLE001  (as above)
            difference = Difference(str(case), "crash", 0, "", traceback.format_exc())
        if difference is not None:
            self._report(difference)

    def _report(self, difference: Difference) -> None:
        lines = [f"seed {self.workload.seed} ops {self.ops}"]
        if difference.time is not None:
            lines.append(f"operation {self.executed.operation_at(difference.time)}, at {difference.time}")
            if difference.time in self.memory.times:
                entry = self.memory.entries[self.memory.times.index(difference.time)]
                lines.append(f"entry  {bson.decode(entry, ANY_VALUE)!r}")
        lines.extend(f"{name}: {value}" for name, value in asdict(difference).items() if name != "time")
        self.totals.differences.append("\n  ".join(lines))


def run_seed(
    wire: Wire,
    source: MongodSource,
    totals: Totals,
    *,
    seed: int,
    ops: int,
    matches: int = 2,
    version: str = SERVER_VERSION,
    archive: Path | None = None,
) -> None:
    """Execute and compare one seed; every stream also with ``matches`` random ``$match`` stages. With ``archive``, a
    directory, ours are read from the archive that is made there."""
    run = Run(wire, source, totals, seed=seed, ops=ops, matches=matches, version=version, archive=archive)
    run()
    run.finish()


def main(arguments: list[str] | None = None) -> int:
    options = _arguments(arguments)
    totals = Totals()
    reported = 0
    deadline = time.monotonic() + 60 * options.until_minutes if options.until_minutes else None
    with (
        kernel_use(options.kernel) as worked,
        server(options.version) as (wire, source),
        tempfile.TemporaryDirectory() as folder,
    ):
        archive = Path(folder, "archive") if options.archive else None
        for seed in options.seeds:
            if deadline is not None and time.monotonic() > deadline:
                break
            begun = time.monotonic()
            chosen = {"ops": options.ops, "matches": options.matches, "version": options.version, "archive": archive}
            run_seed(wire, source, totals, seed=seed, **chosen)
            print(f"seed {seed}: {time.monotonic() - begun:.1f} s; so far {totals}", flush=True)
            for text in totals.differences[reported : reported + options.show]:
                print(text, flush=True)
            if options.report is not None and len(totals.differences) > reported:
                with options.report.open("a") as report:
                    report.writelines(f"{text}\n\n" for text in totals.differences[reported:])
            reported = len(totals.differences)
    print(f"{options.version}, {worked}: {totals}")
    return 1 if totals.differences else 0


def _arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = parser_of_seeds("tests.differential.fuzz", __doc__)
    parser.add_argument("--ops", "--operations", type=int, default=2000, help="operations a seed (2000)")
    parser.add_argument("--version", default=SERVER_VERSION, help=f"of the server ({SERVER_VERSION})")
    parser.add_argument("--matches", type=int, default=2, help="random $match stages for each stream (2)")
    parser.add_argument("--archive", action="store_true", help="read ours from an archive of the oplog")
    parser.add_argument(
        "--kernel", choices=CHOICES, default="auto", help="where it pays (auto), on each batch, or without numba (off)"
    )
    parser.add_argument("--until-minutes", type=float, help="begin no further seed after this time")
    parser.add_argument("--show", type=int, default=3, help="differences to print a seed (3)")
    parser.add_argument("--report", type=Path, help="append every difference to this file")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
