"""``updateDescription`` from an oplog entry's ``o``: the ``$v: 1`` form and the ``$v: 2`` delta (semantics 3).

Bytes in, bytes out: updated values are copied as they are in the entry; only paths are built.
"""

from __future__ import annotations

from typing import Final

from tailrace.core import raw_bson
from tailrace.core.oplog.update_delta import is_array_diff, read_array_diff, read_document_diff
from tailrace.core.raw_bson import ARRAY, INT32, OBJECT, STRING, Element, encode_document, encode_element
from tailrace.errors import OplogFormatError, ServerError

#: Deeper nesting than any server accepts; a diff built to be deeper is refused instead of exhausting the stack.
_DEPTH_MAX: Final = 250
#: The server's limit of a document in the making, and of its buffers. A description larger than an event may be,
#: but not this large, is made: the event is then refused by its size, or the user's stages leave the description out.
_BYTES_MAX: Final = 64 * 1024 * 1024
#: What the server's document takes for a field in addition to its name.
_STORED_FIELD: Final = 26
#: About what a name among others takes in addition to itself.
_SMALL_PARTS: Final = 12
_HINT: Final = "The update changes too many fields under too long a path to be described: start the stream after it"


def describe_update(o: bytes, *, disambiguated_paths: bool = False) -> bytes:
    """The ``updateDescription`` document for the update entry whose ``o`` is given.

    ``$v`` 1, or none: ``{updatedFields, removedFields}``. ``$v`` 2: the same and ``truncatedArrays``, and with
    ``disambiguated_paths`` (6.1 and later, showExpandedEvents) that field too.

    Raises ``OplogFormatError`` with the server's code for a delta that breaks its format.
    """
    version = raw_bson.find(o, b"$v")
    if version is not None and version.type != INT32:
        raise OplogFormatError("the field '$v' of an update entry is not a 32-bit integer", code=8)
    if version is None or raw_bson.read_int32(o, version.value_start) != 2:
        return _describe_modifiers(o)
    diff = raw_bson.find(o, b"diff")
    if diff is None or diff.type != OBJECT:
        found = "missing" if diff is None else raw_bson.type_name(diff.type)
        raise OplogFormatError(f'Entry field "o.diff" should be object, found: {found}', code=40532)
    description = _Description(o, disambiguated_paths=disambiguated_paths)
    description.document(diff.value_start, b"", (), False)
    return description.to_bson()


def _describe_modifiers(o: bytes) -> bytes:
    """The old form: ``$set`` is copied, the names in ``$unset`` are listed; there are no ``truncatedArrays``."""
    updated = raw_bson.EMPTY_DOCUMENT
    removed: list[bytes] = []
    for element in raw_bson.elements(o):
        if element.name == b"$set" and element.type == OBJECT:
            updated = raw_bson.value(o, element)
        elif element.name == b"$unset" and element.type == OBJECT:
            removed = [field.name for field in raw_bson.elements(o, element.value_start)]
    return encode_document(
        encode_element(OBJECT, b"updatedFields", updated),
        encode_element(ARRAY, b"removedFields", _string_array(removed)),
    )


def _string_array(texts: list[bytes]) -> bytes:
    if not texts:
        return raw_bson.EMPTY_DOCUMENT
    return encode_document(
        *(encode_element(STRING, b"%d" % i, raw_bson.encode_string(text)) for i, text in enumerate(texts))
    )


