"""A lake's commits in the form of Delta Lake's transaction log, and back.

The form is in ``delta.py``. What Delta has no word for is in ``commitInfo.tailrace``; ``delta.appendOnly`` keeps
others from deleting rows.

Everything that is read is checked here, by type and, where it becomes a path, by name: a log that was changed by hand
gives a SinkError that names the file, never a path outside the lake.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, Final, TypeVar

from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.oplog.witness import marks_from_json, marks_to_json
from tailrace.errors import SinkError
from tailrace.lake.store import delta
from tailrace.lake.store.layout import (
    checked_name,
    checked_quarantine_name,
    cluster_time_of,
    is_in_period,
    partition_values,
)
from tailrace.lake.store.manifest import (
    BatchMark,
    Commit,
    Erasure,
    FileEntry,
    Gap,
    LakeChange,
    PlannedRange,
    Removal,
    WrittenVersion,
)
from tailrace.lake.store.partitioning import Partitioning

#: The format of what is ours in the log and next to it.
FORMAT: Final = 2
OURS: Final = "tailrace"
SHA256: Final = "tailrace.sha256"
GAPS: Final = "tailrace.gaps"
ERASURES: Final = "tailrace.erasures"
VERSIONS: Final = "tailrace.serverVersions"
CHANGES: Final = "tailrace.changes"
BEGINS: Final = "tailrace.begins"
#: How long other programs that clean up Delta tables keep replaced files, and the longest that we can.
RETENTION_MAX_DAYS: Final = 30
_OPERATIONS: Final = {
    "create": "CREATE TABLE",
    "append": "STREAMING UPDATE",
    "compaction": "OPTIMIZE",
    "gap": "SET TBLPROPERTIES",
    "erase": "DELETE",
    "change": "WRITE",
    "start": "SET TBLPROPERTIES",
}

T = TypeVar("T")


def table_schema(columns: Sequence[Mapping[str, Any]], partitioning: Partitioning) -> dict[str, Any]:
    """The table's schema: ``columns`` in Spark's JSON form, which Delta's is, and what files are divided by."""
    return {"type": "struct", "fields": [*columns, *partitioning.fields()]}


def table_metadata(
    table_id: str,
    schema: Mapping[str, Any],
    partitioning: Partitioning,
    gaps: Sequence[Gap],
    created: datetime,
    *,
    erasures: Sequence[Erasure] = (),
    versions: Sequence[WrittenVersion] = (),
    changes: Sequence[LakeChange] = (),
    begins: ClusterTime | None = None,
) -> dict[str, Any]:
    """The ``metaData`` action. Accepted gaps, erasures, server versions, changes and the beginning are in it because it
    is the part of the log that is always kept."""
    configuration = {
        # Delta's rule: where rows were deleted, the table is no longer one that is appended to only.
        "delta.appendOnly": "false" if erasures or changes else "true",
        "delta.enableExpiredLogCleanup": "false",
        # The bounds that every file has. deltalake 1.6 takes a bound that is missing for NULL, and leaves the file out
        # whatever a filter on that column asks for.
        "delta.dataSkippingStatsColumns": "token",
        "delta.deletedFileRetentionDuration": f"interval {RETENTION_MAX_DAYS} days",
        GAPS: json.dumps([_gap_to_json(gap) for gap in gaps]),
        ERASURES: json.dumps([_erasure_to_json(erasure) for erasure in erasures]),
        VERSIONS: json.dumps([_note_to_json(note) for note in versions]),
    }
    if changes:
        configuration[CHANGES] = json.dumps([_change_to_json(change) for change in changes])
    if begins is not None:
        configuration[BEGINS] = json.dumps(time_to_json(begins))
    return delta.metadata(table_id, schema, partitioning.names, configuration, _millis(created))


