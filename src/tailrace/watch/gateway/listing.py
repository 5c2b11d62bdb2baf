"""What a gateway serves, as ``tailrace streams`` and administrators ask for it: the command ``tailraceStreams``."""

from __future__ import annotations

import os
import time
from datetime import UTC, datetime
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Final

import bson

from tailrace.core.cursor.reply import error_reply
from tailrace.errors import ServerError
from tailrace.watch.gateway.rights import Identity

if TYPE_CHECKING:
    from tailrace.watch.gateway.engine import Engine
    from tailrace.watch.gateway.opening import StreamOpening
    from tailrace.watch.gateway.served import ServedStream
    from tailrace.watch.gateway.stage_workers import StageWorker

NAME: Final = b"tailraceStreams"
_UNAUTHORIZED: Final = 13
_BEGUN: Final = time.time()


def may_list(identity: Identity) -> bool:
    """Whether a client may see the streams: it may if it may see every operation of the server (``inprog``)."""
    return identity.may_all or any(
        "inprog" in actions and bool(resource.get("cluster") or resource.get("anyResource"))
        for resource, actions in identity.privileges
    )


def refused() -> bytes:
    """The reply to a client that may not."""
    text = "not authorized on admin to execute command { tailraceStreams: 1 }: it takes the action inprog"
    return error_reply(ServerError(text, code=_UNAUTHORIZED), in_stream=False)


def listed(engine: Engine) -> dict[str, Any]:
    """Every open stream of this process, and the process itself. Resume tokens and pipelines are not shown."""
    tail = engine.tail_statistics()
    return {
        "streams": [
            *(_shown(stream) for stream in engine.streams.values()),
            *(_shown_opening(opening) for opening in engine.openings.values()),
        ],
        "gateway": {
            "pid": os.getpid(),
            "version": version("tailrace"),
            "startedAt": datetime.fromtimestamp(_BEGUN, UTC),
            "connections": engine.metrics.connections,
            "windowBytes": tail.window_bytes,
            "lagSeconds": tail.lag_seconds,
            "fallbacks": tail.fallbacks,
            "trouble": tail.trouble,
            "processes": [_process(worker) for worker in engine.workers.workers],
        },
    }


def merged(parts: list[dict[str, Any]]) -> bytes:
    """The reply: of all processes together, the one that answers first."""
    gateways = [part["gateway"] for part in parts]
    troubles = dict.fromkeys(one["trouble"] for one in gateways if one["trouble"] is not None)
    together = {
        **gateways[0],
        **{name: sum(one[name] for one in gateways) for name in ("connections", "windowBytes", "fallbacks")},
        "lagSeconds": max(one["lagSeconds"] for one in gateways),
        "trouble": "; ".join(troubles) or None,
        "processes": [process for one in gateways for process in one["processes"]],
    }
    if len(parts) > 1:
        together["pids"] = [one["pid"] for one in gateways]
    return bson.encode({"streams": [one for part in parts for one in part["streams"]], "gateway": together, "ok": 1.0})


def _shown(stream: ServedStream) -> dict[str, Any]:
    return {
        "cursor": bson.int64.Int64(stream.cursor_id),
        "ns": stream.namespace,
        "users": stream.owner.shown,
        "openedAt": datetime.fromtimestamp(stream.opened, UTC),
        "events": stream.events,
        "waiting": stream.is_busy,
        "opening": False,
        "computingSeconds": stream.computing_seconds,
        "process": None if stream.worker is None else stream.worker.pid,
    }


def _shown_opening(opening: StreamOpening) -> dict[str, Any]:
    """A stream that is being opened. Its number under ``cursor`` is what it is killed by."""
    return {
        "cursor": bson.int64.Int64(opening.number),
        "ns": opening.namespace,
        "users": opening.owner.shown,
        "openedAt": datetime.fromtimestamp(opening.begun, UTC),
        "events": 0,
        "waiting": False,
        "opening": True,
        "computingSeconds": opening.computing_seconds,
        "process": None if opening.worker is None else opening.worker.pid,
    }


def _process(worker: StageWorker) -> dict[str, Any]:
    """A process that computes stages. ``computing``: the namespace of the stream at which it is, even if that is only
    being opened."""
    current = worker.current
    return {
        "pid": worker.pid,
        "streams": len(worker.cursors),
        "cpuSeconds": worker.cpu,
        "computing": None if current is None else current.namespace,
        "computingSeconds": None if current is None else time.monotonic() - current.begun,
    }
