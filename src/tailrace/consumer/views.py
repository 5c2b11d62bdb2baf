"""Denormalised views: fields of one collection carried in the documents of another, or counts and sums over them, kept
by listeners."""

from tailrace.act.consumer.views import (
    MISSING,
    Totals,
    TotalsUpkeep,
    View,
    ViewDifference,
    ViewKeeper,
    ViewUpkeep,
)

__all__ = [
    "MISSING",
    "Totals",
    "TotalsUpkeep",
    "View",
    "ViewDifference",
    "ViewKeeper",
    "ViewUpkeep",
]
