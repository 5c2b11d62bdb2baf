"""A user's handler may return work that nobody has begun: a coroutine, a generator. Then nothing counts as done. No
test had given a listener a handler of the wrong kind: every change was committed, although nothing had run."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from tailrace.cli.main import main
from tailrace.consumer import AsyncListener, HandlerNotRun, Listener, MongoLeaseStore
from tailrace.consumer.dead_letters import DeadLetters
from tailrace.consumer.messages import ChangeMessages, MemoryPublisher, Message, MessageRelay, publish_all
from tailrace.embedded import ReplicaSet
from tailrace.errors import UsageError
from tests.consumer.shops import begin_now, new_shop

pytestmark = [pytest.mark.mongod, pytest.mark.filterwarnings("error")]


@pytest.fixture
def shop(replica_set: ReplicaSet, request: pytest.FixtureRequest) -> Iterator[Any]:
    with new_shop(replica_set.uri, request, "unrun") as shop:
        begin_now(MongoLeaseStore(shop["leases"]), shop.client)
        shop.orders.insert_many([{"_id": number} for number in range(8)])
        shop.orders.drop()  # a listener that counts unrun work as done ends here
        yield shop


async def coroutine(change: Any) -> None:
    raise AssertionError("it cannot run here")


async def async_generator(change: Any) -> AsyncIterator[Any]:
    yield change


def generator(change: Any) -> Iterator[Any]:
    yield change


class AsyncCall:
    async def __call__(self, change: Any) -> None: ...


class AsyncMethod:
    async def handle(self, change: Any) -> None: ...


class AsyncBatches:
    def __call__(self, change: Any) -> None: ...

    async def handle_batch(self, changes: Any) -> int:
        return len(changes)


def decorated(handler: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(handler)
    def call(change: Any) -> Any:
        return handler(change)

    return call


SEEN_AT_ONCE = {
    "coroutine function": coroutine,
    "asynchronous generator": async_generator,
    "generator": generator,
    "async __call__": AsyncCall(),
    "async method": AsyncMethod().handle,
    "partial": functools.partial(coroutine),
    "async handle_batch": AsyncBatches(),
}
SEEN_AT_THE_FIRST_CHANGE = {
    "decorated coroutine": decorated(coroutine),
    "decorated asynchronous generator": decorated(async_generator),
    "decorated generator": decorated(generator),
    "future of a thread": lambda change: Future(),
}


@pytest.mark.parametrize("handler", SEEN_AT_ONCE.values(), ids=SEEN_AT_ONCE)
def test_a_handler_that_does_not_run_when_it_is_called_is_refused_at_once(shop: Any, handler: Any) -> None:
    with pytest.raises(UsageError, match="would never run"):
        Listener(shop.orders, handler, resource="orders", store=MongoLeaseStore(shop["leases"]), commit_every=8)


@pytest.mark.parametrize(
    ("handler", "partitions"),
    [*((handler, 1) for handler in SEEN_AT_THE_FIRST_CHANGE.values()), (decorated(coroutine), 2)],
    ids=[*SEEN_AT_THE_FIRST_CHANGE, "in lanes"],
)
def test_what_a_handler_leaves_to_be_run_ends_the_listener_before_any_commit(
    shop: Any, handler: Any, partitions: int
) -> None:
    """This must not become a dead letter either: every change would become one."""
    store = MongoLeaseStore(shop["leases"])
    letters = DeadLetters(shop["letters"], tries=1)
    listener = Listener(shop.orders, handler, resource="orders", store=store, partitions=partitions, on_error=letters)
    with pytest.raises(HandlerNotRun, match="has not run"):
        listener.run()
    assert listener.statistics.handled == 0
    assert [lease.resource for lease in store.leases() if (lease.position or {}).get("token")] == []
    assert list(letters.letters()) == []


def test_an_error_policy_that_does_not_run_ends_the_listener(shop: Any) -> None:
    async def judge(*_: Any) -> str:
        return "skip"

    def handle(change: Any) -> None:
        raise ValueError

    store = MongoLeaseStore(shop["leases"])
    with pytest.raises(HandlerNotRun, match="on_error"):
        Listener(shop.orders, handle, resource="orders", store=store, on_error=judge).run()  # type: ignore[arg-type]


def plain(change: Any) -> None: ...


async def gives_a_coroutine(change: Any) -> Any:
    return coroutine(change)


async def gives_a_generator(change: Any) -> Any:
    return generator(change)


@pytest.mark.parametrize(
    ("handler", "partitions"),
    [(plain, 1), (decorated(async_generator), 1), (gives_a_coroutine, 1), (gives_a_generator, 1), (plain, 2)],
    ids=["plain", "asynchronous generator", "coroutine", "generator", "plain in lanes"],
)
def test_an_asyncio_listener_takes_what_can_be_awaited_and_nothing_that_is_left_over(
    shop: Any, handler: Any, partitions: int
) -> None:
    store = MongoLeaseStore(shop["leases"])
    letters = DeadLetters(shop["letters"], tries=1)

    async def listen() -> None:
        await AsyncListener(
            shop.orders, handler, resource="orders", store=store, partitions=partitions, on_error=letters
        ).run()

    with pytest.raises(HandlerNotRun):
        asyncio.run(listen())
    assert [lease.resource for lease in store.leases() if (lease.position or {}).get("token")] == []
    assert list(letters.letters()) == []


@pytest.mark.parametrize("handler", [generator, async_generator])
def test_an_asyncio_listener_refuses_generators_at_once(shop: Any, handler: Any) -> None:
    with pytest.raises(UsageError, match="generator"):
        AsyncListener(shop.orders, handler, resource="orders", store=MongoLeaseStore(shop["leases"]))


def test_an_asyncio_listener_takes_any_callable_that_gives_an_awaitable(shop: Any) -> None:
    seen: list[int] = []

    class Counting:
        async def __call__(self, change: Any) -> None:
            seen.append(change.document_key["_id"])
            if len(seen) == 8:
                listener.stop()

    async def listen() -> None:
        await listener.run()

    listener = AsyncListener(
        shop.orders, decorated(Counting()), resource="orders", store=MongoLeaseStore(shop["leases"])
    )
    asyncio.run(listen())
    assert seen == list(range(8))


class AsyncPublisher(MemoryPublisher):
    async def publish(self, messages: Any) -> int:  # type: ignore[override]
        return len(messages)


async def async_topic(event: Any) -> str:
    return "orders"


async def async_make(change: Any) -> Any:
    return None


@pytest.mark.parametrize(
    "relay",
    [
        MessageRelay(MemoryPublisher(), ChangeMessages(async_topic)),  # type: ignore[arg-type]
        MessageRelay(MemoryPublisher(), async_make),  # type: ignore[arg-type]
        MessageRelay(AsyncPublisher(), ChangeMessages("orders")),
    ],
    ids=["topic", "make", "publisher"],
)
def test_what_a_relay_is_given_has_to_run_too(shop: Any, relay: MessageRelay) -> None:
    store, letters = MongoLeaseStore(shop["leases"]), DeadLetters(shop["letters"], tries=1)
    with pytest.raises(HandlerNotRun):
        Listener(shop.orders, relay, resource="orders", store=store, on_error=letters, commit_every=8).run()
    assert list(letters.letters()) == []
    assert "token" not in (store.read("orders").position or {})  # type: ignore[union-attr]


def test_a_publisher_that_does_not_run_publishes_nothing() -> None:
    with pytest.raises(HandlerNotRun):
        publish_all(AsyncPublisher(), [Message("1", "t", b"")])


def test_a_dead_letter_stays_where_its_handler_does_not_run(shop: Any) -> None:
    """``replay`` took a coroutine for success, and removed the letter."""

    def poison(change: Any) -> None:
        if change.document_key["_id"] == 7:
            listener.stop()
        raise ValueError("poison")

    letters = DeadLetters(shop["letters"], tries=1)
    store = MongoLeaseStore(shop["leases"])
    listener = Listener(shop.orders, poison, resource="orders", store=store, on_error=letters)
    listener.run()
    for handler in (coroutine, decorated(coroutine), generator, AsyncCall()):
        with pytest.raises(HandlerNotRun):
            letters.replay(handler)
    assert len(list(letters.letters())) == 8


@pytest.fixture
def listen(
    replica_set: ReplicaSet,
    shop: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Callable[[str], tuple[str, str]]:
    """Runs ``tailrace listen`` with the handler ``handle`` of a module's text; what it printed, and its errors."""

    def run(text: str) -> tuple[str, str]:
        name = f"handlers_{abs(hash(text))}"
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.syspath_prepend(tmp_path)
        where = ["--database", shop.name, "--collection", "orders", "--store", f"{shop.name}.leases"]
        assert main(["listen", f"{name}:handle", "--uri", replica_set.uri, *where, "--resource", "orders"]) != 0
        out, err = capsys.readouterr()
        return out, err

    return run


@pytest.mark.parametrize(
    ("text", "runs"),
    [
        ("async def handle(change): print('ran', flush=True)", True),
        ("class Handler:\n    async def __call__(self, change): print('ran', flush=True)\nhandle = Handler()", True),
        (
            "import functools\nasync def inner(more, change): print('ran', flush=True)\n"
            "handle = functools.partial(inner, 1)",
            True,
        ),
        ("async def handle(change): yield 1", False),
        ("def handle(change): yield 1", False),
        ("async def inner(change): ...\ndef handle(change): return inner(change)", False),
    ],
    ids=["async def", "async __call__", "partial", "asynchronous generator", "generator", "decorated"],
)
def test_the_command_awaits_what_is_to_be_awaited_and_refuses_the_rest(
    shop: Any, listen: Callable[[str], tuple[str, str]], text: str, runs: bool
) -> None:
    out, err = listen(text)
    assert (out.count("ran") == 10) is runs  # with the drop and the invalidate
    assert ("dropped or renamed" in err) is runs
