"""What a masked report is worth: masked entries give the masked events, and hold nothing of a user's."""

from __future__ import annotations

import datetime
import random
from typing import Any

import bson
import pytest
from bson.binary import Binary
from bson.code import Code
from bson.decimal128 import Decimal128
from bson.int64 import Int64
from bson.objectid import ObjectId
from bson.raw_bson import RawBSONDocument
from bson.regex import Regex
from bson.timestamp import Timestamp

from tailrace.core import raw_bson
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.watch.compare.mask import Mask
from tailrace.watch.compare.mask_values import Values
from tests.differential.first_difference import first_difference
from tests.differential.wire import ANY_VALUE
from tests.golden import recording
from tests.golden.captures_of_writes import CAPTURES
from tests.golden.recording import RecordedStream, Recording, token_time
from tests.golden.replay import BEGINNING, MemoryOplog, OurStream

#: Events of 16 MB, entries that no server writes, and tokens that are refused are another test's matter.
_LEFT_OUT = ("large_events", "broken_entries", "crafted_entries", "cursors", "cursor_protocol")
RECORDINGS = [name for name in recording.names() if not name.startswith(_LEFT_OUT)]


def masked_oplog(source: Recording, mask: Mask) -> MemoryOplog:
    def documents(lookups: Any) -> list[bytes | None]:
        return [found.get((one.database, one.collection, one.document_key)) for one in lookups]

    found: dict[tuple[str, str, bytes], bytes | None] = {}
    entries = [mask.entry(entry) for entry in source.oplog]
    for stored in map(RawBSONDocument, source.documents):
        database, _, collection = stored["ns"].partition(".")
        masked = [
            None if stored[name] is None else mask._user_document(bytes(stored[name].raw))
            for name in ("documentKey", "document")
        ]
        assert masked[0] is not None
        names = mask.database(database.encode()).decode(), mask.collection(collection.encode()).decode()
        found[(*names, masked[0])] = masked[1]
    return MemoryOplog(entries, [mask.pre_image(one) for one in source.pre_images], documents)


def masked_command(stream: RecordedStream, mask: Mask) -> tuple[str, dict[str, Any]]:
    stage = dict(stream.command["pipeline"][0]["$changeStream"])
    for name in ("resumeAfter", "startAfter"):
        if name in stage:
            stage[name] = bson.decode(mask.token(bson.encode(stage[name])))
    collection = stream.command["aggregate"]
    if isinstance(collection, str):
        collection = mask.collection(collection.encode()).decode()
    database = mask.database(stream.database.encode()).decode()
    return database, {**stream.command, "aggregate": collection, "pipeline": [{"$changeStream": stage}]}


def is_plain(stream: RecordedStream) -> bool:
    """Whether the stream has no stages of a user and no error."""
    return stream.error is None and len(stream.command["pipeline"]) == 1


@pytest.mark.parametrize("name", RECORDINGS)
def test_masked_entries_give_the_masked_events(name: str) -> None:
    """So a report can be replayed, whatever a stream makes of its entries, and not only with those seen here."""
    source = recording.load(name)
    mask = Mask(seed=7)
    oplog = masked_oplog(source, mask)
    compared = 0
    for stream in filter(is_plain, source.streams):
        if not stream.replies:
            continue
        database, command = masked_command(stream, mask)
        now = token_time(stream.replies[0].post_batch_resume_token)
        ours = OurStream(oplog, database, command, server=source.server, now=now)
        assert ours.error is None, (stream.name, ours.error)
        ours.advance(token_time(stream.replies[-1].post_batch_resume_token))
        for index, (raw, got) in enumerate(zip(stream.events, ours.events, strict=False)):
            expected = mask.event(raw)
            if expected != got:
                path, theirs, mine = first_difference(expected, got)
                pytest.fail(f"{stream.name}: event {index} at {path}:\n  masked {theirs}\n  ours   {mine}")
        assert len(ours.events) >= len(stream.events), (stream.name, ours.error)
        compared += len(stream.events)
    assert compared or not any(map(is_plain, source.streams))


