"""Connection strings: where they come from, and which parts of them may appear in a log, an error or an offset."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NoReturn
from urllib.parse import unquote_plus

from tailrace.errors import UsageError

REDACTED: Final = "***"
#: The environment variable that a command takes the connection URI from where its arguments name none.
URI_VARIABLE: Final = "TAILRACE_URI"
URI_EXAMPLE: Final = "Example: mongodb://host:27017/?replicaSet=rs0"
#: A database, or a namespace: what stands where a URI was left out.
_NAMESPACE: Final = re.compile(r"\w[\w-]*(\.[\w*][\w.*-]*)?", re.ASCII)

_SCHEME = re.compile(r"(mongodb(?:\+srv)?://)", re.IGNORECASE)
#: User and password: everything up to the last ``@`` of the line. Greedy on purpose: a password that should have been
#: percent-encoded may hold ``/``, ``:``, ``@`` or a space, and hiding too much is the safe mistake.
_USER_INFO = re.compile(r"[^:/@?\n]*:.*@(?=\S|$)|\S*@")
#: The same where somebody has left the scheme out.
_BARE_USER_INFO = re.compile(r"(?<![\w/.])([^\s:/@'\"=&?]+):([^\s@]+)@(?=[\w\[])")
_SECRET_NAMES: Final = (
    "authMechanismProperties",
    "tlsCertificateKeyFilePassword",
    "sslPEMPassphrase",
    "ssl_pem_passphrase",
    "proxyPassword",
    "password",
    "aws_session_token",
)
#: Options whose value is a secret (uri-options specification), also inside an unfinished string. A value may hold
#: spaces where another option follows it.
_SECRET_OPTION = re.compile(rf"\b((?:{'|'.join(_SECRET_NAMES)})=)([^&;\s'\"]*(?:[^&;\n]*(?=[&;]\w+=))?)", re.IGNORECASE)
_SECRET_OPTION_TO_THE_END = re.compile(rf"([?&;](?:{'|'.join(_SECRET_NAMES)})=)([^&;]*)", re.IGNORECASE)
_SECRET_ARGUMENT = re.compile(rf"\b((?:{'|'.join(_SECRET_NAMES)})=)('[^']*'|\"[^\"]*\"|\{{[^}}]*\}})", re.IGNORECASE)
_PORT = re.compile(r"\d{0,5}[.:;)]*")
_QUOTED = re.compile(r"'([^']*)'|\"([^\"]*)\"")
_UNREADABLE: Final = re.compile(r"The (tls\w+) file is not readable")
_UNKNOWN: Final = "Unknown option."
_FRAGMENT_CHARS_MIN: Final = 3
_URI_BYTES_MAX: Final = 1 << 16


class ConnectionString:
    """A connection URI that does not show its secrets: not printed, not among a frame's locals, not in a pickle."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def reveal(self) -> str:
        """The URI as it was given."""
        return self._text

    def __repr__(self) -> str:
        return redact_uri(self._text, whole=True)

    def __eq__(self, other: object) -> bool:
        return self._text == other._text if isinstance(other, ConnectionString) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._text)

    def __reduce__(self) -> NoReturn:
        raise TypeError("a connection URI is not pickled, since it may hold a password")


class ClientOptions(dict[str, Any]):
    """PyMongo's client options; printed without the secrets among them."""

    def __repr__(self) -> str:
        return repr({name: REDACTED if _is_secret(name) else value for name, value in self.items()})

    @property
    def secrets(self) -> list[str]:
        """The texts among the values that are secret."""
        return [text for name, value in self.items() if _is_secret(name) for text in _texts(value)]


def hide(uri: str | ConnectionString) -> ConnectionString:
    """``uri`` in a form that does not show its secrets."""
    return ConnectionString(uri) if isinstance(uri, str) else uri


