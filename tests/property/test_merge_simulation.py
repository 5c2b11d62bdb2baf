"""A cluster in miniature, by seed: causally ordered writes to documents that move between shards, shards that are added
and removed, and come back on other servers; drops on all shards, damage and lost connections. It is read in random
order through the merge. A removal is logged as 4.4 logs it, or as 5.0 and 6.0 do.

A failure names its seed; ``python -m tests.property.test_merge_simulation 17`` runs that one and prints a log.
"""

from __future__ import annotations

import functools
import sys
from random import Random
from typing import Any

import bson
import pytest

from tailrace.core.event.resume_token import ResumeToken, token_order
from tailrace.core.oplog.cluster_clock import ClusterClock
from tailrace.core.oplog.namespace import Scope
from tailrace.core.plan.options import StreamOptions
from tailrace.core.plan.plan import build_plan
from tailrace.core.plan.request import NeedShard
from tailrace.core.stream.merge import CONFIG_SHARDS, MergedStream
from tailrace.core.stream.stream import Need
from tailrace.errors import OplogFormatError, SourceError, TailraceError
from tailrace.read.source.drive import drive
from tests.amounts import amount
from tests.property.cluster_oplogs import (
    COLLECTION,
    DATABASE,
    at,
    batch,
    damaged,
    drop,
    insert,
    no_op,
    shard_added,
    shard_drains,
    shard_removed,
)
from tests.property.unsigned import unsigned_document

pytestmark = [pytest.mark.usefixtures("kernel_on_and_off"), pytest.mark.by_turns]

SEEDS = range(amount(30, 60))
STEPS = 120
DOCUMENTS = 5
NAMES = ("s0", "s2", "s3", "s4")


