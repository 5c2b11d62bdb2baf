"""One collection's Delta table: read, written whole, or changed by rows.

A micro-batch rewrites only the files that hold rows of its documents: keys are compared, the rows that stay are copied
as columns, and the new rows are added. This is a MERGE without its join, since it is known which documents a batch
changes and what each of them holds afterwards.
"""

from __future__ import annotations

import contextlib
import json
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, Protocol

import pyarrow as pa
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError, TableNotFoundError

from tailrace.base.object_place import StoreAwayError, reason
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.errors import SinkError
from tailrace.lake.store import delta, places
from tailrace.lake.store.place import TablePlace
from tailrace.lake.store.published_checkpoint import publish_checkpoint
from tailrace.lake.tables import delta_commit, log_chain, merging, table_properties, versions
from tailrace.lake.tables.change_feed import ChangeFeed, begins_feed, new_feed
from tailrace.lake.tables.compaction import Layout
from tailrace.lake.tables.data_files import bounded, new_files
from tailrace.lake.tables.deletion_vector import RowNumbers, vector_of
from tailrace.lake.tables.delta_commit import Actions, Batch, NewFile, TableFile
from tailrace.lake.tables.live_files import LiveFiles
from tailrace.lake.tables.merge_on_read import has_vectors, next_protocol
from tailrace.lake.tables.pace import Cost
from tailrace.lake.tables.row_search import RowSearch, WantedKeys
from tailrace.lake.tables.rows import arrow_schema
from tailrace.lake.tables.schema import Column, TableSchema
from tailrace.lake.tables.table_properties import TableProperties
from tailrace.lake.tables.versions import Keeping

#: A checkpoint of the log is written every this many versions.
CHECKPOINT_EVERY: Final = 50
CHECKPOINT_EVERY_MERGED: Final = 10
#: Where the next checkpoint is made. Readers and Delta's VACUUM pass over names that begin so.
BESIDE: Final = "_checkpoint"


class HasColumns(Protocol):
    """An object with the typed columns as they are now, and the fields that have none."""

    @property
    def columns(self) -> Sequence[Column]: ...

    @property
    def cut(self) -> Sequence[str]: ...


