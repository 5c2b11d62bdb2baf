"""One document, one oplog entry, the document after it (``tailrace.oplog.stored_document``), under images' own roof."""

from __future__ import annotations

from tailrace.oplog.stored_document import (
    ImageMismatchError,
    Modifiers,
    UnknownDocumentError,
    apply_entry,
    apply_operation,
    read_update,
)

__all__ = [
    "ImageMismatchError",
    "Modifiers",
    "UnknownDocumentError",
    "apply_entry",
    "apply_operation",
    "read_update",
]
