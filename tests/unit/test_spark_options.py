"""The data source's options: those that are understood, and the messages about others."""

from __future__ import annotations

import dataclasses
import pickle
import re
from pathlib import Path

import bson
import pytest

from tailrace.core.event.resume_token import ResumeToken
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.plan.profile import profile_for
from tailrace.errors import InvalidResumeToken, TailraceError, UsageError
from tailrace.lake.spark.query import options as options_module
from tailrace.lake.spark.query.options import COLUMNS, cluster_time, parse

URI = "mongodb://user:s3cret@localhost/?replicaSet=rs0"


def test_option_names_are_known_without_regard_to_case() -> None:
    options = parse(
        {"uri": URI, "fulldocument": "updateLookup", "MAXEVENTSPERTRIGGER": "10", "showexpandedevents": "true"}
    )
    assert options.stage == {"fullDocument": "updateLookup", "showExpandedEvents": True}
    assert options.max_events == 10


def test_defaults_are_all_columns_as_variant_of_the_whole_cluster() -> None:
    options = parse({"uri": URI})
    assert (options.scope.kind, options.documents, options.columns) == ("cluster", "variant", COLUMNS)
    assert options.start is None
    assert options.end is None
    assert options.max_bytes > 0


def test_exact_images_are_planned_as_the_server_s_for_any_version() -> None:
    """A stream that requires images is refused by the plan of a server that has none (5.0, 4.4)."""
    options = parse({"uri": URI, "fullDocument": "exact", "fullDocumentBeforeChange": "exact", "images": "/i"})
    stream = options.stream_options()
    assert (stream.full_document, stream.full_document_before_change) == ("required", "required")
    assert options.stage == {"fullDocument": "exact", "fullDocumentBeforeChange": "exact"}  # of the identity
    assert options.plan(stream, profile_for("4.4.2")).exact_images
    assert options.max_bytes == 128 << 20
    plain = parse({"uri": URI, "fullDocument": "required"})
    with pytest.raises(UsageError):
        plain.plan(plain.stream_options(), profile_for("4.4.2"))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "'uri' is missing"),
        ({"fullDocumnet": "updateLookup"}, "Did you mean 'fullDocument'"),
        ({"maxOffsetsPerTrigger": "1"}, "Did you mean 'maxEventsPerTrigger'"),
        ({"xyzzy": "1"}, "The known ones are uri, database"),
        ({"fullDocument": "exact"}, "exact images need the option 'images'"),
        ({"fullDocumentBeforeChange": "exactWhenAvailable"}, "exact images need the option 'images'"),
        ({"images": "/i"}, "option 'images' is the directory for exact images, and none are requested"),
        ({"images": "/i", "fullDocument": "required"}, "and none are requested"),
        ({"images": "s3://i", "fullDocument": "exact"}, "option 'images' is a URI that begins with 's3:'"),
        (
            {"images": "/i", "fullDocument": "exact", "fullDocumentBeforeChange": "required"},
            "fullDocument=exact and fullDocumentBeforeChange=required do not go together",
        ),
        (
            {"images": "/i", "fullDocument": "updateLookup", "fullDocumentBeforeChange": "exact"},
            "fullDocument=updateLookup and fullDocumentBeforeChange=exact do not go together",
        ),
        (
            {"images": "/i", "fullDocument": "exact", "collections": "a.b"},
            "'collections' and exact images cannot be used",
        ),
        ({"collection": "c"}, "'collection' needs option 'database'"),
        ({"pipeline": "[{"}, "option 'pipeline': not JSON"),
        ({"pipeline": '{"$match": {}}'}, "expected a JSON array"),
        ({"pipeline": "[1]"}, "expected a JSON array"),
        ({"columns": "event,full_documnet"}, "unknown column 'full_documnet'. Did you mean 'full_document'"),
        ({"columns": "event,event"}, "named twice"),
        ({"columns": ""}, "unknown column ''"),
        ({"documents": "xml"}, "expected one of variant, json, bson"),
        ({"maxEventsPerTrigger": "0"}, "a whole number, 1 or more"),
        ({"maxBytesPerTrigger": "lots"}, "a number of bytes"),
        ({"partitions": "-1"}, "a whole number, 1 or more"),
        ({"showSystemEvents": "yes"}, "expected 'true' or 'false'"),
        ({"startingFrom": "earliest"}, "expected 'oldest', 'now' or 'snapshot'"),
        ({"startAtOperationTime": "yesterday"}, "expected a cluster time"),
        ({"startAtOperationTime": '{"$oid": "65f000000000000000000001"}'}, "expected a cluster time"),
        ({"startAtOperationTime": "99999999999,1"}, "expected a cluster time"),
        ({"resumeAfter": "not hex"}, "option 'resumeAfter': not JSON"),
        ({"resumeAfter": "[1]"}, "expected a resume token"),
        ({"resumeAfter": "82", "startingFrom": "now"}, "both say where to start"),
        ({"fullDocument": "sometimes"}, "Enumeration value 'sometimes'"),
        ({"collections": ""}, "option 'collections': no collection is named"),
        ({"collections": "[]"}, "option 'collections': no collection is named"),
        ({"collections": "shop.orders,"}, "'' names no collections"),
        ({"collections": "shop"}, "'shop' names no collections"),
        ({"collections": ".orders"}, "'.orders' names no collections"),
        ({"collections": '["shop.orders"'}, "option 'collections': not JSON"),
        ({"collections": '["shop.orders", 5]'}, "expected names such as shop.orders"),
        ({"collections": "shop.orders, admin.*"}, "'admin.*' is in the server's own database admin"),
        ({"collections": "local.oplog.rs"}, "the server's own database local"),
        ({"collections": "config.x"}, "the server's own database config"),
        ({"collections": "shop.system.js"}, "'shop.system.js' is a system collection"),
        ({"collections": "*.$cmd"}, "'*.$cmd' is a system collection"),
        ({"collections": "sh op.x"}, "'sh op.x': Invalid namespace specified"),
        ({"collections": "shop..x"}, "Collection names cannot start with '.'"),
        ({"collections": '["shop.a\\u0000b"]'}, "embedded null characters"),
        ({"collections": "a.b", "database": "a", "collection": "b"}, "'collection' and 'collections' both say what"),
        ({"collections": "a.b", "database": "a"}, "'database' and 'collections' both say what is watched"),
        ({"collections": "a.b", "showSystemEvents": "true"}, "a list names no system collections"),
        ({"database": "local"}, "may not be opened on the internal local database"),
    ],
)
def test_a_mistake_is_one_clear_sentence_without_the_password(given: dict[str, str], said: str) -> None:
    options = given if not given else {"uri": URI, **given}
    with pytest.raises(TailraceError) as caught:
        parse(options)
    assert said in str(caught.value)
    assert "s3cret" not in str(caught.value)


