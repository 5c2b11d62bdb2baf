"""Collections and indexes made on the target from what a source's catalogue holds, and what of them waits.

An index waits where it would be in the way of a copy that is newer in places than its beginning:

* A unique one is built when the target equals the source for the first time. Before, two documents may hold a value
  that the source gave to one after the other.
* So is one that is to become unique (``prepareUnique``), which refuses the same writes.
* ``expireAfterSeconds`` stands at its maximum until the cut-over: the source's expired documents are deleted by its own
  entries, and the target deletes none by itself.
* One that cannot be built yet, because a document came that the source had only after it dropped the index.

What waits is noted in the state before it is left out, so that no process forgets it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import bson
from bson.binary import Binary
from bson.codec_options import CodecOptions
from bson.raw_bson import RawBSONDocument
from pymongo import MongoClient
from pymongo.errors import NetworkTimeout, OperationFailure, PyMongoError

from tailrace.act.sync.catalog import (
    TTL_MAX,
    CatalogCollection,
    edited,
    name_of,
    number_of,
    options_for,
    replaced,
    truth_of,
)
from tailrace.core import raw_bson
from tailrace.errors import SinkError
from tailrace.read.source.failure import source_error

_RAW: Final[CodecOptions[RawBSONDocument]] = CodecOptions(
    document_class=RawBSONDocument, unicode_decode_error_handler="surrogateescape"
)
_UNAUTHORIZED: Final = 13
_DAY_S: Final = 86_400
_SIMPLE: Final = raw_bson.encode_element(raw_bson.OBJECT, b"collation", bson.encode({"locale": "simple"}))


# -- collections ------------------------------------------------------------------------------------------------------


def create(
    target: MongoClient[Any], collection: CatalogCollection, version: tuple[int, int], *, keep_uuid: bool = True
) -> bool:
    """Make a collection or view on the target, of a ``version``, under the namespace that it has in ``collection``. One
    of that name that is there must be the same: so a process that died after it made it goes on. Its own limit of age
    (``expireAfterSeconds`` of a clustered collection) is left out until the cut-over.

    Returns whether it has the source's UUID, which takes the right to ``applyOps`` with UUIDs; without that right the
    server gives it a new one. Raises SinkError where another one has the name.
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
        kept = keep_uuid and collection.kind == "collection" and _create_as(target, collection, command)
        if not kept:
            _command(target, database, command, f"create {collection.namespace}")
        there = _there(target, database, name)
    if there is None or raw_bson.bytes_of(there["options"]) != options:
        raise SinkError(
            f"the target has another {collection.namespace} than the source",
            hint="Drop it or rename it, or leave it out of the sync (--except)",
        )
    return bool(collection.uuid) and bytes(there["info"].get("uuid", b"")) == collection.uuid


def _create_as(target: MongoClient[Any], collection: CatalogCollection, command: bytes) -> bool:
    """Make a collection with the source's UUID. Returns false where this user may not."""
    database = collection.namespace.partition(".")[0]
    operation = {
        "op": "c",
        "ns": f"{database}.$cmd",
        "ui": Binary(collection.uuid, 4),
        "o": RawBSONDocument(command, _RAW),
    }
    try:
        target.admin.command({"applyOps": [operation]})
    except OperationFailure as error:
        if error.code == _UNAUTHORIZED:
            return False
        raise sink_error(error, target, f"create {collection.namespace}") from None
    return True


def _there(target: MongoClient[Any], database: str, name: str) -> RawBSONDocument | None:
    """What the target lists under a name."""
    command = {"listCollections": 1, "filter": {"name": name}}
    try:
        with target.get_database(database, codec_options=_RAW).cursor_command(command, codec_options=_RAW) as cursor:
            return next(iter(cursor), None)
    except PyMongoError as error:
        raise sink_error(error, target, f"list {database}.{name}") from None


# -- indexes ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WaitingIndex:
    """An index that is not on the target yet as the source has it.

    ``spec``   the source's definition
    ``there``  whether it is on the target, with ``expireAfterSeconds`` at its maximum
    """

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
        _command(target, database, command, f"build indexes of {namespace}")
    for one in raised:
        set_expiry(target, namespace, one, TTL_MAX)


def set_expiry(target: MongoClient[Any], namespace: str, index: str, seconds: int) -> None:
    """Alter an index's ``expireAfterSeconds``."""
    database, _, name = namespace.partition(".")
    command = {"collMod": name, "index": {"name": index, "expireAfterSeconds": seconds}}
    _command(target, database, bson.encode(command), f"alter the index {index} of {namespace}")


def _held_already(target: MongoClient[Any], database: str, name: str) -> frozenset[str]:
    """The indexes whose ``expireAfterSeconds`` is at its maximum: made by a process that died meanwhile."""
    there = target.get_database(database, codec_options=_RAW)
    try:
        with there.cursor_command({"listIndexes": name}, codec_options=_RAW) as cursor:
            return frozenset(str(one["name"]) for one in cursor if one.get("expireAfterSeconds") == TTL_MAX)
    except PyMongoError as error:
        raise sink_error(error, target, f"list the indexes of {database}.{name}") from None


def _seconds(seconds: int) -> bytes:
    return raw_bson.encode_element(raw_bson.INT32, b"expireAfterSeconds", raw_bson.encode_int32(seconds))


def _element(name: bytes, document: bytes) -> bytes:
    return raw_bson.encode_element(raw_bson.OBJECT, name, document)


def _command(target: MongoClient[Any], database: str, command: bytes, what: str) -> None:
    """Run a command that may be run twice, and take as long as it needs: one that outlives the connection's time-out
    is sent again, and waits for the first."""
    while True:
        try:
            # PyMongo adds fields of its own on the top level; what lies deeper goes as it is.
            target.get_database(database).command(dict(RawBSONDocument(command, _RAW)))
        except NetworkTimeout:
            continue
        except PyMongoError as error:
            raise sink_error(error, target, what) from None
        return


def sink_error(error: PyMongoError, target: MongoClient[Any], what: str) -> SinkError:
    """The one sentence for an error of the target's, with the server's code and labels."""
    found = source_error(error, target)
    hint = found.hint
    if found.code == _UNAUTHORIZED:
        hint = "Grant the target's user the role restore, and readWrite on the state's database"
    return SinkError(f"the target did not {what}: {found.message}", code=found.code, labels=found.labels, hint=hint)
