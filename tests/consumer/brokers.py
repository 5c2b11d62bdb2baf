"""Servers on the loopback that a test can stop and start again with their data: Redis and NATS of this machine, and the
brokers inside Kafka's client."""

from __future__ import annotations

import ctypes
import shutil
import socket
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Self

import confluent_kafka
import pytest

from tailrace.embedded.ports import free_port


class Broker:
    """A server process on ``port``, its data in ``directory``."""

    program = ""

    def __init__(self, directory: Path) -> None:
        found = shutil.which(self.program, path="/usr/sbin:/usr/bin:/usr/local/bin:/bin:/sbin") or shutil.which(
            self.program
        )
        if found is None:
            pytest.skip(f"{self.program} is not installed (Debian: apt install {self.program})")
        self.directory = directory
        self.port = free_port()
        self._found = found
        self._process: subprocess.Popen[bytes] | None = None

    def arguments(self) -> list[str]:
        raise NotImplementedError

    def start(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        with (self.directory / "log").open("ab") as log:
            self._process = subprocess.Popen([self._found, *self.arguments()], stdout=log, stderr=log)
        deadline = time.monotonic() + 300
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
            except OSError:
                assert self._process.poll() is None, (self.directory / "log").read_text()
                assert time.monotonic() < deadline
                time.sleep(0.02)
            else:
                return

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


class RedisServer(Broker):
    program = "redis-server"

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def arguments(self) -> list[str]:
        where = ["--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.directory)]
        return [*where, "--appendonly", "yes", "--appendfsync", "always", "--save", ""]


class NatsServer(Broker):
    program = "nats-server"

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    def arguments(self) -> list[str]:
        return ["-a", "127.0.0.1", "-p", str(self.port), "-js", "-sd", str(self.directory)]


class KafkaBrokers:
    """The mock cluster of the librdkafka that Kafka's client is made of: three brokers on the loopback, with one topic,
    that can go away and come back with what they hold. Python's client has no calls for that, so those of librdkafka
    are used."""

    COUNT = 3

    def __init__(self, topic: str) -> None:
        package = Path(confluent_kafka.__file__).parent
        found = [*package.parent.glob("confluent_kafka.libs/librdkafka*"), *package.glob(".dylibs/librdkafka*")]
        if not found:
            pytest.skip("this build of confluent-kafka has librdkafka elsewhere")
        self._library = ctypes.CDLL(str(found[0]))
        for name in ("rd_kafka_conf_new", "rd_kafka_new", "rd_kafka_mock_cluster_new"):
            getattr(self._library, name).restype = ctypes.c_void_p
        self._library.rd_kafka_mock_cluster_bootstraps.restype = ctypes.c_char_p
        owner = self._library.rd_kafka_new(0, ctypes.c_void_p(self._library.rd_kafka_conf_new()), None, 0)
        self._owner = ctypes.c_void_p(owner)
        self._cluster = ctypes.c_void_p(self._library.rd_kafka_mock_cluster_new(self._owner, self.COUNT))
        assert self._library.rd_kafka_mock_topic_create(self._cluster, topic.encode(), 4, self.COUNT) == 0
        self.servers = str(self._library.rd_kafka_mock_cluster_bootstraps(self._cluster).decode())

    def start(self) -> None:
        for broker in range(1, self.COUNT + 1):
            assert self._library.rd_kafka_mock_broker_set_up(self._cluster, broker) == 0

    def stop(self) -> None:
        """Close the connections, and refuse new ones."""
        for broker in range(1, self.COUNT + 1):
            assert self._library.rd_kafka_mock_broker_set_down(self._cluster, broker) == 0

    def close(self) -> None:
        self._library.rd_kafka_mock_cluster_destroy(self._cluster)
        self._library.rd_kafka_destroy(self._owner)
