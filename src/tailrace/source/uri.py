"""Connection strings without their secrets: what may stand in a log, an error or an offset."""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import unquote_plus

REDACTED: Final = "***"

#: Everything between the scheme and the last ``@`` of the run. Greedy on purpose: a password that should have been
#: percent-encoded may hold ``/``, ``:`` or ``@``, and hiding too much is the safe mistake.
_USER_INFO = re.compile(r"(mongodb(?:\+srv)?://)(\S*)@", re.IGNORECASE)
#: Options whose value is a secret (uri-options specification), also inside an unfinished string.
_SECRET_OPTION = re.compile(
    r"((?:authMechanismProperties|tlsCertificateKeyFilePassword|sslPEMPassphrase|ssl_pem_passphrase|proxyPassword"
    r"|password|aws_session_token)=)([^&\s]*)",
    re.IGNORECASE,
)
_QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"")
_FRAGMENT_CHARS_MIN: Final = 3


def redact_uri(text: str) -> str:
    """``text`` with the secrets of every connection string in it replaced by ``***``; the user's name stays.

    Works on strings that do not parse too, and on longer texts that quote a connection string.
    """

    def without_password(match: re.Match[str]) -> str:
        scheme, user_info = match.groups()
        user, colon, _ = user_info.partition(":")
        return f"{scheme}{user}:{REDACTED}@" if colon else f"{scheme}{user}@"

    return _SECRET_OPTION.sub(rf"\1{REDACTED}", _USER_INFO.sub(without_password, text))


def parse_complaint(complaint: str, uri: str) -> str | None:
    """What a URI parser said about ``uri``, or ``None`` where any part of a secret might be in it.

    A parser that stumbles over an unescaped password quotes pieces of it as host, port or database name.
    """
    if "@" not in uri:
        return redact_uri(complaint)
    if not _secret_fragments(uri).isdisjoint(_words(complaint)):
        return None
    return redact_uri(_QUOTED.sub(f"'{REDACTED}'", complaint))


def _secret_fragments(uri: str) -> set[str]:
    body = uri.partition("://")[2].rpartition("@")[0]
    pieces = _words(body) | _words(unquote_plus(body)) | {body, unquote_plus(body)}
    return {piece for piece in pieces if len(piece) >= _FRAGMENT_CHARS_MIN}


def _words(text: str) -> set[str]:
    return {word for word in re.split(r"[\s:/@?&=%+,'\"]+", text) if word}