class _Description:
    """Collects the fields of an update description while it walks a diff depth first.

    The server's order: all of a level's ``u``, then its ``i``, then ``d``, then the sub-diffs in turn.
    """

    def __init__(self, o: bytes, *, disambiguated_paths: bool) -> None:
        self._buf = o
        self._updated: list[bytes] = []
        self._removed: list[bytes] = []
        self._truncated: list[bytes] = []
        self._ambiguous: list[bytes] | None = [] if disambiguated_paths else None
        self._fields = self._stored = self._bytes = 0

    def to_bson(self) -> bytes:
        parts = [
            encode_element(OBJECT, b"updatedFields", encode_document(*self._updated)),
            encode_element(ARRAY, b"removedFields", _string_array(self._removed)),
            encode_element(
                ARRAY,
                b"truncatedArrays",
                encode_document(*(encode_element(OBJECT, b"%d" % i, t) for i, t in enumerate(self._truncated))),
            ),
        ]
        if self._ambiguous is not None:
            parts.append(encode_element(OBJECT, b"disambiguatedPaths", encode_document(*self._ambiguous)))
        return encode_document(*parts)

    def document(self, start: int, prefix: bytes, parts: tuple[bytes | int, ...], ambiguous: bool) -> None:
        diff = read_document_diff(self._buf, start)
        for element in diff.updated:
            self._update(element, prefix, parts, ambiguous)
        for element in diff.inserted:
            self._update(element, prefix, parts, ambiguous)
        for name in diff.deleted:
            self._count(len(prefix) + len(name) + _SMALL_PARTS)
            self._removed.append(prefix + name)
            self._note(prefix + name, (*parts, name), ambiguous or _is_ambiguous(name, parts))
        for name, element in diff.sub_diffs:
            self._nested(element, prefix + name, (*parts, name), ambiguous or _is_ambiguous(name, parts))

    def array(self, start: int, path: bytes, parts: tuple[bytes | int, ...], ambiguous: bool) -> None:
        diff = read_array_diff(self._buf, start)
        if diff.new_length is not None:
            self._count(len(path) + _SMALL_PARTS)
            self._truncated.append(
                encode_document(
                    encode_element(STRING, b"field", raw_bson.encode_string(path)),
                    encode_element(INT32, b"newSize", raw_bson.encode_int32(diff.new_length)),
                )
            )
            self._note(path, parts, ambiguous)
        for index, nested, element in diff.changes:
            inner = b"%b.%d" % (path, index)
            if nested:
                self._nested(element, inner, (*parts, index), ambiguous)
            else:
                self._count_updated(len(inner), element.end - element.value_start)
                self._updated.append(encode_element(element.type, inner, raw_bson.value(self._buf, element)))
                self._note(inner, (*parts, index), ambiguous)

    def _count_updated(self, path_size: int, value_size: int) -> None:
        """Raises as soon as the server's own document of the updated fields would be over 64 MB: it holds a name, a
        fixed part and a hash table's slot for each (measured to the field on 6.0.27)."""
        self._fields += 1
        self._stored += (_STORED_FIELD + path_size + 7) & ~7
        if self._stored + 4 * max(8, 1 << (self._fields - 1).bit_length()) > _BYTES_MAX:
            raise ServerError("Tried to make oversized document", code=16490, hint=_HINT)
        self._count(path_size + value_size)

    def _count(self, size: int) -> None:
        """Raises where the description would be more than the server's buffers hold."""
        self._bytes += size
        if self._bytes > _BYTES_MAX:
            raise ServerError(
                f"BufBuilder attempted to grow() to {self._bytes} bytes, past the 64MB limit.", code=13548, hint=_HINT
            )

    def _nested(self, element: Element, path: bytes, parts: tuple[bytes | int, ...], ambiguous: bool) -> None:
        if len(parts) > _DEPTH_MAX:
            raise OplogFormatError(f"an update delta is nested deeper than {_DEPTH_MAX} levels", code=15)
        if is_array_diff(self._buf, element.value_start):
            self.array(element.value_start, path, parts, ambiguous)
        else:
            self.document(element.value_start, path + b".", parts, ambiguous)

    def _update(self, element: Element, prefix: bytes, parts: tuple[bytes | int, ...], ambiguous: bool) -> None:
        self._count_updated(len(prefix) + len(element.name), element.end - element.value_start)
        if not prefix:
            self._updated.append(self._buf[element.start : element.end])
        else:
            value = raw_bson.value(self._buf, element)
            self._updated.append(encode_element(element.type, prefix + element.name, value))
        if self._ambiguous is not None:
            name = element.name
            self._note(prefix + name, (*parts, name), ambiguous or _is_ambiguous(name, parts))

    def _note(self, path: bytes, parts: tuple[bytes | int, ...], ambiguous: bool) -> None:
        """Add the path's components to ``disambiguatedPaths`` where the joined path can be read in two ways."""
        if self._ambiguous is None or not ambiguous:
            return
        self._count(2 * len(path) + _SMALL_PARTS * len(parts))
        components = [
            encode_element(INT32, b"%d" % i, raw_bson.encode_int32(part))
            if isinstance(part, int)
            else encode_element(STRING, b"%d" % i, raw_bson.encode_string(part))
            for i, part in enumerate(parts)
        ]
        self._ambiguous.append(encode_element(ARRAY, path, encode_document(*components)))


def _is_ambiguous(name: bytes, parents: tuple[bytes | int, ...]) -> bool:
    """A field name with a dot, or one below the first level that reads like an array index (semantics 3.3)."""
    if b"." in name:
        return True
    return bool(parents) and name.isdigit() and (name == b"0" or not name.startswith(b"0"))
