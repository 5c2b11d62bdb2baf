"""Effects in MongoDB, once for each change or message, when the positions are committed elsewhere."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Final, Protocol

from pymongo.client_session import ClientSession
from pymongo.collection import Collection
from pymongo.errors import DuplicateKeyError, OperationFailure
from pymongo.read_concern import ReadConcern
from pymongo.read_preferences import ReadPreference
from pymongo.write_concern import WriteConcern

from tailrace.act.consumer.rules.unrun import refuse_unrun
from tailrace.errors import UsageError

#: How long a mark is kept. A listener that was stopped between an effect and its commit begins again with that change.
_REMEMBERED_S: Final = 30 * 24 * 3600
_OTHER_OPTIONS: Final = frozenset({85, 86})
_MAJORITY: Final = WriteConcern("majority")


class _Identified(Protocol):
    @property
    def message_id(self) -> str: ...
    @property
    def version(self) -> int: ...


class SeenChanges:
    """A record of the changes whose effects are in a MongoDB deployment, which need not be the one that is watched or
    holds the leases.

    ``once(change, effect)`` runs ``effect(session)`` in a transaction of the target deployment that holds a mark for
    the change too: both or neither. A change that is already marked has no effect, whichever process brings it, and
    whatever was lost between the effect and the commit of its position. In place of a change or a dead letter it takes
    a message's id (the header ``tailrace-id`` of Kafka, ``id`` of Redis, ``Nats-Msg-Id``).

    Args:
        marks: a PyMongo collection of the target deployment; several names may share it
        name: whose effects these are: use a name of its own for each purpose
        seconds: how long a mark is kept, by an index: longer than a listener may be stopped, and than a broker may hold
            a message back

    If everything is in the deployment that holds the leases, ``change.transaction()`` does without marks.
    """

    def __init__(self, marks: Collection[Any], name: str, *, seconds: int = _REMEMBERED_S) -> None:
        if isinstance(seconds, bool) or not isinstance(seconds, int) or not 0 < seconds < 2**31:
            raise UsageError(f"seconds must be a whole number above 0, not {seconds!r}")
        self._marks = marks.with_options(write_concern=_MAJORITY, read_preference=ReadPreference.PRIMARY)
        self._name = name
        self._seconds = seconds
        self._has_index = False
        self._lock = threading.Lock()

    def once(self, change: _Identified | str, effect: Callable[[ClientSession], Any]) -> bool:
        """Carry out the effect of a change unless it was carried out before. Returns whether it was carried out now.
        ``effect`` writes with the session that it is given, and may run again if another writer gets in its way. What
        it raises ends the transaction and is raised."""
        self._ensure_index()
        identity = change if isinstance(change, str) else change.message_id
        mark: dict[str, Any] = {"_id": {"name": self._name, "change": identity}}
        if not isinstance(change, str):
            mark["version"] = change.version

        def run(session: ClientSession) -> bool:
            if self._marks.find_one({"_id": mark["_id"]}, {"_id": 1}, session=session) is not None:
                return False
            try:
                self._marks.insert_one({**mark, "at": datetime.now(UTC)}, session=session)
            except DuplicateKeyError:
                return False  # the transaction has ended: somebody else's is committed
            refuse_unrun(effect(session), "the effect")
            return True

        with self._marks.database.client.start_session() as session:
            return session.with_transaction(
                run, ReadConcern("snapshot"), write_concern=_MAJORITY, read_preference=ReadPreference.PRIMARY
            )

    def _ensure_index(self) -> None:
        with self._lock:
            if self._has_index:
                return
            try:
                self._marks.create_index("at", expireAfterSeconds=self._seconds)
            except OperationFailure as error:
                if error.code not in _OTHER_OPTIONS:
                    raise
                raise UsageError(
                    f"the marks in {self._marks.full_name} are kept for a different time than {self._seconds:,} s",
                    hint="Give all who share the collection the same seconds, or change the index with collMod",
                ) from None
            self._has_index = True