def without_scheme(text: str) -> tuple[str, str]:
    """The complaint about a connection URI that does not begin as one, and its hint. Neither quotes the text."""
    if _NAMESPACE.fullmatch(text) and not re.fullmatch(r"\d+|localhost", text):
        return (
            "the connection URI is missing: what was given in its place looks like a database or a collection",
            f"Give the URI before it, or set {URI_VARIABLE}. {URI_EXAMPLE}",
        )
    return "the connection URI does not begin with mongodb:// or mongodb+srv://", URI_EXAMPLE


def is_uri_argument(text: str) -> bool:
    """Whether an argument of a command is a connection URI, or ``@`` and the file that holds one."""
    return text.startswith("@") or _SCHEME.match(text) is not None


def find_uri(
    given: str | None, environment: Mapping[str, str] = os.environ, base: Path | None = None
) -> ConnectionString:
    """The connection URI of a command: ``given``, or else that in the environment variable TAILRACE_URI.

    ``@path`` stands for the text of that file, so that no password is seen among the processes of a machine; ``base``
    is the directory that the path starts from. Raises UsageError where there is none or the file cannot be read.
    """
    where = "the connection URI"
    if given is None:
        given, where = environment.get(URI_VARIABLE, ""), f"the environment variable {URI_VARIABLE}"
        if not given.strip():
            raise UsageError(
                "no connection URI was given",
                hint=f"Give mongodb://..., or @FILE with a file that holds it, or set {URI_VARIABLE}",
            )
    return hide(_file_text(given[1:], where, base) if given.startswith("@") else given.strip())


def _file_text(name: str, where: str, base: Path | None) -> str:
    if not name or "\0" in name:
        raise UsageError(f"{where} cannot be read from the file {name!r}: that is not the name of a file")
    try:
        with (Path(base or "") / name).open("rb") as file:
            raw = file.read(_URI_BYTES_MAX + 1)
        text = raw.decode("utf-8").strip()
    except (OSError, ValueError) as error:
        reason = (error.strerror or error) if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UsageError(f"{where} cannot be read from the file {name!r}: {reason}") from None
    if not text or "\n" in text or len(raw) > _URI_BYTES_MAX:
        raise UsageError(f"{where} cannot be read from the file {name!r}: it must hold one line, the URI")
    return text


def redact_repr(text: str) -> str:
    """The ``repr`` of a client of PyMongo's, which shows the secrets among its options."""
    return _SECRET_ARGUMENT.sub(rf"\1'{REDACTED}'", text)


def redact_uri(text: str, *, whole: bool = False) -> str:
    """``text`` with the secrets of every connection string in it replaced by ``***``; the user's name stays.

    Works on strings that do not parse too, and on longer texts that quote a connection string. ``whole`` says that the
    text is one connection string and nothing else, so that spaces do not end it.
    """
    before, *pieces = _SCHEME.split(text)
    parts = [_redact_bare(before)]
    for scheme, rest in zip(pieces[::2], pieces[1::2], strict=True):
        line, newline, others = rest.partition("\n")
        parts += [scheme, _redact_line(line, whole=whole), newline, _redact_bare(others)]
    return "".join(parts)


def _redact_bare(text: str) -> str:
    return _SECRET_OPTION.sub(rf"\1{REDACTED}", _BARE_USER_INFO.sub(rf"\1:{REDACTED}@", text))


def _redact_line(rest: str, *, whole: bool) -> str:
    """What follows a scheme, to the end of its line."""
    head = ""
    match = _USER_INFO.match(rest)
    if match is not None:
        user, colon, _ = match[0][:-1].partition(":")
        head, rest = f"{user}:{REDACTED}@" if colon else f"{user}@", rest[match.end() :]
    start, end = _password_for_port(rest, whole=whole)
    if start < end:
        rest = f"{rest[:start]}{REDACTED}{rest[end:]}"
    option = _SECRET_OPTION_TO_THE_END if whole else _SECRET_OPTION
    return head + option.sub(rf"\1{REDACTED}", rest)


