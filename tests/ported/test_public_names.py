"""Every public name of PyMongo's client, database, collection and change stream, both flavours, is on the page, and
what the page says of it is true.

Once only the names that somebody had thought of were there: everything but ``watch`` was missing.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pymongo
import pytest
from pymongo.asynchronous.change_stream import AsyncChangeStream
from pymongo.asynchronous.collection import AsyncCollection
from pymongo.asynchronous.database import AsyncDatabase
from pymongo.synchronous.change_stream import ChangeStream
from pymongo.synchronous.collection import Collection
from pymongo.synchronous.database import Database

from tailrace.watch import client as ours

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "pymongo.md"
#: By section of the page: PyMongo's class and ours, for each flavour.
CLASSES: dict[str, list[tuple[type[Any], type[Any]]]] = {
    "MongoClient": [(pymongo.MongoClient, ours.Client), (pymongo.AsyncMongoClient, ours.AsyncClient)],
    "Database": [(Database, ours.Database), (AsyncDatabase, ours.AsyncDatabase)],
    "Collection": [(Collection, ours.Collection), (AsyncCollection, ours.AsyncCollection)],
    "ChangeStream": [(ChangeStream, ours.ChangeStream), (AsyncChangeStream, ours.AsyncChangeStream)],
}
PAIRS = [(section, *pair) for section, pairs in CLASSES.items() for pair in pairs]
#: Our names beside PyMongo's. On a client, a database or a collection each would hide a user's name.
OF_OURS = {"ChangeStream": {"explain", "has_next", "statistics"}, "MongoClient": {"tail_statistics"}}


def test_the_page_tells_of_names_that_hide_a_database() -> None:
    assert all(f"`client.{name}`" in PAGE.read_text() for name in OF_OURS["MongoClient"])


def public(kind: type[Any]) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("_")}


def rows(section: str) -> dict[str, str]:
    """What the page says of each name of a section."""
    table = re.search(rf"<!-- {section} -->\n(.*?)<!-- end -->", PAGE.read_text(), re.DOTALL)
    assert table is not None, section
    return dict(re.findall(r"^\| `(\w+)` \| (\w+) \|", table[1], re.MULTILINE))


@pytest.mark.parametrize("section", CLASSES)
def test_the_page_has_every_public_name(section: str) -> None:
    assert set(rows(section)) == set.union(*(public(theirs) for theirs, _ in CLASSES[section]))
    assert set(rows(section).values()) <= {"same", "ours"}


@pytest.mark.parametrize(("section", "theirs", "mine"), PAIRS)
def test_what_the_page_says_of_a_name_is_true(section: str, theirs: type[Any], mine: type[Any]) -> None:
    assert issubclass(mine, theirs)
    said = {name: what for name, what in rows(section).items() if name in public(theirs)}
    found = {
        name: "same" if inspect.getattr_static(mine, name) is inspect.getattr_static(theirs, name) else "ours"
        for name in public(theirs)
    }
    assert found == said
    assert public(mine) - public(theirs) <= OF_OURS.get(section, set())


def parameters(function: Any) -> list[tuple[str, Any, Any]]:
    return [
        (each.name, each.kind, each.default)
        for each in inspect.signature(function).parameters.values()
        if each.kind is not inspect.Parameter.KEYWORD_ONLY
    ]


def overridden() -> Iterator[tuple[type[Any], type[Any], str]]:
    for section, theirs, mine in PAIRS:
        if section != "ChangeStream":
            yield theirs, mine, "__init__"
        for name, what in rows(section).items():
            if what == "ours" and name in public(theirs):
                yield theirs, mine, name


@pytest.mark.parametrize(("theirs", "mine", "name"), list(overridden()))
def test_what_is_ours_takes_what_pymongo_s_takes(theirs: type[Any], mine: type[Any], name: str) -> None:
    wanted, got = inspect.getattr_static(theirs, name), inspect.getattr_static(mine, name)
    if isinstance(wanted, property):
        assert isinstance(got, property)
        return
    # PyMongo's decorators wrap a coroutine function; what they return is awaited all the same.
    assert inspect.iscoroutinefunction(inspect.unwrap(wanted)) == inspect.iscoroutinefunction(inspect.unwrap(got))
    assert parameters(got) == parameters(wanted)
    keyword_only = inspect.Parameter.KEYWORD_ONLY
    for each in inspect.signature(wanted).parameters.values():
        assert each.kind is not keyword_only or each.name in inspect.signature(got).parameters


def test_connect_takes_what_the_client_takes() -> None:
    assert parameters(ours.connect) == parameters(pymongo.MongoClient)
