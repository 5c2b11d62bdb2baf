"""Watching in the calling process: ``connect(uri)[database][collection].watch(...)``."""

from tailrace.client.asynchronous.change_stream import AsyncChangeStream
from tailrace.client.asynchronous.client import AsyncClient, AsyncCollection, AsyncDatabase
from tailrace.client.change_stream import ChangeStream
from tailrace.client.client import Client, Collection, Database, connect, operation_time, watch_scope
from tailrace.client.deployment import ENGINES

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
