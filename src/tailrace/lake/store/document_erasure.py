"""Take all events of some documents out of a lake: ``erase`` with the ``$match`` that names them, and a check of what
that cannot reach."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import bson
import pyarrow as pa
from bson.codec_options import CodecOptions, DatetimeConversion

from tailrace.base.object_place import ObjectPlace
from tailrace.core.event.named_document import NamedDocuments, StoreErasure
from tailrace.lake.store.commit_log import CommitLog
from tailrace.lake.store.erasure import EVENT, READ_ROWS, erasable, erase, matcher_of
from tailrace.lake.store.erasure_preview import preview
from tailrace.lake.store.lake_root import LakeRoot, size_of
from tailrace.lake.store.part_writer import parquet_file
from tailrace.lake.store.quarantine_index import uncounted

#: The types of events that are of a document. Others name a collection at most.
_OF_DOCUMENTS: Final = ("insert", "update", "replace", "delete")
_EXACT: Final[CodecOptions[dict[str, Any]]] = CodecOptions(
    tz_aware=True, datetime_conversion=DatetimeConversion.DATETIME_AUTO
)
_TOKENS: Final = "the `_id` itself: resume tokens in the lake's log and in its stream's checkpoint hold document keys"


def erase_documents(path: LakeRoot | str, documents: NamedDocuments, *, dry_run: bool = False) -> StoreErasure:
    """Erase every event of ``documents`` from the lake at ``path``, those of copies too, and remove the replaced files
    at once. ``dry_run`` counts, and changes nothing. A stream may go on writing: what it writes later of the documents
    is there then.

    Raises as ``erase`` does: UsageError where ``path`` is no lake or has no column ``event``, SinkError where it is
    damaged."""
    match = {"$or": [_of_document(one.namespace, one.id) for one in documents.documents]}
    report = StoreErasure("lake", str(path))
    seen = preview(path, match)
    report.count("events", seen.rows)
    report.count("events in quarantine", seen.quarantined)
    unnamed = preview(path, _unnamed(documents))
    if unnamed.rows + unnamed.quarantined:
        report.left.append(
            f"{unnamed.rows + unnamed.quarantined:,} events do not say which document they are about, since the "
            "stream's pipeline leaves that out, or they are later parts of large events: look at them with "
            "`tailrace lake erase --match`"
        )
    if not dry_run:
        erasure = erase(path, match, vacuum=True, everything=True)
        report.found.clear()
        report.count("events", erasure.rows)
        report.count("events in quarantine", erasure.quarantined)
        report.erased = erasure.rows + erasure.quarantined
        if erasure.replaced:
            report.left.append(f"{erasure.replaced:,} replaced files are still there: `tailrace lake expire --keep 0s`")
    loose = _loose(path, matcher_of(match, everything=True))
    if loose:
        report.left.append(
            f"{loose:,} files that no commit names, of a stream that runs or was killed, hold such events: when the "
            "stream has gone on, repeat this command"
        )
    if report.total:
        report.kept.append(_TOKENS)
    return report


def _of_document(namespace: str, id_: bytes) -> dict[str, Any]:
    value = bson.decode(id_, _EXACT)["_id"]
    # Where there is no such field, it equals null.
    return {**_of_collection(namespace), "documentKey._id": {"$eq": value, "$exists": True}}


def _of_collection(namespace: str) -> dict[str, Any]:
    database, _, collection = namespace.partition(".")
    return {"ns.db": database, "ns.coll": collection}


def _unnamed(documents: NamedDocuments) -> dict[str, Any]:
    """Events that may be of the documents, and do not say so."""
    absent: dict[str, Any] = {"$exists": False}
    somewhere = [{"ns.db": absent}, {"ns.coll": absent}]
    within = [{**_of_collection(one), "documentKey._id": absent} for one in documents.namespaces]
    kinds: list[Mapping[str, Any]] = [{"operationType": {"$in": list(_OF_DOCUMENTS)}}, {"operationType": absent}]
    return {"$and": [{"$or": kinds}, {"$or": [*somewhere, *within]}]}


def _loose(path: LakeRoot | str, matches: Callable[[bytes], bool]) -> int:
    """How many files that no commit names hold such events, or cannot be read."""
    with erasable(path) as (log, _):
        return sum(_may_hold(file, matches) for file in _loose_files(log))


def _loose_files(log: CommitLog) -> Iterator[LakeRoot]:
    root = log.layout.root
    if isinstance(root, ObjectPlace):
        held = log.state().files
        yield from (root / name for name in log.layout.files_present() if name not in held)
        yield from uncounted(log.layout, log.newest_batch(log.head()))
        return
    present = [root / name for name in log.layout.files_present()]
    staged = list(log.layout.staging.rglob("*")) if log.layout.staging.is_dir() else []
    state = log.state()
    for file in (*present, *staged):
        if file.is_file() and str(file.relative_to(root)) not in state.files:
            yield file


def _may_hold(file: LakeRoot, matches: Callable[[bytes], bool]) -> bool:
    try:
        with parquet_file(file) as parquet:
            batches = parquet.iter_batches(batch_size=READ_ROWS, columns=[EVENT])
            return any(matches(event) for batch in batches for event in batch.column(0).to_pylist())
    except FileNotFoundError:
        return False  # committed or removed meanwhile
    except (OSError, pa.ArrowException, ValueError, IndexError):
        return size_of(file) > 0 if file.exists() else False
