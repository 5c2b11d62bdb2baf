"""``watch()`` with the kernel at work, and without numba: the same events, and the same habits.

The other tests of ``watch()`` write so little that the plain stages do all of it.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import bson
import pytest
from bson.timestamp import Timestamp
from pymongo import MongoClient, UpdateOne

import tailrace
from tailrace.embedded import ReplicaSet
from tailrace.errors import UsageError
from tailrace.watch.client import kernel_loader
from tests.amounts import WHOLE
from tests.differential.test_watch_live import both, note

pytestmark = pytest.mark.mongod

_COUNT = 3000


@pytest.fixture
def kernel_at_work(monkeypatch: pytest.MonkeyPatch) -> None:
    importlib.import_module("tailrace.core.kernel.fast_path")  # which may compile for minutes on a busy machine
    monkeypatch.setattr(kernel_loader._loader, "ready", True)
    monkeypatch.setattr(kernel_loader, "_BATCH_BYTES_MIN", 0)  # small batches too


@pytest.fixture(scope="module")
def written(replica_set: ReplicaSet) -> Iterator[tuple[Timestamp, Timestamp]]:
    """More than what loads the kernel, with a transaction, a document that is no UTF-8, and a drop at its end."""
    with MongoClient[dict[str, Any]](replica_set.uri) as client:
        client.drop_database("watch_kernel")
        start = note(client)
        shop = client["watch_kernel"]
        shop.c.insert_many([{"_id": number, "n": number, "text": "x" * 100} for number in range(_COUNT)])
        shop.c.bulk_write([UpdateOne({"_id": number}, {"$set": {"n": -number}}) for number in range(0, _COUNT, 10)])
        shop.other.insert_one({"_id": 1})
        with client.start_session() as session, session.start_transaction():
            shop.c.insert_one({"_id": "in a transaction"}, session=session)
            shop.c.delete_one({"_id": 5}, session=session)
        shop.c.insert_many([{"_id": -number} for number in range(1, 400)])
        shop.c.drop()
        yield start, note(client)


@pytest.mark.by_turns
@pytest.mark.usefixtures("kernel_at_work")
@pytest.mark.parametrize("namespace", [(), ("watch_kernel",), ("watch_kernel", "c")], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"show_expanded_events": True},
        {"full_document": "updateLookup"},
        {"pipeline": [{"$match": {"fullDocument.n": {"$lt": 50}}}]},
        {"pipeline": [{"$match": {"operationType": "insert"}}, {"$project": {"documentKey": 1}}]},
    ],
    ids=str,
)
def test_watch_gives_the_servers_bytes(
    replica_set: ReplicaSet,
    written: tuple[Timestamp, Timestamp],
    namespace: tuple[str, ...],
    options: dict[str, Any],
) -> None:
    start, end = written
    expected, got = both(replica_set.uri, namespace, end, start_at_operation_time=start, **options)
    assert len(expected) >= 50
    assert got == expected


@pytest.mark.usefixtures("kernel_at_work")
def test_the_token_after_each_event_is_its_own_and_the_end_is_known_with_the_last(
    replica_set: ReplicaSet, written: tuple[Timestamp, Timestamp]
) -> None:
    with (
        tailrace.connect(replica_set.uri) as client,
        client.watch_kernel.c.watch(start_at_operation_time=written[0], max_await_time_ms=100) as stream,
    ):
        kinds = []
        for event in stream:
            kinds.append(event["operationType"])
            assert stream.resume_token == event["_id"]
            assert stream.alive == (event["operationType"] != "invalidate")
        assert kinds[-2:] == ["drop", "invalidate"]
        assert stream.try_next() is None


@pytest.mark.usefixtures("kernel_at_work")
def test_close_in_the_middle_of_a_block_ends_it_and_keeps_its_place(
    replica_set: ReplicaSet, written: tuple[Timestamp, Timestamp]
) -> None:
    with tailrace.connect(replica_set.uri) as client:
        stream = client.watch_kernel.c.watch(start_at_operation_time=written[0])
        seen = [next(stream) for _ in range(300)]
        closer = threading.Thread(target=stream.close)
        closer.start()
        closer.join()
        assert not stream.alive
        assert stream.resume_token == seen[-1]["_id"]
        at_hand = list(iter(stream.try_next, None))  # as with PyMongo's stream
        assert at_hand
        assert [event["documentKey"]["_id"] for event in at_hand] == [*range(300, 300 + len(at_hand))]
        with pytest.raises(StopIteration):
            stream.next()
        assert stream.resume_token == at_hand[-1]["_id"]
        with client.watch_kernel.c.watch(resume_after=stream.resume_token) as rest:
            assert rest.next()["documentKey"] == {"_id": 300 + len(at_hand)}


@pytest.mark.usefixtures("kernel_at_work")
def test_threads_that_share_a_stream_get_each_event_once(
    replica_set: ReplicaSet, written: tuple[Timestamp, Timestamp]
) -> None:
    """Nobody waits while there are events, so nobody holds up anybody else."""
    with (
        tailrace.connect(replica_set.uri) as client,
        client.watch_kernel.c.watch(start_at_operation_time=written[0]) as stream,
    ):
        seen = [stream.next()["documentKey"]["_id"]]  # the first reply is there
        found: list[list[Any]] = [[], []]

        def take(mine: list[Any]) -> None:
            while len(mine) < 40:
                mine.append(stream.next()["documentKey"]["_id"])

        threads = [threading.Thread(target=take, args=(mine,)) for mine in found]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(seen + found[0] + found[1]) == list(range(81))


@pytest.mark.usefixtures("kernel_at_work")
def test_an_event_that_cannot_be_decoded_fails_at_its_place(replica_set: ReplicaSet) -> None:
    with tailrace.connect(replica_set.uri) as client:
        start = note(client)
        collection = client.watch_kernel.undecodable
        collection.insert_many([{"_id": number} for number in range(50)])
        raw = bson.encode({"_id": 50, "text": "cut"}).replace(b"cut", b"\xff\xfe\xfd")
        collection.insert_one(bson.raw_bson.RawBSONDocument(raw))
        collection.insert_many([{"_id": number} for number in range(51, 100)])
        with client.watch_kernel.undecodable.watch(start_at_operation_time=start) as stream:
            for number in range(50):
                assert stream.next()["documentKey"] == {"_id": number}
            with pytest.raises(UsageError, match="cannot be decoded"):
                stream.next()
            assert not stream.alive


_SCRIPT = """
import hashlib, logging, sys
from tailrace.core.kernel import native
if sys.argv[1] != "compiled": native.use(None)
if sys.argv[1] == "plain": sys.modules["numba"] = None
import bson, tailrace
from bson.raw_bson import RawBSONDocument
from bson.timestamp import Timestamp
from tailrace.watch.client import kernel_loader
logging.basicConfig(format="%(name)s %(levelname)s %(message)s", stream=sys.stdout)
digest = hashlib.sha256()
with tailrace.connect(sys.argv[2]) as client:
    for _ in range(2):
        start = Timestamp(int(sys.argv[3]), int(sys.argv[4]))
        for event in client.watch_kernel.c.watch(start_at_operation_time=start, document_class=RawBSONDocument):
            digest.update(event.raw)
        kernel_loader._loader.join()
