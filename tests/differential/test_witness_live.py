"""A store's witness, checked against real deployments: its own, another of the same name, and one whose history has
diverged."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from bson import encode
from pymongo import MongoClient

from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.oplog.witness import DeploymentIdentity, EntryMark, Witness
from tailrace.embedded import ReplicaSet
from tailrace.errors import OtherHistoryError
from tailrace.read.source.mongod import MongodSource
from tailrace.read.source.witness import check_witness, identity_of

HINT = "Begin in a new directory"


def witnessed(uri: str) -> Witness:
    with MongoClient(uri) as client:
        client["witness"]["seen"].insert_one({"one": 1})
        source = MongodSource(client)
        newest = source.newest()
        [entry] = source.entries([newest])
        assert entry is not None
        return Witness(identity_of(client), {source.name: EntryMark.of(newest, entry)})


def check(witness: Witness, uri: str) -> None:
    with MongoClient(uri) as client:
        source = MongodSource(client)
        check_witness(witness, identity_of(client), {source.name: source}, what="the tables in DIR", hint=HINT)


def test_its_own_deployment_is_taken(replica_set: ReplicaSet) -> None:
    check(witnessed(replica_set.uri), replica_set.uri)


def test_another_entry_at_its_time_is_refused(replica_set: ReplicaSet) -> None:
    witness = witnessed(replica_set.uri)
    [(name, mark)] = witness.entries.items()
    other = Witness(witness.identity, {name: EntryMark.of(mark.time, encode({"another": 1}))})
    with pytest.raises(OtherHistoryError, match="has another entry at"):
        check(other, replica_set.uri)


def test_a_set_of_the_same_name_is_refused(
    replica_set: ReplicaSet, start_replica_set: Callable[..., ReplicaSet]
) -> None:
    witness = witnessed(replica_set.uri)
    other = start_replica_set()
    with pytest.raises(OtherHistoryError, match="the id of the replica set"):
        check(witness, other.uri)
    # If a server does not tell its id, the entry reveals it.
    unknown = Witness(DeploymentIdentity(dict.fromkeys(witness.entries, "")), witness.entries)
    with pytest.raises(OtherHistoryError, match=r"older backup|has no entry at|has another entry at"):
        check(unknown, other.uri)


def test_a_mark_is_of_the_entry_at_the_end_or_of_the_first_in_between(replica_set: ReplicaSet) -> None:
    with MongoClient(replica_set.uri) as client:
        source = MongodSource(client)
        before = source.newest()
        client["witness"]["seen"].insert_many([{"n": n} for n in range(3)])
        newest = source.newest()
        [entry] = source.entries([newest])
        assert entry is not None
        assert source.mark_between(before, newest) == EntryMark.of(newest, entry)
        assert source.mark_between(newest, newest) == EntryMark.of(newest, entry)
        # No entry has the increment 0, as on a shard while another one is ahead.
        first = source.oldest()[0]
        mark = source.mark_between(ClusterTime(first - 1), ClusterTime.of(newest.seconds, 0))
        assert mark is not None
        assert mark.time == first
        assert source.mark_between(ClusterTime.of(1, 1), ClusterTime(first - 1)) is None
