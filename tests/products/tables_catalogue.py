"""The Iceberg tables beside the tables in a store of some seeds, and what pyiceberg reads of them."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import pyarrow as pa
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.exceptions import ValidationError

from tailrace.errors import SinkError
from tailrace.lake.iceberg.catalog import IcebergCatalog
from tailrace.lake.iceberg.settings import IcebergSettings
from tailrace.lake.tables.delta_table import CollectionTable
from tailrace.lake.tables.iceberg_mirror import IcebergMirror, identifier_of
from tailrace.lake.tables.names import place_of
from tests.products.product import Job
from tests.tables.object_server import ObjectServer


def catalogue_of(job: Job, server: ObjectServer) -> IcebergSettings | None:
    """The catalogue, beside the state: in half of the seeds with a store that Iceberg's readers know."""
    chosen = random.Random(f"tailrace tables catalogue {job.options['played']}").random() < 0.5
    if not chosen or not server.uri("").startswith("s3://"):
        return None
    return IcebergSettings.of(f"sqlite:///{job.root.absolute() / '_tailrace' / 'catalog.db'}", "iceberg")


def unlike_iceberg(
    root: Any, server: ObjectServer, catalogue: IcebergSettings, tables: dict[str, dict[bytes, bytes] | None]
) -> Iterable[str]:
    """In what the newest snapshots are not the newest versions of the tables, which hold these documents."""
    mirror = IcebergMirror(root, IcebergCatalog(catalogue, root=root))
    catalog = SqlCatalog(catalogue.name, **{**catalogue.properties, **server.for_iceberg()})
    try:
        for namespace, documents in sorted(tables.items()):
            if (fault := mirror.fault(CollectionTable(place_of(root, namespace), namespace))) is not None:
                yield f"the Iceberg table of {namespace} {fault}"
                continue
            found = catalog.load_table(identifier_of(namespace)).scan(selected_fields=("_key", "_bson")).to_arrow()
            rows = dict(zip(found.column("_key").to_pylist(), found.column("_bson").to_pylist(), strict=True))
            if rows != documents or found.num_rows != len(rows):
                yield f"the Iceberg table of {namespace} has {found.num_rows} rows, which are not those of its table"
    except (OSError, ValueError, KeyError, TypeError, pa.ArrowException, ValidationError) as error:
        raise SinkError(f"an Iceberg table cannot be read: {type(error).__name__}: {error}") from error
    finally:
        mirror.close()
        catalog.close()
