"""A change as rows for people: one for each field, with its value before and after, as text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import bson
from bson.codec_options import CodecOptions, DatetimeConversion
from bson.json_util import RELAXED_JSON_OPTIONS, dumps

#: How many rows of a change are shown, and how many characters of a value.
ROWS_MAX: Final = 120
_TEXT_MAX: Final = 400
#: A larger event is shown without its values.
_BYTES_MAX: Final = 256 << 10
_DEPTH_MAX: Final = 8
_TO_SHOW: Final[CodecOptions[dict[str, Any]]] = CodecOptions(
    tz_aware=True,
    datetime_conversion=DatetimeConversion.DATETIME_AUTO,
    unicode_decode_error_handler="backslashreplace",
)
#: The parts of an event that its rows show, or that are shown next to them.
_APART: Final = (
    "_id", "operationType", "clusterTime", "wallTime", "ns", "documentKey", "fullDocument", "fullDocumentBeforeChange",
    "updateDescription",
)  # fmt: skip


def shown_event(raw: bytes) -> dict[str, Any]:
    """A change event as JSON: its key, its token and rows of what has changed. ``rows`` are ``[how, path, before,
    after]``, where ``how`` is added, removed, changed or same; ``left_out`` further ones are not shown."""
    if len(raw) > _BYTES_MAX:
        token = bson.decode(raw, _TO_SHOW)["_id"]
        return {"token": token.get("_data"), "key": None, "rows": [], "left_out": 0, "too_large": len(raw)}
    event = bson.decode(raw, _TO_SHOW)
    rows = _rows(event)
    rows.sort(key=lambda row: row[0] == "same")  # what has changed comes first, each in the order of the document
    key = event.get("documentKey")
    return {
        "token": (event.get("_id") or {}).get("_data"),
        "key": None if key is None else _text(key.get("_id") if len(key) == 1 else key),
        "time": _time(event),
        "rows": rows[:ROWS_MAX],
        "left_out": max(0, len(rows) - ROWS_MAX),
    }


def _time(event: Mapping[str, Any]) -> dict[str, int] | None:
    found = event.get("clusterTime")
    return None if found is None else {"t": found.time, "i": found.inc}


def _rows(event: Mapping[str, Any]) -> list[list[str | None]]:
    before, after = event.get("fullDocumentBeforeChange"), event.get("fullDocument")
    operation = event.get("operationType")
    if operation == "update" and (before is None or after is None):
        return list(_described(event.get("updateDescription") or {}))
    if before is not None or after is not None:
        return list(_compared(dict(_leaves(before)), dict(_leaves(after)), knows_before=operation != "replace"))
    if operation == "delete":
        return [["removed", path, text, None] for path, text in _leaves(event.get("documentKey"))]
    rest = {name: value for name, value in event.items() if name not in _APART}
    return [["added", path, None, text] for path, text in _leaves(rest)]


def _compared(before: dict[str, str], after: dict[str, str], *, knows_before: bool) -> Iterator[list[str | None]]:
    if not before and not knows_before:
        yield from (["changed", path, None, text] for path, text in after.items())
        return
    for path in {**before, **after}:
        was, now = before.get(path), after.get(path)
        how = "added" if was is None else "removed" if now is None else "same" if was == now else "changed"
        yield [how, path, was, now]


def _described(description: Mapping[str, Any]) -> Iterator[list[str | None]]:
    """An update of which no image is known: what was set, and what was taken away."""
    for path, value in (description.get("updatedFields") or {}).items():
        yield ["changed", path, None, _text(value)]
    for path in description.get("removedFields") or ():
        yield ["removed", path, None, None]
    for cut in description.get("truncatedArrays") or ():
        yield ["changed", str(cut.get("field")), None, f"cut to {cut.get('newSize')} elements"]


def _leaves(value: Any, path: str = "", depth: int = 0) -> Iterator[tuple[str, str]]:
    """The values of a document that hold no others, by their dotted paths, as text."""
    items: Any = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    if value is None and not path:
        return
    if not items or not value or depth == _DEPTH_MAX:
        if path:
            yield path, _text(value)
        return
    for name, inner in items:
        yield from _leaves(inner, f"{path}.{name}" if path else str(name), depth + 1)


def _text(value: Any) -> str:
    try:
        text = dumps(value, json_options=RELAXED_JSON_OPTIONS, ensure_ascii=False)
    except (ValueError, TypeError, OverflowError) as error:
        text = f"({error})"
    return text if len(text) <= _TEXT_MAX else f"{text[:_TEXT_MAX]}… ({len(text):,} characters)"
