"""The commands that the gateway answers: aggregate, getMore and killCursors of change streams.

If it is not certain of an answer, it sends the command to the server: a client that may not watch gets the server's own
refusal.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Container, Iterable
from contextlib import suppress
from typing import Final

import bson
from bson.errors import BSONError

from tailrace.core import raw_bson
from tailrace.core.cursor.aggregate import AggregateCommand
from tailrace.core.event.bson_text import spaced_document_text
from tailrace.core.oplog.namespace import Scope
from tailrace.errors import InternalError, ServerError, UsageError
from tailrace.watch.gateway import listing
from tailrace.watch.gateway.command import (
    FAIL_POINT,
    ClientCommand,
    cursor_asked,
    cursors_asked,
    opens_stream,
    sessions_ended,
    without_cursors,
)
from tailrace.watch.gateway.connection import ClientConnection
from tailrace.watch.gateway.cost import cost_of
from tailrace.watch.gateway.engine import Engine
from tailrace.watch.gateway.exchange import NO_CONSUMER, is_fatal, without_consumers
from tailrace.watch.gateway.fail_points import FailPoints
from tailrace.watch.gateway.frame import OpQuery
from tailrace.watch.gateway.generic_fields import is_plain_kill, times_of
from tailrace.watch.gateway.get_more_checks import FAR_S, check_owner, check_use
from tailrace.watch.gateway.line import LineClosedError
from tailrace.watch.gateway.memory import ClosedConnection
from tailrace.watch.gateway.opening import StreamOpening
from tailrace.watch.gateway.peers import Peers, PeerStream, lost_stream
from tailrace.watch.gateway.reading import aside
from tailrace.watch.gateway.repeated import GetMoreFacts, KnownGetMore, facts_of
from tailrace.watch.gateway.replies import code_of, is_ok, merged_kills
from tailrace.watch.gateway.reply_facts import reached
from tailrace.watch.gateway.rights import Identity, User
from tailrace.watch.gateway.served import Owner, ServedStream

_UNAUTHORIZED: Final = 13
_CURSOR_NOT_FOUND: Final = 43
_NOT_SUPPORTED: Final = 115
_NO_SUCH_MEMBER: Final = 133
_KILLING: Final = bson.encode({"info": "attempting to kill op", "ok": 1.0})
#: A collection that does not exist, for reads that return nothing.
_NOWHERE: Final = "tailrace.nowhere"


class Commands:
    """Answers commands of clients from the engine.

    ``rights_seconds``  at a getMore, rights are asked for again if the answer is older than this
    ``fail_points``     ``None``: clients may set none here
    ``peers``           the other processes of the gateway, which have streams too
    ``unmatched``       the read preference of a command, as text, if no member of the deployment can fulfil it; where
                        drivers do not choose the member themselves, because they see a mongos
    """

    def __init__(
        self,
        engine: Engine,
        *,
        rights_seconds: float,
        fail_points: FailPoints | None = None,
        unmatched: Callable[[bytes], str | None] = lambda command: None,
        peers: Peers | None = None,
    ) -> None:
        self._peers = peers or Peers()
        self._engine = engine
        self._unmatched = unmatched
        self._rights_seconds = rights_seconds
        self._fail_points = fail_points

    async def answered(self, connection: ClientConnection, command: ClientCommand) -> bool:
        """Answer a command; False if it is the server's."""
        if command.name == b"aggregate" and is_fatal(command.document):
            return await self._refuse_exchange(connection, command)
        if self._fail_points is not None and await self._is_struck(connection, command, self._fail_points):
            return True
        match command.name:
            case b"aggregate" | b"getMore":
                return await self._of_a_stream(connection, command)
            case b"killCursors":
                return await self._kill_cursors(connection, command)
            case b"killOp" if command.database == "admin":
                return await self._kill_operation(connection, command)
            case b"killAllSessions" | b"killSessions" | b"killAllSessionsByPattern":
                return await self._kill_sessions(connection, command)
            case b"endSessions":
                return await self._end_sessions(connection, command)
            case listing.NAME if command.database == "admin":
                return await self._list_streams(connection, command)
        return False

    async def _of_a_stream(self, connection: ClientConnection, command: ClientCommand) -> bool:
        try:
            if command.name == b"getMore":
                return await self._get_more(connection, command)
            is_ours = opens_stream(command.document, self._engine.version)
            return is_ours and await self._aggregate(connection, command)
        except asyncio.CancelledError:
            if self._engine.stopping is not None:  # it waits for a server that does not answer
                reply = self._engine.refused(self._engine.stopping)
                await connection.reply(command, self._engine.stamped(reply))
            raise

    async def _refuse_exchange(self, connection: ClientConnection, command: ClientCommand) -> bool:
        """Give the server's answer, unless the server would carry the command out, which would end its process."""
        if isinstance(command.message, OpQuery) and self._engine.version >= (6, 0):
            return False  # it refuses every such message
        reply = await connection.ask(without_consumers(command.document, command.database), may_take_long=True)
        if is_ok(reply) or code_of(reply) == NO_CONSUMER:
            error = ServerError(
                "'exchange' next to $changeStream would end the server's process; the gateway does not pass it on",
                code=_NOT_SUPPORTED,
            )
            reply = self._engine.stamped(self._engine.refused(error, in_stream=False))
        await connection.reply(command, reply)
        return True

    async def _list_streams(self, connection: ClientConnection, command: ClientCommand) -> bool:
        await connection.answered()
        may = listing.may_list(await connection.identity(self._rights_seconds))
        if may:
            reply = listing.merged([listing.listed(self._engine), *await self._peers.ask_all("listed")])
        else:
            reply = listing.refused()
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
        opens = command.name == b"aggregate" and opens_stream(command.document, self._engine.version)
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
        scope: Scope | None = None
        try:
            scope = await aside(len(command.document), _scope_of, command)
        except UsageError:
            # Nothing will be opened: the error goes to the same clients as the server's would.
            may = bool(identity.users) or identity.may_all
        else:
            may = identity.may_watch(scope)
        if not may:
            return False
        if (refusal := await self._refused_times(connection, command)) is not None:
            await connection.reply(command, refusal)
            return True
        if (preference := self._unmatched(command.document)) is not None:
            error = ServerError(
                f"the deployment behind this gateway has no member that matches the read preference {preference}",
                code=_NO_SUCH_MEMBER,
            )
            await connection.reply(command, self._engine.stamped(self._engine.refused(error, in_stream=False)))
            return True
        if (home := await self._home(connection, command)) is not None:
            with suppress(LineClosedError):  # then its stages are computed here
                return await self._elsewhere(home, connection, command, identity)
        owner = Owner(identity.users, command.session)
        host = connection.client_host
        reply = await self._engine.aggregate(owner, command.database, command.document, host, scope)
        if reply is None:
            return False
        await connection.reply(command, self._engine.stamped(reply))
        return True

    async def _home(self, connection: ClientConnection, command: ClientCommand) -> int | None:
        """The process in which the stages of this client's streams are computed, if it is another one, and if they are
        more than plain ones: a user has one process for them, whichever of ours has the connection."""
        home = None if connection.is_relayed else self._peers.home_of(connection.tenant)
        if home is None or (await aside(len(command.document), cost_of, command.document)).is_plain:
            return None
        return home

    async def _elsewhere(
        self, process: int, connection: ClientConnection, command: ClientCommand, identity: Identity
    ) -> bool:
        """Have another process carry a command out. Raises LineClosedError."""
        outcome = await self._peers.relayed(process, connection, command, identity)
        if outcome.rests:
            if isinstance(command, KnownGetMore) and command.facts is not None:
                facts = command.facts
            else:
                facts = facts_of(command, self._engine.version)
            connection.last_get_more.remember(command, facts)
            connection.rest()
        if outcome.reply is not None:
            await connection.reply(command, outcome.reply)
        return outcome.is_answered

    async def _get_more_elsewhere(
        self, asked: int | None, connection: ClientConnection, command: ClientCommand
    ) -> bool:
        process = None if asked is None else self._peers.having(asked)
        if process is None or connection.is_relayed:
            return False
        await connection.answered()
        identity = await connection.identity(self._rights_seconds)
        try:
            return await self._elsewhere(process, connection, command, identity)
        except LineClosedError:
            error = self._engine.stopping or lost_stream()
            await connection.reply(command, self._engine.stamped(self._engine.refused(error)))
            return True

    async def _found(self, numbers: Iterable[int]) -> dict[int, ServedStream | StreamOpening | PeerStream]:
        """The streams and openings of these numbers, here and in the other processes."""
        here = {number: one for number in numbers if (one := self._engine.found(number)) is not None}
        return {**here, **await self._peers.found(number for number in numbers if number not in here)}

    async def _kill(self, found: Iterable[ServedStream | StreamOpening | PeerStream]) -> None:
        listed = list(found)
        self._engine.kill([one for one in listed if not isinstance(one, PeerStream)])
        await self._peers.kill(one for one in listed if isinstance(one, PeerStream))

    async def _refused_times(self, connection: ClientConnection, command: ClientCommand) -> bytes | None:
        """The server's error for the cluster times of a command, if the server has to check them: a time that it may
        not have reached, for which it waits, or one that is far ahead."""
        known = self._engine.clock.time
        if isinstance(command, KnownGetMore) and command.cluster_time.seconds <= known.seconds + FAR_S:
            return None
        times = times_of(command.document)
        is_far = times.cluster.seconds > known.seconds + FAR_S
        if command.name != b"aggregate" or times.after <= known:
            if not is_far:
                return None
            question = _with_fields(bson.encode({"connectionStatus": 1, "$db": "admin"}), command, (b"$clusterTime",))
        else:
            element = raw_bson.find(command.document, b"aggregate")
            is_named = element is not None and element.type == raw_bson.STRING
            collection = _text(command.document, element) if is_named and element is not None else _NOWHERE
            concern = {
                "level": "majority",
                "afterClusterTime": bson.Timestamp(times.after.seconds, times.after.increment),
            }
            find = {
                "find": collection,
                "filter": {"_id": None},
                "limit": 1,
                "singleBatch": True,
                "readConcern": concern,
            }
            question = _with_fields(
                bson.encode({**find, "$db": command.database}), command, (b"$clusterTime", b"maxTimeMS")
            )
        reply = await connection.ask(question, may_take_long=True)
        return None if is_ok(reply) else reply

    async def _get_more(self, connection: ClientConnection, command: ClientCommand) -> bool:
        facts = command.facts if isinstance(command, KnownGetMore) else None
        asked = cursor_asked(command.document) if facts is None or facts.wanted is None else facts.wanted.cursor_id
        stream = None if asked is None else self._engine.streams.get(asked)
        if stream is None:
            return await self._get_more_elsewhere(asked, connection, command)
        facts = facts or facts_of(command, self._engine.version)
        await connection.answered()
        identity = await connection.identity(self._rights_seconds)
        if not identity.users and not identity.may_all:
            return False  # logged out, or the user was dropped
        reply = await self._refused_get_more(connection, stream, identity, command, facts)
        if reply is not None:
            await connection.reply(command, reply)
            return True
        fault = None if self._fail_points is None else self._fail_points.on_get_more()
        if fault is not None and fault.reply is not None:
            self._engine.kill([stream])
            await connection.reply(command, self._engine.stamped(fault.reply))
            return True
        connection.last_get_more.remember(command, facts)
        connection.rest()
        events = stream.events
        reply = await self._engine.get_more(stream, command.database, command.document, facts.wanted)
        if stream.events > events:
            reply = await self.if_still_allowed(connection, stream, command, reply)
        await connection.reply(command, self._engine.stamped(reply))
        return True

    async def if_still_allowed(
        self, connection: ClientConnection, stream: ServedStream, command: ClientCommand, reply: bytes
    ) -> bytes:
        """``reply``, whose events may have come after a long wait, or the refusal if the user's rights ended before
        they were written. The stream has gone on, so it is closed: it would have lost these events for a user who gets
        the right back."""
        identity = await connection.identity(self._rights_seconds, reached(reply))
        try:
            check_owner(stream, identity, command.session, self._engine.version)
        except ServerError as error:
            self._engine.kill([stream])
            return self._engine.refused(error, in_stream=False)
        return reply

    async def _refused_get_more(
        self,
        connection: ClientConnection,
        stream: ServedStream,
        identity: Identity,
        command: ClientCommand,
        facts: GetMoreFacts,
    ) -> bytes | None:
        """The error reply to a getMore that fails before it reaches its cursor.

        A getMore with unusual generic fields is sent to the server, which does not have the cursor. Any error other
        than CursorNotFound is about these fields.
        """
        version, wanted, error = self._engine.version, facts.wanted, facts.error
        if wanted is None or not facts.is_plain:
            theirs = await connection.ask(command.document)
            if code_of(theirs) != _CURSOR_NOT_FOUND or not facts.has_plain_session:
                return theirs
        if error is None and (refusal := await self._refused_times(connection, command)) is not None:
            return refusal
        try:
            if error is not None or wanted is None:
                raise error or InternalError("a command was neither understood nor refused")
            if version < (5, 0) and identity.may_all and wanted.namespace != stream.namespace:
                return None  # 4.4 checks this first; the code that carries out the command refuses it
            check_owner(stream, identity, command.session, version)
            check_use(stream, wanted, facts, version)
        except (UsageError, ServerError) as caught:
            return self._engine.stamped(self._engine.refused(caught, in_stream=False))
        return None

    async def _kill_cursors(self, connection: ClientConnection, command: ClientCommand) -> bool:
        wanted = cursors_asked(command.document)
        ours = await self._found(wanted)
        if not ours:
            return False
        await connection.answered()
        identity = await connection.identity(self._rights_seconds)
        if not identity.users and not identity.may_all:
            return False
        theirs: bytes | None = None
        if not is_plain_kill(command.document, self._engine.version):
            theirs = await connection.ask(command.document)  # it may refuse
        if theirs is None or is_ok(theirs):
            if not all(_may_kill(identity, one) for one in ours.values()):
                text = spaced_document_text(command.document)
                error = ServerError(
                    f"not authorized on {command.database} to execute command {text}", code=_UNAUTHORIZED
                )
                await connection.reply(command, self._engine.stamped(self._engine.refused(error, in_stream=False)))
                return True
            left = [one for one in wanted if one not in ours]
            if left and theirs is None:
                theirs = await connection.ask(without_cursors(command.document, left))
        if theirs is not None and not is_ok(theirs):
            await connection.reply(command, theirs)
            return True
        await self._kill(ours.values())
        await connection.reply(command, self._engine.stamped(merged_kills(wanted, set(ours), theirs)))
        return True

    async def _kill_operation(self, connection: ClientConnection, command: ClientCommand) -> bool:
        """End a stream, or its opening, by its number. A user who may not do that is refused by the server, which has
        no operation of such a number: its own have 32 bits."""
        asked = raw_bson.find(command.document, b"op")
        if asked is None or asked.type != raw_bson.INT64:
            return False
        number = raw_bson.read_int64(command.document, asked.value_start)
        found = (await self._found([number])).get(number)
        if found is None:
            return False
        await connection.answered()
        identity = await connection.identity(self._rights_seconds)
        is_own = bool(identity.users) and identity.users == found.owner.users
        if not is_own and not identity.may_kill_operations:
            return False
        await self._kill([found])
        await connection.reply(command, self._engine.stamped(_KILLING))
        return True

    async def _end_sessions(self, connection: ClientConnection, command: ClientCommand) -> bool:
        """Mark the streams of sessions that a client ends, if the server agrees. They are closed soon; the server does
        it at a check."""
        ended = sessions_ended(command.document)
        if not self.has_sessions(ended) and not any(await self._peers.ask_all("has_sessions", ended)):
            return False
        await connection.answered()
        users = (await connection.identity(self._rights_seconds)).users
        try:
            reply = await connection.ask(command.document)
        except asyncio.CancelledError:
            if not connection.server_left:  # the client has left: the server carries out what it was sent
                self.mark_ended(ended, users)
                await self._peers.ask_all("mark_ended", ended, users)
            raise
        if is_ok(reply):
            self.mark_ended(ended, users)
            await self._peers.ask_all("mark_ended", ended, users)
        await connection.reply(command, reply)
        return True

    def has_sessions(self, sessions: Container[bytes | None]) -> bool:
        """Whether a stream that is open here is of one of these sessions."""
        return any(one.owner.session in sessions for one in self._engine.streams.values())

    def mark_ended(self, sessions: Container[bytes | None], users: frozenset[User]) -> None:
        """Have the streams of these sessions closed soon."""
        for stream in self._engine.streams.values():
            if stream.owner.session in sessions and stream.owner.users == users:
                stream.is_ended = True

    async def _kill_sessions(self, connection: ClientConnection, command: ClientCommand) -> bool:
        """The server decides whether this is allowed and closes its cursors; then we close ours of these sessions."""
        await connection.answered()
        identity = await connection.identity(self._rights_seconds)
        reply = await connection.ask(command.document)
        if is_ok(reply):
            self.kill_of_sessions(command, identity)
            await self._peers.ask_all("kill_of_sessions", command, identity)
        await connection.reply(command, reply)
        return True

    def kill_of_sessions(self, command: ClientCommand, identity: Identity) -> None:
        """Close the streams whose sessions a command ends that the server has carried out for ``identity``."""
        self._engine.kill([one for one in self._engine.all_streams if _is_meant(command, one, identity)])


