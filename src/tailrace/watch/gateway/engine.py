"""The change streams of a gateway: their cursors, their owners, and the work for them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final

from pymongo import MongoClient

from tailrace.core.cursor import Acting, Action, CursorRegistry
from tailrace.core.cursor.get_more import GetMoreCommand
from tailrace.core.cursor.reply import error_reply
from tailrace.core.oplog.namespace import Scope
from tailrace.core.plan.profile import profile_for
from tailrace.errors import InternalError, OtherVersionError, ServerError, SourceError, TailraceError
from tailrace.read.source.mongod import MongodSource
from tailrace.read.source.topology import Cluster
from tailrace.read.source.unknown_kinds import tell_of_unknown_kinds
from tailrace.read.source.uri import ConnectionString
from tailrace.read.tail.shard_tails import ShardTails
from tailrace.read.tail.shared_tail import WINDOW_BYTES, ReaderMaker, SharedTail, TailStatistics
from tailrace.watch.client import kernel_loader
from tailrace.watch.gateway.attendant import LoopAttendant
from tailrace.watch.gateway.cluster_reading import ClusterReading
from tailrace.watch.gateway.command import target_of
from tailrace.watch.gateway.cost import StageCost, cost_of
from tailrace.watch.gateway.cursor_ids import new_ids
from tailrace.watch.gateway.generic_fields import api_text
from tailrace.watch.gateway.kept_tails import KeptTails
from tailrace.watch.gateway.local_acting import LocalActing
from tailrace.watch.gateway.log import note
from tailrace.watch.gateway.loop_turns import LoopTurns
from tailrace.watch.gateway.memory import COUNTED_BYTES_MIN
from tailrace.watch.gateway.metrics import GatewayMetrics
from tailrace.watch.gateway.opening import StreamOpening
from tailrace.watch.gateway.reading import (
    AheadRoom,
    OplogReading,
    Reading,
    Threads,
    Waker,
    aside,
    aside_for,
    in_thread,
    now_ms,
)
from tailrace.watch.gateway.replies import ServerClock
from tailrace.watch.gateway.reply_facts import CursorFacts, facts_of_next, facts_of_reply, is_left, reached
from tailrace.watch.gateway.rights_watch import UNHEARD, RightsHeard, RightsWatch
from tailrace.watch.gateway.served import Owner, ServedStream, expire_in_processes, weighed
from tailrace.watch.gateway.settling import settle, settle_idle
from tailrace.watch.gateway.shared_steps import SharedSteps, Sharing, asked_by
from tailrace.watch.gateway.stage_process import Begin
from tailrace.watch.gateway.stage_workers import (
    Offenders,
    RemoteActing,
    StageLimits,
    StageStoppedError,
    StageWorkers,
)
from tailrace.watch.gateway.stream_limits import OpeningTurn, StreamLimits
from tailrace.watch.gateway.upgrade_watch import UpgradeWatch
from tailrace.watch.gateway.upstream import APP_NAME

_WORK_THREADS: Final = 2
_READ_THREADS: Final = 16
_EXPIRE_S: Final = 10.0
_CLOSE_S: Final = 2.0
#: For a smaller batch, of about sixteen entries, the compiled code takes longer than the plain stages, because of the
#: fixed work for each batch. Most batches of a gateway have one entry.
_KERNEL_BYTES_MIN: Final = 8_192

SHUTTING_DOWN: Final = 91
_TOO_MANY: Final = 146

_log = logging.getLogger("tailrace.gateway")


class Engine:
    """Carries out the commands of change streams. Belongs to the event loop in which it was made.

    ``client``        reads the deployment that ``uri`` names
    ``cursors_max``   how many streams may be open, and ``cursors_per_user`` of one user
    ``window_bytes``  how much of the oplog's end is kept for streams that share the read
    ``stage_limits``  of the processes that compute users' stages
    ``ids``           of cursors
    ``make_reader``   see ``SharedTail``
    """

    def __init__(
        self,
        client: MongoClient[Any],
        uri: ConnectionString,
        metrics: GatewayMetrics,
        *,
        cursors_max: int,
        cursors_per_user: int | None = None,
        window_bytes: int = WINDOW_BYTES,
        stage_limits: StageLimits | None = None,
        ids: Iterator[int] | None = None,
        make_reader: ReaderMaker | None = None,
    ) -> None:
        self._client = client
        self._uri = uri
        self.metrics = metrics
        #: Streams that are being opened, by the numbers that they are killed by.
        self.openings: dict[int, StreamOpening] = {}
        #: Of cursors and of openings.
        self._ids = ids or new_ids()
        self._reading_pool = Threads(_READ_THREADS, thread_name_prefix="tailrace-read")
        self._work_pool = Threads(_WORK_THREADS, thread_name_prefix="tailrace-work")
        #: Whose work the loop does next.
        self.turns = LoopTurns(asyncio.get_running_loop())
        self._waker = Waker(asyncio.get_running_loop(), self.turns)
        # Until the kernel is loaded, a read may have to load it, which takes a second: not in the loop.
        self._attendant = LoopAttendant(
            asyncio.get_running_loop(), lambda: kernel_loader.is_ready(0) or kernel_loader.is_missing()
        )
        tails: Any = {
            "window_bytes": window_bytes,
            "on_read": kernel_loader.is_ready,
            "streams_min": 1,
            "attendant": self._attendant,
        }
        self._shared = SharedTail(client, filters=True, make_reader=make_reader, **tails)
        self._shard_tails = ShardTails(**tails)
        self._rights_watch = RightsWatch(self._shared)
        self._ahead_room = AheadRoom()
        self._cluster: Cluster | None = None
        self._kept = KeptTails()
        self._registry: CursorRegistry | None = None
        self._minding: asyncio.Task[None] | None = None
        #: The error that streams get once the gateway stops.
        self.stopping: TailraceError | None = None
        #: Major and minor version of the server.
        self.version = (6, 0)
        self._version_text = ""
        self._upgrades = UpgradeWatch(client, lambda: in_thread(self._reading_pool, self._present_version))
        self.streams: dict[int, ServedStream] = {}
        self.limits = StreamLimits(cursors_max, cursors_per_user, self.streams, self.openings)
        #: What streams that ask the same need not do each for itself.
        self.steps = SharedSteps()
        self.workers = StageWorkers(stage_limits or StageLimits())
        self._offenders = Offenders()
        self.clock = ServerClock()

    async def start(self) -> None:
        """Connect. Raises TailraceError if the deployment cannot be read."""
        version = await in_thread(self._reading_pool, self._connected)
        self._registry = CursorRegistry(self._ids, profile_for(version), kernel=_kernel_works_on)
        self._adopt(version)
        self._minding = asyncio.create_task(self._mind())

    def _adopt(self, version: str) -> None:
        """Streams that are opened from now on give the events of this server version."""
        self._version_text = version
        profile = self.cursors.profile = profile_for(version)
        self.version = profile.series
        self.clock.operation_time_first = profile.version < (5, 0)

    async def _follow_upgrade(self) -> None:
        """Before a stream is opened: the deployment may have been upgraded since the last one, or set to another
        feature compatibility version."""
        clients = [self._client] if self._cluster is None else self._cluster.clients
        version = await self._upgrades.version(clients)
        if version is not None and profile_for(version) != profile_for(self._version_text):
            self._adopt(version)

    def _present_version(self) -> str:
        cluster = self._cluster
        return MongodSource(self._client).server_version if cluster is None else cluster.server_version()

    def _connected(self) -> str:
        """The server version whose streams are given. Missing rights to read the oplog are found here."""
        cluster = self._cluster = Cluster.discover(self._client, self._uri, {"appname": APP_NAME})
        if cluster is not None and cluster.config is self._client:
            raise SourceError(
                "the upstream is the config server of a cluster: clients' own reads and writes would go there, not to "
                "the shards",
                hint="Name a mongos of the cluster",
            )
        source = MongodSource(self._client if cluster is None else cluster.config_client())
        source.oldest()
        kernel_loader.prepare()  # before anybody is served
        return self._present_version()

    # -- commands ---------------------------------------------------------------------------------------------------

    async def aggregate(
        self, owner: Owner, database: str, command: bytes, client_host: str, scope: Scope | None = None
    ) -> bytes | None:
        """Open a stream for a client at this address; ``scope``: what it is over, if that is known. Returns the reply
        without the server's times; ``None``: the server is to answer."""
        tenant, turn = owner.tenant(client_host), OpeningTurn(time.monotonic_ns(), next(self._ids))
        with self.limits.asking(turn, tenant):
            if (full := await self.limits.full(owner, tenant, turn)) is not None:
                return self.refused(ServerError(f"this gateway has {full}", code=_TOO_MANY))
            if self.stopping is not None:
                return self.refused(self.stopping)
            self._kept.are_needed()
            cost = await aside(len(command), cost_of, command)
            offender = owner.users, database, target_of(command), cost.digest
            refusal = self._offenders.refusal(offender, self.version)
            if refusal is not None:
                self.metrics.errors[50] += 1
                return refusal
            worker = None if cost.is_plain else self.workers.of(tenant)
            opening = self.openings[turn.number] = StreamOpening(
                turn.number, owner, tenant, scope=scope, worker=worker, open_reading=self.open_reading
            )
        return await self._opening(opening, database, command, client_host, cost=cost, offender=offender)

    async def _opening(
        self,
        opening: StreamOpening,
        database: str,
        command: bytes,
        client_host: str,
        *,
        cost: StageCost,
        offender: Hashable,
    ) -> bytes | None:
        """As ``aggregate``, once there is room for the stream."""
        owner, reply = opening.owner, None
        try:
            with suppress(TailraceError):  # opening a stream on what cannot be read gets the error
                await self._follow_upgrade()
            acting = self._aggregating(database, command, cost, opening)
            reply = await opening.run(self.carried_out(acting, opening, len(command)))
        except StageStoppedError as error:
            opening.close()
            stopped = self._stopped(error, offender, opening.tenant, ns=opening.namespace, users=owner.shown)
            if not error.made_way or self.stopping is not None:
                return stopped
        except ServerError as error:
            opening.close()
            note("opening killed", ns=opening.namespace, users=owner.shown)
            return self.refused(error)
        except BaseException:
            opening.close()
            raise
        finally:
            del self.openings[opening.number]
        if reply is None:  # drivers do not repeat a first aggregate: it is opened again where nobody makes way
            return await self.aggregate(owner, database, command, client_host, opening.asked)
        return self._opened(command, opening, cost, offender, reply)

    def _opened(
        self, command: bytes, opening: StreamOpening, cost: StageCost, offender: Hashable, reply: bytes
    ) -> bytes | None:
        """``reply``, and the stream is kept; ``None``: the server is to answer."""
        cursor = facts_of_reply(reply)
        if is_left(cursor.code):
            self.metrics.fallbacks["refused"] += 1
            opening.close()
            return None
        if cursor.cursor_id == 0 or opening.reading is None:
            opening.close()
        else:
            stream = self.streams[cursor.cursor_id] = ServedStream(
                cursor.cursor_id,
                opening.owner,
                opening.tenant,
                opening.scope,
                cursor.namespace,
                opening.reading,
                cost,
                offender,
                opening.worker,
                now_ms(),
                Sharing(asked_by(cursor.namespace, command, opening.owner.users, self._version_text)),
                api_text(command),
            )
            self.steps.joined(stream.sharing)
            if stream.worker is not None:
                stream.worker.cursors.add(cursor.cursor_id)
            self.metrics.streams_opened += 1
            note("stream opened", **stream.noted())
        self._count(len(reply), cursor)
        return reply

    def _aggregating(
        self, database: str, command: bytes, cost: StageCost, opening: StreamOpening
    ) -> LocalActing | RemoteActing:
        """An aggregate, where its stages are computed: in a process, or here."""
        if (worker := opening.worker) is not None:
            begin = self._begin(database, command)
            return RemoteActing(worker, opening.tenant, begin, 0, opening.namespace, shown=opening.number)
        acting = self.cursors.run(database, command, now_ms())
        return LocalActing(acting, self._work_pool, cost.weight, partial(self.turns.charge, opening.tenant))

    def _getting_more(
        self, stream: ServedStream, database: str, command: bytes, wanted: GetMoreCommand | None
    ) -> LocalActing | RemoteActing:
        if stream.worker is not None:
            begin = self._begin(database, command)
            return RemoteActing(stream.worker, stream.tenant, begin, stream.cursor_id, stream.namespace)
        return self.local(stream, self.cursors.get_more(database, command, now_ms(), wanted))

    def local(self, stream: ServedStream, acting: Acting) -> LocalActing:
        return LocalActing(acting, self._work_pool, stream.cost.weight, partial(self.turns.charge, stream.tenant))

    def _begin(self, database: str, command: bytes) -> Callable[[int], Begin]:
        now, version, compiled = now_ms(), self._version_text, kernel_loader.is_ready(0)
        return lambda number: Begin(number, database, command, now, version, compiled, next(self._ids))

    def _stopped(self, error: StageStoppedError, offender: Hashable, tenant: Hashable, **noted: Any) -> bytes:
        """The reply where a computation was ended."""
        if self.stopping is not None:
            return self.refused(self.stopping)
        self.metrics.computations_stopped += 1
        if error.is_excess:
            self._offenders.add(offender)
        if error.made_way:
            self.workers.made_way(tenant)
        note("computation ended", **noted, reason=error.message)
        return self.refused(error)

    async def get_more(
        self, stream: ServedStream, database: str, command: bytes, wanted: GetMoreCommand | None = None
    ) -> bytes:
        """The next batch of a stream that the caller may read; the reply without the server's times. ``wanted``: what
        ``command`` asks for, if that is known already. A large command does not wait for events: it would hold its
        memory for as long."""
        if stream.quick is not None:
            stream.quick.begin()
        was_busy, stream.is_busy = stream.is_busy, True
        if not was_busy:  # or one that was told to end its wait would wait on
            settle(stream, self.cursors, self.steps)
            stream.reading.rest()
            if len(command) >= COUNTED_BYTES_MIN:
                stream.reading.hurry()
        try:
            acting = self._getting_more(stream, database, command, wanted)
            reply = await self.carried_out(acting, stream.reading, len(command), stream)
        except StageStoppedError as error:
            if stream.worker is not None:
                stream.worker.cursors.discard(stream.cursor_id)
            reply = self._stopped(error, stream.offender, stream.tenant, **stream.noted())
        finally:
            stream.is_busy = was_busy
            if not was_busy:
                stream.sharing.is_settled = False  # events may be left for the next command
            self.worked(stream)
        self.counted(stream, len(reply), facts_of_next(reply) or facts_of_reply(reply))
        return reply

    def worked(self, stream: ServedStream) -> None:
        """A command has used a stream's own cursor."""
        stream.used_ms = stream.sharing.own_ms = now_ms()
        self._forget_closed(stream)

    def counted(self, stream: ServedStream, size: int, cursor: CursorFacts) -> None:
        """Count a reply of ``size`` bytes to a getMore."""
        stream.events += cursor.events
        self._count(size, cursor)

    @property
    def all_streams(self) -> Iterator[ServedStream | StreamOpening]:
        """Those that are open, and those that are being opened."""
        yield from self.streams.values()
        yield from self.openings.values()

    def found(self, number: int) -> ServedStream | StreamOpening | None:
        """The stream with this cursor id, or the opening with this number."""
        return self.streams.get(number) or self.openings.get(number)

    def kill(self, found: Sequence[ServedStream | StreamOpening]) -> None:
        """Close streams. A getMore that waits comes back at once, with 237; an aggregate with 11601."""
        for one in found:
            if isinstance(one, StreamOpening):
                one.kill()
        for stream in [one for one in found if isinstance(one, ServedStream)]:
            if stream.quick is not None:
                stream.quick.begin()
            self.cursors.kill(stream.cursor_id)
            if stream.worker is not None:
                stream.worker.kill(stream.cursor_id)
            stream.reading.hurry()
            if not stream.is_busy:
                self._forget_closed(stream)
            else:
                self._removed(stream)
                note("stream killed", **stream.noted(), events=stream.events)

    def refused(self, error: TailraceError, *, in_stream: bool = True) -> bytes:
        """The reply that says which cursors were killed."""
        self.metrics.errors[error.code or 0] += 1
        return error_reply(error, in_stream=in_stream, version=self.version)

    def stamped(self, reply: bytes) -> bytes:
        """A reply with the server's times, as the tail of the oplog or a client's connection received them."""
        return self.clock_now().stamp(reply, reached(reply))

    def clock_now(self) -> ServerClock:
        """The server's times, the newest that the tail of the oplog has received among them."""
        for document in self._kept.clocks():
            self.clock.saw(document)
        return self.clock

    def rights_heard(self) -> RightsHeard:
        """Which changes of users and roles are known. A cluster's are kept by its config servers, and a mongos learns
        of them by and by: there only the age of an answer counts."""
        return UNHEARD if self._cluster is not None else self._rights_watch.heard()

    def tail_statistics(self) -> TailStatistics:
        """How the shared reads are doing. May be called from any thread; updates the metrics too."""
        found = TailStatistics.total([self._shared.statistics, self._shard_tails.statistics])
        self.metrics.saw_tail(found)
        self.metrics.streams = len(self.streams)
        self.metrics.stage_processes = len(self.workers.workers)
        self.metrics.stage_cpu_seconds = self.workers.cpu
        return found

    def stop(self) -> None:
        """End every stream with an error after which drivers resume; streams that wait end now."""
        self.stopping = ServerError("the gateway is shutting down", code=SHUTTING_DOWN)
        for stream in self.streams.values():
            stream.reading.ending = self.stopping
            stream.reading.hurry()
        self.workers.stop()

    def give_up(self) -> None:
        """Stop waiting for threads that still wait for the server."""
        self._reading_pool.given_up = self._work_pool.given_up = True

    async def close(self) -> None:
        """Close everything. Does not wait for reads that are under way."""
        if self._minding is not None:
            self._minding.cancel()
            with suppress(asyncio.CancelledError):
                await self._minding
        for stream in list(self.streams.values()):
            stream.reading.close()
        self.streams.clear()
        self.workers.close()
        self._let_go()
        self._attendant.close()
        self._shared.close()
        self._shard_tails.close()
        if self._cluster is not None:
            await aside_for(self._cluster.close, _CLOSE_S)
        self._work_pool.shutdown(wait=False, cancel_futures=True)
        self._reading_pool.shutdown(wait=False)

    # -- inside -----------------------------------------------------------------------------------------------------

    @property
    def cursors(self) -> CursorRegistry:
        if self._registry is None:
            raise InternalError("the engine was not started")
        return self._registry

    def open_reading(self, scope: Scope, tenant: Hashable) -> Reading:
        """What a new stream of ``scope`` reads that counts for ``tenant``."""
        wake = self._waker.of(tenant)
        if self._cluster is not None:
            return ClusterReading(
                self._reading_pool, wake, self._cluster, self._shard_tails, scope, keep=self._kept.keep
            )
        self._kept.keep(self._client, self._shared)
        reading = OplogReading(self._reading_pool, wake, self._client, self._shared, scope, ahead=self._ahead_room)
        reading.expect_version(self._version_text)
        return reading

    def _let_go(self) -> None:
        self._rights_watch.close()
        self._kept.let_go()

    async def carried_out(
        self,
        acting: LocalActing | RemoteActing,
        answering: Reading | StreamOpening,
        size: int,
        stream: ServedStream | None = None,
        *,
        action: Action | bytes | None = None,
        answer: Any = None,
    ) -> bytes:
        """Drive a command to its reply. ``size``: of the command. ``action``: what it has asked for already, or
        ``answer``: what that is to be answered. Raises StageStoppedError."""
        error: TailraceError | None = None
        size = max(size, stream.heavy if stream is not None else 0)
        try:
            while True:
                action = action or await acting.advance(size, answer, error)
                if isinstance(action, bytes):
                    return action
                answer = error = None
                try:
                    answer = await answering.answer(action)
                except TailraceError as caught:
                    error = caught
                    if isinstance(caught, OtherVersionError):
                        # The client resumes then, as from a server that was upgraded.
                        with suppress(TailraceError):
                            self._adopt(await answering.version_read())
                size, action = weighed(action, answer, size, stream), None
        except InternalError as caught:
            return self.failed(caught)
        finally:
            acting.close()

    def failed(self, error: InternalError) -> bytes:
        """The reply where a stream has failed; the caller counts it. Called while the error is handled."""
        _log.exception("a change stream has failed")
        return error_reply(error, in_stream=True, version=self.version)

    def _forget_closed(self, stream: ServedStream) -> None:
        kept = self.cursors if stream.worker is None else stream.worker.cursors
        if stream.cursor_id not in kept:
            stream.reading.close()
            if self._removed(stream):
                note("stream closed", **stream.noted(), events=stream.events)

    def _removed(self, stream: ServedStream) -> bool:
        """Take a stream off the list; whether it was there."""
        if self.streams.get(stream.cursor_id) is not stream:
            return False
        del self.streams[stream.cursor_id]
        self.steps.left(stream.sharing)
        return True

    def _count(self, size: int, cursor: CursorFacts) -> None:
        metrics = self.metrics
        metrics.streams = len(self.streams)
        if cursor.code is not None:
            metrics.errors[cursor.code] += 1
            return
        metrics.batches += 1
        metrics.events += cursor.events
        metrics.event_bytes += size if cursor.events else 0

    async def _mind(self) -> None:
        """Now and then, close streams that nobody asks for, and note the server's clock."""
        while True:
            await asyncio.sleep(_EXPIRE_S)
            try:
                self._look_after()
                await self.workers.look_after()
            except Exception:  # noqa: BLE001  nobody else would hear of it, and streams would stay open for ever
                _log.exception("the upkeep of the streams has failed, and is tried again")

    def _look_after(self) -> None:
        tell_of_unknown_kinds()
        self.kill([stream for stream in self.streams.values() if stream.is_ended])
        now = now_ms()
        settle_idle(self.streams.values(), self.cursors, self.steps, now)
        self.metrics.cursors_expired += self.cursors.expire(now) + expire_in_processes(self.streams.values(), now)
        for stream in list(self.streams.values()):
            if not stream.is_busy:
                self._forget_closed(stream)
        self.metrics.streams = len(self.streams)
        if self.streams or self.openings:
            self._kept.are_needed()
        elif self._kept.are_idle():
            self._let_go()


def _kernel_works_on(size: int) -> bool:
    """As ``kernel_loader.works_on``."""
    return kernel_loader.is_ready(size) and not 0 < size < _KERNEL_BYTES_MIN
