"""A table's change feed, read by deltalake, compared with the table's versions."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Container
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from tailrace.lake.tables.names import OF_FEED, OURS
from tests.tables.equality import read

Row = tuple[tuple[str, Any], ...]


class _Versions:
    """The versions of a table, each opened once: to open one reads the log, and a comparison needs each several times.
    Not for longer than one comparison."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._opened: dict[int | None, DeltaTable] = {}

    def __getitem__(self, version: int | None) -> DeltaTable:
        """``None``: the newest one."""
        if version not in self._opened:
            self._opened[version] = DeltaTable(self._root, version=version)
        return self._opened[version]


def feed_of(root: Path, version: int) -> list[dict[str, Any]]:
    """The rows of a version's feed, with all columns."""
    return _feed_of(_Versions(root), version)


def in_version(root: Path, version: int) -> Counter[Row]:
    """The rows of a version, with the columns that are not NULL."""
    return _in_version(_Versions(root), version)


def _feed_of(opened: _Versions, version: int, names: Container[str] | None = None) -> list[dict[str, Any]]:
    delta = opened[None]
    there = [*(field.name for field in delta.schema().fields), *OF_FEED]
    wanted = [name for name in there if names is None or name in names or name in OF_FEED]
    # As an expression, a name such as 5 would be a number.
    quoted = ['"' + name.replace('"', '""') + '"' for name in wanted]
    feed = delta.load_cdf(starting_version=version, ending_version=version, columns=quoted)
    found: list[dict[str, Any]] = pa.table(feed).to_pylist()
    assert all(one["_commit_version"] == version for one in found)
    return found


def _in_version(opened: _Versions, version: int, names: Container[str] | None = None) -> Counter[Row]:
    return Counter(_row(one, names) for one in read(opened[version]).to_pylist())


def _row(found: dict[str, Any], names: Container[str] | None) -> Row:
    return tuple(
        sorted(
            (name, repr(known_values(value)))
            for name, value in found.items()
            if name not in OF_FEED and value is not None and (names is None or name in names)
        )
    )


def known_values(value: Any) -> Any:
    """A value without NULL fields of structs, since a reader may know more fields by now."""
    if isinstance(value, dict):
        return {name: known_values(one) for name, one in value.items() if one is not None}
    return [known_values(one) for one in value] if isinstance(value, list) else value


def _types(delta: DeltaTable) -> dict[str, Any]:
    fields = json.loads(delta.schema().to_json())["fields"]
    return {one["name"]: one["type"] for one in fields}


def _holds(new: Any, old: Any) -> bool:
    """Whether two types are the same, or one has further fields in its structs."""
    if isinstance(new, str) or isinstance(old, str) or new["type"] != old["type"]:
        return bool(new == old)
    if new["type"] == "array":
        return _holds(new["elementType"], old["elementType"])
    there = {one["name"]: one["type"] for one in new["fields"]}
    return all(one["name"] in there and _holds(there[one["name"]], one["type"]) for one in old["fields"])


def _fault_of(opened: _Versions, version: int) -> str | None:
    """How a version differs from the version before it with the feed applied; ``None`` if it does not. deltalake reads
    a feed with the newest types, so columns that had another type are left out, except our own."""
    newest, then = _types(opened[None]), [_types(opened[one]) for one in range(max(0, version - 1), version + 1)]
    names = {name for name, type_ in newest.items() if all(name in one and _holds(type_, one[name]) for one in then)}
    assert set(OURS) - set(OF_FEED) <= names
    changes, now = _feed_of(opened, version, names), _in_version(opened, version, names)
    before = _in_version(opened, version - 1, names) if version else Counter[Row]()
    taken, brought = (
        Counter(_row(one, names) for one in changes if one["_change_type"] in kinds) for kinds in (_TAKEN, _BROUGHT)
    )
    if taken - before:
        return f"version {version} takes rows that were not there"
    if before - taken + brought != now:
        return f"version {version} is not what its feed says"
    updates = [
        Counter(one["_key"] for one in changes if one["_change_type"] == kind) for kind in (_TAKEN[1], _BROUGHT[1])
    ]
    return None if updates[0] == updates[1] else f"version {version} has updates without one of their rows"


def check_feed(root: Path, first: int = 0) -> int:
    """Compare all versions from ``first`` on. Returns how many there were."""
    opened = _Versions(root)
    versions = range(first, opened[None].version() + 1)
    assert [fault for version in versions if (fault := _fault_of(opened, version)) is not None] == []
    return len(versions)


def feed_faults(root: Path) -> list[str]:
    """The newest versions that differ, as far as they and their feed can still be read."""
    opened = _Versions(root)
    if not opened[None].metadata().configuration.get("delta.enableChangeDataFeed"):
        return []
    found, last = [], opened[None].version()
    for version in range(max(0, last - _COMPARED), last + 1):
        with suppress(DeltaError, OSError, pa.ArrowException):
            fault = _fault_of(opened, version)
            found += [] if fault is None else [fault]
    return found


_TAKEN = ("delete", "update_preimage")
_BROUGHT = ("insert", "update_postimage")
#: How many versions are compared after each run.
_COMPARED = 8
