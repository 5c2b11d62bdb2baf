"""Masked values: a hash, which cannot be turned back, or a token, which the holder of the key can turn back.

Both depend on the value alone, with its BSON type: equal values are masked equally wherever they are, so that masked
fields still join and group. 1 and 1.0 are different values here.
"""

from __future__ import annotations

import base64
import binascii
import hmac
from typing import Any, Final, NoReturn

from tailrace.core import raw_bson
from tailrace.errors import UsageError

#: A secret of fewer bytes can be guessed.
SECRET_BYTES_MIN: Final = 16
#: How a token begins.
TOKEN_HEAD: Final = "tok1_"
#: Types without a content to hide. Null also fills an array that grows, which no update tells.
VOID_TYPES: Final = frozenset({raw_bson.NULL, raw_bson.UNDEFINED, raw_bson.MIN_KEY, raw_bson.MAX_KEY})


class MaskKey:
    """The keys made of a user's secret. It is never shown, and does not leave its process."""

    __slots__ = ("_cipher", "_hash", "fingerprint")

    def __init__(self, secret: bytes) -> None:
        """Raises UsageError for a secret that is too short."""
        if len(secret) < SECRET_BYTES_MIN:
            raise UsageError(
                f"the key of the masks has fewer than {SECRET_BYTES_MIN} bytes",
                hint="Make one with: openssl rand -hex 32",
            )
        self._hash = hmac.new(_derived(secret, "hash"), digestmod="sha256")
        self._cipher: Any = _derived(secret, "tokenise")
        #: Tells keys apart, and says nothing else of them: 16 hexadecimal digits.
        self.fingerprint = _derived(secret, "fingerprint").hex()[:16]

    def __repr__(self) -> str:
        return f"MaskKey({self.fingerprint})"

    def __reduce__(self) -> NoReturn:
        raise TypeError("the key of masks is not pickled")

    def hashed(self, content: bytes) -> bytes:
        """HMAC-SHA-256 of a value's type byte and BSON, as 64 hexadecimal digits."""
        made = self._hash.copy()
        made.update(content)
        return made.hexdigest().encode()

    def token(self, content: bytes) -> bytes:
        """AES-SIV of a value's type byte and BSON, as text."""
        made: bytes = self._siv().encrypt(content, None)
        return TOKEN_HEAD.encode() + base64.urlsafe_b64encode(made).rstrip(b"=")

    def revealed(self, token: str) -> tuple[int, bytes]:
        """The BSON type and the value that a token stands for. Raises UsageError for what is no token of this key."""
        text = token.strip().removeprefix(TOKEN_HEAD)
        if text == token.strip():
            raise UsageError(f"this is not a token: tokens begin with {TOKEN_HEAD}")
        cipher = self._siv()
        from cryptography.exceptions import InvalidTag  # noqa: PLC0415

        try:
            sealed = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
            content: bytes = cipher.decrypt(sealed, None)
        except (binascii.Error, ValueError, InvalidTag):
            raise UsageError(
                "the token was not made with this key, or it is damaged", hint=f"The key is {self.fingerprint}"
            ) from None
        return content[0], content[1:]

    def _siv(self) -> Any:
        if isinstance(self._cipher, bytes):
            try:
                from cryptography.hazmat.primitives.ciphers.aead import AESSIV  # noqa: PLC0415  for tokens only
            except ImportError:
                raise UsageError(
                    "tokens need the package cryptography", hint="Install it: pip install 'tailrace[masks]'"
                ) from None
            self._cipher = AESSIV(self._cipher)
        return self._cipher


def _derived(secret: bytes, purpose: str) -> bytes:
    """A key of 64 bytes for one purpose."""
    return hmac.new(secret, f"tailrace masks 1: {purpose}".encode(), "sha512").digest()
