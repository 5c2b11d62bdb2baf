"""Resume tokens: the ``_id`` of every change event, and the position that a stream can start again from.

What may live here: the token's fields, its two forms (BSON document and hex string), order, and the errors of reading
one. A token is the KeyString of its fields (``keystring``), so that the byte order of tokens is the order of events.
Layout, versions and errors: ``docs/reference/resume-tokens.md``.
"""

from __future__ import annotations

import binascii
import struct
from collections.abc import Callable, Mapping
from functools import total_ordering
from typing import Any, Final, NamedTuple

import bson
from bson.binary import Binary

from tailrace.core import raw_bson
from tailrace.core.event import keystring
from tailrace.core.event.bson_text import document_text
from tailrace.core.event.keystring_number import encode_int
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.errors import InvalidResumeToken

HIGH_WATER_MARK: Final = 0
EVENT: Final = 128

_VERSIONS: Final[dict[int, bytes]] = {0: b"\x29", 1: b"\x2b\x02", 2: b"\x2b\x04"}
_TYPES: Final[dict[int, bytes]] = {HIGH_WATER_MARK: b"\x29", EVENT: b"\x2c\x01\x00"}
#: Version, token type, txnOpIndex 0, fromInvalidate false and the head of a UUID: what nearly every event begins with.
_COMMON_HEAD: Final[dict[int, bytes]] = {
    version: _VERSIONS[version] + _TYPES[EVENT] + b"\x29\x6e\x5a\x10\x04" for version in (1, 2)
}
#: Bytes for range bounds, which may stand before the end byte; the server reads over them.
_DISCRIMINATORS: Final = (0x01, 0xFE)
_BAD_HIGH_WATER_MARK: Final = "Invalid high water mark token"
_INT32_BITS: Final = "00"

_DOCUMENT = struct.Struct("<i7si")
_TYPE_BITS = struct.Struct("<11sib")
_DATA_FIELD: Final = b"\x02_data\x00"
_TYPE_BITS_FIELD: Final = b"\x05_typeBits\x00"
_OBJECT_ID_KEY: Final = b"\x16\x00\x00\x00\x07_id\x00"


class TokenParts(NamedTuple):
    """A token's fields. ``identifier_key`` is the identifier's key bytes: equal for values that compare equal."""

    cluster_time: ClusterTime
    version: int
    token_type: int
    txn_op_index: int
    from_invalidate: bool
    uuid: bytes | None
    event_identifier: bytes | None
    fragment_num: int | None
    identifier_key: bytes | None


def _identifier(document: bytes) -> tuple[bytes, str]:
    """Key bytes and type bits of an identifier, the common ``{_id: ObjectId}`` without a walk."""
    if len(document) == 22 and document.startswith(_OBJECT_ID_KEY):
        return b"Fd_id\x00d%b\x00" % document[9:21], ""
    return keystring.encode_object(document)


def encode_event_token(
    cluster_time: int,
    *,
    version: int,
    txn_op_index: int,
    from_invalidate: bool,
    uuid: bytes | None,
    identifier: bytes | None,
    fragment_num: int | None = None,
) -> bytes:
    """The token of an event as its BSON document, ``{_data[, _typeBits]}``.

    ``uuid`` is 16 bytes; ``identifier`` is a BSON document (what it holds depends on event and version).
    """
    if uuid is not None and txn_op_index == 0 and not from_invalidate:
        head = _COMMON_HEAD[version] + uuid
    else:
        head = b"%b%b%b%b" % (
            _VERSIONS[version],
            _TYPES[EVENT],
            encode_int(txn_op_index),
            b"\x6f" if from_invalidate else b"\x6e",
        )
        if uuid is not None:
            head += b"\x5a\x10\x04" + uuid
        elif version == 2:
            head += b"\x14"
    identifier_key, bits = _identifier(identifier) if identifier is not None else (b"", "")
    time_bytes = cluster_time.to_bytes(8, "big")
    if fragment_num is None and "1" not in bits:
        key = b"\x82%b%b%b\x04" % (time_bytes, head, identifier_key)
        return _document(key, None)
    if fragment_num is not None:
        identifier_key += encode_int(fragment_num)
        bits += _INT32_BITS
    key = b"\x82%b%b%b\x04" % (time_bytes, head, identifier_key)
    # version, tokenType and txnOpIndex are int32: two zero bits each stand in front.
    return _document(key, keystring.pack_type_bits("000000" + bits))


