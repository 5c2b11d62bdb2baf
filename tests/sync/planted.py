"""Faults put back into the product, which the fuzz must find."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import pytest

from tailrace.act.sync import indexes, writer
from tailrace.act.sync.follower import Follower
from tailrace.core import raw_bson


def _window_torn(patch: pytest.MonkeyPatch) -> None:
    """A segment's last document is left out, but its position is noted."""
    write = writer.ChangesWriter.write

    def torn(self: Any, session: Any, documents: Any, *rest: Any, **named: Any) -> None:
        write(self, session, documents[:-1] if len(documents) > 3 else documents, *rest, **named)

    patch.setattr(writer.ChangesWriter, "write", torn)


def _change_left_out(patch: pytest.MonkeyPatch) -> None:
    """The last of several changes of a document is not applied."""
    works = writer._Table._works

    def left_out(self: Any, documents: Any) -> Any:
        shorter = [one._replace(changes=one.changes[:-1]) if len(one.changes) > 2 else one for one in documents]
        return works(self, shorter)

    patch.setattr(writer._Table, "_works", left_out)


def _unmatched_duplicate(patch: pytest.MonkeyPatch) -> None:
    """Documents that ran into a duplicate key are deleted, and one of them is not inserted again."""
    write, insert = writer._Table.write, writer._Table._insert
    is_anew = [False]

    def written(self: Any, documents: Any, *, anew: bool) -> None:
        is_anew[0] = anew
        try:
            write(self, documents, anew=anew)
        finally:
            is_anew[0] = False

    def inserted(self: Any, documents: Any) -> None:
        insert(self, documents[:-1] if is_anew[0] else documents)

    patch.setattr(writer._Table, "write", written)
    patch.setattr(writer._Table, "_insert", inserted)


def _position_behind(patch: pytest.MonkeyPatch) -> None:
    """Each process begins some positions before that of the target, and applies what comes after it again."""
    load = Follower._load

    def loaded(self: Any) -> None:
        is_first = not hasattr(self, "time")
        load(self)
        document = self._state.read()
        if is_first and document.commits:
            self.time = document.commits[-min(10, len(document.commits))].time

    patch.setattr(Follower, "_load", loaded)


def _index_without_options(patch: pytest.MonkeyPatch) -> None:
    """An index loses what makes it sparse."""
    to_create = indexes.to_create

    def without(spec: bytes, **named: Any) -> bytes:
        made = to_create(spec, **named)
        elements = [one for one in raw_bson.elements(made) if one.name != b"sparse"]
        parts = (raw_bson.encode_element(one.type, one.name, raw_bson.value(made, one)) for one in elements)
        return raw_bson.encode_document(*parts)

    patch.setattr(indexes, "to_create", without)


PLANTED: Final[dict[str, Callable[[pytest.MonkeyPatch], None]]] = {
    "a window torn": _window_torn,
    "a change left out": _change_left_out,
    "an unmatched E11000": _unmatched_duplicate,
    "an event applied twice": _position_behind,
    "an index without its options": _index_without_options,
}


@contextmanager
def planted_here(name: str) -> Iterator[None]:
    """Put a fault back for as long as the block lasts."""
    with pytest.MonkeyPatch.context() as patch:
        PLANTED[name](patch)
        yield
