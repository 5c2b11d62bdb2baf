"""Which deployment a uri leads to."""

from __future__ import annotations

from tailrace.source.connection import open_client
from tailrace.source.topology import Cluster
from tailrace.spark.planning.cluster import ClusterDeployment
from tailrace.spark.planning.deployment import Deployment
from tailrace.spark.planning.replica_set import ReplicaSetDeployment
from tailrace.spark.source.options import ReadOptions


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
