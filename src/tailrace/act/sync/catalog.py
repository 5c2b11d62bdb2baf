"""The catalogue of a deployment: its collections, views and indexes, as the bytes that the server lists; and how two
of them differ.

What a newer server changes on its own was measured (4.4.2, 5.0.4, 6.0.27 and 7.0.28 among one another, every kind of
collection and of index) and is described in docs/design/sync.md. Two catalogues are compared modulo exactly that:

* 4.4 lists the fields of an index in another order at times, so its order counts for nothing there. The order of the
  key does count, everywhere.
* ``collMod`` of 4.4 makes ``expireAfterSeconds`` a long whole number, whatever it was. A sync to 4.4 holds and restores
  the limits of age by it, so there only the number counts, without what follows its point, as for the server.
* From 5.0 on, ``unique``, ``sparse``, ``background`` and ``hidden`` of an index are true or false,
  ``expireAfterSeconds`` is a whole number, and ``min`` and ``max`` of a 2d index are doubles, whatever they were given
  as. 4.4 keeps them.
* 7.0 no longer knows ``recordPreImages``.

``temp`` is left out too: what is temporary on the source is an ordinary collection on the target.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Literal, Protocol

import bson
from bson.binary import Binary
from bson.codec_options import CodecOptions, DatetimeConversion
from bson.json_util import RELAXED_JSON_OPTIONS, dumps
from pymongo import MongoClient

from tailrace.act.sync.settings import SyncSettings
from tailrace.core import raw_bson
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.oplog.entry import OplogEntry, apply_ops, parse_entry, parse_operation
from tailrace.core.oplog.namespace import Scope
from tailrace.errors import SourceError
from tailrace.read.snapshot.places import Places
from tailrace.read.snapshot.reader import places_of
from tailrace.read.source.connection import RETRY_SECONDS, Connection
from tailrace.read.source.listing import INTERNAL_DATABASES, check_name, database_names, readable
from tailrace.read.source.mongod import MongodSource
from tailrace.read.source.topology import Cluster
from tailrace.read.source.witness import oplogs_of

Kind = Literal["collection", "view", "timeseries"]

#: NamespaceNotFound, CommandNotSupportedOnView.
_GONE: Final = frozenset({26, 166})
_ID: Final = b"_id"
#: Stands for the limit of age of a clustered collection among the indexes that are held.
CLUSTERED: Final = "$clustered"
#: What an index's ``expireAfterSeconds`` can be at most. Nothing expires under it.
TTL_MAX: Final = 2**31 - 1

_ANY_VALUE: Final[CodecOptions[dict[str, Any]]] = CodecOptions(
    datetime_conversion=DatetimeConversion.DATETIME_AUTO, unicode_decode_error_handler="surrogateescape"
)
_SHOWN_MAX: Final = 400
_FLAGS: Final = frozenset({b"unique", b"sparse", b"background", b"hidden", b"prepareUnique"})


class Chosen(Protocol):
    """Which collections and views are read: a ``Selection``, or what leaves out some of one."""

    def has(self, namespace: str) -> bool:
        """Whether a collection or view is chosen."""

    @property
    def databases(self) -> tuple[str, ...] | None:
        """The databases that they are in; ``None``: all that there are."""


class OnSource:
    """What of the source a sync copies. Its own state, where the source was a target once, never is."""

    def __init__(self, settings: SyncSettings) -> None:
        self._settings = settings

    def has(self, namespace: str) -> bool:
        """See ``Chosen``."""
        return self._settings.has(namespace) and namespace.partition(".")[0] != self._settings.state_db

    @property
    def databases(self) -> tuple[str, ...] | None:
        """See ``Chosen``."""
        return self._settings.selection.databases

    def may_cover(self, database: str) -> bool:
        """Whether some collection of a database may be chosen."""
        return self._settings.selection.may_cover(database) and database != self._settings.state_db


class OnTarget:
    """What of the target a sync is answerable for: the names that the source's collections have there."""

    def __init__(self, settings: SyncSettings) -> None:
        self._settings = settings
        self._source = OnSource(settings)
        self._before = {after: before for before, after in settings.renames.items()}

    def has(self, namespace: str) -> bool:
        """See ``Chosen``."""
        database, _, name = namespace.partition(".")
        candidates = [
            namespace,
            self._before.get(namespace, namespace),
            f"{self._before.get(database, database)}.{name}",
        ]
        return any(self._source.has(one) and self._settings.target_of(one) == namespace for one in candidates)

    @property
    def databases(self) -> tuple[str, ...] | None:
        """See ``Chosen``."""
        found = self._source.databases
        if found is None:
            return None
        renamed = [after.partition(".")[0] for after in self._settings.renames.values()]
        return tuple(sorted({*found, *renamed}))


