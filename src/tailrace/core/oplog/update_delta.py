"""The server's update delta, ``{$v: 2, diff: {...}}``: reading its sections, and applying it to a document.

A document diff holds ``d`` (deleted fields), ``u`` (updated), ``i`` (inserted) and any number of sub-diffs
``s<field>``, in this order. An array diff begins with ``a: true`` and holds ``l`` (new length), ``u<index>`` and
``s<index>`` (semantics 3.2). Errors carry the server's codes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from tailrace.core import raw_bson
from tailrace.core.raw_bson import ARRAY, BOOL, INT32, INT64, NULL, OBJECT, Element
from tailrace.errors import OplogFormatError

#: The order in which a document diff may hold its sections.
_SECTION_RANK: Final[dict[bytes, int]] = {b"d": 0, b"u": 1, b"i": 2}
_SUB_DIFF_RANK: Final = 3
#: No document nests deeper (the server's BSON limit is 180 levels, plus what its storage adds).
_DEPTH_MAX: Final = 250
#: No document of 16 MB holds a longer array: an item takes four bytes at the least, its name among them.
_ARRAY_ITEMS_MAX: Final = 16 * 1024 * 1024 // 4


@dataclass(slots=True)
class DocumentDiff:
    """The sections of a document diff: elements of the buffer they were read from."""

    deleted: list[bytes] = field(default_factory=list)
    updated: list[Element] = field(default_factory=list)
    inserted: list[Element] = field(default_factory=list)
    #: (field name, element holding the nested diff)
    sub_diffs: list[tuple[bytes, Element]] = field(default_factory=list)


@dataclass(slots=True)
class ArrayDiff:
    """The parts of an array diff. ``changes`` holds (index, is a sub-diff, element) in ascending order."""

    new_length: int | None
    changes: list[tuple[int, bool, Element]]


def is_array_diff(buf: bytes, start: int = 0) -> bool:
    """Whether the diff at ``start`` is marked as an array's by its first field ``a: true``."""
    first = next(raw_bson.elements(buf, start), None)
    return first is not None and first.name == b"a" and first.type == BOOL


def read_document_diff(buf: bytes, start: int = 0) -> DocumentDiff:
    """The sections of the document diff at ``start``. The server goes by the first letter of a section's name.

    Raises ``OplogFormatError`` with the server's codes: 4770500 for an empty diff, 4770503 for a section that is
    unknown or out of order, 4770507 for one of a wrong type, 4770514 for one after the sub-diffs.
    """
    diff = DocumentDiff()
    rank = -1
    for element in raw_bson.elements(buf, start):
        letter = element.name[:1]
        if letter == b"s":
            _expect_type(element, OBJECT, "s", "object")
            rank = _SUB_DIFF_RANK
            diff.sub_diffs.append((element.name[1:], element))
            continue
        if rank == _SUB_DIFF_RANK:
            found = element.name.decode("utf-8", "replace")
            raise OplogFormatError(f"Did not expect more sections in diff but found one: {found}", code=4770514)
        section = _SECTION_RANK.get(letter)
        if section is None or section <= rank:
            found = element.name.decode("utf-8", "replace")
            raise OplogFormatError(f"Unexpected section: {found} in document diff", code=4770503)
        _expect_type(element, OBJECT, letter.decode(), "object")
        rank = section
        fields = raw_bson.elements(buf, element.value_start)
        if section == 0:
            diff.deleted = [deleted.name for deleted in fields]
        elif section == 1:
            diff.updated = list(fields)
        else:
            diff.inserted = list(fields)
    if rank < 0:
        raise OplogFormatError("Expected diff to be non-empty", code=4770500)
    return diff


def read_array_diff(buf: bytes, start: int = 0) -> ArrayDiff:
    """The parts of the array diff at ``start``.

    Raises ``OplogFormatError`` with the server's codes: 4770520 for a mark that is not true, 4770507 for a length of a
    wrong type, 4770502 for a part that is neither update nor sub-diff, 4770512 for an index that is not a number,
    4770501 for a sub-diff that is not an object.
    """
    parts = raw_bson.elements(buf, start)
    mark = next(parts)
    if buf[mark.value_start] != 1:
        raise OplogFormatError("Expected array header to be value true but got a: false", code=4770520)
    new_length: int | None = None
    changes: list[tuple[int, bool, Element]] = []
    for element in parts:
        name = element.name
        if name == b"l" and new_length is None and not changes:
            _expect_type(element, INT32, "l", "int")
            new_length = raw_bson.read_int32(buf, element.value_start)
            continue
        changes.append(_array_change(buf, element, len(changes)))
    return ArrayDiff(new_length, changes)


def _array_change(buf: bytes, element: Element, position: int) -> tuple[int, bool, Element]:
    kind, index = element.name[:1], element.name[1:]
    if kind not in (b"u", b"s"):
        raise OplogFormatError(
            f"Expected either 'u' (update) or 's' (sub diff) at index {position} but got {_as_text(buf, element)}",
            code=4770502,
        )
    if not index.isdigit():
        raise OplogFormatError(f"Expected integer but got {index.decode('utf-8', 'replace')}", code=4770512)
    if kind == b"s" and element.type != OBJECT:
        text = _as_text(buf, element)
        raise OplogFormatError(f"expected sub diff at index {position} but got {text}", code=4770501)
    return int(index), kind == b"s", element


