"""The identity of a lake: the stream that it holds, and the one checkpoint that may continue to write it.

``lake.json`` names the stream (source, scope, options, columns; never an address or a password) and the *claim*: a
random id that the current checkpoint holds in its ``tailrace-lake.json``. A commit under any other claim is refused, so
an old checkpoint, a copied one, or a process that was believed dead cannot add to the lake. A new checkpoint takes a
new claim, and its stream continues right after the lake's last event.

While a lake is being changed (``changing.py``), the file also holds what it is to become, under ``changing``. The
change's commit decides whether that is in force (``changing_note.py``): a crash leaves the lake as it was before, or
changed as a whole.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, NoReturn

from tailrace.base import durable
from tailrace.base.object_place import ObjectPlace, StoreAwayError
from tailrace.base.store_probe import check_store
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.oplog.witness import EntryMark
from tailrace.errors import SinkError, UsageError
from tailrace.lake.store import delta
from tailrace.lake.store.changing_note import CHANGING, divided, is_older, set_back
from tailrace.lake.store.checkpoint_file import CHECKPOINT_FILE, read_held, require_seen, write_held
from tailrace.lake.store.commit_log import CommitLog, Head
from tailrace.lake.store.delta_log import FORMAT, check_format, guarded, table_metadata, table_schema
from tailrace.lake.store.file_system import check_file_system
from tailrace.lake.store.lake_root import LakeRoot, exchange_sealed, read_sealed, require_state, write_sealed
from tailrace.lake.store.layout import QUARANTINE, cluster_time_of
from tailrace.lake.store.log_state import LogState
from tailrace.lake.store.manifest import Commit, Gap
from tailrace.lake.store.partitioning import BY_DAY, Partitioning
from tailrace.lake.store.quarantine import settle
from tailrace.lake.store.quarantine_index import open_index
from tailrace.lake.store.quarantine_ledger import QuarantineLedger
from tailrace.lake.store.retention import remove_leftovers
from tailrace.lake.store.session import SESSION, begin_session

#: How the keys of a stream begin in which a lake may be changed.
CHANGEABLE: Final = ("settings.", "columns", "documents")
#: What tells that two lakes are masked equally, and words for it.
_MASKED_BY = {"masks.rules": "rules' digest is", "masks.key": "key's fingerprint is"}
#: What may lie in a directory that is to become a lake.
_OWN_NAMES = frozenset({"_tailrace", "_staging", delta.LOG, QUARANTINE})


@dataclass(frozen=True, slots=True)
class Opening:
    """A lake opened for a stream: its id, the claim to commit under, and, if a new checkpoint continues an existing
    lake, the token ``after`` which it does. If a gap was accepted, ``start`` is the cluster time that it reads from;
    if the lake ends in the middle of a copy, ``snapshot`` says how far that is, as JSON text. ``entries`` are marks of
    oplog entries that the lake was read up to: the deployment must still hold them."""

    lake_id: str
    claim: str
    after: str | None
    start: ClusterTime | None = None
    snapshot: str | None = None
    entries: Mapping[str, EntryMark] = field(default_factory=dict)


def open_lake(
    root: LakeRoot,
    checkpoint: Path,
    stream: Mapping[str, Any],
    columns: Sequence[Mapping[str, Any]],
    *,
    gap: Gap | None = None,
    partitioning: Partitioning | None = None,
) -> Opening:
    """Make or open the lake at ``root`` for the stream described by ``stream`` (a JSON object) and ``checkpoint``.

    ``columns`` are the fields of the lake's table, in Spark's JSON form. ``gap`` is one that is accepted: a new
    checkpoint continues after it, and the log says so. ``partitioning`` is what a new lake is divided by (the day by
    default). Removes what a crash left behind. Raises UsageError where the lake belongs to another stream or is divided
    otherwise, the checkpoint to another lake, or the checkpoint was superseded; SinkError where
    the lake is damaged.
    """
    log = CommitLog(root)
    known, held, begun = _looked_at(root, checkpoint, stream, partitioning)
    if not begun:
        _drop_unfinished_start(checkpoint)
    if known is None:
        return _create(log, checkpoint, stream, columns, partitioning or BY_DAY)
    _check_place(log)
    from tailrace.lake.store import checkpoint as log_checkpoint  # noqa: PLC0415  Arrow; on the driver only

    with durable.locked(log.layout.lock):
        log_checkpoint.drop_torn(log.layout)
    with log.locked(opening=True) as found:
        if isinstance(root, Path):  # what was read before may have been replaced; in a store each is a request (_give)
            known, held, begun = _looked_at(root, checkpoint, stream, partitioning)
            if known is None:
                raise SinkError(f"{root} is no longer a lake: lake.json is gone")
        created = log.create(str(known["id"]), known["columns"], partitioning_of(known), str(known["claim"]))
        head = created if created is not None and isinstance(root, ObjectPlace) else found
        problems = log.problems()
        if problems:
            raise SinkError(problems[0], hint="Restore it from a copy; --verify says what else is wrong")
        require_changed(log, known)
        continued = held if begun and gap is None else None
        if continued is not None:  # before anything goes: data files of a log that was set back may be wanted again
            _check_held(log, head, checkpoint, known, continued)
        if isinstance(log.layout.root, Path):  # of a lake in a store when it is given (``_give``)
            settle(log.layout, log.newest_batch(head))
            QuarantineLedger.read(log.layout)  # raises if it was lost, so that nobody begins another one
            remove_leftovers(log)
        if continued is not None:
            opening = _opening(known, continued, checkpoint / CHECKPOINT_FILE)
            _give(log, head, known, opening.claim)
            return replace(opening, entries=_entries(head))
        snapshot = head.newest.planned.snapshot if head.newest is not None and gap is None else None
        return _take_over(log, head, checkpoint, known, gap, snapshot=snapshot or None)


def _check_place(log: CommitLog) -> None:
    """Raise SinkError where a lake cannot lie there. The state directory of a lake in a store is made."""
    layout = log.layout
    if isinstance(layout.root, ObjectPlace):
        require_state(layout.root)
        check_store(layout.root)
        with durable.writing(layout.local):
            durable.make_private(layout.local)
    check_file_system(layout.local)


def _give(log: CommitLog, head: Head, known: Mapping[str, Any], claim: str, *, new: bool = False) -> None:
    """Write that the lake is to be written under ``claim``. In a store it is written from this machine, and from no
    other, from then on; then the leftovers go (``session.py``). The caller holds the lock."""
    layout = log.layout
    if isinstance(layout.root, Path):
        if new or known["claim"] != claim:
            write_sealed(layout.identity, {**known, "claim": claim})
        return
    session = begin_session(layout)
    given = {**known, "claim": claim, SESSION: session}

    def made(there: dict[str, object] | None) -> dict[str, object] | None:
        if new or there is None:
            return given if new and there is None else None
        in_force, note = divided(log, there)
        return {**given, **note} if in_force == known else None

    place = layout.identity
    assert isinstance(place, ObjectPlace)
    written = exchange_sealed(place, made)
    durable.step("claim.lake")
    if new:
        open_index(layout, session, None, ())
        return
    try:
        log.write(Commit(head.number + 1, "start", claim, head.digest, newest=head.newest))
    except StoreAwayError:
        raise
    except SinkError as error:
        raise SinkError(
            f"another stream was still writing the lake {layout.root}: {error.message}",
            hint="It can no longer do so. Start again: this stream goes on after what the other one has written",
        ) from error
    durable.step("claim.start")
    if CHANGING in written:  # its commit can no longer come
        exchange_sealed(place, lambda there: given if there == written else None)
        durable.step("claim.note")
    aside = head.newest is not None and head.newest.aside
    open_index(layout, session, log.newest_batch(head) if aside else None, log.checked())
    durable.step("claim.quarantine")
    remove_leftovers(log)


def check_opening(
    root: LakeRoot, checkpoint: Path, stream: Mapping[str, Any], *, partitioning: Partitioning | None = None
) -> Head | None:
    """Raise what ``open_lake`` raises where lake, checkpoint and stream do not belong together, and write nothing.
    Returns what the lake's log ends with; ``None`` where a lake would be begun."""
    known, held, begun = _looked_at(root, checkpoint, stream, partitioning)
    if known is None:
        return None
    log = CommitLog(root)
    head = log.head()
    if held is not None and begun:
        _check_held(log, head, checkpoint, known, held)
    return head


