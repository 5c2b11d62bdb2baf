"""``AsyncClient``: PyMongo's asynchronous client, with streams of our own, made as ``tailrace.watch.client.client``
is."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Generic, Self, cast

from bson.codec_options import CodecOptions, TypeRegistry
from bson.timestamp import Timestamp
from pymongo import AsyncMongoClient
from pymongo.asynchronous import collection as pymongo_collection
from pymongo.asynchronous import database as pymongo_database
from pymongo.asynchronous.client_session import AsyncClientSession
from pymongo.collation import Collation
from pymongo.errors import ConfigurationError
from pymongo.read_concern import ReadConcern
from pymongo.typings import _DocumentType
from pymongo.write_concern import WriteConcern

from tailrace.read.source.driver_error import driver_errors
from tailrace.read.source.uri import ClientOptions
from tailrace.read.tail.shared_tail import WINDOW_BYTES
from tailrace.watch.client.arguments import Arguments, refused
from tailrace.watch.client.asynchronous.change_stream import AsyncChangeStream, ThreadedChangeStream
from tailrace.watch.client.asynchronous.server_stream import AsyncServerChangeStream
from tailrace.watch.client.client import Host, Pipeline
from tailrace.watch.client.deployment import EngineName, WatchedDeployment
from tailrace.watch.client.snapshot_stream import copies_first
from tailrace.watch.client.watchable import Watchable, WatchableClient, WatchableCollection, WatchableDatabase


class _AsyncWatchable(Watchable):
    """What can be watched: a deployment, a database, a collection."""

    async def watch(  # noqa: PLR0917
        self,
        pipeline: Pipeline | None = None,
        full_document: str | None = None,
        resume_after: Mapping[str, Any] | None = None,
        max_await_time_ms: int | None = None,
        batch_size: int | None = None,
        collation: Collation | Mapping[str, Any] | None = None,
        start_at_operation_time: Timestamp | None = None,
        session: AsyncClientSession | None = None,
        start_after: Mapping[str, Any] | None = None,
        comment: Any | None = None,
        full_document_before_change: str | None = None,
        show_expanded_events: bool | None = None,
        *,
        document_class: type[Any] | None = None,
        codec_options: CodecOptions[Any] | None = None,
        options: Mapping[str, Any] | None = None,
        timeout_ms: int | None = None,
        start: str | None = None,
        snapshot_documents_per_second: float | None = None,
    ) -> AsyncChangeStream:
        """A change stream, with the parameters and errors of ``Client.watch``. ``session`` is an AsyncClientSession."""
        request = self._request(
            pipeline=pipeline,
            full_document=full_document,
            full_document_before_change=full_document_before_change,
            resume_after=resume_after,
            start_after=start_after,
            start_at_operation_time=start_at_operation_time,
            show_expanded_events=show_expanded_events,
            max_await_time_ms=max_await_time_ms,
            timeout_ms=timeout_ms,
            batch_size=batch_size,
            collation=collation,
            comment=comment,
            session=session,
            options=options,
            start=start,
            snapshot_documents_per_second=snapshot_documents_per_second,
            document_class=document_class,
            codec_options=codec_options,
        )
        client: AsyncClient[Any] = self._watched_client()
        with driver_errors():
            if client._deployment.engine == "server" and copies_first(request):
                raise refused(
                    "an asynchronous client copies with engine='oplog' only", ConfigurationError, "Leave the engine out"
                )
            if client._deployment.engine == "server":
                return await AsyncServerChangeStream.opened(client, request)
            return await ThreadedChangeStream.opened(partial(client._deployment.open, cast(Any, client), request))


class AsyncClient(WatchableClient, _AsyncWatchable, AsyncMongoClient[_DocumentType], Generic[_DocumentType]):  # type: ignore[misc]
    """``pymongo.AsyncMongoClient`` whose ``watch``, and that of its databases and collections, is ours.

    ``tailrace.connect`` says what it takes. A stream belongs to one task at a time.
    """

    def __init__(  # noqa: PLR0917
        self,
        host: Host = None,
        port: int | None = None,
        document_class: type[_DocumentType] | None = None,
        tz_aware: bool | None = None,
        connect: bool | None = None,
        type_registry: TypeRegistry | None = None,
        *,
        engine: EngineName = "oplog",
        server_version: str | None = None,
        tail_window_bytes: int = WINDOW_BYTES,
        archive: str | Path | None = None,
        images: str | Path | None = None,
        **kwargs: Any,
    ) -> None:
        host, kwargs = Arguments.hidden(host), ClientOptions(kwargs)
        arguments = Arguments(host, port, kwargs)
        self._deployment = WatchedDeployment(arguments, engine, server_version, tail_window_bytes, archive, images)
        self._construct(
            arguments,
            super().__init__,
            document_class=document_class,
            tz_aware=tz_aware,
            connect=connect,
            type_registry=type_registry,
        )

    def __getitem__(self, name: str) -> AsyncDatabase[_DocumentType]:
        return AsyncDatabase(self, name)

    def __getattr__(self, name: str) -> AsyncDatabase[_DocumentType]:
        return cast(AsyncDatabase[_DocumentType], super().__getattr__(name))

    def get_database(
        self,
        name: str | None = None,
        codec_options: CodecOptions[Any] | None = None,
        read_preference: Any = None,
        write_concern: WriteConcern | None = None,
        read_concern: ReadConcern | None = None,
    ) -> AsyncDatabase[Any]:
        """As PyMongo's."""
        theirs = super().get_database(name, codec_options, read_preference, write_concern, read_concern)
        return AsyncDatabase._of(theirs)

    def get_default_database(
        self,
        default: str | None = None,
        codec_options: CodecOptions[Any] | None = None,
        read_preference: Any = None,
        write_concern: WriteConcern | None = None,
        read_concern: ReadConcern | None = None,
    ) -> AsyncDatabase[Any]:
        """As PyMongo's."""
        theirs = super().get_default_database(default, codec_options, read_preference, write_concern, read_concern)
        return AsyncDatabase._of(theirs)

    async def close(self) -> None:
        """As PyMongo's. Streams that are still open end with an error."""
        if "_deployment" in vars(self):
            await asyncio.to_thread(self._deployment.close)
        await super().close()

    aclose = close

    async def __aenter__(self) -> Self:
        return self


