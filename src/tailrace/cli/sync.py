"""``tailrace sync``: one MongoDB kept equal to another, and proven so."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Final

from tailrace.base.health import Health
from tailrace.base.service_manager import notifying
from tailrace.cli.output import say, show_progress, tell
from tailrace.cli.signal_calls import call_aside
from tailrace.cli.stream_arguments import add_lease_seconds, address_of
from tailrace.cli.usage import WrongUsageError
from tailrace.errors import SinkError, UsageError
from tailrace.read.source.uri import find_uri, is_uri_argument

if TYPE_CHECKING:
    from tailrace.act.sync.channel import Sync
    from tailrace.act.sync.progress import SyncProgress

_DESCRIPTION: Final = """\
Keep one deployment equal to another: copy SOURCE, follow it, prove that both are equal, and let TARGET take its place.
SOURCE is a replica set or a sharded cluster, TARGET a replica set or a mongos; both are URIs, or @FILE. Start it again
to continue where it stopped. Start it twice, and one process works while the other waits. SIGTERM and Ctrl-C end it at
a committed position. Its state is in the database tailrace_sync of the target; nothing is written to the source.

  tailrace sync SOURCE TARGET             copy, then follow until Ctrl-C, SIGTERM or a cut-over
  tailrace sync plan SOURCE TARGET        what would be done, and what is refused; writes nothing
  tailrace sync status SOURCE TARGET      phase, position, lag, and how far the oplog reaches
  tailrace sync verify SOURCE TARGET      compare both byte for byte while writes go on, and name what differs
  tailrace sync pause SOURCE TARGET       make the running process wait
  tailrace sync resume SOURCE TARGET      let it continue
  tailrace sync cutover SOURCE TARGET     wait for the last write, compare, and let the target take the source's place
  tailrace sync reverse SOURCE TARGET     after a cut-over: follow from TARGET to SOURCE, without a copy"""
_ACTIONS: Final = ("plan", "status", "verify", "pause", "resume", "cutover", "reverse")
_NAMED_MAX: Final = 50


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the main parser."""
    parser = subparsers.add_parser(
        "sync",
        help="keep one MongoDB equal to another, and prove it",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("words", nargs="*", metavar="...", help="what to do, SOURCE and TARGET, as above")
    parser.add_argument(
        "--only", nargs="+", action="extend", default=[], metavar="NS", help="only these: shop.orders, 'shop.*'"
    )
    parser.add_argument(
        "--except", nargs="+", action="extend", default=[], dest="excluded", metavar="NS", help="all but these"
    )
    parser.add_argument(
        "--rename",
        action="append",
        default=[],
        metavar="A=B",
        help="another name on the target: of a database (shop=store) or a collection (shop.a=shop.b); may be repeated",
    )
    wanted = "on a sharded target: the key by which a collection is sharded ({}: not sharded); may be repeated"
    parser.add_argument("--shard-key", action="append", default=[], metavar="NS=KEY", help=wanted)
    parser.add_argument("--name", default="sync", help="distinguishes syncs to the same target (default: sync)")
    parser.add_argument(
        "--state-db", default="tailrace_sync", metavar="DB", help="the target's database that keeps the state"
    )
    parser.add_argument(
        "--lanes",
        type=int,
        default=1,
        metavar="N",
        help="transactions in parallel; with 1 the source's transactions stay whole (default: 1)",
    )
    parser.add_argument("--documents-per-second", type=float, metavar="N", help="the copy's limit (default: none)")
    parser.add_argument(
        "--archive",
        metavar="DIR",
        help="record the source's oplogs there, so that the sync may fall behind by more than they reach back "
        "(extra: archive)",
    )
    add_lease_seconds(parser)
    parser.add_argument("--once", action="store_true", help="end when the target has what the source has now")
    parser.add_argument("--json", action="store_true", help="for programs: one JSON document per line")
    parser.add_argument(
        "--metrics", metavar="HOST:PORT", help="serve statistics to Prometheus, /livez and /readyz (extra: metrics)"
    )
    _add_of_subcommands(parser)
    parser.set_defaults(run=run)


def _add_of_subcommands(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--sample",
        type=int,
        metavar="N",
        help="with verify and cutover: compare N documents of each collection (verify: all; cutover: 1000; 0: all)",
    )
    parser.add_argument("--resume", action="store_true", help="with verify: continue a verification that was stopped")
    parser.add_argument(
        "--writers-stopped",
        action="store_true",
        help="with cutover: all writers to the source have been stopped, so it need not refuse writes",
    )
    parser.add_argument(
        "--unblock",
        action="store_true",
        help="with reverse: let the former source accept its users' writes, if this user may not bypass the block",
    )


def run(args: argparse.Namespace) -> int:
    """Carry the command out; the exit status. Raises TailraceError."""
    words: list[str] = list(args.words)
    action = words.pop(0) if words and words[0] in _ACTIONS else "run"
    if len(words) != 2 or not all(map(is_uri_argument, words)):
        shown = "" if action == "run" else f" {action}"
        raise WrongUsageError(
            f"tailrace sync{shown} needs the connection URIs of a source and a target",
            hint=f"tailrace sync{shown} mongodb://... mongodb://..., or @FILE for each",
        )
    if args.sample is not None and args.sample < 0:
        raise WrongUsageError("--sample must be a number of documents, or 0 for all")
    if args.metrics is not None:
        address_of(args.metrics, "--metrics")  # before anything is opened
    with _opened(words, args) as sync:
        act: Callable[[Sync, argparse.Namespace], int] = _DOING[action]
        return act(sync, args)


@contextmanager
def _opened(words: Sequence[str], args: argparse.Namespace) -> Iterator[Sync]:
    from tailrace.act.sync.channel import Sync  # noqa: PLC0415  so that --help loads no PyMongo

    with Sync(
        find_uri(words[0]),
        find_uri(words[1]),
        only=args.only,
        excluded=args.excluded,
        rename=_renames(args.rename),
        name=args.name,
        state_db=args.state_db,
        lanes=args.lanes,
        documents_per_second=args.documents_per_second,
        archive=args.archive,
        lease_s=args.lease_seconds,
        shard_keys=_shard_keys(args.shard_key),
    ) as sync:
        yield sync


def _renames(given: Sequence[str]) -> dict[str, str]:
    found = {}
    for one in given:
        before, equals, after = one.partition("=")
        if not equals or not before or not after:
            raise WrongUsageError(
                f"--rename {one} does not give a new name", hint="--rename shop=store, or shop.a=shop.b"
            )
        found[before] = after
    return found


def _shard_keys(given: Sequence[str]) -> dict[str, dict[str, Any]]:
    found = {}
    for one in given:
        namespace, _, text = one.partition("=")
        try:
            key = json.loads(text)
        except ValueError:
            key = None
        if not isinstance(key, dict) or not namespace:
            raise WrongUsageError(
                f"--shard-key {one} does not give a shard key",
                hint="""--shard-key 'shop.orders={"region": 1, "_id": 1}'""",
            )
        found[namespace] = key
    return found


def _stop_at_signals(sync: Sync) -> None:
    """The first signal ends cleanly; a second one ends at once."""

    def stop(number: int, frame: object) -> None:
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, signal.default_int_handler if each == signal.SIGINT else signal.SIG_DFL)
        call_aside(sync.stop)

    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, stop)


