"""Random documents and updates of them, as a delta (``$v: 2``) and as an update description; and masks made by other
means than the ones under test: plain Python on decoded documents."""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any

import bson
from cryptography.hazmat.primitives.ciphers.aead import AESSIV

SECRET = b"a secret of the tests, long enough"
NAMES = ("a", "b", "c", "email", "0", "7", "x.y", "x.0", "")
RULE_PATHS = ("a", "b", "a.b", "a.*", "**.email", "**", "*.b", "c.**.a", "x.y", "x", "a.b.c", "*", "b.a", "email")
ACTIONS = ("drop", "hash", "tokenise")


def rules(rnd: Random) -> dict[str, str]:
    """A few rules of a collection."""
    return {rnd.choice(RULE_PATHS): rnd.choice(ACTIONS) for _ in range(rnd.randint(1, 4))}


def scalar(rnd: Random) -> Any:
    """A scalar value."""
    return rnd.choice(
        (rnd.randint(0, 3), 2.5, "text", "", None, True, bson.Int64(7), b"\0x", bson.MinKey(), float("inf"))
    )


def value(rnd: Random, depth: int = 3) -> Any:
    """Any value."""
    kind = rnd.random()
    if depth == 0 or kind < 0.4:
        return scalar(rnd)
    if kind < 0.7:
        return [value(rnd, depth - 1) for _ in range(rnd.randint(0, 3))]
    return fields(rnd, depth - 1)


def fields(rnd: Random, depth: int = 3) -> dict[str, Any]:
    """A document without ``_id``."""
    return {name: value(rnd, depth) for name in rnd.sample(NAMES, rnd.randint(0, 4))}


@dataclass
class Change:
    """An update: the document ``after`` it, and what the server says about it. ``paths``: what the dotted names stand
    for."""

    after: dict[str, Any]
    diff: dict[str, Any]
    updated: dict[str, Any] = field(default_factory=dict)
    removed: list[str] = field(default_factory=list)
    truncated: list[dict[str, Any]] = field(default_factory=list)
    paths: dict[str, tuple[str | int, ...]] = field(default_factory=dict)

    @property
    def delta(self) -> bytes:
        """The ``o`` of its oplog entry."""
        return bson.encode({"$v": 2, "diff": self.diff})

    @property
    def description(self) -> dict[str, Any]:
        """Its update description."""
        split = {name: list(map(_step, path)) for name, path in self.paths.items() if name != ".".join(map(str, path))}
        found = {"updatedFields": self.updated, "removedFields": self.removed, "truncatedArrays": self.truncated}
        return {**found, **({"disambiguatedPaths": split} if split else {})}

    def note(self, path: tuple[str | int, ...]) -> str:
        name = ".".join(map(str, path))
        self.paths[name] = path
        return name


def _step(part: str | int) -> str | int:
    return part


def change(rnd: Random, document: dict[str, Any]) -> Change:
    """A random update of ``document``."""
    made = Change({}, {})
    identifier = {"_id": document["_id"]} if "_id" in document else {}
    rest = {name: inner for name, inner in document.items() if name != "_id"}
    after, made.diff = _document(rnd, rest, made, ())
    made.after = {**identifier, **after}
    made.diff = made.diff or {"u": {}}
    return made


def _document(rnd: Random, old: dict[str, Any], made: Change, at: tuple[str | int, ...]) -> tuple[dict[str, Any], Any]:
    after: dict[str, Any] = {}
    deleted, updated, inserted, nested = {}, {}, {}, {}
    for name, inner in old.items():
        turn, path = rnd.random(), (*at, name)
        if turn < 0.2:
            deleted[name] = False
            made.removed.append(made.note(path))
        elif turn < 0.5 and isinstance(inner, dict | list):
            after[name], below = (_document if isinstance(inner, dict) else _array)(rnd, inner, made, path)
            if below:
                nested[f"s{name}"] = below
        elif turn < 0.7:
            after[name] = updated[name] = made.updated[made.note(path)] = value(rnd)
        else:
            after[name] = inner
    for name in rnd.sample(NAMES, rnd.randint(0, 2)):
        if name not in old:
            after[name] = inserted[name] = made.updated[made.note((*at, name))] = value(rnd)
    sections = {"d": deleted, "u": updated, "i": inserted}
    return after, {**{name: part for name, part in sections.items() if part}, **nested}


def _array(rnd: Random, old: list[Any], made: Change, at: tuple[str | int, ...]) -> tuple[list[Any], Any]:
    diff: dict[str, Any] = {"a": True}
    after = list(old)
    if len(after) > 1 and rnd.random() < 0.3:
        del after[1:]
        diff["l"] = 1
        made.truncated.append({"field": made.note(at), "newSize": 1})
    for place in range(len(after)):
        inner = after[place]
        if rnd.random() < 0.3:
            after[place] = diff[f"u{place}"] = made.updated[made.note((*at, place))] = value(rnd)
        elif rnd.random() < 0.5 and isinstance(inner, dict | list):
            after[place], below = (_document if isinstance(inner, dict) else _array)(rnd, inner, made, (*at, place))
            if below:
                diff[f"s{place}"] = below
    if "l" not in diff and rnd.random() < 0.3:  # past the end: the elements in between become null
        place = len(after) + rnd.randint(0, 2)
        after += [None] * (place - len(after))
        after.append(diff.setdefault(f"u{place}", value(rnd)))
        made.updated[made.note((*at, place))] = after[place]
    return after, diff if len(diff) > 1 else {}


