"""Java's class-data sharing for Spark: the classes of a session, parsed and checked once, are mapped by the next ones.

A JVM that runs Spark loads 15,000 classes out of 300 jars: half of the CPU of a session's start and of its first query.
The first session on a machine writes them to an archive when it ends (3 s of CPU after the program's end, 100 MB in the
cache directory), and later ones map it. Java passes over an archive that does not fit its jars, but half an archive
makes it crash, so the size is part of the name, and an archive of another size is dropped. After an upgrade of Java or
Spark there is a new archive; one that nobody has used for a month is removed.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

import pyspark

from tailrace.base.cache import cache_directory
from tailrace.lake.spark.runtime.java import Java

#: What a dynamic archive begins with. Java writes the beginning last, so what has it is whole.
_MAGIC: Final = (0xF00BABA8).to_bytes(4, "little")
#: How long a JVM may take to write one at the end of its program.
_WRITING_S: Final = 300
_UNUSED_S: Final = 30 * 86400
#: How long, at least, passes between two notes that an archive was used.
_NOTED_S: Final = 86400
#: Java says of each class why it is not archived, on standard output.
_QUIET: Final = "-Xlog:cds*=off"
#: Options with which the user decides on archives, and agents: a JVM that is to write an archive refuses to start with
#: one.
_LEFT_ALONE: Final = re.compile(
    r"-Xshare:|-javaagent:|-agentlib:|-agentpath:|SharedArchiveFile|ArchiveClassesAtExit|SharedClassListFile"
    r"|DumpLoadedClassList"
)
#: Options of the JVM itself, such as its collector's. An archive may not fit a JVM that has others.
_OF_JVM: Final = re.compile(r"-X[^\s\"']+")


def class_data_options(java: Java, given: str = "") -> str:
    """Options for a JVM that is to run Spark: to use the archive, or to write it where there is none. Empty where
    neither can be. ``given`` are the user's own options, which are kept."""
    if _LEFT_ALONE.search(given):
        return ""
    jars = Path(os.environ.get("SPARK_HOME") or Path(pyspark.__file__).parent) / "jars"
    base = java.home / "lib" / "server" / "classes.jsa"
    try:
        if not base.is_file():
            return ""  # only what comes on top of Java's own archive can be written when a program ends
        key = _key(java, [base, *sorted(jars.glob("*.jar"))], _OF_JVM.findall(given))
        directory = cache_directory() / "class-data"
        directory.mkdir(parents=True, exist_ok=True)
        archive = _archive(directory, key) or _taken(directory, key)
        if archive is not None:
            _note_use(archive)
            return f'"-XX:SharedArchiveFile={archive}" {_QUIET}'
        if not os.access(directory, os.W_OK):
            return ""
        if next(directory.glob(f"{key}.*.new"), None) is not None:
            return ""  # another program is to write it, or was killed before: after a while it will be ours to do
        _sweep(directory)
        written = directory / f"{key}.{os.getpid()}.new"
        written.touch()
        return f'"-XX:ArchiveClassesAtExit={written}" {_QUIET}'
    except OSError:
        return ""


def _key(java: Java, files: list[Path], options: list[str]) -> str:
    """Another Java, other jars, or other options of the JVM have an archive of their own."""
    digest = hashlib.sha256(" ".join([java.version, str(java.home), *options]).encode())
    for line in _facts(files):
        digest.update(line.encode())
    return f"spark-{pyspark.__version__}-java-{java.major}-{digest.hexdigest()[:16]}"


def _facts(files: list[Path]) -> Iterator[str]:
    for file in files:
        facts = file.stat()
        yield f"{file} {facts.st_size} {facts.st_mtime_ns}\n"


def _archive(directory: Path, key: str) -> Path | None:
    """The archive, if there is a whole one."""
    for archive in directory.glob(f"{key}.*.jsa"):
        if archive.name == f"{key}.{archive.stat().st_size}.jsa" and _begins_well(archive):
            return archive
        archive.unlink()
    return None


def _taken(directory: Path, key: str) -> Path | None:
    """What an earlier session wrote, as the archive from now on. What others wrote next to it is dropped."""
    taken: Path | None = None
    for written in directory.glob(f"{key}.*.new"):
        with suppress(OSError):
            if taken is None and _begins_well(written):
                with written.open("rb") as file:
                    os.fsync(file.fileno())
                taken = written.rename(directory / f"{key}.{written.stat().st_size}.jsa")
            elif taken is not None or not _lives(written):
                written.unlink()
    return taken


def _note_use(archive: Path) -> None:
    with suppress(OSError):  # a cache that is only read, or another user's archive
        if time.time() - archive.stat().st_mtime > _NOTED_S:
            os.utime(archive)


def _sweep(directory: Path) -> None:
    """Remove what nobody has used for long, and what a program that is gone has left unfinished. A JVM that still maps
    a removed archive keeps it."""
    for file in [*directory.glob("spark-*.jsa"), *directory.glob("spark-*.new")]:
        with suppress(OSError):
            unused_s = time.time() - file.stat().st_mtime
            if unused_s > _UNUSED_S or (file.suffix == ".new" and unused_s > _NOTED_S and not _lives(file)):
                file.unlink()


def _begins_well(archive: Path) -> bool:
    with archive.open("rb") as file:
        return file.read(4) == _MAGIC


def _lives(written: Path) -> bool:
    """Whether the program that began the file is still there, or its JVM, which may write for a while after it."""
    if time.time() - written.stat().st_mtime < _WRITING_S:
        return True
    try:
        os.kill(int(written.name.split(".")[-2]), 0)
    except (ValueError, ProcessLookupError):
        return False
    except PermissionError:
        return True
    return True
