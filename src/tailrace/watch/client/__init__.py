"""Watching in the calling process: ``connect(uri)[database][collection].watch(...)``."""

from tailrace.watch.client.asynchronous.change_stream import AsyncChangeStream
from tailrace.watch.client.asynchronous.client import AsyncClient, AsyncCollection, AsyncDatabase
from tailrace.watch.client.change_stream import ChangeStream
from tailrace.watch.client.client import Client, Collection, Database, connect, operation_time, watch_scope
from tailrace.watch.client.deployment import ENGINES

#: The same classes by PyMongo's names, so that a program moves by the line that imports it.
MongoClient = Client
AsyncMongoClient = AsyncClient

__all__ = [
    "ENGINES",
    "AsyncChangeStream",
    "AsyncClient",
    "AsyncCollection",
    "AsyncDatabase",
    "AsyncMongoClient",
    "ChangeStream",
    "Client",
    "Collection",
    "Database",
    "MongoClient",
    "connect",
    "operation_time",
    "watch_scope",
]
