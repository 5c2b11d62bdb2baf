"""The documents as they were at one position of the oplog, on disk: what exact images are computed from.

    state = ImageState.open(directory, buckets=4)
    with state.batch(number) as batch:              # number: larger than that of any batch before, or given again
        before = batch.get(keys)
        batch.put(zip(keys, after))
    state.position                                  # number, once the block has ended without an error

Documents are kept in buckets by their key (``tailrace.read.images.key.state_key``), each an LMDB environment of its own
(``tailrace.read.images.bucket``). The first bucket is committed last in a batch and holds the position; what other
buckets have of a later batch is undone when the state is opened. A batch that is given again is undone first, with all
later ones, so that its reads get the same answers.

Each bucket counts how often it was written, and the first one knows the counts of all: a bucket that comes from an
older copy of the state, or from another state, is found when the state is opened.
"""

from __future__ import annotations

import shutil
import uuid
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Self

from tailrace.base import durable
from tailrace.errors import UsageError
from tailrace.read.images.bucket import AGAIN, MAP_BYTES, ImageBucket, ImageStateError
from tailrace.read.images.recent import DocumentsByKey, RecentBatches

#: What is kept to undo batches, in bytes. The last two batches can be undone however large they are.
UNDO_BYTES: Final = 256 << 20
BUCKETS: Final = 4
#: For how long a batch may be in memory alone, while others follow.
_MEMORY_SECONDS: Final = 5.0
BUCKETS_MAX: Final = 1024
_FORMAT: Final = 2
_KEPT_BATCHES: Final = 2
_POSITION: Final = b"position"
_FLOOR: Final = b"floor"
_BATCH: Final = b"batch/"
_DROPPED: Final = b"dropped/"
#: How often a bucket's documents were written; in the first bucket, as it knows it of each one.
_COMMITS: Final = b"commits"
_WITNESS: Final = b"witness"
_UUID_SIZE: Final = 16
_REBUCKET_AT_A_TIME: Final = 5_000
_ERASED_AT_A_TIME: Final = 20_000


class ImageBatch:
    """Reads and changes of one batch. ``recent``: batches before it that are not in the buckets yet."""

    def __init__(self, buckets: Sequence[ImageBucket], recent: RecentBatches) -> None:
        self._buckets = buckets
        self._recent = recent
        #: The documents that the batch has changed so far, as they were and as they are.
        self.before: dict[bytes, bytes | None] = {}
        self.after: dict[bytes, bytes | None] = {}

    def get(self, keys: Sequence[bytes], checksums: Sequence[int] | None = None) -> list[bytes | None]:
        """The documents, with the changes of this batch; ``None`` for a key without a document. ``checksums``: CRC-32
        of the keys, if they are known."""
        found = self._stored(keys, checksums)
        for newer in (self._recent.documents, self.after):
            if newer:
                found = list(map(newer.get, keys, found))
        return found

    def _stored(self, keys: Sequence[bytes], checksums: Sequence[int] | None) -> list[bytes | None]:
        if len(self._buckets) == 1:
            return self._buckets[0].get(keys)
        found: list[bytes | None] = [None] * len(keys)
        for bucket, places in zip(self._buckets, divided(keys, len(self._buckets), checksums), strict=True):
            for place, answer in zip(places, bucket.get([keys[place] for place in places]), strict=True):
                found[place] = answer
        return found

    def confirm_missing(self, keys: Sequence[bytes]) -> None:
        """Raise ImageStateError where documents that ``get`` does not know may be hidden by damage."""
        unwritten = [key for key in keys if key not in self._recent.documents and key not in self.after]
        for bucket, places in zip(self._buckets, divided(unwritten, len(self._buckets)), strict=True):
            bucket.confirm_missing([unwritten[place] for place in places])

    def put(self, changes: Iterable[tuple[bytes, bytes | None]]) -> None:
        """Write the new documents of keys; ``None`` deletes. If a key is given twice, the last document counts."""
        after = dict(changes)
        fresh = [key for key in after if key not in self.before]
        self.before.update(zip(fresh, self.get(fresh), strict=True))
        self.after.update(after)

    def replace(self, keys: Sequence[bytes], before: Sequence[bytes | None], after: Sequence[bytes | None]) -> None:
        """As ``put``, where ``before`` is what ``get`` gives for the keys."""
        self.before = dict(zip(keys, before, strict=True)) | self.before
        self.after.update(zip(keys, after, strict=True))

    def delete(self, keys: Iterable[bytes]) -> None:
        """Delete the documents of keys."""
        self.put((key, None) for key in keys)


