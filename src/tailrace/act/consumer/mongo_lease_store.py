"""Leases as documents of a MongoDB collection: one for each resource, judged by the server's clock, written at
majority.

What ``rules.lease`` decides is expressed here in the server's language: each step is one ``findAndModify`` whose update
is a pipeline that leaves the document as it is where the answer is no. A condition in the query would not do: the
server takes no ``$expr``, and so no ``$$NOW``, in the query of an upsert.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from datetime import UTC, datetime
from typing import Any, Final

import pymongo
from bson import CodecOptions
from bson.errors import BSONError
from bson.int64 import Int64
from pymongo import AsyncMongoClient, ReadPreference, ReturnDocument, WriteConcern
from pymongo.asynchronous.client_session import AsyncClientSession
from pymongo.client_session import ClientSession
from pymongo.collection import Collection
from pymongo.errors import (
    ConnectionFailure,
    DuplicateKeyError,
    OperationFailure,
    PyMongoError,
    WriteConcernError,
)
from pymongo.read_concern import ReadConcern

from tailrace.act.consumer.forward_query import forward, forward_expressions
from tailrace.act.consumer.lease import LeaseCommit
from tailrace.act.consumer.rules import instructions
from tailrace.act.consumer.rules import lease as rules
from tailrace.act.consumer.rules.errors import LeaseDocumentError, LeaseStoreUnavailable
from tailrace.act.consumer.rules.lease import Lease
from tailrace.errors import SinkError, TailraceError, UsageError
from tailrace.read.source.failure import is_transient, short_reason

_MAJORITY: Final = WriteConcern("majority")
#: A call that has no answer after this time counts as unanswered.
TIMEOUT_S: Final = 10.0
_VERSION_MAX: Final = 1 << 53
#: The fields of a document by the attributes of a Lease. An operator's instructions are there only while they hold.
_INSTRUCTIONS: Final = {
    "paused_at": "pausedAt",
    "reserved_for": "reservedFor",
    "reserved_until": "reservedUntil",
    "skip": "skip",
}
_FIELD_OF: Final = {
    "resource": "_id",
    "owner": "owner",
    "version": "version",
    "position": "position",
    "expires_at": "expiresAt",
    "acquired_at": "acquiredAt",
    "committed_at": "committedAt",
    **_INSTRUCTIONS,
}
_FIELDS: Final = frozenset(_FIELD_OF.values())
_DATES: Final = ("expiresAt", "acquiredAt", "committedAt", "pausedAt", "reservedUntil")
_UNAUTHORIZED: Final = 13
_WRITE_CONFLICT: Final = 112
#: How often a commit whose outcome is unknown is asked for; the driver tries each of them twice.
_COMMIT_TRIES: Final = 5
_TRANSIENT: Final = "TransientTransactionError"
_UNKNOWN: Final = "UnknownTransactionCommitResult"


class MongoLeaseStore:
    """A LeaseStore in ``collection``, a PyMongo collection of a replica set or a sharded cluster.

    Writes and reads go to the primary at majority, whatever the collection itself is set to; a standalone server, whose
    writes can be lost, is refused. Use a collection that holds leases alone; it needs no index but that on ``_id``.

    Args:
        timeout_s: how long one call may take, retries included, before it counts as unanswered
    """

    def __init__(self, collection: Collection[Any], *, timeout_s: float = TIMEOUT_S) -> None:
        if not isinstance(collection, Collection):
            raise UsageError(
                f"a lease store needs a PyMongo collection, not {type(collection).__name__}",
                hint='For example MongoLeaseStore(client["tailrace"]["leases"])',
            )
        self._plain: Collection[Any] = collection
        self._leases: Collection[Any] = collection.with_options(
            codec_options=CodecOptions(tz_aware=True, tzinfo=UTC),
            read_preference=ReadPreference.PRIMARY,
            write_concern=_MAJORITY,
            read_concern=ReadConcern("majority"),
        )
        self._timeout_s = timeout_s
        self._checked = False

    def __repr__(self) -> str:
        return f"MongoLeaseStore({self._plain.full_name})"

    def acquire(self, resource: str, owner: str, seconds: float) -> Lease | None:
        """See LeaseStore. Raises LeaseDocumentError if somebody has edited the document into something else."""
        rules.check_arguments(resource, owner, seconds)
        try:
            with self._answering(f"acquire the lease on {resource!r}"):
                self._check_deployment()
                document = self._leases.find_one_and_update(
                    {"_id": resource},
                    [{"$replaceWith": _acquired(owner, seconds)}, _WITHOUT_OLD_RESERVATION],
                    upsert=True,
                    return_document=ReturnDocument.AFTER,
                )
        except DuplicateKeyError:
            return None  # somebody else made the document in the same moment
        lease = self._read(document or {})
        if lease.owner != owner:
            return None
        if lease.paused_at is None and lease.reserved_for is None:
            return lease
        # A lease of this owner's that has run out is not given to it either while an operator keeps it: the record is
        # then as it was.
        return None if lease.is_free(self.now()) else lease

    def refresh(self, lease: Lease, seconds: float) -> Lease:
        """See LeaseStore."""
        return self._held(lease, _held(seconds), f"refresh the lease on {lease.resource!r}")

    def commit(self, lease: Lease, position: Mapping[str, Any], seconds: float) -> Lease:
        """See LeaseStore."""
        what = f"commit to the lease on {lease.resource!r}"
        return self._held(lease, _committed(position, seconds), what, forward(position))

    def commit_together(self, commits: Sequence[LeaseCommit]) -> list[TailraceError | None]:
        """See CommitsTogether: one ``update`` command, so that all of them wait for the majority once.

        The command is not a retryable write: a commit can be sent again at any time, and what the server records for
        retryable writes would cost one more write for each.
        """
        what = f"commit to {len(commits)} leases"
        statements = [_commit_statement(*commit) for commit in commits]
        with self._answering(what):
            reply = self._leases.database.command(
                {
                    "update": self._leases.name,
                    "updates": statements,
                    "ordered": False,
                    "writeConcern": _MAJORITY.document,
                }
            )
        failed = reply.get("writeConcernError")
        if failed is not None:
            raise LeaseStoreUnavailable(
                f"cannot {what} in {self._plain.full_name}: {failed.get('errmsg')}", code=failed.get("code")
            )
        if reply["nModified"] == len(commits):
            return [None] * len(commits)
        return [self._outcome(commit) for commit in commits]  # the reply does not say which were not done, or why

    def _outcome(self, commit: LeaseCommit) -> TailraceError | None:
        try:
            self.commit(*commit)
        except TailraceError as error:
            return error
        return None

    def release(self, lease: Lease) -> bool:
        """See LeaseStore."""
        with self._answering(f"release the lease on {lease.resource!r}"):
            result = self._leases.update_one(_of(lease), {"$set": {"owner": None, "expiresAt": None}})
        return result.matched_count == 1

    @contextmanager
    def transaction(self, lease: Lease, position: Mapping[str, Any], seconds: float) -> Iterator[ClientSession]:
        """See LeaseStore. The lease's document is written first: from then on until the transaction ends nobody can
        take the lease, and the server ends the transaction if this process does not (after 60 s by default)."""
        what = f"commit to the lease on {lease.resource!r} in a transaction"
        with self._leases.database.client.start_session() as session:
            session.start_transaction(ReadConcern("snapshot"), _MAJORITY, ReadPreference.PRIMARY)
            try:
                with self._answering(what):
                    document = self._leases.find_one_and_update(
                        _of(lease) | forward(position), _committed(position, seconds), session=session
                    )
                if document is None:
                    raise rules.commit_refused(self.read(lease.resource), lease)
                yield session
            except BaseException:
                if session.in_transaction:
                    session.abort_transaction()
                raise
            self._commit_transaction(session, what)

    @asynccontextmanager
    async def async_transaction(
        self, client: AsyncMongoClient[Any], lease: Lease, position: Mapping[str, Any], seconds: float
    ) -> AsyncIterator[AsyncClientSession]:
        """``transaction`` for an asyncio handler, with a session of ``client``, which is connected to the deployment
        that holds the leases."""
        what = f"commit to the lease on {lease.resource!r} in a transaction"
        leases = client[self._leases.database.name][self._leases.name]
        async with client.start_session() as session:
            await session.start_transaction(ReadConcern("snapshot"), _MAJORITY, ReadPreference.PRIMARY)
            try:
                with self._answering(what):
                    document = await leases.find_one_and_update(
                        _of(lease) | forward(position), _committed(position, seconds), session=session
                    )
                if document is None:
                    raise rules.commit_refused(await asyncio.to_thread(self.read, lease.resource), lease)
                yield session
            except BaseException:
                if session.in_transaction:
                    await session.abort_transaction()
                raise
            _check_not_ended(session)
            for tries in range(_COMMIT_TRIES, 0, -1):
                try:
                    await session.commit_transaction()
                except PyMongoError as error:
                    _judge_commit(error, tries - 1, what)
                else:
                    return

    def _commit_transaction(self, session: ClientSession, what: str) -> None:
        """Commit, and ask again for as long as the answer is unknown. Raises LeaseStoreUnavailable where it stays so:
        whether the transaction took place is then known only by the position in the store."""
        _check_not_ended(session)
        for tries in range(_COMMIT_TRIES, 0, -1):
            try:
                session.commit_transaction()
            except PyMongoError as error:
                _judge_commit(error, tries - 1, what)
            else:
                return

    def read(self, resource: str) -> Lease | None:
        """See LeaseStore."""
        with self._answering(f"read the lease on {resource!r}"):
            document = self._leases.find_one({"_id": resource})
        return None if document is None else self._read(document)

    def leases(self) -> list[Lease]:
        """See LeaseStore. Raises LeaseDocumentError at the first document that is not a lease."""
        with self._answering("list the leases"):
            documents = list(self._leases.find({}, sort=[("_id", 1)]))
        return [self._read(document) for document in documents]

    def examine(self) -> list[tuple[str, Lease | LeaseDocumentError]]:
        """As ``leases``, with an error in place of each document that is not a lease."""
        with self._answering("list the leases"):
            documents = list(self._leases.find({}, sort=[("_id", 1)]))
        return [(str(document["_id"]), self._examined(document)) for document in documents]

    def _examined(self, document: Mapping[str, Any]) -> Lease | LeaseDocumentError:
        try:
            return self._read(document)
        except LeaseDocumentError as error:
            return error

    def revoke(self, resource: str) -> Lease | None:
        """See LeaseStore."""
        with self._answering(f"take the lease on {resource!r}"):
            document = self._leases.find_one_and_update(
                {"_id": resource}, {"$set": {"owner": None, "expiresAt": None}}, return_document=ReturnDocument.BEFORE
            )
        return None if document is None else self._read(document)

    def amend(self, before: Lease | None, after: Lease) -> bool:
        """See OperatedLeaseStore."""
        changed = {_FIELD_OF[name]: value for name, value in instructions.changes(before, after).items()}
        if "version" in changed:
            changed["version"] = Int64(after.version)
        gone = {name: "" for name, value in changed.items() if value is None and name in _INSTRUCTIONS.values()}
        fields = {name: value for name, value in changed.items() if name not in gone}
        with self._answering(f"change the lease on {after.resource!r}"):
            if before is None:
                try:
                    self._leases.insert_one(fields | {"_id": after.resource})
                except DuplicateKeyError:
                    return False
                return True
            update: dict[str, Any] = {"$set": fields or {"owner": after.owner}}
            result = self._leases.update_one(_of(before), update | ({"$unset": gone} if gone else {}))
        return result.matched_count == 1

    def remove(self, record: Lease) -> bool:
        """See OperatedLeaseStore."""
        with self._answering(f"delete the lease on {record.resource!r}"):
            query = _of(record) | {"expiresAt": record.expires_at}
            return self._leases.delete_one(query).deleted_count == 1

    def commit_skip(self, lease: Lease, position: Mapping[str, Any], seconds: float) -> Lease:
        """See OperatedLeaseStore."""
        update = [*_committed(position, seconds), {"$unset": "skip"}]
        return self._held(lease, update, f"commit to the lease on {lease.resource!r}", forward(position))

    def collection(self, namespace: tuple[str, str]) -> Collection[Any]:
        """A collection of the deployment that keeps the leases."""
        database, name = namespace
        return self._plain.database.client[database][name]

    def now(self) -> datetime:
        """See LeaseStore: the primary's clock."""
        with self._answering("ask for the time"):
            hello = self._leases.database.command("hello")
        local: datetime = hello["localTime"]
        return local if local.tzinfo is not None else local.replace(tzinfo=UTC)

    def _held(
        self, lease: Lease, update: list[dict[str, Any]], what: str, further: dict[str, Any] | None = None
    ) -> Lease:
        with self._answering(what):
            query = _of(lease) | (further or {})
            document = self._leases.find_one_and_update(query, update, return_document=ReturnDocument.AFTER)
        if document is None:
            record = self.read(lease.resource)
            raise rules.lease_lost(record, lease) if further is None else rules.commit_refused(record, lease)
        return self._read(document)

    def _check_deployment(self) -> None:
        """Refuse a standalone server: nothing it writes is safe from being rolled back, and it has no stream."""
        if self._checked:
            return
        hello = self._leases.database.command("hello")
        if "setName" not in hello and hello.get("msg") != "isdbgrid":
            raise UsageError(
                f"{self!r} is on a standalone server, which cannot write with majority write concern",
                hint="Keep leases in a replica set or a sharded cluster: a lease that can be lost protects nothing",
            )
        if hello.get("hidden"):
            raise UsageError(
                f"{self!r} is on a hidden member, which takes no writes",
                hint="Keep leases in the replica set itself, or in another one, and watch the hidden member",
            )
        self._checked = True

    @contextmanager
    def _answering(self, what: str) -> Iterator[None]:
        try:
            with pymongo.timeout(self._timeout_s):
                yield
        except DuplicateKeyError:
            raise
        except BSONError as error:
            raise UsageError(f"cannot {what}: {error}") from None
        except PyMongoError as error:
            raise _store_error(f"cannot {what} in {self._plain.full_name}: {short_reason(error)}", error) from error

    def _read(self, document: Mapping[str, Any]) -> Lease:
        """The lease that a document holds. Raises LeaseDocumentError where it is not one that this store writes."""
        wrong = _wrong_field(document)
        if wrong is not None:
            raise LeaseDocumentError(
                f"the lease document {document.get('_id')!r} in {self._plain.full_name} cannot be used: {wrong}",
                hint="Somebody has edited it. Correct it; its version must be higher than every earlier one",
            )
        values: dict[str, Any] = {name: document.get(field) for name, field in _FIELD_OF.items()}
        return Lease(**{**values, "version": int(values["version"])})