# -- what is done ---------------------------------------------------------------------------------------------------


def _run(sync: Sync, args: argparse.Namespace) -> int:
    _stop_at_signals(sync)
    line = _Line(as_json=args.json)
    with _watched(sync, args.metrics):
        line.last(sync.run(line, to_present=args.once))
    return 0


def _plan(sync: Sync, args: argparse.Namespace) -> int:
    plan = sync.plan()
    if args.json:
        say(json.dumps(plan.to_json(), default=str))
    else:
        say(plan, lines=True)
    if plan.refusals:
        count = len(plan.refusals)
        raise UsageError(f"the sync would be refused: {count} {'reason' if count == 1 else 'reasons'}")
    return 0


def _status(sync: Sync, args: argparse.Namespace) -> int:
    progress = sync.status()
    if progress.phase == "new":
        raise UsageError(
            f"there is no sync {args.name!r} on the target", hint="`tailrace sync SOURCE TARGET` begins one"
        )
    _said(progress.to_json(), progress, as_json=args.json)
    return 0


def _verify(sync: Sync, args: argparse.Namespace) -> int:
    _stop_at_signals(sync)
    verification = sync.verify(sample=args.sample or None, resume=args.resume)
    differ = len(verification.differences) + verification.more
    if args.json:
        say(json.dumps(verification.to_json(), default=str))
    else:
        for one in verification.differences[:_NAMED_MAX]:
            say(one)
        say(verification)
    if differ:
        raise SinkError(
            f"the target differs from the source in {differ:,} places",
            hint="Somebody else writes to the target, or a definition was changed there",
        )
    if not verification.complete:
        raise SinkError("the verification was stopped", hint="`tailrace sync verify --resume` continues it")
    return 0


