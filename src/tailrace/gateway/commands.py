"""The commands that the gateway answers: aggregate, getMore and killCursors of change streams.

If it is not certain of an answer, it sends the command to the server: a client that may not watch gets the server's own
refusal.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import uuid
from collections.abc import Iterable
from typing import Final

import bson
from bson.errors import BSONError

from tailrace import raw_bson
from tailrace.cursor.aggregate import AggregateCommand
from tailrace.cursor.get_more import GetMoreCommand, cursors_to_kill
from tailrace.cursor.reply import kill_reply
from tailrace.errors import ServerError, UsageError
from tailrace.event.bson_text import spaced_document_text
from tailrace.gateway import listing
from tailrace.gateway.command import (
    FAIL_POINT,
    ClientCommand,
    cursor_asked,
    is_ordinary,
    opens_stream,
    without_cursors,
)
from tailrace.gateway.connection import ClientConnection, ClosedConnection
from tailrace.gateway.engine import Engine, Owner, ServedStream
from tailrace.gateway.fail_points import FailPoints
from tailrace.gateway.reading import aside
from tailrace.gateway.replies import is_ok, merged_kills
from tailrace.gateway.rights import Identity, User
from tailrace.oplog.namespace import Scope

_UNAUTHORIZED: Final = 13
_UUID: Final = 4


class Commands:
    """Answers commands of clients from the engine.

    ``rights_seconds``  at a getMore, rights are asked for again if the answer is older than this
    ``fail_points``     ``None``: clients may set none here
    """

    def __init__(self, engine: Engine, *, rights_seconds: float, fail_points: FailPoints | None = None) -> None:
        self._engine = engine
        self._rights_seconds = rights_seconds
        self._fail_points = fail_points

    async def answered(self, connection: ClientConnection, command: ClientCommand) -> bool:
        """Answer a command; False if it is the server's."""
        if self._fail_points is not None and await self._is_struck(connection, command, self._fail_points):
            return True
        match command.name:
            case b"aggregate":
                return opens_stream(command.document) and await self._aggregate(connection, command)
            case b"getMore":
                return await self._get_more(connection, command)
            case b"killCursors":
                return await self._kill_cursors(connection, command)
            case b"killAllSessions" | b"killSessions" | b"killAllSessionsByPattern":
                return await self._kill_sessions(connection, command)
            case listing.NAME if command.database == "admin":
                return await self._list_streams(connection, command)
        return False

    async def _list_streams(self, connection: ClientConnection, command: ClientCommand) -> bool:
        await connection.answered()
        may = listing.may_list(await connection.identity(self._rights_seconds))
        reply = listing.listing(self._engine) if may else listing.refused()
        await connection.reply(command, self._engine.stamped(reply))
        return True

    async def _is_struck(self, connection: ClientConnection, command: ClientCommand, points: FailPoints) -> bool:
        """Set a fail point, or do what one does to a command; whether that was all."""
        if command.name == FAIL_POINT:
            await connection.answered()
            asked = bson.decode(command.document)
            reply = await connection.ask(bson.encode(points.for_server(asked)))  # the server decides who may set one
            if is_ok(reply):
                points.configure(asked)
            await connection.reply(command, reply)
            return True
        opens = command.name == b"aggregate" and opens_stream(command.document)
        fault = points.on_command(command.name.decode(), connection.app_name, opens_stream=opens)
        if fault is None:
            return False
        await connection.answered()
        await asyncio.sleep(fault.delay_ms / 1000)
        if fault.closes:
            raise ClosedConnection("a fail point closes it")
        if fault.reply is not None:
            await connection.reply(command, self._engine.stamped(fault.reply))
        return fault.reply is not None

    async def _aggregate(self, connection: ClientConnection, command: ClientCommand) -> bool:
        await connection.answered()
        if command.message.more_to_come:
            return False
        identity = await connection.identity(0)
        try:
            scope = await aside(len(command.document), _scope_of, command)
        except UsageError:
            # Nothing will be opened: the error is told to the same clients as the server would tell it.
            may = bool(identity.users) or identity.may_all
        else:
            may = identity.may_watch(scope)
        if not may:
            return False
        owner = Owner(identity.users, command.session)
        reply = await self._engine.aggregate(owner, command.database, command.document)
        await connection.reply(command, self._engine.stamped(reply))
        return True

    async def _get_more(self, connection: ClientConnection, command: ClientCommand) -> bool:
        cursor_id = cursor_asked(command.document)
        stream = None if cursor_id is None else self._engine.streams.get(cursor_id)
        if stream is None or not is_ordinary(command.document):
            return False
        await connection.answered()
        identity = await connection.identity(self._rights_seconds)
        if not identity.users and not identity.may_all:
            return False  # logged out, or the user was dropped
        try:
            GetMoreCommand.parse(command.database, command.document)
            _check_owner(stream, identity, command.session)
        except (UsageError, ServerError) as error:
            reply = self._engine.refused(error, in_stream=False)
        else:
            fault = None if self._fail_points is None else self._fail_points.on_get_more()
            if fault is not None and fault.reply is not None:
                self._engine.kill([stream])
                await connection.reply(command, self._engine.stamped(fault.reply))
                return True
            reply = await self._engine.get_more(stream, command.database, command.document)
        await connection.reply(command, self._engine.stamped(reply))
        return True

    async def _kill_cursors(self, connection: ClientConnection, command: ClientCommand) -> bool:
        try:
            wanted = cursors_to_kill(command.document)
        except UsageError:
            return False
        ours = [stream for stream in map(self._engine.streams.get, dict.fromkeys(wanted)) if stream is not None]
        if not ours:
            return False
        await connection.answered()
        identity = await connection.identity(self._rights_seconds)
        if not identity.users and not identity.may_all:
            return False
        if not all(_may_kill(identity, stream) for stream in ours):
            text = spaced_document_text(command.document)
            error = ServerError(f"not authorized on {command.database} to execute command {text}", code=_UNAUTHORIZED)
            await connection.reply(command, self._engine.stamped(self._engine.refused(error, in_stream=False)))
            return True
        killed = {stream.cursor_id for stream in ours}
        left = [one for one in wanted if one not in killed]
        self._engine.kill(ours)
        if left:
            theirs = await connection.ask(without_cursors(command.document, left))
            if not is_ok(theirs):
                await connection.reply(command, theirs)
                return True
            reply = merged_kills(wanted, killed, theirs)
        else:
            reply = kill_reply(wanted, [])
        await connection.reply(command, self._engine.stamped(reply))
        return True

    async def _kill_sessions(self, connection: ClientConnection, command: ClientCommand) -> bool:
        """The server decides whether this is allowed and closes its cursors; then we close ours of these sessions."""
        await connection.answered()
        identity = await connection.identity(self._rights_seconds)
        reply = await connection.ask(command.document)
        if is_ok(reply):
            self._engine.kill([one for one in self._engine.streams.values() if _is_meant(command, one, identity)])
        await connection.reply(command, reply)
        return True


