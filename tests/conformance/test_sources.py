"""What ``tailrace.read.source.base`` promises, asked of every source over the same oplog."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import bson
import pymongo
import pytest
from bson.raw_bson import RawBSONDocument

from tailrace.core import raw_bson
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.oplog.namespace import Scope
from tailrace.core.plan.profile import profile_for
from tailrace.core.plan.request import DocumentLookup, OplogBatch, PreImageKey
from tailrace.embedded import ReplicaSet
from tailrace.errors import ChangeStreamHistoryLost, ServerError
from tailrace.read.archive.hybrid import HybridSource
from tailrace.read.archive.recorder import ArchivePolicy, Recorder
from tailrace.read.archive.source import ArchiveSource
from tailrace.read.archive.writer import SegmentLimits
from tailrace.read.images.source import ExactSource
from tailrace.read.source.base import OplogSource
from tailrace.read.source.batch import entry_time
from tailrace.read.source.dump import DumpSource
from tailrace.read.source.live import LiveSource
from tailrace.read.source.mongod import MongodSource
from tailrace.read.tail.shared_tail import SharedTail
from tailrace.read.tail.tailed_source import TailedSource

DATABASE = "conformance"
NOWHERE = bytes(16)
LONG_AGO = ClusterTime.of(1, 1)


@dataclass(frozen=True)
class Written:
    """An oplog and what belongs to it. ``start`` is before the first of ``entries``, ``end`` the time of the last."""

    uri: str
    dump: Path
    archive: Path
    start: ClusterTime
    end: ClusterTime
    entries: list[bytes]
    uuid: bytes
    pre_images: dict[PreImageKey, bytes]

    @property
    def times(self) -> list[ClusterTime]:
        return [entry_time(entry) for entry in self.entries]


@pytest.fixture(scope="module")
def replica_set() -> Iterator[ReplicaSet]:
    """One of this file's own: the dump, the archive and the state hold its whole oplog, each time they are opened."""
    with ReplicaSet(1, enable_test_commands=True, parameters={"disableLogicalSessionCacheRefresh": True}) as running:
        yield running


@pytest.fixture(scope="module")
def written(replica_set: ReplicaSet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Written]:
    raw = bson.CodecOptions(document_class=RawBSONDocument)
    with pymongo.MongoClient[Any](replica_set.uri) as client:
        start = client.admin.command("ping")["operationTime"]
        database = client[DATABASE]
        database.create_collection("c", changeStreamPreAndPostImages={"enabled": True})
        database.create_collection("v", viewOn="c")
        for number in range(30):
            database["c"].insert_one({"_id": number, "text": "x" * 500})
            database["other"].insert_one({"_id": number})
        database["c"].update_one({"_id": 1}, {"$set": {"text": "new"}})
        database["c"].delete_one({"_id": 2})
        with client.start_session() as session:
            database["c"].insert_one({"_id": 100}, session=session)
            end = session.operation_time
        assert end is not None
        oplog = client.local.get_collection("oplog.rs", codec_options=raw)
        whole = [bytes(entry.raw) for entry in oplog.find({"ts": {"$lte": end}}, sort=[("$natural", 1)])]
        info = next(iter(database.list_collections(filter={"name": "c"})))["info"]
        stored = client.config.get_collection("system.preimages", codec_options=raw)
        images = [bytes(image.raw) for image in stored.find({"_id.nsUUID": info["uuid"]})]
        folder = tmp_path_factory.mktemp("dump")
        (folder / "config").mkdir()
        (folder / "oplog.bson").write_bytes(b"".join(whole))
        (folder / "config" / "system.preimages.bson").write_bytes(b"".join(images))
        keys = {}
        for image in map(bson.decode, images):
            id_ = image["_id"]
            key = PreImageKey(bytes(id_["nsUUID"]), ClusterTime.from_timestamp(id_["ts"]), id_["applyOpsIndex"])
            keys[key] = bson.encode(image["preImage"])
        begun, ended = ClusterTime.from_timestamp(start), ClusterTime.from_timestamp(end)
        after = [entry for entry in whole if entry_time(entry) > begun]
        archive = tmp_path_factory.mktemp("archive")
        policy = ArchivePolicy(once=True, limits=SegmentLimits(bytes=10_000))
        Recorder(client, None, archive, policy).run()
        yield Written(replica_set.uri, folder, archive, begun, ended, after, bytes(info["uuid"]), keys)
        client.drop_database(DATABASE)


