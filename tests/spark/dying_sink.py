"""The lake's sink, killed at a step of a commit."""

from __future__ import annotations

import os
import signal
import uuid
from collections.abc import Mapping

from pyspark.sql.datasource import WriterCommitMessage
from pyspark.sql.types import StructType

from tailrace.base import durable
from tailrace.lake.spark.store.sink import LakeSink, LakeStreamWriter


def dying_sink(step: str, times: int, group: int | None = None, *, batch: int | None = None) -> type[LakeSink]:
    """At the ``times``-th ``step`` of a commit, of micro-batch ``batch`` if one is given, it kills the process group
    ``group`` of the driver and its JVM, and the process that commits. Without a group the JVM lives on, and nobody
    cleans up after the commit. The class is sent to Spark's Python processes by value, so the sink itself contains
    nothing of this."""
    format_ = f"dying-{uuid.uuid4().hex}"  # the session is other tests' too

    class DyingWriter(LakeStreamWriter):
        def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
            left = times if batch in (None, batchId) else 0

            def observe(name: str) -> None:
                nonlocal left
                left -= name == step
                if left == 0 and name == step:
                    if group is not None:
                        os.killpg(group, signal.SIGKILL)
                    os.kill(os.getpid(), signal.SIGKILL)

            durable.observe_steps(observe)
            super().commit(messages, batchId)

        def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
            """Do nothing, as if the driver were gone."""

    class DyingSink(LakeSink):
        @classmethod
        def name(cls) -> str:
            return format_

        def streamWriter(self, schema: StructType, overwrite: bool) -> LakeStreamWriter:  # noqa: N802
            options: Mapping[str, str] = self.options
            return DyingWriter(schema, options)

    return DyingSink
