"""Pre- and post-images of blocks of events."""

from __future__ import annotations

from tailrace.kernel.batch import Step
from tailrace.pipeline.stream import ChangeStreamPipeline


def image_steps(pipeline: ChangeStreamPipeline) -> list[Step] | None:
    """The steps that look images up and put them into the events; ``None`` where only the plain stages can."""
    options = pipeline.plan.options
    if options.full_document == "default" and options.full_document_before_change == "off":
        return []
    return None
