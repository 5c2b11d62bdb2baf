"""The kinds of oplog entry that are known: entries of other kinds are counted and reported, and never guessed at.

Taken from the oplogs of 4.4.2, 5.0.4, 6.0.27 and 7.0.28, sharded ones among them, and from what the server publishes
about later versions. A kind is named after what distinguishes it from others: the letter of ``op``; ``command NAME``
after the first field of a command's ``o``; ``no-op NAME`` after the first field of a no-op's ``o2``, or after its
``type``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Final

from tailrace.core import raw_bson
from tailrace.core.oplog.entry import OplogEntry
from tailrace.core.printable import in_a_line
from tailrace.core.raw_bson import STRING, Element
from tailrace.errors import UnknownEntryError

KNOWN_OPERATIONS: Final = frozenset("iudcn")
#: Commands that change no document, and no collection's name.
NEUTRAL_COMMANDS: Final = frozenset(
    (
        b"createIndexes",
        b"startIndexBuild",
        b"commitIndexBuild",
        b"abortIndexBuild",
        b"dropIndexes",
        b"deleteIndexes",
        b"dropIndex",
        b"deleteIndex",
        b"collMod",
        b"dbCheck",
        b"abortTransaction",
        # From here on of later versions: where chunks and indexes of several shards are noted.
        b"modifyCollectionShardingIndexCatalog",
        b"createGlobalIndex",
        b"dropGlobalIndex",
        b"createDatabaseMetadata",
        b"dropDatabaseMetadata",
    )
)
#: All that is known about what commands do to documents and collections: code that keeps documents follows these.
FOLLOWED_COMMANDS: Final = NEUTRAL_COMMANDS | {
    b"create",
    b"drop",
    b"renameCollection",
    b"dropDatabase",
    b"applyOps",
    b"commitTransaction",
}
#: ``emptycapped`` deletes documents, of which no server's stream shows anything.
KNOWN_COMMANDS: Final = FOLLOWED_COMMANDS | {b"emptycapped"}
_ALWAYS: Final = (0, 0)
#: In ``o2`` this field comes after ``shards``, not first.
_PREPARED: Final = b"shardCollectionPrepare"
#: No-ops of the sharding code by the first field of ``o2``, and the version from which on servers write them. Some
#: streams show some of them; the last ones are for routers alone.
_NO_OPS_SINCE: Final[dict[bytes, tuple[int, int]]] = {
    b"shardCollection": _ALWAYS,
    b"refineCollectionShardKey": _ALWAYS,
    b"reshardCollection": _ALWAYS,
    b"migrateLastChunkFromShard": _ALWAYS,
    b"sessionMigrateCloneStart": _ALWAYS,
    b"$incompleteOplogHistory": _ALWAYS,
    b"migrateChunkToNewShard": (7, 0),
    b"reshardBegin": (7, 0),
    b"reshardDoneCatchUp": (7, 0),
    b"reshardFinalOp": (7, 0),
    b"createDatabasePrepare": (7, 0),
    b"createDatabase": (7, 0),
    _PREPARED: (7, 0),
    b"movePrimary": (7, 0),
    b"reshardBlockingWrites": (8, 0),
    b"endOfTransaction": (8, 0),
    b"moveChunk": (8, 0),
    b"namespacePlacementChanged": (8, 0),
}
#: The same by the field ``type``, in any place.
_TYPES_SINCE: Final[dict[bytes, tuple[int, int]]] = {
    b"migrateChunkToNewShard": _ALWAYS,
    b"reshardBegin": _ALWAYS,
    b"reshardDoneCatchUp": _ALWAYS,
    b"reshardFinalOp": _ALWAYS,
    b"reshardBlockingWrites": (8, 0),
}
_NEVER: Final = (1 << 30, 0)
#: What ``OplogMatch`` has counted in this process, by kind: for metrics, and for the log.
PASSED_OVER: Final[Counter[str]] = Counter()
#: How many unknown kinds are told apart; what comes after is counted together.
_KINDS_MAX: Final = 100
OTHER_KINDS: Final = "others"
#: A name of a kind is cut off after this many bytes.
_NAME_BYTES_MAX: Final = 40


def count_kind(counted: dict[str, int], kind: str, more: int = 1) -> None:
    """Count entries of a kind, in bounded memory."""
    if kind not in counted and len(counted) >= _KINDS_MAX:
        kind = OTHER_KINDS
    counted[kind] = counted.get(kind, 0) + more


def command_name(fields: Mapping[bytes, Element]) -> bytes | None:
    """What the command with these fields is called."""
    return next(iter(fields), None)


def kind_of(entry: OplogEntry) -> str:
    """The kind of an operation or a command, for people."""
    name = command_name(entry.command_fields()) if entry.operation == "c" else None
    return in_a_line(entry.operation[:_NAME_BYTES_MAX]) if name is None else f"command {_shown(name)}"


def refusal(entry: OplogEntry, hint: str) -> UnknownEntryError:
    """The error of a store that cannot follow ``entry``. ``hint``: what to do besides waiting for a later version."""
    namespace = in_a_line(entry.namespace.decode("utf-8", "replace"))
    return UnknownEntryError(
        f"{entry.position} ({namespace}) is of the kind '{kind_of(entry)}', which this version of Tailrace cannot "
        "follow: it may have changed documents",
        hint=f"Update Tailrace. {hint}",
    )


def unknown_no_op(entry: OplogEntry, fields: Mapping[bytes, Element], version: tuple[int, ...]) -> str | None:
    """The kind of a no-op whose ``o2`` has these fields, if servers of ``version`` are not known to write it."""
    name = _PREPARED if _PREPARED in fields else next(iter(fields), None)
    if name is None or _NO_OPS_SINCE.get(name, _NEVER) <= version:
        return None
    if b"op" in fields and b"ns" in fields:
        return None  # a whole entry, which the session of a retryable write brings to another shard
    kind = fields.get(b"type")
    if kind is not None and kind.type == STRING and entry.o2 is not None:
        name = raw_bson.read_string(entry.o2, kind.value_start)
        if _TYPES_SINCE.get(name, _NEVER) <= version:
            return None
    return f"no-op {_shown(name)}"


def _shown(name: bytes) -> str:
    return in_a_line(name[:_NAME_BYTES_MAX].decode("utf-8", "replace"))
