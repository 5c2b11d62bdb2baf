"""A segment that is too large for one transaction of the target, halved again and again.

A server ends a transaction whose changes do not fit its cache. How much that is depends on the cache, on the documents
and on what else is written, so it is known only afterwards. Once ``hold`` is at the segment's end, its parts may be
written in transactions of their own: until the position is there too, the target counts as newer in places.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from tailrace.act.sync.fold import DocumentChanges
from tailrace.act.sync.writer import DUPLICATE_KEY, OtherWayError
from tailrace.errors import SinkError

#: TransactionTooLargeForCache.
TOO_LARGE: Final = 388

#: Writes documents in one transaction: how those of a collection are written, if not in the usual way.
WritePart = Callable[[Sequence[DocumentChanges], Mapping[bytes, int]], None]


def write_in_parts(documents: Sequence[DocumentChanges], write: WritePart, too_large: SinkError) -> None:
    """Write documents in as many parts as it takes. Raises what ``write`` raises; ``too_large``, the answer to the
    whole, if a unique value goes from one part to another: then the parts are in each other's way in any order."""
    try:
        _write_halves(documents, write)
    except SinkError as error:
        raise too_large if error.code == DUPLICATE_KEY else error from None


def write_lane(documents: Sequence[DocumentChanges], whole: WritePart, parts: WritePart) -> bool:
    """Write the documents of a lane: with ``whole``, or with ``parts`` if the whole does not fit. False if another lane
    has to be first, or if a single document is too much: in that case some may have been written."""
    try:
        whole(documents, {})
    except OtherWayError:
        return False
    except SinkError as error:
        if error.code != TOO_LARGE or len(documents) < 2:
            raise
        try:
            write_in_parts(documents, parts, error)
        except SinkError as again:
            if again.code != TOO_LARGE:
                raise
            return False
    return True


def _write_halves(documents: Sequence[DocumentChanges], write: WritePart) -> None:
    if len(documents) < 2:
        _write_one(documents, write)
        return
    middle = len(documents) // 2
    for part in (documents[:middle], documents[middle:]):
        try:
            _write_one(part, write)
        except SinkError as error:
            if error.code != TOO_LARGE or len(part) < 2:
                raise
            _write_halves(part, write)


def _write_one(documents: Sequence[DocumentChanges], write: WritePart) -> None:
    """Write a part. If a unique index is in its way, its documents are taken out before they are put in."""
    ways: dict[bytes, int] = {}
    while True:
        try:
            return write(documents, ways)
        except OtherWayError as error:
            ways[error.uuid] = error.way
