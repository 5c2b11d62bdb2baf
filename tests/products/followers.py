"""What acts on changes: a view, an outbox's messages, and a listener with lanes. Their positions are in MongoDB."""

from __future__ import annotations

import json
import os
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

from bson.raw_bson import RawBSONDocument
from pymongo import MongoClient

import tailrace
from tailrace.act.consumer.messages.publisher import Message
from tailrace.consumer import Change, Listener, MongoLeaseStore
from tailrace.consumer.messages import MessageRelay, Outbox
from tailrace.consumer.views import View, ViewKeeper
from tailrace.core import raw_bson
from tailrace.core.oplog.cluster_time import ZERO, ClusterTime
from tests.products.broker import TopicPublisher, servers_of, taken
from tests.products.product import Job, Product
from tests.products.truth import Truth
from tests.products.writes import ORDERS, OUTBOX, PATIENCE
from tests.snapshot.copies import opened

#: A killed process leaves its transaction open until the server ends it after 60 s; until then its documents are
#: blocked.
_PATIENCE_S = 100.0
#: A position of another deployment is refused before anything is read.
_PATIENCE_ELSEWHERE_S = 10.0
_LEASE_S = 1.0
#: How long one works while there are writes.
_A_WHILE_S = 1.5
_LANES = 3


class Follower(Product):
    """One that runs until its effects are as the server says, or until its time is over."""

    has_files = False
    has_leases = True
    #: Collections that are restored together with the leases, since they were written in one transaction with them.
    written_together: ClassVar[tuple[str, ...]] = ()

    def advance(self, job: Job) -> None:
        """Nothing, since the comparison says what it has to reach. If only this is asked for, it works for a while."""
        if job.options.get("only") == "advance":
            with self._running(job) as (_, parts):
                for part in parts:
                    part.join(_A_WHILE_S / len(parts))

    def differences(self, job: Job, truth: Truth) -> list[str]:
        with self._running(job) as (client, parts):
            return self._until_equal(client, job, truth, parts)

    @contextmanager
    def _running(self, job: Job) -> Iterator[tuple[Any, Sequence[Any]]]:
        job.root.mkdir(parents=True, exist_ok=True)
        with tailrace.connect(job.uri) as client, MongoClient(_leases_of(job)) as beside:
            parts = self._parts(client, MongoLeaseStore(beside[_beside(job)][self._leases]), job)
            for part in parts:
                part.start()
            try:
                yield client, parts
            finally:
                for part in parts:
                    part.stop()
                for part in parts:
                    part.join()

    def _until_equal(self, client: Any, job: Job, truth: Truth, parts: Sequence[Any]) -> list[str]:
        deadline = time.monotonic() + (_PATIENCE_ELSEWHERE_S if job.options.get("elsewhere") else _PATIENCE_S)
        while True:
            told = self._wrong(client, job, truth)
            if not told or time.monotonic() > deadline:
                return told
            for part in parts:
                if part.join(0.05):  # it has ended: raises its error
                    return [*told, "and it has ended"]

    @property
    def _leases(self) -> str:
        return f"leases of {self.name}"

    def keep_leases(self, job: Job, copy: Path) -> None:
        """See ``Product``."""
        with MongoClient(_leases_of(job), document_class=RawBSONDocument, **PATIENCE) as client:
            for name in (self._leases, *self.written_together):
                (copy / name).write_bytes(b"".join(bytes(one.raw) for one in client[_beside(job)][name].find()))

    def put_leases_back(self, job: Job, copy: Path) -> None:
        """See ``Product``."""
        with MongoClient(_leases_of(job), document_class=RawBSONDocument, **PATIENCE) as client:
            for name in (self._leases, *self.written_together):
                collection = client[_beside(job)][name]
                collection.delete_many({})
                for one in raw_bson.split((copy / name).read_bytes()):
                    collection.insert_one(RawBSONDocument(one))

    def _parts(self, client: Any, store: MongoLeaseStore, job: Job) -> Sequence[Any]:
        raise NotImplementedError

    def _wrong(self, client: Any, job: Job, truth: Truth) -> list[str]:
        raise NotImplementedError


class ViewProduct(Follower):
    """On clusters it would have to write through a mongos, and there is none here."""

    name = "view"
    on_clusters = False

    def _parts(self, client: Any, store: MongoLeaseStore, job: Job) -> Sequence[Any]:
        own = job.options["followed"]
        fields = {"buyer.name": "name", "buyer.tier": "account.tier"}
        view = View(f"{own}.carts", f"{own}.customers", "customer_id", fields)
        return [ViewKeeper(client, view, store=store, lease_seconds=_LEASE_S)]

    def _wrong(self, client: Any, job: Job, truth: Truth) -> list[str]:
        """The server's own join says what each cart must show."""
        join = {"from": "customers", "localField": "customer_id", "foreignField": "_id", "as": "found"}
        carts = client[job.options["followed"]]["carts"].aggregate([{"$lookup": join}])
        wrong = []
        for cart in carts:
            source = cart["found"][0] if cart["found"] and cart.get("customer_id") is not None else {}
            account = source.get("account")
            tier = account.get("tier") if isinstance(account, dict) else None
            buyer = cart.get("buyer") or {}
            if (source.get("name"), tier) != (buyer.get("name"), buyer.get("tier")):
                wrong.append(f"cart {cart['_id']} shows {buyer}, and its customer is {source}")
        return wrong[:3]


