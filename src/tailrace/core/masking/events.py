"""Change events, masked by the rules of their collection.

A field of an event that this version does not know is refused, not passed on: it may hold a user's values.
"""

from __future__ import annotations

from typing import Final

from tailrace.core import raw_bson
from tailrace.core.event.quarantined import QuarantinedEvent
from tailrace.core.masking.documents import DocumentMask, MaskRefusedError, kept
from tailrace.core.masking.rules import DROP, MaskRules
from tailrace.core.masking.values import MaskKey
from tailrace.core.raw_bson import ARRAY, NULL, OBJECT, STRING, Element, encode_document, encode_element
from tailrace.errors import OplogFormatError, ServerError, TailraceError, UsageError

_DOCUMENTS: Final = frozenset({b"fullDocument", b"fullDocumentBeforeChange"})
_DESCRIPTIONS: Final = frozenset({b"operationDescription", b"stateBeforeChange"})
#: Fields of an event that hold no value of a document.
_PLAIN: Final = frozenset(
    {
        b"_id",
        b"operationType",
        b"clusterTime",
        b"wallTime",
        b"collectionUUID",
        b"ns",
        b"nsType",
        b"to",
        b"txnNumber",
        b"lsid",
        b"reshardingUUID",
        b"commitTimestamp",
        b"fromMigrate",
    }
)
#: Operations on a document. Their document key, which their token shows too, is masked.
_KEYED: Final = frozenset({b"insert", b"update", b"replace", b"delete"})
#: What a definition may show: names, numbers and flags. Filters, validators, pipelines and zones hold values.
_DEFINED: Final = frozenset(
    {
        *(b"indexes", b"idIndex", b"index", b"v", b"name", b"unique", b"sparse", b"hidden", b"prepareUnique"),
        *(b"expireAfterSeconds", b"background", b"default_language", b"language_override", b"textIndexVersion"),
        *(b"2dsphereIndexVersion", b"bits", b"min", b"max", b"capped", b"size", b"viewOn", b"clusteredIndex"),
        *(b"changeStreamPreAndPostImages", b"enabled", b"recordPreImages", b"validationLevel", b"validationAction"),
        *(b"collectionOptions", b"indexOptions", b"dropTarget", b"uuid", b"reshardUUID", b"numInitialChunks"),
        *(b"capacity", b"fromShardId", b"toShardId", b"shardId", b"presplitHashedZones", b"keyPattern"),
    }
)
#: Parts of a definition that hold names of fields, and what they are for.
_NAMES: Final = frozenset(
    {b"key", b"shardKey", b"oldShardKey", b"weights", b"wildcardProjection", b"collation", b"to", b"timeseries"}
)
#: How many collections are remembered.
_COLLECTIONS_MAX: Final = 4096