def _scope_of(command: ClientCommand) -> Scope:
    return AggregateCommand.parse(command.database, command.document).scope


def _check_owner(stream: ServedStream, identity: Identity, session: bytes | None) -> None:
    """Raise ServerError 13 unless the cursor belongs to this user and session, and the user may still watch."""
    owner = stream.owner
    if owner.session != session or (session is not None and owner.users != identity.users):
        raise _wrong_session(stream, session, identity)
    if owner.users != identity.users:
        raise ServerError(f"cursor id {stream.cursor_id} was not created by the authenticated user", code=_UNAUTHORIZED)
    if not identity.may_watch(stream.scope):
        raise ServerError(f"not authorized for getMore with cursor id {stream.cursor_id}", code=_UNAUTHORIZED)


def _wrong_session(stream: ServedStream, session: bytes | None, identity: Identity) -> ServerError:
    """With users the server finds this while it checks rights; without, later and in other words."""
    opened, asked = _session_text(stream.owner.session, stream.owner.users), _session_text(session, identity.users)
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


def _may_kill(identity: Identity, stream: ServedStream) -> bool:
    return identity.users == stream.owner.users or identity.may_kill_any_cursor()


def _session_text(session: bytes | None, users: Iterable[User]) -> str:
    """As the server writes a session's id: the client's part, and a digest of its user."""
    if session is None:
        return "none"
    # Without a user the digest is that of nothing.
    name = "".join(f"{user}@{database}" for user, database in sorted(users))
    digest = base64.b64encode(hashlib.sha256(name.encode()).digest()).decode()
    return f"{_uuid_text(session)} - {digest} -  - "


def _uuid_text(session: bytes) -> str:
    # A binary value: its length, its subtype, its bytes.
    return str(uuid.UUID(bytes=session[5:21])) if len(session) == 21 and session[4] == _UUID else session.hex()


def _is_meant(command: ClientCommand, stream: ServedStream, identity: Identity) -> bool:
    """Whether a command that ends sessions ends that of a stream. A pattern is taken to mean every session: a stream
    that is closed without need is resumed by its driver, one that is not closed would stay."""
    try:
        asked = bson.decode(command.document)
    except BSONError:
        return False
    listed = asked.get(command.name.decode())
    if command.name != b"killSessions":
        if not listed or command.name == b"killAllSessionsByPattern":
            return True
        named = {(each.get("user"), each.get("db")) for each in listed if isinstance(each, dict)}
        return bool(stream.owner.users & named)
    element = raw_bson.find(command.document, b"killSessions")
    if element is None or stream.owner.session is None:
        return False
    array = raw_bson.value(command.document, element)
    ids = set()
    for each in raw_bson.elements(array):
        found = raw_bson.find(array, b"id", each.value_start) if each.type == raw_bson.OBJECT else None
        if found is not None:
            ids.add(array[found.value_start : found.end])
    return stream.owner.session in ids and stream.owner.users == identity.users
