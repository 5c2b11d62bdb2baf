"""More of ``captures``: writes of documents, and tokens; and all captures together."""

from __future__ import annotations

from typing import Any, Final

from bson.binary import Binary
from bson.decimal128 import Decimal128
from bson.objectid import ObjectId
from bson.timestamp import Timestamp

from tests.golden.captures import DEFINITIONS, FROM_7_0, Capture, Document, entry_of, time_of, token_of

# ── writes of documents ──────────────────────────────────────────────────────────────────────────────────────────────


def _write(
    operation_type: str, time: tuple[int, int, str], token: str, *, uuid: str, ns: tuple[str, str], **fields: Any
) -> tuple[Document, Document]:
    """An entry and its event. ``fields``: ``key``, ``o``, and of an update ``description`` and perhaps ``found``."""
    ts, wall = Timestamp(*time[:2]), time_of(time[2])
    key, written = fields["key"], fields["o"]
    letter = {"insert": "i", "delete": "d"}.get(operation_type, "u")
    other = {} if letter == "d" else {"o2": key}
    entry = entry_of(letter, ".".join(ns), ts, wall, ui=Binary(bytes.fromhex(uuid), 4), o=written, **other)
    event: Document = {
        "_id": token_of(token),
        "operationType": operation_type,
        "clusterTime": ts,
        "wallTime": wall,
    }
    if operation_type in ("insert", "replace"):
        event["fullDocument"] = written
    elif "found" in fields:
        event["fullDocument"] = fields["found"]
    event |= {"ns": {"db": ns[0], "coll": ns[1]}, "documentKey": key}
    if operation_type == "update":
        event["updateDescription"] = {**fields["description"], "truncatedArrays": []}
    return entry, event


def _capture(name: str, pair: tuple[Document, Document], **more: Any) -> Capture:
    entry, event = pair
    return Capture(name, (entry,), (event,), event["ns"]["db"], event["ns"]["coll"], **more)


def _document_token(time: str, uuid: str, type_: str, key: str) -> str:
    """A token of a write, of the parts that differ. ``key`` is the key string of ``_id``."""
    return (
        f"82{time}2B042C0100296E5A1004{uuid}463C6F7065726174696F6E54797065003C{type_.encode().hex().upper()}"
        f"0046646F63756D656E744B65790046{key}000004"
    )


_DATA_HEX = "413F85D5B4CF4680AA4D17641E9DF22D"
_DATA_ID = ObjectId("669683c2b0750b2c84893f3e")
_DATA_KEY = "645F69640064669683C2B0750B2C84893F3E"
_DATA = ("testdrive", "data")
_META = {"timestamp": time_of("2024-07-11T23:17:42"), "device": "foo"}
_FOUND = {"_id": _DATA_ID, "id": "5F9E", "data": {"temperature": 42.5}, "meta": _META}
_DROP_ENTRY = entry_of(
    "c",
    "testdrive.$cmd",
    Timestamp(1721140162, 5),
    time_of("2024-07-16T14:29:22.914"),
    ui=Binary(bytes.fromhex(_DATA_HEX), 4),
    o={"drop": "data"},
)
_DROP_TOKEN = f"82669683C2000000052B042C0100296%s5A1004{_DATA_HEX}463C6F7065726174696F6E54797065003C64726F70000004"
_DROP_TIMES = {"clusterTime": _DROP_ENTRY["ts"], "wallTime": _DROP_ENTRY["wall"]}
_CODEC = (
    _capture(
        "codec: insert",
        _write(
            "insert",
            (1721140162, 2, "2024-07-16T14:29:22.907"),
            _document_token("669683C200000002", _DATA_HEX, "insert", _DATA_KEY),
            uuid=_DATA_HEX,
            ns=_DATA,
            key={"_id": _DATA_ID},
            o={"_id": _DATA_ID, "id": "5F9E", "data": {"temperature": 42.42, "humidity": 84.84}, "meta": _META},
        ),
    ),
    _capture(
        "codec: update with updateLookup",
        _write(
            "update",
            (1721140162, 3, "2024-07-16T14:29:22.910"),
            _document_token("669683C200000003", _DATA_HEX, "update", _DATA_KEY),
            uuid=_DATA_HEX,
            ns=_DATA,
            key={"_id": _DATA_ID},
            o={"$v": 2, "diff": {"u": {"data": {"temperature": 42.5}}}},
            description={"updatedFields": {"data": {"temperature": 42.5}}, "removedFields": []},
            found=_FOUND,
        ),
        options={"fullDocument": "updateLookup"},
        documents={_DATA_ID: _FOUND},
        versions=(*FROM_7_0, "8.0.21", "8.1.0", "8.2.1"),  # the document comes last in 8.3
    ),
    _capture(
        "codec: replace",
        _write(
            "replace",
            (1721140162, 4, "2024-07-16T14:29:22.911"),
            _document_token("669683C200000004", _DATA_HEX, "replace", _DATA_KEY),
            uuid=_DATA_HEX,
            ns=_DATA,
            key={"_id": _DATA_ID},
            o={"_id": _DATA_ID, "tags": ["deleted"]},
        ),
    ),
    _capture(
        "codec: delete",
        _write(
            "delete",
            (1721144261, 3, "2024-07-16T15:37:41.831"),
            _document_token(
                "669693C500000003", "3D9AA2FA889C45049D2CDE4175242B7E", "delete", "645F69640064669693C5002EF91EA9C7A562"
            ),
            uuid="3D9AA2FA889C45049D2CDE4175242B7E",
            ns=_DATA,
            key={"_id": ObjectId("669693c5002ef91ea9c7a562")},
            o={"_id": ObjectId("669693c5002ef91ea9c7a562")},
        ),
    ),
    Capture(
        "codec: drop and invalidate",
        (_DROP_ENTRY,),
        (
            {
                "_id": token_of(_DROP_TOKEN % "E"),
                "operationType": "drop",
                **_DROP_TIMES,
                "ns": {"db": "testdrive", "coll": "data"},
            },
            {"_id": token_of(_DROP_TOKEN % "F"), "operationType": "invalidate", **_DROP_TIMES},
        ),
        *_DATA,
    ),
)