def encode(commit: Commit, metadata: Mapping[str, Any] | None = None) -> bytes:
    """The commit's file. ``metadata`` is a ``metaData`` action, where the commit changes it."""
    ours: dict[str, Any] = {
        "format": FORMAT,
        "kind": commit.kind,
        "claim": commit.claim,
        "previous": commit.previous,
        "committedAt": commit.committed_at.isoformat(timespec="microseconds"),
        "newest": None if commit.newest is None else mark_to_json(commit.newest),
    }
    parameters: dict[str, str] = {}
    if commit.batch is not None and commit.planned is not None:
        parameters = {"epochId": str(commit.batch), "outputMode": "Append"}
        wall = commit.last_wall_time
        ours.update(
            batch=commit.batch,
            planned=_range_to_json(commit.planned),
            rows=commit.rows,
            firstToken=commit.first_token,
            lastToken=commit.last_token,
            lastWallTime=None if wall is None else wall.isoformat(),
            follows=None if commit.follows is None else time_to_json(commit.follows),
        )
    if commit.quarantined:
        ours.update(quarantined=list(commit.quarantined), quarantinedRows=commit.quarantined_rows)
    if commit.gap is not None:
        ours["gap"] = _gap_to_json(commit.gap)
    if commit.erasure is not None:
        ours["erasure"] = _erasure_to_json(commit.erasure)
    if commit.change is not None:
        ours["change"] = _change_to_json(commit.change)
    if commit.begins is not None:
        ours["begins"] = time_to_json(commit.begins)
    at, changes = _millis(commit.committed_at), commit.kind != "compaction"
    actions = delta.commit(
        delta.commit_info(
            at, _OPERATIONS[commit.kind], parameters, blind_append=commit.kind == "append", ours={OURS: ours}
        ),
        creates=commit.kind == "create",
        metadata=metadata,
        transaction=None if commit.batch is None else delta.transaction(f"{OURS}/{commit.claim}", commit.batch, at),
        removed=[_remove(removal, changes=changes) for removal in commit.removed],
        added=[_add(file, at, changes=changes) for file in commit.files],
    )
    return delta.content_of(actions, ascii_only=True)


def _add(file: FileEntry, at: int, *, changes: bool) -> dict[str, Any]:
    tags = {SHA256: file.sha256}
    return delta.add(file.name, file.partition, file.size, at, changes=changes, stats=file.stats, tags=tags)


def _remove(removal: Removal, *, changes: bool) -> dict[str, Any]:
    partition = partition_values(removal.name, removal.collection)
    return delta.remove(removal.name, partition, removal.size, _millis(removal.at), changes=changes)


def decode(content: bytes, number: int, where: object) -> Commit:
    """The commit in a file's ``content``. Raises SinkError that names ``where``: damaged, of a later version of
    Tailrace, or written by another program."""
    actions = guarded(lambda: delta.actions_in(content), where)
    ours = delta.info_of(actions).get(OURS)
    if not isinstance(ours, dict):
        raise SinkError(
            f"{where} was not written by Tailrace: a lake has one writer",
            hint="Let other programs read the lake, and write to tables of their own",
        )
    check_format(ours, where)

    def read() -> Commit:
        kind = _text(ours["kind"])
        if kind not in _OPERATIONS:
            raise ValueError(f"kind {kind!r}")
        files = [entry_of(action["add"], where) for action in actions if "add" in action]
        wall = ours.get("lastWallTime")
        if files and wall is not None:
            newest = max(range(len(files)), key=lambda number: files[number].last_token)
            files[newest] = replace(files[newest], last_wall_time=datetime.fromisoformat(_text(wall)))
        return Commit(
            number=number,
            kind=kind,
            claim=_text(ours["claim"]),
            previous=_text(ours["previous"]),
            files=tuple(files),
            removed=tuple(removal_of(action["remove"], where) for action in actions if "remove" in action),
            batch=_natural_number(ours["batch"]) if kind == "append" else None,
            planned=_range_from_json(ours["planned"]) if kind == "append" else None,
            follows=None if ours.get("follows") is None else time_from_json(ours["follows"]),
            gap=_gap_from_json(ours["gap"]) if kind == "gap" else None,
            erasure=_erasure_from_json(ours["erasure"]) if kind == "erase" else None,
            change=_change_from_json(ours["change"]) if kind == "change" else None,
            begins=None if ours.get("begins") is None else time_from_json(ours["begins"]),
            newest=None if ours["newest"] is None else mark_from_json(ours["newest"]),
            quarantined=tuple(checked_quarantine_name(name, where) for name in ours.get("quarantined", [])),
            quarantined_rows=_natural_number(ours.get("quarantinedRows", 0)),
            committed_at=datetime.fromisoformat(_text(ours["committedAt"])),
        )

    return guarded(read, where)


