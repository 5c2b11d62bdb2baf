"""A table's commits: Delta's transaction log, with the cluster time that each commit states.

A commit is published as a whole, on the device, under an unused number, so two writers cannot both publish it. Our keys
in ``commitInfo`` are strings, which ``DeltaTable.history()`` shows:

``tailrace.clusterTime``  the table equals its collection at this cluster time, ``seconds,increment``
``tailrace.after``        the version before equals the collection at every time from its own up to this one
``tailrace.token``        a stream that is resumed after this token continues at the table's cluster time
``tailrace.batch``        the micro-batch; also the version of the application transaction
``tailrace.state``        the name of the state that the rows come from
``tailrace.witness``      whose oplogs led there, with an entry of each (``tailrace.core.oplog.witness``), as JSON
``tailrace.previous``     the digests of the versions' files from our last one on, by version, as JSON
``tailrace.seal``         a digest of the version's number and its file, which had zeros in place of the seal

The last two are in every commit of ours, in those that only merge files too (``log_chain.py``).
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple
from urllib.parse import quote, unquote

import bson

from tailrace.base import durable
from tailrace.core.event.resume_token import encode_high_water_mark
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.oplog.witness import Witness
from tailrace.errors import SinkError
from tailrace.lake.store import delta, places
from tailrace.lake.store.place import TablePlace
from tailrace.lake.tables.nested import LeafType, ListType, NestedType, has_leaf, names_of, parsed
from tailrace.lake.tables.schema import Column

TIME, AFTER, TOKEN, BATCH, KIND, UUID, STATE, WITNESS = (
    f"tailrace.{name}" for name in ("clusterTime", "after", "token", "batch", "kind", "collection", "state", "witness")
)
PREVIOUS, SEAL = "tailrace.previous", "tailrace.seal"
PATH, TYPE, WAS = "tailrace.path", "tailrace.type", "tailrace.was"
#: The kinds of commits that replace all rows, or make the first ones: the data files are their change feed.
WITHOUT_FEED: Final = frozenset({"create", "whole", "drop"})
_UNSEALED: Final = "0" * 32
_TYPES: Final = {
    "string": "string",
    "int": "integer",
    "objectid": "string",
    "json": "string",
}
#: The fields may be NULL, although they are so only where the whole struct is. If they may not, Delta's own connector
#: wants values in them even where the struct is NULL, and refuses to write such rows ("NOT NULL constraint violated").
_TIME_TYPE: Final[dict[str, Any]] = {
    "type": "struct",
    "fields": [{"name": name, "type": "long", "nullable": True, "metadata": {}} for name in ("t", "i")],
}


class DamagedCommitError(SinkError):
    """The file of a version is not what was written."""


@dataclass(frozen=True, slots=True)
class Stated:
    """What one of our commits states. ``kind``: create, changes, whole, drop."""

    version: int
    time: ClusterTime
    after: ClusterTime
    batch: int
    kind: str
    collection: str
    state: str = ""
    witness: Witness | None = None


@dataclass(frozen=True, slots=True)
class NewFile:
    """A data file on the device: path relative to the table, and size in bytes."""

    path: str
    size: int
    rows: int
    stats: Mapping[str, Any]


class TableFile(NamedTuple):
    """A data file of a version: path as the log has it, which is escaped like a URI; size in bytes; how many rows it
    has, if the log says so; and for a table that is merged on read the deletion vector, and what the log says about the
    file's values."""

    path: str
    size: int
    rows: int | None = None
    vector: Mapping[str, Any] | None = None
    stats: str = ""

    @property
    def name(self) -> str:
        """The path in the file system, relative to the table."""
        return unquote(self.path)

    @property
    def gone(self) -> int:
        """How many of its rows are gone."""
        return 0 if self.vector is None else int(self.vector["cardinality"])


@dataclass(frozen=True)
class Batch:
    """A micro-batch, for one table: its number, the cluster times it takes the table from and to, the state's name, and
    whose oplogs led there."""

    number: int
    after: ClusterTime
    until: ClusterTime
    collection: str | None
    state: str = ""
    witness: Witness | None = None


