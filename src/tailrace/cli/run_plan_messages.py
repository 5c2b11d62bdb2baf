"""What ``tailrace run --dry-run`` says about the section ``messages``."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from tailrace.act.consumer.mongo_lease_store import MongoLeaseStore
from tailrace.act.consumer.rules.need import CloseStream, OpenStream, PullChange
from tailrace.act.consumer.rules.position import StreamPosition
from tailrace.act.consumer.standing import committed_position
from tailrace.act.consumer.watching import Watching
from tailrace.act.sync.sizes import in_units, sizes_of
from tailrace.cli.handler_argument import store_namespace
from tailrace.cli.plan_line import PlanLine
from tailrace.cli.run_messages import maker_of, publisher_of, said_of_entry, watched_stages
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.errors import ChangeStreamHistoryLost, TailraceError
from tailrace.read.source.uri import hide
from tailrace.watch.client.client import connect

if TYPE_CHECKING:
    from tailrace.lake.spark.planning.deployment import Deployment
    from tailrace.lake.spark.store.message_settings import MessageSettings
    from tailrace.lake.spark.store.pipeline_file import PipelineSettings
    from tailrace.watch.client.client import Client

_LineFrom = tuple[PlanLine, ClusterTime | None]


def message_lines(settings: PipelineSettings, deployment: Deployment) -> Iterator[_LineFrom]:
    """The lines of all entries; those of costs lack the numbers, and have the time that an entry goes on from, or
    ``None`` for the present. Raises what the run would raise at once."""
    if not settings.messages:
        return
    with connect(hide(settings.source["uri"]).reveal(), archive=settings.source.get("archive")) as client:
        for one in settings.messages:
            if one.store_uri is None:
                yield from _lines_of(one, client, client, deployment)
            else:
                with connect(one.store_uri) as keeper:
                    yield from _lines_of(one, client, keeper, deployment)


def _lines_of(
    settings: MessageSettings, client: Client[Any], keeper: Client[Any], deployment: Deployment
) -> Iterator[_LineFrom]:
    maker_of(settings)
    with closing(publisher_of(settings)):
        name = f"messages.{settings.name}"
        database, collection = store_namespace(settings.store)
        store = MongoLeaseStore(keeper[database][collection])
        position = committed_position(store, settings.resource)
        time, why = _begin(settings, position, deployment)
        watched = ", ".join(settings.selection.patterns)
        facts = {"messages": settings.name, "watched": watched, "from": None if time is None else time.for_programs()}
        yield PlanLine("reads", f"{name}: {watched}, {why}", facts), None
        there = deployment.collections(settings.selection)
        if not there:
            yield PlanLine("warning", f"{name}: no collection matches {watched} now", {}), None
        if position is None and settings.start == "snapshot":
            documents, size, _ = sizes_of(deployment.clients, there)
            what = f"{name}: {documents:,} documents of {len(there)} collections, {in_units(size)}, once"
            yield PlanLine("reads", what, {"messages": settings.name, "documents": documents, "bytes": size}), None
        if position is not None:
            yield from _checked(settings, client, store, position)
        yield from _held(settings, store)
        yield _written(settings), None
        yield PlanLine("costs", name, {"messages": settings.name}), time


def _begin(
    settings: MessageSettings, position: StreamPosition | None, deployment: Deployment
) -> tuple[ClusterTime | None, str]:
    """Where it would go on, and why there."""
    if position is not None:
        time = position.cluster_time
        return time, f"on from its committed position, at cluster time {time}"
    if settings.start == "oldest":
        time = deployment.oldest()
        return time, f"a new position, from the oldest entry, at cluster time {time}"
    if settings.start == "snapshot":
        return None, "a new position: every existing document, and every change from then on"
    return None, "a new position, from the time at which it starts"


def _checked(
    settings: MessageSettings, client: Client[Any], store: MongoLeaseStore, position: StreamPosition
) -> Iterator[_LineFrom]:
    """Open the stream there and read, as the run would, and close it."""
    watching = Watching(client, store, pipeline=watched_stages(settings), **settings.watch)
    try:
        watching.perform(OpenStream(position))
        if position.snapshot is None:
            watching.perform(PullChange(wait=True))
    except ChangeStreamHistoryLost as error:
        if settings.on_history_lost == "fail":
            raise said_of_entry(error, settings) from None
        then = "the documents would be published again" if settings.on_history_lost == "snapshot" else "a gap is noted"
        yield PlanLine("warning", f"messages.{settings.name}: {error.message}: {then}", {}), None
    except TailraceError as error:
        raise said_of_entry(error, settings) from None
    finally:
        watching.perform(CloseStream())


def _held(settings: MessageSettings, store: MongoLeaseStore) -> Iterator[_LineFrom]:
    lease = store.read(settings.resource)
    if lease is None or lease.owner is None or lease.expires_at is None or lease.expires_at < datetime.now(UTC):
        return
    what = f"messages.{settings.name}: another process holds the lease '{settings.resource}': this run would stand by"
    yield PlanLine("warning", what, {"messages": settings.name, "owner": lease.owner}), None


def _written(settings: MessageSettings) -> PlanLine:
    broker = re.sub(r"//[^/]*@", "//", settings.to)
    form = "records in Debezium's layout" if settings.form == "debezium" else f"events as {settings.form.upper()}"
    topic = f"{settings.topic}.{{database}}.{{collection}}" if settings.form == "debezium" else settings.topic
    masked = ", masked" if settings.masks is not None else ""
    what = (
        f"messages.{settings.name}: {form}{masked}, to {broker}, topic {topic}; lease and position: "
        f"'{settings.resource}' in {settings.store}"
    )
    facts = {"messages": settings.name, "broker": broker, "topic": topic, "leases": settings.store}
    return PlanLine("writes", what, {**facts, "resource": settings.resource})
