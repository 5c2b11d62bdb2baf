"""A slice of ``make fuzz-images``: what a live server stores after random updates, beside what we make of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from pymongo import MongoClient

from tailrace.embedded import ReplicaSet
from tests.amounts import amount
from tests.differential.fuzz_images import ImagesFuzz, Totals, corpus_values


def compared(uri: str, seed: int, updates: int) -> Totals:
    totals = Totals()
    with MongoClient(uri) as client:
        ImagesFuzz(client, seed, corpus_values(), totals).run(updates)
    return totals


def test_6_0(replica_set: ReplicaSet) -> None:
    totals = compared(replica_set.uri, 61, amount(250, 1500))
    assert totals.differences == []
    assert min(totals.kinds["$v:2"], totals.kinds["replacement"], totals.kinds["d"]) > amount(2, 10)


@pytest.mark.parametrize(
    ("version", "kind"), [pytest.param("5.0.4", "$v:2", marks=pytest.mark.slow), ("4.4.2", "$v:1")]
)
def test_older_servers(start_replica_set: Callable[..., ReplicaSet], version: str, kind: str) -> None:
    totals = compared(start_replica_set(version=version).uri, 62, amount(250, 1500))
    assert totals.differences == []
    assert min(totals.kinds[kind], totals.kinds["replacement"], totals.kinds["d"]) > amount(2, 10)
