"""What is written to the source meanwhile: every kind of change, value, name, transaction and definition, by seed.

Five writers with databases of their own. ``Everyday`` is the workload of ``make fuzz`` (operators, pipelines,
transactions, definitions); ``Own`` has odd names, sizes up to 16 MB, a ring, ``$out`` and ``$merge``; ``Keys`` swaps
the values of unique indexes; ``Names`` renames, drops, recreates and converts; ``Bytes`` writes what drivers cannot.
The writers' ``step()`` may be interleaved in one thread, so that a seed always writes the same, or run in threads.
"""

from __future__ import annotations

import contextlib
import random
import re
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, Final

import bson
from bson.decimal128 import Decimal128
from bson.int64 import Int64
from bson.raw_bson import RawBSONDocument
from bson.timestamp import Timestamp
from pymongo import MongoClient
from pymongo.errors import PyMongoError

from tailrace.core import raw_bson as rb
from tailrace.core.oplog.cluster_time import ClusterTime
from tests.differential import ddl
from tests.differential import documents as docs
from tests.differential.execute import Executed, run_operation
from tests.differential.wire import CommandError, Wire, raw_command
from tests.differential.workload import Command, Operation, Workload
from tests.products.own_writes import OwnWrites
from tests.sync.keys import Keys
from tests.sync.names import Names

#: The answers of a former primary, and of one that is about to be one.
_NOT_PRIMARY: Final = frozenset({91, 189, 10107, 11600, 11602, 13435, 13436})
_LOST: Final = -1
#: The answer of a 6.0 server to an invalid column.
_NO_COLUMN: Final = 378
_PATIENCE_S: Final = 120
_FORGED_DELETE: Final = re.compile(rb"(?s)....\x04applyOps\x00.*\x02op\x00\x02\x00\x00\x00d\x00")
_COLUMN: Final = re.compile(rb"(?s)\x05[^\x00]*\x00.{4}\x07")


@dataclass(frozen=True)
class Kinds:
    """What else is written. ``series``: time series; ``capped``: capped collections; ``columns``: binary values of
    subtype 7, which servers from 6.0 on accept only if they are valid columns; ``forged_deletes``: deletes by
    ``applyOps``. If one of these finds no document, in a collection with pre-images, it ends every secondary (an
    invariant of 6.0.27 fails), and a set of three has no primary any more."""

    series: bool = False
    capped: bool = True
    large: bool = True
    system: bool = True
    columns: bool = True
    forged_deletes: bool = True


class Sender:
    """Sends commands unchanged to the current primary. Not for several threads. Columns and forged deletes that
    ``kinds`` excludes are not sent, and count as refused."""

    def __init__(self, uri: str, kinds: Kinds | None = None) -> None:
        self._uri, self._kinds = uri, kinds or Kinds()
        self._wire: Wire | None = None
        self.sent = self.refused = 0

    def close(self) -> None:
        if self._wire is not None:
            self._wire.close()
            self._wire = None

    def run(self, database: str, command: dict[str, Any]) -> RawBSONDocument:
        """The reply. Raises CommandError, also if it is unknown whether the command was carried out."""
        reply = RawBSONDocument(self.exchange(bson.encode({**command, "$db": database})))
        if reply["ok"] != 1:
            self.refused += 1
            if reply.get("code") in _NOT_PRIMARY:
                self.close()
            raise CommandError(dict(reply))
        return reply

    def send(self, database: str, command: dict[str, Any]) -> RawBSONDocument | None:
        """The reply; ``None`` if the command was refused."""
        with suppress(CommandError):
            return self.run(database, command)
        return None

    def exchange(self, command: bytes) -> bytes:
        """The reply as bytes."""
        self.sent += 1
        if not self._kinds.columns and _COLUMN.search(command):
            raise CommandError({"code": _NO_COLUMN, "errmsg": "left out: a binary value of subtype 7"})
        if not self._kinds.forged_deletes and _FORGED_DELETE.match(command):
            raise CommandError({"code": _LOST, "errmsg": "left out: a delete by applyOps"})
        try:
            if self._wire is None:
                self._wire = self._connected()
            return self._wire.exchange(command)
        except OSError as error:
            self.close()
            raise CommandError({"code": _LOST, "errmsg": str(error)}) from None

    def _connected(self) -> Wire:
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            with suppress(PyMongoError), MongoClient[Any](self._uri, serverSelectionTimeoutMS=5000) as client:
                client.admin.command("ping")
                if client.primary is not None:
                    return Wire(*client.primary)
            assert time.monotonic() < deadline, "the source has no primary"


