"""Whether the server takes the gateway's clients for programs on its own machine.

A server that requires users and has none lets anybody who connects over the loopback address create the first one.
Through a gateway on the same machine, every client connects in that way, wherever it comes from.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
from typing import Any, Final

import bson

from tailrace.errors import SourceError
from tailrace.watch.gateway.frame import HEADER_SIZE, OpMsg, op_msg, parse_header
from tailrace.watch.gateway.upstream import Channel, Upstream

_ANSWER_S: Final = 10.0
_UNAUTHORIZED: Final = 13
_READ: Final = {"find": "system.version", "filter": {"_id": 0}, "limit": 1, "singleBatch": True, "$db": "admin"}
#: It creates nobody: a user has a name. Rights are checked before that.
_CREATE: Final = {"createUser": "", "pwd": "x", "roles": [], "$db": "admin"}
#: What a server says to a client that has to log in first, in any version and spelling.
_LOG_IN: Final = "requires authentication"

_log = logging.getLogger("tailrace.gateway")


async def refuse_first_users(upstream: Upstream, host: str) -> None:
    """Raise SourceError if clients of other machines, which reach a gateway that listens at ``host``, could create the
    first user. If only those of this machine reach it, say so in the log."""
    if not await _may_create_users(upstream):
        return
    found = "the server requires users and has none, and it would let every client of the gateway create the first one"
    if not _is_loopback(host):
        raise SourceError(found, hint="Create a user at the server first, or listen at 127.0.0.1 only")
    _log.warning("%s: create one before clients of other machines can reach the gateway", found)


async def _may_create_users(upstream: Upstream) -> bool:
    _, channel = await upstream.connect()
    try:
        async with asyncio.timeout(_ANSWER_S):
            refused = await _asked(channel, _READ)
            if refused.get("code") != _UNAUTHORIZED or _LOG_IN in str(refused.get("errmsg")).lower():
                return False
            return (await _asked(channel, _CREATE)).get("code") != _UNAUTHORIZED
    except (OSError, EOFError, TimeoutError):
        return False  # clients cannot ask it either
    finally:
        channel.writer.close()


async def _asked(channel: Channel, command: dict[str, Any]) -> dict[str, Any]:
    channel.writer.write(op_msg(bson.encode(command), request_id=1))
    await channel.writer.drain()
    head = await channel.reader.readexactly(HEADER_SIZE)
    rest = await channel.reader.readexactly(parse_header(head).length - HEADER_SIZE)
    return bson.decode(OpMsg.parse(head + rest).document)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
