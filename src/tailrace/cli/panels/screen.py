"""The panels as lines of text, for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

Shown = Mapping[str, Mapping[str, Any]]

_NAMESPACES_MAX: Final = 10
_LEASES_MAX: Final = 20
_STREAMS_MAX: Final = 10
_KINDS: Final = ("insert", "update", "replace", "delete")


def screen(panels: Shown, per_second: float) -> Iterator[str]:
    """The lines; a heading begins with a word in capitals. ``per_second``: the events of the last look."""
    shards, activity = _data(panels, "shards"), _data(panels, "activity") or {}
    kind = "" if shards is None else f" · {shards['kind']} · MongoDB {shards['version']}"
    yield f"tailrace top{kind}"
    lag = "" if activity.get("lag") is None else f" · read {activity['lag']:.1f} s after they were made"
    yield f"{per_second:,.1f} events a second · {activity.get('total', 0):,} since the start{lag}"
    if activity.get("skipped"):
        yield f"gaps in what is counted: {activity['skipped']:,}; after each it went on at the present"
    if activity.get("trouble"):
        yield f"the deployment cannot be followed: {activity['trouble']}"
    for part in (_shards, _namespaces, _leases, _streams, _kept, _notes):
        lines = list(part(panels))
        if lines:
            yield ""
            yield from lines


def _data(panels: Shown, name: str) -> Any:
    return panels.get(name, {}).get("data")


def _table(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> Iterator[str]:
    """The first column to the left, the others to the right."""
    cells = [list(heads), *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(heads))]
    for row in cells:
        first, *rest = (
            cell.ljust(width) if not number else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        yield "  ".join([first, *rest]).rstrip()


def span(seconds: float | None) -> str:
    """A duration for people."""
    if seconds is None:
        return "-"
    for limit, divisor, unit in ((120, 1, "s"), (7_200, 60, "min"), (172_800, 3_600, "h")):
        if seconds < limit:
            return f"{seconds / divisor:.0f} {unit}"
    return f"{seconds / 86_400:.0f} days"


def _shards(panels: Shown) -> Iterator[str]:
    found = _data(panels, "shards")
    if found is None:
        yield from _failure(panels, "shards", "OPLOG")
        return
    rows = [
        (
            one["name"],
            span(one["lag"]),
            span(one["quiet"]),
            span(one["reach"]) + (" (complete)" if one["complete"] else ""),
        )
        for one in found["shards"]
        if "error" not in one
    ]
    yield from _table(("OPLOG", "MAJORITY LAGS", "LAST ENTRY AGO", "REACHES BACK"), rows)
    yield from (f"{one['name']}: {one['error']}" for one in found["shards"] if "error" in one)


def _namespaces(panels: Shown) -> Iterator[str]:
    found = (_data(panels, "activity") or {}).get("namespaces")
    if not found:
        return
    rows = []
    for name, counts in found[:_NAMESPACES_MAX]:
        known = [counts.get(kind, 0) for kind in _KINDS]
        total = sum(counts.values())
        rows.append((name or "(whole deployment)", *(f"{number:,}" for number in (total, *known, total - sum(known)))))
    yield from _table(("NAMESPACE, 15 MIN", "EVENTS", *(kind.upper() for kind in _KINDS), "OTHER"), rows)


def _leases(panels: Shown) -> Iterator[str]:
    found = _data(panels, "leases")
    if found is None:
        yield from _failure(panels, "leases", "LEASE")
        return
    leases = found["leases"]
    rows = []
    for one in leases[:_LEASES_MAX]:
        left = "all of it" if one["complete"] else span(one["left"])
        rows.append((one["resource"], one["state"], one["version"] or "-", span(one["lag"]), left, one["owner"] or "-"))
    if rows:
        yield from _table(("LEASE", "STATE", "TOKEN", "LAG", "OPLOG LEFT", "OWNER"), rows)
    if len(leases) > _LEASES_MAX:
        yield f"and {len(leases) - _LEASES_MAX} more"


def _streams(panels: Shown) -> Iterator[str]:
    found = _data(panels, "streams")
    if found is None:
        return
    busiest = sorted(found["streams"], key=lambda one: -one["events"])[:_STREAMS_MAX]
    rows = [(one["ns"], f"{one['events']:,}", span(one["seconds"]), one["state"]) for one in busiest]
    yield from _table((f"STREAM, {found['count']:,} IN ALL", "EVENTS", "OPEN FOR", "STATE"), rows)


def _kept(panels: Shown) -> Iterator[str]:
    for one in _data(panels, "lakes") or ():
        yield f"LAKE {one['place']}: " + (one.get("error") or f"{one['data']['rows']:,} events")
    for one in _data(panels, "tables") or ():
        yield f"TABLES {one['place']}: " + (
            one.get("error") or f"{len(one['data']['tables'])} tables, {span(one['data']['lag'])} after them"
        )
    for one in _data(panels, "archives") or ():
        entries = sum(oplog["entries"] for oplog in one.get("data", ()))
        yield f"ARCHIVE {one['place']}: " + (one.get("error") or f"{entries:,} entries")
    for target in _data(panels, "syncs") or ():
        for one in target.get("data", ()):
            yield f"SYNC {one['name']} to {target['place']}: {one['phase']}, lag {span(one['lagSeconds'])}"
        if "error" in target:
            yield f"SYNC {target['place']}: {target['error']}"


def _notes(panels: Shown) -> Iterator[str]:
    letters = _data(panels, "letters")
    if letters is not None and letters["count"]:
        yield f"DEAD LETTERS {letters['count']:,} in {letters['collection']}: tailrace dead-letters shows them"
    for finding in _data(panels, "doctor") or ():
        if finding["status"] != "ok":
            yield f"DOCTOR {finding['status']}: {finding['check']}: {finding['found']}"


def _failure(panels: Shown, name: str, heading: str) -> Iterator[str]:
    if "error" in panels.get(name, {}):
        yield f"{heading}: {panels[name]['error']}"
