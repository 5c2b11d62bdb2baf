"""The constant bytes of change events and columns: pieces of BSON and JSON that compiled code copies into place.

Each name is (offset, size) within ``TEXT``, whose address goes to compiled code once. Two adjoining constants are one
fragment wherever nothing stands between them in an event (semantics 2.4).
"""

from __future__ import annotations

_text = bytearray()


def _add(part: bytes) -> tuple[int, int]:
    at = len(_text)
    _text.extend(part)
    return at, len(part)


def _string(text: bytes) -> bytes:
    return (len(text) + 1).to_bytes(4, "little") + text + b"\0"


def _operation(name: bytes) -> tuple[int, int]:
    """From the end of the token to the cluster time's value."""
    return _add(b"\x02operationType\0" + _string(name) + b"\x11clusterTime\0")


def _identifier(name: bytes) -> tuple[int, int]:
    """KeyString of a version 2 event identifier up to the fields of the document key (semantics 1.6)."""
    return _add(b"\x46\x3coperationType\0\x3c" + name + b"\0\x46documentKey\0\x46")


TXN_NUMBER = _add(b"\x12txnNumber\0")
LSID = _add(b"\x03lsid\0")
ID = _add(b"\x03_id\0")
DATA = _add(b"\x02_data\0")
TYPE_BITS = _add(b"\x05_typeBits\0")
COLLECTION_UUID = _add(b"\x05collectionUUID\0\x10\0\0\0\x04")
WALL_TIME = _add(b"\x09wallTime\0")
FULL_DOCUMENT = _add(b"\x03fullDocument\0")
FULL_DOCUMENT_BEFORE_CHANGE = _add(b"\x03fullDocumentBeforeChange\0")
NS = _add(b"\x03ns\0")
DB = _add(b"\x02db\0")
COLL = _add(b"\x02coll\0")
DOCUMENT_KEY = _add(b"\x03documentKey\0")
UPDATE_DESCRIPTION = _add(b"\x03updateDescription\0")
RAW_UPDATE_DESCRIPTION = _add(b"\x03rawUpdateDescription\0")
UPDATED_FIELDS = _add(b"\x03updatedFields\0")
REMOVED_FIELDS = _add(b"\x04removedFields\0")
TRUNCATED_ARRAYS = _add(b"\x04truncatedArrays\0")
DISAMBIGUATED_PATHS = _add(b"\x03disambiguatedPaths\0")
EMPTY_DOCUMENT = _add(b"\x05\0\0\0\0")
FIELD = _add(b"\x02field\0")
NEW_SIZE = _add(b"\x10newSize\0")

TO = _add(b"\x03to\0")
OPERATION_DESCRIPTION = _add(b"\x03operationDescription\0")
INDEXES = _add(b"\x04indexes\0")
FIRST_ELEMENT = _add(b"\x030\0")
#: The whole element, of a collection that was created.
NS_TYPE_COLLECTION = _add(b"\x02nsType\0" + _string(b"collection"))

OPERATION_INSERT = _operation(b"insert")
OPERATION_UPDATE = _operation(b"update")
OPERATION_REPLACE = _operation(b"replace")
OPERATION_DELETE = _operation(b"delete")
OPERATION_DROP = _operation(b"drop")
OPERATION_RENAME = _operation(b"rename")
OPERATION_CREATE = _operation(b"create")
OPERATION_CREATE_INDEXES = _operation(b"createIndexes")
#: Each of these begins with the whole element ``operationType``.
OPERATION_TYPE_REST = len(b"\x11clusterTime\0")

IDENTIFIER_INSERT = _identifier(b"insert")
IDENTIFIER_UPDATE = _identifier(b"update")
IDENTIFIER_REPLACE = _identifier(b"replace")
IDENTIFIER_DELETE = _identifier(b"delete")

#: Key string between the cluster time and the UUID's bytes: version, token type 128, index 0, not an invalidate, UUID.
KEY_MIDDLE_V1 = _add(b"\x2b\x02\x2c\x01\x00\x29\x6e\x5a\x10\x04")
KEY_MIDDLE_V2 = _add(b"\x2b\x04\x2c\x01\x00\x29\x6e\x5a\x10\x04")
#: Where the index stands in these two.
KEY_INDEX = 5

#: The upper-case hexadecimal digits of each byte.
HEX = _add(b"".join(b"%02X" % byte for byte in range(256)))
#: The same in lower case.
LOWER_HEX = _add(b"".join(b"%02x" % byte for byte in range(256)))

#: Pieces of Extended JSON.
JSON_NULL = _add(b"null")
JSON_TRUE = _add(b"true")
JSON_FALSE = _add(b"false")
JSON_OBJECT_ID = _add(b'{"$oid": "')
JSON_DATE = _add(b'{"$date": "')
JSON_LONG_DATE = _add(b'{"$date": {"$numberLong": "')
JSON_DECIMAL = _add(b'{"$numberDecimal": "')
JSON_DOUBLE = _add(b'{"$numberDouble": "')
JSON_NAN = _add(b'NaN"}')
JSON_INFINITY = _add(b'Infinity"}')
JSON_BINARY = _add(b'{"$binary": {"base64": "')
JSON_SUBTYPE = _add(b'", "subType": "')
JSON_TIMESTAMP = _add(b'{"$timestamp": {"t": ')
JSON_INCREMENT = _add(b', "i": ')
JSON_MIN_KEY = _add(b'{"$minKey": 1}')
JSON_MAX_KEY = _add(b'{"$maxKey": 1}')
BASE64 = _add(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/")

TEXT = bytes(_text)
