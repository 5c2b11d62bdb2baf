"""A gateway of several processes with TLS gives what one process gives, and what the server gives."""

from __future__ import annotations

import os
import signal
import socket
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bson
import pymongo
import pytest
from bson.codec_options import CodecOptions
from bson.raw_bson import RawBSONDocument
from pymongo.errors import ServerSelectionTimeoutError

from tailrace.embedded import ReplicaSet
from tests import commands
from tests.gateway.connected import Connected, at_two_processes, process_of
from tests.gateway.running import GatewayProcess, eventually

pytestmark = pytest.mark.mongod

Client = pymongo.MongoClient[dict[str, Any]]
RAW: Any = CodecOptions(document_class=RawBSONDocument)
COMPUTES = {"$match": {"$expr": {"$eq": ["$operationType", "insert"]}}}


def arguments(certificates: Path, processes: int) -> tuple[str, ...]:
    return ("--processes", str(processes), "--tls-certificate-key-file", str(certificates / "server.pem"))


def trusting(certificates: Path) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(certificates / "ca.pem"))


def test_events_are_the_server_s_and_cursors_are_found_from_every_connection(
    certificates: Path, encrypted: str, start_gateway: Callable[..., GatewayProcess]
) -> None:
    """TLS to the clients and to the server."""
    gateways = [start_gateway(encrypted, *arguments(certificates, count)) for count in (1, 2)]
    one = [Connected(gateways[0].address, tls=trusting(certificates)) for _ in range(2)]
    pairs = [one, at_two_processes(gateways[1], tls=trusting(certificates))]
    with Client(encrypted) as direct, direct.processes.notes.with_options(RAW).watch() as native:
        direct.processes.notes.insert_one({"_id": -1})
        token = bson.decode(next(native).raw)["_id"]
        cursors = [
            (pair[1 - place], pair[place].opened(*stages, resumeAfter=token))
            for pair in pairs
            for place in range(2)
            for stages in ([], [COMPUTES])
        ]
        direct.processes.notes.insert_many([{"_id": number, "text": "x" * 50_000} for number in range(20)])
        wanted = [bytes(next(native).raw) for _ in range(20)]
        for other, cursor in cursors:
            got: list[bytes] = []
            while len(got) < 20:
                reply = RawBSONDocument(other.raw({"getMore": cursor, "collection": "notes", "maxTimeMS": 1000}))
                assert reply["ok"], reply
                got += [bytes(event.raw) for event in reply["cursor"]["nextBatch"]]
            assert got == wanted
        direct.drop_database("processes")
    for pair in pairs:
        for each in pair:
            each.close()


def test_who_is_trusted_is_as_with_one_process(
    certificates: Path, replica_set: ReplicaSet, start_gateway: Callable[..., GatewayProcess]
) -> None:
    found = []
    for count in (1, 2):
        gateway = start_gateway(
            replica_set.uri, *arguments(certificates, count), "--tls-ca-file", str(certificates / "ca.pem")
        )
        ours, other = (f"tls=true&tlsCAFile={certificates / name}" for name in ("ca.pem", "other.pem"))
        shown = f"&tlsCertificateKeyFile={certificates / 'server.pem'}"
        outcomes = []
        for options in ("", ours, other + shown, ours + shown):
            with Client(f"mongodb://{gateway.address}/?{options}", serverSelectionTimeoutMS=3000) as client:
                try:
                    outcomes.append(client.admin.command("ping")["ok"])
                except ServerSelectionTimeoutError:
                    outcomes.append("refused")
        found.append(outcomes)
    assert found[1] == found[0] == ["refused", "refused", "refused", 1.0]


def test_clients_count_before_their_handshake(
    certificates: Path, replica_set: ReplicaSet, start_gateway: Callable[..., GatewayProcess]
) -> None:
    gateway = start_gateway(
        replica_set.uri, *arguments(certificates, 2), "--connections-max", "3", "--metrics", "127.0.0.1:0"
    )
    silent = [socket.create_connection(gateway.host_and_port, timeout=300) for _ in range(2)]
    third = Connected(gateway.address, tls=trusting(certificates))
    assert third.command({"ping": 1}, "admin")["ok"]
    with pytest.raises(OSError, match=r".+"):
        Connected(gateway.address, tls=trusting(certificates))
    eventually(lambda: gateway.statistics()["connections_refused_total"] >= 1, "nobody is refused")
    for each in silent:
        each.close()

    def is_served() -> bool:
        try:
            Connected(gateway.address, tls=trusting(certificates)).close()
        except OSError:
            return False
        return True

    eventually(is_served, "those who have left still count")
    assert third.command({"ping": 1}, "admin")["ok"]
    third.close()


@pytest.mark.slow  # without TLS: test_processes.py; TLS by two processes: the tests above
def test_drivers_go_on_where_a_process_is_killed(
    certificates: Path, replica_set: ReplicaSet, start_gateway: Callable[..., GatewayProcess]
) -> None:
    gateway = start_gateway(replica_set.uri, *arguments(certificates, 2))
    uri = f"mongodb://{gateway.address}/?tls=true&tlsCAFile={certificates / 'ca.pem'}"
    with Client(replica_set.uri) as direct, Client(uri, directConnection=True) as client:
        streams = [client.processes.notes.watch(max_await_time_ms=200) for _ in range(4)]
        got: list[list[int]] = [[] for _ in streams]

        def take(until: int) -> None:
            for stream, mine in zip(streams, got, strict=True):
                while len(mine) < until:
                    event = stream.try_next()
                    if event is not None:
                        mine.append(event["documentKey"]["_id"])

        for turn in range(3):
            direct.processes.notes.insert_many([{"_id": number} for number in range(5 * turn, 5 * turn + 5)])
            take(5 * turn + 5)
            pair = at_two_processes(gateway, tls=trusting(certificates))
            killed = process_of(pair[turn % 2], gateway)
            os.kill(killed, signal.SIGKILL)
            for each in pair:
                each.close()
            eventually(lambda pid=killed: not Path(f"/proc/{pid}").exists(), "it is not noticed")
        assert got == [list(range(15))] * 4
        for stream in streams:
            stream.close()
        direct.drop_database("processes")


def test_a_certificate_that_cannot_be_used_is_told_as_by_one_process(certificates: Path, tmp_path: Path) -> None:
    away = ("gateway", "--upstream", "mongodb://127.0.0.1:1/?serverSelectionTimeoutMS=300", "--listen", "127.0.0.1:0")
    for wrong in (certificates / "ca.pem", tmp_path / "nothing.pem"):
        one, two = (
            commands.run(*away, "--processes", count, "--tls-certificate-key-file", str(wrong)) for count in ("1", "2")
        )
        assert one.returncode == two.returncode == 1
        assert one.stderr == two.stderr
        assert one.stderr.startswith(b"tailrace: ")
