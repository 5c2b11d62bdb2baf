"""Damaged BSON at every entry point of the core: an error of ours, never another one, and never a hang.

Servers write sound documents and dumps are checked, so no test had given damaged ones to the expression language, to
key strings or to a stream. They raised ``IndexError``, ``struct.error`` and ``OverflowError``, and at a negative length
or a name without its end some loops went back to the beginning, for ever.
"""

from __future__ import annotations

import random
import signal
import struct
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from typing import Any, Final

import bson
import pytest
from bson.binary import Binary
from bson.code import Code
from bson.decimal128 import Decimal128
from bson.int64 import Int64
from bson.objectid import ObjectId
from bson.regex import Regex
from bson.timestamp import Timestamp

from tailrace.core import raw_bson
from tailrace.core.cursor import CursorRegistry
from tailrace.core.event import keystring
from tailrace.core.event.bson_text import document_text, spaced_document_text
from tailrace.core.event.resume_token import ResumeToken
from tailrace.core.event.update_description import describe_update
from tailrace.core.expression import compile_stages
from tailrace.core.expression.values import value as v
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.oplog.entry import first_elements, parse_entry
from tailrace.core.oplog.namespace import Scope
from tailrace.core.oplog.update_delta import apply_diff
from tailrace.core.plan.options import StreamOptions
from tailrace.core.plan.plan import build_plan
from tailrace.core.plan.profile import profile_for
from tailrace.core.plan.request import OplogBatch
from tailrace.core.stream.kernel_choice import KernelUse
from tailrace.core.stream.stream import ONE_OPLOG, open_stream
from tailrace.errors import InternalError, OplogFormatError, TailraceError
from tests.amounts import amount

#: Far longer than any step: none takes a hundredth of this.
_HANGS_S: Final = 60

EVERY_TYPE: Final[dict[str, Any]] = {
    "double": 1.5, "string": "text", "object": {"a": {"b": [1, {"c": 2}]}}, "array": [1, "two", [3], {"four": 4}],
    "binary": b"\x00\x01", "uuid": Binary(uuid.UUID(int=7).bytes, 4), "oid": ObjectId("0" * 24), "bool": True,
    "date": datetime(2026, 1, 1), "null": None, "regex": Regex("a", "i"), "code": Code("f"),
    "scoped": Code("f", {"x": 1}),
    "int": 7, "ts": Timestamp(5, 6), "long": Int64(1 << 40), "decimal": Decimal128("1.5"),
    "pointer": bson.dbref.DBRef("c", ObjectId("1" * 24)), "min": bson.min_key.MinKey(), "max": bson.max_key.MaxKey(),
}  # fmt: skip
#: A value of a type that no codec writes any more.
_POINTER: Final = b"\x0cold\x00\x02\x00\x00\x00c\x00" + bytes(12)
WHOLE: Final = raw_bson.encode_document(bson.encode(EVERY_TYPE)[4:-1], _POINTER)
EVENT: Final = bson.encode({"_id": {"_data": "82"}, "operationType": "insert"})[4:-1]

#: How many documents are damaged in each way, if every document has a stream of its own.
AMOUNT: Final = amount(6, 25)
PIPELINES: Final = [
    [{"$match": {"fullDocument.object.a.b.c": 2, "fullDocument.array": {"$elemMatch": {"four": {"$gt": 3}}}}}],
    [{"$match": {"$or": [{"fullDocument.string": {"$regex": "^t"}}, {"fullDocument.long": {"$mod": [3, 1]}}]}}],
    [{"$match": {"$expr": {"$gt": ["$fullDocument.date", {"$toDate": "$fullDocument.oid"}]}}}],
    [{"$match": {"fullDocument": {"$type": "object"}, "fullDocument.decimal": {"$gte": 1}}}],
    [{"$project": {"x": {"$map": {"input": "$fullDocument.array", "in": {"$type": "$$this"}}}}}],
    [{"$project": {"fullDocument.object": 1, "n": {"$objectToArray": "$fullDocument"}}}],
    [{"$set": {"fullDocument.new": {"$mergeObjects": ["$fullDocument", {"a": {"$add": ["$fullDocument.int", 1]}}]}}}],
    [{"$set": {"s": {"$concat": ["$fullDocument.string", "x"]}, "y": {"$year": "$fullDocument.date"}}}],
    [{"$unset": ["fullDocument.object.a", "fullDocument.array"]}],
    [{"$replaceRoot": {"newRoot": {"$mergeObjects": ["$$ROOT", {"k": {"$size": "$fullDocument.array"}}]}}}],
    [{"$redact": {"$cond": [{"$eq": ["$level", 5]}, "$$PRUNE", "$$DESCEND"]}}],
]  # fmt: skip


