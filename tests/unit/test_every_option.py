"""Each boolean option of ``$changeStream``, including any new one, is known wherever options are listed, and changes
the kernel's events in the same way as those of the plain stages."""

from __future__ import annotations

import random
import uuid
from typing import Any, Final

import bson
import pytest
from bson.binary import Binary
from bson.int64 import Int64
from bson.timestamp import Timestamp

from tailrace.cli.stream_arguments import _SWITCHES
from tailrace.core.event.event_block import EventBlock
from tailrace.core.masking.events import _DESCRIPTIONS, _DOCUMENTS, _PLAIN
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.oplog.namespace import Scope
from tailrace.core.plan.options import _BOOLEANS, StreamOptions
from tailrace.core.plan.plan import build_plan
from tailrace.core.plan.profile import PROFILES
from tailrace.core.plan.request import OplogBatch
from tailrace.core.stream.stream import ONE_OPLOG, open_stream
from tailrace.lake.spark.query.options import SERVER_FLAGS
from tests.differential.cases import odd_stages, options_of

#: Given by the scope.
OF_THE_SCOPE: Final = {"allChangesForCluster"}
NAMES: Final = sorted({name.decode() for name in _BOOLEANS} - OF_THE_SCOPE)
#: ``tailrace watch`` has no flag for the server's own collections.
WITHOUT_FLAG: Final = {"allowToRunOnConfigDB", "allowToRunOnSystemNS"}
#: The random workloads have streams of their own for those, and no shard to remove.
NOT_MIXED: Final = {*WITHOUT_FLAG, "ignoreRemovedShards"}
END: Final = ClusterTime.of(9, 9)
UI: Final = Binary(uuid.UUID(int=7).bytes, 4)
SESSION: Final = {"lsid": {"id": Binary(uuid.UUID(int=1).bytes, 4), "uid": b"u" * 32}, "txnNumber": Int64(3)}
NULL_TIME: Final = {"ts": Timestamp(0, 0), "t": Int64(-1)}
_INSERT: Final = {"op": "i", "ns": "d.c", "ui": UI, "o": {"_id": 1, "a": 5}, "o2": {"_id": 1}}
_UPDATE: Final = {"op": "u", "ns": "d.c", "ui": UI, "o": {"$v": 2, "diff": {"u": {"a": 6}}}, "o2": {"_id": 1}}
_DELETE: Final = {"op": "d", "ns": "d.c", "ui": UI, "o": {"_id": 1}}
#: One of each kind, as in a transaction and outside of it.
ENTRIES: Final[tuple[dict[str, Any], ...]] = (
    {"op": "c", "ns": "d.$cmd", "ui": UI, "o": {"create": "c", "idIndex": {"v": 2}}},
    _INSERT,
    _UPDATE,
    {"op": "u", "ns": "d.c", "ui": UI, "o": {"_id": 1, "a": 7}, "o2": {"_id": 1}},
    {**_INSERT, "fromMigrate": True},
    {**_INSERT, "ns": "d.system.js"},
    _DELETE,
    {**SESSION, "op": "c", "ns": "admin.$cmd", "o": {"applyOps": [_INSERT, _UPDATE, _DELETE]}, "prevOpTime": NULL_TIME},
    {"op": "c", "ns": "d.$cmd", "ui": UI, "o": {"drop": "c"}, "o2": {"numRecords": 0}},
)


def events(name: str, kernel: Any) -> list[bytes]:
    options = StreamOptions.parse(Scope.cluster(), {name: True}, profile=PROFILES[-1])
    stream = open_stream(build_plan(options, PROFILES[-1]).start_at(ClusterTime.of(1, 0)), kernel=kernel)
    raw = [
        bson.encode({**entry, "ts": Timestamp(2, number + 1), "t": Int64(1), "v": Int64(2), "wall": bson.DatetimeMS(5)})
        for number, entry in enumerate(ENTRIES)
    ]
    stream.feed(ONE_OPLOG, OplogBatch(b"".join(raw), END))
    given: list[bytes] = []
    while (block := stream.next_output()) is not None:
        assert isinstance(block, EventBlock), "who asks for something needs a case of its own"
        given += block.events()
    return given


@pytest.mark.parametrize("name", NAMES)
def test_the_kernel_follows_each_option_as_the_plain_stages_do(name: str) -> None:
    """This finds an option that ``settings_for`` forgets; earlier tests had fixed lists of options."""
    plain = events(name, "never")
    assert len(plain) >= 8
    assert [bson.decode(event) for event in events(name, "always")] == [bson.decode(event) for event in plain]


@pytest.mark.parametrize("name", NAMES)
def test_masks_know_the_fields_that_each_option_adds(name: str) -> None:
    """A field that masks do not know ends a masked stream."""
    known = {*_PLAIN, *_DOCUMENTS, *_DESCRIPTIONS, b"documentKey", b"updateDescription", b"rawUpdateDescription"}
    shown = {field.encode() for event in events(name, "never") for field in bson.decode(event)}
    assert shown - known == set()


def test_each_option_is_one_of_spark_of_the_commands_and_of_the_random_workloads() -> None:
    """Otherwise a new option passes all tests without being in any of the three lists."""
    names = set(NAMES)
    assert names == set(SERVER_FLAGS)
    assert names - WITHOUT_FLAG == {option for _, option, _ in _SWITCHES}
    rng = random.Random(1)
    mixed = {name for _ in range(200) for name in options_of(rng)}
    assert names - NOT_MIXED <= mixed
    assert names - NOT_MIXED <= {name for _ in range(500) for name in odd_stages(rng)}
