"""The change stream of a sharded cluster: every shard's oplog is read here, and their events are merged here."""

from __future__ import annotations

import logging
import math
import time
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import bson
from pymongo import MongoClient

from tailrace.client.change_stream import ChangeStream, checked_options, collections_read
from tailrace.client.request import WatchRequest
from tailrace.client.turn import Turn
from tailrace.errors import InternalError, SourceError, TailraceError, invariant, on_shard
from tailrace.event.change_event import ChangeEvent
from tailrace.oplog.cluster_time import ClusterTime
from tailrace.oplog.namespace import Scope
from tailrace.pipeline.explain import explain
from tailrace.pipeline.merge import CONFIG_SHARDS, MergedChangeStream
from tailrace.plan.plan import Plan, build_plan
from tailrace.plan.profile import ServerProfile, profile_for
from tailrace.plan.request import (
    Emit,
    NeedDocuments,
    NeedEntries,
    NeedPreImages,
    NeedShard,
    NeedShardKeys,
    Request,
    Running,
)
from tailrace.source.membership import Beginning, beginning
from tailrace.source.mongod import AWAIT_MS, MongodSource
from tailrace.source.routing import OwnerLookup
from tailrace.source.sharded import ShardedSource, ShardStatistics
from tailrace.source.time_limit import TimeLimitError, check_time_limit, remaining_s, time_limit_of
from tailrace.source.topology import Cluster, OpenView, ShardAddress
from tailrace.source.worker import Worker

#: An event that has waited for a shard this long is worth a line in the log, and again after as long.
_REPORT_S: Final = 10.0

_log = logging.getLogger("tailrace.client")


@dataclass(frozen=True)
class StreamStatistics:
    """How a stream over a cluster is doing.

    ``shards``        each of its shards; the config server, which tells of new ones, is ``config.shards``
    ``waiting_for``   the shards without whose promise the next event, or the resume token, cannot move
    ``forced_noops``  no-ops that shards wrote because this stream asked them for a promise
    """

    shards: dict[str, ShardStatistics]
    waiting_for: tuple[str, ...]
    forced_noops: int


class _Part:
    """One shard's part: the batch that is being worked on, and the worker that answers its requests."""

    def __init__(self, answers: _Answers, worker: Worker) -> None:
        self.answers = answers
        self.worker = worker
        self.running: Running | None = None
        self.asked = False
        self.failed = False

    def close(self) -> None:
        """Answer no more. Does not wait for an answer that is under way."""
        self.answers.interrupt()
        self.worker.close()


