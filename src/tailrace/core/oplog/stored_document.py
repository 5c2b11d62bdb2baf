"""The document after an oplog entry, byte for byte as the server stores it, from the document before it.

Reads and writes BSON as bytes and does no I/O. ``oplog.update_delta.apply_diff`` has another purpose: it gives what a
server's stream *shows* as a post-image, which in rare cases differs from what the collection holds
(``docs/reference/exact-images.md``). Here an entry that does not fit its document is an error, since the document is
then not the one that the server had.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from typing import Final

from tailrace.core import raw_bson
from tailrace.core.oplog.entry import first_elements
from tailrace.core.oplog.update_delta import (
    ArrayDiff,
    DocumentDiff,
    is_array_diff,
    read_array_diff,
    read_document_diff,
)
from tailrace.core.raw_bson import ARRAY, DEPTH_MAX, INT32, NULL, OBJECT, Element
from tailrace.errors import OplogFormatError, TailraceError

#: The server pads an array by no more than this (code 2 of ``$set`` past an array's end).
_PADDING_MAX: Final = 1_500_000
#: A document's nesting, and what the server's storage adds to it.
_DEPTH_MAX: Final = DEPTH_MAX + 50
_ID: Final = b"_id"
_RENAME: Final = (
    "The server may have changed the first or both, and the entry does not say which. Give one of the two fields "
    "another name, or leave the collection out, and start again"
)


class ImageMismatchError(TailraceError):
    """An oplog entry does not fit the document that it is applied to, so this is not the document that the server had.

    Nothing of the entry has been applied. The operator has to seed the images again.
    """


class UnknownDocumentError(ImageMismatchError):
    """An update's delta is to be applied, and the document before it is not known."""


def apply_entry(document: bytes | None, entry: bytes, *, again: bool = False) -> bytes | None:
    """The document after an oplog entry.

    Args:
        document: BSON before the entry; ``None`` if there is none
        entry: BSON of a CRUD entry (``op`` i, u or d), or of such an operation in an ``applyOps``
        again: this entry, and later ones, may have been applied to the document before: a field that is already gone or
            already there is then not an error (oplog entries can be applied again)

    Returns BSON, or ``None`` after a delete. Raises ``UnknownDocumentError`` for a delta without a document,
    ``ImageMismatchError`` if entry and document do not fit, ``OplogFormatError`` for anything else than such an entry.
    """
    fields = first_elements(entry)
    operation, change = fields.get(b"op"), fields.get(b"o")
    if operation is None or operation.type != raw_bson.STRING:
        raise OplogFormatError("an oplog entry has no 'op' field")
    if change is None or change.type != OBJECT:
        raise OplogFormatError("an oplog entry has no document 'o'")
    letter = raw_bson.read_string(entry, operation.value_start)
    return apply_operation(document, letter, raw_bson.value(entry, change), again=again)


def apply_operation(document: bytes | None, operation: bytes, change: bytes, *, again: bool = False) -> bytes | None:
    """The same with the entry's ``op`` and ``o``."""
    if operation == b"i":
        if document is not None and not again:
            raise ImageMismatchError("an insert of a document that exists already")
        return change
    if operation == b"d":
        if document is None and not again:
            raise UnknownDocumentError("a delete of a document that does not exist")
        return None
    if operation != b"u":
        raise OplogFormatError(f"operation '{operation.decode('latin-1')}' of an oplog entry changes no document")
    delta = read_update(change)
    if isinstance(delta, bytes):
        return _stored(delta, delta)
    if document is None:
        raise UnknownDocumentError("an update of a document that is not known")
    if isinstance(delta, Modifiers):
        return _stored(_Old(again).document(document, 0, delta.tree, 0), document)
    return _stored(_New(change, again).document(document, 0, delta.value_start, 0), document)


def _stored(document: bytes, before: bytes) -> bytes:
    """The document as the server stores it: with ``_id`` first, wherever the update has put it, and with the old
    ``_id`` if the update has left it out."""
    if document[5:9] == b"_id\0":
        return document
    identifier = raw_bson.find(document, _ID)
    if identifier is not None:
        start, end = identifier.start, identifier.end
        return raw_bson.encode_document(document[start:end], document[4:start], document[end:-1])
    identifier = raw_bson.find(before, _ID)
    if identifier is None:
        raise ImageMismatchError("a document without _id")
    return raw_bson.encode_document(before[identifier.start : identifier.end], document[4:-1])


