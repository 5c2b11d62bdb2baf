"""One oplog into its folder of the archive: read by one thread, written by another, published segment by segment."""

from __future__ import annotations

import queue
import threading
import time
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

from tailrace.core import raw_bson
from tailrace.core.oplog.cluster_time import ZERO, ClusterTime
from tailrace.core.oplog.compatibility import SETTING, SettingRead, settings_in
from tailrace.core.plan.request import OplogBatch
from tailrace.errors import SinkError, SourceError
from tailrace.read.archive.claim import FolderClaim, StoreClaim
from tailrace.read.archive.keeping import keeping
from tailrace.read.archive.layout import Reach, head, oplog_of, segments
from tailrace.read.archive.owner import confirm_owner, set_identity
from tailrace.read.archive.place import ArchivePlace
from tailrace.read.archive.pre_images import stored_between
from tailrace.read.archive.retention import Retention
from tailrace.read.archive.segment import ROW_GROUP_BYTES, ImagesWriter, SegmentWriter
from tailrace.read.archive.unknown import UnknownEntries
from tailrace.read.source.advice import told_how_to_begin
from tailrace.read.source.connection import Connection
from tailrace.read.source.member_version import MemberVersion
from tailrace.read.source.mongod import MongodSource

#: Batches between the two threads.
_QUEUE: Final = 4
_AWAIT_MS: Final = 1000
_ANOTHER: Final = "archive into another directory: what is in this one stays readable"
_ELSEWHERE: Final = "Archive into a new directory; this one stays as it is, and can be replayed"


@dataclass(frozen=True, slots=True)
class SegmentLimits:
    """When a segment is published: at ``bytes`` of entries, or ``seconds`` after its first one came."""

    bytes: int = 256 << 20
    seconds: float = 60.0


@dataclass(slots=True)
class ArchiveProgress:
    """What one oplog's writer has done since it began. Times are cluster times; ``until`` is on the device.
    ``unknown``: entries of unknown kinds, by kind."""

    entries: int = 0
    bytes: int = 0
    images: int = 0
    segments: int = 0
    expired: int = 0
    read: ClusterTime = ZERO
    until: ClusterTime = ZERO
    unknown: dict[str, int] = field(default_factory=dict)


class VersionMet(NamedTuple):
    """A member of this version is read, and what is later than ``after`` comes from it."""

    version: MemberVersion
    after: ClusterTime