@dataclass
class Actions:
    """What a commit does to the table's files. ``fed``: those of its change feed; ``feeds``: the feed begins now;
    ``marked``: those of ``removed`` that stay, with their new deletion vectors; ``protocol``: the table's from now on,
    if it is not one that every reader knows."""

    kind: str
    added: list[NewFile] = field(default_factory=list)
    removed: list[TableFile] = field(default_factory=list)
    metadata: Mapping[str, Any] | None = None
    fed: list[NewFile] = field(default_factory=list)
    feeds: bool = False
    marked: list[TableFile] = field(default_factory=list)
    protocol: Mapping[str, Any] | None = None

    @property
    def replaced(self) -> list[TableFile]:
        """The files that go."""
        marked = {file.path for file in self.marked}
        return [file for file in self.removed if file.path not in marked]

    @property
    def vector_bytes(self) -> int:
        """What the deletion vectors take in the log, old and new ones."""
        vectors = [file.vector for file in (*self.removed, *self.marked)]
        return sum(len(one["pathOrInlineDv"]) for one in vectors if one is not None)


def time_text(time: ClusterTime) -> str:
    """``seconds,increment``."""
    return f"{time.seconds},{time.increment}"


def time_of(text: object) -> ClusterTime:
    """The cluster time of ``seconds,increment``. Raises ValueError."""
    seconds, _, increment = str(text).partition(",")
    return ClusterTime.of(int(seconds), int(increment))


def token_of(time: ClusterTime) -> str:
    """The ``_data`` of a token; a stream that is resumed after it begins with the changes of ``time``."""
    return str(bson.decode(encode_high_water_mark(int(time)))["_data"])


def delta_fields(columns: Sequence[Column]) -> list[dict[str, Any]]:
    """The table's columns as Delta writes them; each typed one says where its values come from."""

    def one(name: str, type_: Any, *, nullable: bool, **metadata: str) -> dict[str, Any]:
        return {"name": name, "type": type_, "nullable": nullable, "metadata": metadata}

    own = [
        one("_key", "binary", nullable=False),
        one("_bson", "binary", nullable=False),
        one("_json", "string", nullable=True),
        one("_changed", _TIME_TYPE, nullable=True),
    ]
    typed = [
        one(
            column.name,
            _delta_type(parsed(column.type)),
            nullable=True,
            **{PATH: json.dumps(column.path), TYPE: column.type},
            **({WAS: column.was} if column.was else {}),
        )
        for column in columns
    ]
    return own + typed


def _delta_type(type_: NestedType) -> Any:
    """A column's type as Delta has it."""
    if not has_leaf(type_):
        return "string"
    if isinstance(type_, LeafType):
        return _TYPES.get(type_.name, type_.name)
    if isinstance(type_, ListType):
        return {"type": "array", "elementType": _delta_type(type_.element), "containsNull": True}
    fields = [
        {"name": name, "type": _delta_type(one), "nullable": True, "metadata": {}}
        for name, (_, one) in zip(names_of(type_), type_.fields, strict=True)
    ]
    return {"type": "struct", "fields": fields}


def columns_of(fields: Sequence[Mapping[str, Any]]) -> list[Column]:
    """The typed columns, from the fields of a table's schema."""
    return [
        Column(
            one["name"], tuple(json.loads(one["metadata"][PATH])), one["metadata"][TYPE], one["metadata"].get(WAS, "")
        )
        for one in fields
        if PATH in one.get("metadata", {})
    ]


def metadata_action(
    table_id: str, fields: Sequence[Mapping[str, Any]], configuration: Mapping[str, str]
) -> dict[str, Any]:
    """Delta's ``metaData``, of a table that Delta does not divide."""
    return delta.metadata(table_id, {"type": "struct", "fields": list(fields)}, (), configuration, _now())