SECRET = "hunter2-Straße"
VALUES: dict[str, Any] = {
    "text": SECRET,
    "int": 123_456_789,
    "long": Int64(4_111_111_111_111_111),
    "double": 98_765.4321,
    "whole": 424_242.0,
    "decimal": Decimal128("12345.6789"),
    "date": datetime.datetime(1984, 6, 1, 12),
    "oid": ObjectId("65a1b2c3d4e5f60718293a4b"),
    "binary": Binary(b"very secret bytes", 0),
    "old": Binary(b"very secret bytes", 2),
    "regex": Regex("hunter2", "i"),
    "code": Code("return 'hunter2'"),
    "scoped": Code("return hunter2", {"hunter2": "hunter2"}),
    "time": Timestamp(1_600_000_001, 77),
    "nested": {"deeper": [{"hunter2": "hunter2"}, ["hunter2", 123_456_789]]},
}


def test_each_value_keeps_its_type_and_its_length_and_nothing_else() -> None:
    mask = Mask(seed=1)
    raw = bson.encode(VALUES)
    masked = mask._user_document(raw)
    before, after = list(raw_bson.elements(raw)), list(raw_bson.elements(masked))
    assert [one.type for one in before] == [one.type for one in after]
    for one, other in zip(before, after, strict=True):
        assert raw_bson.value(raw, one) != raw_bson.value(masked, other), one.name
        if one.name not in (b"nested", b"scoped"):  # they hold names, whose lengths do not stay
            assert one.end - one.value_start == other.end - other.value_start, one.name
    for secret in (SECRET.encode(), b"hunter2", b"very secret", bytes(VALUES["oid"].binary), b"deeper", b"decimal"):
        assert secret not in masked
    assert mask._user_document(raw) == masked
    assert Mask(seed=2)._user_document(raw) != masked


def test_what_is_no_value_of_a_user_stays() -> None:
    raw = bson.encode({"a": 0, "b": 0.0, "c": None, "d": float("inf"), "e": [], "f": {}, "g": "", "h": Int64(0)})
    assert [*bson.decode(Mask(seed=1)._user_document(raw)).values()] == [*bson.decode(raw).values()]


def test_numbers_that_are_equal_stay_equal_whatever_their_types() -> None:
    masked = bson.decode(Mask(seed=3)._user_document(bson.encode({"a": 77, "b": Int64(77), "c": 77.0, "d": -77})))
    first, second, third, fourth = masked.values()
    assert first == second == third == -fourth
    assert 10 <= first <= 99


def test_names_stay_where_they_are_asked_for_and_values_do_not() -> None:
    event = {
        "_id": {"_data": "8265"},
        "operationType": "insert",
        "ns": {"db": "shop", "coll": "orders"},
        "fullDocument": {"card": SECRET},
    }
    shown = bson.decode(Mask(show_names=True, seed=1).event(bson.encode(event)))
    assert shown["ns"] == {"db": "shop", "coll": "orders"}
    assert list(shown["fullDocument"]) == ["card"]
    assert shown["fullDocument"]["card"] != SECRET
    hidden = bson.decode(Mask(seed=1).event(bson.encode(event)))
    assert hidden["ns"] == {"db": "db1", "coll": "c1"}
    assert list(hidden["fullDocument"]) == ["f1"]


def test_what_is_not_known_is_masked_and_a_new_field_of_an_event_is_named() -> None:
    """A report is meant to show new fields that a later version may give events, but not the values in them."""
    event = bson.encode(
        {
            "_id": {"_data": "82" + "6" * 16 + "AABBCCDDEE"},
            "operationType": "convert",
            "newField": {"customer": SECRET, "size": 3},
            "operationDescription": {"validator": {"card": SECRET}, "customer": SECRET, "viewOn": "hunter2"},
        }
    )
    masked = bson.decode(Mask(seed=1).event(event))
    assert list(masked) == ["_id", "operationType", "newField", "operationDescription"]
    assert masked["operationType"] == "convert"
    assert masked["newField"]["size"] == 3
    assert "customer" not in str(masked)
    assert "hunter2" not in str(masked)
    assert masked["_id"]["_data"].startswith("82" + "6" * 16)
    assert len(masked["_id"]["_data"]) == 28
    staged = bson.decode(Mask(seed=1).event(event, has_stages=True))
    assert "newField" not in staged


