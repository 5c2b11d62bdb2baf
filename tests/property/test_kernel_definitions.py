"""Commands that define collections: the kernel and the plain stages give the same events, and streams that end."""

from __future__ import annotations

import functools
import random
from typing import Any

import pytest

from tailrace.core import raw_bson
from tailrace.core.kernel import EVENT, PLAIN, SKIPPED, transform_batch
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.plan.profile import SERVER_4_4, SERVER_5_0, SERVER_6_0, SERVER_7_0, SERVER_8_1, ServerProfile
from tests.amounts import amount
from tests.property import random_entries
from tests.property.guard_page import GuardedBuffer
from tests.property.test_kernel_events import SCOPES, PlainOplog, PlainStages, check_each, driven, plan_of
from tests.property.wrong_bytes import wrong_bytes

SEED = 310
EXPANDED = {"showExpandedEvents": True}
PLANS: list[Any] = [
    pytest.param(SERVER_6_0, {}, id="6.0"),
    pytest.param(SERVER_6_0, EXPANDED, id="6.0 expanded"),
    pytest.param(SERVER_6_0, {**EXPANDED, "v2": True}, id="6.0 expanded, tokens of version 2"),
    pytest.param(SERVER_6_0, {"v2": True}, id="6.0, tokens of version 2"),
    pytest.param(SERVER_4_4, {}, id="4.4"),
    pytest.param(SERVER_5_0, {}, id="5.0"),
    pytest.param(SERVER_7_0, EXPANDED, id="7.0 expanded"),
    pytest.param(SERVER_8_1, EXPANDED, id="8.1 expanded"),
]


@functools.cache
def definitions(seed: int, count: int) -> list[bytes]:
    rng = random.Random(seed)
    return [random_entries.definition_entry(rng, ClusterTime.of(2, number + 1)) for number in range(count)]


@pytest.mark.parametrize(("profile", "options"), PLANS)
@pytest.mark.parametrize("scope", SCOPES)
def test_definitions_give_the_events_of_the_plain_stages(
    scope: str, profile: ServerProfile, options: dict[str, bool]
) -> None:
    plan, settings = plan_of(SCOPES[scope], profile=profile, **options)
    count = amount(400, 3000)
    kinds = check_each(definitions(SEED, count), plan, settings)
    assert kinds[SKIPPED] > count // 6
    if scope in ("cluster", "database"):
        # A drop or a rename alone; the rest is for showExpandedEvents.
        assert kinds[EVENT] > count * (0.25 if "showExpandedEvents" in options else 0.18)
        assert kinds[PLAIN] < 0.42 * count


@pytest.mark.long
@pytest.mark.parametrize(("profile", "options"), [PLANS[0], PLANS[2], PLANS[7]])
@pytest.mark.parametrize("scope", SCOPES)
def test_a_stream_of_writes_and_definitions_is_the_same_however_it_is_cut(
    scope: str, profile: ServerProfile, options: dict[str, bool]
) -> None:
    """A stream on a collection ends with its drop, so the writes come first."""
    plan, _ = plan_of(SCOPES[scope], profile=profile, **options)
    plain = PlainStages(plan)
    rng = random.Random(SEED)
    entries = []
    for number in range(amount(300, 900)):
        build = random_entries.entry if rng.random() < 0.7 or number < 100 else random_entries.definition_entry
        entry = build(rng, ClusterTime.of(2, number + 1))
        if plain.events(entry) is not None:
            entries.append(entry)
    oplog = PlainOplog(entries)
    expected = driven(oplog, plan, 1 << 30, fast=False)
    assert expected[0]
    for entries_max in (1 << 30, 40, 3):
        assert driven(oplog, plan, entries_max, fast=True) == expected


@pytest.mark.parametrize("options", [{}, EXPANDED, {**EXPANDED, "v2": True}], ids=str)
def test_a_definition_with_one_wrong_byte_gives_the_same_or_is_left_to_the_plain_stages(
    options: dict[str, bool],
) -> None:
    plan, settings = plan_of(None, **options)
    plain = PlainStages(plan)
    guarded = GuardedBuffer(1 << 16)
    rng = random.Random(SEED)
    samples: dict[bytes, bytes] = {}
    for entry in definitions(SEED + 1, 400):
        made = transform_batch(entry, settings)
        if made.kind.tolist() == [EVENT]:
            body = raw_bson.find(entry, b"o")
            assert body is not None
            command = next(raw_bson.elements(entry, body.value_start)).name
            samples[command] = min(samples.get(command, entry), entry, key=len)
    assert len(samples) >= (5 if options else 2)
    for sample in samples.values():
        for position in range(len(sample)):
            for new in wrong_bytes(rng, sample[position]):
                entry = sample[:position] + bytes([new]) + sample[position + 1 :]
                made = transform_batch(guarded.place(entry), settings)
                if (made.kind == PLAIN).any():
                    continue
                assert plain.events(entry) == [made.event(index) for index in range(len(made))], entry.hex()


def test_a_command_that_nearly_fills_the_scratch_memory_is_made_or_left() -> None:
    for scope in (None, "shop"):
        plan, settings = plan_of(scope, showExpandedEvents=True)
        for size in range(15_700, 16_500, 13):
            text = raw_bson.encode_element(raw_bson.STRING, b"x", raw_bson.encode_string(b"y" * size))
            body = raw_bson.encode_document(random_entries.string(b"create", b"orders"), text)
            entry = raw_bson.encode_document(
                random_entries.string(b"op", b"c"),
                random_entries.string(b"ns", b"shop.$cmd"),
                raw_bson.encode_element(raw_bson.BINARY, b"ui", random_entries.uuid_value()),
                random_entries.document(b"o", body),
                raw_bson.encode_element(raw_bson.TIMESTAMP, b"ts", ClusterTime.of(2, 1).to_bytes_le()),
                raw_bson.encode_element(raw_bson.DATE, b"wall", bytes(8)),
            )
            assert set(check_each([entry] * 40, plan, settings)) <= {EVENT, PLAIN}
