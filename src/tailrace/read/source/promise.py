"""Promises on demand: makes an idle shard say that it has nothing (docs/design/sharded-merge.md).

An event of one shard leaves the merge when every other shard is known to be past its cluster time. An idle shard writes
a no-op every ten seconds. If it is asked to, it writes one at once: it is given the largest cluster time (gossip), and
then has a reason to write at a later one. The reader gives the promise itself, when the no-op arrives from its tail:
what was written before the no-op has arrived by then, whatever the answer to the request said.

Two ways, both without any right to write, measured on shards of 6.0.27:

* to abort a transaction that was never begun, ``w: majority, j: true``: the server writes the no-op "NoSuchTransaction
  error" and flushes its journal at once. 3.5 ms (p50), 27 ms at most. The first choice.
* to read at majority with ``afterClusterTime``: the server writes "noop write for afterClusterTime read concern", and
  waits for the journal's next turn, every 100 ms. 28 ms (p50), 104 ms at most. Where the first is refused.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

from bson.int64 import Int64
from pymongo import MongoClient
from pymongo.errors import NotPrimaryError, OperationFailure

from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.read.source.connection import clock_session
from tailrace.read.source.failure import is_transient

_NO_SUCH_TRANSACTION: Final = 251
#: A shard without a majority would keep a reader waiting for ever.
_LIMIT_MS: Final = 5_000
_LATELY_S: Final = 0.5

_log = logging.getLogger("tailrace.source")


class AskedLately:
    """Up to where a shard was asked lately: many streams wait for the same time at the same moment, and asking once is
    enough for them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._until = ClusterTime(0)
        self._asked_s = -math.inf

    def once(self, until: ClusterTime, ask: Callable[[], None]) -> None:
        """Call ``ask`` unless that was done for ``until`` or later a moment ago. A member that is voted out may take
        back what it wrote, so it is not for ever."""
        with self._lock:
            if until <= self._until and time.monotonic() < self._asked_s + _LATELY_S:
                return
            ask()
            self._until, self._asked_s = until, time.monotonic()


class PromiseRequester:
    """Asks one shard, one request at a time.

    ``lately``      shared with other requesters of the shard

    ``forced``      how many no-ops the shard wrote because it was asked here
    ``reads_only``  ask by reading, the second way; found out where it is not said
    """

    def __init__(
        self, client: MongoClient[Any], name: str, *, reads_only: bool = False, lately: AskedLately | None = None
    ) -> None:
        self._lately = lately or AskedLately()
        self._client = client
        self._name = name
        self._reads_only = reads_only
        self.forced = 0

    def ask(self, until: ClusterTime, clock_document: Mapping[str, Any]) -> None:
        """See that the shard's oplog gets an entry at or after ``until``, and that it is majority-committed soon.

        ``clock_document``  a ``$clusterTime`` as a member sent it, signature and all, not before ``until``

        Writes nothing where there is such an entry. Raises PyMongoError where the shard does not answer.
        """
        self._lately.once(until, partial(self._ask, until, clock_document))

    def _ask(self, until: ClusterTime, clock_document: Mapping[str, Any]) -> None:
        with clock_session(self._client, clock_document) as session:
            reply = self._client.admin.command("ping", session=session)
            if ClusterTime.from_timestamp(reply["operationTime"]) >= until:
                return
            self.forced += 1
            if not self._reads_only:
                command = {
                    "abortTransaction": 1,
                    "txnNumber": Int64(1),
                    "autocommit": False,
                    "writeConcern": {"w": "majority", "j": True, "wtimeout": _LIMIT_MS},
                }
                try:
                    self._client.admin.command(command, session=session)
                except NotPrimaryError:
                    if self._client.topology_description.topology_type_name != "Single":
                        raise  # there is another primary
                    # A direct connection, such as to a hidden member: a read makes it ask the primary for the no-op.
                    _log.info("shard %s: promises by reading (its member takes no writes)", self._name)
                except OperationFailure as error:
                    if error.code == _NO_SUCH_TRANSACTION:
                        return
                    if is_transient(error):
                        raise
                    _log.info("shard %s: promises by reading (abortTransaction: %s)", self._name, error.code)
                self._reads_only = True
        self._read_after(until, clock_document)

    def _read_after(self, until: ClusterTime, clock_document: Mapping[str, Any]) -> None:
        with clock_session(self._client, clock_document) as session:
            self._client.local.command(
                {
                    "find": "oplog.rs",
                    "sort": {"$natural": -1},
                    "projection": {"ts": 1},
                    "limit": 1,
                    "singleBatch": True,
                    "maxTimeMS": _LIMIT_MS,
                    "readConcern": {"level": "majority", "afterClusterTime": until.to_timestamp()},
                },
                session=session,
            )
