"""What a gateway asks of the process that it has to itself."""

from __future__ import annotations

import gc
import sys

#: Objects made since the last look before garbage is looked for: streams that come and go make cycles, events do not.
_GARBAGE_AFTER = (50_000, 20, 50)
#: Files that are not clients' connections: the engine's own, logs, libraries.
_FILES_RESERVED = 100


def settle() -> None:
    """Take what is loaded by now, all of which stays, out of the search for garbage, and search less often: with
    thousands of streams the search would cost more than the streams do."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_GARBAGE_AFTER)


def raise_file_limit() -> None:
    """Allow as many open files as the system allows this process at all: clients take two each."""
    if sys.platform != "win32":
        import resource  # noqa: PLC0415  not on every system

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft != hard:
            try:
                resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            except (OSError, ValueError):
                return  # a system that promises more than it gives


def files_for_connections() -> int:
    """How many files connections may take, at both sides together."""
    if sys.platform == "win32":
        return sys.maxsize
    import resource  # noqa: PLC0415  not on every system

    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return sys.maxsize if soft == resource.RLIM_INFINITY else max(0, soft - _FILES_RESERVED)
