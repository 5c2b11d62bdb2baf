"""Exact images compared with the server's own, and with what the collections hold."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from bson.raw_bson import RawBSONDocument

from tailrace.core import raw_bson
from tailrace.core.oplog.cluster_time import ClusterTime
from tests.following_images import without_images
from tests.kills.children import EVENTS
from tests.products.following import follow, followed
from tests.products.product import Job, Product
from tests.products.truth import Truth, first_of, renamed, time_of
from tests.snapshot.copies import Target, id_of, opened
from tests.tables.equality import key_of

_BEFORE, _AFTER = b"fullDocumentBeforeChange", b"fullDocument"


class ImagesProduct(Product):
    name = "images"
    parts = ("images", "events")
    own_files = "images/**/*"
    copies = True
    keeps_tokens = True
    makes_again = False

    def advance(self, job: Job) -> None:
        # Some runs refuse what they do not know, and the others give null, which alone shows what a store has lost. If
        # the directory is new and the stream is not, it knows only what comes, and null is right.
        is_whole = (job.root / "images" / "layout.json").exists() or not (job.root / EVENTS).exists()
        exact = "exactWhenAvailable" if (job.seed % 2 and is_whole) or job.resharded else "exact"
        said: dict[str, Any] = {"full_document": exact, "full_document_before_change": exact}
        follow(job.uri, job.root, job.time, said, images=job.root / "images")

    def differences(self, job: Job, truth: Truth) -> list[str]:
        begun, events = followed(job.root)
        events = [event for event in events if _in(event, job.time)]
        told = first_of(truth.events(begun, job.time), [without_images(event) for event in events], "event")
        if told:
            return told
        told += _unknown(events, job.resharded)
        proven = self._beside_the_server(truth.imaged(begun, job.time), events, told)
        return told + self._beside_the_collections(
            events, truth.collections(job.time), proven, job.unshown | job.resharded
        )

    def _beside_the_server(self, theirs: list[bytes], ours: list[bytes], told: list[str]) -> set[int]:
        """The places of the events for which the server has images too."""
        proven = set()
        theirs_by_token = {bytes(_field(event, b"_id") or b""): event for event in theirs}
        for place, our in enumerate(ours):
            their = theirs_by_token.get(bytes(_field(our, b"_id") or b""))
            for field in (_BEFORE, _AFTER) if their is not None else ():
                image = _field(their, field)
                if image is None:
                    continue
                if image != _field(our, field):
                    told.append(f"{field.decode()} of event {place} is another than the server's")
                    return proven
                proven.add(place)
        return proven

    def _beside_the_collections(
        self, events: list[bytes], collections: dict[str, dict[bytes, bytes]], proven: set[int], moved: Iterable[str]
    ) -> list[str]:
        """The last image of each changed document must be what is stored. A server's post-image is not always the
        stored document (docs/reference/exact-images.md), so images that the server has confirmed are left out."""
        target = Target()
        unknown = renamed(events) | set(moved)
        last: dict[tuple[str, bytes], int] = {}
        for place, event in enumerate(events):
            target.apply(event)
            name = _namespace(event)
            key = _field(event, b"documentKey")
            if key is not None:
                last[name, id_of(key)] = place
        told = []
        for name, documents in target.collections.items():
            held = {key_of(one): one for one in documents.values()}
            there = collections.get(name)
            if there is None or name in unknown:
                continue  # not of the workload, or gone
            wrong = [
                document
                for key, document in held.items()
                if not _is_the_same(there.get(key), document) and last.get((name, id_of(document)), -1) not in proven
            ]
            if wrong:
                told.append(f"the last images of {len(wrong)} documents of {name} are not what it holds")
        return told


def _unknown(events: list[bytes], resharded: set[str]) -> list[str]:
    """Images that are null, although every document existed when the store began, or was written later. The contents of
    a resharded collection are unknown."""
    wanted = {"update": (_BEFORE, _AFTER), "replace": (_BEFORE,), "delete": (_BEFORE,)}
    null = [
        f"{field.decode()} of the {kind} of {_namespace(event)} is null"
        for event in events
        for kind in [RawBSONDocument(event)["operationType"]]
        for field in wanted.get(kind, ())
        if _field(event, field) is None and _namespace(event) not in resharded
    ]
    return [f"{null[0]}, and {len(null) - 1} more"] if null else []


def _is_the_same(stored: bytes | None, image: bytes) -> bool:
    """Whether an image is what is stored, apart from the order of fields: a replacement's image has the order of its
    pipeline, and a field that has moved to the end may be in an image twice (docs/reference/exact-images.md)."""
    return stored is not None and (stored == image or _fields(stored) == _fields(image))


def _fields(document: bytes) -> dict[bytes, Any]:
    found: dict[bytes, Any] = {}
    for element in raw_bson.elements(document):
        value = raw_bson.value(document, element)
        found[element.name] = _fields(value) if element.type == raw_bson.OBJECT else (element.type, value)
    return found


def _in(event: bytes, until: ClusterTime) -> bool:
    return time_of(event) <= until


def _field(event: bytes, name: bytes) -> bytes | None:
    """A field that is a document; ``None`` where it is missing or null."""
    element = raw_bson.find(event, name)
    return None if element is None or element.type != raw_bson.OBJECT else raw_bson.value(event, element)


def _namespace(event: bytes) -> str:
    ns = opened(event).get("ns") or {}
    return f"{ns.get('db')}.{ns.get('coll')}"
