"""Change events of servers that could not be run here, as people have shown them in public, and the oplog entries that
they were made of, rebuilt by us.

Values, tokens and the order of the fields are the servers' own; the entries are what a server of that version writes
for such a change. Where they come from:

``debezium``    debezium/debezium-design-documents, the design document on metadata events of MongoDB (DDD-73): a stream
                of 8.0.21 with showExpandedEvents. Six of its events are shown without token and times
``mongoshake``  alibaba/MongoShake, src/mongoshake/common/change_stream.go: events and entries in the comments, of
                mid-2025. A server of 7.0 or 8.0: tokens have version 2, and ``create`` has no ``nsType`` yet
``codec``       crate/commons-codec, tests/transform/test_mongodb.py: a stream with updateLookup, of July 2024
``quickstart``  mongodb-developer's tutorial on transactions in Java: two updates of a Decimal128, of November 2023
``refdata``     a public test suite in C# around ``BuildChangeRecord`` (SharedLibs.Utils.Tests.DbTests), of January 2025
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Final
from uuid import UUID

from bson.binary import Binary
from bson.int64 import Int64
from bson.timestamp import Timestamp

Document = dict[str, Any]

#: The first patch release of each series that a capture of that series may be of, and later series whose events are
#: the same as far as anybody knows.
FROM_7_0: Final = ("7.0.0", "7.0.28", "8.0.0")
LATER: Final = ("8.0.5", "8.0.21", "8.1.0", "8.2.1", "8.3.0")


@dataclass(frozen=True)
class Capture:
    """``entries``   the oplog entries, in order
    ``events``    what the stream gives for them
    ``database``, ``collection``  what it watches; without a collection, the database
    ``options``   of its ``$changeStream``
    ``documents`` what ``updateLookup`` finds, by ``_id``
    ``versions``  of the servers whose events these are
    """

    name: str
    entries: tuple[Document, ...]
    events: tuple[Document, ...]
    database: str
    collection: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    documents: Mapping[Any, Document] = field(default_factory=dict)
    versions: tuple[str, ...] = (*FROM_7_0, *LATER)


def _uuid(text: str) -> Binary:
    return Binary(UUID(text).bytes, 4)


def token_of(data: str, type_bits: str | None = None) -> Document:
    return {"_data": data} if type_bits is None else {"_data": data, "_typeBits": base64.b64decode(type_bits)}


def _ms(milliseconds: int) -> datetime:
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=milliseconds)


def time_of(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


def entry_of(operation: str, namespace: str, ts: Timestamp, wall: datetime, **more: Any) -> Document:
    return {"op": operation, "ns": namespace, **more, "ts": ts, "t": Int64(1), "v": Int64(2), "wall": wall}


EXPANDED: Final = {"showExpandedEvents": True}
#: Made by the old shell, whose numbers are doubles.
INDEX: Final = {"v": 2, "key": {"a": 1.0}, "name": "a_1"}

# ── debezium ─────────────────────────────────────────────────────────────────────────────────────────────────────────

_DDD = "ddd73_replica"
_ORDERS = Binary(base64.b64decode("rbPq/uvPQjaDvoz3y8fx0g=="), 4)
_ORDERS_HEX = "ADB3EAFEEBCF423683BE8CF7CBC7F1D2"
_OF_8_0 = ("8.0.21", "8.1.0", "8.2.1", "8.3.0")


def _validator(*required: str) -> Document:
    return {"$jsonSchema": {"bsonType": "object", "required": list(required)}}


def _of_orders(seconds: int, increment: int, wall_ms: int, description: Document, before: Document) -> Capture:
    """A collMod of the orders; the caller adds the token."""
    ts, wall = Timestamp(seconds, increment), _ms(wall_ms)
    stored = {f"{name}_old": value for name, value in before.items()}
    entry = entry_of("c", f"{_DDD}.$cmd", ts, wall, ui=_ORDERS, o={"collMod": "orders", **description}, o2=stored)
    event = {
        "operationType": "modify",
        "clusterTime": ts,
        "collectionUUID": _ORDERS,
        "wallTime": wall,
        "ns": {"db": _DDD, "coll": "orders"},
        "operationDescription": description,
        "stateBeforeChange": before,
    }
    return Capture("", (entry,), (event,), _DDD, options=EXPANDED, versions=_OF_8_0)


def _named(capture: Capture, name: str, token: Document) -> Capture:
    (event,) = capture.events
    changed = {"_id": token, **event}
    return Capture(
        name, capture.entries, (changed,), capture.database, capture.collection, capture.options, {}, capture.versions
    )


_MODIFY_VALIDATOR = _named(
    _of_orders(
        1789536869,
        2,
        1789536869926,
        {"validator": _validator("orderId", "customerId")},
        {"collectionOptions": {"uuid": _ORDERS, "validator": _validator("orderId")}},
    ),
    "debezium: modify of a validator",
    token_of(
        f"826AAA2A65000000022B042C0100296E5A1004{_ORDERS_HEX}463C6F7065726174696F6E54797065003C6D6F6469667900466F70657261"
        "74696F6E4465736372697074696F6E00464676616C696461746F72004646246A736F6E536368656D6100463C62736F6E54797065003C6F62"
        "6A6563740050726571756972656400503C6F726465724964003C637573746F6D6572496400000000000004"
    ),
)
_MODIFY_TTL = _named(
    _of_orders(
        1789536876,
        1,
        1789536876025,
        {"index": {"name": "expiresAt_1", "expireAfterSeconds": Int64(3600)}},
        {
            "collectionOptions": {
                "uuid": _ORDERS,
                "validator": _validator("orderId", "customerId"),
                "validationLevel": "strict",
                "validationAction": "error",
            },
            "indexOptions": {"expireAfterSeconds": Int64(7200)},
        },
    ),
    "debezium: modify of a TTL",
    token_of(
        f"826AAA2A6C000000012B042C0100296E5A1004{_ORDERS_HEX}463C6F7065726174696F6E54797065003C6D6F6469667900466F70657261"
        "74696F6E4465736372697074696F6E004646696E64657800463C6E616D65003C6578706972657341745F31001E6578706972654166746572"
        "5365636F6E6473002C1C2000000004",
        "ggAC",
    ),
)
_TO = {"db": _DDD, "coll": "orders_archive"}
_RENAME = Capture(
    "debezium: rename",
    (
        entry_of(
            "c",
            f"{_DDD}.$cmd",
            Timestamp(1789536882, 1),
            _ms(1789536882096),
            ui=_ORDERS,
            o={"renameCollection": f"{_DDD}.orders", "to": f"{_DDD}.orders_archive", "stayTemp": False},
        ),
    ),
    (
        {
            "to": _TO,
            "_id": token_of(
                f"826AAA2A72000000012B042C0100296E5A1004{_ORDERS_HEX}463C6F7065726174696F6E54797065003C72656E616D6500466F"
                "7065726174696F6E4465736372697074696F6E004646746F00463C6462003C64646437335F7265706C696361003C636F6C6C003C6"
                "F72646572735F617263686976650000000004"
            ),
            "operationType": "rename",
            "clusterTime": Timestamp(1789536882, 1),
            "collectionUUID": _ORDERS,
            "wallTime": _ms(1789536882096),
            "ns": {"db": _DDD, "coll": "orders"},
            "operationDescription": {"to": _TO},
        },
    ),
    _DDD,
    options=EXPANDED,
    versions=_OF_8_0,
)
_DROPPED = {"clusterTime": Timestamp(1789536888, 2), "wallTime": _ms(1789536888218)}
_DROP_DATABASE = Capture(
    "debezium: dropDatabase and invalidate",
    (entry_of("c", f"{_DDD}.$cmd", Timestamp(1789536888, 2), _ms(1789536888218), o={"dropDatabase": 1}),),
    (
        {
            "_id": token_of(
                "826AAA2A78000000022B042C0100296E14463C6F7065726174696F6E54797065003C64726F704461746162617365000004"
            ),
            "operationType": "dropDatabase",
            **_DROPPED,
            "ns": {"db": _DDD},
        },
        {
            "_id": token_of(
                "826AAA2A78000000022B042C0100296F14463C6F7065726174696F6E54797065003C64726F704461746162617365000004"
            ),
            "operationType": "invalidate",
            **_DROPPED,
        },
    ),
    _DDD,
    options=EXPANDED,
    versions=_OF_8_0,
)

# ── mongoshake ───────────────────────────────────────────────────────────────────────────────────────────────────────


def _of_mongoshake(
    operation_type: str,
    coll: str,
    uuid: str,
    time: tuple[int, int, str],
    description: Document,
    *,
    token: Document,
    versions: tuple[str, ...] = (*FROM_7_0, *LATER),
    before: Document | None = None,
    **written: Any,
) -> Capture:
    """``written`` are the fields of its entry: ``o``, ``o2`` and those that differ from a command's."""
    ts, wall = Timestamp(*time[:2]), time_of(time[2])
    entry = entry_of(written.pop("op", "c"), written.pop("ns", "zhongli.$cmd"), ts, wall, ui=_uuid(uuid), **written)
    event = {
        "_id": token,
        "operationType": operation_type,
        "clusterTime": ts,
        "collectionUUID": _uuid(uuid),
        "wallTime": wall,
        "ns": {"db": "zhongli", "coll": coll},
        "operationDescription": description,
        **({} if before is None else {"stateBeforeChange": before}),
    }
    name = f"mongoshake: {operation_type}"
    return Capture(name, (entry,), (event,), "zhongli", options=EXPANDED, versions=versions)


