"""The test of an oplog entry before it is transformed: can its event pass the user's ``$match``?

What an event will hold is mostly plain from its entry. That part of it is put together as a document, and the parts of
the ``$match`` are asked in three values: true, false, and unknown where they ask for something else (an image, the
description of an update, the resume token). Only an entry of which one part is false is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

from tailrace.core import raw_bson
from tailrace.core.event.change_event import encode_cluster_time, encode_namespace
from tailrace.core.expression.match import tree
from tailrace.core.expression.match.test import document_test
from tailrace.core.expression.values.compare import SIMPLE, Order
from tailrace.core.oplog.entry import OplogEntry, first_elements
from tailrace.core.oplog.namespace import split_namespace
from tailrace.core.plan.conjuncts import BEFORE_CHANGE, FULL_DOCUMENT, fields_of, may_fail
from tailrace.core.plan.plan import Plan
from tailrace.core.raw_bson import DATE, INT64, OBJECT, STRING, encode_document, encode_element, encode_string
from tailrace.core.stage.oplog_match import CRUD
from tailrace.core.stage.transform import SYSTEM_VIEWS, is_replacement
from tailrace.core.stage.unwind_transaction import is_commit
from tailrace.errors import OplogFormatError

#: The event of a part of an entry: the fields that are known, as a document, and their names.
Known: TypeAlias = tuple[bytes, frozenset[bytes]]
_EntryAnswer: TypeAlias = Callable[[bytes, frozenset[bytes]], "bool | None"]

#: The commands that give events: the field that names each, and its operation type, in the transform's order.
COMMANDS: Final[dict[bytes, str]] = {
    b"drop": "drop",
    b"renameCollection": "rename",
    b"dropDatabase": "dropDatabase",
    b"create": "create",
    b"createIndexes": "createIndexes",
    b"commitIndexBuild": "createIndexes",
    b"dropIndexes": "dropIndexes",
    b"collMod": "modify",
}
_OF_THE_COMMIT: Final = frozenset((b"clusterTime", b"wallTime", b"lsid", b"txnNumber"))
_UPDATE_DESCRIPTIONS: Final = frozenset((b"updateDescription", b"rawUpdateDescription"))
_OF_EVERY_WRITE: Final = frozenset((b"operationType", b"ns", b"documentKey", b"to", *_OF_THE_COMMIT))
_OF_EVERY_COMMAND: Final = frozenset(
    (b"operationType", b"ns", b"documentKey", FULL_DOCUMENT, BEFORE_CHANGE, *_UPDATE_DESCRIPTIONS, *_OF_THE_COMMIT)
)


def known_of_writes(plan: Plan) -> dict[str, frozenset[bytes]]:
    """For each operation type of a document's write, the names of the fields that its entry tells, or that its event
    never has."""
    options = plan.options
    before = frozenset((BEFORE_CHANGE,)) if options.full_document_before_change == "off" else frozenset[bytes]()
    update = _OF_EVERY_WRITE | before | {b"rawUpdateDescription", b"updateDescription"}
    update -= {b"rawUpdateDescription" if options.show_raw_update_description else b"updateDescription"}
    if options.full_document == "default":
        update |= {FULL_DOCUMENT}
    whole = _OF_EVERY_WRITE | _UPDATE_DESCRIPTIONS | {FULL_DOCUMENT}
    return {"insert": whole | {BEFORE_CHANGE}, "replace": whole | before, "delete": whole | before, "update": update}


class EntryTest:
    """Whether the event of an entry, or of an operation out of a transaction, may pass all of ``nodes``.

    True wherever that is not certainly false, and always for what the stream itself reads: commands that invalidate it,
    no-ops of the sharding code, definitions of views, entries that the transform will refuse.

    ``sessions``  parts that ask for ``lsid`` or ``txnNumber`` alone. The server asks these of a document's write as it
                  stands in the oplog, where a retryable write has both although its event has neither (6.0.27)
    ``views``     parts that are asked of a definition of a view as of any write to ``system.views``: the server does so
                  where only showSystemEvents shows it, and then shows the drop of a view (6.0.27, 7.0.28)
    """

    def __init__(
        self,
        plan: Plan,
        nodes: Sequence[tree.Node],
        sessions: Sequence[tree.Node] = (),
        views: Sequence[tree.Node] = (),
        order: Order = SIMPLE,
    ) -> None:
        self._of_views = [_answer_of(node, order) for node in views]
        self._answers = [_answer_of(node, order) for node in nodes]
        self._sessions = [document_test(node) for node in sessions]
        self._plan = plan
        self._scope = plan.options.scope.kind
        self._ending = plan.options.scope.ending_operations
        self._known = known_of_writes(plan)

    @property
    def asks_for_session(self) -> bool:
        """Whether the answer depends on more of the entry than its event shows."""
        return bool(self._sessions)

    def __call__(self, entry: OplogEntry) -> bool:
        try:
            view = self._view(entry)
        except OplogFormatError:
            return True  # the transform says what is wrong
        if view is None:
            return True
        if self._sessions and entry.operation in CRUD:
            session = encode_document(*self._of_the_commit(entry, in_transaction=True))
            if not all(test(session) for test in self._sessions):
                return False
        document, known = view
        answers = self._of_views if self._defines_view(entry) else self._answers
        return all(answer(document, known) is not False for answer in answers)

    def _view(self, entry: OplogEntry) -> Known | None:
        if entry.operation in CRUD:
            return None if self._defines_view(entry) and not self._of_views else self._write(entry)
        return self._command(entry) if entry.operation == "c" else None

    def _defines_view(self, entry: OplogEntry) -> bool:
        is_write = self._scope != "collection" and entry.operation in CRUD
        return is_write and split_namespace(entry.namespace)[1] == SYSTEM_VIEWS

    def _write(self, entry: OplogEntry) -> Known | None:
        body = entry.o
        if body is None or entry.collection_uuid is None:
            return None
        key: bytes | None
        full_document: bytes | None = None
        if entry.operation == "i":
            operation_type, key, full_document = "insert", entry.o2, body
        elif entry.operation == "d":
            operation_type, key = "delete", body
        elif is_replacement(body, by_id=self._plan.profile.replacements_may_have_v):
            operation_type, key, full_document = "replace", entry.o2, body
        else:
            operation_type, key = "update", entry.o2
        known = self._known[operation_type]
        parts = [_text(b"operationType", operation_type), *self._of_the_commit(entry)]
        parts.append(encode_element(OBJECT, b"ns", encode_namespace(*split_namespace(entry.namespace))))
        if full_document is not None:
            parts.append(encode_element(OBJECT, FULL_DOCUMENT, full_document))
        if key is not None:
            parts.append(encode_element(OBJECT, b"documentKey", key))
        elif entry.operation == "i":
            known -= {b"documentKey"}  # its shard key may stand in a catalog
        return encode_document(*parts), self._with_wall_time(entry, known)

    def _command(self, entry: OplogEntry) -> Known | None:
        if entry.o is None:
            return None
        if is_commit(entry):
            known = _OF_THE_COMMIT
            if entry.multi_op:
                known -= {b"lsid", b"txnNumber"}
            parts = self._of_the_commit(entry, in_transaction=True)
            return encode_document(*parts), self._with_wall_time(entry, known)
        fields = first_elements(entry.o)
        name = next((name for name in COMMANDS if name in fields), None)
        if name is None or COMMANDS[name] in self._ending:
            return None  # the stream must see what ends it
        operation_type = COMMANDS[name]
        known = _OF_EVERY_COMMAND
        parts = [_text(b"operationType", operation_type), *self._of_the_commit(entry)]
        database = split_namespace(entry.namespace)[0]
        if name == b"renameCollection":
            known -= {b"ns"}
        elif name == b"dropDatabase":
            parts.append(encode_element(OBJECT, b"ns", encode_namespace(database, None)))
        elif fields[name].type == STRING:
            collection = raw_bson.read_string(entry.o, fields[name].value_start)
            parts.append(encode_element(OBJECT, b"ns", encode_namespace(database, collection)))
        else:
            return None
        return encode_document(*parts), self._with_wall_time(entry, known)

    def _of_the_commit(self, entry: OplogEntry, *, in_transaction: bool | None = None) -> list[bytes]:
        """The fields that a transaction's operations share with the entry that commits it."""
        parts = [encode_cluster_time(entry.cluster_time)]
        if entry.wall_ms is not None and self._plan.shows_wall_time:
            parts.append(encode_element(DATE, b"wallTime", raw_bson.encode_int64(entry.wall_ms)))
        if entry.in_transaction if in_transaction is None else in_transaction:
            if entry.txn_number is not None:
                parts.append(encode_element(INT64, b"txnNumber", raw_bson.encode_int64(entry.txn_number)))
            if entry.lsid is not None:
                parts.append(encode_element(OBJECT, b"lsid", entry.lsid))
        return parts

    def _with_wall_time(self, entry: OplogEntry, known: frozenset[bytes]) -> frozenset[bytes]:
        """An entry without the time that its event must show is an error, which the transform raises."""
        return known - {b"wallTime"} if entry.wall_ms is None and self._plan.shows_wall_time else known


