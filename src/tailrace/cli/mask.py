"""``tailrace mask``: what a declaration of masks says, and which values its tokens stand for."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

from bson.json_util import RELAXED_JSON_OPTIONS, dumps

from tailrace.cli.output import say


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the main parser."""
    parser = subparsers.add_parser(
        "mask",
        help="check a declaration of masks, and turn tokens back into values",
        description="Check a declaration of masks, and turn the tokens that were made with it back into values.",
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    check = actions.add_parser("check", help="check a declaration and its key, and print what identifies them")
    reveal = actions.add_parser("reveal", help="print the value of each token as Extended JSON, one per line")
    for action in (check, reveal):
        action.add_argument(
            "--masks", metavar="FILE", required=True, help="the declaration, or a pipeline file with a section masks"
        )
        action.set_defaults(run=run)
    reveal.add_argument("tokens", nargs="*", metavar="TOKEN", help="tokens (default: the lines of standard input)")


def run(args: argparse.Namespace) -> int:
    """Run the command. Returns the exit code. Raises UsageError for a wrong declaration, key or token."""
    from tailrace.read.source.mask_file import Masks  # noqa: PLC0415  so that --help does not load the engine

    masks = Masks.load(args.masks)
    if args.action == "check":
        for name, value in masks.witness.items():
            say(f"{name} {value}")
        return 0
    for token in args.tokens or _lines():
        say(dumps(masks.revealed(token), json_options=RELAXED_JSON_OPTIONS))
    return 0


def _lines() -> Iterator[str]:
    return (line.strip() for line in sys.stdin if line.strip())
