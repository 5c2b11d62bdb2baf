"""``tailrace run --dry-run``: what the pipeline would read and write, and what that costs the server. Writes nothing.

The costs are estimates: of the oplog's size, its number of entries and the time that it covers, by the processor times
that docs/reference/measurements.md gives for an entry.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from pymongo.errors import PyMongoError

from tailrace.act.sync.sizes import in_time, in_units, sizes_of
from tailrace.cli.output import say
from tailrace.cli.plan_line import PlanLine
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.oplog.selection import Selection
from tailrace.core.plan.profile import for_people, profile_for
from tailrace.errors import SinkError, UsageError
from tailrace.read.source.uri import hide

if TYPE_CHECKING:
    from tailrace.lake.spark.planning.deployment import Deployment
    from tailrace.lake.spark.query.options import ReadOptions
    from tailrace.lake.spark.store.pipeline_file import PipelineSettings
    from tailrace.lake.store.commit_log import Head

#: Seconds of a server's processor for an entry that is read: the entry itself, and asking whether it is in scope
#: (measurements.md, "Catching up").
_READ_S: Final = 0.9e-6
_FILTER_S: Final = 3.0e-6
#: Options that cost a look-up or a find for each update or change.
_LOOKED_UP: Final = {
    ("fullDocument", "updateLookup"): "each update costs a find by _id",
    ("fullDocument", "whenAvailable"): "each update costs a find of its post-image",
    ("fullDocument", "required"): "each update costs a find of its post-image",
    ("fullDocumentBeforeChange", "whenAvailable"): "each change costs a find of its pre-image",
    ("fullDocumentBeforeChange", "required"): "each change costs a find of its pre-image",
}


#: In their order.
_PARTS: Final = ("reads", "writes", "costs", "warning")


@dataclass(frozen=True)
class _Load:
    """Of all oplogs: entries and bytes after the position, entries a second; ``None`` where the user may not ask."""

    entries: int
    size: int
    rate: float


def print_plan(settings: PipelineSettings, *, accept_gap: bool, as_json: bool) -> int:
    """Print it. Returns 0; raises what the run would raise at once."""
    lines = sorted(_lines(settings, accept_gap=accept_gap), key=lambda line: _PARTS.index(line.part))
    if as_json:
        for line in lines:
            say(json.dumps({"part": line.part, "what": line.what, **line.facts}, default=str))
        return 0
    part = ""
    for line in lines:
        say(f"{line.part + ':' if line.part != part else '':10}{line.what}")
        part = line.part
    say("Nothing was written.")
    return 0


def _lines(settings: PipelineSettings, *, accept_gap: bool) -> Iterator[PlanLine]:
    from tailrace.cli.run_archive import has_history  # noqa: PLC0415
    from tailrace.cli.run_plan_messages import message_lines  # noqa: PLC0415
    from tailrace.lake.spark.planning.opening import open_deployment  # noqa: PLC0415  PySpark
    from tailrace.lake.spark.query import options as source_options  # noqa: PLC0415
    from tailrace.lake.spark.store.gap import find_gap, planned_position  # noqa: PLC0415
    from tailrace.lake.spark.store.stream import lake_source, stream_of  # noqa: PLC0415
    from tailrace.lake.store.identity import check_opening  # noqa: PLC0415
    from tailrace.lake.store.layout import LakeLayout  # noqa: PLC0415
    from tailrace.lake.store.partitioning import Partitioning  # noqa: PLC0415

    if settings.archive is not None and "archive" not in settings.source and has_history(settings.archive.path):
        settings = replace(settings, source={**settings.source, "archive": str(settings.archive.path)})
    source = lake_source(settings.source)
    options = source_options.parse(source)
    checkpoint = settings.checkpoint or LakeLayout(settings.lake).default_checkpoint
    asked = None if settings.partition_by is None else Partitioning.of(settings.partition_by)
    if asked is not None:
        asked.check_columns(options.columns)
    head = check_opening(settings.lake, checkpoint, stream_of(settings.source), partitioning=asked)
    held = planned_position(checkpoint)
    with closing(open_deployment(options)) as deployment:
        yield _deployment(options, deployment)
        position = _position(options, deployment, head, held)
        yield PlanLine("reads", position[1], {"from": None if position[0] is None else position[0].for_programs()})
        if accept_gap or settings.accept_gap:
            gap = find_gap(settings.lake, checkpoint, source)
            if gap is not None:
                yield PlanLine("warning", f"events are lost and would be left out: {gap}", {"gap": str(gap)})
        elif position[0] is not None:
            deployment.require_history(deployment.at(position[0]))
        yield from _copied(options, deployment, head)
        yield _lake(settings, options, head)
        yield from _catalogue(settings)
        yield from _others(settings, deployment)
        messages = list(message_lines(settings, deployment))
        yield from (line for line, _ in messages if line.part != "costs")
        yield from _costs(options, deployment, position[0])
        for line, time in messages:
            if line.part == "costs":
                yield _messages_cost(line, _load(deployment, time))


def _deployment(options: ReadOptions, deployment: Deployment) -> PlanLine:
    watched = options.watched
    if isinstance(watched, Selection):
        scope = ", ".join(watched.patterns)
    else:
        scope = ".".join(filter(None, (watched.database, watched.collection))) or "every database"
    version = for_people(deployment.server_version)
    names = [one.source.name for one in deployment.oplogs]
    where = f"{scope} of {hide(options.uri)}: MongoDB {version}, {_listed(names)}"
    return PlanLine("reads", where, {"watched": scope, "version": version, "oplogs": names})


def _listed(names: list[str]) -> str:
    return f"replica set {names[0]}" if len(names) == 1 else f"{len(names)} shards ({', '.join(names)})"


def _position(
    options: ReadOptions, deployment: Deployment, head: Head | None, held: dict[str, object] | None
) -> tuple[ClusterTime | None, str]:
    """Where the run would go on, and why there; ``None``: from the time at which it starts."""
    from tailrace.lake.store.layout import cluster_time_of  # noqa: PLC0415

    if head is not None and held is not None:
        time = deployment.offset(held).cluster_time
        return time, f"continued from its checkpoint, at cluster time {time}"
    if head is not None and head.last_token is not None:
        time = cluster_time_of(head.last_token)
        return time, f"continued from the lake's last event, at cluster time {time}"
    if head is not None and head.reached is not None:
        return head.reached, f"continued from cluster time {head.reached}, up to which the lake was read"
    start = options.start
    if start is None or start.option == "now":
        return None, "a new stream, from the time at which it starts"
    if start.option == "snapshot":
        return None, "every existing document, and every change from then on"
    if start.option == "oldest":
        oldest = deployment.oldest()
        return oldest, f"a new stream, from the oldest entry, at cluster time {oldest}"
    plan = options.plan(options.stream_options(start), profile_for(deployment.server_version))
    time = plan.read_after or ClusterTime(0)
    return time, f"a new stream, from {start.option}, at cluster time {time}"


def _copied(options: ReadOptions, deployment: Deployment, head: Head | None) -> Iterator[PlanLine]:
    if head is not None or options.start is None or options.start.option != "snapshot":
        return
    names = deployment.collections(options.selection)
    documents, size, _ = sizes_of(deployment.clients, names)
    what = f"{documents:,} documents of {len(names)} collections, {in_units(size)}, once, for the snapshot"
    yield PlanLine("reads", what, {"documents": documents, "bytes": size, "collections": names})


def _lake(settings: PipelineSettings, options: ReadOptions, head: Head | None) -> PlanLine:
    from tailrace.lake.store.status import lake_status  # noqa: PLC0415

    facts: dict[str, Any] = {"lake": str(settings.lake), "columns": list(options.columns), "new": head is None}
    if head is None:
        divided = ", ".join(settings.partition_by or ("day",))
        what = f"a new lake at {settings.lake}, by {divided}, with {len(options.columns)} columns"
        return PlanLine("writes", what, facts)
    status = lake_status(settings.lake)
    what = f"the lake at {settings.lake}, which has {status.rows:,} events in {status.files:,} files"
    return PlanLine("writes", what, {**facts, "events": status.rows, "files": status.files, "bytes": status.size})


def _catalogue(settings: PipelineSettings) -> Iterator[PlanLine]:
    """The lake's table in a catalogue, which is not asked: opening one may write."""
    from tailrace.lake.iceberg.lake_mirror import LakeMirror, identifier_of, left_behind  # noqa: PLC0415

    if settings.iceberg is not None:
        LakeMirror(settings.lake, settings.iceberg)
        table = ".".join(identifier_of(settings.lake))
        what = f"the Iceberg table {table} in the catalogue '{settings.iceberg.name}', which was not asked"
        yield PlanLine("writes", what, {"icebergTable": table})
    elif (left := left_behind(settings.lake)) is not None:
        yield PlanLine("warning", left, {"iceberg": left})


