"""Watching in the calling process: ``connect(uri)[database][collection].watch(...)``."""

from tailrace.client.change_stream import ChangeStream
from tailrace.client.client import ENGINES, Client, Collection, Database, connect

__all__ = ["ENGINES", "ChangeStream", "Client", "Collection", "Database", "connect"]