def guarded(read: Callable[[], T], where: object) -> T:
    """What ``read`` gives. If anything is wrong with what it reads, that is a SinkError that says where."""
    try:
        return read()
    except SinkError as error:
        text = error.message if str(where) in error.message else f"{where} is damaged: {error.message}"
        raise SinkError(text, hint=error.hint) from error
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError, RecursionError) as error:
        raise SinkError(f"{where} is damaged: {error!r}") from error


def entry_of(add: Mapping[str, Any], where: object) -> FileEntry:
    """A file of the lake from an ``add`` action, every part of it checked."""

    def read() -> FileEntry:
        name = checked_name(add["path"], where)
        stats = json.loads(_text(add["stats"]))
        first, last = _text(stats["minValues"]["token"]), _text(stats["maxValues"]["token"])
        for token in (first, last):
            if not is_in_period(name, token):
                raise ValueError(f"{name} holds token {token} of another day or hour")
        return FileEntry(
            name=name,
            rows=_natural_number(stats["numRecords"]),
            size=_natural_number(add["size"]),
            sha256=_text(add["tags"][SHA256]),
            first_token=first,
            last_token=last,
            stats=add["stats"],
            collection=_collection_of(add),
        )

    return guarded(read, where)


def removal_of(remove: Mapping[str, Any], where: object) -> Removal:
    """A replaced file from a ``remove`` action."""

    def read() -> Removal:
        at = datetime.fromtimestamp(_natural_number(remove["deletionTimestamp"]) / 1000, UTC)
        name = checked_name(remove["path"], where)
        return Removal(name, at, _natural_number(remove.get("size") or 0), _collection_of(remove))

    return guarded(read, where)


def _collection_of(action: Mapping[str, Any]) -> str | None:
    """The collection of a file's rows, in a lake that is divided by it."""
    value = (action.get("partitionValues") or {}).get("collection")
    return None if value is None else _text(value)


def gaps_of(configuration: Mapping[str, Any], where: object) -> tuple[Gap, ...]:
    """The accepted gaps that a ``metaData`` action keeps."""
    return guarded(lambda: tuple(_gap_from_json(gap) for gap in json.loads(configuration.get(GAPS) or "[]")), where)


def erasures_of(configuration: Mapping[str, Any], where: object) -> tuple[Erasure, ...]:
    """What was erased, as a ``metaData`` action keeps it."""
    return guarded(
        lambda: tuple(_erasure_from_json(one) for one in json.loads(configuration.get(ERASURES) or "[]")), where
    )


def versions_of(configuration: Mapping[str, Any], where: object) -> tuple[WrittenVersion, ...]:
    """The server versions whose events the lake holds, as a ``metaData`` action keeps them."""
    return guarded(
        lambda: tuple(_note_from_json(one) for one in json.loads(configuration.get(VERSIONS) or "[]")), where
    )


def changes_of(configuration: Mapping[str, Any], where: object) -> tuple[LakeChange, ...]:
    """How the lake was changed, as a ``metaData`` action keeps it."""
    return guarded(
        lambda: tuple(_change_from_json(one) for one in json.loads(configuration.get(CHANGES) or "[]")), where
    )


def begins_of(configuration: Mapping[str, Any], where: object) -> ClusterTime | None:
    """The cluster time after which the lake's stream begins, as a ``metaData`` action keeps it."""
    text = configuration.get(BEGINS)
    return None if text is None else guarded(lambda: time_from_json(json.loads(text)), where)


def mark_to_json(mark: BatchMark) -> dict[str, Any]:
    return {
        "number": mark.number,
        "claim": mark.claim,
        "batch": mark.batch,
        "planned": _range_to_json(mark.planned),
        "firstToken": mark.first_token,
        "lastToken": mark.last_token,
        "rows": mark.rows,
        **({"aside": mark.aside} if mark.aside else {}),
    }


def mark_from_json(value: Mapping[str, Any]) -> BatchMark:
    mark = BatchMark(
        number=_natural_number(value["number"]),
        claim=_text(value["claim"]),
        batch=_natural_number(value["batch"]),
        planned=_range_from_json(value["planned"]),
        first_token=_text(value["firstToken"]),
        last_token=_text(value["lastToken"]),
        rows=_natural_number(value["rows"]),
        aside=_natural_number(value.get("aside", 0)),
    )
    cluster_time_of(mark.last_token)
    return mark