class Modifiers:
    """The ``$set`` and ``$unset`` of an update in the form of 4.4 (``$v: 1``).

    ``tree``  by field name: the BSON type and value that are set, ``None`` for a field that is unset, or such a tree
              one level deeper; in the order of the entry
    """

    __slots__ = ("tree",)

    def __init__(self, change: bytes, fields: dict[bytes, Element]) -> None:
        self.tree: Tree = {}
        for name in (b"$set", b"$unset"):
            part = fields.pop(name, None)
            if part is None:
                continue
            if part.type != OBJECT:
                raise OplogFormatError(f"{name.decode()} of an update entry is not an object")
            for element in raw_bson.elements(change, part.value_start):
                value = None if name == b"$unset" else (element.type, raw_bson.value(change, element))
                self._add(element.name.split(b"."), value)
        if fields:
            unknown = next(iter(fields)).decode("utf-8", "replace")
            raise OplogFormatError(f"an update entry has a modifier '{unknown}'; only $set and $unset are known")
        if not self.tree:
            raise OplogFormatError("an update entry has neither a delta, nor $set, nor $unset")

    def _add(self, path: list[bytes], value: Leaf | None) -> None:
        level = self.tree
        for name in path[:-1]:
            inside = level.setdefault(name, {})
            if not isinstance(inside, dict):
                raise OplogFormatError(f"an update entry changes '{_text(name)}' twice")
            level = inside
        if path[-1] in level:
            raise OplogFormatError(f"an update entry changes '{_text(path[-1])}' twice")
        level[path[-1]] = value


Leaf = tuple[int, bytes]
Tree = dict[bytes, "Leaf | Tree | None"]
ChangedField = Leaf | Tree | None


def read_update(change: bytes) -> bytes | Modifiers | Element:
    """An update's ``o``: a replacement (itself), modifiers, or the element that holds the ``$v: 2`` delta."""
    fields = first_elements(change)
    version = fields.pop(b"$v", None)
    number = 1 if version is None or version.type != INT32 else raw_bson.read_int32(change, version.value_start)
    if number == 2:
        diff = fields.get(b"diff")
        if diff is None or diff.type != OBJECT:
            raise OplogFormatError("BSON field 'diff' is missing but a required field", code=40414)
        return diff
    if _ID in fields:  # the server recognises a replacement by this; it may hold any fields
        return change
    if number != 1:
        raise OplogFormatError(f"Unsupported or missing oplog version, $v: {number}", code=6741200)
    return Modifiers(change, fields)


def _text(name: bytes) -> str:
    return name.decode("utf-8", "replace")


def _mismatch(what: str, name: bytes) -> ImageMismatchError:
    return ImageMismatchError(f"{what} '{_text(name)}'")


def _check_depth(depth: int) -> None:
    if depth > _DEPTH_MAX:
        raise OplogFormatError(f"an update entry is nested deeper than {_DEPTH_MAX} levels", code=15)


def _elements(document: bytes, start: int, changes: Container[bytes]) -> Iterator[Element]:
    """A document's elements. If two fields have the name of a changed one, that is an error: the server may have
    changed the first or both."""
    seen: set[bytes] = set()
    for element in raw_bson.elements(document, start):
        if element.name in changes:
            if element.name in seen:
                raise ImageMismatchError(
                    f"the document holds twice the field that is changed, '{_text(element.name)}'", hint=_RENAME
                )
            seen.add(element.name)
        yield element


class _New:
    """``$v: 2``: a delta with sections for what is deleted, updated and inserted, and deltas inside it."""

    def __init__(self, change: bytes, again: bool) -> None:
        self._buf = change
        self._again = again

    def document(self, document: bytes, start: int, diff_start: int, depth: int) -> bytes:
        """The document at ``start`` after the delta at ``diff_start``."""
        _check_depth(depth)
        diff = read_document_diff(self._buf, diff_start)
        inserted = {element.name for element in diff.inserted}
        changes = _changes(diff)
        left = dict(changes)
        parts: list[bytes] = []
        for element in _elements(document, start, changes):
            name = element.name
            if name in left:
                parts.append(self._changed(document, element, left.pop(name), depth))
            elif name not in inserted:  # an existing field moves to the end: a change of order
                parts.append(document[element.start : element.end])
        for name, change in left.items():
            if not self._again:
                raise _mismatch("an update changes or deletes a field that does not exist,", name)
            if change is not None and not change[0]:
                parts.append(self._raw(change[1]))
        parts.extend(map(self._raw, diff.inserted))
        return raw_bson.encode_document(*parts)

    def _changed(self, document: bytes, old: Element, change: tuple[bool, Element] | None, depth: int) -> bytes:
        if change is None:
            return b""
        nested, new = change
        return self._nested(document, old, new, depth) if nested else self._raw(new)

    def _raw(self, element: Element) -> bytes:
        return self._buf[element.start : element.end]

    def _nested(self, document: bytes, old: Element, sub: Element, depth: int) -> bytes:
        """The element ``old`` after the delta that ``sub`` holds."""
        of_array = is_array_diff(self._buf, sub.value_start)
        if old.type != (ARRAY if of_array else OBJECT):
            if not self._again:
                raise _mismatch("an update looks into a field that is no longer of the kind,", old.name)
            return raw_bson.encode_element(NULL, old.name, b"")  # a later entry sets it
        make = self._array if of_array else self.document
        return raw_bson.encode_element(old.type, old.name, make(document, old.value_start, sub.value_start, depth + 1))

    def _array(self, document: bytes, start: int, diff_start: int, depth: int) -> bytes:
        _check_depth(depth)
        diff = read_array_diff(self._buf, diff_start)
        changes = {index: (nested, element) for index, nested, element in diff.changes}
        old = list(raw_bson.elements(document, start))
        parts: list[bytes] = []
        for index in range(_array_length(diff, len(old))):
            before = old[index] if index < len(old) else None
            nested, element = changes.get(index, (False, None))
            if element is not None and not nested:
                value = raw_bson.value(self._buf, element)
                parts.append(raw_bson.encode_element(element.type, b"%d" % index, value))
            elif before is None:
                if element is not None and not self._again:
                    raise _mismatch("an update looks into an item that does not exist,", b"%d" % index)
                parts.append(raw_bson.encode_element(NULL, b"%d" % index, b""))
            elif element is not None:
                parts.append(self._nested(document, before, element, depth))
            else:
                parts.append(document[before.start : before.end])
        return raw_bson.encode_document(*parts)


