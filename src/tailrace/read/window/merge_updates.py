"""Merges several deltas of one document into one, if they only set existing top-level fields.

Such updates are the most frequent ones, and a document of a busy collection has many in a micro-batch. Merged, they
need the document to be parsed and written only once.
"""

from __future__ import annotations

from typing import Final

from tailrace.core import raw_bson

#: ``{$v: 2, diff: {u: {...}}}`` up to the length of ``diff``, and from there to the length of ``u``.
_HEAD: Final = b"\x10$v\x00\x02\x00\x00\x00\x03diff\x00"
_SECTION: Final = b"\x03u\x00"
_DIFF: Final = 4 + len(_HEAD)
_UPDATED: Final = _DIFF + 4 + len(_SECTION)


def updated_fields(change: bytes) -> int:
    """The offset of the document of updated fields in an update's ``o``, if that holds nothing else; otherwise -1."""
    if change[4:_DIFF] != _HEAD or change[_DIFF + 4 : _UPDATED] != _SECTION:
        return -1
    # After the section come only the last bytes of the delta and of ``o``.
    size = int.from_bytes(change[_UPDATED : _UPDATED + 4], "little")
    return _UPDATED if _UPDATED + size + 2 == len(change) else -1


def merged(changes: list[bytes]) -> bytes | None:
    """One update's ``o`` in place of several, applied in order; ``None`` if one of them does anything else."""
    fields: dict[bytes, bytes] = {}
    for change in changes:
        start = updated_fields(change)
        if start < 0:
            return None
        for element in raw_bson.elements(change, start):
            fields[element.name] = change[element.start : element.end]
    section = raw_bson.encode_document(*fields.values())
    diff = raw_bson.encode_document(_SECTION + section)
    return raw_bson.encode_document(_HEAD + diff)
