"""A target that is a sharded cluster: by which keys its collections are sharded, and how documents are named there.

Everything is written through a mongos, which sends each statement of a transaction to the shards that it concerns. It
finds a document of a sharded collection by the whole shard key, so each statement names that in addition to ``_id``;
and where a change gives a document another key, it is deleted and inserted in the one transaction.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import bson
from bson.codec_options import CodecOptions, DatetimeConversion
from pymongo import MongoClient
from pymongo.errors import PyMongoError

from tailrace.act.sync.catalog import CatalogCollection, name_of, truth_of
from tailrace.act.sync.target import answered
from tailrace.core import raw_bson
from tailrace.errors import SourceError
from tailrace.read.source.failure import source_error
from tailrace.read.source.shard_key import shard_key
from tailrace.read.source.topology import Cluster

#: A cluster renames sharded collections from this version on.
CLUSTER_SINCE: Final = (5, 0)
_ANY_VALUE: Final[CodecOptions[dict[str, Any]]] = CodecOptions(
    datetime_conversion=DatetimeConversion.DATETIME_AUTO, unicode_decode_error_handler="surrogateescape"
)


def is_router(client: MongoClient[Any]) -> bool:
    """Whether a client leads to a mongos. Raises SourceError where nobody answers."""
    try:
        return bool(client.admin.command("hello").get("msg") == "isdbgrid")
    except PyMongoError as error:
        raise source_error(error, client) from None


def keys_of(cluster: Cluster) -> dict[bytes, dict[str, Any]]:
    """The shard keys of a cluster's collections, by UUID, as the config server says now. Raises SinkError."""
    query, fields = {"dropped": {"$ne": True}}, {"uuid": 1, "key": 1}
    found = answered("list its shard keys", lambda: list(cluster.config_collection("collections").find(query, fields)))
    return {bytes(one["uuid"]): dict(one["key"]) for one in found if one.get("uuid") is not None}


def source_keys(source: MongoClient[Any] | Cluster) -> dict[bytes, dict[str, Any]]:
    """The shard keys of a source's collections, by UUID; none for a replica set."""
    if not isinstance(source, Cluster):
        return {}
    try:
        return keys_of(source)
    except PyMongoError as error:
        raise SourceError(f"the source's shard keys cannot be read: {error}") from error


def chosen_key(
    one: CatalogCollection,
    namespace: str,
    chosen: Mapping[str, Mapping[str, Any]],
    keys: Mapping[bytes, Mapping[str, Any]],
) -> Mapping[str, Any]:
    """By which key a collection is sharded on the target: the one that was asked for, or the source's; empty: by none.
    ``namespace``: its name on the source."""
    return chosen[namespace] if namespace in chosen else keys.get(one.uuid, {})


def refused_key(one: CatalogCollection, key: Mapping[str, Any]) -> Iterator[str]:
    """Why a collection cannot be sharded by a key on the target, and be the source's equal there."""
    if not key:
        return
    shown = ", ".join(f"{path}: {kind}" for path, kind in key.items())
    leave = f"Leave it unsharded there (--shard-key '{one.namespace}={{}}')"
    what = f"{one.namespace} cannot be sharded by {{{shown}}}"
    if one.kind != "collection" or one.is_capped:
        yield f"{what}: only a plain collection can be"
    elif one.has_collation:
        yield f"{what}: it has a collation, by which a cluster does not find its documents. {leave}"
    elif supporting_index(one, key) is None and dict(key) != {"_id": 1}:
        yield (
            f"{what}: it has no index for that, and the target would have one that the source lacks. Create one on "
            f"the source that begins with the key, and is neither unique, sparse nor partial; or else: {leave}"
        )
    else:
        for spec in one.indexes:
            if truth_of(spec, b"unique") and not _begins_with(spec, key):
                yield f"{what}: its unique index {name_of(spec)} does not begin with the key. {leave}"


def supporting_index(one: CatalogCollection, key: Mapping[str, Any]) -> bytes | None:
    """An index of a collection by which it can be sharded."""
    for spec in one.indexes:
        plain = not any(truth_of(spec, option) for option in (b"unique", b"prepareUnique", b"sparse", b"hidden"))
        odd = any(raw_bson.find(spec, option) for option in (b"partialFilterExpression", b"collation", b"wildcard"))
        if plain and not odd and _begins_with(spec, key) and raw_bson.find(spec, b"expireAfterSeconds") is None:
            return spec
    return None


def _begins_with(spec: bytes, key: Mapping[str, Any]) -> bool:
    element = raw_bson.find(spec, b"key")
    if element is None:
        return False
    fields = list(bson.decode(raw_bson.value(spec, element), _ANY_VALUE).items())
    return fields[: len(key)] == list(key.items())


def key_elements(document: bytes, paths: Sequence[str]) -> bytes:
    """A document's values of a shard key as elements of a query, each under its path: nothing is taken for operators.
    ``_id`` is not among them."""
    values = shard_key(document, dict.fromkeys(paths, 1), whole=False)
    assert values is not None
    return b"".join(
        raw_bson.encode_element(
            raw_bson.OBJECT,
            one.name,
            raw_bson.encode_document(raw_bson.encode_element(one.type, b"$eq", raw_bson.value(values, one))),
        )
        for one in raw_bson.elements(values)
        if one.name != b"_id"
    )
