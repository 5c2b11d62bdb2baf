"""Applies batches of the oplog to the image state: the document before each operation, and the one after it."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from typing import Final

from tailrace.core import raw_bson
from tailrace.core.oplog.entry import OplogEntry, parse_entry
from tailrace.core.oplog.entry_kinds import FOLLOWED_COMMANDS, command_name, refusal
from tailrace.core.oplog.namespace import Scope
from tailrace.core.plan.options import StreamOptions
from tailrace.core.plan.profile import ServerProfile
from tailrace.core.plan.request import OplogBatch, PreImageKey
from tailrace.core.stage.oplog_match import CRUD, OplogMatch
from tailrace.core.stage.unwind_transaction import EntriesAt, UnwindTransaction, is_chain_member, operations_of
from tailrace.errors import OplogFormatError
from tailrace.read.images.delta import ImageMismatchError, Modifiers, apply_operation, read_update
from tailrace.read.images.found import Images, wrong_state
from tailrace.read.images.key import is_in_share, state_key
from tailrace.read.images.state import ImageState

_UUID_SIZE: Final = 16
_HINT: Final = "Or remove the images' directory: then they begin with the documents as they are now"
#: The element that marks entries of a migration. The kernel skips such entries, so a batch that has one is left
#: to the plain stages.
_MIGRATED: Final = b"\x08fromMigrate\x00\x01"


class ImageFolder:
    """Keeps a state at the end of what was read of one oplog.

    ``scope``    the state holds the documents of these collections
    ``profile``  the server's, by which it says which entries are transactions
    ``kernel``   whether to use compiled code (``tailrace.read.images.fast``), called with the size of each batch in
    bytes
    ``share``    (k, n): of n workers, each with a state of its own, this is number k and takes its part of the
                 documents
    ``of_shard`` the state holds one shard's documents: a collection that was dropped there may come back

    Entries that are marked as a migration's change the state too, although no event shows them: a shard logs what it
    receives and gives away in this way, and every server what ``convertToCapped`` copies.
    """

    def __init__(
        self,
        state: ImageState,
        scope: Scope,
        profile: ServerProfile,
        *,
        kernel: Callable[[int], bool] = lambda size: False,
        share: tuple[int, int] = (0, 1),
        of_shard: bool = False,
    ) -> None:
        self._state = state
        self._scope = scope
        self._profile = profile
        self._kernel = kernel
        self._share = share
        #: Whether a document may be inserted that the state has: 4.4 logs nothing where a capped collection loses one.
        self._replaces = of_shard or profile.series < (5, 0)
        self._match = OplogMatch(StreamOptions(scope, show_migration_events=True), profile, passes_unknown=True)
        self._unwind = UnwindTransaction(self._match, multi_op_is_no_transaction=profile.multi_op_is_no_transaction)

    def fold(self, batch: OplogBatch, entries_at: EntriesAt, *, again: bool = False) -> Images:
        """Apply a batch to the state, whose position is then the batch's high water. Returns the document before each
        update, replacement and delete, except for those that the state does not know.

        ``again``: the documents may have some of the operations already. A copy of a shard has a prepared transaction
        from its commit timestamp on, and the entry that commits it is later.

        Raises ImageMismatchError if an entry does not fit the document in the state, and UnknownEntryError for one that
        may have changed documents in a way that nobody here knows; the state is then unchanged.
        """
        if self._kernel(len(batch.raw)) and not (again or _MIGRATED in batch.raw):
            from tailrace.read.images import fast  # noqa: PLC0415  compiled code is loaded where it is wanted

            operations = fast.operations_of(batch.raw, self._scope, self._profile, self._share)
            if operations is not None:
                with self._state.batch(int(batch.high_water)) as changes:
                    return fast.fold_into(operations, changes, replaces=self._replaces)
        return self._fold_plain(batch, entries_at, again)

    def _fold_plain(self, batch: OplogBatch, entries_at: EntriesAt, again: bool) -> Images:
        operations = list(self._operations(batch.raw, entries_at))
        for entry in operations:
            if entry.operation not in CRUD and not _is_followed(entry):
                raise refusal(entry, _HINT)
        keys = [_key_of(entry) if entry.operation in CRUD else b"" for entry in operations]
        images: Images = {}
        dropped: list[bytes] = []
        with self._state.batch(int(batch.high_water)) as changes:
            wanted = [key for key in dict.fromkeys(keys) if key and is_in_share(zlib.crc32(key), self._share)]
            documents = dict(zip(wanted, changes.get(wanted), strict=True))
            unborn = {key for entry, key in zip(operations, keys, strict=True) if entry.operation == "i"}
            changes.confirm_missing([key for key, known in documents.items() if known is None and key not in unborn])
            for entry, key in zip(operations, keys, strict=True):
                if not key:
                    dropped += _dropped_by(entry)
                elif key in documents:
                    before = documents[key]
                    if before is not None and entry.operation != "i":
                        images[PreImageKey(key[:_UUID_SIZE], entry.image_time, entry.image_index)] = before
                    comes_back = self._replaces and entry.operation == "i"  # a collection that was dropped here
                    documents[key] = _after(entry, before, again=again or comes_back)
                    if entry.operation == "i" and key[:_UUID_SIZE] in dropped:
                        dropped.remove(key[:_UUID_SIZE])  # a collection that comes back to this shard
            changes.put(documents.items())
        for uuid in dropped:
            self._state.drop(uuid)
        return images

    def _operations(self, raw: bytes, entries_at: EntriesAt) -> Iterator[OplogEntry]:
        """The operations in scope; those of a transaction come at its commit."""
        entries = []
        for document in raw_bson.split(raw):
            entry = parse_entry(document)
            if self._match.matches(entry):
                entries.append(entry)
            elif is_chain_member(entry):
                self._unwind.remember(entry.cluster_time, document)
        yield from operations_of(self._unwind.process(entries), entries_at)


def _is_followed(entry: OplogEntry) -> bool:
    """Whether all is known about what a command or a no-op does to documents."""
    return entry.operation == "n" or (
        entry.operation == "c" and command_name(entry.command_fields()) in FOLLOWED_COMMANDS
    )


def _key_of(entry: OplogEntry) -> bytes:
    named = entry.o2 if entry.operation == "u" else entry.o
    if entry.collection_uuid is None or named is None:
        raise OplogFormatError("an operation names no collection, or no document", position=entry.position)
    return state_key(entry.collection_uuid, named)


def _after(entry: OplogEntry, before: bytes | None, *, again: bool = False) -> bytes | None:
    """The document after an operation; also ``None`` if it was not known and the operation does not hold all of it."""
    change = entry.o or b""
    if before is None and entry.operation == "d":
        return None
    try:
        if before is None and entry.operation == "u":
            update = read_update(change)
            if isinstance(update, Modifiers | raw_bson.Element):
                return None
        return apply_operation(before, entry.operation.encode(), change, again=again)
    except ImageMismatchError as error:
        raise wrong_state(error, entry.position) from error


def _dropped_by(entry: OplogEntry) -> list[bytes]:
    """The UUIDs of the collections that a command dropped."""
    fields = entry.command_fields()
    if b"drop" in fields and entry.collection_uuid is not None:
        return [entry.collection_uuid]
    target = fields.get(b"dropTarget")
    if entry.o is not None and target is not None and target.type == raw_bson.BINARY:
        return [raw_bson.value(entry.o, target)[5:]]
    return []
