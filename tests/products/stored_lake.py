"""The lake in a real object store, compared with the server's own stream: ``stores.py`` says how the hand reaches it.
Those of some seeds, in a store that Iceberg's readers know, are Iceberg tables too."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, ClassVar

from tailrace.lake.store.lake_root import LakeRoot
from tests.products.lake import LakeProduct
from tests.products.lake_catalogue import CATALOGUE
from tests.products.product import Job
from tests.products.stores import StoreMirror, place_of, prefix_of, server_of

_STATE = "state"


class StoredLakeProduct(LakeProduct):
    name = "lake-in-store"
    parts: ClassVar[tuple[str, ...]] = (
        "lake", "state", "state/checkpoint", "state/sessions.json", "lake/_tailrace", "lake/_delta_log", "lake/day=*",
        "lake/_quarantine", "lake/_tailrace/quarantine.json", "newest log",
    )  # fmt: skip
    is_in_store = True

    def advance(self, job: Job) -> None:
        with StoreMirror(place_of(job, job.root / _STATE), job.root / "lake").beside():
            super().advance(job)

    def lake_of(self, job: Job) -> LakeRoot:
        return place_of(job, job.root / _STATE)

    def begin_anew(self, job: Job) -> None:
        place = place_of(job, job.root / _STATE)
        for one in list(place.objects()):
            (place / one.name).unlink()
        shutil.rmtree(job.root / _STATE)
        (job.root / CATALOGUE).unlink(missing_ok=True)

    def for_iceberg(self, job: Job) -> dict[str, str]:
        return server_of(job).for_iceberg()

    def written_to(self, job: Job) -> dict[str, Any]:
        """The lake as a user names it: a URI. Keys are in the environment (``store_for``)."""
        return {"lake": server_of(job).uri(prefix_of(job)), "state": Path(job.root / _STATE)}
