"""One stream's pushdown: which part of its ``$match`` is checked where."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from tailrace.core.expression import CompiledPipeline
from tailrace.core.expression.match import tree
from tailrace.core.expression.match.test import document_test
from tailrace.core.expression.values.collation import order_of
from tailrace.core.expression.values.compare import Order
from tailrace.core.pipeline.pushdown.entry_test import EntryTest
from tailrace.core.pipeline.pushdown.oplog_filter import oplog_filter
from tailrace.core.pipeline.pushdown.queried import queried
from tailrace.core.plan.conjuncts import (
    BEFORE_CHANGE,
    FULL_DOCUMENT,
    SESSION,
    Conjunct,
    drops_unseen,
    leading_conjuncts,
)
from tailrace.core.plan.plan import Plan
from tailrace.core.raw_bson import EMPTY_DOCUMENT

_NO_FIELDS: Final[frozenset[bytes]] = frozenset()
_FULL_DOCUMENT: Final = frozenset((FULL_DOCUMENT,))


@dataclass(frozen=True, slots=True)
class Pushdown:
    """What is asked where.

    ``conjuncts``       the parts of the user's ``$match`` stages that may be asked of a whole event at once
    ``on_entries``      those of them that may be asked of an entry, before anything is looked up
    ``before_images``   those that are asked of the event before images are looked up
    ``between_images``  those that ask for the pre-image alone, and are asked before ``fullDocument`` is looked up
    ``after_images``   those that are asked once the images are there, before the stages that they were moved past
    ``order``           how values are compared: by their bytes, or by a collation
    ``oplog_filter``    query document for ``local.oplog.rs``, to be joined with conditions on ``ts``; ``None``: the
                        stream wants nearly everything, so it reads everything
    ``scope_filter``    gives the same query without the ``$match``, which few streams ever send
    ``entry_test``      whether an entry's event may pass; ``None``: nothing could be left out
    ``looks_up``        the image fields that are looked up: ``fullDocument`` of updates, ``fullDocumentBeforeChange``
    """

    conjuncts: tuple[Conjunct, ...]
    on_entries: tuple[Conjunct, ...]
    before_images: tuple[Conjunct, ...]
    between_images: tuple[Conjunct, ...]
    after_images: tuple[Conjunct, ...]
    order: Order
    oplog_filter: bytes | None
    scope_filter: Callable[[], bytes | None]
    entry_test: EntryTest | None
    looks_up: frozenset[bytes]


def plan_pushdown(plan: Plan, pipeline: CompiledPipeline, *, enabled: bool = True) -> Pushdown:
    """The pushdown for ``plan``, whose user's stages were compiled to ``pipeline``.

    ``enabled``  ``False`` leaves entries alone: only what the server itself does visibly is done, which is to ask a
                 ``$match`` before images are looked up and before stages that it can pass
    """
    # What could fail comes last, after all that could spare it: so it is on the server, whose oplog query comes first.
    order = order_of(plan.options.collation)
    found = leading_conjuncts(pipeline, moves_array_tests=plan.profile.moves_array_tests)
    conjuncts = tuple(sorted(found, key=lambda one: one.fails))
    shown = _shown_images(plan)
    before = _early(conjuncts, shown)
    between: tuple[Conjunct, ...] = ()
    if FULL_DOCUMENT in shown:
        between = tuple(one for one in _early(conjuncts, _FULL_DOCUMENT) if one not in before)
    after = tuple(one for one in conjuncts if one.moved and one not in before and one not in between)
    asked: tuple[Conjunct, ...] = ()
    if enabled:
        # A look-up that fails is an error at its event, unless the server asks the match before it looks.
        early = (one if one in before else _sparing(plan, one, order) for one in conjuncts)
        asked = tuple(one for one in early if one is not None and one.fields is not None and not one.fails)
    nodes: list[tree.Node] = [one.node for one in asked]
    sessions: list[tree.Node] = []
    if plan.profile.match_sees_session_of_entry and order.simple:
        sessions = [one.node for one in conjuncts if _asks_for_session(one)]
    views = _of_views(plan, conjuncts) if order.simple else []
    # The server compares by the bytes in its oplog query, so what a collation decides is not asked there.
    asked_there = nodes if order.simple else []
    scoped = enabled and plan.options.scope.kind != "cluster"
    return Pushdown(
        conjuncts=conjuncts,
        on_entries=asked,
        before_images=before,
        between_images=between,
        after_images=after,
        order=order,
        oplog_filter=oplog_filter(plan, asked_there) if asked_there or scoped else None,
        scope_filter=partial(oplog_filter, plan, ()) if scoped else _nothing,
        entry_test=EntryTest(plan, nodes, sessions, views, order) if nodes or sessions or views else None,
        looks_up=frozenset(name for name in shown if _is_needed(plan, pipeline, name)),
    )


def _nothing() -> None:
    return None


def _of_views(plan: Plan, conjuncts: tuple[Conjunct, ...]) -> list[tree.Node]:
    """What the oplog query asks of a view's definition. With showExpandedEvents it lets each pass."""
    options = plan.options
    if not options.show_system_events or options.show_expanded_events:
        return []
    if not plan.profile.expanded_events_and_images:
        return []  # a version whose oplog query does not hold the match
    nodes = (_queried(plan, one) for one in conjuncts if not one.fails)
    return [node for node in nodes if node is not None]


