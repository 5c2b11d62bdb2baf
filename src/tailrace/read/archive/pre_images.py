"""The stored pre-images of a range of cluster time, before the server lets them expire."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any, Final

from bson.binary import Binary
from bson.max_key import MaxKey
from bson.min_key import MinKey

from tailrace.core import raw_bson
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.plan.request import PreImageKey
from tailrace.errors import SourceError
from tailrace.read.source.connection import Connection
from tailrace.read.source.lookup import pre_image

_UUID: Final = 4
_UNAUTHORIZED: Final = 13


def stored_between(connection: Connection, after: ClusterTime, until: ClusterTime) -> list[tuple[PreImageKey, bytes]]:
    """The pre-images of operations with ``after`` < ts <= ``until``, which a majority must have committed.

    They are filed by collection and then by time, so each collection's part is one seek. Servers before 6.0 have none,
    and give nobody the right to look, not even ``root`` (5.0.4, 4.4.2): theirs are entries of the oplog.
    """
    try:
        return connection.retrying(lambda: list(_stored(connection, after, until)))
    except SourceError as error:
        # Asked only then, and each time: the deployment may have been upgraded meanwhile.
        if error.code != _UNAUTHORIZED or connection.retrying(connection.client.server_info)["versionArray"][0] >= 6:
            raise
        return []


def _stored(connection: Connection, after: ClusterTime, until: ClusterTime) -> Iterator[tuple[PreImageKey, bytes]]:
    stored = connection.majority("config", "system.preimages", after=until)
    uuid: bytes | None = None
    while (uuid := _next_collection(stored, uuid)) is not None:
        bounds = {
            "$gt": {"nsUUID": _binary(uuid), "ts": after.to_timestamp(), "applyOpsIndex": MaxKey()},
            "$lte": {"nsUUID": _binary(uuid), "ts": until.to_timestamp(), "applyOpsIndex": MaxKey()},
        }
        with closing(stored.find_raw_batches({"_id": bounds})) as cursor:
            for reply in cursor:
                for document in raw_bson.split(reply):
                    yield pre_image(document)


def _next_collection(stored: Any, after: bytes | None) -> bytes | None:
    """The UUID of the next collection that has pre-images; the first one's after ``None``."""
    bound = {"nsUUID": MinKey()} if after is None else {"nsUUID": _binary(after), "ts": MaxKey()}
    with closing(stored.find_raw_batches({"_id": {"$gt": bound}}, sort=[("_id", 1)], limit=1)) as found:
        raw: bytes = next(found, b"")
    return pre_image(raw)[0].collection_uuid if raw else None


def _binary(uuid: bytes) -> Binary:
    return Binary(uuid, _UUID)
