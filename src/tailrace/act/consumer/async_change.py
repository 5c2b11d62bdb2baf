"""One change in an asyncio handler's hands."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from typing import Any

from pymongo import AsyncMongoClient
from pymongo.asynchronous.client_session import AsyncClientSession
from pymongo.asynchronous.collection import AsyncCollection
from pymongo.collection import Collection
from pymongo.results import DeleteResult, UpdateResult

from tailrace.act.consumer.change import Change
from tailrace.act.consumer.fence import Fence, Update
from tailrace.act.consumer.rules.errors import LeaseLost
from tailrace.errors import UsageError

Target = Collection[Any] | AsyncCollection[Any]


class AsyncFence:
    """A Fence whose writes are awaited. It takes PyMongo's asyncio collections, and plain ones.

    The rules of fencing are those of ``Fence``. They run in a thread, and their calls to an asyncio collection run in
    the event loop.
    """

    def __init__(self, fence: Fence) -> None:
        self._fence = fence

    @property
    def version(self) -> int:
        """The fencing token."""
        return self._fence.version

    def bound_to(self, session: AsyncClientSession) -> AsyncFence:
        """The same fence, writing with ``session``."""
        return AsyncFence(self._fence.bound_to(session))  # type: ignore[arg-type]

    async def update_one(
        self, collection: Target, filter: Mapping[str, Any], update: Update, *, upsert: bool = False
    ) -> UpdateResult:
        """See Fence."""
        result: UpdateResult = await self._write(self._fence.update_one, collection, filter, update, upsert=upsert)
        return result

    async def update_many(self, collection: Target, filter: Mapping[str, Any], update: Update) -> UpdateResult:
        """See Fence."""
        result: UpdateResult = await self._write(self._fence.update_many, collection, filter, update)
        return result

    async def replace_one(
        self, collection: Target, filter: Mapping[str, Any], replacement: Mapping[str, Any], *, upsert: bool = False
    ) -> UpdateResult:
        """See Fence."""
        write = self._fence.replace_one
        result: UpdateResult = await self._write(write, collection, filter, replacement, upsert=upsert)
        return result

    async def insert_one(self, collection: Target, document: Mapping[str, Any]) -> UpdateResult:
        """See Fence."""
        result: UpdateResult = await self._write(self._fence.insert_one, collection, document)
        return result

    async def delete_one(self, collection: Target, filter: Mapping[str, Any]) -> DeleteResult:
        """See Fence."""
        result: DeleteResult = await self._write(self._fence.delete_one, collection, filter)
        return result

    async def find_one_and_update(
        self, collection: Target, filter: Mapping[str, Any], update: Update, **options: Any
    ) -> Any:
        """See Fence."""
        return await self._write(self._fence.find_one_and_update, collection, filter, update, **options)

    async def _write(self, write: Callable[..., Any], collection: Target, *arguments: Any, **options: Any) -> Any:
        reached: Any = collection
        if isinstance(collection, AsyncCollection):
            reached = _InLoop(collection, asyncio.get_running_loop())
        return await asyncio.to_thread(write, reached, *arguments, **options)


class _InLoop:
    """An asyncio collection as a thread sees it: each call waits for the event loop."""

    def __init__(self, collection: AsyncCollection[Any], loop: asyncio.AbstractEventLoop) -> None:
        self._collection = collection
        self._loop = loop

    @property
    def full_name(self) -> str:
        return self._collection.full_name

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method: Callable[..., Coroutine[Any, Any, Any]] = getattr(self._collection, name)
        return lambda *arguments, **options: asyncio.run_coroutine_threadsafe(
            method(*arguments, **options), self._loop
        ).result()


class AsyncChange(Change):
    """A Change whose ``fence`` and ``transaction`` are awaited. ``fence`` takes PyMongo's asyncio collections, and
    plain ones, which it writes to in a thread."""

    __slots__ = ()

    @property
    def fence(self) -> AsyncFence:  # type: ignore[override]
        """Writes to MongoDB that a newer owner's writes shut out."""
        return AsyncFence(self._hands.fence)

    @asynccontextmanager
    async def transaction(  # type: ignore[override]
        self, client: AsyncMongoClient[Any]
    ) -> AsyncIterator[AsyncClientSession]:
        """``async with change.transaction(client) as session:`` either both what is written with ``session`` and the
        commit of this change's position take effect, or neither. ``client`` is the handler's own, connected to the
        deployment that holds the leases.
        """
        hands = self._hands
        begin = getattr(hands.store, "async_transaction", None)
        if begin is None:
            raise UsageError("a transaction of an asyncio handler needs a MongoLeaseStore")
        self._begin_transaction()
        started = time.monotonic()
        try:
            async with begin(client, hands.lease, self._position.to_document(), hands.lease_seconds) as session:
                yield session
            self._end_transaction(started)
        except LeaseLost as error:
            hands.ownership.lose(error)
            raise
        finally:
            hands.ownership.in_transaction = False
