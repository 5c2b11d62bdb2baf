"""Where files that were fetched or made once are kept, and how a directory appears there complete or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from tailrace.errors import UsageError


def cache_directory() -> Path:
    """``$XDG_CACHE_HOME/tailrace``, or else ``~/.cache/tailrace``. It may not exist yet."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "tailrace"


def cached_directory(name: str, fill: Callable[[Path], None], *, usable: Callable[[Path], bool]) -> Path:
    """The directory ``name`` in the cache, made by ``fill`` unless a usable one stands there.

    ``fill`` gets an empty directory beside the final place, and a rename puts it there. So two processes may do it at
    once, and one that dies in the middle leaves nothing that looks finished. Raises UsageError where the cache
    cannot be written.
    """
    final = cache_directory() / name
    if final.is_dir():
        if usable(final):
            return final
        shutil.rmtree(final, ignore_errors=True)
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{final.name}-", dir=final.parent))
    except OSError as error:
        raise UsageError(
            f"The cache directory {final.parent} cannot be written: {error.strerror}",
            hint="Set XDG_CACHE_HOME to a directory that can be written",
        ) from error
    try:
        fill(work)
        work.chmod(0o755)
        try:
            work.rename(final)
        except OSError:
            # Another process was faster: its directory is as good as ours.
            if not (final.is_dir() and usable(final)):
                raise
    except OSError as error:
        raise UsageError(f"{final} cannot be made: {error}") from error
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return final
