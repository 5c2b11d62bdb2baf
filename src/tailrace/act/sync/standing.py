"""The state of a sync, as anybody can see it: from its document on the target, and the source's oplog."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from tailrace.act.sync.indexes import WaitingIndex, waiting
from tailrace.act.sync.progress import SyncProgress
from tailrace.act.sync.settings import SyncSettings
from tailrace.act.sync.state import SyncDocument, SyncState
from tailrace.act.sync.target import answered
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.errors import TailraceError, UsageError
from tailrace.read.source.witness import oplogs_of

if TYPE_CHECKING:
    from tailrace.act.sync.ends import Ends

#: Of a way back whose state is not whole yet.
BEGUN: Final = "begun"
COPY: Final = "copy"
FOLLOW: Final = "follow"
CUT_OVER: Final = "cutOver"
_COUNTED: Final = ("documents", "of", "bytes", "seconds_left", "changes", "changes_per_second")


def look(ends: Ends, settings: SyncSettings) -> SyncProgress:
    """How far the sync is. What the source does not tell now is left out."""
    document = ends.state.read()
    if document is None:
        return SyncProgress(settings.name)
    noted = document.extra.get("progress") or {}
    found = SyncProgress(
        name=document.name,
        phase=document.phase,
        is_consistent=document.is_consistent,
        paused=bool(document.extra.get("paused")),
        owner=document.owner if is_owned(document, ends.state) else None,
        time=document.time,
        blocked_by=_command_of(document.barrier),
        verified=document.extra.get("verified"),
        **{name: noted[name] for name in _COUNTED if noted.get(name) is not None},
    )
    if document.phase == CUT_OVER:
        return replace(found, held_limits=len(held(ends.state)))
    lag, reach = _distances(ends, document.time)
    return replace(found, lag_s=lag, reach_s=reach)


def document_of(state: SyncState) -> SyncDocument:
    """The sync's document. Raises UsageError where there is no such sync."""
    document = state.read()
    if document is None:
        raise UsageError(
            f"there is no sync {state.name!r} on the target",
            hint=f"`tailrace sync SOURCE TARGET` begins one; its state is in the database {state.database}",
        )
    return document


def held(state: SyncState) -> list[WaitingIndex]:
    """The indexes of the target that do not expire documents yet, as they will after a cut-over."""
    return [one for one in waiting(state) if one.there]


def with_fields(progress: SyncProgress, fields: Mapping[str, Any]) -> SyncProgress:
    """The same with what the owner has counted."""
    return replace(progress, **fields)


def _distances(ends: Ends, time: ClusterTime) -> tuple[float | None, float | None]:
    """By how much the position is behind the source's last write, and for how long the oplogs still reach."""
    try:
        oplogs = oplogs_of(ends.deployment).values()
        newest = max(one.newest() for one in oplogs)
        oldest = max(one.oldest()[0] for one in oplogs)
    except TailraceError:
        return None, None
    return float(max(0, newest.seconds - time.seconds)), float(max(0, time.seconds - oldest.seconds))


def _command_of(barrier: Mapping[str, Any] | None) -> str | None:
    """What is carried out, in short: its name and what it is of."""
    if barrier is None:
        return None
    return f"{barrier.get('command', 'a definition')} {barrier.get('namespace', '')}".strip()


def is_owned(document: SyncDocument, state: SyncState) -> bool:
    """Whether somebody holds the lease, by the target's clock."""
    if document.owner is None or document.expires_at is None:
        return False
    free = {"$lte": [{"$ifNull": ["$expiresAt", None]}, "$$NOW"]}
    query = {"_id": document.name, "$expr": free}
    return answered("read the lease of the sync", lambda: state.syncs.find_one(query, {"_id": 1})) is None


def note(state: SyncState, fields: Mapping[str, Any]) -> None:
    """Put fields next to the sync's document, whichever process owns it."""
    change = {"$set": dict(fields)}
    answered("note something about the sync", lambda: state.syncs.update_one({"_id": state.name}, change))


def said_of(settings: SyncSettings) -> dict[str, Any]:
    """What must stay as it is for as long as a sync lives."""
    keys = [{"of": name, "key": list(map(list, key.items()))} for name, key in sorted(settings.shard_keys.items())]
    return {
        "only": list(settings.selection.patterns),
        "except": [] if settings.excluded is None else list(settings.excluded.patterns),
        "rename": [{"from": before, "to": after} for before, after in sorted(settings.renames.items())],
        **({"shardKeys": keys} if keys else {}),
    }


def check_settings(document: SyncDocument, settings: SyncSettings) -> None:
    """Raise UsageError where a sync is to go on with other collections than it began with."""
    before = document.extra.get("settings")
    if before is not None and before != said_of(settings):
        raise UsageError(
            f"the sync {document.name!r} began with other collections or names than those given now",
            hint="Give --only, --except, --rename and --shard-key as when it began, or begin another sync with "
            "another --name",
        )
