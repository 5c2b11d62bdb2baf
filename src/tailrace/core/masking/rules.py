"""The rules of masks: which values of which collections are masked, and how.

A path is matched against the names on the way to a value, each split at its dots. A name of digits only is passed over:
it may be an index of an array, and in an update's dotted path that cannot be known. So one rule reaches the same values
in a document, in a delta and in an update description, in whatever form they are there.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Final

from tailrace.core.oplog.selection import Selection
from tailrace.core.user_text import nearest
from tailrace.errors import UsageError

#: What is done to a value: the weakest first. Where several rules reach it, the strongest counts.
ACTIONS: Final = ("tokenise", "hash", "drop")
TOKENISE, HASH, DROP = 1, 2, 3
ANY: Final = b"*"
ANY_DEPTH: Final = b"**"
ID: Final = b"_id"
_COMPONENTS_MAX: Final = 100
#: How many names, which are the user's data, are remembered for one place.
_CHILDREN_MAX: Final = 4096

_Reached = tuple[int, int]


@dataclass(frozen=True, slots=True)
class MaskRule:
    """What is done to the values at or below ``path`` in the collections that match ``pattern``.

    ``action``  the number of one of ``ACTIONS``, beginning with 1
    """

    pattern: str
    path: tuple[bytes, ...]
    action: int

    @property
    def is_wild(self) -> bool:
        """Whether no name is in the path. Such a rule means every field but ``_id``."""
        return all(one in (ANY, ANY_DEPTH) for one in self.path)


@dataclass(frozen=True, slots=True)
class MaskRules:
    """Checked rules, in the order in which they are declared."""

    rules: tuple[MaskRule, ...]

    @classmethod
    def of(cls, given: object, where: str = "masks.rules") -> MaskRules:
        """Check ``{pattern of namespaces: {path: action}}``. Raises UsageError, which names the place."""
        if not isinstance(given, Mapping) or not given:
            raise UsageError(
                f"{where} must map collections to paths and what is done to them",
                hint="Such as: shop.customers: {email: hash, card.number: tokenise, notes: drop}",
            )
        found = [rule for pattern, paths in given.items() for rule in _of_pattern(pattern, paths, where)]
        rules = cls(tuple(found))
        for rule in found:
            if rule.path[0] == ID or tree_of([rule], guarded=False).step(ID).action:
                raise UsageError(
                    f"{where}.{rule.pattern}: the path {_shown(rule.path)} reaches _id, which cannot be masked: it "
                    "is in the resume token too",
                    hint="Mask other fields; where _id identifies a person, give documents another _id",
                )
        return rules

    @property
    def needs_key(self) -> bool:
        """Whether a rule hashes or tokenises."""
        return any(rule.action != DROP for rule in self.rules)

    @property
    def digest(self) -> str:
        """A hash of what the rules say, whatever their order: 16 hexadecimal digits."""
        said = sorted((rule.pattern, _shown(rule.path), ACTIONS[rule.action - 1]) for rule in self.rules)
        return sha256(json.dumps(said).encode()).hexdigest()[:16]

    def tree(self, namespace: str) -> MaskNode | None:
        """The rules of a collection, as the place of its documents' beginning; ``None`` if it has none."""
        rules = [rule for rule in self.rules if Selection((rule.pattern,)).covers(namespace)]
        return tree_of(rules) if rules else None

    def of_namespace(self, namespace: str) -> frozenset[tuple[tuple[bytes, ...], int]]:
        """The paths of a collection, and what is done to each."""
        return frozenset(
            (rule.path, rule.action) for rule in self.rules if Selection((rule.pattern,)).covers(namespace)
        )


def _of_pattern(pattern: object, paths: object, where: str) -> Iterable[MaskRule]:
    if not isinstance(pattern, str):
        raise UsageError(f"{where}: collections are named by text such as shop.customers, not by {pattern!r}")
    Selection.of([pattern], where)
    if not isinstance(paths, Mapping) or not paths:
        raise UsageError(f"{where}.{pattern} must map paths to {', '.join(ACTIONS)}")
    for path, action in paths.items():
        if action not in ACTIONS:
            meant = nearest(action, ACTIONS) if isinstance(action, str) else None
            hint = f"Did you mean '{meant}'?" if meant else f"The actions are {', '.join(ACTIONS)}"
            raise UsageError(f"{where}.{pattern}: the action for {path} is not known", hint=hint)
        yield MaskRule(pattern, _path(path, f"{where}.{pattern}"), ACTIONS.index(action) + 1)


