"""The kernel and the plain stages give the same events of transactions, however they are cut over batches."""

from __future__ import annotations

import functools
import random
from collections import Counter

import numpy as np
import pytest

from tailrace.core import raw_bson as rb
from tailrace.core.kernel import EVENT, PLAIN, SKIPPED, transform_batch
from tailrace.core.kernel.batch import CHAIN_ENTRY, MEMBER_ENTRY, KernelSettings
from tailrace.core.kernel.fast_path import settings_for
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.plan.plan import Plan
from tailrace.core.plan.profile import SERVER_4_4, SERVER_5_0, SERVER_6_0, SERVER_7_0, SERVER_8_0, ServerProfile
from tailrace.core.plan.request import Answer, NeedEntries, Request
from tests.amounts import amount
from tests.property import random_entries, random_transactions
from tests.property.guard_page import GuardedBuffer
from tests.property.test_kernel_events import PlainOplog, PlainStages, driven, plan_of

SEED = 20261122


class TransactionOplog(PlainOplog):
    """Entries in memory; some of those that a transaction refers to may be lost."""

    def answer(self, request: Request) -> Answer:
        assert isinstance(request, NeedEntries)
        found = dict(zip(self.times, self.entries, strict=True))
        return [found.get(time) for time in request.times]


@functools.cache
def plain_of(profile: ServerProfile) -> PlainStages:
    return PlainStages(plan_of(None, profile=profile)[0])


def sound_operation(rng: random.Random, profile: ServerProfile = SERVER_6_0) -> bytes:
    """An operation that the plain stages of a version do not refuse: from 7.0 on they refuse old updates."""
    while True:
        operation = random_transactions.operation(rng)
        entry = random_transactions.command_entry(random_transactions.apply_ops([operation]), ClusterTime.of(2, 1))
        if plain_of(profile).events(entry) is not None:
            return operation


def check(entries: list[bytes], plan: Plan, cuts: tuple[int, ...]) -> object:
    """Check that kernel and plain stages give the same for every cut. Returns how both end."""
    oplog = TransactionOplog(entries)
    expected = driven(oplog, plan, 1 << 30, fast=False)
    for entries_max in cuts:
        assert driven(oplog, plan, entries_max, fast=True) == expected, [entry.hex() for entry in entries]
    return expected


@functools.cache
def oplog_of(seed: int, profile: ServerProfile) -> list[bytes]:
    make = functools.partial(sound_operation, profile=profile) if seed % 3 else random_transactions.odd_operation
    # From 7.0 on an old update ends a stream, so these give fewer events for as many transactions.
    count = 5 if profile.refuses_old_updates else 4
    return random_transactions.oplog(random.Random(SEED + seed), count, make, major=profile.version[0])


@pytest.mark.long
@pytest.mark.parametrize("seeds", [amount(5, 20), pytest.param(60, marks=pytest.mark.slow)])
@pytest.mark.parametrize("scope", [None, "shop", "shop.orders"])
@pytest.mark.parametrize(
    ("profile", "v2"),
    [(SERVER_6_0, False), (SERVER_6_0, True), (SERVER_4_4, False), (SERVER_5_0, False), (SERVER_7_0, True),
     (SERVER_8_0, True)],
    ids=["6.0", "6.0 v2", "4.4", "5.0", "7.0", "8.0"],
)  # fmt: skip
def test_random_transactions_give_the_events_of_the_plain_stages(
    scope: str | None, profile: ServerProfile, *, v2: bool, seeds: int
) -> None:
    plan, settings = plan_of(scope, profile=profile, v2=v2)
    kinds: Counter[int] = Counter()
    events = 0
    for seed in range(seeds):
        entries = oplog_of(seed, profile if profile.refuses_old_updates else SERVER_6_0)
        given, _ = check(entries, plan, (1 << 30, 1, 3))  # type: ignore[misc]
        events += len(given)
        for size in (len(entries), 3):
            for first in range(0, len(entries), size):
                made = transform_batch(b"".join(entries[first : first + size]), settings)
                kinds.update(made.kind.tolist())
                commands = [b"applyOps" in entry[:200] for entry in entries[first : first + size]]
                kinds["transaction"] += int(((made.kind == EVENT) & np.array(commands)).sum())  # type: ignore[index]
    assert events > 13 * seeds
    assert kinds[CHAIN_ENTRY] > seeds // 6
    assert kinds[MEMBER_ENTRY] > seeds // 6
    assert kinds["transaction"] > seeds  # type: ignore[index]