@dataclass(frozen=True, slots=True)
class CatalogCollection:
    """One collection, view or time series. Everything in bytes is BSON as the server lists it.

    ``uuid``      16 bytes; empty for views and time series
    ``id_index``  the definition of the index of ``_id``; ``None`` for views, time series and clustered collections
    ``indexes``   the other indexes that are there, in the server's order
    ``building``  those that were being built: their end is in the oplog
    """

    namespace: str
    kind: Kind
    uuid: bytes
    options: bytes
    id_index: bytes | None = None
    indexes: tuple[bytes, ...] = ()
    building: tuple[bytes, ...] = ()

    @property
    def is_capped(self) -> bool:
        """Whether the server removes its oldest documents."""
        return truth_of(self.options, b"capped")

    @property
    def is_clustered(self) -> bool:
        """Whether the documents lie in the order of ``_id``, without an index of their own for it."""
        return raw_bson.find(self.options, b"clusteredIndex") is not None

    @property
    def is_encrypted(self) -> bool:
        """Whether it is one of Queryable Encryption."""
        return raw_bson.find(self.options, b"encryptedFields") is not None

    @property
    def has_collation(self) -> bool:
        """Whether it has a default collation that is not the simple one."""
        return raw_bson.find(self.options, b"collation") is not None


@dataclass(frozen=True, slots=True)
class DeploymentCatalog:
    """What a deployment of a ``version`` held, by namespace."""

    version: tuple[int, int]
    collections: Mapping[str, CatalogCollection] = field(default_factory=dict)

    def renamed(self, name_of: Callable[[str], str]) -> DeploymentCatalog:
        """The same under other names: those of the target."""
        moved = {}
        for namespace, one in self.collections.items():
            name = name_of(namespace)
            moved[name] = CatalogCollection(
                name, one.kind, one.uuid, one.options, one.id_index, one.indexes, one.building
            )
        return DeploymentCatalog(self.version, moved)


@dataclass(frozen=True, slots=True)
class CatalogDifference:
    """Where two catalogues differ.

    ``what``    "missing", "extra", "kind", "options", or "index NAME"
    ``source``  what the source has, as JSON; ``target`` as well; empty where there is none
    """

    namespace: str
    what: str
    source: str = ""
    target: str = ""

    def __str__(self) -> str:
        if self.what in ("missing", "extra"):
            where = "only the source" if self.what == "missing" else "only the target"
            return f"{self.namespace}: {where} has it"
        source, target = self.source or "nothing", self.target or "nothing"
        return f"{self.namespace}: {self.what}: {source} at the source, {target} at the target"


def read_catalog(deployment: MongoClient[Any] | Cluster, selection: Chosen) -> DeploymentCatalog:
    """The catalogue as it is now, of the chosen collections and views. What changes while it is read may be in it or
    not: ``at_rest`` is for callers that need it as of one time. The server's own collections, those that it makes for
    time series and for its work in hand, and databases that no driver can name are left out."""
    if isinstance(deployment, Cluster):
        return _of_cluster(deployment, selection)
    connection = Connection(deployment, retry_seconds=RETRY_SECONDS)
    connection.wait_for_hello()
    names = readable(database_names(connection) if selection.databases is None else selection.databases, str)
    found = (one for name in names for one in _listed(connection, name, selection, {}))
    return DeploymentCatalog(version_of(deployment), {one.namespace: one for one in found})


