"""Random writes on a real sharded cluster while its chunks move: our merged streams against the shards' streams and the
record.

    python -m tests.sharded.fuzz --seed 7              one seed, on a cluster of its own
    python -m tests.sharded.fuzz --seeds 1-20          many, each on a cluster of its own
    python -m tests.sharded.fuzz --seeds 1-3 --steps 400 --version 5.0.4
    python -m tests.sharded.fuzz --seed 7 --kernel off             as where numba cannot be imported

For each seed we read the events of three scopes, one of them live while the workload runs, a shard is added and one is
removed. They are compared byte for byte with the union of the shards' own streams in the order of their tokens; what
they say about each document is compared with what was written; and streams are resumed at random tokens. Another stream
looks up current documents meanwhile: without these its events must be the shards', and each document must be a state at
the event or later. Exit code 1 when anything differs. The last line gives writes, streams, events and resumes compared.
"""

from __future__ import annotations

import argparse
import random
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import bson
from bson.raw_bson import RawBSONDocument
from bson.timestamp import Timestamp

import tailrace
from tailrace.core import raw_bson
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.embedded import ShardedCluster
from tailrace.errors import SourceError
from tests.differential.first_difference import first_difference
from tests.differential.kernel_choice import CHOICES, kernel_use
from tests.golden.recording import token_time
from tests.seeds import parser_of_seeds
from tests.server_in_use import SERVER_VERSION, major
from tests.sharded import native
from tests.sharded.random_workload import History, Ran, RandomWorkload, history_difference, history_of
from tests.sharded.watched_servers import ServerDiedError, WatchedServers

#: Two operations an oplog entry, so that transactions become chains.
PARAMETERS = {"maxNumberOfTransactionOperationsInSingleOplogEntry": 2}
#: The longest wait for an event that must come.
PATIENCE_S = 300.0
_MARK_EVERY = 40
#: How often a seed is tried if servers die under Wine.
_TRIES_UNDER_WINE = 6


@dataclass(frozen=True)
class Case:
    """A stream: a database and a collection of it (1: all of them; ``admin``: the cluster), the stage's options."""

    database: str
    collection: str | int
    stage: Mapping[str, Any]

    def __str__(self) -> str:
        return f"{self.database}.{self.collection} {dict(self.stage)}"

    @property
    def has_images(self) -> bool:
        """Whether the events have more than what is in the oplog. A mongos adds that itself, after its merge."""
        return "fullDocument" in self.stage

    @property
    def options(self) -> dict[str, Any]:
        """The stage's options on the server's side."""
        whole = {"allChangesForCluster": True} if self.database == "admin" else {}
        return {**whole, **self.stage}


@dataclass
class OurStream:
    """What our stream gave, and its resume token after so many events, noted now and then."""

    events: list[bytes] = field(default_factory=list)
    marks: list[tuple[Mapping[str, Any], int]] = field(default_factory=list)
    failure: BaseException | None = None


@dataclass
class Totals:
    """What was compared. ``differences`` in words."""

    seeds: int = 0
    writes: int = 0
    streams: int = 0
    events: int = 0
    bytes: int = 0
    resumes: int = 0
    moves: int = 0
    differences: list[str] = field(default_factory=list)
    died: int = 0

    def add(self, other: Totals) -> None:
        """Add another one's counts."""
        for one in fields(self):
            setattr(self, one.name, getattr(self, one.name) + getattr(other, one.name))

    def __str__(self) -> str:
        died = f", {self.died} more runs without a verdict, since a server died" if self.died else ""
        return (
            f"{self.seeds} seeds, {self.writes} writes, {self.moves} chunks moved, {self.streams} streams, "
            f"{self.events} events, {self.bytes} bytes equal, {self.resumes} resumes, "
            f"{len(self.differences)} differences{died}"
        )