def _price(increment: int, id_: str, key: str, price: str) -> Capture:
    uuid = "A7F55A5B35BD4C7DB2CD56C6CFEA9C49"
    return _capture(
        f"quickstart: Decimal128 of the {id_}",
        _write(
            "update",
            (1700267321, increment, "2023-11-18T00:28:41.601"),
            _document_token(f"6558053900{increment:06X}", uuid, "update", key),
            uuid=uuid,
            ns=("test", "product"),
            key={"_id": id_},
            o={"$v": 2, "diff": {"u": {"price": Decimal128(price)}}},
            description={"updatedFields": {"price": Decimal128(price)}, "removedFields": []},
        ),
    )


_ENTITIES = ("RefData", "Entities")
_REFDATA = (
    _capture(
        "refdata: insert",
        _write(
            "insert",
            (1736793312, 2, "2025-01-13T18:35:12.212"),
            _document_token(
                "67855CE000000002", "394D1CDEF4AA4FB5AC600371893E6E98", "insert", "645F6964006467855CE01C6EB237197D1491"
            ),
            uuid="394D1CDEF4AA4FB5AC600371893E6E98",
            ns=_ENTITIES,
            key={"_id": ObjectId("67855ce01c6eb237197d1491")},
            o={
                "_id": ObjectId("67855ce01c6eb237197d1491"),
                "name": "myname1",
                "description": "my desc 1",
                "deleted_at": None,
                "some key": True,
            },
        ),
    ),
    _capture(
        "refdata: delete",
        _write(
            "delete",
            (1736807019, 1, "2025-01-13T22:23:39.475"),
            _document_token(
                "6785926B00000001", "F7759FD7E91B4070A19D647641B40BB2", "delete", "645F696400646785925BEC2196EEFA69AC15"
            ),
            uuid="F7759FD7E91B4070A19D647641B40BB2",
            ns=_ENTITIES,
            key={"_id": ObjectId("6785925bec2196eefa69ac15")},
            o={"_id": ObjectId("6785925bec2196eefa69ac15")},
        ),
    ),
    _capture(
        "refdata: replace",
        _write(
            "replace",
            (1736807346, 1, "2025-01-13T22:29:06.099"),
            _document_token(
                "678593B200000001",
                "F7759FD7E91B4070A19D647641B40BB2",
                "replace",
                "645F6964006467859332EC2196EEFA69AC16",
            ),
            uuid="F7759FD7E91B4070A19D647641B40BB2",
            ns=_ENTITIES,
            key={"_id": ObjectId("67859332ec2196eefa69ac16")},
            o={
                "_id": ObjectId("67859332ec2196eefa69ac16"),
                "name": "new myname1",
                "description": "my new desc 1",
                "deleted_at": None,
            },
        ),
    ),
    _capture(
        "refdata: update",
        _write(
            "update",
            (1736866349, 1, "2025-01-14T14:52:29.913"),
            _document_token(
                "67867A2D00000001", "136DA7DB84F74CBAAFFF0F382113F33A", "update", "645F696400646786797ED75765301BE8E23B"
            ),
            uuid="136DA7DB84F74CBAAFFF0F382113F33A",
            ns=_ENTITIES,
            key={"_id": ObjectId("6786797ed75765301be8e23b")},
            o={"$v": 2, "diff": {"d": {"description": False}, "u": {"name": "new name"}}},
            description={"updatedFields": {"name": "new name"}, "removedFields": ["description"]},
        ),
    ),
)

