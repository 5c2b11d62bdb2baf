"""Oplog entries that no client can make a server write: those of migrations and resharding, those of older and newer
versions, and malformed ones. They are inserted into a gap in the oplog while the member runs as a standalone server.
Once it is a member of its replica set again, they are read through the server's own change streams.
"""

from __future__ import annotations

import datetime
import tempfile
import time
from typing import Any

from bson.binary import Binary
from bson.int64 import Int64
from bson.timestamp import Timestamp

from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.embedded import Mongod, ReplicaSet
from tailrace.embedded.binary import find_mongod
from tests.differential.execute import note
from tests.differential.native import aggregate, read
from tests.differential.wire import Wire
from tests.golden import recording

Entry = dict[str, Any]
_UUID = Binary(bytes(range(16)), 4)
_OTHER_UUID = Binary(bytes(range(16, 32)), 4)
HARMLESS: Entry = {"op": "n", "ns": "", "o": {"msg": "crafted"}}
_SESSION = {"id": Binary(b"s" * 16, 4), "uid": b"u" * 32}
_NULL_OP_TIME = {"ts": Timestamp(0, 0), "t": Int64(-1)}
GAP_S = 3


def _entry(op: str, o: Any, *, ns: str = "gr.c", **more: Any) -> Entry:
    return {"op": op, "ns": ns, "ui": _UUID, "o": o, **more}


def _command(o: Any, *, ns: str = "gr.$cmd", **more: Any) -> Entry:
    return _entry("c", o, ns=ns, **more)


def apply_ops(*operations: Any, session: bool = True, **more: Any) -> Entry:
    extra = {"lsid": _SESSION, "txnNumber": Int64(5), "prevOpTime": _NULL_OP_TIME} if session else {}
    entry = {"op": "c", "ns": "admin.$cmd", "o": {"applyOps": list(operations)}, **extra}
    return entry | more


def _no_op(o2: Any, *, ns: str = "gr.c", **more: Any) -> Entry:
    return _entry("n", {"msg": "crafted"}, ns=ns, o2=o2, **more)


def insert(id_: Any, **more: Any) -> Entry:
    return _entry("i", {"_id": id_, "x": 5}, **{"o2": {"_id": id_}, **more})


def _update(o: Any, **more: Any) -> Entry:
    return _entry("u", o, **{"o2": {"_id": 1}, **more})