#: Those that read files: they know no current documents and no views.
STORED = (DumpSource, ArchiveSource)
#: Those that read the deployment as it runs.
LIVE = ("mongod", "hybrid", "tailed", "exact", "exact over hybrid")


def exact(written: Written, live: LiveSource, folder: Path) -> ExactSource:
    """With a state that knows every document of the oplog, so that what it computes is what the server has kept."""
    opened = ExactSource(live, folder, Scope.of_database(DATABASE), profile_for(live.server_version), recover=True)
    opened.begin(written.start, live.client)
    return opened


@pytest.fixture
def tailed(written: Written) -> Iterator[Callable[[], TailedSource]]:
    with pymongo.MongoClient[Any](written.uri) as client, closing(SharedTail(client, streams_min=1)) as shared:
        yield lambda: TailedSource(client, shared, Scope.of_database(DATABASE))


@pytest.fixture(params=["dump", "archive", *LIVE])
def source(
    request: pytest.FixtureRequest, written: Written, tmp_path: Path, tailed: Callable[[], TailedSource]
) -> Iterator[OplogSource]:
    def hybrid() -> HybridSource:
        return HybridSource(MongodSource(written.uri), ArchiveSource(written.archive))

    opened: OplogSource = {
        "mongod": lambda: MongodSource(written.uri),
        "dump": lambda: DumpSource(written.dump),
        "archive": lambda: ArchiveSource(written.archive),
        "hybrid": hybrid,
        "tailed": tailed,
        "exact": lambda: exact(written, MongodSource(written.uri), tmp_path / "images"),
        "exact over hybrid": lambda: exact(written, hybrid(), tmp_path / "images"),
    }[request.param]()
    yield opened
    opened.close()
    opened.close()  # again


def given(batches: Iterator[OplogBatch]) -> list[bytes]:
    return [entry for batch in batches for entry in raw_bson.split(batch.raw)]


def test_it_has_every_method_and_a_name_without_a_password(source: OplogSource) -> None:
    assert isinstance(source, OplogSource)
    assert isinstance(source, LiveSource) != isinstance(source, STORED)
    assert source.name
    assert "@" not in source.name


def test_the_oldest_entry_comes_before_the_newest(source: OplogSource, written: Written) -> None:
    oldest, complete = source.oldest()
    assert oldest < written.start
    assert complete  # the replica set was made for these tests
    newest = source.newest()
    assert newest >= written.end
    assert source.operation_time() >= newest


def test_a_range_holds_each_entry_once_in_order(source: OplogSource, written: Written) -> None:
    batches = list(source.read(written.start, written.end))
    assert given(iter(batches)) == written.entries
    assert batches[-1].high_water == written.end
    middle = written.times[10], written.times[20]
    assert given(source.read(*middle)) == written.entries[11:21]


def test_the_high_water_never_goes_back_and_is_never_before_the_batch_s_last_entry(
    source: OplogSource, written: Written
) -> None:
    batches = list(source.read(written.start, written.end, batch_bytes_max=2_000))
    assert given(iter(batches)) == written.entries
    assert len(batches) > 5
    for before, after in pairwise(batches):
        assert before.high_water <= after.high_water
    for batch in batches:
        entries = list(raw_bson.split(batch.raw))
        assert len(entries) == 1 or len(batch.raw) <= 2_000
        assert all(entry_time(entry) <= batch.high_water for entry in entries)


def test_a_range_that_ends_between_two_entries_promises_its_end(source: OplogSource, written: Written) -> None:
    first = written.times[0]
    begin = max(source.oldest()[0], ClusterTime(written.start - 10))  # computed images know nothing older
    batches = list(source.read(begin, ClusterTime(first - 1)))
    assert batches[-1].high_water == first - 1


def test_an_empty_range_gives_no_batch(source: OplogSource, written: Written) -> None:
    assert list(source.read(written.end, written.end)) == []
    assert list(source.read(written.end, written.start)) == []


def test_a_filter_leaves_out_nothing_that_passes(source: OplogSource, written: Written) -> None:
    wanted = [entry for entry in written.entries if bson.decode(entry)["ns"] == f"{DATABASE}.other"]
    oplog_filter = bson.encode({"ns": f"{DATABASE}.other"})
    batches = list(source.read(written.start, written.end, oplog_filter=oplog_filter))
    got = given(iter(batches))
    assert [entry for entry in got if entry in wanted] == wanted
    assert [entry for entry in written.entries if entry in got] == got  # nothing else, and in order
    assert batches[-1].high_water == written.end


