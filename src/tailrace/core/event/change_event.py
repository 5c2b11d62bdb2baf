"""A change event between the stages, and its bytes: the fields in the order of the server's raw reply (semantics 2.4).

``H:`` fields come before ``_id``::

    [H: to | reshardingUUID] [H: txnNumber, lsid] _id operationType clusterTime [collectionUUID] [wallTime]
    [fullDocument] [ns] [documentKey] [operationDescription] [updateDescription | rawUpdateDescription]
    [stateBeforeChange] [nsType] [fullDocumentBeforeChange] [fullDocument of an update, from 8.3 on]
"""

from __future__ import annotations

from typing import Final, Literal, TypeAlias

from tailrace.core import raw_bson
from tailrace.core.event.image import PreImageKey
from tailrace.core.event.resume_token import ResumeToken
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.raw_bson import (
    BINARY,
    DATE,
    INT64,
    NULL,
    OBJECT,
    STRING,
    TIMESTAMP,
    encode_document,
    encode_element,
    encode_string,
)

#: Which fields that an event could have had keep a place in it, for a stage that sets one: all that its kind can have,
#: ``fullDocument`` and ``documentKey``, or none.
KeptPlaces: TypeAlias = Literal["all", "documents", "none"]
#: A document field that is there as BSON null (an image that was looked up and not found).
NULL_DOCUMENT: Final = b""

_UUID_PREFIX: Final = b"\x10\x00\x00\x00\x04"
_OPERATION_TYPE: Final[dict[str, bytes]] = {}


def _operation_type_element(name: str) -> bytes:
    """The operationType element; there are some twenty different ones in all, so each is built once."""
    element = _OPERATION_TYPE.get(name)
    if element is None:
        element = _OPERATION_TYPE[name] = encode_element(STRING, b"operationType", encode_string(name))
    return element


def encode_namespace(database: bytes, collection: bytes | None) -> bytes:
    """``{db, coll}``, or ``{db}`` where there is no collection (dropDatabase)."""
    parts = [encode_element(STRING, b"db", encode_string(database))]
    if collection is not None:
        parts.append(encode_element(STRING, b"coll", encode_string(collection)))
    return encode_document(*parts)


