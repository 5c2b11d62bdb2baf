"""What a getMore has to fulfil before its cursor is used: whose it is, and how it is used."""

from __future__ import annotations

import base64
import hashlib
import uuid
from collections.abc import Iterable
from typing import Final

from tailrace.core.cursor.get_more import GetMoreCommand
from tailrace.errors import ServerError
from tailrace.watch.gateway.repeated import GetMoreFacts
from tailrace.watch.gateway.rights import Identity, User
from tailrace.watch.gateway.served import ServedStream

#: A client's cluster time that is this many seconds ahead is sent to the server to check; it refuses a year.
FAR_S: Final = 86_400
_UNAUTHORIZED: Final = 13
_UUID: Final = 4


def check_owner(stream: ServedStream, identity: Identity, session: bytes | None, version: tuple[int, int]) -> None:
    """Raise ServerError 13 unless the cursor belongs to this user and session, and the user may still watch."""
    owner = stream.owner
    if owner.users and not identity.users and not identity.may_all:
        raise ServerError("command getMore requires authentication", code=_UNAUTHORIZED)  # logged out, or dropped
    if owner.session != session or (session is not None and owner.users != identity.users):
        raise _wrong_session(stream, session, identity, version)
    if owner.users != identity.users:
        raise ServerError(f"cursor id {stream.cursor_id} was not created by the authenticated user", code=_UNAUTHORIZED)
    if not identity.may_watch(stream.scope):
        raise ServerError(f"not authorized for getMore with cursor id {stream.cursor_id}", code=_UNAUTHORIZED)


def check_use(stream: ServedStream, wanted: GetMoreCommand, facts: GetMoreFacts, version: tuple[int, int]) -> None:
    """Raise ServerError for a getMore in a transaction, or with API parameters that differ from those of its cursor.
    6.0 compares the namespace before these, older servers afterwards."""
    if facts.transaction is not None:
        raise ServerError(
            f"Cannot run getMore on cursor {stream.cursor_id}, which was not created in a transaction, in transaction "
            f"{facts.transaction}",
            code=50739,
        )
    if facts.api != stream.api and (version < (6, 0) or wanted.namespace == stream.namespace):
        raise ServerError(
            f"API parameter mismatch: getMore used params {facts.api}, the cursor-creating command used {stream.api}",
            code=347,
        )


def _wrong_session(
    stream: ServedStream, session: bytes | None, identity: Identity, version: tuple[int, int]
) -> ServerError:
    """With users the server finds this while it checks rights; without, later and in other words."""
    owner = stream.owner
    opened = _session_text(owner.session, owner.users, version)
    asked = _session_text(session, identity.users, version)
    if not identity.may_all:
        return ServerError(
            f"Cursor session id ({opened}) is not the same as the operation context's session id ({asked})",
            code=_UNAUTHORIZED,
        )
    text = f"Cannot run getMore on cursor {stream.cursor_id}, which was "
    if stream.owner.session is None:
        return ServerError(f"{text}not created in a session, in session {asked}", code=50736)
    if session is None:
        return ServerError(f"{text}created in session {opened}, without an lsid", code=50737)
    return ServerError(f"{text}created in session {opened}, in session {asked}", code=50738)


def _session_text(session: bytes | None, users: Iterable[User], version: tuple[int, int]) -> str:
    """As a server of ``version`` writes a session's id: the client's part, and a digest of its user."""
    if session is None:
        return "none"
    # Without a user the digest is that of nothing.
    name = "".join(f"{user}@{database}" for user, database in sorted(users))
    digest = base64.b64encode(hashlib.sha256(name.encode()).digest()).decode()
    return f"{_uuid_text(session)} - {digest}" + (" -  - " if version >= (6, 0) else "")


def _uuid_text(session: bytes) -> str:
    # A binary value: its length, its subtype, its bytes.
    return str(uuid.UUID(bytes=session[5:21])) if len(session) == 21 and session[4] == _UUID else session.hex()
