"""PyMongo's source distribution, which holds the drivers' test files and PyMongo's own tests.

It is fetched by pip when a test first asks for it, checked by the hash in ``requirements.lock``, and kept in the cache
outside the repository: the drivers' files have a licence of their own, so they are used here and not copied.
"""

from __future__ import annotations

import functools
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pymongo

from tailrace.base.cache import cached_directory

_LOCK = Path(__file__).parents[1] / "requirements.lock"


class NotFetchedError(Exception):
    """The source could not be had; the message says why, for a skip."""


@functools.cache
def pymongo_source() -> Path:
    """The unpacked source of the installed PyMongo. Raises NotFetchedError where it cannot be downloaded."""
    name = f"pymongo-{pymongo.version}"

    def fill(directory: Path) -> None:
        _download(directory)
        for archive in directory.glob("*.tar.gz"):
            with tarfile.open(archive) as parcel:
                parcel.extractall(directory, filter="data")
            archive.unlink()

    return cached_directory(f"sources/{name}", fill, usable=lambda found: (found / name).is_dir()) / name


def _download(directory: Path) -> None:
    wanted = directory / "requirements.txt"
    wanted.write_text(f"pymongo=={pymongo.version} {_locked_hashes()}\n")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--disable-pip-version-check"]
    command += ["--retries", "1", "--no-deps", "--no-binary", "pymongo", "--require-hashes"]
    command += ["--dest", str(directory), "--requirement", str(wanted)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    wanted.unlink()
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR:")] or ["no reason given"]
        raise NotFetchedError(f"pip could not fetch the source of PyMongo {pymongo.version}: {lines[-1]}")


def _locked_hashes() -> str:
    """The hashes of the locked PyMongo, its source among them, as pip's options."""
    block = re.search(
        rf"(?m)^pymongo=={re.escape(pymongo.version)} \\\n((?:    --hash=\S+(?: \\)?\n)+)", _LOCK.read_text()
    )
    if block is None:
        raise NotFetchedError(f"PyMongo {pymongo.version} is not the version that requirements.lock names")
    return " ".join(re.findall(r"--hash=\S+", block[1]))
