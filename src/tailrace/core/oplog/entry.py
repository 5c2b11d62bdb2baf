"""An oplog entry as a view on its BSON bytes: the few fields that the stages read are located, nothing is decoded.

The layout is the server's (semantics 2 and 4): ``op`` i, u, d, c or n; ``ns``; ``ui`` the collection's UUID; ``o``
and ``o2`` documents; ``ts`` and ``wall``; for transactions ``lsid``, ``txnNumber`` and ``prevOpTime``. The operations
inside an ``applyOps`` have the same shape without times, which they take from the entry that commits them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from tailrace.core import raw_bson
from tailrace.core.oplog.cluster_time import ZERO, ClusterTime
from tailrace.core.oplog.write_head import fields_of_write
from tailrace.core.raw_bson import ARRAY, BINARY, BOOL, DATE, INT32, INT64, OBJECT, STRING, TIMESTAMP, Element
from tailrace.errors import OplogFormatError

#: What each field that we read must be; another type means that this is no oplog entry as any server writes it.
_FIELD_TYPES: Final[dict[bytes, tuple[int, ...]]] = {
    b"op": (STRING,),
    b"ns": (STRING,),
    b"ts": (TIMESTAMP,),
    b"ui": (BINARY,),
    b"o": (OBJECT,),
    b"o2": (OBJECT,),
    b"wall": (DATE,),
    b"lsid": (OBJECT,),
    b"txnNumber": (INT64, INT32),
    b"prevOpTime": (OBJECT,),
}
#: Fields that count only with this type and say nothing with any other: only the boolean true marks a migration.
_ANY_TYPE: Final = {b"fromMigrate": BOOL, b"multiOpType": INT32, b"preImageOpTime": OBJECT}
#: What the server says about a field with another type than it expects (measured with entries made by hand).
_TYPE_ERRORS: Final[dict[bytes, tuple[int, str]]] = {
    b"wall": (40532, 'Entry field "wall" should be date, found: {type}'),
    b"o2": (6189503, "Resume Token eventIdentifier is not an object"),
}
_UUID_SIZE: Final = 4 + 1 + 16
#: What most retryable writes have for ``prevOpTime``: the null op time.
_NO_OP_TIME: Final = raw_bson.encode_document(
    raw_bson.encode_element(TIMESTAMP, b"ts", bytes(8)), raw_bson.encode_element(INT64, b"t", b"\xff" * 8)
)


class OplogEntry:
    """One entry, or one operation out of a transaction.

    ``operation``        the letter of ``op``
    ``namespace``        bytes of ``ns``
    ``cluster_time``     of the entry; inside a transaction that of the entry that commits it
    ``wall_ms``          milliseconds since the epoch, or ``None`` where the entry has no ``wall``
    ``collection_uuid``  16 bytes or ``None``
    ``o``, ``o2``        BSON documents, or ``None`` where missing
    ``image_time``, ``image_index``   where this operation's pre-image is filed (semantics 5)
    ``logged_image``     of versions before 6.0: the time of the no-op entry that holds the document before
    ``multi_op``         an applyOps that holds several retryable writes and is no transaction (``multiOpType: 1``)
    ``in_transaction``   whether the event shows ``lsid`` and ``txnNumber`` (a retryable write does not)
    """

    __slots__ = (
        "cluster_time",
        "collection_uuid",
        "from_migrate",
        "image_index",
        "image_time",
        "in_transaction",
        "logged_image",
        "lsid",
        "multi_op",
        "namespace",
        "o",
        "o2",
        "operation",
        "prev_op_term",
        "prev_op_time",
        "txn_number",
        "txn_op_index",
        "wall_ms",
    )

    operation: str
    namespace: bytes
    cluster_time: ClusterTime
    wall_ms: int | None
    collection_uuid: bytes | None
    o: bytes | None
    o2: bytes | None
    lsid: bytes | None
    txn_number: int | None
    prev_op_time: ClusterTime | None
    prev_op_term: int
    from_migrate: bool
    multi_op: bool
    in_transaction: bool
    txn_op_index: int
    image_time: ClusterTime
    image_index: int
    logged_image: ClusterTime | None

    @property
    def position(self) -> str:
        """Where this entry stands, for messages."""
        index = f", operation {self.txn_op_index} of its transaction" if self.in_transaction else ""
        return f"oplog entry {self.cluster_time}{index}"

    def command_fields(self) -> dict[bytes, Element]:
        """The elements of ``o`` by name, for a command or a no-op (the first of a name wins, as in the server)."""
        return first_elements(self.o)


def first_elements(document: bytes | None) -> dict[bytes, Element]:
    """The elements of a document by name; of equal names the first."""
    found: dict[bytes, Element] = {}
    if document is not None:
        for element in raw_bson.elements(document):
            found.setdefault(element.name, element)
    return found


def parse_entry(raw: bytes) -> OplogEntry:
    """The entry in ``raw`` (one BSON document).

    Raises ``OplogFormatError`` with the entry's position when the bytes are corrupt, a field has a type that no server
    writes, or ``op`` or ``ts`` is missing.
    """
    fields = fields_of_write(raw) or _read_fields(raw)
    time_bytes = fields.get(b"ts")
    if time_bytes is None:
        raise OplogFormatError("an oplog entry has no 'ts' (timestamp) field", position="an entry without a time")
    time = ClusterTime.from_bytes_le(time_bytes)
    entry = _fill(fields, time)
    entry.cluster_time = entry.image_time = time
    wall = fields.get(b"wall")
    entry.wall_ms = None if wall is None else int.from_bytes(wall, "little", signed=True)
    entry.lsid = fields.get(b"lsid")
    number = fields.get(b"txnNumber")
    entry.txn_number = None if number is None else int.from_bytes(number, "little", signed=True)
    previous = fields.get(b"prevOpTime")
    entry.prev_op_time, entry.prev_op_term = (None, -1) if previous is None else _op_time(previous)
    return entry


def parse_operation(raw: bytes, position: str) -> OplogEntry:
    """One operation out of an ``applyOps`` array. The caller gives it the times and the session of its commit."""
    entry = _fill(_read_fields(raw), position)
    entry.cluster_time = entry.image_time = ZERO
    entry.wall_ms = entry.lsid = entry.txn_number = entry.prev_op_time = None
    entry.prev_op_term = -1
    return entry


def _read_fields(raw: bytes) -> dict[bytes, bytes]:
    """The value bytes of the fields in ``_FIELD_TYPES``, types checked. The hottest loop of the plain path for entries
    that ``fields_of_write`` does not know."""
    wanted = _FIELD_TYPES
    end_of = raw_bson.value_end
    fixed = raw_bson.FIXED_SIZES
    limit = raw_bson.document_end(raw) - 1
    found: dict[bytes, bytes] = {}
    position = 4
    while position < limit:
        name_end = raw.find(0, position + 1, limit)
        if name_end < 0:
            raise OplogFormatError("corrupt BSON: unterminated field name", position=_where(found, position))
        size = fixed.get(raw[position])
        try:
            end = end_of(raw, raw[position], name_end + 1, limit) if size is None else name_end + 1 + size
            if end > limit:
                raise OplogFormatError("corrupt BSON: a value leads outside its document")
        except OplogFormatError as error:
            raise OplogFormatError(error.message, position=_where(found, position)) from None
        name = raw[position + 1 : name_end]
        types = wanted.get(name)
        if types is not None and name not in found:
            if raw[position] not in types:
                raise _wrong_type(name, raw[position], _where(found, position))
            found[name] = raw[name_end + 1 : end]
        elif _ANY_TYPE.get(name) == raw[position]:
            found.setdefault(name, raw[name_end + 1 : end])
        position = end
    return found


def _wrong_type(name: bytes, type_: int, position: str) -> OplogFormatError:
    type_name = raw_bson.type_name(type_)
    code, message = _TYPE_ERRORS.get(name, (8, f"field '{name.decode()}' of an oplog entry has the type '{type_name}'"))
    return OplogFormatError(message.format(type=type_name), position=position, code=code)


def _where(found: dict[bytes, bytes], offset: int) -> str:
    time = found.get(b"ts")
    entry = "an oplog entry" if time is None else f"oplog entry {ClusterTime.from_bytes_le(time)}"
    return f"{entry}, byte {offset}"


def _fill(fields: dict[bytes, bytes], where: str | ClusterTime) -> OplogEntry:
    """What plain entries and inner operations share. ``where`` is only put into words when something is wrong."""
    entry = OplogEntry()
    operation = fields.get(b"op")
    if operation is None:
        raise OplogFormatError("an oplog entry has no 'op' field", position=_in_words(where))
    entry.operation = operation[4:-1].decode("latin-1")
    entry.namespace = fields.get(b"ns", b"\x00\x00\x00\x00\x00")[4:-1]
    entry.o = fields.get(b"o")
    entry.o2 = fields.get(b"o2")
    uuid = fields.get(b"ui")
    if uuid is not None and len(uuid) != _UUID_SIZE:
        raise OplogFormatError("field 'ui' is not a UUID", position=_in_words(where))
    entry.collection_uuid = None if uuid is None else uuid[5:]
    entry.from_migrate = fields.get(b"fromMigrate") == b"\x01"
    entry.multi_op = fields.get(b"multiOpType") == b"\x01\x00\x00\x00"
    entry.in_transaction = False
    entry.txn_op_index = 0
    entry.image_index = 0
    logged = fields.get(b"preImageOpTime")
    entry.logged_image = None if logged is None else _op_time(logged)[0]
    return entry


def _in_words(where: str | ClusterTime) -> str:
    return f"oplog entry {where}" if isinstance(where, ClusterTime) else where


def _op_time(document: bytes) -> tuple[ClusterTime | None, int]:
    """Time and term of an op time; no time for the null op time {ts: (0, 0), t: -1}."""
    if document == _NO_OP_TIME:
        return None, -1
    fields = first_elements(document)
    time, term = fields.get(b"ts"), fields.get(b"t")
    if time is None or time.type != TIMESTAMP:
        return None, -1
    number = -1 if term is None or term.type != INT64 else raw_bson.read_int64(document, term.value_start)
    return ClusterTime.from_bytes_le(raw_bson.value(document, time)) or None, number


def apply_ops(entry: OplogEntry) -> Iterator[bytes]:
    """The operations of an ``applyOps`` entry as BSON documents, in order."""
    fields = entry.command_fields()
    array = fields.get(b"applyOps")
    if array is None or array.type != ARRAY or entry.o is None:
        return
    for element in raw_bson.elements(entry.o, array.value_start):
        if element.type != OBJECT:
            raise OplogFormatError("an element of applyOps is not a document", position=entry.position)
        yield raw_bson.value(entry.o, element)


def applied_at_once(entry: OplogEntry) -> Iterator[OplogEntry]:
    """The operations of an ``applyOps`` command, which is not a transaction. The server's streams do not show them
    (before 8.0), but the collection holds what they wrote."""
    for raw in apply_ops(entry):
        operation = parse_operation(raw, entry.position)
        operation.cluster_time = entry.cluster_time
        if operation.operation == "c" and b"applyOps" in operation.command_fields():
            yield from applied_at_once(operation)
        else:
            yield operation