#: Entries of real servers: each is read by every kind of stream, all in one go.
WHOLE: tuple[Entry, ...] = (
    insert(1),
    insert(2, fromMigrate=True),
    _update({"$v": 2, "diff": {"u": {"x": 1}}}, fromMigrate=True),
    _entry("d", {"_id": 1}, fromMigrate=True),
    _command({"create": "c2", "idIndex": {"v": 2}}, fromMigrate=True),
    _command({"createIndexes": "c2", "v": 2, "key": {"a": 1}, "name": "a_1"}, fromMigrate=True),
    _command({"drop": "c2"}, fromMigrate=True, o2={"numRecords": 1}),
    _entry("i", {"_id": 3, "x": 1}),
    _entry("i", {"_id": 4, "x": 5}, o2={"x": 5, "_id": 4}),
    _entry("d", {"x": 5, "_id": 4}, o2={"_id": 9}),
    _update({"$v": 2, "diff": {"i": {"y": 1}}}, o2={"x": 5, "_id": 4}),
    _update({"$v": 1, "$set": {"a": 1, "b.c": 2}, "$unset": {"d": True, "e.f": True}}),
    _update({"$set": {"a": 1}}),
    _update({"$v": 1, "$unset": {"d": True}, "$set": {"a": {"b": 1}}}),
    _update({"_id": 1, "replaced": True}),
    _update({"_id": 1, "$v": 1, "x": 1}),
    _no_op({"shardCollection": "gr.c", "shardKey": {"x": 1}, "unique": False, "numInitialChunks": Int64(0)}),
    _no_op({"refineCollectionShardKey": "gr.c", "shardKey": {"x": 1, "y": 1}, "oldShardKey": {"x": 1}}),
    _no_op(
        {
            "reshardCollection": "gr.c",
            "reshardUUID": _OTHER_UUID,
            "shardKey": {"z": "hashed"},
            "oldShardKey": {"x": 1},
            "unique": False,
            "numInitialChunks": Int64(4),
        }
    ),
    _no_op({"migrateLastChunkFromShard": "gr.c", "shardId": "sh0"}),
    _no_op({"type": "migrateChunkToNewShard", "from": "sh0", "to": "sh1"}),
    _no_op({"type": "reshardBegin", "reshardingUUID": _OTHER_UUID}),
    _no_op({"type": "reshardDoneCatchUp", "reshardingUUID": _OTHER_UUID}),
    _no_op({"migrateChunkToNewShard": "gr.c", "fromShardId": "sh0", "toShardId": "sh1"}),
    _no_op({"moveChunk": "gr.c", "donor": "sh0", "recipient": "sh1"}),
    _no_op({"reshardBegin": "gr.c", "reshardingUUID": _OTHER_UUID}),
    apply_ops({"op": "d", "ns": "gr.c", "ui": _UUID, "o": {"_id": 1}}, session=False),
    apply_ops({"op": "i", "ns": "gr.c", "ui": _UUID, "o": {"_id": 7}, "o2": {"_id": 7}}, multiOpType=1),
    apply_ops(
        {"op": "i", "ns": "gr.c", "ui": _UUID, "o": {"_id": 8}, "o2": {"_id": 8}, "fromMigrate": True},
        {"op": "i", "ns": "gr.c", "ui": _UUID, "o": {"_id": 9}, "o2": {"_id": 9}},
        {"op": "c", "ns": "gr.$cmd", "ui": _OTHER_UUID, "o": {"drop": "other"}},
        {"op": "c", "ns": "gr.$cmd", "ui": _OTHER_UUID, "o": {"create": "made"}},
        {"op": "u", "ns": "gr.c", "ui": _UUID, "o": {"$v": 2, "diff": {"d": {"x": False}}}, "o2": {"_id": 9}},
    ),
    _command({"startIndexBuild": "c", "indexBuildUUID": _OTHER_UUID, "indexes": [{"v": 2, "key": {"a": 1}}]}),
    _command({"abortIndexBuild": "c", "indexBuildUUID": _OTHER_UUID, "indexes": [], "cause": {"ok": False}}),
    _command({"commitIndexBuild": "c", "indexBuildUUID": _OTHER_UUID, "indexes": [{"v": 2, "name": "a_1"}]}),
    _command({"emptycapped": "c"}),
    _command({"dbCheck": "gr.c", "type": "batch"}),
    _command({"collMod": "c", "validator": {"x": 1}}, o2={"collectionOptions_old": {"uuid": _UUID}}),
    _command({"collMod": "c", "x": 1}, o2={"collectionOptions_old": {}, "indexOptions_old": {}}),
    _command({"dropIndexes": "c", "index": "a_1"}, o2={"v": 2, "key": {"a": 1}, "name": "a_1"}),
    _command({"renameCollection": "gr.q", "to": "grr.c", "stayTemp": False}),
    insert(99),
)

#: Of 7.0: index builds, and what resharding writes into its own collection.
SINCE_7_0: tuple[Entry, ...] = (
    _command({"startIndexBuild": "c", "indexBuildUUID": _OTHER_UUID, "indexes": [{"v": 2, "key": {"a": 1}}]}),
    _command({"startIndexBuild": "c2", "indexBuildUUID": _OTHER_UUID, "indexes": []}, fromMigrate=True),
    {**insert(5), "ns": "gr.system.resharding.x"},
    {**insert(6), "ns": "gr.system.reshardings"},
    _no_op({"reshardDoneCatchUp": "gr.c", "reshardingUUID": _OTHER_UUID}, fromMigrate=True),
)