def _looked_at(
    root: LakeRoot, checkpoint: Path, stream: Mapping[str, Any], partitioning: Partitioning | None
) -> tuple[dict[str, Any] | None, dict[str, Any] | None, bool]:
    """The lake's identity, what the checkpoint holds, and whether a query has begun there."""
    known = read_identity(root)
    _check_stream(root, known, stream)
    _check_partitioning(root, known, partitioning)
    held, begun = read_held(checkpoint), _has_begun(checkpoint)
    if begun and held is None:
        raise UsageError(
            f"the checkpoint {checkpoint} was not made for a lake",
            hint="Give a checkpoint directory of its own to each lake",
        )
    if begun and known is None:
        raise UsageError(
            f"the checkpoint {checkpoint} continues a lake, and there is none at {root}",
            hint="Give the lake's new place, or a fresh checkpoint directory to begin again",
        )
    return known, held, begun


def _check_held(
    log: CommitLog, head: Head, checkpoint: Path, known: Mapping[str, Any], held: Mapping[str, Any]
) -> None:
    root = log.layout.root
    _check_lake(root, checkpoint, known, held)
    require_seen(log, head, checkpoint, held)
    _check_claim(root, checkpoint, known, held)


def read_identity(root: LakeRoot) -> dict[str, Any] | None:
    """The content of ``lake.json``, or ``None`` where ``root`` is not a lake (it may be missing or empty)."""
    log = CommitLog(root)
    path = log.layout.identity
    value = read_sealed(path)
    if value is not None:
        return _checked(log, value)
    if root.exists() or isinstance(root, ObjectPlace):
        if isinstance(root, Path) and not root.is_dir():
            raise UsageError(f"{root} is not a directory")
        foreign = sorted(entry.name for entry in root.iterdir() if entry.name not in _OWN_NAMES and _is_there(entry))
        if foreign:
            raise UsageError(
                f"{root} is not empty and not a lake of Tailrace (it holds {foreign[0]!r})",
                hint="Give a directory of its own",
            )
        if delta.is_table(root) and any(True for _ in (root / delta.LOG).iterdir()):
            raise UsageError(
                f"{root} is a Delta table, and not a lake of Tailrace (it has no {path.name})",
                hint="Give a directory of its own",
            )
    return None


