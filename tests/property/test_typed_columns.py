"""The typed columns of tables made by compiled code, compared with the reference, which decodes each document."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence

import bson
import numpy as np
import pyarrow as pa
import pytest
from bson.datetime_ms import DatetimeMS

from tailrace.core import raw_bson
from tailrace.errors import SinkError
from tailrace.lake.tables.rows import json_texts
from tailrace.lake.tables.schema import POLICIES, Converted, Policy, TableSchema, convert
from tailrace.lake.tables.typed import typed_columns
from tests.amounts import amount
from tests.property import random_values
from tests.property.test_kernel_columns import usual_document

SEED = 20261123
NAMES = ("_id", "n", "total", "a.b", "a rather long name", "a rather long nose", "o", "", "é")
DECLARED = {
    "_id": "long", "n": "int", "total": "double", "`a.b`": "string", "a rather long name": "timestamp",
    "a rather long nose": "date", "o.n": "long", "o.o.n": "json", "o": "json", "é": "binary", "x": "objectid",
    "y": "boolean", "z": "decimal(12,2)",
}  # fmt: skip
NESTED = {
    "o": "struct<n: int, `a.b`: string, o: struct<n: double, z: decimal(12,2), o: json>, `a rather long nose`: date, "
    "é: binary, l: array<struct<n: long>>>",
    "l": "array<struct<n: long, x: objectid>>",
}


def compiled(schema: TableSchema, documents: Sequence[bytes]) -> Converted:
    buffer = b"".join(documents)
    offsets = np.cumsum([0, *map(len, documents)]).astype(np.int64)
    return typed_columns(schema, documents, buffer, offsets, json_texts(buffer, offsets)[1])


def outcome(make: object, schema: TableSchema, documents: Sequence[bytes]) -> str:
    """Everything that a caller can see. As text, since NaN equals nothing."""
    assert callable(make)
    try:
        made = make(schema, documents)
    except SinkError as error:
        return str(error)
    for array in made.arrays:
        array.validate(full=True)
    # Python has no datetime for every timestamp.
    arrays = [one.cast(pa.int64()) if pa.types.is_timestamp(one.type) else one for one in made.arrays]
    return repr((made.schema, [one.to_pylist() for one in arrays], made.misfits, made.retyped))


def document(rng: random.Random, depth: int = 0) -> bytes:
    """A few of the names; mostly each with values of one type, and now and then with any."""
    elements = []
    for name in rng.sample((*NAMES, "x", "y", "z", "l"), rng.randint(0, 8)):
        type_, value = usual(rng, name, depth)
        if rng.random() < 0.02:
            type_, value = random_values.value(rng)
        elements.append(raw_bson.encode_element(type_, name.encode(), value))
    if rng.random() < 0.02:
        elements += elements[:1]
    return raw_bson.encode_document(*elements)


def array(rng: random.Random, depth: int) -> bytes:
    """Objects and nulls, and now and then anything."""
    elements = []
    for place in range(rng.choice((0, 1, 3))):
        type_, value = (raw_bson.OBJECT, document(rng, depth + 1)) if rng.random() < 0.8 else (raw_bson.NULL, b"")
        if rng.random() < 0.05:
            type_, value = random_values.value(rng)
        key = b"%d" % place if rng.random() < 0.95 else rng.choice((b"", b"x", b"0", b"a key of many bytes"))
        elements.append(raw_bson.encode_element(type_, key, value))
    return raw_bson.encode_document(*elements)


def usual(rng: random.Random, name: str, depth: int) -> tuple[int, bytes]:
    if name == "o" and depth < 3:
        return raw_bson.OBJECT, document(rng, depth + 1)
    if name == "l" and depth < 3:
        return raw_bson.ARRAY, array(rng, depth + 1)
    if name not in USUAL or rng.random() < 0.1:
        return raw_bson.NULL, b""
    return USUAL[name](rng)


def date(rng: random.Random) -> random_values.Value:
    return raw_bson.DATE, (rng.randrange(4 * 10**12) - 10**12).to_bytes(8, "little", signed=True)


USUAL: dict[str, Callable[[random.Random], random_values.Value]] = {
    "_id": random_values.int64, "n": random_values.int32, "total": random_values.double,
    "a.b": lambda rng: (raw_bson.STRING, raw_bson.encode_string(random_values.text(rng))),
    "a rather long name": date, "a rather long nose": date, "é": random_values.binary,
    "x": lambda rng: (raw_bson.OBJECT_ID, rng.randbytes(12)),
    "y": lambda rng: (raw_bson.BOOL, bytes([rng.randrange(2)])), "z": random_values.decimal,
}  # fmt: skip


@functools.cache
def batches() -> list[list[bytes]]:
    rng = random.Random(SEED)
    return [[document(rng) for _ in range(rng.choice((1, 5, 40)))] for _ in range(3 * amount(40, 150))]


@pytest.mark.long
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", ["inferred", "declared", "nested", "declared nested"])
def test_columns_are_those_of_the_reference(policy: Policy, kind: str) -> None:
    for first in range(3 * ("nested" in kind), len(batches()), 6):
        schema = TableSchema(policy=policy, nested=kind == "nested")
        if kind.startswith("declared"):
            schema = TableSchema.declared(DECLARED | (NESTED if kind.endswith("nested") else {}), policy)
        for documents in batches()[first : first + 3]:
            expected = outcome(convert, schema, documents)
            assert outcome(compiled, schema, documents) == expected
            if "does not fit" not in expected:
                schema = convert(schema, documents).schema


@pytest.mark.parametrize("policy", POLICIES)
def test_documents_of_all_types_have_the_same_columns(policy: Policy) -> None:
    rng = random.Random(SEED)
    for count in (1, 2, 30):
        for number in range(amount(25, 100)):
            documents = [random_values.document(rng) for _ in range(count)]
            schema = TableSchema(policy=policy, nested=number % 2 == 1)
            assert outcome(compiled, schema, documents) == outcome(convert, schema, documents)


@pytest.mark.parametrize("policy", POLICIES)
def test_numbers_at_the_bounds_of_their_columns(policy: Policy) -> None:
    schema = TableSchema.declared({"n": "int", "total": "double", "t": "timestamp", "day": "date"}, policy)
    for bound in (2**31, 2**53, (2**63 - 1) // 1000, -719_162 * 86_400_000, 2_932_896 * 86_400_000):
        for value in (bound - 1, bound, bound + 1, -bound - 1, -bound, 1 - bound):
            date = DatetimeMS(value)
            for one in ({"n": value}, {"total": value}, {"t": date}, {"day": date}):
                documents = [bson.encode(one)]
                assert outcome(compiled, schema, documents) == outcome(convert, schema, documents)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_path_leads_through_objects_only(policy: Policy) -> None:
    """In BSON an array looks like an object whose fields are numbers, and a declared path must not match inside one."""
    schema = TableSchema.declared({"o.0": "long", "o.1.0": "long"}, policy)
    documents = [bson.encode({"o": value}) for value in ([1, [2]], {"0": 7, "1": [3]}, {"1": {"0": 4}}, [{"0": 5}], 6)]
    made = compiled(schema, documents)
    assert [one.to_pylist() for one in made.arrays] == [[None, 7, None, None, None], [None, None, 4, None, None]]
    assert outcome(compiled, schema, documents) == outcome(convert, schema, documents)


def test_no_usual_document_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the first document with a field is decoded, to find out which column it needs."""
    rng = random.Random(SEED)
    documents = [bson.encode(usual_document(rng) | {"_id": number}) for number in range(300)]
    schema = convert(TableSchema(), documents).schema
    whole = typed_columns.__globals__["slow"].Decoded
    decoded: list[int] = []

    class Counting(whole):  # type: ignore[misc, valid-type]
        def __getitem__(self, number: int) -> object:
            decoded.append(number)
            return super().__getitem__(number)

    monkeypatch.setattr("tailrace.lake.tables.schema.Decoded", Counting)
    made = compiled(schema, documents)
    assert len(made.arrays) == len(schema.columns)
    assert len(set(decoded)) < 30


