"""Tables compared with their collections, document by document, byte for byte."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa
from bson.codec_options import CodecOptions
from bson.raw_bson import RawBSONDocument
from deltalake import DeltaTable, QueryBuilder

from tailrace.base.object_place import ObjectPlace
from tailrace.core import raw_bson
from tailrace.lake.store.delta import commits_in
from tailrace.lake.store.place import TablePlace
from tailrace.lake.tables.names import place_of
from tailrace.read.source.connection import Connection, collection_of
from tailrace.read.source.listing import is_utf8, list_collections
from tailrace.read.window.sortable_key import sortable_key

RAW: CodecOptions[RawBSONDocument] = CodecOptions(document_class=RawBSONDocument)


def key_of(document: bytes) -> bytes:
    """The sortable key of a document."""
    element = raw_bson.find(document, b"_id")
    assert element is not None
    return sortable_key(element.type, raw_bson.value(document, element))


def in_collection(collection: Any) -> dict[bytes, bytes]:
    """What a collection holds now."""
    found = [bytes(one.raw) for one in collection.with_options(codec_options=RAW).find()]
    return {key_of(one): one for one in found}


def in_table(root: TablePlace, namespace: str, version: int | None = None) -> dict[bytes, bytes] | None:
    """What a collection's table holds; ``None`` if there is none. A duplicate row is an error."""
    folder = place_of(root, namespace)
    options = dict(folder.bucket.options) if isinstance(folder, ObjectPlace) else None
    if not commits_in(folder):  # a writer makes the directories before the first version
        return None
    table = DeltaTable(folder.absolute().as_uri(), version=version, storage_options=options)
    rows = read(table, "_key", "_bson")
    keys, documents = rows.column("_key").to_pylist(), rows.column("_bson").to_pylist()
    assert len(set(keys)) == len(keys), "a row is there twice"
    assert all(key_of(document) == key for key, document in zip(keys, documents, strict=True))
    return dict(zip(keys, documents, strict=True))


def read(table: DeltaTable, *columns: str) -> pa.Table:
    """All rows, with some columns or all, by deltalake: its own engine supports deletion vectors, its dataset does
    not."""
    if not table.protocol().reader_features:
        return table.to_pyarrow_table(columns=list(columns) or None)
    chosen = ", ".join(f'"{name}"' for name in columns) or "*"
    try:
        found = pa.table(QueryBuilder().register("t", table).execute(f"SELECT {chosen} FROM t").read_all())
    except Exception as error:
        # A file that is missing or damaged is an exception without a class of its own.
        if type(error) is Exception and "External error: " in str(error):
            raise OSError(str(error)) from error
        raise
    # That engine gives view types, which Arrow does not sort.
    plain = {pa.binary_view(): pa.binary(), pa.string_view(): pa.string()}
    return found.cast(pa.schema([(one.name, plain.get(one.type, one.type)) for one in found.schema]))


def collections(client: Any, databases: tuple[str, ...]) -> dict[str, dict[bytes, bytes]]:
    """Every collection of some databases, except views, time series, the server's own, and those that no driver can
    read."""
    found = {}
    for database in databases:
        there = client.get_database(database, codec_options=RAW)
        for one in list_collections(Connection(client), database, {}):
            name = one.namespace.partition(".")[2]
            if one.kind == "collection" and not name.startswith("system.") and is_utf8(name):
                documents = [bytes(document.raw) for document in collection_of(there, name).find()]
                found[one.namespace] = {key_of(document): document for document in documents}
    return found


def assert_equal(root: TablePlace, truth: Mapping[str, Mapping[bytes, bytes]], known: set[str]) -> None:
    """Check that each collection has its table, and that the tables of dropped collections are empty."""
    for namespace, documents in truth.items():
        table = in_table(root, namespace)
        assert table is not None, f"{namespace} has no table"
        assert table.keys() == documents.keys(), namespace
        different = [key for key, document in documents.items() if table[key] != document]
        assert not different, (namespace, documents[different[0]], table[different[0]])
    for namespace in known - truth.keys():
        assert not in_table(root, namespace), namespace
