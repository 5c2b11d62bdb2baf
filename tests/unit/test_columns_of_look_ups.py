"""Many look-ups and their answers as columns: each element and each slice is what it was made from."""

from __future__ import annotations

import numpy as np
import pytest

from tailrace.core.event.image import CollectionLookups, DocumentLookup, FoundDocuments, PreImageKey, PreImageKeys
from tailrace.core.oplog.cluster_time import ClusterTime

DOCUMENTS = [b"first", None, b"second, which is longer", b"3"]


def test_found_documents_are_those_that_were_found() -> None:
    found = FoundDocuments.of(DOCUMENTS)
    assert [*found] == DOCUMENTS
    assert [*found[1:3]] == DOCUMENTS[1:3]
    assert FoundDocuments.of(found) is found
    assert [*FoundDocuments.of([None, None])] == [None, None]


@pytest.mark.parametrize(
    "numbers", [[], [[0, 1, 2, 3]], [[3, 0], [1]], [[2], [0], [3, 1]]], ids=["none", "one", "two", "three"]
)
def test_answers_in_parts_are_put_together_by_their_numbers(numbers: list[list[int]]) -> None:
    parts = [(np.array(some, np.int64), FoundDocuments.of([DOCUMENTS[number] for number in some])) for some in numbers]
    asked = {number for some in numbers for number in some}
    gathered = FoundDocuments.gathered(4, parts)
    assert [*gathered] == [document if number in asked else None for number, document in enumerate(DOCUMENTS)]


def test_keys_of_pre_images_are_the_keys_they_were_made_of() -> None:
    keys = [PreImageKey(bytes([number]) * 16, ClusterTime.of(5 + number, 2), 7 * number) for number in range(4)]
    columns = PreImageKeys.of(keys)
    assert [*columns] == keys
    assert [*columns[1:3]] == keys[1:3]
    assert PreImageKeys.of(columns) is columns


@pytest.mark.parametrize(("uuid", "by_uuid"), [(None, False), (bytes(16), False), (bytes(16), True)])
def test_look_ups_in_one_collection_are_the_look_ups_they_were_made_of(uuid: bytes | None, by_uuid: bool) -> None:
    lookups = [
        DocumentLookup("shop", "orders", bytes([number]), ClusterTime.of(9 - number, 1), uuid, by_uuid)
        for number in range(4)
    ]
    columns = CollectionLookups.of(lookups)
    assert [*columns] == lookups
    assert [*columns[1:3]] == lookups[1:3]
    assert [*columns.chosen([3, 0])] == [lookups[3], lookups[0]]
    assert columns.after == ClusterTime.of(9, 1)
    assert CollectionLookups.of(columns) is columns
