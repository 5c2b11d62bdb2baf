"""Programs in other languages that use a deployment through their own drivers and print what they saw.

A program runs where its driver is installed, and its tests are skipped with a reason where it is not. Node's driver is
fetched by npm into the cache when it is first needed (8 MB, seconds); mongosh (154 MB) only by the slow tests.
"""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tailrace.base.cache import cache_directory, cached_directory

HERE = Path(__file__).parent / "drivers"
_NODE_PACKAGES = {"mongodb": "7.8.0"}
_MONGOSH_PACKAGES = {"mongosh": "2.12.0"}
#: Where Debian keeps the sources of Go's packages.
_GO_SOURCES = Path("/usr/share/gocode")
#: Debian's driver for Java.
_JAVA_DRIVER = Path("/usr/share/java/mongo-java-driver.jar")
_LIMIT_S = 900


class Unavailable(Exception):  # noqa: N818  the reason for a skip
    """A driver that this machine does not have; the message says what is missing."""


def run(command: list[str], **environment: str) -> str:
    """What a program prints. Fails with all of its output if it does not end well."""
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=_LIMIT_S, check=False, env={**os.environ, **environment}
    )
    assert done.returncode == 0, (
        f"{command[0]} ended with {done.returncode}:\n{done.stdout[-6000:]}{done.stderr[-3000:]}"
    )
    return done.stdout


def node(uri: str, name: str) -> str:
    packages = npm(_NODE_PACKAGES)
    return run([tool("node"), str(HERE / "node_driver.mjs"), uri, name, str(packages)])


def mongosh(uri: str, name: str) -> str:
    shell = shutil.which("mongosh")
    if shell is None:
        shell = str(npm(_MONGOSH_PACKAGES) / "node_modules" / ".bin" / "mongosh")
    return run([shell, "--quiet", "--norc", uri, str(HERE / "mongosh_driver.js")], NAME=name)


def perl(uri: str, name: str) -> str:
    interpreter = tool("perl")
    if subprocess.run([interpreter, "-MMongoDB", "-e", "1"], capture_output=True, check=False).returncode:
        raise Unavailable("Perl's driver is not installed (Debian: libmongodb-perl)")
    return run([interpreter, str(HERE / "perl_driver.pl"), uri, name])


def built(source: Path, command: Callable[[Path], list[str]], **environment: str) -> Path:
    """The program that ``command`` makes of ``source``. It is kept, since Go needs 15 s of processor for it."""
    name = f"drivers/{source.stem}-{hashlib.sha256(source.read_bytes()).hexdigest()[:20]}"

    def fill(directory: Path) -> None:
        run(command(directory), **environment)

    return cached_directory(name, fill, usable=lambda found: any(found.iterdir()))


def c(uri: str, name: str) -> str:
    compiler, pkg_config = tool("gcc"), tool("pkg-config")
    flags = subprocess.run(
        [pkg_config, "--cflags", "--libs", "libmongoc-1.0"], capture_output=True, text=True, check=False
    )
    if flags.returncode:
        raise Unavailable("the C driver is not installed (Debian: libmongoc-dev)")
    source = HERE / "c_driver.c"
    options = flags.stdout.split()
    made = built(source, lambda folder: [compiler, "-Wall", "-o", str(folder / "program"), str(source), *options])
    return run([str(made / "program"), uri, name])


def php(uri: str, name: str) -> str:
    interpreter = tool("php")
    if "mongodb" not in subprocess.run([interpreter, "-m"], capture_output=True, text=True, check=False).stdout.split():
        raise Unavailable("PHP's driver is not installed (Debian: php8.2-cli, php8.2-mongodb)")
    return run([interpreter, str(HERE / "php_driver.php"), uri, name])


def ruby(uri: str, name: str) -> str:
    interpreter = tool("ruby")
    if subprocess.run([interpreter, "-rmongo", "-e", "1"], capture_output=True, check=False).returncode:
        raise Unavailable("Ruby's driver is not installed (Debian: ruby-mongo)")
    return run([interpreter, str(HERE / "ruby_driver.rb"), uri, name])


def go(uri: str, name: str) -> str:
    compiler, source = tool("go"), HERE / "go_driver.go"
    if not (_GO_SOURCES / "src" / "go.mongodb.org" / "mongo-driver").is_dir():
        raise Unavailable("Go's driver is not installed (Debian: golang-mongodb-mongo-driver-dev)")
    environment = {"GO111MODULE": "off", "GOPATH": str(_GO_SOURCES), "GOFLAGS": ""}
    made = built(source, lambda folder: [compiler, "build", "-o", str(folder / "program"), str(source)], **environment)
    return run([str(made / "program"), uri, name])


def java(uri: str, name: str) -> str:
    compiler, runtime, source = tool("javac"), tool("java"), HERE / "JavaDriver.java"
    if not _JAVA_DRIVER.exists():
        raise Unavailable("Java's driver is not installed (Debian: libmongodb-java)")
    made = built(source, lambda folder: [compiler, "-cp", str(_JAVA_DRIVER), "-d", str(folder), str(source)])
    quick = ["-Xmx256m", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-Xshare:auto"]
    return run([runtime, *quick, "-cp", f"{_JAVA_DRIVER}:{made}", "JavaDriver", uri, name])


PROGRAMS: dict[str, Callable[[str, str], str]] = {
    "node": node,
    "perl": perl,
    "c": c,
    "php": php,
    "ruby": ruby,
    "go": go,
    "java": java,
    "mongosh": mongosh,
}


def facts(program: str, uri: str, name: str) -> str:
    """What ``program`` prints about the deployment at ``uri``; it uses the database ``name``. Skips where it cannot be
    run here. A program must print nothing that differs from one run to the next."""
    try:
        return PROGRAMS[program](uri, name)
    except Unavailable as reason:
        pytest.skip(str(reason))


def mongosh_is_at_hand() -> bool:
    return shutil.which("mongosh") is not None or _npm_directory(_MONGOSH_PACKAGES).is_dir()


def tool(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        raise Unavailable(f"{name} is not installed")
    return found


def _npm_name(packages: dict[str, str]) -> str:
    return "npm/" + "-".join(f"{name}-{version}" for name, version in packages.items()).replace("/", "+")


def _npm_directory(packages: dict[str, str]) -> Path:
    return cache_directory() / _npm_name(packages)


def npm(packages: dict[str, str]) -> Path:
    """A directory whose ``node_modules`` holds the packages, fetched by npm when first asked for."""
    return _fetched(_npm_name(packages), tuple(f"{name}@{version}" for name, version in packages.items()))


@functools.cache
def _fetched(name: str, wanted: tuple[str, ...]) -> Path:
    npm = tool("npm")

    def fill(directory: Path) -> None:
        (directory / "package.json").write_text('{"private": true}')
        command = [npm, "install", "--ignore-scripts", "--no-audit", "--no-fund", "--prefix", str(directory), *wanted]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_LIMIT_S)
        if done.returncode:
            raise Unavailable(f"npm could not fetch {', '.join(wanted)}: {done.stderr.strip()[-300:]}")

    return cached_directory(name, fill, usable=lambda found: (found / "node_modules").is_dir())