_TEST = "35e28893-3c82-45c6-b0e9-de829c0e5056"
_TEST_HEX = "35E288933C8245C6B0E9DE829C0E5056"
_SHARDED = "27fa47d5-cb18-49fc-aa44-46f4ef84ea28"
_RESHARDED = "87b05e81-60cf-4533-89cc-b05fc2e28bbe"
_CREATED = {
    "changeStreamPreAndPostImages": {"enabled": True},
    "idIndex": {"v": 2, "key": {"_id": 1}, "name": "_id_"},
}
_BUILT = [INDEX, {"v": 2, "key": {"b": 1.0}, "name": "b_1"}]
_HIDDEN = {"index": {"name": "a_1", "hidden": True}}
_SHARDING = {
    "shardKey": {"_id": "hashed"},
    "unique": False,
    "numInitialChunks": Int64(0),
    "presplitHashedZones": False,
}
_RESHARDING = {
    "reshardUUID": _uuid(_RESHARDED),
    "shardKey": {"_id": 1.0},
    "oldShardKey": {"_id": "hashed"},
    "unique": False,
}
_REFINING = {"shardKey": {"_id": 1.0, "id": 1.0}, "oldShardKey": {"_id": 1.0}}


def _announced(name: str, description: Document) -> Document:
    """A no-op of the sharding code."""
    return {
        "op": "n",
        "ns": "zhongli.shard_coll",
        "o": {"msg": {name: "zhongli.shard_coll"}},
        "o2": {name: "zhongli.shard_coll", **description},
    }