def publish(
    root: TablePlace, number: int, app: str, batch: Batch, actions: Actions, *, previous: Mapping[int, str]
) -> str:
    """Publish ``actions`` as version ``number`` of the table at ``root``. Returns the digest of the version's file.
    Raises SinkError if that version exists. ``previous``: the digests of the versions before."""
    at = _now()
    found = _publish(
        root,
        number,
        delta.commit(
            _commit_info(batch, actions.kind, at),
            creates=number == 0,
            feeds=actions.feeds,
            metadata=actions.metadata,
            transaction=delta.transaction(app, batch.number, at),
            removed=_removed(actions.removed, at, changes=True),
            added=[*_added(actions.added, at, changes=True), *_marked(actions.marked, at)],
            protocol=actions.protocol,
            fed=[delta.change(quote(one.path), one.size) for one in actions.fed],
        ),
        previous,
    )
    durable.step("table.commit")
    return found


def publish_compaction(
    root: TablePlace, number: int, added: Sequence[NewFile], removed: Sequence[TableFile], previous: Mapping[int, str]
) -> None:
    """Publish that the rows of some files are in others now. Raises SinkError if that version exists."""
    at = _now()
    actions = delta.commit(
        delta.commit_info(at, "OPTIMIZE", {}, ours={}),
        creates=False,
        removed=_removed(removed, at, changes=False),
        added=_added(added, at, changes=False),
    )
    _publish(root, number, actions, previous)
    durable.step("table.compacted")


def _added(files: Sequence[NewFile], at: int, *, changes: bool) -> list[dict[str, Any]]:
    def stats(file: NewFile) -> str:
        return json.dumps({"numRecords": file.rows, **file.stats}, ensure_ascii=False)

    return [delta.add(quote(one.path), {}, one.size, at, changes=changes, stats=stats(one)) for one in files]


def _removed(files: Sequence[TableFile], at: int, *, changes: bool) -> list[dict[str, Any]]:
    return [delta.remove(one.path, {}, one.size, at, changes=changes, vector=one.vector) for one in files]


def _marked(files: Sequence[TableFile], at: int) -> list[dict[str, Any]]:
    """Files of the version before, with other deletion vectors. Their bounds may be those of rows that are gone."""

    def stats(file: TableFile) -> str:
        return json.dumps({**json.loads(file.stats), "tightBounds": False}, ensure_ascii=False)

    return [delta.add(one.path, {}, one.size, at, changes=True, stats=stats(one), vector=one.vector) for one in files]


def rows_in(stats: str) -> int | None:
    """How many rows a file has, as the ``stats`` of its ``add`` say; ``None`` if they do not."""
    found = json.loads(stats).get("numRecords") if stats else None
    return None if found is None else int(found)


def _publish(root: TablePlace, number: int, actions: Sequence[Mapping[str, Any]], previous: Mapping[int, str]) -> str:
    content = content_of(number, actions, previous)
    try:
        places.publish(delta.commit_path(root, number), content, root / delta.LOG)
    except FileExistsError:
        raise changed_by_others(root, number) from None
    return digest(content)


def content_of(number: int, actions: Sequence[Mapping[str, Any]], previous: Mapping[int, str]) -> bytes:
    """The file of a version, with its seal. The first of ``actions`` is the commit's ``commitInfo``."""
    info = {"commitInfo": {**actions[0]["commitInfo"], PREVIOUS: json.dumps(previous), SEAL: _UNSEALED}}
    # Not as escapes: deltalake reads some of those above U+FFFF wrong, and the bounds with them (1.6.6).
    content = delta.content_of([info, *actions[1:]], ascii_only=False)
    return content.replace(_field(_UNSEALED), _field(_seal_of(number, content)), 1)


def digest(content: bytes) -> str:
    """What a version's file is known by: the first 32 hexadecimal digits of its SHA-256."""
    return hashlib.sha256(content).hexdigest()[:32]


def _seal_of(number: int, content: bytes) -> str:
    """The seal of a version's file that has zeros in its place."""
    return digest(b"%d " % number + content)


def _field(seal: str) -> bytes:
    """How a file has its seal. No text in JSON has quotation marks without a backslash before them."""
    return f'"{SEAL}": "{seal}"'.encode()


def changed_by_others(root: TablePlace, number: int) -> SinkError:
    """The error for a table with a version that another program has written."""
    return SinkError(
        f"another program has changed the table {root} (version {number})",
        hint="A table has one writer. `tailrace tables rebuild` lets the next run rewrite it",
    )