class ShardedChangeStream(ChangeStream):
    """Raises at once what a mongos would raise on ``aggregate``. Reads ahead on threads of its own until it is closed;
    what a look finds there is worked on in the thread that looks.

    ``client``   the one that the stream was asked from: its ``timeoutMS`` bounds each call
    ``profile``  of the server version whose events to make; ``None``: that of the oldest shard
    """

    def __init__(
        self, cluster: Cluster, client: MongoClient[Any], request: WatchRequest, profile: ServerProfile | None = None
    ) -> None:
        options = checked_options(request)
        self._cluster = cluster
        self._client = client
        self._codec_options = request.codec_options
        self._await_s = (AWAIT_MS if request.max_await_time_ms is None else request.max_await_time_ms) / 1000
        _refuse_view(cluster, options.scope)
        plan = build_plan(options, profile or profile_for(cluster.server_version()))
        view = cluster.open_view()
        plan, begun = _begun(cluster, plan, view)
        self._plan = plan
        self._merged = _merged(plan, begun)
        self._token = plan.first_token.to_bson()
        self._opened_at = view.time
        self._events: deque[ChangeEvent] = deque()
        self._taking: Running | None = None
        self._parts: dict[str, _Part] = {}
        self._held_since: tuple[ClusterTime, float] | None = None
        self._source = ShardedSource(batch_size=request.batch_size, comment=request.comment)
        self._turn = Turn(partial(_close, self._source, self._parts))
        weakref.finalize(self, self._turn.end)
        for member in begun.members:
            self._read(*member)
        if begun.config_after is not None:
            self._read(CONFIG_SHARDS, cluster.config_client(), begun.config_after)

    def _read(self, name: str, client: MongoClient[Any], after: ClusterTime) -> None:
        self._source.open(name, client, after)
        worker = Worker(f"tailrace-answer-{name}", self._source.changed)
        self._parts[name] = _Part(_Answers(client, self._cluster), worker)

    def explain(self) -> dict[str, Any]:
        """The plan of each shard's part; the merge and the router's stages come after it."""
        return explain(self._plan, reads="shards")

    @property
    def resume_token(self) -> Any:
        return bson.decode(self._token, codec_options=self._codec_options)

    @property
    def alive(self) -> bool:
        return not self._turn.ended

    @property
    def has_next(self) -> bool:
        return bool(self._events)

    @property
    def statistics(self) -> StreamStatistics:
        """How the stream and its shards are doing now."""
        waiting_for: dict[str, None] = {}
        for name in self._merged.waiting_for if self.alive else ():
            part = self._parts[name]
            # A shard whose event needs a document of another one waits for that.
            waiting_for[(part.answers.asking if part.asked else None) or name] = None
        return StreamStatistics(self._source.statistics(), tuple(waiting_for), self._source.forced_noops)

    def try_next(self) -> Any | None:
        event = self.next_event()
        return None if event is None else self._decoded(event.to_bson())

    def next_event(self) -> ChangeEvent | None:
        """Like ``try_next``, but the event as the pipeline made it."""
        with self._turn, time_limit_of(self._client):
            try:
                event = self._look()
                self._turn.check()
            except TimeLimitError:
                raise
            except BaseException:
                self.close()
                raise
        return event

    def _look(self) -> ChangeEvent | None:
        """The next event, waited for once."""
        deadline = time.monotonic() + self._await_s
        while self.alive:
            if self._events:
                return self._give()
            self._advance()
            if self._events:
                continue
            self._token = self._merged.resume_token.to_bson()
            if self._merged.invalidated:
                self.close()
                break
            again_s = self._request_promises()
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                break
            check_time_limit("the cluster")
            self._wait(min(seconds for seconds in (left_s, again_s, remaining_s()) if seconds is not None))
        return None

    def _give(self) -> ChangeEvent:
        event = self._events.popleft()
        self._token = event.token_bson
        if not self._events and event.from_invalidate:
            self._advance()
            if not self._events and self._merged.invalidated:
                self._token = self._merged.resume_token.to_bson()
                self.close()
        return event

    # -- driving the merge ------------------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Work on everything that was read or answered, until there are events to give."""
        if self._taking is None:
            for name in self._merged.shards:
                self._advance_shard(name, self._parts[name])
            self._forget_closed()
            self._taking = self._merged.take()
        for request in self._taking:
            if isinstance(request, Emit):
                self._events.extend(request.events)
                if self._events:
                    return
            elif isinstance(request, NeedShard):
                client = self._cluster.client_at(ShardAddress(request.name, request.host))
                self._forget(request.name)
                self._read(request.name, client, request.read_after)
                _log.info("shard %s was added to the cluster: it is read from %s", request.name, request.start)
            else:
                raise InternalError(f"the merge asks for {type(request).__name__}")
        self._taking = None

    def _advance_shard(self, name: str, part: _Part) -> None:
        """Work on one batch of a shard, or on as much of it as the merge wants and as is answered."""
        while self._merged.wants(name):
            if part.running is None:
                batch = self._source.next_batch(name)
                if batch is None:
                    self._look_for_failure(name, part)
                    return
                part.running = self._merged.process(name, batch)
            if not self._step(part) or part.running is None:
                return

    def _step(self, part: _Part) -> bool:
        """Let a shard's part go on to its next request; False while an answer is awaited."""
        running = part.running
        invariant(running is not None, "a shard's part goes on without a batch")
        answer, failure = None, None
        if part.asked:
            outcome = part.worker.outcome()
            if outcome is None:
                return False
            part.asked = False
            answer, failure = outcome
        try:
            request = running.send(answer) if failure is None else running.throw(failure)  # type: ignore[union-attr]
        except StopIteration:
            part.running = None
            return True
        if isinstance(request, Emit):
            return True
        part.asked = True
        part.worker.submit(partial(part.answers.answer, request))
        return False

    def _look_for_failure(self, name: str, part: _Part) -> None:
        reader = self._source.reader(name)
        if reader is None or part.failed or reader.has_batch:
            return
        if reader.failure is not None:
            part.failed = True
            self._merged.fail(name, reader.failure)

    def _forget_closed(self) -> None:
        """Stop reading the shards that the merge is through with."""
        for name in set(self._parts).difference(self._merged.shards):
            self._forget(name)
            _log.info("shard %s was removed from the cluster or has ended: it is read no further", name)

    def _forget(self, name: str) -> None:
        part = self._parts.pop(name, None)
        if part is not None:
            self._source.close_shard(name)
            part.close()

    # -- waiting ----------------------------------------------------------------------------------------------------

    def _request_promises(self) -> float | None:
        """Ask the shards that hold back an event for promises; the seconds after which to look again."""
        awaited = self._merged.awaited_time
        if awaited is None and self._merged.high_water < self._opened_at:
            awaited = self._opened_at  # so that the resume token soon stands where the stream was opened
        if awaited is None:
            self._held_since = None
            return None
        again = []
        for name in self._merged.waiting_for:
            if self._parts[name].running is None and self._merged.promised(name) < awaited:
                again.append(self._source.request_promise(name, awaited))
        self._report_waiting(awaited)
        return min((seconds for seconds in again if seconds is not None), default=None)

    def _report_waiting(self, awaited: ClusterTime) -> None:
        now = time.monotonic()
        if self._held_since is None or self._held_since[0] != awaited:
            self._held_since = (awaited, now)
        elif now - self._held_since[1] >= _REPORT_S:
            self._held_since = (awaited, now)
            readers = {name: self._source.reader(name) for name in self._merged.waiting_for}
            words = [f"{name} ({(reader and reader.trouble) or 'nothing new yet'})" for name, reader in readers.items()]
            _log.warning("the event at %s waits for shard %s", awaited, ", ".join(words))
            for name in self._merged.leaving:
                # Of others the words above say enough.
                _log.warning(
                    "shard %s was removed from the cluster, and this stream has read it up to %s only: let its servers "
                    "run until the stream has read the rest",
                    name,
                    self._merged.promised(name),
                )

    def _wait(self, seconds: float) -> None:
        """Wait until a batch, an answer or a failure has come."""
        with self._source.changed:
            if self.alive and not self._something_came():
                self._source.changed.wait(seconds)

    def _something_came(self) -> bool:
        for name, part in self._parts.items():
            reader = self._source.reader(name)
            if part.asked:
                if not part.worker.busy:
                    return True
            elif reader is None or not self._merged.wants(name):
                continue
            elif reader.has_batch or part.running is not None or (reader.failure is not None and not part.failed):
                return True
        return False

    def close(self) -> None:
        self._turn.end()
        with self._source.changed:
            self._source.changed.notify_all()


