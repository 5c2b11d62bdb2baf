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
``tailrace.seal``         a digest of the version's number and its file; in place of the seal, the file had zeros then

The last two are in every commit of ours, in those that only merge files too (``log_chain.py``).
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import quote, unquote

import bson

from tailrace.base import durable
from tailrace.core.event.resume_token import encode_high_water_mark
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.oplog.witness import Witness
from tailrace.errors import SinkError
from tailrace.lake.tables.schema import Column
from tailrace.version import version

TIME, AFTER, TOKEN, BATCH, KIND, UUID, STATE, WITNESS = (
    f"tailrace.{name}" for name in ("clusterTime", "after", "token", "batch", "kind", "collection", "state", "witness")
)
PREVIOUS, SEAL = "tailrace.previous", "tailrace.seal"
PATH, TYPE, WAS = "tailrace.path", "tailrace.type", "tailrace.was"
_ENGINE: Final = f"tailrace/{version()}"
_COMMIT: Final = re.compile(r"([0-9]{20})\.json")
_UNSEALED: Final = "0" * 32
_TYPES: Final = {
    "string": "string",
    "int": "integer",
    "objectid": "string",
    "json": "string",
}
_TIME_TYPE: Final[dict[str, Any]] = {
    "type": "struct",
    "fields": [{"name": name, "type": "long", "nullable": False, "metadata": {}} for name in ("t", "i")],
}


class DamagedCommitError(SinkError):
    """The file of a version is not what was written."""


@dataclass(frozen=True, slots=True)
class Stated:
    """What one of our commits states. ``kind``: create, changes, whole, drop. ``state`` and ``witness`` are missing in
    commits of the first format."""

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
    """A data file of a version: path as the log has it, which is escaped like a URI; partition values, of a table that
    Delta divides; and size in bytes."""

    path: str
    partition: Mapping[str, str | None]
    size: int

    @property
    def name(self) -> str:
        """The path in the file system, relative to the table."""
        return unquote(self.path)


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
    """What a commit does to the table's files."""

    kind: str
    added: list[NewFile] = field(default_factory=list)
    removed: list[TableFile] = field(default_factory=list)
    metadata: Mapping[str, Any] | None = None


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
            _TYPES.get(column.type, column.type),
            nullable=True,
            **{PATH: json.dumps(column.path), TYPE: column.type},
            **({WAS: column.was} if column.was else {}),
        )
        for column in columns
    ]
    return own + typed


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
    """Delta's ``metaData``."""
    return {
        "metaData": {
            "id": table_id,
            "format": {"provider": "parquet", "options": {}},
            "schemaString": json.dumps({"type": "struct", "fields": list(fields)}),
            "partitionColumns": [],
            "configuration": dict(configuration),
            "createdTime": _now(),
        }
    }


def publish(root: Path, number: int, app: str, batch: Batch, actions: Actions, *, previous: Mapping[int, str]) -> str:
    """Publish ``actions`` as version ``number`` of the table at ``root``. Returns the digest of the version's file.
    Raises SinkError if that version exists. ``previous``: the digests of the versions before."""
    lines = [_commit_info(batch, actions)]
    if number == 0:
        lines.append({"protocol": {"minReaderVersion": 1, "minWriterVersion": 2}})
    if actions.metadata is not None:
        lines.append(dict(actions.metadata))
    lines.append({"txn": {"appId": app, "version": batch.number, "lastUpdated": _now()}})
    lines += _moved(actions.added, actions.removed, changes=True)
    found = _publish(root, number, lines, previous)
    durable.step("table.commit")
    return found


def publish_compaction(
    root: Path, number: int, added: Sequence[NewFile], removed: Sequence[TableFile], previous: Mapping[int, str]
) -> None:
    """Publish that the rows of some files are in others now. Raises SinkError if that version exists."""
    info = {"timestamp": _now(), "operation": "OPTIMIZE", "operationParameters": {}, "engineInfo": _ENGINE}
    _publish(root, number, [{"commitInfo": info}, *_moved(added, removed, changes=False)], previous)
    durable.step("table.compacted")


def _moved(added: Sequence[NewFile], removed: Sequence[TableFile], *, changes: bool) -> list[dict[str, Any]]:
    return [_remove(file, changes=changes) for file in removed] + [_add(file, changes=changes) for file in added]


def _publish(root: Path, number: int, lines: list[dict[str, Any]], previous: Mapping[int, str]) -> str:
    content = content_of(number, lines, previous)
    try:
        durable.publish(path_of(root, number), content, root / "_delta_log")
    except FileExistsError:
        raise changed_by_others(root, number) from None
    return digest(content)