class Everyday:
    """The workload of ``make fuzz``, one operation a step. ``alone`` is held while a transaction is prepared."""

    def __init__(
        self, sender: Sender, seed: int, version: str, kinds: Kinds, count: int, *, alone: threading.Lock
    ) -> None:
        self._sender, self._version, self._kinds, self._alone = sender, version, kinds, alone
        self.workload = Workload(seed, version)
        self.databases = self.workload.databases
        self._operations = self.workload.operations(count)
        start = ClusterTime(0)
        self.done = Executed(start, start)

    def step(self) -> bool:
        operation = next(self._operations, None)
        if operation is None:
            return False
        if operation.kind != "long description" and (self._kinds.system or operation.kind != "system"):
            commands = tuple(filter(self._wanted, operation.commands))
            operation = replace(operation, commands=commands)
            if operation.kind == "prepared transaction":
                with self._alone:
                    self._run(operation)
                    self._resolve(operation)
            else:
                self._run(operation)
        return True

    def _resolve(self, operation: Operation) -> None:
        """If it is unknown whether a prepared transaction has ended, end it: it survives elections, and no server gives
        it up. One that has already ended refuses this."""
        deadline = time.monotonic() + _PATIENCE_S
        for command in operation.cleanup:
            while True:
                try:
                    self._sender.run(command.database, command.document)
                except CommandError as error:
                    if error.code in _NOT_PRIMARY or error.code == _LOST:
                        assert time.monotonic() < deadline, "a prepared transaction cannot be ended"
                        time.sleep(0.2)
                        continue
                break

    def _run(self, operation: Operation) -> None:
        self.done.ends.append(run_operation(self._sender, operation, self.done))  # type: ignore[arg-type]

    def _wanted(self, command: Command) -> bool:
        document = command.document
        named = str(next(iter(document.values())))
        if not self._kinds.series and (named in ddl.SERIES or "timeseries" in document):
            return False
        capped = "convertToCapped" in document or document.get("capped") or "cappedSize" in document
        return self._kinds.capped or not capped


class Own:
    """Sizes from 1 byte to 16 MB, odd names, a ring, ``$out`` and ``$merge``. ``alone`` is held during ``applyOps``."""

    def __init__(self, sender: Sender, seed: int, version: str, kinds: Kinds, *, alone: threading.Lock) -> None:
        self.databases = (f"own{seed}",)
        self._sender, self._kinds, self._alone = sender, kinds, alone
        self._writes = OwnWrites(self.databases[0], f"sync {seed}", version, unreadable=0.0, unique_names=False)
        self._is_begun = False

    def step(self) -> bool:
        if not self._is_begun:
            self._is_begun = True
            self._writes.begin_round(self._send, self._sender.exchange)
        self._writes.write(self._send)
        return True

    def _send(self, command: dict[str, Any]) -> None:
        ring = "ring" in (command.get("create"), command.get("insert"), command.get("update"), command.get("aggregate"))
        if not self._kinds.capped and ring:
            return
        with self._alone if "applyOps" in command else contextlib.nullcontext():
            self._sender.send(str(command.pop("$db", self.databases[0])), command)