class _Answers:
    """Answers one shard's requests; waits for shards that are away. Belongs to one thread at a time."""

    def __init__(self, client: MongoClient[Any], cluster: Cluster) -> None:
        self._source = MongodSource(client, retry_seconds=math.inf)
        self._owners = OwnerLookup(cluster, retry_seconds=math.inf)

    @property
    def asking(self) -> str | None:
        """The shard that a document is being read from at the moment."""
        return self._owners.asking

    def interrupt(self) -> None:
        """Wait no more: from any thread."""
        self._source.interrupt()
        self._owners.interrupt()

    def answer(self, request: Request) -> Sequence[bytes | None]:
        """The answer to a request of the shard's part. Raises TailraceError."""
        if isinstance(request, NeedEntries | NeedPreImages):
            self._source.wait_until_reachable()
        if isinstance(request, NeedEntries):
            return self._source.entries(request.times)
        if isinstance(request, NeedPreImages):
            return self._source.pre_images(request.keys)
        if isinstance(request, NeedDocuments):
            return self._owners.documents(request.lookups)
        if isinstance(request, NeedShardKeys):
            return self._owners.shard_keys(request.uuids)
        raise InternalError(f"a shard's part asks for {type(request).__name__}")


def _close(source: ShardedSource, parts: dict[str, _Part]) -> None:
    for part in parts.values():
        part.close()
    source.close()


def _begun(cluster: Cluster, plan: Plan, view: OpenView) -> tuple[Plan, Beginning]:
    """The plan with a start that every shard's oplog reaches back to, and who takes part from there."""
    if plan.read_after is None:
        plan = plan.start_after(view.time)
    after = plan.read_after or ClusterTime(0)
    begun = beginning(cluster, view, after, ignore_removed=plan.options.ignore_removed_shards)
    if begun.config_after is not None:
        MongodSource(cluster.config_client()).oldest()  # who may not read an oplog is told here, not at the first event
    images = [read for read in collections_read(plan.options) if read[0] == "config"]
    for member in begun.members:
        source = MongodSource(member.client)
        try:
            plan.confirm_history(*source.oldest())
            for database, collection in images:
                source.confirm_readable(database, collection)
        except TailraceError as error:
            raise on_shard(error, member.name) from None
    return plan, begun


def _merged(plan: Plan, begun: Beginning) -> MergedChangeStream:
    from_start = [member.name for member in begun.members if member.after == plan.read_after]
    merged = MergedChangeStream(plan, from_start, config_after=begun.config_after)
    for member in begun.members:
        merged.open_shard(member.name, member.after.tick())
    return merged


def _refuse_view(cluster: Cluster, scope: Scope) -> None:
    """Raises ServerError 166 where the name is a view or a time-series collection now, as the database's primary shard
    says; of a fixed list of shards each is asked."""
    if scope.database is None or scope.collection is None:
        return
    names = [shard.name for shard in cluster.shards()]
    if cluster.config is not None:
        primary = OwnerLookup(cluster).primary(scope.database)
        names = [] if primary is None else [primary]
    for name in names:
        client = cluster.current_client(name)
        if client is None:
            continue  # removed at this moment: the database has another primary by now
        try:
            MongodSource(client).refuse_view(scope.database, scope.collection)
        except SourceError as error:
            raise on_shard(error, name) from None