def _encode_parts(parts: TokenParts) -> tuple[bytes, bytes | None]:
    """The document of a token of version 1 or 2 from any fields that can be read, and its identifier's key bytes."""
    identifier_key: bytes | None = None
    bits = _INT32_BITS * 3
    key = b"\x82%b%b%b%b%b" % (
        int(parts.cluster_time).to_bytes(8, "big"),
        _VERSIONS[parts.version],
        _TYPES[parts.token_type],
        encode_int(parts.txn_op_index),
        b"\x6f" if parts.from_invalidate else b"\x6e",
    )
    if parts.uuid is not None:
        key += b"\x5a\x10\x04" + parts.uuid
    elif parts.version == 2:
        key += b"\x14"
    if parts.event_identifier is not None:
        identifier_key, identifier_bits = keystring.encode_object(parts.event_identifier)
        key, bits = key + identifier_key, bits + identifier_bits
    if parts.fragment_num is not None:
        key, bits = key + encode_int(parts.fragment_num), bits + _INT32_BITS
    return _document(key + b"\x04", keystring.pack_type_bits(bits)), identifier_key


def encode_high_water_mark(cluster_time: int, version: int = 1) -> bytes:
    """The high-water mark of ``cluster_time`` as its BSON document; below every event of that time."""
    end = b"\x14\x04" if version == 2 else b"\x04"
    return _document(b"\x82%b%b\x29\x29\x6e%b" % (cluster_time.to_bytes(8, "big"), _VERSIONS[version], end), None)


def token_order(document: bytes) -> bytes:
    """What a token document is ordered by: the hex digits of its ``_data``, whose order is that of the key bytes."""
    # The document begins with its length, the field _data and the string's length: 15 bytes.
    return document[15 : 14 + raw_bson.read_int32(document, 11)]


def _document(key: bytes, type_bits: bytes | None) -> bytes:
    data = binascii.hexlify(key).upper()
    size = len(data)
    if type_bits is None:
        return _DOCUMENT.pack(size + 17, _DATA_FIELD, size + 1) + data + b"\x00\x00"
    tail = _TYPE_BITS.pack(_TYPE_BITS_FIELD, len(type_bits), 0) + type_bits
    return _DOCUMENT.pack(size + 17 + len(tail), _DATA_FIELD, size + 1) + data + b"\x00" + tail + b"\x00"


