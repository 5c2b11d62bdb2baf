"""Where a lake lies: in a directory, or below a prefix of an object store; and what of files differs between the two.

A lake in a store has a local directory beside it (its *state*): this machine's locks, files on their way, and the
sessions that have opened the lake here (``session.py``). A store does not rename, sync or lock. What has to be written
once is created there under a condition (``If-None-Match``), what is replaced is exchanged for what was read
(``If-Match``). Nothing here loads Arrow.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

from tailrace.base import durable
from tailrace.base.object_place import URIS, ObjectPlace, check_tried, is_object_uri, object_place
from tailrace.errors import SinkError, UsageError
from tailrace.lake.store.local_path import local_path

LakeRoot: TypeAlias = Path | ObjectPlace

#: Readers of a lake in a store need no local directory. Nothing can be made below this one.
NOWHERE: Final = Path(os.devnull)
#: How often an object is read and replaced again where others replace it meanwhile.
_TRIES: Final = 8


def rooted(where: LakeRoot | str) -> LakeRoot:
    """The lake's place, for whoever reads it: a path as it is, or what the URI of an object store names."""
    if isinstance(where, ObjectPlace | Path):
        return where
    return object_place(where, beside=NOWHERE) if is_object_uri(where) else Path(where)


def writable_root(
    where: LakeRoot | str, state: Path | str | None, *, base: Path | None = None, name: str = "the lake"
) -> LakeRoot:
    """The lake's place, for whoever writes it. ``state`` is the local directory of a lake in an object store; ``base``
    is what relative paths begin at. Raises UsageError, which calls the value ``name``."""
    if isinstance(where, ObjectPlace):
        return where
    text = str(where)
    check_tried(text)
    if not is_object_uri(text):
        if state is not None:
            raise UsageError(f"a state directory belongs to a lake in an object store ({URIS})")
        return local_path(where, name, base)
    if state is None:
        raise UsageError(
            f"{name} is in an object store: it needs a state directory here, for locks and files on their way",
            hint="tailrace lake: --state DIR; a pipeline file: lake.state; write_stream: state=...",
        )
    return object_place(text, beside=local_path(state, "the state", base))


def given_root(where: str, state: Path | None) -> LakeRoot:
    """The place of a lake that a command is given: a path as it is, or a URI; ``state`` is not needed to read it."""
    check_tried(where)
    if is_object_uri(where):
        return object_place(where, beside=NOWHERE if state is None else state.absolute())
    if state is not None:
        raise UsageError(f"a state directory belongs to a lake in an object store ({URIS})")
    return local_path(where, "the lake") if "://" in where else Path(where)


def require_state(root: LakeRoot) -> None:
    """Raise UsageError for a lake in a store without a state directory, by whoever is about to change it."""
    if isinstance(root, ObjectPlace) and root.bucket.beside == NOWHERE:
        raise UsageError(
            f"{root} is in an object store: what changes it needs the state directory of its stream",
            hint="tailrace lake ... --state DIR; in a program tailrace.lake.object_place(URI, beside=DIR)",
        )


def state_of(root: LakeRoot) -> Path | None:
    """The local directory of a lake in an object store."""
    return root.bucket.beside if isinstance(root, ObjectPlace) else None


def publish(place: LakeRoot, content: bytes, beside: LakeRoot) -> None:
    """Write a file or object that must not be there yet; it is there to stay, and whole. Raises FileExistsError."""
    if isinstance(place, ObjectPlace):
        place.create(content)
    else:
        assert isinstance(beside, Path)
        durable.publish(place, content, beside)


class SealedObject(NamedTuple):
    """What ``write_sealed`` has written to a store, as it was read there or written last. ``content`` is ``None`` where
    there is none."""

    content: bytes | None = None
    tag: str = ""


def read_sealed(place: LakeRoot) -> dict[str, object] | None:
    """What ``write_sealed`` has written; ``None`` where there is none. SinkError where it was changed."""
    return read_sealed_there(place)[0]


def read_sealed_there(place: LakeRoot) -> tuple[dict[str, object] | None, SealedObject | None]:
    """The same, and the object of a store that it was read from."""
    if isinstance(place, Path):
        return durable.read_sealed(place), None
    there = _there(place)
    return None if there.content is None else _unsealed(there.content, place), there


def write_sealed(
    place: LakeRoot,
    value: Mapping[str, object],
    stays: Callable[[dict[str, object]], bool] = lambda _: False,
    known: SealedObject | None = None,
) -> SealedObject | None:
    """Replace a small file with a digest of its content. In a store, where another machine may write it at the same
    time, ``stays`` says whether what is there is newer, and is to stay. ``known`` is what the caller has read or
    written last, which spares reading it again.

    Returns what is there now, of a file in a store."""
    if isinstance(place, Path):
        durable.write_sealed(place, value)
        return None
    content = durable.sealed(value)
    for _ in range(_TRIES):
        there = _there(place) if known is None else known
        known = None  # whoever is refused reads it again
        if there.content == content or (there.content is not None and stays(_unsealed(there.content, place))):
            return there
        with suppress(FileExistsError):
            tag = place.create(content) if there.content is None else place.swap(content, there.tag)
            return SealedObject(content, tag)
    raise SinkError(f"{place} keeps changing: another program writes this lake", hint="A lake has one writer")


def _unsealed(content: bytes, place: ObjectPlace) -> dict[str, object]:
    return durable.unsealed(durable.parse_json(content, place), place)


def _there(place: ObjectPlace) -> SealedObject:
    try:
        return SealedObject(*place.read())
    except FileNotFoundError:
        return SealedObject()


def exchange_sealed(
    place: ObjectPlace, made: Callable[[dict[str, object] | None], Mapping[str, object] | None]
) -> dict[str, object]:
    """As ``write_sealed``: ``made`` makes the new content of what is there (``None``: nothing), or says by ``None``
    that it is not what the caller has known. Returns the new content. Raises SinkError where it is not, or changes
    meanwhile."""
    there = _there(place)
    value = made(None if there.content is None else _unsealed(there.content, place))
    try:
        if value is None:
            raise FileExistsError
        if there.content is None:
            place.create(durable.sealed(value))
        else:
            place.swap(durable.sealed(value), there.tag)
    except FileExistsError:
        raise SinkError(
            f"another program has changed {place} meanwhile", hint="A lake has one stream. Start again if this is it"
        ) from None
    return dict(value)


def size_of(place: LakeRoot) -> int:
    """In bytes. Raises FileNotFoundError."""
    return place.head()[0] if isinstance(place, ObjectPlace) else place.stat().st_size


def sync_directories(folders: Iterable[LakeRoot]) -> None:
    """Their names are on the device afterwards. In a store they are once an object is."""
    for folder in folders:
        if isinstance(folder, Path):
            durable.sync_directory(folder)


def present(root: LakeRoot, names: Iterable[str]) -> set[str]:
    """Which of these files are there. A store is listed."""
    if isinstance(root, ObjectPlace):
        wanted = set(names)
        return {one.name for one in root.objects() if one.name in wanted} if wanted else set()
    return {name for name in names if (root / name).exists()}


def sha256_of(place: LakeRoot) -> str:
    """Of a file's bytes, as hexadecimal digits."""
    with place.open() if isinstance(place, ObjectPlace) else place.open("rb") as file:
        return _digest(file)


def _digest(file: Any) -> str:
    found = hashlib.sha256()
    while block := file.read(1 << 20):
        found.update(block)
    return found.hexdigest()
