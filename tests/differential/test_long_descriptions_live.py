"""Updates whose description is far longer than their oplog entry, at the edges of each version's own streams. The unit
tests hold 6.0.27's edges, and no test had asked the older servers for theirs.

From 5.0 on an entry names a long path once for all the fields under it. A mongod 4.4 writes it before each of them, so
that a description there is hardly longer than its entry.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.embedded import ReplicaSet
from tailrace.read.source.mongod import MongodSource
from tests.differential.compare import Bench, Case
from tests.differential.execute import note
from tests.differential.ours import SourceOplog, read_into_memory
from tests.differential.wire import Wire
from tests.server_in_use import IN_BETWEEN, SERVER_VERSION

pytestmark = pytest.mark.mongod

_PATH = "p" * 60_000
_TYPE_ALONE = ({"$project": {"operationType": 1}},)


class Server(NamedTuple):
    version: str
    wire: Wire
    source: MongodSource

    def code(self, document: dict[str, Any], update: Any, *stages: dict[str, Any]) -> int:
        """The code that both streams over one update end with, or 0 where both give the event."""
        self.wire.run("bomb", {"delete": "c", "deletes": [{"q": {}, "limit": 0}]})
        self.wire.run("bomb", {"insert": "c", "documents": [{"_id": 1, **document}]})
        start = note(self.wire, "start")
        reply = self.wire.run("bomb", {"update": "c", "updates": [{"q": {"_id": 1}, "u": update}]})
        assert reply.get("nModified") == 1, reply
        end = note(self.wire, "end")
        memory = read_into_memory(self.wire, self.source, ClusterTime(start - 1), end)
        bench = Bench(self.wire, memory, SourceOplog(self.source), self.version, end)
        case = Case(("bomb", "c"), {"startAtOperationTime": start.to_timestamp()}, pipeline=stages)
        result = bench.compare(case)
        assert result.difference is None
        codes = [error.code for error in result.errors_met]
        assert codes or result.equal_events
        return codes[0] if codes else 0


@pytest.fixture(scope="module", params=[SERVER_VERSION, IN_BETWEEN, "4.4.2"])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    with ReplicaSet(version=request.param) as running, Wire.to(running.uri) as wire:
        source = MongodSource(running.uri)
        yield Server(request.param, wire, source)
        source.close()


def _names(count: int) -> list[str]:
    return [f"f{number:06d}" for number in range(count)]


def _filled(fields: dict[str, int]) -> dict[str, Any]:
    """The value at a long path: it keeps so much unchanged that the server logs the difference and not the whole."""
    return {_PATH: {"kept": "x" * 100_000, **fields}}


@pytest.mark.slow  # the edges that this found: tests/unit/test_long_descriptions.py
def test_the_edge_of_a_bomb(server: Server) -> None:
    if server.version == "4.4.2":
        pytest.skip("it logs the update of a pipeline as a replacement")

    def code(count: int, *stages: dict[str, Any]) -> int:
        return server.code(_filled({}), [{"$set": _filled(dict.fromkeys(_names(count), 2))}], *stages)

    assert [code(279), code(280)] == [0, 10334]
    assert [code(1117), code(1118)] == [10334, 16490]
    assert [code(1117, *_TYPE_ALONE), code(1118, *_TYPE_ALONE)] == [0, 16490]


def test_removed_fields_under_a_long_path(server: Server) -> None:
    if server.version == "4.4.2":
        pytest.skip("it logs the update of a pipeline as a replacement")

    def code(count: int, *stages: dict[str, Any]) -> int:
        return server.code(
            _filled(dict.fromkeys(_names(count), 2)), [{"$set": {_PATH: {"$literal": _filled({})[_PATH]}}}], *stages
        )

    assert [code(279), code(1117), code(1117, *_TYPE_ALONE)] == [0, 10334, 0]


def test_on_4_4_the_description_is_as_long_as_its_entry(server: Server) -> None:
    if server.version != "4.4.2":
        pytest.skip("a long path stands in an entry once")
    for size, unset_ends_with in ((60_170, 0), (60_177, 10334)):
        path = "p" * size
        fields = {f"{path}.{name}": 2 for name in _names(279)}
        there = {path: dict.fromkeys(_names(279), 1)}
        assert server.code({"x": 1}, {"$set": fields}) == 0
        assert server.code(there, {"$unset": fields}) == unset_ends_with
        assert server.code(there, {"$unset": fields}, *_TYPE_ALONE) == 0
