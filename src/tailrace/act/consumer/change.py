"""One change in a handler's hands."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

import bson
from bson.codec_options import DEFAULT_CODEC_OPTIONS, CodecOptions
from bson.raw_bson import RawBSONDocument
from pymongo.client_session import ClientSession

from tailrace.act.consumer.copied import CopiedDocument
from tailrace.act.consumer.fence import FENCE_FIELD, Fence
from tailrace.act.consumer.lease import LeaseStore
from tailrace.act.consumer.rules.errors import HandlerForked, LeaseLost
from tailrace.act.consumer.rules.ownership import Ownership
from tailrace.act.consumer.rules.position import StreamPosition
from tailrace.core import raw_bson
from tailrace.core.event.resume_token import ResumeToken
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.errors import UsageError


class Hands:
    """What changes of one ownership share: the lease, the store, and the process that may use them.

    ``fence_resource`` and ``fence_field`` say where targets carry the token of this lease.
    """

    def __init__(
        self,
        ownership: Ownership,
        store: LeaseStore,
        lease_seconds: float,
        *,
        fence_field: str = FENCE_FIELD,
        fence_resource: str | None = None,
        fence_above: Mapping[str, int] | None = None,
        codec_options: CodecOptions[Any] = DEFAULT_CODEC_OPTIONS,
        is_stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        self.ownership = ownership
        self.lease = ownership.lease
        self.store = store
        self.lease_seconds = lease_seconds
        self.codec_options = codec_options
        self.is_stopping = is_stopping
        lease = self.lease
        self.fence = Fence(
            fence_resource or lease.resource,
            lease.version,
            field=fence_field,
            check=self.check,
            above=fence_above or {},
        )
        self._process = os.getpid()

    def check(self) -> None:
        """Raises LeaseLost where the lease is known to be lost, HandlerForked in a child of the listener's process."""
        if os.getpid() != self._process:
            raise HandlerForked(
                "a child process uses a change of the listener that its parent runs",
                hint="Give the child what it needs as data, and end it with os._exit(); or start it with subprocess",
            )
        self.ownership.check(time.monotonic())


class Change:
    """A change event, the fencing token that it is handled under, and the means to write safely.

    Events are decoded when they are first read. A change is valid for as long as its handler runs.
    """

    __slots__ = ("_again", "_committed", "_event", "_hands", "_position", "_raw")

    def __init__(
        self, raw: RawBSONDocument | CopiedDocument, position: StreamPosition, hands: Hands, again: int = 0
    ) -> None:
        self._raw = raw
        self._again = again
        self._position = position
        self._hands = hands
        self._event: Mapping[str, Any] | None = None
        self._committed = False

    def __repr__(self) -> str:
        return f"Change({self.operation_type} at {self.cluster_time})"

    @property
    def raw(self) -> bytes:
        """The event's exact BSON."""
        return self._raw.raw if isinstance(self._raw, CopiedDocument) else raw_bson.bytes_of(self._raw)

    @property
    def event(self) -> Mapping[str, Any]:
        """The event as a document, decoded by the codec options of what is watched."""
        if self._event is None:
            self._event = bson.decode(self.raw, codec_options=self._hands.codec_options)
        return self._event

    @property
    def token(self) -> Mapping[str, Any]:
        """The resume token. On a cluster, changes that several shards log at one time, such as a drop, may share a
        token."""
        # The second: of a snapshot's event.
        return self._position.token or bson.decode(raw_bson.bytes_of(self._raw["_id"]))

    @property
    def message_id(self) -> str:
        """Names this change and no other; it is the same whenever and by whichever process it is handled. It is the
        token's ``_data``, followed by ``-1``, ``-2``, ... where changes directly before this one have the same
        token."""
        data = str(self.token["_data"])
        return f"{data}-{self._again}" if self._again else data

    @property
    def cluster_time(self) -> ClusterTime:
        """When the change took place, by the cluster's clock."""
        return ResumeToken.parse(self.token).cluster_time

    @property
    def time(self) -> datetime:
        """``cluster_time`` to the second, UTC."""
        return datetime.fromtimestamp(self.cluster_time.seconds, UTC)

    @property
    def operation_type(self) -> str:
        """``insert``, ``update``, ``replace``, ``delete``, ``invalidate``, ...; empty where a pipeline removed it."""
        return str(self._raw.get("operationType", ""))

    @property
    def document_key(self) -> Mapping[str, Any] | None:
        """The changed document's key; ``None`` where no single document was changed."""
        return self.event.get("documentKey")

    @property
    def full_document(self) -> Mapping[str, Any] | None:
        """``fullDocument``; ``None`` where the event has none."""
        return self.event.get("fullDocument")

    @property
    def namespace(self) -> str | None:
        """``database.collection``, or only the database where a whole database was dropped; ``None`` for an
        invalidate."""
        namespace = self._raw.get("ns")
        if namespace is None:
            return None
        return ".".join(namespace[name] for name in ("db", "coll") if name in namespace)

    @property
    def version(self) -> int:
        """The fencing token: pass it to every system that has side effects, and let that system refuse older tokens."""
        return self._hands.lease.version

    @property
    def resource(self) -> str:
        """The resource whose lease has ``version``."""
        return self._hands.lease.resource

    @property
    def fence(self) -> Fence:
        """Writes to MongoDB that a newer owner's writes shut out."""
        return self._hands.fence

    def check(self) -> None:
        """Raises LeaseLost if the lease is known to be lost by now: worth a call before a step that takes long or
        cannot be undone."""
        self._hands.check()

    @property
    def is_stopping(self) -> bool:
        """Whether the listener was asked to end: a handler that waits for something should not wait much longer."""
        return self._hands.is_stopping()

    @property
    def is_committed(self) -> bool:
        """Whether the position after this change was committed in its own transaction."""
        return self._committed

    @contextmanager
    def transaction(self) -> Iterator[ClientSession]:
        """``with change.transaction() as session:`` either both what is written with ``session`` and the commit of this
        change's position take effect, or neither: exactly once. Targets are collections of ``session.client``, which is
        the store's: PyMongo takes a session only with the client that began it.

        While the transaction runs, nobody can take the lease; the server ends it after 60 s unless configured
        otherwise. An error inside aborts it, and is passed to the error policy; a transient one makes the handler run
        again.
        """
        hands = self._hands
        ownership = hands.ownership
        self._begin_transaction()
        started = time.monotonic()
        try:
            with hands.store.transaction(hands.lease, self._position.to_document(), hands.lease_seconds) as session:
                yield session
            self._end_transaction(started)
        except LeaseLost as error:
            ownership.lose(error)
            raise
        finally:
            ownership.in_transaction = False

    def _begin_transaction(self) -> None:
        if self._committed:
            raise UsageError("the change was committed already", hint="Use one transaction for each change")
        self._hands.check()
        self._hands.ownership.in_transaction = True

    def _end_transaction(self, started: float) -> None:
        self._committed = True
        self._hands.ownership.extend(started + self._hands.lease_seconds)


def copied_document(change: Change) -> CopiedDocument | None:
    """What a copy gives, for a caller that needs no event around it; ``None`` for a change of the stream, or where the
    stages of a pipeline were applied."""
    raw = getattr(change, "_raw", None)  # a dead letter that is replayed has none
    return raw if isinstance(raw, CopiedDocument) else None