class ChangeEvent:
    """One change event. Documents are raw BSON; ``None`` is an absent field and ``NULL_DOCUMENT`` a null one.

    ``token_bson``        the ``_id`` document, ``{_data[, _typeBits]}``
    ``namespace``         (database, collection or ``None``) in bytes, or ``None`` where the event has no ``ns``
    ``shows_wall_time``   whether this server version's events carry ``wallTime``
    ``image_key``         where the pre-image is filed; ``None`` for events that have none
    ``logged_image``      the time of the entry that holds the pre-image, where the server has logged it (before 7.0)
    ``image_first``       whether the pre-image stands after ``fullDocument``, not at the end (before 6.0)
    ``image_comes_last``  ``fullDocument`` is put into the finished event, after all other fields
    ``bypasses``          no stage of the user's sees it: a message of the cluster to the merge, or a witness
    ``witness``           stands for an event in the search for the one resumed from, and is never given
    ``replaced_by``       the bytes that the user's stages made of the event, or a fragment of it; wins over all fields
    """

    __slots__ = (
        "bypasses",
        "cluster_time",
        "collection_uuid",
        "document_key",
        "from_invalidate",
        "full_document",
        "full_document_before_change",
        "image_comes_last",
        "image_first",
        "image_key",
        "logged_image",
        "lookup_uuid",
        "lsid",
        "namespace",
        "ns_type",
        "operation_description",
        "operation_type",
        "raw_update",
        "replaced_by",
        "resharding_uuid",
        "state_before_change",
        "swallow",
        "to",
        "token_bson",
        "txn_number",
        "update_description",
        "update_is_raw",
        "wall_time_ms",
        "witness",
    )

    def __init__(self, operation_type: str, cluster_time: ClusterTime, token_bson: bytes) -> None:
        self.operation_type = operation_type
        self.cluster_time = cluster_time
        self.token_bson = token_bson
        self.wall_time_ms: int | None = None
        self.namespace: tuple[bytes, bytes | None] | None = None
        self.to: tuple[bytes, bytes] | None = None
        self.resharding_uuid: bytes | None = None
        self.txn_number: int | None = None
        self.lsid: bytes | None = None
        self.collection_uuid: bytes | None = None
        self.document_key: bytes | None = None
        self.full_document: bytes | None = None
        self.full_document_before_change: bytes | None = None
        self.operation_description: bytes | None = None
        self.update_description: bytes | None = None
        self.update_is_raw = False
        self.raw_update: bytes | None = None
        self.state_before_change: bytes | None = None
        self.ns_type: str | None = None
        self.image_comes_last = False
        self.image_key: PreImageKey | None = None
        self.logged_image: ClusterTime | None = None
        self.image_first = False
        self.lookup_uuid: bytes | None = None
        self.from_invalidate = False
        self.swallow = False
        self.bypasses = False
        self.witness = False
        self.replaced_by: bytes | None = None

    @property
    def token(self) -> ResumeToken:
        """The resume token, parsed."""
        return ResumeToken.parse(self.token_bson)

    @property
    def database(self) -> str | None:
        return None if self.namespace is None else self.namespace[0].decode("utf-8", "replace")

    @property
    def collection(self) -> str | None:
        if self.namespace is None or self.namespace[1] is None:
            return None
        return self.namespace[1].decode("utf-8", "replace")

    def to_bson(self) -> bytes:
        """The exact event: what the server's reply holds for it."""
        if self.replaced_by is not None:
            return self.replaced_by
        parts: list[bytes] = []
        self._add_header(parts)
        parts.append(b"\x03_id\x00" + self.token_bson)
        parts.append(_operation_type_element(self.operation_type))
        parts.append(b"\x11clusterTime\x00" + self.cluster_time.to_bytes_le())
        if self.collection_uuid is not None:
            parts.append(encode_element(BINARY, b"collectionUUID", _UUID_PREFIX + self.collection_uuid))
        if self.wall_time_ms is not None:
            parts.append(encode_element(DATE, b"wallTime", raw_bson.encode_int64(self.wall_time_ms)))
        self._add_body(parts)
        return encode_document(*parts)

    def _add_header(self, parts: list[bytes]) -> None:
        if self.to is not None:
            parts.append(encode_element(OBJECT, b"to", encode_namespace(*self.to)))
        if self.resharding_uuid is not None:
            parts.append(encode_element(BINARY, b"reshardingUUID", self.resharding_uuid))
        if self.txn_number is not None:
            parts.append(encode_element(INT64, b"txnNumber", raw_bson.encode_int64(self.txn_number)))
        if self.lsid is not None:
            parts.append(encode_element(OBJECT, b"lsid", self.lsid))

    def _add_body(self, parts: list[bytes]) -> None:
        if self.full_document is not None and not self.image_comes_last:
            parts.append(_document_element(b"fullDocument", self.full_document))
        before = self.full_document_before_change
        if before is not None and self.image_first:
            parts.append(_document_element(b"fullDocumentBeforeChange", before))
        if self.namespace is not None:
            parts.append(encode_element(OBJECT, b"ns", encode_namespace(*self.namespace)))
        if self.document_key is not None:
            parts.append(encode_element(OBJECT, b"documentKey", self.document_key))
        if self.operation_description is not None:
            parts.append(encode_element(OBJECT, b"operationDescription", self.operation_description))
        if self.update_description is not None:
            name = b"rawUpdateDescription" if self.update_is_raw else b"updateDescription"
            parts.append(encode_element(OBJECT, name, self.update_description))
        if self.state_before_change is not None:
            parts.append(encode_element(OBJECT, b"stateBeforeChange", self.state_before_change))
        if self.ns_type is not None:
            parts.append(encode_element(STRING, b"nsType", encode_string(self.ns_type)))
        if before is not None and not self.image_first:
            parts.append(_document_element(b"fullDocumentBeforeChange", before))
        if self.full_document is not None and self.image_comes_last:
            parts.append(_document_element(b"fullDocument", self.full_document))

    def describe(self) -> str:
        """The event in the server's words for its messages (semantics 5): type, namespace, time, transaction."""
        database, collection = self.database, self.collection
        coll = "" if collection is None else f', coll: "{collection}"'
        txn = "" if self.txn_number is None else f", txnNumber: {self.txn_number}"
        return (
            f'{{operationType: "{self.operation_type}", ns: {{db: "{database}"{coll}}}, '
            f"clusterTime: {self.cluster_time.for_programs()}{txn}}}"
        )


def _document_element(name: bytes, document: bytes) -> bytes:
    if document == NULL_DOCUMENT:
        return encode_element(NULL, name, b"")
    return encode_element(OBJECT, name, document)


def encode_cluster_time(cluster_time: ClusterTime) -> bytes:
    """The clusterTime element."""
    return encode_element(TIMESTAMP, b"clusterTime", cluster_time.to_bytes_le())
