"""Dead letters: changes that a handler cannot handle, kept with their position and the reason, to be replayed."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final, Literal

import bson
from bson.binary import Binary
from bson.codec_options import CodecOptions, DatetimeConversion
from bson.json_util import CANONICAL_JSON_OPTIONS, RELAXED_JSON_OPTIONS, dumps
from pymongo import ASCENDING
from pymongo.client_session import ClientSession
from pymongo.collection import Collection
from pymongo.errors import OperationFailure, PyMongoError
from pymongo.write_concern import WriteConcern

from tailrace.act.consumer.change import Change
from tailrace.act.consumer.fence import Fence
from tailrace.act.consumer.messages.publisher import MessagesLost, PublisherAway
from tailrace.act.consumer.rules.errors import LeaseStoreUnavailable, SkippedByOperator
from tailrace.act.consumer.rules.lanes import FIRST_LANE_TOKEN, generation_token
from tailrace.act.consumer.rules.need import Decision
from tailrace.act.consumer.rules.unrun import refuse_unrun
from tailrace.core.event.resume_token import ResumeToken
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.errors import SinkError, TailraceError, UsageError
from tailrace.read.source.failure import is_transient, short_reason
from tailrace.read.source.uri import redact_uri

Then = Literal["skip", "stop"]

#: The whole event is kept up to this size: a document of the server's holds 16 MB.
_EVENT_BYTES_MAX: Final = 15 << 20
_REASON_MAX: Final = 2_000
_ANY_VALUE: Final[CodecOptions[dict[str, Any]]] = CodecOptions(
    tz_aware=True, datetime_conversion=DatetimeConversion.DATETIME_AUTO
)
_TO_SHOW: Final = _ANY_VALUE.with_options(unicode_decode_error_handler="backslashreplace")

_log = logging.getLogger("tailrace.consumer")


class DeadLetters:
    """A listener's ``on_error``: a change whose handler fails ``tries`` times is written to a collection, with its
    token, its event and the reason. Then the listener goes on with the next change (``then="skip"``) or ends ("stop").

    An unreachable broker or database is no fault of the change: then the handler's error ends the listener, with
    nothing committed and nothing written here.

    Args:
        collection: a PyMongo collection; written with majority, once for each resource and change
    """

    def __init__(self, collection: Collection[Any], *, tries: int = 5, then: Then = "skip") -> None:
        if isinstance(tries, bool) or not isinstance(tries, int) or tries < 1:
            raise UsageError(f"tries must be a whole number, 1 or more, not {tries!r}")
        if then not in ("skip", "stop"):
            raise UsageError(f'then must be "skip" or "stop", not {then!r}')
        self._collection = collection.with_options(write_concern=WriteConcern("majority"))
        self._tries = tries
        self._then = then

    def __call__(self, change: Change, error: Exception, attempt: int) -> Decision:
        """Decide what the listener does about an error of its handler."""
        if isinstance(error, PublisherAway | MessagesLost):
            return "stop"
        if isinstance(error, PyMongoError) and is_transient(error):
            return "retry"
        if attempt < self._tries:
            return "retry"
        self._write(change, error, attempt)
        _log.error(
            "%s: the change %s is a dead letter after %d tries: %s",
            change.resource,
            change.message_id,
            attempt,
            _reason(error),
        )
        return self._then

    def write_skipped(self, change: Change, error: TailraceError | None = None) -> None:
        """Keep a change that an operator wants left out. ``error``: why the stream cannot deliver it, if that is so.
        Raises LeaseStoreUnavailable if it is worth trying again."""
        try:
            self._write(change, error or SkippedByOperator("an operator left it out, with tailrace leases skip"), 0)
        except PyMongoError as failure:
            message = f"cannot write the dead letter to {self._collection.full_name}: {short_reason(failure)}"
            if is_transient(failure) or failure.timeout:
                raise LeaseStoreUnavailable(message) from failure
            code = failure.code if isinstance(failure, OperationFailure) else None
            raise SinkError(
                message, code=code, hint="tailrace leases skip --withdraw withdraws the request"
            ) from failure

    def _write(self, change: Change, error: Exception, attempt: int) -> None:
        raw = change.raw
        letter = {
            "token": Binary(bson.encode(change.token)),
            "clusterTime": change.cluster_time.to_timestamp(),
            "namespace": change.namespace,
            "operationType": change.operation_type,
            "documentKey": _shown(bson.decode(raw, _TO_SHOW).get("documentKey")),
            "error": type(error).__name__,
            "reason": _reason(error),
            "tries": attempt,
            "version": change.version,
            "event": Binary(raw) if len(raw) <= _EVENT_BYTES_MAX else None,
            "at": datetime.now(UTC),
        }
        key = {"_id": {"resource": change.resource, "change": change.message_id}}
        self._collection.update_one(key, {"$set": letter}, upsert=True)

    def letters(self, resource: str | None = None, change: str | None = None) -> Iterator[DeadLetter]:
        """The letters in the collection, oldest change first.

        Args:
            resource: only those of this one, of all its lanes
            change: only those whose message id begins with this
        """
        query = _chosen(resource, change)
        order = [("clusterTime", ASCENDING), ("_id.change", ASCENDING)]
        # Ids first: whole events would be too much to sort, and replaying removes what is being read.
        for name in list(self._collection.find(query, {"clusterTime": 1}, sort=order)):
            document = self._collection.find_one({"_id": name["_id"]})
            if document is not None:
                yield DeadLetter.of(document, self._collection)

    @property
    def full_name(self) -> str:
        """The collection, as ``database.collection``."""
        return str(self._collection.full_name)

    def remove(self, letter: DeadLetter) -> None:
        """Remove one letter."""
        self._collection.delete_one(letter.key)

    def changes(self, resource: str | None = None) -> set[str]:
        """The message ids of the letters."""
        return {str(found["_id"]["change"]) for found in self._collection.find(_chosen(resource, None), {"_id": 1})}

    def discard(self, resource: str | None = None, change: str | None = None) -> int:
        """Remove letters that nobody wants to replay, and return how many. They are chosen as in ``letters``."""
        return self._collection.delete_many(_chosen(resource, change)).deleted_count

    def replay(
        self,
        handler: Callable[[DeadLetter], Any],
        resource: str | None = None,
        change: str | None = None,
        *,
        keeps: Callable[[DeadLetter], bool] = lambda letter: False,
    ) -> int:
        """Hand each letter to ``handler``, oldest first, and remove it when the handler returns. Returns how many.
        Raises what the handler raises, and keeps that letter and those after it. Only the letters are in order among
        themselves: later changes have been handled already. ``resource`` and ``change`` choose as in ``letters``.

        Args:
            keeps: called for each letter first: one for which it returns true is left where it is. ``NewerChanges``
                says whether its document has changed since, for a handler that writes without a fence
        """
        count = 0
        for letter in self.letters(resource, change):
            if keeps(letter):
                continue
            refuse_unrun(handler(letter), "the handler of dead letters")
            self.remove(letter)
            count += 1
        return count


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A change that was given up. It has the attributes of a ``Change``, so that the same handler can take it.

    Attributes:
        raw: the event's exact BSON
        reason: what the handler's last error said; ``error`` is its class, ``tries`` how often it was tried
        version: the fencing token that it was handled under
    """

    resource: str
    message_id: str
    token: Mapping[str, Any]
    cluster_time: ClusterTime
    namespace: str | None
    operation_type: str
    raw: bytes
    error: str
    reason: str
    tries: int
    version: int
    at: datetime
    #: The document key as extended JSON.
    shown_key: str | None = None
    collection: Collection[Any] | None = field(default=None, repr=False, compare=False)

    @classmethod
    def of(cls, found: Mapping[str, Any], collection: Collection[Any] | None = None) -> DeadLetter:
        """Read a document of the collection. Raises UsageError if it is not a dead letter."""
        try:
            token = bson.decode(found["token"])
            return cls(
                str(found["_id"]["resource"]),
                str(found["_id"]["change"]),
                token,
                ResumeToken.parse(token).cluster_time,
                found["namespace"],
                str(found["operationType"]),
                bytes(found["event"] or b""),
                str(found["error"]),
                str(found["reason"]),
                int(found["tries"]),
                int(found["version"]),
                found["at"],
                found["documentKey"],
                collection,
            )
        except (LookupError, TypeError, ValueError, bson.errors.BSONError, TailraceError) as error:
            raise UsageError(
                f"a document in the collection of dead letters is not one: {error}", hint="Name their collection"
            ) from None

    @property
    def whole_resource(self) -> str:
        """The resource, whichever lane the letter is of. ``x/1`` is the name of a lane only under a lane's token."""
        return self.resource.rpartition("/")[0] if generation_token(self.version) else self.resource

    @property
    def key(self) -> dict[str, Any]:
        """The query that finds it among the others."""
        return {"_id": {"resource": self.resource, "change": self.message_id}}

    @property
    def fence(self) -> Fence:
        """Writes under the fencing token that the change was handled under: what was written for a later change stays,
        and ``Fenced`` is raised. A listener continues under a newer token when it has left a change out. (With letters
        of versions of Tailrace that did not do so, what the same owner has written since is overwritten.)"""
        generation = generation_token(self.version)  # 0 without lanes, whatever the resource's name looks like
        above = {self.resource.rpartition("/")[0]: generation} if generation else {}
        return Fence(self.resource, self.version, above=above)

    @contextmanager
    def transaction(self) -> Iterator[ClientSession]:
        """As for a Change: either both what is written with the session and the removal of this letter take effect, or
        neither."""
        if self.collection is None:
            raise UsageError("a dead letter that was read on its own cannot be removed in a transaction")
        with (
            self.collection.database.client.start_session() as session,
            session.start_transaction(write_concern=WriteConcern("majority")),
        ):
            if not self.collection.delete_one(self.key, session=session).deleted_count:
                raise UsageError(f"the dead letter {self.message_id} is gone", hint="Somebody else has replayed it")
            yield session

    @property
    def event(self) -> Mapping[str, Any]:
        """The event, decoded. Raises UsageError if it was too large to be kept."""
        if not self.raw:
            raise UsageError(
                f"the event {self.message_id} was too large to be kept", hint="Read it from the oplog by its token"
            )
        return bson.decode(self.raw, _ANY_VALUE)

    @property
    def event_as_json(self) -> str:
        """The event as extended JSON (canonical); text that is not UTF-8 is escaped."""
        return dumps(bson.decode(self.raw, _TO_SHOW), json_options=CANONICAL_JSON_OPTIONS, ensure_ascii=False)

    @property
    def document_key(self) -> Mapping[str, Any] | None:
        """The changed document's key."""
        return self.event.get("documentKey")

    @property
    def full_document(self) -> Mapping[str, Any] | None:
        """``fullDocument`` of the event."""
        return self.event.get("fullDocument")

    def check(self) -> None:
        """There is no lease that could be lost."""


def _chosen(resource: str | None, change: str | None) -> dict[str, Any]:
    query: dict[str, Any] = {}
    if resource is not None:
        lane = {"_id.resource": {"$regex": f"^{re.escape(resource)}/[0-9]+$"}, "version": {"$gte": FIRST_LANE_TOKEN}}
        query["$or"] = [{"_id.resource": resource}, lane]
    if change is not None:
        query["_id.change"] = {"$gte": change, "$lt": change + "~"}  # ids are hex digits
    return query


def _reason(error: Exception) -> str:
    return redact_uri(str(error))[:_REASON_MAX] or type(error).__name__


def _shown(key: Any) -> str | None:
    return None if key is None else dumps(key, json_options=RELAXED_JSON_OPTIONS, ensure_ascii=False)[:_REASON_MAX]
