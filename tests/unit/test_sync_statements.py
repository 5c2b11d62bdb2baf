"""The statements of a segment, made before its transaction: which changes become which, and in which order."""

from __future__ import annotations

from typing import Any

import bson
import pytest
from bson.timestamp import Timestamp

from tailrace.act.sync.deltas import DeltaEncoder
from tailrace.act.sync.fold import NOT_THERE, THERE, UNKNOWN, DocumentChanges
from tailrace.act.sync.statements import (
    CollectionStatements,
    collection_statements,
    pieces,
    query_of,
    segment_statements,
)
from tailrace.core import raw_bson
from tailrace.read.window.apply import DELETE, DELETE_OF, INSERT, UPDATE, TimedChange
from tailrace.read.window.sortable_key import sortable_key

ENCODER = DeltaEncoder(takes_names=True, takes_deltas=True)
UUID, OTHER = b"u" * 16, b"o" * 16


def identifier(key: Any) -> bytes:
    return bson.encode({"_id": key})[4:-1]


def changed(key: Any, before: int, *changes: TimedChange, uuid: bytes = UUID) -> DocumentChanges:
    element = identifier(key)
    return DocumentChanges(uuid, sortable_key(element[0], element[5:]), element, before, list(changes))


def update(**fields: Any) -> TimedChange:
    return UPDATE, bson.encode({"$v": 2, "diff": {"u": fields}}), 1


def insert(**fields: Any) -> TimedChange:
    return INSERT, bson.encode(fields), 1


def delete(key: Any) -> TimedChange:
    return DELETE, bson.encode({"_id": key}), 1


def made(*documents: DocumentChanges, in_time: tuple[bytes, ...] = ()) -> CollectionStatements:
    return segment_statements(documents, ENCODER, in_time).collections[UUID]


def decoded(found: list[Any]) -> list[Any]:
    return [bson.decode(one) for piece in found for one in raw_bson.split(piece.joined)]


def test_updates_deletes_and_inserts_become_statements() -> None:
    found = made(
        changed(1, THERE, update(a=1)),
        changed(2, THERE, delete(2)),
        changed(3, NOT_THERE, insert(_id=3, b=2)),
        changed(4, THERE, update(a=1), update(a=2, c=3)),
    )
    assert decoded(found.updates) == [
        {"q": {"_id": 1}, "u": {"$set": {"a": 1}}},
        {"q": {"_id": 4}, "u": {"$set": {"a": 2, "c": 3}}},
    ]
    assert decoded(found.deletes) == [{"q": {"_id": 2}, "limit": 1}]
    assert decoded(found.inserts) == [{"_id": 3, "b": 2}]
    assert [piece.number for piece in (*found.updates, *found.deletes, *found.inserts)] == [2, 1, 1]
    assert (found.special, found.rest) == ([], [])
    assert found.size == sum(len(piece.joined) for piece in (*found.updates, *found.inserts))


@pytest.mark.parametrize(
    "one",
    [
        changed(1, UNKNOWN, update(a=1)),
        changed(1, UNKNOWN, delete(1)),
        changed(1, UNKNOWN, insert(_id=1)),
        changed(1, NOT_THERE, delete(1)),
        changed(1, NOT_THERE, insert(_id=1), update(a=1)),
        changed(1, THERE, insert(_id=1)),
        changed(1, THERE, insert(_id=1), update(a=1)),
        changed(1, THERE, (DELETE_OF, bson.encode({"_id": 1}), 1)),
        changed(1, THERE, delete(1), update(a=1)),
        changed(1, THERE, (UPDATE, bson.encode({"_id": 1, "whole": 1}), 1)),
        changed(1, THERE, (UPDATE, bson.encode({"$v": 1, "$set": {"a": 1}}), 1)),
        changed(1, THERE, update(a=1), (UPDATE, bson.encode({"_id": 1, "whole": 1}), 2)),
    ],
)
def test_what_needs_a_look_at_the_target_is_left_to_the_transaction(one: DocumentChanges) -> None:
    found = made(one)
    assert found.rest == [one]
    assert (found.updates, found.deletes, found.inserts, found.special) == ([], [], [], [])


@pytest.mark.parametrize(
    "document", [{"_id": 1, "at": Timestamp(0, 0)}, {"_id": 1, "$a": 1}, {"_id": {"$a": 1}}, {"_id": {"b": {"$a": 1}}}]
)
def test_a_document_that_an_insert_would_not_store_as_it_is(document: dict[str, Any]) -> None:
    found = made(changed(document["_id"], NOT_THERE, (INSERT, bson.encode(document), 1)))
    assert (found.special, found.inserts) == ([bson.encode(document)], [])


def test_neighbours_follow_each_other_or_changes_their_times() -> None:
    keys = [300, 2, "a", -5, 10**10, 2.5]
    documents = [changed(key, THERE, update(a=1)) for key in keys]
    assert [one["q"]["_id"] for one in decoded(made(*documents).updates)] == [-5, 2, 2.5, 300, 10**10, "a"]
    assert [one["q"]["_id"] for one in decoded(made(*documents, in_time=(UUID,)).updates)] == keys


def test_collections_have_their_own_statements() -> None:
    documents = [changed(n, THERE, delete(n), uuid=uuid) for n, uuid in enumerate((UUID, OTHER, UUID, OTHER, OTHER))]
    found = segment_statements(documents, ENCODER, ())
    assert found.documents is documents
    of = {uuid: [one["q"]["_id"] for one in decoded(one.deletes)] for uuid, one in found.collections.items()}
    assert of == {UUID: [0, 2], OTHER: [1, 3, 4]}


def test_names_stay_known_or_not_when_they_become_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tailrace.act.sync.deltas._NAMES_KEPT", 2)
    encoder = DeltaEncoder(takes_names=True, takes_deltas=False)
    for number in range(9):
        one = changed(1, THERE, update(**{f"a{number}": 1, "b": [1], "c": 2}))
        assert len(collection_statements([one], encoder).updates) == 1
        for name in ("_id", "a.b", "$a", ""):
            one = changed(1, THERE, update(**{"b": 1, name: 1}))
            assert collection_statements([one], encoder).rest == [one]


def test_pieces_are_commands_of_limited_size() -> None:
    assert [(len(piece.joined), piece.number) for piece in pieces([b"x" * (5 << 20)] * 3)] == [(5 << 20, 1)] * 3
    assert [piece.number for piece in pieces([b"x"] * 25_000)] == [10_000, 10_000, 5_000]
    assert [piece.number for piece in pieces([b"x" * (20 << 20), b"x"])] == [1, 1]
    assert list(pieces([])) == []


def test_a_query_never_takes_an_id_for_operators() -> None:
    assert query_of(identifier(7)) == b"\x03q\0" + bson.encode({"_id": 7})
    for key in ({"$gt": 1}, {}, None, {"a": 1}):
        assert query_of(identifier(key)) == b"\x03q\0" + bson.encode({"_id": {"$eq": key}})
