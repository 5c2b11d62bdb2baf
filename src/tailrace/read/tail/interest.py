"""What streams wait for, and what entries are about, in one vocabulary: keys.

A stream waits for one key: its namespace, its database, or ``CLUSTER``. An entry is about a set of keys, which is never
smaller than what ``OplogMatch`` takes: a stream whose key is not among them would leave the entry out. ``EVERYONE``
means all keys.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final, TypeAlias

from tailrace.core.oplog.entry import OplogEntry, apply_ops, first_elements, parse_entry, parse_operation
from tailrace.core.oplog.entry_kinds import KNOWN_COMMANDS, command_name
from tailrace.core.oplog.namespace import Scope, split_namespace
from tailrace.core.raw_bson import STRING, find, read_string
from tailrace.core.stage.oplog_match import END_OF_TRANSACTION
from tailrace.errors import OplogFormatError
from tailrace.read.tail.chains import Chains

#: ``None``: everyone.
InterestKeys: TypeAlias = "frozenset[bytes] | None"

EVERYONE: Final = None
NOBODY: Final[frozenset[bytes]] = frozenset()
#: The key of streams over the whole deployment; no namespace and no database has that name.
CLUSTER: Final = b"*."
_INTERNAL: Final = frozenset((b"admin", b"config", b"local"))
#: The fields of a command that say a collection's name, and those that say a namespace.
_NAMING: Final = (
    b"drop",
    b"create",
    b"createIndexes",
    b"startIndexBuild",
    b"abortIndexBuild",
    b"commitIndexBuild",
    b"dropIndexes",
    b"collMod",
)
_RENAMING: Final = (b"renameCollection", b"to")
#: A transaction about more than this is about everyone: such a set would cost more than it spares.
_KEYS_MAX: Final = 1000


def key_of(scope: Scope) -> bytes:
    """What a stream of this scope waits for."""
    if scope.kind == "cluster":
        return CLUSTER
    return str(scope).encode()


@lru_cache(maxsize=20_000)
def keys_of(namespace: bytes) -> frozenset[bytes]:
    """What a write to this namespace is about."""
    database = split_namespace(namespace)[0]
    if len(database) == len(namespace):
        return NOBODY
    # The server's patterns for names end in $, which takes a line break at the end of a name for nothing.
    return frozenset((namespace, namespace.removesuffix(b"\n"))) | _around(database)


def keys_of_entry(raw: bytes, chains: Chains) -> InterestKeys:
    """What an entry is about, from all that it says. ``chains`` knows the transactions that are on their way, and
    learns of this one. An entry that cannot be read concerns everyone: its reader says what is wrong."""
    try:
        entry = parse_entry(raw)
        if entry.operation == "n" and entry.o2 is not None and find(entry.o2, END_OF_TRANSACTION) is not None:
            return EVERYONE  # it lists the namespaces that it is about, whatever its own is
        if entry.operation != "c":
            return keys_of(entry.namespace)
        return _of_command(entry, chains)
    except OplogFormatError:
        return EVERYONE


def _around(database: bytes) -> frozenset[bytes]:
    if not database or database in _INTERNAL:
        return frozenset((database,))
    return frozenset((database, CLUSTER))


def _of_command(entry: OplogEntry, chains: Chains) -> InterestKeys:
    body = entry.o
    fields = first_elements(body)
    if b"applyOps" in fields:
        keys = _of_operations(entry)
        if entry.lsid is not None:
            keys = chains.member(entry.cluster_time, entry.prev_op_time, keys)
        for mark in (b"prepare", b"partialTxn"):
            element = fields.get(mark)
            if body is not None and element is not None and body[element.value_start : element.end] == b"\x01":
                return NOBODY  # the transaction goes on; the code that unwinds it asks for this member by its time
        return keys
    if b"commitTransaction" in fields:
        return chains.member(entry.cluster_time, entry.prev_op_time, NOBODY)
    return _of_definition(entry)


def _of_operations(entry: OplogEntry) -> InterestKeys:
    keys: frozenset[bytes] = NOBODY
    for raw in apply_ops(entry):
        operation = parse_operation(raw, entry.position)
        if operation.operation == "n":
            return EVERYONE  # an error for the code that unwinds it
        if operation.operation == "c":
            definition = _of_definition(operation)
            if definition is EVERYONE:
                return EVERYONE
            keys |= definition
        keys |= keys_of(operation.namespace)
        if len(keys) > _KEYS_MAX:
            return EVERYONE
    return keys


def _of_definition(entry: OplogEntry) -> InterestKeys:
    """What a command of DDL is about: its database, and the collections that it names. One of an unknown kind is about
    everyone: the streams count it."""
    body = entry.o
    database = split_namespace(entry.namespace)[0]
    if body is None or len(database) == len(entry.namespace):
        return NOBODY
    fields = first_elements(body)
    if fields and command_name(fields) not in KNOWN_COMMANDS:
        return EVERYONE
    names: list[bytes] = []
    for field in _NAMING:
        element = fields.get(field)
        if element is not None and element.type == STRING:
            names.append(database + b"." + read_string(body, element.value_start))
    for field in _RENAMING:
        element = fields.get(field)
        if element is not None and element.type == STRING:
            names.append(read_string(body, element.value_start))
    return frozenset(name.removesuffix(b"\n") for name in names) | frozenset(names) | _around(database)