class OurReader(threading.Thread):
    """Reads a case with Tailrace until the stream's token has passed ``until``, which may be told while it reads."""

    def __init__(self, uri: str, case: Case, *, until: Timestamp | None = None, **start: Any) -> None:
        super().__init__(daemon=True)
        self.stream = OurStream()
        self.opened = threading.Event()
        self._uri = uri
        self._case = case
        self._start = start
        self._until = None if until is None else ClusterTime.from_timestamp(until)
        self._quiet_since = time.monotonic()

    def end_at(self, until: Timestamp) -> None:
        """Read up to this time, then end."""
        self._until = ClusterTime.from_timestamp(until)

    def run(self) -> None:
        try:
            with tailrace.connect(self._uri) as client:
                target: Any = client
                if self._case.database != "admin":
                    target = client[self._case.database]
                if isinstance(self._case.collection, str):
                    target = target[self._case.collection]
                with target.watch(
                    options=dict(self._case.stage),
                    max_await_time_ms=50,
                    document_class=RawBSONDocument,
                    **self._start,
                ) as stream:
                    self.opened.set()
                    self._read(stream)
        except BaseException as error:  # noqa: BLE001  (it becomes a difference)
            self.stream.failure = error
        finally:
            self.opened.set()

    def _read(self, stream: tailrace.ChangeStream) -> None:
        rng = random.Random(0)
        while stream.alive:
            try:
                event = stream.try_next()
            except SourceError:
                # On a busy machine a former shard may be turned off before the stream has read it. Then the stream gets
                # an error, stays open, and reads on when the shard runs again.
                if self._until is None:
                    self._quiet_since = time.monotonic()
                if not stream.alive or time.monotonic() - self._quiet_since > PATIENCE_S:
                    raise
                time.sleep(0.2)
                continue
            if event is not None:
                self._quiet_since = time.monotonic()
                self.stream.events.append(event.raw)
            elif self._is_done(stream):
                return
            if rng.randrange(_MARK_EVERY) == 0:
                self.stream.marks.append((_token(stream), len(self.stream.events)))

    def _is_done(self, stream: tailrace.ChangeStream) -> bool:
        if self._until is None:
            self._quiet_since = time.monotonic()
            return False
        if token_time(bson.encode(_token(stream))) >= self._until:
            return True
        if time.monotonic() - self._quiet_since > PATIENCE_S:
            raise TimeoutError(f"the stream stands at {_token(stream)} and does not reach {self._until!r}")
        return False


def _token(stream: tailrace.ChangeStream) -> Mapping[str, Any]:
    token = stream.resume_token
    return bson.decode(token.raw) if isinstance(token, RawBSONDocument) else token


def read_ours(uri: str, case: Case, until: Timestamp, **start: Any) -> OurStream:
    """Read a case in this thread."""
    reader = OurReader(uri, case, until=until, **start)
    reader.run()
    return reader.stream


