"""Oplog entries from which documents were erased: what stands in an archive in their place.

An insert, an update, or a copy of a document (a no-op that holds an image) becomes a no-op of the same time. An
operation inside ``applyOps`` becomes one on a collection of ``config``, which no change stream shows: operations of a
transaction are numbered, and the server raises an error for a no-op among them, so it can be neither left out nor a
no-op. Everything else of the entry stays.

Both keep the digest of the entry that was written (``o.tailraceErased``), so that a mark of it still fits, and the
collections of the documents (``o.tailraceCollections``), so that what must see every change of a collection can refuse
to go on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from tailrace.core import raw_bson
from tailrace.core.raw_bson import ARRAY, OBJECT, STRING

#: The field of ``o`` with the digest of the entry as it was written.
ERASED: Final = b"tailraceErased"
_COLLECTIONS: Final = b"tailraceCollections"
#: The collection that erased operations of a transaction are on.
ERASED_NAMESPACE: Final = "config.tailrace_erased"
#: Hexadecimal digits of a SHA-256 that are kept: 128 bits.
_DIGEST_DIGITS: Final = 32
#: What stays of an entry that becomes a no-op: its time, term, version of the format, and wall clock.
_STAYS: Final = (b"ts", b"t", b"v", b"wall")


def entry_digest(entry: bytes) -> str:
    """The first 32 hexadecimal digits of the SHA-256 of the entry as it was written, whether or not something was
    erased from it since."""
    return erased_digest(entry) or hashlib.sha256(entry).hexdigest()[:_DIGEST_DIGITS]


def erased_digest(entry: bytes) -> str | None:
    """The digest of the entry as it was written if something was erased from it, else ``None``. A user's document
    that has such a field does not count."""
    if ERASED not in entry:
        return None
    operation, where, body = (raw_bson.find(entry, name) for name in (b"op", b"ns", b"o"))
    if operation is None or where is None or body is None or body.type != OBJECT:
        return None
    kind = raw_bson.value(entry, operation)[4:-1]
    if kind != b"c" and (kind != b"n" or raw_bson.value(entry, where)[4:-1]):
        return None
    found = raw_bson.find(entry, ERASED, body.value_start)
    if found is None or found.type != STRING:
        return None
    return raw_bson.value(entry, found)[4:-1].decode("ascii", "replace")


def erased_collections(entry: bytes) -> set[str]:
    """The collections of the documents that were erased from the entry; empty if nothing was."""
    if erased_digest(entry) is None:
        return set()
    body = raw_bson.find(entry, b"o")
    assert body is not None
    found = raw_bson.find(entry, _COLLECTIONS, body.value_start)
    if found is None or found.type != ARRAY:
        return set()
    texts = [raw_bson.value(entry, one) for one in raw_bson.elements(entry, found.value_start) if one.type == STRING]
    return {text[4:-1].decode("utf-8", "replace") for text in texts}


def erased_entry(entry: bytes, collections: Iterable[str]) -> bytes:
    """What stands in the place of an insert, an update, or a no-op with an image, of a document of ``collections``."""
    stays = {one.name: one for one in raw_bson.elements(entry) if one.name in _STAYS}
    return raw_bson.encode_document(
        raw_bson.encode_element(STRING, b"op", raw_bson.encode_string(b"n")),
        raw_bson.encode_element(STRING, b"ns", raw_bson.encode_string(b"")),
        raw_bson.encode_element(OBJECT, b"o", raw_bson.encode_document(*_mark(entry, collections))),
        *(raw_bson.encode_element(one.type, name, raw_bson.value(entry, one)) for name, one in stays.items()),
    )


def without_operations(entry: bytes, collections: Iterable[str], erases: Callable[[bytes], bool]) -> bytes:
    """The entry, a command, with those operations of its ``applyOps`` erased, at any depth, for which ``erases`` is
    true: operations on documents of ``collections``."""
    body = raw_bson.find(entry, b"o")
    assert body is not None
    command = _without(raw_bson.value(entry, body), erases)
    if command is None:
        return entry
    fields = [one for one in raw_bson.elements(command) if one.name not in (ERASED, _COLLECTIONS)]
    others = [command[one.start : one.end] for one in fields]
    command = raw_bson.encode_document(*others, *_mark(entry, collections))
    return _replaced(entry, {b"o": command})


def _without(command: bytes, erases: Callable[[bytes], bool]) -> bytes | None:
    """The same of the command alone; ``None`` if nothing of it was erased."""
    found = raw_bson.find(command, b"applyOps")
    if found is None or found.type != ARRAY:
        return None
    parts, changed = [], False
    for element in raw_bson.elements(command, found.value_start):
        value = raw_bson.value(command, element)
        if element.type == OBJECT:
            other = _other_operation(value, erases)
            changed |= other is not None
            value = value if other is None else other
        parts.append(raw_bson.encode_element(element.type, element.name, value))
    return _replaced(command, {b"applyOps": raw_bson.encode_document(*parts)}) if changed else None


def _other_operation(operation: bytes, erases: Callable[[bytes], bool]) -> bytes | None:
    body = raw_bson.find(operation, b"o")
    inner = None
    if body is not None and body.type == OBJECT:
        inner = _without(raw_bson.value(operation, body), erases)
    if inner is not None:
        return _replaced(operation, {b"o": inner})
    if not erases(operation):
        return None
    return raw_bson.encode_document(
        raw_bson.encode_element(STRING, b"op", raw_bson.encode_string(b"i")),
        raw_bson.encode_element(STRING, b"ns", raw_bson.encode_string(ERASED_NAMESPACE)),
        raw_bson.encode_element(OBJECT, b"o", raw_bson.encode_document()),
    )


def _mark(entry: bytes, collections: Iterable[str]) -> tuple[bytes, bytes]:
    names = [
        raw_bson.encode_element(STRING, str(number).encode(), raw_bson.encode_string(name))
        for number, name in enumerate(sorted(erased_collections(entry) | set(collections)))
    ]
    return (
        raw_bson.encode_element(STRING, ERASED, raw_bson.encode_string(entry_digest(entry))),
        raw_bson.encode_element(ARRAY, _COLLECTIONS, raw_bson.encode_document(*names)),
    )


def _replaced(document: bytes, values: Mapping[bytes, bytes]) -> bytes:
    """The document with the values of these fields replaced; of fields with one name, the first one's."""
    parts, waiting = [], dict(values)
    for element in raw_bson.elements(document):
        value = waiting.pop(element.name, None)
        parts.append(
            raw_bson.encode_element(
                element.type, element.name, raw_bson.value(document, element) if value is None else value
            )
        )
    return raw_bson.encode_document(*parts)


def is_same_entry(archived: bytes, entry: bytes) -> bool:
    """Whether an archived entry, from which something may have been erased, is the one that an oplog has."""
    return archived == entry or erased_digest(archived) == entry_digest(entry)
