"""Collections and indexes made on the target from what a source's catalogue holds, and which of them wait.

An index waits where it would be in the way of a copy that is newer in places than its beginning:

* A unique one is built when the target equals the source for the first time. Before, two documents may hold a value
  that the source gave to one after another.
* So is one that is to become unique (``prepareUnique``), which refuses the same writes.
* ``expireAfterSeconds`` is at its maximum until the cut-over: the source's expired documents are deleted by its own
  entries, and the target deletes none on its own.
* One that cannot be built yet, because a document came that the source had only after it dropped the index.

What waits is noted in the state before it is left out, so that no process forgets it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import bson
from bson.binary import Binary
from bson.codec_options import CodecOptions
from bson.int64 import Int64
from bson.raw_bson import RawBSONDocument
from pymongo import MongoClient
from pymongo.client_session import ClientSession
from pymongo.errors import NetworkTimeout, OperationFailure, PyMongoError

from tailrace.act.sync.catalog import (
    CLUSTERED,
    TTL_MAX,
    CatalogCollection,
    edited,
    name_of,
    number_of,
    options_for,
    replaced,
    truth_of,
    version_of,
)
from tailrace.act.sync.opening import open_database
from tailrace.act.sync.ownership import SyncOwnership
from tailrace.act.sync.shard_keys import supporting_index
from tailrace.act.sync.state import SyncState
from tailrace.act.sync.target import MAJORITY, REPLIES, answered, is_worth_again, sink_error
from tailrace.core import raw_bson
from tailrace.errors import SinkError
from tailrace.read.source.failure import Backoff

_RAW: Final[CodecOptions[RawBSONDocument]] = CodecOptions(
    document_class=RawBSONDocument, unicode_decode_error_handler="surrogateescape"
)
#: The target may be away for so long.
RETRY_SECONDS: Final = 120.0
_UNAUTHORIZED: Final = 13
_UUID_TAKEN: Final = 40655
_NAMESPACE_EXISTS: Final = 48
_DAY_S: Final = 86_400
_SIMPLE: Final = raw_bson.encode_element(raw_bson.OBJECT, b"collation", bson.encode({"locale": "simple"}))


# -- collections -----------------------------------------------------------------------------------------------------


def create(
    target: MongoClient[Any],
    collection: CatalogCollection,
    version: tuple[int, int],
    *,
    ownership: SyncOwnership | None = None,
) -> bytes:
    """Make a collection or view on the target, of a ``version``, under the namespace that it has in ``collection``. One
    of that name that is there must be the same: so a process that died after it made it goes on. Its own limit of age
    (``expireAfterSeconds`` of a clustered collection) is left out until the cut-over.

    ``ownership``  an owner that no longer is makes nothing

    Returns its UUID there: the source's where the user may give it (``applyOps`` with UUIDs). Raises SinkError where
    another one has the name.
    """
    database, _, name = collection.namespace.partition(".")
    options = edited(options_for(collection, version), [b"expireAfterSeconds"])
    command = raw_bson.encode_document(
        raw_bson.encode_element(raw_bson.STRING, b"create", raw_bson.encode_string(name)),
        options[4:-1],
        *(() if collection.id_index is None else (_element(b"idIndex", collection.id_index),)),
    )
    there = _there(target, database, name)
    if there is None:
        what = f"create {collection.namespace}"
        operation = {"ui": Binary(collection.uuid, 4), "o": RawBSONDocument(command, _RAW)}
        check = _check_of(ownership)
        drop_other = partial(_command, target, command=bson.encode({"dropDatabase": 1}), what=what, check=check)
        open_database(target, database, what, drop_other)
        kept = collection.kind == "collection" and _apply(target, database, operation, what, ownership)
        if not kept:
            # A command that is sent again, or one of a process that was killed, may have made it meanwhile.
            _command(target, database, command, what, check=check, done=_exists)
        there = _there(target, database, name)
    if there is None or raw_bson.bytes_of(there["options"]) != options:
        raise SinkError(
            f"the target's {collection.namespace} differs from the source's",
            hint="Drop it or rename it, or leave it out of the sync (--except)",
        )
    return bytes(there["info"].get("uuid", b""))


def shard(
    target: MongoClient[Any],
    collection: CatalogCollection,
    key: Mapping[str, Any],
    version: tuple[int, int],
    ownership: SyncOwnership,
) -> bytes:
    """Shard an empty collection of a target that is a cluster, by an index that the source has too. Returns its UUID.
    Raises SinkError."""
    database, _, name = collection.namespace.partition(".")
    supporting = supporting_index(collection, key)
    if supporting is not None:
        specs, collated = [supporting], collection.has_collation
        build(target, collection.namespace, specs, version, has_collation=collated, check=ownership.check)
    command = bson.encode({"shardCollection": collection.namespace, "key": dict(key)})
    _command(target, "admin", command, f"shard {collection.namespace}", check=ownership.check)
    there = _there(target, database, name)
    if there is None:
        raise SinkError(f"the target lost {collection.namespace} while it was being sharded")
    return bytes(there["info"].get("uuid", b""))


def drop(target: MongoClient[Any], namespace: str, *, ownership: SyncOwnership | None = None) -> None:
    """Drop a collection or view of the target, if it is there."""
    database, _, name = namespace.partition(".")
    there = _there(target, database, name)
    if there is None:
        return
    what, command = f"drop {namespace}", {"drop": name}
    uuid = there["info"].get("uuid")
    if uuid is not None:
        operation = {"ui": Binary(bytes(uuid), 4), "o": command}
        if _apply(target, database, operation, what, ownership):
            return
    _command(target, database, bson.encode(command), what, check=_check_of(ownership))


def _apply(
    target: MongoClient[Any], database: str, operation: Mapping[str, Any], what: str, ownership: SyncOwnership | None
) -> bool:
    """A command by the UUID of its collection, after the check of the owner's fence. Returns false where this user may
    not, and where another collection of the target has the UUID: that of another sync."""
    if ownership is not None and ownership.state.cluster is not None:
        return False  # a mongos takes no applyOps
    fence = () if ownership is None else (ownership.fence_operation(),)
    whole = {"op": "c", "ns": f"{database}.$cmd", **operation}
    judge = (lambda _: None) if ownership is None else ownership.judge
    try:
        _command(
            target, "admin", bson.encode({"applyOps": [*fence, whole]}), what, check=_check_of(ownership), judge=judge
        )
    except SinkError as error:
        if error.code not in (_UNAUTHORIZED, _UUID_TAKEN):
            raise
        return False
    return True


def _check_of(ownership: SyncOwnership | None) -> Callable[[], None]:
    return (lambda: None) if ownership is None else ownership.check


def _there(target: MongoClient[Any], database: str, name: str) -> RawBSONDocument | None:
    """What the target lists under a name."""
    command = {"listCollections": 1, "filter": {"name": name}}

    def ask() -> RawBSONDocument | None:
        with target.get_database(database, codec_options=_RAW).cursor_command(command, codec_options=_RAW) as cursor:
            return next(iter(cursor), None)

    return answered(f"list {database}.{name}", ask)


# -- indexes ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WaitingIndex:
    """An index that is not on the target yet as the source has it.

    ``uuid``   the source's collection, and ``namespace`` its name on the target
    ``spec``   the source's definition; of a clustered collection that expires, one of the name ``CLUSTERED``
    ``there``  whether it is on the target, with ``expireAfterSeconds`` at its maximum
    """

    uuid: bytes
    namespace: str
    spec: bytes
    there: bool

    @property
    def held(self) -> bytes | None:
        """The definition that the target has meanwhile; ``None``: none."""
        return held_spec(self.spec) if self.there else None


def waits(spec: bytes) -> bool:
    """Whether an index has to wait until the target equals the source for the first time."""
    return truth_of(spec, b"unique") or truth_of(spec, b"prepareUnique")


def expires(spec: bytes) -> bool:
    """Whether the server deletes documents by an index."""
    return raw_bson.find(spec, b"expireAfterSeconds") is not None


def clustered_limit(options: bytes) -> bytes | None:
    """What stands for the limit of age of a clustered collection among the indexes that wait; ``None``: it has none."""
    if raw_bson.find(options, b"clusteredIndex") is None:
        return None
    limit = raw_bson.find(options, b"expireAfterSeconds")
    if limit is None:
        return None
    name = raw_bson.encode_element(raw_bson.STRING, b"name", raw_bson.encode_string(CLUSTERED))
    return raw_bson.encode_document(name, options[limit.start : limit.end])


def held_spec(spec: bytes) -> bytes:
    """A definition under which nothing expires."""
    return replaced(spec, b"expireAfterSeconds", _seconds(TTL_MAX)) if expires(spec) else spec


def to_create(spec: bytes, *, has_collation: bool) -> bytes:
    """The definition to create an index by, so that it is listed as ``spec`` afterwards. An index without a collation
    on a collection that has one was made with the simple one, which the server does not list."""
    simple = has_collation and raw_bson.find(spec, b"collation") is None and number_of(spec, b"v") != 1
    return edited(spec, added=[_SIMPLE]) if simple else spec


def build(
    target: MongoClient[Any],
    namespace: str,
    specs: Sequence[bytes],
    version: tuple[int, int],
    *,
    has_collation: bool,
    hold: bool = True,
    check: Callable[[], None] = lambda: None,
) -> None:
    """Build indexes, all in one pass over the documents, and wait for them. One that is there already, as it should be,
    is left. ``hold``: nothing expires by them yet. Raises SinkError with the server's code."""
    database, _, name = namespace.partition(".")
    if not specs:
        return
    held = _held_already(target, database, name) if hold else frozenset()
    wanted, raised = [], []
    for spec in specs:
        made = to_create(spec, has_collation=has_collation)
        if hold and expires(spec):
            if name_of(spec) in held:
                continue
            made = held_spec(made)
            if version < (6, 0):  # which takes the maximum by collMod alone
                made = replaced(made, b"expireAfterSeconds", _seconds(int(time.time()) - _DAY_S))
                raised.append(name_of(spec))
        wanted.append(RawBSONDocument(made, _RAW))
    if wanted:
        command = bson.encode({"createIndexes": name, "indexes": wanted})
        _command(target, database, command, f"build indexes of {namespace}", check=check)
    for one in raised:
        set_expiry(target, namespace, one, TTL_MAX, check=check)


