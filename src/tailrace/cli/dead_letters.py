"""``tailrace leases dead-letters``: the changes that listeners gave up, listed and handed to a handler again."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from tailrace.cli.listen import load_handler, store_namespace
from tailrace.cli.output import say
from tailrace.errors import TailraceError, UsageError
from tailrace.source.uri import find_uri, is_uri_argument

if TYPE_CHECKING:
    from tailrace.consumer.dead_letters import DeadLetter, DeadLetters

LETTERS: Final = "tailrace.deadLetters"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what only ``dead-letters`` takes."""
    group = parser.add_argument_group("dead-letters")
    group.add_argument("--letters", metavar="DB.COLL", help=f"where they are kept (default: {LETTERS})")
    group.add_argument("--resource", metavar="NAME", help="only those of this resource (for lane 2: NAME/2)")
    group.add_argument("--change", metavar="ID", help="replay: those whose change id begins with ID")
    group.add_argument("--all", action="store_true", help="replay: all of them")


def refuse_arguments(args: argparse.Namespace) -> None:
    """Raises UsageError if an argument of ``dead-letters`` was given to another action."""
    for name in ("letters", "resource", "change", "all"):
        if getattr(args, name):
            raise UsageError(f"--{name} belongs to dead-letters", hint="tailrace leases --help shows how")


def run(args: argparse.Namespace, words: list[str]) -> int:
    """Carry out what follows ``dead-letters``. Raises TailraceError."""
    from tailrace.client import connect  # noqa: PLC0415  so that --help does not load it
    from tailrace.consumer.dead_letters import DeadLetters  # noqa: PLC0415

    action = words.pop(0) if words and words[0] in ("list", "replay") else "list"
    handler = _handler(words) if action == "replay" else None
    uri = words.pop(0) if words and is_uri_argument(words[0]) and args.uri is None else args.uri
    if words:
        raise UsageError(f"{words[0]!r} is not understood here", hint="tailrace leases --help shows how")
    if handler is None and (args.change or args.all):
        raise UsageError("--change and --all say what to replay", hint="tailrace leases dead-letters replay ...")
    if handler is not None and bool(args.change) == args.all:
        raise UsageError("which dead letters are to be replayed?", hint="Give --change ID for one, or --all")
    where = args.letters or LETTERS
    database, collection = store_namespace(where)
    with connect(find_uri(uri)) as client:
        letters = DeadLetters(client[database][collection])
        if handler is not None:
            return _replay(letters, handler, args)
        found = list(letters.letters(args.resource))
    if args.format == "json":
        say(json.dumps([shown(letter) for letter in found], indent=2, ensure_ascii=False), lines=True)
    elif found:
        _print_table(found)
    else:
        say(f"no dead letters in {where}")
    return 0


def _handler(words: list[str]) -> Callable[..., Any]:
    if not words:
        raise UsageError("which handler takes them?", hint="tailrace leases dead-letters replay MODULE:HANDLER --all")
    from tailrace.consumer.rules.unrun import check_runs  # noqa: PLC0415  so that --help does not load it

    handler = load_handler(words.pop(0))
    check_runs(handler, "the handler of dead letters")
    return handler


def _replay(letters: DeadLetters, handler: Callable[..., Any], args: argparse.Namespace) -> int:
    from tailrace.consumer.rules.unrun import refuse_unrun  # noqa: PLC0415

    done: list[DeadLetter] = []
    tried: list[DeadLetter] = []

    def handle(letter: DeadLetter) -> None:
        tried.append(letter)
        refuse_unrun(handler(letter), "the handler")
        done.append(letter)

    try:
        count = letters.replay(handle, args.resource, args.change)
    except Exception as error:
        if len(tried) == len(done):
            raise  # not the handler's
        said = error.message if isinstance(error, TailraceError) else f"{type(error).__name__}: {error}"
        raise TailraceError(
            f"the handler failed at the change {tried[-1].message_id}: {said}",
            hint=f"{len(done)} were replayed before; this one and those after it are kept",
        ) from error
    if args.change and not count:
        raise UsageError(f"there is no dead letter whose change id begins with {args.change!r}")
    say(json.dumps({"replayed": count}) if args.format == "json" else f"{count} replayed")
    return 0


def shown(letter: DeadLetter) -> dict[str, Any]:
    """A letter as JSON shows it; ``position`` is the cluster time, ``change`` the resume token's text."""
    return {
        "resource": letter.resource,
        "change": letter.message_id,
        "position": str(letter.cluster_time),
        "namespace": letter.namespace,
        "operationType": letter.operation_type,
        "documentKey": letter.shown_key,
        "error": letter.error,
        "reason": letter.reason,
        "tries": letter.tries,
        "version": letter.version,
        "at": letter.at.isoformat(),
    }


def _print_table(letters: list[DeadLetter]) -> None:
    for letter in letters:
        key = "" if letter.shown_key is None else f" of {letter.shown_key}"
        say(f"{letter.resource}  {letter.cluster_time}  {letter.operation_type}{key} in {letter.namespace}")
        say(f"  {letter.error} after {letter.tries} tries: {letter.reason}")
        say(f"  {letter.message_id}")
