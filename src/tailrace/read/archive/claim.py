"""Who may write an archive in an object store. A lock there is not released when a process dies, so the archive belongs
to a state: a local folder with a random name, which ``archive.json`` names, next to the writer's session.

Each recorder that begins puts a session of its own there, and then each of its oplogs' writers puts it into
``head.json`` (``keeping``). Both are written only over what was read (``If-Match``). So a recorder that was replaced
can write neither of them again, whenever it wakes up, and what no head names does not count.

A state remembers its sessions. One that finds a session of its own that it does not know has been copied, and the copy
has written since: refused, as another state is. If the state is lost, a new one takes over.
"""

from __future__ import annotations

import logging
import secrets
import stat
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from tailrace.base import durable
from tailrace.base.object_place import ObjectPlace
from tailrace.base.store_probe import check_store
from tailrace.errors import SinkError
from tailrace.read.archive.layout import DESCRIPTION, LOCK
from tailrace.read.archive.place import ArchivePlace, asking
from tailrace.read.archive.record import read_record, write_record

#: The local file with the state's name and sessions.
STATE: Final = "archive-state.json"
#: How many of its sessions a state remembers.
SESSIONS_MAX: Final = 1000
_OWNER: Final = "owner"

_log = logging.getLogger("tailrace.archive")


class FolderClaim:
    """That an archive in a directory is written. Locks of its oplogs say by whom (``keeping``)."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Nothing: see above."""
        yield

    def begin(self) -> None:
        """Make the directory."""
        with durable.writing(self._folder):
            durable.make_private(self._folder)
        _warn_of_others(self._folder)

    def save(self, description: Mapping[str, object]) -> None:
        """Write the description."""
        write_record(self._folder / DESCRIPTION, description)

    def renew(self, description: Mapping[str, object]) -> None:
        """Nothing: it is there."""


class StoreClaim:
    """That the archive at ``root`` is this process's to write. Raises SinkError where it is another state's or another
    process's, or where the store lacks what is needed.
    """

    def __init__(self, root: ObjectPlace, *, take_over: bool = False) -> None:
        self.root = root
        self.beside = root.bucket.beside
        self.session = secrets.token_hex(16)
        self._take_over = take_over
        self._state = ""
        self._place = root / DESCRIPTION
        #: Of the description that was read or written last; ``""`` while there is none.
        self._tag = ""
        #: One thread writes the description, others check it.
        self._lock = threading.Lock()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Keep other processes with the same state out. Raises SinkError where there is one."""
        with durable.writing(self.beside):
            durable.make_private(self.beside)
        with durable.locked(self.beside / LOCK, wait=False) as held:
            if not held:
                raise SinkError(
                    f"another process archives with the state in {self.beside}",
                    hint="An archive has one writer: stop the other one",
                )
            yield

    def begin(self) -> None:
        """Compare owner and state. What the caller reads of the description after this is what ``save`` replaces."""
        check_store(self.root)
        try:
            with asking():
                self._tag = self._place.head()[1]
        except FileNotFoundError:
            self._tag = ""
        known = self._known()
        found: Any = (read_record(self._place) or {}).get(_OWNER)
        if found is not None:
            self._compare(str(found.get("state")), str(found.get("session")), known)
        self._state = known["state"]
        # Before the store has it: a crash in between must not make it a stranger's.
        sessions = [*known["sessions"], self.session][-SESSIONS_MAX:]
        durable.write_sealed(self.beside / STATE, {**known, "sessions": sessions})

    def _known(self) -> dict[str, Any]:
        """What the state says, or a new one."""
        path, where = self.beside / STATE, str(self.root)
        record: Any = durable.read_sealed(path)
        if record is None:
            return {"state": secrets.token_hex(16), "archive": where, "sessions": []}
        if record["archive"] != where:
            raise SinkError(
                f"{self.beside} is the state of {record['archive']}, not of {where}",
                hint="Give each archive a state of its own",
            )
        return dict(record)

    def _compare(self, state: str, session: str, known: Mapping[str, Any]) -> None:
        if state == known["state"]:
            if session in known["sessions"]:
                if session != known["sessions"][-1]:
                    _log.warning("%s was set back, or a writer ended while it started", self.root)
                return
            whose = "a copy of this state, or a newer one,"
        else:
            whose = "another state"
        if not self._take_over:
            raise SinkError(
                f"{whose} writes the archive {self.root}",
                hint="Run 'tailrace archive' where that state is. If it is lost, --take-over lets this one go on, and "
                "stops the other writer if there is one",
            )
        _log.warning("%s wrote the archive %s: it is taken over", whose, self.root)

    def save(self, description: Mapping[str, object]) -> None:
        """Write the description, with whose it is."""
        content = durable.sealed({**description, _OWNER: {"state": self._state, "session": self.session}})
        with self._lock:
            try:
                if self._tag:
                    self._tag = self._place.swap(content, self._tag)
                else:
                    self._tag = self._place.create(content)
            except FileExistsError:
                raise self.lost() from None
        durable.step("archive.description")

    def renew(self, description: Mapping[str, object]) -> None:
        """Put this session into a description that is there."""
        self.save(description)

    def check(self) -> None:
        """Raises SinkError where another process has begun to write the archive."""
        with self._lock, suppress(FileNotFoundError):
            if self._place.head()[1] == self._tag:
                return
        raise self.lost()

    def lost(self) -> SinkError:
        """The error for a writer that was replaced."""
        return SinkError(
            f"another process writes the archive {self.root}, or it was set back",
            hint="An archive has one writer. If no other one runs, start this one again: it goes on where the archive "
            "ends",
        )


def claim_of(folder: ArchivePlace, *, take_over: bool = False) -> FolderClaim | StoreClaim:
    """What a recorder needs before it writes the archive in ``folder``."""
    return StoreClaim(folder, take_over=take_over) if isinstance(folder, ObjectPlace) else FolderClaim(folder)


def _warn_of_others(folder: Path) -> None:
    if stat.S_IMODE(folder.stat().st_mode) & 0o077:
        _log.warning(
            "users other than its owner can enter %s: it holds every document that is written, and the password hashes "
            "of users that are made or changed",
            folder,
        )
