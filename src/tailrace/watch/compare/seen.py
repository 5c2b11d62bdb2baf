"""What a comparison has met: kinds of events, their fields, and the types of the values in them."""

from __future__ import annotations

from collections import Counter
from typing import Any, Final

from tailrace.core import raw_bson
from tailrace.watch.compare.mask_words import KEPT_TEXTS

#: How many events of each kind are examined to their ends; of the others, one in how many.
_WHOLE: Final = 1000
_ONE_IN: Final = 16
#: In place of what may be a user's.
MADE_BY_STAGES: Final = "(made by the stages)"
_IN_DOCUMENTS: Final = frozenset((b"fullDocument", b"fullDocumentBeforeChange", b"documentKey"))
_DESCRIPTIONS: Final = frozenset((b"updateDescription", b"operationDescription"))


class SeenEvents:
    """Counts of events by operation type, the fields that events have had, and the BSON types of users' values. No
    name or value of a user's is in it."""

    def __init__(self, *, keeps_names: bool) -> None:
        #: Whether an event's fields are the server's, and not made by stages of the user's.
        self._keeps_names = keeps_names
        self.operations: Counter[str] = Counter()
        self.fields: set[str] = set()
        self.types: set[str] = set()

    def add(self, operation: str, raw: bytes) -> None:
        """One more event."""
        if not self._keeps_names and operation.encode() not in KEPT_TEXTS:
            operation = MADE_BY_STAGES
        self.operations[operation] += 1
        count = self.operations[operation]
        if count > _WHOLE and count % _ONE_IN:
            return
        for element in raw_bson.elements(raw):
            name = element.name.decode("utf-8", "replace")
            self.fields.add(name if self._keeps_names else MADE_BY_STAGES)
            if element.type not in (raw_bson.OBJECT, raw_bson.ARRAY):
                continue
            if element.name in _DESCRIPTIONS and self._keeps_names:
                self.fields.update(
                    f"{name}.{one.name.decode('utf-8', 'replace')}"
                    for one in raw_bson.elements(raw, element.value_start)
                )
            if element.name in _IN_DOCUMENTS or element.name in _DESCRIPTIONS:
                self._add_types(raw, element.value_start)

    def _add_types(self, raw: bytes, start: int) -> None:
        pending = [start]
        while pending:
            for element in raw_bson.elements(raw, pending.pop()):
                self.types.add(raw_bson.type_name(element.type))
                if element.type in (raw_bson.OBJECT, raw_bson.ARRAY):
                    pending.append(element.value_start)

    def document(self) -> dict[str, Any]:
        """For a report."""
        return {
            "operations": dict(sorted(self.operations.items())),
            "fields": sorted(self.fields),
            "types": sorted(self.types),
        }

    def __str__(self) -> str:
        kinds = ", ".join(f"{count:,} {name or '(no type)'}" for name, count in self.operations.most_common())
        return f"{kinds}; fields {', '.join(sorted(self.fields))}; types {', '.join(sorted(self.types)) or 'none'}"
