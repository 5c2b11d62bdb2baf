"""Tables in a real object store, beside the collections: ``stores.py`` says how the hand gets at them. Those of some
seeds are Iceberg tables too."""

from __future__ import annotations

import random
import threading
from dataclasses import replace
from typing import ClassVar, Final

from tailrace.base.object_place import ObjectPlace
from tailrace.cli.run_tables import tabling
from tailrace.lake.tables.delta_table import tables_in
from tailrace.lake.tables.settings import TableSettings
from tests.products.product import Job
from tests.products.stores import StoreMirror, place_of, server_of
from tests.products.tables import TablesProduct, maintained
from tests.products.tables_catalogue import catalogue_of, unlike_iceberg
from tests.products.truth import Truth
from tests.tables.equality import in_table

_STATE: Final = "_tailrace"
_OWNER: Final = "owner.json"
#: How many tables are compared with what pyiceberg reads of them, other ones each time: with all of them, tens in a
#: store, a comparison would take minutes. With their collections all are compared.
_COMPARED: Final = 8


class StoredTablesProduct(TablesProduct):
    name = "tables-in-store"
    parts: ClassVar[tuple[str, ...]] = ("_tailrace", "_tailrace/state", "[!_]*", "_quarantine", "newest log")
    is_in_store = True

    def advance(self, job: Job) -> None:
        mirror = StoreMirror(_place(job), job.root, state=_STATE, kept=_OWNER, escaped=True)
        with mirror.beside(), maintained(), tabling(job.uri, self._settings(job), threading.Event(), once=True):
            pass

    def _settings(self, job: Job) -> TableSettings:
        settings, catalogue = super()._settings(job), catalogue_of(job, server_of(job))
        merges = settings.merge_on_read and catalogue is None
        return replace(settings, root=_place(job), iceberg=catalogue, merge_on_read=merges)

    def differences(self, job: Job, truth: Truth) -> list[str]:
        told, catalogue = super().differences(job, truth), catalogue_of(job, server_of(job))
        if catalogue is None or told:
            return told
        root = _place(job)
        chosen = random.Random(f"tailrace tables compared {job.options['played']} {job.time}")
        names = sorted(tables_in(root))
        rows = {one: in_table(root, one) for one in chosen.sample(names, min(len(names), _COMPARED))}
        return list(unlike_iceberg(root, server_of(job), catalogue, rows))


def _place(job: Job) -> ObjectPlace:
    return place_of(job, job.root / _STATE)
