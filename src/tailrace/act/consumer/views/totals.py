"""Counts and sums as they are declared: what documents carry about all the documents that name them.

The rule is that of a view (``views.view``), with an aggregation in place of one source document: a writer computes the
totals after the time of the change in its hands, and writes them only over an older version. Nothing is added up from
change to change, so a change that is handled twice, late or with others does no harm, and the values are the server's
own. Which totals a deletion or a move reduces is remembered in a ledger (``views.ledger``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from tailrace.act.consumer.views.raw_value import RawValue, value_at
from tailrace.act.consumer.views.view import View, changed_paths, namespace_of, overlaps
from tailrace.core import raw_bson
from tailrace.errors import UsageError

_COUNT: Final = "count"


@dataclass(frozen=True)
class Totals:
    """Documents of ``target`` carry the number of documents of ``source`` that name them in ``on``, and sums over
    these.

    Attributes:
        target: "shop.customers", or the collection
        source: "shop.orders", or the collection
        on: the field of a source document with the ``_id`` of a target: at the top of the document, one value, no array
        count: the field of the target for the number of documents: ``"orders.count"``
        sums: the field of the target by the field of the source: ``{"orders.total": "amount"}``. Each is what ``$sum``
            gives in a ``$group``: 0 if there is nothing, and values that are not numbers are left out
        name: the view's name; its version is in ``_views.<name>`` of each target. By default the name of the source
        ledger: the collection that keeps what each source document names: the view's own, in the same deployment. By
            default ``<target>.<name>.ledger``
    """

    target: Any
    source: Any
    on: str
    count: str | None = None
    sums: Mapping[str, str] = field(default_factory=dict)
    name: str = ""
    ledger: Any = ""

    def __post_init__(self) -> None:
        for attribute in ("target", "source"):
            object.__setattr__(self, attribute, namespace_of(getattr(self, attribute), f"the {attribute} of a view"))
        if not isinstance(self.on, str) or not self.on or self.on[0] == "$" or {".", "\0"} & set(self.on):
            raise UsageError(
                f"{self.on!r} cannot name the target of a source document",
                hint="Totals need a field at the top of the document, without a dot",
            )
        if self.on == "_id":
            raise UsageError(
                "totals on _id would count one document at most", hint="To carry fields of that document, use a View"
            )
        if not isinstance(self.sums, Mapping) or (self.count is None and not self.sums):
            raise UsageError("totals need a count or at least one sum", hint='count="orders.count"')
        object.__setattr__(self, "sums", dict(self.sums))
        object.__setattr__(self, "name", self.name or self.source.partition(".")[2].replace(".", "_"))
        ledger = namespace_of(self.ledger or f"{self.target}.{self.name}.ledger", "a ledger")
        if ledger in (self.target, self.source):
            raise UsageError(f"the ledger of a view has to be a collection of its own, not {ledger}")
        object.__setattr__(self, "ledger", ledger)
        self.view  # noqa: B018  refuses fields that cannot be

    @property
    def view(self) -> View:
        """The view of the same targets, whose source documents are what ``computed`` gives."""
        fields = {} if self.count is None else {self.count: _COUNT}
        if self.count in self.sums:
            raise UsageError(f"{self.count!r} cannot hold a count and a sum")
        for number, path in enumerate(self.sums):
            fields[path] = f"s{number}"
        for path in self.sums.values():  # the view looks at the paths of targets alone
            View(self.target, self.source, "_id", {"x": path})
        return View(self.target, self.source, "_id", fields, self.name)

    def accumulators(self) -> dict[str, Any]:
        """The fields of a ``$group`` stage that computes the totals."""
        sums = {f"s{number}": {"$sum": f"${path}"} for number, path in enumerate(self.sums.values())}
        return {_COUNT: {"$sum": 1}, **sums}

    def computed(self, key: RawValue, group: bytes | None) -> bytes:
        """The totals of one target, from the output of the stage; ``None``: no document names it."""
        zero = RawValue(raw_bson.INT32, raw_bson.encode_int32(0))
        parts = [raw_bson.encode_element(key.type, b"_id", key.data)]
        for name in self.accumulators():
            value = value_at(group, name) or zero
            parts.append(raw_bson.encode_element(value.type, name.encode(), value.data))
        return raw_bson.encode_document(*parts)

    @property
    def with_array(self) -> dict[str, Any]:
        """The filter of the source documents with an array in ``on``: they name no target."""
        return {self.on: {"$type": "array"}}

    def key_of(self, source: bytes) -> RawValue | None:
        """The ``_id`` of the target that a source document names; ``None`` where it names none."""
        return _key(value_at(source, self.on))

    def concerns(self, event: Mapping[str, Any]) -> bool:
        """Whether a change of the source can change a total."""
        if event["operationType"] != "update":
            return event["operationType"] in ("insert", "replace", "delete")
        read = (self.on, *self.sums.values())
        return any(overlaps(path, one) for path in changed_paths(event) for one in read)

    def changes_a_part(self, event: Mapping[str, Any]) -> bool:
        """Whether an update changes ``on`` in a way that does not show what it is afterwards."""
        paths = changed_paths(event) if event["operationType"] == "update" else []
        truncated = {array["field"] for array in (event.get("updateDescription") or {}).get("truncatedArrays") or ()}
        return any(path.startswith(f"{self.on}.") or (path == self.on and path in truncated) for path in paths)

    def named(self, event: Mapping[str, Any], raw: bytes) -> Sequence[RawValue] | None:
        """What the document names after a change of it: nothing, or one. ``None`` if the change does not show it: then
        it is what it was before."""
        kind = event["operationType"]
        if kind == "delete":
            return []
        if kind in ("insert", "replace"):
            value = value_at(raw, "fullDocument")
            key = None if value is None else self.key_of(value.data)
        elif self.on in changed_paths(event):
            key = _key(value_at(raw, f"updateDescription.updatedFields.{self.on}"))
        else:
            return None
        return [] if key is None else [key]


def _key(value: RawValue | None) -> RawValue | None:
    return None if value is None or value.is_null or value.type == raw_bson.ARRAY else value