class Bytes:
    """What drivers cannot write, or write differently: empty timestamps, `$` names, texts that are not UTF-8, duplicate
    names, `_id` values whose number type changes, and 16 MB."""

    def __init__(self, sender: Sender, seed: int, version: str, kinds: Kinds) -> None:
        self.databases = (f"bytes{seed}",)
        self._sender, self._kinds = sender, kinds
        self._rng = random.Random(f"tailrace sync bytes {seed}")
        self._version = version
        self._steps = (
            self._empty_timestamp,
            self._not_utf8,
            self._twice,
            self._dollar,
            self._numbers,
            self._large,
            self._corpus,
            self._corpus,
            self._array_in_a_transaction,
        )

    def step(self) -> bool:
        self._rng.choice(self._steps)()
        return True

    def _send(self, command: dict[str, Any]) -> None:
        self._sender.send(self.databases[0], command)

    def _empty_timestamp(self) -> None:
        """A server replaces an empty timestamp at the top of an insert by its own time, but not one further down, and
        not in what a pipeline writes."""
        key = self._rng.randrange(5)
        empty = Timestamp(0, 0)
        self._send({"insert": "stamps", "documents": [{"_id": key, "t": empty, "o": {"t": empty}}]})
        literal = {"$replaceWith": {"$mergeObjects": ["$$ROOT", {"$literal": {"t": empty, "u": self._rng.random()}}]}}
        self._send({"update": "stamps", "updates": [{"q": {"_id": key}, "u": [literal]}]})
        self._send({"update": "stamps", "updates": [{"q": {"_id": key}, "u": {"$set": {"s": empty}}}]})
        if self._rng.random() < 0.2:
            self._send({"insert": "stamps", "documents": [{"_id": empty, "t": empty}]})
            self._send({"delete": "stamps", "deletes": [{"q": {"_id": key}, "limit": 1}]})

    def _not_utf8(self) -> None:
        key = self._rng.randrange(5)
        text = rb.encode_element(
            rb.STRING, b"s", struct.pack("<i", 4) + self._rng.choice((b"\xff\xfe\xfd", b"a\x80b")) + b"\0"
        )
        body = rb.encode_document(rb.encode_element(rb.INT32, b"_id", struct.pack("<i", key)), text)
        self._insert_raw("texts", body)
        self._send({"update": "texts", "updates": [{"q": {"_id": key}, "u": {"$inc": {"n": 1}}}]})
        if self._rng.random() < 0.3:
            self._send({"delete": "texts", "deletes": [{"q": {"_id": key}, "limit": 1}]})

    def _insert_raw(self, name: str, body: bytes) -> None:
        documents = rb.encode_element(
            rb.ARRAY, b"documents", rb.encode_document(rb.encode_element(rb.OBJECT, b"0", body))
        )
        with suppress(CommandError):
            self._sender.exchange(raw_command("insert", self.databases[0].encode(), name.encode(), documents))

    def _twice(self) -> None:
        key = self._rng.randrange(5)
        element = rb.encode_element(rb.INT32, b"_id", struct.pack("<i", key))
        fields = [rb.encode_element(rb.INT32, b"a", struct.pack("<i", number)) for number in range(2)]
        self._insert_raw("twice", rb.encode_document(element, *fields, rb.encode_element(rb.NULL, b"", b"")))
        self._send({"update": "twice", "updates": [{"q": {"_id": key}, "u": {"$set": {"b": self._rng.random()}}}]})
        if self._rng.random() < 0.3:
            self._send({"delete": "twice", "deletes": [{"q": {"_id": key}, "limit": 1}]})

    def _dollar(self) -> None:
        """From 5.0 on, names at the top of an insert, and in what a pipeline writes, may begin with `$`."""
        key = self._rng.randrange(5)
        self._send({"insert": "dollars", "documents": [{"_id": key, "$a": 1, "a.b": {"$c": 2, "d.": 3}}]})
        put = {"$setField": {"field": {"$literal": "$set"}, "input": "$$ROOT", "value": self._rng.random()}}
        self._send({"update": "dollars", "updates": [{"q": {"_id": key}, "u": [{"$replaceWith": put}]}]})
        self._send({"update": "dollars", "updates": [{"q": {"_id": key}, "u": {"$inc": {"n": 1}}}]})
        if self._rng.random() < 0.3:
            self._send({"delete": "dollars", "deletes": [{"q": {"_id": key}, "limit": 1}]})

    def _numbers(self) -> None:
        """An `_id` under another type of number, with and without a transaction."""
        rng = self._rng
        number = rng.randrange(4)
        before, after = (kind(number) for kind in rng.sample((int, float, Int64, _decimal), 2))
        commands: list[dict[str, Any]] = [
            {"delete": "numbers", "deletes": [{"q": {"_id": before}, "limit": 1}]},
            {"insert": "numbers", "documents": [{"_id": after, "was": repr(before)}]},
        ]
        if rng.random() < 0.4:
            commands.append(
                {"update": "numbers", "updates": [{"q": {"_id": before}, "u": {"$set": {"n": rng.random()}}}]}
            )
        if rng.random() < 0.3:
            commands.append({"delete": "numbers", "deletes": [{"q": {"_id": float(number)}, "limit": 1}]})
            commands.append({"insert": "numbers", "documents": [{"_id": before, "again": True}]})
        if rng.random() < 0.5:
            self._in_transaction(commands)
        else:
            for command in commands:
                self._send(command)

    def _in_transaction(self, commands: list[dict[str, Any]]) -> None:
        # Not from the seed: a server remembers sessions, and the same seed may be played again.
        fields = {"lsid": {"id": bson.Binary(random.randbytes(16), 4)}, "txnNumber": Int64(1), "autocommit": False}
        for number, command in enumerate(commands):
            start = {"startTransaction": True} if number == 0 else {}
            if self._sender.send(self.databases[0], {**command, **fields, **start}) is None:
                break
        else:
            self._sender.send("admin", {"commitTransaction": 1, **fields})
            return
        self._sender.send("admin", {"abortTransaction": 1, **fields})

    def _large(self) -> None:
        """Documents near the largest size, and transactions of several entries of 16 MB."""
        if not self._kinds.large or self._rng.random() < 0.9:
            return
        rng = self._rng
        key, pad = rng.randrange(3), b"x" * ((16 << 20) - 100)
        if rng.random() < 0.6:
            self._send({"update": "large", "updates": [{"q": {"_id": key}, "u": {"pad": pad}, "upsert": True}]})
            self._send({"update": "large", "updates": [{"q": {"_id": key}, "u": {"$set": {"pad": b""}}}]})
            return
        wide = [
            {"insert": "large", "documents": [{"_id": rng.getrandbits(60), "pad": pad[: 6 << 20]}]} for _ in range(4)
        ]
        self._in_transaction(wide)
        self._send({"delete": "large", "deletes": [{"q": {"_id": {"$gt": 10}}, "limit": 0}]})

    def _corpus(self) -> None:
        rng = self._rng
        raw = docs.new_document(rng if not self._version.startswith("5.") else _unique(rng))
        self._send({"insert": "corpus", "documents": [RawBSONDocument(raw)]})
        if rng.random() < 0.4:
            self._send({"delete": "corpus", "deletes": [{"q": {"_id": rng.randint(0, docs.SMALL_IDS)}, "limit": 1}]})

    def _array_in_a_transaction(self) -> None:
        """One document changed again and again in a transaction, and deleted and inserted again."""
        rng, key = self._rng, self._rng.randrange(4)
        again = [
            {"update": "again", "updates": [{"q": {"_id": key}, "u": {"$push": {"a": rng.random()}}, "upsert": True}]},
            {
                "update": "again",
                "updates": [{"q": {"_id": key}, "u": {"$push": {"a": {"$each": [1], "$position": 0}}}}],
            },
            {"delete": "again", "deletes": [{"q": {"_id": key}, "limit": 1}]},
            {"insert": "again", "documents": [{"_id": key, "a": [rng.random()]}]},
            {"update": "again", "updates": [{"q": {"_id": key}, "u": {"$pop": {"a": 1}, "$inc": {"n": 1}}}]},
        ]
        self._in_transaction(again[: rng.randint(1, 5)])


