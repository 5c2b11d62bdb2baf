"""Which namespaces a stream sees, in compiled code: the counterpart of ``tailrace.core.oplog.namespace``."""

from __future__ import annotations

from tailrace.core.kernel.compiled import inner
from tailrace.core.kernel.memory import load8
from tailrace.core.kernel.scan import equal, name_word, word_of
from tailrace.core.kernel.utf8 import valid_utf8

#: Kinds of scope, as ``KernelSettings`` names them.
CLUSTER = 0
DATABASE = 1
COLLECTION = 2

# Answers.
OUT_OF_SCOPE = 0
IN_SCOPE = 1
#: A namespace that the plain stages judge: ``system.views``, a final newline, no collection name.
UNDECIDED = 2

_ADMIN = word_of(b"admin")
_CONFIG = word_of(b"config")
_LOCAL = word_of(b"local")
_SYSTEM = word_of(b"system")
_VIEWS = word_of(b"views")
_CMD = word_of(b"$cmd")

_DOT = 0x2E
_DOLLAR = 0x24
_NEWLINE = 0x0A


@inner
def first_dot(start: int, end: int) -> int:
    """The address of the first dot in [start, end), or ``end``."""
    pos = start
    while pos < end and load8(pos) != _DOT:
        pos += 1
    return pos


@inner
def _is_internal_database(start: int, size: int) -> bool:
    if size not in (5, 6):
        return False
    word = name_word(start, size)
    return word in (_ADMIN, _LOCAL) if size == 5 else word == _CONFIG


@inner
def _is_user_database(start: int, end: int) -> bool:
    """Whether the cluster's streams show the database with the name in [start, end)."""
    return not _is_internal_database(start, end - start) and valid_utf8(start, end)


@inner
def _visible(start: int, end: int) -> int:
    """The answer for a collection name under a database or cluster scope."""
    size = end - start
    if size == 0 or load8(end - 1) == _NEWLINE:
        return UNDECIDED
    if load8(start) == _DOLLAR:
        return OUT_OF_SCOPE
    if size >= 7 and name_word(start, 6) == _SYSTEM:
        if size == 12 and name_word(start + 7, 5) == _VIEWS:
            return UNDECIDED
        if load8(start + 6) == _DOT:
            return OUT_OF_SCOPE
    return IN_SCOPE if valid_utf8(start, end) else OUT_OF_SCOPE


@inner
def in_scope(start: int, end: int, kind: int, scope: int, scope_size: int) -> int:
    """The answer for the namespace in [start, end). ``scope`` is ``db.coll`` or ``db.``, or anything for a cluster."""
    size = end - start
    if size > 0 and load8(end - 1) == _NEWLINE:
        return UNDECIDED
    if kind == COLLECTION:
        return IN_SCOPE if size == scope_size and equal(start, scope, size) else OUT_OF_SCOPE
    if kind == DATABASE:
        if size < scope_size or not equal(start, scope, scope_size):
            return OUT_OF_SCOPE
        return _visible(start + scope_size, end)
    dot = first_dot(start, end)
    if dot in (end, start) or not _is_user_database(start, dot):
        return OUT_OF_SCOPE
    return _visible(dot + 1, end)


@inner
def collection_in_scope(start: int, end: int, kind: int, scope: int, scope_size: int) -> int:
    """The answer for a bare collection name, such as a command has; of its database ``command_in_scope`` tells."""
    if kind != COLLECTION:
        return _visible(start, end)
    size = end - start
    if size > 0 and load8(end - 1) == _NEWLINE:
        return UNDECIDED
    name = first_dot(scope, scope + scope_size) + 1
    return IN_SCOPE if size == scope + scope_size - name and equal(start, name, size) else OUT_OF_SCOPE


@inner
def command_in_scope(start: int, end: int, kind: int, scope: int, scope_size: int) -> int:
    """The answer for the namespace of a command, ``db.$cmd`` where it is in scope at all."""
    size = end - start
    if size > 0 and load8(end - 1) == _NEWLINE:
        return UNDECIDED
    dot = first_dot(start, end)
    if end - dot != 5 or name_word(dot + 1, 4) != _CMD or dot == start:
        return OUT_OF_SCOPE
    if kind == CLUSTER:
        return IN_SCOPE if _is_user_database(start, dot) else OUT_OF_SCOPE
    database = first_dot(scope, scope + scope_size) - scope
    return IN_SCOPE if dot - start == database and equal(start, scope, database) else OUT_OF_SCOPE
