"""Pre-images and current documents: many at once, raw bytes, in the order asked."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from functools import partial
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
from bson.binary import Binary
from bson.raw_bson import RawBSONDocument
from pymongo.errors import InvalidName, OperationFailure

from tailrace.core import raw_bson
from tailrace.core.event.image import CollectionLookups, DocumentRuns, FoundDocuments, PreImageKeys
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.plan.request import AnswerTooLargeError, DocumentLookup, PreImageKey
from tailrace.errors import OplogFormatError, ServerError, SourceError
from tailrace.read.source.connection import Connection
from tailrace.read.source.failure import is_transient
from tailrace.read.source.raw_reply import RawReplyCursor

if TYPE_CHECKING:
    from tailrace.core.kernel.look_up import Keys

#: How many documents are asked for at a time, and how many bytes of document keys.
_CHUNK: Final = 4_000
_QUERY_BYTES: Final = 4 << 20
#: What one look-up in bulk may find. The kernel judges by the documents before how many it asks for at a time; where
#: they have grown since, it is made to ask for fewer. Any single document is found.
_FOUND_BYTES_MAX: Final = 64 << 20
_BSON_LENGTH: Final = struct.Struct("<i")
#: The names of an array's elements, with their NUL.
_ARRAY_NAMES: Final = tuple(b"%d\x00" % index for index in range(_CHUNK))
#: Attempts to read from a collection that is renamed meanwhile.
_RENAMES_MAX: Final = 20
#: A ``$in`` on the clustered key scans from its smallest to its largest key (explain, 6.0.27), so keys that lie further
#: apart than this are asked for separately.
_GAP_SECONDS_MAX: Final = 10
_UUID_SUBTYPE: Final = 4
#: The ``_id`` of a stored pre-image, and where its parts go; then how nearly every stored pre-image is laid out.
_PRE_IMAGE_ID: Final = raw_bson.encode_document(
    raw_bson.encode_element(raw_bson.BINARY, b"nsUUID", b"\x10\x00\x00\x00\x04" + bytes(16)),
    raw_bson.encode_element(raw_bson.TIMESTAMP, b"ts", bytes(8)),
    raw_bson.encode_element(raw_bson.INT64, b"applyOpsIndex", bytes(8)),
)
_PRE_IMAGE_KEY: Final = raw_bson.encode_document(raw_bson.encode_element(raw_bson.OBJECT, b"_id", _PRE_IMAGE_ID))
_PRE_IMAGE_ID_AT: Final = 9
_UUID_AT: Final = _PRE_IMAGE_ID_AT + 17
_TIME_AT: Final = _PRE_IMAGE_ID_AT + 37
_INDEX_AT: Final = _PRE_IMAGE_ID_AT + 60
_PRE_IMAGES: Final = ("config", "system.preimages")
_PRE_IMAGE_HEAD: Final = b"\x09operationTime\x00"
_PRE_IMAGE_NAME: Final = b"\x03preImage\x00"
_BEFORE_PRE_IMAGE: Final = _PRE_IMAGE_HEAD + bytes(8) + _PRE_IMAGE_NAME
#: Unauthorized and AuthenticationFailed: about the reader, not about the document.
_RIGHTS_CODES: Final = (13, 18)

_NUMBERS: Final = frozenset({raw_bson.INT32, raw_bson.INT64, raw_bson.DOUBLE, raw_bson.DECIMAL128})
#: Types whose values are equal for the server exactly when their bytes are.
_EQUAL_AS_BYTES: Final = frozenset(
    {raw_bson.OBJECT_ID, raw_bson.BINARY, raw_bson.DATE, raw_bson.TIMESTAMP, raw_bson.BOOL, raw_bson.NULL}
)

#: Sizes of an element ``_id`` by its type and name, where the type alone tells.
_ID_SIZES: Final = {
    b"%c_id\x00" % type_: 5 + size
    for type_, size in {
        raw_bson.OBJECT_ID: 12,
        raw_bson.INT32: 4,
        raw_bson.INT64: 8,
        raw_bson.DOUBLE: 8,
        raw_bson.DATE: 8,
        raw_bson.TIMESTAMP: 8,
        raw_bson.BOOL: 1,
    }.items()
}


def stored_pre_images(connection: Connection, keys: Sequence[PreImageKey]) -> Sequence[bytes | None]:
    """The ``preImage`` documents of ``config.system.preimages`` for ``keys``; ``None`` where there is none.

    Raises AnswerTooLargeError where those of ``PreImageKeys`` (the kernel asks) take more than ``_FOUND_BYTES_MAX``.
    """
    if not keys:
        return []
    columns = PreImageKeys.of(keys)
    in_bulk = columns is keys  # the kernel asks
    found: list[tuple[npt.NDArray[np.int64], Sequence[bytes | None]]] = []
    left = _FOUND_BYTES_MAX
    for chosen in _pre_image_chunks(columns):
        chunk = PreImageKeys(columns.uuids[chosen], columns.times[chosen], columns.indexes[chosen])
        find = partial(_find_pre_images, connection, chunk, bytes_max=left if in_bulk else None)
        images = connection.retrying(find)
        left -= images.data.size if isinstance(images, FoundDocuments) else 0
        found.append((chosen, images))
    gathered = FoundDocuments.gathered(len(keys), found)
    return gathered if in_bulk else list(gathered)


def _pre_image_ids(keys: PreImageKeys) -> DocumentRuns:
    """``{_id: ...}`` for the ``_id`` under which the server files each."""
    rows = np.tile(np.frombuffer(_PRE_IMAGE_KEY, np.uint8), (len(keys), 1))
    for place, column in ((_UUID_AT, keys.uuids), (_TIME_AT, keys.times), (_INDEX_AT, keys.indexes)):
        data = np.ascontiguousarray(column).view(np.uint8).reshape(len(keys), -1)
        rows[:, place : place + data.shape[1]] = data
    start = np.arange(len(keys), dtype=np.int64) * len(_PRE_IMAGE_KEY)
    return DocumentRuns(rows.reshape(-1), start, start + len(_PRE_IMAGE_KEY))


def _pre_image_chunks(keys: PreImageKeys) -> Iterator[npt.NDArray[np.int64]]:
    """Which keys are asked for together."""
    order = np.lexsort((keys.indexes, keys.times, keys.uuids[:, 1], keys.uuids[:, 0]))
    seconds = (keys.times[order] >> np.uint64(32)).astype(np.int64)
    breaks = (np.diff(keys.uuids[order], axis=0) != 0).any(axis=1) | (np.diff(seconds) > _GAP_SECONDS_MAX)
    for together in np.split(order, np.flatnonzero(breaks) + 1):
        for start in range(0, len(together), _CHUNK):
            yield together[start : start + _CHUNK]


def _find_pre_images(connection: Connection, keys: PreImageKeys, *, bytes_max: int | None) -> Sequence[bytes | None]:
    """``bytes_max``: the kernel asks, for no more than that."""
    after = ClusterTime(int(keys.times.max()))
    filed = _pre_image_ids(keys)
    if bytes_max is not None:
        asked = _keys_in_bulk(filed)
        query = _in_array(asked.elements)
        runs = _read(connection, _PRE_IMAGES, query, after, count=asked.different, bytes_max=bytes_max)
        found = asked.among(b"".join(runs), within=True)
        if found is not None:
            return found
    ids = [key[_PRE_IMAGE_ID_AT:-1] for key in filed]
    elements = b"".join(chain.from_iterable(zip(repeat(b"\x03"), _ARRAY_NAMES, ids)))
    documents = _find(connection, _PRE_IMAGES, _in_array(elements), after, count=len(ids))
    images = dict(map(_filed_pre_image, documents))
    return [images.get(id_) for id_ in ids]


def _filed_pre_image(stored: bytes) -> tuple[bytes, bytes]:
    """The ``_id`` and the image of one document of ``config.system.preimages``."""
    end = _PRE_IMAGE_ID_AT + len(_PRE_IMAGE_ID)
    image = end + len(_BEFORE_PRE_IMAGE)
    if (
        stored.startswith(_PRE_IMAGE_HEAD, end)
        and stored[image - len(_PRE_IMAGE_NAME) : image] == _PRE_IMAGE_NAME
        and image + _BSON_LENGTH.unpack_from(stored, image)[0] + 1 == len(stored)
    ):
        return stored[_PRE_IMAGE_ID_AT:end], stored[image:-1]
    key, document = pre_image(stored)
    return _pre_image_ids(PreImageKeys.of([key]))[0][_PRE_IMAGE_ID_AT:-1], document


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


def current_documents(connection: Connection, lookups: Sequence[DocumentLookup]) -> Sequence[bytes | None]:
    """The current document of each lookup, by namespace or by UUID; ``None`` where there is none or the collection is
    another.

    Raises ServerError 166 where a namespace is a view now, as the server does; AnswerTooLargeError where the documents
    of keys in one buffer (the kernel asks) take more than ``_FOUND_BYTES_MAX``.
    """
    if isinstance(lookups, CollectionLookups):
        return _of_collection(connection, lookups)
    answer: list[bytes | None] = [None] * len(lookups)
    for wanted in by_collection(lookups):
        of_one = CollectionLookups.of([lookups[index] for index in wanted])
        for index, document in zip(wanted, _of_collection(connection, of_one), strict=True):
            answer[index] = document
    return answer


def by_collection(lookups: Sequence[DocumentLookup]) -> list[list[int]]:
    """The places of the look-ups of each collection, named by its name or by its UUID."""
    if isinstance(lookups, CollectionLookups):
        return [list(range(len(lookups)))]
    places: dict[tuple[str, str, bytes | None], list[int]] = {}
    for index, lookup in enumerate(lookups):
        name = "" if lookup.by_uuid else lookup.collection
        places.setdefault((lookup.database, name, lookup.collection_uuid), []).append(index)
    return [places[name] for name in sorted(places, key=repr)]


def _of_collection(connection: Connection, lookups: CollectionLookups) -> Sequence[bytes | None]:
    return _by_uuid(connection, lookups) if lookups.by_uuid else _by_name(connection, lookups)


def _by_name(connection: Connection, lookups: CollectionLookups) -> Sequence[bytes | None]:
    look = partial(_look_up_collection, connection, lookups.database, {"name": lookups.collection})
    target = connection.retrying(look)
    if target is None or lookups.collection_uuid not in (None, target.uuid):
        return [None] * len(lookups)
    return _in_chunks(connection, target, lookups)


def _by_uuid(connection: Connection, lookups: CollectionLookups) -> Sequence[bytes | None]:
    """The documents of the collection that has the UUID. A query by UUID would need a right that few users have, so its
    name is looked up before and after: if it is the same by both looks, the documents are that collection's."""
    uuid = Binary(lookups.collection_uuid or b"", _UUID_SUBTYPE)
    look = partial(_look_up_collection, connection, lookups.database, {"info.uuid": uuid})
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
        f"a collection of {lookups.database} was renamed during each of {_RENAMES_MAX} attempts to look up a document",
        hint="Resume the stream when it is no longer being renamed",
    )