AsyncClient.__name__ = AsyncMongoClient.__name__  # PyMongo's texts and ``repr`` name the class


class AsyncDatabase(  # type: ignore[misc]
    WatchableDatabase, _AsyncWatchable, pymongo_database.AsyncDatabase[_DocumentType], Generic[_DocumentType]
):
    """``pymongo.asynchronous.database.AsyncDatabase`` whose ``watch``, and that of its collections, is ours."""

    def __getitem__(self, name: str) -> AsyncCollection[_DocumentType]:
        return AsyncCollection(self, name)

    def __getattr__(self, name: str) -> AsyncCollection[_DocumentType]:
        return cast(AsyncCollection[_DocumentType], super().__getattr__(name))

    def get_collection(
        self,
        name: str,
        codec_options: CodecOptions[Any] | None = None,
        read_preference: Any = None,
        write_concern: WriteConcern | None = None,
        read_concern: ReadConcern | None = None,
    ) -> AsyncCollection[Any]:
        """As PyMongo's."""
        return AsyncCollection(self, name, False, codec_options, read_preference, write_concern, read_concern)

    def with_options(
        self,
        codec_options: CodecOptions[Any] | None = None,
        read_preference: Any = None,
        write_concern: WriteConcern | None = None,
        read_concern: ReadConcern | None = None,
    ) -> AsyncDatabase[Any]:
        """As PyMongo's."""
        return AsyncDatabase._of(super().with_options(codec_options, read_preference, write_concern, read_concern))

    async def create_collection(  # noqa: PLR0917
        self,
        name: str,
        codec_options: CodecOptions[Any] | None = None,
        read_preference: Any = None,
        write_concern: WriteConcern | None = None,
        read_concern: ReadConcern | None = None,
        session: AsyncClientSession | None = None,
        check_exists: bool | None = True,
        **kwargs: Any,
    ) -> AsyncCollection[Any]:
        """As PyMongo's."""
        theirs = await super().create_collection(
            name, codec_options, read_preference, write_concern, read_concern, session, check_exists, **kwargs
        )
        return AsyncCollection._of(self, theirs)


class AsyncCollection(  # type: ignore[misc]
    WatchableCollection, _AsyncWatchable, pymongo_collection.AsyncCollection[_DocumentType], Generic[_DocumentType]
):
    """``pymongo.asynchronous.collection.AsyncCollection`` whose ``watch`` is ours."""

    def __getitem__(self, name: str) -> AsyncCollection[_DocumentType]:
        return AsyncCollection._of(self.database, super().__getitem__(name))

    def __getattr__(self, name: str) -> AsyncCollection[_DocumentType]:
        return cast(AsyncCollection[_DocumentType], super().__getattr__(name))

    def with_options(
        self,
        codec_options: CodecOptions[Any] | None = None,
        read_preference: Any = None,
        write_concern: WriteConcern | None = None,
        read_concern: ReadConcern | None = None,
    ) -> AsyncCollection[Any]:
        """As PyMongo's."""
        theirs = super().with_options(codec_options, read_preference, write_concern, read_concern)
        return AsyncCollection._of(self.database, theirs)
