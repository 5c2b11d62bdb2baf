"""A stream that gives the existing documents first (``watch(start="snapshot")``), and then every change since."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

import bson
from pymongo import MongoClient
from pymongo.errors import ConfigurationError

from tailrace.core.expression.stages.pipeline import CompiledPipeline
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.plan.profile import ServerProfile, profile_for
from tailrace.errors import NonResumableError, ServerError
from tailrace.read.snapshot.events import SnapshotEvents, place_of
from tailrace.read.snapshot.reader import CHUNK_DOCUMENTS, SnapshotReader, begin
from tailrace.read.snapshot.stages import compiled_for, version_of
from tailrace.read.source.driver_error import at_the_border
from tailrace.read.source.mongod import AWAIT_MS
from tailrace.read.source.time_limit import TimeLimitError, check_time_limit
from tailrace.read.source.topology import Cluster
from tailrace.watch.client.arguments import refused
from tailrace.watch.client.change_stream import ChangeStream
from tailrace.watch.client.checked import checked_options
from tailrace.watch.client.request import SNAPSHOT, WatchRequest
from tailrace.watch.client.statistics import StreamStatistics
from tailrace.watch.client.stream_errors import in_execution
from tailrace.watch.client.turn import Turn

#: While the copy runs, the stream that is to follow is opened this often, to see that the oplog still holds its start.
_LOOK_S: Final = 30.0

StreamOpener = Callable[[WatchRequest], ChangeStream]


def copies_first(request: WatchRequest) -> bool:
    """Whether the stream begins with a copy, or goes on in the middle of one."""
    return request.start is not None or _place_in(request) is not None


class SnapshotChangeStream(ChangeStream):
    """The copy's events, then those of the stream that ``open_stream`` gives. Raises at once what that one raises.

    ``client``      the one whose ``watch`` was called
    ``deployment``  what is copied: the replica set's client, or the cluster
    ``profile``     the one that the stream was given; ``None``: that of the deployment's own version
    """

    def __init__(
        self,
        client: MongoClient[Any],
        deployment: MongoClient[Any] | Cluster,
        request: WatchRequest,
        open_stream: StreamOpener,
        profile: ServerProfile | None = None,
    ) -> None:
        self._client = client
        self._timeout_ms = request.timeout_ms
        self._codec_options = request.codec_options
        stages = _stages(request, deployment, profile)
        place = _place_in(request)
        state, chunk = (begin(deployment, request.scope), 0) if place is None else place_of(place)
        self._deployment, self._profile = deployment, profile
        self._open_stream = open_stream
        self._follows = _request_after(request, state.start)
        self._stream: ChangeStream | None = None
        self._turn = Turn(self._release)
        pace = request.snapshot_documents_per_second
        reader = SnapshotReader(
            deployment,
            request.scope,
            state=state,
            chunk_documents=CHUNK_DOCUMENTS if pace is None else max(1, min(CHUNK_DOCUMENTS, int(pace))),
            documents_per_second=pace,
            stopped=lambda: self._turn.ended,
        )
        self._copy = SnapshotEvents(reader, stages, chunk)
        self._await_s = (AWAIT_MS if request.max_await_time_ms is None else request.max_await_time_ms) / 1000
        self._check_history()

    def _check_history(self) -> None:
        """Raises what opening the stream after the copy would raise now: 286 where its start is lost."""
        self._open_stream(self._follows).close()
        self._looked = time.monotonic()

    def next(self) -> Any:
        with self._time_limit():  # of the whole call
            return super().next() if self._stream is None else self._stream.next()

    __next__ = next

    def try_next(self) -> Any | None:
        return self._copied() if self._stream is None else self._stream.try_next()

    @at_the_border
    def _copied(self) -> Any | None:
        event = None
        with self._turn, self._time_limit():
            try:
                if self.alive:
                    event = self._next_of_copy()
                self._turn.check()
            except BaseException as error:
                if not isinstance(error, TimeLimitError):
                    self.close()
                raise
        if event is not None:
            return self._decoded(event)
        return None if self._stream is None else self._stream.try_next()

    def _next_of_copy(self) -> bytes | None:
        """The copy's next event; ``None`` if there is none left, and the stream after it is open then, or if nothing
        of what was copied in the time of one look is shown."""
        until = time.monotonic() + self._await_s
        while True:
            check_time_limit("the deployment")
            if time.monotonic() - self._looked > _LOOK_S and not self._copy.at_hand:
                self._check_history()
            event = self._copied_event()
            if event is None and self._copy.is_complete:
                self._stream = self._open_stream(self._follows)
            if event is not None or self._stream is not None or self._turn.ended or time.monotonic() >= until:
                return event

    def _copied_event(self) -> bytes | None:
        """The copy's next event. What a stage reports about one is reported as for any other event."""
        try:
            return self._copy.next()
        except (ServerError, NonResumableError) as error:
            profile = self._profile or profile_for(version_of(self._deployment))
            raise in_execution(error, profile, is_opening=False) from error.__cause__

    @property
    def resume_token(self) -> Any:
        if self._stream is not None:
            return self._stream.resume_token
        return bson.decode(bson.encode({SNAPSHOT: self._copy.place()}), codec_options=self._codec_options)

    @property
    def alive(self) -> bool:
        return not self._turn.ended and (self._stream is None or self._stream.alive)

    @property
    def has_next(self) -> bool:
        return self.alive and (self._copy.at_hand if self._stream is None else self._stream.has_next)

    @property
    def statistics(self) -> StreamStatistics:
        if self._stream is not None:
            return self._stream.statistics
        return StreamStatistics(snapshot=self._copy.progress)

    def explain(self) -> dict[str, Any]:
        if self._stream is not None:
            return self._stream.explain()
        with self._open_stream(self._follows) as stream:
            return stream.explain()

    def close(self) -> None:
        self._turn.end()

    def _release(self) -> None:
        if self._stream is not None:
            self._stream.close()


def _place_in(request: WatchRequest) -> Mapping[str, Any] | None:
    """The copy's place that a resume token holds."""
    for token in (request.resume_after, request.start_after):
        if not isinstance(token, Mapping) or SNAPSHOT not in token:
            continue
        if len(token) > 1:
            raise refused(
                f"a resume token has the field {SNAPSHOT!r} alongside others",
                ConfigurationError,
                "Pass it on as it came",
            )
        starts = request.starts()
        if len(starts) > 1:
            raise refused(
                f"{' and '.join(starts)} do not go together", ConfigurationError, "Pass on only the snapshot's token"
            )
        place: Mapping[str, Any] = bson.decode(request.encoded(token, "the resume token"))[SNAPSHOT]
        return place
    return None


def _request_after(request: WatchRequest, start: ClusterTime) -> WatchRequest:
    """What is watched after the copy. What happened at its own time is in it, since every read waits for that."""
    following = ClusterTime(int(start) + 1).to_timestamp()
    return replace(request, start=None, resume_after=None, start_after=None, start_at_operation_time=following)


def _stages(
    request: WatchRequest, deployment: MongoClient[Any] | Cluster, profile: ServerProfile | None
) -> CompiledPipeline:
    """The stages that the copy's events go through. Large events of a copy are not divided."""
    following = replace(request, start=None, resume_after=None, start_after=None)
    checked_options(following)  # a wrong call is refused without connecting
    return compiled_for(deployment, request.stages(), collation=request.collation_document(), profile=profile)
