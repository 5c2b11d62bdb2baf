"""A short slice of the expression fuzz, for every ``make test``; ``make fuzz-expressions`` runs as many as asked."""

from __future__ import annotations

import pytest

from tailrace.embedded import ReplicaSet
from tailrace.expression.registry import OPERATORS
from tests.differential import expression_grammar as grammar
from tests.differential.fuzz_expressions import Server, Totals, fuzz

pytestmark = pytest.mark.mongod


@pytest.fixture(scope="module")
def server(replica_set: ReplicaSet) -> Server:
    return Server(replica_set.uri)


@pytest.mark.parametrize("seed", [1001, 1002, 1003])
def test_random_stages_give_the_servers_bytes_and_error_codes(server: Server, seed: int) -> None:
    totals = fuzz(server, seed, 250)
    assert totals.comparisons > 1000
    assert totals.differences == []


def test_every_operator_gives_the_servers_bytes_and_error_codes(server: Server) -> None:
    names = sorted(set(grammar.Grammar(grammar.random.Random(0)).all))
    whole = Totals()
    for place, name in enumerate(names):
        totals = fuzz(server, 2000 + place, 12, only=frozenset({name}), size=12)
        whole.comparisons += totals.comparisons
        whole.differences += totals.differences
    assert whole.comparisons > 5000
    assert whole.differences == []


def test_the_grammar_knows_every_operator_that_is_supported() -> None:
    assert set(grammar.Grammar(grammar.random.Random(0)).all) | {"$const"} == set(OPERATORS)
