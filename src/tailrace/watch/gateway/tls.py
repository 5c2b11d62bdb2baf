"""TLS to clients."""

from __future__ import annotations

import ssl
from pathlib import Path

from tailrace.errors import UsageError


def server_context(certificate: str, authority: str | None) -> ssl.SSLContext:
    """For a server that shows ``certificate``; ``authority``: clients must show one of this CA. Raises UsageError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    for name in (certificate, authority):
        if name is not None and not Path(name).is_file():
            raise UsageError(f"there is no file {name!r}")
    try:
        context.load_cert_chain(certificate)
        if authority is not None:
            context.load_verify_locations(authority)
            context.verify_mode = ssl.CERT_REQUIRED
    except (ssl.SSLError, OSError) as error:
        raise UsageError(f"the certificate cannot be used: {error}") from None
    return context
