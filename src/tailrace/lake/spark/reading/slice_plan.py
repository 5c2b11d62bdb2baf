"""The stream's plan in one of its slices."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Final

from tailrace.core.plan.plan import Plan
from tailrace.core.plan.profile import profile_for
from tailrace.core.stream.stream import Stream
from tailrace.errors import ChangeStreamFatal
from tailrace.lake.spark.planning.input_partition import OplogSlice
from tailrace.lake.spark.query.options import ReadOptions, Start

_log = logging.getLogger("tailrace.spark")
#: The operations that this process has reported.
_reported: Final[set[str]] = set()


def slice_plan(options: ReadOptions, slice_: OplogSlice, *, quarantines: bool = False) -> Plan:
    """The plan of the slice's stream; with ``quarantines`` it puts aside what a stage cannot handle."""
    if slice_.resume is None:
        start = Start("startAtOperationTime", time=slice_.after.tick())
    else:
        start = Start(slice_.resume.option, token=slice_.resume.token.to_bson())
    stream = options.stream_options(start, v2_tokens=slice_.token_version == 2)
    return replace(options.plan(stream, profile_for(slice_.server_version)), quarantines=quarantines)


def token_not_found(slice_: OplogSlice) -> ChangeStreamFatal:
    """Later slices do not search, so the question must not stay open here, as it may in the server's stream."""
    return ChangeStreamFatal(
        "cannot resume stream; the resume token was not found.",
        hint=f"The oplog was read up to {slice_.until} and holds no event with this token in this stream; a $match "
        "that excludes the event hides it too",
    )


def report_skipped(stream: Stream) -> None:
    """Say in the worker's log, once for each kind, which entries gave no events because this version does not know
    them."""
    for kind in stream.statistics.unknown_operations.keys() - _reported:
        _reported.add(kind)
        _log.warning("oplog entries of the kind '%s' are skipped: this version of Tailrace does not know it", kind)
