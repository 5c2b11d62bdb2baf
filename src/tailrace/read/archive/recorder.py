"""A whole deployment into an archive: a replica set's oplog, or those of all shards and of the config server."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

from pymongo import MongoClient

from tailrace.base.threads import CheckedThread
from tailrace.core.oplog.cluster_time import ZERO, ClusterTime
from tailrace.core.oplog.compatibility import SettingRead
from tailrace.core.oplog.witness import DeploymentIdentity
from tailrace.core.plan.profile import ServerProfile, for_people, profile_for, without_compatibility
from tailrace.errors import OtherHistoryError, SourceError, TailraceError, UsageError, on_shard
from tailrace.read.archive.claim import claim_of
from tailrace.read.archive.compatibility import set_since
from tailrace.read.archive.layout import (
    CONFIG_OPLOG,
    Description,
    Membership,
    VersionNote,
    archived_until,
    describe,
    oplog_folder,
    unfinished,
)
from tailrace.read.archive.owner import set_identity
from tailrace.read.archive.place import ArchivePlace
from tailrace.read.archive.retention import Retention
from tailrace.read.archive.writer import ArchiveProgress, OplogWriter, SegmentLimits, VersionMet
from tailrace.read.source.connection import Connection
from tailrace.read.source.member_version import MemberVersion, present_member
from tailrace.read.source.membership import changes, remembered_host
from tailrace.read.source.mongod import MongodSource
from tailrace.read.source.topology import Cluster, ShardAddress
from tailrace.read.source.witness import cluster_id

#: How often config.shards is read for shards that come and go.
_MEMBERS_S: Final = 5.0
_UNAUTHORIZED: Final = 13
_OWN_DIRECTORY: Final = "Give each deployment a directory of its own"

#: What entries have set the feature compatibility version to, by oplog.
_Settings = dict[str, tuple[SettingRead, ...]]

_log = logging.getLogger("tailrace.archive")


@dataclass(frozen=True, slots=True)
class ArchivePolicy:
    """How an archive is written.

    ``from_oldest``  a new archive begins with the oldest entry of each oplog; otherwise with the newest one
    ``once``         stop when everything is archived that was there at the beginning
    ``take_over``    write an archive in an object store that belongs to another state
    """

    from_oldest: bool = True
    once: bool = False
    take_over: bool = False
    images: bool = True
    limits: SegmentLimits = field(default_factory=SegmentLimits)
    retention: Retention = field(default_factory=Retention)


class Recorder:
    """Archives a deployment into ``folder`` until it is stopped.

    ``client``   of a replica set, which stays open
    ``cluster``  the cluster that this is; ``None`` for a replica set

    One thread for each oplog, and one that writes. The first failure of any ends all, after each has published what
    it has; ``run`` raises it.
    """

    def __init__(
        self,
        client: MongoClient[Any],
        cluster: Cluster | None,
        folder: ArchivePlace,
        policy: ArchivePolicy | None = None,
    ) -> None:
        self._client = client
        self._cluster = cluster
        self._folder = folder
        self._policy = policy or ArchivePolicy()
        self._claim = claim_of(folder, take_over=self._policy.take_over)
        self._writers: dict[str, OplogWriter] = {}
        self._threads: dict[str, CheckedThread] = {}
        self._failure: TailraceError | None = None
        self._cluster_id = ""
        #: The members' processes that were known when the version was noted last, and what was met.
        self._noted: frozenset[object] = frozenset()
        #: Of a new archive: when its first version was noted, which is that of all older entries too.
        self._begun = ZERO
        #: What is to be read before the entry that has set the present feature compatibility version counts as missing.
        self._awaited: ClusterTime | None = None
        self._running = 0
        self._ended = threading.Event()
        self._lock = threading.Lock()

    def statistics(self) -> dict[str, ArchiveProgress]:
        """What each oplog's writer has done so far."""
        with self._lock:
            return {name: writer.written for name, writer in self._writers.items()}

    def stop(self) -> None:
        """End, with everything published that was read. From any thread or signal handler."""
        self._ended.set()

    def run(
        self, on_progress: Callable[[dict[str, ArchiveProgress]], None] | None = None, *, every_s: float = 5.0
    ) -> None:
        """Archive until ``stop``, or with ``once`` to the present. Raises TailraceError."""
        with self._claim.alone():
            self._run_alone(on_progress, every_s)

    def _run_alone(self, on_progress: Callable[[dict[str, ArchiveProgress]], None] | None, every_s: float) -> None:
        try:
            description = self._note_version(self._begin())
            while not self._ended.wait(every_s if on_progress else _MEMBERS_S):
                if on_progress is not None:
                    on_progress(self.statistics())
                description = self._note_version(description)
                if self._cluster is not None and not self._policy.once:
                    description = self._follow_members(description)
        finally:
            self._end()
        self._note_version(description)  # what was met since
        if self._failure is not None:
            raise self._failure

    def _begin(self) -> Description:
        describe(self._folder)  # refuses what is no archive before anything is written
        self._claim.begin()
        known = describe(self._folder)
        if self._cluster is None:
            source = MongodSource(self._client)
            identity = set_identity(source.name, self._client)
            self._begun = source.newest() if known is None else ZERO
            found = Description(source.name, (VersionNote(source.server_version),), {}, identity=identity)
            _refuse_other(self._folder, known, found)
            description = self._adopt(known, found)
            until = source.newest() if self._policy.once else None
            self._start(source.name, self._client, self._first(source), until)
            return description
        return self._begin_cluster(self._cluster, known)

    def _begin_cluster(self, cluster: Cluster, known: Description | None) -> Description:
        view = cluster.open_view()
        if view.config_after is None:
            raise UsageError(
                "a list of shards cannot be archived: it does not show when shards are added or removed",
                hint="Give the URI of the config server or of the mongos",
            )
        self._cluster_id = cluster_id(Connection(cluster.config_client()))
        self._begun = view.time if known is None else ZERO
        found = Description(
            None,
            (VersionNote(cluster.server_version()),),
            {name: Membership(ZERO) for name in view.shards},
            identity=DeploymentIdentity({}, self._cluster_id),
        )
        _refuse_other(self._folder, known, found)
        if known is None:
            # The oplogs of shards that went before are not archived: streams begin after the last such change.
            before = [change.time for change in changes(Connection(cluster.config_client()), ZERO)]
            since = max(before, default=ZERO)
            if since > view.config_after:
                return self._begin_cluster(cluster, None)  # a shard came or went while its cluster was read
            found = replace(found, since=since)
        config = MongodSource(cluster.config_client())
        description = self._adopt(known, found)
        until = view.time if self._policy.once else None
        self._start(CONFIG_OPLOG, cluster.config_client(), self._first(config), until)
        # Shards that came or went while nobody archived are found in the config server's oplog.
        description = self._follow_members(description, until)
        for name, shard in description.shards.items():
            if name in self._writers:
                continue
            if shard.until is not None:
                self._finish(cluster, name, shard)
                continue
            client = cluster.client(name)
            begin = shard.after or self._first(MongodSource(client))
            self._start(name, client, begin or None, until)
        return description

    def _finish(self, cluster: Cluster, name: str, shard: Membership) -> None:
        """Archive what is lacking of a shard that was removed while nobody archived, or before its last entries were
        published. Its name is no shard's any more, but its servers may still run. Raises SourceError where they do not:
        without these entries the archive would end before them for ever."""
        lacking = unfinished(name, shard, archived_until(oplog_folder(self._folder, name)))
        if lacking is None:
            return
        hint = (
            "Start its servers again until the rest of its oplog is archived. If they are gone for good, archive into "
            "another directory from now on: this one can be replayed up to that time"
        )
        host = remembered_host(Connection(cluster.config_client()), name)
        if host is None:
            raise SourceError(f"{lacking}, and config.changelog does not say where it was", hint=hint)
        client = cluster.client_at(ShardAddress(name, host))
        try:
            MongodSource(client, retry_seconds=0).oldest()
        except TailraceError as error:
            raise on_shard(
                SourceError(f"{lacking}, and it cannot be read at {host}: {error.message}", hint=hint), name
            ) from None
        _log.info("the rest of shard %s, up to its removal at %s, is archived", name, shard.until)
        self._start(name, client, shard.after or None, shard.until)

    def _first(self, source: MongodSource) -> ClusterTime | None:
        return None if self._policy.from_oldest else ClusterTime(source.newest() - 1)

    def _adopt(self, known: Description | None, found: Description) -> Description:
        """Go on with the archive that is there, or note whose a new one is."""
        if known is None:
            self._save(found)
            return found
        self._claim.renew(known.document())
        return known

    def _save(self, description: Description) -> None:
        self._claim.save(description.document())

    def _note_version(self, description: Description) -> Description:
        """Note from when on the servers have another version: the one that a stream read that began and ended with the
        archive's own reads; another feature compatibility version from the entry on that has set it. Looked at when the
        recorder begins, and where PyMongo learns of another process, or a writer of another feature compatibility
        version or of an entry that sets one."""
        cluster = self._cluster
        clients = [self._client] if cluster is None else cluster.clients
        settings = self._settings(description)
        present: frozenset[object] = frozenset(
            [*map(present_member, clients), *self._versions_met(), *settings.items()]
        )
        if present == self._noted:
            return description
        try:
            source = MongodSource(self._client, retry_seconds=0)
            version = source.server_version if cluster is None else cluster.server_version()
            newest = source.newest() if cluster is None else cluster.open_view().time
        except SourceError as error:
            _log.debug("the servers' version could not be read, and is asked for again later: %s", error)
            return description
        noted = description
        if without_compatibility(version) == without_compatibility(description.versions[-1].version):
            for note in set_since(description.versions[-1], settings):
                noted = noted.with_version(*note)
        since = self._since(noted, version, newest, settings)
        if since is not None:
            noted = noted.with_version(version, since)
            self._noted, self._awaited = present, None
        for note in noted.versions[len(description.versions) :]:
            _log.info("the servers run MongoDB %s from %s on", for_people(note.version), note.since)
        if noted is not description:
            self._save(noted)
        return noted

    def _since(
        self, description: Description, version: str, newest: ClusterTime, settings: _Settings
    ) -> ClusterTime | None:
        """From when on the servers have ``version``, which they have now, and not that of the last note; ``None`` where
        it cannot be known yet. ``settings``: those that ``description`` has notes of."""
        before, profile = description.versions[-1], profile_for(version)
        if profile == profile_for(before.version):
            return newest
        writers = self._counting(description)
        if without_compatibility(version) == without_compatibility(before.version):
            # The entry that has set it is still to come, unless an earlier run has archived it without a note.
            self._awaited = self._awaited or newest
            if not all(writer.has_read(self._awaited) for writer in writers.values()):
                return None
            if self._settings(description) != settings:
                return None  # it came after they were read
        met = _met(profile, [writer.met for writer in writers.values()])
        return None if met is None else max(met, before.since.tick())

    def _counting(self, description: Description) -> dict[str, OplogWriter]:
        """The writers of the oplogs whose servers decide the version: not that of a shard that was removed."""
        gone = {name for name, shard in description.shards.items() if shard.until is not None}
        with self._lock:
            return {name: one for name, one in self._writers.items() if name not in {CONFIG_OPLOG, *gone}}

    def _settings(self, description: Description) -> _Settings:
        """What the entries that were read have set the feature compatibility version to, by oplog: those later than the
        archive's first note, and a shard's since it is one."""
        after = {name: max(self._begun, shard.after) for name, shard in description.shards.items()}
        return {
            name: tuple(one for one in writer.settings if one.time > after.get(name, self._begun))
            for name, writer in self._counting(description).items()
        }

    def _versions_met(self) -> list[MemberVersion]:
        with self._lock:
            return [writer.met.version for writer in self._writers.values() if writer.met is not None]

    def _follow_members(self, description: Description, until: ClusterTime | None = None) -> Description:
        """Begin to archive shards that were added, up to ``until`` if it is given; note those that were removed, whose
        oplogs end there."""
        cluster = self._cluster
        assert cluster is not None
        shards, added = dict(description.shards), dict[str, ShardAddress]()
        last = max([description.since, *(time for shard in shards.values() for time in shard if time is not None)])
        for change in changes(Connection(cluster.config_client()), last):
            shard = shards.get(change.name)
            if change.host is None and shard is not None and shard.until is None:
                shards[change.name] = shard._replace(until=change.time)
                if change.name in self._writers:
                    self._writers[change.name].end_at(change.time)
                _log.info("shard %s was removed from the cluster at %s", change.name, change.time)
            elif change.host is not None and shard is not None:
                raise SourceError(
                    f"shard {change.name} was removed from the cluster and added again at {change.time}: an "
                    "archive holds only one oplog for each name",
                    hint="What was archived before stays readable; archive into another directory from now on",
                )
            elif change.host is not None:
                shards[change.name] = Membership(change.time)
                added[change.name] = ShardAddress(change.name, change.host)
                _log.info("shard %s was added to the cluster: it is archived from %s", change.name, change.time)
        if shards != description.shards:
            description = replace(description, shards=shards)
            self._save(description)
        for name, address in added.items():
            if shards[name].until is not None:
                self._finish(cluster, name, shards[name])  # it came and went meanwhile
                continue
            after = shards[name].after
            # Of a shard that has joined since ``until`` there is nothing to be read.
            self._start(name, cluster.client_at(address), after, until and max(until, after))
        return description

    def _start(self, name: str, client: MongoClient[Any], begin: ClusterTime | None, until: ClusterTime | None) -> None:
        writer = OplogWriter(
            MongodSource(client),
            oplog_folder(self._folder, name),
            begin=begin,
            until=until,
            limits=self._policy.limits,
            retention=self._policy.retention,
            images=self._policy.images and name != CONFIG_OPLOG,
            cluster=self._cluster_id,
            settings_after=self._begun,
            claim=self._claim,
        )
        thread = CheckedThread(
            partial(self._run, writer), f"tailrace-archive-{name}", failed=partial(self._fail, name, writer)
        )
        with self._lock:
            self._writers[name] = writer
            self._running += 1
        self._threads[name] = thread
        thread.start()

    def _run(self, writer: OplogWriter) -> None:
        writer.run()
        with self._lock:
            self._running -= 1
            if not self._running:
                self._ended.set()

    def _fail(self, name: str, writer: OplogWriter, error: TailraceError) -> None:
        if error.code == _UNAUTHORIZED and writer.reads_images:
            error.hint = ". ".join(part for part in (error.hint, "Or leave them out: --no-pre-images") if part)
        with self._lock:
            self._failure = self._failure or (error if self._cluster is None else on_shard(error, name))
        self._ended.set()

    def _end(self) -> None:
        for writer in self._writers.values():
            writer.stop()
        for thread in self._threads.values():
            thread.join()


def _refuse_other(folder: ArchivePlace, known: Description | None, found: Description) -> None:
    """Raise where an archive is there that is another deployment's."""
    if known is not None and known.name != found.name:
        known_name, found_name = known.name or "a cluster", found.name or "a cluster"
        raise UsageError(
            f"{folder} is the archive of {known_name}, but this is {found_name}",
            hint=_OWN_DIRECTORY,
        )
    if known is not None:
        difference = known.identity.difference(found.identity)
        if difference is not None:
            raise OtherHistoryError(f"{folder} is the archive of another deployment: {difference}", hint=_OWN_DIRECTORY)


def _met(profile: ServerProfile, found: list[VersionMet | None]) -> ClusterTime | None:
    """The first cluster time at which all oplogs are read from members whose events are those of ``profile``, or of a
    later one; ``None`` where it is not so yet. ``found``: where each oplog's version was met."""
    met = [one for one in found if one is not None]
    if len(met) < len(found) or not any(profile in one.version.profiles for one in met):
        return None
    if any(max(each.rank for each in one.version.profiles) < profile.rank for one in met):
        return None
    return max(one.after for one in met).tick()
