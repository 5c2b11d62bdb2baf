"""The collation option: checked as the server checks it, and refused by name where ICU is not installed."""

from __future__ import annotations

import pickle
import sys
from typing import Any

import bson
import pytest

from tailrace.core.expression import compile_stages, parse_collation
from tailrace.core.expression.values import value as v
from tailrace.core.expression.values.collation import INSTALL, LOCALES, order_of
from tailrace.core.expression.values.compare import SIMPLE
from tailrace.core.oplog.namespace import Scope
from tailrace.core.plan.options import StreamOptions
from tailrace.errors import UsageError
from tests.differential.icu import needs_icu


def parsed(**options: Any) -> Any:
    return parse_collation(bson.encode(options))


def compared(left: Any, right: Any, **collation: Any) -> Any:
    stage = bson.encode({"$project": {"_id": 0, "x": {"$cmp": ["$left", "$right"]}}})
    event = bson.encode({"_id": 1, "left": left, "right": right})
    out = compile_stages([stage], collation=parsed(**collation)).apply(event)
    return bson.decode(out or b"")["x"]


@pytest.mark.parametrize("document", [{}, {"locale": "simple"}, {"locale": "simple", "strength": 2}])
def test_the_simple_collation_is_none_and_needs_no_icu(document: dict[str, Any], monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "icu", None)
    assert parsed(**document) is None
    assert order_of(None) is SIMPLE
    assert StreamOptions.parse(Scope.of_database("d"), collation=document).collation is None


def test_what_is_not_said_comes_from_the_locale() -> None:
    assert parsed(locale="en").strength == 3
    assert parsed(locale="fr_CA").backwards
    assert parsed(locale="da").case_first == "upper"
    assert parsed(locale="th").alternate == "shifted"
    assert parsed(locale="vi").normalization
    assert parsed(locale="en@collation=search").normalization
    assert not parsed(locale="vi", normalization=False).normalization
    assert parsed(locale="en", strength=2.9, caseLevel=None) == parsed(locale="en", strength=2)


def test_without_icu_a_collation_is_refused_by_name_with_what_to_install(monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "icu", None)
    order_of.cache_clear()
    with pytest.raises(UsageError, match=r"the collation 'lv' needs ICU") as raised:
        StreamOptions.parse(Scope.of_database("d"), collation={"locale": "lv"})
    assert (raised.value.code, raised.value.hint) == (115, INSTALL)
    with pytest.raises(UsageError) as wrong:  # what the server would refuse is refused as it refuses it
        StreamOptions.parse(Scope.of_database("d"), collation={"locale": "Latvian"})
    assert wrong.value.code == 2


@needs_icu
@pytest.mark.parametrize("locale", sorted(LOCALES))
def test_every_locale_of_the_server_gives_an_order(locale: str) -> None:
    order = order_of(parsed(locale=locale))
    assert order.compare(v.string("a"), v.string("a")) == 0
    assert order.compare(v.string("a"), v.string("b")) != 0


@needs_icu
def test_an_order_that_icu_no_longer_has_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match="zh@collation=big5han") as raised:
        order_of(parsed(locale="zh@collation=big5han"))
    assert raised.value.code == 115


@needs_icu
def test_each_option_reaches_the_order() -> None:
    assert compared("a", "Á", locale="en", strength=1) == 0
    assert compared("a", "Á", locale="en", strength=2) == -1
    assert compared("a", "A", locale="en", strength=2) == 0
    assert compared("a", "A", locale="en") == -1
    assert compared("a", "A", locale="en", caseFirst="upper") == 1
    assert compared("a", "A", locale="en", strength=1, caseLevel=True) == -1
    assert compared("a10", "a9", locale="en") == -1
    assert compared("a10", "a9", locale="en", numericOrdering=True) == 1
    assert compared("a b", "ab", locale="en", alternate="shifted") == 0
    assert compared("a-b", "ab", locale="en", alternate="shifted") == 0
    assert compared("a-b", "ab", locale="en", alternate="shifted", maxVariable="space") == -1
    assert compared("a b", "ab", locale="en", alternate="shifted", strength=4) == -1
    assert compared("côte", "coté", locale="fr") == 1
    assert compared("côte", "coté", locale="fr", backwards=True) == -1
    assert compared("z", "ä", locale="sv") == -1
    assert compared("z", "ä", locale="de") == 1
    assert compared("w", "v", locale="sv@collation=standard", strength=1) == 0


@needs_icu
def test_strings_inside_documents_and_arrays_are_compared_too_and_names_are_not() -> None:
    assert compared({"k": ["a", {"k": "B"}]}, {"k": ["A", {"k": "b"}]}, locale="en", strength=1) == 0
    assert compared({"k": 1}, {"K": 1}, locale="en", strength=1) == 1


@needs_icu
def test_text_that_is_no_utf_8_and_text_with_a_nul_have_a_place_in_the_order() -> None:
    order = order_of(parsed(locale="en"))
    bad, good = v.string_of(b"a\xff"), v.string_of(b"a\x00b")
    assert order.compare(bad, good) == -order.compare(good, bad) != 0


def test_a_stream_s_options_with_a_collation_go_from_process_to_process() -> None:
    collation = parsed(locale="fr_CA", strength=2)
    assert pickle.loads(pickle.dumps(collation)) == collation
