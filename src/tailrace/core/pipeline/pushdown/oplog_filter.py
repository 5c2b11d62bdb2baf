"""The filter of the oplog query: which entries a stream has to read (semantics 2.2), less those whose events its
``$match`` would exclude.

It never passes less than ``OplogMatch`` and the ``$match`` together: what it cannot express exactly it expresses more
widely. The commands that invalidate a stream, the entries that commit transactions, the no-ops of the sharding code and
the definitions of views pass whatever the ``$match`` says about their operation. So do the entries that ``OplogMatch``
counts because their kind is not known.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from typing import Final

from tailrace.core.expression.match import tree
from tailrace.core.expression.values import value as v
from tailrace.core.oplog.entry_kinds import KNOWN_COMMANDS, KNOWN_OPERATIONS
from tailrace.core.oplog.namespace import USER_DATABASE, Scope, visible_collections
from tailrace.core.pipeline.pushdown import query
from tailrace.core.pipeline.pushdown.entry_test import COMMANDS, known_of_writes
from tailrace.core.pipeline.pushdown.query import Filter, any_of, every, exists, field
from tailrace.core.pipeline.pushdown.terms import (
    NamespaceRule,
    Rule,
    Terms,
    command_namespace,
    inserted_key,
    moved_to,
    updated_or_removed,
)
from tailrace.core.plan.conjuncts import FULL_DOCUMENT
from tailrace.core.plan.plan import Plan
from tailrace.core.stage.oplog_match import END_OF_TRANSACTION, ends_of_transactions_shown, index_builds_shown

_OP: Final = {name: query.equal(b"op", name) for name in (b"i", b"u", b"d", b"c", b"n")}
_NEVER_IN_COMMANDS: Final = frozenset(
    (b"documentKey", FULL_DOCUMENT, b"fullDocumentBeforeChange", b"updateDescription", b"rawUpdateDescription")
)


def oplog_filter(plan: Plan, nodes: Iterable[tree.Node]) -> bytes:
    """A query document for ``local.oplog.rs``, without conditions on ``ts``."""
    made = _OplogFilter(plan, tree.And(tuple(nodes))).whole()
    assert not isinstance(made, bool), "transactions are read whatever the match says"
    return made[1]


def kinds_read(plan: Plan, nodes: Iterable[tree.Node]) -> dict[str, str]:
    """What the filter leaves of the entries in scope, for each kind: "all", "some" or "none"."""
    made = _OplogFilter(plan, tree.And(tuple(nodes)))
    result = {kind: _share(one) for kind, one in made.by_kind().items()}
    for name, operation_type in COMMANDS.items():
        share = _share(made.asked_of_command(name))
        result[operation_type] = share if operation_type not in result or share == "all" else result[operation_type]
    if plan.options.scope.kind == "collection":
        del result["dropDatabase"]
    return {**result, "transactions": "all", "no-ops of the sharding code": "all"}


def _share(one: Filter) -> str:
    return "some" if not isinstance(one, bool) else "all" if one else "none"


class _OplogFilter:
    """The branches of one plan's filter. ``node`` is what of the ``$match`` may be asked of an entry."""

    def __init__(self, plan: Plan, node: tree.Node) -> None:
        self._plan = plan
        self._options = plan.options
        self._scope: Scope = plan.options.scope
        self._node = node
        database = None if self._scope.database is None else self._scope.database.encode()
        visible = visible_collections(
            show_system_events=self._options.show_system_events, resharding=plan.profile.shows_resharding_collections
        )
        prefix = b"^" + (USER_DATABASE if database is None else re.escape(database) + rb"\.")
        if self._scope.kind == "collection":
            # The patterns of the server end in $, which takes a line break at the end of a name for nothing.
            names = [(self._scope.collection or "").encode() + end for end in (b"", b"\n")]
            self._collections = [v.string_of(name) for name in names]
            self._namespaces = [v.string_of((database or b"") + b"." + name) for name in names]
        else:
            self._collections = [query.regex(b"^" + visible)]
            self._namespaces = [query.regex(prefix + visible)]
        if database is None:
            self._commands = query.regex(prefix + rb"\$cmd$")
            self._views = query.regex(prefix + rb"system\.views$")
        else:
            self._commands = v.string_of(database + b".$cmd")
            self._views = v.string_of(database + b".system.views")

    def whole(self) -> Filter:
        return any_of(
            every(self._writes(), self._not_migrated()),
            every(self._views_defined(), self._not_migrated()),
            every(_OP[b"c"], any_of(every(self._definitions(), self._not_migrated()), self._transactions())),
            every(self._announcements(), self._not_migrated()),
            every(self._unknown_operations(), self._not_migrated()),
        )

    def _not_migrated(self) -> Filter:
        if self._options.show_migration_events:
            return True
        unmarked = query.not_equal(b"fromMigrate", v.TRUE)
        return any_of(unmarked, _OP[b"c"]) if self._options.show_system_events else unmarked

    # ── writes of documents ──────────────────────────────────────────────────────────────────────────────────────────

    def _writes(self) -> Filter:
        return every(query.one_of(b"ns", self._namespaces), _kinds(self.by_kind()))

    def by_kind(self) -> dict[str, Filter]:
        """What the ``$match`` asks of each kind of write."""
        by_kind: dict[str, Filter] = {}
        rules = self._rules_of_writes()
        for kind, known in known_of_writes(self._plan).items():
            constant = v.object_of([(b"operationType", v.string(kind))])[1]
            by_kind[kind] = Terms(constant, known - rules[kind].keys(), rules[kind]).rewrite(self._node)
        return by_kind

    def _rules_of_writes(self) -> dict[str, dict[bytes, Rule]]:
        common: dict[bytes, Rule] = {b"clusterTime": moved_to(b"ts"), b"ns": NamespaceRule(self._scope)}
        if self._plan.shows_wall_time:
            common[b"wallTime"] = moved_to(b"wall")
        update = {**common, b"documentKey": moved_to(b"o2")}
        if not self._options.show_raw_update_description:
            update[b"updateDescription"] = updated_or_removed
        if self._options.full_document != "default":
            update[FULL_DOCUMENT] = lambda node, rest: None
        return {
            "insert": {**common, b"documentKey": inserted_key, FULL_DOCUMENT: moved_to(b"o")},
            "replace": {**common, b"documentKey": moved_to(b"o2"), FULL_DOCUMENT: moved_to(b"o")},
            "delete": {**common, b"documentKey": moved_to(b"o")},
            "update": update,
        }

    def _views_defined(self) -> Filter:
        """Writes to ``system.views``, whose events are definitions. With showSystemEvents they are in scope too."""
        shown = self._options.show_expanded_events or self._options.show_system_events
        if self._scope.kind == "collection" or not shown:
            return False
        return every(query.one_of(b"ns", [self._views]), field(b"op", in_=v.array_of(map(v.string, "iud"))))

    # ── commands ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _definitions(self) -> Filter:
        return every(
            query.one_of(b"ns", [self._commands]),
            any_of(*(self._definition(name) for name in COMMANDS), self._index_builds(), _unknown_command()),
        )

    def _index_builds(self) -> Filter:
        shown = index_builds_shown(self._options, self._plan.profile)
        return any_of(*(query.one_of(b"o." + name, self._collections) for name in shown))

    def _definition(self, name: bytes) -> Filter:
        in_scope: Filter
        if name == b"dropDatabase":
            in_scope = False if self._scope.kind == "collection" else exists(b"o.dropDatabase")
        elif name == b"renameCollection":
            in_scope = any_of(
                query.one_of(b"o.renameCollection", self._namespaces),
                every(exists(b"o.renameCollection"), query.one_of(b"o.to", self._namespaces)),
            )
        else:
            in_scope = query.one_of(b"o." + name, self._collections)
        return every(in_scope, self.asked_of_command(name))

    def asked_of_command(self, name: bytes) -> Filter:
        """What the ``$match`` asks of the command that ``name`` stands for; nothing where it ends the stream."""
        if COMMANDS[name] in self._scope.ending_operations:
            return True
        constant = v.object_of([(b"operationType", v.string(COMMANDS[name]))])[1]
        rules: dict[bytes, Rule] = {b"clusterTime": moved_to(b"ts")}
        if name not in (b"dropDatabase", b"renameCollection"):
            rules[b"ns"] = command_namespace(name, self._scope)
        terms = Terms(constant, _NEVER_IN_COMMANDS | {b"operationType"}, rules)
        return terms.rewrite(self._node)

    # ── transactions and no-ops ──────────────────────────────────────────────────────────────────────────────────────

    def _transactions(self) -> Filter:
        """The entries that commit a transaction, and those before them in its chain that hold something in scope: to
        ask for each of these by its time later would cost a round trip."""
        creates = any_of(*(query.one_of(b"o." + name, self._collections) for name in (b"create", b"createIndexes")))
        inner = any_of(
            query.one_of(b"o.applyOps.ns", self._namespaces),
            query.element(
                b"o.applyOps", every(query.one_of(b"ns", [self._commands]), any_of(creates, _unknown_command()))
            ),
        )
        last_of_chain = every(
            exists(b"prevOpTime"),
            field(b"prevOpTime.ts", gt=v.timestamp(0, 0)),
            query.not_equal(b"o.prepare", v.TRUE),
            query.not_equal(b"o.partialTxn", v.TRUE),
            exists(b"lsid"),
        )
        applied = every(exists(b"o.applyOps"), any_of(inner, last_of_chain))
        if not self._plan.profile.unwinds_apply_ops_without_session:
            # One without a session gives no event, but it may be of a later version, and is refused then.
            applied = every(applied, any_of(every(exists(b"lsid"), exists(b"txnNumber")), exists(b"lsid", False)))
        return every(any_of(applied, query.exists(b"o.commitTransaction")), self._of_the_commit())

    def _of_the_commit(self) -> Filter:
        """What the ``$match`` asks of the fields that all events of a transaction share. A chain's earlier members are
        read at other times: for them only what is the same in the whole chain counts."""
        rules: dict[bytes, Rule] = {}
        if not self._plan.profile.multi_op_is_no_transaction:
            rules = {b"lsid": moved_to(b"lsid"), b"txnNumber": moved_to(b"txnNumber")}
        return Terms(v.EMPTY_OBJECT[1], frozenset(), rules).rewrite(self._node)

    def _announcements(self) -> Filter:
        """No-ops that say something, known or not. Those that copy an entry say nothing: sessions of retryable
        writes move to another shard with them, in addition to their chunks."""
        says = every(exists(b"o2"), exists(b"o2.op", False), exists(b"o2.sessionMigrateCloneStart", False))
        announced = every(query.one_of(b"ns", self._namespaces), _OP[b"n"], says)
        if not ends_of_transactions_shown(self._options, self._plan.profile):
            return announced
        return any_of(announced, every(_OP[b"n"], query.one_of(b"o2." + END_OF_TRANSACTION, self._namespaces)))

    def _unknown_operations(self) -> Filter:
        if all(one is True for one in self.by_kind().values()):
            return False  # they are among the writes then
        known = v.array_of(map(v.string, sorted(KNOWN_OPERATIONS)))
        return every(query.one_of(b"ns", self._namespaces), field(b"op", nin=known))