class CollectionTable:
    """The table at ``root``. It has one writer; the caller holds the lock.

    ``partition_by``  names of typed columns: a file holds the rows of one value of them
    ``bounds``        names of typed columns whose minimum and maximum are kept for each file
    ``declared``      the declaration of the columns (``TableSchema.declaration``), which the table keeps
    ``policy``        what becomes of values that do not fit (``TableSchema.policy``), which the table keeps
    ``deployment``    whose collection it is, which the table keeps
    ``feed``          whether it has a change feed; ``None``: as it has now
    ``merges``        whether it is merged on read; ``None``: as it is now
    """

    def __init__(
        self,
        root: TablePlace,
        namespace: str,
        *,
        partition_by: Sequence[str] = (),
        bounds: Sequence[str] = (),
        declared: str | None = None,
        policy: str | None = None,
        deployment: str = "",
        feed: bool | None = None,
        merges: bool | None = None,
    ) -> None:
        self.root = root
        self.namespace = namespace
        self._divide_by = tuple(partition_by)
        self._bounds = tuple(dict.fromkeys((*partition_by, *bounds)))
        self._declared = declared
        self._policy = policy
        self._deployment = deployment
        self._feed = feed
        self._merges = merges
        #: What commits of this object have written.
        self.cost = Cost()
        self._live: int | None = None
        self._app = _app_of(namespace)
        self._search = RowSearch(root)
        self._files = LiveFiles(root)
        self._seen = -1
        #: The version that our last commit made, and the digest of its file, once there is one.
        self.committed: tuple[int, str] | None = None
        #: The digests of the log's checkpoints that are known.
        self.checkpoints: dict[int, str] = {}
        #: What was found to be wrong with the log while it was written to, and with a data file while it was merged.
        self.harm: str | None = None
        self.damage: str | None = None
        self._delta = _opened(root)
        if declared is None and self._delta is not None:  # a process that only maintains the table knows no rule
            self._divide_by = tuple(json.loads(self._setting(table_properties.DIVIDED) or "[]"))
            stats = self._setting(table_properties.STATS) or ""
            self._bounds = tuple(filter(None, stats.split(",")))

    # -- what is there ----------------------------------------------------------------------------------------------

    @property
    def exists(self) -> bool:
        """Whether the table has been created."""
        return self._delta is not None

    @property
    def version(self) -> int:
        """The newest version; -1 if there is none."""
        return -1 if self._delta is None else self._delta.version()

    @property
    def batch(self) -> int:
        """The last micro-batch that it has taken over; -1 if there is none."""
        return -1 if self._delta is None else _batch_of(self._delta, self.root, self.namespace)

    @property
    def id(self) -> str:
        """The table's id, which it was given when it was made; ``""`` if there is none."""
        return "" if self._delta is None else str(self._delta.metadata().id)

    @property
    def made_for(self) -> str | None:
        """The namespace that it was made for; ``None`` if it does not say."""
        return self._setting(table_properties.NAMESPACE)

    @property
    def deployment(self) -> str:
        """The deployment that it was made for; ``""`` if it does not say."""
        return self._setting(table_properties.DEPLOYMENT) or ""

    def _setting(self, name: str) -> str | None:
        """What the table keeps under ``name``."""
        return None if self._delta is None else self._delta.metadata().configuration.get(name)

    def lacks(self) -> str | None:
        """A data file of the newest version that is not there, or is cut short; ``None`` if all are there."""
        files = list(self.files())
        there = places.sizes(self.root, [file.name for file in files])
        return next((file.path for file in files if there.get(file.name) != file.size), None)

    @property
    def stated(self) -> ClusterTime | None:
        """The time at which its newest version equals the collection; ``None`` if it has no version of ours."""
        newest = delta_commit.newest(self.root) if self.exists else None
        return None if newest is None else newest.time

    def schema(self, given: TableSchema) -> TableSchema:
        """The columns of the table under the rules of ``given``; if the table was made from another declaration, the
        columns of ``given``."""
        if self._delta is None or self.redeclared:
            return given
        cut = json.loads(self._setting(table_properties.CUT) or "[]")
        return given.with_columns(delta_commit.columns_of(self.fields), cut)

    @property
    def fields(self) -> list[dict[str, Any]]:
        """The columns as the table's metadata describes them."""
        return [] if self._delta is None else list(json.loads(self._delta.schema().to_json())["fields"])

    @property
    def redeclared(self) -> bool:
        """Whether the table was made from another declaration, divided by other columns than are given now, or by a
        policy that has left out what it has to hold now: documents in quarantine, or fields that came later."""
        if self._delta is None or self._declared is None:
            return False
        if has_vectors(self._delta) and not self.merges:
            return True  # every reader is to read it again
        divided = json.loads(self._setting(table_properties.DIVIDED) or "[]")
        if tuple(divided) != self._divide_by:
            return True
        if self._setting(table_properties.DECLARED) not in {None, self._declared}:
            return True
        return _has_left_out(self._setting(table_properties.POLICY), self._policy)

    def refresh(self, state: str = "", known: int = -1) -> None:
        """Read new versions of the log. Raises SinkError if another program has changed rows, or another process of
        ours, whose rows come from another state than ``state``. Versions up to ``known`` were read before."""
        if self._delta is None:
            return
        before = max(self._seen, known) if max(self._seen, known) >= 0 else delta_commit.newest_version(self.root)
        _update(self._delta, self.root)
        _check_versions(self.root, range(before + 1, self._delta.version() + 1), state)
        self._seen = self._delta.version()

    def look(self) -> None:
        """Load the newest version, whichever process wrote it. For use before the whole table is rewritten."""
        if self._delta is not None:
            _update(self._delta, self.root)

    def rows(self) -> int:
        """How many rows the newest version has."""
        if self.merges:
            return sum((file.rows or 0) - file.gone for file in self.files())
        with places.asking(self.root):
            return 0 if self._delta is None else int(self._delta.count())

    def files(self) -> Iterator[TableFile]:
        """The data files of the newest version."""
        if self._delta is None:
            return
        if self.merges or has_vectors(self._delta):
            yield from self._files.at(self.version)
            return
        with places.asking(self.root):
            actions = pa.table(self._delta.get_add_actions())
        wanted = [name for name in ("path", "size_bytes", "num_records") if name in actions.column_names]
        for one in actions.select(wanted).to_pylist():
            yield TableFile(one["path"], one["size_bytes"], one.get("num_records"))

    @property
    def live_bytes(self) -> int:
        """The bytes of the newest version's files."""
        if self._live is None:
            self._live = sum(file.size for file in self.files())
        return self._live

    # -- changing it ------------------------------------------------------------------------------------------------

    def write_whole(self, batch: Batch, schema: HasColumns, pieces: Iterable[pa.RecordBatch], kind: str) -> None:
        """Rewrite all rows. ``schema`` is read after the last row was made."""
        with new_files(self.root, self._divide_by, self._bounds) as writers:
            for piece in pieces:
                writers.write(pa.Table.from_batches([piece]))
            added = writers.finish()
        if self.has_feed:
            merging.purge_all(self)  # readers make this commit's feed of the files that it removes
        self._commit(batch, schema, Actions(kind, added, list(self.files())))

    def change(self, batch: Batch, schema: HasColumns, keys: Sequence[bytes], rows: Iterable[pa.RecordBatch]) -> None:
        """Remove the rows with these keys, and add ``rows``. ``schema`` is read after the last row was made."""
        actions = Actions("changes")
        with (
            new_files(self.root, self._divide_by, self._bounds) as writers,
            new_feed(self.root, wanted=self.has_feed) as feed,
        ):
            if keys:
                wanted = WantedKeys.of(keys)
                for file in self.files():
                    if self.merges and file.rows is not None:
                        gone = self._search.numbered(file, wanted, read=self.has_feed)
                        _mark(file, gone, feed, actions)
                    elif (divided := self._search.divided(file, wanted)) is not None:
                        actions.removed.append(file)
                        writers.write(divided[0])
                        feed.before(divided[1])
            for made in (pa.Table.from_batches([piece]) for piece in rows):
                writers.write(made)
                feed.after(made)
            actions.added, actions.fed = writers.finish(), feed.finish()
        self._commit(batch, schema, actions)

    def _commit(self, batch: Batch, schema: HasColumns, actions: Actions) -> None:
        fields = delta_commit.delta_fields(schema.columns)
        configuration = self._configuration(schema)
        known = None if self._delta is None else (self.fields, dict(self._delta.metadata().configuration))
        if self._delta is None or self.redeclared or known != (fields, configuration):
            table_id = str(uuid.uuid4()) if self._delta is None else str(self._delta.metadata().id)
            actions.metadata = delta_commit.metadata_action(table_id, fields, configuration)
            if self._delta is None:
                actions.kind = "create"
            actions.feeds = self.has_feed and begins_feed(self.root, self._delta, schema.columns)
            actions.protocol = next_protocol(self._delta, merges=self.merges, feeds=self.has_feed)
        places.make_log(self.root, delta.LOG)
        number = self.version + 1
        previous = log_chain.previous(self.root, number)
        made = delta_commit.publish(self.root, number, self._app, batch, actions, previous=previous)
        self.committed = number, made
        if self._delta is None:
            self._delta = places.delta_table(self.root)
        self.cost.add(Cost(rows=sum(file.size for file in actions.added), vectors=actions.vector_bytes))
        self._committed(number, actions.added, actions.replaced)
        if self._checkpoint_is_due:
            self.harm = log_chain.harm(self.root, number, self.checkpoints)
            if self.harm is None:  # otherwise it would be in the checkpoint
                self.make_checkpoint()

    @property
    def _checkpoint_is_due(self) -> bool:
        if not self.merges:
            return bool(self._seen) and self._seen % CHECKPOINT_EVERY == 0
        # Its commits are larger, since they have vectors, and some of its versions are merges.
        return self._seen - max(self.checkpoints, default=0) >= CHECKPOINT_EVERY_MERGED

    @property
    def merges(self) -> bool:
        """Whether commits of this object leave rows that are gone in their files."""
        return has_vectors(self._delta) if self._merges is None else self._merges

    @property
    def has_feed(self) -> bool:
        """Whether commits of this object write a change feed."""
        return self._setting(table_properties.FEED) == "true" if self._feed is None else self._feed

    def _committed(self, number: int, added: Sequence[NewFile], removed: Sequence[TableFile]) -> None:
        assert self._delta is not None
        _update(self._delta, self.root)
        self._seen = number  # another program may have come after it already
        gone = sum(file.size for file in removed)
        self.cost.replaced += gone
        self._live = None if self._live is None else self._live - gone + sum(file.size for file in added)
        self._search.forget(file.name for file in removed)

    def _configuration(self, schema: HasColumns) -> dict[str, str]:
        bounds = [one.name for one in schema.columns if one.name in self._bounds and bounded(one.arrow)]
        own = (self.namespace, self._divide_by, self._declared, self._policy, self._deployment, schema.cut, bounds)
        return TableProperties(*own, feed=self.has_feed, merges=self.merges).configuration()

    def make_checkpoint(self) -> None:
        """Write a checkpoint of the newest version, if it has none. From then on the log before it does not matter."""
        if self._delta is None or not self.version or self.version in delta.checkpoints_in(self.root):
            return
        try:
            _publish_checkpoint(self.root, self._delta)
            made = delta.checkpoints_in(self.root)[self.version]
            self.checkpoints[self.version] = log_chain.digest_of(made)
        except (OSError, KeyError, DeltaError, StoreAwayError):
            return  # only a shortcut for readers: the next one is written later

    # -- its daily life ---------------------------------------------------------------------------------------------

    def compact(
        self, *, target_bytes: int | None = None, z_order: Sequence[str] = (), everything: bool = False
    ) -> Mapping[str, int]:
        """Merge small files; with ``z_order`` the rows of a merged file are arranged by these columns. ``everything``:
        with a Z-order, arrange the rows of large files too. Returns how many files were removed and added."""
        self.refresh()
        return merging.merge(self, z_order, target_bytes=target_bytes, everything=everything and bool(z_order))

    def layout(self, z_order: Sequence[str] = (), gone: Mapping[str, RowNumbers] | None = None) -> Layout:
        """How merged files are laid out, without the rows of ``gone``."""
        return Layout(self.root, _arrow(self.fields), self._divide_by, self._bounds, z_order, gone or {})

    def replace(self, added: Sequence[NewFile], removed: Sequence[TableFile]) -> None:
        """Let files take the place of others that have the same rows."""
        number = self.version + 1
        delta_commit.publish_compaction(self.root, number, added, removed, log_chain.previous(self.root, number))
        self._committed(number, added, removed)

    def expire(self, keeping: Keeping, now_ms: int | None = None) -> list[str]:
        """Remove files and versions that are not kept. Returns the files' names."""
        self.refresh()
        return versions.expire(self.root, keeping, [file.name for file in self.files()], now_ms) if self.exists else []