def _others(settings: PipelineSettings, deployment: Deployment) -> Iterator[PlanLine]:
    if settings.archive is not None:
        archive = settings.archive
        kept = "all of it" if archive.keep_seconds is None else f"for {in_time(archive.keep_seconds)}"
        limit = "" if archive.keep_bytes is None else f", at most {in_units(archive.keep_bytes)}"
        what = f"an archive of the whole oplog at {archive.path}, kept {kept}{limit}"
        yield PlanLine("writes", what, {"archive": str(archive.path)})
    if settings.tables is not None:
        yield from _tables(settings, deployment)


def _tables(settings: PipelineSettings, deployment: Deployment) -> Iterator[PlanLine]:
    from tailrace.lake.tables.report import report  # noqa: PLC0415  Arrow and deltalake

    tables = settings.tables
    assert tables is not None
    there = deployment.collections(tables.selection)
    try:
        known = {one.namespace for one in report(tables.root).tables}
    except (UsageError, SinkError):  # none yet
        known = set()
    new = [name for name in there if name not in known]
    documents, size, _ = sizes_of(deployment.clients, new)
    facts = {
        "tables": str(tables.root),
        "followed": sorted(known),
        "copied": new,
        "documents": documents,
        "bytes": size,
    }
    followed = f"{len(known)} tables are followed" if known else "there are none yet"
    what = f"tables at {tables.root}: {followed}"
    if new:
        what += f"; {_few(new)} copied first: {documents:,} documents, {in_units(size)}"
    if not there:
        yield PlanLine("warning", f"no collection matches {', '.join(tables.selection.patterns)} now", {})
    yield PlanLine("writes", what, facts)


