"""Copying with a consumer that keeps what it gets by ``_id``, and the stream after the copy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import bson
import pymongo
from bson.codec_options import CodecOptions
from bson.raw_bson import RawBSONDocument

import tailrace
from tailrace.core import raw_bson
from tailrace.core.event.keystring import encode
from tailrace.core.oplog.namespace import Scope
from tailrace.read.snapshot import SnapshotReader, SnapshotState
from tailrace.read.window.apply import has_document_key

RAW: CodecOptions[RawBSONDocument] = CodecOptions(document_class=RawBSONDocument)
#: Names of collections may be no text.
_ANY_NAME: CodecOptions[RawBSONDocument] = CodecOptions(
    document_class=RawBSONDocument, unicode_decode_error_handler="surrogateescape"
)


def opened(event: bytes) -> RawBSONDocument:
    """An event whose namespace need not be UTF-8."""
    return RawBSONDocument(event, _ANY_NAME)


def id_of(document: bytes) -> bytes:
    """What tells documents of a collection without a collation apart."""
    element = raw_bson.find(document, b"_id")
    assert element is not None
    return encode(element.type, raw_bson.value(document, element))[0]


def truth(collection: Any) -> dict[bytes, bytes]:
    """The documents that a collection holds, by ``_id``, exactly."""
    found = [bytes(one.raw) for one in collection.with_options(codec_options=RAW).find()]
    return {id_of(one): one for one in found}


def persisted(state: SnapshotState) -> SnapshotState:
    """The state after a crash: from the bytes that were kept."""
    return SnapshotState.from_document(bson.decode(bson.encode(state.to_document())))


class Target:
    """Collections as a consumer has them: by namespace, documents by ``_id``."""

    def __init__(self) -> None:
        self.collections: dict[str, dict[bytes, bytes]] = {}
        self.snapshots = 0

    def apply(self, event: bytes) -> None:
        """Carry out a change event."""
        found = opened(event)
        kind = found["operationType"]
        ns = found.get("ns") or {}
        name = f"{ns.get('db')}.{ns.get('coll')}"
        documents = self.collections.setdefault(name, {})
        if kind in ("snapshot", "insert", "replace", "update"):
            self.snapshots += kind == "snapshot"
            document = found.get("fullDocument")
            key = id_of(bytes(found["documentKey"].raw))
            if document is None:
                self._remove(documents, found)  # updateLookup: it is gone by now, and its delete comes
            else:
                documents[key] = bytes(document.raw)
        elif kind == "delete":
            self._remove(documents, found)
        elif kind in ("drop", "dropDatabase"):
            for gone in (
                [name] if kind == "drop" else [one for one in self.collections if one.startswith(f"{ns['db']}.")]
            ):
                self.collections.pop(gone, None)
        elif kind == "rename":
            to = found["to"]
            self.collections[f"{to['db']}.{to['coll']}"] = self.collections.pop(name, {})

    def _remove(self, documents: dict[bytes, bytes], event: Any) -> None:
        """The document that the event is about. One with another shard key value was moved by a transaction whose
        insert came before its delete."""
        document_key = bytes(event["documentKey"].raw)
        held = documents.get(id_of(document_key))
        if held is not None and has_document_key(held, document_key):
            del documents[id_of(document_key)]


def copy_all(reader: SnapshotReader, target: Target) -> SnapshotState:
    """Copy to the end."""
    for chunk in reader:
        for event in chunk.events():
            target.apply(event)
        reader.done(chunk)
    return reader.state


def stream_after(
    client: tailrace.watch.client.client.Client, scope: Scope, state: SnapshotState, until: Any
) -> Iterator[bytes]:
    """The events of the stream that starts where the snapshot did, up to a cluster time."""
    watched: Any = client
    for name in (scope.database, scope.collection):
        watched = watched if name is None else watched[name]
    with watched.watch(
        full_document="updateLookup",
        start_at_operation_time=state.start.to_timestamp(),
        document_class=RawBSONDocument,
        max_await_time_ms=50,
    ) as stream:
        while True:
            event = stream.try_next()
            if event is not None:
                yield bytes(event.raw)
            elif tailrace.core.event.resume_token.ResumeToken.parse(stream.resume_token).cluster_time >= until:
                return


def pymongo_client(uri: str, **options: Any) -> Any:
    """PyMongo's client, raw bytes kept."""
    return pymongo.MongoClient(uri, **options)


Writer = Callable[[], None]
