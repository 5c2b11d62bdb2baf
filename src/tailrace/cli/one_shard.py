"""A warning where a command is given one shard of a cluster: what it gives looks like the whole."""

from __future__ import annotations

from typing import Any

from pymongo import MongoClient

from tailrace.cli.output import tell
from tailrace.read.source.shard_identity import ONE_SHARD_HINT, shard_name


def warn_of_one_shard(client: MongoClient[Any]) -> None:
    """Say so on standard error if ``client`` is connected to one shard."""
    shard = shard_name(client)
    if shard is not None:
        tell(f"tailrace: this is shard {shard} of a cluster: only its part is seen. {ONE_SHARD_HINT}.")
