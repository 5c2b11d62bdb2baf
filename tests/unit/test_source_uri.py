"""Secrets in connection strings are never shown."""

from __future__ import annotations

import itertools
import pickle
import traceback
import warnings
from pathlib import Path
from typing import Any

import dns.resolver
import pytest

import tailrace
from tailrace.errors import SourceError, UsageError
from tailrace.read.source.connection import CONNECTIONS_MIN, Reader, open_client
from tailrace.read.source.topology import Cluster
from tailrace.read.source.uri import ClientOptions, ConnectionString, find_uri, parse_complaint, redact_uri

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
    assert parse_complaint("Bad port 'abc'", uri) == "Bad port 'abc'"
    assert parse_complaint(f"Bad port '{SECRET[2:6]}'", uri) == "Bad port '***'"
    # A password, where the host was left out.
    assert parse_complaint("Bad port 'abc'", "mongodb://ann:abc") is None


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


@pytest.mark.parametrize(
    ("query", "options", "size"),
    [
        ("", {}, 100),
        ("?maxPoolSize=1", {}, CONNECTIONS_MIN),
        ("?tls=false;maxpoolsize=3", {}, CONNECTIONS_MIN),
        ("?maxPoolSize=5", {}, 5),
        ("?maxPoolSize=1", {"maxPoolSize": 50}, 50),
        ("?maxPoolSize=50", {"maxpoolsize": 1}, CONNECTIONS_MIN),
        ("", {"maxPoolSize": "2"}, CONNECTIONS_MIN),
        ("?maxPoolSize=0", {}, float("inf")),
        ("", {"maxPoolSize": None}, float("inf")),
    ],
)
def test_what_reads_an_oplog_has_the_connections_that_it_needs(query: str, options: Any, size: float) -> None:
    """``maxPoolSize`` bounds a program's own commands. No test had looked at a smaller one."""
    with open_client(f"mongodb://127.0.0.1:1/{query}", connect=False, **options) as client:
        assert (client.options.pool_options.max_pool_size or float("inf")) == size
    hidden = ConnectionString(f"mongodb://127.0.0.1:1/{query}")
    with Reader.opened(hidden, None, ClientOptions({**options, "connect": False})) as reader:
        assert (reader.options.pool_options.max_pool_size or float("inf")) == size


@pytest.mark.parametrize("size", ["x", "-1", ""])
def test_a_size_that_is_none_is_the_drivers_to_refuse(size: str) -> None:
    with pytest.raises(UsageError, match=r"(?i)maxPoolSize"):
        open_client("mongodb://127.0.0.1:1/", maxPoolSize=size)


def test_an_option_that_the_driver_does_not_know_is_told_without_secrets(caplog: pytest.LogCaptureFixture) -> None:
    open_client(f"mongodb://ann:{SECRET}@127.0.0.1:1/?noSuchOption=1").close()
    assert "noSuchOption".lower() in caplog.text.lower()
    assert SECRET not in caplog.text


# Below: secrets had been tried only as one word after "user:", in front of an "@host".

_PASSWORDS = [
    SECRET,
    f"{SECRET} {SECRET}",
    f" {SECRET}",
    f"%20{SECRET}",
    f"{SECRET}%40",
    f"a/{SECRET}",
    f"a?{SECRET}=1",
]
_PASSWORDS += [f"a@b {SECRET}", f"{SECRET};x=1", f"1234:{SECRET}", f"{SECRET}'\"", f"ü{SECRET}", f"{SECRET},b:{SECRET}"]
_HOSTS = ["@host", "@host:1,other:2", "@[::1]:27017", "@host:99999", "@host:x", "@", "", "@%2Ftmp%2Fa.sock", "@h,,i"]
_TAILS = [
    "",
    "/",
    "/db?w=1",
    "?w=1",
    "/?authMechanism=NONE",
    "/?tls=maybe&x",
    f"/?tlsCertificateKeyFilePassword={SECRET}",
]


