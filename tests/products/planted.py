"""Faults that products had, put back one by one into running processes: the harness has to find each.

Each is what the code did before it was fixed, in place of the fix. This harness cannot find every former fault: it
compares what products hold and sees how their processes end. Other tests check the wording of a hint (a server without
majority reads), how much memory a copy takes and how much disk tables take, what `tables status` lists, pipelines whose
YAML never ends, who may read our files, and what is sent to a terminal.
"""

from __future__ import annotations

import io
import json
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

Undo = Callable[[], None]


class FaultNotPlanted(Exception):  # noqa: N818 - it says what happened
    """The code that a planted fault replaces no longer exists."""


def _everywhere(module: str, name: str, new: Any) -> list[Undo]:
    """Put ``new`` in the place of a function in every module of ours that has it."""
    __import__(module)
    old = getattr(sys.modules[module], name, None)
    if old is None:
        raise FaultNotPlanted(f"{module}.{name}")
    undo: list[Undo] = []
    for found in [one for key, one in sys.modules.items() if key.startswith(("tailrace", "tests.products"))]:
        for attribute in [key for key, value in vars(found).items() if value is old]:
            undo.append(_set(found, attribute, new))
    return undo


def _set(where: Any, name: str, new: Any) -> Undo:
    if not hasattr(where, name):
        raise FaultNotPlanted(f"{where}.{name}")
    old = getattr(where, name)
    setattr(where, name, new)
    return lambda: setattr(where, name, old)


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _lake_set_back() -> list[Undo]:
    """Nobody notices that the lake is older than its checkpoint."""
    return [
        *_everywhere("tailrace.lake.store.checkpoint_file", "require_seen", _nothing),
        *_everywhere("tailrace.lake.store.committer", "_require_no_hole", _nothing),
    ]


def _lost_index() -> list[Undo]:
    """A lake in a store goes on without the index of its quarantine, or with an older one."""
    return _everywhere("tailrace.lake.store.quarantine_index", "_fault", lambda *_: "")


def _catalogue_left() -> list[Undo]:
    """An Iceberg catalogue gets a lake's commits at the next start; the sink of that is in ``planted_sink.py``."""
    return []


def _table_set_back() -> list[Undo]:
    """A table is not compared with what its state knows about it."""
    return _everywhere("tailrace.lake.tables.standing", "fault_of", _nothing)