def applied(document: dict[str, Any], description: dict[str, Any], paths: dict[str, tuple[Any, ...]]) -> Any:
    """What a consumer makes of a document by an update description."""
    made = bson.decode(bson.encode(document))
    for one in description["truncatedArrays"]:
        array = _inside(made, paths[one["field"]])
        del array[one["newSize"] :]
    for name in description["removedFields"]:
        _inside(made, paths[name][:-1]).pop(paths[name][-1], None)
    for name, new in description["updatedFields"].items():
        place, last = _inside(made, paths[name][:-1]), paths[name][-1]
        if isinstance(place, list):
            place += [None] * (last + 1 - len(place))
        place[last] = new
    return made


def _inside(document: Any, path: tuple[Any, ...]) -> Any:
    for part in path:
        document = document[part]
    return document


class PlainMasks:
    """Masks by regular expressions over whole paths."""

    def __init__(self, given: dict[str, str]) -> None:
        self._rules = [(_expression(path), action) for path, action in given.items()]

    def document(self, document: dict[str, Any]) -> dict[str, Any]:
        """A document, masked."""
        return dict(self._fields(document.items(), ()))

    def event(self, event: dict[str, Any]) -> dict[str, Any]:
        """A change event, masked."""
        made = dict(event)
        for name in ("fullDocument", "fullDocumentBeforeChange"):
            if made.get(name) is not None:
                made[name] = self.document(made[name])
        for name in ("operationDescription", "stateBeforeChange"):
            if name in made:
                made[name] = _without_filters(made[name])
        if "updateDescription" in made:
            made["updateDescription"] = self._description(made["updateDescription"])
        return made

    def _description(self, given: dict[str, Any]) -> dict[str, Any]:
        def stays(name: str) -> bool:
            return "drop" not in self._actions(_parts(name))

        made = dict(given)
        made["updatedFields"] = dict(self._fields(given["updatedFields"].items(), ()))
        made["removedFields"] = [name for name in given["removedFields"] if stays(name)]
        made["truncatedArrays"] = [one for one in given["truncatedArrays"] if stays(one["field"])]
        if "disambiguatedPaths" in given:
            made["disambiguatedPaths"] = {name: one for name, one in given["disambiguatedPaths"].items() if stays(name)}
        return made

    def _fields(self, items: Any, at: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
        for name, inner in items:
            if not at and name == "_id":
                yield name, inner
                continue
            path = (*at, *_parts(name))
            actions = self._actions(path)
            if "drop" not in actions:
                yield name, self._masked(inner, path, actions)

    def _masked(self, inner: Any, path: tuple[str, ...], actions: set[str]) -> Any:
        if isinstance(inner, dict):
            return dict(self._fields(inner.items(), path))
        if isinstance(inner, list):
            return [self._masked(one, path, actions) for one in inner]
        if not actions or inner is None or isinstance(inner, bson.MinKey | bson.MaxKey):
            return inner
        raw = bson.encode({"": inner})
        content = raw[4:5] + raw[6:-1]
        if "hash" in actions:
            return hmac.new(_key("hash"), content, hashlib.sha256).hexdigest()
        return "tok1_" + base64.urlsafe_b64encode(AESSIV(_key("tokenise")).encrypt(content, None)).decode().rstrip("=")

    def _actions(self, path: tuple[str, ...]) -> set[str]:
        ways = ["".join(f"{part}\0" for part in path[:size]) for size in range(len(path) + 1)]
        return {action for rule, action in self._rules if any(rule.fullmatch(way) for way in ways)}


def _parts(name: str) -> tuple[str, ...]:
    return tuple(part for part in name.split(".") if not re.fullmatch("[0-9]+", part))


def _without_filters(definition: Any) -> Any:
    """A definition without those of its parts that may hold a value of a document."""
    if isinstance(definition, list):
        return [_without_filters(one) for one in definition]
    if not isinstance(definition, dict):
        return definition
    hidden = ("validator", "partialFilterExpression")
    return {name: _without_filters(one) for name, one in definition.items() if name not in hidden}


def _key(purpose: str) -> bytes:
    return hmac.new(SECRET, f"tailrace masks 1: {purpose}".encode(), "sha512").digest()


def _expression(path: str) -> re.Pattern[str]:
    parts = {"*": "[^\0]*\0", "**": "(?:[^\0]*\0)*"}
    return re.compile("".join(parts.get(part, re.escape(part) + "\0") for part in path.split(".")))
