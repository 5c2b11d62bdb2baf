"""A stream that was given a step by another one performs that step itself when it needs its own cursor."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Final

from tailrace.core.cursor import CursorRegistry, OplogRead, ReadOplog
from tailrace.core.cursor.get_more import GetMoreCommand
from tailrace.core.cursor.registry import IDLE_MS_MAX
from tailrace.errors import InternalError
from tailrace.watch.gateway.local_acting import advance
from tailrace.watch.gateway.served import ServedStream
from tailrace.watch.gateway.shared_steps import SharedSteps

#: After how long, and how many streams at once.
_SETTLE_MS: Final = IDLE_MS_MAX // 2
_SETTLED_AT_ONCE: Final = 500

_log: Final = logging.getLogger("tailrace.gateway")


def settle(stream: ServedStream, cursors: CursorRegistry, steps: SharedSteps) -> None:
    """Do the step that the stream was given, if there is one. Its reply has to be the one that was given; if it is not,
    which would be a fault of ours, the cursor is closed, so that the stream's driver resumes after what it has seen."""
    step = steps.taken(stream.sharing)
    if step is None or stream.cursor_id not in cursors:
        return
    wanted = GetMoreCommand(stream.cursor_id, stream.namespace, step.batch_size, 0)
    acting = cursors.get_more("", b"", stream.used_ms, wanted)
    try:
        reply = advance(acting, None, None)
        if isinstance(reply, ReadOplog):
            reply = advance(acting, OplogRead(step.batch, True, stream.used_ms), None)
    except InternalError:
        _log.exception("a change stream has failed")
        return
    stream.sharing.own_ms = stream.used_ms
    if reply != step.reply(stream.cursor_id):
        _log.error(
            "a stream is closed: from the same entries it made something other than the streams that ask for the same"
        )
        acting.close()
        cursors.kill(stream.cursor_id)


def settle_idle(streams: Iterable[ServedStream], cursors: CursorRegistry, steps: SharedSteps, now_ms: int) -> None:
    """The same for those whose cursors were not used for long, or these would count as idle: some of them."""
    unsettled = (stream for stream in streams if stream.sharing.owed is not None)
    for stream in [one for one in unsettled if now_ms - one.sharing.own_ms >= _SETTLE_MS][:_SETTLED_AT_ONCE]:
        settle(stream, cursors, steps)