def test_other_options_hold_in_transactions_too() -> None:
    for options in ({"showExpandedEvents": True}, {"showRawUpdateDescription": True}):
        for profile in (SERVER_6_0, SERVER_8_0):
            plan, _ = plan_of("shop", profile=profile, **options)
            for seed in range(amount(4, 15)):
                entries = random_transactions.oplog(
                    random.Random(SEED - seed), 4, sound_operation, major=profile.version[0]
                )
                check(entries, plan, (1 << 30, 2))


def settings_of(plan: Plan) -> KernelSettings:
    settings = settings_for(plan)
    assert settings is not None
    return settings


def chained() -> list[bytes]:
    """Two plain writes and a transaction of two entries."""
    rng = random.Random(SEED)
    times = [ClusterTime.of(2, number) for number in range(1, 5)]
    operations = [sound_operation(rng) for _ in range(40)]
    short = sorted(operations, key=len)[:5]
    first = random_transactions.apply_ops(short[:2], random_transactions.boolean(b"partialTxn"))
    last = random_transactions.apply_ops(short[2:])
    return [
        random_transactions.write(rng, times[0]),
        random_transactions.command_entry(first, times[1]),
        random_transactions.write(rng, times[2]),
        random_transactions.command_entry(last, times[3], previous=times[1]),
    ]


@pytest.mark.long
@pytest.mark.parametrize("damaged", [1, 3])
def test_a_transaction_with_a_wrong_byte_gives_the_same(damaged: int) -> None:
    """Every byte in turn (in a slice every fourth) of the chain's first entry and of its last, in one batch or two."""
    rng = random.Random(SEED)
    plan, settings = plan_of("shop")
    guarded = GuardedBuffer(1 << 16)
    entries = chained()
    sample = entries[damaged]
    for position in range(4 + damaged, len(sample), amount(4, 1)):
        new = rng.choice((0, 0xFF, sample[position] ^ 1, sample[position] ^ 0x80, rng.randrange(256)))
        entry = sample[:position] + bytes([new]) + sample[position + 1 :]
        transform_batch(guarded.place(b"".join([*entries[:damaged], entry])), settings)
        changed = [*entries[:damaged], entry, *entries[damaged + 1 :]]
        oplog = DamagedOplog(changed, entries)
        expected = driven(oplog, plan, 1 << 30, fast=False)
        for entries_max in (1 << 30, 1):
            assert driven(oplog, plan, entries_max, fast=True) == expected, (position, new)


class DamagedOplog(TransactionOplog):
    """Entries of which one may not be readable; its time is that of the ``whole`` one."""

    def __init__(self, entries: list[bytes], whole: list[bytes]) -> None:
        super().__init__(whole)
        self.entries = entries


def test_a_long_transaction_is_given_in_pieces() -> None:
    """Two long entries, the second one with an operation that is not the kernel's, each in a batch of its own."""
    plan, settings = plan_of("shop.orders")
    rng = random.Random(SEED)
    operations = [sound_operation(rng) for _ in range(300)] * 10
    times = [ClusterTime.of(2, number) for number in range(1, 4)]
    partial = random_transactions.boolean(b"partialTxn")
    minimum = rb.encode_document(
        random_entries.string(b"op", b"d"),
        random_entries.string(b"ns", b"shop.orders"),
        rb.encode_element(rb.BINARY, b"ui", random_entries.uuid_value()),
        random_entries.document(b"o", rb.encode_document(rb.encode_element(rb.MIN_KEY, b"_id", b""))),
    )
    entries = [
        random_transactions.command_entry(random_transactions.apply_ops(operations, partial), times[0]),
        random_transactions.command_entry(
            random_transactions.apply_ops([*operations[:500], minimum, *operations, minimum], partial),
            times[1],
            previous=times[0],
        ),
        random_transactions.command_entry(random_transactions.apply_ops(operations[:10]), times[2], previous=times[1]),
    ]
    given, _ = check(entries, plan, (1,))  # type: ignore[misc]
    assert len(given) > 4000
    # All in one batch: one operation that the kernel does not handle leaves the whole transaction to the plain stages.
    assert transform_batch(b"".join(entries), settings).kind.tolist() == [MEMBER_ENTRY, MEMBER_ENTRY, PLAIN]


def test_a_transaction_whose_earlier_entries_are_lost_is_refused_as_the_plain_stages_do() -> None:
    plan, _ = plan_of("shop")
    entries = chained()
    oplog = TransactionOplog([entries[0], *entries[2:]])
    expected = driven(oplog, plan, 1 << 30, fast=False)
    assert "Oplog no longer has history" in str(expected[1])
    for entries_max in (1 << 30, 1):
        assert driven(oplog, plan, entries_max, fast=True) == expected