def _of_cluster(cluster: Cluster, selection: Chosen) -> DeploymentCatalog:
    """What is not sharded from each database's primary shard, a sharded collection from the shards that own some of
    it: an index counts where all of them have it."""
    databases = cluster.config_collection("databases")
    config = Connection(cluster.config_client(), retry_seconds=RETRY_SECONDS)
    known = config.retrying(lambda: {str(one["_id"]) for one in databases.find({}, {"_id": 1})})
    collections: dict[str, CatalogCollection] = {}
    places = places_of(cluster, RETRY_SECONDS)
    sharded = _sharded_by_database(places)
    wanted = known if selection.databases is None else known & set(selection.databases)
    for name in readable(sorted(wanted - INTERNAL_DATABASES), str):
        owned, primary = sharded.get(name, {}), cluster.primary_client(name)
        if primary is None:
            continue  # it was dropped meanwhile
        for one in _listed(_connected(primary), name, selection, {}):
            if one.namespace not in owned:
                collections[one.namespace] = one
        for namespace, uuid in owned.items():
            whole = _of_owners(places, selection, namespace, uuid) if selection.has(namespace) else None
            if whole is not None:
                collections[namespace] = whole
    return DeploymentCatalog(version_of(cluster), dict(sorted(collections.items())))


def _sharded_by_database(places: Places) -> dict[str, dict[str, bytes]]:
    found: dict[str, dict[str, bytes]] = {}
    for one in places.collections(Scope.cluster()):
        placement = places.placement(one.uuid, one.namespace.partition(".")[0])
        if placement is not None and placement.chunks is not None:
            found.setdefault(one.namespace.partition(".")[0], {})[one.namespace] = one.uuid
    return found


def _of_owners(places: Places, selection: Chosen, namespace: str, uuid: bytes) -> CatalogCollection | None:
    """A sharded collection as its owners have it; ``None`` where it is gone."""
    database = namespace.partition(".")[0]
    placement = places.placement(uuid, database)
    if placement is None:
        return None
    query = {"info.uuid": Binary(uuid, 4)}
    found = []
    for client in placement.members.values():
        found += list(_listed(_connected(client), database, selection, query))
    if not found:
        return None
    everywhere = set.intersection(*({name_of(spec) for spec in one.indexes} for one in found))
    first = found[0]
    indexes = tuple(spec for spec in first.indexes if name_of(spec) in everywhere)
    return CatalogCollection(namespace, first.kind, uuid, first.options, first.id_index, indexes, first.building)


def _connected(client: MongoClient[Any]) -> Connection:
    connection = Connection(client, retry_seconds=RETRY_SECONDS)
    connection.wait_for_hello()
    return connection


def _listed(
    connection: Connection, database: str, selection: Chosen, query: Mapping[str, Any]
) -> Iterator[CatalogCollection]:
    """The chosen collections and views of a database of one replica set."""
    check_name(database)
    command = {"listCollections": 1, "filter": dict(query)}
    listed = connection.retrying(partial(_cursor, connection, database, command))
    named = {f"{database}.{_text(one, b'name')}": one for one in listed}
    for namespace in sorted(readable(named, str)):
        if not selection.has(namespace):
            continue
        one = named[namespace]
        kind = _text(one, b"type") or "collection"
        options = _document(one, b"options") or raw_bson.EMPTY_DOCUMENT
        if kind == "collection":
            uuid = _uuid(_document(one, b"info") or raw_bson.EMPTY_DOCUMENT)
            whole = _with_indexes(connection, database, namespace, uuid, options)
            if whole is not None:
                yield whole
        else:
            yield CatalogCollection(namespace, "view" if kind == "view" else "timeseries", b"", options)