def _in_chunks(connection: Connection, target: _Target, lookups: CollectionLookups) -> Sequence[bytes | None]:
    keys = lookups.document_keys
    largest = int((keys.end - keys.start).max()) if isinstance(keys, DocumentRuns) else max(map(len, keys))
    size = max(1, min(_CHUNK, _QUERY_BYTES // largest))
    numbers = np.arange(len(lookups))
    found = []
    for start in range(0, len(lookups), size):
        chunk = lookups[start : start + size]
        documents = connection.retrying(partial(_find_or_refuse, connection, target, chunk))
        found.append((numbers[start : start + size], documents))
    return found[0][1] if len(found) == 1 else FoundDocuments.gathered(len(lookups), found)


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


def _find_or_refuse(connection: Connection, target: _Target, lookups: CollectionLookups) -> Sequence[bytes | None]:
    """As ``_find_documents``; what the server has against the query itself ends the stream as its own would end."""
    try:
        found = _find_in_bulk(connection, target, lookups)
        return _find_documents(connection, target, lookups) if found is None else found
    except OperationFailure as error:
        if is_transient(error) or error.code in (None, *_RIGHTS_CODES):
            raise
        raise ServerError(str((error.details or {}).get("errmsg", error)), code=error.code) from None


def _find_in_bulk(connection: Connection, target: _Target, lookups: CollectionLookups) -> FoundDocuments | None:
    """The documents by ``$in`` on ``_id``, where the kernel asks and equal ids have equal bytes; else ``None``."""
    if not isinstance(lookups.document_keys, DocumentRuns):
        return None
    keys = _keys_in_bulk(lookups.document_keys)
    if not keys.decided or any(
        _may_equal_other_bytes(type_, len(keys.types & _NUMBERS) > 1, target.has_collation) for type_ in keys.types
    ):
        return None
    namespace = (target.database, target.collection)
    query, most = _in_array(keys.elements), _FOUND_BYTES_MAX
    runs = _read(connection, namespace, query, lookups.after, count=keys.different, bytes_max=most)
    return keys.among(b"".join(runs))


def _keys_in_bulk(keys: DocumentRuns) -> Keys:
    from tailrace.core.kernel.look_up import Keys  # noqa: PLC0415  loaded by then: it is the kernel that asks

    return Keys(keys)


def _find_documents(connection: Connection, target: _Target, lookups: CollectionLookups) -> list[bytes | None]:
    """The documents of one namespace: by ``$in`` on ``_id``, then one by one where equal need not mean equal bytes.

    A key may have fields of the shard key in addition to ``_id``. No two documents of one server have the same ``_id``,
    so the document that is found by it is the key's, or the key has none there.
    """
    after = lookups.after
    namespace = (target.database, target.collection)
    keys = list(lookups.document_keys)
    ids = [_id_of(key) for key in keys]
    asked = list(dict.fromkeys(id_ for id_ in ids if id_ is not None))
    found: dict[bytes | None, bytes] = {}
    if asked:
        most = _FOUND_BYTES_MAX if isinstance(lookups.document_keys, DocumentRuns) else None
        for document in _find(connection, namespace, _in_query(asked), after, count=len(asked), bytes_max=most):
            found[_leading_id(document)] = document
    found.pop(None, None)
    stray = len(found.keys() - set(asked)) > 0
    mixed = len({id_[0] for id_ in asked} & _NUMBERS) > 1
    result: list[bytes | None] = [found.get(id_) for id_ in ids]
    for index, (key, id_) in enumerate(zip(keys, ids, strict=True)):
        current = result[index]
        if id_ is None:
            settled = False
        elif current is not None:
            settled = len(id_) + 5 == len(key) or _has_fields(current, key)
        else:
            settled = not (stray or _may_equal_other_bytes(id_[0], mixed, target.has_collation))
        if not settled:
            result[index] = next(iter(_find(connection, namespace, _equal_query(key), after, limit=1)), None)
    return result


def _may_equal_other_bytes(type_: int, mixed_numbers: bool, has_collation: bool) -> bool:
    """Whether a key that ``$in`` did not find by its bytes may stand for a document found for another key of the batch
    (3 and 3.0, or "a" and "A" under a collation)."""
    if type_ in _EQUAL_AS_BYTES:
        return False
    if type_ in _NUMBERS:
        return mixed_numbers
    return has_collation or type_ != raw_bson.STRING


def _id_of(document_key: bytes) -> bytes | None:
    """The element ``_id`` of a document key; ``None`` where it has none."""
    size = _ID_SIZES.get(document_key[4:9])
    if size is not None:
        return document_key[4 : 4 + size]
    element = raw_bson.find(document_key, b"_id")
    return None if element is None else document_key[element.start : element.end]


def _has_fields(document: bytes, document_key: bytes) -> bool:
    """Whether the document has every field of the key, under its dotted name, with the same bytes. If not, it may be
    the key's all the same: 1 equals 1.0, and a missing field equals null."""
    for element in raw_bson.elements(document_key):
        *outer, name = element.name.split(b".")
        start = 0
        for step in outer:
            inside = raw_bson.find(document, step, start)
            if inside is None or inside.type != raw_bson.OBJECT:
                return False
            start = inside.value_start
        field = raw_bson.find(document, name, start)
        same = field is not None and field.type == element.type != raw_bson.UNDEFINED
        if field is None or not same or raw_bson.value(document, field) != raw_bson.value(document_key, element):
            return False
    return True


def _leading_id(document: bytes) -> bytes | None:
    """The element ``_id`` of a document."""
    size = _ID_SIZES.get(document[4:9])
    if size is not None:
        return document[4 : 4 + size]
    id_ = raw_bson.find(document, b"_id")
    return None if id_ is None else document[id_.start : id_.end]


def _in_query(ids: Sequence[bytes]) -> RawBSONDocument:
    if len(ids) == 1:
        return _equal_query(raw_bson.encode_document(ids[0]))
    values = b"".join([id_[:1] + name + id_[5:] for id_, name in zip(ids, _ARRAY_NAMES, strict=False)])
    return _in_array(values)


def _in_array(elements: bytes) -> RawBSONDocument:
    """``{_id: {$in: [...]}}`` of an array's elements."""
    array = _BSON_LENGTH.pack(len(elements) + 5) + elements + b"\x00"
    return RawBSONDocument(_document(b"_id", _document(b"$in", array, raw_bson.ARRAY)))


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
    connection: Connection,
    namespace: tuple[str, str],
    query: Any,
    after: ClusterTime,
    *,
    limit: int = 0,
    count: int = 1,
    bytes_max: int | None = None,
) -> list[bytes]:
    """The documents that match; see ``_read``."""
    runs = _read(connection, namespace, query, after, limit=limit, count=count, bytes_max=bytes_max)
    return [document for run in runs for document in raw_bson.split(run)]


def _read(
    connection: Connection,
    namespace: tuple[str, str],
    query: Any,
    after: ClusterTime,
    *,
    limit: int = 0,
    count: int = 1,
    bytes_max: int | None = None,
) -> list[bytes]:
    """The documents that match, as runs of BSON, read at majority on a member that has reached ``after``; ``count`` are
    expected. Raises AnswerTooLargeError where they take more than ``bytes_max``."""
    collection = connection.majority(*namespace, after=after)
    # One more than there are, so that the first reply is the last one where it holds them all.
    options: dict[str, Any] = {"limit": limit} if limit else {"batch_size": count + 1}
    with closing(RawReplyCursor(collection, query, **options)) as cursor:
        return _bounded(cursor, bytes_max)


def _bounded(runs: Iterable[bytes], bytes_max: int | None) -> list[bytes]:
    """The runs, read to the end; given up, and closed by the caller, where they are too long."""
    found, left = [], bytes_max
    for run in runs:
        found.append(run)
        if left is not None:
            left -= len(run)
            if left < 0:
                raise AnswerTooLargeError
    return found
