"""Pre-images and current documents: many at once, raw bytes, in the order asked."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from functools import partial
from itertools import groupby
from typing import Any, Final, NamedTuple

from bson.binary import Binary
from bson.codec_options import CodecOptions
from bson.int64 import Int64
from bson.raw_bson import RawBSONDocument
from pymongo.errors import InvalidName, OperationFailure

from tailrace import raw_bson
from tailrace.errors import OplogFormatError, ServerError, SourceError
from tailrace.oplog.cluster_time import ClusterTime
from tailrace.plan.request import DocumentLookup, PreImageKey
from tailrace.source.connection import Connection
from tailrace.source.failure import is_transient

_CHUNK: Final = 500
#: Attempts to read from a collection that is renamed meanwhile.
_RENAMES_MAX: Final = 20
#: A ``$in`` on the clustered key scans from its smallest to its largest key (explain, 6.0.27), so keys that lie further
#: apart than this are asked for separately.
_GAP_SECONDS_MAX: Final = 10
_UUID_SUBTYPE: Final = 4
#: Unauthorized and AuthenticationFailed: about the reader, not about the document.
_RIGHTS_CODES: Final = (13, 18)

_NUMBERS: Final = frozenset({raw_bson.INT32, raw_bson.INT64, raw_bson.DOUBLE, raw_bson.DECIMAL128})
#: Types whose values are equal for the server exactly when their bytes are.
_EQUAL_AS_BYTES: Final = frozenset(
    {raw_bson.OBJECT_ID, raw_bson.BINARY, raw_bson.DATE, raw_bson.TIMESTAMP, raw_bson.BOOL, raw_bson.NULL}
)


def stored_pre_images(connection: Connection, keys: Sequence[PreImageKey]) -> list[bytes | None]:
    """The ``preImage`` documents of ``config.system.preimages`` for ``keys``; ``None`` where there is none."""
    found: dict[PreImageKey, bytes] = {}
    for chunk in _pre_image_chunks(keys):
        found.update(connection.retrying(partial(_find_pre_images, connection, chunk)))
    return [found.get(key) for key in keys]


def _pre_image_chunks(keys: Iterable[PreImageKey]) -> Iterator[list[PreImageKey]]:
    chunk: list[PreImageKey] = []
    for key in sorted(set(keys)):
        if chunk and (
            len(chunk) == _CHUNK
            or key.collection_uuid != chunk[-1].collection_uuid
            or key.cluster_time.seconds - chunk[-1].cluster_time.seconds > _GAP_SECONDS_MAX
        ):
            yield chunk
            chunk = []
        chunk.append(key)
    if chunk:
        yield chunk


def _find_pre_images(connection: Connection, keys: Sequence[PreImageKey]) -> list[tuple[PreImageKey, bytes]]:
    ids = [
        {
            "nsUUID": Binary(key.collection_uuid, _UUID_SUBTYPE),
            "ts": key.cluster_time.to_timestamp(),
            "applyOpsIndex": Int64(key.apply_ops_index),
        }
        for key in keys
    ]
    query = {"_id": ids[0] if len(ids) == 1 else {"$in": ids}}
    documents = _find(connection, ("config", "system.preimages"), query, max(key.cluster_time for key in keys))
    return [pre_image(document) for document in documents]


def pre_image(stored: bytes) -> tuple[PreImageKey, bytes]:
    """The key and the image of one document of ``config.system.preimages``."""
    outer = {element.name: element for element in raw_bson.elements(stored)}
    key, image = outer.get(b"_id"), outer.get(b"preImage")
    if key is None or key.type != raw_bson.OBJECT or image is None or image.type != raw_bson.OBJECT:
        raise OplogFormatError("a stored pre-image without _id or preImage")
    parts = {element.name: raw_bson.value(stored, element) for element in raw_bson.elements(stored, key.value_start)}
    try:
        return (
            PreImageKey(
                parts[b"nsUUID"][5:],
                ClusterTime.from_bytes_le(parts[b"ts"]),
                int.from_bytes(parts[b"applyOpsIndex"], "little"),
            ),
            raw_bson.value(stored, image),
        )
    except KeyError as missing:
        raise OplogFormatError(f"a stored pre-image whose _id has no {missing}") from None


def current_documents(connection: Connection, lookups: Sequence[DocumentLookup]) -> list[bytes | None]:
    """The current document of each lookup, by namespace or by UUID; ``None`` where there is none or the collection is
    another.

    Raises ServerError 166 where a namespace is a view now, as the server does.
    """
    answer: list[bytes | None] = [None] * len(lookups)
    order = sorted(range(len(lookups)), key=lambda index: collection_of(lookups[index]))
    for (database, name, uuid), indexes in groupby(order, key=lambda index: collection_of(lookups[index])):
        wanted = list(indexes)
        of_one = [lookups[index] for index in wanted]
        found = _by_uuid(connection, database, uuid, of_one) if uuid else _by_name(connection, database, name, of_one)
        for index, document in zip(wanted, found, strict=True):
            answer[index] = document
    return answer


def collection_of(lookup: DocumentLookup) -> tuple[str, str, bytes]:
    """How the collection is named: by its name, or by its UUID."""
    if lookup.by_uuid:
        return lookup.database, "", lookup.collection_uuid or b""
    return lookup.database, lookup.collection, b""


def _by_name(connection: Connection, database: str, name: str, lookups: Sequence[DocumentLookup]) -> list[bytes | None]:
    answer: list[bytes | None] = [None] * len(lookups)
    target = connection.retrying(partial(_look_up_collection, connection, database, {"name": name}))
    if target is None:
        return answer
    known = [index for index, one in enumerate(lookups) if one.collection_uuid in (None, target.uuid)]
    documents = _in_chunks(connection, target, [lookups[index] for index in known])
    for index, document in zip(known, documents, strict=True):
        answer[index] = document
    return answer


def _by_uuid(
    connection: Connection, database: str, uuid: bytes, lookups: Sequence[DocumentLookup]
) -> list[bytes | None]:
    """The documents of the collection that has the UUID. A query by UUID would need a right that few users have, so its
    name is looked up before and after: if it is the same by both looks, the documents are that collection's."""
    look = partial(_look_up_collection, connection, database, {"info.uuid": Binary(uuid, _UUID_SUBTYPE)})
    target = connection.retrying(look)
    for _ in range(_RENAMES_MAX):
        if target is None:
            return [None] * len(lookups)
        documents = _in_chunks(connection, target, lookups)
        now = connection.retrying(look)
        if now == target:
            return documents
        target = now
    raise SourceError(
        f"a collection of {database} was renamed at each of {_RENAMES_MAX} attempts to look up a document",
        hint="Resume the stream when it keeps its name",
    )


