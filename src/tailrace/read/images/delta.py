"""The document after an oplog entry: the public names of ``tailrace.core.oplog.stored_document`` for exact images."""

from __future__ import annotations

from tailrace.core.oplog.stored_document import (
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
