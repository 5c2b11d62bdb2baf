"""What stands in for a mongos in an embedded sharded cluster: there is no wheel with one."""

from tailrace.embedded.sharding.catalog import Chunk, Table
from tailrace.embedded.sharding.connections import Clock
from tailrace.embedded.sharding.router import Router
from tailrace.embedded.sharding.transaction import Transaction, Written

__all__ = ["Chunk", "Clock", "Router", "Table", "Transaction", "Written"]