_MONGOSHAKE = (
    _of_mongoshake(
        "create",
        "test_create_collection",
        "7a321d57-77d9-4a89-8403-a1ce31511300",
        (1748505956, 1, "2025-05-29T08:05:56.479"),
        _CREATED,
        token=token_of(
            "8268381564000000012B042C0100296E5A10047A321D5777D94A898403A1CE31511300463C6F7065726174696F6E54797065003C6372"
            "6561746500466F7065726174696F6E4465736372697074696F6E0046466368616E676553747265616D507265416E64506F7374496D61"
            "67657300466E656E61626C6564006F00466964496E64657800461E76002B04466B657900461E5F6964002B02003C6E616D65003C5F69"
            "645F0000000004"
        ),
        versions=FROM_7_0,
        o={"create": "test_create_collection", **_CREATED},
    ),
    _of_mongoshake(
        "createIndexes",
        "test",
        _TEST,
        (1752828404, 6, "2025-07-18T08:46:44.506"),
        {"indexes": _BUILT},
        token=token_of(
            f"82687A09F4000000062B042C0100296E5A1004{_TEST_HEX}463C6F7065726174696F6E54797065003C637265617465496E64657865"
            "7300466F7065726174696F6E4465736372697074696F6E004650696E64657865730050461E76002B04466B657900461E61002B02003C"
            "6E616D65003C615F310000461E76002B04466B657900461E62002B02003C6E616D65003C625F31000000000004",
            "gwBCAA==",
        ),
        o={
            "commitIndexBuild": "test",
            "indexBuildUUID": _uuid("9a3b9266-1db3-441d-a6ae-49834897d26d"),
            "indexes": _BUILT,
        },
    ),
    _of_mongoshake(
        "dropIndexes",
        "test",
        _TEST,
        (1752829981, 2, "2025-07-18T09:13:01.975"),
        {"indexes": [INDEX]},
        token=token_of(
            f"82687A101D000000022B042C0100296E5A1004{_TEST_HEX}463C6F7065726174696F6E54797065003C64726F70496E646578657300"
            "466F7065726174696F6E4465736372697074696F6E004650696E64657865730050461E76002B04466B657900461E61002B02003C6E61"
            "6D65003C615F31000000000004",
            "ggAC",
        ),
        o={"dropIndexes": "test", "index": "a_1"},
        o2=INDEX,
    ),
    _of_mongoshake(
        "modify",
        "test",
        _TEST,
        (1752832608, 1, "2025-07-18T09:56:48.368"),
        _HIDDEN,
        token=token_of(
            f"82687A1A60000000012B042C0100296E5A1004{_TEST_HEX}463C6F7065726174696F6E54797065003C6D6F6469667900466F706572"
            "6174696F6E4465736372697074696F6E004646696E64657800463C6E616D65003C615F31006E68696464656E006F00000004"
        ),
        before={"collectionOptions": {"uuid": _uuid(_TEST)}, "indexOptions": {"hidden": False}},
        o={"collMod": "test", **_HIDDEN},
        o2={"collectionOptions_old": {"uuid": _uuid(_TEST)}, "indexOptions_old": {"hidden": False}},
    ),
    _of_mongoshake(
        "shardCollection",
        "shard_coll",
        _SHARDED,
        (1752854217, 35, "2025-07-18T15:56:57.510"),
        _SHARDING,
        token=token_of(
            "82687A6EC9000000232B042C0100296E5A100427FA47D5CB1849FCAA4446F4EF84EA28463C6F7065726174696F6E54797065003C7368"
            "617264436F6C6C656374696F6E00466F7065726174696F6E4465736372697074696F6E00464673686172644B657900463C5F6964003C"
            "68617368656400006E756E69717565006E1E6E756D496E697469616C4368756E6B7300296E70726573706C69744861736865645A6F6E"
            "6573006E000004",
            "ggAC",
        ),
        **_announced("shardCollection", _SHARDING),
    ),
    _of_mongoshake(
        "reshardCollection",
        "shard_coll",
        _SHARDED,
        (1753077090, 133, "2025-07-21T05:51:30.465"),
        _RESHARDING,
        token=token_of(
            "82687DD562000000852B042C0100296E5A100427FA47D5CB1849FCAA4446F4EF84EA28463C6F7065726174696F6E54797065003C7265"
            "7368617264436F6C6C656374696F6E00466F7065726174696F6E4465736372697074696F6E00465A7265736861726455554944005A10"
            "0487B05E8160CF453389CCB05FC2E28BBE4673686172644B657900461E5F6964002B0200466F6C6453686172644B657900463C5F6964"
            "003C68617368656400006E756E69717565006E000004",
            "goAA",
        ),
        **_announced("reshardCollection", _RESHARDING),
    ),
    _of_mongoshake(
        "refineCollectionShardKey",
        "shard_coll",
        _RESHARDED,
        (1753081423, 103, "2025-07-21T07:03:43.453"),
        _REFINING,
        token=token_of(
            "82687DE64F000000672B042C0100296E5A100487B05E8160CF453389CCB05FC2E28BBE463C6F7065726174696F6E54797065003C7265"
            "66696E65436F6C6C656374696F6E53686172644B657900466F7065726174696F6E4465736372697074696F6E00464673686172644B65"
            "7900461E5F6964002B021E6964002B0200466F6C6453686172644B657900461E5F6964002B0200000004",
            "goAK",
        ),
        **_announced("refineCollectionShardKey", _REFINING),
    ),
)

