"""One transaction over any number of shards, driven as a mongos drives it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, Self

from bson.int64 import Int64
from bson.timestamp import Timestamp
from pymongo.errors import OperationFailure, PyMongoError

from tailrace.embedded.sharding.connections import MAJORITY, STALE, Connections, is_gone
from tailrace.errors import UsageError

_NO_SUCH_TRANSACTION = 251
_STALE_REFUSALS_MAX = 3  # the server waits up to half a second before each
_STEP_S = 0.02
_TRANSIENT = "TransientTransactionError"


@dataclass(frozen=True)
class Written:
    """An acknowledged write: the shard that took it, and the shard's reply (``n``, ``nModified``, ``upserted``)."""

    shard: str
    reply: Mapping[str, Any]

    @property
    def count(self) -> int:
        """How many documents were inserted, matched or deleted."""
        return int(self.reply["n"])


class Statements(Protocol):
    """What a transaction asks of the router: single statements, each sent to the shard that owns the document."""

    @property
    def connections(self) -> Connections:
        """The cluster's members."""

    def insert_one(
        self, namespace: str, document: Mapping[str, Any], *, transaction: Transaction | None = None
    ) -> Written:
        """Insert one document."""

    def update_one(
        self,
        namespace: str,
        query: Mapping[str, Any],
        update: Any,
        *,
        upsert: bool = False,
        transaction: Transaction | None = None,
    ) -> Written:
        """Update one document."""

    def replace_one(
        self,
        namespace: str,
        query: Mapping[str, Any],
        document: Mapping[str, Any],
        *,
        upsert: bool = False,
        transaction: Transaction | None = None,
    ) -> Written:
        """Replace one document."""

    def delete_one(
        self, namespace: str, query: Mapping[str, Any], *, transaction: Transaction | None = None
    ) -> Written:
        """Delete one document."""

    def find_one(
        self, namespace: str, query: Mapping[str, Any], *, transaction: Transaction | None = None
    ) -> dict[str, Any] | None:
        """Read one document."""


class Transaction:
    """A multi-document transaction. Statements go to the shards that own their documents. ``commit`` is one command
    where one shard took part, and a two-phase commit coordinated by the first shard where more did.

    As a context manager it commits at the end of the block, and aborts when the block raises. A shard that refuses a
    statement has aborted its part: call ``abort``, and begin a new transaction where the error has the label
    ``TransientTransactionError`` (``Router.run_transaction`` does both).
    """

    def __init__(self, router: Statements, session: Mapping[str, Any], number: int) -> None:
        self._router = router
        self._session = session
        self._number = number
        self._prepared: dict[str, Timestamp] = {}
        self._ended = False
        self._asked: list[str] = []
        #: The shards that took part so far, the coordinator first.
        self.shards: list[str] = []

    def insert_one(self, namespace: str, document: Mapping[str, Any]) -> Written:
        """As ``Router.insert_one``."""
        return self._router.insert_one(namespace, document, transaction=self)

    def update_one(self, namespace: str, query: Mapping[str, Any], update: Any, *, upsert: bool = False) -> Written:
        """As ``Router.update_one``."""
        return self._router.update_one(namespace, query, update, upsert=upsert, transaction=self)

    def replace_one(
        self, namespace: str, query: Mapping[str, Any], document: Mapping[str, Any], *, upsert: bool = False
    ) -> Written:
        """As ``Router.replace_one``."""
        return self._router.replace_one(namespace, query, document, upsert=upsert, transaction=self)

    def delete_one(self, namespace: str, query: Mapping[str, Any]) -> Written:
        """As ``Router.delete_one``."""
        return self._router.delete_one(namespace, query, transaction=self)

    def find_one(self, namespace: str, query: Mapping[str, Any]) -> dict[str, Any] | None:
        """As ``Router.find_one``."""
        return self._router.find_one(namespace, query, transaction=self)

    def prepare(self) -> Timestamp:
        """The first phase alone: every shard prepares. Returns the commit's timestamp, the largest of theirs.
        ``commit`` or ``abort`` must follow, and until then readers of what was written have to wait."""
        for shard in self.shards:
            reply = self._end(shard, "prepareTransaction")
            self._prepared[shard] = reply["prepareTimestamp"]
        return max(self._prepared.values())

    def commit(self) -> None:
        """Commit. Without a statement there is nothing to do."""
        self._ended = True
        if not self.shards:
            return
        if self._prepared:
            at = max(self._prepared.values())
            for shard in self.shards:
                self._end(shard, "commitTransaction", commitTimestamp=at)
        elif len(self.shards) == 1:
            self._end(self.shards[0], "commitTransaction")
        else:
            participants = [{"shardId": shard} for shard in self.shards]
            self._end(self.shards[0], "coordinateCommitTransaction", participants=participants)

    def abort(self) -> None:
        """Abort on every shard. A shard that has already aborted is no error."""
        self._ended = True
        for shard in self._asked:
            try:
                self._end(shard, "abortTransaction")
            except OperationFailure as error:
                if error.code != _NO_SUCH_TRANSACTION:
                    raise

    def fields(self, shard: str) -> dict[str, Any]:
        """What makes a command for ``shard`` a statement of this transaction."""
        if self._ended or self._prepared:
            raise UsageError("The transaction has ended: it takes no further statement")
        if shard in self._asked:
            self._asked.remove(shard)
        self._asked.append(shard)
        fields = self._base()
        if shard not in self.shards:
            fields |= {"startTransaction": True, "readConcern": {"level": "snapshot"}}
            if not self.shards:
                fields["coordinator"] = True
        return fields

    def may_repeat(self, refusals: int) -> bool:
        """Whether a statement that was refused this often as stale may be sent again.

        The first one for its shard may; any other refusal has undone what the shard did before. Where other shards
        take part already, it may a few times only: the chunk's new owner can be one of them, and wait for the locks of
        this very transaction before it takes the chunk over.
        """
        first = bool(self._asked) and self._asked[-1] not in self.shards
        return first and (not self.shards or refusals < _STALE_REFUSALS_MAX)

    def joined(self, shard: str) -> None:
        """A statement was taken by ``shard``."""
        if shard not in self.shards:
            self.shards.append(shard)

    def _base(self) -> dict[str, Any]:
        return {"lsid": self._session, "txnNumber": Int64(self._number), "autocommit": False}

    def _end(self, shard: str, name: str, **fields: Any) -> Any:
        command = {name: 1, **self._base(), "writeConcern": MAJORITY, **fields}
        return self._router.connections.run_again(shard, "admin", command)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._ended:
            return
        if error is None:
            self.commit()
        else:
            self.abort()


def run_until_committed(begin: Callable[[], Transaction], body: Callable[[Transaction], None]) -> Transaction:
    """Run ``body`` in new transactions until one is committed; the committed one. Errors that are not transient are
    raised after the abort."""
    while True:
        transaction = begin()
        try:
            body(transaction)
        except BaseException as error:
            transaction.abort()
            if not _passes(error):
                raise
            time.sleep(_STEP_S)
            continue
        try:
            transaction.commit()
        except PyMongoError as error:
            if not error.has_error_label(_TRANSIENT):
                raise
            transaction.abort()
        else:
            return transaction


def _passes(error: BaseException) -> bool:
    """Whether a statement's failure is one that another attempt may not meet."""
    if not isinstance(error, PyMongoError):
        return False
    stale = isinstance(error, OperationFailure) and error.code in STALE
    return stale or is_gone(error) or error.has_error_label(_TRANSIENT)
