"""The server's own change stream and ours side by side, on a deployment of the user's own: ``tailrace compare``."""

from tailrace.watch.compare.comparison import Compared, ComparisonLimits, FoundDifference
from tailrace.watch.compare.deployment import DeploymentComparison, Streams
from tailrace.watch.compare.pairing import EventDifference
from tailrace.watch.compare.report import read_report, write_report
from tailrace.watch.compare.sampling import SampledComparison

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
