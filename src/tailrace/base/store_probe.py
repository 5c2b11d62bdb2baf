"""What writers need of an object store, tried at each start."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Final, NamedTuple

from tailrace.base.object_place import ObjectPlace, StoreAwayError, Tag
from tailrace.errors import SinkError


class _Condition(NamedTuple):
    """What a kind of tag is called, a tag that no object has, and the headers that compare it."""

    tag: str
    never: str
    once: str
    same: str


_CONDITIONS: Final[Mapping[Tag, _Condition]] = {
    "e_tag": _Condition("ETag", '"00000000000000000000000000000000"', "If-None-Match", "If-Match"),
    "version": _Condition("generation", "1", "x-goog-if-generation-match: 0", "x-goog-if-generation-match"),
}


def check_store(root: ObjectPlace) -> None:
    """Try what writers need in the store: that a second writer is refused, and that what was written is listed. Its
    clock is compared with ours. Raises a SinkError that says what is missing."""
    place = root / "_tailrace" / f"probe-{uuid.uuid4().hex}"
    first, other = (f"{number} {place.key}".encode() for number in (1, 2))
    said = _CONDITIONS[root.bucket.tag]
    changed: list[str] = []
    try:
        tag = place.create(first)
        if not _refuses(lambda: place.create(other)) or place.read_bytes() != first:
            raise _lacks(root, f"overwrites an object that may be written only once ({said.once})")
        if not _refuses(lambda: place.swap(other, said.never)) or place.read_bytes() != first:
            raise _lacks(root, f"does not compare before it replaces an object ({said.same})")
        if _refuses(lambda: changed.append(place.swap(other, tag))):
            raise _lacks(root, f"does not replace an object that is as it was ({said.same})")
        if changed == [tag] or place.read_bytes() != other:
            raise _lacks(root, f"does not give a changed object a new {said.tag}")
        listed = [one for one in (root / "_tailrace").objects() if one.name == place.name]
        if not listed:
            raise _lacks(root, "does not list an object that it has just taken")
        root.bucket.clock[:] = [listed[0].modified - time.time()]
    except BaseException:
        with suppress(StoreAwayError):  # the first error is reported
            place.unlink()
        raise
    place.unlink()


def _refuses(write: Callable[[], object]) -> bool:
    try:
        write()
    except FileExistsError:
        return True
    return False


def _lacks(root: ObjectPlace, what: str) -> SinkError:
    return SinkError(
        f"the object store of {root} cannot be written safely: it {what}, so two writers would not see each other",
        hint="Use a store with conditional writes (Amazon S3, or a recent version of the one you have), or a directory",
    )
