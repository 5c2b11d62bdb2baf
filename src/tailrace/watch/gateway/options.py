"""How a gateway serves its clients."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field

from tailrace.read.tail.shared_tail import WINDOW_BYTES
from tailrace.watch.gateway.frame import MESSAGE_SIZE_MAX
from tailrace.watch.gateway.stage_workers import StageLimits


@dataclass(frozen=True, slots=True)
class GatewayOptions:
    """How a gateway serves its clients.

    ``host``, ``port``     where it listens; port 0: a free one
    ``advertise``          the name and port by which clients reach it, ``host:port``; by default the address that each
                           has connected to
    ``as_mongos``          clients see a mongos and not the member of a replica set, so that they can be given several
                           gateways
    ``tls``                for client connections; ``None``: no TLS
    ``connections_max``    open client connections
    ``cursors_max``        open change streams
    ``cursors_per_user``   of one user, or of clients at one address where the deployment has no users. ``None``: four
                           fifths of ``cursors_max`` for a user
    ``message_bytes``      the longest message from a client
    ``memory_bytes``       for messages above 256 kB that are read whole, and for replies that are not taken yet
    ``window_bytes``       how much of the oplog's end is kept for streams that are behind
    ``stage_limits``       of the processes that compute users' stages
    ``handshake_seconds``  how long a client may take to send its first message
    ``stall_seconds``      how long a message, or a reply, may make no progress
    ``rights_seconds``     how old the server's answer about a client's rights may be
    ``answer_seconds``     how long a stop waits for streams that wait for the server
    ``stop_seconds``       how long a stop waits for what is under way
    ``test_commands``      clients may set fail points for the commands that are answered here
    """

    host: str = "127.0.0.1"
    port: int = 27017
    advertise: str | None = None
    as_mongos: bool = False
    tls: ssl.SSLContext | None = None
    connections_max: int = 20_000
    cursors_max: int = 20_000
    cursors_per_user: int | None = None
    message_bytes: int = MESSAGE_SIZE_MAX
    memory_bytes: int = 256 << 20
    window_bytes: int = WINDOW_BYTES
    stage_limits: StageLimits = field(default_factory=StageLimits)
    handshake_seconds: float = 30.0
    stall_seconds: float = 60.0
    rights_seconds: float = 2.0
    answer_seconds: float = 1.0
    stop_seconds: float = 5.0
    test_commands: bool = False