def _text(name: bytes, text: str) -> bytes:
    return encode_element(STRING, name, encode_string(text))


def _answer_of(node: tree.Node, order: Order) -> _EntryAnswer:
    """The node's truth for what is known about an event, or ``None`` where that does not tell."""
    if isinstance(node, tree.And):
        return _junction([_answer_of(child, order) for child in node.children], decides=False)
    if isinstance(node, tree.Or):
        return _junction([_answer_of(child, order) for child in node.children], decides=True)
    if isinstance(node, tree.Nor):
        return _negation(_junction([_answer_of(child, order) for child in node.children], decides=True))
    if isinstance(node, tree.Not):
        return _negation(_answer_of(node.child, order))
    fields = fields_of(node)
    if fields is None or may_fail(node):
        return lambda document, known: None
    test = document_test(node, order)
    return lambda document, known: test(document) if fields <= known else None


def _junction(answers: list[_EntryAnswer], *, decides: bool) -> _EntryAnswer:
    def answer(document: bytes, known: frozenset[bytes]) -> bool | None:
        result: bool | None = not decides
        for one in answers:
            truth = one(document, known)
            if truth is decides:
                return decides
            if truth is None:
                result = None
        return result

    return answer


def _negation(inner: _EntryAnswer) -> _EntryAnswer:
    def answer(document: bytes, known: frozenset[bytes]) -> bool | None:
        truth = inner(document, known)
        return None if truth is None else not truth

    return answer
