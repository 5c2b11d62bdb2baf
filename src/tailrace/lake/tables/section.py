"""The section ``tables`` of a pipeline file: checked settings from the parsed YAML."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from tailrace.base.object_place import URIS, check_tried, is_object_uri, object_place
from tailrace.core.user_text import seconds
from tailrace.errors import UsageError
from tailrace.lake.iceberg.settings import IcebergSettings
from tailrace.lake.store.local_path import local_path
from tailrace.lake.store.pipeline_values import size, whole_number
from tailrace.lake.store.place import TablePlace
from tailrace.lake.tables.schema import POLICIES, Policy, TableSchema
from tailrace.lake.tables.settings import TableRule, TableSettings

KEYS: Final = (
    "path",
    "state",
    "collections",
    "every",
    "onMismatch",
    "nested",
    "compactEvery",
    "targetBytes",
    "grace",
    "retention",
    "versions",
    "changeFeed",
    "iceberg",
    "mergeOnRead",
)
_RULE_KEYS: Final = ("columns", "nested", "onMismatch", "partitionBy", "zOrder")


def settings_of(given: Mapping[str, Any], base: Path) -> TableSettings:
    """The settings; paths are relative to ``base``. Raises UsageError with the name of the key."""
    if "path" not in given:
        raise UsageError("tables.path is missing: the directory that the tables are kept in")
    if not isinstance(given["path"], str) or not given["path"]:
        raise UsageError(f"tables.path must be a path, not {given['path']!r}", hint="Write it as path: ./tables")
    default = TableSettings(Path(), ())
    policy = _policy(given.get("onMismatch"), "tables.onMismatch")
    found = TableSettings(
        root=_root(given, base),
        rules=_rules(given.get("collections"), policy, nested=_truth(given, "tables.nested")),
        every_s=_seconds(given["every"], "tables.every") if "every" in given else default.every_s,
        compact_every=whole_number(given.get("compactEvery", default.compact_every), "tables.compactEvery"),
        target_bytes=size(given.get("targetBytes", default.target_bytes), "tables.targetBytes"),
        grace_h=_hours(given, "grace", default.grace_h),
        retention_h=_hours(given, "retention", default.retention_h),
        feed_h=_hours(given, "changeFeed", default.feed_h),
        versions=whole_number(given.get("versions", default.versions), "tables.versions"),
        iceberg=IcebergSettings.of(given["iceberg"], "tables.iceberg") if "iceberg" in given else None,
        merge_on_read=_truth(given, "tables.mergeOnRead"),
    )
    found.check()
    return found


def _root(given: Mapping[str, Any], base: Path) -> TablePlace:
    """Where the tables are; in an object store their state is elsewhere."""
    check_tried(given["path"])
    is_object = is_object_uri(given["path"])
    if is_object != ("state" in given):
        raise UsageError(
            "tables.state is missing: the local folder of the state of tables in an object store"
            if is_object
            else f"tables.state belongs to tables in an object store (path: {URIS})"
        )
    if not is_object:
        return local_path(given["path"], "tables.path", base)
    if not isinstance(given["state"], str):
        raise UsageError(f"tables.state must be a path, not {given['state']!r}", hint="Write it as state: ./shop")
    return object_place(given["path"], beside=local_path(given["state"], "tables.state", base))


def _rules(given: object, policy: Policy | None, *, nested: bool) -> tuple[TableRule, ...]:
    if isinstance(given, str):
        given = [given]
    if isinstance(given, list) and all(isinstance(one, str) for one in given):
        given = dict.fromkeys(given)
    if not isinstance(given, Mapping) or not given or not all(isinstance(one, str) for one in given):
        raise UsageError(
            "tables.collections must name collections: a list such as [shop.orders, shop.c*], or a mapping"
        )
    rules = tuple(
        _rule(pattern, {} if rule is None else rule, policy, nested=nested) for pattern, rule in given.items()
    )
    TableSettings(Path(), rules).check()
    return rules


def _rule(pattern: str, given: object, policy: Policy | None, *, nested: bool) -> TableRule:
    where = f"tables.collections.{pattern}"
    if not isinstance(given, Mapping):
        raise UsageError(f"{where} must be a mapping of {', '.join(_RULE_KEYS)}")
    unknown = next((name for name in given if name not in _RULE_KEYS), None)
    if unknown is not None:
        raise UsageError(f"unknown key '{unknown}' in {where}. The known keys are {', '.join(_RULE_KEYS)}")
    own = _policy(given.get("onMismatch"), f"{where}.onMismatch") or policy
    columns = given.get("columns")
    if columns is None:
        schema = TableSchema(policy=own or "evolve", nested=_truth(given, f"{where}.nested", default=nested))
    elif "nested" in given:
        raise UsageError(
            f"{where}.nested belongs to columns that are inferred",
            hint="Declare the types: items: array<struct<sku: string, n: int>>",
        )
    elif isinstance(columns, Mapping) and all(isinstance(one, str) for one in (*columns, *columns.values())):
        schema = TableSchema.declared(columns, own or "quarantine")
    else:
        raise UsageError(f"{where}.columns must be a mapping of fields to types, such as total: decimal(18,2)")
    return TableRule(pattern, schema, _names(given, "partitionBy", where), _names(given, "zOrder", where))


def _names(given: Mapping[str, Any], key: str, where: str) -> tuple[str, ...]:
    found = given.get(key, ())
    found = (found,) if isinstance(found, str) else found
    if not all(isinstance(one, str) for one in found):
        raise UsageError(f"{where}.{key} must name columns")
    return tuple(found)


def _truth(given: Mapping[str, Any], where: str, *, default: bool = False) -> bool:
    found = given.get(where.rpartition(".")[2], default)
    if not isinstance(found, bool):
        raise UsageError(f"{where} must be true or false, not {found!r}")
    return found


def _policy(given: object, where: str) -> Policy | None:
    if given is None:
        return None
    if given not in POLICIES:
        raise UsageError(f"{where} must be one of {', '.join(POLICIES)}, not {given!r}")
    return given


def _seconds(given: object, where: str) -> float:
    duration_s = seconds(given) if isinstance(given, str) else None
    if duration_s is None:
        raise UsageError(f"{where} must be a time such as '1 second' or '7 days', not {given!r}")
    return duration_s


def _hours(given: Mapping[str, Any], key: str, default: float) -> float:
    return _seconds(given[key], f"tables.{key}") / 3600 if key in given else default
