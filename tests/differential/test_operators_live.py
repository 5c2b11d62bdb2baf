"""The table of operators is what running servers say: some operators on the server that the tests run on; all
of them on each version, when asked."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tailrace.embedded import ReplicaSet
from tests.differential.fuzz_expressions import OF_THE_C_LIBRARY, Server
from tests.golden.record_operators import VERSIONS, known_to, read, server_answers

pytestmark = pytest.mark.mongod

#: A few, each of another kind.
SOME = ("$mod", "$week", "$sum", "$maxN", "$setIntersection", "$substrCP", "$dateToString", "$convert")


def test_a_running_server_gives_some_of_the_recorded_answers(replica_set: ReplicaSet) -> None:
    recorded = read()["answers"]
    if replica_set.version not in recorded:
        pytest.skip(f"the answers of {replica_set.version} are not recorded")
    names = [name for name in SOME if name in known_to(replica_set.version)]
    expected = {name: recorded[replica_set.version][name] for name in names}
    assert server_answers(Server(replica_set.uri), names) == expected


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
def test_every_version_gives_the_recorded_answers(start_replica_set: Callable[..., ReplicaSet], version: str) -> None:
    """Except for those that the C library of its machine computes."""
    names = [name for name in known_to(version) if name not in OF_THE_C_LIBRARY]
    recorded = read()["answers"][version]
    server = Server(start_replica_set(version=version).uri)
    assert server_answers(server, names) == {name: recorded[name] for name in names}
