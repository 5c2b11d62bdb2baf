"""What counts as the same in two catalogues, depending on the versions of the servers."""

from __future__ import annotations

from typing import Any

import bson
import pytest
from bson.int64 import Int64

from tailrace.act.sync.catalog import TTL_MAX, CatalogCollection, DeploymentCatalog, difference
from tailrace.act.sync.indexes import held_spec

ID = bson.encode({"v": 2, "key": {"_id": 1}, "name": "_id_"})


def catalog(version: tuple[int, int], limit: Any) -> DeploymentCatalog:
    spec = bson.encode({"v": 2, "key": {"at": 1}, "name": "ttl", "expireAfterSeconds": limit})
    collection = CatalogCollection("shop.a", "collection", b"u" * 16, bson.encode({}), ID, (spec,))
    return DeploymentCatalog(version, {"shop.a": collection})


@pytest.mark.parametrize("version", [(4, 4), (5, 0), (6, 0)])
def test_a_limit_of_age_that_was_altered_on_a_4_4_is_a_long_number(version: tuple[int, int]) -> None:
    """A sync to 4.4 holds limits of age and restores them by collMod, which makes them long: verification and cut-over
    then found a difference where there was none. They had been tested between 4.4 servers without such an index."""
    source = catalog((4, 4), 1000)
    [spec] = source.collections["shop.a"].indexes
    held = {("shop.a", "ttl"): held_spec(spec)}
    type_ = Int64 if version < (5, 0) else int
    assert difference(source, catalog(version, type_(TTL_MAX)), held=held) == []
    assert difference(source, catalog(version, type_(1000))) == []
    assert len(difference(source, catalog(version, type_(1001)))) == 1
    assert len(difference(source, catalog(version, type_(1000)), held=held)) == 1


def test_from_5_0_on_bytes_count() -> None:
    assert len(difference(catalog((5, 0), 1000), catalog((5, 0), Int64(1000)))) == 1
