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
from pathlib import Path
from typing import Any, Final, Protocol

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError, TableNotFoundError

from tailrace.base.object_place import StoreAwayError, reason
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.errors import SinkError
from tailrace.lake.store import delta, places
from tailrace.lake.store.place import TablePlace
from tailrace.lake.store.published_checkpoint import publish_checkpoint
from tailrace.lake.tables import delta_commit, log_chain, versions
from tailrace.lake.tables.change_feed import begins_feed, new_feed
from tailrace.lake.tables.compaction import Layout, compacted
from tailrace.lake.tables.data_files import bounded, key_range, new_files, opened
from tailrace.lake.tables.delta_commit import Actions, Batch, NewFile, TableFile
from tailrace.lake.tables.names import KEY
from tailrace.lake.tables.rows import arrow_schema
from tailrace.lake.tables.schema import Column, TableSchema
from tailrace.lake.tables.versions import Keeping

#: A checkpoint of the log is written every this many versions.
CHECKPOINT_EVERY: Final = 50
#: Where the next checkpoint is made. Readers and Delta's VACUUM pass over names that begin so.
BESIDE: Final = "_checkpoint"
_NAMESPACE: Final = "tailrace.namespace"
_FEED: Final = "delta.enableChangeDataFeed"
_DECLARED: Final = "tailrace.declared"
_DEPLOYMENT: Final = "tailrace.deployment"
_DIVIDED, _CUT = "tailrace.partitionBy", "tailrace.cut"
_POLICY: Final = "tailrace.onMismatch"


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
    ) -> None:
        self.root = root
        self.namespace = namespace
        self._divide_by = tuple(partition_by)
        self._bounds = tuple(dict.fromkeys((*partition_by, *bounds)))
        self._declared = declared
        self._policy = policy
        self._deployment = deployment
        self._feed = feed
        #: The bytes of the files that commits of this object have replaced.
        self.replaced_bytes = 0
        self._live: int | None = None
        self._app = f"tailrace/{namespace}"
        self._ranges: dict[str, tuple[bytes, bytes] | None] = {}
        self._seen = -1
        #: The version that our last commit made, and the digest of its file, once there is one.
        self.committed: tuple[int, str] | None = None
        #: The digests of the log's checkpoints that are known.
        self.checkpoints: dict[int, str] = {}
        #: What was found to be wrong with the log while it was written to.
        self.harm: str | None = None
        self._delta: DeltaTable | None = None
        try:
            self._delta = places.delta_table(root)
        except TableNotFoundError:
            pass
        except (DeltaError, OSError, ValueError) as error:
            raise SinkError(f"the table {root} cannot be read: {reason(error)}", hint=ANEW.format(root=root)) from error
        if declared is None and self._delta is not None:  # whoever only maintains the table knows no rule
            self._divide_by = tuple(json.loads(self._setting(_DIVIDED) or "[]"))
            stats = self._setting("delta.dataSkippingStatsColumns") or ""
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
        with places.asking(self.root):
            found = None if self._delta is None else self._delta.transaction_version(self._app)
        return -1 if found is None else found

    @property
    def id(self) -> str:
        """The table's id, which it was given when it was made; ``""`` if there is none."""
        return "" if self._delta is None else str(self._delta.metadata().id)

    @property
    def made_for(self) -> str | None:
        """The namespace that it was made for; ``None`` if it does not say."""
        return self._setting(_NAMESPACE)

    @property
    def deployment(self) -> str:
        """The deployment that it was made for; ``""`` if it does not say."""
        return self._setting(_DEPLOYMENT) or ""

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
        cut = json.loads(self._setting(_CUT) or "[]")
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
        divided = json.loads(self._setting(_DIVIDED) or "[]")
        if tuple(divided) != self._divide_by:
            return True
        if self._setting(_DECLARED) not in {None, self._declared}:
            return True
        before, now = self._setting(_POLICY), self._policy
        return None not in (before, now) and before != now and (before == "quarantine" or now == "evolve")

    def refresh(self, state: str = "", known: int = -1) -> None:
        """Read new versions of the log. Raises SinkError if another program has changed rows, or another process of
        ours, whose rows come from another state than ``state``. Versions up to ``known`` were looked at before."""
        if self._delta is None:
            return
        before = max(self._seen, known) if max(self._seen, known) >= 0 else delta_commit.newest_version(self.root)
        _update(self._delta, self.root)
        _check_versions(self.root, range(before + 1, self._delta.version() + 1), state)
        self._seen = self._delta.version()

    def look(self) -> None:
        """Load the newest version, whoever wrote it. For use before the whole table is rewritten."""
        if self._delta is not None:
            _update(self._delta, self.root)

    def rows(self) -> int:
        """How many rows the newest version has."""
        with places.asking(self.root):
            return 0 if self._delta is None else int(self._delta.count())

    def files(self) -> Iterator[TableFile]:
        """The data files of the newest version."""
        if self._delta is None:
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
        self._commit(batch, schema, Actions(kind, added, list(self.files())))

    def change(self, batch: Batch, schema: HasColumns, keys: Sequence[bytes], rows: Iterable[pa.RecordBatch]) -> None:
        """Remove the rows with these keys, and add ``rows``. ``schema`` is read after the last row was made."""
        removed: list[TableFile] = []
        with (
            new_files(self.root, self._divide_by, self._bounds) as writers,
            new_feed(self.root, wanted=self.has_feed) as feed,
        ):
            if keys:
                wanted = pa.array(keys, pa.binary())
                low, high = min(keys), max(keys)
                for file in self.files():
                    divided = self._divided(file.name, wanted, low, high)
                    if divided is not None:
                        left, gone = divided
                        removed.append(file)
                        writers.write(left)
                        feed.before(gone)
            for made in (pa.Table.from_batches([piece]) for piece in rows):
                writers.write(made)
                feed.after(made)
            added, fed = writers.finish(), feed.finish()
        self._commit(batch, schema, Actions("changes", added, removed, fed=fed))

    def _divided(self, name: str, keys: pa.Array, low: bytes, high: bytes) -> tuple[pa.Table, pa.Table] | None:
        """A file's rows without those with the keys, and those with them; ``None`` if it has none of them."""
        known = self._ranges.get(name)
        if known is not None and (known[0] > high or known[1] < low):
            return None
        with opened(self.root, name) as file:
            known = self._ranges[name] = key_range(file)
            if known is not None and (known[0] > high or known[1] < low):
                return None
            found = pc.is_in(file.read(columns=[KEY]).column(KEY), value_set=keys)
            if not pc.any(found).as_py():
                return None
            rows = file.read()
            return rows.filter(pc.invert(found)), rows.filter(found)

    def _commit(self, batch: Batch, schema: HasColumns, actions: Actions) -> None:
        fields = delta_commit.delta_fields(schema.columns)
        configuration = self._configuration(schema)
        if self._delta is None or self.redeclared or self._described != (fields, configuration):
            table_id = str(uuid.uuid4()) if self._delta is None else str(self._delta.metadata().id)
            actions.metadata = delta_commit.metadata_action(table_id, fields, configuration)
            if self._delta is None:
                actions.kind = "create"
            actions.feeds = self.has_feed and begins_feed(self.root, self._delta, schema.columns)
        places.make_log(self.root, delta.LOG)
        number = self.version + 1
        previous = log_chain.previous(self.root, number)
        made = delta_commit.publish(self.root, number, self._app, batch, actions, previous=previous)
        self.committed = number, made
        if self._delta is None:
            self._delta = places.delta_table(self.root)
        self._committed(number, actions.added, actions.removed)
        if self._seen and self._seen % CHECKPOINT_EVERY == 0:
            self.harm = log_chain.harm(self.root, number, self.checkpoints)
            if self.harm is None:  # otherwise it would be in the checkpoint
                self.make_checkpoint()

    @property
    def has_feed(self) -> bool:
        """Whether commits of this object write a change feed."""
        return self._setting(_FEED) == "true" if self._feed is None else self._feed

    @property
    def _described(self) -> tuple[list[dict[str, Any]], dict[str, str]] | None:
        """What the table's metadata says of its columns and settings."""
        return None if self._delta is None else (self.fields, dict(self._delta.metadata().configuration))

    def _committed(self, number: int, added: Sequence[NewFile], removed: Sequence[TableFile]) -> None:
        assert self._delta is not None
        live = self.live_bytes if self._live is not None else None
        _update(self._delta, self.root)
        self._seen = number  # another program may have come after it already
        gone = sum(file.size for file in removed)
        self.replaced_bytes += gone
        self._live = None if live is None else live - gone + sum(file.size for file in added)
        for file in removed:
            self._ranges.pop(file.name, None)

    def _configuration(self, schema: HasColumns) -> dict[str, str]:
        # deltalake treats a missing bound as NULL, and leaves the file out of every query that filters by the column.
        bounds = [one.name for one in schema.columns if one.name in self._bounds and bounded(one.arrow)]
        stats = {"delta.dataSkippingStatsColumns": ",".join(bounds)} if bounds else {}
        return {
            _NAMESPACE: self.namespace,
            **({_DIVIDED: json.dumps(self._divide_by)} if self._divide_by else {}),
            **({} if self._declared is None else {_DECLARED: self._declared}),
            **({} if self._policy is None else {_POLICY: self._policy}),
            **({_DEPLOYMENT: self._deployment} if self._deployment else {}),
            **({_CUT: json.dumps(schema.cut)} if schema.cut else {}),
            "delta.enableExpiredLogCleanup": "false",
            **({_FEED: "true"} if self.has_feed else {}),
            **(stats or {"delta.dataSkippingNumIndexedCols": "0"}),
        }

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
        added: list[NewFile] = []
        removed: list[TableFile] = []
        if self._delta is not None:
            layout = Layout(self.root, _arrow(self.fields), self._divide_by, self._bounds, z_order)
            known = {file.name: file for file in self.files()}
            sizes = [(name, file.size) for name, file in known.items()]
            arranged = everything and bool(z_order)
            added, names = compacted(layout, sizes, target_bytes=target_bytes, everything=arranged)
            removed = [known[name] for name in names]
        if removed:
            number = self.version + 1
            delta_commit.publish_compaction(self.root, number, added, removed, log_chain.previous(self.root, number))
            self._committed(number, added, removed)
        return {"numFilesRemoved": len(removed), "numFilesAdded": len(added)}

    def expire(self, keeping: Keeping, now_ms: int | None = None) -> list[str]:
        """Remove files and versions that are not kept. Returns the files' names."""
        self.refresh()
        return versions.expire(self.root, keeping, [file.name for file in self.files()], now_ms) if self.exists else []


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


def tables_in(root: TablePlace) -> dict[str, int]:
    """The tables in ``root`` that can be read, by namespace, with the last micro-batch that each has taken over."""
    found = {}
    for folder in sorted(root.iterdir(), key=lambda one: one.name) if root.is_dir() else ():
        if not delta.is_table(folder):
            continue
        with contextlib.suppress(DeltaError, OSError, ValueError):
            namespace = places.delta_table(folder).metadata().configuration.get(_NAMESPACE)
            if namespace is not None:
                found[namespace] = CollectionTable(folder, namespace).batch
    return found


#: How a table is made again that nobody can read.
ANEW: Final = "Remove {root}: the next run writes the table from its state"


def _arrow(fields: Sequence[Mapping[str, Any]]) -> pa.Schema:
    """The columns of the data files, from the fields of the table's schema."""
    return arrow_schema(TableSchema(tuple(delta_commit.columns_of(fields))))
