"""When the oplog has lost events before the lake got them: finding the gap, and continuing after it.

No checkpoint and no start option helps then, since a lake continues after its last event. The owner may accept the gap
(``acceptGap``): what is missing is recorded in the lake's log, and the stream continues with the oldest entry of the
oplog.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.errors import ChangeStreamHistoryLost, UsageError
from tailrace.lake.spark.planning.deployment import Deployment
from tailrace.lake.spark.planning.opening import open_deployment
from tailrace.lake.spark.query import options as source_options
from tailrace.lake.spark.query.offset import Offset
from tailrace.lake.spark.query.options import ReadOptions, Start
from tailrace.lake.spark.query.snapshot_position import SnapshotPosition
from tailrace.lake.store.commit_log import CommitLog
from tailrace.lake.store.delta_log import guarded
from tailrace.lake.store.identity import read_identity
from tailrace.lake.store.lake_root import LakeRoot
from tailrace.lake.store.layout import cluster_time_of
from tailrace.lake.store.manifest import Gap

HISTORY_HINT: Final = (
    "The oplog has lost events that the lake does not have yet. If 'tailrace archive' has them, name its directory "
    "(source.archive in the pipeline file, the option archive). To go on without them, start once with acceptGap "
    "(tailrace run --accept-gap, or lake.acceptGap in the pipeline file): the lake's log then says what is missing, "
    "and the stream goes on at the oldest entry of the oplog. Load the gap from the collections, and keep a longer "
    "oplog (replSetResizeOplog, minRetentionHours)"
)


def find_gap(root: LakeRoot, checkpoint: Path, source: Mapping[str, str]) -> Gap | None:
    """What the lake at ``root`` has missed for good, or ``None`` where the oplog still holds what comes next. Connects
    to MongoDB."""
    if read_identity(root) is None:
        return None
    head = CommitLog(root).head()
    last_token = head.last_token
    options = source_options.parse(source)
    deployment = open_deployment(options)
    try:
        held = planned_position(checkpoint)
        if held is not None:
            position = deployment.offset(held)
            after, copied = position.cluster_time, position.snapshot
        elif last_token is not None:
            after = cluster_time_of(last_token)
            text = head.newest.planned.snapshot if head.newest is not None else ""
            copied = copied_position(text) if text else None
        else:
            return None
        if not _is_lost(deployment, options, after, begun=held is not None):
            return None
        if copied is not None and not copied.state.is_complete:
            raise UsageError(
                "the oplog has lost what came after the time of the lake's copy, but the copy had not ended: it cannot "
                "be completed",
                hint="Begin a new lake, with an oplog (or an archive) that reaches back for as long as the copy takes",
            )
        return Gap(last_token, after, deployment.oldest())
    finally:
        deployment.close()


def copied_position(text: str) -> SnapshotPosition:
    """How far a copy has come, from the text that a commit of the lake holds. Raises SinkError if it is damaged."""
    return guarded(lambda: SnapshotPosition.from_json(json.loads(text)), "the lake's newest commit")


def _is_lost(deployment: Deployment, options: ReadOptions, after: ClusterTime, *, begun: bool) -> bool:
    try:
        if begun:
            deployment.require_history(deployment.at(after))
        else:
            _starting_at(options, after)
    except ChangeStreamHistoryLost:
        return True
    return False


def _starting_at(options: ReadOptions, time: ClusterTime) -> None:
    """What a fresh checkpoint does, as far as it can fail for lost history."""
    again = open_deployment(replace(options, start=Start("startAtOperationTime", time=time)))
    try:
        again.start("now")
    finally:
        again.close()


def planned_position(checkpoint: Path) -> dict[str, object] | None:
    """The offset after which a Spark checkpoint reads next: the end of its newest micro-batch if that is committed,
    of the one before if not. ``None`` where no micro-batch was planned, or only the first was."""
    planned, done = _numbers(checkpoint / "offsets"), _numbers(checkpoint / "commits")
    if not planned:
        return None
    newest = max(planned)
    number = newest if newest in done else newest - 1
    path = checkpoint / "offsets" / str(number)
    try:
        value = json.loads(path.read_text(encoding="utf-8").splitlines()[-1])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, IndexError, RecursionError) as error:
        raise UsageError(f"{path} is damaged: {error}") from None
    if not isinstance(value, dict):
        raise UsageError(f"{path} is damaged: its offset is not a JSON object")
    Offset.from_json(value)
    return value


def set_aside(checkpoint: Path, gap: Gap) -> Path | None:
    """Move a checkpoint that cannot be continued out of the way, so that a new one takes its place. Returns where it
    is."""
    if not (checkpoint / "offsets").is_dir():
        return None
    place = checkpoint.with_name(f"{checkpoint.name}.before-{gap.until.seconds}-{gap.until.increment}")
    if place.exists():
        raise UsageError(f"{place} is in the way of the checkpoint that is set aside", hint="Remove or rename it")
    checkpoint.rename(place)
    return place


def _numbers(directory: Path) -> set[int]:
    if not directory.is_dir():
        return set()
    return {int(path.name) for path in directory.iterdir() if path.name.isascii() and path.name.isdigit()}
