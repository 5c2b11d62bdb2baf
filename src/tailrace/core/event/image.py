"""How the documents around an event are named: its pre-image, and its current document (semantics 5)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, overload

import numpy as np
import numpy.typing as npt

from tailrace.core.oplog.cluster_time import ClusterTime


class PreImageKey(NamedTuple):
    """The key of a pre-image in ``config.system.preimages`` (semantics 5): collection UUID (16 bytes), cluster time of
    the oplog entry that holds the operation, index within that entry's applyOps (0 for a plain entry)."""

    collection_uuid: bytes
    cluster_time: ClusterTime
    apply_ops_index: int


class DocumentLookup(NamedTuple):
    """A current document (``fullDocument: "updateLookup"``): namespace, document key (BSON), the event's cluster time
    (read after it, at majority) and the collection's UUID where it must match (else ``None``).

    ``by_uuid``  the collection is the one with the UUID, whatever it is called now in its database
    """

    database: str
    collection: str
    document_key: bytes
    after: ClusterTime
    collection_uuid: bytes | None
    by_uuid: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class DocumentRuns(Sequence[bytes]):
    """Many documents in one buffer, uint8: document ``i`` is ``data[start[i] : end[i]]``, int64[n] each."""

    data: npt.NDArray[np.uint8]
    start: npt.NDArray[np.int64]
    end: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.start)

    @overload
    def __getitem__(self, index: int) -> bytes: ...

    @overload
    def __getitem__(self, index: slice) -> DocumentRuns: ...

    def __getitem__(self, index: int | slice) -> bytes | DocumentRuns:
        if isinstance(index, slice):
            return DocumentRuns(self.data, self.start[index], self.end[index])
        return self.data[self.start[index] : self.end[index]].tobytes()


@dataclass(frozen=True, slots=True, eq=False)
class FoundDocuments(Sequence[bytes | None]):
    """The answer to many look-ups in one buffer, uint8: document ``i`` is ``data[start[i] : end[i]]``, int64[n] each;
    ``None``, and -1 in both, where there is none."""

    data: npt.NDArray[np.uint8]
    start: npt.NDArray[np.int64]
    end: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.start)

    @overload
    def __getitem__(self, index: int) -> bytes | None: ...

    @overload
    def __getitem__(self, index: slice) -> FoundDocuments: ...

    def __getitem__(self, index: int | slice) -> bytes | FoundDocuments | None:
        if isinstance(index, slice):
            return FoundDocuments(self.data, self.start[index], self.end[index])
        start = self.start[index]
        return None if start < 0 else self.data[start : self.end[index]].tobytes()

    @classmethod
    def of(cls, documents: Sequence[bytes | None]) -> FoundDocuments:
        """The same of any answer."""
        if isinstance(documents, FoundDocuments):
            return documents
        sizes = np.array([-1 if document is None else len(document) for document in documents], np.int64)
        ends = np.cumsum(np.maximum(sizes, 0))
        data = np.frombuffer(b"".join(document for document in documents if document) or b"\0", np.uint8)
        return cls(data, np.where(sizes < 0, -1, ends - sizes), np.where(sizes < 0, -1, ends))

    @classmethod
    def gathered(
        cls, count: int, parts: Sequence[tuple[npt.NDArray[np.int64], Sequence[bytes | None]]]
    ) -> FoundDocuments:
        """One answer to ``count`` look-ups of the answers to some of them, each with their numbers; the others find
        nothing."""
        start, end = np.full(count, -1, np.int64), np.full(count, -1, np.int64)
        buffers = [np.zeros(0, np.uint8)]
        size = 0
        for numbers, answer in parts:
            found = cls.of(answer)
            start[numbers] = np.where(found.start < 0, -1, found.start + size)
            end[numbers] = np.where(found.start < 0, -1, found.end + size)
            buffers.append(found.data)
            size += found.data.size
        return cls(buffers[-1] if len(parts) == 1 else np.concatenate(buffers), start, end)


@dataclass(frozen=True, slots=True, eq=False)
class PreImageKeys(Sequence[PreImageKey]):
    """Many keys as columns: ``uuids`` int64[n, 2] (the 16 bytes of each), ``times`` uint64[n], ``indexes`` int64[n]."""

    uuids: npt.NDArray[np.int64]
    times: npt.NDArray[np.uint64]
    indexes: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.times)

    @overload
    def __getitem__(self, index: int) -> PreImageKey: ...

    @overload
    def __getitem__(self, index: slice) -> PreImageKeys: ...

    def __getitem__(self, index: int | slice) -> PreImageKey | PreImageKeys:
        if isinstance(index, slice):
            return PreImageKeys(self.uuids[index], self.times[index], self.indexes[index])
        time = ClusterTime(int(self.times[index]))
        return PreImageKey(self.uuids[index].tobytes(), time, int(self.indexes[index]))

    @classmethod
    def of(cls, keys: Sequence[PreImageKey]) -> PreImageKeys:
        """The columns of any keys."""
        if isinstance(keys, PreImageKeys):
            return keys
        uuids = np.frombuffer(b"".join(key.collection_uuid for key in keys), np.int64).reshape(-1, 2)
        return cls(uuids, _column([key.cluster_time for key in keys]), np.array([key[2] for key in keys], np.int64))


@dataclass(frozen=True, slots=True, eq=False)
class CollectionLookups(Sequence[DocumentLookup]):
    """Many look-ups in one collection: what they share once, ``document_keys`` (BSON), and ``times`` (uint64[n]),
    the cluster times to read after."""

    database: str
    collection: str
    document_keys: Sequence[bytes]
    times: npt.NDArray[np.uint64]
    collection_uuid: bytes | None
    by_uuid: bool = False

    def __len__(self) -> int:
        return len(self.document_keys)

    @overload
    def __getitem__(self, index: int) -> DocumentLookup: ...

    @overload
    def __getitem__(self, index: slice) -> CollectionLookups: ...

    def __getitem__(self, index: int | slice) -> DocumentLookup | CollectionLookups:
        uuid, by_uuid, keys = self.collection_uuid, self.by_uuid, self.document_keys
        if isinstance(index, slice):
            return CollectionLookups(self.database, self.collection, keys[index], self.times[index], uuid, by_uuid)
        time = ClusterTime(int(self.times[index]))
        return DocumentLookup(self.database, self.collection, keys[index], time, uuid, by_uuid)

    def chosen(self, indexes: Sequence[int]) -> CollectionLookups:
        """The look-ups with these numbers."""
        places, keys = np.array(indexes, np.int64), self.document_keys
        chosen: Sequence[bytes]
        if isinstance(keys, DocumentRuns):
            chosen = DocumentRuns(keys.data, keys.start[places], keys.end[places])
        else:
            chosen = [keys[index] for index in indexes]
        return CollectionLookups(
            self.database, self.collection, chosen, self.times[places], self.collection_uuid, self.by_uuid
        )

    @property
    def after(self) -> ClusterTime:
        """The latest of their times."""
        return ClusterTime(int(self.times.max()))

    @classmethod
    def of(cls, lookups: Sequence[DocumentLookup]) -> CollectionLookups:
        """The columns of look-ups that differ in key and time alone. At least one."""
        if isinstance(lookups, CollectionLookups):
            return lookups
        first = lookups[0]
        keys = [lookup.document_key for lookup in lookups]
        times = _column([lookup.after for lookup in lookups])
        return cls(first.database, first.collection, keys, times, first.collection_uuid, first.by_uuid)


def _column(times: list[ClusterTime]) -> npt.NDArray[np.uint64]:
    return np.array(times, np.uint64)
