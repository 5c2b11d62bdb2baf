"""The lake compared with the server's own stream, event by event. One Spark session serves every seed."""

from __future__ import annotations

import contextlib
import io
import random
import re
import shutil
import threading
from contextlib import AbstractContextManager
from functools import cache
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.errors import PySparkException

from tailrace.base.object_place import ObjectPlace
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.errors import SinkError, TailraceError, UsageError
from tailrace.lake.store.identity import partitioning_of, read_identity
from tailrace.lake.store.lake_root import LakeRoot
from tests.products.archive import ArchiveProduct, came_or_went, record
from tests.products.lake_catalogue import CATALOGUE, catalogue_of, unlike_iceberg
from tests.products.late_source import lakes_beginning_at
from tests.products.product import Job, Product
from tests.products.put_aside import Kind, is_of, kind_put_aside, pipeline_of, put_aside
from tests.products.snapshot import kind_of, unlike_a_copy
from tests.products.truth import Truth, first_of, time_of
from tests.sharded import native
from tests.sharded.fuzz import tied

_EVENTS_A_BATCH = "300"
#: After how many runs the lake is compacted by hand, which merges the files of the quarantine too.
_MERGED = 0.3
_EVERY_COLUMN = (
    "event,token,operation_type,cluster_time,wall_time,database,collection,document_key,full_document,"
    "update_description"
)
_BEGUN_WITH = "event,token,collection"
_NARROW = '[{"$match": {"operationType": {"$in": ["insert", "delete"]}}}]'
#: Why a lake that has only just begun cannot be changed.
_BEGINS_ANEW = re.compile(r"has no events yet|of several server versions|by now: it is not known").search
#: The message about a data file whose bytes have changed.
_NOT_AS_WRITTEN = re.compile(r"\.parquet (has \d+ bytes, and the log says|is not what was written)").search


@cache
def session() -> Any:
    """The one Spark session, started when it is first asked for."""
    from tailrace.spark import local_session

    spark = local_session("products", cores=2, fast_start=True)
    spark.sparkContext.setLogLevel("OFF")
    return spark


def end() -> None:
    """Stop the session, if there is one."""
    if session.cache_info().currsize:
        session().stop()
        session.cache_clear()


class LakeProduct(Product):
    name = "lake"
    parts = (
        "lake", "lake.checkpoint", "lake/_tailrace", "lake/_delta_log", "lake/day=*", "lake/_quarantine",
        "lake/_tailrace/quarantine-ledger.json", "newest log",
    )  # fmt: skip
    own_files = "lake/**/*"
    on_spark = True
    limits = ArchiveProduct.limits

    def lake_of(self, job: Job) -> LakeRoot:
        """Where the lake is, for whoever reads it."""
        return job.root / "lake"

    def written_to(self, job: Job) -> dict[str, Any]:
        """The same for a stream."""
        return {"lake": job.root / "lake"}

    def for_iceberg(self, job: Job) -> dict[str, str]:
        """pyiceberg's properties of the store that it is in."""
        return {}

    def advance(self, job: Job) -> None:
        from tailrace.lake import CompactionPolicy, compact

        rng = random.Random(f"tailrace lake {job.options['played']}")
        start = ClusterTime(job.start).tick()
        options = {
            "uri": job.uri,
            "columns": rng.choice(("event,token", _EVERY_COLUMN)),
            "maxEventsPerTrigger": _EVENTS_A_BATCH,
            "partitions": rng.choice(("1", "2", "4")),
        }
        begin = {"startAtOperationTime": f"{start.seconds},{start.increment}"}
        copied = {"startingFrom": "snapshot", "fullDocument": "updateLookup"}
        options |= copied if _begins_with_a_copy(job) else begin
        kind = kind_put_aside(job)
        if kind is not None:
            options["pipeline"] = pipeline_of(kind)
        late: AbstractContextManager[None] = contextlib.nullcontext()
        alone: AbstractContextManager[object] = contextlib.nullcontext()
        if _reads_an_archive(job):
            late, alone = self._archived(job, options), _ONE_AT_A_TIME
        divided = (("day", "collection"), ("day", "hour", "collection")) if "collection" in options["columns"] else ()
        chosen: dict[str, Any] = {
            "compaction": CompactionPolicy(every=4, fan_in=2),
            "partition_by": rng.choice((None, ("day", "hour"), *divided)),
            "on_error": rng.choice(("fail", "quarantine")) if kind is None else "quarantine",
            "iceberg": catalogue_of(job, self.lake_of(job)),
            **_planted_sink(job.planted),
        }
        with alone, late:
            if "pipeline" not in options and "startingFrom" not in options and _begins_narrow(job):
                self._widen(options, job, chosen)
            self._write(options, job, chosen)
        if chosen["iceberg"] is None and random.Random(f"tailrace lake merged {job.seed}").random() < _MERGED:
            compact(self.lake_of(job))

    def _widen(self, options: dict[str, str], job: Job, chosen: dict[str, Any]) -> None:
        """Begin the lake with a narrower stream, and change it: it is then the wider one's. Where there is no event to
        begin with, or the events of another version, it begins anew. If that is killed, the next run goes on with it.
        """
        from tailrace.lake.spark.store.change import change_lake

        place = self.written_to(job)  # as of a command, with keys in the environment
        known = read_identity(self.lake_of(job))
        if known is not None and known["stream"].get("columns") != _BEGUN_WITH.split(","):
            return
        if known is None:
            self._write({**options, "columns": _BEGUN_WITH, "pipeline": _NARROW}, job, chosen)
        try:
            change_lake(options, **place)
        except UsageError as error:
            if not _BEGINS_ANEW(error.message):
                raise
            self.begin_anew(job)

    def begin_anew(self, job: Job) -> None:
        """Remove the lake, and what belongs to it."""
        shutil.rmtree(job.root / "lake")
        shutil.rmtree(job.root / "lake.checkpoint")
        (job.root / CATALOGUE).unlink(missing_ok=True)

    def _archived(self, job: Job, options: dict[str, str]) -> AbstractContextManager[None]:
        """Let the lake read an archive of everything up to now, and let the oplog begin in the middle of it. On a
        cluster, only while it has its original shards: a stream cannot begin in an archive before a shard joined or
        left."""
        archive = job.root / "archive"
        record(job.uri, archive)
        if job.moved and (came_or_went(job) or job.options.get("only") == "advance"):  # they do while there are writes
            return contextlib.nullcontext()
        options["archive"] = str(archive)
        pauses = [one for one in Truth(Path(job.truth)).pauses() if one <= job.time]
        return lakes_beginning_at(random.Random(job.seed).choice(pauses), archive)

    def _write(self, options: dict[str, str], job: Job, chosen: dict[str, Any]) -> None:
        from tailrace.lake.spark.store.stream import write_stream

        query = write_stream(session(), options, **self.written_to(job), available_now=True, **chosen)
        try:
            query.awaitTermination(job.options.get("stopped_after_s"))
        except PySparkException as error:
            raise _of_ours(error) from error
        finally:
            with contextlib.suppress(PySparkException):
                query.stop()

    def differences(self, job: Job, truth: Truth) -> list[str]:
        from tailrace.lake import files, verify

        lake = self.lake_of(job)
        try:
            events = [event for file in files(lake) for event in _events_in(lake, file)]
        except (OSError, pa.ArrowException) as error:  # what a reader raises at a damaged or missing file
            raise SinkError(f"the lake cannot be read: {error}") from error
        if partitioning_of(read_identity(lake) or {}).collection:
            events = _in_one_order(events)
        kind = kind_put_aside(job)
        told = _unlike(events, put_aside(lake), kind, job, truth)
        if (catalogue := catalogue_of(job, lake)) is not None:
            told += unlike_iceberg(lake, catalogue, events, self.for_iceberg(job))
        problems = verify(lake, full=True).problems
        for problem in filter(_NOT_AS_WRITTEN, problems):
            # A reader of Parquet does not notice that a whole file is another one's; ``verify`` does (how-to/lake.md).
            raise SinkError(f"lake verify: {problem}")
        return told + [f"lake verify: {problem}" for problem in problems]


