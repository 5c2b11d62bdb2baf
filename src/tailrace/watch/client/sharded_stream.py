"""The change stream of a sharded cluster: every shard's oplog is read here, and their events are merged here."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import bson
from pymongo import MongoClient

from tailrace.core.event.event_block import EventBlock
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.oplog.namespace import Scope
from tailrace.core.pipeline.explain import explain
from tailrace.core.plan.options import StreamOptions
from tailrace.core.plan.plan import Plan, build_plan
from tailrace.core.plan.profile import ServerProfile, for_people, profile_for
from tailrace.core.plan.request import (
    Answer,
    NeedEntries,
    NeedPreImages,
    NeedShard,
    PreImageKey,
    Request,
)
from tailrace.core.stream.merge import CONFIG_SHARDS, MergedStream
from tailrace.core.stream.stream import LATER, Later, Need
from tailrace.errors import (
    ChangeStreamHistoryLost,
    LaterEntryError,
    NonResumableError,
    OtherVersionError,
    ServerError,
    SourceError,
    TailraceError,
    on_shard,
)
from tailrace.read.source.drive import answer_request, drive
from tailrace.read.source.live import LiveSource
from tailrace.read.source.membership import Beginning, beginning
from tailrace.read.source.mongod import MongodSource
from tailrace.read.source.routing import OwnerLookup
from tailrace.read.source.shard_reader import ShardReader
from tailrace.read.source.sharded import ShardedSource, SharedReads
from tailrace.read.source.time_limit import check_time_limit, remaining_s
from tailrace.read.source.topology import Cluster, OpenView, ShardAddress
from tailrace.read.source.unknown_kinds import tell_of_unknown_kinds
from tailrace.read.source.worker import Worker
from tailrace.watch.client import kernel_loader
from tailrace.watch.client.change_stream import BlockChangeStream
from tailrace.watch.client.checked import checked_options, collections_read
from tailrace.watch.client.commands import StreamCommands, telling_refusals
from tailrace.watch.client.request import WatchRequest
from tailrace.watch.client.session import StreamSession, known_clock
from tailrace.watch.client.shard_failures import ShardFailures
from tailrace.watch.client.statistics import StreamStatistics
from tailrace.watch.client.stream_errors import in_execution, named_version

if TYPE_CHECKING:
    from tailrace.read.archive.cluster_hybrid import ArchivedShards

#: An event that has waited for a shard this long is worth a line in the log, and again after as long.
_REPORT_S: Final = 10.0

_log = logging.getLogger("tailrace.client")


class _ShardAnswers:
    """One shard's part: who answers its needs, and the need that is being answered."""

    def __init__(self, answers: _Answers, worker: Worker) -> None:
        self.answers = answers
        self.worker = worker
        self.asked: Need | None = None
        self.failed = False
        #: Pre-images of the batch that the shard's part works on, if they are computed here (exact images).
        self.images: Mapping[PreImageKey | tuple[bytes, int, int], bytes] | None = None

    def answer(self, need: Need) -> Answer | Later:
        """The answer to a need, which a thread finds out: ``LATER`` until it has. Raises TailraceError."""
        if self.images is not None and isinstance(need.request, NeedPreImages):
            return [self.images.get(PreImageKey(*key)) for key in need.request.keys]
        if self.asked is not need:
            self.asked = need
            self.worker.submit(partial(self.answers.answer, need.request))
            return LATER
        outcome = self.worker.outcome()
        if outcome is None:
            return LATER
        self.asked = None
        found: tuple[Answer, TailraceError | None] = outcome
        answer, failure = found
        if failure is not None:
            raise failure
        return answer

    def close(self) -> None:
        """Answer no more. Does not wait for an answer that is under way."""
        self.answers.interrupt()
        self.worker.close()