def test_no_usual_object_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [
        {"sku": "x", "n": 1, "tags": ["x", None], "price": 2.5},
        None,
        {"n": 2, "at": DatetimeMS(0), "deep": [[1]]},
    ]
    documents = [
        bson.encode({"_id": number, "o": {"lines": lines[: number % 4], "name": "é"}, "l": [] if number % 3 else lines})
        for number in range(40)
    ]
    schema = convert(TableSchema(nested=True), documents).schema
    assert outcome(compiled, schema, documents) == outcome(convert, schema, documents)
    monkeypatch.setattr("tailrace.lake.tables.typed._value", lambda *_: pytest.fail("a value was decoded"))
    assert len(compiled(schema, documents).arrays) == 3


@pytest.mark.parametrize("count", [511, 512, 513, 600])
def test_long_arrays_have_the_columns_of_the_reference(count: int) -> None:
    documents = [bson.encode({"l": list(range(one)), "o": [{"n": 1}] * one}) for one in (1, count, 0, 12)]
    schema = TableSchema(nested=True)
    assert outcome(compiled, schema, documents) == outcome(convert, schema, documents)
    known = convert(schema, documents).schema
    assert outcome(compiled, known, documents) == outcome(convert, known, documents)


@pytest.mark.parametrize("key", [b"", b"x", b"1234567", b"12345678"])
def test_the_key_of_an_element_says_nothing(key: bytes) -> None:
    """The server accepts arrays with any keys, and keeps them."""
    element = raw_bson.encode_element(raw_bson.INT32, key, (5).to_bytes(4, "little"))
    odd = raw_bson.encode_document(
        raw_bson.encode_element(raw_bson.ARRAY, b"l", raw_bson.encode_document(element, element))
    )
    known = convert(TableSchema(nested=True), [odd]).schema
    made = compiled(known, [odd, bson.encode({"l": [7]}), odd])
    assert made.arrays[0].to_pylist() == [[5, 5], [7], [5, 5]]


def test_a_table_has_no_more_columns_than_its_readers_take() -> None:
    documents = [bson.encode({f"f{number}": number for number in range(first, first + 300)}) for first in (0, 200, 600)]
    found = compiled(TableSchema(), documents)
    assert len(found.arrays) == 500
    assert outcome(compiled, TableSchema(), documents) == outcome(convert, TableSchema(), documents)
