"""Tables in a real object store, compared with the collections: ``stores.py`` says how the hand reaches them."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import ClassVar, Final

from tailrace.base.object_place import ObjectPlace
from tailrace.cli.run_tables import tabling
from tailrace.lake.tables.settings import TableSettings
from tests.products.product import Job
from tests.products.stores import StoreMirror, place_of
from tests.products.tables import TablesProduct, maintained

_STATE: Final = "_tailrace"
_OWNER: Final = "owner.json"


class StoredTablesProduct(TablesProduct):
    name = "tables-in-store"
    parts: ClassVar[tuple[str, ...]] = ("_tailrace", "_tailrace/state", "[!_]*", "_quarantine", "newest log")

    def advance(self, job: Job) -> None:
        mirror = StoreMirror(_place(job), job.root, state=_STATE, kept=_OWNER, escaped=True)
        with mirror.beside(), maintained(), tabling(job.uri, self._settings(job), threading.Event(), once=True):
            pass

    def _settings(self, job: Job) -> TableSettings:
        return replace(super()._settings(job), root=_place(job))


def _place(job: Job) -> ObjectPlace:
    return place_of(job, job.root / _STATE)
