"""Pushdown: which parts of a change stream's scope and ``$match`` can be asked before an event is made (semantics 8).

In three places: the filter of the oplog query, a test of the raw entry, and the look-up of images. Each may pass more
than the ``$match`` does and never less, and the user's stages themselves always stay after the transform; so it
changes what a stream costs, not what it gives. Parsing and planning are here, reading is the work of the sources.
"""

from tailrace.core.pipeline.pushdown.plan import Pushdown, plan_pushdown
from tailrace.core.plan.conjuncts import Conjunct

__all__ = ["Conjunct", "Pushdown", "plan_pushdown"]