def _few(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return (
        f"{shown} {'is' if len(names) == 1 else 'are'}" if len(names) <= 3 else f"{shown} and {len(names) - 3} more are"
    )


def _costs(options: ReadOptions, deployment: Deployment, position: ClusterTime | None) -> Iterator[PlanLine]:
    load = _load(deployment, position)
    if load is None:
        yield PlanLine(
            "costs", "not known: this user may not ask for the oplog's size (collStats on local.oplog.rs)", {}
        )
    else:
        each = _READ_S + _FILTER_S
        behind = f"{load.entries:,} entries, {in_units(load.size)}: about {in_time(load.entries * each)} of a core"
        facts = {"entriesBehind": load.entries, "bytesBehind": load.size, "entriesPerSecond": round(load.rate, 1)}
        yield PlanLine("costs", f"to catch up, {behind} of the server", facts)
        share = load.rate * each * 100
        then = f"then {load.rate:,.0f} entries/s, as until now: {share:.2f} % of a core, one read of each oplog"
        yield PlanLine("costs", then, {"coreShare": round(share / 100, 6)})
    for name, value in options.stage.items():
        if (name, value) in _LOOKED_UP:
            yield PlanLine("costs", f"{name}: {value}: {_LOOKED_UP[name, value]}", {name: value})


def _messages_cost(line: PlanLine, load: _Load | None) -> PlanLine:
    if load is None:
        return PlanLine("costs", f"{line.what}: not known, as above", line.facts)
    core = in_time(load.entries * (_READ_S + _FILTER_S))
    behind = f"{load.entries:,} entries, {in_units(load.size)}: about {core} of a core of the server"
    share = load.rate * (_READ_S + _FILTER_S) * 100
    facts = {**line.facts, "entriesBehind": load.entries, "bytesBehind": load.size}
    return PlanLine("costs", f"{line.what}: to catch up, {behind}; then {share:.2f} % of a core", facts)


def _load(deployment: Deployment, position: ClusterTime | None) -> _Load | None:
    """What the oplogs hold after ``position``, as if their entries were spread evenly over their time."""
    entries, size, rate = 0, 0, 0.0
    newest = deployment.newest()
    for one in deployment.oplogs:
        try:
            stats = one.connection.client.local.command("collStats", "oplog.rs")
        except PyMongoError:
            return None
        covered = max(1, newest.seconds - one.live.oldest()[0].seconds)
        part = 0.0 if position is None else min(max(0, newest.seconds - position.seconds), covered) / covered
        entries += int(stats["count"] * part)
        size += int(stats["size"] * part)
        rate += stats["count"] / covered
    return _Load(entries, size, rate)
