"""Finds the changes of documents in a run of oplog entries, which ``tailrace.lake.tables`` folds by document.

``change_rows`` takes a few tenths of a microsecond for an entry, and looks only at its top-level fields. Commands and
transactions are recognised by their operation, and left to the plain stages.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from tailrace.core.kernel.compiled import entry_point, fingerprint, inner
from tailrace.core.kernel.entry_rows import Ints, entry_rows
from tailrace.core.kernel.memory import load8, load32, load64, store64
from tailrace.core.kernel.scan import (
    BINARY,
    BOOL,
    OBJECT,
    STRING,
    TIMESTAMP,
    document_end,
    name_word,
    read_element,
    word_of,
)

#: int64 numbers for each entry, in the order of ``ChangeRows``.
_ROW: Final = 14
_SIZE: Final = 8 * _ROW
_TS: Final = word_of(b"ts")
_OP: Final = word_of(b"op")
_NS: Final = word_of(b"ns")
_UI: Final = word_of(b"ui")
_O: Final = word_of(b"o")
_O2: Final = word_of(b"o2")
_ID: Final = word_of(b"_id")
_FROM_MIGR: Final = word_of(b"fromMigr")
_UPDATE: Final = ord("u")
#: No letter has this code.
NO_LETTER: Final = 256


class ChangeRows(NamedTuple):
    """``n`` entries of a run, as offsets into it (0 for what is missing).

    ``start``            where each entry begins (n + 1)
    ``time``             its packed cluster time
    ``operation``        the letter's code: 105 i, 117 u, 100 d, 99 c, 110 n; ``NO_LETTER`` for more letters than one
    ``namespace_start``, ``namespace_end``
    ``uuid``             where the collection's 16 bytes are
    ``change_start``, ``change_end``     the document ``o``
    ``key_start``, ``key_end``           the document ``o2``
    ``migrated``         1 for an entry of a chunk migration
    ``id_type``, ``id_start``, ``id_end``  the changed document's ``_id``: from ``o2`` for an update, otherwise ``o``
    """

    start: Ints
    time: Ints
    operation: Ints
    namespace_start: Ints
    namespace_end: Ints
    uuid: Ints
    change_start: Ints
    change_end: Ints
    key_start: Ints
    key_end: Ints
    migrated: Ints
    id_type: Ints
    id_start: Ints
    id_end: Ints


@inner
def _find_id(row: int, base: int, start: int, end: int) -> bool:
    """Note where ``_id`` is in the document [start, end). False if that is not valid BSON."""
    element = start + 4
    while element < end - 1:
        name = element + 1
        type_ = load8(element)
        nul, element = read_element(element, end - 1)
        if element < 0:
            return False
        if nul - name == 3 and name_word(name, 3) == _ID:
            store64(row + 88, type_)
            store64(row + 96, nul + 1 - base)
            store64(row + 104, element - base)
            return True
    return True


@inner
def _note(row: int, base: int, name: int, size: int, type_: int, value: int, end: int) -> None:  # noqa: PLR0917
    """Note a field of an entry, if it is one of those wanted."""
    if size == 11:
        if load64(name) == _FROM_MIGR and type_ == BOOL:
            store64(row + 80, load8(value))
    elif size <= 2:
        word = name_word(name, size)
        if word == _TS and type_ == TIMESTAMP:
            store64(row + 8, load64(value))
        elif word == _OP and type_ == STRING:
            store64(row + 16, load8(value + 4) if load32(value) == 2 else NO_LETTER)
        elif word == _NS and type_ == STRING:
            store64(row + 24, value + 4 - base)
            store64(row + 32, end - 1 - base)
        elif word == _UI and type_ == BINARY and end - value == 21:
            store64(row + 40, value + 5 - base)
        elif word == _O and type_ == OBJECT:
            store64(row + 48, value - base)
            store64(row + 56, end - base)
        elif word == _O2 and type_ == OBJECT:
            store64(row + 64, value - base)
            store64(row + 72, end - base)


def _make_fill(sources: int) -> Callable[[int, int, int], bool]:
    @entry_point("boolean(int64, int64, int64)")
    def fill(start: int, limit: int, rows: int) -> bool:
        """Fill a row for each of the documents in [start, limit). False: one of them is not valid BSON."""
        if sources == 0:
            return False
        pos, row = start, rows
        while pos < limit:
            end = document_end(pos, limit)
            store64(row, pos - start)
            element = pos + 4
            while element < end - 1:
                name = element + 1
                type_ = load8(element)
                nul, element = read_element(element, end - 1)
                if element < 0:
                    return False
                _note(row, start, name, nul - name, type_, nul + 1, element)
            slot = 64 if load64(row + 16) == _UPDATE else 48
            if load64(row + slot) and not _find_id(
                row, start, start + load64(row + slot), start + load64(row + slot + 8)
            ):
                return False
            pos = end
            row += _SIZE
        return True

    return fill


_fill = _make_fill(fingerprint(__name__))


def change_rows(raw: bytes) -> ChangeRows | None:
    """The rows of a run of entries; ``None`` if one of them is not valid BSON. The plain code then says more."""
    columns = entry_rows(raw, _ROW, _fill)
    return None if columns is None else ChangeRows(*columns)
