"""Exact images of a cluster under disturbances: a transaction that is prepared while documents are copied, another
primary shard, a reader and servers that die. Compared with the shards' own images (6.0); on older servers the events
without them, and the images with one another and with what is stored at the end."""

from __future__ import annotations

import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import bson
import pytest
from bson.raw_bson import RawBSONDocument
from bson.timestamp import Timestamp
from pymongo import MongoClient

import tailrace
from tailrace.embedded import ShardedCluster
from tailrace.read.images.bucket import ImageStateError
from tests.following_images import Last, images_that_do_not_follow, without_images
from tests.server_in_use import SERVER_VERSION
from tests.sharded import exact_reader, native
from tests.sharded.test_exact_images import EXACT, REQUIRED, differences, read_until
from tests.sharded.waiting import wait_for
from tests.snapshot.copies import id_of

pytestmark = pytest.mark.mongod


OLDER = ("5.0.4", "4.4.2")


def keeps_images(cluster: ShardedCluster) -> bool:
    return int(cluster.version.partition(".")[0]) >= 6


def spread(cluster: ShardedCluster, database: str) -> str:
    """A collection, with images where servers keep them: below 10 on the first shard, the rest on the second."""
    namespace, (first, second, *_) = f"{database}.orders", cluster.shards
    router = cluster.router
    router.create_database(database, first)
    router.shard_collection(namespace, {"_id": 1})
    if keeps_images(cluster):
        router.coll_mod(namespace, changeStreamPreAndPostImages={"enabled": True})
    router.split(namespace, {"_id": 10})
    router.move_chunk(namespace, {"_id": 10}, to=second)
    return namespace


def can_copy(cluster: ShardedCluster) -> bool:
    """Whether a stream may begin now, with a copy; otherwise it begins with the collection."""
    return int(cluster.version.partition(".")[0]) >= 5


def after(time: Timestamp) -> Timestamp:
    return Timestamp(time.time, time.inc + 1)


def begin_of(token: Any) -> Timestamp:
    """The start of the stream with this first token: an event may have exactly this time."""
    return native.token(bson.encode({"_id": token})).cluster_time.to_timestamp()


def held(cluster: ShardedCluster, namespace: str) -> Last:
    """What a collection holds, as its documents' last images."""
    found = [bson.encode(document) for document in cluster.router.find(namespace)]
    return {(namespace.partition(".")[2], id_of(document)): document for document in found}


def wrong(  # noqa: PLR0917
    cluster: ShardedCluster,
    scope: tuple[str, str | int],
    begun: Timestamp,
    end: Timestamp,
    found: list[bytes],
    last: Last,
) -> list[str]:
    """In words, what is wrong with the events that were found between two times. ``last``: what was there before, if
    the servers keep no images; nothing is written after ``end``."""
    database, collection = scope
    if keeps_images(cluster):
        expected = native.union(cluster, database, collection, begun, end, for_merge=False, **REQUIRED)
        return differences(found, expected)
    expected = native.union(cluster, database, collection, begun, end)
    said = differences([without_images(event) for event in found], expected)
    said += images_that_do_not_follow(found, last)
    there = {key: image for key, image in last.items() if image is not None}
    return said if there == held(cluster, f"{database}.orders") else [*said, "the last images are not what is stored"]


@pytest.mark.parametrize("mode", ["exact", "exactWhenAvailable"])
def test_a_directory_without_the_folder_of_a_shard_is_refused(
    sharded_cluster: ShardedCluster, tmp_path: Path, mode: str
) -> None:
    """That shard's state started empty, like that of a shard that has just joined, and its images were null."""
    router, database = sharded_cluster.router, f"exact_folder_{mode}".lower()
    namespace, directory = spread(sharded_cluster, database), tmp_path / "images"
    router.insert_many(namespace, [{"_id": number, "n": 0} for number in (1, 11)])
    connected = tailrace.connect(sharded_cluster.uri, images=directory, document_class=RawBSONDocument)
    with connected as client:
        orders = client[database]["orders"]
        with orders.watch(full_document=mode) as stream:
            token = stream.resume_token
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        kept = tmp_path / "kept"
        for folder in sorted(directory.glob("shard-*")):
            folder.rename(kept)
            with pytest.raises(ImageStateError, match=f"the images in {folder}/.* are gone"):
                orders.watch(full_document=mode, resume_after=token)
            shutil.rmtree(folder)
            kept.rename(folder)
        for number in (1, 11):
            router.update_one(namespace, {"_id": number}, {"$inc": {"n": 1}})
        with orders.watch(full_document=mode, resume_after=token) as stream:
            images = [event["fullDocument"] for event in (stream.next(), stream.next())]
    assert [(image["_id"], image["n"]) for image in images] == [(1, 1), (11, 1)]


