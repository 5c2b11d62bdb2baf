"""``tailrace console``: a page that shows a deployment, its streams, and what reads them."""

from __future__ import annotations

import argparse
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tailrace.cli.handler_argument import LETTERS, STORE, store_namespace
from tailrace.cli.output import tell
from tailrace.cli.signal_calls import call_aside
from tailrace.cli.stream_arguments import add_uri_argument, address_of
from tailrace.read.source.uri import find_uri

if TYPE_CHECKING:
    from tailrace.cli.panels.sources import Targets

LISTEN: Final = "127.0.0.1:8099"
_DESCRIPTION: Final = """\
Serve a page that shows a deployment: events by namespace and kind, the live tail with what each change
changed, lag and oplog of each shard, the streams of a gateway, leases and dead letters of listeners, lakes, tables,
archives and syncs, what tailrace doctor says, and a token decoder. It only reads, and changes nothing.

By default it listens on this machine only. At another address it speaks TLS, and asks for the name and password of a
user of the deployment who may read the oplog. Ctrl-C and SIGTERM end it."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the main parser."""
    parser = subparsers.add_parser(
        "console",
        help="serve a page that shows streams, leases, lakes and the live tail",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_uri_argument(parser)
    parser.add_argument("--listen", default=LISTEN, metavar="HOST:PORT", help=f"default: {LISTEN}; port 0: a free one")
    parser.add_argument("--tls-certificate-key-file", metavar="PEM", help="speak TLS, with this certificate")
    parser.add_argument(
        "--login", action="store_true", help="require a login as a user of the deployment on this machine too"
    )
    parser.add_argument(
        "--host",
        action="append",
        default=[],
        metavar="NAME",
        help="a further name by which browsers may ask for the page, such as a proxy's; may be repeated",
    )
    parser.add_argument(
        "--no-images", action="store_true", help="read no images of documents, only what the oplog says"
    )
    add_target_arguments(parser)
    parser.set_defaults(run=run, positionals=("uri",))


def add_target_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options for what is shown next to the deployment."""
    group = parser.add_argument_group("what is shown beside the deployment")
    group.add_argument(
        "--gateway", metavar="URI", help="a gateway, with its streams (default: URI, if it leads to one)"
    )
    group.add_argument("--store", default=STORE, metavar="DB.COLL", help=f"where leases are kept (default: {STORE})")
    group.add_argument(
        "--letters", default=LETTERS, metavar="DB.COLL", help=f"where dead letters are kept (default: {LETTERS})"
    )
    group.add_argument(
        "--lake",
        action="append",
        default=[],
        metavar="DIR",
        help="a lake, in a directory, or at s3://BUCKET/PREFIX, az://CONTAINER/PREFIX or gs://BUCKET/PREFIX; "
        "may be repeated",
    )
    group.add_argument(
        "--tables", action="append", default=[], type=Path, metavar="DIR", help="tables; may be repeated"
    )
    group.add_argument(
        "--archive",
        action="append",
        default=[],
        metavar="DIR",
        help="an archive, in a directory, or at s3://BUCKET/PREFIX, az://CONTAINER/PREFIX or gs://BUCKET/PREFIX; "
        "may be repeated",
    )
    group.add_argument(
        "--sync", action="append", default=[], metavar="TARGET", help="the target of syncs from URI; may be repeated"
    )


def targets_of(args: argparse.Namespace) -> Targets:
    """What is shown next to the deployment. Raises UsageError."""
    from tailrace.cli.panels.sources import Targets  # noqa: PLC0415  so that --help does not load it
    from tailrace.lake.store.lake_root import given_root  # noqa: PLC0415  as well
    from tailrace.read.archive.place import archive_place  # noqa: PLC0415  as well

    for namespace in (args.store, args.letters):
        store_namespace(namespace)  # before anything is opened
    return Targets(
        store=args.store,
        letters=args.letters,
        gateway=None if args.gateway is None else find_uri(args.gateway),
        lakes=[given_root(one, None) for one in args.lake],
        tables=args.tables,
        archives=[archive_place(one) for one in args.archive],
        syncs=[find_uri(target) for target in args.sync],
    )


def run(args: argparse.Namespace) -> int:
    """Carry the command out; the exit code. Raises TailraceError."""
    from tailrace.cli.one_shard import warn_of_one_shard  # noqa: PLC0415
    from tailrace.cli.web.server import ConsoleOptions, serving_console  # noqa: PLC0415  so that --help does not load it
    from tailrace.read.source.connection import open_client  # noqa: PLC0415

    host, port = address_of(args.listen, "--listen")
    options = ConsoleOptions(
        host=host,
        port=port,
        names=args.host,
        certificate=args.tls_certificate_key_file,
        login=args.login,
        images=not args.no_images,
    )
    options.check()  # before anything is opened
    targets, uri = targets_of(args), find_uri(args.uri)
    with open_client(uri) as client:
        warn_of_one_shard(client)
    with ended_by_signals() as ended, serving_console(uri, targets, options) as address:
        tell(f"tailrace: the console is at {address}")
        ended.wait()
    return 0


@contextmanager
def ended_by_signals() -> Iterator[threading.Event]:
    """An event that Ctrl-C and SIGTERM set; a second signal ends at once."""
    ended = threading.Event()

    def end(number: int, _frame: object) -> None:
        signal.signal(number, before[signal.Signals(number)])
        call_aside(ended.set)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield ended
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