@pytest.mark.parametrize("filtered", [False, True])
def test_a_tail_gives_what_comes_after_in_order(source: OplogSource, written: Written, filtered: bool) -> None:
    oplog_filter = bson.encode({"ns": f"{DATABASE}.c"}) if filtered else None
    wanted = [e for e in written.entries if not filtered or bson.decode(e)["ns"] == f"{DATABASE}.c"]
    tail = source.tail(written.start, await_ms=20, oplog_filter=oplog_filter)
    got: list[bytes] = []
    high_water = written.start
    for batch in tail:
        assert batch.high_water >= high_water
        high_water = batch.high_water
        got += raw_bson.split(batch.raw)
        if high_water >= written.end:
            break
    tail.close()  # type: ignore[attr-defined]
    assert [entry for entry in got if entry in wanted] == wanted


def test_look_ups_are_answered_in_the_order_asked_while_an_iterator_is_open(
    source: OplogSource, written: Written
) -> None:
    reading = source.read(written.start, written.end, batch_bytes_max=2_000)
    before = given(islice(reading, 1))
    times = [written.times[5], LONG_AGO, written.times[2], written.times[5]]
    assert source.entries(times) == [written.entries[5], None, written.entries[2], written.entries[5]]
    assert source.entries([]) == []
    (one, image), (other, other_image) = sorted(written.pre_images.items())[:2]
    missing = PreImageKey(NOWHERE, written.start, 0)
    expected = [other_image, None, image, other_image]
    if isinstance(source, ExactSource):  # those of the last batch only: see the next test
        expected = [None] * 4
    assert source.pre_images([other, missing, one, other]) == expected
    assert source.pre_images([]) == []
    assert before + given(reading) == written.entries


def test_each_batch_s_pre_images_can_be_had_until_the_next_one_is_read(source: OplogSource, written: Written) -> None:
    found = {}
    for batch in source.read(written.start, written.end, batch_bytes_max=2_000):
        times = {entry_time(entry) for entry in raw_bson.split(batch.raw)}
        keys = [key for key in written.pre_images if key.cluster_time in times]
        found.update(zip(keys, source.pre_images(keys), strict=True))
    assert found == written.pre_images
    assert len(found) >= 2


def test_current_documents_are_answered_in_the_order_asked(source: OplogSource, written: Written) -> None:
    def lookup(number: int, collection: str = "c", uuid: bytes | None = None) -> DocumentLookup:
        return DocumentLookup(DATABASE, collection, bson.encode({"_id": number}), written.end, uuid)

    asked = [lookup(1), lookup(2), lookup(5, uuid=written.uuid), lookup(5, uuid=NOWHERE), lookup(5, "none"), lookup(1)]
    changed, kept = bson.encode({"_id": 1, "text": "new"}), bson.encode({"_id": 5, "text": "x" * 500})
    answer = source.documents(asked)
    assert answer in ([changed, None, kept, None, None, changed], [None] * 6)
    assert (answer[0] is None) == isinstance(source, STORED)
    assert source.documents([]) == []


def test_a_view_is_refused_where_the_source_knows_it(source: OplogSource) -> None:
    source.refuse_view(DATABASE, "c")
    source.refuse_view(DATABASE, "nothing")
    if isinstance(source, STORED):
        source.refuse_view(DATABASE, "v")
        return
    with pytest.raises(ServerError) as caught:
        source.refuse_view(DATABASE, "v")
    assert caught.value.code == 166


def test_an_iterator_raises_at_next_and_the_source_may_be_asked_again(tmp_path: Path, written: Written) -> None:
    """Of a dump: the loss of a live oplog's history is a test of ``tests/differential/test_source_live.py``."""
    (tmp_path / "oplog.bson").write_bytes(b"".join(written.entries))
    source: OplogSource = DumpSource(tmp_path)
    for reading in (source.read(LONG_AGO, written.end), source.tail(LONG_AGO)):
        with pytest.raises(ChangeStreamHistoryLost) as caught:
            next(reading)
        assert caught.value.code == 286
        assert list(reading) == []
    assert given(source.read(ClusterTime(written.times[0] - 1), written.end)) == written.entries
