"""Events of 8.0.21 and other servers that could not be run here, as people have shown them, against ours: raw bytes of
the plain stages and of the kernel, for each version whose events they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import bson
import pytest
from bson.int64 import Int64
from bson.raw_bson import RawBSONDocument
from bson.timestamp import Timestamp

from tailrace.core.event.resume_token import ResumeToken
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.plan.profile import PROFILES, profile_for
from tailrace.core.plan.request import DocumentLookup
from tailrace.core.stream.kernel_choice import KernelUse
from tests.amounts import half_in_quick
from tests.golden.captures import EXPANDED, PARTS, Capture
from tests.golden.captures_of_writes import CAPTURES, TOKENS
from tests.golden.replay import MemoryOplog, OurStream

#: Entries around the captured ones, so that these are in the middle of a batch.
HARMLESS = {"op": "n", "ns": "", "o": {"msg": "periodic noop"}}
ENGINES = ("never", "always")


def _given(capture: Capture, version: str, kernel: KernelUse) -> list[bytes]:
    """The events that our stream gives for a capture's entries."""

    def answer(lookups: Sequence[DocumentLookup]) -> list[bytes | None]:
        return [bson.encode(capture.documents[bson.decode(wanted.document_key)["_id"]]) for wanted in lookups]

    first: Timestamp = capture.entries[0]["ts"]
    before = {
        **HARMLESS,
        "ts": Timestamp(first.time - 1, 1),
        "t": Int64(1),
        "v": Int64(2),
        "wall": capture.entries[0]["wall"],
    }
    oplog = MemoryOplog([bson.encode(entry) for entry in (before, *capture.entries)], [], answer)
    command = {"aggregate": capture.collection or 1, "pipeline": [{"$changeStream": dict(capture.options)}]}
    start = ClusterTime.of(first.time - 2, 1)
    ours = OurStream(oplog, capture.database, command, server=version, now=start, kernel=kernel)
    ours.advance(ClusterTime.from_timestamp(capture.entries[-1]["ts"]))
    assert ours.raised is None, ours.raised
    return ours.events


def _encoded(event: dict[str, Any]) -> bytes:
    """An event's fields in their order; the codec puts an ``_id`` first where it is at the top."""
    whole = bson.encode({"event": event})
    return whole[4 + len(b"\x03event\0") : -1]


@pytest.mark.parametrize("kernel", ENGINES)
@pytest.mark.parametrize(
    ("capture", "version"),
    half_in_quick(
        pytest.param(one, version, id=f"{one.name}, {version}") for one in CAPTURES for version in one.versions
    ),
)
def test_a_public_capture_comes_out_byte_for_byte(capture: Capture, version: str, kernel: KernelUse) -> None:
    assert _given(capture, version, kernel) == [_encoded(event) for event in capture.events]


def test_every_profile_from_7_0_28_on_is_asked_for_a_capture() -> None:
    asked = {profile_for(version).name for one in CAPTURES for version in one.versions}
    assert asked >= {one.name for one in PROFILES if one.version >= (7, 0, 28)} - {"7.0.31", "8.0.5"}
    assert sum(len(one.events) for one in CAPTURES) + len(PARTS) == 30


@pytest.mark.parametrize("kernel", ENGINES)
@pytest.mark.parametrize("version", ["8.0.21", "8.1.0", "8.2.1", "8.3.0"])
def test_what_is_shown_of_an_event_is_in_ours(version: str, kernel: KernelUse) -> None:
    for number, (entry, operation_type, shown) in enumerate(PARTS):
        times = {"ts": Timestamp(1789536900 + number, 1), "t": Int64(1), "wall": datetime(2026, 9, 16, tzinfo=UTC)}
        capture = Capture("", ({**entry, **times},), (), "ddd73_replica", options=EXPANDED)
        (event,) = map(RawBSONDocument, _given(capture, version, kernel))
        assert event["operationType"] == operation_type
        for name, value in shown.items():
            assert event[name].raw == bson.encode(value)


def test_a_collection_that_is_made_says_its_kind_from_8_0_5_on() -> None:
    (created,) = [one for one in CAPTURES if one.name == "mongoshake: create"]
    (event,) = created.events
    for version in ("8.0.5", "8.0.21", "8.1.0", "8.2.1", "8.3.0"):
        expected = [_encoded({**event, "nsType": "collection"})]
        assert [_given(created, version, kernel) for kernel in ("never", "always")] == [expected, expected]


def test_the_document_of_an_update_comes_last_in_8_3() -> None:
    """A capture of an earlier server, with the one field moved that the published source of 8.3 puts elsewhere."""
    (update,) = [one for one in CAPTURES if one.options.get("fullDocument") == "updateLookup"]
    (event,) = update.events
    moved = {name: value for name, value in event.items() if name != "fullDocument"}
    expected = [_encoded({**moved, "fullDocument": event["fullDocument"]})]
    assert list(moved)[-1] == "updateDescription"
    assert [_given(update, "8.3.0", kernel) for kernel in ("never", "always")] == [expected, expected]


@pytest.mark.parametrize(("data", "time"), TOKENS, ids=[data[2:18] for data, _ in TOKENS])
def test_a_public_token_is_read_and_made_again(data: str, time: Timestamp) -> None:
    parts = ResumeToken.parse({"_data": data}).parts
    assert (parts.version, parts.cluster_time.to_timestamp()) == (2, time)
    again = ResumeToken(
        parts.cluster_time,
        version=parts.version,
        token_type=parts.token_type,
        txn_op_index=parts.txn_op_index,
        from_invalidate=parts.from_invalidate,
        uuid=parts.uuid,
        event_identifier=parts.event_identifier,
        fragment_num=parts.fragment_num,
    )
    assert again.to_document() == {"_data": data}


def test_a_fault_in_an_entry_or_an_event_would_be_seen() -> None:
    """If one thing in a capture is changed, the event differs: every part of it is compared."""
    for capture in CAPTURES:
        entry: dict[str, Any] = capture.entries[-1]
        later = replace(capture, entries=({**entry, "wall": datetime(2026, 1, 1, tzinfo=UTC)},))
        assert _given(later, capture.versions[0], "always") != [_encoded(event) for event in capture.events]
