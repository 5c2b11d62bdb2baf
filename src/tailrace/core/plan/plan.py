"""Building a plan: parameters checked, versions chosen, the start found. Running it is ``pipeline.stream``'s work."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from tailrace.core import raw_bson
from tailrace.core.event.resume_token import HIGH_WATER_MARK, ResumeToken
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.oplog.history import history_lost, reaches_back
from tailrace.core.plan.options import StreamOptions, unknown_mode, unknown_option
from tailrace.core.plan.profile import SERVER_6_0, ServerProfile
from tailrace.errors import ChangeStreamFatal, InvalidResumeToken, invariant

SPLIT_STAGE: Final = b"$changeStreamSplitLargeEvent"


@dataclass(frozen=True, slots=True)
class Plan:
    """A change stream that is ready to run.

    ``start``          the cluster time of the first entry to read, inclusive; ``None`` until "now" is known
    ``start_token``    the token to search for and to swallow, or a high-water mark; ``None`` when started by time
    ``token_version``  of the tokens that the stream writes
    ``splits``         whether the pipeline ends with ``$changeStreamSplitLargeEvent``
    ``quarantines``    an event that a stage cannot handle is put aside, and the stream goes on
    ``exact_images``   pre-images are computed by the reader of the entries, for any version of the server
    """

    options: StreamOptions
    profile: ServerProfile
    token_version: int
    start: ClusterTime | None
    start_token: ResumeToken | None
    splits: bool
    exact_images: bool = False
    quarantines: bool = False

    @property
    def reads_logged_images(self) -> bool:
        """Whether pre-images are entries of the oplog."""
        return self.profile.logs_pre_images and not self.exact_images

    @property
    def finds_logged_images(self) -> bool:
        """Whether pre-images that are entries of the oplog are given, possibly together with stored ones."""
        return self.profile.finds_logged_pre_images and not self.exact_images

    @property
    def shows_wall_time(self) -> bool:
        """Whether events carry ``wallTime``: expanded ones do on every server that has them (6.0.27, feature
        compatibility version 5.0)."""
        expanded = self.options.show_expanded_events and self.profile.expanded_events_and_images
        return self.profile.wall_time or expanded

    @property
    def read_after(self) -> ClusterTime | None:
        """Read the entries with ts greater than this; ``None`` means that the stream starts now (``start_at``)."""
        return None if self.start is None else ClusterTime(max(self.start - 1, 0))

    def start_after(self, newest: ClusterTime) -> Plan:
        """The plan of a stream that was opened without a start: it begins one tick after ``newest``, the time of the
        last operation (``OplogSource.operation_time``; of a cluster, one that every member knows), as on the server."""
        return self.start_at(newest.tick())

    def start_at(self, cluster_time: ClusterTime) -> Plan:
        """The plan with a start, inclusive."""
        invariant(self.start is None, "a plan is given a start although it has one")
        return replace(self, start=cluster_time)

    @property
    def first_token(self) -> ResumeToken:
        """The resume token of a stream that has read nothing yet (semantics 7)."""
        if self.start_token is not None and not self.start_token.is_high_water_mark:
            return self.start_token
        # A high-water mark is only a time: it is rewritten, in the version of the stream's tokens.
        invariant(self.start is not None, "the first token is asked of a plan without a start")
        return ResumeToken.high_water_mark(self.start or 0, version=self.token_version)

    def confirm_history(self, oldest: ClusterTime, complete: bool) -> None:
        """Confirm that the oplog reaches back to the start.

        ``oldest`` is the cluster time of its first entry; ``complete`` says that nothing was ever written before it.
        Raises ``ChangeStreamHistoryLost`` (286).
        """
        if self.read_after is not None and not reaches_back(self.read_after, oldest, complete):
            raise history_lost(
                f"The stream would start at {self.start}, and the oldest entry is of {oldest}: start a new stream "
                "then or later, and keep a longer oplog (replSetResizeOplog, minRetentionHours)"
            )


def build_plan(options: StreamOptions, profile: ServerProfile = SERVER_6_0) -> Plan:
    """The plan for ``options`` on a server of ``profile``'s version.

    Raises ``InvalidResumeToken`` (260) when the token is an invalidate's or lacks the UUID that a collection stream
    needs, ``ChangeStreamFatal`` (280) when the start is a fragment of a split event and the pipeline does not split,
    ``UsageError`` when the version does not know an option or its value (40415; 2, on 4.4 40575).
    """
    _check_profile(options, profile)
    splits = any(_stage_name(stage) == SPLIT_STAGE for stage in options.pipeline)
    _check_token(options, profile)
    token = options.start_token
    if token is not None and token.fragment_num is not None and not splits:
        raise ChangeStreamFatal(
            "To resume from a split event, the $changeStream pipeline must include a $changeStreamSplitLargeEvent stage"
        )
    version = 1 if options.generate_v2_tokens is False else profile.token_version
    if splits or options.generate_v2_tokens or (token is not None and token.version == 2):
        version = 2
    return Plan(options, profile, version, options.start, token, splits)


def exact_plan(options: StreamOptions, profile: ServerProfile) -> Plan:
    """The plan of a stream whose images are computed here, from entries that its source folds into image states."""
    # Before 6.0 the server does not have all of its images; exact ones do not need them.
    plain = replace(options, full_document="default", full_document_before_change="off")
    return replace(build_plan(plain, profile), options=options, exact_images=True)


def _stage_name(stage: bytes) -> bytes:
    first = next(raw_bson.elements(stage), None)
    return b"" if first is None else first.name


def _check_token(options: StreamOptions, profile: ServerProfile) -> None:
    token = options.start_token
    if token is None:
        return
    stop = "." if profile.messages_end_with_full_stop else ""
    if options.resume_after is not None and token.from_invalidate:
        raise InvalidResumeToken(
            "Attempting to resume a change stream using 'resumeAfter' is not allowed from an invalidate "
            f"notification{stop}",
            code=260,
            hint="Use startAfter with this token to go on after the invalidation",
        )
    if options.scope.kind == "collection" and not token.is_high_water_mark and token.uuid is None:
        raise InvalidResumeToken(
            f"Attempted to resume a single-collection stream, but the resume token does not include a UUID{stop}",
            code=260,
        )
    if token.token_type == HIGH_WATER_MARK and not token.is_high_water_mark:
        raise InvalidResumeToken("Invalid high water mark token", code=6189505)


def _check_profile(options: StreamOptions, profile: ServerProfile) -> None:
    if profile.computes_post_images:
        return
    if options.show_expanded_events and not profile.expanded_events_and_images:
        raise unknown_option("showExpandedEvents", hint="It came with 6.0")
    if options.full_document in ("whenAvailable", "required"):
        raise unknown_mode("fullDocument", options.full_document, profile)
