"""``tailrace view``: verify a denormalised view, rebuild it, or keep it."""

from __future__ import annotations

import argparse
import json
import signal
from typing import TYPE_CHECKING, Any

from bson.json_util import RELAXED_JSON_OPTIONS, dumps

from tailrace.cli.listen import add_retry_arguments, error_policy
from tailrace.cli.output import say, tell
from tailrace.cli.standing import add_health_arguments, watched_over
from tailrace.cli.stream_arguments import add_uri_argument
from tailrace.errors import UsageError
from tailrace.read.source.uri import find_uri

if TYPE_CHECKING:
    from tailrace.act.consumer.views.totals import Totals
    from tailrace.act.consumer.views.upkeep import ViewDifference, ViewUpkeep
    from tailrace.act.consumer.views.view import View


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the main parser."""
    parser = subparsers.add_parser(
        "view",
        help="verify, rebuild or keep a denormalised view",
        description="A view: documents of one collection carry fields of the documents of another that they refer to, "
        "or the number of documents of another that refer to them (--count), and sums over these (--sum). "
        "verify recomputes it and prints what differs (exit status 1); rebuild writes it again, even while run keeps "
        "it; run keeps it up to date until it is interrupted, in as many processes as you like.",
    )
    parser.add_argument("action", choices=("verify", "rebuild", "run"), help="what to do, as above")
    add_uri_argument(parser)
    parser.add_argument("--target", required=True, metavar="DB.COLL", help="whose documents carry the fields")
    parser.add_argument(
        "--source", required=True, metavar="DB.COLL", help="where the fields are taken or computed from"
    )
    parser.add_argument(
        "--on",
        required=True,
        metavar="FIELD",
        help="with --field, the target's field with the source's _id; with --count and --sum, the source's field with "
        "the target's _id",
    )
    parser.add_argument(
        "--field",
        default=[],
        action="append",
        metavar="TARGET=SOURCE",
        help="a field of the target and the one of the source it is taken from: customer.name=name; may be repeated",
    )
    parser.add_argument("--count", metavar="TARGET", help="a field of the target: how many source documents name it")
    parser.add_argument(
        "--sum",
        default=[],
        action="append",
        metavar="TARGET=SOURCE",
        help="a field of the target and the one of the source that is added up: orders.total=amount; may be repeated",
    )
    parser.add_argument("--name", default="", help="name of the view (default: made from --on, or the source's name)")
    parser.add_argument(
        "--grace",
        type=float,
        default=5.0,
        metavar="SECONDS",
        help="verify: look again after SECONDS at what differs (default: 5)",
    )
    parser.add_argument("--leases", default="tailrace.leases", metavar="DB.COLL", help="run: where leases are kept")
    add_retry_arguments(parser)
    parser.add_argument(
        "--dead-letters",
        metavar="DB.COLL",
        help="run: write a change that has failed at every try to this collection and go on; without it, end",
    )
    parser.add_argument("--metrics", metavar="HOST:PORT", help="run: serve statistics, /livez and /readyz")
    add_health_arguments(parser)
    parser.add_argument("--format", choices=("pretty", "json"), default="pretty", help="default: pretty")
    parser.set_defaults(run=run, positionals=("action", "uri"))


def run(args: argparse.Namespace) -> int:
    """Run the command. Returns 1 where the view differs. Raises UsageError for a view that cannot be."""
    from tailrace.act.consumer.views.totals import Totals  # noqa: PLC0415  so that --help does not load the engine
    from tailrace.act.consumer.views.totals_upkeep import TotalsUpkeep  # noqa: PLC0415
    from tailrace.act.consumer.views.upkeep import ViewUpkeep  # noqa: PLC0415
    from tailrace.watch.client import connect  # noqa: PLC0415

    view = _view(args)
    if args.grace < 0:
        raise UsageError("--grace must be a number of seconds, 0 or more")
    with connect(find_uri(args.uri)) as client:
        if args.action == "run":
            return _keep(client, view, args)
        upkeep = TotalsUpkeep(client, view) if isinstance(view, Totals) else ViewUpkeep(client, view)
        if upkeep.is_empty():
            tell(f"tailrace: {view.target} holds no documents")
        if args.action == "rebuild":
            count = upkeep.rebuild()
            say(json.dumps({"rewritten": count}) if args.format == "json" else f"{count} documents rewritten")
            return 0
        return _verify(upkeep, args)


def _view(args: argparse.Namespace) -> View | Totals:
    from tailrace.act.consumer.views.totals import Totals  # noqa: PLC0415
    from tailrace.act.consumer.views.view import View  # noqa: PLC0415

    if args.field and (args.count or args.sum):
        raise UsageError("a view carries fields, or counts and sums", hint="Make two views")
    if args.count or args.sum:
        sums = _fields("--sum", args.sum)
        return Totals(args.target, args.source, args.on, args.count, sums, args.name)
    if not args.field:
        raise UsageError("the view would carry nothing", hint="Give --field, or --count and --sum")
    return View(args.target, args.source, args.on, _fields("--field", args.field), args.name)


def _fields(option: str, given: list[str]) -> dict[str, str]:
    fields = {}
    for one in given:
        target, equals, source = one.partition("=")
        if not (target and equals and source):
            raise UsageError(f"{option} {one} is not TARGET=SOURCE", hint=f"For example {option} customer.name=name")
        fields[target] = source
    return fields


def _verify(upkeep: ViewUpkeep, args: argparse.Namespace) -> int:
    count = 0
    for difference in upkeep.verify(grace_s=args.grace):
        count += 1
        say(_line(difference, args.format), flush=True)
    if args.format == "pretty":
        say(f"differences: {count}")
    return 1 if count else 0


def _line(difference: ViewDifference, form: str) -> str:
    from tailrace.act.consumer.views.raw_value import MISSING  # noqa: PLC0415
    from tailrace.act.consumer.views.view import VERSIONS_FIELD  # noqa: PLC0415

    if form == "json":
        shown = {"documentKey": difference.document_key, "field": difference.path}
        values = {"found": difference.found, "wanted": difference.wanted}
        return dumps(
            {**shown, **{name: value for name, value in values.items() if value is not MISSING}},
            json_options=RELAXED_JSON_OPTIONS,
            ensure_ascii=False,
        )
    but = "but the source has"
    if difference.path.startswith(f"{VERSIONS_FIELD}."):
        but = "but the deployment's time is only"
    found, wanted = _text(difference.found), _text(difference.wanted)
    return f"{_text(difference.document_key)}  {difference.path}: {found}, {but} {wanted}"


def _text(value: Any) -> str:
    from tailrace.act.consumer.views.raw_value import MISSING  # noqa: PLC0415

    return "nothing" if value is MISSING else dumps(value, json_options=RELAXED_JSON_OPTIONS, ensure_ascii=False)


def _keep(client: Any, view: View | Totals, args: argparse.Namespace) -> int:
    from tailrace.act.consumer.mongo_lease_store import MongoLeaseStore  # noqa: PLC0415
    from tailrace.act.consumer.views.keeper import ViewKeeper  # noqa: PLC0415

    database, dot, name = args.leases.partition(".")
    if not (database and dot and name):
        raise UsageError(f"--leases {args.leases} is not DATABASE.COLLECTION")
    policy = error_policy(args, client)
    store = MongoLeaseStore(client[database][name])
    keeper = ViewKeeper(client, view, store=store, **policy)
    with watched_over(keeper.listeners, client, store, args) as told:

        def stop(*_: object) -> None:
            told()
            keeper.stop()

        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, stop)
        say(f"keeping {view.name} of {view.target} from {view.source}", flush=True)
        keeper.run()
    return 0