class Comparison:
    """One seed on one cluster."""

    def __init__(self, cluster: ShardedCluster, workload: RandomWorkload, totals: Totals) -> None:
        self._cluster = cluster
        self._workload = workload
        self._totals = totals
        self._rng = random.Random(f"tailrace sharded cases {workload.seed}")
        database = workload.database
        images = {"fullDocument": "whenAvailable", "fullDocumentBeforeChange": "whenAvailable"}
        expanded = {"showExpandedEvents": True}
        if not workload.has_images:
            images, expanded = {}, {}
        self.live_case = Case("admin", 1, expanded)
        self.cases = [self.live_case, Case(database, 1, expanded), Case(database, "orders", images)]
        self.looking_up = Case(database, 1, {**expanded, "fullDocument": "updateLookup"})

    def __call__(self, *, resumes: int) -> Ran:
        """Run the workload with a stream open, then read and compare every case."""
        start = self._workload.prepare()
        live = OurReader(self._cluster.uri, self.live_case, start_at_operation_time=start)
        looking_up = OurReader(self._cluster.uri, self.looking_up, start_at_operation_time=start)
        for reader in (live, looking_up):
            reader.start()
            reader.opened.wait(PATIENCE_S)
        end = Timestamp(0, 1)
        try:
            ran = self._workload.run(start)
            end = ran.end
        finally:
            for reader in (live, looking_up):
                reader.end_at(end)
        for reader in (live, looking_up):
            reader.join()
        self._totals.seeds += 1
        self._totals.writes += ran.writes
        self._totals.moves += ran.counts.get("moves", 0)
        for case in self.cases:
            expected = native.union(
                self._cluster,
                case.database,
                case.collection,
                start,
                ran.end,
                for_merge=not case.has_images,
                former=ran.former,
                **case.options,
            )
            self._compare_with_the_record(f"the union of the shards, {case}", case, expected, ran)
            if case is self.live_case:
                self._compare(f"live, {case}", expected, live.stream)
            if (case.database, case.collection) == (self.looking_up.database, 1):
                self._compare_lookups(expected, looking_up.stream, ran)
            ours = read_ours(self._cluster.uri, case, ran.end, start_at_operation_time=start)
            self._compare(str(case), expected, ours)
            self._compare_with_the_record(str(case), case, ours.events, ran)
            self._resume(case, expected, ours, ran.end, resumes)
        return ran

    def _compare(self, what: str, expected: list[bytes], ours: OurStream) -> None:
        self._totals.streams += 1
        difference = stream_difference(tied(expected), replace(ours, events=tied(ours.events)))
        if difference is None:
            self._totals.events += len(expected)
            self._totals.bytes += sum(map(len, expected))
        else:
            self._report(what, difference)

    def _compare_lookups(self, expected: list[bytes], looking_up: OurStream, ran: Ran) -> None:
        bare = OurStream([_without_lookup(event) for event in looking_up.events], failure=looking_up.failure)
        self._compare(f"live, {self.looking_up}", expected, bare)
        difference = lookup_difference(looking_up.events, ran.history, ran.database)
        if difference is not None:
            self._report(f"live, {self.looking_up}", difference)

    def _compare_with_the_record(self, what: str, case: Case, events: list[bytes], ran: Ran) -> None:
        written = ran.history
        if isinstance(case.collection, str):
            only = f"{case.database}.{case.collection}"
            written = {key: wrote for key, wrote in written.items() if key[0] == only}
        difference = history_difference(written, history_of(events, ran.database))
        if difference is not None:
            self._report(f"{what}, against the record", difference)

    def _resume(self, case: Case, expected: list[bytes], ours: OurStream, until: Timestamp, count: int) -> None:
        """Resume at events' tokens, and where a stream was between two events."""
        rng = self._rng
        places = [
            (bson.decode(bson.decode(expected[at], _RAW)["_id"].raw), at + 1) for at in self._some(expected, count)
        ]
        places += rng.sample(ours.marks, min(count, len(ours.marks)))
        for token, place in places:
            resumed_at = place
            while resumed_at < len(expected) and native.token(expected[resumed_at]) == _parsed(token):
                resumed_at += 1  # two shards gave it: a resume skips both
            rest = read_ours(self._cluster.uri, case, until, resume_after=token)
            self._totals.resumes += 1
            difference = stream_difference(tied(expected[resumed_at:]), replace(rest, events=tied(rest.events)))
            if difference is not None:
                self._report(f"resumed after {token} (event {resumed_at}), {case}", difference)

    def _some(self, expected: list[bytes], count: int) -> list[int]:
        return self._rng.sample(range(len(expected)), min(count, len(expected)))

    def _report(self, what: str, difference: str) -> None:
        self._totals.differences.append(f"seed {self._workload.seed}: {what}\n  {difference}")


_RAW: bson.CodecOptions[RawBSONDocument] = bson.CodecOptions(document_class=RawBSONDocument)


def _parsed(token: Mapping[str, Any]) -> Any:
    return native.token(bson.encode({"_id": token}))


def tied(events: list[bytes]) -> list[bytes]:
    """The events, with a fixed order for those of equal tokens: which shard's comes first is not defined, not even on a
    mongos."""
    groups = groupby(events, key=lambda event: bson.decode(event, _RAW)["_id"].raw)
    return [event for _, group in groups for event in sorted(group)]


def stream_difference(expected: list[bytes], ours: OurStream) -> str | None:
    """The first difference of our stream, in words."""
    for place, (event, got) in enumerate(zip(expected, ours.events, strict=False)):
        if event != got:
            path, theirs, mine = first_difference(event, got)
            return f"event {place} at {path}\n  shards: {theirs}\n  ours:   {mine}{_why(ours)}"
    equal = min(len(expected), len(ours.events))
    if len(expected) > equal:
        return f"{len(expected) - equal} events are missing from {equal} on: {bson.decode(expected[equal])}{_why(ours)}"
    if len(ours.events) > equal:
        return f"{len(ours.events) - equal} events too many from {equal} on: {bson.decode(ours.events[equal])}"
    return _why(ours) or None