def content_of(number: int, lines: list[dict[str, Any]], previous: Mapping[int, str]) -> bytes:
    """The file of a version, with its seal. ``lines`` begin with the commit's ``commitInfo``."""
    lines[0]["commitInfo"] |= {PREVIOUS: json.dumps(previous), SEAL: _UNSEALED}
    # Not as escapes: deltalake reads some of those above U+FFFF wrong, and the bounds with them (1.6.6).
    content = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines).encode()
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


def path_of(root: Path, number: int) -> Path:
    """The file of a version."""
    return root / "_delta_log" / f"{number:020d}.json"


def changed_by_others(root: Path, number: int) -> SinkError:
    """The error for a table with a version that another program has written."""
    return SinkError(
        f"another program has changed the table {root} (version {number})",
        hint="A table has one writer. `tailrace tables rebuild` lets the next run rewrite it",
    )


def actions_of(root: Path, number: int) -> list[dict[str, Any]]:
    """The actions of a version. Raises FileNotFoundError if its file no longer exists, DamagedCommitError if it is not
    what was written."""
    path = path_of(root, number)
    return actions_in(path, number, path.read_bytes())


def actions_in(path: Path, number: int, content: bytes) -> list[dict[str, Any]]:
    """The actions of a version whose file at ``path`` has ``content``."""
    hint = "The next run of the tables' writer compares their logs, and rewrites such a table"
    try:
        found = [json.loads(line) for line in content.decode().split("\n") if line]
    except ValueError as error:
        raise DamagedCommitError(f"{path} is damaged: {error}", hint=hint) from error
    actions = [one for one in found if isinstance(one, dict)]
    info = info_of(actions)
    if SEAL in info or PREVIOUS in info:
        seal = str(info.get(SEAL, ""))
        if _seal_of(number, content.replace(_field(seal), _field(_UNSEALED), 1)) != seal:
            raise DamagedCommitError(f"{path} is damaged: it was changed after it was written", hint=hint)
    return actions


def info_of(actions: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """What a commit says of itself."""
    found: object = next((one["commitInfo"] for one in actions if "commitInfo" in one), None)
    return found if isinstance(found, dict) else {}


def versions(root: Path) -> list[int]:
    """The versions whose files are still in the log, ascending."""
    log = root / "_delta_log"
    names = [path.name for path in log.iterdir()] if log.is_dir() else []
    return sorted(int(match[1]) for name in names if (match := _COMMIT.fullmatch(name)))


def stated(root: Path, *, strict: bool = False) -> Iterator[Stated]:
    """What our commits state, newest first. A commit that is not what was written is left out; ``strict``: it raises
    DamagedCommitError."""
    for number in reversed(versions(root)):
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


def statement(actions: Sequence[Mapping[str, Any]], number: int) -> Stated | None:
    """What a commit states; ``None`` for one that is not ours."""
    info = info_of(actions)
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
    """Whether a commit changes rows, and does not only move them to other files."""
    moved = [one.get("add") or one.get("remove") for one in actions]
    return any(one.get("dataChange", True) for one in moved if one) or any("metaData" in one for one in actions)


def _commit_info(batch: Batch, actions: Actions) -> dict[str, Any]:
    return {
        "commitInfo": {
            "timestamp": _now(),
            "operation": "WRITE" if actions.kind != "create" else "CREATE TABLE",
            "operationParameters": {"mode": "Overwrite" if actions.kind in ("whole", "drop") else "Append"},
            "isBlindAppend": False,
            "engineInfo": _ENGINE,
            TIME: time_text(batch.until),
            AFTER: time_text(batch.after),
            TOKEN: token_of(ClusterTime(batch.until + 1)),
            BATCH: str(batch.number),
            KIND: actions.kind,
            UUID: batch.collection or "",
            **({STATE: batch.state} if batch.state else {}),
            **({WITNESS: json.dumps(batch.witness.to_document())} if batch.witness is not None else {}),
        }
    }


def _add(file: NewFile, *, changes: bool) -> dict[str, Any]:
    return {
        "add": {
            "path": quote(file.path),
            "partitionValues": {},
            "size": file.size,
            "modificationTime": _now(),
            "dataChange": changes,
            "stats": json.dumps({"numRecords": file.rows, **file.stats}, ensure_ascii=False),
        }
    }


def _remove(file: TableFile, *, changes: bool) -> dict[str, Any]:
    return {
        "remove": {
            "path": file.path,
            "deletionTimestamp": _now(),
            "dataChange": changes,
            "extendedFileMetadata": True,
            "partitionValues": dict(file.partition),
            "size": file.size,
        }
    }


def _now() -> int:
    return time.time_ns() // 1_000_000