def _has_left_out(before: str | None, now: str | None) -> bool:
    """Whether the policy ``before`` has left out what a table has to hold under that of ``now``."""
    return None not in (before, now) and before != now and (before == "quarantine" or now == "evolve")


def _opened(root: TablePlace) -> DeltaTable | None:
    """The table as it is there; ``None`` if there is none."""
    try:
        return places.delta_table(root)
    except TableNotFoundError:
        return None
    except (DeltaError, OSError, ValueError) as error:
        raise SinkError(f"the table {root} cannot be read: {reason(error)}", hint=ANEW.format(root=root)) from error


def _update(table: DeltaTable, root: TablePlace) -> None:
    """Read new versions of the log."""
    with places.asking(root):
        table.update_incremental()


def _publish_checkpoint(root: TablePlace, table: DeltaTable) -> None:
    if not isinstance(root, Path):  # an object is there to stay, and whole
        table.create_checkpoint()
        return
    version = table.version()
    base = max((one for one in delta.checkpoints_in(root) if one < version), default=None)
    publish_checkpoint(root, version, root / BESIDE, base=base)


def _mark(
    file: TableFile, found: tuple[RowNumbers, pa.Table | None] | None, feed: ChangeFeed, actions: Actions
) -> None:
    """Let rows of a file be gone, if any were ``found``. A file whose rows are all gone goes itself."""
    if found is None:
        return
    gone, rows = found
    actions.removed.append(file)
    if len(gone) < (file.rows or 0):
        actions.marked.append(file._replace(vector=vector_of(gone)))
    if rows is not None:
        feed.before(rows)


