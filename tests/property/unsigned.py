"""Cluster times as members without access control send and take them: without a signature."""

from __future__ import annotations

from typing import Final

from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.raw_bson import (
    BINARY,
    INT64,
    OBJECT,
    TIMESTAMP,
    encode_document,
    encode_element,
    encode_int32,
    encode_int64,
)

#: The signature of a deployment without keys: a hash of zeros under the key 0.
_UNSIGNED: Final = encode_document(
    encode_element(BINARY, b"hash", encode_int32(20) + b"\x00" + bytes(20)),
    encode_element(INT64, b"keyId", encode_int64(0)),
)


def unsigned_document(cluster_time: ClusterTime) -> bytes:
    """The ``$clusterTime`` document of a time without a signature."""
    return encode_document(
        encode_element(TIMESTAMP, b"clusterTime", cluster_time.to_bytes_le()),
        encode_element(OBJECT, b"signature", _UNSIGNED),
    )
