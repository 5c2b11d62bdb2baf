"""Tables in a real object store, beside the collections.

The hand knows files. So the store's objects have a mirror in the product's folder, beside the state: it is made after
each run, and where the hand has changed it, the store is made like it before the next one. A run that was killed leaves
the mirror as it was, and the next one finds the store as the killed one has left it. The seed says in which kind of
store the tables are.
"""

from __future__ import annotations

import json
import os
import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import Any, ClassVar, Final

import obstore

from tailrace.base.object_place import ObjectPlace
from tailrace.cli.run_tables import tabling
from tailrace.lake.tables.settings import TableSettings
from tests.gateway.programs import Unavailable
from tests.products.product import Job, Product
from tests.products.tables import TablesProduct, maintained
from tests.tables.azure_server import AzureServer, azure_server
from tests.tables.object_server import ObjectServer, object_server, weed

#: The addresses of the stores that run, by their kinds, as JSON.
_ADDRESSES: Final = "TAILRACE_TESTS_OBJECT_STORES"
_KINDS: Final = {"s3": ObjectServer, "azure": AzureServer}
_STATE: Final = "_tailrace"
_OWNER: Final = "owner.json"


class StoredTablesProduct(TablesProduct):
    name = "tables-in-store"
    parts: ClassVar[tuple[str, ...]] = ("_tailrace", "_tailrace/state", "[!_]*", "_quarantine", "newest log")

    def advance(self, job: Job) -> None:
        store = _place(job)
        marker = ObjectPlace(store.bucket, f"mirrors/{store.key}")
        if _digest(job.root) != _read(marker):
            _make_like(store, job.root)
        try:
            with maintained(), tabling(job.uri, self._settings(job), threading.Event(), once=True):
                pass
        finally:
            _mirror(store, job.root)
            obstore.put(store.bucket.store, marker.key, _digest(job.root))

    def _settings(self, job: Job) -> TableSettings:
        from dataclasses import replace

        return replace(super()._settings(job), root=_place(job))


@contextmanager
def store_for(products: Sequence[Product], folder: Path, *, azure: bool = False) -> Iterator[None]:
    """An object store, if one of the products needs one, for this process and its children. ``azure``: one of Azure's
    kind too, where that can be had."""
    wanted = any(isinstance(one, StoredTablesProduct) for one in products)
    with ExitStack() as stack:
        if wanted:
            running = {"s3": stack.enter_context(object_server(folder / "objects")).address}
            if azure:
                with suppress(Unavailable):
                    running["azure"] = stack.enter_context(azure_server(folder / "azure")).address
            os.environ[_ADDRESSES] = json.dumps(running)
        yield


def without_store(names: Sequence[str]) -> list[str]:
    """Those products that this machine can run."""
    return [one for one in names if one != StoredTablesProduct.name or weed() is not None]


def _place(job: Job) -> ObjectPlace:
    addresses = json.loads(os.environ[_ADDRESSES])
    kind = random.Random(f"tailrace store {job.options['played']}").choice(sorted(addresses))
    running = _KINDS[kind](addresses[kind], 0, Path())
    return running.place(f"p{sha256(job.folder.encode()).hexdigest()[:20]}", job.root / _STATE)


def _read(place: ObjectPlace) -> bytes:
    try:
        return place.read_bytes()
    except FileNotFoundError:
        return b""


def _mirrored(folder: Path) -> Iterator[Path]:
    """The files of the mirror, and none of the state."""
    for path in sorted(folder.rglob("*")) if folder.is_dir() else ():
        parts = path.relative_to(folder).parts
        if path.is_file() and (parts[0] != _STATE or parts[1:] == (_OWNER,)):
            yield path


def _digest(folder: Path) -> bytes:
    found = sha256()
    for path in _mirrored(folder):
        found.update(f"{path.relative_to(folder)} ".encode() + sha256(path.read_bytes()).digest())
    return found.hexdigest().encode()


def _name(folder: Path, path: Path) -> str:
    """Names of tables have another escape in a store."""
    return path.relative_to(folder).as_posix().replace("~", "!")


def _make_like(store: ObjectPlace, folder: Path) -> None:
    wanted = {_name(folder, path): path for path in _mirrored(folder)}
    for one in list(store.objects()):
        if one.name not in wanted:
            (store / one.name).unlink()
    for name, path in wanted.items():
        obstore.put(store.bucket.store, f"{store.key}/{name}", path.read_bytes())


def _mirror(store: ObjectPlace, folder: Path) -> None:
    found: dict[Path, Any] = {folder / one.name.replace("!", "~"): store / one.name for one in store.objects()}
    for path in list(_mirrored(folder)):
        if path not in found:
            path.unlink()
    for path, place in found.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(place.read_bytes())
