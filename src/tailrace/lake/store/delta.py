"""Delta Lake's transaction log as a format, written and read in one place for lakes and tables: the names of its files,
its actions, and a commit as lines and back.

One file for each commit, one JSON object on each line (the protocol is public,
https://github.com/delta-io/delta/blob/master/PROTOCOL.md): ``add`` and ``remove`` name files, ``cdc`` those of a change
feed, ``txn`` says which micro-batch it was, ``metaData`` the columns. Reader version 1 and writer version 2 are the
oldest, which every reader knows; a change feed needs writer version 4, and deletion vectors need the versions that name
what a reader has to know. What Delta has no word for is in ``commitInfo``, which other readers ignore:
``delta_log.py`` says what a lake puts there, ``tables/delta_commit.py`` what tables do.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from tailrace.lake.store.place import P, TablePlace
from tailrace.version import version

LOG: Final = "_delta_log"
#: Names the newest checkpoint, for readers.
POINTER: Final = "_last_checkpoint"
_ENGINE: Final = f"tailrace/{version()}"
_READER_VERSION: Final = 1
_WRITER_VERSION: Final = 2
#: The first writer version that knows change feeds.
FEED_WRITER_VERSION: Final = 4
#: The versions of a protocol that names what readers and writers have to know.
_NAMING_VERSIONS: Final = (3, 7)
#: Where a table has the files of its change feed. Delta's readers and its VACUUM know the name.
FEED_FOLDER: Final = "_change_data"
_COMMIT: Final = re.compile(r"([0-9]{20})\.json")
#: A file of a checkpoint in several, of how many.
_PART: Final = re.compile(r"\.[0-9]{10}\.([0-9]{10})\.parquet$")
#: In one file, in several, and the newer form, whose names have a UUID.
_CHECKPOINT: Final = re.compile(r"([0-9]{20})\.checkpoint\.(?:.*\.)?(?:parquet|json)")


# -- files -------------------------------------------------------------------------------------------------------------


def is_table(root: TablePlace) -> bool:
    """Whether ``root`` has a log, even an empty one."""
    return (root / LOG).is_dir()


def commit_path(root: P, number: int) -> P:
    """The file of a commit of the table at ``root``."""
    return root / LOG / f"{number:020d}.json"


def checkpoint_path(root: P, number: int) -> P:
    """The file of a checkpoint, as ``deltalake`` names it."""
    return root / LOG / f"{number:020d}.checkpoint.parquet"


def listed(root: P) -> tuple[list[int], dict[int, list[P]]]:
    """The commits whose files are in the log, ascending, and the files of its checkpoints, by number. The directory is
    listed once, so that both are of one moment. A checkpoint in several files that lacks one is none, as for readers.
    """
    commits, checkpoints = _all_in(root)
    lacking = _lacking(checkpoints)
    whole = {number: [one for one in paths if one not in lacking] for number, paths in checkpoints.items()}
    return commits, {number: paths for number, paths in whole.items() if paths}


def unfinished(root: P) -> dict[int, list[P]]:
    """The files of checkpoints that lack a file, by number: their writer was killed."""
    _, checkpoints = _all_in(root)
    lacking = _lacking(checkpoints)
    found = {number: [one for one in paths if one in lacking] for number, paths in checkpoints.items()}
    return {number: paths for number, paths in found.items() if paths}


def _lacking(checkpoints: Mapping[int, Sequence[P]]) -> set[P]:
    """Those of the files that are parts of a checkpoint which is not whole."""
    found: set[P] = set()
    for paths in checkpoints.values():
        sizes: dict[str, list[P]] = {}
        for path in paths:
            if match := _PART.search(path.name):
                sizes.setdefault(match[1], []).append(path)
        for size, parts in sizes.items():
            if len(parts) != int(size):
                found.update(parts)
    return found


def _all_in(root: P) -> tuple[list[int], dict[int, list[P]]]:
    commits: list[int] = []
    checkpoints: dict[int, list[P]] = {}
    for name in sorted(path.name for path in (root / LOG).iterdir()) if is_table(root) else ():
        if match := _COMMIT.fullmatch(name):
            commits.append(int(match[1]))
        elif match := _CHECKPOINT.fullmatch(name):
            checkpoints.setdefault(int(match[1]), []).append(root / LOG / name)
    return commits, checkpoints


def commits_in(root: TablePlace) -> list[int]:
    """As ``listed``, the commits alone."""
    return listed(root)[0]


def checkpoints_in(root: P) -> dict[int, list[P]]:
    """As ``listed``, the checkpoints alone."""
    return listed(root)[1]


def paths_in(checkpoint: TablePlace, action: str) -> list[str | None]:
    """For each row of a checkpoint's file the path that its ``add`` or ``remove`` names, as it stands there."""
    import pyarrow.compute as pc  # noqa: PLC0415  half a second, where there is a checkpoint

    from tailrace.lake.store.places import parquet_file  # noqa: PLC0415

    with parquet_file(checkpoint) as file:
        return list(pc.struct_field(file.read(columns=[f"{action}.path"]).column(action), "path").to_pylist())


# -- a commit ----------------------------------------------------------------------------------------------------------


