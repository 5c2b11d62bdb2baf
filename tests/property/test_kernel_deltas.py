"""Update descriptions with ``disambiguatedPaths``: the kernel's and the plain stages' are the same bytes."""

from __future__ import annotations

import random

import pytest

from tailrace.core import raw_bson as rb
from tailrace.core.kernel import EVENT, PLAIN, transform_batch
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.plan.profile import SERVER_8_1
from tests.amounts import amount
from tests.property import random_entries
from tests.property.guard_page import GuardedBuffer
from tests.property.test_kernel_events import PlainStages, plan_of
from tests.property.wrong_bytes import wrong_bytes

PLAN, SETTINGS = plan_of("shop.orders", profile=SERVER_8_1, showExpandedEvents=True)
NAMES = (b"a", b"0", b"7", b"01", b"12", b"00", b"b.c", b".", b"9.9", b"", "é".encode(), b"a-1", b"1234567890", b"$x")


def _int(name: bytes, number: int = 1) -> bytes:
    return rb.encode_element(rb.INT32, name, rb.encode_int32(number))


def _fields(rng: random.Random) -> bytes:
    return rb.encode_document(*(_int(rng.choice(NAMES), rng.randrange(9)) for _ in range(rng.randrange(4))))


def _document_diff(rng: random.Random, depth: int = 0) -> bytes:
    parts = [random_entries.document(letter, _fields(rng)) for letter in (b"d", b"u", b"i") if rng.random() < 0.5]
    if depth < 6:
        for _ in range(rng.choice((0, 1, 1, 2))):
            nested = _document_diff if rng.random() < 0.6 else _array_diff
            parts.append(random_entries.document(b"s" + (rng.choice(NAMES) or b"n"), nested(rng, depth + 1)))
    return rb.encode_document(*parts) if parts else _document_diff(rng, depth)


def _array_diff(rng: random.Random, depth: int) -> bytes:
    parts = [rb.encode_element(rb.BOOL, b"a", b"\1")]
    if rng.random() < 0.5:
        parts.append(_int(b"l", rng.randrange(5)))
    for index in sorted(rng.sample((0, 1, 9, 10, 100, 99999999), rng.randrange(3))):
        nested = _document_diff if rng.random() < 0.6 else _array_diff
        changed = rng.random() < 0.5 or depth > 5
        parts.append(
            _int(b"u%d" % index) if changed else random_entries.document(b"s%d" % index, nested(rng, depth + 1))
        )
    return rb.encode_document(*parts)


def entry_of(diff: bytes) -> bytes:
    """An update entry with this delta."""
    return rb.encode_document(
        random_entries.string(b"op", b"u"),
        random_entries.string(b"ns", b"shop.orders"),
        rb.encode_element(rb.BINARY, b"ui", random_entries.uuid_value()),
        random_entries.document(b"o", rb.encode_document(_int(b"$v", 2), random_entries.document(b"diff", diff))),
        random_entries.document(b"o2", rb.encode_document(_int(b"_id"))),
        rb.encode_element(rb.TIMESTAMP, b"ts", ClusterTime.of(2, 1).to_bytes_le()),
        rb.encode_element(rb.DATE, b"wall", rb.encode_int64(5)),
    )


def _paths(event: bytes) -> bytes:
    description = rb.find(event, b"updateDescription")
    assert description is not None
    found = rb.find(rb.value(event, description), b"disambiguatedPaths")
    assert found is not None
    return rb.value(rb.value(event, description), found)


def test_random_deltas_give_the_same_descriptions() -> None:
    rng = random.Random(1)
    plain = PlainStages(PLAN)
    entries = [entry_of(_document_diff(rng)) for _ in range(amount(500, 2_000))]
    made = transform_batch(b"".join(entries), SETTINGS)
    several = 0
    for index, entry in enumerate(entries):
        assert made.kind[index] == EVENT
        assert [made.event(index)] == plain.events(entry), entry.hex()
        several += sum(1 for _ in rb.elements(_paths(made.event(index)))) > 1
    assert several > len(entries) // 4


def test_a_delta_with_one_wrong_byte_gives_the_same_or_is_left_to_the_plain_stages() -> None:
    rng = random.Random(2)
    plain = PlainStages(PLAN)
    guarded = GuardedBuffer(1 << 16)
    kept = 0
    for _ in range(6):
        sample = entry_of(_document_diff(rng))
        for position in range(len(sample)):
            for new in wrong_bytes(rng, sample[position]):
                entry = sample[:position] + bytes([new]) + sample[position + 1 :]
                made = transform_batch(guarded.place(entry), SETTINGS)
                if made.kind.tolist() == [EVENT]:
                    kept += 1
                    assert plain.events(entry) == [made.event(0)], entry.hex()
    assert kept > 50


@pytest.mark.parametrize("depth", [1, 40, 150, 199, 200, 201, 240])
@pytest.mark.parametrize("name", [b"0", b"x.y", b"n" * 300])
def test_deep_paths_are_made_or_left_to_the_plain_stages(depth: int, name: bytes) -> None:
    """The scratch memory for paths and for arrays of them is limited: what does not fit is left to the plain stages."""
    diff = rb.encode_document(random_entries.document(b"u", rb.encode_document(*[_int(b"f")] * 30)))
    for _ in range(depth):
        diff = rb.encode_document(random_entries.document(b"s" + name, diff))
    entry = entry_of(diff)
    made = transform_batch(entry, SETTINGS)
    assert depth > 1 or made.kind.tolist() == [EVENT]
    if made.kind.tolist() == [EVENT]:
        assert [made.event(0)] == PlainStages(PLAN).events(entry)
    else:
        assert made.kind.tolist() == [PLAIN]


def test_the_scratch_memory_for_paths_is_used_to_its_end_and_no_further() -> None:
    plain = PlainStages(PLAN)
    kinds = []
    for count in range(1750, 1775):
        fields = rb.encode_document(*(_int(b"a.b%08d" % number) for number in range(count)))
        entry = entry_of(rb.encode_document(random_entries.document(b"u", fields)))
        made = transform_batch(entry, SETTINGS)
        kinds += made.kind.tolist()
        if kinds[-1] == EVENT:
            assert [made.event(0)] == plain.events(entry)
    assert set(kinds) == {EVENT, PLAIN}


def test_a_delta_of_more_fields_than_the_server_describes_is_left_to_the_plain_stages() -> None:
    """The plain stages raise 16490 (``test_long_descriptions``). The kernel made the event, since it only had the limit
    of events; the tests of long descriptions had long paths instead of many fields."""
    for count, kind in ((400_000, EVENT), (1_700_000, PLAIN)):
        fields = b"".join(b"\x0a%07d\0" % number for number in range(count))
        diff = rb.encode_document(random_entries.document(b"u", rb.encode_document(fields)))
        for settings in (SETTINGS, plan_of("shop.orders")[1]):
            assert transform_batch(entry_of(diff), settings).kind.tolist() == [kind]