def test_commands_and_no_ops_of_no_interest_need_no_plain_stages() -> None:
    """Entries out of scope, and no-ops in scope without a message, are skipped when the batch is read. Entries of a
    possibly unknown kind are not: the plain stages count them."""
    _, settings = plan_of("shop.orders")
    time = rb.encode_element(rb.TIMESTAMP, b"ts", ClusterTime.of(2, 1).to_bytes_le())
    create = rb.encode_document(random_entries.string(b"create", b"orders"))

    def kinds(operation: bytes, namespace: bytes, *more: bytes) -> list[int]:
        op, ns = random_entries.string(b"op", operation), random_entries.string(b"ns", namespace)
        found: list[int] = transform_batch(rb.encode_document(op, ns, *more, time), settings).kind.tolist()
        return found

    o = random_entries.document(b"o", create)
    wall = rb.encode_element(rb.DATE, b"wall", rb.encode_int64(5))
    message = random_entries.document(b"o2", rb.encode_document(random_entries.string(b"msg", b"hello")))
    announced = random_entries.document(b"o2", rb.encode_document(random_entries.string(b"type", b"reshardBegin")))
    assert kinds(b"c", b"other.$cmd", o) == [SKIPPED]
    assert kinds(b"c", b"shop.$cmd", o) == [PLAIN]  # its time is missing
    assert kinds(b"c", b"shop.$cmd", o, wall) == [SKIPPED]
    for name, kind in ((b"drop", PLAIN), (b"startIndexBuild", PLAIN), (b"createIndexes", SKIPPED), (b"new", PLAIN)):
        other = random_entries.document(b"o", rb.encode_document(random_entries.string(name, b"orders")))
        assert kinds(b"c", b"shop.$cmd", other, wall) == [kind]
    assert kinds(b"n", b"shop.orders", o) == [SKIPPED]
    assert kinds(b"n", b"shop.others", o, message) == [SKIPPED]
    assert kinds(b"n", b"shop.orders", o, message) == [PLAIN]
    assert kinds(b"n", b"shop.orders", o, announced) == [PLAIN]


COMMANDS = (
    b"drop", b"create", b"createIndexes", b"commitIndexBuild", b"startIndexBuild", b"dropIndexes", b"collMod",
    b"renameCollection", b"dropDatabase", b"createInAnyWay", b"applyOps", b"to", b"v", b"key",
)  # fmt: skip


def command(rng: random.Random, time: ClusterTime) -> bytes:
    """A command of a few fields, each with a name that has a meaning in a command."""
    fields = []
    for _ in range(rng.randrange(1, 4)):
        value = rng.choice((b"orders", b"items", b"shop.orders", b"system.views"))
        fields.append(random_entries.string(rng.choice(COMMANDS), value))
    if rng.random() < 0.4:
        fields.append(random_entries.document(b"spec", random_entries.fields(rng)))
    return rb.encode_document(
        random_entries.string(b"op", b"c"),
        random_entries.string(b"ns", rng.choice((b"shop.$cmd", b"shop.$cmd", b"other.$cmd", b"admin.$cmd"))),
        rb.encode_element(rb.BINARY, b"ui", random_entries.uuid_value()),
        random_entries.document(b"o", rb.encode_document(*fields)),
        rb.encode_element(rb.TIMESTAMP, b"ts", time.to_bytes_le()),
        rb.encode_element(rb.DATE, b"wall", rb.encode_int64(5)) if rng.random() < 0.95 else b"",
    )


@pytest.mark.parametrize("scope", ["shop", "shop.orders"])
@pytest.mark.parametrize("profile", [SERVER_4_4, SERVER_6_0], ids=["4.4", "6.0"])
def test_random_commands_give_the_events_of_the_plain_stages(scope: str, profile: ServerProfile) -> None:
    rng = random.Random(SEED)
    kinds: Counter[int] = Counter()
    expanded = {"showExpandedEvents": True} if profile is SERVER_6_0 else {}
    for options in ({}, expanded):
        plan, settings = plan_of(scope, profile=profile, **options)
        plain = PlainStages(plan)
        for number in range(1, 600):
            entry = command(rng, ClusterTime.of(2, number))
            kind = transform_batch(entry, settings).kind.tolist()
            kinds.update(kind)
            if kind == [SKIPPED]:
                assert plain.events(entry) == [], entry.hex()
    assert kinds[SKIPPED] > 100
    assert kinds[PLAIN] > 100
