"""A chunk of a collection: every document whose ``_id`` lies between two bounds, as it is majority-committed, once.

The bounds are the server's own: they are found by walking the index of ``_id`` and handed back as they came. Nothing
here compares two values, so collations, numbers that are equal in different types and values that other languages
cannot hold do no harm. ``min`` and ``max`` on the index serve for that; ``$gt`` would stay within one type.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, Final

from bson.codec_options import CodecOptions, DatetimeConversion
from bson.raw_bson import RawBSONDocument
from pymongo import MongoClient
from pymongo.collection import Collection

from tailrace.core import raw_bson
from tailrace.core.event.keystring import encode_object
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.errors import SourceError
from tailrace.read.snapshot.documents import RunOfDocuments
from tailrace.read.snapshot.places import Placement
from tailrace.read.snapshot.state import HIGHEST, LOWEST, KeyRange
from tailrace.read.source.connection import Connection, collection_of
from tailrace.read.source.raw_reply import RawReplyCursor

#: "The value provided for min() does not come before the value provided for max()": the range is empty.
_EMPTY_RANGE: Final = 51175
_INDEX: Final = {"_id": 1}
#: PyMongo looks into what it sends.
_ANY_VALUE: Final[CodecOptions[RawBSONDocument]] = CodecOptions(
    document_class=RawBSONDocument,
    datetime_conversion=DatetimeConversion.DATETIME_AUTO,
    unicode_decode_error_handler="replace",
)
#: A chunk that comes to more bytes ends there, so that large documents fit into memory. A reply has up to 16 MB more.
READ_BYTES: Final = 8 << 20
#: How many values for each bound are drawn when a collection is cut into ranges.
_SAMPLES: Final = 20


class KeyRangeCursor(RawReplyCursor):
    """Documents in the order of the index of ``_id`` from ``low`` up to ``high`` (excluded), in raw batches. PyMongo's
    ``min`` and ``max`` take Python values; these bounds stay as the server gave them."""

    def __init__(self, collection: Collection[Any], low: bytes, high: bytes, **options: Any) -> None:
        super().__init__(collection, {}, hint=list(_INDEX.items()), **options)
        self._min: Any = RawBSONDocument(low, _ANY_VALUE)
        self._max: Any = RawBSONDocument(high, _ANY_VALUE)


@dataclass(frozen=True, slots=True)
class ChunkRead:
    """The documents, and where the next chunk begins."""

    documents: Sequence[bytes]
    to: bytes


class ChunkReader:
    """Reads chunks of placements. Belongs to one thread."""

    def __init__(self, *, retry_seconds: float) -> None:
        self._retry_seconds = retry_seconds
        self._connections: dict[int, Connection] = {}

    def read(self, placement: Placement, wanted: KeyRange, after: ClusterTime, size: int | None) -> ChunkRead:
        """The chunk at the beginning of ``wanted``: about ``size`` documents, at most that many of each member, read
        when everything up to ``after`` was committed; ``None``: all of ``wanted``. Fewer, where these are larger than
        about ``READ_BYTES``, whatever was thought of their size."""
        to = wanted.to if size is None else self.bound(placement, wanted, after, size)
        after = max(after, placement.after)
        bytes_max = READ_BYTES // max(1, len(placement.members))
        while True:
            documents: list[bytes] = []
            for place, (member, client) in enumerate(placement.members.items()):
                found, end = self._documents(placement, client, KeyRange(wanted.at, to), after, bytes_max)
                is_cut, to = end != to, end
                if is_cut and place:
                    break  # what the members before it gave goes beyond that: once more
                if len(placement.members) == 1 and not placement.chunks:
                    return ChunkRead(found, to)
                documents += [one for one in found if placement.owns(member, one)] if placement.chunks else found
            else:
                return ChunkRead(documents, to)

    def bound(self, placement: Placement, wanted: KeyRange, after: ClusterTime, size: int) -> bytes:
        """Where the chunk at the beginning of ``wanted`` ends: no member has more than ``size`` documents of it. Index
        keys alone are read."""
        to = wanted.to
        for client in placement.members.values():
            to = self._bound(placement, client, KeyRange(wanted.at, to), max(after, placement.after), size)
        return to

    def _bound(
        self, placement: Placement, client: MongoClient[Any], within: KeyRange, after: ClusterTime, size: int
    ) -> bytes:
        """The ``_id`` before which a member has at most ``size`` documents of a range; the range's end if it has no
        more."""
        found = self._find(placement, client, within, after, projection=_INDEX, skip=size, limit=1)
        return id_alone(found[0]) if found else within.to

    def _documents(
        self, placement: Placement, client: MongoClient[Any], within: KeyRange, after: ClusterTime, bytes_max: int
    ) -> tuple[RunOfDocuments, bytes]:
        """The documents of a member in a range, or the first of them that come to about ``bytes_max``; and where those
        after them begin."""
        found = self._find(placement, client, within, after, bytes_max=bytes_max)
        if len(found.buffer) > bytes_max:
            to = self._after(placement, client, replace(within, at=id_alone(found[-1])), after)
            if to != within.to:
                return found, to
        if within.to != HIGHEST:
            return found, within.to
        return RunOfDocuments(found.buffer + self._find(placement, client, None, after).buffer), within.to

    def _after(self, placement: Placement, client: MongoClient[Any], within: KeyRange, after: ClusterTime) -> bytes:
        """The first ``_id`` of a range that is not its beginning itself, which may have been deleted; the range's end
        if there is none."""
        found = [id_alone(one) for one in self._find(placement, client, within, after, projection=_INDEX, limit=2)]
        return next((one for one in found if one != within.at), within.to)

    def _find(
        self,
        placement: Placement,
        client: MongoClient[Any],
        within: KeyRange | None,
        after: ClusterTime,
        *,
        bytes_max: int | None = None,
        **options: Any,
    ) -> RunOfDocuments:
        """Documents of a range; without a range, the one whose ``_id`` is MaxKey. No further reply after
        ``bytes_max``."""
        connection = self._to(client)
        database, _, name = placement.namespace.partition(".")
        collection = connection.majority(database, name, after=after)

        def read() -> RunOfDocuments:
            cursor = (
                RawReplyCursor(collection, RawBSONDocument(HIGHEST))
                if within is None
                else KeyRangeCursor(collection, within.at, within.to, **options)
            )
            replies, size = [], 0
            with closing(cursor):
                for reply in cursor:
                    replies.append(reply)
                    size += len(reply)
                    if bytes_max is not None and size > bytes_max:
                        break
            return RunOfDocuments(b"".join(replies))

        try:
            return connection.retrying(read)
        except SourceError as error:
            if error.code == _EMPTY_RANGE:
                return RunOfDocuments(b"")
            raise

    def ranges(self, placement: Placement, count: int) -> list[bytes]:
        """Bounds that cut a collection into ``count`` ranges of about one size, or into fewer."""
        if count < 2:
            return []
        client = max(placement.members.values(), key=lambda member: self._count(placement, member), default=None)
        if client is None:
            return []
        connection = self._to(client)
        database, _, name = placement.namespace.partition(".")
        sample = [{"$sample": {"size": count * _SAMPLES}}, {"$project": _INDEX}, {"$sort": _INDEX}]

        def read() -> list[bytes]:
            with connection.majority(database, name).aggregate_raw_batches(sample) as cursor:
                return [id_alone(document) for batch in cursor for document in raw_bson.split(batch)]

        found = connection.retrying(read)
        step = len(found) / count
        chosen = [found[int(step * number)] for number in range(1, count)] if len(found) >= count else []
        return [bound for bound in dict.fromkeys(chosen) if bound not in (LOWEST, HIGHEST)]

    def estimate(self, placement: Placement) -> int:
        """About how many documents there are, by what the members have written down; orphans are among them."""
        return sum(self._count(placement, client) for client in placement.members.values())

    def _count(self, placement: Placement, client: MongoClient[Any]) -> int:
        connection = self._to(client)
        database, _, name = placement.namespace.partition(".")
        return connection.retrying(collection_of(client[database], name).estimated_document_count)

    def _to(self, client: MongoClient[Any]) -> Connection:
        known = self._connections.get(id(client))
        if known is None:
            known = self._connections[id(client)] = Connection(client, retry_seconds=self._retry_seconds)
            known.wait_for_hello()
        return known


def not_given(found: ChunkRead, behind: bytes | None) -> ChunkRead:
    """What of a chunk is left where the documents up to ``behind`` were given (``KeyRange.behind``)."""
    if behind is None:
        return found
    last = order_of(behind)
    return replace(found, documents=[one for one in found.documents if order_of(one) > last])


def order_of(document: bytes) -> bytes:
    """The key string of a document's ``_id``."""
    return encode_object(id_alone(document))[0]


def id_alone(document: bytes) -> bytes:
    """A document of the field ``_id`` alone."""
    element = raw_bson.find(document, b"_id")
    if element is None:
        raise SourceError("a document without _id")
    return raw_bson.encode_document(document[element.start : element.end])
