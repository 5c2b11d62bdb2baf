"""The user's stages over blocks compared with the plain ones: the same bytes and the same events filtered out, or left
to the plain ones.

Random stages of the shapes that have a program, alone and in sequences, on random events: odd names (empty, with dots
and dollars, twice), values of every type, ``_id`` nested, changed and removed, nesting near the limit, damaged bytes
before an inaccessible page.
"""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import bson
import numpy as np
import pytest
from bson.errors import InvalidBSON
from bson.int64 import Int64

from tailrace.core import raw_bson as rb
from tailrace.core.event.change_event import KeptPlaces
from tailrace.core.expression import CompiledPipeline, compile_stages
from tailrace.core.kernel import project_program
from tailrace.core.kernel.fast_path import process_batch
from tailrace.core.kernel.project_program import FAILS, NOT_KNOWN, PASSES
from tailrace.core.kernel.user_stages import BlockStages, compile_user_stages
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.pipeline.shard import ChangeStreamPipeline
from tailrace.core.plan.request import Answer, NeedDocuments, NeedEntries, NeedPreImages, OplogBatch, Request
from tailrace.core.stage.user_stages import check_id
from tailrace.errors import TailraceError, UsageError
from tests.amounts import amount
from tests.property import random_values
from tests.property.guard_page import GuardedBuffer
from tests.property.test_pushdown import CASES, events_of, plan_of, random_run
from tests.property.working import drive_blocks, drive_by

SEED = 20261201
TOKEN = bson.encode({"_data": "82AB", "_typeBits": b"\x01"})
GUARDED = GuardedBuffer(1 << 20)
NAMES = ("a", "b", "c", "x", "0", "_id", "ns")
ODD_NAMES = (b"", b"$x", b"a.b", b"a", b"a", b"b", b"_id", b"c", b"x", b"0", "é".encode(), b"longer than a word")
TOP = (
    "fullDocument",
    "documentKey",
    "updateDescription",
    "ns",
    "operationType",
    "wallTime",
    "_id",
    "new",
    "collectionUUID",
)


