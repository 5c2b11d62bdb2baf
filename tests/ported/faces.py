"""PyMongo's client and ours, in both flavours, behind one synchronous face."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final

from pymongo import AsyncMongoClient, MongoClient
from pymongo.asynchronous.change_stream import AsyncChangeStream
from pymongo.asynchronous.collection import AsyncCollection
from pymongo.asynchronous.database import AsyncDatabase

import tailrace

#: Which client, and whether its calls are awaited.
FACES: Final = ("pymongo", "server", "oplog", "async pymongo", "async server", "async oplog")
_AWAITED: Final = (AsyncMongoClient, AsyncDatabase, AsyncCollection, AsyncChangeStream)


class Face:
    """An object of the asynchronous flavour whose calls are awaited here."""

    def __init__(self, inside: Any, loop: asyncio.AbstractEventLoop) -> None:
        self.inside = inside
        self._loop = loop

    def _shown(self, found: Any) -> Any:
        if isinstance(found, _AWAITED):
            return Face(found, self._loop)
        return partial(self._call, found) if callable(found) and not isinstance(found, type) else found

    def _call(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        async def called() -> Any:
            try:
                result = function(*arguments, **options)
                return (await result if inspect.isawaitable(result) else result), None
            except (Exception, StopAsyncIteration) as error:  # noqa: BLE001  a coroutine may not raise each of them
                return None, error

        result, error = self._loop.run_until_complete(called())
        if isinstance(error, StopAsyncIteration):
            raise StopIteration from None
        if error is not None:
            raise error
        return self._shown(result) if isinstance(result, _AWAITED) else result

    def __getattr__(self, name: str) -> Any:
        return self._shown(getattr(self.inside, name))

    def __getitem__(self, name: Any) -> Any:
        return self._shown(self.inside[name])

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return self._call(self.inside.__anext__)

    def __enter__(self) -> Face:
        self._call(self.inside.__aenter__)
        return self

    def __exit__(self, *_: object) -> None:
        self._call(self.inside.__aexit__, None, None, None)


def inside(face: Any) -> Any:
    """The object itself, whatever its flavour."""
    return face.inside if isinstance(face, Face) else face


def client_of(face: str, uri: str, loop: asyncio.AbstractEventLoop, **options: Any) -> Any:
    """A client."""
    flavour, engine = face.rpartition(" ")[::2]
    if engine == "pymongo":
        kind: Any = AsyncMongoClient if flavour else MongoClient
    else:
        kind = partial(tailrace.AsyncClient if flavour else tailrace.connect, engine=engine)
    made = kind(uri, **options)
    return Face(made, loop) if flavour else made