CAPTURES: Final[tuple[Capture, ...]] = (
    *DEFINITIONS,
    *_CODEC,
    _price(1, "beer", "3C5F6964003C6265657200", "3.00000000000000000"),
    _price(2, "wine", "3C5F6964003C77696E6500", "6.0000000000000000"),
    *_REFDATA,
)

#: Tokens that were shown without their events or entries, each with the cluster time that stands beside it or in it.
TOKENS: Final[tuple[tuple[str, Timestamp], ...]] = (
    # debezium/debezium, SourceInfoTest, from the server's manual: an event's, and a high-water mark.
    (
        "82635019A0000000012B042C0100296E5A1004AB1154ACACD849A48C61756D70D3B21F463C6F7065726174696F6E54797065003C696E73"
        "6572740046646F63756D656E744B65790046645F69640064635019A078BE67426D7CF4D2000004",
        Timestamp(1666193824, 1),
    ),
    ("8263515EAC000000022B0429296E1404", Timestamp(1666277036, 2)),
    # A Go package of resume tokens (resumetoken.Parse), 2026.
    (
        "826A8C8E62000000022B042C0100296E5A1004D802A00AB9E24901A92C71E85CC9ED82463C6F7065726174696F6E54797065003C696E73"
        "6572740046646F63756D656E744B65790046645F696400646A8C8E62C1EC1FE8858052CF000004",
        Timestamp(1787596386, 2),
    ),
    ("826A8C8E64000000012B0429296E1404", Timestamp(1787596388, 1)),
    # event-driven-io/emmett, the checkpoints of its MongoDB store, 2025.
    (
        "82687E94D4000000012B042C0100296E5A100461BBC0449CFA4531AE298EB6083F923A463C6F7065726174696F6E54797065003C757064"
        "6174650046646F63756D656E744B65790046645F69640064687E948DC5FE3CA1AF560962000004",
        Timestamp(0x687E94D4, 1),
    ),
    (
        "82687E949E000000012B042C0100296E5A100461BBC0449CFA4531AE298EB6083F923A463C6F7065726174696F6E54797065003C757064"
        "6174650046646F63756D656E744B65790046645F69640064687E948DC5FE3CA1AF560962000004",
        Timestamp(0x687E949E, 1),
    ),
    (
        "82687E948D000000032B042C0100296E5A100461BBC0449CFA4531AE298EB6083F923A463C6F7065726174696F6E54797065003C696E73"
        "6572740046646F63756D656E744B65790046645F69640064687E948DC5FE3CA1AF560962000004",
        Timestamp(0x687E948D, 3),
    ),
    # Podping's stream of its database, 2025.
    (
        "82680A4B16000000012B042C0100296E5A100427C3560459D34841BCB69B20139E3E3F463C6F7065726174696F6E54797065003C696E73"
        "6572740046646F63756D656E744B65790046645F69640064680A4B1689058837EB259D00000004",
        Timestamp(0x680A4B16, 1),
    ),
    # A tutorial of MongoDB on embeddings with Haystack, 2024.
    (
        "8266B518C6000000012B042C0100296E5A1004CDFFC2D506504F98B11EDBF328641438463C6F7065726174696F6E54797065003C696E73"
        "6572740046646F63756D656E744B65790046645F6964006466B518C657C4C7204E91E80F000004",
        Timestamp(1723144390, 1),
    ),
    # An event of a chat's change stream, in a comment of its client, 2024.
    (
        "82668D66E8000000102B042C0100296E5A10044405446A5054494FA89BB85C575AAE86463C6F7065726174696F6E54797065003C757064"
        "6174650046646F63756D656E744B65790046645F6964006466845AE51FF66D3C3CA338B5000004",
        Timestamp(0x668D66E8, 16),
    ),
    # A walk through the messages between mongot and mongod, April 2026.
    (
        "8269EEDD0D000000012B042C0100296E5A1004343A87E2D14843F68EE9F0BDD1A9E229463C6F7065726174696F6E54797065003C696E73"
        "6572740046646F63756D656E744B657900463C5F6964003C636F6465782D636170747572652D3137373732363138333737313200000004",
        Timestamp(1777261837, 1),
    ),
    # A Python package with events of each type (test-database), July 2024: a replace, and an invalidate.
    (
        "826692B5A8000000022B042C0100296E5A1004FC22C3AF7E40428CBD5D09FF3547FFF2463C6F7065726174696F6E54797065003C7265706C"
        "6163650046646F63756D656E744B65790046645F696400646692B4A31EDE014D28852865000004",
        Timestamp(1720890792, 2),
    ),
    (
        "826692B6D9000000012B042C0100296F5A1004FC22C3AF7E40428CBD5D09FF3547FFF2463C6F7065726174696F6E54797065003C64726F"
        "70000004",
        Timestamp(0x6692B6D9, 1),
    ),
)
