"""Change events in rows, checked: what a table needs of each."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import pairwise
from typing import Final, NamedTuple

from tailrace.core import raw_bson
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.errors import OplogFormatError, SinkError, UsageError
from tailrace.read.snapshot.event import OPERATION_TYPE as COPY

_TOKEN: Final = re.compile(r"[0-9A-F]{18,}")
#: Of a token of a copy: after its time and four numbers stands the UUID.
_UUID_IN_TOKEN: Final = re.compile("6E5A1004([0-9A-F]{32})")
_NEEDED: Final = "showExpandedEvents=true and showRawUpdateDescription=true"


class EventRow(NamedTuple):
    """An event. ``fields``: its own, by name; ``uuid``: of its collection (16 bytes), if it names one."""

    token: str
    time: ClusterTime
    operation: str
    namespace: str
    uuid: bytes | None
    raw: bytes
    fields: dict[bytes, raw_bson.Element]

    @property
    def is_copy(self) -> bool:
        """Whether it is a document of a copy, and not an event of the stream."""
        return self.operation == COPY

    @property
    def shown(self) -> str:
        """For messages: operation, namespace, time."""
        return f"{self.operation} of {self.namespace or 'the deployment'} at {self.time}"

    def document(self, name: bytes) -> bytes | None:
        """A field that is a document."""
        element = self.fields.get(name)
        if element is None or element.type != raw_bson.OBJECT:
            return None
        return raw_bson.value(self.raw, element)

    def require(self, name: bytes, why: str) -> bytes:
        """A field that is a document. Raises UsageError where it is missing."""
        found = self.document(name)
        if found is None:
            raise UsageError(
                f"the stream cannot keep tables: {self.shown} has no {name.decode()}",
                hint=why,
            )
        return found


def read_rows(events: Iterable[bytes | None]) -> list[EventRow]:
    """The events in the order of the stream. Raises SinkError for what is not an event, or is there twice."""
    rows = sorted((_row(raw) for raw in events), key=lambda row: row.token)
    for before, row in pairwise(rows):
        if before.token == row.token:
            raise SinkError(
                f"an event is there twice in one micro-batch: {row.shown}",
                hint="Give each event of the stream once",
            )
    return rows


def _row(raw: bytes | None) -> EventRow:
    if raw is None:
        raise SinkError("a row has no event: its column 'event' is NULL", hint="Leave such rows out with a filter")
    try:
        raw_bson.check_structure(raw)
        if raw_bson.document_end(raw) != len(raw):
            raise ValueError("more follows after its end")
        return _read(raw, {element.name: element for element in raw_bson.elements(raw)})
    except (OplogFormatError, ValueError, IndexError, KeyError) as error:
        raise SinkError(
            f"a row's column 'event' is not a change event as BSON ({len(raw)} bytes): {error}",
            hint="Give the column 'event' of format('tailrace') as it is",
        ) from None


def _read(raw: bytes, fields: dict[bytes, raw_bson.Element]) -> EventRow:
    operation = _text(raw, fields[b"operationType"])
    id_ = raw_bson.value(raw, fields[b"_id"])
    data = raw_bson.find(id_, b"_data")
    if data is None or data.type != raw_bson.STRING:
        raise ValueError("its _id is not a resume token")
    token = raw_bson.read_string(id_, data.value_start).decode()
    if not _TOKEN.fullmatch(token):
        raise ValueError("its _id is not a resume token")
    time = ClusterTime.from_bytes_le(raw_bson.value(raw, fields[b"clusterTime"]))
    if fields[b"clusterTime"].type != raw_bson.TIMESTAMP or int(token[2:18], 16) != int(time):
        raise ValueError("its clusterTime is not that of its resume token")
    if b"splitEvent" in fields:
        raise UsageError(
            "the stream cannot keep tables: its events are split", hint="Leave out $changeStreamSplitLargeEvent"
        )
    return EventRow(
        token, time, operation, _namespace(raw, fields.get(b"ns")), _uuid(raw, fields, operation, token), raw, fields
    )


def _uuid(raw: bytes, fields: dict[bytes, raw_bson.Element], operation: str, token: str) -> bytes | None:
    if operation == COPY:
        found = _UUID_IN_TOKEN.search(token)
        if found is None:
            raise ValueError("its _id is not that of a copy")
        return bytes.fromhex(found[1])
    element = fields.get(b"collectionUUID")
    if element is None or element.type != raw_bson.BINARY:
        return None
    return raw_bson.value(raw, element)[5:21]


def _namespace(raw: bytes, element: raw_bson.Element | None) -> str:
    if element is None:
        return ""
    return namespace_of(raw_bson.value(raw, element))


def namespace_of(place: bytes) -> str:
    """``{db, coll}`` as one text; a database alone has no dot."""
    names = [raw_bson.find(place, name) for name in (b"db", b"coll")]
    return ".".join(_text(place, name) for name in names if name is not None)


def _text(raw: bytes, element: raw_bson.Element) -> str:
    if element.type != raw_bson.STRING:
        raise ValueError(f"its {element.name.decode('utf-8', 'replace')} is not a string")
    return raw_bson.read_string(raw, element.value_start).decode("utf-8", "surrogateescape")


def lacks_options(row: EventRow, what: str) -> UsageError:
    """The error for a stream whose events are not whole for tables."""
    return UsageError(
        f"the stream cannot keep tables: {row.shown} has no {what}",
        hint=f"Read it with the options {_NEEDED} (MongoDB 6.0 or later), and keep its events as they are",
    )