class ShardedChangeStream(BlockChangeStream):
    """Raises at once what a mongos would raise on ``aggregate``. Reads ahead in threads of its own until it is closed;
    the caller's thread makes the events of what was read.

    ``client``   the one whose ``watch`` was called: its ``timeoutMS`` bounds each call
    ``profile``  of the server version whose events to make; ``None``: that of the oldest shard
    ``shared``   what it reads of the shards together with other streams
    ``archive``  of the cluster: a start that lies before a shard's oplog is read from it
    ``on_close`` called once the stream has closed
    """

    def __init__(
        self,
        cluster: Cluster,
        client: MongoClient[Any],
        request: WatchRequest,
        profile: ServerProfile | None = None,
        shared: SharedReads | None = None,
        *,
        archive: ArchivedShards | None = None,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        self._request = request
        #: Whether the user named the version; otherwise the stream takes that of the oldest shard.
        self._is_chosen = profile is not None
        with telling_refusals(request):
            profile = profile or profile_for(cluster.server_version())
            options = checked_options(request, profile)
            StreamSession(request.session).check_snapshot(cluster.server_version)
            refuse_view_in(cluster, options.scope)
            plan = self._planned(options, profile)
            view = self._viewed(cluster, plan)
            plan, begun = _begun(cluster, plan, view, archive)
            self._confirm(begun)
        self._archive = archive
        self._cluster = cluster
        self._profile = profile
        self._merged = _merged(plan, begun)
        self._opened_at = view.time
        self._parts: dict[str, _ShardAnswers] = {}
        self._held_since: tuple[ClusterTime, float] | None = None
        self._source = ShardedSource(batch_size=request.batch_size, comment=request.comment, shared=archive or shared)
        super().__init__(client, request, self._merged, partial(_close, self._source, self._parts, on_close))
        self._read_all(begun)
        if self._commands is not None:
            self._commands.clocks = lambda: [known_clock(each) for each in cluster.clients]
        self._failures = ShardFailures(client, request, self._commands)
        self._failures.opened(self._token_given())

    def _planned(self, options: StreamOptions, profile: ServerProfile) -> Plan:
        return build_plan(options, profile)

    def _viewed(self, cluster: Cluster, plan: Plan) -> OpenView:
        """The cluster as the stream finds it when it opens. A stream without a start begins there."""
        return cluster.open_view()

    def _confirm(self, begun: Beginning) -> None:
        """Raises TailraceError if a shard cannot be read from the stream's start."""

    def _read_all(self, begun: Beginning) -> None:
        for member in begun.members:
            self._read(*member)
        if begun.config_after is not None:
            self._read(CONFIG_SHARDS, self._cluster.config_client(), begun.config_after)

    def _go_over(self) -> None:
        """A shard is read at a member that gives other events than before, as in an upgrade under way: open the stream
        again where it is, with the events of the version that its oldest shard has now."""
        for name in list(self._parts):
            self._forget(name)
        version = self._cluster.server_version()
        if not self._is_chosen:
            self._profile = profile_for(version)
        name = for_people(self._profile.name)
        _log.info("a shard was upgraded: the stream goes on with the events of MongoDB %s", name)
        token = bson.decode(self._token_given())
        request = self._request.resumed(token, has_given=self._has_given)
        plan = self._planned(checked_options(request, self._profile), self._profile)
        view = self._viewed(self._cluster, plan)
        plan, begun = _begun(self._cluster, plan, view, self._archive)
        self._confirm(begun)
        self._stream = self._merged = _merged(plan, begun)
        self._opened_at = view.time
        self._read_all(begun)

    def _read(self, name: str, client: MongoClient[Any], after: ClusterTime) -> None:
        self._source.open(name, client, after)
        worker = Worker(f"tailrace-answer-{name}", self._source.changed)
        archive = self._archive
        source = MongodSource(client, retry_seconds=math.inf) if archive is None else archive.source(name, client)
        self._parts[name] = _ShardAnswers(_Answers(source, self._cluster), worker)

    def explain(self) -> dict[str, Any]:
        """The plan of each shard's part; the merge and the router's stages come after it."""
        return explain(self._merged.plan, reads="shards")

    @property
    def statistics(self) -> StreamStatistics:
        """How the stream and its shards are doing now."""
        waiting_for: dict[str, None] = {}
        for name in self._merged.waiting_for if self.alive else ():
            part = self._parts[name]
            # A shard whose event needs a document of another one waits for that.
            waiting_for[(part.answers.asking if part.asked else None) or name] = None
        return StreamStatistics(
            self._source.statistics(),
            tuple(waiting_for),
            self._source.forced_noops,
            self._merged.statistics.unknown_operations,
        )

    def _leaves_open(self, error: BaseException) -> bool:
        return super()._leaves_open(error) or error is self._failures.kept

    def _look(self) -> bytes | None:
        with self._failures.looking(self._readers()):
            found = super()._look()
        self._session.advance(self._merged.high_water, [reader.clock_document for reader in self._readers()])
        return found

    def _readers(self) -> list[ShardReader]:
        return [reader for name in self._parts if (reader := self._source.reader(name)) is not None]

    def _tell_look(self, commands: StreamCommands) -> None:
        self._failures.looks(self._token_given(), has_given=self._has_given)

    # -- driving the merge ------------------------------------------------------------------------------------------

    def _next_block(self) -> EventBlock | None:
        """Work on everything that was read or answered, until there are events to give."""
        while True:
            has_fed = self._feed()
            try:
                block = next(drive(self._merged, self._answer), None)
            except LaterEntryError as error:
                raise (named_version(error) if self._is_chosen else error) from None
            except OtherVersionError:
                check_time_limit("the cluster")
                self._go_over()
                continue
            except (ServerError, NonResumableError) as error:
                # Shards are asked for a first batch of no events: what fails at one fails a getMore.
                raise in_execution(error, self._profile, is_opening=False) from error.__cause__
            if block is not None:
                return block
            self._forget_closed()
            if not has_fed:
                return None

    def _feed(self) -> bool:
        """Give the merge what was read, where it wants more; False where there is nothing."""
        has_fed = False
        tell_of_unknown_kinds()
        for name, part in self._parts.items():
            if not self._merged.wants(name):
                continue
            batch = self._source.next_batch(name)
            if batch is None:
                self._look_for_failure(name, part)
            else:
                part.images = batch.images  # the batch before it is done
                self._merged.feed(name, batch)
                has_fed = True
        return has_fed

    def _answer(self, need: Need) -> Answer | Later:
        request = need.request
        if isinstance(request, NeedShard):
            client = self._cluster.client_at(ShardAddress(request.name, request.host))
            self._forget(request.name)
            self._read(request.name, client, request.read_after)
            _log.info("shard %s was added to the cluster: it is read from %s", request.name, request.start)
            return None
        return self._parts[need.participant].answer(need)

    def _look_for_failure(self, name: str, part: _ShardAnswers) -> None:
        reader = self._source.reader(name)
        if reader is None or part.failed or reader.has_batch:
            return
        if reader.failure is not None:
            part.failed = True
            self._merged.fail(name, reader.failure)

    def _forget_closed(self) -> None:
        """Stop reading the shards that the merge is through with."""
        for name in set(self._parts).difference(self._merged.participants):
            self._forget(name)
            _log.info("shard %s was removed from the cluster or has ended: it is no longer read", name)

    def _forget(self, name: str) -> None:
        part = self._parts.pop(name, None)
        if part is not None:
            self._source.close_shard(name)
            part.close()

    # -- waiting ----------------------------------------------------------------------------------------------------

    def _read_more(self, left_s: float) -> bool:
        self._session.check_get_more()
        again_s = self._request_promises()
        check_time_limit("the cluster")
        self._failures.check(self._readers(), self._token_given(), has_given=self._has_given)
        self._wait(min(seconds for seconds in (left_s, again_s, remaining_s()) if seconds is not None))
        return True

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
            if self._merged.wants(name) and self._merged.promised(name) < awaited:
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
                    "shard %s was removed from the cluster, and this stream has read it only up to %s: let its servers "
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
            elif reader.has_batch or (reader.failure is not None and not part.failed):
                return True
        return False

    def close(self) -> None:
        super().close()
        with self._source.changed:
            self._source.changed.notify_all()


class _Answers:
    """Answers one shard's requests; waits for shards that are away. Belongs to one thread at a time."""

    def __init__(self, source: LiveSource, cluster: Cluster) -> None:
        self._source = source
        self._owners = OwnerLookup(cluster, retry_seconds=math.inf)

    @property
    def asking(self) -> str | None:
        """The shard that a document is being read from at the moment."""
        return self._owners.asking

    def interrupt(self) -> None:
        """Wait no more: from any thread."""
        self._source.interrupt()
        self._owners.interrupt()

    def answer(self, request: Request) -> Answer:
        """The answer to a request of the shard's part. Raises TailraceError."""
        if isinstance(request, NeedEntries | NeedPreImages):
            self._source.wait_until_reachable()
        return answer_request(request, self._source, self._owners)


def _close(source: ShardedSource, parts: dict[str, _ShardAnswers], on_close: Callable[[], None]) -> None:
    for part in parts.values():
        part.close()
    source.close()
    on_close()


def _begun(cluster: Cluster, plan: Plan, view: OpenView, archive: ArchivedShards | None) -> tuple[Plan, Beginning]:
    """The plan with a start that every shard's oplog or archive reaches back to, and who takes part from there."""
    if plan.read_after is None:
        plan = plan.start_after(view.time)
    after = plan.read_after or ClusterTime(0)
    try:
        begun = beginning(cluster, view, after, ignore_removed=plan.options.ignore_removed_shards)
    except ChangeStreamHistoryLost:
        if archive is not None:
            archive.confirm_members(after)  # which names the shard, and the way to what is archived of it
        raise
    if begun.config_after is not None:
        MongodSource(cluster.config_client()).oldest()  # fails here, not at the first event, without the right
    images = [read for read in collections_read(plan) if read[0] == "config"]
    if archive is not None:
        archive.confirm_history(plan, begun.members)
    for member in begun.members:
        source = MongodSource(member.client)
        try:
            if archive is None:
                plan.confirm_history(*source.oldest())
            for database, collection in images:
                source.confirm_readable(database, collection)
        except TailraceError as error:
            raise on_shard(error, member.name) from None
    return plan, begun


def _merged(plan: Plan, begun: Beginning) -> MergedStream:
    from_start = [member.name for member in begun.members if member.after == plan.read_after]
    merged = MergedStream(plan, from_start, config_after=begun.config_after, kernel=kernel_loader.works_on)
    for member in begun.members:
        merged.open_shard(member.name, member.after.tick())
    return merged


def refuse_view_in(cluster: Cluster, scope: Scope) -> None:
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
