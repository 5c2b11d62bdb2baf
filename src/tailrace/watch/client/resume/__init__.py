"""What a change stream's client does, as data: the resume token, what follows a failure, what a resume asks for.

Pure: the streams of both engines, waiting or awaited, ask it and do the work. The rules are numbered in
docs/reference/driver-rules.md, and each piece of code names those that it keeps.
"""

from tailrace.watch.client.resume.failure import CursorCommand, Failure, is_resumable, labels_of_stream
from tailrace.watch.client.resume.limits import get_more_wait_ms, waits_too_long
from tailrace.watch.client.resume.process import Next, ResumeProcess, SaidStart

__all__ = [
    "CursorCommand",
    "Failure",
    "Next",
    "ResumeProcess",
    "SaidStart",
    "get_more_wait_ms",
    "is_resumable",
    "labels_of_stream",
    "waits_too_long",
]
