"""The server's own change stream and ours side by side, on a deployment of the user's own: ``tailrace compare``."""

from tailrace.compare.comparison import Compared, ComparisonLimits, FoundDifference
from tailrace.compare.deployment import DeploymentComparison, Streams
from tailrace.compare.pairing import EventDifference
from tailrace.compare.report import read_report, write_report
from tailrace.compare.sampling import SampledComparison

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
