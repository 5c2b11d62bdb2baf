"""Denormalised views: fields of one collection carried in the documents of another, or counts and sums over them, kept
by listeners."""

from tailrace.consumer.views.keeper import ViewKeeper
from tailrace.consumer.views.raw_value import MISSING
from tailrace.consumer.views.totals import Totals
from tailrace.consumer.views.totals_upkeep import TotalsUpkeep
from tailrace.consumer.views.upkeep import ViewDifference, ViewUpkeep
from tailrace.consumer.views.view import View

__all__ = ["MISSING", "Totals", "TotalsUpkeep", "View", "ViewDifference", "ViewKeeper", "ViewUpkeep"]
