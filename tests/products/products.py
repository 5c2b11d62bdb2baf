"""All products by their names."""

from __future__ import annotations

from tests.products.archive import ArchiveProduct
from tests.products.followers import ListenerProduct, OutboxProduct, ViewProduct
from tests.products.images import ImagesProduct
from tests.products.lake import LakeProduct
from tests.products.product import Product
from tests.products.snapshot import SnapshotProduct
from tests.products.stored_lake import StoredLakeProduct
from tests.products.stored_tables import StoredTablesProduct
from tests.products.tables import AsOfProduct, TablesProduct

_ALL: tuple[Product, ...] = (
    TablesProduct(),
    AsOfProduct(),
    ArchiveProduct(),
    ImagesProduct(),
    SnapshotProduct(),
    ViewProduct(),
    OutboxProduct(),
    ListenerProduct(),
    LakeProduct(),
    StoredTablesProduct(),
    StoredLakeProduct(),
)
PRODUCTS: dict[str, Product] = {one.name: one for one in _ALL}