DEFINITIONS: Final[tuple[Capture, ...]] = (_MODIFY_VALIDATOR, _MODIFY_TTL, _RENAME, _DROP_DATABASE, *_MONGOSHAKE)

# ── events that are shown in part ────────────────────────────────────────────────────────────────────────────────────

_PART_HIDDEN = {"index": {"name": "orderId_1", "hidden": True}}
_PART_INDEX = {"v": 2, "key": {"orderId": 1}, "name": "orderId_1"}
_PART_SHARDING = {"shardKey": {"tenantId": 1}, "unique": False, "presplitHashedZones": False, "capped": False}
_PART_REFINING = {"shardKey": {"tenantId": 1, "orderId": 1}, "oldShardKey": {"tenantId": 1}}
_PART_RESHARDING = {
    "reshardUUID": Binary(base64.b64decode("qcRbVTfTSremL8Brgo5mSg=="), 4),
    "shardKey": {"regionId": 1},
    "oldShardKey": {"tenantId": 1, "orderId": 1},
    "unique": False,
    "numInitialChunks": Int64(2),
}


def _command(o: Document, **more: Any) -> Document:
    return {"op": "c", "ns": f"{_DDD}.$cmd", "ui": _ORDERS, "o": o, **more}


def _no_op(name: str, description: Document) -> Document:
    more = {"o": {"msg": {name: f"{_DDD}.orders"}}, "o2": {name: f"{_DDD}.orders", **description}}
    return {"op": "n", "ns": f"{_DDD}.orders", "ui": _ORDERS, **more}


