"""``tailrace dead-letters``: changes that listeners gave up on: listed, shown, handed to a handler again, discarded."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from tailrace.cli.handler_argument import LETTERS, load_handler, store_namespace
from tailrace.cli.output import say
from tailrace.errors import SinkError, TailraceError, UsageError
from tailrace.read.source.uri import URI_VARIABLE, find_uri, is_uri_argument

if TYPE_CHECKING:
    from tailrace.act.consumer.dead_letters import DeadLetter, DeadLetters

_DESCRIPTION: Final = """\
The changes that listeners gave up on (tailrace listen --dead-letters), and those that an operator left out (tailrace
leases skip).

  list     with position and reason, oldest change first
  show     the whole event too, as extended JSON
  replay   hand them to a handler, oldest first; each is removed when the handler returns. One whose document has
           changed since is kept, and reported: a handler that writes without change.fence would undo the newer change.
           --anyway hands it over all the same
  discard  remove them

--resource NAME chooses those of a resource, with all its lanes; --change ID those whose change id begins with ID.
replay and discard need --change, or --all.

The exit status is 0 when the action is done, and 1 when it is not, or when replay kept a letter."""
_ACTIONS: Final = ("list", "show", "replay", "discard")
_UNAUTHORIZED: Final = 13
_OURS: Final = ("letters", "resource", "change", "all", "anyway")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the main parser."""
    parser = subparsers.add_parser(
        "dead-letters",
        help="list, show, replay or discard the changes that listeners gave up on",
        usage="tailrace dead-letters [list] [URI] [--resource NAME] [--letters DB.COLL] [--json]\n"
        "       tailrace dead-letters show [URI] [--change ID] [--resource NAME]\n"
        "       tailrace dead-letters replay MODULE:HANDLER [URI] (--change ID | --all) [--resource NAME] [--anyway] "
        "[--source URI]\n"
        "       tailrace dead-letters discard [URI] (--change ID | --all) [--resource NAME]",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("words", nargs="*", metavar="...", help="an action (default: list); then the URI")
    parser.add_argument("--uri", metavar="URI", help=f"as for tailrace watch (default: {URI_VARIABLE})")
    parser.add_argument("--format", choices=("pretty", "json"), default="pretty", help="default: pretty")
    parser.add_argument("--json", action="store_const", const="json", dest="format", help="the same as --format json")
    parser.add_argument("--source", metavar="URI", help="replay: the deployment that was watched, if it is another")
    add_arguments(parser)
    parser.set_defaults(run=lambda args: run(args, list(args.words)))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what only ``dead-letters`` takes."""
    group = parser.add_argument_group("dead-letters")
    group.add_argument("--letters", metavar="DB.COLL", help=f"where they are kept (default: {LETTERS})")
    group.add_argument("--resource", metavar="NAME", help="only those of this resource, of all its lanes")
    group.add_argument("--change", metavar="ID", help="only those whose change id begins with ID")
    group.add_argument("--all", action="store_true", help="replay, discard: all of them")
    group.add_argument("--anyway", action="store_true", help="replay: also where the document has changed since")


def refuse_arguments(args: argparse.Namespace, *, but: str = "") -> None:
    """Raises UsageError if an argument of ``dead-letters`` was given to another action."""
    for name in _OURS:
        if name != but and getattr(args, name):
            raise UsageError(f"--{name} belongs to dead-letters", hint="tailrace dead-letters --help shows how")


def run(args: argparse.Namespace, words: list[str]) -> int:
    """Carry out what follows ``dead-letters``. Raises TailraceError."""
    from tailrace.act.consumer.dead_letters import DeadLetters  # noqa: PLC0415
    from tailrace.watch.client import connect  # noqa: PLC0415  so that --help does not load it

    action = words.pop(0) if words and words[0] in _ACTIONS else "list"
    handler = _handler(words) if action == "replay" else None
    uri = words.pop(0) if words and is_uri_argument(words[0]) and args.uri is None else args.uri
    if words:
        raise UsageError(f"{words[0]!r} is not understood here", hint="tailrace dead-letters --help shows how")
    _check(args, action)
    where = args.letters or LETTERS
    database, collection = store_namespace(where)
    with connect(find_uri(uri)) as client, needing_rights(where):
        letters = DeadLetters(client[database][collection])
        if handler is not None:
            return _replay(letters, handler, args, client)
        if action == "discard":
            return _discard(letters, args)
        chosen = list(letters.letters(args.resource, args.change))
    if args.change and not chosen:
        raise _unknown(args.change)
    shows = action == "show"
    if args.format == "json":
        listed = [{**shown(letter), **(_event(letter) if shows else {})} for letter in chosen]
        say(json.dumps(listed, indent=2, ensure_ascii=False), lines=True)
    elif chosen:
        _print_table(chosen, shows)
    else:
        say(f"no dead letters in {where}")
    return 0


@contextmanager
def needing_rights(where: str) -> Iterator[None]:
    """Says which rights on the collection of dead letters a user lacks. Raises SinkError."""
    from pymongo.errors import OperationFailure  # noqa: PLC0415  as in run()

    from tailrace.read.source.failure import short_reason  # noqa: PLC0415

    try:
        yield
    except OperationFailure as error:
        if error.code != _UNAUTHORIZED:
            raise
        raise SinkError(
            f"the dead letters in {where} cannot be used: {short_reason(error)}",
            code=error.code,
            hint=f"The user needs find on {where}, and remove to replay or discard them",
        ) from None


def _check(args: argparse.Namespace, action: str) -> None:
    chooses = action in ("replay", "discard")
    if args.all and not chooses:
        raise UsageError("--all selects what to replay or discard", hint="tailrace dead-letters --help shows how")
    if args.change and action == "list":
        raise UsageError("--change selects what to show, replay or discard", hint="tailrace dead-letters show ...")
    if chooses and bool(args.change) == args.all:
        raise UsageError(f"which dead letters to {action}?", hint="Give --change ID for one, or --all")
    if (args.anyway or args.source) and action != "replay":
        raise UsageError("--anyway and --source belong to replay", hint="tailrace dead-letters --help shows how")


def _unknown(change: str) -> UsageError:
    return UsageError(f"there is no dead letter whose change id begins with {change!r}")


def _handler(words: list[str]) -> Callable[..., Any]:
    if not words:
        raise UsageError("which handler takes them?", hint="tailrace dead-letters replay MODULE:HANDLER --all")
    from tailrace.act.consumer.rules.unrun import check_runs  # noqa: PLC0415  so that --help does not load it

    handler = load_handler(words.pop(0))
    check_runs(handler, "the handler of dead letters")
    return handler


def _discard(letters: DeadLetters, args: argparse.Namespace) -> int:
    count = letters.discard(args.resource, args.change)
    if args.change and not count:
        raise _unknown(args.change)
    say(json.dumps({"discarded": count}) if args.format == "json" else f"{count} discarded")
    return 0


def _replay(letters: DeadLetters, handler: Callable[..., Any], args: argparse.Namespace, client: Any) -> int:
    from tailrace.act.consumer.rules.unrun import refuse_unrun  # noqa: PLC0415

    done: list[DeadLetter] = []
    tried: list[DeadLetter] = []
    kept: dict[str, str] = {}

    def handle(letter: DeadLetter) -> None:
        tried.append(letter)
        refuse_unrun(handler(letter), "the handler")
        done.append(letter)

    with ExitStack() as stack:
        since = None if args.anyway else _newer_changes(stack, letters, args, client)

        def keeps(letter: DeadLetter) -> bool:
            why = None if since is None else since(letter)
            if why is not None:
                kept[letter.message_id] = why
            return why is not None

        try:
            count = letters.replay(handle, args.resource, args.change, keeps=keeps)
        except Exception as error:
            if len(tried) == len(done):
                raise  # not the handler's
            said = error.message if isinstance(error, TailraceError) else f"{type(error).__name__}: {error}"
            raise TailraceError(
                f"the handler failed at the change {tried[-1].message_id}: {said}",
                hint=f"{len(done)} were replayed before; this one and those after it are kept",
            ) from error
    if args.change and not count and not kept:
        raise _unknown(args.change)
    if args.format == "json":
        say(json.dumps({"replayed": count, **({"kept": kept} if kept else {})}))
    else:
        say(f"{count} replayed" + (f", {len(kept)} kept; --anyway hands them over all the same" if kept else ""))
        for change, why in kept.items():
            say(f"  {change}: {why}")
    return 1 if kept else 0


def _newer_changes(
    stack: ExitStack, letters: DeadLetters, args: argparse.Namespace, client: Any
) -> Callable[[DeadLetter], str | None]:
    """Says why a letter is kept."""
    from tailrace.act.consumer.newer_changes import NewerChanges  # noqa: PLC0415
    from tailrace.watch.client import connect  # noqa: PLC0415  as in run()

    source = client if args.source is None else stack.enter_context(connect(find_uri(args.source)))
    chosen = letters.letters(args.resource, args.change)
    return stack.enter_context(NewerChanges(source, chosen, cache(letters.changes))).since


def shown(letter: DeadLetter) -> dict[str, Any]:
    """A letter as JSON shows it; ``position`` is the cluster time, ``change`` the resume token's text."""
    return {
        "resource": letter.resource,
        "change": letter.message_id,
        "position": letter.cluster_time.for_programs(),
        "namespace": letter.namespace,
        "operationType": letter.operation_type,
        "documentKey": letter.shown_key,
        "error": letter.error,
        "reason": letter.reason,
        "tries": letter.tries,
        "version": letter.version,
        "at": letter.at.isoformat(),
    }


def _event(letter: DeadLetter) -> dict[str, Any]:
    return {"event": json.loads(letter.event_as_json) if letter.raw else None}


def _print_table(letters: list[DeadLetter], shows: bool) -> None:
    for letter in letters:
        key = "" if letter.shown_key is None else f" of {letter.shown_key}"
        say(f"{letter.resource}  {letter.cluster_time}  {letter.operation_type}{key} in {letter.namespace}")
        tries = f" after {letter.tries} tries" if letter.tries else ""
        say(f"  {letter.error}{tries}: {letter.reason}")
        say(f"  {letter.message_id}")
        if shows:
            event = json.loads(letter.event_as_json) if letter.raw else "the event was too large to be kept"
            say(json.dumps(event, indent=2, ensure_ascii=False), lines=True)
