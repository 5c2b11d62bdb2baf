"""What a signal's handler calls, done by a thread of its own.

A handler runs in the main thread, between any two of its steps. If it sets the event for which that thread has just
begun to wait, or logs what that thread is just logging, it waits for a lock that its own thread holds, for ever: the
command would no longer end.
"""

from __future__ import annotations

import _thread
from collections.abc import Callable


def call_aside(call: Callable[[], object]) -> None:
    """Call it in another thread, and do not wait. What it raises is printed by Python.

    ``threading.Thread`` will not do: its ``start`` takes locks too.
    """
    _thread.start_new_thread(call, ())