class Cluster:
    """Members with a clock each, and what they wrote: ``oplogs[member]`` holds (tick, entry).

    A member is a replica set. ``shards`` maps each shard's name to a member. A removed one is no longer in it, and
    another may get its name. ``added`` and ``removed`` hold the ticks, by member.
    """

    def __init__(self, random: Random) -> None:
        self._random = random
        self.clocks: dict[str, ClusterClock] = {}
        self.oplogs: dict[str, list[tuple[int, bytes]]] = {}
        self.shards: dict[str, str] = {}
        self.added: dict[str, int] = {}
        self.removed: dict[str, int] = {}
        self.owner: dict[int, str] = {}
        self.versions = [0] * DOCUMENTS
        self.order: list[tuple[int, int]] = []
        self.damaged: str | None = None
        for member in ("s0", "s1", CONFIG_SHARDS):
            self._member(member)
        self.shards = {"s0": "s0", "s1": "s1"}
        for document in range(DOCUMENTS):
            self.owner[document] = random.choice(("s0", "s1"))

    @property
    def members(self) -> list[str]:
        """The replica sets that are shards now."""
        return list(self.shards.values())

    def _member(self, member: str) -> None:
        self.clocks[member] = ClusterClock(at(0))
        self.oplogs[member] = []

    def tick(self, member: str) -> int:
        """The number of the member's next write. Two members may write at the same time."""
        return self.clocks[member].tick().increment

    def tell(self, sender: str, receiver: str) -> None:
        self.clocks[receiver].gossip(unsigned_document(self.clocks[sender].now))

    def write(self, document: int) -> None:
        """A new version of a document where it is now. The entry is an insert, so that the event shows the version."""
        shard = self.owner[document]
        self.versions[document] += 1
        tick = self.tick(shard)
        self.oplogs[shard].append((tick, insert(tick, document, version=self.versions[document], shard=shard)))
        self.order.append((document, self.versions[document]))

    def move(self, document: int, recipients: list[str]) -> None:
        """Move a document. The new owner knows the time of everything that the old one wrote."""
        donor, recipient = self.owner[document], self._random.choice(recipients)
        self.tell(donor, recipient)
        self.owner[document] = recipient

    def add_shard(self, name: str) -> None:
        """The config server tells the new shard, which therefore writes later than the insert."""
        member = f"{name}~{len(self.oplogs)}"
        tick = self.tick(CONFIG_SHARDS)
        self.oplogs[CONFIG_SHARDS].append((tick, shard_added(tick, name, host=member)))
        self._member(member)
        self.shards[name] = member
        self.tell(CONFIG_SHARDS, member)
        self.added[member] = tick

    def remove_shard(self, name: str) -> None:
        """Remove a shard. It is drained first, and the config server knows of everything that it wrote. Its servers go
        on running, and somebody cleans up there."""
        member = self.shards.pop(name)
        drains = self.tick(CONFIG_SHARDS)
        self.oplogs[CONFIG_SHARDS].append((drains, shard_drains(drains, name)))
        for document, owner in self.owner.items():
            if owner == member:
                self.move(document, self.members)
        self.tell(member, CONFIG_SHARDS)
        tick = self.tick(CONFIG_SHARDS)
        entry = shard_removed(tick, name, plainly=self._random.random() < 0.5)
        self.oplogs[CONFIG_SHARDS].append((tick, entry))
        self.removed[member] = tick
        self.tell(CONFIG_SHARDS, member)
        for make in (lambda at_tick: insert(at_tick, "stray", version=0, shard=member), drop):
            if self._random.random() < 0.5:
                stray = self.tick(member)
                self.oplogs[member].append((stray, make(stray)))

    def drop_everywhere(self) -> None:
        """Drop a sharded collection on every shard at once: shards whose clocks agree write at the same time."""
        if self._random.random() < 0.5:
            ahead = max(self.members, key=lambda member: self.clocks[member].now)
            for member in self.members:
                self.tell(ahead, member)
        for member in self.members:
            tick = self.tick(member)
            self.oplogs[member].append((tick, drop(tick)))

    def step(self) -> None:
        kinds = ("write", "move", "tell", "no-op", "add", "remove")
        kind = self._random.choices(kinds, (10, 4, 4, 2, 0.3, 0.2))[0]
        if kind == "write":
            self.write(self._random.randrange(DOCUMENTS))
        elif kind == "move":
            self.move(self._random.randrange(DOCUMENTS), self.members)
        elif kind == "tell":
            self.tell(self._random.choice(list(self.oplogs)), self._random.choice(list(self.oplogs)))
        elif kind == "no-op":
            member = self._random.choice(list(self.oplogs))
            tick = self.tick(member)
            self.oplogs[member].append((tick, no_op(tick)))
        elif kind == "add":
            free = [name for name in NAMES if name not in self.shards]
            if free:
                self.add_shard(self._random.choice(free))
        else:
            # s1 stays: it is the one that cannot be reached in the end.
            removable = [name for name in self.shards if name != "s1"]
            if removable:
                self.remove_shard(self._random.choice(removable))

    def finish(self, ending: str) -> None:
        if ending == "drop":
            self.drop_everywhere()
        elif ending == "damage":
            self.damaged = self._random.choice(self.members)
            tick = self.tick(self.damaged)
            self.oplogs[self.damaged].append((tick, damaged(tick)))
            for document in range(DOCUMENTS):
                self.write(document)
        last = max(clock.now for clock in self.clocks.values()).increment + 1
        for name, oplog in self.oplogs.items():
            oplog.append((last, no_op(last)))
            self.clocks[name].advance(at(last))

    def shards_at(self, tick: int) -> dict[str, str]:
        """The shards that a stream from ``tick`` on begins with: names and members."""
        found = {}
        for member in self.oplogs:
            if self.added.get(member, 0) < tick <= self.removed.get(member, tick) and member != CONFIG_SHARDS:
                found[member.partition("~")[0]] = member
        return found


