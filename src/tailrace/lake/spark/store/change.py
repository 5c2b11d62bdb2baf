"""Change what a lake holds: a wider stream, other columns; backfilled from the archive and the oplog. No Spark session
is needed: a slice is read and written here as a task does it.

The lake is then the one that would have been written with the new definition from the beginning. Columns are rebuilt
from the column ``event``. Events of a wider stream are read once more, from where the lake begins up to where its
stream stands, by the same plan and with the same server version; and every row that the lake has must come out again.
What cannot be known later (a looked-up document, an erased event) is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tailrace.base.object_place import is_object_uri
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.plan.profile import for_people, profile_for
from tailrace.errors import InvalidResumeToken, UsageError
from tailrace.lake.spark.planning.opening import open_deployment
from tailrace.lake.spark.query import options as source_options
from tailrace.lake.spark.query.options import SERVER_TEXTS, ReadOptions, Start
from tailrace.lake.spark.query.schema import DOCUMENT_COLUMNS, spark_schema
from tailrace.lake.spark.store.stream import lake_columns, lake_source, stream_of, with_columns_of
from tailrace.lake.store.changing import (
    LakeBefore,
    changed_name,
    commit_change,
    discard,
    lake_before,
    new_claim,
    set_superseded_aside,
)
from tailrace.lake.store.identity import CHANGEABLE, differences, read_identity, refuse_other
from tailrace.lake.store.lake_root import LakeRoot, writable_root
from tailrace.lake.store.layout import LakeLayout, cluster_time_of
from tailrace.lake.store.local_path import local_path
from tailrace.lake.store.manifest import LakeChange, StagedFile

if TYPE_CHECKING:
    import pyarrow as pa

    from tailrace.core.event.quarantined import QuarantinedEvent
    from tailrace.lake.spark.planning.deployment import Deployment
    from tailrace.lake.spark.planning.input_partition import OplogSlice
    from tailrace.lake.store.changed_rows import Exchange

_EVENT: Final = "event"
_COPIED: Final = "snapshot"
#: The modes of images that give the same whenever they are asked, or an error.
_REPEATABLE: Final = (None, "default", "off", "required")
#: What gives another value each time.
_BY_CHANCE: Final = (b"$rand", b"$sampleRate", b"$$NOW", b"$$CLUSTER_TIME")
_OTHERWISE: Final = "Change the lake from now on (--from-now), or begin another lake"


@dataclass(frozen=True, slots=True)
class ChangeReport:
    """What was changed, or would be: ``differences`` are keys with the values before and after. After the cluster time
    ``since`` the lake holds what it would hold if it had been begun in this way (``None``: from its beginning);
    ``until`` is where its stream stands. ``rows`` events were added, ``made`` files took the place of ``gone`` ones.
    ``superseded`` is where the checkpoint lies that the lake no longer takes."""

    differences: tuple[tuple[str, Any, Any], ...]
    since: ClusterTime | None = None
    until: ClusterTime | None = None
    backfills: bool = False
    rows: int = 0
    gone: int = 0
    made: int = 0
    superseded: Path | None = None


def change_lake(
    source: Mapping[str, str],
    lake: LakeRoot | str,
    *,
    state: Path | str | None = None,
    checkpoint: Path | str | None = None,
    from_now: bool = False,
    dry_run: bool = False,
) -> ChangeReport:
    """Make the lake at ``lake`` one of the change stream that ``source`` describes: options and columns of
    ``write_stream``. The stream into the lake must be stopped; readers need not. Of a lake in an object store ``state``
    is the local directory of its stream. ``archive`` among the options may be in an object store.

    With ``from_now`` nothing is read again: the lake holds the new stream from where it stands, and its log says so.
    ``dry_run`` finds out what would be done, as far as no event has to be read, and changes nothing.

    The next stream begins with a fresh checkpoint, and goes on where the old one stood. The older one, at
    ``checkpoint`` or next to the lake, is moved aside.

    Raises UsageError where the lake belongs to another deployment, is masked otherwise, or the change cannot be made
    exactly; ChangeStreamHistoryLost (286) where neither oplog nor archive reaches back; SourceError; SinkError;
    LakeFullError. The lake is then as it was, or, of a lake in a store that has not answered, perhaps changed: the same
    call again finds that out.
    """
    root = writable_root(lake, state)
    where = local_path(checkpoint, "the checkpoint") if checkpoint is not None else LakeLayout(root).default_checkpoint
    if read_identity(root) is None:
        raise UsageError(f"{root} is not a lake of Tailrace", hint="tailrace run begins one")
    source, archive = _without_stored_archive(lake_source(with_columns_of(root, source)))
    stream = stream_of(source)
    options = source_options.parse(source)
    options = options if archive is None else replace(options, archive=archive)
    with lake_before(root) as before:
        found = tuple(differences(before.known, stream))
        for difference in found:
            if not difference[0].startswith(CHANGEABLE):
                refuse_other(root, *difference)
        before.partitioning.check_columns(options.columns)
        if not found:
            return ChangeReport((), superseded=None if dry_run else set_superseded_aside(root, where))
        work = _ChangeWork(before, options, found, from_now=from_now)
        report = work.plan()
        if dry_run:
            return report
        report = work.carry_out(report, stream)
    return replace(report, superseded=set_superseded_aside(root, where))


def _without_stored_archive(source: Mapping[str, str]) -> tuple[dict[str, str], str | None]:
    """The options without an archive in an object store, and its URI. Spark's workers take directories only."""
    given = {name: one for name, one in source.items() if name.lower() == "archive" and is_object_uri(one)}
    return {name: one for name, one in source.items() if name not in given}, next(iter(given.values()), None)


