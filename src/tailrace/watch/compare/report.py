"""The report of a comparison: one document, to be attached to a bug report and replayed as a test.

    {tool, format, tailrace, server, deployment, names: "masked" | "shown", scope: {database, collection}, stage,
     stages: [name of each stage of the user's],
     compared: {events, again, resumes, seconds, lookedUpApart, left, behindSeconds, gaps, unknownOperations}, seen,
     differences: [{kind, says, operation, place, path, count, text, clusterTime, replayable, leftOut,
                    server: event or null, ours: event or null, entries: [{shard, entry}], preImages: [document]}]}

``replayable``: from the entries and images a stream makes the event. ``leftOut``: there was no room for the events and
entries of this kind. An event or entry is ``{bson: <its bytes>, shown: <the same as a document>}``: extended JSON alone
would fold a NaN's payload or two fields of one name. Values of users are masked; their names too, unless they are to be
shown.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import bson
from bson.binary import Binary
from bson.codec_options import CodecOptions, DatetimeConversion
from bson.json_util import CANONICAL_JSON_OPTIONS, JSONOptions, dumps, loads

from tailrace.core import raw_bson
from tailrace.core.oplog.namespace import Scope
from tailrace.errors import UsageError
from tailrace.version import version
from tailrace.watch.compare.comparison import Compared, FoundDifference
from tailrace.watch.compare.mask import Mask, is_event_field
from tailrace.watch.compare.mask_words import KEPT_TEXTS
from tailrace.watch.compare.pairing import KINDS

FORMAT: Final = 1
_TOOL: Final = "tailrace compare"
_ANY_VALUE: Final[CodecOptions[dict[str, Any]]] = CodecOptions(
    datetime_conversion=DatetimeConversion.DATETIME_AUTO, unicode_decode_error_handler="replace"
)
_JSON: Final = JSONOptions(
    json_mode=CANONICAL_JSON_OPTIONS.json_mode, datetime_conversion=DatetimeConversion.DATETIME_AUTO
)


def report_of(
    compared: Compared,
    *,
    server: str,
    is_cluster: bool,
    scope: Scope,
    stage: Mapping[str, Any],
    stages: list[str],
    mask: Mask,
) -> dict[str, Any]:
    """The report. ``stage`` holds the options of the change stream, ``stages`` the names of the user's stages."""
    looks_up = stage.get("fullDocument") == "updateLookup"
    differences = [
        _difference(found, mask, has_stages=bool(stages), looks_up=looks_up) for found in compared.differences
    ]
    return {
        "tool": _TOOL,
        "format": FORMAT,
        "tailrace": version(),
        "server": server,
        "deployment": "sharded cluster" if is_cluster else "replica set",
        "names": "shown" if mask.shows_names else "masked",
        "scope": _masked_scope(scope, mask),
        "stage": dict(stage),
        "stages": stages,
        "compared": {
            "events": compared.events,
            "again": compared.again,
            "resumes": compared.resumes,
            "seconds": round(compared.seconds, 1),
            "lookedUpApart": compared.looked_up_apart,
            "left": compared.left,
            "behindSeconds": compared.behind_s,
            "gaps": dict(compared.gaps),
            "unknownOperations": dict(compared.unknown_operations),
            "differences": compared.total,
        },
        "seen": compared.seen.document(),
        "differences": differences,
    }


def _masked_scope(scope: Scope, mask: Mask) -> dict[str, str | None]:
    return {
        "database": None if scope.database is None else _text(mask.database(scope.database.encode())),
        "collection": None if scope.collection is None else _text(mask.collection(scope.collection.encode())),
    }


def _difference(found: FoundDifference, mask: Mask, *, has_stages: bool, looks_up: bool) -> dict[str, Any]:
    difference = found.difference
    server, ours = (
        None if raw is None else mask.event(raw, has_stages=has_stages) for raw in (difference.server, difference.ours)
    )
    place, operation = difference.place.encode(), difference.operation.encode()
    if has_stages and not is_event_field(place.partition(b".")[0]):
        place = mask.name(place)
    if has_stages and operation not in KEPT_TEXTS:
        operation = b""
    return {
        "kind": difference.kind,
        "says": KINDS[difference.kind],
        "operation": _text(operation),
        "place": _text(place),
        "path": "" if server is None or ours is None else differing_path(server, ours),
        "count": found.count,
        "text": difference.text,
        "clusterTime": None if difference.time is None else difference.time.to_timestamp(),
        # What was looked up is in no oplog.
        "replayable": server is not None
        and found.is_whole
        and not has_stages
        and not (looks_up and difference.operation == "update"),
        "leftOut": found.left_out,
        "server": None if server is None else _shown(server),
        "ours": None if ours is None else _shown(ours),
        "entries": [{"shard": shard, "entry": _shown(mask.entry(entry))} for shard, entry in found.entries],
        "preImages": [_shown(mask.pre_image(one)) for one in found.pre_images],
    }


def differing_path(server: bytes, ours: bytes) -> str:
    """The path of the first element in which two documents differ."""
    left, right = list(raw_bson.elements(server)), list(raw_bson.elements(ours))
    for one, other in zip(left, right, strict=False):
        if server[one.start : one.end] == ours[other.start : other.end]:
            continue
        name = _text(one.name)
        if one.name == other.name and one.type == other.type and one.type in (raw_bson.OBJECT, raw_bson.ARRAY):
            inner = differing_path(raw_bson.value(server, one), raw_bson.value(ours, other))
            return f"{name}.{inner}" if inner else name
        return name
    longer = left if len(left) > len(right) else right
    return _text(longer[min(len(left), len(right))].name) if len(left) != len(right) else ""


def _shown(raw: bytes) -> dict[str, Any]:
    return {"bson": Binary(raw), "shown": bson.decode(raw, _ANY_VALUE)}


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "replace")


def write_report(report: Mapping[str, Any], path: Path) -> None:
    """Write it whole or not at all: as BSON where the name ends in ``.bson``, else as canonical extended JSON. Raises
    OSError."""
    if path.suffix == ".bson":
        data = bson.encode(report)
    else:
        data = (dumps(report, json_options=CANONICAL_JSON_OPTIONS, indent=1) + "\n").encode()
    beside = path.with_name(f"{path.name}.part")
    try:
        beside.unlink(missing_ok=True)
        with open(beside, "xb", opener=_private) as file:
            file.write(data)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def _private(name: str, flags: int) -> int:
    """The shapes of the users' data are nobody else's matter either."""
    return os.open(name, flags, 0o600)


def read_report(path: Path) -> dict[str, Any]:
    """The report in a file. Raises UsageError if the file holds none, and OSError."""
    data = path.read_bytes()
    try:
        found = bson.decode(data, _ANY_VALUE) if path.suffix == ".bson" else loads(data, json_options=_JSON)
    except (ValueError, bson.errors.BSONError) as error:
        raise UsageError(f"{path} holds no report: {error}") from None
    if not isinstance(found, dict) or found.get("tool") != _TOOL:
        raise UsageError(f"{path} holds no report of {_TOOL}")
    if found.get("format") != FORMAT:
        raise UsageError(f"{path} is a report of format {found.get('format')}, and this version reads {FORMAT}")
    return found
