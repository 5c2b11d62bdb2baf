"""``tailrace lake change``: make a lake what its pipeline file says now."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tailrace.base.object_place import is_object_uri
from tailrace.cli.lake_shown import shown_in
from tailrace.cli.one_writer import only_writer
from tailrace.cli.output import say
from tailrace.errors import UsageError

if TYPE_CHECKING:
    from tailrace.lake.spark.store.change import ChangeReport
    from tailrace.lake.spark.store.pipeline_file import PipelineSettings
    from tailrace.lake.store.lake_root import LakeRoot


def change(pipeline: Path, archive: str | None, *, from_now: bool, dry_run: bool) -> int:
    """Change the lake of a pipeline file, and print what was done or, with ``dry_run``, would be done. Returns 0;
    raises TailraceError."""
    from tailrace.lake.spark.store.change import change_lake  # noqa: PLC0415
    from tailrace.lake.spark.store.pipeline_file import load  # noqa: PLC0415
    from tailrace.lake.store.identity import partitioning_of, read_identity  # noqa: PLC0415

    settings = load(pipeline)
    root = settings.lake
    known = read_identity(root)
    if known is None:
        raise UsageError(f"{root} is not a lake of Tailrace", hint="tailrace run begins one")
    there = partitioning_of(known).names
    if settings.partition_by not in (None, there):
        raise UsageError(
            f"the lake {root} is partitioned by {', '.join(there)}, which cannot be changed",
            hint="Leave partitionBy as it was, or begin another lake",
        )
    with (
        nullcontext() if dry_run else only_writer(root, settings.checkpoint),
        shown_in(root, None if dry_run else settings.iceberg),
    ):
        report = change_lake(
            _with_archive(settings, archive),
            root,
            checkpoint=settings.checkpoint,
            from_now=from_now,
            dry_run=dry_run,
        )
        _print(root, report, dry_run=dry_run)  # before the catalogue is asked: it may not answer
    return 0


def _with_archive(settings: PipelineSettings, archive: str | None) -> dict[str, str]:
    """The source's options, with the archive that events are read from."""
    from tailrace.cli.run_archive import has_history  # noqa: PLC0415
    from tailrace.lake.store.local_path import local_path  # noqa: PLC0415

    if archive is not None:
        where = archive if is_object_uri(archive) else str(local_path(archive, "--archive"))
        return {**settings.source, "archive": where}
    kept = settings.archive
    if kept is not None and "archive" not in settings.source and has_history(kept.path):
        settings = replace(settings, source={**settings.source, "archive": str(kept.path)})
    return settings.source


def _print(lake: LakeRoot, report: ChangeReport, *, dry_run: bool) -> None:
    from tailrace.lake.store.identity import shown  # noqa: PLC0415

    if not report.differences:
        say(f"{lake} already matches the pipeline file: nothing to change")
    for key, there, here in report.differences:
        say(f"{key}: {shown(there)} becomes {shown(here)}")
    if report.backfills:
        say(f"events are read again after cluster time {report.since}, up to {report.until}")
    elif report.since is not None:
        say(f"the new stream holds for events after cluster time {report.since}; nothing earlier is added")
    if dry_run:
        say("Nothing was changed.")
        return
    if report.differences:
        say(f"{report.rows:,} events added; {report.made:,} files took the place of {report.gone:,}")
    if report.superseded is not None:
        say(f"the checkpoint of the old stream is at {report.superseded}; the next run begins a fresh one")