class MaskSet:
    """The masks of all collections: rules and key.

    Raises UsageError where the rules need a key and there is none.
    """

    def __init__(self, rules: MaskRules, key: MaskKey | None) -> None:
        if rules.needs_key and key is None:
            raise UsageError(
                "the masks hash or tokenise, but they have no key",
                hint="Give masks.key: {file: ./mask.key}, or {environment: TAILRACE_MASK_KEY}",
            )
        self._rules = rules
        self._key = key
        self._masks: dict[bytes, DocumentMask | None] = {}
        self._places: dict[bytes, DocumentMask | None] = {}
        self._free: set[bytes] = set()

    @property
    def witness(self) -> dict[str, str]:
        """What decides that two sets mask equally: the rules' digest, and the fingerprint of the key."""
        return {"rules": self._rules.digest, **({} if self._key is None else {"key": self._key.fingerprint})}

    def of(self, namespace: str) -> DocumentMask | None:
        """The masks of a collection; ``None`` if it has none."""
        return self._of(namespace.encode("utf-8", "surrogateescape"))

    def _of(self, namespace: bytes) -> DocumentMask | None:
        if namespace not in self._masks:
            if len(self._masks) >= _COLLECTIONS_MAX:
                self._masks.clear()
            name = namespace.decode("utf-8", "surrogateescape")
            tree = self._rules.tree(name)
            shown = namespace.decode("utf-8", "replace")
            self._masks[namespace] = None if tree is None else DocumentMask(shown, tree, self._key)
        return self._masks[namespace]

    def event(self, event: bytes) -> bytes:
        """A finished change event, masked; the same bytes if no rule is of its collection. Raises MaskRefusedError
        where a rule reaches what cannot be masked, and for an event that does not tell what it is of."""
        place = raw_bson.find(event, b"ns")
        named = {field.name: field for field in raw_bson.elements(event)} if place is None else {}
        if place is None or place.type != OBJECT:
            self._check_unnamed(named)
            return event
        mask = self.of_place(event[place.value_start : place.end])
        if mask is None:
            mask = self._of_other(event, place)
        return event if mask is None else masked_event(event, mask)

    def of_place(self, place: bytes) -> DocumentMask | None:
        """The masks of the collection that a namespace (BSON) names; ``None`` if it has none, which ``is_free`` says,
        or if it names no collection."""
        if place not in self._places:
            if len(self._places) >= _COLLECTIONS_MAX:
                self._places.clear()
                self._free.clear()
            database, collection = _text(place, b"db"), _text(place, b"coll")
            found = None
            if database is not None and collection is not None:
                found = self._of(b"%b.%b" % (database, collection))
                if found is None:
                    self._free.add(place)
            self._places[place] = found
        return self._places[place]

    def is_free(self, place: bytes) -> bool:
        """Whether a namespace that ``of_place`` was asked for names a collection without masks."""
        return place in self._free

    def _of_other(self, event: bytes, place: Element) -> DocumentMask | None:
        """The masks of an event whose collection has none: those of the collection under a view, whose definition may
        hold values of it. Raises MaskRefusedError for an event that does not tell its collection."""
        database = _text(event, b"db", place.value_start)
        if database is not None and self.is_free(event[place.value_start : place.end]):
            element = raw_bson.find(event, b"operationDescription")
            source = None if element is None else _text_in(event, element, b"viewOn")
            return None if source is None else self._of(b"%b.%b" % (database, source))
        named = {field.name: field for field in raw_bson.elements(event)}
        has_collection = raw_bson.find(event, b"coll", place.value_start) is not None
        if database is None or has_collection or _has_values(named):
            raise _unnamed()
        return None

    def quarantined(self, aside: QuarantinedEvent) -> QuarantinedEvent:
        """An event that was put aside, masked. The reason may quote values, so only its code stays."""
        event = self.event(aside.event)
        if event == aside.event and self._of(aside.namespace.encode("utf-8", "surrogateescape")) is None:
            return aside
        return QuarantinedEvent(aside.token, aside.namespace, event, hidden_reason(aside.code), aside.code)

    def _check_unnamed(self, named: dict[bytes, Element]) -> None:
        """Raises MaskRefusedError for an event without a namespace that may hold values."""
        if _has_values(named) or b"splitEvent" in named:
            raise _unnamed()


def hidden_reason(code: int | None) -> str:
    """What is said about an event that could not be given, where its message may quote values that are masked."""
    return "its reason may quote a masked value and is not shown" + ("" if code is None else f" (code {code})")


def without_values(error: TailraceError) -> TailraceError:
    """The error, without its message if that may quote what an event or an entry holds."""
    if error.event is None and not isinstance(error, ServerError | OplogFormatError):
        return error
    error.event, error.hint = None, None
    error.message = f"an event of the masked stream cannot be given: {hidden_reason(error.code)}"
    error.args = (error.message,)
    return error


def _unnamed() -> MaskRefusedError:
    return MaskRefusedError(
        "an event does not show the collection that it belongs to, by which the masks are chosen",
        hint="Keep the field ns, and do not split events",
    )


def _has_values(named: dict[bytes, Element]) -> bool:
    return any(name not in _PLAIN for name in named)


def _text(buf: bytes, name: bytes, start: int = 0) -> bytes | None:
    """The text ``name`` of the document at ``start``."""
    element = raw_bson.find(buf, name, start)
    return None if element is None or element.type != STRING else raw_bson.read_string(buf, element.value_start)


def _text_in(event: bytes, place: Element, name: bytes) -> bytes | None:
    return _text(event, name, place.value_start) if place.type == OBJECT else None