def _expect_type(element: Element, type_: int, section: str, name: str) -> None:
    if element.type != type_:
        raise OplogFormatError(f"Expected {section} section to be type {name}", code=4770507)


def _as_text(buf: bytes, element: Element) -> str:
    """An element for a message: its name, and its value where that is a plain number."""
    name = element.name.decode("utf-8", "replace")
    if element.type in (INT32, INT64):
        return f"{name}: {int.from_bytes(raw_bson.value(buf, element), 'little', signed=True)}"
    return f"{name}: (BSON type 0x{element.type:02x})"


def apply_diff(document: bytes, diff: bytes) -> bytes:
    """The document after the diff: what the server computes as the post-image (semantics 5).

    Deleted fields go, updated fields change in place, inserted fields are appended in order, arrays are truncated to
    their new length or padded with null. An inserted field that is already there moves to the end, except where its
    level of the diff holds nothing but insertions. ``_id`` cannot be deleted: it comes first then.
    """
    result = _apply_to_document(document, 0, diff, 0, 0)
    identifier = raw_bson.find(document, b"_id")
    if identifier is None or raw_bson.find(result, b"_id") is not None:
        return result
    return raw_bson.encode_document(document[identifier.start : identifier.end], result[4:-1])


def _apply_to_document(doc: bytes, start: int, buf: bytes, diff_start: int, depth: int) -> bytes:
    _check_depth(depth)
    diff = read_document_diff(buf, diff_start)
    updated = {element.name: element for element in diff.updated}
    nested = dict(diff.sub_diffs)
    if not (diff.deleted or updated or nested):
        # Insertions alone are appended unseen, even where a field of that name is there: twice then (6.0.27).
        inserted = (buf[e.start : e.end] for e in diff.inserted)
        return raw_bson.encode_document(doc[start + 4 : raw_bson.document_end(doc, start) - 1], *inserted)
    dropped = {*diff.deleted, *(element.name for element in diff.inserted)}
    parts: list[bytes] = []
    seen: set[bytes] = set()
    for element in raw_bson.elements(doc, start):
        name = element.name
        seen.add(name)
        if name in dropped:
            continue
        change = updated.get(name)
        if change is not None:
            parts.append(buf[change.start : change.end])
        elif name in nested:
            parts.append(_apply_nested(doc, element, buf, nested[name], depth=depth))
        else:
            parts.append(doc[element.start : element.end])
    parts.extend(buf[e.start : e.end] for name, e in updated.items() if name not in seen)
    parts.extend(buf[e.start : e.end] for e in diff.inserted)
    return raw_bson.encode_document(*parts)


def _apply_nested(doc: bytes, old: Element, buf: bytes, sub: Element, *, depth: int) -> bytes:
    """The element ``old`` after the nested diff; null where its value is not of the kind that the diff was for."""
    name = old.name
    if is_array_diff(buf, sub.value_start):
        if old.type == ARRAY:
            value = _apply_to_array(doc, old.value_start, buf, sub.value_start, depth + 1)
            return raw_bson.encode_element(ARRAY, name, value)
    elif old.type == OBJECT:
        value = _apply_to_document(doc, old.value_start, buf, sub.value_start, depth + 1)
        return raw_bson.encode_element(OBJECT, name, value)
    return raw_bson.encode_element(NULL, name, b"")


def _apply_to_array(doc: bytes, start: int, buf: bytes, diff_start: int, depth: int) -> bytes:
    _check_depth(depth)
    diff = read_array_diff(buf, diff_start)
    changes = {index: (nested, element) for index, nested, element in diff.changes}
    old = list(raw_bson.elements(doc, start))
    length = _array_length(diff, len(old))
    parts: list[bytes] = []
    for index in range(length):
        name = str(index).encode()
        before = old[index] if index < len(old) else None
        change = changes.get(index)
        if change is not None:
            nested, element = change
            if not nested:
                parts.append(raw_bson.encode_element(element.type, name, raw_bson.value(buf, element)))
            elif before is not None:
                parts.append(_apply_nested(doc, before, buf, element, depth=depth))
            else:
                parts.append(raw_bson.encode_element(NULL, name, b""))
        elif before is not None:
            parts.append(doc[before.start : before.end])
        else:
            parts.append(raw_bson.encode_element(NULL, name, b""))
    return raw_bson.encode_document(*parts)


def _array_length(diff: ArrayDiff, old_length: int) -> int:
    last = diff.changes[-1][0] + 1 if diff.changes else 0
    length = max(old_length if diff.new_length is None else diff.new_length, last)
    if length > _ARRAY_ITEMS_MAX:
        raise OplogFormatError(f"an update delta makes an array of {length} items", code=10334)
    return length


def _check_depth(depth: int) -> None:
    if depth > _DEPTH_MAX:
        raise OplogFormatError(f"an update delta is nested deeper than {_DEPTH_MAX} levels", code=15)
