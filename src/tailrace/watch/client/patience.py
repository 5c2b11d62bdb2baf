"""Reading a stream for as long as it takes: for programs that go on unattended, and have nobody to report a passing
failure to."""

from __future__ import annotations

import logging
import time
from typing import Any, Final

from tailrace.errors import NonResumableError, TailraceError
from tailrace.read.source.time_limit import TimeLimitError

_PAUSE_S: Final = 1.0
_log = logging.getLogger("tailrace.client")


def try_next_patiently(stream: Any) -> Any | None:
    """``stream.try_next()``, where an error that leaves the stream open is logged, and is nothing new: the next call
    resumes the stream. Raises the errors that end it, and the end of the caller's time."""
    try:
        return stream.try_next()
    except TimeLimitError:
        raise
    except TailraceError as error:
        if not stream.alive or isinstance(error, NonResumableError):
            raise
        _log.warning("the stream is resumed when that is possible: %s", error)
        time.sleep(_PAUSE_S)
        return None
