"""Settings of the gateway's process: garbage collection, and the limit of open files."""

from __future__ import annotations

import gc
import sys

#: Objects allocated between two garbage collections. Streams that open and close make cycles, events do not.
_GARBAGE_AFTER = (50_000, 20, 50)
#: Open files that are not clients' connections: the engine's own, logs, libraries.
_FILES_RESERVED = 100


def settle() -> None:
    """Exclude what is loaded so far, all of which stays, from garbage collection, and collect less often. With
    thousands of streams garbage collection would cost more than the streams."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_GARBAGE_AFTER)


def raise_file_limit() -> None:
    """Raise the limit of open files to the most that the system allows this process. Each client takes two."""
    if sys.platform != "win32":
        import resource  # noqa: PLC0415  not on every system

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft != hard:
            try:
                resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            except (OSError, ValueError):
                return  # the system grants less than its hard limit says


def files_for_connections() -> int:
    """How many open files connections may take, to clients and to the server together."""
    if sys.platform == "win32":
        return sys.maxsize
    import resource  # noqa: PLC0415  not on every system

    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return sys.maxsize if soft == resource.RLIM_INFINITY else max(0, soft - _FILES_RESERVED)