@pytest.mark.parametrize("copy_has_it", [True, False])
def test_a_transaction_is_prepared_while_the_documents_are_copied(
    sharded_cluster: ShardedCluster, tmp_path: Path, *, copy_has_it: bool
) -> None:
    prepared_while_copied(sharded_cluster, tmp_path, copy_has_it=copy_has_it)


@pytest.mark.slow
@pytest.mark.parametrize("copy_has_it", [True, False])
def test_a_transaction_is_prepared_while_an_older_server_s_documents_are_copied(
    start_sharded_cluster: Callable[..., ShardedCluster], tmp_path: Path, *, copy_has_it: bool
) -> None:
    """(4.4 cannot copy.)"""
    prepared_while_copied(start_sharded_cluster(2, version="5.0.4"), tmp_path, copy_has_it=copy_has_it)


def prepared_while_copied(cluster: ShardedCluster, directory: Path, *, copy_has_it: bool) -> None:
    """A copy waits for a transaction that was prepared before its time. It then has what the transaction wrote if
    that was committed at an earlier time, though the entry that says so comes later in the oplog. (Tried with made-up
    entries only.)"""
    router, database = cluster.router, f"exact_prepared_{copy_has_it}".lower()
    namespace, first = spread(cluster, database), next(iter(cluster.shards))
    documents = [{"_id": base + place, "n": 0, "gone": 1} for base in (0, 10) for place in range(1, 5)]
    router.insert_many(namespace, documents)
    transaction = router.transaction()
    for base in (0, 10):
        change = {"$inc": {"n": 1}, "$push": {"list": "in it"}, "$unset": {"gone": 1}}
        transaction.update_one(namespace, {"_id": base + 1}, change)
        transaction.replace_one(namespace, {"_id": base + 2}, {"_id": base + 2, "other": 7})
        transaction.delete_one(namespace, {"_id": base + 3})
        transaction.insert_one(namespace, {"_id": base + 5, "n": 5})
    transaction.prepare()
    with (
        MongoClient(cluster.shards[first].uri) as shard,
        tailrace.connect(cluster.uri, images=directory, document_class=RawBSONDocument) as client,
        ThreadPoolExecutor(1) as pool,
    ):
        orders = client[database]["orders"]
        try:
            if copy_has_it:  # the first shard's time is then later than the commit's
                router.update_one(namespace, {"_id": 4}, {"$set": {"n": 1}})
            opening = pool.submit(lambda: orders.watch(**EXACT, max_await_time_ms=50))
            query = {"currentOp": 1, "ns": namespace, "command.readConcern.level": "snapshot"}
            wait_for(lambda: bool(shard.admin.command(query)["inprog"]), "the copy does not wait")
        except BaseException:
            transaction.abort()
            raise
        transaction.commit()
        last = held(cluster, namespace)
        with opening.result() as stream:
            begun = begin_of(stream.resume_token)
            for base in (0, 10):
                for place in (1, 2, 4, 5):
                    router.update_one(
                        namespace, {"_id": base + place}, {"$inc": {"n": 10}, "$push": {"list": "behind it"}}
                    )
                router.insert_one(namespace, {"_id": base + 3, "n": 3})
                router.delete_one(namespace, {"_id": base + 5})
            end = router.fence()
            found = read_until(stream, end)
    assert not wrong(cluster, (database, "orders"), begun, end, found, last)
    assert len(found) == 12


