"""What a predicate on an event means for the entries of one kind: the rewrite rules (semantics 8).

A kind of entry is one whose events have one operation type. Each rule takes one leaf of a parsed ``$match`` and gives a
filter on entries of its kind, and whether that says exactly the same; only then may it be negated.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final, NamedTuple, TypeAlias

from tailrace.core.event.change_event import encode_namespace
from tailrace.core.expression.match import tree
from tailrace.core.expression.match.test import document_test
from tailrace.core.expression.values import value as v
from tailrace.core.expression.values.value import Value
from tailrace.core.oplog.namespace import Scope
from tailrace.core.pipeline.pushdown import query
from tailrace.core.pipeline.pushdown.query import Filter
from tailrace.core.plan.conjuncts import fields_of, may_fail


class Said(NamedTuple):
    """A leaf as a filter. ``exact`` is false where the filter may pass more than the leaf does."""

    filter: Filter
    exact: bool = True


Rule: TypeAlias = Callable[[tree.Node, bytes], "Said | None"]


class Terms:
    """The rules for one kind of entry.

    ``constant``  a document with those fields of the event that are the same for every entry of this kind
    ``known``     the names of these fields, and of those that no event of this kind has
    ``rules``     for further fields by name: from a leaf and the rest of its path below the field to a filter
    """

    def __init__(self, constant: bytes, known: frozenset[bytes], rules: dict[bytes, Rule]) -> None:
        self._constant = constant
        self._known = known
        self._rules = rules

    def rewrite(self, node: tree.Node, wanted: bool = True) -> Filter:
        """A filter that every entry passes on whose event ``node`` is ``wanted``."""
        if isinstance(node, tree.And | tree.Or | tree.Nor):
            truth = wanted if not isinstance(node, tree.Nor) else not wanted
            parts = [self.rewrite(child, truth) for child in node.children]
            every = isinstance(node, tree.And) == truth
            return query.every(*parts) if every else query.any_of(*parts)
        if isinstance(node, tree.Not):
            return self.rewrite(node.child, not wanted)
        said = self._leaf(node)
        if said is None:
            return True
        if wanted:
            return said.filter
        return query.none_of(said.filter) if said.exact else True

    def _leaf(self, node: tree.Node) -> Said | None:
        fields = fields_of(node)
        if fields is None or may_fail(node):
            return None
        if fields <= self._known:
            return Said(document_test(node)(self._constant))
        path: bytes | None = getattr(node, "path", None)
        if path is None:
            return None
        name, dot, _ = path.partition(b".")
        rule = self._rules.get(name)
        return None if rule is None else rule(node, path[len(name) :] if dot else b"")


# ── rules ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def moved_to(place: bytes) -> Rule:
    """The field stands as a whole at ``place`` in the entry."""

    def rule(node: tree.Node, rest: bytes) -> Said | None:
        text = query.text_of(node, place + rest)
        return None if text is None else Said(text)

    return rule


def inserted_key(node: tree.Node, rest: bytes) -> Said | None:
    """The key of an insert: ``o2``, or on servers before 5.3, which wrote none, what ``o._id`` alone says about it."""
    stated = query.text_of(node, b"o2" + rest)
    if stated is None:
        return None
    bare: Filter = True
    if rest == b"._id" or rest.startswith(b"._id."):
        bare = query.text_of(node, b"o" + rest) or True
    with_key = query.every(query.exists(b"o2"), stated)
    return Said(query.any_of(with_key, query.every(query.exists(b"o2", False), bare)), exact=bare is not True)


def updated_or_removed(node: tree.Node, rest: bytes) -> Said | None:
    """``updateDescription``: what names one top-level field of the document stands in the delta under that name."""
    names = rest.split(b".")[1:]
    if names[:1] == [b"updatedFields"] and len(names) > 1 and names[1]:
        # A field that was not updated has no value there, so a test that passes for "missing" says nothing.
        if document_test(node)(b"\x05\x00\x00\x00\x00"):
            return None
        below = b".".join(names[1:])
        places = (b"o.diff.u." + below, b"o.diff.i." + below, b"o.$set." + below)
        texts = [query.text_of(node, place) for place in places]
        return Said(query.any_of(*(text or True for text in texts)), exact=False)
    if names == [b"removedFields"]:
        removed = _plain_names(node)
        if removed is not None:
            sections = (b"o.diff.d.", b"o.$unset.")
            found = (query.exists(section + name) for name in removed for section in sections)
            return Said(query.any_of(*found), exact=False)
    return None


def _plain_names(node: tree.Node) -> list[bytes] | None:
    """The strings that a leaf is equal to, if that is what it says and none of them has a dot."""
    values: tuple[Value, ...] = ()
    if isinstance(node, tree.Compare) and node.operator == "$eq":
        values = (node.value,)
    elif isinstance(node, tree.In) and not node.patterns:
        values = node.values
    names = [v.bytes_of(value) for value in values if value[0] == v.STRING]
    plain = bool(values) and len(names) == len(values) and all(name and b"." not in name for name in names)
    return names if plain else None


# ── namespaces ───────────────────────────────────────────────────────────────────────────────────────────────────────

_SAMPLE_DOCUMENT: Final = v.object_of([(b"ns", (v.OBJECT, encode_namespace(b"x", b"x")))])[1]
_TEXTS: Final = (v.STRING, v.SYMBOL)


def _operator(name: bytes, *arguments: Value) -> Value:
    return v.object_of([(name, v.array_of(arguments))])


#: The part of ``ns`` after its first dot; of an ``ns`` without one all of it.
_COLLECTION_OF_NS: Final = _operator(
    b"$substrBytes",
    v.string("$ns"),
    _operator(
        b"$add",
        _operator(b"$ifNull", _operator(b"$indexOfBytes", v.string("$ns"), v.string(".")), v.int32(-1)),
        v.int32(1),
    ),
    v.int32(-1),
)


class NamespaceRule:
    """``ns`` of documents' writes, whose entry has it as one string."""

    def __init__(self, scope: Scope) -> None:
        self._database = None if scope.database is None else scope.database.encode()

    def __call__(self, node: tree.Node, rest: bytes) -> Said | None:
        part = rest[1:]
        if part == b"":
            return self._test_whole(node)
        if part == b"db" and self._database is not None:
            constant = v.object_of([(b"ns", (v.OBJECT, encode_namespace(self._database, b"x")))])
            return Said(document_test(node)(constant[1]))
        if part in (b"db", b"coll"):
            return _text_rule(node, self._collection if part == b"coll" else _database, part == b"coll")
        return Said(document_test(node)(_SAMPLE_DOCUMENT))  # such a field no namespace has

    def _test_whole(self, node: tree.Node) -> Said | None:
        """``ns`` as a document: it is equal to one only if that has exactly the fields db and coll, in this order."""
        if isinstance(node, tree.Exists | tree.TypeIs):
            return Said(document_test(node)(_SAMPLE_DOCUMENT))
        if not isinstance(node, tree.Compare) or node.operator != "$eq" or node.value[0] != v.OBJECT:
            return None
        fields = v.fields_of(node.value[1])
        if [(name, kind) for name, kind, _ in fields] != [(b"db", v.STRING), (b"coll", v.STRING)]:
            texts = all(kind not in _TEXTS for _, kind, _ in fields)
            return Said(False) if texts or len(fields) != 2 else None
        database, collection = (v.bytes_of((kind, data)) for _, kind, data in fields)
        return Said(False) if b"." in database else Said(query.equal(b"ns", database + b"." + collection))

    def _collection(self, name: bytes) -> Value:
        if self._database is not None:
            return v.string_of(self._database + b"." + name)
        # \z, since $ would take a name with a line break after it for the name.
        return query.regex(rb"^[^.]+\." + re.escape(name) + rb"\z")