def _check_not_ended(session: ClientSession | AsyncClientSession) -> None:
    if not session.in_transaction:
        raise UsageError(
            "the handler has ended the transaction of change.transaction() itself",
            hint="Leave the with block instead: the commit of the position is part of it",
        )


def _judge_commit(error: PyMongoError, tries: int, what: str) -> None:
    """Let a commit without an answer be asked for ``tries`` more times; raise everything else."""
    if not error.has_error_label(_UNKNOWN):
        raise error
    if not tries:
        raise LeaseStoreUnavailable(f"cannot {what}: {short_reason(error)}") from error


def _wrong_field(document: Mapping[str, Any]) -> str | None:
    for name, value in document.items():
        if name not in _FIELDS:
            return f"it has a field {name!r}"
        if name in _DATES and not (value is None or isinstance(value, datetime)):
            return f"{name} is not a date: {value!r}"
    version = document.get("version")
    if isinstance(version, bool) or not isinstance(version, (int, float)) or not 0 <= version < _VERSION_MAX:
        return f"version is not a whole number, 0 or more: {version!r}"
    if version != int(version):
        return f"version is not a whole number: {version!r}"
    if not isinstance(document.get("_id"), str):
        return "its _id is not a string"
    if not (document.get("owner") is None or isinstance(document["owner"], str)):
        return f"owner is not a string: {document['owner']!r}"
    for name in ("position", "skip"):
        if not (document.get(name) is None or isinstance(document[name], Mapping)):
            return f"{name} is not a document: {document[name]!r}"
    if not isinstance(document.get("reservedFor", ""), str):
        return f"reservedFor is not a string: {document['reservedFor']!r}"
    return None