@total_ordering
class ResumeToken:
    """One resume token; immutable. Fields are decoded when they are first asked for.

    Tokens are equal and ordered by ``sort_key``: type bits do not count, as in the server.
    """

    __slots__ = ("_document", "_parts")

    _document: bytes
    _parts: TokenParts | None

    def __init__(
        self,
        cluster_time: int,
        *,
        version: int = 1,
        token_type: int = EVENT,
        txn_op_index: int = 0,
        from_invalidate: bool = False,
        uuid: bytes | None = None,
        event_identifier: bytes | None = None,
        fragment_num: int | None = None,
    ) -> None:
        if token_type == HIGH_WATER_MARK:
            document = encode_high_water_mark(cluster_time, version)
        else:
            document = encode_event_token(
                cluster_time,
                version=version,
                txn_op_index=txn_op_index,
                from_invalidate=from_invalidate,
                uuid=uuid,
                identifier=event_identifier,
                fragment_num=fragment_num,
            )
        _set_document(self, document)
        _set_parts(self, None)

    @classmethod
    def high_water_mark(cls, cluster_time: int, version: int = 1) -> ResumeToken:
        return cls(cluster_time, version=version, token_type=HIGH_WATER_MARK)

    @classmethod
    def from_trusted(cls, document: bytes) -> ResumeToken:
        """The token of a document that ``encode_event_token`` or a server made; its key is not checked here."""
        token = _new(cls)
        _set_document(token, document)
        _set_parts(token, None)
        return token

    @classmethod
    def from_hex(cls, data: str, type_bits: bytes | None = None) -> ResumeToken:
        """Read and check ``_data``, in upper or lower case. Raises ``InvalidResumeToken`` with the server's code.

        The token is rebuilt from its fields, as the server does before it returns it: bytes after the end byte, type
        bits that nothing needs and wrong generic bytes disappear (measured on 6.0.27).
        """
        parts = parse_parts(data, type_bits)
        token = _new(cls)
        if parts.version == 0:
            _set_document(token, _document(bytes.fromhex(data), type_bits))
        else:
            document, identifier_key = _encode_parts(parts)
            _set_document(token, document)
            parts = parts._replace(identifier_key=identifier_key)
        _set_parts(token, parts)
        return token

    @classmethod
    def parse(cls, document: bytes | Mapping[str, Any]) -> ResumeToken:
        """Read and check a token document. Raises ``InvalidResumeToken`` with the server's code."""
        if not isinstance(document, bytes):
            document = bson.encode(document)
        return cls.from_hex(*_split_document(document))

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a ResumeToken cannot change: {name}")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"a ResumeToken cannot change: {name}")

    def __reduce__(self) -> tuple[object, ...]:
        return (ResumeToken.from_trusted, (self.to_bson(),))

    @property
    def data(self) -> str:
        """``_data``: upper-case hex."""
        return self._hex().decode()

    def _hex(self) -> bytes:
        return token_order(self._document)

    @property
    def type_bits(self) -> bytes | None:
        """``_typeBits`` in their stored form; ``None`` when the token has none."""
        start = 15 + raw_bson.read_int32(self._document, 11) + len(_TYPE_BITS_FIELD) + 5
        return self._document[start:-1] if start < len(self._document) else None

    @property
    def sort_key(self) -> bytes:
        """The key bytes; their order is the order of events, over all shards."""
        return binascii.unhexlify(self._hex())

    @property
    def parts(self) -> TokenParts:
        parts = self._parts
        if parts is None:
            parts = parse_parts(self.data, self.type_bits)
            _set_parts(self, parts)
        return parts

    @property
    def cluster_time(self) -> ClusterTime:
        return ClusterTime(int(self._document[17:33], 16))

    @property
    def version(self) -> int:
        return self.parts.version

    @property
    def token_type(self) -> int:
        """``HIGH_WATER_MARK`` or ``EVENT``."""
        return self.parts.token_type

    @property
    def is_high_water_mark(self) -> bool:
        """Whether it is a whole high-water mark: if further fields are set, the server takes the token for an
        event's."""
        parts = self.parts
        return (
            parts.token_type == HIGH_WATER_MARK
            and not parts.from_invalidate
            and parts.txn_op_index == 0
            and parts.uuid is None
        )

    @property
    def txn_op_index(self) -> int:
        return self.parts.txn_op_index

    @property
    def from_invalidate(self) -> bool:
        return self.parts.from_invalidate

    @property
    def uuid(self) -> bytes | None:
        """The collection's UUID, 16 bytes."""
        return self.parts.uuid

    @property
    def event_identifier(self) -> bytes | None:
        """The identifier as a BSON document."""
        return self.parts.event_identifier

    @property
    def fragment_num(self) -> int | None:
        return self.parts.fragment_num

    def to_bson(self) -> bytes:
        """The token document, ``{_data[, _typeBits]}``."""
        return self._document

    def to_document(self) -> dict[str, Any]:
        """The token document for a driver."""
        type_bits = self.type_bits
        if type_bits is None:
            return {"_data": self.data}
        return {"_data": self.data, "_typeBits": Binary(type_bits, 0)}

    def __eq__(self, other: object) -> bool:
        return self._hex() == other._hex() if isinstance(other, ResumeToken) else NotImplemented

    def __lt__(self, other: ResumeToken) -> bool:
        # Upper-case hex digits are in the order of the numbers that they stand for.
        return self._hex() < other._hex() if isinstance(other, ResumeToken) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._hex())

    def __repr__(self) -> str:
        return f"ResumeToken({self.data})"


