"""Deltas as updates that the target carries out: the bytes are those of the source, and deltas that cannot become
updates are recognised."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import bson
import pytest
from bson.binary import Binary
from bson.code import Code
from bson.datetime_ms import DatetimeMS
from bson.decimal128 import Decimal128
from bson.int64 import Int64
from bson.max_key import MaxKey
from bson.min_key import MinKey
from bson.regex import Regex
from bson.timestamp import Timestamp
from pymongo import MongoClient

from tailrace.act.sync.deltas import DeltaEncoder, takes_deltas
from tailrace.act.sync.inserting import RawDocuments, insertion
from tailrace.act.sync.statements import query_of
from tailrace.act.sync.writer import _BYPASS
from tailrace.core import raw_bson as rb
from tailrace.embedded import ReplicaSet
from tests.amounts import amount
from tests.differential.fuzz_images import ImagesFuzz, Totals, corpus_values, key_of

pytestmark = pytest.mark.used_servers
INTERNAL = b"$_internalApplyOplogUpdate"


class Applied(ImagesFuzz):
    """Random updates; each delta is carried out again on the document before it."""

    def __init__(self, client: MongoClient[Any], seed: int, encoder: DeltaEncoder) -> None:
        super().__init__(client, seed, corpus_values(), Totals())
        self.encoder = encoder
        self.client = client
        self.todo: dict[bytes, tuple[bytes, bytes, list[bytes]]] = {}
        self.ways: Counter[str] = Counter()
        self.refused_deltas: Counter[Any] = Counter()

    def _apply(self, entry: bytes, where: str) -> None:
        fields = {element.name: element for element in rb.elements(entry)}
        change = rb.value(entry, fields[b"o"])
        letter = rb.read_string(entry, fields[b"op"].value_start)
        before = None
        if letter == b"u":
            key = key_of(rb.value(entry, fields[b"o2"]))
            before = self.known.get(key)
        super()._apply(entry, where)
        if before is None or key in self.todo:
            return
        made = self.encoder.updates([(ord("u"), change, 1)])
        if made is None:
            self.ways["whole"] += 1
            return
        self.ways["as it is" if INTERNAL in made[0] else "modifiers"] += 1
        self.todo[key] = before, self.known[key], made

    def _check(self, where: str) -> None:
        self.todo = {}
        super()._check(where)
        there = self.client["images"]["again"]
        there.drop()
        before = b"".join(one for one, _, _ in self.todo.values())
        if not before:
            return
        there.database.command({"insert": "again", "documents": [RawDocuments(before)], **_BYPASS})
        for key, (_, _, made) in list(self.todo.items()):
            [element] = rb.elements(key)
            query = query_of(key[element.start : element.end])
            statements = b"".join(rb.encode_document(query, update) for update in made)
            reply = there.database.command({"update": "again", "updates": [RawDocuments(statements)], **_BYPASS})
            if "writeErrors" in reply:
                self.refused_deltas[reply["writeErrors"][0]["code"]] += 1
                del self.todo[key]
            else:
                assert reply["n"] == len(made)
        found = {key_of(one): one for one in rb.split(b"".join(there.find_raw_batches({})))}
        for key, (document, after, made) in self.todo.items():
            assert found[key] == after, (document, made)


#: The names that deltas, updates and entries use for their own parts.
OUR_NAMES = ("u", "i", "d", "l", "a", "b", "s", "sa", "su", "u0", "s0", "diff", "o", "o2", "q", "0", "1", "set", "_id")


class OwnNames(Applied):
    """The same for documents whose fields have the names that a delta has for its parts."""

    def _value(self, depth: int = 0) -> Any:
        kind = self.rng.randrange(3 if depth < 3 else 1)
        if kind == 0:
            return self.rng.choice((self.rng.randrange(100), "text", None, True))
        values = [self._value(depth + 1) for _ in range(self.rng.randint(1, 4))]
        return values if kind == 1 else dict(zip(self.rng.sample(OUR_NAMES, len(values)), values, strict=True))

    def _fill(self, count: int) -> None:
        documents = []
        for _ in range(count):
            fields = {name: self._value() for name in self.rng.sample(OUR_NAMES, 6) if name != "_id"}
            documents.append({"_id": self.rng.randrange(1 << 30), **fields})
        self._command({"insert": self.name, "documents": documents, "ordered": False})

    def _path(self) -> str:
        first = self.rng.choice([name for name in OUR_NAMES if name != "_id"])
        return ".".join([first, *self.rng.choices(OUR_NAMES, k=self.rng.randrange(3))])

    def _more(self) -> Any:
        kind = self.rng.randrange(5)
        if kind == 0:
            return {"$set": {self._path(): self._value(1)}}
        if kind == 1:
            return {"$unset": {self._path(): ""}}
        if kind == 2:
            return {"$push": {self._path(): self._value(2)}}
        if kind == 3:
            return {"$pop": {self._path(): self.rng.choice((1, -1))}}
        return [{"$set": {self._path(): {"$literal": self._value(1)}}}, {"$unset": self._path()}]


@pytest.mark.mongod
def test_fields_that_are_named_like_the_parts_of_a_delta(start_replica_set: Callable[..., ReplicaSet]) -> None:
    with MongoClient[Any](start_replica_set(version="6.0.27").uri) as client:
        fuzz = OwnNames(client, 12, DeltaEncoder(takes_names=True, takes_deltas=True))
        fuzz.run(amount(400, 3000))
    assert fuzz.totals.differences == []
    assert not fuzz.refused_deltas
    assert min(fuzz.ways["modifiers"], fuzz.ways["as it is"]) > 20


@pytest.mark.mongod
@pytest.mark.parametrize(
    ("version", "takes"),
    [
        ("6.0.27", True),
        pytest.param("5.0.4", False, marks=pytest.mark.slow),
        pytest.param("7.0.28", True, marks=[pytest.mark.slow, pytest.mark.wine]),
    ],
)
def test_a_delta_carried_out_gives_the_bytes_that_the_source_has(
    version: str, takes: bool, start_replica_set: Callable[..., ReplicaSet]
) -> None:
    with MongoClient[Any](start_replica_set(version=version).uri) as client:
        assert takes_deltas(client, "images") == takes
        fuzz = Applied(client, 11, DeltaEncoder(takes_names=True, takes_deltas=takes))
        fuzz.run(amount(300, 3000))
    assert fuzz.totals.differences == []
    assert not fuzz.refused_deltas
    assert fuzz.ways["modifiers"] > 30
    assert (fuzz.ways["as it is"] > 30) == takes


#: Values that compare as equal, or look alike, but have different bytes.
TWINS: tuple[Any, ...] = (
    *(1, Int64(1), 1.0, True, "1", Decimal128("1"), Decimal128("1.0"), Decimal128("10E-1"), [1], [1.0], {"n": 1}),
    *(0, Int64(0), 0.0, -0.0, Decimal128("0"), Decimal128("-0"), Decimal128("0E3"), Decimal128("0.00"), None, [None]),
    *(float("nan"), -float("nan"), Decimal128("NaN"), Decimal128("-NaN"), float("inf"), Decimal128("Infinity"), [], {}),
    *(2.5, Decimal128("2.5"), Decimal128("2.50"), {"n": Int64(1)}, {"a": 1, "b": 1}, {"b": 1, "a": 1}, "", Code("")),
    *({"n": [1, {"m": 0.0}]}, {"n": [1, {"m": -0.0}]}, {"n": [Int64(1), {"m": 0.0}]}, Binary(b""), Binary(b"", 5)),
    *(Regex(""), Regex("", "i"), Timestamp(0, 0), Timestamp(0, 1), DatetimeMS(0), DatetimeMS(1), MinKey(), MaxKey()),
)


@pytest.mark.mongod
@pytest.mark.parametrize(
    "version",
    [
        "6.0.27",
        pytest.param("4.4.2", marks=pytest.mark.slow),
        pytest.param("5.0.4", marks=pytest.mark.slow),
        pytest.param("7.0.28", marks=[pytest.mark.slow, pytest.mark.wine]),
    ],
)
def test_a_value_gives_way_to_one_that_is_equal_to_it_and_of_other_bytes(
    version: str, start_replica_set: Callable[..., ReplicaSet]
) -> None:
    """At the top level, in a document and in an array; also a field that occurs twice, of which the first is
    changed."""
    encoder = DeltaEncoder(takes_names=True, takes_deltas=False)
    pairs = [(one, other) for one in TWINS for other in TWINS]
    befores, statements, afters = [], [], []
    for number, (one, other) in enumerate(pairs):
        before, after = (bson.encode({"": value})[4:-1] for value in (one, other))

        def held(value: bytes, number: int = number, twin: bytes = before) -> bytes:
            named = value[:1] + b"v" + value[1:]
            twins = named + twin[:1] + b"v" + twin[1:] + b"\x10last\0" + bytes(4)
            inner = rb.encode_element(rb.OBJECT, b"d", rb.encode_document(named, b"\x0az\0"))
            items = rb.encode_document(b"\x0a0\0", value[:1] + b"1" + value[1:])
            return rb.encode_document(
                rb.encode_element(rb.INT32, b"_id", rb.encode_int32(number)),
                twins,
                inner,
                rb.encode_element(rb.ARRAY, b"l", items),
            )

        changed = after[:1] + b"v" + after[1:]
        section = rb.encode_element(rb.OBJECT, b"u", rb.encode_document(changed))
        item = b"\x08a\0\1" + after[:1] + b"u1" + after[1:]
        diff = rb.encode_document(
            section,
            rb.encode_element(rb.OBJECT, b"sd", rb.encode_document(section)),
            rb.encode_element(rb.OBJECT, b"sl", rb.encode_document(item)),
        )
        entry = rb.encode_document(b"\x10$v\0\2\0\0\0", rb.encode_element(rb.OBJECT, b"diff", diff))
        [made] = encoder.updates([(ord("u"), entry, 1)]) or []
        identifier = rb.encode_element(rb.INT32, b"_id", rb.encode_int32(number))
        befores.append(held(before))
        afters.append(held(after))
        statements.append(rb.encode_document(query_of(identifier), made))
    with MongoClient[Any](start_replica_set(version=version).uri) as client:
        there = client["twins"]["held"]
        there.drop()
        # An insert would replace an empty timestamp by the time.
        there.database.command({"update": "held", "updates": [insertion(one) for one in befores]})
        reply = there.database.command({"update": "held", "updates": [RawDocuments(b"".join(statements))], **_BYPASS})
        assert "writeErrors" not in reply
        assert reply["n"] == len(pairs)
        found = list(rb.split(b"".join(there.find_raw_batches({}, sort=[("_id", 1)]))))
        there.drop()
    wrong = [pair for pair, one, after in zip(pairs, found, afters, strict=True) if one != after]
    assert wrong == []


def delta(diff: dict[str, Any]) -> bytes:
    return bson.encode({"$v": 2, "diff": diff})


@pytest.mark.parametrize(
    ("diff", "update"),
    [
        ({"u": {"a": 1, "b": "$x.y"}}, {"$set": {"a": 1, "b": "$x.y"}}),
        ({"d": {"a": False}, "u": {"b": {"c.d": 1}}}, {"$set": {"b": {"c.d": 1}}, "$unset": {"a": True}}),
        ({"sa": {"u": {"b": 1}, "sc": {"d": {"e": False}}}}, {"$set": {"a.b": 1}, "$unset": {"a.c.e": True}}),
        (
            {"sa": {"a": True, "u3": 1, "s4": {"u": {"b": 2}}, "s5": {"a": True, "u0": 3}}},
            {"$set": {"a.3": 1, "a.4.b": 2, "a.5.0": 3}},
        ),
    ],
)
def test_a_delta_that_modifiers_carry_out(diff: dict[str, Any], update: dict[str, Any]) -> None:
    made = DeltaEncoder(takes_names=True, takes_deltas=False).updates([(ord("u"), delta(diff), 1)])
    assert made == [rb.encode_element(rb.OBJECT, b"u", bson.encode(update))]


@pytest.mark.parametrize(
    "diff",
    [
        {"i": {"a": 1}},
        {"u": {"a": 1}, "i": {"b": 1}},
        {"sa": {"a": True, "l": 2}},
        {"sa": {"a": True, "l": 2, "u0": 1}},
        {"sa": {"sb": {"a": True, "s1": {"i": {"c": 1}}}}},
        {"u": {"_id": 1}},
        {"d": {"_id": False}},
        {"u": {"a.b": 1}},
        {"u": {"$a": 1}},
        {"u": {"": 1}},
        {"d": {"a.b": False}},
        {"sa": {"u": {"$b": 1}}},
        {"sa.b": {"u": {"c": 1}}},
    ],
)
def test_a_delta_that_no_modifiers_carry_out(diff: dict[str, Any]) -> None:
    changes = [(ord("u"), delta(diff), 1)]
    assert DeltaEncoder(takes_names=True, takes_deltas=False).updates(changes) is None
    [made] = DeltaEncoder(takes_names=True, takes_deltas=True).updates(changes) or []
    assert INTERNAL in made


def test_a_name_with_a_dollar_inside_of_a_value_goes_whole_to_a_target_that_takes_none() -> None:
    changes = [(ord("u"), delta({"u": {"a": {"$b": 1}}}), 1)]
    assert DeltaEncoder(takes_names=False, takes_deltas=False).updates(changes) is None
    assert DeltaEncoder(takes_names=True, takes_deltas=False).updates(changes) is not None


def test_many_changes_of_one_document_are_one_update_or_few() -> None:
    encoder = DeltaEncoder(takes_names=True, takes_deltas=True)
    plain = [(ord("u"), delta({"u": {"a": number}}), number) for number in range(1, 9)]
    assert encoder.updates(plain) == [rb.encode_element(rb.OBJECT, b"u", bson.encode({"$set": {"a": 8}}))]
    nested = [(ord("u"), delta({"sa": {"u": {"b": number}}}), number) for number in range(1, 9)]
    assert len(encoder.updates(nested[:3]) or []) == 3
    assert encoder.updates(nested) is None
    assert encoder.updates([(ord("i"), bson.encode({"_id": 1}), 1), *plain]) is None
    assert encoder.updates([*plain, (ord("d"), bson.encode({"_id": 1}), 1)]) is None
    assert encoder.updates([(ord("u"), bson.encode({"_id": 1, "whole": 1}), 1)]) is None
