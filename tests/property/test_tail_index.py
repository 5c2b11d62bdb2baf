"""The index by which many streams get their entries leaves out no entry that a stream's own ``OplogMatch`` would take,
and no transaction with an operation for the stream. This holds in compiled code and in plain Python."""

from __future__ import annotations

import dataclasses
import random
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import bson
import pytest

from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.oplog.entry import OplogEntry, apply_ops, parse_entry, parse_operation
from tailrace.core.oplog.namespace import Scope
from tailrace.core.pipeline.shard import ChangeStreamPipeline
from tailrace.core.plan.options import StreamOptions
from tailrace.core.plan.plan import Plan, build_plan
from tailrace.core.plan.profile import SERVER_4_4, SERVER_6_0, SERVER_8_3, ServerProfile
from tailrace.core.plan.request import Emit, NeedEntries, OplogBatch
from tailrace.core.stage.oplog_match import OplogMatch
from tailrace.core.stage.unwind_transaction import UnwindTransaction
from tailrace.errors import OplogFormatError
from tailrace.read.tail.chains import Chains
from tailrace.read.tail.entry_index import EntryIndex, index_entries
from tailrace.read.tail.interest import EVERYONE, key_of
from tests.amounts import amount
from tests.golden.recording import load, names
from tests.property import random_entries, random_transactions
from tests.property.later_entries import later_entry

SEED = 20261122
SCOPES = (
    None, "shop", "shop2", "adminx", "other", "shop.orders", "shop.items", "shop.a.b", "shop.orders\n",
    "other.orders", "数据.集合", "shop.name",
)  # fmt: skip
OPTIONS: tuple[dict[str, object], ...] = (
    {},
    {"showExpandedEvents": True},
    {"showExpandedEvents": True, "showSystemEvents": True, "showMigrationEvents": True},
)


def scope_of(text: str | None) -> Scope:
    return Scope.parse(text)


def plan_of(scope: Scope, profile: ServerProfile, options: Mapping[str, object]) -> Plan:
    start = {"startAtOperationTime": ClusterTime.of(1, 0).to_timestamp()}
    return build_plan(StreamOptions.parse(scope, {**start, **options}, ()), profile)


def compiled_index(raw: bytes, chains: Chains) -> EntryIndex:
    pytest.importorskip("tailrace.core.kernel.entry_index")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tailrace.read.tail.entry_index._COMPILED_BYTES_MIN", 0)
        return index_entries(raw, chains)


def plain_index(raw: bytes, chains: Chains) -> EntryIndex:
    with pytest.MonkeyPatch.context() as patch:
        patch.delitem(sys.modules, "tailrace.core.kernel.entry_index", raising=False)
        return index_entries(raw, chains)


def parsed(raw: bytes) -> OplogEntry | None:
    try:
        return parse_entry(raw)
    except OplogFormatError:
        return None


def command_runs(rng: random.Random, count: int) -> Iterator[bytes]:
    """Commands of DDL, whose names are of every kind."""
    names = ("orders", "orders\n", "items", "a.b", "system.views", "$x", "集合", "")
    fields = ("drop", "create", "createIndexes", "commitIndexBuild", "dropIndexes", "collMod", "convertToCapped")
    for number in range(count):
        database = rng.choice(("shop", "shop", "other", "admin", "数据", ""))
        kind = rng.randrange(10)
        body: dict[str, object]
        if kind < 6:
            body = {rng.choice(fields): rng.choice((*names, 1)), "idIndex": {}}
        elif kind < 8:
            spaces = [f"{rng.choice(('shop', 'other'))}.{rng.choice(names)}" for _ in range(2)]
            body = {"renameCollection": spaces[0], "to": rng.choice((spaces[1], 5)), "dropTarget": False}
        else:
            body = {"dropDatabase": 1} if kind == 8 else {"drop": "orders", "create": "items"}
        suffix = rng.choice((".$cmd",) * 6 + (".$cmd\n", ".x", ""))
        time = ClusterTime.of(3, number + 1).to_timestamp()
        yield bson.encode({"op": "c", "ns": database + suffix, "o": body, "ts": time})


def runs(rng: random.Random) -> Iterator[list[bytes]]:
    yield [random_entries.entry(rng, ClusterTime.of(2, number + 1)) for number in range(amount(200, 400))]
    yield list(command_runs(rng, amount(150, 300)))
    yield [later_entry(rng, ClusterTime.of(4, number + 1)) for number in range(amount(150, 300))]
    for _ in range(amount(4, 12)):
        yield random_transactions.oplog(rng, 12, random_transactions.odd_operation)


def operations_of(entries: Sequence[bytes], plan: Plan) -> list[bool | None]:
    """For each entry, whether it gives the stream an operation; ``None`` if it is refused."""
    by_time = {entry.cluster_time: raw for raw in entries if (entry := parsed(raw)) is not None}
    match = OplogMatch(plan.options, plan.profile)
    found: list[bool | None] = []
    for raw in entries:
        unwind = UnwindTransaction(match, multi_op_is_no_transaction=plan.profile.multi_op_is_no_transaction)
        try:
            entry = parse_entry(raw)
            pieces = unwind.process([entry] if match.matches(entry) else [])
            gives, answer = False, None
            while True:
                try:
                    piece = pieces.send(answer)
                except StopIteration:
                    break
                answer = None
                if isinstance(piece, NeedEntries):
                    answer = [by_time.get(time) for time in piece.times]
                else:
                    gives = gives or bool(piece)
            found.append(gives)
        except OplogFormatError:
            found.append(None)
    return found


