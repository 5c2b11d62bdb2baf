"""The changes of many documents applied: deltas in compiled code, many documents at a time, the rest one by one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Generic, Protocol, TypeVar

import numpy as np

from tailrace.core import kernel, raw_bson
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.errors import TailraceError
from tailrace.read.images.delta import ImageMismatchError, UnknownDocumentError, apply_operation
from tailrace.read.window.merge_updates import merged

INSERT, UPDATE, DELETE = ord("i"), ord("u"), ord("d")
LETTERS: Final = {INSERT: b"i", UPDATE: b"u", DELETE: b"d"}
#: A delete by a transaction over several shards. It is of the document with this document key only: another shard may
#: have inserted the document with the same ``_id`` already, since each shard has a time of its own for the commit.
DELETE_OF = ord("D")
#: A change: its letter, the entry's ``o`` (for ``DELETE_OF`` the document key), its cluster time.
TimedChange = tuple[int, bytes, int]

#: What an ``o`` with a delta begins with, after its length: ``$v`` 2 and the name of the delta.
_DELTA: Final = b"\x10$v\0\x02\0\0\0\x03diff\0"
#: More updates of one document than this are merged into one first: each needs a round of its own otherwise.
_ROUNDS: Final = 8
#: Deltas that are applied at a time; fewer than these are faster one by one.
_MOST, _FEWEST = 8192, 8
_TIME: Final = 2**64 - 1


class HeldCollection(Protocol):
    """A collection whose documents somebody holds. Changes up to ``copied`` may be in them already.

    ``holder``  who holds them, and ``anew``: what lets them be copied again; both for messages
    """

    @property
    def namespace(self) -> str: ...

    @property
    def copied(self) -> int: ...

    @property
    def holder(self) -> str: ...

    @property
    def anew(self) -> str: ...


C = TypeVar("C", bound=HeldCollection)


class StateMismatchError(TailraceError):
    """A change does not fit what is held: the document is not the one that the server had."""


class DocumentWork(Generic[C]):
    """A document that is ``held`` (``None``: there is none), and its changes in order. ``document`` is what it is after
    those that were applied."""

    __slots__ = ("changes", "collection", "document", "held", "key")

    def __init__(self, collection: C, key: bytes, held: bytes | None, changes: list[TimedChange]) -> None:
        self.collection = collection
        self.key = key
        self.held = self.document = held
        if len(changes) > _ROUNDS and (changes[0][2] & _TIME) > collection.copied:
            changes = _fewer(changes)
        self.changes = changes

    @property
    def changed(self) -> int | None:
        """The time of the last change that the document shows; ``None`` if no change was of this document."""
        times = (time for op, _, time in reversed(self.changes) if op in (INSERT, UPDATE))
        return next(times, None) if self.document is not None else self.changes[-1][2]

    def apply(self, change: TimedChange) -> None:
        """Apply one change by the reference."""
        op, body, time = change
        if op == DELETE_OF:
            if self.document is not None and not has_document_key(self.document, body):
                return
            op = DELETE
        again = (time & _TIME) <= self.collection.copied
        try:
            self.document = apply_operation(self.document, LETTERS[op], body, again=again or op != UPDATE)
        except UnknownDocumentError as error:
            if not again:
                raise self._mismatch(error, time) from None
        except ImageMismatchError as error:
            raise self._mismatch(error, time) from None

    def _mismatch(self, error: TailraceError, time: int) -> StateMismatchError:
        return StateMismatchError(
            f"{self.collection.namespace}: the change at {ClusterTime(time & _TIME)} of the document with the key "
            f"{self.key.hex()[:80]} does not fit what {self.collection.holder} holds: {error.message}",
            hint=error.hint or self.collection.anew,
        )


def apply_all(works: Sequence[DocumentWork[C]]) -> None:
    """Apply all changes: the first one of each document, then the second one of each, ... Raises StateMismatchError."""
    compiled = kernel.available()
    left, number = list(works), 0
    while left:
        waiting: list[DocumentWork[C]] = []
        for work in left:
            op, body, time = change = work.changes[number]
            is_delta = op == UPDATE and body[4:18] == _DELTA
            if compiled and is_delta and work.document is not None and (time & _TIME) > work.collection.copied:
                waiting.append(work)
            else:
                work.apply(change)
        for first in range(0, len(waiting), _MOST):
            _apply_deltas(waiting[first : first + _MOST], number)
        number += 1
        left = [work for work in left if len(work.changes) > number]


def _apply_deltas(works: Sequence[DocumentWork[C]], number: int) -> None:
    if len(works) < _FEWEST:
        for work in works:
            work.apply(work.changes[number])
        return
    from tailrace.read.images.updated import updated  # noqa: PLC0415  not without numba

    deltas = [work.changes[number][1] for work in works]
    ends = np.cumsum(np.fromiter(map(len, deltas), np.int64, len(deltas)))
    starts = np.concatenate((np.zeros(1, np.int64), ends[:-1]))
    raw = np.frombuffer(b"".join(deltas), np.uint8)
    found = updated([work.document or b"" for work in works], raw, starts)
    for work, document in zip(works, found, strict=True):
        if document is None:
            work.apply(work.changes[number])
        else:
            work.document = document


def _fewer(changes: list[TimedChange]) -> list[TimedChange]:
    """The same changes, with the updates after the first change merged into one if possible."""
    if any(op != UPDATE for op, _, _ in changes[1:]):
        return changes
    first = 0 if changes[0][0] == UPDATE else 1
    one = merged([change for _, change, _ in changes[first:]])
    return changes if one is None else [*changes[:first], (UPDATE, one, changes[-1][2])]


def has_document_key(document: bytes, document_key: bytes) -> bool:
    """Whether a document has the shard key values of a document key (BSON, with dotted names)."""
    return all(
        element.name == b"_id" or _at(document, element.name) == (element.type, raw_bson.value(document_key, element))
        for element in raw_bson.elements(document_key)
    )


def _at(document: bytes, path: bytes) -> tuple[int, bytes] | None:
    """The type and the value at a dotted path, which does not lead through arrays."""
    first, dot, rest = path.partition(b".")
    element = raw_bson.find(document, first)
    if element is None:
        return None
    if not dot:
        return element.type, raw_bson.value(document, element)
    return _at(raw_bson.value(document, element), rest) if element.type == raw_bson.OBJECT else None
