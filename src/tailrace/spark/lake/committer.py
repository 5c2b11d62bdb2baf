"""Commit a micro-batch to the lake exactly once, whatever Spark does twice.

Spark replays a micro-batch under the same number when it died between our commit and its own; it calls ``abort`` when
``commit`` raised, also when the commit had already happened (both measured with PySpark 4.3). So a batch is recognised
by its claim and number, and what the log holds is never deleted.
"""

from __future__ import annotations

from pathlib import Path

from tailrace.errors import SinkError
from tailrace.spark.lake.commit_log import CommitLog, Head, check_staged, next_commit
from tailrace.spark.lake.identity import check_claim
from tailrace.spark.lake.manifest import Commit, StagedFile


def commit_batch(root: Path, claim: str, batch: int, files: tuple[StagedFile, ...]) -> Commit | None:
    """Add ``files``, in the order of the stream, as micro-batch ``batch``.

    Returns the new commit, or ``None`` where nothing was to be added: no files, or a batch that was committed before
    (its files are dropped). Raises SinkError where the claim is not the lake's, the files are out of order, or they
    repeat what the lake holds; the lake is then as it was.
    """
    log = CommitLog(root)
    with log.locked() as head:
        check_claim(root, claim)
        if not files:
            return None
        if _is_replay(head, claim, batch, files):
            log.discard(files)
            return None
        if head.last_token is not None and files[0].first_token <= head.last_token:
            raise SinkError(
                f"micro-batch {batch} begins at token {files[0].first_token}, and the lake {root} already reaches to "
                f"{head.last_token}",
                hint="Give a fresh checkpoint directory: it goes on after the lake's last event",
            )
        check_staged(log.layout, files)
        commit = next_commit(head, claim, batch, files)
        log.write(commit)
        return commit


def abort_batch(root: Path, files: tuple[StagedFile, ...]) -> None:
    """Drop the staged files of a failed micro-batch, except where its commit has happened after all: what is left to do
    for it is then finished first, which moves them out of reach."""
    log = CommitLog(root)
    with log.locked():
        log.discard(files)


def _is_replay(head: Head, claim: str, batch: int, files: tuple[StagedFile, ...]) -> bool:
    newest = head.newest
    if newest is None or newest.claim != claim or newest.batch is None or newest.batch < batch:
        return False
    same = (newest.first_token, newest.last_token, newest.rows) == (
        files[0].first_token,
        files[-1].last_token,
        sum(file.rows for file in files),
    )
    if newest.batch == batch and same:
        return True
    raise SinkError(
        f"the checkpoint is behind the lake: it gives micro-batch {batch} again with other events, and the lake holds "
        f"batch {newest.batch}",
        hint="Was an old copy of the checkpoint restored? A fresh directory goes on after the lake's last event",
    )
