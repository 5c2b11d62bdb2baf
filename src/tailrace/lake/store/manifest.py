"""What a commit says, as values: the files it added, with their rows and token ranges, those it replaced, the range of
the stream that it was planned for. How this is written in the log is in ``delta_log.py``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime

from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.oplog.witness import EntryMark
from tailrace.errors import SinkError
from tailrace.lake.store.layout import cluster_time_of, partition_values


@dataclass(frozen=True, slots=True)
class PlannedRange:
    """The part of the stream that Spark planned for a micro-batch: ``after`` < cluster time <= ``until``.

    Spark plans a micro-batch before it runs and replays it with the same range. Its rows may differ then: a ``$match``
    on a document that is looked up sees today's document. So a replay is known by its range.
    """

    after: ClusterTime
    until: ClusterTime
    #: Of a micro-batch that copies what was there: how far the copy is after it, as JSON text. The range is empty
    #: then: it stands at the copy's time.
    snapshot: str = ""
    #: Marks of entries at or before ``until``, by the oplog's name: by them a deployment that was restored from an
    #: older backup is distinguished from the one that was read.
    entries: Mapping[str, EntryMark] = field(default_factory=dict, compare=False)
    #: Whose events the micro-batch holds. "" of one that copies, or that an earlier release has planned.
    server_version: str = field(default="", compare=False)
    #: The cluster time of the token that the stream starts by, while that has not been passed: of what happened at this
    #: time, a part comes before the token.
    token_time: ClusterTime | None = field(default=None, compare=False)

    @property
    def begins(self) -> ClusterTime:
        """The time after which a stream whose first micro-batch this is gives all that happened."""
        return self.after if self.token_time is None else self.token_time

    def __str__(self) -> str:
        return f"a part of the copy at {self.until}" if self.snapshot else f"({self.after}, {self.until}]"


@dataclass(frozen=True, slots=True)
class StagedFile:
    """A data file that a task has finished: ``name`` relative to the lake, its final one; all rows of one partition,
    from ``first_token`` ascending to ``last_token``. ``sha256`` is that of all its ``size`` bytes. ``collection`` is
    that of all rows in a lake that is divided by it.

    ``stats`` is JSON text: least and greatest value of some columns, as the log keeps them for readers that skip files.
    ``last_wall_time`` is when the last of the rows was written to MongoDB, where the column is kept.
    """

    name: str
    rows: int
    size: int
    sha256: str
    first_token: str
    last_token: str
    stats: str = "{}"
    last_wall_time: datetime | None = None
    collection: str | None = None

    @property
    def day(self) -> str:
        return self.name.split("/", 1)[0].partition("=")[2]

    @property
    def period(self) -> str:
        """The directories of its day and hour."""
        return self.name.rsplit("/", 1)[0].partition("/collection-")[0]

    @property
    def lane(self) -> tuple[bool, str | None]:
        """What the lake is divided by in addition to time: the files of a lane follow each other in the stream."""
        return "/collection-" in self.name, self.collection

    @property
    def partition(self) -> dict[str, str | None]:
        """Its partition columns, as Delta's log has them."""
        return partition_values(self.name, self.collection)


#: A file of the lake is what a task finished, once a commit names it.
FileEntry = StagedFile


@dataclass(frozen=True, slots=True)
class Removal:
    """A file that compaction has replaced, and when: it is kept for readers that still hold the older log."""

    name: str
    at: datetime
    size: int = 0
    collection: str | None = None


@dataclass(frozen=True, slots=True)
class BatchMark:
    """The newest micro-batch that added events: commit ``number``, ``batch`` under ``claim``, the range it was planned
    for, and what it brought: of the events that were put aside the number of files."""

    number: int
    claim: str
    batch: int
    planned: PlannedRange
    first_token: str
    last_token: str
    rows: int
    aside: int = 0

    @property
    def last_cluster_time(self) -> ClusterTime:
        return cluster_time_of(self.last_token)


@dataclass(frozen=True, slots=True)
class Gap:
    """Events that the oplog had lost before the lake got them, and that its owner has accepted to miss: after
    ``after_token`` (``None``: the lake held no event) and cluster time ``after``, up to ``until``, where the stream
    continues."""

    after_token: str | None
    after: ClusterTime
    until: ClusterTime
    accepted_at: datetime = field(default_factory=lambda: datetime.now(UTC))

    def __str__(self) -> str:
        return (
            f"events after {self.after} (token {self.after_token}) and before {self.until} "
            f"are missing: the oplog had lost them, and this was accepted on {self.accepted_at:%Y-%m-%d at %H:%M} UTC"
        )


@dataclass(frozen=True, slots=True)
class WrittenVersion:
    """The lake's events later than ``after`` are those of this server version, up to the next note."""

    version: str
    after: ClusterTime


def with_version(notes: tuple[WrittenVersion, ...], planned: PlannedRange) -> tuple[WrittenVersion, ...]:
    """The notes, with one more where the micro-batch ``planned`` holds the events of another version than before."""
    if planned.server_version in ("", notes[-1].version if notes else ""):
        return notes
    return (*notes, WrittenVersion(planned.server_version, planned.after))