def _store_error(message: str, error: PyMongoError) -> TailraceError:
    """LeaseStoreUnavailable where it is worth asking again."""
    unanswered = error.timeout or isinstance(error, (ConnectionFailure, WriteConcernError)) or is_transient(error)
    if unanswered or error.has_error_label(_TRANSIENT) or error.has_error_label("RetryableWriteError"):
        return LeaseStoreUnavailable(message)
    code = error.code if isinstance(error, OperationFailure) else None
    if code == _WRITE_CONFLICT:
        return LeaseStoreUnavailable(message, code=code)
    hint = "The user needs find, insert and update on the collection of leases" if code == _UNAUTHORIZED else None
    return SinkError(message, code=code, hint=hint)


def _of(lease: Lease) -> dict[str, Any]:
    return {"_id": lease.resource, "owner": lease.owner, "version": Int64(lease.version)}


def _later(seconds: float) -> dict[str, Any]:
    return {"$add": ["$$NOW", Int64(round(seconds * 1000))]}


def _held(seconds: float) -> list[dict[str, Any]]:
    return [{"$set": {"expiresAt": _later(seconds)}}]


def _committed(position: Mapping[str, Any], seconds: float) -> list[dict[str, Any]]:
    return [{"$set": _commit_fields(position, seconds)}]


