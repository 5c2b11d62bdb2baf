"""Tables compared with the collections, now and as of earlier times. They are kept as ``tailrace run`` keeps them."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Final

import pyarrow as pa
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from tailrace.cli.run_tables import tabling
from tailrace.core.oplog.cluster_time import ZERO, ClusterTime
from tailrace.errors import SinkError
from tailrace.lake.tables.as_of import as_of
from tailrace.lake.tables.delta_commit import stated
from tailrace.lake.tables.names import folder_of
from tailrace.lake.tables.schema import Policy
from tailrace.lake.tables.settings import TableRule, TableSettings
from tests.products import nested, typed
from tests.products.archive import REPLACED, came_or_went, record
from tests.products.product import Job, Product
from tests.products.truth import Truth, difference_of, renamed, time_of
from tests.snapshot.copies import opened
from tests.tables.change_feeds import feed_faults
from tests.tables.equality import in_table, read
from tests.tables.test_as_of import rows_of

_ASKED = 4
#: How many of the tables are read by other programs after each run.
_READ = 2
_SECOND_H = 1 / 3600
#: A document that was in quarantine is not in the versions of its table.
_POLICIES: Final[tuple[Policy, ...]] = ("quarantine", "quarantine", "widen", "evolve")


class TablesProduct(Product):
    name = "tables"
    parts: ClassVar[tuple[str, ...]] = ("_tailrace", "[!_]*", "_quarantine", "newest log")
    copies = True
    is_read_in_part = True
    policies: ClassVar[tuple[Policy, ...]] = _POLICIES

    def advance(self, job: Job) -> None:
        stop = threading.Event()
        # This is what ``tailrace run --available-now`` does: it goes up to the time at which it begins, which is not
        # before the pause.
        with maintained(), tabling(job.uri, self._settings(job), stop, once=True):
            pass

    def _root(self, job: Job) -> Path:
        return job.root

    def _settings(self, job: Job) -> TableSettings:
        """Some seeds have tables that are partitioned and ordered, and soon remove replaced files."""
        rng = random.Random(f"tailrace tables {job.options['played']}")
        rules = self._rules(job)
        others = job.options.get("patterns", [f"{one}.*" for one in job.databases])
        return TableSettings(
            self._root(job),
            (*rules, *nested.rules(job.options["played"], job.databases), *map(TableRule, others)),
            every_s=0.0,
            compact_every=rng.choice((1, 3)),
            grace_h=rng.choice((0.0, _SECOND_H, 1 / 6)),
            versions=rng.choice((1, 7, 100_000)),
            feed_h=rng.choice((0.0, 24.0)),
            merge_on_read=rng.choice((False, True)),
        )

    def _rules(self, job: Job) -> tuple[TableRule, ...]:
        return typed.rules(int(job.options["played"]), job.databases, self.policies)

    def differences(self, job: Job, truth: Truth) -> list[str]:
        root = self._root(job)
        expected = {name: one for name, one in truth.collections(job.time).items() if _is_tabled(job, name)}
        known = {name for pause in truth.pauses() for name in truth.collections(pause)}
        tabled = {name for name in known if _is_tabled(job, name) and (root / folder_of(name)).exists()}
        found = {name: _rows(root, name) for name in {*expected, *tabled}}
        told = _strange(root, {*map(folder_of, known)})
        for rule in self._rules(job):
            documents = found.get(rule.pattern)
            if documents is not None and rule.schema.policy == "quarantine":
                away, wrong = typed.quarantined(root, rule, expected.get(rule.pattern, {}), documents)
                found[rule.pattern] = {**documents, **away}
                told += wrong
        for namespace in sorted(tabled):
            told += [f"the feed of {namespace}: {one}" for one in feed_faults(root / folder_of(namespace))]
        return told + difference_of(expected, found, "the table of") + self._read(job, tabled)

    def _read(self, job: Job, tabled: Iterable[str]) -> list[str]:
        """Differences found by other programs: in the tables made for them, and in any other one."""
        rng = random.Random(job.seed)
        made = [one for one in sorted(tabled) if one.endswith((f".{typed.DECLARED}", f".{typed.INFERRED}"))]
        chosen = [*rng.sample(made, min(len(made), _READ)), *rng.sample(sorted(tabled), min(1, len(list(tabled))))]
        told = [text for one in chosen for text in typed.unlike_its_documents(self._root(job), one, rng)]
        for rule in nested.rules(job.options["played"], job.databases):
            if rule.pattern in tabled:
                told += nested.unlike_its_documents(self._root(job), rule, rng)
        return told


def _rows(root: Path, namespace: str) -> dict[bytes, bytes] | None:
    try:
        return in_table(root, namespace)
    except (OSError, pa.ArrowException) as error:  # what a reader raises at a damaged or missing file
        raise SinkError(f"the table of {namespace} cannot be read: {error}") from error


class AsOfProduct(TablesProduct):
    """The same tables, asked for what they held at earlier pauses. They are brought forward less often, so that pauses
    lie inside their micro-batches. The entries in between come from the deployment or from an archive."""

    name = "as-of"
    parts = ("tables/_tailrace", "tables/[!_]*", "newest log", "archive", "archive/*/*.parquet")
    policies = ("widen", "evolve")
    limits = (REPLACED,)

    def advance(self, job: Job) -> None:
        super().advance(job)
        record(job.uri, job.root / "archive")

    def _root(self, job: Job) -> Path:
        return job.root / "tables"

    def differences(self, job: Job, truth: Truth) -> list[str]:
        told = super().differences(job, truth)
        rng = random.Random(job.seed)
        for pause, namespace in self._asked(job, truth, rng):
            expected = truth.collections(pause)
            folder = self._root(job) / folder_of(namespace)
            first = min((one.time for one in stated(folder)), default=None) if folder.exists() else None
            if first is None or pause < first:
                continue
            source: dict[str, Any] = rng.choice(({"uri": job.uri}, {"archive": job.root / "archive"}))
            if "archive" in source and job.moved and came_or_went(job):
                # An archive does not lead past a shard that has joined or left (how-to/tables.md).
                source = {"uri": job.uri}
            found = as_of(self._root(job), namespace, pause, **source)
            what = f"as of {pause}, by the {next(iter(source))}, the table of"
            told += difference_of({namespace: expected[namespace]}, {namespace: rows_of(found.rows)}, what)
        return told

    def _asked(self, job: Job, truth: Truth, rng: random.Random) -> Iterator[tuple[ClusterTime, str]]:
        """Pauses and collections that existed then: any, and those that had just got their names."""
        pauses = [pause for pause in truth.pauses() if pause <= job.time]
        renames = [event for event in truth.events(ZERO, job.time) if renamed([event])]
        for number in range(_ASKED):
            pause, chosen = rng.choice(pauses), ""
            if number % 2 and renames:
                event = rng.choice(renames)
                pause = next(one for one in pauses if one >= time_of(event))
                chosen = ".".join(opened(event)["to"][part] for part in ("db", "coll"))
            there = [one for one in sorted(truth.collections(pause)) if _is_tabled(job, one)]
            yield pause, chosen if chosen in there else rng.choice(there)


class _Complaints(logging.Handler):
    """Catches a writer's messages about failed upkeep, after which it goes on and tries again later."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """See ``logging.Handler``."""
        text = record.getMessage()
        if "were not merged" in text or "were not removed" in text:
            self.said.append(text)


@contextmanager
def maintained() -> Iterator[None]:
    """Raise SinkError if upkeep has failed."""
    complaints, log = _Complaints(), logging.getLogger("tailrace.tables")
    log.addHandler(complaints)
    try:
        yield
    finally:
        log.removeHandler(complaints)
    if complaints.said:
        raise SinkError(f"upkeep has failed: {complaints.said[0]}")


def _strange(root: Path, known: set[str]) -> list[str]:
    """Tables of collections that existed at no pause, and so must be empty."""
    strange = sorted({path.parent.parent for path in root.glob("[!_]*/_delta_log/*.json")})
    rows = {path.name: read(DeltaTable(path), "_key").num_rows for path in strange if path.name not in known}
    return [f"the table {name} has {count} rows of no collection" for name, count in rows.items() if count]


def _is_tabled(job: Job, namespace: str) -> bool:
    """Leaves out what the server makes in passing and removes again, and what the oplog does not show."""
    return not namespace.split(".", 1)[1].startswith(("tmp", "system.")) and namespace not in job.unlogged


#: A reader's error about a damaged table is a refusal too.
REFUSALS = (DeltaError,)
