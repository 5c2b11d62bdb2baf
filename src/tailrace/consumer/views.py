"""Denormalised views: fields of one collection carried in the documents of another, or counts and sums over them, kept
by listeners."""

from tailrace.act.consumer.views.keeper import ViewKeeper
from tailrace.act.consumer.views.raw_value import MISSING
from tailrace.act.consumer.views.totals import Totals
from tailrace.act.consumer.views.totals_upkeep import TotalsUpkeep
from tailrace.act.consumer.views.upkeep import ViewDifference, ViewUpkeep
from tailrace.act.consumer.views.view import View

__all__ = [
    "MISSING",
    "Totals",
    "TotalsUpkeep",
    "View",
    "ViewDifference",
    "ViewKeeper",
    "ViewUpkeep",
]