@dataclass(frozen=True, slots=True)
class Erasure:
    """Events that were taken out of the lake on purpose: ``rows`` of them, from ``files`` files, at ``at``. ``before``
    is the day (ISO date) before which all days were taken out, or ``None`` where events were chosen by what they hold.
    The condition is not recorded, since it may name a person."""

    rows: int
    files: int
    before: str | None = None
    at: datetime = field(default_factory=lambda: datetime.now(UTC))

    def __str__(self) -> str:
        at = f"{self.at:%Y-%m-%d at %H:%M} UTC"
        if self.before is not None:
            return f"{self.rows:,} events of the days before {self.before}, last on {at}"
        one = self.rows == 1
        which = "event that was chosen by what it holds" if one else "events that were chosen by what they hold"
        return f"{self.rows:,} {which}, on {at}"


def with_erasure(erasures: tuple[Erasure, ...], new: Erasure) -> tuple[Erasure, ...]:
    """The list with ``new``. Dropped days add up to one entry, so that a daily retention does not let it grow."""
    if new.before is None:
        return (*erasures, new)
    days = [one for one in erasures if one.before is not None]
    rows, files = sum(one.rows for one in days) + new.rows, sum(one.files for one in days) + new.files
    before = max(new.before, *(str(one.before) for one in days)) if days else new.before
    return (*(one for one in erasures if one.before is None), Erasure(rows, files, before, new.at))


@dataclass(frozen=True, slots=True)
class LakeChange:
    """The lake's stream or columns were changed: ``keys`` of ``lake.json`` differ from then on. Of events later than
    ``since`` (``None``: of all, as where columns alone were changed) the lake holds what it would hold if it had been
    begun in this way; ``rows`` events were added to it. ``until`` is the cluster time that the stream had been read to:
    a fresh checkpoint goes on there (``None``: nothing had been read). ``claim`` is the one that the lake took with the
    change. ``digest`` is that of the stream and the columns in ``lake.json`` ("": an earlier release did not say)."""

    claim: str
    keys: tuple[str, ...]
    since: ClusterTime | None = None
    until: ClusterTime | None = None
    rows: int = 0
    at: datetime = field(default_factory=lambda: datetime.now(UTC))
    digest: str = ""

    def __str__(self) -> str:
        holds = "" if self.since is None else f"; it holds for events after cluster time {self.since}"
        added = f", {self.rows:,} {'event' if self.rows == 1 else 'events'} added" if self.rows else ""
        return f"{', '.join(self.keys)}, on {self.at:%Y-%m-%d at %H:%M} UTC{added}{holds}"


@dataclass(frozen=True, slots=True)
class Commit:
    """One commit of the lake: it was made (``create``), a micro-batch was added (``append``; ``batch`` is its number
    under ``claim``), files were merged (``compaction``), events were given up for lost (``gap``), or taken out
    (``erase``), or the lake's stream or columns were changed (``change``), or a stream has opened a lake in a store
    (``start``).

    ``files`` ascend in the stream's order; ``removed`` are those that they replace. ``quarantined`` names the files of
    the micro-batch's ``quarantined_rows`` events that were put aside (``quarantine.py``). ``previous`` is the SHA-256
    of the commit before it, so that a hole in the log is noticed. ``follows`` is how far the lake had been read before
    the micro-batch, those without events included: its planned range begins there or before. ``None``: not known.
    ``begins`` is the cluster time after which the stream was read into the lake; the first micro-batch with events says
    it.
    """

    number: int
    kind: str
    claim: str
    previous: str
    files: tuple[FileEntry, ...] = ()
    removed: tuple[Removal, ...] = ()
    batch: int | None = None
    planned: PlannedRange | None = None
    follows: ClusterTime | None = None
    gap: Gap | None = None
    erasure: Erasure | None = None
    change: LakeChange | None = None
    begins: ClusterTime | None = None
    newest: BatchMark | None = None
    quarantined: tuple[str, ...] = ()
    quarantined_rows: int = 0
    committed_at: datetime = field(default_factory=lambda: datetime.now(UTC))

    @property
    def rows(self) -> int:
        return sum(file.rows for file in self.files)

    @property
    def reaches(self) -> ClusterTime | None:
        """How far the stream was read with this commit: a micro-batch to its end, a gap to where the stream goes on, a
        change to where it stood."""
        if self.gap is not None:
            return self.gap.until
        if self.change is not None:
            return self.change.until
        return None if self.planned is None else self.planned.until

    @property
    def first_token(self) -> str:
        """The first token of the events that were added, or, if all were put aside, of those."""
        if not self.files and self.newest is not None:
            return self.newest.first_token
        return min(file.first_token for file in self.files)

    @property
    def newest_file(self) -> FileEntry:
        """The one that holds the last event."""
        return max(self.files, key=lambda file: file.last_token)

    @property
    def last_wall_time(self) -> datetime | None:
        """When the last row was written to MongoDB, where that is known."""
        return self.newest_file.last_wall_time if self.files else None

    @property
    def last_token(self) -> str:
        if not self.files and self.newest is not None:
            return self.newest.last_token
        return self.newest_file.last_token

    @property
    def last_cluster_time(self) -> ClusterTime:
        return cluster_time_of(self.last_token)


def check_ascending(files: tuple[StagedFile, ...]) -> None:
    """Refuse a micro-batch whose files do not follow each other in the stream's order, or share a token: in a lake that
    is divided by collection, those of one."""
    last: dict[tuple[bool, str | None], str] = {}
    for file in files:
        before = last.get(file.lane, "")
        if before >= file.first_token:
            raise SinkError(
                f"events are out of order: token {file.first_token} follows {before}",
                hint="Partitions of a micro-batch must be ascending slices of the stream",
            )
        last[file.lane] = file.last_token