def _in_chunks(connection: Connection, target: _Target, lookups: Sequence[DocumentLookup]) -> list[bytes | None]:
    documents: list[bytes | None] = []
    for start in range(0, len(lookups), _CHUNK):
        chunk = lookups[start : start + _CHUNK]
        documents += connection.retrying(partial(_find_or_refuse, connection, target, chunk))
    return documents


def refuse_view(connection: Connection, database: str, collection: str) -> None:
    """Raises ServerError 166 where the name is a view or a time-series collection now: no stream is opened on those.

    A user who may read the oplog but not list this database's collections is let through: nothing would come.
    """
    try:
        connection.retrying(partial(_look_up_collection, connection, database, {"name": collection}))
    except SourceError as error:
        if error.code not in _RIGHTS_CODES:
            raise


class _Target(NamedTuple):
    """A collection as it is now."""

    database: str
    collection: str
    uuid: bytes | None
    has_collation: bool


def _look_up_collection(connection: Connection, database: str, query: dict[str, Any]) -> _Target | None:
    """The one collection of the database that the query of ``listCollections`` finds."""
    try:
        target = connection.client[database]
    except InvalidName:
        return None  # "$x": the server opens a stream on it, but stores nothing there
    reply = target.command("listCollections", filter=query, read_preference=connection.client.read_preference)
    for entry in reply["cursor"]["firstBatch"]:
        if entry["type"] != "collection":
            kind = "a timeseries collection" if entry["type"] == "timeseries" else "a view, not a collection"
            raise ServerError(f"Namespace {database}.{entry['name']} is {kind}", code=166)
        uuid = entry.get("info", {}).get("uuid")
        return _Target(
            database,
            entry["name"],
            None if uuid is None else bytes(getattr(uuid, "bytes", uuid)),
            "collation" in entry.get("options", {}),
        )
    return None


def _find_or_refuse(connection: Connection, target: _Target, lookups: Sequence[DocumentLookup]) -> list[bytes | None]:
    """As ``_find_documents``; what the server has against the query itself ends the stream as its own would end."""
    try:
        return _find_documents(connection, target, lookups)
    except OperationFailure as error:
        if is_transient(error) or error.code in (None, *_RIGHTS_CODES):
            raise
        raise ServerError(str((error.details or {}).get("errmsg", error)), code=error.code) from None