@contextmanager
def within_limit() -> Iterator[None]:
    def hang(*_: object) -> None:
        raise AssertionError("it hangs")

    before = signal.signal(signal.SIGALRM, hang)
    signal.alarm(_HANGS_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def nested(depth: int, *, array: bool) -> bytes:
    kind = raw_bson.ARRAY if array else raw_bson.OBJECT
    document = raw_bson.encode_document(raw_bson.encode_element(raw_bson.INT32, b"0", bytes(4)))
    for _ in range(depth):
        document = raw_bson.encode_document(raw_bson.encode_element(kind, b"0", document))
    return document


def damaged(whole: bytes, rng: random.Random, count: int) -> Iterator[bytes]:
    """``whole`` with something wrong: cut off, with a wrong length, another type, or random bytes."""
    for end in rng.sample(range(len(whole)), min(count, len(whole))):
        yield whole[:end]
        yield struct.pack("<i", end) + whole[4:end]
    for _ in range(count):
        at = rng.randrange(len(whole))
        yield whole[:at] + bytes([rng.choice([0, 1, 0xFF, 0x7F, 0x80, rng.randrange(256)])]) + whole[at + 1 :]
    for _ in range(count * 2):
        at = rng.randrange(4, max(5, len(whole) - 4))
        length = struct.unpack_from("<i", whole, at)[0] if at + 4 <= len(whole) else 0
        other = rng.choice([-1, -5, -(1 << 31), (1 << 31) - 1, 0, length - 1 if length > -(1 << 31) else 0, 4])
        yield whole[:at] + struct.pack("<i", other) + whole[at + 4 :]
    for depth in (150, 199, 201, 400, 3000):
        yield nested(depth, array=depth % 2 == 0)


def embedded(document: bytes) -> bytes:
    """An event with this ``fullDocument``; the event's own lengths are right."""
    return raw_bson.encode_document(EVENT, raw_bson.encode_element(raw_bson.OBJECT, b"fullDocument", document))


def refuses(work: Callable[[bytes], object], document: bytes) -> None:
    """Nothing is raised, or an error of ours that does not call it a bug of ours."""
    try:
        with within_limit():
            work(document)
    except InternalError as error:
        raise AssertionError(f"{error} of {document[:2000]!r}") from error
    except TailraceError:
        pass
    except Exception as error:
        raise AssertionError(f"{type(error).__name__}: {error} of {document[:2000]!r}") from error


def seeds() -> list[int]:
    return list(range(amount(1, 40)))


@pytest.mark.parametrize("seed", seeds())
def test_bytes_keys_tokens_and_texts(seed: int) -> None:
    def all_elements(document: bytes) -> None:
        for element in raw_bson.elements(document):
            keystring.encode(element.type, raw_bson.value(document, element))

    works: list[Callable[[bytes], object]] = [
        all_elements, raw_bson.check_structure, keystring.encode_object, first_elements, parse_entry, ResumeToken.parse,
        lambda document: list(raw_bson.split(document)), lambda document: raw_bson.find(document, b"max"),
        lambda document: raw_bson.array_documents(document, 0), document_text, spaced_document_text,
        lambda document: keystring.encode(raw_bson.OBJECT, document),
        lambda document: keystring.encode(raw_bson.DB_POINTER, document),
        lambda document: keystring.encode(raw_bson.CODE_WITH_SCOPE, document),
        lambda document: keystring.encode(raw_bson.DATE, document),
    ]  # fmt: skip
    rng = random.Random(seed)
    for document in [*damaged(WHOLE, rng, 60), b"", b"\x05"]:
        for work in works:
            refuses(work, document)


@pytest.mark.parametrize("seed", seeds())
@pytest.mark.parametrize("pipeline", PIPELINES, ids=lambda stages: next(iter(stages[0])))
def test_the_users_stages(pipeline: list[dict[str, Any]], seed: int) -> None:
    compiled = compile_stages([bson.encode(stage) for stage in pipeline])
    assert compiled.apply(embedded(WHOLE)) is None or True
    for document in damaged(WHOLE, random.Random(seed), 40):
        refuses(compiled.apply, embedded(document))


ARRAY: Final = {"a": True, "l": 3, "u0": 5, "s1": {"i": {"x": 1}}}
UPDATE: Final = bson.encode(
    {"$v": 2, "diff": {"d": {"e": False}, "u": {"a": 1, "b": {"c": [1]}}, "sf": ARRAY}}
)  # fmt: skip


@pytest.mark.parametrize("seed", seeds())
def test_updates(seed: int) -> None:
    stored = bson.encode({"a": 0, "b": {}, "e": 1, "f": [1, {"x": 0}, 3, 4]})
    describe_update(UPDATE)
    for document in damaged(UPDATE, random.Random(seed), 60):
        refuses(describe_update, document)
        refuses(lambda delta: describe_update(delta, disambiguated_paths=True), document)
        refuses(lambda delta: apply_diff(stored, delta), document)
    diff = bson.encode(bson.decode(UPDATE)["diff"])
    for document in damaged(diff, random.Random(seed), 60):
        refuses(lambda delta: apply_diff(stored, delta), document)
    for document in damaged(stored, random.Random(seed), 60):
        refuses(lambda old: apply_diff(old, diff), document)


def entry(operation: str, o: bytes, number: int, o2: bytes | None = None) -> bytes:
    fields = {"op": operation, "ns": "d.c", "ui": Binary(bytes(16), 4), "ts": Timestamp(9, number), "t": Int64(1)}
    head = bson.encode({**fields, "v": Int64(2), "wall": datetime(2026, 1, 1)})[4:-1]
    parts = [head, raw_bson.encode_element(raw_bson.OBJECT, b"o", o)]
    if o2 is not None:
        parts.append(raw_bson.encode_element(raw_bson.OBJECT, b"o2", o2))
    return raw_bson.encode_document(*parts)


@pytest.mark.long
@pytest.mark.parametrize("seed", seeds())
@pytest.mark.parametrize("pipeline", [[], PIPELINES[0], PIPELINES[6]], ids=["plain", "match", "set"])
@pytest.mark.parametrize("kernel", ["never", "always"])
def test_a_stream_gives_what_comes_before_the_damage_and_then_its_place(
    kernel: KernelUse, pipeline: list[dict[str, Any]], seed: int
) -> None:
    key, rng = bson.encode({"_id": 1}), random.Random(seed)
    options = StreamOptions.parse(Scope.parse("d.c"), {}, pipeline)
    plan = build_plan(options, profile_for("6.0.0")).start_at(ClusterTime.of(1, 1))
    inserts = [entry("i", document, 2, key) for document in damaged(WHOLE, rng, AMOUNT)]
    updates = [entry("u", document, 2, key) for document in damaged(UPDATE, rng, AMOUNT)]
    deletes = [entry("d", document, 2) for document in damaged(key, rng, 4)]
    commands = [entry("c", document, 2) for document in damaged(bson.encode({"drop": "c"}), rng, 4)]
    whole = entry("i", bson.encode({**EVERY_TYPE, "_id": 0}), 1, bson.encode({"_id": 0}))
    for raw in [*inserts, *updates, *deletes, *commands, *damaged(whole, rng, AMOUNT)]:

        def work(second: bytes) -> None:
            stream = open_stream(plan, kernel=kernel)
            stream.feed(ONE_OPLOG, OplogBatch(whole + second, ClusterTime.of(10, 0)))
            while stream.next_output() is not None:
                pass

        refuses(work, raw)


@pytest.mark.parametrize("seed", seeds())
def test_commands_of_clients(seed: int) -> None:
    command = bson.encode(
        {"aggregate": "c", "pipeline": [{"$changeStream": {"fullDocument": "default"}}, PIPELINES[0][0]], "cursor": {}}
    )

    def run(document: bytes) -> None:
        registry = CursorRegistry(iter(range(1, 1 << 20)), profile_for("6.0.0"))
        next(registry.run("d", document, 0), None)

    for document in damaged(command, random.Random(seed), 60):
        refuses(run, document)


def test_the_place_of_the_damage_is_told() -> None:
    compiled = compile_stages([bson.encode(PIPELINES[0][0])])
    broken = embedded(WHOLE[:60])
    with pytest.raises(OplogFormatError, match="corrupt BSON"):
        compiled.apply(broken)


@pytest.mark.parametrize(
    "walk",
    [v.fields_of, v.count_of, v.elements_by_name, v.nested_of, v.spans_of, v.places_of, v.numbers_its_arrays],
    ids=lambda walk: str(walk.__name__),
)
def test_no_walk_is_led_back(walk: Callable[[bytes], object]) -> None:
    """A negative length, and a name without its end, for which a search returns -1."""
    first = b"\x10a\x00" + bytes(4)
    back = b"\x02s\x00" + struct.pack("<i", -7)
    for body in (first + back + bytes(8), first + b"\x08" + b"\x03" * 12):
        with within_limit(), suppress(IndexError, ValueError, KeyError, struct.error, TailraceError):
            walk(struct.pack("<i", len(body) + 5) + body + (b"\x00" if body[-1] == 0 else b"\x04"))
