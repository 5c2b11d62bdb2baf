"""The user's ``$match`` on blocks of events, as far as it stands before images."""

from __future__ import annotations

from tailrace.kernel.batch import Step
from tailrace.pipeline.stream import ChangeStreamPipeline


def ahead_steps(pipeline: ChangeStreamPipeline) -> list[Step] | None:
    """The steps of ``MatchAhead`` before images. None are needed where no images are looked up."""
    return []
