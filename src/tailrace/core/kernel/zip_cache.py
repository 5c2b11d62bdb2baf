"""A cache of compiled code for a package that is imported from a zip file, as ``spark-submit --py-files`` delivers it.

By itself numba caches such code under the path of the zip file. Spark copies the file to a new directory for each
application and each executor, so nothing cached is ever found again. This module caches by a checksum of the source
instead of by path: each machine compiles the kernel once.

It is separate from ``tailrace.core.kernel.compiled`` because every change of that module recompiles all entry points.
"""

from __future__ import annotations

from typing import Any

from numba.core import caching, config

from tailrace.core.kernel.compiled import fingerprint

_OURS = "/tailrace/core/kernel/"
#: numba's class for files in a zip archive; its name is private in some versions.
_ZIPPED: Any = getattr(caching, "ZipCacheLocator", None) or getattr(caching, "_ZipCacheLocator", None)


class _BySource(_ZIPPED or object):  # type: ignore[misc]
    """Tells numba where to cache a function: in ``NUMBA_CACHE_DIR`` if set, else in numba's directory in the user's
    cache. The directory is named after the checksum of the source, which also tells whether a file is current."""

    def __init__(self, function: Any, path: str) -> None:
        super().__init__(function, path)
        self._stamp = fingerprint(function.__module__)
        chosen = getattr(config, "CACHE_DIR", "")
        if chosen:
            self._cache_path = f"{chosen}/{self.get_suitable_cache_subpath(path)}"

    @classmethod
    def get_suitable_cache_subpath(cls, path: str) -> str:
        module = path.rpartition("/")[2].removesuffix(".py")
        return f"tailrace_kernel_{fingerprint(module):08x}"

    def get_source_stamp(self) -> Any:
        return self._stamp

    @classmethod
    def from_function(cls, function: Any, path: str) -> Any:
        if ".zip/" not in path or _OURS not in path:
            return None
        found = cls(function, path)
        try:
            found.ensure_cache_path()
        except OSError:
            raise RuntimeError("no locator available: no cache directory can be written") from None
        return found


def keep_by_source() -> None:
    """From now on cache the kernel's code by its source if that lies in a zip file. Call this before any kernel module
    is imported. Does nothing under a version of numba that offers no hook for it."""
    classes = getattr(getattr(caching, "CacheImpl", None), "_locator_classes", None)
    if _ZIPPED is not None and isinstance(classes, list) and _BySource not in classes:
        classes.insert(0, _BySource)