def _without_lookup(event: bytes) -> bytes:
    operation = raw_bson.find(event, b"operationType")
    assert operation is not None
    if raw_bson.value(event, operation) != raw_bson.encode_string(b"update"):
        return event
    kept = [event[e.start : e.end] for e in raw_bson.elements(event) if e.name != b"fullDocument"]
    return raw_bson.encode_document(*kept)


def lookup_difference(events: list[bytes], written: History, database: str) -> str | None:
    """The first looked-up document that is not a state at the event or later, in words. A writer's numbers ascend, and
    a document may be missing only if it was deleted later."""
    for raw in events:
        event = bson.decode(raw)
        if event["operationType"] != "update" or event["ns"]["db"] != database:
            continue
        number = event["updateDescription"]["updatedFields"]["v"]
        wrote = written.get((f"{database}.{event['ns']['coll']}", event["documentKey"]["_id"]), [])
        place = next((at for at, one in enumerate(wrote) if (one.operation, one.number) == ("update", number)), None)
        if place is None:
            return f"an update was not written: {event}"
        document, later = event["fullDocument"], wrote[place:]
        if document is None and all(one.operation != "delete" for one in later):
            return f"a document was not found, and lives: {event['documentKey']} at {event['clusterTime']}"
        if document is not None and document["v"] not in [one.number for one in later]:
            return f"a document is older than its event: {document} at {event}"
    return None


def _why(ours: OurStream) -> str:
    if ours.failure is None:
        return ""
    return "\n  " + "".join(traceback.format_exception(ours.failure)).strip().replace("\n", "\n  ")


def run_seed(totals: Totals, *, seed: int, steps: int, resumes: int, version: str | None = None) -> Ran:
    """One seed on a cluster of its own: three shards, one more half-way, and later one less."""
    with ShardedCluster(3, version=version, parameters=PARAMETERS) as cluster:
        workload = RandomWorkload(cluster, seed, steps)
        with WatchedServers(cluster, workload.fail):
            return Comparison(cluster, workload, totals)(resumes=resumes)


def run_seed_until_servers_live(totals: Totals, *, seed: int, version: str | None, **rest: int) -> Ran:
    """``run_seed``; under Wine, where servers die by themselves, again until none has. Raises ServerDiedError."""
    tries = _TRIES_UNDER_WINE if major(version or SERVER_VERSION) >= 7 else 1
    while True:
        tries -= 1
        of_this = Totals()
        try:
            ran = run_seed(of_this, seed=seed, version=version, **rest)
        except ServerDiedError as error:
            if not tries:
                raise
            totals.died += 1
            print(f"seed {seed} begins again: {error}", flush=True)
        else:
            totals.add(of_this)
            return ran


def main(arguments: list[str] | None = None) -> int:
    options = _arguments(arguments)
    totals = Totals()
    reported = 0
    with kernel_use(options.kernel) as worked:
        for seed in options.seeds:
            begun = time.monotonic()
            ran = run_seed_until_servers_live(
                totals, seed=seed, steps=options.steps, resumes=options.resumes, version=options.version
            )
            print(f"{ran}\n  {time.monotonic() - begun:.1f} s; so far {totals}", flush=True)
            for text in totals.differences[reported:]:
                print(text, flush=True)
                if options.report is not None:
                    with options.report.open("a") as report:
                        report.write(f"{text}\n\n")
            reported = len(totals.differences)
    print(f"{worked}: {totals}")
    return 1 if totals.differences else 0


def _arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = parser_of_seeds("tests.sharded.fuzz", __doc__)
    parser.add_argument("--steps", type=int, default=150, help="writes or transactions of each of three writers (150)")
    parser.add_argument("--resumes", type=int, default=5, help="resumes of each kind for each stream (5)")
    parser.add_argument("--version", help=f"of mongod ({SERVER_VERSION})")
    parser.add_argument(
        "--kernel", choices=CHOICES, default="auto", help="where it pays (auto), on each batch, or without numba (off)"
    )
    parser.add_argument("--report", type=Path, help="append every difference to this file")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
