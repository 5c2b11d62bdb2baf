"""Secrets of connection strings never come out again."""

from __future__ import annotations

import itertools

import pytest

from tailrace.errors import UsageError
from tailrace.source.connection import open_client
from tailrace.source.uri import parse_complaint, redact_uri

SECRET = "tr0ub4dor"


@pytest.mark.parametrize(
    ("text", "redacted"),
    [
        ("mongodb://host:27017/", "mongodb://host:27017/"),
        ("mongodb://ann@host/", "mongodb://ann@host/"),
        (f"mongodb://ann:{SECRET}@host/?w=1", "mongodb://ann:***@host/?w=1"),
        (f"mongodb+srv://ann:{SECRET}@host/", "mongodb+srv://ann:***@host/"),
        (f"MONGODB://ann:{SECRET}@host/", "MONGODB://ann:***@host/"),
        (f"mongodb://ann:a@b/{SECRET}@host/", "mongodb://ann:***@host/"),
        (f"cannot use 'mongodb://ann:{SECRET}@h/' here", "cannot use 'mongodb://ann:***@h/' here"),
        (
            f"mongodb://h/?tlsCertificateKeyFilePassword={SECRET}&tls=true",
            "mongodb://h/?tlsCertificateKeyFilePassword=***&tls=true",
        ),
        (
            f"mongodb://h/?authMechanismProperties=AWS_SESSION_TOKEN:{SECRET}",
            "mongodb://h/?authMechanismProperties=***",
        ),
        (f"a mongodb://a:{SECRET}@h/ and mongodb://b:{SECRET}@i/", "a mongodb://a:***@h/ and mongodb://b:***@i/"),
    ],
)
def test_secrets_are_replaced_and_the_rest_stays(text: str, redacted: str) -> None:
    assert redact_uri(text) == redacted
    assert SECRET not in redact_uri(text)


@pytest.mark.parametrize(
    ("before", "after"),
    list(itertools.product(["", "x/", "x@", "x:", "%zz", "x?", "x#", "x%"], ["", "/y", "@y", ":y", "%", "&y"])),
)
@pytest.mark.parametrize("rest", ["host", "host:99999", "host:x/db", "host/?maxPoolSize=x", "[::1", "", "h/?w=1&w=2"])
def test_no_error_of_an_unusable_uri_holds_its_password(before: str, after: str, rest: str) -> None:
    uri = f"mongodb://ann:{before}{SECRET}{after}@{rest}"
    raised: list[UsageError] = []
    try:
        open_client(uri).close()
    except UsageError as error:
        raised.append(error)
    for error in raised:
        assert SECRET not in str(error)
        assert SECRET not in repr(error)
        assert error.__cause__ is None
        assert error.__suppress_context__


def test_a_complaint_that_quotes_a_piece_of_the_password_is_withheld() -> None:
    uri = f"mongodb://ann:{SECRET}/x@host"
    assert parse_complaint(f"Bad port {SECRET}", uri) is None
    assert parse_complaint("Bad port 'abc'", uri) == "Bad port '***'"
    assert parse_complaint("Bad port 'abc'", "mongodb://host:abc") == "Bad port 'abc'"


@pytest.mark.parametrize("uri", ["", "host:27017", "http://host", "mongodb:/host", "mongodb://", "mongodb://host:x"])
def test_what_is_no_connection_string_is_a_usage_error(uri: str) -> None:
    with pytest.raises(UsageError, match="connection URI"):
        open_client(uri)


def test_what_the_uri_says_wins_over_our_defaults() -> None:
    with open_client("mongodb://127.0.0.1:1/?serverSelectionTimeoutMS=123&appName=mine") as client:
        assert client.options.server_selection_timeout == 0.123
        assert client.options.pool_options.appname == "mine"
        assert client.options.pool_options.socket_timeout == 60.0
    with open_client("mongodb://127.0.0.1:1/", serverSelectionTimeoutMS=456) as client:
        assert client.options.server_selection_timeout == 0.456
        assert client.options.pool_options.appname == "tailrace"


def test_an_option_that_the_driver_does_not_know_is_told_without_secrets(caplog: pytest.LogCaptureFixture) -> None:
    open_client(f"mongodb://ann:{SECRET}@127.0.0.1:1/?noSuchOption=1").close()
    assert "noSuchOption".lower() in caplog.text.lower()
    assert SECRET not in caplog.text