def _events_in(lake: LakeRoot, name: str) -> list[bytes]:
    """The events of a file that the lake names."""
    where: Any = name
    if isinstance(lake, ObjectPlace):
        where = io.BytesIO((lake / name.removeprefix(f"{lake}/")).read_bytes())
    found: list[bytes] = pq.read_table(where, page_checksum_verification=True).column("event").to_pylist()
    return found


def _unlike(events: list[bytes], aside: list[bytes], kind: Kind | None, job: Job, truth: Truth) -> list[str]:
    """How a lake's events, and those in its quarantine, differ from what the server says. Events of ``kind`` are put
    aside."""
    strange = [event for event in aside if kind is None or not is_of(kind, event)]
    told = (
        [f"{len(strange)} events in the quarantine that can be written, first {strange[0]!r}"[:600]] if strange else []
    )
    if _begins_with_a_copy(job):
        return told + unlike_a_copy(_in_one_order(events + aside) if aside else events, job, truth)
    every = truth.events(ClusterTime(job.start).tick(), job.time)
    away = [event for event in every if kind is not None and is_of(kind, event)]
    kept = [event for event in every if kind is None or not is_of(kind, event)] if away else every
    told += first_of(kept, _until(events, job), "event of the lake")
    return told + first_of(away, _in_one_order(_until(aside, job)), "event in the quarantine")


def _until(events: list[bytes], job: Job) -> list[bytes]:
    return [event for event in events if time_of(event) <= job.time]


def _in_one_order(events: list[bytes]) -> list[bytes]:
    """In a lake that is partitioned by collection, each file has an order of its own. Copied documents come first."""

    def place(event: bytes) -> tuple[bool, bytes]:
        is_change = kind_of(event) != b"snapshot"
        return is_change, native.token(event).sort_key if is_change else b""

    return tied(sorted(events, key=place))


def _begins_with_a_copy(job: Job) -> bool:
    """One in three seeds."""
    return bool(job.options.get("played", 3) // 3 % 3 == 0)


#: Lakes run on threads of one process, and what lets an oplog begin later is of the whole process: where two of them
#: overlapped, the one that ended last put back what the other one had set.
_ONE_AT_A_TIME: Final = threading.Lock()


def _reads_an_archive(job: Job) -> bool:
    """Whether the oplog is made to begin later than the lake: in two of five seeds."""
    return random.Random(f"tailrace lake archive {job.options['played']}").random() < 0.4


def _begins_narrow(job: Job) -> bool:
    """Whether the lake begins with a narrower stream and is changed: in half of the seeds."""
    return random.Random(f"tailrace lake changed {job.options['played']}").random() < 0.5


def _of_ours(error: PySparkException) -> TailraceError:
    """The error with which a query failed: one of ours in another process, wrapped by Spark, or a crash."""
    text = str(error)
    known = "tailrace.errors" in text or "TailraceError" in text or "tailrace.base.durable.LakeFullError" in text
    known = known or "tailrace.lake.iceberg.catalog.CatalogError" in text
    if not known:
        raise RuntimeError(text) from error
    lines = [line for line in text.splitlines() if "tailrace." in line and "Error:" in line]
    return SinkError((lines[-1] if lines else text)[:600])


def _planted_sink(planted: str) -> dict[str, Any]:
    from tests.products.planted import sink_of

    found = sink_of(planted)
    return {} if found is None else {"sink": found}