def test_a_damaged_token_is_refused_with_the_servers_code() -> None:
    with pytest.raises(InvalidResumeToken) as caught:
        parse({"uri": URI, "resumeAfter": "82ABCDEF"})
    assert caught.value.code is not None


def test_a_token_may_be_its_document_or_its_digits() -> None:
    token = ResumeToken.high_water_mark(ClusterTime.of(1_700_000_000, 5))
    for text in (token.data, token.data.lower(), f'{{"_data": "{token.data}"}}'):
        options = parse({"uri": URI, "startAfter": text})
        assert options.start is not None
        assert options.start.option == "startAfter"
        assert ResumeToken.parse(options.start.token or b"") == token


@pytest.mark.parametrize(
    "text",
    ["1700000000,7", "Timestamp(1700000000, 7)", '{"$timestamp": {"t": 1700000000, "i": 7}}', "1700000000:7"],
)
def test_a_cluster_time_has_several_spellings(text: str) -> None:
    assert cluster_time(text) == ClusterTime.of(1_700_000_000, 7)


@pytest.mark.parametrize(
    "text", ["1700000000", "2023-11-14T22:13:20Z", "2023-11-14T22:13:20", "2023-11-14T23:13:20+01:00"]
)
def test_a_second_is_its_first_cluster_time(text: str) -> None:
    assert cluster_time(text) == ClusterTime.of(1_700_000_000, 0)


def test_sizes_take_a_letter() -> None:
    assert parse({"uri": URI, "maxBytesPerTrigger": "64k"}).max_bytes == 65536
    assert parse({"uri": URI, "maxBytesPerTrigger": "2MB"}).max_bytes == 2 << 20


def test_a_pipeline_keeps_types_and_order() -> None:
    options = parse({"uri": URI, "pipeline": '[{"$match": {"b": {"$numberLong": "1"}, "a": 1}}]'})
    assert options.pipeline == (bson.encode({"$match": {"b": bson.Int64(1), "a": 1}}),)


def test_collections_are_a_json_array_or_have_commas_between_them() -> None:
    for text in ("shop.orders, log?.*", '["shop.orders", "log?.*", "shop.orders"]'):
        options = parse({"uri": URI, "collections": text, "pipeline": '[{"$match": {"a": 1}}]'})
        assert options.scope.kind == "cluster"
        assert options.selection is not None
        assert options.selection.patterns == ("shop.orders", "log?.*")
        assert len(options.stages) == 2
        assert options.stages[1:] == options.pipeline
    with_comma = parse({"uri": URI, "collections": '["shop.a,b"]'}).selection
    assert with_comma is not None
    assert with_comma.has("shop.a,b")
    everything = parse({"uri": URI, "collections": "*.*"})
    assert everything.stages == ()


def test_options_travel_to_the_workers_and_never_show_the_uri() -> None:
    options = parse({"uri": URI, "database": "d", "resumeAfter": ResumeToken.high_water_mark(ClusterTime(5)).data})
    assert pickle.loads(pickle.dumps(options)) == options
    assert "s3cret" not in repr(options)


def test_an_unknown_option_is_a_usage_error() -> None:
    with pytest.raises(UsageError):
        parse({"uri": URI, "path": "/tmp"})


def test_every_option_is_one_that_a_reader_asks_for() -> None:
    """Otherwise a new option that is parsed and on the page passes all tests before anything uses it."""
    own = Path(options_module.__file__)
    code = "\n".join(path.read_text() for path in own.parents[1].rglob("*.py") if path != own)
    asked = set(re.findall(r"\.(\w+)", code))
    through = {"collation", "selection", "v2_tokens"}  # by way of the stream's own options, or of ``watched``
    assert {one.name for one in dataclasses.fields(options_module.ReadOptions)} - asked <= through
