"""Oplog entries and events with users' values, field names and namespaces masked, and everything else left as it is.

Equal values become equal ones, and each keeps its type and its length; equal names become equal names (``f1``, ``f2``).
So what a stream makes of a masked entry is the masked form of what it makes of the entry, its resume token included:
a report can be replayed. What is masked is drawn at random for each ``Mask``, and nothing leads back.

Only what is known to be the server's own stays: the fields of entries and events, their times and UUIDs, and the words
of ``mask_words``. A name that is not known is masked.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from typing import Final

from tailrace.core import raw_bson as rb
from tailrace.core.event.resume_token import ResumeToken, encode_event_token
from tailrace.errors import InvalidResumeToken
from tailrace.watch.compare.mask_values import Values
from tailrace.watch.compare.mask_words import KEPT_EVENT_FIELDS, KEPT_TEXTS, NAMES_A_COLLECTION, OF_USERS, WORDS

#: Parts of an update in the oplog: how the fields in them are masked.
_PLAIN_SECTIONS: Final = frozenset((b"i", b"u"))
_SHOWN_DIGITS_MAX: Final = 3
_SYSTEM_DATABASES: Final = frozenset((b"admin", b"config", b"local"))
_SYSTEM: Final = b"system."
_BUCKETS: Final = b"system.buckets."


class Mask:
    """One report's masking. ``show_names``: field names and namespaces stay as they are; ``seed`` is for tests."""

    def __init__(self, *, show_names: bool = False, seed: int | None = None) -> None:
        rng = random.SystemRandom() if seed is None else random.Random(seed)
        self._show_names = show_names
        self._names: dict[bytes, bytes] = {}
        self._databases: dict[bytes, bytes] = {}
        self._collections: dict[bytes, bytes] = {}
        self._values = Values(rng, self._user_document)
        #: Whether what is masked is a definition of a view, which is stored as a document of ``system.views``.
        self._is_view = False

    @property
    def shows_names(self) -> bool:
        return self._show_names

    # -- what a report holds

    def event(self, raw: bytes, *, has_stages: bool = False) -> bytes:
        """A change event. ``has_stages``: stages of the user's may have given it fields of their own."""
        self._is_view = _collection_of(raw) == _VIEWS
        try:
            return self._event(raw, has_stages=has_stages)
        finally:
            self._is_view = False

    def _event(self, raw: bytes, *, has_stages: bool) -> bytes:
        parts = []
        for element in rb.elements(raw):
            value = rb.value(raw, element)
            name = element.name
            if name in _EVENT:
                parts.append(rb.encode_element(element.type, name, _EVENT[name](self, element.type, value)))
            elif name in KEPT_EVENT_FIELDS and (not has_stages or _is_of_the_server(element.type, name, value)):
                parts.append(rb.encode_element(element.type, name, value))
            elif has_stages:
                masked = self._values.mask(element.type, value)
                shown = name if name in KEPT_EVENT_FIELDS else self.name(name)
                parts.append(rb.encode_element(element.type, shown, masked))
            else:  # a field of a version that is not known: its name is what a report is for
                parts.append(rb.encode_element(element.type, name, self._structure_value(name, element.type, value)))
        return rb.encode_document(*parts)

    def entry(self, raw: bytes) -> bytes:
        """An oplog entry, or an operation inside ``applyOps``."""
        operation = rb.find(raw, b"op")
        letter = b"" if operation is None else rb.read_string(raw, operation.value_start)
        namespace = rb.find(raw, b"ns")
        named = b""
        if namespace is not None and namespace.type == rb.STRING:
            named = rb.read_string(raw, namespace.value_start)
        self._is_view = named.endswith(b"." + _VIEWS)
        try:
            return self._entry(
                raw, is_command=letter not in (b"i", b"u", b"d") or named.endswith(b".$cmd"), letter=letter
            )
        finally:
            self._is_view = False

    def _entry(self, raw: bytes, *, is_command: bool, letter: bytes) -> bytes:
        parts = []
        for element in rb.elements(raw):
            value = rb.value(raw, element)
            if element.name in (b"o", b"o2") and element.type == rb.OBJECT:
                if is_command:
                    masked = self._structure(value)
                elif element.name == b"o" and letter == b"u":
                    masked = self._update(value)
                else:
                    masked = self._user_document(value)
            elif element.name == b"ns":
                masked = self._namespace(element.type, value)
            elif element.name == b"lsid":
                masked = self._session(element.type, value)
            elif element.name in KEPT_ENTRY_FIELDS:
                masked = value
            else:
                masked = self._structure_value(element.name, element.type, value)
            parts.append(rb.encode_element(element.type, element.name, masked))
        return rb.encode_document(*parts)

    def pre_image(self, raw: bytes) -> bytes:
        """A document of ``config.system.preimages``."""
        parts = []
        for element in rb.elements(raw):
            value = rb.value(raw, element)
            if element.name == b"preImage" and element.type == rb.OBJECT:
                value = self._user_document(value)
            parts.append(rb.encode_element(element.type, element.name, value))
        return rb.encode_document(*parts)

    def name(self, name: bytes) -> bytes:
        """A field name, or a path of them."""
        if self._show_names:
            return name
        return b".".join(map(self._segment, name.split(b".")))

    def database(self, name: bytes) -> bytes:
        """The name of a database."""
        if self._show_names or name in _SYSTEM_DATABASES or not name:
            return name
        return self._databases.setdefault(name, b"db%d" % (len(self._databases) + 1))

    def collection(self, name: bytes) -> bytes:
        """The name of a collection without its database."""
        if self._show_names or not name or name.startswith(b"$cmd"):
            return name
        for prefix in (_BUCKETS, _SYSTEM):
            if name.startswith(prefix):
                return prefix + self._system_collection(prefix, name[len(prefix) :])
        return self._collections.setdefault(name, b"c%d" % (len(self._collections) + 1))

    def token(self, document: bytes) -> bytes:
        """A resume token: what it holds of a document's key or of a definition is masked."""
        try:
            token = ResumeToken.parse(document)
            parts = token.parts
            if parts.event_identifier is None or token.version == 0:
                return document
            if _encoded(token, parts.event_identifier) == document:
                return _encoded(token, self._identifier(parts.event_identifier))
        except (InvalidResumeToken, ValueError, IndexError, struct.error):
            pass  # of a form that is not known
        return self._values.hexadecimal(document)

    # -- names

    def _segment(self, segment: bytes) -> bytes:
        if not segment or segment == b"_id" or (segment.isdigit() and len(segment) <= _SHOWN_DIGITS_MAX):
            return segment
        known = self._names.get(segment)
        if known is None:
            number = len(self._names) + 1
            if segment.isdigit():  # a number in a path may be an index: it stays one
                known = b"9%0*d" % (len(segment) - 1, number)
            elif segment.startswith(b"$"):
                known = b"$f%d" % number
            else:
                known = b"f%d" % number
            self._names[segment] = known
        return known

    def _system_collection(self, prefix: bytes, rest: bytes) -> bytes:
        if prefix == _SYSTEM and rest in (b"views", b"js", b"profile", b"users", b"roles", b"version", b"preimages"):
            return rest
        return self._collections.setdefault(rest, b"c%d" % (len(self._collections) + 1))

    def _namespace(self, type_: int, value: bytes) -> bytes:
        """A namespace as text, or as ``{db, coll}``."""
        if type_ == rb.STRING:
            database, dot, collection = rb.read_string(value, 0).partition(b".")
            return rb.encode_string(self.database(database) + dot + self.collection(collection))
        if type_ != rb.OBJECT:
            return self._values.mask(type_, value)
        parts = []
        for element in rb.elements(value):
            inner = rb.value(value, element)
            if element.type == rb.STRING and element.name in (b"db", b"coll"):
                masked = self.database if element.name == b"db" else self.collection
                inner = rb.encode_string(masked(rb.read_string(inner, 0)))
            else:
                inner = self._values.mask(element.type, inner)
            parts.append(rb.encode_element(element.type, element.name, inner))
        return rb.encode_document(*parts)

    def _collection_text(self, type_: int, value: bytes) -> bytes:
        """The name of a collection in a command, or of one with its database."""
        if type_ != rb.STRING:
            return value if type_ in _NUMBERS else self._values.mask(type_, value)
        text = rb.read_string(value, 0)
        database, dot, collection = text.partition(b".")
        if dot and (database in self._databases or database in _SYSTEM_DATABASES):
            return rb.encode_string(self.database(database) + dot + self.collection(collection))
        return rb.encode_string(self.collection(text))

    # -- users' documents

    def _user_document(self, document: bytes) -> bytes:
        if self._is_view:
            return self._view(document)
        return rb.encode_document(
            *(
                rb.encode_element(one.type, self.name(one.name), self._values.mask(one.type, rb.value(document, one)))
                for one in rb.elements(document)
            )
        )

    def _view(self, document: bytes) -> bytes:
        """A document of ``system.views``, or a part of an update of one: in its values the names are users' again."""
        self._is_view = False
        parts = []
        for element in rb.elements(document):
            value = rb.value(document, element)
            if element.name == b"_id":
                value = self._namespace(element.type, value)
            else:
                value = self._structure_value(element.name, element.type, value)
            name = element.name if element.name in WORDS or element.name == b"_id" else self.name(element.name)
            parts.append(rb.encode_element(element.type, name, value))
        self._is_view = True
        return rb.encode_document(*parts)

    def _user_value(self, type_: int, value: bytes) -> bytes:
        return self._values.mask(type_, value)

    def _update(self, document: bytes) -> bytes:
        """The ``o`` of an update: a difference, the operators of older versions, or a new document."""
        names = {element.name for element in rb.elements(document)}
        is_delta = b"diff" in names and names <= {b"$v", b"diff"}
        is_operators = bool(names) and names <= {b"$v", b"$set", b"$unset"}
        if not (is_delta or is_operators):
            return self._user_document(document)
        parts = []
        for element in rb.elements(document):
            value = rb.value(document, element)
            if element.type == rb.OBJECT and element.name != b"$v":
                value = self._delta(value) if element.name == b"diff" else self._user_document(value)
            parts.append(rb.encode_element(element.type, element.name, value))
        return rb.encode_document(*parts)

    def _delta(self, delta: bytes) -> bytes:
        elements = list(rb.elements(delta))
        is_array = bool(elements) and elements[0].name == b"a" and elements[0].type == rb.BOOL
        parts = []
        for element in elements:
            value, name = rb.value(delta, element), element.name
            if is_array and name in (b"a", b"l"):
                pass
            elif is_array and name[:1] == b"u":
                value = self._values.mask(element.type, value)
            elif name[:1] == b"s" and element.type == rb.OBJECT:
                name = name[:1] + (name[1:] if is_array else self.name(name[1:]))
                value = self._delta(value)
            elif name in _PLAIN_SECTIONS and element.type == rb.OBJECT:
                value = self._user_document(value)
            elif name == b"d" and element.type == rb.OBJECT:
                value = rb.encode_document(
                    *(
                        rb.encode_element(one.type, self.name(one.name), rb.value(value, one))
                        for one in rb.elements(value)
                    )
                )
            else:
                name, value = self.name(name), self._values.mask(element.type, value)
            parts.append(rb.encode_element(element.type, name, value))
        return rb.encode_document(*parts)

    def _description(self, type_: int, value: bytes) -> bytes:
        """``updateDescription``."""
        if type_ != rb.OBJECT:
            return self._values.mask(type_, value)
        parts = []
        for element in rb.elements(value):
            inner = rb.value(value, element)
            if element.name == b"updatedFields" and element.type == rb.OBJECT:
                inner = self._user_document(inner)
            elif element.name == b"removedFields":
                inner = self._paths(element.type, inner)
            elif element.name == b"truncatedArrays" and element.type == rb.ARRAY:
                inner = self._truncated(inner)
            elif element.name == b"disambiguatedPaths" and element.type == rb.OBJECT:
                inner = rb.encode_document(
                    *(
                        rb.encode_element(one.type, self.name(one.name), self._paths(one.type, rb.value(inner, one)))
                        for one in rb.elements(inner)
                    )
                )
            else:
                inner = self._structure_value(element.name, element.type, inner)
            parts.append(rb.encode_element(element.type, element.name, inner))
        return rb.encode_document(*parts)

    def _raw_update(self, type_: int, value: bytes) -> bytes:
        """``rawUpdateDescription``: the update as the oplog has it."""
        return self._update(value) if type_ == rb.OBJECT else self._values.mask(type_, value)

    def _paths(self, type_: int, value: bytes) -> bytes:
        """A path, or an array of paths or of their parts, of which numbers are indexes."""
        if type_ == rb.STRING:
            return rb.encode_string(self.name(rb.read_string(value, 0)))
        if type_ != rb.ARRAY:
            return value if type_ in _NUMBERS else self._values.mask(type_, value)
        return rb.encode_document(
            *(
                rb.encode_element(one.type, one.name, self._paths(one.type, rb.value(value, one)))
                for one in rb.elements(value)
            )
        )

    def _truncated(self, value: bytes) -> bytes:
        arrays = []
        for array in rb.elements(value):
            inner = rb.value(value, array)
            if array.type == rb.OBJECT:
                inner = rb.encode_document(
                    *(
                        rb.encode_element(one.type, one.name, self._paths(one.type, rb.value(inner, one)))
                        for one in rb.elements(inner)
                    )
                )
            else:
                inner = self._values.mask(array.type, inner)
            arrays.append(rb.encode_element(array.type, array.name, inner))
        return rb.encode_document(*arrays)

    # -- what is the server's own, with names and values of users in between

    def _identifier(self, identifier: bytes) -> bytes:
        """What a token says about its event: a document's key, or the kind of the operation and what describes it."""
        first = next(iter(rb.elements(identifier)), None)
        if first is None or first.name != b"operationType" or first.type != rb.STRING:
            return self._user_document(identifier)
        return self._event(identifier, has_stages=False)

    def _structure(self, document: bytes) -> bytes:
        """A command's document, or what an event says about one."""
        parts = []
        for element in rb.elements(document):
            value = self._structure_value(element.name, element.type, rb.value(document, element))
            known = element.name in WORDS or element.name.isdigit()
            parts.append(rb.encode_element(element.type, element.name if known else self.name(element.name), value))
        return rb.encode_document(*parts)

    def _structure_value(self, name: bytes, type_: int, value: bytes) -> bytes:
        if name == b"applyOps" and type_ == rb.ARRAY:
            return rb.encode_document(*(self._operation(one, value) for one in rb.elements(value)))
        if name in NAMES_A_COLLECTION:
            return self._collection_text(type_, value)
        if name in (b"ns", b"to", b"renameCollection", b"fromNs", b"sourceNss", b"namespace"):
            return self._namespace(type_, value) if type_ in (rb.STRING, rb.OBJECT) else value
        if name == b"lsid":
            return self._session(type_, value)
        if name == b"endOfTransaction" and type_ == rb.STRING:  # one of the namespaces that it lists
            return self._namespace(type_, value)
        if name in OF_USERS:
            return self._values.mask(type_, value)
        if type_ == rb.OBJECT:
            return self._structure(value)
        if type_ == rb.ARRAY:
            return rb.encode_document(
                *(
                    rb.encode_element(one.type, one.name, self._structure_value(name, one.type, rb.value(value, one)))
                    for one in rb.elements(value)
                )
            )
        is_known = name in WORDS
        if type_ == rb.STRING and is_known and rb.read_string(value, 0) in KEPT_TEXTS:
            return value
        if is_known and (type_ in _NUMBERS or type_ in (rb.BOOL, rb.NULL, rb.TIMESTAMP, rb.DATE)):
            return value
        if type_ == rb.BINARY and name not in (b"uid",):
            return value if value[4:5] == b"\x04" and is_known else self._values.mask(type_, value)
        return self._values.mask(type_, value)

    def _operation(self, element: rb.Element, operations: bytes) -> bytes:
        """One operation of ``applyOps``."""
        value = rb.value(operations, element)
        masked = self.entry(value) if element.type == rb.OBJECT else self._values.mask(element.type, value)
        return rb.encode_element(element.type, element.name, masked)

    def _token(self, type_: int, value: bytes) -> bytes:
        return self.token(value) if type_ == rb.OBJECT else self._values.mask(type_, value)

    def _described(self, type_: int, value: bytes) -> bytes:
        return self._structure(value) if type_ == rb.OBJECT else self._values.mask(type_, value)

    def _session(self, type_: int, value: bytes) -> bytes:
        """A session's id, and the digest of its user's name."""
        if type_ != rb.OBJECT:
            return self._values.mask(type_, value)
        return rb.encode_document(
            *(
                rb.encode_element(one.type, one.name, self._values.mask(one.type, rb.value(value, one)))
                for one in rb.elements(value)
            )
        )


