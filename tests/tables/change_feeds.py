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


def feed_of(root: Path, version: int, names: Container[str] | None = None) -> list[dict[str, Any]]:
    """The rows of a version's feed, with all columns or those in ``names``."""
    delta = DeltaTable(root)
    there = [*(field.name for field in delta.schema().fields), *OF_FEED]
    wanted = [name for name in there if names is None or name in names or name in OF_FEED]
    # As an expression, a name such as 5 would be a number.
    quoted = ['"' + name.replace('"', '""') + '"' for name in wanted]
    feed = delta.load_cdf(starting_version=version, ending_version=version, columns=quoted)
    found: list[dict[str, Any]] = pa.table(feed).to_pylist()
    assert all(one["_commit_version"] == version for one in found)
    return found


def in_version(root: Path, version: int, names: Container[str] | None = None) -> Counter[Row]:
    """The rows of a version, with the columns that are not NULL."""
    return Counter(_row(one, names) for one in read(DeltaTable(root, version=version)).to_pylist())


def _row(found: dict[str, Any], names: Container[str] | None) -> Row:
    return tuple(
        sorted(
            (name, repr(_known(value)))
            for name, value in found.items()
            if name not in OF_FEED and value is not None and (names is None or name in names)
        )
    )


def _known(value: Any) -> Any:
    """A value without NULL fields of structs, since a reader may know more fields by now."""
    if isinstance(value, dict):
        return {name: _known(one) for name, one in value.items() if one is not None}
    return [_known(one) for one in value] if isinstance(value, list) else value


def _types(root: Path, version: int | None) -> dict[str, Any]:
    fields = json.loads(DeltaTable(root, version=version).schema().to_json())["fields"]
    return {one["name"]: one["type"] for one in fields}


def _holds(new: Any, old: Any) -> bool:
    """Whether two types are the same, or one has further fields in its structs."""
    if isinstance(new, str) or isinstance(old, str) or new["type"] != old["type"]:
        return bool(new == old)
    if new["type"] == "array":
        return _holds(new["elementType"], old["elementType"])
    there = {one["name"]: one["type"] for one in new["fields"]}
    return all(one["name"] in there and _holds(there[one["name"]], one["type"]) for one in old["fields"])


def fault_of(root: Path, version: int) -> str | None:
    """How a version differs from the version before it with the feed applied; ``None`` if it does not. deltalake reads
    a feed with the newest types, so columns that had another type are left out, except our own."""
    newest, then = _types(root, None), [_types(root, one) for one in range(max(0, version - 1), version + 1)]
    names = {name for name, type_ in newest.items() if all(name in one and _holds(type_, one[name]) for one in then)}
    assert set(OURS) - set(OF_FEED) <= names
    changes, now = feed_of(root, version, names), in_version(root, version, names)
    before = in_version(root, version - 1, names) if version else Counter[Row]()
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
    versions = range(first, DeltaTable(root).version() + 1)
    assert [fault for version in versions if (fault := fault_of(root, version)) is not None] == []
    return len(versions)


def feed_faults(root: Path) -> list[str]:
    """The newest versions that differ, as far as they and their feed can still be read."""
    if not DeltaTable(root).metadata().configuration.get("delta.enableChangeDataFeed"):
        return []
    found, last = [], DeltaTable(root).version()
    for version in range(max(0, last - _COMPARED), last + 1):
        with suppress(DeltaError, OSError, pa.ArrowException):
            fault = fault_of(root, version)
            found += [] if fault is None else [fault]
    return found


_TAKEN = ("delete", "update_preimage")
_BROUGHT = ("insert", "update_postimage")
#: How many versions are compared after each run.
_COMPARED = 8
