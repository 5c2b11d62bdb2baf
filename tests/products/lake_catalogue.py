"""The Iceberg table beside the lake of some seeds, and what pyiceberg reads of it."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import pyarrow as pa
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.exceptions import ValidationError

from tailrace.errors import SinkError, UsageError
from tailrace.lake.iceberg.lake_mirror import COMMIT, LakeMirror, identifier_of
from tailrace.lake.iceberg.settings import IcebergSettings, check_place
from tailrace.lake.store.commit_log import CommitLog
from tailrace.lake.store.lake_root import LakeRoot
from tests.products.product import Job

#: The catalogue's file, beside the lake.
CATALOGUE: Final = "lake.catalog.db"


def catalogue_of(job: Job, lake: LakeRoot) -> IcebergSettings | None:
    """The catalogue of the lake, in two of five seeds, if it is in a place that all of Iceberg's readers understand."""
    where = "" if isinstance(lake, Path) else " in a store"
    if random.Random(f"tailrace lake{where} catalogue {job.options['played']}").random() >= 0.4:
        return None
    try:
        check_place(lake, "a lake")
        check_place(job.root)
    except UsageError:
        return None
    job.root.mkdir(parents=True, exist_ok=True)  # the lake has not begun
    return IcebergSettings.of(f"sqlite:///{job.root.absolute() / CATALOGUE}", "iceberg")


def unlike_iceberg(
    lake: LakeRoot, catalogue: IcebergSettings, events: list[bytes], store: Mapping[str, str]
) -> list[str]:
    """How the newest snapshot differs from the lake's newest commit, which has these events. ``store``: pyiceberg's
    properties of the one that the lake is in."""
    catalog = SqlCatalog(catalogue.name, **{**catalogue.properties, **store})
    mirror = LakeMirror(lake, catalogue)
    try:
        if (fault := mirror.fault()) is not None:
            return [f"the Iceberg table {fault}"]
        table = catalog.load_table(identifier_of(lake))
        newest = table.current_snapshot()
        found = table.scan(selected_fields=("event",)).to_arrow().column("event").to_pylist()
    except (OSError, ValueError, KeyError, TypeError, pa.ArrowException, ValidationError) as error:
        raise SinkError(f"the lake's Iceberg table cannot be read: {error}") from error
    finally:
        mirror.close()
        catalog.close()
    told = []
    head = CommitLog(lake).head()
    if newest is None or newest.summary is None or newest.summary.get(COMMIT) != head.digest:
        told.append(f"the newest Iceberg snapshot is not the lake's commit {head.number}")
    here, there = Counter(events), Counter(found)
    if here != there:
        more, less = there - here, here - there
        told.append(f"Iceberg has {more.total()} events that the lake has not, and lacks {less.total()}")
    return told