def _database(name: bytes) -> Value:
    return query.regex(b"^" + re.escape(name) + rb"\.")


def _text_rule(node: tree.Node, value_of: Callable[[bytes], Value], is_collection: bool) -> Said | None:
    """A leaf on a part of ``ns`` that is always there and always a string."""
    if isinstance(node, tree.Compare):
        if node.value[0] not in _TEXTS:
            return Said(document_test(node)(_SAMPLE_DOCUMENT))
        name = v.bytes_of(node.value)
        if node.operator != "$eq" or b"\x00" in name:
            return None
        return Said(query.one_of(b"ns", [value_of(name)]))
    if isinstance(node, tree.In):
        names = [v.bytes_of(value) for value in node.values if value[0] in _TEXTS]
        if any(b"\x00" in name for name in names):
            return None
        parts = [query.one_of(b"ns", [value_of(name) for name in names])]
        for pattern in node.patterns:
            if not is_collection:
                return None
            parts.append(_pattern(pattern))
        return Said(query.any_of(*parts))
    if isinstance(node, tree.Pattern):
        return Said(_pattern(node)) if is_collection else None
    if isinstance(node, tree.Exists | tree.TypeIs | tree.Size | tree.Mod | tree.ElementMatchesObject):
        return Said(document_test(node)(_SAMPLE_DOCUMENT))
    return None


def _pattern(node: tree.Pattern) -> Value:
    """The pattern on the part of ``ns`` after the first dot."""
    arguments = [
        (b"input", _COLLECTION_OF_NS),
        (b"regex", v.object_of([(b"$literal", v.string_of(node.pattern))])),
        (b"options", v.string_of(node.options)),
    ]
    return v.object_of([(b"$expr", v.object_of([(b"$regexMatch", v.object_of(arguments))]))])


def command_namespace(name: bytes, scope: Scope) -> Rule:
    """``ns`` of the event of a command that names its collection in ``o.<name>``: the collection alone is rewritten."""

    def rule(node: tree.Node, rest: bytes) -> Said | None:
        if rest == b".coll" and isinstance(node, tree.Compare | tree.In | tree.Pattern):
            text = query.text_of(node, b"o." + name)
            return None if text is None else Said(text)
        if rest == b".db" and scope.database is not None:
            constant = v.object_of([(b"ns", (v.OBJECT, encode_namespace(scope.database.encode(), b"x")))])
            return Said(document_test(node)(constant[1]))
        return None

    return rule