def _early(conjuncts: tuple[Conjunct, ...], images: frozenset[bytes]) -> tuple[Conjunct, ...]:
    """Those that may be asked before the stages that fill these fields, and what the others imply."""
    early: list[Conjunct] = []
    for one in conjuncts:
        parts = (one,) if one.passes_stages_of(images) else one.implied()
        early += (part for part in parts if part.passes_stages_of(images))
    return tuple(early)


def _shown_images(plan: Plan) -> frozenset[bytes]:
    options = plan.options
    images = _NO_FIELDS
    if options.full_document != "default":
        images |= _FULL_DOCUMENT
    if options.full_document_before_change != "off":
        images |= {BEFORE_CHANGE}
    return images


def _sparing(plan: Plan, one: Conjunct, order: Order) -> Conjunct | None:
    """The part of it that may be asked of entries so that the same look-ups fail as on the server, although it is not
    asked of events before images are looked up."""
    options = plan.options
    if "required" in (options.full_document, options.full_document_before_change):
        return one if order.simple and _rewritten(one) else None
    # From 6.0 on the look-up fails in a view, and the match is part of the oplog query.
    if options.full_document != "updateLookup" or plan.profile.looks_up_by_uuid:
        return one
    node = _queried(plan, one) if order.simple else None
    return None if node is None else replace(one, node=node)


def _queried(plan: Plan, one: Conjunct) -> tree.Node | None:
    return queried(one.node, negates_keys=plan.profile.series >= (7, 0))


def _rewritten(one: Conjunct) -> bool:
    """Whether the server asks it in the oplog query although it depends on an image: ``fullDocument`` on its own, where
    that must be there to pass."""
    leaf = not isinstance(one.node, tree.And | tree.Or | tree.Nor | tree.Not)
    return leaf and one.fields == _FULL_DOCUMENT and not document_test(one.node)(EMPTY_DOCUMENT)


def _asks_for_session(one: Conjunct) -> bool:
    node = one.node.child if isinstance(one.node, tree.Not) else one.node
    leaf = isinstance(node, tree.Compare | tree.In | tree.Exists | tree.TypeIs | tree.Pattern)
    return leaf and one.fields is not None and one.fields <= SESSION


def _is_needed(plan: Plan, pipeline: CompiledPipeline, name: bytes) -> bool:
    """Whether an image must be looked up although no event may show it: it must where not finding it, or looking for
    it, can be an error, and where another image is made of it."""
    options = plan.options
    for_another = options.full_document in ("whenAvailable", "required")
    if name == FULL_DOCUMENT or for_another or options.full_document_before_change == "required":
        return True
    return not drops_unseen(pipeline, name)