def test_a_database_gets_another_primary_shard_and_the_first_one_again(
    sharded_cluster: ShardedCluster, tmp_path: Path
) -> None:
    another_primary(sharded_cluster, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("version", OLDER)
def test_a_database_of_older_servers_gets_another_primary_shard_and_the_first_one_again(
    start_sharded_cluster: Callable[..., ShardedCluster], tmp_path: Path, version: str
) -> None:
    another_primary(start_sharded_cluster(2, version=version), tmp_path)


def another_primary(cluster: ShardedCluster, directory: Path) -> None:
    """Its unsharded collections are copied to the new shard and dropped on the old one: this ends a collection's
    stream, and the database's goes on. (Only moves of chunks had been tried.)"""
    router, database = cluster.router, "exact_primary"
    namespace, (first, second, *_) = f"{database}.orders", cluster.shards
    router.create_database(database, first)
    start = after(router.fence())
    router.insert_many(namespace, [{"_id": number, "n": 0} for number in range(20)])
    if keeps_images(cluster):
        router.coll_mod(namespace, changeStreamPreAndPostImages={"enabled": True})
    copies = can_copy(cluster)
    last = held(cluster, namespace) if copies else {}
    begins: dict[str, Any] = {} if copies else {"start_at_operation_time": start}
    with (
        tailrace.connect(cluster.uri, images=directory, document_class=RawBSONDocument) as client,
        client[database].watch(**EXACT, max_await_time_ms=50, **begins) as stream,
    ):
        begun = begin_of(stream.resume_token) if copies else start
        for turn, primary in enumerate((second, first, second, first)):
            for number in range(20):
                router.update_one(namespace, {"_id": number}, {"$inc": {"n": 1}, "$push": {"turns": turn}})
            router.delete_one(namespace, {"_id": turn})
            router.move_primary(database, primary)
            router.insert_one(namespace, {"_id": turn, "n": 100})
        end = router.fence()
        found = read_until(stream, end)
    assert not wrong(cluster, (database, 1), begun, end, found, last)
    assert len(found) == 4 * 23 + (0 if copies else 20)  # with the drops


@pytest.mark.slow
@pytest.mark.parametrize("version", [SERVER_VERSION, *OLDER])
def test_a_reader_and_shards_are_killed_and_elect_again(
    start_sharded_cluster: Callable[..., ShardedCluster], tmp_path: Path, version: str
) -> None:
    """The reader goes on after the last event that it has written down, with whatever is in its directory. (Neither had
    been killed before.)"""
    cluster = start_sharded_cluster(2, version=version)
    router, namespace = cluster.router, spread(cluster, "exact_killed")
    documents = [{"_id": number, "n": 0} for number in range(20)]
    beginning = after(router.fence())
    router.insert_many(namespace, documents)
    copies = can_copy(cluster)
    last = held(cluster, namespace) if copies else {}
    file = tmp_path / "events.bson"
    command = [sys.executable, "-m", exact_reader.__name__, cluster.uri, str(tmp_path / "images"), str(file)]

    def start() -> subprocess.Popen[bytes]:
        begins = [] if copies else [f"{beginning.time},{beginning.inc}"]
        return subprocess.Popen([*command, "exact_killed", *begins])

    def write(turn: int) -> None:
        for document in documents:
            router.update_one(namespace, {"_id": document["_id"]}, {"$inc": {"n": 1}, "$push": {"turns": turn}})

    reader = start()
    try:
        wait_for(lambda: bool(exact_reader.records(file)), "the stream does not begin")
        for turn in range(8):
            write(turn)
            assert reader.poll() is None
            if turn % 4 != 1:
                reader.kill()
                reader.wait()
            if turn % 4 == 1:
                cluster.restart("shard1", cluster.kill("shard1"))
            elif turn % 4 == 2:
                cluster.step_down("shard0")
            elif turn % 4 == 3:
                router.move_chunk(namespace, {"_id": 10}, to=f"shard{turn // 4}")
                cluster.restart("shard0", cluster.kill("shard0"))
            if reader.poll() is not None:
                write(turn)
                reader = start()
                known = len(exact_reader.records(file))
                wait_for(lambda known=known: len(exact_reader.records(file)) > known, "the reader does not go on")
        router.insert_one(namespace, {"_id": "end"})
        end = router.fence()
        wait_for(lambda: reader.poll() is not None, "the reader does not end")
    finally:
        reader.kill()
        reader.wait()
    assert reader.returncode == 0
    token, *found = exact_reader.records(file)
    begun = begin_of(bson.decode(token)["_id"]) if copies else beginning
    assert not wrong(cluster, ("exact_killed", "orders"), begun, end, found, last)
    assert sorted(document["n"] for document in router.find(namespace, {"n": {"$exists": True}})) == [14] * 20
    assert len(found) == (14 if copies else 15) * len(documents) + 1
