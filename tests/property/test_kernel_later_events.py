"""Additions of 8.0 and later: the kernel and the plain stages give the same, and the oplog's query leaves nothing
out."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter

import bson
import pytest
from bson.raw_bson import RawBSONDocument

from tailrace.core import raw_bson
from tailrace.core.kernel import EVENT, transform_batch
from tailrace.core.kernel.fast_path import settings_for
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.oplog.entry import parse_entry
from tailrace.core.oplog.namespace import Scope
from tailrace.core.plan.options import StreamOptions
from tailrace.core.plan.plan import Plan, build_plan
from tailrace.core.plan.profile import PROFILES, SERVER_7_0_28, ServerProfile, profile_for
from tailrace.core.stage.oplog_match import OplogMatch
from tailrace.core.stream.stream import open_stream
from tests.amounts import amount
from tests.golden.replay import entry_filter
from tests.property.later_entries import UUID, later_run
from tests.property.test_kernel_events import SCOPES, START, PlainOplog, PlainStages, check_each, driven
from tests.property.test_kernel_images import Images, images_plan

SEED = 830
EXPANDED = {"showExpandedEvents": True}
SYSTEM = {"showSystemEvents": True}
OPTIONS = ({}, EXPANDED, SYSTEM, {**EXPANDED, **SYSTEM})
LATER = [one for one in PROFILES if one.version >= (7, 0, 28)]
#: The types of event that each profile adds to those before it, with both options.
ADDED = {
    "7.0.28": {"startIndexBuild"},
    "7.0.31": {"startIndexBuild", "abortIndexBuild"},
    "8.0": {"endOfTransaction"},
    "8.0.5": {"endOfTransaction"},
    "8.0.16": {"endOfTransaction", "startIndexBuild", "abortIndexBuild"},
}
ALL_ADDED = ADDED["8.0.16"] | {"reshardBlockingWrites"}


def plan_of(scope: str | None, profile: ServerProfile, options: dict[str, bool]) -> Plan:
    return build_plan(StreamOptions.parse(Scope.parse(scope), {**START, **options}), profile)


@functools.cache
def entries_of(count: int) -> tuple[bytes, ...]:
    return tuple(later_run(SEED, count))


@pytest.mark.parametrize("profile", LATER, ids=lambda profile: profile.name)
def test_the_kernel_gives_the_events_of_the_plain_stages(profile: ServerProfile) -> None:
    entries = list(entries_of(amount(250, 3000)))
    for scope in SCOPES.values():
        for options in (OPTIONS[0], OPTIONS[1]):
            plan = plan_of(scope, profile, options)
            settings = settings_for(plan)
            assert settings is not None
            kinds = check_each(entries, plan, settings)
            if scope is None:
                assert kinds[EVENT] > len(entries) // 20


def _operation_type(event: bytes) -> str:
    found = raw_bson.find(event, b"operationType")
    assert found is not None
    return raw_bson.read_string(event, found.value_start).decode()


@pytest.mark.long
@pytest.mark.parametrize("profile", LATER, ids=lambda profile: profile.name)
def test_a_stream_is_the_same_however_it_is_cut_and_shows_what_its_version_has(profile: ServerProfile) -> None:
    for scope in (None, "shop", "shop.orders"):
        for options in OPTIONS:
            plan = plan_of(scope, profile, options)
            plain = PlainStages(plan)
            kept = [entry for entry in entries_of(amount(150, 900)) if plain.events(entry) is not None]
            oplog = PlainOplog(kept)
            expected = driven(oplog, plan, 1 << 30, fast=False)
            for entries_max in (1 << 30, 7):
                assert driven(oplog, plan, entries_max, fast=True) == expected
            types = Counter(map(_operation_type, expected[0]))
            if scope is None and len(options) == 2:
                assert ALL_ADDED & types.keys() == ADDED.get(profile.name, ALL_ADDED)
            if "showExpandedEvents" not in options:
                assert not types.keys() & {"endOfTransaction", "startIndexBuild", "abortIndexBuild"}
            if "showSystemEvents" not in options:
                assert not types.keys() & {"reshardBlockingWrites", "startIndexBuild", "abortIndexBuild"}


@pytest.mark.parametrize("profile", LATER, ids=lambda profile: profile.name)
def test_the_query_of_the_oplog_passes_what_a_stream_reads(profile: ServerProfile) -> None:
    counted: Counter[str] = Counter()
    for scope in SCOPES.values():
        for options in OPTIONS:
            plan = plan_of(scope, profile, options)
            passes = entry_filter(open_stream(plan).oplog_filter)
            match = OplogMatch(plan.options, plan.profile)
            for raw in entries_of(amount(150, 1500)):
                read = match.matches(parse_entry(raw))
                assert passes(raw) or not read, (scope, options, bson.decode(raw))
                counted.update(read=read, passed=passes(raw))
    assert 0 < counted["read"] <= counted["passed"]


def test_a_replacement_may_hold_any_v_from_8_3_on() -> None:
    """Up to 8.2 it ends the stream if its ``$v`` is not 2, and is a delta if it is."""
    ended: dict[str, int] = {}
    replaced: dict[str, int] = {}
    for profile in LATER:
        plan = plan_of(None, profile, {})
        settings = settings_for(plan)
        assert settings is not None
        plain = PlainStages(plan)
        updates = [raw for raw in entries_of(400) if parse_entry(raw).operation == "u"]
        updates = [raw for raw in updates if b"rid" not in raw or b"versionContext" in raw]
        given = [plain.events(raw) for raw in updates]
        ended[profile.name] = given.count(None)
        replaced[profile.name] = sum(b"replace\0" in event for events in given for event in events or ())
        made = transform_batch(b"".join(updates), settings)
        assert made.column(0).size <= sum(len(events or ()) for events in given)
    by_id = {one.name for one in LATER if one.replacements_may_have_v}
    assert len({count for name, count in ended.items() if name not in by_id}) == 1
    assert ended["8.3"] < ended["8.2"]
    assert replaced["8.3"] > replaced["8.2"] > 0


def test_an_end_of_a_transaction_is_about_the_namespaces_that_it_lists() -> None:
    def end(*namespaces: str, ns: str = "") -> bytes:
        o2 = {"endOfTransaction": list(namespaces), "lsid": {"id": 1}, "txnNumber": bson.Int64(3)}
        times = {"ts": ClusterTime.of(2, 1).to_timestamp(), "t": bson.Int64(1), "wall": bson.DatetimeMS(5)}
        return bson.encode({"op": "n", "ns": ns, "o": {"msg": {}}, "o2": o2, **times})

    (profile,) = [one for one in PROFILES if one.name == "8.0"]
    for scope, entry, expected in (
        (None, end("shop.orders"), 1),
        (None, end("admin.x", "config.y"), 0),
        ("shop", end("other.a", "shop.b"), 1),
        ("shop", end("other.a", ns="shop.orders"), 0),
        ("shop.orders", end("shop.items", "shop.orders"), 1),
        ("shop.orders", end("shop.items"), 0),
        ("shop.orders", end(), 0),
    ):
        events = PlainStages(plan_of(scope, profile, EXPANDED)).events(entry)
        assert events is not None
        assert len(events) == expected, (scope, bson.decode(entry))
        for event in map(RawBSONDocument, events):
            shown = ["txnNumber", "lsid", "_id", "operationType", "clusterTime", "wallTime", "operationDescription"]
            assert list(event) == shown
            assert event["operationDescription"].raw == bson.encode({"lsid": {"id": 1}, "txnNumber": bson.Int64(3)})


#: The differences between the newest profile and that of 7.0.28. This once used the profile of 8.3, so that rules of
#: later ones were not tested.
NEWEST = PROFILES[-1]
NEWER = [
    one.name
    for one in dataclasses.fields(ServerProfile)
    if one.name not in ("version", "measured") and getattr(SERVER_7_0_28, one.name) != getattr(NEWEST, one.name)
]


def _batched() -> bytes:
    """Two retryable inserts in one entry."""
    inserts = [{"op": "i", "ns": "shop.orders", "ui": UUID, "o": {"_id": n}, "o2": {"_id": n}} for n in range(2)]
    session = {"lsid": {"id": UUID, "uid": b"u" * 32}, "txnNumber": bson.Int64(3), "multiOpType": 1}
    times = {"ts": ClusterTime.of(3, 1).to_timestamp(), "t": bson.Int64(1), "wall": bson.DatetimeMS(5)}
    previous = {"prevOpTime": {"ts": ClusterTime.of(0, 0).to_timestamp(), "t": bson.Int64(-1)}}
    return bson.encode({"op": "c", "ns": "admin.$cmd", "o": {"applyOps": inserts}, **session, **previous, **times})


def _given(profile: ServerProfile, entries: list[bytes], *, fast: bool) -> list[object]:
    """What streams of each kind give, with the documents of updates."""
    kinds = ({"fullDocument": "updateLookup", **options} for options in OPTIONS)
    plans = [images_plan(profile, **options) for options in kinds]
    return [driven(Images(entries), plan, 1 << 30, fast=fast) for plan in plans]


@pytest.mark.long
@pytest.mark.parametrize("fast", [False, True], ids=["plain", "kernel"])
@pytest.mark.parametrize("rule", NEWER)
def test_a_profile_with_one_rule_of_7_0_would_be_seen(rule: str, fast: bool) -> None:
    """A fault planted in each row of the newest profile shows: there are other events, or an error."""
    entries = [*entries_of(300), _batched()]
    plain = PlainStages(plan_of(None, NEWEST, {**EXPANDED, **SYSTEM}))
    entries = [entry for entry in entries if plain.events(entry) is not None]
    planted = dataclasses.replace(NEWEST, **{rule: getattr(SERVER_7_0_28, rule)})
    assert _given(planted, entries, fast=fast) != _given(NEWEST, entries, fast=fast)


def test_these_are_the_rules() -> None:
    assert set(NEWER) == {
        "ns_type",
        "multi_op_is_no_transaction",
        "reads_typed_no_ops",
        "shows_blocking_writes",
        "shows_aborted_index_builds",
        "shows_ends_of_transactions",
        "replacements_may_have_v",
        "places",
    }


#: A stage that sets each field that may have a place, on an insert with showExpandedEvents; the order of the fields.
SET_ALL = {"$set": {"updateDescription": 1, "operationDescription": 2, "documentKey.x": 3, "collectionUUID": 4}}
ON_A_DROP = {"$set": {"documentKey": 1, "fullDocument": 2, "stateBeforeChange": 3}}


@pytest.mark.parametrize("fast", [False, True], ids=["plain", "kernel"])
@pytest.mark.parametrize(
    ("version", "after_key", "of_drop"),
    [
        ("8.1", "operationDescription updateDescription", "wallTime fullDocument ns documentKey stateBeforeChange"),
        ("8.2", "updateDescription operationDescription", "wallTime fullDocument ns documentKey stateBeforeChange"),
        ("8.3", "updateDescription operationDescription", "wallTime ns documentKey fullDocument stateBeforeChange"),
    ],
)
def test_a_field_that_a_stage_sets_comes_where_the_version_keeps_its_place(
    version: str, after_key: str, of_drop: str, fast: bool
) -> None:
    head = "_id operationType clusterTime collectionUUID"
    times = {"ts": ClusterTime.of(2, 1).to_timestamp(), "t": bson.Int64(1), "wall": bson.DatetimeMS(5)}
    insert = {"op": "i", "ns": "shop.orders", "ui": UUID, "o": {"_id": 1}, "o2": {"_id": 1}, **times}
    drop = {"op": "c", "ns": "shop.$cmd", "ui": UUID, "o": {"drop": "orders"}, **times}
    for entry, stage, expected in (
        (insert, SET_ALL, f"{head} wallTime fullDocument ns documentKey {after_key}"),
        (drop, ON_A_DROP, f"{head} {of_drop}"),
    ):
        plan = images_plan(profile_for(version), [stage], scope="shop", **EXPANDED)
        (event,), _ = driven(PlainOplog([bson.encode(entry)]), plan, 1 << 30, fast=fast)
        assert list(RawBSONDocument(event)) == expected.split()
