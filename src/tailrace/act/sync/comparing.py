"""Documents of both sides side by side, as bytes: which are missing, extra or different, and where."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from tailrace.core import raw_bson
from tailrace.read.snapshot.chunk import id_alone
from tailrace.read.snapshot.state import shown


@dataclass(frozen=True, slots=True)
class DocumentDifference:
    """A document that the two do not have alike.

    ``id``   its ``_id`` as JSON
    ``how``  "missing" on the target, "extra" there, or what is otherwise
    """

    namespace: str
    id: str
    how: str

    def __str__(self) -> str:
        return f"{self.namespace}: {self.id}: {self.how}"


def compare_documents(namespace: str, source: Iterable[bytes], target: Iterable[bytes]) -> Iterator[DocumentDifference]:
    """How the documents of a range differ, by the bytes of their ``_id``."""
    theirs: dict[bytes, bytes] = {}
    for document in target:
        key = id_alone(document)
        if key in theirs:
            yield DocumentDifference(namespace, shown_id(document), "is on the target twice")
        theirs[key] = document
    seen: set[bytes] = set()
    for document in source:
        key = id_alone(document)
        if key in seen:
            yield DocumentDifference(namespace, shown_id(document), "two shards have this _id")
        seen.add(key)
        found = theirs.get(key)
        if found is None:
            yield DocumentDifference(namespace, shown_id(document), "missing")
        elif found != document:
            yield DocumentDifference(namespace, shown_id(document), how_they_differ(document, found))
    for key, document in theirs.items():
        if key not in seen:
            yield DocumentDifference(namespace, shown_id(document), "extra")


def compare_places(
    namespace: str, mine: Sequence[tuple[bytes, bytes]], theirs: Sequence[tuple[bytes, bytes]]
) -> Iterator[DocumentDifference]:
    """How two sequences of documents differ: by what is in them, or where it lies."""
    if mine == theirs:
        return
    here, there = dict(mine), dict(theirs)
    alike = True
    for key, digest in here.items():
        if there.get(key) != digest:
            alike = False
            how = "missing" if key not in there else "other bytes"
            yield DocumentDifference(namespace, shown(key), how)
    for key in there.keys() - here.keys():
        alike = False
        yield DocumentDifference(namespace, shown(key), "extra")
    if alike:
        place = next((one[0] for one, other in zip(mine, theirs, strict=False) if one != other), mine[-1][0])
        yield DocumentDifference(namespace, shown(place), "is at another place")


def how_they_differ(mine: bytes, theirs: bytes) -> str:
    """What differs between two documents with one ``_id``: the first such field, by name."""
    return _differing(mine, theirs, "") or "other bytes"


def _differing(mine: bytes, theirs: bytes, path: str) -> str:
    here, there = list(raw_bson.elements(mine)), list(raw_bson.elements(theirs))
    if [one.name for one in here] != [one.name for one in there]:
        if sorted(one.name for one in here) == sorted(one.name for one in there):
            return f"the order of the fields{' of ' + path if path else ''}"
        gone = {one.name for one in here} - {one.name for one in there}
        new = {one.name for one in there} - {one.name for one in here}
        parts = [
            f"{word} {path}{_name(sorted(names)[0])}" for word, names in (("lacks", gone), ("also has", new)) if names
        ]
        return (
            "the target " + " and ".join(parts) if parts else f"how often a field occurs{' in ' + path if path else ''}"
        )
    for one, other in zip(here, there, strict=True):
        where = f"{path}{_name(one.name)}"
        if one.type != other.type:
            types = raw_bson.type_name(one.type), raw_bson.type_name(other.type)
            return f"{where} is {types[0]} at the source, {types[1]} at the target"
        value, found = raw_bson.value(mine, one), raw_bson.value(theirs, other)
        if value != found:
            inside = one.type in (raw_bson.OBJECT, raw_bson.ARRAY)
            return (_differing(value, found, f"{where}.") if inside else "") or f"the value of {where}"
    return ""


def _name(name: bytes) -> str:
    return name.decode("utf-8", "backslashreplace")


def shown_id(document: bytes) -> str:
    return shown(id_alone(document))
