"""Tables beside the collections, now and as of earlier times. They are kept as ``tailrace run`` keeps them."""

from __future__ import annotations

import random
import threading
from pathlib import Path

from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from tailrace.cli.run_tables import tabling
from tailrace.tables.as_of import as_of
from tailrace.tables.delta_commit import stated
from tailrace.tables.names import folder_of
from tailrace.tables.settings import TableRule, TableSettings
from tests.products.product import Job, Product
from tests.products.truth import Truth, difference_of
from tests.tables.equality import in_table
from tests.tables.test_as_of import rows_of

_ASKED = 3


def _settings(job: Job) -> TableSettings:
    rules = tuple(TableRule(pattern) for pattern in job.options.get("patterns", [f"{one}.*" for one in job.databases]))
    return TableSettings(job.root, rules, every_s=0.0, compact_every=3)


class TablesProduct(Product):
    name = "tables"
    parts = ("_tailrace", "[!_]*", "_quarantine", "newest log")
    copies = True

    def advance(self, job: Job) -> None:
        stop = threading.Event()
        # What ``tailrace run --available-now`` does; until the time at which it begins, which is not before the pause.
        with tabling(job.uri, _settings(job), stop, once=True):
            pass

    def differences(self, job: Job, truth: Truth) -> list[str]:
        expected = {name: one for name, one in truth.collections(job.time).items() if _has_table(name)}
        known = {name for pause in truth.pauses() for name in truth.collections(pause)}
        tabled = {name for name in filter(_has_table, known) if (job.root / folder_of(name)).exists()}
        found = {name: in_table(job.root, name) for name in {*expected, *tabled}}
        return _strange(job.root, {*map(folder_of, known)}) + difference_of(expected, found, "the table of")


class AsOfProduct(TablesProduct):
    """The same tables, asked for what they held at earlier pauses; they are brought forward more seldom, so that the
    pauses lie inside their micro-batches."""

    name = "as-of"

    def differences(self, job: Job, truth: Truth) -> list[str]:
        told = super().differences(job, truth)
        rng = random.Random(job.seed)
        pauses = [pause for pause in truth.pauses() if pause <= job.time]
        for _ in range(_ASKED):
            pause = rng.choice(pauses)
            expected = truth.collections(pause)
            namespace = rng.choice(sorted(filter(_has_table, expected)))
            folder = job.root / folder_of(namespace)
            first = min((one.time for one in stated(folder)), default=None) if folder.exists() else None
            if first is None or pause < first:
                continue
            found = as_of(job.root, namespace, pause, uri=job.uri)
            told += difference_of(
                {namespace: expected[namespace]}, {namespace: rows_of(found.rows)}, f"as of {pause}, the table of"
            )
        return told


def _strange(root: Path, known: set[str]) -> list[str]:
    """Tables of collections that were never there at a pause, and so have gone: they hold nothing."""
    strange = sorted({path.parent.parent for path in root.glob("[!_]*/_delta_log/*.json")})
    rows = {path.name: DeltaTable(path).to_pyarrow_table().num_rows for path in strange if path.name not in known}
    return [f"the table {name} has {count} rows of no collection" for name, count in rows.items() if count]


def _has_table(namespace: str) -> bool:
    """Not what the server makes on its way and removes again."""
    return not namespace.split(".", 1)[1].startswith(("tmp", "system."))


#: What a reader says of a damaged table is a refusal too.
REFUSALS = (DeltaError,)
