"""OplogMatch: which oplog entries a stream can be interested in (semantics 2.2 and 2.3).

An inclusion list: entries of no known kind (``tailrace.core.oplog.entry_kinds``) are skipped and counted, never guessed
at.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from tailrace.core import raw_bson
from tailrace.core.oplog.entry import OplogEntry, apply_ops, first_elements, parse_operation
from tailrace.core.oplog.entry_kinds import (
    FOLLOWED_COMMANDS,
    KNOWN_COMMANDS,
    KNOWN_OPERATIONS,
    PASSED_OVER,
    command_name,
    count_kind,
    kind_of,
    unknown_no_op,
)
from tailrace.core.oplog.namespace import NamespaceFilter
from tailrace.core.oplog.version_proof import version_proof
from tailrace.core.plan.options import StreamOptions
from tailrace.core.plan.profile import ServerProfile
from tailrace.core.raw_bson import ARRAY, BOOL, DOUBLE, INT32, INT64, STRING, Element
from tailrace.errors import LaterEntryError

CRUD: Final = frozenset("iud")
END_OF_TRANSACTION: Final = b"endOfTransaction"
#: Commands whose value is the collection's bare name.
_COLLECTION_COMMANDS: Final = (b"drop", b"create", b"createIndexes", b"commitIndexBuild", b"dropIndexes", b"collMod")
#: No-ops by which a shard announces what happened to a collection.
_SHARDING_NO_OPS: Final = (b"shardCollection", b"refineCollectionShardKey", b"reshardCollection")
_RESHARDING_TYPES: Final = frozenset((b"reshardBegin", b"reshardDoneCatchUp"))
_NEW_SHARD_TYPE: Final = b"migrateChunkToNewShard"
_BLOCKING_WRITES: Final = b"reshardBlockingWrites"


class OplogMatch:
    """Keeps the entries that can become events; the rest never leaves this stage.

    ``may_pass``            further test of an entry, or of an operation out of a transaction: whether its event may
                            pass the user's ``$match``
    ``unknown_operations``  counts the entries of the stream's scope, and the operations of those that hold several,
                            that are of an unknown kind, by kind

    ``passes_unknown``: for code that keeps documents, and refuses what may have changed them. Operations and commands
    that such code does not follow are not counted but pass.
    """

    def __init__(
        self,
        options: StreamOptions,
        profile: ServerProfile,
        may_pass: Callable[[OplogEntry], bool] | None = None,
        *,
        passes_unknown: bool = False,
    ) -> None:
        self.may_pass = may_pass
        self._passes_unknown = passes_unknown
        self._known_commands = FOLLOWED_COMMANDS if passes_unknown else KNOWN_COMMANDS
        self._options = options
        self._profile = profile
        self._names = NamespaceFilter(
            options.scope,
            show_system_events=options.show_system_events,
            resharding=profile.shows_resharding_collections,
        )
        self._index_builds = index_builds_shown(options, profile)
        self._ends_of_transactions = ends_of_transactions_shown(options, profile)
        self._views_match = options.show_expanded_events
        self.unknown_operations: dict[str, int] = {}

    def process(self, entries: list[OplogEntry]) -> list[OplogEntry]:
        return [entry for entry in entries if self.matches(entry)]

    def matches(self, entry: OplogEntry) -> bool:
        """Whether the stream reads this top-level entry."""
        return self._in_scope(entry) and (self.may_pass is None or self.may_pass(entry))

    def _in_scope(self, entry: OplogEntry) -> bool:
        operation = entry.operation
        if entry.from_migrate and not self._shows_migration(entry):
            return False
        if operation in CRUD:
            namespace = entry.namespace
            return self._names.namespace(namespace) or (self._views_match and self._names.views(namespace))
        if operation == "c":
            fields = first_elements(entry.o)
            return self._matches_command(entry, fields) or self._passes(self._unknown_command(entry, fields))
        if operation == "n":
            return self._matches_no_op(entry) or self._passes(self._unknown_no_op(entry))
        return self._passes(self._unknown_operation(entry))

    # -- unknown kinds ------------------------------------------------------------------------------------------------

    def _passes(self, unknown: str | None) -> bool:
        """What becomes of an entry that gives no event, and is of the kind ``unknown``, if that is given."""
        if unknown is None or self._passes_unknown:
            return unknown is not None
        for counted in (self.unknown_operations, PASSED_OVER):
            count_kind(counted, unknown)
        return False

    def _unknown_operation(self, entry: OplogEntry) -> str | None:
        if entry.operation in KNOWN_OPERATIONS or not self._names.namespace(entry.namespace):
            return None
        return kind_of(entry)

    def _unknown_command(self, entry: OplogEntry, fields: dict[bytes, Element]) -> str | None:
        """Of a command that names a collection out of scope nothing is said; any other may be about the stream's."""
        name = command_name(fields)
        if name is None or name in self._known_commands or not self._names.command(entry.namespace):
            return None
        body, value = entry.o or raw_bson.EMPTY_DOCUMENT, fields[name]
        is_named = self._names_collection(body, value) or self._names_namespace(body, value)
        return kind_of(entry) if is_named or value.type != STRING else None

    def _unknown_no_op(self, entry: OplogEntry) -> str | None:
        if self._passes_unknown or entry.o2 is None or not self._names.namespace(entry.namespace):
            return None
        return unknown_no_op(entry, first_elements(entry.o2), self._profile.version)

    # -----------------------------------------------------------------------------------------------------------------

    def matches_inner(self, operation: OplogEntry) -> bool:
        """Whether an operation inside a transaction is in scope: CRUD and commands, without the views branch. What
        ``may_pass`` says about it must wait until it has the fields that it takes from its commit."""
        if operation.from_migrate and not self._shows_migration(operation):
            return False
        if operation.operation in CRUD:
            return self._names.namespace(operation.namespace)
        if operation.operation == "c":
            fields = first_elements(operation.o)
            return self._matches_ddl(operation, fields) or self._passes(self._unknown_command(operation, fields))
        return self._passes(self._unknown_operation(operation))

    def _shows_migration(self, entry: OplogEntry) -> bool:
        if self._options.show_migration_events:
            return True
        if not self._options.show_system_events or entry.operation != "c" or entry.o is None:
            return False
        fields = first_elements(entry.o)
        return self._names.command(entry.namespace) and any(
            self._names_collection(entry.o, fields.get(name)) for name in (b"create", b"createIndexes")
        )

    def _matches_command(self, entry: OplogEntry, fields: dict[bytes, Element]) -> bool:
        if b"applyOps" in fields:
            return self._matches_apply_ops(entry, fields)
        commit = fields.get(b"commitTransaction")
        if commit is not None and entry.o is not None:
            return _equals_one(entry.o, commit)
        return self._matches_ddl(entry, fields)

    def _matches_ddl(self, entry: OplogEntry, fields: dict[bytes, Element]) -> bool:
        body = entry.o
        if body is None or not self._names.command(entry.namespace):
            return False
        for name in _COLLECTION_COMMANDS:
            if self._names_collection(body, fields.get(name)):
                return True
        if any(self._names_collection(body, fields.get(name)) for name in self._index_builds):
            return True
        source = fields.get(b"renameCollection")
        if source is not None and (
            self._names_namespace(body, source) or self._names_namespace(body, fields.get(b"to"))
        ):
            return True
        return b"dropDatabase" in fields and self._options.scope.kind != "collection"

    def _matches_apply_ops(self, entry: OplogEntry, fields: dict[bytes, Element]) -> bool:
        """The entry that commits a transaction with its last operations, and nothing else: not the earlier members of
        a chain, not a prepare entry, and not (before 8.x) an applyOps without a session."""
        body = entry.o
        if body is None or fields[b"applyOps"].type != ARRAY:
            return False
        if _is_true(body, fields.get(b"prepare")) or _is_true(body, fields.get(b"partialTxn")):
            return False
        self._refuse_later_version(entry, fields)
        if entry.lsid is None or entry.txn_number is None:
            return self._profile.unwinds_apply_ops_without_session and self._any_inner_matches(entry, counts=True)
        return entry.prev_op_time is not None or self._any_inner_matches(entry, counts=True)

    def _refuse_later_version(self, entry: OplogEntry, fields: dict[bytes, Element]) -> None:
        """Raises LaterEntryError where the stream would lose what an entry of a later version holds for it, or give it
        another form, as a server of the profile's version does when it reads such an entry."""
        profile = self._profile
        is_known = profile.multi_op_is_no_transaction if entry.multi_op else profile.unwinds_apply_ops_without_session
        proof = None if is_known else version_proof(entry, fields)
        if proof is not None and self._any_inner_matches(entry):
            raise LaterEntryError(
                f"{proof.found}, as only MongoDB {proof.version} and later write it, but the events are to be those of "
                f"{profile.name}",
                hint="Resume the stream: it then makes the events of the version that it reads. Where a version was "
                f"named (server_version, --server-version), name {proof.version} or the deployment's own",
            )

    def _any_inner_matches(self, entry: OplogEntry, *, counts: bool = False) -> bool:
        """Whether the whole entry is of interest: an operation in scope, or an in-scope create or createIndexes.

        Narrower than the test of each operation: an in-scope drop alone does not make the server read the entry. If it
        is not read, and ``counts``, commands of an unknown kind in it are counted here.
        """
        unknown: list[str] = []
        for raw in apply_ops(entry):
            operation = parse_operation(raw, entry.position)
            if self._names.namespace(operation.namespace):
                return True
            if operation.o is not None and self._names.command(operation.namespace):
                fields = first_elements(operation.o)
                if any(self._names_collection(operation.o, fields.get(name)) for name in (b"create", b"createIndexes")):
                    return True
                if operation.operation == "c" and (kind := self._unknown_command(operation, fields)) is not None:
                    unknown.append(kind)
        passes = False
        for kind in unknown if counts else ():
            passes |= self._passes(kind)
        return passes

    def _matches_no_op(self, entry: OplogEntry) -> bool:
        if entry.o2 is None:
            return False
        fields = first_elements(entry.o2)
        if self._ends_of_transactions and self._ends_a_transaction(entry.o2, fields.get(END_OF_TRANSACTION)):
            return True
        if not self._names.namespace(entry.namespace):
            return False
        if any(name in fields for name in _SHARDING_NO_OPS):
            return True
        if self._options.show_system_events:
            if b"migrateLastChunkFromShard" in fields:
                return True
            if self._profile.shows_blocking_writes and _BLOCKING_WRITES in fields:
                return True
        if self._profile.describes_no_ops:
            if any(name in fields for name in _RESHARDING_TYPES):
                return True
            if self._options.needs_merge and _NEW_SHARD_TYPE in fields:
                return True
        kind = fields.get(b"type") if self._profile.reads_typed_no_ops else None
        if kind is None or kind.type != STRING:
            return False
        name = raw_bson.read_string(entry.o2, kind.value_start)
        if name == _NEW_SHARD_TYPE:
            return self._options.needs_merge or self._profile.always_shows_new_shards
        return name in _RESHARDING_TYPES

    def _ends_a_transaction(self, body: bytes, element: Element | None) -> bool:
        """Whether a namespace of the scope is among those that a transaction has written to."""
        if element is None or element.type != ARRAY:
            return self._names_namespace(body, element)
        namespaces = raw_bson.value(body, element)
        return any(self._names_namespace(namespaces, one) for one in raw_bson.elements(namespaces))

    def _names_collection(self, body: bytes, element: Element | None) -> bool:
        return (
            element is not None
            and element.type == STRING
            and self._names.collection(raw_bson.read_string(body, element.value_start))
        )

    def _names_namespace(self, body: bytes, element: Element | None) -> bool:
        return (
            element is not None
            and element.type == STRING
            and self._names.namespace(raw_bson.read_string(body, element.value_start))
        )


def index_builds_shown(options: StreamOptions, profile: ServerProfile) -> tuple[bytes, ...]:
    """The commands of an index build under way that a stream reads."""
    shown = {b"startIndexBuild": profile.shows_index_builds, b"abortIndexBuild": profile.shows_aborted_index_builds}
    return tuple(name for name, is_shown in shown.items() if is_shown and options.show_system_events)


def ends_of_transactions_shown(options: StreamOptions, profile: ServerProfile) -> bool:
    """Whether a stream reads the no-ops that say where a transaction ends."""
    return profile.shows_ends_of_transactions and options.show_expanded_events


def _is_true(body: bytes, element: Element | None) -> bool:
    return element is not None and element.type == BOOL and body[element.value_start] == 1


def _equals_one(body: bytes, element: Element) -> bool:
    value = raw_bson.value(body, element)
    if element.type in (INT32, INT64):
        return int.from_bytes(value, "little", signed=True) == 1
    return element.type == DOUBLE and value == b"\x00\x00\x00\x00\x00\x00\xf0\x3f"