#: Entries that break their format: each is read alone, from its own time.
BROKEN: dict[str, Entry] = {
    "sections out of order": _update({"$v": 2, "diff": {"i": {"a": 1}, "u": {"b": 1}}}),
    "deletes after inserts": _update({"$v": 2, "diff": {"i": {"a": 1}, "d": {"b": False}}}),
    "empty diff": _update({"$v": 2, "diff": {}}),
    "unknown section": _update({"$v": 2, "diff": {"z": {"a": 1}}}),
    "section before a sub-diff of a later letter": _update({"$v": 2, "diff": {"sa": {"u": {"b": 1}}, "i": {"c": 1}}}),
    "empty sub-diff": _update({"$v": 2, "diff": {"sa": {}}}),
    "sub-diff that is no object": _update({"$v": 2, "diff": {"sa": 1}}),
    "section that is no object": _update({"$v": 2, "diff": {"u": 1}}),
    "no diff": _update({"$v": 2}),
    "diff that is no object": _update({"$v": 2, "diff": 1}),
    "$v of 3 with a diff": _update({"$v": 3, "diff": {"u": {"a": 1}}}),
    "$v as int64": _update({"$v": Int64(2), "diff": {"u": {"a": 1}}}),
    "$v as double": _update({"$v": 2.0, "diff": {"u": {"a": 1}}}),
    "$v as string": _update({"$v": "2", "diff": {"u": {"a": 1}}}),
    "replacement with $v of 2": _update({"_id": 1, "$v": 2, "x": 1}),
    "replacement with $v null": _update({"_id": 1, "$v": None, "x": 1}),
    "array diff without its mark": _update({"$v": 2, "diff": {"sa": {"u0": 1}}}),
    "array diff marked false": _update({"$v": 2, "diff": {"sa": {"a": False, "u0": 1}}}),
    "array diff with a strange entry": _update({"$v": 2, "diff": {"sa": {"a": True, "x0": 1}}}),
    "array diff with a strange index": _update({"$v": 2, "diff": {"sa": {"a": True, "ux": 1}}}),
    "array diff with a long length": _update({"$v": 2, "diff": {"sa": {"a": True, "l": Int64(2)}}}),
    "array diff with a text length": _update({"$v": 2, "diff": {"sa": {"a": True, "l": "2"}}}),
    "array diff with only its mark": _update({"$v": 2, "diff": {"sa": {"a": True}}}),
    "array sub-diff that is no object": _update({"$v": 2, "diff": {"sa": {"a": True, "s0": 1}}}),
    "insert without ui": {key: value for key, value in insert(1).items() if key != "ui"},
    "update without ui": {key: value for key, value in _update({"$set": {"a": 1}}).items() if key != "ui"},
    "delete without ui": {key: value for key, value in _entry("d", {"_id": 1}).items() if key != "ui"},
    "drop without ui": {key: value for key, value in _command({"drop": "c"}).items() if key != "ui"},
    "update without o2": _entry("u", {"$v": 2, "diff": {"u": {"a": 1}}}),
    "insert without _id": _entry("i", {"x": 1}),
    "insert with o2 of another type": _entry("i", {"_id": 1}, o2=5),
    "delete of an empty document": _entry("d", {}),
    "o that is no object": _entry("i", 5),
    "dropIndexes without o2": _command({"dropIndexes": "c", "index": "a_1"}),
    "collMod without o2": _command({"collMod": "c", "validator": {}}),
    "drop of a number": _command({"drop": 5}),
    "rename to a number": _command({"renameCollection": "gr.c", "to": 5}),
    "rename without to": _command({"renameCollection": "gr.c"}),
    "commitIndexBuild without indexes": _command({"commitIndexBuild": "c"}),
    "unknown letter": _entry("y", {"_id": 1}),
    "unknown letters": _entry("xi", {"_id": 1}),
    "a command of no known name": _command({"refresh": "c"}),
    "no-op inside a transaction": apply_ops(
        {"op": "i", "ns": "gr.c", "ui": _UUID, "o": {"_id": 1}, "o2": {"_id": 1}},
        {"op": "n", "ns": "gr.c", "ui": _UUID, "o": {"msg": 1}, "o2": {"shardCollection": "gr.c"}},
    ),
    "an operation that is no object": apply_ops({"op": "i", "ns": "gr.c", "ui": _UUID, "o": {"_id": 1}}, 5),
    "a transaction whose chain is cut": apply_ops(
        {"op": "i", "ns": "gr.c", "ui": _UUID, "o": {"_id": 1}, "o2": {"_id": 1}},
        prevOpTime={"ts": Timestamp(7, 7), "t": Int64(1)},
    ),
    "wall of another type": insert(1, wall=5),
    "fromMigrate as a number": insert(1, fromMigrate=1),
}