@functools.cache
def _unknown_command() -> Filter:
    """A command that has no field of a known one's name."""
    return query.none_of(any_of(*(exists(b"o." + name) for name in sorted(KNOWN_COMMANDS))))


def _kinds(by_kind: dict[str, Filter]) -> Filter:
    """The kinds of write that pass, each with its own filter; kinds with the same one share it."""
    letters: dict[Filter, list[bytes]] = {}
    alone: list[Filter] = []
    if all(one is True for one in by_kind.values()):
        # Unknown operations must reach OplogMatch, which counts them.
        return field(b"op", nin=v.array_of([v.string("c"), v.string("n")]))
    for letter, kind in ((b"i", "insert"), (b"d", "delete")):
        letters.setdefault(by_kind[kind], []).append(letter)
    if by_kind["update"] == by_kind["replace"]:
        letters.setdefault(by_kind["update"], []).append(b"u")
    else:
        # An update with a delta may carry an _id too: $v says so, and is no field of a replacement as a rule.
        delta = any_of(exists(b"o._id", False), v.object_of([(b"o.$v", v.int32(2))]))
        alone.append(every(_OP[b"u"], delta, by_kind["update"]))
        alone.append(every(_OP[b"u"], exists(b"o._id"), by_kind["replace"]))
    together = (every(query.one_of(b"op", list(map(v.string_of, ops))), said) for said, ops in letters.items())
    return any_of(*together, *alone)
