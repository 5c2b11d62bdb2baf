"""Look-ups of a ``$match`` that begin with what is noted about an event (``event_parts``), in compiled code.

Most of what a query asks about an event is inside ``fullDocument``, ``updateDescription`` or ``documentKey``, or is
``operationType`` or ``ns``. The kernel has noted where these are, so nobody walks through the fields before them. A
field that is not noted is searched for as usual: it may still be there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from tailrace.core.kernel import event_parts as parts
from tailrace.core.kernel import scan
from tailrace.core.kernel.compiled import inner
from tailrace.core.kernel.match_path import found_lookup
from tailrace.core.kernel.memory import load64

# A noted field of a program: its look-up's offset in the working memory, the part with which the value begins and the
# one with which it ends, its type, and how many bytes of the value stand before the one part and after the other.
_FIRST: Final = 8
_LAST: Final = 16
_TYPE: Final = 24
_BEFORE: Final = 32
_BEHIND: Final = 40
_FIELD: Final = 48

#: By the event's field, those slots but the first.
NOTED_FIELDS: Final[Mapping[bytes, tuple[int, int, int, int, int]]] = {
    b"operationType": (parts.OPERATION_TYPE, parts.OPERATION_TYPE, scan.STRING, 4, 1),
    b"clusterTime": (parts.CLUSTER_TIME, parts.CLUSTER_TIME, scan.TIMESTAMP, 0, 0),
    b"wallTime": (parts.WALL_TIME, parts.WALL_TIME, scan.DATE, 0, 0),
    b"ns": (parts.DATABASE, parts.COLLECTION, scan.OBJECT, parts.DB_HEAD, 2),
    b"documentKey": (parts.DOCUMENT_KEY, parts.DOCUMENT_KEY, scan.OBJECT, 0, 0),
    b"fullDocument": (parts.FULL_DOCUMENT, parts.FULL_DOCUMENT, scan.OBJECT, 0, 0),
    b"fullDocumentBeforeChange": (
        parts.FULL_DOCUMENT_BEFORE_CHANGE,
        parts.FULL_DOCUMENT_BEFORE_CHANGE,
        scan.OBJECT,
        0,
        0,
    ),
    b"updateDescription": (parts.UPDATE_DESCRIPTION, parts.UPDATE_DESCRIPTION, scan.OBJECT, 0, 0),
}


@inner
def find_noted(memory: int, fields: int, count: int, event: int, noted: int) -> None:
    """Let the look-ups of ``count`` fields find their values where the row ``noted`` of an event says that they are."""
    for i in range(count):
        field = fields + _FIELD * i
        first = load64(noted + 8 * load64(field + _FIRST))
        last = load64(noted + 8 * load64(field + _LAST))
        # An image that is null is a part of no bytes.
        if first == 0 or last == 0 or first & 0xFFFFFFFF == first >> 32:
            continue
        value = event + (first & 0xFFFFFFFF) - load64(field + _BEFORE)
        end = event + (last >> 32) + load64(field + _BEHIND)
        found_lookup(memory + load64(field), load64(field + _TYPE), value, end)
