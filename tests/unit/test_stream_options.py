"""Options of ``$changeStream`` as documents: each type that the server accepts, and how others are refused."""

from __future__ import annotations

from typing import Any

import bson
import pytest
from bson.timestamp import Timestamp

from tailrace.core.event.bson_text import document_text
from tailrace.core.event.resume_token import ResumeToken
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.oplog.namespace import Scope
from tailrace.core.plan.options import StreamOptions
from tailrace.core.plan.profile import profile_for
from tailrace.errors import UsageError

TOKEN = ResumeToken.high_water_mark(ClusterTime.of(5, 1))


def parsed(stage: dict[str, Any] | bytes) -> StreamOptions:
    return StreamOptions.parse(Scope.of_collection("shop", "orders"), stage)


@pytest.mark.parametrize(
    ("name", "value", "attribute", "expected"),
    [
        ("fullDocument", "updateLookup", "full_document", "updateLookup"),
        ("fullDocument", "whenAvailable", "full_document", "whenAvailable"),
        ("fullDocument", "required", "full_document", "required"),
        ("fullDocument", "default", "full_document", "default"),
        ("fullDocument", None, "full_document", "default"),
        ("fullDocumentBeforeChange", "off", "full_document_before_change", "off"),
        ("fullDocumentBeforeChange", "whenAvailable", "full_document_before_change", "whenAvailable"),
        ("fullDocumentBeforeChange", "required", "full_document_before_change", "required"),
        ("fullDocumentBeforeChange", None, "full_document_before_change", "off"),
        ("resumeAfter", TOKEN.to_document(), "resume_after", TOKEN),
        ("resumeAfter", None, "resume_after", None),
        ("startAfter", TOKEN.to_document(), "start_after", TOKEN),
        ("startAtOperationTime", Timestamp(7, 2), "start_at_operation_time", ClusterTime.of(7, 2)),
        ("startAtOperationTime", None, "start_at_operation_time", None),
        ("showExpandedEvents", True, "show_expanded_events", True),
        ("showExpandedEvents", False, "show_expanded_events", False),
    ],
)
def test_an_option_is_read(name: str, value: Any, attribute: str, expected: Any) -> None:
    assert getattr(parsed({name: value}), attribute) == expected


@pytest.mark.parametrize(
    ("name", "value", "code", "words"),
    [
        ("fullDocument", 1, 14, "'$changeStream.fullDocument' is the wrong type 'int', expected type 'string'"),
        ("fullDocumentBeforeChange", [], 14, "is the wrong type 'array', expected type 'string'"),
        ("resumeAfter", "x", 14, "is the wrong type 'string', expected type 'object'"),
        ("startAfter", 5, 14, "is the wrong type 'int', expected type 'object'"),
        ("startAtOperationTime", 5, 14, "is the wrong type 'int', expected type 'timestamp'"),
        ("showExpandedEvents", 1, 14, "Field 'showExpandedEvents' should be a boolean value, but found: int"),
        ("showExpandedEvents", None, 14, "should be a boolean value, but found: null"),
        ("fullDocument", "off", 2, "value 'off' for field '$changeStream.fullDocument' is not a valid value."),
        ("fullDocumentBeforeChange", "updateLookup", 2, "Enumeration value 'updateLookup'"),
        ("unheardOf", 1, 40415, "BSON field '$changeStream.unheardOf' is an unknown field."),
    ],
)  # fmt: skip
def test_another_type_and_another_value_are_refused_with_the_server_s_words(
    name: str, value: Any, code: int, words: str
) -> None:
    with pytest.raises(UsageError) as refused:
        parsed({name: value})
    assert refused.value.code == code
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("name", "modes"),
    [
        ("fullDocument", "One of: default, updateLookup, whenAvailable, required"),
        ("fullDocumentBeforeChange", "One of: off, whenAvailable, required"),
    ],
)
def test_the_hint_to_an_unknown_mode_lists_those_of_its_option(name: str, modes: str) -> None:
    with pytest.raises(UsageError) as refused:
        parsed({name: "unheard of"})
    assert refused.value.hint == modes


@pytest.mark.parametrize("database", ["admin", "local", "config"])
def test_a_stream_of_an_internal_database_is_refused(database: str) -> None:
    for scope in (Scope.of_database(database), Scope.of_collection(database, "c")):
        with pytest.raises(UsageError, match=f"the internal {database} database") as refused:
            StreamOptions.parse(scope, {})
        assert refused.value.code == 73


def test_a_name_that_is_no_utf_8_is_an_unknown_field() -> None:
    stage = bson.encode({"name": 1}).replace(b"name", b"n\xffme")
    with pytest.raises(UsageError, match="is an unknown field") as refused:
        parsed(stage)
    assert refused.value.code == 40415


def test_a_mode_that_is_no_utf_8_is_refused_as_any_other_value() -> None:
    stage = bson.encode({"fullDocument": "default"}).replace(b"default", b"def\xffult")
    with pytest.raises(UsageError, match="Enumeration value") as refused:
        parsed(stage)
    assert refused.value.code == 2


@pytest.mark.parametrize("value", [True, "x"])
def test_an_option_that_came_later_is_unknown_to_an_older_server_whatever_its_type(value: Any) -> None:
    """The plan refuses one of the right type once more; no test had one of another type."""
    with pytest.raises(UsageError, match="showExpandedEvents") as refused:
        StreamOptions.parse(
            Scope.of_collection("shop", "orders"), {"showExpandedEvents": value}, profile=profile_for("5.0.4")
        )
    assert refused.value.code == 40415


def test_options_do_not_print_their_stages() -> None:
    """They are bytes, and hold the user's values."""
    scope = Scope.of_collection("shop", "orders")
    options = StreamOptions(scope, pipeline=(bson.encode({"$match": {"secret": "value"}}),))
    assert "secret" not in repr(options)


def test_a_text_that_is_no_utf_8_is_printed_in_a_message() -> None:
    document = bson.encode({"name": "abc"}).replace(b"abc", b"a\xffc")
    assert document_text(document) == '{name: "a\N{REPLACEMENT CHARACTER}c"}'