class Reading:
    """A merged stream over the cluster's oplogs, each read at its own pace."""

    def __init__(self, cluster: Cluster, random: Random, **start: Any) -> None:
        stage = start or {"startAtOperationTime": at(1).to_timestamp()}
        options = StreamOptions.parse(Scope.of_collection(DATABASE, COLLECTION), stage)
        plan = build_plan(options)
        begins = plan.start.increment if plan.start is not None else 1
        #: Which member is read as the shard of a name.
        self.members = cluster.shards_at(begins)
        self.merged = MergedStream(plan, self.members, config_after=at(max(begins - 1, 0)), buffer_bytes_max=5_000)
        self._cluster, self._random = cluster, random
        self._read: dict[str, int] = {}
        self.events: list[bytes] = []
        self.tokens: list[bytes] = []
        self.marks: list[tuple[ResumeToken, int]] = []
        self.error: TailraceError | None = None

    def step(self) -> bool:
        """Read some of one shard; false when all is read."""
        readable = [name for name in self.merged.participants if self.merged.wants(name) and self._rest(name)]
        if not readable:
            return False
        assert set(self.merged.waiting_for) <= set(self.merged.participants)
        name = self._random.choice(readable)
        piece = self._rest(name)[: self._random.randrange(1, 9)]
        self._read[self._member(name)] = piece[-1][0]
        self.merged.feed(name, batch([entry for _, entry in piece], piece[-1][0]))
        self.take()
        return True

    def _rest(self, name: str) -> list[tuple[int, bytes]]:
        member = self._member(name)
        after = self._read.get(member, self.merged.promised(name).increment)
        return [one for one in self._cluster.oplogs[member] if one[0] > after]

    def _member(self, name: str) -> str:
        return CONFIG_SHARDS if name == CONFIG_SHARDS else self.members[name]

    def take(self) -> None:
        try:
            for block in drive(self.merged, self._answer):
                self.events += block.events()
                self.tokens += block.tokens()
        except TailraceError as error:
            self.error = error
        self.marks.append((self.merged.token, len(self.events)))

    def _answer(self, need: Need) -> None:
        assert isinstance(need.request, NeedShard)
        self.members[need.request.name] = need.request.host.partition("/")[0]

    def finish(self) -> None:
        while self.error is None and self.step():
            pass

    def written(self) -> list[tuple[int, int]]:
        """The writes as (document, version)."""
        decoded = [bson.decode(event) for event in self.events]
        return [
            (event["documentKey"]["_id"], event["fullDocument"]["version"])
            for event in decoded
            if event["operationType"] == "insert"
        ]

    def ends(self) -> list[str]:
        kinds = [bson.decode(event)["operationType"] for event in self.events]
        return [kind for kind in kinds if kind != "insert"]


def simulate(seed: int) -> tuple[Cluster, Reading]:
    random = Random(seed)
    cluster = Cluster(random)
    for _ in range(STEPS):
        cluster.step()
    ending = random.choice(("none", "none", "drop", "damage", "unreachable"))
    cluster.finish(ending)
    reading = Reading(cluster, random)
    if ending == "unreachable":
        for _ in range(random.randrange(20)):
            reading.step()
        reading.merged.fail("s1", SourceError("s1 cannot be reached"))
        reading.take()
    reading.finish()
    check_order(reading)
    if ending == "none":
        check_everything_was_given(cluster, reading)
    elif ending == "drop":
        check_the_drop(cluster, reading)
    else:
        check_the_error(cluster, reading, ending)
    check_resumes(cluster, reading, random)
    return cluster, reading


def check_order(reading: Reading) -> None:
    """Tokens ascend, and each document's versions come in the order in which they were written, none twice and none
    missing."""
    orders = [token_order(token) for token in reading.tokens]
    assert orders == sorted(orders)
    marks = [mark for mark, _ in reading.marks]
    assert marks == sorted(marks)
    last = [0] * DOCUMENTS
    for document, version in reading.written():
        assert version == last[document] + 1
        last[document] = version


def check_everything_was_given(cluster: Cluster, reading: Reading) -> None:
    assert reading.error is None
    assert sorted(reading.written()) == sorted(cluster.order)
    assert set(reading.merged.participants) == {*cluster.shards, CONFIG_SHARDS}
    assert not reading.merged.leaving
    assert reading.merged.token.is_high_water_mark


