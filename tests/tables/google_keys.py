"""Keys of service accounts, as Google's console gives them out, for the tests' stores. They are made once for all
processes of this machine."""

from __future__ import annotations

import base64
import functools
import json
from pathlib import Path
from typing import Final

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import padding, rsa

from tailrace.base.cache import cached_directory
from tests.tables.object_server import SECRET

#: Who may read and write (as Google's role ``storage.objectUser``), who may only read (``storage.objectViewer``), and
#: one whose key the store does not know.
WRITER, READER, STRANGER = "writer", "reader", "stranger"
_ALL: Final = (WRITER, READER, STRANGER)
_PARTS: Final = 3


def _make(directory: Path) -> None:
    for name in _ALL:
        key = rsa.generate_private_key(65537, 2048)
        form = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        (directory / name).write_bytes(key.private_bytes(*form))


@functools.cache
def private_key(name: str) -> str:
    """As PEM."""
    found = cached_directory("google-keys", _make, usable=lambda one: all((one / name).is_file() for name in _ALL))
    return (found / name).read_text()


def key_file(name: str) -> str:
    """The content of such an account's key file. Programs sign their own tokens with it. In front of the key it has a
    word that tests look for in what Tailrace writes and says."""
    address = f"{name}@tests.iam.gserviceaccount.com"
    return json.dumps(
        {
            "type": "service_account",
            "client_email": address,
            "private_key_id": name,
            "private_key": f"{SECRET}\n{private_key(name)}",
        }
    )


@functools.cache
def owner_of(token: str) -> str:
    """Which of ``WRITER`` and ``READER`` has signed a token; empty if neither has."""
    parts = token.split(".")
    if len(parts) != _PARTS:
        return ""
    try:
        name = json.loads(_bytes(parts[0]))["kid"]
        assert name in (WRITER, READER)
        key = serialization.load_pem_private_key(private_key(name).encode(), None)
        assert isinstance(key, rsa.RSAPrivateKey)
        signed = f"{parts[0]}.{parts[1]}".encode()
        key.public_key().verify(_bytes(parts[2]), signed, padding.PKCS1v15(), hashes.SHA256())
    except (InvalidSignature, ValueError, KeyError, AssertionError):
        return ""
    return str(name)


def _bytes(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