def _path(path: object, where: str) -> tuple[bytes, ...]:
    if not isinstance(path, str) or not path or "\0" in path:
        raise UsageError(f"{where}: a path is text such as card.number, not {path!r}")
    try:
        found = tuple(part.encode() for part in path.split("."))
    except UnicodeEncodeError:
        raise UsageError(f"{where}: a path is not UTF-8") from None
    if len(found) > _COMPONENTS_MAX:
        raise UsageError(f"{where}: a path has more than {_COMPONENTS_MAX} names")
    for part in found:
        if not part:
            raise UsageError(f"{where}: the path {path} has an empty name")
        if part.isdigit():
            raise UsageError(
                f"{where}: the path {path} names a position",
                hint="Leave the number out: items.price means the price of every item",
            )
        if b"*" in part and part not in (ANY, ANY_DEPTH):
            raise UsageError(
                f"{where}: in the path {path}, * stands for a part of a name",
                hint="* is one whole name, ** any number of them: phones.*, **.email",
            )
    return found


def _shown(path: Iterable[bytes]) -> str:
    return b".".join(path).decode()


class MaskNode:
    """A place in documents: what is done to the values there, and where one of its fields is.

    ``action``     for scalars here; 0: none. For objects and arrays too, if it is ``DROP``
    ``children``   the places of fields that were asked for, by their names
    ``untouched``  no value here or below is masked
    ``guarded``    the place is in a document's ``_id``: a value with an action is refused
    """

    __slots__ = ("_at", "_rules", "action", "children", "guarded", "untouched")

    def __init__(
        self, rules: tuple[MaskRule, ...], at: frozenset[_Reached], action: int, *, guarded: bool = False
    ) -> None:
        self._rules = rules
        self._at = at
        self.children: dict[bytes, MaskNode] = {}
        self.action = action
        self.guarded = guarded
        self.untouched = not at and not action

    def step(self, name: bytes) -> MaskNode:
        """The place of the field ``name``, whose dots lead deeper. The same for every index of an array."""
        found = self.children.get(name)
        if found is None:
            found = self
            for part in name.split(b"."):
                if not part.isdigit():
                    found = found._below(part)
            if len(self.children) >= _CHILDREN_MAX:
                self.children.clear()
            self.children[name] = found
        return found

    def _below(self, part: bytes) -> MaskNode:
        """The place one name deeper."""
        at: set[_Reached] = set()
        for number, place in self._at:
            wanted = self._rules[number].path[place]
            if wanted == ANY_DEPTH:
                at.add((number, place))
            elif wanted in (ANY, part):
                at.add((number, place + 1))
        return _node(self._rules, at, self.action, guarded=self.guarded)


class MaskRoot(MaskNode):
    """The beginning of a document, whose field ``_id`` only rules with a name in them can reach."""

    __slots__ = ("_id",)

    def __init__(self, rules: tuple[MaskRule, ...], at: frozenset[_Reached], action: int, *, guarded: bool) -> None:
        super().__init__(rules, at, action)
        named = [(number, 0) for number, rule in enumerate(rules) if not rule.is_wild]
        self._id = self.children[ID] = _node(rules, _closed(rules, named)[0], 0, guarded=guarded)._below(ID)

    def step(self, name: bytes) -> MaskNode:
        return self._id if name == ID else super().step(name)


def tree_of(rules: Iterable[MaskRule], *, guarded: bool = True) -> MaskRoot:
    """The rules as the beginning of a document. ``guarded``: a value of ``_id`` that they reach is refused."""
    given = tuple(rules)
    at, action = _closed(given, [(number, 0) for number in range(len(given))])
    return MaskRoot(given, at, action, guarded=guarded)


def _node(rules: tuple[MaskRule, ...], at: Iterable[_Reached], action: int, *, guarded: bool) -> MaskNode:
    closed, reached = _closed(rules, at)
    return MaskNode(rules, closed, max(action, reached), guarded=guarded)


def _closed(rules: tuple[MaskRule, ...], at: Iterable[_Reached]) -> tuple[frozenset[_Reached], int]:
    """The places in paths that are reached, since ``**`` may stand for nothing, and the action of paths that end."""
    pending, seen, action = list(at), set(), 0
    while pending:
        number, place = one = pending.pop()
        path = rules[number].path
        if place == len(path):
            action = max(action, rules[number].action)
        elif one not in seen:
            seen.add(one)
            if path[place] == ANY_DEPTH:
                pending.append((number, place + 1))
    return frozenset(seen), action
