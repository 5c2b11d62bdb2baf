"""A warning where a command is given one shard of a cluster: what it gives looks like the whole."""

from __future__ import annotations

from typing import Any, Final, TextIO

from pymongo import MongoClient

from tailrace.cli.output import tell
from tailrace.read.source.connection import open_client
from tailrace.read.source.shard_identity import ONE_SHARD_HINT, shard_name
from tailrace.read.source.uri import ConnectionString

#: The caller has a client of its own, which says what is wrong with a deployment that does not answer.
_PATIENCE_MS: Final = 3000


def warn_of_one_shard(client: MongoClient[Any], *, stream: TextIO | None = None) -> None:
    """Say so on standard error, or ``stream``, if ``client`` is connected to one shard."""
    shard = shard_name(client)
    if shard is not None:
        tell(f"tailrace: this is shard {shard} of a cluster: only its part is seen. {ONE_SHARD_HINT}.", stream=stream)


def warn_of_one_shard_at(uri: str | ConnectionString, *, stream: TextIO | None = None) -> None:
    """The same for a connection string. Silent where nobody answers soon."""
    with open_client(uri, serverSelectionTimeoutMS=_PATIENCE_MS) as client:
        warn_of_one_shard(client, stream=stream)