class _ChangeWork:
    """One change of a lake: checked, planned, made."""

    def __init__(
        self, before: LakeBefore, options: ReadOptions, found: Sequence[tuple[str, Any, Any]], *, from_now: bool
    ) -> None:
        self._before = before
        self._options = options
        self._found = tuple(found)
        keys = [key for key, _, _ in found]
        self._new_columns = any(key in ("columns", "documents") for key in keys)
        self._new_stream = any(key.startswith("settings.") for key in keys)
        self._backfills = self._new_stream and not from_now
        stream = before.known["stream"]
        self._old_columns: Sequence[str] = stream.get("columns") or [one["name"] for one in before.known["columns"]]
        self._old_documents = str(stream.get("documents"))

    def plan(self) -> ChangeReport:
        """What is to be done. Raises an error for whatever prevents it, as far as that is known before an event is
        read."""
        until, since = _read_to(self._before), None
        if self._new_stream:
            self._check_continued()
        if self._backfills:
            since = _backfilled_after(self._before)
            self._check_repeatable()
            deployment = self._opened(since)
            try:
                self._slices(deployment, since, _required(until), token_version_of(self._before), plan_only=True)
            finally:
                deployment.close()
        else:
            if self._new_stream:
                since = until
            if self._new_columns:
                self._check_columns()
        return ChangeReport(self._found, since, until, self._backfills)

    def _check_continued(self) -> None:
        """Refuse what a fresh checkpoint could not go on with."""
        if self._options.exact:
            raise UsageError(
                "a lake with exact images cannot be changed: they are computed from the documents of one stream",
                hint="Begin another lake, with a directory of its own for the images",
            )
        newest = self._before.head.newest
        if newest is not None and newest.planned.snapshot:
            raise UsageError(
                "the lake has only the copy of the documents so far, or a part of it: the rest would be of another "
                "stream",
                hint="Let its stream run until there is a change after the copy, or begin another lake",
            )

    def carry_out(self, report: ChangeReport, stream: Mapping[str, Any]) -> ChangeReport:
        """Make the change, in one commit. Until then the lake is as it was."""
        made: list[StagedFile] = []
        before = self._before
        try:
            if self._backfills:
                exchange = self._backfilled(_required(report.since), _required(report.until), made)
                gone, kept, rows = exchange.gone, exchange.made, exchange.added
            elif self._new_columns:
                for file in self._rewritten():
                    made.append(file)
                gone, kept, rows = tuple(before.state.in_order), tuple(made), 0
            else:
                gone, kept, rows = (), (), 0
            keys = tuple(key for key, _, _ in self._found)
            change = LakeChange(new_claim(), keys, report.since, report.until, rows)
            columns = lake_columns(self._options.columns, self._options.documents)
            commit_change(before, change, stream, columns, gone=gone, made=kept)
        finally:
            discard(before, made)
        return replace(report, rows=rows, gone=len(gone), made=len(kept))

    # -- other columns of the events that are there ------------------------------------------------------------------

    def _check_columns(self) -> None:
        """Columns are made of the column ``event``; without it some can be left out."""
        if any(reason.startswith("a column cannot take it") for reason in self._before.aside.values()):
            raise UsageError(
                "the quarantine holds events that a column could not take: whether the new columns can is not known",
                hint="Erase those events (tailrace lake erase), or begin another lake",
            )
        if _EVENT in self._old_columns:
            return
        more = [name for name in self._options.columns if name not in self._old_columns]
        documents = self._options.documents != self._old_documents and set(DOCUMENT_COLUMNS) & set(self._old_columns)
        if more or documents:
            raise UsageError(
                "the lake has no column 'event', of which other columns could be made "
                f"({', '.join(more) or 'documents'})",
                hint="Without it columns can only be left out. Begin another lake",
            )

    def _rewritten(self) -> Iterator[StagedFile]:
        from tailrace.lake.store.changed_rows import rewritten  # noqa: PLC0415  Arrow

        names = self._options.columns
        if _EVENT in self._old_columns:
            return rewritten(self._before, [_EVENT], self._from_events, self._footer())
        return rewritten(
            self._before, names, lambda batches: (one.select(list(names)) for one in batches), self._footer()
        )

    def _from_events(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from tailrace.core.event.event_block import EventBlock  # noqa: PLC0415
        from tailrace.lake.spark.reading.columns import ROWS_MAX_WRITTEN, EventColumns  # noqa: PLC0415

        columns = EventColumns(self._options.columns, self._options.documents, rows_max=ROWS_MAX_WRITTEN)
        return columns.batches(EventBlock.of_bson(batch.column(0).to_pylist()) for batch in batches)

    def _footer(self) -> dict[bytes, bytes]:
        from tailrace.lake.store.part_writer import spark_metadata  # noqa: PLC0415

        return spark_metadata(spark_schema(self._options.columns, self._options.documents).json())

    # -- events of a wider stream ------------------------------------------------------------------------------------

    def _check_repeatable(self) -> None:
        """Refuse a stream whose events cannot be given again as they would have been."""
        for name in SERVER_TEXTS:
            mode = self._options.stage.get(name)
            if mode not in _REPEATABLE:
                raise UsageError(
                    f"{name}={mode} cannot be backfilled: the documents that were there then are not known now",
                    hint=_OTHERWISE,
                )
        by_chance = [one.decode() for one in _BY_CHANCE if any(one in stage for stage in self._options.pipeline)]
        if by_chance:
            raise UsageError(
                f"the pipeline has {', '.join(by_chance)}, which gives another value each time, and cannot be "
                "backfilled",
                hint=_OTHERWISE,
            )
        if _EVENT not in self._old_columns or _EVENT not in self._options.columns:
            documents = set(DOCUMENT_COLUMNS) & set(self._old_columns) & set(self._options.columns)
            if documents and self._options.documents != self._old_documents:
                raise UsageError(
                    "the lake's events cannot be compared with those that are read again: there is no column 'event', "
                    "and 'documents' is to change too",
                    hint="Change the stream first, and 'documents' then",
                )

    def _opened(self, since: ClusterTime) -> Deployment:
        start = Start("startAtOperationTime", time=since.tick())
        return open_deployment(replace(self._options, start=start, partitions=1, partitions_named=False))

    def _slices(
        self, deployment: Deployment, since: ClusterTime, until: ClusterTime, token_version: int, *, plan_only: bool
    ) -> list[OplogSlice]:
        """What is read again: the history is there, and is the lake's own."""
        position = replace(deployment.start("oldest"), token_version=token_version)
        newest = self._before.head.newest
        if newest is not None:
            deployment.require_marked(newest.planned.entries, deployment.at(deployment.newest()))
        note = self._before.state.versions[-1]
        if profile_for(deployment.server_version) != profile_for(note.version):
            raise UsageError(
                f"the lake holds events of MongoDB {for_people(note.version)}, and the deployment is of "
                f"{for_people(deployment.server_version)} by now: it is not known since when",
                hint=_OTHERWISE,
            )
        if plan_only:
            return []
        deployment.settle(until)
        found: list[OplogSlice] = []
        while position.cluster_time < until and not position.invalidated:
            end = deployment.end(position, until, None)  # which is earlier where a shard was removed
            found += [replace(one, server_version=note.version) for one in deployment.slices(position, end)]
            position = end
        return found

    def _backfilled(self, since: ClusterTime, until: ClusterTime, made: list[StagedFile]) -> Exchange:
        from tailrace.lake.spark.reading.columns import ROWS_MAX_WRITTEN  # noqa: PLC0415
        from tailrace.lake.spark.reading.slice_reader import read_slice  # noqa: PLC0415
        from tailrace.lake.store.changed_rows import compared  # noqa: PLC0415
        from tailrace.lake.store.part_writer import FileLimits, PartWriter  # noqa: PLC0415

        before, options = self._before, self._options
        deployment = self._opened(since)
        try:
            slices = self._slices(deployment, since, until, token_version_of(before), plan_only=False)
        finally:
            deployment.close()
        claim = new_claim()
        writer = PartWriter(
            before.root,
            f"merge-{claim}",
            limits=FileLimits(),
            metadata=self._footer(),
            partitioning=before.partitioning,
            name=changed_name,
            one_token=max((len(one.shards) for one in slices), default=1) or 1,
        )
        aside: list[QuarantinedEvent] = []
        batches = (
            batch for one in slices for batch in read_slice(options, one, rows_max=ROWS_MAX_WRITTEN, aside=aside)
        )
        seen: set[str] = set()
        made += writer.write_all(_noting(batches, before.aside, seen))
        self._check_aside(aside, seen)
        common = [name for name in self._old_columns if name in options.columns]
        if _EVENT in common:
            common = ["token", _EVENT]
        return compared(before, before.state.in_order, made, common, keep=not self._new_columns)

    def _check_aside(self, aside: Sequence[QuarantinedEvent], given: set[str]) -> None:
        """The events that cannot be written must be those in the lake's quarantine."""
        found = {one.token: one.reason for one in aside}
        held = self._before.aside
        for token in sorted({*found, *held, *given}):
            if token in found and token not in held:
                raise UsageError(f"the event with the token {token} cannot be written: {found[token]}", hint=_OTHERWISE)
            if token in given or token not in found:
                raise UsageError(
                    f"the event with the token {token} is in the lake's quarantine, and the new stream does not put "
                    "it aside",
                    hint="Erase it (tailrace lake erase), or begin another lake",
                )


def _noting(batches: Iterable[pa.RecordBatch], held: Mapping[str, str], seen: set[str]) -> Iterator[pa.RecordBatch]:
    """The batches. ``seen`` gets the tokens among their rows that are in the quarantine, ``held``."""
    for batch in batches:
        if held:
            seen.update(token for token in batch.column("token").to_pylist() if token in held)
        yield batch


def _read_to(before: LakeBefore) -> ClusterTime | None:
    """The cluster time that the lake's stream was read to; of its last event where that is not known."""
    token, reached = before.head.last_token, before.head.reached
    last = None if token is None else cluster_time_of(token)
    return max((time for time in (last, reached) if time is not None), default=None)


def _required(time: ClusterTime | None) -> ClusterTime:
    assert time is not None
    return time


def _backfilled_after(before: LakeBefore) -> ClusterTime:
    """The cluster time after which the lake's events are read again. Raises UsageError where they cannot be."""
    state = before.state
    if not state.files or before.head.newest is None:
        raise UsageError(
            f"the lake {before.root} has no events yet",
            hint="Remove it with its checkpoint and start it again, or change it from now on (--from-now)",
        )
    if state.gaps:
        raise UsageError("the lake has accepted gaps: what would have been missing is not known", hint=_OTHERWISE)
    if any(one.before is None for one in state.erasures):
        raise UsageError(
            "events were erased from the lake: they would come back, since nobody knows which they were",
            hint=_OTHERWISE,
        )
    if len({profile_for(note.version) for note in state.versions}) != 1:
        said = "of several server versions" if state.versions else "of a server version that its log does not name"
        raise UsageError(f"the lake holds events {said}: they cannot be made again exactly", hint=_OTHERWISE)
    if _was_copied(before):
        raise UsageError(
            "the lake began with a copy of the documents (startingFrom: snapshot): what a copy of the new stream would "
            "have held is not known",
            hint=_OTHERWISE,
        )
    begins = state.begins if state.begins is not None else state.versions[0].after
    days = [date.fromisoformat(one.before) for one in state.erasures if one.before is not None]
    if days:  # what came before was taken out
        midnight = datetime(*max(days).timetuple()[:3], tzinfo=UTC)
        begins = max(begins, ClusterTime(ClusterTime.of(int(midnight.timestamp()), 0) - 1))
    if cluster_time_of(state.in_order[0].first_token) <= begins:
        raise UsageError(
            "the lake begins after a token, with events of the same cluster time: which others it would have of that "
            "time is not known",
            hint=_OTHERWISE,
        )
    return begins


def _was_copied(before: LakeBefore) -> bool:
    from tailrace.core import raw_bson  # noqa: PLC0415
    from tailrace.lake.store.changed_rows import first_row  # noqa: PLC0415

    names = before.known["stream"].get("columns", [])
    if "operation_type" in names:
        return bool(first_row(before, "operation_type") == _COPIED)
    if _EVENT not in names:
        return False  # its rows will not come out again
    event = first_row(before, _EVENT)
    kind = raw_bson.find(event, b"operationType")
    return (
        kind is not None
        and kind.type == raw_bson.STRING
        and raw_bson.read_string(event, kind.value_start) == b"snapshot"
    )


def token_version_of(before: LakeBefore) -> int:
    """The version of the lake's tokens, which a server's upgrade does not change for a stream that goes on."""
    from tailrace.core.event.resume_token import version_of  # noqa: PLC0415

    try:
        found = {version_of(file.first_token) for file in before.state.in_order}
    except InvalidResumeToken as error:
        raise UsageError(f"a token of the lake cannot be read: {error.message}", hint=_OTHERWISE) from None
    if len(found) != 1:
        raise UsageError("the lake has tokens of several versions", hint=_OTHERWISE)
    return found.pop()