def check_the_drop(cluster: Cluster, reading: Reading) -> None:
    """The stream ends with the first drop. All shards that dropped at the same time are seen, and so is what others
    wrote at that time: it comes before the invalidate."""
    drops = {name: tick for name in cluster.members for tick, entry in cluster.oplogs[name] if b"drop" in entry}
    first = [name for name, tick in drops.items() if tick == min(drops.values())]
    assert reading.merged.invalidated
    assert reading.ends() == ["drop"] * len(first) + ["invalidate"] * len(first)
    before = [
        entry
        for oplog in cluster.oplogs.values()
        for tick, entry in oplog
        if b"version" in entry and b"stray" not in entry and tick <= min(drops.values())
    ]
    assert len(reading.written()) == len(before)


def check_the_error(cluster: Cluster, reading: Reading, ending: str) -> None:
    """The shard is named, and everything that any shard has before the error was given."""
    member = cluster.damaged if ending == "damage" else "s1"
    name = next(name for name, shard in cluster.shards.items() if shard == member)
    assert isinstance(reading.error, OplogFormatError if ending == "damage" else SourceError)
    assert reading.error.message.startswith(f"Error on remote shard {name} :: caused by :: ")
    if ending == "damage":
        end = next(
            tick for tick, entry in cluster.oplogs[str(member)] if b"fullDocument" not in entry and _is_damaged(entry)
        )
        own = [entry for tick, entry in cluster.oplogs[str(member)] if b"version" in entry and tick < end]
        given = [bson.decode(event)["fullDocument"]["shard"] for event in reading.events]
        assert given.count(member) == len(own)


def _is_damaged(entry: bytes) -> bool:
    decoded = bson.decode(entry)
    return decoded["op"] == "i" and "o" not in decoded


def check_resumes(cluster: Cluster, reading: Reading, random: Random) -> None:
    """Resumed at some of its tokens, read in another order, the stream gives exactly what it gave after them."""
    if reading.error is not None:
        return
    places = list(reading.marks)
    for index, token in enumerate(reading.tokens):
        while index + 1 < len(reading.tokens) and reading.tokens[index + 1] == token:
            index += 1  # noqa: PLW2901 (equal tokens are one place)
        places.append((ResumeToken.from_trusted(token), index + 1))
    for token, given in random.sample(places, min(6, len(places))):
        if token.from_invalidate:
            continue
        resumed = Reading(cluster, random, resumeAfter=token.to_document())
        resumed.finish()
        assert resumed.error is None
        assert resumed.events == reading.events[given:]


@functools.cache
def run_of(kernel: str, seed: int) -> tuple[Cluster, Reading]:
    """``simulate``, run once for two tests; ``kernel`` is what the fixture chose."""
    return simulate(seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_merge_of_a_cluster_in_miniature(kernel_on_and_off: str, seed: int) -> None:
    run_of(kernel_on_and_off, seed)


@pytest.mark.long
def test_the_seeds_come_by_every_kind_of_end_and_by_shards_that_are_added(kernel_on_and_off: str) -> None:
    runs = [run_of(kernel_on_and_off, seed) for seed in SEEDS]
    often = amount(3, 5)
    assert sum(bool(cluster.added) for cluster, _ in runs) > often
    assert sum(reading.merged.invalidated for _, reading in runs) > often
    assert sum(isinstance(reading.error, OplogFormatError) for _, reading in runs) > often
    assert sum(isinstance(reading.error, SourceError) for _, reading in runs) > often
    assert any(reading.ends().count("drop") > 1 for _, reading in runs)
    assert sum(bool(cluster.removed) for cluster, _ in runs) > 10
    assert any(
        name.partition("~")[0] in cluster.shards and not reading.error and not reading.merged.invalidated
        for cluster, reading in runs
        for name in cluster.removed
    ), "no shard was replaced"


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        _, found = simulate(int(argument))
        for given in found.events:
            event = bson.decode(given)
            print(event["clusterTime"], event["operationType"], event.get("documentKey"), event.get("fullDocument"))
        print(f"seed {argument}: {len(found.events)} events, error: {found.error}")
