"""A copy of the existing documents and the stream after it, applied by a consumer: the result is the collections."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

from tailrace.core import raw_bson
from tests.kills.children import EVENTS, pairs
from tests.products.following import events_in, follow, keeping
from tests.products.product import Job, Product
from tests.products.truth import Truth, difference_of, first_of, renamed, time_of
from tests.snapshot.copies import Target
from tests.tables.equality import key_of

MIDDLE = "middle"


class SnapshotProduct(Product):
    name = "snapshot"
    own_files = "none"
    copies = True
    keeps_tokens = True

    def advance(self, job: Job) -> None:
        if job.options.get("elsewhere") or job.options.get("restored"):
            # After the copy its token is one of the server's, which the server itself accepts from any deployment.
            if not (job.root / MIDDLE).exists():  # it was killed before it had a token
                _keep_the_middle(job.root)
            shutil.copy(job.root / MIDDLE, job.root / EVENTS)
        follow(job.uri, job.root, job.time, {"full_document": "updateLookup", "start": "snapshot"})
        _keep_the_middle(job.root)

    def differences(self, job: Job, truth: Truth) -> list[str]:
        return unlike_a_copy(events_in(job.root), job, truth)


def unlike_a_copy(events: list[bytes], job: Job, truth: Truth) -> list[str]:
    """How the documents of a copy and the changes after it differ from what the server says."""
    target = Target()
    changes = []
    for event in events:
        target.apply(event)
        if kind_of(event) != b"snapshot" and time_of(event) <= job.time:
            changes.append(event)
    told = []
    if changes:
        # From the first event on, every one has to be there; one lost before it shows in the collections.
        expected = truth.events(time_of(changes[0]), job.time)
        told = first_of([_token(one) for one in expected], [_token(one) for one in changes], "token")
    unknown = renamed(events) | job.unshown
    expected_now = {name: one for name, one in truth.collections(job.time).items() if name not in unknown}
    found = {name: _stored(target.collections.get(name, {}).values()) for name in expected_now}
    more: dict[str, dict[bytes, bytes]] = {
        name: _stored(documents.values())
        for name, documents in target.collections.items()
        if documents and name.split(".", 1)[0] in job.databases and name not in unknown and "system." not in name
    }
    return told + difference_of(expected_now, {**found, **more}, "the events of")


def _keep_the_middle(root: Path) -> None:
    """What was written down when only a part of the copy was there."""
    copied = [pair for pair in pairs(root / EVENTS)[1:] if kind_of(pair[0]) == b"snapshot"]
    first = pairs(root / EVENTS)[:1]
    kept = [*first, *copied[: len(copied) // 2]]
    with keeping():
        (root / MIDDLE).write_bytes(b"".join(event + token for event, token in kept))


def _stored(documents: Iterable[bytes]) -> dict[bytes, bytes]:
    """By their keys, as the server stores them: with ``_id`` first. A replacement's event keeps the order in which its
    fields were given."""
    found = {}
    for document in documents:
        fields = raw_bson.elements(document)
        first_id = sorted(fields, key=lambda one: one.name != b"_id")
        found[key_of(document)] = raw_bson.encode_document(*(document[one.start : one.end] for one in first_id))
    return found


def kind_of(event: bytes) -> bytes:
    """Its ``operationType``."""
    element = raw_bson.find(event, b"operationType")
    assert element is not None
    return raw_bson.value(event, element)[4:-1]


def _token(event: bytes) -> bytes:
    element = raw_bson.find(event, b"_id")
    assert element is not None
    return raw_bson.value(event, element)