def _pause(sync: Sync, args: argparse.Namespace) -> int:
    sync.pause()
    return _status(sync, args)


def _resume(sync: Sync, args: argparse.Namespace) -> int:
    sync.resume()
    return _status(sync, args)


def _cutover(sync: Sync, args: argparse.Namespace) -> int:
    from tailrace.act.sync.channel import CUT_OVER_SAMPLE  # noqa: PLC0415
    from tailrace.act.sync.cutover import BLOCKS_SINCE  # noqa: PLC0415

    version = tuple(sync.ends.source.server_info()["versionArray"][:2])
    if not args.writers_stopped and version < BLOCKS_SINCE:
        raise UsageError(
            f"a source of MongoDB {version[0]}.{version[1]} cannot refuse its users' writes",
            hint="Stop all its writers, then give --writers-stopped: the cut-over proves that no write came after that",
        )
    sample = CUT_OVER_SAMPLE if args.sample is None else args.sample or None
    done = sync.cutover(block=not args.writers_stopped, sample=sample, told=tell)
    text = (
        f"cut over at {done.time.seconds},{done.time.increment}: the target takes writes, {done.seconds:.1f} s after "
        f"the source's last; {done.verified:,} documents compared, differences: 0"
    )
    _said(done.to_json(), text, as_json=args.json)
    return 0


def _reverse(sync: Sync, args: argparse.Namespace) -> int:
    with sync.reverse(unblock=args.unblock) as back:
        return _run(back, args)


_DOING: Final[dict[str, Callable[[Any, argparse.Namespace], int]]] = {
    "run": _run,
    "plan": _plan,
    "status": _status,
    "verify": _verify,
    "pause": _pause,
    "resume": _resume,
    "cutover": _cutover,
    "reverse": _reverse,
}


def _said(document: dict[str, Any], text: object, *, as_json: bool) -> None:
    say(json.dumps(document) if as_json else text, flush=True)


class _Line:
    """How far a sync is: JSON on standard output; for people a line on standard error, overwritten on a terminal."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json
        self._is_terminal = sys.stderr is not None and sys.stderr.isatty()
        self._told = ("", 0.0)

    def __call__(self, progress: SyncProgress) -> None:
        if self._as_json:
            _said(progress.to_json(), "", as_json=True)
        elif self._is_terminal:
            show_progress(progress)
        elif self._told[0] != progress.phase or time.monotonic() - self._told[1] > _TELL_S:
            self._told = progress.phase, time.monotonic()
            tell(progress)

    def last(self, progress: SyncProgress) -> None:
        if self._is_terminal and not self._as_json:
            show_progress("")
        _said(progress.to_json(), progress, as_json=self._as_json)


#: Without a terminal, how many seconds pass between two lines.
_TELL_S: Final = 10.0


@contextmanager
def _watched(sync: Sync, metrics: str | None) -> Iterator[None]:
    """Statistics and health, as far as they are asked for."""

    def health() -> Health:
        progress = sync.counted()
        unready = None if progress.is_consistent else "the target does not equal the source yet"
        return Health(str(progress), unready=unready)

    with ExitStack() as stack:
        if metrics is not None:
            from tailrace.act.sync.metrics import SyncCollector  # noqa: PLC0415
            from tailrace.base.metrics_server import serve_metrics  # noqa: PLC0415

            served = serve_metrics(SyncCollector(sync.counted), *address_of(metrics, "--metrics"), health=health)
            tell(f"tailrace: statistics at {stack.enter_context(served)}")
        stack.enter_context(notifying(health))
        yield