@pytest.mark.parametrize("scheme", ["mongodb://", "mongodb+srv://", "MongoDB://"])
@pytest.mark.parametrize("password", _PASSWORDS)
def test_no_form_of_a_uri_shows_its_secret(scheme: str, password: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dns.resolver.Resolver.resolve", _no_such_name)
    for host, tail in itertools.product(_HOSTS, _TAILS):
        uri = f"{scheme}ann:{password}{host}{tail}"
        hidden = ConnectionString(uri)
        assert SECRET not in repr(hidden), uri
        assert SECRET not in str(hidden), uri
        assert SECRET not in redact_uri(f"{uri}\nthat was it", whole=True), uri
        if host not in ("", "@"):
            assert SECRET not in redact_uri(f"cannot use {uri} now"), uri
        assert SECRET not in _shown_by_opening(uri), uri


def _shown_by_opening(uri: str) -> str:
    try:
        with warnings.catch_warnings(), open_client(uri) as client:
            warnings.simplefilter("ignore")
            return repr(client)
    except (UsageError, SourceError) as error:
        return str(error)


def _no_such_name(*_: object, **__: object) -> None:
    raise dns.resolver.NXDOMAIN


@pytest.mark.parametrize(
    "option",
    [
        f"tlsCertificateKeyFilePassword={SECRET}",
        f"TLSCERTIFICATEKEYFILEPASSWORD={SECRET} {SECRET}",
        f"authMechanism=MONGODB-AWS&authMechanismProperties=AWS_SESSION_TOKEN:{SECRET},X:{SECRET}",
        f"proxyPassword={SECRET}%20{SECRET}",
    ],
)
@pytest.mark.parametrize(
    "around", ["mongodb://h/?{}", "mongodb://h/?{}&w=1", "mongodb://h/?w=1;{};x=2", "mongodb+srv://a.b.c/?{}"]
)
def test_options_that_are_secrets_are_hidden(option: str, around: str) -> None:
    text = repr(ConnectionString(around.format(option)))
    assert SECRET not in text
    assert text.startswith(around.partition("{")[0])


@pytest.mark.parametrize(
    "text",
    [
        "mongodb://host:27017/db?replicaSet=rs0",
        "mongodb://a:1,b:2,[::1]:3/?w=1",
        "cannot reach mongodb://host:27017: connection refused",
        "the connection URI does not begin with mongodb:// or mongodb+srv://. Example: mongodb://host:27017/?replicaSet=rs0",
        "authmechanism must be in ('DEFAULT', 'GSSAPI', 'MONGODB-OIDC')",
        "write @ as %40: so it is",
        '{"_data": "8265"} at 12:30:00 (127.0.0.1:27017)',
    ],
)
def test_innocent_words_stay(text: str) -> None:
    assert redact_uri(text) == text


def test_a_complaint_keeps_its_own_words() -> None:
    """Every quoted word was hidden as soon as the URI had a password: "authmechanism must be in ('***', '***')"."""
    with pytest.raises(UsageError, match="'SCRAM-SHA-256'") as raised:
        open_client(f"mongodb://ann:{SECRET}@host/", authMechanism="NONE")
    assert "%40" not in str(raised.value)
    with pytest.raises(UsageError) as raised:
        open_client("mongodb://host/", password=SECRET, username="ann", authMechanism=SECRET)
    assert SECRET not in str(raised.value)


def test_a_name_without_an_srv_record_is_told_as_that(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message was "The connection URI does not parse", with a hint on percent signs."""
    monkeypatch.setattr("dns.resolver.Resolver.resolve", _no_such_name)
    with pytest.raises(SourceError, match=r"was not found.*SRV record.*mongodb://host:27017") as raised:
        open_client(f"mongodb+srv://ann:{SECRET}@nosuch.example.invalid/")
    assert SECRET not in str(raised.value)


def test_a_client_shows_no_secret() -> None:
    """vars(client) held the URI as it was given."""
    uri = f"mongodb://ann:{SECRET}@127.0.0.1:1/?tlsCertificateKeyFilePassword={SECRET}&tls=true"
    for client in (
        tailrace.connect(uri),
        tailrace.connect([uri, uri]),
        tailrace.connect(uri, engine="server"),
        tailrace.connect("mongodb://127.0.0.1:1/", username="ann", password=SECRET),
    ):
        with client:
            for text in (
                repr(client),
                str(vars(client)),
                repr(client.shop),
                repr(client.shop.orders),
            ):
                assert SECRET not in text
            assert repr(client).startswith("MongoClient(host=['127.0.0.1:1'], document_class=dict, tz_aware=False")
            with pytest.raises(TypeError):
                pickle.dumps(client)
    cluster = Cluster(uri, {"password": SECRET, "w": 1})
    assert SECRET not in str(vars(cluster))
    with pytest.raises(TypeError, match="password"):
        pickle.dumps(ConnectionString(uri))


def test_no_frame_of_ours_holds_the_secret_of_a_uri_that_fails() -> None:
    """What prints a traceback with its locals would have printed the URI."""
    raised: Exception | None = None
    try:
        tailrace.connect(f"mongodb://ann:{SECRET}@host:x/", tlsCertificateKeyFilePassword=SECRET)
    except UsageError as error:
        raised = error
    assert raised is not None
    frames = [frame for frame, _ in traceback.walk_tb(raised.__traceback__)][1:]
    assert len(frames) >= 3
    for frame in frames:
        assert SECRET not in str(frame.f_locals), frame.f_code.co_qualname


def test_a_command_takes_its_uri_from_an_argument_a_file_or_the_environment(tmp_path: Path) -> None:
    (tmp_path / "uri").write_text(f"mongodb://ann:{SECRET}@h/\n")
    expected = ConnectionString(f"mongodb://ann:{SECRET}@h/")
    assert find_uri("@uri", {}, tmp_path) == expected
    assert find_uri(f"@{tmp_path / 'uri'}", {}) == expected
    assert find_uri(None, {"TAILRACE_URI": f"mongodb://ann:{SECRET}@h/"}) == expected
    assert find_uri(None, {"TAILRACE_URI": "@uri"}, tmp_path) == expected
    assert find_uri("mongodb://other", {"TAILRACE_URI": "@uri"}, tmp_path).reveal() == "mongodb://other"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "No such file"),
        (b"", "one line"),
        (b"mongodb://a\nmongodb://b\n", "one line"),
        (b"\xff\xfe\x00", "not UTF-8"),
        (b"x" * 70_000, "one line"),
    ],
)
def test_a_file_that_holds_no_uri_is_a_usage_error(tmp_path: Path, content: bytes | None, says: str) -> None:
    if content is not None:
        (tmp_path / "uri").write_bytes(content)
    with pytest.raises(UsageError, match=says):
        find_uri("@uri", {}, tmp_path)
    with pytest.raises(UsageError, match=f"TAILRACE_URI.*{says}"):
        find_uri(None, {"TAILRACE_URI": "@uri"}, tmp_path)


@pytest.mark.parametrize("environment", [{}, {"TAILRACE_URI": ""}, {"TAILRACE_URI": "  "}])
def test_no_uri_at_all_is_a_usage_error(environment: dict[str, str]) -> None:
    with pytest.raises(UsageError, match=r"no connection URI was given.*TAILRACE_URI"):
        find_uri(None, environment)


def test_the_file_that_cannot_be_read_is_named() -> None:
    """PyMongo 4.20.1 no longer names it: found with the newest dependencies. A part of a password is still hidden."""
    said = "[Errno 2] The tlscafile file is not readable"
    assert parse_complaint(said, "mongodb://h/?tls=true&tlsCAFile=/no%20thing.pem") == f"{said}: '/no thing.pem'"
    assert parse_complaint(said, "mongodb://h/?tls=true") == said
    assert "s3cret" not in str(parse_complaint(said, "mongodb://ann:a?tlsCAFile=/s3cret@h/"))


def test_the_option_that_is_not_known_is_named() -> None:
    """PyMongo 4.20.1 no longer names it."""
    said = "Unknown option. Refer to docstring."
    uri = "mongodb://ann:a&b=c@h/?tls=true&noSuch=1&other=2"
    assert parse_complaint(said, uri) == "Unknown option noSuch, other. Refer to docstring."
    assert parse_complaint(said, "mongodb://h/?tls=true") == said
