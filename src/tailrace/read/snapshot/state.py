"""How far a snapshot has come: a small document that is kept wherever positions are kept, and can be read by people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

import bson
from bson.binary import Binary
from bson.codec_options import CodecOptions, DatetimeConversion
from bson.errors import BSONError
from bson.json_util import RELAXED_JSON_OPTIONS, dumps
from bson.timestamp import Timestamp

from tailrace.core import raw_bson
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.oplog.namespace import Scope
from tailrace.core.oplog.witness import Witness
from tailrace.errors import TailraceError, UsageError

ChunkOutcome = Literal["copied", "dropped"]

#: Bounds of ``_id`` as documents of that one field. Chunks begin at the first and end before the second; a document
#: whose ``_id`` is MaxKey itself belongs to the last one.
LOWEST: Final = raw_bson.encode_document(raw_bson.encode_element(raw_bson.MIN_KEY, b"_id", b""))
HIGHEST: Final = raw_bson.encode_document(raw_bson.encode_element(raw_bson.MAX_KEY, b"_id", b""))

_FORMAT: Final = 1
_SHOWN_MAX: Final = 120
_ANY_VALUE: Final[CodecOptions[dict[str, Any]]] = CodecOptions(
    datetime_conversion=DatetimeConversion.DATETIME_AUTO, unicode_decode_error_handler="replace"
)


@dataclass(frozen=True, slots=True)
class KeyRange:
    """``_id`` from ``at`` (that included; everything before is copied) up to ``to`` (excluded).

    ``behind``  of what is left, the documents up to this ``_id`` were given already, by the order of key strings, which
                is not always that of the index
    """

    at: bytes = LOWEST
    to: bytes = HIGHEST
    done: bool = False
    behind: bytes | None = None


@dataclass(frozen=True, slots=True)
class CollectionCopy:
    """One collection: what it is called in the stream, which it is (``uuid``, 16 bytes), and what is left to copy.

    ``estimate``   documents that it held when the copy began; ``documents`` how many were copied
    ``outcome``    ``None`` while it is under way; "dropped": it was gone before all of it was copied, which the stream
                   shows too
    ``restarts``   how often it was started again, because another collection took its name (or it was resharded)
    """

    namespace: str
    uuid: bytes
    ranges: tuple[KeyRange, ...] = ()
    estimate: int = 0
    documents: int = 0
    outcome: ChunkOutcome | None = None
    restarts: int = 0

    def advanced(self, number: int, to: bytes, documents: int) -> CollectionCopy:
        """After the chunk of range ``number`` that ended before ``to``."""
        found = self.ranges[number]
        moved = replace(found, at=to, done=to == found.to)
        ranges = (*self.ranges[:number], moved, *self.ranges[number + 1 :])
        counted = replace(self, ranges=ranges, documents=self.documents + documents)
        return counted.ended("copied") if all(one.done for one in ranges) else counted

    def before(self, number: int, at: bytes, documents: int) -> CollectionCopy:
        """In the middle of a chunk of range ``number`` that came in the index's order: what is left begins at the
        ``_id`` ``at``, ``documents`` more have been given."""
        ranges = (*self.ranges[:number], replace(self.ranges[number], at=at), *self.ranges[number + 1 :])
        return replace(self, ranges=ranges, documents=self.documents + documents)

    def within(self, number: int, to: bytes, behind: bytes, documents: int) -> CollectionCopy:
        """In the middle of the chunk of range ``number`` that ends before ``to``: the ``documents`` up to the ``_id``
        ``behind``, by the order of key strings, have been given."""
        found = self.ranges[number]
        here = replace(found, to=to, behind=behind)
        rest = () if to == found.to else (replace(found, at=to),)
        ranges = (*self.ranges[:number], here, *rest, *self.ranges[number + 1 :])
        return replace(self, ranges=ranges, documents=self.documents + documents)

    def ended(self, outcome: ChunkOutcome) -> CollectionCopy:
        """Nothing of it is left to copy."""
        return replace(self, ranges=(), outcome=outcome)


@dataclass(frozen=True, slots=True)
class SnapshotState:
    """A snapshot of ``scope``. A stream that is to follow it starts at ``start``, that time included.

    ``witness``  whose documents these are, with an entry of each oplog that is about as new as the last of them;
                 earlier versions kept none, or one at ``start``
    """

    scope: Scope
    start: ClusterTime
    collections: tuple[CollectionCopy, ...] = field(default=())
    witness: Witness | None = None

    @property
    def is_complete(self) -> bool:
        """Whether nothing is left to copy."""
        return all(one.outcome is not None for one in self.collections)

    def having(self, index: int, copy: CollectionCopy) -> SnapshotState:
        """The state with another value for one collection."""
        return replace(self, collections=(*self.collections[:index], copy, *self.collections[index + 1 :]))

    def to_document(self) -> dict[str, Any]:
        """The document to keep; BSON and Extended JSON both hold it."""
        return {
            "format": _FORMAT,
            "scope": str(self.scope) if self.scope.kind != "cluster" else "",
            "startAt": self.start.to_timestamp(),
            "collections": [_collection_document(one) for one in self.collections],
            **({} if self.witness is None else {"witness": self.witness.to_document()}),
        }

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> SnapshotState:
        """Read what ``to_document`` gave. Raises UsageError where it is something else."""
        try:
            if document["format"] != _FORMAT:
                raise ValueError(f"its format is {document['format']!r}")
            start = document["startAt"]
            if not isinstance(start, Timestamp):
                raise ValueError("startAt is not a timestamp")
            collections = tuple(_collection(one) for one in document["collections"])
            witness = Witness.from_document(document["witness"]) if "witness" in document else None
            return cls(Scope.parse(document["scope"]), ClusterTime.from_timestamp(start), collections, witness)
        except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, TailraceError) as error:
            raise UsageError(
                f"the state of a snapshot cannot be read: {error}", hint="Remove it, and the copy begins again"
            ) from None


def _collection_document(copy: CollectionCopy) -> dict[str, Any]:
    return {
        "namespace": copy.namespace,
        "uuid": Binary(copy.uuid, 4),
        "estimate": copy.estimate,
        "documents": copy.documents,
        "outcome": copy.outcome,
        "restarts": copy.restarts,
        "ranges": [_range_document(one) for one in copy.ranges],
    }


def _range_document(one: KeyRange) -> dict[str, Any]:
    document = {"at": bound_document(one.at), "to": bound_document(one.to), "done": one.done}
    return document if one.behind is None else {**document, "behind": bound_document(one.behind)}


def _range(document: Mapping[str, Any]) -> KeyRange:
    behind = document.get("behind")
    return KeyRange(
        bound_of(document["at"]),
        bound_of(document["to"]),
        bool(document["done"]),
        None if behind is None else bound_of(behind),
    )


def _collection(document: Mapping[str, Any]) -> CollectionCopy:
    outcome = document["outcome"]
    if outcome not in (None, "copied", "dropped"):
        raise ValueError(f"there is no outcome {outcome!r}")
    ranges = tuple(_range(one) for one in document["ranges"])
    if outcome is None and all(one.done for one in ranges):
        raise ValueError("a collection is not copied, and has nothing left to copy")
    return CollectionCopy(
        str(document["namespace"]),
        _uuid(document["uuid"]),
        ranges,
        int(document["estimate"]),
        int(document["documents"]),
        outcome,
        int(document["restarts"]),
    )


def _uuid(found: Any) -> bytes:
    """The bytes of a UUID, however a driver gives it back; not in the order of one of the old drivers (subtype 3)."""
    uuid = getattr(found, "bytes", found)
    if not isinstance(uuid, bytes) or len(uuid) != 16 or getattr(uuid, "subtype", 4) == 3:
        raise ValueError(f"{found!r} is not a UUID")
    return uuid if type(uuid) is bytes else bytes(uuid)


def bound_document(bound: bytes) -> dict[str, Any]:
    """The exact bytes, which not every reader of BSON gives back, and the same to read."""
    return {"bson": Binary(bound), "shown": shown(bound)}


def bound_of(document: Mapping[str, Any]) -> bytes:
    bound = bytes(document["bson"])
    if [element.name for element in raw_bson.elements(bound)] != [b"_id"]:
        raise ValueError("a bound has the one field _id")
    return bound


def shown(bound: bytes) -> str:
    """A bound's ``_id`` in words."""
    try:
        text = dumps(bson.decode(bound, _ANY_VALUE)["_id"], json_options=RELAXED_JSON_OPTIONS, ensure_ascii=False)
    except (BSONError, ValueError, TypeError):
        return "..."
    return text if len(text) <= _SHOWN_MAX else f"{text[:_SHOWN_MAX]}..."


def key_ranges(bounds: Sequence[bytes]) -> tuple[KeyRange, ...]:
    """The ranges between ascending ``bounds``, from the lowest ``_id`` to the highest."""
    return tuple(KeyRange(low, high) for low, high in zip((LOWEST, *bounds), (*bounds, HIGHEST), strict=True))
