"""``tailrace token``: print what a resume token holds, or make a token for a point in time."""

from __future__ import annotations

import argparse
import json
import uuid
from datetime import UTC, datetime
from typing import Any

import bson
from bson.codec_options import CodecOptions, DatetimeConversion
from bson.errors import BSONError
from bson.json_util import CANONICAL_JSON_OPTIONS, dumps, loads

from tailrace.cli.output import say
from tailrace.core.event.resume_token import EVENT, ResumeToken
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.printable import in_a_line
from tailrace.errors import InvalidResumeToken, OplogFormatError, UsageError

_ANY_DATE: CodecOptions[dict[str, Any]] = CodecOptions(datetime_conversion=DatetimeConversion.DATETIME_AUTO)
_LARGEST_HALF = 0xFFFFFFFF


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the main parser."""
    parser = subparsers.add_parser(
        "token",
        help="decode and encode resume tokens",
        description="Print what a resume token says, or make a token for a point in time.",
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    decode = actions.add_parser("decode", help="print the parts of a token")
    decode.add_argument("token", metavar="HEX|JSON", help="the _data string, or the whole token document as JSON")
    decode.add_argument("--format", choices=("pretty", "json"), default="pretty", help="default: pretty")
    decode.set_defaults(run=run)
    encode = actions.add_parser("encode", help="make a high-water mark: a token that starts a stream at a time")
    when = encode.add_mutually_exclusive_group(required=True)
    when.add_argument("--time", metavar="ISO", help='a date and time, "2026-11-21T10:00:00Z"; without offset: UTC')
    when.add_argument("--timestamp", metavar="T,I", help="a BSON timestamp: seconds since 1970 and increment")
    encode.add_argument("--version", type=int, choices=(1, 2), default=1, help="token version (default: 1)")
    encode.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command. Returns the exit code. Raises ``UsageError`` for what is not a token or not a time."""
    if args.action == "encode":
        cluster_time = parse_time(args.time) if args.time is not None else parse_timestamp(args.timestamp)
        token = ResumeToken.high_water_mark(cluster_time, args.version)
        say(json.dumps({"_data": token.data}))
        return 0
    parts = describe(read_token(args.token))
    say(json.dumps(parts, indent=2, ensure_ascii=False) if args.format == "json" else _words(parts), lines=True)
    return 0


def read_token(text: str) -> ResumeToken:
    """The token of a hex string or of a token document in extended JSON."""
    text = text.strip()
    if not text.startswith("{"):
        try:
            return ResumeToken.from_hex(text.strip("\"'"))
        except InvalidResumeToken as error:
            error.hint = error.hint or "Copy the whole _data: a part of a token is not enough"
            raise
    try:
        document = loads(text)
        return ResumeToken.parse(bson.encode(document))
    except OplogFormatError as error:
        raise UsageError(f"the token document cannot be read: {error.message}") from None
    except (ValueError, TypeError, ArithmeticError, BSONError, RecursionError) as error:
        raise UsageError(
            f"the token document is not valid JSON: {error}",
            hint='Write it as {"_data": "...", "_typeBits": {"$binary": {"base64": "...", "subType": "00"}}}',
        ) from None


def parse_time(text: str) -> ClusterTime:
    """The cluster time at which an ISO 8601 second begins."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise UsageError(f"{text!r} is not a date and time such as 2026-11-21T10:00:00Z") from None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    seconds = int(moment.timestamp() // 1)
    if not 0 <= seconds <= _LARGEST_HALF:
        raise UsageError(f"{text} lies outside the years that a timestamp can hold, 1970 to 2106")
    return ClusterTime.of(seconds, 0)


def parse_timestamp(text: str) -> ClusterTime:
    """The cluster time written as ``seconds,increment``."""
    seconds, _, increment = text.partition(",")
    try:
        halves = int(seconds), int(increment or "0")
    except ValueError:
        raise UsageError(f"{text!r} is not a timestamp such as 1795255200,1") from None
    if not all(0 <= half <= _LARGEST_HALF for half in halves):
        raise UsageError(f"{text} is not a timestamp: both numbers lie between 0 and {_LARGEST_HALF}")
    return ClusterTime.of(*halves)


def describe(token: ResumeToken) -> dict[str, Any]:
    """A token's parts as JSON values; absent parts are ``None``."""
    time = token.cluster_time
    collection = token.uuid
    return {
        "clusterTime": {"t": time.seconds, "i": time.increment},
        "date": datetime.fromtimestamp(time.seconds, UTC).isoformat().replace("+00:00", "Z"),
        "version": token.version,
        "tokenType": "event" if token.token_type == EVENT else "high-water mark",
        "txnOpIndex": token.txn_op_index,
        "fromInvalidate": token.from_invalidate,
        "uuid": None if collection is None else str(uuid.UUID(bytes=collection)),
        "eventIdentifier": _identifier(token.event_identifier),
        "fragmentNum": token.fragment_num,
    }


def _identifier(document: bytes | None) -> Any:
    if document is None:
        return None
    try:
        decoded = bson.decode(document, codec_options=_ANY_DATE)
    except BSONError as error:  # a key can hold text that is not UTF-8
        raise UsageError(f"the token's event identifier cannot be shown: {error}") from None
    return json.loads(dumps(decoded, json_options=CANONICAL_JSON_OPTIONS))


def _words(parts: dict[str, Any]) -> str:
    time = parts["clusterTime"]
    lines = {
        "cluster time": f"Timestamp({time['t']}, {time['i']})",
        "date": parts["date"],
        "version": parts["version"],
        "type": parts["tokenType"],
        "operation in its transaction": parts["txnOpIndex"],
        "from an invalidate": "yes" if parts["fromInvalidate"] else "no",
        "collection UUID": parts["uuid"] or "none",
        "event identifier": "none",
        "fragment": "none" if parts["fragmentNum"] is None else parts["fragmentNum"],
    }
    if parts["eventIdentifier"] is not None:
        lines["event identifier"] = json.dumps(parts["eventIdentifier"], ensure_ascii=False)
    width = max(map(len, lines)) + 2
    return "\n".join(f"{name + ':':<{width}}{in_a_line(value)}" for name, value in lines.items())