#: ``debezium`` again: an entry without times, the type of its event, and the fields that are shown of it.
PARTS: Final[tuple[tuple[Document, str, Document], ...]] = (
    (
        _command(
            {"collMod": "orders", **_PART_HIDDEN},
            o2={"collectionOptions_old": {"uuid": _ORDERS}, "indexOptions_old": {"hidden": False}},
        ),
        "modify",
        {"operationDescription": _PART_HIDDEN},
    ),
    (
        _command({"commitIndexBuild": "orders", "indexBuildUUID": _ORDERS, "indexes": [_PART_INDEX]}),
        "createIndexes",
        {"operationDescription": {"indexes": [_PART_INDEX]}},
    ),
    (
        _command({"dropIndexes": "orders", "index": "orderId_1"}, o2={**_PART_INDEX, "hidden": True}),
        "dropIndexes",
        {"operationDescription": {"indexes": [{**_PART_INDEX, "hidden": True}]}},
    ),
    (_no_op("shardCollection", _PART_SHARDING), "shardCollection", {"operationDescription": _PART_SHARDING}),
    (
        _no_op("refineCollectionShardKey", _PART_REFINING),
        "refineCollectionShardKey",
        {"operationDescription": _PART_REFINING},
    ),
    (_no_op("reshardCollection", _PART_RESHARDING), "reshardCollection", {"operationDescription": _PART_RESHARDING}),
)