_VIEWS: Final = b"system.views"
_NUMBERS: Final = frozenset((rb.INT32, rb.INT64, rb.DOUBLE))
KEPT_ENTRY_FIELDS: Final = frozenset(
    (
        *(b"ts", b"t", b"h", b"v", b"op", b"ui", b"wall", b"stmtId", b"txnNumber", b"prevOpTime", b"preImageOpTime"),
        *(b"postImageOpTime", b"fromMigrate", b"needsRetryImage", b"multiOpType", b"b", b"isTimeseries"),
    )
)
_EVENT: Final[dict[bytes, Callable[[Mask, int, bytes], bytes]]] = {
    b"_id": Mask._token,
    b"ns": Mask._namespace,
    b"to": Mask._namespace,
    b"fullDocument": Mask._user_value,
    b"fullDocumentBeforeChange": Mask._user_value,
    b"documentKey": Mask._user_value,
    b"updateDescription": Mask._description,
    b"rawUpdateDescription": Mask._raw_update,
    b"operationDescription": Mask._described,
    b"stateBeforeChange": Mask._described,
    b"lsid": Mask._session,
}


def is_event_field(name: bytes) -> bool:
    """Whether a field of that name is known as the server's, and no stage of a user's need have made it."""
    return name in _EVENT or name in KEPT_EVENT_FIELDS


def _is_of_the_server(type_: int, name: bytes, value: bytes) -> bool:
    """Whether stages of a user's have left the field as it was."""
    if name == b"operationType":
        return type_ == rb.STRING and rb.read_string(value, 0) in KEPT_TEXTS
    return (name, type_) in ((b"clusterTime", rb.TIMESTAMP), (b"wallTime", rb.DATE))


def _collection_of(event: bytes) -> bytes:
    """The name of the collection that an event is about."""
    namespace = rb.find(event, b"ns")
    if namespace is None or namespace.type != rb.OBJECT:
        return b""
    collection = rb.find(event, b"coll", namespace.value_start)
    return (
        rb.read_string(event, collection.value_start)
        if collection is not None and collection.type == rb.STRING
        else b""
    )


def _encoded(token: ResumeToken, identifier: bytes) -> bytes:
    return encode_event_token(
        token.cluster_time,
        version=token.version,
        txn_op_index=token.txn_op_index,
        from_invalidate=token.from_invalidate,
        uuid=token.uuid,
        identifier=identifier,
        fragment_num=token.fragment_num,
    )
