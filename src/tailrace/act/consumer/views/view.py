"""A denormalised view as it is declared, and what follows from the declaration alone.

The rule that keeps it right, whoever writes and however late: next to the fields there is a *version*, a cluster time,
and the fields are those of the source document as it was at that time or later. A writer reads the source after the
time of the change that it handles, and writes only where the version is older than that time. So a version never goes
back, and after the last change of a source every target that has that change's version, or a later one, has its last
fields.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from bson.timestamp import Timestamp

from tailrace.act.consumer.views.raw_value import RawValue, shown, value_at
from tailrace.core import raw_bson
from tailrace.errors import UsageError

#: Where targets keep the versions of their views, by the views' names.
VERSIONS_FIELD: Final = "_views"


@dataclass(frozen=True)
class View:
    """Documents of ``target`` carry ``fields`` of the document of ``source`` whose ``_id`` they name in ``on``.

    Attributes:
        target: "shop.orders", or the collection
        source: "shop.customers", or the collection
        on: the field of the target with the ``_id`` of a source document: one value, no array (``ViewKeeper`` refuses
            one at its first start); it may have dots, and may be ``_id``
        fields: the field of the target by the field of the source: ``{"customer.name": "name"}``. The view owns the
            fields of the target: nobody else writes them. If the source, or its field, is missing, they are missing too
        name: the view's name; its version is in ``_views.<name>`` of each target. By default derived from ``on``
    """

    target: Any
    source: Any
    on: str
    fields: Mapping[str, str]
    name: str = ""

    def __post_init__(self) -> None:
        for attribute in ("target", "source"):
            object.__setattr__(self, attribute, namespace_of(getattr(self, attribute), f"the {attribute} of a view"))
        if not isinstance(self.fields, Mapping) or not self.fields:
            raise UsageError("a view carries one field or more", hint='fields={"customer.name": "name"}')
        object.__setattr__(self, "fields", dict(self.fields))
        object.__setattr__(self, "name", self.name or self.on.replace(".", "_"))
        if "." in self.name or self.name.startswith("$") or "\0" in self.name:
            raise UsageError(f"{self.name!r} cannot name a view", hint="Use no dot, and no $ at the beginning")
        self._check_paths()

    def _check_paths(self) -> None:
        for path in (self.on, *self.fields, *self.fields.values()):
            parts = path.split(".") if isinstance(path, str) else [""]
            if any(not part or part.startswith("$") or "\0" in part for part in parts):
                raise UsageError(
                    f"{path!r} is not a field of a view", hint="Names joined by dots, such as customer.name"
                )
        targets = (
            ["_id", VERSIONS_FIELD, *self.fields]
            if self.on == "_id"
            else [self.on, VERSIONS_FIELD, "_id", *self.fields]
        )
        for number, path in enumerate(targets):
            for other in targets[number + 1 :]:
                if overlaps(path, other):
                    raise UsageError(f"a view cannot write {other!r}, which overlaps {path!r} in its target")
        if self.target == self.source:
            raise UsageError("the target and the source of a view have to be two different collections")

    @property
    def version_path(self) -> str:
        """Where a target carries the view's version."""
        return f"{VERSIONS_FIELD}.{self.name}"

    def update(self, source: bytes | None, version: Timestamp) -> list[dict[str, Any]]:
        """The update that gives a target the fields of ``source``, or takes them away where there is none."""
        values = {path: value_at(source, of) for path, of in self.fields.items()}
        present = {path: value.condition("$literal") for path, value in values.items() if value is not None}
        absent = [path for path, value in values.items() if value is None]
        # $set would write into each element of an array that stands in the way, and nothing into an empty one.
        ways = sorted({way for path in (self.version_path, *self.fields) for way in parents(path)}, key=len)
        update: list[dict[str, Any]] = [
            {"$set": {way: {"$cond": [{"$isArray": [f"${way}"]}, {}, f"${way}"]}}} for way in ways
        ]
        update.append({"$set": {**present, self.version_path: {"$literal": version}}})
        return [*update, {"$unset": absent}] if absent else update

    def outdated(self, key: RawValue | None, version: Timestamp, *, ahead: Timestamp | None = None) -> dict[str, Any]:
        """The filter of the targets that name the source ``key`` and have an older version, or exactly the version
        ``ahead``, which no keeper can have written. With ``None`` as the key: the targets that name no source."""
        if ahead is not None:
            return {"$and": [self._names(key), {self.version_path: {"$eq": ahead}}]}
        return {"$and": [self._names(key), self.older(version)]}

    def older(self, version: Timestamp) -> dict[str, Any]:
        """The filter of the targets that have an older version."""
        # A comparison also looks at the items of an array, but a time in an array is not a version.
        no_version = [{path: {"$type": "array"}} for path in (VERSIONS_FIELD, self.version_path)]
        return {"$or": [{self.version_path: {"$not": {"$gte": version}}}, *no_version]}

    def _names(self, key: RawValue | None) -> dict[str, Any]:
        arrays = self.with_array["$or"]
        return {"$or": [{self.on: None}, *arrays]} if key is None else {self.on: key.condition(), "$nor": arrays}

    @property
    def with_array(self) -> dict[str, Any]:
        """The filter of the targets with an array in ``on``, or on the path to it: they name no source."""
        return {"$or": [{path: {"$type": "array"}} for path in (*parents(self.on), self.on)]}

    def has_array(self, target: bytes) -> bool:
        """Whether a target is one of those."""
        found = (value_at(target, path) for path in (*parents(self.on), self.on))
        return any(value is not None and value.type == raw_bson.ARRAY for value in found)

    def version_of(self, target: bytes) -> Timestamp | None:
        """The version of a target; ``None`` if it has none, or a value that is not a version."""
        value = value_at(target, self.version_path)
        return value.shown if value is not None and value.type == raw_bson.TIMESTAMP else None

    def key_of(self, target: bytes) -> RawValue | None:
        """The ``_id`` that a target names; ``None`` where it names none: an array is no ``_id``."""
        value = value_at(target, self.on)
        return None if value is None or value.is_null or value.type == raw_bson.ARRAY else value

    def differences(self, target: bytes, source: bytes | None) -> Iterator[tuple[str, Any, Any]]:
        """The fields of a target that are not those of its source, byte for byte: path, what is there, what ought to
        be. A value that is missing is ``MISSING``."""
        for path, of in self.fields.items():
            found, wanted = value_at(target, path), value_at(source, of)
            if found != wanted:
                yield path, shown(found), shown(wanted)

    def concerns_source(self, event: Mapping[str, Any]) -> bool:
        """Whether a change of the source can change a target."""
        kind = event["operationType"]
        if kind == "update":
            return any(overlaps(path, field) for path in changed_paths(event) for field in self.fields.values())
        return kind in ("insert", "replace", "delete")

    def concerns_target(self, event: Mapping[str, Any]) -> bool:
        """Whether a change of the target requires its fields to be written again. The view's own writes do not: they
        touch its fields and the version, and nothing else."""
        kind = event["operationType"]
        if kind != "update":
            return kind in ("insert", "replace", "snapshot")
        paths = changed_paths(event)
        if any(overlaps(path, self.on) for path in paths):
            return True
        stamped = any(overlaps(path, self.version_path) for path in paths)
        ours = [path for path in paths if any(overlaps(path, field) for field in self.fields)]
        others = [path for path in paths if path not in ours and not overlaps(path, VERSIONS_FIELD)]
        return bool(ours) and not (stamped and not others)


def namespace_of(chosen: Any, what: str) -> str:
    """The name of a collection that is given by its name or itself."""
    namespace = chosen if isinstance(chosen, str) else str(getattr(chosen, "full_name", ""))
    database, dot, collection = namespace.partition(".")
    if not (database and dot and collection):
        raise UsageError(f"{what} is a collection, not {chosen!r}", hint='"shop.orders"')
    return namespace


def changed_paths(event: Mapping[str, Any]) -> list[str]:
    """The paths that an update event names."""
    description = event.get("updateDescription") or {}
    truncated = [array["field"] for array in description.get("truncatedArrays") or ()]
    return [*(description.get("updatedFields") or {}), *(description.get("removedFields") or ()), *truncated]


def overlaps(one: str, other: str) -> bool:
    """Whether one path is the other, or leads into it."""
    return one == other or one.startswith(f"{other}.") or other.startswith(f"{one}.")


def parents(path: str) -> list[str]:
    """The paths that lead to a path: ``a`` and ``a.b`` for ``a.b.c``."""
    names = path.split(".")
    return [".".join(names[:count]) for count in range(1, len(names))]
