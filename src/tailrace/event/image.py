"""How the documents around an event are named: its pre-image, and its current document (semantics 5)."""

from __future__ import annotations

from typing import NamedTuple

from tailrace.oplog.cluster_time import ClusterTime


class PreImageKey(NamedTuple):
    """The key of a pre-image in ``config.system.preimages`` (semantics 5): collection UUID (16 bytes), cluster time of
    the oplog entry that holds the operation, index within that entry's applyOps (0 for a plain entry)."""

    collection_uuid: bytes
    cluster_time: ClusterTime
    apply_ops_index: int


class DocumentLookup(NamedTuple):
    """A current document (``fullDocument: "updateLookup"``): namespace, document key (BSON), the event's cluster time
    (read after it, at majority) and the collection's UUID where it must match (else ``None``).

    ``by_uuid``  the collection is the one with the UUID, whatever it is called now in its database
    """

    database: str
    collection: str
    document_key: bytes
    after: ClusterTime
    collection_uuid: bytes | None
    by_uuid: bool = False