class OplogWriter:
    """Archives one oplog until it is stopped.

    ``begin``   where to begin where nothing was archived yet: after this cluster time; ``None``: at the oldest entry
    ``until``   stop when everything up to this cluster time is archived; ``None``: go on
    ``images``  whether stored pre-images are archived too
    ``cluster`` the cluster's id, where this is a shard's oplog and the id is known
    ``settings_after``  changes of the feature compatibility version up to this cluster time do not count
    ``claim``   that an archive in an object store is this process's

    ``run`` raises ChangeStreamHistoryLost where the oplog no longer reaches back to the archive's end, SinkError where
    the archive cannot be written or another process writes it, OtherHistoryError where it is another deployment's,
    SourceError as a source does. What was published stays.
    """

    def __init__(
        self,
        source: MongodSource,
        folder: ArchivePlace,
        *,
        begin: ClusterTime | None = None,
        until: ClusterTime | None = None,
        limits: SegmentLimits | None = None,
        retention: Retention | None = None,
        images: bool = True,
        cluster: str = "",
        settings_after: ClusterTime = ZERO,
        claim: FolderClaim | StoreClaim | None = None,
    ) -> None:
        self._source = source
        self._folder = folder
        self._kept = keeping(folder, claim)
        self._begin = begin
        self._last = until
        self._limits = limits or SegmentLimits()
        self._retention = retention or Retention()
        self._cluster = cluster
        #: What the head says; the digest of the newest segment, which the next one names.
        self._reach = Reach(ZERO, ZERO)
        self._newest = ""
        self._connection = Connection(source.client) if images else None
        self._stopped = threading.Event()
        self._queue: queue.Queue[OplogBatch | None] = queue.Queue(_QUEUE)
        self._all_read = False
        self._failure: BaseException | None = None
        self.written = ArchiveProgress()
        #: ``None`` until the first reply has come.
        self.met: VersionMet | None = None
        #: What the entries later than ``settings_after`` have set the feature compatibility version to, oldest first.
        self.settings: tuple[SettingRead, ...] = ()
        self._settings_after = settings_after

    def stop(self) -> None:
        """Publish what was read and end, also where no member can be reached. From any thread."""
        self._stopped.set()
        self._source.interrupt()

    @property
    def reads_images(self) -> bool:
        return self._connection is not None

    def has_read(self, time_: ClusterTime) -> bool:
        """Whether everything up to ``time_`` was read, or all that there is to be read."""
        return self.written.read >= (time_ if self._last is None else min(time_, self._last))

    def end_at(self, until: ClusterTime) -> None:
        """End when everything up to ``until`` is archived: the shard was removed. From any thread."""
        self._last = until

    def run(self) -> None:
        with self._kept.alone() as alone:
            if not alone:
                raise SinkError(
                    f"another process archives into {self._folder}",
                    hint="An archive has one writer: stop the other one",
                )
            after = self._position()
            self._unknown = UnknownEntries(self._source.server_version)
            self.written.unknown = self._unknown.counts
            self.written.read = self.written.until = after
            if self._connection is not None:
                # A user who may not read them learns it now, and not when the first segment is full.
                stored_between(self._connection, after, after)
            worker = threading.Thread(target=self._write, args=(after,), name="tailrace-archive", daemon=True)
            worker.start()
            try:
                with told_how_to_begin(_ANOTHER):
                    self._read(after)
            except SourceError:
                if not self._stopped.is_set():  # what is interrupted may say so
                    raise
            finally:
                self._queue.put(None)
                worker.join()
        if self._failure is not None:
            raise self._failure

    def _position(self) -> ClusterTime:
        """After which cluster time to go on. The archive must be this deployment's; one that does not know yet whose it
        is learns it here."""
        found = segments(self._folder)  # whole, or it is reported
        oplog = oplog_of(self._folder)
        identity = set_identity(oplog, self._source.client, self._cluster)
        reach = head(self._folder)
        if reach is not None:
            confirm_owner(self._folder, found[-1] if found else None, self._source, identity, hint=_ELSEWHERE)
        if reach is None or not found:
            begin = ClusterTime(self._source.oldest()[0] - 1) if self._begin is None else self._begin
            reach = Reach(begin, begin)
        self._reach = replace(
            reach,
            replica_set=identity.replica_sets[oplog] or reach.replica_set,
            cluster=identity.cluster or reach.cluster,
        )
        # Before the first segment is there, so that a directory with segments and no head is always a damaged one.
        self._kept.write_head(self._reach)
        self._kept.remove_before()
        self._newest = found[-1].digest if found else ""
        after = max([segment.until for segment in found] or [reach.until])
        self.settings = tuple(one for one in reach.settings if one.time <= after)  # later ones are read again
        return after

    # -- the reading thread ---------------------------------------------------------------------------------------

    def _read(self, after: ClusterTime) -> None:
        tail = self._source.tail(after, await_ms=_AWAIT_MS)
        try:
            for batch in tail:
                version = self._source.read_version
                if version is not None and (self.met is None or self.met.version != version):
                    self.met = VersionMet(version, after)
                after = batch.high_water
                if SETTING in batch.raw:
                    found = settings_in(raw_bson.split(batch.raw))
                    self.settings += tuple(one for one in found if one.time > self._settings_after)
                self._queue.put(batch)
                if self._failure is not None or self._stopped.is_set():
                    return
                if self._last is not None and batch.high_water >= self._last:
                    return
        finally:
            tail.close()

    # -- the writing thread ---------------------------------------------------------------------------------------

    def _write(self, after: ClusterTime) -> None:
        try:
            while (edge := self._write_segment(after)) is not None:
                after = edge
        except BaseException as error:  # noqa: BLE001  it is raised in the thread that called run
            self._failure = error
            while self._next_batch() is not None:
                pass

    def _next_batch(self) -> OplogBatch | None:
        """What was read next; ``None`` when nothing more comes, however often that is asked."""
        if not self._all_read:
            batch = self._queue.get()
            self._all_read = batch is None
            return batch
        return None

    def _write_segment(self, after: ClusterTime) -> ClusterTime | None:
        """One segment of what comes; where the next one begins, ``None`` when nothing more comes."""
        saw = self._unknown.saw
        scratch = self._kept.scratch
        with SegmentWriter(scratch, after, saw) as segment, ImagesWriter(scratch, after) as images:
            edge = looked = after
            unlooked = 0
            begun: float | None = None
            more = True
            while more:
                batch = self._next_batch()
                if batch is None:
                    more = False
                    break
                edge = max(edge, batch.high_water)
                if batch.raw:
                    begun = begun or time.monotonic()
                    segment.add(batch.raw)
                    self.written.bytes += len(batch.raw)
                    unlooked += len(batch.raw)
                self.written.read = edge
                if unlooked >= ROW_GROUP_BYTES:
                    self._add_images(images, looked, edge)
                    looked, unlooked = edge, 0
                if segment.bytes >= self._limits.bytes or (
                    begun is not None and time.monotonic() - begun >= self._limits.seconds
                ):
                    break
            if segment.bytes:
                self._add_images(images, looked, edge)
                self._publish(segment, images, after, edge)
                after = edge
        return after if more else None

    def _add_images(self, images: ImagesWriter, after: ClusterTime, until: ClusterTime) -> None:
        if self._connection is not None and after < until:
            images.add(stored_between(self._connection, after, until))

    def _publish(self, segment: SegmentWriter, images: ImagesWriter, after: ClusterTime, until: ClusterTime) -> None:
        self._keep_settings(until)
        images.publish(self._kept.scratch / f"{after:016x}-{until:016x}.images.parquet", self._kept.put)
        self._newest = segment.publish(until, images, self._newest, self._kept.put).digest
        self._reach = replace(self._kept.head() or self._reach, until=until, newest=self._newest)
        self._kept.write_head(self._reach)
        self.written.entries += segment.entries
        self.written.images += images.count
        self.written.segments += 1
        self.written.until = until
        self.written.expired += self._kept.retain(self._retention)

    def _keep_settings(self, until: ClusterTime) -> None:
        """Before a segment is published, its head says which entries in it set the feature compatibility version: a
        recorder that is killed before it has noted them in ``archive.json`` does not read these entries again."""
        settings = tuple(one for one in self.settings if one.time <= until)
        reach = self._kept.head() or self._reach
        if settings != reach.settings:
            self._reach = replace(reach, settings=settings)
            self._kept.write_head(self._reach)
