"""Java's archive of classes: written by the first session, mapped by the next, and left out wherever it cannot be."""

from __future__ import annotations

import os
import shlex
import subprocess
import tempfile
import time
from pathlib import Path

import pytest

from tailrace.base.cache import cache_directory
from tailrace.lake.spark.runtime.class_data import class_data_options
from tailrace.lake.spark.runtime.java import Java, find_java
from tailrace.lake.spark.runtime.session import java_options

NOBODY = 2**22 + 1  # no process has this id on Linux


@pytest.fixture
def java(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Java:
    found = find_java()
    if not (found.home / "lib" / "server" / "classes.jsa").is_file():
        pytest.skip("this Java has no archive of its own classes")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "a cache"))
    monkeypatch.setattr(tempfile, "tempdir", "/tmp")
    return found


def run(java: Java, options: str, *more: str) -> subprocess.CompletedProcess[str]:
    command = [str(java.home / "bin" / "java"), *shlex.split(options), *more, "-version"]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_what_one_session_writes_the_next_one_maps(java: Java) -> None:
    first = class_data_options(java)
    assert "-XX:ArchiveClassesAtExit=" in first
    done = run(java, first)
    assert (done.returncode, done.stdout) == (0, "")
    second = class_data_options(java)
    assert "-XX:SharedArchiveFile=" in second
    done = run(java, second, "-Xshare:on")  # an error where the archive cannot be mapped
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert class_data_options(java) == second


def test_options_of_the_user_stand_beside_ours_and_java_starts_with_both(java: Java) -> None:
    """They replaced ours, including the one for the archive: no test had given a session any options."""
    plain = java_options(java, "", fast_start=True, class_data=True)
    run(java, plain)
    plain = java_options(java, "", fast_start=True, class_data=True)
    assert "SharedArchiveFile=" in plain
    both = java_options(java, '-Da="b c" -XX:TieredStopAtLevel=4', fast_start=False, class_data=True)
    assert both.endswith('-Da="b c" -XX:TieredStopAtLevel=4')
    assert "ArchiveClassesAtExit=" in both, "another JVM has an archive of its own"
    assert java_options(java, '-Da="b c"', fast_start=True, class_data=True) == f'{plain} -Da="b c"'
    for given in ("-XX:+UseG1GC", "-XX:+UseParallelGC -Xss2m", "-Xshare:off", "-agentlib:jdwp=transport=dt_socket"):
        options = java_options(java, given, fast_start=True, class_data=True)
        assert options.endswith(f" {given}")
        if "jdwp" in given:
            assert options == f"-XX:TieredStopAtLevel=1 -XX:+UseSerialGC {given}", "no archive is written with an agent"
            continue
        done = run(java, options)
        assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert java_options(java, "", fast_start=True, class_data=True) == plain, "the archive of other sessions stays"


def test_java_keeps_its_temporary_files_where_python_does(
    java: Java, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Java uses /tmp whatever TMPDIR says: with a read-only root file system, Spark ended in a traceback."""
    (tmp_path / "a place").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "a place"))
    done = run(java, java_options(java, "", fast_start=True, class_data=False), "-XshowSettings:properties")
    assert f"java.io.tmpdir = {tmp_path / 'a place'}\n" in done.stderr


def test_a_damaged_archive_is_dropped_since_java_would_end(java: Java) -> None:
    run(java, class_data_options(java))
    options = class_data_options(java)
    (archive,) = (cache_directory() / "class-data").glob("*.jsa")
    whole = archive.read_bytes()
    for damaged in (b"", b"no archive", whole[: len(whole) // 2], bytes(len(whole))):
        archive.write_bytes(damaged)
        begun = class_data_options(java)
        assert "-XX:ArchiveClassesAtExit=" in begun
        assert not archive.exists()
        Path(shlex.split(begun)[0].partition("=")[2]).unlink()
    archive.write_bytes(whole)
    assert class_data_options(java) == options


def test_half_an_archive_is_not_taken_and_goes_with_its_program(java: Java) -> None:
    begun = Path(shlex.split(class_data_options(java))[0].partition("=")[2])
    begun.write_bytes(bytes(4096))
    assert class_data_options(java) == "", "one program writes it at a time"
    half = begun.rename(begun.with_name(begun.name.replace(f".{os.getpid()}.", f".{NOBODY}.")))
    assert class_data_options(java) == "", "its JVM may be writing still"
    os.utime(half, (0, 0))
    assert "-XX:ArchiveClassesAtExit=" in class_data_options(java)
    assert not half.exists()


def test_archives_that_nobody_uses_any_more_are_removed_when_another_one_is_begun(java: Java) -> None:
    """Each upgrade left an archive of 180 MB behind for good: no test had looked at files of other versions."""
    run(java, class_data_options(java))
    used = class_data_options(java)
    (archive,) = (cache_directory() / "class-data").glob("*.jsa")
    now = time.time()
    os.utime(archive, (0, 0))
    assert class_data_options(java) == used
    assert archive.stat().st_mtime >= now - 60, "its use is noted"
    others = {
        "spark-4.0.0-java-17-0123456789abcdef.9.jsa": 31,
        "spark-4.0.0-java-17-fedcba9876543210.9.jsa": 29,
        f"spark-4.0.0-java-17-0123456789abcdef.{NOBODY}.new": 2,
        f"spark-4.0.0-java-17-0123456789abcdef.{os.getpid()}.new": 2,
        f"spark-4.0.0-java-17-fedcba9876543210.{NOBODY}.new": 0,
        "what somebody else put here": 400,
    }
    for name, days in others.items():
        file = archive.with_name(name)
        file.write_bytes(b"x")
        os.utime(file, (now - days * 86400,) * 2)
    assert "-XX:ArchiveClassesAtExit=" in class_data_options(java, "-Xss2m")
    kept = {file.name for file in archive.parent.iterdir()} & others.keys()
    assert sorted(others.keys() - kept) == sorted([*others][:1] + [*others][2:3])
    assert archive.exists()


def test_without_a_place_or_an_archive_of_javas_own_nothing_is_asked_for(
    java: Java, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert class_data_options(Java(tmp_path, "17.0.1", "a test")) == ""
    blocked = tmp_path / "file"
    blocked.write_text("no directory")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    assert class_data_options(java) == ""
