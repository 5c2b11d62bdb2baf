"""Exact images on servers that keep none to compare with (before 6.0): whether they follow from one another."""

from __future__ import annotations

from collections.abc import Iterable

import bson
from bson.raw_bson import RawBSONDocument

from tailrace.core import raw_bson
from tests.snapshot.copies import id_of

#: What each document was at last, by collection and ``_id``; ``None`` where it is gone.
Last = dict[tuple[str, bytes], bytes | None]


def without_images(event: bytes) -> bytes:
    """The event as a server gives it if it is asked for no images."""
    update = RawBSONDocument(event)["operationType"] == "update"
    left_out = {b"fullDocumentBeforeChange", *([b"fullDocument"] if update else [])}
    kept = [one for one in raw_bson.elements(event) if one.name not in left_out]
    return raw_bson.encode_document(*(event[one.start : one.end] for one in kept))


def images_that_do_not_follow(events: Iterable[bytes], last: Last) -> list[str]:
    """What is wrong with the images. Each pre-image must be the document's last post-image, or else what ``last`` says,
    and each update's description must turn one into the other. Afterwards ``last`` holds what each document has become;
    the caller compares it with the collections."""
    wrong = []
    for event in events:
        found = RawBSONDocument(event)
        if "documentKey" not in found:
            continue
        kind, name = found["operationType"], str(found["ns"]["coll"])
        key = name, id_of(bytes(found["documentKey"].raw))
        before, after = (_raw(found.get(field)) for field in ("fullDocumentBeforeChange", "fullDocument"))
        if key in last and last[key] != before:
            wrong.append(f"{name}: the image before a {kind} is not the one after the change before")
        if kind == "update" and (before is None or after is None or not _turns_into(before, event, after)):
            wrong.append(f"{name}: the description of an update does not turn one of its images into the other")
        last[key] = after
    return wrong


def _raw(image: RawBSONDocument | None) -> bytes | None:
    return None if image is None else bytes(image.raw)


def _turns_into(before: bytes, event: bytes, after: bytes) -> bool:
    """Compares the fields' values. The order of the fields is checked at the end, against the collection."""
    document, description = bson.decode(before), bson.decode(event)["updateDescription"]
    for path in description["removedFields"]:
        document.pop(path, None)
    for path, value in description["updatedFields"].items():
        field, _, index = path.partition(".")
        if index:  # the only nested change of these workloads is a push
            document[field][int(index) :] = [value]
        else:
            document[field] = value
    return document == bson.decode(after)