def block_of(events: list[bytes]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """What ``BlockStages.run`` takes: each event's token is the value of its first ``_id``."""
    offsets = np.cumsum([0] + [len(event) for event in events])
    tokens = []
    for event, start in zip(events, offsets, strict=False):
        element = rb.find(event, b"_id")
        assert element is not None
        tokens.append((start + element.value_start, start + element.end))
    places = np.array(tokens, np.int64).reshape(-1, 2)
    return np.frombuffer(b"".join(events), np.uint8), offsets, places[:, 0], places[:, 1]


def plain(user: CompiledPipeline, event: bytes) -> bytes | int | None:
    """What the plain stages and the guard of ``_id`` make of an event: bytes, the code of an error, or nothing."""
    try:
        made = user.apply(event)
        if made is not None:
            check_id(TOKEN, made)
    except TailraceError as error:
        return error.code or -1
    return made


def compare(user: CompiledPipeline, stages: BlockStages, events: list[bytes], *, fails: bool = True) -> Counter[str]:
    """Both sides over the events, which form one block up to the first that raises. Returns how often each outcome
    came."""
    counted: Counter[str] = Counter()
    wanted = [plain(user, event) for event in events]
    first = next((at for at, want in enumerate(wanted) if isinstance(want, int)), len(events)) if fails else len(events)
    buffer, offsets, token_start, token_end = block_of(events[: first + 1])
    staged = stages.run(buffer, offsets, token_start, token_end)
    for index, verdict in enumerate(staged.verdict.tolist()):
        start, end = staged.offsets[index : index + 2].tolist()
        want = wanted[index]
        shown = [bson.decode(stage.specification[1]) for stage in user.stages if stage.specification[0] == rb.OBJECT]
        if verdict == NOT_KNOWN:
            assert isinstance(want, int), shown
            counted["left"] += 1
        elif verdict == FAILS:
            assert want is None, shown
            counted["fails"] += 1
        else:
            assert verdict == PASSES
            made = staged.buffer[start:end].tobytes()
            assert made == want, (want if not isinstance(want, bytes) else want.hex(), made.hex(), shown)
            counted["passes"] += 1
            if staged.places is not None:
                check_places(made, start, staged.places[index].tolist())
    return counted


def check_places(made: bytes, start: int, places: list[int]) -> None:
    assert made[places[0] - start : places[1] - start] == TOKEN
    namespace = rb.find(made, b"ns")
    if namespace is not None and namespace.type == rb.OBJECT:
        assert places[2:] == [start + namespace.value_start, start + namespace.end]
    else:
        assert places[2:] == [0, 0]


class Stages:
    """Random stages, most of them of the shapes that have a program."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    def path(self) -> str:
        rng = self.rng
        first = rng.choice(TOP if rng.random() < 0.7 else NAMES)
        return ".".join([first, *(rng.choice(NAMES) for _ in range(rng.choice((0, 1, 1, 2, 3))))])

    def literal(self) -> Any:
        return self.rng.choice(
            (1, 0, Int64(5), 2.5, "text", None, True, False, bson.ObjectId(bytes(12)), b"\x16", ["x", 1])
        )

    def computed(self, depth: int = 2) -> Any:
        rng = self.rng
        roll = rng.random()
        if roll < 0.55:
            return "$" + rng.choice(("", "$ROOT.", "$CURRENT.")) + self.path()
        if roll < 0.62:
            return rng.choice(("$$REMOVE", "$$ROOT", "$$NOW"))
        if roll < 0.66:
            return {"$add": [1, "$" + self.path()]}
        if roll < 0.8 and depth:
            return [self.computed(depth - 1) for _ in range(rng.randrange(3))]
        return {"$literal": self.literal()}

    def replacement(self) -> Any:
        rng = self.rng
        if rng.random() < 0.2:
            return "$" + self.path()
        if rng.random() < 0.1:
            return "$$ROOT"
        made: dict[str, Any] = {"_id": "$_id"} if rng.random() < 0.9 else {}
        for _ in range(rng.randrange(4)):
            made[rng.choice(NAMES[1:])] = self.document() if rng.random() < 0.3 else self.computed()
        return made

    def document(self) -> Any:
        return {name: self.computed(1) for name in self.rng.sample(NAMES, 2)}

    def names(self) -> list[str]:
        paths = [self.path() for _ in range(self.rng.choice((1, 1, 2, 3, 5)))]
        return list(dict.fromkeys(paths))

    def stage(self) -> dict[str, Any]:
        rng = self.rng
        kind = rng.choice(
            ("include", "include", "exclude", "$set", "$set", "$addFields", "$unset", "replace", "$match", "other")
        )
        if kind == "include":
            made = {name: 1 if rng.random() < 0.7 else self.computed() for name in self.names()}
            return {"$project": made | ({"_id": rng.choice((0, 1, 1))} if rng.random() < 0.2 else {})}
        if kind == "exclude":
            return {"$project": dict.fromkeys(self.names(), 0) | ({"_id": 1} if rng.random() < 0.2 else {})}
        if kind in ("$set", "$addFields"):
            return {kind: {name: self.computed() if rng.random() < 0.8 else self.document() for name in self.names()}}
        if kind == "$unset":
            return {"$unset": self.names()}
        if kind == "replace":
            root = self.replacement()
            return {"$replaceWith": root} if rng.random() < 0.5 else {"$replaceRoot": {"newRoot": root}}
        if kind == "$match":
            test = rng.choice(({"$exists": rng.random() < 0.5}, {"$gt": 0}, {"$in": ["a", 1, None]}, {"$regex": "a"}))
            return {"$match": {self.path(): test}}
        verdict = {"$cond": [{"$eq": ["$a", 1]}, "$$PRUNE", "$$DESCEND"]}
        return rng.choice(
            ({"$redact": verdict}, {"$set": {"new": {"$concat": ["a", "b"]}}}, {"$match": {"$expr": "$ns"}})
        )

    def pipeline(self) -> list[bytes]:
        return [bson.encode(self.stage()) for _ in range(self.rng.choice((1, 1, 1, 2, 2, 3, 5)))]


class Events:
    """Random events: their own fields in the server's order, and the user's fields with any names and nesting."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    def value(self, depth: int) -> tuple[int, bytes]:
        roll = self.rng.random()
        if depth and roll < 0.35:
            return rb.OBJECT, self.document(depth - 1)
        if depth and roll < 0.55:
            names = [b"%d" % index for index in range(self.rng.choice((0, 1, 2, 3, 12)))]
            if self.rng.random() < 0.1:
                names = [self.rng.choice(ODD_NAMES) for _ in names]
            parts = [rb.encode_element(*self._named(name, depth - 1)) for name in names]
            return rb.ARRAY, rb.encode_document(*parts)
        return random_values.value(self.rng, 4)

    def _named(self, name: bytes, depth: int) -> tuple[int, bytes, bytes]:
        kind, data = self.value(depth)
        return kind, name, data

    def document(self, depth: int = 3) -> bytes:
        names = [self.rng.choice(ODD_NAMES) for _ in range(self.rng.choice((0, 1, 2, 3, 5)))]
        return rb.encode_document(*(rb.encode_element(*self._named(name, depth)) for name in names))

    def event(self) -> bytes:
        rng = self.rng
        parts = [rb.encode_element(rb.OBJECT, b"_id", TOKEN)]
        kind = rng.choice(("insert", "update", "drop", "create"))
        parts.append(rb.encode_element(rb.STRING, b"operationType", rb.encode_string(kind)))
        parts.append(rb.encode_element(rb.TIMESTAMP, b"clusterTime", bytes(8)))
        for name in (b"collectionUUID", b"wallTime", b"fullDocument", b"ns", b"documentKey", b"updateDescription"):
            if rng.random() < 0.7:
                whole = name in (b"fullDocument", b"ns", b"documentKey") and rng.random() < 0.9
                value = (rb.OBJECT, self.document()) if whole else self.value(2)
                parts.append(rb.encode_element(value[0], name, value[1]))
        return rb.encode_document(*parts)

    def any_document(self) -> bytes:
        """Not an event that we would make, though with a valid token: fields occur twice, also before the token."""
        parts = [rb.encode_element(*self._named(self.rng.choice(ODD_NAMES), 3)) for _ in range(self.rng.randrange(6))]
        parts = [part for part in parts if part[1:5] != b"_id\0"]
        parts.insert(self.rng.randrange(len(parts) + 1), rb.encode_element(rb.OBJECT, b"_id", TOKEN))
        return rb.encode_document(*parts)


def compiled(
    stages: list[bytes], *, expanded: bool = False, places: KeptPlaces = "all"
) -> tuple[CompiledPipeline, BlockStages] | None:
    try:
        user = compile_stages(stages, now=1_700_000_000_000, show_expanded_events=expanded, event_places=places)
    except UsageError:
        return None  # what the server refuses is no pipeline
    block_stages = compile_user_stages(user)
    assert block_stages is not None
    return user, block_stages


def check_pipelines(seed: int, count: int, places: KeptPlaces | None = None) -> Counter[str]:
    """Random pipelines on random events. Returns how often each outcome came, and how many stages had a program."""
    rng = random.Random(seed)
    events, stages = Events(rng), Stages(rng)
    counted: Counter[str] = Counter()
    for number in range(count):
        pipeline = stages.pipeline()
        expanded = rng.random() < 0.3
        # Every third one in the language of 8.2, whose events keep fewer places.
        both = compiled(pipeline, expanded=expanded, places=places or ("all" if number % 3 else "documents"))
        if both is None:
            continue
        user, block_stages = both
        make = events.event if user.sets_event_fields or rng.random() < 0.6 else events.any_document
        counted += compare(user, block_stages, [make() for _ in range(12)])
        counted["stages"] += len(user.stages)
        counted["compiled"] += block_stages.compiled
        # Each event by itself too, since nothing is checked after one that raises.
        for event in [make() for _ in range(4)]:
            counted += compare(user, block_stages, [event])
    return counted


def test_random_stages_on_random_events_give_the_bytes_of_the_plain_stages_or_leave_them_to_them() -> None:
    count = amount(160, 400)
    counted = check_pipelines(SEED, count)
    assert counted["passes"] > 1.5 * count, counted
    assert counted["fails"] > count // 3, counted
    assert counted["left"] > count // 4, counted
    assert counted["compiled"] > 0.7 * counted["stages"], counted


def test_nothing_is_written_past_the_room_that_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two documents that ended in the last byte of their room wrote one byte after it. No test had given a step less
    room than it needs, with no writable memory after it."""
    rooms: list[GuardedBuffer] = []

    def guarded(size: int) -> np.ndarray:
        rooms.append(GuardedBuffer(1 << 16))
        return rooms[-1].place(bytes(size if len(rooms) > 1 else first_room))

    monkeypatch.setattr(project_program, "room_for", guarded)
    nested = {"a": {"b": {"c": [{"d": {"e": 1}}]}}}
    event = bson.encode({"_id": bson.decode(TOKEN), "fullDocument": nested, "ns": {"db": "a"}})
    shapes: list[list[dict[str, Any]]] = [
        [{"$set": {"x.y.z": "$fullDocument.a.b.c.d"}}, {"$unset": "ns"}],
        [{"$project": {"fullDocument.a.b.c.d.e": 1}}],
        [{"$replaceWith": {"_id": "$_id", "x": {"y": [["$fullDocument"]]}}}],
        [{"$set": {"fullDocument.x": "$$REMOVE", "updateDescription.a": 1}}],
    ]
    for stages in shapes:
        both = compiled([bson.encode(stage) for stage in stages])
        assert both is not None
        for first_room in range(1, 2 * len(event)):  # noqa: B007  the room that the step gets at first
            rooms.clear()
            assert compare(*both, [event])["passes"] == 1


def test_damaged_events_are_left_or_as_the_plain_stages_have_them() -> None:
    """One wrong byte at every place, before an inaccessible page: nothing is read beyond it, and if the bytes are still
    valid, the result is that of the plain stages."""
    rng = random.Random(SEED)
    event = bson.encode({"_id": bson.decode(TOKEN), "fullDocument": {"a": [{"b": 1}, {"b": "x"}]}, "ns": {"db": "a"}})
    shapes: list[list[dict[str, Any]]] = [
        [{"$set": {"x": "$fullDocument.a.b"}}, {"$unset": "ns.db"}],
        [{"$project": {"fullDocument.a.b": 1, "y": ["$fullDocument.c"]}}],
        [{"$project": {"fullDocument.a.b": 0}}],
        [{"$replaceWith": {"_id": "$_id", "x": "$fullDocument.a"}}],
        [{"$set": {"updateDescription.x": 1}}],
    ]
    for stages in shapes:
        both = compiled([bson.encode(stage) for stage in stages])
        assert both is not None
        user, block_stages = both
        for place in range(4, len(event)):
            for new in (*rng.randbytes(3), 0, 3, 4, 0x16):
                damaged = event[:place] + bytes([new]) + event[place + 1 :]
                start = event.index(TOKEN)
                offsets = np.array([0, len(damaged)])
                staged = block_stages.run(
                    GUARDED.place(damaged), offsets, np.array([start]), np.array([start + len(TOKEN)])
                )
                if damaged[start : start + len(TOKEN)] != TOKEN or not holds(damaged):
                    continue  # a result without a read outside the event is all that is asked
                if staged.verdict[0] == PASSES:
                    made = staged.buffer[staged.offsets[0] : staged.offsets[1]].tobytes()
                    assert made == user.apply(damaged), (stages, damaged.hex())


def holds(document: bytes) -> bool:
    try:
        bson.decode(document)
    except (InvalidBSON, ValueError, OverflowError):
        return False
    return True


def nested(depth: int) -> bytes:
    made = bson.encode({"a": 1})
    for _ in range(depth - 1):
        made = rb.encode_document(rb.encode_element(rb.OBJECT, b"a", made))
    return made


@pytest.mark.parametrize("depth", [90, 94, 95, 96, 97, 150, 196, 197, 198, 199, 200, 205])
def test_deep_events_are_those_of_the_plain_stages(depth: int) -> None:
    """Paths and events to the server's limit of nesting and beyond it (15), where the plain stages decide."""
    event = rb.encode_document(
        rb.encode_element(rb.OBJECT, b"_id", TOKEN), rb.encode_element(rb.OBJECT, b"fullDocument", nested(depth))
    )
    shapes: list[list[dict[str, Any]]] = [
        [{"$set": {"x": "$fullDocument"}}],
        [{"$set": {"x.y": "$fullDocument"}}],
        [{"$set": {"fullDocument" + ".a" * 120: 1}}],
        [{"$unset": "fullDocument" + ".a" * 93}],
        [{"$project": {"fullDocument" + ".a" * 93 + ".b": 0}}, {"$set": {"x": 1}}],
        [{"$replaceWith": {"_id": "$_id", "x": "$fullDocument" + ".a" * 150}}],
    ]
    for stages in shapes:
        both = compiled([bson.encode(stage) for stage in stages])
        assert both is not None
        assert sum(compare(*both, [event]).values()) == 1


def test_a_prefix_that_has_a_program_runs_before_plain_stages_see_an_event() -> None:
    """If one event in fifty passes, the plain stage after it is only applied to that one."""
    events = [bson.encode({"_id": bson.decode(TOKEN), "fullDocument": {"n": number}}) for number in range(200)]
    stages: list[dict[str, Any]] = [
        {"$match": {"fullDocument.n": {"$gte": 196}}},
        {"$redact": {"$cond": [{"$eq": ["$n", 5]}, "$$PRUNE", "$$DESCEND"]}},
    ]
    both = compiled([bson.encode(stage) for stage in stages])
    assert both is not None
    user = both[0]
    asked: list[bytes] = []

    def apply(event: bytes) -> bytes | None:
        asked.append(event)
        return user.stages[1].apply(event)

    watched = dataclasses.replace(user.stages[1], apply=apply)
    counted_user = dataclasses.replace(user, stages=(user.stages[0], watched))
    block_stages = compile_user_stages(counted_user)
    assert block_stages is not None
    assert block_stages.compiled == 1
    assert compare(user, block_stages, events) == Counter({"fails": 196, "passes": 4})
    assert asked == events[196:]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_many_random_stages_on_random_events(seed: int) -> None:
    assert check_pipelines(SEED + 1 + seed, 5_000)["passes"] > 8_000


def answer(request: Request) -> Answer:
    """Every image is found, and is the same one."""
    if isinstance(request, NeedPreImages):
        return [bson.encode({"_id": 1, "a": 5})] * len(request.keys)
    if isinstance(request, NeedDocuments):
        return [bson.encode({"_id": 1, "a": 5})] * len(request.lookups)
    assert isinstance(request, NeedEntries)
    return [None] * len(request.times)


def random_stream(case: Any, seed: int, pipelines: int) -> Counter[str]:
    """Random pipelines on a random oplog, through blocks and plain: the same events, token, error."""
    scope, profile, options = case
    bare = plan_of(scope, profile, options)
    entries = [raw for raw in random_run(seed, 150) if events_of(bare, raw) is not None]
    batch = OplogBatch(b"".join(entries), ClusterTime.of(9, 0))
    stages = Stages(random.Random(seed))
    counted: Counter[str] = Counter()
    for _ in range(pipelines):
        given = stages.pipeline()
        if compiled(given) is None or any(b"$$NOW" in stage for stage in given):
            continue
        plan = plan_of(scope, profile, options, *given)
        one, other = (ChangeStreamPipeline(plan, mid_stream=True) for _ in range(2))
        wanted = outcome(event.to_bson() for events in drive_by(one.process(batch), answer) for event in events)
        got = outcome(event for block in drive_blocks(process_batch(other, batch), answer) for event in block.events())
        assert got == wanted, [bson.decode(stage) for stage in given]
        if isinstance(wanted[-1], bytes | None):
            assert other.resume_token.to_bson() == one.resume_token.to_bson()
        counted["events"] += len(wanted) - 1
        counted["errors"] += wanted[-1] is not None
    return counted


def outcome(events: Iterator[bytes]) -> list[bytes | int | None]:
    """The events, and then the code of the error that ended the stream."""
    given: list[bytes | int | None] = []
    try:
        given.extend(events)
    except TailraceError as error:
        return [*given, error.code or -1]
    return [*given, None]


@pytest.mark.long
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]} {case[1].name} {'-'.join(case[2])}")
def test_a_stream_with_random_stages_gives_the_same_through_blocks(case: Any) -> None:
    counted = random_stream(case, SEED, amount(10, 25))
    assert counted["events"] > 20, counted