@pytest.mark.parametrize("value", [b"", b"a", b"\xff\xfe", "é".encode(), b"a\x00b"])
def test_a_text_keeps_its_length_and_what_is_odd_about_it(value: bytes) -> None:
    values = Values(random.Random(1), lambda document: document)
    masked = values.mask(raw_bson.STRING, raw_bson.encode_string(value))
    text = raw_bson.read_string(masked, 0)
    assert len(text) == len(value)
    assert (b"\x00" in text) == (b"\x00" in value)
    assert text.isascii() == value.isascii()


def test_dates_that_python_cannot_hold_and_names_that_are_no_text_are_masked_too() -> None:
    raw = raw_bson.encode_document(
        raw_bson.encode_element(raw_bson.DATE, b"far", (1 << 62).to_bytes(8, "little")),
        raw_bson.encode_element(raw_bson.INT32, b"\xff\xfe", b"\x07\x00\x00\x00"),
    )
    masked = Mask(seed=1)._user_document(raw)
    assert [one.name for one in raw_bson.elements(masked)] == [b"f1", b"f2"]
    assert bson.decode(masked, ANY_VALUE)


def test_masked_entries_of_later_servers_give_the_masked_events() -> None:
    """The events that users have shown, and those that no recording has."""
    session = {"lsid": {"id": Binary(bytes(16), 4), "uid": b"u" * 32}, "txnNumber": Int64(3)}
    ui = Binary(bytes(range(16)), 4)
    build = {"indexBuildUUID": ui, "indexes": [{"v": 2, "key": {SECRET: 1}, "name": f"{SECRET}_1"}]}
    made: list[dict[str, Any]] = [
        {"op": "n", "ns": "", "o": {"msg": "x"}, "o2": {"endOfTransaction": [f"d{SECRET}.{SECRET}"], **session}},
        {"op": "c", "ns": f"d{SECRET}.$cmd", "ui": ui, "o": {"abortIndexBuild": SECRET, **build}},
        {"op": "n", "ns": f"d{SECRET}.c", "ui": ui, "o": {}, "o2": {"reshardBlockingWrites": f"d{SECRET}.c"}},
    ]
    times = {"t": Int64(1), "v": Int64(2), "wall": datetime.datetime(2026, 1, 1)}
    entries = [bson.encode({**one, "ts": Timestamp(9, number + 1), **times}) for number, one in enumerate(made)]
    entries += [bson.encode(entry) for one in CAPTURES for entry in one.entries if not one.documents]
    entries.sort(key=_time_of)
    options = {"allChangesForCluster": True, "showExpandedEvents": True, "showSystemEvents": True}
    command = {"aggregate": 1, "pipeline": [{"$changeStream": options}]}
    mask = Mask(seed=9)
    masked = [mask.entry(entry) for entry in entries]
    given = []
    for oplog in (entries, masked):
        stream = OurStream(MemoryOplog(oplog, [], lambda asked: []), "admin", command, server="8.1", now=BEGINNING)
        stream.advance(ClusterTime.of(0x7FFFFFFF, 1))
        assert stream.error is None, stream.error
        given.append(stream.events)
    assert given[1] == [mask.event(event) for event in given[0]]
    assert len(given[1]) >= len(entries)
    assert SECRET.encode() in b"".join(given[0])
    for text in (SECRET, "orders", "zhongli", "expiresAt"):
        assert text.encode() not in b"".join([*given[1], *masked])


def _time_of(entry: bytes) -> ClusterTime:
    return ClusterTime.from_timestamp(RawBSONDocument(entry)["ts"])
