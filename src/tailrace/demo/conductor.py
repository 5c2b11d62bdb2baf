"""The course of the demo: start everything, crash once, wait for the lake, compare. ``summary`` prints the result."""

from __future__ import annotations

import importlib
import random
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pymongo
from bson.timestamp import Timestamp

from tailrace.core import kernel
from tailrace.demo.comparison import Comparison, compare, lake_events, native_events
from tailrace.demo.lag import Lag, lag_of
from tailrace.demo.pipeline_process import PipelineProcess, write_pipeline
from tailrace.demo.shop import DATABASE
from tailrace.demo.shop_process import open_doors, open_shop, words
from tailrace.demo.tables_act import TablesResult, compare_tables, record, wait_for_tables
from tailrace.demo.upgrade_act import UpgradeResult, upgrade
from tailrace.embedded import ReplicaSet
from tailrace.errors import TailraceError
from tailrace.lake.store.commit_log import CommitLog
from tailrace.lake.store.progress import GrowthWatch
from tailrace.lake.store.verification import LakeReport, verify

_LOOK_S = 0.2
#: How long the lake may take for its first commit (Spark starts) and to catch up at the end.
_PATIENCE_S = 600
#: How long, at most, the shop of the last act works.
_UPGRADE_S = 10.0


@dataclass(frozen=True, slots=True)
class DemoSettings:
    """``seconds`` of shop work (``None``: until stopped), ``rate`` operations a second, whether to ``crash``, and
    whether to ``upgrade`` another shop's MongoDB at the end."""

    seconds: float | None = 60.0
    rate: float = 300.0
    crash: bool = True
    upgrade: bool = True
    directory: Path | None = None
    seed: int = 1
    version: str | None = None


@dataclass(slots=True)
class Crash:
    """The kill: when (seconds after the shop opened), the exit code, the last batch before and the first one after."""

    at: float
    exit_code: int
    batch_before: int
    batch_after: int | None = None

    @property
    def happened(self) -> bool:
        """Whether it was a SIGKILL, and the restart continued from the checkpoint: with the same numbers, not from the
        beginning."""
        return self.exit_code == -9 and self.batch_after is not None and self.batch_after > self.batch_before


@dataclass(slots=True)
class DemoResult:
    """What the demo has found. ``wanted_crash`` is false with ``--no-crash``."""

    lake: Path
    comparison: Comparison
    report: LakeReport
    lag: Lag | None
    operations: dict[str, int]
    seconds: float
    commits: int
    wanted_crash: bool
    crash: Crash | None = None
    tables: TablesResult | None = None
    upgrade: UpgradeResult | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def good(self) -> bool:
        crashed = self.crash is not None and self.crash.happened
        equal = self.comparison.differences == 0 and (self.tables is None or self.tables.good)
        equal = equal and (self.upgrade is None or self.upgrade.differences == 0)
        return equal and self.report.sound and (crashed or not self.wanted_crash)


