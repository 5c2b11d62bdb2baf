"""The statistics of a writer of tables, as Prometheus reads them. Needs the extra ``metrics``."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Final

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from tailrace.base.metrics_server import Families
from tailrace.lake.tables.writer import TablesWriter

_PREFIX: Final = "tailrace_tables"


class TablesCollector(Collector):
    """Gives the numbers to Prometheus when it scrapes. Names begin with ``tailrace_tables_``."""

    def __init__(self, writer: TablesWriter) -> None:
        self._writer = writer

    def collect(self) -> Iterable[Metric]:
        """One family for each number."""
        found = self._writer.progress
        families = Families(_PREFIX)
        counters = (
            ("batches", "Micro-batches that were written", found.batches),
            ("changes", "Changes of documents that were applied", found.changes),
            ("documents_copied", "Documents that were copied", found.copied),
            ("written_anew", "Tables that did not match the state and were rewritten", found.anew),
        )
        for name, text, value in counters:
            yield families.counter(name, text, value)
        gauges = [
            ("tables", "Tables that are followed", found.tables),
            ("resyncing", "Collections that are being copied again", len(self._writer.resyncing)),
        ]
        if found.time is not None:
            seconds = found.time.seconds
            gauges += [
                (
                    "stated_seconds",
                    "Cluster time at which all tables equal their collections, in Unix seconds",
                    seconds,
                ),
                ("lag_seconds", "How long ago that was, by this machine's clock", max(0, int(time.time()) - seconds)),
            ]
        for name, text, value in gauges:
            yield families.gauge(name, text, value)
