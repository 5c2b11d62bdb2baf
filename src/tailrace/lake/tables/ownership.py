"""The ownership of tables in an object store. A lock there is not released when a process dies, so nothing is locked:
the state that may write is named in an object, and each writer that begins puts its own random session there, if the
object is still the one that it has read (``If-Match``).

A state remembers its sessions. So a writer that begins knows

* another state's tables: refused, unless it is asked to take over;
* another deployment's: refused always;
* a session of its own state that the state does not know: a copy of the state has written since. Refused like another
  state's;
* an earlier session of its state: the store was set back. Tables are compared anyway, and rewritten where they differ.

A writer whose session is no longer there has been replaced, and stops. It may notice this a moment late if another one
is just starting; then the table's log decides, since only one of them gets its next number (``delta_commit.publish``).
"""

from __future__ import annotations

import json
import logging
import secrets
from typing import Final

from tailrace.base.object_place import ObjectPlace
from tailrace.base.store_probe import check_store
from tailrace.errors import OtherHistoryError, SinkError
from tailrace.lake.store.place import TablePlace
from tailrace.lake.tables.holding import STATE
from tailrace.lake.tables.names import BEGIN_ANEW
from tailrace.lake.tables.state import TableState

_OWNER: Final = "owner.json"
_FORMAT: Final = 1
#: How many of its sessions a state remembers.
SESSIONS_MAX: Final = 1000

_log = logging.getLogger("tailrace.tables")


class TablesOwnership:
    """That the tables in ``root`` are ``state``'s to write. Of a directory a lock says so (``holding.lock``)."""

    def __init__(self, root: TablePlace, state: TableState, deployment: str, *, take_over: bool = False) -> None:
        self._place = root / STATE / _OWNER if isinstance(root, ObjectPlace) else None
        self._state = state
        self._session = ""
        self._tag = ""
        if isinstance(root, ObjectPlace):
            check_store(root)
            self._begin(root, deployment, take_over=take_over)

    def _begin(self, root: ObjectPlace, deployment: str, *, take_over: bool) -> None:
        place = root / STATE / _OWNER
        try:
            content, tag = place.read()
        except FileNotFoundError:
            content, tag = b"", ""
        if content:
            owner = _owner(place, content)
            self._compare(root, owner, deployment, take_over=take_over)
            deployment = deployment or owner["deployment"]  # who only erases does not ask
        self._session = secrets.token_hex(16)
        # Before the object has it: a crash in between must not make it a stranger's.
        with self._state.writing() as transaction:
            transaction.set_sessions([*self._state.sessions(), self._session][-SESSIONS_MAX:])
        mine = {"format": _FORMAT, "state": self._state.name, "session": self._session, "deployment": deployment}
        made = (json.dumps(mine, indent=1) + "\n").encode()
        try:
            self._tag = place.swap(made, tag) if tag else place.create(made)
        except FileExistsError:
            raise SinkError(
                f"another writer of the tables in {root} is just starting", hint="Tables have one writer"
            ) from None

    def _compare(self, root: ObjectPlace, owner: dict[str, str], deployment: str, *, take_over: bool) -> None:
        known = owner["deployment"]
        if known and deployment and known != deployment:
            raise OtherHistoryError(
                f"the tables in {root} are of another deployment: its id was {known} and is {deployment}",
                hint=f"Connect to that deployment, or {BEGIN_ANEW}",
            )
        if owner["state"] == self._state.name:
            sessions = self._state.sessions()
            if owner["session"] in sessions:
                if owner["session"] != sessions[-1]:
                    _log.warning("%s was set back, or a writer ended while it started: each table is compared", root)
                return
            whose = "a copy of this state, or a newer one,"
        else:
            whose = "another state"
        if not take_over:
            raise SinkError(
                f"{whose} writes the tables in {root}",
                hint="Run the writer where that state is. If it is lost, `tailrace tables write --take-over` lets "
                "this one write them: it rewrites each table, and stops the other writer if there is one",
            )
        _log.warning("%s wrote the tables in %s: they are taken over", whose, root)
        self._forget_all()

    def _forget_all(self) -> None:
        """Let every table be rewritten."""
        from tailrace.lake.tables.state import unknown  # noqa: PLC0415

        position = self._state.position()
        with self._state.writing() as transaction:
            for namespace, mark in self._state.marks().items():
                if mark.collection is not None:
                    transaction.set_mark(unknown(namespace))
            if position is not None:
                transaction.set_position(position.next_batch())

    def check(self) -> None:
        """Raises SinkError if another writer has begun."""
        if self._place is None:
            return
        try:
            if self._place.head()[1] == self._tag:
                return
            content = self._place.read_bytes()
            mine = _owner(self._place, content)["session"] == self._session
        except FileNotFoundError:
            mine = False
        if not mine:
            raise SinkError(
                f"another writer has taken over {self._place.parent.parent}, or its owner's object is gone or set back",
                hint="Tables have one writer. If no other one runs, start this one again: it compares each table",
            )


def _owner(place: ObjectPlace, content: bytes) -> dict[str, str]:
    """What the object says. Raises SinkError if it is not ours."""
    try:
        owner = json.loads(content)
        if owner["format"] != _FORMAT:
            raise SinkError(
                f"{place} was written by another version of Tailrace (format {owner['format']})",
                hint="Use the release that has written it",
            )
        return {name: str(owner[name]) for name in ("state", "session", "deployment")}
    except (ValueError, KeyError, TypeError, RecursionError):
        raise SinkError(
            f"{place} is damaged, or not ours", hint="If no writer runs, delete it: the next one compares each table"
        ) from None
