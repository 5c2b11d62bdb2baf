"""The places of fields that a change event could have had.

The server makes an event with a place for every field of its kind, also for those without a value: an update that was
not looked up has a place for ``fullDocument`` before ``ns``. A stage that sets such a field finds it there; so before a
pipeline that may do so, the places are put back (measured on mongod 6.0.27 for every event type). Later versions keep
fewer, and from 8.3 on none: a field that is set comes last then.
"""

from __future__ import annotations

from typing import Final

from tailrace.core import raw_bson
from tailrace.core.event.change_event import KeptPlaces
from tailrace.core.expression.values import value as v
from tailrace.core.expression.values.value import Maybe
from tailrace.errors import OplogFormatError

#: What stands after ``ns``; the second only where ``showExpandedEvents`` is on.
_AFTER: Final = (b"documentKey", b"operationDescription", b"updateDescription", b"stateBeforeChange")
NAMES: Final = (b"fullDocument", b"collectionUUID", *_AFTER)
_SETTING: Final = frozenset({b"$set", b"$addFields", b"$project"})
#: In a ``$project``, a value of these types keeps or drops a field and never makes one.
_KEEPING: Final = v.NUMERIC | {v.BOOL}
#: Events of views come another way, and have no places: they lack the collection's UUID.
_OF_VIEWS: Final = frozenset({b"create", b"modify", b"drop"})


def may_be_set(stage: bytes) -> bool:
    """Whether a stage may set a field that has a place; putting the places back costs as much as a small stage."""
    if not any(name in stage for name in NAMES):
        return False
    if b"$setField\x00" in stage:
        return True
    try:
        whole = next(raw_bson.elements(stage))
        if whole.type != v.OBJECT or whole.name not in _SETTING:
            return False
        fields = raw_bson.elements(raw_bson.value(stage, whole))
        plain = _KEEPING if whole.name == b"$project" else frozenset()
        return any(field.name.partition(b".")[0] in NAMES and field.type not in plain for field in fields)
    except (OplogFormatError, StopIteration):
        return True  # not well formed: it will be refused with its place in the pipeline


def with_places(event: bytes, *, expanded: bool, places: KeptPlaces = "all") -> bytes:
    """The event with the places of its absent fields; anything else comes back as it is."""
    fields = v.places_of(event)
    present = dict(reversed(fields))
    operation = present.get(b"operationType")
    if b"ns" not in present or operation is None or operation[0] != v.STRING:
        return event
    if expanded and v.bytes_of(operation) in _OF_VIEWS and b"collectionUUID" not in present:
        return event
    has_all = places == "all"
    result: list[tuple[bytes, Maybe]] = []
    for name, value in fields:
        if name == b"wallTime" and expanded and has_all and b"collectionUUID" not in present:
            result.append((b"collectionUUID", None))
        if name == b"ns" and b"fullDocument" not in present:
            result.append((b"fullDocument", None))
        if name not in _AFTER:
            result.append((name, value))
        if name == b"ns":
            result += [
                (later, present.get(later))
                for later in _AFTER
                if (expanded or later != b"operationDescription")
                and (has_all or later in present or later == b"documentKey")
            ]
    return v.object_with_places(result)[1]
