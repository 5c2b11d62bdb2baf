"""Documents and deltas of updates, masked: BSON in, BSON out. What no rule reaches is copied as it is.

Masking commutes with updates: the masked document after the masked delta is the document after the delta, masked. For
this an array keeps its length, and a null that fills it stays null.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from tailrace.core import raw_bson
from tailrace.core.masking.rules import DROP, TOKENISE, MaskNode
from tailrace.core.masking.values import VOID_TYPES, MaskKey
from tailrace.core.oplog.entry import first_elements
from tailrace.core.oplog.update_delta import is_array_diff
from tailrace.core.raw_bson import ARRAY, FIXED_SIZES, OBJECT, STRING, Element, encode_document, encode_element
from tailrace.errors import OplogFormatError, UsageError

_DEPTH_MAX: Final = 250
#: An update that changes nothing.
NO_CHANGE: Final = encode_document(
    b"\x10$v\x00\x02\x00\x00\x00",
    encode_element(OBJECT, b"diff", encode_document(encode_element(OBJECT, b"u", raw_bson.EMPTY_DOCUMENT))),
)


class MaskRefusedError(UsageError):
    """A rule of the masks reaches a value that cannot be masked. The message names collection and path, no value."""


class DocumentMask:
    """The masks of one collection. ``root`` is where its documents begin."""

    __slots__ = ("_key", "_namespace", "root")

    def __init__(self, namespace: str, root: MaskNode, key: MaskKey | None) -> None:
        self._namespace = namespace
        self._key = key
        self.root = root

    def document(self, document: bytes) -> bytes:
        """The document, masked. Raises MaskRefusedError where a rule reaches into ``_id``."""
        return self.fields(document, 0, self.root) or document

    def fields(self, buf: bytes, start: int, node: MaskNode, depth: int = 0) -> bytes | None:
        """The document or array at ``start``, whose place is ``node``, masked; ``None`` if nothing in it is."""
        if depth > _DEPTH_MAX:
            raise OplogFormatError("documents nested too deeply")
        # As ``raw_bson.elements``, written out: no object is made of an element that stays.
        limit = raw_bson.document_end(buf, start) - 1
        fixed, known = FIXED_SIZES, node.children
        parts: list[bytes] = []
        pos = copied = start + 4
        while pos < limit:
            type_, value = buf[pos], buf.find(0, pos + 1, limit) + 1
            if not value:
                raise OplogFormatError("corrupt BSON: unterminated field name", position=f"byte {pos} of the document")
            size = fixed.get(type_)
            end = raw_bson.value_end(buf, type_, value, limit) if size is None else value + size
            if end > limit:
                raise OplogFormatError("corrupt BSON: a value leads outside", position=f"byte {pos} of the document")
            name = buf[pos + 1 : value - 1]
            below = known.get(name) or node.step(name)
            if not below.untouched:
                made = self.element(buf, Element(type_, name, pos, value, end), below, depth)
                if made is not None:
                    parts += (buf[copied:pos], made)
                    copied = end
            pos = end
        return encode_document(*parts, buf[copied:limit]) if copied != start + 4 else None

    def element(self, buf: bytes, element: Element, node: MaskNode, depth: int) -> bytes | None:
        """The element, whose place is ``node``, masked: empty if it is dropped, ``None`` if it stays."""
        type_, action = element.type, node.action
        if action == DROP:
            return self._guarded(b"", node)
        if type_ in (OBJECT, ARRAY):
            inside = self.fields(buf, element.value_start, node, depth + 1)
            return None if inside is None else encode_element(type_, element.name, inside)
        if not action or type_ in VOID_TYPES:
            return None
        content = b"%c%b" % (type_, buf[element.value_start : element.end])
        assert self._key is not None
        text = self._key.token(content) if action == TOKENISE else self._key.hashed(content)
        return self._guarded(encode_element(STRING, element.name, raw_bson.encode_string(text)), node)

    def _guarded(self, made: bytes, node: MaskNode) -> bytes:
        if node.guarded:
            raise self.refused(b"_id", "is in the resume token too")
        return made

    def refused(self, path: bytes, why: str) -> MaskRefusedError:
        """That a rule reaches ``path``, which cannot be masked."""
        return MaskRefusedError(
            f"the masks of {self._namespace} reach {path.decode('utf-8', 'replace')}, which cannot be masked: it {why}",
            hint="Change the rules so that they leave it out, or leave the collection out of what is read",
        )

    def document_key(self, buf: bytes, start: int = 0) -> None:
        """Raises MaskRefusedError if a rule reaches a value of the document key at ``start``: ``_id``, and fields of a
        shard key."""
        if self.fields(buf, start, self.root) is None:
            return
        for element in raw_bson.elements(buf, start):
            if self.element(buf, element, self.root.step(element.name), 0) is not None:
                raise self.refused(element.name, "is in the shard key, and so in the resume token too")

    # -- updates ------------------------------------------------------------------------------------------------------

    def update(self, change: bytes) -> bytes:
        """The ``o`` of an update's entry: a delta, modifiers (``$v: 1``) or a replacement."""
        fields = first_elements(change)
        version = fields.get(b"$v")
        number = 1 if version is None else raw_bson.read_int32(change, version.value_start)
        if number == 2:
            diff = fields.get(b"diff")
            if diff is None or diff.type != OBJECT:
                raise OplogFormatError("BSON field 'diff' is missing but a required field", code=40414)
            made = self.diff(change, diff.value_start, self.root)
            if made is None:
                return change
            head, tail = change[4 : diff.start], change[diff.end : -1]
            return encode_document(head, encode_element(OBJECT, b"diff", made), tail)
        if b"_id" in fields:
            return self.document(change)
        return self._modifiers(change)

    def diff(self, buf: bytes, start: int, node: MaskNode, depth: int = 0) -> bytes | None:
        """The diff at ``start`` of what is at ``node``; ``None`` if it stays as it is."""
        if depth > _DEPTH_MAX:
            raise OplogFormatError(f"an update delta is nested deeper than {_DEPTH_MAX} levels", code=15)
        section = self._array_section if is_array_diff(buf, start) else self._section
        parts, changed = [], False
        for element in raw_bson.elements(buf, start):
            made = section(buf, element, node, depth)
            changed = changed or made is not None
            parts.append(buf[element.start : element.end] if made is None else made)
        if not changed:
            return None
        return encode_document(*parts) if any(parts) else encode_document(_EMPTY_SECTION)

    def _section(self, buf: bytes, element: Element, node: MaskNode, depth: int) -> bytes | None:
        """A part of a document's diff: empty if nothing is left of it, ``None`` if it stays."""
        letter = element.name[:1]
        if letter == b"s":
            below = node.step(element.name[1:])
            if below.action == DROP:
                return b""
            made = None if below.untouched else self.diff(buf, element.value_start, below, depth + 1)
        elif letter == b"d":
            made = self._without_dropped(buf, element.value_start, node)
        else:
            made = self.fields(buf, element.value_start, node, depth)
        if made is None:
            return None
        return b"" if made == raw_bson.EMPTY_DOCUMENT else encode_element(element.type, element.name, made)

    def _array_section(self, buf: bytes, element: Element, node: MaskNode, depth: int) -> bytes | None:
        """A part of an array's diff. Each index is at the place of the array."""
        if element.name[:1] == b"s" and element.type == OBJECT:
            made = self.diff(buf, element.value_start, node, depth + 1)
            return None if made is None else encode_element(OBJECT, element.name, made)
        return self.element(buf, element, node, depth) if element.name[:1] == b"u" else None

    def _without_dropped(self, buf: bytes, start: int, node: MaskNode) -> bytes | None:
        """A document whose names are fields, without those that are dropped; ``None`` if it stays."""
        return kept(buf, start, lambda element: node.step(element.name).action != DROP)

    def _modifiers(self, change: bytes) -> bytes:
        """``$set`` and ``$unset`` with dotted names, as servers before 5.0 log them."""
        parts: list[bytes] = []
        for element in raw_bson.elements(change):
            made: bytes | None = None
            if element.name == b"$set" and element.type == OBJECT:
                self._check_created(change, element)
                made = self.fields(change, element.value_start, self.root)
            elif element.name == b"$unset" and element.type == OBJECT:
                made = self._without_dropped(change, element.value_start, self.root)
            if made is None:
                parts.append(change[element.start : element.end])
            elif made != raw_bson.EMPTY_DOCUMENT:
                parts.append(encode_element(OBJECT, element.name, made))
        made_of = encode_document(*parts)
        is_empty = not {b"$set", b"$unset"} & first_elements(made_of).keys()
        return NO_CHANGE if is_empty else made_of

    def _check_created(self, change: bytes, modifiers: Element) -> None:
        """Such a path may create the objects on its way, which the entry does not tell: a field in them that is
        dropped would take them along."""
        for element in raw_bson.elements(change, modifiers.value_start):
            parent = element.name.rpartition(b".")[0]
            if parent and self.root.step(element.name).action == DROP != self.root.step(parent).action:
                raise self.refused(element.name, "is dropped out of an object that this update may have created")


#: What is left of a delta where everything is dropped.
_EMPTY_SECTION: Final = encode_element(OBJECT, b"u", raw_bson.EMPTY_DOCUMENT)


def kept(buf: bytes, start: int, keep: Callable[[Element], bool]) -> bytes | None:
    """The document at ``start`` with the elements that ``keep`` says yes to; ``None`` if those are all."""
    found = list(raw_bson.elements(buf, start))
    wanted = [element for element in found if keep(element)]
    if len(wanted) == len(found):
        return None
    return encode_document(*(buf[element.start : element.end] for element in wanted))