print(kernel_loader._loader.ready, digest.hexdigest())
"""


def test_events_are_the_same_whatever_compiled_the_kernel_and_without_it_the_log_says_so_once(
    replica_set: ReplicaSet, written: tuple[Timestamp, Timestamp]
) -> None:
    said = {}
    # What numba compiles here takes 10 s of processor: tests/unit/test_kernel_loading.py runs it on fewer events.
    kernels = ("compiled", "numba", "plain") if WHOLE else ("compiled", "plain")
    for kernel in kernels:
        arguments = [kernel, replica_set.uri, str(written[0].time), str(written[0].inc)]
        done = subprocess.run(
            [sys.executable, "-c", _SCRIPT, *arguments], capture_output=True, text=True, timeout=600, check=False
        )
        assert (done.returncode, done.stderr) == (0, "")
        said[kernel] = done.stdout.splitlines()
    warning, plain = said["plain"]
    assert plain.startswith("False ")
    for kernel in kernels[:-1]:
        assert said[kernel] == [plain.replace("False", "True")]
    assert warning.startswith("tailrace.client WARNING there is no compiled code for this machine")


def test_a_divided_first_reply_gives_the_event_at_its_end_at_once(
    replica_set: ReplicaSet, written: tuple[Timestamp, Timestamp], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first reply is read in two parts. ``watch()`` fills its first batch from both of them, as ever."""
    fresh = kernel_loader._KernelLoader()
    fresh.ready = True
    monkeypatch.setattr(kernel_loader, "_loader", fresh)
    divided = []
    shortened = kernel_loader.shortened
    monkeypatch.setattr(kernel_loader, "shortened", lambda batch: divided.append(shortened(batch)) or divided[-1])
    start, _ = written
    with (
        tailrace.connect(replica_set.uri) as client,
        client["watch_kernel"]["c"].watch(
            [{"$match": {"fullDocument.n": 1500}}], start_at_operation_time=start
        ) as stream,
    ):
        event = stream.try_next()
        assert event is not None
        assert event["documentKey"] == {"_id": 1500}
    assert [rest is not None for _, rest in divided] == [True]