def _commit_fields(position: Mapping[str, Any], seconds: float) -> dict[str, Any]:
    return {"position": {"$literal": position}, "committedAt": "$$NOW", "expiresAt": _later(seconds)}


def _commit_statement(lease: Lease, position: Mapping[str, Any], seconds: float) -> dict[str, Any]:
    """One commit of several. A query by ``_id`` alone costs the server a third less than one that compares more, so the
    pipeline compares, and leaves the document unchanged where they differ."""
    forwards = forward_expressions(position)
    if forwards is None:
        return {"q": _of(lease) | forward(position), "u": _committed(position, seconds)}
    mine = [{"$eq": ["$owner", {"$literal": lease.owner}]}, {"$eq": ["$version", Int64(lease.version)]}]
    after = {"$mergeObjects": ["$$ROOT", _commit_fields(position, seconds)]}
    update = {"$replaceWith": {"$cond": [{"$and": [*mine, *forwards]}, after, "$$ROOT"]}}
    return {"q": {"_id": lease.resource}, "u": [update]}


_NOT_RESERVED: Final = {"$lte": [{"$ifNull": ["$reservedUntil", None]}, "$$NOW"]}
_IS_OVER: Final = {"$and": [{"$eq": [{"$type": "$reservedUntil"}, "date"]}, {"$lte": ["$reservedUntil", "$$NOW"]}]}
_WITHOUT_OLD_RESERVATION: Final = {
    "$set": {name: {"$cond": [_IS_OVER, "$$REMOVE", f"${name}"]} for name in ("reservedUntil", "reservedFor")}
}