def _decimal(number: int) -> Decimal128:
    return Decimal128(f"{number}.0")


def _unique(rng: random.Random) -> docs.UniqueNames:
    return docs.UniqueNames(rng.getrandbits(60))


class Writes:
    """All writers of a seed. ``run(count)`` interleaves them in one thread; ``running()`` lets each write by itself."""

    def __init__(self, uri: str, seed: int, version: str, *, kinds: Kinds | None = None, count: int = 10**9) -> None:
        kinds = kinds or Kinds(capped=not version.startswith("4."))
        self._senders = [Sender(uri, kinds) for _ in range(5)]
        first, second, third, fourth, fifth = self._senders
        # An ``applyOps`` waits for the whole server, and so for a prepared transaction, whose writer would wait for it
        # before committing. That lasted five minutes, until a connection gave up, and no primary could step down
        # meanwhile.
        alone = threading.Lock()
        self.writers = [
            Everyday(first, seed, version, kinds, count, alone=alone),
            Own(second, seed, version, kinds, alone=alone),
            Keys(third, seed, version),
            Names(fourth, seed, version, capped=kinds.capped),
            Bytes(fifth, seed, version, kinds),
        ]
        self.databases = tuple(name for writer in self.writers for name in writer.databases)
        self._turns = random.Random(f"tailrace sync turns {seed}")
        self._failures: list[BaseException] = []

    @property
    def sent(self) -> int:
        """Commands so far."""
        return sum(sender.sent for sender in self._senders)

    @property
    def refused(self) -> int:
        """Of these, those that the server refused."""
        return sum(sender.refused for sender in self._senders)

    def close(self) -> None:
        for sender in self._senders:
            sender.close()

    def run(self, steps: int) -> None:
        """So many steps; the seed chooses the writer of each."""
        for _ in range(steps):
            self._turns.choice(self.writers).step()

    @contextmanager
    def running(self, *, pause_s: float = 0.0) -> Iterator[None]:
        """Each in a thread, until the block ends."""
        stop = threading.Event()

        def write(writer: Any) -> None:
            try:
                while not stop.is_set() and writer.step():
                    stop.wait(pause_s)
            except BaseException as error:  # noqa: BLE001  raised below
                self._failures.append(error)

        threads = [threading.Thread(target=write, args=(writer,), daemon=True) for writer in self.writers]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        if self._failures:
            raise self._failures[0]

    def clear(self) -> None:
        """Drop what was written."""
        for database in self.databases:
            self._senders[0].send(database, {"dropDatabase": 1})


@contextmanager
def writing(uri: str, seed: int, version: str, **options: Any) -> Iterator[Writes]:
    """The writers of a seed, closed at the end."""
    with contextlib.closing(Writes(uri, seed, version, **options)) as writes:
        yield writes
