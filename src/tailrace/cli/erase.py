"""``tailrace erase``: take documents that are gone at the source out of everything that keeps copies of them."""

from __future__ import annotations

import argparse
import json
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import bson
from bson import json_util
from bson.errors import BSONError, InvalidBSON

from tailrace.cli.handler_argument import LETTERS, store_namespace
from tailrace.cli.output import say, show_progress
from tailrace.cli.stream_arguments import file_text
from tailrace.cli.usage import WrongUsageError
from tailrace.core.event.named_document import NamedDocument, NamedDocuments, StoreErasure
from tailrace.errors import OplogFormatError, SinkError, TailraceError, UsageError
from tailrace.read.source.uri import find_uri

_DESCRIPTION = """\
Take documents out of everything named here that keeps copies of them. Delete them at the source first, and let what
follows the source catch up: what is still current is refused.

  --lake         their events, including those of copies and in the quarantine; replaced files are removed at once
  --tables       rows of older versions, of the change feed and of the quarantine, and what the state's file still
                 holds of deleted documents. No writer may run
  --dead-letters the dead letters of their changes
  --images       images of earlier states. No stream may run
  --archive      the entries that hold them, and stored pre-images; deletes stay. No writer may run

--dry-run counts, and changes nothing. The report says for each store what was found, what was erased, what is left and
until when, and what stays on purpose. The exit status is 0 only if nothing is left in any of them, and otherwise 1. If
a store is refused or damaged, the others are done all the same, and the command can be repeated."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the main parser."""
    parser = subparsers.add_parser(
        "erase",
        help="take documents out of lakes, tables, archives, dead letters and images",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    which = parser.add_argument_group("which documents")
    which.add_argument(
        "--document",
        nargs=2,
        action="append",
        default=[],
        metavar=("DB.COLL", "ID"),
        help="its collection, and its _id as Extended JSON: --document shop.customers 5; may be repeated",
    )
    which.add_argument(
        "--documents", metavar="FILE", help='one line for each document, such as {"ns": "shop.customers", "_id": 5}'
    )
    where = parser.add_argument_group("from which stores; each may be repeated")
    uris = "s3://BUCKET/PREFIX, az://CONTAINER/PREFIX or gs://BUCKET/PREFIX"
    where.add_argument("--lake", action="append", default=[], metavar="DIR", help=f"a lake: its directory, {uris}")
    where.add_argument(
        "--images", type=Path, action="append", default=[], metavar="DIR", help="the directory of images"
    )
    where.add_argument(
        "--archive",
        action="append",
        default=[],
        metavar="DIR",
        help=f"an archive: its directory, {uris}",
    )
    where.add_argument(
        "--tables",
        action="append",
        default=[],
        metavar="DIR",
        help=f"tables: their directory, {uris}",
    )
    where.add_argument(
        "--state",
        type=Path,
        metavar="FOLDER",
        help="of the one store that is in an object store: the local folder that its writer has as state",
    )
    where.add_argument("--dead-letters", action="append", default=[], metavar="URI", help="their deployment")
    parser.add_argument("--letters", metavar="DB.COLL", help=f"their collection (default: {LETTERS})")
    parser.add_argument(
        "--uuid", metavar="UUID", help="the UUID of the documents' collection, for images of more than one collection"
    )
    parser.add_argument("--dry-run", action="store_true", help="count what would be erased, and change nothing")
    parser.add_argument("--format", choices=("pretty", "json"), default="pretty", help="default: pretty")
    parser.add_argument("--json", action="store_const", const="json", dest="format", help="the same as --format json")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command. Returns 1 where something is left."""
    documents = NamedDocuments(_documents(args))
    if not documents.documents:
        raise WrongUsageError("tailrace erase needs --document or --documents: what to erase")
    if not any((args.lake, args.tables, args.images, args.archive, args.dead_letters)):
        raise WrongUsageError("tailrace erase needs a store: --lake, --tables, --dead-letters, --images or --archive")
    if args.letters is not None and not args.dead_letters:
        raise WrongUsageError("--letters belongs to --dead-letters")
    stored = [one for one in (*args.lake, *args.tables, *args.archive) if "://" in one]
    if args.state is not None and len(stored) != 1:
        raise WrongUsageError(
            "--state is the folder of one store: of a lake, tables, or an archive, in an object store",
            hint="Erase from each such store with a command of its own",
        )
    if args.uuid is not None and not args.images:
        raise WrongUsageError("--uuid belongs to --images")
    own = _uuid(args.uuid)
    reports = list(_reports(args, documents, own))
    done = all(one.done for one in reports)
    if args.format == "json":
        found = {"documents": len(documents.documents), "dryRun": args.dry_run, "done": done}
        say(json.dumps({**found, "stores": [_shown(one) for one in reports]}, indent=2, ensure_ascii=False), lines=True)
    else:
        for one in reports:
            _print(one, dry_run=args.dry_run)
    return 0 if done else 1


def _reports(args: argparse.Namespace, documents: NamedDocuments, own: bytes | None) -> Iterator[StoreErasure]:
    """What each store says. One that is refused says why, and the others are still done."""
    dry_run: bool = args.dry_run
    for root in args.lake:
        yield _asked("lake", root, lambda root=root: _lake(root, args.state, documents, dry_run))
    for root in args.tables:
        yield _asked("tables", root, lambda root=root: _tables(root, args.state, documents, dry_run))
    for root in args.images:
        yield _asked("images", root, lambda root=root: _images(root, documents, own, dry_run))
    letters: str = args.letters or LETTERS
    for uri in args.dead_letters:
        yield _asked("dead letters", letters, lambda uri=uri: _letters(uri, letters, documents, dry_run))
    for root in args.archive:
        yield _asked("archive", root, lambda root=root: _archive(root, args.state, documents, dry_run))


def _asked(store: str, place: object, ask: Any) -> StoreErasure:
    try:
        found: StoreErasure = ask()
    except WrongUsageError:
        raise
    except TailraceError as error:
        return StoreErasure(store, str(place), left=[str(error)])
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        return StoreErasure(store, str(place), left=[f"{where}{error.strerror or error}"])
    return found


def _lake(where: str, state: Path | None, documents: NamedDocuments, dry_run: bool) -> StoreErasure:
    from tailrace.lake.store.document_erasure import erase_documents  # noqa: PLC0415  so that --help loads no Arrow
    from tailrace.lake.store.lake_root import given_root, require_state  # noqa: PLC0415

    root = given_root(where, state if "://" in where else None)
    require_state(root)
    return erase_documents(root, documents, dry_run=dry_run)


def _tables(where: str, state: Path | None, documents: NamedDocuments, dry_run: bool) -> StoreErasure:
    from tailrace.base.object_place import check_tried, is_object_uri, object_place  # noqa: PLC0415  as below
    from tailrace.lake.tables.erasure import erase_documents  # noqa: PLC0415

    if not is_object_uri(where):
        check_tried(where)
        return erase_documents(Path(where), documents, dry_run=dry_run)
    if state is None:
        raise UsageError(
            f"erasing from {where} needs the state of its writer",
            hint="--state FOLDER: the local folder that 'tailrace tables write' has as --state",
        )
    return erase_documents(object_place(where, beside=state), documents, dry_run=dry_run)


def _images(root: Path, documents: NamedDocuments, own: bytes | None, dry_run: bool) -> StoreErasure:
    from tailrace.read.images.erasure import erase_documents  # noqa: PLC0415

    return erase_documents(root, documents, uuid=own, dry_run=dry_run)


def _letters(uri: str, where: str, documents: NamedDocuments, dry_run: bool) -> StoreErasure:
    from pymongo.errors import PyMongoError  # noqa: PLC0415

    from tailrace.act.consumer.dead_letters import DeadLetters  # noqa: PLC0415
    from tailrace.act.consumer.letter_erasure import erase_letters  # noqa: PLC0415
    from tailrace.cli.dead_letters import needing_rights  # noqa: PLC0415
    from tailrace.read.source.failure import short_reason  # noqa: PLC0415
    from tailrace.watch.client import connect  # noqa: PLC0415

    database, collection = store_namespace(where)
    try:
        with connect(find_uri(uri)) as client, needing_rights(where):
            return erase_letters(DeadLetters(client[database][collection]), documents, dry_run=dry_run)
    except PyMongoError as error:
        raise SinkError(f"the dead letters cannot be reached: {short_reason(error)}") from None


def _archive(where: str, state: Path | None, documents: NamedDocuments, dry_run: bool) -> StoreErasure:
    from tailrace.read.archive.erasure import erase_documents  # noqa: PLC0415
    from tailrace.read.archive.place import archive_place  # noqa: PLC0415

    def searched(path: object) -> None:
        if sys.stderr.isatty():
            show_progress(f"searching {str(path).rpartition('/')[2]}")

    try:
        return erase_documents(archive_place(where, state), documents, dry_run=dry_run, on_segment=searched)
    finally:
        if sys.stderr.isatty():
            show_progress("")


def _documents(args: argparse.Namespace) -> Iterator[NamedDocument]:
    for namespace, text in args.document:
        yield _named(namespace, _json(text, "--document"), "--document")
    if args.documents is None:
        return
    try:
        lines = file_text("--documents", args.documents).splitlines()
    except UsageError as error:
        raise WrongUsageError(error.message, hint=error.hint) from None
    for number, line in enumerate(lines, 1):
        if line.strip():
            where = f"line {number} of {args.documents}"
            found = _json(line, where)
            if not isinstance(found, dict) or found.keys() != {"ns", "_id"} or not isinstance(found["ns"], str):
                raise WrongUsageError(f'{where} is not a document such as {{"ns": "shop.customers", "_id": 5}}')
            yield _named(found["ns"], found["_id"], where)


def _json(text: str, where: str) -> Any:
    try:
        return json_util.loads(text, json_options=json_util.CANONICAL_JSON_OPTIONS)
    except (ValueError, TypeError, RecursionError, InvalidBSON) as error:
        raise WrongUsageError(
            f"{where}: the _id is not Extended JSON: {error}", hint="A text has quotes: '\"x\"'"
        ) from None


def _named(namespace: str, value: Any, where: str) -> NamedDocument:
    database, _, collection = namespace.partition(".")
    if not database or not collection:
        raise WrongUsageError(f"{where}: {namespace!r} is not a collection", hint="Write it as database.collection")
    try:
        found = NamedDocument(namespace, bson.encode({"_id": value}))
        _ = found.key
    except (BSONError, OplogFormatError, OverflowError, ValueError, TypeError, RecursionError) as error:
        raise WrongUsageError(f"{where}: this _id cannot be written as BSON: {error}") from None
    return found


def _uuid(text: str | None) -> bytes | None:
    try:
        return None if text is None else uuid.UUID(text).bytes
    except ValueError:
        raise WrongUsageError(f"--uuid {text!r} is not a UUID") from None


def _shown(one: StoreErasure) -> dict[str, Any]:
    found = {"store": one.store, "place": one.place, "found": one.found, "erased": one.erased}
    return {**found, "left": one.left, "kept": one.kept, "done": one.done}


def _print(one: StoreErasure, *, dry_run: bool) -> None:
    parts = ", ".join(f"{number:,} {what}" for what, number in one.found.items()) or "nothing found"
    state = "" if not one.total else " found" if dry_run else f" found, {one.erased:,} erased"
    say(f"{one.store} {one.place}: {parts}{state}")
    if dry_run and one.total:
        say("  nothing was changed")
    for sentence in one.left:
        say(f"  left: {sentence}")
    for sentence in one.kept:
        say(f"  kept: {sentence}")
