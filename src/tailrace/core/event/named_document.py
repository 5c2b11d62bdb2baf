"""Documents that are named by collection and ``_id``, to be taken out of the stores that keep copies of them.

What may live here: which documents are meant, whether an event, an entry or a stored document is of one of them, and
what a store says after it has searched for them. A document is known by the server's order of values: 1 and 1.0 name
the same one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from tailrace.core import raw_bson
from tailrace.core.event import keystring
from tailrace.core.raw_bson import OBJECT


@dataclass(frozen=True, slots=True)
class NamedDocument:
    """A document of the collection ``namespace``. ``id``: the BSON of a document with the one field ``_id``."""

    namespace: str
    id: bytes

    @property
    def key(self) -> bytes:
        """Its ``_id`` as bytes that are equal for equal values. Raises OplogFormatError."""
        found = id_key(self.id)
        return b"" if found is None else found


def id_key(document: bytes) -> bytes | None:
    """The ``_id`` of a document or of a document key in the form of ``NamedDocument.key``; ``None`` if it has none."""
    element = raw_bson.find(document, b"_id")
    return None if element is None else keystring.encode(element.type, raw_bson.value(document, element))[0]


class NamedDocuments:
    """Several of them. ``namespaces``: their collections, each once."""

    def __init__(self, documents: Iterable[NamedDocument]) -> None:
        self.documents = tuple(documents)
        self._places = {(one.namespace, one.key) for one in self.documents}
        self.namespaces = tuple(dict.fromkeys(one.namespace for one in self.documents))

    def keys(self, namespace: str) -> set[bytes]:
        """The keys of those in a collection."""
        return {key for where, key in self._places if where == namespace}

    def has(self, namespace: str, document: bytes) -> bool:
        """Whether a document or a document key of a collection is one of them."""
        key = id_key(document) if namespace in self.namespaces else None
        return key is not None and (namespace, key) in self._places

    def has_event(self, event: bytes) -> bool:
        """Whether a change event is of one of them."""
        where, key = (raw_bson.find(event, name) for name in (b"ns", b"documentKey"))
        if where is None or key is None or where.type != OBJECT or key.type != OBJECT:
            return False
        return self.has(_namespace(raw_bson.value(event, where)), raw_bson.value(event, key))


def _namespace(document: bytes) -> str:
    """``db.coll`` of an event's ``ns``; empty if it names no collection."""
    found = [raw_bson.find(document, name) for name in (b"db", b"coll")]
    parts = [raw_bson.value(document, one)[4:-1] for one in found if one is not None and one.type == raw_bson.STRING]
    return b".".join(parts).decode("utf-8", "surrogateescape") if len(parts) == len(found) else ""


@dataclass(slots=True)
class StoreErasure:
    """What a store says about the documents.

    ``store``   the kind of store, ``place`` which one
    ``found``   how much it held of them, by what that is ("events", "rows of earlier versions")
    ``erased``  how much of that has gone; 0 if only a look was asked for
    ``left``    what it holds still, and until when: sentences. The documents are gone only where there is none
    ``kept``    what stays on purpose: sentences
    """

    store: str
    place: str
    found: dict[str, int] = field(default_factory=dict)
    erased: int = 0
    left: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)

    def count(self, what: str, number: int) -> None:
        """Note that ``number`` more were found."""
        if number:
            self.found[what] = self.found.get(what, 0) + number

    @property
    def total(self) -> int:
        """How much was found of all kinds."""
        return sum(self.found.values())

    @property
    def done(self) -> bool:
        """Whether nothing of the documents is left but what stays on purpose."""
        return not self.left and self.erased == self.total
