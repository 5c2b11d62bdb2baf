"""The places of fields that a change event could have had.

The server makes an event with a place for every field of its kind, also for those without a value: an update that was
not looked up has a place for ``fullDocument`` before ``ns``. A stage that sets such a field finds it there; so before a
pipeline that may do so, the places are put back (measured on mongod 6.0.27 for every event type).
"""

from __future__ import annotations

from typing import Final

from tailrace.expression import value as v
from tailrace.expression.value import Maybe

#: What stands after ``ns``; the second only where ``showExpandedEvents`` is on.
_AFTER: Final = (b"documentKey", b"operationDescription", b"updateDescription", b"stateBeforeChange")
NAMES: Final = (b"fullDocument", b"collectionUUID", *_AFTER)
#: Events of views come another way, and have no places: they lack the collection's UUID.
_OF_VIEWS: Final = frozenset({b"create", b"modify", b"drop"})


def may_be_set(stage: bytes) -> bool:
    """Whether a stage that sets fields names one of those that have places."""
    return any(name in stage for name in NAMES)


def with_places(event: bytes, *, expanded: bool) -> bytes:
    """The event with the places of its absent fields; what is no such event comes back as it is."""
    fields = v.places_of(event)
    present = dict(reversed(fields))
    operation = present.get(b"operationType")
    if b"ns" not in present or operation is None or operation[0] != v.STRING:
        return event
    if expanded and v.bytes_of(operation) in _OF_VIEWS and b"collectionUUID" not in present:
        return event
    result: list[tuple[bytes, Maybe]] = []
    for name, value in fields:
        if name == b"wallTime" and expanded and b"collectionUUID" not in present:
            result.append((b"collectionUUID", None))
        if name == b"ns" and b"fullDocument" not in present:
            result.append((b"fullDocument", None))
        if name not in _AFTER:
            result.append((name, value))
        if name == b"ns":
            result += [(later, present.get(later)) for later in _AFTER if expanded or later != b"operationDescription"]
    return v.object_with_places(result)[1]
