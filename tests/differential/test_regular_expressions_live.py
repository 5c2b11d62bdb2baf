"""Regular expressions beside a running mongod: every odd construct, random ones, and where a search gives up.

No test had compared patterns: the fuzz took them from a list of twenty on which PCRE and our former library agreed, and
what was refused by name was not compared.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bson
import pytest

from tailrace.embedded import ReplicaSet
from tests.amounts import amount
from tests.differential import expression_patterns as patterns
from tests.differential.fuzz_expressions import Server, Totals, compare_stage

pytestmark = pytest.mark.mongod

ODD = Path(__file__).with_name("odd_patterns.txt").read_text().splitlines()
EXTRA = ["(?x)a#c\nb", "(?x)a\x0bb", "(?x)a\x85b", "(?x)a\u2028b", "a\\\n", "\\c\x01", "(?<x" + "y" * 32 + ">a)"]
EXTRA += [f"{opening * depth}{')' * depth}" for opening in ("(", "(?:") for depth in (249, 250, 251)]


@pytest.fixture(scope="module")
def server(replica_set: ReplicaSet) -> Server:
    return Server(replica_set.uri)


def compare(server: Server, chosen: list[tuple[str, str]]) -> Totals:
    """Each pattern with its options as ``$regexFindAll`` and in ``$match``, on every subject."""
    documents = [bson.encode({"_id": at, "s": text}) for at, text in enumerate(patterns.SUBJECTS)]
    server.load(documents)
    server.collation = None
    totals = Totals()
    for text, options in chosen:
        named: dict[str, Any] = {"input": "$s", "regex": {"$literal": text}, "options": options}
        query = {"s": {"$regex": text, "$options": options}}
        for stage in ({"$project": {"r": {"$regexFindAll": named}}}, {"$match": query}):
            compare_stage(server, [bson.encode(stage)], documents, totals)
    return totals


def test_every_odd_construct_is_the_servers(server: Server) -> None:
    totals = compare(server, [(text, "") for text in ODD + EXTRA])
    assert totals.differences == []
    assert totals.comparisons > 30_000
    assert totals.refused < 40


@pytest.mark.parametrize("seed", [1, 2])
def test_random_patterns_are_the_servers(server: Server, seed: int) -> None:
    rng = random.Random(seed)
    count = amount(100, 300)
    totals = compare(server, [(patterns.pattern(rng), patterns.options(rng)) for _ in range(count)])
    assert totals.differences == []
    assert totals.comparisons > 26 * count


#: A pattern, the text that is repeated to make its subject, and the largest number of repetitions: with one more the
#: server gives up.
EDGES = [
    ("(a|b)*$", "ab", 999, "c"),
    ("(?:.|\\n)*foo", "a", 1995, "foo"),
    ("a.*b.*c.*d[xy]", "abcd", 65, ""),
    ("(\\w+\\s?)*$", "ab ", 13, "!"),
]


@pytest.mark.parametrize(("text", "piece", "times", "end"), EDGES)
def test_a_search_gives_up_where_the_servers_does(server: Server, text: str, piece: str, times: int, end: str) -> None:
    documents = [bson.encode({"_id": at, "s": piece * (times + at - 1) + end}) for at in range(3)]
    server.load(documents)
    server.collation = None
    totals = Totals()
    named = {"input": "$s", "regex": text}
    for stage in ({"$project": {"r": {"$regexMatch": named}}}, {"$match": {"s": {"$not": {"$regex": text}}}}):
        compare_stage(server, [bson.encode(stage)], documents, totals)
    assert totals.differences == []
    assert totals.errors[51156] == 1


@pytest.mark.slow
@pytest.mark.parametrize("version", ["5.0.4", "4.4.2"])
def test_older_servers_read_patterns_alike(start_replica_set: Callable[..., ReplicaSet], version: str) -> None:
    old = Server(start_replica_set(version=version).uri)
    rng = random.Random(5)
    chosen = [(text, "") for text in ODD + EXTRA] + [(patterns.pattern(rng), patterns.options(rng)) for _ in range(300)]
    assert compare(old, chosen).differences == []
