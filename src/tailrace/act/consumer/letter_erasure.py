"""Take the dead letters of some documents out of their collection."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import bson
from bson import json_util

from tailrace.act.consumer.dead_letters import DeadLetter, DeadLetters
from tailrace.core.event.named_document import NamedDocuments, StoreErasure

_LETTERS: Final = "dead letters"
_OPLOG: Final = (
    "what the oplog of the dead letters' own deployment says of them, until it is written over, and its backups"
)


def erase_letters(letters: DeadLetters, documents: NamedDocuments, *, dry_run: bool = False) -> StoreErasure:
    """Delete the letters whose change is of one of ``documents``. ``dry_run`` counts, and changes nothing.

    Raises UsageError if the collection holds a document that is not a dead letter, and PyMongo's errors."""
    report, unclear = StoreErasure(_LETTERS, letters.full_name), 0
    for letter in list(_of_namespaces(letters, documents)):
        is_one = _is_of(letter, documents)
        unclear += is_one is None
        if is_one:
            report.count(_LETTERS, 1)
            if not dry_run:
                letters.remove(letter)
                report.erased += 1
    if unclear:
        report.left.append(
            f"{unclear:,} dead letters have no event, since it was too large to be kept, and a document key that is "
            "cut short: look at them with `tailrace dead-letters`"
        )
    if report.total:
        report.kept.append(_OPLOG)
    return report


def _of_namespaces(letters: DeadLetters, documents: NamedDocuments) -> Iterator[DeadLetter]:
    return (one for one in letters.letters() if one.namespace in documents.namespaces and one.shown_key is not None)


def _is_of(letter: DeadLetter, documents: NamedDocuments) -> bool | None:
    """``None``: the letter does not say."""
    if letter.raw:
        return documents.has_event(letter.raw)
    try:
        key = bson.encode(json_util.loads(letter.shown_key or ""))
    except (ValueError, TypeError, RecursionError, bson.errors.BSONError):
        return None
    return documents.has(letter.namespace or "", key)
