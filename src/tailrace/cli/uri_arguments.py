"""A connection URI where a command does not take one, and what to write instead."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

#: A path made of a URI has one slash.
_URI: Final = re.compile(r"mongodb(\+srv)?:/")
_FLAG: Final = "--uri"
#: Where the deployment is named, for commands that take no URI.
_INSTEAD: Final = {
    "run": "the pipeline file names the deployment (source.uri), or the environment variable TAILRACE_URI",
    "replay": "it reads a dump or an archive, and `tailrace watch` a deployment",
}


def is_uri(word: object) -> bool:
    """Whether ``word`` begins as a connection URI does."""
    return isinstance(word, (str, Path)) and _URI.match(str(word)) is not None


def misplaced_uri(command: argparse.ArgumentParser, args: argparse.Namespace, rest: Sequence[str]) -> str | None:
    """The complaint about a URI among the arguments of ``command``, or among what it did not understand (``rest``);
    ``None`` if there is no such URI."""
    where = _where(command)
    for word in rest:
        if word.partition("=")[0] == _FLAG:
            return where
        if is_uri(word) and not _takes_first(command):
            return where
    return where if any(map(is_uri, _others(command, args))) else None


def _where(command: argparse.ArgumentParser) -> str:
    """Where the URI of a command belongs."""
    name = command.prog
    option = next(
        (one.option_strings[0] for one in command._actions if one.option_strings and one.metavar == "URI"), None
    )
    if _takes_first(command):
        words = " ".join(str(one.metavar or one.dest.upper()) for one in _positionals(command))
        return f"the connection URI is given without a flag, as in: {name} {words}"
    if option is not None:
        return f"the connection URI is given with {option}"
    instead = _INSTEAD.get(name.rpartition(" ")[2])
    return f"{name} takes no connection URI" + (f": {instead}" if instead else "")


def _positionals(command: argparse.ArgumentParser) -> list[argparse.Action]:
    return [one for one in command._actions if not one.option_strings]


def _takes_first(command: argparse.ArgumentParser) -> bool:
    return any(one.dest == "uri" for one in _positionals(command))


def _others(command: argparse.ArgumentParser, args: argparse.Namespace) -> Iterator[object]:
    """What stands in the places of other arguments than the URI."""
    for one in _positionals(command):
        if one.dest not in {"uri", "words"}:
            yield getattr(args, one.dest, None)