@pytest.mark.long
@pytest.mark.parametrize("indexed", [compiled_index, plain_index])
@pytest.mark.parametrize("profile", [SERVER_4_4, SERVER_6_0, SERVER_8_3], ids=lambda profile: profile.name)
def test_no_entry_is_left_out_that_gives_the_stream_something(indexed: object, profile: ServerProfile) -> None:
    counted: Counter[str] = Counter()
    assert callable(indexed)
    for entries in runs(random.Random(SEED)):
        index = indexed(b"".join(entries), Chains())
        for text in SCOPES:
            scope = scope_of(text)
            given = set(index.select(key_of(scope)))
            for options in OPTIONS if profile.expanded_events_and_images else OPTIONS[:1]:
                plan = plan_of(scope, profile, options)
                for number, gives in enumerate(operations_of(entries, plan)):
                    assert not gives or number in given, (text, options, entries[number].hex())
                    counted.update(entries=1, given=number in given, gives=bool(gives))
    assert counted["gives"] > amount(300, 1000)
    assert counted["given"] < counted["entries"] / 2, "it is no use to give everything to everyone"


def test_an_entry_that_oplog_match_takes_is_left_out_only_of_a_transaction_that_was_seen_whole() -> None:
    left_out = 0
    for entries in runs(random.Random(SEED + 1)):
        index = index_entries(b"".join(entries), Chains())
        for text in SCOPES:
            scope = scope_of(text)
            plan = plan_of(scope, SERVER_6_0, {})
            given = set(index.select(key_of(scope)))
            match = OplogMatch(plan.options, plan.profile)
            for number, raw in enumerate(entries):
                entry = parsed(raw)
                if entry is None or not match.matches(entry) or number in given:
                    continue
                left_out += 1
                fields = entry.command_fields()
                assert b"commitTransaction" in fields or (b"applyOps" in fields and entry.prev_op_time is not None)
    assert left_out > amount(30, 100)


@pytest.mark.parametrize("damage", [0.0, 0.02], ids=["whole", "damaged"])
def test_the_compiled_index_and_the_plain_one_are_the_same(damage: float) -> None:
    rng = random.Random(SEED + 2)
    for entries in runs(rng):
        raw = bytearray(b"".join(entries))
        for _ in range(int(len(raw) * damage)):
            raw[rng.randrange(len(raw))] = rng.randrange(256)
        data = bytes(raw)
        plain, fast = plain_index(data, Chains()), compiled_index(data, Chains())
        if damage and list(fast.starts) != list(plain.starts):
            pytest.fail("entries are cut in other places")
        assert plain.about == fast.about
        for text in SCOPES:
            for first in (0, len(plain.numbers) // 2):
                key = key_of(scope_of(text))
                assert list(plain.select(key, first)) == list(fast.select(key, first))


def test_a_transaction_is_about_everyone_where_its_beginning_was_not_seen() -> None:
    """Its operations may concern any stream, and so may its errors."""
    times = [ClusterTime.of(2, number) for number in (1, 2, 3)]
    operation = bson.encode({"op": "i", "ns": "shop.orders", "o": {"_id": 1}})
    first = random_transactions.command_entry(
        random_transactions.apply_ops([operation], random_transactions.boolean(b"partialTxn")), times[0]
    )
    last = random_transactions.command_entry(random_transactions.apply_ops([operation]), times[1], previous=times[0])
    chains = Chains()
    assert index_entries(first, chains).about == frozenset()
    assert index_entries(last, chains).about == {b"shop", b"shop.orders", key_of(Scope.cluster())}
    assert index_entries(last, Chains()).about is EVERYONE


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in names() if "large" not in name])
def test_recorded_oplogs_give_each_recorded_stream_its_events(name: str) -> None:
    """Every stream over its selected entries alone gives what it gives over all of them."""
    recording = load(name)
    index = index_entries(b"".join(recording.oplog), Chains())
    entries = {raw: None for raw in recording.oplog if parsed(raw) is not None}
    by_time = {parse_entry(raw).cluster_time: raw for raw in entries}
    scopes = {raw_scope for raw in entries for raw_scope in _scopes(raw)}
    for scope in sorted(scopes, key=str)[:6]:
        plan = plan_of(scope, SERVER_6_0, {"showExpandedEvents": True})
        whole = _events(plan, list(entries), by_time)
        some = [raw for raw in (recording.oplog[number] for number in index.select(key_of(scope))) if raw in entries]
        assert _events(plan, some, by_time) == whole


def _scopes(raw: bytes) -> Iterator[Scope]:
    entry = parse_entry(raw)
    spaces = [entry.namespace]
    if entry.operation == "c" and entry.o is not None and b"applyOps" in entry.command_fields():
        try:
            spaces += [parse_operation(one, "").namespace for one in apply_ops(entry)]
        except OplogFormatError:
            return
    yield Scope.cluster()
    for space in spaces:
        database, _, collection = space.decode(errors="replace").partition(".")
        if database not in ("admin", "config", "local") and collection and not collection.startswith(("$", "system.")):
            yield Scope.of_database(database)
            yield Scope.of_collection(database, collection)


def _events(plan: Plan, entries: Sequence[bytes], by_time: dict[ClusterTime, bytes]) -> list[bytes]:
    pipeline = ChangeStreamPipeline(dataclasses.replace(plan), mid_stream=True)
    found: list[bytes] = []
    answer = None
    running = pipeline.process(OplogBatch(b"".join(entries), ClusterTime.of(1 << 31, 0)))
    try:
        while True:
            request = running.send(answer)
            answer = None
            if isinstance(request, Emit):
                found += [event.to_bson() for event in request.events]
            elif isinstance(request, NeedEntries):
                answer = [by_time.get(time) for time in request.times]
    except StopIteration:
        return found
    except Exception as error:  # noqa: BLE001  the same error on both sides
        return [*found, repr(error).encode()]
