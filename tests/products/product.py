"""A product on the stream, as the harness sees it: a store in a folder that is brought forward and compared."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from tailrace.core.oplog.cluster_time import ClusterTime
from tests.products.truth import Truth


@dataclass(frozen=True)
class Job:
    """One run of a product, in a process of its own.

    ``folder``   the store; empty, or not there, at first
    ``start``    the cluster time after which a new store begins, where it does not begin with what there is
    ``until``    a pause of the truth: the product is to reach it
    ``truth``    the folder of the deployment's ``Truth``
    ``seed``     of what the run chooses by itself
    ``planted``  the name of a fault to be put back (``planted.py``), or nothing
    ``options``  of the workload: which databases it writes to, ...
    """

    product: str
    uri: str
    folder: str
    start: int
    until: int
    truth: str
    version: str
    seed: int = 0
    planted: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Job:
        return cls(**json.loads(text))

    @property
    def root(self) -> Path:
        return Path(self.folder)

    @property
    def time(self) -> ClusterTime:
        """The pause that is to be reached."""
        return ClusterTime(self.until)

    @property
    def databases(self) -> tuple[str, ...]:
        """The workload's."""
        return tuple(self.options["databases"])

    @property
    def moved(self) -> set[str]:
        """The collections whose database may get another primary shard: then what the donor drops makes events, and
        what the recipient copies does not."""
        return set(self.options.get("moved", ()))

    @property
    def unshown(self) -> set[str]:
        """The collections whose documents do not follow from the events: those that move, and those that are also
        written to by operations without events."""
        return self.moved | set(self.options.get("eventless", ()))

    @property
    def resharded(self) -> set[str]:
        """The collections that may be given another shard key."""
        return set(self.options.get("resharded", ()))

    @property
    def unlogged(self) -> set[str]:
        """The collections whose documents do not even follow from the oplog: capped ones of 4.4."""
        return set(self.options.get("unlogged", ()))

    @property
    def has_images(self) -> bool:
        """Whether the servers know images and expanded events: since 6.0."""
        return int(self.version.partition(".")[0]) >= 6


class Product:
    """A product. ``advance`` and ``differences`` run in a process of their own, with nothing but what the job names,
    and may raise TailraceError, which is a refusal."""

    name: ClassVar[str] = ""
    #: Parts of the folder that can be lost or restored by themselves: patterns of names below it.
    parts: ClassVar[tuple[str, ...]] = ()
    #: The oldest server that it works with.
    since: ClassVar[tuple[int, int]] = (4, 4)
    #: Whether its store is files in the folder, which can be copied, damaged, filled up and pointed elsewhere;
    #: otherwise it is in MongoDB.
    has_files: ClassVar[bool] = True
    #: Whether its positions are in a collection of leases, which can be put back by itself.
    has_leases: ClassVar[bool] = False
    #: The files of the folder that are ours, whose damage must be noticed. The others stand for what a consumer keeps
    #: by itself.
    own_files: ClassVar[str] = "**/*"
    #: Whether it copies existing documents, and so has to refuse users who may not read all of them.
    copies: ClassVar[bool] = False
    #: Whether it makes again what the store has lost, so that the store is as good as before if a run is equal.
    makes_again: ClassVar[bool] = True
    #: Whether a damaged file may lie there for a long time before anything reads the damaged part.
    is_read_in_part: ClassVar[bool] = False
    #: Whether a consumer keeps the tokens of its stream (``following.py``).
    keeps_tokens: ClassVar[bool] = False
    on_clusters: ClassVar[bool] = True
    #: Whether it is in an object store, whose answers can get lost.
    is_in_store: ClassVar[bool] = False
    #: Parts of sentences by which it refuses what the pages say that it cannot do.
    limits: ClassVar[tuple[str, ...]] = ()
    #: Whether it runs in the harness's own process, on the one Spark session.
    on_spark: ClassVar[bool] = False

    def advance(self, job: Job) -> None:
        """Bring the store at least up to the job's time, and begin it if necessary."""
        raise NotImplementedError

    def keep_leases(self, job: Job, copy: Path) -> None:
        """Copy what the store has in MongoDB into a folder; nothing by default."""

    def put_leases_back(self, job: Job, copy: Path) -> None:
        """Restore it, in place of what is there."""

    def differences(self, job: Job, truth: Truth) -> list[str]:
        """How the store differs from what the server says for the job's time, in sentences."""
        raise NotImplementedError