def record_crafted(version: str, *, broken: bool) -> dict[str, Any]:
    """A recording of ``WHOLE`` or of ``BROKEN``. An entry that ends the server's process is left out of the streams."""
    entries = list(BROKEN.values()) if broken else _whole(version)
    with tempfile.TemporaryDirectory(prefix="tailrace-") as directory:
        with ReplicaSet(version=version, data_dir=directory) as deployment, Wire.to(deployment.uri) as wire:
            before = note(wire, "the gap begins")
            time.sleep(GAP_S)
            end = note(wire, "the gap ends")
            member = deployment.members[0]
        if broken:  # a stream must begin with an entry that is whole: the server parses the first one apart
            entries = [entry for one in entries for entry in (HARMLESS, one)]
        gap = placed(entries, before)
        write(member, gap)
        with ReplicaSet(version=version, data_dir=directory, enable_test_commands=True) as deployment:
            streams = _broken_streams(deployment, gap) if broken else _whole_streams(deployment, before, end)
            with Wire.to(deployment.uri) as wire:
                window = {"ts": {"$gt": before.to_timestamp(), "$lte": end.to_timestamp()}}
                cursor = wire.run("local", {"find": "oplog.rs", "filter": window, "batchSize": 1000})["cursor"]
    workload = "broken_entries" if broken else "crafted_entries"
    return {
        "server": version,
        "workload": workload,
        "note": (__doc__ or "").strip(),
        "oplog": list(cursor["firstBatch"]),
        "preImages": [],
        "documents": [],
        "streams": streams,
    }


def _whole(version: str) -> list[Entry]:
    """``WHOLE``; for 7.0 without the updates that end its streams, and with what only it makes events of."""
    if int(version.partition(".")[0]) < 7:
        return list(WHOLE)
    return [*(one for one in WHOLE if one["op"] != "u" or not _is_old(one["o"])), *SINCE_7_0]


def _is_old(update: dict[str, Any]) -> bool:
    return update.get("$v", 2) != 2 or not update.keys() & {"$v", "_id"}


def placed(entries: list[Entry], before: ClusterTime) -> list[Entry]:
    wall = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
    return [
        {
            **entry,
            "ts": Timestamp(before.seconds + 1, number),
            "t": Int64(1),
            "v": Int64(2),
            "wall": entry.get("wall", wall),
        }
        for number, entry in enumerate(entries, start=1)
    ]


def write(member: Mongod, entries: list[Entry], *, version: str | None = None) -> None:
    """Into the oplog of the stopped member, through a standalone server on its files, of another version if one is
    named: a mongod 5.0.4 ends where a write is older than its checkpoint, 6.0 on the same files takes it."""
    binary = member.binary if version is None else find_mongod(version)
    with Mongod(binary, data_dir=member.data_dir) as alone, Wire.to(alone.uri) as wire:
        reply = wire.run("local", {"insert": "oplog.rs", "documents": entries})
        assert "writeErrors" not in reply, reply["writeErrors"]


def _whole_streams(deployment: ReplicaSet, start: ClusterTime, end: ClusterTime) -> list[dict[str, Any]]:
    streams = []
    scopes = {"collection": ("gr", "c"), "database": ("gr", None), "cluster": ("admin", None)}
    kinds: dict[str, dict[str, Any]] = {
        "plain": {},
        "expanded": {"showExpandedEvents": True},
        "system": {"showSystemEvents": True},
        "expanded, system": {"showExpandedEvents": True, "showSystemEvents": True},
        "migration": {"showMigrationEvents": True},
        "expanded, system, migration": {
            "showExpandedEvents": True,
            "showSystemEvents": True,
            "showMigrationEvents": True,
        },
        "raw": {"showRawUpdateDescription": True},
    }
    with Wire.to(deployment.uri) as wire:
        for where, scope in scopes.items():
            for kind, stage in kinds.items():
                for v2 in (False, True) if "," in kind else (False,):
                    options = {**stage, "startAtOperationTime": start.to_timestamp()}
                    database, command = aggregate(scope, options, server=deployment.version, v2=v2)
                    native = read(wire, database, command, end)
                    name = f"{where} {kind}{' v2' if v2 else ''}"
                    packed = recording.pack_stream(name, database, command, native.raw_replies, native.error_details)
                    streams.append(packed)
    return streams


def _broken_streams(deployment: ReplicaSet, placed: list[Entry]) -> list[dict[str, Any]]:
    streams = []
    for name, harmless, entry in zip(BROKEN, placed[::2], placed[1::2], strict=True):
        # Without a UUID an event that shows it ends the server's process; one that does not has an error.
        stage = {"startAtOperationTime": harmless["ts"], "showExpandedEvents": "ui" in entry}
        database, command = aggregate(("gr", None), stage)
        try:
            with Wire.to(deployment.uri) as wire:
                native = read(wire, database, command, ClusterTime.from_timestamp(entry["ts"]), batch_size=1)
        except (ConnectionError, TimeoutError) as error:
            print(f"  {name}: the server ended ({type(error).__name__})")
            deployment.restart(0)
            continue
        streams.append(recording.pack_stream(name, database, command, native.raw_replies, native.error_details))
    return streams