def build_early(
    target: MongoClient[Any],
    collection: CatalogCollection,
    version: tuple[int, int],
    *,
    check: Callable[[], None] = lambda: None,
) -> None:
    """Before 6.0 an index is made with a limit of age that is not the highest, which it gets a moment later: so it is
    made while the collection is empty."""
    early = [spec for spec in collection.indexes if expires(spec) and not waits(spec)]
    if version < (6, 0) and early:
        collated = collection.has_collation
        build(target, collection.namespace, early, version, has_collation=collated, check=check)


def set_expiry(
    target: MongoClient[Any],
    namespace: str,
    index: str,
    seconds: int,
    *,
    check: Callable[[], None] = lambda: None,
) -> None:
    """Alter an index's ``expireAfterSeconds``."""
    database, _, name = namespace.partition(".")
    command = {"collMod": name, "index": {"name": index, "expireAfterSeconds": seconds}}
    _command(target, database, bson.encode(command), f"alter the index {index} of {namespace}", check=check)


def _held_already(target: MongoClient[Any], database: str, name: str) -> frozenset[str]:
    """The indexes whose ``expireAfterSeconds`` is at its maximum: made by a process that died meanwhile."""
    there = target.get_database(database, codec_options=_RAW)

    def ask() -> frozenset[str]:
        with there.cursor_command({"listIndexes": name}, codec_options=_RAW) as cursor:
            return frozenset(str(one["name"]) for one in cursor if one.get("expireAfterSeconds") == TTL_MAX)

    return answered(f"list the indexes of {database}.{name}", ask)