def _with_indexes(
    connection: Connection, database: str, namespace: str, uuid: bytes, options: bytes
) -> CatalogCollection | None:
    """A collection with its indexes; ``None`` where it is gone, or a view has its name."""
    command = {"listIndexes": namespace.partition(".")[2], "includeBuildUUIDs": True}
    try:
        listed = connection.retrying(partial(_cursor, connection, database, command))
    except SourceError as error:
        if error.code not in _GONE:
            raise
        return None
    id_index: bytes | None = None
    indexes, building = [], []
    for one in listed:
        spec = _document(one, b"spec")
        if spec is not None:
            building.append(spec)
        elif truth_of(one, b"clustered"):
            continue  # no index: where the documents lie, as the collection's options say
        elif _is_of_id(one):
            id_index = one
        else:
            indexes.append(one)
    return CatalogCollection(namespace, "collection", uuid, options, id_index, tuple(indexes), tuple(building))


def _cursor(connection: Connection, database: str, command: Mapping[str, Any]) -> list[bytes]:
    with connection.raw_cursor(database, command) as cursor:
        return [raw_bson.bytes_of(one) for one in cursor]


def version_of(deployment: MongoClient[Any] | Cluster) -> tuple[int, int]:
    """Major and minor version of the servers, of a cluster's lowest shard."""
    if isinstance(deployment, Cluster):
        clients = [deployment.client(one.name) for one in deployment.shards()]
        return min((version_of(client) for client in clients), default=(0, 0))
    connection = Connection(deployment, retry_seconds=RETRY_SECONDS)
    numbers = connection.retrying(deployment.server_info)["versionArray"]
    return int(numbers[0]), int(numbers[1])


# -- the parts of a definition ----------------------------------------------------------------------------------------


def name_of(spec: bytes) -> str:
    """The name of an index."""
    return _text(spec, b"name")


def truth_of(document: bytes, name: bytes) -> bool:
    """Whether a field holds what the server takes for true; false where it is not there."""
    element = raw_bson.find(document, name)
    if element is None or element.type in (raw_bson.NULL, raw_bson.UNDEFINED):
        return False
    if element.type in (raw_bson.BOOL, raw_bson.INT32, raw_bson.INT64):
        return any(raw_bson.value(document, element))
    if element.type == raw_bson.DOUBLE:
        return bool(struct.unpack("<d", raw_bson.value(document, element))[0] != 0)
    return True


def number_of(document: bytes, name: bytes) -> float | None:
    """A field's number, whatever type it has; ``None`` where there is none."""
    element = raw_bson.find(document, name)
    if element is None:
        return None
    found = _decoded(document).get(name.decode())
    try:
        return float(str(found)) if found is not None else None
    except ValueError:
        return None


def edited(document: bytes, without: Iterable[bytes] = (), added: Iterable[bytes] = ()) -> bytes:
    """A document without the fields of some names, and with further elements at its end."""
    gone = frozenset(without)
    kept = [document[one.start : one.end] for one in raw_bson.elements(document) if one.name not in gone]
    return raw_bson.encode_document(*kept, *added)


def replaced(document: bytes, name: bytes, element: bytes) -> bytes:
    """A document with another element in the place of a field."""
    return raw_bson.encode_document(
        *(element if one.name == name else document[one.start : one.end] for one in raw_bson.elements(document))
    )


def shown(document: bytes) -> str:
    """A definition for people."""
    text = dumps(_decoded(document), json_options=RELAXED_JSON_OPTIONS, ensure_ascii=False)
    return text if len(text) <= _SHOWN_MAX else f"{text[:_SHOWN_MAX]}..."


def _decoded(document: bytes) -> dict[str, Any]:
    return bson.decode(document, _ANY_VALUE)


def _text(document: bytes, name: bytes) -> str:
    element = raw_bson.find(document, name)
    if element is None or element.type != raw_bson.STRING:
        return ""
    return raw_bson.read_string(document, element.value_start).decode("utf-8", "surrogateescape")


def _document(document: bytes, name: bytes) -> bytes | None:
    element = raw_bson.find(document, name)
    return None if element is None or element.type != raw_bson.OBJECT else raw_bson.value(document, element)


def _uuid(info: bytes) -> bytes:
    element = raw_bson.find(info, b"uuid")
    return b"" if element is None else raw_bson.value(info, element)[5:]