def require_changed(log: CommitLog, known: Mapping[str, Any]) -> None:
    """Raise SinkError where ``lake.json``, in force and ``known``, is older than the newest change in the log. The
    caller holds the lock."""
    require_changed_in(log, known, log.state())


def require_changed_in(log: CommitLog, known: Mapping[str, Any], state: LogState) -> None:
    """The same, where the log adds up to ``state``, which was read without the lock before ``known`` or after it."""
    if set_back(known, state):
        now = read_identity(log.layout.root)
        if now is not None and not set_back(now, state):
            raise SinkError(f"the lake {log.layout.root} has just been changed", hint="Try again")
        _refuse_older(log)


def _refuse_older(log: CommitLog) -> NoReturn:
    raise SinkError(
        f"{log.layout.identity} is older than the lake's log: its stream and columns are those of before a change",
        hint="Restore it from a newer copy: without it nobody can say which stream the lake holds",
    )


def _is_there(entry: LakeRoot) -> bool:
    """A store that keeps files may list the folders of objects that have gone."""
    return isinstance(entry, Path) or entry.is_file() or entry.is_dir()


def differences(known: Mapping[str, Any], stream: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """In what ``stream`` differs from that of the lake with this ``lake.json``: keys, what is there, what is here."""
    there, here = _flat(known["stream"]), _flat(stream)
    return [
        (key, there.get(key), here.get(key))
        for key in sorted({*there, *here})
        # A server may not tell its replica set's id.
        if there.get(key) != here.get(key)
        and not (key.startswith("replicaSets.") and "" in (there.get(key), here.get(key)))
    ]


def partitioning_of(known: Mapping[str, Any]) -> Partitioning:
    """What the lake with this ``lake.json`` is divided by: the day if the file says nothing."""
    names = known.get("partitionBy", ["day"])
    if not isinstance(names, list):
        raise SinkError("lake.json is damaged: partitionBy is not a list")
    return guarded(lambda: Partitioning.of(names), "lake.json")


def _check_partitioning(root: LakeRoot, known: Mapping[str, Any] | None, asked: Partitioning | None) -> None:
    there = None if known is None else partitioning_of(known)
    if there is not None and asked is not None and asked != there:
        raise UsageError(
            f"the lake {root} is partitioned by {', '.join(there.names)}, not by {', '.join(asked.names)}",
            hint="A lake keeps its partitions: leave partitionBy out, or begin another lake",
        )


def metadata_after(known: Mapping[str, Any], state: LogState, commit: Commit) -> dict[str, Any]:
    """The table's ``metaData`` action in ``commit``, which follows ``state`` in a lake with this ``lake.json``. The
    state is moved on by it."""
    state.apply(commit)
    created = guarded(lambda: datetime.fromisoformat(str(known["created"])), "lake.json")
    partitioning = partitioning_of(known)
    schema = table_schema(known["columns"], partitioning)
    return table_metadata(
        str(known["id"]),
        schema,
        partitioning,
        state.gaps,
        created,
        erasures=state.erasures,
        versions=state.versions,
        changes=state.changes,
        begins=state.begins,
    )


def _checked(log: CommitLog, value: dict[str, Any]) -> dict[str, Any]:
    """What ``lake.json`` holds, in force and whole."""
    path, (value, _) = log.layout.identity, divided(log, value)
    check_format(value, path)
    for key, kind in (("id", str), ("claim", str), ("stream", dict), ("columns", list), ("created", str)):
        if not isinstance(value.get(key), kind):
            raise SinkError(f"{path} is damaged: no {key}")
    return value


def in_force(log: CommitLog, head: Head) -> dict[str, Any]:
    """The content of ``lake.json``, for whoever commits after ``head``. Raises SinkError where it is gone, or is of
    before the newest change. The caller holds the lake's lock."""
    root = log.layout.root
    known = read_identity(root) if log.identity is None else _checked(log, log.identity)
    if known is None:
        raise SinkError(f"{root} is no longer a lake: lake.json is gone")
    if is_older(known, head.changed):
        _refuse_older(log)
    return known


def check_claim(log: CommitLog, head: Head, claim: str) -> dict[str, Any]:
    """Refuse to commit under a claim that is not, or no longer, the lake's. The caller holds the lake's lock. Returns
    the content of ``lake.json``."""
    root, known = log.layout.root, in_force(log, head)
    if known["claim"] != claim:
        raise SinkError(
            f"another checkpoint has taken over the lake {root}",
            hint="Only one stream at a time may write a lake; this one stops here",
        )
    return known


def _has_begun(checkpoint: Path) -> bool:
    """Whether Spark has planned a micro-batch in this checkpoint."""
    offsets = checkpoint / "offsets"
    return offsets.is_dir() and any(entry.name.isdigit() for entry in offsets.iterdir())


def _drop_unfinished_start(checkpoint: Path) -> None:
    """Remove what Spark leaves if it could not write the first micro-batch's offsets: a full disk, or a kill. Otherwise
    Spark would refuse the checkpoint for good (STATE_STORE_CHECKPOINT_LOCATION_NOT_EMPTY, PySpark 4.3)."""
    for name in (".0.*.tmp", "..0.*.tmp.crc"):
        for path in (checkpoint / "offsets").glob(name):
            path.unlink(missing_ok=True)


def _check_stream(root: LakeRoot, known: Mapping[str, Any] | None, stream: Mapping[str, Any]) -> None:
    if known is None:
        return
    for difference in differences(known, stream):
        refuse_other(root, *difference)


def refuse_other(root: LakeRoot, key: str, there: object, here: object) -> NoReturn:
    """Raise UsageError for a stream that differs from the lake's in ``key``."""
    if key.startswith("masks."):
        raise UsageError(
            f"the lake {root} is masked differently: the {_MASKED_BY[key]} {shown(there)} there and {shown(here)} here",
            hint="Give the masks and the key that it was begun with, or begin another lake: what is in this "
            "one stays as it was masked",
        )
    changes = key.startswith(CHANGEABLE)
    raise UsageError(
        f"the lake {root} belongs to another stream: {key} is {shown(there)} there and {shown(here)} here",
        hint="Give this stream a lake of its own" + (", or change the lake: tailrace lake change" if changes else ""),
    )


def _flat(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested keys joined by dots, so that a difference is named as closely as can be."""
    flat: dict[str, Any] = {}
    for key, inner in value.items():
        if isinstance(inner, Mapping):
            flat.update(_flat(inner, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = inner
    return flat


def shown(value: object) -> str:
    """A value of the identity, for a sentence."""
    if value is None:
        return "not set"
    text = json.dumps(value, sort_keys=True)
    return text if len(text) <= 200 else f"{text[:200]}..."


def _check_lake(root: LakeRoot, checkpoint: Path, known: Mapping[str, Any], held: Mapping[str, Any]) -> None:
    if held.get("lake") != known["id"]:
        raise UsageError(
            f"the checkpoint {checkpoint} belongs to another lake than {root}",
            hint="Give the checkpoint of this lake, or a fresh directory: it goes on after the lake's last event",
        )


def _check_claim(root: LakeRoot, checkpoint: Path, known: Mapping[str, Any], held: Mapping[str, Any]) -> None:
    if held.get("claim") != known["claim"]:
        raise UsageError(
            f"the checkpoint {checkpoint} was superseded: another one has written the lake {root} since",
            hint="Give the newer checkpoint, or a fresh directory: it goes on after the lake's last event",
        )


def _opening(known: Mapping[str, Any], held: Mapping[str, Any], where: Path) -> Opening:
    def read() -> Opening:
        after, start = held.get("after"), held.get("start")
        if after is not None and not isinstance(after, str):
            raise TypeError("after is not a string")
        time = None if start is None else ClusterTime.of(int(start[0]), int(start[1]))
        snapshot = held.get("snapshot")
        if snapshot is not None and not isinstance(snapshot, str):
            raise TypeError("snapshot is not a string")
        return Opening(str(known["id"]), str(known["claim"]), after, time, snapshot)

    return guarded(read, where)


def _create(
    log: CommitLog,
    checkpoint: Path,
    stream: Mapping[str, Any],
    columns: Sequence[Mapping[str, Any]],
    partitioning: Partitioning,
) -> Opening:
    layout = log.layout
    if isinstance(layout.root, Path):
        with durable.writing(layout.root):
            durable.make_private(layout.root)
            for directory in (layout.local, layout.root / delta.LOG, layout.staging):
                durable.make_directory(directory)
    _check_place(log)
    with durable.locked(layout.lock):
        if read_identity(layout.root) is not None:
            raise UsageError(f"another process has just made a lake at {layout.root}")
        known = {
            "format": FORMAT,
            "id": str(uuid.uuid4()),
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "stream": dict(stream),
            "columns": [dict(column) for column in columns],
            "partitionBy": list(partitioning.names),
        }
        opening = _take_over(log, log.head(), checkpoint, known, None, new=True)
        log.create(opening.lake_id, columns, partitioning, opening.claim)
        return opening


def _take_over(
    log: CommitLog,
    head: Head,
    checkpoint: Path,
    known: Mapping[str, Any],
    gap: Gap | None,
    *,
    snapshot: str | None = None,
    new: bool = False,
) -> Opening:
    """Give the lake to ``checkpoint``. The checkpoint's file comes first: a crash between the two leaves the lake with
    its old owner and a checkpoint that has not begun, which takes over again."""
    claim = str(uuid.uuid4())
    with durable.writing(checkpoint):
        durable.make_private(checkpoint)
    after = head.last_token
    start = gap.until if gap is not None else None
    if start is None and after is None and snapshot is None and head.reached is not None:
        start = head.reached.tick()  # nothing has happened so far, and what has since is not to be missed
    changed = _changed_at(log)
    if (
        start is None
        and snapshot is None
        and changed is not None
        and (after is None or changed > cluster_time_of(after))
    ):
        start = changed.tick()  # what a changed stream gives after the last event was added up to there
    held: dict[str, Any] = {"lake": known["id"], "claim": claim, "after": after}
    if start is not None:
        held["start"] = [start.seconds, start.increment]
    if snapshot is not None:
        held["snapshot"] = snapshot
    write_held(checkpoint, held, head)
    durable.step("claim.checkpoint")
    _give(log, head, known, claim, new=new)
    if gap is not None:
        _write_gap(log, claim, known, gap)
    return Opening(str(known["id"]), claim, after, start, snapshot, _entries(head))


def _changed_at(log: CommitLog) -> ClusterTime | None:
    """How far the stream had been read when the lake was last changed."""
    changes = log.state().changes
    return changes[-1].until if changes else None


def _entries(head: Head) -> Mapping[str, EntryMark]:
    return {} if head.newest is None else head.newest.planned.entries


def _write_gap(log: CommitLog, claim: str, known: Mapping[str, Any], gap: Gap) -> None:
    """The log says what will be missing before anything after the gap can come. The caller holds the lock."""
    head = log.head()
    commit = Commit(head.number + 1, "gap", claim, head.digest, gap=gap, newest=head.newest)
    log.write(commit, metadata_after(known, log.state(), commit))