def actions_of(root: TablePlace, number: int) -> list[dict[str, Any]]:
    """The actions of a version. Raises FileNotFoundError if its file no longer exists, DamagedCommitError if it is not
    what was written."""
    path = delta.commit_path(root, number)
    return actions_in(path, number, path.read_bytes())


def actions_in(path: TablePlace, number: int, content: bytes) -> list[dict[str, Any]]:
    """The actions of a version whose file at ``path`` has ``content``."""
    hint = "The next run of the tables' writer compares their logs, and rewrites such a table"
    try:
        actions = delta.actions_in(content)
    except ValueError as error:
        raise DamagedCommitError(f"{path} is damaged: {error}", hint=hint) from error
    info = delta.info_of(actions)
    if SEAL in info or PREVIOUS in info:
        seal = str(info.get(SEAL, ""))
        if _seal_of(number, content.replace(_field(seal), _field(_UNSEALED), 1)) != seal:
            raise DamagedCommitError(f"{path} is damaged: it was changed after it was written", hint=hint)
    return actions


def stated(root: TablePlace, *, strict: bool = False) -> Iterator[Stated]:
    """What our commits state, newest first. A commit that is not what was written is left out; ``strict``: it raises
    DamagedCommitError."""
    for number in reversed(delta.commits_in(root)):
        try:
            found = statement(actions_of(root, number), number)
        except FileNotFoundError:
            continue
        except DamagedCommitError:
            if strict:
                raise
            continue
        if found is not None:
            yield found


def newest(root: TablePlace) -> Stated | None:
    """What our newest commit states; ``None`` if there is none."""
    return next(stated(root), None)


def newest_version(root: TablePlace) -> int:
    """The version of our newest commit; -1 if there is none."""
    found = newest(root)
    return -1 if found is None else found.version


def statement(actions: Sequence[Mapping[str, Any]], number: int) -> Stated | None:
    """What a commit states; ``None`` for one that is not ours."""
    info = delta.info_of(actions)
    if TIME not in info:
        return None
    try:
        times = time_of(info[TIME]), time_of(info[AFTER])
        witness = Witness.from_document(json.loads(info[WITNESS])) if WITNESS in info else None
        return Stated(
            number, *times, int(info[BATCH]), str(info[KIND]), str(info[UUID]), str(info.get(STATE, "")), witness
        )
    except (KeyError, TypeError, ValueError) as error:
        raise DamagedCommitError(f"version {number} of a table is damaged: {error}") from error


def changes_data(actions: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a commit changes rows, and does not only move them to other files. One that gives a file another deletion
    vector does, whatever it says of itself."""
    moved = [one.get("add") or one.get("remove") for one in actions]
    if any(one.get("dataChange", True) for one in moved if one) or any("metaData" in one for one in actions):
        return True
    before = {one["remove"]["path"]: _vector_in(one["remove"]) for one in actions if "remove" in one}
    return any(_vector_in(one["add"]) != before.get(one["add"]["path"]) for one in actions if "add" in one)


def _vector_in(action: Mapping[str, Any]) -> tuple[Any, ...] | None:
    """What tells the deletion vectors of two actions apart; ``None`` if there is none."""
    vector = action.get("deletionVector")
    return None if vector is None else tuple(vector.get(one) for one in ("storageType", "pathOrInlineDv", "offset"))


def _commit_info(batch: Batch, kind: str, at: int) -> dict[str, Any]:
    operation = "WRITE" if kind != "create" else "CREATE TABLE"
    mode = "Overwrite" if kind in ("whole", "drop") else "Append"
    ours = {
        TIME: time_text(batch.until),
        AFTER: time_text(batch.after),
        TOKEN: token_of(ClusterTime(batch.until + 1)),
        BATCH: str(batch.number),
        KIND: kind,
        UUID: batch.collection or "",
        **({STATE: batch.state} if batch.state else {}),
        **({WITNESS: json.dumps(batch.witness.to_document())} if batch.witness is not None else {}),
    }
    return delta.commit_info(at, operation, {"mode": mode}, blind_append=False, ours=ours)


def _now() -> int:
    return time.time_ns() // 1_000_000
