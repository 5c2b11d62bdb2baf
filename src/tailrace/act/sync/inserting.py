"""Documents onto the target as the bytes that they are: many of them are one piece of memory, which nobody looks into.

An insert puts the time in the place of a Timestamp of 0 on a document's top level (measured on 4.4.2, 5.0.4, 6.0.27 and
7.0.28; not in ``_id``). Newer servers can be told not to; on others such a document goes as an update that inserts it.
So does one whose ``_id`` is a document with a name in it that begins with a dollar: 6.0.27 and 7.0.28 refuse it in an
insert (52), and take it from an update.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from bson.codec_options import CodecOptions
from bson.raw_bson import RawBSONDocument
from pymongo import MongoClient
from pymongo.client_session import ClientSession
from pymongo.errors import OperationFailure

from tailrace.act.sync.shard_keys import key_elements
from tailrace.act.sync.target import REPLIES
from tailrace.core import raw_bson
from tailrace.errors import SourceError
from tailrace.read.snapshot.documents import RunOfDocuments

#: One document of a message of PyMongo's is no larger.
_PIECE_BYTES_MAX: Final = 16 << 20
_UNKNOWN_FIELD: Final = 40415
#: A Timestamp of 0 may be in this memory. Most have none, and are not examined further.
_EMPTY_TIMESTAMP: Final = re.compile(rb"\x11[^\x00]*\x00{9}")
_RAW: Final[CodecOptions[RawBSONDocument]] = CodecOptions(document_class=RawBSONDocument)


class Inserter:
    """Inserts documents as the bytes that they are, into any collection of a target. Of one thread.

    ``keeps_empty_timestamps``  whether the target's inserts can leave a Timestamp of 0 as it is
    ``looks_at_ids``            whether each ``_id`` is examined: once an insert was refused because of one
    ``routed``                  whether the target is a mongos
    """

    def __init__(self, target: MongoClient[Any], *, routed: bool = False) -> None:
        self._target = target
        # Whether a mongos passes the option on is not known for each version.
        self.keeps_empty_timestamps = not routed and _takes_empty_timestamps(target)
        self.looks_at_ids = False

    def insert(self, namespace: str, pieces: Sequence[bytes], session: ClientSession, key: Sequence[str] = ()) -> None:
        """Insert the documents of ``pieces``, each some of them one after another. ``key``: the paths of the
        collection's shard key. Raises OperationFailure."""
        database, _, name = namespace.partition(".")
        special: list[bytes] = []
        if not self.keeps_empty_timestamps or self.looks_at_ids:
            pieces, special = self._without_special(pieces)
        command: dict[str, Any] = {
            "insert": name,
            "documents": [RawDocuments(one) for one in pieces],
            "ordered": False,
            "bypassDocumentValidation": True,
        }
        if self.keeps_empty_timestamps:
            command["bypassEmptyTsReplacement"] = True
        there = self._target.get_database(database)
        if pieces:
            _raise_first(there.command(command, session=session, codec_options=REPLIES))
        if special:
            updates = [insertion(one, key) for one in special]
            command = {"update": name, "updates": updates, "ordered": False, "bypassDocumentValidation": True}
            _raise_first(there.command(command, session=session, codec_options=REPLIES))

    def _without_special(self, pieces: Sequence[bytes]) -> tuple[list[bytes], list[bytes]]:
        """The pieces without the documents that go as updates, and those documents."""
        usual: list[bytes] = []
        special: list[bytes] = []
        for piece in pieces:
            if not self.looks_at_ids and _EMPTY_TIMESTAMP.search(piece) is None:
                usual.append(piece)
                continue
            rest: list[bytes] = []
            for document in raw_bson.split(piece):
                (special if self._is_special(document) else rest).append(document)
            usual += _joined(rest)
        return usual, special

    def _is_special(self, document: bytes) -> bool:
        if self.looks_at_ids and has_dollar_in_id(document):
            return True
        return not self.keeps_empty_timestamps and has_empty_timestamp(document)


class RawDocuments(RawBSONDocument):
    """Documents one after another. PyMongo puts a message's documents one after another too, so that for it they
    are one, and none of them becomes an object."""

    def __init__(self, documents: bytes) -> None:  # no check: it is not one document
        self._documents = documents

    @property
    def raw(self) -> bytes:
        """The bytes that go into the message."""
        return self._documents


def pieces_of(documents: Sequence[bytes]) -> list[bytes]:
    """Documents in pieces of memory that are no larger than a message of PyMongo's takes."""
    if isinstance(documents, RunOfDocuments) and len(documents.buffer) <= _PIECE_BYTES_MAX:
        return [documents.buffer] if documents.buffer else []
    return list(_joined(documents))


def _joined(documents: Iterable[bytes]) -> Iterator[bytes]:
    together: list[bytes] = []
    size = 0
    for one in documents:
        if together and size + len(one) > _PIECE_BYTES_MAX:
            yield b"".join(together)
            together, size = [], 0
        together.append(one)
        size += len(one)
    if together:
        yield b"".join(together)


def has_empty_timestamp(document: bytes) -> bool:
    """Whether a field of the document's own, other than ``_id``, is Timestamp(0, 0): servers put the time there."""
    return any(
        one.type == raw_bson.TIMESTAMP and one.name != b"_id" and not any(raw_bson.value(document, one))
        for one in raw_bson.elements(document)
    )


def has_dollar_in_id(document: bytes) -> bool:
    """Whether ``_id`` is a document that may have a name in it that begins with a dollar."""
    element = raw_bson.find(document, b"_id")
    return element is not None and element.type == raw_bson.OBJECT and b"$" in raw_bson.value(document, element)


def insertion(document: bytes, key: Sequence[str] = ()) -> dict[str, Any]:
    """An update that inserts a document with all its bytes. ``key``: the paths of the collection's shard key."""
    element = raw_bson.find(document, b"_id")
    if element is None:
        raise SourceError("a document without _id")
    equals = raw_bson.encode_element(element.type, b"$eq", raw_bson.value(document, element))
    own = raw_bson.encode_element(raw_bson.OBJECT, b"_id", raw_bson.encode_document(equals))
    query = raw_bson.encode_document(own, key_elements(document, key))
    return {
        "q": RawBSONDocument(query, _RAW),
        "u": [{"$replaceWith": {"$literal": RawBSONDocument(document, _RAW)}}],
        "upsert": True,
    }


def _takes_empty_timestamps(target: MongoClient[Any]) -> bool:
    """Whether inserts can be told to leave empty Timestamps alone: newer patch releases of 5.0 and later can. Asked
    with an insert of no document, which is refused in any case."""
    try:
        target.admin.command({"insert": "_", "documents": [], "bypassEmptyTsReplacement": True})
    except OperationFailure as error:
        return error.code != _UNKNOWN_FIELD
    return True


def _raise_first(reply: Mapping[str, Any]) -> None:
    errors = reply.get("writeErrors")
    if errors:
        first = dict(errors[0])
        raise OperationFailure(str(first.get("errmsg", "")), int(first.get("code", 8)), first)