def check_format(value: Mapping[str, Any], where: object) -> None:
    """Refuse what another version of Tailrace has written in a form that this one does not know."""
    written = value.get("format")
    if written == FORMAT and not isinstance(written, bool):
        return
    raise SinkError(
        f"{where} has format {written!r}, and this version of Tailrace knows format {FORMAT}",
        hint="Use the release that has written it",
    )


def _gap_to_json(gap: Gap) -> dict[str, Any]:
    return {
        "afterToken": gap.after_token,
        "after": time_to_json(gap.after),
        "until": time_to_json(gap.until),
        "acceptedAt": gap.accepted_at.isoformat(timespec="seconds"),
    }


def _gap_from_json(value: Mapping[str, Any]) -> Gap:
    token = value["afterToken"]
    return Gap(
        None if token is None else _text(token),
        time_from_json(value["after"]),
        time_from_json(value["until"]),
        datetime.fromisoformat(_text(value["acceptedAt"])),
    )


def _erasure_to_json(erasure: Erasure) -> dict[str, Any]:
    at = erasure.at.isoformat(timespec="seconds")
    return {"rows": erasure.rows, "files": erasure.files, "before": erasure.before, "at": at}


def _erasure_from_json(value: Mapping[str, Any]) -> Erasure:
    before = value["before"]
    return Erasure(
        _natural_number(value["rows"]),
        _natural_number(value["files"]),
        None if before is None else _text(before),
        datetime.fromisoformat(_text(value["at"])),
    )


def _change_to_json(change: LakeChange) -> dict[str, Any]:
    return {
        "claim": change.claim,
        "keys": list(change.keys),
        "since": None if change.since is None else time_to_json(change.since),
        "until": None if change.until is None else time_to_json(change.until),
        "rows": change.rows,
        "at": change.at.isoformat(timespec="seconds"),
        "digest": change.digest,
    }


def _change_from_json(value: Mapping[str, Any]) -> LakeChange:
    since, until = (None if value[key] is None else time_from_json(value[key]) for key in ("since", "until"))
    return LakeChange(
        _text(value["claim"]),
        tuple(map(_text, value["keys"])),
        since,
        until,
        _natural_number(value["rows"]),
        datetime.fromisoformat(_text(value["at"])),
        _text(value.get("digest", "")),
    )


def _note_to_json(note: WrittenVersion) -> dict[str, Any]:
    return {"version": note.version, "after": time_to_json(note.after)}


def _note_from_json(value: Mapping[str, Any]) -> WrittenVersion:
    return WrittenVersion(_text(value["version"]), time_from_json(value["after"]))


def range_to_text(planned: PlannedRange) -> str:
    """As one text, for a column of the rows that tasks give."""
    return json.dumps(_range_to_json(planned))


def range_from_text(text: str) -> PlannedRange:
    return _range_from_json(json.loads(text))


def _range_to_json(planned: PlannedRange) -> dict[str, Any]:
    value: dict[str, Any] = {"after": time_to_json(planned.after), "until": time_to_json(planned.until)}
    if planned.snapshot:
        value["snapshot"] = planned.snapshot
    if planned.entries:
        value["entries"] = marks_to_json(planned.entries)
    if planned.server_version:
        value["serverVersion"] = planned.server_version
    if planned.token_time is not None:
        value["tokenTime"] = time_to_json(planned.token_time)
    return value


def _range_from_json(value: Mapping[str, Any]) -> PlannedRange:
    snapshot = _text(value.get("snapshot", ""))
    entries = marks_from_json(value.get("entries", {}))
    version = _text(value.get("serverVersion", ""))
    token = None if value.get("tokenTime") is None else time_from_json(value["tokenTime"])
    return PlannedRange(
        time_from_json(value["after"]), time_from_json(value["until"]), snapshot, entries, version, token
    )


def time_to_json(time: ClusterTime) -> list[int]:
    return [time.seconds, time.increment]


def time_from_json(value: Sequence[Any]) -> ClusterTime:
    seconds, increment = (_natural_number(part) for part in value)
    if max(seconds, increment) > 0xFFFFFFFF:
        raise ValueError(f"{value} is not a cluster time")
    return ClusterTime.of(seconds, increment)


def _millis(moment: datetime) -> int:
    return int(moment.timestamp() * 1000)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not text")
    return value


def _natural_number(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise TypeError(f"{value!r} is not a whole number, 0 or more")
    return value
