"""Both ends of a sync are sharded clusters; the target is written through a stand-in for a mongos (``mongos.py``)."""

from __future__ import annotations

import random

import pytest

from tailrace.embedded import ShardedCluster
from tailrace.errors import TailraceError
from tailrace.sync import Sync
from tests.snapshot.test_snapshot_sharded import REGIONS, spread_over
from tests.sync.both import STATE_DB, is_users, normal
from tests.sync.equality import differences, held
from tests.sync.mongos import WritingMongos

pytestmark = [pytest.mark.mongod, pytest.mark.slow]


def test_a_cluster_is_copied_to_a_cluster_with_its_shard_keys() -> None:
    with (
        ShardedCluster(2) as source,
        ShardedCluster(2) as target,
        WritingMongos(source) as there,
        WritingMongos(target) as mongos,
    ):
        namespace = spread_over(source, "shop", {"region": 1, "_id": 1})
        router, rng = source.router, random.Random(1)
        for number in range(120):
            router.insert_one(namespace, {"_id": number, "region": REGIONS[number % len(REGIONS)], "n": number})
        router.insert_one("shop.plain", {"_id": 1})

        def unlike() -> list[str]:
            sides = [held(uri, but=[STATE_DB], selected=is_users) for uri in (there.uri, mongos.uri)]
            assert len(sides[0][namespace].documents) > 50
            return differences(*sides, uuids=False, known=normal("", "", ages=False))

        with Sync(source.uri, mongos.uri, lease_s=4.0) as sync:
            assert not sync.plan().refusals
            sync.run(to_present=True)
            assert target.router.table(namespace).key == {"region": 1, "_id": 1}
            assert unlike() == []
            for number in range(60):
                key = {"region": REGIONS[number % len(REGIONS)], "_id": number}
                if rng.random() < 0.3:
                    router.delete_one(namespace, key)
                else:
                    router.update_one(namespace, key, {"$set": {"n": rng.random()}}, upsert=True)
            router.move_chunk(namespace, {"region": REGIONS[0], "_id": 0}, to="shard1")
            target.router.split(namespace, {"region": REGIONS[2]})
            target.router.move_chunk(namespace, {"region": REGIONS[2], "_id": 0}, to="shard1")
            sync.run(to_present=True)
            assert unlike() == []
            found = sync.verify()
            assert found.good, found.differences
            router.insert_one(namespace, {"_id": 500, "region": REGIONS[3]})
            sync.run(to_present=True)
            router.insert_one(namespace, {"_id": 500, "region": REGIONS[2]})
            with pytest.raises(TailraceError, match="one _id"):
                sync.run(to_present=True)
