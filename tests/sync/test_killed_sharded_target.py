"""A sync to a sharded cluster that is killed (SIGKILL) at moments of its copy and of its following."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from pymongo import MongoClient

from tailrace.embedded import ReplicaSet, ShardedCluster
from tailrace.sync import Sync
from tests.sync.mongos import WritingMongos
from tests.sync.test_sharded_target import BY_REGION, change, made, order, spread, unlike

pytestmark = [pytest.mark.mongod, pytest.mark.slow]
ROOT = Path(__file__).parents[2]
KILLS = 8


def test_a_killed_sync_to_a_cluster_is_equal_at_its_end(tmp_path: Path) -> None:
    rng = random.Random(35)
    with (
        ReplicaSet() as source,
        ShardedCluster(2) as cluster,
        WritingMongos(cluster) as mongos,
        MongoClient[Any](source.uri) as client,
    ):
        client.shop.orders.insert_many([order(number) for number in range(400)])
        client.shop.orders.create_index([("region", 1), ("_id", 1)])
        client.shop.plain.insert_many([{"_id": number} for number in range(20)])
        for number in range(KILLS):
            key = 'shop.orders={"region": 1, "_id": 1}'
            options = ["--lease-seconds", "2", "--documents-per-second", "150", "--shard-key", key]
            command = [sys.executable, "-m", "tailrace", "sync", source.uri, mongos.uri, *options]
            with (tmp_path / "log").open("ab") as log:
                process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
            change(client, number)
            client.shop.plain.rename("renamed")
            client.shop.renamed.rename("plain")
            time.sleep(rng.uniform(2.0, 6.0))
            change(client, 100 + number)
            assert process.poll() is None, (tmp_path / "log").read_text()[-2000:]
            process.kill()
            process.wait()
            if number == KILLS // 2:
                with made(source, mongos) as sync:
                    sync.run(to_present=True)
                spread(cluster)
        with Sync(source.uri, mongos.uri, shard_keys={"shop.orders": BY_REGION}, lease_s=4.0) as sync:
            sync.run(to_present=True)
            assert unlike(source, mongos) == []
            assert sync.verify().good
