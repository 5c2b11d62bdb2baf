"""Drivers of other languages see through the gateway what they see without it.

Each program (``drivers/``) does the work of an application with its own driver: CRUD, bulk writes, transactions,
GridFS, index builds, retries, monitoring, and change streams that are resumed, cut off and invalidated. What it prints
is compared with what it prints against the server itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest

from tailrace.embedded import ReplicaSet
from tests.gateway.programs import facts, mongosh_is_at_hand
from tests.gateway.running import GatewayProcess, streams_of_the_server

pytestmark = pytest.mark.mongod


@pytest.fixture(scope="module")
def directly(replica_set: ReplicaSet) -> Callable[[str], str]:
    """What a program prints against the server itself; it is run once."""
    return functools.cache(lambda program: facts(program, replica_set.uri, f"drivers_{program}"))


@pytest.fixture
def compare(replica_set: ReplicaSet, gateway: GatewayProcess, directly: Callable[[str], str]) -> Callable[..., None]:
    def compared(program: str, more: str = "") -> None:
        direct = directly(program)
        before = streams_of_the_server(replica_set.uri)
        assert facts(program, gateway.uri + more, f"drivers_{program}") == direct
        assert streams_of_the_server(replica_set.uri) == before, "the program went past the gateway"

    return compared


@pytest.mark.parametrize("program", ["node", "perl", "c", "php", "ruby", "go", "java"])
def test_a_program_sees_the_same_through_the_gateway(program: str, compare: Callable[..., None]) -> None:
    compare(program)


@pytest.mark.parametrize("compressor", ["snappy", "zstd", "zlib"])
def test_a_program_that_compresses_sees_the_same(compressor: str, compare: Callable[..., None]) -> None:
    compare("c", f"&compressors={compressor}")


def test_mongosh_sees_the_same_where_it_is_at_hand(compare: Callable[..., None]) -> None:
    if not mongosh_is_at_hand():
        pytest.skip("mongosh is neither installed nor in the cache; the slow test fetches it")
    compare("mongosh")


@pytest.mark.slow
def test_mongosh_sees_the_same(compare: Callable[..., None]) -> None:
    compare("mongosh")
