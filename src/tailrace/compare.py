"""The server's own change stream and ours side by side, on a deployment of the user's own: ``tailrace compare``."""

from tailrace.watch.compare import (
    Compared,
    ComparisonLimits,
    DeploymentComparison,
    EventDifference,
    FoundDifference,
    SampledComparison,
    Streams,
    read_report,
    write_report,
)

__all__ = [
    "Compared",
    "ComparisonLimits",
    "DeploymentComparison",
    "EventDifference",
    "FoundDifference",
    "SampledComparison",
    "Streams",
    "read_report",
    "write_report",
]