# A token is made for every event: the slots' own setters pass by __setattr__, which refuses everybody else.
_new: Final = object.__new__
_set_document: Final[Callable[[ResumeToken, bytes], None]] = ResumeToken.__dict__["_document"].__set__
_set_parts: Final[Callable[[ResumeToken, TokenParts | None], None]] = ResumeToken.__dict__["_parts"].__set__


def _split_document(document: bytes) -> tuple[str, bytes | None]:
    """``_data`` and ``_typeBits`` of a token document; other fields are let pass, as the server does."""
    data: str | None = None
    type_bits: bytes | None = None
    for element in raw_bson.elements(document):
        if element.name == b"_data" and data is None and element.type == raw_bson.STRING:
            data = raw_bson.read_string(document, element.value_start).decode("utf-8", "replace")
        elif element.name == b"_typeBits":
            value = raw_bson.value(document, element)
            if element.type != raw_bson.BINARY or value[4] != 0:
                raise InvalidResumeToken(
                    f"Bad resume token: _typeBits of wrong type {document_text(document)}", code=40648
                )
            type_bits = value[5:]
    if data is None:
        raise InvalidResumeToken(
            "Bad resume token: _data of missing or of wrong type. Expected string, got " + document_text(document),
            code=40647,
        )
    return data, type_bits


def parse_parts(data: str, type_bits: bytes | None) -> TokenParts:
    """The fields of a token. Raises ``InvalidResumeToken`` with the server's code if the bytes are not a token."""
    return _fields(data, type_bits).parts()


def version_of(data: str) -> int:
    """The version of a token whose type bits are not known: without them its document's key may not be readable. Raises
    ``InvalidResumeToken`` as ``parse_parts``."""
    return _fields(data, None, 2).version()


def _fields(data: str, type_bits: bytes | None, count: int | None = None) -> _Fields:
    """The first ``count`` values of a token, or all."""
    try:
        key = binascii.unhexlify(data)
    except ValueError:
        raise InvalidResumeToken("resume token string was not a valid hex string", code=9) from None
    reader = keystring.KeyReader(key, type_bits or b"")
    values: list[tuple[int, bytes]] = []
    spans: list[bytes] = []
    while reader.pos < len(key) and len(values) != count:  # a missing end byte is let pass, as the server does
        start = reader.pos
        ctype = reader.take_byte()
        if ctype in _DISCRIMINATORS:
            ctype = reader.take_byte()
        if ctype == keystring.END:
            break
        values.append(reader.value(ctype))
        spans.append(key[start : reader.pos])
    return _Fields(values, spans)