def _acquired(owner: str, seconds: float) -> dict[str, Any]:
    """The document after ``owner`` asked: taken where it is free or is under this id already, as it was otherwise, and
    where somebody has edited it into something that is no lease."""
    is_new = {"$eq": [{"$objectToArray": "$$ROOT"}, [{"k": "_id", "v": "$_id"}]]}
    is_whole = {"$eq": ["$version", {"$trunc": "$version"}]}
    is_number = {"$in": [{"$type": "$version"}, ["int", "long", "double"]]}
    in_range = {"$and": [{"$gte": ["$version", 0]}, {"$lt": ["$version", Int64(_VERSION_MAX)]}]}
    types_fit = [
        {"$in": [{"$type": f"${name}"}, [kind, "null", "missing"]]}
        for name, kind in (
            *(("owner", "string"), ("reservedFor", "string"), ("position", "object"), ("skip", "object")),
            *((name, "date") for name in _DATES),
        )
    ]
    nobody = {"$eq": [{"$ifNull": ["$owner", None]}, None]}
    expired = {"$lte": [{"$ifNull": ["$expiresAt", None]}, "$$NOW"]}
    mine_yet = {"$and": [{"$eq": ["$owner", {"$literal": owner}]}, {"$not": [expired]}]}
    not_paused = {"$eq": [{"$ifNull": ["$pausedAt", None]}, None]}
    not_for_others = {"$or": [_NOT_RESERVED, {"$in": ["$reservedFor", {"$literal": list(rules.names_of(owner))}]}]}
    for_anybody = {"$and": [{"$or": [nobody, expired]}, not_paused, not_for_others]}
    taken = {
        "owner": {"$literal": owner},
        "version": {"$toLong": {"$add": [{"$ifNull": ["$version", 0]}, 1]}},
        "expiresAt": _later(seconds),
        "acquiredAt": "$$NOW",
    }
    is_free = {"$and": [is_number, in_range, is_whole, *types_fit, {"$or": [mine_yet, for_anybody]}]}
    # A $switch takes its first branch that fits, and evaluates none after it.
    after: dict[str, Any] = {"$mergeObjects": ["$$ROOT", taken]}
    branches = [
        {"case": is_new, "then": after},
        {"case": {"$not": is_number}, "then": "$$ROOT"},
        {"case": is_free, "then": after},
    ]
    return {"$switch": {"branches": branches, "default": "$$ROOT"}}
