"""Streams whose images are computed here (``fullDocument: exact``): from the oplog and a state on disk."""

from __future__ import annotations

from pathlib import Path

from pymongo.errors import ConfigurationError

from tailrace.core.plan.options import StreamOptions
from tailrace.core.plan.plan import Plan, exact_plan
from tailrace.core.plan.profile import ServerProfile, profile_for
from tailrace.read.images.source import ExactSource
from tailrace.read.source.live import LiveSource
from tailrace.watch.client import kernel_loader
from tailrace.watch.client.arguments import refused
from tailrace.watch.client.change_stream import OplogChangeStream
from tailrace.watch.client.request import WatchRequest


class ExactChangeStream(OplogChangeStream):
    """Like its parent, but images come from an ``ExactSource``, for any version of the server."""

    def __init__(self, source: ExactSource, request: WatchRequest, profile: ServerProfile | None) -> None:
        self._exact = source
        super().__init__(source, request, profile)

    def _planned(self, options: StreamOptions, profile: ServerProfile) -> Plan:
        self._exact.use_profile(profile)
        return exact_plan(options, profile)

    def _begun(self, plan: Plan) -> Plan:
        source = self._exact
        oldest = source.oldest()
        if plan.read_after is None:
            return plan.start_after(source.begin(None, source.client))
        plan.confirm_history(*oldest)
        source.begin(plan.read_after, source.client)
        return plan


def state_folder(folder: str | Path | None) -> Path:
    """The directory for the state of exact images. Raises UsageError if there is none."""
    if folder is None:
        raise refused(
            "exact images need a directory for their state", ConfigurationError, "Give connect(images=DIRECTORY)"
        )
    return Path(folder)


def open_exact(
    live: LiveSource,
    folder: str | Path | None,
    request: WatchRequest,
    profile: ServerProfile | None,
    *,
    recover: bool = False,
) -> ExactChangeStream:
    """Open a stream with exact images over a replica set. ``folder`` holds their state. With ``recover``, ``live`` has
    an archive before it, from which a lost state is rebuilt."""
    directory = state_folder(folder)
    known = profile or profile_for(live.server_version)
    source = ExactSource(live, directory, request.scope, known, kernel=kernel_loader.is_ready, recover=recover)
    try:
        return ExactChangeStream(source, request, profile)
    except BaseException:
        source.release()
        raise
