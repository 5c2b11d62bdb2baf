"""Whether a lake or a table is shown as an Iceberg table too: what that needs lies in a folder of its own."""

from __future__ import annotations

from typing import Final

from tailrace.lake.store.place import TablePlace

#: Delta's VACUUM passes over such names.
ICEBERG: Final = "_iceberg"


def is_mirrored(root: TablePlace) -> bool:
    """Whether the lake or table at ``root`` has been given to a catalogue."""
    return (root / ICEBERG).is_dir()