def divided(keys: Iterable[bytes], count: int, checksums: Iterable[int] | None = None) -> list[list[int]]:
    """For each of ``count`` buckets the places of its keys."""
    parts: list[list[int]] = [[] for _ in range(count)]
    for place, checksum in enumerate(map(zlib.crc32, keys) if checksums is None else checksums):
        parts[checksum % count].append(place)
    return parts


class ImageState:
    """Documents by key, changed in numbered batches. One process at a time, one thread at a time."""

    def __init__(
        self, directory: Path, buckets: list[ImageBucket], folder: Path, *, undo_bytes: int, memory_bytes: int
    ) -> None:
        self.directory = directory
        self._buckets = buckets
        self._folder = folder
        self._undo_bytes = undo_bytes
        self._memory_bytes = memory_bytes
        self._recent = RecentBatches()
        self._dropped: list[bytes] = []
        self._held: int | None = None
        self._commits: list[int] = []
        #: Makes what ``witness`` is from the next write to disk on.
        self.next_witness: Callable[[], bytes | None] | None = None
        self._recover()

    @classmethod
    def open(
        cls,
        directory: str | Path,
        *,
        buckets: int | None = None,
        undo_bytes: int = UNDO_BYTES,
        map_bytes: int = MAP_BYTES,
        memory_bytes: int = 0,
    ) -> Self:
        """Open the state in ``directory``, or create a new one.

        Args:
            buckets: number of buckets of a new state (4 by default); only ``rebucket`` changes it later
            undo_bytes: how much is kept to undo batches, in bytes; at least the last two batches can be given again
            map_bytes: initial address space of a bucket, in bytes
            memory_bytes: about how much the last batches may take in memory, in bytes, before they go to disk together.
                A crash loses those that are not on disk, as though they had not been given. With 0 each batch is on
                disk when it ends

        Raises ImageStateError if another process writes the state or its files are damaged, and UsageError if
        ``buckets`` differs from the number of the state."""
        path = Path(directory)
        if buckets is not None and not 1 <= buckets <= BUCKETS_MAX:
            raise UsageError(f"a state has 1 to {BUCKETS_MAX} buckets, not {buckets}")
        layout = layout_in(path, buckets or BUCKETS)
        count = layout["buckets"]
        if buckets not in (None, count):
            raise UsageError(
                f"the images in {path} have {count} buckets, not {buckets}", hint="Change it with ImageState.rebucket"
            )
        folder = path / str(layout["folder"])
        opened: list[ImageBucket] = []
        try:
            for number in range(int(count)):
                opened.append(_opened(folder, layout, number, map_bytes))
            if not layout.get("begun"):
                write_layout(path, layout | {"begun": True})
            for other in path.glob("generation-*"):
                if other != folder:  # left by an unfinished rebucket
                    shutil.rmtree(other, ignore_errors=True)
            return cls(path, opened, folder, undo_bytes=undo_bytes, memory_bytes=memory_bytes)
        except BaseException:
            for bucket in opened:
                bucket.close()
            raise

    @property
    def buckets(self) -> int:
        return len(self._buckets)

    @property
    def position(self) -> int | None:
        """The number of the last batch; ``None`` if there is none."""
        return self._recent.batches[-1].number if self._recent.batches else self._position

    def _recover(self) -> None:
        """Begin with what is on disk. Undo what other buckets have of a batch that the first one does not have."""
        self._recent.clear()
        found = dict(self._buckets[0].meta(_POSITION))
        self._position = int.from_bytes(found[_POSITION], "big") if found else None
        self._batches = [
            (int.from_bytes(key[len(_BATCH) :], "big"), int.from_bytes(value, "big"))
            for key, value in self._buckets[0].meta(_BATCH)
        ]
        floor = dict(self._buckets[0].meta(_FLOOR))
        self._floor = int.from_bytes(floor[_FLOOR], "big") if floor else None
        self._commits = self._counted()
        for place, bucket in enumerate(self._buckets):
            if place:
                meta = [(_COMMITS, self._commits[place].to_bytes(8, "big"))]
                bucket.undo_after(-1 if self._position is None else self._position, meta)
        self._dropped = [key for key, _ in self._buckets[0].meta(_DROPPED)]

    def _counted(self) -> list[int]:
        """How often each bucket was written, as the first one knows it. Raises ImageStateError for a bucket that was
        written less often: it is of an older copy; or more often than once more, by a write that a crash cut short, or
        whose last batches can no longer be undone: the first one is of an older copy."""
        count = len(self._buckets)
        known = dict(self._buckets[0].meta(_COMMITS)).get(_COMMITS, bytes(8 * count))
        expected = [int.from_bytes(known[8 * place : 8 * place + 8], "big") for place in range(count)]
        for bucket, times in zip(self._buckets[1:], expected[1:], strict=True):
            found = int.from_bytes(dict(bucket.meta(_COMMITS)).get(_COMMITS, b""), "big")
            forgotten = bucket.forgotten
            is_beyond = forgotten is not None and self._position is not None and forgotten > self._position
            if not times <= found <= times + 1 or is_beyond:
                older = bucket if found < times else self._buckets[0]
                raise ImageStateError(f"{older.directory} is older than the other buckets of its state", hint=AGAIN)
        return expected

    @property
    def witness(self) -> bytes | None:
        """What the caller last said about the history from which the documents were read."""
        return dict(self._buckets[0].meta(_WITNESS)).get(_WITNESS)

    def undo_until(self, batch: int | None) -> None:
        """Undo every batch after ``batch``; with ``None``, all of them. Raises ImageStateError if one of them can no
        longer be undone."""
        if self.position is None or (batch is not None and batch >= self.position):
            return
        if batch is not None and batch >= (-1 if self._position is None else self._position):
            self._recent.undo_after(batch)
            return
        self._recent.clear()
        if self._position is None:
            return
        if self._floor is not None and (batch is None or batch < self._floor):
            raise ImageStateError(
                f"the images in {self.directory} can be taken back to {self._floor} and no further, but "
                f"{'their beginning' if batch is None else batch} was requested",
                hint="Seed them again in a new directory, or keep more (undo_bytes)",
            )
        kept = [entry for entry in self._batches if batch is not None and entry[0] <= batch]
        position = kept[-1][0] if kept else self._floor
        # The position first: opening the state also undoes what the other buckets have after it.
        meta: list[tuple[bytes, bytes | None]]
        meta = [(_BATCH + number.to_bytes(8, "big"), None) for number, _ in self._batches[len(kept) :]]
        meta.append((_POSITION, None if position is None else position.to_bytes(8, "big")))
        self._buckets[0].undo_after(-1 if position is None else position, meta)
        for bucket in self._buckets[1:]:
            bucket.undo_after(-1 if position is None else position)
        self._batches, self._position = kept, position

    @contextmanager
    def batch(self, number: int) -> Iterator[ImageBatch]:
        """A batch. It is in the state as a whole when the block ends, or not at all if the block raises; on disk at
        once, or later and together with others (``memory_bytes``).

        Args:
            number: from 0 to 2^64, larger than those before. A smaller or equal one is a batch that is given again:
                that batch and all later ones are undone first

        Raises ImageStateError if it cannot be written. The state is then what it is on disk."""
        if not 0 <= number < 1 << 64:
            raise UsageError(f"a batch has a number from 0 to 2^64, not {number}")
        if self.position is not None and number <= self.position:
            self.undo_until(self._before(number))
        batch = ImageBatch(self._buckets, self._recent)
        yield batch
        self._recent.add(number, batch.before, batch.after)
        if self._recent.size >= self._memory_bytes or self._recent.age >= _MEMORY_SECONDS:
            self.flush()

    def _before(self, number: int) -> int | None:
        """The last batch before ``number``."""
        earlier = [batch for batch, _ in (*self._batches, *self._recent.batches) if batch < number]
        if earlier:
            return earlier[-1]
        if self._floor is not None and self._floor >= number:
            return number - 1  # it can no longer be undone: undo_until raises
        return self._floor

    def flush(self) -> None:
        """Write the batches that are in memory alone to disk. Raises ImageStateError if that fails; the state is then
        what it is on disk."""
        if not self._recent.batches:
            return
        try:
            written = self._write()
        except BaseException:
            for bucket in self._buckets:
                bucket.abort()
            self._recover()
            raise
        self._position = self._recent.batches[-1].number
        self._batches += written
        self._recent.clear()
        self._trim()

    def _write(self) -> list[tuple[int, int]]:
        """The recent batches into the buckets, the first bucket last. Returns their numbers, and the bytes that are
        kept to undo them."""
        count = len(self._buckets)
        documents = _by_bucket(self._recent.documents, count)
        returned = self._returned()
        batches = [(batch.number, _by_bucket(batch.before, count)) for batch in self._recent.batches]
        sizes = dict.fromkeys((number for number, _ in batches), 0)
        for place in reversed(range(count)):
            bucket = self._buckets[place]
            if place and not documents[place]:
                continue
            bucket.begin()
            for number, before in batches:
                sizes[number] += bucket.keep(number, before[place])
            bucket.put(documents[place])
            self._commits[place] += 1
            if place:
                bucket.commit([(_COMMITS, self._commits[place].to_bytes(8, "big"))])
            else:
                bucket.commit([*_meta_of(sizes), *((key, None) for key in returned), *self._history()])
        self._dropped = [key for key in self._dropped if key not in returned]
        return list(sizes.items())

    def _history(self) -> list[tuple[bytes, bytes | None]]:
        """What the first bucket says about the others, and of the history that the documents were read from."""
        counts = b"".join(times.to_bytes(8, "big") for times in self._commits)
        witness = None if self.next_witness is None else self.next_witness()
        return [(_COMMITS, counts), *([] if witness is None else [(_WITNESS, witness)])]

    def _returned(self) -> set[bytes]:
        """The records of dropped collections of which the recent batches hold documents."""
        if not self._dropped:
            return set()
        written = {key[:_UUID_SIZE] for key, document in self._recent.documents.items() if document is not None}
        return {key for key in self._dropped if key[-_UUID_SIZE:] in written}

    def _trim(self) -> None:
        """Delete the undo data of the oldest batches, down to three quarters of ``undo_bytes``."""
        total = sum(size for _, size in self._batches)
        if total <= self._undo_bytes or len(self._batches) <= _KEPT_BATCHES:
            return
        gone = 0
        while len(self._batches) - gone > _KEPT_BATCHES and total > self._undo_bytes * 3 // 4:
            number, size = self._batches[gone]
            if self._held is not None and number > self._held:
                break
            total -= size
            gone += 1
        self._forget(gone)
        self._erase_dropped()

    def hold(self, after: int) -> None:
        """From now on keep what it takes to undo every batch after ``after``, however much that is."""
        self._held = after

    def settle(self) -> None:
        """Make what is in the state final: nothing before ``position`` can be undone any more."""
        self.flush()
        self._forget(len(self._batches))

    def _forget(self, count: int) -> None:
        """Delete the undo data of the first ``count`` batches."""
        if not count:
            return
        floor = self._batches[count - 1][0]
        first = self._buckets[0]
        first.begin()
        meta: list[tuple[bytes, bytes | None]]
        meta = [(_BATCH + number.to_bytes(8, "big"), None) for number, _ in self._batches[:count]]
        first.commit([*meta, (_FLOOR, floor.to_bytes(8, "big"))])
        for bucket in self._buckets:
            bucket.forget_until(floor)
        self._batches, self._floor = self._batches[count:], floor

    def drop(self, uuid: bytes) -> None:
        """Drop a collection. Its documents are deleted once the current batches can no longer be undone, unless one of
        them is written before that: a shard may lose a collection and get it back under its UUID. The old documents
        then stay, and no entry names them."""
        self.flush()
        key = _DROPPED + (self._position or 0).to_bytes(8, "big") + uuid
        self._buckets[0].begin()
        self._buckets[0].commit([(key, b"")])
        self._dropped.append(key)

    def _erase_dropped(self) -> None:
        for key in list(self._dropped):
            at, uuid = int.from_bytes(key[len(_DROPPED) : len(_DROPPED) + 8], "big"), key[len(_DROPPED) + 8 :]
            if self._floor is None or at > self._floor:
                continue
            if sum(bucket.erase(uuid, _ERASED_AT_A_TIME) for bucket in self._buckets) == 0:
                self._buckets[0].begin()
                self._buckets[0].commit([(key, None)])
                self._dropped.remove(key)

    def clear(self) -> None:
        """Delete everything; this cannot be undone."""
        self._recent.clear()
        first = self._buckets[0]
        meta: list[tuple[bytes, bytes | None]]
        meta = [(_BATCH + number.to_bytes(8, "big"), None) for number, _ in self._batches]
        meta += [(key, None) for key in self._dropped]
        first.begin()
        first.commit([*meta, (_POSITION, None), (_FLOOR, None), (_WITNESS, None)])
        for place, bucket in enumerate(self._buckets):
            bucket.forget_until((1 << 64) - 1)
            while bucket.erase(b"", _ERASED_AT_A_TIME):
                pass
            self._commits[place] += 1
            bucket.remember_all([(_COMMITS, self._commits[place].to_bytes(8, "big"))] if place else ())
        first.begin()
        self.next_witness = None
        first.commit(self._history())
        self._recover()

    def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """The documents at ``position``."""
        return ImageBatch(self._buckets, self._recent).get(keys)

    def documents(self, uuid: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        """Keys and documents, of all collections or of one; bucket by bucket, in the order of the keys."""
        self.flush()
        for bucket in self._buckets:
            yield from bucket.documents(uuid)

    def __len__(self) -> int:
        self.flush()
        return sum(map(len, self._buckets))

    def rebucket(self, buckets: int) -> ImageState:
        """Write the same documents into another number of buckets. Returns the state to continue with, and closes this
        one.

        Reads and writes everything once, into new buckets; a crash leaves the old ones. Earlier batches can no longer
        be undone.
        """
        if not 1 <= buckets <= BUCKETS_MAX:
            raise UsageError(f"a state has 1 to {BUCKETS_MAX} buckets, not {buckets}")
        self.flush()
        folder = next_folder(self._folder)
        layout = _new_layout(buckets, folder.name)
        opened = [_opened(folder, layout, number, MAP_BYTES) for number in range(buckets)]
        try:
            self._copy_to(opened)
            write_layout(self.directory, layout | {"begun": True})
        finally:
            for bucket in opened:
                bucket.close()
        self.close()
        return ImageState.open(self.directory, undo_bytes=self._undo_bytes, memory_bytes=self._memory_bytes)

    def _copy_to(self, opened: list[ImageBucket]) -> None:
        for bucket in self._buckets:
            source = bucket.documents()
            while part := [entry for entry, _ in zip(source, range(_REBUCKET_AT_A_TIME), strict=False)]:
                for new, documents in zip(opened, _by_bucket(dict(part), len(opened)), strict=True):
                    new.begin()
                    new.put(documents)
                    new.commit()
                    new.forget_until(0)
        opened[0].begin()
        meta: list[tuple[bytes, bytes | None]] = [(key, b"") for key in self._dropped]
        if self._position is not None:
            place = self._position.to_bytes(8, "big")
            meta += [(_POSITION, place), (_FLOOR, place)]
        opened[0].commit([*meta, (_WITNESS, self.witness)] if self.witness else meta)

    def close(self) -> None:
        """Write what is in memory alone, and close the state. May be called again."""
        try:
            self.flush()
        finally:
            for bucket in self._buckets:
                bucket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _by_bucket(documents: DocumentsByKey, count: int) -> list[DocumentsByKey]:
    """The documents of each of ``count`` buckets."""
    if count == 1:
        return [documents]
    parts: list[dict[bytes, bytes | None]] = [{} for _ in range(count)]
    for key, document in documents.items():
        parts[zlib.crc32(key) % count][key] = document
    return list(parts)


def _meta_of(sizes: Mapping[int, int]) -> list[tuple[bytes, bytes | None]]:
    """What the first bucket says about batches that are on disk: the position, and the bytes that undo each of them."""
    numbers = {number: number.to_bytes(8, "big") for number in sizes}
    meta: list[tuple[bytes, bytes | None]]
    meta = [(_BATCH + key, sizes[number].to_bytes(8, "big")) for number, key in numbers.items()]
    return [*meta, (_POSITION, list(numbers.values())[-1])]


def next_folder(folder: Path) -> Path:
    """The folder of files that take the place of those in ``folder``; it is not there."""
    found = folder.with_name(f"generation-{int(folder.name.rpartition('-')[2]) + 1}")
    shutil.rmtree(found, ignore_errors=True)
    return found


def layout_in(path: Path, buckets: int) -> dict[str, Any]:
    """The layout in ``path``; written if there is none yet."""
    try:
        durable.make_private(path)
    except OSError as error:
        raise ImageStateError(f"the images in {path} cannot be opened: {error.strerror}") from error
    found: dict[str, Any] | None = durable.read_sealed(path / "layout.json")
    if found is None:
        found = _new_layout(buckets, "generation-1")
        write_layout(path, found)
    if found.get("format") != _FORMAT:
        raise ImageStateError(
            f"the images in {path} are of format {found.get('format')}, and this version knows {_FORMAT}",
            hint="Use the version of Tailrace that wrote them, or seed them again in a new directory",
        )
    return found


def _new_layout(buckets: int, folder: str) -> dict[str, Any]:
    return {"format": _FORMAT, "buckets": buckets, "folder": folder, "id": uuid.uuid4().hex}


def write_layout(path: Path, layout: Mapping[str, Any]) -> None:
    """Write the layout: from now on the files that it names count."""
    try:
        durable.write_sealed(path / "layout.json", layout)
    except durable.LakeFullError as error:
        raise ImageStateError(f"the disk of {path} is full", hint="Make room, and start again") from error


def _opened(folder: Path, layout: Mapping[str, Any], number: int, map_bytes: int) -> ImageBucket:
    identity = f"{layout['id']} {number}".encode()
    directory = folder / f"{number:04d}"
    return ImageBucket(directory, identity, map_bytes=map_bytes, begun=bool(layout.get("begun")))
