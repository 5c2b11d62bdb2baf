"""``tailrace gateway``: change streams for every driver, at the cost of one read of the oplog."""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import re
import signal
import sys
import threading
import time
from contextlib import ExitStack
from importlib import import_module
from typing import TYPE_CHECKING, Final

from tailrace.base.service_manager import notifying
from tailrace.cli.console_beside import ServiceNumbers, add_console_argument, check_console, console_beside
from tailrace.cli.output import tell
from tailrace.cli.sampled import add_compare_arguments, check_compare, collectors, sampled
from tailrace.cli.stream_arguments import address_of
from tailrace.errors import UsageError
from tailrace.read.source.uri import find_uri, hide

if TYPE_CHECKING:
    import ssl

    from tailrace.read.source.uri import ConnectionString
    from tailrace.watch.compare.deployment import Streams
    from tailrace.watch.compare.sampling import SampledComparison
    from tailrace.watch.gateway.options import GatewayOptions
    from tailrace.watch.gateway.processes import GatewayProcesses
    from tailrace.watch.gateway.server import Gateway

_DESCRIPTION: Final = """\
Listen for MongoDB drivers and answer their change streams from one shared read of the oplog. Everything else is
passed to the server unchanged, on a separate connection for each client, on which the client itself logs in.
Applications change nothing but the address. SIGTERM and Ctrl-C end the streams, and drivers resume them elsewhere."""
LISTEN: Final = "127.0.0.1:27117"
_ALL: Final = ("", "0.0.0.0", "::")
_THREADS_S: Final = 1.0
_STAGE_MB_MIN: Final = 256


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the main parser."""
    parser = subparsers.add_parser(
        "gateway",
        help="serve change streams to drivers of any language",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--upstream", metavar="URI", help="the deployment, as for tailrace watch (default: TAILRACE_URI); @FILE works"
    )
    parser.add_argument("--listen", default=LISTEN, metavar="HOST:PORT", help=f"default: {LISTEN}, this machine only")
    parser.add_argument(
        "--advertise",
        metavar="HOST:PORT",
        help="how clients reach the gateway (default: the address that each client connected to)",
    )
    parser.add_argument(
        "--as-mongos",
        action="store_true",
        help="act as a mongos: clients may name several gateways in one URI, and move to another when one ends",
    )
    parser.add_argument("--tls-certificate-key-file", metavar="PEM", help="speak TLS to clients, with this certificate")
    parser.add_argument("--tls-ca-file", metavar="PEM", help="clients must show a certificate of this CA")
    _add_limits(parser)
    parser.add_argument(
        "--metrics", metavar="HOST:PORT", help="serve statistics to Prometheus, /livez and /readyz (extra: gateway)"
    )
    add_console_argument(parser)
    parser.add_argument(
        "--log",
        choices=("warnings", "text", "json"),
        default="warnings",
        help="on standard error: only warnings (default), or also streams that open and close, as text or JSON lines",
    )
    add_compare_arguments(parser, "of the whole deployment: ")
    parser.add_argument(
        "--test-commands", action="store_true", help="allow fail points, for tests of drivers; never in production"
    )
    parser.set_defaults(run=run)


def _add_limits(parser: argparse.ArgumentParser) -> None:
    """How much the gateway may take, and of what."""
    parser.add_argument("--connections-max", type=int, default=20_000, metavar="N", help="clients (default: 20000)")
    parser.add_argument("--cursors-max", type=int, default=20_000, metavar="N", help="open streams (default: 20000)")
    parser.add_argument(
        "--cursors-per-user",
        type=int,
        metavar="N",
        help="open streams of one user (default: four fifths of --cursors-max), or of the clients at one address "
        "where the deployment has no users (default: no limit)",
    )
    parser.add_argument(
        "--stage-seconds",
        type=float,
        default=10.0,
        metavar="S",
        help="CPU seconds that the stages of a stream may compute for one batch of up to 256 kB, and to open it; each "
        "further 256 kB may take another second (default: 10)",
    )
    parser.add_argument(
        "--stage-memory-mb",
        type=int,
        default=1024,
        metavar="N",
        help="memory of a process that computes stages (default: 1024)",
    )
    parser.add_argument(
        "--stage-processes",
        type=int,
        default=16,
        metavar="N",
        help="processes that compute stages: each user has one; users share them if there are more users (default: 16)",
    )
    parser.add_argument(
        "--processes",
        type=int,
        default=1,
        metavar="N",
        help="serve clients with N processes, so on N cores; they share one read of the oplog (default: 1)",
    )
    parser.add_argument(
        "--window-mb",
        type=int,
        default=32,
        metavar="N",
        help="MB of oplog that each process keeps in memory (default: 32)",
    )


def run(args: argparse.Namespace) -> int:
    """Carry the command out; the exit code. Raises TailraceError."""
    from tailrace.watch.gateway.log import log_to_standard_error  # noqa: PLC0415  so that --help does not load it
    from tailrace.watch.gateway.options import GatewayOptions  # noqa: PLC0415
    from tailrace.watch.gateway.stage_workers import StageLimits  # noqa: PLC0415

    check_compare(args)
    host, port = address_of(args.listen, "--listen")
    counts = ("connections_max", "cursors_max", "cursors_per_user", "stage_processes", "processes", "window_mb")
    for name in counts:
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise UsageError(f"--{name.replace('_', '-')} must be at least 1")
    if not 0 < args.stage_seconds < math.inf:
        raise UsageError("--stage-seconds must be a positive number")
    if args.stage_memory_mb < _STAGE_MB_MIN:
        raise UsageError(f"--stage-memory-mb must be at least {_STAGE_MB_MIN}: a process needs that much to start")
    if args.processes > 1:
        _check_processes(args)
    advertise = None
    if args.advertise is not None:
        there, at = address_of(args.advertise, "--advertise")
        advertise = f"[{there}]:{at}" if ":" in there else f"{there}:{at}"
    options = GatewayOptions(
        host=host,
        port=port,
        advertise=advertise,
        as_mongos=args.as_mongos,
        tls=_tls(args.tls_certificate_key_file, args.tls_ca_file),
        connections_max=args.connections_max,
        cursors_max=args.cursors_max,
        cursors_per_user=args.cursors_per_user,
        window_bytes=args.window_mb << 20,
        stage_limits=StageLimits(args.stage_seconds, args.stage_memory_mb << 20, args.stage_processes),
        test_commands=args.test_commands,
    )
    if args.metrics is not None:
        address_of(args.metrics, "--metrics")  # checked first: nobody connects if it is wrong
        import_module("prometheus_client")  # nor if it is missing
    check_console(args)
    if args.log != "warnings":
        log_to_standard_error(args.log)
    uri = find_uri(args.upstream)
    numbers = ServiceNumbers()
    with (
        sampled(args, uri, None, _comparable) as comparison,
        console_beside(args, uri, numbers, gateway=_own_uri(uri, options)),
    ):
        result = asyncio.run(_serve(args, uri, options, comparison, numbers))
    _leave_threads(result)
    return result


def _own_uri(upstream: ConnectionString, options: GatewayOptions) -> ConnectionString | None:
    """Where the console asks this gateway for its streams, as the user of the upstream; ``None`` where that is not
    known before it listens, or a certificate would have to be trusted."""
    if options.tls is not None or not options.port:
        return None
    text = upstream.reveal()
    match = re.match(r"mongodb(?:\+srv)?://([^/?]*@)?", text)
    user = "" if match is None or match[1] is None else match[1]
    kept = re.findall(r"[?&](auth\w+=[^&]*)", text, re.IGNORECASE)
    host = "127.0.0.1" if options.host in _ALL else options.host
    where = f"[{host}]" if ":" in host else host
    return hide(f"mongodb://{user}{where}:{options.port}/?{'&'.join(['directConnection=true', *kept])}")


def _comparable() -> tuple[Streams, list[str]]:
    """What the streams of clients are made of: everything, with all kinds of events."""
    from tailrace.watch.compare.deployment import Streams  # noqa: PLC0415  as in run()

    return Streams(show_expanded_events=True), []


def _leave_threads(result: int) -> None:
    """End the process now if threads still wait for a server that does not answer. Otherwise Python would wait for
    them."""
    limit = time.monotonic() + _THREADS_S
    for thread in threading.enumerate():
        if thread.name.startswith("tailrace-") and not thread.daemon:
            thread.join(max(0.0, limit - time.monotonic()))
            if thread.is_alive():
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(result)


def _check_processes(args: argparse.Namespace) -> None:
    """Raises UsageError where several processes cannot do what is asked."""
    if sys.platform == "win32":
        raise UsageError("--processes above 1 needs a system on which processes can pass sockets to each other")
    if args.test_commands:
        raise UsageError("--test-commands needs --processes 1: fail points are kept in one process")


def _made(args: argparse.Namespace, uri: ConnectionString, options: GatewayOptions) -> Gateway | GatewayProcesses:
    """The gateway, which belongs to the event loop that runs."""
    from tailrace.watch.gateway.server import Gateway  # noqa: PLC0415

    if args.processes == 1:
        return Gateway(uri, options)
    from tailrace.watch.gateway.processes import GatewayProcesses  # noqa: PLC0415

    return GatewayProcesses(
        uri,
        options,
        args.processes,
        certificate=args.tls_certificate_key_file,
        authority=args.tls_ca_file,
        log=None if args.log == "warnings" else args.log,
    )


async def _serve(
    args: argparse.Namespace,
    uri: ConnectionString,
    options: GatewayOptions,
    comparison: SampledComparison | None,
    numbers: ServiceNumbers,
) -> int:
    from tailrace.cli.one_shard import warn_of_one_shard_at  # noqa: PLC0415  so that --help does not load it
    from tailrace.watch.gateway.process import raise_file_limit, settle  # noqa: PLC0415
    from tailrace.watch.gateway.pulse import Pulse  # noqa: PLC0415

    raise_file_limit()
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    gateway, metrics = _made(args, uri, options), args.metrics
    await gateway.start()
    settle()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    tell(f"tailrace: listening at {gateway.address}")
    await asyncio.to_thread(warn_of_one_shard_at, uri)
    if options.host in _ALL and options.tls is None:
        tell("tailrace: anyone who can reach this machine can connect, and nothing is encrypted")
    pulse = Pulse(gateway.tail_statistics)
    try:
        with ExitStack() as stack:
            if metrics is not None or args.console is not None:
                from tailrace.watch.gateway.collector import GatewayCollector  # noqa: PLC0415

                numbers.collector = collector = GatewayCollector(gateway.metrics, gateway.tail_statistics)
            if metrics is not None:
                from tailrace.base.metrics_server import serve_metrics  # noqa: PLC0415

                beside = collectors(comparison)
                address = address_of(metrics, "--metrics")
                url = stack.enter_context(serve_metrics(collector, *address, beside=beside, health=pulse.health))
                tell(f"tailrace: statistics at {url}")
            stack.enter_context(notifying(pulse.health))
            await pulse.beat_until(stopped)
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
        tell("tailrace: stopping: streams end, and drivers resume them elsewhere")
        await gateway.stop()
    return 0


def _tls(certificate: str | None, authority: str | None) -> ssl.SSLContext | None:
    from tailrace.watch.gateway.tls import server_context  # noqa: PLC0415  as in run()

    if certificate is None:
        if authority is not None:
            raise UsageError("--tls-ca-file needs --tls-certificate-key-file")
        return None
    return server_context(certificate, authority)
