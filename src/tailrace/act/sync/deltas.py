"""A delta of an oplog entry as an update that the target carries out itself, so that nobody has to read its document.

``$set`` and ``$unset`` do what a delta does as long as it gives existing fields other values, takes fields away,
or sets items of arrays: the order of fields stays. Where a document has a name twice, both change the first. What a
delta adds has an order of its own, and an array that becomes shorter has no such update. These go as they are, to a
server that takes them from its clients (``$_internalApplyOplogUpdate``, from 6.0 on).

Whatever a server refuses of this is written as a whole document instead (``writer.py``).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

import bson
from bson.raw_bson import RawBSONDocument
from pymongo import MongoClient
from pymongo.errors import PyMongoError

from tailrace.core import raw_bson
from tailrace.core.oplog.update_delta import is_array_diff, read_array_diff, read_document_diff
from tailrace.core.raw_bson import Element
from tailrace.errors import OplogFormatError
from tailrace.read.window.apply import UPDATE, TimedChange
from tailrace.read.window.merge_updates import merged, updated_fields

#: What an ``o`` with a delta begins with, after its length: ``$v`` 2 and the name of the delta.
DELTA: Final = b"\x10$v\0\x02\0\0\0\x03diff\0"
_DIFF: Final = 4 + len(DELTA)
#: A document of more changes than this is written as a whole, if they cannot be made one.
_STATEMENTS_MAX: Final = 4
#: Names that are no paths and mean nothing to an update.
_PLAIN_NAME: Final = re.compile(rb"[^.$][^.]*")
_DOLLAR: Final = re.compile(rb"[\x01-\x13\x7f\xff]\$")
_NAMES_KEPT: Final = 10_000


class DeltaEncoder:
    """Makes updates of deltas, for a target.

    ``takes_names``   whether its updates take names that begin with a dollar inside of values
    ``takes_deltas``  whether it takes deltas as they are
    """

    def __init__(self, *, takes_names: bool, takes_deltas: bool) -> None:
        self._takes_names, self._takes_deltas = takes_names, takes_deltas
        #: Names of top-level fields that an update may have, as far as they were examined.
        self._plain: set[bytes] = set()

    def updates(self, changes: Sequence[TimedChange]) -> list[bytes] | None:
        """The elements ``u`` of the statements that do what the changes of one document do, in order; ``None`` if there
        are none, and the whole document has to be written."""
        if len(changes) == 1:
            [(op, body, _)] = changes
            if op != UPDATE or body[4:_DIFF] != DELTA:
                return None
            update = self._update(body)
            return None if update is None else [update]
        bodies = [body for op, body, _ in changes if op == UPDATE and body[4:_DIFF] == DELTA]
        if len(bodies) < len(changes):
            return None
        if len(bodies) > 1:
            one = merged(bodies)
            if one is not None:
                bodies = [one]
            elif len(bodies) > _STATEMENTS_MAX:
                return None
        made: list[bytes] = []
        for body in bodies:
            update = self._update(body)
            if update is None:
                return None
            made.append(update)
        return made

    def _update(self, change: bytes) -> bytes | None:
        if self._takes_names or _DOLLAR.search(change, _DIFF) is None:
            start = updated_fields(change)
            if start > 0 and self._are_plain(change, start):
                size = raw_bson.read_int32(change, start)
                # ``$set`` of a delta that only gives fields of the top level other values: its section is the update's.
                return b"\x03u\0%b\x03$set\0%b\0" % ((size + 11).to_bytes(4, "little"), change[start : start + size])
            modifiers = _modifiers(change)
            if modifiers is not None:
                return raw_bson.encode_element(raw_bson.OBJECT, b"u", modifiers)
        return _as_it_is(change) if self._takes_deltas else None

    def _are_plain(self, change: bytes, start: int) -> bool:
        """Whether an update may name all fields of the document at ``start``."""
        # As ``raw_bson.elements``, written out: most of a sync's changes come through here.
        limit = raw_bson.document_end(change, start) - 1
        plain, fixed, pos = self._plain, raw_bson.FIXED_SIZES, start + 4
        while pos < limit:
            name_end = change.find(0, pos + 1, limit)
            name = change[pos + 1 : name_end]
            if name_end < 0 or (name not in plain and not self._is_plain(name)):
                return False
            type_ = change[pos]
            size = fixed.get(type_)
            pos = raw_bson.value_end(change, type_, name_end + 1, limit) if size is None else name_end + 1 + size
        return pos == limit

    def _is_plain(self, name: bytes) -> bool:
        if name == b"_id" or _PLAIN_NAME.fullmatch(name) is None:
            return False
        if len(self._plain) >= _NAMES_KEPT:
            self._plain = set()
        self._plain.add(name)
        return True


def takes_deltas(client: MongoClient[Any], database: str) -> bool:
    """Whether the target takes deltas from this user: it is asked to apply one to a document that does not exist."""
    command = {"update": "fences", "updates": [{"q": {"_id": "nobody"}, "u": [_STAGE]}]}
    try:
        reply = client.get_database(database).command(command)
    except PyMongoError:
        return False
    return "writeErrors" not in reply


_STAGE: Final = {
    "$_internalApplyOplogUpdate": {"oplogUpdate": RawBSONDocument(bson.encode({"$v": 2, "diff": {"u": {"n": 1}}}))}
}


def _as_it_is(change: bytes) -> bytes:
    """The element ``u`` that applies a delta as a secondary would."""
    given = raw_bson.encode_document(raw_bson.encode_element(raw_bson.OBJECT, b"oplogUpdate", change))
    stage = raw_bson.encode_document(raw_bson.encode_element(raw_bson.OBJECT, b"$_internalApplyOplogUpdate", given))
    stages = raw_bson.encode_document(raw_bson.encode_element(raw_bson.OBJECT, b"0", stage))
    return raw_bson.encode_element(raw_bson.ARRAY, b"u", stages)


class _NotSoError(Exception):
    """No ``$set`` and ``$unset`` do what a delta does."""


def _modifiers(change: bytes) -> bytes | None:
    """The document of ``$set`` and ``$unset`` that does what a delta does, if there is one."""
    found = _Paths(change)
    try:
        found.document(_DIFF, b"")
    except (_NotSoError, OplogFormatError):
        return None
    parts = [
        raw_bson.encode_element(raw_bson.OBJECT, name, raw_bson.encode_document(*some))
        for name, some in ((b"$set", found.sets), (b"$unset", found.unsets))
        if some
    ]
    return raw_bson.encode_document(*parts)


class _Paths:
    """The fields that a delta sets and takes away, by their paths."""

    def __init__(self, change: bytes) -> None:
        self._change = change
        self.sets: list[bytes] = []
        self.unsets: list[bytes] = []

    def document(self, start: int, prefix: bytes) -> None:
        """Those of the document's diff at ``start``, which is at the path ``prefix``."""
        diff = read_document_diff(self._change, start)
        if diff.inserted:
            raise _NotSoError
        for name in diff.deleted:
            self.unsets.append(raw_bson.encode_element(raw_bson.BOOL, self._path(prefix, name), b"\x01"))
        for element in diff.updated:
            self._set(self._path(prefix, element.name), element)
        for name, element in diff.sub_diffs:
            self._nested(self._path(prefix, name) + b".", element)

    def _nested(self, prefix: bytes, element: Element) -> None:
        if not is_array_diff(self._change, element.value_start):
            self.document(element.value_start, prefix)
            return
        diff = read_array_diff(self._change, element.value_start)
        if diff.new_length is not None:
            raise _NotSoError
        for index, nested, changed in diff.changes:
            if nested:
                self._nested(prefix + b"%d." % index, changed)
            else:
                self._set(prefix + b"%d" % index, changed)

    def _set(self, path: bytes, element: Element) -> None:
        self.sets.append(raw_bson.encode_element(element.type, path, raw_bson.value(self._change, element)))

    @staticmethod
    def _path(prefix: bytes, name: bytes) -> bytes:
        if _PLAIN_NAME.fullmatch(name) is None or (not prefix and name == b"_id"):
            raise _NotSoError
        return prefix + name
