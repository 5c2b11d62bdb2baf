"""Watching in the calling process: ``connect(uri)[database][collection].watch(...)``."""

from tailrace.client.change_stream import ChangeStream
from tailrace.client.client import Client, Collection, Database, connect, operation_time, watch_scope
from tailrace.client.deployment import ENGINES

#: The same class by PyMongo's name, so that a program moves by the line that imports it.
MongoClient = Client

__all__ = [
    "ENGINES",
    "ChangeStream",
    "Client",
    "Collection",
    "Database",
    "MongoClient",
    "connect",
    "operation_time",
    "watch_scope",
]
