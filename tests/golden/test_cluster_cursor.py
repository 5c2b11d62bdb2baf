"""A cursor serves a stream over a sharded cluster as it serves one over a replica set."""

from __future__ import annotations

import bson
import pytest
from bson.int64 import Int64
from bson.raw_bson import RawBSONDocument

from tailrace.core.cursor import CursorRegistry
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.plan.profile import profile_for
from tailrace.core.stream.merge import CONFIG_SHARDS
from tests.golden.cursors import batch_of, carry_out, counting_ids
from tests.golden.recording import token_time
from tests.golden.sharded_replay import ClusterSource
from tests.golden.test_sharded_recordings import RECORDINGS, ROUTER_STREAMS, WITH_A_NEW_SHARD, added_at

pytestmark = [pytest.mark.usefixtures("kernel_on_and_off"), pytest.mark.by_turns]

#: Without a cursor all of a recording's streams were compared; some are enough here, those with a new shard among them.
NAMES = sorted({*list(ROUTER_STREAMS)[::5], *WITH_A_NEW_SHARD[:2]})


@pytest.mark.parametrize(("batch_size", "entries_max"), [(1_000, 1 << 30), (3, 20)])
@pytest.mark.parametrize("name", NAMES)
def test_the_replies_hold_the_events_of_the_merged_stream(name: str, batch_size: int, entries_max: int) -> None:
    recording_name, index = ROUTER_STREAMS[name]
    recording = RECORDINGS[recording_name]
    stream = (recording.merged + recording.resumes)[index]
    start = token_time(stream.reply_tokens[0])
    meets = name in WITH_A_NEW_SHARD and start <= added_at(recording.name)
    known = [shard for shard in recording.shards if not meets or shard not in recording.added]
    source = ClusterSource(recording, recording.end, known, ClusterTime(start - 1), entries_max=entries_max)
    registry = CursorRegistry(counting_ids(), profile_for(recording.server))
    target = stream.command["clusterAggregate"]
    command = {"aggregate": target, "pipeline": stream.command["pipeline"], "cursor": {"batchSize": batch_size}}
    reply = RawBSONDocument(carry_out(registry.run(stream.database, bson.encode(command), 0), source))
    events: list[bytes] = []
    while True:
        assert reply["ok"] == 1, bson.decode(reply.raw)
        events += batch_of(reply)
        cursor_id, ns = reply["cursor"]["id"], reply["cursor"]["ns"]
        if not cursor_id or not batch_of(reply):
            break
        more = {"getMore": Int64(cursor_id), "collection": ns.partition(".")[2], "batchSize": batch_size}
        reply = RawBSONDocument(carry_out(registry.run(stream.database, bson.encode(more), 0), source))
    assert events == list(stream.events)
    assert (reply["cursor"]["id"] == 0) == stream.closed
    assert set(source.confirmed) == {*known, CONFIG_SHARDS}
    assert set(source.opened) <= set(recording.shards) - set(known)