def _password_for_port(rest: str, *, whole: bool) -> tuple[int, int]:
    """Where a password stands in the place of a port, as in ``mongodb://user:password`` whose host was left out."""
    end = len(rest) if whole else _run(rest, r"[^\s'\"]*")
    position = 0
    for member in rest[: _run(rest, r"[^/?]*" if whole else r"[^\s/?'\"]*")].split(","):
        if whole and re.search(r"\s", member):
            return position, end  # no host: the rest of a password with an @ in it
        host = member.rpartition("]")[0]
        _, colon, port = member[len(host) :].partition(":")
        if colon and not _PORT.fullmatch(port):
            return position + len(member) - len(port), end
        position += len(member) + 1
    return 0, 0


def _run(text: str, pattern: str) -> int:
    match = re.match(pattern, text)
    return match.end() if match else 0


def parse_complaint(complaint: str, uri: str, options: Mapping[str, Any] | None = None) -> str | None:
    """What a URI parser said about ``uri``, or ``None`` where any part of a secret might be in it.

    A parser that stumbles over an unescaped password quotes pieces of it as host, port or database name. Words that are
    not part of a secret stay.
    """
    complaint = _with_option(_with_file(complaint, uri), uri)
    secrets = [*_secrets(uri), *ClientOptions(options or {}).secrets]
    hidden = [text.lower() for secret in secrets for text in (secret, unquote_plus(secret))]
    fragments = {word for text in hidden for word in _words(text)} | set(hidden)
    if {fragment for fragment in fragments if len(fragment) >= _FRAGMENT_CHARS_MIN} & _words(complaint.lower()):
        return None

    def quoted(match: re.Match[str]) -> str:
        inside = match[1] if match[1] is not None else match[2]
        is_part = len(inside) >= _FRAGMENT_CHARS_MIN and any(inside.lower() in text for text in hidden)
        return f"'{REDACTED}'" if is_part else match[0]

    return redact_uri(_QUOTED.sub(quoted, complaint))


def _with_file(complaint: str, uri: str) -> str:
    """PyMongo names the option of a file that it cannot read, and from 4.20.1 on no longer the file."""
    option = _UNREADABLE.search(complaint)
    found = option and re.search(rf"[?&]{option[1]}=([^&]*)", uri, re.IGNORECASE)
    return f"{complaint}: '{unquote_plus(found[1])}'" if found else complaint


def _with_option(complaint: str, uri: str) -> str:
    """From PyMongo 4.20.1 on, an option that it does not know has no name in its warning: each is tried alone."""
    if not complaint.startswith(_UNKNOWN):
        return complaint
    from pymongo.errors import PyMongoError  # noqa: PLC0415  this module is read by commands that need no driver
    from pymongo.uri_parser import parse_uri  # noqa: PLC0415

    unknown = []
    for name in re.findall(r"[?&;]([^=&;]+)=", uri.rpartition("@")[2]):
        with warnings.catch_warnings(record=True) as warned, suppress(PyMongoError, ValueError):
            warnings.simplefilter("always")
            parse_uri(f"mongodb://host/?{name}=1", warn=True)
        if any("Unknown option" in str(one.message) for one in warned):
            unknown.append(name)
    return f"Unknown option {', '.join(unknown)}.{complaint.removeprefix(_UNKNOWN)}" if unknown else complaint


def _secrets(uri: str) -> Iterator[str]:
    """The parts of ``uri`` that hold a password or another secret."""
    rest = uri.partition("://")[2]
    body, at, _ = rest.rpartition("@")
    if at:
        yield body.partition(":")[2] if ":" in body else body
    start, end = _password_for_port(rest, whole=True)
    if start < end and not at:
        yield rest[start:end]
    for match in _SECRET_OPTION_TO_THE_END.finditer(rest):
        yield match[2]


def _is_secret(name: str) -> bool:
    return name.lower() in {secret.lower() for secret in _SECRET_NAMES}


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _texts(inner)
    elif isinstance(value, Sequence) and not isinstance(value, bytes):
        for inner in value:
            yield from _texts(inner)


def _words(text: str) -> set[str]:
    return {word for word in re.split(r"[\s:/@?&=%+,'\"]+", text) if word}