def _find_documents(connection: Connection, target: _Target, lookups: Sequence[DocumentLookup]) -> list[bytes | None]:
    """The documents of one namespace: by ``$in`` on ``_id``, then one by one where equal need not mean equal bytes."""
    after = max(lookup.after for lookup in lookups)
    namespace = (target.database, target.collection)
    ids = [_id_of(lookup.document_key) for lookup in lookups]
    plain = list(dict.fromkeys(id_ for id_ in ids if id_ is not None))
    found: dict[tuple[int, bytes], bytes] = {}
    if plain:
        for document in _find(connection, namespace, _in_query(plain), after):
            id_ = raw_bson.find(document, b"_id")
            if id_ is not None:
                found[id_.type, raw_bson.value(document, id_)] = document
    stray = len(found.keys() - set(plain)) > 0
    number_types = {type_ for type_, _ in plain} & _NUMBERS
    result: list[bytes | None] = []
    for lookup, key in zip(lookups, ids, strict=True):
        document_found = None if key is None else found.get(key)
        if document_found is None and (
            key is None or stray or _may_equal_other_bytes(key[0], len(number_types) > 1, target.has_collation)
        ):
            query = _equal_query(lookup.document_key)
            document_found = next(iter(_find(connection, namespace, query, after, limit=1)), None)
        result.append(document_found)
    return result


def _may_equal_other_bytes(type_: int, mixed_numbers: bool, has_collation: bool) -> bool:
    """Whether a key that ``$in`` did not find by its bytes may stand for a document found for another key of the batch
    (3 and 3.0, or "a" and "A" under a collation)."""
    if type_ in _EQUAL_AS_BYTES:
        return False
    if type_ in _NUMBERS:
        return mixed_numbers
    return has_collation or type_ != raw_bson.STRING


def _id_of(document_key: bytes) -> tuple[int, bytes] | None:
    """Type and value of ``_id`` where the key is that alone; keys with shard key fields are looked up one by one."""
    elements = list(raw_bson.elements(document_key))
    if len(elements) != 1 or elements[0].name != b"_id":
        return None
    return elements[0].type, raw_bson.value(document_key, elements[0])


def _in_query(ids: Sequence[tuple[int, bytes]]) -> RawBSONDocument:
    if len(ids) == 1:
        return _equal_query(raw_bson.encode_document(raw_bson.encode_element(ids[0][0], b"_id", ids[0][1])))
    values = raw_bson.encode_document(
        *(raw_bson.encode_element(type_, b"%d" % index, value) for index, (type_, value) in enumerate(ids))
    )
    return RawBSONDocument(_document(b"_id", _document(b"$in", values, raw_bson.ARRAY)))


def _equal_query(document_key: bytes) -> RawBSONDocument:
    # $eq, since a bare object value could be read as operators
    return RawBSONDocument(
        raw_bson.encode_document(
            *(
                raw_bson.encode_element(
                    raw_bson.OBJECT,
                    element.name,
                    _document(b"$eq", raw_bson.value(document_key, element), element.type),
                )
                for element in raw_bson.elements(document_key)
            )
        )
    )


def _document(name: bytes, value: bytes, type_: int = raw_bson.OBJECT) -> bytes:
    return raw_bson.encode_document(raw_bson.encode_element(type_, name, value))


def _find(
    connection: Connection, namespace: tuple[str, str], query: Any, after: ClusterTime, *, limit: int = 0
) -> list[bytes]:
    """The documents that match, read at majority on a member that has reached ``after``."""
    try:
        collection = connection.majority(*namespace)
    except InvalidName:
        return list(_find_by_command(connection, namespace, {"filter": query, "limit": limit}, after))
    with (
        connection.session_after(after) as session,
        closing(collection.find_raw_batches(query, limit=limit, session=session)) as cursor,
    ):
        return [document for reply in cursor for document in raw_bson.split(reply)]


def _find_by_command(
    connection: Connection, namespace: tuple[str, str], find: dict[str, Any], after: ClusterTime
) -> Iterator[bytes]:
    """As ``_find`` for collections such as "c." and "a..b", which the server stores and PyMongo has no object for."""
    database, collection = namespace
    options: Any = {
        "codec_options": CodecOptions(document_class=RawBSONDocument),
        "read_preference": connection.client.read_preference,
    }
    concern = {"level": "majority", "afterClusterTime": after.to_timestamp()}
    with connection.client.start_session() as session:
        run = partial(connection.client[database].command, session=session, **options)
        cursor = run({"find": collection, **find, "batchSize": 2 * _CHUNK, "readConcern": concern})["cursor"]
        yield from (bytes(document.raw) for document in cursor["firstBatch"])
        while cursor["id"]:
            cursor = run({"getMore": Int64(cursor["id"]), "collection": collection})["cursor"]
            yield from (bytes(document.raw) for document in cursor["nextBatch"])
