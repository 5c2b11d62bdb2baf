"""A process that publishes the section ``messages`` of a pipeline file, as ``tailrace run`` does beside its lake, until
SIGTERM: ``python -m tests.consumer.messages_process PIPELINE``. It starts no Spark."""

from __future__ import annotations

import os
import sys
import threading

from tailrace.cli.run_messages import messaging
from tailrace.cli.stopped_by_signals import stopped_by_signals
from tailrace.lake.spark.store.pipeline_file import load


def main(pipeline: str) -> None:
    settings, stop = load(pipeline), threading.Event()
    with stopped_by_signals(stop), messaging(settings.source["uri"], settings.messages, stop, once=False):
        stop.wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
    os._exit(0)