class FilePublisher:
    """A broker that keeps what it acknowledges, in a file."""

    keeps_order = True

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()

    def publish(self, messages: Sequence[Message]) -> int:
        """See ``Publisher``."""
        with self._lock, self._path.open("ab") as file:
            for message in messages:
                text = json.dumps([message.id, message.key, message.headers["outbox-id"], message.body.decode()])
                file.write(text.encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        return len(messages)

    def close(self) -> None:
        """See ``Publisher``."""


def _lines(path: Path) -> list[Any]:
    lines = path.read_bytes().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith(b"]")]


class OutboxProduct(Follower):
    """Its messages go to a broker that speaks Kafka's protocol in some seeds, and to a file in the others."""

    name = "outbox"

    def _parts(self, client: Any, store: MongoLeaseStore, job: Job) -> Sequence[Any]:
        servers = servers_of(job)
        publisher = FilePublisher(job.root / "published") if servers is None else TopicPublisher(servers, job)
        relay = MessageRelay(publisher, Outbox())
        outbox = client[job.options["followed"]][OUTBOX]
        return [
            Listener(
                outbox,
                relay,
                resource="outbox",
                store=store,
                lease_seconds=_LEASE_S,
                commit_every=10,
                on_invalidate="resume",
            )
        ]

    def _wrong(self, client: Any, job: Job, truth: Truth) -> list[str]:
        """Each committed letter's message is there, those of one key in order, and no others."""
        namespace = f"{job.options['followed']}.{OUTBOX}"
        events = _of(truth, job, namespace)
        wanted = {_data(event): event["fullDocument"] for event in events if event["operationType"] == "insert"}
        servers = servers_of(job)
        found = _lines(job.root / "published") if servers is None else taken(servers, job)
        if servers is not None:
            # A broker keeps its messages when the deployment is restored; the file may be set back to an older copy.
            found = [one for one in found if one[0] in wanted]
        firsts = list(dict.fromkeys(identifier for identifier, *_ in found))
        told = []
        if missing := [one for one in wanted if one not in firsts]:
            told.append(f"{len(missing)} of {len(wanted)} messages are missing")
        if strange := [one for one in firsts if one not in wanted and one <= max(wanted, default="")]:
            told.append(f"{len(strange)} messages that nobody committed")
        by_key: dict[str, list[str]] = defaultdict(list)
        for identifier, key, *_ in found:
            if identifier not in by_key[key]:
                by_key[key].append(identifier)
        told += [f"the messages of key {key} are out of order" for key, ids in by_key.items() if ids != sorted(ids)]
        return told


class ListenerProduct(Follower):
    """Lanes whose effects and positions are one transaction: each change of a document once, in order."""

    name = "listener"
    written_together = ("effects",)

    def _parts(self, client: Any, store: MongoLeaseStore, job: Job) -> Sequence[Any]:
        own = job.options["followed"]
        orders = client[own][ORDERS]

        def handle(change: Change) -> None:
            if change.document_key is None:  # the collection was dropped
                return
            key = change.document_key["_id"]
            with change.transaction() as session:
                effects = session.client[_beside(job)]["effects"]
                effects.update_one({"_id": key}, {"$push": {"seen": change.message_id}}, upsert=True, session=session)

        return [
            Listener(
                orders,
                handle,
                resource="effects",
                store=store,
                partitions=_LANES,
                lease_seconds=_LEASE_S,
                retries=1000,
                # On a cluster the former primary shard of a database drops its collections.
                on_invalidate="resume",
            )
        ]

    def _wrong(self, client: Any, job: Job, truth: Truth) -> list[str]:
        wanted: dict[Any, list[str]] = defaultdict(list)
        for event in _of(truth, job, f"{job.options['followed']}.{ORDERS}"):
            if "documentKey" in event:
                wanted[event["documentKey"]["_id"]].append(_data(event))
        last = max((ids[-1] for ids in wanted.values()), default="")
        with MongoClient[Any](_leases_of(job)) as beside:
            effects = beside[_beside(job)]["effects"].find().to_list()
        found = {one["_id"]: [seen for seen in one["seen"] if seen <= last] for one in effects}
        wrong = [key for key in {*wanted, *found} if wanted.get(key, []) != found.get(key, [])]
        if not wrong:
            return []
        key = wrong[0]
        lost = [one for one in wanted.get(key, []) if one not in found.get(key, [])]
        more = [one for one in found.get(key, []) if one not in wanted.get(key, [])]
        shown = f"of {key!r}: {len(lost)} missing, first {lost[:1]}; {len(more)} strange, first {more[:1]}"
        return [f"the effects of {len(wrong)} of {len(wanted)} documents are not its changes; {shown}"]


def _leases_of(job: Job) -> str:
    """The deployment of leases and effects, which is another one if a cluster is watched."""
    return str(job.options.get("leases") or job.uri)


def _beside(job: Job) -> str:
    """The database of leases and effects."""
    return f"{job.options['followed']}_leases"


def _of(truth: Truth, job: Job, namespace: str) -> list[Any]:
    since = ZERO if job.options.get("elsewhere") else ClusterTime(job.start)
    found = map(opened, truth.events(since, job.time))
    return [event for event in found if f"{event['ns']['db']}.{event['ns'].get('coll')}" == namespace]


def _data(event: Any) -> str:
    return str(event["_id"]["_data"])
