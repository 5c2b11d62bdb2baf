"""Masks in tables: changes are masked before they are applied, and a directory keeps the masks that it was begun
with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from tailrace.core.masking.documents import DocumentMask
from tailrace.core.masking.events import hidden_reason
from tailrace.errors import OplogFormatError, UsageError
from tailrace.lake.store.place import TablePlace
from tailrace.lake.tables.state import TableState
from tailrace.read.source.mask_file import Masks
from tailrace.read.window.apply import DELETE, DELETE_OF, UPDATE, TimedChange

#: What a witness holds, and words for it.
_PARTS: Final = {"rules": "rules' digest is", "key": "key's fingerprint is"}


def masked_changes(mask: DocumentMask | None, changes: list[TimedChange]) -> list[TimedChange]:
    """The changes of a document as they are applied to the masked document. Raises MaskRefusedError where a rule
    reaches the shard key by which a delete finds its document."""
    return changes if mask is None else [_masked(mask, one) for one in changes]


def masked_in(namespace: str, masks: Masks | None, changes: list[TimedChange]) -> list[TimedChange]:
    """The same in a collection of that name."""
    return changes if masks is None else masked_changes(masks.of_collection(namespace), changes)


def _masked(mask: DocumentMask, change: TimedChange) -> TimedChange:
    op, body, time = change
    if op == DELETE:
        return change
    try:
        if op == DELETE_OF:
            mask.document_key(body)
            return change
        return op, mask.update(body) if op == UPDATE else mask.document(body), time
    except OplogFormatError as error:
        raise OplogFormatError(f"a change of a masked collection cannot be read: {hidden_reason(error.code)}") from None


def masked_equally(masks: Masks | None, namespace: str, other: str) -> bool:
    """Whether documents of one collection are masked as those of the other."""
    return masks is None or masks.rules.of_namespace(namespace) == masks.rules.of_namespace(other)


def begin_masked(root: TablePlace, state: TableState, masks: Masks | None) -> None:
    """Note the masks of tables that are begun. Raises UsageError if they were begun with others."""
    is_new = state.position() is None and state.copy_begun() is None
    if is_new and (masks is not None or state.masks()):
        with state.writing() as transaction:
            transaction.set_masks({} if masks is None else masks.witness)
    check_masks(root, state.masks(), masks)


def check_masks(root: TablePlace, there: Mapping[str, str], masks: Masks | None) -> None:
    """Raises UsageError if the tables in ``root``, which were begun with the masks ``there``, are masked otherwise."""
    here = {} if masks is None else masks.witness
    for part, words in _PARTS.items():
        if there.get(part) != here.get(part):
            raise UsageError(
                f"the tables in {root} are masked differently: the {words} {there.get(part, 'not set')} there and "
                f"{here.get(part, 'not set')} here",
                hint="Give the masks and the key that they were begun with (--masks), or begin another directory: what "
                "is in this one stays as it was masked",
            )
