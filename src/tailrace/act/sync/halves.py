"""A segment that is too much for one transaction of the target, in halves of halves.

A server ends a transaction whose changes do not fit its cache. How much that is depends on the cache, on the documents
and on what else is written, so it is known only afterwards. Once ``hold`` is at the segment's end, its parts may be
written in transactions of their own: until the position is there too, the target counts as newer in places.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from tailrace.act.sync.fold import DocumentChanges
from tailrace.errors import SinkError

#: TransactionTooLargeForCache.
TOO_LARGE: Final = 388


def write_halves(documents: Sequence[DocumentChanges], write: Callable[[Sequence[DocumentChanges]], None]) -> None:
    """Write documents in as many parts as it takes. Raises what ``write`` raises, and SinkError 388 where one document
    is too much."""
    if len(documents) < 2:
        write(documents)
        return
    middle = len(documents) // 2
    for part in (documents[:middle], documents[middle:]):
        try:
            write(part)
        except SinkError as error:
            if error.code != TOO_LARGE or len(part) < 2:
                raise
            write_halves(part, write)