def _scope_of(command: ClientCommand) -> Scope:
    return AggregateCommand.parse(command.database, command.document).scope


def _with_fields(question: bytes, command: ClientCommand, names: Iterable[bytes]) -> bytes:
    """A command to the server with some fields of a client's command, unchanged."""
    found = (raw_bson.find(command.document, name) for name in names)
    return raw_bson.encode_document(
        question[4:-1], *(command.document[each.start : each.end] for each in found if each is not None)
    )


def _text(document: bytes, element: raw_bson.Element) -> str:
    return raw_bson.read_string(document, element.value_start).decode()


def _may_kill(identity: Identity, stream: ServedStream | StreamOpening | PeerStream) -> bool:
    return identity.users == stream.owner.users or identity.may_kill_any_cursor(stream.scope)


def _is_meant(command: ClientCommand, stream: ServedStream | StreamOpening, identity: Identity) -> bool:
    """Whether a command that ends sessions ends that of a stream. A pattern is taken to mean every session: a stream
    that is closed without need is resumed by its driver, one that is not closed would stay."""
    try:
        asked = bson.decode(command.document)
    except BSONError:
        return False
    listed = asked.get(command.name.decode())
    if stream.owner.session is None:
        return False  # the server's stay open, too
    if command.name != b"killSessions":
        if not listed or command.name == b"killAllSessionsByPattern":
            return True
        named = {(each.get("user"), each.get("db")) for each in listed if isinstance(each, dict)}
        return bool(stream.owner.users & named)
    # No session named means every one of the user.
    is_named = not listed or stream.owner.session in sessions_ended(command.document)
    return is_named and stream.owner.users == identity.users
