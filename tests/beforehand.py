"""Collections that are there before several connections write to them."""

from __future__ import annotations

from typing import Any


def made(*collections: Any) -> None:
    """Create these collections. Where two connections make one collection at once, a mongod 7.0.28 under Wine stops
    answering, or ends, within a few tries (plain PyMongo, three upserts at once; 6.0.27 on Linux does not)."""
    for collection in collections:
        collection.database.create_collection(collection.name)
