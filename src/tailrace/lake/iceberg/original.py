"""What an Iceberg table shows: a lake or a table with a Delta log, as far as its mirror has to know it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tailrace.lake.iceberg.where import uri
from tailrace.lake.store.mirrored import ICEBERG
from tailrace.lake.store.place import TablePlace

if TYPE_CHECKING:
    from pyiceberg.table.snapshots import Snapshot

    from tailrace.lake.iceberg.snapshot import SizedFile

#: What a snapshot states: the version that it shows, and the id of the lake or table.
VERSION, TABLE = "tailrace.version", "tailrace.table"
#: And what a reader may want to know: the cluster time of that version, and the token to resume a stream from there.
TIME, TOKEN = "tailrace.clusterTime", "tailrace.token"


class Original(ABC):
    """A lake or a table at its newest version.

    ``identifier``  namespace and name in the catalogue
    ``name``        what errors call it
    ``id``          tells it from another one in the same place
    ``fields``      its columns, as Delta has them
    ``divided_by``  those of them whose values the data files' partitions have
    """

    identifier: tuple[str, str]
    name: str
    root: TablePlace
    id: str
    version: int
    fields: Sequence[Mapping[str, Any]]
    divided_by: tuple[str, ...] = ()

    @property
    def beginning(self) -> str:
        """How the location of each of its data files begins; the name in its own log follows."""
        return f"{uri(self.root)}/"

    @property
    def location(self) -> str:
        """Where the Iceberg table is."""
        return uri(self.root / ICEBERG)

    @property
    def metadata(self) -> TablePlace:
        """Where the metadata and manifests are."""
        return self.root / ICEBERG / "metadata"

    @property
    @abstractmethod
    def marks(self) -> dict[str, str]:
        """Properties that distinguish its table from others."""

    @abstractmethod
    def files(self) -> dict[str, SizedFile]:
        """The data files of the newest version, by location, in the order in which readers are to meet them."""

    @abstractmethod
    def stated(self) -> dict[str, str]:
        """What a snapshot of the newest version says about itself. Raises SinkError if there is something that nobody
        may read as this version."""

    @abstractmethod
    def knows(self, snapshot: Snapshot) -> bool:
        """Whether a snapshot is of a version that this original has or had: it may have been set back."""

    def was_replaced(self) -> bool:
        """Whether another writer has made a later version since. Nobody can where a lock says who may write."""
        return False

    @abstractmethod
    def made_at(self, version: int) -> int | None:
        """When a version was made, in milliseconds; ``None`` if nobody knows."""

    @abstractmethod
    def names_at(self, version: int) -> set[str] | None:
        """The files of a version, relative to the root; ``None`` if nobody knows."""
