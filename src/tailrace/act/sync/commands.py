"""Commands that define something on the target: after a fence, by UUID, and repeated after an election."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import bson
from bson.binary import Binary
from bson.raw_bson import RawBSONDocument
from pymongo import MongoClient
from pymongo.errors import NetworkTimeout, PyMongoError

from tailrace.act.sync.catalog import version_of
from tailrace.act.sync.opening import open_database
from tailrace.act.sync.ownership import SyncOwnership
from tailrace.act.sync.target import MAJORITY, REPLIES, answered, is_worth_again, sink_error
from tailrace.act.sync.writer import ANEW, TargetMismatchError
from tailrace.core.printable import in_a_line
from tailrace.errors import SinkError
from tailrace.read.source.failure import Backoff

RETRY_SECONDS: Final = 120.0
_UNAUTHORIZED: Final = 13
#: There is no such collection or index: it was done before.
DONE_BEFORE: Final = (26, 27)


class TargetCommands:
    """Commands of ``ownership`` to its target, of a ``version``."""

    def __init__(self, ownership: SyncOwnership) -> None:
        self.client: MongoClient[Any] = ownership.state.client
        self.ownership = ownership
        self.version = version_of(ownership.state.deployment)
        #: Whether this user may give operations by UUID. A mongos takes none.
        self.by_uuid = ownership.state.cluster is None
        #: The UUIDs that the server has chosen, where it was not to have the source's, by the source's.
        self.chosen: dict[bytes, bytes] = {}

    def operate(
        self,
        database: str,
        uuid: bytes,
        command: bytes,
        what: str,
        *,
        plain: bytes | None = None,
        at: str | None = None,
        named: str | None = None,
    ) -> None:
        """A command by the UUID of its collection; ``plain``: what a user gives who may not do that. ``named``: the
        name that the collection gets by it. Raises TargetMismatchError where another one has that name."""
        if self.by_uuid and named is not None:
            self._refuse_taken(database, named, uuid, what)
        if self.by_uuid:
            operation = {
                "op": "c",
                "ns": f"{database}.$cmd",
                "ui": Binary(uuid, 4),
                "o": RawBSONDocument(command),
            }
            try:
                self.apply([operation], what)
            except SinkError as error:
                if error.code in DONE_BEFORE:
                    return
                if error.code != _UNAUTHORIZED:
                    raise
                self.by_uuid = False
            else:
                return
        whole = dict(bson.decode(plain or command))
        if not self._is_of(database, whole, uuid):
            return
        try:
            self.command(at or database, whole, what)
        except SinkError as error:
            if error.code not in DONE_BEFORE:
                raise

    def _is_of(self, database: str, command: Mapping[str, Any], uuid: bytes) -> bool:
        """Whether a command by name would still concern the collection that is meant: if not, it was carried out
        before."""
        verb, name = next(iter(command.items()))
        if verb == "create":
            return True
        name = str(name).partition(".")[2] if verb == "renameCollection" else str(name)
        there = self._listed_uuid(database, name) or b""
        return there in (uuid, self.chosen.get(uuid))

    def _refuse_taken(self, database: str, name: str, uuid: bytes, what: str) -> None:
        """By ``applyOps`` the server gives a name to the new collection and a name of its own to the one that had it
        (measured on 4.4.2, 5.0.4 and 6.0.27), and stops where another database's name differs in case alone."""
        there = self._listed_uuid(database, name)
        if there is None:
            self.open(database, what)
        elif there not in (uuid, self.chosen.get(uuid)) and self._applies(what):
            raise TargetMismatchError(
                f"the target cannot {what}: it has another {in_a_line(f'{database}.{name}')} already",
                hint="Somebody has made it there, or --rename has given its name to another collection of the source. "
                f"Rename it on the target if it does not belong to this sync; otherwise, to start again, {ANEW}",
            )

    def _listed_uuid(self, database: str, name: str) -> bytes | None:
        """The UUID of what has a name: empty for a view. ``None``: nothing has it."""
        found = answered(
            f"list {in_a_line(database)}.{in_a_line(name)}",
            lambda: list(self.client[database].list_collections(filter={"name": name})),
            check=self.ownership.check,
        )
        return bytes(found[0].get("info", {}).get("uuid", b"")) if found else None

    def _applies(self, what: str) -> bool:
        """Whether this user may give ``applyOps``."""
        try:
            self.apply([], what)
        except SinkError as error:
            if error.code != _UNAUTHORIZED:
                raise
            self.by_uuid = False
        return self.by_uuid

    def open(self, database: str, what: str) -> None:
        """To be called before ``apply`` makes the first collection of a database."""
        open_database(
            self.client,
            database,
            what,
            lambda other: self.command(other, {"dropDatabase": 1}, f"drop the empty database {other}"),
        )

    def apply(self, operations: Sequence[Mapping[str, Any]], what: str) -> None:
        """Operations as ``applyOps``, after the check of the fence."""
        reply = self.command("admin", {"applyOps": [self.ownership.fence_operation(), *operations]}, what)
        if not all(reply["results"]):
            raise TargetMismatchError(f"the target did not {what}: {reply['results']}")

    def command(self, database: str, command: Mapping[str, Any], what: str) -> Mapping[str, Any]:
        backoff = Backoff(give_up_s=RETRY_SECONDS)
        while True:
            self.ownership.check()
            try:
                reply: Mapping[str, Any] = self.client.get_database(database, write_concern=MAJORITY).command(
                    {**command, "writeConcern": MAJORITY.document}, codec_options=REPLIES
                )
            except NetworkTimeout:
                continue
            except PyMongoError as error:
                self.ownership.judge(error)
                if not is_worth_again(error) or backoff.exhausted:
                    raise sink_error(what, error) from error
                backoff.wait()
            else:
                return reply