class Demo:
    """One run. ``say`` gets each step as a sentence, ``show`` the progress line; ``stop`` ends the shop's day early."""

    def __init__(
        self, settings: DemoSettings, *, say: Callable[[str], None], show: Callable[[str], None], stop: threading.Event
    ) -> None:
        self._settings = settings
        self._say = say
        self._show = show
        self._stop = stop
        self._crash: Crash | None = None
        if settings.directory is None:
            self._directory = Path(tempfile.mkdtemp(prefix="tailrace-demo-"))
        else:
            self._directory = settings.directory.absolute()
            if self._directory.exists() and any(self._directory.iterdir()):
                raise TailraceError(f"{self._directory} is not empty", hint="Give the demo a directory of its own")
            self._directory.mkdir(parents=True, exist_ok=True)
        self._lake = self._directory / "lake"
        self._tables = self._directory / "tables"

    def run(self) -> DemoResult:
        """The whole course. Raises TailraceError where a part of it is not available on this machine or fails."""
        with ExitStack() as stack:
            self._say("Starting MongoDB")
            members = stack.enter_context(ReplicaSet(1, version=self._settings.version))
            self._say(f"MongoDB {members.version} is running")
            client = stack.enter_context(pymongo.MongoClient[dict[str, Any]](members.uri))
            since = _cluster_time(client)
            path = write_pipeline(self._directory, database=DATABASE, since=f"{since.time},{since.inc}")
            self._say("Compiling the batch kernel (once on a machine)")
            kernel.warm_up()
            importlib.import_module("tailrace.core.kernel.change_rows")
            watch = GrowthWatch(self._lake)
            self._say("Starting the Spark pipeline while the shop fills its shelves")

            def pipeline() -> PipelineProcess:
                return stack.enter_context(
                    closing(PipelineProcess(path, members.uri, self._directory / "pipeline.log"))
                )

            running = pipeline()
            chosen = self._settings
            shop = open_shop(members.uri, stack, seconds=chosen.seconds, rate=chosen.rate, seed=chosen.seed)
            self._wait_for_first(running, watch)
            self._say("The first changes are in the lake; the shop opens its doors")
            wait_for_tables(self._tables, Timestamp(1, 0), _PATIENCE_S, running.check)
            recorded = record(client, DATABASE, "orders")
            began = time.monotonic()
            open_doors(shop)
            running = self._watch_shop(shop, running, watch, pipeline)
            work = words(shop)
            until = self._close_shop(client)
            self._wait_for(until, running, watch)
            wait_for_tables(self._tables, until, _PATIENCE_S, running.check)
            self._say("Stopping the pipeline")
            if running.stop() != 0:
                raise TailraceError("the pipeline did not end cleanly", hint=f"See {self._directory / 'pipeline.log'}")
            seconds = time.monotonic() - began
            self._say("Comparing the lake with the server's own change stream")
            native = native_events(members.uri, DATABASE, since=since, until=until)
            comparison = compare(native, lake_events(self._lake))
            self._say("Comparing the tables with the collections")
            tables = compare_tables(self._tables, client, DATABASE, recorded, members.uri)
        return DemoResult(
            lake=self._lake,
            comparison=comparison,
            report=verify(self._lake),
            lag=lag_of(self._lake),
            operations=work["operations"],
            seconds=seconds,
            commits=watch.batches,
            wanted_crash=self._settings.crash,
            crash=self._crash,
            tables=tables,
            upgrade=self._upgrade(),
        )

    def _upgrade(self) -> UpgradeResult | None:
        """The act on ``tailrace sync``; ``None`` where it is not wanted, or the demo was asked to end."""
        settings = self._settings
        if not settings.upgrade or self._stop.is_set():
            return None
        seconds = min(settings.seconds or _UPGRADE_S, _UPGRADE_S)
        return upgrade(seconds=seconds, rate=settings.rate, seed=settings.seed, say=self._say)

    def _watch_shop(
        self,
        shop: subprocess.Popen[bytes],
        running: PipelineProcess,
        watch: GrowthWatch,
        start: Callable[[], PipelineProcess],
    ) -> PipelineProcess:
        """Show the progress until the shop closes; in the middle, kill the pipeline and start it again."""
        settings = self._settings
        began = time.monotonic()
        kill_after = settings.crash and (30.0 if settings.seconds is None else settings.seconds / 2)
        # Not always at the same point of a micro-batch: reading, writing, committing.
        jitter = random.Random(settings.seed).uniform(0, 0.3)
        told = False
        while shop.poll() is None or (kill_after and self._crash is None):
            if self._stop.wait(_LOOK_S):
                if not told:  # once: Python gives its handlers up at its end, and a second signal would cut that short
                    shop.terminate()
                    told = True
                time.sleep(_LOOK_S)
            passed = time.monotonic() - began
            self._look(running, watch)
            if kill_after and self._crash is None and (passed >= kill_after or shop.poll() is not None):
                time.sleep(jitter)
                running = self._kill(running, watch, start, began)
        return running

    def _wait_for_first(self, running: PipelineProcess, watch: GrowthWatch) -> None:
        """Until Spark has started and the shelves are in the lake."""
        deadline = time.monotonic() + _PATIENCE_S
        while not watch.batches:
            if self._stop.wait(_LOOK_S):
                raise TailraceError("the demo was stopped before the pipeline had started")
            if time.monotonic() > deadline:
                raise TailraceError(f"nothing came into the lake in {_PATIENCE_S} seconds")
            self._look(running, watch)

    def _kill(
        self, running: PipelineProcess, watch: GrowthWatch, start: Callable[[], PipelineProcess], began: float
    ) -> PipelineProcess:
        code = running.kill()
        watch.look()
        newest = CommitLog(self._lake).head().newest
        batch = -1 if newest is None else newest.batch
        self._crash = Crash(time.monotonic() - began, code, batch)
        self._say(
            f"Killed the Spark process (SIGKILL) after micro-batch {batch}; starting it again from its checkpoint"
        )
        return start()

    def _look(self, running: PipelineProcess, watch: GrowthWatch) -> None:
        running.check()
        for growth in watch.look():
            crash = self._crash
            if crash is not None and crash.batch_after is None and (growth.batch or 0) > crash.batch_before:
                crash.batch_after = growth.batch
            self._show(str(growth))

    def _close_shop(self, client: pymongo.MongoClient[dict[str, Any]]) -> Timestamp:
        """A last single write, whose cluster time ends the span that is compared."""
        with client.start_session(causal_consistency=True) as session:
            client[DATABASE]["days"].insert_one({"_id": "closed"}, session=session)
            assert session.operation_time is not None
            return session.operation_time

    def _wait_for(self, until: Timestamp, running: PipelineProcess, watch: GrowthWatch) -> None:
        log = CommitLog(self._lake)
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            newest = log.head().newest
            if newest is not None and newest.last_cluster_time >= (until.time << 32 | until.inc):
                self._look(running, watch)
                return
            if time.monotonic() > deadline:
                raise TailraceError(f"the lake did not catch up in {_PATIENCE_S} seconds")
            time.sleep(_LOOK_S)
            self._look(running, watch)


def _cluster_time(client: pymongo.MongoClient[dict[str, Any]]) -> Timestamp:
    """The next cluster time: what is written from now on is later than that."""
    with client.start_session() as session:
        client.admin.command("ping", session=session)
        now = session.operation_time
    assert now is not None
    return Timestamp(now.time, now.inc + 1)