def _altered_state() -> list[Undo]:
    """The records of the tables' state are believed, and one that is missing counts as never written."""
    from tailrace.base.lmdb_file import _CHECKSUM_BYTES
    from tailrace.lake.tables import state

    def unsealed(key: bytes, record: bytes) -> bytes:
        return record[_CHECKSUM_BYTES:]

    def records(cursor: Any, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
        for key, record in cursor.iternext() if cursor.set_range(prefix) else ():
            if not key.startswith(prefix):
                return
            yield key, record[_CHECKSUM_BYTES:]

    return [
        _set(state, "unsealed", unsealed),
        _set(state, "records", records),
        _set(state, "confirm_missing", _nothing),
    ]


def _altered_log() -> list[Undo]:
    """A table's log is whatever its files say: neither their seals nor their statements about each other are
    checked."""
    from tailrace.lake.tables.delta_commit import DamagedCommitError

    def actions_in(path: Path, number: int, content: bytes) -> list[dict[str, Any]]:
        try:
            return [json.loads(line) for line in content.decode().split("\n") if line]
        except ValueError as error:
            raise DamagedCommitError(f"{path} is damaged: {error}") from error

    return [
        *_everywhere("tailrace.lake.tables.log_chain", "harm", _nothing),
        *_everywhere("tailrace.lake.tables.delta_commit", "actions_in", actions_in),
    ]


def _other_history() -> list[Undo]:
    """Tables follow whatever deployment they are pointed at."""
    from tailrace.lake.tables.open_tables import OpenTables
    from tailrace.read.window.oplogs import Oplogs

    return [_set(Oplogs, "check", _nothing), _set(OpenTables, "check_deployment", _nothing)]


def _altered_archive() -> list[Undo]:
    """The archive's files are read as they are."""
    import pyarrow.parquet as pq

    from tailrace.read.archive import checked_file
    from tailrace.read.archive.segment import SegmentReader

    def unchecked(self: Any, path: Path, digest: str) -> None:
        try:
            self.parquet = pq.ParquetFile(io.BytesIO(path.read_bytes()), page_checksum_verification=False)
            self.about = json.loads((self.parquet.metadata.metadata or {}).get(checked_file.METADATA, b"{}"))
        except checked_file.DAMAGE as error:
            raise checked_file.damaged(path, error) from None

    def times(self: Any, group: int) -> Any:
        return self.column(group, "cluster_time").to_numpy()

    return [
        _set(checked_file.CheckedFile, "__init__", unchecked),
        _set(SegmentReader, "times", times),
        _set(SegmentReader, "_check_statements", _nothing),
    ]


def _altered_images() -> list[Undo]:
    """The records of exact images are believed."""
    from tailrace.base.lmdb_file import _CHECKSUM_BYTES
    from tailrace.read.images.bucket import ImageBucket

    def unchecked(self: Any, key: bytes, record: bytes) -> bytes:
        return record[_CHECKSUM_BYTES:]

    return [_set(ImageBucket, "_checked", unchecked)]


def _lost_images() -> list[Undo]:
    """A file of exact images that has gone begins anew, with no document in it."""
    from tailrace.read.images.bucket import ImageBucket
    from tailrace.read.images.state import ImageState

    def counted(self: Any) -> list[int]:
        return [0] * len(self._buckets)

    undo = [_set(ImageBucket, name, _nothing) for name in ("_check_there", "_identify")]
    return [*undo, _set(ImageState, "_counted", counted)]


def _silent_part() -> list[Undo]:
    """A copy of the deployment only has the databases that a user is shown."""
    from tailrace.read.source import listing

    def shown(connection: Any) -> list[str]:
        reply = listing._asked(connection)
        return sorted({str(one["name"]) for one in reply["databases"]} - listing.INTERNAL_DATABASES)

    return _everywhere("tailrace.read.source.listing", "database_names", shown)


def _position_of_another() -> list[Undo]:
    """A listener goes on from a position of another deployment."""
    from tailrace.act.consumer.watching import Watching

    return [_set(Watching, "_checked_deployment", _nothing)]


def _views_of_memory() -> list[Undo]:
    """A document above 4 kB is a view of memory when images begin with a copy."""
    from tailrace.read.images import key, seed

    own = key.state_key

    def of_a_view(uuid: bytes, document: Any) -> bytes:
        return own(uuid, memoryview(document) if len(document) > 4096 else document)  # type: ignore[arg-type]

    return [_set(seed, "state_key", of_a_view)]


def _moved_primary() -> list[Undo]:
    """A collection's migration entries are left out, even if nothing else fills it."""
    from tailrace.lake.tables.fold import Fold

    return [_set(Fold, "_group_filled", _nothing)]


def _dying_thread() -> list[Undo]:
    """An error that is none of ours ends the tables' thread, and nobody is told."""
    from tailrace.lake.tables.writer import TablesWriter

    @contextmanager
    def tabling(uri: Any, settings: Any, stop: threading.Event, *, once: bool) -> Iterator[None]:
        with TablesWriter(uri, settings) as writer:
            thread = threading.Thread(target=writer.run_to_present, daemon=True)
            thread.start()
            yield
            thread.join()

    def step(self: TablesWriter, **options: Any) -> bool:
        raise KeyError("not one of ours")

    threading.excepthook = _nothing
    return [*_everywhere("tailrace.cli.run_tables", "tabling", tabling), _set(TablesWriter, "step", step)]


def _snapshot_of_another() -> list[Undo]:
    """A snapshot goes on with a token from the middle of another deployment's copy."""
    return _everywhere("tailrace.read.snapshot.reader", "check_origin", _nothing)


def _images_of_another() -> list[Undo]:
    """Exact images go on with a state of another deployment."""
    from tailrace.read.images.source import ExactSource

    return [_set(ExactSource, "_check_history", _nothing)]


def _archive_of_another() -> list[Undo]:
    """An archive is continued with the oplog of another deployment, as if it were its own."""
    return [
        *_everywhere("tailrace.read.archive.recorder", "_refuse_other", _nothing),
        *_everywhere("tailrace.read.archive.owner", "confirm_owner", _nothing),
        *_everywhere("tailrace.read.source.witness", "check_witness", _nothing),
    ]


def _no_hidden_members() -> list[Undo]:
    """Reads use an explicit session, which PyMongo refuses if it is connected only to a hidden member."""
    from tailrace.read.source.connection import Connection

    own = Connection.majority

    def majority(self: Connection, *place: str, **options: Any) -> Any:
        with self.client.start_session() as session:
            self.client.admin.command("ping", session=session)
        return own(self, *place, **options)

    return [_set(Connection, "majority", majority)]


def _nothing_of_renames() -> list[Undo]:
    """``as of`` says nothing of a collection that has just got its name."""
    from tailrace.errors import UsageError
    from tailrace.lake.tables.as_of import _Replay

    def renamed(self: Any, uuid: bytes) -> Any:
        raise UsageError(f"another collection, {uuid.hex()}, was renamed to {self._namespace}")

    return [_set(_Replay, "_renamed", renamed)]


def _long_partition_values() -> list[Undo]:
    """A value that is too long for a file name stops the upkeep of a table that is partitioned by it."""
    from tailrace.errors import SinkError
    from tailrace.lake.tables import compaction
    from tailrace.lake.tables.names import KEY

    own = compaction.compacted

    def compacted(layout: Any, files: Any, **options: Any) -> Any:
        for name in layout.divide_by:
            for file, _ in files:
                values = compaction._read(layout, file, [KEY, name])[name].to_pylist()
                if any(isinstance(one, str) and len(one) > 255 for one in values):
                    raise SinkError("File name too long")
        return own(layout, files, **options)

    return _everywhere("tailrace.lake.tables.compaction", "compacted", compacted)


def _no_partition_values() -> list[Undo]:
    """The files of a partitioned table lack the partition columns, whose values are in their paths."""
    import pyarrow as pa

    from tailrace.lake.tables.data_files import Writers

    own = Writers._put

    def put(self: Any, folder: str, table: Any) -> None:
        for name in self._divide_by:
            place = table.schema.get_field_index(name)
            field = table.schema.field(place)
            table = table.set_column(place, field, pa.nulls(table.num_rows, field.type))
        own(self, folder, table)

    return [_set(Writers, "_put", put)]


def _far_dates() -> list[Undo]:
    """A column may have dates of any year."""
    from tailrace.lake.tables import column_values

    far = {"FIRST_DAY": -(10**8), "LAST_DAY": 10**8, "FIRST_MS": -(2**53), "LAST_MS": 2**53}
    return [_set(column_values, name, value) for name, value in far.items()]


def _odd_names() -> list[Undo]:
    """A name that is not UTF-8 is used as it is, and the resulting error is not caught."""
    return _everywhere("tailrace.read.source.listing", "check_name", _nothing)


def _damaged_tokens() -> list[Undo]:
    """A damaged token ends in Python's own errors."""
    from tailrace.core.event.resume_token import ResumeToken
    from tailrace.errors import InvalidResumeToken

    own = ResumeToken.parse

    def parse(document: Any) -> ResumeToken:
        try:
            return own(document)
        except InvalidResumeToken:
            raise IndexError("index out of range") from None

    return [_set(ResumeToken, "parse", parse)]


PLANTED: dict[str, Callable[[], list[Undo]]] = {
    "a lake that was set back goes on": _lake_set_back,
    "a lake in a store that was set back goes on": _lake_set_back,
    "a lake in a store forgets what it has put aside": _lost_index,
    "a catalogue is behind its lake in a store": _catalogue_left,
    "a table that was set back goes on": _table_set_back,
    "an altered state of tables is taken over": _altered_state,
    "an altered log of a table is read": _altered_log,
    "tables follow another history": _other_history,
    "an altered archive is read": _altered_archive,
    "altered images are given": _altered_images,
    "a lost file of images begins anew": _lost_images,
    "a user of few rights copies a part": _silent_part,
    "a listener goes on with another deployment": _position_of_another,
    "images begin with views of memory": _views_of_memory,
    "a moved primary empties its tables": _moved_primary,
    "a thread dies and nobody is told": _dying_thread,
    "a snapshot goes on with another deployment": _snapshot_of_another,
    "images go on with another deployment": _images_of_another,
    "an archive goes on with another deployment": _archive_of_another,
    "a hidden member cannot be read": _no_hidden_members,
    "as of knows nothing of renames": _nothing_of_renames,
    "a long value stops the upkeep of a table": _long_partition_values,
    "a table is divided by what its files lack": _no_partition_values,
    "a date of the year 10000 makes a column unreadable": _far_dates,
    "a name that is not UTF-8 is used as it is": _odd_names,
    "a damaged token is no error of ours": _damaged_tokens,
}


def plant(name: str) -> list[Undo]:
    """Put a fault back, in this process. Raises FaultNotPlanted if its place is gone: then it has to be planted in
    another way."""
    return PLANTED[name]()


@contextmanager
def planted_here(name: str) -> Iterator[None]:
    """The same for as long as the block lasts."""
    undo = plant(name)
    try:
        yield
    finally:
        for one in reversed(undo):
            one()


def sink_of(name: str) -> type | None:
    """A sink of the lake that plants a fault in Spark's processes; ``None`` if the fault does not concern lakes."""
    planted = PLANTED.get(name)
    if planted not in {_lake_set_back, _catalogue_left}:
        return None
    from tests.products.planted_sink import LaggingSink, PlantedSink

    return PlantedSink if planted is _lake_set_back else LaggingSink
