"""Which deployment a uri leads to."""

from __future__ import annotations

from tailrace.lake.spark.planning.cluster import ClusterDeployment
from tailrace.lake.spark.planning.deployment import Deployment
from tailrace.lake.spark.planning.replica_set import ReplicaSetDeployment
from tailrace.lake.spark.query.options import ReadOptions
from tailrace.read.source.connection import open_client
from tailrace.read.source.topology import Cluster


def open_deployment(options: ReadOptions) -> Deployment:
    """What the uri leads to. Connects."""
    client = open_client(options.uri)
    try:
        cluster = Cluster.discover(client, options.uri, {})
        if cluster is not None:
            return ClusterDeployment(options, cluster, client)
        return ReplicaSetDeployment(options, client)
    except BaseException:
        client.close()
        raise