def _seconds(seconds: int) -> bytes:
    return raw_bson.encode_element(raw_bson.INT32, b"expireAfterSeconds", raw_bson.encode_int32(seconds))


def _element(name: bytes, document: bytes) -> bytes:
    return raw_bson.encode_element(raw_bson.OBJECT, name, document)


def _command(
    target: MongoClient[Any],
    database: str,
    command: bytes,
    what: str,
    *,
    check: Callable[[], None],
    judge: Callable[[PyMongoError], None] = lambda _: None,
    done: Callable[[PyMongoError], bool] = lambda _: False,
) -> None:
    """Run a command that may be run twice, until a majority has it. One that outlives the connection's time-out is sent
    again, and waits for the first; one that an election interrupts is sent again too. ``done``: whether an error says
    that what was sent first has done it."""
    backoff = Backoff(give_up_s=RETRY_SECONDS)
    # PyMongo adds fields of its own on the top level; what lies deeper goes as it is.
    whole = {**RawBSONDocument(command, _RAW), "writeConcern": MAJORITY.document}
    while True:
        check()
        try:
            target.get_database(database).command(dict(whole), codec_options=REPLIES)
        except NetworkTimeout:
            continue
        except PyMongoError as error:
            judge(error)
            if done(error):
                return
            if not is_worth_again(error) or backoff.exhausted:
                raise sink_error(what, error) from None
            backoff.wait()
        else:
            return