class _Fields:
    """A token's values, taken one after another with the server's check of each."""

    def __init__(self, values: list[tuple[int, bytes]], spans: list[bytes]) -> None:
        self._values = values
        self._spans = spans
        self._next = 0

    def version(self) -> int:
        self._cluster_time()
        return self._version()

    def _version(self) -> int:
        version = self._int32(
            50796, "Resume Token does not contain version", 50854, "Invalid resume token: wrong type for version"
        )
        if version not in _VERSIONS:
            raise InvalidResumeToken("Invalid Resume Token: only supports version 0, 1 and 2", code=50795)
        return version

    def parts(self) -> TokenParts:
        cluster_time = self._cluster_time()
        version = self._version()
        token_type = self._token_type() if version else EVENT
        txn_op_index = self._int32(
            50793, "Resume Token does not contain txnOpIndex", 50855, "Resume Token txnOpIndex is not an integer"
        )
        if txn_op_index < 0:
            raise InvalidResumeToken("Invalid Resume Token: txnOpIndex should be non-negative", code=50794)
        from_invalidate = self._from_invalidate() if version else False
        uuid = self._uuid(version)
        identifier, identifier_key = self._identifier(version, token_type)
        fragment = self._fragment() if version == 2 else None
        if self._more():
            raise InvalidResumeToken("invalid oversized resume token", code=40646)
        return TokenParts(
            cluster_time,
            version,
            token_type,
            txn_op_index,
            from_invalidate,
            uuid,
            identifier,
            fragment,
            identifier_key,
        )

    def _more(self) -> bool:
        return self._next < len(self._values)

    def _take(self) -> tuple[int, bytes]:
        self._next += 1
        return self._values[self._next - 1]

    def _cluster_time(self) -> ClusterTime:
        if not self._more():
            raise InvalidResumeToken("invalid empty resume token", code=40649)
        type_, value = self._take()
        return ClusterTime.from_bytes_le(value) if type_ == raw_bson.TIMESTAMP else ClusterTime(0)

    def _int32(self, missing_code: int, missing: str, type_code: int, wrong_type: str) -> int:
        if not self._more():
            raise InvalidResumeToken(missing, code=missing_code)
        type_, value = self._take()
        if type_ != raw_bson.INT32:
            raise InvalidResumeToken(wrong_type, code=type_code)
        return raw_bson.read_int32(value, 0)

    def _token_type(self) -> int:
        token_type = self._int32(
            51055, "Resume Token does not contain tokenType", 51056, "Resume Token tokenType is not an int."
        )
        if token_type not in _TYPES:
            raise InvalidResumeToken(f"Token type {token_type} not recognized", code=51057)
        return token_type

    def _from_invalidate(self) -> bool:
        if not self._more():
            raise InvalidResumeToken("Resume Token does not contain fromInvalidate", code=50872)
        type_, value = self._take()
        if type_ != raw_bson.BOOL:
            raise InvalidResumeToken("Resume Token fromInvalidate is not a boolean.", code=50870)
        return value == b"\x01"

    def _uuid(self, version: int) -> bytes | None:
        if not self._more():
            if version == 2:
                raise InvalidResumeToken("Expected UUID or null", code=6189500)
            return None
        type_, value = self._take()
        if type_ == raw_bson.NULL:
            return None
        if type_ != raw_bson.BINARY or value[4] != 4 or len(value) != 21:
            raise InvalidResumeToken("uuid must be a 16-byte binary field with UUID (4) subtype", code=207)
        return value[5:]

    def _identifier(self, version: int, token_type: int) -> tuple[bytes | None, bytes | None]:
        if not self._more():
            if version == 2 and token_type == EVENT:
                raise InvalidResumeToken("Expected an eventIdentifier for an event resume token", code=6189501)
            return None, None
        if token_type == HIGH_WATER_MARK:
            raise InvalidResumeToken(_BAD_HIGH_WATER_MARK, code=6189504)
        type_, value = self._take()
        if type_ != raw_bson.OBJECT:
            raise InvalidResumeToken("Resume Token eventIdentifier is not an object", code=6189503)
        return value, self._spans[self._next - 1]

    def _fragment(self) -> int | None:
        if not self._more():
            return None
        type_, value = self._take()
        if type_ != raw_bson.INT32 or raw_bson.read_int32(value, 0) < 0:
            raise InvalidResumeToken("Resume token 'fragmentNum' must be a non-negative integer.", code=7182501)
        return raw_bson.read_int32(value, 0)