def _check_versions(root: TablePlace, numbers: Iterable[int], state: str) -> None:
    """Raises SinkError if one of these versions changes rows and is not of ``state``."""
    for number in numbers:
        try:
            actions = delta_commit.actions_of(root, number)
        except FileNotFoundError:
            raise delta_commit.changed_by_others(root, number) from None
        statement = delta_commit.statement(actions, number)
        is_ours = statement is not None and (not state or statement.state in {"", state})
        if not is_ours and delta_commit.changes_data(actions):
            raise delta_commit.changed_by_others(root, number)


#: Tables that are opened at once: in an object store each of them waits for several answers.
_AT_ONCE: Final = 8


def tables_in(root: TablePlace) -> dict[str, int]:
    """The tables in ``root`` that can be read, by namespace, with the last micro-batch that each has taken over."""
    folders = sorted(root.iterdir(), key=lambda one: one.name) if root.is_dir() else []
    with ThreadPoolExecutor(_AT_ONCE, "tailrace-tables") as pool:
        return dict(filter(None, pool.map(_namespace_and_batch, folders)))


def _namespace_and_batch(folder: TablePlace) -> tuple[str, int] | None:
    if not delta.is_table(folder):
        return None
    with contextlib.suppress(DeltaError, OSError, ValueError):
        table = places.delta_table(folder)
        namespace = table.metadata().configuration.get(table_properties.NAMESPACE)
        return None if namespace is None else (namespace, _batch_of(table, folder, namespace))
    return None


def _app_of(namespace: str) -> str:
    """The application under which a table's commits note their micro-batches."""
    return f"tailrace/{namespace}"


def _batch_of(table: DeltaTable, root: TablePlace, namespace: str) -> int:
    """The last micro-batch that a table has taken over; -1 if there is none."""
    with places.asking(root):
        found = table.transaction_version(_app_of(namespace))
    return -1 if found is None else found


#: How a table is made again that nobody can read.
ANEW: Final = "Remove {root}: the next run writes the table from its state"


def _arrow(fields: Sequence[Mapping[str, Any]]) -> pa.Schema:
    """The columns of the data files, from the fields of the table's schema."""
    return arrow_schema(TableSchema(tuple(delta_commit.columns_of(fields))))
