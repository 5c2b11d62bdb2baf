"""An archive's events, each as given by a stream that ran when its entry was written.

A server that was upgraded gives the older entries of its oplog as events of its new version. An archive outlives many
versions, and its readers want the events as they were: so what was written under one version is replayed as its events,
and what was written after an upgrade as those of the next. Where the version changes, the stream is opened again after
the last entry of the older one, as a running stream is. To get one version for all of them, name it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterator
from dataclasses import replace

from tailrace.core.event.event_block import EventBlock
from tailrace.core.oplog.cluster_time import ZERO, ClusterTime
from tailrace.core.plan.options import StreamOptions
from tailrace.core.plan.plan import Plan, build_plan
from tailrace.core.plan.profile import ServerProfile, profile_for
from tailrace.core.stream.stream import ONE_OPLOG, open_stream
from tailrace.errors import UsageError
from tailrace.read.archive.cluster import ArchivedCluster
from tailrace.read.archive.layout import VersionSpan, existing
from tailrace.read.archive.place import ArchivePlace
from tailrace.read.archive.source import ArchiveSource
from tailrace.read.source.drive import answers_of, drive


class ArchiveReplay:
    """The events of the archive at ``folder``, for a stream with these ``options``.

    ``profile``  of the version whose events are given for all entries; ``None``: for each entry, those of its time's
                 version
    ``until``    later entries of a replica set need not be read

    Raises at once where one of the versions refuses the options, and where the archive begins after the start.
    """

    def __init__(
        self,
        folder: ArchivePlace,
        options: StreamOptions,
        profile: ServerProfile | None = None,
        *,
        until: ClusterTime | None = None,
    ) -> None:
        description = existing(folder)
        self._cluster = ArchivedCluster(folder) if description.is_cluster else None
        self._source = None if description.is_cluster else ArchiveSource(folder)
        self._options, self._until = options, until
        oldest, complete = self._oldest()
        start = options.start
        spans = description.spans(oldest if start is None else start)
        self.spans = spans if profile is None else [VersionSpan(profile.name, None)]
        plans = [self._plan(number, profile) for number in range(len(self.spans))]
        if start is None:
            plans[0] = plans[0].start_at(oldest)
        else:
            plans[0].confirm_history(oldest, complete)
        self._plans = plans
        #: Whether the token that the stream is resumed from has not been found yet.
        self.searching = False
        self.unknown_operations: Counter[str] = Counter()

    def _oldest(self) -> tuple[ClusterTime, bool]:
        if self._cluster is not None:
            return self._cluster.oldest(), False
        assert self._source is not None
        return self._source.oldest()

    def _plan(self, number: int, profile: ServerProfile | None) -> Plan:
        """The plan of what was written under one version: the first begins where the options say, each other one after
        the one before."""
        span, options = self.spans[number], self._options
        if number:
            after = self.spans[number - 1].until or ZERO
            options = replace(options, resume_after=None, start_after=None, start_at_operation_time=after.tick())
        try:
            plan = build_plan(options, profile or profile_for(span.version))
            if self._cluster is not None:
                self._cluster.check(plan)
            open_stream(plan if plan.start is not None else plan.start_at(ZERO))  # refuses the user's stages now
        except UsageError as error:
            if len(self.spans) > 1:
                which = "The last entries" if span.until is None else f"The entries up to {span.until}"
                hint = f"{which} are of MongoDB {span.version}: leave them out, or name one version for all entries"
                error.hint = ". ".join(part for part in (error.hint, f"{hint} (--server-version)") if part)
            raise
        return plan

    def blocks(self) -> Iterator[EventBlock]:
        """The events in their order. Raises what entries and stages raise, after the events before."""
        for span, plan in zip(self.spans, self._plans, strict=True):
            # As a stream that is opened again before it has given anything.
            begun = build_plan(self._options, plan.profile) if self.searching else plan
            read = self._read_cluster if self._cluster is not None else self._read_set
            goes_on = yield from read(begun, span.until)
            if not goes_on:
                return

    def _read_set(self, plan: Plan, until: ClusterTime | None) -> Generator[EventBlock, None, bool]:
        """The events up to ``until``; whether there may be more after it."""
        source = self._source
        assert source is not None
        stream, answers, after = open_stream(plan), answers_of(source), plan.read_after or ZERO
        ends = until is None or until > source.newest()
        try:
            for batch in source.tail(after) if ends else source.read(after, until or ZERO):
                stream.feed(ONE_OPLOG, batch)
                yield from drive(stream, answers)
                if stream.invalidated or (self._until is not None and batch.high_water >= self._until):
                    return False
            self.searching = stream.searching
        finally:
            self.unknown_operations.update(stream.statistics.unknown_operations)
        return not ends

    def _read_cluster(self, plan: Plan, until: ClusterTime | None) -> Generator[EventBlock, None, bool]:
        assert self._cluster is not None
        archived = self._cluster.open(plan, until)
        try:
            yield from archived
            self.searching = archived.stream.searching
        finally:
            self.unknown_operations.update(archived.stream.statistics.unknown_operations)
        return until is not None and not archived.stream.invalidated and archived.stream.high_water >= until