def _exists(error: PyMongoError) -> bool:
    return isinstance(error, OperationFailure) and error.code == _NAMESPACE_EXISTS


# -- what waits, in the state -----------------------------------------------------------------------------------------


def noted(spec: bytes, *, there: bool) -> dict[str, Any]:
    """What the state keeps of an index that waits (``WaitingIndex``)."""
    return {"spec": Binary(spec), "there": there}


def waiting(state: SyncState) -> list[WaitingIndex]:
    """What waits, under the names that the collections have on the target now."""
    collections = state.collections()
    found = []
    for one in state.indexes():
        uuid = bytes(one["_id"]["uuid"])
        if uuid in collections:
            found.append(WaitingIndex(uuid, collections[uuid].target, bytes(one["spec"]), bool(one["there"])))
    return found


def build_waiting(state: SyncState, ownership: SyncOwnership) -> None:
    """Build what waits for the target to equal the source for the first time: now it does. Raises SinkError."""
    target = state.client
    version = version_of(state.deployment)
    by_collection: dict[tuple[bytes, str], list[bytes]] = {}
    for one in waiting(state):
        if not one.there:
            by_collection.setdefault((one.uuid, one.namespace), []).append(one.spec)
    for (uuid, namespace), specs in by_collection.items():
        database, _, name = namespace.partition(".")
        there = _there(target, database, name)
        if there is None:
            continue
        collated = "collation" in there["options"]
        build(target, namespace, specs, version, has_collation=collated, check=ownership.check)
        ownership.run(partial(_settle, state, uuid, specs), what="note the indexes that were built")


def _settle(state: SyncState, uuid: bytes, specs: Sequence[bytes], session: ClientSession) -> None:
    for spec in specs:
        if expires(spec):
            state.note_index(uuid, name_of(spec), noted(spec, there=True), session)
        else:
            state.forget_index(uuid, name_of(spec), session)


def restore_held(state: SyncState, ownership: SyncOwnership) -> list[str]:
    """Give back the limits of age that were held: at the cut-over. Returns which."""
    restored = []
    for one in waiting(state):
        if not one.there:
            continue
        seconds = number_of(one.spec, b"expireAfterSeconds")
        name = name_of(one.spec)
        if name == CLUSTERED:
            database, _, collection = one.namespace.partition(".")
            command = bson.encode({"collMod": collection, "expireAfterSeconds": Int64(int(seconds or 0))})
            _command(state.client, database, command, f"alter {one.namespace}", check=ownership.check)
        else:
            set_expiry(state.client, one.namespace, name, int(seconds or 0), check=ownership.check)
        ownership.run(partial(_forget, state, one.uuid, name), what="note the indexes that expire again")
        restored.append(f"{one.namespace}: {name}")
    return restored


def _forget(state: SyncState, uuid: bytes, name: str, session: ClientSession) -> None:
    state.forget_index(uuid, name, session)
