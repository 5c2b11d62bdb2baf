"""MongoDB change streams outside the server: ``tailrace.connect(uri)["shop"]["orders"].watch()``.

Importing this package alone loads none of its parts: Spark's workers import the core without a driver.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tailrace.errors import (
        ChangeStreamFatal,
        ChangeStreamHistoryLost,
        InternalError,
        InvalidResumeToken,
        NonResumableError,
        OplogFormatError,
        ServerError,
        SourceError,
        TailraceError,
        UsageError,
    )
    from tailrace.watch.client import (
        AsyncChangeStream,
        AsyncClient,
        AsyncMongoClient,
        ChangeStream,
        Client,
        MongoClient,
        connect,
    )

    __version__: str

__all__ = [
    "AsyncChangeStream",
    "AsyncClient",
    "AsyncMongoClient",
    "ChangeStream",
    "ChangeStreamFatal",
    "ChangeStreamHistoryLost",
    "Client",
    "InternalError",
    "InvalidResumeToken",
    "MongoClient",
    "NonResumableError",
    "OplogFormatError",
    "ServerError",
    "SourceError",
    "TailraceError",
    "UsageError",
    "__version__",
    "connect",
]

_CLIENT = frozenset(
    {"AsyncChangeStream", "AsyncClient", "AsyncMongoClient", "ChangeStream", "Client", "MongoClient", "connect"}
)


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return import_module("tailrace.version").version()
    if name not in __all__:
        raise AttributeError(f"module 'tailrace' has no attribute {name!r}")
    return getattr(import_module("tailrace.watch.client" if name in _CLIENT else "tailrace.errors"), name)