def _is_of_id(spec: bytes) -> bool:
    key = _document(spec, b"key")
    if key is None or name_of(spec) != "_id_":
        return False
    return [one.name for one in raw_bson.elements(key)] == [_ID]


# -- the comparison ---------------------------------------------------------------------------------------------------


def difference(
    source: DeploymentCatalog, target: DeploymentCatalog, *, held: Mapping[tuple[str, str], bytes | None] | None = None
) -> list[CatalogDifference]:
    """Where the target's catalogue is not as it must be. Both are under the target's names (``Catalog.renamed``).

    ``held``  by namespace and name, indexes that are otherwise on the target until the cut-over: as which definition;
              ``None``: not at all yet
    """
    found = []
    for namespace in sorted({*source.collections, *target.collections}):
        mine, theirs = source.collections.get(namespace), target.collections.get(namespace)
        if theirs is None or mine is None:
            found.append(CatalogDifference(namespace, "missing" if theirs is None else "extra"))
            continue
        if mine.kind != theirs.kind:
            found.append(CatalogDifference(namespace, "kind", mine.kind, theirs.kind))
            continue
        is_held = held is not None and (namespace, CLUSTERED) in held
        found += _options_differ(mine, theirs, source.version, target.version, is_held=is_held)
        found += _indexes_differ(mine, theirs, source.version, target.version, held or {})
    return found


def _options_differ(
    mine: CatalogCollection, theirs: CatalogCollection, of: tuple[int, int], to: tuple[int, int], *, is_held: bool
) -> Iterator[CatalogDifference]:
    wanted = edited(options_for(mine, to), [b"expireAfterSeconds"] if is_held else [])
    if wanted != edited(theirs.options, [b"temp"]):
        yield CatalogDifference(mine.namespace, "options", shown(mine.options), shown(theirs.options))
    if (mine.id_index is None) != (theirs.id_index is None) or (
        mine.id_index is not None and theirs.id_index is not None and not _alike(mine.id_index, theirs.id_index, of, to)
    ):
        yield CatalogDifference(
            mine.namespace,
            "index _id_",
            shown(mine.id_index or b"") if mine.id_index else "",
            shown(theirs.id_index) if theirs.id_index else "",
        )


def _indexes_differ(
    mine: CatalogCollection,
    theirs: CatalogCollection,
    of: tuple[int, int],
    to: tuple[int, int],
    held: Mapping[tuple[str, str], bytes | None],
) -> Iterator[CatalogDifference]:
    wanted = {name_of(spec): spec for spec in mine.indexes}
    there = {name_of(spec): spec for spec in theirs.indexes}
    for name in sorted({*wanted, *there}):
        expected: bytes | None = wanted.get(name)
        if expected is not None and (mine.namespace, name) in held:
            expected = _as_held(expected, held[mine.namespace, name])
        found = there.get(name)
        if expected is None and found is None:
            continue
        if expected is None or found is None or not _alike(expected, found, of, to):
            yield CatalogDifference(
                mine.namespace,
                f"index {name}",
                "" if name not in wanted else shown(wanted[name]),
                "" if found is None else shown(found),
            )


def _as_held(spec: bytes, held: bytes | None) -> bytes | None:
    """A source's index as it is on the target until then: with the limit of age of ``held``. Servers list the fields in
    another order once an index was changed, so the rest is as on the source."""
    limit = None if held is None else raw_bson.find(held, b"expireAfterSeconds")
    if held is None or limit is None:
        return held
    return replaced(spec, limit.name, held[limit.start : limit.end])


def options_for(collection: CatalogCollection, version: tuple[int, int]) -> bytes:
    """The options of a source's collection as a target of a version lists them. One that is temporary is not so on the
    target, where a primary that is elected would drop it, whatever the source does."""
    unknown = [b"recordPreImages"] if version >= (7, 0) else []
    return edited(collection.options, [b"temp", *unknown])


