"""Faults that views, messages and streams once had, planted again: the check that was missing finds each of them.

Those of a listener's rules are planted in the simulation (``tests/simulation/mutants.py``,
``tests/simulation/test_lanes_simulation.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

import bson
import pytest
from bson.codec_options import CodecOptions
from bson.raw_bson import RawBSONDocument

import tailrace
from tailrace.act.consumer import dead_letters
from tailrace.act.consumer.event_stream import WholeEventStream
from tailrace.act.consumer.messages import making
from tailrace.act.consumer.rules.lane_key import BY_ID
from tailrace.act.consumer.rules.large_events import Fragments, operation_and_token
from tailrace.act.consumer.views import upkeep
from tailrace.consumer import Change, Listener, MongoLeaseStore
from tailrace.consumer.dead_letters import DeadLetter
from tailrace.consumer.messages import ChangeMessages, Outbox
from tailrace.consumer.views import ViewUpkeep
from tailrace.core import raw_bson as rb
from tailrace.core.event.resume_token import ResumeToken
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.embedded import ReplicaSet
from tailrace.errors import TailraceError
from tests.consumer.shops import begin_now
from tests.consumer.test_views import Handed, Shop
from tests.unit.test_messages import change, not_utf8

TOKEN = bson.decode(ResumeToken(5 << 32, uuid=bytes(16)).to_bson())
STRICT: CodecOptions[dict[str, Any]] = CodecOptions()


def messages_of_a_key_are_in_one_lane() -> bool:
    outbox = Outbox()
    events = [change(key=number, fullDocument={"_id": number, "key": "k"}).raw for number in range(20)]
    return len({outbox.lane_key.hash_of(event) for event in events}) == 1


def fragments_are_one_event() -> bool:
    whole = {"_id": TOKEN, "operationType": "update", "fullDocument": {"a": 1}, "updateDescription": {"b": 2}}
    parts = [
        {"_id": TOKEN, "splitEvent": {"fragment": 1, "of": 2}, "fullDocument": whole["fullDocument"]},
        {"_id": TOKEN, "splitEvent": {"fragment": 2, "of": 2}, "operationType": "update"},
    ]
    fragments = Fragments()
    given = [made for part in parts if (made := fragments.add(bson.encode(part))) is not None]
    return [operation_and_token(one)[1] for one in given] == ["update"]


def strings_need_not_be_utf8() -> bool:
    made = not_utf8(fullDocument={"_id": 1, "name": "\x01a"})
    return ChangeMessages("orders")(made) is not None  # type: ignore[arg-type]


def a_resource_may_be_called_as_a_lane() -> bool:
    letter = DeadLetter(
        "x/1", "m", {}, ClusterTime(5), "shop.orders", "insert", b"", "error", "reason", 1, 3, datetime.now(UTC)
    )
    return letter.whole_resource == "x/1" and list(letter.fence._tokens) == ["x/1"]


def _given(self: Fragments, event: bytes) -> bytes:
    return event


#: What is planted, and the check that finds it.
FAULTS: dict[str, tuple[Any, str, Any, Callable[[], bool]]] = {
    "an outbox in lanes by its documents": (
        *(Outbox, "_lane_hash", lambda _self, event: BY_ID.hash_of(event)),
        messages_of_a_key_are_in_one_lane,
    ),
    "fragments that are handed on": (Fragments, "add", _given, fragments_are_one_event),
    "a resource that is taken for a lane": (
        *(dead_letters, "generation_token", lambda version: version),
        a_resource_may_be_called_as_a_lane,
    ),
    "messages of UTF-8 alone": (making, "_ANY_DATE", STRICT, strings_need_not_be_utf8),
}


def holds(check: Callable[[], bool]) -> bool:
    """Whether the check passes; an exception counts as a finding too."""
    try:
        return check()
    except (UnicodeDecodeError, bson.errors.InvalidBSON):
        return False


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_of_messages_and_streams_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    holder, name, planted, check = FAULTS[fault]
    assert holds(check)
    monkeypatch.setattr(holder, name, planted)
    assert not holds(check)


@pytest.fixture
def shop(replica_set: ReplicaSet, request: pytest.FixtureRequest) -> Iterator[Shop]:
    name = f"planted_{abs(hash(request.node.nodeid)) % 10**9}"
    with tailrace.connect(replica_set.uri) as client:
        yield Shop(client, name)
        client.drop_database(name)


def follow(shop: Shop, names: tuple[str, ...]) -> None:
    """Handle what streams of these collections give, to the end of what was written."""
    for name in names:
        options = {"full_document": "updateLookup", "start_at_operation_time": shop.start, "max_await_time_ms": 50}
        with shop.db[name].watch(document_class=RawBSONDocument, **options) as stream:
            end = shop.db.command("ping")["operationTime"]
            while stream.alive:
                event = stream.try_next()
                if event is None and ResumeToken.parse(stream.resume_token).cluster_time.to_timestamp() >= end:
                    break
                if event is not None:
                    handed = RawHanded(bson.decode(event.raw, upkeep.SHOWN), event.raw)
                    handle = shop.upkeep.target_changed if name == "orders" else shop.upkeep.source_changed
                    handle(handed)  # type: ignore[arg-type]


class RawHanded(Handed):
    """Compared byte for byte."""

    def __init__(self, event: dict[str, Any], raw: bytes) -> None:
        super().__init__(event)
        self._raw = raw

    @property
    def raw(self) -> bytes:
        return self._raw


def a_source_is_replaced(shop: Shop) -> bool:
    shop.customers.insert_one({"_id": "c", "name": "Ann"})
    shop.orders.insert_one({"_id": 1, "customer_id": "c"})
    follow(shop, ("orders", "customers"))
    shop.customers.aggregate([{"$set": {"name": "Bob"}}, {"$out": "customers"}])
    follow(shop, ("customers",))
    return shop.order() == {"name": "Bob"}


def a_name_is_not_utf8(shop: Shop) -> bool:
    name = rb.encode_element(rb.STRING, b"name", rb.encode_string(b"M\xfcller"))
    document = rb.encode_document(rb.encode_element(rb.STRING, b"_id", rb.encode_string("c")), name)
    shop.customers.with_options(CodecOptions(document_class=RawBSONDocument)).insert_one(RawBSONDocument(document))
    shop.orders.insert_one({"_id": 1, "customer_id": "c"})
    try:
        follow(shop, ("customers", "orders"))
    except (UnicodeDecodeError, bson.errors.InvalidBSON):
        return False
    return shop.differences() == []


def a_pipeline_changes(shop: Shop) -> bool:
    """It no longer gives the change that was handled last."""
    store, orders = MongoLeaseStore(shop.db.leases), shop.db.orders
    begin_now(store, shop.db.client)
    orders.insert_many([{"_id": number} for number in range(3)])

    def handled(until: int, **options: Any) -> list[Any]:
        seen: list[Any] = []

        def handle(change: Change) -> None:
            seen.append((change.document_key or {})["_id"])
            if seen[-1] == until:
                listener.stop()

        listener = Listener(orders, handle, resource="orders", store=store, **options)
        listener.start()
        try:
            assert listener.join(300)
        except TailraceError as error:
            seen.append(error.code)
        return seen

    even = [{"$match": {"documentKey._id": {"$in": [0, 2]}}}]
    return [handled(1), handled(2, pipeline=even)] == [[0, 1], [2]]


def _ends(self: WholeEventStream, error: TailraceError) -> None:
    self._alive = False
    raise error


VIEW_FAULTS: dict[str, tuple[Any, str, Any, Callable[[Shop], bool]]] = {
    "a collection that ends is no change": (ViewUpkeep, "_is_replaced", lambda *_: False, a_source_is_replaced),
    "a changed pipeline has no place to go on": (WholeEventStream, "_judge", _ends, a_pipeline_changes),
    "views of UTF-8 alone": (upkeep, "SHOWN", STRICT, a_name_is_not_utf8),
}


@pytest.mark.mongod
@pytest.mark.parametrize("is_planted", [False, True])
@pytest.mark.parametrize("fault", VIEW_FAULTS)
def test_a_planted_fault_of_views_and_listeners_is_found(
    shop: Shop, fault: str, is_planted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder, name, planted, check = VIEW_FAULTS[fault]
    if is_planted:
        monkeypatch.setattr(holder, name, planted)
    assert check(shop) is not is_planted
