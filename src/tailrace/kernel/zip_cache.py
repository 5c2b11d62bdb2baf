"""Compiled code of a package that lies in a zip file, as ``spark-submit --py-files`` gives it to executors.

numba keeps such code under the zip file's path. Spark puts the file into a new directory for each application and each
executor, so all of it was compiled anew each time, and what was kept was never used again. Here it is kept by what the
source says, and each machine compiles it once.

This is a module of its own because a change in ``compiled`` has every entry point compiled anew.
"""

from __future__ import annotations

from typing import Any

from numba.core import caching, config

from tailrace.kernel.compiled import fingerprint

_OURS = "/tailrace/kernel/"
#: numba's affair, and private in some versions.
_ZIPPED: Any = getattr(caching, "ZipCacheLocator", None) or getattr(caching, "_ZipCacheLocator", None)


class _BySource(_ZIPPED or object):  # type: ignore[misc]
    """In ``NUMBA_CACHE_DIR`` where that is set, else in the user's own cache of numba."""

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
    """From now on the kernel's code is kept so, where its source lies in a zip file. For use before the kernel's
    modules are imported; does nothing with a numba that has no place for it."""
    classes = getattr(getattr(caching, "CacheImpl", None), "_locator_classes", None)
    if _ZIPPED is not None and isinstance(classes, list) and _BySource not in classes:
        classes.insert(0, _BySource)