def _alike(mine: bytes, theirs: bytes, of: tuple[int, int], to: tuple[int, int]) -> bool:
    """Whether two definitions of an index say the same, modulo what the servers change on their own."""
    if mine == theirs:
        return True
    if of >= (5, 0):
        return False
    return _parts(mine, normal=to >= (5, 0)) == _parts(theirs, normal=to >= (5, 0))


def _parts(spec: bytes, *, normal: bool) -> Sequence[tuple[bytes, int, bytes]]:
    """The fields of a definition, in no order. ``normal``: with the types that 5.0 gives them."""
    parts = []
    for one in raw_bson.elements(spec):
        type_, value = one.type, raw_bson.value(spec, one)
        if normal and one.name in _FLAGS:
            type_, value = raw_bson.BOOL, b"\x01" if truth_of(spec, one.name) else b"\x00"
        elif normal and one.name in (b"min", b"max") and (number := number_of(spec, one.name)) is not None:
            type_, value = raw_bson.DOUBLE, struct.pack("<d", number)
        elif one.name == b"expireAfterSeconds" and (number := number_of(spec, one.name)) is not None:
            whole = int(max(-(2**31), min(TTL_MAX, number))) if not math.isnan(number) else TTL_MAX
            type_, value = raw_bson.INT32, raw_bson.encode_int32(whole)
        parts.append((one.name, type_, value))
    return sorted(parts)


# -- what has changed meanwhile ---------------------------------------------------------------------------------------

_COMMANDS: Final = bson.encode(
    {
        "$or": [
            {
                "op": "c",
                "o.applyOps": {"$exists": False},
                "o.commitTransaction": {"$exists": False},
                "o.abortTransaction": {"$exists": False},
            },
            {"op": "c", "o.applyOps.op": "c"},  # a transaction that makes collections or indexes
            {"ns": {"$regex": "^[^.]+\\.system\\.views$"}, "op": {"$in": ["i", "u", "d"]}},
        ]
    }
)


def definitions_changed(
    deployment: MongoClient[Any] | Cluster, after: ClusterTime, until: ClusterTime
) -> frozenset[bytes | str]:
    """What the oplogs between two times define anew, alter or take away: UUIDs of collections, and namespaces of
    views. ``until``: a time that ``Places.now`` gave. Raises ChangeStreamHistoryLost where an oplog no longer reaches
    back."""
    touched: set[bytes | str] = set()
    for document in entries_between(deployment, after, until, _COMMANDS):
        touched |= _touched(parse_entry(document))
    return frozenset(touched)


def entries_between(
    deployment: MongoClient[Any] | Cluster, after: ClusterTime, until: ClusterTime, oplog_filter: bytes
) -> Iterator[bytes]:
    """The entries of all oplogs between two times. ``until``: as of ``definitions_changed``."""
    for source in oplogs_of(deployment).values():
        _let_reach(source, until)
        for batch in source.read(after, until, oplog_filter=oplog_filter):
            yield from raw_bson.split(batch.raw)


def _let_reach(source: MongodSource, until: ClusterTime) -> None:
    """An idle shard has no entry at a time that others have given. It writes a no-op where somebody reads after the
    time, and would do so on its own once in 10 s. Each shard has heard of the time: ``Places.now`` told it."""
    client = source.client
    read = {
        "find": "oplog.rs",
        "sort": {"$natural": -1},
        "projection": {"ts": 1},
        "limit": 1,
        "singleBatch": True,
        "readConcern": {"level": "majority", "afterClusterTime": until.to_timestamp()},
    }
    connection = Connection(client, retry_seconds=RETRY_SECONDS)
    connection.retrying(lambda: client.local.command(read))


def _touched(entry: OplogEntry) -> set[bytes | str]:
    if entry.operation == "c" and b"applyOps" in entry.command_fields():
        inside = (parse_operation(one, entry.position) for one in apply_ops(entry))
        return {one.collection_uuid for one in inside if one.operation == "c" and one.collection_uuid is not None}
    if entry.operation == "c":
        return set() if entry.collection_uuid is None else {entry.collection_uuid}
    for part in (entry.o2, entry.o):
        if part is not None and (name := _text(part, b"_id")):
            return {name}
    return set()