def _changes(diff: DocumentDiff) -> dict[bytes, tuple[bool, Element] | None]:
    """By name: ``None`` for a deleted field, otherwise whether it is changed inside, and the element that says how."""
    found: dict[bytes, tuple[bool, Element] | None] = dict.fromkeys(diff.deleted)
    found.update((element.name, (False, element)) for element in diff.updated)
    found.update((name, (True, element)) for name, element in diff.sub_diffs)
    if len(found) < len(diff.deleted) + len(diff.updated) + len(diff.sub_diffs):
        raise OplogFormatError("an update delta changes a field twice")
    return found


def _array_length(diff: ArrayDiff, old_length: int) -> int:
    last = diff.changes[-1][0] + 1 if diff.changes else 0
    length = max(old_length if diff.new_length is None else diff.new_length, last)
    if length > old_length + _PADDING_MAX:
        raise OplogFormatError(f"an update delta pads an array of {old_length} items to {length}")
    return length


class _Old:
    """``$v: 1``: paths that are set and unset."""

    def __init__(self, again: bool) -> None:
        self._again = again

    def document(self, document: bytes, start: int, tree: Tree, depth: int) -> bytes:
        """The document at ``start`` after the modifiers of its level."""
        _check_depth(depth)
        left = dict(tree)
        parts: list[bytes] = []
        for element in _elements(document, start, tree):
            if element.name in left:
                parts.append(self._changed(document, element, left.pop(element.name), depth))
            else:
                parts.append(document[element.start : element.end])
        for name, change in left.items():
            if change is not None:
                parts.append(self._created(name, change, depth))
            elif not self._again:
                raise _mismatch("an update unsets a field that does not exist,", name)
        return raw_bson.encode_document(*parts)

    def _changed(self, document: bytes, old: Element, change: ChangedField, depth: int) -> bytes:
        if change is None:
            return b""
        if not isinstance(change, dict):
            return raw_bson.encode_element(change[0], old.name, change[1])
        if old.type == ARRAY:
            value = self._array(document, old.value_start, change, depth + 1)
        elif old.type == OBJECT:
            value = self.document(document, old.value_start, change, depth + 1)
        elif self._again:
            return document[old.start : old.end]  # a later entry sets it
        else:
            raise _mismatch("an update looks into a field that is no longer of the kind,", old.name)
        return raw_bson.encode_element(old.type, old.name, value)

    def _created(self, name: bytes, change: Leaf | Tree, depth: int) -> bytes:
        """A field that was not there, and the objects on the way to it."""
        if not isinstance(change, dict):
            return raw_bson.encode_element(change[0], name, change[1])
        value = self.document(raw_bson.EMPTY_DOCUMENT, 0, change, depth + 1)
        return raw_bson.encode_element(OBJECT, name, value)

    def _array(self, document: bytes, start: int, tree: Tree, depth: int) -> bytes:
        """Unset items are null, and so are items between an array's end and an item that is set beyond it."""
        _check_depth(depth)
        changes = {_item_number(name): change for name, change in tree.items()}
        if len(changes) < len(tree):
            raise OplogFormatError("an update entry changes an array's item twice")
        old = list(raw_bson.elements(document, start))
        length = max(len(old), *(number + 1 for number, change in changes.items() if change is not None), 0)
        if length > len(old) + _PADDING_MAX:
            raise OplogFormatError(f"an update entry pads an array of {len(old)} items to {length}")
        parts: list[bytes] = []
        for number in range(length):
            name = b"%d" % number
            change = changes.get(number)
            if number not in changes:
                is_old = number < len(old)
                kept = document[old[number].start : old[number].end] if is_old else b""
                parts.append(kept or raw_bson.encode_element(NULL, name, b""))
            elif change is None:
                parts.append(raw_bson.encode_element(NULL, name, b""))
            elif number < len(old):
                parts.append(self._changed(document, old[number], change, depth))
            else:
                parts.append(self._created(name, change, depth))
        return raw_bson.encode_document(*parts)


def _item_number(name: bytes) -> int:
    if not name.isdigit() or len(name) > 9:  # "01" is item 1 (4.4.2)
        raise _mismatch("an update names an array's item", name)
    return int(name)
