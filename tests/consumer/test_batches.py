"""Handlers that take several changes at a time: what they are given, and what becomes of those that are not done."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

import tailrace
from tailrace.consumer import Change, HandlerFailed, Listener, MongoLeaseStore
from tailrace.consumer.dead_letters import DeadLetters
from tailrace.consumer.messages import ChangeMessages, MemoryPublisher, Message, MessageRelay, Outbox
from tailrace.core.event.resume_token import ResumeToken
from tailrace.embedded import ReplicaSet
from tailrace.errors import UsageError
from tests.consumer.shops import WAIT_S, until

pytestmark = pytest.mark.mongod


@pytest.fixture
def shop(replica_set: ReplicaSet, request: pytest.FixtureRequest) -> Iterator[Any]:
    name = f"batches_{abs(hash(request.node.nodeid)) % 10**9}"
    with tailrace.connect(replica_set.uri) as client:
        yield client[name]
        client.drop_database(name)


class Batches:
    """Keeps what it was given; does as many of each as ``done`` says, and refuses the numbers in ``poison``."""

    def __init__(self, store: MongoLeaseStore, done: Callable[[int], Any] = lambda count: count) -> None:
        self.sizes: list[int] = []
        self.numbers: list[int] = []
        self.poison: set[int] = set()
        self._store = store
        self._done = done
        self._lock = threading.Lock()

    def __call__(self, change: Change) -> None:
        raise AssertionError("changes are handed over together")

    def handle_batch(self, changes: Sequence[Change]) -> Any:
        with self._lock:
            numbers = [change.event["fullDocument"]["n"] for change in changes]
            self.sizes.append(len(numbers))
            for place, number in enumerate(numbers):
                if number in self.poison:
                    if place == 0:
                        raise ValueError(f"poison {number}")
                    self.numbers += numbers[:place]
                    return place
            count = self._done(len(numbers))
            self.numbers += numbers[:count]
            return count


def fill(shop: Any, numbers: range) -> None:
    shop.orders.insert_many([{"_id": number, "n": number} for number in numbers])


def listen(shop: Any, handler: Any, **options: Any) -> Listener:
    chosen = {"resource": "orders", "store": MongoLeaseStore(shop["leases"]), "commit_every": 100, **options}
    return Listener(shop["orders"], handler, **chosen)


def committed(shop: Any, resource: str = "orders") -> Any:
    """The cluster time of the committed position."""
    lease = MongoLeaseStore(shop["leases"]).read(resource)
    assert lease is not None
    assert lease.position is not None
    return ResumeToken.parse(lease.position["token"]).cluster_time


def test_a_backlog_is_handed_over_up_to_each_commit(shop: Any) -> None:
    fill(shop, range(450))
    handler = Batches(MongoLeaseStore(shop["leases"]))
    listener = listen(shop, handler)
    with listener:
        until(lambda: len(handler.numbers) == 450)
    assert handler.numbers == list(range(450))
    assert max(handler.sizes) <= 100
    assert len(handler.sizes) < 50, "not one by one"
    assert listener.statistics.handled == 450
    before = len(handler.numbers)
    with listen(shop, handler):
        fill(shop, range(450, 455))
        until(lambda: len(handler.numbers) == 455)
    assert handler.numbers[before:] == list(range(450, 455)), "the next run began after the last batch"


def test_with_a_commit_for_each_change_each_comes_alone(shop: Any) -> None:
    fill(shop, range(20))
    handler = Batches(MongoLeaseStore(shop["leases"]))
    with listen(shop, handler, commit_every=1):
        until(lambda: len(handler.numbers) == 20)
    assert set(handler.sizes) == {1}


def test_what_is_not_done_comes_again_in_order(shop: Any) -> None:
    fill(shop, range(300))
    handler = Batches(MongoLeaseStore(shop["leases"]), done=lambda count: 1 + count // 2)
    with listen(shop, handler):
        until(lambda: len(handler.numbers) >= 300)
    assert handler.numbers == list(range(300))


def test_the_error_policy_is_asked_about_the_change_that_failed(shop: Any) -> None:
    fill(shop, range(150))
    handler = Batches(MongoLeaseStore(shop["leases"]))
    handler.poison = {0, 57, 149}
    asked: list[tuple[int, int]] = []

    def judge(change: Change, _error: Exception, attempt: int) -> str:
        asked.append((change.event["fullDocument"]["n"], attempt))
        return "skip" if attempt == 2 else "retry"

    listener = listen(shop, handler, on_error=judge)
    with listener:
        until(lambda: len(handler.numbers) == 147 and listener.statistics.skipped == 3)
    assert handler.numbers == [number for number in range(150) if number not in handler.poison]
    assert asked == [(0, 1), (0, 2), (57, 1), (57, 2), (149, 1), (149, 2)]


def test_a_listener_that_ends_has_committed_what_was_done(shop: Any) -> None:
    fill(shop, range(80))
    handler = Batches(MongoLeaseStore(shop["leases"]))
    handler.poison = {57}
    with pytest.raises(HandlerFailed, match="poison 57"):
        listen(shop, handler).run()
    assert handler.numbers == list(range(57))
    handler.poison.clear()
    with listen(shop, handler):
        until(lambda: len(handler.numbers) >= 80)
    assert handler.numbers == list(range(80)), "the next run began with the change that had failed"


@pytest.mark.parametrize("answer", [0, 101, True, None, "all"])
def test_an_answer_that_is_no_count_ends_the_listener(shop: Any, answer: Any) -> None:
    fill(shop, range(100))

    class Handler:
        def __call__(self, change: Change) -> None: ...

        def handle_batch(self, changes: Sequence[Change]) -> Any:
            return answer

    with pytest.raises(HandlerFailed, match="how many"):
        listen(shop, Handler()).run()


def test_lanes_take_batches_too(shop: Any) -> None:
    fill(shop, range(600))
    handler = Batches(MongoLeaseStore(shop["leases"]))
    with listen(shop, handler, partitions=3):
        until(lambda: len(handler.numbers) == 600)
        shop.orders.drop_indexes()
    assert sorted(handler.numbers) == list(range(600))
    assert max(handler.sizes) > 1


def test_a_batch_and_its_position_in_one_transaction(shop: Any) -> None:
    """Exactly once at the cost of one transaction for each batch, although a listener ends after each."""
    fill(shop, range(400))
    shop.create_collection("effects")
    runs = []

    class Together:
        def __call__(self, change: Change) -> None: ...

        def handle_batch(self, changes: Sequence[Change]) -> int:
            with changes[-1].transaction() as session:
                effects = session.client[shop.name]["effects"]
                effects.insert_many([dict(change.event["fullDocument"]) for change in changes], session=session)
            runs.append(len(changes))
            if len(runs) < 4:
                raise KeyError("after the commit")  # as in a crash: what is committed must not come again
            return len(changes)

    for _ in range(3):
        with pytest.raises(HandlerFailed):
            listen(shop, Together()).run()
    with listen(shop, Together()):
        until(lambda: sum(runs) == 400)
    assert [one["n"] for one in shop.effects.find(sort=[("$natural", 1)])] == list(range(400))


def test_an_invalidation_ends_a_batch(shop: Any) -> None:
    fill(shop, range(30))
    shop.orders.drop()
    seen: list[str] = []

    class Names:
        def __call__(self, change: Change) -> None: ...

        def handle_batch(self, changes: Sequence[Change]) -> int:
            kinds = [change.operation_type for change in changes]
            assert kinds == ["invalidate"] or "invalidate" not in kinds
            seen.extend(kinds)
            return len(kinds)

    listener = listen(shop, Names(), on_invalidate="resume")
    with listener:
        until(lambda: "invalidate" in seen)
        fill(shop, range(5))
        until(lambda: len(seen) == 37)
    assert seen == [*["insert"] * 30, "drop", "invalidate", *["insert"] * 5]


def test_a_snapshot_is_handed_over_in_batches(shop: Any) -> None:
    fill(shop, range(700))
    handler = Batches(MongoLeaseStore(shop["leases"]))
    with listen(shop, handler, start="snapshot"):
        until(lambda: len(handler.numbers) == 700)
        fill(shop, range(700, 720))
        until(lambda: len(handler.numbers) == 720)
    assert handler.numbers == list(range(720))
    assert max(handler.sizes) == 100


def test_a_refused_message_in_a_batch_is_a_dead_letter_and_the_others_are_published(shop: Any) -> None:
    fill(shop, range(250))
    publisher = MemoryPublisher()
    make = ChangeMessages(lambda event: "orders" if event["fullDocument"]["n"] % 2 == 0 else None)
    poison: list[str] = []

    class Refusing(MemoryPublisher):
        def publish(self, messages: Any) -> int:
            for message in messages:
                if b'"n": 120}' in message.body:
                    self.refused.add(message.id)
                    poison.append(message.id)
            return super().publish(messages)

    publisher = Refusing()
    letters = DeadLetters(shop["letters"], tries=2)
    with listen(shop, MessageRelay(publisher, make), on_error=letters):
        until(lambda: len(publisher.stored) >= 124)
    assert len(publisher.stored) == 124
    assert [message.id for message in publisher.stored] == sorted({message.id for message in publisher.stored})
    assert [letter.message_id for letter in letters.letters()] == [poison[0]]


def test_an_outbox_in_lanes_keeps_the_order_of_each_key(shop: Any) -> None:
    letters = [{"_id": n, "topic": "t", "key": f"k{n % 3}", "payload": {"n": n}} for n in range(180)]
    shop.orders.insert_many(letters)
    publisher = MemoryPublisher()
    relay = MessageRelay(publisher, Outbox(), delete_from=shop["orders"])
    with listen(shop, relay, partitions=4, commit_every=1):
        until(lambda: len(publisher.stored) >= 180)
    for key in ("k0", "k1", "k2"):
        numbers = [json.loads(message.body)["n"] for message in publisher.stored if message.key == key]
        assert numbers == sorted(numbers)
        assert len(numbers) == 60


def by_parity(event: Any) -> int:
    return int(event["documentKey"]["_id"]) % 2


def test_another_lane_key_loses_nothing_and_repeats_nothing(shop: Any) -> None:
    """By ``_id``, by a path, by a function, by ``_id`` again: each is a new generation of lanes."""
    seen: list[int] = []

    def handle(change: Change) -> None:
        seen.append(change.event["fullDocument"]["n"])
        if len(seen) >= goal:
            listener.stop()

    fill(shop, range(120))
    for goal, key in ((30, None), (60, "fullDocument.n"), (90, by_parity)):  # noqa: B007  the handler looks at it
        listener = listen(shop, handle, partitions=3, commit_every=1, lane_key=key)
        listener.run()
    with pytest.raises(UsageError, match="chosen by 'function:"):
        listen(shop, handle, partitions=3, commit_every=1).run()
    goal = 1000
    with listen(shop, handle, partitions=3, commit_every=1, lane_key=(None, by_parity)):
        until(lambda: len(seen) >= 120)
    assert sorted(seen) == list(range(120))


def test_a_process_that_does_not_know_the_lanes_key_ends(shop: Any) -> None:
    """Otherwise the two would divide the changes in different ways."""
    fill(shop, range(10))
    handler = Batches(MongoLeaseStore(shop["leases"]))
    first = listen(shop, handler, partitions=2, lane_key="fullDocument.n", lease_seconds=1).start()
    until(lambda: len(handler.numbers) == 10)
    with listen(shop, handler, partitions=2, lane_key=by_parity, lease_seconds=1):
        with pytest.raises(UsageError, match="chosen by 'function:"):
            first.join(WAIT_S)
        fill(shop, range(10, 20))
        until(lambda: len(handler.numbers) >= 20)
    assert sorted(handler.numbers) == list(range(20))


def test_a_publisher_that_stays_away_ends_the_listener_soon_after_it_is_stopped(shop: Any) -> None:
    """Stopping took until the relay gave up, after ten minutes. No test had stopped a listener in an outage."""
    fill(shop, range(10))
    asked = threading.Event()

    class Away(MemoryPublisher):
        def publish(self, messages: Sequence[Message]) -> int:
            asked.set()
            return super().publish(messages)

    publisher = Away()
    publisher.away = True
    listener = listen(shop, MessageRelay(publisher, ChangeMessages("orders"), retry_seconds=100_000)).start()
    assert asked.wait(WAIT_S)  # stopped earlier, it would have had nothing to fail at
    listener.stop()
    assert listener.join(WAIT_S)
    publisher.away = False
    with listen(shop, MessageRelay(publisher, ChangeMessages("orders"))):
        until(lambda: len(publisher.stored) == 10)
