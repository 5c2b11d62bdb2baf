"""A gateway of several processes: the parent listens, reads the oplog, and has processes that serve the clients.

It hands each client that it accepts to the process with the fewest. If one of them ends, its clients' connections end,
their drivers resume at the others, and it is started again.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Hashable
from contextlib import suppress
from typing import Any, Final

from tailrace.core.oplog.entry_kinds import PASSED_OVER
from tailrace.errors import SourceError, TailraceError
from tailrace.read.source.uri import ConnectionString
from tailrace.read.tail.feed import OplogFeed
from tailrace.read.tail.shared_tail import TailStatistics
from tailrace.watch.gateway.attendant import LoopAttendant
from tailrace.watch.gateway.cursor_ids import ProcessIds
from tailrace.watch.gateway.line import Line, LineClosedError
from tailrace.watch.gateway.metrics import GatewayMetrics, together
from tailrace.watch.gateway.options import GatewayOptions
from tailrace.watch.gateway.pulse import DEAD_AFTER_S
from tailrace.watch.gateway.server import BACKLOG, not_listening
from tailrace.watch.gateway.upstream import Address, Upstream
from tailrace.watch.gateway.worker_process import Report, WorkerSettings, feed_path

_PROGRAM: Final = (
    "import sys; sys.path[:] = sys.argv[3:]; from tailrace.watch.gateway.worker_process import main; main()"
)
#: How often each process is asked how it is doing.
_REPORT_S: Final = 0.5
#: Pauses before a process is started again: at first, and at most. Each further time doubles it.
_AGAIN_S: Final = 0.1
_AGAIN_S_MAX: Final = 10.0
#: A process that has lived this long is started again at once.
_WELL_S: Final = 60.0
#: Clients that are accepted at once.
_AT_ONCE: Final = 64
#: Beyond what a process takes to stop on its own.
_STOP_S: Final = 5.0
#: While no process can take a client, or no file can be opened.
_PAUSE_S: Final = 0.2

_log = logging.getLogger("tailrace.gateway")


class GatewayProcesses:
    """Serves change streams of the deployment at ``uri`` with several processes. As ``Gateway``: ``start``, then
    ``stop``.

    ``options``  of the whole: those of memory and of processes for stages are divided among the processes
    ``certificate``, ``authority``  the files behind ``options.tls``
    ``log``      as of ``log_to_standard_error``, for the processes
    """

    def __init__(
        self,
        uri: ConnectionString,
        options: GatewayOptions,
        count: int,
        *,
        certificate: str | None = None,
        authority: str | None = None,
        log: str | None = None,
    ) -> None:
        self.options = options
        self.metrics = GatewayMetrics()
        self._uri = uri
        self._directory = tempfile.mkdtemp(prefix="tailrace-gateway-")  # for this user alone
        limits = options.stage_limits
        own = dataclasses.replace(
            options,
            tls=None,
            memory_bytes=options.memory_bytes // count,
            stage_limits=dataclasses.replace(limits, processes=-(-limits.processes // count)),
        )
        key = secrets.token_bytes(16)
        self.processes = [
            _Process(
                WorkerSettings(
                    uri.reveal(), own, certificate, authority, ProcessIds(number, count, key), self._directory, log
                )
            )
            for number in range(count)
        ]
        self._upstream: Upstream | None = None
        self._telling: set[asyncio.Task[None]] = set()
        self._feed: OplogFeed | None = None
        self._attendant = LoopAttendant(asyncio.get_running_loop(), lambda: True)
        self._socket: socket.socket | None = None
        self._keeping: list[asyncio.Task[None]] = []
        self._refused = 0
        self._stopping = False

    async def start(self) -> None:
        """As ``Gateway.start``."""
        loop = asyncio.get_running_loop()
        try:
            self._upstream = Upstream(self._uri, self._upstream_changed)
            self._feed = OplogFeed(self._upstream.client, feed_path(self._directory), self._attendant)
            await self._feed.start()
            self._listen()
            for outcome in await asyncio.gather(*(one.start() for one in self.processes), return_exceptions=True):
                if outcome is not None:
                    raise outcome
            with suppress(SourceError):
                await self._upstream.chosen()
            await asyncio.gather(*(process.tell_preferred() for process in self.processes))
            self._keeping = [asyncio.create_task(self._keep(process)) for process in self.processes]
            assert self._socket is not None
            loop.add_reader(self._socket.fileno(), self._accept)
        except BaseException:
            await self.stop()
            raise

    def _listen(self) -> None:
        host, port = self.options.host, self.options.port
        try:
            # As ``create_server`` of asyncio, which would accept on its own.
            family = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
            self._socket = socket.create_server((host, port), family=family, backlog=BACKLOG)
        except OSError as error:
            raise not_listening(host, port, error) from None
        self._socket.setblocking(False)

    @property
    def address(self) -> Address:
        """Where it listens."""
        assert self._socket is not None
        name: Any = self._socket.getsockname()
        return Address(str(name[0]), int(name[1]))

    def _upstream_changed(self, address: Address | None) -> None:
        """The processes follow the deployment for themselves, but where there are several mongos, all take the same."""
        for process in self.processes:
            process.preferred = address
            task = asyncio.get_running_loop().create_task(process.tell_preferred())
            self._telling.add(task)
            task.add_done_callback(self._telling.discard)

    # -- clients ----------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        assert self._socket is not None
        for _ in range(_AT_ONCE):
            try:
                client, _ = self._socket.accept()
            except BlockingIOError:
                return
            except OSError as error:
                _log.warning("a client cannot be accepted: %s", error.strerror or error)
                self._pause()
                return
            with client:
                if sum(process.clients for process in self.processes) >= self.options.connections_max:
                    self._refused += 1
                elif not self._hand_over(client):
                    self._pause()

    def _hand_over(self, client: socket.socket) -> bool:
        """Give a client to the process that has the fewest, of those that take it. Returns whether one does."""
        return any(process.take(client) for process in sorted(self.processes, key=lambda one: one.clients))

    def _pause(self) -> None:
        """Accept nobody for a moment. Clients wait meanwhile."""
        loop = asyncio.get_running_loop()
        assert self._socket is not None
        loop.remove_reader(self._socket.fileno())
        loop.call_later(_PAUSE_S, self._go_on)

    def _go_on(self) -> None:
        if self._socket is not None and not self._stopping:
            asyncio.get_running_loop().add_reader(self._socket.fileno(), self._accept)

    # -- the processes ----------------------------------------------------------------------------------------------

    async def _keep(self, process: _Process) -> None:
        """Start the process again whenever it ends."""
        while not self._stopping:
            try:
                await self._keep_going(process)
            except Exception:  # noqa: BLE001  nobody else would hear of it, and a process would be missing
                _log.exception(
                    "process %s of the gateway could not be supervised, and this is tried again", process.number
                )
                await asyncio.sleep(_AGAIN_S_MAX)

    async def _keep_going(self, process: _Process) -> None:
        pause = _AGAIN_S
        while True:
            status = await process.until_it_ends()
            if self._stopping:
                return
            self.metrics.processes_ended += 1
            _log.warning(
                "process %s of the gateway (pid %s) has ended %s: its streams resume, and it is started again",
                process.number,
                process.pid,
                f"with signal {signal.Signals(-status).name}" if status < 0 else f"with status {status}",
            )
            pause = _AGAIN_S if time.monotonic() - process.begun > _WELL_S else pause
            while not self._stopping:
                await asyncio.sleep(pause)
                pause = min(2 * pause, _AGAIN_S_MAX)
                try:
                    await process.start()
                    break
                except TailraceError as error:
                    _log.warning("process %s of the gateway cannot be started: %s", process.number, error)

    def tail_statistics(self) -> TailStatistics:
        """How the reads of the oplog are doing. May be called from any thread; updates the metrics too."""
        reports = [report for process in self.processes if (report := process.report) is not None]
        feed = self._feed
        total = TailStatistics.total([report.tail for report in reports])
        troubles = dict.fromkeys(report.tail.trouble for report in reports if report.tail.trouble is not None)
        if feed is not None and feed.trouble is not None:
            troubles[feed.trouble] = None
        if not any(process.is_ready for process in self.processes):
            troubles["no process of the gateway serves clients at the moment"] = None
        ended = self.metrics.processes_ended
        summed = together([process.metrics for process in self.processes])
        for field in dataclasses.fields(summed):
            setattr(self.metrics, field.name, getattr(summed, field.name))
        self.metrics.processes_ended = ended
        self.metrics.processes = sum(process.is_ready for process in self.processes)
        self.metrics.connections_refused += self._refused
        # In front of a cluster the processes read the shards themselves.
        if feed is not None:
            self.metrics.tails = max(self.metrics.tails, int(feed.is_read))
            self.metrics.upstream_reads += feed.reads
            self.metrics.upstream_bytes += feed.bytes
            self.metrics.upstream_entries += feed.entries
        self.metrics.trouble = 1 if troubles else 0
        return dataclasses.replace(
            total,
            reads=self.metrics.upstream_reads,
            entries=self.metrics.upstream_entries,
            bytes=self.metrics.upstream_bytes,
            trouble="; ".join(troubles) or None,
        )

    async def stop(self) -> None:
        """As ``Gateway.stop``."""
        self._stopping = True
        if self._socket is not None:
            with suppress(ValueError, OSError):
                asyncio.get_running_loop().remove_reader(self._socket.fileno())
            self._socket.close()
            self._socket = None
        for task in self._keeping:
            task.cancel()
        limit = self.options.answer_seconds + self.options.stop_seconds + _STOP_S
        await asyncio.gather(*(process.stop(limit) for process in self.processes))
        if self._feed is not None:
            self._feed.close()
        self._attendant.close()
        if self._upstream is not None:
            await asyncio.to_thread(self._upstream.close)
        shutil.rmtree(self._directory, ignore_errors=True)


class _Process:
    """One process, and those that it replaces."""

    def __init__(self, settings: WorkerSettings) -> None:
        self.settings = settings
        self.number = settings.ids.number
        self.begun = 0.0
        self.report: Report | None = None
        self.is_ready = False
        #: See ``Upstream.prefer``.
        self.preferred: Address | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._line: Line | None = None
        self._sockets: socket.socket | None = None
        self._handed = 0
        #: What those that have ended did.
        self._before = GatewayMetrics()

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def clients(self) -> int:
        """How many clients it has at most: those that have left since its last report still count."""
        report = self.report
        return self._handed - (0 if report is None else report.adopted - report.connected)

    @property
    def metrics(self) -> GatewayMetrics:
        """What this process and those before it have done."""
        return self._before if self.report is None else together([self._before, self.report.metrics])

    async def start(self) -> None:
        """Start it. Raises TailraceError."""
        ours, theirs = socket.socketpair()
        self._sockets, clients = socket.socketpair()
        self._sockets.setblocking(False)
        files = theirs.fileno(), clients.fileno()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, *map(str, files), *sys.path],
                stdin=subprocess.DEVNULL,
                pass_fds=files,
            )
        finally:
            theirs.close()
            clients.close()
        self.begun, self._handed = time.monotonic(), 0
        self._line = Line(*await asyncio.open_unix_connection(sock=ours), _answers_nothing)
        try:
            await self._line.ask("start", self.settings, self.preferred)
            self._take(await self._line.ask("report"))
        except LineClosedError:
            status = await self._ended()
            raise SourceError(f"process {self.number} of the gateway ended with status {status} at its start") from None
        except BaseException:
            await self._ended()
            raise
        self.is_ready = True

    async def tell_preferred(self) -> None:
        """Of several mongos, all take the same from now on."""
        if self._line is not None:
            with suppress(TailraceError):  # it has ended, and is told when it is started again
                await self._line.ask("prefer", self.preferred)

    def take(self, client: socket.socket) -> bool:
        """Hand a client over; whether it took it."""
        if not self.is_ready or self._sockets is None:
            return False
        try:
            socket.send_fds(self._sockets, [b"c"], [client.fileno()])
        except OSError:
            return False
        self._handed += 1
        return True

    def _take(self, report: Report) -> None:
        self.report = report
        # Each of them is fed every entry: the one that has read most has counted best.
        PASSED_OVER.update(
            {kind: count - PASSED_OVER[kind] for kind, count in report.passed_over.items() if count > PASSED_OVER[kind]}
        )

    async def until_it_ends(self) -> int:
        """Ask it how it is doing until it has ended; its exit status. One that does not answer is ended."""
        assert self._line is not None
        try:
            while True:
                await asyncio.sleep(_REPORT_S)
                async with asyncio.timeout(DEAD_AFTER_S):
                    self._take(await self._line.ask("report"))
        except TimeoutError:
            _log.error("process %s of the gateway does not answer, and is ended", self.number)
        except TailraceError:
            pass
        return await self._ended()

    async def _ended(self) -> int:
        self.is_ready = False
        assert self._process is not None
        with suppress(subprocess.TimeoutExpired):  # it may be about to end on its own: then the status is its own
            await asyncio.to_thread(self._process.wait, _PAUSE_S)
        self._process.kill()
        status = await asyncio.to_thread(self._process.wait)
        if self.report is not None:
            self._before = self.metrics.without_gauges()
        self.report = None
        for each in (self._line, self._sockets):
            if each is not None:
                each.close()
        self._sockets = None
        return status

    async def stop(self, limit_s: float) -> None:
        """Have it end its streams, and end it."""
        self.is_ready = False
        process, line = self._process, self._line
        if process is None:
            return
        if line is not None:
            with suppress(TailraceError, TimeoutError):
                async with asyncio.timeout(limit_s):
                    await line.ask("stop")
        with suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(process.wait, limit_s)
        if process.poll() is None:
            process.kill()
            await asyncio.to_thread(process.wait)
        for each in (line, self._sockets):
            if each is not None:
                each.close()


async def _answers_nothing(name: str, *args: Hashable) -> None:
    return None
