"""Object stores for the products that are in one, and their mirrors in the products' folders.

The hand works on files. So a store's objects have a mirror in the product's folder. It is made after each run, and if
the hand changes it, the store is changed accordingly before the next run. A run that is killed leaves the mirror as it
was, and the next one finds the store as the killed one left it. The seed says in which kind of store a product is.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

import obstore

from tailrace.base.object_place import ObjectPlace
from tailrace.errors import SinkError
from tests.gateway.programs import Unavailable
from tests.products.product import Job
from tests.tables.azure_server import AzureServer, azure_server
from tests.tables.google_server import GoogleServer, google_server
from tests.tables.object_server import ObjectServer, object_server, weed
from tests.tables.unkind_proxy import Fault, UnkindProxy

#: The addresses of the ways to the stores that run, by their kinds, as JSON.
_ADDRESSES: Final = "TAILRACE_TESTS_OBJECT_STORES"
_KINDS: Final = {"s3": ObjectServer, "azure": AzureServer, "google": GoogleServer}
#: Those that are fetched when they are first needed.
_FETCHED: Final = {"azure": azure_server, "google": google_server}
_IN_STORE: Final = "-in-store"
#: What happens to requests that write, as often as each other; and how often those that read break off.
_TROUBLES: Final[tuple[Fault, ...]] = ("lost", "lost", "cut", "slow down")
_OFTEN: Final = 0.06
_RARELY: Final = 0.02
_bad_days: list[random.Random] = []
#: What is said of a mirror that has no file, and of one that is being written.
_NOTHING: Final = sha256().hexdigest().encode()
_UNDER_WAY: Final = b"under way"


@contextmanager
def store_for(names: Sequence[str], folder: Path, *, of_all_kinds: bool = False) -> Iterator[None]:
    """An object store, if one of the products needs one, for this process and its children. ``of_all_kinds``: one
    for Azure and one for Google too, where they are available.

    The keys of all of them are in the environment from the beginning: a source that a Spark session knows keeps the
    environment in which it became known, so one that a lake on the disk had begun could not write to a store later."""
    with ExitStack() as stack:
        if any(one.endswith(_IN_STORE) for one in names):
            running = {"s3": stack.enter_context(object_server(folder / "objects")).address}
            for kind, server in _FETCHED.items() if of_all_kinds else ():
                with suppress(Unavailable):
                    running[kind] = stack.enter_context(server(folder / kind)).address
            ways = {kind: stack.enter_context(UnkindProxy(one, _trouble)).address for kind, one in running.items()}
            keys = {_ADDRESSES: json.dumps(ways), **_keys_of(ways)}
            os.environ.update(keys)
            stack.callback(lambda: [os.environ.pop(name, None) for name in keys])
        yield


def without_store(names: Sequence[str]) -> list[str]:
    """Those products that this machine can run."""
    return [one for one in names if not one.endswith(_IN_STORE) or weed() is not None]


def server_of(job: Job) -> ObjectServer:
    """The store of a seed's products."""
    addresses = json.loads(os.environ[_ADDRESSES])
    kind = random.Random(f"tailrace store {job.options['played']}").choice(sorted(addresses))
    return _KINDS[kind](addresses[kind], 0, Path())


def _keys_of(addresses: dict[str, str]) -> dict[str, str]:
    """What is in the environment of whoever opens a store by its URI."""
    found = {k: v for kind, one in addresses.items() for k, v in _KINDS[kind](one, 0, Path()).environment().items()}
    return {name.replace("AWS_ENDPOINT", "AWS_ENDPOINT_URL"): value for name, value in found.items()}


@contextmanager
def losing_answers(seed: int) -> Iterator[None]:
    """A bad day of the stores, whoever asks them. By way of a proxy that is always there, since Spark's workers keep
    the address that they began with."""
    _bad_days.append(random.Random(f"tailrace unkind {seed}"))
    try:
        yield
    finally:
        _bad_days.pop()


def _trouble(_: int, method: str, __: str) -> Fault | None:
    if not _bad_days:
        return None
    drawn = _bad_days[-1].random()
    if method in ("GET", "HEAD"):
        return "cut" if drawn < _RARELY else None
    return _TROUBLES[int(drawn / _OFTEN)] if drawn < _OFTEN * len(_TROUBLES) else None


def prefix_of(job: Job) -> str:
    """Where a product's objects are, by its folder."""
    return f"p{sha256(job.folder.encode()).hexdigest()[:20]}"


def place_of(job: Job, state: Path) -> ObjectPlace:
    """The same as a place, with its local directory."""
    return server_of(job).place(prefix_of(job), state)


@dataclass(frozen=True)
class StoreMirror:
    """The objects of ``store`` as files of ``folder``. Below ``state``, if given, only the file ``kept`` is one of
    them. ``escaped``: names in a directory have ``~`` in place of ``!``."""

    store: ObjectPlace
    folder: Path
    state: str = ""
    kept: str = ""
    escaped: bool = False

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Keep the mirror and the store the same around a run. A run that is killed leaves an older mirror, or one that
        is half there: neither is a change by the hand."""
        marker = ObjectPlace(self.store.bucket, f"mirrors/{self.store.key}")
        mirrored = _read(marker) or _NOTHING  # the first run may have been killed
        if mirrored not in {self._digest(), _UNDER_WAY}:
            self._make_like()
        try:
            yield
        finally:
            obstore.put(self.store.bucket.store, marker.key, _UNDER_WAY)
            try:
                self._mirror()
            except OSError as error:  # a disk that the hand has filled
                raise SinkError(f"the mirror of the store cannot be written: {error.strerror}") from error
            finally:  # an incomplete mirror is not a change by the hand
                obstore.put(self.store.bucket.store, marker.key, self._digest())

    def _files(self) -> Iterator[Path]:
        for path in sorted(self.folder.rglob("*")) if self.folder.is_dir() else ():
            parts = path.relative_to(self.folder).parts
            if path.is_file() and (not self.state or parts[0] != self.state or parts[1:] == (self.kept,)):
                yield path

    def _digest(self) -> bytes:
        found = sha256()
        for path in self._files():
            found.update(f"{path.relative_to(self.folder)} ".encode() + sha256(path.read_bytes()).digest())
        return found.hexdigest().encode()

    def _make_like(self) -> None:
        wanted = {path.relative_to(self.folder).as_posix(): path for path in self._files()}
        if self.escaped:
            wanted = {name.replace("~", "!"): path for name, path in wanted.items()}
        for one in list(self.store.objects()):
            if one.name not in wanted:
                (self.store / one.name).unlink()
        for name, path in wanted.items():
            obstore.put(self.store.bucket.store, f"{self.store.key}/{name}", path.read_bytes())

    def _mirror(self) -> None:
        names = [one.name for one in self.store.objects()]
        found: dict[Path, Any] = {
            self.folder / (name.replace("!", "~") if self.escaped else name): self.store / name for name in names
        }
        for path in list(self._files()):
            if path not in found:
                path.unlink()
        for path, place in found.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(place.read_bytes())


def _read(place: ObjectPlace) -> bytes:
    try:
        return place.read_bytes()
    except FileNotFoundError:
        return b""