def masked_event(event: bytes, mask: DocumentMask) -> bytes:
    """An event of the collection that ``mask`` is of, masked. Raises MaskRefusedError as ``MaskSet.event``."""
    # As ``raw_bson.elements``, written out: most fields stay.
    limit = raw_bson.document_end(event) - 1
    parts: list[bytes] = []
    operation: bytes | None = None
    has_key = False
    pos = copied = 4
    while pos < limit:
        type_, value = event[pos], event.find(0, pos + 1, limit) + 1
        if not value:
            raise OplogFormatError("corrupt BSON: unterminated field name", position=f"byte {pos} of the event")
        end = raw_bson.value_end(event, type_, value, limit)
        name = event[pos + 1 : value - 1]
        if name == b"operationType":
            operation = raw_bson.read_string(event, value) if type_ == STRING else None
        elif name == b"documentKey" and type_ == OBJECT:
            has_key = True
            mask.document_key(event, value)
        elif name not in _PLAIN:
            made = _field(event, Element(type_, name, pos, value, end), mask)
            if made is not None:
                parts += (event[copied:pos], made)
                copied = end
        pos = end
    if not has_key and (operation is None or operation in _KEYED):
        raise mask.refused(b"what documentKey tells", "is not known: an event lacks documentKey or operationType")
    return encode_document(*parts, event[copied:limit]) if parts else event


def _field(event: bytes, field: Element, mask: DocumentMask) -> bytes | None:
    """A field of an event, masked; ``None`` if it stays."""
    name, start = field.name, field.value_start
    if field.type == NULL and name in _DOCUMENTS:
        return None  # the look-up found nothing
    if field.type != OBJECT:
        raise mask.refused(name, "is not a document")
    made: bytes | None
    if name in _DOCUMENTS:
        made = mask.fields(event, start, mask.root)
    elif name == b"updateDescription":
        made = _description(event, start, mask)
    elif name == b"rawUpdateDescription":
        made = _raw_description(event[start : field.end], mask)
    elif name in _DESCRIPTIONS:
        made = _definition(event, start)
    else:
        raise mask.refused(name, "is a field of events that this version does not know")
    return None if made is None else encode_element(OBJECT, name, made)


def _raw_description(description: bytes, mask: DocumentMask) -> bytes:
    return mask.update(description)


def _description(event: bytes, start: int, mask: DocumentMask) -> bytes | None:
    """An update description, masked."""
    parts, changed = [], False
    for element in raw_bson.elements(event, start):
        made = _described(event, element, mask)
        changed = changed or made is not None
        raw = event[element.start : element.end]
        parts.append(raw if made is None else encode_element(element.type, element.name, made))
    return encode_document(*parts) if changed else None


def _described(event: bytes, element: Element, mask: DocumentMask) -> bytes | None:
    """What a part of an update description holds, masked; ``None`` if it stays. Their names are dotted paths."""
    name, start, root = element.name, element.value_start, mask.root
    if name == b"updatedFields" and element.type == OBJECT:
        return mask.fields(event, start, root)
    if name == b"removedFields" and element.type == ARRAY:
        return _renumbered(kept(event, start, lambda one: root.step(_string(event, one)).action != DROP))
    if name == b"truncatedArrays" and element.type == ARRAY:
        return _renumbered(kept(event, start, lambda one: root.step(_field_of(event, one)).action != DROP))
    if name == b"disambiguatedPaths" and element.type == OBJECT:
        return kept(event, start, lambda one: root.step(one.name).action != DROP)
    raise mask.refused(b"updateDescription." + name, "is a field of events that this version does not know")


def _string(event: bytes, element: Element) -> bytes:
    return raw_bson.read_string(event, element.value_start) if element.type == STRING else b""


def _field_of(event: bytes, element: Element) -> bytes:
    return _text_in(event, element, b"field") or b""


def _renumbered(array: bytes | None) -> bytes | None:
    """The elements of an array with the names that they have there."""
    if array is None:
        return None
    found = enumerate(raw_bson.elements(array))
    return encode_document(
        *(encode_element(one.type, b"%d" % place, raw_bson.value(array, one)) for place, one in found)
    )


def _definition(event: bytes, start: int) -> bytes | None:
    """A definition without what may hold values; ``None`` if it stays."""
    parts, changed = [], False
    for element in raw_bson.elements(event, start):
        made: bytes | None = None
        if element.type in (OBJECT, ARRAY) and element.name not in _NAMES:
            if element.name in _DEFINED or element.name.isdigit():
                inside = _definition(event, element.value_start)
                made = None if inside is None else encode_element(element.type, element.name, inside)
            else:
                made = b""
        elif element.name not in _NAMES and element.name not in _DEFINED and not element.name.isdigit():
            made = b""
        changed = changed or made is not None
        parts.append(event[element.start : element.end] if made is None else made)
    return encode_document(*parts) if changed else None
