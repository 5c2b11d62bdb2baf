"""Finding a cluster's servers: URIs of shards, the answers of a mongos, and no secret in any message."""

from __future__ import annotations

import pymongo
import pytest
from pymongo.uri_parser import parse_uri

from tailrace.errors import SourceError, UsageError
from tailrace.read.source.topology import Cluster, config_server_of, shard_uri

HOST = "rs1/h1:27018,h2:27019"


@pytest.mark.parametrize(
    ("uri", "expected"),
    [
        ("mongodb://cfg:1/?replicaSet=cfg", "mongodb://h1:27018,h2:27019/?replicaSet=rs1"),
        ("mongodb://cfg:1", "mongodb://h1:27018,h2:27019/?replicaSet=rs1"),
        ("mongodb://cfg?tls=true", "mongodb://h1:27018,h2:27019/?tls=true&replicaSet=rs1"),
        (
            "mongodb://u:p%40ss%2Fw@a,b:2/db?directConnection=true&authSource=admin&REPLICASET=x&tlsCAFile=%2Fca.pem",
            "mongodb://u:p%40ss%2Fw@h1:27018,h2:27019/db?authSource=admin&tlsCAFile=%2Fca.pem&replicaSet=rs1",
        ),
    ],
)
def test_a_shard_is_reached_as_the_cluster_was(uri: str, expected: str) -> None:
    assert shard_uri(uri, HOST) == expected
    assert parse_uri(expected, validate=False)["nodelist"] == [("h1", 27018), ("h2", 27019)]


@pytest.mark.parametrize("host", ["", "h1:27018", "rs1/", "/h1"])
def test_a_host_that_is_no_replica_set_is_refused_without_the_password(host: str) -> None:
    with pytest.raises(UsageError) as caught:
        shard_uri("mongodb://u:secret@cfg:1/", host)
    assert "secret" not in str(caught.value)


def test_a_mongos_says_where_its_config_server_is() -> None:
    shard_map = {"map": {"shA": "shA/127.0.0.1:1", "config": "cfg/127.0.0.1:27240"}, "hosts": {}, "ok": 1.0}
    assert config_server_of(shard_map, "the mongos") == "cfg/127.0.0.1:27240"


@pytest.mark.parametrize("shard_map", [{}, {"map": {}}, {"map": {"config": ""}}, {"map": {"config": 1}}])
def test_a_mongos_that_does_not_say_it_is_an_error(shard_map: dict[str, object]) -> None:
    with pytest.raises(SourceError, match="the mongos m"):
        config_server_of(shard_map, "the mongos m")


def test_an_empty_list_of_shards_is_refused() -> None:
    with pytest.raises(UsageError, match="empty"):
        Cluster.of_shards([], {})


def test_options_of_decoding_and_of_the_seeds_are_not_a_shard_s() -> None:
    options = {"tz_aware": True, "document_class": dict, "replicaSet": "x", "directConnection": True, "tls": False}
    cluster = Cluster("mongodb://u:secret@cfg:1/", options)
    client: pymongo.MongoClient[object] = cluster._opened(HOST)
    try:
        assert client.options.replica_set_name == "rs1"
        assert not client.options.codec_options.tz_aware
        assert client.options.pool_options._credentials is not None
    finally:
        cluster.close()