def commit(
    info: Mapping[str, Any],
    *,
    creates: bool,
    feeds: bool = False,
    metadata: Mapping[str, Any] | None = None,
    transaction: Mapping[str, Any] | None = None,
    removed: Iterable[Mapping[str, Any]] = (),
    added: Iterable[Mapping[str, Any]] = (),
    fed: Iterable[Mapping[str, Any]] = (),
    protocol: Mapping[str, Any] | None = None,
) -> list[Mapping[str, Any]]:
    """The actions of a commit in their order. ``creates``: it is the table's first. ``feeds``: the table has a change
    feed from this commit on. ``fed``: the actions of the feed's files. ``protocol``: another one than follows from
    these."""
    if protocol is None and (creates or feeds):
        protocol = plain_protocol(feeds=feeds)
    few = [info, protocol, metadata, transaction]
    return [*(action for action in few if action is not None), *removed, *added, *fed]


def content_of(actions: Iterable[Mapping[str, Any]], *, ascii_only: bool) -> bytes:
    """The commit's file. ``ascii_only``: other characters are written as escapes."""
    return "".join(json.dumps(action, ensure_ascii=ascii_only) + "\n" for action in actions).encode()


def actions_in(content: bytes) -> list[dict[str, Any]]:
    """The actions of a commit's file. Raises ValueError where that is something else."""
    try:
        actions = [json.loads(line) for line in content.decode().split("\n") if line]
    except RecursionError as error:
        raise ValueError("JSON that is nested too deeply") from error
    if not actions or not all(isinstance(action, dict) for action in actions):
        raise ValueError("not a JSON object on each line")
    return actions


def info_of(actions: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """What a commit says about itself."""
    found: object = next((one["commitInfo"] for one in actions if "commitInfo" in one), None)
    return found if isinstance(found, dict) else {}


# -- its actions; times are milliseconds -------------------------------------------------------------------------------


def plain_protocol(*, feeds: bool) -> dict[str, Any]:
    """``protocol`` of a table that every reader knows. ``feeds``: with a change feed."""
    writer = FEED_WRITER_VERSION if feeds else _WRITER_VERSION
    return {"protocol": {"minReaderVersion": _READER_VERSION, "minWriterVersion": writer}}


def naming_protocol(reader_features: Sequence[str], *, feeds: bool) -> dict[str, Any]:
    """``protocol`` of a table that only readers who know these features may read. Writers have to know them too, and
    what every table asks of writers."""
    reader, writer = _NAMING_VERSIONS
    also = ["appendOnly", "invariants", *(["changeDataFeed"] if feeds else [])]
    return {
        "protocol": {
            "minReaderVersion": reader,
            "minWriterVersion": writer,
            "readerFeatures": list(reader_features),
            "writerFeatures": [*reader_features, *also],
        }
    }


def commit_info(
    at: int, operation: str, parameters: Mapping[str, str], *, blind_append: bool | None = None, ours: Mapping[str, Any]
) -> dict[str, Any]:
    """``commitInfo``; ``ours`` is what Delta has no word for."""
    return {
        "commitInfo": {
            "timestamp": at,
            "operation": operation,
            "operationParameters": dict(parameters),
            **({} if blind_append is None else {"isBlindAppend": blind_append}),
            "engineInfo": _ENGINE,
            **ours,
        }
    }


def metadata(
    table_id: str,
    schema: Mapping[str, Any],
    partition_columns: Sequence[str],
    configuration: Mapping[str, str],
    created: int,
) -> dict[str, Any]:
    """``metaData``; ``schema`` is in Spark's JSON form, which Delta's is."""
    return {
        "metaData": {
            "id": table_id,
            "format": {"provider": "parquet", "options": {}},
            "schemaString": json.dumps(schema),
            "partitionColumns": list(partition_columns),
            "configuration": dict(configuration),
            "createdTime": created,
        }
    }


def transaction(app: str, number: int, at: int) -> dict[str, Any]:
    """``txn``."""
    return {"txn": {"appId": app, "version": number, "lastUpdated": at}}


def add(
    path: str,
    partition: Mapping[str, str | None],
    size: int,
    at: int,
    *,
    changes: bool,
    stats: str,
    tags: Mapping[str, str] | None = None,
    vector: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """``add``. ``changes``: it brings rows, and does not only move them from other files. ``vector``: the file's
    deletion vector."""
    return {
        "add": {
            "path": path,
            "partitionValues": dict(partition),
            "size": size,
            "modificationTime": at,
            "dataChange": changes,
            "stats": stats,
            **({} if tags is None else {"tags": dict(tags)}),
            **({} if vector is None else {"deletionVector": dict(vector)}),
        }
    }


def change(path: str, size: int) -> dict[str, Any]:
    """``cdc``: a file of the change feed, in ``FEED_FOLDER``."""
    return {"cdc": {"path": path, "partitionValues": {}, "size": size, "dataChange": False}}


def remove(
    path: str,
    partition: Mapping[str, str | None],
    size: int,
    at: int,
    *,
    changes: bool,
    vector: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """``remove``; ``changes`` as for ``add``, ``vector`` as it was in the file's ``add``."""
    return {
        "remove": {
            "path": path,
            "deletionTimestamp": at,
            "dataChange": changes,
            "extendedFileMetadata": True,
            "partitionValues": dict(partition),
            "size": size,
            **({} if vector is None else {"deletionVector": dict(vector)}),
        }
    }
