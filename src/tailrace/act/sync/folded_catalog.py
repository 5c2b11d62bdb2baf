"""The collections of a sync while entries are read: which there are, under which names, and what a command changes.

Collections are known by UUID. Each shard of a cluster reports a definition for itself, in any order, so each rule here
holds when it is reported again; what one of them has dropped may still be changed on another.

The copy begins with all collections of one time, and none was in the making then (``at_rest``). So whatever entries
name is on the target, was created or dropped by an entry, or came from outside the selection.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final

from tailrace.act.sync.settings import SyncSettings
from tailrace.act.sync.state import SyncedCollection
from tailrace.core import raw_bson
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.oplog.entry import OplogEntry
from tailrace.core.oplog.entry_kinds import FOLLOWED_COMMANDS, command_name, refusal
from tailrace.core.printable import in_a_line
from tailrace.errors import SourceError, UsageError
from tailrace.read.source.listing import is_utf8

#: The server's own collections that turn into a user's, or are a part of one.
_PARTS: Final = re.compile(
    r"[^.]+\.(?:tmp\.(?:agg_out|mr)\.|tmp[0-9A-Za-z]{5}\.(?:convertToCapped|renameCollection|create)"
    r"|system\.(?:resharding\.|views$))"
)
_BUCKETS: Final = ".system.buckets."
_RESHARDING: Final = ".system.resharding."
#: What resharding calls the collection that it fills: after the UUID of the one that is resharded.
_RESHARDED: Final = re.compile(r"[^.]+\.system\.resharding\.[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
VIEWS: Final = b".system.views"
CHANGES: Final = frozenset("iud")
#: Builds that have begun or were given up change nothing yet; of a database, its collections are dropped one by one.
_NOTHING: Final = frozenset((b"startIndexBuild", b"abortIndexBuild", b"dropDatabase", b"dbCheck", b"abortTransaction"))
_SHARDING: Final = frozenset(
    (
        b"modifyCollectionShardingIndexCatalog",
        b"createGlobalIndex",
        b"dropGlobalIndex",
        b"createDatabaseMetadata",
        b"dropDatabaseMetadata",
    )
)
_HINT: Final = "Or leave the collection out of the sync"
_BOTH_NAMES: Final = "Begin the sync again with a selection that holds both names"
_BEGIN_AGAIN: Final = "Begin the sync again when no collection is being made into another one"


@dataclass(frozen=True, slots=True)
class Definition:
    """A change of the catalogue. ``name``: what the entry's command is called, or ``b"view"``.

    ``before``   the collection as it was; ``None`` if the sync did not have it
    ``after``    as it is; ``None`` if the sync has it no longer
    ``gone``     another collection that the command drops
    """

    time: ClusterTime
    name: bytes
    uuid: bytes
    entry: OplogEntry
    before: SyncedCollection | None
    after: SyncedCollection | None
    gone: tuple[SyncedCollection, ...] = ()


class FoldedCatalog:
    """``collections``: those on the target, by UUID on the source, as of the entries that were read.

    ``gone``  of a cluster, the UUIDs of those that one shard has dropped, which others may still change; new ones are
              added. ``None``: a replica set, which changes nothing after its drop, and may make it again with that UUID
    """

    def __init__(
        self, settings: SyncSettings, collections: Mapping[bytes, SyncedCollection], gone: set[bytes] | None = None
    ) -> None:
        self._settings = settings
        self.collections = dict(collections)
        self._chosen: dict[bytes, bool] = {}
        self._gone = gone

    def check_missing(self, uuid: bytes, namespace: bytes, time: int) -> None:
        """A change of a collection that is not on the target: it was dropped, so that its changes do not matter.
        Raises SourceError otherwise."""
        if self._is_gone(uuid):
            return
        name = _text(namespace)
        raise SourceError(
            f"{in_a_line(name)} was changed at {ClusterTime(time)}, but its creation was not seen",
            hint=_BEGIN_AGAIN if is_in_the_making(name) else f"It came from outside the selection. {_BOTH_NAMES}",
        )

    def wants(self, namespace: bytes) -> bool:
        answer = self._chosen.get(namespace)
        if answer is None:
            answer = self._chosen[namespace] = self.has(_text(namespace))
        return answer

    def has(self, namespace: str) -> bool:
        """Whether a collection is followed: one that is selected, or that may become one. The copy leaves out what has
        a name that no driver can read, so that is left out here too."""
        if not is_utf8(namespace):
            return False
        database, _, name = namespace.partition(".")
        if _BUCKETS in namespace:
            return self._settings.has(f"{database}.{name.removeprefix(_BUCKETS[1:])}")
        if _RESHARDING in namespace and (self._gone is None or _RESHARDED.fullmatch(namespace) is None):
            return False  # made by hand: no resharding gives it another name, or drops it
        if _PARTS.match(namespace) is not None:
            return self._settings.selection.may_cover(database)
        return self._settings.has(namespace)

    def definitions(self, member: str, entry: OplogEntry) -> Iterator[Definition]:
        """What a command did to the catalogue, as far as it concerns the sync. ``collections`` is another mapping
        afterwards: callers that hold the earlier one go on with it."""
        self.collections = dict(self.collections)
        uuid = entry.collection_uuid
        if entry.operation in CHANGES:
            if self.wants(entry.namespace) and uuid is not None and not entry.from_migrate:
                yield Definition(entry.cluster_time, b"view", uuid, entry, None, None)
            return
        name = command_name(entry.command_fields()) if entry.operation == "c" else None
        if name is None or name not in FOLLOWED_COMMANDS:
            self._refuse_unknown(entry)
            return
        if name in _NOTHING or name in _SHARDING or uuid is None:
            return
        if name in (b"create", b"drop") and _named(entry, name) == "system.views":
            # Views are reported one by one, except for those that go with their database.
            if name == b"drop" and self.wants(entry.namespace.partition(b".")[0] + VIEWS):
                yield Definition(entry.cluster_time, b"views", uuid, entry, None, None)
        elif name == b"create":
            yield from self._create(member, entry, uuid)
        elif name == b"drop":
            if not entry.from_migrate:
                yield from self._drop(entry, uuid, name)
        elif name == b"renameCollection":
            yield from self._rename(entry, uuid)
        elif (found := self.collections.get(uuid)) is not None:
            yield Definition(entry.cluster_time, name, uuid, entry, found, found)

    def _refuse_unknown(self, entry: OplogEntry) -> None:
        """Raise UnknownEntryError for what may have changed something that is synced in a way that nobody knows."""
        known = entry.collection_uuid in self.collections or self.wants(entry.namespace)
        if entry.operation == "c" and entry.o is not None:
            fields = entry.command_fields()
            name, database = command_name(fields), entry.namespace.partition(b".")[0]
            value = None if name is None else fields[name]
            if value is not None and value.type == raw_bson.STRING:
                text = raw_bson.read_string(entry.o, value.value_start)
                known = known or self.wants(text) or self.wants(database + b"." + text)
            else:
                known = known or self._settings.selection.may_cover(_text(database))
        if known:
            raise refusal(entry, _HINT)

    def _create(self, member: str, entry: OplogEntry, uuid: bytes) -> Iterator[Definition]:
        name = f"{_text(entry.namespace.partition(b'.')[0])}.{_named(entry, b'create')}"
        collection = self.collections.get(uuid)
        if collection is not None:
            if collection.filled not in {"", member}:
                after = self.collections[uuid] = replace(collection, filled="")
                yield Definition(entry.cluster_time, b"spread", uuid, entry, collection, after)
            return
        if not self.has(name) or self._is_gone(uuid):
            return
        capped = entry.command_fields().get(b"capped")
        is_capped = capped is not None and entry.o is not None and entry.o[capped.value_start] == 1
        made = SyncedCollection(uuid, name, self._target_of(name), uuid, filled=member, capped=is_capped)
        if self._named(name) is not None or _RESHARDING in name:
            made = replace(self._beside(made), pending=_RESHARDING not in name)
        self.collections[uuid] = made
        yield Definition(entry.cluster_time, b"create", uuid, entry, None, made)

    def _beside(self, made: SyncedCollection) -> SyncedCollection:
        """A collection whose name another one has still, or that no transaction may write to: it gets another name on
        the target until then."""
        database = made.target.partition(".")[0]
        return replace(made, target=f"{database}.tailrace.pending.{made.uuid.hex()}", pending=True)

    def _named(self, namespace: str) -> SyncedCollection | None:
        """The collection that has a name now."""
        return next((one for one in self.collections.values() if one.namespace == namespace and not one.pending), None)

    def _drop(self, entry: OplogEntry, uuid: bytes, name: bytes) -> Iterator[Definition]:
        found = self._lose(uuid)
        if found is None:
            return
        yield Definition(entry.cluster_time, name, uuid, entry, found, None)
        if not found.pending:
            yield from self._arrive(entry, found.namespace)

    def _lose(self, uuid: bytes) -> SyncedCollection | None:
        """A collection is dropped, or leaves the selection."""
        if self._gone is not None:
            self._gone.add(uuid)
        return self.collections.pop(uuid, None)

    def _is_gone(self, uuid: bytes) -> bool:
        return self._gone is not None and uuid in self._gone

    def _arrive(self, entry: OplogEntry, namespace: str) -> Iterator[Definition]:
        """A collection that was waiting for its name has it now."""
        for uuid, one in list(self.collections.items()):
            if one.pending and one.namespace == namespace:
                after = replace(one, pending=False, target=self._target_of(namespace))
                self.collections[uuid] = after
                yield Definition(entry.cluster_time, b"arrive", uuid, entry, one, after)
                return

    def _rename(self, entry: OplogEntry, uuid: bytes) -> Iterator[Definition]:
        body = entry.o
        assert body is not None
        fields = entry.command_fields()
        dropped = fields.get(b"dropTarget")
        is_dropped = dropped is not None and dropped.type == raw_bson.BINARY
        lost = self._lose(raw_bson.value(body, dropped)[5:21]) if dropped is not None and is_dropped else None
        gone = () if lost is None else (lost,)
        name = _named(entry, b"to")
        collection = self.collections.get(uuid)
        after = None
        if collection is not None and self.has(name):
            pending = self._named(name)
            after = replace(collection, namespace=name, target=self._target_of(name), pending=False)
            if pending is not None and pending.uuid != uuid:
                after = self._beside(after)
            self.collections[uuid] = after
        elif collection is not None:
            self._lose(uuid)
        elif self.has(name):
            self._refuse_stranger(entry, name)
        if collection is not None or gone:
            yield Definition(entry.cluster_time, b"renameCollection", uuid, entry, collection, after, gone)
        if collection is not None and not collection.pending:
            yield from self._arrive(entry, collection.namespace)

    def _refuse_stranger(self, entry: OplogEntry, name: str) -> None:
        """A collection that the sync does not have gets a name that is synced: one from outside, whether it was in the
        sync before or not."""
        before = _named(entry, b"renameCollection")
        raise UsageError(
            f"{in_a_line(before)}, which is not synced, was renamed to {in_a_line(name)}, which is, at "
            f"{entry.cluster_time}: what it held before is not on the target",
            hint=_BEGIN_AGAIN if is_in_the_making(before) else _BOTH_NAMES,
        )

    def _target_of(self, namespace: str) -> str:
        return target_of(self._settings, namespace)


def is_in_the_making(namespace: str) -> bool:
    """Whether a collection of the server's own turns into another one when it is filled."""
    return _PARTS.match(namespace) is not None and not namespace.endswith(VIEWS.decode())


def target_of(settings: SyncSettings, namespace: str) -> str:
    """What a collection is called on the target; the buckets of a time series are named after it."""
    if _BUCKETS not in namespace:
        return settings.target_of(namespace)
    database, _, name = settings.target_of(namespace.replace(_BUCKETS, ".", 1)).partition(".")
    return f"{database}{_BUCKETS}{name}"


def _named(entry: OplogEntry, field_name: bytes) -> str:
    assert entry.o is not None
    return _text(raw_bson.read_string(entry.o, entry.command_fields()[field_name].value_start))


def _text(name: bytes) -> str:
    """A name of the server's, with surrogates for what is not UTF-8."""
    return name.decode("utf-8", "surrogateescape")
