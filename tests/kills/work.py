"""What is written meanwhile: every kind of change of a document, alone and in transactions, from several threads."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pymongo import MongoClient
from pymongo.errors import OperationFailure, PyMongoError

from tailrace.core.oplog.cluster_time import ClusterTime

DATABASE = "killed"
COLLECTIONS = ("a", "b", "c")
#: The ``_id`` of the last documents.
LAST = "the last write"
_DOCUMENTS = 400
_THREADS = 2


def keeps_images(client: MongoClient[Any]) -> bool:
    """Whether the server can keep images of its own: since 6.0."""
    return bool(client.server_info()["versionArray"][0] >= 6)


def prepare(client: MongoClient[Any]) -> None:
    """Write the documents that exist before anything reads them. If the server can keep images, it does: ours are
    compared with them."""
    chosen = random.Random(0)
    options: dict[str, Any] = {"changeStreamPreAndPostImages": {"enabled": True}} if keeps_images(client) else {}
    for name in COLLECTIONS:
        client[DATABASE].create_collection(name, **options)
        client[DATABASE][name].insert_many(
            [{"_id": number, "n": number, "pad": chosen.randbytes(200)} for number in range(_DOCUMENTS)]
        )


class Work:
    """The writers. ``operations`` is how many they have carried out. ``may_fail``: a write that meets a step-down may
    be refused."""

    def __init__(self, uri: str, seed: int, *, may_fail: bool = False) -> None:
        self._uri, self._seed = uri, seed
        self._refusals: tuple[type[Exception], ...] = (PyMongoError,) if may_fail else ()
        self._stop = threading.Event()
        self._failures: list[Exception] = []
        self.operations = 0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Writes until the block ends."""
        threads = [threading.Thread(target=self._run, args=(number,)) for number in range(_THREADS)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._stop.set()
            for thread in threads:
                thread.join()
        assert not self._failures, self._failures

    def finish(self) -> ClusterTime:
        """One last transaction that reaches every collection. Returns its time."""
        with MongoClient[Any](self._uri) as client, client.start_session() as session:
            with session.start_transaction():
                for name in COLLECTIONS:
                    client[DATABASE][name].insert_one({"_id": LAST}, session=session)
            assert session.operation_time is not None
            return ClusterTime.from_timestamp(session.operation_time)

    def _run(self, number: int) -> None:
        chosen = random.Random(f"{self._seed} {number}")
        try:
            with MongoClient[Any](self._uri) as client:
                while not self._stop.wait(0.02):
                    with contextlib.suppress(*self._refusals):
                        self._change(client, chosen)
                    self.operations += 1
        except Exception as error:  # noqa: BLE001  told by the test's own thread
            self._failures.append(error)

    def _change(self, client: MongoClient[Any], chosen: random.Random) -> None:
        collection = client[DATABASE][chosen.choice(COLLECTIONS)]
        match chosen.randrange(8):
            case 0:
                collection.delete_one({"_id": chosen.randrange(_DOCUMENTS)})
            case 1:
                whole = {"n": 0, "pad": chosen.randbytes(chosen.randrange(400))}
                collection.replace_one({"_id": chosen.randrange(_DOCUMENTS)}, whole, upsert=True)
            case 2:
                low = chosen.randrange(_DOCUMENTS)
                collection.update_many({"_id": {"$gte": low, "$lt": low + 20}}, {"$inc": {"n": 1}})
            case 3:
                # Two threads at one document: the server refuses one of the transactions.
                refused = contextlib.suppress(OperationFailure)
                with refused, client.start_session() as session, session.start_transaction():
                    for _ in range(4):
                        key = {"_id": chosen.randrange(_DOCUMENTS)}
                        change = {"$set": {"t": chosen.random()}, "$push": {"list": 1}}
                        collection.update_one(key, change, upsert=True, session=session)
                    collection.delete_one({"_id": chosen.randrange(_DOCUMENTS)}, session=session)
            case _:
                key = {"_id": chosen.randrange(_DOCUMENTS)}
                change = {"$inc": {"n": 1}, "$set": {f"f{chosen.randrange(6)}": chosen.random()}, "$unset": {"t": 1}}
                collection.update_one(key, change, upsert=True)
