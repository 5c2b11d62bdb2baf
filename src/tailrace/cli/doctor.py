"""``tailrace doctor``: is this deployment fit for reading change events from its oplog?"""

from __future__ import annotations

import argparse
import json
import os
import sys
from contextlib import closing
from dataclasses import asdict
from typing import TYPE_CHECKING, Final

from tailrace.cli.output import say
from tailrace.cli.stream_arguments import add_uri_argument
from tailrace.read.source.uri import find_uri

if TYPE_CHECKING:
    from tailrace.cli.finding import Finding

_MARKS: Final = {"ok": "ok  ", "warn": "warn", "fail": "FAIL"}
_COLOURS: Final = {"ok": "32", "warn": "33", "fail": "31"}


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the main parser."""
    parser = subparsers.add_parser(
        "doctor",
        help="check a deployment: oplog, rights, version, images",
        description="Check whether change events can be read from a deployment's oplog. "
        "The exit status is 1 if a check fails.",
    )
    add_uri_argument(parser)
    parser.add_argument("--format", choices=("pretty", "json"), default="pretty", help="default: pretty")
    parser.set_defaults(run=run, positionals=("uri",))


def run(args: argparse.Namespace) -> int:
    """Run the command. Returns 1 if a check fails. Raises UsageError for a URI that cannot be used."""
    from tailrace.cli.examination import examine_deployment  # noqa: PLC0415  so that --help does not load the driver
    from tailrace.read.source.mongod import MongodSource  # noqa: PLC0415

    findings = []
    uri = find_uri(args.uri)
    with closing(MongodSource(uri, retry_seconds=10.0)) as source:
        for finding in examine_deployment(source, uri):
            findings.append(finding)
            if args.format == "pretty":
                _print(finding)
    if args.format == "json":
        say(json.dumps([asdict(finding) for finding in findings], indent=2, ensure_ascii=False), lines=True)
    return 1 if any(finding.status == "fail" for finding in findings) else 0


def _print(finding: Finding) -> None:
    mark = _MARKS[finding.status]
    if sys.stdout.isatty() and not os.environ.get("NO_COLOR"):
        mark = f"\x1b[{_COLOURS[finding.status]}m{mark}\x1b[0m"
    say(f"  {finding.check}: {finding.found}", before=mark, flush=True)
    if finding.advice:
        say(f"      {finding.advice}", flush=True)
